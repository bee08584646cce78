"""The measurements of ``aiodigest bench``, each for its share of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from time import perf_counter

from aiodigest import AiodigestError, BackendUnavailable, Digest, DigestEngine, Entry

VALUE = "x" * 198  # 200 bytes as JSON
MOST = 50_000  # records that are held at any time
TASKS = 200
MANY = 1_000  # entries of one add_many
TIMELINES = 1_000  # that are delivered in one go
SIZE = 10  # records of a digest
PATIENCE = 30  # seconds for work that takes milliseconds
PAUSE = 0.005  # seconds between two adds whose callbacks are waited for, so that the worker sleeps


@dataclass(frozen=True, slots=True)
class Figures:
    """The speed of a server and this machine: seconds, or a number per second (``adds_...``, ``digests``)."""

    server: str
    round_trip: float
    add: float
    adds_by_tasks: float
    adds_by_add_many: float
    digests: float
    latency: float
    latency_p99: float


async def measure(
    adder: DigestEngine[str], worker: DigestEngine[str], seconds: float, tell: Callable[[int], None]
) -> Figures:
    """Measure all figures, in about ``seconds``; ``tell`` is called with the seconds gone by."""
    findings = await adder.examine()
    version = next((finding.message for finding in findings if finding.check == "version"), adder.url)
    trips = [finding.value or 0 for finding in findings if finding.check == "round trip"]
    with _ticking(tell):
        alone = await _add_alone(adder, 0.2 * seconds)
        by_tasks = await _add_by_tasks(adder, 0.2 * seconds)
        by_add_many = await _add_many(adder, 0.2 * seconds)
        digests = await _deliver(adder, worker, 0.2 * seconds)
        latencies = await _wait_for_callbacks(adder, worker, 0.2 * seconds)
    p99 = quantiles(latencies, n=100, method="inclusive")[-1]
    return Figures(version, median(trips), median(alone), by_tasks, by_add_many, digests, median(latencies), p99)


@contextmanager
def _ticking(tell: Callable[[int], None]) -> Generator[None, None, None]:
    """Report each second that goes by."""
    loop = asyncio.get_running_loop()

    async def tick() -> None:
        for second in count():
            tell(second)
            await asyncio.sleep(1)

    ticking = loop.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()


async def _delete(engine: DigestEngine[str], keys: int) -> None:
    await asyncio.gather(*(engine.delete(_key(number)) for number in range(keys)))


def _key(number: int) -> str:
    return f"timeline:{number}"


async def _add_alone(engine: DigestEngine[str], seconds: float) -> list[float]:
    """Time adds that are awaited one after the other."""
    took: list[float] = []
    ends = perf_counter() + seconds
    while not took or (perf_counter() < ends and len(took) < MOST):
        began = perf_counter()
        await engine.add(_key(len(took) % TASKS), VALUE)
        took.append(perf_counter() - began)
    await _delete(engine, TASKS)
    return took


async def _add_by_tasks(engine: DigestEngine[str], seconds: float) -> float:
    """Measure adds per second from tasks that each await their own."""
    added, began = 0, perf_counter()
    ends = began + seconds

    async def add(key: str) -> None:
        nonlocal added
        while True:  # once at least, however late a task begins
            await engine.add(key, VALUE)
            added += 1
            if perf_counter() >= ends or added >= MOST - TASKS:
                return

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(TASKS):
                group.create_task(add(_key(number)))
    except* AiodigestError as errors:  # one line tells of one
        raise errors.exceptions[0] from None
    rate = added / (perf_counter() - began)
    await _delete(engine, TASKS)
    return rate


async def _add_many(engine: DigestEngine[str], seconds: float) -> float:
    """Measure records per second added by calls of ``add_many``."""
    added, began = 0, perf_counter()
    while added == 0 or (perf_counter() < began + seconds and added < MOST):
        await engine.add_many(Entry(_key(number % TASKS), VALUE) for number in range(MANY))
        added += MANY
    rate = added / (perf_counter() - began)
    await _delete(engine, TASKS)
    return rate


async def _deliver(adder: DigestEngine[str], worker: DigestEngine[str], seconds: float) -> float:
    """Measure digests per second from one worker, whose callback does nothing."""
    rates: list[float] = []
    ends = perf_counter() + seconds
    while not rates or perf_counter() < ends:
        await adder.add_many(Entry(_key(number % TIMELINES), VALUE) for number in range(TIMELINES * SIZE))
        rates.append(await _deliver_all(adder, worker))
    return median(rates)


async def _wait(event: asyncio.Event, engine: DigestEngine[str]) -> None:
    """Wait for something that only a worker brings about, which says nothing while the server is away."""
    for _ in range(PATIENCE):
        try:
            async with asyncio.timeout(1):
                await event.wait()
            return
        except TimeoutError:
            await engine.stats()  # raises BackendUnavailable if it is
    raise BackendUnavailable(f"what was added to {engine.url} is not delivered within {PATIENCE} s")


async def _deliver_all(adder: DigestEngine[str], worker: DigestEngine[str]) -> float:
    times: list[float] = []
    done = asyncio.Event()

    async def receive(digest: Digest[str]) -> None:
        times.append(perf_counter())
        if len(times) == TIMELINES:
            done.set()

    async with worker.delivering(receive):
        await _wait(done, adder)
    return (len(times) - 1) / (times[-1] - times[0])  # without the time in which it connects


async def _wait_for_callbacks(adder: DigestEngine[str], worker: DigestEngine[str], seconds: float) -> list[float]:
    """Time the way from the call of an add to that of the callback; the worker hears of the add from the server."""
    called = asyncio.Event()
    at = 0.0

    async def receive(digest: Digest[str]) -> None:
        nonlocal at
        at = perf_counter()
        called.set()

    took: list[float] = []
    async with worker.delivering(receive):
        ends = perf_counter() + seconds
        while len(took) < 2 or perf_counter() < ends:
            called.clear()
            await asyncio.sleep(PAUSE)
            began = perf_counter()
            await adder.add(_key(len(took) % TASKS), VALUE)
            await _wait(called, adder)
            took.append(at - began)
    return took
