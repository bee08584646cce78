"""Real primaries, replicas and sentinels for tests, on loopback ports, and a relay that fails as networks do."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal, Self

import redis
from clusters import UNTROUBLED
from ports import free_port
from servers import PROMPT, Server, online, running_server, server_binary

PATIENCE = 60.0  # seconds for what comes about by itself, after which a test hangs
SERVICE = "mail"


async def until(reached: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait for what can only be asked for."""
    async with asyncio.timeout(patience):
        while not (await answer if isawaitable(answer := reached()) else answer):  # noqa: ASYNC110  (no event tells it)
            await asyncio.sleep(0.01)


@contextmanager
def server_on(port: int, *options: str) -> Generator[Server]:
    """A server on a TCP port, which sends a new replica its data at once."""
    with running_server("--port", str(port), "--bind", "127.0.0.1", *PROMPT, *options) as one:
        yield one


def port_of(server: Server) -> int:
    return int(server.options[1])


def pid_of(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


def role_of(server: Server) -> str:
    return server.ask("INFO", "replication")["role"]


def follow(server: Server, primary: Server | None) -> None:
    """Make a server a replica of another, or a primary."""
    server.ask("REPLICAOF", *(("127.0.0.1", port_of(primary)) if primary else ("NO", "ONE")))


def follows(server: Server) -> bool:
    """Whether a replica has what its primary has."""
    return server.ask("INFO", "replication").get("master_link_status") == "up"


freeze, thaw = Server.freeze, Server.thaw


@asynccontextmanager
async def replicated(replicas: int = 1) -> AsyncGenerator[list[Server]]:
    """A primary, and replicas of it."""
    with ExitStack() as stack:
        primary, *others = servers = [stack.enter_context(server_on(free_port())) for _ in range(1 + replicas)]
        for replica in others:
            follow(replica, primary)
        await until(lambda: all(map(follows, others)) and len(online(primary.ask("INFO", "replication"))) == replicas)
        yield servers


@dataclass
class Watched:
    """A primary, its two replicas, and the three sentinels that watch them."""

    servers: Sequence[Server]
    ports: Sequence[int]
    sentinels: Sequence[subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}/0"

    def facts(self) -> list[dict[str, Any]]:
        """What each sentinel that is there knows of the primary."""
        found: list[dict[str, Any]] = []
        for number in range(3):
            with suppress(redis.ConnectionError):
                found.append(self.order(number, "SENTINEL MASTER", SERVICE))
        return found

    def order(self, number: int, *command: str) -> Any:
        """Give a sentinel a command."""
        with redis.Redis(port=self.ports[number]) as client:
            asked: Any = client
            return asked.execute_command(*command)

    def primary(self) -> Server | None:
        """The server that every sentinel names, if they are at one; it is up, and can be written to."""
        named = {each["port"] for each in self.facts() if each["flags"] == "master"}
        for server in self.servers:
            if named == {port_of(server)} and role_of(server) == "master":
                return server
        return None


READY = {"num-slaves": 2, "num-other-sentinels": 2, "flags": "master", "role-reported": "master"}  # for a failover


@asynccontextmanager
async def watched(silence: int = UNTROUBLED) -> AsyncGenerator[Watched]:
    """Three sentinels that know each other from the beginning, which takes them seconds to find out.

    They replace the primary after ``silence`` ms without an answer.
    """
    async with replicated(2) as servers:
        folder = Path(tempfile.mkdtemp(prefix="aid-sentinels"))
        ports, names = [free_port() for _ in range(3)], [f"{number:040x}" for number in range(1, 4)]
        primary, *replicas = [f"{SERVICE} 127.0.0.1 {port_of(server)}" for server in servers]
        sentinels: list[subprocess.Popen[bytes]] = []
        try:
            for port, name in zip(ports, names, strict=True):
                lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", f"sentinel myid {name}"]
                lines += [f"sentinel monitor {primary} 2", f"sentinel down-after-milliseconds {SERVICE} {silence}"]
                lines += [f"sentinel failover-timeout {SERVICE} 3000"]
                lines += [f"sentinel known-replica {replica}" for replica in replicas]
                for other, its_name in zip(ports, names, strict=True):
                    if other != port:
                        lines.append(f"sentinel known-sentinel {SERVICE} 127.0.0.1 {other} {its_name}")
                file = folder / f"{port}.conf"
                file.write_text("\n".join([*lines, ""]))
                command = [server_binary(), str(file), "--sentinel"]
                sentinels.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL))
            trio = Watched(servers, ports, sentinels)
            await until(lambda: sum(facts.items() >= READY.items() for facts in trio.facts()) == 3)
            yield trio
        finally:
            for sentinel in sentinels:
                sentinel.kill()
                sentinel.wait()
            shutil.rmtree(folder, ignore_errors=True)


class Relay:
    """Stands between a client and a server, as a network does: ``mode`` says what becomes of connections.

    "pass" lets bytes through, "hole" swallows them both ways and for ever while the connection stays open, and "cut"
    closes a connection that something is sent on.
    """

    def __init__(self, port: int) -> None:
        self.port = port  # that of the server
        self.connections = 0
        self.mode: Literal["pass", "hole", "cut"] = "pass"
        self._lost: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in list(self._open):
            writer.transport.abort()
        await until(lambda: not self._open)

    def swallow(self) -> None:
        """Let nothing through on any connection of now, and of those to come until ``mode`` changes."""
        self.mode = "hole"
        self._lost |= self._open

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        if self.mode == "hole":
            self._lost.add(writer)
        ends = [writer]
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self.port)
            ends.append(back_writer)
            ways = [self._pipe(reader, back_writer, writer), self._pipe(back_reader, writer, writer)]
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        except OSError:
            pass  # the server is not there
        finally:
            for end in ends:
                end.transport.abort()
            self._open.discard(writer)
            self._lost.discard(writer)

    async def _pipe(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, user: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 20):
                if self.mode == "cut":
                    return
                if user not in self._lost:
                    sink.write(data)
