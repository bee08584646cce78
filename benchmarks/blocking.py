"""How many records a second threads without an event loop add, beside tasks of one that has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from aiodigest import JSON, DigestEngine
from benchmarks.baselines import NAMESPACE, VALUE, engine, key_of, spread
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn, timed

MANY = 50


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    """``engine.sync.add`` beside ``await engine.add``, from one and from many at once."""
    few, count = setting.some(2_000, 50), setting.some(10_000, 200)
    blocking = DigestEngine[JSON](setting.url, namespace=NAMESPACE)
    async with engine(setting.url) as ours:

        def share(adds: int, threads: int) -> None:
            numbers = iter(range(adds))

            def some(_: int) -> None:
                for number in numbers:
                    blocking.sync.add(key_of(number), VALUE)

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(some, range(threads)))

        async def threads(adds: int, number: int) -> float:
            await setting.flush()
            return await timed(lambda: asyncio.to_thread(share, adds, number))

        async def tasks(adds: int, number: int) -> float:
            await setting.flush()
            return await timed(lambda: spread(ours.add, adds, number))

        await threads(MANY, MANY)  # connections are made, and scripts loaded
        await tasks(MANY, MANY)
        for adds, number, noun, bound in ((few, 1, "", 0.8), (count, MANY, "s", 0.5)):
            took = await in_turn(
                setting.rounds, threads=partial(threads, adds, number), tasks=partial(tasks, adds, number)
            )
            threads_rate, tasks_rate = ([adds / seconds for seconds in took[name]] for name in ("threads", "tasks"))
            yield Row(
                f"sync.add from {number} thread{noun}",
                f"await add from {number} task{noun}",
                "adds/s",
                threads_rate,
                tasks_rate,
                bound=bound,
                least=True,
            )
