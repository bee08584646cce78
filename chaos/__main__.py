"""``python -m chaos``: run everything through a plan of faults, and account for every record."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from chaos.cluster import Cluster
from chaos.clusterfaults import ClusterFaults
from chaos.evidence import load
from chaos.journal import beat
from chaos.plan import AWAY, MINUTE, Planned, plan, with_mails
from chaos.report import Run, markdown, text
from chaos.serverfaults import ServerFaults
from chaos.verdict import judge
from chaos.world import Servers

SECONDS = 120
PROGRESS = 10.0


@dataclass(frozen=True)
class Goal:
    """When a run may end: when all of these are reached."""

    seconds: float
    records: int
    faults: int


def arguments() -> argparse.Namespace:
    def whole(text: str) -> int:
        if (number := int(text)) < 0:
            raise ValueError
        return number

    parser = argparse.ArgumentParser("python -m chaos", description=__doc__)
    parser.add_argument("--seconds", type=whole, help=f"run for so long at least (default {SECONDS} without the next)")
    parser.add_argument("--records", type=whole, default=0, help="and until so many records were acknowledged")
    parser.add_argument("--faults", type=whole, default=0, help="and until so many faults were inflicted")
    parser.add_argument("--seed", type=whole, help="of the plan of faults (default: another one each time)")
    parser.add_argument(
        "--cluster", action="store_true", help="on a cluster, instead of one server and an embedded one"
    )
    parser.add_argument(
        "--smtp", action="store_true", help="callbacks send mails; in two minutes or more their server is away for one"
    )
    parser.add_argument("--report", type=Path, help="also write the report to this file, as Markdown")
    return parser.parse_args()


async def play(world: Servers | Cluster, goal: Goal, seed: int) -> None:
    """Inflict the plan until the goal is reached, or SIGINT or SIGTERM comes; then let all end well."""
    began, stop = time.monotonic(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    faults = ClusterFaults(world) if isinstance(world, Cluster) else ServerFaults(world)

    def is_reached() -> bool:
        lasted = time.monotonic() - began
        return lasted >= goal.seconds and world.stored >= goal.records and faults.inflicted >= goal.faults

    def show() -> None:
        print(
            f"{time.monotonic() - began:6.0f} s  {world.stored:>9,} acknowledged  {world.delivered:>9,} delivered  "
            f"{world.held:>6,} held  {faults.inflicted:>4} faults",
            flush=True,
        )

    async def inflict() -> None:
        kinds = with_mails(world.kinds) if world.mail is not None else world.kinds
        is_long = world.mail is not None and goal.seconds >= 2 * MINUTE
        for planned in plan(seed, kinds):
            await asyncio.sleep(planned.gap)
            await faults.begin(planned)
            if is_long and time.monotonic() - began > goal.seconds / 4:
                is_long = False
                await faults.begin(Planned(0, AWAY, 0.0, MINUTE, 0.0))

    async with world:
        inflicting, beating = asyncio.create_task(inflict()), asyncio.create_task(beat(world.journal))
        shown = began
        while not stop.is_set() and not is_reached() and not inflicting.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.2)
            if time.monotonic() - shown > PROGRESS:
                shown = time.monotonic()
                show()
        inflicting.cancel()
        await asyncio.wait([inflicting])
        if not inflicting.cancelled():
            inflicting.result()  # a fault of this program
        await faults.end()
        show()
        await world.finish()
        beating.cancel()


def main() -> int:
    given = arguments()
    seconds = given.seconds if given.seconds is not None else 0 if given.records or given.faults else SECONDS
    seed = given.seed if given.seed is not None else secrets.randbelow(1_000_000)
    print(f"seed {seed}", flush=True)
    world, began, start = (Cluster if given.cluster else Servers)(mails=given.smtp), datetime.now(UTC), time.monotonic()
    is_good = False
    try:
        asyncio.run(play(world, Goal(seconds, given.records, given.faults), seed))
        command = ["python", "-m", "chaos", *sys.argv[1:]]
        run = Run(seed, command, world.version, began, time.monotonic() - start)
        verdict = judge(load(world.folder))
        print("\n" + text(run, verdict))
        if given.report:
            given.report.write_text(markdown(run, verdict))
        is_good = verdict.is_good
    finally:
        if is_good:
            world.remove()
        else:
            print(f"the journals and logs are in {world.folder}", file=sys.stderr)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
