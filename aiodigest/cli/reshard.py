"""``aiodigest reshard``: another number of shards for a namespace in use."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from aiodigest import Draining, InvalidState
from aiodigest.cli.options import EMBEDDED, AsJson, Location, Namespace, Timeout, Url
from aiodigest.cli.output import is_terminal, print_json, say
from aiodigest.cli.rendering import count

TO = "The new number of shards, from 1 to 1024."
To: TypeAlias = Annotated[int, typer.Option("--to", metavar="SHARDS", show_default=False, help=TO)]
REPLICAS = "Replicas that must confirm each step before the next one; as wait_replicas of the engines."
Replicas: TypeAlias = Annotated[int, typer.Option("--wait-replicas", metavar="N", min=0, help=REPLICAS)]

STILL = 15  # looks without a change, about a second apart, and seconds overdue
CLEAR = "\r\x1b[K"  # back to the beginning of a terminal's line, and nothing in it


def reshard(
    namespace: Namespace, shards: To, url: Url = EMBEDDED, timeout: Timeout = 5.0, replicas: Replicas = 0,
    in_json: AsJson = False,
) -> None:  # fmt: skip
    """Change the number of shards of a namespace in use.

    The new shards take all adds from the first moment on; the records in the old ones are delivered on schedule,
    which may take as long as the longest delay. The command waits until the old shards are empty. You may interrupt
    it: run again, it continues.
    """
    location, progress = Location(url, namespace, timeout, replicas), Progress(namespace, shards)
    try:
        asyncio.run(_watch(location, shards, progress, in_json))
    except KeyboardInterrupt:
        progress.clear()
        say(f"interrupted: to continue, run aiodigest reshard --namespace {namespace} --to {shards}")
        raise
    finally:
        progress.clear()
    if not in_json:
        print(f"{location.where} has {count(shards, 'shard')}")


async def _watch(location: Location, shards: int, progress: Progress, in_json: bool) -> None:
    async with location.engine() as engine:
        if not await engine.backend.operations.exists():
            raise InvalidState(f"there is no {location.where}: is its name right?")
        async for left in engine.reshard(shards):
            if in_json:
                print_json({"shards": shards, **asdict(left), "done": False})
                continue
            # without a worker, due timelines stay among the waiting ones
            if progress.show(left) and (left.leased or (await engine.stats()).overdue > STILL):
                progress.ask()
    if in_json:
        print_json({"shards": shards, **asdict(Draining()), "done": True})


class Progress:
    """The remaining work, on standard error: on a terminal one line that changes, else a line for each change."""

    def __init__(self, namespace: str, shards: int) -> None:
        self._work = f"namespace {namespace!r} is moving to {count(shards, 'shard')}"
        self._last: Draining | None = None
        self._is_terminal = is_terminal(sys.stderr)
        self._unchanged = 0  # looks in a row
        self._has_asked = False

    def show(self, left: Draining) -> bool:
        """Show what is left; True if it has not changed for a while, and the user has not been asked about it yet."""
        if left == self._last:
            self._unchanged += 1
            return self._unchanged >= STILL and not self._has_asked
        self._last, self._unchanged = left, 0
        numbers = f"{left.waiting:,} waiting, {left.ready:,} ready, {left.leased:,} leased"
        numbers += f", {left.mutes:,} muted" if left.mutes else ""
        line = f"{self._work}: in the old ones {numbers}, {count(left.dead, 'dead letter')}"
        self.clear()
        say(line, end="" if self._is_terminal else "\n")
        return False

    def ask(self) -> None:
        self._has_asked = True
        self.clear()
        say("nothing has changed for a while: does a worker (aiodigest run) serve the namespace?")

    def clear(self) -> None:
        """Leave the terminal's line to the next message."""
        if self._is_terminal and self._last is not None:
            with suppress(OSError, ValueError):  # even if nobody is watching
                print(CLEAR, end="", file=sys.stderr, flush=True)
