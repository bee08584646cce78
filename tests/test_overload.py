"""More than there is room for: producers faster than the server, large backlogs, one timeline that takes every add."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from engines import policy, session_of
from replicas import freeze, thaw
from servers import Server, running_server

from aiodigest import JSON, BackendUnavailable, Digest, DigestEngine, Entry, Policy
from aiodigest.backend import SLICE, Add
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.records.entries import pack
from aiodigest.worker.batcher import QUEUE_BYTES, QUEUE_ITEMS

INLINE = 262_144  # bytes of entries in one answer
LARGE = 8_192


async def filled(engine: DigestEngine[JSON], adds: list[asyncio.Task[bool]]) -> tuple[int, int]:
    """Entries and bytes that wait to be sent, once every add does or waits for room."""
    [batcher] = session_of(engine)._adder._batchers.values()
    before = -1
    while before != batcher._items or batcher._room.is_set():
        assert len(batcher._unanswered()) < len(adds), "there is room for all that was added"
        before = batcher._items
        await asyncio.sleep(0.01)
    assert not any(add.done() for add in adds)
    return batcher._items, batcher._bytes


@pytest.mark.server_faults
async def test_adds_to_a_server_that_stands_still_wait_for_room_and_are_stored_when_it_goes_on() -> None:
    with running_server() as server:
        async with DigestEngine[JSON](server.url, namespace="still", timeout=60) as engine:
            await engine.add("0", -1)
            freeze(server)
            try:
                adds = [asyncio.create_task(engine.add(str(number % 25), number)) for number in range(20_000)]
                entries, _ = await filled(engine, adds)
            finally:
                thaw(server)
            assert entries <= QUEUE_ITEMS
            await asyncio.gather(*adds)
        with server.client() as client:
            assert sum(client.llen(f"{{still}}:log:{key}") for key in range(25)) == 20_001


@pytest.mark.server_faults
async def test_large_adds_to_a_server_that_stands_still_take_16_mib_and_what_had_no_room_was_not_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    time = loop.time
    with running_server() as server:
        async with DigestEngine[str](server.url, namespace="still", value_type=str, timeout=600) as engine:
            await engine.add("k", "first")
            freeze(server)
            value = Random(1).randbytes(LARGE // 2).hex()
            adds = [asyncio.create_task(engine.add("k", value)) for _ in range(4_000)]
            try:
                _, taken = await filled(engine, adds)  # pyright: ignore[reportArgumentType]
                monkeypatch.setattr(loop, "time", lambda: time() + 600)
                results = await asyncio.gather(*adds, return_exceptions=True)
            finally:
                thaw(server)
                await asyncio.gather(*adds, return_exceptions=True)
            assert QUEUE_BYTES // 2 < taken < QUEUE_BYTES + 2 * LARGE
            assert {type(result) for result in results} == {BackendUnavailable}
            unknown = sum(isinstance(result, BackendUnavailable) and result.stored == "unknown" for result in results)
            assert unknown <= 256, "one call was sent, and all that waited was not"


@pytest.mark.parametrize(
    ("timelines", "records", "size"), [(8, 100, LARGE), (4, 300, 1)], ids=["a quarter of a MiB", "a thousand entries"]
)
async def test_one_claim_answers_a_bounded_slice_of_a_large_backlog_and_the_rest_is_paged(
    server: Server, namespace: str, timelines: int, records: int, size: int
) -> None:
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    terms, random = Policy().terms, Random(1)
    try:
        for key in range(timelines):
            entries = [pack(b"%d" % number, number, random.randbytes(size)) for number in range(records)]
            await backend.add(0, [Add(str(key), entry, terms) for entry in entries])
        claims = await backend.claim(0, 64, 60_000, terms.limits)
        inlined = [entry for lease in claims.leases for entry in lease.entries]
        assert len(claims.leases) == timelines
        assert sum(map(len, inlined)) <= INLINE
        assert len(inlined) == SLICE or size == LARGE
        for lease in claims.leases:
            entries = [*lease.entries]
            while page := await backend.read(0, lease, len(entries), lease.size - len(entries)):
                assert page[0]
                entries += page
            assert len(entries) == lease.size == records
    finally:
        await backend.aclose()


async def test_a_large_backlog_is_delivered_once_each_by_a_few_slots(server: Server, namespace: str) -> None:
    engine = DigestEngine[str](server.url, namespace=namespace, value_type=str, concurrency=2, timeout=30)
    random, came, under_way, most = Random(1), Counter[str](), 0, 0
    done = asyncio.Event()

    async def deliver(digest: Digest[str]) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        came.update(f"{digest.key}/{record.id}" for record in digest.records)
        under_way -= 1
        if len(came) == 16 * 100:
            done.set()

    async with engine:
        await engine.add_many(
            Entry(str(key), random.randbytes(LARGE // 2).hex(), str(number))
            for key in range(16)
            for number in range(100)
        )
    async with engine.delivering(deliver), asyncio.timeout(60):
        await done.wait()
    assert set(came.values()) == {1}
    assert most <= 2


async def test_one_timeline_that_takes_every_add_is_delivered_or_counted_as_dropped_in_order(
    server: Server, namespace: str
) -> None:
    terms = policy(capacity=100)
    engine = DigestEngine[int](server.url, namespace=namespace, value_type=int, policy=terms, timeout=60)
    digests: list[Digest[int]] = []
    told = 0
    all_told = asyncio.Event()

    async def deliver(digest: Digest[int]) -> None:
        nonlocal told
        digests.append(digest)
        told += len(digest.records) + digest.dropped
        if told >= 20_000:
            all_told.set()

    async def produce(first: int) -> None:
        for start in range(first, 20_000, 1_000):
            await engine.add_many(
                Entry("k", number, str(number), 1_700_000_000 + number) for number in range(start, start + 250)
            )

    async with engine.delivering(deliver):
        await asyncio.gather(*(produce(first) for first in range(0, 1_000, 250)))
        async with asyncio.timeout(60):
            await all_told.wait()
    came = [record.value for digest in digests for record in digest.records]
    assert len(came) == len(set(came))
    assert len(came) + sum(digest.dropped for digest in digests) == 20_000
    assert len(digests) > 1
    for digest in digests:
        numbers = [record.value for record in digest.records]
        assert len(numbers) <= 100
        assert numbers == sorted(numbers)
