"""Every public coroutine of engine and backend, cancelled at its every await: nothing is out of step or lost after it.

A scene prepares, yields the call that is to be cancelled, and then checks what came of it: that it happened whole or
not at all, that nothing is leased for longer than a lease, and that the next calls work.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, unwrap
from itertools import count
from typing import Any, TypeAlias

import pytest
from cancelling import PATIENCE, Call, Scene, Steps, Way, at_awaits, at_turns, cancel_everywhere
from engines import CODEC, Inbox, WatchedBackend, engine_on, forever, policy, settle, virtual_time
from servers import Server, running_server
from stores import LEASE, MINUTE, NOW, Store, ids
from storestate import check_invariants, redis_state

from aiodigest import (
    JSON,
    BackendUnavailable,
    ConfigurationError,
    Digest,
    DigestEngine,
    Entry,
    Finding,
    InvalidState,
    Policy,
    Stats,
    Timeline,
)
from aiodigest.backend import Add, Backend, Close, Closed, Lease, Move, Window
from aiodigest.connection import CONNECTIONS
from aiodigest.redisbackend import RedisBackend
from aiodigest.wire import pack

Check: TypeAlias = Callable[[Any], AsyncGenerator[Call]]

PROBES = [f"probe{number}" for number in range(2 * CONNECTIONS)]
PATIENT = Policy(initial_delay=1_500)  # what is added under it is not due while a test lasts
AT_ONCE = Policy(minimum_delay=0)
VALUE = CODEC.encode("v").decode()

_stages = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for these tests alone, since they make it forget its scripts."""
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
async def _watched() -> AsyncIterator[None]:
    """Let no error go by that nobody looked at, and no task stay."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    before = asyncio.all_tasks()
    yield
    await until(lambda: asyncio.all_tasks() <= {*before, asyncio.current_task()})
    gc.collect(1)  # what the test left behind
    assert not unseen, unseen


async def until(reached: Callable[[], bool]) -> None:
    """Wait for what comes about in a moment, in another task or at the server."""
    async with asyncio.timeout(PATIENCE):
        while not reached():  # noqa: ASYNC110  (no event tells it)
            await asyncio.sleep(0.001)


def public(kind: type) -> set[str]:
    """The names of a class's coroutines, asynchronous generators and context managers."""
    names = [name for name in dir(kind) if not name.startswith("_") or name in ("__aenter__", "__aexit__")]
    methods = {name: unwrap(getattr(kind, name)) for name in names if callable(getattr(kind, name))}
    return {name for name, method in methods.items() if iscoroutinefunction(method) or isasyncgenfunction(method)}


def scene_of(table: dict[str, Callable[[Any], AbstractAsyncContextManager[Call]]], name: str) -> Callable[..., Any]:
    """Put a scene into a table, under the name of what it cancels."""

    def register(scene: Check) -> Check:
        table[name] = asynccontextmanager(scene)
        return scene

    return register


@dataclass
class Stage:
    """A namespace on a real server: the backend that a scene is about, and another, which works behind its back."""

    store: Store
    behind: Store
    namespace: str
    client: Any

    @property
    def backend(self) -> Backend:
        return self.store.backend

    def connections(self) -> int:
        """How many there are at the server, of what the scene is about."""
        return sum(each["name"] == self.namespace for each in self.client.client_list())

    async def lease(self, *records: str) -> Lease:
        """A timeline that the backend may deliver."""
        await self.behind.add("k", *records)
        return await self.behind.claim()

    async def is_claimed_again(self, *records: str, digest_id: str = "") -> Lease:
        """The timeline is to be had now, or after a lease, with all that it held; at the cost of one attempt."""
        leases = (await self.store.claims()).leases
        if not leases:
            await self.store.lapse()
            leases = (await self.store.claims()).leases
        [lease] = leases
        assert ids(lease) == [*records]
        assert lease.attempt <= 2
        assert digest_id in ("", lease.digest_id)
        return lease


@asynccontextmanager
async def staged(server: Server, *, moves: bool = True) -> AsyncGenerator[Stage]:
    """A new namespace, with a timeline for each probe; and what must be true of it in the end.

    Its clock is moved by ``store.now``, or else it is the server's.
    """
    namespace = f"stage-{next(_stages)}"
    url = f"unix://{server.socket}?client_name={namespace}"
    clock = (lambda: store.now) if moves else None
    store = Store(RedisBackend(url, namespace=namespace, now=clock))
    behind = Store(RedisBackend(server.url, namespace=namespace, now=clock))
    with server.client() as client:
        stage = Stage(store, behind, namespace, client)
        try:
            await behind.backend.connect()
            await behind.backend.add(0, [Add(key, pack(key.encode(), None, b"v"), PATIENT.terms) for key in PROBES])
            yield stage
        finally:
            await behind.backend.aclose()
            await store.backend.aclose()
        await until(lambda: not stage.connections())
        check_invariants(redis_state(client, namespace))
        client.flushdb()


async def every_connection_is_in_step(look: Callable[[str], Awaitable[Window | Timeline[JSON] | None]]) -> None:
    """Ask twice as much at once as there are connections, and get every time what was asked for."""
    async with asyncio.timeout(PATIENCE):
        found = await asyncio.gather(*(look(key) for key in PROBES))
    assert [timeline and timeline.key for timeline in found] == PROBES


# The backend

BACKEND: dict[str, Callable[[Stage], AbstractAsyncContextManager[Call]]] = {}
scene = partial(scene_of, BACKEND)


@scene("connect")
async def connecting(stage: Stage) -> AsyncGenerator[Call]:
    yield stage.backend.connect
    await stage.backend.connect()
    assert stage.backend.shards == 1


@scene("aclose")
async def closing_all(stage: Stage) -> AsyncGenerator[Call]:
    yield stage.backend.aclose
    await stage.backend.aclose()
    await until(lambda: not stage.connections())
    await stage.backend.connect()
    assert await stage.store.add("k", "a") == [True]


@scene("add")
async def adding(stage: Stage) -> AsyncGenerator[Call]:
    yield partial(stage.store.add, "k", "a", "b")
    stored = await stage.store.held("k")
    assert stored in ([], [("a", "v"), ("b", "v")])
    assert await stage.store.add("k", "a", "c") == [not stored, False]
    assert ids(await stage.store.claim()) == (["a", "b", "a", "c"] if stored else ["a", "c"])


@scene("claim")
async def claiming(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield stage.store.claims
    await stage.is_claimed_again("a", "b")


@scene("open")
async def opening(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield partial(stage.backend.open, 0, "k", LEASE, AT_ONCE.terms.limits)
    await stage.is_claimed_again("a", "b")


@scene("read")
async def reading(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.backend.read, 0, lease, 0, 10)
    assert await stage.backend.read(0, lease, 0, 10) == [*lease.entries]
    assert await stage.store.close(lease) == Closed("closed")


@scene("renew")
async def renewing(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a")
    stage.store.now += LEASE // 3
    yield partial(stage.backend.renew, 0, [lease], LEASE)
    assert await stage.backend.renew(0, [lease], LEASE) == [True]
    window = await stage.backend.look("k")
    assert window is not None
    assert (window.state, window.due_ms) == ("leased", stage.store.now + LEASE)


@scene("close")
async def closing(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.close, lease)
    assert await stage.store.state("k") in ("leased", None)
    assert await stage.store.close(lease) == Closed("closed")
    assert await stage.store.held("k") == []
    counts = await stage.backend.counts()
    assert (counts["digests"], counts["delivered"]) == (1, 2)


@scene("retry")
async def retrying(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.retry, lease)
    assert await stage.store.state("k") in ("leased", "waiting")
    assert await stage.store.retry(lease)
    assert await stage.store.due("k") == 1_000
    stage.store.now += 1_000
    assert (await stage.is_claimed_again("a", "b")).attempt == 2


@scene("release")
async def releasing(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.release, lease, started=True)
    assert await stage.store.state("k") in ("leased", "ready")
    assert await stage.store.release(lease, started=True)
    assert await stage.store.state("k") == "ready"
    assert (await stage.is_claimed_again("a", "b", digest_id=lease.digest_id)).attempt == 1


@scene("wait")
async def waiting(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a")
    yield partial(stage.backend.wait, 0, "0-0")
    bell = await stage.backend.wait(0, "0-0")
    await stage.store.close(await stage.store.claim())
    blocked = asyncio.create_task(stage.backend.wait(0, bell))
    await stage.behind.add("other", "a")
    async with asyncio.timeout(PATIENCE):
        assert await blocked == (await stage.behind.claims()).bell != bell


@scene("schedule")
async def scheduling(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", policy=Policy(initial_delay=60))
    stage.store.now += MINUTE
    yield stage.backend.schedule
    is_ready = await stage.store.state("k") == "ready"
    assert await stage.backend.schedule() == ([] if is_ready else [("k", NOW + MINUTE)])
    assert await stage.store.state("k") == "ready"


@scene("maintenance")
async def maintaining(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a")
    for _ in range(2):
        stage.store.now += LEASE // 3
        await stage.behind.claims(0)
    stage.store.now += LEASE // 3
    yield stage.backend.maintenance
    is_ready = await stage.store.state("k") == "ready"
    assert await stage.backend.maintenance() == ([] if is_ready else ["k"])
    await stage.is_claimed_again("a", digest_id=lease.digest_id)


@scene("digest")
async def delivering_by_hand(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    seen: list[str] = []

    async def deliver() -> None:
        async with stage.backend.digest("k", AT_ONCE, LEASE) as lease:
            seen.append(lease.digest_id)
            await asyncio.sleep(0)

    yield deliver
    if await stage.store.state("k") is None:  # closed: only a call that came so far can have done it
        assert seen
        assert (await stage.backend.counts())["digests"] == 1
    else:
        await stage.is_claimed_again("a", "b", digest_id="".join(seen))


@scene("delete")
async def deleting(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield partial(stage.backend.delete, "k")
    held = await stage.store.held("k")
    assert held in ([], [("a", "v"), ("b", "v")])
    assert await stage.backend.delete("k") == bool(held)
    assert await stage.store.add("k", "a") == [True]


@scene("flush")
async def flushing(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", policy=PATIENT)
    yield partial(stage.backend.flush, "k")
    assert await stage.backend.flush("k")
    assert ids(await stage.store.claim()) == ["a"]


@scene("remove")
async def removing(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield partial(stage.backend.remove, "k", b"a", AT_ONCE.terms.limits)
    held = await stage.store.held("k")
    assert held in ([("b", "v")], [("a", "v"), ("b", "v")])
    assert await stage.backend.remove("k", b"a", AT_ONCE.terms.limits) == (len(held) == 2)
    assert ids(await stage.store.claim()) == ["b"]


@scene("reschedule")
async def rescheduling(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", policy=PATIENT)
    move = Move(PATIENT.terms, delay_ms=MINUTE)
    yield partial(stage.backend.reschedule, "k", move)
    assert await stage.store.due("k") in (MINUTE, 1_500_000)
    assert await stage.backend.reschedule("k", move) == NOW + MINUTE
    assert await stage.store.due("k") == MINUTE


async def looking(look: Callable[[Backend, str], Awaitable[object]], stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await stage.behind.add("k", "c")

    async def call() -> object:
        return await look(stage.backend, letter)

    yield call
    assert await call() == await look(stage.behind.backend, letter)


scene("look")(partial(looking, lambda backend, _: backend.look("k")))
scene("windows")(partial(looking, lambda backend, _: backend.windows("k")))
scene("entries")(partial(looking, lambda backend, _: backend.entries("k")))
scene("page")(partial(looking, lambda backend, _: backend.page(0, "waiting", 10)))
scene("counts")(partial(looking, lambda backend, _: backend.counts()))
scene("examine")(partial(looking, lambda backend, _: names_of(backend.examine())))
scene("letters")(partial(looking, lambda backend, _: backend.letters(0, 10)))
scene("letter")(partial(looking, lambda backend, letter: backend.letter(letter)))


async def names_of(findings: Awaitable[list[Finding]]) -> list[str]:
    """Of what every user may see; values are others at each look."""
    checks = [finding.check for finding in await findings]
    return [check for check in checks if check in ("version", "shards", "namespace", "overdue", "dead letters")]


@scene("try_erase")
async def trying_to_erase(stage: Stage) -> AsyncGenerator[Call]:
    kept = stage.client.keys()
    yield stage.backend.try_erase
    assert sorted(stage.client.keys()) == sorted(kept)


@scene("erase")
async def erasing(stage: Stage) -> AsyncGenerator[Call]:
    await buried(stage.behind)
    yield erased_for_a_while(stage, stage.backend.erase)
    await stage.backend.erase()
    assert stage.client.keys() == []


def erased_for_a_while(stage: Stage, erase: Callable[[], Awaitable[int]]) -> Call:
    """Erase all, and at once bring back what is looked for in the end."""
    kept = [(key, max(0, stage.client.pttl(key)), stage.client.dump(key)) for key in stage.client.scan_iter()]

    async def call() -> None:
        try:
            assert await erase() == len(kept)
            assert stage.client.keys() == []
        finally:
            for key, ttl, value in kept:
                stage.client.restore(key, ttl, value, replace=True)

    return call


async def buried(store: Store) -> str:
    """The dead letter of a timeline."""
    await store.add("k", "a", "b", value=VALUE)
    await store.close(await store.claim(), letter="bad", cool=0)
    [letter] = (await store.backend.letters(0, 10)).items
    return letter


@scene("replay")
async def replaying(stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(stage.backend.replay, letter, AT_ONCE.terms, False)
    if (await stage.backend.letters(0, 10)).items:
        assert await stage.store.held("k") == []
        assert await stage.backend.replay(letter, AT_ONCE.terms, False)
    with pytest.raises(InvalidState, match="no dead letter"):
        await stage.backend.replay(letter, AT_ONCE.terms, False)
    assert ids(await stage.store.claim()) == ["a", "b"]


@scene("discard")
async def discarding(stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(stage.backend.discard, letter)
    left = (await stage.backend.letters(0, 10)).items
    assert await stage.backend.discard(letter) == bool(left)
    assert (await stage.backend.letters(0, 10)).items == []


async def deliver_all(stage: Stage) -> None:
    """Empty the first shard, but for its dead letters."""
    for key in PROBES:
        await stage.behind.backend.flush(key)
    limits = AT_ONCE.terms.limits
    while leases := (await stage.behind.claims(100)).leases:
        closes = [Close(lease, lease.size, lease.size, 0, limits, LEASE) for lease in leases]
        assert set(await stage.behind.backend.close(0, closes)) == {Closed("closed")}


async def has_moved(stage: Stage) -> None:
    """Nothing is left of the old layout, and the new one takes the probes."""
    assert await stage.behind.backend.reshard(4) is False
    root, tombstone = f"{{{stage.namespace}}}:layout", b"retired"
    assert stage.client.hget(root, "version") == tombstone
    assert stage.client.hget(root, "drains") is None
    for name in ("waiting", "ready", "leased", "dead", "wake"):
        assert not stage.client.exists(f"{{{stage.namespace}}}:{name}")


async def draining_begins(stage: Stage) -> None:
    """What is left to do with the first shard is to move its dead letters and counters; the probes are elsewhere."""
    await deliver_all(stage)
    assert await stage.behind.backend.reshard(4)
    for key in PROBES:
        assert await stage.behind.add(key, key, policy=PATIENT) == [False]


async def letters_of(backend: Backend) -> list[tuple[str, list[bytes]]]:
    """The dead letters of all shards, with their entries."""
    found: list[tuple[str, list[bytes]]] = []
    for shard in range(backend.shards):
        for letter_id in (await backend.letters(shard, 10)).items:
            letter = await backend.letter(letter_id)
            assert letter is not None
            found.append((letter_id, [*letter.entries]))
    return found


@scene("reshard")
async def resharding(stage: Stage) -> AsyncGenerator[Call]:
    yield partial(stage.backend.reshard, 4)
    assert await stage.backend.reshard(4)  # begun by now in any case
    with pytest.raises(InvalidState, match="on its way from 1 to 4 shards"):
        await stage.backend.reshard(5)
    assert await stage.backend.drain() == {"waiting": len(PROBES)}
    await deliver_all(stage)
    assert await stage.backend.drain() == {}
    await has_moved(stage)


@scene("drain")
async def draining(stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await draining_begins(stage)
    counts, letters = await stage.behind.backend.counts(), await letters_of(stage.behind.backend)
    assert [letter_id for letter_id, _ in letters] == [letter]
    yield stage.backend.drain
    assert await stage.backend.drain() == {}
    assert await stage.backend.counts() == counts
    assert await letters_of(stage.backend) == letters
    await has_moved(stage)


def test_there_is_a_scene_for_every_coroutine_of_a_backend() -> None:
    assert set(BACKEND) == public(Backend) | public(RedisBackend)


def on_stage(server: Server, name: str, *, known: bool) -> Scene:
    """A scene of a backend whose script the server knows, or is sent; of ``connect`` on a new one, or again."""

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with staged(server) as stage, BACKEND[name](stage) as call:
            if name != "connect" or not known:
                await stage.backend.connect()
                await stage.backend.look("k")
            if not known:
                stage.client.script_flush()
            yield call
            if name in ("connect", "aclose"):
                await stage.backend.connect()
            await every_connection_is_in_step(stage.backend.look)
            ears = name == "wait" and stage.connections() > CONNECTIONS  # one more, if it was not cancelled
            await until(lambda: stage.connections() == CONNECTIONS + ears)

    return play


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("name", BACKEND)
async def test_a_call_on_a_backend_may_be_cancelled_at_any_await(server: Server, name: str, known: bool) -> None:
    moments = await cancel_everywhere(on_stage(server, name, known=known))
    assert moments > 0 or name == "aclose"  # which waits for nothing


@pytest.mark.parametrize("name", ["connect", "look"])
async def test_a_call_on_a_backend_may_be_cancelled_at_any_turn_when_its_reply_has_come_too(
    server: Server, name: str
) -> None:
    assert await cancel_everywhere(on_stage(server, name, known=True), at_turns) > 2


async def test_calls_that_wait_for_a_connection_may_be_cancelled_at_any_await(server: Server) -> None:
    moment, cancelled = 0, True
    while cancelled:
        moment += 1
        async with staged(server) as stage:
            await stage.backend.connect()  # on one connection; the others are made, or waited for, by the calls
            others = asyncio.gather(*(stage.backend.look(key) for key in PROBES[:4]))
            attempts = await asyncio.gather(*(at_awaits(stage.backend.look(key), moment, 1) for key in PROBES[4:]))
            cancelled = any(attempt.was_cancelled for attempt in attempts)
            assert [window and window.key for window in await others] == PROBES[:4]
            await every_connection_is_in_step(stage.backend.look)
            await until(lambda stage=stage: stage.connections() == CONNECTIONS)
    assert moment > 4


async def test_the_add_that_begins_a_namespace_may_be_cancelled_at_any_await(server: Server) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        store = Store(RedisBackend(server.url, namespace=f"new-{next(_stages)}"))
        await store.backend.connect()
        yield partial(store.add, "k", "a", "b")
        assert [record for record, _ in await store.held("k")] in ([], ["a", "b"])
        await store.add("k", "a")
        assert await store.state("k") == "ready"
        await store.backend.aclose()

    assert await cancel_everywhere(play) > 2


async def test_an_add_that_waits_for_replicas_may_be_cancelled_at_any_await(server: Server) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with staged(server, moves=False) as stage:
            url = f"unix://{server.socket}?client_name={stage.namespace}"
            waiting = Store(RedisBackend(url, namespace=stage.namespace, wait_replicas=1))
            await waiting.backend.connect()

            def blocked() -> list[str]:
                return [each["id"] for each in stage.client.client_list() if "b" in each["flags"]]

            async def give_up() -> None:
                await until(lambda: bool(blocked()))
                stage.client.client_unblock(blocked()[0])

            async def add() -> None:
                with pytest.raises(BackendUnavailable, match="0 replicas"):
                    await waiting.add("k", "a")

            patience = asyncio.create_task(give_up())  # there is no replica, and nobody waits for the timeout
            yield add
            patience.cancel()
            await every_connection_is_in_step(waiting.backend.look)
            await until(lambda: stage.connections() == CONNECTIONS)
            assert await waiting.held("k") in ([], [("a", "v")])
            await waiting.backend.aclose()

    assert await cancel_everywhere(play) > 1  # for the reply, and for the replicas


# What is called on an engine


@dataclass
class EngineStage(Stage):
    """The same for an engine, which is not entered yet; it runs on the server's clock."""

    engine: DigestEngine[JSON]
    arrive: Callable[[], None]  # from now on the server is where the engine looks for it


ENGINE: dict[str, Callable[[EngineStage], AbstractAsyncContextManager[Call]]] = {}
engine_scene = partial(scene_of, ENGINE)


async def slow_policy(key: str) -> Policy:
    """A policy that is awaited."""
    await asyncio.sleep(0)
    return AT_ONCE


@asynccontextmanager
async def engine_staged(server: Server, *, late: bool = False) -> AsyncGenerator[EngineStage]:
    async with staged(server, moves=False) as stage:
        place = server.folder / stage.namespace

        def arrive() -> None:
            place.symlink_to(server.socket)

        if not late:
            arrive()
        url = f"unix://{place}?client_name={stage.namespace}"
        engine = DigestEngine[JSON](url, namespace=stage.namespace, policy=slow_policy, drain_timeout=0.1)
        yield EngineStage(stage.store, stage.behind, stage.namespace, stage.client, engine, arrive)


async def held(stage: EngineStage, key: str = "k") -> list[str]:
    return [record for record, _ in await stage.behind.held(key)]


@engine_scene("add")
async def adding_one(stage: EngineStage) -> AsyncGenerator[Call]:
    yield partial(stage.engine.add, "k", "v", record_id="a")
    await stage.engine.add("k", "v", record_id="a")
    await stage.engine.add("k", "v", record_id="b")
    assert set(await held(stage)) == {"a", "b"}
    assert await stage.behind.state("k") == "ready"


@engine_scene("add_many")
async def adding_many(stage: EngineStage) -> AsyncGenerator[Call]:
    entries = [Entry("k", "v", record_id=name) for name in "abc"]
    yield partial(stage.engine.add_many, entries)
    stored = await held(stage)
    assert stored in ([], ["a", "b", "c"])
    assert await stage.engine.add_many(entries) == [not stored, False, False]
    assert await held(stage) == [*stored, "a", "b", "c"]


@engine_scene("flush")
async def flushing_one(stage: EngineStage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", policy=PATIENT)
    yield partial(stage.engine.flush, "k")
    assert await stage.engine.flush("k")
    assert ids(await stage.behind.claim()) == ["a"]


@engine_scene("delete")
async def deleting_one(stage: EngineStage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield partial(stage.engine.delete, "k")
    left = await held(stage)
    assert left in ([], ["a", "b"])
    assert await stage.engine.delete("k") == bool(left)


@engine_scene("remove")
async def removing_one(stage: EngineStage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", "b")
    yield partial(stage.engine.remove, "k", "a")
    left = await held(stage)
    assert left in (["b"], ["a", "b"])
    assert await stage.engine.remove("k", "a") == (len(left) == 2)


@engine_scene("reschedule")
async def rescheduling_one(stage: EngineStage) -> AsyncGenerator[Call]:
    await stage.behind.add("k", "a", policy=PATIENT)
    yield partial(stage.engine.reschedule, "k", delay=900)
    due = await stage.engine.reschedule("k", delay=900)
    timeline = await stage.engine.peek("k")
    assert timeline is not None
    assert timeline.due == due


@engine_scene("replay")
async def replaying_one(stage: EngineStage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(stage.engine.replay, letter)
    if await stage.engine.dead_letter(letter):
        assert await held(stage) == []
        assert await stage.engine.replay(letter)
    with pytest.raises(InvalidState, match="no dead letter"):
        await stage.engine.replay(letter)
    assert await held(stage) == ["a", "b"]


@engine_scene("discard")
async def discarding_one(stage: EngineStage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(stage.engine.discard, letter)
    left = await stage.engine.dead_letter(letter)
    assert await stage.engine.discard(letter) == bool(left)
    assert await stage.engine.dead_letter(letter) is None


@engine_scene("reshard")
async def resharding_all(stage: EngineStage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await draining_begins(stage)
    counts, letters = await stage.behind.backend.counts(), await letters_of(stage.behind.backend)
    yield lambda: listed(stage.engine.reshard(4))
    assert await listed(stage.engine.reshard(4)) == []
    assert await stage.behind.backend.counts() == counts
    assert await letters_of(stage.behind.backend) == letters
    assert await stage.engine.dead_letter(letter)
    await has_moved(stage)


@engine_scene("erase")
async def erasing_all(stage: EngineStage) -> AsyncGenerator[Call]:
    await buried(stage.behind)
    yield erased_for_a_while(stage, stage.engine.erase)
    await stage.engine.erase()
    assert stage.client.keys() == []


async def stats_of(engine: DigestEngine[JSON]) -> Stats:
    """But for what grows while one looks."""
    return replace(await engine.stats(), overdue=0)


async def reason_of(engine: DigestEngine[JSON]) -> str:
    return (await engine.health()).reason


async def inspecting(
    look: Callable[[DigestEngine[JSON], str], Awaitable[object]], stage: EngineStage
) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await stage.behind.add("k", "c")

    async def call() -> object:
        return await look(stage.engine, letter)

    yield call
    async with DigestEngine[JSON](stage.engine.url, namespace=stage.namespace) as other:
        assert await call() == await look(other, letter)


async def listed(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


engine_scene("peek")(partial(inspecting, lambda engine, _: engine.peek("k")))
engine_scene("stats")(partial(inspecting, lambda engine, _: stats_of(engine)))
engine_scene("health")(partial(inspecting, lambda engine, _: reason_of(engine)))
engine_scene("examine")(partial(inspecting, lambda engine, _: names_of(engine.examine())))
engine_scene("timelines")(partial(inspecting, lambda engine, _: listed(engine.timelines())))
engine_scene("dead_letters")(partial(inspecting, lambda engine, _: listed(engine.dead_letters())))
engine_scene("dead_letter")(partial(inspecting, lambda engine, letter: engine.dead_letter(letter)))


@pytest.mark.parametrize("late", [False, True], ids=["connected", "connecting"])
@pytest.mark.parametrize("name", ENGINE)
async def test_a_call_on_an_engine_may_be_cancelled_at_any_await(server: Server, name: str, late: bool) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(server, late=late) as stage, stage.engine, ENGINE[name](stage) as call:
            if late:
                stage.arrive()
                stage.client.script_flush()
            else:
                await stage.engine.add("another", 1)  # with the first one come the tasks that send adds
                await stage.engine.delete("another")
            before = asyncio.all_tasks()
            yield call
            await every_connection_is_in_step(stage.engine.peek)
            await until(lambda: stage.connections() == CONNECTIONS)
            if not late:
                await until(lambda: asyncio.all_tasks() <= before)

    assert await cancel_everywhere(play) > 0


# Entering and leaving

IN: dict[str, Callable[[DigestEngine[JSON], Inbox], AbstractAsyncContextManager[object]]] = {
    "__aenter__": lambda engine, _: engine,
    "delivering": lambda engine, inbox: engine.delivering(inbox),
    "lifespan": lambda engine, inbox: (engine.deliver(inbox), engine.lifespan(None))[1],
}


def test_there_is_a_scene_for_every_coroutine_of_an_engine() -> None:
    assert {*ENGINE, *IN, "__aexit__", "run"} == public(DigestEngine)


async def is_left(stage: EngineStage) -> None:
    """The engine has let go of the server, and holds no lease: what it was given can be had at once, uncharged."""
    with pytest.raises(ConfigurationError, match="not entered"):
        await stage.engine.stats()
    await until(lambda: not stage.connections())
    claims = await stage.behind.claims()
    assert {"k": 1}.items() <= {lease.key: lease.attempt for lease in claims.leases}.items()
    for lease in claims.leases:
        assert await stage.behind.release(lease, started=False)


async def comes_again(stage: EngineStage, digest: Digest[JSON] | None) -> None:
    """The engine, entered once more, delivers what was under delivery, and under the same id."""
    inbox = Inbox()
    async with asyncio.timeout(PATIENCE), stage.engine.delivering(inbox):
        await stage.engine.add("after", 1)
        while not {"k", "after"} <= {each.key for each in inbox.digests}:
            await inbox.digest(len(inbox.digests) + 1)
    [again] = [each for each in inbox.digests if each.key == "k"]
    assert sorted(record.id for record in again.records) == ["a", "b"]
    assert digest is None or digest.id == again.id


@pytest.mark.parametrize(("name", "way"), [*((name, at_awaits) for name in IN), ("delivering", at_turns)])
async def test_entering_an_engine_may_be_cancelled_at_any_moment(server: Server, name: str, way: Way) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(server) as stage:
            await stage.behind.add("k", "a", "b", value=VALUE)
            inbox, entered = Inbox(forever), False
            inside = IN[name](stage.engine, inbox)

            async def enter() -> None:
                nonlocal entered
                await inside.__aenter__()
                entered = True

            yield enter
            if entered:
                await inside.__aexit__(None, None, None)
            await is_left(stage)
            await comes_again(stage, inbox.digests[0] if inbox.digests else None)

    assert await cancel_everywhere(play, way) > 1


@pytest.mark.parametrize("name", IN)
async def test_leaving_an_engine_may_be_cancelled_at_any_await(server: Server, name: str) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(server) as stage:
            await stage.behind.add("k", "a", "b", value=VALUE)
            inbox = Inbox(forever)
            inside = IN[name](stage.engine, inbox)
            await inside.__aenter__()
            if name != "__aenter__":
                async with asyncio.timeout(PATIENCE):
                    await inbox.digest()
            adds = [asyncio.create_task(stage.engine.add("new", 1, record_id=record)) for record in "abc"]
            for _ in range(2):  # their policy is found, and they are queued
                await asyncio.sleep(0)
            yield partial(inside.__aexit__, None, None, None)
            await asyncio.gather(*adds)
            assert sorted(await held(stage, "new")) == ["a", "b", "c"]
            await is_left(stage)
            await comes_again(stage, inbox.digests[0] if inbox.digests else None)

    assert await cancel_everywhere(play) > 0


async def test_running_an_engine_may_be_cancelled_at_any_await(server: Server) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(server) as stage:
            await stage.behind.add("k", "a", "b", value=VALUE)

            async def end(digest: Digest[JSON]) -> None:
                signal.raise_signal(signal.SIGTERM)  # else a run that is not cancelled would never end
                await forever(digest)

            inbox = Inbox(end)
            yield partial(stage.engine.run, inbox)
            assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
            await is_left(stage)
            await comes_again(stage, inbox.digests[0] if inbox.digests else None)

    assert await cancel_everywhere(play) > 3  # to enter, to be told to end, and to leave


# Engines in virtual time, where every turn of the event loop is a moment


async def turns(digest: Digest[JSON]) -> None:
    """A callback that takes a few turns."""
    for _ in range(5):
        await asyncio.sleep(0)


@virtual_time
async def test_leaving_may_be_cancelled_at_any_turn() -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        backend, inbox, after = WatchedBackend(), Inbox(turns), Inbox()
        engine = engine_on(backend, policy=policy())
        inside = engine.delivering(inbox)
        await inside.__aenter__()
        await engine.add("k", 1)
        await inbox.digest()
        adds = [asyncio.create_task(engine.add("new", number)) for number in range(3)]
        await asyncio.sleep(0)
        yield partial(inside.__aexit__, None, None, None)
        await asyncio.gather(*adds)
        assert len(backend.machines[0].held["new"].log) == 3
        assert not backend.machines[0].leased
        assert backend.closed == ["backend", "store"]
        if await backend.look("k") is not None:  # its outcome is unknown
            async with engine.delivering(after):
                await after.digest(2)
            [again] = [digest for digest in after.digests if digest.key == "k"]
            assert (again.id, again.attempt) == (inbox.digests[0].id, 1)

    assert await cancel_everywhere(play, at_turns) > 5


@pytest.mark.parametrize("is_leaving", [False, True], ids=["working", "leaving"])
@virtual_time
async def test_a_callback_cancelled_at_any_await_is_called_again_with_the_same_digest_within_two_leases(
    is_leaving: bool,
) -> None:
    async def body() -> None:
        for _ in range(3):
            await asyncio.sleep(1)

    async def drive(steps: Steps, _: Digest[JSON]) -> None:
        await steps

    moment, was_cancelled = 0, True
    while was_cancelled:
        moment += 1
        backend, steps = WatchedBackend(), Steps(body(), moment, moment)
        inbox, after = Inbox(partial(drive, steps)), Inbox()
        engine = engine_on(backend, policy=policy())
        async with asyncio.timeout(200), engine.delivering(inbox):
            await engine.add("k", 1)
            await inbox.digest()
            if not is_leaving:
                await asyncio.sleep(130)
        was_cancelled = steps.count >= moment
        if is_leaving and was_cancelled:
            async with asyncio.timeout(130), engine.delivering(after):
                await after.digest()
        digests = [*inbox.digests, *after.digests]
        assert [(digest.id, digest.attempt) for digest in digests[1:]] == [(digests[0].id, 2)] * was_cancelled
        assert await backend.look("k") is None
    assert moment == 4


@virtual_time
async def test_an_add_that_is_cancelled_while_it_waits_is_withdrawn_and_its_room_is_another_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodigest.coalesce.QUEUE_ITEMS", 2)

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        backend = WatchedBackend()
        backend.gates["add"] = asyncio.Event()
        async with engine_on(backend, policy=slow_policy) as engine:
            adds = [asyncio.create_task(engine.add("other", 0))]
            await settle()  # it is in flight, so that these wait, and there is no room for more
            adds += [asyncio.create_task(engine.add("other", number)) for number in range(2)]
            await settle()
            asyncio.get_running_loop().call_later(1, backend.gates["add"].set)
            answers: list[bool] = []

            async def add() -> None:
                answers.append(await engine.add("k", 1))

            yield add
            await asyncio.gather(*adds)
            assert answers == ([] if await backend.look("k") is None else [True])
            assert await engine.add("k", 2) == (not answers)

    assert await cancel_everywhere(play) == 3  # for its policy, for room, and for its answer
