"""Helpers for tasks, events and timers of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
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


@dataclass(slots=True, eq=False, repr=False)
class Limited:
    """A call whose time is limited."""

    task: asyncio.Task[Any] | None
    cancelling: int  # how many requests to cancel the task there were when it began
    ends: float
    loop: asyncio.AbstractEventLoop
    expired: bool = False
    is_due_to_it: bool = False  # the only cancellation that is left is that for its time

    def explained(self, error: BaseException) -> BaseException:
        """Return what the call ended with: the TimeoutError that a cancellation stands for, if its time was over."""
        if not (self.is_due_to_it and isinstance(error, asyncio.CancelledError)):
            return error
        timeout = TimeoutError()
        timeout.__cause__ = error
        return timeout


class TimeLimit:
    """Limits the time of calls as ``asyncio.timeout`` does, with one timer for all that are under way in an event loop.

    The first to begin must be the first whose time is over. The timer is set by the first call that begins in a turn of
    the loop, and cancelled in the next turn if all have ended: calls that do not wait need no timer of their own.
    """

    def __init__(self) -> None:
        self._under_way: dict[Limited, None] = {}  # in the order in which they began
        self._timer = Timer(self._expire, Context())
        self._looks = False  # whether any is under way, in the next turn

    def begin(self, task: asyncio.Task[Any] | None, ends: float) -> Limited:
        """Limit a call of this task, until its ``end``."""
        loop = asyncio.get_running_loop()
        limited = Limited(task, 0 if task is None else task.cancelling(), ends, loop)
        self._under_way[limited] = None
        if ends < self._timer.at:
            self._timer.set(ends)
        return limited

    def end(self, limited: Limited) -> None:
        """Note that a call has ended, however it did, and take back its own cancellation."""
        self._under_way.pop(limited, None)
        if not (self._under_way or self._looks or limited.loop.is_closed()):
            self._looks = True
            limited.loop.call_soon(self._look, context=Context())
        if limited.expired and limited.task is not None:
            limited.is_due_to_it = limited.task.uncancel() <= limited.cancelling

    def _look(self) -> None:
        self._looks = False
        if not self._under_way:
            self._timer.cancel()  # else it would keep this, and those that ever were

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._under_way:
            first = next(iter(self._under_way))
            if first.ends > now:
                self._timer.set(first.ends)
                return
            del self._under_way[first]
            first.expired = True
            if first.task is not None:
                first.task.cancel()
