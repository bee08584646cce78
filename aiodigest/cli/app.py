"""The commands by name, and the exit code for each way they end."""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Protocol, runtime_checkable

import rich as rich  # its parts are imported when they are needed: here only to find out that it is not there
import typer

from aiodigest import AiodigestError, __version__
from aiodigest.cli import inspect
from aiodigest.cli.bench import bench
from aiodigest.cli.dead import dead
from aiodigest.cli.demo import demo
from aiodigest.cli.doctor import doctor
from aiodigest.cli.options import FAILED, INTERRUPTED, exit_code, help_without_command
from aiodigest.cli.pipe import EXAMPLES, pipe
from aiodigest.cli.reshard import reshard
from aiodigest.cli.run import run as run_engines
from aiodigest.cli.top import top
from aiodigest.cli.words import say

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
for look in (inspect.stats, inspect.timelines, inspect.show, inspect.flush, inspect.delete):
    app.command()(look)
app.command()(top)
app.command()(reshard)
app.command()(doctor)
app.command()(bench)
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
    """Show the help, if there is no command; see ABOUT."""
    help_without_command(context)


@runtime_checkable
class Complaint(Protocol):
    """An argument error of the command line library, wherever the library keeps its class."""

    exit_code: int
    ctx: typer.Context | None

    def format_message(self) -> str: ...


def fill_closed() -> None:
    """Open /dev/null for closed standard streams: if another file became one of them, uvloop would end the process."""
    for file in (0, 1, 2):
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def run() -> int:
    """Run the command line; an error prints one line on standard error."""
    fill_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # no key may be too strange to be shown
    logging.getLogger("aiodigest").addHandler(logging.NullHandler())  # else Python shows warnings of its own accord
    try:
        code: object = app(prog_name="aiodigest", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # here it is told if that fails
    except AiodigestError as error:
        say(str(error))
        return exit_code(error)
    except typer.Abort:
        say("nothing was done")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more when it ends
        if not isinstance(error, BrokenPipeError):  # whoever reads has seen enough
            say(f"standard output cannot be written: {error}")
        return FAILED
    except Exception as error:
        if not isinstance(error, Complaint):
            raise
        command = error.ctx.command_path if error.ctx is not None else "aiodigest"
        say(f"{error.format_message()} (see {command} --help)")
        return error.exit_code
    return code if isinstance(code, int) else 0
