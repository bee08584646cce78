"""An event loop in which a seed decides the order of what is ready, and processes that can be stopped and killed."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from itertools import count
from math import inf
from random import Random
from typing import Any, TypeVar

from engines import VirtualLoop

T = TypeVar("T")

STEPS = 3_000_000  # of a world that would go on for ever
LIMIT = 20.0  # seconds of computing, of which a world takes less than one
NOWHERE = Context()

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Endless(Exception):
    """A world goes on for ever."""


@contextmanager
def no_turn_is_endless() -> Generator[None]:
    """Raise Endless in what has computed for so long that it must be a loop that lets nobody else run."""

    def alarm(number: int, frame: object) -> None:
        raise Endless(f"{LIMIT:g} s of computing, and no end")

    before = signal.signal(signal.SIGVTALRM, alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, 1.0)  # again and again, should somebody swallow it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Process:
    """Everything that runs in its context is of one process, and stops with it as at a SIGSTOP or SIGKILL."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.went_on_at = -1e9  # when it last went on again after a stop
        self.tasks: list[asyncio.Task[Any]] = []
        self.aside: list[asyncio.Handle] = []  # what could have run while it was stopped

    def __repr__(self) -> str:
        return self.name

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a task of this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return asyncio.get_running_loop().create_task(coroutine, context=context)

    def runs_since(self, moment: float) -> bool:
        """Whether it is there, and has not stood still since then."""
        return self.alive and not self.stopped and self.went_on_at <= moment

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        self.stopped, self.went_on_at = False, loop.time()
        loop.ready.extend(self.aside)
        self.aside.clear()

    def kill(self) -> None:
        """End it without a chance to clean up. Its tasks are kept: to collect them would run their clean-up."""
        self.alive = False
        self.stopped = True

    async def bury(self) -> None:
        """Let the tasks of a dead process end, when nothing that they do can matter any more."""
        self.go_on()
        for _ in range(100):
            left = [task for task in self.tasks if not task.done()]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0.01)
        raise AssertionError(f"tasks of {self.name} do not end")


class _Ready(deque[asyncio.Handle]):
    """What can run now, taken in an order drawn at random; what is of a stopped process is set aside."""

    def __init__(self, source: Random) -> None:
        super().__init__()
        self._random = source.random
        self.left = STEPS

    def popleft(self) -> asyncio.Handle:
        self.left -= 1
        if not self.left:
            self.left = STEPS  # for what ends the loop
            raise Endless(f"no end after {STEPS} steps")
        index = int(self._random() * len(self))
        self.rotate(-index)
        handle = super().popleft()
        self.rotate(index)
        process = handle._context.get(PROCESS)
        if process is not None and process.stopped and not handle.cancelled():
            process.aside.append(handle)
            handle = asyncio.Handle(print, (), asyncio.get_running_loop())
            handle.cancel()
        return handle


class _Numbered:
    """A hash that does not depend on where something lies in memory, so that sets of tasks have one order."""

    def __init__(self, *arguments: Any, loop: SeededLoop, **options: Any) -> None:
        self._number = next(loop.numbers)  # a task is put into sets while it is made
        super().__init__(*arguments, loop=loop, **options)  # pyright: ignore[reportCallIssue]  (not that of object)

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task[Any]): ...


class _Future(_Numbered, asyncio.Future[Any]): ...


class SeededLoop(VirtualLoop):
    """Virtual time, and one order of events for each seed."""

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.idle.ends, self.idle.looks = inf, False
        self.ready = self._ready = _Ready(Random(seed))
        self.numbers = count(1)
        self.set_task_factory(self._make_task)  # pyright: ignore[reportArgumentType]  (the stub is of other versions)

    def _make_task(self, _: object, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = _Task(coroutine, loop=self, **options)
        process = (options.get("context") or copy_context()).get(PROCESS)
        if process is not None:
            process.tasks.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        # Time does not pass by itself: who sleeps until a moment that rounds to now would never see it pass.
        return super().call_at(max(when, self.time() + 1e-6), callback, *args, context=context)

    def run_apart(self, delay: float, callback: Any, *arguments: Any) -> asyncio.TimerHandle:
        """Call something later that is of no process, as what is on a network or at a server is not."""
        return self.call_later(delay, callback, *arguments, context=NOWHERE)
