"""How soon a digest begins, and what waiting for one costs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from statistics import median, quantiles
from typing import Any

from redis.asyncio import Redis

from aiodigest import Digest, DigestEngine, Entry, Policy
from benchmarks.programs import ProgramFailed, output, part, running
from benchmarks.report import Row
from benchmarks.setting import Setting, fresh_server, in_turn, play

SAMPLES, WARM_UP = 100, 10
A_SECOND = 100  # timelines that come due
COMMANDS, SHARE = 6, 0.2  # a minute; percent of a core
MINUTE = 60.0

Started = Callable[[Digest[float]], None]


@asynccontextmanager
async def delivering(
    url: str, namespace: str, started: Started, policy: Policy | Callable[[str], Policy] = Policy()
) -> AsyncGenerator[DigestEngine[float], None]:
    """A worker that tells ``started`` of each digest as soon as its callback starts."""

    async def deliver(digest: Digest[float]) -> None:
        started(digest)

    engine = DigestEngine(url, namespace=namespace, value_type=float, policy=policy)
    async with engine.delivering(deliver):
        yield engine


async def add_one_by_one(engine: DigestEngine[float], names: str) -> None:
    """Add to one idle timeline after the other, each when the worker has long gone to sleep again."""
    for number in range(WARM_UP + SAMPLES):
        await asyncio.sleep(random.uniform(0.01, 0.02))
        await engine.add(f"{names}{number}", time.monotonic())


async def add_apart(url: str, namespace: str, names: str) -> None:
    """What the other process does."""
    async with DigestEngine(url, namespace=namespace, value_type=float) as engine:
        await add_one_by_one(engine, names)


async def to_callback(setting: Setting) -> AsyncGenerator[Row, None]:
    """From an add to its callback: a record's value is the moment of its add, on a clock that all processes share."""
    delays: list[float] = []
    all_came = asyncio.Event()
    number = 0

    def started(digest: Digest[float]) -> None:
        delays.append(time.monotonic() - digest.records[0].value)
        if len(delays) == WARM_UP + SAMPLES:
            all_came.set()

    await setting.flush()
    async with delivering(setting.url, "soon", started) as engine, setting.client() as client:

        async def took(apart: bool) -> float:
            nonlocal number
            number += 1
            delays.clear()
            all_came.clear()
            if apart:
                await output("the process that adds", *part("waiting", "add", setting.url, "soon", f"{number}-"))
            else:
                await add_one_by_one(engine, f"{number}-")
            async with asyncio.timeout(60):
                await all_came.wait()
            return median(delays[WARM_UP:]) * 1000

        async def ping() -> float:
            trips: list[float] = []
            for _ in range(SAMPLES):
                await asyncio.sleep(random.uniform(0.01, 0.02))  # as idle as what is measured beside it
                began = time.monotonic()
                await client.ping()
                trips.append(time.monotonic() - began)
            return median(trips) * 1000

        times = await in_turn(min(setting.rounds, 3), here=partial(took, False), there=partial(took, True), ping=ping)
    yield Row("add on an idle timeline to its callback", "a PING", "ms", times["here"], times["ping"], bound=4)
    yield Row(
        "add in another process on an idle timeline to its callback",
        "a PING",
        "ms",
        times["there"],
        times["ping"],
        bound=8,
    )


async def lateness(setting: Setting) -> AsyncGenerator[Row, None]:
    """From the due time, as the server tells it, to the start of the callback; the server writes to disk."""
    timelines = setting.some(1_000, 100)
    async with fresh_server(on_disk=True) as (_, port):
        late = await lateness_of(f"redis://127.0.0.1:{port}/0", timelines)
        client: Any = Redis(port=port)
        async with client:
            bare = await lateness_of_a_timer(client, timelines)
    what = f"lateness of {timelines:,} timelines, {A_SECOND} due a second, on disk"
    control = "control: a timer that wakes up and sends one SET, on disk"
    for name, values, bounds in ((what, late, (2, 4)), (control, bare, (None, None))):
        yield Row(f"{name}: median", "", "ms", [median(values)], bound=bounds[0])
        yield Row(f"{name}: p99", "", "ms", [quantiles(values, n=100)[98]], bound=bounds[1])


async def lateness_of(url: str, timelines: int) -> list[float]:
    """Of each timeline, in milliseconds."""
    seconds = timelines / A_SECOND
    delays = {str(number): 1.5 + seconds * number / timelines for number in range(timelines)}
    due, begun = dict[str, float](), dict[str, float]()
    all_begun = asyncio.Event()

    def started(digest: Digest[float]) -> None:
        begun[digest.key] = time.time()  # the server's clock too, as it runs on this machine
        if len(begun) == timelines:
            all_begun.set()

    def policy(key: str) -> Policy:
        return Policy(initial_delay=delays[key])

    async with delivering(url, "late", started, policy) as engine:
        await engine.add_many(Entry(key, 0.0) for key in delays)
        async for timeline in engine.timelines("waiting"):
            due[timeline.key] = timeline.due.timestamp()
        async with asyncio.timeout(seconds + 60):
            await all_begun.wait()
    return [(begun[key] - due[key]) * 1000 for key in due]


async def lateness_of_a_timer(client: Any, times: int) -> list[float]:
    """What no worker can do without: from the moment that a timer is set for to the answer of a write to disk."""
    late: list[float] = []
    for _ in range(times):
        wanted = time.perf_counter() + 1 / A_SECOND
        await asyncio.sleep(1 / A_SECOND)
        await client.set("control", 1)
        late.append((time.perf_counter() - wanted) * 1000)
    return late


# An idle worker


async def idle(url: str, seconds: float) -> None:
    """Be one, after one delivery, and print the share of a core that it took, in percent."""
    delivered = asyncio.Event()

    def started(digest: Digest[float]) -> None:
        delivered.set()

    async with delivering(url, "idle", started) as engine:
        await engine.add("once", 0.0)
        await delivered.wait()
        await asyncio.sleep(1)
        print("{}", flush=True)
        computed = time.process_time()
        await asyncio.sleep(seconds)
        print(json.dumps((time.process_time() - computed) / seconds * 100), flush=True)


async def idleness(setting: Setting) -> AsyncGenerator[Row, None]:
    await setting.flush()
    seconds = MINUTE if setting.scale == 1 else 6.0
    sent: Counter[str] = Counter()
    async with running(*part("waiting", "idle", setting.url, seconds), stdout=asyncio.subprocess.PIPE) as process:
        assert process.stdout is not None
        await process.stdout.readline()
        client: Any = Redis(port=setting.port, socket_timeout=None)
        async with client, client.monitor() as monitor:
            share = asyncio.create_task(process.stdout.readline())
            while not share.done():
                command = asyncio.create_task(monitor.next_command())
                await asyncio.wait([share, command], return_when=asyncio.FIRST_COMPLETED)
                if command.done():
                    if (told := command.result())["client_type"] != "lua":  # what a script calls is not sent
                        sent[told["command"].split()[0].upper()] += 1
                else:
                    command.cancel()
        if await process.wait():
            raise ProgramFailed("the idle worker has failed")
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(sent.items()))
    a_minute = [sum(sent.values()) * 60 / seconds]
    whole = seconds == MINUTE  # in less there is too little that a bound could be of
    yield Row("commands of an idle worker", f"({kinds})", "a minute", a_minute, bound=COMMANDS if whole else None)
    yield Row("an idle worker", "", "% of a core", [float(await share)], bound=SHARE if whole else None)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["add", url, namespace, names]:
            play("asyncio", add_apart(url, namespace, names))
        case ["idle", url, seconds]:
            play("asyncio", idle(url, float(seconds)))
        case _:
            sys.exit(os.EX_USAGE)
