"""Run the model of the store, wherever a store may be, and the fuzz tests, again and again with other seeds.

One pytest a core, each a minute or two with a seed of its own. Ctrl-C or ``--seconds`` ends it, totals and status 0;
the first failure ends it with the falsifying example, the command that replays it, and status 1.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "tests/test_store_model.py::test_the_scripts_do_what_the_reference_does"
TESTS = {
    "redis": f"{MODEL}[redis]",
    "fuzz": "tests/test_fuzz.py",
    "cluster": f"{MODEL}[cluster]",
    "sentinel": f"{MODEL}[sentinel]",
}
EXAMPLES = {"redis": 600, "fuzz": 300, "cluster": 600, "sentinel": 600}  # a pytest process
PROGRESS = 30  # seconds between two lines
PATIENCE = 20  # seconds in which an interrupted pytest ends its servers


@dataclass
class Run:
    """One pytest process."""

    name: str
    seed: int
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> Path:
        return self.folder / f"{self.seed}.txt"


def command(name: str, seed: int) -> list[str]:
    options = ("-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}")
    return [sys.executable, "-m", "pytest", *options, TESTS[name]]


def start(name: str, folder: Path) -> Run:
    seed = secrets.randbits(64)
    environment = {
        **os.environ,
        "AIODIGEST_TEST_EXAMPLES": str(EXAMPLES[name]),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),  # nothing is written beside the tests
    }
    environment.pop("CI", None)  # in which hypothesis would play the same examples each time
    with (folder / f"{seed}.txt").open("wb") as output:
        process = subprocess.Popen(
            command(name, seed),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is this program's alone
        )
    return Run(name, seed, folder, process)


def stop(runs: Sequence[Run]) -> None:
    """End what still runs, and whatever it started."""
    deadline = time.monotonic() + PATIENCE
    while (left := [run for run in runs if run.process.poll() is None]) and time.monotonic() < deadline:
        for run in left:
            run.process.send_signal(signal.SIGINT)  # once may not do: a test can take it for its own
        time.sleep(1)
    for run in left:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


def report(run: Run) -> None:
    print(run.output.read_text(encoding="utf-8", errors="replace")[-20_000:])
    replay = shlex.join(command(run.name, run.seed)[1:])
    print(f"seed {run.seed} of {run.name} failed (pytest ended with {run.process.returncode}). To replay it:")
    print(f"AIODIGEST_TEST_EXAMPLES={EXAMPLES[run.name]} {sys.executable} {replay}", flush=True)


class Soak:
    """As many runs as there are cores, and what those that ended have shown."""

    def __init__(self, folder: Path, names: Sequence[str], seconds: float | None) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.end = None if seconds is None else self.began + seconds
        self.running: list[Run] = []
        self.passed = Counter[str]()
        self.names = names
        self.coming = cycle(names)

    @property
    def totals(self) -> str:
        each = [f"{self.passed[name] * EXAMPLES[name]:,} examples of {name}" for name in self.names]
        elapsed = time.monotonic() - self.began
        return f"{self.passed.total()} seeds passed: {', '.join(each)}; {elapsed:,.0f} s"

    def until_told(self) -> Run | None:
        """Go on until the time is over, or until a run fails."""
        next_line = self.began + PROGRESS
        while self.end is None or time.monotonic() < self.end:
            while len(self.running) < (os.cpu_count() or 1):
                self.running.append(start(next(self.coming), self.folder))
            time.sleep(0.2)
            for run in [run for run in self.running if run.process.poll() is not None]:
                self.running.remove(run)
                if run.process.returncode:
                    return run
                self.passed[run.name] += 1
                run.output.unlink()
            if time.monotonic() > next_line:
                print(self.totals, flush=True)
                next_line += PROGRESS
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="how long; until Ctrl-C if not given")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=[*TESTS], help="which; all if not given")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="aiodigest-soak-") as name:
        soak = Soak(Path(name), arguments.only, arguments.seconds)
        failed: Run | None = None
        try:
            failed = soak.until_told()
        except KeyboardInterrupt:
            pass
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave servers behind
            stop(soak.running)
        if failed:
            report(failed)
        print(soak.totals)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
