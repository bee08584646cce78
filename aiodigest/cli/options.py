"""Options that commands share, and the exit codes of errors."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import typer

from aiodigest import AiodigestError, BackendUnavailable, ConfigurationError, DigestEngine, InvalidArgument

T = TypeVar("T")

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = 1, 2, 69, 130

EMBEDDED = "embedded://"

UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")


def duration(value: str | float) -> float:
    """Read ``250ms``, ``30s``, ``5m``, ``1h``, ``7d`` or plain seconds, in seconds."""
    match = DURATION.fullmatch(str(value).strip())
    if match is None:
        raise typer.BadParameter(f"{value!r} is no duration: write 250ms, 30s, 5m, 1h, 7d, or seconds")
    return float(match[1]) * UNITS[match[2]]


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Make a parser of an option's text; its ValueError is reported as the option's."""

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
    """The location of the timelines that a command looks at."""

    url: str
    namespace: str
    timeout: float
    wait_replicas: int = 0

    @asynccontextmanager
    async def engine(self) -> AsyncGenerator[DigestEngine, None]:
        """Enter an engine that takes any JSON value; its calls raise BackendUnavailable while the server is away."""
        engine = DigestEngine(
            self.url, namespace=self.namespace, timeout=self.timeout, wait_replicas=self.wait_replicas
        )
        async with engine:
            yield engine


def help_without_command(context: typer.Context) -> None:
    """Show the help of a group of commands when none of them is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def exit_code(error: AiodigestError) -> int:
    """Return the shell's exit code for an error."""
    match error:
        case BackendUnavailable():
            return UNAVAILABLE
        case ConfigurationError() | InvalidArgument():
            return USAGE
        case _:
            return FAILED
