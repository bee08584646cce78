"""What a user has at the keyboard: a data folder, an environment with the command ``aiodigest``, running programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from servers import server_binary

ROOT = Path(__file__).parents[1]
DEADLINE = 60.0  # seconds; far more than anything here takes


@contextmanager
def data_folder() -> Generator[Path, None, None]:
    """A folder for the embedded server, short enough for its sockets."""
    folder = Path(tempfile.mkdtemp(prefix="aid"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(data: Path) -> dict[str, str]:
    """The environment of a program that keeps its data in ``data``, as if this aiodigest were installed."""
    tools = data / "bin"
    tools.mkdir(exist_ok=True)
    _write_command(tools / "aiodigest", "-m aiodigest")  # of this checkout, also where nothing is installed
    if shutil.which("curl") is None:
        _write_command(tools / "curl", str(ROOT / "tests" / "programs" / "curl.py"))
    paths = [str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    if "AIODIGEST_TEST_SERVER" in os.environ:
        variables["AIODIGEST_SERVER"] = server_binary()
    return variables | {
        "AIODIGEST_DATA": str(data / "data"),
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "PYTHONUNBUFFERED": "1",
    }


def _write_command(path: Path, program: str) -> None:
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {program} "$@"\n')
    path.chmod(0o755)


class Program:
    """A running program, and the lines that it has printed so far. Every wait has a deadline."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []

    async def until(self, text: str) -> str:
        """Its next line that holds ``text``."""
        while line := await self._next():
            if text in line:
                return line
        raise AssertionError(f"it ended without a line that holds {text!r}:\n" + "\n".join(self.lines))

    def interrupt(self) -> None:
        """Send it SIGINT, if it has not ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    async def terminate(self) -> int:
        """Its exit code after SIGTERM."""
        self._process.terminate()
        return await self.ended()

    async def ended(self) -> int:
        """Its exit code, when it has ended by itself."""
        while await self._next():
            pass
        async with asyncio.timeout(DEADLINE):
            return await self._process.wait()

    async def _next(self) -> str:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE):
                line = (await self._process.stdout.readline()).decode()
        except TimeoutError:
            raise AssertionError("it printed no more than this:\n" + "\n".join(self.lines)) from None
        self.lines += [line.rstrip("\n")] if line else []
        return line


@asynccontextmanager
async def running(*command: str | Path, data: Path, folder: Path = ROOT) -> AsyncGenerator[Program, None]:
    """Run a command in ``folder``; killed at the end unless it has ended."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment(data),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
