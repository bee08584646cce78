"""The reference state machine as an in-memory ``Backend``: no server, nothing kept, one event loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4
from zlib import crc32

from aiodigest.backend import Add, Backend, Bookmark, Claims, Close, Closed, Lease, Move, Page, RawLetter, Retry, Window
from aiodigest.backends.memory.reference import Shard
from aiodigest.backends.memory.timelines import page_of
from aiodigest.errors import AiodigestError, LeaseLost
from aiodigest.models import State
from aiodigest.policy import Limits, Terms


def system_ms() -> int:
    """Return the time of this machine's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


class ReferenceBackend(Backend):
    """Shards of the reference state machine, each with a doorbell. ``now`` is the clock, in milliseconds."""

    def __init__(
        self, *, shards: int = 1, now: Callable[[], int] = system_ms, nonce: Callable[[], str] = lambda: uuid4().hex
    ) -> None:
        self.machines = [Shard() for _ in range(shards)]
        self._rung = [0] * shards
        self._bells = [asyncio.Event() for _ in range(shards)]
        self._now = now
        self._nonce = nonce

    @property
    def shards(self) -> int:
        return len(self.machines)

    def shard_of(self, key: str) -> int:
        return crc32(key.encode()) % len(self.machines)

    async def connect(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    @contextmanager
    def _ringing(self, shard: int) -> Generator[Shard, None, None]:
        """Ring the shard's doorbell if the body makes its schedule earlier."""
        machine = self.machines[shard]
        before = machine.head_ms
        yield machine
        if machine.head_ms < before:
            self._rung[shard] += 1
            self._bells[shard].set()
            self._bells[shard] = asyncio.Event()

    async def wait(self, shard: int, bell: str) -> str:
        if self._rung[shard] == int(bell):
            await self._bells[shard].wait()
        return str(self._rung[shard])

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        with self._ringing(shard) as machine:
            return list(machine.add(adds, self._now()))

    async def claim(self, shard: int, slots: int, lease_ms: int, limits: Limits) -> Claims:
        claims = self.machines[shard].claim(slots, lease_ms, limits, self._now(), self._nonce())
        return replace(claims, bell=str(self._rung[shard]))

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        return self.machines[shard].open(key, lease_ms, limits, self._now(), self._nonce())

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        delivery = self.machines[shard].fenced(lease)
        if isinstance(delivery, Closed):
            raise LeaseLost(f"the lease on timeline {lease.key!r} is lost")
        return delivery.entries[start : start + count]

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        return self.machines[shard].renew(leases, lease_ms, self._now())

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed]:
        with self._ringing(shard) as machine:
            return machine.close(closes, self._now(), self._nonce())

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool]:
        with self._ringing(shard) as machine:
            return machine.retry(retries, self._now(), self._nonce())

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool]:
        with self._ringing(shard) as machine:
            return machine.release(leases, started, self._now())

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        deadline = self._now() if deadline_ms is None else deadline_ms
        promoted: list[tuple[str, int]] = []
        for shard in range(self.shards):
            with self._ringing(shard) as machine:
                promoted += machine.schedule(deadline)
        return promoted

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        now = self._now()
        recovered: list[str] = []
        for shard in range(self.shards):
            with self._ringing(shard) as machine:
                recovered += machine.maintenance(now if deadline_ms is None else deadline_ms, now)
        return recovered

    async def delete(self, key: str) -> bool:
        return self.machines[self.shard_of(key)].delete(key)

    async def flush(self, key: str) -> bool:
        with self._ringing(self.shard_of(key)) as machine:
            return machine.flush(key, self._now())

    async def remove(self, key: str, record_id: bytes, limits: Limits) -> bool:
        with self._ringing(self.shard_of(key)) as machine:
            return machine.remove(key, record_id, limits, self._now(), self._nonce())

    async def reschedule(self, key: str, move: Move) -> int | None:
        with self._ringing(self.shard_of(key)) as machine:
            return machine.reschedule(key, move, self._now())

    async def look(self, key: str) -> Window | None:
        return self.machines[self.shard_of(key)].look(key)

    async def entries(self, key: str) -> list[bytes]:
        held = self.machines[self.shard_of(key)].held.get(key)
        if held is None:
            return []
        return (held.delivery.entries if held.delivery else []) + held.log

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[Window]:
        machine = self.machines[shard]
        schedule = {"waiting": machine.waiting, "ready": machine.ready, "leased": machine.leased}[state]
        keys, end = page_of(schedule, count, after)
        windows = map(machine.look, keys)
        return Page([window for window in windows if window], end)

    async def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for machine in self.machines:
            total.update(machine.counts)
            total["dead"] += len(self._letters(machine))
            for name in ("waiting", "ready", "leased"):
                total[name] += len(getattr(machine, name))
        dues = [due for machine in self.machines for due in (*machine.waiting.values(), *machine.ready.values())]
        if dues:
            total["oldest_due_ms"] = min(dues)
            total["overdue_ms"] = max(0, self._now() - min(dues))
        return total

    async def erase(self) -> int:
        held = sum(len(machine.held) + len(machine.dead) for machine in self.machines)
        self.machines = [Shard() for _ in self.machines]
        return held

    async def letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        return Page(*page_of(self._letters(self.machines[shard]), count, after))

    def _letters(self, machine: Shard) -> dict[str, int]:
        """Return the live dead letters, with their times of burial."""
        now = self._now()
        return {name: letter.buried_ms for name, letter in machine.dead.items() if machine.dead.alive(name, now)}

    async def letter(self, letter_id: str, shard: int | None = None) -> RawLetter | None:
        machine = self.machines[self._burial_place(letter_id) if shard is None else shard]
        return machine.dead.alive(letter_id, self._now())

    def _burial_place(self, letter_id: str) -> int:
        return next((shard for shard, machine in enumerate(self.machines) if letter_id in machine.dead), 0)

    async def replay(self, letter_id: str, terms: Terms, own: bool) -> bool:
        with self._ringing(self._burial_place(letter_id)) as machine:
            return machine.replay(letter_id, terms, own, self._now())

    async def discard(self, letter_id: str) -> bool:
        return self.machines[self._burial_place(letter_id)].dead.pop(letter_id, None) is not None
