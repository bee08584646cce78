"""What metrics and traces cost an add and a digest: nothing if they are not asked for, and how much if they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from aiodigest import JSON, Digest, DigestEngine, Entry
from aiodigest.integrations.opentelemetry import instrument
from benchmarks.baselines import VALUE, spread
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn, timed

TASKS = 200
SLICES = 5  # a round of adds: what instrumentation costs them is less than what the machine does meanwhile
RECORDS = 10  # a digest, each added in a span of its own

Instrument = Callable[[DigestEngine[JSON]], None]
Span = Callable[[], AbstractContextManager[object]]


def nothing(engine: DigestEngine[JSON]) -> None:
    """Leave an engine as it is."""


@contextmanager
def sdk() -> Generator[tuple[Instrument, Span], None, None]:
    """OpenTelemetry's own SDK: how to instrument an engine with it, and to begin a span."""
    meters = MeterProvider([PrometheusMetricReader(registry=CollectorRegistry())], shutdown_on_exit=False)
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    tracer = tracers.get_tracer("benchmark")
    try:
        yield (
            partial(instrument, meter_provider=meters, tracer_provider=tracers),
            partial(tracer.start_as_current_span, "request"),
        )
    finally:
        tracers.shutdown()
        meters.shutdown()


async def adding(setting: Setting, adds: int, instrument: Instrument, span: Span) -> float:
    """Microseconds an add, of many at once."""
    await setting.flush()
    engine = DigestEngine[JSON](setting.url, namespace="telemetry")
    instrument(engine)

    async def add(key: str, value: str) -> None:
        with span():
            await engine.add(key, value)

    async with engine:
        await spread(add, TASKS, TASKS)  # connections are made, and scripts loaded
        return await timed(partial(spread, add, adds, TASKS)) / adds * 1e6


async def digesting(setting: Setting, digests: int, instrument: Instrument, span: Span) -> float:
    """Microseconds a digest, of many that are due."""
    await setting.flush()
    engine = DigestEngine[JSON](setting.url, namespace="telemetry", timeout=60)
    instrument(engine)
    async with engine:
        for _ in range(RECORDS):
            with span():
                await engine.add_many(Entry(f"user:{number}", VALUE) for number in range(digests))
    numbers, done, began = count(1), asyncio.Event(), 0.0

    async def deliver(digest: Digest[JSON]) -> None:
        nonlocal began
        began = began or time.perf_counter()
        if next(numbers) == digests:
            done.set()

    async with engine.delivering(deliver):
        await done.wait()
        return (time.perf_counter() - began) / digests * 1e6


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    adds, digests = setting.some(10_000 // SLICES, 400), setting.some(2_000, 100)
    with sdk() as (measured, traced):
        for what, work, rounds, bound in (
            ("add", partial(adding, setting, adds), SLICES * setting.rounds, 1.05),
            ("digest", partial(digesting, setting, digests), setting.rounds, None),
        ):
            took = await in_turn(
                rounds,
                bare=partial(work, nothing, nullcontext),
                api=partial(work, instrument, nullcontext),
                spans=partial(work, nothing, traced),
                sdk=partial(work, measured, traced),
            )
            yield Row(
                f"{what}, instrumented, OpenTelemetry without SDK",
                "not instrumented",
                "us",
                took["api"],
                took["bare"],
                bound=bound,
            )
            yield Row(
                f"{what}, instrumented, with its SDK, in a span", "the same spans", "us", took["sdk"], took["spans"]
            )
