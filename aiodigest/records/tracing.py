"""Interface to a tracing library, which links a delivery to the adds of its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodigest.models import Digest, Result


class TracedAttempt(Protocol):
    """Span of one attempt to deliver. None of its methods raises."""

    def ended(self, result: Result, reason: str = "", error: BaseException | None = None) -> None:
        """Record the outcome that observers get, the callback's ``error``, and ``reason``, the text kept of it.

        An attempt that was cut short has no outcome.
        """
        ...

    def left(self) -> None:
        """Note that the callback has ended."""
        ...


class Tracing(Protocol):
    """Spans of an engine; see ``aiodigest.integrations.opentelemetry``."""

    def context(self) -> bytes:
        """Return the current span in ``entries.CONTEXT_SIZE`` bytes, for a record to carry; b"" if there is none."""
        ...

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> TracedAttempt:
        """Begin a span for an attempt to deliver, linked to the spans of the adds. It is current until left."""
        ...
