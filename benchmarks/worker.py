"""A worker in a process of its own: ``python -m benchmarks.worker URL NAMESPACE COUNT CONCURRENCY FAILING LOOP``.

Delivers ``COUNT`` digests to a callback that does nothing, of which a share fails, and prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from aiodigest import JSON, BackoffMode, Digest, DigestEngine
from aiodigest.commands.loops import settle
from benchmarks.setting import play

EARLY = 10_000  # records after which the memory is looked at first
BEAT = 0.001  # seconds


@dataclass(frozen=True)
class Seen:
    """What a worker saw."""

    seconds: float  # from the first callback's start to the last one's
    digests: int  # delivered after the first
    records: int
    early_mb: float  # resident, after the first records
    peak_mb: float  # the most after that
    stall_ms: float  # the longest time that the event loop computed between two of its turns
    wall_ms: float  # the same on the wall clock, with what other processes took of the core


def resident() -> float:
    """The memory of this process, in MB."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Pulse:
    """Looks how long the event loop is kept from its turns."""

    def __init__(self) -> None:
        self.stall = self.wall = 0.0

    async def beat(self) -> None:
        computed, clock = time.thread_time(), time.perf_counter()
        while True:
            await asyncio.sleep(BEAT)
            computed, before = time.thread_time(), computed
            clock, earlier = time.perf_counter(), clock
            self.stall = max(self.stall, computed - before)
            self.wall = max(self.wall, clock - earlier - BEAT)


async def work(url: str, namespace: str, count: int, concurrency: int, failing: float) -> Seen:
    engine = DigestEngine[JSON](
        url, namespace=namespace, concurrency=concurrency, backoff_mode=BackoffMode(), timeout=60
    )
    done, pulse, dice = asyncio.Event(), Pulse(), random.Random(1)
    wanted = count - round(2 * count * failing)  # the retries of those that fail are not waited for
    digests = records = 0
    began = ended = early = peak = 0.0

    async def deliver(digest: Digest[JSON]) -> None:
        nonlocal digests, records, began, ended, early, peak
        if not began:
            began = time.perf_counter()
        fails = failing and dice.random() < failing
        digests += not fails
        records += len(digest.records)
        if not early and records >= EARLY:
            early = resident()
        elif digests % 1_000 == 0:
            peak = max(peak, resident())
        if digests == wanted:
            ended = ended or time.perf_counter()
            done.set()
        if fails:
            raise RuntimeError("this delivery was to fail")

    async with engine.delivering(deliver):
        settle()  # as `aiodigest run` does
        beating = asyncio.create_task(pulse.beat())
        async with asyncio.timeout(600 + count / 500):
            await done.wait()
        beating.cancel()
    early = early or resident()
    return Seen(
        ended - began, wanted - 1, records, early, max(peak, resident()), pulse.stall * 1000, pulse.wall * 1000
    )  # fmt: skip


async def deliver_apart(
    url: str, namespace: str, count: int, concurrency: int = 64, failing: float = 0.0, loop: str = "asyncio"
) -> Seen:
    """Have a process of its own deliver."""
    arguments = map(str, (url, namespace, count, concurrency, failing, loop))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.worker", *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the worker of {namespace} has failed")
    return Seen(**json.loads(out))


if __name__ == "__main__":
    logging.disable()  # what fails is to fail
    url, namespace, count, concurrency, failing, loop = sys.argv[1:]
    print(json.dumps(asdict(play(loop, work(url, namespace, int(count), int(concurrency), float(failing))))))
