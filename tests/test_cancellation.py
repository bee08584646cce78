"""Every public coroutine of engine and backend, cancelled at its every await: nothing is out of step or lost after it.

A scene prepares, yields the call that is to be cancelled, and then checks what came of it: that it happened whole or
not at all, that nothing is leased for longer than a lease, and that the next calls work.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, unwrap
from itertools import count
from typing import Any, TypeAlias
from zlib import crc32

import pytest
from cancelling import PATIENCE, Call, Scene, Steps, at_awaits, at_turns, cancel_everywhere
from clusters import Cluster, running_cluster
from clusters import Move as SlotMove
from engines import CODEC, Inbox, WatchedBackend, engine_on, forever, policy, settle, virtual_time
from redis.crc import key_slot
from replicas import Relay, freeze, replicated, thaw
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
from aiodigest.backend import Add, Backend, Close, Closed, Lease, Move, Operations, StoredTimeline
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections import server as connection
from aiodigest.backends.redis.connections.server import CONNECTIONS, WAITERS
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.operations import RedisOperations
from aiodigest.records.entries import pack

Check: TypeAlias = Callable[[Any], AsyncGenerator[Call]]

OTHERWISE = 4  # shards of the layout that a namespace may go over to
SHARDS = 3  # on a cluster, one for each primary; the timelines of these tests that have a name are in the first
FEW = 2  # connections to each of its primaries, of which a scene needs no more
PATIENT = Policy(initial_delay=1_500)  # what is added under it is not due while a test lasts
AT_ONCE = Policy(minimum_delay=0)
VALUE = CODEC.encode("v").decode()

_stages = count(1)


Entrance: TypeAlias = Callable[[str], AbstractAsyncContextManager[tuple[str, Callable[[], object]]]]


@dataclass
class Ground:
    """Where scenes are played: a server or a cluster, and the clients of its primaries, which may do all.

    ``entrance`` gives an address at which nothing answers until what comes with it is called.
    """

    url: str
    address: str  # for one who may do all
    clients: Sequence[Any]
    entrance: Entrance
    shards: int = 1
    connections: int = CONNECTIONS  # that a scene's backend may have to each primary
    probes: list[str] = field(default_factory=list[str])  # in each shard twice as many as there are connections

    def __post_init__(self) -> None:
        of_both = self.shards * OTHERWISE  # as many in each shard, whichever layout there is
        room = Counter(dict.fromkeys(range(of_both), self.connections // 2))
        for key in map("probe{}".format, count()):
            shard = crc32(key.encode()) % of_both
            if room[shard]:
                room[shard] -= 1
                self.probes.append(key)
            if not room.total():
                break

    @property
    def all_connections(self) -> int:
        return self.connections * len(self.clients)

    def keys(self) -> dict[bytes, Any]:
        """All keys that there are, and the client of who has each."""
        return {key: client for client in self.clients for key in client.scan_iter(count=1000)}


@asynccontextmanager
async def linked(server: Server, namespace: str) -> AsyncGenerator[tuple[str, Callable[[], object]]]:
    """A socket that is not there until it is made."""
    place = server.folder / namespace
    yield f"unix://{place}", lambda: place.symlink_to(server.socket)


@asynccontextmanager
async def relayed(cluster: Cluster, namespace: str) -> AsyncGenerator[tuple[str, Callable[[], object]]]:
    """A node that is cut off until it is let through; the others are not known before it tells of them."""
    async with Relay(cluster.nodes[0].port) as relay:
        relay.mode = "cut"
        yield relay.url.replace("redis://", "redis+cluster://"), lambda: setattr(relay, "mode", "pass")


def on_server(server: Server, client: Any) -> Ground:
    return Ground(server.url, f"unix://{server.socket}", [client], partial(linked, server))


@pytest.fixture(scope="module")
def single() -> Iterator[Ground]:
    """A server for these tests alone, since they make it forget its scripts."""
    with running_server() as server, server.client() as client:
        yield on_server(server, client)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(primaries=SHARDS, replicas=0) as running:
        yield running


@pytest.fixture(scope="module")
def several(cluster: Cluster) -> Iterator[Ground]:
    """A cluster for these tests alone."""
    with ExitStack() as stack:
        clients = [stack.enter_context(node.client()) for node in cluster.nodes]
        address = f"redis+cluster://{cluster.url.rpartition('@')[2]}"
        yield Ground(cluster.url, address, clients, partial(relayed, cluster), SHARDS, FEW)


@pytest.fixture
def ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A single server, unless a test says otherwise."""
    found = request.getfixturevalue(getattr(request, "param", "single"))
    monkeypatch.setattr(connection, "CONNECTIONS", found.connections)
    return found


SEVERAL = pytest.param("several", id="cluster", marks=pytest.mark.cluster)
on_both = pytest.mark.parametrize("ground", [pytest.param("single", id="server"), SEVERAL], indirect=True)


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
    """A namespace on real servers: the backend that a scene is about, and another, which works behind its back."""

    store: Store
    behind: Store
    namespace: str
    ground: Ground

    @property
    def backend(self) -> Backend:
        return self.store.backend

    def connections(self) -> int:
        """How many there are at the servers, of what the scene is about."""
        return sum(each["name"] == self.namespace for client in self.ground.clients for each in client.client_list())

    async def is_in_step(self, look: Callable[[str], Awaitable[StoredTimeline | Timeline[JSON] | None]]) -> None:
        """Every connection is: twice as much is asked at once as there are, and each gets what was asked for."""
        async with asyncio.timeout(PATIENCE):
            found = await asyncio.gather(*(look(key) for key in self.ground.probes))
        assert [timeline and timeline.key for timeline in found] == self.ground.probes

    async def loses_its_servers(self) -> None:
        """The backend has to make its connections anew, and to ask in a cluster which node has which slots."""
        backend = self.backend
        assert isinstance(backend, RedisBackend)
        for shard in range(backend.shard_map.count):
            await backend.namespace.leave(shard)

    async def lease(self, *records: str) -> Lease:
        """A timeline that the backend may deliver."""
        await self.behind.add("d", *records)
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
async def staged(ground: Ground, *, moves: bool = True) -> AsyncGenerator[Stage]:
    """A new namespace, with a timeline for each probe; and what must be true of it in the end.

    Its clock is moved by ``store.now``, or else it is the server's.
    """
    namespace = f"stage-{next(_stages)}"
    url = f"{ground.address}?client_name={namespace}"
    clock = (lambda: store.now) if moves else None
    store = Store(RedisBackend(url, namespace=namespace, now=clock))
    behind = Store(RedisBackend(ground.url, namespace=namespace, shards=ground.shards, now=clock))
    stage = Stage(store, behind, namespace, ground)
    for client in ground.clients:
        client.flushdb()  # what the one before has left
    try:
        await behind.backend.connect()
        probes = [Add(key, pack(key.encode(), None, b"v"), PATIENT.terms) for key in ground.probes]
        for shard in range(ground.shards):
            await behind.backend.add(
                shard, [add for add in probes if behind.backend.shard_map.shard_of(add.key) == shard]
            )
        yield stage
    finally:
        await behind.backend.aclose()
        await store.backend.aclose()
    await until(lambda: not stage.connections())
    holders = {key[1 : key.index(b"}")].decode(): client for key, client in ground.keys().items()}
    for tag in (Layout(ground.shards).tag(namespace, number) for number in range(ground.shards)):
        if tag in holders and holders[tag].pttl(f"{{{tag}}}:layout") < 0:  # else it was given up for another layout
            check_invariants(redis_state(holders[tag], tag))


# The backend

BACKEND: dict[str, Callable[[Stage], AbstractAsyncContextManager[Call]]] = {}
scene = partial(scene_of, BACKEND)


@dataclass
class EngineStage(Stage):
    """The same for an engine, which is not entered yet; it runs on the server's clock."""

    engine: DigestEngine[JSON]
    arrive: Callable[[], object]  # from now on the server is where the engine looks for it


ENGINE: dict[str, Callable[[EngineStage], AbstractAsyncContextManager[Call]]] = {}
engine_scene = partial(scene_of, ENGINE)

Act: TypeAlias = Callable[[Any, str], Coroutine[Any, Any, Any]]  # on what is on a stage, with a key or a letter's id


def on_each(
    name: str, act: Act, engine_act: Act, *, engine_name: str = ""
) -> Callable[[Callable[[Act, Any], AsyncGenerator[Call]]], object]:
    """Put a scene into both tables: of a call on a backend, and of the same on an engine."""

    def register(play: Callable[[Act, Any], AsyncGenerator[Call]]) -> object:
        scene(name)(partial(play, act))
        engine_scene(engine_name or name)(partial(play, engine_act))
        return play

    return register


@scene("connect")
async def connecting(stage: Stage) -> AsyncGenerator[Call]:
    yield stage.backend.connect
    await stage.backend.connect()
    assert stage.backend.shard_map.count == stage.ground.shards


@scene("aclose")
async def closing_all(stage: Stage) -> AsyncGenerator[Call]:
    yield stage.backend.aclose
    await stage.backend.aclose()
    await until(lambda: not stage.connections())
    await stage.backend.connect()
    assert await stage.store.add("d", "a") == [True]


@scene("add")
async def adding(stage: Stage) -> AsyncGenerator[Call]:
    yield partial(stage.store.add, "d", "a", "b")
    stored = await stage.store.held("d")
    assert stored in ([], [("a", "v"), ("b", "v")])
    assert await stage.store.add("d", "a", "c") == [not stored, False]
    assert ids(await stage.store.claim()) == (["a", "b", "a", "c"] if stored else ["a", "c"])


@scene("claim")
async def claiming(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", "b")
    yield stage.store.claims
    await stage.is_claimed_again("a", "b")


@scene("open")
async def opening(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", "b")
    yield partial(stage.backend.open, 0, "d", LEASE, AT_ONCE.terms.limits)
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
    window = await stage.backend.operations.look("d")
    assert window is not None
    assert (window.state, window.due_ms) == ("leased", stage.store.now + LEASE)


@scene("close")
async def closing(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.close, lease)
    assert await stage.store.state("d") in ("leased", None)
    assert await stage.store.close(lease) == Closed("closed")
    assert await stage.store.held("d") == []
    counts = await stage.backend.operations.counts()
    assert (counts["digests"], counts["delivered"]) == (1, 2)


@scene("retry")
async def retrying(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.retry, lease)
    assert await stage.store.state("d") in ("leased", "waiting")
    assert await stage.store.retry(lease)
    assert await stage.store.due("d") == 1_000
    stage.store.now += 1_000
    assert (await stage.is_claimed_again("a", "b")).attempt == 2


@scene("release")
async def releasing(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a", "b")
    yield partial(stage.store.release, lease, started=True)
    assert await stage.store.state("d") in ("leased", "ready")
    assert await stage.store.release(lease, started=True)
    assert await stage.store.state("d") == "ready"
    assert (await stage.is_claimed_again("a", "b", digest_id=lease.digest_id)).attempt == 1


@scene("wait")
async def waiting(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a")
    yield partial(stage.backend.wait, 0, "0-0")
    bell = await stage.backend.wait(0, "0-0")
    await stage.store.close(await stage.store.claim())
    blocked = asyncio.create_task(stage.backend.wait(0, bell))
    await stage.behind.add("other", "a")
    async with asyncio.timeout(PATIENCE):
        assert await blocked == (await stage.behind.claims()).wake_up != bell


@scene("schedule")
async def scheduling(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", policy=Policy(initial_delay=60))
    stage.store.now += MINUTE
    yield stage.backend.schedule
    is_ready = await stage.store.state("d") == "ready"
    assert await stage.backend.schedule() == ([] if is_ready else [("d", NOW + MINUTE)])
    assert await stage.store.state("d") == "ready"


@scene("maintenance")
async def maintaining(stage: Stage) -> AsyncGenerator[Call]:
    lease = await stage.lease("a")
    for _ in range(2):
        stage.store.now += LEASE // 3
        await stage.behind.claims(0)
    stage.store.now += LEASE // 3
    yield stage.backend.maintenance
    is_ready = await stage.store.state("d") == "ready"
    assert await stage.backend.maintenance() == ([] if is_ready else ["d"])
    await stage.is_claimed_again("a", digest_id=lease.digest_id)


@scene("digest")
async def delivering_by_hand(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", "b")
    seen: list[str] = []

    async def deliver() -> None:
        async with stage.backend.digest("d", AT_ONCE, LEASE) as lease:
            seen.append(lease.digest_id)
            await asyncio.sleep(0)

    yield deliver
    if await stage.store.state("d") is None:  # closed: only a call that came so far can have done it
        assert seen
        assert (await stage.backend.operations.counts())["digests"] == 1
    else:
        await stage.is_claimed_again("a", "b", digest_id="".join(seen))


@on_each("delete", lambda stage, key: stage.backend.delete(key), lambda stage, key: stage.engine.delete(key))
async def deleting(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", "b")
    yield partial(act, stage, "d")
    held = await stage.behind.held("d")
    assert held in ([], [("a", "v"), ("b", "v")])
    assert await act(stage, "d") == bool(held)
    assert await stage.behind.add("d", "a") == [True]


@on_each("flush", lambda stage, key: stage.backend.flush(key), lambda stage, key: stage.engine.flush(key))
async def flushing(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", policy=PATIENT)
    yield partial(act, stage, "d")
    assert await act(stage, "d")
    assert ids(await stage.behind.claim()) == ["a"]


@on_each(
    "remove",
    lambda stage, key: stage.backend.remove(key, b"a", AT_ONCE.terms.limits),
    lambda stage, key: stage.engine.remove(key, "a"),
)
async def removing(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", "b")
    yield partial(act, stage, "d")
    held = await stage.behind.held("d")
    assert held in ([("b", "v")], [("a", "v"), ("b", "v")])
    assert await act(stage, "d") == (len(held) == 2)
    assert ids(await stage.behind.claim()) == ["b"]


@scene("reschedule")
async def rescheduling(stage: Stage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", policy=PATIENT)
    move = Move(PATIENT.terms, delay_ms=MINUTE)
    yield partial(stage.backend.reschedule, "d", move)
    assert await stage.store.due("d") in (MINUTE, 1_500_000)
    assert await stage.backend.reschedule("d", move) == NOW + MINUTE
    assert await stage.store.due("d") == MINUTE


async def looking(look: Callable[[Any, str], Awaitable[object]], stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await stage.behind.add("d", "c")

    async def call() -> object:
        return await look(stage.engine if isinstance(stage, EngineStage) else stage.backend, letter)

    yield call
    if isinstance(stage, EngineStage):
        async with DigestEngine[JSON](stage.engine.url, namespace=stage.namespace) as other:
            assert await call() == await look(other, letter)
    else:
        assert await call() == await look(stage.behind.backend, letter)


scene("look")(partial(looking, lambda backend, _: backend.operations.look("d")))
scene("look_all")(partial(looking, lambda backend, _: backend.operations.look_all("d")))
scene("entries")(partial(looking, lambda backend, _: backend.operations.entries("d")))
scene("page")(partial(looking, lambda backend, _: backend.operations.page(0, "waiting", 10)))
scene("counts")(partial(looking, lambda backend, _: backend.operations.counts()))
scene("examine")(partial(looking, lambda backend, _: names_of(backend.operations.examine())))
scene("dead_letters")(partial(looking, lambda backend, _: backend.operations.dead_letters(0, 10)))
scene("dead_letter")(partial(looking, lambda backend, letter: backend.operations.dead_letter(letter)))


async def names_of(findings: Awaitable[list[Finding]]) -> list[str]:
    """Of what every user may see; values are others at each look."""
    checks = [finding.check for finding in await findings]
    return [check for check in checks if check in ("version", "shards", "namespace", "overdue", "dead letters")]


def erased_for_a_while(stage: Stage, erase: Callable[[], Awaitable[int]]) -> Call:
    """Erase all, and at once bring back what is looked for in the end."""
    kept = [(client, key, max(0, client.pttl(key)), client.dump(key)) for key, client in stage.ground.keys().items()]

    async def call() -> None:
        try:
            assert await erase() == len(kept)
            assert stage.ground.keys() == {}
        finally:
            for client, key, ttl, value in kept:
                client.restore(key, ttl, value, replace=True)

    return call


async def buried(store: Store) -> str:
    """The dead letter of a timeline."""
    await store.add("d", "a", "b", value=VALUE)
    await store.close(await store.claim(), letter="bad", cool=0)
    [letter] = (await store.backend.operations.dead_letters(0, 10)).items
    return letter


@on_each("try_erase", lambda stage, _: stage.backend.operations.try_erase(), lambda stage, _: stage.engine.try_erase())
async def trying_to_erase(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    await buried(stage.behind)
    kept = stage.ground.keys()
    yield partial(act, stage, "")
    assert stage.ground.keys() == kept


@on_each("erase", lambda stage, _: stage.backend.operations.erase(), lambda stage, _: stage.engine.erase())
async def erasing(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    await buried(stage.behind)
    yield erased_for_a_while(stage, partial(act, stage, ""))
    await act(stage, "")
    assert stage.ground.keys() == {}


@on_each(
    "replay",
    lambda stage, letter: stage.backend.replay(letter, AT_ONCE.terms, False),
    lambda stage, letter: stage.engine.replay(letter),
)
async def replaying(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(act, stage, letter)
    if await stage.behind.backend.operations.dead_letter(letter):
        assert await stage.behind.held("d") == []
        assert await act(stage, letter)
    with pytest.raises(InvalidState, match="no dead letter"):
        await act(stage, letter)
    assert ids(await stage.behind.claim()) == ["a", "b"]


@on_each(
    "discard", lambda stage, letter: stage.backend.discard(letter), lambda stage, letter: stage.engine.discard(letter)
)
async def discarding(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    yield partial(act, stage, letter)
    left = await stage.behind.backend.operations.dead_letter(letter)
    assert await act(stage, letter) == bool(left)
    assert await stage.behind.backend.operations.dead_letter(letter) is None


async def deliver_all(stage: Stage) -> None:
    """Empty all shards, but for their dead letters."""
    for key in stage.ground.probes:
        await stage.behind.backend.flush(key)
    limits = AT_ONCE.terms.limits
    for shard in range(stage.behind.backend.shard_map.count):
        while leases := (await stage.behind.claims(100, shard)).leases:
            closes = [Close(lease, lease.size, lease.size, 0, limits, LEASE) for lease in leases]
            assert set(await stage.behind.backend.close(shard, closes)) == {Closed("closed")}


async def has_moved(stage: Stage) -> None:
    """Nothing is left of the old layout, and the new one takes the probes."""
    assert await stage.behind.backend.operations.reshard(OTHERWISE) is False
    old, keys, root = Layout(stage.ground.shards), stage.ground.keys(), f"{{{stage.namespace}}}:layout".encode()
    assert keys[root].hget(root, "drains") is None
    for number in range(old.shards):
        prefix = f"{{{old.tag(stage.namespace, number)}}}:".encode()
        layout = prefix + b"layout"
        assert keys[layout].hget(layout, "version") == b"retired"
        assert not keys.keys() & {prefix + name for name in (b"waiting", b"ready", b"leased", b"dead", b"wake")}


async def draining_begins(stage: Stage) -> None:
    """What is left to do with the shards is to move their dead letters and counters; the probes are elsewhere."""
    await deliver_all(stage)
    assert await stage.behind.backend.operations.reshard(OTHERWISE)
    for key in stage.ground.probes:
        assert await stage.behind.add(key, key, policy=PATIENT) == [False]


async def letters_of(backend: Backend) -> list[tuple[str, list[bytes]]]:
    """The dead letters of all shards, with their entries."""
    found: list[tuple[str, list[bytes]]] = []
    for shard in range(backend.shard_map.count):
        for letter_id in (await backend.operations.dead_letters(shard, 10)).items:
            letter = await backend.operations.dead_letter(letter_id)
            assert letter is not None
            found.append((letter_id, [*letter.entries]))
    return found


@scene("reshard")
async def resharding(stage: Stage) -> AsyncGenerator[Call]:
    yield partial(stage.backend.operations.reshard, OTHERWISE)
    assert await stage.backend.operations.reshard(OTHERWISE)  # begun by now in any case
    with pytest.raises(InvalidState, match=rf"on its way from {stage.ground.shards} to {OTHERWISE} shards"):
        await stage.backend.operations.reshard(OTHERWISE + 1)
    assert await stage.backend.operations.drain() == {"waiting": len(stage.ground.probes)}
    await deliver_all(stage)
    assert await stage.backend.operations.drain() == {}
    await has_moved(stage)


@on_each(
    "drain",
    lambda stage, _: stage.backend.operations.drain(),
    lambda stage, _: listed(stage.engine.reshard(OTHERWISE)),
    engine_name="reshard",
)
async def draining(act: Act, stage: Stage) -> AsyncGenerator[Call]:
    letter = await buried(stage.behind)
    await draining_begins(stage)
    behind = stage.behind.backend
    counts, letters = await behind.operations.counts(), await letters_of(behind)
    assert [letter_id for letter_id, _ in letters] == [letter]
    yield partial(act, stage, "")
    assert not await act(stage, "")
    assert await behind.operations.counts() == counts
    assert await letters_of(behind) == letters
    await has_moved(stage)


def test_there_is_a_scene_for_every_coroutine_of_a_backend() -> None:
    classes = (Backend, RedisBackend, Operations, RedisOperations)
    assert set(BACKEND) == set[str]().union(*map(public, classes))


def on_stage(ground: Ground, name: str, state: str) -> Scene:
    """A scene of a backend whose scripts are "known" or "unknown" to its servers, or which has "lost" its servers.

    That of ``connect`` is of a new backend, unless all is known.
    """

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with staged(ground) as stage, BACKEND[name](stage) as call:
            if name != "connect" or state == "known":
                await stage.backend.connect()
                await stage.backend.operations.look("d")
                if state == "lost":
                    await stage.loses_its_servers()
            if state == "unknown":
                for client in ground.clients:
                    client.script_flush()
            yield call
            if name in ("connect", "aclose"):
                await stage.backend.connect()
            await stage.is_in_step(stage.backend.operations.look)
            ears = name == "wait" and stage.connections() > ground.all_connections  # one more, if it was not cancelled
            await until(lambda: stage.connections() == ground.all_connections + ears)

    return play


@pytest.mark.parametrize(
    ("ground", "state"),
    [
        pytest.param("single", "known", id="known"),
        pytest.param("single", "unknown", id="unknown"),
        pytest.param("several", "lost", id="cluster", marks=pytest.mark.cluster),
    ],
    indirect=["ground"],
)
@pytest.mark.parametrize("name", BACKEND)
async def test_a_call_on_a_backend_may_be_cancelled_at_any_await(ground: Ground, name: str, state: str) -> None:
    moments = await cancel_everywhere(on_stage(ground, name, state))
    assert moments > 0 or name == "aclose"  # which waits for nothing


@pytest.mark.parametrize(
    ("ground", "name", "state"),
    [
        pytest.param("single", "connect", "known", id="connect"),
        pytest.param("single", "look", "known", id="look"),
        pytest.param("several", "look", "lost", id="look-cluster", marks=pytest.mark.cluster),
    ],
    indirect=["ground"],
)
async def test_a_call_on_a_backend_may_be_cancelled_at_any_turn_when_its_reply_has_come_too(
    ground: Ground, name: str, state: str
) -> None:
    assert await cancel_everywhere(on_stage(ground, name, state), at_turns) > 2


@pytest.mark.parametrize("ground", [SEVERAL], indirect=True)
@pytest.mark.parametrize("name", ["add", "claim", "look"])
async def test_a_call_that_meets_a_slot_which_has_moved_may_be_cancelled_at_any_await(
    ground: Ground, cluster: Cluster, name: str
) -> None:
    first, second, _ = cluster.nodes

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with staged(ground) as stage, BACKEND[name](stage) as call:
            await stage.backend.connect()
            await stage.is_in_step(stage.backend.operations.look)
            slot = key_slot(Layout(SHARDS).tag(stage.namespace, 0).encode())
            move(SlotMove(cluster, slot, first, second))
            yield call
            await stage.is_in_step(stage.backend.operations.look)
            move(SlotMove(cluster, slot, second, first))
            await stage.is_in_step(stage.backend.operations.look)

    def move(slot: SlotMove) -> None:
        slot.begin()
        slot.end()

    assert await cancel_everywhere(play) > 1


@on_both
async def test_calls_that_wait_for_a_connection_may_be_cancelled_at_any_await(ground: Ground) -> None:
    moment, cancelled = 0, True
    while cancelled:
        moment += 1
        async with staged(ground) as stage:
            await stage.backend.connect()
            await stage.loses_its_servers()  # they are sought for all calls at once, which make connections or wait
            some, more = ground.probes[::4], [key for key in ground.probes if key not in ground.probes[::4]]
            others = asyncio.gather(*(stage.backend.operations.look(key) for key in some))
            attempts = await asyncio.gather(*(at_awaits(stage.backend.operations.look(key), moment, 1) for key in more))
            cancelled = any(attempt.was_cancelled for attempt in attempts)
            assert [window and window.key for window in await others] == some
            await stage.is_in_step(stage.backend.operations.look)
            await until(lambda stage=stage: stage.connections() == ground.all_connections)
    assert moment > 4


@on_both
async def test_the_add_that_begins_a_namespace_may_be_cancelled_at_any_await(ground: Ground) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        store = Store(RedisBackend(ground.url, namespace=f"new-{next(_stages)}", shards=ground.shards))
        await store.backend.connect()
        yield partial(store.add, "d", "a", "b")
        assert [record for record, _ in await store.held("d")] in ([], ["a", "b"])
        await store.add("d", "a")
        assert await store.state("d") == "ready"
        await store.backend.aclose()

    assert await cancel_everywhere(play) > 2


async def test_an_add_that_too_few_replicas_have_may_be_cancelled_at_any_await(ground: Ground) -> None:
    [client] = ground.clients

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with replicating(ground) as (stage, waiting):

            async def give_up() -> None:
                await until(lambda: bool(blocked(client)))
                client.client_unblock(blocked(client)[0])

            async def add() -> None:
                with pytest.raises(BackendUnavailable, match="0 replicas"):
                    await waiting.add("d", "a")

            patience = asyncio.create_task(give_up())  # there is no replica, and nobody waits for the timeout
            yield add
            patience.cancel()
            await stage.is_in_step(waiting.backend.operations.look)
            await until(lambda: stage.connections() == CONNECTIONS)
            assert await waiting.held("d") in ([], [("a", "v")])

    assert await cancel_everywhere(play) > 1  # for the reply, and for the replicas


@pytest.mark.cluster
async def test_an_add_that_waits_for_a_replica_may_be_cancelled_at_any_await_and_leaves_its_room_to_others() -> None:
    async with replicated() as [primary, replica]:
        with primary.client() as client:
            ground = on_server(primary, client)

            async def fill(waiting: Store, name: str) -> None:
                """As many adds as may wait at once for a replica, which stands still until all of them do."""
                freeze(replica)
                adds = [waiting.add(f"{name}{number}", "a") for number in range(WAITERS)]
                answers = asyncio.gather(*adds)
                await until(lambda: len(blocked(client)) == WAITERS)
                thaw(replica)
                assert await answers == [[True]] * WAITERS

            @asynccontextmanager
            async def play() -> AsyncGenerator[Call]:
                async with replicating(ground) as (stage, waiting):
                    filling = asyncio.create_task(fill(waiting, "before"))
                    await asyncio.sleep(0)  # they have begun
                    yield partial(waiting.add, "d", "a")
                    await filling
                    assert await waiting.held("d") in ([], [("a", "v")])
                    await fill(waiting, "after")
                    await stage.is_in_step(waiting.backend.operations.look)
                    await until(lambda: stage.connections() == CONNECTIONS)

            try:
                assert await cancel_everywhere(play) > 2  # for room, for the reply, and for the replica
            finally:
                thaw(replica)


def blocked(client: Any) -> list[str]:
    """The connections on which somebody waits at a server."""
    return [each["id"] for each in client.client_list() if "b" in each["flags"]]


@asynccontextmanager
async def replicating(ground: Ground) -> AsyncGenerator[tuple[Stage, Store]]:
    """A stage, and a store on it whose adds wait for a replica."""
    async with staged(ground, moves=False) as stage:
        url = f"{ground.address}?client_name={stage.namespace}"
        waiting = Store(RedisBackend(url, namespace=stage.namespace, wait_replicas=1))
        try:
            await waiting.backend.connect()
            yield stage, waiting
        finally:
            await waiting.backend.aclose()


# What is called on an engine


async def slow_policy(key: str) -> Policy:
    """A policy that is awaited."""
    await asyncio.sleep(0)
    return AT_ONCE


@asynccontextmanager
async def engine_staged(ground: Ground, *, late: bool = False) -> AsyncGenerator[EngineStage]:
    async with staged(ground, moves=False) as stage, ground.entrance(stage.namespace) as (address, arrive):
        if not late:
            arrive()
        url = f"{address}?client_name={stage.namespace}"
        engine = DigestEngine[JSON](url, namespace=stage.namespace, policy=slow_policy, drain_timeout=0.1)
        yield EngineStage(stage.store, stage.behind, stage.namespace, ground, engine, arrive)


async def held(stage: EngineStage, key: str = "d") -> list[str]:
    return [record for record, _ in await stage.behind.held(key)]


@engine_scene("add")
async def adding_one(stage: EngineStage) -> AsyncGenerator[Call]:
    yield partial(stage.engine.add, "d", "v", record_id="a")
    await stage.engine.add("d", "v", record_id="a")
    await stage.engine.add("d", "v", record_id="b")
    assert set(await held(stage)) == {"a", "b"}
    assert await stage.behind.state("d") == "ready"


@engine_scene("add_many")
async def adding_many(stage: EngineStage) -> AsyncGenerator[Call]:
    keys = ["d", *{stage.behind.backend.shard_map.shard_of(key): key for key in stage.ground.probes}.values()]
    before = {key: await held(stage, key) for key in keys}
    entries = [Entry(key, "v", record_id=name) for name in "abc" for key in keys]
    yield partial(stage.engine.add_many, entries)
    stored = {key: await held(stage, key) for key in keys}
    assert all(stored[key] in (before[key], [*before[key], "a", "b", "c"]) for key in keys)
    begins = [entry.record_id == "a" and not stored[entry.key] for entry in entries]
    assert await stage.engine.add_many(entries) == begins
    assert {key: await held(stage, key) for key in keys} == {key: [*stored[key], "a", "b", "c"] for key in keys}


@engine_scene("reschedule")
async def rescheduling_one(stage: EngineStage) -> AsyncGenerator[Call]:
    await stage.behind.add("d", "a", policy=PATIENT)
    yield partial(stage.engine.reschedule, "d", delay=900)
    due = await stage.engine.reschedule("d", delay=900)
    timeline = await stage.engine.peek("d")
    assert timeline is not None
    assert timeline.due == due


async def stats_of(engine: DigestEngine[JSON]) -> Stats:
    """But for what grows while one looks."""
    return replace(await engine.stats(), overdue=0)


async def reason_of(engine: DigestEngine[JSON]) -> str:
    return (await engine.health()).reason


async def listed(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


engine_scene("peek")(partial(looking, lambda engine, _: engine.peek("d")))
engine_scene("stats")(partial(looking, lambda engine, _: stats_of(engine)))
engine_scene("health")(partial(looking, lambda engine, _: reason_of(engine)))
engine_scene("examine")(partial(looking, lambda engine, _: names_of(engine.examine())))
engine_scene("timelines")(partial(looking, lambda engine, _: listed(engine.timelines())))
engine_scene("dead_letters")(partial(looking, lambda engine, _: listed(engine.dead_letters())))
engine_scene("dead_letter")(partial(looking, lambda engine, letter: engine.dead_letter(letter)))


# what is more than one call of the backend, each of which is cancelled on a cluster, too
WIDE = ("add", "add_many", "timelines")


@pytest.mark.parametrize(
    ("ground", "name", "late"),
    [
        *(pytest.param("single", name, False, id=f"{name}-connected") for name in ENGINE),
        *(pytest.param("single", name, True, id=f"{name}-connecting") for name in ENGINE),
        *(pytest.param("several", name, True, id=f"{name}-cluster", marks=pytest.mark.cluster) for name in WIDE),
    ],
    indirect=["ground"],
)
async def test_a_call_on_an_engine_may_be_cancelled_at_any_await(ground: Ground, name: str, late: bool) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(ground, late=late) as stage, stage.engine, ENGINE[name](stage) as call:
            if late:
                stage.arrive()
                for client in ground.clients:
                    client.script_flush()
            else:
                await stage.engine.add("another", 1)  # with the first one come the tasks that send adds
                await stage.engine.delete("another")
            before = asyncio.all_tasks()
            yield call
            await stage.is_in_step(stage.engine.peek)
            await until(lambda: stage.connections() == ground.all_connections)
            if not late:
                await until(lambda: asyncio.all_tasks() <= before)

    assert await cancel_everywhere(play) > 0


# Entering and leaving

IN: dict[str, Callable[[DigestEngine[JSON], Inbox], AbstractAsyncContextManager[object]]] = {
    "__aenter__": lambda engine, _: engine,
    "delivering": lambda engine, inbox: engine.delivering(inbox),
    "lifespan": lambda engine, inbox: (engine.deliver(inbox), engine.lifespan(None))[1],
}
INTO = [
    *(pytest.param("single", name, id=name) for name in IN),
    pytest.param("several", "delivering", id="cluster", marks=pytest.mark.cluster),
]


def test_there_is_a_scene_for_every_coroutine_of_an_engine() -> None:
    assert {*ENGINE, *IN, "__aexit__", "run"} == public(DigestEngine)


async def is_left(stage: EngineStage) -> None:
    """The engine has let go of the server, and holds no lease: what it was given can be had at once, uncharged."""
    with pytest.raises(ConfigurationError, match="not entered"):
        await stage.engine.stats()
    await until(lambda: not stage.connections())
    claims = await stage.behind.claims()
    assert {"d": 1}.items() <= {lease.key: lease.attempt for lease in claims.leases}.items()
    for lease in claims.leases:
        assert await stage.behind.release(lease, started=False)


async def comes_again(stage: EngineStage, digest: Digest[JSON] | None) -> None:
    """The engine, entered once more, delivers what was under delivery, and under the same id."""
    inbox = Inbox()
    async with asyncio.timeout(PATIENCE), stage.engine.delivering(inbox):
        await stage.engine.add("after", 1)
        while not {"d", "after"} <= {each.key for each in inbox.digests}:
            await inbox.digest(len(inbox.digests) + 1)
    [again] = [each for each in inbox.digests if each.key == "d"]
    assert sorted(record.id for record in again.records) == ["a", "b"]
    assert digest is None or digest.id == again.id


@pytest.mark.parametrize(("ground", "name"), INTO, indirect=["ground"])
async def test_entering_an_engine_may_be_cancelled_at_any_await(ground: Ground, name: str) -> None:
    assert await cancel_everywhere(entering(ground, name)) > 1


async def test_entering_an_engine_may_be_cancelled_at_any_turn(ground: Ground) -> None:
    assert await cancel_everywhere(entering(ground, "delivering"), at_turns) > 1


def entering(ground: Ground, name: str) -> Scene:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(ground) as stage:
            await stage.behind.add("d", "a", "b", value=VALUE)
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

    return play


@pytest.mark.parametrize(("ground", "name"), INTO, indirect=["ground"])
async def test_leaving_an_engine_may_be_cancelled_at_any_await(ground: Ground, name: str) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(ground) as stage:
            await stage.behind.add("d", "a", "b", value=VALUE)
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


@on_both
async def test_running_an_engine_may_be_cancelled_at_any_await(ground: Ground) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        async with engine_staged(ground) as stage:
            await stage.behind.add("d", "a", "b", value=VALUE)

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
        await engine.add("d", 1)
        await inbox.digest()
        adds = [asyncio.create_task(engine.add("new", number)) for number in range(3)]
        await asyncio.sleep(0)
        yield partial(inside.__aexit__, None, None, None)
        await asyncio.gather(*adds)
        assert len(backend.machines[0].held["new"].log) == 3
        assert not backend.machines[0].leased
        assert backend.closed == ["backend"]
        if await backend.operations.look("d") is not None:  # its outcome is unknown
            async with engine.delivering(after):
                await after.digest(2)
            [again] = [digest for digest in after.digests if digest.key == "d"]
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
            await engine.add("d", 1)
            await inbox.digest()
            if not is_leaving:
                await asyncio.sleep(130)
        was_cancelled = steps.count >= moment
        if is_leaving and was_cancelled:
            async with asyncio.timeout(130), engine.delivering(after):
                await after.digest()
        digests = [*inbox.digests, *after.digests]
        assert [(digest.id, digest.attempt) for digest in digests[1:]] == [(digests[0].id, 2)] * was_cancelled
        assert await backend.operations.look("d") is None
    assert moment == 4


@virtual_time
async def test_an_add_that_is_cancelled_while_it_waits_is_withdrawn_and_its_room_is_another_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiodigest.worker.batcher.QUEUE_ITEMS", 2)

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
                answers.append(await engine.add("d", 1))

            yield add
            await asyncio.gather(*adds)
            assert answers == ([] if await backend.operations.look("d") is None else [True])
            assert await engine.add("d", 2) == (not answers)

    assert await cancel_everywhere(play) == 3  # for its policy, for room, and for its answer
