"""The reference state machine as an in-memory ``Backend``: no server, and nothing is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import RLock
from typing import Self
from uuid import uuid4

from aiodigest.backend import Add, Backend, Claims, Close, Closed, Lease, Move, Operations, Retry, ShardMap
from aiodigest.backends.memory.operations import ReferenceOperations, holder_of
from aiodigest.backends.memory.reference import Shard
from aiodigest.errors import AiodigestError, LeaseLost
from aiodigest.policy import Limits, Terms


def system_ms() -> int:
    """Return the time of this machine's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class ReferenceBackend(Backend):
    """Shards of the reference state machine, with a wake-up stream each. ``now`` is the clock, in milliseconds.

    Any event loop and any thread may use it.
    """

    def __init__(
        self, *, shards: int = 1, now: Callable[[], int] = system_ms, nonce: Callable[[], str] = lambda: uuid4().hex
    ) -> None:
        self.machines = [Shard() for _ in range(shards)]
        self._shard_map = ShardMap(shards, range(shards))
        self.lock = RLock()  # an engine has two threads if `engine.sync` is used beside it
        self._operations = ReferenceOperations(self.machines, lambda: self.shard_map, now, self.lock)
        self._wake_ups = [0] * shards
        self._waiting: list[set[asyncio.Future[None]]] = [set() for _ in range(shards)]
        self._now = now
        self._nonce = nonce

    @property
    def url(self) -> str:
        return "memory://"

    @property
    def shard_map(self) -> ShardMap:
        return self._shard_map

    @property
    def operations(self) -> Operations:
        return self._operations

    def clone(self) -> Self:
        return self

    async def connect(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    @contextmanager
    def _waking(self, shard: int) -> Generator[Shard, None, None]:
        """Wake those who wait for the shard if the body makes its schedule earlier."""
        with self.lock:
            machine = self.machines[shard]
            before = machine.head_ms
            yield machine
            if machine.head_ms < before:
                self._wake_ups[shard] += 1
                for waiting in self._waiting[shard]:
                    if waiting.get_loop() is asyncio.get_running_loop():
                        _wake(waiting)
                    else:
                        with suppress(RuntimeError):  # its loop is closed
                            waiting.get_loop().call_soon_threadsafe(_wake, waiting)

    async def wait(self, shard: int, last: str) -> str:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self.lock:
            if self._wake_ups[shard] != int(last):
                return str(self._wake_ups[shard])
            self._waiting[shard].add(waiting)
        try:
            await waiting
        finally:
            with self.lock:
                self._waiting[shard].discard(waiting)
        return str(self._wake_ups[shard])

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        with self._waking(shard) as machine:
            return list(machine.add(adds, self._now()))

    async def claim(self, shard: int, count: int, lease_ms: int, limits: Limits) -> Claims:
        with self.lock:
            claims = self.machines[shard].claim(count, lease_ms, limits, self._now(), self._nonce())
            return replace(claims, wake_up=str(self._wake_ups[shard]))

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        with self.lock:
            return self.machines[shard].open(key, lease_ms, limits, self._now(), self._nonce())

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        with self.lock:
            delivery = self.machines[shard].fenced(lease)
            if isinstance(delivery, Closed):
                raise LeaseLost(f"the lease on timeline {lease.key!r} is lost")
            return delivery.entries[start : start + count]

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        with self.lock:
            return self.machines[shard].renew(leases, lease_ms, self._now())

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed]:
        with self._waking(shard) as machine:
            return machine.close(closes, self._now(), self._nonce())

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool]:
        with self._waking(shard) as machine:
            return machine.retry(retries, self._now(), self._nonce())

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool]:
        with self._waking(shard) as machine:
            return machine.release(leases, started, self._now())

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        deadline = self._now() if deadline_ms is None else deadline_ms
        promoted: list[tuple[str, int]] = []
        for shard in self.shard_map.live:
            with self._waking(shard) as machine:
                promoted += machine.schedule(deadline)
        return promoted

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        now = self._now()
        recovered: list[str] = []
        for shard in self.shard_map.live:
            with self._waking(shard) as machine:
                recovered += machine.maintenance(now if deadline_ms is None else deadline_ms, now)
        return recovered

    async def delete(self, key: str) -> bool:
        with self.lock:
            return self.machines[self.shard_map.shard_of(key)].delete(key)

    async def flush(self, key: str) -> bool:
        with self._waking(self.shard_map.shard_of(key)) as machine:
            return machine.flush(key, self._now())

    async def remove(self, key: str, record_id: bytes, limits: Limits) -> bool:
        with self._waking(self.shard_map.shard_of(key)) as machine:
            return machine.remove(key, record_id, limits, self._now(), self._nonce())

    async def reschedule(self, key: str, move: Move) -> int | None:
        with self._waking(self.shard_map.shard_of(key)) as machine:
            return machine.reschedule(key, move, self._now())

    async def replay(self, letter_id: str, terms: Terms, own: bool) -> bool:
        with self._waking(holder_of(self.machines, letter_id)) as machine:
            return machine.replay(letter_id, terms, own, self._now())

    async def discard(self, letter_id: str) -> bool:
        with self.lock:
            return self.machines[holder_of(self.machines, letter_id)].dead.pop(letter_id, None) is not None
