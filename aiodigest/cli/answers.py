"""Parts shared by commands that look at a store: the question, the confirmation, the answer as a table or JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from aiodigest import AiodigestError, DigestEngine, InvalidState
from aiodigest.cli.options import Address
from aiodigest.cli.words import as_json, is_terminal, printable

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

PIPE_WIDTH = 250  # columns, where there is no terminal that has a width
WHOLE = {"due", "timestamp"}  # columns that are not folded
ERROR_WIDTH = 80


def ask(address: Address, question: Callable[[DigestEngine], Awaitable[T]]) -> T:
    """Open an engine for this one question, and return its answer."""

    async def answer() -> T:
        async with address.engine() as engine:
            return await question(engine)

    return asyncio.run(answer())


def confirm(yes: bool, question: str) -> None:
    """Ask, if there is a terminal to ask on; raises Abort if the answer is no."""
    if not yes and is_terminal(sys.stdin):
        typer.confirm(question, abort=True, err=True)


def done(success: bool, in_json: bool, facts: dict[str, Any], done: str, failed: str, name: str) -> None:
    """Say that ``name`` was ``done``; if it was not, raise InvalidState(``failed``)."""
    if in_json:
        print(as_json(facts))
    if not success:
        raise InvalidState(failed)
    if not in_json:
        print(f"{printable(name)} {done}")


def print_lines(objects: Iterable[dict[str, Any]]) -> None:
    """Print JSON, an object a line."""
    for one in objects:
        print(as_json(one))


def console() -> Console:
    """Return standard output, coloured if it is a terminal and NO_COLOR is not set. Raises AiodigestError if closed."""
    from rich.console import Console

    if sys.stdout is None:
        raise AiodigestError("standard output is closed")
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table. Cells are text from strangers: no markup, no control characters."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    if title:
        screen.print(Text(title), soft_wrap=True)
    table = Table(box=None, show_header=any(columns), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name in WHOLE)
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in row))
    screen.print(table)
