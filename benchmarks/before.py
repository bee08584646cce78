"""Adds that all go to one timeline, beside an earlier commit, which is installed in an environment of its own."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import AsyncGenerator
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.programs import TAIL, ProgramFailed, output
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn

HOT = Path(__file__).with_name("hot.py")
SAME = ("redis", "hiredis", "pydantic")  # of which both have the same version


def install(revision: str, folder: Path) -> Path:
    """The Python of an environment that has the commit; it is made if it is not there."""
    root = Path(__file__).parents[1]
    asked = f"{revision}^{{commit}}"
    found = subprocess.run(["git", "rev-parse", "--verify", asked], cwd=root, capture_output=True, text=True)
    if found.returncode:
        raise ProgramFailed(f"there is no commit {revision} to compare with: a copy of the project without its git "
                            "history has none")  # fmt: skip
    place = folder.absolute() / found.stdout.strip()[:12]
    python, stamp = place / "bin" / "python", place / "requirements.txt"
    wanted = "\n".join(f"{name}=={version(name)}" for name in SAME)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {revision} into {place} ...", file=sys.stderr, flush=True)
        _done(sys.executable, "-m", "venv", "--clear", place)
        archive = subprocess.run(["git", "archive", revision], cwd=root, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(place / "source", filter="data")
        _done(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", place / "source", *wanted.split())
        stamp.write_text(wanted)  # last, so that what was cut short is made anew
    return python


def _done(*command: str | Path) -> None:
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if told.returncode:
        raise ProgramFailed(f"the earlier commit cannot be installed:\n{told.stdout[-TAIL:]}")


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    try:
        before = install(setting.before, setting.folder / "before")
    except (OSError, ProgramFailed) as error:
        setting.peers.leave_out("before", error)
        return
    count = setting.some(20_000, 400)

    async def rate(python: str | Path) -> float:
        await setting.flush()
        return float(await output("the program that adds to one timeline", python, HOT, setting.url, count))

    rates = await in_turn(setting.rounds, ours=partial(rate, sys.executable), before=partial(rate, before))
    yield Row(
        "add from 200 tasks, all to one timeline", f"commit {setting.before}", "adds/s", rates["ours"], rates["before"],
        1.8, least=True,
    )  # fmt: skip
