"""Instruments for metrics, and what each collection observes; see ``opentelemetry``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, TypeAlias, get_args
from weakref import WeakSet, ref

from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider

from aiodigest import ConfigurationError, Delivery, DigestEngine, State, Stats, __version__

Engine: TypeAlias = DigestEngine[Any]
Observe: TypeAlias = Callable[[CallbackOptions], Iterable[Observation]]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds
FAILURES = ("failed", "partial", "deferred", "unknown", "timeout", "rejected", "buried", "lost")

LOSSES = {"dropped": "capacity", "aged": "age", "expired": "ttl"}  # reasons of records that are lost, by counter


class Figures:
    """The server's figures for each namespace: asked once a collection, however many instruments it reads."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self._engines = engines
        self._latest: dict[str, Stats] = {}
        self._read: set[Observe] = set()  # the instruments that have read the latest

    def of(self, instrument: Observe, options: CallbackOptions) -> Mapping[str, Stats]:
        """Return the latest figures by namespace; a second question from one instrument means another collection."""
        if not self._read or instrument in self._read:
            self._latest = self._ask(options.timeout_millis / 2000)
            self._read.clear()
        self._read.add(instrument)
        return self._latest

    def _ask(self, timeout: float) -> dict[str, Stats]:
        """Ask all servers at once, and return the answers that come within ``timeout`` seconds."""
        began, found = monotonic(), dict[str, Stats]()
        asked: dict[str, tuple[float, Future[Stats]]] = {}
        try:
            ours = asyncio.get_running_loop()
        except RuntimeError:
            ours = None
        for engine in self._engines():
            loop, name = engine.loop, engine.namespace
            if loop is None or name in asked:
                continue
            if loop is ours:  # to wait here would keep the answer from coming
                if name in self._latest:
                    found[name] = self._latest[name]
                continue
            stats = engine.stats()
            try:
                asked[name] = engine.timeout, asyncio.run_coroutine_threadsafe(stats, loop)
            except RuntimeError:  # it was closed just now
                stats.close()
        for name, (limit, answer) in asked.items():
            try:
                found[name] = answer.result(max(0.0, began + min(limit, timeout) - monotonic()))
            except Exception:  # the server is away, or the engine was left; backend_unavailable shows it
                answer.cancel()
        return found


class Metrics:
    """The instruments of all engines measured by one provider, since each instrument can be made only once."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        self._is_global = provider is get_meter_provider()  # perhaps a stand-in for one that is set later
        self._engines: list[ref[Engine]] = []
        self._figures = Figures(self._living)
        meter = provider.get_meter("aiodigest", __version__)
        self._deliveries = meter.create_counter("aiodigest.deliveries", "{digest}", "Digests that were delivered")
        failed = "Attempts that did not deliver all of their digest"
        self._failures = meter.create_counter("aiodigest.delivery.failures", "{attempt}", failed)
        seconds = partial(meter.create_histogram, unit="s", explicit_bucket_boundaries_advisory=BUCKETS)
        self._duration = seconds("aiodigest.delivery.duration", description="How long attempts took")
        late = "How long after their due time attempts began"
        self._lateness = seconds("aiodigest.delivery.lateness", description=late)
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        ours, stored = self._ours, self._stored
        let_go = "Dead letters that made room for newer ones, or reached their 30 days"
        states = {"mutes" if state == "muted" else state: {"state": state} for state in get_args(State)}
        losses = {field: {"reason": reason} for field, reason in LOSSES.items()}
        for make, name, observe, unit, description in (
            (counter, "adds", ours("adds", sum), "{record}", "Records that were added"),
            (gauge, "backoff_level", ours("backoff_level", max), "", "How deep the process is in backoff mode; 0: not"),
            (gauge, "destinations_resting", ours("resting", sum), "{destination}", "Destinations to which none may go"),
            (gauge, "room_taken", ours("room_taken", sum), "By", "What large digests under delivery decode to"),
            (gauge, "awaiting_room", ours("awaiting_room", sum), "{digest}", "Large digests that wait for others"),
            (gauge, "throttled", ours("throttled", max), "s", "How long due digests wait at least for the throttle"),
            (gauge, "backend_unavailable", ours("unavailable", max), "", "1 while calls to the server fail"),
            (gauge, "timelines", stored(states), "{timeline}", "Timelines that hold records"),
            (counter, "records.dropped", stored(losses), "{record}", "Records that will never be delivered"),
            (counter, "records.buried", stored({"buried": {}}), "{record}", "Records that went into dead letters"),
            (counter, "records.duplicates", stored({"duplicates": {}}), "{record}", "Records kept from coming again"),
            (counter, "records.muted", stored({"muted": {}}), "{record}", "Records that were dropped by mutes"),
            (counter, "dead_letters.dropped", stored({"letters_dropped": {}}), "{letter}", let_go),
            (gauge, "oldest_overdue", stored({"overdue": {}}), "s", "For how long the earliest timeline has been due"),
        ):
            make(f"aiodigest.{name}", [observe], unit, description)

    def serves(self, provider: MeterProvider) -> bool:
        """True if measurements end up in this provider, which may have been set after they began."""
        return provider is self._provider or (self._is_global and provider is get_meter_provider())

    def add(self, engine: Engine) -> None:
        """Measure another engine."""
        if any(engine is one for one in self._living()):
            raise ConfigurationError(f"engine {engine.namespace!r} is measured by this provider already")
        self._engines.append(ref(engine))
        attributes = {"namespace": engine.namespace}
        self._deliveries.add(0, attributes)  # a counter that appears with its first event shows no rise
        for reason in FAILURES:
            self._failures.add(0, {**attributes, "reason": reason})
        engine.observe(partial(self._record, attributes))

    def _living(self) -> list[Engine]:
        return [engine for one in tuple(self._engines) if (engine := one()) is not None]

    def _record(self, attributes: Mapping[str, str], delivery: Delivery) -> None:
        if delivery.result == "empty":
            return
        if delivery.result == "delivered":
            self._deliveries.add(1, attributes)
        elif delivery.result in FAILURES:
            self._failures.add(1, {**attributes, "reason": delivery.result})
        self._duration.record(delivery.duration, attributes)
        self._lateness.record(delivery.lateness, attributes)

    def _ours(self, field: str, join: Callable[[list[float]], float]) -> Observe:
        """Observe a field of the engines' activity; those of one namespace are taken together."""

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            values: defaultdict[str, list[float]] = defaultdict(list)
            for engine in self._living():
                values[engine.namespace].append(getattr(engine.activity, field))
            return [Observation(+join(each), {"namespace": name}) for name, each in values.items()]  # 1 for True

        return observe

    def _stored(self, fields: Mapping[str, Mapping[str, str]]) -> Observe:
        """Observe fields of the server's figures, with these attributes."""

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            for name, stats in self._figures.of(observe, options).items():
                for field, attributes in fields.items():
                    yield Observation(getattr(stats, field), {"namespace": name, **attributes})

        return observe


_made: WeakSet[Metrics] = WeakSet()


def of(provider: MeterProvider | None) -> Metrics:
    """Return the instruments of a provider, or of the process's own."""
    chosen = provider if provider is not None else get_meter_provider()
    metrics = next((metrics for metrics in _made if metrics.serves(chosen)), None) or Metrics(chosen)
    _made.add(metrics)
    return metrics
