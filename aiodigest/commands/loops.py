"""What runs for long: its event loop, which is uvloop's where it is installed, and its garbage."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def play(work: Coroutine[Any, Any, T]) -> T:
    """Run a service until it ends, as ``asyncio.run`` does."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """What makes the event loop; None: asyncio does."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextmanager
def stopped_by(*signals: signal.Signals) -> Generator[asyncio.Event, None, None]:
    """An event of the running loop that these signals set: work that must not be cut in two looks at it.

    Once set, a second Ctrl-C ends the work wherever it is, as if this were not there.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def end() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def hear() -> None:
        stop.set()
        end()

    for number in signals:
        loop.add_signal_handler(number, hear)
    try:
        yield stop
    finally:
        end()


async def until(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """What the work comes to; None if it is cancelled, as it is when ``stop`` is set before."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait([working, stopping])
    return None if working.cancelled() else working.result()


def settle() -> None:
    """Have no collection of garbage look again at what a service has loaded, which would stop its loop for 20 ms."""
    gc.collect()
    gc.freeze()
