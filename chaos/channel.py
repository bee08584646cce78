"""The channel by which workers send digests as mails that the mail server can read."""

from __future__ import annotations

from contextvars import ContextVar
from random import Random
from typing import Any

from aiodigest import Digest
from aiodigest.channels import SMTP
from aiodigest.rendering import Message
from chaos.mail import DOMAIN, address_of, text_of
from chaos.plan import TRY

LARGE_SHARE = 200  # one mail of so many does not fit into what sockets hold, so that it can be lost half-way
PADDING = ("x" * 900 + "\n") * 3_000

sending: ContextVar[tuple[int, int]] = ContextVar("sending")
"""The process and the call whose mail it is."""


def render(digest: Digest[Any]) -> Message:
    is_large = Random(f"{digest.id} {sending.get()}").randrange(LARGE_SHARE) == 0
    records = [record.value for record in digest.records]
    return Message("Chaos", text_of(*sending.get(), records, PADDING if is_large else ""))


def channel(port: int) -> SMTP:
    """Return a channel that sends each mail to the address of its timeline."""
    return SMTP("127.0.0.1", port, sender=f"news@{DOMAIN}", to=address_of, hello=DOMAIN, render=render, timeout=TRY)
