"""More than there is room for: producers faster than the server, and large backlogs."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from engines import policy, session_of
from processes import running
from replicas import freeze, thaw
from servers import Server

from aiodigest import JSON, DigestEngine, Entry, Policy
from aiodigest.backend import SLICE, Add
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.records.entries import pack
from aiodigest.worker.batcher import QUEUE_ITEMS
from aiodigest.worker.room import FULL, SMALL

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
    ("timelines", "records", "size"),
    [(8, 100, LARGE), (4, 300, 1), (2, 40, 100_000)],
    ids=["a quarter of a MiB", "a thousand entries", "large values"],
)
async def test_a_claim_answers_a_slice(server: Server, namespace: str, timelines: int, records: int, size: int) -> None:
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    terms, random = Policy().terms, Random(1)
    try:
        for key in range(timelines):
            entries = [
                pack(b"%d" % number, number, random.randbytes(size if number else 1)) for number in range(records)
            ]
            await backend.add(0, [Add(str(key), entry, terms) for entry in entries])
        claims = await backend.claim(0, 64, 60_000, terms.limits)
        inlined = [entry for lease in claims.leases for entry in lease.entries]
        assert len(claims.leases) == timelines
        assert sum(map(len, inlined)) <= INLINE
        assert len(inlined) == SLICE or size >= LARGE
        for lease in claims.leases:
            entries = [*lease.entries]
            while page := await backend.read(0, lease, len(entries), lease.size - len(entries)):
                assert page[0]
                assert sum(map(len, page[:-1])) <= INLINE, "it waits for room with that"
                entries += page
            assert len(entries) == lease.size == records
    finally:
        await backend.aclose()


@pytest.mark.processes
async def test_a_process_holds_no_more_than_its_room_of_what_a_server_has(server: Server, namespace: str) -> None:
    timelines, records, most = 48, 100, FULL * 524_288
    async with DigestEngine[JSON](server.url, namespace=namespace, policy=policy()) as engine:
        for key in range(timelines):
            await engine.add_many(Entry(str(key), "x" * 8_190, str(number)) for number in range(records))
    async with running("roomy.py", server.url, namespace, timelines, timelines * records) as program:
        seen = json.loads(await program.line())
    assert seen["waiting"] > 0
    assert most - 524_288 < seen["counted"] <= most
    assert seen["held"] <= most + 64 * SMALL
    assert seen["left"] == 0
