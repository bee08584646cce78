"""What was measured, and how it is shown: a table, Markdown, JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

Samples = Sequence[float]


@dataclass(frozen=True)
class Row:
    """A figure, and what it should be: a ratio of two things measured in turn, or something measured alone.

    ``ours`` and ``theirs`` have a sample a round; ``bound`` is the least that is wanted if ``least``, else the most.
    Where it ``must`` be met, a run with ``--strict`` fails if it is not.
    """

    what: str
    beside: str
    unit: str
    ours: Samples
    theirs: Samples | None = None
    bound: float | None = None
    least: bool = False
    must: bool = False
    loop: str = "asyncio"

    @property
    def values(self) -> Samples:
        """What the bound is of: the ratio in each round, or what was measured."""
        if self.theirs is None:
            return self.ours
        return [one / other for one, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound

    @property
    def wanted(self) -> str:
        return "" if self.bound is None else f"{'>=' if self.least else '<='} {self.bound:g}"

    def cells(self) -> list[str]:
        low, high = self.spread
        theirs = "" if self.theirs is None else f"{figure(median(self.theirs))}"
        verdict = {None: "", True: "yes", False: "no"}[self.met]
        return [
            self.what, self.loop, figure(median(self.ours)), self.unit, self.beside, theirs,
            f"{figure(self.value)}" if self.theirs is not None else "",
            f"{figure(low)} to {figure(high)}" if len(self.values) > 1 else "", self.wanted, verdict,
        ]  # fmt: skip


HEADS = ["what", "loop", "ours", "unit", "beside", "theirs", "ratio", "rounds", "wanted", "met"]


def figure(value: float) -> str:
    """A number with three digits that mean something."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def astray(what: str, difference: int) -> Row:
    """How many records too few or too many came, of which there may be none."""
    return Row(f"{what}: records too few or too many", "", "", [abs(difference)], bound=0, must=True)


@dataclass
class Report:
    """All rows of a run, and what it ran on."""

    facts: dict[str, str]
    rows: list[Row] = field(default_factory=list[Row])

    def markdown(self) -> str:
        table = [HEADS, ["---"] * len(HEADS), *(row.cells() for row in self.rows)]
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, "", *(f"| {' | '.join(cells)} |" for cells in table)]) + "\n"

    def write(self, data: Path, table: Path) -> None:
        """As JSON, and as Markdown."""
        for path in (data, table):
            path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(row), "value": row.value, "spread": row.spread, "met": row.met} for row in self.rows]
        data.write_text(json.dumps({"facts": self.facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        table.write_text(self.markdown(), encoding="utf-8")


def machine() -> dict[str, str]:
    """What this machine is, as far as it changes a figure."""
    import os

    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("aiodigest", "redis", "hiredis", "pydantic", "uvloop"))
    return {
        "machine": f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": packages,
    }
