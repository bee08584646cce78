"""A single entering of an engine: its backend, its queues and its tasks, all in one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol
from zlib import crc32

from anyio import CancelScope

from aiodigest.backend import Add, Backend
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.models import Activity
from aiodigest.worker.availability import BACKOFF, Outage, elapse, retrieve
from aiodigest.worker.batcher import LEFT, Coalescer, batches

if TYPE_CHECKING:
    from aiodigest.scheduler import Scheduler

logger = logging.getLogger(__name__)

ADDS = "adds"  # the kind of calls that may find no server
CALLS = 2  # of adds at once to a single shard: while the server is at one, the next is made ready


def weight(add: Add) -> int:
    """Estimate an add's share of the bytes that a call may carry."""
    return len(add.entry) + len(add.key)


class Entered(Protocol):
    """The interface for an engine's calls while it is entered: a ``Session``, or a test's stand-in."""

    @property
    def main(self) -> asyncio.Future[None]: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...  # the only one in which it can be used
    @property
    def is_here(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def activity(self) -> Activity: ...
    @property
    def fault(self) -> str: ...
    @property
    def breadth(self) -> int: ...
    async def backend(self) -> Backend: ...
    async def add(self, add: Add, began: float) -> bool: ...
    async def add_many(self, adds: Sequence[Add]) -> list[bool | AiodigestError]: ...
    def explained(self, error: BackendUnavailable, record_id: str | None = None) -> BackendUnavailable: ...
    def poke(self, shard: int) -> None: ...
    def hurry(self) -> None: ...
    async def stop(self) -> None: ...


class Opener(Protocol):
    """The source of a session's backend."""

    async def open(self) -> Backend: ...
    async def close(self) -> None: ...
    def why_down(self) -> str | None: ...


class Session:
    """Owns one background task, which does everything that the engine does by itself.

    The store need not be up when a session starts: the first caller to need it connects, and others share the attempt.
    """

    def __init__(self, store: Opener, timeout: float, schedule: Callable[[Backend, Outage], Scheduler] | None) -> None:
        self._store = store
        self._timeout = timeout
        self._schedule = schedule
        self._backend: Backend | None = None
        self._connecting: asyncio.Task[Backend] | None = None
        self._adds: dict[int, Coalescer[Add, bool]] = {}  # by shard
        self._scheduler: Scheduler | None = None
        self._cut_off = False  # the latest add failed
        self._outage = Outage()
        self._stopping = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._started = asyncio.Event()
        self._chores: dict[int, asyncio.Task[None]] = {}
        self._home = (os.getpid(), asyncio.get_running_loop())
        self.main = asyncio.create_task(self._run(), name="aiodigest")
        self.main.add_done_callback(self._ended)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop it belongs to."""
        return self._home[1]

    @property
    def is_here(self) -> bool:
        """True in the process and the event loop that it belongs to."""
        return self._home == (os.getpid(), asyncio.get_running_loop())

    @property
    def is_over(self) -> bool:
        """True if it was left behind: by a fork, or by a loop that was closed before the engine was left."""
        return self._home[0] != os.getpid() or self._home[1].is_closed()

    @property
    def activity(self) -> Activity:
        """The current work; the engine itself counts adds."""
        worker = self._scheduler
        if worker is None:
            return Activity(unavailable=self._cut_off or self._backend is None, fault=self.fault)
        return Activity(0, worker.delivering, worker.backoff_level, self._cut_off or worker.is_cut_off, self.fault)

    @property
    def fault(self) -> str:
        """A message if the background task has ended although nobody stopped it, else ''."""
        if self._stopping.is_set() or not self.main.done():
            return ""
        return "the engine's background task has ended, as its log tells: only a restart of the process mends that"

    async def backend(self, began: float | None = None) -> Backend:
        """Return the connected store. Raises BackendUnavailable if it cannot be reached within the engine's timeout,
        counted from ``began``, or from now."""
        if self._backend is not None:
            return self._backend
        try:
            return await self._connected(began)
        except BackendUnavailable as error:
            raise self.explained(error) from error

    async def _connected(self, began: float | None) -> Backend:
        now = asyncio.get_running_loop().time()
        await self._started.wait()
        if self._stopping.is_set():
            raise BackendUnavailable("the engine was left before it was connected")
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._open())  # in no group, which would end with its first failure
            self._connecting.add_done_callback(retrieve)
        connecting = self._connecting
        await asyncio.wait([connecting], timeout=(began or now) + self._timeout - now)
        if not connecting.done():
            raise BackendUnavailable(f"no connection within {self._timeout:g} s")
        if connecting.cancelled():
            raise BackendUnavailable("the engine was left before it was connected")
        return connecting.result()

    async def _open(self) -> Backend:
        backend = await self._store.open()
        self._backend = backend
        if self._cut_off:
            self._reached()
        return backend

    def _place(self, backend: Backend, key: str) -> tuple[int, int]:
        """Return a timeline's shard, and the queue of its adds there: always the same, so that they stay in order."""
        shard = backend.shard_map.shard_of(key)
        return shard, 0 if backend.shard_map.adding > 1 else crc32(key.encode()) % CALLS

    def _new_coalescer(self, backend: Backend, shard: int) -> Coalescer[Add, bool]:
        if self._stopping.is_set() or self.main.done():
            raise BackendUnavailable(self.fault or LEFT)
        self._let_go(backend)
        queues = CALLS if backend.shard_map.adding == 1 else 1  # several shards have several calls as it is
        coalescer = Coalescer[Add, bool](
            partial(backend.add, shard), self._timeout, queues, share=backend.shard_map.adding
        )
        self._chores[shard] = self._group.create_task(coalescer.run())
        self._adds[shard] = coalescer
        return coalescer

    def _let_go(self, backend: Backend) -> None:
        """End the queues of shards that no longer take adds, once everything in them has an answer."""
        for shard in [shard for shard in self._adds if backend.shard_map.number_of(shard) is None]:
            if self._adds[shard].is_idle:
                del self._adds[shard]
                self._chores.pop(shard).cancel()

    def explained(self, error: BackendUnavailable, record_id: str | None = None) -> BackendUnavailable:
        """Return the same error, for a record if one is named, with the cause behind it: a fault, or the log of an
        embedded server."""
        message, reason = self.fault or str(error), self._store.why_down()
        if reason and reason not in message:
            message += f" ({reason})"
        return BackendUnavailable(message, record_id=record_id, stored=error.stored)

    @property
    def breadth(self) -> int:
        """The factor for a slice of ``add_many`` that fills the calls of all shards; at most 4."""
        return 1 if self._backend is None else min(self._backend.shard_map.adding, 4)

    async def add(self, add: Add, began: float) -> bool:
        """Send an add, timed from ``began``, with the others of this turn; True if it made its timeline ready."""
        try:
            backend = self._backend or await self.backend(began)
        except BackendUnavailable as error:
            self._missed(error)
            raise
        shard, queue = self._place(backend, add.key)
        coalescer = self._adds.get(shard) or self._new_coalescer(backend, shard)
        try:
            ready = await coalescer.submit(add, weight(add), queue=queue, since=began)
        except BackendUnavailable as error:
            self._missed(error)
            raise
        if self._cut_off:
            self._reached()
        if ready:
            self.poke(backend.shard_map.shard_of(add.key))  # it may have gone to another shard meanwhile
        return ready

    async def add_many(self, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Send adds past the queue, in batches; those of a timeline in order."""
        try:
            backend = await self.backend()
        except AiodigestError as error:
            self._missed(error)
            return [error] * len(adds)
        answers: dict[int, bool | AiodigestError] = {}
        queues: dict[tuple[int, int], list[int]] = {}
        for index, add in enumerate(adds):
            queues.setdefault(self._place(backend, add.key), []).append(index)

        async def send(shard: int, indices: list[int]) -> None:
            sent = 0
            for batch in batches([adds[index] for index in indices], weight):
                some = indices[sent : sent + len(batch)]
                sent += len(batch)
                try:
                    results = await backend.add(shard, batch)
                except AiodigestError as error:
                    self._missed(error)
                    unsent = BackendUnavailable(str(error)) if isinstance(error, BackendUnavailable) else error
                    answers.update(dict.fromkeys(some, error))
                    answers.update(dict.fromkeys(indices[sent:], unsent))
                    return
                answers.update(zip(some, results, strict=True))
                refusal = next((each for each in results if isinstance(each, BackendUnavailable)), None)
                if refusal is not None:
                    self._missed(refusal)
                elif self._cut_off:
                    self._reached()
                for ready in {
                    backend.shard_map.shard_of(add.key) for add, on in zip(batch, results, strict=True) if on is True
                }:
                    self.poke(ready)

        async with asyncio.TaskGroup() as group:
            for (shard, _), indices in queues.items():
                group.create_task(send(shard, indices))
        return [answers[index] for index in range(len(adds))]

    def _missed(self, error: AiodigestError) -> None:
        """Note that an add has failed, which may mean that its server is away."""
        if isinstance(error, BackendUnavailable) and not self._stopping.is_set() and not self.fault:
            self._cut_off = True
            self._outage.failed(error, ADDS)

    def _reached(self) -> None:
        """Note that an add has reached its server, after one that had not."""
        self._cut_off = False
        self._outage.eased(ADDS)

    def poke(self, shard: int) -> None:
        """Wake this process's own scheduler, if it has one."""
        if self._scheduler is not None:
            self._scheduler.poke(shard)

    def hurry(self) -> None:
        """Stop, and drain no longer."""
        self._stopping.set()
        if self._scheduler is not None:
            self._scheduler.stop(at_once=True)

    async def stop(self) -> None:
        """Send queued adds, drain, and close. A cancellation meanwhile only ends the drain."""
        self._stopping.set()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._scheduler is not None:
            self._scheduler.stop()
        cancelled: asyncio.CancelledError | None = None
        with CancelScope(shield=True):
            for owned in (self.main, self._connecting):
                while owned is not None and not owned.done():
                    try:
                        await asyncio.wait([owned])
                    except asyncio.CancelledError as error:
                        cancelled = error
                        self.hurry()
            try:
                if self._backend is not None:
                    await self._backend.aclose()
            finally:
                await self._store.close()
        if cancelled is not None:
            raise cancelled
        if not self.main.cancelled():
            self.main.result()

    async def _run(self) -> None:
        async with self._group:
            self._started.set()
            if self._schedule is not None:
                await self._deliver(self._schedule)
            await self._stopping.wait()
            await asyncio.gather(*(coalescer.drain() for coalescer in self._adds.values()))
            for chore in self._chores.values():
                chore.cancel()

    async def _deliver(self, schedule: Callable[[Backend, Outage], Scheduler]) -> None:
        outage, tries = self._outage, 0
        while not self._stopping.is_set():
            try:
                backend = await self.backend()
            except Exception as error:
                if not self._stopping.is_set():
                    outage.failed(error)
                    tries += 1
                    await elapse(self._stopping, BACKOFF(tries))
                continue
            outage.answered()
            if not self._stopping.is_set():  # it may have begun during the very last try
                self._scheduler = schedule(backend, outage)
                await self._scheduler.run()

    def _ended(self, main: asyncio.Task[None]) -> None:
        if main.cancelled():
            if not self._stopping.is_set():  # by other code, which cancelled every task that there is
                logger.critical("aiodigest's background task was cancelled from outside", extra={"reason": "cancelled"})
        elif (fault := main.exception()) is not None:
            facts = {"reason": repr(fault)}
            logger.critical("a fault of aiodigest has ended its background task", exc_info=fault, extra=facts)
