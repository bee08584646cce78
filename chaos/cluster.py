"""A run on a cluster: its nodes, each of which may die and come back, and what each of them says of the others."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

import clusters  # of the tests, which run on the same
import redis
from ports import free_port
from redis.crc import key_slot
from servers import server_binary

from aiodigest.backends.redis.layout import Layout
from chaos.plan import AT_ONCE, CLUSTER_KINDS
from chaos.process import CLUSTER, NAMESPACE, SHARDS
from chaos.world import STARTING, Place, World

PRIMARIES = 3
USERS = 3  # processes of each kind
SOON, LATE = 1_000, clusters.UNTROUBLED  # ms after which nodes hold one that does not answer for lost
TAG = Layout(SHARDS).tag
SLOTS = {shard: key_slot(TAG(NAMESPACE, shard).encode()) for shard in range(SHARDS)}


class Node(clusters.Node):
    """A node that is started again as it was, with its name in the cluster and its users, but without its data."""

    def start(self) -> None:
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    server_binary(),
                    *self.settings,
                    *("--cluster-require-full-coverage", "no"),  # the other shards go on without a lost primary
                    *("--loglevel", "notice"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_replica(self) -> bool:
        return not self.is_primary

    @property
    def owners(self) -> list[tuple[int, int, int]]:
        """What it says of who has which slots: the first, the last, and the port of their primary."""
        ranges = [(first, last, servers[0][1]) for first, last, *servers in self.ask("CLUSTER", "SLOTS")]
        return joined(sorted(ranges))

    @property
    def shards(self) -> list[int]:
        """Those whose slot it has, as it says itself."""
        own = [(first, last) for first, last, port in self.owners if port == self.port]
        return [shard for shard, slot in SLOTS.items() if any(first <= slot <= last for first, last in own)]

    @property
    def seen(self) -> set[int]:
        """The ports of all primaries and replicas that it holds to be up."""
        return {server[1] for _, _, *servers in self.ask("CLUSTER", "SLOTS") for server in servers}

    @property
    def is_linked(self) -> bool:
        return b"cluster_state:ok" in clusters.info(self) and (self.is_primary or self.ask("ROLE")[3] == b"connected")


def joined(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Ranges of which no two that touch are of the same node: nodes cut them in their own ways."""
    found: list[tuple[int, int, int]] = []
    for first, last, port in ranges:
        if found and found[-1][2] == port and found[-1][1] + 1 == first:
            first = found.pop()[0]
        found.append((first, last, port))
    return found


async def until(condition: Callable[[], object]) -> None:
    """Wait for what the nodes tell; one that does not answer tells nothing. The caller bounds the time."""

    def holds() -> bool:
        try:
            return bool(condition())
        except (redis.RedisError, OSError):
            return False

    while not await asyncio.to_thread(holds):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


class Cluster(World):
    """Three primaries, and a replica of each."""

    def __init__(self, *, mails: bool) -> None:
        super().__init__(CLUSTER, mails=mails)
        self.nodes: list[Node] = []
        self.kinds = CLUSTER_KINDS
        self._cluster = clusters.Cluster()

    @property
    def version(self) -> str:
        return f"a cluster of {super().version}, {PRIMARIES} primaries with a replica each"

    async def _begin(self, stack: AsyncExitStack) -> list[Place]:
        stack.callback(self._kill_nodes)
        for number in range(2 * PRIMARIES):
            folder = self.folder / CLUSTER / str(number)
            folder.mkdir()
            node = Node(folder, free_port())
            node.start()
            self.nodes.append(node)
            self._cluster.nodes.append(node)
        async with asyncio.timeout(STARTING):
            for node in self.nodes:
                await until(node.is_up)
            await asyncio.to_thread(self._cluster.form, PRIMARIES)
            await self.until_whole()
            await self.give_up_after(LATE)
        if not any(line.startswith(b"MIGRATESLOTS") for line in self.nodes[0].ask("CLUSTER", "HELP")):
            self.kinds = {kind: lasts for kind, lasts in CLUSTER_KINDS.items() if kind != AT_ONCE}
        return [Place(CLUSTER, CLUSTER, self._cluster.url)] * USERS

    def _kill_nodes(self) -> None:
        for node in self.nodes:
            node.kill()

    # What it looks like

    def primaries(self) -> list[Node]:
        return [node for node in self.nodes if node.is_primary]

    def replica_of(self, primary: Node) -> Node:
        return next(node for node in self.nodes if node.is_replica and node.ask("ROLE")[2] == primary.port)

    def owner(self, slot: int) -> Node:
        port = next(port for first, last, port in self.nodes[0].owners if first <= slot <= last)
        return next(node for node in self.nodes if node.port == port)

    def is_whole(self) -> bool:
        """Whether every node sees all slots served, and itself and all others in their places, and all say the same."""
        ports = {node.port for node in self.nodes}
        return self.do_agree() and all(node.seen == ports and node.is_linked for node in self.nodes)

    def do_agree(self) -> bool:
        """Whether all nodes that run say the same of who has what."""
        told = [node.owners for node in self.nodes if node.process is not None]
        return all(owners == told[0] for owners in told)

    async def until_whole(self) -> None:
        """Wait until every primary has its replica, which has all that was written, and all nodes know that."""
        await until(self.is_whole)
        for primary in await asyncio.to_thread(self.primaries):
            await self.until_passed_on(primary)

    async def until_passed_on(self, primary: Node) -> None:
        """Wait until the replica of a primary has all that was written by now."""
        await until(partial(primary.has_passed_on, await asyncio.to_thread(primary.written)))

    async def give_up_after(self, milliseconds: int) -> None:
        """Tell the nodes that run when to hold another for lost. A busy machine lets any stand still, and only a loss
        that was meant to be is accounted for."""
        for node in self.nodes:
            if node.process is not None:
                with suppress(redis.RedisError, OSError):  # it is told again when it is up
                    await asyncio.to_thread(node.ask, "CONFIG", "SET", "cluster-node-timeout", milliseconds)
