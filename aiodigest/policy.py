"""Rules for due times and sizes of a timeline (Policy), and for the tries of a failed digest (RetryPolicy)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypedDict, TypeVar, Unpack, cast, overload

from aiodigest.arguments import TEN_YEARS, can_ask, duration, require, whole
from aiodigest.backoff import DecorrelatedJitter, Strategy, longest
from aiodigest.errors import ConfigurationError, InvalidArgument, shown
from aiodigest.records.validation import DEFAULT, moment

if TYPE_CHECKING:
    from aiodigest.timing.calendar import At
    from aiodigest.timing.hours import Hours

T = TypeVar("T")

DAY = 86_400.0
MAX_CAPACITY = 10_000
ASKED = 32  # keys at once, of a policy function
SHORTEST = 0.001  # seconds: what the store counts as a whole millisecond
RULES = ("increment_delay", "quiet_delay", "price", "at")  # of which a policy has one


class Limits(NamedTuple):
    """Limits on a timeline's size and time in the store, as the store takes them; 0 is none."""

    capacity: int
    max_size: int
    max_age_ms: int
    ttl_ms: int

    @property
    def told(self) -> str:
        """All of them, as a log line tells them."""
        return ", ".join(f"{name} {size}" for name, size in self._asdict().items())


class Terms(NamedTuple):
    """A policy as the store takes it: in whole milliseconds.

    ``rule`` says when what waits is due: "increment", "debounce", "balanced" or "calendar". ``needs`` names what a
    worker must know to treat such a timeline right, separated by spaces.
    """

    initial_ms: int
    increment_ms: int
    maximum_ms: int
    limits: Limits
    rule: str = "increment"
    quiet_ms: int = 0
    price_ms: int = 0
    randomised: bool = False
    first_at_once: bool = False
    at: At | None = None
    hours: Hours | None = None
    dedupe_ms: int = 0
    max_bytes: int = 0
    needs: str = ""

    @property
    def is_plain(self) -> bool:
        """True if there is nothing but delays and limits."""
        return not self.needs


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
        require(can_ask(self.backoff), "backoff", "a strategy (from an attempt to seconds)", self.backoff)

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


class Derived(float):
    """A duration that was not given but follows from others, so that a copy with other values derives it anew."""


def _given(value: object) -> bool:
    return value is not None and not isinstance(value, Derived)


class Others(TypedDict, total=False):
    """The fields of a policy that go with each preset."""

    max_size: int | None
    capacity: int
    max_age: float | timedelta | None
    ttl: float | timedelta
    hours: Hours | None
    dedupe_window: float | timedelta | None
    max_bytes: int | None


class _AtField:
    """The type of ``Policy.at``: of the class a preset, of a policy its instants."""

    @overload
    def __get__(self, policy: None, owner: type[Policy]) -> Callable[..., Policy]: ...
    @overload
    def __get__(self, policy: Policy, owner: type[Policy]) -> At | None: ...
    def __get__(self, policy: Policy | None, owner: type[Policy]) -> Any: ...
    def __set__(self, policy: Policy, value: At | None) -> None: ...


@dataclass(frozen=True)
class Policy:
    """The rules for when a timeline is due and how large it may grow. Durations are seconds or timedeltas.

    At most one of ``increment_delay``, ``quiet_delay``, ``price`` and ``at`` says how records wait for others. The
    defaults follow from what is given; for ``Policy()`` the delays are 0, 300, 30 and 1800 seconds.

    Parameters
    ----------
    initial_delay : seconds, default 0
        From the add that opened the window; 0 means that the first record is due at once. Goes with
        ``increment_delay`` alone.
    minimum_delay : seconds, or a strategy of the iteration, default 300, or 0 with ``quiet_delay``, ``price`` or ``at``
        From the close of the last digest: the cool-down. A strategy is called with the number of the digest (in a
        row, 1 first) and is clamped to ``maximum_delay``. With ``at`` it does not count.
    increment_delay : seconds, default a tenth of ``minimum_delay`` (30 for a strategy)
        Each add to a waiting timeline pushes its due time back by this much.
    maximum_delay : seconds, default 6 * ``minimum_delay``, or what else is larger
        From the last digest, or else from the add that opened the window: no due time is later, but for ``hours``.
        With ``at`` it does not apply. The default is the largest of 6 * ``minimum_delay`` and 10 * ``quiet_delay``
        (of these at most five years), ``minimum_delay``, ``initial_delay``, ``quiet_delay`` and ``price``, or 1800 if
        all are 0; for a strategy the larger of 1800 and ``initial_delay``.
    max_size : int or None, default None
        A timeline with this many distinct records is due at once, and no digest holds more.
    capacity : int, default 1000, at most 10,000
        The most distinct records kept, the newest by arrival; dropped ones are counted.
    max_age : seconds or None, default None
        A record whose timestamp is older than this when its digest is opened is left out and counted.
    ttl : seconds, default the larger of 7 days and twice ``maximum_delay``, at most ten years
        From the last touch of the timeline, or if that is later from its due time (with ``at`` and ``hours``) or the
        end of its mute; late by up to one part in 64, never early. The only thing that ends records that nobody
        delivers.
    quiet_delay : seconds or None, default None
        From the last add: the timeline is due when nothing was added for this long (debounce).
    price : record-seconds or None, default None
        The price of a message, in seconds that a single record may wait; n that came together wait at most a part in n
        of it (balanced). Each add lets the timeline be due no later than ``price / n`` after it, where n records wait.
        Without a cool-down, sizes and hours, messages and waits cost at most twice what the best schedule would that
        knows the future (Dooly, Goldman, Scott, J. ACM 48, 2001).
    randomised : bool, default False
        Multiplies ``price`` by a number that the key draws, with density e^z / (e - 1) on [0, 1]: in the mean over
        keys messages and waits then cost at most e / (e - 1) = 1.582 times what the best schedule would, and no rule
        does better (Karlin, Kenyon, Randall, Algorithmica 36, 2003).
    first_at_once : bool, default False
        With ``price`` and a cool-down: a record that comes to an idle timeline is due at once.
    at : At or None, default None
        The instants at which a digest is due, if something came; by the server's clock.
    hours : Hours or None, default None
        The hours in which digests are delivered: what is due outside waits for the opening, retries too.
    dedupe_window : seconds or None, default None
        From the delivery of a record: another one of its id is accepted, counted, and not delivered within it. Of a
        timeline the latest 10,000 ids are known. While a namespace gets another number of shards, it may come again.
    max_bytes : int or None, default None
        A timeline with this many bytes of JSON, before compression, is due at once, and no digest's values take more:
        what is over comes in parts. A single record above it is refused by ``add``. At most ``Bounds(digest=...)``.

    Raises
    ------
    InvalidArgument
        If a duration is negative, not finite or over ten years, a size is not a whole number in its range, a delay is
        above ``maximum_delay``, ``ttl`` is not above it, or two fields are given that exclude each other.
    """

    initial_delay: float | timedelta = 0.0
    minimum_delay: float | timedelta | Strategy = cast("float", None)
    increment_delay: float | timedelta = cast("float", None)
    maximum_delay: float | timedelta = cast("float", None)
    max_size: int | None = None
    capacity: int = 1000
    max_age: float | timedelta | None = None
    ttl: float | timedelta = cast("float", None)
    quiet_delay: float | timedelta | None = None
    price: float | timedelta | None = None
    randomised: bool = False
    first_at_once: bool = False
    if TYPE_CHECKING:
        at: _AtField = _AtField()
    else:
        at: At | None = None
    hours: Hours | None = None
    dedupe_window: float | timedelta | None = None
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        self._exclude()
        strategy = callable(self.minimum_delay)
        said = "seconds, or a strategy (from a number of digests to seconds)"
        require(not strategy or can_ask(self.minimum_delay), "minimum_delay", said, self.minimum_delay)
        if not _given(self.minimum_delay):
            self._derive("minimum_delay", 300.0 if self.rule == "increment" else 0.0)
        minimum = 0.0 if callable(self.minimum_delay) else duration(self.minimum_delay, "minimum_delay")
        initial = duration(self.initial_delay, "initial_delay")
        quiet = 0.0 if self.quiet_delay is None else duration(self.quiet_delay, "quiet_delay", SHORTEST)
        price = 0.0 if self.price is None else duration(self.price, "price", SHORTEST)
        if not _given(self.increment_delay):
            self._derive("increment_delay", 0.0 if self.rule != "increment" else 30.0 if strategy else minimum / 10)
        duration(self.increment_delay, "increment_delay")
        if not _given(self.maximum_delay):
            # twice that is the ttl, which ends within ten years
            largest = max(minimum, initial, quiet, price, min(TEN_YEARS / 2, max(6 * minimum, 10 * quiet)))
            self._derive("maximum_delay", max(1800.0, initial) if strategy else largest or 1800.0)
        maximum = duration(self.maximum_delay, "maximum_delay")
        for name, delay in (
            ("initial_delay", initial), ("minimum_delay", minimum), ("quiet_delay", quiet), ("price", price)
        ):  # fmt: skip
            if delay > maximum and self.at is None:
                above = f"{name} ({delay:.15g} s) must not be above maximum_delay ({maximum:.15g} s)"
                told = f"{above}: give maximum_delay={delay:.15g} or more"
                raise InvalidArgument(told, field=name, given=delay, most=maximum, other="maximum_delay")
        if self.max_age is not None:
            duration(self.max_age, "max_age", SHORTEST)
        if self.dedupe_window is not None:
            duration(self.dedupe_window, "dedupe_window", SHORTEST)
        whole(self.capacity, "capacity", 1, MAX_CAPACITY)
        if self.max_size is not None:
            whole(self.max_size, "max_size", 1, MAX_CAPACITY)
            if self.max_size > self.capacity:
                above = f"max_size ({self.max_size}) must not be above capacity ({self.capacity})"
                told = f"{above}: give capacity={self.max_size} or more"
                raise InvalidArgument(told, field="max_size", given=self.max_size, most=self.capacity, other="capacity")
        if self.max_bytes is not None:
            whole(self.max_bytes, "max_bytes", 1, 2**30)
        if not _given(self.ttl):
            self._derive("ttl", min(TEN_YEARS, max(7 * DAY, 2 * maximum)))
        self._ttl_above(maximum, "maximum_delay")

    def _derive(self, name: str, value: float) -> None:
        object.__setattr__(self, name, Derived(value))

    def _exclude(self) -> None:
        """Refuse fields that exclude each other, or that need another."""
        rules = [name for name in RULES if _given(getattr(self, name))]
        if len(rules) > 1:
            told = f"only one of {', '.join(RULES)} may be given, not {' and '.join(rules)}"
            raise InvalidArgument(told, field=rules[0], other=rules[1])
        if self.initial_delay and self.rule != "increment":
            told = f"initial_delay goes with increment_delay alone, not with {rules[0]}"
            raise InvalidArgument(told, field="initial_delay", other=rules[0])
        for name in ("randomised", "first_at_once"):
            value = getattr(self, name)
            require(isinstance(value, bool), name, "True or False", value)
            if value and self.price is None:
                raise InvalidArgument(f"{name} needs a price")
        if self.first_at_once and not self.minimum_delay:
            raise InvalidArgument("first_at_once needs a cool-down: give minimum_delay")
        if self.at is not None or self.hours is not None:
            from aiodigest.timing.calendar import At  # imports time zones
            from aiodigest.timing.hours import Hours

            require(self.at is None or isinstance(self.at, At), "at", "an At", self.at)  # pyright: ignore[reportUnnecessaryIsInstance]
            require(self.hours is None or isinstance(self.hours, Hours), "hours", "Hours", self.hours)  # pyright: ignore[reportUnnecessaryIsInstance]

    # Presets: each takes the other fields, too

    @classmethod
    def window(cls, seconds: float | timedelta, **fields: Unpack[Others]) -> Self:
        """Return a policy that gathers: a digest is due ``seconds`` seconds after its first record."""
        return cls(initial_delay=seconds, minimum_delay=0, increment_delay=0, maximum_delay=seconds, **fields)

    @classmethod
    def debounce(
        cls, quiet: float | timedelta, at_most: float | timedelta | None = None, **fields: Unpack[Others]
    ) -> Self:
        """Return a policy that waits until nothing was added for ``quiet`` seconds, but no longer than ``at_most``
        seconds (default 10 times ``quiet``) from the first record on."""
        most = cast("float", at_most)  # None: it follows from the quiet delay
        return cls(quiet_delay=quiet, maximum_delay=most, **fields)

    @classmethod
    def balanced(
        cls,
        price: float | timedelta,
        gap: float | timedelta = 0,
        first_at_once: bool = False,
        randomised: bool = False,
        **fields: Unpack[Others],
    ) -> Self:
        """Return a policy that weighs messages against waiting: ``price`` is what a message is worth, in seconds of one
        record's waiting. ``gap`` is the least time between two digests, in seconds; ``first_at_once`` and
        ``randomised`` are those of the policy."""
        return cls(price=price, minimum_delay=gap, first_at_once=first_at_once, randomised=randomised, **fields)

    @property
    def rule(self) -> str:
        """The rule by which records wait for others: "increment", "debounce", "balanced" or "calendar"."""
        if self.at is not None:
            return "calendar"
        return "debounce" if self.quiet_delay is not None else "increment" if self.price is None else "balanced"

    @property
    def needs(self) -> str:
        """The features that a worker must know to treat timelines of this policy right, separated by spaces."""
        wanted = {
            self.rule: self.rule != "increment", "hours": self.hours is not None,
            "dedupe": self.dedupe_window is not None, "bytes": self.max_bytes is not None,
        }  # fmt: skip
        return " ".join(name for name, is_used in wanted.items() if is_used)

    def check(
        self, retry: RetryPolicy | None, delivery_timeout: float = 0.0, digest_bytes: int = DEFAULT.digest
    ) -> None:
        """Raise InvalidArgument if records could expire while their digest is delivered or tried again, or if
        ``max_bytes`` is above ``digest_bytes``.

        Delivery takes as long as all tries of ``retry`` (None: that is checked elsewhere), or one of
        ``delivery_timeout`` seconds.
        """
        if self.max_bytes is not None and self.max_bytes > digest_bytes:
            bound = f"max_bytes must be at most Bounds(digest=...), {digest_bytes:,}"
            raise InvalidArgument(f"{bound}; it is {self.max_bytes:,}: raise that bound, or lower max_bytes")
        if retry is not None:
            self._ttl_above(retry.span, "the whole retry span")
        self._ttl_above(delivery_timeout, "delivery_timeout")

    def _ttl_above(self, bound: float, what: str) -> None:
        ttl = duration(self.ttl, "ttl", SHORTEST)
        if ttl <= bound:
            told = f"ttl must be longer than {what} ({bound:.15g} s); it is {ttl:.15g} s"
            raise InvalidArgument(told, field="ttl", given=ttl, least=bound, other=what)

    def cool_ms(self, iteration: int) -> int:
        """Return the cool-down after digest number ``iteration``, in milliseconds, clamped to ``maximum_delay``."""
        if self.at is not None:
            return 0
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
        durations = (
            self.initial_delay, self.increment_delay, self.maximum_delay, self.max_age, self.ttl, self.quiet_delay,
            self.price, self.dedupe_window,
        )  # fmt: skip
        initial, increment, maximum, age, ttl, quiet, price, dedupe = (
            milliseconds(duration(each or 0, "a duration")) for each in durations
        )
        limits = Limits(self.capacity, self.max_size or 0, age, ttl)
        return Terms(
            initial, increment, maximum, limits, self.rule, quiet, price, self.randomised, self.first_at_once, self.at,
            self.hours, dedupe, self.max_bytes or 0, self.needs,
        )  # fmt: skip


def _at(cls: type[Policy], when: At | str, tz: str | None = None, **fields: Unpack[Others]) -> Policy:
    """Return a policy of instants: ``when`` is a calendar, as ``At.daily("09:00", tz="Europe/Paris")``, or a cron
    expression, for the time zone ``tz`` (default "UTC"). Raises InvalidArgument if ``tz`` is given with a calendar."""
    from aiodigest.timing.calendar import At  # imports time zones

    if not isinstance(when, At):
        return cls(at=At(when, tz="UTC" if tz is None else tz), **fields)
    if tz is not None:
        raise InvalidArgument(
            f"tz goes with a cron expression: this calendar has its own, {when.tz}: give At(..., tz=)"
        )
    return cls(at=when, **fields)


# A preset has the name of a field: of the class this is found, of a policy what it was given, which hides it.
setattr(Policy, "at", classmethod(_at))  # noqa: B010  (a type checker takes it for the field's)

NO_POLICY = Policy()  # of an engine that was given none, as the command line's
PolicySource: TypeAlias = Policy | Callable[..., Policy] | Callable[..., Awaitable[Policy]]
RetrySource: TypeAlias = RetryPolicy | Callable[..., RetryPolicy] | Callable[..., Awaitable[RetryPolicy]]
Clock: TypeAlias = Callable[[str], Awaitable[int]]  # the time by the clock of a timeline's server, ms


class Source(Generic[T]):
    """A setting of an engine for all its timelines: a value, or a function of the key.

    Such a function is plain or async. One that has a parameter ``now`` besides is given the server's time, as an aware
    datetime: by ``clock``, unless who asks knows it.
    """

    def __init__(self, name: str, kind: type[T], given: object, clock: Clock) -> None:
        self._name = name
        self._kind = kind
        self.fixed = given if isinstance(given, kind) else None
        self._function = cast("Callable[..., object]", given)
        self._clock = clock
        self._takes_now = self.fixed is None and _takes_now(self._function)

    async def of(self, key: str, timeout: float | None = None, now_ms: int | None = None) -> T:
        """Return the value of the timeline ``key``.

        Raises any error of the function, BackendUnavailable if the server's time cannot be told, InvalidArgument for a
        result of another kind, and ConfigurationError if the function takes longer than ``timeout`` seconds (None: it
        may take forever).
        """
        if self.fixed is not None:
            return self.fixed
        named: dict[str, object] = {}
        if self._takes_now:
            named["now"] = moment(1000 * (await self._clock(key) if now_ms is None else now_ms))
        found = self._function(key, **named)
        if isinstance(found, Awaitable):
            timer = asyncio.timeout(timeout)
            try:
                async with timer:
                    found = await cast("Awaitable[object]", found)
            except TimeoutError as error:
                if not timer.expired():  # its own
                    raise
                raise ConfigurationError(f"the {self._name} function took longer than {timeout:g} s") from error
        if not isinstance(found, self._kind):
            raise InvalidArgument(f"the {self._name} function must return a {self._kind.__name__}, not {shown(found)}")
        return found


def _takes_now(function: Callable[..., object]) -> bool:
    """Return whether a function has a parameter ``now`` behind its first one, which is the key."""
    try:
        others = [*signature(function).parameters.values()][1:]
    except (TypeError, ValueError):  # Python cannot tell of every one that is written in C
        return False
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return any(each.name == "now" and each.kind in named for each in others)


class Policies:
    """The policies of an engine: one for all its timelines, or a function of the key. ``retry`` is None if that is a
    function too: then who delivers a digest checks that its ttl is long enough."""

    def __init__(
        self,
        source: PolicySource,
        retry: RetryPolicy | None,
        delivery_timeout: float,
        clock: Clock,
        digest_bytes: int,
    ) -> None:
        self._source = Source("policy", Policy, source, clock)
        self.fixed = self._source.fixed
        self._retry = retry
        self._bounds = delivery_timeout, digest_bytes
        # claims of an engine whose policy is a function trim nothing but by limits that are stored
        base = self.fixed or Policy(capacity=MAX_CAPACITY)
        base.check(retry, *self._bounds)
        self.limits = base.terms.limits
        self.own = self.fixed is None  # the limits of a function's policies are stored with their timelines

    async def of(self, key: str, timeout: float | None = None, now_ms: int | None = None) -> Policy:
        """Return the policy of the timeline ``key``, as ``Source.of`` does; it was checked."""
        if self.fixed is not None:
            return self.fixed
        policy = await self._source.of(key, timeout, now_ms)
        policy.check(self._retry, *self._bounds)
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
