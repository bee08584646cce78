"""Doubtful digests: a lease on each has ended without a word, so it may be what has ended its process."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import Context
from typing import Protocol
from weakref import WeakSet, WeakValueDictionary

from aiodigest.backend import Lease
from aiodigest.worker.tasks import Timer, elapse

PERIOD = 1.0  # seconds after which what waits for its turn looks again: time alone may have brought it


class Delivery(Protocol):
    """A delivery of this process."""

    lease: Lease

    @property
    def is_waited_for(self) -> bool: ...


class Doubts:
    """Lets a process have one doubtful digest at a time, over all its shards, and run it alone from the second time on.

    All schedulers of an event loop share it, since what ends the process ends the deliveries of all. A claim asks for
    one while there is none. While one that must be alone is here, nothing is claimed; it begins when all that has begun
    before it has ended, and what has not begun is given back.
    """

    def __init__(self) -> None:
        self.more = WeakSet[asyncio.Event]()  # set when more may be claimed: one event of each scheduler
        self._asked = False  # by a claim under way
        self._doubtful: dict[Delivery, None] = {}  # those of this process: one, and those that nobody waits for
        self._barred: dict[asyncio.Event, None] = {}  # wake shard workers whose last claim left such digests behind
        self._running: dict[Delivery, None] = {}
        self._changed = asyncio.Event()  # only set for a moment
        self._timer = Timer(self._let_next, Context())

    @property
    def alone(self) -> Delivery | None:
        """The delivery beside which nothing may run; it may be waiting for its turn."""
        if not self._doubtful:
            return None
        return next((each for each in self._doubtful if each.lease.is_alone and each.is_waited_for), None)

    @property
    def _may_ask(self) -> bool:
        return not (self._asked or any(each.is_waited_for for each in self._doubtful))

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
            self._let_next()  # it may have been woken, and have asked for none

    def claimed(self, delivery: Delivery) -> None:
        """Note what a claim has brought."""
        if delivery.lease.lost:
            self._doubtful[delivery] = None

    def bar(self, woken: asyncio.Event) -> None:
        """Wake a shard worker whose claim has left doubtful digests behind, once it may ask for one."""
        self._barred[woken] = None
        self._let_next()

    def forget(self, woken: asyncio.Event) -> None:
        """Wake a shard worker no more: it has ended, or cannot claim."""
        self._barred.pop(woken, None)

    def ended(self, delivery: Delivery) -> None:
        """Note that a delivery has ended, however it did."""
        if delivery in self._doubtful:
            del self._doubtful[delivery]
            self._let_next()
            self._let_claim()
            self.look_again()

    def _let_next(self) -> None:
        """Wake the shard worker that was barred first, if it may ask now; each that asks in vain wakes the next."""
        if self._barred and self._may_ask:
            woken = next(iter(self._barred))
            del self._barred[woken]
            woken.set()
        elif self._barred:  # no event tells that a callback ignores its end, or that a server is away
            self._timer.set(asyncio.get_running_loop().time() + PERIOD)

    def _let_claim(self) -> None:
        for more in self.more:
            more.set()

    def must_go(self, delivery: Delivery) -> bool:
        """Return True if a delivery that has not begun is not to wait: another is to be alone."""
        return bool(self._doubtful) and self.alone not in (None, delivery)

    def admits(self, delivery: Delivery) -> bool:
        """Count a delivery as running, if there is nothing doubtful, as nearly always; else it has to ``begin``."""
        if self._doubtful:
            return False
        self._running[delivery] = None
        return True

    async def begin(self, delivery: Delivery, stopping: asyncio.Event) -> None:
        """Wait until a delivery may run, or its worker stops, and count it as running, until ``left``."""
        while not (stopping.is_set() or self.may_run(delivery)):
            await elapse(self._changed, PERIOD)
        self._running[delivery] = None

    def left(self, delivery: Delivery) -> None:
        """Note that a delivery that has begun runs no more, or that its next part has to begin."""
        del self._running[delivery]
        if not self._doubtful:  # nobody waits
            return
        self.look_again()
        if delivery in self._doubtful:
            self._let_claim()  # its first part may have been delivered: with what is left there is no doubt

    def may_run(self, delivery: Delivery) -> bool:
        """Return True if a delivery may run beside those that run."""
        if self.must_go(delivery):
            return False
        if not delivery.lease.is_alone:
            return True
        return not any(each.is_waited_for for each in self._running if each is not delivery)

    def look_again(self) -> None:
        """Let all that wait for their turn look whether it has come."""
        self._changed.set()
        self._changed.clear()


_OF_LOOPS = WeakValueDictionary[asyncio.AbstractEventLoop, Doubts]()  # kept by the schedulers


def doubts_of_loop() -> Doubts:
    """Return what all schedulers of the running event loop share."""
    return _OF_LOOPS.setdefault(asyncio.get_running_loop(), Doubts())
