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
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from aiodigest.backend import Backend
from aiodigest.errors import BackendUnavailable, ConfigurationError
from aiodigest.models import Entry
from aiodigest.records.validation import Bounds, taken
from aiodigest.session.background import BackgroundSession
from aiodigest.worker.tasks import retrieve

T = TypeVar("T")
Given = TypeVar("Given", contravariant=True)
Answer = TypeVar("Answer")

GRACE = 1.0  # seconds for calls under way and for closing connections, at the end of the process


class Adding(Protocol[Given]):
    """The part of an engine that ``engine.sync`` uses."""

    backend: Backend
    namespace: str
    bounds: Bounds
    timeout: float

    async def add(
        self, key: str, value: Given, *, record_id: str | None = ..., timestamp: datetime | float | None = ...
    ) -> bool: ...
    async def add_many(self, entries: Iterable[Entry[Given]]) -> list[bool]: ...


class Sync(Generic[T]):
    """The adds of an engine for threads without an event loop: Django views, Celery tasks, scripts.

    The engine need not be entered: the first add connects, and a process may end, or fork, at any time. Any number of
    threads may add at once; their adds go out together, as those of tasks do. The engine's policy function and codec
    are called in another thread, which runs an event loop: they must not block it.

    In addition to the errors of the engine's methods, each raises ConfigurationError in a thread with a running
    event loop, which it would block. There is no need to make one: every ``engine`` has its own as ``engine.sync``.
    """

    def __init__(self, engine: Adding[T]) -> None:
        self._engine = engine

    def add(
        self, key: str, value: T, *, record_id: str | None = None, timestamp: datetime | float | None = None
    ) -> bool:
        """``DigestEngine.add``, with the same arguments, answer and errors; blocks until the record is stored.

        That is within the engine's ``timeout``, or it raises BackendUnavailable; with a running event loop in this
        thread it raises ConfigurationError. If the wait is interrupted, as by Ctrl-C, the record may be stored.
        """
        engine = self._engine
        return self._run("add", lambda: engine.add(key, value, record_id=record_id, timestamp=timestamp))

    def add_many(self, entries: Iterable[Entry[T]]) -> list[bool]:
        """``DigestEngine.add_many``, with the same arguments, answers and errors; blocks until all are stored.

        The entries are read in the calling thread, so a generator may query a database. Raises
        ConfigurationError with a running event loop in this thread.
        """
        engine = self._engine
        given = taken(entries, engine.bounds.records)
        return self._run("add_many", lambda: engine.add_many(given))

    def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            raise ConfigurationError(
                f"engine.sync.{name} would block the event loop that runs in this thread: "
                f"await engine.{name}, inside `async with engine:`"
            )
        return bridge().call(self._engine, work)


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


class Bridge:
    """A thread of this process with an event loop, and the sessions of engines in it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may add, too
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turning = threading.Lock()  # held by the thread in which the loop runs
        # weak: an engine that nobody holds any more is left
        self._sessions: weakref.WeakKeyDictionary[object, BackgroundSession] = weakref.WeakKeyDictionary()
        self._tasks: set[asyncio.Task[Any]] = set()  # calls under way, and sessions that are being left

    def call(self, engine: Adding[Any], work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Run a call in the loop, with a session of the engine, and wait for its answer."""
        answer: Future[Answer] = Future()
        try:
            if self._submit(answer, engine, work):
                return answer.result()
        except BaseException:
            answer.cancel()  # for this thread was interrupted, unless the call itself has failed
            raise
        if threading.current_thread() is not threading.main_thread():
            time.sleep(engine.timeout)  # a daemon's: it ends with the process, and no traceback is printed
        raise BackendUnavailable("the process is ending")

    def _submit(
        self, answer: Future[Answer], engine: Adding[Any], work: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> bool:
        """Submit a call to the loop, unless the process is ending."""

        def begin() -> None:
            task = self._note(loop.create_task(self._serve(engine, work)))
            task.add_done_callback(partial(_settle, answer))
            answer.add_done_callback(partial(withdraw, task))

        def withdraw(task: asyncio.Task[Answer], answer: Future[Answer]) -> None:
            if answer.cancelled():  # the thread that waits was interrupted
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(task.cancel)

        with self._lock:
            if self._over:
                return False
            loop = self._running()
            loop.call_soon_threadsafe(begin)
            return True

    def _running(self) -> asyncio.AbstractEventLoop:
        """Return the loop, once its thread is started. A signal handler that adds may interrupt this with the same."""
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

    async def _serve(self, engine: Adding[Any], work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        if engine not in self._sessions:
            empty = Context()
            session = empty.run(BackgroundSession, engine.backend.clone(), engine.namespace, engine.timeout)
            self._sessions[engine] = session
            weakref.finalize(engine, self.leave, session).atexit = False
        return await work()

    def session_of(self, engine: object) -> BackgroundSession | None:
        """Return the session in which ``engine.sync`` adds, or None if it has not added yet in this process."""
        return self._sessions.get(engine)

    def _note(self, task: asyncio.Task[Answer]) -> asyncio.Task[Answer]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve)  # its caller may have been interrupted
        return task

    def forget(self, engine: object) -> Future[None] | None:
        """Leave the session of an engine; its next add begins another one, on the backend that it has then."""
        session = self._sessions.pop(engine, None)
        return None if session is None else self.leave(session)

    def leave(self, session: BackgroundSession) -> Future[None] | None:
        """Leave a session whose engine is gone, or has another backend; None if there is no loop to do it in."""

        async def stop() -> None:
            await self._note(asyncio.create_task(session.stop()))

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
        if self._tasks:
            await asyncio.wait(self._tasks)  # which are not refused: nobody might catch that
        await asyncio.gather(*(session.stop() for session in list(self._sessions.values())), return_exceptions=True)


def _settle(answer: Future[Answer], task: asyncio.Task[Answer]) -> None:
    """Tell the waiting thread, if it still waits, how its call ended."""
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(task.result())
        except BaseException as error:
            answer.set_exception(error)


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
