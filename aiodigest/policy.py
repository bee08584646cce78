"""Rules for due times and sizes of a timeline (Policy), and for the tries of a failed digest (RetryPolicy)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import NamedTuple, TypeAlias

from aiodigest.backoff import DecorrelatedJitter, Strategy, longest
from aiodigest.errors import ConfigurationError, InvalidArgument, shown
from aiodigest.records.validation import duration, require, whole

DAY = 86_400.0
MAX_CAPACITY = 10_000
ASKED = 32  # keys at once, of a policy function
SHORTEST = 0.001  # seconds: what the store counts as a whole millisecond


class Limits(NamedTuple):
    """Limits on a timeline's size and time in the store, as the store takes them; 0 is none."""

    capacity: int
    max_size: int
    max_age_ms: int
    ttl_ms: int


class Terms(NamedTuple):
    """A policy as the store takes it: in whole milliseconds."""

    initial_ms: int
    increment_ms: int
    maximum_ms: int
    limits: Limits


def milliseconds(delay: float) -> int:
    """Convert seconds to the whole milliseconds that the store counts in."""
    return round(delay * 1000)


@dataclass(frozen=True)
class RetryPolicy:
    """The tries of a digest whose callback raised, before it becomes a dead letter, and the waits between them.

    There are ``max_attempts`` in all, the first included. ``backoff`` gives the seconds from a failed attempt n (1
    first) to the next try. The default, ``DecorrelatedJitter(base=1, cap=3600)``, spans 2.5 hours on average, 5 at
    most. A try that is never reported, as when its process is killed, counts once it runs with nothing beside it,
    which is from the third on.
    """

    max_attempts: int = 12
    backoff: Strategy = field(default_factory=lambda: DecorrelatedJitter(base=1, cap=3600))

    def __post_init__(self) -> None:
        whole(self.max_attempts, "max_attempts", 1, 1000)
        require(callable(self.backoff), "backoff", "a strategy (from an attempt to seconds)", self.backoff)

    def delay_ms(self, attempt: int) -> int:
        """Return the milliseconds from the failure of ``attempt`` to the next try; checks the strategy's answer."""
        return milliseconds(duration(self.backoff(attempt), f"the retry delay after attempt {attempt}"))

    @cached_property
    def span(self) -> float:
        """The longest time, in seconds, from the first attempt's failure to the last attempt.

        Raises InvalidArgument if the strategy raises, or returns something that is not a duration.
        """
        try:
            delays = [longest(self.backoff, attempt) for attempt in range(1, self.max_attempts)]
        except Exception as error:  # it is the user's
            raise InvalidArgument(f"the retry strategy cannot be asked: it raised {type(error).__name__}") from error
        return sum(duration(delay, "what the retry strategy returns") for delay in delays)


@dataclass(frozen=True)
class Policy:
    """The rules for when a timeline is due and how large it may grow. Durations are seconds or timedeltas.

    Parameters
    ----------
    initial_delay : seconds, default 0
        From the add that opened the window; 0 means that the first record is due at once.
    minimum_delay : seconds, or a strategy of the iteration, default 300
        From the close of the last digest: the cool-down. A strategy is called with the number of the digest (in a
        row, 1 first) and is clamped to ``maximum_delay``.
    increment_delay : seconds, default 30
        Each add to a waiting timeline pushes its due time back by this much.
    maximum_delay : seconds, default 1800
        From the last digest, or else from the add that opened the window: no due time is later.
    max_size : int or None, default None
        A timeline with this many distinct records is due at once, and no digest holds more.
    capacity : int, default 1000, at most 10,000
        The most distinct records kept, the newest by arrival; dropped ones are counted.
    max_age : seconds or None, default None
        A record whose timestamp is older than this when its digest is opened is left out and counted.
    ttl : seconds, default 7 days
        From the last touch of the timeline (late by up to one part in 64, never early): the only thing that ends
        records that nobody delivers.

    Raises
    ------
    InvalidArgument
        If a duration is negative, not finite or over ten years, a size is not a whole number in its range,
        ``minimum_delay`` or ``initial_delay`` is above ``maximum_delay``, or ``ttl`` is not above it.
    """

    initial_delay: float | timedelta = 0.0
    minimum_delay: float | timedelta | Strategy = 300.0
    increment_delay: float | timedelta = 30.0
    maximum_delay: float | timedelta = 1800.0
    max_size: int | None = None
    capacity: int = 1000
    max_age: float | timedelta | None = None
    ttl: float | timedelta = 7 * DAY

    def __post_init__(self) -> None:
        maximum = duration(self.maximum_delay, "maximum_delay")
        minimum = 0.0 if callable(self.minimum_delay) else self.minimum_delay
        for name, delay in (("initial_delay", self.initial_delay), ("minimum_delay", minimum)):
            if duration(delay, name) > maximum:
                raise InvalidArgument(f"{name} ({delay}) must not be above maximum_delay ({maximum:g} s)")
        duration(self.increment_delay, "increment_delay")
        if self.max_age is not None:
            duration(self.max_age, "max_age", SHORTEST)
        whole(self.capacity, "capacity", 1, MAX_CAPACITY)
        if self.max_size is not None:
            whole(self.max_size, "max_size", 1, self.capacity)
        self._ttl_above(maximum, "maximum_delay")

    def check(self, retry: RetryPolicy, delivery_timeout: float = 0.0) -> None:
        """Raise InvalidArgument if records could expire while their digest is delivered or tried again.

        Delivery takes as long as all tries of ``retry``, or one of ``delivery_timeout`` seconds.
        """
        self._ttl_above(retry.span, "the whole retry span")
        self._ttl_above(delivery_timeout, "delivery_timeout")

    def _ttl_above(self, bound: float, what: str) -> None:
        ttl = duration(self.ttl, "ttl", SHORTEST)
        if ttl <= bound:
            raise InvalidArgument(f"ttl must be longer than {what} ({bound:g} s); it is {ttl:g} s")

    def cool_ms(self, iteration: int) -> int:
        """Return the cool-down after digest number ``iteration``, in milliseconds, clamped to ``maximum_delay``."""
        return self._clamped(self.minimum_delay(iteration)) if callable(self.minimum_delay) else self._steady_ms

    @cached_property
    def _steady_ms(self) -> int:
        """The cool-down after each digest, where it is always the same."""
        return 0 if callable(self.minimum_delay) else self._clamped(self.minimum_delay)

    def _clamped(self, delay: float | timedelta) -> int:
        return min(milliseconds(duration(delay, "minimum_delay")), self.terms.maximum_ms)

    @cached_property
    def terms(self) -> Terms:
        """The policy as the store takes it."""
        durations = (self.initial_delay, self.increment_delay, self.maximum_delay, self.max_age or 0, self.ttl)
        initial, increment, maximum, age, ttl = (milliseconds(duration(each, "a duration")) for each in durations)
        return Terms(initial, increment, maximum, Limits(self.capacity, self.max_size or 0, age, ttl))


NO_POLICY = Policy()  # of an engine that was given none, as the command line's
PolicySource: TypeAlias = Policy | Callable[[str], Policy] | Callable[[str], Awaitable[Policy]]


class Policies:
    """The policies of an engine: one for all its timelines, or a function of the key."""

    def __init__(self, source: PolicySource, retry: RetryPolicy, delivery_timeout: float = 0.0) -> None:
        self._source = source
        self.fixed = source if isinstance(source, Policy) else None
        self._retry = retry
        self._delivery_timeout = delivery_timeout
        # claims of an engine whose policy is a function trim nothing but by limits that are stored
        base = self.fixed or Policy(capacity=MAX_CAPACITY)
        base.check(retry, delivery_timeout)
        self.limits = base.terms.limits
        self.own = self.fixed is None  # the limits of a function's policies are stored with their timelines

    async def of(self, key: str, timeout: float | None = None) -> Policy:
        """Return the policy of the timeline ``key``.

        Raises any error of the function, InvalidArgument for a result that is not a Policy, and ConfigurationError if
        it takes longer than ``timeout`` seconds (None: it may take forever).
        """
        if isinstance(self._source, Policy):
            return self._source
        policy = self._source(key)
        if isinstance(policy, Awaitable):
            timer = asyncio.timeout(timeout)
            try:
                async with timer:
                    policy = await policy
            except TimeoutError as error:
                if not timer.expired():  # its own
                    raise
                raise ConfigurationError(f"the policy function took longer than {timeout:g} s") from error
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may not be typed)
            raise InvalidArgument(f"the policy function must return a Policy, not {shown(policy)}")
        policy.check(self._retry, self._delivery_timeout)
        return policy

    async def of_all(self, keys: Iterable[str], timeout: float) -> dict[str, Policy | BaseException]:
        """Return the policies of timelines, or what ``of`` raised: asked once a key, and for several at once."""
        answers: dict[str, Policy | BaseException] = {}
        wanted = list(dict.fromkeys(keys))
        left = iter(wanted)

        async def ask() -> None:
            for key in left:
                try:
                    answers[key] = await self.of(key, timeout)
                except (Exception, asyncio.CancelledError) as error:
                    task = asyncio.current_task()
                    if task is not None and task.cancelling():
                        raise
                    answers[key] = error

        async with asyncio.TaskGroup() as group:
            for _ in wanted[:ASKED]:
                group.create_task(ask())
        return answers
