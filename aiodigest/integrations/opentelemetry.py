"""Metrics of an engine, and a span for each attempt to deliver, with the OpenTelemetry API (``aiodigest[otel]``)."""

from __future__ import annotations

from typing import Any

from aiodigest import ConfigurationError, DigestEngine

try:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "opentelemetry":
        raise
    raise ConfigurationError("OpenTelemetry is not installed: pip install 'aiodigest[otel]'") from error

from aiodigest.integrations import _metrics, _spans

__all__ = ["instrument", "measure"]


def instrument(
    engine: DigestEngine[Any],
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Send the metrics of ``engine`` to OpenTelemetry, and a span for each attempt to deliver a digest.

    The providers are those set for the process, now or later, unless ``meter_provider`` and
    ``tracer_provider`` name others. Call it once, before entering the engine.

    Metrics have the attribute ``namespace``, and never a key. ``aiodigest.adds``, ``aiodigest.deliveries``,
    ``aiodigest.delivery.failures`` (by ``reason``), ``aiodigest.delivery.duration`` and ``aiodigest.delivery.lateness``
    (seconds), ``aiodigest.backoff_level``, ``aiodigest.destinations_resting``, ``aiodigest.room_taken`` (bytes),
    ``aiodigest.awaiting_room``, ``aiodigest.throttled`` (seconds) and ``aiodigest.backend_unavailable`` (1 or 0) are of
    this process. ``aiodigest.timelines`` (by ``state``), ``aiodigest.records.dropped`` (by ``reason``: capacity, age,
    ttl), ``aiodigest.records.buried`` (in dead letters, where they can be replayed), ``aiodigest.records.duplicates``
    (kept from being delivered again by ``dedupe_window``), ``aiodigest.records.muted`` (dropped by mutes),
    ``aiodigest.dead_letters.dropped`` (let go, oldest first) and ``aiodigest.oldest_overdue`` (seconds) belong to the
    namespace: each process reports the same, so take their maximum and not their sum. For these the server is asked
    once a collection, for as long as the engine's ``timeout``, and half of the exporter's, allow; if it does not
    answer, or the engine is not entered, they are left out. A collection in the thread of the engine's own event loop
    cannot wait for the answer, and has the figures of the previous one.

    A span is called ``deliver NAMESPACE``, begins a trace of its own, and is linked to the spans in which its records
    were added, if these are recorded: to the first 32, in the order in which the records arrived. If there are more,
    the attribute ``aiodigest.links.dropped`` has their number. It is current while the callback runs. Its attribute
    ``aiodigest.outcome`` is the result reported to observers (``Delivery``): delivered, partial, deferred, rejected,
    failed, unknown, timeout or buried, the last four of which are errors; or cancelled, for an attempt that was cut
    short. The store answers "lost" or "deleted" after the span has ended. The key is not an attribute, since it is
    often somebody's address: a callback that wants it sets it on the current span.

    Raises ConfigurationError if the engine is already instrumented, or entered.
    """
    if engine.tracing is not None:
        raise ConfigurationError(f"engine {engine.namespace!r} is instrumented already")
    measure(engine, meter_provider=meter_provider)
    engine.trace(_spans.Spans(engine.namespace, tracer_provider))


def measure(engine: DigestEngine[Any], *, meter_provider: MeterProvider | None = None) -> None:
    """Send the metrics of ``instrument`` for ``engine``, without its spans; once for each ``meter_provider``.

    Raises ConfigurationError if the provider has them already, or the engine is entered.
    """
    if engine.is_entered:
        raise ConfigurationError(f"engine {engine.namespace!r} is entered: it must be instrumented before")
    _metrics.of(meter_provider).add(engine)
