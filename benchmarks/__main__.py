"""Comparisons in one run: ``make bench``, or ``make bench-smoke`` to see that each of them runs."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    adding,
    backlog,
    before,
    blocking,
    costs,
    delivering,
    importing,
    overload,
    scaling,
    telemetry,
    waiting,
)
from benchmarks.peers.environments import Peers
from benchmarks.programs import in_short
from benchmarks.report import Report, Row, figure, machine, record
from benchmarks.setting import FOLDER, LOOPS, Setting, fresh_server, play

Compare = Callable[[Setting], AsyncGenerator[Row, None]]
# What depends on the event loop is measured on each.
BY_LOOP: Mapping[str, Compare] = {
    "adding": adding.compare,
    "delivering": delivering.compare,
}
ONCE: Mapping[str, Compare] = {
    "before": before.compare,
    "time": costs.time_of_adds,
    "digest-time": costs.time_of_digests,
    "timelines": costs.time_by_timelines,
    "hot": costs.time_of_one,
    "memory": costs.memory,
    "model": delivering.of_a_model,
    "callback": waiting.to_callback,
    "lateness": waiting.lateness,
    "worker-memory": backlog.memory_of_worker,
    "large": backlog.large_timelines,
    "due": backlog.many_timelines,
    "size": costs.at_any_size,
    "producers": overload.producers,
    "one": overload.one_timeline,
    "aside": overload.set_aside,
    "idle": waiting.idleness,
    "import": importing.compare,
    "sync": blocking.compare,
    "telemetry": telemetry.compare,
    "scaling": scaling.compare,
}
# The comparisons of each table of the page; the first is what is run unless it is said otherwise. docs/performance.md
# lists them too.
TABLES: Mapping[str, Sequence[str]] = {
    "bench": ("adding", "before", "delivering", "time", "hot", "memory", "callback", "lateness", "idle", "import"),
    "bench-more": (
        "adding-uvloop", "delivering-uvloop", "sync", "telemetry", "worker-memory", "large", "due", "size", "producers",
        "one", "aside", "digest-time", "timelines", "model",
    ),
}  # fmt: skip
ROUNDS: Mapping[str, int] = {"bench": 10, "bench-more": 5}  # of a table
BEFORE = "c01ff09"  # the last commit whose adds to one timeline were appended one by one
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def comparisons() -> Mapping[str, tuple[str, Compare]]:
    """All of them: on which event loop each is played, and what it is."""
    found: dict[str, tuple[str, Compare]] = {}
    for name, compare in BY_LOOP.items():
        for loop in LOOPS:
            found[name if loop == "asyncio" else f"{name}-{loop}"] = loop, compare
    return {**found, **{name: ("asyncio", compare) for name, compare in ONCE.items()}}


def modules() -> Mapping[str, Sequence[str]]:
    """The comparisons of each module of this package, for those who look for one by where its code is."""
    found: dict[str, list[str]] = {}
    for name, (_, compare) in comparisons().items():
        found.setdefault(compare.__module__.rpartition(".")[2], []).append(name)
    return found


def chosen(asked: Sequence[str]) -> Sequence[str]:
    """The comparisons that are asked for, by their names or by their modules'; a name goes before a module's."""
    known, groups = comparisons(), modules()
    return list(dict.fromkeys(name for each in asked for name in ([each] if each in known else groups[each])))


def not_as_recorded(options: argparse.Namespace) -> str:
    """What keeps a run of these options from standing on the page; '' if nothing does."""
    if options.only is not None or options.scale != 1:
        return "--record writes a whole table: it goes with neither --only nor --all nor --scale"
    if options.rounds != ROUNDS[options.table]:
        return f"--record writes {ROUNDS[options.table]} rounds of {options.table}: it does not go with other --rounds"
    if options.disk or options.before != BEFORE:
        return "--record writes what stands on the page: it goes with neither --disk nor --before"
    return ""


async def on_a_fresh_server(
    compare: Compare, loop: str, report: Report, peers: Peers, options: argparse.Namespace
) -> None:
    async with fresh_server(options.disk) as (server, port):
        report.facts["server"] = server
        url = f"redis://127.0.0.1:{port}/0"
        setting = Setting(url, port, loop, options.rounds, options.scale, peers, options.disk, options.before)
        async for row in compare(setting):
            report.rows.append(row)
            print("  ".join(cell for cell in row.cells() if cell), flush=True)


def main() -> int:
    known = comparisons()
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, help="of a whole table: "
                        f"{', '.join(f'{name} {rounds}' for name, rounds in ROUNDS.items())}; else 5")  # fmt: skip
    parser.add_argument("--scale", type=float, default=1.0, help="how much of each figure's numbers is done")
    parser.add_argument("--only", nargs="*", choices=sorted({*known, *modules()}), metavar="NAME",
                        help=f"some of: {', '.join(known)}; or all of a module of this package")  # fmt: skip
    parser.add_argument("--all", action="store_const", dest="only", const=list(known), help="all of them")
    parser.add_argument("--table", choices=list(TABLES), default="bench", help="those of a table of the page")
    parser.add_argument("--before", default=BEFORE, metavar="REVISION",
                        help="the commit that adds to one timeline stand beside (default: %(default)s)")  # fmt: skip
    parser.add_argument("--record", action="store_true",
                        help=f"write the table into {PAGE.name}: a whole one, with nothing left out")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="make the environments of peers anew")
    parser.add_argument("--disk", action="store_true", help="have the server write to disk, as an embedded one does")
    parser.add_argument("--strict", action="store_true", help="fail if a figure is missed that must be met")
    parser.add_argument("--json", type=Path, default=FOLDER / "bench.json")
    parser.add_argument("--markdown", type=Path, default=FOLDER / "bench.md")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = ROUNDS[options.table] if options.only is None else 5
    if options.record and (reason := not_as_recorded(options)):
        parser.error(reason)
    names: Sequence[str] = TABLES[options.table] if options.only is None else chosen(options.only)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does: no server is left behind
    began = time.monotonic()
    report, failed = Report(machine() | {"loop": "asyncio unless said otherwise, the peers' too"}), list[str]()
    peers = Peers(report.facts)
    if BY_LOOP.keys() & set(names):
        peers.find(FOLDER / "peers", options.fresh)
    if options.record and peers.left_out:
        return refuse(peers)  # before minutes are spent
    for name in names:
        loop, compare = known[name]
        started = time.monotonic()
        try:
            play(loop, on_a_fresh_server(compare, loop, report, peers, options))
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            failed.append(name)
            report.facts[f"{name} failed"] = in_short(error)
        print(f"-- {name}: {time.monotonic() - started:.0f} s", flush=True)
        report.facts["took"] = f"{time.monotonic() - began:.0f} s, {options.rounds} rounds, scale {options.scale:g}"
        report.write(options.json, options.markdown)
    missed = [row for row in report.rows if row.met is False]
    print(f"{len(report.rows)} figures, {len(missed)} missed; {options.markdown} and {options.json} have the table")
    if summary := [*report.summary(), *report.missed()]:
        print("", *summary, sep="\n")
    if options.record and peers.left_out:
        return refuse(peers)
    if options.record and not failed:
        record(PAGE, options.table, report.recorded())
    if options.strict:
        failed += [f"{row.what} ({figure(row.value)}, wanted {row.wanted})" for row in missed if row.must]
    if failed:
        print("failed:", *failed, sep="\n  ", file=sys.stderr)
    return 1 if failed else 0


def refuse(peers: Peers) -> int:
    print(f"not recorded: {', '.join(peers.left_out)} left out, see above", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
