"""Waits before the next digest or attempt, and pauses of a process whose deliveries fail. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from random import uniform
from typing import Protocol, TypeAlias, runtime_checkable

from aiodigest.arguments import duration, require, whole
from aiodigest.errors import InvalidArgument, shown

Strategy: TypeAlias = Callable[[int], float]
"""Maps a count (digests in a row, or failed attempts; 0 or more) to a wait in seconds."""

PROBES = 4  # deliveries that are let through after a rest
PROBE_TIMEOUT = 5.0  # seconds
RECENT = 20.0  # seconds after a success in which rests do not grow: then some receivers work
PROBE_PERIOD = 1.0  # seconds: while those hang that were let through, one more is, so often
REMEMBERED = 10_000  # timelines that were evidence, so that memory is bounded

Uniform: TypeAlias = Callable[[float, float], float]
"""Draws between two bounds, like :func:`random.uniform`; in tests, use ``random.Random(seed).uniform``."""


@runtime_checkable
class Jittered(Protocol):
    """A strategy that draws its wait, and gives the two bounds of the draw (seconds)."""

    def __call__(self, n: int, /) -> float: ...

    def window(self, n: int, /) -> tuple[float, float]: ...


def longest(strategy: Strategy, n: int) -> float:
    """Return the longest wait (seconds) that ``strategy`` may give for ``n``: its answer, unless it draws one."""
    return strategy.window(n)[1] if isinstance(strategy, Jittered) else strategy(n)


@dataclass(frozen=True, slots=True, init=False)
class IterationBackoff:
    """Waits that double with each digest in a row: ``base * 2**min(n, steps)`` seconds.

    The defaults, ``base=300`` and ``steps=2``, give 300 (n = 0, the initial delay of the design), 600, 1200, 1200, ...
    as in Sentry's timelines of 2015: ``300 << min(iteration, 2)``. Raises `InvalidArgument` if the longest wait is over
    ten years.
    """

    base: float
    steps: int

    def __init__(self, base: float | timedelta = 300, steps: int = 2) -> None:
        object.__setattr__(self, "base", duration(base, "base"))
        object.__setattr__(self, "steps", whole(steps, "steps", least=0, most=32))
        duration(self(self.steps), "base * 2**steps")

    def __call__(self, n: int, /) -> float:
        return self.base * _power(2, min(n, self.steps))


@dataclass(frozen=True, slots=True, init=False)
class IntervalBackoff:
    """Waits from ``intervals``, in seconds by count; any other count gets ``default`` (seconds too).

    ``IntervalBackoff({0: 30, 1: 300}, default=900)`` is the interval strategy of Sentry's digests (October 2015).
    Raises `InvalidArgument` if a key is not a whole number from 0, or a wait is not a duration.
    """

    intervals: Mapping[int, float] = field(hash=False)
    default: float

    def __init__(self, intervals: Mapping[int, float | timedelta], default: float | timedelta) -> None:
        require(isinstance(intervals, Mapping), "intervals", "a mapping from counts to waits", intervals)  # pyright: ignore[reportUnnecessaryIsInstance]
        checked = {
            whole(n, "a key of intervals", least=0): duration(wait, f"intervals[{shown(n)}]")
            for n, wait in intervals.items()
        }
        object.__setattr__(self, "intervals", checked)
        object.__setattr__(self, "default", duration(default, "default"))

    def __call__(self, n: int, /) -> float:
        return self.intervals.get(n, self.default)


@dataclass(frozen=True, slots=True, init=False)
class DecorrelatedJitter:
    """Waits drawn uniformly from ``[base, min(cap, base * 3**n)]`` seconds; n = 0 counts as 1.

    This is decorrelated jitter (Brooker, "Exponential Backoff And Jitter", 2015) made stateless: the previous wait is
    replaced by the longest it could have been. With the defaults, ``base=1`` and ``cap=60``, the windows are [1, 3],
    [1, 9], [1, 27], then [1, 60]. ``random`` is the source of the draw. Raises `InvalidArgument` unless
    0 < base <= cap.
    """

    base: float
    cap: float
    random: Uniform = field(repr=False, compare=False)

    def __init__(self, base: float | timedelta = 1, cap: float | timedelta = 60, random: Uniform = uniform) -> None:
        object.__setattr__(self, "base", duration(base, "base", positive=True))
        object.__setattr__(self, "cap", duration(cap, "cap", positive=True))
        object.__setattr__(self, "random", random)
        require(callable(random), "random", "a function of two bounds", random)
        if self.base > self.cap:
            raise InvalidArgument(f"base must be at most cap, not {base!r} with a cap of {cap!r}")

    def __call__(self, n: int, /) -> float:
        return self.random(*self.window(n))

    def window(self, n: int, /) -> tuple[float, float]:
        """Return the shortest and the longest wait for ``n``."""
        return self.base, min(self.cap, self.base * _power(3, max(n, 1)))


@dataclass(frozen=True, slots=True, init=False)
class BackoffMode:
    """Rules for when a process whose deliveries fail rests, and for how long.

    A rest begins when none of the last ``threshold`` distinct timelines has succeeded (default 20; 1 is NSQ's rule:
    each failure begins one). At level n it lasts ``min(multiplier * 2**n, maximum)`` seconds before jitter (defaults 1
    and 120), the formula of NSQ's ``ExponentialStrategy`` and ``MaxBackoffDuration``. A ``maximum`` of 0 turns backoff
    mode off.
    Raises `InvalidArgument` if ``threshold`` is below 1, ``multiplier`` not above 0, or ``maximum`` below 0.
    """

    threshold: int
    multiplier: float
    maximum: float

    def __init__(
        self, threshold: int = 20, multiplier: float | timedelta = 1, maximum: float | timedelta = 120
    ) -> None:
        object.__setattr__(self, "threshold", whole(threshold, "threshold", least=1))
        object.__setattr__(self, "multiplier", duration(multiplier, "multiplier", positive=True))
        object.__setattr__(self, "maximum", duration(maximum, "maximum"))

    def wait(self, level: int) -> float:
        """Return the rest at ``level`` in seconds, before jitter."""
        return min(self.multiplier * _power(2, level), self.maximum)


class ConsumerBackoff:
    """Backoff mode of one process: rest, then let a few deliveries through, and rest longer if all of them fail.

    A timeline is evidence of trouble once until it succeeds, so that a few broken receivers, however often they are
    tried, do not hold up the others. After a rest up to ``PROBES`` deliveries are let through at once. A success of one
    ends backoff mode, even a late one. If all fail, the level rises, up to the one whose wait is ``maximum``, and the
    next rest begins; it stays where it is for ``RECENT`` seconds after a success, when some receivers work. A probe
    that has not ended after ``PROBE_TIMEOUT`` seconds counts as failed in this; until one does, one more is let
    through every ``PROBE_PERIOD``. Deliveries that began before a rest count for nothing: they report trouble that is
    already known. Outcomes that say nothing about the receiver (`Reject`, `RetryAfter`, `PartialFailure`, `LeaseLost`)
    are ``withdrawn``, and let the next delivery through.

    A rest is drawn from the upper half of its wait, so that processes do not all return at once, and none returns
    without a rest. Times are monotonic seconds of the caller's clock; ``random`` is the source of the draw.
    For ``patience`` seconds after a rest, fewer than ``PROBES`` that failed do not begin the next one: others may come.
    """

    def __init__(self, mode: BackoffMode, random: Uniform = uniform, patience: float = 0.0) -> None:
        self._mode = mode
        self._patience = patience
        self._random = random
        self._counted: dict[str, None] = {}  # timelines that were evidence, and have not succeeded since
        self._failures = 0  # of distinct timelines, since the last success
        self.level = 0  # the depth of backoff mode: 0 is full concurrency
        self._rest_end = self._first_rest_end = -inf
        self._probes: dict[str, float] = {}  # when each began that was let through after the rest, and has not ended
        self._failed_probes = 0
        self._has_hung = False  # one of them
        self._succeeded_at = -inf

    @property
    def resumes_at(self) -> float | None:
        """The next time at which more may be allowed than now, if nothing is reported; None at full concurrency."""
        if not self.level:
            return None
        oldest, newest = min(self._probes.values(), default=-inf), max(self._probes.values(), default=-inf)
        return max(self._rest_end, oldest + PROBE_TIMEOUT if self._has_hung else newest + PROBE_PERIOD)

    @property
    def has_evidence(self) -> bool:
        """True while a timeline that failed has not succeeded since."""
        return bool(self._counted)

    def rest(self, now: float) -> float:
        """Return how long the rest goes on, in seconds; 0 if there is none."""
        return max(0.0, self._rest_end - now) if self.level else 0.0

    def allowed(self, now: float, concurrency: int) -> int:
        """Return how many deliveries may begin: none in a rest, then probes; ``concurrency`` at level 0."""
        for key in [key for key, began in self._probes.items() if self.level and began + PROBE_TIMEOUT <= now]:
            self._has_hung = True
            self._probe_failed(key, now)
        if not self.level:
            return concurrency
        if now < self._rest_end:
            return 0
        # one at least if none is under way: a claim sent before the rest may have brought more, some of them withdrawn
        more = not self._has_hung and max(self._probes.values(), default=-inf) + PROBE_PERIOD <= now
        return max(not self._probes, more, PROBES - len(self._probes) - self._failed_probes)

    def began(self, key: str, now: float) -> None:
        """Report that a delivery of ``key`` has begun."""
        if self.level and now >= self._rest_end:
            self._probes[key] = now

    def failed(self, key: str, now: float, *, started: float | None = None) -> None:
        """Report that a delivery of ``key``, begun at ``started`` (default ``now``), failed."""
        # Nothing starts in a rest, so a delivery that started before its end started before the rest.
        if (now if started is None else started) < self._rest_end or not self._mode.maximum:
            return
        if self.level:
            if key in self._probes:
                self._probe_failed(key, now)
        elif self._mode.threshold == 1 or key not in self._counted:
            self._counted[key] = None
            if len(self._counted) > REMEMBERED:
                del self._counted[next(iter(self._counted))]
            self._failures += 1
            if self._failures >= self._mode.threshold:
                self._rest(1, now)

    def succeeded(self, key: str, now: float, *, started: float | None = None) -> None:
        """Report that a delivery of ``key``, begun at ``started`` (default ``now``), succeeded; any key counts."""
        self._counted.pop(key, None)
        self._succeeded_at = now
        # a probe of an earlier rest may have been slow
        if (now if started is None else started) >= self._first_rest_end:
            self.level = self._failures = self._failed_probes = 0
            self._has_hung = False
            self._probes.clear()

    def withdrawn(self, key: str) -> None:
        """Report that a delivery of ``key`` ended, and that its outcome says nothing about the receiver."""
        self._probes.pop(key, None)

    def _probe_failed(self, key: str, now: float) -> None:
        del self._probes[key]
        self._failed_probes += 1
        if not self._probes and (self._failed_probes >= PROBES or now >= self._rest_end + self._patience):
            saturated = self._mode.wait(self.level) >= self._mode.maximum
            stays = saturated or now < self._succeeded_at + RECENT
            self._rest(self.level if stays else self.level + 1, now)

    def _rest(self, level: int, now: float) -> None:
        wait = self._mode.wait(level)
        self._rest_end = now + self._random(wait / 2, wait)
        if not self.level:
            self._first_rest_end = self._rest_end
        self.level, self._failures, self._failed_probes, self._has_hung = level, 0, 0, False
        self._probes.clear()


def _power(base: float, exponent: int) -> float:
    # Past 600 the power overflows, while every wait has long reached its maximum.
    return float(base) ** min(exponent, 600)
