"""Digests as messages that people read: subject, text, HTML, and blocks for chat services."""

from typing import TYPE_CHECKING

from aiodigest.rendering.message import Block, Message, Render
from aiodigest.rendering.plaintext import plain

if TYPE_CHECKING:
    from aiodigest.rendering.template import Template

__all__ = ["Block", "Message", "Render", "Template", "plain"]


def __getattr__(name: str) -> object:
    if name == "Template":  # needs Jinja2, which ``plain`` does not
        from aiodigest.rendering.template import Template

        return Template
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
