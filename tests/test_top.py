"""``aiodigest top``: looks at a namespace, on a terminal and elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commandline import Command, attempt, running
from rich.console import Console
from servers import Server, running_server
from terminals import on_terminal

from aiodigest import JSON, DigestEngine, Entry, Health, Policy, Reject, State, Stats, Timeline
from aiodigest.cli import top as looks
from aiodigest.cli.top import Look, due_in_words, fitting, frame, look_at, rates, server_time, span

NOON = datetime(2024, 5, 6, 12, tzinfo=UTC)
HOSTILE = "\x1b[31mred\x07\r\n\u202e[bold]"
ESCAPED = "\\x1b[31mred\\x07\\r\\n\\u202e[bold]"
OPTIONS = "--namespace", "mail"
NOTHING: dict[str, float] = dict.fromkeys(looks.COUNTERS, 0.0)


@pytest.fixture
def place(own: Server) -> Server:
    """A server with a namespace ``mail``: one timeline is due, one waits, one letter is dead, one digest went out."""
    asyncio.run(fill(own.url))
    return own


async def fill(url: str) -> None:
    await attempt(url, Entry("delivered", 1))
    await attempt(url, Entry("refused", 1), error=Reject("no such address"))
    async with DigestEngine(url, namespace="mail") as engine:
        await engine.add(HOSTILE, 1)
    async with DigestEngine(url, namespace="mail", policy=Policy(initial_delay=600)) as engine:
        await engine.add("patient", 1)


def timeline(key: str, state: State, after: float, **facts: Any) -> Timeline[JSON]:
    """A timeline that is due so many seconds after noon."""
    return Timeline(key, state, NOON + timedelta(seconds=after), size=1, **facts)


def look(clock: float = 0.0, timelines: tuple[Timeline[JSON], ...] = (), **numbers: Any) -> Look:
    return Look(NOON, clock, Health(True), Stats(**numbers), timelines)


def drawn(seen: Look, lines: int | None = None, width: int = 200) -> str:
    file = StringIO()
    Console(file=file, width=width, highlight=False).print(frame("mail on here", seen, NOTHING, lines))
    return file.getvalue()


def test_what_happens_a_second_is_the_difference_between_two_looks() -> None:
    before, now = look(10.0, digests=100, delivered=1_000), look(14.0, digests=102, delivered=1_009, aged=1)
    told = {"digests": 0.5, "delivered": 2.25, "dropped": 0, "aged": 0.25, "expired": 0, "buried": 0, "duplicates": 0}
    assert rates(before, now) == told
    assert rates(look(1.0, delivered=10), look(2.0, delivered=3)) == NOTHING  # somebody counts anew
    missed = Look(NOON, 2.0, Health(False, "away"))
    assert rates(None, look(1.0)) is rates(look(1.0), missed) is rates(missed, look(3.0)) is None


def test_a_duration_is_told_in_two_units_at_the_most() -> None:
    told = [span(seconds) for seconds in (0.04, 9.94, 59.4, 59.6, 185, 7_800, 7 * 86_400)]
    assert told == ["0.0 s", "9.9 s", "59 s", "1 min 0 s", "3 min 5 s", "2 h 10 min", "7 d 0 h"]


def test_what_is_overdue_is_so_by_the_clock_of_the_server_and_a_lease_is_told_by_what_is_left_of_it() -> None:
    late = timeline("k", "ready", -100)
    ahead = look(oldest_due=late.due, overdue=3.0)  # this machine's clock is 97 s ahead
    assert due_in_words(late, server_time(ahead)) == "overdue 3.0 s"
    waits = timeline("k", "waiting", -50)
    assert due_in_words(waits, server_time(look(oldest_due=waits.due))) == "in 0.0 s"  # it is 50 s ahead
    assert due_in_words(timeline("k", "leased", 42), NOON) == "lease 42 s"
    assert due_in_words(timeline("k", "leased", -1), NOON) == "lease over"


def test_where_lines_are_few_each_state_has_its_share_of_them() -> None:
    many = [timeline(f"{state}{n}", state, n) for state in ("waiting", "ready") for n in range(9)]
    shown = fitting([*many, timeline("l", "leased", 1)], 6)
    assert [one.key for one in shown] == ["ready0", "l", "waiting0", "ready1", "waiting1", "ready2"]
    assert fitting(many, -3) == []


def test_a_look_takes_no_more_lines_and_columns_than_there_are() -> None:
    many = tuple(timeline("k" * 300, "ready", n, last_error="no " * 100) for n in range(50))
    for width in (60, 80, 200):
        lines = drawn(look(timelines=many), lines=24, width=width).splitlines()
        assert len(lines) == 24
        assert max(map(len, lines)) <= width
        assert "…" in lines[-1]
        assert " ready" in lines[-1]


def test_an_empty_namespace_is_told_in_a_line_and_not_in_zeros() -> None:
    title, health, told = drawn(look()).splitlines()
    assert title.startswith("mail on here")
    assert health == "healthy"
    assert told == "nothing was ever added here, or it has another name: see aiodigest namespaces"
    assert "0 waiting, 0 ready" in drawn(look(digests=1))


def test_keys_and_errors_of_strangers_are_shown_as_text() -> None:
    text = drawn(look(timelines=(timeline(HOSTILE, "ready", -1, last_error=HOSTILE),)))
    assert text.count(ESCAPED) == 2
    assert not set("\x1b\x07\r\u202e") & set(text)


async def test_of_many_a_look_is_bounded(server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "SHOWN", 2)
    monkeypatch.setattr(looks, "SCANNED", 3)
    async with DigestEngine(server.url, namespace=namespace) as engine:
        for number in range(5):
            await engine.add(f"k{number}", 1)
        seen = await look_at(engine)
    assert [one.key for one in seen.timelines] == ["k0", "k1"]
    assert seen.stats is not None
    assert seen.stats.ready == 5


async def test_a_look_counts_once_and_is_healthy_or_not_by_what_it_shows(server: Server, namespace: str) -> None:
    async with DigestEngine(server.url, namespace=namespace) as engine:
        await engine.add("k", 1)
        with server.client() as client:
            client.zincrby(f"{{{namespace}}}:ready", -600_000, "k")
            client.config_resetstat()
            seen = await look_at(engine)
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2  # counts, and a page of what is ready
    assert seen.stats is not None
    assert seen.stats.overdue >= 600
    assert seen.health == Health(False, seen.stats.health().reason, seen.stats.overdue)


def test_one_look_is_printed_as_plain_lines(place: Server, command: Command) -> None:
    code, output, errors = command("top", *OPTIONS, "--url", place.url)
    assert (code, errors) == (0, "")
    title, health, *lines = output.splitlines()
    assert title.startswith("mail on unix://")
    assert "no-secret-here" not in output
    assert health == "healthy"
    assert "1 waiting, 1 ready, 0 leased, 1 dead letter" in output
    assert "in all 1 1 0 0 0 1 0" in [" ".join(line.split()) for line in lines]
    [due] = [line for line in lines if ESCAPED in line]
    assert "ready" in due
    assert "overdue" in due
    [waits] = [line for line in lines if line.startswith("patient")]
    assert " min " in waits
    assert not {"\x1b", "\x07", "\r"} & set(output)


def test_in_json_a_look_is_an_object_with_all_that_is_known(place: Server, command: Command) -> None:
    code, output, errors = command("top", *OPTIONS, "--url", place.url, "--json")
    assert (code, errors) == (0, "")
    seen = json.loads(output)
    assert set(seen) == {"time", "ok", "reason", "stats", "per_second", "timelines"}
    assert (seen["ok"], seen["reason"], seen["per_second"]) == (True, "", None)
    assert json.loads(command("stats", *OPTIONS, "--url", place.url, "--json")[1]).keys() == seen["stats"].keys()
    assert (seen["stats"]["waiting"], seen["stats"]["dead"], seen["stats"]["delivered"]) == (1, 1, 1)
    assert {(one["key"], one["state"]) for one in seen["timelines"]} == {(HOSTILE, "ready"), ("patient", "waiting")}


def test_the_second_look_knows_what_happens_a_second(place: Server, command: Command) -> None:
    code, output, _ = command("top", *OPTIONS, "--url", place.url, "--json", "--count", "2", "--interval", "100ms")
    first, second = map(json.loads, output.splitlines())
    assert code == 0
    assert first["per_second"] is None
    assert second["per_second"] == dict.fromkeys(looks.COUNTERS, 0)


@pytest.mark.processes
def test_looks_go_on_while_the_server_is_away_and_ctrl_c_ends_them_with_0(tmp_path: Path) -> None:
    with running_server() as server:
        arguments = "top", *OPTIONS, "--url", server.url, "--json", "--count", "10000", "--interval", "100ms"
        with running(tmp_path, *arguments) as process:
            assert json.loads(process.read_line())["ok"]
            server.stop()
            while (seen := json.loads(process.read_line()))["ok"]:
                pass
            assert "is unavailable: " in seen["reason"]
            assert (seen["stats"], seen["timelines"]) == (None, [])
            server.start()
            while not json.loads(process.read_line())["ok"]:
                pass
            assert process.interrupt(signal.SIGINT) == 0
            assert process.errors == b""


@pytest.mark.processes
@pytest.mark.parametrize("key", [b"q", b"Q", b"\x03", b""], ids=["q", "Q", "ctrl-c", "sigterm"])
def test_on_a_terminal_it_looks_until_a_key_or_sigterm(key: bytes, place: Server, tmp_path: Path) -> None:
    with on_terminal(tmp_path, "top", *OPTIONS, "--url", place.url, "--interval", "100ms") as top:
        first = top.until("q quits", "healthy", "1 waiting, 1 ready", "overdue", ESCAPED, "patient")
        assert b"\x1b[?1049h" in first
        assert b"a second" not in first
        top.until("a second")
        top.type(key) if key else top.process.terminate()
        assert top.end()[0] == 0
        assert top.shown.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))
        assert top.now() == top.settings
        assert b"Traceback" not in top.shown


@pytest.mark.processes
def test_on_a_terminal_an_outage_is_shown_and_goes_by(tmp_path: Path) -> None:
    with running_server() as server:
        server.stop()
        options = "--url", server.url, "--interval", "100ms", "--timeout", "500ms"
        with on_terminal(tmp_path, "top", *OPTIONS, *options) as top:
            top.until("is unavailable: ")
            server.start()
            top.until("healthy")
            server.stop()
            top.until("is unavailable: ")
            top.type(b"q")
            assert top.end()[0] == 0


@pytest.mark.processes
def test_q_is_heard_while_the_server_does_not_answer(tmp_path: Path) -> None:
    with running_server() as server:
        assert server.process is not None
        with on_terminal(tmp_path, "top", *OPTIONS, "--url", server.url, "--timeout", "1h") as top:
            top.until("healthy")
            server.process.send_signal(signal.SIGSTOP)
            top.type(b"q")
            assert top.end()[0] == 0
