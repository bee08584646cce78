"""A span for each attempt to deliver, linked to those that added its records; see ``opentelemetry``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from functools import partial
from types import TracebackType
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags, TracerProvider

from aiodigest import Digest, PartialFailure, Reject, RetryAfter, __version__
from aiodigest.dispatch import _TimedOut, describe
from aiodigest.tracing import Tracing

logger = logging.getLogger(__name__)

MOST_LINKS = 128


def tracing(namespace: str, provider: TracerProvider | None) -> Tracing:
    """The spans of an engine, for a provider, or for the process's own."""
    return _Traces(trace.get_tracer("aiodigest", __version__, provider), namespace)


class _Traces:
    """See ``aiodigest.tracing``."""

    def __init__(self, tracer: trace.Tracer, namespace: str) -> None:
        self._tracer = tracer
        self._namespace = namespace

    def context(self) -> bytes:
        span = trace.get_current_span().get_span_context()
        if not (span.is_valid and span.trace_flags.sampled):
            return b""
        return span.trace_id.to_bytes(16) + span.span_id.to_bytes(8) + bytes([span.trace_flags & 0xFF])

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> AbstractContextManager[None]:
        return _Attempt(partial(self._begun, digest, contexts))

    def _begun(self, digest: Digest[Any], added: Sequence[bytes]) -> Span:
        links = [Link(span) for span in map(_unpacked, list(dict.fromkeys(added))[:MOST_LINKS]) if span.is_valid]
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
            },
            links,
        )


def _unpacked(context: bytes) -> SpanContext:
    trace_id, span_id = int.from_bytes(context[:16]), int.from_bytes(context[16:24])
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(context[24]))


class _Attempt:
    """A span that is current for a while. Whatever goes wrong with it, the delivery goes on."""

    def __init__(self, begin: Callable[[], Span]) -> None:
        self._begin = begin
        self._span: Span | None = None
        self._token: Token[contexts.Context] | None = None

    def __enter__(self) -> None:
        try:
            self._span = self._begin()
            self._token = contexts.attach(trace.set_span_in_context(self._span))
        except Exception:
            logger.exception("a span of a delivery could not be begun")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._token is not None:
            contexts.detach(self._token)
        if self._span is None:
            return
        try:
            _conclude(self._span, error)
        except Exception:
            logger.exception("a span of a delivery could not be ended")


def _conclude(span: Span, error: BaseException | None) -> None:
    """Say how a callback ended, and end its span."""
    try:
        outcome = _outcome(error)
        span.set_attribute("aiodigest.outcome", outcome)
        if error is not None and outcome in ("failed", "timeout"):
            kind = type(error) if outcome == "failed" else TimeoutError
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            span.set_attribute("error.type", name)
            span.set_status(StatusCode.ERROR, describe(error) if outcome == "failed" else str(error))
            span.record_exception(error, {"exception.type": name})
    finally:
        span.end()


def _outcome(error: BaseException | None) -> str:
    match error:
        case None:
            return "delivered"
        case RetryAfter():
            return "deferred"
        case Reject():
            return "rejected"
        case PartialFailure():
            return "partial" if error.failed else "delivered"
        case _TimedOut():
            return "timeout"
        case _:
            task = asyncio.current_task()
            return "cancelled" if task is None or task.cancelling() else "failed"
