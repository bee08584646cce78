"""More than there is room for: producers faster than the server, and large backlogs."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from engines import session_of
from replicas import freeze, thaw
from servers import Server

from aiodigest import JSON, DigestEngine, Policy
from aiodigest.backend import SLICE, Add
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.records.entries import pack
from aiodigest.worker.batcher import QUEUE_ITEMS

INLINE = 262_144  # bytes of entries in one answer
LARGE = 8_192


@pytest.mark.server_faults
async def test_adds_to_a_server_that_stands_still_wait_for_room_and_are_stored_when_it_goes_on(own: Server) -> None:
    async with DigestEngine[JSON](own.url, namespace="still", timeout=60) as engine:
        await engine.add("0", -1)
        [batcher] = session_of(engine)._adder._batchers.values()
        freeze(own)
        try:
            adds = [asyncio.create_task(engine.add(str(number % 25), number)) for number in range(20_000)]
            before = -1
            while before != batcher._items or batcher._room.is_set():  # until every add is queued, or waits for room
                assert len(batcher.unanswered) < len(adds), "there is room for all that was added"
                before = batcher._items
                await asyncio.sleep(0.01)
            assert before <= QUEUE_ITEMS
            assert not any(add.done() for add in adds)
        finally:
            thaw(own)
        await asyncio.gather(*adds)
    assert sum(own.ask("LLEN", f"{{still}}:log:{key}") for key in range(25)) == 20_001


@pytest.mark.parametrize(
    ("timelines", "records", "size"), [(8, 100, LARGE), (4, 300, 1)], ids=["a quarter of a MiB", "a thousand entries"]
)
async def test_a_claim_answers_a_slice(server: Server, namespace: str, timelines: int, records: int, size: int) -> None:
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
