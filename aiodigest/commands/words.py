"""Text from strangers (keys, values, errors) on its way to people: nothing in it can play with a terminal."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import datetime
from typing import TextIO


def printable(text: str) -> str:
    """The text in one line: what is no visible character or space stands as its escape (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int) -> str:
    """The printable text, cut at ``length`` characters."""
    text = printable(text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 1]}…"


def say(text: str) -> None:
    """One line on standard error, whether anybody listens or not."""
    if sys.stderr is not None:  # it is None when closed by the caller
        with suppress(OSError, ValueError):
            print(f"aiodigest: {printable(text)}", file=sys.stderr, flush=True)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is one; it is None when closed by the caller."""
    return stream is not None and stream.isatty()


def count(number: int, noun: str) -> str:
    """``1 record``, ``2 records``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rfc3339(moment: datetime) -> str:
    """An aware UTC time as RFC 3339 has it."""
    return moment.isoformat().replace("+00:00", "Z")


def as_json(value: object) -> str:
    """JSON in one line of plain ASCII: no program that splits lines, and no terminal, finds anything else in it."""
    return json.dumps(value, separators=(",", ":"))
