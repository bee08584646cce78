"""Options that commands share, and what becomes of errors."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, TypeAlias, TypeVar

import typer

from aiodigest import AiodigestError, BackendUnavailable, ConfigurationError, DigestEngine, InvalidArgument
from aiodigest.commands.words import as_json, printable, rfc3339, say

T = TypeVar("T")

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = 1, 2, 69, 130

EMBEDDED = "embedded://"

UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")


def duration(value: str | float) -> float:
    """``250ms``, ``30s``, ``5m``, ``1h``, ``7d`` or plain seconds, in seconds."""
    match = DURATION.fullmatch(str(value).strip())
    if match is None:
        raise typer.BadParameter(f"{value!r} is no duration: write 250ms, 30s, 5m, 1h, 7d, or seconds")
    return float(match[1]) * UNITS[match[2]]


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser of an option's text, whose ValueError is told as that of the option."""

    def parser(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


Url: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="AIODIGEST_URL",
        help="redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, embedded:// or embedded:///folder.",
    ),
]
Namespace: TypeAlias = Annotated[
    str, typer.Option(envvar="AIODIGEST_NAMESPACE", show_default=False, help="The namespace of the engine to look at.")
]
Shards: TypeAlias = Annotated[
    int | None, typer.Option(envvar="AIODIGEST_SHARDS", min=1, help="If new, how many shards; else it must be so many.")
]
Timeout: TypeAlias = Annotated[
    float,
    typer.Option(
        envvar="AIODIGEST_TIMEOUT",
        parser=duration,
        metavar="DURATION",
        show_default=False,
        help="For one call to the server: 500ms, 5s, 1m, or seconds. [default: 5s]",
    ),
]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


@dataclass(frozen=True, slots=True)
class Address:
    """Where the timelines are that a command looks at."""

    url: str
    namespace: str
    timeout: float

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[DigestEngine, None]:
        """An engine that is connected, or else BackendUnavailable is raised, and that takes any JSON value."""
        engine = DigestEngine(self.url, namespace=self.namespace, timeout=self.timeout)
        async with engine:
            yield engine


def help_without_command(context: typer.Context) -> None:
    """Show the help of a group of commands when none of them is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def exit_code(error: AiodigestError) -> int:
    """What the shell is told of an error."""
    match error:
        case BackendUnavailable():
            return UNAVAILABLE
        case ConfigurationError() | InvalidArgument():
            return USAGE
        case _:
            return FAILED


class OneLine(logging.Formatter):
    """What the engine logs, as this command speaks: a line each, without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        reason = f" ({type(error).__name__}: {error})" if error is not None else ""
        return printable(f"aiodigest: {record.getMessage()}{reason}")


class AsObjects(logging.Formatter):
    """What is logged as JSON, an object a line.

    ``time``, ``level``, ``logger`` and ``message``, then what the line says in fields of its own (``timeline``,
    ``digest_id``, ``attempt``, ``reason`` ...), and ``error`` and ``traceback`` if there was an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            facts["error"] = f"{type(error).__name__}: {error}"
            facts["traceback"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in ORDINARY}
        return as_json({**facts, **{name: _plain(value) for name, value in extra.items() if name not in facts}})


ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # what every record of a log has


def _plain(value: object) -> object:
    """What JSON takes of a value of the log."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def log_to_stderr(in_json: bool = False) -> None:
    """Show the engine's warnings; or, as JSON, all that the process logs from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    if in_json:
        handler.setFormatter(AsObjects())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        return
    handler.setFormatter(OneLine())
    logger = logging.getLogger("aiodigest")
    logger.addHandler(handler)
    logger.propagate = False


def tell(text: str) -> None:
    """Say it; or log it, where the log is JSON and who reads it expects nothing else."""
    if any(isinstance(handler.formatter, AsObjects) for handler in logging.getLogger().handlers):
        logging.getLogger(__name__).info("%s", text)
    else:
        say(text)
