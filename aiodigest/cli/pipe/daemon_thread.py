"""Blocking calls (a read, a write) that an event loop awaits, and that a process need not wait for to exit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread:
    """A thread that runs calls, one at a time.

    Unlike an executor's threads it never keeps the process alive: nobody can end a read of a silent terminal, or a
    write to a reader that is asleep.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise as ``function`` does. A cancelled call that has begun goes on, and its result is lost."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)
