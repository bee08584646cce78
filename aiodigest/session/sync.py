"""``engine.sync``: adds from threads without an event loop, through the one thread of the process that has one.

That thread is the bridge. It starts with the first add, and serves all engines, each with a session of its own beside
the one in which it may be entered at the same time. Nothing is buffered, so the process may end at any time.

A forked child gets a bridge of its own. It keeps its parent's bridge, but never uses it again: that one shares sockets
and a selector with the parent, and closing them would write to the parent's. It is not anyio's
``start_blocking_portal``: docs/design.md says why.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from aiodigest.backend import Backend
from aiodigest.errors import BackendUnavailable, ConfigurationError
from aiodigest.models import Entry
from aiodigest.records.validation import Bounds, taken
from aiodigest.session.background import BackgroundSession

T = TypeVar("T")
Given = TypeVar("Given", contravariant=True)
Answer = TypeVar("Answer")

LOOK = 0.001  # seconds until the bridge looks after threads that wake each other
PATIENCE = 1.0  # seconds until a thread looks after its call
GRACE = 1.0  # seconds for calls under way and for closing connections, at the end of the process


class Adding(Protocol[Given]):
    """The part of an engine that ``engine.sync`` uses."""

    backend: Backend
    namespace: str
    bounds: Bounds
    timeout: float

    async def add(
        self,
        key: str,
        value: Given,
        *,
        record_id: str | None = ...,
        timestamp: datetime | float | None = ...,
        urgent: bool = ...,
    ) -> bool: ...
    async def add_many(self, entries: Iterable[Entry[Given]]) -> list[bool]: ...


class Sync(Generic[T]):
    """The adds of an engine for threads without an event loop: Django views, Celery tasks, scripts.

    The engine need not be entered: the first add connects, and a process may end, or fork, at any time. Any number of
    threads may add at once; their adds go out together, as those of tasks do. The engine's policy function and codec
    are called in another thread, which runs an event loop: they must not block it.

    In addition to the errors of the engine's methods, each raises ConfigurationError in a thread with a running
    event loop, which it would block. There is no need to make one: every ``engine`` has its own as ``engine.sync``,
    and says by ``in_task`` whether an add needs a task.
    """

    def __init__(self, engine: Adding[T], *, in_task: bool) -> None:
        self._engine = engine
        self._in_task = in_task  # an add needs one

    def add(
        self,
        key: str,
        value: T,
        *,
        record_id: str | None = None,
        timestamp: datetime | float | None = None,
        urgent: bool = False,
    ) -> bool:
        """``DigestEngine.add``, with the same arguments, answer and errors; blocks until the record is stored.

        That is within the engine's ``timeout``, or it raises BackendUnavailable; with a running event loop in this
        thread it raises ConfigurationError. If the wait is interrupted, as by Ctrl-C, the record may be stored.
        """
        engine = self._engine
        add = partial(engine.add, key, value, record_id=record_id, timestamp=timestamp, urgent=urgent)
        return self._run("add", add, self._in_task)

    def add_many(self, entries: Iterable[Entry[T]]) -> list[bool]:
        """``DigestEngine.add_many``, with the same arguments, answers and errors; blocks until all are stored.

        The entries are read in the calling thread, so a generator may query a database. Raises
        ConfigurationError with a running event loop in this thread.
        """
        engine = self._engine
        given = taken(entries, engine.bounds.records)
        return self._run("add_many", partial(engine.add_many, given), in_task=True)

    def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, Answer]], in_task: bool) -> Answer:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise ConfigurationError(
                f"engine.sync.{name} would block the event loop that runs in this thread: "
                f"await engine.{name}, inside `async with engine:`"
            )
        return bridge().call(self._engine, work, in_task)


class Helpers(ThreadPoolExecutor):
    """Threads that look up host names. Python starts no more of them once the main thread has ended, while others may
    still add: from then on ``submit`` looks them up itself."""

    def submit(self, fn: Callable[..., Answer], /, *args: Any, **kwargs: Any) -> Future[Answer]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            done: Future[Answer] = Future()
            try:
                done.set_result(fn(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)
            return done


@dataclass(slots=True, eq=False, repr=False)
class Call(Generic[Answer]):
    """A call on its way, and the thread that waits for its end.

    Its coroutine is run by hand, from one future that it awaits to the next: a task would cost more than the add does.
    """

    engine: Adding[Any]
    work: Callable[[], Coroutine[Any, Any, Answer]]
    in_task: bool  # it has to be in one: it has a timeout, or awaits what a user wrote
    is_of_main: bool  # the main thread waits for it, the only one whose waiting a signal handler may interrupt
    context: Context = field(default_factory=copy_context)
    waiting: threading.Lock = field(default_factory=threading.Lock)  # released when the thread may go on
    awaited: asyncio.Future[Any] | None = None
    is_over: bool = False
    is_withdrawn: bool = False
    _coroutine: Coroutine[Any, Any, Answer] | None = None
    _answer: Any = None
    _error: BaseException | None = None

    def step(self) -> asyncio.Future[Any] | None:
        """Run to the next future that it awaits, and return that; None at its end."""
        try:
            if self._coroutine is None:
                self._coroutine = self.work()
            awaited = self.context.run(self._coroutine.send, None)
        except StopIteration as end:
            self._answer, self.is_over = end.value, True
        except BaseException as error:
            self._error, self.is_over = error, True
        else:
            self.awaited = awaited or asyncio.ensure_future(asyncio.sleep(0))  # it may have given way, awaiting none
            return self.awaited
        return None

    def cancel(self) -> None:
        if self.awaited is not None:
            self.awaited.cancel()

    def result(self) -> Answer:
        """Return its answer, or raise its error."""
        if self._error is None:
            return self._answer
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # the traceback of which has this frame


class Bridge:
    """A thread of this process with an event loop, and the sessions of engines in it.

    Threads whose calls end are woken one by one, each by the one before it: all at once, or two at a time, would stand
    in line for the interpreter's lock, and the bridge behind them. So only the one that was woken last wakes another.
    What they submit then is begun when the last is awake.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._main = threading.main_thread().ident
        self._lock = threading.RLock()  # a signal handler may add, too
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turning = threading.Lock()  # held by the thread in which the loop runs
        self._context = Context()  # of callbacks: empty
        # weak: an engine that nobody holds any more is left
        self._sessions: weakref.WeakKeyDictionary[object, BackgroundSession] = weakref.WeakKeyDictionary()
        self._leaving: set[asyncio.Task[None]] = set()  # sessions
        self._submitted: deque[Call[Any]] = deque()
        self._under_way: set[Call[Any]] = set()
        self._ended: deque[Call[Any]] = deque()  # those whose threads are to be woken
        self._woken: Call[Any] | None = None  # the one whose thread is to wake the next
        self._seen: Call[Any] | None = None  # the same at the latest look
        self._is_asked = self._is_waking = self._is_looking = False

    def call(self, engine: Adding[Any], work: Callable[[], Coroutine[Any, Any, Answer]], in_task: bool) -> Answer:
        """Run a call in the loop, with a session of its engine, and wait for its answer."""
        call = Call(engine, work, in_task, threading.get_ident() == self._main)
        call.waiting.acquire()
        try:
            is_taken = self._submit(call)
            while is_taken and not call.waiting.acquire(timeout=PATIENCE) and not call.is_over:
                self._ask()  # in case that another thread was to do so, or to wake this one, and was interrupted
        except BaseException:
            self._withdraw(call)  # for this thread was interrupted
            raise
        finally:
            if self._woken is call:
                self._pass_on()
        if is_taken:
            return call.result()
        if not call.is_of_main:
            time.sleep(engine.timeout)  # a daemon's: it ends with the process, and no traceback is printed
        raise BackendUnavailable("the process is ending")

    def _submit(self, call: Call[Any]) -> bool:
        """Submit a call to the loop, unless the process is ending."""
        with self._lock:
            if self._over:
                return False
            self._running()
            self._submitted.append(call)
        if call.is_of_main or not (self._is_asked or self._ended):  # a signal handler may have interrupted this
            self._ask()
        return True

    def _ask(self) -> None:
        """Ask the loop to begin what was submitted."""
        self._is_asked = True
        self._soon(self._begin)

    def _soon(self, work: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(work, context=self._context)

    def _pass_on(self) -> None:
        """Wake the next thread, from one that was woken; or have the loop begin what they have submitted."""
        self._woken = None  # before there is none left: the loop, which adds some, sees that nobody wakes them
        try:
            self._woken = woken = self._ended.popleft()
        except IndexError:
            if self._submitted and not self._is_asked:
                self._ask()
        else:
            woken.waiting.release()

    def _withdraw(self, call: Call[Any]) -> None:
        call.is_withdrawn = True
        self._soon(call.cancel)
        self._ask()  # it may have been interrupted while it was to do that

    # In the loop

    def _begin(self) -> None:
        """Begin what was submitted."""
        self._is_asked = False
        while self._submitted:
            call = self._submitted.popleft()
            if call.is_withdrawn:
                continue
            if call.in_task or call.engine not in self._sessions:
                call.work = partial(self._serve, call, call.work)
            self._under_way.add(call)
            self._go_on(call)

    def _go_on(self, call: Call[Any], awaited: asyncio.Future[Any] | None = None) -> None:
        """Go on with a call whose future is done."""
        awaited = call.step()
        if awaited is not None:
            awaited.add_done_callback(partial(self._go_on, call), context=self._context)
            if call.is_withdrawn:
                awaited.cancel()
            return
        self._under_way.discard(call)
        if call.is_of_main or not (self._under_way or self._ended):
            call.waiting.release()  # the main thread is to wake nobody, since a handler may hold it up
            return
        self._ended.append(call)
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake, context=self._context)

    def _wake(self) -> None:
        """Wake the first of the threads whose calls have ended in this turn of the loop; it wakes the next."""
        self._is_waking = False
        if self._woken is None:
            self._pass_on()
        self._look_soon()

    def _look_soon(self) -> None:
        if (self._ended or self._woken is not None) and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(LOOK, self._look, context=self._context)

    def _look(self) -> None:
        """Wake the next thread in place of one that has not done so since the last look: it is slow, as where others
        keep the processor busy, or was interrupted."""
        self._is_looking = False
        if self._woken is self._seen:
            self._begin()
            self._pass_on()
        self._seen = self._woken
        self._look_soon()

    async def _serve(self, call: Call[Answer], work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        engine = call.engine
        if engine not in self._sessions:
            empty = Context()
            session = empty.run(BackgroundSession, engine.backend.clone(), engine.namespace, engine.timeout)
            self._sessions[engine] = session
            weakref.finalize(engine, self.leave, session).atexit = False
        if not call.in_task:
            return await work()
        return await asyncio.get_running_loop().create_task(work(), context=call.context)

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop, once its thread is started. A signal handler that adds may interrupt this with the same."""
        if self._loop is not None and self._turning.locked():
            return self._loop
        empty = Context()  # not that of the thread that came first, which the loop and its thread would keep
        try:
            if self._loop is None:
                loop = empty.run(asyncio.new_event_loop)
                loop.set_default_executor(Helpers())
                if self._loop is None:
                    self._loop = loop
                else:
                    loop.close()
            if not self._turning.locked():
                thread = threading.Thread(target=self._run, args=[self._loop], name="aiodigest", daemon=True)
                empty.run(thread.start)
        except (RuntimeError, OSError) as error:  # too many threads or files; or the main thread has ended
            raise BackendUnavailable(f"the thread that adds cannot be started: {error}") from error
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._turning.acquire(blocking=False):
            return  # two were started, and the other came first
        try:
            while True:
                try:
                    return loop.run_forever()
                except (SystemExit, KeyboardInterrupt):
                    pass  # of a policy function or codec: its caller gets it too, and the others need the loop
        finally:
            self._turning.release()

    def session_of(self, engine: object) -> BackgroundSession | None:
        """Return the session in which ``engine.sync`` adds, or None if it has not added yet in this process."""
        return self._sessions.get(engine)

    def forget(self, engine: object) -> Future[None] | None:
        """Leave the session of an engine; its next add begins another one, on the backend that it has then."""
        session = self._sessions.pop(engine, None)
        return None if session is None else self.leave(session)

    def leave(self, session: BackgroundSession) -> Future[None] | None:
        """Leave a session whose engine is gone, or has another backend; None if there is no loop to do it in."""

        async def stop() -> None:
            self._leaving.add(leaving := asyncio.create_task(session.stop()))
            leaving.add_done_callback(self._leaving.discard)
            await leaving

        if self._loop is None or self._loop.is_closed() or self is not bridge():
            return None
        return asyncio.run_coroutine_threadsafe(stop(), self._loop)

    def end(self) -> None:
        """Close all connections, at the end of the process."""
        with self._lock:
            self._over = True
        if self._loop is None or not self._turning.locked():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(GRACE)
        except TimeoutError:
            return  # the thread ends with the process, and what waits for it
        self._loop.call_soon_threadsafe(self._loop.stop)
        with self._turning:
            self._loop.close()

    async def _stop(self) -> None:
        self._begin()  # they are not refused: nobody might catch that
        while awaited := {*self._leaving, *(call.awaited for call in self._under_way if call.awaited)}:
            await asyncio.wait(awaited)
        await asyncio.gather(*(session.stop() for session in list(self._sessions.values())), return_exceptions=True)


_bridge = Bridge()
_parents: list[Bridge] = []


def bridge() -> Bridge:
    """Return the bridge of this process."""
    if _bridge.pid != os.getpid():  # a C program has forked and did not tell Python, as uWSGI does
        _renew()
    return _bridge


def _renew() -> None:
    global _bridge
    _parents.append(_bridge)
    _bridge = Bridge()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_renew)

atexit.register(lambda: bridge().end())
