"""A store as tests use it: a backend, in memory or in any place that a URL may name, whose clock the test moves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from aiodigest.backend import Add, Backend, Claims, Close, Closed, Lease, NewDeadLetter, Postpone, Retry
from aiodigest.errors import AiodigestError
from aiodigest.policy import Policy
from aiodigest.records.entries import identity_of, pack, unpack

NOW = 1_700_000_000_000
LEASE = 60_000
MINUTE = 60_000
DAY = 86_400_000


@dataclass(frozen=True)
class Place:
    """Where a store may be: one server, the primary that sentinels name, or a cluster; all tests of a run share it."""

    name: str
    url: str
    client_of: Callable[[str], Any]  # a client that may do all, of the server that has the keys of a tag


@contextmanager
def bound_of_dead_letters(size: int) -> Generator[None]:
    """Let a shard keep so many bytes of dead letters, in place of 256 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        defaults = Close._field_defaults | {"letter_bytes": size}
        patch.setattr(Close.__new__, "__defaults__", tuple(defaults.values()))
        yield


@dataclass
class Store:
    """A backend whose clock the test moves, and its calls with few arguments, each for the shard of its timeline."""

    backend: Backend
    now: int = NOW
    policy: Policy = Policy()

    async def add(
        self, key: str, *records: str, policy: Policy | None = None, value: str = "v", timestamp: float | None = None
    ) -> list[bool | AiodigestError]:
        """Add records by their ids, in one call."""
        stamp = None if timestamp is None else round(timestamp * 1_000_000)
        terms = (policy or self.policy).terms
        own = policy is not None
        adds = [Add(key, pack(record.encode(), stamp, value.encode()), terms, own) for record in records]
        return await self.backend.add(self.backend.shard_map.shard_of(key), adds)

    async def claims(self, slots: int = 10, shard: int = 0, *, sample: bool = False, doubtful: bool = True) -> Claims:
        limits = self.policy.terms.limits
        return await self.backend.claim(shard, slots, LEASE, limits, sample=sample, doubtful=doubtful)

    async def claim(self, shard: int = 0) -> Lease:
        """The only digest that is due."""
        [lease] = (await self.claims(shard=shard)).leases
        return lease

    async def lapse(self) -> None:
        """Let a lease go by, while a worker without free slots looks in as often as workers do."""
        for _ in range(3):
            self.now += LEASE // 3
            for shard in range(self.backend.shard_map.count):
                await self.claims(0, shard)

    async def close(self, lease: Lease, taken: int | None = None, *, cool: int = 300_000, letter: str = "") -> Closed:
        taken = lease.size if taken is None else taken
        letters = [NewDeadLetter(letter)] if letter else []
        delivered = 0 if letter else taken
        close = Close(lease, taken, delivered, cool, self.policy.terms.limits, LEASE, dead_letters=letters)
        [closed] = await self.backend.close(self.backend.shard_map.shard_of(lease.key), [close])
        assert isinstance(closed, Closed)
        return closed

    async def retry(
        self, lease: Lease, delay: int = 1_000, failed: Sequence[str] | None = None, *, unknown: bool = False
    ) -> bool:
        ids = None if failed is None else [identity_of(record.encode()) for record in failed]
        retry = Retry(lease, delay, "boo", self.policy.terms.limits, lease.size, ids, 0, False, unknown)
        [kept] = await self.backend.retry(self.backend.shard_map.shard_of(lease.key), [retry])
        assert isinstance(kept, bool)
        return kept

    async def release(self, lease: Lease, *, started: bool) -> bool:
        [released] = await self.backend.release(self.backend.shard_map.shard_of(lease.key), [lease], started)
        assert isinstance(released, bool)
        return released

    async def postpone(self, lease: Lease, delay: int = 1_000) -> bool:
        shard = self.backend.shard_map.shard_of(lease.key)
        [held] = await self.backend.postpone(shard, [Postpone(lease, delay)], self.policy.terms.limits)
        assert isinstance(held, bool)
        return held

    async def due(self, key: str) -> int:
        """When a timeline is due, in ms since the tests' beginning."""
        window = await self.backend.operations.look(key)
        assert window is not None
        return window.due_ms - NOW

    async def state(self, key: str) -> str | None:
        window = await self.backend.operations.look(key)
        return window and window.state

    async def held(self, key: str) -> list[tuple[str, str]]:
        return records(await self.backend.operations.entries(key))


def records(entries: Sequence[bytes]) -> list[tuple[str, str]]:
    """Ids and values."""
    return [(unpack(entry).id, unpack(entry).value.decode()) for entry in entries]


def ids(lease: Lease) -> list[str]:
    return [record for record, _ in records(lease.entries)]
