"""One timer for many deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

GRAIN = 0.01  # seconds: anything due this soon is due now, so that thousands are handled together


class Alarm:
    """A timer for the earliest of the times it was set to; once it goes off, it is set to none.

    It keeps that time itself: the handle that uvloop returns for a time very near, or past, has no ``when``.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at = inf
        self._handle: asyncio.Handle | None = None

    def set(self, at: float) -> None:
        """Go off at a time of the event loop's clock, unless a sooner one is set."""
        if at < self._at:
            self.cancel()
            self._at, self._handle = at, asyncio.get_running_loop().call_at(at, self._go_off)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._at, self._handle = inf, None

    def _go_off(self) -> None:
        self._at, self._handle = inf, None
        self._ring()
