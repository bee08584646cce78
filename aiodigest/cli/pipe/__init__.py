"""``aiodigest pipe``: options (``command``), lines parsed and fed to an engine, and the streams at both ends."""
