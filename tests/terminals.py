"""The command on a pseudo-terminal, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from commandline import DEADLINE, environment

LINES, COLUMNS = 40, 120
KEPT_OUT = {"FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES"}  # of this process, whose terminal is another one

# Makes the terminal the one whose Ctrl-C is heard, and becomes the command.
TAKE = """
import fcntl, os, sys, termios
fcntl.ioctl(next(file for file in range(3) if os.isatty(file)), termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
STREAMS = "stdin", "stdout", "stderr"
COLOUR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[\d;]*)?m")


class OnTerminal:
    """A command whose standard streams are a terminal, those that are named; the others are files of its own.

    ``shown`` is all that it has written to the terminal so far.
    """

    def __init__(
        self, command: Sequence[str], variables: dict[str, str], cwd: Path, streams: Sequence[str] = STREAMS,
        columns: int = COLUMNS,
    ) -> None:  # fmt: skip
        self._terminal, own_end = pty.openpty()
        fcntl.ioctl(own_end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        self.settings = termios.tcgetattr(self._terminal)
        self.shown = b""
        settings = {name: value for name, value in variables.items() if name not in KEPT_OUT}
        files: dict[str, Any] = {name: own_end if name in streams else subprocess.PIPE for name in STREAMS}
        begin = sys.executable, "-I", "-S", "-c", TAKE
        self.process = subprocess.Popen([*begin, *command], env=settings, cwd=cwd, start_new_session=True, **files)
        os.close(own_end)

    def until(self, *texts: str) -> bytes:
        """What it shows from now on until all these were shown, whatever colours are between the letters."""
        begin, last = len(self.shown), time.monotonic() + DEADLINE
        while not all(text.encode() in plain(self.shown[begin:]) for text in texts):
            assert time.monotonic() < last, f"it showed no {texts}, but {self.shown[-5000:]!r}"
            has_ended = self.process.poll() is not None  # before what it showed last is read
            assert self._read() or not has_ended, f"it ended without {texts}: {self.shown[-5000:]!r}"
        return self.shown[begin:]

    def type(self, keys: bytes) -> None:
        os.write(self._terminal, keys)

    def now(self) -> list[Any]:
        """The settings of the terminal."""
        return termios.tcgetattr(self._terminal)

    def end(self) -> tuple[int, bytes]:
        """Wait until it has ended: its exit code, and what it wrote to a standard output that is no terminal."""
        output, last = b"", time.monotonic() + DEADLINE
        stdout: Any = self.process.stdout  # that it can be read so, its type does not tell
        while self.process.poll() is None:  # which it does only if all that it writes is read, wherever it goes
            assert time.monotonic() < last, f"it does not end: {self.shown[-5000:]!r}"
            self._read()
            if stdout is not None and select.select([stdout], [], [], 0)[0]:
                output += stdout.read1()
        while self._read():
            pass
        return self.process.returncode, output + (stdout.read() if stdout is not None else b"")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        os.close(self._terminal)

    def _read(self) -> bytes:
        chunk = b""
        if select.select([self._terminal], [], [], 0.01)[0]:
            with suppress(OSError):  # nobody has the other end any more
                chunk = os.read(self._terminal, 65_536)
        self.shown += chunk
        return chunk


def plain(shown: bytes) -> bytes:
    """Without what makes colours and moves the cursor."""
    return re.sub(rb"\x1b\[[?\d;]*[A-Za-z]", b"", shown)


@contextmanager
def on_terminal(
    data: Path, *arguments: str, streams: Sequence[str] = STREAMS, columns: int = COLUMNS, output: str = "",
    **variables: str,
) -> Generator[OnTerminal, None, None]:  # fmt: skip
    """``aiodigest`` on a terminal, gone when the test is over; its standard output may be the file ``output``."""
    command = [sys.executable, "-m", "aiodigest", *arguments]
    if output:
        command = ["/bin/sh", "-c", f'exec "$0" "$@" > {output}', *command]
    running = OnTerminal(command, {**environment(data), "TERM": "xterm-256color", **variables}, data, streams, columns)
    try:
        yield running
    finally:
        running.close()
