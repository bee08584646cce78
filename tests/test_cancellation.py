"""Public coroutines of engine and backend, cancelled at every await: nothing is out of step or lost after it.

A call that is cancelled has happened whole or not at all: the store is as it was, or as it would be if the call had
been answered, and the same call answers then as it would have. Nothing is leased for longer than a lease.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, unwrap
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cancelling import PATIENCE, Call, Scene, Steps, Way, at_awaits, at_turns, cancel_everywhere
from clusters import Cluster, running_cluster
from clusters import Move as SlotMove
from engines import CODEC, Inbox, WatchedBackend, engine_on, forever, policy, virtual_time
from redis.crc import key_slot
from replicas import freeze, replicated, thaw
from servers import running_server
from stores import LEASE, MINUTE, Store, ids
from storestate import check_invariants, redis_state

from aiodigest import JSON, Digest, DigestEngine, Entry, Finding, Policy, Throttle, Timeline
from aiodigest.backend import Backend, Close, Lease, Move, Mute, Operations, StoredTimeline
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections import server as connection
from aiodigest.backends.redis.connections.server import CONNECTIONS, WAITERS
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.operations import RedisOperations
from aiodigest.errors import AiodigestError, ConfigurationError
from aiodigest.records.entries import identity_of

NAME = "stage"  # of the namespace, and of the connections of what is cancelled
OTHERWISE = 4  # shards of the layout that a namespace may go over to
SHARDS = 3  # on a cluster, one for each primary
FEW = 2  # connections to each of its primaries, of which these tests need no more
PROBES = [f"probe{number}" for number in range(2 * CONNECTIONS)]  # timelines; to ask for all takes every connection
PATIENT = Policy(initial_delay=1_500)  # what is added under it is not due while a test lasts
AT_ONCE = Policy(minimum_delay=0)
LIMITS = AT_ONCE.terms.limits
VALUE = CODEC.encode("v").decode()


@dataclass
class Ground:
    """A server or a cluster, and the clients of its primaries, which may do all."""

    url: str
    address: str  # for one who may do all
    clients: Sequence[Any]
    shards: int = 1
    connections: int = CONNECTIONS  # that a backend may have to each primary

    @property
    def all_connections(self) -> int:
        return self.connections * len(self.clients)


@pytest.fixture(scope="module")
def single() -> Iterator[Ground]:
    """A server for these tests alone, since they make it forget its scripts."""
    with running_server() as server, server.client() as client:
        yield Ground(server.url, f"unix://{server.socket}", [client])


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
        yield Ground(cluster.url, address, clients, SHARDS, FEW)


@pytest.fixture
def ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """A single server, unless a test says otherwise."""
    found = request.getfixturevalue(getattr(request, "param", "single"))
    monkeypatch.setattr(connection, "CONNECTIONS", found.connections)
    return found


def on_ground(ground: str, *values: object, name: str) -> Any:
    """Arguments of a test, the first of which is the ground."""
    return pytest.param(ground, *values, id=name, marks=[pytest.mark.cluster] if ground == "several" else [])


on_both = pytest.mark.parametrize(
    "ground", [on_ground("single", name="server"), on_ground("several", name="cluster")], indirect=True
)


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


async def slow_policy(key: str) -> Policy:
    """A policy that is awaited."""
    await asyncio.sleep(0)
    return AT_ONCE


@dataclass
class Stage:
    """A namespace on real servers, with a timeline for each probe."""

    ground: Ground
    store: Store  # on the backend that calls are cancelled of
    behind: Store  # on another, which works behind its back
    engine: DigestEngine[JSON]  # on the first one; not entered

    @property
    def backend(self) -> RedisBackend:
        assert isinstance(self.store.backend, RedisBackend)
        return self.store.backend

    def connections(self) -> int:
        """How many the first backend has."""
        return sum(each["name"] == NAME for client in self.ground.clients for each in client.client_list())

    def snapshot(self) -> dict[str, Any]:
        """What the servers hold, by shard; of one that was given up for another layout there are only its marks."""
        keys = {key: client for client in self.ground.clients for key in client.scan_iter(count=1000)}
        found: dict[str, Any] = {}
        for tag, client in {key[1 : key.index(b"}")].decode(): client for key, client in keys.items()}.items():
            layout = f"{{{tag}}}:layout"
            marks = client.hmget(layout, "version", "current", "drains")
            found[tag] = marks, None if client.pttl(layout) > 0 else redis_state(client, tag)
        return found

    @property
    def leased(self) -> list[bytes]:
        return [key for _, state in self.snapshot().values() if state for key in state["leased"]]

    async def is_in_step(self, look: Callable[[str], Awaitable[StoredTimeline | Timeline[JSON] | None]]) -> None:
        """Every connection is: twice as much is asked at once as there are, and each gets what was asked for."""
        if await self.behind.state(PROBES[0]) is None:  # erased
            await probe(self)
        async with asyncio.timeout(PATIENCE):
            found = await asyncio.gather(*map(look, PROBES))
        assert [timeline and timeline.key for timeline in found] == PROBES

    async def loses_its_servers(self) -> None:
        """The backend has to make its connections anew, and to ask in a cluster which node has which slots."""
        for shard in range(self.backend.shard_map.count):
            await self.backend.namespace.leave(shard)


@asynccontextmanager
async def staged(ground: Ground, address: str = "", **options: Any) -> AsyncGenerator[Stage]:
    """A new namespace, whose clock is moved by ``store.now``, and what must be true of it in the end."""
    numbers = count()

    def store_at(url: str, **options: Any) -> Store:
        return Store(RedisBackend(url, namespace=NAME, now=lambda: store.now, **options))

    for client in ground.clients:
        client.flushdb()  # what the one before has left
    store = store_at(f"{address or ground.address}?client_name={NAME}", **options)
    behind = store_at(ground.url, shards=ground.shards, nonce=lambda: f"n{next(numbers)}")
    engine = DigestEngine[JSON](namespace=NAME, backend=store.backend, policy=slow_policy, drain_timeout=0.1)
    stage = Stage(ground, store, behind, engine)
    try:
        await behind.backend.connect()
        await probe(stage)
        yield stage
    finally:
        await behind.backend.aclose()
        await store.backend.aclose()
    await until(lambda: not stage.connections())
    for _, state in stage.snapshot().values():
        if state:
            check_invariants(state)


async def nothing(stage: Stage) -> None: ...


async def probe(stage: Stage) -> None:
    for key in PROBES:
        await stage.behind.add(key, key, policy=PATIENT)


async def add(stage: Stage) -> None:
    await stage.behind.add("d", "a", "b")


async def add_later(stage: Stage) -> None:
    await stage.behind.add("d", "a", policy=PATIENT)


async def add_muted(stage: Stage) -> None:
    await add(stage)
    await stage.behind.backend.mute("d", Mute(), LIMITS)


async def add_due(stage: Stage) -> None:
    await stage.behind.add("d", "a", policy=Policy(initial_delay=60))
    stage.store.now += MINUTE


async def lease(stage: Stage, looks: int = 1) -> Lease:
    """A digest that the backend may deliver; its worker has looked in a few times since it was claimed."""
    await add(stage)
    lease = await stage.behind.claim()
    for _ in range(looks):
        stage.store.now += LEASE // 3
        await stage.behind.claims(0)
    return lease


async def lease_that_ends(stage: Stage) -> None:
    await lease(stage, 2)
    stage.store.now += LEASE // 3


async def bury(stage: Stage) -> str:
    """The dead letter of a timeline."""
    await stage.behind.add("d", "a", "b", value=VALUE)
    await stage.behind.close(await stage.behind.claim(), letter="bad", cool=0)
    [letter] = (await stage.behind.backend.operations.dead_letters(0, 10)).items
    return letter


async def bury_and_add(stage: Stage) -> str:
    letter = await bury(stage)
    await stage.behind.add("d", "c")
    return letter


async def lose_all(stage: Stage) -> None:
    """The backend has to begin the namespace whose layout it knows."""
    await stage.backend.connect()
    for client in stage.ground.clients:
        client.flushdb()


async def drain(stage: Stage) -> None:
    """What is left to do with the old shards is to move their dead letters and counters; the probes are elsewhere."""
    await bury(stage)
    behind = stage.behind.backend
    for key in PROBES:
        await behind.flush(key)
    for shard in range(behind.shard_map.count):
        leases = (await stage.behind.claims(100, shard)).leases
        await behind.close(shard, [Close(lease, lease.size, lease.size, 0, LIMITS, LEASE) for lease in leases])
    assert await behind.operations.reshard(OTHERWISE)
    await probe(stage)


async def answer_of(call: Awaitable[object]) -> object:
    """What a call answers, or the error that it raises."""
    try:
        return await call
    except AiodigestError as error:
        return repr(error)


@dataclass(frozen=True)
class Cancelled:
    """A call that is cancelled, on a stage and with what was made ready for it."""

    call: Callable[[Stage, Any], Coroutine[Any, Any, object]]
    prepare: Callable[[Stage], Awaitable[object]] = nothing
    in_steps: bool = False  # it is several transitions, and goes on with those that are left if it is called again
    holds: Callable[[Stage], Awaitable[object]] | None = None  # what must, if that is another thing than of most calls

    def scene(self, begun: Callable[[], AbstractAsyncContextManager[tuple[Stage, object]]]) -> Scene:
        """See first what the call does and answers, and when made again; then what is left of it when cancelled."""
        states, answers = list[object](), list[object]()

        @asynccontextmanager
        async def play() -> AsyncGenerator[Call]:
            if not states:
                async with begun() as (stage, ready):
                    states.append(stage.snapshot())
                    for _ in range(2):
                        answers.append(await answer_of(self.call(stage, ready)))
                        states.append(stage.snapshot())
            async with begun() as (stage, ready):
                yield partial(self.call, stage, ready)
                if self.holds is not None:
                    await self.holds(stage)
                    return
                found = stage.snapshot()
                answer = await answer_of(self.call(stage, ready))
                if self.in_steps:
                    assert stage.snapshot() in states[1:]
                else:
                    assert found in states[:2]
                    happened = states.index(found)
                    assert (answer, stage.snapshot()) == (answers[happened], states[happened + 1])
                if stage.leased:
                    await stage.store.lapse()
                    await stage.store.claim()  # it comes again

        return play


async def is_told(call: Awaitable[object]) -> bool:
    """Return True if there is an answer, which may be another one each time."""
    return await call is not None


async def deliver_by_hand(stage: Stage, _: object) -> None:
    async with stage.backend.digest("d", AT_ONCE, LEASE):
        await asyncio.sleep(0)


async def is_delivered_or_claimed_again(stage: Stage) -> None:
    """It is closed, or to be had now, or after a lease, with all that it held; at the cost of one attempt."""
    if await stage.store.state("d") is None:
        assert (await stage.backend.operations.counts())["digests"] == 1
        return
    if await stage.store.state("d") == "leased":
        await stage.store.lapse()
    lease = await stage.store.claim()
    assert (ids(lease), lease.attempt <= 2) == (["a", "b"], True)


async def is_woken(stage: Stage) -> None:
    """The next wait hears of what comes next, and of nothing before."""
    bell = await stage.backend.wait(0, "0-0")
    await stage.store.close(await stage.store.claim())
    blocked = asyncio.create_task(stage.backend.wait(0, bell))
    await stage.behind.add("other", "a")
    async with asyncio.timeout(PATIENCE):
        assert await blocked == (await stage.behind.claims()).wake_up != bell


async def leases_of(stage: Stage) -> Sequence[Lease]:
    return (await stage.store.claims()).leases


async def names_of(findings: Awaitable[list[Finding]]) -> list[str]:
    """Of what every user may see; values are others at each look."""
    checks = [finding.check for finding in await findings]
    return [check for check in checks if check in ("version", "shards", "namespace", "overdue", "dead letters")]


async def listed(items: AsyncIterator[object]) -> list[object]:
    return [item async for item in items]


MOVE = Move(PATIENT.terms, delay_ms=MINUTE)
BACKEND = {
    "connect": Cancelled(lambda stage, _: stage.backend.connect()),
    "aclose": Cancelled(lambda stage, _: stage.backend.aclose()),
    "add": Cancelled(lambda stage, _: stage.store.add("d", "a", "b")),
    "add first": Cancelled(lambda stage, _: stage.store.add("d", "a", "b"), lose_all, in_steps=True),
    "claim": Cancelled(lambda stage, _: leases_of(stage), add),
    "open": Cancelled(lambda stage, _: stage.backend.open(0, "d", LEASE, LIMITS), add),
    "read": Cancelled(lambda stage, lease: stage.backend.read(0, lease, 0, 10), lease),
    "renew": Cancelled(lambda stage, lease: stage.backend.renew(0, [lease], LEASE), lease),
    "close": Cancelled(lambda stage, lease: stage.store.close(lease), lease),
    "retry": Cancelled(lambda stage, lease: stage.store.retry(lease), lease),
    "release": Cancelled(lambda stage, lease: stage.store.release(lease, started=True), lease),
    "postpone": Cancelled(lambda stage, lease: stage.store.postpone(lease), lease),
    "throttle": Cancelled(lambda stage, _: stage.backend.throttle(0, Throttle(5, per=60).rate, 1)),
    "wait": Cancelled(lambda stage, _: stage.backend.wait(0, "0-0"), add, holds=is_woken),
    "clock_ms": Cancelled(lambda stage, _: is_told(stage.backend.clock_ms(0))),
    # a transition in each shard, which notes the time
    "schedule": Cancelled(lambda stage, _: stage.backend.schedule(), add_due, in_steps=True),
    "maintenance": Cancelled(lambda stage, _: stage.backend.maintenance(), lease_that_ends, in_steps=True),
    "digest": Cancelled(deliver_by_hand, add, holds=is_delivered_or_claimed_again),
    "delete": Cancelled(lambda stage, _: stage.backend.delete("d"), add),
    "flush": Cancelled(lambda stage, _: stage.backend.flush("d"), add_later),
    "mute": Cancelled(lambda stage, _: stage.backend.mute("d", Mute(), LIMITS), add),
    "unmute": Cancelled(lambda stage, _: stage.backend.unmute("d", LIMITS), add_muted),
    "remove": Cancelled(lambda stage, _: stage.backend.remove("d", identity_of(b"a"), LIMITS), add),
    "reschedule": Cancelled(lambda stage, _: stage.backend.reschedule("d", MOVE), add_later),
    "replay": Cancelled(lambda stage, letter: stage.backend.replay(letter, AT_ONCE.terms, False), bury),
    "discard": Cancelled(lambda stage, letter: stage.backend.discard(letter), bury),
    "look": Cancelled(lambda stage, _: stage.backend.operations.look("d"), add),
    "look_all": Cancelled(lambda stage, _: stage.backend.operations.look_all("d"), add),
    "cooling": Cancelled(lambda stage, _: stage.backend.operations.cooling("d"), add),
    "entries": Cancelled(lambda stage, _: stage.backend.operations.entries("d"), add),
    "page": Cancelled(lambda stage, _: stage.backend.operations.page(0, "waiting", 10)),
    "counts": Cancelled(lambda stage, _: stage.backend.operations.counts(), bury_and_add),
    "examine": Cancelled(lambda stage, _: names_of(stage.backend.operations.examine()), bury_and_add),
    "dead_letters": Cancelled(lambda stage, _: stage.backend.operations.dead_letters(0, 10), bury),
    "dead_letter": Cancelled(lambda stage, letter: stage.backend.operations.dead_letter(letter), bury),
    "namespaces": Cancelled(lambda stage, _: stage.backend.operations.namespaces(), bury),
    "exists": Cancelled(lambda stage, _: stage.backend.operations.exists(), bury),
    "try_erase": Cancelled(lambda stage, _: stage.backend.operations.try_erase(), bury),
    "erase": Cancelled(lambda stage, _: stage.backend.operations.erase(), bury, in_steps=True),
    "reshard": Cancelled(lambda stage, _: stage.backend.operations.reshard(OTHERWISE), in_steps=True),
    "drain": Cancelled(lambda stage, _: stage.backend.operations.drain(), drain, in_steps=True),
}


async def add_many(stage: Stage) -> list[bool]:
    """Three records for "d", and as many for a probe of each shard."""
    return await stage.engine.add_many([Entry(key, "v", record_id=name) for name in "abc" for key in keys_of(stage)])


def keys_of(stage: Stage) -> list[str]:
    return ["d", *{stage.behind.backend.shard_map.shard_of(key): key for key in PROBES}.values()]


async def held(stage: Stage, key: str) -> list[str]:
    return [record for record, _ in await stage.behind.held(key)]


async def each_is_added_whole(stage: Stage) -> None:
    """The records of a timeline are stored together, whatever became of those of others; and so when added again."""
    before = {key: [key] if key in PROBES else [] for key in keys_of(stage)}
    stored = {key: await held(stage, key) for key in before}
    assert all(stored[key] in (before[key], [*before[key], *"abc"]) for key in before)
    assert await add_many(stage) == [name == "a" and not stored[key] for name in "abc" for key in before]
    assert {key: await held(stage, key) for key in before} == {key: [*stored[key], *"abc"] for key in before}


ENGINE = {
    "add": Cancelled(lambda stage, _: stage.engine.add("d", "v", record_id="a")),
    "add_many": Cancelled(lambda stage, _: add_many(stage), holds=each_is_added_whole),
    "delete": Cancelled(lambda stage, _: stage.engine.delete("d"), add),
    "flush": Cancelled(lambda stage, _: stage.engine.flush("d"), add_later),
    "mute": Cancelled(lambda stage, _: stage.engine.mute("d"), add),
    "unmute": Cancelled(lambda stage, _: stage.engine.unmute("d"), add_muted),
    "remove": Cancelled(lambda stage, _: stage.engine.remove("d", "a"), add),
    "reschedule": Cancelled(lambda stage, _: stage.engine.reschedule("d", delay=900), add_later),
    "replay": Cancelled(lambda stage, letter: stage.engine.replay(letter), bury),
    "discard": Cancelled(lambda stage, letter: stage.engine.discard(letter), bury),
    "peek": Cancelled(lambda stage, _: stage.engine.peek("d"), bury_and_add),
    "stats": Cancelled(lambda stage, _: stage.engine.stats(), bury_and_add),
    "health": Cancelled(lambda stage, _: stage.engine.health(), bury_and_add),
    "examine": Cancelled(lambda stage, _: names_of(stage.engine.examine()), bury_and_add),
    "timelines": Cancelled(lambda stage, _: listed(stage.engine.timelines()), bury_and_add),
    "explain": Cancelled(lambda stage, _: is_told(stage.engine.explain("d")), bury_and_add),
    "dead_letters": Cancelled(lambda stage, _: listed(stage.engine.dead_letters()), bury),
    "dead_letter": Cancelled(lambda stage, letter: stage.engine.dead_letter(letter), bury),
    "try_erase": Cancelled(lambda stage, _: stage.engine.try_erase(), bury),
    "erase": Cancelled(lambda stage, _: stage.engine.erase(), bury, in_steps=True),
    "reshard": Cancelled(lambda stage, _: listed(stage.engine.reshard(OTHERWISE)), drain, in_steps=True),
}
IN: dict[str, Callable[[DigestEngine[JSON], Inbox], AbstractAsyncContextManager[object]]] = {
    "__aenter__": lambda engine, _: engine,
    "delivering": lambda engine, inbox: engine.delivering(inbox),
    "lifespan": lambda engine, inbox: (engine.deliver(inbox), engine.lifespan(None))[1],
}


def test_every_coroutine_of_a_backend_and_of_an_engine_is_cancelled() -> None:
    classes = (Backend, RedisBackend, Operations, RedisOperations)
    assert {name.partition(" ")[0] for name in BACKEND} == set[str]().union(*map(public, classes))
    assert {*ENGINE, *IN, "__aexit__", "run"} == public(DigestEngine)


STATES = [
    *(on_ground("single", name, "known", at_awaits, name=f"{name}-known") for name in BACKEND),
    *(on_ground("single", name, "unknown", at_awaits, name=f"{name}-unknown") for name in BACKEND),
    *(on_ground("several", name, "lost", at_awaits, name=f"{name}-cluster") for name in BACKEND),
    *(on_ground("several", name, "moved", at_awaits, name=f"{name}-moved") for name in ("add", "claim", "look")),
    *(on_ground("single", name, "known", at_turns, name=f"{name}-turn") for name in ("connect", "look")),
    on_ground("several", "look", "lost", at_turns, name="look-cluster-turn"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("ground", "name", "state", "way"), STATES, indirect=["ground"])
async def test_a_call_on_a_backend_may_be_cancelled_at_any_await(
    ground: Ground, name: str, state: str, way: Way, request: pytest.FixtureRequest
) -> None:
    """Its scripts are known or unknown to its servers, or it has lost them.

    Or the slot of its timeline has moved, which it has not heard of. ``connect`` is of a new backend, unless all is
    known.
    """
    cancelled = BACKEND[name]

    def move(*ends: int) -> None:
        if state == "moved":
            cluster: Cluster = request.getfixturevalue("cluster")
            source, target = (cluster.nodes[end] for end in ends)
            SlotMove(cluster, key_slot(Layout(SHARDS).tag(NAME, 0).encode()), source, target).make()

    @asynccontextmanager
    async def begun() -> AsyncGenerator[tuple[Stage, object]]:
        async with staged(ground, nonce=lambda: "nonce") as stage:
            ready, look = await cancelled.prepare(stage), stage.backend.operations.look
            if name != "connect" or state == "known":
                await stage.backend.connect()
                await look("d")
                if state == "lost":
                    await stage.loses_its_servers()
            if state == "unknown":
                for client in ground.clients:
                    client.script_flush()
            move(0, 1)
            yield stage, ready
            await stage.backend.connect()  # if that is what was cancelled, or it was closed
            await stage.is_in_step(look)
            if state == "moved":
                move(1, 0)
                await stage.is_in_step(look)
            ears = name == "wait"  # one more, if it was not cancelled
            await until(lambda: 0 <= stage.connections() - ground.all_connections <= ears)

    moments = await cancel_everywhere(cancelled.scene(begun), way)
    assert moments > (0 if way is at_awaits else 2) or name in ("aclose", "clock_ms")  # which may wait for nothing


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ground", "name", "state"),
    [
        *(on_ground("single", name, "connected", name=f"{name}-connected") for name in ENGINE),
        *(on_ground("single", name, "connecting", name=f"{name}-connecting") for name in ENGINE),
        # more calls of the backend than one
        *(on_ground("several", name, "lost", name=f"{name}-cluster") for name in ("add", "add_many", "timelines")),
    ],
    indirect=["ground"],
)
async def test_an_engines_call_may_be_cancelled_at_any_await(ground: Ground, name: str, state: str, data: Path) -> None:
    cancelled, place = ENGINE[name], data / "s"

    @asynccontextmanager
    async def begun() -> AsyncGenerator[tuple[Stage, object]]:
        address = f"unix://{place}" if state == "connecting" else ""
        async with staged(ground, address, nonce=lambda: "nonce") as stage, stage.engine:
            ready = await cancelled.prepare(stage)
            if state == "connecting":
                place.symlink_to(ground.address.removeprefix("unix://"))
                for client in ground.clients:
                    client.script_flush()
            else:
                await stage.engine.add("another", 1)  # with the first one come the tasks that send adds
                await stage.engine.delete("another")
            if state == "lost":
                await stage.loses_its_servers()
            before = asyncio.all_tasks()
            yield stage, ready
            await stage.is_in_step(stage.engine.peek)
            await until(lambda: stage.connections() == ground.all_connections)
            await until(lambda: state != "connected" or asyncio.all_tasks() <= before)
        place.unlink(missing_ok=True)

    assert await cancel_everywhere(cancelled.scene(begun)) > 0


@on_both
async def test_calls_that_wait_for_a_connection_may_be_cancelled_at_any_await(ground: Ground) -> None:
    moment, cancelled = 0, True
    while cancelled:
        moment += 1
        async with staged(ground) as stage:
            await stage.backend.connect()
            await stage.loses_its_servers()  # they are sought for all calls at once, which make connections or wait
            look, some = stage.backend.operations.look, PROBES[::4]
            others = asyncio.gather(*map(look, some))
            attempts = await asyncio.gather(*(at_awaits(look(key), moment, 1) for key in PROBES if key not in some))
            cancelled = any(attempt.was_cancelled for attempt in attempts)
            assert [window and window.key for window in await others] == some
            await stage.is_in_step(look)
            await until(lambda stage=stage: stage.connections() == ground.all_connections)
    assert moment > 4


@pytest.mark.cluster
async def test_an_add_that_waits_for_a_replica_may_be_cancelled_at_any_await_and_leaves_its_room_to_others() -> None:
    async with replicated() as [primary, replica]:
        with primary.client() as client:
            ground = Ground(primary.url, f"unix://{primary.socket}", [client])

            async def fill(store: Store, name: str) -> None:
                """As many adds as may wait at once for a replica, which stands still until all of them do."""
                freeze(replica)
                adds = [store.add(f"{name}{number}", "a") for number in range(WAITERS)]
                answers = asyncio.gather(*adds)
                await until(lambda: sum("b" in each["flags"] for each in client.client_list()) == WAITERS)
                thaw(replica)
                assert await answers == [[True]] * WAITERS

            @asynccontextmanager
            async def play() -> AsyncGenerator[Call]:
                async with staged(ground, wait_replicas=1) as stage:
                    await stage.backend.connect()
                    filling = asyncio.create_task(fill(stage.store, "before"))
                    await asyncio.sleep(0)  # they have begun
                    yield partial(stage.store.add, "d", "a")
                    await filling
                    assert await held(stage, "d") in ([], ["a"])
                    await fill(stage.store, "after")
                    await stage.is_in_step(stage.backend.operations.look)
                    await until(lambda: stage.connections() == CONNECTIONS)

            try:
                assert await cancel_everywhere(play) > 2  # for room, for the reply, and for the replica
            finally:
                thaw(replica)


INTO = [*(on_ground("single", name, name=name) for name in IN), on_ground("several", "delivering", name="cluster")]


@asynccontextmanager
async def with_a_digest(ground: Ground, inbox: Inbox) -> AsyncGenerator[Stage]:
    """A stage on which an engine delivers to ``inbox``, and lets go of the server in the end.

    It then holds no lease: what it was given can be had at once, uncharged. Entered once more, it delivers what was
    under delivery, and under the same id.
    """
    async with staged(ground) as stage:
        await stage.behind.add("d", "a", "b", value=VALUE)
        yield stage
        with pytest.raises(ConfigurationError, match="not entered"):
            await stage.engine.stats()
        await until(lambda: not stage.connections())
        leases = (await stage.behind.claims()).leases
        assert {"d": 1}.items() <= {lease.key: lease.attempt for lease in leases}.items()
        for lease in leases:
            assert await stage.behind.release(lease, started=False)
        after = Inbox()
        async with asyncio.timeout(PATIENCE), stage.engine.delivering(after):
            await stage.engine.add("after", 1)
            while not {"d", "after"} <= {each.key for each in after.digests}:
                await after.digest(len(after.digests) + 1)
        [again] = [each for each in after.digests if each.key == "d"]
        assert sorted(record.id for record in again.records) == ["a", "b"]
        assert not inbox.digests or inbox.digests[0].id == again.id


@pytest.mark.parametrize(
    ("ground", "name", "way"),
    [
        *(on_ground("single", name, at_awaits, name=name) for name in IN),
        on_ground("several", "delivering", at_awaits, name="cluster"),
        on_ground("single", "delivering", at_turns, name="turn"),
    ],
    indirect=["ground"],
)
async def test_entering_an_engine_may_be_cancelled_at_any_await(ground: Ground, name: str, way: Way) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        inbox, entered = Inbox(forever), False
        async with with_a_digest(ground, inbox) as stage:
            inside = IN[name](stage.engine, inbox)

            async def enter() -> None:
                nonlocal entered
                await inside.__aenter__()
                entered = True

            yield enter
            if entered:
                await inside.__aexit__(None, None, None)

    assert await cancel_everywhere(play, way) > 1


@pytest.mark.parametrize(("ground", "name"), INTO, indirect=["ground"])
async def test_leaving_an_engine_may_be_cancelled_at_any_await(ground: Ground, name: str) -> None:
    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        inbox = Inbox(forever)
        async with with_a_digest(ground, inbox) as stage:
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

    assert await cancel_everywhere(play) > 0


@on_both
async def test_running_an_engine_may_be_cancelled_at_any_await(ground: Ground) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    async def end(digest: Digest[JSON]) -> None:
        signal.raise_signal(signal.SIGTERM)  # else a run that is not cancelled would never end
        await forever(digest)

    @asynccontextmanager
    async def play() -> AsyncGenerator[Call]:
        inbox = Inbox(end)
        async with with_a_digest(ground, inbox) as stage:
            yield partial(stage.engine.run, inbox)
            assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers

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
async def test_a_callback_cancelled_at_any_await_has_the_same_digest_within_two_leases(is_leaving: bool) -> None:
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
        assert [(digest.id, digest.attempt) for digest in digests[1:]] == [(digests[0].id, 1)] * was_cancelled
        assert await backend.operations.look("d") is None
    assert moment == 4
