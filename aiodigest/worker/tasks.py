"""Helpers for tasks and events of asyncio."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any


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
