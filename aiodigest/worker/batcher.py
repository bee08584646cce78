"""Many calls of one event-loop turn as one call to the store, each with an answer of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from aiodigest.backend import ENOUGH
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.worker.tasks import GRAIN, Timer

Item = TypeVar("Item")
Answer = TypeVar("Answer")

BATCH_ITEMS = 256
BATCH_BYTES = 256 * 1024
QUEUE_ITEMS = 10_000
QUEUE_BYTES = 16 * 1024 * 1024

LEFT = "the engine was left before this was sent"


def batches(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """Cut items into batches that one call may carry."""
    start = total = 0
    for index, item in enumerate(items):
        has = size(item)
        if index > start and (index - start == BATCH_ITEMS or total + has > BATCH_BYTES):
            yield items[start:index]
            start, total = index, 0
        total += has
    if start < len(items):
        yield items[start:]


@dataclass(slots=True, eq=False, repr=False)
class Job(Generic[Item, Answer]):
    """An item on its way, and the future that its caller awaits."""

    item: Item
    size: int
    deadline: float
    answer: asyncio.Future[Answer]


class Queue(Generic[Item, Answer]):
    """A queue of items, sent in order, one call at a time."""

    def __init__(self) -> None:
        self.waiting: deque[Job[Item, Answer]] = deque()
        self.flight: list[Job[Item, Answer]] = []
        self.filled = asyncio.Event()


class Batcher(Generic[Item, Answer]):
    """Sends a bounded number of items through several queues: each in order, and one call at a time.

    ``share`` is the number of batchers that divide the room among them.

    ``send`` answers each item with a result or an error. An item cancelled before it is sent is withdrawn.
    An item without an answer ``timeout`` seconds after its time began raises BackendUnavailable, which says whether it
    was sent: none is in the last tenth of its time. Without room, it waits for some within that time. ``failed`` is
    told of such errors, and of those of items that are left without an answer at the end.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Answer | AiodigestError]]],
        timeout: float,
        queues: int = 1,
        share: int = 1,
        failed: Callable[[AiodigestError], None] = lambda error: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._failed = failed
        self._timeout = timeout
        # the room: a share of it, but enough for two calls
        self._most = (
            max(QUEUE_ITEMS // share, min(QUEUE_ITEMS, 2 * BATCH_ITEMS)),
            max(QUEUE_BYTES // share, min(QUEUE_BYTES, 2 * BATCH_BYTES)),
        )
        self._queues = [Queue[Item, Answer]() for _ in range(queues)]
        self._items = 0  # that wait in all queues
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_open = True  # there is room, and it has not ended
        self._timer = Timer(self._expire, Context())  # for the first deadline; a caller may have made this
        self._ended = False

    async def submit(self, item: Item, size: int = 0) -> Answer:
        """Queue an item and return its answer."""
        return await self.put(item, size, 0, self._loop.time())

    def put(self, item: Item, size: int, queue: int, since: float) -> Awaitable[Answer]:
        """Queue an item whose time began at ``since``, and return what to await for its answer.

        That is a future if there is room: a coroutine around it would take as long as all else, for every add.
        """
        if not self._is_open:
            return asyncio.ensure_future(self._squeeze(item, size, queue, since))  # a task: adds of `sync` have none
        answer: asyncio.Future[Answer] = self._loop.create_future()
        chosen = self._queues[queue]
        if not chosen.waiting:
            chosen.filled.set()
        deadline = since + self._timeout
        chosen.waiting.append(Job(item, size, deadline, answer))
        self._items += 1
        self._bytes += size
        if self._items >= self._most[0] or self._bytes >= self._most[1]:
            self._room.clear()
            self._is_open = False
        if deadline < self._timer.at:
            self._timer.set(deadline)
        return answer

    async def _squeeze(self, item: Item, size: int, queue: int, since: float) -> Answer:
        """Wait for room, queue an item and return its answer."""
        deadline = since + self._timeout
        try:
            async with asyncio.timeout_at(deadline):
                while not self._room.is_set():  # another waiter may have taken the room
                    await self._room.wait()
        except TimeoutError:
            message = f"no room within {self._timeout:g} s in the queue of what is to be sent"
            raise self._unavailable(message, "no") from None
        if self._ended:
            await asyncio.sleep(0)  # a caller that retries at once must not keep the loop from ending
            raise BackendUnavailable(LEFT, stored="no")
        return await self.put(item, size, queue, since)

    async def run(self) -> None:
        """Send queued items until cancelled; anything then unsent fails as not stored."""
        try:
            async with asyncio.TaskGroup() as group:
                for queue in self._queues:
                    group.create_task(self._serve(queue))
        finally:
            self._end()
            self._timer.cancel()
            for queue in self._queues:
                self._fail(queue.flight, "the engine was left before the answer came", "unknown")
                self._fail(queue.waiting, LEFT, "no")

    async def _serve(self, queue: Queue[Item, Answer]) -> None:
        while True:
            await queue.filled.wait()
            queue.flight = self._take(queue)
            if queue.flight:
                await self._send_batch(queue.flight)
                queue.flight = []
                await asyncio.sleep(0)  # who was answered may have more for the next call

    async def finish(self) -> None:
        """Refuse new items, and return when nothing is queued or in flight."""
        self._end()
        while pending := [job.answer for job in self.unanswered]:
            await asyncio.wait(pending)

    def _end(self) -> None:
        self._ended, self._is_open = True, False
        self._room.set()

    @property
    def unanswered(self) -> list[Job[Item, Answer]]:
        return [job for queue in self._queues for job in (*queue.flight, *queue.waiting) if not job.answer.done()]

    def _take(self, queue: Queue[Item, Answer]) -> list[Job[Item, Answer]]:
        batch: list[Job[Item, Answer]] = []
        size, taken, waiting, before = 0, 0, queue.waiting, len(queue.waiting)
        soon = self._loop.time() + ENOUGH * self._timeout
        while waiting and len(batch) < BATCH_ITEMS:
            job = waiting[0]
            if size + job.size > BATCH_BYTES and batch:
                break
            waiting.popleft()
            taken += job.size
            if job.deadline < soon:  # it would be the others' deadline too
                self._fail([job], f"it could not be sent within {self._timeout:g} s", "no")
            elif not job.answer.done():  # else its caller was cancelled or timed out
                size += job.size
                batch.append(job)
        self._items -= before - len(waiting)
        self._bytes -= taken
        if not waiting:
            queue.filled.clear()
        if self._items <= self._most[0] // 2 and self._bytes <= self._most[1] // 2:  # many who wait are woken at once
            self._room.set()
            self._is_open = not self._ended
        return batch

    async def _send_batch(self, batch: Sequence[Job[Item, Answer]]) -> None:
        try:
            answers = list(zip(batch, await self._send([job.item for job in batch]), strict=True))
        except Exception as error:  # a fault too: it is for the callers to know, and the next batch may fare better
            answers = [(job, error) for job in batch]
        for job, answer in answers:
            future = job.answer
            if future.done():  # its caller was cancelled, or its time was over
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _expire(self) -> None:
        """Fail items that have waited too long."""
        now = self._loop.time()
        late = f"no answer within {self._timeout:g} s"
        for queue in self._queues:
            self._fail([job for job in queue.flight if job.deadline <= now], late, "unknown")
            self._fail([job for job in queue.waiting if job.deadline <= now], late, "no")
        if unanswered := self.unanswered:
            self._timer.set(max(min(job.deadline for job in unanswered), now + GRAIN))

    def _fail(self, jobs: Iterable[Job[Item, Answer]], message: str, stored: Literal["no", "unknown"]) -> None:
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(self._unavailable(message, stored))

    def _unavailable(self, message: str, stored: Literal["no", "unknown"]) -> BackendUnavailable:
        error = BackendUnavailable(message, stored=stored)
        self._failed(error)
        return error
