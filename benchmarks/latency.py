"""How soon a digest is delivered, and what waiting for one costs: ``make latency``, about a minute and a half.

On an embedded server in a temporary folder, with nothing else to do. Prints each figure beside its bound, and ends
with 1 if one is missed.

* From an add on an idle timeline to the start of its callback, added in the worker's process, and in another one.
* From the due time of a timeline, as the server tells it, to the start of its callback.
* The commands that an idle worker sends in a minute, as ``MONITOR`` shows them; what its scripts call is not sent.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles

from figures import Figure
from redis.asyncio import Redis

from aiodigest import Digest, DigestEngine, Entry, Policy
from aiodigest.embedded import EmbeddedServer

SAMPLES = 200
WARM_UP = 10
TIMELINES = 500
FIRST_DUE, LAST_DUE = 2.0, 6.0  # seconds after they are added
IDLE = 60.0

ADD_MEDIAN_BOUND = 10.0  # ms
LATENESS_P99_BOUND = 20.0  # ms
COMMANDS_BOUND = 8


def figures_of(
    name: str, delays: Sequence[float], *, median_bound: float | None = None, p99_bound: float | None = None
) -> list[Figure]:
    """The median, the 99th percentile and the worst of some delays (seconds), in milliseconds."""
    return [
        Figure(f"{name}: median of {len(delays)}", median(delays) * 1000, "ms", median_bound),
        Figure(f"{name}: p99", quantiles(delays, n=100)[98] * 1000, "ms", p99_bound),
        Figure(f"{name}: worst", max(delays) * 1000, "ms"),
    ]


@asynccontextmanager
async def delivering(
    folder: Path, namespace: str, started: Callable[[Digest[float]], None], policy: Policy | Callable[[str], Policy]
) -> AsyncGenerator[DigestEngine[float], None]:
    """A worker that tells ``started`` of each digest as soon as its callback starts."""
    engine = DigestEngine(f"embedded://{folder}", namespace=namespace, value_type=float, policy=policy)

    @engine.deliver
    async def deliver(digest: Digest[float]) -> None:
        started(digest)

    async with engine.delivering():
        yield engine


# From an add to its callback. A record's value is the moment of its add, on a clock that all processes share.


class Delays:
    """How long after its add each digest began."""

    def __init__(self) -> None:
        self._delays: list[float] = []
        self._all = asyncio.Event()

    def started(self, digest: Digest[float]) -> None:
        self._delays.append(time.monotonic() - digest.records[0].value)
        if len(self._delays) == WARM_UP + SAMPLES:
            self._all.set()

    async def samples(self) -> list[float]:
        async with asyncio.timeout(60):
            await self._all.wait()
        return self._delays[WARM_UP:]


async def add_one_by_one(engine: DigestEngine[float]) -> None:
    """Add to one idle timeline after the other, each at a moment when the worker has long gone to sleep again."""
    for number in range(WARM_UP + SAMPLES):
        await asyncio.sleep(random.uniform(0.03, 0.05))
        await engine.add(str(number), time.monotonic())


async def adds_in_one_process(folder: Path) -> list[float]:
    delays = Delays()
    async with delivering(folder, "one-process", delays.started, Policy()) as engine:
        await add_one_by_one(engine)
        return await delays.samples()


async def adds_in_another_process(folder: Path) -> list[float]:
    delays = Delays()
    async with delivering(folder, "two-processes", delays.started, Policy()):
        other = await asyncio.create_subprocess_exec(sys.executable, __file__, "add", str(folder))
        if await other.wait() != 0:
            raise SystemExit("the process that adds has failed")
        return await delays.samples()


async def add_from_here(folder: Path) -> None:
    """What the other process does."""
    async with DigestEngine(f"embedded://{folder}", namespace="two-processes", value_type=float) as engine:
        await add_one_by_one(engine)


# From a due time to its callback.


async def lateness(folder: Path) -> list[float]:
    due: dict[str, float] = {}
    begun: dict[str, float] = {}
    all_begun = asyncio.Event()

    def started(digest: Digest[float]) -> None:
        begun[digest.key] = time.time()  # the server's clock too, as it runs on this machine
        if len(begun) == TIMELINES:
            all_begun.set()

    delays = {str(number): random.uniform(FIRST_DUE, LAST_DUE) for number in range(TIMELINES)}

    def policy(key: str) -> Policy:
        return Policy(initial_delay=delays[key])

    async with delivering(folder, "lateness", started, policy) as engine:
        await engine.add_many(Entry(key, 0.0) for key in delays)
        async for timeline in engine.timelines("waiting"):
            due[timeline.key] = timeline.due.timestamp()
        if len(due) != TIMELINES:
            raise SystemExit(f"{len(due)} of {TIMELINES} timelines are waiting: this machine is too slow for this")
        async with asyncio.timeout(LAST_DUE + 30):
            await all_begun.wait()
    return [begun[key] - due[key] for key in due]


# What waiting costs.


async def idle_commands(folder: Path, socket: Path) -> Counter[str]:
    """The commands that a worker sends in a minute in which nothing happens, one that has delivered before."""
    sent: Counter[str] = Counter()
    delivered = asyncio.Event()

    def started(digest: Digest[float]) -> None:
        delivered.set()

    async with delivering(folder, "idle", started, Policy()) as engine:
        await engine.add("once", 0.0)
        await delivered.wait()
        await asyncio.sleep(1)
        async with Redis(unix_socket_path=str(socket), socket_timeout=None) as client, client.monitor() as monitor:
            try:
                async with asyncio.timeout(IDLE):
                    while True:
                        command = await monitor.next_command()
                        if command["client_type"] != "lua":
                            sent[command["command"].split()[0].upper()] += 1
            except TimeoutError:
                pass
    return sent


async def main() -> int:
    figures: list[Figure] = []

    def show(*some: Figure) -> None:
        figures.extend(some)
        for figure in some:
            print(figure, flush=True)

    with tempfile.TemporaryDirectory(prefix="aid") as name:
        folder = Path(name)
        server = EmbeddedServer(folder)
        await server.start()
        try:
            here, there = await adds_in_one_process(folder), await adds_in_another_process(folder)
            show(*figures_of("add to callback, same process", here, median_bound=ADD_MEDIAN_BOUND))
            show(*figures_of("add to callback, another process adds", there, median_bound=ADD_MEDIAN_BOUND))
            show(*figures_of("due time to callback", await lateness(folder), p99_bound=LATENESS_P99_BOUND))
            sent = await idle_commands(folder, server.socket)
            show(Figure("an idle worker", sum(sent.values()), "commands/min", COMMANDS_BOUND))
            print("   ", ", ".join(f"{count} {command}" for command, count in sorted(sent.items())))
        finally:
            await server.stop()
    return int(any(figure.missed for figure in figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["add"]:
        asyncio.run(add_from_here(Path(sys.argv[2])))
    else:
        sys.exit(asyncio.run(main()))
