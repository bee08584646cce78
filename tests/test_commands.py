"""The parts of the command line that need no process: fields of lines, options, and standard output as a receiver."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path as File
from typing import Any

import pytest
import typer.main
from commandline import Command

from aiodigest import JSON, Digest, Record, RetryAfter
from aiodigest.cli import app
from aiodigest.cli.event_loop import run_service
from aiodigest.cli.options import Once, duration
from aiodigest.cli.output import JSONLines, PlainText, Unhurried, log_everything
from aiodigest.cli.pipe.command import lock_path, locked
from aiodigest.cli.pipe.parser import LONGEST_LINE, Malformed, Path, Shape, Template, expression_of, time_of
from aiodigest.cli.pipe.streams import Splitter, Writer, prepare
from aiodigest.cli.rendering import digest_json, digest_text, printable, without

TIMES = "\N{MULTIPLICATION SIGN}"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DIGEST: Digest[JSON] = Digest("k", [Record("r", {"text": "é\u2028"}, EPOCH)], "d")


@pytest.mark.parametrize(
    ("template", "key"),
    [
        ("repository", "octo/hello"), ("sender.login", "mona"), ("{event}:{repository}", "push:octo/hello"),
        ("{{{event}}}", "{push}"), ("commits.1.id", "2"), ("host.name", "web"), ("host.name.short", "w"),
        ("ratio", "0.5"), ("done", "true"),
    ],
)  # fmt: skip
def test_a_group_is_named_by_a_path_or_a_template(template: str, key: str) -> None:
    value: JSON = {
        "repository": "octo/hello", "event": "push", "sender": {"login": "mona"}, "commits": [{"id": 1}, {"id": 2}],
        "host.name": "web", "host": {"name.short": "w"}, "ratio": 0.5, "done": True,
    }  # fmt: skip
    assert Template.parse(template).fill(value) == key


@pytest.mark.parametrize("template", ["", "a..b", ".a", "{", "}", "{}", "{a!r}", "{a:>3}", "{{no field}}", "{a.}"])
def test_a_template_that_is_none_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"is not|names no"):
        Template.parse(template)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{}", "field key is missing or null"),
        (b'{"key": null}', "field key is missing or null"),
        (b'{"key": {}}', "field key is an object: it must be text, a number, true or false"),
        (b'{"key": []}', "field key is a list: it must be text, a number, true or false"),
        *((line, "") for line in (b"[]", b"3", b"{", b"\xff", b"{}{}", b'{"key": NaN}', b" " * (LONGEST_LINE + 1))),
        (b'{"key": "k", "n": ' + b"9" * 5000 + b"}", ""),
        (b'{"key":' + b"[" * 100_000, ""),
    ],
    ids=lambda given: given[:20],
)
def test_a_line_without_a_key_or_that_is_no_json_is_malformed(line: bytes, told: str) -> None:
    with pytest.raises(Malformed) as caught:
        Shape(Template.parse("key")).entry(line)
    assert told in str(caught.value)


def test_lines_without_ids_are_all_different_and_have_one_to_be_added_again_under() -> None:
    shape = Shape(Template.parse("key"))
    entries = [shape.entry(b'\xef\xbb\xbf{"key": "k"}\r')[0] for _ in range(2)]
    assert entries[0].record_id
    assert entries[0].record_id != entries[1].record_id
    assert entries[0].timestamp is None


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2024-01-02T03:04:05Z", datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2024-01-02T03:04:05+02:00", datetime(2024, 1, 2, 1, 4, 5, tzinfo=UTC)),
        ("2024-01-02 03:04:05.123456789", datetime(2024, 1, 2, 3, 4, 5, 123456, tzinfo=UTC)),
        ("2024-01-02", datetime(2024, 1, 2, tzinfo=UTC)),
        (1704164645, 1704164645),
        (1704164645.5, 1704164645.5),
        (None, None),
    ],
)
def test_times_are_iso_8601_or_seconds_and_naive_ones_are_utc(time: JSON, expected: datetime | float | None) -> None:
    assert time_of(Path("at.time"), {"at": {"time": time}}) == expected


@pytest.mark.parametrize("time", [1704164645, "1704164645", 1704164645000, "1704164645000000", 1704164645 * 10**9])
def test_epoch_times_may_be_text_and_of_smaller_units_as_journald_s_are(time: JSON) -> None:
    assert time_of(Path("time"), {"time": time}) == 1704164645


@pytest.mark.parametrize("time", ["", "yesterday", True, [], {}, "0001-01-01T00:00:00+14:00", "1e400", 1e30, "nan"])
def test_what_is_no_time_is_told_from_one(time: JSON) -> None:
    with pytest.raises(Malformed):
        time_of(Path("time"), {"time": time})


def test_lines_are_cut_and_numbered_whatever_the_chunks() -> None:
    splitter = Splitter("log")
    chunks = [b"on", b"e\ntwo\n", b"", b"\nfo", b"ur"]
    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.end()
    assert lines == [("log:1", b"one"), ("log:2", b"two"), ("log:3", b""), ("log:4", b"four")]


def test_a_line_that_never_ends_takes_bounded_memory() -> None:
    splitter = Splitter("log")
    for _ in range(20):
        assert splitter.feed(b"x" * 1_000_000) == []
    [long, short] = splitter.feed(b"\nshort\n")
    assert len(long.text) == LONGEST_LINE + 1
    assert short == ("log:2", b"short")


async def test_a_digest_is_written_in_one_call_before_it_counts_as_delivered() -> None:
    reader, writer = os.pipe()
    out = Writer(digest_json, writer)
    await out.deliver(DIGEST)
    line = os.read(reader, 100_000)
    assert line.isascii()
    records = [{"id": "r", "timestamp": "1970-01-01T00:00:00Z", "value": {"text": "é\u2028"}}]
    assert json.loads(line) == {"id": "d", "key": "k", "attempt": 1, "iteration": 1, "dropped": 0, "records": records}
    os.close(reader)
    with pytest.raises(RetryAfter):
        await out.deliver(DIGEST)
    assert out.failed.is_set()
    assert isinstance(out.error, BrokenPipeError)
    os.close(writer)
    with pytest.raises(RetryAfter):  # after a write that failed nothing is written
        await out.deliver(DIGEST)
    assert isinstance(out.error, BrokenPipeError)


@pytest.mark.parametrize(("before", "after"), [(b"", b""), (b"line\n", b"line\n"), (b'{"id":"hal', b'{"id":"hal\n')])
def test_half_a_line_that_a_kill_left_in_a_file_is_ended(before: bytes, after: bytes, tmp_path: File) -> None:
    path = tmp_path / "out"
    path.write_bytes(before)
    with path.open("ab") as file:
        prepare(file.fileno())
    assert path.read_bytes() == after


def test_durations_have_units_or_are_seconds() -> None:
    told = {"250ms": 0.25, "30s": 30, "5m": 300, "1h": 3600, "7d": 604_800, "1.5": 1.5, "0": 0}
    assert {text: duration(text) for text in told} == told


def test_the_lock_of_a_pipe_is_in_the_data_folder_by_namespace_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIODIGEST_DATA", "/data")
    assert lock_path("embedded:///some%20where", "pipe-a") == File("/some where/pipes/pipe-a.lock")
    assert lock_path("embedded://", "pipe-a") == File("/data/pipes/pipe-a.lock")
    one, other = lock_path("redis://one", "pipe-a"), lock_path("redis://other", "pipe-a")
    assert one.parent == other.parent == File("/data/pipes")
    assert one != other


def test_the_folders_of_the_lock_of_a_pipe_are_for_its_user_alone(tmp_path: File) -> None:
    umask = os.umask(0)
    try:
        with locked(tmp_path / "new" / "pipes" / "pipe-a.lock"):
            modes = {made.name: made.stat().st_mode & 0o777 for made in sorted(tmp_path.rglob("*"))}
    finally:
        os.umask(umask)
    assert modes == {"new": 0o700, "pipes": 0o700, "pipe-a.lock": 0o600}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["frob"], "No such command"), (["pipe"], "--group-by"), (["pipe", "--group-by", "{"], "is not a template"),
        (["pipe", "--group-by", "a", "--minimum-delay", "-5m"], "is not a duration"),
        (
            ["pipe", "--group-by", "a", "--minimum-delay", "2h", "--maximum-delay", "1h"],
            "--minimum-delay (2h) must not be above --maximum-delay (1h): give --maximum-delay 2h or more",
        ),
        (
            ["pipe", "--group-by", "a", "--quiet-delay", "1.5s", "--maximum-delay", "1s"],
            "--quiet-delay (1.5s) must not be above --maximum-delay (1s): give --maximum-delay 1.5s or more",
        ),
        (["pipe", "--group-by", "a", "--ttl", "60"], "--ttl must be longer than --maximum-delay (30m); it is 1m "),
        (
            ["pipe", "--group-by", "a", "--ttl", "2h", "--exec", "true"],
            "--ttl must be longer than the whole retry span (298563s); it is 2h ",
        ),
        (["pipe", "--group-by", "a", "--quiet-delay", "0"], "--quiet-delay must be 0.001s to 3650d, not 0s"),
        (
            ["pipe", "--group-by", "a", "--price", "5", "--at", "0 9 * * *"],
            "--price and --at exclude each other: give one of them",
        ),
        (
            ["pipe", "--group-by", "a", "--price", "5", "--initial-delay", "1"],
            "--initial-delay and --price exclude each other: give one of them",
        ),
        (["pipe", "--group-by", "a", "--at", "09:00"], "value for '--at': cron must have five fields"),
        (["pipe", "--group-by", "a", "--at", "0 9 30 2 *"], "value for '--at': cron must name a day that comes"),
        (["pipe", "--group-by", "a", "--hours", "8-20"], "value for '--hours': an opening must be a clock"),
        (["pipe", "--group-by", "a", "--hours", "08:00-20:00", "--days", "mo"], "value for '--days': days must"),
        (["pipe", "--group-by", "a", "--at", "0 9 * * *", "--tz", "Europe/Pris"], "(is it 'Europe/Paris'?)"),
        (["pipe", "--group-by", "a", "--json", "--tz", "Europe/Paris"], "--tz needs --at or --hours, or times"),
        (["pipe", "--group-by", "a", "--exec", "true", "--tz", "Europe/Paris"], "--tz needs --at or --hours, or times"),
        (["send", "--exec", "true", "--tz", "Europe/Paris"], "--tz needs times that people read"),
        (["pipe", "--group-by", "a", "--days", "mon"], "--days needs --hours"),
        (["pipe", "--group-by", "a", "--max-bytes", "0"], "--max-bytes"),
        (["pipe", "--lines", "--group-by", "web"], "value for '--group-by': 'web' has no group"),
        (["pipe", "--lines", "--group-by", "("], "value for '--group-by': '(' is not a regular expression"),
        (["pipe", "--lines", "--group-by", "(a)", "--id", "id"], "has no group (?P<id>...)"),
        (["pipe", "--lines", "--group-by", "(a)", "--fields", "id"], "--lines are plain text"),
        (["pipe", "--group-by", "a", "--json", "--fields", "id"], "--fields is for text"),
        (["pipe", "--group-by", "a", "--follow"], "needs a file"),
        (["pipe", "--group-by", "a", "/no/such/file"], "/no/such/file: No such file"),
        (["pipe", "--group-by", "a", "/"], "/: Is a directory"),
        (["pipe", "--group-by", "a", "--capacity", "10", "--max-size", "11"],
         "--max-size (11) must not be above --capacity (10): give --capacity 11 or more"),
        (["pipe", "--group-by", "a", "--max-size", "0"], "--max-size"), (["run"], "MODULE:ENGINE"),
        *((["bench", "--seconds", seconds], "--seconds") for seconds in ("0", "601", "long")),
        (["stats"], "--namespace"), (["stats", "--namespace", "not a name"], "namespace"),
        (["top", "--namespace", "n", "--interval", "10ms"], "at least 100ms"),
        (["top", "--namespace", "n", "--interval", "soon"], "is not a duration"),
        (["top", "--namespace", "n", "--count", "0"], "--count"),
        *(
            (["dead", action, "--namespace", "n", *chosen], "give the ID of a dead letter, or --all")
            for action in ("replay", "discard") for chosen in ((), ("some-id", "--all"))
        ),
        (["timelines", "--namespace", "n", "--state", "late"], "is not a state"),
        (["stats", "--namespace", "n", "--shards", "2"], "No such option: --shards"),
        (["stats", "--namespace", "n", "--url", "http://example.org"], "http://example.org"),
        (["stats", "--namespace", "n", "--url", "localhost:6379"], "embedded:///folder"),
        (["run", "no_such_module:engine"], "'no_such_module' cannot be imported: ModuleNotFoundError"),
        (["run", "nothing"], "is not MODULE:ENGINE"), (["run", "json:nothing"], "no attribute 'nothing'"),
        (["run", "json:__name__"], "is a str"),
    ],
)  # fmt: skip
def test_a_usage_error_is_one_line_and_exit_2(
    arguments: list[str], told: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: File
) -> None:
    monkeypatch.setenv("AIODIGEST_DATA", str(tmp_path))
    monkeypatch.delenv("AIODIGEST_NAMESPACE", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, output, errors = command(*arguments)
    assert (code, output) == (2, "")
    [line] = errors.splitlines()
    assert line.startswith("aiodigest: ")
    assert told in line


def test_no_help_is_cut_or_wider_than_a_small_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root: Any = typer.main.get_command(app.app)
    commands = [[name] for name in root.commands] + [["dead", name] for name in root.commands["dead"].commands]
    for asked in ([], ["dead"], ["--help"], ["run", "-h"], *([*names, "--help"] for names in commands)):
        code, output, _ = command(*asked)
        assert code == 0
        assert "Usage: aiodigest" in output
        for line in output.splitlines():
            assert len(line) <= 80, line
            assert not line.endswith(("...", "…")) or line.startswith("Usage: "), line


def test_the_help_of_pipe_says_what_surprises(command: Command) -> None:
    told = " ".join(command("pipe", "--help")[1].split())
    for words in (
        "after another run of the same command, once --minimum-delay",
        "[default: 500; none with --capacity]",
        "'pipe-' is put before it",
        "holds what was there",
        "DURATION is 250ms, 30s, 5m, 1h, 7d, or plain seconds.",
    ):
        assert words in told


def test_a_digest_for_people_has_a_line_of_100_columns_for_each_record_or_for_several_that_are_alike() -> None:
    when = "1 Jan 1970 00:00"
    assert digest_text(DIGEST).decode() == f"k: 1 update, {when} UTC\n  {when}  é\n"
    assert digest_text(DIGEST, tz="Asia/Tokyo").decode().partition("\n")[0].endswith(" Asia/Tokyo")
    texts = [*(f"login {number} failed" for number in range(12)), "words " * 40, "disk full"]
    values: list[JSON] = [{"text": text, "host": f"web{'x' * 80}", "level": 3} for text in texts]
    many = Digest("k", [Record(str(number), value, EPOCH) for number, value in enumerate(values)], "d", dropped=2)
    head, *lines = digest_text(many).decode().splitlines()
    assert head == f"k: 14 updates, {when} UTC (2 older ones dropped)"
    shown = [f"login 11 failed {TIMES} 12 · host: web", "words " * 9, "disk full · host: web"]
    for line, begins in zip(lines, shown, strict=True):
        assert line.startswith(f"  {when}  {begins}")
    assert max(map(len, [head, *lines])) == 100
    chosen = digest_text(many, fields=["level", "text"]).decode().splitlines()
    assert chosen[-1] == f"  {when}  3 · text: disk full"


def test_the_fields_of_a_group_are_taken_out_wherever_they_are() -> None:
    value: JSON = {"repo": {"name": "web", "id": 1}, "event": "push", "user": {"login": "ann"}, "more": {}}
    paths = Template.parse("{event}:{repo.name}:{user.login}:{gone.far}").paths
    digest = without(Digest("k", [Record("1", value, EPOCH), Record("2", "text", EPOCH)], "d"), paths)
    assert [record.value for record in digest.records] == [{"repo": {"id": 1}, "more": {}}, "text"]


@pytest.mark.parametrize(
    ("expression", "line", "key"),
    [
        (r"^(\w+):", b"web: disk full", "web"),
        (r"(\d+) (?P<key>\w+)", b"12 api", "api"),
        (r"(\d+) (?P<n>\w+)", b"12 api", "12"),
        (r"(x)?web|(api)", b"api", None),
        (r"^(\w+):", b"no", None),
        (r"(\S+)$", b"caf\xe9\r", "caf\\xe9"),
    ],
)
def test_a_line_of_text_is_grouped_by_a_group_of_an_expression(expression: str, line: bytes, key: str | None) -> None:
    shape = Shape.of_text(expression_of(expression), None, None)
    if key is None:
        with pytest.raises(Malformed, match="the expression of --group-by does not match"):
            shape.entry(line)
    else:
        entry, _ = shape.entry(line)
        assert (entry.key, entry.value) == (key, line.decode(errors="backslashreplace").rstrip())


def test_groups_of_an_expression_are_ids_and_times_of_lines() -> None:
    expression = expression_of(r"(?P<time>\S+) (?P<key>\w+) (?P<id>\d+)")
    entry, no_time = Shape.of_text(expression, Template.parse("id"), Path("time")).entry(b"2024-01-02T03:04:05Z web 7")
    assert (entry.key, entry.record_id, no_time) == ("web", "7", None)
    assert entry.timestamp == datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC)
    with pytest.raises(ValueError, match=r"has no group \(\?P<host>"):
        Shape.of_text(expression, Template.parse("host"), None)


def test_text_from_strangers_is_one_line_that_no_terminal_obeys() -> None:
    assert printable("plain näh 漢字") == "plain näh 漢字"
    written = "नमस्\u200dते 👩\u200d🚀 全角\u3000空白 co\xadop \u200c"  # joiners, a wide space and a soft hyphen
    assert printable(written) == written
    assert printable("\x1b[2J\r\n\u202e\x9b\udc80") == "\\x1b[2J\\r\\n\\u202e\\x9b\\udc80"


def test_a_service_runs_on_uvloop_if_it_is_installed_and_else_on_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loop() -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert run_service(loop()) == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert run_service(loop()) == "asyncio"


def logged(message: str, *arguments: object, error: BaseException | None = None, **fields: object) -> dict[str, Any]:
    """What a line of the log is as JSON."""
    reason = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("shop.mail", logging.WARNING, "mail.py", 1, message, arguments, reason)
    vars(record).update(created=0.25, **fields)
    line = JSONLines().format(record)
    assert line.isascii()
    assert "\n" not in line
    return json.loads(line)


def test_a_line_of_the_log_is_an_object_with_the_fields_that_it_was_given() -> None:
    given: dict[str, Any] = {"timeline": "user:1\n", "attempt": 3, "reason": "503"}
    every = {"time": "1970-01-01T00:00:00.250000Z", "level": "warning", "logger": "shop.mail"}
    assert logged("attempt %d failed", 3, **given) == {**every, "message": "attempt 3 failed", **given}
    try:
        raise ConnectionError("no route\n")
    except ConnectionError as raised:
        told = logged("failed", error=raised)
    assert told["error"] == "ConnectionError: no route\n"
    assert told["traceback"].startswith("Traceback (most recent call last):\n")
    assert "test_commands.py" in told["traceback"]


def test_no_field_breaks_a_line_or_hides_what_each_line_has() -> None:
    odd: list[Any] = []
    odd.append(odd)
    told = logged("m", level="mine", time=1, nan=float("nan"), odd=odd, key={(1, 2): 3}, thing=EPOCH, text="\udc80")
    assert (told["level"], told["time"]) == ("warning", "1970-01-01T00:00:00.250000Z")
    assert (told["nan"], told["odd"], told["key"]) == ("nan", "[[...]]", "{(1, 2): 3}")
    assert told["thing"].startswith("datetime.datetime(1970")
    assert told["text"] == "\udc80"


def test_no_line_of_the_log_for_people_begins_with_what_was_planted() -> None:
    planted = "hello\n2026-01-01 ERROR all is lost\x1b[2J"
    try:
        raise ConnectionError(planted)
    except ConnectionError as raised:
        reason = type(raised), raised, raised.__traceback__
    record = logging.LogRecord("shop.mail", logging.WARNING, "mail.py", 1, "failed: %s", (planted,), reason)
    head, *below = PlainText("%(levelname)s: %(message)s").format(record).split("\n")
    assert head == "WARNING: failed: hello\\n2026-01-01 ERROR all is lost\\x1b[2J"
    assert below
    assert all(line.startswith("  ") and line.isprintable() for line in below)


def test_all_that_a_process_logs_is_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(logging.Logger, "root", logging.root)
    monkeypatch.setattr(logging.Logger, "manager", logging.Manager(logging.root))
    log_everything(in_json=True)
    logging.getLogger("theirs").info("hello", extra={"user": 1})
    [line] = capfd.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["level"], told["logger"], told["message"], told["user"]) == ("info", "theirs", "hello", 1)


def test_messages_that_nobody_reads_are_left_out_and_counted() -> None:
    reading, writing = os.pipe()
    errors = Unhurried(writing)
    text = b"x" * 999_999 + b"\n"
    for _ in range(5):
        errors.put(text)
    assert errors.is_behind
    found = bytearray()

    def read() -> None:
        while chunk := os.read(reading, 1_000_000):
            found.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    errors.finish()
    os.close(writing)
    reader.join()
    os.close(reading)
    kept, told = found.split(b"aiodigest: ")
    assert kept == text
    assert told == b"4 messages left out: nobody read them\n"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["send", "--deliver", "smtp://localhost?to=a@x.org", "--deliver", "smtp://localhost?to=b@x.org"], "--deliver"),
        (["send", "--exec", "true", "--exec=false"], "--exec"),
        (["pipe", "--group-by", "a", "--subject", "a", "--deliver", "x", "--subject", "b"], "--subject"),
        (["pipe", "--group-by", "a", "-o", "json", "--output", "text"], "--output"),
        (["dead", "list", "--namespace", "a", "--namespace", "b"], "--namespace"),
    ],
)
def test_an_option_with_a_value_is_given_once(arguments: list[str], option: str, command: Command) -> None:
    code, output, errors = command(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"aiodigest: {option} is given twice (see ")


def test_every_command_refuses_an_option_that_is_given_twice() -> None:
    apps = [app.app, *(group.typer_instance for group in app.app.registered_groups if group.typer_instance)]
    commands = [each for one in apps for each in one.registered_commands]
    assert {each.cls for each in commands} == {Once}


def test_a_flag_may_be_given_twice_and_so_may_a_list(command: Command) -> None:
    assert command("send", "--exec", "true", "--json", "--json")[0] == 0
