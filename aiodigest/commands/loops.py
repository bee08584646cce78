"""What runs for long: its event loop, which is uvloop's where it is installed, and its garbage."""

from __future__ import annotations

import asyncio
import gc
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


def settle() -> None:
    """Have no collection of garbage look again at what a service has loaded, which would stop its loop for 20 ms."""
    gc.collect()
    gc.freeze()
