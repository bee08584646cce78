"""Ctrl-C while the command ``aiodigest`` is still loading: the command ends at once and prints nothing.

The package imports this first. Loading the rest takes half a second; without this, a ``KeyboardInterrupt`` in that time
would print a traceback of the import machinery. In any program other than the command this does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import PurePath
from types import FrameType

INTERRUPTED = 130


def is_command(arguments: list[str], original: list[str]) -> bool:
    """True if this is the command. ``-m`` stands there only while ``python -m`` looks for the module to run."""
    if arguments[:1] == ["-m"]:
        return original[original.index("-m") + 1 :][:1] in (["aiodigest"], ["aiodigest.__main__"])
    return bool(arguments) and PurePath(arguments[0]).name in ("aiodigest", "aiodigest.exe")


def end(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def loaded() -> None:
    """Restore the usual Ctrl-C: from now on the command can handle it."""
    if signal.getsignal(signal.SIGINT) is end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command(sys.argv, sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
