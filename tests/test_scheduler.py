from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from inspect import CORO_CREATED, getcoroutinestate
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from engines import (
    START,
    IdleSelector,
    Inbox,
    VirtualLoop,
    WatchedBackend,
    delivering,
    engine_on,
    forever,
    holding,
    lasting,
    now,
    now_ms,
    policy,
    settle,
    state_of,
)

from aiodigest import (
    JSON,
    AiodigestError,
    BackendUnavailable,
    BackoffMode,
    Bounds,
    Delivery,
    Digest,
    Entry,
    PartialFailure,
    Policy,
    Reject,
    RetryAfter,
    RetryPolicy,
    Throttle,
)
from aiodigest.backend import Claims, Lease
from aiodigest.backoff import PROBE_TIMEOUT
from aiodigest.errors import ConfigurationError
from aiodigest.timing.calendar import At
from aiodigest.timing.hours import Hours
from aiodigest.worker.concurrency import Gate
from aiodigest.worker.leases import ActiveDelivery
from aiodigest.worker.reasons import FEW
from aiodigest.worker.shard import CLAIM, EARLY, QUICK, QUICK_CLAIM, WakeUps

pytestmark = pytest.mark.virtual_time

LEASE = 60.0
MINUTE = 60.0
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0)
SELDOM = RetryPolicy(backoff=lambda attempt: 500.0)
LARGE = policy(capacity=3000)
DOWN = ValueError("down")
CALLS = ("read", "close", "retry")  # after a claim, and without which nothing is lost


Logged = Callable[..., list[str]]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """What was logged with all of some words in it."""
    return lambda *words: [text for text in caplog.messages if all(word in text for word in words)]


def deaf(seconds: float = 0) -> Callable[[Digest[JSON]], Awaitable[object]]:
    """A callback that ignores the first attempt to cut it short, and ends some seconds later."""

    async def callback(digest: Digest[JSON]) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
        await asyncio.sleep(seconds)

    return callback


class Stubborn:
    """A callback that ignores every attempt to cut it short until it is free to end, and notes when there was one."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.cut: list[float] = []

    async def __call__(self, digest: Digest[JSON]) -> None:
        while not self.free.is_set():
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                self.cut.append(now())


def keys_in(backend: WatchedBackend, shard: int, count: int = 1) -> list[str]:
    return [key for key in map(str, range(1000)) if backend.shard_map.shard_of(key) == shard][:count]


# idling and waking


@pytest.mark.parametrize("waits_for", ["nothing", "a due time"])
async def test_an_idle_worker_claims_three_times_a_minute(waits_for: str) -> None:
    inbox = Inbox()
    async with delivering(inbox) as (_, backend):
        if waits_for == "a due time":
            await backend.put("key", 1, policy=policy(initial_delay=10 * MINUTE))
        await asyncio.sleep(10 * MINUTE - 1)
        assert backend.count("claim") <= 31
        assert backend.count("renew") == backend.count("close") == 0
        await asyncio.sleep(2)
    assert inbox.times == pytest.approx([10 * MINUTE] if waits_for == "a due time" else [], abs=0.01)


class SlowDisk(WatchedBackend):
    """Answers a claim only half a second after it was carried out."""

    async def claim(self, *arguments: Any, **flags: Any) -> Claims:
        claims = await super().claim(*arguments, **flags)
        await asyncio.sleep(0.5)
        return claims


async def test_the_time_for_which_an_answer_waits_does_not_make_the_next_claim_late() -> None:
    inbox, backend = Inbox(), SlowDisk()
    await backend.put("key", 1, policy=policy(initial_delay=10))
    async with delivering(inbox, backend):
        await asyncio.sleep(15)
        assert backend.times("claim")[1] == pytest.approx(10, abs=0.01)
    assert inbox.times == pytest.approx([10.5], abs=0.01)


@pytest.mark.parametrize("how", ["by another process", "by add", "by add_many"])
async def test_an_add_wakes_a_sleeping_worker_at_once_in_its_own_process_without_the_wake_up_stream(how: str) -> None:
    inbox, backend = Inbox(), WatchedBackend(held="" if how == "by another process" else "wait")
    async with delivering(inbox, backend) as (engine, _):
        await asyncio.sleep(1)
        add = {"by add": engine.add, "by another process": backend.put}.get(how)
        await (add("key", 1) if add else engine.add_many([Entry("key", 1)]))
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


@pytest.mark.parametrize("error", [BackendUnavailable("connection refused"), ZeroDivisionError("a fault")])
async def test_a_wake_up_stream_that_broke_costs_few_claims_and_is_listened_to_again(error: Exception) -> None:
    inbox, backend = Inbox(), WatchedBackend()
    backend.take_down("wait", error=error)
    async with delivering(inbox, backend):
        await asyncio.sleep(10 * MINUTE)
        assert 600 < backend.count("claim") < 3 * 600
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
        assert (again.key, again.attempt) == ("two", 1)


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


async def test_claims_that_hang_at_one_shard_leave_room_for_the_others() -> None:
    inbox, backend = Inbox(), WatchedBackend(shards=2, held="claim")
    backend.down_shards = {0}
    async with delivering(inbox, backend, concurrency=1):
        await backend.put(keys_in(backend, 1)[0], "other")
        await inbox.digest()
        assert now() < 1
        backend.gates["claim"].set()


async def test_digests_of_a_slow_claim_keep_to_the_concurrency() -> None:
    inbox, backend = Inbox(*[lasting(10)] * 2), WatchedBackend(shards=2, held="claim")
    backend.down_shards = {0}
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


async def test_the_next_digests_are_delivered_while_as_many_are_reported() -> None:
    inbox, backend = Inbox(), WatchedBackend(held="close")
    for number in range(6):
        await backend.put(f"key-{number}", number)
    async with delivering(inbox, backend, concurrency=2):
        await asyncio.sleep(1)
        assert len(inbox.digests) == 4  # and no more: a server that closes nothing must not be owed ever more
        backend.gates["close"].set()
        await inbox.digest(6)
        assert now() < 2


@pytest.mark.parametrize(("seconds", "largest"), [(0.0, QUICK_CLAIM), (QUICK * 2, CLAIM)])
async def test_a_claim_takes_more_digests_where_callbacks_are_quick(seconds: float, largest: int) -> None:
    inbox, backend = Inbox(*[lasting(seconds)] * 400), WatchedBackend()
    for number in range(400):
        await backend.put(f"key-{number}", number)
    async with delivering(inbox, backend):
        await inbox.digest(400)
        await settle()
    first, *others = backend.items("claim")
    assert (first, max(others)) == (CLAIM, largest)


async def test_a_delivery_that_is_cancelled_before_its_first_step_makes_room() -> None:
    async def cancel_one() -> None:
        while True:
            for task in asyncio.all_tasks():
                work: Any = task.get_coro()
                if work.__name__ == "_deliver" and getcoroutinestate(work) == CORO_CREATED:
                    task.cancel()
                    return
            await asyncio.sleep(0)

    inbox, backend = Inbox(), WatchedBackend()
    await backend.put("first", 1)
    await backend.put("second", 2)
    cancelling = asyncio.create_task(cancel_one())
    async with delivering(inbox, backend, concurrency=1):
        await cancelling
        await inbox.digest()
        assert (inbox.values, now() < 1) == ([[2]], True)


async def test_who_waits_for_a_place_has_it_in_turn() -> None:
    gate, came = Gate(1), list[str]()

    async def enter(name: str) -> None:
        await gate.wait()
        came.append(name)

    assert gate.admits()
    waiting = [asyncio.create_task(enter(name)) for name in "abc"]
    await settle()
    waiting[1].cancel()
    gate.leave()
    assert not gate.admits()  # others have waited longer
    await settle()
    assert came == ["a"]
    gate.leave()
    await settle()
    assert came == ["a", "c"]
    gate.leave()
    assert gate.admits()


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


@pytest.mark.parametrize("shards", [1, 4])
async def test_an_outage_is_no_hot_loop_and_one_line_when_it_begins_and_one_when_it_ends(
    shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    backend = WatchedBackend(shards)
    async with delivering(Inbox(), backend):
        await settle()
        backend.take_down()
        await asyncio.sleep(10 * MINUTE)
        backend.bring_up()
        await asyncio.sleep(2)
    tries = [when for call, shard, when, _ in backend.calls if (call, shard) == ("claim", 0)][10:-2]
    assert 600 < len(tries) < 3 * 600
    waits = [later - earlier for earlier, later in pairwise(tries)]
    assert max(waits) <= 1.01
    assert len({round(wait, 3) for wait in waits}) > 100  # jittered
    began, ended = caplog.messages
    assert "unavailable: connection refused" in began
    assert "available again after 5" in ended


@pytest.mark.parametrize("call", ["claim", "renew"])
async def test_claims_that_fail_while_renewals_work_or_the_reverse_are_one_outage(call: str, logged: Logged) -> None:
    inbox = Inbox(*[lasting(100)] * 3)
    async with delivering(inbox, policy=policy(), drain_timeout=0) as (engine, backend):
        await engine.add("key", 1)
        await inbox.digest()
        backend.take_down(call)
        for turn in range(450):
            await engine.add(f"busy-{turn}", turn)
            await asyncio.sleep(0.1)
        backend.bring_up()
        await asyncio.sleep(2)
    assert backend.count(call) < 3 * 45
    assert len(logged("unavailable")) == len(logged("available again")) == 1


@pytest.mark.parametrize("call", ["close", "read"])
async def test_reports_that_fail_while_renewals_are_answered_are_one_outage_and_claims_go_on(
    call: str, logged: Logged
) -> None:
    """As when an operator takes a right away that only they need: no other call ends their pauses."""
    inbox, backend = Inbox(), WatchedBackend(latency=0.001)
    async with delivering(inbox, backend, policy=LARGE):
        await backend.put("large", *range(1500), policy=LARGE)  # most of it is read after its claim
        backend.take_down(call)
        for turn in range(40):
            await backend.put(f"key-{turn}", turn)
            await asyncio.sleep(0.1)
        await asyncio.sleep(6)
        assert len(inbox.digests) == (41 if call == "close" else 40)
        assert backend.count("renew") < 5
        assert backend.count(call) < 41 * 40
        assert not logged("available again")
        backend.bring_up()
        await inbox.outcome(41)
    assert len(logged("unavailable")) == len(logged("available again")) == 1


async def test_an_outage_that_gets_another_reason_is_told_once_more_and_one_that_nobody_foresaw_with_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend):
        for error in (None, ConfigurationError("wrong password"), ZeroDivisionError("a fault")):
            backend.take_down(error=error)
            await asyncio.sleep(MINUTE)
        await backend.put("key", 1)
        backend.bring_up()
        await inbox.outcome()
        await asyncio.sleep(2)  # renewals pause by themselves
    told = [line for line in caplog.records if line.name == "aiodigest.worker.availability"]
    for line, words in zip(told, ("refused", "wrong password", "a fault", "available again"), strict=True):
        assert words in line.getMessage()
    assert [bool(line.exc_info) for line in told] == [False, False, True, False]


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


@pytest.mark.parametrize(
    ("call", "error", "line", "seconds"),
    [
        *((call, ConfigurationError("no access"), "the server cannot be used: no access", LEASE / 2) for call in CALLS),
        ("read", BackendUnavailable("no answer"), "the server is unavailable: no answer", LEASE / 2),
        ("close", BackendUnavailable("no answer"), "the server is unavailable: no answer", 10 * MINUTE),
        *((call, AiodigestError("it said: what?"), "is unavailable: it said: what?", LEASE / 2) for call in CALLS),
    ],
)
async def test_a_server_that_refuses_access_for_a_while_does_not_bring_a_digest_twice(
    call: str, error: Exception, line: str, seconds: float, logged: Logged
) -> None:
    inbox, backend = Inbox(ValueError("down") if call == "retry" else None), WatchedBackend()
    await backend.put("key", *range(1500), policy=LARGE)  # more than a claim brings
    backend.take_down(call, "renew", error=error)
    async with delivering(inbox, backend, policy=LARGE, retry=RETRY):
        await asyncio.sleep(seconds)
        assert backend.count(call) > 2
        assert not inbox.seen  # the store does not know yet
        backend.bring_up()
        first = await inbox.outcome()
        assert (first.result, first.attempt) == ("failed" if call == "retry" else "delivered", 1)
        assert now() < seconds + 2
    assert inbox.values == [list(range(1500))]
    assert logged(line)


async def test_a_report_that_is_answered_what_nobody_foresaw_is_given_up_with_its_lease(logged: Logged) -> None:
    inbox, backend = Inbox(), await holding(1)
    backend.take_down("close", "renew", error=AiodigestError("it said: what?"))
    async with delivering(inbox, backend, retry=RETRY):
        await asyncio.sleep(LEASE + 2)
        assert logged("its lease will end")
        assert not inbox.seen
        backend.bring_up()
        assert (await inbox.outcome()).attempt == 1


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


async def test_a_lost_lease_cancels_the_callback(logged: Logged) -> None:
    callback = Stubborn()
    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest()
        await backend.delete("key")
        await asyncio.sleep(3 * LEASE)
        assert callback.cut == pytest.approx([LEASE / 3], abs=0.01)
        await backend.put("other", 2)
        await inbox.digest(2)
        callback.free.set()
    assert len(logged("the lease on timeline 'key' is lost")) == 1
    assert inbox.results == ["delivered", "deleted"]


async def test_a_lease_that_another_worker_took_over_is_lost_when_its_outcome_is_reported(logged: Logged) -> None:
    inbox, backend = Inbox(lasting(10)), await holding(1)
    async with delivering(inbox, backend, policy=policy()):
        await inbox.digest()
        backend.machines[0].place("key", 0, 1)  # as after a pause of this process for longer than its lease
        assert await backend.open(0, "key", 60_000, Policy().terms.limits) is not None
        await inbox.outcome()
        await settle()
        assert await state_of(backend, "key") == ("leased", 1)
    assert logged("another worker's")
    assert inbox.results == ["lost"]


@pytest.mark.parametrize("minutes", [0, 10])
async def test_a_worker_that_died_is_replaced_within_two_leases_however_long_ago_it_was(minutes: int) -> None:
    inbox, backend = Inbox(), await holding(1)
    [lease] = (await backend.claim(0, 1, 60_000, Policy().terms.limits)).leases
    await asyncio.sleep(minutes * MINUTE)
    async with delivering(inbox, backend):
        digest = await inbox.digest()
        assert now() <= minutes * MINUTE + 2 * LEASE
        assert (digest.id, digest.attempt) == (lease.digest_id, 1)


async def test_a_worker_whose_renewal_hangs_cancels_its_delivery_when_the_lease_ends_and_no_later() -> None:
    callback = Stubborn()
    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend, timeout=1):
        await inbox.digest()
        backend.gates["renew"] = asyncio.Event()
        await asyncio.sleep(2 * LEASE)
        assert callback.cut == pytest.approx([LEASE], abs=0.01)
        backend.gates.pop("renew").set()
        callback.free.set()


async def test_the_next_part_of_a_digest_is_not_begun_under_a_lease_that_was_lost_during_the_one_before() -> None:
    terms = policy(max_size=1)
    inbox, backend = Inbox(deaf()), await holding(1, 2, policy=terms)
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
    callback, terms = Stubborn(), policy(max_size=1)
    inbox, backend = Inbox(deaf(LEASE - 15), callback), await holding(1, 2, policy=terms)
    async with delivering(inbox, backend, policy=terms, delivery_timeout=LEASE + 10):
        await inbox.digest(2)
        backend.gates = {call: asyncio.Event() for call in ("claim", "renew")}  # by which it would hear of its end
        await asyncio.sleep(LEASE + 2)
        assert callback.cut == pytest.approx([inbox.times[1] + LEASE], abs=1)
        for gate in backend.gates.values():
            gate.set()
        callback.free.set()
    assert inbox.values == [[1], [2]]


async def test_what_a_full_worker_carries_into_closed_hours_waits_for_the_opening_by_the_server_s_clock() -> None:
    day = policy(hours=Hours("13:00-13:50"))  # it is 13:46:40, by the clocks of test and server
    inbox, backend = Inbox(lasting(250)), await holding(1, policy=day)
    await backend.put("other", 2)
    async with delivering(inbox, backend, policy=day, concurrency=1):
        await inbox.outcome(2)
    opening = 24 * 3600 - 2800
    assert inbox.times == pytest.approx([0, opening], abs=0.01)
    assert inbox.times[1] >= opening
    assert [delivery.attempt for delivery in inbox.seen] == [1, 1]
    assert inbox.seen[1].lateness == pytest.approx(opening, abs=1), "it is due when it was"


async def test_the_next_part_of_a_digest_is_not_begun_in_closed_hours() -> None:
    day = policy(hours=Hours("13:00-13:50"), max_size=1)
    inbox, backend = Inbox(lasting(250)), await holding(1, 2, policy=day)
    async with delivering(inbox, backend, policy=day):
        await inbox.outcome(2)
    assert inbox.values == [[1], [2]]
    assert inbox.times == pytest.approx([0, 24 * 3600 - 2800], abs=0.01)


HOUR = 3600


@pytest.mark.parametrize(
    ("stops", "returns", "comes"),
    [
        (18, 23, 24 + 8),  # over an instant; it waits for the opening
        (18, 24 + 3, 24 + 8),  # over its close too
        (18, 24 + 10, 24 + 10),  # over all of the night: it catches up on return
        (18, 3 * 24 + 12, 3 * 24 + 12),  # over three instants: once
        (18, 3 * 24 + 23, 4 * 24 + 8),
        (21, 24 + 7, 24 + 8),
    ],
)
async def test_a_fleet_that_was_stopped_over_an_instant_and_quiet_hours_catches_up_once_at_the_opening(
    stops: int, returns: int, comes: int
) -> None:
    evening = Policy(at=At.daily("20:00"), hours=Hours("08:00-19:00"))
    fleet: dict[str, Any] = {"policy": evening, "lease_timeout": 2 * HOUR}
    inbox, backend, keys = Inbox(), WatchedBackend(), ["a", "b", "c", "d"]
    began = START % (24 * HOUR)  # 13:46:40, by the clocks of test and server

    async def until(hour: float) -> None:
        await asyncio.sleep(hour * HOUR - began - now())

    for key in keys:
        await backend.put(key, 1, policy=evening)
    async with delivering(inbox, backend, **fleet), delivering(inbox, backend, **fleet):
        await until(stops)
    assert not inbox.digests
    await until(returns - 1)
    for key in keys:
        await backend.put(key, 2, policy=evening)
    await until(returns)
    async with delivering(inbox, backend, **fleet), delivering(inbox, backend, **fleet):
        await until(max(comes, returns) + 5)
    assert [began + time for time in inbox.times] == pytest.approx([comes * HOUR] * len(keys), abs=1)
    assert all(began + time >= comes * HOUR for time in inbox.times)
    assert inbox.values == [[1, 2]] * len(keys)
    assert sorted(digest.key for digest in inbox.digests) == keys


async def test_a_worker_goes_by_the_server_s_clock_for_hours_and_for_what_functions_are_told() -> None:
    told: list[datetime] = []

    def choose(key: str, now: datetime) -> Policy:
        told.append(now)
        return policy(hours=Hours("08:00-20:00"))

    backend = WatchedBackend(latency=1)
    backend._now = lambda: now_ms() + 10 * 3_600_000  # it is 23:46:40 there
    await backend.put("key", 1)
    inbox = Inbox()
    async with delivering(inbox, backend, policy=choose):
        await inbox.outcome()
    assert inbox.times[0] == pytest.approx(8 * 3600 + 800, abs=5)
    assert [each.hour for each in told] == [23, 8]


async def test_leases_that_end_without_a_word_are_charged_from_the_third_on_and_the_digest_is_buried() -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    backend.lost["claim"] = 5  # of which three are charged: the digest was claimed to run alone
    async with delivering(inbox, backend, retry=RetryPolicy(max_attempts=3), policy=LARGE):
        await inbox.outcome()
        await settle()
        [letter_id] = (await backend.operations.dead_letters(0, 10)).items
    assert not inbox.digests
    assert inbox.results == ["buried"]
    letter = await backend.operations.dead_letter(letter_id)
    assert letter is not None
    assert letter.attempt == 4
    assert letter.reason == "its worker died or lost the server 5 times in a row before it reported"


async def test_a_callback_that_never_returns_makes_room_for_others_and_the_same_digest_comes_again() -> None:
    inbox, backend = Inbox(forever), WatchedBackend()
    async with delivering(inbox, backend, concurrency=1, delivery_timeout=30, retry=RETRY, policy=policy()):
        await backend.put("key", "old", record_id="x")
        await inbox.digest()
        await backend.put("key", "new", record_id="x")
        await backend.put("other", 1)
        await inbox.digest(4)
    first, other, again, newer = inbox.digests
    assert other.key == "other"
    assert inbox.times[1] == pytest.approx(30, abs=0.01)
    assert (again.id, again.records, again.attempt) == (first.id, first.records, 2)
    assert [record.value for record in newer.records] == ["new"]
    assert newer.id != first.id


@pytest.mark.parametrize("within_lease", [True, False])
async def test_a_callback_that_ignores_its_delivery_timeout_loses_its_lease_to_another_worker(
    within_lease: bool, logged: Logged
) -> None:
    callback, timeout = Stubborn(), 30 if within_lease else 5 * MINUTE
    inbox, others, backend = Inbox(callback), Inbox(), await holding(1)
    async with delivering(inbox, backend, concurrency=1, delivery_timeout=timeout):
        await inbox.digest()
        async with delivering(others, backend):
            again = await others.digest()
            assert (again.id, again.attempt) == (inbox.digests[0].id, 1)
            assert timeout + LEASE / 2 < now() < timeout + 2 * LEASE
            await asyncio.sleep(10 * MINUTE)
            assert others.results == ["delivered"]
            assert len(logged("the lease on timeline 'key' is lost")) == 1
            assert logged("its callback ignores that its time is over")
            assert len(callback.cut) == 2, "it is cancelled when its time is over, and when its lease is"
            callback.free.set()
            await inbox.outcome()
    assert inbox.results == ["lost"]


@pytest.mark.parametrize("error", [None, TimeoutError("theirs")])
async def test_a_callback_that_leaves_a_cancellation_behind_is_reported_all_the_same(error: Exception | None) -> None:
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


async def test_a_delivery_that_somebody_else_cancels_is_told_of(logged: Logged) -> None:
    async def callback(digest: Digest[JSON]) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await forever(digest)

    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend):
        await inbox.digest(2)
    assert logged("the delivery of 'key' was cancelled, and not by its worker")
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


# what a timeline holds


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
    assert not inbox.digests, "its lease is lost"


class Reporting(WatchedBackend):
    """A store whose claims tell of timelines with which something is wrong."""

    def __init__(self, broken: Sequence[tuple[str, str]], expired: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self._wrong = {"broken": broken, "expired": expired}

    async def claim(self, shard: int, *arguments: Any, **named: Any) -> Claims:
        return replace(await super().claim(shard, *arguments, **named), **self._wrong)


async def reject(digest: Digest[JSON]) -> None:
    raise Reject("no such address")


def check_let_go(caplog: pytest.LogCaptureFixture) -> None:
    """See that one line tells of one dead letter that was let go."""
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR and "let go" in record.message]
    assert line.message.startswith("test: 1 dead letters of shard 0 were let go")


async def test_a_worker_whose_dead_letter_makes_others_go_logs_an_error(
    caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    backend = WatchedBackend()
    async with delivering(Inbox(reject, reject), backend, bounds=Bounds(dead_letters=1)):
        for key in ("first", "second"):
            await backend.put(key, 1)
            await settle()
    check_let_go(caplog)


async def test_a_worker_that_finds_dead_letters_of_30_days_logs_an_error(
    caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    backend = WatchedBackend()
    async with delivering(Inbox(reject), backend):
        await backend.put("key", 1)
        await settle()
    await asyncio.sleep(30 * 86_400)
    async with delivering(Inbox(), backend):
        await settle()
    check_let_go(caplog)


async def test_timelines_that_cannot_be_read_and_records_that_expired_are_logged(
    caplog: pytest.LogCaptureFixture, logged: Logged
) -> None:
    async with delivering(Inbox(), Reporting([("odd", "WRONGTYPE")], [("gone", 7), ("ghost", 0)])):
        await settle()
    assert logged("'odd'", "WRONGTYPE")
    assert logged("'gone'", "7 records")
    assert not logged("0 records")
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING, logging.ERROR]


async def test_of_many_timelines_with_which_something_is_wrong_a_few_are_named_and_the_others_counted(
    logged: Logged,
) -> None:
    broken = [(f"odd-{number}", "WRONGTYPE") for number in range(500)]
    gone = [(f"gone-{number}", number % 2) for number in range(500)]
    async with delivering(Inbox(), Reporting(broken, gone)):
        await settle()
    assert len(logged("'odd-")) == len(logged("'gone-", "1 record is lost")) == FEW
    assert logged(f"{500 - FEW} more timelines cannot be read")
    assert logged(f"{250 - FEW} more timelines outlived their ttl: {250 - FEW} records")
    assert logged("250 timelines were due and hold no records, such as 'gone-0'")
    assert len(logged()) == 2 * FEW + 3


# isolation


async def test_a_callback_that_fails_disturbs_no_other_timeline() -> None:
    async def picky(digest: Digest[JSON]) -> None:
        if digest.key == "bad":
            raise SystemExit("no")

    inbox = Inbox(*[picky] * 100)
    async with delivering(inbox, retry=RETRY, policy=policy()) as (engine, backend):
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
    logged: Logged,
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
    assert logged("observer")


class Odd(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize(("call", "error"), [("close", ZeroDivisionError("a fault")), ("read", Odd("a fault"))])
async def test_a_fault_while_delivering_lets_the_lease_end_and_the_digest_comes_again(
    call: str, error: BaseException, logged: Logged
) -> None:
    inbox, backend = Inbox(), await holding(*range(1500), policy=LARGE)
    backend.take_down(call, error=error)
    async with delivering(inbox, backend, policy=LARGE):
        await settle()
        backend.bring_up()
        await inbox.outcome()
    assert len({digest.id for digest in inbox.digests}) == 1
    assert (inbox.digests[-1].attempt, inbox.results) == (1, ["delivered"])
    assert logged("a fault of aiodigest while delivering 'key'")


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


@pytest.mark.parametrize("held", ["", "close"])
async def test_a_callback_that_finishes_although_it_is_cut_short_has_delivered(held: str) -> None:
    inbox, backend = Inbox(deaf(1)), WatchedBackend(held=held)
    await backend.put("key", 1)
    async with delivering(inbox, backend, drain_timeout=1, timeout=3):
        await inbox.digest()
    # a release that overtakes the report would have it answered as if the digest were closed
    assert (backend.count("close"), backend.count("release")) == (1, 0)
    assert inbox.results == ([] if held else ["delivered"])
    assert held or await backend.operations.look("key") is None


async def test_a_callback_that_ignores_its_end_does_not_keep_the_engine(logged: Logged) -> None:
    callback = Stubborn()
    inbox, backend = Inbox(callback), await holding(1)
    async with delivering(inbox, backend, drain_timeout=1, timeout=5):
        await inbox.digest()
    assert now() == pytest.approx(6, abs=0.1)
    assert logged("1 delivery under way, 1 of which ignored it")
    assert await state_of(backend, "key") == ("ready", 0)
    callback.free.set()
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
    assert await state_of(backend, "key") == ("ready", 0)
    async with delivering(inbox, backend, policy=parts):
        await inbox.digest(2)
    assert inbox.values == [[1, 2], [3]]
    assert inbox.digests[1].attempt == 1


async def test_a_worker_that_stops_while_a_function_of_retries_is_asked_gives_the_digest_back() -> None:
    asked = asyncio.Event()

    async def tries(key: str) -> RetryPolicy:
        asked.set()
        await asyncio.sleep(1)
        return RetryPolicy()

    inbox, backend = Inbox(), await holding(1)
    async with delivering(inbox, backend, retry=tries):
        await asked.wait()
    assert not inbox.digests
    assert await state_of(backend, "key") == ("ready", 0)
    async with delivering(inbox, backend):
        await inbox.digest()
    assert inbox.digests[0].attempt == 1


async def test_leases_that_cannot_be_given_back_are_logged_and_end(logged: Logged) -> None:
    inbox, backend = Inbox(forever), await holding(1)
    backend.take_down("release")
    async with delivering(inbox, backend, drain_timeout=1):
        await inbox.digest()
    assert logged("1 leases could not be given back")
    backend.bring_up()
    async with delivering(inbox, backend):
        await inbox.digest(2)
    assert inbox.digests[0].id == inbox.digests[1].id


# backoff mode


async def fail_in_a_row(inbox: Inbox, backend: WatchedBackend, count: int) -> None:
    for number in range(count):
        await backend.put(f"key-{number}", 1)
        await inbox.outcome(number + 1)
        await settle()


async def test_failures_of_distinct_timelines_in_a_row_put_the_process_to_rest() -> None:
    inbox, backend = Inbox(*[DOWN] * 5), WatchedBackend()
    mode = BackoffMode(threshold=5, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 5)
        began, claims = now(), backend.count("claim")
        await backend.put("next", 1)
        await inbox.digest(6)
        assert 10 <= now() - began <= 20 + 0.1  # from the upper half of 10 * 2**1
        assert backend.count("claim") == claims + 1


async def test_failures_of_one_timeline_do_not() -> None:
    inbox, backend = Inbox(*[DOWN] * 9), WatchedBackend()
    mode = BackoffMode(threshold=5, multiplier=100, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=RetryPolicy(backoff=lambda _: 1.0)):
        await backend.put("key", 1)
        await inbox.outcome(10)
        assert now() < 10


async def test_after_the_rest_four_deliveries_are_let_through_and_a_success_brings_all_back() -> None:
    inbox, backend = Inbox(*[DOWN] * 2, lasting(0.6), *[lasting(0.8)] * 20), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 2)
        for number in range(10):
            await backend.put(f"more-{number}", 1)
        await inbox.digest(6)
        await asyncio.sleep(0.4)
        assert len(inbox.digests) == 6
        await inbox.outcome(3)
        await settle()
        assert len(inbox.digests) == 12


async def test_a_probe_that_hangs_counts_as_failed_and_its_late_success_ends_the_rest_all_the_same() -> None:
    inbox, backend = Inbox(*[DOWN] * 2, *[lasting(30)] * 8), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10, maximum=120)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM, delivery_timeout=50):
        await fail_in_a_row(inbox, backend, 2)
        for number in range(10):
            await backend.put(f"more-{number}", 1)
        await inbox.digest(6)
        began = now()
        await inbox.digest(10)  # one more each second
        assert now() - began < PROBE_TIMEOUT
        await inbox.digest(11)
        assert 20 <= now() - began - 4 - PROBE_TIMEOUT <= 30  # a rest of the second level, which a success cut short
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


@pytest.mark.parametrize("signal", [Reject("no"), RetryAfter(500), PartialFailure({"nobody": "x"})])
async def test_signals_say_nothing_of_the_receiver(signal: BaseException) -> None:
    inbox, backend = Inbox(DOWN, *[signal] * 9, DOWN), WatchedBackend()
    mode = BackoffMode(threshold=2, multiplier=10)
    async with delivering(inbox, backend, backoff_mode=mode, retry=SELDOM):
        await fail_in_a_row(inbox, backend, 11)
        assert now() < 1  # they are no failures
        await backend.put("next", 1)
        await inbox.digest(12)
        assert now() >= 10  # nor successes, which would begin the count again


async def test_a_pause_stops_all_claims_of_this_process_and_no_longer() -> None:
    inbox = Inbox(RetryAfter(30, pause=True), None, None, None, RetryAfter(3000, pause=True))
    backend = WatchedBackend(shards=2)
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
        await backend.put("last", 1)
        await inbox.outcome(5)
    assert now() < 31, "a pause does not keep a worker from stopping"
    assert [digest.attempt for digest in inbox.digests] == [1, 1, 1, 1, 1]


async def test_deliveries_that_fail_are_spread_by_jitter() -> None:
    inbox, backend = Inbox(*[DOWN] * 100), WatchedBackend()
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


async def own_tries(key: str) -> RetryPolicy:
    return RETRY


class CoarseSelector(IdleSelector):
    """Waits for whole milliseconds, as asyncio's timers do; and a turn of the loop takes some time."""

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        self.now += 0.00002
        return super().select(timeout and ceil(timeout * 1000) / 1000)


def test_the_wait_for_what_is_due_ends_less_late_than_a_timer() -> None:
    late: list[float] = []

    async def listen(seen: str) -> str:
        await asyncio.Event().wait()
        return seen

    async def waits() -> None:
        loop = asyncio.get_running_loop()
        for number in range(20):
            wakeups = WakeUps(listen)
            began, timeout = loop.time(), 0.005 + number / 20_000
            await wakeups.wait("", timeout)
            late.append(loop.time() - began - timeout)
            await wakeups.close()

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(CoarseSelector())) as runner:
        runner.run(waits())
    assert min(late) >= 0, "never before it is due"
    assert max(late) <= EARLY + 0.0001
    assert sum(late) / len(late) < EARLY / 2


@pytest.mark.parametrize(
    "options", [{}, {"throttle": Throttle(100, per=1)}, {"retry": own_tries}], ids=["plain", "throttled", "read late"]
)
async def test_nothing_of_a_delivery_that_has_ended_waits_for_the_garbage_collector(options: Any) -> None:
    backend = WatchedBackend()
    for number in range(5):
        await backend.put(str(number), number)
    inbox = Inbox()

    def deliveries() -> int:
        return sum(type(each) is ActiveDelivery for each in gc.get_objects())

    gc.collect()
    before = deliveries()  # of other tests
    gc.disable()
    try:
        async with delivering(inbox, backend, **options):
            await inbox.outcome(5)
            await settle()
            assert deliveries() == before
    finally:
        gc.enable()
