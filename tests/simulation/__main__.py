"""Play many seeds, or one of them with its story: ``make simulation SEEDS=20000``, ``make simulation SEED=7``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulation.world import play

STORY = 200  # lines of it that are printed when a promise is broken


@dataclass(frozen=True)
class Ending:
    """How a seed went."""

    seed: int
    fault: str
    story: list[str]
    records: int
    seconds: float  # that passed in its world


def run(seed: int) -> Ending:
    witness = play(seed)
    story = witness.story if witness.fault else []
    return Ending(seed, witness.fault, story, len(witness.records.all), witness.lasted)


def endings(first: int, seeds: int, processes: int) -> Iterator[Ending]:
    """Play seeds, several at a time, in their order."""
    with ProcessPoolExecutor(processes) as pool:
        try:
            for start in range(first, first + seeds, 500):
                yield from pool.map(run, range(start, min(start + 500, first + seeds)), chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)  # who has seen enough does not wait for the rest


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many to play")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one, and print its whole story")
    options = parser.parse_args()
    if options.seed is not None:
        witness = play(options.seed)
        print("\n".join(witness.story))
        return 1 if witness.fault else 0
    began, played, records, hours = time.monotonic(), 0, 0, 0.0
    for ending in endings(options.first, options.seeds, os.cpu_count() or 1):
        played, records, hours = played + 1, records + ending.records, hours + ending.seconds / 3600
        if ending.fault:
            print("\n".join(ending.story[-STORY:]))
            print(f"seed {ending.seed}: {ending.fault}\nplay it again with: make simulation SEED={ending.seed}")
            return 1
        if played % 1000 == 0:
            print(f"{played} seeds, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"{played} seeds: {hours:.0f} hours of operation, {records} adds, no promise broken, in {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
