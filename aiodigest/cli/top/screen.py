"""The picture of one look, as rich draws it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import zip_longest

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aiodigest import JSON, Stats, Timeline
from aiodigest.cli.rendering import count, printable
from aiodigest.cli.top.look import COUNTERS, Look, due_in_words, server_time

HEAD = 10  # lines above the first timeline
STYLES = {"ready": "yellow", "leased": "cyan", "waiting": ""}  # in the order in which they are shown


def frame(title: str, look: Look, rates: dict[str, float] | None, lines: int | None, hint: str = "") -> Group:
    """Draw a look in at most so many lines; all of it, if None."""
    head = _line().append(printable(title), "bold").append(f"  {look.time:%H:%M:%S} UTC")
    if hint:
        head.append(f"  {hint}", "dim")
    if look.stats is None:
        return Group(head, Text(printable(look.health.reason), "bold red"), Text("trying again", "dim"))
    found = look.timelines if lines is None else fitting(look.timelines, lines - HEAD)
    parts: list[RenderableType] = [
        head,
        _health(look),
        Text(),
        _contents(look.stats),
        Text(),
        _counters(look.stats, rates),
    ]
    return Group(*parts, *([Text(), _timelines(found, server_time(look))] if found else []))


def _health(look: Look) -> Text:
    if look.health.ok:
        return Text("healthy", "green")
    return Text(f"not healthy: {printable(look.health.reason)}", "bold red")


def _contents(stats: Stats) -> Text:
    text = _line(f"{stats.waiting:,} waiting, {stats.ready:,} ready, {stats.leased:,} leased, ")
    text.append(count(stats.dead, "dead letter"), "red" if stats.dead else "")
    return text.append(f"; the earliest has been due for {stats.overdue:,.1f} s" if stats.overdue else "")


def _counters(stats: Stats, rates: dict[str, float] | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in COUNTERS:
        table.add_column(name, no_wrap=True, justify="right")
    if rates is not None:
        table.add_row("a second", *(f"{rates[name]:,.1f}" for name in COUNTERS))
    table.add_row("in all", *(f"{getattr(stats, name):,}" for name in COUNTERS))
    return table


def _timelines(timelines: Sequence[Timeline[JSON]], now: datetime) -> Table:
    """Draw timelines. Keys and errors are text from strangers: no markup, no control characters, and cut to fit."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", min_width=8)
    for name in ("state", "due"):
        table.add_column(name, no_wrap=True)
    for name in ("records", "attempt"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column(_line("last error"))
    for state, style in STYLES.items():
        for one in timelines:
            if one.state == state:
                due = due_in_words(one, now)
                table.add_row(
                    _line(printable(one.key)),
                    Text(state, style),
                    Text(due, "red" if due.startswith("overdue") else ""),
                    f"{one.size:,}",
                    str(one.attempt or ""),
                    _line(printable(one.last_error or "")),
                )
    return table


def _line(text: str = "") -> Text:
    """Make text that is cut to fit."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def fitting(timelines: Sequence[Timeline[JSON]], lines: int) -> list[Timeline[JSON]]:
    """Pick at most so many timelines, an equal number of each state while there are enough."""
    columns = [[one for one in timelines if one.state == state] for state in STYLES]
    rows = zip_longest(*columns)
    return [one for row in rows for one in row if one is not None][: max(lines, 0)]
