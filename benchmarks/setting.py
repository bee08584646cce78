"""Where a comparison runs: a fresh server, how much of everything, and rounds in turn."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as NotThere

from aiodigest.backends.embedded.server import find_binary
from benchmarks.peers.environments import Peer, Peers, run
from benchmarks.programs import ProgramFailed, running

Result = TypeVar("Result")
FOLDER = Path(".bench")  # of environments and results
LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop] | None] = {
    "asyncio": None,
    "uvloop": uvloop.new_event_loop,
}


class LeftOut(Exception):
    """What was to be measured cannot be, and the others can do without it."""


@dataclass(frozen=True)
class Setting:
    """A server, how much is done on it, and the programs of peers."""

    url: str  # what all others use
    port: int
    loop: str  # of LOOPS
    rounds: int
    scale: float  # 1: as much as the figures ask for
    peers: Peers = field(default_factory=Peers)
    on_disk: bool = False  # servers write to disk before they answer: this one, and those that a comparison starts
    before: str = "HEAD"  # the commit that is compared with
    folder: Path = FOLDER

    @property
    def found(self) -> Sequence[Peer]:
        """The peers that can be run: on asyncio, as they are by themselves."""
        return list(self.peers.pythons) if self.loop == "asyncio" else []

    async def ask(self, peer: Peer, what: str, count: int, timeout: float = 120) -> Mapping[str, float]:
        """What a peer's program measures; one that fails is left out from then on."""
        try:
            return await run(peer, self.peers.pythons[peer], what, self.url, "--count", count, timeout=timeout)
        except ProgramFailed as error:
            self.peers.leave_out(peer.name, error)
            raise LeftOut from error

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
    client: Any = Redis(port=port)
    try:
        async with running(find_binary(), "--dir", folder, *options, stdout=DEVNULL), client:
            for _ in range(1_000):
                try:
                    info = await client.info("server")
                    break
                except NotThere:
                    await asyncio.sleep(0.01)
            else:
                raise ProgramFailed("the server does not start")
            name = info.get("server_name", "redis")
            yield f"{name} {info.get(f'{name}_version', info['redis_version'])}", port
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def play(loop: str, work: Coroutine[Any, Any, Result]) -> Result:
    """Run something on an event loop of a kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(work)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that something takes; without the garbage of what was measured before it."""
    return (await clocked(work))[0]


async def clocked(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """The same, and the seconds that this process computed meanwhile, all its threads together."""
    gc.collect()
    began, computed = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - began, time.process_time() - computed


async def in_turn(rounds: int, **works: Callable[[], Awaitable[float]]) -> dict[str, list[float]]:
    """Measure several things a round, one after the other, every other round backwards; without what is left out."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(samples) if number % 2 == 0 else list(reversed(samples)):
            try:
                samples[name].append(await works[name]())
            except LeftOut:
                del samples[name]
    return samples
