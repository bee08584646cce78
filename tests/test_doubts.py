"""Digests whose leases ended without a word: one at a time in a process, and alone from the second time on."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from engines import (
    Inbox,
    VirtualLoop,
    WatchedBackend,
    delivering,
    forever,
    lasting,
    now,
    policy,
    settle,
    state_of,
    virtual_time,
)

from aiodigest import JSON, Digest, Policy, RetryAfter, RetryPolicy
from aiodigest.worker import delivery, doubts

pytestmark = pytest.mark.virtual_time

LEASE = 60.0
LIMITS = Policy().terms.limits
SELDOM = RetryPolicy(backoff=lambda attempt: 500.0)


class Receiver(Inbox):
    """A callback that takes some seconds for each key; it notes when each began and ended, and what ran beside it."""

    def __init__(self, **lasts: float) -> None:
        super().__init__()
        self.lasts = lasts
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.beside: dict[str, set[str]] = {}

    async def __call__(self, digest: Digest[JSON]) -> None:
        running = self.began.keys() - self.ended.keys()
        for other in running:
            self.beside[other].add(digest.key)
        self.began[digest.key], self.beside[digest.key] = now(), set(running)
        await super().__call__(digest)
        await asyncio.sleep(self.lasts.get(digest.key, 0))
        self.ended[digest.key] = now()


async def lost(backend: WatchedBackend, *keys: str, times: int = 1) -> None:
    """Let timelines be as when the leases on their digests have ended without a word, so many times."""
    for key in keys:
        await backend.put(key, key)
        shard = backend.shard_map.shard_of(key)
        assert await backend.open(shard, key, 60_000, LIMITS)
        machine = backend.machines[shard]
        delivery = machine.held[key].delivery
        assert delivery is not None
        delivery.lost, machine.leased[key] = times - 1, 0


def keys_of(backend: WatchedBackend, *shards: int) -> list[str]:
    """A key of each of these shards, all of them different."""
    keys: list[str] = []
    for shard in shards:
        some = (key for key in map(str, range(1000)) if backend.shard_map.shard_of(key) == shard)
        keys.append(next(key for key in some if key not in keys))
    return keys


async def test_a_process_has_one_doubtful_digest_at_a_time_over_all_its_shards_and_others_beside_it() -> None:
    keys = [f"doubtful-{number}" for number in range(12)]
    inbox, backend = Receiver(**dict.fromkeys(keys, 10.0)), WatchedBackend(shards=4)
    await lost(backend, *keys)
    async with delivering(inbox, backend):
        for number in range(5):
            await asyncio.sleep(15)
            before = now()
            await backend.put(f"healthy-{number}", 1)
            await inbox.outcome(len(inbox.seen) + 1)
            assert now() < before + 0.1, "it waited for a doubtful one"
        await asyncio.sleep(3 * LEASE)
        claims = backend.count("claim")
    assert sorted(inbox.began[key] for key in keys) == pytest.approx([10 * number for number in range(12)], abs=0.5)
    assert all(not inbox.beside[key] & {*keys} for key in keys)
    assert {(digest.attempt, digest.key) for digest in inbox.digests} >= {(1, key) for key in keys}
    assert claims < 150, "those that may not be taken are asked for again and again"


async def test_a_claim_that_may_not_take_what_is_doubtful_is_not_repeated_at_once() -> None:
    inbox, backend = Receiver(first=10 * LEASE), WatchedBackend()
    await lost(backend, "first", "second")
    async with delivering(inbox, backend, delivery_timeout=20 * LEASE):
        await asyncio.sleep(10 * LEASE - 1)
        assert backend.count("claim") <= 40
        assert [*inbox.began] == ["first"]
        await asyncio.sleep(2)
        assert inbox.began["second"] == pytest.approx(10 * LEASE, abs=0.1)


async def test_a_digest_that_was_lost_twice_runs_with_nothing_beside_it() -> None:
    inbox, backend = Receiver(before=1.5 * LEASE, alone=30, newer=1), WatchedBackend(shards=2)
    await backend.put("before", 1)
    async with delivering(inbox, backend):
        await inbox.digest()
        await lost(backend, "alone", times=2)
        await asyncio.sleep(LEASE / 2)  # it is claimed, and waits; what is due meanwhile does so in the store
        await backend.put("newer", 1)
        await asyncio.sleep(LEASE / 2)
        assert await state_of(backend, "alone") == ("leased", 1)
        assert await state_of(backend, "newer") == ("ready", 0)
        await inbox.outcome(3)
    assert not inbox.beside["alone"]
    assert inbox.began["alone"] == pytest.approx(inbox.ended["before"], abs=0.1)
    assert inbox.began["newer"] == pytest.approx(inbox.ended["alone"], abs=0.1)
    assert inbox.results == ["delivered"] * 3


async def test_what_runs_under_a_lease_that_has_ended_early_is_cut_when_its_own_worker_gets_another() -> None:
    ended: list[str] = []

    async def callback(digest: Digest[JSON]) -> None:
        try:
            await asyncio.sleep(5)
            ended.append(f"{digest.key} returned")
        except asyncio.CancelledError:
            ended.append(f"{digest.key} cut")
            raise

    backend = WatchedBackend()
    await backend.put("k", 1)
    async with delivering(Inbox(*[callback] * 3), backend):
        await asyncio.sleep(1)
        backend.machines[0].leased["k"] = 0  # as a step of its server's clock ends it
        await backend.put("other", 1)
        await asyncio.sleep(LEASE / 4)  # before a renewal
    assert sorted(ended) == ["k cut", "k returned", "other returned"]


async def test_what_a_late_claim_brings_is_given_back_while_one_is_alone() -> None:
    backend = WatchedBackend(shards=2, held="claim")
    alone, late = keys_of(backend, 0, 1)
    inbox = Receiver(**{alone: 30})
    backend.down_shards = {1}
    await lost(backend, alone, times=2)
    await backend.put(late, 1)
    async with delivering(inbox, backend):
        await inbox.digest()
        assert backend.count("claim", 1) == 1
        backend.gates["claim"].set()
        await asyncio.sleep(1)
        assert await state_of(backend, late) == ("ready", 0)
        assert (backend.count("release"), backend.count("claim", 1)) == (1, 1)
        await inbox.outcome(2)
    assert not inbox.beside[alone]
    assert inbox.began[late] == pytest.approx(inbox.ended[alone], abs=0.1)


@pytest.mark.parametrize("times", [1, 2])
async def test_the_engines_of_a_process_share_its_doubts(times: int) -> None:
    keys = ["one", "other"]
    inbox, backends = Receiver(before=20, one=80, other=30, newer=1), [WatchedBackend(), WatchedBackend()]
    await backends[1].put("before", 1)
    async with delivering(inbox, backends[0]), delivering(inbox, backends[1]):
        await inbox.digest()
        for key, backend in zip(keys, backends, strict=True):
            await lost(backend, key, times=times)
            await asyncio.sleep(LEASE / 2)
        await backends[1].put("newer", 1)
        await inbox.outcome(4)
    assert "other" not in inbox.beside["one"]
    if times == 2:
        assert not inbox.beside["one"] | inbox.beside["other"]
        assert inbox.began["one"] == pytest.approx(20, abs=1)
        assert inbox.began["other"] == pytest.approx(inbox.ended["one"], abs=1)


async def test_an_engine_that_has_ended_holds_up_nobody_with_what_ignores_its_cancellation() -> None:
    free, backend = asyncio.Event(), WatchedBackend()
    inbox = Inbox(ignoring_its_end(free))
    await backend.put("stubborn", 1)
    async with delivering(inbox, backend, drain_timeout=0):
        await inbox.digest()
    async with delivering(inbox, WatchedBackend()) as (_, other):
        await lost(other, "alone", times=2)
        await inbox.outcome()
        assert now() < 3 * LEASE
    free.set()
    await settle()


def test_the_engines_of_other_loops_have_doubts_of_their_own_which_leave_nothing_behind() -> None:
    @virtual_time
    async def deliver() -> None:
        inbox, backend = Inbox(), WatchedBackend()
        await lost(backend, "alone", times=2)
        async with delivering(inbox, backend):
            await inbox.outcome()
            assert len(doubts._OF_LOOPS) == before + 1

    gc.collect()
    before = len(doubts._OF_LOOPS)
    for _ in range(2):
        deliver()
        gc.collect()
        assert len(doubts._OF_LOOPS) == before


@pytest.mark.parametrize("broken", [False, True])
async def test_digests_that_cannot_be_postponed_keep_no_other_shard_from_what_is_doubtful(broken: bool) -> None:
    backend = WatchedBackend(shards=2)
    first, second, doubtful, poke = keys_of(backend, 0, 0, 1, 1)
    inbox = Inbox(RetryAfter(5000, pause=True))
    await backend.put(first, 1)

    def destination(key: str) -> str:
        return "down" if key in (first, second) else "up"

    async with delivering(inbox, backend, destination=destination):
        await inbox.outcome()
        backend.down_shards = {0}
        if broken:
            backend.take_down("postpone")
        await backend.put(second, 1)
        await asyncio.sleep(0.5)
        assert backend.count("postpone")
        before = now()
        await lost(backend, doubtful)
        await backend.put(poke, 1)
        await inbox.outcome(3)
        assert now() < before + 1
        backend.bring_up()


async def test_one_that_is_to_be_alone_and_cannot_be_read_holds_up_nobody_and_runs_alone_when_it_can() -> None:
    terms = policy(capacity=5000)
    backend = WatchedBackend(shards=2)
    alone, other = keys_of(backend, 0, 1)
    inbox = Receiver(**{other: 30})
    await backend.put(alone, *range(1500), policy=terms)
    assert await backend.open(0, alone, 60_000, terms.terms.limits)
    delivery = backend.machines[0].held[alone].delivery
    assert delivery is not None
    delivery.lost, backend.machines[0].leased[alone] = 1, 0
    backend.down_shards = {0}
    backend.take_down("read", "renew", "close", "claim")
    async with delivering(inbox, backend, policy=terms):
        backend.bring_up()
        backend.take_down("read", "renew")
        await asyncio.sleep(1)
        assert backend.count("read")
        await backend.put(other, 1)
        await inbox.digest()
        assert now() < 3, "it waited for one whose server is away"
        backend.bring_up()
        await inbox.outcome(2)
    assert not inbox.beside[alone] | inbox.beside[other]
    assert inbox.digests[1].attempt == 1


async def test_a_shard_that_cannot_claim_passes_its_turn_to_have_a_doubtful_digest() -> None:
    backend = WatchedBackend(shards=3)
    first, away, poke_away, waits, poke, again = keys_of(backend, 2, 0, 0, 1, 1, 0)
    inbox = Receiver(**{first: 25.0})
    await lost(backend, first)
    async with delivering(inbox, backend):
        await inbox.digest()
        for doubtful, healthy in ((away, poke_away), (waits, poke)):
            await lost(backend, doubtful)
            await backend.put(healthy, 1)
            await asyncio.sleep(0.1)
        backend.down_shards = {0}
        backend.take_down("claim")
        await backend.put(again, 1)
        await inbox.outcome(4)
        assert inbox.began[waits] == pytest.approx(25, abs=0.2)
        backend.bring_up()


async def test_shards_that_wait_for_a_doubtful_digest_are_told_when_its_callback_ignores_its_end() -> None:
    free, backend = asyncio.Event(), WatchedBackend(shards=2)
    stubborn, waits, poke = keys_of(backend, 0, 1, 1)
    inbox = Inbox(ignoring_its_end(free))
    await lost(backend, stubborn)
    async with delivering(inbox, backend, delivery_timeout=22, retry=SELDOM):
        await inbox.digest()
        await lost(backend, waits)
        await backend.put(poke, 1)
        await inbox.digest(3)
        assert 22 <= now() < 24
        free.set()


def ignoring_its_end(free: asyncio.Event) -> Callable[[Digest[JSON]], Awaitable[object]]:
    async def stubborn(digest: Digest[JSON]) -> None:
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await free.wait()

    return stubborn


@pytest.mark.parametrize(
    "why", ["its time is over", "its time was over while the loop stood still", "its lease is lost"]
)
async def test_one_that_is_to_be_alone_waits_for_a_callback_that_was_cancelled_and_has_not_ended_yet(why: str) -> None:
    ended, loop = list[float](), asyncio.get_running_loop()

    async def cleans_up(digest: Digest[JSON]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            doubts.doubts_of_loop().look_again()
            await asyncio.sleep(0.5)
            ended.append(now())

    inbox, backend = Inbox(cleans_up), WatchedBackend(shards=2)
    before, alone = keys_of(backend, 0, 1)
    await backend.put(before, 1)
    async with delivering(inbox, backend, delivery_timeout=LEASE / 2 if "time" in why else 10 * LEASE, retry=SELDOM):
        await inbox.digest()
        await lost(backend, alone, times=2)
        await asyncio.sleep(LEASE / 3)
        assert backend.machines[1].leased[alone] > 0, "nobody has claimed it"
        if "stood still" in why:
            assert isinstance(loop, VirtualLoop)
            loop.idle.now += LEASE / 3
        elif "lease" in why:
            delivery = backend.machines[0].held[before].delivery
            assert delivery is not None
            delivery.token = "another"
        assert (await inbox.digest(2)).key == alone
        assert ended
        assert now() == pytest.approx(ended[0], abs=0.1)


async def test_a_callback_that_ignores_the_end_of_its_time_is_not_waited_for() -> None:
    free, backend = asyncio.Event(), WatchedBackend()
    inbox = Inbox(ignoring_its_end(free))
    await backend.put("stubborn", 1)
    async with delivering(inbox, backend, delivery_timeout=30):
        await inbox.digest()
        await lost(backend, "alone", times=2)
        assert (await inbox.digest(2)).key == "alone"
        assert 30 <= now() < 32
        await inbox.outcome()
        free.set()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_doubtful_digest_whose_callback_ignores_the_end_of_its_time_holds_up_nobody(times: int) -> None:
    free, backend = asyncio.Event(), WatchedBackend()
    inbox = Inbox(ignoring_its_end(free))
    async with delivering(inbox, backend, delivery_timeout=30, retry=SELDOM):
        await lost(backend, "a stubborn one", "other", times=times)
        await inbox.digest()
        await backend.put("third", 1)
        await inbox.digest(3)
        assert {digest.key for digest in inbox.digests[1:]} == {"other", "third"}
        assert now() < 30 + LEASE
        free.set()


async def test_a_shard_whose_server_is_away_does_not_hold_up_what_is_to_be_alone() -> None:
    inbox, backend = Receiver(), WatchedBackend(shards=2)
    shard_of = backend.shard_map.shard_of
    away = next(key for key in map(str, range(100)) if shard_of(key) != shard_of("alone"))
    backend.down_shards = {shard_of(away)}
    await backend.put(away, 1)
    backend.take_down("close")
    async with delivering(inbox, backend):
        await inbox.digest()
        await lost(backend, "alone", times=2)
        assert (await inbox.outcome()).key == "alone"
        backend.bring_up()
        await inbox.outcome(2)


async def test_after_an_outage_in_which_a_shard_held_nothing_what_it_claims_alone_is_waited_for() -> None:
    backend = WatchedBackend(shards=2, held="renew")
    alone, before, newer = keys_of(backend, 0, 1, 1)
    inbox = Receiver(**{before: LEASE})
    async with delivering(inbox, backend):
        await settle()
        backend.down_shards = {0}
        backend.take_down("claim")
        await backend.put(before, 1)
        await inbox.digest()
        await lost(backend, alone, times=2)
        await asyncio.sleep(LEASE / 4)  # claims fail
        backend.bring_up()  # a claim is answered before a renewal is
        await asyncio.sleep(LEASE / 10)
        assert backend.machines[0].leased[alone] > 0
        await backend.put(newer, 1)  # while the other is waited for
        await asyncio.sleep(1)
        backend.gates["renew"].set()
        await inbox.outcome(3)
    assert not inbox.beside[alone]
    assert inbox.began[newer] == pytest.approx(inbox.ended[alone], abs=0.1)


async def test_nothing_begins_beside_one_that_is_alone_and_is_decoded_while_its_server_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, decoding, decoded = WatchedBackend(shards=2), asyncio.Event(), asyncio.Event()
    alone, other = keys_of(backend, 0, 1)
    inbox, read = Receiver(**{other: 30}), delivery.read

    async def slowly(*arguments: Any) -> Any:
        decoding.set()
        await decoded.wait()
        return await read(*arguments)

    monkeypatch.setattr(delivery, "read", slowly)
    await lost(backend, alone, times=2)
    async with delivering(inbox, backend):
        await decoding.wait()
        backend.down_shards = {0}
        backend.take_down("renew")
        await asyncio.sleep(LEASE / 2)  # renewals fail
        await backend.put(other, 1)
        await asyncio.sleep(1)
        assert await state_of(backend, other) == ("ready", 0)
        decoded.set()
        backend.bring_up()
        await inbox.outcome(2)
    assert not inbox.beside[alone]


async def test_a_doubtful_digest_is_told_when_it_is_tried_and_not_each_time_its_destination_keeps_it_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def only(key: str) -> str:
        return "the only one"

    inbox, backend = Receiver(before=LEASE), WatchedBackend()
    await backend.put("before", 1)
    async with delivering(inbox, backend, destination=only, destination_concurrency=1):
        await inbox.digest()
        await lost(backend, "doubtful")
        await inbox.outcome(2)
        assert backend.count("postpone") > 1
    [text] = [text for text in caplog.messages if "is tried again" in text]
    assert text == (
        "test: the digest of 'doubtful' is tried again beside others: its worker died or lost the server before it "
        "reported (1 time in a row); it runs alone from the second time on"
    )


async def test_one_that_waits_to_be_alone_is_given_back_uncharged_when_its_worker_stops() -> None:
    inbox, backend, released = Inbox(forever), WatchedBackend(), list[int]()
    await backend.put("before", 1)
    async with delivering(inbox, backend, drain_timeout=20):
        await inbox.digest()
        await lost(backend, "alone", times=2)
        await asyncio.sleep(LEASE / 2)
        assert backend.machines[0].leased["alone"] > 0, "nobody has claimed it"
        asyncio.get_running_loop().call_later(1, lambda: released.extend(backend.items("release")))
    assert released == [1], "it was not given back at once"
    assert await state_of(backend, "alone") == ("ready", 0)
    delivery = backend.machines[0].held["alone"].delivery
    assert delivery is not None
    assert (delivery.attempts, delivery.lost) == (0, 2)


async def test_the_rest_of_a_digest_in_parts_is_doubted_no_more() -> None:
    terms = policy(max_size=1)
    inbox, backend = Inbox(None, lasting(30)), WatchedBackend()
    await backend.put("alone", 1, 2, policy=terms)
    assert await backend.open(0, "alone", 60_000, terms.terms.limits)
    delivery = backend.machines[0].held["alone"].delivery
    assert delivery is not None
    delivery.lost, backend.machines[0].leased["alone"] = 1, 0
    async with delivering(inbox, backend, policy=terms):
        await inbox.digest(2)
        await backend.put("other", 3)
        await inbox.digest(3)
        assert now() < 1
    assert inbox.values == [[1], [2], [3]]


# A loop that stands still


def blocking(seconds: float) -> Callable[[Digest[JSON]], Awaitable[object]]:
    async def callback(digest: Digest[JSON]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.idle.now += seconds

    return callback


@pytest.mark.parametrize("waits", [False, True])
async def test_a_loop_that_stood_still_is_one_line_with_the_key_of_the_callback(
    waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def block(digest: Digest[JSON]) -> None:
        if waits:
            await asyncio.sleep(1)
        await blocking(LEASE * 0.7)(digest)

    inbox, backend = Inbox(block), WatchedBackend(shards=4)
    await backend.put("culprit", 1)
    async with delivering(inbox, backend):
        await inbox.outcome()
        await asyncio.sleep(3 * LEASE)
    lines = [record for record in caplog.records if "stood still" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].levelno == logging.WARNING
    assert "the callback of 'culprit' was running" in lines[0].getMessage()
    assert vars(lines[0])["timeline"] == "culprit"
    assert LEASE * 0.7 <= vars(lines[0])["seconds"] < LEASE


async def test_a_callback_that_only_takes_long_is_no_loop_that_stands_still(caplog: pytest.LogCaptureFixture) -> None:
    inbox, backend = Inbox(lasting(5 * LEASE), blocking(LEASE * 0.4)), WatchedBackend()
    async with delivering(inbox, backend, delivery_timeout=10 * LEASE):
        for key in ("one", "two"):
            await backend.put(key, 1)
        await inbox.outcome(2)
        await asyncio.sleep(LEASE)
    assert not [text for text in caplog.messages if "stood still" in text]


async def test_a_worker_whose_loop_stood_still_renews_before_it_claims() -> None:
    inbox, backend = Inbox(forever, blocking(LEASE * 0.7)), WatchedBackend()
    await backend.put("long", 1)
    async with delivering(inbox, backend, drain_timeout=0, retry=SELDOM):
        await inbox.digest()
        await settle()
        backend.gates["renew"] = asyncio.Event()
        await backend.put("culprit", 1)
        await inbox.digest(2)
        claims = backend.count("claim")
        await backend.put("next", 1)
        await asyncio.sleep(5)
        assert backend.count("claim") == claims
        backend.gates["renew"].set()
        await inbox.digest(3)
    assert [digest.key for digest in inbox.digests] == ["long", "culprit", "next"]
