"""Real processes for tests: started, read by line, and gone at the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 60.0  # seconds; far more than anything here takes


class Program:
    """A running program of ``tests/programs``; every wait has a deadline."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self, timeout: float = DEADLINE) -> str:
        """Its next line, '' at its end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout):
            return (await self.process.stdout.readline()).decode().rstrip("\n")

    async def rest(self, timeout: float = 3 * DEADLINE) -> list[str]:
        """All lines until its end."""
        lines: list[str] = []
        async with asyncio.timeout(timeout):
            while line := await self.line(timeout):
                lines.append(line)
            await self.process.wait()
        return lines


@asynccontextmanager
async def running(name: str, *arguments: object) -> AsyncGenerator[Program, None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAMS / name, *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
