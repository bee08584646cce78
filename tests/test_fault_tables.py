"""Checks of the tables of faults.md: each fault and edge case has its tests, and these exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| .*? \| (.*) \|$", (FOLDER / "faults.md").read_text(encoding="utf-8"), re.MULTILINE)


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_33_faults_and_16_edge_cases_have_a_row_each() -> None:
    assert [int(number) for number, _ in ROWS] == [*range(1, 34), *range(1, 17)]


@pytest.mark.parametrize("tests", [tests for _, tests in ROWS])
def test_every_test_that_is_named_exists(tests: str) -> None:
    names = re.findall(r"`([a-z_]+\.py)::(test_\w+)`", tests)
    assert names
    for file, name in names:
        assert name in names_in(file), f"{file}::{name}"
