"""Play many seeds, or one of them with its story: ``make simulation SEEDS=20000``, ``make simulation SEED=7``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

import pytest

from simulation.families import FAMILIES, Receivers, played
from simulation.planted import PLANTED, find
from simulation.witness import Witness

STORY = 200  # lines of it that are printed when a promise is broken


def run(seed: int) -> tuple[int, str, list[str], int, float, bool]:
    """How a seed went: its fault and story, the records and seconds of its worlds, and if a healthy receiver waited."""
    worlds: list[Witness] = []
    for witness in played(seed):
        worlds.append(witness)
        if witness.fault:
            break
    last, records = worlds[-1], sum(len(each.records.all) for each in worlds)
    late = any(each.waited > Receivers.LATE for each in worlds)
    return seed, last.fault, last.story[-STORY:], records, sum(each.lasted for each in worlds), late


def tell(seed: int) -> int:
    """Play one seed, and print its whole story."""
    for witness in played(seed):
        print("\n".join(witness.story))
        if witness.fault:
            return 1
    return 0


def plant(names: list[str]) -> int:
    """Put faults back, one after another, and tell which seed shows each."""
    unseen = 0
    for fault in names or PLANTED:
        with pytest.MonkeyPatch.context() as patch:
            found = find(fault, patch)
        unseen += not found
        print(f"{f'seed {found[0]}' if found else 'UNSEEN'}: {fault} ({found[1] if found else ''})", flush=True)
    return 1 if unseen else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many to play")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--seed", type=int, help="play this one, and print its whole story")
    parser.add_argument("--planted", nargs="*", metavar="FAULT", help="put faults back (all of them), and find them")
    options = parser.parse_args()
    if options.seed is not None:
        return tell(options.seed)
    if options.planted is not None:
        return plant(options.planted)
    began, done, records, hours, late = time.monotonic(), 0, 0, 0.0, 0
    with multiprocessing.Pool() as pool:
        for seed, fault, story, added, lasted, is_late in pool.imap(
            run, range(options.first, options.first + options.seeds), chunksize=4
        ):
            done, records, hours, late = done + 1, records + added, hours + lasted / 3600, late + is_late
            if fault:
                print("\n".join(story))
                print(f"seed {seed}: {fault}\nplay it again with: make simulation SEED={seed}")
                return 1
            if done % 1000 == 0:
                print(f"{done} seeds, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    took = time.monotonic() - began
    print(f"{done} seeds: {hours:.0f} hours of operation, {records} adds, no promise broken, in {took:.0f} s")
    worlds = options.seeds // len(FAMILIES)
    print(f"in {late} of {worlds} worlds a healthy receiver waited over {Receivers.LATE:g} s longer for broken ones")
    return 0 if late <= Receivers.allowed(worlds) else 1


if __name__ == "__main__":
    sys.exit(main())
