"""The command ``aiodigest top``: its options, its screen, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from aiodigest.cli.event_loop import run_until, stopped_by
from aiodigest.cli.options import EMBEDDED, AsJson, Location, Namespace, Timeout, Url, duration, parsed_option
from aiodigest.cli.output import console, is_terminal

if TYPE_CHECKING:
    from aiodigest.cli.top.look import Show

SHORTEST = 0.1  # seconds between two looks: each is a few calls to the server


def interval_of(text: str) -> float:
    """Parse the time between two looks. Raises ValueError."""
    seconds = duration(text)
    if seconds < SHORTEST:
        raise ValueError(f"{text!r} is too short: at least 100ms")
    return seconds


INTERVAL = "From one look to the next: 500ms, 5s, 1m, or plain seconds; at least 100ms. [default: 1s]"
Interval: TypeAlias = Annotated[float, parsed_option("--interval", interval_of, "DURATION", INTERVAL)]
LOOKS = "Number of looks. [default: no limit on a terminal, else 1]"
Looks: TypeAlias = Annotated[int | None, typer.Option("--count", min=1, show_default=False, help=LOOKS)]


def top(
    namespace: Namespace, interval: Interval = 1.0, looks: Looks = None, url: Url = EMBEDDED, timeout: Timeout = 5.0,
    in_json: AsJson = False,
) -> None:  # fmt: skip
    """Watch a namespace: its contents, rates, and what is due first.

    On a terminal it runs until q or Ctrl-C, even while the server is away; otherwise it looks once. Adds are not
    counted: the server knows only what became of them.
    """
    live = not in_json and is_terminal(sys.stdout)
    asyncio.run(_run(Location(url, namespace, timeout), interval, looks or (None if live else 1), live, in_json))


async def _run(location: Location, interval: float, looks: int | None, live: bool, in_json: bool) -> None:
    """Watch until the last look is shown, or q, Ctrl-C or SIGTERM."""
    from aiodigest.cli.top.look import show_json, watch

    with stopped_by(signal.SIGINT, signal.SIGTERM) as stop, ExitStack() as stack:
        show = show_json if in_json else stack.enter_context(_screen(live))
        if live:
            stack.enter_context(_ended_by_q(stop))
        await run_until(stop, watch(location, interval, looks, show))


@contextmanager
def _screen(live: bool) -> Generator[Show, None, None]:
    """Show each look in place of the last, on a screen that is gone at the end; or one below the other."""
    from rich.live import Live

    from aiodigest.cli.top.look import frame

    out = console()
    if not live or not out.is_interactive:
        yield lambda look, per_second, title: out.print(frame(title, look, per_second, None))
        return
    with Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as display:
        yield lambda look, per_second, title: display.update(
            frame(title, look, per_second, out.height, "q quits"), refresh=True
        )


@contextmanager
def _ended_by_q(stop: asyncio.Event) -> Generator[None, None, None]:
    """Set ``stop`` on the key q, if standard input is a terminal: it then delivers keys at once, without echo."""
    if not is_terminal(sys.stdin):
        yield
        return
    import termios
    import tty

    keyboard, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def on_key() -> None:
        typed = b""
        with suppress(OSError):
            typed = os.read(keyboard, 64)
        if not typed or b"q" in typed.lower():  # nothing: the terminal has gone
            loop.remove_reader(keyboard)
            stop.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, on_key)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
