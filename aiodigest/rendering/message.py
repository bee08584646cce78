"""The message that a digest becomes, for channels to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aiodigest import Digest


@dataclass(frozen=True)
class Block:
    """A part of a message for chat services: its ``kind``, a line of ``text``, and ``details`` of a few lines or none.

    All is plain text, which each service escapes, and cuts to its own limits.
    """

    kind: Literal["heading", "item", "note"]
    text: str
    details: str = ""


@dataclass(frozen=True)
class Message:
    """A digest as people read it: a ``subject`` of one line, plain ``text``, the same as ``html`` if there is a part in
    HTML, and as ``blocks`` for chat services."""

    subject: str
    text: str
    html: str | None = None
    blocks: Sequence[Block] = ()


class Render(Protocol):
    """Turns a digest into a message."""

    def __call__(self, digest: Digest[Any], /) -> Message: ...
