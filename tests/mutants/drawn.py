"""Draw small changes to the scripts and to the Python modules by a seed, and show that the tests notice each.

A change is tried on the tests of its module; if they pass with it, on the quick tier; and on all tests if that passes
too. Those of ``equivalent.toml`` change nothing, and are not tried. A run that was stopped goes on with the same seed
and ``--skip``. Status 1 if a change survives.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from changes import Change, draw, read_equivalents
from copies import ROOT, Run, copy, run_tests

ALL = ("-n", "auto", "--dist", "worksteal")
QUICK = (*ALL, "--quick")

ONE_SERVER = ("-k", "not (sentinel or cluster)")  # what fails there alone is found by the other tiers
STORE = ("store", "redisbackend", "management", "store_model")
WORKING = ("scheduler", "engine", "simulation")
# The tests of a module or else of a folder, in the order in which they are run; those of others are STORE for scripts,
# and for modules their own, if they have some, and WORKING.
TESTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("carry", "drain", "keep", "layout", "reshard", "resharding", "retire"), ("reshard", "shards")),
    "permits": ("security",),
    "lease": (*STORE, "overload"),
    "availability": (*WORKING, "unavailable"),
    "batcher": ("batcher", "cancellation", *WORKING),
    **dict.fromkeys(("memory", "redis"), (*STORE, *WORKING)),
    "diagnostics": ("doctor",),
    "connections": ("connection", "redisbackend", "cancellation", "unavailable"),
    "records": ("arguments", *WORKING),
}


class Unusable(Exception):
    """What shows nothing of a change: tests that fail without it too, or that cannot be run with it."""


def tests_of(file: str) -> tuple[str, ...]:
    """What pytest is told to run the tests of a module or script."""
    path = Path(file)
    is_script = path.suffix == ".lua"
    own = STORE if is_script else (path.stem, *WORKING)
    names = TESTS.get(path.stem) or TESTS.get(path.parent.name) or own
    tests = [f"tests/test_{name}.py" for name in dict.fromkeys(names) if (ROOT / f"tests/test_{name}.py").exists()]
    return (*tests, *(ONE_SERVER if is_script else ()))


class Trial:
    """Tries changes on copies of the project as it was at first."""

    def __init__(self, original: Path) -> None:
        self._original = original
        self._time = cache(self._measure)

    def try_change(self, change: Change) -> str:
        """Tell what kills a change; '' if nothing does."""
        stages = (("tests of the module", tests_of(change.file)), ("the quick tier", QUICK), ("all tests", ALL))
        for name, arguments in stages:
            run = self._run(change, arguments, 60 + 4 * self._time(arguments))
            if run.status != 0:
                return f"by {name} ({run.seconds:.0f} s): {why(run)}"
        return ""

    def _measure(self, arguments: tuple[str, ...]) -> float:
        """How many seconds tests take on the code as it is, on which they must pass."""
        run = self._run(None, arguments, 3600)
        if run.status != 0:
            raise Unusable(f"{run.output[-4000:]}\nthe tests must pass with nothing changed: {' '.join(arguments)}")
        return run.seconds

    def _run(self, change: Change | None, arguments: Sequence[str], limit: float) -> Run:
        with tempfile.TemporaryDirectory(prefix="aiodigest-drawn-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            copy(folder, self._original)
            if change is not None:
                file = folder / change.file
                file.write_text(change.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
            return run_tests(folder, arguments, limit)


def why(run: Run) -> str:
    """The test that noticed a change. Raises Unusable if pytest ended otherwise."""
    if run.status is None:
        return "it hangs"
    for line in run.output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and rest:
            return rest.partition(" - ")[0]
    raise Unusable(f"{run.output[-4000:]}\npytest ended with {run.status}, and no test failed")


def play(trial: Trial, drawn: Sequence[Change], same: Mapping[Change, str]) -> int:
    """Try the changes, and tell of each; the program's status."""
    survivors: list[Change] = []
    for number, change in enumerate(drawn, 1):
        if change in same:
            print(f"{number:4} equal     {change}   changes nothing: {same[change]}", flush=True)
            continue
        by = trial.try_change(change)
        print(f"{number:4} {'killed  ' if by else 'SURVIVED'}  {change}   {by}".rstrip(), flush=True)
        if not by:
            survivors.append(change)
    for change in survivors:
        print(f"survived: {change}")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="which changes; drawn and printed if not given")
    parser.add_argument("--count", type=int, default=40, help="how many; 40 if not given")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them, which were tried before")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="aiodigest-drawn-", ignore_cleanup_errors=True) as name:
        original = Path(name)
        copy(original)
        drawn = draw(original, seed, arguments.count)
        try:
            same = read_equivalents(original, (original / "tests/mutants/equivalent.toml").read_text(encoding="utf-8"))
            return play(Trial(original), drawn[arguments.skip :], same)
        except (ValueError, Unusable) as error:
            print(error)
            return 2
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
