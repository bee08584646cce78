"""The command ``aiodigest``, on the public names alone: a command is the file or package of its name, or one of those
in ``timelines.py``, and is listed in ``app.py``; an option stands in the file of its command, or in ``options.py``.
"""
