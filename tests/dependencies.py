"""Run the quick tests with other versions, each in an environment of its own below ``.venvs``.

``make check-deps``: the oldest versions that pyproject.toml allows, exactly, and the newest that there are.
``make test-pythons``: each Python from 3.11 to 3.14 that is found on the path or among pyenv's; those that are absent
are named. Environments are used again as long as pyproject.toml is the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
UV = [sys.executable, "-m", "uv"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST, NEWEST = "lowest-direct", "highest"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["deps", "pythons"])
    if parser.parse_args().what == "deps":
        plan = [("oldest", sys.executable, OLDEST), ("newest", sys.executable, NEWEST)]
    else:
        found = {version: python_of(version) for version in PYTHONS}
        plan = [(version, python, NEWEST) for version, python in found.items() if python is not None]
        if absent := [version for version, python in found.items() if python is None]:
            print(f"not on this machine: Python {', '.join(absent)}")
    failed = [name for name, python, resolution in plan if not passes(name, python, resolution)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def python_of(version: str) -> str | None:
    """The interpreter of a version: on the path, or else the newest that pyenv has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    newest = sorted(pyenv.glob(f"{version}.*/bin/python"), key=lambda path: int(path.parts[-3].rpartition(".")[2]))
    for path in [*reversed(newest), shutil.which(f"python{version}")]:
        if path is not None and subprocess.run([path, "-c", "import ssl, venv"], capture_output=True).returncode == 0:
            return str(path)
    return None


def passes(name: str, python: str, resolution: str) -> bool:
    """Make the environment, if it is not there, and run the tests in it."""
    print(f"== {name}", flush=True)
    folder = environment(name, python, resolution)
    options = ["-q", "-p", "no:cacheprovider", "-n", "auto", "--dist", "worksteal", "--quick"]
    return subprocess.run([folder / "bin" / "pytest", *options], cwd=ROOT).returncode == 0


def environment(name: str, python: str, resolution: str) -> Path:
    folder = ROOT / ".venvs" / name
    made_of, stamp = sha256(PROJECT.read_bytes() + python.encode()).hexdigest(), folder / "made-of"
    if not stamp.exists() or stamp.read_text() != made_of:
        uv("venv", "-q", "--clear", "--python", python, str(folder))
        interpreter, chosen = ["-q", "--python", str(folder / "bin" / "python")], str(folder / "chosen.txt")
        uv("pip", "compile", *interpreter, "--resolution", resolution, "--all-extras", "-o", chosen, str(PROJECT))
        uv("pip", "install", *interpreter, "-r", chosen)
        uv("pip", "install", *interpreter, "--no-deps", "-e", str(ROOT))
        uv("pip", "install", *interpreter, "-c", chosen, "--group", f"{PROJECT}:test")
        stamp.write_text(made_of)
    return folder


def uv(*arguments: str) -> None:
    if subprocess.run([*UV, *arguments], cwd=ROOT).returncode:
        sys.exit(f"uv {' '.join(arguments)} failed")


if __name__ == "__main__":
    main()
