"""A cluster for a comparison: primaries on loopback, each with so many replicas, gone when the comparison is."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from aiodigest.backends.embedded.server import find_binary
from aiodigest.backends.redis.layout import SLOTS
from benchmarks.programs import ProgramFailed, running

BUS = 10_000  # how far a node's port for the others is from that for clients
NODE_TIMEOUT = 1.0  # seconds until a node that does not answer counts as gone


@dataclass
class Node:
    """One server of a cluster."""

    folder: Path
    port: int
    options: Sequence[str]
    process: Process | None = None

    def client(self) -> Any:
        clients: Any = Redis
        return clients(port=self.port, socket_timeout=10, retry=Retry(NoBackoff(), 0))

    async def ask(self, *command: object) -> Any:
        async with self.client() as client:
            return await client.execute_command(*command)

    async def answers(self) -> bool:
        with suppress(RedisError):
            return bool(await self.ask("PING"))
        return False

    async def is_primary(self) -> bool:
        return (await self.ask("ROLE"))[0] == b"master"

    async def start(self, stack: AsyncExitStack) -> None:
        """Begin, or begin again after ``kill``."""
        command = (find_binary(), "--dir", str(self.folder), "--port", str(self.port), *self.options)
        self.process = await stack.enter_async_context(running(*command, stdout=DEVNULL))
        await until(self.answers, f"the server on port {self.port} answers")

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None


@dataclass
class Cluster:
    """Its nodes: the primaries first, as long as none was killed."""

    stack: AsyncExitStack
    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    async def primaries(self) -> list[Node]:
        return [node for node in self.nodes if node.process is not None and await node.is_primary()]

    async def primary_of(self, key: str) -> Node:
        """Who has a key's slot, by its own word."""
        slot = key_slot(key.encode())
        for node in await self.primaries():
            for first, last, (_, port, *_), *_ in await node.ask("CLUSTER", "SLOTS"):
                if first <= slot <= last and port == node.port:
                    return node
        raise ProgramFailed(f"no primary has slot {slot}")

    async def form(self, primaries: int) -> None:
        first, *others = self.nodes
        for node in others:
            await first.ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        for index, node in enumerate(self.nodes[:primaries]):
            await node.ask("CLUSTER", "ADDSLOTS", *range(*_part(index, primaries)))
        for index, node in enumerate(self.nodes[primaries:]):
            primary = (await self.nodes[index % primaries].ask("CLUSTER", "MYID")).decode()

            async def met(node: Node = node, primary: str = primary) -> bool:
                return primary in str(await node.ask("CLUSTER", "NODES"))

            await until(met, "the nodes of the cluster have met")
            await node.ask("CLUSTER", "REPLICATE", primary)
        await until(self.is_whole, "every node sees the whole cluster")

    async def is_whole(self) -> bool:
        """Whether every node sees all slots served, and every replica has caught up with its primary."""
        for node in self.nodes:
            told = str(await node.ask("CLUSTER", "INFO"))  # bytes, or a dict that redis-py has made of them
            if not re.search(r"cluster_state\W+ok", told):
                return False
            role = await node.ask("ROLE")
            served = sum(len(servers) for _, _, *servers in await node.ask("CLUSTER", "SLOTS"))
            if (role[0] != b"master" and role[3] != b"connected") or served != len(self.nodes):
                return False
        return True


def _part(index: int, primaries: int) -> tuple[int, int]:
    return SLOTS * index // primaries, SLOTS * (index + 1) // primaries


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30) -> None:
    """Wait for what only a server can tell."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.01)
            return
    raise ProgramFailed(f"not within {seconds:g} s: {what}")


@asynccontextmanager
async def fresh_cluster(primaries: int = 3, replicas: int = 0, on_disk: bool = False) -> AsyncGenerator[Cluster, None]:
    """A cluster with the same options as ``fresh_server``, and ``NODE_TIMEOUT``."""
    options = [
        "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning", "--cluster-enabled", "yes",
        "--cluster-node-timeout", str(round(NODE_TIMEOUT * 1000)), "--cluster-replica-validity-factor", "0",
        "--repl-diskless-sync-delay", "0", "--appendonly", "yes" if on_disk else "no",
    ]  # fmt: skip
    options += ["--appendfsync", "always"] if on_disk else []
    root = Path(tempfile.mkdtemp(prefix="aid-bench"))
    try:
        async with AsyncExitStack() as stack:
            cluster = Cluster(stack)
            for number in range(primaries * (1 + replicas)):
                folder = root / str(number)
                folder.mkdir()
                node = Node(folder, free_port(), options)
                await node.start(stack)
                cluster.nodes.append(node)
            await cluster.form(primaries)
            yield cluster
    finally:
        shutil.rmtree(root, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens to, nor to the one for the other nodes that goes with it."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port + BUS < 65_536:
                with suppress(OSError):
                    bus.bind(("127.0.0.1", port + BUS))
                    return port
