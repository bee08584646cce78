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


MODULE = ("-m", "aiodigest")


@pytest.mark.parametrize(
    ("module", "command"),
    [
        *((module, MODULE) for module in ("aiodigest.cli", "typer", "aiodigest.cli.app", "aiodigest.cli.pipe.command")),
        ("aiodigest.cli.app", ("-c", dedent(SCRIPT))),
    ],
)
def test_ctrl_c_while_the_command_line_loads_is_quiet(module: str, command: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(dedent(INTERRUPT))
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "AIODIGEST_INTERRUPT_AT": module}
    line, settings = [sys.executable, *command, "--version"], {**environment(tmp_path), **variables}
    result = subprocess.run(line, env=settings, capture_output=True, timeout=DEADLINE)
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")
