"""Cancels a coroutine at each of its awaits, or at each turn of its event loop, and sees how it ends."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
Scene: TypeAlias = Callable[[], AbstractAsyncContextManager[Call]]

PATIENCE = 60.0  # seconds (of the loop's clock) for one attempt, which hangs after that
AGAIN = 3  # how often one attempt is cancelled at the most


@dataclass(frozen=True)
class Attempt:
    """How an attempt went: whether it was cancelled at all, and whether there was another await after the last time."""

    was_cancelled: bool
    went_on: bool


Way: TypeAlias = Callable[[Coroutine[Any, Any, object], int, int], Awaitable[Attempt]]


class Driven(ABC):
    """Drives a coroutine, and does something just before each of its suspensions is waited for."""

    def __init__(self, coroutine: Coroutine[Any, Any, object]) -> None:
        self._coroutine = coroutine
        self.count = 0

    @abstractmethod
    def suspended(self) -> Generator[Any, Any, object]:
        """What is done at the ``count``-th."""

    def __await__(self) -> Generator[Any, Any, object]:
        thrown: BaseException | None = None
        while True:
            try:
                waited = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value
            self.count += 1
            yield from self.suspended()
            try:
                yield waited
            except BaseException as error:
                thrown = error
            else:
                thrown = None


class Steps(Driven):
    """Drives a coroutine, and cancels its task at the suspensions ``first`` to ``last``, counted from 1.

    It does so just before the task waits: what it waits for is then cancelled as by any other task.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, object], first: int, last: int) -> None:
        super().__init__(coroutine)
        self._first, self._last = first, last

    def suspended(self) -> Generator[Any, Any, object]:
        task = asyncio.current_task()
        assert task is not None
        if self._first <= self.count <= self._last:
            task.cancel()
        yield from ()


async def at_awaits(coroutine: Coroutine[Any, Any, object], first: int, times: int) -> Attempt:
    """Cancel it at its ``first`` await, and ``times`` - 1 more times at those that follow."""
    steps = Steps(coroutine, first, first + times - 1)

    async def drive() -> object:
        return await steps

    task = asyncio.create_task(drive())
    return await _ended(task, lambda: steps.count >= first, lambda: steps.count >= first + times)


async def at_turns(coroutine: Coroutine[Any, Any, object], first: int, times: int) -> Attempt:
    """Cancel it after ``first`` - 1 turns of the event loop, and again in the turns that follow."""
    task = asyncio.create_task(coroutine)
    for _ in range(first):  # it begins in the first
        await asyncio.sleep(0)
    cancelled = task.cancel()
    for _ in range(times - 1):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    went_on = not task.done()
    return await _ended(task, lambda: cancelled, lambda: went_on)


async def _ended(task: asyncio.Task[object], was_cancelled: Callable[[], bool], went_on: Callable[[], bool]) -> Attempt:
    async with asyncio.timeout(PATIENCE):
        await asyncio.wait([task])
    if was_cancelled():
        assert task.cancelled(), f"it was cancelled, and ended with {task}"
    else:
        task.result()
    return Attempt(was_cancelled(), went_on())


async def cancel_everywhere(scene: Scene, way: Way = at_awaits) -> int:
    """Play a scene once for each moment at which its call can be cancelled, and a last time without; how many.

    A call that goes on after it was cancelled is also cancelled again, up to ``AGAIN`` times in a row. The scene makes
    everything ready, yields the call, and then checks what came of it.
    """
    moment = 0
    while True:
        moment += 1
        for times in range(1, AGAIN + 1):
            async with scene() as call:
                attempt = await way(call(), moment, times)
            if not attempt.was_cancelled:
                return moment - 1
            if not attempt.went_on:
                break
