"""Conversion of a line, of JSON or of text, to an entry of an engine. Pure: no I/O, no clock."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import nan
from string import Formatter
from typing import NoReturn
from uuid import uuid4

from aiodigest import JSON, Bounds, Entry
from aiodigest.cli.rendering import shortened

LONGEST_NAME = Bounds().name  # bytes of a key or an id
UNITS = 1, 1e3, 1e6, 1e9  # parts of a second
SECONDS_BELOW = 1e11  # of which a larger number is of a smaller unit: it would be the year 5138
NAMES = 20  # fields of a line that are told
SHOWN_TEXT = 200  # characters of a line
LONGEST_LINE = 8 * 1024 * 1024  # bytes; a value may have one MiB, but a line may be written wastefully


class Malformed(ValueError):
    """A line that cannot be added; the message gives the reason."""


class Unusable(Malformed):
    """A line that lacks a required field; ``has`` tells what it has instead."""

    def __init__(self, message: str, field: str, has: str) -> None:
        super().__init__(message)
        self.field = field
        self.has = has


class NoTime(Malformed):
    """A line whose time is not understood."""


@dataclass(frozen=True, slots=True)
class Path:
    """The path to a field of an object: ``payload.sender.login``, ``commits.0.id``."""

    text: str

    def __post_init__(self) -> None:
        if not all(self.text.split(".")):
            raise ValueError(f"{self.text!r} is not a field: write name, or name.of.a.nested.field")

    def find(self, value: JSON, path: str = "") -> JSON:
        """Find the field's value, or that of ``path``; None if there is none. A name may have dots itself."""
        path = path or self.text
        if isinstance(value, list):
            head, _, rest = path.partition(".")
            if not head.isascii() or not head.isdecimal() or int(head) >= len(value):
                return None
            return self.find(value[int(head)], rest) if rest else value[int(head)]
        if not isinstance(value, dict):
            return None
        if path in value:
            return value[path]
        names = path.split(".")
        for end in range(1, len(names)):
            inner = value.get(".".join(names[:end]))
            if (found := self.find(inner, ".".join(names[end:]))) is not None:
                return found
        return None


@dataclass(frozen=True, slots=True)
class Template:
    """A text with fields in it: ``{event}:{repository}``; or just one field, written without braces."""

    text: str
    parts: tuple[tuple[str, Path | None], ...]  # literal text, and the field that follows it

    @property
    def paths(self) -> list[list[str]]:
        """The names that lead to each of its fields."""
        return [path.text.split(".") for _, path in self.parts if path is not None]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template. ``{{`` and ``}}`` stand for braces. Raises ValueError if it is not one."""
        if "{" not in text and "}" not in text:
            return cls(text, (("", Path(text)),))
        try:
            pieces = list(Formatter().parse(text))
        except ValueError:
            raise ValueError(f"{text!r} is not a template: write {{field}} for a field, and {{{{ for a brace") from None
        for _, name, spec, conversion in pieces:
            if spec or conversion:
                raise ValueError(f"{text!r} is not a template: {{{name}}} takes no format")
        if all(name is None for _, name, _, _ in pieces):
            raise ValueError(f"{text!r} names no field: write {{name}}")
        return cls(text, tuple((literal, None if name is None else Path(name)) for literal, name, _, _ in pieces))

    def fill(self, value: JSON) -> str:
        """Fill the template with the fields of ``value``. Raises Unusable if one is missing or has parts."""
        texts: list[str] = []
        for literal, path in self.parts:
            texts.append(literal)
            if path is None:
                continue
            found = path.find(value)
            if found is None:
                raise Unusable(f"field {path.text} is missing or null", path.text, _fields(value))
            if isinstance(found, list | dict):
                kind = "a list" if isinstance(found, list) else "an object"
                message = f"field {path.text} is {kind}: it must be text, a number, true or false"
                raise Unusable(message, path.text, _fields(value))
            texts.append(found if isinstance(found, str) else json.dumps(found))
        return "".join(texts)


def _fields(value: JSON) -> str:
    names = [str(name) for name in value] if isinstance(value, dict) else []
    return f"the fields: {', '.join(names[:NAMES]) or '(none)'}{', ...' * (len(names) > NAMES)}"


def expression_of(text: str) -> re.Pattern[str]:
    """Return the regular expression whose group ``key``, or else the first, names the group of a line of text."""
    try:
        expression = re.compile(text)
    except re.error as error:
        raise ValueError(f"{shortened(text, 100)!r} is not a regular expression: {error}") from None
    if not expression.groups:
        raise ValueError(f"{shortened(text, 100)!r} has no group: put parentheses around what groups lines")
    return expression


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of a line that are its key, its id and its timestamp.

    With an ``expression`` a line is plain text, and its groups are the fields; its value is the text.
    """

    group: Template
    id: Template | None = None
    timestamp: Path | None = None
    expression: re.Pattern[str] | None = None

    @classmethod
    def of_text(cls, expression: re.Pattern[str], id: Template | None, timestamp: Path | None) -> Shape:
        """Make the shape of lines of plain text. Raises ValueError if it asks for a group that there is not."""
        paths = [path for _, path in id.parts if path is not None] if id else []
        for path in (*paths, *([timestamp] if timestamp else [])):
            if path.text not in expression.groupindex:
                raise ValueError(f"the expression of --group-by has no group (?P<{path.text}>...)")
        return cls(Template("key", (("", Path("key")),)), id, timestamp, expression)

    def entry(self, line: bytes) -> tuple[Entry[JSON], NoTime | None]:
        """Make an entry of a line. It always has an id, so that it can be added again. Raises Malformed.

        If its time is not understood, it has none, and the second answer says so.
        """
        if len(line) > LONGEST_LINE:
            raise Malformed(f"the line is longer than {LONGEST_LINE:,} bytes")
        fields, value = self._of_text(self.expression, line) if self.expression else _of_json(line)
        key = _name(self.group.fill(fields), "key", self.group)
        record = _name(self.id.fill(fields), "id", self.id) if self.id else uuid4().hex
        try:
            return Entry(key, value, record, time_of(self.timestamp, fields) if self.timestamp else None), None
        except NoTime as problem:
            return Entry(key, value, record), problem

    def _of_text(self, expression: re.Pattern[str], line: bytes) -> tuple[JSON, JSON]:
        """Return the fields and the text of a line."""
        text = line.decode("utf-8-sig", "backslashreplace").rstrip("\r")
        found = expression.search(text)
        key = found["key" if "key" in expression.groupindex else 1] if found else None
        if found is None or key is None:
            has = f"the text: {shortened(text, SHOWN_TEXT)}"
            raise Unusable("the expression of --group-by does not match", "key", has)
        return {**found.groupdict(), "key": key}, text


def _of_json(line: bytes) -> tuple[JSON, JSON]:
    """Return the object in a line, twice."""
    try:
        value: JSON = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise Malformed(f"it is not JSON: {error.msg} (column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise Malformed(f"it is not UTF-8 (byte {error.start + 1})") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Malformed("it is not a JSON object")
    return value, value


def _name(text: str, what: str, template: Template) -> str:
    """Return a key or an id that an engine takes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Malformed(f"the {what} ({template.text}) is not text: half of a surrogate pair is in it") from None
    if not 1 <= size <= LONGEST_NAME:
        raise Malformed(f"the {what} ({template.text}) must take 1 to {LONGEST_NAME} bytes, not {size}")
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def time_of(path: Path, value: JSON) -> datetime | float | None:
    """Return the time in a field; None, meaning the time of arrival, if there is none. Raises NoTime.

    It is ISO 8601, taken as UTC if it names no zone, or a number since the epoch (text or not, as journald's) of
    seconds, or, by its size, of milliseconds, microseconds or nanoseconds.
    """
    found = path.find(value)
    if found is None:
        return None
    with suppress(ValueError, OverflowError, TypeError):
        if isinstance(found, str):
            with suppress(ValueError):
                time = datetime.fromisoformat(found.strip())
                return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if not isinstance(found, bool | list | dict):
            number = float(found)
            seconds = number / next((unit for unit in UNITS if abs(number) < SECONDS_BELOW * unit), nan)
            datetime.fromtimestamp(seconds, UTC)  # it is one that a record can have
            return seconds
    raise NoTime(f"field {path.text} must be a time, not {shortened(json.dumps(found), 60)}")
