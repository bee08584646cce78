"""Real clusters for tests: primaries and their replicas on loopback, gone when the test or the run is."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import redis
from ports import free_port
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from servers import PASSWORD, PROMPT, USER, Server, commands, online, until

SLOTS = 16_384
# ms until a silent primary is replaced: none in a run, however long a machine that is busy stands still; or soon
UNTROUBLED, SOON = 600_000, 1_000
# of all tests' user
RULE = ("~{*}:*", "+wait", "+info", *commands("producer", "worker", "operator", several=True))


class Node(Server):
    """One server of a cluster."""

    rule = RULE

    def __init__(
        self, folder: Path, port: int, options: Sequence[str] = (), *, binary: str = "", tls_port: int = 0
    ) -> None:
        if tls_port:
            options = "--tls-port", str(tls_port), "--tls-cluster", "yes", "--tls-replication", "yes", *options
        settings = (
            "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--cluster-node-timeout", str(SOON),
            "--cluster-replica-validity-factor", "0", *PROMPT, *options,
        )  # fmt: skip
        super().__init__(folder, settings, binary=binary)
        self.port, self.tls_port = port, tls_port

    @property
    def id(self) -> str:
        return self.ask("CLUSTER", "MYID").decode()

    @property
    def is_primary(self) -> bool:
        return self.ask("ROLE")[0] == b"master"

    def written(self) -> int:
        """How much has been written to it."""
        return self.ask("INFO", "replication")["master_repl_offset"]

    def has_passed_on(self, written: int) -> bool:
        """Whether its replicas have said that they have so much of that."""
        told: dict[str, Any] = self.ask("INFO", "replication")
        offsets = [told[f"slave{number}"]["offset"] for number in range(told["connected_slaves"])]
        return min(offsets, default=0) >= written

    kill = Server.stop


@dataclass
class Cluster:
    """Three primaries and a replica of each, unless it is told otherwise; see ``servers.Server`` for its user."""

    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{USER}:{PASSWORD}@{hosts}"

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.process is not None]

    @property
    def primaries(self) -> list[Node]:
        return [node for node in self.alive if node.is_primary]

    def primary_of(self, key: str) -> Node:
        """Who has a key's slot, by what the others say too."""
        return self.holders()[key_slot(key.encode())]

    def key_of(self, primary: Node) -> str:
        """A key whose slot a primary has."""
        return next(key for number in count() if self.primary_of(key := f"key-{number}") is primary)

    def holders(self) -> dict[int, Node]:
        """Who has each slot, by its own words."""
        found: dict[int, Node] = {}
        for node in self.primaries:
            for first, last, (_, port, *_), *_ in node.ask("CLUSTER", "SLOTS"):
                if port == node.port:
                    found |= dict.fromkeys(range(first, last + 1), node)
        return found

    def replicas_of(self, primary: Node) -> list[Node]:
        roles = [(node, node.ask("ROLE")) for node in self.alive]
        return [node for node, (role, *where) in roles if role == b"slave" and where[1] == primary.port]

    def replica_of(self, primary: Node) -> Node:
        """A replica that is linked to its primary."""
        return next(node for node in self.replicas_of(primary) if node.ask("ROLE")[3] == b"connected")

    def another(self, node: Node) -> Node:
        """Another primary."""
        return next(other for other in self.primaries if other is not node)

    def agree_on(self, slot: int, node: Node) -> bool:
        """Whether all nodes say that a slot is a node's."""
        return all(
            any(first <= slot <= last and port == node.port for first, last, (_, port, *_), *_ in told)
            for told in (other.ask("CLUSTER", "SLOTS") for other in self.alive)
        )

    def client(self) -> Any:
        """A client that may do all."""
        return RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in self.alive])

    def form(self, primaries: int) -> None:
        """Make one cluster of the nodes: the first ones get the slots, the others are their replicas."""
        first, *others = self.nodes
        for node in others:
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.tls_port or node.port)
        for index, node in enumerate(self.nodes[:primaries]):
            slots = range(SLOTS * index // primaries, SLOTS * (index + 1) // primaries)
            node.ask("CLUSTER", "ADDSLOTS", *slots)
        for index, node in enumerate(self.nodes[primaries:]):
            primary = self.nodes[index % primaries].id
            until(lambda node=node, primary=primary: knows(node, primary), "the nodes have met")
            node.ask("CLUSTER", "REPLICATE", primary)
        self.settle()

    def settle(self) -> None:
        """Wait until every node that is alive sees the whole cluster."""
        until(lambda: all(self.is_whole(node) for node in self.alive), "all nodes see the whole cluster")

    def restart(self, *nodes: Node) -> None:
        """Start nodes that were killed; they remember whom they know, and what they have if they write it down."""
        for node in nodes:
            node.start()

    def give_up_after(self, milliseconds: int) -> None:
        """Tell the nodes that run after how long to replace a silent primary."""
        for node in self.alive:
            if not node.is_frozen:
                node.ask("CONFIG", "SET", "cluster-node-timeout", milliseconds)

    @contextmanager
    def losing(self) -> Generator[None]:
        """Have silent primaries replaced inside, and at no other time: what a busy machine holds up is not lost."""
        self.give_up_after(SOON)
        try:
            yield
        finally:
            self.give_up_after(UNTROUBLED)

    def mend(self) -> None:
        """Bring all back that was frozen or killed."""
        for node in self.alive:
            node.thaw()
        self.restart(*(node for node in self.nodes if node.process is None))
        self.settle()

    def is_whole(self, node: Node) -> bool:
        """Whether a node sees every slot served, and is linked to its primary, or counts its replicas as online."""
        if b"cluster_state:ok" not in info(node):
            return False
        groups = [[port for _, port, *_ in rest] for _, _, *rest in node.ask("CLUSTER", "SLOTS")]
        if node.is_primary:
            followers = {port for primary, *others in groups if primary == node.port for port in others}
            linked = followers <= online(node.ask("INFO", "replication"))
        else:
            linked = node.ask("ROLE")[3] == b"connected"
        return linked and len({port for group in groups for port in group}) == len(self.alive)

    def allow(self, user: str, *rule: str) -> None:
        """Make a user on every node."""
        for node in self.alive:
            node.ask("ACL", "SETUSER", user, "reset", "resetchannels", "on", f">{PASSWORD}", *rule)

    def move_at_once(self, slot: int, source: Node, target: Node) -> bool:
        """Move a slot whole, as Valkey does from version 9 on; False if the server cannot."""
        try:
            source.ask("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        except redis.ResponseError as error:
            if "unknown subcommand" not in str(error).lower():
                raise
            return False

        def is_over() -> bool:
            return "failed" in str(source.ask("CLUSTER", "GETSLOTMIGRATIONS")) or self.agree_on(slot, target)

        until(is_over, "the slot has moved")
        return self.agree_on(slot, target)


@dataclass
class Move:
    """A slot that is moved from one primary to another, key by key."""

    cluster: Cluster
    slot: int
    source: Node
    target: Node

    def begin(self) -> None:
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", self.source.id)
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", self.target.id)

    def left(self) -> list[bytes]:
        """The keys that have not moved yet."""
        return sorted(self.source.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 1_000_000))

    def carry(self, *keys: bytes) -> None:
        """Move some keys."""
        if keys:
            self.source.ask("MIGRATE", "127.0.0.1", self.target.port, "", 0, 10_000, "KEYS", *keys)

    def end(self) -> None:
        """Move what is left, and give the slot to its new primary."""
        self.carry(*self.left())
        for node in (self.target, self.source):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", self.target.id)
        until(lambda: self.cluster.agree_on(self.slot, self.target), "all nodes know where the slot is")

    def make(self) -> None:
        """Make the whole move."""
        self.begin()
        self.end()

    def contents(self) -> dict[tuple[int, bytes], bytes]:
        """All that both primaries hold of the slot: of each one's keys the value, and when it ends.

        That is to the millisecond, or only whether it does where a server does not tell it (before Redis 7).
        """
        found: dict[tuple[int, bytes], bytes] = {}
        for node in (self.source, self.target):
            with node.client() as client, client.pipeline(transaction=False) as pipe:
                keys = sorted(client.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1_000_000))
                exact = not str(client.info("server")["redis_version"]).startswith("6.")
                for key in keys:
                    for command in ("DUMP", "PEXPIRETIME" if exact else "PTTL"):
                        pipe.execute_command("ASKING")
                        pipe.execute_command(command, key)
                replies = pipe.execute()
                for key, value, ends in zip(keys, replies[1::4], replies[3::4], strict=True):
                    end = ends if exact else min(ends, 0)
                    found[node.port, key] = value + b" until %d" % end
        return found


def info(node: Node) -> bytes:
    return str(node.ask("CLUSTER", "INFO")).encode()


def knows(node: Node, other: str) -> bool:
    return other in str(node.ask("CLUSTER", "NODES"))


@contextmanager
def running_cluster(
    *options: str, primaries: int = 3, replicas: int = 1, steady: bool = True, binary: str = "", tls: bool = False
) -> Generator[Cluster]:
    """A cluster with options of its own for its servers; with ``tls`` they speak it beside plain TCP.

    In one that is not ``steady`` nodes hold a silent one for lost after a second; in one that is, only while it is
    ``losing``. Nothing else is replaced there but by order, and no server twice on Redis 7, which remembers votes for
    as long as it takes to replace a silent one.
    """
    root = Path(tempfile.mkdtemp(prefix="aid", dir="/tmp" if sys.platform != "win32" else None))
    cluster = Cluster()
    try:
        for number in range(primaries * (1 + replicas)):
            folder = root / str(number)
            folder.mkdir()
            tls_port = free_port() if tls else 0
            settings = "--repl-ping-replica-period", "1", *options
            cluster.nodes.append(Node(folder, free_port(), settings, binary=binary, tls_port=tls_port))
        cluster.restart(*cluster.nodes)
        cluster.form(primaries)
        if steady:  # not from the start, since who waits so long also meets the others slowly
            cluster.give_up_after(UNTROUBLED)
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
        shutil.rmtree(root, ignore_errors=True)
