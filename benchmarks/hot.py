"""Adds of 200 tasks to one timeline: ``python hot.py URL COUNT``. It runs with any version of aiodigest."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from aiodigest import DigestEngine

TASKS, VALUE = 200, "x" * 198


async def main(url: str, count: int) -> float:
    """Adds a second."""

    async def share(adds: int) -> None:
        numbers = iter(range(adds))

        async def some() -> None:
            for _ in numbers:
                await engine.add("one", VALUE)

        await asyncio.gather(*(some() for _ in range(TASKS)))

    async with DigestEngine(url, namespace="hot") as engine:
        await share(1_000)  # connections are made, and scripts loaded
        gc.collect()
        began = time.perf_counter()
        await share(count)
        return count / (time.perf_counter() - began)


if __name__ == "__main__":
    print(asyncio.run(main(sys.argv[1], int(sys.argv[2]))))
