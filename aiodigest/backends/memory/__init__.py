"""The reference state machine in pure Python, and the backend on it."""
