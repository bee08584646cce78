"""The sessions of an engine: its calls to a backend, and the tasks behind them, all in one event loop."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from itertools import groupby
from typing import TYPE_CHECKING, Any

from aiodigest.backend import Add, Backend
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.logs import NAMESPACE, logger_of
from aiodigest.models import Activity
from aiodigest.session.adder import ADDS, Adder, Down, unsent
from aiodigest.worker.availability import BACKOFF, Availability
from aiodigest.worker.batcher import LEFT
from aiodigest.worker.tasks import elapse, retrieve

if TYPE_CHECKING:
    from aiodigest.scheduler import Scheduler

logger = logger_of(__name__)


class Session:
    """The calls of an engine to a connected backend, made one by one, with no task of its own: those of a test.

    It serves any event loop, one thread at a time, or only ``loop`` if given.
    """

    elsewhere = (  # what is wrong with a call from another event loop
        "is in a TestEngine with server=True, which can be used in its own event loop alone, and Starlette's "
        "TestClient starts another one: use httpx2.AsyncClient(transport=httpx2.ASGITransport(app)), or no server"
    )

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.delivering = 0  # digests that who made this delivers by hand
        self.store = backend
        self._turn = nullcontext() if loop is None else asyncio.Lock()  # adds stay in order

    @property
    def is_here(self) -> bool:
        """True if it can be used here, in this process and event loop."""
        return self.loop in (None, asyncio.get_running_loop())

    @property
    def is_over(self) -> bool:
        """True if it was left behind: by a fork, or by a loop that was closed before the engine was left."""
        return False

    @property
    def activity(self) -> Activity:
        """The current work; the engine itself counts adds."""
        return Activity(delivering=self.delivering)

    @property
    def fault(self) -> str:
        """A message if the background task has ended although nobody stopped it, else ''."""
        return ""

    @property
    def trouble(self) -> str:
        """The reason why its latest adds, or the latest calls of its worker, failed in the last minute, else ''."""
        return ""

    @property
    def breadth(self) -> int:
        """The factor for a slice of ``add_many`` that fills the calls of all shards; at most 4."""
        return 1

    async def backend(self, began: float | None = None) -> Backend:
        """Return the connected backend. Raises BackendUnavailable if it cannot be reached within the engine's timeout,
        counted from ``began``, or from now."""
        return self.store

    def add(self, add: Add, began: float) -> Awaitable[bool]:
        """Return what to await for the answer to an add, timed from ``began``: True if it made its timeline ready."""
        return self._add(add)

    async def _add(self, add: Add) -> bool:
        [ready] = await self.add_many([add], {})
        if isinstance(ready, AiodigestError):
            raise ready
        return ready

    def why_down(self, key: str, down: Down) -> AiodigestError | None:
        """Return the error of what is added to a timeline whose shard is ``down``."""
        return (down.get(None) or down.get(self.store.shard_map.shard_of(key))) if down else None

    async def add_many(self, adds: Iterable[Add], down: Down) -> list[bool | AiodigestError]:
        """Send adds, those of a timeline in order; return the answer to each.

        Nothing is sent to shards that are ``down``; those that turn out to be so are put there.
        """
        answers: list[bool | AiodigestError] = []
        async with self._turn:
            for shard, group in groupby(adds, lambda add: self.store.shard_map.shard_of(add.key)):
                some = list(group)
                try:
                    if shard in down:
                        raise down[shard]
                    answers += await self.store.add(shard, some)
                except AiodigestError as error:
                    answers += [error] * len(some)
                    down[shard] = unsent(error)
        return answers

    def explained(self, error: BackendUnavailable, record_id: str | None = None) -> BackendUnavailable:
        """Return the same error, for a record if one is named, with the cause behind it: a fault, or the log of an
        embedded server."""
        message, reason = self.fault or str(error), self.store.why_down()
        if reason and reason not in message:
            message += f" ({reason})"
        return BackendUnavailable(message, record_id=record_id, stored=error.stored)

    def poke(self, shard: int) -> None:
        """Wake this process's own worker, if it has one: something in a shard may be due earlier."""


class BackgroundSession(Session):
    """The session of an engine that was entered: one background task does everything that the engine does by itself.

    The server need not be up when it starts: the first caller to need it connects, and others share the attempt.
    ``schedule`` makes the scheduler of an engine that delivers.
    """

    elsewhere = "was entered in another event loop or process: it can be used there alone"

    def __init__(
        self,
        backend: Backend,
        namespace: str,
        timeout: float,
        schedule: Callable[[Backend, Availability], Scheduler] | None = None,
    ) -> None:
        super().__init__(backend, asyncio.get_running_loop())
        self.timeout = timeout
        self.availability = Availability(namespace)
        self._schedule = schedule
        self._scheduler: Scheduler | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.is_connected = False
        self._stopping = asyncio.Event()
        self._started = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._context = copy_context()  # that of its tasks, and not that of a call which happens to need one first
        self._context.run(NAMESPACE.set, namespace)
        self._adder = Adder(self)
        self.add = self._adder.add
        self._pid = os.getpid()
        self.main = asyncio.create_task(self._run(), name="aiodigest", context=self._context.copy())
        self.main.add_done_callback(self._ended, context=self._context)

    @property
    def is_here(self) -> bool:
        return self._pid == os.getpid() and self.loop is asyncio.get_running_loop()

    @property
    def is_over(self) -> bool:
        return self._pid != os.getpid() or self.main.get_loop().is_closed()

    @property
    def activity(self) -> Activity:
        worker, cut_off = self._scheduler, self._adder.is_cut_off
        if worker is None:
            return Activity(unavailable=cut_off or not self.is_connected, fault=self.fault)
        now, limit, lost = self.main.get_loop().time(), worker.limit, cut_off or self.availability.is_lost
        (level, resting), room, throttled = limit.trouble(now), limit.room, limit.throttled(worker.throttling, now)
        return Activity(0, worker.delivering, level, lost, self.fault, resting, room.taken, room.waiting, throttled)

    @property
    def fault(self) -> str:
        if self._stopping.is_set() or not self.main.done():
            return ""
        return "the engine's background task has ended, as its log tells: only a restart of the process mends that"

    @property
    def trouble(self) -> str:
        return self.availability.why_lost(but=() if self._adder.is_cut_off else (ADDS,))

    @property
    def breadth(self) -> int:
        return min(self.store.shard_map.adding, 4) if self.is_connected else 1

    @property
    def refusal(self) -> str:
        """The reason why no new work may begin, or '': that of a callback may go on while it is waited for."""
        return LEFT if self._stopping.is_set() else self.fault

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that ends with this session."""
        return self._context.copy().run(self._group.create_task, work)  # its callbacks, too, keep a context

    # Connecting

    async def backend(self, began: float | None = None) -> Backend:
        if not self.is_connected:
            try:
                await self._connect(began)
            except BackendUnavailable as error:
                raise self.explained(error) from error
        return self.store

    async def _connect(self, began: float | None) -> None:
        now = asyncio.get_running_loop().time()
        await self._started.wait()
        if self._stopping.is_set():
            raise BackendUnavailable("the engine was left before it was connected")
        if self._connecting is None or self._connecting.done():
            # in no group, which would end with its first failure
            self._connecting = asyncio.create_task(self._open(), context=self._context)
            self._connecting.add_done_callback(retrieve)
        connecting = self._connecting
        await asyncio.wait([connecting], timeout=(began or now) + self.timeout - now)
        if not connecting.done():
            raise BackendUnavailable(f"no connection within {self.timeout:g} s")
        if connecting.cancelled():
            raise BackendUnavailable("the engine was left before it was connected")
        connecting.result()

    async def _open(self) -> None:
        await self.store.connect()
        self.is_connected = True
        self._adder.reached()

    # Adding

    async def add_many(self, adds: Iterable[Add], down: Down) -> list[bool | AiodigestError]:
        return await self._adder.add_many(adds, down)

    def poke(self, shard: int) -> None:
        if self._scheduler is not None:
            self._scheduler.poke(shard)

    # The background task

    def hurry(self) -> None:
        """Stop, and wait no longer for deliveries under way."""
        self._stopping.set()
        if self._scheduler is not None:
            self._scheduler.stop(at_once=True)

    async def stop(self) -> None:
        """Send queued adds, end the deliveries, and close. A cancellation meanwhile only ends the wait for them."""
        self._stopping.set()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._scheduler is not None:
            self._scheduler.stop()
        cancelled: asyncio.CancelledError | None = None
        with shield():
            for owned in (self.main, self._connecting):
                while owned is not None and not owned.done():
                    try:
                        await asyncio.wait([owned])
                    except asyncio.CancelledError as error:
                        cancelled = error
                        self.hurry()
            if self._connecting is not None:
                await self.store.aclose()
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
            await self._adder.drain()

    async def _deliver(self, schedule: Callable[[Backend, Availability], Scheduler]) -> None:
        tries = 0
        while not self._stopping.is_set():
            try:
                backend = await self.backend()
            except Exception as error:
                if not self._stopping.is_set():
                    self.availability.failed(error)
                    tries += 1
                    await elapse(self._stopping, BACKOFF(tries))
                continue
            self.availability.answered()
            if not self._stopping.is_set():  # it may have begun during the very last try
                self._scheduler = schedule(backend, self.availability)
                await self._scheduler.run()

    def _ended(self, main: asyncio.Task[None]) -> None:
        if main.cancelled():
            if not self._stopping.is_set():  # by other code, which cancelled every task that there is
                logger.critical("aiodigest's background task was cancelled from outside", extra={"reason": "cancelled"})
        elif (fault := main.exception()) is not None:
            facts = {"reason": repr(fault)}
            logger.critical("a fault of aiodigest has ended its background task", exc_info=fault, extra=facts)


def shield() -> AbstractContextManager[object]:
    """Keep out the cancel scopes of anyio, which cancel again and again."""
    # There is none as long as nobody has imported it, which with its backend takes a tenth of the time from a program's
    # start to its first add.
    if "anyio" not in sys.modules:
        return nullcontext()
    from anyio import CancelScope

    return CancelScope(shield=True)
