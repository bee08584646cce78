"""Faults of published digest engines that only whole engines can have (the table in faults.md has them all)."""

from __future__ import annotations

import asyncio
import logging

import pytest
from engines import Inbox, WatchedBackend, delivering, forever, now, settle, virtual_time
from servers import Server
from stores import LEASE, ids

from aiodigest import ConfigurationError, Digest, DigestEngine, Policy
from aiodigest.backends.redis.connections.calls import OLDEST, Connections
from aiodigest.backends.redis.connections.url import read_url

LIMITS = Policy().terms.limits
NO_GAP = Policy(minimum_delay=0, increment_delay=0)
PATIENCE = 300.0  # seconds; far more than anything here takes


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


async def test_a_server_that_is_too_old_is_refused_with_its_version_and_the_oldest_that_works(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Connections(read_url(server.url), 5.0)
    try:
        await link.check_version("")
        assert OLDEST == (6, 2)
        monkeypatch.setattr("aiodigest.backends.redis.connections.calls.OLDEST", (99, 0))
        with pytest.raises(ConfigurationError, match=r"is version \d+\.\d+; 6.2 is the oldest"):
            await link.check_version("")
    finally:
        await link.close()


@virtual_time
async def test_a_digest_whose_callback_was_cut_short_comes_again_as_it_was() -> None:
    inbox, backend = Inbox(forever), WatchedBackend()
    await backend.put("key", 1)
    async with delivering(inbox, backend, drain_timeout=0):
        first = await inbox.digest()
        await backend.put("key", 2)
    lease = await backend.open(0, "key", LEASE, LIMITS)
    assert lease is not None
    assert (lease.digest_id, lease.attempt, ids(lease)) == (first.id, 1, ["1"])
