"""Another number of shards for a namespace in use, without moving its timelines.

A new layout takes the adds from one moment on, and workers deliver from both until the old one is empty. Every step
here can be repeated, so that an interrupted change resumes where it stopped.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import cast

from aiodigest.backend import SLICE, Retired
from aiodigest.backends.redis.connections.shared import AnyLink
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.namespace import RETIRED, Namespace
from aiodigest.backends.redis.scripts import number, pack_bookmark, text
from aiodigest.errors import InvalidState

SCRIPTS = ("layout", "reshard", "drain", "keep", "carry", "retire", "letter", "discard", "counts")
HELD = ("waiting", "ready", "leased", "dead")  # what keeps a shard from being empty


class Relocation(Namespace):
    """The part of a backend that changes the layout."""

    _goal: Layout | None = None  # what `reshard` was asked for, until `drain` has brought it to its end

    async def reshard(self, shards: int) -> bool:
        """Let a layout of ``shards`` shards take the adds; False if it already does, and nothing is left to drain.

        Raises InvalidState while a change to another number is under way.
        """
        link = await self._connected()
        self._goal = None
        await self._permit(link, *SCRIPTS)
        await self._look_up(link)
        if self._drained:
            if self._current.shards != shards:
                raise InvalidState(
                    f"namespace {self.namespace!r} is on its way from {self._drained[0].shards} to "
                    f"{self._current.shards} shards: that must end before it can have {shards}: "
                    f"aiodigest reshard --namespace {self.namespace} --to {self._current.shards}"
                )
            self._goal = self._current
            return True
        if self._current.shards == shards:
            return False
        old, new = self._current, Layout(shards, self._current.epoch + 1)
        await self._noted(link, self._root, "current", old)  # if it is new
        change = [old.version, new.version]
        begun = await link.run("reshard", self._root, change, repeat=True, replicas=self._replicas)
        await self._look_up(link)
        if begun != 1 and self._current != new:
            raise InvalidState(f"the layout of namespace {self.namespace!r} was changed by another at this moment")
        self._goal = new
        return bool(self._drained)

    async def drain(self) -> dict[str, int]:
        """Bring the end of the old layout nearer; return the timelines and dead letters left, by state.

        An empty answer: the old layout is gone.
        """
        link = await self._connected()
        left = Counter[str]()
        for old in list(self._drained):
            base = self._home(old)
            held = Counter[str]()
            for shard in range(base, base + old.shards):
                held += await self._drain_shard(link, shard)
            if not held:
                await link.run("reshard", self._root, [old.version, ""], repeat=True)
            left += held
        await self._look_up(link)
        if self._goal is not None and self._current.epoch < self._goal.epoch:  # a failover has forgotten the change
            await self.reshard(self._goal.shards)
            return await self.drain()
        return dict(left)

    async def _drain_shard(self, link: AnyLink, shard: int) -> Counter[str]:
        layout = self._homes[shard].layout
        # once it is empty nobody may find it as it was, so the replicas must know the mark and the end
        mark, replicas = [layout.version, layout.draining], self._replicas
        marked = await link.run("drain", self._key(shard, "layout"), mark, repeat=True, replicas=replicas)
        if text(cast("list[bytes]", marked)[1]) == RETIRED:
            return Counter()
        try:
            while ids := await self._some_letters(shard):
                for letter_id in ids:
                    await self._move(shard, letter_id)
            counts = cast("list[bytes | int]", await self._call("counts", shard))
            held = {text(name): number(value) for name, value in zip(counts[::2], counts[1::2], strict=True)}
            counters = await self._call("retire", shard, "")
            if counters is None:
                return Counter({state: held[state] for state in HELD if held[state]})
            name = f"{layout.version}:{self._homes[shard].number}"
            await self._call("carry", self._home(self._current), name, *cast("list[bytes]", counters))
            if await self._call("retire", shard, RETIRED) is None:  # a failover has brought something back
                return await self._drain_shard(link, shard)
        except Retired:  # another process does the same
            pass
        return Counter()

    async def _some_letters(self, shard: int) -> list[str]:
        """Return the ids of a shard's oldest dead letters."""
        ids, _ = cast("tuple[list[bytes], object]", await self._call("letters", shard, SLICE, *pack_bookmark(None)))
        return [text(letter_id) for letter_id in ids]

    async def _move(self, shard: int, letter_id: str, *, forget_missing: bool = True) -> None:
        """Give a dead letter to the shard that has its timeline now.

        The id of a letter whose facts have expired is dropped too; otherwise moving all of them would meet it forever.
        """
        start, found = 0, False
        while reply := await self._call("letter", shard, letter_id, start):
            found = True
            *facts, size, page = cast("tuple[bytes, bytes, int, int, bytes, int, list[bytes]]", reply)
            end = start + len(page)
            target = self.shard_of(text(facts[0]))
            if not await self._call("keep", target, letter_id, *facts, start, int(end >= size), *page):
                start = 0
                continue
            if end >= size or not page:
                break
            start = end
        if found or forget_missing:
            await self._call("discard", shard, letter_id)

    async def _bring(self, letter_id: str) -> None:
        """Move a dead letter if it is still in an old shard."""
        for shard in self._live(*self._drained):
            with suppress(Retired):
                await self._move(shard, letter_id, forget_missing=False)
