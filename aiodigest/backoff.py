"""Waits before the next digest or attempt, and pauses of a process whose deliveries fail. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from random import uniform
from typing import Protocol, TypeAlias, runtime_checkable

from aiodigest.errors import InvalidArgument, shown
from aiodigest.records.validation import duration, require, whole

Strategy: TypeAlias = Callable[[int], float]
"""Maps a count (digests in a row, or failed attempts; 0 or more) to a wait in seconds."""

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

    A rest begins after ``threshold`` failures in a row of distinct timelines (default 5; 1 is NSQ's rule). At level n
    it lasts ``min(multiplier * 2**n, maximum)`` seconds before jitter (defaults 1 and 120), the formula of NSQ's
    ``ExponentialStrategy`` and ``MaxBackoffDuration``. A ``maximum`` of 0 turns backoff mode off.
    Raises `InvalidArgument` if ``threshold`` is below 1, ``multiplier`` not above 0, or ``maximum`` below 0.
    """

    threshold: int
    multiplier: float
    maximum: float

    def __init__(self, threshold: int = 5, multiplier: float | timedelta = 1, maximum: float | timedelta = 120) -> None:
        object.__setattr__(self, "threshold", whole(threshold, "threshold", least=1))
        object.__setattr__(self, "multiplier", duration(multiplier, "multiplier", positive=True))
        object.__setattr__(self, "maximum", duration(maximum, "maximum"))

    def wait(self, level: int) -> float:
        """Return the rest at ``level`` in seconds, before jitter."""
        return min(self.multiplier * _power(2, level), self.maximum)


class ConsumerBackoff:
    """Backoff mode of one process, after NSQ's consumer: pause, let one delivery through, step up or down.

    A failure raises the level, up to the one whose wait is ``maximum``, and pauses. A success lowers it, and pauses for
    the wait of the lower level, or returns to full concurrency at zero. Only deliveries that started after the latest
    pause count: the others report trouble that is already known. Outcomes that say nothing about the receiver
    (`Reject`, `RetryAfter`, `PartialFailure`, `LeaseLost`) are not reported, and let the next delivery through.

    A pause is drawn from the upper half of its wait, so that processes do not all return at once, and none returns
    without a rest. Times are monotonic seconds of the caller's clock; ``random`` is the source of the draw.
    """

    def __init__(self, mode: BackoffMode, random: Uniform = uniform) -> None:
        self._mode = mode
        self._random = random
        self._failing: set[str] = set()
        self.level = 0  # the depth of backoff mode: 0 is full concurrency
        self._pause_end = -inf

    @property
    def resumes_at(self) -> float | None:
        """The end of the latest pause, past if one delivery is let through; None at full concurrency."""
        return self._pause_end if self.level else None

    def allowed(self, now: float, concurrency: int) -> int:
        """Return how many deliveries may be in flight: none in a pause, then one; ``concurrency`` at level 0."""
        return concurrency if not self.level else 0 if now < self._pause_end else 1

    def failed(self, key: str, now: float, *, started: float | None = None) -> None:
        """Report that a delivery of ``key``, begun at ``started`` (default ``now``), failed."""
        if not self._mode.maximum or not self._counts(now, started):
            return
        if self.level:
            saturated = self._mode.wait(self.level) >= self._mode.maximum
            return self._pause(self.level if saturated else self.level + 1, now)
        self._failing.add(key)
        if len(self._failing) >= self._mode.threshold:
            self._pause(1, now)

    def succeeded(self, key: str, now: float, *, started: float | None = None) -> None:
        """Report that a delivery of ``key``, begun at ``started`` (default ``now``), succeeded; any key counts."""
        if not self._counts(now, started):
            return
        self._failing.clear()
        if self.level > 1:
            self._pause(self.level - 1, now)
        else:
            self.level = 0

    def _counts(self, now: float, started: float | None) -> bool:
        # Nothing starts in a pause, so a delivery that started before its end started before the pause.
        return (now if started is None else started) >= self._pause_end

    def _pause(self, level: int, now: float) -> None:
        wait = self._mode.wait(level)
        self.level = level
        self._pause_end = now + self._random(wait / 2, wait)


def _power(base: float, exponent: int) -> float:
    # Past 600 the power overflows, while every wait has long reached its maximum.
    return float(base) ** min(exponent, 600)
