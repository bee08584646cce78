"""What makes ``make overload`` fail, judged here with figures that are made up."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import __main__ as program
from benchmarks.backlog import FIRST_USE, Round, memory_row
from benchmarks.report import Row, astray
from benchmarks.setting import Setting
from benchmarks.worker import Seen

NOISE = 50.0  # ms


def seen(early: float = 50.0, peak: float = 50.0) -> Seen:
    return Seen(1, 1, 1, early, peak, 1, 1, 1)


def usual(**times: list[float]) -> dict[str, float]:
    return dict(Round(times, 1.0, seen()).usual)


def test_one_run_of_a_script_in_ten_may_have_stood_still() -> None:
    assert usual(read=[0.5] * 90 + [NOISE] * 10) == {"read": 0.5}
    assert usual(read=[0.5] * 89 + [9.0] * 11) == {"read": 9.0}


def test_of_a_script_that_runs_seldom_every_run_counts_however_often_others_run() -> None:
    assert usual(read=[0.5] * 100_000, claim=[1.0] * 3 + [9.0]) == {"read": 0.5, "claim": 9.0}


def test_the_first_use_of_a_script_and_single_commands_are_no_runs_of_scripts() -> None:
    assert usual(**{FIRST_USE: [NOISE], "UNLINK": [NOISE], "close": [2.0]}) == {"close": 2.0}


def test_memory_is_flat_if_it_is_so_in_most_rounds() -> None:
    flat, grown = seen(50, 55), seen(50, 70)
    assert memory_row("memory", [flat, grown, flat]).met
    assert not memory_row("memory", [grown, flat, grown]).met


@pytest.mark.parametrize("difference", [1, -1])
def test_neither_a_record_that_is_lost_nor_one_that_came_twice_is_made_up_for(difference: int) -> None:
    assert not astray("records", difference).met
    assert astray("records", 0).met


@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_run_fails_if_it_is_strict_and_misses_what_must_be_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, strict: bool, must: bool
) -> None:
    async def missed(setting: Setting) -> AsyncGenerator[Row, None]:
        yield Row("memory", "", "MB", [3.0], bound=2.0, must=must)

    async def met(setting: Setting) -> AsyncGenerator[Row, None]:
        yield Row("loss", "", "", [0.0], bound=0.0, must=True)

    monkeypatch.setattr(signal, "signal", Mock())  # which would change what SIGTERM does to pytest
    monkeypatch.setattr(program, "ONCE", {"one": missed, "two": met})
    files = ("--json", str(tmp_path / "o.json"), "--markdown", str(tmp_path / "o.md"))
    monkeypatch.setattr(sys, "argv", ["bench", *(["--strict"] if strict else []), "--only", "one", "two", *files])
    assert program.main() == (1 if strict and must else 0)
    assert ("memory (3, wanted <= 2)" in capsys.readouterr().err) == (strict and must)
    assert "| memory |" in (tmp_path / "o.md").read_text()


def test_make_overload_is_strict() -> None:
    makefile = Path(__file__).parents[1].joinpath("Makefile").read_text()
    recipe = makefile.partition("\noverload:")[2].partition("\n\n")[0]
    assert "-m benchmarks --strict --only large producers one" in recipe
