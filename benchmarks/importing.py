"""What a cold process takes: to import aiodigest, to make its first add, and to show the command line's help.

Each is CPU time of a whole child process, beside that of one which only imports what an engine cannot do without: the
clock would measure what else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from functools import partial

from benchmarks.programs import TAIL, ProgramFailed
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn

PARTS = "import redis.asyncio, pydantic"
ADD = """
import asyncio, sys
from aiodigest import DigestEngine

async def main():
    async with DigestEngine(sys.argv[1], namespace="start") as engine:
        await engine.add("key", {"a": 1})

asyncio.run(main())
"""


async def used(*arguments: str) -> float:
    """Milliseconds of CPU time of a new Python, from its start to its end."""
    return await asyncio.to_thread(_used, arguments)


def _used(arguments: tuple[str, ...]) -> float:
    # Compiled modules are kept, as where a package is installed: the first, which compiles, is not counted.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1), (os.POSIX_SPAWN_DUP2, writing, 2)]
    process = os.posix_spawn(sys.executable, [sys.executable, *arguments], environment, file_actions=actions)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as printed:
        told = printed.read()
    _, status, usage = os.wait4(process, 0)  # which alone tells what one child used
    if status:
        raise ProgramFailed(f"python {' '.join(arguments[:2])} has failed:\n{told[-TAIL:]}")
    return (usage.ru_utime + usage.ru_stime) * 1000


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    works = {
        "parts": partial(used, "-c", PARTS),
        "import": partial(used, "-c", "import aiodigest"),
        "add": partial(used, "-c", ADD, setting.url),
        "help": partial(used, "-m", "aiodigest", "--help"),
    }
    for work in works.values():
        await work()
    times = await in_turn(max(setting.rounds, 15), **works)
    for name, what, bound in (
        ("import", "import aiodigest", 1.0),
        ("add", "import, engine and first add", 1.2),
        ("help", "aiodigest --help", 1.2),
    ):
        yield Row(f"a cold process: {what}", PARTS, "ms of CPU", times[name], times["parts"], bound=bound)
