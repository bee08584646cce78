"""Users of embedded servers, as processes of their own, and a look at the processes and files behind a server."""

# pyright: reportUnknownMemberType=false
# (redis-py leaves the types of its **kwargs out)

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio
import redis.exceptions

from aiodigest.backends.embedded import server as embedded
from aiodigest.backends.embedded.server import EmbeddedServer

USER = """
import asyncio, os, sys, types{imports}
from pathlib import Path

# Without the rest of the package, whose import would take most of a test's time.
sys.modules["aiodigest"] = package = types.ModuleType("aiodigest")
package.__path__ = [os.environ["AIODIGEST_PACKAGE"]]

from aiodigest.backends.embedded.server import EmbeddedServer

async def main():
    server = EmbeddedServer(Path(sys.argv[1]))
    try:
        await server.start()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        return
    {then}
    print(server.pid, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()

{before}
asyncio.run(main())
"""


class User:
    """Another process that uses the server of a folder: until its standard input ends, or it is killed."""

    def __init__(self, folder: Path, then: str = "pass", before: str = "", imports: str = "", **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER.format(then=then, before=before, imports=imports), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True,
            env={**os.environ, "AIODIGEST_PACKAGE": str(Path(embedded.__file__).parents[2]), **variables},
        )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self._input, self._output = self.process.stdin, self.process.stdout

    async def says(self) -> str:
        return (await asyncio.to_thread(self._output.readline)).strip()

    async def server(self) -> int:
        said = await self.says()
        assert said.isdigit(), said
        return int(said)

    def leave(self) -> None:
        self._input.close()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._input.close()
        self._output.close()


NewUser = Callable[..., User]


def all_told(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, str | None]]:
    """The server's process and why it is down, after each line of its supervisor; a look now and then misses some."""
    told: list[tuple[int | None, str | None]] = []
    read_status = embedded._Connection.read_status

    async def read_and_tell(connection: embedded._Connection) -> bool:
        lives = await read_status(connection)
        told.append((server.pid, server.why_down()))
        return lives

    monkeypatch.setattr(embedded._Connection, "read_status", read_and_tell)
    return told


def status(pid: int) -> dict[str, str]:
    with suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {"State": "Z (gone)", "PPid": "0"}


def lives(pid: int) -> bool:
    return not status(pid)["State"].startswith("Z")


def pid_of(server: EmbeddedServer) -> int:
    assert server.pid
    return server.pid


def supervisor_of(pid: int) -> int:
    return int(status(pid)["PPid"])


def waits(pid: int) -> int:
    """How often the process has waited for something. One that spins does not wait."""
    return int(status(pid)["voluntary_ctxt_switches"])


def seconds_used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def opened_by(pid: int) -> set[str]:
    opened: set[str] = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            opened.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return opened


def processes_of(server: EmbeddedServer) -> list[int]:
    """Every process that names the folder or the socket in its command line, but for this one and its own children."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if os.fsencode(server.folder) in command or os.fsencode(server.socket) in command:
                found.append(int(entry.name))
    return [pid for pid in found if supervisor_of(pid) != os.getpid()]


def serve_by(monkeypatch: pytest.MonkeyPatch, program: Path, script: str | None) -> None:
    """Let a script be the server; without one the program cannot be run."""
    program.write_text(script or "")
    program.chmod(0o700 if script else 0o600)
    monkeypatch.setenv("AIODIGEST_SERVER", str(program))


async def works(client: redis.asyncio.Redis) -> bool:
    with suppress(redis.exceptions.RedisError, OSError):
        return bool(await client.ping())
    return False


@contextmanager
def data_folder() -> Generator[Path]:
    """A data folder. After the test no process may be left that has to do with it."""
    parent = Path(tempfile.mkdtemp(prefix="aiodigest-test-"))
    try:
        yield parent / "data"
    finally:
        server = EmbeddedServer(parent / "data")
        deadline = time.monotonic() + 60
        while (left := processes_of(server)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(parent)
        assert not left, "processes were left behind"


@contextmanager
def users_of(folder: Path) -> Generator[NewUser]:
    """What starts a user; at the end all of them are killed."""
    users: list[User] = []

    def new_user(**settings: str) -> User:
        users.append(User(folder, **settings))
        return users[-1]

    try:
        yield new_user
    finally:
        for each in users:
            each.end()


@asynccontextmanager
async def started(folder: Path) -> AsyncGenerator[tuple[EmbeddedServer, redis.asyncio.Redis]]:
    server = EmbeddedServer(folder)
    client = redis.asyncio.Redis.from_url(await server.start(), decode_responses=True)
    try:
        yield server, client
    finally:
        await client.aclose()
        await server.stop()
