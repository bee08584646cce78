"""The wake-ups of a shard's worker: by its wake-up stream, or by this process itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiodigest.worker.availability import BACKOFF


class WakeUps:
    """Waits for wake-ups. ``listen`` waits for an entry of the stream after a given one, and returns the last.

    Listening goes on from one ``wait`` to the next, until ``close``.
    """

    def __init__(self, listen: Callable[[str], Awaitable[str]]) -> None:
        self._listen = listen
        self._listening: asyncio.Task[str | None] | None = None
        self._failures = 0  # of listening, in a row
        self.woken = asyncio.Event()  # ends the wait, or the next one

    async def wait(self, seen: str, timeout: float) -> None:
        """Wait for an entry of the stream after ``seen``, or for ``woken``, for at most ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        woken = asyncio.create_task(self.woken.wait())
        try:
            while not woken.done() and (rest := deadline - loop.time()) > 0:
                if self._listening is None or self._listening.done():
                    self._listening = asyncio.create_task(self._next(seen))
                await asyncio.wait([woken, self._listening], timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                # What began to listen before the claim may hear of an entry that the claim has seen.
                if self._listening.done() and self._listening.result() != seen:
                    break
        finally:
            woken.cancel()

    async def _next(self, seen: str) -> str | None:
        try:
            last = await self._listen(seen)
        except Exception:
            # The next claim finds out what is wrong; should it succeed all the same, this is no busy loop.
            self._failures += 1
            if self._failures > 1:
                await asyncio.sleep(BACKOFF(self._failures))
            return None
        self._failures = 0
        return last

    async def close(self) -> None:
        """Stop listening: the connection may be dead, and never tell."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
            self._listening = None
