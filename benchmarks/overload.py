"""What is more than there is room for costs: ``python benchmarks/overload.py``, about two minutes and a GB of memory.

On an embedded server in a temporary folder. Prints each figure beside its bound, and ends with 1 if one is missed.

* 64 timelines of 1,000 records of 8 KB: the longest script (``SLOWLOG``), the worker's memory by its concurrency, and
  records a second.
* Producers faster than a server that stands still for a while: the memory of the process that adds.
* One timeline that takes every add: adds a second at the beginning and at the end.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from figures import Figure
from redis.asyncio import Redis

from aiodigest import Digest, DigestEngine, Entry, Policy
from aiodigest.embedded import EmbeddedServer
from aiodigest.scripts import load_script

TIMELINES, RECORDS, SIZE = 64, 1_000, 8_192
ADDS = 50_000
SCRIPT_BOUND = 5.0  # ms
NAMES = ("add", "claim", "read", "renew", "close", "retry", "release")


def peak() -> float:
    """The most memory (MB) that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1_048_576)


async def apart(*arguments: object) -> list[float]:
    """Run a part of this program in a process of its own, and return the numbers that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{arguments[0]} has failed")
    return [float(number) for number in out.split()]


# A large backlog.


async def fill(folder: Path, namespace: str) -> None:
    async with DigestEngine(f"embedded://{folder}", namespace=namespace, value_type=str, timeout=60) as engine:
        for key in range(TIMELINES):
            values = (random.randbytes(SIZE // 2).hex() for _ in range(RECORDS))
            await engine.add_many(Entry(str(key), value, str(number)) for number, value in enumerate(values))


async def deliver(folder: Path, namespace: str, concurrency: int) -> None:
    """Deliver the backlog; print the peak of memory before and after, and seconds."""
    engine = DigestEngine(
        f"embedded://{folder}", namespace=namespace, value_type=str, concurrency=concurrency, timeout=60
    )
    done, came = asyncio.Event(), 0

    async def count(digest: Digest[str]) -> None:
        nonlocal came
        came += len(digest.records)
        if came == TIMELINES * RECORDS:
            done.set()

    before, began = peak(), time.monotonic()
    async with engine.delivering(count), asyncio.timeout(300):
        await done.wait()
    print(before, peak(), time.monotonic() - began)


async def longest(client: Any) -> dict[str, float]:
    """The longest run of each script, in ms."""
    shas: dict[str, str] = {load_script(name).sha: name for name in NAMES}
    found: dict[str, float] = defaultdict(float)
    for entry in await client.slowlog_get(10_000):
        words: list[str] = entry["command"].decode(errors="replace").split()
        name = shas.get(words[1], words[0]) if len(words) > 1 else words[0]
        found[name] = max(found[name], entry["duration"] / 1000)
    return dict(found)


async def backlog(folder: Path, client: Any) -> list[Figure]:
    figures: list[Figure] = []
    for concurrency in (4, 64):
        await fill(folder, f"backlog-{concurrency}")
        await client.slowlog_reset()
        before, after, took = await apart("deliver", folder, f"backlog-{concurrency}", concurrency)
        name = f"backlog of {TIMELINES * RECORDS * SIZE >> 20} MB, concurrency {concurrency}"
        scripts = await longest(client)
        figures.append(Figure(f"{name}: records", TIMELINES * RECORDS / took, "a second"))
        figures.append(Figure(f"{name}: memory of the worker", after - before, "MB"))
        figures += [
            Figure(f"{name}: longest {script}", scripts[script], "ms", SCRIPT_BOUND)
            for script in sorted(scripts)
            if script in NAMES
        ]
        await client.flushall()
    return figures


# Producers that are faster than the server.


async def produce(folder: Path) -> None:
    """Add from 1,000 tasks while the server stands still for two seconds; print the peak of memory before and after."""
    async with DigestEngine(f"embedded://{folder}", namespace="producers", value_type=str, timeout=60) as engine:
        await engine.add("0", "first")
        before, numbers = peak(), iter(range(ADDS))

        async def some(task: int) -> None:
            for number in numbers:
                await engine.add(str(number % 50), f"{number}" * 200)

        client: Any = Redis(unix_socket_path=str(EmbeddedServer(folder).socket))
        async with client:
            await client.execute_command("CLIENT", "PAUSE", 2000, "ALL")
        began = time.monotonic()
        await asyncio.gather(*(some(task) for task in range(12_000)))
        print(before, peak(), time.monotonic() - began)


# One timeline that takes every add.


async def one(folder: Path) -> list[Figure]:
    engine = DigestEngine(
        f"embedded://{folder}",
        namespace="one",
        value_type=int,
        timeout=60,
        policy=Policy(minimum_delay=0, increment_delay=0),
    )
    told = digests = 0

    async def count(digest: Digest[int]) -> None:
        nonlocal told, digests
        told += len(digest.records) + digest.dropped
        digests += 1

    rates: list[float] = []
    async with engine.delivering(count):
        numbers = iter(range(ADDS))

        async def some() -> None:
            for number in numbers:
                await engine.add("k", number)
                if (number + 1) % (ADDS // 10) == 0:
                    rates.append(time.monotonic())

        rates.append(time.monotonic())
        await asyncio.gather(*(some() for _ in range(200)))
    tenth = ADDS / 10
    return [
        Figure("one timeline: adds in the first tenth", tenth / (rates[1] - rates[0]), "a second"),
        Figure("one timeline: adds in the last tenth", tenth / (rates[-1] - rates[-2]), "a second"),
        Figure("one timeline: digests meanwhile", digests, ""),
        Figure("one timeline: told of by then, of every add", told / ADDS * 100, "%"),
    ]


async def main() -> int:
    figures: list[Figure] = []

    def show(some: list[Figure]) -> None:
        figures.extend(some)
        for figure in some:
            print(figure, flush=True)

    with tempfile.TemporaryDirectory(prefix="aid") as name:
        folder = Path(name)
        server = EmbeddedServer(folder)
        await server.start()
        try:
            client: Any = Redis(unix_socket_path=str(server.socket), socket_timeout=None)
            async with client:
                await client.config_set("slowlog-log-slower-than", 500)
                await client.config_set("slowlog-max-len", 10_000)
                show(await backlog(folder, client))
                before, after, took = await apart("produce", folder)
                show([Figure("producers of a server that stands still: memory", after - before, "MB")])
                show([Figure("producers of a server that stands still: adds", ADDS / took, "a second")])
                show(await one(folder))
        finally:
            await server.stop()
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["deliver", folder, namespace, concurrency]:
            asyncio.run(deliver(Path(folder), namespace, int(concurrency)))
        case ["produce", folder]:
            asyncio.run(produce(Path(folder)))
        case _:
            sys.exit(asyncio.run(main()))
