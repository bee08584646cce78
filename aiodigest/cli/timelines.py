"""``aiodigest stats``, ``timelines``, ``show``, ``add``, ``mute`` and others: views of one namespace from outside."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Annotated, TypeAlias, get_args

import typer

from aiodigest import JSON, DigestEngine, Explanation, InvalidState, State, Timeline
from aiodigest.cli.options import EMBEDDED, AsJson, Location, Namespace, Timeout, Url, collect, duration, parsed_option
from aiodigest.cli.output import confirm, print_json, print_result, print_table, say
from aiodigest.cli.rendering import count, readable_time, record_rows, shortened, view_json

ERROR_WIDTH = 80  # characters
NO_RECORDS = "timeline {!r} holds no records"
VALUE = "JSON, or text if it is no JSON."
ADDED_ID = "The id of the record: it replaces one that waits under it. [default: a new one]"
UNITS = dict.fromkeys(("waiting", "ready", "leased", "mutes"), "timeline") | {
    "dead": "dead letter",
    "digests": "digest",
    "letters_dropped": "dead letter",
}  # of numbers that are not records
STATES: tuple[State, ...] = get_args(State)


def state_named(text: str) -> State:
    """Return the state of that name. Raises ValueError if there is none."""
    if text not in STATES:
        raise ValueError(f"{text!r} is not a state: write {', '.join(STATES)}")
    return text


def aware_time(text: str) -> datetime:
    """Parse a time with its zone. Raises ValueError."""
    with suppress(ValueError):
        if (time := datetime.fromisoformat(text)).tzinfo is not None:
            return time
    raise ValueError(f"{text!r} is not a time with its zone: write 2030-01-31T09:00+01:00 or 2030-01-31T08:00Z")


Key: TypeAlias = Annotated[str, typer.Argument(show_default=False, help="The key of a timeline.")]
OnlyState: TypeAlias = Annotated[
    State | None,
    parsed_option(
        "--state", "Only timelines in this state.", state_named, "|".join(STATES), autocompletion=lambda: list(STATES)
    ),
]
Until: TypeAlias = Annotated[
    datetime | None,
    parsed_option("--until", "Until this time: 2030-01-31T09:00+01:00, or a date and Z.", aware_time, "TIME"),
]
For: TypeAlias = Annotated[
    float | None, parsed_option("--for", "For so long from now: 30m, 8h, 7d, or plain seconds.", duration, "DURATION")
]
Drop: TypeAlias = Annotated[bool, typer.Option("--drop", help="Drop what is added meanwhile, and count it.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def until_of(timeline: Timeline[JSON]) -> str:
    """Say until when a timeline is muted."""
    return f"until {readable_time(timeline.muted_until)}" if timeline.muted_until else "until it is unmuted"


def due_of(timeline: Timeline[JSON]) -> str:
    """Return the time when a timeline is due, or "never" if a mute without end keeps it."""
    never = timeline.state == "muted" and timeline.muted_until is None
    return "never" if never else readable_time(timeline.due)


def stats(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """Count timelines by state, dead letters and events.

    Events are counted since the namespace was created.
    """
    location = Location(url, namespace, timeout)
    found = location.ask(DigestEngine.stats)
    facts = asdict(found)
    if not any(facts.values()):
        say(f"{location.where} is empty")
    if in_json:
        print_json(facts)
        return
    late = {
        "oldest_due": readable_time(found.oldest_due), "overdue": f"{found.overdue:,.1f} s",
        "stepped_back": f"{found.stepped_back:,.1f} s",
    }  # fmt: skip
    rows = {name: count(facts[name], UNITS.get(name, "record")) for name in facts if name not in late} | late
    print_table(("", ""), [(name.replace("_", " "), text) for name, text in rows.items()])


def timelines(
    namespace: Namespace, state: OnlyState = None, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False
) -> None:
    """List the timelines that hold records or are muted.

    Those of each state are in order, the earliest due first.
    """
    location = Location(url, namespace, timeout)
    found = location.ask(lambda engine: collect(engine.timelines(state)))
    if not found:
        say(f"{location.where} has no {f'{state} ' if state else ''}timelines")
        return
    if in_json:
        print_json(*map(view_json, found))
        return
    rows = (
        (t.key, t.state, due_of(t), f"{t.size:,}", str(t.attempt), f"{t.dropped:,}", t.last_error or "") for t in found
    )
    print_table(("key", "state", "due", "records", "attempt", "dropped", "last error"), rows)


def show(key: Key, namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """Show a timeline with its records, without delivering it."""
    found = Location(url, namespace, timeout).ask(lambda engine: engine.peek(key))
    if found is None:
        raise InvalidState(NO_RECORDS.format(key))
    if in_json:
        print_json(view_json(found, records=True))
        return
    title = f"{key}: {found.state}, due {due_of(found)}, {count(len(found.records), 'record')}"
    if found.muted:
        title += f", muted {until_of(found)}{', what is added is dropped' if found.drops else ''}"
    if found.attempt:
        title += f", attempt {found.attempt} {'is in progress' if found.state == 'leased' else 'was made'}"
    if found.last_error:
        title += f", last error: {shortened(found.last_error, ERROR_WIDTH)}"
    print_table(("id", "timestamp", "value"), record_rows(found.records), title)


def explain(
    key: Key, namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False
) -> None:
    """Say why a timeline has not been delivered yet.

    It tells until when the timeline waits, and what for. What the policy says is known to its own engine alone: call
    engine.explain() there.
    """

    async def ask(engine: DigestEngine) -> tuple[Explanation, bool]:
        told = await engine.explain(key)
        return told, told.state == "empty" and not any(asdict(await engine.stats()).values())

    location = Location(url, namespace, timeout)
    told, is_empty = location.ask(ask)
    if is_empty:
        say(f"{location.where} is empty")
    has_times = any(reason.at is not None for reason in told.reasons)
    print_result(asdict(told), f"{key}: {told}{' (UTC)' * has_times}", in_json)


def namespaces(url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """List the namespaces on a server.

    It scans the names of all keys, for which its user needs +scan.
    """

    async def ask() -> list[str]:
        backend = Location(url, "any", timeout).engine().backend  # the engine is not entered: its user may have no keys
        try:
            return await backend.operations.namespaces()
        finally:
            await backend.aclose()

    found = asyncio.run(ask())
    if in_json:
        print_json(*({"namespace": name} for name in found))
    elif found:
        print("\n".join(found))
    else:
        say("there are no namespaces")


def add(
    key: Key, value: Annotated[str, typer.Argument(help=VALUE)], namespace: Namespace,
    id: Annotated[str | None, typer.Option(help=ADDED_ID)] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Take VALUE as text, even if it is JSON.")] = False,
    urgent: Annotated[bool, typer.Option(help="Make the timeline due now, as flush does.")] = False,
    url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False,
) -> None:  # fmt: skip
    """Add a record to a timeline, under the default policy.

    It says whether the timeline is due now.
    """
    record: JSON = value
    if not as_text:
        with suppress(ValueError, RecursionError):
            record = json.loads(value, parse_constant=int)  # which refuses NaN and the like

    async def put(engine: DigestEngine) -> tuple[bool, bool]:
        if await engine.add(key, record, record_id=id, urgent=urgent):
            return True, False
        found = await engine.peek(key)  # it may have been due before, or be muted
        return found is not None and found.state == "ready", found is not None and found.muted and found.drops

    ready, dropped = Location(url, namespace, timeout).ask(put)
    told = f"{key} {'is due now' if ready else 'waits'}" if not dropped else f"the record is dropped: {key} is muted"
    print_result({"key": key, "ready": ready, "dropped": dropped}, told, in_json)


def flush(key: Key, namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> None:
    """Make a timeline due now."""

    async def put(engine: DigestEngine) -> tuple[bool, Timeline[JSON] | None]:
        flushed = await engine.flush(key)
        return flushed, None if flushed else await engine.peek(key)

    flushed, found = Location(url, namespace, timeout).ask(put)
    failure = "" if flushed else NO_RECORDS.format(key)
    if found is not None and found.muted:
        failure = f"timeline {key!r} is muted {until_of(found)}: aiodigest unmute ends that"
    print_result({"key": key, "flushed": flushed}, f"{key} is due now", in_json, failure=failure)


def mute(
    key: Key, namespace: Namespace, until: Until = None, length: For = None, drop: Drop = False, url: Url = EMBEDDED,
    timeout: Timeout = 5.0, in_json: AsJson = False,
) -> None:  # fmt: skip
    """Hold a timeline back for a time, or until it is unmuted.

    What is added meanwhile waits, unless it is dropped.
    """
    if until is not None and length is not None:
        raise typer.BadParameter("give --until or --for, not both")
    end = until if length is None else timedelta(seconds=length)

    async def put(engine: DigestEngine) -> Timeline[JSON] | None:
        await engine.mute(key, end, drop)
        return await engine.peek(key)

    found = Location(url, namespace, timeout).ask(put)
    facts = {"key": key, "muted": found is not None and found.muted, "until": found and found.muted_until}
    muted = f"{key} is muted {until_of(found)}" if found is not None and found.muted else ""
    print_result(facts, muted or f"{key} is not muted: that time has passed", in_json)


def unmute(
    key: Key, namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False
) -> None:
    """End the mute of a timeline."""
    unmuted = Location(url, namespace, timeout).ask(lambda engine: engine.unmute(key))
    failure = "" if unmuted else f"timeline {key!r} is not muted"
    print_result({"key": key, "unmuted": unmuted}, f"{key} is not muted any more", in_json, failure=failure)


def delete(
    key: Key, namespace: Namespace, yes: Yes = False, url: Url = EMBEDDED, timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:  # fmt: skip
    """Delete a timeline with all its records.

    On a terminal it asks first.
    """
    confirm(yes, f"Delete timeline {key} of {namespace} with all its records?")
    deleted = Location(url, namespace, timeout).ask(lambda engine: engine.delete(key))
    failure = "" if deleted else NO_RECORDS.format(key)
    print_result({"key": key, "deleted": deleted}, f"{key} is deleted", in_json, failure=failure)
