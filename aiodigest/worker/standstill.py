"""Notices when the event loop has stood still, so that leases may have ended, and says whose callback was running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from aiodigest.logs import logger_of

logger = logger_of(__name__)

TICKS = 5  # in the time from which on it counts


class Standstill:
    """Notices that the loop has stood still for longer than ``most`` seconds; ``count`` tells how often it has.

    Callbacks that begin and end are heard of. Of the longest silence, the callback is to blame that began it by being
    entered, or else the one that ended it by ending. A callback that blocks between two of its waits does neither: it
    is one of those under way.
    """

    def __init__(self, most: float) -> None:
        self.count = 0
        self._most = most
        self._clock: Callable[[], float] = time.monotonic  # as the loops of asyncio have it
        self._under_way: dict[object, str] = {}  # keys of the timelines whose callbacks were entered
        self._seen = self._at = 0.0  # when it was looked at, and when anything was heard
        self._name: str | None = None  # of the timeline whose callback was entered then
        self._worst: tuple[float, str | None] = 0.0, None  # the longest silence since the last look, and whose it was

    @contextmanager
    def watching(self) -> Generator[None]:
        """Look at the time again and again."""
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self._seen = self._at = loop.time()

        def tick() -> None:
            nonlocal timer
            self.look()
            timer = loop.call_later(self._most / TICKS, tick)

        timer = loop.call_later(self._most / TICKS, tick)
        try:
            yield
        finally:
            timer.cancel()

    def entered(self, call: object, key: str, now: float) -> None:
        """Know that the callback of a timeline is under way, until ``left``; ``call`` tells it from others."""
        self._hear(now)
        self._under_way[call] = self._name = key

    def left(self, call: object, now: float) -> None:
        """Note that a callback has ended."""
        self._hear(now, self._under_way.pop(call))

    def _hear(self, now: float, ended: str | None = None) -> None:
        if now - self._at > self._worst[0]:
            self._worst = now - self._at, self._name or ended
        self._at, self._name = now, None

    def look(self) -> None:
        """Look at the time, and say so if the loop has stood still since it was looked at last."""
        self._hear(self._clock())
        stood, (_, culprit) = self._at - self._seen, self._worst
        if stood > self._most:
            self.count += 1
            self._say(stood, culprit)
        self._seen, self._worst = self._at, (0.0, None)

    def _say(self, stood: float, culprit: str | None) -> None:
        others = [*self._under_way.values()]
        if culprit is None and len(others) == 1:
            [culprit] = others
        facts: dict[str, object] = {"seconds": round(stood, 3)}
        if culprit is not None:
            line, who = "the callback of %r was running", [culprit]
            facts["timeline"] = culprit
        elif others:
            line, who = f"one of {len(others)} callbacks was running, such as that of %r", others[:1]
        else:
            line, who = "no callback was running; the process may have been stopped", []
        line = f"the event loop stood still for %.1f s, and leases may have ended: {line}"
        logger.warning(line, stood, *who, extra=facts)
