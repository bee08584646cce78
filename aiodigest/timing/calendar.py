"""Instants of local time at which digests go out: a calendar, as cron has them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from aiodigest.arguments import require
from aiodigest.errors import ConfigurationError, InvalidArgument, shown
from aiodigest.timing.zones import EPOCH, WEEKDAYS, clock_time, first_shift, instant, offset, weekdays, zone_name

FIELDS = "five fields (minute, hour, day of the month, month, weekday), as '0 9 * * mon-fri'"
RANGES = {
    "minute": "from 0 to 59",
    "hour": "from 0 to 23",
    "day of the month": "from 1 to 31",
    "month": "from 1 to 12, or jan to dec",
    "weekday": "from 0 to 7, or sun to sat",
}
KEPT = 8  # answers a calendar


@dataclass(frozen=True, init=False)
class At:
    """The instants of a calendar, in local time: ``At("0 9 * * mon-fri", tz="Europe/Paris")``.

    When the clocks change: a time that is skipped comes at the shift, one that comes twice comes at the first. With a
    ``*`` (or ``*/n``) in minute or hour, each time that the clocks really show counts, and no other.

    Parameters
    ----------
    cron : str
        Minute, hour, day of the month, month and weekday, as cron has them: ``*``, ``*/15``, ``1-5``, ``1,15``,
        ``mon``, ``mon#2`` (the second Monday), ``5L`` (the last Friday), ``L`` (the last day of the month) and ``LW``
        (its last working day). If neither day begins with ``*``, either may match.
    tz : str or ZoneInfo, default "UTC"
        The zone whose clocks are meant.

    Raises
    ------
    InvalidArgument
        If ``cron`` is no such text, or there is no such zone.
    ConfigurationError
        If the calendar has no instant, as on the 30th of February.
    """

    cron: str
    tz: str
    _known: dict[int, tuple[int, tuple[int, ...]]] = field(init=False, repr=False, compare=False)

    def __init__(self, cron: str, tz: str | ZoneInfo = "UTC") -> None:
        require(isinstance(cron, str), "cron", f"a text of {FIELDS}", cron)  # pyright: ignore[reportUnnecessaryIsInstance]
        object.__setattr__(self, "cron", " ".join(cron.lower().split()))
        object.__setattr__(self, "tz", zone_name(tz))
        object.__setattr__(self, "_known", {})
        self._match(0)

    def __reduce__(self) -> tuple[object, ...]:
        return At, (self.cron, self.tz)

    @classmethod
    def daily(cls, time: str, tz: str | ZoneInfo = "UTC") -> At:
        """Return the calendar of one ``time`` a day in the zone ``tz``: ``At.daily("09:00", tz="Europe/Paris")``."""
        return cls._on("*", time, tz)

    @classmethod
    def weekly(cls, days: str, time: str, tz: str | ZoneInfo = "UTC") -> At:
        """Return the calendar of one ``time`` on ``days``, as "mon", "mon,thu" or "mon-fri", in the zone ``tz``."""
        return cls._on(",".join(WEEKDAYS[day] for day in sorted(weekdays(days))), time, tz)

    @classmethod
    def _on(cls, days: str, time: str, tz: str | ZoneInfo) -> At:
        hour, minute = divmod(clock_time(time, "time") // 60, 60)
        return cls(f"{minute} {hour} * * {days}", tz)

    def next_ms(self, after_ms: int) -> int:
        """Return the first instant after ``after_ms`` (both in milliseconds of UTC)."""
        return self.instants(after_ms, 1)[0]

    def instants(self, after_ms: int, count: int, until_ms: int = 0) -> tuple[int, ...]:
        """Return the first ``count`` instants after ``after_ms``, or as many more as it takes to reach ``until_ms``.

        All are milliseconds of UTC. The last answers are kept, so that to ask again before the first instant is cheap.
        """
        known = self._known.get(count)
        if known is not None:
            since, kept = known
            enough = kept[-1] >= until_ms and (len(kept) == count or kept[-2] < until_ms)
            if since <= after_ms < kept[0] and enough:
                return kept
        zone, found, after = ZoneInfo(self.tz), list[int](), after_ms // 1000
        following = self._real if "*" in self.cron.rsplit(maxsplit=3)[0] else self._fixed
        while len(found) < count or found[-1] < until_ms:
            after = following(zone, after)
            found.append(after * 1000)
        if len(self._known) >= KEPT:
            self._known.clear()
        answer = tuple(found)
        self._known[count] = after_ms, answer
        return answer

    def _fixed(self, zone: ZoneInfo, after: int) -> int:
        """Return the next instant, in seconds: clock times are taken in their order, and each comes once."""
        wall = after + offset(zone, after)  # no earlier one is left
        while True:
            wall = self._match(wall)
            if (found := instant(zone, wall)) > after:
                return found

    def _real(self, zone: ZoneInfo, after: int) -> int:
        """Return the next instant, in seconds, at which the clocks show a time that matches."""
        first = after + 1
        while True:
            ahead = offset(zone, first)
            found = self._match(first + ahead - 1) - ahead
            changed = first_shift(zone, first, found)
            if changed is None:
                return found
            first = changed

    def _match(self, wall: int) -> int:
        """Return the next wall time that matches. What cronsim knows of time zones is not used: with a ``*`` it passes
        over times after a shift of half an hour."""
        search = copy(_parsed(self.cron))
        search.dt = EPOCH + timedelta(minutes=wall // 60)
        found = next(search, None)
        if found is None:
            raise _never(self.cron)
        return (found - EPOCH) // timedelta(seconds=1)


@lru_cache(maxsize=256)
def _parsed(cron: str) -> CronSim:
    fields = cron.split(" ")
    if len(fields) != 5:
        raise InvalidArgument(f"cron must have {FIELDS}, not {len(fields)}: {shown(cron)}")
    try:
        return CronSim(cron, EPOCH)
    except (CronSimError, ValueError, AssertionError):  # ValueError: a number of thousands of digits
        for number, (name, allowed) in enumerate(RANGES.items()):
            if not _fits(" ".join(fields[number] if each == number else "*" for each in range(5))):
                said = f"the {name} in cron {shown(cron)} must be {allowed}, not {shown(fields[number])}"
                raise InvalidArgument(f"{said} (or as *, */2, 1-3 and 1,3)") from None
        raise _never(cron) from None


def _fits(cron: str) -> bool:
    try:
        CronSim(cron, EPOCH)
    except (CronSimError, ValueError, AssertionError):
        return False
    return True


def _never(cron: str) -> ConfigurationError:
    return ConfigurationError(f"cron must name a day that comes; {shown(cron)} never does")
