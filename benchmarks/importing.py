"""What ``import aiodigest`` takes, beside the import of what it cannot do without."""

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
        max(setting.rounds, 3) * 3, ours=partial(took, "aiodigest"), parts=partial(took, "redis.asyncio, pydantic")
    )
    yield Row("import aiodigest", "import redis.asyncio, pydantic", "ms", times["ours"], times["parts"], bound=1.3)
