"""Ctrl-C while the command is being loaded, as real processes that get a real SIGINT at one import after another."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from commandline import DEADLINE, ROOT, environment

pytestmark = pytest.mark.processes

# What every interpreter runs at its start that finds it: so this is there before the command is.
INTERRUPT = """
    import os, signal, sys

    class Interrupt:
        def find_spec(self, name, *_):
            if name == os.environ["AIODIGEST_INTERRUPT_AT"]:
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, Interrupt())
"""

# What pip puts on the path.
SCRIPT = """
    import sys
    from aiodigest.__main__ import main
    sys.exit(main())
"""


def interrupted_at(module: str, folder: Path, *command: str) -> tuple[int, bytes, bytes]:
    (folder / "sitecustomize.py").write_text(dedent(INTERRUPT))
    variables = {"PYTHONPATH": f"{folder}:{ROOT}", "AIODIGEST_INTERRUPT_AT": module}
    result = subprocess.run(
        [sys.executable, *command], env={**environment(folder), **variables}, capture_output=True, timeout=DEADLINE
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "module",
    [
        "aiodigest.records.validation", "pydantic_core", "aiodigest.engine", "aiodigest.worker.delivery",
        "aiodigest.policy", "aiodigest.__main__", "aiodigest.cli", "typer", "aiodigest.cli.app", "aiodigest.cli.pipe",
    ],
)  # fmt: skip
def test_ctrl_c_at_any_import_of_the_command_is_quiet(module: str, tmp_path: Path) -> None:
    assert interrupted_at(module, tmp_path, "-m", "aiodigest", "--version") == (130, b"", b"")


def test_the_script_is_as_quiet_as_the_module(tmp_path: Path) -> None:
    script = tmp_path / "aiodigest"
    script.write_text(dedent(SCRIPT))
    for module in ("aiodigest.engine", "aiodigest.cli.app"):
        assert interrupted_at(module, tmp_path, str(script), "--version") == (130, b"", b"")


def test_a_program_that_imports_the_package_keeps_its_own_ctrl_c(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("try:\n    import aiodigest\nexcept KeyboardInterrupt:\n    print('mine')\n")
    assert interrupted_at("aiodigest.engine", tmp_path, str(program)) == (0, b"mine\n", b"")


def test_so_does_a_package_that_imports_it_and_is_run_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("try:\n    import aiodigest\nexcept KeyboardInterrupt:\n    print('mine')\n")
    (package / "worker.py").write_text("")
    assert interrupted_at("aiodigest.engine", tmp_path, "-m", "theirs.worker") == (0, b"mine\n", b"")


def test_an_ignored_ctrl_c_stays_ignored(tmp_path: Path) -> None:
    """As in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, output, errors = interrupted_at("aiodigest.engine", tmp_path, "-m", "aiodigest", "--version")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, output.startswith(b"aiodigest "), errors) == (0, True, b"")
