"""A producer: adds records until it is told to end, and writes down what it was told of each."""

from __future__ import annotations

import asyncio
import signal
import time
from itertools import groupby
from random import Random
from typing import Literal

from aiodigest import BackendUnavailable, DigestEngine, Entry, PartialAdd
from chaos.board import STORED, Board
from chaos.journal import Journal
from chaos.process import SPAN, TIMELINES, Role, engine, run, shard_of

Told = Literal["stored", "no", "unknown"]

HOT_SHARE = 0.15  # of the records go to one timeline
MOST_HELD = 20_000  # in all timelines; a store that is down takes nothing anyway
# records of an add_many, adds at once, seconds between
PACE = {"main": (200, 20, 0.1), "embedded": (10, 3, 0.1), "cluster": (100, 10, 0.1)}


class Producer:
    def __init__(self, role: Role, journal: Journal) -> None:
        self._store = role.store
        self._incarnation = role.incarnation
        self._board: Board = role.board()
        self._journal = journal
        self._engine: DigestEngine = engine(role.store, role.url)
        self._random = Random(role.incarnation)
        self._next = role.incarnation * SPAN
        self._stop = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        self._journal.write("ready")
        batch, singles, pause = PACE[self._store]
        async with self._engine, asyncio.TaskGroup() as group:
            group.create_task(self._keep_on(batch, pause, many=True))
            group.create_task(self._keep_on(singles, pause, many=False))

    async def _keep_on(self, size: int, pause: float, many: bool) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * pause)
            if self._board.held < MOST_HELD:
                entries = self._entries(size)
                began = time.monotonic()
                told = await (self._add_many(entries) if many else self._add_each(entries))
                self._note(entries, told, time.monotonic() - began)

    def _entries(self, size: int) -> list[Entry]:
        first, self._next = self._next, self._next + size
        return [Entry(self._key(), number % SPAN, str(number)) for number in range(first, first + size)]

    def _key(self) -> str:
        return "hot" if self._random.random() < HOT_SHARE else f"timeline {self._random.randrange(TIMELINES)}"

    async def _add_many(self, entries: list[Entry]) -> list[Told]:
        try:
            await self._engine.add_many(entries)
        except PartialAdd as error:
            return [self._told(result) for result in error.results]
        return ["stored"] * len(entries)

    async def _add_each(self, entries: list[Entry]) -> list[Told]:
        """By as many tasks at once, as in a busy service."""
        adds = [self._engine.add(each.key, each.value, record_id=each.record_id) for each in entries]
        return [self._told(result) for result in await asyncio.gather(*adds, return_exceptions=True)]

    def _told(self, result: bool | BaseException) -> Told:
        if isinstance(result, bool):
            return "stored"
        if isinstance(result, BackendUnavailable):
            return result.stored
        self._journal.write("wrong", f"an add raised {result!r}")
        return "unknown"

    def _note(self, entries: list[Entry], told: list[Told], took: float) -> None:
        first = int(entries[0].record_id or 0)
        for what, run_of in groupby(range(len(told)), key=told.__getitem__):
            places = list(run_of)
            shards = sorted(
                {shard for place in places if (shard := shard_of(self._store, entries[place].key)) is not None}
            )
            self._journal.write(what, first + places[0], first + places[-1], round(took, 3), shards)
        self._board.count(self._incarnation, STORED, told.count("stored"))


def main() -> None:
    role = Role.given()
    journal = role.journal()

    async def produce() -> None:
        await Producer(role, journal).run()

    run(produce(), journal)


if __name__ == "__main__":
    main()
