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
from math import inf
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
    output: Path
    process: subprocess.Popen[bytes]


def command(name: str, seed: int) -> list[str]:
    options = ("-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}")
    return [sys.executable, "-m", "pytest", *options, TESTS[name]]


def start(name: str, folder: Path) -> Run:
    seed = secrets.randbits(64)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # in which all seeds are one
    environment["AIODIGEST_TEST_EXAMPLES"] = str(EXAMPLES[name])
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")  # nothing is written beside the tests
    path = folder / f"{seed}.txt"
    with path.open("wb") as output:
        process = subprocess.Popen(
            command(name, seed), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,  # a Ctrl-C is this program's alone
        )  # fmt: skip
    return Run(name, seed, path, process)


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


def soak(folder: Path, names: Sequence[str], end: float) -> int:
    """Play as many at a time as there are cores, until the time is over, one fails, or Ctrl-C; then tell the totals."""
    began, coming, passed = time.monotonic(), cycle(names), Counter[str]()
    next_line, running, failed = began + PROGRESS, list[Run](), list[Run]()

    def tell() -> None:
        each = [f"{passed[name] * EXAMPLES[name]:,} examples of {name}" for name in names]
        print(f"{passed.total()} seeds passed: {', '.join(each)}; {time.monotonic() - began:,.0f} s", flush=True)

    try:
        while time.monotonic() < began + end and not failed:
            while len(running) < (os.cpu_count() or 1):
                running.append(start(next(coming), folder))
            time.sleep(0.2)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode:
                    failed.append(run)
                else:
                    passed[run.name] += 1
                    run.output.unlink()
            if time.monotonic() > next_line:
                tell()
                next_line += PROGRESS
    except KeyboardInterrupt:
        pass
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave servers behind
        stop(running)
    for run in failed:
        report(run)
    tell()
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=inf, help="how long; until Ctrl-C if not given")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=[*TESTS], help="which; all if not given")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="aiodigest-soak-") as name:
        return soak(Path(name), arguments.only, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
