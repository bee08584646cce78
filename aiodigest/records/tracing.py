"""The interface to a tracing library: it links a delivery to the adds of its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodigest.models import Digest, Result


class TracedAttempt(Protocol):
    """The span of one attempt to deliver. None of its methods raises."""

    def ended(self, result: Result, reason: str = "", error: BaseException | None = None) -> None:
        """Record the outcome reported to observers, with ``error``, which the callback raised, and ``reason``, the text
        kept of it. An attempt that was cut short reports nothing.
        """
        ...

    def left(self) -> None:
        """Note that the callback has ended."""
        ...


class Tracing(Protocol):
    """See ``aiodigest.integrations.opentelemetry``."""

    def context(self) -> bytes:
        """Return the current span in 25 bytes (``wire.CONTEXT_SIZE``), for a record to carry; b"" if there is none."""
        ...

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> TracedAttempt:
        """Begin a span for an attempt to deliver, linked to the spans of the adds. It is current until left."""
        ...
