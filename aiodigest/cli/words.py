"""Text from strangers (keys, values, errors), made safe for people: nothing in it can play with a terminal."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import TextIO


def printable(text: str) -> str:
    """Return the text in one line: anything but visible characters and spaces is escaped (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int) -> str:
    """Return the printable text, cut at ``length`` characters."""
    text = printable(text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 1]}…"


def say(text: str) -> None:
    """Print one line on standard error, even if nobody is listening."""
    if sys.stderr is not None:  # it is None when closed by the caller
        with suppress(OSError, ValueError):
            print(f"aiodigest: {printable(text)}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """True if a standard stream is a terminal; it is None when closed by the caller."""
    return stream is not None and stream.isatty()


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 record``, ``2 records``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rfc3339(moment: datetime) -> str:
    """Format an aware UTC time as RFC 3339."""
    return moment.isoformat().replace("+00:00", "Z")


def as_json(value: object) -> str:
    """Format JSON as one line of plain ASCII, safe for terminals and for programs that split lines."""
    return json.dumps(value, separators=(",", ":"))
