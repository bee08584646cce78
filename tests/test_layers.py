"""What the linter's contracts cannot say of imports: they name what is forbidden, and this what is allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from userland import ROOT

PUBLIC = ("aiodigest.channels", "aiodigest.cli", "aiodigest.integrations", "aiodigest.rendering", "aiodigest.testing")


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, and names of them that are not public."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{name.name}" for name in node.names if name.name.startswith("_"))
            case ast.Import():
                yield from (name.name for name in node.names)
            case _:
                pass


def test_the_command_line_knows_only_the_public_names() -> None:
    files = sorted((ROOT / "aiodigest" / "cli").rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for module in imported(path):
            ours = module.partition(".")[0] in ("aiodigest", "redis")
            allowed = module in ("aiodigest", "aiodigest.__version__") or module.startswith(PUBLIC)
            assert allowed or not ours, f"{path.name} imports {module}"
