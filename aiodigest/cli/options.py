"""Options that several commands share, and the engine that they describe."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from typer.core import TyperCommand

from aiodigest import ConfigurationError, DigestEngine

T = TypeVar("T")

EMBEDDED = "embedded://"

UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")


def duration(value: str | float) -> float:
    """Parse ``250ms``, ``30s``, ``5m``, ``1h``, ``7d`` or plain seconds; return seconds. Raises ValueError."""
    match = DURATION.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a duration: write 250ms, 30s, 5m, 1h, 7d, or plain seconds")
    return float(match[1]) * UNITS[match[2]]


def parsed_option(name: str, text: str, parse: Callable[[str], object], metavar: str, **settings: Any) -> Any:
    """Make an option whose text is parsed; a ValueError or a ConfigurationError is reported as the option's."""

    def parser(given: str) -> object:
        try:
            return parse(given)
        except (ValueError, ConfigurationError) as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(name, parser=parser, metavar=metavar, show_default=False, help=text, **settings)


def zone_name_of(text: str) -> str:
    """Return the name of a time zone, if there is one of that name. Raises InvalidArgument."""
    from aiodigest import Hours  # imports time zones

    return Hours("00:00-24:00", tz=text).tz


class Once(TyperCommand):
    """Command whose options with one value are given once: of two, one would count, and the other be lost unsaid."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError."""
        if not ctx.resilient_parsing:  # as for the completion of a line that is being typed
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            for param, times in Counter[Any](given).items():
                if times > 1 and param.param_type_name == "option" and not (param.is_flag or param.multiple):
                    ctx.fail(f"{param.opts[0]} is given twice")
        return super().parse_args(ctx, args)


URL = "redis://, rediss://, unix://, redis+sentinel://, redis+cluster://, valkey://..., embedded:// or embedded:///folder."
Url: TypeAlias = Annotated[str, typer.Option(envvar="AIODIGEST_URL", help=URL)]
Namespace: TypeAlias = Annotated[
    str, typer.Option(envvar="AIODIGEST_NAMESPACE", show_default=False, help="The namespace of the engine.")
]
TIMEOUT = "Time limit of one call to the server: 500ms, 5s, 1m, or plain seconds. [default: 5s]"
Timeout: TypeAlias = Annotated[
    float, parsed_option("--timeout", TIMEOUT, duration, "DURATION", envvar="AIODIGEST_TIMEOUT")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@dataclass(frozen=True, slots=True)
class Location:
    """The namespace that a command works on, and its server."""

    url: str
    namespace: str
    timeout: float
    wait_replicas: int = 0

    def engine(self) -> DigestEngine:
        """Make an engine for any JSON value."""
        return DigestEngine(self.url, namespace=self.namespace, timeout=self.timeout, wait_replicas=self.wait_replicas)

    @property
    def where(self) -> str:
        """The namespace and the server in words, without a password."""
        return f"namespace {self.namespace!r} on {self.engine().url}"

    def ask(self, question: Callable[[DigestEngine], Awaitable[T]]) -> T:
        """Enter an engine for this one question and return the answer. Raises BackendUnavailable."""

        async def answer() -> T:
            async with self.engine() as engine:
                return await question(engine)

        return asyncio.run(answer())


async def collect(items: AsyncIterable[T]) -> list[T]:
    """Return all items."""
    return [item async for item in items]


def help_without_command(context: typer.Context) -> None:
    """Show the help of a group of commands when none of them is given."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
