"""A worker in a process of its own: ``python -m benchmarks.worker URL NAMESPACE COUNT FAILING LOOP IDLE LASTS VALUES``.

Begins ``COUNT`` deliveries to a callback that does nothing for ``LASTS`` seconds, of which a share fails, and prints
what it saw as JSON. ``VALUES`` are any JSON ("json"), or those of a pydantic model ("model"). If ``IDLE``, it sees how
long its event loop is kept from its turns, and for so many seconds after that how long a millisecond of computing takes
at the most; else nothing but the worker runs in the process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from aiodigest import JSON, Digest, DigestEngine
from aiodigest.cli.event_loop import freeze_garbage
from benchmarks.memory import peak as most_ever
from benchmarks.memory import resident
from benchmarks.programs import output, part
from benchmarks.setting import play

EARLY = 10_000  # records after which the memory is looked at, and after as many again
BEAT = 0.001  # seconds


@dataclass(frozen=True)
class Seen:
    """What a worker saw."""

    seconds: float  # from the first callback's start to the last one's
    computed: float  # seconds of CPU that this process took meanwhile, all its threads together
    digests: int  # delivered: those of these deliveries that did not fail
    records: int
    early_mb: float  # resident, after the first records; 0 where the system does not tell
    peak_mb: float  # the most after that
    grown_mb: float  # the most that it ever was above what it was before the first delivery
    room_mb: float  # the most that the digests under delivery decoded to at once, those that are small apart
    busy: int  # the most of them that were under delivery or waited for it
    stall_ms: float  # the longest time that the event loop computed between two of its turns; 0 if not looked at
    wall_ms: float  # the same on the wall clock, with what other processes took of the core
    bare_ms: float  # the longest that a millisecond of computing took, on the clock of ``stall_ms``

    @property
    def rate(self) -> float:
        """Digests a second, without the one whose start begins the time."""
        return (self.digests - 1) / self.seconds

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU a digest, without the one whose start begins the time."""
        return self.computed / (self.digests - 1) * 1e6


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


def spin(turns: int) -> float:
    """Compute, and nothing else; seconds on the thread's clock."""
    began = time.thread_time()
    for _ in range(turns):
        pass
    return time.thread_time() - began


def longest_of_nothing(seconds: float) -> float:
    """How long a millisecond of computing took at the most, in milliseconds: a virtual core stands still at times."""
    turns, longest, ends = 1_000, 0.0, time.perf_counter() + seconds
    while spin(turns) < 0.001:
        turns *= 2
    turns = max(1, round(turns * 0.001 / min(spin(turns) for _ in range(5))))
    while time.perf_counter() < ends:
        longest = max(longest, spin(turns))
    return longest * 1000


def type_of(values: str) -> Any:
    if values == "json":
        return JSON
    from benchmarks.event import Event  # a process that does without would have pydantic's memory too

    return Event


async def work(url: str, namespace: str, count: int, failing: float, idle: float, lasts: float, values: str) -> Seen:
    engine: DigestEngine[Any] = DigestEngine(url, namespace=namespace, timeout=60, value_type=type_of(values))
    done, pulse, dice = asyncio.Event(), Pulse(), random.Random(1)
    begun = digests = records = room = busy = 0
    began = ended = early = peak = computed = computed_before = 0.0

    async def deliver(digest: Digest[Any]) -> None:
        nonlocal begun, digests, records, began, ended, early, peak, room, busy, computed, computed_before
        if begun == count:
            return  # what comes while the worker ends is not counted
        ended = time.perf_counter()
        began = began or ended
        computed_before = computed_before or time.process_time()
        begun += 1
        if begun == count:
            computed = time.process_time() - computed_before
            done.set()
        if failing and dice.random() < failing:
            raise RuntimeError("this delivery was to fail")
        digests += 1
        records += len(digest.records)
        if records // EARLY > (records - len(digest.records)) // EARLY:
            peak = max(peak, resident())
            early = early or peak
        if lasts:
            await asyncio.sleep(lasts)
            now = engine.activity
            room, busy = max(room, now.room_taken), max(busy, now.delivering)

    before = resident()
    async with engine.delivering(deliver):
        freeze_garbage()  # as `aiodigest run` does
        beating = asyncio.create_task(pulse.beat()) if idle else None
        async with asyncio.timeout(max(600, count / 1_000)):
            await done.wait()
        if beating:
            beating.cancel()
    early = early or resident()
    return Seen(
        ended - began, computed, digests, records, early, max(peak, resident()), most_ever() - before, room / 1e6, busy,
        pulse.stall * 1000, pulse.wall * 1000, longest_of_nothing(idle),
    )  # fmt: skip


async def deliver_apart(
    url: str, namespace: str, count: int, failing: float = 0.0, loop: str = "asyncio", idle: float = 0.0,
    lasts: float = 0.0, values: str = "json",
) -> Seen:  # fmt: skip
    """Have a process of its own deliver."""
    command = part("worker", url, namespace, count, failing, loop, idle, lasts, values)
    return Seen(**json.loads(await output(f"the worker of {namespace}", *command)))


if __name__ == "__main__":
    logging.disable()  # what fails is to fail
    url, namespace, count, failing, loop, idle, lasts, values = sys.argv[1:]
    working = work(url, namespace, int(count), float(failing), float(idle), float(lasts), values)
    print(json.dumps(asdict(play(loop, working))))
