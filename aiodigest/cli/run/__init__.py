"""``aiodigest run``: the service (``command``), and its probes and metrics over ``http``."""
