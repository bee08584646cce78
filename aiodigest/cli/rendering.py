"""Digests, timelines, dead letters and records as JSON for programs and as safe text for people.

Keys, values and errors come from strangers: nothing in them may control a terminal.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from io import StringIO
from typing import TYPE_CHECKING, Any

from aiodigest import JSON, DeadLetter, Digest, Record, Stats, Timeline

if TYPE_CHECKING:
    from rich.text import Text

VALUE_WIDTH = 200  # characters of a value in readable text
FIELD_WIDTH = 60  # characters of one field of it
RAW_WIDTH = 100  # characters of a value that is not JSON


def printable(text: str) -> str:
    """Return the text in one line, with all but visible characters and spaces escaped (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, length: int) -> str:
    """Return the printable text, cut at ``length`` characters."""
    text = printable(text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 1]}…"


def count(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 record``, ``2 records``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def readable_time(time: datetime | None) -> str:
    """Format a time for people."""
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def readable_value(value: JSON | bytes) -> str:
    """Shorten a value to what a person wants first: the plain fields of an object, then a mark for each other one."""
    if isinstance(value, bytes):
        return f"raw: {shortened(repr(value), RAW_WIDTH)}"
    if not isinstance(value, dict):
        return _readable_scalar(value, VALUE_WIDTH)
    nested = {name: field for name, field in value.items() if isinstance(field, dict | list)}
    plain = [f"{name}={_readable_scalar(field)}" for name, field in value.items() if name not in nested]
    rest = [f"{name}={'{…}' if isinstance(field, dict) else f'[{len(field)}]'}" for name, field in nested.items()]
    return shortened(" ".join(plain + rest), VALUE_WIDTH)


def _readable_scalar(value: JSON, length: int = FIELD_WIDTH) -> str:
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), length)


def record_rows(records: Sequence[Record[JSON | bytes]]) -> list[tuple[str, str, str]]:
    """Return id, time and value of each record, for people."""
    return [(record.id, readable_time(record.timestamp), readable_value(record.value)) for record in records]


def digest_text(digest: Digest[JSON], *, ids: bool = True) -> bytes:
    """Return a digest for people: its key, then a line per record, with its id if ``ids`` mean anything."""
    return f"{_digest_text(digest, ids).plain}\n".encode()


def digest_on_terminal(digest: Digest[JSON], *, ids: bool = True) -> bytes:
    """Return the same for a terminal, in colours unless NO_COLOR is set, no line longer than the terminal is wide."""
    from rich.console import Console

    file = StringIO()
    console = Console(file=file, force_terminal=True, width=shutil.get_terminal_size().columns)
    console.print(_digest_text(digest, ids), no_wrap=True, overflow="ellipsis")
    return file.getvalue().encode()


def _digest_text(digest: Digest[JSON], ids: bool) -> Text:
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
            text.append(f"{shortened(record.id, FIELD_WIDTH)}  ", "dim")
        text.append(readable_value(record.value))
    return text


def as_json(value: object) -> str:
    """Format JSON as one line of plain ASCII, safe for terminals and for programs that split lines."""
    return json.dumps(value, separators=(",", ":"))


def json_time(time: datetime | None) -> str | None:
    """Format an aware UTC time as RFC 3339."""
    return None if time is None else time.isoformat().replace("+00:00", "Z")


def digest_json(digest: Digest[JSON]) -> bytes:
    """Return a digest as a line of JSON.

    It is made record by record, so that another thread (the event loop, which renews the lease) gets its turn.
    """
    records = ",".join(as_json(record_json(record)) for record in digest.records)
    head = as_json({"id": digest.id, "key": digest.key, "attempt": digest.attempt, "dropped": digest.dropped})
    return f'{head[:-1]},"records":[{records}]}}\n'.encode()


def record_json(record: Record[JSON] | Record[JSON | bytes]) -> dict[str, Any]:
    """Return a record; bytes that are not an engine's JSON stand in base64 under ``raw`` instead of ``value``."""
    facts: dict[str, Any] = {"id": record.id, "timestamp": json_time(record.timestamp)}
    if isinstance(record.value, bytes):
        return {**facts, "raw": base64.b64encode(record.value).decode()}
    return {**facts, "value": record.value}


def stats_json(stats: Stats) -> dict[str, Any]:
    """Return the contents and the counters of a namespace."""
    return _facts(stats, *asdict(stats))


def timeline_json(timeline: Timeline[JSON], *, records: bool = False) -> dict[str, Any]:
    """Return a timeline, with its records if they are wanted."""
    names = "key", "state", "due", "size", "attempt", "iteration", "dropped", "cool_until", "digest_id", "last_error"
    return _facts(timeline, *names) | (_records(timeline.records) if records else {})


def dead_letter_json(letter: DeadLetter[JSON], *, records: bool = False) -> dict[str, Any]:
    """Return a dead letter, with its records if they are wanted."""
    facts = _facts(letter, "id", "key", "reason", "buried_at", "attempt", "digest_id") | {"size": len(letter.records)}
    return facts | (_records(letter.records) if records else {})


def _facts(value: object, *names: str) -> dict[str, Any]:
    values = {name: getattr(value, name) for name in names}
    return {name: json_time(one) if isinstance(one, datetime) else one for name, one in values.items()}


def _records(records: Sequence[Record[JSON | bytes]]) -> dict[str, Any]:
    return {"records": [record_json(record) for record in records]}
