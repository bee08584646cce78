"""Digests and views as JSON for programs, and as text for people: nothing from strangers may control a terminal."""

from __future__ import annotations

import base64
import json
import shutil
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from typing import Any, Literal

from aiodigest import JSON, DeadLetter, Digest, Record, Timeline

JOINERS = "\u200c\u200d\xad"  # within words of many scripts and within emoji; and hyphens for the end of a line
VALUE_WIDTH = 200  # characters of a value in readable text
FIELD_WIDTH = 60  # characters of one field of it
LINE_WIDTH = 4_000  # characters of a line, whatever is in it
TEXT_WIDTH = 100  # columns of a digest, where there is no terminal that has a width
RAW_WIDTH = 100  # characters of a value that is not JSON


def printable(text: str) -> str:
    """Return the text in one line, as it is written but for what may control a terminal (``\\x1b``, ``\\u202e``)."""
    if text.isprintable():
        return text
    return "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode() for c in text)


def _is_harmless(character: str) -> bool:
    return character.isprintable() or character in JOINERS or unicodedata.category(character) == "Zs"


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


def digest_text(
    digest: Digest[JSON],
    *,
    fields: Sequence[str] | None = None,
    alike: Literal["similar", "equal"] | None = "similar",
    tz: str | None = None,
    on_terminal: bool = False,
) -> bytes:
    """Return a digest for people: its key, then ``fields`` of each record, or of several that are ``alike``, with times
    of a time zone (None is UTC).

    For a terminal it is in colours unless NO_COLOR is set, and no line is longer than the terminal is wide.
    """
    from rich.text import Text

    from aiodigest.rendering.formats import Formats, zone
    from aiodigest.rendering.plaintext import more, summary, titled, zone_name
    from aiodigest.rendering.texts import cut
    from aiodigest.rendering.view import LOOKED_AT, view

    formats = Formats(datetime.now(UTC), zone(tz or "UTC"))
    width = shutil.get_terminal_size().columns if on_terminal else TEXT_WIDTH
    seen = view(digest, formats, most=LOOKED_AT, chosen=fields, alike=alike)
    text = Text()
    text.append(shortened(digest.key, LINE_WIDTH), "bold cyan").append(
        f": {summary(seen, formats)} {zone_name(formats)}"
    )
    if digest.dropped:
        text.append(f" ({count(digest.dropped, 'older one')} dropped)", "red")
    if digest.attempt > 1:
        text.append(f" (attempt {digest.attempt})", "yellow")
    items = [item for group in seen.groups for item in group.items]
    times = [formats.when(item.time) for item in items]
    column = max(map(len, times), default=0)
    for item, time in zip(items, times, strict=True):
        often = titled(replace(item, title=""), formats)
        title = cut(item.title, max(20, width - column - 4 - len(often))) + often
        details = "".join(f" · {line}" for line in item.details.splitlines())
        text.append(f"\n  {time:{column}}  ", "dim").append(title)
        if (room := width - column - 4 - len(title)) > len(" · …"):
            text.append(cut(details, room), "dim")
    if seen.more:
        text.append(f"\n  {more(seen, formats)}")
    if not on_terminal:
        return f"{text.plain}\n".encode()
    from rich.console import Console

    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width)
    console.print(text, no_wrap=True, overflow="ellipsis")
    return file.getvalue().encode()


def without(digest: Digest[JSON], paths: Sequence[Sequence[str]]) -> Digest[JSON]:
    """Return a digest whose values lack the fields at ``paths``, which its key tells already."""
    records = [replace(record, value=_without(record.value, paths)) for record in digest.records]
    return replace(digest, records=records)


def _without(value: JSON, paths: Sequence[Sequence[str]]) -> JSON:
    if not isinstance(value, dict):
        return value
    gone = {name for name, *rest in paths if not rest}
    inner = {name: [rest for first, *rest in paths if first == name and rest] for name, *_ in paths}
    left = {name: _without(field, inner[name]) if name in inner else field for name, field in value.items()}
    return {name: field for name, field in left.items() if name not in gone and (field != {} or value[name] == {})}


def as_json(value: object) -> str:
    """Format JSON, UTC times included, as one line of ASCII that is safe for terminals and for splitters of lines."""
    return json.dumps(value, separators=(",", ":"), default=lambda time: time.isoformat().replace("+00:00", "Z"))


def digest_json(digest: Digest[JSON]) -> bytes:
    """Return a digest as a line of JSON, as channels write it."""
    from aiodigest.channels.local import as_json

    return as_json(digest, lambda value: value)


def record_json(record: Record[JSON] | Record[JSON | bytes]) -> dict[str, Any]:
    """Return a record; bytes that are not an engine's JSON stand in base64 under ``raw`` instead of ``value``."""
    value = record.value
    shown = {"raw": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"value": value}
    return {"id": record.id, "timestamp": record.timestamp, **shown}


def view_json(view: Timeline[JSON] | DeadLetter[JSON], *, records: bool = False) -> dict[str, Any]:
    """Return a timeline or a dead letter, with its records if they are wanted."""
    facts = {name: value for name, value in vars(view).items() if name != "records"}
    if isinstance(view, DeadLetter):
        facts["size"] = len(view.records)
    return {**facts, "records": [record_json(record) for record in view.records]} if records else facts
