"""What a library of traces has to offer, so that a delivery can be followed back to the adds of its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from aiodigest.models import Digest, Result


class TracedAttempt(Protocol):
    """The span of one attempt to deliver. Nothing in it raises."""

    def ended(self, result: Result, reason: str = "", error: BaseException | None = None) -> None:
        """What came of it, as observers are told: with ``error``, which the callback raised, and ``reason``, which is
        kept of that. Of an attempt that was cut short nothing is told.
        """
        ...

    def left(self) -> None:
        """The callback runs no more."""
        ...


class Tracing(Protocol):
    """See ``aiodigest.integrations.opentelemetry``."""

    def context(self) -> bytes:
        """The current span in 25 bytes (``wire.CONTEXT_SIZE``), which a record takes along; none: b""."""
        ...

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> TracedAttempt:
        """Begin a span for an attempt to deliver, linked to those that added the records. It is current until left."""
        ...
