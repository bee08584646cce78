"""Operators' calls on the in-memory store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from aiodigest.backend import Bookmark, Operations, Page, ShardMap, StoredDeadLetter, StoredTimeline
from aiodigest.backends.memory.reference import Shard
from aiodigest.backends.memory.timelines import page_of
from aiodigest.errors import ConfigurationError
from aiodigest.models import State


class ReferenceOperations(Operations):
    """The operators' calls on the reference state machine. ``now`` is the clock, in milliseconds."""

    def __init__(
        self,
        machines: list[Shard],
        shard_map: Callable[[], ShardMap],
        now: Callable[[], int],
        lock: AbstractContextManager[bool],
    ) -> None:
        self._lock = lock
        self._machines = machines
        self._shard_map = shard_map
        self._now = now

    def _machine(self, key: str) -> Shard:
        return self._machines[self._shard_map().shard_of(key)]

    async def look(self, key: str) -> StoredTimeline | None:
        with self._lock:
            return self._machine(key).look(key)

    async def entries(self, key: str) -> list[bytes]:
        with self._lock:
            held = self._machine(key).held.get(key)
            if held is None:
                return []
            return (held.delivery.entries if held.delivery else []) + held.log

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[StoredTimeline]:
        with self._lock:
            machine = self._machines[shard]
            schedule = {"waiting": machine.waiting, "ready": machine.ready, "leased": machine.leased}[state]
            keys, end = page_of(schedule, count, after)
            timelines = map(machine.look, keys)
            return Page([timeline for timeline in timelines if timeline], end)

    async def counts(self) -> dict[str, int]:
        with self._lock:
            total: Counter[str] = Counter()
            for machine in self._machines:
                total.update(machine.counts)
                total["dead"] += len(self._dead_letters(machine))
                for name in ("waiting", "ready", "leased"):
                    total[name] += len(getattr(machine, name))
            dues = [due for machine in self._machines for due in (*machine.waiting.values(), *machine.ready.values())]
            if dues:
                total["oldest_due_ms"] = min(dues)
                total["overdue_ms"] = max(0, self._now() - min(dues))
            return total

    async def dead_letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        with self._lock:
            return Page(*page_of(self._dead_letters(self._machines[shard]), count, after))

    def _dead_letters(self, machine: Shard) -> dict[str, int]:
        """Return the dead letters that have not expired, with the times when they were set aside."""
        now = self._now()
        return {name: letter.buried_ms for name, letter in machine.dead.items() if machine.dead.alive(name, now)}

    async def dead_letter(self, letter_id: str, shard: int | None = None) -> StoredDeadLetter | None:
        with self._lock:
            machine = self._machines[holder_of(self._machines, letter_id) if shard is None else shard]
            return machine.dead.alive(letter_id, self._now())

    async def erase(self) -> int:
        with self._lock:
            held = sum(len(machine.held) + len(machine.dead) for machine in self._machines)
            self._machines[:] = [Shard() for _ in self._machines]
            return held

    async def reshard(self, shards: int) -> bool:
        if shards != len(self._machines):
            raise ConfigurationError(f"this store keeps its number of shards, {len(self._machines)}")
        return False


def holder_of(machines: Sequence[Shard], letter_id: str) -> int:
    """Return the shard that holds a dead letter; 0 if none does."""
    return next((shard for shard, machine in enumerate(machines) if letter_id in machine.dead), 0)
