"""The command ``aiodigest``. It uses only aiodigest's public names, like anybody's program."""
