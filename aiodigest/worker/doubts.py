"""Doubtful digests: a lease on each has ended without a word, so it may be what has ended its process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from aiodigest.backend import Lease
from aiodigest.worker.tasks import elapse

PERIOD = 1.0  # seconds after which a delivery that waits for its turn looks again: time alone may have brought it


class Delivery(Protocol):
    """A delivery of this process."""

    lease: Lease


class Doubts:
    """Lets a process have one doubtful digest at a time, over all its shards, and run it alone from the second time on.

    A claim asks for one while the process has none. While one that must be alone is here, nothing is claimed; it begins
    when all that has begun before it has ended, and what has not begun waits until it has ended. ``more`` is set when
    more may be claimed.
    """

    def __init__(self, stopping: asyncio.Event, more: asyncio.Event) -> None:
        self._stopping = stopping
        self._more = more
        self._asked = False  # by a claim under way
        self._doubtful: Delivery | None = None  # the one of this process
        self._barred: dict[asyncio.Event, None] = {}  # wake shard workers whose last claim left such digests behind
        self._running: dict[Delivery, Callable[[], bool]] = {}  # with whether they are waited for
        self._changed = asyncio.Event()  # only set for a moment

    @property
    def alone(self) -> Delivery | None:
        """The delivery beside which nothing may run; it may be waiting for its turn."""
        found = self._doubtful
        return found if found is not None and found.lease.is_alone and self._is_waited_for(found) else None

    def _is_waited_for(self, delivery: Delivery) -> bool:
        return delivery not in self._running or self._running[delivery]()

    @property
    def _may_ask(self) -> bool:
        return not self._asked and (self._doubtful is None or not self._is_waited_for(self._doubtful))

    @contextmanager
    def asking(self, wanted: bool) -> Generator[bool]:
        """Yield whether a claim may bring a doubtful digest. What it brings must be ``claimed`` within."""
        asks = wanted and self._may_ask
        self._asked = self._asked or asks
        try:
            yield asks
        finally:
            if asks:
                self._asked = False
                self._let_next()

    def claimed(self, delivery: Delivery) -> None:
        """Note what a claim has brought."""
        if delivery.lease.lost:
            self._doubtful = delivery

    def bar(self, woken: asyncio.Event) -> None:
        """Wake a shard worker whose claim has left doubtful digests behind, once it may ask for one."""
        self._barred[woken] = None
        self._let_next()

    def forget(self, woken: asyncio.Event) -> None:
        """Wake a shard worker no more: it has ended."""
        self._barred.pop(woken, None)

    def ended(self, delivery: Delivery) -> None:
        """Note that a delivery has ended, however it did."""
        if delivery is self._doubtful:
            self._doubtful = None
            self._let_next()
            self.look_again()

    def _let_next(self) -> None:
        """Wake the shard worker that was barred first, if it may ask now; each that asks in vain wakes the next."""
        if self._barred and self._may_ask:
            woken = next(iter(self._barred))
            del self._barred[woken]
            woken.set()

    @asynccontextmanager
    async def turn(self, delivery: Delivery, is_waited_for: Callable[[], bool]) -> AsyncGenerator[None]:
        """Wait until a delivery may run, or the worker stops, and count it as running within.

        Nothing waits for it while ``is_waited_for`` says no.
        """
        while not (self._stopping.is_set() or self._may_run(delivery)):
            await elapse(self._changed, PERIOD)
        self._running[delivery] = is_waited_for
        try:
            yield
        finally:
            del self._running[delivery]
            self.look_again()
            if delivery is self._doubtful:
                self._more.set()  # its first part may have been delivered: with what is left there is no doubt

    def _may_run(self, delivery: Delivery) -> bool:
        if delivery is self.alone:
            return not any(map(self._is_waited_for, self._running))
        return self.alone is None

    def look_again(self) -> None:
        """Let all that wait for their turn look whether it has come."""
        self._changed.set()
        self._changed.clear()
