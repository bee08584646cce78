"""Numbers that all processes of a run share: how much was stored and delivered, and what callbacks are to do."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final, Literal

COLUMNS = 3
STORED, DELIVERED, ORDER = range(COLUMNS)
ROWS = 1 << 14  # one a process; the first holds what follows
LAST, DRIFT = 0, 1  # number of the last process, and how many records more were delivered than acknowledged

Mood = Literal["well", "raise", "hang", "block"]
MOODS: Final[tuple[Mood, ...]] = ("well", "raise", "hang", "block")


class Board:
    """A row of numbers for each process, in a mapped file: only it and its master write there, and nothing is locked.

    What a killed process wrote stays. The sums steer the run and show how it goes; the verdict is the journals' alone.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * COLUMNS * ROWS))
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    def enter(self, incarnation: int) -> None:
        if incarnation >= ROWS:
            raise RuntimeError(f"more than {ROWS} processes in one run")
        self._numbers[LAST] = max(self._numbers[LAST], incarnation)

    def count(self, incarnation: int, column: int, more: int) -> None:
        self._numbers[COLUMNS * incarnation + column] += more

    def total(self, column: int) -> int:
        return sum(self._numbers[COLUMNS + column : COLUMNS * (self._numbers[LAST] + 1) : COLUMNS])

    @property
    def held(self) -> int:
        """How many records wait, about: what came though its add, or its first delivery, had no known outcome is found
        out when everything else was delivered."""
        held = self.total(STORED) - self.total(DELIVERED) - self._numbers[DRIFT]
        if held < 0:
            self._numbers[DRIFT] += held
        return max(0, held)

    def order(self, incarnation: int, mood: Mood) -> None:
        self._numbers[COLUMNS * incarnation + ORDER] = MOODS.index(mood)

    def mood(self, incarnation: int) -> Mood:
        return MOODS[self._numbers[COLUMNS * incarnation + ORDER]]
