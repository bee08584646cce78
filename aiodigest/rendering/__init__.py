"""Digests as messages that people read: subject, text, HTML, and blocks for chat services."""

from aiodigest.rendering.message import Block, Message, Render

__all__ = ["Block", "Message", "Render"]
