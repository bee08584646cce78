"""What was measured, and how it is shown: a table, Markdown, JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

Samples = Sequence[float]
ROOT = Path(__file__).parents[1]


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
    def rival(self) -> str:
        """The name of the peer that this is beside."""
        return self.beside.partition(",")[0]

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


def of_loop(row: Row) -> str:
    return "" if row.loop == "asyncio" else f", {row.loop}"


def astray(what: str, difference: int) -> Row:
    """How many records too few or too many came, of which there may be none."""
    return Row(f"{what}: records too few or too many", "", "", [abs(difference)], bound=0, must=True)


# The five lines


def best(rows: Sequence[Row], what: str, unit: str = "", beside: str = "") -> Row | None:
    """Of the rows of a figure the one with a bound, which is of the strongest rival; on asyncio."""
    found = [
        row for row in rows
        if row.what.startswith(what) and row.unit == (unit or row.unit) and beside in row.beside
        and row.bound is not None and row.loop == "asyncio"
    ]  # fmt: skip
    return found[0] if found else None


def of_adds(rows: Sequence[Row]) -> str:
    row = best(rows, "add from 200 tasks", beside=", enqueue")
    if row is None:
        return ""
    return f"Of many adds at once {figure(row.value)} are done in the time of one job's enqueue ({row.rival})."


def of_server(rows: Sequence[Row]) -> str:
    row = best(rows, "server time an add, ready timelines", beside="2017")
    one = best(rows, "server time an add, all to one timeline", beside="2017")
    told = [f"{figure(row.value)} of what a script like those of 2017 took"] if row else []
    told += [f"{figure(one.value)} if all go to one timeline"] if row and one else []
    return f"Of its server an add takes {', '.join(told)}." if told else ""


def of_digests(rows: Sequence[Row]) -> str:
    row, records = best(rows, "digests of 10 records", beside=", jobs/s"), best(rows, "records of these")
    if row is None or records is None:
        return ""
    return (
        f"In the time of one job {figure(row.value)} digests of ten records are delivered ({row.rival}), or "
        f"{figure(records.value)} records of these ({records.rival})."
    )


def of_lateness(rows: Sequence[Row]) -> str:
    middle, last = (
        next((row for row in rows if row.what.startswith("lateness") and row.what.endswith(end)), None)
        for end in (": median", ": p99")
    )
    if middle is None or last is None:
        return ""
    return (
        f"A digest begins {figure(middle.value)} ms after it is due, 99 of 100 within {figure(last.value)} ms, on a "
        "server that writes to disk."
    )


def of_rest(rows: Sequence[Row]) -> str:
    idle, memory = best(rows, "commands of an idle worker"), best(rows, "server memory a record of 200 B")
    told = [f"a worker with nothing to do sends {figure(idle.value)} commands a minute"] if idle else []
    told += [f"a record of 200 bytes takes {figure(median(memory.ours))} B of its server"] if memory else []
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}." if text else ""


SUMMARY: Sequence[Callable[[Sequence[Row]], str]] = (of_adds, of_server, of_digests, of_lateness, of_rest)


def record(page: Path, name: str, text: str) -> None:
    """Write what a run found into a page, between the two comments that say so."""
    begin, end = (f"<!-- figures of {name}: {side} -->" for side in ("begin", "end"))
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no place for the figures: {begin} ... {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


@dataclass
class Report:
    """All rows of a run, and what it ran on."""

    facts: dict[str, str]
    rows: list[Row] = field(default_factory=list[Row])

    def table(self) -> list[str]:
        cells = [HEADS, ["---"] * len(HEADS), *(row.cells() for row in self.rows)]
        return [f"| {' | '.join(row)} |" for row in cells]

    def markdown(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, "", *self.table()]) + "\n"

    def missed(self) -> list[str]:
        """The figures that are not as wanted, a line each."""
        return [
            f"Missed: {row.what}{f', beside {row.beside}' if row.theirs is not None else ''}{of_loop(row)}: "
            f"{figure(row.value)}, wanted {row.wanted}"
            for row in self.rows if row.met is False
        ]  # fmt: skip

    def summary(self) -> list[str]:
        """What a person remembers of a run: at most five lines, of what was measured in it."""
        return [line for tell in SUMMARY if (line := tell(self.rows))]

    def recorded(self) -> str:
        """What a page shows of a run: what it ran on, in short, and its table."""
        facts = [f"* {name}: {value}" for name, value in self.facts.items()]
        told = [f"* {line}" for line in (*self.summary(), *self.missed())]
        return "\n".join([*facts, "", *told, "", *self.table()])

    def write(self, data: Path, table: Path) -> None:
        """As JSON, and as Markdown."""
        for path in (data, table):
            path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(row), "value": row.value, "spread": row.spread, "met": row.met} for row in self.rows]
        data.write_text(json.dumps({"facts": self.facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        table.write_text(self.markdown(), encoding="utf-8")


def commit() -> str:
    """The commit that is measured, and whether the code has changed since."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (
                ("rev-parse", "--short=10", "HEAD"),
                ("status", "--porcelain", "--", "aiodigest", "benchmarks"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown: a copy of the project without its git history"
    return f"{head}{', with changes that are not committed' if changed else ''}"


def machine() -> dict[str, str]:
    """What is measured, when, and on what machine, as far as it changes a figure."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("aiodigest", "redis", "hiredis", "pydantic", "uvloop"))
    return {
        "date": f"{date.today():%Y-%m-%d}",
        "commit": commit(),
        "machine": f"{os.cpu_count()} cores, {model}, {platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": packages,
    }
