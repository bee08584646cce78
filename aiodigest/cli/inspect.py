"""``aiodigest stats``, ``timelines``, ``show``, ``flush`` and ``delete``: an engine's timelines, from outside."""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

import typer

from aiodigest import JSON, DigestEngine, InvalidState, State, Stats, Timeline
from aiodigest.cli.answers import ERROR_WIDTH, ask, confirm, done, print_lines, print_table
from aiodigest.cli.options import EMBEDDED, Address, AsJson, Namespace, Timeout, Url, Yes, checked
from aiodigest.cli.views import record_rows, shown, stats_json, timeline_json
from aiodigest.cli.words import as_json, count, printable, say, shortened

STATES: tuple[State, ...] = get_args(State)


def state_named(text: str) -> State:
    """Return the state of that name. Raises ValueError if there is none."""
    for state in STATES:
        if state == text:
            return state
    raise ValueError(f"{text!r} is no state: write {', '.join(STATES)}")


Key: TypeAlias = Annotated[str, typer.Argument(show_default=False, help="The key of a timeline.")]
Only: TypeAlias = Annotated[
    State | None,
    typer.Option(
        "--state",
        parser=checked(state_named),
        metavar="|".join(STATES),
        help="Only these.",
        autocompletion=lambda: list(STATES),
    ),
]


def stats(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """Count timelines by state, dead letters, and events since the namespace was made."""

    async def counted(engine: DigestEngine) -> tuple[str, Stats]:
        return engine.url, await engine.stats()

    where, found = ask(Address(url, namespace, timeout), counted)
    facts = stats_json(found)
    if not any(facts.values()):
        say(f"namespace {namespace!r} on {where} holds nothing")
    if in_json:
        print(as_json(facts))
        return
    rows = [(name.replace("_", " "), f"{number:,}") for name, number in facts.items() if name != "oldest_due"]
    print_table(("", ""), [*rows, ("oldest due", shown(found.oldest_due))])


def timelines(
    namespace: Namespace,
    state: Only = None,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """List the timelines that hold records, the earliest due of each state first."""

    async def listed(engine: DigestEngine) -> tuple[str, list[Timeline[JSON]]]:
        return engine.url, [timeline async for timeline in engine.timelines(state)]

    where, found = ask(Address(url, namespace, timeout), listed)
    if not found and state is None:
        say(f"namespace {namespace!r} on {where} has no timelines")
    if in_json:
        print_lines(timeline_json(timeline) for timeline in found)
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
    print_table(("key", "state", "due", "records", "attempt", "dropped", "last error"), rows)


def show(
    key: Key,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Show a timeline with its records; that delivers nothing."""
    found = ask(Address(url, namespace, timeout), lambda engine: engine.peek(key))
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
    print_table(("id", "timestamp", "value"), record_rows(found.records), facts)


def flush(
    key: Key,
    namespace: Namespace,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Make a timeline due now."""
    flushed = ask(Address(url, namespace, timeout), lambda engine: engine.flush(key))
    done(flushed, in_json, {"key": key, "flushed": flushed}, "is due now", f"timeline {key!r} holds no records", key)


def delete(
    key: Key,
    namespace: Namespace,
    yes: Yes = False,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Drop a timeline with all its records; asks first, on a terminal."""
    confirm(yes, f"Drop timeline {printable(key)} of {namespace} with all its records?")
    deleted = ask(Address(url, namespace, timeout), lambda engine: engine.delete(key))
    done(deleted, in_json, {"key": key, "deleted": deleted}, "is deleted", f"timeline {key!r} holds no records", key)
