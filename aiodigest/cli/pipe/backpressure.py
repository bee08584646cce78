"""Backpressure: nothing is lost to the capacity of timelines if lines are added no faster than digests go out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from aiodigest import JSON, BackendUnavailable, Digest, DigestEngine

T = TypeVar("T")

POLL = 1.0  # seconds: the end of a delivery may go unreported
GIVE_UP = 60.0  # seconds without a server
INTERVAL = 0.5  # seconds between calls meanwhile


async def retry(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of ``call``; call again while the server is away, for up to a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GIVE_UP
    while True:
        try:
            return await call()
        except BackendUnavailable:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(INTERVAL)


class Backpressure:
    """Counts the records each timeline holds, and has a full one delivered before more is added.

    It passes the engine's deliveries on to ``deliver``. A count may be too high (for ids that come again, or
    records too old to be delivered), never too low. ``repeats`` is True if ids may come again; without a
    ``capacity`` there is room for everything.
    """

    def __init__(
        self, engine: DigestEngine, deliver: Callable[[Digest[JSON]], Awaitable[None]], capacity: int | None,
        repeats: bool,
    ) -> None:  # fmt: skip
        self._engine, self._deliver, self._capacity, self._repeats = engine, deliver, capacity, repeats
        self._held: Counter[str] = Counter()
        self._awaited: str | None = None
        self._progress = asyncio.Event()
        engine.observe(lambda delivery: self._signal(delivery.key))

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Pass a digest on: the delivery callback."""
        await self._deliver(digest)
        if digest.attempt == 1:  # what comes again may have been subtracted
            self._held[digest.key] -= len(digest.records)
            if self._held[digest.key] <= 0:
                del self._held[digest.key]
        self._signal(digest.key)

    def _signal(self, key: str) -> None:
        if key == self._awaited:
            self._progress.set()

    async def count_held(self) -> None:
        """Count the records left by an earlier run."""
        if self._capacity is not None:
            async for timeline in self._engine.timelines():
                self._held[timeline.key] = timeline.size

    def reserve(self, key: str) -> bool:
        """Count a record about to be added; False, without counting it, if there is no room for it."""
        if self._capacity is None:
            return True
        if self._held[key] >= self._capacity:
            return False
        self._held[key] += 1
        return True

    async def make_room(self, key: str) -> None:
        """Have a full timeline delivered until half of it is free. All records counted must have been added."""
        if self._capacity is None:
            return
        if self._repeats:
            timeline = await retry(lambda: self._engine.peek(key))
            if timeline is None:
                del self._held[key]
            elif timeline.digest_id is None:  # else an id may be held twice: under delivery, and since
                self._held[key] = len(timeline.records)
        self._awaited = key
        while self._held[key] > self._capacity // 2:
            self._progress.clear()
            if not await retry(lambda: self._engine.flush(key)):
                del self._held[key]
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), POLL)
        self._awaited = None
