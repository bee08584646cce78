"""``aiodigest pipe``: what it prints, in this process; and how it ends, as real processes on an embedded server."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeAlias

import pytest
from clusters import until
from commandline import (
    DEADLINE,
    Command,
    aiodigest,
    digests,
    environment,
    ids,
    ndjson,
    no_process_is_left,
    running,
    without_stalls,
)
from embedded_users import status
from servers import Server

from aiodigest import DigestEngine, Entry, Policy

JSON_OUT = ("--output", "json")
BY_KEY = ("--group-by", "key", "--id", "id", *JSON_OUT)
GITHUB = ("--group-by", "repository", "--id", "id", "--timestamp", "occurred_at", *JSON_OUT)
Pipe: TypeAlias = Callable[..., CompletedProcess[bytes]]


def made_up_events() -> bytes:
    """187 events in the shape of the real ones: oldest first, some without a time, payloads from 0.5 to 40 KB."""

    def event(number: int) -> dict[str, Any]:
        minute = (number - 28) // 2
        time = None if number < 28 else f"2019-05-15T{15 + minute // 60}:{minute % 60:02}:00Z"
        return {
            "id": f"event-{number:03}",
            "event": ("push", "issues", "release")[number % 3],
            "action": None if number % 7 else "created",
            "repository": ("octo/hello-world", "octo/npm", "unknown", "electron", "Octocoders")[number % 13 % 5],
            "sender": "octo",
            "occurred_at": time,
            "payload": {"commits": [{"message": f"näher {number} {index}"} for index in range(8 + number * 7 % 700)]},
        }

    return ndjson(event(number) for number in range(187))


def item(number: int, key: str = "k") -> dict[str, object]:
    return {"key": key, "id": f"{key}{number}"}


@pytest.fixture
def pipe(
    server: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> Generator[Pipe]:
    """Runs a pipe in this process, to its end, on the server that all share."""
    monkeypatch.setenv("AIODIGEST_DATA", str(tmp_path))

    def run(*arguments: str, input: bytes = b"") -> CompletedProcess[bytes]:
        (tmp_path / "given").write_bytes(input)
        before, given = os.dup(0), os.open(tmp_path / "given", os.O_RDONLY)
        os.dup2(given, 0)
        try:
            code, output, errors = command("pipe", "--url", server.url, "--namespace", namespace, *arguments)
        finally:
            os.dup2(before, 0)
            os.close(before)
            os.close(given)
        told = b"".join(without_stalls(errors.encode().splitlines(keepends=True)))
        return CompletedProcess(arguments, code, output.encode(), told)

    logger = logging.getLogger("aiodigest")
    handlers = [*logger.handlers]
    yield run
    logger.handlers[:], logger.propagate = handlers, True
    gc.unfreeze()


def test_every_event_is_printed_once_in_digests_of_one_group_in_order_of_time(pipe: Pipe) -> None:
    events = made_up_events()
    result = pipe(*GITHUB, input=events)
    given = {one["id"]: one for one in map(json.loads, events.splitlines())}
    assert (result.returncode, result.stderr) == (0, b"")
    assert sorted(ids(result.stdout)) == sorted(given)
    for digest in digests(result.stdout):
        assert {record["value"]["repository"] for record in digest["records"]} == {digest["key"]}
        times = [record["timestamp"] for record in digest["records"]]
        assert times == sorted(times)
        for record in digest["records"]:
            assert record["value"] == given[record["id"]]
            assert record["value"]["occurred_at"] in (record["timestamp"], None)


@pytest.mark.processes
def test_a_line_is_printed_at_once_and_a_burst_as_one_more_digest_while_the_stream_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", *BY_KEY, "--max-size", "4") as pipe:
        for number, key in enumerate("ab"):
            pipe.feed(ndjson([item(number, key)]))
            assert ids(pipe.read_line()) == [f"{key}{number}"]
        pipe.feed(ndjson(item(number, "b") for number in range(2, 6)))
        assert ids(pipe.read_line()) == ["b2", "b3", "b4", "b5"]
        assert pipe.end() == 0
    assert no_process_is_left(tmp_path)


def test_malformed_lines_are_reported_with_their_place_counted_and_skipped(pipe: Pipe, tmp_path: Path) -> None:
    file = tmp_path / "bad.ndjson"
    lines = [
        ndjson([item(1)]).rstrip(),
        b"{nonsense",
        b"",
        b'{"key": "k", "id": {}}',
        b'{"key": "' + b"k" * 1025 + b'", "id": "long"}',
        b'{"key": "k", "id": "large", "text": "' + b"x" * 1_048_577 + b'"}',
        b'{"key": "", "id": "no name"}',
        b'{"key": "\\ud800\\u001b[31m", "id": "half"}',
        b'{"key": "k", "id": "last"}',
    ]
    file.write_bytes(b"\n".join(lines))
    result = pipe(*BY_KEY, "--timestamp", "time", str(file))
    assert result.returncode == 0
    assert sorted(ids(result.stdout)) == ["k1", "last"]
    errors = result.stderr.decode().splitlines()
    places = [error.removeprefix(f"aiodigest: {file}:").partition(":")[0] for error in errors[:-3]]
    assert sorted(map(int, places)) == [2, 4, 5, 6, 7, 8]
    assert "not JSON" in errors[0]
    told = "4 malformed lines", "1 line without a usable id", "1 line over a limit"
    assert errors[-3:] == [f"aiodigest: {each}: skipped" for each in told]
    assert b"\x1b" not in result.stderr


@pytest.mark.parametrize("levels", [255, 300, 100_000])
def test_a_line_that_is_nested_too_deeply_is_skipped_and_counted(levels: int, pipe: Pipe) -> None:
    deep = b'{"key": "k", "id": "deep", "value": ' + b"[" * levels + b"]" * levels + b"}\n"
    result = pipe(*BY_KEY, input=ndjson([item(1)]) + deep + ndjson([item(2)]))
    assert (result.returncode, sorted(ids(result.stdout))) == (0, ["k1", "k2"])
    told, counted = result.stderr.splitlines()
    assert told.startswith(b"aiodigest: <stdin>:2: ")
    assert re.match(rb"aiodigest: 1 (malformed line|line over a limit): skipped", counted)


def test_a_line_whose_time_is_not_understood_is_kept_without_it_and_counted(pipe: Pipe) -> None:
    lines = ndjson([{"key": "k", "id": "a", "time": "yesterday"}, {"key": "k", "id": "b", "time": "1704164645000"}])
    result = pipe(*BY_KEY, "--timestamp", "time", input=lines)
    assert (result.returncode, ids(result.stdout)) == (0, ["b", "a"])
    assert result.stderr.decode().splitlines()[-1:] == [
        "aiodigest: 1 line without a time that is understood: kept, at the time of arrival"
    ]
    assert pipe(*BY_KEY, "--timestamp", "time", "--strict", input=lines).returncode == 1


def test_of_many_malformed_lines_the_first_are_shown_and_a_field_that_no_line_has_is_named(pipe: Pipe) -> None:
    lines = ndjson({"id": number, "event": "push"} for number in range(30))
    result = pipe(*BY_KEY, input=b"starting\n" + lines)
    assert (result.returncode, result.stdout) == (1, b"")  # nothing was usable
    errors = result.stderr.decode().splitlines()
    assert len(errors) == 23
    assert errors[-3:] == [
        "aiodigest: 1 malformed line: skipped (the first 20 are shown)",
        "aiodigest: 30 lines without a usable key: skipped (the first 20 are shown)",
        "aiodigest: no line had a usable key; the first has the fields: id, event",
    ]


def test_strict_stops_at_a_malformed_line_and_prints_what_came_before(pipe: Pipe) -> None:
    lines = ndjson([item(1), item(2)]) + b"nonsense\n" + ndjson([item(3)])
    result = pipe(*BY_KEY, "--strict", input=lines)
    assert result.returncode == 1
    assert ids(result.stdout) == ["k1", "k2"]
    assert b"<stdin>:3: it is not JSON" in result.stderr


@pytest.mark.processes
def test_a_growing_file_is_followed_through_cuts_and_changes_until_ctrl_c(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(ndjson([item(1, "a")]) + b'{"key": "b",')
    with running(tmp_path, "pipe", *BY_KEY, "--follow", str(log)) as pipe:
        assert ids(pipe.read_line()) == ["a1"]
        with log.open("ab") as file:
            file.write(b'"id": "b1"}\n')
        assert ids(pipe.read_line()) == ["b1"]
        log.write_bytes(ndjson([item(1, "c")]))
        assert ids(pipe.read_line()) == ["c1"]
        for again, key in enumerate("ef", 1):  # cut and grown between two looks, to the same length and beyond it
            pipe.process.send_signal(signal.SIGSTOP)
            log.write_bytes(ndjson([item(1, key)] * again))
            pipe.process.send_signal(signal.SIGCONT)
            assert ids(pipe.read_line()) == [f"{key}1"]
        log.rename(tmp_path / "log.1")
        log.write_bytes(ndjson([item(1, "d"), item(2, "d")]))
        assert "d1" in ids(pipe.read_line())
        assert pipe.interrupt() == 130
    assert sorted(set(ids(pipe.output))) == ["a1", "b1", "c1", "d1", "d2", "e1", "f1"]
    assert pipe.errors == b""


@pytest.mark.processes
def test_ctrl_c_prints_what_waits_and_is_quiet(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", *BY_KEY) as pipe:
        pipe.feed(ndjson([item(1), item(1, "other")]))
        first = {*ids(pipe.read_line()), *ids(pipe.read_line())}
        pipe.feed(ndjson([item(2), item(1, "mark")]))
        assert first | set(ids(pipe.read_line())) == {"k1", "other1", "mark1"}
        assert pipe.interrupt() == 130
    assert "k2" in ids(pipe.output)
    assert pipe.errors == b""


def test_records_dropped_by_capacity_are_counted_and_exit_1(pipe: Pipe) -> None:
    lines = ndjson(item(number) for number in range(25))
    result = pipe(*BY_KEY, "--capacity", "10", "--initial-delay", "20m", input=lines)
    assert result.returncode == 1
    assert ids(result.stdout) == [f"k{number}" for number in range(15, 25)]
    assert [digest["dropped"] for digest in digests(result.stdout)] == [15]
    assert b"15 records dropped" in result.stderr


@pytest.mark.parametrize("arguments", [BY_KEY, ("--group-by", "key", *JSON_OUT)], ids=["ids", "no ids"])
def test_a_file_with_more_lines_of_a_group_than_a_timeline_holds_is_printed_whole(
    arguments: tuple[str, ...], pipe: Pipe
) -> None:
    lines = [item(number, "few" if number % 100 == 0 else "many") for number in range(5_000)]
    result = pipe(*arguments, input=ndjson(lines))
    assert (result.returncode, result.stderr) == (0, b"")
    printed = [record["value"]["id"] for digest in digests(result.stdout) for record in digest["records"]]
    assert sorted(printed) == sorted(str(line["id"]) for line in lines)
    assert max(len(digest["records"]) for digest in digests(result.stdout)) <= 500


def test_ids_that_come_again_and_again_fill_no_timeline(pipe: Pipe) -> None:
    lines = [{**item(number % 10), "number": number} for number in range(3_000)]
    result = pipe(*BY_KEY, "--initial-delay", "20m", input=ndjson(lines))
    [digest] = digests(result.stdout)
    assert [record["value"]["number"] for record in digest["records"]] == list(range(2_990, 3_000))


def test_lines_that_are_too_old_to_be_printed_fill_no_timeline(pipe: Pipe) -> None:
    lines = ndjson({**item(number), "time": number} for number in range(2_500))
    arguments = ("--group-by", "key", "--timestamp", "time", "--max-age", "1h")
    for _ in range(2):  # each run tells of its own
        result = pipe(*arguments, input=lines)
        told = b"aiodigest: 2,500 lines left out as too old, by --max-age\n"
        assert (result.returncode, result.stdout, result.stderr) == (0, b"", told)


def test_a_longer_cool_down_needs_no_other_option(pipe: Pipe) -> None:
    result = pipe(*BY_KEY, "--minimum-delay", "1h", input=ndjson(item(number) for number in range(3)))
    assert (result.returncode, result.stderr, sorted(ids(result.stdout))) == (0, b"", ["k0", "k1", "k2"])


@pytest.mark.parametrize(
    "rule",
    [("--quiet-delay", "20m"), ("--price", "20h"), ("--at", "0 0 29 2 *"), ("--hours", "00:00-24:00", "--days")],
    ids=lambda rule: rule[0],
)
def test_lines_wait_for_others_by_any_rule_and_all_are_printed_at_the_end(rule: tuple[str, ...], pipe: Pipe) -> None:
    if "--days" in rule:  # that are neither today nor tomorrow
        rule = (*rule, f"{datetime.now(UTC) + timedelta(days=3):%a}".lower())
    result = pipe(*BY_KEY, *rule, input=ndjson(item(number) for number in range(20)))
    assert (result.returncode, result.stderr) == (0, b"")
    [digest] = digests(result.stdout)
    assert [record["id"] for record in digest["records"]] == [f"k{number}" for number in range(20)]


@pytest.mark.processes
def test_a_group_is_printed_once_it_is_quiet_while_the_stream_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", *BY_KEY, "--quiet-delay", "500ms") as pipe:
        pipe.feed(ndjson([item(1), item(2)]))
        assert ids(pipe.read_line()) == ["k1", "k2"]
        assert pipe.end() == 0


def test_a_digest_has_no_more_bytes_than_asked_for_and_a_longer_line_is_told_of(pipe: Pipe) -> None:
    lines = [{**item(number), "text": "x" * (2_000 if number == 3 else 300)} for number in range(8)]
    result = pipe(*BY_KEY, "--max-bytes", "1000", "--initial-delay", "20m", input=ndjson(lines))
    told = result.stderr.decode().splitlines()
    assert told[0].startswith("aiodigest: <stdin>:4: a line may take at most 1,000 bytes (--max-bytes), not ")
    assert (result.returncode, told[1:]) == (0, ["aiodigest: 1 line over a limit: skipped"])
    assert sorted(ids(result.stdout)) == [f"k{number}" for number in range(8) if number != 3]
    for digest in digests(result.stdout):
        values = [json.dumps(record["value"], separators=(",", ":")) for record in digest["records"]]
        assert sum(map(len, values)) <= 1000


def test_if_no_line_was_usable_that_is_a_failure(pipe: Pipe) -> None:
    large = ndjson({**item(number), "text": "x" * 300} for number in range(3))
    result = pipe(*BY_KEY, "--max-bytes", "100", input=large)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.splitlines()[-1] == b"aiodigest: 3 lines over a limit: skipped"
    result = pipe("--lines", "--group-by", "^(web):", input=b"api: slow\napi: full\n")
    assert (result.returncode, result.stdout) == (1, b"")
    told = b"aiodigest: no line had a usable key; the first has the text: api: slow"
    assert result.stderr.splitlines()[-1] == told
    assert b"malformed" not in result.stderr
    assert pipe(*BY_KEY).returncode == 0  # nothing came


def test_the_first_digest_of_a_group_holds_all_that_a_file_has_of_it(pipe: Pipe) -> None:
    lines = [{**item(number, "ab"[number % 2]), "text": "x" * 3_000} for number in range(600)]  # more than one read
    result = pipe(*BY_KEY, input=ndjson(lines))
    assert {digest["key"]: len(digest["records"]) for digest in digests(result.stdout)} == {"a": 300, "b": 300}


def test_lines_of_text_are_grouped_by_an_expression(pipe: Pipe) -> None:
    text = b"web-1: disk 91 % full\nweb-2: slow\nweb-1: disk 93 % full\n-- mark --\nweb-1: up\n"
    result = pipe("--lines", "--group-by", r"^(?P<key>[\w-]+):", input=text)
    assert result.returncode == 0
    assert result.stderr.endswith(b"aiodigest: 1 line without a usable key: skipped\n")
    shown = [re.sub(r"\d\d:\d\d", "TIME", line) for line in result.stdout.decode().splitlines()]
    first = ["web-1: 3 updates, TIME UTC", "  TIME  web-1: disk 93 % full × 2", "  TIME  web-1: up"]  # noqa: RUF001
    second = ["web-2: 1 update, TIME UTC", "  TIME  web-2: slow"]
    assert shown in (first + second, second + first)


def test_fields_say_what_is_shown_of_a_line_and_the_field_of_its_group_is_not_repeated(pipe: Pipe) -> None:
    given = ndjson([{"user": 7, "actor": {"login": "ann"}, "action": "push", "text": "hello"}])
    [_, line] = pipe("--group-by", "user", input=given).stdout.decode().splitlines()
    assert line.endswith("  hello · actor: login: ann, action: push") or "user" not in line
    [_, line] = pipe("--group-by", "user", "--fields", "actor.login,user", input=given).stdout.decode().splitlines()
    assert line.endswith("  ann · user: 7")


def test_collapse_says_which_lines_are_shown_once_and_ids_are_not_unless_it_is_asked_for(pipe: Pipe) -> None:
    given = ndjson(
        {"key": "k", "id": f"b-{number}", "text": text} for number, text in enumerate(("1 up", "2 up", "2 up"))
    )

    def shown(*options: str) -> list[str]:
        _, *lines = pipe("--group-by", "key", *options, input=given).stdout.decode().splitlines()
        return [re.sub(r"^ +[\d:]+  ", "", line) for line in lines]

    times = "\N{MULTIPLICATION SIGN}"
    assert shown("--fields", "text") == shown("--fields", "text", "--collapse", "similar") == [f"2 up {times} 3"]
    assert shown("--fields", "text", "--collapse", "equal") == ["1 up", f"2 up {times} 2"]
    assert shown("--fields", "text", "--collapse", "none") == ["1 up", "2 up", "2 up"]
    assert shown("--fields", "id") == ["b-0", "b-1", "b-2"]
    assert shown("--fields", "id", "--collapse", "similar") == [f"b-2 {times} 3"]
    assert pipe("--group-by", "key", "--json", "--collapse", "none").returncode == 2


async def leave(server: Server, namespace: str, records: int) -> None:
    async with DigestEngine(server.url, namespace=namespace, policy=Policy(initial_delay=1_800)) as engine:
        await engine.add_many(Entry("k", {"id": f"left{number}"}, f"left{number}") for number in range(records))


def test_what_an_earlier_run_has_left_takes_room(server: Server, namespace: str, pipe: Pipe) -> None:
    asyncio.run(leave(server, f"pipe-{namespace}", 900))
    result = pipe(*BY_KEY, input=ndjson(item(number) for number in range(1_500)))
    told = b"aiodigest: 900 lines left by an earlier run: printed with these\n"
    assert (result.returncode, result.stderr) == (0, told)
    assert len(set(ids(result.stdout))) == len(ids(result.stdout)) == 2_400


def test_a_pipe_prints_nothing_of_an_engine_of_its_namespace(server: Server, namespace: str, pipe: Pipe) -> None:
    asyncio.run(leave(server, namespace, 1))
    result = pipe(*BY_KEY, input=ndjson([item(1)]))
    assert ids(result.stdout) == ["k1"]
    with server.client() as client:
        assert client.llen(f"{{{namespace}}}:log:k") == 1


@pytest.mark.processes
def test_the_same_command_cannot_run_twice_and_another_one_keeps_to_its_own_records(tmp_path: Path) -> None:
    always = (*BY_KEY, "--hours", "00:00-24:00", "--tz", "Europe/Paris")
    with running(tmp_path, "pipe", *always) as first:
        first.feed(ndjson([item(1)]))
        assert ids(first.read_line()) == ["k1"]
        first.feed(ndjson([item(2)]))
        second = aiodigest(tmp_path, "pipe", *always, input=ndjson([item(3)]))
        other = aiodigest(tmp_path, "pipe", *always, "--namespace", "other", input=ndjson([item(4)]))
        assert first.end() == 0
    assert (second.returncode, second.stdout) == (1, b"")
    assert b"--namespace" in second.stderr
    assert ids(other.stdout) == ["k4"]
    assert ids(first.output) == ["k1", "k2"]


@pytest.mark.processes
def test_what_a_closed_reader_did_not_get_is_printed_by_the_next_run(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", *BY_KEY, read=False) as pipe:
        assert pipe.process.stdout is not None
        pipe.feed(ndjson([item(1)]))
        assert ids(pipe.process.stdout.readline()) == ["k1"]
        pipe.process.stdout.close()
        pipe.feed(ndjson([item(1, "other")]))
        assert pipe.process.wait(DEADLINE) == 1  # although its input goes on
        pipe.end()
    [told] = pipe.errors.splitlines()
    assert b"Broken pipe" in told
    again = aiodigest(tmp_path, "pipe", *BY_KEY)
    assert (again.returncode, ids(again.stdout)) == (0, ["other1"])


@pytest.mark.processes
def test_what_one_redirected_file_has_left_is_not_printed_with_another(tmp_path: Path) -> None:
    for key in "ab":
        (tmp_path / key).write_bytes(ndjson([item(1, key)]))

    def run(key: str, output: Path) -> bytes:
        command = [sys.executable, "-m", "aiodigest", "pipe", *BY_KEY]
        with (tmp_path / key).open("rb") as given, output.open("wb") as out:
            done = subprocess.run(
                command, stdin=given, stdout=out, stderr=subprocess.PIPE, env=environment(tmp_path), timeout=DEADLINE
            )
        return done.stderr

    assert b"No space left" in run("a", Path("/dev/full"))
    for key, told in ("b", b""), ("a", b"aiodigest: 1 line left by an earlier run: printed with these\n"):
        assert run(key, tmp_path / "out") == told
        assert set(ids((tmp_path / "out").read_bytes())) == {f"{key}1"}


def test_readable_text_shows_keys_and_fields_and_no_control_characters(pipe: Pipe) -> None:
    lines = ndjson([{"key": "a\x1b[2J", "text": "hi\x07\u202e", "more": {"x": 1}, "list": [1, 2]}])
    result = pipe("--group-by", "key", input=lines)
    text = result.stdout.decode()
    assert text.startswith("a\\x1b[2J: 1 update, ")
    assert re.search(r"\n  [:0-9]+  hi · list: 1, 2\n", text)
    assert "\x1b" not in text


@pytest.mark.processes
def test_a_second_ctrl_c_does_not_wait_for_a_reader_that_is_asleep(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", "--group-by", "key", *JSON_OUT, read=False) as pipe:
        assert pipe.process.stdout is not None
        pipe.feed(ndjson({"key": f"k{number}", "text": "x" * 50_000} for number in range(10)))
        assert pipe.process.stdout.read(1) == b"{"
        pipe.process.send_signal(signal.SIGINT)
        bit = 1 << (signal.SIGINT - 1)
        until(lambda: not int(status(pipe.process.pid)["ShdPnd"], 16) & bit, "it has the first: two are one, waiting")
        assert pipe.process.poll() is None
        assert pipe.interrupt() == 130
    assert b"Traceback" not in pipe.errors


@pytest.mark.processes
def test_what_was_taken_before_a_kill_is_printed_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", *GITHUB, read=False) as killed:
        stdin, stdout = killed.process.stdin, killed.process.stdout
        assert stdin is not None
        assert stdout is not None
        killed.feed(made_up_events())
        stdin.close()
        output = stdout.read(200_000)  # in the middle of what the end of the input has flushed
        killed.process.kill()
        output += stdout.read()
    again = aiodigest(tmp_path, "pipe", *GITHUB)
    given = {one["id"] for one in map(json.loads, made_up_events().splitlines())}
    assert set(ids(output)) < given
    assert set(ids(output) + ids(again.stdout)) == given
    assert again.returncode == 0
    # a line may follow on a digest that was under way
    assert re.match(rb"aiodigest: \d+ lines? left by an earlier run: printed with these\n", again.stderr)
