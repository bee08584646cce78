"""``aiodigest bench``: the speed of adds and deliveries on the user's own server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from secrets import token_hex
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated

import typer

from aiodigest import AiodigestError, BackendUnavailable, Digest, DigestEngine, Entry, Policy, RetryPolicy
from aiodigest.cli.event_loop import run_service, run_until, stopped_by
from aiodigest.cli.options import EMBEDDED, AsJson, Timeout, Url
from aiodigest.cli.output import INTERRUPTED, print_json, print_table, progress_bar, say

POLICY = Policy(minimum_delay=0, increment_delay=0, ttl=3600)  # a run that is killed leaves its records for two hours
SHARDS = 16  # on a cluster
VALUE = "x" * 198  # 200 bytes as JSON
MOST = 50_000  # records that are held at any time
MEGABYTES = MOST * (len(VALUE) + 100) / 1e6  # a record takes about 100 bytes more
TASKS = 200
MANY = 1_000  # entries of one add_many
KEYS = [f"timeline:{number}" for number in range(1_000)]  # of the timelines that are delivered in one go
SIZE = 10  # records of a digest
DELIVERY_TIMEOUT = 30  # seconds for work that takes milliseconds
PAUSE = 0.005  # seconds between two adds whose callbacks are timed, so that the worker sleeps

SECONDS = typer.Option(min=1, max=600, metavar="SECONDS", help="About how long to measure.")


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


def bench(
    url: Url = EMBEDDED, seconds: Annotated[float, SECONDS] = 10, timeout: Timeout = 5.0, in_json: AsJson = False
) -> int:
    """Measure the speed of adds and deliveries on a server.

    A bare round trip to the server is shown beside it. It works in a namespace of its own, which it removes at the
    end, or when interrupted. The removal scans all keys of the server, and takes as long as that does.
    """
    figures = run_service(_bench(url, seconds, timeout))
    if figures is None:
        return INTERRUPTED
    if in_json:
        print_json(asdict(figures))
        return 0
    rows: list[tuple[str, str, str]] = []
    for what, figure, is_time in (
        ("bare round trip", figures.round_trip, True),
        ("add, one after the other", figures.add, True),
        ("adds by 200 tasks", figures.adds_by_tasks, False),
        ("adds by add_many", figures.adds_by_add_many, False),
        ("digests of ten records", figures.digests, False),
        ("add to callback, median", figures.latency, True),
        ("add to callback, 99 of 100", figures.latency_p99, True),
    ):
        shown = f"{figure * 1000:,.3g} ms" if is_time else f"{figure:,.0f} a second"
        rows.append((what, shown, f"{(figure if is_time else 1 / figure) / figures.round_trip:.3g}"))
    print_table((figures.server, "", "round trips each"), rows)
    return 0


async def _bench(url: str, seconds: float, timeout: float) -> Figures | None:
    """Return the figures; None if it was interrupted."""
    namespace, shards = f"bench-{token_hex(8)}", SHARDS if "+cluster://" in url else None

    def engine() -> DigestEngine[str]:
        return DigestEngine(
            url, namespace=namespace, value_type=str, policy=POLICY, retry=RetryPolicy(max_attempts=1), shards=shards,
            timeout=timeout, drain_timeout=1,
        )  # fmt: skip

    with stopped_by(signal.SIGINT, signal.SIGTERM) as stop:
        async with engine() as first:
            await first.try_erase()  # else what is written might stay
            amount = f"up to {MOST:,} records ({MEGABYTES:.0f} MB) at a time in the namespace {namespace}"
            removal = "then scans all keys of the server to remove them"
            say(f"for about {seconds:g} s this writes {amount} on {first.url}, and {removal}")
        try:
            began = perf_counter()
            bar = progress_bar("measuring", round(seconds), lambda: int(perf_counter() - began))
            async with bar, engine() as adder:  # leaving it sends everything queued
                return await run_until(stop, measure(adder, engine(), seconds))
        finally:
            try:
                async with engine() as last:
                    await last.erase()
            except BackendUnavailable as error:
                left = f"the contents of the namespace {namespace} are left there"
                raise BackendUnavailable(f"{error}; {left}") from error


async def measure(adder: DigestEngine[str], worker: DigestEngine[str], seconds: float) -> Figures:
    """Measure all figures, in about ``seconds``."""
    findings = await adder.examine()
    version = next((finding.message for finding in findings if finding.check == "version"), adder.url)
    trips = [finding.value or 0 for finding in findings if finding.check == "round trip"]
    share = 0.2 * seconds

    def add_one(turn: int) -> Awaitable[bool]:
        return adder.add(KEYS[turn % TASKS], VALUE)

    def add_many(turn: int) -> Awaitable[list[bool]]:
        return adder.add_many(Entry(KEYS[number % TASKS], VALUE) for number in range(MANY))

    add, _ = await _adds(adder, share, add_one)
    _, by_tasks = await _adds(adder, share, add_one, tasks=TASKS)
    _, by_add_many = await _adds(adder, share, add_many, size=MANY)
    digests = median([await _deliver(adder, worker) for _ in _turns(share)])
    latencies = await _wait_for_callbacks(adder, worker, share)
    p99 = quantiles(latencies, n=100, method="inclusive")[-1]
    return Figures(version, median(trips), add, by_tasks, by_add_many, digests, median(latencies), p99)


def _turns(seconds: float, *, least: int = 1, most: int = MOST) -> Iterator[int]:
    """Count from 0 for so many seconds, or longer for the ``least`` turns."""
    ends = perf_counter() + seconds
    for turn in range(most):
        if turn >= least and perf_counter() >= ends:
            break
        yield turn


async def _adds(
    engine: DigestEngine[str], seconds: float, add: Callable[[int], Awaitable[object]], *, tasks: int = 1, size: int = 1
) -> tuple[float, float]:
    """Measure adds of ``size`` records by tasks that each await their own: median seconds, and records a second."""
    took: list[float] = []
    turns, began = _turns(seconds, most=MOST // size), perf_counter()

    async def work() -> None:
        for turn in turns:
            start = perf_counter()
            await add(turn)
            took.append(perf_counter() - start)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(work())
    except ExceptionGroup as errors:  # no except*, from which Python before 3.11.4 lets no single error out
        if errors.split(AiodigestError)[1] is not None:
            raise
        raise errors.exceptions[0] from None  # a message is one line, of one error
    rate = size * len(took) / (perf_counter() - began)
    await asyncio.gather(*map(engine.delete, KEYS[:TASKS]))
    return median(took), rate


async def _wait(event: asyncio.Event, engine: DigestEngine[str]) -> None:
    """Wait for something that only a worker does, which is silent while the server is away."""
    for _ in range(DELIVERY_TIMEOUT):
        try:
            await asyncio.wait_for(event.wait(), 1)
            return
        except TimeoutError:
            await engine.stats()  # raises BackendUnavailable if it is
    raise BackendUnavailable(f"what was added to {engine.url} was not delivered within {DELIVERY_TIMEOUT} s")


async def _deliver(adder: DigestEngine[str], worker: DigestEngine[str]) -> float:
    """Measure digests per second from one worker, whose callback does nothing."""
    times: list[float] = []
    done = asyncio.Event()

    async def receive(digest: Digest[str]) -> None:
        times.append(perf_counter())
        if len(times) == len(KEYS):
            done.set()

    await adder.add_many(Entry(key, VALUE) for _ in range(SIZE) for key in KEYS)
    async with worker.delivering(receive):
        await _wait(done, adder)
    return (len(times) - 1) / (times[-1] - times[0])  # without the time in which it connects


async def _wait_for_callbacks(adder: DigestEngine[str], worker: DigestEngine[str], seconds: float) -> list[float]:
    """Time each add, from its call to that of the callback; the worker learns of the add from the server."""
    took: list[float] = []
    called, began = asyncio.Event(), 0.0

    async def receive(digest: Digest[str]) -> None:
        took.append(perf_counter() - began)
        called.set()

    async with worker.delivering(receive):
        for turn in _turns(seconds, least=2):
            called.clear()
            await asyncio.sleep(PAUSE)
            began = perf_counter()
            await adder.add(KEYS[turn % TASKS], VALUE)
            await _wait(called, adder)
    return took
