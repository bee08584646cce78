"""The commands by name, and the exit code for each way they end."""

from __future__ import annotations

import logging
import os
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import rich as rich  # its parts are imported when needed: this only finds out if it is missing
import typer

from aiodigest import AiodigestError, BackendUnavailable, ConfigurationError, InvalidArgument, __version__
from aiodigest.cli.bench import bench
from aiodigest.cli.dead import dead
from aiodigest.cli.demo import demo
from aiodigest.cli.doctor import doctor
from aiodigest.cli.options import Once, help_without_command
from aiodigest.cli.output import FAILED, INTERRUPTED, UNAVAILABLE, USAGE, is_of_output, note_errors, reason_of, say
from aiodigest.cli.pipe.command import EXAMPLES, pipe
from aiodigest.cli.reshard import reshard
from aiodigest.cli.run.command import run as run_engines
from aiodigest.cli.send import EXAMPLES as SEND_EXAMPLES
from aiodigest.cli.send import send
from aiodigest.cli.timelines import add, delete, explain, flush, mute, namespaces, show, stats, timelines, unmute
from aiodigest.cli.top import top

UsageError: Any = typer.BadParameter.__base__  # wherever the library keeps it

app = typer.Typer(
    help="One event sends at once; a burst sends one more message, not five hundred.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Once)(demo)
app.command(cls=Once, epilog=EXAMPLES)(pipe)
app.command(cls=Once, epilog=SEND_EXAMPLES)(send)
app.command("run", cls=Once)(run_engines)
ABOUT_TIMELINES = (namespaces, stats, timelines, show, explain, add, flush, mute, unmute, delete)
for command in (*ABOUT_TIMELINES, top, reshard, doctor, bench):
    app.command(cls=Once)(command)
app.add_typer(dead, name="dead")


def _version(asked: bool) -> None:
    if asked:
        print(f"aiodigest {__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")


@app.callback(invoke_without_command=True)
def options(context: typer.Context, version: Annotated[bool, VERSION] = False) -> None:
    help_without_command(context)


def run() -> int:
    """Run the command line and return its exit code; an error prints one line on standard error."""
    for file in (0, 1, 2):  # uvloop ends a process in which another file takes the place of a closed standard stream
        try:
            os.fstat(file)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any key can be shown
    note_errors()
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


def _report(error: Exception) -> int:
    """Print the line for an error and return the exit code; raise what is a fault of the program."""
    match error:
        case AiodigestError():
            say(str(error))
            if isinstance(error, BackendUnavailable):
                return UNAVAILABLE
            return USAGE if isinstance(error, ConfigurationError | InvalidArgument) else FAILED
        case typer.Abort():
            say("nothing was done")
            return FAILED
        case OSError() if not is_of_output(error):
            say(reason_of(error))
            return FAILED
        case OSError():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again when it exits
            if not isinstance(error, BrokenPipeError):  # the reader has seen enough
                say(f"standard output cannot be written: {error}")
            return FAILED
        case UsageError():
            command = error.ctx.command_path if error.ctx is not None else "aiodigest"
            say(f"{error.format_message()} (see {command} --help)")
            return error.exit_code
        case _:
            raise error
