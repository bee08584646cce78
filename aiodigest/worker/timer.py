"""One timer for many deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

GRAIN = 0.01  # seconds: anything due this soon is due now, so that thousands are handled together


class Timer:
    """Calls a function at the earliest of the times it was set to; then it is set to none.

    It keeps that time itself: the handle that uvloop returns for a time very near, or past, has no ``when``.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._at = inf
        self._handle: asyncio.Handle | None = None

    def set(self, at: float) -> None:
        """Set it to a time of the event loop's clock, unless it is set to an earlier one."""
        if at < self._at:
            self.cancel()
            self._at, self._handle = at, asyncio.get_running_loop().call_at(at, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._at, self._handle = inf, None

    def _fire(self) -> None:
        self._at, self._handle = inf, None
        self._callback()
