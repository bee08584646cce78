"""The command ``aiodigest``. It uses the public names of aiodigest, as anybody's program would."""
