"""Calls that are repeated while the server is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiodigest import BackendUnavailable

T = TypeVar("T")

GIVE_UP = 60.0  # seconds without a server
INTERVAL = 0.5


async def retry(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of ``call``; call again while the server is away, for up to a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GIVE_UP
    while True:
        try:
            return await call()
        except BackendUnavailable:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(INTERVAL)
