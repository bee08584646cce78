"""Ctrl-C while the command line loads: real processes that get a real SIGINT at one import after another."""

from __future__ import annotations

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


@pytest.mark.parametrize("module", ["aiodigest.cli", "typer", "aiodigest.cli.app", "aiodigest.cli.pipe.command"])
def test_ctrl_c_while_the_command_line_loads_is_quiet(module: str, tmp_path: Path) -> None:
    assert interrupted_at(module, tmp_path, "-m", "aiodigest", "--version") == (130, b"", b"")


def test_the_script_is_as_quiet_as_the_module(tmp_path: Path) -> None:
    script = tmp_path / "aiodigest"
    script.write_text(dedent(SCRIPT))
    assert interrupted_at("aiodigest.cli.app", tmp_path, str(script), "--version") == (130, b"", b"")
