"""Copies of the project, and pytest in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("aiodigest", "tests", "examples", "docs", "benchmarks", "chaos")
FILES = ("pyproject.toml", "properdocs.yml", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
UNSHRUNK = "--hypothesis-profile=unshrunk"  # the smallest example takes minutes to find, and any will do
LOOK = 0.2  # seconds between two looks at whether pytest is to be ended
PATIENCE = 10  # seconds in which an interrupted pytest ends its servers


@dataclass(frozen=True)
class Run:
    """How pytest ended; its status is None if it did not."""

    status: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> bool:
        """A test failed: that it cannot be collected, or its fixtures cannot be made, shows nothing."""
        said = self.output.splitlines()[-2:]  # a warning may come after it
        return self.status == 1 and any(" failed" in line for line in said)


def copy(folder: Path, source: Path = ROOT) -> None:
    """Put the project, or a copy of it, into a folder."""
    for part in FOLDERS:
        shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in FILES:
        shutil.copy(source / part, folder)


def run_tests(folder: Path, tests: Sequence[str], time_limit: float, stopped: Event | None = None) -> Run:
    """Run pytest until a test fails, the time is over, or it is stopped; nothing that it started goes on after it."""
    # what the tests start must find this copy too, and not what is installed
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["AIODIGEST_TEST_CHANGED"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", UNSHRUNK, *tests]
    stopped, began = stopped or Event(), time.monotonic()
    with tempfile.TemporaryFile() as output:  # no pipe, which a server that is left behind would hold open
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None and not stopped.is_set() and time.monotonic() - began < time_limit:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
            status = process.poll()
        finally:
            end(process, folder)
        output.seek(0)
        said = output.read().decode(errors="replace").strip() or "no output"
    if status is None:
        said += f"\nit did not end within {time_limit:.0f} s"
    return Run(status, said, time.monotonic() - began)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End pytest, and all that was started with this folder in its path."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with suppress(ProcessLookupError):  # those of its group, such as servers
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if folder == ROOT:  # in which anything may run
        return
    for environment in Path("/proc").glob("[0-9]*/environ"):  # and those that have a session of their own
        with suppress(OSError):
            if f"\0PYTHONPATH={folder}".encode() in b"\0" + environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
