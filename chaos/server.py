"""The servers of a run: a real one with an append-only file, and what is known of the embedded one from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ports import free_port  # of the tests, which run on the same, as are the servers
from servers import server_binary

from chaos.mailserver import DIED

ANSWER = 1.0  # how long a server may take to answer
FIRST_START = 15.0  # how long a server may take that is told another time
HOUR = 3_600


def time_library() -> str:
    """Return the path of libfaketime, which makes a program believe in another time; '' if it is not installed."""
    try:
        shown = subprocess.run(["faketime", "-f", "+0", "env"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next(line.partition("=")[2] for line in shown.splitlines() if line.startswith("LD_PRELOAD="))


async def ask(path: Path, command: str) -> str:
    """The first line of a server's answer, '' if there is none; by hand, as nothing here may be repeated or pooled."""
    try:
        async with asyncio.timeout(ANSWER):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(command.encode() + b"\r\n")
                return (await reader.readline()).decode().strip()
            finally:
                writer.close()
    except OSError:  # TimeoutError too
        return ""


async def until_stored(path: Path) -> None:
    """Wait until a server stores what is written to it."""
    while await ask(path, "SET chaos:probe 1") != "+OK":  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def file_size(folder: Path) -> int:
    """Of the append-only file that a server writes to now."""
    return max((path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*.incr.aof"))[1]


class Server:
    """The server of the run: on a unix socket and a port of the loopback, every write on the disk when it answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.socket = folder / "s"
        self.port = free_port()
        self.library = time_library()
        self._shift = folder / "shift"  # of its clock, in seconds
        self._shift.write_text("+0")
        self._is_timed = False  # it has started with that library before
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it, on the files of the one before, and wait until it stores."""
        await self._launch()
        if self.library and not self._is_timed:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_START):
                    await until_stored(self.socket)
                    self._is_timed = True
                    return
            self.library = ""  # some hang with it
            await self.kill()
            await self._launch()
        await until_stored(self.socket)

    async def _launch(self) -> None:
        another_time = {
            "LD_PRELOAD": self.library, "FAKETIME_TIMESTAMP_FILE": str(self._shift),
            "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }  # fmt: skip
        with (self._folder / "server.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                server_binary(),
                *("--bind", "127.0.0.1", "--port", str(self.port), "--unixsocket", str(self.socket)),
                *("--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "always"),
                *("--maxmemory-policy", "noeviction"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(another_time if self.library else {})},
                start_new_session=True,
                restore_signals=False,  # SIGXFSZ stays ignored, so that a file-size limit is an error of the write
            )

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def step_back(self) -> None:
        """Set its clock back by an hour. One that is started after this has it so, too."""
        self._shift.write_text(str(int(self._shift.read_text()) - HOUR))

    async def time(self) -> int:
        """Return what it takes for the time, in seconds; 0 if it does not answer."""
        answer = await self.ask("EVAL \"return tonumber(redis.call('TIME')[1])\" 0")
        return int(answer[1:]) if answer.startswith(":") else 0

    async def ask(self, command: str) -> str:
        return await ask(self.socket, command)

    async def insist(self, command: str) -> None:
        """Ask until it is done: the server may be paused, or this connection be killed."""
        while await self.ask(command) != "+OK":  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class MailServer:
    """The mail server of a run, a process of its own (``chaos.mailserver``) on a port of the loopback."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.is_away = False  # for long: nobody starts it
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        with (self._folder / "mail.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "chaos.mailserver", str(self.port), str(self._folder)),
                cwd=Path(__file__).parent.parent,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if not await self._process.stdout.readline():
            raise RuntimeError("the mail server has not started")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def behave(self, manner: str) -> None:
        """Tell it how to behave, until it is told otherwise."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{manner}\n".encode())

    async def dies(self, within: float) -> bool:
        """Wait until it has died as it was told; return False if it does not in time."""
        assert self._process is not None
        try:
            async with asyncio.timeout(within):
                return await self._process.wait() == DIED
        except TimeoutError:
            return False


class Embedded:
    """The server behind ``embedded:///folder``, which its users start. Its processes are known by their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "run" / "server.sock"

    @property
    def keeper(self) -> int | None:
        return self._find(b"\0" + os.fsencode(self.folder) + b"\0", b"supervisor.py")

    @property
    def server(self) -> int | None:
        return self._find(os.fsencode(self.socket))

    def _find(self, *named: bytes) -> int | None:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes()
                if all(name in command for name in named):
                    return int(process.name)
        return None

    def end(self) -> None:
        """Kill what is left of it: first the keeper, which would start the server again."""
        while (pid := self.keeper or self.server) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
