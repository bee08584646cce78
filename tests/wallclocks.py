"""The clocks on the wall, minute by minute of UTC: the plain and slow way to tell when a calendar fires."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

DAY = 86_400
STEP = 7 * DAY  # clocks do not change there and back in a week
FIRST, LAST = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (2020, 2038))


class Shift(NamedTuple):
    """A change of a zone's clocks: the instant (seconds), and what they show beyond UTC before and after."""

    zone: str
    at: int
    before: int
    after: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The difference from those of other years and places: the time of day, and how far the clocks go."""
        return (self.at + self.before) % DAY, self.after - self.before, self.before % 3600


class Minute(NamedTuple):
    """A minute of UTC (in seconds), and what the clocks show then."""

    at: int
    day: date
    minute: int  # of the day

    @property
    def wall(self) -> tuple[date, int]:
        return self.day, self.minute


def beyond(zone: ZoneInfo, second: int) -> int:
    ahead = datetime.fromtimestamp(second, zone).utcoffset()
    assert ahead is not None
    return round(ahead.total_seconds())


@cache
def shifts() -> list[Shift]:
    """Return every change of the clocks from 2020 to 2037, of one of each group of zones that have the same ones."""
    distinct: dict[object, list[Shift]] = {}
    for name in sorted(available_timezones()):
        zone, found = ZoneInfo(name), list[Shift]()
        seen = [(second, beyond(zone, second)) for second in range(FIRST, LAST + STEP, STEP)]
        for (low, before), (high, after) in pairwise(seen):
            if before != after:
                at = bisect_left(range(high), True, low, key=lambda second: beyond(zone, second) != before)
                found.append(Shift(name, at, before, after))
        distinct.setdefault((seen[0][1], *(each[1:] for each in found)), found)
    return [shift for found in distinct.values() for shift in found]


def one_of_each_shape() -> list[Shift]:
    return list({shift.shape: shift for shift in shifts()}.values())


@lru_cache(maxsize=64)
def minutes(zone: str, first: int, last: int) -> list[Minute]:
    """Return the minutes from one instant (seconds) to another."""
    clocks, found = ZoneInfo(zone), list[Minute]()
    for at in range(first // 60 * 60, last, 60):
        shown = datetime.fromtimestamp(at, clocks)
        found.append(Minute(at, shown.date(), shown.hour * 60 + shown.minute))
    return found


def fires(clock: list[Minute], matches: Callable[[date, int], bool], *, real: bool) -> Iterator[int]:
    """Yield the minutes (seconds) at which a calendar fires: ``real``, whenever the clocks show a time that matches.
    Else when they show a time that matches, or have passed it, for the first time."""
    furthest = clock[0].wall
    for at, day, minute in clock[1:]:
        if real:
            if matches(day, minute):
                yield at
            continue
        due = False
        while furthest < (day, minute):
            furthest = after(*furthest)
            due = due or matches(*furthest)
        if due:
            yield at


def after(day: date, minute: int) -> tuple[date, int]:
    """Return the time that follows on a clock that nobody changes."""
    return (day, minute + 1) if minute < 1439 else (day + timedelta(days=1), 0)


def ms(text: str, zone: str = "UTC", fold: int = 0) -> int:
    """Return the instant (in milliseconds of UTC) at which the clocks of a zone show a time."""
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()) * 1000


def shown(at_ms: int, zone: str = "UTC") -> str:
    """Return what the clocks of a zone show: ``2026-10-25T09:00+01:00``."""
    return datetime.fromtimestamp(at_ms / 1000, ZoneInfo(zone)).isoformat(timespec="minutes")
