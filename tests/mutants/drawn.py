"""Draw small changes to the scripts and to the worker by a seed, and show that the tests notice each.

A change is tried on the tests of its module; if they pass with it, on the quick tier; and on all tests if that passes
too. Those of ``equivalent.toml`` change nothing, and are counted and not tried. What became of each is kept in
``.mutants``: the same seed, on the same code, goes on where it was stopped. Status 1 if one survives.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from types import FrameType

from changes import SCRIPTS, WORKER, Change, draw, read_equivalents
from copies import ROOT, Run, copy, run_tests
from progress import Progress, fingerprint

QUICK = ("-n", "auto", "--dist", "worksteal", "--quick")
ALL = ("-n", "auto", "--dist", "worksteal")

ONE_SERVER = ("-k", "not (sentinel or cluster)")  # what fails there alone is found by the other tiers
STORE = ("edges", "store", "management", "redisbackend", "store_model")
RESHARDING = ("reshard", "shards")
WORKING = ("scheduler", "engine", "simulation")
# The tests of a module, in the order in which they are run; those of others are its own, if it has some, and WORKING.
TESTS: Mapping[str, Sequence[str]] = {
    "delivery": ("dispatch", *WORKING, "opentelemetry"),
    "batcher": ("coalesce", "cancellation", *WORKING),
    "availability": (*WORKING, "unavailable"),
    "lease": (*STORE, "overload"),
    "permits": ("security",),
    **dict.fromkeys(("carry", "drain.lua", "keep", "layout", "reshard", "retire"), RESHARDING),
}


@dataclass(frozen=True)
class Stage:
    """A step of the trial of a change: which tests, by their name, and how many changes are tried at a time."""

    name: str
    tests: str
    arguments: Callable[[str], Sequence[str]]
    at_once: int


def tests_of(file: str) -> list[str]:
    """What pytest is told to run the tests of a module or script."""
    path = Path(file)
    is_script = path.suffix == ".lua"
    own = STORE if is_script else (path.stem, *WORKING)
    names = TESTS.get(path.name) or TESTS.get(path.stem) or own
    tests = [f"tests/test_{name}.py" for name in dict.fromkeys(names) if (ROOT / f"tests/test_{name}.py").exists()]
    return [*tests, *(ONE_SERVER if is_script else ())]


STAGES = (
    Stage("module", "tests of the module", tests_of, 2),
    Stage("quick", "the quick tier", lambda _: QUICK, 1),  # on all cores
    Stage("all", "all tests", lambda _: ALL, 1),
)


class Unusable(Exception):
    """What shows nothing of a change: tests that fail without it too, or that cannot be run with it."""


class Trial:
    """Tries changes on copies of the project as it was at first."""

    def __init__(self, original: Path, progress: Progress) -> None:
        self._original = original
        self._progress = progress
        self._lock = Lock()
        self._timing: dict[str, Lock] = {}
        self.stopped = Event()

    def try_all(self, changes: Sequence[Change]) -> Generator[tuple[Change, str]]:
        """Each change that is killed, with what killed it, and at last those that survive, with nothing."""
        fates = {change: self._progress.fate(name_of(change)) for change in changes}
        left = [change for change in changes if not fates[change].killed]
        yield from ((change, fates[change].killed) for change in changes if fates[change].killed)
        for stage in STAGES:
            untried = [change for change in left if stage.name not in fates[change].passed]
            with ThreadPoolExecutor(stage.at_once) as pool:
                trials = {pool.submit(self._try, change, stage): change for change in untried}
                try:
                    for done in as_completed(trials):
                        if by := done.result():
                            left.remove(trials[done])
                            yield trials[done], by
                finally:
                    if any(not trial.done() for trial in trials):  # by Ctrl-C, or one of them cannot be tried
                        self.stopped.set()
                        pool.shutdown(cancel_futures=True)
        yield from ((change, "") for change in left)

    def _try(self, change: Change, stage: Stage) -> str:
        """What kills a change at a stage; '' if nothing does."""
        name, arguments = name_of(change), stage.arguments(change.file)
        run = self._run(change, arguments, 60 + 4 * self._time(arguments))
        with self._lock:
            if run.status == 0:
                self._progress.passed(name, stage.name)
                return ""
            by = f"by {stage.tests} ({run.seconds:.0f} s): {why(run)}"
            self._progress.killed(name, by)
            return by

    def _time(self, arguments: Sequence[str]) -> float:
        """How many seconds tests take on the code as it is, on which they must pass."""
        tests = " ".join(arguments)
        with self._lock:
            timing = self._timing.setdefault(tests, Lock())
        with timing:  # once, whoever needs it
            with self._lock:
                known = self._progress.seconds(tests)
            if known is not None:
                return known
            run = self._run(None, arguments, 3600)
            if run.status != 0:
                raise Unusable(f"{run.output[-4000:]}\nthe tests must pass with nothing changed: {tests}")
            with self._lock:
                self._progress.took(tests, run.seconds)
            return run.seconds

    def _run(self, change: Change | None, arguments: Sequence[str], limit: float) -> Run:
        with tempfile.TemporaryDirectory(prefix="aiodigest-drawn-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            copy(folder, self._original)
            if change is not None:
                file = folder / change.file
                file.write_text(change.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
            run = run_tests(folder, arguments, limit, self.stopped)
        if self.stopped.is_set():
            raise Unusable("stopped")
        return run


def name_of(change: Change) -> str:
    return f"{change.file}:{change.row}:{change.column} {change.old!r} {change.new!r}"


def why(run: Run) -> str:
    """The test that noticed a change. Raises Unusable if pytest ended otherwise."""
    if run.status is None:
        return "it hangs"
    for line in run.output.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and rest:
            return rest.partition(" - ")[0]
    raise Unusable(f"{run.output[-4000:]}\npytest ended with {run.status}, and no test failed")


def interrupt(number: int, frame: FrameType | None) -> None:
    """End the program; what comes while it ends what it started is one Ctrl-C too many."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="which changes; drawn and printed if not given")
    parser.add_argument("--count", type=int, default=40, help="how many; 40 if not given")
    arguments = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="aiodigest-drawn-", ignore_cleanup_errors=True) as name:
        original = Path(name)
        copy(original)
        drawn = draw(original, seed, arguments.count)
        try:
            same = read_equivalents(original, (original / "tests/mutants/equivalent.toml").read_text(encoding="utf-8"))
        except ValueError as error:
            sys.exit(f"equivalent.toml: {error}")
        code = fingerprint(original, *SCRIPTS, *WORKER)
        tests = fingerprint(original, "aiodigest/**/*", "tests/**/*", "pyproject.toml")
        progress = Progress(ROOT / f".mutants/seed-{seed}.json", code, tests)
        return play(Trial(original, progress), drawn, same, seed)


def play(trial: Trial, drawn: Sequence[Change], same: Mapping[Change, str], seed: int) -> int:
    """Try the changes, and tell of each; the program's status."""
    equal = [change for change in drawn if change in same]
    for change in equal:
        print(f"equal     {change}   changes nothing: {same[change]}", flush=True)
    killed: list[Change] = []
    survivors: list[Change] = []
    try:
        with closing(trial.try_all([change for change in drawn if change not in same])) as tried:
            for change, by in tried:
                print(f"{'killed  ' if by else 'SURVIVED'}  {change}   {by}".rstrip(), flush=True)
                (killed if by else survivors).append(change)
    except Unusable as error:
        print(error)
        return 2
    except KeyboardInterrupt:
        print(f"stopped: {len(killed)} of {len(drawn)} were killed so far; --seed {seed} goes on")
        return 130
    print(f"{len(killed)} of {len(drawn)} were killed, {len(equal)} changed nothing")
    for change in survivors:
        print(f"survived: {change.diff}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
