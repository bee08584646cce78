"""The commands by name, and the exit code for each way they end."""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Protocol, runtime_checkable

import rich as rich  # its parts are imported when needed: this only finds out if it is missing
import typer

from aiodigest import AiodigestError, __version__
from aiodigest.cli.bench import bench
from aiodigest.cli.dead import dead
from aiodigest.cli.demo import demo
from aiodigest.cli.doctor import doctor
from aiodigest.cli.options import help_without_command
from aiodigest.cli.output import FAILED, INTERRUPTED, exit_code, say
from aiodigest.cli.pipe.command import EXAMPLES, pipe
from aiodigest.cli.reshard import reshard
from aiodigest.cli.run.command import run as run_engines
from aiodigest.cli.timelines import delete, flush, show, stats, timelines
from aiodigest.cli.top.command import top

ABOUT = "One event sends at once; a burst sends one more message, not five hundred."

app = typer.Typer(
    help=ABOUT,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command(epilog=EXAMPLES)(pipe)
app.command("run")(run_engines)
for command in (stats, timelines, show, flush, delete, top, reshard, doctor, bench):
    app.command()(command)
app.add_typer(dead, name="dead")


def _version(asked: bool) -> None:
    if asked:
        print(f"aiodigest {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    help_without_command(context)


@runtime_checkable
class Complaint(Protocol):
    """An argument error of the command line library, wherever the library keeps its class."""

    exit_code: int
    ctx: typer.Context | None

    def format_message(self) -> str: ...


def run() -> int:
    """Run the command line and return its exit code; an error prints one line on standard error."""
    _prepare_streams()
    logging.getLogger("aiodigest").addHandler(logging.NullHandler())  # else Python prints warnings by itself
    try:
        code: object = app(prog_name="aiodigest", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # a failure is reported here
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _report(error)
    return code if isinstance(code, int) else 0


def _prepare_streams() -> None:
    """Open /dev/null for closed standard streams, since uvloop ends a process in which another file becomes one."""
    for file in (0, 1, 2):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any key can be shown


def _report(error: Exception) -> int:
    """Print the line for an error and return the exit code; raise what is a fault of the program."""
    match error:
        case AiodigestError():
            say(str(error))
            return exit_code(error)
        case typer.Abort():
            say("nothing was done")
            return FAILED
        case OSError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again when it exits
            if not isinstance(error, BrokenPipeError):  # the reader has seen enough
                say(f"standard output cannot be written: {error}")
            return FAILED
        case _ if isinstance(error, Complaint):
            command = error.ctx.command_path if error.ctx is not None else "aiodigest"
            say(f"{error.format_message()} (see {command} --help)")
            return error.exit_code
        case _:
            raise error
