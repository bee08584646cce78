"""Blocking calls (a read, a write) that an event loop awaits, and that a process need not wait for to exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread:
    """A thread that runs calls, one at a time.

    Unlike an executor's threads it never keeps the process alive: nobody can end a read of a silent terminal, or a
    write to a reader that is asleep.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise as ``function`` does. A cancelled call goes on in the thread, and its result is lost."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # pyright: ignore[reportArgumentType]  (None only if T has it)

        def work() -> None:
            result, failure = None, None
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                failure = error
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(settle, result, failure)

        self._calls.put(work)
        return await answer

    def _work(self) -> None:
        while True:
            self._calls.get()()
