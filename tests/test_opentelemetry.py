"""What OpenTelemetry is told of an engine: metrics by the standard exporter, and spans that lead back to the adds."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from textwrap import dedent
from typing import Any, TypeAlias

import pytest
from engines import Inbox, WatchedBackend, engine_on, forever, policy
from opentelemetry import trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry
from servers import Server
from userland import DEADLINE, ROOT, data_folder, environment

from aiodigest import JSON, Bounds, Digest, DigestEngine, Entry, OutcomeUnknown, Policy, RetryPolicy
from aiodigest.backend import Add
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.errors import ConfigurationError, PartialFailure, Reject, RetryAfter
from aiodigest.integrations._metrics import BUCKETS
from aiodigest.integrations.opentelemetry import instrument, measure
from aiodigest.records.entries import pack, unpack

Reply: TypeAlias = BaseException | Callable[[Digest[JSON]], Awaitable[object]] | None

KEY = "ann@example.org"
FROM_THE_SERVER = {
    "aiodigest_timelines": "gauge",
    "aiodigest_records_dropped_total": "counter",
    "aiodigest_records_buried_total": "counter",
    "aiodigest_records_duplicates_total": "counter",
    "aiodigest_records_muted_total": "counter",
    "aiodigest_dead_letters_dropped_total": "counter",
    "aiodigest_oldest_overdue_seconds": "gauge",
}
OF_THE_PROCESS = {
    "aiodigest_adds_total": "counter",
    "aiodigest_deliveries_total": "counter",
    "aiodigest_delivery_failures_total": "counter",
    "aiodigest_backoff_level": "gauge",
    "aiodigest_destinations_resting": "gauge",
    "aiodigest_room_taken_bytes": "gauge",
    "aiodigest_awaiting_room": "gauge",
    "aiodigest_throttled_seconds": "gauge",
    "aiodigest_backend_unavailable": "gauge",
}
OF_ATTEMPTS = {"aiodigest_delivery_duration_seconds": "histogram", "aiodigest_delivery_lateness_seconds": "histogram"}
NAMES = FROM_THE_SERVER | OF_THE_PROCESS | OF_ATTEMPTS


class Prometheus:
    """A provider with the standard exporter, and what it would answer."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self.registry, scope_info_enabled=False, disable_target_info=True)
        self.provider = MeterProvider([reader], shutdown_on_exit=False)
        self.provided: dict[str, Any] = {"meter_provider": self.provider}

    def scraped(self) -> dict[str, float]:
        """All samples, as they are written but for the order of labels."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                assert f"{sample.name}{{{labels}}}" not in found
                found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    async def scrape(self) -> dict[str, float]:
        """The same, in a thread, as an exporter does it."""
        return await asyncio.to_thread(self.scraped)

    def types(self) -> dict[str, str]:
        families = self.registry.collect()
        return {f"{one.name}_total" if one.type == "counter" else one.name: one.type for one in families}


class Traced:
    """A provider of tracers that keeps the spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provided: dict[str, Any] = {"tracer_provider": self.provider}
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    def spans(self, name: str = "deliver test") -> Sequence[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def added_in(self, span: ReadableSpan) -> list[str]:
        """The names of the spans that a span is linked to."""
        names = {one.context.span_id: one.name for one in self.exporter.get_finished_spans() if one.context}
        return [names[link.context.span_id] for link in span.links]


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    prometheus = Prometheus()
    yield prometheus
    prometheus.provider.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.provider.shutdown()


def facts_of(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def watched(
    by: Prometheus | Traced, *replies: Reply, store: WatchedBackend | None = None, **options: Any
) -> tuple[DigestEngine[JSON], Inbox]:
    """An engine whose metrics are collected, or whose deliveries are traced, and a callback that is told what to do."""
    engine, inbox = engine_on(store or WatchedBackend(), **{"policy": policy(), **options}), Inbox(*replies)
    instrument(engine, **by.provided)
    engine.observe(inbox.observe)
    return engine, inbox


async def test_every_metric_has_its_prometheus_name_and_the_namespace_and_no_key(prometheus: Prometheus) -> None:
    engine, inbox = watched(prometheus, RuntimeError(KEY))
    async with engine.delivering(inbox):
        await engine.add(KEY, 1, record_id="one")
        await inbox.outcome()
        figures = await prometheus.scrape()
        assert await asyncio.to_thread(prometheus.types) == NAMES
    assert all("namespace=test" in name for name in figures)
    assert not any(KEY in name or "one" in name for name in figures)
    labels = {label for name in figures for label in re.findall(r"(\w+)=", name)}
    assert labels == {"namespace", "reason", "state", "le"}
    for name in ("duration", "lateness"):
        found = [float(bound) for one in figures for bound in re.findall(rf"{name}_seconds_bucket{{le=([\d.]+)", one)]
        assert tuple(found) == BUCKETS


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (RuntimeError(), "failed"), (RuntimeError(), "buried"),  # the last attempt
        (RetryAfter(3600), "deferred"), (Reject(), "rejected"), (PartialFailure(["1"]), "partial"),
        (OutcomeUnknown(), "unknown"), (forever, "timeout"), (None, None),
    ],
)  # fmt: skip
async def test_each_attempt_is_counted(reply: BaseException | None, reason: str | None, prometheus: Prometheus) -> None:
    timeout = 0.05 if reason == "timeout" else 300  # of the others none may end by it
    attempts = RetryPolicy(max_attempts=1 if reason == "buried" else 2)
    engine, inbox = watched(prometheus, reply, retry=attempts, delivery_timeout=timeout)
    async with engine:
        await engine.add_many([Entry(KEY, 1, "1"), Entry(KEY, 2, "2")])
    async with engine.delivering(inbox):
        await inbox.outcome()
        figures = await prometheus.scrape()
    prefix = "aiodigest_delivery_failures_total{namespace=test,reason="
    failures = {name.removeprefix(prefix)[:-1]: value for name, value in figures.items() if name.startswith(prefix)}
    assert failures.keys() == {"failed", "partial", "deferred", "unknown", "timeout", "rejected", "buried", "lost"}
    assert {name for name, value in failures.items() if value} == ({reason} if reason else set())
    assert figures["aiodigest_deliveries_total{namespace=test}"] == (reason is None)
    assert figures["aiodigest_delivery_duration_seconds_count{namespace=test}"] == 1
    assert figures["aiodigest_delivery_lateness_seconds_count{namespace=test}"] == 1
    assert figures["aiodigest_records_buried_total{namespace=test}"] == (2 if reason in ("buried", "rejected") else 0)
    assert figures["aiodigest_records_dropped_total{namespace=test,reason=capacity}"] == 0


async def test_dead_letters_that_were_let_go_are_counted(prometheus: Prometheus) -> None:
    engine, inbox = watched(prometheus, *[Reject("no")] * 2, bounds=Bounds(dead_letters=1))
    async with engine.delivering(inbox):
        await engine.add("first", 1)
        await inbox.outcome()
        assert (await prometheus.scrape())["aiodigest_dead_letters_dropped_total{namespace=test}"] == 0
        await engine.add("second", 2)
        await inbox.outcome(2)
        assert (await prometheus.scrape())["aiodigest_dead_letters_dropped_total{namespace=test}"] == 1


async def test_the_figures_of_the_server_are_those_at_the_time_of_the_collection(prometheus: Prometheus) -> None:
    engine, _ = watched(prometheus, policy=policy(capacity=2))
    async with engine:
        await engine.add_many(Entry(KEY, number) for number in range(4))
        figures = await prometheus.scrape()
        assert figures["aiodigest_timelines{namespace=test,state=ready}"] == 1
        assert figures["aiodigest_timelines{namespace=test,state=waiting}"] == 0
        assert figures["aiodigest_records_dropped_total{namespace=test,reason=capacity}"] == 2
        assert figures["aiodigest_oldest_overdue_seconds{namespace=test}"] >= 0
        await engine.delete(KEY)
        figures = await prometheus.scrape()
        assert figures["aiodigest_timelines{namespace=test,state=ready}"] == 0


async def test_a_collection_is_one_call_to_the_server_and_nothing_else_makes_any(prometheus: Prometheus) -> None:
    store, other = WatchedBackend(), InMemoryMetricReader()
    engine, inbox = watched(prometheus, store=store)
    async with engine.delivering(inbox):
        await engine.add(KEY, 1)
        await inbox.outcome()
        assert store.count("counts") == 0
        for number in range(1, 4):
            await prometheus.scrape()
            assert store.count("counts") == number
        prometheus.provider.add_metric_reader(other)
        await asyncio.to_thread(other.get_metrics_data)
        assert store.count("counts") == 4


async def test_a_collection_in_the_loops_thread_has_the_last_figures_at_once(prometheus: Prometheus) -> None:
    store = WatchedBackend()
    engine, _ = watched(prometheus, store=store)
    async with engine:
        first = prometheus.scraped()
        assert not any(name.startswith(tuple(FROM_THE_SERVER)) for name in first)
        await engine.add(KEY, 1)
        known = await prometheus.scrape()
        await engine.add("another", 1)
        assert prometheus.scraped() == known | {"aiodigest_adds_total{namespace=test}": 2}
        assert store.count("counts") == 1


async def test_an_outage_leaves_the_process_figures(prometheus: Prometheus, caplog: pytest.LogCaptureFixture) -> None:
    store = WatchedBackend()
    engine, _ = watched(prometheus, store=store)
    assert await asyncio.to_thread(prometheus.types) == OF_THE_PROCESS  # not entered
    async with engine:
        await prometheus.scrape()
        store.take_down("counts")
        assert {name.partition("{")[0] for name in await prometheus.scrape()} == {*OF_THE_PROCESS}
        assert store.count("counts") == 2
    assert {name.partition("{")[0] for name in await prometheus.scrape()} == {*OF_THE_PROCESS}
    assert not caplog.records


async def test_a_slow_server_is_waited_for_a_timeout(prometheus: Prometheus, caplog: pytest.LogCaptureFixture) -> None:
    class Last(WatchedBackend):
        async def counts(self) -> dict[str, int]:
            early.gates["counts"].set()  # whose answer so comes only if none is asked after another
            return await super().counts()

    silent, early, reader = WatchedBackend(held="counts"), WatchedBackend(held="counts"), InMemoryMetricReader()
    prometheus.provider.add_metric_reader(reader)
    engines = [engine_on(silent, timeout=0.1), engine_on(early, timeout=600), engine_on(Last(), timeout=600)]
    for engine, name in zip(engines, ("silent", "early", "last"), strict=True):
        engine.namespace = name
        instrument(engine, meter_provider=prometheus.provider)
    async with engines[0], engines[1], engines[2]:
        async with asyncio.timeout(DEADLINE):
            await asyncio.to_thread(reader.collect, 20 * DEADLINE * 1000)
        assert reader._metrics_data is not None
        metrics = reader._metrics_data.resource_metrics[0].scope_metrics[0].metrics
        overdue = next(metric for metric in metrics if metric.name == "aiodigest.oldest_overdue")
        told = {str((point.attributes or {})["namespace"]) for point in overdue.data.data_points}
        assert told == {"early", "last"}
    assert not caplog.records


async def test_backoff_and_an_outage_are_told_without_a_call(prometheus: Prometheus) -> None:
    store = WatchedBackend()
    engine, inbox = watched(prometheus, *[RuntimeError()] * 20, store=store)
    async with engine.delivering(inbox):
        await engine.add_many(Entry(f"user:{number}", 1) for number in range(20))
        await inbox.outcome(20)
        store.take_down()
        with pytest.raises(Exception, match="refused"):
            await engine.add(KEY, 1)
        figures = await prometheus.scrape()
        store.bring_up()
    assert figures["aiodigest_backoff_level{namespace=test}"] == 1
    assert figures["aiodigest_backend_unavailable{namespace=test}"] == 1


async def test_engines_of_one_process_have_their_own_series_unless_of_one_namespace(prometheus: Prometheus) -> None:
    shared, other, second = WatchedBackend(), WatchedBackend(), Prometheus()
    engines = [engine_on(shared), engine_on(shared), engine_on(other)]
    engines[2].namespace = "other"
    for engine in engines:
        instrument(engine, meter_provider=prometheus.provider)
    measure(engines[2], meter_provider=second.provider)
    async with engines[0], engines[1], engines[2]:
        for engine in engines:
            await engine.add_many([Entry(KEY, 1)])
        figures = await prometheus.scrape()
        assert (shared.count("counts"), other.count("counts")) == (1, 1)
        assert (await second.scrape())["aiodigest_adds_total{namespace=other}"] == 1
    assert figures["aiodigest_adds_total{namespace=test}"] == 2
    assert figures["aiodigest_adds_total{namespace=other}"] == 1
    assert figures["aiodigest_timelines{namespace=test,state=ready}"] == 1
    assert figures["aiodigest_timelines{namespace=other,state=ready}"] == 1


async def test_an_engine_that_is_gone_is_measured_no_longer(prometheus: Prometheus) -> None:
    instrument(engine_on(WatchedBackend()), meter_provider=prometheus.provider)
    gc.collect()
    assert not any(name.startswith("aiodigest_backoff_level") for name in await prometheus.scrape())


@pytest.mark.processes
def test_providers_may_be_set_after_an_engine_was_instrumented_and_before() -> None:
    program = """
        from opentelemetry import metrics, trace
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from aiodigest import DigestEngine
        from aiodigest.integrations.opentelemetry import instrument

        engines = [DigestEngine("redis://localhost", namespace=name) for name in ("before", "after", "given")]
        instrument(engines[0])
        reader = InMemoryMetricReader()
        metrics.set_meter_provider(MeterProvider([reader]))
        trace.set_tracer_provider(TracerProvider())
        instrument(engines[1])
        instrument(engines[2], meter_provider=metrics.get_meter_provider())
        with trace.get_tracer("test").start_as_current_span("add"):
            print([len(engine.tracing.context()) for engine in engines])
        found = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        adds = next(metric for metric in found if metric.name == "aiodigest.adds")
        print(sorted(point.attributes["namespace"] for point in adds.data.data_points))
    """
    with data_folder() as data:  # a process of its own, since its providers can be set once
        options: dict[str, Any] = {"env": environment(data), "cwd": data, "timeout": DEADLINE}
        done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, **options)
    assert (done.stdout, done.stderr) == ("[25, 25, 25]\n['after', 'before', 'given']\n", "")


async def test_with_the_api_alone_an_engine_works_and_tells_nobody() -> None:
    inbox = Inbox()
    engine = engine_on(WatchedBackend(), policy=policy())
    instrument(engine)
    async with engine.delivering(inbox):
        await engine.add(KEY, 1)
        await inbox.digest()


async def test_an_engine_is_instrumented_once_and_before_it_is_entered(prometheus: Prometheus, traced: Traced) -> None:
    engine = engine_on(WatchedBackend())
    instrument(engine, meter_provider=prometheus.provider)
    with pytest.raises(ConfigurationError, match="'test' is instrumented already"):
        instrument(engine, tracer_provider=traced.provider)
    with pytest.raises(ConfigurationError, match="'test' is measured by this provider already"):
        measure(engine, meter_provider=prometheus.provider)
    late = engine_on(WatchedBackend())
    async with late:
        with pytest.raises(ConfigurationError, match="'test' is entered"):
            instrument(late)
    instrument(late)


def metrics_in(text: str) -> set[str]:
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\baiodigest_\w+", text)}


@pytest.fixture
def dashboard() -> Any:
    return json.loads((ROOT / "docs" / "grafana.json").read_text())


def test_the_dashboard_and_the_page_of_alerts_ask_for_metrics_that_there_are_and_for_all(dashboard: Any) -> None:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert {name for query in queries for name in metrics_in(query)} == NAMES.keys()
    assert all('namespace=~"$namespace"' in query for query in queries)
    assert metrics_in((ROOT / "docs" / "howto" / "alert-on-lateness.md").read_text()) == NAMES.keys()


def test_the_dashboard_can_be_imported_anywhere(dashboard: Any) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert metrics_in(json.dumps(variables["namespace"])) <= NAMES.keys()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert dashboard["id"] is None
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@pytest.fixture
def worker(server: Server, namespace: str, traced: Traced) -> DigestEngine[JSON]:
    """An engine that delivers from a real server, and is not entered yet."""
    engine = DigestEngine[JSON](server.url, namespace=namespace, policy=policy())
    instrument(engine, tracer_provider=traced.provider)
    return engine


async def test_a_delivery_is_linked_to_the_spans_of_other_processes_that_added_its_records(
    worker: DigestEngine[JSON], server: Server, namespace: str, traced: Traced
) -> None:
    other, inbox = DigestEngine[JSON](server.url, namespace=namespace, policy=policy()), Inbox()
    instrument(other, tracer_provider=traced.provider)
    worker.observe(inbox.observe)
    async with other:
        for name in ("first", "second"):
            with traced.tracer.start_as_current_span(name):
                await other.add(KEY, name)
                await other.add_many([Entry(KEY, name), Entry(KEY, name)])
    async with DigestEngine[JSON](server.url, namespace=namespace, policy=policy()) as untraced:
        await untraced.add(KEY, "without a context")
    async with worker.delivering(inbox):
        await inbox.outcome()
    [span] = traced.spans(f"deliver {namespace}")
    assert traced.added_in(span) == ["first", "second"]  # once each, whatever number of records it added
    assert span.kind is trace.SpanKind.CONSUMER
    assert all(link.context.is_remote and link.context.trace_flags.sampled for link in span.links)
    digest = inbox.digests[0]
    assert len(digest.records) == 7
    assert facts_of(span) == {
        "messaging.system": "aiodigest",
        "messaging.operation.name": "deliver",
        "messaging.operation.type": "process",
        "messaging.destination.name": namespace,
        "messaging.batch.message_count": 7,
        "aiodigest.digest.id": digest.id,
        "aiodigest.attempt": 1,
        "aiodigest.iteration": 1,
        "aiodigest.records": 7,
        "aiodigest.outcome": "delivered",
    }


async def test_remains_lead_back_to_their_adds(worker: DigestEngine[JSON], namespace: str, traced: Traced) -> None:
    inbox = Inbox(PartialFailure({"second": "no"}), Reject("no such mailbox"))
    worker.observe(inbox.observe)
    async with worker:
        for name in ("first", "second"):
            with traced.tracer.start_as_current_span(name):
                await worker.add(KEY, name, record_id=name)
    async with worker.delivering(inbox):
        await inbox.outcome()
        await worker.flush(KEY)
        await inbox.outcome(2)
        [letter] = [letter async for letter in worker.dead_letters()]
        await worker.replay(letter.id)
        await inbox.outcome(3)
    told = [
        (facts_of(span)["aiodigest.outcome"], facts_of(span)["aiodigest.attempt"], traced.added_in(span))
        for span in traced.spans(f"deliver {namespace}")
    ]
    assert told == [("partial", 1, ["first", "second"]), ("rejected", 2, ["second"]), ("delivered", 1, ["second"])]


async def test_a_trace_goes_with_its_entry_through_compaction_and_capacity(server: Server, namespace: str) -> None:
    backend, terms, numbers = RedisBackend(server.url, namespace=namespace), Policy(capacity=4).terms, count(1)

    async def add(record: str, traced: bool = True) -> None:
        context = bytes([next(numbers)]) * 25 if traced else b""
        assert await backend.add(0, [Add(KEY, pack(record.encode(), None, b"v", context), terms)]) in ([True], [False])

    await backend.connect()
    for record in "abcdefg":
        await add(record)  # contexts 1 to 7: e, f, g and the next stay
    await add("h", traced=False)
    await add("f")  # again, by another span
    await add("g", traced=False)  # again, by none
    for _ in range(3):
        await add("h")
    [lease] = (await backend.claim(0, 1, 60_000, terms.limits)).leases
    await backend.aclose()
    found = {raw.id: (raw.value, raw.context) for raw in map(unpack, lease.entries)}
    assert found == {
        "e": (b"v", b"\5" * 25), "f": (b"v", b"\10" * 25), "g": (b"v", b""), "h": (b"v", b"\13" * 25),
    }  # fmt: skip


async def deliver_one(
    traced: Traced, reply: Any = None, *, options: Mapping[str, Any] | None = None, adds: int = 1
) -> tuple[ReadableSpan, Inbox]:
    """The span of the first attempt to deliver a digest."""
    engine, inbox = watched(traced, reply, **(options or {}))
    async with engine:
        for number in range(adds):
            with traced.tracer.start_as_current_span(f"add {number}"):
                await engine.add(KEY, number, record_id=str(number))
    with traced.tracer.start_as_current_span("entered here"):
        async with engine.delivering(inbox):
            await inbox.outcome()
    return traced.spans()[0], inbox


@pytest.mark.parametrize(("adds", "dropped"), [(32, None), (33, 1), (150, 118)])
async def test_the_first_32_spans_are_linked_and_the_others_counted(
    adds: int, dropped: int | None, traced: Traced
) -> None:
    span, inbox = await deliver_one(traced, adds=adds)
    assert len(inbox.digests[0].records) == adds
    assert traced.added_in(span) == [f"add {number}" for number in range(32)]
    assert facts_of(span).get("aiodigest.links.dropped") == dropped


async def test_a_span_that_added_many_records_counts_as_one_link(traced: Traced) -> None:
    engine, inbox = watched(traced)
    async with engine:
        for name in ("first", "second"):
            with traced.tracer.start_as_current_span(name):
                await engine.add_many(Entry(KEY, number) for number in range(50))
    async with engine.delivering(inbox):
        await inbox.outcome()
    [span] = traced.spans("deliver test")
    assert traced.added_in(span) == ["first", "second"]
    assert "aiodigest.links.dropped" not in facts_of(span)


async def test_a_delivery_begins_a_trace_of_its_own_and_what_its_callback_does_is_within_it(traced: Traced) -> None:
    async def send(digest: Digest[JSON]) -> None:
        with traced.tracer.start_as_current_span("send"):
            pass

    span, _ = await deliver_one(traced, send)
    [child] = traced.spans("send")
    assert (span.parent, span.context is None) == (None, False)
    assert child.parent == span.context


async def rewording(digest: Digest[JSON]) -> None:
    """A callback that has errors of its own for what went wrong, as when it was out of time."""
    try:
        await forever(digest)
    except asyncio.CancelledError:
        raise ConnectionResetError from None


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


SIGNAL = "aiodigest.errors"
LATE = "no outcome within 0.05 s"
AWAY = "OSError: mail server away"


@pytest.mark.parametrize(
    ("reply", "attempts", "outcome", "kind", "told"),
    [
        *((None, attempts, "delivered", None, None) for attempts in (2, 1)),
        *((RetryAfter(60), attempts, "deferred", None, None) for attempts in (2, 1)),
        *((Reject("no"), attempts, "rejected", None, None) for attempts in (2, 1)),
        (RetryAfter(-1), 2, "failed", f"{SIGNAL}.RetryAfter", "the delay of RetryAfter must be"),
        (PartialFailure({}), 2, "delivered", None, None),
        (PartialFailure({"1": "no"}), 2, "partial", None, None),
        (PartialFailure({"1": "no"}), 1, "buried", f"{SIGNAL}.PartialFailure", "1: no"),
        (PartialFailure({"0": "no", "1": "no"}), 2, "failed", f"{SIGNAL}.PartialFailure", "0: no; 1: no"),
        (PartialFailure({"2": "no"}), 2, "failed", f"{SIGNAL}.PartialFailure", "PartialFailure names '2', no record"),
        (OSError("mail server away"), 2, "failed", "OSError", AWAY),
        (OSError("mail server away"), 1, "buried", "OSError", AWAY),
        (SystemExit(1), 2, "failed", "SystemExit", "SystemExit: 1"),
        (asyncio.CancelledError(), 2, "failed", "asyncio.exceptions.CancelledError", "CancelledError:"),
        (TimeoutError("of its own"), 2, "failed", "TimeoutError", "TimeoutError: of its own"),
        (forever, 2, "timeout", "TimeoutError", LATE),
        (forever, 1, "buried", "TimeoutError", LATE),
        (rewording, 2, "timeout", "ConnectionResetError", LATE),
        (Mute(), 2, "failed", f"{__name__}.Mute", "Mute: a Mute"),  # which has no text
    ],
)
async def test_a_span_says_what_observers_are_told_but_no_key_and_only_a_failure_is_an_error(
    reply: Any, attempts: int, outcome: str, kind: str | None, told: str | None, traced: Traced
) -> None:
    options = {"delivery_timeout": 0.05, "retry": RetryPolicy(max_attempts=attempts)}
    span, inbox = await deliver_one(traced, reply, options=options, adds=2)
    facts = facts_of(span)
    assert facts["aiodigest.outcome"] == inbox.seen[0].result == outcome
    assert facts.get("error.type") == kind
    assert KEY not in span.to_json()
    if told is None:
        assert span.status.status_code is trace.StatusCode.UNSET
        assert not span.events
    else:
        assert span.status.status_code is trace.StatusCode.ERROR
        assert told in (span.status.description or "")
        assert [(event.attributes or {})["exception.type"] for event in span.events] == (
            [] if isinstance(reply, Mute) else [kind]
        )


async def test_a_span_has_ended_before_the_store_answers(traced: Traced) -> None:
    engine, inbox = watched(traced, lambda digest: engine.delete(digest.key))
    async with engine.delivering(inbox):
        await engine.add(KEY, 1)
        assert (await inbox.outcome()).result == "deleted"
    assert facts_of(traced.spans()[0])["aiodigest.outcome"] == "delivered"


async def test_an_attempt_that_is_cut_short_is_no_error(traced: Traced) -> None:
    engine, inbox = watched(traced, forever, drain_timeout=0)
    async with engine.delivering(inbox):
        await engine.add(KEY, 1)
        await inbox.digest()
    [span] = traced.spans()
    assert facts_of(span)["aiodigest.outcome"] == "cancelled"
    assert span.status.status_code is trace.StatusCode.UNSET


async def test_a_span_that_nobody_records_is_not_taken_along(traced: Traced) -> None:
    engine, _ = watched(traced)
    off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    async with engine:
        for current in (
            nullcontext(),
            off.get_tracer("test").start_as_current_span("add"),
            trace.use_span(trace.INVALID_SPAN),
        ):
            with current:
                await engine.add(KEY, 1)
                assert trace.get_current_span().get_span_context().trace_flags.sampled is False
        entries = await (await engine._backend()).operations.entries(KEY)
        assert [unpack(entry).context for entry in entries] == [b""] * 3
    off.shutdown()


@pytest.mark.parametrize("method", ["on_start", "on_end"])
async def test_no_span_stops_a_delivery(method: str, traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    def fail(self: object, span: Any, *_: object) -> None:
        if span.name == "deliver test":
            raise RuntimeError("the processor is broken")

    traced.provider.add_span_processor(type("Broken", (SpanProcessor,), {method: fail})())
    engine, inbox = watched(traced)
    async with engine.delivering(inbox):
        await engine.add(KEY, 1)
        assert (await inbox.outcome()).result == "delivered"
    [line] = [
        line for line in caplog.records if line.getMessage().startswith("test: a span of a delivery could not be")
    ]
    fields = {"timeline": KEY, "digest_id": inbox.digests[0].id, "attempt": 1}
    assert vars(line).items() >= fields.items()


async def test_an_add_in_an_empty_context_looks_for_no_span(
    traced: Traced, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = watched(traced)
    monkeypatch.setattr(trace, "get_current_span", None)
    async with engine:
        assert await engine.add(KEY, 1)
    assert caplog.records == []


async def test_an_unreadable_span_stops_no_record(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(trace.NonRecordingSpan):
        def get_span_context(self) -> trace.SpanContext:
            raise RuntimeError("the tracer is broken")

    engine, _ = watched(traced)
    async with engine:
        with trace.use_span(Broken(trace.INVALID_SPAN_CONTEXT)):
            assert await engine.add(KEY, 1)
    assert [line.getMessage() for line in caplog.records] == ["test: the current span cannot be read"]
