"""Faults of published digest engines that only whole engines can have (the table in faults.md has them all)."""

from __future__ import annotations

import asyncio
import logging

import pytest
from engines import Inbox, WatchedBackend, delivering, now, settle, virtual_time
from processes import DEADLINE, running
from servers import Server
from traffic import NO_GAP
from traffic import Inbox as Box

from aiodigest import JSON, ConfigurationError, DigestEngine, Entry
from aiodigest.backends.redis.connections.calls import OLDEST, Connections
from aiodigest.backends.redis.connections.url import read_url


async def test_a_worker_whose_connections_were_cut_hears_the_doorbell_again(server: Server, namespace: str) -> None:
    inbox = Box()
    lease = 9_000.0  # a sleeping worker looks by itself when a third of it has passed
    worker = DigestEngine(server.url, namespace=namespace, value_type=int, policy=NO_GAP, lease_timeout=lease)
    async with worker.delivering(inbox):
        for number, key in enumerate(("before", "after", "long after"), 1):
            async with DigestEngine(server.url, namespace=namespace, value_type=int) as producer:
                await producer.add(key, 1)
            await inbox.digest(number)
            with server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
    assert [digest.key for digest in inbox.came] == ["before", "after", "long after"]


@virtual_time
async def test_after_every_one_of_many_outages_the_worker_is_back_within_a_second() -> None:
    inbox, backend = Inbox(), WatchedBackend()
    async with delivering(inbox, backend, policy=NO_GAP):
        for number in range(1, 21):  # waits have jitter, so that what is seen of one outage may be luck
            backend.take_down()
            await asyncio.sleep(60)
            await backend.put("key", number, policy=NO_GAP)
            backend.bring_up()
            back = now()
            await inbox.digest(number)
            assert now() < back + 1.1
            await settle()


@virtual_time
async def test_two_workers_that_reach_for_one_timeline_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_a_server_that_is_too_old_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Connections(read_url(server.url), 5.0)
    try:
        await link.check_version("")
        assert OLDEST == (6, 2)
        monkeypatch.setattr("aiodigest.backends.redis.connections.calls.OLDEST", (99, 0))
        with pytest.raises(ConfigurationError, match=r"is version \d+\.\d+; 6.2 is the oldest"):
            await link.check_version("")
    finally:
        await link.close()


@pytest.mark.processes
async def test_a_record_that_kills_its_worker_takes_no_other_along(server: Server, namespace: str) -> None:
    async with DigestEngine[JSON](server.url, namespace=namespace) as mail, asyncio.timeout(DEADLINE):
        await mail.add_many([Entry("poison", 1), *(Entry(f"harmless-{number}", 1) for number in range(10))])

        async def holds() -> int:
            stats = await mail.stats()
            return stats.waiting + stats.ready + stats.leased

        while await holds():
            async with running("poisoned.py", server.url, namespace, "poison") as worker:
                while worker.process.returncode is None and await holds():  # noqa: ASYNC110  (no event tells it)
                    await asyncio.sleep(0.05)
        letters = [letter async for letter in mail.dead_letters()]
        assert (await mail.stats()).delivered == 10
    assert [(letter.key, letter.attempt) for letter in letters] == [("poison", 3)]
