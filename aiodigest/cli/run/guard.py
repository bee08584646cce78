"""The bound on connections to ``aiodigest run --http``: whoever opens many must not take the files of deliveries."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

CONNECTIONS = 64  # at once, of the 256 files or more that a process may have open
BACKLOG = 32  # more, accepted at once before any is refused
TIMEOUT = 10.0  # seconds from one look to the next: a connection that is idle at both is closed


class GuardedProtocol(H11Protocol):
    """A connection that is closed if no request comes whole, or no answer is read; or for a new one if there are many.

    So a probe is answered whatever else is half sent.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.began = self.loop.time()
        self._timer = self.loop.call_later(TIMEOUT, self._look, None)
        held = cast("set[GuardedProtocol]", self.connections)
        others = [one for one in held if one is not self and not one.transport.is_closing()]
        if len(others) >= CONNECTIONS:
            idle = [one for one in others if one.is_idle]
            min(idle, key=lambda one: one.began, default=self).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        """True while it waits for its client."""
        return not self.cycle or self.cycle.response_complete or self.flow.write_paused

    def _look(self, seen: RequestResponseCycle | None) -> None:
        if self.is_idle and self.cycle is seen:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(TIMEOUT, self._look, self.cycle)
