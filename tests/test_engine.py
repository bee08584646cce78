from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import partial, wraps
from math import ceil, inf, nan
from typing import Any, cast
from unittest.mock import AsyncMock

import anyio
import pytest
from engines import (
    Inbox,
    WatchedBackend,
    adding,
    delivering,
    engine_on,
    holding,
    lasting,
    now,
    policy,
    session_of,
    settle,
    state_of,
)

from aiodigest import (
    JSON,
    AiodigestError,
    BackendUnavailable,
    CodecError,
    ConfigurationError,
    Delivery,
    Digest,
    DigestEngine,
    Entry,
    InvalidArgument,
    LimitExceeded,
    PartialAdd,
    PartialFailure,
    Policy,
    Reject,
    RetryPolicy,
)
from aiodigest.backend import Add, ShardMap
from aiodigest.codecs import JSONCodec
from aiodigest.records.entries import value_in

pytestmark = pytest.mark.virtual_time

DAY = 86_400.0
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0)


def says(record_id: str, stored: str) -> Callable[[BackendUnavailable], bool]:
    """Of an add, what is known of its record."""
    return lambda error: (error.record_id, error.stored) == (record_id, stored)


def stored(backend: WatchedBackend) -> list[str]:
    return [key for machine in backend.machines for key in machine.held]


async def fault(most: int) -> int:
    """What stands in for a fault of ours."""
    raise ZeroDivisionError


def break_worker(engine: DigestEngine[JSON]) -> None:
    """Let an engine's background task meet a fault at its next claim."""
    scheduler = session_of(engine)._scheduler
    assert scheduler is not None
    scheduler.limit.available = fault


def function_of(policy: Policy) -> Callable[[str], Policy]:
    """A policy function that always answers the same."""
    return lambda key: policy


def slowly(seconds: float) -> Callable[[str], Awaitable[Policy]]:
    """A policy function that takes a while."""

    async def choose(key: str) -> Policy:
        await asyncio.sleep(seconds)
        return Policy()

    return choose


# adding


async def test_two_adds_of_a_new_timeline_at_once_open_one_window() -> None:
    async with adding() as (engine, _):
        assert await asyncio.gather(engine.add("key", 1), engine.add("key", 1)) == [True, False]
        peeked = await engine.peek("key")
    assert peeked is not None
    assert len({record.id for record in peeked.records}) == 2


async def test_one_event_is_delivered_at_once_and_a_burst_in_one_more_message() -> None:
    inbox = Inbox()
    async with delivering(inbox) as (engine, _):
        for value in range(500):
            await engine.add("key", value)
            await settle()
        await inbox.digest(2)
    assert inbox.values == [[0], list(range(1, 500))]
    assert inbox.times == pytest.approx([0, 1800], abs=0.01)


@pytest.mark.parametrize(
    ("key", "value", "options"),
    [
        *((key, 1, {}) for key in ("", "k" * 1025, "\ud800", None)),
        *(("key", 1, {"record_id": name}) for name in ("", "x" * 1025, "\udfff", 7)),
        *(("key", 1, {"timestamp": stamp}) for stamp in (nan, True, "now", 10**400, 1e15, datetime(2026, 1, 1))),
        *(("key", value, {}) for value in ({1: 2}, object(), b"bytes", "x" * 1_048_577)),
    ],
)
async def test_an_add_with_a_bad_argument_raises_a_typed_error_and_stores_nothing(
    key: Any, value: Any, options: dict[str, Any]
) -> None:
    async with adding() as (engine, backend):
        with pytest.raises((InvalidArgument, CodecError, LimitExceeded), match=r".") as caught:
            await engine.add(key, value, **options)
        with pytest.raises(PartialAdd) as partial:
            await engine.add_many([Entry(key, value, **options), Entry("good", 1)])
    assert [type(result) for result in partial.value.results] == [type(caught.value), bool]
    assert stored(backend) == ["good"]


async def test_a_value_of_another_type_is_refused_and_nothing_is_stored() -> None:
    async with adding(value_type=int) as (engine, backend):
        with pytest.raises(InvalidArgument, match="type"):
            await engine.add("key", "5")
    assert not stored(backend)


async def test_a_policy_function_is_asked_once_an_add_and_once_a_digest_and_may_be_async() -> None:
    asked: list[str] = []

    async def choose(key: str) -> Policy:
        asked.append(key)
        await asyncio.sleep(1)
        return Policy(initial_delay=60) if key == "slow" else Policy()

    inbox = Inbox()
    async with delivering(inbox, policy=choose) as (engine, _):
        assert await asyncio.gather(engine.add("fast", 1), engine.add("slow", 2)) == [True, False]
        await inbox.outcome(2)
    assert asked == ["fast", "slow", "fast", "slow"]
    assert inbox.times == pytest.approx([2, 62], abs=0.1)


async def test_add_many_asks_a_policy_function_once_a_key_and_for_several_keys_at_once() -> None:
    asked: list[str] = []
    under_way = [0]

    async def choose(key: str) -> Policy:
        asked.append(key)
        under_way.append(under_way[-1] + 1)
        await asyncio.sleep(1)
        under_way.append(under_way[-1] - 1)
        if key == "5":
            raise ZeroDivisionError
        return Policy(capacity=int(key) + 1)

    async with engine_on(WatchedBackend(), policy=choose) as engine:
        with pytest.raises(PartialAdd, match=r"30 of 3000 entries were not added.*ZeroDivisionError"):
            await engine.add_many([Entry(str(n % 100), n) for n in range(3000)])
    assert len(asked) == len(set(asked)) == 100
    assert max(under_way) == 32
    assert now() == pytest.approx(4)


class Loose(str):
    """Text that is equal to what differs in its case alone."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


def by_length(key: str) -> Policy:
    return Policy(capacity=len(key))


@pytest.mark.parametrize("chosen", [Policy(), by_length], ids=["fixed", "function"])
async def test_a_key_of_a_class_of_its_own_is_the_text_that_it_holds(chosen: Any) -> None:
    backend = WatchedBackend()
    async with engine_on(backend, policy=chosen) as engine:
        assert await engine.add_many([Entry(Loose("User"), 1), Entry(Loose("user"), 2)]) == [True, True]
        assert await engine.add(Loose("USER"), 3)
    keys = [*backend.machines[0].held]
    assert (keys, {type(key) for key in keys}) == (["User", "user", "USER"], {str})


async def test_an_add_whose_policy_function_hangs_fails_after_the_timeout_and_stores_nothing() -> None:
    async with adding(policy=slowly(inf), timeout=5) as (engine, backend):
        for call in (engine.add("key", 1), engine.remove("key", "x"), engine.reschedule("key")):
            began = now()
            with pytest.raises(ConfigurationError, match="policy function took longer than 5 s"):
                await call
            assert now() - began == pytest.approx(5, abs=0.1)
    assert not stored(backend)


@pytest.mark.parametrize("call", ["add", "open"])
async def test_an_add_whose_policy_function_is_slow_takes_no_longer_than_the_timeout_all_the_same(call: str) -> None:
    backend = WatchedBackend()
    backend.gates[call] = asyncio.Event()
    if call == "open":
        backend.take_down(call)
    async with engine_on(backend, policy=slowly(3), timeout=5) as engine:
        began = now()
        with pytest.raises(BackendUnavailable):
            await engine.add("key", 1)
        assert now() - began == pytest.approx(5, abs=0.1)
        backend.gates[call].set()


async def test_a_policy_function_that_hangs_gives_its_slot_back_and_the_attempt_has_failed() -> None:
    answers = iter([Policy(), None, Policy(), Policy()])

    async def choose(key: str) -> Policy:
        answer = next(answers)
        if answer is None:
            await asyncio.Event().wait()
        return answer or Policy()

    inbox = Inbox()
    async with delivering(inbox, policy=choose, retry=RETRY, delivery_timeout=30, concurrency=1) as (engine, _):
        await engine.add("key", 1)
        await inbox.outcome()
        await settle()
        seen = await engine.peek("key")
        await engine.add("key", 2)
        await inbox.outcome(2)
    assert inbox.results == ["failed", "delivered"]
    assert inbox.values == [[1, 2]]  # its callback had not started, so nothing is unknown
    assert inbox.times == pytest.approx([30 + 10], abs=0.1)
    assert seen is not None
    assert "policy function took longer than 30 s" in (seen.last_error or "")


# adding while the server is away


async def test_an_add_that_was_not_sent_in_time_says_so_with_its_record_id() -> None:
    async with adding(WatchedBackend(held="add"), timeout=5) as (engine, backend):
        first = asyncio.create_task(engine.add("key", 1, record_id="first"))
        await settle()
        with pytest.raises(BackendUnavailable, check=says("second", "no")):
            await engine.add("key", 2, record_id="second")
        with pytest.raises(BackendUnavailable, check=says("first", "unknown")):
            await first
        assert now() == pytest.approx(5, abs=0.1)
        backend.gates["add"].set()


async def test_an_add_whose_reply_was_lost_is_not_repeated_by_the_engine() -> None:
    backend = WatchedBackend()
    backend.lost["add"] = 1
    async with engine_on(backend) as engine:
        with pytest.raises(BackendUnavailable) as caught:
            await engine.add("key", 1)
        assert (caught.value.stored, backend.count("add")) == ("unknown", 1)
        assert caught.value.record_id is not None
        assert not await engine.add("key", 1, record_id=caught.value.record_id)
        peeked = await engine.peek("key")
    assert peeked is not None
    assert len(peeked.records) == 1


async def test_an_add_after_the_server_came_back_connects() -> None:
    async with adding(WatchedBackend(down="open"), timeout=5) as (engine, backend):
        with pytest.raises(BackendUnavailable, check=says("x", "no")):
            await engine.add("key", 1, record_id="x")
        backend.bring_up()
        assert await engine.add("key", 1)


async def test_all_who_wait_for_the_server_share_one_attempt_to_connect() -> None:
    async with adding(WatchedBackend(down="open")) as (engine, backend):
        backend.bring_up()
        await asyncio.gather(*(engine.add("key", value) for value in range(50)))
    assert backend.count("open") == 2
    assert backend.items("add") == [50]


# adding many


async def test_add_many_answers_as_add_would_in_order_and_in_few_calls() -> None:
    async with adding(WatchedBackend(shards=2)) as (engine, backend):
        answers = await engine.add_many(Entry(f"key-{value % 500}", value) for value in range(2500))
        assert await engine.add_many([]) == []
        with pytest.raises(InvalidArgument, match="add_many takes entries"):
            await engine.add_many(cast("Any", 5))
    assert answers == [True] * 500 + [False] * 2000
    assert backend.count("add") < 2500 / 100


async def test_add_many_sends_the_first_entries_while_it_encodes_the_others() -> None:
    sent_before = list[int]()

    class Noting(JSONCodec[JSON]):
        def encode(self, value: JSON, /) -> bytes:
            sent_before.append(backend.count("add"))
            return super().encode(value)

    async with adding(codec=Noting()) as (engine, backend):
        keys = [f"key-{value % 7}" for value in range(1000)]
        assert await engine.add_many(Entry(key, value) for value, key in enumerate(keys)) == [True] * 7 + [False] * 993
        held = {
            key: [json.loads(value_in(entry)[1:]) for entry in await backend.operations.entries(key)] for key in keys
        }
    assert (sent_before[0], sent_before[-1]) == (0, 2)
    assert held == {f"key-{rest}": [*range(rest, 1000, 7)] for rest in range(7)}


async def test_a_bad_entry_fails_alone_and_every_result_is_told() -> None:
    def choose(key: str) -> Policy:
        return {"a": Policy(), "b": Policy()}[key]

    async with adding(policy=choose) as (engine, backend):
        with pytest.raises(PartialAdd, match="2 of 5") as caught:
            await engine.add_many([Entry("a", 1), Entry("", 2), Entry("unknown", 3), Entry("a", 4), Entry("b", 5)])
        with pytest.raises(KeyError, match="unknown"):
            await engine.add("unknown", 6)
    good, empty, unknown, second, other = caught.value.results
    assert (good, second, other, stored(backend)) == (True, False, True, ["a", "b"])
    assert isinstance(empty, InvalidArgument)
    assert isinstance(unknown, AiodigestError)
    assert isinstance(unknown.__cause__, KeyError)


async def test_add_many_tells_what_was_sent_from_what_was_not() -> None:
    async with adding() as (engine, backend):
        backend.lost["add"] = 1
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many([Entry("key", value, f"r{value}") for value in range(2500)])
    failed = [result for result in caught.value.results if isinstance(result, BackendUnavailable)]
    assert [error.stored for error in failed] == ["unknown"] * 256 + ["no"] * 2244
    assert [error.record_id for error in failed] == [f"r{value}" for value in range(2500)]
    assert backend.count("add") == 1


async def test_add_many_while_the_server_is_away_takes_one_timeout_and_not_one_a_chunk() -> None:
    asked = list[str]()

    def choose(key: str) -> Policy:
        asked.append(key)
        return Policy()

    async with adding(WatchedBackend(held="open"), timeout=5, policy=choose) as (engine, _):
        began = now()
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many([Entry(f"key-{value}", value, f"r{value}") for value in range(5000)])
        assert now() - began == pytest.approx(5, abs=0.1)
    failed = [error for error in caught.value.results if isinstance(error, BackendUnavailable)]
    assert [error.record_id for error in failed] == [f"r{value}" for value in range(5000)]
    assert len(asked) < 2000, "nothing is asked for what is not sent"


async def test_a_shard_that_is_away_is_asked_once_and_fails_its_own_entries_alone() -> None:
    backend = WatchedBackend(shards=4, down="add")
    backend.down_shards = {1}
    entries = [Entry(f"key-{number}", number, f"r{number}") for number in range(20_000)]
    asked = list[str]()

    def choose(key: str) -> Policy:
        asked.append(key)
        return Policy()

    async with adding(backend, policy=choose) as (engine, _):
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many(entries)
    assert sum(backend.shard_map.shard_of(key) == 1 for key in asked) < 2_000, "nothing is asked for what is not sent"
    failed = {error.record_id for error in caught.value.results if isinstance(error, BackendUnavailable)}
    assert failed == {entry.record_id for entry in entries if backend.shard_map.shard_of(entry.key) == 1}
    assert sum(result is True for result in caught.value.results) == len(entries) - len(failed)
    assert backend.count("add", 1) == 1


class Moving(WatchedBackend):
    """Has one shard, whose place two others take while the first call is under way; one of them is away."""

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        if shard == 0:
            self._shard_map = ShardMap(3, range(1, 3), range(1))
        away = BackendUnavailable("connection refused")
        return [away if self.shard_map.shard_of(add.key) == 1 else True for add in adds]


async def test_adds_that_a_call_sends_on_fail_for_the_shard_that_is_away_and_no_other() -> None:
    entries = [Entry(f"key-{number}", number) for number in range(5_000)]
    backend = Moving(shards=3)
    backend._shard_map = ShardMap(1, range(1))
    async with adding(backend) as (engine, _):
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many(entries)
    stored = [result is True for result in caught.value.results]
    assert stored == [backend.shard_map.shard_of(entry.key) == 2 for entry in entries]


async def test_a_policy_function_that_is_cancelled_fails_its_entry_alone() -> None:
    def choose(key: str) -> Policy:
        if key == "bad":
            raise asyncio.CancelledError  # as of another task that it awaits
        return Policy()

    async with adding(policy=choose) as (engine, _):
        with pytest.raises(PartialAdd, match=r"1 of 3 .* could not be made ready: CancelledError") as caught:
            await engine.add_many([Entry("good", 1), Entry("bad", 2), Entry("better", 3)])
    assert [result is True for result in caught.value.results] == [True, False, True]


async def test_a_fault_of_the_store_is_the_error_of_every_entry() -> None:
    async with adding() as (engine, backend):
        backend.take_down("add", error=ZeroDivisionError("of ours"))
        with pytest.raises(PartialAdd, match=r"2 of 2 .* a fault while adding: ZeroDivisionError: of ours") as caught:
            await engine.add_many([Entry("key", 1), Entry("other", 2)])
    assert [type(result) for result in caught.value.results] == [AiodigestError] * 2


# what a callback may say


@pytest.mark.parametrize(("records", "size"), [(35, 10), (1500, 600)], ids=["of a claim", "paged"])
async def test_a_digest_over_max_size_comes_in_parts_under_one_lease_in_order_of_arrival(
    records: int, size: int
) -> None:
    parts = policy(max_size=size, capacity=2 * records)
    inbox, backend = Inbox(), await holding(*range(records), policy=parts)
    count = ceil(records / size)
    async with delivering(inbox, backend, policy=parts):
        await inbox.outcome(count)
        await settle()
        assert await state_of(backend, "key") is None
    assert inbox.values == [list(range(start, min(start + size, records))) for start in range(0, records, size)]
    assert len({digest.id for digest in inbox.digests}) == count
    assert {digest.attempt for digest in inbox.digests} == {1}
    assert backend.count("claim") <= 3


async def test_a_part_that_fails_waits_and_the_parts_before_it_are_not_delivered_again() -> None:
    parts = policy(max_size=2)
    inbox, backend = Inbox(None, ValueError("no")), await holding(1, 2, 3, 4, 5, policy=parts)
    async with delivering(inbox, backend, policy=parts, retry=RETRY):
        await inbox.outcome(4)
    assert inbox.values == [[1, 2], [3, 4], [3, 4], [5]]
    assert [digest.attempt for digest in inbox.digests] == [1, 1, 2, 1]


# the observer


async def test_the_observer_is_told_how_late_and_how_long_an_attempt_was() -> None:
    inbox, backend = Inbox(lasting(3)), await holding(1, 2)
    await asyncio.sleep(7)
    async with delivering(inbox, backend):
        delivery = await inbox.outcome()
        await backend.put("other", 3)
        prompt = await inbox.outcome(2)
    late, long = delivery.lateness, delivery.duration
    assert delivery == Delivery("key", inbox.digests[0].id, 1, "delivered", 2, late, long)
    assert (late, long) == pytest.approx((7, 3), abs=0.01)
    assert (prompt.lateness, prompt.duration) == pytest.approx((0, 0), abs=0.01)


# entering and leaving


async def test_an_engine_delivers_to_one_callback() -> None:
    engine = engine_on(WatchedBackend())
    with pytest.raises(ConfigurationError, match="no callback"):
        async with engine.delivering():
            pass
    with pytest.raises(ConfigurationError, match="no callback"):
        await engine.run()
    engine.deliver(Inbox())
    with pytest.raises(ConfigurationError, match="make an engine with another namespace"):
        engine.deliver(Inbox())


async def test_a_second_engine_of_a_namespace_delivers_in_the_process_only_to_the_same_callback() -> None:
    backends = [WatchedBackend(), WatchedBackend()]
    for backend in backends:
        backend.place = "the same server"  # type: ignore[attr-defined]
    first, second = map(engine_on, backends)
    inbox = Inbox()
    async with first.delivering(inbox):
        with pytest.raises(ConfigurationError, match="another engine on this namespace of memory:// delivers"):
            async with second.delivering(await_nothing):
                pass
        async with second.delivering(inbox), engine_on(WatchedBackend()).delivering(await_nothing):
            pass
    async with second.delivering(await_nothing):
        pass


@pytest.mark.parametrize(
    ("url", "other", "is_same"),
    [
        ("redis://localhost", "redis://user:secret@127.0.0.1:6379/0?client_name=me", True),
        ("redis://localhost?db=1", "redis://localhost/1", True),
        ("redis://localhost/1", "redis://localhost/2", False),
        ("redis://localhost", "redis://localhost:6380", False),
        ("redis+sentinel://a,b/main", "redis+sentinel://b,a:26379/main/0", True),
        ("redis+sentinel://a,b/main", "redis+sentinel://a,b/other", False),
        ("embedded:///tmp/one", "embedded:///tmp/../tmp/one", True),
    ],
)
def test_two_urls_of_one_server_are_known_as_such(url: str, other: str, is_same: bool) -> None:
    places: list[Any] = [cast("Any", DigestEngine(each, namespace="test").backend).place for each in (url, other)]
    assert (places[0] == places[1]) is is_same


async def test_entering_twice_is_refused_also_while_it_drains_and_changes_nothing() -> None:
    inbox, backend = Inbox(lasting(5)), WatchedBackend()
    engine = engine_on(backend)

    async def refuse(delay: float) -> None:
        await asyncio.sleep(delay)
        for again in (engine, engine.delivering(Inbox())):
            with pytest.raises(ConfigurationError, match="entered already"):
                async with again:
                    pass

    async with engine.delivering(inbox):
        await refuse(0)
        assert await engine.add("key", 1)
        await inbox.digest()
        draining = asyncio.create_task(refuse(1))
    await draining


@pytest.mark.parametrize("entered_before", [False, True])
async def test_an_engine_that_is_not_entered_says_how_to(entered_before: bool) -> None:
    engine = engine_on(WatchedBackend())
    if entered_before:
        async with engine:
            pass
    with_a_name = engine.flush, engine.delete, engine.reschedule, engine.peek
    calls: list[Callable[[], Any]] = [
        *(partial(call, "x") for call in (*with_a_name, engine.dead_letter, engine.replay, engine.discard)),
        *(partial(call, "key", "x") for call in (engine.add, engine.remove)),
        partial(engine.add_many, []),
        engine.stats,
        *((lambda pages=pages: anext(aiter(pages()))) for pages in (engine.timelines, engine.dead_letters)),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="async with engine"):
            await call()


async def test_an_error_of_configuration_is_raised_by_entering_and_leaves_nothing_behind() -> None:
    backend = WatchedBackend()
    backend.take_down("open", error=ConfigurationError("another layout"))
    engine = engine_on(backend)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="another layout"):
            async with engine.delivering(Inbox()):
                pass
    backend.bring_up()
    async with engine.delivering(Inbox()):
        pass


async def test_an_engine_that_is_left_as_its_server_comes_ends() -> None:
    backend = WatchedBackend(held="open")
    async with delivering(Inbox(), backend, timeout=5):
        await asyncio.sleep(2)
        backend.gates["open"].set()
    async with asyncio.timeout(60):
        async with delivering(Inbox(), backend, timeout=5):
            pass


async def test_an_engine_that_is_left_in_the_very_turn_in_which_its_server_comes_ends() -> None:
    backend = WatchedBackend(held="open")
    async with delivering(Inbox(), backend, timeout=5) as (engine, _):
        asyncio.get_running_loop().call_later(1, backend.gates["open"].set)
        await engine.stats()
    assert now() == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize("name", ["connect", "wait"])
async def test_leaving_waits_for_what_a_call_has_to_put_away(name: str) -> None:
    async def call(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.5)
            backend.closed.append(name)

    backend = WatchedBackend()
    setattr(backend, name, call)
    async with delivering(Inbox(), backend, timeout=1):
        await settle()
    assert backend.closed == [name, "backend"]


async def test_leaving_ends_although_other_tasks_keep_adding() -> None:
    inbox, refused = Inbox(), set[str]()

    async def produce(engine: DigestEngine[JSON], key: str) -> None:
        with suppress(ConfigurationError):  # at last the engine is not entered
            while True:
                try:
                    await engine.add(key, 1)
                except BackendUnavailable as error:
                    refused.add(error.stored)

    async with delivering(inbox, WatchedBackend(shards=2)) as (engine, _):
        producers = [asyncio.create_task(produce(engine, f"key-{number}")) for number in range(600)]
        await inbox.digest()
    await asyncio.wait(producers)
    assert refused == {"no"}


async def test_a_connection_that_fails_when_nobody_waits_for_it_any_more_is_no_error_that_nobody_saw() -> None:
    backend = WatchedBackend()
    gate = backend.gates["open"] = asyncio.Event()
    backend.take_down("open")
    async with engine_on(backend, timeout=5) as engine:
        assert now() == pytest.approx(5, abs=0.1)
        gate.set()
        await settle()
        backend.bring_up()
        assert await engine.add("key", 1)  # connects anew
        gc.collect()


@pytest.mark.parametrize("connected", [True, False])
async def test_an_add_that_comes_too_late_fails_at_once_as_not_stored_and_connects_to_nothing(connected: bool) -> None:
    backend = WatchedBackend()
    if not connected:
        backend.take_down("open")
    async with engine_on(backend, policy=slowly(10), timeout=20) as engine:
        late = asyncio.create_task(engine.add("key", 1))
        await settle()
    tries = backend.count("open")
    with pytest.raises(BackendUnavailable, match="left") as caught:
        await late
    assert (caught.value.stored, backend.count("open")) == ("no", tries)
    assert now() < 11


@pytest.mark.parametrize("added_before", [True, False])
async def test_a_callback_may_still_add_while_the_engine_drains_and_be_the_first_to_do_so(added_before: bool) -> None:
    backend = await holding(*([] if added_before else [1]))
    engine = engine_on(backend)

    async def chain(digest: Digest[JSON]) -> None:
        await asyncio.sleep(5)
        await engine.add("audit", digest.id)

    async with engine.delivering(chain):
        if added_before:
            await engine.add("key", 1)
        await settle()
    assert await state_of(backend, "key") is None
    assert await state_of(backend, "audit") == ("ready", 0)


@pytest.mark.parametrize("queued", [True, False])
async def test_a_fault_in_the_background_is_logged_and_told_to_adds_and_raised_on_leaving(
    queued: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend, inbox = WatchedBackend(), Inbox(lasting(50))

    async def use() -> None:
        async with delivering(inbox, backend) as (engine, _):
            if queued:
                await engine.add("key", 1)
                await inbox.digest()
            break_worker(engine)
            session_of(engine).poke(0)
            await asyncio.sleep(1)
            with pytest.raises(BackendUnavailable, match="background task has ended", check=says("mine", "no")):
                await engine.add("other", 1, record_id="mine")

    with pytest.raises(ExceptionGroup, match="unhandled errors") as raised:
        await use()
    assert raised.group_contains(ZeroDivisionError)
    assert "test: a fault of aiodigest has ended its background task" in caplog.messages
    assert "other" not in stored(backend)
    assert now() < 5


async def test_a_background_task_that_other_code_has_cancelled_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with delivering(Inbox()) as (engine, _):
        session_of(engine).main.cancel()
        await settle()
        assert "as its log tells" in engine.activity.fault
        assert caplog.messages == ["test: aiodigest's background task was cancelled from outside"]
    assert len(caplog.messages) == 1


# cancellation


@asynccontextmanager
async def fail_after(seconds: float) -> AsyncGenerator[None]:
    with anyio.fail_after(seconds):
        yield


@pytest.mark.parametrize("limit", [asyncio.timeout, fail_after])
async def test_an_engine_whose_time_is_limited_drains(
    limit: Callable[[float], AbstractAsyncContextManager[object]],
) -> None:
    inbox, backend = Inbox(lasting(10)), WatchedBackend()

    async def use() -> None:
        async with limit(1), delivering(inbox, backend) as (engine, _):
            await engine.add("key", 1)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await use()
    assert now() == pytest.approx(10, abs=0.1)
    assert await state_of(backend, "key") is None


# running as a service


async def run_until(engine: DigestEngine[JSON], inbox: Inbox, *signals: int) -> None:
    """Run an engine, and send this process signals a second apart once the first digest has come."""
    running = asyncio.create_task(engine.run(inbox))
    await inbox.digest()
    for number in signals:
        await asyncio.sleep(1)
        os.kill(os.getpid(), number)
    await running


@pytest.mark.parametrize(
    ("signals", "lasts", "ends", "state"),
    [
        ([signal.SIGTERM], 10, 10, None),
        ([signal.SIGINT], 10, 10, None),
        ([signal.SIGTERM, signal.SIGINT], 1000, 2, ("ready", 0)),
    ],
)
async def test_run_drains_and_returns_at_a_signal_and_stops_at_once_at_a_second(
    signals: list[int], lasts: float, ends: float, state: tuple[str, int] | None
) -> None:
    inbox, backend = Inbox(lasting(lasts)), await holding(1)
    await run_until(engine_on(backend, drain_timeout=500), inbox, *signals)
    assert now() == pytest.approx(ends, abs=0.1)
    assert await state_of(backend, "key") == state


async def test_a_signal_stops_every_engine_that_runs_and_then_the_handler_of_before_is_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        inboxes, backends = [Inbox(lasting(3)), Inbox(lasting(6))], [await holding(1), await holding(1)]
        engines = [engine_on(backend) for backend in backends]
        runs = [asyncio.create_task(engine.run(inbox)) for engine, inbox in zip(engines, inboxes, strict=True)]
        for inbox in inboxes:
            await inbox.digest()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*runs)
        assert [await state_of(backend, "key") for backend in backends] == [None, None]
        assert not seen
        os.kill(os.getpid(), signal.SIGTERM)
        await settle()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("signals", "ends"), [(1, 11), (2, 2)])
async def test_delivering_with_signals_ends_its_block_at_one_and_then_the_deliveries_in_order(
    signals: int, ends: float
) -> None:
    inbox, other, ended = Inbox(lasting(11)), Inbox(lasting(1)), list[str]()
    backend = await holding(1)
    async with engine_on(backend, drain_timeout=500).delivering(inbox, signals=True):
        async with engine_on(await holding(1)).delivering(other, signals=True):
            await inbox.digest()
            for second in range(1, signals + 1):
                asyncio.get_running_loop().call_later(second, os.kill, os.getpid(), signal.SIGTERM)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("body")
        ended.append("inner")
        await asyncio.Event().wait()
    assert (ended, now()) == (["body"], pytest.approx(ends, abs=0.1))
    assert await state_of(backend, "key") == (None if signals == 1 else ("ready", 0))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("with_signals", [True, False])
async def test_an_error_and_a_timeout_of_the_block_are_raised_with_signals_too(with_signals: bool) -> None:
    engine = engine_on(WatchedBackend())
    with pytest.raises(TimeoutError):
        async with engine.delivering(await_nothing, signals=with_signals), asyncio.timeout(1):
            await asyncio.Event().wait()


async def test_a_timeout_of_the_cleanup_after_a_signal_is_raised() -> None:
    async def body() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            async with asyncio.timeout(1):
                await asyncio.Event().wait()

    asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGTERM)
    with pytest.raises(TimeoutError) as raised:
        async with engine_on(WatchedBackend()).delivering(await_nothing, signals=True):
            await body()
    assert now() == pytest.approx(2, abs=0.1)
    assert isinstance(raised.value.__cause__, asyncio.CancelledError)  # as that of the signal's own


async def test_a_signal_that_comes_while_the_engine_is_entered_ends_the_block() -> None:
    backend = WatchedBackend(held="open")
    asyncio.get_running_loop().call_later(1, os.kill, os.getpid(), signal.SIGINT)
    async with engine_on(backend).delivering(await_nothing, signals=True):
        await asyncio.Event().wait()
    assert now() == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize("shards", [8, "0-7", b"0"])
async def test_what_is_no_set_of_shards_is_refused(shards: Any) -> None:
    engine = engine_on(WatchedBackend())
    with pytest.raises(InvalidArgument, match="shards must be a range or a set of numbers"):
        async with engine.delivering(Inbox(), shards=shards):
            pass


async def test_run_ends_when_its_background_task_has_a_fault() -> None:
    inbox, backend = Inbox(), await holding(1)
    engine = engine_on(backend)
    running = asyncio.create_task(engine.run(inbox))
    await inbox.digest()
    break_worker(engine)
    await engine.add("other", 1)
    with pytest.raises(ExceptionGroup):
        await running


# making an engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"concurrency": value}, "concurrency") for value in (0, -1, 1.5, True)),
        *(({"lease_timeout": value}, "lease_timeout") for value in (0, nan, "1m")),
        *(({"delivery_timeout": value}, "delivery_timeout") for value in (0, nan)),
        *(({"drain_timeout": value}, "drain_timeout") for value in (-1, nan)),
        *(({"timeout": value}, "timeout") for value in (0, timedelta(seconds=-1))),
        ({"wait_replicas": -1}, "wait_replicas"),
        ({"shards": "2"}, "shards must be from 1 to 1024"),
        ({"policy": Policy(ttl=1801)}, "ttl"),
        ({"retry": RetryPolicy(backoff=lambda attempt: nan)}, "retry"),
        ({"retry": RetryPolicy(max_attempts=1000, backoff=lambda attempt: DAY)}, "ttl|retry"),
        ({"retry": RetryPolicy(backoff=cast("Any", len))}, "retry strategy cannot be asked: it raised TypeError"),
        ({"namespace": None}, "namespace must be a str"),
        ({"policy": 5}, "policy must be a Policy or a function"),
        ({"policy": Policy}, "policy must be a Policy or a function"),
        ({"retry": 3}, "retry must be a RetryPolicy"),
        ({"retry": RetryPolicy}, "retry must be a RetryPolicy"),
        ({"backoff_mode": 1}, "backoff_mode must be a BackoffMode"),
        ({"codec": 4}, "codec must be a Codec"),
        ({"codec": "text, which has a method encode too"}, "codec must be a Codec"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_when_the_engine_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgument, ConfigurationError), match=message):
        DigestEngine("redis://localhost", **cast("Any", {"namespace": "test", **options}))


def test_making_an_engine_does_no_io() -> None:
    engine = DigestEngine("redis://user:secret@no-such-host.invalid/0", namespace="test")
    assert "no-such-host" in engine.url
    assert "secret" not in engine.url + repr(engine)


@pytest.mark.parametrize("connected", [True, False])
async def test_what_an_embedded_server_says_is_told_once_to_whoever_waits_for_it(connected: bool) -> None:
    backend = WatchedBackend(down="" if connected else "open")
    backend.down_because = "no space left on device"
    async with engine_on(backend) as engine:
        backend.take_down()
        calls: list[Callable[[], Any]] = [partial(engine.add, "key", 1)]
        if not connected:
            calls += [engine.stats, partial(engine.peek, "key"), partial(engine.flush, "key")]
        for call in calls:
            with pytest.raises(BackendUnavailable, match=r"^connection refused \(no space left on device\)$"):
                await call()
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many([Entry("key", 1, "x")])
    assert [*map(str, caught.value.results)] == ["connection refused (no space left on device)"]


async def test_a_policy_drops_as_little_given_as_a_function_as_it_does_when_it_is_fixed() -> None:
    large = policy(capacity=5000)
    inbox, backend = Inbox(), await holding(*range(3000), policy=large)
    async with delivering(inbox, backend, policy=function_of(large)):
        await inbox.outcome()
    assert ([len(digest.records) for digest in inbox.digests], inbox.digests[0].dropped) == ([3000], 0)


def run_in_thread(coroutine: Coroutine[Any, Any, object]) -> object:
    with ThreadPoolExecutor() as pool:
        return pool.submit(asyncio.run, coroutine).result()


def test_run_outside_the_main_thread_says_what_to_use_there() -> None:
    with pytest.raises(ConfigurationError, match=r"main thread.*delivering"):
        run_in_thread(engine_on(WatchedBackend()).run(Inbox()))


async def test_an_engine_is_not_used_from_another_loop_than_the_one_that_entered_it() -> None:
    engine = engine_on(WatchedBackend())
    async with engine:
        with pytest.raises(ConfigurationError, match="another event loop"):
            run_in_thread(engine.add("key", 1))
        assert await engine.add("key", 1) is True


def test_an_engine_whose_loop_was_closed_under_it_can_be_entered_again() -> None:
    engine = engine_on(WatchedBackend())

    async def enter() -> None:
        await engine.__aenter__()

    async def add() -> bool:
        async with engine:
            return await engine.add("key", 1)

    asyncio.run(enter())
    assert asyncio.run(add()) is True


def generate(*_: object) -> Iterator[None]:
    yield


async def generate_slowly(*_: object) -> AsyncIterator[None]:
    yield


async def await_nothing(*_: object) -> None: ...


def called_as(function: Callable[..., object]) -> Any:
    """An object that is called as a function is."""
    return type("Object", (), {"__call__": function})()


GENERATING = generate, generate_slowly, called_as(generate), called_as(generate).__call__, partial(called_as(generate))
AWAITING = await_nothing, called_as(await_nothing), called_as(await_nothing).__call__, partial(called_as(await_nothing))


def print_it(what: object) -> None:
    print(what)


def count_some(what: Any) -> Any:
    for each in what:
        if each:
            return True
    with suppress(ValueError):
        print(what)
    return [what]


def pass_on(what: Any) -> Any:
    return await_nothing(what) if what else None


@wraps(await_nothing)
def wrapped(what: Any) -> Any:
    return asyncio.wait_for(await_nothing(what), 1)


def print_what(self: object, what: object) -> None:
    print(what)


printing: Any = called_as(print_what)
PRINTING = printing.__class__
PLAIN: tuple[Any, ...] = (print_it, count_some, printing, printing.__call__, PRINTING, partial(print_it))


@pytest.mark.parametrize(
    ("callback", "without"), [(5, ""), *((each, " without yield") for each in (*GENERATING, *PLAIN))]
)
async def test_a_callback_that_cannot_be_called_or_has_a_yield_in_it_or_nothing_to_await_is_refused(
    callback: Any, without: str
) -> None:
    engine = engine_on(WatchedBackend())
    with pytest.raises(InvalidArgument, match=f"callback must be an async function{without}"):
        engine.deliver(callback)
    with pytest.raises(InvalidArgument, match=f"callback must be an async function{without}"):
        await engine.run(callback)


def awaited(digest: object) -> Awaitable[None]:
    return asyncio.sleep(0)


@pytest.mark.parametrize(
    "callback", [*AWAITING, partial(partial(await_nothing)), AsyncMock(), pass_on, wrapped, awaited]
)
def test_a_callback_may_be_an_object_or_a_part_of_a_function_and_is_returned_unchanged(callback: Any) -> None:
    assert engine_on(WatchedBackend()).deliver(callback) is callback


@pytest.mark.parametrize("observer", [5, *AWAITING, partial(await_nothing), generate, generate_slowly])
def test_an_observer_that_cannot_be_called_or_would_never_be_awaited_is_refused(observer: Any) -> None:
    with pytest.raises(InvalidArgument, match="observer must be a function that is not async"):
        engine_on(WatchedBackend()).observe(observer)


async def test_what_is_no_entry_is_told_how_to_give_one() -> None:
    async with engine_on(WatchedBackend()) as engine:
        with pytest.raises(PartialAdd, match=r"add_many takes no tuple: give Entry\(key, value\)"):
            await engine.add_many(cast("Any", [("key", 1)]))


@pytest.mark.parametrize("failed", [5, None, [[]]])
def test_a_partial_failure_of_what_are_no_ids_is_refused(failed: Any) -> None:
    with pytest.raises(InvalidArgument, match="PartialFailure takes"):
        PartialFailure(failed)


async def test_an_urgent_add_is_delivered_at_once_through_the_cool_down() -> None:
    async with delivering(inbox := Inbox(), policy=Policy(initial_delay=3_600)) as (engine, _):
        assert not await engine.add("key", 1)
        assert await engine.add("key", 2, urgent=True)
        await inbox.outcome()
        assert await engine.add_many([Entry("key", 3), Entry("key", 4, urgent=True)]) == [False, True]
        await inbox.outcome(2)
    assert [[record.value for record in digest.records] for digest in inbox.digests] == [[1, 2], [3, 4]]


async def test_urgent_is_true_or_false() -> None:
    async with delivering(Inbox()) as (engine, _):
        with pytest.raises(InvalidArgument, match="urgent must be True or False, not 1"):
            await engine.add("key", 1, urgent=1)  # type: ignore[arg-type]
        assert await engine.peek("key") is None


async def test_a_record_that_was_delivered_within_the_dedupe_window_is_counted_and_not_delivered_again() -> None:
    async with delivering(inbox := Inbox(), policy=Policy(minimum_delay=0, dedupe_window=600)) as (engine, _):
        await engine.add("key", 1, record_id="a")
        await inbox.outcome()
        assert await engine.add_many([Entry("key", 2, "a"), Entry("key", 3, "b")]) == [False, True]
        await inbox.outcome(2)
        assert (await engine.stats()).duplicates == 1
    assert [[record.id for record in digest.records] for digest in inbox.digests] == [["a"], ["b"]]


async def test_a_callback_that_was_rejected_or_failed_has_delivered_nothing() -> None:
    once = Policy(minimum_delay=0, dedupe_window=600)
    async with delivering(inbox := Inbox(Reject("no"), OSError()), policy=once) as (engine, _):
        for number in (1, 2):
            await engine.add("key", number, record_id="a")
            await inbox.outcome(number)
        await engine.flush("key")
        await inbox.outcome(3)
        assert (await engine.stats()).duplicates == 0
    assert inbox.results == ["rejected", "failed", "delivered"]
