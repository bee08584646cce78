"""Views of digests, for templates: items with a title and details, in groups, alike ones once, and no more than fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from typing import Any, Literal, TypeAlias, cast

from aiodigest import Digest, Record
from aiodigest.rendering.formats import Formats
from aiodigest.rendering.texts import WIDE, clean, cut, entries, label, line, masked, says_something, simple, told

Collapse: TypeAlias = Literal["equal", "similar"]

TITLE, DETAILS, NAME = 200, 500, 80  # characters
TIMES = "\N{MULTIPLICATION SIGN}"  # before how often an item came
FEW = 3  # items that a group shows at least, if it has them
LOOKED_AT = 2_000  # records; of more, the rest is only counted

# The fields whose values read as a sentence, the best first; those that say more of it; and those that name an event.
TITLES = ("title", "subject", "headline", "summary", "message", "msg", "text", "name", "label")
TEXTS = ("summary", "message", "msg", "text", "description", "body", "content", "comment")
KINDS = ("event", "type", "kind", "action", "status", "state")
INNER = ("title", "subject", "headline", "summary", "message")  # as titles, further down in a value
SENTENCES = (". ", "! ", "? ")  # how they end
TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*")


@dataclass(frozen=True)
class Item:
    """One record, or several that are alike, as one line: ``title``, with ``details``: more text, and below it fields.

    ``time`` is the record's, and of several that of the latest; ``since`` is the earliest, and ``count`` their number.
    ``group`` is the group's name, ``id`` the record's. ``value`` is the whole value, as dicts, lists, numbers and
    texts, made harmless and cut to a bounded size.
    """

    title: str
    details: str
    time: datetime
    since: datetime
    id: str = ""
    group: str = ""
    count: int = 1
    _value: Any = field(default=None, repr=False)

    @cached_property
    def value(self) -> Any:
        return simple(self._value)

    def at(self, path: str) -> Any:
        """Return what is at a path of the value, such as "issue.title"; None if it is not there."""
        return at(self._value, path)


class Some(tuple[Item, ...]):
    """The first of several items; ``more`` is the number of records that are left out."""

    more: int = 0


@dataclass(frozen=True)
class Group:
    """The ``items`` that share a ``name``; ``count`` is the number of their records, ``more`` of those left out."""

    name: str
    items: Sequence[Item]
    count: int
    more: int = 0


@dataclass(frozen=True)
class View:
    """A digest for templates: its own fields, and what is shown of its records.

    ``count`` is the number of its records, ``more`` of those in groups that are not shown, which are ``others``.
    ``heading`` is the key, unless it is an address or an id. ``since`` and ``until`` are the times of the first and
    the last record. ``items`` are all records that were looked at, one each.
    """

    key: str
    id: str
    attempt: int
    iteration: int
    dropped: int
    next_due: datetime | None
    count: int
    heading: str
    subject: str
    groups: Sequence[Group]
    more: int
    others: int
    items: Sequence[Item]
    since: datetime | None
    until: datetime | None


def view(
    digest: Digest[Any],
    formats: Formats,
    *,
    by: str | Callable[[Any], object] | None = None,
    alike: Collapse | None = "similar",
    most: int = 20,
    chosen: Sequence[str] | None = None,
) -> View:
    """Return what is shown of a digest: at most ``most`` items, in groups ``by`` a field or a function of the value."""
    records, count = digest.records, len(digest.records)
    items = tuple(items_of(digest, formats, by, chosen))
    largest_first = sorted(group_by(items), key=lambda group: -group.count)
    groups = [replace(group, items=collapse(group.items, alike)) for group in largest_first]
    shown = list[Group]()
    for group, share in zip(groups, shares([len(group.items) for group in groups], most), strict=False):
        some = top(group.items, share)
        shown.append(replace(group, items=some, more=some.more))
    key = line(str.__str__(digest.key), NAME)
    heading = key if says_something(key) else ""  # an address or an id tells its reader nothing
    return View(
        key=key,
        id=line(str.__str__(digest.id), NAME),
        attempt=digest.attempt,
        iteration=digest.iteration,
        dropped=digest.dropped,
        next_due=digest.next_due,
        count=count,
        heading=heading,
        subject=subject_of(groups, heading, count, formats),
        groups=shown,
        more=count - sum(group.count for group in shown),
        others=len(groups) - len(shown),
        items=items,
        since=records[0].timestamp if records else None,
        until=records[-1].timestamp if records else None,
    )


def subject_of(groups: Sequence[Group], heading: str, count: int, formats: Formats) -> str:
    """Return what a digest is about, in one line: its first item, and how many records there are besides."""
    first = next((item for group in groups for item in group.items), None)
    if first is None:
        return f"{heading}: nothing new" if heading else "Nothing new"
    times = f" {TIMES} {formats.number(first.count)}" if first.count > 1 else ""
    others = f" and {formats.number(count - first.count)} more" if count > first.count else ""
    about = ": ".join(name for name in (heading, first.group) if name and name not in first.title)
    return cut(f"{about}: {first.title}" if about else first.title, 120) + times + others


def shares(sizes: Sequence[int], most: int) -> list[int]:
    """Divide ``most`` places among groups of these ``sizes``: each of the first ones gets what it needs, or three and
    an equal share of what is left; there may be places for some of them only."""
    needed, count = 0, 0
    for size in sizes:
        needed += min(size, FEW)
        count += needed <= most
    sizes = sizes[: max(1, count)]
    given = [0] * len(sizes)
    for done, place in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        given[place] = min(sizes[place], most // (len(sizes) - done))
        most -= given[place]
    return given


# Functions of items, which are filters of templates too


def group_by(items: Iterable[Item], by: str | None = None) -> list[Group]:
    """Put items into groups, in the order in which these begin: ``by`` a field, or as it was chosen for the digest."""
    groups = dict[str, list[Item]]()
    for item in items:
        name = item.group if by is None else _name(item.at(by))
        groups.setdefault(name, []).append(item)
    return [Group(name, some, sum(item.count for item in some)) for name, some in groups.items()]


def collapse(items: Iterable[Item], alike: Collapse | None = "similar") -> list[Item]:
    """Put together what reads alike: the latest in the place of the first, with the ``count`` of all of them.

    "similar" ones differ in numbers, ids, addresses and times alone. Items of different groups are never alike.
    """
    found = dict[object, Item]()
    for number, item in enumerate(items):
        text = f"{item.title}\n{item.details}"
        mark = number if alike is None else (item.group, masked(text) if alike == "similar" else text)
        if (same := found.get(mark)) is not None:
            latest = item if item.time >= same.time else same
            since = min(same.since, item.since)
            item = replace(latest, since=since, count=same.count + item.count)
        found[mark] = item
    return list(found.values())


def top(items: Iterable[Item], most: int) -> Some:
    """Return the first ``most`` items, with the number of records that are left out as ``more``."""
    items = tuple(items)
    some = Some(items[: max(0, most)])
    some.more = sum(item.count for item in items[max(0, most) :])
    return some


# From a value to an item


def items_of(
    digest: Digest[Any],
    formats: Formats,
    by: str | Callable[[Any], object] | None = None,
    chosen: Sequence[str] | None = None,
) -> Iterator[Item]:
    """Yield the records of a digest as items; what cannot be read says so, and the others are read."""
    for record in islice(digest.records, LOOKED_AT):
        group = _name(by(record.value)) if callable(by) else ""
        try:
            if isinstance(by, str):
                group = _name(at(record.value, by))
            title, details = words(record, {digest.key, record.id, group}, formats, chosen)
        except Exception:  # of a value of the user's
            title, details = f"a {line(type(record.value).__name__, NAME)}", ""
        yield Item(
            title or "(empty)",
            details,
            record.timestamp,
            record.timestamp,
            line(str(record.id), NAME),
            group,
            1,
            record.value,
        )


def _name(found: object) -> str:
    return told(found, NAME) if found is not None and found != "" else "other"


def at(value: object, path: str) -> Any:
    """Return what is at a path of a value, such as "issue.title"; None if it is not there."""
    found = entries(value)
    if found is None:
        if isinstance(value, list | tuple) and path.isdecimal() and len(path) < 6:
            several = cast("Sequence[object]", value)
            return several[int(path)] if int(path) < len(several) else None
        return None
    if path in found:
        return found[path]
    first, _, rest = path.partition(".")
    return at(found.get(first), rest) if rest else None


def words(record: Record[Any], known: set[str], formats: Formats, chosen: Sequence[str] | None) -> tuple[str, str]:
    """Return the title and the details of a record: of ``chosen`` fields, else of those that read well.

    What is ``known`` already, as the key is, is not said again.
    """
    value = record.value
    if chosen:
        there = [(name, each) for name in chosen if (each := at(value, name)) is not None]
        title = "".join(_one(None, each, formats) for _, each in there[:1])
        return cut(title, TITLE), cut(", ".join(_one(name, each, formats) for name, each in there[1:]), DETAILS)
    found = entries(value)
    if found is None:
        return _split(value)
    fields = {str(name): each for name, each in found.items() if _is_news(each, known)}
    spelt = {name.lower(): name for name in fields}

    def taken(names: Sequence[str], most: int) -> list[str]:
        there = [spelt[name] for name in names if _reads(fields.get(spelt.get(name, "")))]
        return [fields.pop(name) for name in there[:most]]

    if heads := taken(TITLES, 1):
        title, rest = _split(heads[0])
    else:
        title, rest = " ".join(line(each, NAME) for each in taken(KINDS, 2)), ""
        if inner := _inner(found):
            title = f"{title}: {inner}" if title else inner
    texts = [rest, *(line(each, DETAILS) for each in taken(TEXTS, len(TEXTS)))]
    flat = [(name, each) for name, each in fields.items() if not isinstance(each, Mapping)]
    named = ", ".join(_one(name, each, formats) for name, each in (flat if title or flat else [*fields.items()])[:8])
    details = "\n".join(cut(part, DETAILS) for part in (" ".join(filter(None, texts)), named) if part)
    return (cut(title, TITLE), details) if title else (line(details, TITLE), "")


def _is_news(value: object, known: set[str]) -> bool:
    return value is not None and value != "" and not (isinstance(value, str) and value in known)


def _reads(value: object) -> bool:
    return isinstance(value, str) and bool(line(value, NAME))


def _split(value: object) -> tuple[str, str]:
    """Return the first line of a text, and the others in one; of a long line, only its first sentences."""
    if not isinstance(value, str):
        return told(value, TITLE), ""
    first, _, rest = clean(str.__str__(value), TITLE + DETAILS).strip().partition("\n")
    first, rest = line(first), line(rest)
    if len(first) > TITLE and (end := max(first.rfind(mark, 0, TITLE) for mark in SENTENCES)) > 0:
        first, rest = first[: end + 1], f"{first[end + 2 :]} {rest}".strip()
    return cut(first, TITLE), rest


def _one(name: str | None, value: object, formats: Formats) -> str:
    """Return a field as "name: value", times as the reader's clock has them."""
    time = isinstance(value, datetime) or (isinstance(value, str) and len(value) < 40 and TIME.fullmatch(value))
    text = (formats.when(value) if time else "") or told(value, DETAILS)
    return text if name is None else f"{label(name)}: {text}"


def _inner(value: Mapping[Any, Any]) -> str:
    """Return the text that reads as a title in the JSON that a value holds, one to three levels down."""
    level: Sequence[Mapping[Any, Any]] = [value]
    for _ in range(3):
        inner: Iterator[Any] = (one for each in level for one in islice(each.values(), WIDE))
        level = [cast("dict[Any, Any]", one) for one in inner if isinstance(one, dict)][:WIDE]
        for name in INNER:
            for each in level:
                if _reads(each.get(name)):
                    return line(each[name], TITLE)
    return ""
