"""Programs in processes of their own, none of which is left behind."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress

TAIL = 2_000  # characters of a complaint that are shown


class ProgramFailed(Exception):
    """A program did not do what it was started for."""


def in_short(error: Exception) -> str:
    """An error on one line: what has failed, and what it said last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(dict.fromkeys((lines[0], lines[-1])))


def part(module: str, *arguments: object) -> Sequence[object]:
    """The command that runs a part of the benchmark."""
    return sys.executable, "-m", f"benchmarks.{module}", *arguments


@asynccontextmanager
async def running(
    *command: object, stdout: int | None = None, stderr: int | None = None
) -> AsyncGenerator[Process, None]:
    """A program that has ended when this has, however it ends."""
    process = await asyncio.create_subprocess_exec(*map(str, command), stdin=DEVNULL, stdout=stdout, stderr=stderr)
    try:
        yield process
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def output(what: str, *command: object, timeout: float | None = None) -> bytes:
    """What a program prints; ``what`` names it where it fails."""
    async with running(*command, stdout=PIPE, stderr=PIPE) as process:
        try:
            async with asyncio.timeout(timeout):
                out, problems = await process.communicate()
        except TimeoutError:
            raise ProgramFailed(f"{what} took longer than {timeout} s") from None
    if process.returncode:
        raise ProgramFailed(f"{what} has failed:\n{problems.decode(errors='replace')[-TAIL:]}")
    return out
