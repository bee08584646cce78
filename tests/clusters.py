"""Real clusters for tests: primaries and their replicas on loopback, gone when the test or the run is."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from servers import PASSWORD, USER, commands, server_binary

SLOTS = 16_384


def node_port() -> int:
    """A TCP port that nobody listens to, nor to the one of the cluster's bus that goes with it."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port + 10_000 < 65_536:
                with suppress(OSError):
                    bus.bind(("127.0.0.1", port + 10_000))
                    return port


def until(condition: Callable[[], object], what: str, seconds: float = 20) -> None:
    """Wait for what only a server can tell."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)


@dataclass
class Node:
    """One server of a cluster."""

    folder: Path
    port: int
    options: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    def client(self) -> Any:
        return redis.Redis(port=self.port, socket_timeout=10)

    def ask(self, *command: object) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    @property
    def id(self) -> str:
        return self.ask("CLUSTER", "MYID").decode()

    @property
    def is_primary(self) -> bool:
        return self.ask("ROLE")[0] == b"master"

    def is_up(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.ConnectionError:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the server on port {self.port} has ended") from None
            return False

    def start(self) -> None:
        settings = (
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "",
            "--appendonly", "no", "--loglevel", "warning", "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
            "--cluster-replica-validity-factor", "0", "--repl-diskless-sync-delay", "0", *self.options,
        )  # fmt: skip
        self.process = subprocess.Popen(
            [server_binary(), *settings], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


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
        slot = key_slot(key.encode())
        for node in self.primaries:
            for first, last, (_, port, *_), *_ in node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last and port == node.port:
                    return node
        raise RuntimeError(f"nobody has slot {slot}")

    def client(self) -> Any:
        """A client that may do all."""
        return RedisCluster(startup_nodes=[ClusterNode("127.0.0.1", node.port) for node in self.alive])

    def form(self, primaries: int) -> None:
        """Make one cluster of the nodes: the first ones get the slots, the others are their replicas."""
        first, *others = self.nodes
        for node in others:
            first.ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        for index, node in enumerate(self.nodes[:primaries]):
            slots = range(SLOTS * index // primaries, SLOTS * (index + 1) // primaries)
            node.ask("CLUSTER", "ADDSLOTS", *slots)
        for index, node in enumerate(self.nodes[primaries:]):
            primary = self.nodes[index % primaries].id
            until(lambda node=node, primary=primary: knows(node, primary), "the nodes have met")
            node.ask("CLUSTER", "REPLICATE", primary)
        until(lambda: all(self.is_whole(node) for node in self.nodes), "all nodes see the whole cluster")

    def is_whole(self, node: Node) -> bool:
        """Whether a node sees every slot served, and every replica linked to its primary."""
        if b"cluster_state:ok" not in info(node):
            return False
        servers = [len(rest) for _, _, *rest in node.ask("CLUSTER", "SLOTS")]
        linked = node.is_primary or node.ask("ROLE")[3] == b"connected"
        return linked and sum(servers) == len(self.alive)

    def allow(self, user: str, *rule: str) -> None:
        """Make a user on every node."""
        for node in self.alive:
            node.ask("ACL", "SETUSER", user, "reset", "resetchannels", "on", f">{PASSWORD}", *rule)


def info(node: Node) -> bytes:
    text = node.ask("CLUSTER", "INFO")
    return text if isinstance(text, bytes) else repr(text).encode()


def knows(node: Node, other: str) -> bool:
    return other in str(node.ask("CLUSTER", "NODES"))


@contextmanager
def running_cluster(*options: str, primaries: int = 3, replicas: int = 1) -> Generator[Cluster]:
    """A cluster with options of its own for its servers."""
    root = Path(tempfile.mkdtemp(prefix="aid", dir="/tmp" if sys.platform != "win32" else None))
    cluster = Cluster()
    try:
        for number in range(primaries * (1 + replicas)):
            folder = root / str(number)
            folder.mkdir()
            node = Node(folder, node_port(), options)
            node.start()
            cluster.nodes.append(node)
        for node in cluster.nodes:
            until(node.is_up, f"the server on port {node.port} answers")
        cluster.form(primaries)
        cluster.allow(USER, "~{*}:*", "+wait", "+info", *commands("producer", "worker", "operator"), "+cluster|slots")
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
        shutil.rmtree(root, ignore_errors=True)
