"""A large backlog: how long a script and a turn of the worker's event loop take at the most, and what memory grows."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from aiodigest import JSON, DigestEngine, Entry, Policy
from aiodigest.scripts import COMMANDS, SHARED, load_script
from benchmarks.delivering import fill
from benchmarks.report import Row
from benchmarks.setting import Setting
from benchmarks.worker import EARLY, Seen, deliver_apart

SCRIPT_MS, STALL_MS = 5.0, 20.0
FIRST_USE = "EVAL (first use)"  # the server compiles the script too, once: no bound is of that
COUNT = "for number = 1, tonumber(ARGV[1]) do local _ = number * 2 end return 1"
IDLE = 30.0  # seconds in which to see how long a millisecond of computing may take
LARGE, PER_TIMELINE, SIZE = 64, 1_000, 8_192


async def watch(client: Any) -> None:
    """Have the server keep every script that is not short."""
    await client.config_set("slowlog-log-slower-than", 1_000)
    await client.config_set("slowlog-max-len", 100_000)
    await client.slowlog_reset()


async def longest(client: Any) -> Mapping[str, float]:
    """The longest run of each script since then, in ms."""
    names = {load_script(name).sha: name for name in (*SHARED, *COMMANDS)} | {"EVAL": FIRST_USE}
    found = dict[str, float]()
    for entry in await client.slowlog_get(100_000):
        words: list[str] = entry["command"].decode(errors="replace").split()
        command = words[0].upper()
        name = names.get(words[1] if command == "EVALSHA" else command, command)
        found[name] = max(found.get(name, 0.0), entry["duration"] / 1000)
    return found


async def of_nothing(client: Any) -> float:
    """The longest run, in ms, of a script that counts for a millisecond: what other programs take of the server's core.

    It runs as often as some scripts of the backlog do.
    """
    turns = 1_000.0
    for _ in range(10):  # until it takes a millisecond
        began = time.perf_counter()
        await client.eval(COUNT, 0, int(turns))
        turns *= min(10.0, 0.001 / max(time.perf_counter() - began, 1e-6))
    await client.slowlog_reset()
    for _ in range(2_000):
        await client.eval(COUNT, 0, int(turns))
    return max((entry["duration"] / 1000 for entry in await client.slowlog_get(10_000)), default=1.0)


def rows(what: str, scripts: Mapping[str, float], nothing: float, seen: Seen) -> list[Row]:
    of_scripts = ", ".join(f"{name} {took:.1f}" for name, took in sorted(scripts.items(), key=lambda pair: -pair[1]))
    longest_script = max((took for name, took in scripts.items() if name != FIRST_USE), default=0.0)
    return [
        Row(f"{what}: longest script", f"({of_scripts})", "ms", [longest_script], bound=SCRIPT_MS),
        Row("the same of a script that counts for 1 ms", "", "ms", [nothing]),
        Row(f"{what}: longest stall of the worker's loop, computing", "", "ms", [seen.stall_ms], bound=STALL_MS),
        Row(f"{what}: the same, with what others took of the core", "", "ms", [seen.wall_ms]),
        Row("the same of a program that only computes for 1 ms, again and again", "", "ms", [seen.bare_ms]),
        Row(f"{what}: records", "", "records/s", [seen.rate * seen.records / seen.digests]),
    ]


def memory_row(what: str, seen: Seen) -> Row:
    return Row(what, f"after the first {EARLY:,} records", "MB", [seen.peak_mb], [seen.early_mb], bound=1.2)


async def many_timelines(setting: Setting) -> AsyncGenerator[Row, None]:
    """A million timelines whose time comes at the same moment, while they wait."""
    await setting.flush()
    count = setting.some(1_000_000, 5_000)
    options: Any = {"policy": Policy(initial_delay=1_800), "timeout": 60}
    async with DigestEngine[JSON](setting.url, namespace="due", **options) as engine, setting.client() as client:
        for start in range(0, count, 10_000):
            await engine.add_many(Entry(f"user:{n}", "") for n in range(start, min(start + 10_000, count)))
        # as if an hour had passed: every score is moved into the past by the same amount
        await client.zunionstore("{due}:waiting", {"{due}:waiting": 0.001})
        await watch(client)
        seen = await deliver_apart(setting.url, "due", count, idle=IDLE * setting.scale)
        scripts = await longest(client)
        for row in rows(f"{count:,} timelines due at once", scripts, await of_nothing(client), seen):
            yield row


async def large_timelines(setting: Setting) -> AsyncGenerator[Row, None]:
    await setting.flush()
    timelines = setting.some(LARGE, 4)
    async with DigestEngine[JSON](setting.url, namespace="large", timeout=60) as engine, setting.client() as client:
        for key in range(timelines):
            values = (random.randbytes(SIZE // 2).hex() for _ in range(PER_TIMELINE))
            await engine.add_many(Entry(str(key), value, str(number)) for number, value in enumerate(values))
        await watch(client)
        seen = await deliver_apart(setting.url, "large", timelines, idle=IDLE * setting.scale)
        scripts, what = await longest(client), f"{timelines} timelines of {PER_TIMELINE:,} records of 8 KB"
        for row in rows(what, scripts, await of_nothing(client), seen):
            yield row
        if seen.early_mb:
            yield memory_row(f"{what}: memory of the worker", seen)


async def memory_of_worker(setting: Setting) -> AsyncGenerator[Row, None]:
    await setting.flush()
    timelines = setting.some(100_000, 2_000)
    await fill(setting.url, "memory", timelines)
    seen = await deliver_apart(setting.url, "memory", timelines)
    if seen.early_mb:  # the system tells it
        yield memory_row(f"memory of a worker while it delivers {seen.records:,} records", seen)
