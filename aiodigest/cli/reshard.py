"""``aiodigest reshard``: another number of shards for a namespace in use."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from aiodigest import Draining
from aiodigest.cli.options import EMBEDDED, Address, AsJson, Namespace, Timeout, Url
from aiodigest.cli.views import stats_json
from aiodigest.cli.words import as_json, count, is_terminal, printable, say

To: TypeAlias = Annotated[
    int, typer.Option("--to", metavar="SHARDS", show_default=False, help="How many there are to be: from 1 to 1024.")
]

Replicas: TypeAlias = Annotated[
    int,
    typer.Option(
        "--wait-replicas",
        metavar="N",
        min=0,
        help="As that of the engines: no step is taken before so many replicas have the one before.",
    ),
]

PATIENCE = 15  # looks, about a second apart, and seconds
CLEAR = "\r\x1b[K"  # back to the beginning of a terminal's line, and nothing in it


def reshard(
    namespace: Namespace,
    shards: To,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    replicas: Replicas = 0,
    in_json: AsJson = False,
) -> None:
    """Give a namespace another number of shards while it is used, and wait until the old ones are empty.

    The new shards take all adds from the first moment on; records in the old ones are delivered on schedule, which
    may take as long as the longest delay. You may interrupt the command: called again, it goes on.
    """
    progress = Progress(namespace, shards)
    where = url
    try:
        where = asyncio.run(_watched(Address(url, namespace, timeout, replicas), shards, progress, in_json))
    except KeyboardInterrupt:
        progress.clear()
        say(f"interrupted: aiodigest reshard --namespace {namespace} --to {shards} goes on from here")
        raise
    finally:
        progress.clear()
    if not in_json:
        print(f"namespace {namespace!r} on {where} has {count(shards, 'shard')}")


async def _watched(address: Address, shards: int, progress: Progress, in_json: bool) -> str:
    """Watch it to its end; return the URL, without its password."""
    async with address.engine() as engine:
        if not any(stats_json(await engine.stats()).values()):
            where = f"namespace {address.namespace!r} on {engine.url}"
            say(f"{where} holds nothing, and nothing was ever delivered from it: is its name right?")
        async for left in engine.reshard(shards):
            if in_json:
                _print_look(shards, left, done=False)
                continue
            progress.show(left)
            # without a worker, due timelines stay among the waiting ones
            if progress.is_still and (left.leased or (await engine.stats()).overdue > PATIENCE):
                progress.ask()
    if in_json:
        _print_look(shards, Draining(), done=True)
    return engine.url


def _print_look(shards: int, left: Draining, *, done: bool) -> None:
    print(as_json({"shards": shards, **asdict(left), "done": done}), flush=True)  # it is read while the command runs


class Progress:
    """The remaining work, on standard error: on a terminal one line that changes, else a line for each change."""

    def __init__(self, namespace: str, shards: int) -> None:
        self._goes_over = f"namespace {namespace!r} goes over to {count(shards, 'shard')}"
        self._last: Draining | None = None
        self._is_terminal = is_terminal(sys.stderr)
        self._is_shown = False
        self._same = 0  # looks in a row with no change
        self._has_asked = False

    def show(self, left: Draining) -> None:
        self._same = self._same + 1 if left == self._last else 0
        if left == self._last:
            return
        self._last = left
        numbers = f"{left.waiting:,} waiting, {left.ready:,} ready, {left.leased:,} leased"
        line = f"{self._goes_over}: in the old ones {numbers}, {count(left.dead, 'dead letter')}"
        if self._is_terminal:
            self._write(f"{CLEAR}aiodigest: {printable(line)}")
            self._is_shown = True
        else:
            say(line)

    @property
    def is_still(self) -> bool:
        """True if nothing has changed for a while, and the user was not asked about it yet."""
        return self._same >= PATIENCE and not self._has_asked

    def ask(self) -> None:
        self._has_asked = True
        self.clear()
        say("nothing of this has changed for a while: does a worker (aiodigest run) serve the namespace?")

    def clear(self) -> None:
        """Leave the terminal's line to the next message."""
        if self._is_shown:
            self._write(CLEAR)
            self._is_shown = False

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # even if nobody is looking
            print(text, end="", file=sys.stderr, flush=True)
