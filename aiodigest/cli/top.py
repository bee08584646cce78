"""``aiodigest top``: the activity of a namespace, look by look."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import Annotated, TypeAlias

import typer

from aiodigest import AiodigestError, BackendUnavailable
from aiodigest.cli.answers import console
from aiodigest.cli.looks import Look, away, look_at, look_json, rates
from aiodigest.cli.loops import stopped_by, until
from aiodigest.cli.options import EMBEDDED, Address, AsJson, Namespace, Timeout, Url, duration
from aiodigest.cli.words import as_json, is_terminal

SHORTEST = 0.1  # seconds between two looks: each is a few calls to the server

Show: TypeAlias = Callable[[Look, dict[str, float] | None, str], None]


def pace(text: str) -> float:
    """Read the time between two looks."""
    seconds = duration(text)
    if seconds < SHORTEST:
        raise typer.BadParameter(f"{text!r} is too short: at least 100ms")
    return seconds


Interval: TypeAlias = Annotated[
    float,
    typer.Option(
        parser=pace,
        metavar="DURATION",
        show_default=False,
        help="From one look to the next: 500ms, 5s, 1m, or seconds; at least 100ms. [default: 1s]",
    ),
]
Looks: TypeAlias = Annotated[
    int | None,
    typer.Option("--count", min=1, show_default=False, help="So many looks. [default: on a terminal no end, else 1]"),
]


def top(
    namespace: Namespace,
    interval: Interval = 1.0,
    looks: Looks = None,
    url: Url = EMBEDDED,
    timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:
    """Watch a namespace: its contents, its events per second, and the timelines that are due earliest.

    On a terminal it goes on until q or Ctrl-C, even while the server is away; otherwise it looks once. Adds cannot
    be counted: the server knows only what became of them.
    """
    lives = not in_json and is_terminal(sys.stdout)
    address = Address(url, namespace, timeout)
    asyncio.run(Watch(address, interval, looks or (None if lives else 1)).run(lives, in_json))


class Watch:
    """Looks at a namespace every ``interval`` seconds, ``looks`` times or (None) until it is stopped.

    While the server is away (or, having answered before, refuses) it shows that, and goes on; but a single look
    raises its error.
    """

    def __init__(self, address: Address, interval: float, looks: int | None) -> None:
        self._address = address
        self._interval = interval
        self._looks = looks

    async def run(self, lives: bool, in_json: bool) -> None:
        """Run until the last look is shown, or q, Ctrl-C or SIGTERM."""
        with stopped_by(signal.SIGINT, signal.SIGTERM) as stop, ExitStack() as stack:
            show = print_look if in_json else stack.enter_context(screen(lives))
            if lives:
                stack.enter_context(ended_by_q(stop))
            await until(stop, self._watch(show))

    async def _watch(self, show: Show) -> None:
        loop = asyncio.get_running_loop()
        last: Look | None = None  # that met a server
        seen = 0
        async with self._address.engine() as engine:
            title = f"{engine.namespace} on {engine.url}"
            while True:
                began = loop.time()
                try:
                    look = await look_at(engine)
                except AiodigestError as error:
                    may_pass = last is not None or isinstance(error, BackendUnavailable)
                    if self._looks == 1 or not may_pass:
                        raise
                    look = away(error)
                show(look, rates(last, look), title)
                last = look if look.stats is not None else last
                seen += 1
                if seen == self._looks:
                    break
                await asyncio.sleep(began + self._interval - loop.time())


def print_look(look: Look, per_second: dict[str, float] | None, title: str) -> None:
    """Print a look as a line of JSON."""
    print(as_json(look_json(look, per_second)), flush=True)  # it is read while the command runs


@contextmanager
def screen(lives: bool) -> Generator[Show, None, None]:
    """Show each look in the place of the last, on a screen that is gone at the end; or one below the other."""
    from rich.live import Live

    from aiodigest.cli.frame import frame

    out = console()
    if not lives or not out.is_interactive:
        yield lambda look, per_second, title: out.print(frame(title, look, per_second, None))
        return
    with Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        yield lambda look, per_second, title: live.update(
            frame(title, look, per_second, out.height, "q ends"), refresh=True
        )


@contextmanager
def ended_by_q(stop: asyncio.Event) -> Generator[None, None, None]:
    """Listen for the key q, if standard input is a terminal: it delivers keys at once and does not echo them."""
    if not is_terminal(sys.stdin):
        yield
        return
    import termios
    import tty

    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def hear() -> None:
        typed = b""
        with suppress(OSError):
            typed = os.read(keyboard, 64)
        if not typed or b"q" in typed.lower():  # nothing: the terminal has gone
            loop.remove_reader(keyboard)
            stop.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, hear)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
