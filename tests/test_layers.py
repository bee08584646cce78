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
    [
        ("cli", 20, PUBLIC),
        ("channels", 10, SENDING),
        ("rendering", 5, ("aiodigest.rendering", "aiodigest.timing.zones", *SENDING[1:])),
    ],
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


def test_no_group_of_errors_that_is_taken_apart_lets_another_error_out() -> None:
    """Python 3.11.0 to 3.11.3 would put what is raised inside ``except*`` into a group, whatever it comes from."""
    for path in (ROOT / "aiodigest").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            handlers = node.handlers if isinstance(node, ast.TryStar) else []
            raised = [each for handler in handlers for each in ast.walk(handler) if isinstance(each, ast.Raise)]
            assert not any(each.exc for each in raised), f"{path.name}, line {raised[0].lineno}"
