"""``aiodigest dead``: digests that could not be delivered, seen from outside."""

from __future__ import annotations

import sys
from typing import Annotated, Any, TypeAlias

import typer

from aiodigest import JSON, BackendUnavailable, DeadLetter, DigestEngine, InvalidState
from aiodigest.cli.answers import (
    ERROR_WIDTH,
    ask,
    confirm,
    console,
    done,
    print_lines,
    print_table,
)
from aiodigest.cli.options import (
    EMBEDDED,
    Address,
    AsJson,
    Namespace,
    Timeout,
    Url,
    Yes,
    help_without_command,
)
from aiodigest.cli.sweep import Act, Buried, Sweep, all_buried
from aiodigest.cli.views import letter_json, record_rows, shown
from aiodigest.cli.words import as_json, count, is_terminal, printable, say, shortened

LETTER = "The id of a dead letter, or enough of its beginning."
LetterId: TypeAlias = Annotated[str, typer.Argument(metavar="ID", show_default=False, help=LETTER)]
OneLetter: TypeAlias = Annotated[str | None, typer.Argument(metavar="ID", show_default=False, help=LETTER)]
All: TypeAlias = Annotated[
    bool, typer.Option("--all", help="All that there are now; asks first, and where it cannot ask it wants --yes.")
]

ENOUGH = 4  # characters of an id

dead = typer.Typer(help="Look at the digests that could not be delivered, and replay them.")
dead.callback(invoke_without_command=True)(help_without_command)


@dead.command("list")
def dead_list(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """List the dead letters, the oldest first."""

    async def listed(engine: DigestEngine) -> list[DeadLetter[JSON]]:
        return [letter async for letter in engine.dead_letters()]

    found = ask(Address(url, namespace, timeout), listed)
    if not found:
        say(f"namespace {namespace!r} has no dead letters")
    if in_json:
        print_lines(letter_json(letter) for letter in found)
        return
    from rich.text import Text

    screen = console()
    for one in found:  # no table: an id and a time fill most of a line, and neither may be cut
        print(f"{one.id}  {shown(one.buried_at)}  {count(len(one.records), 'record')}")
        line = f"  {printable(one.key)}: {shortened(one.reason, ERROR_WIDTH)}"
        screen.print(Text(line), no_wrap=True, overflow="ellipsis")


@dead.command("show")
def dead_show(
    letter_id: LetterId,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Show a dead letter with its records."""
    found = ask(Address(url, namespace, timeout), lambda engine: _letter(engine, letter_id))
    if in_json:
        print(as_json(letter_json(found, found.records)))
        return
    facts = f"{printable(found.key)}: buried {shown(found.buried_at)} after {count(found.attempt, 'attempt')}"
    print_table(("id", "timestamp", "value"), record_rows(found.records), f"{facts}: {printable(found.reason)}")


@dead.command("replay")
def dead_replay(
    namespace: Namespace,
    letter_id: OneLetter = None,
    every: All = False,
    yes: Yes = False,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Put the records of a dead letter, or of --all, back into their timelines.

    A timeline whose digest is under delivery or waits for a retry cannot take any. With --all its letters are tried
    again for some seconds; any then left are reported. Ctrl-C ends it between two letters.
    """
    address = Address(url, namespace, timeout)
    if _is_for_all(letter_id, every):
        _sweep(address, "Replay", "replayed", _replayed, yes, in_json)
        return

    async def replayed(engine: DigestEngine) -> tuple[DeadLetter[JSON], bool]:
        letter = await _letter(engine, letter_id or "")
        return letter, await engine.replay(letter.id)

    letter, ready = ask(address, replayed)
    facts = {"id": letter.id, "key": letter.key, "replayed": True, "ready": ready}
    told = f"has {count(len(letter.records), 'record')} back and {'is due now' if ready else 'waits'}"
    done(True, in_json, facts, told, "", letter.key)


@dead.command("discard")
def dead_discard(
    namespace: Namespace,
    letter_id: OneLetter = None,
    every: All = False,
    yes: Yes = False,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Drop a dead letter, or --all; asks first, on a terminal."""
    address = Address(url, namespace, timeout)
    if _is_for_all(letter_id, every):
        _sweep(address, "Drop", "discarded", _discarded, yes, in_json)
        return
    letter = ask(address, lambda engine: _letter(engine, letter_id or ""))
    records = f"{count(len(letter.records), 'record')} of {printable(letter.key)}"
    confirm(yes, f"Drop dead letter {letter.id} of {namespace} ({records})?")
    discarded = ask(address, lambda engine: engine.discard(letter.id))
    facts = {"id": letter.id, "key": letter.key, "discarded": discarded}
    done(discarded, in_json, facts, "is gone", f"there is no dead letter {letter.id!r} any more", letter.id)


def _is_for_all(letter_id: str | None, every: bool) -> bool:
    if every == (letter_id is not None):
        raise typer.BadParameter("give the ID of a dead letter, or --all")
    return every


def _sweep(address: Address, verb: str, participle: str, act: Act, yes: bool, in_json: bool) -> None:
    """Do something with all dead letters, and say how many were ``participle``, such as "replayed"."""
    letters = ask(address, all_buried)
    if not letters:
        say(f"namespace {address.namespace!r} has no dead letters")
        return
    number = count(len(letters), "dead letter")
    if not yes and not is_terminal(sys.stdin):
        raise typer.BadParameter(f"{number} would be {participle}: give --yes, since there is no terminal to ask on")
    records = count(sum(letter.size for letter in letters), "record")
    confirm(yes, f"{verb} {number} of {address.namespace} ({records})?")
    sweep = Sweep(letters, act, in_json)
    try:
        ask(address, lambda engine: sweep.run(engine, f"dead letters {participle}"))
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}; {sweep.done:,} of {number} were {participle}") from error
    if sweep.is_interrupted:
        say(f"interrupted: {sweep.done:,} of {number} were {participle}, the others are where they were")
        raise KeyboardInterrupt
    if in_json:
        print_lines({"id": letter.id, "key": letter.key, participle: False} for letter in sweep.left)
    else:
        print(f"{count(sweep.done, 'dead letter')} {participle}, with {count(sweep.records, 'record')}")
    if sweep.left:
        raise InvalidState(f"{len(sweep.left):,} of {number} could not be {participle}: {sweep.reason}")


async def _replayed(engine: DigestEngine, letter: Buried) -> dict[str, Any] | None:
    try:
        ready = await engine.replay(letter.id)
    except InvalidState:
        if await engine.dead_letter(letter.id) is None:
            return None
        raise
    return {"id": letter.id, "key": letter.key, "replayed": True, "ready": ready}


async def _discarded(engine: DigestEngine, letter: Buried) -> dict[str, Any] | None:
    gone = await engine.discard(letter.id)
    return {"id": letter.id, "key": letter.key, "discarded": True} if gone else None


async def _letter(engine: DigestEngine, letter_id: str) -> DeadLetter[JSON]:
    """Return the dead letter of that id, or else the only one whose id starts with it."""
    letter = await engine.dead_letter(letter_id)
    if letter is not None:
        return letter
    found: list[DeadLetter[JSON]] = []
    if len(letter_id) >= ENOUGH:
        found = [one async for one in engine.dead_letters() if one.id.startswith(letter_id)]
    if len(found) == 1:
        return found[0]
    which = f"{len(found)} dead letters begin with" if found else "there is no dead letter"
    raise InvalidState(f"{which} {letter_id!r}: see aiodigest dead list --namespace {engine.namespace}")
