"""A producer: adds records until it is told to end, and writes down what it was told of each.

A record's value is the number by which the journals know it. What may have been stored is added again under its id with
another number, so that a request that comes late, and replaces what came after it, shows as a loss. But not before the
time of the first add is over: when a connection breaks earlier, its request may be on its way for as long.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Literal, cast

from aiodigest import BackendUnavailable, DigestEngine, Entry, PartialAdd
from chaos.board import STORED, Board
from chaos.journal import Journal
from chaos.plan import TIMEOUT
from chaos.process import SPAN, TIMELINES, Role, engine, run, shard_of
from chaos.rules import names

Told = Literal["stored", "no", "unknown"]

HOT_SHARE = 0.15  # of the records go to one timeline, a hot one
HOT_TURN = 40_000  # records that are stored in all, until another one is hot: so none can ever be full
MOST_HELD = 20_000  # in all timelines; a store that is down takes nothing anyway
# records of an add_many, adds at once, seconds between
AFTER_DELETE, PAUSE = 12, 0.05  # records, and seconds between two: some cool-downs
RULED_PAUSE = 0.05  # seconds between two adds
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
            group.create_task(self._keep_deleting())
            group.create_task(self._keep_ruling())

    async def _keep_on(self, size: int, pause: float, many: bool) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * pause)
            if self._board.held < MOST_HELD:
                await self._add(self._entries(size), many)

    async def _add(self, entries: list[Entry], many: bool = False) -> None:
        """Add records, and again those that may be stored, until all are known to be or not."""
        while entries:
            began = time.monotonic()
            told = await (self._add_many(entries) if many else self._add_each(entries))
            self._note(entries, told, time.monotonic() - began)
            entries = [] if self._stop.is_set() else self._again(entries, told)
            if entries:
                await asyncio.sleep(began + TIMEOUT - time.monotonic())

    async def _keep_deleting(self) -> None:
        """Delete a timeline that nobody else uses, before anything is in it: what comes after that must stay.

        A delete that comes late meets some of it as long as that waits for the end of a cool-down.
        """
        while not self._stop.is_set():
            key = f"deleted {self._next}"
            began, is_unknown = time.monotonic(), False
            try:
                await self._engine.delete(key)
            except BackendUnavailable:
                is_unknown = True
                await asyncio.sleep(began + TIMEOUT - time.monotonic())
            for _ in range(AFTER_DELETE):
                [entry] = self._entries(1, key)
                if is_unknown:
                    self._journal.write("after delete", round(began * 1e9), number_of(entry))
                await self._add([entry])
                await asyncio.sleep(PAUSE)

    async def _keep_ruling(self) -> None:
        """Add to timelines with rules of their own, now and then the same id as before, with another number."""
        before: dict[str, Entry] = {}
        while not self._stop.is_set():
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * RULED_PAUSE)
            key = self._random.choice(names())
            [entry] = self._entries(1, key)
            if key in before and self._random.random() < 0.3:
                entry = replace(entry, record_id=before[key].record_id)
                self._journal.write("twice", number_of(entry), [number_of(before[key])])
            before[key] = entry
            await self._add([entry])

    def _numbers(self, size: int) -> range:
        first, self._next = self._next, self._next + size
        return range(first, first + size)

    def _entries(self, size: int, key: str = "") -> list[Entry]:
        stored = self._board.total(STORED)
        return [Entry(key or key_of(self._random, stored), number, str(number)) for number in self._numbers(size)]

    def _again(self, entries: list[Entry], told: list[Told]) -> list[Entry]:
        """The records that may be stored, with other numbers."""
        before = [entry for entry, answer in zip(entries, told, strict=True) if answer == "unknown"]
        after = [replace(entry, value=number) for entry, number in zip(before, self._numbers(len(before)), strict=True)]
        if after:
            self._journal.write("again", number_of(after[0]), [number_of(entry) for entry in before])
        return after

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
        first = number_of(entries[0])
        for what, run_of in groupby(range(len(told)), key=told.__getitem__):
            places = list(run_of)
            shards = sorted(
                {shard for place in places if (shard := shard_of(self._store, entries[place].key)) is not None}
            )
            self._journal.write(what, first + places[0], first + places[-1], round(took, 3), shards)
        self._board.count(self._incarnation, STORED, told.count("stored"))


def key_of(random: Random, stored: int) -> str:
    """Draw the timeline of a record, when so many have been stored in all."""
    return f"hot {stored // HOT_TURN}" if random.random() < HOT_SHARE else f"timeline {random.randrange(TIMELINES)}"


def number_of(entry: Entry) -> int:
    return cast("int", entry.value)


def main() -> None:
    role = Role.given()
    journal = role.journal()

    async def produce() -> None:
        await Producer(role, journal).run()

    run(produce(), journal)


if __name__ == "__main__":
    main()
