"""All comparisons in one run: ``make bench``, or ``make bench-smoke`` to see that each of them runs."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

from benchmarks import adding, backlog, costs, delivering, importing, overload, waiting
from benchmarks.peers.environments import PEERS, prepare
from benchmarks.peers.environments import run as run_peer
from benchmarks.report import Report, Row, machine
from benchmarks.setting import LOOPS, Setting, fresh_server, play

Compare = Callable[[Setting], AsyncGenerator[Row, None]]
# What depends on the event loop is measured on each.
BY_LOOP: Mapping[str, Compare] = {
    "adding": adding.compare,
    "delivering": delivering.compare,
}
ONCE: Mapping[str, Compare] = {
    "time": costs.time_of_adds,
    "memory": costs.memory,
    "callback": waiting.to_callback,
    "lateness": waiting.lateness,
    "worker-memory": backlog.memory_of_worker,
    "large": backlog.large_timelines,
    "due": backlog.many_timelines,
    "size": costs.at_any_size,
    "producers": overload.producers,
    "one": overload.one_timeline,
    "idle": waiting.idleness,
    "import": importing.compare,
}
FOLDER = Path(".bench")


def comparisons() -> Mapping[str, tuple[str, Compare]]:
    """All of them: on which event loop each is played, and what it is."""
    found: dict[str, tuple[str, Compare]] = {}
    for name, compare in BY_LOOP.items():
        for loop in LOOPS:
            found[name if loop == "asyncio" else f"{name}-{loop}"] = loop, compare
    return {**found, **{name: ("asyncio", compare) for name, compare in ONCE.items()}}


async def on_a_fresh_server(compare: Compare, loop: str, report: Report, options: argparse.Namespace) -> None:
    async with fresh_server(options.disk) as (server, port):
        report.facts["server"] = server
        url = f"redis://127.0.0.1:{port}/0"
        setting = Setting(url, port, loop, options.rounds, options.scale, options.pythons)
        async for row in compare(setting):
            report.rows.append(row)
            print("  ".join(cell for cell in row.cells() if cell), flush=True)


def main() -> int:
    known = comparisons()
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="how much of each figure's numbers is done")
    parser.add_argument("--only", nargs="*", default=list(known), choices=list(known), metavar="NAME",
                        help=f"some of: {', '.join(known)}")  # fmt: skip
    parser.add_argument("--disk", action="store_true", help="have the server write to disk, as an embedded one does")
    parser.add_argument("--json", type=Path, default=FOLDER / "bench.json")
    parser.add_argument("--markdown", type=Path, default=FOLDER / "bench.md")
    options = parser.parse_args()
    began = time.monotonic()
    FOLDER.mkdir(exist_ok=True)
    report = Report(machine())
    peers = PEERS if any(known[name][1] in BY_LOOP.values() for name in options.only) else ()
    pythons: dict[str, Path] = {}
    for peer in peers:
        try:
            python = prepare(peer, FOLDER / "peers")
            versions = asyncio.run(run_peer(peer, python, "versions"))
        except (OSError, subprocess.SubprocessError, SystemExit) as error:
            report.facts[peer.name] = f"left out: {error}"
        else:
            pythons[peer.name] = python
            report.facts[peer.name] = ", ".join(f"{name} {version}" for name, version in versions.items())
    options.pythons = pythons
    for name in options.only:
        loop, compare = known[name]
        play(loop, on_a_fresh_server(compare, loop, report, options))
        report.facts["took"] = f"{time.monotonic() - began:.0f} s, {options.rounds} rounds"
        report.write(options.json)
        options.markdown.write_text(report.markdown(), encoding="utf-8")
    missed = [row for row in report.rows if row.met is False]
    print(f"{len(report.rows)} figures, {len(missed)} missed; {options.markdown} and {options.json} have the table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
