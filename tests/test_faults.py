"""Faults of published digest engines (the table in faults.md has them all): those that no other file shows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from math import inf, nan
from typing import Any

import pytest
from engines import Inbox, WatchedBackend, delivering, forever, now, settle, virtual_time
from redis.crc import key_slot
from servers import Server
from stores import DAY, LEASE, NOW, Store, records
from storestate import redis_state

from aiodigest import (
    AiodigestError,
    ConfigurationError,
    Digest,
    DigestEngine,
    Entry,
    InvalidArgument,
    PartialAdd,
    Policy,
)
from aiodigest.backend import MOVES, Add, Close, Closed, NewDeadLetter, Retry
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.server import OLDEST, ServerConnections
from aiodigest.backends.redis.connections.url import read_url
from aiodigest.records.entries import pack

LIMITS = Policy().terms.limits
NO_GAP = Policy(minimum_delay=0, increment_delay=0, capacity=10_000)
PATIENCE = 300.0  # seconds; far more than anything here takes


def record(key: str, record_id: str = "a", policy: Policy = NO_GAP) -> Add:
    return Add(key, pack(record_id.encode(), None, b"1"), policy.terms)


class Clock:
    """A clock that a test moves."""

    now = NOW

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def backend(server: Server, namespace: str, clock: Clock) -> AsyncIterator[RedisBackend]:
    backend = RedisBackend(server.url, namespace=namespace, now=clock, timeout=PATIENCE)
    await backend.connect()
    yield backend
    await backend.aclose()


def script_calls(server: Server) -> int:
    """How many scripts ran since the statistics were reset."""
    with server.client() as client:
        calls: int = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    return calls


def reset_statistics(server: Server) -> None:
    with server.client() as client:
        client.config_resetstat()


# 3 and 4: any number, in bounded slices

MANY = 20_000


@pytest.fixture
def emptied(server: Server) -> Iterator[None]:
    """For tests that fill the server, which is slow to search then."""
    yield
    with server.client() as client:
        client.flushall()


@pytest.mark.usefixtures("emptied")
async def test_20_000_due_timelines_are_promoted_in_slices_that_block_nobody(
    backend: RedisBackend, server: Server, namespace: str, clock: Clock
) -> None:
    await backend.claim(0, 0, LEASE, LIMITS)
    with server.client() as client:
        client.zadd(f"{{{namespace}}}:waiting", {f"k{number}": NOW + number % 1_000 for number in range(MANY)})
    clock.now += 2_000
    reset_statistics(server)
    slices: list[int] = []
    while moved := await backend.schedule():
        slices.append(len(moved))
    assert slices == [MOVES] * (MANY // MOVES)
    assert script_calls(server) == len(slices) + 1, "a call for each slice, and one that finds nothing"


@pytest.mark.usefixtures("emptied")
async def test_leases_of_20_000_timelines_are_recovered_in_slices_that_block_nobody(
    backend: RedisBackend, server: Server, namespace: str, clock: Clock
) -> None:
    await backend.claim(0, 0, LEASE, LIMITS)
    with server.client() as client:
        client.zadd(f"{{{namespace}}}:leased", {f"k{number}": NOW + number % 1_000 for number in range(MANY)})
    clock.now += 1_000
    reset_statistics(server)
    slices: list[int] = []
    while moved := await backend.maintenance():
        slices.append(len(moved))
    assert slices == [MOVES] * (MANY // MOVES)
    assert script_calls(server) == len(slices) + 1


@pytest.mark.usefixtures("emptied")
async def test_a_claim_moves_a_slice_and_opens_a_hundred_digests_at_the_most(
    backend: RedisBackend, server: Server, clock: Clock
) -> None:
    await backend.add(0, [record(f"k{number}", policy=Policy(initial_delay=1)) for number in range(3_000)])
    clock.now += 2_000
    claims = await backend.claim(0, 3_000, LEASE, LIMITS)
    assert (len(claims.leases), claims.wait_ms) == (100, 0)
    assert await backend.operations.counts() == {
        "waiting": 3_000 - MOVES, "ready": MOVES - 100, "leased": 100, "dead": 0, "oldest_due_ms": NOW + 1_000,
        "overdue_ms": 1_000,
    }  # fmt: skip


@pytest.mark.usefixtures("emptied")
async def test_1000_records_are_set_aside_one_by_one_in_one_close(backend: RedisBackend) -> None:
    await backend.add(0, [record("k", f"{number}") for number in range(1_000)])
    [lease] = (await backend.claim(0, 1, LEASE, LIMITS)).leases
    letters = [NewDeadLetter("unreadable", [b"%d" % number]) for number in range(1_000)]
    closed = await backend.close(0, [Close(lease, lease.size, 0, 0, LIMITS, LEASE, dead_letters=letters)])
    assert closed == [Closed("closed")]
    assert (await backend.operations.counts())["dead"] == 1_000


@asynccontextmanager
async def delivered(
    server: Server, namespace: str, policy: Policy, records: int
) -> AsyncGenerator[tuple[DigestEngine[int], list[Digest[int]]]]:
    """An engine on a real server, and the digests that it delivers; waits at the end for so many records."""
    engine = DigestEngine(server.url, namespace=namespace, value_type=int, policy=policy, timeout=PATIENCE)
    digests: list[Digest[int]] = []
    complete = asyncio.Event()

    async def deliver(digest: Digest[int]) -> None:
        digests.append(digest)
        if sum(len(each.records) for each in digests) >= records:
            complete.set()

    async with engine.delivering(deliver):
        yield engine, digests
        async with asyncio.timeout(PATIENCE):
            await complete.wait()


@pytest.mark.usefixtures("emptied")
async def test_8200_records_come_in_one_digest(server: Server, namespace: str) -> None:
    count = 8_200
    policy = Policy(initial_delay=600, maximum_delay=600, minimum_delay=0, increment_delay=0, capacity=10_000)
    async with delivered(server, namespace, policy, count) as (engine, digests):
        await engine.add_many(Entry("key", number, str(number)) for number in range(count))
        await engine.flush("key")
    [digest] = digests
    assert [each.value for each in digest.records] == list(range(count))
    assert digest.dropped == 0


@pytest.mark.usefixtures("emptied")
async def test_4100_timelines_that_are_due_at_once_are_each_delivered_once(server: Server, namespace: str) -> None:
    count = 4_100
    async with DigestEngine(server.url, namespace=namespace, value_type=int, policy=NO_GAP, timeout=PATIENCE) as engine:
        await engine.add_many(Entry(f"k{number}", number, "a") for number in range(count))
        assert (await engine.stats()).ready == count
    async with delivered(server, namespace, NO_GAP, count) as (engine, digests):
        pass
    assert Counter(digest.key for digest in digests) == Counter(f"k{number}" for number in range(count))
    async with engine:
        stats = await engine.stats()
    assert (stats.ready, stats.leased, stats.digests) == (0, 0, count)


# 6: what a server evicts


async def test_a_timeline_whose_records_are_gone_is_counted_and_cleaned_and_makes_no_digest(
    backend: RedisBackend, server: Server, namespace: str
) -> None:
    await backend.add(0, [record("k"), record("k", "b")])
    with server.client() as client:
        client.delete(f"{{{namespace}}}:log:k")
        claims = await backend.claim(0, 10, LEASE, LIMITS)
        assert (claims.leases, claims.expired) == ([], [("k", 0)])
        assert redis_state(client, namespace)["timelines"] == {}
    assert await backend.operations.look("k") is None
    assert await backend.add(0, [record("k")]) == [True]


async def test_a_digest_whose_records_are_gone_is_reported_and_cleaned_and_not_delivered_empty(
    backend: RedisBackend, server: Server, namespace: str
) -> None:
    await backend.add(0, [record("k")])
    [lease] = (await backend.claim(0, 1, LEASE, LIMITS)).leases
    await backend.retry(0, [Retry(lease, 0, "boo", LIMITS)])
    with server.client() as client:
        client.delete(f"{{{namespace}}}:open:k")
        claims = await backend.claim(0, 10, LEASE, LIMITS)
        assert (claims.leases, claims.expired) == ([], [("k", 0)])
        assert redis_state(client, namespace)["timelines"] == {}


async def test_every_key_of_a_timeline_lives_as_long_as_its_records_may(
    backend: RedisBackend, server: Server, namespace: str, clock: Clock
) -> None:
    policy = Policy(ttl=7_200, minimum_delay=0)
    limits = policy.terms.limits

    def shortest() -> int:
        with server.client() as client:
            return min(client.pttl(key) for key in client.scan_iter(match=f"{{{namespace}}}:*:k"))

    await backend.add(0, [record("k", policy=policy)])
    assert shortest() > limits.ttl_ms
    [lease] = (await backend.claim(0, 1, LEASE, limits)).leases
    await backend.add(0, [record("k", "b", policy=policy)])
    assert shortest() > limits.ttl_ms
    await backend.retry(0, [Retry(lease, 0, "boo", limits)])
    [lease] = (await backend.claim(0, 1, LEASE, limits)).leases  # merged, and so written anew
    assert (lease.size, shortest() > limits.ttl_ms) == (2, True)


# 8: what cannot be read


async def test_each_record_that_is_set_aside_has_a_letter_with_its_own_reason(store: Store) -> None:
    await store.add("k", "good", "bad", "worse")
    lease = await store.claim()
    letters = [NewDeadLetter("bad", [b"bad"]), NewDeadLetter("worse", [b"worse"])]
    assert await store.backend.close(0, [Close(lease, 3, 1, 0, LIMITS, LEASE, dead_letters=letters)]) == [
        Closed("closed")
    ]
    kept = [
        await store.backend.operations.dead_letter(name)
        for name in (await store.backend.operations.dead_letters(0, 10)).items
    ]
    assert [(letter.reason, records(letter.entries)) for letter in kept if letter] == [
        ("bad", [("bad", "v")]),
        ("worse", [("worse", "v")]),
    ]
    assert await store.state("k") is None


# Dead letters have an end


async def bury(store: Store, *record_ids: str) -> None:
    """Make a dead letter of each record."""
    await store.add("k", *record_ids, policy=NO_GAP)
    [lease] = (await store.claims(1)).leases
    letters = [NewDeadLetter("no", [record_id.encode()]) for record_id in record_ids]
    await store.backend.close(0, [Close(lease, lease.size, 0, 0, LIMITS, LEASE, dead_letters=letters)])


async def letters(store: Store) -> list[str]:
    """The record ids of all dead letters, the oldest first."""
    found: list[str] = []
    for name in (await store.backend.operations.dead_letters(0, 10)).items:
        letter = await store.backend.operations.dead_letter(name)
        assert letter is not None
        found += [record_id for record_id, _ in records(letter.entries)]
    return found


@pytest.mark.parametrize("memory_or_place", ["reference", "redis"], indirect=True)
@pytest.mark.usefixtures("emptied")
async def test_dead_letters_over_10_000_make_the_oldest_go_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(store.backend, RedisBackend):
        limit = 10_000
    else:
        limit = 20  # the reference takes long over many letters, and its limit is a number in Python
        monkeypatch.setattr("aiodigest.backends.memory.timelines.DEAD_LETTER_LIMIT", limit)
    for first in range(0, limit, 1_000):
        store.now += 1
        await bury(store, *(f"{number}" for number in range(first, min(first + 1_000, limit))))
    assert (await store.backend.operations.counts())["dead"] == limit
    [oldest] = (await store.backend.operations.dead_letters(0, 1)).items
    assert not (await store.backend.operations.counts()).get("letters_dropped")
    store.now += 1
    await bury(store, "one too many")
    counts = await store.backend.operations.counts()
    assert (counts["dead"], counts["letters_dropped"]) == (limit, 1)
    assert await store.backend.operations.dead_letter(oldest) is None


async def test_dead_letters_of_30_days_make_room_at_the_next_burial_counted(store: Store) -> None:
    await bury(store, "first")
    store.now += 1
    await bury(store, "second")
    store.now = NOW + 30 * DAY - 1
    await bury(store, "third")
    assert await letters(store) == ["first", "second", "third"]
    store.now += 1
    await bury(store, "fourth")
    assert await letters(store) == ["second", "third", "fourth"]
    counts = await store.backend.operations.counts()
    assert (counts["dead"], counts["letters_dropped"]) == (3, 1)


async def test_the_keys_of_a_dead_letter_end_after_30_days(
    backend: RedisBackend, server: Server, namespace: str
) -> None:
    await backend.add(0, [record("k")])
    [lease] = (await backend.claim(0, 1, LEASE, LIMITS)).leases
    await backend.close(0, [Close(lease, 1, 0, 0, LIMITS, LEASE, dead_letters=[NewDeadLetter("no")])])
    with server.client() as client:
        [name] = (await backend.operations.dead_letters(0, 10)).items
        for kind in ("letter", "remains"):
            assert 30 * DAY - 60_000 < client.pttl(f"{{{namespace}}}:{kind}:{name}") <= 30 * DAY


# 13: one slot


async def test_all_keys_of_a_shard_are_in_one_slot_whatever_the_keys_of_its_timelines(
    server: Server, namespace: str
) -> None:
    keys = [f"{name}{number}" for name in ("{T}", "}", "T:{", "{}", "k") for number in range(10)]
    backend = RedisBackend(server.url, namespace=namespace, shards=3)
    await backend.connect()
    for key in keys:
        await backend.add(backend.shard_map.shard_of(key), [record(key)])
    for shard in range(3):
        await backend.add(shard, [record("{no", "x")])
        leases = (await backend.claim(shard, 100, LEASE, LIMITS)).leases
        await backend.add(shard, [record(lease.key, "b") for lease in leases[::2]])
        ends = [Close(lease, 1, 0, 0, LIMITS, LEASE, dead_letters=[NewDeadLetter("no")]) for lease in leases[:5]]
        await backend.close(shard, ends)
    await backend.aclose()
    with server.client() as client:
        found = [key for key in client.scan_iter(match=f"{{{namespace}*", count=1000) if not key.endswith(b"}:layout")]
    assert {key_slot(key) * 3 // 16_384 for key in found} == {0, 1, 2}
    assert len({key_slot(key) for key in found}) <= 3 + 1  # the namespace's own layout has one too


# 17: after a reconnect


async def test_a_worker_whose_connections_were_cut_hears_the_doorbell_again(server: Server, namespace: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def deliver(digest: Digest[int]) -> None:
        heard.put_nowait(digest.key)

    lease = 30 * PATIENCE  # a sleeping worker looks by itself when a third of it has passed
    worker = DigestEngine(server.url, namespace=namespace, value_type=int, policy=NO_GAP, lease_timeout=lease)
    async with worker.delivering(deliver):
        for key in ("before", "after", "long after"):
            async with DigestEngine(server.url, namespace=namespace, value_type=int) as producer:
                await producer.add(key, 1)
            async with asyncio.timeout(PATIENCE):
                assert await heard.get() == key
            with server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)


# Waits have jitter, so that what a test sees of one outage may be luck.


@virtual_time
async def test_after_every_one_of_many_outages_the_worker_is_back_within_a_second() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend, policy=NO_GAP):
        for number in range(1, 21):
            backend.take_down()
            await asyncio.sleep(60)
            await backend.put("key", number, policy=NO_GAP)
            backend.bring_up()
            back = now()
            await inbox.digest(number)
            assert now() < back + 1.1
            await settle()


@virtual_time
async def test_after_every_one_of_many_outages_a_worker_renews_before_it_claims() -> None:
    inbox, backend = Inbox(forever), WatchedBackend()
    await backend.put("key", 1)
    async with delivering(inbox, backend, drain_timeout=0, delivery_timeout=10_000):
        for _ in range(20):
            await asyncio.sleep(21)
            backend.take_down()
            await asyncio.sleep(35)
            backend.bring_up()
            before = len(backend.calls)
            await asyncio.sleep(5)
            assert next(call for call, *_ in backend.calls[before:] if call in ("renew", "claim")) == "renew"
    assert len(inbox.digests) == 1


async def test_a_server_that_lost_its_scripts_is_sent_them_again(server: Server, namespace: str) -> None:
    async with DigestEngine(server.url, namespace=namespace) as engine:
        assert await engine.add("key", 1)
        with server.client() as client:
            client.script_flush()
        assert not await engine.add("key", 2)
        assert await engine.flush("key")


# 29: races


@virtual_time
async def test_two_workers_that_reach_for_one_timeline_deliver_it_once_and_log_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "aiodigest")
    inboxes, backend = (Inbox(), Inbox()), WatchedBackend()
    async with delivering(inboxes[0], backend), delivering(inboxes[1], backend):
        await settle()
        claims = backend.count("claim")
        await backend.put("key", 1)
        await settle()
        assert backend.count("claim") >= claims + 2, "the doorbell wakes both"
    assert sorted(len(inbox.digests) for inbox in inboxes) == [0, 1]
    assert not caplog.records


# 11: bad input


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [
        (Entry("", 1), "1 to 1024 bytes"),
        (Entry("k" * 1025, 1), "1 to 1024 bytes"),
        (Entry("😀" * 257, 1), "1 to 1024 bytes"),
        (Entry("key", 1, ""), "1 to 1024 bytes"),
        (Entry("key", 1, "x" * 1025), "1 to 1024 bytes"),
        (Entry("key", 1, "id", nan), "aware datetime or finite epoch seconds"),
        (Entry("key", 1, "id", inf), "aware datetime or finite epoch seconds"),
        (Entry("key", 1, "id", -inf), "aware datetime or finite epoch seconds"),
        (Entry("key", 1, "id", 1e15), "years 1 to 9999"),
        (Entry[Any]("key", "1"), "integer"),
        (Entry[Any]("key", None), "integer"),
    ],
)
async def test_a_record_that_is_not_allowed_is_refused_with_what_is_and_nothing_is_stored(
    server: Server, namespace: str, entry: Entry[Any], allowed: str
) -> None:
    async with DigestEngine(server.url, namespace=namespace, value_type=int) as engine:
        with server.client() as client:
            before = set(client.scan_iter(match=f"*{namespace}*"))
            with pytest.raises(AiodigestError, match=allowed):
                await engine.add(entry.key, entry.value, record_id=entry.record_id, timestamp=entry.timestamp)
            with pytest.raises(PartialAdd, match=allowed):
                await engine.add_many([entry])
            assert set(client.scan_iter(match=f"*{namespace}*")) == before


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"initial_delay": nan}, "initial_delay"),
        ({"increment_delay": inf}, "increment_delay"),
        ({"minimum_delay": -1}, "minimum_delay"),
        ({"maximum_delay": "5m"}, "maximum_delay"),
        ({"capacity": -1}, "capacity must be a whole number from 1 to 10,000"),
        ({"capacity": 10_001}, "capacity must be a whole number from 1 to 10,000"),
        ({"max_size": 0}, "max_size must be a whole number from 1"),
        ({"minimum_delay": 60, "maximum_delay": 30}, "must not be above maximum_delay"),
        ({"initial_delay": 60, "minimum_delay": 0, "maximum_delay": 30}, "must not be above maximum_delay"),
        ({"ttl": 1_800}, "ttl must be longer than maximum_delay"),
    ],
)
def test_a_policy_that_is_not_allowed_is_refused_with_what_is(options: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidArgument, match=allowed):
        Policy(**options)


@pytest.mark.parametrize(
    ("source", "options", "allowed"),
    [
        (None, {}, "is a variable unset"),
        ("localhost:6379", {}, "allowed is redis://host:port/db"),
        ("redis://localhost:port", {}, "allowed is redis://host:port/db"),
        ("redis://localhost", {"shards": 0}, "from 1 to 1024"),
        ("redis://localhost", {"shards": 1_025}, "from 1 to 1024"),
        ("redis://localhost", {"namespace": "a:b"}, "1 to 64 letters"),
        ("redis://localhost", {"policy": Policy(ttl=3_600, maximum_delay=1_800)}, "ttl must be longer than the whole"),
        ("redis://localhost", {"lease_timeout": nan}, "lease_timeout"),
        ("redis://localhost", {"concurrency": 0}, "concurrency must be a whole number from 1 to 1,000,000"),
    ],
)
def test_an_engine_that_could_not_work_is_refused_when_it_is_made_with_what_is_allowed(
    source: Any, options: dict[str, Any], allowed: str
) -> None:
    settings: dict[str, Any] = {"namespace": "mail", **options}
    with pytest.raises((ConfigurationError, InvalidArgument), match=allowed):
        DigestEngine(source, **settings)


async def test_a_server_that_is_too_old_is_refused_with_its_version_and_the_oldest_that_works(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = ServerConnections(read_url(server.url), 5.0)
    try:
        await link.check_version("")
        assert OLDEST == (6, 2)
        monkeypatch.setattr("aiodigest.backends.redis.connections.server.OLDEST", (99, 0))
        with pytest.raises(ConfigurationError, match=r"is version \d+\.\d+; 6.2 is the oldest"):
            await link.check_version("")
    finally:
        await link.close()


async def test_a_wrong_number_of_shards_is_refused_by_entering_and_nothing_is_stored(
    server: Server, namespace: str
) -> None:
    async with DigestEngine(server.url, namespace=namespace, shards=2) as engine:
        await engine.add("key", 1)
    with server.client() as client:
        before = set(client.scan_iter(match=f"*{namespace}*"))
        with pytest.raises(ConfigurationError, match="has 2 shards, not 3: take shards= out of the engine, or give 2"):
            async with DigestEngine(server.url, namespace=namespace, shards=3) as engine:
                await engine.add("key", 1)
        assert set(client.scan_iter(match=f"*{namespace}*")) == before
