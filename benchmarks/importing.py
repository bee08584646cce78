"""What ``import aiodigest`` takes, and the first engine, for which the heavy parts are imported."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from functools import partial

from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn

TIMED = "import time; began = time.perf_counter(); import {}; print((time.perf_counter() - began) * 1000)"


async def took(modules: str) -> float:
    """Milliseconds, in a new process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TIMED.format(modules), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return float(out)


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    times = await in_turn(
        max(setting.rounds, 3) * 3,
        ours=partial(took, "aiodigest"),
        engine=partial(took, "aiodigest; aiodigest.DigestEngine(namespace='x')"),
        parts=partial(took, "redis.asyncio, pydantic"),
    )
    beside = "import redis.asyncio, pydantic"
    yield Row("import aiodigest", beside, "ms", times["ours"], times["parts"], bound=1.3)
    yield Row("the same, and make an engine", beside, "ms", times["engine"], times["parts"])
