"""The peers: what each needs, and how its program is run."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.programs import TAIL, ProgramFailed, in_short, output

HERE = Path(__file__).parent
AGE = 7 * 24 * 3600.0  # seconds after which an environment is made anew
SHUT_OUT = "newer.txt"


@dataclass(frozen=True)
class Peer:
    """A queue of jobs; ``acknowledges`` says that a job which a worker was lost with is done again.

    ``batches`` is its call that enqueues many jobs, if it has one.
    """

    name: str
    program: str
    requirements: tuple[str, ...]
    acknowledges: bool
    batches: str = ""


PEERS: Sequence[Peer] = (
    Peer("arq", "with_arq.py", ("arq>=0.28,<1", "hiredis>=3"), acknowledges=True),
    # saq imports typing_extensions, and does not ask for it
    Peer(
        "saq",
        "with_saq.py",
        ("saq[redis]>=0.26,<1", "typing-extensions>=4", "hiredis>=3", "orjson>=3.10"),
        acknowledges=True,
    ),
    # streaq has a client of its own, which has no use for hiredis
    Peer("streaq", "with_streaq.py", ("streaq>=7.2,<8",), acknowledges=True, batches="enqueue_many"),
    Peer("docket", "with_docket.py", ("pydocket>=0.27,<1", "hiredis>=3"), acknowledges=True, batches="add_many"),
    Peer(
        "taskiq",
        "with_taskiq.py",
        ("taskiq>=0.13,<1", "taskiq-redis>=1.2,<2", "hiredis>=3", "orjson>=3.10"),
        acknowledges=False,
    ),
)


def prepare(peer: Peer, folder: Path, fresh: bool = False) -> Path:
    """The Python of a peer's environment, which is made if it is not there, has other requirements or is old: a newer
    version of what it has may be out. If it is to be ``fresh``, it is made in any case.
    """
    place = folder.absolute() / peer.name
    python, stamp = place / "bin" / "python", place / "requirements.txt"
    wanted = "\n".join(peer.requirements)
    if fresh or not python.exists() or not is_current(stamp, wanted):
        print(f"installing {peer.name} into {place} ...", file=sys.stderr, flush=True)
        if not python.exists():
            _done(peer, sys.executable, "-m", "venv", "--clear", place)
        # what is there stays if this fails, as without a network: it still works, and is tried again the next time
        install = "-m", "pip", "install", "-q", "-U", "--upgrade-strategy", "eager", "--disable-pip-version-check"
        _done(peer, python, *install, *peer.requirements)
        (place / SHUT_OUT).write_text(", ".join(filter(None, (newer(python, each) for each in peer.requirements))))
        stamp.write_text(wanted)  # last, so that what was cut short is made anew
    return python


def is_current(stamp: Path, wanted: str) -> bool:
    return stamp.exists() and stamp.read_text() == wanted and time.time() - stamp.stat().st_mtime < AGE


def newer(python: Path, requirement: str) -> str:
    """The version that a requirement with an upper bound shuts out, if there is one: as text, '' if not.

    The bound is there as a new major version may ask for another program; but nobody is to think that it was measured.
    """
    name, *bounds = re.split(r"[<>=,\[\]]+", requirement)
    if "<" not in requirement:
        return ""
    command = python, "-m", "pip", "index", "versions", "--disable-pip-version-check", name
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    latest = re.match(rf"{re.escape(name)} \(([^)]+)\)", told.stdout)
    if latest is None:
        return f"whether there is a newer {name} could not be asked"
    allowed = int(bounds[-1])  # the bound is a major version
    return f"{name} {latest[1]} shut out by <{allowed}" if int(latest[1].partition(".")[0]) >= allowed else ""


def shut_out(python: Path) -> str:
    """What the requirements of an environment kept from being installed in it."""
    file = python.parents[1] / SHUT_OUT
    return file.read_text() if file.exists() else ""


def _done(peer: Peer, *command: str | Path) -> None:
    told = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if told.returncode:
        raise ProgramFailed(f"{peer.name} cannot be installed:\n{told.stdout[-TAIL:]}")


async def run(peer: Peer, python: Path, *arguments: object, timeout: float = 120) -> dict[str, Any]:
    """What the peer's program prints."""
    what = f"{peer.name}, {arguments[0]},"
    out = await output(what, python, HERE / peer.program, *arguments, timeout=timeout)
    return json.loads(out.splitlines()[-1])


@dataclass
class Peers:
    """The Python of each peer that can be run, and in ``facts`` its versions, or why it is left out."""

    facts: dict[str, str] = field(default_factory=dict[str, str])
    pythons: dict[Peer, Path] = field(default_factory=dict[Peer, Path])
    left_out: list[str] = field(default_factory=list[str])

    def find(self, folder: Path, fresh: bool = False) -> None:
        """Make or take the environments; ``fresh``: make all of them anew."""
        for peer in PEERS:
            try:
                python = prepare(peer, folder, fresh)
                versions = asyncio.run(run(peer, python, "versions"))
            except (OSError, ProgramFailed) as error:
                self.leave_out(peer.name, error)
            else:
                self.pythons[peer] = python
                told = ", ".join(f"{name} {version}" for name, version in versions.items())
                self.facts[peer.name] = "; ".join(filter(None, (told, shut_out(python))))

    def leave_out(self, name: str, error: Exception) -> None:
        print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
        self.pythons = {peer: python for peer, python in self.pythons.items() if peer.name != name}
        self.facts[name] = f"left out: {in_short(error)}"
        if name not in self.left_out:
            self.left_out.append(name)
