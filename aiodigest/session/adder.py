"""The way of adds from an engine to its backend: those of one turn of the event loop go together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

from aiodigest.backend import Add, Backend
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.worker.batcher import BATCH_ITEMS, Batcher, batches
from aiodigest.worker.reasons import describe

if TYPE_CHECKING:
    from aiodigest.session.background import BackgroundSession

ADDS = "adds"  # the kind of calls, for the state of the server
MISSED = (BackendUnavailable, ConfigurationError)  # what a server answers to every add
CALLS = 2  # of adds at once to a single shard: while the server is at one, the next is made ready

Down: TypeAlias = dict[int | None, AiodigestError]
"""The shards that an ``add_many`` has found unavailable, with the error of what is not sent to them; None: all."""

AHEAD = 512  # adds of an `add_many` that are made before what is made so far is sent


def unsent(error: AiodigestError) -> AiodigestError:
    """Return the error of adds that are not sent, since another one to their shard has failed with ``error``."""
    return BackendUnavailable(str(error)) if isinstance(error, BackendUnavailable) else error


def weight(add: Add) -> int:
    """Estimate an add's share of the bytes that a call may carry."""
    return len(add.entry) + len(add.key)


class Adder:
    """Sends the adds of a session in batches, one batcher a shard, and notes whether they arrive."""

    def __init__(self, session: BackgroundSession) -> None:
        self.is_cut_off = False  # the latest add failed
        self._is_over = False
        self._session = session
        self._batchers: dict[int, Batcher[Add, bool]] = {}  # by shard
        self._sole: Batcher[Add, bool] | None = None  # of the only shard, as far as its last answer tells
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def add(self, add: Add, began: float) -> Awaitable[bool]:
        """Queue an add, timed from ``began``, to be sent with the others of this turn; return what to await for its
        answer: True if it made its timeline ready."""
        key = add.key
        if self._sole is not None:  # most have a single shard
            return self._sole.put(add, len(add.entry) + len(key), key, began)
        if self._session.is_connected:
            shard_map = self._session.store.shard_map
            if (batcher := self._batchers.get(shard_map.shard_of(key))) is not None:
                if shard_map.adding == 1:
                    self._sole = batcher
                return batcher.put(add, weight(add), key, began)
        return self._begin(add, began)

    async def _begin(self, add: Add, began: float) -> bool:
        """Add with a connection and a batcher that need not be there yet."""
        try:
            backend = await self._session.backend(began)
            shard = backend.shard_map.shard_of(add.key)
            batcher = self._batchers.get(shard) or self._new_batcher(backend, shard)
        except BackendUnavailable as error:
            self._missed(error)
            raise
        return await batcher.put(add, weight(add), add.key, began)

    async def _send(self, backend: Backend, shard: int, adds: Sequence[Add]) -> Sequence[bool | AiodigestError]:
        """Send adds in one call; note whether they arrive, and wake the workers of timelines that are ready."""
        try:
            answers = await backend.add(shard, adds)
        except AiodigestError as error:
            self._missed(error)
            raise
        finally:
            if backend.shard_map.current != range(shard, shard + 1):
                self._sole = None  # what it still holds, the backend sends to the others
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

    async def add_many(self, adds: Iterable[Add], down: Down) -> list[bool | AiodigestError]:
        """Send adds past the queue, those of a timeline in order: the first while the others are still made.

        Nothing is sent to shards that are ``down``; those that turn out to be so are put there.
        """
        if None in down:
            return [down[None] for _ in adds]
        try:
            backend = await self._session.backend(None)
        except AiodigestError as error:
            if isinstance(error, BackendUnavailable):
                self._missed(error)
            down[None] = error  # with which nothing was sent
            return [error for _ in adds]
        shards, made = backend.shard_map.current, list[Add]()
        answers: list[bool | AiodigestError] = []
        # numbers of adds that are to be sent: those of a timeline are in one line, which sends a call at a time
        lines: list[list[int]] = [[] for _ in range(len(shards) if len(shards) > 1 else CALLS)]

        async def send(number: int) -> None:
            line, shard = lines[number], shards[number % len(shards)]
            while line:
                some = next(batches([made[index] for index in line[:BATCH_ITEMS]], weight))
                sent = line[: len(some)]
                del line[: len(some)]
                told = await self._answers(backend, shard, some, down)
                for index, answer in zip(sent, told, strict=True):
                    answers[index] = answer

        making, senders = iter(adds), dict[int, asyncio.Task[None]]()
        async with asyncio.TaskGroup() as group:
            while some := list(islice(making, AHEAD)):
                for index, add in enumerate(some, len(made)):
                    lines[crc32(add.key.encode()) % len(lines)].append(index)
                made += some
                answers += [False] * len(some)
                for number, line in enumerate(lines):
                    if line and (number not in senders or senders[number].done()):
                        senders[number] = group.create_task(send(number))
                await asyncio.sleep(0)  # they begin, and the server too
        return answers

    async def _answers(
        self, backend: Backend, shard: int, adds: Sequence[Add], down: Down
    ) -> Sequence[bool | AiodigestError]:
        """Send adds in one call, unless their shard is down; return the answer to each, or its error."""
        try:
            if shard in down:
                raise down[shard]
            told = await self._send(backend, shard, adds)
        except AiodigestError as error:
            down[shard] = unsent(error)
            return [error] * len(adds)
        except Exception as error:  # a fault, of which each is told as one is whose add was alone
            down[shard] = fault = AiodigestError(f"a fault while adding: {describe(error)}")
            fault.__cause__ = error
            return [fault] * len(adds)
        if not {bool}.issuperset(map(type, told)):  # some may have gone to the shard that takes them now
            for add, answer in zip(adds, told, strict=True):
                if isinstance(answer, BackendUnavailable):
                    down.setdefault(backend.shard_map.shard_of(add.key), unsent(answer))
        return told

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
