"""``aiodigest demo``, from its first line to its last, in virtual time; and how it ends, on its own server."""

from __future__ import annotations

import errno
import json
import re
import tempfile
from functools import partial
from pathlib import Path

import pytest
from commandline import Command, no_process_is_left, running
from engines import WatchedBackend, virtual_time
from rich.console import Console

from aiodigest.cli.demo import Demo, Event, show


@pytest.mark.processes
@pytest.mark.parametrize("way", ["ctrl-c", "closed"])
def test_a_demo_that_is_left_leaves_nothing(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(tmp_path / "unused", "demo", read=way == "ctrl-c") as demo:
        if way == "ctrl-c":
            while b"DIGEST" not in demo.read_line():
                pass
            assert demo.interrupt() == 130
        else:
            assert demo.process.stdout is not None
            demo.process.stdout.readline()
            demo.process.stdout.close()
            assert demo.end() == 1
    assert demo.errors == b""
    assert list(tmp_path.iterdir()) == []
    assert no_process_is_left(tmp_path)


@virtual_time
async def test_a_demo_shows_a_burst_as_one_digest_and_a_receiver_recover(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Demo("redis://localhost/0", partial(show, Console(highlight=False), False))
    demo._engine.backend = WatchedBackend()
    await demo.play()
    text, errors = capsys.readouterr()
    assert errors == ""
    assert re.search(r"event  #builds   build 4711 .*\n.*DIGEST #builds   1 event\n", text)
    assert re.search(r"DIGEST #on-call  \d\d events", text)
    assert text.count("FAILED #shop") == 2
    assert "DIGEST #shop" in text.partition("FAILED #shop")[2]
    numbers = re.search(
        r"records in +(\d+)\n +digests out +(\d+), with (\d+) records\n"
        r" +deliveries failed +2, and 1 digest delivered by a retry\n +lateness +median \d+ ms, worst \d+ ms\n",
        text,
    )
    assert numbers is not None
    added, digests, delivered = map(int, numbers.groups())
    assert added == delivered > 60
    assert digests < 12
    assert "\x1b" not in text


@pytest.mark.processes
def test_a_demo_that_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("aiodigest.cli.demo.story", lambda: [Event(0, "#builds", "build 1")])
    code, output, errors = command("demo")
    assert (code, errors) == (0, "")
    assert re.search(r"records in +1\n +digests out +1, with 1 record\n", output)
    assert list(tmp_path.iterdir()) == []
    assert no_process_is_left(tmp_path)


def test_a_demo_that_finds_no_place_says_so(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def fail(**options: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("aiodigest.cli.demo.TemporaryDirectory", fail)
    code, _, errors = command("demo", "--json")
    assert (code, errors) == (1, "aiodigest: No usable temporary directory found\n")


@pytest.mark.processes
def test_in_json_what_happens_is_an_object_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(tmp_path / "unused", "demo", "--json") as demo:
        told = [json.loads(demo.read_line()) for _ in range(3)]
        assert demo.interrupt() == 130
    assert [one["what"] for one in told] == ["remark", "event", "digest"]
    assert told[2]["channel"] == "#builds"
    assert told[2]["texts"] == [told[1]["text"]]
    assert 0 < told[1]["at"] <= told[2]["at"]


@pytest.mark.parametrize(("on_path", "named"), [(True, "aiodigest"), (False, "bin/aiodigest")])
def test_a_demo_ends_with_a_command_that_can_be_typed(
    on_path: bool, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "aiodigest"
    command.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if on_path else "")
    monkeypatch.setattr("sys.argv", ["bin/aiodigest", "demo"])
    names = "added digests delivered failed retried median_lateness worst_lateness"
    facts = dict.fromkeys(names.split(), 1)
    show(Console(highlight=False), False, 0.0, "summary", **facts)
    assert capsys.readouterr().out.endswith(f"Your own stream: {named} pipe --help\n")
