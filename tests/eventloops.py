"""The event loop of a test of channels: its clock may be set forward, and it lets no error go by."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest


class Clock:
    """The event loop's clock, which a test may set forward: nothing waits for it, and no machine is too slow for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._time, self.ahead = loop.time, 0.0

    def time(self) -> float:
        return self._time() + self.ahead


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    loop = asyncio.get_running_loop()
    clock = Clock(loop)
    monkeypatch.setattr(loop, "time", clock.time)
    return clock


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    """Let no error go by that nobody looked at, and no connection stay open."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    yield
    gc.collect(1)
    assert not unseen, unseen
