"""``aiodigest pipe``: options (``command``), lines read, parsed and fed to an engine, and digests written."""
