"""The store of a simulated world, in which a namespace may get another number of shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from aiodigest.backend import ShardMap
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.memory.timelines import Shard


class Store(ReferenceBackend):
    """A store whose number of shards may change: others take the adds then, and the old ones are drained."""

    def __init__(self, shards: int, now: Callable[[], int], nonce: Callable[[], str]) -> None:
        super().__init__(shards=shards, now=now, nonce=nonce)
        self.retired: set[int] = set()
        self.moved_at = 0.0  # when they changed last

    def change(self, shards: int) -> None:
        """Let so many new shards take the adds."""
        made = len(self.machines)
        self.machines.extend(Shard() for _ in range(shards))
        self._wake_ups.extend([0] * shards)
        self._waiting.extend({} for _ in range(shards))
        self._shard_map = ShardMap(made + shards, range(made, made + shards), self._shard_map.current)
        self.moved_at = asyncio.get_running_loop().time()

    def end_drained(self) -> None:
        """Move the dead letters of the old shards, and retire those that hold nothing."""
        for shard in self._shard_map.draining:
            machine = self.machines[shard]
            while machine.dead:
                letter_id, letter = machine.dead.popitem()
                taker = self.machines[self._shard_map.shard_of(letter.key)]
                buried_ms = letter.buried_ms - machine.shift_ms + taker.shift_ms
                taker.dead[letter_id] = replace(letter, buried_ms=buried_ms)
            if not (machine.waiting or machine.ready or machine.leased):
                self.retired.add(shard)
        if self.retired.issuperset(self._shard_map.draining):
            self._shard_map = replace(self._shard_map, draining=range(0))
