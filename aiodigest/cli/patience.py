"""Calls to a server that may be away for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiodigest import BackendUnavailable

T = TypeVar("T")

PATIENCE = 60.0  # seconds without a server before a pipe that runs gives up


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of ``call``; call again while the server is away, for up to a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while True:
        try:
            return await call()
        except BackendUnavailable:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.5)
