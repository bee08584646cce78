"""Many calls of one event-loop turn as one call to the store, each with an answer of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextvars import Context, copy_context
from operator import attrgetter
from typing import Any, Generic, Literal, Self, TypeVar

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

FEW = 16  # items that are put into one queue at a time
SIZE, DEADLINE = attrgetter("size"), attrgetter("deadline")
SUCCEED, FAIL = asyncio.Future[Any].set_result, asyncio.Future[Any].set_exception  # without waking the task


def batches(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[Sequence[Item]]:
    """Cut items into batches that one call may carry."""
    sizes, start = [*map(size, items)], 0
    while start < len(items):
        end = min(start + BATCH_ITEMS, len(items))
        total = sum(sizes[start:end])
        while total > BATCH_BYTES and end - start > 1:
            end -= 1
            total -= sizes[end]
        yield items[start:end]
        start = end


class Job(asyncio.Future[Answer], Generic[Item, Answer]):
    """An item on its way: the future that its caller awaits.

    It keeps the first callback, which is that of the task that awaits it, so that one handle of the event loop wakes
    all that are answered in a turn: asyncio makes a handle for each, which takes a fifth of what an add takes.
    """

    __slots__ = ("callback", "deadline", "item", "line", "size")

    item: Item
    size: int
    line: object
    deadline: float
    callback: tuple[Callable[[Self], object], Context] | None

    def add_done_callback(self, fn: Callable[[Self], object], /, *, context: Context | None = None) -> None:
        if self.callback is None and not self.done():
            self.callback = fn, copy_context() if context is None else context
        else:
            super().add_done_callback(fn, context=context)

    def remove_done_callback(self, fn: Callable[[Self], object], /) -> int:
        removed = super().remove_done_callback(fn)
        if self.callback is not None and self.callback[0] == fn:
            self.callback = None
            removed += 1
        return removed

    def cancel(self, msg: object = None) -> bool:
        if is_cancelled := super().cancel(msg):
            self._wake_soon()
        return is_cancelled

    def set_result(self, result: Answer, /) -> None:
        super().set_result(result)
        self._wake_soon()

    def set_exception(self, exception: type | BaseException, /) -> None:
        super().set_exception(exception)
        self._wake_soon()

    def _wake_soon(self) -> None:
        if self.callback is not None:
            jobs: deque[Job[Any, Any]] = deque([self])
            self.get_loop().call_soon(wake, jobs)


def wake(jobs: deque[Job[Any, Any]]) -> None:
    """Call the callbacks of jobs that are done, each in its context: the tasks that await them go on."""
    try:
        while jobs:
            job = jobs.popleft()
            if job.callback is not None:
                (callback, context), job.callback = job.callback, None
                context.run(callback, job)
    finally:
        if jobs:  # for one has raised, such as SystemExit, which is for the event loop to deal with
            asyncio.get_running_loop().call_soon(wake, jobs)


class Queue(Generic[Item, Answer]):
    """A queue of items, sent in order, one call at a time."""

    def __init__(self) -> None:
        self.waiting: deque[Job[Item, Answer]] = deque()
        self.under_way: list[Job[Item, Answer]] = []
        self.filled = asyncio.Event()
        self.lines: set[object] = set()  # those of all items that wait or are under way, and maybe some more

    def answered(self) -> None:
        """Note that a call has ended."""
        self.under_way = []
        if not self.waiting:
            self.lines.clear()
        elif len(self.lines) > 2 * len(self.waiting):  # which is not looked through more often than it is filled
            self.lines = {job.line for job in self.waiting}


class Batcher(Generic[Item, Answer]):
    """Sends a bounded number of items through one queue or two: each in order, and one call at a time.

    What must stay in order has the same ``line``: it goes to the queue that has items of that line. What is in neither
    goes to the queue that has less to send, a few at a time: so calls are as large as they can be while two are made.

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
        queues: Literal[1, 2] = 1,
        share: int = 1,
        failed: Callable[[AiodigestError], None] = lambda error: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._failed = failed
        self._timeout = timeout
        # the room: a share of it, but enough for two calls
        self._most_items = max(QUEUE_ITEMS // share, min(QUEUE_ITEMS, 2 * BATCH_ITEMS))
        self._most_bytes = max(QUEUE_BYTES // share, min(QUEUE_BYTES, 2 * BATCH_BYTES))
        self._queues = [Queue[Item, Answer]() for _ in range(queues)]
        self._turn = self._queues[0], self._queues[-1]  # the one for the next few items, and the other
        self._answered = deque[Job[Item, Answer]]()  # whose callers are to be woken
        self._items = 0  # that wait in all queues
        self._bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_open = True  # there is room, and it has not ended
        self._timer = Timer(self._expire, Context())  # for the first deadline; a caller may have made this
        self._ended = False

    def asked(self, item: Item) -> Awaitable[Answer]:
        """Queue an item, and return what to await for its answer."""
        return self.put(item, 0, 0, self._loop.time())

    def put(self, item: Item, size: int, line: object, since: float) -> Awaitable[Answer]:
        """Queue an item whose time began at ``since``, and return what to await for its answer. Those of one ``line``
        stay in order.

        That is a future if there is room: a coroutine around it would take as long as all else, for every add.
        """
        if not self._is_open:
            return asyncio.ensure_future(self._put_later(item, size, line, since))  # a task: adds of `sync` have none
        queue, other = self._turn
        if line in other.lines:
            queue = other
        waiting = queue.waiting
        if len(waiting) % FEW == 0:
            if waiting:
                self._choose(queue)
            else:
                queue.filled.set()
        queue.lines.add(line)
        job: Job[Item, Answer] = Job(loop=self._loop)  # `Job[...]()` takes four times as long
        job.item = item
        job.size = size
        job.line = line
        job.deadline = deadline = since + self._timeout
        job.callback = None
        waiting.append(job)
        self._items = items = self._items + 1
        self._bytes = total = self._bytes + size
        if items >= self._most_items or total >= self._most_bytes:
            self._room.clear()
            self._is_open = False
        if deadline < self._timer.at:
            self._timer.set(deadline)
        return job

    def _choose(self, queue: Queue[Item, Answer]) -> None:
        """Choose this queue for the next few items, which then go together, or the other if that has less to send."""
        other = self._queues[-1] if queue is self._queues[0] else self._queues[0]
        has, other_has = len(queue.waiting) + len(queue.under_way), len(other.waiting) + len(other.under_way)
        self._turn = (queue, other) if has <= other_has else (other, queue)

    async def _put_later(self, item: Item, size: int, line: object, since: float) -> Answer:
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
        return await self.put(item, size, line, since)

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
                self._fail(queue.under_way, "the engine was left before the answer came", "unknown")
                self._fail(queue.waiting, LEFT, "no")

    async def _serve(self, queue: Queue[Item, Answer]) -> None:
        while True:
            await queue.filled.wait()
            queue.under_way = self._take(queue)
            self._choose(queue)
            if queue.under_way:
                await self._send_batch(queue.under_way)
                queue.answered()
                self._choose(queue)
                await asyncio.sleep(0)  # who was answered may have more for the next call

    async def finish(self) -> None:
        """Refuse new items, and return when nothing is queued or under way."""
        self._end()
        while pending := self.unanswered:
            await asyncio.wait(pending)

    def _end(self) -> None:
        self._ended, self._is_open = True, False
        self._room.set()

    @property
    def unanswered(self) -> list[Job[Item, Answer]]:
        return [job for queue in self._queues for job in (*queue.under_way, *queue.waiting) if not job.done()]

    def _take(self, queue: Queue[Item, Answer]) -> list[Job[Item, Answer]]:
        waiting = queue.waiting
        jobs = [waiting.popleft() for _ in range(min(len(waiting), BATCH_ITEMS))]
        taken = sum(map(SIZE, jobs))
        while taken > BATCH_BYTES and len(jobs) > 1:
            taken -= jobs[-1].size
            waiting.appendleft(jobs.pop())
        self._items -= len(jobs)
        self._bytes -= taken
        if not waiting:
            queue.filled.clear()
        if self._items <= self._most_items // 2 and self._bytes <= self._most_bytes // 2:  # many are woken at once
            self._room.set()
            self._is_open = not self._ended
        soon = self._loop.time() + ENOUGH * self._timeout
        if min(map(DEADLINE, jobs), default=soon) < soon:  # it would be the others' deadline too
            late = f"it could not be sent within {self._timeout:g} s"
            self._fail([job for job in jobs if job.deadline < soon], late, "no")
        return [job for job in jobs if not job.done()]  # else its caller was cancelled or timed out

    async def _send_batch(self, batch: Sequence[Job[Item, Answer]]) -> None:
        try:
            answers = list(zip(batch, await self._send([job.item for job in batch]), strict=True))
        except Exception as error:  # a fault too: it is for the callers to know, and the next batch may fare better
            answers = [(job, error) for job in batch]
        for job, answer in answers:
            try:
                if answer is True or answer is False or not isinstance(answer, Exception):  # most are one of the first
                    SUCCEED(job, answer)
                else:
                    FAIL(job, answer)
            except asyncio.InvalidStateError:
                pass  # its caller was cancelled, or its time was over
        if not self._answered:
            self._loop.call_soon(wake, self._answered)
        self._answered += batch

    def _expire(self) -> None:
        """Fail items that have waited too long."""
        now = self._loop.time()
        late = f"no answer within {self._timeout:g} s"
        for queue in self._queues:
            self._fail([job for job in queue.under_way if job.deadline <= now], late, "unknown")
            self._fail([job for job in queue.waiting if job.deadline <= now], late, "no")
        if unanswered := self.unanswered:
            self._timer.set(max(min(job.deadline for job in unanswered), now + GRAIN))

    def _fail(self, jobs: Iterable[Job[Item, Answer]], message: str, stored: Literal["no", "unknown"]) -> None:
        for job in jobs:
            if not job.done():
                job.set_exception(self._unavailable(message, stored))

    def _unavailable(self, message: str, stored: Literal["no", "unknown"]) -> BackendUnavailable:
        error = BackendUnavailable(message, stored=stored)
        self._failed(error)
        return error
