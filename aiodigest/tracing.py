"""What a library of traces has to offer, so that a delivery can be followed back to the adds of its records."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from aiodigest.models import Digest


class Tracing(Protocol):
    """See ``aiodigest.integrations.opentelemetry``."""

    def context(self) -> bytes:
        """The current span in 25 bytes (``wire.CONTEXT_SIZE``), which a record takes along; none: b""."""
        ...

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> AbstractContextManager[None]:
        """A span for one attempt to deliver, linked to those that added the records."""
        ...
