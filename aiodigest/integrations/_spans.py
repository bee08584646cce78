"""A span for each attempt to deliver, linked to the spans in which its records were added; see ``opentelemetry``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Token
from functools import partial
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags, TracerProvider

from aiodigest import Digest, __version__
from aiodigest.logs import logger_of
from aiodigest.worker.delivery import TracedAttempt, Tracing

logger = logger_of(__name__)

MOST_LINKS = 32  # each costs the exporter as much as a small span
ERRORS = ("failed", "unknown", "timeout", "buried")


class Spans(Tracing):
    """The spans of an engine, for a provider or for the process's own."""

    def __init__(self, namespace: str, provider: TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("aiodigest", __version__, provider)
        self._namespace = namespace

    def context(self) -> bytes:
        try:
            if not contexts.get_current():  # as without an SDK; one that is set later fills it from then on
                return b""
            span = trace.get_current_span().get_span_context()
        except Exception as error:  # whatever goes wrong with a span, the record is stored
            facts = {"namespace": self._namespace, "reason": str(error)}
            logger.exception("the current span cannot be read", extra=facts)
            return b""
        if not (span.is_valid and span.trace_flags.sampled):
            return b""
        return span.trace_id.to_bytes(16) + span.span_id.to_bytes(8) + bytes([span.trace_flags & 0xFF])

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> TracedAttempt:
        return _Attempt(digest, partial(self._begin, digest, contexts))

    def _begin(self, digest: Digest[Any], added: Sequence[bytes]) -> Span:
        spans = [span for span in map(_unpacked, dict.fromkeys(added)) if span.is_valid]
        left_out = len(spans) - MOST_LINKS
        return self._tracer.start_span(
            f"deliver {self._namespace}",
            contexts.Context(),  # not that in which the engine was entered, perhaps weeks ago
            SpanKind.CONSUMER,
            {
                "messaging.system": "aiodigest",
                "messaging.operation.name": "deliver",
                "messaging.operation.type": "process",
                "messaging.destination.name": self._namespace,
                "messaging.batch.message_count": len(digest.records),
                "aiodigest.digest.id": digest.id,
                "aiodigest.attempt": digest.attempt,
                "aiodigest.iteration": digest.iteration,
                "aiodigest.records": len(digest.records),
                **({"aiodigest.links.dropped": left_out} if left_out > 0 else {}),
            },
            [Link(span) for span in spans[:MOST_LINKS]],
        )


def _unpacked(context: bytes) -> SpanContext:
    trace_id, span_id = int.from_bytes(context[:16]), int.from_bytes(context[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(context[24]))


class _Attempt(TracedAttempt):
    """A span that is current for a while. If anything goes wrong with it, the delivery still goes on."""

    def __init__(self, digest: Digest[Any], begin: Callable[[], Span]) -> None:
        self._facts = {"timeline": digest.key, "digest_id": digest.id, "attempt": digest.attempt}
        self._span: Span | None = None
        self._token: Token[contexts.Context] | None = None
        try:
            self._span = begin()
            self._token = contexts.attach(trace.set_span_in_context(self._span))
        except Exception:
            logger.exception("a span of a delivery could not be begun", extra=self._facts)

    def left(self) -> None:
        if self._token is not None:
            contexts.detach(self._token)
        self.ended("cancelled")

    def ended(self, result: str, reason: str = "", error: BaseException | None = None) -> None:
        """Record the attempt's outcome and end its span, unless that is done."""
        span, self._span = self._span, None
        if span is None:
            return
        try:
            try:
                span.set_attribute("aiodigest.outcome", result)
                if error is not None and result in ERRORS:
                    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
                    span.set_attribute("error.type", name)
                    span.set_status(StatusCode.ERROR, reason)
                    span.record_exception(error, {"exception.type": name})
            finally:
                span.end()
        except Exception:
            logger.exception("a span of a delivery could not be ended", extra=self._facts)
