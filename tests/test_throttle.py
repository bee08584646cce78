"""A throttle: no window of time sees more attempts begin than its limit, and what is over waits, uncharged."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import pytest
from engines import Inbox, WatchedBackend, delivering, engine_on, lasting, now, policy, virtual_time
from hypothesis import example, given, settings
from hypothesis import strategies as st
from processes import Program, running
from replicas import until
from servers import Server
from stores import Store

from aiodigest import (
    JSON,
    Digest,
    DigestEngine,
    Hours,
    InvalidArgument,
    Policy,
    RetryAfter,
    Throttle,
)
from aiodigest.backend import PAUSES, Add, Grant, Tokens
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.records.entries import pack
from aiodigest.testing import TestEngine
from aiodigest.timing.throttle import HOLD

SECONDS = float(os.environ.get("AIODIGEST_TEST_THROTTLE", "20"))  # of eight processes
HOLD_MS = round(HOLD * 1000)
THROTTLES = (
    Throttle(10, per=60), Throttle(10, per=60, burst=10), Throttle(60, per=60, burst=5), Throttle(100, per=1, burst=20),
    Throttle(3, per=2, burst=2), Throttle(1, per=0.5),
)  # fmt: skip
AT_ONCE = policy(maximum_delay=1000)


def busiest(begun: Sequence[float], per: float) -> int:
    """The most that began in any window of ``per`` seconds, its ends included."""
    times = sorted(begun)
    return max((bisect_right(times, time + per) - index for index, time in enumerate(times)), default=0)


def following(times: Sequence[float]) -> list[float]:
    """The least of each and all after it."""
    return [*accumulate(reversed(times), min)][::-1]


# What a user gives


def test_a_throttle_is_a_value() -> None:
    throttle = Throttle(60, per=timedelta(minutes=1), burst=5)
    assert (throttle.limit, throttle.per, throttle.burst) == (60, 60.0, 5)
    assert throttle == Throttle(60, 60, 5) == pickle.loads(pickle.dumps(throttle))
    assert len({throttle, Throttle(60, 60, 5), Throttle(60, 60)}) == 2
    assert Throttle(60, 60).burst == 1


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"limit": 0, "per": 1}, "limit must be a whole number from 1 to 1,000,000"),
        ({"limit": 2.5, "per": 1}, "limit must be a whole number"),
        ({"limit": 5, "per": 0}, "per must be at least 0.001"),
        ({"limit": 5, "per": "60"}, "per must be at least"),
        ({"limit": 5, "per": 1, "burst": 6}, "burst must be a whole number from 1 to 5"),
        ({"limit": 5, "per": 1, "burst": 0}, "burst must be a whole number from 1 to 5"),
    ],
)
def test_a_throttle_says_what_is_allowed(arguments: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidArgument, match=allowed):
        Throttle(**arguments)


def test_an_engine_takes_no_other_throttle() -> None:
    with pytest.raises(InvalidArgument, match="throttle must be a Throttle or None, not 60"):
        DigestEngine(namespace="test", throttle=60)  # pyright: ignore[reportArgumentType]


# The tokens


async def take(store: Store, wanted: int, throttle: Throttle, *returned: Tokens, asker: int = 1) -> Grant:
    return await store.backend.throttle(wanted, throttle.rate, asker, returned)


@pytest.mark.parametrize("throttle", THROTTLES, ids=lambda each: f"{each.limit}-{each.per:g}-{each.burst}")
async def test_who_takes_tokens_as_soon_as_may_be_and_uses_the_first_at_the_latest_meets_the_limit(
    store: Store, throttle: Throttle
) -> None:
    """All of the first second are used at its end. A rule that lets more or fewer begin would be noticed."""
    began, begun = store.now, list[float]()
    while store.now < began + 2.5 * throttle.per * 1000 + 2 * HOLD_MS:
        grant = await take(store, 1_000, throttle)
        begun += [max(store.now, began + HOLD_MS)] * grant.tokens.number
        store.now += -(-grant.wait_us // 1000)
        assert grant.wait_us > 0, "all were asked for"
    assert busiest(begun, throttle.per * 1000) == throttle.limit


fates = st.one_of(
    st.tuples(st.just("used"), st.sampled_from((0, 1, 300, 999, HOLD_MS))),
    st.tuples(st.sampled_from(("back", "back", "lost")), st.sampled_from((0, 1, 500, 1_000, 2_000, 30_000))),
)
moves = st.tuples(
    st.sampled_from((None, None, None, 0, 1, 40, 500, 1_000, 2_500)),  # ms from the last; None: as long as was told
    st.sampled_from((1, 2, 5, 100)),  # tokens
    st.sampled_from((0, 0, 0, 0, -300, -999, -5_000)),  # steps of the server's clock, ms
)


@given(st.sampled_from(THROTTLES), st.lists(moves, max_size=60), st.lists(fates, min_size=1, max_size=9))
@example(Throttle(3, per=2, burst=2), [(None, 5, 0)] * 60, [("back", 30_000)] * 20 + [("used", 0)] * 40)
@settings(max_examples=300)
def test_no_window_sees_more_whatever_is_taken_used_and_given_back(
    throttle: Throttle, plan: list[tuple[int | None, int, int]], fates: list[tuple[str, int]]
) -> None:
    """Counted by brute force, in real time, while the server's clock steps back now and then."""
    asyncio.run(_play(throttle, plan, fates))


async def _play(throttle: Throttle, plan: list[tuple[int | None, int, int]], fates: list[tuple[str, int]]) -> None:
    time, offset, wait_us, begun = 1_000_000, 0, 0, list[float]()
    store = ReferenceBackend(now=lambda: time + offset)
    coming: list[tuple[int, Tokens]] = []  # back, and when
    drawn = 0
    for gap, wanted, step in plan:
        goal = time + (-(-wait_us // 1000) if gap is None else gap)
        while coming and coming[0][0] <= goal:
            time, tokens = heappop(coming)
            await store.throttle(0, throttle.rate, 1, [tokens])
        time, offset = goal, offset + step
        grant = await store.throttle(wanted, throttle.rate, 1)
        wait_us = grant.wait_us
        for _ in range(grant.tokens.number):
            fate, delay = fates[drawn % len(fates)]
            drawn += 1
            if fate == "used":
                begun.append(time + delay)
            elif fate == "back":
                heappush(coming, (time + delay, grant.tokens._replace(number=1)))
    assert busiest(begun, throttle.per * 1000) <= throttle.limit


async def test_what_is_given_back_may_be_had_again_and_no_more(store: Store) -> None:
    throttle = Throttle(62, per=60, burst=3)  # one comes anew a bit later than each second
    first = (await take(store, 3, throttle)).tokens
    assert first.number == 3
    assert (await take(store, 1, throttle)).tokens.number == 0
    assert (await take(store, 5, throttle, first._replace(number=2))).tokens.number == 2, "at once: all that came back"
    store.now += 10_000
    again = (await take(store, 3, throttle)).tokens
    store.now += 1_500
    assert (await take(store, 1, throttle)).tokens.number == 1, "this has come anew"
    grant = await take(store, 9, throttle, again)
    assert grant.tokens.number == 2, "one of the three has come anew already"


async def test_after_a_throttle_that_lets_less_begin_nobody_waits_longer_than_for_its_own_windows(store: Store) -> None:
    slow, fast = Throttle(1, per=86_400), Throttle(5, per=10)
    assert (await take(store, 1, slow)).tokens.number == 1
    assert (await take(store, 1, fast)).wait_us == 11_000_000
    store.now += 11_000
    assert (await take(store, 1, fast)).tokens.number == 1


async def test_the_time_of_tokens_does_not_step_back(store: Store) -> None:
    """As a shard's clock may, by less than a second: less would be taken for passed when one comes back."""
    throttle = Throttle(1, per=10)
    before = (await take(store, 1, throttle)).tokens.at_us
    store.now -= 900
    assert (await take(store, 1, throttle)).tokens.at_us == before
    store.now += 901
    assert (await take(store, 1, throttle)).tokens.at_us == before + 1_000


async def test_who_asked_in_vain_is_told_to_others(store: Store) -> None:
    throttle = Throttle(1, per=10)
    assert not (await take(store, 1, throttle, asker=1)).contended
    assert not (await take(store, 1, throttle, asker=1)).contended, "nobody else asks"
    assert (await take(store, 1, throttle, asker=2)).contended
    assert (await take(store, 1, throttle, asker=1)).contended
    assert not (await take(store, 1, throttle, asker=1)).contended, "the other has gone"


async def test_the_tokens_of_a_namespace_that_is_erased_begin_anew(own: Server, namespace: str) -> None:
    for backend in (ReferenceBackend(), RedisBackend(f"unix://{own.socket}", namespace=namespace)):
        await backend.connect()
        for _ in range(2):
            given = [(await backend.throttle(1, Throttle(1, per=1_000).rate, 1)).tokens.number for _ in range(2)]
            assert given == [1, 0]
            await backend.operations.erase()
        await backend.aclose()


async def test_pauses_are_told_once_until_they_end_and_a_thousand_at_the_most(store: Store) -> None:
    rate, ask = Throttle(1, per=10).rate, store.backend.throttle
    grant = await ask(0, rate, 1, (), [("a", 5_000), ("b\0\udcff", 9_000), ("a", 1_000)])
    assert (grant.known, grant.pauses) == (2, (("a", 5_000), ("b\0\udcff", 9_000)))
    assert (await ask(0, rate, 2, (), (), 2)).pauses == (), "they are known"
    store.now += 5_000
    assert (await ask(0, rate, 2)).pauses == (("b\0\udcff", 4_000),)
    await ask(0, rate, 1, (), [(f"{number}", 10_000 + number) for number in range(PAUSES + 5)])
    told = (await ask(0, rate, 2)).pauses
    assert [name for name, _ in told] == [f"{number}" for number in range(5, PAUSES + 5)], "those that end last"


async def test_after_a_change_of_the_shards_nothing_is_handed_out_until_all_windows_are_over(
    own: Server, namespace: str
) -> None:
    """And nothing where it was before, also to who has not heard of the change."""
    clock, throttle = [1_700_000_000_000], Throttle(5, per=10, burst=2)
    url, options = f"unix://{own.socket}", dict[str, Any](namespace=namespace, now=lambda: clock[0])
    one, other = RedisBackend(url, shards=2, **options), RedisBackend(url, **options)
    try:
        await one.connect()
        before = (await one.throttle(2, throttle.rate, 1, (), [("a", 600_000)])).tokens
        assert before.number == 2
        await other.connect()
        assert (await other.throttle(1, throttle.rate, 2)).tokens.source == 0
        await one.operations.reshard(3)
        first = await one.throttle(1, throttle.rate, 1, [before])
        assert (first.tokens.number, first.wait_us) == (0, 11_000_000)
        assert first.tokens.source == one.shard_map.current.start > 0
        clock[0] += 10_999
        late = await other.throttle(1, throttle.rate, 2)
        assert (late.tokens.number, late.wait_us) == (0, 1_000), "whoever asks"
        clock[0] += 1
        assert (await one.throttle(5, throttle.rate, 1)).tokens.number == 1
        while await one.operations.drain():
            pass
        with own.client() as client:
            left = [key for key in client.scan_iter(f"{{{namespace}:?:*") if not key.endswith(b":layout")]
        assert not left, "nothing is left where it was before"
    finally:
        await one.aclose()
        await other.aclose()


# The workers


class Far(WatchedBackend):
    """A store whose throttle takes a while to answer, in the same memory as another if one is given."""

    def __init__(self, shards: int = 1, *, same: WatchedBackend | None = None) -> None:
        super().__init__(shards)
        self.away = 0.0  # seconds, there and back each
        if same is not None:
            self.machines = same.machines

    async def throttle(self, wanted: int, *arguments: Any, **named: Any) -> Grant:
        await asyncio.sleep(self.away)
        grant = await super().throttle(wanted, *arguments, **named)
        await asyncio.sleep(self.away)
        return grant


async def filled(count: int, backend: WatchedBackend | None = None, shards: int = 1) -> WatchedBackend:
    """A store with timelines that are due one after the other."""
    store = backend or WatchedBackend(shards)
    for number in range(count):
        await store.put(f"k{number}", number)
        await asyncio.sleep(0.01)
    return store


def owed(backend: WatchedBackend) -> float:
    """Seconds until all tokens are paid off that are out."""
    return (backend.machines[0].bucket.tat_us or 0) / 1_000_000 - asyncio.get_running_loop().time()


@virtual_time
async def test_no_window_sees_more_attempts_and_what_is_over_waits_in_the_order_in_which_it_is_due() -> None:
    inbox, backend = Inbox(), await filled(40, shards=3)
    async with delivering(inbox, backend, policy=AT_ONCE, throttle=Throttle(10, per=60, burst=3)):
        await inbox.digest(40)
        assert busiest(inbox.times, 60) == 10
        for shard in range(3):
            numbers = [int(one.key[1:]) for one in inbox.digests if backend.shard_map.shard_of(one.key) == shard]
            assert numbers == sorted(numbers)
        assert {delivery.attempt for delivery in inbox.seen} == {1}
        assert inbox.times[-1] < 40 / 8 * 61 * 1.05, "and as many as may be"


@virtual_time
async def test_an_idle_worker_sends_no_more_with_a_throttle_and_without_one_none_is_asked() -> None:
    sent: list[int] = []
    for throttle in (None, Throttle(10, per=60)):
        inbox = Inbox()
        async with delivering(inbox, policy=AT_ONCE, throttle=throttle) as (engine, backend):
            await engine.add("key", 1)
            await inbox.digest()
            assert bool(backend.count("throttle")) == bool(throttle)
            await asyncio.sleep(10)
            backend.calls.clear()
            await asyncio.sleep(600)
            assert not backend.count("throttle")
            sent.append(len(backend.calls))
    assert sent[1] <= sent[0] <= 61


@virtual_time
async def test_a_claim_that_brings_fewer_digests_than_it_has_tokens_gives_the_others_back() -> None:
    inbox, throttle = Inbox(), Throttle(5, per=60, burst=5)
    async with delivering(inbox, policy=AT_ONCE, throttle=throttle) as (engine, backend):
        for _ in range(5):
            await engine.add("key", 1)
            await asyncio.sleep(0.1)
        await inbox.digest(5)
        assert inbox.times[-1] < 1, "a burst, one by one"
        await asyncio.sleep(1)
        assert owed(backend) <= 5 * 61


@virtual_time
async def test_what_need_not_be_sent_uses_no_token() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    for number in range(20):
        bad = Add(f"k{number}", pack(b"bad", None, b"\xff"), AT_ONCE.terms)
        await ReferenceBackend.add(backend, 0, [bad])
    async with delivering(inbox, backend, policy=AT_ONCE, throttle=Throttle(2, per=60, burst=2)):
        for number in range(1, 21):
            assert (await inbox.outcome(number)).result == "buried"
        await asyncio.sleep(1)
        assert now() < 60
        assert owed(backend) <= 0


@virtual_time
async def test_while_its_destination_pauses_no_token_is_used_and_few_are_asked_for() -> None:
    inbox, backend = Inbox(RetryAfter(500, pause=True)), await filled(30)
    throttle = Throttle(60, per=60, burst=5)

    def one(key: str) -> str:
        return "one"

    async with delivering(inbox, backend, policy=AT_ONCE, throttle=throttle, destination=one):
        await inbox.digest()
        await asyncio.sleep(200)
        assert len(inbox.digests) <= 5, "those that had begun"
        assert backend.count("throttle") < 100
        assert owed(backend) <= 0
        await inbox.digest(31)


@virtual_time
@pytest.mark.parametrize("throttle", [Throttle(100, per=60, burst=5), None])
async def test_with_a_throttle_a_pause_holds_for_all_workers(throttle: Throttle | None) -> None:
    first, second, backend = Inbox(RetryAfter(500, pause=True)), Inbox(), WatchedBackend()
    other = Far(same=backend)
    async with delivering(first, backend, policy=AT_ONCE, throttle=throttle) as (engine, _):
        await engine.add("key", 1)
        await first.digest()
        await asyncio.sleep(0.1)
        two = DigestEngine[JSON](namespace="two", backend=other, policy=AT_ONCE, throttle=throttle)
        async with two.delivering(second):
            await two.add("another", 1)
            await asyncio.sleep(400)
            assert len(second.digests) == (throttle is None)
            assert len(first.digests) == 1
            await asyncio.sleep(200)
            assert len(first.digests) + len(second.digests) == 3


@virtual_time
async def test_with_a_throttle_a_pause_holds_for_its_destination_in_all_workers_and_for_no_other() -> None:
    first, second, backend = Inbox(RetryAfter(500, pause=True)), Inbox(), WatchedBackend()

    def speed(key: str) -> str:
        return key.partition(":")[0]

    options: dict[str, Any] = {"policy": AT_ONCE, "throttle": Throttle(100, per=60, burst=5), "destination": speed}
    async with delivering(first, backend, **options) as (engine, _):
        await engine.add("slow:1", 1)
        await first.digest()
        await asyncio.sleep(0.1)
        two = DigestEngine[JSON](namespace="two", backend=Far(same=backend), **options)
        async with two.delivering(second, shards=[0]):
            for key in ("slow:2", "fast:1", "slow:3", "fast:2"):
                await two.add(key, 1)
            await asyncio.sleep(400)
            begun = [digest.key for digest in first.digests + second.digests]
            assert sorted(begun) == ["fast:1", "fast:2", "slow:1"]
            assert owed(backend) <= 0, "what was claimed for it gave its token back"
            await asyncio.sleep(200)
            assert len(first.digests) + len(second.digests) == 6


@virtual_time
async def test_a_token_whose_time_is_over_is_not_used_and_its_digest_waits_for_another_uncharged() -> None:
    """It takes two seconds to say which policy it has, and the store takes long to hand out another token."""
    inbox, backend = Inbox(), Far()
    looks: list[float] = []

    async def slowly(key: str) -> Policy:
        looks.append(now())
        if len(looks) > 1:  # the first is for the add
            await asyncio.sleep(2)
        return AT_ONCE

    throttle = Throttle(10, per=60, burst=5)
    async with delivering(inbox, backend, policy=slowly, throttle=throttle) as (engine, _):
        backend.away = 0.6
        await engine.add("key", 1)
        await asyncio.sleep(60)
        assert not inbox.digests
        assert backend.count("throttle") < 60
        backend.away = 0.1
        digest = await inbox.digest()
        assert digest.attempt == 1
        assert busiest(inbox.times, 60) == 1


@virtual_time
async def test_a_digest_that_was_not_quick_to_begin_takes_another_token_although_claims_wait_for_its_place() -> None:
    inbox, backend, throttle = Inbox(), WatchedBackend(), Throttle(60, per=60)

    async def slowly(key: str) -> Policy:
        await asyncio.sleep(2)
        await ReferenceBackend.throttle(backend, 1, throttle.rate, 7)  # another process takes what there is
        return AT_ONCE

    async with delivering(inbox, backend, concurrency=1, policy=slowly, throttle=throttle) as (engine, _):
        await asyncio.gather(*(engine.add(f"k{number}", 1) for number in range(5)))
        await inbox.digest(5)
        assert inbox.times[-1] < 5 * 6
        assert not backend.count("postpone")


@virtual_time
async def test_what_the_throttle_has_carried_into_closed_hours_waits_for_the_opening_and_uses_no_token() -> None:
    day = policy(hours=Hours("13:00-13:50"))  # it is 13:46:40, by the clocks of test and server
    inbox, backend = Inbox(), WatchedBackend()
    for number in range(9):
        await backend.put(f"k{number}", number, policy=day)
    async with delivering(inbox, backend, policy=day, throttle=Throttle(1, per=149)):
        await inbox.digest(2)
        await asyncio.sleep(1_000)
        assert backend.count("postpone") == 7, "one after the other"
        assert owed(backend) <= 0
        await inbox.outcome(4)
    opening = 24 * 3600 - 2800
    assert inbox.times == pytest.approx([0, 150, opening, opening + 150], abs=0.1)
    assert {delivery.attempt for delivery in inbox.seen} == {1}


@virtual_time
async def test_a_digest_whose_token_comes_when_its_hours_have_closed_waits_for_the_opening() -> None:
    """It takes so long to say which policy it has that its token has lapsed."""
    day, waits = policy(hours=Hours("13:00-13:50")), iter([150, 0])
    inbox, backend, throttle = Inbox(), WatchedBackend(), Throttle(1, per=99)

    async def slowly(key: str) -> Policy:
        if wait := next(waits):
            await asyncio.sleep(wait)
            await ReferenceBackend.throttle(backend, 1, throttle.rate, 7)  # another process takes what there is
        return day

    await backend.put("key", 1, policy=day)
    async with delivering(inbox, backend, policy=slowly, throttle=throttle):
        assert (await inbox.outcome()).attempt == 1
    assert backend.times("postpone") == pytest.approx([250], abs=1)
    assert inbox.times == pytest.approx([24 * 3600 - 2800], abs=0.1)


@virtual_time
async def test_each_part_of_a_digest_is_an_attempt() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    parted = policy(maximum_delay=1000, max_size=2)
    await backend.put("key", *range(7), policy=parted)
    async with delivering(inbox, backend, policy=parted, throttle=Throttle(2, per=10, burst=2)):
        await inbox.digest(4)
        assert busiest(inbox.times, 10) == 2
        assert inbox.values == [[0, 1], [2, 3], [4, 5], [6]]
        assert {digest.attempt for digest in inbox.digests} == {1}


@virtual_time
async def test_what_is_urgent_or_flushed_does_not_pass_the_throttle() -> None:
    inbox, waiting = Inbox(), policy(initial_delay=10_000, maximum_delay=10_000)
    async with delivering(inbox, policy=waiting, throttle=Throttle(1, per=60)) as (engine, _):
        await engine.add("first", 1, urgent=True)
        await engine.add("second", 1, urgent=True)
        await engine.add("third", 1)
        await engine.flush("third")
        await inbox.digest(3)
    assert [digest.key for digest in inbox.digests] == ["first", "second", "third"]
    assert busiest(inbox.times, 60) == 1


@virtual_time
async def test_no_shard_of_a_process_waits_for_another_to_be_empty() -> None:
    backend = await filled(60, shards=3)
    keys = {backend.shard_map.shard_of(f"k{number}"): f"k{number}" for number in range(60)}
    assert len(keys) == 3
    inbox = Inbox()
    async with delivering(inbox, backend, policy=AT_ONCE, throttle=Throttle(30, per=30)):
        await inbox.digest(12)
        served = [backend.shard_map.shard_of(digest.key) for digest in inbox.digests]
        assert {served.count(shard) for shard in range(3)} == {4}


@virtual_time
async def test_a_process_far_from_the_server_has_its_turn_beside_one_that_is_near() -> None:
    near, backend = Inbox(), await filled(200, shards=2)
    away, store = Inbox(), Far(2, same=backend)
    store.away = 0.1
    options: dict[str, Any] = {"policy": AT_ONCE, "throttle": Throttle(60, per=60)}
    one = engine_on(backend, **options)
    two = DigestEngine[JSON](namespace="two", backend=store, **options)
    async with one.delivering(near, shards=[0]), two.delivering(away, shards=[1]):
        await asyncio.sleep(90)
        assert min(len(away.digests), len(near.digests)) > 8
        assert busiest(near.times + away.times, 60) <= 60


@virtual_time
async def test_while_the_store_hands_out_no_tokens_nothing_begins_and_then_all_goes_on() -> None:
    inbox, backend = Inbox(), WatchedBackend(2, down="throttle")
    async with delivering(inbox, backend, policy=AT_ONCE, throttle=Throttle(60, per=60, burst=9)) as (engine, _):
        for number in range(6):
            await engine.add(f"k{number}", 1)
        await asyncio.sleep(30)
        assert not inbox.digests
        assert engine.activity.unavailable
        assert backend.count("throttle") < 100, "it does not ask at once again"
        assert not backend.count("postpone")
        backend.bring_up()
        await inbox.digest(6)
        assert not engine.activity.unavailable
        assert {digest.attempt for digest in inbox.digests} == {1}


@virtual_time
async def test_an_engine_tells_how_long_it_waits_for_the_throttle_and_leaves_at_once() -> None:
    inbox = Inbox()
    async with delivering(inbox, policy=AT_ONCE, throttle=Throttle(1, per=3600)) as (engine, _):
        await engine.add("one", 1)
        await inbox.digest()
        assert engine.activity.throttled == 0
        await engine.add("two", 1)
        await asyncio.sleep(1)
        assert 3590 < engine.activity.throttled <= 3601
        left = now()
    assert now() - left < 1


@virtual_time
async def test_a_digest_that_is_to_run_alone_keeps_no_token_while_it_waits() -> None:
    inbox, backend = Inbox(lasting(100)), WatchedBackend()
    await backend.put("poison", 1)
    for _ in range(2):  # its workers died
        await backend.claim(0, 1, 60_000, AT_ONCE.terms.limits)
        for _ in range(4):
            await asyncio.sleep(20)
            await backend.claim(0, 0, 60_000, AT_ONCE.terms.limits)
    throttle = Throttle(2, per=60, burst=1)
    async with delivering(inbox, backend, policy=AT_ONCE, throttle=throttle, concurrency=2) as (engine, _):
        await engine.add("other", 1)
        await inbox.digest(2)
        assert {digest.key for digest in inbox.digests} == {"poison", "other"}
        assert busiest(inbox.times, 60) <= 2


@dataclass
class Told:
    """What processes have told of their claims and attempts."""

    claims: list[tuple[int, int, int, str]] = field(default_factory=list[tuple[int, int, int, str]])
    again: set[str] = field(default_factory=set[str])  # claimed after a process that was killed
    begun: list[tuple[str, float, bool]] = field(default_factory=list[tuple[str, float, bool]])
    last: Program | None = None  # whose attempt has begun last

    async def listen(self, program: Program) -> None:
        while line := await program.line():
            kind, key, *facts = line.split()
            if kind == "begun":
                self.begun.append((key, float(facts[0]), facts[1] == "1"))
                self.last = program
            elif facts[-1] == "1":
                self.again.add(key)
            else:
                shard, when, due, _ = map(int, facts)
                self.claims.append((shard, when, due, key))


@pytest.mark.processes
async def test_eight_processes_that_are_killed_now_and_then_keep_to_it_together(server: Server, namespace: str) -> None:
    """No window sees more, every record is delivered, on each shard in the order in which they were due; but for those
    whose process was killed, which are tried again. AIODIGEST_TEST_THROTTLE=120 takes two minutes.

    Nothing here depends on how fast the machine is. An attempt begins when its token is looked at. Claims take what is
    due first; attempts begin within the second for which their tokens are good, but for those which have taken another
    since they came too late.
    """
    throttle, count = Throttle(30, per=3, burst=4), round(SECONDS * 27 / 4)
    arguments = (server.url, namespace, throttle.limit, throttle.per, throttle.burst)
    told, workers, listening = Told(), list[Program](), list[asyncio.Task[None]]()
    async with DigestEngine(server.url, namespace=namespace, shards=3) as engine, AsyncExitStack() as stack:
        for number in range(count):
            await engine.add(f"k{number}", number)

        async def enter() -> None:
            workers.append(await stack.enter_async_context(running("throttled.py", *arguments)))
            listening.append(asyncio.create_task(told.listen(workers[-1])))

        async def are_delivered() -> bool:
            return (await engine.stats()).delivered == count

        for _ in range(8):
            await enter()
        for goal in range(20, count, 20):
            await until(lambda goal=goal: len(told.begun) >= goal)
            victim = told.last if told.last in workers and goal % 40 else workers[0]  # most likely in its callback
            workers.remove(victim)
            victim.process.kill()
            await enter()
        await until(are_delivered)
        for worker in workers:
            worker.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*listening)
        stats = await engine.stats()
    assert (stats.delivered, stats.buried, stats.waiting + stats.ready + stats.leased) == (count, 0, 0)
    assert len({key for key, _, _ in told.begun}) == count
    assert busiest([when for _, when, _ in told.begun], throttle.per) <= throttle.limit
    began = {key: when for key, when, is_own in told.begun if is_own and key not in told.again}
    for shard in range(3):
        claims = sorted(claim[1:] for claim in told.claims if claim[0] == shard)
        dues = [due for _, due, _ in claims]
        assert dues == sorted(dues)
        times = [began[key] for _, _, key in claims if key in began]
        assert all(when <= after + HOLD for when, after in zip(times, following(times), strict=True))


# In a test


async def test_a_test_engine_keeps_to_the_throttle_by_the_clock_of_the_test() -> None:
    engine = DigestEngine[JSON](
        namespace="test", policy=policy(maximum_delay=1000, max_size=2), throttle=Throttle(4, per=60, burst=2)
    )
    begun: list[float] = []

    @engine.deliver
    async def deliver(digest: Digest[JSON]) -> None:
        begun.append(test.now.timestamp())

    async with TestEngine(engine, start=datetime(2026, 1, 1, tzinfo=UTC)) as test:
        for number in range(5):
            await engine.add(f"k{number}", 1)
        for number in range(5):
            await engine.add("parts", number)
        await test.advance()
        assert len(begun) == 2
        await test.advance(minutes=10)
        assert len(begun) == 8, "three of them are parts of one digest"
        assert busiest(begun, 60) == 4
        assert {delivery.attempt for delivery in test.attempts} == {1}
        assert len(test.delivered) == 8
