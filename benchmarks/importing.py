"""What ``import aiodigest`` takes, and a first engine, beside the import of what an engine cannot do without."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from functools import partial

from benchmarks.programs import output
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn

TIMED = "import time; began = time.perf_counter(); {}; print((time.perf_counter() - began) * 1000)"
PARTS = "import redis.asyncio, pydantic"
ENGINE = "import aiodigest; aiodigest.DigestEngine(namespace='x')"  # loads what the import alone puts off


async def took(statements: str) -> float:
    """Milliseconds, in a new process."""
    return float(await output(statements, sys.executable, "-c", TIMED.format(statements)))


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    times = await in_turn(
        max(setting.rounds, 3) * 3,
        ours=partial(took, "import aiodigest"),
        engine=partial(took, ENGINE),
        parts=partial(took, PARTS),
    )
    yield Row("import aiodigest", PARTS, "ms", times["ours"], times["parts"], bound=1.3)
    yield Row("import aiodigest and make an engine", PARTS, "ms", times["engine"], times["parts"])
