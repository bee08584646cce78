"""``aiodigest top``: options and loop (``command``), one look at a namespace, and its picture (``screen``)."""
