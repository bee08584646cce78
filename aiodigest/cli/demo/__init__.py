"""``aiodigest demo``: the player (``command``), the events that it plays (``story``), and how they are shown."""
