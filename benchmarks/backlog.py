"""A large backlog: how long a script and a turn of the worker's event loop take at the most, and what memory grows."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from aiodigest import JSON, DigestEngine, Entry, Policy
from aiodigest.backends.redis.scripts import load_scripts
from aiodigest.records.validation import DEFAULT
from aiodigest.worker.room import FULL, QUEUE
from benchmarks.delivering import fill
from benchmarks.report import Row, astray
from benchmarks.setting import Setting
from benchmarks.worker import EARLY, Seen, deliver_apart

SCRIPT_MS, STALL_MS = 5.0, 20.0
FIRST_USE = "EVAL (first use)"  # the server compiles the script too, once: no bound is of that
COUNT = "for number = 1, tonumber(ARGV[1]) do local _ = number * 2 end return 1"
IDLE = 30.0  # seconds in which to see how long a millisecond of computing may take
LARGE, PER_TIMELINE, SIZE = 64, 1_000, 8_192
LASTS = 1.0  # seconds of a callback, in which others are read
ROOM_MB = FULL * DEFAULT.digest / 1e6


SHOWN = 1.0  # ms: what took less is not told of
USUAL = 0.9  # a script that does too much takes too long again and again, one whose core was taken from it now and then


class Round(NamedTuple):
    """What was seen of one backlog."""

    times: Mapping[str, Sequence[float]]  # how long each run of a script took, in ms, as far as the server kept it
    nothing: float  # the longest run of a script that counts for a millisecond
    seen: Seen

    @property
    def longest(self) -> Mapping[str, float]:
        return {name: max(took) for name, took in self.times.items()}

    @property
    def longest_script(self) -> float:
        return max((took for name, took in self.longest.items() if name in load_scripts()), default=0.0)

    @property
    def usual(self) -> Mapping[str, float]:
        """What nine of ten runs of each script take at the most; of one that runs less often than ten times, all."""
        runs = {name: sorted(took) for name, took in self.times.items() if name in load_scripts()}
        return {name: took[ceil(len(took) * USUAL) - 1] for name, took in runs.items()}


async def watch(client: Any, slower_than: float = SHOWN) -> None:
    """Have the server keep every script that takes longer, in ms."""
    await client.config_set("slowlog-log-slower-than", round(slower_than * 1_000))
    await client.config_set("slowlog-max-len", 100_000)
    await client.slowlog_reset()


async def kept(client: Any) -> Mapping[str, Sequence[float]]:
    """What the server has kept since then."""
    names = {script.sha: name for name, script in load_scripts().items()} | {"EVAL": FIRST_USE}
    found = dict[str, list[float]]()
    for entry in await client.slowlog_get(100_000):
        words: list[str] = entry["command"].decode(errors="replace").split()
        command = words[0].upper()
        name = names.get(words[1] if command == "EVALSHA" else command, command)
        found.setdefault(name, []).append(entry["duration"] / 1000)
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
    await watch(client)
    for _ in range(2_000):
        await client.eval(COUNT, 0, int(turns))
    return max((entry["duration"] / 1000 for entry in await client.slowlog_get(10_000)), default=1.0)


def rows(what: str, rounds: Sequence[Round]) -> list[Row]:
    longest = dict[str, float]()
    for each in rounds:
        for name, took in each.longest.items():
            longest[name] = max(took, longest.get(name, SHOWN))
    told = sorted(((took, name) for name, took in longest.items() if took > SHOWN), reverse=True)
    of_scripts = ", ".join(f"{name} {took:.1f}" for took, name in told)
    seen = [each.seen for each in rounds]
    computing = [each.stall_ms for each in seen]
    return [
        Row(
            f"{what}: longest script", f"({of_scripts})", "ms", [each.longest_script for each in rounds],
            bound=SCRIPT_MS,
        ),
        Row("control: the longest run of a script that counts for 1 ms", "", "ms", [each.nothing for each in rounds]),
        Row(f"{what}: longest stall of the worker's loop, computing", "", "ms", computing, bound=STALL_MS),
        Row(f"{what}: the same, with what others took of the core", "", "ms", [each.wall_ms for each in seen]),
        Row(
            "control: the longest run of a program that only computes for 1 ms, again and again", "", "ms",
            [each.bare_ms for each in seen],
        ),
        Row(f"{what}: records", "", "records/s", [each.rate * each.records / each.digests for each in seen]),
    ]  # fmt: skip


def memory_row(what: str, seen: Sequence[Seen]) -> Row:
    peaks, early = [each.peak_mb for each in seen], [each.early_mb for each in seen]
    return Row(what, f"after the first {EARLY:,} records", "MB", peaks, early, bound=1.2, must=True)


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
        due = Round(await kept(client), await of_nothing(client), seen)
        for row in rows(f"{count:,} timelines due at once", [due]):
            yield row


async def deliver_large(setting: Setting, timelines: int, idle: float = 0.0, lasts: float = 0.0) -> Round:
    await setting.flush()
    async with DigestEngine[JSON](setting.url, namespace="large", timeout=60) as engine, setting.client() as client:
        for key in range(timelines):
            values = (random.randbytes(SIZE // 2).hex() for _ in range(PER_TIMELINE))
            await engine.add_many(Entry(str(key), value, str(number)) for number, value in enumerate(values))
        await watch(client, 0)
        seen = await deliver_apart(setting.url, "large", timelines, idle=idle, lasts=lasts)
        return Round(await kept(client), await of_nothing(client), seen)


async def large_timelines(setting: Setting) -> AsyncGenerator[Row, None]:
    timelines, idle = setting.some(LARGE, 4), IDLE * setting.scale / setting.rounds
    rounds = [await deliver_large(setting, timelines, idle) for _ in range(setting.rounds)]
    what = f"{timelines} timelines of {PER_TIMELINE:,} records of 8 KB"
    for row in rows(what, rounds):
        yield row
    slowest = [max(each.usual.items(), key=lambda pair: pair[1]) for each in rounds]
    yield Row(
        f"{what}: nine of ten runs of the slowest script", f"({', '.join(dict(slowest))})", "ms",
        [took for _, took in slowest], bound=SCRIPT_MS, must=True,
    )  # fmt: skip
    rounds.append(await deliver_large(setting, timelines, lasts=LASTS))
    seen = rounds[-1].seen
    slow = f"{what}, callbacks of {LASTS:g} s"
    # those for which there is room, and those that wait for it; a worker sets the others aside
    yield Row(f"{slow}: digests under way at once", "", "", [seen.busy], bound=FULL + QUEUE)
    if seen.early_mb:
        yield Row(
            f"{slow}: what a worker's memory grew by",
            f"the room for what it decodes, of which {seen.room_mb:.0f} MB were taken", "MB",
            [seen.grown_mb], [ROOM_MB], bound=1.5, must=True,
        )  # fmt: skip
    yield astray(what, sum(abs(timelines * PER_TIMELINE - each.seen.records) for each in rounds))


async def memory_of_worker(setting: Setting) -> AsyncGenerator[Row, None]:
    await setting.flush()
    timelines = setting.some(100_000, 2_000)
    await fill(setting.url, "memory", timelines)
    seen = await deliver_apart(setting.url, "memory", timelines)
    if seen.early_mb:  # the system tells it
        yield memory_row(f"memory of a worker while it delivers {seen.records:,} records", [seen])
