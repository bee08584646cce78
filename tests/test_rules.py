"""When digests go out by each rule of a policy, as a user sees it.

That the store does what the formula says is shown by ``test_store_model.py``, and that calendars and hours are right in
each zone by ``test_calendar.py`` and ``test_hours.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from math import e, inf
from statistics import mean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiodigest import At, Digest, DigestEngine, Hours, Policy, RetryPolicy
from aiodigest.testing import TestEngine
from aiodigest.timing.formula import price_of, share_of

START = datetime(2026, 10, 24, 21, 0, tzinfo=UTC)
PARIS = "Europe/Paris"


def engine_of(policy: Policy, retry: RetryPolicy | None = None) -> DigestEngine:
    engine = DigestEngine(namespace="rules", policy=policy, retry=retry or RetryPolicy())

    @engine.deliver
    async def send(digest: Digest) -> None:
        pass

    return engine


async def sent_at(policy: Policy, adds: Sequence[float], until: float = 200_000) -> list[tuple[float, int]]:
    """Add a record at each of these times, in seconds; return when digests were delivered, and of how many records."""
    sent: list[tuple[float, int]] = []
    engine = DigestEngine(namespace="rules", policy=policy)
    async with TestEngine(engine, start=START) as t:

        async def send(digest: Digest) -> None:
            sent.append(((t.now - START).total_seconds(), len(digest.records)))

        async with engine.delivering(send):
            for number, at in enumerate(adds):
                await t.advance(START + timedelta(seconds=at) - t.now)
                await engine.add("key", number)
            await t.advance(START + timedelta(seconds=until) - t.now)
    return sent


async def test_a_debounced_timeline_goes_out_when_nothing_was_added_for_a_while() -> None:
    assert await sent_at(Policy.debounce(3, 30), [0, 2, 4, 20]) == [(7, 3), (23, 1)]


async def test_a_debounced_timeline_that_is_never_quiet_goes_out_at_the_maximum_with_all_that_came() -> None:
    adds = [2.7 * number for number in range(12)]
    assert adds[-2] < 30 < adds[-1] + 1
    assert (await sent_at(Policy.debounce(3, 30), [*adds[:-1], 29.999]))[0] == (30, 12)


async def test_records_that_come_while_a_digest_goes_out_are_debounced_too() -> None:
    engine = DigestEngine(namespace="rules", policy=Policy.debounce(3))
    sent: list[float] = []
    async with TestEngine(engine, start=START) as t:

        async def send(digest: Digest) -> None:
            sent.append((t.now - START).total_seconds())
            if len(sent) == 1:
                await engine.add("key", "again")

        async with engine.delivering(send):
            await engine.add("key", "first")
            await t.advance(minutes=1)
    assert sent == [3, 6]


async def test_a_balanced_record_waits_for_the_price_and_several_for_a_part_of_it() -> None:
    assert await sent_at(Policy.balanced(60), [0]) == [(60, 1)]
    assert await sent_at(Policy.balanced(60), [0, 0, 0]) == [(20, 3)]
    assert await sent_at(Policy.balanced(60), [0, 40]) == [(60, 2)]
    assert await sent_at(Policy.balanced(60), [0, 10]) == [(40, 2)]


async def test_a_record_that_comes_to_an_idle_timeline_goes_out_at_once_if_asked_and_others_after_the_gap() -> None:
    assert await sent_at(Policy.balanced(60, gap=100, first_at_once=True), [0, 1, 500]) == [(0, 1), (100, 1), (500, 1)]


def best(arrivals: Sequence[float], price: float) -> float:
    """Return the least that messages and waits can cost if all arrivals are known, in record-seconds."""
    costs = [0.0]
    for last in range(1, len(arrivals) + 1):
        sent = arrivals[last - 1]
        costs.append(min(costs[i] + price + sum(sent - each for each in arrivals[i:last]) for i in range(last)))
    return costs[-1]


def online(arrivals: Sequence[float], policy: Policy, key: str = "key") -> float:
    """Return what the rule costs: each add makes what waits due no later than the price's part after it."""
    price, cost, waiting, due = policy.terms.price_ms / 1000, 0.0, list[float](), inf
    for at in (*arrivals, inf):
        if waiting and due <= at:
            cost += price + sum(due - each for each in waiting)
            waiting, due = [], inf
        if at < inf:
            waiting.append(at)
            due = min(due, at + price_of(policy.terms, key, len(waiting)) / 1000)
    return cost


gaps = st.lists(st.floats(0, 90), min_size=1, max_size=25)


def arrivals_of(gaps: Sequence[float]) -> list[float]:
    return [round(sum(gaps[: number + 1]), 3) for number in range(len(gaps))]


@given(gaps)
@settings(deadline=None, max_examples=300)
def test_balanced_costs_at_most_twice_what_the_best_schedule_would(gaps: list[float]) -> None:
    arrivals = arrivals_of(gaps)
    assert online(arrivals, Policy.balanced(60)) <= 2 * best(arrivals, 60) + 0.001 * len(arrivals)


def keys_of_each_share(number: int) -> list[str]:
    """Return keys whose shares are spread evenly: one in each of as many equal parts."""
    found: dict[int, str] = {}
    for each in map(str, count()):
        found.setdefault(int(share_of(each) * number), each)
        if len(found) == number:
            return [*found.values()]
    raise AssertionError


SPREAD = keys_of_each_share(200)


def in_the_mean(arrivals: Sequence[float]) -> float:
    """Return what the random rule costs in the mean over what it may draw, beside the best schedule."""
    policy = Policy.balanced(60, randomised=True)
    return mean(online(arrivals, policy, key) for key in SPREAD) / best(arrivals, 60)


@given(gaps)
@example([0, 12, 0])  # 1.63 if each window has a number of its own
@settings(deadline=None, max_examples=60)
def test_randomised_costs_at_most_1_582_times_as_much_as_the_best_schedule_in_the_mean(gaps: list[float]) -> None:
    assert in_the_mean(arrivals_of(gaps)) <= e / (e - 1) + 0.01


def test_randomised_meets_its_bound_where_records_come_alone() -> None:
    assert abs(in_the_mean([1000.0 * number for number in range(20)]) - e / (e - 1)) < 0.01


def test_an_adversary_makes_balanced_cost_twice_as_much_and_no_more() -> None:
    """Arrivals just after each sending; a rule that waited for longer or shorter would cost more."""
    arrivals = [60.001 * number for number in range(400)]
    ratio = online(arrivals, Policy.balanced(60)) / best(arrivals, 60)
    assert 1.95 < ratio <= 2
    for wrong in (40, 90):
        costs = online(arrivals_of([0] + [wrong + 0.001] * 399), Policy.balanced(wrong))
        paid = costs + 400 * (60 - wrong)  # each message costs 60 whatever the rule takes it for
        assert paid / best(arrivals_of([0] + [wrong + 0.001] * 399), 60) > 2 or wrong < 60


async def test_a_daily_digest_goes_out_at_nine_in_paris_also_on_the_day_after_the_clocks_change() -> None:
    daily = Policy.at(At.daily("09:00", PARIS))
    sent = await sent_at(daily, [0, 86_400, 2 * 86_400], until=3 * 86_400)
    assert [START + timedelta(seconds=at) for at, _ in sent] == [
        datetime(2026, 10, 25, 8, 0, tzinfo=UTC), datetime(2026, 10, 26, 8, 0, tzinfo=UTC),
        datetime(2026, 10, 27, 8, 0, tzinfo=UTC),
    ]  # fmt: skip


async def test_an_instant_without_records_brings_nothing_and_several_records_go_out_together() -> None:
    assert await sent_at(Policy.at("*/10 * * * *"), [0, 30, 599, 1801]) == [(600, 3), (2400, 1)]


NIGHT = Hours.except_("22:00-07:00", tz="UTC")


async def test_what_is_due_at_night_waits_for_the_morning_and_retries_do_too() -> None:
    night = Policy(minimum_delay=0, hours=NIGHT)
    assert await sent_at(night, [0, 3600]) == [(0, 1), (10 * 3600, 1)]
    engine = engine_of(night, retry=RetryPolicy(backoff=lambda attempt: 3600.0))
    async with TestEngine(engine, start=START) as t:
        t.fail_next(ConnectionError("no"))
        await engine.add("key", 1)
        await t.advance(hours=9, minutes=59)
        assert len(t.attempts) == 1
        waiting = await engine.peek("key")
        assert waiting is not None
        assert waiting.due == datetime(2026, 10, 25, 7, 0, tzinfo=UTC)
        await t.advance(minutes=1)
        assert [len(digest.records) for digest in t.delivered] == [1]


async def test_what_is_flushed_goes_out_at_night_and_only_that() -> None:
    engine = engine_of(Policy(minimum_delay=0, hours=NIGHT))
    async with TestEngine(engine, start=START + timedelta(hours=2)) as t:
        await engine.add("key", 1)
        await engine.add("other", 1)
        await t.advance(minutes=1)
        assert not t.delivered
        await engine.flush("key")
        await t.advance()
        assert [digest.key for digest in t.delivered] == ["key"]
        await engine.add("key", 2)
        await t.advance(minutes=1)
        assert len(t.delivered) == 1


async def test_what_waited_for_the_morning_is_spread_over_a_while() -> None:
    engine = engine_of(Policy(minimum_delay=0, hours=Hours.except_("22:00-07:00", tz="UTC", spread=600)))
    async with TestEngine(engine, start=START + timedelta(hours=2)):
        for number in range(50):
            await engine.add(f"key-{number}", 1)
        due = [timeline.due async for timeline in engine.timelines()]
    opening = datetime(2026, 10, 25, 7, 0, tzinfo=UTC)
    spread = [(each - opening).total_seconds() for each in due]
    assert 0 <= min(spread) < 100
    assert 500 < max(spread) < 600


async def test_max_size_waits_for_the_opening() -> None:
    policy = Policy(minimum_delay=3600, max_size=2, hours=NIGHT)
    assert await sent_at(policy, [3600, 3601, 3602, 3603], until=10.5 * 3600) == [(10 * 3600, 2), (10 * 3600, 2)]


@pytest.mark.parametrize("server", [False, True])
async def test_a_real_server_and_the_memory_agree_about_rules(server: bool) -> None:
    engine = engine_of(Policy(price=60, hours=NIGHT))
    async with TestEngine(engine, start=START, server=server) as t:
        for number in range(3):
            await engine.add("key", number)
        await t.advance(seconds=19)
        assert not t.delivered
        await t.advance(seconds=1)
        assert len(t.delivered[0].records) == 3
