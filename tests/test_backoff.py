from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import FrozenInstanceError
from datetime import timedelta
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodigest.backoff import (
    PROBE_PERIOD,
    PROBE_TIMEOUT,
    PROBES,
    BackoffMode,
    ConsumerBackoff,
    DecorrelatedJitter,
    IntervalBackoff,
    IterationBackoff,
    longest,
)
from aiodigest.errors import InvalidArgument

TEN_YEARS = 315_360_000
counts = st.integers(0, 10**6)
durations = st.floats(0.001, 100_000)


def top(low: float, high: float) -> float:
    """A source that always draws the longest wait."""
    return high


def test_backoffs_have_the_waits_of_sentry_timelines_and_digests() -> None:
    backoff: Callable[[int], float] = IterationBackoff()
    assert [backoff(n) for n in range(5)] == [300 << min(n, 2) for n in range(5)] == [300, 600, 1200, 1200, 1200]
    backoff = IntervalBackoff({0: 30, 1: 300}, default=900)
    assert [backoff(n) for n in range(4)] == [30, 300, 900, 900]


@given(base=durations, steps=st.integers(0, 10), n=counts)
def test_iteration_backoff_doubles_for_so_many_steps_and_stays(base: float, steps: int, n: int) -> None:
    backoff = IterationBackoff(base, steps)
    assert backoff(n) == base * 2 ** min(n, steps) <= backoff(n + 1) <= backoff(steps)


def test_interval_backoff_takes_timedeltas_and_keeps_its_own_copy() -> None:
    intervals: dict[int, float | timedelta] = {0: timedelta(seconds=30)}
    backoff = IntervalBackoff(intervals, default=timedelta(minutes=15))
    intervals[0] = 1
    assert (backoff(0), backoff(1)) == (30.0, 900.0)


def test_decorrelated_jitter_has_the_published_windows() -> None:
    jitter = DecorrelatedJitter(base=1, cap=60)
    assert jitter == DecorrelatedJitter()
    windows = [jitter.window(n) for n in (0, 1, 2, 3, 4, 5, 10**6)]  # attempt 0 counts as attempt 1
    assert windows == [(1, 3), (1, 3), (1, 9), (1, 27), (1, 60), (1, 60), (1, 60)]
    assert 1 <= jitter(10**6) <= 60


def test_the_random_source_is_injectable_and_by_default_draws_different_waits() -> None:
    assert DecorrelatedJitter(random=top)(2) == 9
    assert DecorrelatedJitter(random=lambda low, high: low)(2) == 1
    one, other = (DecorrelatedJitter(random=Random(7).uniform) for _ in range(2))
    assert [one(n) for n in range(9)] == [other(n) for n in range(9)]
    assert len({DecorrelatedJitter()(4) for _ in range(100)}) > 90


@given(base=durations, factor=st.floats(1, 1000), n=counts, seed=st.integers())
def test_a_jittered_wait_lies_in_its_window(base: float, factor: float, n: int, seed: int) -> None:
    cap = base * factor
    jitter = DecorrelatedJitter(base, cap, Random(seed).uniform)
    low, high = jitter.window(n)
    assert low == base
    assert base <= high <= cap
    assert low <= jitter(n) <= math.nextafter(high, math.inf)  # uniform() rounds
    assert jitter.window(n + 1)[1] >= high


@pytest.mark.parametrize("n", [1, 2, 3, 4, 100])
def test_jittered_waits_are_uniform_over_their_window(n: int) -> None:
    draws = 10_000
    jitter = DecorrelatedJitter(random=Random(20_151_001 + n).uniform)
    low, high = jitter.window(n)
    sample = sorted((jitter(n) - low) / (high - low) for _ in range(draws))
    distance = max(max((i + 1) / draws - x, x - i / draws) for i, x in enumerate(sample))
    assert distance < 1.63 / math.sqrt(draws)  # Kolmogorov-Smirnov at the 1 % level


def test_longest_is_the_top_of_the_window_or_the_wait_itself() -> None:
    assert [longest(DecorrelatedJitter(), n) for n in (0, 1, 2, 9)] == [3, 3, 9, 60]
    assert longest(IterationBackoff(), 1) == 600
    assert longest(lambda n: 7.0 * n, 3) == 21.0


def test_the_default_retries_span_at_most_17_679_seconds() -> None:
    backoff = DecorrelatedJitter(base=1, cap=3600)
    windows = [backoff.window(n) for n in range(1, 12)]
    assert sum(longest(backoff, n) for n in range(1, 12)) == sum(high for _, high in windows) == 17_679
    assert sum((low + high) / 2 for low, high in windows) / 3600 == pytest.approx(2.5, abs=0.05)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (IterationBackoff(timedelta(minutes=5)), "IterationBackoff(base=300.0, steps=2)"),
        (IntervalBackoff({0: 30}, 900), "IntervalBackoff(intervals={0: 30.0}, default=900.0)"),
        (DecorrelatedJitter(1, timedelta(hours=1), top), "DecorrelatedJitter(base=1.0, cap=3600.0)"),
        (BackoffMode(), "BackoffMode(threshold=20, multiplier=1.0, maximum=120.0)"),
    ],
)
def test_settings_read_back_as_written_in_seconds(strategy: object, text: str) -> None:
    assert repr(strategy) == text
    same: object = eval(text)
    assert strategy == same
    assert hash(strategy) == hash(same)


@pytest.mark.parametrize(
    "settings", [IterationBackoff(), IntervalBackoff({0: 1}, 2), DecorrelatedJitter(), BackoffMode()]
)
def test_settings_are_frozen_and_can_be_pickled(settings: object) -> None:
    assert pickle.loads(pickle.dumps(settings)) == settings
    for name in ("base", "default", "threshold"):
        if hasattr(settings, name):
            with pytest.raises(FrozenInstanceError):
                setattr(settings, name, 1)


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        *((IterationBackoff, {"base": base}) for base in (-1, "300")),
        *((IterationBackoff, {"steps": steps}) for steps in (-1, 33, 10**9, True, 2.0)),
        (IterationBackoff, {"base": TEN_YEARS, "steps": 1}),
        *((DecorrelatedJitter, {"base": base}) for base in (0, -1, 61, True)),
        *((DecorrelatedJitter, {"cap": cap}) for cap in (0.5, math.inf, "60")),
        *((BackoffMode, {"threshold": threshold}) for threshold in (0, True, 1.5, "5")),
        *((BackoffMode, {"multiplier": multiplier}) for multiplier in (0, math.nan)),
        *((BackoffMode, {"maximum": maximum}) for maximum in (-1, "2m", math.inf)),
        *((IntervalBackoff, {"default": default, "intervals": {0: 30}}) for default in (-1, "900")),
        *((IntervalBackoff, {"intervals": {n: 30}, "default": 900}) for n in (-1, True, "0")),
        *((IntervalBackoff, {"intervals": {0: wait}, "default": 900}) for wait in (math.nan, "30")),
        (IntervalBackoff, {"intervals": 5, "default": 1}),
        (DecorrelatedJitter, {"random": 5}),
    ],
)
def test_a_setting_of_no_use_is_refused_by_name(settings: Callable[..., object], arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(arguments))):
        settings(**arguments)


def test_the_wait_of_a_level_doubles_up_to_the_maximum() -> None:
    assert [BackoffMode().wait(level) for level in range(9)] == [1, 2, 4, 8, 16, 32, 64, 120, 120]
    assert BackoffMode(multiplier=timedelta(seconds=5), maximum=timedelta(minutes=1)).wait(3) == 40
    assert BackoffMode().wait(10**6) == 120


def failing_consumer(threshold: int = 1, maximum: float = 120) -> ConsumerBackoff:
    """In backoff mode since second 0, at level 1, its rest of two seconds undrawn."""
    backoff = ConsumerBackoff(BackoffMode(threshold, 1, maximum), top)
    for number in range(threshold):
        backoff.failed(f"timeline {number}", 0)
    return backoff


def probe(backoff: ConsumerBackoff, *keys: str) -> float:
    """Let some deliveries through once the rest has ended; return when that is."""
    assert backoff.resumes_at is not None
    at = backoff.resumes_at
    for key in keys:
        assert backoff.allowed(at, 64)
        backoff.began(key, at)
    return at


def fail(backoff: ConsumerBackoff, times: int) -> None:
    for _ in range(times):
        backoff.failed("timeline", probe(backoff, "timeline"))


def test_a_new_consumer_works_at_full_concurrency() -> None:
    backoff = ConsumerBackoff(BackoffMode())
    assert (backoff.level, backoff.resumes_at, backoff.allowed(0, 64)) == (0, None, 64)


def test_a_failure_at_threshold_1_stops_the_consumer_as_in_nsq_however_often_that_timeline_has_failed() -> None:
    backoff = failing_consumer(threshold=1)
    assert (backoff.level, backoff.resumes_at) == (1, 2)
    assert [backoff.allowed(at, 64) for at in (1.999, 2, 3)] == [0, PROBES, PROBES]
    backoff.succeeded("a", 4, started=3)
    assert (backoff.level, backoff.resumes_at, backoff.allowed(4, 64)) == (0, None, 64)
    backoff.failed("timeline 0", 5)
    assert backoff.level == 1


def test_a_pause_is_drawn_from_the_upper_half_of_its_wait() -> None:
    backoff = ConsumerBackoff(BackoffMode(threshold=1), lambda low, high: low)
    backoff.failed("a", 100)
    assert backoff.resumes_at == 101


def test_the_level_rises_once_all_that_were_let_through_have_failed() -> None:
    backoff = failing_consumer()
    at = probe(backoff, *"abcd")
    assert backoff.allowed(at, 64) == 0
    for key in "abc":
        backoff.failed(key, at + 0.5, started=at)
        assert (backoff.level, backoff.allowed(at + 0.5, 64)) == (1, 0)
    backoff.failed("d", at + 2, started=at)
    assert (backoff.level, backoff.resumes_at, backoff.allowed(at + 5.9, 64)) == (2, at + 6, 0)
    assert backoff.allowed(at + 6, 64) == PROBES


def test_one_success_ends_backoff_mode() -> None:
    backoff = failing_consumer()
    fail(backoff, 3)
    at = probe(backoff, *"abc")
    backoff.failed("a", at + 1, started=at)
    backoff.succeeded("b", at + 1, started=at)
    backoff.failed("c", at + 2, started=at)  # the first failure of a new count
    assert (backoff.level, backoff.allowed(at + 2, 64)) == (1, 0)


def test_a_probe_that_says_nothing_of_the_receiver_lets_the_next_one_through() -> None:
    backoff = failing_consumer()
    at = probe(backoff, *"abcd")
    backoff.withdrawn("a")
    assert backoff.allowed(at, 64) == 1
    for key in "bcd":
        backoff.failed(key, at, started=at)
    assert backoff.level == 2


def test_more_probes_than_were_let_through_do_not_end_claiming_for_good() -> None:
    """As a claim brings them that was sent before the rest, and answered after it."""
    backoff = failing_consumer()
    assert backoff.resumes_at is not None
    keys, at = "abcdefgh", backoff.resumes_at
    for key in keys:
        backoff.began(key, at)
    for key in keys[:-1]:
        backoff.failed(key, at + 1, started=at)
    backoff.withdrawn(keys[-1])
    assert (backoff.level, backoff.allowed(at + 1, 64)) == (1, 1)


def test_a_probe_that_hangs_counts_as_failed_until_it_succeeds() -> None:
    backoff = failing_consumer()
    at = probe(backoff, *"ab")
    backoff.failed("a", at + 1, started=at)
    assert backoff.resumes_at == at + PROBE_PERIOD
    assert (backoff.allowed(at + PROBE_TIMEOUT - 0.1, 64), backoff.level) == (2, 1)
    assert (backoff.allowed(at + PROBE_TIMEOUT, 64), backoff.level) == (0, 2)
    backoff.failed("b", at + PROBE_TIMEOUT + 1, started=at)
    assert backoff.level == 2  # which was known
    backoff.succeeded("b", at + PROBE_TIMEOUT + 2, started=at)
    assert backoff.level == 0


def test_while_all_that_were_let_through_hang_one_more_is_each_second_until_they_count_as_failed() -> None:
    backoff = failing_consumer()
    at = probe(backoff, *"abcd")
    for second, key in enumerate("efgh", 1):
        assert backoff.resumes_at == at + second
        assert (backoff.allowed(at + second - 0.1, 64), backoff.allowed(at + second, 64)) == (0, 1)
        backoff.began(key, at + second)
    assert (backoff.allowed(at + 5, 64), backoff.resumes_at, backoff.level) == (0, at + 6, 1)
    assert (backoff.allowed(at + 8.9, 64), backoff.allowed(at + 9, 64), backoff.level) == (0, 0, 2)


def test_rests_do_not_grow_soon_after_a_success() -> None:
    backoff = ConsumerBackoff(BackoffMode(threshold=1), lambda low, high: high)
    backoff.succeeded("works", 0)
    levels: list[int] = []
    for key in range(11):
        now = backoff.resumes_at or 0.0
        backoff.began(str(key), now)
        backoff.failed(str(key), now)
        levels.append(backoff.level)
    assert levels == [1] * 10 + [2]  # of 2 s each


@pytest.mark.parametrize(("maximum", "level"), [(120, 7), (0.5, 1)])
def test_the_level_never_passes_the_first_whose_wait_is_the_maximum(maximum: float, level: int) -> None:
    backoff = failing_consumer(maximum=maximum)
    fail(backoff, 50)
    began = backoff.resumes_at
    fail(backoff, 1)
    assert began is not None
    assert (backoff.level, backoff.resumes_at) == (level, began + maximum)


def test_a_maximum_of_0_turns_backoff_mode_off() -> None:
    backoff = ConsumerBackoff(BackoffMode(threshold=1, maximum=0))
    for second in range(100):
        backoff.failed(f"timeline {second}", second)
    assert (backoff.level, backoff.resumes_at, backoff.allowed(100, 64)) == (0, None, 64)


def test_results_of_deliveries_that_began_before_the_pause_ended_do_not_count() -> None:
    backoff = failing_consumer()
    backoff.failed("a", 1)
    backoff.succeeded("b", 1.999)
    backoff.succeeded("a", 30, started=-5)
    backoff.failed("b", 31, started=-5)
    assert (backoff.level, backoff.resumes_at) == (1, 2)
    backoff.failed("c", 32, started=2)  # it was not let through
    assert backoff.level == 1


def test_nor_do_they_after_the_return_to_full_concurrency() -> None:
    backoff = failing_consumer()
    backoff.succeeded("a", 2)
    backoff.failed("b", 3, started=-5)
    assert backoff.level == 0
    backoff.failed("b", 3, started=2)
    assert backoff.level == 1


@pytest.mark.parametrize(
    ("threshold", "reports", "level"),
    [
        (3, "-a -a -b -a -b", 0),
        (3, "-a -a -b -a -b -c", 1),
        (2, "-a " * 1000, 0),  # one poisoned timeline never stops the others
        (3, "-a -b +a -c -d", 0),  # a success begins the count again
        (3, "-a -b +a -c -d -a", 1),
        (2, "-a -b +a -c", 0),  # and after a recovery
        (2, "-a -b +a -c -d", 1),
        (2, "-a -b +a -b -b -b -c", 0),  # b is known to fail, and counts no more until it has succeeded
        (2, "-a -b +a +b -b -c", 1),
    ],
)
def test_it_begins_after_threshold_failures_of_distinct_timelines(threshold: int, reports: str, level: int) -> None:
    backoff = ConsumerBackoff(BackoffMode(threshold))
    for second, (sign, key) in enumerate(reports.split()):
        (backoff.succeeded if sign == "+" else backoff.failed)(key, 10 * second)
    assert (backoff.level, backoff.allowed(10_000, 64)) == (level, PROBES if level else 64)


def test_a_hundred_workers_do_not_return_at_once() -> None:
    resumes: Counter[int] = Counter()
    for _ in range(100):
        backoff = ConsumerBackoff(BackoffMode(threshold=1))
        backoff.failed("a", 0)
        fail(backoff, 6)
        start = backoff.resumes_at
        assert start is not None
        resumes[round(start)] += 1
    assert max(resumes.values()) < 20


signals = st.lists(st.tuples(st.sampled_from("+-"), st.sampled_from("abcdef"), st.floats(0, 200), st.floats(0, 300)))
modes = st.builds(BackoffMode, st.integers(1, 4), st.floats(0.1, 100), st.floats(0, 500))


@given(mode=modes, seed=st.integers(), steps=signals)
def test_whatever_happens_the_consumer_rests_no_longer_than_its_maximum_and_then_tests(
    mode: BackoffMode, seed: int, steps: list[tuple[str, str, float, float]]
) -> None:
    backoff = ConsumerBackoff(mode, Random(seed).uniform)
    now = 0.0
    for signal, key, gap, age in steps:
        now += gap
        if backoff.allowed(now, 64):
            backoff.began(key, now)
        before = backoff.level
        report = backoff.succeeded if signal == "+" else backoff.failed
        report(key, now, started=now - age)

        assert backoff.level <= before + 1
        assert signal == "-" or backoff.level in (0, before)
        if backoff.level == 0:
            assert (backoff.resumes_at, backoff.allowed(now, 64)) == (None, 64)
            continue
        resumes_at = backoff.resumes_at
        assert resumes_at is not None
        assert mode.maximum > 0
        assert resumes_at <= now + max(mode.maximum * (1 + 1e-9), PROBE_TIMEOUT)
        assert 0 <= backoff.allowed(now, 64) <= PROBES
        assert backoff.level == 1 or mode.wait(backoff.level - 1) < mode.maximum
        if backoff.level > before:
            assert resumes_at - now >= mode.wait(backoff.level) / 2 - 1e-9


MEMBERS = 500


def deliver(broken: Collection[int], lasts: float = inf) -> tuple[dict[int, float], int]:
    """Return when each healthy timeline is served, and the number of calls, until all are or for so many seconds.

    ``MEMBERS`` timelines are due at once; 64 deliveries take 5 ms, and what fails is tried again after 1 to 3 s.
    """
    random = Random(5)
    backoff = ConsumerBackoff(BackoffMode(), random.uniform)
    ready, again, tried = list(range(MEMBERS)), list[tuple[float, int]](), set[int]()
    served, now, calls = dict[int, float](), 0.0, 0
    while now < lasts and (lasts < inf or len(served) < MEMBERS - len(broken)):
        ready += [key for due, key in again if due <= now]
        again = [each for each in again if each[0] > now]
        count = backoff.allowed(now, 64)
        if not (count and ready):
            now = max(now + 0.005, 0.0 if count else backoff.resumes_at or 0.0)
            continue
        if backoff.level:  # as a claim does that draws a sample
            ready = sorted(random.sample(ready, len(ready)), key=tried.__contains__)
        batch, ready = ready[:count], ready[count:]
        calls += len(batch)
        for key in batch:
            backoff.began(str(key), now)
        now += 0.005
        for key in batch:
            if key in broken:
                tried.add(key)
                again.append((now + random.uniform(1, 3), key))
                backoff.failed(str(key), now, started=now - 0.005)
            else:
                served[key] = now
                backoff.succeeded(str(key), now, started=now - 0.005)
    return served, calls


@pytest.mark.parametrize(
    ("broken", "longest"),
    [
        (range(5), 2),
        (range(150), 2),
        (range(50, 200), 2),
        (range(250), 4),
        (range(50, 300), 4),
        (Random(5).sample(range(MEMBERS), 250), 4),  # in any order: it never rests
        (range(400), 35),
        (range(475), 38),  # by these draws: most others take longer, since few of those let through are healthy
    ],
    ids=["5", "150", "150 in between", "250", "250 in between", "250 in any order", "400", "475"],
)
def test_healthy_receivers_wait_little_for_broken_ones_however_these_are_due(
    broken: Collection[int], longest: float
) -> None:
    served, _ = deliver(broken)
    assert len(served) == MEMBERS - len(broken)
    assert max(served.values()) <= longest


def test_a_receiver_that_is_down_is_called_some_95_times_in_300_s() -> None:
    _, calls = deliver(range(MEMBERS), lasts=300)
    assert 80 <= calls <= 110
