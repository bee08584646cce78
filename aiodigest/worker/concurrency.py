"""Things that the shard workers of a process share: settings, and the limit on deliveries, with the turns to claim."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from typing import Any

from aiodigest.backend import Backend, Lease, Postpone
from aiodigest.backoff import BackoffMode
from aiodigest.policy import Limits
from aiodigest.worker.availability import Availability
from aiodigest.worker.delivery import Dispatcher, Observer
from aiodigest.worker.destinations import Destination, Destinations
from aiodigest.worker.doubts import doubts_of_loop
from aiodigest.worker.room import Room
from aiodigest.worker.standstill import Standstill
from aiodigest.worker.tasks import elapse
from aiodigest.worker.throttling import Throttling, Token

RESERVED_FOR = 0.25  # seconds: a claim that takes longer reserves nothing any more, since it may hang
SHORTEST_WAIT = 0.001  # seconds between two questions for a token


class Gate:
    """Lets in a number at once, and the others in the order in which they came.

    Nearly always there is a place, and a semaphore of asyncio's takes three times as long to say so.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._order = asyncio.Lock()
        self._left = asyncio.Event()
        self._waiting = 0

    def admits(self) -> bool:
        """Take a place, if there is one that nobody waits for."""
        if self._free and not self._waiting:
            self._free -= 1
            return True
        return False

    async def wait(self) -> None:
        """Wait for a place, and take it."""
        self._waiting += 1
        try:
            async with self._order:
                while not self._free:
                    self._left.clear()
                    await self._left.wait()
                self._free -= 1
        finally:
            self._waiting -= 1

    def leave(self) -> None:
        """Give a place back."""
        self._free += 1
        if self._waiting:
            self._left.set()


class ConcurrencyLimit:
    """Counts how many more digests a shard may claim: ``concurrency``, less those under way and those reserved by
    claims; few or none while the receiver rests. With ``destinations`` each of these rests by itself: then digests are
    claimed all the same, and ``sort`` says which may begin.

    Claims may bring more digests than that in the end, since a claim that hangs reserves nothing: so each delivery must
    hold ``gate`` too.
    """

    def __init__(
        self,
        concurrency: int,
        mode: BackoffMode,
        stopping: asyncio.Event,
        busy: Callable[[], int],
        destinations: Destinations | None = None,
        *,
        room: int,
        patience: float,
    ) -> None:
        self._all = Destination("", mode)  # without `destinations`; with them, nothing is ever learnt of it
        self._destinations = destinations
        self.gate = Gate(concurrency)
        self.changed = asyncio.Event()  # more may be available
        self.doubts = doubts_of_loop()
        self.doubts.more.add(self.changed)
        self.room = Room(room, patience, lambda one: stopping.is_set() or self.doubts.must_go(one))
        self._concurrency = concurrency
        self._stopping = stopping
        self._busy = busy  # counts the digests under way
        self._turn = asyncio.Lock()
        self._token_turn = asyncio.Lock()
        self._late = 0  # deliveries that wait for another token, since theirs has lapsed
        self._late_turn = asyncio.Lock()
        self._waits = False  # somebody waits for a token
        self._queue = 0  # shards that have their turn or wait for it
        self._reserved: dict[int, tuple[int, float]] = {}  # by shard: how many, since when

    async def available(self, most: int) -> int:
        """Wait until digests may be claimed, and return how many, at most ``most``; 0 if the worker stops.

        Reserve them with ``reserve`` before awaiting anything. The shards take turns, in the order in which they began
        to wait: a claim of many digests costs little more than one of a few, so they do not share what is available.
        In backoff mode they do: one may hold none but timelines that fail.
        """
        self._queue += 1
        try:
            async with self._turn:
                loop = asyncio.get_running_loop()
                while not self._stopping.is_set():
                    self.changed.clear()
                    now = loop.time()
                    if count := self._count(now):
                        return 1 if self.draws and self._queue > 1 else min(count, most)
                    rest = max(self._all.paused_until, self._all.backoff.resumes_at or 0.0) - now
                    unheard = self._reserved or self.doubts.alone  # no event tells that one is waited for no more
                    await elapse(self.changed, rest if rest > 0 else RESERVED_FOR if unheard else None)
            return 0
        finally:
            self._queue -= 1

    async def permitted(self, most: int, throttling: Throttling, has_ended: Callable[[], bool]) -> list[Token]:
        """Wait as ``available`` does, and for tokens too; return these, one for each digest that may be claimed.

        The shards take turns here, or one could take all tokens as they come. There is no token if the worker stops, or
        the shard ``has_ended``.
        """
        clock = asyncio.get_running_loop().time
        self._queue += 1
        try:
            await self._token_turn.acquire()
        finally:
            self._queue -= 1
        try:
            while not has_ended() and (count := await self.available(most)):
                tokens = await throttling.take(count) if not self._late else []
                count = min(len(tokens), self._count(clock()))  # it may have been told of a pause
                throttling.give_back(tokens[count:])
                if count:
                    return tokens[:count]
                self._waits = True
                await elapse(self.changed, max(throttling.wait(clock()), RESERVED_FOR if self._late else 0.0))
            return []
        finally:
            self._waits = False
            self._token_turn.release()

    async def use_token(
        self, throttling: Throttling, token: Token | None, waits: bool, leaves: Callable[[], bool]
    ) -> bool:
        """Use a delivery's token, or another; True if its attempt may begin now, before anything is awaited.

        With ``waits`` it waits its turn for another, unless it ``leaves``: were it to be claimed anew, what has taken
        so long might take as long again, each time. Those that wait come before claims, which wait for their places.
        """
        if throttling.use([token] if token is not None else []) or throttling.use(await throttling.take(1)):
            return True
        if not waits:
            return False
        self._late += 1
        try:
            async with self._late_turn:
                while not leaves():
                    if throttling.use(await throttling.take(1)):
                        return True
                    wait = throttling.wait(asyncio.get_running_loop().time())
                    await asyncio.sleep(min(max(wait, SHORTEST_WAIT), RESERVED_FOR))  # it may leave, or need not wait
            return False
        finally:
            self._late -= 1
            self.changed.set()

    def throttled(self, throttling: Throttling | None, now: float) -> float:
        """Return the seconds until a shard that waits for a token asks for it again; 0 if none waits."""
        return 0.0 if throttling is None or not self._waits else throttling.wait(now)

    def pause(self, name: str, until: float) -> None:
        """Hold back a destination until then; one that is unknown where there is one for all is another engine's."""
        if self._destinations is not None:
            self._destinations.named(name).pause(until)
        elif name == self._all.name:
            self._all.pause(until)
            self.changed.set()

    def _count(self, now: float) -> int:
        backoff = self._all.backoff
        if now < self._all.paused_until or self.doubts.alone:
            return 0
        brief = inf if backoff.level else RESERVED_FOR  # while few are let through, each counts
        reserved = sum(count for count, since in self._reserved.values() if now < since + brief)
        return max(0, min(self._concurrency - self._busy(), backoff.allowed(now, self._concurrency)) - reserved)

    @contextmanager
    def reserve(self, shard: int, count: int) -> Generator[None]:
        """Reserve deliveries for the digests of a claim, until it has brought them."""
        self._reserved[shard] = count, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._reserved[shard]
            self.changed.set()  # another shard may wait for those that were not needed

    @property
    def draws(self) -> bool:
        """True if a claim is to draw at random: in backoff mode of all that there is."""
        return self._all.backoff.level > 0

    def trouble(self, now: float) -> tuple[int, int]:
        """Return the deepest level of backoff mode, and the number of destinations that rest; a thread may ask."""
        known = [self._all] if self._destinations is None else self._destinations.all()
        return max((each.backoff.level for each in known), default=0), sum(each.holds_back(now) for each in known)

    def sort(
        self, leases: Sequence[Lease], room: int, now: float
    ) -> tuple[list[tuple[Lease, Destination]], list[Postpone]]:
        """Return which claimed digests begin, with where they go, and which must wait (see ``Destinations.sort``)."""
        if self._destinations is not None:
            return self._destinations.sort(leases, room, now)
        for lease in leases:
            self._all.began(lease.key, now)
        return [(lease, self._all) for lease in leases], []

    def postponed(self, seconds: float, count: int) -> None:
        """Note how long it took to claim and postpone so many digests."""
        if self._destinations is not None:
            self._destinations.took(seconds, count)

    def ended(self, destination: Destination, key: str, now: float, *, learnt: bool) -> None:
        """Make room for another delivery; ``learnt`` if the outcome of this one is known."""
        destination.busy -= 1
        if not learnt:
            destination.backoff.withdrawn(key)
        if self._destinations is not None:
            self._destinations.forget(destination, now)
        self.changed.set()


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
    observers: Sequence[Observer]
    limit: ConcurrencyLimit = field(init=False)
    standstill: Standstill = field(init=False)
    throttling: Throttling | None = field(init=False, default=None)
    stopping: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @abstractmethod
    def notice_layout(self) -> None:
        """Serve the shards of another layout, if the store's latest answer has told of one."""
