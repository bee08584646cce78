"""``aiodigest top``: options, screen and end (``command``), and looks at a namespace (``look``)."""
