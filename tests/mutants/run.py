"""Take one fix after another out, and show that its test fails without it.

Each ``[[mutant]]`` of ``mutants.toml`` names a fault, the file and the text that guards against it (which must stand
there once), what to put in its place, and the test that must notice. Names given as arguments choose some.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from copies import ROOT, Run, copy, run_tests

SIMULATED = ("worker/", "session/", "engine.py", "scheduler.py")  # above the store
SEEDS = int(os.environ.get("AIODIGEST_TEST_SEEDS", "1000"))
TIME_LIMIT = 300  # seconds a test: one that hangs shows nothing, and should have a deadline of its own


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    test: str
    speed: bool = False  # it breaks no promise, and only takes longer
    apart: bool = False  # nothing that shows it happens in simulated worlds, such as a codec that panics


def read_mutants(names: Sequence[str]) -> list[Mutant]:
    listed = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8"))["mutant"]
    mutants = [Mutant(**fields) for fields in listed]
    if unknown := set(names) - {mutant.name for mutant in mutants}:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    faults: list[str] = []
    for mutant in mutants:
        found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if found != 1:
            faults.append(f"{mutant.name!r}: its text stands {found} times in {mutant.file}, not once")
        if mutant.old == mutant.new:
            faults.append(f"{mutant.name!r} changes nothing")
    if len({mutant.name for mutant in mutants}) < len(mutants):
        faults.append("two mutants have the same name")
    if faults:
        sys.exit("\n".join(faults))
    return [mutant for mutant in mutants if not names or mutant.name in names]


def mutated(mutant: Mutant, folder: Path) -> Path:
    copy(folder)
    file = folder / mutant.file
    file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
    return folder


def try_mutant(mutant: Mutant) -> Run:
    with tempfile.TemporaryDirectory(prefix="aiodigest-mutant-") as name:
        return run_tests(mutated(mutant, Path(name)), [mutant.test], TIME_LIMIT)


def simulate(mutant: Mutant) -> str:
    """The promise that a simulated world without this fix sees broken; '' if no seed shows it."""
    with tempfile.TemporaryDirectory(prefix="aiodigest-mutant-") as name:
        folder = mutated(mutant, Path(name))
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'tests'}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "simulation", "--seeds", str(SEEDS)]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        broken = [line for line in run.stdout.splitlines() if line.startswith("seed ")]
        return broken[0] if run.returncode == 1 and broken else ""


def main_simulation(names: Sequence[str]) -> int:
    """See that the simulation finds what is planted above the store."""
    above = [mutant for mutant in read_mutants(names) if mutant.file.removeprefix("aiodigest/").startswith(SIMULATED)]
    mutants = [mutant for mutant in above if not mutant.speed and not mutant.apart]
    unseen = 0
    for mutant in mutants:
        found = simulate(mutant)
        unseen += not found
        print(f"{'found ' if found else 'UNSEEN'}  {mutant.name}  ({found[:120]})", flush=True)
    print(f"the simulation found {len(mutants) - unseen} of {len(mutants)}")
    return 1 if unseen else 0


def main() -> int:
    if sys.argv[1:2] == ["--simulation"]:
        return main_simulation(sys.argv[2:])
    mutants = read_mutants(sys.argv[1:])
    sound = run_tests(ROOT, sorted({mutant.test for mutant in mutants}), TIME_LIMIT * 8)
    if sound.status != 0:
        print(sound.output[-4000:], "\nthe tests must pass with nothing taken out", sep="")
        return 1
    survivors: list[str] = []
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutant, run in zip(mutants, pool.map(try_mutant, mutants), strict=True):
            print(f"{'killed  ' if run.failed else 'SURVIVED'}  {mutant.name}  ({mutant.test})", flush=True)
            if not run.failed:
                survivors.append(mutant.name)
                print(run.output[-2000:])
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were killed")
    if survivors:
        print("survived:", *survivors, sep="\n  ")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
