"""``aiodigest send``: one made-up digest through a channel or a command, to try out a set-up."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import uuid4

import typer

from aiodigest import ChannelError, DeliverySignal, Digest, Record, Reject
from aiodigest.cli.destinations import (
    TRY,
    Collapse,
    Deliver,
    Destination,
    Execute,
    Fields,
    File,
    Subject,
    TryTimeout,
    destination,
)
from aiodigest.cli.options import AsJson, parsed_option, zone_name_of
from aiodigest.cli.output import FAILED, UNAVAILABLE, print_json, reason_of, say, unhurried_errors

ZONE = parsed_option(
    "--tz", "The time zone of times that are shown: Europe/Paris. [default: UTC]", zone_name_of, "ZONE"
)
KEY = "The key of the digest; without ?to=, the address of a mail."
EXAMPLES = """\b
Examples:
  aiodigest send --deliver 'smtp://localhost:1025?to=dev@example.org'
  aiodigest send --deliver @/run/secrets/slack-url
  aiodigest send --exec 'jq .records'
"""


def send(
    deliver: Deliver = None,
    execute: Execute = None,
    subject: Subject = None,
    template: File = None,
    fields: Fields = None,
    collapse: Collapse = None,
    tz: Annotated[str | None, ZONE] = None,
    key: Annotated[str, typer.Option(help=KEY)] = "aiodigest/test",
    try_timeout: TryTimeout = TRY,
    in_json: AsJson = False,
) -> int:
    """Deliver one made-up digest, to see that a destination works.

    It is tried once, and no server is needed. Exit code 0: it was delivered. 1: it was rejected, as it would be
    whenever it was tried. 69: it was not delivered now; pipe would try again.
    """
    chosen = destination(
        deliver, execute, subject=subject, template=template, fields=fields, collapse=collapse, tz=tz,
        timeout=try_timeout,
    )  # fmt: skip
    if chosen is None:
        raise typer.BadParameter("say where: --deliver URL or --exec CMD")
    if tz is not None and not chosen.is_read:
        raise typer.BadParameter("--tz needs times that people read: JSON has times in UTC")
    try:
        with unhurried_errors():
            code, told = asyncio.run(_try(chosen, made_up(key)))
    except OSError as error:  # such as too many open files
        code, told = UNAVAILABLE, f"not delivered: {reason_of(error)}"
    if in_json:
        print_json({"destination": chosen.name, "delivered": code == 0, "reason": "" if code == 0 else told})
    elif code == 0:
        print(told)
    if code:
        say(told)
    return code


async def _try(chosen: Destination, digest: Digest[Any]) -> tuple[int, str]:
    """Return the exit code and a line about what has happened."""
    try:
        async with chosen.make() as channel:
            await channel(digest)
    except Reject as signal:
        return FAILED, f"rejected, and not to be tried again: {signal.reason}"
    except (ChannelError, DeliverySignal) as error:
        return UNAVAILABLE, f"not delivered: {error}"
    return 0, f"delivered to {chosen.name}"


def made_up(key: str) -> Digest[Any]:
    """Return a digest that reads like one."""
    now = datetime.now(UTC)
    texts = ("This is a test of aiodigest", "Build 41 failed", "Build 42 failed", "Build 43 passed")
    actors = ("you", "ann", "bob", "ann")
    records = [
        Record(f"test-{number}", {"title": text, "actor": actor}, now - timedelta(minutes=len(texts) - number))
        for number, (text, actor) in enumerate(zip(texts, actors, strict=True))
    ]
    return Digest(key, records, uuid4().hex)
