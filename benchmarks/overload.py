"""What is more than there is room for: producers faster than their server, and one timeline that takes every add."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from itertools import pairwise
from typing import Any

from aiodigest import Digest, DigestEngine, Policy
from aiodigest.backend import Close, Closed, NewDeadLetter
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.records.entries import identity
from benchmarks.delivering import fill
from benchmarks.memory import peak
from benchmarks.programs import output, part
from benchmarks.report import Row, astray
from benchmarks.setting import Setting, play

TASKS, KEYS, STILL_MS = 12_000, 50, 2_000
GRAIN = 0.1  # MB: less cannot be told apart


async def produce(url: str, adds: int) -> None:
    """Add from more tasks than are queued, to a server that stands still at first; print memory before and after."""
    setting = Setting(url, 0, "asyncio", 1, 1.0)
    async with DigestEngine(url, namespace="producers", value_type=str, timeout=60) as engine:
        await engine.add("0", "first")
        before, numbers = peak(), iter(range(adds))

        async def some() -> None:
            for number in numbers:
                await engine.add(str(number % KEYS), f"{number}" * 200)

        async with setting.client() as client:
            await client.execute_command("CLIENT", "PAUSE", STILL_MS, "ALL")
        await asyncio.gather(*(some() for _ in range(TASKS)))
        print(before, peak())


async def stored(setting: Setting) -> int:
    """How many records of the producers the server has, with those that capacity dropped."""
    async with setting.client() as client:
        held = [await client.llen(f"{{producers}}:log:{key}") for key in range(KEYS)]
        return sum(held) + int(await client.hget("{producers}:layout", "dropped") or 0)


async def producers(setting: Setting) -> AsyncGenerator[Row, None]:
    """Memory of a process that adds faster than its server takes, by how many adds it makes: it must not matter."""
    memory, lost = list[float](), 0
    few, many = setting.some(50_000, 15_000), setting.some(200_000, 30_000)
    for adds in (few, many):
        await setting.flush()
        printed = await output("the producer", *part("overload", "produce", setting.url, adds))
        before, after = map(float, printed.split())
        memory.append(max(after - before, GRAIN))
        lost += abs(adds + 1 - await stored(setting))
    what = f"{many:,} adds to a server that stands still for {STILL_MS / 1000:g} s"
    yield Row(f"memory of {TASKS:,} tasks, {what}", f"{few:,} adds", "MB", memory[1:], memory[:1], bound=1.2, must=True)
    yield astray(what, lost)


async def one_timeline(setting: Setting) -> AsyncGenerator[Row, None]:
    """Every add goes to the same timeline, while it is delivered."""
    await setting.flush()
    adds, told, digests = setting.some(50_000, 2_000), 0, 0
    policy = Policy(minimum_delay=0, increment_delay=0)
    all_told = asyncio.Event()
    engine = DigestEngine(setting.url, namespace="one", value_type=int, timeout=60, policy=policy)

    async def count(digest: Digest[int]) -> None:
        nonlocal told, digests
        told += len(digest.records) + digest.dropped
        digests += 1
        if told >= adds:
            all_told.set()

    times: list[float] = []
    async with engine.delivering(count):
        numbers = iter(range(adds))

        async def some() -> None:
            for number in numbers:
                await engine.add("k", number)
                if (number + 1) % (adds // 10) == 0:
                    times.append(time.monotonic())

        times.append(time.monotonic())
        await asyncio.gather(*(some() for _ in range(200)))
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await all_told.wait()
    rates = [adds / 10 / (after - before) for before, after in pairwise(times)]
    what = f"one timeline takes every add ({digests:,} digests)"
    yield Row(f"{what}: adds in the last tenth", "in the first", "adds/s", rates[-1:], rates[:1], bound=0.5, least=True)
    yield astray(what, adds - told)


async def set_aside(setting: Setting) -> AsyncGenerator[Row, None]:
    """Every record of a digest becomes a dead letter of its own: what that takes must not grow with their number."""
    few, many = 100, 1_000
    limits = Policy().terms.limits

    async def of(records: int) -> float:
        """Return the microseconds a letter."""
        await setting.flush()
        await fill(setting.url, "aside", 1, records)
        backend = RedisBackend(setting.url, namespace="aside")
        await backend.connect()
        try:
            [lease] = (await backend.claim(0, 1, 60_000, limits)).leases
            letters = [NewDeadLetter("unreadable", [identity(entry)]) for entry in lease.entries]
            began = time.perf_counter()
            [closed] = await backend.close(0, [Close(lease, lease.size, 0, 0, limits, 60_000, dead_letters=letters)])
            took = time.perf_counter() - began
        finally:
            await backend.aclose()
        assert closed == Closed("closed")
        return 1e6 * took / records

    rounds = [(await of(few), await of(many)) for _ in range(setting.rounds)]
    of_few, of_many = zip(*rounds, strict=True)
    what = f"{many:,} records set aside one by one: a letter"
    yield Row(what, f"of {few}", "us", of_many, of_few, bound=2, must=True)


if __name__ == "__main__":
    arguments: Any = sys.argv[1:]
    match arguments:
        case ["produce", url, adds]:
            play("asyncio", produce(url, int(adds)))
        case _:
            sys.exit(2)
