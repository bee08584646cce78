"""One look at a namespace, and the rates between two looks. Nothing here draws or prints."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from aiodigest import JSON, AiodigestError, DigestEngine, Health, State, Stats, Timeline
from aiodigest.cli.rendering import json_time, stats_json, timeline_json

STATES: tuple[State, ...] = get_args(State)
COUNTERS = ("digests", "delivered", "dropped", "aged", "expired", "buried")
SHOWN = 10  # timelines of each state
SCANNED = 1_000  # timelines of each state to pick those from
UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))


@dataclass(frozen=True, slots=True)
class Look:
    """A namespace at a moment of this machine's clock; without ``stats`` nothing was seen, and ``health`` says why.

    ``clock`` is the event loop's, for differences. ``timelines`` are the earliest due of each state.
    """

    time: datetime
    clock: float
    health: Health
    stats: Stats | None = None
    timelines: tuple[Timeline[JSON], ...] = ()


async def look_at(engine: DigestEngine) -> Look:
    """Look once. Raises BackendUnavailable."""
    stats = await engine.stats()
    found = [timeline for state in STATES if getattr(stats, state) for timeline in await _earliest(engine, state)]
    return Look(datetime.now(UTC), asyncio.get_running_loop().time(), stats.health(), stats, tuple(found))


def failed_look(error: AiodigestError) -> Look:
    """Make the look for a server that was away, or that refused."""
    return Look(datetime.now(UTC), asyncio.get_running_loop().time(), Health(False, str(error)))


async def _earliest(engine: DigestEngine, state: State) -> list[Timeline[JSON]]:
    """Return the timelines due earliest; the work is bounded, however many there are.

    A shard lists them in this order. If a namespace of several shards holds more than this looks at, the first
    shards stand for all.
    """
    found: list[Timeline[JSON]] = []
    async for timeline in engine.timelines(state):
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
    """Say when a timeline is due, how long it has been due, or when its lease ends."""
    left = (timeline.due - now).total_seconds()
    if timeline.state == "leased":
        return f"lease {span(left)}" if left > 0 else "lease over"
    if timeline.state == "waiting" and left >= 0:
        return f"in {span(left)}"
    return f"overdue {span(max(0.0, -left))}"


def span(seconds: float) -> str:
    """Format a duration in at most two units: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    left = round(seconds)
    for index, (unit, size) in enumerate(UNITS):
        if left >= size:
            smaller, least = UNITS[index + 1] if index + 1 < len(UNITS) else ("s", 1)
            return f"{left // size} {unit} {left % size // least} {smaller}"
    return f"{left} s"


def look_json(look: Look, per_second: dict[str, float] | None) -> dict[str, Any]:
    """Return a look for programs."""
    return {
        "time": json_time(look.time),
        "ok": look.health.ok,
        "reason": look.health.reason,
        "stats": None if look.stats is None else stats_json(look.stats),
        "per_second": per_second,
        "timelines": [timeline_json(timeline) for timeline in look.timelines],
    }
