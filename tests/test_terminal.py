"""What commands show on a terminal alone: bars and colours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import aiodigest, attempt, digests, ndjson
from servers import Server, running_server
from terminals import COLOUR, on_terminal, plain

from aiodigest import DigestEngine, Entry, Reject

pytestmark = pytest.mark.processes

EVENTS = ndjson({"key": "k", "n": n} for n in range(3))


@pytest.fixture(scope="module")
def place() -> Iterator[Server]:
    """A server with a namespace ``mail`` that has a dead letter and a timeline that is due."""

    async def fill(url: str) -> None:
        await attempt(url, Entry("buried", 1), error=Reject("no such address"))
        async with DigestEngine(url, namespace="mail") as engine:
            await engine.add("due", 1)

    with running_server() as server:
        asyncio.run(fill(server.url))
        yield server


def test_a_pipe_of_a_file_shows_how_much_it_has_read_and_what_is_wrong_above_it(tmp_path: Path) -> None:
    file = tmp_path / "events.ndjson"
    file.write_bytes(EVENTS + b"no json\n")
    arguments = "pipe", "--group-by", "key", "--json", str(file)
    with on_terminal(tmp_path, *arguments, streams=["stdin", "stderr"], output="out") as pipe:
        assert pipe.end() == (0, b"")
    output = (tmp_path / "out").read_bytes()
    assert [len(digest["records"]) for digest in digests(output)] == [3]
    assert b"\x1b" not in output
    shown = plain(pipe.shown)
    assert b"reading \xe2\x94" in shown
    assert f"{len(EVENTS) + 8} bytes".encode() in shown
    assert b"events.ndjson:4: " in shown
    assert pipe.shown.rindex(b"\x1b[?25h") > pipe.shown.rindex(b"\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize(
    "streams",
    [["stdin", "stdout", "stderr"], ["stdin"], ["stdin", "stderr"]],
    ids=["printed there", "no terminal", "read by another program, which may print it there"],
)
def test_there_is_no_bar_among_digests_and_none_in_a_log(streams: list[str], tmp_path: Path) -> None:
    file = tmp_path / "events.ndjson"
    file.write_bytes(EVENTS)
    with on_terminal(tmp_path, "pipe", "--group-by", "key", str(file), streams=streams) as pipe:
        errors = pipe.process.stderr.read() if pipe.process.stderr is not None else b""
        assert pipe.end()[0] == 0
    assert b"reading" not in plain(pipe.shown) + errors


def test_standard_input_has_no_end_that_a_bar_could_show(tmp_path: Path) -> None:
    with on_terminal(tmp_path, "pipe", "--group-by", "key", "--json", streams=["stderr"]) as pipe:
        assert pipe.process.stdin is not None
        with pipe.process.stdin as stdin:
            stdin.write(EVENTS)
        assert pipe.end()[0] == 0
    assert pipe.shown == b""


@pytest.mark.parametrize("name", ["pipe", "top", "timelines", "dead list"])
def test_colours_are_for_terminals_and_for_those_who_want_them(name: str, place: Server, tmp_path: Path) -> None:
    (tmp_path / "events.ndjson").write_bytes(EVENTS)
    arguments = [*name.split(), "--url", place.url, "--namespace", "mail"]
    arguments += {"pipe": ["--group-by", "key", "events.ndjson"], "top": ["--count", "1"]}.get(name, [])
    with on_terminal(tmp_path, *arguments, NO_COLOR="1") as unwanted:
        assert unwanted.end()[0] == 0
    assert len(plain(unwanted.shown)) > 20
    assert not COLOUR.search(unwanted.shown)
    piped = aiodigest(tmp_path, *arguments, cwd=tmp_path, TERM="xterm-256color")
    assert (piped.returncode, bool(piped.stdout), b"\x1b" in piped.stdout + piped.stderr) == (0, True, False)
    if name in ("pipe", "top"):  # the others have headings in bold
        with on_terminal(tmp_path, *arguments) as wanted:
            assert wanted.end()[0] == 0
        assert COLOUR.search(wanted.shown)


def test_a_demo_is_in_colours_unless_they_are_unwanted(tmp_path: Path) -> None:
    for unwanted in ("", "1"):
        with on_terminal(tmp_path, "demo", NO_COLOR=unwanted) as demo:
            demo.until("DIGEST")
            demo.type(b"\x03")
            assert demo.end()[0] == 130
        assert bool(COLOUR.search(demo.shown)) != bool(unwanted)
