"""Hours of local time in which digests may go out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import partial
from typing import NamedTuple, cast
from zoneinfo import ZoneInfo

from aiodigest.arguments import duration, require
from aiodigest.errors import ConfigurationError, InvalidArgument, shown
from aiodigest.records.validation import can_observe
from aiodigest.timing.zones import DAY, clock_time, offset, shift, weekdays, zone_name

DAY_MS = DAY * 1000
AHEAD = 401 * DAY  # seconds: the day in which an opening is looked for, and 400 more
GOES_ON = 9 * DAY  # seconds: a window that is longer is cut off
BEGINNING = date(1970, 1, 1)
KEPT = 8  # answers

Window = tuple[int, int]  # from an opening to its close, which is no part of it


class Kept(NamedTuple):
    """Windows, and the times (milliseconds) between which each question has them as its answer."""

    since: int
    before: int  # not included
    least: int
    most: int
    windows: tuple[Window, ...]


@dataclass(frozen=True, init=False)
class Hours:
    """The hours in which digests may go out: ``Hours("08:00-20:00", days="mon-fri", tz="Europe/Paris")``.

    A span is open from its first minute until just before its last, whenever the clocks of the zone show such a time:
    so an hour that comes twice when the clocks change is open twice, and of one that is skipped nothing is left. One
    that passes midnight belongs to the day on which it opens.

    Parameters
    ----------
    spans : str
        "08:00-20:00", or several: "08:00-12:00,13:00-18:00". "00:00-24:00" is the whole day.
    days : str, default "mon-sun"
        The days on which they open, as "mon-fri" or "mon,thu".
    tz : str or ZoneInfo, default "UTC"
        The zone whose clocks are meant.
    skip : dates, a mapping of dates, or a function of a date, default none
        Days, such as holidays, on which they do not open. A function returns true for such a day. It is called for days
        ahead, up to 400 if it skips them all, while records are added: it must be fast, and not change its mind.
    spread : seconds or a timedelta, default 0, at most a day
        What waited for an opening goes out within this time after it, and before the close.
    closed : bool, default False
        The spans are those in which nothing goes out, as in ``Hours.except_``.

    Raises
    ------
    InvalidArgument
        If a span, a day, the zone, a date to skip or the spread is not such a one.
    ConfigurationError
        If there is no opening within 400 days from now.
    """

    spans: str
    days: str
    tz: str
    skip: frozenset[date] | Callable[[date], object]
    spread: float
    closed: bool
    _spans: tuple[Window, ...] = field(init=False, repr=False, compare=False)
    _days: frozenset[int] = field(init=False, repr=False, compare=False)
    _known: dict[int, Kept] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        spans: str,
        days: str = "mon-sun",
        tz: str | ZoneInfo = "UTC",
        skip: Iterable[date] | Callable[[date], object] = (),
        spread: float | timedelta = 0.0,
        *,
        closed: bool = False,
    ) -> None:
        seconds = duration(spread, "spread")
        require(seconds <= DAY, "spread", f"at most {DAY:,} seconds (a day)", spread)
        values: dict[str, object] = {
            "spans": spans, "days": days, "tz": zone_name(tz), "skip": _skipped(skip), "spread": seconds,
            "closed": closed, "_spans": _read(spans), "_days": weekdays(days), "_known": {},
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.within(round(time.time() * 1000), 0.0)

    @classmethod
    def except_(
        cls,
        spans: str,
        days: str = "mon-sun",
        tz: str | ZoneInfo = "UTC",
        skip: Iterable[date] | Callable[[date], object] = (),
        spread: float | timedelta = 0.0,
    ) -> Hours:
        """Return all hours but these: ``Hours.except_("22:00-07:00", tz="Europe/Paris")``.

        A closed time belongs to the day on which it begins: ``spans``, ``days`` and ``skip`` are those of the closed
        times. ``tz`` and ``spread`` (seconds or a timedelta) are as in the class.
        """
        return cls(spans, days, tz, skip, spread, closed=True)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Hours, closed=self.closed), (self.spans, self.days, self.tz, self.skip, self.spread)

    def within(self, at_ms: int, share: float) -> int:
        """Return ``at_ms`` if it is open then, else the next opening and a ``share`` (0 to less than 1) of the spread,
        or of the time until the close if that is shorter. Instants are milliseconds of UTC.

        Raises ConfigurationError if there is no opening within 400 days.
        """
        opening, close = self.windows(at_ms, at_ms, 0)[0]
        return at_ms if opening <= at_ms else opening + int(share * min(round(self.spread * 1000), close - opening))

    def windows(self, from_ms: int, until_ms: int, most: int) -> tuple[Window, ...]:
        """Return the times that are open, each from its opening to its close, in milliseconds of UTC.

        They are those that end after ``from_ms``: the first ``most`` that begin before ``until_ms``, and the next one.
        The first is cut off at the beginning of ``from_ms``'s day (of UTC); one that goes on for more than nine days
        after its opening and ``until_ms``'s day is cut off there, and is the last. The last answers are kept, so that
        to ask again within the same window is cheap. Raises ConfigurationError if there is no opening within 400 days.
        """
        until_ms = max(until_ms, from_ms)
        kept = self._known.get(most)
        if kept is None or not (kept.since <= from_ms < kept.before and kept.least <= until_ms <= kept.most):
            if len(self._known) >= KEPT:
                self._known.clear()
            kept = self._known[most] = self._look(from_ms, until_ms, most)
        return kept.windows

    def _look(self, from_ms: int, until_ms: int, most: int) -> Kept:
        start, least = from_ms // DAY_MS * DAY_MS, until_ms // DAY_MS * DAY_MS
        since, latest, found = start, least + DAY_MS - 1, list[Window]()
        for opening, close in self._merged(start // 1000, least // 1000):
            if close * 1000 <= from_ms:
                since = close * 1000
                continue
            found.append((opening * 1000, close * 1000))
            if opening * 1000 >= until_ms:
                latest = min(latest, opening * 1000)
                break
            least = max(least, opening * 1000 + 1)
            if len(found) > most:
                break
        return Kept(since, min(start + DAY_MS, found[0][1]), least, latest, tuple(found))

    def _merged(self, second: int, until: int) -> Iterator[Window]:
        """Yield the windows, in seconds, from an instant on, none of them next to another."""
        zone, opening, close = ZoneInfo(self.tz), second, second
        while second < close + AHEAD:
            ahead = offset(zone, second)
            day = (second + ahead) // DAY
            end = (day + 1) * DAY - ahead
            if offset(zone, end) != ahead:
                end = shift(zone, second, end)
            for opens, closes in self._of_day(day):
                opens, closes = max(opens - ahead, second), min(closes - ahead, end)
                if opens < closes:
                    if opens > close:
                        if opening < close:
                            yield opening, close
                        opening = opens
                    close = max(close, closes)
            second = end
            if opening < close < second:  # it is closed
                yield opening, close
                opening = close
            elif close - max(opening, until) >= GOES_ON:
                yield opening, max(opening, until) + GOES_ON
                return
        raise ConfigurationError(f"hours must open within 400 days, which {shown(self)} does not")

    def _of_day(self, day: int) -> Iterator[Window]:
        """Yield the windows of a day (counted from 1970), in wall time: its own, and what is left of those before."""
        spans = [(opens + DAY * each, closes + DAY * each) for each in (day - 1, day) if self._on(each)
                 for opens, closes in self._spans]  # fmt: skip
        first, last = day * DAY, (day + 1) * DAY
        cut = sorted((max(opens, first), min(closes, last)) for opens, closes in spans if closes > first)
        if not self.closed:
            yield from cut
            return
        for opens, closes in cut:
            yield first, opens
            first = max(first, closes)
        yield first, last

    def _on(self, day: int) -> bool:
        if (day + 3) % 7 not in self._days:  # 1970 began on a Thursday
            return False
        when = BEGINNING + timedelta(days=day)
        return not (self.skip(when) if callable(self.skip) else when in self.skip)


def _read(text: str) -> tuple[Window, ...]:
    """Read spans as seconds since midnight; one that passes midnight ends on the next day."""
    require(isinstance(text, str), "spans", "a text, as '08:00-20:00'", text)  # pyright: ignore[reportUnnecessaryIsInstance]
    spans: list[Window] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        require(bool(dash), "a span", "two clock times, as '08:00-20:00'", part)
        opens, closes = clock_time(first, "an opening"), clock_time(last, "a close", "24:00")
        if opens == closes:
            allowed = "at another time than it begins (the whole day is 00:00-24:00)"
            raise InvalidArgument(f"a span must end {allowed}, not {shown(part)}")
        spans.append((opens, closes if closes > opens else closes + DAY))
    return tuple(spans)


def _skipped(skip: object) -> frozenset[date] | Callable[[date], object]:
    if isinstance(skip, Mapping):  # calendars of holidays tell only by `in` what they have
        return cast("Callable[[date], object]", skip.__contains__)
    if callable(skip) and can_observe(skip):
        return cast("Callable[[date], object]", skip)
    require(isinstance(skip, Iterable), "skip", "dates, or a function of a date that nobody awaits", skip)
    days = list(cast("Iterable[object]", skip))
    for day in days:
        require(isinstance(day, date) and not isinstance(day, datetime), "a day to skip", "a date", day)
    return frozenset(cast("list[date]", days))
