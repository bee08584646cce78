"""The number of digests a worker may claim now, and the turns of its shards to claim them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import inf

from aiodigest.backoff import BackoffMode, ConsumerBackoff
from aiodigest.worker.availability import elapse
from aiodigest.worker.shard import Lane

BRIEF = 0.25  # seconds: a claim that takes longer keeps no slots from other shards, since it may hang
CLAIM = 16  # digests of a call: while they are delivered the next are claimed, and no turn of the loop takes long


class Slots:
    """The slots for deliveries, less those that are taken, promised to claims under way, or at rest.

    Claims may bring more leases than there are slots in the end, since a claim that hangs keeps none: so each delivery
    must hold ``gate`` too.
    """

    def __init__(self, lanes: Mapping[int, Lane], concurrency: int, mode: BackoffMode, stopping: asyncio.Event) -> None:
        self.backoff = ConsumerBackoff(mode)
        self.paused_until = 0.0  # by the loop's clock: a callback asked to claim nothing
        self.gate = asyncio.Semaphore(concurrency)
        self.changed = asyncio.Event()  # slots may have become free
        self._lanes = lanes
        self._concurrency = concurrency
        self._stopping = stopping
        self._turn = asyncio.Lock()
        self._promised: dict[Lane, tuple[int, float]] = {}  # how many, since when

    async def free(self, lane: Lane) -> int:
        """Wait for free slots; reserve them with ``promise`` before awaiting anything. 0 if the worker stops.

        The shards take turns, in the order in which they began to wait: a claim of many digests costs little more than
        one of a few, so they do not divide the free slots among them.
        """
        async with self._turn:
            loop = asyncio.get_running_loop()
            while not self._stopping.is_set():
                self.changed.clear()
                now = loop.time()
                if free := self._count(now):
                    return min(free, 1 if lane.failing else CLAIM)
                rest = max(self.paused_until, self.backoff.resumes_at or 0.0) - now
                await elapse(self.changed, rest if rest > 0 else BRIEF if self._promised else None)
        return 0

    def _count(self, now: float) -> int:
        allowed = self.backoff.allowed(now, self._concurrency) if now >= self.paused_until else 0
        brief = BRIEF if allowed >= self._concurrency else inf  # while one at a time is let through, each counts
        promised = sum(slots for slots, since in self._promised.values() if now < since + brief)
        busy = sum(lane.busy for lane in self._lanes.values())
        return max(0, min(allowed, self._concurrency) - promised - busy)

    @contextmanager
    def promise(self, lane: Lane, slots: int) -> Generator[None]:
        """Keep slots for the digests of a claim, until it has brought them."""
        self._promised[lane] = slots, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._promised[lane]
            self.changed.set()  # another shard may wait for those that were not needed
