"""Time zones, and clock times and weekdays as texts. Instants and wall times are whole seconds since 1970."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from aiodigest.arguments import require
from aiodigest.errors import InvalidArgument, shown

DAY = 86_400
LONG = 100  # characters, more than any name of a time zone has
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EPOCH = datetime(1970, 1, 1)  # on a clock on the wall


def zone_name(tz: str | ZoneInfo) -> str:
    """Return the name of a time zone that there is, else raise InvalidArgument (with the name that is most like it)."""
    name = tz.key if isinstance(tz, ZoneInfo) else tz
    require(isinstance(name, str), "tz", "the name of a time zone, or a ZoneInfo that has one", tz)  # pyright: ignore[reportUnnecessaryIsInstance]
    try:
        return ZoneInfo(name).key
    except (KeyError, ValueError, OSError):  # OSError: a folder of zones
        hint = _hint(name) if len(name) < LONG else ""
        raise InvalidArgument(f"tz must be a time zone, as 'Europe/Paris', not {shown(name)}{hint}") from None


@lru_cache(100)  # it takes long, and one name may be asked for at each digest
def _hint(name: str) -> str:
    like = get_close_matches(name, available_timezones(), 1, 0.8)
    return f" (is it {like[0]!r}?)" if like else ""


def zone_of(tz: str | ZoneInfo) -> ZoneInfo:
    """Return a time zone by its name, as ``zone_name`` reads that."""
    return ZoneInfo(zone_name(tz))


def offset(zone: ZoneInfo, second: int) -> int:
    """Return what the zone's clocks show beyond UTC at an instant, in seconds."""
    ahead = datetime.fromtimestamp(second, zone).utcoffset() or timedelta()
    return ahead.days * DAY + ahead.seconds


def shift(zone: ZoneInfo, first: int, last: int) -> int:
    """Return the instant in (first, last] at which the clocks change; they differ at the two."""
    before = offset(zone, first)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if offset(zone, middle) == before else (first, middle)
    return last


def first_shift(zone: ZoneInfo, first: int, last: int) -> int | None:
    """Return the first instant in (first, last] at which the clocks change, if they do."""
    before = offset(zone, first)
    for day in range(first, last, DAY):  # clocks do not change there and back in a day
        end = min(day + DAY, last)
        if offset(zone, end) != before:
            return shift(zone, day, end)
    return None


def instant(zone: ZoneInfo, wall: int) -> int:
    """Return the first instant at which the clocks show a wall time or a later one.

    So one that comes twice is the first of the two, and one that is skipped is the shift.
    """
    naive = EPOCH + timedelta(seconds=wall)
    early, late = (int(naive.replace(tzinfo=zone, fold=fold).timestamp()) for fold in (0, 1))
    return early if early <= late else shift(zone, late, early)


def clock_time(text: str, what: str, latest: str = "23:59") -> int:
    """Return the seconds of a clock time, such as "09:00", since midnight."""
    require(isinstance(text, str), what, "a clock time, as '09:00'", text)  # pyright: ignore[reportUnnecessaryIsInstance]
    parts = re.fullmatch(r"([0-9]{1,2}):([0-5][0-9])", text.strip())
    seconds = int(parts[1]) * 3600 + int(parts[2]) * 60 if parts else DAY + 1
    if seconds > (DAY if latest == "24:00" else DAY - 1):
        raise InvalidArgument(f"{what} must be a clock time from 00:00 to {latest}, not {shown(text)}")
    return seconds


def weekdays(text: str) -> frozenset[int]:
    """Return the days of a text such as "mon-fri" or "mon,thu" as numbers (Monday is 0); "sat-mon" is three days."""
    require(isinstance(text, str), "days", "a text, as 'mon-fri' or 'mon,thu'", text)  # pyright: ignore[reportUnnecessaryIsInstance]
    days: set[int] = set()
    for part in text.lower().split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if first not in WEEKDAYS or (last if dash else first) not in WEEKDAYS:
            given = f"{shown(part.strip())} in {shown(text)}"
            raise InvalidArgument(f"days must be of {', '.join(WEEKDAYS)}, as 'mon-fri' or 'mon,thu', not {given}")
        start = WEEKDAYS.index(first)
        days.update((start + n) % 7 for n in range((WEEKDAYS.index(last or first) - start) % 7 + 1))
    return frozenset(days)
