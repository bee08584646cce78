"""The small changes that ``make mutants-drawn`` draws."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.changes import MODULES, SCRIPTS, draw, find_changes, possible_changes, read_equivalents
from servers import Server
from userland import ROOT

PYTHON = '''
"""Not a constant: 1 < 2."""
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    few = 1 + 1

class Some:
    """Not one either: True and False."""

    level: Literal[1] = 4

def some(a: Literal[2], *b: int) -> Literal[3]:
    "1 is not 2"  # 1 or 2
    return f"{a + 5} and not {a}" if a not in b else "True" if not ((a) <= 6) else some(a, *b)
'''
LUA = """
-- 1 < 2, not true
--[[ 1 and
2 ]] local a, b = -7, a - b -- 3
local text = '1 == "2"' .. "3 ~= \\" 4" .. [[ 5 or 6 ]]
if not (a ~= #b) and a.not_false then return true end
"""


def changes_of(file: str, text: str) -> list[str]:
    return [change.new.strip() for change in find_changes(file, text)]


def test_a_seed_draws_the_same_changes_half_of_them_to_scripts_and_of_more_the_same_at_first() -> None:
    drawn = draw(ROOT, 7, 40)
    assert draw(ROOT, 7, 40) == drawn
    assert draw(ROOT, 8, 40) != drawn
    assert [*drawn[:5], *drawn[20:25]] == draw(ROOT, 7, 10)
    assert [change.file.endswith(".lua") for change in drawn] == [True] * 20 + [False] * 20
    assert len(set(drawn)) == 40


@pytest.mark.thorough
def test_every_change_to_the_modules_compiles_and_is_one() -> None:
    possible = possible_changes(ROOT, MODULES)
    assert {"aiodigest/scheduler.py", "aiodigest/worker/shard.py"} <= {change.file for change in possible}
    for change in possible[::16]:
        text = (ROOT / change.file).read_text()
        assert change.apply(text) != text
        compile(change.apply(text), change.file, "exec")


def test_every_change_to_the_scripts_compiles(own: Server) -> None:
    possible = possible_changes(ROOT, SCRIPTS)[::3]
    with own.client() as client, client.pipeline(transaction=False) as pipeline:
        for change in possible:
            pipeline.script_load(change.apply((ROOT / change.file).read_text()))
        assert len(pipeline.execute()) == len(possible)


def test_what_is_done_is_changed_and_no_text_or_type() -> None:
    in_python = "= 5", "if a in b", "if a <= 6", "<= 7", "a < 6", "a > 6"
    in_lua = "a + b", "-8", "if (a ~=", "a == #b", "return false", "or a.not_false"
    for file, text, pieces in (("some.py", PYTHON, in_python), ("some.lua", LUA, in_lua)):
        assert all(piece in line for piece, line in zip(pieces, changes_of(file, text), strict=True))


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("x = 0", {"x = 1"}),
        ("x = 1.0", {"x = 2.0", "x = 0.0"}),
        ("x = 1_000", {"x = 1001"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = a < b < c", {"x = a <= b < c", "x = a >= b < c", "x = a < b <= c", "x = a < b >= c"}),
        ("x = a and b and c", {"x = a or b or c"}),
        ("x -= a // b", {"x += a // b", "x -= a * b"}),
        ("if a and b: pass", {"if a or b: pass", "if False: pass"}),
        ("await tell(a)", {"pass"}),
        ("self.a = b", {"pass"}),
        ("x = 'é' if (a == b) else False", {"x = 'é' if (a != b) else False", "x = 'é' if (a == b) else True"}),
    ],
)
def test_an_operator_or_a_constant_becomes_another(line: str, becomes: set[str]) -> None:
    assert {*changes_of("some.py", line + "\n")} == becomes


def listing(old: str, new: str, more: str = "") -> str:
    return f"[[equivalent]]\nfile = 'some.py'\nold = {old!r}\nnew = {new!r}\nreason = 'it is the same'\n{more}"


def test_what_changes_nothing_is_told_by_a_line_and_what_it_becomes(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("if a:\n    x = b + 1\n")
    same = read_equivalents(tmp_path, listing("x = b + 1", "x = b + 2"))
    assert [(change.row, reason) for change, reason in same.items()] == [(2, "it is the same")]


def test_an_entry_says_how_many_lines_it_is_for_and_one_that_matches_no_more_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("x = 1\n" * 2)
    assert len(read_equivalents(tmp_path, listing("x = 1", "x = 2", "times = 2"))) == 2
    with pytest.raises(ValueError, match="possible 2 times, not 1"):
        read_equivalents(tmp_path, listing("x = 1", "x = 2"))
    with pytest.raises(ValueError, match=r"'y = 1' → 'y = 2' is possible 0 times"):
        read_equivalents(tmp_path, listing("y = 1", "y = 2"))


def test_the_entries_of_the_project_match_its_code() -> None:
    assert read_equivalents(ROOT, (ROOT / "tests/mutants/equivalent.toml").read_text())
