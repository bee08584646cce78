"""``aiodigest stats``, ``timelines``, ``show``, ``flush``, ``delete`` and ``dead``: an engine's store, from outside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from aiodigest import JSON, DeadLetter, DigestEngine, InvalidState, State, Timeline
from aiodigest.commands.options import (
    EMBEDDED,
    Address,
    AsJson,
    Namespace,
    Timeout,
    Url,
    checked,
    help_without_command,
)
from aiodigest.commands.views import letter_json, moment, record_rows, shown, timeline_json
from aiodigest.commands.words import as_json, count, printable, say, shortened

T = TypeVar("T")

STATES: tuple[State, ...] = get_args(State)


def state_named(text: str) -> State:
    """The state of that name. Raises ValueError if there is none."""
    for state in STATES:
        if state == text:
            return state
    raise ValueError(f"{text!r} is no state: write {', '.join(STATES)}")


Key: TypeAlias = Annotated[str, typer.Argument(show_default=False, help="The key of a timeline.")]
LetterId: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", show_default=False, help="The id of a dead letter, or enough of its beginning.")
]
Only: TypeAlias = Annotated[
    State | None,
    typer.Option("--state", parser=checked(state_named), metavar="|".join(STATES), help="Only these."),
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

PIPE_WIDTH = 250  # columns, where there is no terminal that has a width
WHOLE = {"due", "timestamp"}  # columns that are not folded
ERROR_WIDTH = 80
ENOUGH = 4  # characters of an id

dead = typer.Typer(help="Look at the digests that could not be delivered, and replay them.")
dead.callback(invoke_without_command=True)(help_without_command)


def stats(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """Count timelines by state, dead letters, and what happened since the namespace was made."""
    found = _ask(Address(url, namespace, timeout), lambda engine: engine.stats())
    numbers = {name: value for name, value in asdict(found).items() if name != "oldest_due"}
    if not any(numbers.values()):
        say(f"namespace {namespace!r} holds nothing")
    if in_json:
        print(as_json({**numbers, "oldest_due": moment(found.oldest_due)}))
        return
    rows = [(name.replace("_", " "), f"{number:,}") for name, number in numbers.items()]
    _print_table(("", ""), [*rows, ("oldest due", shown(found.oldest_due))])


def timelines(
    namespace: Namespace,
    state: Only = None,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """List the timelines that hold records, the earliest due of each state first."""

    async def listed(engine: DigestEngine) -> list[Timeline[JSON]]:
        return [timeline async for timeline in engine.timelines(state)]

    found = _ask(Address(url, namespace, timeout), listed)
    if not found and state is None:
        say(f"namespace {namespace!r} has no timelines")
    if in_json:
        _print_lines(timeline_json(timeline) for timeline in found)
        return
    rows = [
        (
            one.key,
            one.state,
            shown(one.due),
            f"{one.size:,}",
            str(one.attempt),
            f"{one.dropped:,}",
            one.last_error or "",
        )
        for one in found
    ]
    _print_table(("key", "state", "due", "records", "attempt", "dropped", "last error"), rows)


def show(
    key: Key,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Show a timeline with its records; nothing is delivered by that."""
    found = _ask(Address(url, namespace, timeout), lambda engine: engine.peek(key))
    if found is None:
        raise InvalidState(f"timeline {key!r} holds no records")
    if in_json:
        print(as_json(timeline_json(found, found.records)))
        return
    facts = f"{printable(found.key)}: {found.state}, due {shown(found.due)}, {count(len(found.records), 'record')}"
    if found.attempt:
        facts += f", attempt {found.attempt} {'is under way' if found.state == 'leased' else 'was made'}"
    if found.last_error:
        facts += f", last error: {shortened(found.last_error, ERROR_WIDTH)}"
    _print_table(("id", "timestamp", "value"), record_rows(found.records), facts)


def flush(
    key: Key,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Make a timeline due now."""
    flushed = _ask(Address(url, namespace, timeout), lambda engine: engine.flush(key))
    _done(flushed, in_json, {"key": key, "flushed": flushed}, "is due now", f"timeline {key!r} holds no records", key)


def delete(
    key: Key,
    namespace: Namespace,
    yes: Yes = False,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Drop a timeline with all its records; asks first, on a terminal."""
    _confirm(yes, f"Drop timeline {printable(key)} of {namespace} with all its records?")
    deleted = _ask(Address(url, namespace, timeout), lambda engine: engine.delete(key))
    _done(deleted, in_json, {"key": key, "deleted": deleted}, "is deleted", f"timeline {key!r} holds no records", key)


@dead.command("list")
def dead_list(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """List the dead letters, the oldest first."""

    async def listed(engine: DigestEngine) -> list[DeadLetter[JSON]]:
        return [letter async for letter in engine.dead_letters()]

    found = _ask(Address(url, namespace, timeout), listed)
    if not found:
        say(f"namespace {namespace!r} has no dead letters")
    if in_json:
        _print_lines(letter_json(letter) for letter in found)
        return
    console = _console()
    for one in found:  # no table: an id and a time fill most of a line, and neither may be cut
        print(f"{one.id}  {shown(one.buried_at)}  {count(len(one.records), 'record')}")
        line = f"  {printable(one.key)}: {shortened(one.reason, ERROR_WIDTH)}"
        console.print(Text(line), no_wrap=True, overflow="ellipsis")


@dead.command("show")
def dead_show(
    letter_id: LetterId,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Show a dead letter with its records."""
    found = _ask(Address(url, namespace, timeout), lambda engine: _letter(engine, letter_id))
    if in_json:
        print(as_json(letter_json(found, found.records)))
        return
    facts = f"{printable(found.key)}: buried {shown(found.buried_at)} after {count(found.attempt, 'attempt')}"
    _print_table(("id", "timestamp", "value"), record_rows(found.records), f"{facts}: {printable(found.reason)}")


@dead.command("replay")
def dead_replay(
    letter_id: LetterId,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Put the records of a dead letter back into their timeline."""

    async def replayed(engine: DigestEngine) -> tuple[DeadLetter[JSON], bool]:
        letter = await _letter(engine, letter_id)
        return letter, await engine.replay(letter.id)

    letter, ready = _ask(Address(url, namespace, timeout), replayed)
    facts = {"id": letter.id, "key": letter.key, "replayed": True, "ready": ready}
    done = f"has {count(len(letter.records), 'record')} back and {'is due now' if ready else 'waits'}"
    _done(True, in_json, facts, done, "", letter.key)


@dead.command("discard")
def dead_discard(
    letter_id: LetterId,
    namespace: Namespace,
    yes: Yes = False,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Drop a dead letter; asks first, on a terminal."""
    address = Address(url, namespace, timeout)
    letter = _ask(address, lambda engine: _letter(engine, letter_id))
    records = f"{count(len(letter.records), 'record')} of {printable(letter.key)}"
    _confirm(yes, f"Drop dead letter {letter.id} of {namespace} ({records})?")
    discarded = _ask(address, lambda engine: engine.discard(letter.id))
    facts = {"id": letter.id, "discarded": discarded}
    _done(discarded, in_json, facts, "is gone", f"there is no dead letter {letter.id!r} any more", letter.id)


async def _letter(engine: DigestEngine, letter_id: str) -> DeadLetter[JSON]:
    """The dead letter of that id, or else the only one whose id begins so."""
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


def _ask(address: Address, question: Callable[[DigestEngine], Awaitable[T]]) -> T:
    async def answer() -> T:
        async with address.engine() as engine:
            return await question(engine)

    return asyncio.run(answer())


def _confirm(yes: bool, question: str) -> None:
    if not yes and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


def _done(success: bool, in_json: bool, facts: dict[str, Any], done: str, failed: str, name: str) -> None:
    if in_json:
        print(as_json(facts))
    if not success:
        raise InvalidState(failed)
    if not in_json:
        print(f"{printable(name)} {done}")


def _print_lines(objects: Iterable[dict[str, Any]]) -> None:
    for one in objects:
        print(as_json(one))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Cells are text from strangers: no markup, no control characters."""
    console = _console()
    if title:
        console.print(Text(title), soft_wrap=True)
    table = Table(box=None, show_header=any(columns), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name in WHOLE)
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    console.print(table)
