"""``aiodigest pipe``: a stream of JSON in, digests out."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from aiodigest import BackendUnavailable, DigestEngine, Policy
from aiodigest.cli import fields, lock
from aiodigest.cli.lines import Intake, Source, sources
from aiodigest.cli.logs import log_lines
from aiodigest.cli.loops import play, settle
from aiodigest.cli.options import (
    EMBEDDED,
    FAILED,
    USAGE,
    AsJson,
    Shards,
    Timeout,
    Url,
    checked,
    duration,
)
from aiodigest.cli.output import Output, prepare
from aiodigest.cli.piping import Pipe, pipe_engine, verdict
from aiodigest.cli.progress import progress_bar
from aiodigest.cli.render import Render, coloured_block, json_line, text_block
from aiodigest.cli.room import Room
from aiodigest.cli.words import say

MAX_SIZE = 500
CAPACITY, MOST = 1000, 10_000  # lines of a group that are held, by default and at the most
LOOK_AGAIN = 0.2  # seconds between looks at how much was read


class Format(StrEnum):
    """The print format of digests."""

    text = "text"
    json = "json"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a pipe; ``trims`` is True if a group may lose lines to its capacity."""

    files: tuple[Path, ...]
    shape: fields.Shape
    output: Format
    policy: Policy
    trims: bool
    url: str
    namespace: str
    shards: int | None
    timeout: float
    follow: bool
    strict: bool


def _due(text: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="When a digest is due", help=text, **settings)


def _delay(default: str | None, text: str) -> Any:
    shown = f"{text} [default: {default}]" if default else text
    return _due(shown, parser=duration, metavar="DURATION", show_default=False)


Group: TypeAlias = Annotated[
    fields.Template,
    typer.Option(
        "--group-by",
        parser=checked(fields.Template.parse),
        metavar="FIELD",
        show_default=False,
        help="What makes lines belong together: repository, payload.sender.login, or {event}:{repository}.",
    ),
]
Id: TypeAlias = Annotated[
    fields.Template | None,
    typer.Option(
        "--id",
        parser=checked(fields.Template.parse),
        metavar="FIELD",
        help="What names a line within its group: a later one replaces one that waits. [default: all are different]",
    ),
]
Timestamp: TypeAlias = Annotated[
    fields.Path | None,
    typer.Option(
        "--timestamp",
        parser=checked(fields.Path),
        metavar="FIELD",
        help="What orders the lines of a digest: ISO 8601 (UTC if it names no zone) or epoch seconds. "
        "[default, and where it is null: the time of arrival]",
    ),
]


EXAMPLES = """\b
Examples:
  journalctl -fo json | aiodigest pipe --group-by _SYSTEMD_UNIT --minimum-delay 1m
  aiodigest pipe --group-by '{event}:{repository}' --id id -o json < events.ndjson
  aiodigest pipe --follow app.log --group-by user.id --initial-delay 30s

DURATION is 250ms, 30s, 5m, 1h, 7d, or seconds.
"""


def pipe(
    group_by: Group,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", show_default=False, help="[default: standard input]")
    ] = None,
    id: Id = None,
    timestamp: Timestamp = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="For people, or a digest a line.")] = Format.text,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more at the end of a file.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at a malformed line: deliver what came before it, and exit 1.")
    ] = False,
    initial_delay: Annotated[float, _delay("0", "From the first line of a group to its digest.")] = 0.0,
    minimum_delay: Annotated[float, _delay("5m", "From a digest of a group to its next.")] = 300.0,
    increment_delay: Annotated[float, _delay("30s", "Each new line delays the pending digest.")] = 30.0,
    maximum_delay: Annotated[float, _delay("30m", "No digest is put off longer.")] = 1800.0,
    max_size: Annotated[
        int | None,
        _due(
            f"So many lines are due at once, and no digest has more. [default: {MAX_SIZE}; none with --capacity]",
            min=1,
            max=MOST,
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        _due(
            "A group keeps its newest lines; exit 1 if any is dropped. [default: none is, reading waits]",
            min=1,
            max=MOST,
        ),
    ] = None,
    max_age: Annotated[float | None, _delay(None, "Leave out lines that are older when they are due.")] = None,
    ttl: Annotated[float, _delay("7d", "Forget a group that nobody came back for.")] = 604_800.0,
    url: Url = EMBEDDED,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Where lines wait: 'pipe-' is put before it, so it is no engine's. [default: made from the other "
            "arguments]",
            show_default=False,
        ),
    ] = None,
    shards: Shards = None,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> int:
    """Group a stream of JSON objects, one a line, and print each group as digests.

    The first line of a group is printed at once (after another run of the same command, when --minimum-delay since
    the group's last digest is over); later lines wait and come together. At the end of the input all waiting lines are
    printed. Lines that were read are kept: after a crash, the same command on the same machine prints them. The same
    command cannot run twice at once there, unless --namespace tells them apart.
    """
    if in_json:
        output = Format.json
    trims = capacity is not None
    if capacity is None:
        max_size = max_size or MAX_SIZE
        capacity = max(CAPACITY, min(2 * max_size, MOST))
    policy = Policy(
        initial_delay=initial_delay, minimum_delay=minimum_delay, increment_delay=increment_delay,
        maximum_delay=maximum_delay, max_size=max_size, capacity=capacity, max_age=max_age, ttl=ttl,
    )  # fmt: skip
    shape = fields.Shape(group_by, id, timestamp)
    paths = tuple(files or ())
    if follow and (not paths or Path("-") in paths):
        raise typer.BadParameter("--follow needs a file: standard input is read to its end in any case")
    named = namespace or derived_namespace(url, paths, shape, output, policy)
    named = f"pipe-{named.removeprefix('pipe-')}"  # a pipe must not print the records of another engine
    return start(Settings(paths, shape, output, policy, trims, url, named, shards, timeout, follow, strict))


def derived_namespace(url: str, files: tuple[Path, ...], shape: fields.Shape, output: Format, policy: Policy) -> str:
    """Derive a namespace that only the same command has; on a server that others may use, only on the same machine."""
    place = "" if lock.is_embedded(url) else platform.node()
    names = [shape.group.text, shape.id and shape.id.text, shape.timestamp and shape.timestamp.text]
    meaning = [place, [os.path.abspath(file) for file in files], names, output.value, astuple(policy)]
    return f"pipe-{hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:20]}"


def start(settings: Settings) -> int:
    """Check that everything is there and nobody else runs this, and run it."""
    try:
        inputs = sources(settings.files)
    except OSError as error:
        say(_told(error))
        return USAGE
    engine = pipe_engine(settings.url, settings.namespace, settings.policy, settings.shards, settings.timeout)
    server = "" if lock.is_embedded(engine.url) else f"{hashlib.sha256(engine.url.encode()).hexdigest()[:8]}-"
    path = lock.data_folder(engine.url) / "pipes" / f"{server}{settings.namespace}.lock"
    try:
        with lock.alone(path, "this very command is running: give this one another --namespace"):
            prepare()
            return play(_run(settings, engine, inputs))
    except OSError as error:
        say(_told(error))
        return FAILED


def _told(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


async def _run(settings: Settings, engine: DigestEngine, inputs: list[Source]) -> int:
    output = Output(_renderer(settings))
    capacity = None if settings.trims else settings.policy.capacity
    room = Room(engine, output.deliver, capacity, repeats=settings.shape.id is not None)
    async with engine.delivering(room.deliver):
        await engine.stats()  # a pipe without a server says so at once, in one line
        await room.look()
        settle()
        pipe = Pipe(engine, settings.shape, Intake(inputs, settings.follow), output, room, settings.strict)
        try:
            async with shown(inputs, settings.follow):
                log_lines()  # above the bar
                await pipe.run()
        except (BackendUnavailable, OSError):
            verdict(pipe, output, settings.namespace, settings.strict)
            raise
    return verdict(pipe, output, settings.namespace, settings.strict)


@asynccontextmanager
async def shown(inputs: Sequence[Source], follow: bool) -> AsyncGenerator[None, None]:
    """Show how much was read of files with a known end, unless digests are printed on a terminal."""
    sizes = [source.size for source in inputs]
    if follow or None in sizes or os.isatty(1):
        yield
        return
    with progress_bar("reading", sum(size or 0 for size in sizes), in_bytes=True) as show:

        async def look() -> None:
            while True:
                show(sum(source.taken for source in inputs))
                await asyncio.sleep(LOOK_AGAIN)

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()


def _renderer(settings: Settings) -> Render:
    if settings.output is Format.json:
        return json_line
    return partial(coloured_block if os.isatty(1) else text_block, ids=settings.shape.id is not None)
