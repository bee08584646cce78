"""The calls of an engine to its backend, and the tasks behind them."""
