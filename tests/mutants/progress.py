"""What became of drawn changes, written down at once, so that a program that was stopped goes on where it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path


@dataclass
class Fate:
    """The stages whose tests a change has passed, and what killed it, if anything did."""

    passed: list[str] = field(default_factory=list[str])
    killed: str = ""


def fingerprint(root: Path, *patterns: str) -> str:
    """A fingerprint of the files below a folder that decide what becomes of a change.

    Those of this folder do not: what was listed as changing nothing meanwhile makes nobody try the others again.
    """
    total = sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        name = path.relative_to(root)
        if path.is_file() and path.suffix != ".pyc" and name.parent != Path("tests/mutants"):
            total.update(f"{name}\0{sha256(path.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()


class Progress:
    """The fates of changes to code whose fingerprint is ``code``, and how long the tests take on the code as it is.

    Both of other code are forgotten. Of other ``tests`` (or of another project around the code) a change that was
    killed stays so, and what it has passed is forgotten.
    """

    def __init__(self, path: Path, code: str, tests: str) -> None:
        self._path, self._code, self._tests = path, code, tests
        self._fates: dict[str, Fate] = {}
        self._seconds: dict[str, float] = {}
        if not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["code"] == code:
            self._fates = {name: Fate(**fields) for name, fields in found["fates"].items()}
            if found["tests"] == tests:
                self._seconds = found["seconds"]
            else:
                self._fates = {name: Fate(killed=fate.killed) for name, fate in self._fates.items() if fate.killed}

    def fate(self, name: str) -> Fate:
        return self._fates.get(name, Fate())

    def seconds(self, tests: str) -> float | None:
        """How long these tests took on the code as it is; None if they were not tried."""
        return self._seconds.get(tests)

    def took(self, tests: str, seconds: float) -> None:
        """Note that these tests passed on the code as it is."""
        self._seconds[tests] = seconds
        self._write()

    def passed(self, name: str, stage: str) -> None:
        """Note that no test of a stage has noticed a change."""
        self._fates.setdefault(name, Fate()).passed.append(stage)
        self._write()

    def killed(self, name: str, by: str) -> None:
        self._fates.setdefault(name, Fate()).killed = by
        self._write()

    def _write(self) -> None:
        fates = {name: asdict(fate) for name, fate in self._fates.items()}
        whole = {"code": self._code, "tests": self._tests, "seconds": self._seconds, "fates": fates}
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(whole, indent=1, ensure_ascii=False), encoding="utf-8")
        unfinished.replace(self._path)
