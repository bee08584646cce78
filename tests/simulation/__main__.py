"""Play many seeds, or one of them with its story: ``make simulation SEEDS=20000``, ``make simulation SEED=7``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from simulation.world import play

STORY = 200  # lines of it that are printed when a promise is broken


def run(seed: int) -> tuple[int, str, list[str], int, float]:
    """How a seed went: its fault and story, the number of records, and the seconds that passed in its world."""
    witness = play(seed)
    return seed, witness.fault, witness.story[-STORY:], len(witness.records.all), witness.lasted


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
    with multiprocessing.Pool() as pool:
        for seed, fault, story, added, lasted in pool.imap(
            run, range(options.first, options.first + options.seeds), chunksize=4
        ):
            played, records, hours = played + 1, records + added, hours + lasted / 3600
            if fault:
                print("\n".join(story))
                print(f"seed {seed}: {fault}\nplay it again with: make simulation SEED={seed}")
                return 1
            if played % 1000 == 0:
                print(f"{played} seeds, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"{played} seeds: {hours:.0f} hours of operation, {records} adds, no promise broken, in {took:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
