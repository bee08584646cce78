"""Policies of all kinds, drawn from a seed, and clocks that are read minute by minute to see what they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from math import ceil, e, log
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

from wallclocks import DAY, fires, minutes

from aiodigest import At, DecorrelatedJitter, Hours, Policy, RetryPolicy
from aiodigest.policy import PolicySource, RetrySource, Terms
from aiodigest.timing.formula import share_of

WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
CHUNK = DAY // 4
# zones, and when their clocks change: by an hour there and back, by half an hour, and at midnight
SHIFTS = [
    ("UTC", "2026-12-31T23:58"), ("Europe/Paris", "2026-10-25T01:00"), ("Europe/Paris", "2027-03-28T01:00"),
    ("Australia/Lord_Howe", "2026-10-03T15:30"), ("Australia/Lord_Howe", "2027-04-03T15:00"),
    ("America/Havana", "2027-03-14T05:00"), ("America/Havana", "2026-11-01T05:00"),
]  # fmt: skip


@dataclass(frozen=True)
class Calendar:
    """Minutes of some days, as a calendar has them; ``real``: each time that the clocks show one of them counts."""

    at: At
    of_day: frozenset[int]
    days: frozenset[int]
    real: bool

    def after(self, ms: int) -> int:
        """Return the first instant after a time."""
        second = ms // 1000 - 3 * 3600  # before a shift that matters now
        for first in range(second // CHUNK * CHUNK, second + 15 * DAY, CHUNK):
            clock = minutes(self.at.tz, first - 3 * 3600, first + CHUNK)
            for found in fires(clock, lambda day, minute: day.weekday() in self.days and minute in self.of_day,
                               real=self.real):  # fmt: skip
                if found * 1000 > ms and found >= first:
                    return found * 1000
        raise AssertionError(f"{self.at} has no instant")


@dataclass(frozen=True)
class Opening:
    """Hours, as spans of minutes on some days."""

    hours: Hours
    spans: tuple[tuple[int, int], ...]
    days: frozenset[int]
    skipped: frozenset[date]
    known: dict[int, int] = field(default_factory=dict[int, int], compare=False)  # the first open minute from one on

    def is_open(self, ms: int) -> bool:
        shown = datetime.fromtimestamp(ms // 1000, ZoneInfo(self.hours.tz))
        today, minute = shown.date(), shown.hour * 60 + shown.minute
        held = any(
            start <= minute + ago * 1440 < end
            for ago, day in enumerate((today, today - timedelta(days=1)))
            if self._on(day)
            for start, end in self.spans
        )
        return held != self.hours.closed

    def _on(self, day: date) -> bool:
        return day.weekday() in self.days and day not in self.skipped

    def within(self, key: str, ms: int) -> int:
        """Return a time, if it is open then, else that of the next opening at which a timeline's turn comes."""
        if self.is_open(ms):
            return ms
        opens = self._change(ms)
        closes = opens + 60_000
        longest = round(1000 * self.hours.spread)
        while closes - opens < longest and self.is_open(closes):
            closes += 60_000
        return opens + int(share_of(key) * min(longest, closes - opens))

    def _change(self, ms: int) -> int:
        first = opens = ms // 60_000 + 1
        while opens not in self.known and not self.is_open(opens * 60_000):
            opens += 1
        self.known[first] = self.known.get(opens, opens)
        return self.known[first] * 60_000


@dataclass
class Rules:
    """The policies of a world: one or two for each key, of which a function with ``now`` may choose by the minute."""

    seed: int
    keys: Sequence[str]
    digest_bytes: int
    calendars: dict[At, Calendar] = field(default_factory=dict[At, Calendar])
    openings: dict[Hours, Opening] = field(default_factory=dict[Hours, Opening])

    def __post_init__(self) -> None:
        self._random = random = Random(f"{self.seed} rules")
        self._zone, shift = random.choice(SHIFTS)
        self.start_ms = round(1000 * (datetime.fromisoformat(shift).replace(tzinfo=UTC).timestamp()
                                      - random.uniform(-60, 400)))  # fmt: skip
        local = minutes(self._zone, self.start_ms // 1000, self.start_ms // 1000 + 60)[0]
        self._today, self._minute = local.day, local.minute
        self._of = {key: self._some() for key in self.keys}
        self._kind = random.choice(("of the key", "of the key", "with now", "with now", "async", "one for all"))

    # Drawing

    def _some(self) -> tuple[Policy, ...]:
        """Draw what a timeline may have: policies that differ by how records wait, and by nothing else."""
        random = self._random
        common: dict[str, Any] = {
            "hours": self._hours() if random.random() < 0.4 else None,
            "dedupe_window": random.choice((20, 60, 600)) if random.random() < 0.35 else None,
            "max_size": random.choice((3, 6)) if random.random() < 0.2 else None,
            "capacity": 8 if random.random() < 0.1 else 1000,
            "max_bytes": min(random.choice((6, 9, 30)), self.digest_bytes) if random.random() < 0.3 else None,
        }
        if random.random() < 0.1:
            common["ttl"] = 1_000
        return tuple(Policy(**common, **self._waits()) for _ in range(random.choice((1, 1, 2))))

    def _waits(self) -> dict[str, Any]:
        random = self._random
        gap = random.choice((0, 0, 5, 12))
        match random.randrange(6):
            case 0:
                seconds = random.choice((1, 4, 10))
                return {"initial_delay": seconds, "minimum_delay": 0, "increment_delay": 0, "maximum_delay": seconds}
            case 1:
                initial, increment = random.choice((0, 6)), random.choice((0, 1, 3))
                return {"initial_delay": initial, "minimum_delay": gap, "increment_delay": increment,
                        "maximum_delay": random.choice((20, 60))}  # fmt: skip
            case 2:
                return {"quiet_delay": random.choice((1, 3, 8)), "minimum_delay": gap,
                        "maximum_delay": random.choice((12, 40))}  # fmt: skip
            case 3:
                return {
                    "price": random.choice((4, 12, 30)), "minimum_delay": gap, "maximum_delay": 40,
                    "randomised": random.random() < 0.3, "first_at_once": gap > 0 and random.random() < 0.4,
                }  # fmt: skip
            case _:
                return {"at": self._calendar(), "maximum_delay": 60}

    def _soon(self, most: int) -> int:
        """Draw a minute of the local day, soon after the beginning."""
        return (self._minute + self._random.randint(1, most)) % 1440

    def _some_days(self) -> frozenset[int]:
        """Draw days of the week, today or tomorrow among them."""
        days = range(7) if self._random.random() < 0.7 else self._random.sample(range(7), 3)
        return frozenset(days) | {(self._today + timedelta(days=self._random.choice((0, 0, 1)))).weekday()}

    def _calendar(self) -> At:
        random, step = self._random, self._random.choice((1, 2, 3, 5))
        every, days = frozenset(range(0, 1440, step)), frozenset(range(7))
        match random.randrange(4):
            case 0:
                cron, real = f"*/{step} * * * *", True
            case 1:
                cron, real = f"{','.join(map(str, range(0, 60, step)))} 0-23 * * *", False
            case _:
                minute = self._soon(70)
                every, real, days = frozenset({minute}), False, self._some_days()
                cron = f"{minute % 60} {minute // 60} * * {','.join(WEEKDAYS[day] for day in sorted(days))}"
        at = At(cron, self._zone)
        self.calendars[at] = Calendar(at, every, days, real)
        return at

    def _hours(self) -> Hours:
        random = self._random
        period, length = random.choice(((4, 2), (6, 4), (10, 3), (0, 0)))
        if period:
            spans = tuple((start, start + length) for start in range(0, 1440, period))
        else:
            start = self._soon(30)
            spans = ((start, start + random.choice((2, 40, 600))),)
        days = self._some_days()
        skipped = frozenset({self._today + timedelta(days=random.choice((-1, 0, 1)))} if random.random() < 0.3 else ())
        text = ",".join(f"{start // 60:02}:{start % 60:02}-{end // 60 % 24:02}:{end % 60:02}" for start, end in spans)
        skip: Iterable[date] | Callable[[date], object] = skipped if random.random() < 0.5 else skipped.__contains__
        make = random.choice((Hours, Hours.except_))
        named = ",".join(WEEKDAYS[day] for day in sorted(days))
        hours = make(text, named, self._zone, skip, random.choice((0, 0, 20, 90)))
        self.openings[hours] = Opening(hours, spans, days, skipped)
        return hours

    # For the engines

    @cached_property
    def source(self) -> PolicySource:
        """The policy of an engine."""
        if self._kind == "one for all":
            return self._of[self.keys[0]][0]
        if self._kind == "of the key":
            return self.of
        if self._kind == "with now":

            def by_time(key: str, now: datetime) -> Policy:
                return self._of[key][now.minute % len(self._of[key])]

            return by_time

        async def by_minute(key: str, *, now: datetime) -> Policy:
            return self._of[key][now.minute % len(self._of[key])]

        return by_minute

    @property
    def own(self) -> bool:
        """Whether timelines keep their limits, as those of a function do."""
        return self._kind != "one for all"

    def of(self, key: str) -> Policy:
        """Return a policy of a timeline: what it has in common with the others of it is what counts."""
        return self._of[key if self._kind != "one for all" else self.keys[0]][0]

    def retry(self, policy: RetryPolicy) -> RetrySource:
        """Return how an engine tries again: as given, or of some timelines sooner than of others."""
        soon = RetryPolicy(policy.max_attempts, DecorrelatedJitter(base=0.5, cap=2))

        def by_key(key: str) -> RetryPolicy:
            return soon if key < self.keys[len(self.keys) // 2] else policy

        return by_key if Random(f"{self.seed} retry").random() < 0.5 else policy

    # What they say

    def opening(self, key: str) -> Opening | None:
        hours = self.of(key).hours
        return None if hours is None else self.openings[hours]

    def opened(self, terms: Terms, key: str, now: int, ahead: int, count: int) -> int:
        """Return when a record is due by the rule alone that opens a window."""
        if terms.at is not None:
            return self.calendars[terms.at].after(now - ahead) + ahead
        if terms.price_ms:
            return now + price(terms, key, count)
        return now + terms.quiet_ms + terms.initial_ms

    def pushed(self, terms: Terms, key: str, due: int, now: int, count: int) -> int:
        """Return when a waiting timeline is due by the rule alone, once another record has come."""
        if terms.quiet_ms:
            return now + terms.quiet_ms
        if terms.price_ms:
            return min(due, now + price(terms, key, count))
        return due + terms.increment_ms


def price(terms: Terms, key: str, count: int) -> int:
    random = log(1 + share_of(key) * (e - 1)) if terms.randomised else 1
    return max(1, ceil(random * terms.price_ms / count))
