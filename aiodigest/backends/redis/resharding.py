"""Another number of shards for a namespace in use, without moving its timelines.

A new layout takes the adds from one moment on, and workers deliver from both until the old one is empty. Every step
here can be repeated, so that an interrupted change resumes where it stopped.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import cast

from aiodigest.backend import SLICE, Retired
from aiodigest.backends.redis.layout import RETIRED, Layout
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import number, text
from aiodigest.errors import InvalidState

SCRIPTS = ("layout", "reshard", "drain", "keep", "carry", "retire", "letter", "discard", "counts")
HELD = ("waiting", "ready", "leased", "dead")  # what keeps a shard from being empty


class Resharding:
    """Changes the layout of a namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._goal: Layout | None = None  # what `begin` was asked for, until `drain` has brought it to its end

    async def begin(self, shards: int) -> bool:
        """Let a layout of ``shards`` shards take the adds; False if it already does, and nothing is left to drain.

        Raises InvalidState while a change to another number is under way.
        """
        namespace = self._namespace
        connections = await namespace.connected()
        self._goal = None
        await namespace.permit(*SCRIPTS)
        await namespace.look_up()
        old, drained = namespace.layout.current, namespace.layout.drained
        if drained is not None:
            if old.shards != shards:
                raise InvalidState(
                    f"namespace {namespace.name!r} is on its way from {drained.shards} to "
                    f"{old.shards} shards: that must end before it can have {shards}: "
                    f"aiodigest reshard --namespace {namespace.name} --to {old.shards}"
                )
            self._goal = old
            return True
        if old.shards == shards:
            return False
        new = Layout(shards, old.epoch + 1)
        await namespace.note(namespace.root, "current", old)  # if it is new
        change = [old.version, new.version]
        begun = await connections.run("reshard", namespace.root, change, replicas=namespace.wait_replicas)
        await namespace.look_up()
        if begun != 1 and namespace.layout.current != new:
            raise InvalidState(f"the layout of namespace {namespace.name!r} was changed by another at this moment")
        self._goal = new
        return namespace.layout.drained is not None

    async def drain(self) -> dict[str, int]:
        """Bring the end of the old layout nearer; return the timelines and dead letters left, by state.

        An empty answer: the old layout is gone.
        """
        namespace = self._namespace
        connections = await namespace.connected()
        held = Counter[str]()
        if (old := namespace.layout.drained) is not None:
            for shard in namespace.shard_map.draining:
                held += await self._drain_shard(shard)
            if not held:
                await connections.run("reshard", namespace.root, [old.version, ""])
        await namespace.look_up()
        if self._goal is not None and namespace.layout.current.epoch < self._goal.epoch:  # forgotten by a failover
            await self.begin(self._goal.shards)
            return await self.drain()
        return dict(held)

    async def _drain_shard(self, shard: int) -> Counter[str]:
        namespace = self._namespace
        home = namespace.layout.homes[shard]
        # once it is empty nobody may find it as it was, so the replicas must know the mark and the end
        mark, replicas = [home.layout.version, home.layout.draining], namespace.wait_replicas
        key = namespace.key(shard, "layout")
        marked = await namespace.connections.run("drain", key, mark, replicas=replicas)
        if text(cast("list[bytes]", marked)[1]) == RETIRED:
            return Counter()
        try:
            while ids := cast("list[list[bytes]]", await namespace.call("letters", shard, SLICE, "", "", ""))[0]:
                for letter_id in ids:  # the oldest
                    await self.move(shard, text(letter_id))
            counts = cast("list[bytes | int]", await namespace.call("counts", shard))
            held = {text(name): number(value) for name, value in zip(counts[::2], counts[1::2], strict=True)}
            counters = await namespace.call("retire", shard, "")
            if counters is None:
                return Counter({state: held[state] for state in HELD if held[state]})
            name = f"{home.layout.version}:{home.number}"
            await namespace.call("carry", namespace.shard_map.current.start, name, *cast("list[bytes]", counters))
            if await namespace.call("retire", shard, RETIRED) is None:  # a failover has brought something back
                return await self._drain_shard(shard)
        except Retired:  # another process does the same
            pass
        return Counter()

    async def move(self, shard: int, letter_id: str, *, forget_missing: bool = True) -> None:
        """Give a dead letter to the shard that has its timeline now.

        The id of a dead letter whose facts have expired is dropped too; otherwise moving all of them would meet it
        forever.
        """
        namespace = self._namespace
        start, found = 0, False
        while reply := await namespace.call("letter", shard, letter_id, start):
            found = True
            *facts, size, page = cast("tuple[bytes, bytes, int, int, bytes, int, list[bytes]]", reply)
            end = start + len(page)
            target = namespace.shard_map.shard_of(text(facts[0]))
            if not await namespace.call("keep", target, letter_id, *facts, start, int(end >= size), *page):
                start = 0
                continue
            if end >= size or not page:
                break
            start = end
        if found or forget_missing:
            await namespace.call("discard", shard, letter_id, repeat=True)

    async def bring(self, letter_id: str) -> None:
        """Move a dead letter if it is still in an old shard."""
        for shard in self._namespace.shard_map.draining:
            with suppress(Retired):
                await self.move(shard, letter_id, forget_missing=False)
