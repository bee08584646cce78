"""The command ``aiodigest``, on the public names alone: a command is a file or package, and listed in ``app.py``."""
