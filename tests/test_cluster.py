"""Real clusters: what leads to them, and what goes on, and how, while primaries change, die, or give slots away."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import trustme
from clusters import Cluster, Move, Node, info, knows, running_cluster
from engines import PATIENCE, patiently, session_of
from ports import free_port
from redis.asyncio import RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.crc import key_slot
from replicas import Relay, server_on, until
from servers import PASSWORD, USER, commands, tls_binary
from stores import LEASE, Store
from storestate import check_invariants, redis_state
from traffic import NO_GAP, Inbox, Traffic

from aiodigest import BackendUnavailable, ConfigurationError, Digest, DigestEngine, Entry, PartialAdd, Policy, Throttle
from aiodigest.backend import Add, Lease, Mute
from aiodigest.backend import Move as Reschedule
from aiodigest.backends.redis import operations
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections import server as connection
from aiodigest.backends.redis.connections.calls import Connections, _address
from aiodigest.backends.redis.connections.url import read_url
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.scripts import load_script, load_scripts
from aiodigest.records.entries import identity_of, pack

pytestmark = pytest.mark.cluster

LATER = Policy(initial_delay=3600, maximum_delay=3600)
SHARDS = 16
BRIEF = 1.0  # the timeout, in seconds, of calls that are to fail


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three primaries, each with a replica, for tests that leave all of them alive."""
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def mortal() -> Iterator[Cluster]:
    with running_cluster(replicas=2) as running:
        yield running


@pytest.fixture
def fragile(mortal: Cluster) -> Cluster:
    """Three primaries, each with two replicas, so that one is left for the next primary."""
    with mortal.losing():
        mortal.mend()
    return mortal


@pytest.fixture(scope="module")
def lonely() -> Iterator[Cluster]:
    options = "--cluster-require-full-coverage", "no", "--appendonly", "yes", "--appendfsync", "always"
    with running_cluster(*options, replicas=0, steady=False) as running:
        yield running


@pytest.fixture
def bare(lonely: Cluster) -> Cluster:
    """Three primaries without replicas, each of which goes on without the others, and writes down what it has."""
    lonely.mend()
    return lonely


@pytest.fixture
def hole() -> Iterator[int]:
    """A port that is connected to, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def login(*ports: int) -> str:
    return f"redis+cluster://{USER}:{PASSWORD}@{','.join(f'127.0.0.1:{port}' for port in ports)}"


def client_of(*ports: int, **options: Any) -> Any:
    """A client that is not connected; engines take its settings."""
    nodes = [ClusterNode("127.0.0.1", port) for port in ports]
    settings: dict[str, Any] = {"username": USER, "password": PASSWORD, **options}
    return RedisCluster(startup_nodes=nodes, **settings)


def tag_of(namespace: str, shard: int) -> str:
    """The beginning of the keys of a shard."""
    return f"{{{Layout(SHARDS).tag(namespace, shard)}}}:"


def keys_in(shard: int) -> list[str]:
    """Some timelines of a shard."""
    return [key for key in (f"t{number}" for number in range(1_000)) if crc32(key.encode()) % SHARDS == shard]


KEYS = [keys_in(shard)[0] for shard in range(SHARDS)]


def shards_of(cluster: Cluster, namespace: str, node: Node) -> list[int]:
    holders = cluster.holders()
    return [shard for shard in range(SHARDS) if holders[slot_of(namespace, shard)] is node]


def slot_of(namespace: str, shard: int) -> int:
    return key_slot(tag_of(namespace, shard).encode())


def check_shards(cluster: Cluster, namespace: str) -> None:
    """All that is left of a namespace is where it belongs, and there is nothing that no set knows of."""
    holders = cluster.holders()
    for node in cluster.primaries:
        with node.client() as client:
            for shard in range(SHARDS):
                slot = slot_of(namespace, shard)
                if holders[slot] is node:
                    check_invariants(redis_state(client, tag_of(namespace, shard)[1:-2]))
                else:
                    assert client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10) == []


def engine_to(source: Any, namespace: str, **options: Any) -> DigestEngine[int]:
    settings: dict[str, Any] = {"policy": NO_GAP, "shards": SHARDS, "timeout": 60}
    return DigestEngine(source, namespace=namespace, value_type=int, drain_timeout=5, **{**settings, **options})


def traffic_to(cluster: Cluster, namespace: str, **options: Any) -> Traffic:
    return Traffic(cluster.url, namespace, KEYS, shards=SHARDS, **options)


async def test_one_host_of_a_url_is_enough_be_it_a_replica(cluster: Cluster, namespace: str, hole: int) -> None:
    inbox = Inbox()
    url = login(free_port(), hole, cluster.replica_of(cluster.primaries[0]).port, free_port())
    async with engine_to(url, namespace, timeout=5).delivering(inbox) as engine:
        for key in KEYS:
            await patiently(lambda key=key: engine.add(key, 1, record_id=key))
        await inbox.got(*KEYS)


async def test_a_node_without_slots_is_passed_over(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    empty = Node(tmp_path, free_port())
    empty.start()
    try:
        async with engine_to(login(empty.port, cluster.nodes[0].port), namespace) as engine:
            assert await engine.add_many([Entry(key, 1) for key in KEYS]) == [True] * SHARDS
        link = Connections(read_url(login(empty.port)), 5)
        with pytest.raises(BackendUnavailable, match="knows of no slots"):
            await link.command("k", "PING")
        await link.close()
    finally:
        empty.kill()


@pytest.mark.parametrize("hangs", [False, True])
async def test_without_a_host_that_answers_it_is_unavailable_in_time(namespace: str, hole: int, hangs: bool) -> None:
    url = login(free_port(), free_port(), *([hole] * 200 if hangs else []))  # each of which could take the timeout
    async with asyncio.timeout(100), engine_to(url, namespace, timeout=BRIEF) as engine:
        with pytest.raises(BackendUnavailable) as caught:
            await engine.add("key", 1, record_id="mine")
    assert (caught.value.stored, caught.value.record_id) == ("no", "mine")
    assert PASSWORD not in str(caught.value)


async def test_a_server_that_is_no_cluster_is_told_from_one(namespace: str) -> None:
    port = free_port()
    with server_on(port), pytest.raises(ConfigurationError, match="is no cluster: give redis://host:port"):
        await engine_to(f"redis+cluster://127.0.0.1:{port}", namespace).__aenter__()


@pytest.mark.parametrize("here", [False, True], ids=["whose slot another node has", "whose slot it has"])
async def test_a_plain_url_is_refused_with_the_one_to_give(cluster: Cluster, namespace: str, here: bool) -> None:
    node = cluster.primary_of(f"{{{namespace}}}:")
    port = (node if here else cluster.another(node)).port
    with pytest.raises(ConfigurationError, match=r"part of a cluster: give redis\+cluster://") as caught:
        async with engine_to(f"redis://{USER}:{PASSWORD}@127.0.0.1:{port}/0", namespace, shards=1) as engine:
            await engine.add("key", 1)
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("by", ["url", "client"])
async def test_a_wrong_password_is_refused_and_not_shown(cluster: Cluster, namespace: str, by: str) -> None:
    port, wrong = cluster.nodes[0].port, "not-the-one"
    source = login(port).replace(PASSWORD, wrong) if by == "url" else client_of(port, password=wrong)
    engine = engine_to(source, namespace)
    with pytest.raises(ConfigurationError, match="refuses access") as caught:
        await engine.__aenter__()
    assert wrong not in f"{engine!r} {engine.url} {caught.value}"


async def test_a_user_who_may_not_ask_who_has_what_is_told_the_command(cluster: Cluster, namespace: str) -> None:
    cluster.allow("blind", "~*", *commands("producer"))
    url = cluster.url.replace(USER, "blind")
    told = r"its user needs \+cluster\|slots \(before Redis 7: \+cluster\) on every"
    with pytest.raises(ConfigurationError, match=told):
        await engine_to(url, namespace).__aenter__()


def connections(cluster: Cluster, user: str = USER) -> list[dict[str, str]]:
    """Those of a user to all primaries."""
    everybody = [one for node in cluster.primaries for one in node.ask("CLIENT LIST")]
    return [one for one in everybody if one["user"] == user]


async def test_engines_with_the_same_client_share_the_connections_of_its_user(cluster: Cluster, namespace: str) -> None:
    cluster.allow("sharer", "~*", "+@all")
    given = client_of(cluster.nodes[0].port, username="sharer")
    async with engine_to(given, namespace) as first, engine_to(given, f"{namespace}-other") as second:
        for key in KEYS:  # one after the other, so that each node needs one connection
            await first.add(key, 1)
            await second.add(key, 1)
        # one may have been of a primary that was asked for the slots
        assert 3 <= len(connections(cluster, "sharer")) <= 4
        assert PASSWORD not in f"{first!r} {first.url}"
    await until(lambda: not connections(cluster, "sharer"))


@pytest.mark.parametrize(
    ("told", "address"),
    [
        ([b"10.0.0.1", 7000, b"id", [b"hostname", b""]], "10.0.0.1"),
        ([None, 7000, b"id"], "asked"),
        ([b"", 7000, b"id"], "asked"),
        ([b"?", 7000, b"id", [b"ip", b"10.0.0.2"]], "10.0.0.2"),
        ([b"node-1", 7000, b"id", [b"ip", b"10.0.0.3"]], "node-1"),
    ],
    ids=["its host", "none", "an empty one", "an unknown one beside its address", "a name"],
)
def test_a_node_is_where_it_says_or_where_the_one_is_that_was_asked(told: list[object], address: str) -> None:
    assert _address(told, ("asked", 7001)) == (address, 7000)


def link_to(node: Node) -> Connections:
    return Connections(read_url(f"redis+cluster://127.0.0.1:{node.port}"), 60)


@asynccontextmanager
async def full_engine(cluster: Cluster, namespace: str) -> AsyncGenerator[DigestEngine[int]]:
    """An engine whose user may erase, with a record in each shard."""
    cluster.allow("boss", "~*", "+@all")
    async with engine_to(cluster.url.replace(USER, "boss"), namespace, policy=LATER) as engine:
        await engine.add_many([Entry(key, 1) for key in KEYS])
        yield engine


def left_of(cluster: Cluster, namespace: str) -> list[bytes]:
    """The keys of a namespace on every primary."""
    return [key for node in cluster.primaries for key in node.ask("KEYS", f"{{{namespace}[:}}]*")]


async def test_erase_takes_all_also_from_a_primary_that_had_no_slots_before(namespace: str, tmp_path: Path) -> None:
    with running_cluster(primaries=1, replicas=0) as small:
        async with full_engine(small, namespace) as engine:
            old, new = small.nodes[0], Node(tmp_path, free_port())
            new.start()
            small.nodes.append(new)
            new.ask("CLUSTER", "MEET", "127.0.0.1", old.port)
            await until(lambda: knows(old, new.id) and b"cluster_state:ok" in info(new))
            small.allow("boss", "~*", "+@all")
            Move(small, slot_of(namespace, 3), old, new).make()
            assert new.ask("DBSIZE") > 0
            assert await engine.erase() >= SHARDS
            assert left_of(small, namespace) == []


async def test_an_erase_meeting_a_move_fails(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = cluster.primaries[0]
    slot, scan = slot_of(namespace, shards_of(cluster, namespace, source)[0]), operations._scan
    moves = [Move(cluster, slot, source, cluster.another(source)), Move(cluster, slot, cluster.another(source), source)]

    async def scan_and_move(server: connection.ServerConnections, *where: Any) -> Any:
        page = await scan(server, *where)
        if len(moves) == 2 and server.url.settings["port"] == source.port:
            moves.pop(0).make()
        return page

    monkeypatch.setattr(operations, "_scan", scan_and_move)
    async with full_engine(cluster, namespace) as engine:
        with pytest.raises(BackendUnavailable, match="a slot moved meanwhile; erase again"):
            await engine.erase()
        assert await engine.erase() > 0
        assert left_of(cluster, namespace) == []
    moves[0].make()


async def test_who_is_cancelled_while_connections_close_that_ask_for_nodes_has_closed_them(cluster: Cluster) -> None:
    key = cluster.key_of(cluster.primaries[1])
    link = link_to(cluster.primaries[0])
    await link.command(key, "PING")
    wires = [wire for each in link._servers.values() for wire, _ in each._idle]
    link._suspects.add(("127.0.0.1", cluster.primaries[1].port))
    calling = asyncio.create_task(link.command(key, "PING"))
    await asyncio.sleep(0)
    assert link._asking is not None
    assert not link._asking.done()
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(BackendUnavailable):
        await calling
    assert wires
    assert not any(wire.is_connected for wire in wires)


async def test_calls_under_way_on_a_primary_that_is_none_any_more_have_their_answers(cluster: Cluster) -> None:
    first, second, *_ = cluster.primaries
    key = cluster.key_of(first)
    link = link_to(first)
    call = asyncio.create_task(link.command(key, "BLPOP", key, 0))
    address = "127.0.0.1", first.port
    await until(lambda: b"cmd=blpop" in first.ask("CLIENT", "LIST"))
    await link._learn(address, [[0, 16_383, [b"127.0.0.1", second.port]]], 0.5)
    assert address not in link._servers
    first.ask("RPUSH", key, "answer")
    assert await call == [key.encode(), b"answer"]
    await link.close()


async def test_a_client_s_remap_of_addresses_is_used_for_every_node(cluster: Cluster, namespace: str) -> None:
    inbox = Inbox()
    async with AsyncExitStack() as stack:
        relays = {node.port: await stack.enter_async_context(Relay(node.port)) for node in cluster.nodes}
        ports = {port: int(relay.url.rpartition(":")[2].partition("/")[0]) for port, relay in relays.items()}

        def remap(address: tuple[str, int]) -> tuple[str, int]:
            return address[0], ports[address[1]]

        given = client_of(*ports.values(), address_remap=remap)
        engine = await stack.enter_async_context(engine_to(given, namespace).delivering(inbox))
        await engine.add_many([Entry(key, 1, record_id=key) for key in KEYS])
        await inbox.got(*KEYS)
        assert len(connections(cluster)) <= sum(relay.connections for relay in relays.values())
        assert all(relays[node.port].connections > 3 for node in cluster.primaries)


if tls_binary():

    async def test_a_cluster_that_speaks_tls_is_spoken_to_in_it(namespace: str, tmp_path: Path) -> None:
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        certificate, key, trusted = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "ca.pem"
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        authority.cert_pem.write_to_path(trusted)
        options = (
            "--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(trusted),
            "--tls-auth-clients", "no",
        )  # fmt: skip
        inbox = Inbox()
        with running_cluster(*options, replicas=0, binary=tls_binary(), tls=True) as cluster:
            url = login(cluster.nodes[0].tls_port).replace("redis+", "rediss+")
            async with engine_to(f"{url}?ssl_ca_certs={trusted}", namespace, shards=4).delivering(inbox) as engine:
                await engine.add_many([Entry(key, 1, record_id=key) for key in KEYS])
                await inbox.got(*KEYS)
            async with engine_to(url, namespace, shards=4, timeout=5) as engine:  # without the authority
                with pytest.raises(BackendUnavailable, match="certificate"):
                    await engine.add("key", 1)


async def outcome(awaitable: Awaitable[object]) -> object:
    """What came of a call."""
    try:
        return await awaitable
    except (BackendUnavailable, PartialAdd) as error:
        return error


async def test_a_primary_that_is_killed_fails_only_the_adds_of_its_shards(bare: Cluster, namespace: str) -> None:
    inbox = Inbox()
    node = bare.primaries[0]
    dead = shards_of(bare, namespace, node)
    async with engine_to(bare.url, namespace).delivering(inbox) as engine:
        await engine.add_many([Entry(key, 1, record_id=key) for key in KEYS])
        await inbox.got(*KEYS)
        await until(lambda: not any(is_leased(bare, namespace, shard) for shard in dead))
        node.kill()
        calls = [(shard, turn) for shard in range(SHARDS) for turn in range(5)]
        adds = [engine.add(KEYS[shard], 1, record_id=f"a{shard}-{turn}") for shard, turn in calls]
        results = await asyncio.gather(*map(outcome, adds))
        assert [isinstance(each, BackendUnavailable) for each in results] == [shard in dead for shard, _ in calls]
        result = await outcome(engine.add_many([Entry(key, 1, record_id=f"b{key}") for key in KEYS]))
        assert isinstance(result, PartialAdd)
        failed = {shard for shard, each in enumerate(result.results) if isinstance(each, BackendUnavailable)}
        assert failed == set(dead)
        alive = set(range(SHARDS)) - failed
        await inbox.got(*(f"a{shard}-4" for shard in alive), *(f"b{KEYS[shard]}" for shard in alive))
        await asyncio.to_thread(bare.mend)
        late = [Entry(KEYS[shard], 1, record_id="c") for shard in dead]
        async with asyncio.timeout(PATIENCE):
            while isinstance(await outcome(engine.add_many(late)), PartialAdd):  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.01)
        await until(lambda: len(inbox.digests["c"]) >= len(dead))
    check_shards(bare, namespace)


@pytest.mark.parametrize("frozen", [False, True], ids=["killed", "frozen"])
async def test_a_worker_that_waits_for_a_dead_primary_goes_on(bare: Cluster, namespace: str, frozen: bool) -> None:
    inbox, gone, held = Inbox(), asyncio.Event(), list[str]()
    node = bare.primaries[0]
    dead = shards_of(bare, namespace, node)
    [alive, *_] = [key for key in KEYS if crc32(key.encode()) % SHARDS not in dead]
    stuck = keys_in(dead[0])[:3]

    async def deliver(digest: Digest[int]) -> None:
        if digest.key in stuck:
            held.append(digest.key)
            await gone.wait()
        await inbox(digest)

    worker = engine_to(bare.url, namespace, timeout=BRIEF, lease_timeout=2, concurrency=len(stuck))
    async with worker.delivering(deliver), engine_to(bare.url, namespace) as engine:
        await engine.add_many([Entry(key, 1, record_id=key) for key in stuck])
        await until(lambda: len(held) == len(stuck))
        await engine.add(alive, 1, record_id="waits")
        node.freeze() if frozen else node.kill()
        gone.set()
        await inbox.got("waits")
        hanging = [asyncio.create_task(outcome(engine.add(KEYS[shard], 1))) for shard in dead]
        scheduler = session_of(worker)._scheduler
        assert scheduler is not None
        workers = [scheduler._workers[shard] for shard in dead]
        await until(lambda: all(worker.leases.is_cut_off for worker in workers))
        for number in range(5):  # while all calls to the dead one hang
            await engine.add(alive, 2, record_id=f"r{number}")
            await inbox.got(f"r{number}")
        assert all(worker.leases.is_cut_off for worker in workers)
        assert not frozen or not any(call.done() for call in hanging)
        await asyncio.to_thread(bare.mend)
        await until(lambda: not is_leased(bare, namespace, dead[0]))
        await asyncio.gather(*hanging)
    check_shards(bare, namespace)


def is_leased(cluster: Cluster, namespace: str, shard: int) -> bool:
    """Whether something is leased in a shard."""
    tag = tag_of(namespace, shard)
    return bool(cluster.primary_of(tag).ask("ZCARD", f"{tag}leased"))


async def heir_among(replicas: Sequence[Node]) -> Node:
    """The one that takes over."""
    await until(lambda: any(node.is_primary for node in replicas))
    return next(node for node in replicas if node.is_primary)


async def test_nothing_acknowledged_is_lost_when_a_primary_and_its_heir_die(fragile: Cluster, namespace: str) -> None:
    old = fragile.primaries[0]
    dead = shards_of(fragile, namespace, old)
    heirs = fragile.replicas_of(old)
    for node in heirs:
        node.ask("SCRIPT", "FLUSH")
    traffic = traffic_to(fragile, namespace, wait_replicas=1)
    async with traffic.flowing():
        await traffic.replicated()
        with fragile.losing():
            old.kill()
            new = await heir_among(heirs)
            await until(lambda: all(fragile.agree_on(slot_of(namespace, shard), new) for shard in dead))
            await until(lambda: all(b"cluster_state:ok" in info(node) for node in fragile.alive))
            known = [traffic.unsent(shard) for shard in dead]
            await traffic.goes_on(dead)
            # one add may be on its way, and the next has the nodes asked
            assert all(traffic.unsent(shard) <= then + 3 for shard, then in zip(dead, known, strict=True))
            assert new.ask("SCRIPT", "EXISTS", load_script("add").sha) == [True]
            new.kill()
            [last] = [node for node in heirs if node is not new]
            await until(lambda: last.is_primary)
            await asyncio.to_thread(fragile.mend)
        traffic.forgets()
        await traffic.goes_on()
    check_shards(fragile, namespace)


async def test_a_primary_that_froze_and_comes_back_takes_nothing_with_it(fragile: Cluster, namespace: str) -> None:
    old = fragile.primaries[0]
    dead, others = shards_of(fragile, namespace, old), fragile.replicas_of(old)
    traffic = traffic_to(fragile, namespace, wait_replicas=1, timeout=2)
    async with traffic.flowing():
        await traffic.replicated()
        with fragile.losing():
            old.freeze()
            await heir_among(others)
            await traffic.goes_on(dead)
            traffic.forgets()
            old.thaw()
            await asyncio.to_thread(fragile.settle)
        await traffic.goes_on()
    check_shards(fragile, namespace)


async def test_an_engine_that_was_idle_during_a_failover_fails_no_add(fragile: Cluster, namespace: str) -> None:
    inbox = Inbox()
    old = fragile.primaries[0]
    others = fragile.replicas_of(old)
    producer, worker = engine_to(fragile.url, namespace), engine_to(fragile.url, namespace)
    async with producer:
        await producer.add_many([Entry(key, 1, record_id=f"a{key}") for key in KEYS])
        with fragile.losing():
            old.kill()
            await heir_among(others)
            await asyncio.to_thread(fragile.mend)
        assert not old.is_primary
        await asyncio.gather(*(producer.add(key, 2, record_id=f"b{key}") for key in KEYS))
        async with worker.delivering(inbox):
            await inbox.got(*(f"{turn}{key}" for turn in "ab" for key in KEYS))
    check_shards(fragile, namespace)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "there and back"])
async def test_nothing_is_lost_when_a_primary_hands_over(cluster: Cluster, namespace: str, times: int) -> None:
    traffic = traffic_to(cluster, namespace)
    node = cluster.primaries[0]
    async with traffic.flowing():
        for _ in range(times):
            heir = cluster.replica_of(node)
            heir.ask("CLUSTER", "FAILOVER")
            await until(lambda heir=heir: heir.is_primary)
            if times == 1:
                await traffic.goes_on()
            await until(lambda: all(cluster.is_whole(each) for each in cluster.alive))
            node = heir
        await traffic.goes_on()
    assert [str(error) for error in traffic.errors() if error.stored != "no"] == []
    check_shards(cluster, namespace)


LIMITS = NO_GAP.terms.limits
Verb = Callable[["Held"], Awaitable[object]]


class Held(Store):
    """A namespace of one shard with timelines in every state, a digest under delivery, and a dead letter."""

    leases: dict[str, Lease]
    letter: str

    async def fill(self) -> None:
        for key in ("leased", "retry", "buried", "released"):
            await self.add(key, *(f"{key}-{number}" for number in range(3)))
        self.leases = {lease.key: lease for lease in (await self.claims()).leases}
        await self.close(self.leases["buried"], letter="bad")
        await self.retry(self.leases["retry"], 3_600_000)
        await self.add("leased", "leased-new")
        await self.add("ready", "r")
        await self.add("waiting", "w0", "w1", "w2", policy=LATER)
        [self.letter] = (await self.backend.operations.dead_letters(0, 10)).items


def call(held: Held, *arguments: Any) -> Awaitable[object]:
    assert isinstance(held.backend, RedisBackend)
    return held.backend.namespace.call(*arguments)


VERBS: dict[str, Verb] = {
    "add": lambda held: held.backend.add(
        0, [Add(key, pack(b"x", None, b"1"), NO_GAP.terms) for key in ("waiting", "ready", "leased", "retry", "new")]
    ),
    "claim": lambda held: held.claims(),
    "open": lambda held: held.backend.open(0, "ready", LEASE, LIMITS),
    "renew": lambda held: held.backend.renew(0, [held.leases["leased"]], 2 * LEASE),
    "close": lambda held: held.close(held.leases["leased"]),
    "retry": lambda held: held.retry(held.leases["leased"]),
    "release": lambda held: held.release(held.leases["released"], started=True),
    "postpone": lambda held: held.postpone(held.leases["released"]),
    "throttle": lambda held: held.backend.throttle(1, Throttle(5, per=60).rate, 1, (), [("one", 60_000)]),
    "schedule": lambda held: held.backend.schedule(4_000_000_000_000),
    "maintenance": lambda held: held.backend.maintenance(4_000_000_000_000),
    "flush": lambda held: held.backend.flush("waiting"),
    "mute": lambda held: held.backend.mute("waiting", Mute(), LIMITS),
    "unmute": lambda held: held.backend.unmute("waiting", LIMITS),
    "delete": lambda held: held.backend.delete("waiting"),
    "remove": lambda held: held.backend.remove("waiting", identity_of(b"w1"), LIMITS),
    "reschedule": lambda held: held.backend.reschedule("waiting", Reschedule(LATER.terms, delay_ms=1)),
    "replay": lambda held: held.backend.replay(held.letter, NO_GAP.terms, False),
    "discard": lambda held: held.backend.discard(held.letter),
    "look": lambda held: held.backend.operations.look("waiting"),
    "read": lambda held: held.backend.read(0, held.leases["leased"], 0, 10),
    "counts": lambda held: held.backend.operations.counts(),
    "letter": lambda held: held.backend.operations.dead_letter(held.letter),
    "letters": lambda held: held.backend.operations.dead_letters(0, 10),
    # those of a change of the layout
    "keep": lambda held: call(held, "keep", 0, "id", "key", "why", 1, 1, "digest", "", 0, 1, b"entry"),
    "carry": lambda held: call(held, "carry", 0, "2:1:1:0", "delivered", 5),
    "retire": lambda held: call(held, "retire", 0, ""),
    "forget": lambda held: call(held, "forget", 0, "key", b"id"),
    "remember": lambda held: call(held, "remember", 0, "key", b"id", 4_000_000_000_000),
}

SETS = (b"waiting", b"ready", b"leased", b"dead")
PARTS = {  # of a shard, by what its keys begin with
    "the layout": (b"layout",), "the doorbell": (b"wake",), "logs": (b"log:",), "open digests": (b"open:",),
    "metas": (b"meta:",), "letters": (b"letter:", b"remains:"), "sets": SETS, "nothing": (),
    **{f"the {name.decode()}": (name,) for name in SETS},
}  # fmt: skip


def test_the_verbs_are_all_that_scripts_can_do() -> None:
    others = {"layout", "reshard", "drain", "permits", "erase"}  # of one key, or of any that are there
    assert VERBS.keys() == load_scripts().keys() - others


@pytest.mark.parametrize("stage", [*PARTS, *(f"all but {part}" for part in ("the layout", "sets", "nothing"))])
async def test_while_a_slot_moves_every_verb_is_refused(cluster: Cluster, namespace: str, stage: str) -> None:
    part, is_left = PARTS[stage.removeprefix("all but ")], stage.startswith("all but ")
    prefix = f"{{{namespace}}}:".encode()
    source = cluster.primary_of(prefix.decode())
    move = Move(cluster, key_slot(prefix), source, cluster.another(source))
    backend = RedisBackend(cluster.url, namespace=namespace, timeout=60)
    await backend.connect()
    try:
        held = Held(backend, policy=NO_GAP)
        await held.fill()
        full = redis_state(source.client(), namespace)
        move.begin()
        try:
            move.carry(*(key for key in move.left() if key.removeprefix(prefix).startswith(part) != is_left))
            before = move.contents()
            for name, verb in VERBS.items():
                with pytest.raises(BackendUnavailable, match="slots are being moved") as caught:
                    await verb(held)
                assert caught.value.stored == "no", name
            assert move.contents() == before
        finally:
            await asyncio.to_thread(move.end)
        assert source.ask("CLUSTER", "GETKEYSINSLOT", move.slot, 10) == []
        moved = redis_state(move.target.client(), namespace)
        assert moved == full
        check_invariants(moved)
        assert await backend.renew(0, [held.leases["leased"], held.leases["released"]], LEASE) == [True, True]
        assert (await held.close(held.leases["leased"])).status == "closed"
        assert (await held.claim()).key == "ready"
        assert await backend.flush("retry")
    finally:
        await backend.aclose()


async def test_while_a_slot_moves_its_shard_waits_and_nothing_is_lost(cluster: Cluster, namespace: str) -> None:
    traffic = traffic_to(cluster, namespace)
    shard = 5
    tag = tag_of(namespace, shard)
    source = cluster.primary_of(tag)
    move = Move(cluster, key_slot(tag.encode()), source, cluster.another(source))
    others = [each for each in range(SHARDS) if each != shard]
    async with traffic.flowing():
        move.begin()
        keys = move.left()
        for key in keys[: len(keys) // 2]:
            move.carry(key)
            refused = len(traffic.refused[shard])
            await until(lambda refused=refused: len(traffic.refused[shard]) > refused + 1)
        await traffic.goes_on(others)
        assert {error.stored for error in traffic.errors([shard])} == {"no"}
        assert move.left() == keys[len(keys) // 2 :]
        await asyncio.to_thread(move.end)
        await traffic.goes_on([shard])
        await traffic.goes_on()
    assert traffic.errors(others) == []
    check_shards(cluster, namespace)


# before Valkey 8, the replica of a primary does not know that a slot moves
@pytest.mark.parametrize("end", ["target", "source"])
async def test_half_a_shard_is_refused_also_when_a_primary_dies(fragile: Cluster, namespace: str, end: str) -> None:
    inbox = Inbox()
    prefix = f"{{{namespace}}}:"
    source = fragile.primary_of(prefix)
    move = Move(fragile, key_slot(prefix.encode()), source, fragile.another(source))
    dying = source if end == "source" else move.target
    heirs = fragile.replicas_of(dying)
    async with engine_to(fragile.url, namespace, shards=1) as engine:
        records = [f"r{number}" for number in range(20)]
        await engine.add_many([Entry(record, 1, record_id=record) for record in records])
        move.begin()
        moved = [key for key in move.left() if not key.endswith((b"layout", b"ready"))]
        move.carry(*moved)
        written = dying.written()
        await until(lambda: dying.has_passed_on(written))
        with fragile.losing():
            dying.kill()
            heir = await heir_among(heirs)
            await until(lambda: b"cluster_state:ok" in info(heir))
            for _ in range(5):
                result = await outcome(engine.add("new", 1, record_id="new"))
                assert isinstance(result, BackendUnavailable)
            ends = (heir, move.target) if dying is source else (source, heir)
            move = Move(fragile, move.slot, *ends)
            assert len(move.left()) == 2
            assert move.target.ask("CLUSTER", "COUNTKEYSINSLOT", move.slot) == len(moved)
            await asyncio.to_thread(fragile.restart, dying)
            # on Redis 7 it hears of no heir of what it imports
            move.target.ask("CLUSTER", "SETSLOT", move.slot, "STABLE")
            await until(lambda: b"cluster_state:ok" in info(move.target))
            move.begin()
            await asyncio.to_thread(move.end)
            await asyncio.to_thread(fragile.settle)
        async with engine_to(fragile.url, namespace, shards=1).delivering(inbox):
            await inbox.got(*records)
    assert inbox.digests.keys() == set(records)
    assert inbox.twice == set()


async def test_a_slot_that_the_server_moves_loses_nothing(cluster: Cluster, namespace: str) -> None:
    traffic = traffic_to(cluster, namespace)
    shard = 7
    tag = tag_of(namespace, shard)
    slot = key_slot(tag.encode())
    async with traffic.flowing():
        for _ in range(2):  # there, and somewhere else
            source = cluster.primary_of(tag)
            target = cluster.another(source)
            if not await asyncio.to_thread(cluster.move_at_once, slot, source, target):
                assert b"MIGRATESLOTS" not in b"".join(source.ask("CLUSTER", "HELP")), "the server can, and has not"
                await asyncio.to_thread(Move(cluster, slot, source, target).make)
            await traffic.goes_on([shard])
        await traffic.goes_on()
    assert {error.stored for error in traffic.errors()} <= {"no"}
    assert traffic.errors([each for each in range(SHARDS) if each != shard]) == []
    check_shards(cluster, namespace)


async def test_a_cluster_that_is_down_says_so(bare: Cluster, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    inbox = Inbox()

    def told(words: str) -> int:
        return sum(words in record.getMessage() for record in caplog.records if record.name.endswith(".availability"))

    left, *lost = bare.primaries
    async with engine_to(bare.url, namespace, lease_timeout=2).delivering(inbox) as engine:
        await engine.add_many([Entry(key, 1, record_id=f"a{key}") for key in KEYS])
        await inbox.got(*(f"a{key}" for key in KEYS))
        for node in lost:
            node.kill()
        await until(lambda: b"cluster_state:fail" in info(left))
        results: Sequence[object] = []
        for turn in range(2):
            results = await asyncio.gather(*(outcome(engine.add(key, 2, record_id=f"b{turn}{key}")) for key in KEYS))
            assert {getattr(result, "stored", "yes") for result in results} == {"no"}
        assert any("cluster is down" in str(result) for result in results)
        await until(lambda: told("is unavailable") == 1)
        await asyncio.to_thread(bare.mend)
        await engine.add_many([Entry(key, 3, record_id=f"c{key}") for key in KEYS])
        await inbox.got(*(f"c{key}" for key in KEYS))
        await until(lambda: told("is available again") == 1)
    assert told("is unavailable") == 1
    assert not any(record.startswith("b") for record in inbox.digests)


async def test_an_idle_worker_has_few_wires(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SPARE", 0.2)
    cluster.allow("quiet", "~*", "+@all")

    def listening(one: dict[str, str]) -> bool:
        return one["cmd"] == "xread"

    async with engine_to(cluster.url.replace(USER, "quiet"), namespace, lease_timeout=6).delivering(Inbox()):
        await until(lambda: sum(map(listening, connections(cluster, "quiet"))) == SHARDS)
        # those are closed that were made when all shards began at once
        await until(lambda: len(connections(cluster, "quiet")) <= SHARDS + 2 * 3)
        await until(lambda: sum(map(listening, connections(cluster, "quiet"))) == SHARDS)
