"""The faults of a run on a cluster: primaries that are lost, and slots that are moved.

One at a time, each on a cluster that is whole: a primary is never lost while its replica lacks what it has, nor one
that takes part in the move of a slot.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

from chaos.cluster import LATE, SLOTS, SOON, Cluster, Node, until
from chaos.faults import Faults, Inflict, Scope
from chaos.plan import Planned
from chaos.process import CLUSTER

MIGRATION = 10_000  # ms that a key may take
KEYS = 100  # at once

Move: TypeAlias = Callable[[int, Node, Node], Awaitable[str]]


class ClusterFaults(Faults):
    def __init__(self, world: Cluster) -> None:
        super().__init__(world)
        self._cluster = world

    def _of_servers(self, planned: Planned, where: str, how: str) -> tuple[str, Scope, Inflict]:
        inflict: dict[str, Callable[[Planned], Awaitable[str]]] = {
            "kill -9": self._kill,
            "SIGSTOP until it is none": self._stop,
            "CLUSTER FAILOVER": self._fail_over,
            "CLIENT PAUSE": self._pause,
            "CLIENT KILL": lambda planned: self._tell(planned, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"),
            "SCRIPT FLUSH": lambda planned: self._tell(planned, "SCRIPT", "FLUSH"),
            "key by key and back": lambda planned: self._move(planned, self._by_key),
            "at once and back": lambda planned: self._move(planned, self._at_once),
        }
        return CLUSTER, (CLUSTER, None, None, None), lambda: inflict[how](planned)

    async def _settle(self, need: str) -> None:
        if need == CLUSTER:
            await self._cluster.until_whole()

    def _note(self, kind: str, planned: Planned, *facts: object) -> None:
        self._world.journal.write(kind, planned.number, *facts)

    async def _primary(self, planned: Planned) -> tuple[Node, Node]:
        """A primary, and its replica; from now on the fault concerns its shards."""
        primaries = await asyncio.to_thread(self._cluster.primaries)
        primary = primaries[int(planned.choice * len(primaries))]
        replica = await asyncio.to_thread(self._cluster.replica_of, primary)
        self._note("hit", planned, await asyncio.to_thread(lambda: primary.shards))
        return primary, replica

    # Primaries

    @asynccontextmanager
    async def _taking_over(self) -> AsyncGenerator[None]:
        """Let a replica take over inside, and at no other time: nodes hold each other for lost soon, and remember for
        as short whom they have voted for."""
        try:
            await self._cluster.give_up_after(SOON)
            yield
        finally:
            await self._cluster.give_up_after(LATE)

    async def _loses(self, planned: Planned) -> tuple[Node, Node]:
        """Return a primary that is to be lost, and its replica: what is told to the one from now on may be lost."""
        primary, replica = await self._primary(planned)
        since = time.monotonic_ns()
        await self._cluster.until_passed_on(primary)
        self._note("forgot", planned, since)
        return primary, replica

    async def _promoted(self, planned: Planned, replica: Node) -> None:
        """Wait until a replica has taken over, and all who run know it: the fault is over then."""
        await until(lambda: replica.is_primary and self._cluster.do_agree())
        self._note("over", planned, "")

    async def _kill(self, planned: Planned) -> str:
        """It comes back empty, and so not before another one has its slots."""
        primary, replica = await self._loses(planned)
        async with self._taking_over():
            primary.kill()
            await self._promoted(planned, replica)
        await asyncio.sleep(planned.lasts)
        primary.start()
        await until(primary.is_up)
        await self._cluster.give_up_after(LATE)
        return ""

    async def _stop(self, planned: Planned) -> str:
        """It wakes as a primary, and hears only then that it is none."""
        primary, replica = await self._loses(planned)
        assert primary.process is not None
        process = primary.process
        try:
            async with self._taking_over():
                primary.process = None  # nobody asks it meanwhile
                os.kill(process.pid, signal.SIGSTOP)
                await self._promoted(planned, replica)
            await asyncio.sleep(planned.lasts)
        finally:
            since = time.monotonic_ns()
            os.kill(process.pid, signal.SIGCONT)
            primary.process = process
        try:
            await until(lambda: primary.is_replica)
        finally:
            self._note("stale", planned, since)
            await self._cluster.give_up_after(LATE)
        return ""

    async def _fail_over(self, planned: Planned) -> str:
        """By hand: the primary waits until its replica has all."""
        _, replica = await self._primary(planned)
        async with self._taking_over():
            await asyncio.to_thread(replica.ask, "CLUSTER", "FAILOVER")
            await until(lambda: replica.is_primary and self._cluster.do_agree())
        return ""

    async def _pause(self, planned: Planned) -> str:
        what = "ALL" if planned.choice * 1000 % 2 < 1 else "WRITE"
        idle = await self._tell(planned, "CLIENT", "PAUSE", round(planned.lasts * 1000), what)
        await asyncio.sleep(planned.lasts)
        return idle

    async def _tell(self, planned: Planned, *command: object) -> str:
        primary, _ = await self._primary(planned)
        answer = await asyncio.to_thread(primary.ask, *command)
        return "" if answer in (b"OK", True) or isinstance(answer, int) else f"the server answered {answer!r}"

    # Slots

    async def _move(self, planned: Planned, move: Move) -> str:
        """Move the slot of a shard to another primary, and later back."""
        shard = int(planned.choice * len(SLOTS))
        slot = SLOTS[shard]
        source = await asyncio.to_thread(self._cluster.owner, slot)
        others = [node for node in await asyncio.to_thread(self._cluster.primaries) if node is not source]
        target = others[planned.number % len(others)]
        self._note("hit", planned, [shard])
        if idle := await move(slot, source, target):
            return idle
        await self._cluster.until_whole()
        await asyncio.sleep(planned.lasts)
        return await move(slot, target, source)

    async def _by_key(self, slot: int, source: Node, target: Node) -> str:
        """As redis-cli does it; in between, one has a part of the slot and the other one the rest."""
        await asyncio.to_thread(target.ask, "CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        await asyncio.to_thread(source.ask, "CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)
        moved = 0
        while keys := await asyncio.to_thread(source.ask, "CLUSTER", "GETKEYSINSLOT", slot, KEYS):
            some = cast("list[bytes]", keys[: max(1, len(keys) // 2)])
            await asyncio.to_thread(migrate, source, target, some)
            moved += len(some)
            await asyncio.sleep(0.02)
        first = [target, source]
        for node in [*first, *(node for node in await asyncio.to_thread(self._cluster.primaries) if node not in first)]:
            await asyncio.to_thread(node.ask, "CLUSTER", "SETSLOT", slot, "NODE", target.id)
        await until(self._cluster.do_agree)
        return "" if moved else "there was nothing in it"

    async def _at_once(self, slot: int, source: Node, target: Node) -> str:
        """As Valkey 9 does it, by replication."""
        known = await asyncio.to_thread(migrations, source)
        await asyncio.to_thread(source.ask, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.id)
        facts: dict[bytes, bytes] = {b"state": b""}
        while facts[b"state"] not in (b"success", b"failed", b"cancelled"):
            await asyncio.sleep(0.02)
            now = await asyncio.to_thread(migrations, source)
            facts = next(now[name] for name in now.keys() - known.keys())
        await until(self._cluster.do_agree)
        return "" if facts[b"state"] == b"success" else f"it ended as {facts}"


def migrate(source: Node, target: Node, keys: Iterable[bytes]) -> None:
    answer = source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, MIGRATION, "REPLACE", "KEYS", *keys)
    assert answer in (b"OK", b"NOKEY", True), answer


def migrations(source: Node) -> dict[bytes, dict[bytes, bytes]]:
    """Of slots, that a node remembers, by their names."""
    return {each[b"name"]: each for each in source.ask("CLUSTER", "GETSLOTMIGRATIONS")}
