"""What the linter's contracts cannot say of imports: they name what is forbidden, and this what is allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from userland import ROOT

PUBLIC = ("aiodigest.channels", "aiodigest.cli", "aiodigest.integrations", "aiodigest.rendering", "aiodigest.testing")
# the public names, and modules that know nothing of the engine
SENDING = ("aiodigest.channels", "aiodigest.arguments", "aiodigest.errors", "aiodigest.logs", "aiodigest.rendering")


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


@pytest.mark.parametrize(
    ("room", "least", "others"),
    [("cli", 20, PUBLIC), ("channels", 10, SENDING), ("rendering", 5, ("aiodigest.rendering", *SENDING[1:]))],
)
def test_rooms_that_users_could_have_written_know_only_the_public_names(
    room: str, least: int, others: tuple[str, ...]
) -> None:
    files = sorted((ROOT / "aiodigest" / room).rglob("*.py"))
    assert len(files) > least
    for path in files:
        for module in imported(path):
            ours = module.partition(".")[0] in ("aiodigest", "redis")
            allowed = module in ("aiodigest", "aiodigest.__version__") or module.startswith(others)
            assert allowed or not ours, f"{path.name} imports {module}"
