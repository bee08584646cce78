"""The way of adds from an engine to its backend: those of one turn of the event loop go together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from zlib import crc32

from aiodigest.backend import Add, Backend, ShardMap
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.worker.batcher import Batcher, batches

if TYPE_CHECKING:
    from aiodigest.session.background import BackgroundSession

ADDS = "adds"  # the kind of calls, for the state of the server
MISSED = (BackendUnavailable, ConfigurationError)  # what a server answers to every add
CALLS = 2  # of adds at once to a single shard: while the server is at one, the next is made ready


def weight(add: Add) -> int:
    """Estimate an add's share of the bytes that a call may carry."""
    return len(add.entry) + len(add.key)


def place(shard_map: ShardMap, key: str) -> tuple[int, int]:
    """Return a timeline's shard, and the queue of its adds there: always the same, so that they stay in order."""
    shards, hashed = shard_map.current, crc32(key.encode())
    return (shards[0], hashed % CALLS) if len(shards) == 1 else (shards[hashed % len(shards)], 0)


class Adder:
    """Sends the adds of a session in batches, one batcher a shard, and notes whether they arrive."""

    def __init__(self, session: BackgroundSession) -> None:
        self.is_cut_off = False  # the latest add failed
        self._is_over = False
        self._session = session
        self._batchers: dict[int, Batcher[Add, bool]] = {}  # by shard
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def add(self, add: Add, began: float) -> Awaitable[bool]:
        """Queue an add, timed from ``began``, to be sent with the others of this turn; return what to await for its
        answer: True if it made its timeline ready."""
        if self._session.is_connected:
            shard, queue = place(self._session.store.shard_map, add.key)
            if (batcher := self._batchers.get(shard)) is not None:
                return batcher.put(add, len(add.entry) + len(add.key), queue, began)
        return self._begin(add, began)

    async def _begin(self, add: Add, began: float) -> bool:
        """Add with a connection and a batcher that need not be there yet."""
        try:
            backend = await self._session.backend(began)
            shard, queue = place(backend.shard_map, add.key)
            batcher = self._batchers.get(shard) or self._new_batcher(backend, shard)
        except BackendUnavailable as error:
            self._missed(error)
            raise
        return await batcher.put(add, weight(add), queue, began)

    async def _send(self, backend: Backend, shard: int, adds: Sequence[Add]) -> Sequence[bool | AiodigestError]:
        """Send adds in one call; note whether they arrive, and wake the workers of timelines that are ready."""
        try:
            answers = await backend.add(shard, adds)
        except AiodigestError as error:
            self._missed(error)
            raise
        kinds = set(map(type, answers))
        if missed := kinds != {bool} and next((each for each in answers if isinstance(each, MISSED)), None):
            self._missed(missed)
        elif bool in kinds:
            self.reached()
        if True in answers:
            ready = (add.key for add, answer in zip(adds, answers, strict=True) if answer is True)
            for each in set(map(backend.shard_map.shard_of, ready)):
                self._session.poke(each)
        return answers

    async def add_many(self, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Send adds past the queue; those of a timeline in order."""
        try:
            backend = await self._session.backend(None)
        except BackendUnavailable as error:
            self._missed(error)
            return [error] * len(adds)
        except AiodigestError as error:
            return [error] * len(adds)
        places: dict[tuple[int, int], list[int]] = {}
        shard_map = backend.shard_map
        for index, add in enumerate(adds):
            places.setdefault(place(shard_map, add.key), []).append(index)

        async def send(shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
            answers: list[bool | AiodigestError] = []
            down: AiodigestError | None = None
            for some in batches(adds, weight):
                if down is not None:
                    answers += [down] * len(some)
                    continue
                try:
                    answers += await self._send(backend, shard, some)
                except AiodigestError as error:
                    answers += [error] * len(some)
                    down = BackendUnavailable(str(error)) if isinstance(error, BackendUnavailable) else error
            return answers

        async with asyncio.TaskGroup() as group:
            sending = [
                group.create_task(send(shard, [adds[index] for index in indices]))
                for (shard, _), indices in places.items()
            ]
        answers: list[bool | AiodigestError] = [False] * len(adds)
        for indices, sent in zip(places.values(), sending, strict=True):
            for index, answer in zip(indices, sent.result(), strict=True):
                answers[index] = answer
        return answers

    async def drain(self) -> None:
        """Refuse new adds, and return when those that were taken have their answers."""
        self._is_over = True
        await asyncio.gather(*(batcher.finish() for batcher in self._batchers.values()))
        for task in self._tasks.values():
            task.cancel()

    def reached(self) -> None:
        """Note that an add, or the connection that it waited for, has reached the server."""
        if self.is_cut_off:
            self.is_cut_off = False
            self._session.availability.eased(ADDS)

    def _missed(self, error: AiodigestError) -> None:
        """Note that an add has failed, which may mean that its server is away, or refuses all of them."""
        if isinstance(error, MISSED) and not self._session.refusal:
            self.is_cut_off = True
            self._session.availability.failed(error, ADDS)

    def _new_batcher(self, backend: Backend, shard: int) -> Batcher[Add, bool]:
        if self._is_over or self._session.main.done():  # until then, callbacks that are waited for may add
            raise BackendUnavailable(self._session.refusal)
        for retired in [each for each in self._batchers if backend.shard_map.number_of(each) is None]:
            if not self._batchers[retired].unanswered:
                del self._batchers[retired]
                self._tasks.pop(retired).cancel()
        queues = CALLS if backend.shard_map.adding == 1 else 1  # several shards have several calls as it is
        send, share = partial(self._send, backend, shard), backend.shard_map.adding
        batcher = Batcher[Add, bool](send, self._session.timeout, queues, share, self._missed)
        self._tasks[shard] = self._session.start(batcher.run())
        self._batchers[shard] = batcher
        return batcher
