"""The room that a worker has for the records of its digests: bounded in bytes, however many are under delivery."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from aiodigest.backend import Lease, entries_of, whole
from aiodigest.worker.delivery import Aside
from aiodigest.worker.doubts import PERIOD, Delivery
from aiodigest.worker.tasks import elapse

FULL = 16  # digests of ``bounds.digest`` for which there is room at once
QUEUE = 16  # digests that wait for room at once: others could have them
ASIDE_MS = 5_000  # for how long one is put aside which finds so many waiting, or has waited too long
SMALL = 262_144  # bytes: a digest that decodes to less needs no room, as it fits into an answer of the store

Pages: TypeAlias = Callable[[int, int], Awaitable[Sequence[bytes]]]


class NoRoom(Aside):
    """A digest is not to wait for room."""


class Room:
    """Lets digests in while all of them together decode to at most ``most`` bytes, in the order in which they ask; one
    of more, when no other is there.

    Small ones pass: they are not counted, and are not kept waiting by large ones whose callbacks take long. One that
    finds QUEUE waiting, or has waited for ``patience`` seconds, is put aside, so that another worker can have it, and
    others its place; one which ``leaves`` says is to go is given back. One that runs alone waits for nobody: what is
    there by then are callbacks that ignore their end.
    """

    def __init__(self, most: int, patience: float, leaves: Callable[[Delivery], bool]) -> None:
        self._most = most
        self._patience = patience
        self._leaves = leaves
        self._taken: dict[Delivery, int] = {}
        self._waiting: dict[Delivery, None] = {}  # in order
        self._changed = asyncio.Event()  # only set for a moment

    @property
    def taken(self) -> int:
        """The bytes that the digests within decode to; a thread may ask."""
        return sum([*self._taken.values()])

    @property
    def waiting(self) -> int:
        """The number of digests that wait for room."""
        return len(self._waiting)

    def at_hand(self, delivery: Delivery, most_of: Callable[[Sequence[bytes]], int | None]) -> Sequence[bytes] | None:
        """Return the entries of a digest that are all here and need no room, as most do; None of one to ``read``."""
        found = whole(delivery.lease, most_of)
        return None if found is None or found[1] > SMALL or delivery in self._taken else found[0]

    async def read(
        self,
        delivery: Delivery,
        page: Pages,
        size_of: Callable[[bytes], int],
        most_of: Callable[[Sequence[bytes]], int | None] | None = None,
    ) -> tuple[Lease, list[bytes]]:
        """Return the entries of a digest, or of its next part, as ``entries_of`` does, once there is room for them.

        Raises NoRoom if it is not to wait, or not any longer.
        """
        lease, entries, size = await entries_of(delivery.lease, partial(self._page, delivery, page), size_of, most_of)
        if size > SMALL or delivery in self._taken:
            await self._take(delivery, size)
        return lease, entries

    async def _page(self, delivery: Delivery, page: Pages, start: int, count: int) -> Sequence[bytes]:
        """Read a page; before a second one there must be room for as much as may come."""
        if start > len(delivery.lease.entries) and delivery not in self._taken:
            await self._take(delivery, delivery.lease.bound)
        return await page(start, count)

    async def _take(self, delivery: Delivery, size: int) -> None:
        """Count a digest as so many bytes, once they fit; one that is within already does not wait again."""
        if not (delivery in self._taken or delivery.lease.is_alone):
            await self._turn(delivery, size)
        self._taken[delivery] = size
        self.look_again()

    async def _turn(self, delivery: Delivery, size: int) -> None:
        clock = asyncio.get_running_loop().time
        ends = clock() + self._patience
        if len(self._waiting) >= QUEUE:
            raise NoRoom(ASIDE_MS)
        self._waiting[delivery] = None
        try:
            while next(iter(self._waiting)) is not delivery or (self._taken and self.taken + size > self._most):
                if self._leaves(delivery):
                    raise NoRoom(0)
                if clock() >= ends:
                    raise NoRoom(ASIDE_MS)
                await elapse(self._changed, PERIOD)
        finally:
            del self._waiting[delivery]
            self.look_again()

    def give_back(self, delivery: Delivery) -> None:
        """Count a digest no more, whose callback has ended, or which never began."""
        if self._taken.pop(delivery, 0):
            self.look_again()

    def look_again(self) -> None:
        """Let all that wait look whether there is room, or whether they are to go."""
        self._changed.set()
        self._changed.clear()
