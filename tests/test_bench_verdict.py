"""What makes ``make overload`` fail, judged here with figures that are made up."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import __main__ as program
from benchmarks import before
from benchmarks.backlog import FIRST_USE, Round, memory_row
from benchmarks.programs import ProgramFailed
from benchmarks.report import HEADS, Report, Row, astray, record
from benchmarks.setting import Setting
from benchmarks.worker import Seen

NOISE = 50.0  # ms


def seen(early: float = 50.0, peak: float = 50.0) -> Seen:
    return Seen(1, 1, 1, 1, early, peak, 1, 1, 1, 1, 1, 1)


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


# the page and the five lines


def test_the_page_has_a_place_for_each_table_and_its_columns_stand_there() -> None:
    page = program.PAGE.read_text()
    for name in program.TABLES:
        begin, end = (f"<!-- figures of {name}: {side} -->" for side in ("begin", "end"))
        assert page.count(begin) == page.count(end) == 1
        assert f"| {' | '.join(HEADS)} |" in page.partition(begin)[2].partition(end)[0]


def test_each_comparison_is_in_one_table_but_those_of_a_cluster_which_have_their_own_page() -> None:
    listed = [name for names in program.TABLES.values() for name in names]
    assert sorted([*listed, "scaling"]) == sorted(program.comparisons())


def test_a_run_is_written_between_its_two_comments_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures of bench: begin -->\nold\n<!-- figures of bench: end -->\nafter\n")
    report = Report({"machine": "2 cores"}, [Row("adds", "", "adds/s", [3.0])])
    record(page, "bench", report.recorded())
    text = page.read_text()
    assert text.startswith("before\n<!-- figures of bench: begin -->\n* machine: 2 cores\n")
    assert "| adds | asyncio | 3 |" in text
    assert "old" not in text
    assert text.endswith("\n<!-- figures of bench: end -->\nafter\n")
    with pytest.raises(ValueError, match="no place for the figures"):
        record(page, "bench-more", report.recorded())


@pytest.mark.parametrize("arguments", [["--only", "idle"], ["--scale", "0.5"], ["--all"]])
def test_a_part_of_a_run_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--record", *arguments])
    with pytest.raises(SystemExit):
        program.main()
    assert "--record writes a whole table" in capsys.readouterr().err


def test_five_lines_tell_what_to_remember_of_a_run() -> None:
    rows = [
        Row("add from 200 tasks", "saq, enqueue", "adds/s", [24.0], [2.0], 12, least=True),
        Row("add from 200 tasks", "arq, enqueue", "adds/s", [24.0], [1.0]),
        Row("add from 200 tasks", "a call an add", "adds/s", [24.0], [2.0], 11, least=True),
        Row(
            "server time an add, ready timelines, the least of its goes",
            "a script like those of 2017",
            "us",
            [6.0],
            [24.0],
            0.28,
        ),
        Row("server time an add, all to one timeline", "its bare commands", "us", [3.0], [4.0], 0.8),
        Row("server time an add, all to one timeline", "a script like those of 2017", "us", [3.0], [24.0], 0.14),
        Row("digests of 10 records", "arq, jobs/s", "digests/s", [14.0], [2.0], 7, least=True),
        Row("records of these", "taskiq, jobs/s", "records/s", [140.0], [2.5], 55, least=True),
        Row("lateness of 1,000 timelines, 100 due a second, on disk: median", "", "ms", [1.8], bound=2),
        Row("lateness of 1,000 timelines, 100 due a second, on disk: p99", "", "ms", [3.7], bound=4),
        Row("commands of an idle worker", "(3 EVALSHA)", "a minute", [6.0], bound=6),
        Row("server memory a record of 200 B, 20 a timeline", "a script like those of 2017", "B", [260.0], [410.0], 0.72),
    ]
    assert Report({}, rows).summary() == [
        "An add, one of many at once, costs 1/12 of a job's enqueue (saq).",
        "Of its server an add takes 0.25 of what a script like those of 2017 took, 0.125 if all go to one timeline.",
        "A digest of ten records costs 1/7 of a job (arq), a record of it 1/56 (taskiq).",
        "A digest begins 1.8 ms after it is due, 99 of 100 within 3.7 ms, on a server that writes to disk.",
        "A worker with nothing to do sends 6 commands a minute; a record of 200 bytes takes 260 of its server.",
    ]
    assert Report({}, rows[:1]).summary() == ["An add, one of many at once, costs 1/12 of a job's enqueue (saq)."]


def test_a_copy_without_history_says_that_it_has_no_earlier_commit(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"there is no commit 0123abc to compare with: .* without its git history"):
        before.install("0123abc", tmp_path)
    assert not list(tmp_path.iterdir())
