from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from math import inf, nan
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodigest import DecorrelatedJitter, IterationBackoff, Policy, RetryPolicy
from aiodigest.errors import ConfigurationError, InvalidArgument
from aiodigest.policy import Clock, Limits, Policies, PolicySource, Terms
from aiodigest.records.validation import DEFAULT
from aiodigest.timing.calendar import At
from aiodigest.timing.hours import Hours

pytestmark = pytest.mark.virtual_time

DAY = 86_400
YEAR = 365 * DAY


def flat(wait: Any) -> Callable[[int], Any]:
    """A strategy that always answers the same."""
    return lambda n: wait


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        *product(
            [Policy],
            ["initial_delay", "minimum_delay", "increment_delay", "maximum_delay", "max_age", "ttl"],
            ["5m", nan, inf, -inf, -1, True, 10**10, timedelta(seconds=-1), b"1", [30]],
        ),
        *product([Policy], ["capacity", "max_size"], [0, -1, 10_001, 2.0, "3", True, nan]),
        *product([RetryPolicy], ["max_attempts"], [0, -1, 1001, 1.0, True, "12", nan]),
    ],
)
def test_a_field_of_no_use_is_refused_by_name(settings: Callable[..., object], field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        settings(**{field: value})


@pytest.mark.parametrize(
    ("allowed", "refused", "message"),
    [
        *(
            ({name: 1800, "maximum_delay": 1800}, {name: 1801, "maximum_delay": 1800}, f"{name}.*maximum_delay=1801 or")
            for name in ("initial_delay", "minimum_delay", "quiet_delay", "price")
        ),
        ({"ttl": 1801}, {"ttl": 1800}, "ttl must be longer than maximum_delay"),
        ({"quiet_delay": 1}, {"quiet_delay": 1, "price": 1}, "only one of .* not quiet_delay and price"),
        ({"increment_delay": 1}, {"quiet_delay": 1, "increment_delay": 1}, "not increment_delay and quiet_delay"),
        ({"price": 1}, {"price": 1, "initial_delay": 1}, "initial_delay goes with increment_delay alone"),
        ({"price": 1, "randomised": True}, {"randomised": True}, "randomised needs a price"),
        (
            {"price": 1, "first_at_once": True, "minimum_delay": 5},
            {"price": 1, "first_at_once": True},
            "first_at_once needs a cool-down",
        ),
        (
            {"capacity": 10, "max_size": 10},
            {"capacity": 10, "max_size": 11},
            r"max_size \(11\) must not be above .*capacity=11",
        ),
        ({"max_age": 0.001}, {"max_age": 0}, "max_age"),
    ],
)
def test_no_field_may_be_beyond_its_bounds(allowed: dict[str, Any], refused: dict[str, Any], message: str) -> None:
    Policy(**allowed)
    with pytest.raises(InvalidArgument, match=message):
        Policy(**refused)


@pytest.mark.parametrize(
    ("given_ones", "minimum", "increment", "maximum", "ttl"),
    [
        ({}, 300, 30, 1800, 7 * DAY),
        ({"minimum_delay": 1}, 1, 0.1, 6, 7 * DAY),
        ({"minimum_delay": 3600}, 3600, 360, 21_600, 7 * DAY),
        ({"minimum_delay": 10 * DAY}, 10 * DAY, DAY, 60 * DAY, 120 * DAY),
        ({"minimum_delay": 0}, 0, 0, 1800, 7 * DAY),
        ({"minimum_delay": 0, "initial_delay": 5}, 0, 0, 5, 7 * DAY),
        ({"initial_delay": 2000}, 300, 30, 2000, 7 * DAY),
        ({"quiet_delay": 3}, 0, 0, 30, 7 * DAY),
        ({"quiet_delay": 3, "minimum_delay": 60}, 60, 0, 360, 7 * DAY),
        ({"price": 90}, 0, 0, 90, 7 * DAY),
        ({"increment_delay": 5}, 300, 5, 1800, 7 * DAY),
        ({"maximum_delay": 5 * DAY}, 300, 30, 5 * DAY, 10 * DAY),
        ({"minimum_delay": 400 * DAY}, 400 * DAY, 40 * DAY, 5 * YEAR, 10 * YEAR),
        ({"minimum_delay": 9 * YEAR}, 9 * YEAR, 0.9 * YEAR, 9 * YEAR, 10 * YEAR),
        ({"maximum_delay": 6 * YEAR}, 300, 30, 6 * YEAR, 10 * YEAR),
    ],
)
def test_delays_that_are_not_given_follow_from_those_that_are(
    given_ones: dict[str, Any], minimum: float, increment: float, maximum: float, ttl: float
) -> None:
    policy = Policy(**given_ones)
    delays = policy.minimum_delay, policy.increment_delay, policy.maximum_delay, policy.ttl
    assert delays == (minimum, increment, maximum, ttl)


def test_with_a_strategy_the_delays_are_those_of_the_default_policy() -> None:
    policy = Policy(minimum_delay=flat(7))
    assert (policy.increment_delay, policy.maximum_delay, policy.ttl) == (30, 1800, 7 * DAY)


def test_what_follows_from_other_delays_follows_anew_in_a_copy() -> None:
    assert replace(Policy(), minimum_delay=1) == Policy(minimum_delay=1)
    assert replace(Policy(), quiet_delay=3) == Policy.debounce(3)
    assert replace(Policy(minimum_delay=1), ttl=8 * DAY).maximum_delay == 6


def test_presets_say_what_people_mean() -> None:
    assert Policy.window(60) == Policy(initial_delay=60, minimum_delay=0)
    assert Policy.debounce(3, 30) == Policy.debounce(3) == Policy(quiet_delay=3, maximum_delay=30)
    assert Policy.balanced(90) == Policy(price=90)
    assert Policy.balanced(90, 10, first_at_once=True) == Policy(price=90, minimum_delay=10, first_at_once=True)


def test_each_preset_takes_the_other_fields() -> None:
    hours, at = Hours("08:00-20:00"), At.daily("09:00")
    assert Policy.window(60, hours=hours, max_size=5) == Policy(
        initial_delay=60, minimum_delay=0, hours=hours, max_size=5
    )
    assert Policy.debounce(3, max_bytes=5) == Policy(quiet_delay=3, max_bytes=5)
    assert Policy.balanced(90, dedupe_window=9, capacity=7) == Policy(price=90, dedupe_window=9, capacity=7)
    assert Policy.at("0 9 * * *", hours=hours, max_age=5, ttl=10**6) == Policy(at=at, hours=hours, max_age=5, ttl=10**6)


def test_a_zone_beside_a_calendar_that_has_its_own_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"has its own, UTC"):
        Policy.at(At.daily("09:00"), tz="Europe/Paris")
    assert Policy.at("0 9 * * *", tz="Europe/Paris") == Policy.at(At.daily("09:00", tz="Europe/Paris"))


@pytest.mark.parametrize(
    "make",
    [
        partial(Policy, minimum_delay=cast("Any", IterationBackoff)),
        partial(RetryPolicy, backoff=cast("Any", DecorrelatedJitter)),
    ],
)
def test_a_strategy_without_its_parentheses_is_refused_when_the_policy_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument, match="a strategy"):
        make()


def test_the_ttl_must_be_longer_than_all_retries_together_and_than_a_delivery_may_take() -> None:
    retry = RetryPolicy(max_attempts=5, backoff=flat(3600))
    Policy(ttl=4.6 * 3600).check(retry)
    with pytest.raises(InvalidArgument, match="retry span"):
        Policy(ttl=4 * 3600).check(retry)
    policy, once = Policy(ttl=4 * 3600), RetryPolicy(max_attempts=1)
    policy.check(once, delivery_timeout=3600)
    with pytest.raises(InvalidArgument, match=r"longer than delivery_timeout \(14400 s\)"):
        policy.check(once, delivery_timeout=4 * 3600)


def test_delays_become_whole_milliseconds_and_no_bound_becomes_zero() -> None:
    policy = Policy(
        initial_delay=0.5, increment_delay=timedelta(seconds=2), maximum_delay=400, max_size=5, capacity=50, max_age=60
    )
    assert policy.terms == Terms(500, 2000, 400_000, Limits(50, 5, 60_000, 7 * DAY * 1000))
    assert Policy().terms.limits == Limits(1000, 0, 0, 7 * DAY * 1000)


async def epoch(key: str) -> int:
    return 0


def policies_of(source: PolicySource, retry: RetryPolicy = RetryPolicy(), clock: Clock = epoch) -> Policies:
    return Policies(source, retry, 0.0, clock, DEFAULT.digest)


@given(st.integers(1, 10**6), st.floats(0, 10**6))
def test_what_a_strategy_returns_is_clamped_to_the_maximum(iteration: int, wait: float) -> None:
    assert Policy(minimum_delay=flat(wait)).cool_ms(iteration) == min(round(wait * 1000), 1_800_000)


@pytest.mark.parametrize("wait", [nan, inf, -1, "30", None])
def test_a_strategy_that_returns_no_duration_is_refused_when_it_is_asked(wait: object) -> None:
    with pytest.raises(InvalidArgument, match="minimum_delay"):
        Policy(minimum_delay=flat(wait)).cool_ms(1)
    with pytest.raises(InvalidArgument, match="retry"):  # when an engine is made
        policies_of(Policy(), RetryPolicy(backoff=flat(wait)))


def test_the_span_is_the_sum_of_the_longest_waits() -> None:
    retry = RetryPolicy(max_attempts=4, backoff=DecorrelatedJitter(base=1, cap=20))
    assert retry.span == 3 + 9 + 20


async def test_one_policy_serves_every_key_or_a_function_or_an_async_function_gives_each_its_own() -> None:
    large, small = Policy(), Policy(capacity=5)

    def plain(key: str) -> Policy:
        return small if key == "small" else large

    async def awaited(key: str) -> Policy:
        return plain(key)

    one = policies_of(small)
    assert await one.of("a") is small
    assert (one.limits, one.own) == (small.terms.limits, False)
    for source in (plain, awaited):
        policies = policies_of(source)
        assert [await policies.of(key) for key in ("small", "large")] == [small, large]
        assert (policies.limits.capacity, policies.limits.max_size, policies.own) == (10_000, 0, True)


async def test_a_function_with_a_parameter_now_is_given_the_server_s_time_and_others_are_called_as_ever() -> None:
    asked, told = list[str](), list[object]()

    async def clock(key: str) -> int:
        asked.append(key)
        return 1_500

    def positional(key: str, now: datetime) -> Policy:
        told.append(now)
        return Policy()

    async def keyword(key: str, *, now: datetime) -> Policy:
        return positional(key, now)

    class Called:
        def __call__(self, key: str, now: datetime | None = None) -> Policy:
            return positional(key, cast("datetime", now))

    def key_named_now(now: str) -> Policy:
        return Policy(capacity=len(now))

    def anything(*args: object, **named: object) -> Policy:
        return Policy(capacity=len(args) + len(named))

    for function in (positional, keyword, Called(), partial(positional)):
        assert await policies_of(function, clock=clock).of("key") == Policy()
    assert (asked, told) == (["key"] * 4, [datetime.fromtimestamp(1.5, UTC)] * 4)
    assert await policies_of(positional, clock=clock).of("key", now_ms=2_000) == Policy()
    for function in (key_named_now, anything):
        assert (await policies_of(function, clock=clock).of("k")).capacity == 1
    assert (len(asked), told[4:]) == (4, [datetime.fromtimestamp(2, UTC)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((wrong, "must return a Policy") for wrong in (None, 300, {"minimum_delay": 300}, Policy)),
        (Policy(ttl=1801), "retry span"),
    ],
)
async def test_what_a_function_returns_is_checked_each_time(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await policies_of(flat(wrong)).of("key")
    if isinstance(wrong, Policy):  # when an engine is made, if it is the only one
        with pytest.raises(InvalidArgument, match=message):
            policies_of(wrong)


async def test_a_policy_function_that_takes_too_long_is_told_from_one_that_raises_a_timeout_of_its_own() -> None:
    async def slow(key: str) -> Policy:
        if key == "own":
            raise TimeoutError("theirs")
        await asyncio.sleep(10)
        return Policy()

    policies = policies_of(slow)
    with pytest.raises(ConfigurationError, match="took longer than 5 s"):
        await policies.of("key", timeout=5)
    with pytest.raises(TimeoutError, match="theirs"):
        await policies.of("own", timeout=5)
    assert await policies.of("key", timeout=11) == Policy()


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"quiet_delay": 0}, ("quiet_delay", 0, 0.001, 315_360_000, "")),
        ({"capacity": True}, ("capacity", True, 1, 10_000, "")),
        ({"minimum_delay": timedelta(0, 90), "maximum_delay": 60}, ("minimum_delay", 90, None, 60, "maximum_delay")),
        ({"capacity": 10, "max_size": 11}, ("max_size", 11, None, 10, "capacity")),
        ({"maximum_delay": 500, "ttl": 400}, ("ttl", 400, 500, None, "maximum_delay")),
        ({"price": 1, "quiet_delay": 2}, ("quiet_delay", None, None, None, "price")),
        ({"price": 1, "initial_delay": 2}, ("initial_delay", None, None, None, "price")),
    ],
)
def test_what_is_refused_tells_programs_which_field_it_is_and_what_bounds_it(
    fields: dict[str, Any], about: tuple[object, ...]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Policy(**fields)
    for error in (refused.value, pickle.loads(pickle.dumps(refused.value))):
        assert (error.field, error.given, error.least, error.most, error.other) == about
        assert str(error) == str(refused.value)
