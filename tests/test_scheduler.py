from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from engines import (
    Inbox,
    VirtualLoop,
    WatchedBackend,
    delivering,
    engine_on,
    forever,
    holding,
    lasting,
    now,
    policy,
    settle,
    state_of,
)

from aiodigest import (
    JSON,
    BackendUnavailable,
    BackoffMode,
    Delivery,
    Digest,
    Entry,
    PartialFailure,
    Policy,
    Reject,
    RetryAfter,
    RetryPolicy,
)
from aiodigest.backend import Claims, Lease, Retired, ShardMap
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backoff import PROBE_TIMEOUT
from aiodigest.errors import ConfigurationError
from aiodigest.worker.logs import FEW
from aiodigest.worker.shard import CLAIM

pytestmark = pytest.mark.virtual_time

LEASE = 60.0
MINUTE = 60.0
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0)
SELDOM = RetryPolicy(backoff=lambda attempt: 500.0)
LARGE = policy(capacity=3000)
CALLS = ("read", "close", "retry")  # after a claim, and without which nothing is lost


def lines(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """What was logged with all of these words in it."""
    return [text for text in caplog.messages if all(word in text for word in words)]


def noting(ends: list[float]) -> Callable[[Digest[JSON]], Awaitable[object]]:
    """A callback that takes long, and notes when it is cut short."""

    async def callback(digest: Digest[JSON]) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ends.append(now())

    return callback


async def deaf(digest: Digest[JSON]) -> None:
    """A callback that ignores the first attempt to cut it short, and ends then."""
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(1000)


def deaf_until(free: asyncio.Event) -> Callable[[Digest[JSON]], Awaitable[object]]:
    """A callback that ignores every attempt to cut it short until it is free to end."""

    async def callback(digest: Digest[JSON]) -> None:
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await free.wait()

    return callback


def keys_in(backend: WatchedBackend, shard: int, count: int = 1) -> list[str]:
    return [key for key in map(str, range(1000)) if backend.shard_map.shard_of(key) == shard][:count]


# idling and waking


async def test_an_idle_worker_claims_three_times_a_minute() -> None:
    async with delivering(Inbox()) as (_, backend):
        await asyncio.sleep(10 * MINUTE)
    assert backend.count("claim") <= 31
    assert backend.count("renew") == backend.count("close") == 0


async def test_a_worker_that_waits_for_a_due_time_does_not_poll_for_it() -> None:
    inbox = Inbox()
    async with delivering(inbox) as (_, backend):
        await backend.put("key", 1, policy=policy(initial_delay=15 * MINUTE))
        await inbox.digest()
        assert inbox.times == pytest.approx([15 * MINUTE], abs=0.01)
    assert backend.count("claim") <= 15 * 3 + 5


async def test_another_process_s_add_wakes_a_sleeping_worker_at_once() -> None:
    inbox = Inbox()
    async with delivering(inbox) as (_, backend):
        await asyncio.sleep(1)
        await backend.put("key", 1)
        await inbox.digest()
        assert now() == pytest.approx(1, abs=0.001)


async def test_an_add_that_makes_the_next_due_time_earlier_wakes_a_sleeping_worker() -> None:
    inbox = Inbox()
    async with delivering(inbox) as (_, backend):
        await backend.put("late", 1, policy=policy(initial_delay=18))
        await settle()
        await backend.put("soon", 1, policy=policy(initial_delay=2))
        await inbox.digest()
        assert (inbox.digests[0].key, now()) == ("soon", pytest.approx(2, abs=0.01))


@pytest.mark.parametrize("many", [False, True])
async def test_an_add_in_the_worker_s_own_process_wakes_it_although_the_wake_up_stream_is_silent(many: bool) -> None:
    inbox, backend = Inbox(), WatchedBackend(held="wait")
    async with delivering(inbox, backend) as (engine, _):
        await asyncio.sleep(1)
        await (engine.add_many([Entry("key", 1)]) if many else engine.add("key", 1))
        await inbox.digest()
        assert now() == pytest.approx(1, abs=0.001)


async def test_an_add_in_the_worker_s_own_process_costs_one_claim_though_the_wake_up_stream_tells_of_it_too() -> None:
    inbox = Inbox()
    async with delivering(inbox) as (engine, backend):
        await settle()
        claims = backend.count("claim")
        await engine.add("k", 1)
        await inbox.digest()
        await settle()
        assert backend.count("claim") == claims + 1


async def test_an_add_during_a_claim_is_not_missed() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend):
        await settle()
        backend.gates["claim"] = asyncio.Event()
        await asyncio.sleep(LEASE / 3)  # the worker's own round
        await backend.put("key", 1)
        backend.gates.pop("claim").set()
        await inbox.digest()
        assert now() == pytest.approx(LEASE / 3, abs=0.01)


async def test_a_broken_wake_up_stream_costs_a_few_claims_a_second_at_most() -> None:
    backend = WatchedBackend()
    backend.take_down("wait", error=ZeroDivisionError("a fault"))
    async with delivering(Inbox(), backend):
        await asyncio.sleep(10 * MINUTE)
    assert 600 < backend.count("claim") < 3 * 600


async def test_a_wake_up_stream_that_broke_once_is_listened_to_again() -> None:
    inbox, backend = Inbox(), WatchedBackend(down="wait")
    async with delivering(inbox, backend):
        await asyncio.sleep(5)
        backend.bring_up()
        await asyncio.sleep(2)
        claims = backend.count("claim")
        await asyncio.sleep(15)
        assert backend.count("claim") <= claims + 1
        await backend.put("key", 1)
        await settle()
        assert inbox.values == [[1]]


async def test_a_report_that_gets_through_does_not_stand_for_the_renewal_of_other_leases() -> None:
    inbox, backend = Inbox(lasting(15), lasting(50)), WatchedBackend()
    await backend.put("one", 1)
    await backend.put("two", 2)
    async with delivering(inbox, backend, concurrency=2, lease_timeout=30):
        await asyncio.sleep(9)
        backend.take_down("renew", "close")
        await asyncio.sleep(10)
        del backend.down["close"]
        await asyncio.sleep(2)
        assert inbox.results == ["delivered"]  # there is a free slot now, and the other lease is not renewed
        claims = backend.count("claim")
        await asyncio.sleep(3)
        assert backend.count("claim") == claims
        backend.bring_up()
        await asyncio.sleep(2)
        assert backend.count("claim") > claims


async def test_a_worker_that_stood_still_past_its_lease_does_not_begin_what_another_may_have_delivered() -> None:
    async def block(digest: Digest[JSON]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.idle.now += 100

    inbox, backend = Inbox(block), WatchedBackend()
    await backend.put("one", 1)
    await backend.put("two", 2)
    async with delivering(inbox, backend, concurrency=2, lease_timeout=30):
        await inbox.digest()
        await settle()
        assert inbox.values == [[1]]
        again = await inbox.digest(2)
        assert (again.key, again.attempt) == ("two", 2)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_digest_that_was_only_read_when_its_worker_stopped_is_given_back_as_it_was(ends: bool) -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    gate = backend.gates["read"] = asyncio.Event()
    async with delivering(inbox, backend, policy=LARGE, drain_timeout=5):
        await settle()
        assert backend.count("read") == 1
        if ends:
            asyncio.get_running_loop().call_later(1, gate.set)
    assert not inbox.digests
    gate.set()
    await backend.put("key", "new", policy=LARGE)
    async with delivering(inbox, backend, policy=LARGE):
        digest = await inbox.digest()
    assert (inbox.values, digest.attempt) == ([[*range(1500), "new"]], 1)


async def test_a_wake_up_stream_that_died_with_the_server_and_did_not_tell_is_listened_to_again() -> None:
    """A connection into a black hole looks like one on which nothing happens."""
    inbox, backend = Inbox(), WatchedBackend(held="wait")
    async with delivering(inbox, backend):
        await asyncio.sleep(1)
        backend.take_down("claim")
        await asyncio.sleep(25)
        backend.gates.clear()
        backend.bring_up()
        await asyncio.sleep(2)
        assert backend.count("wait") == 2
        await backend.put("key", 1)
        await settle()
        assert inbox.values == [[1]]


# concurrency


async def test_a_timeline_that_is_rarely_due_is_served_between_busy_ones() -> None:
    inbox, backend = Inbox(*[lasting(1)] * 1000), WatchedBackend()
    async with delivering(inbox, backend, concurrency=1, policy=policy()) as (engine, _):
        busy = [f"busy-{number}" for number in range(5)]
        for turn in range(20):
            for key in busy:
                await engine.add(key, turn)
            if turn == 10:
                await engine.add("rare", turn)
            await asyncio.sleep(1)
    assert "rare" in [digest.key for digest in inbox.digests[11:20]]


async def test_a_shard_with_a_backlog_leaves_room_for_the_others() -> None:
    inbox, backend = Inbox(*[lasting(1)] * 100), WatchedBackend(shards=2)
    for key in keys_in(backend, 0, 40):
        await backend.put(key, "backlog")
    async with delivering(inbox, backend, concurrency=2):
        await inbox.digest()
        await backend.put(keys_in(backend, 1)[0], "other")
        await asyncio.sleep(2.5)
        assert ["other"] in inbox.values


class Relocated(WatchedBackend):
    """A store in which shard 0 is gone when it is claimed from, and 1 has its timelines."""

    def __init__(self) -> None:
        super().__init__(shards=2)
        self._shard_map = ShardMap(1, range(1, 2), draining=range(1))

    async def claim(self, shard: int, *arguments: Any, **named: Any) -> Claims:
        if shard == 0:
            self._shard_map = ShardMap(2, range(1, 2))
            raise Retired("shard 0 is no more")
        return await super().claim(shard, *arguments, **named)


async def test_a_worker_whose_shards_are_gone_serves_those_that_took_their_place() -> None:
    inbox, backend = Inbox(), Relocated()
    await backend.put("key", 1)
    async with delivering(inbox, backend):
        await inbox.digest()
        assert now() < 1


def hanging(shard: int) -> WatchedBackend:
    """A store of two shards, one of which does not answer claims for now."""
    backend = WatchedBackend(shards=2)
    backend.down_shards = {shard}
    backend.gates["claim"] = asyncio.Event()
    return backend


async def test_claims_that_hang_at_one_shard_leave_room_for_the_others() -> None:
    inbox, backend = Inbox(), hanging(0)
    async with delivering(inbox, backend, concurrency=1):
        await backend.put(keys_in(backend, 1)[0], "other")
        await inbox.digest()
        assert now() < 1
        backend.gates["claim"].set()


async def test_digests_of_a_slow_claim_keep_to_the_concurrency() -> None:
    inbox, backend = Inbox(*[lasting(10)] * 2), hanging(0)
    await backend.put(keys_in(backend, 0)[0], "slow")
    await backend.put(keys_in(backend, 1)[0], "other")
    async with delivering(inbox, backend, concurrency=1):
        await inbox.digest()
        backend.gates["claim"].set()
        await asyncio.sleep(5)
        assert inbox.values == [["other"]]
        await inbox.digest(2)
        assert inbox.values == [["other"], ["slow"]]
        assert 10 <= now() < 11


async def test_after_a_claim_that_failed_the_next_is_for_one_digest() -> None:
    backend = WatchedBackend(down="claim")
    async with delivering(Inbox(), backend):
        await asyncio.sleep(2)
        failed = backend.count("claim")
        backend.bring_up()
        await asyncio.sleep(2)
        await backend.put("key", 1)
        await settle()
    first, *others = backend.items("claim")
    assert (first, set(others[:failed])) == (CLAIM, {1})
    assert set(others[failed:]) == {CLAIM}


# the store is away


async def test_an_outage_is_no_hot_loop() -> None:
    backend = WatchedBackend()
    async with delivering(Inbox(), backend):
        backend.take_down()
        await asyncio.sleep(10 * MINUTE)
        tries = backend.times("claim")
        backend.bring_up()
    assert 600 < len(tries) < 3 * 600
    waits = [later - earlier for earlier, later in pairwise(tries[10:])]
    assert max(waits) <= 1.01
    assert len({round(wait, 3) for wait in waits}) > 100  # jittered


@pytest.mark.parametrize("shards", [1, 4])
async def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(
    shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = WatchedBackend(shards)
    async with delivering(Inbox(), backend):
        await settle()
        backend.take_down()
        await asyncio.sleep(10 * MINUTE)
        backend.bring_up()
        await asyncio.sleep(2)
    assert len(lines(caplog, "unavailable", "connection refused")) == 1
    assert len(lines(caplog, "available again after 5")) == 1
    assert len(caplog.messages) == 2


async def test_claims_that_fail_while_renewals_work_are_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    inbox, backend = Inbox(lasting(1000)), await holding(1)
    async with delivering(inbox, backend, drain_timeout=0):
        await inbox.digest()
        backend.take_down("claim")
        await asyncio.sleep(10 * MINUTE)
        backend.bring_up()
        await asyncio.sleep(2)
    assert backend.count("claim") < 3 * 600
    assert len(lines(caplog, "unavailable")) == len(lines(caplog, "available again")) == 1


async def test_renewals_that_fail_while_claims_work_are_one_outage(caplog: pytest.LogCaptureFixture) -> None:
    inbox, backend = Inbox(*[lasting(50)] * 3), WatchedBackend()
    async with delivering(inbox, backend, policy=policy(), drain_timeout=0) as (engine, _):
        await engine.add("key", 1)
        await inbox.digest()
        backend.take_down("renew")
        for turn in range(450):
            await engine.add(f"busy-{turn}", turn)
            await asyncio.sleep(0.1)
        backend.bring_up()
        await asyncio.sleep(2)
    assert backend.count("renew") < 3 * 45
    assert len(lines(caplog, "unavailable")) == len(lines(caplog, "available again")) == 1


async def test_an_error_that_nobody_foresaw_is_an_outage_with_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend):
        backend.take_down("claim", error=ZeroDivisionError("a fault"))
        await backend.put("key", 1)
        await asyncio.sleep(MINUTE)
        backend.bring_up()
        await inbox.outcome()
    [record] = [record for record in caplog.records if "is unavailable" in record.getMessage()]
    assert record.exc_info is not None


async def test_one_shard_s_failure_does_not_stop_another() -> None:
    inbox, backend = Inbox(), WatchedBackend(shards=2)
    backend.take_down("claim", "renew", "wait", error=ZeroDivisionError("a fault"))
    backend.down_shards = {0}
    [sick], [well] = keys_in(backend, 0), keys_in(backend, 1)
    async with delivering(inbox, backend, policy=policy()) as (engine, _):
        for turn in range(10):
            await engine.add(sick, turn)
            await engine.add(well, turn)
            await asyncio.sleep(1)
        assert [digest.key for digest in inbox.digests] == [well] * 10
        backend.bring_up()
        await inbox.digest(11)
        assert inbox.values[10] == list(range(10))


async def test_what_waits_to_be_reported_to_a_shard_that_is_away_leaves_room_for_others() -> None:
    inbox, backend = Inbox(), WatchedBackend(shards=2, down="close")
    backend.down_shards = {0}
    [sick], [well] = keys_in(backend, 0), keys_in(backend, 1)
    async with delivering(inbox, backend, policy=policy(), concurrency=1) as (engine, _):
        for key in (sick, well):
            await engine.add(key, 1)
            await inbox.digest(1 + len(inbox.digests))
        assert [digest.key for digest in inbox.digests] == [sick, well]
        backend.bring_up()
        await inbox.outcome(2)


# reports


@pytest.mark.parametrize(("call", "reply", "attempts"), [("close", None, [1]), ("retry", ValueError(), [1, 2])])
async def test_a_report_whose_reply_was_lost_is_repeated_and_counts_once(
    call: str, reply: BaseException | None, attempts: list[int]
) -> None:
    inbox, backend = Inbox(reply), await holding(1)
    backend.lost[call] = 3
    async with delivering(inbox, backend, retry=RETRY):
        await asyncio.sleep(5 * MINUTE)
        assert backend.count(call) == 4
        assert (await backend.counts())["digests"] == 1
    assert [digest.attempt for digest in inbox.digests] == attempts


async def test_an_outcome_is_reported_when_the_server_is_back_and_nothing_is_delivered_twice() -> None:
    inbox, backend = Inbox(), await holding(1)
    async with delivering(inbox, backend):
        backend.take_down("close", "renew", "claim", "wait")
        backend.down.pop("claim")
        await inbox.digest()
        backend.take_down()
        await asyncio.sleep(10 * MINUTE)
        assert not inbox.seen  # the store does not know yet
        backend.bring_up()
        await asyncio.sleep(5 * MINUTE)
        assert await backend.operations.look("key") is None
    assert (inbox.values, inbox.results) == ([[1]], ["delivered"])


@pytest.mark.parametrize(
    ("call", "error", "line"),
    [
        *((call, ConfigurationError("no access"), "the server cannot be used: no access") for call in CALLS),
        ("read", BackendUnavailable("no answer"), "the server is unavailable: no answer"),
    ],
)
async def test_a_server_that_refuses_access_for_a_while_does_not_bring_a_digest_twice(
    call: str, error: Exception, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, backend = Inbox(ValueError("down") if call == "retry" else None), WatchedBackend()
    await backend.put("key", *range(1500), policy=LARGE)  # more than a claim brings
    backend.take_down(call, "renew", error=error)
    async with delivering(inbox, backend, policy=LARGE, retry=RETRY):
        await asyncio.sleep(LEASE / 2)
        assert backend.count(call) > 2
        assert not inbox.seen
        backend.bring_up()
        first = await inbox.outcome()
        assert (first.result, first.attempt) == ("failed" if call == "retry" else "delivered", 1)
        assert now() < LEASE / 2 + 2
    assert inbox.values == [list(range(1500))]
    assert lines(caplog, line)


async def test_a_backlog_is_claimed_some_at_a_time_and_reports_of_one_turn_go_out_as_one_call() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    for number in range(2 * CLAIM):
        await backend.put(f"key-{number}", 1)
    async with delivering(inbox, backend):
        await inbox.outcome(2 * CLAIM)
        await settle()
    assert backend.items("close") == [CLAIM, CLAIM]


# leases


async def test_a_long_delivery_keeps_its_lease() -> None:
    inbox, backend = Inbox(lasting(290)), await holding(1)
    async with delivering(inbox, backend):
        await inbox.outcome()
        await settle()
        assert backend.count("renew") == pytest.approx(290 / (LEASE / 3), abs=1)
        assert await backend.operations.look("key") is None
    assert inbox.results == ["delivered"]


async def test_a_lost_lease_cancels_the_callback(caplog: pytest.LogCaptureFixture) -> None:
    cancelled: list[float] = []
    inbox, backend = Inbox(noting(cancelled)), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest()
        await backend.delete("key")
        await asyncio.sleep(LEASE)
        assert cancelled == pytest.approx([LEASE / 3], abs=0.01)
        await backend.put("other", 2)
        await inbox.digest(2)
    assert lines(caplog, "lease on timeline 'key' is lost")
    assert not inbox.results.count("failed")


async def test_a_lease_that_another_worker_took_over_is_lost_when_its_outcome_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, backend = Inbox(lasting(10)), await holding(1)
    async with delivering(inbox, backend, policy=policy()):
        await inbox.digest()
        backend.machines[0].place("key", 0, 1)  # as after a pause of this process for longer than its lease
        other = await backend.open(0, "key", 60_000, Policy().terms.limits)
        await inbox.outcome()
        await settle()
        window = await backend.operations.look("key")
        assert other is not None
        assert window is not None
        assert window.state == "leased"
    assert lines(caplog, "another worker's")
    assert inbox.results == ["lost"]


async def test_a_worker_that_died_is_replaced_within_two_leases() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend):
        await asyncio.sleep(5)
        await backend.put("key", 1)
        [lease] = (await ReferenceBackend.claim(backend, 0, 1, 60_000, Policy().terms.limits)).leases
        digest = await inbox.digest()
        assert now() <= 5 + 2 * LEASE + 1
        assert (digest.id, digest.attempt) == (lease.digest_id, 2)


async def test_a_worker_whose_renewal_hangs_cancels_its_delivery_when_the_lease_ends_and_no_later() -> None:
    ended: list[float] = []
    inbox, backend = Inbox(noting(ended)), await holding(1)
    async with delivering(inbox, backend, drain_timeout=0, timeout=1):
        await inbox.digest()
        backend.gates["renew"] = asyncio.Event()
        await asyncio.sleep(2 * LEASE)
        assert ended == pytest.approx([LEASE], abs=0.01)
        backend.gates.pop("renew").set()


async def test_the_next_part_of_a_digest_is_not_begun_under_a_lease_that_was_lost_during_the_one_before() -> None:
    terms = policy(max_size=1)
    inbox, backend = Inbox(deaf), await holding(1, 2, policy=terms)
    async with delivering(inbox, backend, policy=terms, timeout=1):
        await inbox.digest()
        backend.gates["renew"] = asyncio.Event()
        await asyncio.sleep(LEASE + 1)
        backend.gates.pop("renew").set()
        await inbox.outcome(2)
        assert backend.items("release") == [1]
    assert inbox.values == [[1], [2]]


async def test_a_callback_is_not_begun_under_a_lease_that_was_lost_while_its_policy_function_ignored_that() -> None:
    asked: list[str] = []

    async def deaf(key: str) -> Policy:
        asked.append(key)
        if len(asked) == 1:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)
        return policy()

    inbox, backend = Inbox(), await holding(1, policy=policy())
    async with delivering(inbox, backend, policy=deaf, timeout=1):
        backend.gates["renew"] = asyncio.Event()
        await asyncio.sleep(LEASE + 1)
        backend.gates.pop("renew").set()
        await inbox.outcome()
    assert (inbox.values, asked) == ([[1]], ["key", "key"])


async def test_the_next_part_of_a_digest_has_a_lease_of_full_length_though_the_one_before_ended_late() -> None:
    async def late(digest: Digest[JSON]) -> None:
        await deaf(digest)
        await asyncio.sleep(LEASE - 15)

    terms = policy(max_size=1)
    inbox, backend = Inbox(late, lasting(9)), await holding(1, 2, policy=terms)
    async with delivering(inbox, backend, policy=terms, delivery_timeout=10):
        await inbox.digest(2)
        backend.gates["renew"] = asyncio.Event()
        await inbox.outcome(2)
        backend.gates.pop("renew").set()
    assert (inbox.results, inbox.values) == (["delivered"] * 2, [[1], [2]])


async def test_the_next_part_of_a_digest_is_cut_a_lease_after_the_one_before_was_closed() -> None:
    cut: list[float] = []
    terms = policy(max_size=1)
    inbox, backend = Inbox(lasting(10), noting(cut)), await holding(1, 2, policy=terms)
    async with delivering(inbox, backend, policy=terms, drain_timeout=0):
        await inbox.digest()
        backend.gates = {call: asyncio.Event() for call in ("claim", "renew")}  # by which it would hear of its end
        await inbox.digest(2)
        await asyncio.sleep(2 * LEASE)
        for gate in backend.gates.values():
            gate.set()
    assert cut[0] == pytest.approx(10 + LEASE, abs=1)


async def test_a_worker_that_died_ten_minutes_before_anybody_called_is_replaced_within_two_leases() -> None:
    inbox, backend = Inbox(), await holding(1)
    [lease] = (await backend.claim(0, 1, 60_000, Policy().terms.limits)).leases
    await asyncio.sleep(10 * MINUTE)
    async with delivering(inbox, backend):
        digest = await inbox.digest()
        assert now() <= 10 * MINUTE + 2 * LEASE
        assert (digest.id, digest.attempt) == (lease.digest_id, 2)


async def test_attempts_whose_leases_expired_are_charged_and_the_digest_is_buried_at_the_claim() -> None:
    inbox, backend = Inbox(), await holding(1)
    backend.lost["claim"] = 3
    async with delivering(inbox, backend, retry=RetryPolicy(max_attempts=3)):
        await inbox.outcome()
        await settle()
        [letter_id] = (await backend.operations.dead_letters(0, 10)).items
    assert not inbox.digests
    assert inbox.results == ["buried"]
    letter = await backend.operations.dead_letter(letter_id)
    assert letter is not None
    assert "outcome" in letter.reason


async def test_a_callback_that_never_returns_makes_room_for_others_and_the_same_digest_comes_again() -> None:
    inbox, backend = Inbox(forever), WatchedBackend()
    async with delivering(inbox, backend, concurrency=1, delivery_timeout=30, retry=RETRY, policy=policy()) as (
        engine,
        _,
    ):
        await engine.add("key", "old", record_id="x")
        await inbox.digest()
        await engine.add("key", "new", record_id="x")
        await engine.add("other", 1)
        await inbox.digest(4)
    first, other, again, newer = inbox.digests
    assert other.key == "other"
    assert inbox.times[1] == pytest.approx(30, abs=0.01)
    assert (again.id, again.records, again.attempt) == (first.id, first.records, 2)
    assert [record.value for record in newer.records] == ["new"]
    assert newer.id != first.id


@pytest.mark.parametrize("within_lease", [True, False])
async def test_a_callback_that_ignores_its_delivery_timeout_loses_its_lease_to_another_worker(
    within_lease: bool, caplog: pytest.LogCaptureFixture
) -> None:
    free, calls = asyncio.Event(), 0
    timeout = 30 if within_lease else 5 * MINUTE

    async def counting(digest: Digest[JSON]) -> None:
        nonlocal calls
        while not free.is_set():
            with suppress(asyncio.CancelledError):
                await free.wait()
            calls += 1

    inbox, others, backend = Inbox(counting), Inbox(), await holding(1)
    async with delivering(inbox, backend, concurrency=1, delivery_timeout=timeout):
        await inbox.digest()
        async with delivering(others, backend):
            again = await others.digest()
            assert (again.id, again.attempt) == (inbox.digests[0].id, 2)
            assert timeout + LEASE / 2 < now() < timeout + 2 * LEASE
            await asyncio.sleep(10 * MINUTE)
            assert others.results == ["delivered"]
            assert len(lines(caplog, "the lease on timeline 'key' is lost")) == 1
            assert lines(caplog, "its callback ignores that its time is over")
            assert calls == 2, "it is cancelled when its time is over, and when its lease is"
            free.set()
            await inbox.outcome()
    assert inbox.results == ["lost"]


async def test_a_callback_that_ignores_that_its_lease_is_lost_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = asyncio.Event()
    inbox, backend = Inbox(deaf_until(free)), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest()
        await backend.delete("key")
        await asyncio.sleep(3 * LEASE)
        free.set()
    assert len(lines(caplog, "the lease on timeline 'key' is lost")) == 1


@pytest.mark.parametrize("error", [None, TimeoutError("theirs")])
async def test_a_callback_that_leaves_a_cancellation_of_its_own_behind_is_reported_all_the_same(
    error: BaseException | None,
) -> None:
    async def callback(digest: Digest[JSON]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if error is not None:
            raise error

    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend):
        await inbox.outcome()
        await settle()
        assert backend.count("close") + backend.count("retry") == 1
    assert inbox.results == ["delivered" if error is None else "failed"]


async def test_a_delivery_that_somebody_else_cancels_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def callback(digest: Digest[JSON]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await forever(digest)

    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest(2)
    assert lines(caplog, "the delivery of 'key' was cancelled, and not by its worker")
    assert inbox.results == ["delivered"]


def test_a_keyboard_interrupt_of_a_callback_ends_the_loop_and_nobody_complains() -> None:
    unseen: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        backend = await holding(1)
        async with delivering(Inbox(KeyboardInterrupt()), backend):
            await asyncio.sleep(MINUTE)

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    gc.collect()
    assert not unseen


async def test_an_attempt_whose_timeline_was_deleted_under_it_is_told_as_deleted() -> None:
    inbox, backend = Inbox(lasting(10)), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest()
        await backend.delete("key")
        delivery = await inbox.outcome()
    assert (delivery.result, delivery.records) == ("deleted", 1)


# what a timeline holds


async def test_a_lease_that_is_lost_while_its_pages_are_read_is_given_up() -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    backend.gates["read"] = asyncio.Event()
    async with delivering(inbox, backend, policy=LARGE):
        await settle()
        await backend.delete("key")
        backend.gates["read"].set()
        await asyncio.sleep(1)
        await backend.put("key", "new")
        await inbox.digest()
    assert inbox.values == [["new"]]


@pytest.mark.parametrize(("error", "within"), [(None, 1.5), (ZeroDivisionError("a fault"), LEASE / 3 + 2)])
async def test_an_outage_ends_although_the_call_that_failed_is_not_made_again(
    error: Exception | None, within: float
) -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    backend.take_down("read")
    async with delivering(inbox, backend, policy=LARGE) as (engine, _):
        await settle()
        assert engine.activity.unavailable
        await backend.delete("key")  # upon which the call is answered by an error of ours
        backend.bring_up()
        if error is not None:
            backend.take_down("read", error=error)
        await asyncio.sleep(within)
        assert not engine.activity.unavailable


class Reporting(WatchedBackend):
    """A store whose claims tell of timelines with which something is wrong."""

    def __init__(self, broken: Sequence[tuple[str, str]], expired: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self._wrong = {"broken": broken, "expired": expired}

    async def claim(self, shard: int, *arguments: Any, **named: Any) -> Claims:
        return replace(await super().claim(shard, *arguments, **named), **self._wrong)


async def test_timelines_that_cannot_be_read_and_records_that_expired_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with delivering(Inbox(), Reporting([("odd", "WRONGTYPE")], [("gone", 7)])):
        await settle()
    assert lines(caplog, "'odd'", "WRONGTYPE")
    assert lines(caplog, "'gone'", "7 records")


async def test_of_many_timelines_with_which_something_is_wrong_a_few_are_named_and_the_others_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = [(f"odd-{number}", "WRONGTYPE") for number in range(500)]
    gone = [(f"gone-{number}", number % 2) for number in range(500)]
    async with delivering(Inbox(), Reporting(broken, gone)):
        await settle()
    assert len(lines(caplog, "'odd-")) == len(lines(caplog, "'gone-", "1 records are lost")) == FEW
    assert lines(caplog, f"{500 - FEW} more timelines cannot be read")
    assert lines(caplog, f"{250 - FEW} more timelines outlived their ttl: {250 - FEW} records")
    assert lines(caplog, "250 timelines were due and hold no records, such as 'gone-0'")
    assert len(caplog.messages) == 2 * FEW + 3


async def test_a_timeline_without_records_is_no_loss_of_0_records(caplog: pytest.LogCaptureFixture) -> None:
    async with delivering(Inbox(), Reporting([], [("ghost", 0)])):
        await settle()
    assert not lines(caplog, "0 records")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


# isolation


async def test_a_callback_that_fails_disturbs_no_other_timeline() -> None:
    async def picky(digest: Digest[JSON]) -> None:
        if digest.key == "bad":
            raise SystemExit("no")

    inbox = Inbox(*[picky] * 100)
    backend = WatchedBackend()
    async with delivering(inbox, backend, retry=RETRY, policy=policy()) as (engine, _):
        for turn in range(5):
            await engine.add("good", turn)
            if not turn:
                await engine.add("bad", turn)
            await asyncio.sleep(1)
        await asyncio.sleep(MINUTE)
    assert [digest.records[0].value for digest in inbox.digests if digest.key == "good"] == [0, 1, 2, 3, 4]
    assert [digest.attempt for digest in inbox.digests if digest.key == "bad"] == [1, 2, 3]
    assert (await backend.counts())["dead"] == 1


async def test_every_observer_is_told_also_one_that_came_after_entering_and_one_that_raises_changes_no_outcome(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[tuple[str, str]] = []

    def failing_observer(delivery: Delivery) -> None:
        raise ValueError("no metrics today")

    inbox, backend = Inbox(), WatchedBackend()
    engine = engine_on(backend)
    engine.observe(failing_observer)
    engine.observe(lambda delivery: told.append(("before", delivery.result)))
    async with engine.delivering(inbox):
        engine.observe(lambda delivery: told.append(("later", delivery.result)))
        await engine.add("key", 1)
        await asyncio.sleep(5 * MINUTE)
    assert told == [("before", "delivered"), ("later", "delivered")]
    assert (await state_of(backend, "key"), inbox.values) == (None, [[1]])
    assert lines(caplog, "observer")


class Odd(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize(("call", "error"), [("close", ZeroDivisionError("a fault")), ("read", Odd("a fault"))])
async def test_a_fault_while_delivering_lets_the_lease_end_and_the_digest_comes_again(
    call: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    backend.take_down(call, error=error)
    async with delivering(inbox, backend, policy=LARGE):
        await settle()
        backend.bring_up()
        await inbox.outcome()
    assert len({digest.id for digest in inbox.digests}) == 1
    assert (inbox.digests[-1].attempt, inbox.results) == (2, ["delivered"])
    assert lines(caplog, "a fault of aiodigest while delivering 'key'")


# leaving


async def test_leaving_waits_for_deliveries_under_way_while_their_leases_are_renewed() -> None:
    inbox, backend = Inbox(lasting(150)), await holding(1)
    async with delivering(inbox, backend, drain_timeout=200):
        await inbox.digest()
    assert now() == pytest.approx(150, abs=0.1)
    assert backend.count("renew") == 7
    assert inbox.results == ["delivered"]
    assert await backend.operations.look("key") is None


async def test_what_does_not_end_in_time_is_cancelled_and_given_back_without_charging_the_attempt() -> None:
    inbox, backend = Inbox(forever), await holding(1)
    async with delivering(inbox, backend, drain_timeout=20):
        await inbox.digest()
    assert now() == pytest.approx(20, abs=0.1)
    assert not inbox.seen
    assert await state_of(backend, "key") == ("ready", 0)
    await backend.put("key", 2)
    async with delivering(inbox, backend, policy=policy()):
        await inbox.digest(3)
    first, again, newer = inbox.digests
    assert (again.id, again.records, again.attempt) == (first.id, first.records, 1)
    assert [record.value for record in newer.records] == [2]


async def test_a_callback_that_finishes_although_it_is_cut_short_has_delivered() -> None:
    async def callback(digest: Digest[JSON]) -> None:
        await deaf(digest)
        await asyncio.sleep(1)

    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend, drain_timeout=1):
        await inbox.digest()
    assert inbox.results == ["delivered"]
    assert await backend.operations.look("key") is None


async def test_what_is_being_reported_when_the_drain_is_over_is_not_given_back() -> None:
    """A release that overtakes the report would have it answered as if the digest were closed."""

    async def end_at_last(digest: Digest[JSON]) -> None:
        await deaf(digest)
        await asyncio.sleep(1)

    inbox, backend = Inbox(end_at_last), await holding(1)
    backend.gates["close"] = asyncio.Event()
    async with delivering(inbox, backend, drain_timeout=5, timeout=3):
        await inbox.digest()
    assert backend.count("close") == 1
    assert backend.count("release") == 0


async def test_a_callback_that_ignores_its_end_does_not_keep_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    free = asyncio.Event()
    inbox, backend = Inbox(deaf_until(free)), await holding(1)
    async with delivering(inbox, backend, drain_timeout=1, timeout=5):
        await inbox.digest()
    assert now() == pytest.approx(6, abs=0.1)
    assert lines(caplog, "1 deliveries under way, 1 of which ignore it")
    assert await state_of(backend, "key") == ("ready", 0)
    free.set()
    await settle()


async def test_a_claim_in_flight_is_not_cancelled_and_what_it_brings_is_given_back_unstarted() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend):
        await settle()
        backend.gates["claim"] = asyncio.Event()
        await backend.put("key", 1)
        await settle()
        asyncio.get_running_loop().call_later(1, backend.gates["claim"].set)
    assert not inbox.digests
    assert await state_of(backend, "key") == ("ready", 0)
    await backend.put("key", 2)
    async with delivering(inbox, backend):
        await inbox.digest()
    assert inbox.values == [[1, 2]]  # never begun, so what came since is in it


async def test_a_report_under_way_when_the_drain_ends_has_the_timeout_to_arrive() -> None:
    inbox, backend = Inbox(), WatchedBackend(held="close")
    await backend.put("a", 1)
    async with delivering(inbox, backend, drain_timeout=1, timeout=5) as (engine, _):
        await inbox.digest()
        await settle()
        await engine.add("b", 2)
        await inbox.digest(2)  # its close waits for the other's
        await settle()
        asyncio.get_running_loop().call_later(3, backend.gates["close"].set)
    assert [await backend.operations.look(key) for key in "ab"] == [None, None]
    assert inbox.results == ["delivered"] * 2


async def test_leaving_takes_no_longer_for_many_shards_whose_server_does_not_answer() -> None:
    class Silent(WatchedBackend):
        async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool]:
            await asyncio.sleep(5)
            raise BackendUnavailable("no answer in time")

    inbox, backend = Inbox(*[forever] * 16), Silent(shards=16)
    for shard in range(16):
        await backend.put(keys_in(backend, shard)[0], 1)
    async with delivering(inbox, backend, drain_timeout=1):
        await inbox.digest(16)
    assert now() < 1 + 5 + 0.1


async def test_between_two_parts_a_worker_that_stops_gives_the_rest_back() -> None:
    parts = policy(max_size=2)
    inbox, backend = Inbox(lasting(10)), await holding(1, 2, 3, policy=parts)
    async with delivering(inbox, backend, policy=parts):
        await inbox.digest()
    window = await backend.operations.look("key")
    assert window is not None
    assert (window.state, window.opened, window.attempt) == ("ready", 1, 0)
    async with delivering(inbox, backend, policy=parts):
        await inbox.digest(2)
    assert inbox.values == [[1, 2], [3]]
    assert inbox.digests[1].attempt == 1


async def test_leases_that_cannot_be_given_back_are_logged_and_end(caplog: pytest.LogCaptureFixture) -> None:
    inbox, backend = Inbox(forever), await holding(1)
    backend.take_down("release")
    async with delivering(inbox, backend, drain_timeout=1):
        await inbox.digest()
    assert lines(caplog, "1 leases could not be given back")
    backend.bring_up()
    async with delivering(inbox, backend):
        await inbox.digest(2)
    assert inbox.digests[0].id == inbox.digests[1].id


async def test_any_number_of_leases_is_renewed_and_given_back() -> None:
    inbox, backend = Inbox(*[forever] * 600), WatchedBackend(shards=2)
    for number in range(600):
        await backend.put(f"key-{number}", 1)
    async with delivering(inbox, backend, concurrency=1_000_000, drain_timeout=1):
        await inbox.digest(600)
        await asyncio.sleep(2 * LEASE)
    assert len(inbox.digests) == 600
    assert (await backend.counts())["ready"] == 600


# backoff mode


def failing(count: int) -> Sequence[BaseException]:
    return [ValueError("down")] * count


async def fail_in_a_row(inbox: Inbox, backend: WatchedBackend, count: int) -> None:
    for number in range(count):
        await backend.put(f"key-{number}", 1)
        await inbox.outcome(number + 1)
        await settle()


async def test_failures_of_distinct_timelines_in_a_row_put_the_process_to_rest() -> None:
    inbox, backend = Inbox(*failing(5)), WatchedBackend()
    mode = BackoffMode(threshold=5, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 5)
        began, claims = now(), backend.count("claim")
        await backend.put("next", 1)
        await inbox.digest(6)
        assert 10 <= now() - began <= 20 + 0.1  # from the upper half of 10 * 2**1
        assert backend.count("claim") == claims + 1


async def test_failures_of_one_timeline_do_not() -> None:
    inbox, backend = Inbox(*failing(9)), WatchedBackend()
    mode = BackoffMode(threshold=5, multiplier=100, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=RetryPolicy(backoff=lambda _: 1.0)):
        await backend.put("key", 1)
        await inbox.outcome(10)
        assert now() < 10


async def test_after_the_rest_four_deliveries_are_let_through_and_a_success_brings_all_back() -> None:
    inbox, backend = Inbox(*failing(2), lasting(3), *[lasting(4)] * 20), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 2)
        for number in range(10):
            await backend.put(f"more-{number}", 1)
        await inbox.digest(6)
        await asyncio.sleep(2)
        assert len(inbox.digests) == 6
        await inbox.outcome(3)
        await settle()
        assert len(inbox.digests) == 12


async def test_a_probe_that_hangs_counts_as_failed_and_its_late_success_ends_the_rest_all_the_same() -> None:
    inbox, backend = Inbox(*failing(2), *[lasting(30)] * 4), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM, delivery_timeout=50):
        await fail_in_a_row(inbox, backend, 2)
        for number in range(10):
            await backend.put(f"more-{number}", 1)
        await inbox.digest(6)
        began = now()
        await inbox.digest(7)
        assert 20 <= now() - began - PROBE_TIMEOUT <= 30  # a rest of the second level, which a success cut short
        await settle()
        assert len(inbox.digests) == 12


async def test_a_receiver_that_works_is_not_kept_waiting_by_those_that_fail_after_the_rest() -> None:
    """Those are due before it."""

    async def fail_unless_it_works(digest: Digest[JSON]) -> None:
        if digest.key != "works":
            raise ValueError("down")

    inbox, backend = Inbox(*[fail_unless_it_works] * 50), WatchedBackend()
    async with delivering(inbox, backend, retry=RetryPolicy(max_attempts=50, backoff=lambda _: 0.1)):
        await fail_in_a_row(inbox, backend, 20)
        await asyncio.sleep(0.2)
        await backend.put("works", 1)
        await inbox.outcome(24)
    assert "works" in [digest.key for digest in inbox.digests[20:24]]


async def test_each_failure_after_a_rest_makes_the_next_one_longer() -> None:
    inbox, backend = Inbox(*failing(4)), WatchedBackend()
    mode = BackoffMode(threshold=1, multiplier=1, maximum=8)
    async with delivering(inbox, backend, concurrency=1, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 4)
    for (earlier, later), longest in zip(pairwise(inbox.times), (2, 4, 8), strict=True):
        assert longest / 2 <= later - earlier <= longest + 0.1


@pytest.mark.parametrize("signal", [Reject("no"), RetryAfter(500), PartialFailure({"nobody": "x"})])
async def test_signals_say_nothing_of_the_receiver(signal: BaseException) -> None:
    inbox, backend = Inbox(*failing(1), *[signal] * 9, *failing(1)), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 11)
        assert now() < 1  # they are no failures
        await backend.put("next", 1)
        await inbox.digest(12)
        assert now() >= 10  # nor successes, which would begin the count again


async def test_a_pause_stops_all_claims_of_this_process_and_no_longer() -> None:
    inbox, backend = Inbox(RetryAfter(30, pause=True)), WatchedBackend(shards=2)
    async with delivering(inbox, backend):
        await backend.put("key", 1)
        await inbox.outcome()
        await settle()
        claims = backend.count("claim")
        for shard in range(2):
            await backend.put(keys_in(backend, shard)[0], 1)
        await asyncio.sleep(29)
        assert backend.count("claim") == claims
        await inbox.digest(4)
        assert now() == pytest.approx(30, abs=0.01)
    assert [digest.attempt for digest in inbox.digests] == [1, 1, 1, 1]


async def test_a_pause_does_not_keep_a_worker_from_stopping() -> None:
    inbox, backend = Inbox(RetryAfter(3000, pause=True)), WatchedBackend()
    async with delivering(inbox, backend):
        await backend.put("key", 1)
        await inbox.outcome()
        await settle()
    assert now() < 1


async def test_deliveries_that_fail_are_spread_by_jitter() -> None:
    inbox, backend = Inbox(*failing(100)), WatchedBackend()
    for number in range(100):
        await backend.put(f"key-{number}", 1)
    async with delivering(inbox, backend, concurrency=100, backoff_mode=BackoffMode(maximum=0)):
        await inbox.digest(200)
    again = sorted(inbox.times[100:])
    assert again[-1] - again[0] > 1
    assert len({round(time, 2) for time in again}) > 50


def test_leases_do_not_show_their_entries() -> None:
    lease = Lease("key", "token", "digest", 1, 1, 0, 0, 1, entries=(b"somebody's mail",))
    assert "somebody's mail" not in repr(lease)


async def test_an_outage_that_gets_another_reason_is_told_once_more(caplog: pytest.LogCaptureFixture) -> None:
    backend = WatchedBackend()
    async with delivering(Inbox(), backend):
        backend.take_down()
        await asyncio.sleep(MINUTE)
        backend.take_down(error=ConfigurationError("wrong password"))
        await asyncio.sleep(MINUTE)
        backend.bring_up()
        await asyncio.sleep(2)
    told = [record.message for record in caplog.records if record.name == "aiodigest.worker.availability"]
    assert ["refused" in told[0], "wrong password" in told[1], "available again" in told[2]] == [True] * 3
    assert len(told) == 3
