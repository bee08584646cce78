"""What the programs of all peers share: what they are asked, and how they measure it. The standard library alone."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

CONCURRENCY = 64  # as our engine has by default, and the fastest of 16, 64 and 200 for most
MORE = 200  # for those that it makes faster
CONNECTIONS = 50  # of those who enqueue, where a pool can have callers wait for one
FILLERS = 50  # tasks that enqueue the jobs of a worker, which is not timed
TASKS = 200  # whose enqueues are timed
BATCH = 1_000  # jobs of one call, of those that have such a call
VALUE = "x" * 200  # a job's only argument


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["versions", "enqueue", "batches", "jobs"])
    parser.add_argument("url", nargs="?", default="")
    parser.add_argument("--count", type=int, default=1_000)
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
    await share(enqueue, 1_000, TASKS)  # connections are made, scripts are loaded
    tell(asked.count, await share(enqueue, asked.count, TASKS))


async def measure_batches(enqueue_many: Callable[[int], Awaitable[object]], asked: argparse.Namespace) -> None:
    await enqueue_many(BATCH)
    began = time.perf_counter()
    for start in range(0, asked.count, BATCH):
        await enqueue_many(min(BATCH, asked.count - start))
    tell(asked.count, time.perf_counter() - began)


def tell(count: int, seconds: float) -> None:
    print(json.dumps({"count": count, "seconds": seconds}), flush=True)


class Jobs:
    """Counts the jobs that are done, and the time from the first one's start to the last one's."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = asyncio.Event()
        self._begun = 0
        self._began = self._ended = 0.0

    def one(self) -> None:
        """All that a job does."""
        self._ended = time.perf_counter()
        self._began = self._began or self._ended
        self._begun += 1
        if self._begun == self._count:
            self._done.set()

    async def measure(self, worker: asyncio.Task[Any]) -> None:
        """Wait for a worker, which has only just been made, to do them all."""
        gc.collect()
        gc.freeze()  # as our worker does
        done = asyncio.create_task(self._done.wait())
        await asyncio.wait([done, worker], return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
            await worker  # raises what it has failed with
            raise RuntimeError(f"the worker has ended when {self._begun} of {self._count} jobs were done")
        tell(self._count - 1, self._ended - self._began)
        await asyncio.sleep(0.5)  # the worker's own work on the last jobs: stopped in it, some wait for ever
