"""Real processes for tests: started, read by line, and gone at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from replicas import until

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 60.0  # seconds; far more than anything here takes


class Program:
    """A running program of ``tests/programs``; every wait has a deadline."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> str:
        """Its next line, '' at its end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            return (await self.process.stdout.readline()).decode().rstrip("\n")


P = TypeVar("P", bound=Program)


@asynccontextmanager
async def running(name: str, *arguments: object, kind: type[P] = Program, **options: Any) -> AsyncGenerator[P, None]:
    """A program of ``tests/programs``, gone at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAMS / name, *map(str, arguments), stdout=asyncio.subprocess.PIPE, **options
    )
    try:
        yield kind(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Tally:
    """What processes have added, and what others have delivered."""

    def __init__(self) -> None:
        self.added: list[list[str]] = [[], []]
        self.delivered: list[list[str]] = [[], []]
        self.workers: list[Program] = []
        self.producers: list[Program] = []

    async def collect(self, program: Program, ids: list[str]) -> None:
        while line := await program.line():
            ids.extend(line.split())

    async def goes_on(self, number: int = 50) -> None:
        """Wait until so many more records are added, and so many delivered."""
        goals = [(lists, sum(map(len, lists)) + number) for lists in (self.added, self.delivered)]
        await until(lambda: all(sum(map(len, lists)) >= goal for lists, goal in goals))

    async def end(self, *by_hand: str) -> int:
        """End all, and see that each record was delivered once; the number of them."""
        for producer in self.producers:
            producer.process.send_signal(signal.SIGTERM)
        assert {await producer.process.wait() for producer in self.producers} == {0}
        added = Counter([*by_hand, *chain(*self.added)])
        await until(lambda: sum(map(len, self.delivered)) >= added.total())
        for worker in self.workers:
            worker.process.send_signal(signal.SIGTERM)
        assert {await worker.process.wait() for worker in self.workers} == {0}
        assert Counter(chain(*self.delivered)) == added
        return added.total()


@asynccontextmanager
async def at_work(url: str, namespace: str, timelines: int) -> AsyncGenerator[Tally]:
    """Two workers and two producers, each a process, until they are ended."""
    tally = Tally()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for ids in tally.delivered:
            worker = await stack.enter_async_context(running("worker.py", url, namespace, 60))
            assert await worker.line() == "ready"
            tally.workers.append(worker)
            group.create_task(tally.collect(worker, ids))
        for name, ids in enumerate(tally.added):
            producer = await stack.enter_async_context(running("producer.py", url, namespace, name, timelines))
            tally.producers.append(producer)
            group.create_task(tally.collect(producer, ids))
        yield tally
