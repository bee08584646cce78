"""Checks of a namespace's servers, and of its contents there: ``DigestEngine.examine``."""
