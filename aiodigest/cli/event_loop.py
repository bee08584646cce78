"""The event loop of long-running commands, the signals that end their work, and their garbage."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Run a service until it ends, as ``asyncio.run`` does, on uvloop where that is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def freeze_garbage() -> None:
    """Exempt everything a service has loaded from garbage collection, which would stop its loop for 20 ms."""
    gc.collect()
    gc.freeze()


@contextmanager
def stopped_by(*signals: signal.Signals) -> Generator[asyncio.Event, None, None]:
    """Set an event of the running loop on these signals, for work that checks it and must not be cut in two.

    Once it is set, a second Ctrl-C ends the work wherever it is, as if this were not there.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        stop.set()
        restore()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        restore()


async def run_until(stop: asyncio.Event, work: Awaitable[T]) -> T | None:
    """Return the result of the work; None if it is cancelled, as it is when ``stop`` is set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.wait([working, stopping])
    return None if working.cancelled() else working.result()
