"""The command line beside ``pipe``: a look at a store, services, errors and exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import DEADLINE, Command, attempt, environment, no_process_is_left, running

from aiodigest import DigestEngine, Entry, Policy, Reject, RetryPolicy, __version__
from aiodigest.cli import output as cli_output

HOSTILE = "\x1b[31mred\x07\r\nnext\u202e[bold]"
ESCAPED = "\\x1b[31mred\\x07\\r\\nnext\\u202e[bold]"


class RawCodec:
    """Values that are no JSON."""

    def encode(self, value: bytes, /) -> bytes:
        return value

    def decode(self, data: bytes, /) -> bytes:
        return data


@pytest.fixture
def command(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, on a server in a folder of its own."""
    monkeypatch.setenv("AIODIGEST_DATA", str(tmp_path))
    monkeypatch.setenv("AIODIGEST_NAMESPACE", "mail")
    return command


async def fill(data: Path) -> None:
    """One timeline that waits, under a name that plays with terminals; the second of its values is no JSON."""
    settings: dict[str, Any] = {"namespace": "mail", "policy": Policy(initial_delay=600)}
    async with DigestEngine(f"embedded://{data}", **settings) as engine:
        await engine.add(HOSTILE, {"text": HOSTILE}, record_id=HOSTILE, timestamp=0)
    async with DigestEngine(f"embedded://{data}", value_type=bytes, codec=RawCodec(), **settings) as raw:
        await raw.add(HOSTILE, b"\x00\x1b", record_id="raw", timestamp=1)


async def bury(data: Path, reason: str = "no such address", key: str = "user:1") -> None:
    await attempt(f"embedded://{data}", Entry(key, {"text": "hello"}, "one", 0), error=Reject(reason))


@pytest.mark.thorough
def test_a_timeline_with_a_hostile_name_is_listed_shown_flushed_and_deleted(tmp_path: Path, command: Command) -> None:
    asyncio.run(fill(tmp_path))
    code, listed, _ = command("timelines")
    assert (code, ESCAPED in listed) == (0, True)
    code, shown, _ = command("show", HOSTILE)
    assert code == 0
    assert f"{ESCAPED}: waiting" in shown
    assert f"text={ESCAPED}" in shown
    assert "raw: b'\\x00\\x1b'" in shown
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(listed + shown)

    timeline = json.loads(command("show", HOSTILE, "--json")[1])
    assert (timeline["key"], timeline["state"], timeline["size"]) == (HOSTILE, "waiting", 2)
    assert {"id": HOSTILE, "timestamp": "1970-01-01T00:00:00Z", "value": {"text": HOSTILE}} in timeline["records"]
    assert [record["raw"] for record in timeline["records"] if record["id"] == "raw"] == ["ABs="]

    assert command("flush", HOSTILE)[:2] == (0, f"{ESCAPED} is due now\n")
    assert json.loads(command("timelines", "--state", "ready", "--json")[1])["key"] == HOSTILE
    assert command("delete", HOSTILE)[:2] == (0, f"{ESCAPED} is deleted\n")
    code, shown, error = command("show", HOSTILE)
    assert (code, shown, "holds no records" in error) == (1, "", True)
    assert no_process_is_left(tmp_path)


@pytest.mark.thorough
def test_a_timeline_is_muted_shown_listed_and_unmuted(tmp_path: Path, command: Command) -> None:
    assert command("mute", "ann", "--drop")[:2] == (0, "ann is muted until it is unmuted\n")
    shown = command("show", "ann")[1]
    assert "ann: muted, due never, 0 records, muted until it is unmuted, what is added is dropped" in shown
    code, listed, _ = command("timelines", "--state", "muted")
    assert (code, "never" in listed) == (0, True)
    assert command("mute", "ann", "--until", "2999-01-31T09:00+01:00")[1] == (
        "ann is muted until 2999-01-31 08:00:00 UTC\n"
    )
    assert command("mute", "ann", "--for", "1h")[0] == 0
    code, _, error = command("flush", "ann")
    assert (code, "'ann' is muted until" in error, "aiodigest unmute" in error) == (1, True, True)
    code, _, error = command("flush", "bob")
    assert (code, error) == (1, "aiodigest: timeline 'bob' holds no records\n")
    for given in (["--until", "2030-01-31"], ["--for", "soon"], ["--for", "1h", "--until", "2999-01-31T09:00Z"]):
        code, _, error = command("mute", "ann", *given)
        assert (code, error.count("\n"), "see aiodigest mute --help" in error) == (2, 1, True), error
    assert command("unmute", "ann")[:2] == (0, "ann is not muted any more\n")
    assert command("unmute", "ann")[0] == 1
    code, told, error = command("mute", "ann", "--until", "2020-01-31T09:00Z", "--json")
    assert (code, json.loads(told)["muted"], error) == (0, False, "")
    assert command("mute", "ann", "--for", "0") == (0, "ann is not muted: that time has passed\n", "")


def test_an_add_that_a_mute_drops_says_so(command: Command) -> None:
    command("mute", "ann", "--drop")
    assert command("add", "ann", "1")[:2] == (0, "the record is dropped: ann is muted\n")
    told = json.loads(command("add", "ann", "1", "--json")[1])
    assert told == {"key": "ann", "ready": False, "dropped": True}


def test_explain_says_that_a_namespace_is_empty(command: Command) -> None:
    code, told, error = command("explain", "ann")
    assert (code, told, "is empty" in error) == (0, "ann: holds no records\n", True)
    command("add", "ann", "1")
    assert "is empty" not in command("explain", "bob")[2]


def test_explain_says_that_its_times_are_utc(command: Command) -> None:
    command("add", "ann", "1")
    assert command("explain", "ann")[1].endswith(" (UTC)\n")


@pytest.mark.thorough
def test_dead_letters_are_listed_shown_replayed_and_discarded(tmp_path: Path, command: Command) -> None:
    asyncio.run(bury(tmp_path))
    letter = json.loads(command("dead", "list", "--json")[1])
    assert (letter["key"], letter["reason"], letter["size"]) == ("user:1", "no such address", 1)
    assert "no such address" in command("dead", "list")[1]
    assert "text=hello" in command("dead", "show", letter["id"])[1]
    shown = json.loads(command("dead", "show", letter["id"], "--json")[1])
    assert [record["value"] for record in shown["records"]] == [{"text": "hello"}]
    told = "1 record put back into user:1, which waits\n"
    assert command("dead", "replay", letter["id"][:1])[:2] == (0, told)
    assert '"dead":0' in command("stats", "--json")[1]
    assert "has no dead letters" in command("dead", "list")[2]

    asyncio.run(bury(tmp_path, key="user:2"))
    letter = json.loads(command("dead", "list", "--json")[1])
    assert command("dead", "discard", letter["id"])[:2] == (0, f"{letter['id']} is discarded\n")
    counted = [" ".join(line.split()) for line in command("stats")[1].splitlines()]
    assert {"waiting 1 timeline", "dead 0 dead letters", "buried 2 records", "overdue 0.0 s"} <= {*counted}
    for action in ("show", "replay", "discard"):
        code, _, error = command("dead", action, letter["id"])
        assert code == 1
        assert "there is no dead letter" in error
        assert "aiodigest dead list --namespace mail" in error


def test_the_id_and_time_of_a_dead_letter_are_whole_where_its_reason_is_cut(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(bury(tmp_path, "no such address, " * 10))
    monkeypatch.setattr(cli_output, "PIPE_WIDTH", 40)
    letter = json.loads(command("dead", "list", "--json")[1])
    [head, reason] = command("dead", "list")[1].splitlines()
    assert head.startswith(f"{letter['id']}  {letter['buried_at'][:10]} ")
    assert head.endswith(" UTC  1 record")
    assert reason.startswith("  user:1: no such address, ")
    assert len(reason) == 40


def test_the_beginning_of_an_id_must_mean_one_dead_letter(tmp_path: Path, command: Command) -> None:
    async def bury_two() -> None:
        async with DigestEngine(f"embedded://{tmp_path}", namespace="mail", value_type=bytes, codec=RawCodec()) as raw:
            await raw.add_many([Entry("user:1", b"{", "one"), Entry("user:1", b"\xff", "two")])
        await attempt(f"embedded://{tmp_path}", Entry("user:1", 1))

    def listed() -> list[str]:
        return [json.loads(line)["id"] for line in command("dead", "list", "--json")[1].splitlines()]

    asyncio.run(bury_two())
    one, two = listed()
    assert one[:-1] == two[:-1]
    code, _, error = command("dead", "discard", one[:-1])
    assert code == 1
    assert f"2 dead letters begin with '{one[:-1]}'" in error
    assert command("dead", "discard", one)[0] == 0
    assert listed() == [two]


def test_a_timeline_that_waits_for_a_retry_is_shown_with_its_error(tmp_path: Path, command: Command) -> None:
    retry, error = RetryPolicy(backoff=lambda _: 60.0), ConnectionError("503")
    asyncio.run(attempt(f"embedded://{tmp_path}", Entry("user:1", 1), error=error, retry=retry))
    shown = command("show", "user:1")[1]
    assert "1 record, attempt 1 was made, last error: ConnectionError: 503\n" in shown


def test_a_namespace_that_holds_nothing_is_told(command: Command) -> None:
    code, counted, error = command("stats", "--namespace", "mial")
    assert (code, error) == (0, "aiodigest: namespace 'mial' on embedded:// is empty\n")
    assert "waiting" in counted
    for options, told in (("--json",), ""), ((), ""), (("--state", "ready"), "ready "):
        code, listed, error = command("timelines", "--namespace", "mial", *options)
        assert (code, listed) == (0, "")
        assert error == f"aiodigest: namespace 'mial' on embedded:// has no {told}timelines\n"


def test_on_a_terminal_delete_asks_first(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill(tmp_path))
    terminal = io.StringIO("n\ny\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    code, _, error = command("delete", HOSTILE)
    assert code == 1
    assert f"Delete timeline {ESCAPED} of mail" in error
    assert "\x1b" not in error
    assert command("delete", HOSTILE)[0] == 0


@pytest.mark.parametrize("line", ["pipe --group-by key", "reshard --to 4", "stats", "doctor", "top", "bench"])
def test_an_unreachable_server_is_one_line_and_exit_69(line: str, command: Command) -> None:
    code, output, error = command(*line.split(), "--url", "redis://user:secret@127.0.0.1:1/0")
    assert (code, output) == (69, "")
    assert len(error.splitlines()) == 1
    assert "127.0.0.1:1" in error
    assert "secret" not in error


OUTPUTS = {
    ">&-": "standard output is closed",
    ">/dev/full": "standard output cannot be written: [Errno 28] No space left on device",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ("stats", ">&-"), ("top", ">&-"), ("stats", ">/dev/full"), ("doctor --json", ">/dev/full"),
        ("top", ">/dev/full"), ("--help", ">/dev/full"), ("demo --json", ">/dev/full"),
    ],
)  # fmt: skip
def test_an_answer_that_nobody_can_read_is_one_line_and_exit_1(arguments: str, output: str, tmp_path: Path) -> None:
    settings = {**environment(tmp_path), "AIODIGEST_NAMESPACE": "mail"}
    shell = f'exec "{sys.executable}" -m aiodigest {arguments} {output}'
    done = subprocess.run(["sh", "-c", shell], env=settings, capture_output=True, timeout=DEADLINE, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().endswith(f"aiodigest: {OUTPUTS[output]}\n")
    assert b"Traceback" not in done.stderr


@pytest.mark.processes
def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    options = "--namespace", "mail", "--json", "--count", "9", "--interval", "0.1"
    with running(tmp_path, "top", *options, read=False) as top:
        assert top.process.stdout is not None
        assert top.process.stdout.readline()
        top.process.stdout.close()
        assert (top.end(), top.errors) == (1, b"")


@pytest.mark.thorough
def test_a_value_is_added_as_json_or_as_text_and_told_to_be_due_or_to_wait(tmp_path: Path, command: Command) -> None:
    asyncio.run(attempt(f"embedded://{tmp_path}", Entry("user:1", 1)))  # so that it waits
    given = ('{"a": [1]}', {"a": [1]}), ("plain", "plain"), ("NaN", "NaN")
    for number, (value, _) in enumerate(given):
        assert command("add", "user:1", value, "--id", str(number)) == (0, "user:1 waits\n", "")
    assert command("add", "user:1", "[1]", "--text", "--json") == (
        0,
        '{"key":"user:1","ready":false,"dropped":false}\n',
        "",
    )
    held = json.loads(command("show", "user:1", "--json")[1])["records"]
    assert sorted(map(str, (record["value"] for record in held))) == sorted(map(str, ["[1]", *dict(given).values()]))
    assert [record["id"] for record in held][:3] == ["0", "1", "2"]
    assert [command("add", "user:2", "1")[1] for _ in range(2)] == ["user:2 is due now\n"] * 2
    assert command("add", "user:1", "2", "--urgent") == (0, "user:1 is due now\n", "")


def test_the_namespaces_of_a_server_are_listed(tmp_path: Path, command: Command) -> None:
    assert command("namespaces")[:2] == (0, "")
    for name, shards in ("shop.b", 1), ("a", 4):

        async def begin(name: str = name, shards: int = shards) -> None:
            async with DigestEngine(f"embedded://{tmp_path}", namespace=name, shards=shards) as engine:
                await engine.add_many(Entry(f"k{number}", 1) for number in range(20))

        asyncio.run(begin())
    assert command("namespaces") == (0, "a\nshop.b\n", "")
    assert command("namespaces", "--json") == (0, '{"namespace":"a"}\n{"namespace":"shop.b"}\n', "")


def test_the_version_is_printed(command: Command) -> None:
    assert command("--version") == (0, f"aiodigest {__version__}\n", "")


@pytest.mark.processes
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(missing: str, tmp_path: Path) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; import aiodigest.__main__ as m; m.main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(tmp_path), capture_output=True, timeout=DEADLINE, check=False
    )
    told = b"aiodigest: the command line is not installed: pip install 'aiodigest[standard]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, b"", told)
