"""Runs ``python -m aiodigest`` for tests: as a process, with a data folder of its own, and never without a deadline."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import IO, Any, TypeAlias

import pytest
from servers import Server

from aiodigest import Delivery, DigestEngine, Entry, Policy
from aiodigest.cli import app

ROOT = Path(__file__).parents[1]
Command: TypeAlias = Callable[..., tuple[int, str, str]]
DEADLINE = 60.0


def environment(data: Path) -> dict[str, str]:
    """Nothing of the user's own settings gets in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIODIGEST_")}
    return {**kept, "AIODIGEST_DATA": str(data), "PYTHONPATH": str(ROOT), "TERM": "dumb"}


def aiodigest(
    data: Path, *arguments: str, input: bytes = b"", cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    command, settings = [sys.executable, "-m", "aiodigest", *arguments], {**environment(data), **variables}
    return subprocess.run(command, input=input, env=settings, cwd=cwd, capture_output=True, timeout=DEADLINE)


def digests(output: bytes) -> list[dict[str, Any]]:
    """The complete lines of an output of ``pipe --output json``."""
    return [json.loads(line) for line in output.split(b"\n")[:-1]]


def ids(output: bytes) -> list[str]:
    """The ids of all records in complete lines, in order."""
    return [record["id"] for digest in digests(output) for record in digest["records"]]


def ndjson(objects: Iterable[object]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in objects)


async def attempt(
    url: str, *entries: Entry[Any], error: Exception | None = None, namespace: str = "mail", **options: Any
) -> None:
    """Add entries, and try once to deliver each timeline, to a callback that may fail."""
    attempts: asyncio.Queue[Delivery] = asyncio.Queue()

    async def deliver(digest: object) -> None:
        if error is not None:
            raise error

    engine: DigestEngine[Any] = DigestEngine(url, namespace=namespace, **options)
    engine.observe(attempts.put_nowait)
    async with engine.delivering(deliver):
        await engine.add_many(entries)
        for _ in {entry.key for entry in entries}:
            await attempts.get()


def manage(server: Server, work: Callable[[DigestEngine], Any]) -> Any:
    """Do something with the namespace ``mail``, as another process would; what is added waits for long."""

    async def do() -> Any:
        async with DigestEngine(server.url, namespace="mail", policy=Policy(initial_delay=1_500)) as engine:
            return await work(engine)

    return asyncio.run(do())


def without_stalls(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Leave out what is said of a machine that did not let the command run for a while, as a busy one may."""
    return (line for line in lines if b": the event loop stood still for " not in line)


class Running:
    """The command while it runs. What it prints is collected, line by line."""

    def __init__(self, data: Path, *arguments: str, cwd: Path | None = None, read: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiodigest", *arguments],
            env=environment(data), cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.output, self.errors = b"", b""
        self._lines: dict[str, Queue[bytes]] = {"stdout": Queue(), "stderr": Queue()}
        self._readers = [self._collect(name) for name in (["stdout"] if read else []) + ["stderr"]]

    def _collect(self, name: str) -> threading.Thread:
        stream: IO[bytes] = getattr(self.process, name)

        def read() -> None:
            for line in without_stalls(stream):
                self._lines[name].put(line)
            self._lines[name].put(b"")

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def feed(self, text: bytes) -> None:
        """Give it input, and keep its standard input open."""
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def read_line(self) -> bytes:
        line = self._lines["stdout"].get(timeout=DEADLINE)
        self.output += line
        return line

    def error_line(self) -> bytes:
        line = self._lines["stderr"].get(timeout=DEADLINE)
        self.errors += line
        return line

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ask it to end, and wait until it has: its exit code."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """End its input and wait until it has ended, all output read: its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(DEADLINE)
        for reader in self._readers:
            reader.join(DEADLINE)
        self.output += b"".join(self._rest("stdout"))
        self.errors += b"".join(self._rest("stderr"))
        return code

    def _rest(self, name: str) -> Generator[bytes]:
        while not self._lines[name].empty():
            yield self._lines[name].get()


@contextmanager
def running(data: Path, *arguments: str, cwd: Path | None = None, read: bool = True) -> Generator[Running]:
    """The command, started, and gone when the test is over."""
    command = Running(data, *arguments, cwd=cwd, read=read)
    try:
        yield command
    finally:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait(DEADLINE)
        for stream in (command.process.stdin, command.process.stdout, command.process.stderr):
            assert stream is not None
            stream.close()


def no_process_is_left(data: Path) -> bool:
    """Whether all that had to do with a data folder ends (on Linux); the last of it may take a moment."""

    def mentions(process: Path) -> bool:
        try:
            return str(data).encode() in (process / "cmdline").read_bytes()
        except OSError:
            return False

    last = time.monotonic() + DEADLINE
    while any(map(mentions, Path("/proc").glob("[0-9]*"))):
        if time.monotonic() > last:
            return False
        time.sleep(0.01)
    return True


def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["aiodigest", *arguments])
        code = app.run()
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run
