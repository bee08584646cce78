"""Real replicas: adds that wait for them, and a primary that becomes one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from engines import patiently, session_of
from replicas import Relay, follow, follows, freeze, port_of, replicated, role_of, thaw, until
from servers import Server
from stores import LEASE, Store
from traffic import NO_GAP, Inbox

from aiodigest import JSON, BackendUnavailable, DigestEngine, Entry, PartialAdd
from aiodigest.backend import Backend
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.server import CONNECTIONS, WAITERS

pytestmark = pytest.mark.cluster

TIMEOUT = 60.0  # of calls, most of whose waits are ended before


@asynccontextmanager
async def engine_to(server: Server, namespace: str, **options: Any) -> AsyncGenerator[DigestEngine[JSON]]:
    url = f"redis://127.0.0.1:{port_of(server)}/0"
    settings: dict[str, Any] = {"namespace": namespace, "policy": NO_GAP, "timeout": TIMEOUT, **options}
    async with DigestEngine[JSON](url, **settings) as engine:
        yield engine


def lengths_of(server: Server, namespace: str, *keys: str) -> list[int]:
    return [server.ask("LLEN", f"{{{namespace}}}:log:{key}") for key in keys]


def waiting(server: Server) -> int:
    """How many clients of a server wait for something."""
    return server.ask("INFO", "clients")["blocked_clients"]


async def cut_short(server: Server, call: Coroutine[Any, Any, object]) -> object:
    """What a call answers whose waits for replicas end as by its timeout: with how many there are then."""
    calling = asyncio.create_task(call)

    def is_done() -> bool:
        for each in client.client_list():
            if "b" in each["flags"]:
                client.client_unblock(each["id"])
        return calling.done()

    with server.client() as client:
        await until(is_done)
    return await calling


async def test_an_add_returns_once_so_many_replicas_have_it(namespace: str) -> None:
    async with replicated() as (primary, replica), engine_to(primary, namespace, wait_replicas=1) as engine:
        for number in range(20):
            await engine.add(f"k{number}", 1)
            assert lengths_of(replica, namespace, f"k{number}") == [1]
        await engine.add_many(Entry(f"m{number}", 1) for number in range(600))  # in several calls
        assert lengths_of(replica, namespace, *(f"m{number}" for number in range(600))) == [1] * 600


async def test_an_add_that_too_few_replicas_have_in_time_may_be_stored_and_says_so(namespace: str) -> None:
    async with replicated() as (primary, replica), engine_to(primary, namespace, wait_replicas=1) as engine:
        await engine.add("before", 1)
        freeze(replica)
        with pytest.raises(BackendUnavailable, match=r"0 replicas .* have it, not 1") as caught:
            await cut_short(primary, engine.add("key", 1, record_id="mine"))
        assert (caught.value.stored, caught.value.record_id) == ("unknown", "mine")
        assert lengths_of(primary, namespace, "key") == [1]
        thaw(replica)
        await until(lambda: lengths_of(replica, namespace, "key") == [1])


async def test_adds_wait_for_replicas_no_longer_than_the_timeout(namespace: str) -> None:
    async with replicated() as (primary, replica), greedy(primary, namespace, timeout=1) as engine:
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many([Entry("one", 1, record_id="a"), Entry("two", 2, record_id="b")])
        told = [error for error in caught.value.results if isinstance(error, BackendUnavailable)]
        assert [(error.stored, error.record_id) for error in told] == [("unknown", "a"), ("unknown", "b")]
        await until(lambda: lengths_of(replica, namespace, "one", "two") == [1, 1])


@asynccontextmanager
async def greedy(server: Server, namespace: str, timeout: float = TIMEOUT) -> AsyncGenerator[DigestEngine[JSON]]:
    """An engine that waits for more replicas than there are, of a namespace that is there already.

    Who begins one waits for replicas before the add, and then knows that nothing is stored.
    """
    async with engine_to(server, namespace) as first:
        await first.add("first", 0)
    async with engine_to(server, namespace, wait_replicas=2, timeout=timeout) as engine:
        yield engine


async def test_an_add_that_the_server_refuses_is_not_stored_whatever_it_waits_for(namespace: str) -> None:
    async with replicated() as (primary, _), greedy(primary, namespace) as engine:
        with pytest.raises(BackendUnavailable, match="replicas"):
            await cut_short(primary, engine.add("key", 1))
        primary.ask("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(BackendUnavailable, match="maxmemory") as caught:
            await engine.add("key", 1)
        assert caught.value.stored == "no"


async def test_an_add_whose_primary_is_demoted_while_it_waits_for_replicas_may_be_stored(namespace: str) -> None:
    async with replicated() as (primary, replica), greedy(primary, namespace) as engine:
        adding = asyncio.create_task(engine.add("key", 1))
        await until(lambda: waiting(primary) == 1)
        follow(replica, None)
        follow(primary, replica)
        with pytest.raises(BackendUnavailable, match="UNBLOCKED") as caught:
            await adding
        assert caught.value.stored == "unknown"


async def test_adds_that_wait_for_a_replica_that_hangs_leave_connections_to_other_calls(namespace: str) -> None:
    async with (
        replicated() as (primary, replica),
        engine_to(primary, namespace, wait_replicas=1, timeout=300) as engine,
    ):
        await engine.add("key", 1)
        freeze(replica)
        adding = [asyncio.create_task(engine.add_many([Entry("key", 2)])) for _ in range(3 * CONNECTIONS)]
        await until(lambda: waiting(primary) >= WAITERS)
        async with asyncio.timeout(100):  # the adds would wait for 270 seconds
            assert await engine.peek("key") is not None
        assert waiting(primary) == WAITERS
        thaw(replica)
        await asyncio.gather(*adding, return_exceptions=True)


async def test_a_server_that_became_a_replica_is_left_for_the_new_primary_after_one_refusal(namespace: str) -> None:
    inbox = Inbox()
    async with replicated() as (old, new), Relay(port_of(old)) as relay:
        options: dict[str, Any] = {"namespace": namespace, "policy": NO_GAP, "timeout": TIMEOUT, "lease_timeout": 600}
        engine, worker = (DigestEngine[JSON](relay.url, **options) for _ in range(2))
        # a third of a lease later, after 200 s, the worker would ask anew in any case
        async with engine, worker.delivering(inbox), asyncio.timeout(100):
            await engine.add("before", 1)
            await inbox.digest(1)
            before = relay.connections
            await asyncio.gather(*(each.peek(f"k{number}") for each in (engine, worker) for number in range(8)))
            assert relay.connections > before + 6
            follow(new, None)
            follow(old, new)
            relay.port = port_of(new)  # as a name server would tell those who ask again
            await until(lambda: role_of(old) == "slave")
            with pytest.raises(BackendUnavailable, match="is a replica") as caught:
                await engine.add("key", 1, record_id="mine")
            assert (caught.value.stored, caught.value.record_id) == ("no", "mine")
            assert await engine.add("key", 1, record_id="mine")
            await inbox.digest(2)
        assert [digest.key for digest in inbox.came] == ["before", "key"]


@pytest.mark.parametrize("call", ["close", "retry", "release", "postpone", "open"])
async def test_a_server_that_became_a_replica_does_not_say_that_a_lease_is_lost(namespace: str, call: str) -> None:
    """What another worker was given since may not have come to it yet."""
    async with replicated() as (old, new), engine_to(old, namespace) as engine:
        store = Store(await session_of(engine).backend())
        await store.add("k", "a")
        lease = replace(await store.claim(), token="of the new primary")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "close": lambda: store.close(lease),
            "retry": lambda: store.retry(lease),
            "release": lambda: store.release(lease, started=False),
            "postpone": lambda: store.postpone(lease),
            "open": lambda: store.backend.open(0, "k", LEASE, store.policy.terms.limits),
        }
        await until(lambda: new.ask("EXISTS", f"{{{namespace}}}:leased"))
        follow(new, None)
        follow(old, new)
        await until(lambda: role_of(old) == "slave" and follows(old))
        with pytest.raises(BackendUnavailable, match="is a replica"):
            await calls[call]()


async def test_a_dead_letter_leaves_its_old_shard_only_when_a_replica_has_it_in_the_new(namespace: str) -> None:
    async with replicated() as (primary, replica), engine_to(primary, namespace, wait_replicas=1) as engine:
        backend = await session_of(engine).backend()
        assert isinstance(backend, RedisBackend)
        store = Store(backend)
        await store.add("k", "a")
        await store.close(await store.claim(), letter="no such address")
        [letter] = [letter async for letter in engine.dead_letters()]
        assert await backend.operations.reshard(2)
        freeze(replica)
        with pytest.raises(BackendUnavailable, match="0 replicas"):
            await cut_short(primary, backend.namespace.move(0, letter.id))
        assert primary.ask("EXISTS", f"{{{namespace}}}:letter:{letter.id}")
        thaw(replica)
        await drained(backend)
        assert [each async for each in engine.dead_letters()] == [letter]


async def drained(backend: Backend) -> None:
    """Wait until the layout before is gone."""

    async def is_gone() -> bool:
        with suppress(BackendUnavailable):  # the replica links up with its primary anew
            return await backend.operations.drain() == {}
        return False

    await until(is_gone)


async def test_nothing_is_added_to_new_shards_before_the_replicas_know_of_them(namespace: str) -> None:
    async with (
        replicated() as (primary, replica),
        engine_to(primary, namespace) as other,
        engine_to(primary, namespace, wait_replicas=1) as engine,
    ):
        await engine.add("first", 1)
        async for _ in other.reshard(4):
            break
        freeze(replica)
        with pytest.raises(BackendUnavailable) as caught:
            await cut_short(primary, engine.add("second", 1))
        assert caught.value.stored == "no"
        thaw(replica)
        await patiently(lambda: engine.add("second", 1))  # the replica links up with its primary anew
        assert len(primary.ask("KEYS", "*:log:second")) == 1


async def test_a_shard_that_is_drained_does_not_end_before_the_replicas_know_of_it(namespace: str) -> None:
    async with replicated() as (primary, replica):
        async with engine_to(primary, namespace, shards=2) as other:
            await other.add("first", 1)
            await other.delete("first")
        async with engine_to(primary, namespace, wait_replicas=1) as engine:
            backend = await session_of(engine).backend()
            assert await backend.operations.reshard(4)
            freeze(replica)
            with pytest.raises(BackendUnavailable, match="0 replicas"):
                await cut_short(primary, backend.operations.drain())
            thaw(replica)
            await drained(backend)
