"""The store of a simulated world, in which a namespace may get another number of shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aiodigest import AiodigestError
from aiodigest.backend import Add, Claims, Close, Closed, Lease, Move, Postpone, Retry, ShardMap
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.memory.timelines import Shard
from aiodigest.policy import Limits, Terms
from simulation.ledger import Ledger


class Store(ReferenceBackend):
    """A store whose number of shards may change: others take the adds then, and the old ones are drained."""

    def __init__(self, shards: int, now: Callable[[], int], nonce: Callable[[], str]) -> None:
        super().__init__(shards=shards, now=now, nonce=nonce)
        self.retired: set[int] = set()
        self.moved_at = 0.0  # when they changed last
        self.ledger: Ledger | None = None

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

    # What the ledger is told of

    def _time(self, shard: int) -> int:
        assert self.ledger
        now = self.machines[shard].now(self._now())
        self.ledger.latest[shard] = max(self.ledger.latest[shard], now)
        return now

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        answers = await super().add(shard, adds)
        if self.ledger:
            self.ledger.added(shard, adds, answers, self.machines[shard], self._time(shard))
        return answers

    async def claim(self, shard: int, *arguments: Any, **named: Any) -> Claims:
        claims = await super().claim(shard, *arguments, **named)
        if self.ledger:
            self.ledger.claimed(shard, claims, self.machines[shard], self._time(shard))
        return claims

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed]:
        answers = await super().close(shard, closes)
        if ledger := self.ledger:
            for close, answer in zip(closes, answers, strict=True):
                ledger.closed(shard, close, answer, self.machines[shard], self._time(shard))
        return answers

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool]:
        answers = await super().retry(shard, retries)
        if ledger := self.ledger:
            for retry, answer in zip(retries, answers, strict=True):
                if answer:
                    ledger.retried(shard, retry, self.machines[shard], self._time(shard))
        return answers

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool]:
        answers = await super().release(shard, leases, started)
        if ledger := self.ledger:
            for lease in leases:
                ledger.released(shard, lease)
        return answers

    async def postpone(self, shard: int, postpones: Sequence[Postpone], limits: Limits) -> list[bool]:
        answers = await super().postpone(shard, postpones, limits)
        if ledger := self.ledger:
            for postpone in postpones:
                ledger.put_aside(shard, postpone, self._time(shard))
        return answers

    async def flush(self, key: str) -> bool:
        is_there = await super().flush(key)
        if self.ledger:
            self.ledger.flushed(key, self._time)
        return is_there

    async def delete(self, key: str) -> bool:
        was_there = await super().delete(key)
        if self.ledger:
            self.ledger.deleted(key)
        return was_there

    async def remove(self, key: str, name: bytes, limits: Limits) -> bool:
        removed = await super().remove(key, name, limits)
        if self.ledger:
            self.ledger.moved(key, self.machines)
        return removed

    async def reschedule(self, key: str, move: Move) -> int | None:
        moved = await super().reschedule(key, move)
        if self.ledger:
            self.ledger.moved(key, self.machines)
        return moved

    async def replay(self, letter_id: str, terms: Terms, own: bool | None) -> bool:
        letters = {name: (shard, each.dead[name]) for shard, each in enumerate(self.machines) for name in each.dead}
        ready = await super().replay(letter_id, terms, own)
        if self.ledger:
            self.ledger.replayed(*letters[letter_id])
        return ready
