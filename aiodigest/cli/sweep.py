"""A sweep of a namespace's dead letters, one after the other: an operator's work after an incident."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from aiodigest import DigestEngine, InvalidState, LimitExceeded
from aiodigest.cli.loops import stopped_by
from aiodigest.cli.progress import progress_bar
from aiodigest.cli.words import as_json, is_terminal

PATIENCE = 5.0  # seconds in which nothing has changed
LOOK_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter without its records, which may be many."""

    id: str
    key: str
    buried_at: datetime
    size: int


Act: TypeAlias = Callable[[DigestEngine, Buried], Awaitable[dict[str, Any] | None]]


async def all_buried(engine: DigestEngine) -> list[Buried]:
    """Return the current dead letters, the newest first."""
    found = [Buried(one.id, one.key, one.buried_at, len(one.records)) async for one in engine.dead_letters()]
    return sorted(found, key=lambda letter: letter.buried_at, reverse=True)


class Sweep:
    """Does something with each of these dead letters, in order; Ctrl-C comes between two of them.

    ``act`` returns the letter's facts for JSON, or None if somebody else has removed the letter. While it raises
    InvalidState or LimitExceeded, the timeline cannot take its letter: the timeline's other letters wait too, since
    their order matters. Letters that then wait in vain for five seconds stay.
    """

    def __init__(self, letters: Sequence[Buried], act: Act, in_json: bool) -> None:
        self._all = len(letters)
        self._act = act
        self._in_json = in_json
        self.left = list(letters)
        self.done = 0
        self.records = 0  # of what is done
        self.reason: Exception | None = None  # why one of those that are left could not be done
        self.is_interrupted = False

    async def run(self, engine: DigestEngine, work: str) -> None:
        """Work until nothing more can be done. Raises BackendUnavailable."""
        loop = asyncio.get_running_loop()
        with stopped_by(signal.SIGINT) as stop, self._bar(work) as show:
            last = loop.time() + PATIENCE
            while self.left:
                before = len(self.left)
                self.left = await self._round(engine, stop, show)
                if len(self.left) < before:
                    last = loop.time() + PATIENCE
                if stop.is_set() or loop.time() > last:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN if self.left else 0):
                        await stop.wait()
            self.is_interrupted = stop.is_set()

    async def _round(self, engine: DigestEngine, stop: asyncio.Event, show: Callable[[int], None]) -> list[Buried]:
        """Try each letter once; return those that are left."""
        left: list[Buried] = []
        blocked: set[str] = set()
        for letter in self.left:
            if stop.is_set() or letter.key in blocked:
                left.append(letter)
                continue
            try:
                facts = await self._act(engine, letter)
            except (InvalidState, LimitExceeded) as error:
                self.reason = error
                blocked.add(letter.key)
                left.append(letter)
                continue
            if facts is not None:
                self.done += 1
                self.records += letter.size
                if self._in_json:
                    print(as_json(facts), flush=True)  # it is read while the command runs
            show(self.done)
        return left

    def _bar(self, work: str) -> AbstractContextManager[Callable[[int], None]]:
        if self._in_json and is_terminal(sys.stdout):
            return nullcontext(lambda done: None)  # the lines show it
        return progress_bar(work, self._all)
