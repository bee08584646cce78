"""``aiodigest dead replay --all`` and ``dead discard --all``: what an operator does after an incident."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from commandline import DEADLINE, Command, attempt, environment, manage, running
from servers import Server
from terminals import on_terminal, plain

from aiodigest import Delivery, Digest, DigestEngine, Entry, InvalidState, Policy, Reject, RetryPolicy
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.cli import dead as command_module
from aiodigest.cli.dead import Act, BulkWork, Summary

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
AT_ONCE = Policy(minimum_delay=0, increment_delay=0)
OPTIONS = "--namespace", "mail"


@pytest.fixture
def command(command: Command, own: Server, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("AIODIGEST_URL", own.url)
    monkeypatch.setenv("AIODIGEST_NAMESPACE", "mail")
    return command


def bury(server: Server, *entries: Entry[Any]) -> None:
    """A dead letter for each timeline of these entries."""
    asyncio.run(attempt(server.url, *entries, error=Reject("no such address"), policy=AT_ONCE))


def dead(server: Server) -> int:
    return manage(server, lambda engine: engine.stats()).dead


def test_all_letters_are_replayed_and_of_a_record_in_several_the_newest_wins(own: Server, command: Command) -> None:
    for value in ("old", "newer", "newest"):
        bury(own, Entry("user:1", value, "one"))
    bury(own, Entry("user:2", 1), Entry("user:2", 2))
    code, output, errors = command("dead", "replay", "--all", "--yes")
    assert (code, output, errors) == (0, "4 dead letters replayed, with 5 records\n", "")
    assert dead(own) == 0
    timeline = manage(own, lambda engine: engine.peek("user:1"))
    assert [record.value for record in timeline.records] == ["newest"]


def test_a_letter_that_another_program_wrote_controls_no_terminal_and_begins_no_line(
    own: Server, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b[31mred\x07\nnext"

    async def plant() -> None:
        backend = RedisBackend(own.url, namespace="mail", nonce=lambda: hostile)
        attempts: asyncio.Queue[Delivery] = asyncio.Queue()
        engine = DigestEngine(namespace="mail", backend=backend, policy=AT_ONCE)
        engine.observe(attempts.put_nowait)

        async def refuse(digest: Digest) -> None:
            raise Reject(hostile)

        async with engine.delivering(refuse):
            await engine.add(hostile, hostile, record_id=hostile)
            await attempts.get()

    asyncio.run(plant())
    listed = command("dead", "list")[1]
    shown = command("dead", "show", hostile)[1]
    monkeypatch.setattr("aiodigest.cli.output.is_terminal", Mock(return_value=True))
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))
    code, discarded, asked = command("dead", "discard", hostile)
    assert code == 0
    assert discarded.lstrip().startswith("\\x1b[31mred\\x07\\nnext")  # after what typer prints where it asks
    for text, lines in (listed, 2), (shown, 3), (asked, 1):
        assert [line for line in text.splitlines() if not line.isprintable() or line.startswith("next")] == []
        assert len(text.splitlines()) == lines


def test_in_json_each_letter_is_an_object(own: Server, command: Command) -> None:
    bury(own, Entry("user:1", 1), Entry("user:2", 1))
    ids = {letter["id"]: letter["key"] for letter in map(json.loads, command("dead", "list", "--json")[1].splitlines())}
    code, output, errors = command("dead", "replay", "--all", "--yes", "--json")
    assert (code, errors) == (0, "")
    told = [json.loads(line) for line in output.splitlines()]
    assert {one["id"]: one["key"] for one in told} == ids
    assert {(one["replayed"], type(one["ready"])) for one in told} == {(True, bool)}


def test_all_dead_letters_are_discarded(own: Server, command: Command) -> None:
    bury(own, Entry("user:1", 1), Entry("user:2", 1))
    code, output, _ = command("dead", "discard", "--all", "--yes")
    assert (code, output) == (0, "2 dead letters discarded, with 2 records\n")
    assert dead(own) == 0
    code, output, errors = command("dead", "discard", "--all", "--yes", "--json")
    assert (code, output, errors) == (0, "", "aiodigest: namespace 'mail' has no dead letters\n")


@pytest.mark.processes
@pytest.mark.parametrize("action", ["replay", "discard"])
def test_where_nobody_can_be_asked_all_needs_a_yes(action: str, own: Server, tmp_path: Path) -> None:
    bury(own, Entry("user:1", 1))
    with running(tmp_path, "dead", action, "--all", *OPTIONS, "--url", own.url) as process:
        assert process.end() == 2
        assert b"give --yes, since there is no terminal to ask on" in process.errors
        assert process.errors.count(b"\n") == 1
    assert dead(own) == 1


@pytest.mark.processes
def test_on_a_terminal_it_asks_first_and_shows_how_far_it_is(own: Server, tmp_path: Path) -> None:
    bury(own, Entry("user:1", 1), Entry("user:1", 2), Entry("user:2", 1))
    arguments = "dead", "replay", "--all", *OPTIONS, "--url", own.url
    for answer, ends in ((b"n", 1), (b"y", 0)):
        with on_terminal(tmp_path, *arguments) as terminal:
            terminal.until("Replay 2 dead letters of mail (3 records)?")
            terminal.type(answer + b"\n")
            assert terminal.end()[0] == ends
            assert (b"dead letters replayed \xe2\x94" in plain(terminal.shown)) == (ends == 0)
            assert terminal.shown.rfind(b"\x1b[?25h") >= terminal.shown.rfind(b"\x1b[?25l")  # the cursor is there
        assert dead(own) == (2 if ends else 0)
    assert b"2 dead letters replayed, with 3 records" in terminal.shown


@pytest.mark.processes
def test_a_bar_on_a_terminal_keeps_nothing_from_standard_output(own: Server, tmp_path: Path) -> None:
    bury(own, Entry("user:1", 1))
    arguments = "dead", "replay", "--all", "--yes", "--json", *OPTIONS, "--url", own.url
    with on_terminal(tmp_path, *arguments, streams=["stdin", "stderr"]) as terminal:
        code, output = terminal.end()
    assert (code, json.loads(output)["replayed"]) == (0, True)
    assert b"dead letters replayed" in terminal.shown
    assert b"user:1" not in terminal.shown


def test_a_letter_not_taken_stays_and_is_told(own: Server, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    bury(own, Entry("user:1", 1), Entry("user:2", 1))
    retry, error = RetryPolicy(backoff=lambda _: 60.0), ConnectionError("503")
    asyncio.run(attempt(own.url, Entry("user:1", 1), error=error, policy=AT_ONCE, retry=retry))
    monkeypatch.setattr(command_module, "QUIET", 0)
    code, output, errors = command("dead", "replay", "--all", "--yes")
    assert (code, output) == (1, "1 dead letter replayed, with 1 record\n")
    assert errors.startswith("aiodigest: 1 of 2 dead letters could not be replayed: ")
    assert "user:1" in errors
    code, output, errors = command("dead", "replay", "--all", "--yes", "--json")
    assert (code, json.loads(output)["replayed"], errors.count("\n")) == (1, False, 1)
    assert dead(own) == 1


def started(server: Server, folder: Path) -> subprocess.Popen[bytes]:
    """The command on 200 letters, of which JSON tells more than a pipe takes: so it waits for who reads it."""
    bury(server, *(Entry(f"{number:03}{'k' * 900}", 1) for number in range(200)))
    arguments = "dead", "replay", "--all", "--yes", "--json", *OPTIONS, "--url", server.url, "--timeout", "2s"
    command = sys.executable, "-m", "aiodigest", *arguments
    settings, pipe = environment(folder), subprocess.PIPE
    # unbuffered: what a buffer of a first line has beside it never comes to who reads the rest with `communicate`
    return subprocess.Popen(command, env=settings, stdout=pipe, stderr=pipe, bufsize=0)


@pytest.mark.processes
def test_ctrl_c_comes_between_two_letters_and_what_was_done_is_told(own: Server, tmp_path: Path) -> None:
    with started(own, tmp_path) as process:
        assert process.stdout is not None
        output = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=DEADLINE)
    done = len((output + rest).splitlines())
    assert process.returncode == 130
    assert 0 < done < 200
    assert dead(own) == 200 - done
    told = f"aiodigest: interrupted: {done} of 200 dead letters were replayed, the others are unchanged\n"
    assert errors.decode() == told


@pytest.mark.processes
def test_a_server_that_goes_away_meanwhile_is_one_line_that_says_what_was_done(own: Server, tmp_path: Path) -> None:
    with started(own, tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own.stop()
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 69
    assert errors.count(b"\n") == 1
    assert b" of 200 dead letters were replayed\n" in errors


async def swept(act: Act, *keys: str) -> BulkWork:
    """A sweep of letters of these timelines, which has no engine, and so needs none."""
    letters = [Summary(f"letter-{number}", key, EPOCH, 1) for number, key in enumerate(keys, 1)]
    work = BulkWork(letters, act, in_json=False)
    await work.run(DigestEngine(namespace="unused"))
    return work


async def test_a_busy_timeline_is_asked_again_and_letters_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "RETRY_INTERVAL", 0)
    asked: list[str] = []

    async def act(engine: DigestEngine, letter: Summary) -> dict[str, Any]:
        asked.append(letter.id)
        if asked.count(letter.id) < 3 and letter.key == "busy":
            raise InvalidState("a digest is under delivery")
        return {}

    work = await swept(act, "busy", "busy", "free")
    assert (work.done, work.left, work.is_interrupted) == (3, [], False)
    assert asked == ["letter-1", "letter-3", "letter-1", "letter-1", "letter-2", "letter-2", "letter-2"]


async def test_a_letter_that_somebody_else_has_done_away_with_does_not_count() -> None:
    async def act(engine: DigestEngine, letter: Summary) -> dict[str, Any] | None:
        return None if letter.id == "letter-1" else {}

    work = await swept(act, "k", "k")
    assert (work.done, work.records, work.left) == (1, 1, [])


async def test_what_was_begun_when_ctrl_c_came_is_ended() -> None:
    async def act(engine: DigestEngine, letter: Summary) -> dict[str, Any]:
        signal.raise_signal(signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # noqa: ASYNC110 - until it is heard
            await asyncio.sleep(0)
        return {}

    work = await swept(act, "a", "b")
    assert (work.done, [letter.id for letter in work.left], work.is_interrupted) == (1, ["letter-2"], True)
