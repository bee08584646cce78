"""Digests in the form that people and programs read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING

from aiodigest import JSON, Digest
from aiodigest.cli.words import as_json, count, printable, rfc3339, shortened

if TYPE_CHECKING:
    from rich.text import Text

SUMMARY = 200  # characters of a value in readable text
FIELD = 60  # characters of one field of it


def json_line(digest: Digest[JSON]) -> bytes:
    """Return a digest as a line of NDJSON.

    It goes record by record, so that another thread (the event loop, which renews the lease) gets its turn.
    """
    records = ",".join(
        as_json({"id": record.id, "timestamp": rfc3339(record.timestamp), "value": record.value})
        for record in digest.records
    )
    head = as_json({"id": digest.id, "key": digest.key, "attempt": digest.attempt, "dropped": digest.dropped})
    return f'{head[:-1]},"records":[{records}]}}\n'.encode()


def text_block(digest: Digest[JSON], ids: bool = True) -> bytes:
    """Return a digest for a person: its key, then a line a record, with its id if ``ids`` mean anything."""
    return f"{_text(digest, ids).plain}\n".encode()


def coloured_block(digest: Digest[JSON], ids: bool = True) -> bytes:
    """Return the same for a terminal, in colours unless NO_COLOR is set, no line longer than the terminal is wide."""
    from rich.console import Console

    file = StringIO()
    width = shutil.get_terminal_size().columns
    Console(file=file, force_terminal=True, width=width).print(_text(digest, ids), no_wrap=True, overflow="ellipsis")
    return file.getvalue().encode()


def _text(digest: Digest[JSON], ids: bool) -> Text:
    from rich.text import Text

    text = Text()
    text.append(printable(digest.key), "bold cyan").append(f": {count(len(digest.records), 'record')}")
    if digest.dropped:
        text.append(f" ({count(digest.dropped, 'older one')} dropped)", "red")
    if digest.attempt > 1:
        text.append(f" (attempt {digest.attempt})", "yellow")
    for record in digest.records:
        text.append(f"\n  {record.timestamp:%Y-%m-%d %H:%M:%S}  ", "dim")
        if ids:
            text.append(f"{shortened(record.id, FIELD)}  ", "dim")
        text.append(summary(record.value))
    return text


def summary(value: JSON, length: int = SUMMARY) -> str:
    """Shorten a value to the part a person wants first: an object's plain fields, then a mark for the others."""
    if not isinstance(value, dict):
        return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), length)
    nested = {name: field for name, field in value.items() if isinstance(field, dict | list)}
    plain = [f"{name}={_scalar(field)}" for name, field in value.items() if name not in nested]
    rest = [f"{name}={'{…}' if isinstance(field, dict) else f'[{len(field)}]'}" for name, field in nested.items()]
    return shortened(" ".join(plain + rest), length)


def _scalar(field: object) -> str:
    return shortened(field if isinstance(field, str) else json.dumps(field), FIELD)


Render = Callable[[Digest[JSON]], bytes]
