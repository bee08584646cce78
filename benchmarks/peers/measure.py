"""What the programs of all peers share: what they are asked, and how they measure it. The standard library alone."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

CONCURRENCY = 64  # as our engine has by default


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["versions", "enqueue", "jobs"])
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=200)
    return parser.parse_args()


def tell_versions(*packages: str) -> None:
    print(json.dumps({**{package: version(package) for package in packages}, "Python": platform.python_version()}))


async def share(enqueue: Callable[[], Awaitable[object]], count: int, tasks: int) -> float:
    """Have tasks share a number of calls; seconds."""
    numbers = iter(range(count))

    async def some() -> None:
        for _ in numbers:
            await enqueue()

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(tasks)))
    return time.perf_counter() - began


async def measure_enqueue(enqueue: Callable[[], Awaitable[object]], asked: argparse.Namespace) -> None:
    await share(enqueue, asked.tasks * 2, asked.tasks)  # connections are made, scripts are loaded
    tell(asked.count, await share(enqueue, asked.count, asked.tasks))


def tell(count: int, seconds: float) -> None:
    print(json.dumps({"count": count, "seconds": seconds}), flush=True)


class Jobs:
    """Counts the jobs that were done, and the time from the first one's start to the last one's."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.done = asyncio.Event()
        self._done = 0
        self._began = self._ended = 0.0

    def one(self) -> None:
        self._ended = time.perf_counter()
        self._began = self._began or self._ended
        self._done += 1
        if self._done == self.count:
            self.done.set()

    async def wait(self, worker: asyncio.Task[object]) -> None:
        """Wait until all are done, or the worker has ended, which it should not."""
        done = asyncio.create_task(self.done.wait())
        await asyncio.wait([done, worker], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            worker.result()
            raise SystemExit("the worker has ended")

    def tell(self) -> None:
        tell(self.count - 1, self._ended - self._began)
