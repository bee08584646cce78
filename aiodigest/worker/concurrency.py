"""What the shard workers of a process share: its settings, and the limit on deliveries, with the turns to claim."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import Any

from aiodigest.backend import Backend
from aiodigest.backoff import BackoffMode, ConsumerBackoff
from aiodigest.policy import Limits
from aiodigest.worker.availability import Availability
from aiodigest.worker.delivery import Dispatcher, Observer
from aiodigest.worker.tasks import elapse

RESERVED_FOR = 0.25  # seconds: a claim that takes longer reserves nothing any more, since it may hang


class ConcurrencyLimit:
    """Counts how many more digests a shard may claim: ``concurrency``, less those under way and those reserved by
    claims; few or none while the receiver rests.

    Claims may bring more digests than that in the end, since a claim that hangs reserves nothing: so each delivery must
    hold ``gate`` too.
    """

    def __init__(self, concurrency: int, mode: BackoffMode, stopping: asyncio.Event, busy: Callable[[], int]) -> None:
        self.backoff = ConsumerBackoff(mode)
        self.gate = asyncio.Semaphore(concurrency)
        self.changed = asyncio.Event()  # more may be available
        self._concurrency = concurrency
        self._stopping = stopping
        self._busy = busy  # counts the digests under way
        self._paused_until = 0.0  # by the loop's clock: a callback asked to claim nothing
        self._turn = asyncio.Lock()
        self._reserved: dict[int, tuple[int, float]] = {}  # by shard: how many, since when

    async def available(self, most: int) -> int:
        """Wait until digests may be claimed, and return how many, at most ``most``; 0 if the worker stops.

        Reserve them with ``reserve`` before awaiting anything. The shards take turns, in the order in which they began
        to wait: a claim of many digests costs little more than one of a few, so they do not share what is available.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            while not self._stopping.is_set():
                self.changed.clear()
                now = loop.time()
                if count := self._count(now):
                    return min(count, most)
                rest = max(self._paused_until, self.backoff.resumes_at or 0.0) - now
                await elapse(self.changed, rest if rest > 0 else RESERVED_FOR if self._reserved else None)
        return 0

    def _count(self, now: float) -> int:
        if now < self._paused_until:
            return 0
        brief = inf if self.backoff.level else RESERVED_FOR  # while few are let through, each counts
        reserved = sum(count for count, since in self._reserved.values() if now < since + brief)
        return max(0, min(self._concurrency - self._busy(), self.backoff.allowed(now, self._concurrency)) - reserved)

    @contextmanager
    def reserve(self, shard: int, count: int) -> Generator[None]:
        """Reserve deliveries for the digests of a claim, until it has brought them."""
        self._reserved[shard] = count, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._reserved[shard]
            self.changed.set()  # another shard may wait for those that were not needed

    def learn(self, key: str, success: bool | None, started: float, ended: float, pause: float) -> None:
        """Learn from the outcome of an attempt: claim less, or nothing for ``pause`` seconds."""
        if success is None:
            self.backoff.withdrawn(key)
        elif success:
            self.backoff.succeeded(key, ended, started=started)
        else:
            self.backoff.failed(key, ended, started=started)
        if pause:
            self._paused_until = max(self._paused_until, ended + pause)


@dataclass(eq=False)
class Shared(ABC):
    """The part of a scheduler that its shard workers know. Durations are in seconds."""

    backend: Backend
    availability: Availability
    _: KW_ONLY
    dispatcher: Dispatcher[Any]
    limits: Limits
    lease_timeout: float
    timeout: float
    observers: Iterable[Observer]
    limit: ConcurrencyLimit = field(init=False)
    stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @abstractmethod
    def notice_layout(self) -> None:
        """Serve the shards of another layout, if the store's latest answer has told of one."""
