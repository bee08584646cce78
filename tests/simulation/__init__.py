"""Engines and schedulers on a simulated network, in virtual time, under faults that a seed decides."""
