"""Make the distributions, and see that a stranger can use them: ``make dist``.

The sdist and the wheel are built, and hold what they must; the sdist builds the same wheel again; and the wheel runs in
an environment that has nothing else, first bare, then with the extra ``standard``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
UV = [sys.executable, "-m", "uv"]

IMPORT = "import aiodigest; print(aiodigest.__version__)"
ADD = """
import asyncio
from aiodigest import DigestEngine

async def main():
    engine = DigestEngine(namespace="dist")
    async with engine:
        assert await engine.add("key", "value")
        assert (await engine.stats()).ready == 1

asyncio.run(main())
"""


def main() -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(*UV, "build", "--out-dir", DIST, ROOT)
    [wheel], [sdist] = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    holds_what_it_must(wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="aid") as folder:
        builds_the_same(sdist, wheel, Path(folder))
        runs(wheel, Path(folder))
    print(f"{wheel.name} and {sdist.name} are complete, and run")


def run(*command: str | Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(command, cwd=tempfile.gettempdir(), env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def contents(wheel: Path) -> dict[str, str]:
    """The files of a wheel, and the hash of each."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def holds_what_it_must(wheel: Path, sdist: Path) -> None:
    """The wheel has each file of the package and nothing else; the sdist has what is needed to build and test it."""
    package = [path for path in (ROOT / "aiodigest").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {path.relative_to(ROOT).as_posix() for path in package}
    got = {name for name in contents(wheel) if ".dist-info/" not in name}
    if got != wanted:
        sys.exit(f"the wheel lacks {sorted(wanted - got)} and should not have {sorted(got - wanted)}")
    facts = {name.partition(".dist-info/")[2] for name in contents(wheel)}
    if not {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= facts:
        sys.exit(f"the wheel has no licence, or no command: {sorted(facts)}")
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    others = ("pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "properdocs.yml", "tests/test_engine.py")
    needed = wanted | {*others}
    if not needed <= sources:
        sys.exit(f"the sdist lacks {sorted(needed - sources)}")


def builds_the_same(sdist: Path, wheel: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(*UV, "build", "--wheel", "--out-dir", folder / "again", folder / sdist.name.removesuffix(".tar.gz"))
    [again] = (folder / "again").glob("*.whl")
    if contents(again) != contents(wheel):
        sys.exit("the sdist builds another wheel")


def runs(wheel: Path, folder: Path) -> None:
    """In an environment of its own: bare, then with what ``standard`` brings."""
    run(*UV, "venv", folder / "v", "--python", sys.executable)
    python, command = folder / "v" / "bin" / "python", folder / "v" / "bin" / "aiodigest"
    version = wheel.name.split("-")[1]
    run(*UV, "pip", "install", "--python", python, wheel)
    said = run(python, "-W", "error", "-c", IMPORT)
    bare = subprocess.run([command, "--version"], capture_output=True, text=True)
    run(*UV, "pip", "install", "--python", python, f"aiodigest[standard] @ {wheel.as_uri()}")
    told = run(command, "--version")
    run(python, "-W", "error", "-c", ADD, AIODIGEST_DATA=str(folder / "d"))
    shown = run(command, "stats", "--namespace", "dist", "--json", AIODIGEST_DATA=str(folder / "d"))
    if said.strip() != version or told.strip() != f"aiodigest {version}" or json.loads(shown)["ready"] != 1:
        sys.exit(f"it does not run as it should: {said}{told}{shown}")
    if bare.returncode == 0 or "pip install 'aiodigest[" not in bare.stderr:
        sys.exit(f"without its extra the command should say how to get it: {bare.stdout}{bare.stderr}")


if __name__ == "__main__":
    main()
