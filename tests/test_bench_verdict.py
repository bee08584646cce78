"""What the benchmark makes of its figures, which are made up here: what fails, what is recorded, what is told."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks import __main__ as program
from benchmarks import before
from benchmarks.adding import cpu_rows
from benchmarks.backlog import FIRST_USE, Round, memory_row
from benchmarks.peers import environments
from benchmarks.peers.environments import PEERS, Peer, Peers
from benchmarks.programs import ProgramFailed
from benchmarks.report import HEADS, Report, Row, astray, record
from benchmarks.setting import Setting, clocked
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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "idle"], "--record writes a whole table"),
        (["--scale", "0.5"], "--record writes a whole table"),
        (["--all"], "--record writes a whole table"),
        (["--rounds", "9"], "--record writes 10 rounds of bench"),
        (["--table", "bench-more", "--rounds", "10"], "--record writes 5 rounds of bench-more"),
        (["--disk"], "neither --disk nor --before"),
        (["--before", "HEAD"], "neither --disk nor --before"),
    ],
)
def test_a_part_of_a_run_or_another_than_the_page_tells_of_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--record", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]


class Run:
    """A run of the benchmark with a table of comparisons that take no time, and a page of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.page, self.ran = folder / "page.md", list[str]()
        self.page.write_text("<!-- figures of bench: begin -->\n<!-- figures of bench: end -->\n")
        self._files = "--json", str(folder / "o.json"), "--markdown", str(folder / "o.md")
        self._monkeypatch, self.lacks = monkeypatch, ""
        monkeypatch.setattr(signal, "signal", Mock())  # which would change what SIGTERM does to pytest
        monkeypatch.setattr(program, "PAGE", self.page)
        monkeypatch.setattr(program, "TABLES", {"bench": ["adding", "before"]})
        monkeypatch.setattr(program, "BY_LOOP", {"adding": self.adding})
        monkeypatch.setattr(program, "ONCE", {"before": self.before})
        monkeypatch.setattr(Peers, "find", self.find)

    def find(self, _: Path, fresh: bool = False) -> None:
        """Stands for ``Peers.find``."""

    async def adding(self, setting: Setting) -> AsyncGenerator[Row, None]:
        self.ran.append("adding")
        yield Row("adds", "", "adds/s", [3.0], bound=4.0, least=True)

    async def before(self, setting: Setting) -> AsyncGenerator[Row, None]:
        self.ran.append("before")
        if self.lacks == "before":
            setting.peers.leave_out("before", ProgramFailed("there is no commit"))
            return
        yield Row("adds", "commit", "adds/s", [3.0], [1.0])

    def record(self) -> int:
        self._monkeypatch.setattr(sys, "argv", ["bench", "--record", *self._files])
        return program.main()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return Run(monkeypatch, tmp_path)


def test_what_is_recorded_tells_its_day_its_commit_and_what_was_missed(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.record() == 0
    page = run.page.read_text()
    assert re.search(r"^\* date: \d{4}-\d\d-\d\d$", page, re.MULTILINE)
    assert re.search(r"^\* commit: ([0-9a-f]{10}|unknown)", page, re.MULTILINE)
    assert "\n* Missed: adds: 3, wanted >= 4\n" in page
    assert "\nMissed: adds: 3, wanted >= 4\n" in capsys.readouterr().out


def test_nothing_is_recorded_where_the_earlier_commit_is_left_out(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    page, run.lacks = run.page.read_text(), "before"
    assert run.record() == 1
    assert run.page.read_text() == page
    assert capsys.readouterr().err.splitlines()[-1] == "not recorded: before left out, see above"


def test_where_a_peer_is_left_out_a_run_to_be_recorded_does_not_even_begin(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(peers: Peers, folder: Path, fresh: bool = False) -> None:
        peers.leave_out("saq", ProgramFailed("saq cannot be installed"))

    monkeypatch.setattr(Peers, "find", find)
    page = run.page.read_text()
    assert run.record() == 1
    assert (run.page.read_text(), run.ran) == (page, [])
    assert capsys.readouterr().err.splitlines()[-1] == "not recorded: saq left out, see above"


# what is asked for


def test_comparisons_may_be_asked_for_by_their_module() -> None:
    assert program.chosen(["costs"]) == ["time", "digest-time", "timelines", "hot", "memory", "size"]
    assert program.chosen(["idle", "waiting"]) == ["idle", "callback", "lateness"]
    assert program.chosen(["adding", "delivering"]) == ["adding", "delivering"]  # names go first


def test_a_module_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "nothing"])
    with pytest.raises(SystemExit):
        program.main()
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_the_page_lists_the_comparisons_of_each_table_and_the_modules_of_the_others() -> None:
    text = program.PAGE.read_text().partition("## What there is to ask for")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z-]+)`", text))
    names = set(program.comparisons()) | set(program.modules())
    assert listed == names


# the environments of peers


def test_an_environment_is_made_anew_when_it_is_a_week_old_or_fresh_or_to_hold_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Mock()
    monkeypatch.setattr(environments, "_done", made)
    monkeypatch.setattr(environments, "newer", Mock(return_value=""))
    peer = replace(PEERS[0], requirements=("arq>=0.28,<1",))
    stamp, python = tmp_path / "arq" / "requirements.txt", tmp_path / "arq" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()

    def is_made(peer: Peer = peer, fresh: bool = False) -> bool:
        made.reset_mock()
        assert environments.prepare(peer, tmp_path, fresh) == python
        return made.called

    assert is_made()
    assert not is_made()
    assert is_made(fresh=True)
    days = 8 * 24 * 3600
    os.utime(stamp, (stamp.stat().st_atime - days, stamp.stat().st_mtime - days))
    assert is_made()
    assert not is_made()
    assert is_made(replace(peer, requirements=("arq>=0.29,<1",)))


@pytest.mark.parametrize(
    ("requirement", "index", "told"),
    [
        ("arq>=0.28,<1", "arq (0.28.0)\nAvailable versions: 0.28.0\n", ""),
        ("arq>=0.28,<1", "arq (1.2.0)\nAvailable versions: 1.2.0, 0.28.0\n", "arq 1.2.0 shut out by <1"),
        ("saq[redis]>=0.26,<1", "saq (2.0)\n", "saq 2.0 shut out by <1"),
        ("arq>=0.28,<1", "", "whether there is a newer arq could not be asked"),
        ("hiredis>=3", "hiredis (4.0)\n", ""),
    ],
)
def test_a_new_major_version_that_a_bound_shuts_out_is_told(
    monkeypatch: pytest.MonkeyPatch, requirement: str, index: str, told: str
) -> None:
    monkeypatch.setattr(environments.subprocess, "run", Mock(return_value=Mock(stdout=index)))
    assert environments.newer(Path("python"), requirement) == told


# what a process computes


def test_what_the_client_computes_is_told_an_add_and_an_entry_with_bounds_for_asyncio_alone() -> None:
    computed, counts = {"ours": [200.0, 220.0, 240.0], "many": [90.0] * 3}, {"ours": 20, "many": 30}
    each, many = cpu_rows(computed, counts, "asyncio")
    assert (each.value, each.wanted, each.met) == (11.0, "<= 11", True)
    assert (many.value, many.wanted) == (3.0, "<= 4")
    assert [row.bound for row in cpu_rows(computed, counts, "uvloop")] == [None, None]


def test_what_the_worker_computes_is_told_a_digest_without_the_one_that_begins_the_time() -> None:
    assert replace(seen(), computed=0.006, digests=101).cpu_us == pytest.approx(60)


async def test_the_time_of_the_process_counts_what_it_computes_and_no_wait() -> None:
    seconds, computed = await clocked(partial(asyncio.sleep, 0.2))
    assert seconds >= 0.2
    assert computed < 0.1


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
        Row(
            "server memory a record of 200 B, 20 a timeline", "a script like those of 2017", "B", [260.0], [410.0], 0.72
        ),
    ]
    assert Report({}, rows).summary() == [
        "Of many adds at once 12 are done in the time of one job's enqueue (saq).",
        "Of its server an add takes 0.25 of what a script like those of 2017 took, 0.125 if all go to one timeline.",
        "In the time of one job 7 digests of ten records are delivered (arq), or 56 records of these (taskiq).",
        "A digest begins 1.8 ms after it is due, 99 of 100 within 3.7 ms, on a server that writes to disk.",
        "A worker with nothing to do sends 6 commands a minute; a record of 200 bytes takes 260 B of its server.",
    ]
    assert Report({}, rows[:1]).summary() == [
        "Of many adds at once 12 are done in the time of one job's enqueue (saq)."
    ]


def test_figures_that_are_missed_are_told_on_a_line_each_with_what_they_stand_beside() -> None:
    rows = [
        Row("adds", "saq, enqueue", "adds/s", [20.0], [2.0], 12, least=True, loop="uvloop"),
        Row("adds", "arq, enqueue", "adds/s", [40.0], [2.0], 12, least=True),
        Row("stall", "", "ms", [21.2], bound=20),
    ]
    assert Report({}, rows).missed() == [
        "Missed: adds, beside saq, enqueue, uvloop: 10, wanted >= 12",
        "Missed: stall: 21.2, wanted <= 20",
    ]
    assert Report({}, rows[1:2]).missed() == []


def test_a_copy_without_history_says_that_it_has_no_earlier_commit(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"there is no commit 0123abc to compare with: .* without its git history"):
        before.install("0123abc", tmp_path)
    assert not list(tmp_path.iterdir())
