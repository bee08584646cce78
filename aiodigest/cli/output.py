"""Output of commands: answers on standard output; messages, logs and bars on standard error; and exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedWriter, FileIO, TextIOBase, TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO, cast

import typer

from aiodigest import AiodigestError, ChannelError, InvalidState
from aiodigest.cli.rendering import LINE_WIDTH, as_json, count, printable, shortened

if TYPE_CHECKING:
    from rich.console import Console

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = EXIT_CODES = 1, 2, 69, 130
PIPE_WIDTH = 250  # columns, where there is no terminal that has a width
PROGRESS_INTERVAL = 0.2  # seconds
UNFOLDED = {"due", "timestamp"}  # columns of a table
OF_OUTPUT = "Standard output was written."  # a note of errors
AHEAD, MOST = 64 * 1024, 1024 * 1024  # bytes of errors that wait for who reads them: of commands, and of messages


class ReaderGone(ChannelError):
    """Nobody reads standard output any more."""


class Output(FileIO):
    """Standard output, whose errors can be told from others."""

    def write(self, data: Any, /) -> int:
        with of_output():
            return super().write(data)


def note_errors() -> None:
    """Let errors of what is printed from now on say that they are of standard output."""
    if sys.stdout is not None and sys.stdout is sys.__stdout__:  # and not a test's
        raw, before = Output(1, "wb", closefd=False), cast("TextIOWrapper", sys.stdout)
        sys.stdout = TextIOWrapper(
            cast("Any", raw if isinstance(before.buffer, FileIO) else BufferedWriter(raw)), before.encoding,
            before.errors, line_buffering=before.line_buffering, write_through=before.write_through,
        )  # fmt: skip


@contextmanager
def of_output() -> Generator[None]:
    """Let the errors inside say that they are of standard output."""
    try:
        yield
    except OSError as error:
        error.add_note(OF_OUTPUT)
        raise


def is_of_output(error: OSError) -> bool:
    """True if an error came of writing to standard output."""
    return OF_OUTPUT in getattr(error, "__notes__", ())


def say(text: str, end: str = "\n") -> None:
    """Print one line on standard error, even if nobody is listening."""
    if sys.stderr is not None:  # it is None when closed by the caller
        with suppress(OSError, ValueError):
            print(f"aiodigest: {shortened(text, LINE_WIDTH)}{end}", end="", file=sys.stderr, flush=True)


def reason_of(error: OSError) -> str:
    """Return what an error of the system says, with the file that it is about."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


class Unhurried(TextIOBase):
    """Standard error, written by a thread: who is slow to read it, or never does, holds up nothing else.

    What is over ``MOST`` bytes is left out, and counted.
    """

    def __init__(self, file: int = 2) -> None:
        self._file = file
        self._waiting, self._size = bytearray(), 0  # with what is being written
        self._left_out = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> int:
        self.put(text.encode(errors="backslashreplace"))
        return len(text)

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def put(self, text: bytes) -> None:
        """Have bytes written, if there is room for them."""
        with self._changed:
            if self._size + len(text) > MOST:
                self._left_out += 1
                return
            self._waiting += text
            self._size += len(text)
            self._changed.notify()

    @property
    def is_behind(self) -> bool:
        return self._size > AHEAD

    def finish(self) -> None:
        """Wait until all is written."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._left_out or self._ended)
                if not self._waiting and not self._left_out:
                    return
                text, self._waiting = self._waiting, bytearray()
                if self._left_out:
                    text += f"aiodigest: {count(self._left_out, 'message')} left out: nobody read them\n".encode()
                    self._left_out = 0
            with suppress(OSError):
                write(self._file, text)
            with self._changed:
                self._size = len(self._waiting)


@contextmanager
def unhurried_errors() -> Generator[None]:
    """Let a thread write standard error inside."""
    if sys.stderr is None:
        yield
        return
    before, errors = sys.stderr, Unhurried()
    sys.stderr = cast("TextIO", errors)
    try:
        yield
    finally:
        sys.stderr = before
        errors.finish()


def pass_on(text: bytes) -> None:
    """Write what a command has written to its standard error."""
    if isinstance(sys.stderr, Unhurried):
        sys.stderr.put(text)
    else:
        with suppress(OSError):
            write(2, text)


def is_behind() -> bool:
    """True if much of what was written to standard error waits for somebody to read it."""
    return isinstance(sys.stderr, Unhurried) and sys.stderr.is_behind


def write(file: int, text: bytes | bytearray) -> None:
    """Write all of it, in one call unless the system takes less: only then can a kill cut it in two."""
    while text:
        text = text[os.write(file, text) :]


def is_terminal(stream: TextIO | None) -> bool:
    """True if a standard stream is a terminal; it is None when closed by the caller."""
    return stream is not None and stream.isatty()


def confirm(yes: bool, question: str) -> None:
    """Ask, if there is a terminal to ask on; raises Abort if the answer is no."""
    if not yes and is_terminal(sys.stdin):
        typer.confirm(shortened(question, LINE_WIDTH), abort=True, err=True)


def print_json(*objects: object) -> None:
    """Print each object as a line of JSON, at once: it may be read while the command runs."""
    print("".join(f"{as_json(one)}\n" for one in objects), end="", flush=True)


def print_result(facts: dict[str, Any], text: str, in_json: bool, *, failure: str = "") -> None:
    """Print what a command did, as JSON or ``text``; after a ``failure``, raise InvalidState instead of the text."""
    if in_json:
        print_json(facts)
    if failure:
        raise InvalidState(failure)
    if not in_json:
        print(shortened(text, LINE_WIDTH))


def console() -> Console:
    """Return standard output, coloured if it is a terminal and NO_COLOR is not set. Raises AiodigestError if closed."""
    from rich.console import Console

    if sys.stdout is None:
        raise AiodigestError("standard output is closed")
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Print a table. Cells are text from strangers: no markup, no control characters."""
    from rich.table import Column, Table
    from rich.text import Text

    screen = console()
    if title:
        screen.print(Text(shortened(title, LINE_WIDTH)), soft_wrap=True)
    headers = [Column(name, no_wrap=name in UNFOLDED) for name in columns]
    table = Table(*headers, box=None, show_header=any(columns), pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(shortened(cell, LINE_WIDTH), overflow="fold") for cell in row))
    screen.print(table)


@asynccontextmanager
async def progress_bar(
    work: str, total: int, done: Callable[[], int], *, in_bytes: bool = False
) -> AsyncGenerator[None, None]:
    """Show on standard error, if that is a terminal, how much of ``total`` is ``done``. Messages stand above the bar.

    Nothing may be printed on a terminal's standard output meanwhile.
    """
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        bar = progress.add_task(work, total=total)

        async def update() -> None:
            while True:
                progress.update(bar, completed=done())
                await asyncio.sleep(PROGRESS_INTERVAL)

        updating = asyncio.create_task(update())
        try:
            yield
        finally:
            updating.cancel()


class OneLine(logging.Formatter):
    """Log records in the style of the command's messages: a line each, without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        reason = f" ({type(error).__name__}: {error})" if error is not None else ""
        return shortened(f"aiodigest: {record.getMessage()}{reason}", LINE_WIDTH)


class PlainText(logging.Formatter):
    """Log records with time, traceback and all; but nothing in them can control a terminal, or look like another one.

    All but the first line of a record is indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        whole = super().format(record)
        head = self.formatMessage(record)
        below = map(printable, whole[len(head) :].split("\n")[1:])
        return "\n  ".join([shortened(head, LINE_WIDTH), *below])


class JSONLines(logging.Formatter):
    """Log records as JSON, one object per line, with fields of their own and those of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            facts["error"] = f"{type(error).__name__}: {error}"
            facts["traceback"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in STANDARD}
        return as_json({**facts, **{name: _json_value(value) for name, value in extra.items() if name not in facts}})


STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # fields of every record


def _json_value(value: object) -> object:
    """Return a value as JSON takes it, or else its repr."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def log_warnings() -> None:
    """Show the engine's warnings on standard error, a line each."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("aiodigest")
    handler.setFormatter(OneLine())
    logger.addHandler(handler)
    logger.propagate = False


def log_everything(*, in_json: bool = False) -> None:
    """Show everything the process logs from INFO on, on standard error, with times and tracebacks, or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if in_json else PlainText("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
