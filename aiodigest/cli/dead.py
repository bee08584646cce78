"""``aiodigest dead``: digests that could not be delivered, one by one or all at once."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeAlias

import typer

from aiodigest import JSON, BackendUnavailable, DeadLetter, DigestEngine, InvalidState, LimitExceeded
from aiodigest.cli.event_loop import stopped_by
from aiodigest.cli.options import (
    EMBEDDED,
    AsJson,
    Location,
    Namespace,
    Once,
    Timeout,
    Url,
    collect,
    help_without_command,
)
from aiodigest.cli.output import confirm, console, is_terminal, print_json, print_result, print_table, progress_bar, say
from aiodigest.cli.rendering import count, printable, readable_time, record_rows, shortened, view_json
from aiodigest.cli.timelines import ERROR_WIDTH, Yes

ID = typer.Argument(metavar="ID", show_default=False, help="The id of a dead letter, or enough of its beginning.")
EVERY = "Every dead letter there is now. It asks first; where it cannot ask, --yes is needed."
All: TypeAlias = Annotated[bool, typer.Option("--all", help=EVERY)]

QUIET = 5.0  # seconds in which nothing has changed, before what is left is given up
RETRY_INTERVAL = 0.5  # seconds

dead = typer.Typer(help="Look at digests that could not be delivered; replay them.")
dead.callback(invoke_without_command=True)(help_without_command)


@dead.command("list", cls=Once)
def dead_list(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """List the dead letters, the oldest first."""
    found = Location(url, namespace, timeout).ask(lambda engine: collect(engine.dead_letters()))
    if not found:
        say(f"namespace {namespace!r} has no dead letters")
    if in_json:
        print_json(*map(view_json, found))
        return
    from rich.text import Text

    screen = console()
    for one in found:  # no table: an id and a time fill most of a line, and neither may be cut
        print(f"{shortened(one.id, ERROR_WIDTH)}  {readable_time(one.buried_at)}  {count(len(one.records), 'record')}")
        line = f"  {printable(one.key)}: {shortened(one.reason, ERROR_WIDTH)}"
        screen.print(Text(line), no_wrap=True, overflow="ellipsis")


@dead.command("show", cls=Once)
def dead_show(
    id: Annotated[str, ID], namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False
) -> None:
    """Show a dead letter with its records."""
    found = Location(url, namespace, timeout).ask(lambda engine: _find(engine, id))
    if in_json:
        print_json(view_json(found, records=True))
        return
    attempts = count(found.attempt, "attempt")
    title = f"{found.key}: dead since {readable_time(found.buried_at)} after {attempts}: {found.reason}"
    print_table(("id", "timestamp", "value"), record_rows(found.records), title)


@dead.command("replay", cls=Once)
def dead_replay(
    namespace: Namespace, id: Annotated[str | None, ID] = None, every: All = False, yes: Yes = False,
    url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False,
) -> None:  # fmt: skip
    """Put the records of dead letters back into their timelines.

    A timeline whose digest is being delivered or waits for a retry cannot take any. With --all its dead letters are
    tried again for some seconds; any then left are reported. Ctrl-C takes effect between two dead letters.
    """
    _work_on(Location(url, namespace, timeout), id, every, "replay", yes, in_json)


@dead.command("discard", cls=Once)
def dead_discard(
    namespace: Namespace, id: Annotated[str | None, ID] = None, every: All = False, yes: Yes = False,
    url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False,
) -> None:  # fmt: skip
    """Discard a dead letter, or all of them.

    On a terminal it asks first.
    """
    _work_on(Location(url, namespace, timeout), id, every, "discard", yes, in_json)


@dataclass(frozen=True, slots=True)
class Summary:
    """A dead letter without its records, which may be many."""

    id: str
    key: str
    buried_at: datetime
    size: int

    @classmethod
    def of(cls, letter: DeadLetter[JSON]) -> Summary:
        return cls(letter.id, letter.key, letter.buried_at, len(letter.records))


Act: TypeAlias = Callable[[DigestEngine, Summary], Awaitable[dict[str, Any] | None]]


def _facts(letter: Summary, verb: str, *, done: bool = True) -> dict[str, Any]:
    return {"id": letter.id, "key": letter.key, f"{verb}ed": done}


async def _act(verb: str, engine: DigestEngine, letter: Summary) -> dict[str, Any] | None:
    facts = _facts(letter, verb)
    if verb == "discard":
        return facts if await engine.discard(letter.id) else None
    try:
        return {**facts, "ready": await engine.replay(letter.id)}
    except InvalidState:
        if await engine.dead_letter(letter.id) is None:
            return None
        raise


def _work_on(location: Location, id: str | None, every: bool, verb: str, yes: bool, in_json: bool) -> None:
    """Replay or discard (``verb``) the dead letter of that id, or all of them."""
    if every == (id is not None):
        raise typer.BadParameter("give the ID of a dead letter, or --all")
    if id is None:
        _work_through(location, verb, yes, in_json)
        return
    letter = Summary.of(location.ask(lambda engine: _find(engine, id)))
    records, key, text = count(letter.size, "record"), letter.key, f"{letter.id} is discarded"
    if verb == "discard":
        confirm(yes, f"Discard dead letter {letter.id} of {location.namespace} ({records} of {key})?")
    facts = location.ask(lambda engine: _act(verb, engine, letter))
    if facts and verb == "replay":
        text = f"{records} put back into {key}, which {'is due now' if facts['ready'] else 'waits'}"
    failure = "" if facts else f"there is no dead letter {letter.id!r} any more"
    print_result(facts or _facts(letter, verb, done=False), text, in_json, failure=failure)


async def _find(engine: DigestEngine, id: str) -> DeadLetter[JSON]:
    """Return the dead letter of that id, or else the only one whose id starts with it."""
    if (letter := await engine.dead_letter(id)) is not None:
        return letter
    found = [one async for one in engine.dead_letters() if id and one.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    which = f"{len(found)} dead letters begin with" if found else "there is no dead letter"
    raise InvalidState(f"{which} {id!r}: see aiodigest dead list --namespace {engine.namespace}")


def _work_through(location: Location, verb: str, yes: bool, in_json: bool) -> None:
    """Replay or discard all dead letters, and say how many were."""
    participle = f"{verb}ed"
    found = location.ask(lambda engine: collect(Summary.of(letter) async for letter in engine.dead_letters()))
    letters = sorted(found, key=lambda letter: letter.buried_at, reverse=True)
    if not letters:
        say(f"namespace {location.namespace!r} has no dead letters")
        return
    number = count(len(letters), "dead letter")
    if not yes and not is_terminal(sys.stdin):
        raise typer.BadParameter(f"{number} would be {participle}: give --yes, since there is no terminal to ask on")
    records = count(sum(letter.size for letter in letters), "record")
    confirm(yes, f"{verb.title()} {number} of {location.namespace} ({records})?")
    work = BulkWork(letters, partial(_act, verb), in_json)
    # on a terminal the lines of JSON show the progress
    hidden = in_json and is_terminal(sys.stdout)
    bar = nullcontext() if hidden else progress_bar(f"dead letters {participle}", len(letters), lambda: work.done)

    async def run(engine: DigestEngine) -> None:
        async with bar:
            await work.run(engine)

    try:
        location.ask(run)
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}; {work.done:,} of {number} were {participle}") from error
    if work.is_interrupted:
        say(f"interrupted: {work.done:,} of {number} were {participle}, the others are unchanged")
        raise KeyboardInterrupt
    if in_json:
        print_json(*(_facts(letter, verb, done=False) for letter in work.left))
    else:
        print(f"{count(work.done, 'dead letter')} {participle}, with {count(work.records, 'record')}")
    if work.left:
        raise InvalidState(f"{len(work.left):,} of {number} could not be {participle}: {work.reason}")


@dataclass(slots=True)
class BulkWork:
    """Does something with each of the dead letters ``left``, in order; Ctrl-C takes effect between two of them.

    ``act`` returns the facts for JSON, or None if somebody else has removed the dead letter. While it raises
    InvalidState or LimitExceeded, the dead letters of that timeline wait, since their order matters. Those that then
    wait in vain for five seconds stay.
    """

    left: list[Summary]
    act: Act
    in_json: bool
    done: int = 0
    records: int = 0  # of what is done
    reason: Exception | None = None  # why one of those that are left could not be done
    is_interrupted: bool = False

    async def run(self, engine: DigestEngine) -> None:
        """Work until nothing more can be done. Raises BackendUnavailable."""
        loop = asyncio.get_running_loop()
        with stopped_by(signal.SIGINT) as stop:
            last = loop.time() + QUIET
            while True:
                before = len(self.left)
                await self._round(engine, stop)
                if len(self.left) < before:
                    last = loop.time() + QUIET
                if not self.left or stop.is_set() or loop.time() > last:
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), RETRY_INTERVAL)
            self.is_interrupted = stop.is_set()

    async def _round(self, engine: DigestEngine, stop: asyncio.Event) -> None:
        """Try each dead letter once."""
        letters, self.left, blocked = self.left, [], set[str]()
        for letter in letters:
            if stop.is_set() or letter.key in blocked:
                self.left.append(letter)
                continue
            try:
                facts = await self.act(engine, letter)
            except (InvalidState, LimitExceeded) as error:
                self.reason = error
                blocked.add(letter.key)
                self.left.append(letter)
                continue
            if facts is not None:
                self.done += 1
                self.records += letter.size
                if self.in_json:
                    print_json(facts)
