"""What a process saw, as lines of JSON in a file of its own, for whoever judges the run afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

BEAT = 0.05
LATE = 0.01  # a heartbeat so much too late is written down

Line = list[object]
"""Its kind, when it was written (``time.monotonic_ns``, which all processes of a machine share), and its facts."""


class Journal:
    """A file to which each line goes with one call, unbuffered: a kill -9 loses nothing that was written before."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, *facts: object) -> None:
        line = json.dumps((kind, time.monotonic_ns(), *facts), separators=(",", ":"))
        os.write(self._file, line.encode() + b"\n")


async def beat(journal: Journal) -> None:
    """Write down when the event loop stood still: nothing in it could notice what happened meanwhile."""
    while True:
        began = time.monotonic_ns()
        await asyncio.sleep(BEAT)
        lasted = (time.monotonic_ns() - began) / 1e9
        if lasted > BEAT + LATE:
            journal.write("still", lasted)


def read(path: Path) -> Iterator[Line]:
    """The lines of a journal, but for a last one that a kill -9 cut short."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
