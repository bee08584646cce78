"""The event loop of what runs for long: uvloop's where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
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
