"""Helpers for tasks, events and timers of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from math import inf
from typing import Any

GRAIN = 0.01  # seconds: anything due this soon is due now, so that thousands are handled together


def retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's outcome, although everybody who waited for it may have given up."""
    if not task.cancelled():
        task.exception()


async def elapse(event: asyncio.Event, timeout: float | None) -> bool:
    """Wait for an event for at most ``timeout`` seconds; True if it came."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


class Timer:
    """Calls a function at the earliest of the times it was set to; then it is set to none.

    It calls it in ``context``, not in that of who sets it, which it would keep. It keeps its time itself: the handle
    that uvloop returns for a time very near, or past, has no ``when``.
    """

    def __init__(self, callback: Callable[[], None], context: Context) -> None:
        self._callback = callback
        self._context = context
        self.at = inf  # the time that it is set to
        self._handle: asyncio.Handle | None = None

    def set(self, at: float) -> None:
        """Set it to a time of the event loop's clock, unless it is set to an earlier one."""
        if at < self.at:
            self.cancel()
            self.at, self._handle = at, asyncio.get_running_loop().call_at(at, self._fire, context=self._context)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self.at, self._handle = inf, None

    def _fire(self) -> None:
        self.at, self._handle = inf, None
        self._callback()
