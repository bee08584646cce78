"""``aiodigest top``: looks at a namespace, one after the other, and the rates between two of them."""

from __future__ import annotations

import asyncio
import heapq
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from aiodigest import JSON, AiodigestError, BackendUnavailable, DigestEngine, Health, State, Stats, Timeline
from aiodigest.cli.event_loop import run_until, stopped_by
from aiodigest.cli.options import EMBEDDED, AsJson, Location, Namespace, Timeout, Url, duration, parsed_option
from aiodigest.cli.output import console, is_terminal, print_json
from aiodigest.cli.rendering import count, printable, view_json

if TYPE_CHECKING:
    from rich.console import Group

SHORTEST = 0.1  # seconds between two looks: each is a few calls to the server
COUNTERS = ("digests", "delivered", "dropped", "aged", "expired", "buried", "duplicates")
SHOWN = 10  # timelines of each state
SCANNED = 1_000  # timelines of each state to pick those from
HEAD = 10  # lines above the first timeline
# in the order in which they are shown
STYLES: dict[State, str] = {"ready": "yellow", "leased": "cyan", "waiting": "", "muted": "dim"}
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def interval_of(text: str) -> float:
    """Parse the time between two looks. Raises ValueError."""
    seconds = duration(text)
    if seconds < SHORTEST:
        raise ValueError(f"{text!r} is too short: at least 100ms")
    return seconds


INTERVAL = "From one look to the next: 500ms, 5s, 1m, or plain seconds; at least 100ms. [default: 1s]"
Interval: TypeAlias = Annotated[float, parsed_option("--interval", INTERVAL, interval_of, "DURATION")]
LOOKS = "Number of looks. [default: no limit on a terminal, else 1]"
Looks: TypeAlias = Annotated[int | None, typer.Option("--count", min=1, show_default=False, help=LOOKS)]


def top(
    namespace: Namespace, interval: Interval = 1.0, looks: Looks = None, url: Url = EMBEDDED, timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:  # fmt: skip
    """Watch a namespace: its contents, rates, and what is due first.

    On a terminal it runs until q or Ctrl-C, even while the server is away; otherwise it looks once. Adds are not
    counted: the server knows only what became of them.
    """
    live = not in_json and is_terminal(sys.stdout)
    asyncio.run(_run(Location(url, namespace, timeout), interval, looks or (None if live else 1), live, in_json))


async def _run(location: Location, interval: float, looks: int | None, live: bool, in_json: bool) -> None:
    """Watch until the last look is shown, or q, Ctrl-C or SIGTERM."""
    screen = nullcontext(show_json) if in_json else _screen(live)
    with stopped_by(signal.SIGINT, signal.SIGTERM) as stop, screen as show, _ended_by_q(stop, live):
        await run_until(stop, watch(location, interval, looks, show))


@contextmanager
def _screen(live: bool) -> Generator[Show, None, None]:
    """Show each look in place of the last, on a screen that is gone at the end; or one below the other."""
    from rich.live import Live

    out = console()
    if not live or not out.is_interactive:
        yield lambda title, look, rate: out.print(frame(title, look, rate, None))
        return
    with Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as screen:
        yield lambda title, look, rate: screen.update(frame(title, look, rate, out.height, "q quits"), refresh=True)


@contextmanager
def _ended_by_q(stop: asyncio.Event, live: bool) -> Generator[None, None, None]:
    """Set ``stop`` on the key q, if standard input is a terminal: it then delivers keys at once, without echo."""
    if not live or not is_terminal(sys.stdin):
        yield
        return
    import termios
    import tty

    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def on_key() -> None:
        typed = b""
        with suppress(OSError):
            typed = os.read(keyboard, 64)
        if not typed or b"q" in typed.lower():  # nothing: the terminal has gone
            loop.remove_reader(keyboard)
            stop.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class Look:
    """A namespace at a moment of this machine's clock; without ``stats`` nothing was seen, and ``health`` says why."""

    time: datetime
    clock: float  # the event loop's, for differences
    health: Health
    stats: Stats | None = None
    timelines: tuple[Timeline[JSON], ...] = ()  # the earliest due of each state


Show: TypeAlias = Callable[[str, Look, dict[str, float] | None], None]


async def watch(location: Location, interval: float, looks: int | None, show: Show) -> None:
    """Show a look every ``interval`` seconds, or that the server is away, ``looks`` times or (None) until cancelled."""
    loop = asyncio.get_running_loop()
    last: Look | None = None  # the last that reached a server
    seen = 0
    async with location.engine() as engine:
        title = f"{engine.namespace} on {engine.url}"
        while True:
            began = loop.time()
            try:
                look = await look_at(engine)
            except AiodigestError as error:
                if looks == 1 or (last is None and not isinstance(error, BackendUnavailable)):
                    raise
                look = Look(datetime.now(UTC), loop.time(), Health(False, str(error)))
            show(title, look, rates(last, look))
            last = look if look.stats is not None else last
            seen += 1
            if seen == looks:
                break
            await asyncio.sleep(began + interval - loop.time())


async def look_at(engine: DigestEngine) -> Look:
    """Look once. Raises BackendUnavailable."""
    stats = await engine.stats()
    states: list[State] = [state for state in STYLES if getattr(stats, "mutes" if state == "muted" else state)]
    found = [timeline for state in states for timeline in await _earliest(engine, state)]
    return Look(datetime.now(UTC), asyncio.get_running_loop().time(), stats.health(), stats, tuple(found))


async def _earliest(engine: DigestEngine, state: State) -> list[Timeline[JSON]]:
    """Return the timelines due earliest; of very many, those of the first shards, since the work is bounded."""
    found: list[Timeline[JSON]] = []
    async for timeline in engine.timelines(state):
        if timeline.state == state:  # what is muted may be under delivery
            found.append(timeline)
        if len(found) == SCANNED:
            break
    return heapq.nsmallest(SHOWN, found, key=lambda timeline: timeline.due)


def rates(before: Look | None, now: Look) -> dict[str, float] | None:
    """Return events per second between two looks, by counter; None if one of them saw nothing."""
    if before is None or before.stats is None or now.stats is None or now.clock <= before.clock:
        return None
    passed = now.clock - before.clock
    # a counter may be lower than before: a namespace was emptied, or is being resharded
    return {
        name: round(max(getattr(now.stats, name) - getattr(before.stats, name), 0) / passed, 3) for name in COUNTERS
    }


def server_time(look: Look) -> datetime:
    """Return the server's time, as far as its own answers show it; else this machine's."""
    if look.stats is None or (due := look.stats.oldest_due) is None:
        return look.time
    if look.stats.overdue:
        return due + timedelta(seconds=look.stats.overdue)
    return min(look.time, due)  # nothing is overdue by the server's clock


def due_in_words(timeline: Timeline[JSON], now: datetime) -> str:
    """Say when a timeline is due, how long it has been due, or when its lease or its mute ends."""
    if timeline.state == "muted" and timeline.muted_until is None:
        return "never"
    left = (timeline.due - now).total_seconds()
    if timeline.state == "leased":
        return f"lease {span(left)}" if left > 0 else "lease over"
    if timeline.state in ("waiting", "muted") and left >= 0:
        return f"in {span(left)}"
    return f"overdue {span(max(0.0, -left))}"


def span(seconds: float) -> str:
    """Format a duration in at most two units: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    for (unit, size), (smaller, least) in pairwise(UNITS):
        if left >= size:
            return f"{left // size} {unit} {left % size // least} {smaller}"
    return f"{left} s"


def show_json(title: str, look: Look, per_second: dict[str, float] | None) -> None:
    """Print a look for programs."""
    facts = {
        "time": look.time,
        "ok": look.health.ok,
        "reason": look.health.reason,
        "stats": None if look.stats is None else asdict(look.stats),
        "per_second": per_second,
        "timelines": [view_json(timeline) for timeline in look.timelines],
    }
    print_json(facts)


def frame(title: str, look: Look, per_second: dict[str, float] | None, lines: int | None, hint: str = "") -> Group:
    """Draw a look in at most so many lines (None: all of it). Text from strangers is escaped and cut to fit."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    def cut(text: str) -> Text:
        return Text(text, no_wrap=True, overflow="ellipsis")

    head = cut("").append(printable(title), "bold").append(f"  {look.time:%H:%M:%S} UTC")
    head.append(f"  {hint}" if hint else "", "dim")
    stats, reason = look.stats, printable(look.health.reason)
    if stats is None:
        return Group(head, Text(reason, "bold red"), Text("trying again", "dim"))
    health = Text("healthy", "green") if look.health.ok else Text(f"not healthy: {reason}", "bold red")
    if not (look.timelines or any(asdict(stats).values())):
        empty = "nothing was ever added here, or it has another name: see aiodigest namespaces"
        return Group(head, health, Text(empty))
    contents = cut(f"{stats.waiting:,} waiting, {stats.ready:,} ready, {stats.leased:,} leased, ")
    contents.append(f"{stats.mutes:,} muted, " if stats.mutes else "")
    contents.append(count(stats.dead, "dead letter"), "red" if stats.dead else "")
    contents.append(f"; the earliest has been due for {stats.overdue:,.1f} s" if stats.overdue else "")

    numbers = (Column(name, no_wrap=True, justify="right") for name in COUNTERS)
    counters = Table(Column(no_wrap=True), *numbers, box=None, pad_edge=False, header_style="bold")
    if per_second is not None:
        counters.add_row("a second", *(f"{per_second[name]:,.1f}" for name in COUNTERS))
    counters.add_row("in all", *(f"{getattr(stats, name):,}" for name in COUNTERS))
    found = look.timelines if lines is None else fitting(look.timelines, lines - HEAD)
    if not found:
        return Group(head, health, Text(), contents, Text(), counters)

    words = (Column(name, no_wrap=True) for name in ("state", "due"))
    numbers = (Column(name, no_wrap=True, justify="right") for name in ("records", "attempt"))
    columns = Column("key", min_width=8), *words, *numbers, Column(cut("last error"))
    timelines, now = Table(*columns, box=None, pad_edge=False, header_style="bold"), server_time(look)
    for one in sorted(found, key=lambda one: [*STYLES].index(one.state)):
        due = due_in_words(one, now)
        timelines.add_row(
            cut(printable(one.key)),
            Text(one.state, STYLES[one.state]),
            Text(due, "red" if due.startswith("overdue") else ""),
            f"{one.size:,}",
            str(one.attempt or ""),
            cut(printable(one.last_error or "")),
        )
    return Group(head, health, Text(), contents, Text(), counters, Text(), timelines)


def fitting(timelines: Sequence[Timeline[JSON]], lines: int) -> list[Timeline[JSON]]:
    """Pick at most so many timelines, an equal number of each state while there are enough."""
    columns = [[one for one in timelines if one.state == state] for state in STYLES]
    rows = zip_longest(*columns)
    return [one for row in rows for one in row if one is not None][: max(lines, 0)]
