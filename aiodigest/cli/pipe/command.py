"""The command ``aiodigest pipe``: its options, and the parts that they are for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import typer

from aiodigest import (
    JSON,
    AiodigestError,
    BackoffMode,
    Bounds,
    DecorrelatedJitter,
    Digest,
    DigestEngine,
    InvalidArgument,
    RetryPolicy,
    data_folder,
)
from aiodigest.cli.destinations import (
    TRY,
    Collapse,
    Deliver,
    Execute,
    Fields,
    File,
    Subject,
    TryTimeout,
    alike_of,
    destination,
    names_of,
)
from aiodigest.cli.event_loop import run_service
from aiodigest.cli.options import EMBEDDED, AsJson, Timeout, Url, duration, parsed_option, zone_name_of
from aiodigest.cli.output import USAGE, reason_of, say, unhurried_errors
from aiodigest.cli.pipe import parser
from aiodigest.cli.pipe.feeder import Feeder
from aiodigest.cli.pipe.streams import Sender, Writer, open_sources, prepare
from aiodigest.cli.pipe.timing import cron_of, days_of, in_options, policy_of, spans_of
from aiodigest.cli.rendering import digest_json, digest_text, without

MAX_SIZE = 500
HELD, MOST = 1000, 10_000  # lines of a group that are held, and at most, as they are if its deliveries fail
RETRIES = RetryPolicy(max_attempts=1000, backoff=DecorrelatedJitter(base=1, cap=300))  # more than a day
PATIENCE = 300.0  # seconds
DRAIN = 10.0  # seconds for deliveries under way, if the user wants it to end now
LEASE = 5.0  # seconds: how long a restart waits for the digest a killed run was writing

FILES = typer.Argument(metavar="FILE", show_default=False, help="[default: standard input]")
GROUPS = (
    "The field that groups lines: repository, payload.sender.login, or a template {event}:{repository}; with --lines "
    "a regular expression, of which the group (?P<key>...), or else the first, does."
)
IDENTIFIES = (
    "The field that identifies a line in its group: a later line replaces one that waits. [default: each line is new]"
)
ORDERS = (
    "The field that orders the lines of a digest: ISO 8601 (UTC unless it names a zone) or epoch seconds. "
    "[default, and where it is null: the time of arrival]"
)
OUTPUT = typer.Option("--output", "-o", help="Text for people, or a JSON object per digest.")
STRICT = "Stop at a line that cannot be used: deliver what came before it, and exit 1."
FOLLOWS = "At the end of a file, wait for more. It begins at the start of the file at each run."
LINES = "Lines are plain text, and --id and --timestamp name groups (?P<id>...) of --group-by."
_delay = partial(parsed_option, parse=duration, metavar="DURATION")
INITIAL = _delay("--initial-delay", "From the first line of a group to its digest. [default: 0]")
GAP = "From one digest of a group to the next. [default: 5m; 0 with --quiet-delay, --price or --at]"
PUSH = "Each new line delays the pending digest. [default: a tenth of --minimum-delay]"
MINIMUM, INCREMENT = _delay("--minimum-delay", GAP), _delay("--increment-delay", PUSH)
LATEST = (
    "No digest is delayed longer, but by --at and --hours. "
    "[default: six times --minimum-delay, or more if another delay is longer; 30m if all are 0]"
)
MAXIMUM = _delay("--maximum-delay", LATEST)
QUIET = _delay("--quiet-delay", "A digest waits until its group has had no new line for so long.")
PRICE = _delay("--price", "One line may wait so long for others, n lines an nth part of it.")
TIMES = "Digests go out at these times, as cron has them: '0 9 * * mon-fri'; sooner only at --max-size and --max-bytes."
AT = parsed_option("--at", TIMES, cron_of, "CRON")
HOURS = parsed_option("--hours", "Digests go out in these hours alone: 08:00-20:00.", spans_of, "HH:MM-HH:MM")
DAYS = parsed_option("--days", "The days of --hours: mon-fri. [default: all]", days_of, "DAYS")
ZONES = "The time zone of --at and --hours, and of times that are shown: Europe/Paris. [default: UTC]"
ZONE = parsed_option("--tz", ZONES, zone_name_of, "ZONE")
FORGOTTEN = "Forget a group that no run has printed for so long. [default: 7d, or twice --maximum-delay]"
TTL = _delay("--ttl", FORGOTTEN)
LIMITS = f"A group of so many lines is due at once; no digest has more. [default: {MAX_SIZE}; none with --capacity]"
BYTES = "No digest has more bytes of lines: what is over comes in one more. A longer line is left out."
TRIMS = "A group keeps its newest lines; exit 1 if any is dropped. [default: none is dropped, reading waits]"
OUTDATED = _delay("--max-age", "Leave out lines that are older when they are due, and say how many.")
NAMES = (
    "Where lines wait: 'pipe-' is put before it, so that it is never an engine's. "
    "[default: derived from the other arguments]"
)
SHARDS = "Shards of a new namespace; an existing one must have so many."
GIVE_UP = (
    "After the end of the input, or with a group that is full, what failed is tried again until nothing was delivered "
    "for so long. [default: 5m]"
)
RETRY_FOR = _delay("--retry-for", GIVE_UP)
EXAMPLES = """\b
Examples:
  journalctl -fo json | aiodigest pipe --group-by _SYSTEMD_UNIT
  aiodigest pipe --group-by '{event}:{user}' --id id --json events.ndjson
  aiodigest pipe --follow app.log --group-by user.id --quiet-delay 30s
  aiodigest pipe --lines --group-by '^([a-z]+):' --exec ./notify app.log
  aiodigest pipe --group-by user --deliver 'smtp://localhost?to=me@x.org'

DURATION is 250ms, 30s, 5m, 1h, 7d, or plain seconds.
"""


def pipe(
    group_by: Annotated[str, typer.Option("--group-by", metavar="FIELD", help=GROUPS)],
    files: Annotated[list[Path] | None, FILES] = None,
    id: Annotated[parser.Template | None, parsed_option("--id", IDENTIFIES, parser.Template.parse, "FIELD")] = None,
    timestamp: Annotated[parser.Path | None, parsed_option("--timestamp", ORDERS, parser.Path, "FIELD")] = None,
    output: Annotated[Literal["text", "json"], OUTPUT] = "text",
    follow: Annotated[bool, typer.Option("--follow", "-f", help=FOLLOWS)] = False,
    lines: Annotated[bool, typer.Option("--lines", help=LINES)] = False,
    strict: Annotated[bool, typer.Option("--strict", help=STRICT)] = False,
    deliver: Deliver = None,
    execute: Execute = None,
    subject: Subject = None,
    template: File = None,
    fields: Fields = None,
    collapse: Collapse = None,
    try_timeout: TryTimeout = TRY,
    retry_for: Annotated[float, RETRY_FOR] = PATIENCE,
    initial_delay: Annotated[float, INITIAL] = 0.0,
    minimum_delay: Annotated[float | None, MINIMUM] = None,
    increment_delay: Annotated[float | None, INCREMENT] = None,
    maximum_delay: Annotated[float | None, MAXIMUM] = None,
    quiet_delay: Annotated[float | None, QUIET] = None,
    price: Annotated[float | None, PRICE] = None,
    at: Annotated[str | None, AT] = None,
    hours: Annotated[str | None, HOURS] = None,
    days: Annotated[str | None, DAYS] = None,
    tz: Annotated[str | None, ZONE] = None,
    max_size: Annotated[int | None, typer.Option(help=LIMITS, min=1, max=MOST)] = None,
    max_bytes: Annotated[int | None, typer.Option(help=BYTES, min=1, max=Bounds().digest)] = None,
    capacity: Annotated[int | None, typer.Option(help=TRIMS, min=1, max=MOST)] = None,
    max_age: Annotated[float | None, OUTDATED] = None,
    ttl: Annotated[float | None, TTL] = None,
    url: Url = EMBEDDED,
    namespace: Annotated[str | None, typer.Option(help=NAMES, show_default=False)] = None,
    shards: Annotated[int | None, typer.Option(envvar="AIODIGEST_SHARDS", min=1, help=SHARDS)] = None,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> int:
    """Group a stream of JSON objects; print or send digests.

    The input has one object per line, or with --lines plain text. The first digest of a group is printed at once (after
    another run of the same command, once --minimum-delay has passed since the group's last digest), and holds what was
    there: of a file all of its lines (up to 10,000), of a stream those that had come. Later lines wait and are printed
    together.
    With --quiet-delay, --price or --at the first ones wait, too. At the end of the input all waiting lines are printed,
    and before it what would be too many to hold, whatever --at and --hours say. Lines that were read are kept: after a
    crash, the same command on the same machine prints them, and says so, whatever it reads then (but if standard input
    is a file, only when it reads that file again). The same command cannot run twice at once there, unless --namespace
    tells the two apart.

    As text, lines that differ in numbers, ids, addresses and times alone are shown once, with how often they came,
    unless --collapse says otherwise.

    With --deliver or --exec digests are sent instead. What fails is tried again with growing waits, while other groups
    go on; what could not be delivered in the end is kept for the next run, and the exit code is 1, as it is if a digest
    was rejected. A repeat of a mail or a webhook has the same id as what it repeats.
    """
    shape = _shape(group_by, id, timestamp, lines)
    hidden = () if fields else shape.group.paths
    goal = destination(
        deliver,
        execute,
        subject=subject,
        template=template,
        fields=fields,
        collapse=collapse,
        tz=tz,
        hidden=hidden,
        timeout=try_timeout,
    )
    if in_json:
        output = "json"
    _refuse_together(goal is not None, output == "json", lines, fields, collapse)
    _refuse_zone(tz, output == "text" if goal is None else goal.is_read, at, hours)
    room = inf  # a group may lose lines
    if capacity is None:
        max_size = max_size or MAX_SIZE
        room, capacity = max(HELD, min(2 * max_size, MOST)), MOST
    policy = policy_of(
        at, hours, days, tz, initial_delay=initial_delay, minimum_delay=minimum_delay, increment_delay=increment_delay,
        maximum_delay=maximum_delay, quiet_delay=quiet_delay, price=price, max_size=max_size, capacity=capacity,
        max_age=max_age, ttl=ttl, max_bytes=max_bytes,
    )  # fmt: skip
    paths = files or []
    if follow and (not paths or Path("-") in paths):
        raise typer.BadParameter("--follow needs a file: standard input is read to its end in any case")
    if not namespace:  # one that only the same command has; on a server that others may use, only on the same machine
        place = "" if url.startswith(EMBEDDED) else platform.node()
        names = [group_by, *(["lines"] if lines else []), id and id.text, timestamp and timestamp.text]
        meaning: list[object] = [place, [os.path.abspath(path) for path in paths], names, output, repr(policy)]
        if goal is not None:
            meaning.append(goal.identity)
        status = os.fstat(0)
        if (not paths or Path("-") in paths) and stat.S_ISREG(status.st_mode):
            meaning.append([status.st_dev, status.st_ino])  # what one file left is not printed with another
        namespace = hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:20]
    try:
        sources = open_sources(paths)
    except OSError as error:
        say(reason_of(error))
        return USAGE
    # standard output never fails and then recovers, so nothing needs a later try
    at_once = RetryPolicy(max_attempts=1000, backoff=lambda attempt: 0.0)
    # a reader may be as slow as it likes while records live
    live = policy.terms.limits.ttl_ms * 0.00099
    make = partial(
        DigestEngine,
        url,
        namespace=f"pipe-{namespace.removeprefix('pipe-')}",
        policy=policy,
        retry=at_once if goal is None else RETRIES,
        backoff_mode=BackoffMode(maximum=0) if goal is None else BackoffMode(),
        shards=shards,
        lease_timeout=LEASE,
        delivery_timeout=live if goal is None else 2 * try_timeout + 5,  # a channel may wait for its turn as long
        drain_timeout=1 if goal is None else DRAIN,
        timeout=timeout,
    )
    try:
        engine = make()
    except InvalidArgument as error:  # of a policy that does not go with the retries of a delivery
        raise typer.BadParameter(in_options(error)) from None
    chosen = None if fields is None else names_of(fields)
    alike = alike_of(collapse, chosen)

    def as_text(digest: Digest[JSON]) -> bytes:
        return digest_text(without(digest, hidden), fields=chosen, alike=alike, tz=tz, on_terminal=os.isatty(1))

    render = digest_json if output == "json" else as_text
    try:
        with locked(lock_path(engine.url, engine.namespace)), unhurried_errors():
            if goal is None:
                prepare()
            receiver = (
                Writer(render)
                if goal is None
                else Sender(goal.make(), has_end=not follow and all(source.size is not None for source in sources))
            )
            patience = inf if goal is None else retry_for
            feeder = Feeder(engine, make(), shape, receiver, room=room, most=MOST, strict=strict, patience=patience)
            return run_service(feeder.run(sources, follow))
    except OSError as error:
        raise AiodigestError(reason_of(error)) from error


def _refuse_together(sends: bool, in_json: bool, lines: bool, fields: str | None, collapse: str | None) -> None:
    """Raise BadParameter for options of which one makes the other meaningless."""
    if sends and in_json:
        raise typer.BadParameter("--json is for standard output: leave it out with --deliver and --exec")
    if fields is not None and in_json:
        raise typer.BadParameter("--fields is for text: JSON has all fields")
    if collapse is not None and in_json:
        raise typer.BadParameter("--collapse is for text: JSON has all lines")
    if fields is not None and lines:
        raise typer.BadParameter("--fields names fields of JSON, and --lines are plain text")


def _refuse_zone(tz: str | None, is_read: bool, at: str | None, hours: str | None) -> None:
    """Raise BadParameter for a time zone of no times."""
    if tz is not None and not is_read and at is None and hours is None:
        raise typer.BadParameter("--tz needs --at or --hours, or times that people read: JSON has times in UTC")


def _shape(group_by: str, id: parser.Template | None, timestamp: parser.Path | None, lines: bool) -> parser.Shape:
    """Return where the key, the id and the time of a line are. Raises BadParameter."""
    try:
        if lines:
            return parser.Shape.of_text(parser.expression_of(group_by), id, timestamp)
        return parser.Shape(parser.Template.parse(group_by), id, timestamp)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--group-by'") from None


def lock_path(url: str, namespace: str) -> Path:
    """Return the path of the lock file for a namespace; ``url`` has no password."""
    server = "" if url.startswith(EMBEDDED) else f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-"
    return data_folder(url) / "pipes" / f"{server}{namespace}.lock"


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Hold the lock file, which stays and means nothing. Raises AiodigestError if another process does, and OSError."""
    for missing in reversed([each for each in path.parents if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AiodigestError("the same command is already running: give this one another --namespace") from None
        yield
