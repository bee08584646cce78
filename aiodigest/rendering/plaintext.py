"""A digest as a message without any library: what is sent if there is no template, or if one fails."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from textwrap import fill
from typing import Any

from aiodigest import Digest
from aiodigest.rendering.formats import Formats
from aiodigest.rendering.message import Block, Message
from aiodigest.rendering.view import TIMES, Group, Item, View, view

SOON = timedelta(minutes=5)  # to a next digest that is not announced: it would have come before this is read
WIDTH = 78  # columns, as mail has had them for ever


def plain(digest: Digest[Any], *, now: datetime | None = None) -> Message:
    """Return a digest as a short plain text, with times in UTC; needs no library, and never raises.

    Parameters
    ----------
    digest : Digest
        What is shown: its first 20 records, where those that differ in numbers, ids, addresses and times alone are
        shown once.
    now : datetime, default None
        When it is read (aware): times of that day are shown without a date. None is the time of this call.
    """
    formats = Formats(now or datetime.now(UTC))
    try:
        seen = view(digest, formats)
        return Message(seen.subject, text_of(seen, formats), blocks=blocks_of(seen, formats))
    except Exception:  # of a value or a class of the user's; what it holds is in the store until it is delivered
        text = "There is news, which could not be shown."
        return Message("News", f"{text}\n", blocks=(Block("heading", "News"), Block("note", text)))


def text_of(view: View, formats: Formats) -> str:
    """Return a view as plain text."""
    parts = ["\n".join(filter(None, (view.heading, summary(view, formats))))]
    for group in view.groups:
        lines = [named(group, formats)] if group.name else []
        for item in group.items:
            lines.append(_wrapped(f"{titled(item, formats)} ({formats.when(item.time)})", "* "))
            lines += [_wrapped(each, "  ") for each in item.details.splitlines()]
        if group.more:
            lines.append(f"  {more(group, formats)}")
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *notes(view, formats), f"Times are in {zone_name(formats)}."]) + "\n"


def blocks_of(view: View, formats: Formats) -> tuple[Block, ...]:
    """Return a view as blocks for chat services."""
    told = summary(view, formats) + (f" ({zone_name(formats)})" if view.count else "")
    blocks = [Block("heading", view.subject, " · ".join(filter(None, (view.heading, told))))]
    for group in view.groups:
        if group.name:
            blocks.append(Block("heading", named(group, formats)))
        blocks += [Block("item", titled(item, formats), item.details) for item in group.items]
        if group.more:
            blocks.append(Block("note", more(group, formats)))
    return (*blocks, *(Block("note", note) for note in notes(view, formats)))


def summary(view: View, formats: Formats) -> str:
    """Return how many records there are, and from when: "12 updates, 14:02 to 14:40"."""
    told = f"{formats.number(view.count)} update{'s' * (view.count != 1)}"
    if view.since is None or view.until is None:
        return told
    since, until = formats.when(view.since), formats.when(view.until)
    return f"{told}, {since}" if since == until else f"{told}, {since} to {until}"


def named(group: Group, formats: Formats) -> str:
    """Return the name of a group, with the number of its records."""
    return f"{group.name} ({formats.number(group.count)})" if group.count > 1 else group.name


def titled(item: Item, formats: Formats) -> str:
    """Return the title of an item, with how often it came."""
    return f"{item.title} {TIMES} {formats.number(item.count)}" if item.count > 1 else item.title


def more(left: View | Group, formats: Formats) -> str:
    """Return how many records are left out: "and 37 more"."""
    return f"and {formats.number(left.more)} more" if left.more else ""


def notes(view: View, formats: Formats) -> Iterator[str]:
    """Yield what there is to tell besides: what was left out, and when the next digest comes."""
    if view.more:
        groups = f" in {formats.number(view.others)} other group{'s' * (view.others > 1)}" if view.others else ""
        yield more(view, formats) + groups
    if view.dropped:
        one = view.dropped == 1
        number = formats.number(view.dropped)
        yield f"{number} older {'one was' if one else 'ones were'} dropped: there were too many to keep."
    if view.next_due is not None and view.next_due - formats.now >= SOON:  # later by adds, earlier if many come
        yield f"Next update, if there is news: usually not before {formats.when(view.next_due)}."


def zone_name(formats: Formats) -> str:
    """Return the name of the reader's zone."""
    return str(getattr(formats.zone, "key", "") or formats.zone)


def _wrapped(text: str, first: str) -> str:
    indent = " " * len(first)
    return fill(
        text, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
