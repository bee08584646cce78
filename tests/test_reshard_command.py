"""``aiodigest reshard`` and ``aiodigest run --shards`` on the command line."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from zlib import crc32

import pytest
from commandline import DEADLINE, Command, manage, running
from replicas import until
from servers import Server
from terminals import on_terminal

from aiodigest import DigestEngine, Entry, Policy
from aiodigest.backends.redis.connections.url import hide_password
from aiodigest.cli.options import Location
from aiodigest.cli.reshard import Progress, _watch
from aiodigest.cli.run.command import shard_numbers

OPTIONS = "--namespace", "mail"


@pytest.fixture
def place(own: Server) -> Server:
    """A server of the test's own, with one timeline that waits for long in the namespace ``mail``."""
    manage(own, lambda engine: engine.add("slow", 1))
    return own


def ended(place: Server, number: str) -> str:
    """What is said at the end."""
    return f"namespace 'mail' on {hide_password(place.url)} has {number}\n"


def test_an_empty_namespace_has_its_new_number_at_once(place: Server, command: Command) -> None:
    manage(place, lambda engine: engine.delete("slow"))
    code, output, _ = command("reshard", "--to", "16", *OPTIONS, "--url", place.url)
    assert (code, output) == (0, ended(place, "16 shards"))
    code, output, _ = command("reshard", "--to", "1", *OPTIONS, "--url", place.url, "--json")
    assert (code, output) == (0, '{"shards":1,"waiting":0,"ready":0,"leased":0,"dead":0,"mutes":0,"done":true}\n')


@pytest.mark.thorough
def test_the_command_waits_for_replicas_where_it_is_told_to(place: Server, command: Command) -> None:
    manage(place, lambda engine: engine.delete("slow"))
    options = *OPTIONS, "--url", place.url, "--timeout", "3s"
    code, _, errors = command("reshard", "--to", "4", "--wait-replicas", "1", *options)
    assert code == 69
    assert "0 replicas of " in errors or "no answer in time" in errors  # where the machine is busy


def test_a_name_that_was_never_used_is_refused(place: Server, command: Command) -> None:
    told = command("reshard", "--to", "4", "--namespace", "mial", "--url", place.url)
    where = f"namespace 'mial' on {hide_password(place.url)}"
    assert told == (1, "", f"aiodigest: there is no {where}: is its name right?\n")
    assert not place.client().exists("{mial}:layout")
    assert command("reshard", "--to", "1", *OPTIONS, "--url", place.url) == (0, ended(place, "1 shard"), "")


@pytest.mark.parametrize(("delay", "asks"), [(0.001, True), (1_500, False)])
def test_what_is_due_and_does_not_go_is_asked_about_once(
    place: Server, delay: float, asks: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aiodigest.cli.reshard.STILL", 0)
    monkeypatch.setattr("aiodigest.engine.PACE", 0.001)
    progress = Progress("mail", 4)

    async def watch() -> None:
        async with DigestEngine(place.url, namespace="mail", policy=Policy(initial_delay=delay)) as engine:
            await engine.delete("slow")
            await engine.add("k", 1)
            location = Location(place.url, "mail", 5.0)
            watching = asyncio.create_task(_watch(location, 4, progress, in_json=False))
            await until(lambda: progress._unchanged > 20)
            await engine.delete("k")
            async with asyncio.timeout(DEADLINE):
                await watching

    asyncio.run(watch())
    assert capfd.readouterr().err.count("does a worker (aiodigest run) serve the namespace?") == int(asks)


@pytest.mark.processes
def test_what_is_left_is_a_line_for_each_change_where_there_is_no_terminal(place: Server, tmp_path: Path) -> None:
    with running(tmp_path, "reshard", "--to", "4", *OPTIONS, "--url", place.url) as process:
        begins = b"aiodigest: namespace 'mail' is moving to 4 shards: in the old ones "
        assert process.error_line() == begins + b"1 waiting, 0 ready, 0 leased, 0 dead letters\n"
        manage(place, lambda engine: engine.flush("slow"))
        assert process.error_line() == begins + b"0 waiting, 1 ready, 0 leased, 0 dead letters\n"
        manage(place, lambda engine: engine.delete("slow"))
        assert process.end() == 0
        assert process.output == ended(place, "4 shards").encode()
        assert process.errors.count(b"\n") == 2


@pytest.mark.processes
def test_in_json_each_look_is_an_object_a_line_and_nothing_else_is_said(place: Server, tmp_path: Path) -> None:
    with running(tmp_path, "reshard", "--to", "4", *OPTIONS, "--url", place.url, "--json") as process:
        look = {"shards": 4, "waiting": 1, "ready": 0, "leased": 0, "dead": 0, "mutes": 0, "done": False}
        assert [json.loads(process.read_line()) for _ in range(2)] == [look] * 2
        manage(place, lambda engine: engine.delete("slow"))
        assert process.end() == 0
        assert json.loads(process.output.splitlines()[-1]) == {**look, "waiting": 0, "done": True}
        assert process.errors == b""


@pytest.mark.processes
def test_on_a_terminal_one_line_is_updated_in_place_and_gone_at_the_end(place: Server, tmp_path: Path) -> None:
    arguments = "reshard", "--to", "4", *OPTIONS, "--url", place.url
    with on_terminal(tmp_path, *arguments, streams=["stderr"]) as process:
        process.until("1 waiting")
        manage(place, lambda engine: engine.flush("slow"))
        process.until("1 ready")
        manage(place, lambda engine: engine.delete("slow"))
        assert process.end() == (0, ended(place, "4 shards").encode())
    assert b"\n" not in process.shown
    assert process.shown.startswith(b"\r\x1b[Kaiodigest: namespace 'mail' is moving to 4 shards: ")
    assert process.shown.endswith(b"\r\x1b[K")


@pytest.mark.processes
def test_ctrl_c_ends_it_with_130_and_says_that_it_goes_on_when_called_again(place: Server, tmp_path: Path) -> None:
    arguments = "reshard", "--to", "4", *OPTIONS, "--url", place.url
    with running(tmp_path, *arguments) as process:
        assert b"1 waiting" in process.error_line()
        assert process.interrupt() == 130
        assert process.errors.splitlines()[1:] == [
            b"aiodigest: interrupted: to continue, run aiodigest reshard --namespace mail --to 4"
        ]
        assert process.output == b""
    manage(place, lambda engine: engine.delete("slow"))
    with running(tmp_path, *arguments) as process:
        assert process.end() == 0


def test_another_number_during_a_change_is_one_line(place: Server, command: Command) -> None:
    manage(place, lambda engine: anext(engine.reshard(4)))
    code, output, errors = command("reshard", "--to", "8", *OPTIONS, "--url", place.url)
    assert (code, output) == (1, "")
    assert errors == (
        "aiodigest: namespace 'mail' is on its way from 1 to 4 shards: that must end before it can have 8: "
        "aiodigest reshard --namespace mail --to 4\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--to", "0"), "shards must be a whole number from 1 to 1,024, not 0"),
        (("--to", "1025"), "shards must be a whole number from 1 to 1,024, not 1025"),
        (("--to", "many"), "Invalid value for '--to'"),
        ((), "Missing option '--to'"),
    ],
)
def test_a_bad_number_is_a_usage_error(place: Server, command: Command, arguments: tuple[str, ...], told: str) -> None:
    code, output, errors = command("reshard", *arguments, *OPTIONS, "--url", place.url)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert told in errors


@pytest.mark.processes
def test_a_server_that_goes_away_meanwhile_is_one_line_and_exit_code_69(place: Server, tmp_path: Path) -> None:
    arguments = "reshard", "--to", "4", *OPTIONS, "--url", place.url, "--timeout", "1s"
    with running(tmp_path, *arguments) as process:
        assert b"1 waiting" in process.error_line()
        place.stop()
        assert process.end() == 69
        assert process.errors.count(b"\n") == 2
        assert b"Traceback" not in process.errors


def test_shards_are_chosen_by_numbers_and_ranges() -> None:
    chosen = {"3": {3}, "0-7": {*range(8)}, "0-3,8": {0, 1, 2, 3, 8}, " 1 , 5-6 ": {1, 5, 6}, "7-7,0,7": {0, 7}}
    chosen["1023"] = {1023}
    assert {text: shard_numbers(text) for text in chosen} == chosen


@pytest.mark.parametrize("text", ["", ",", "a", "3-", "-3", "7-3", "0-1024", "1024", "1.5", "0-3,", "99999999999", "٣"])
def test_a_choice_that_cannot_be_read_is_a_usage_error_that_says_what_is_allowed(command: Command, text: str) -> None:
    code, output, errors = command("run", "mail:engine", f"--shards={text}")
    assert (code, output) == (2, "")
    assert "write 3, 0-7 or 0-3,8, with numbers from 0 to 1023" in errors
    assert errors.count("\n") == 1


@pytest.mark.processes
async def test_a_service_of_some_shards_delivers_these_alone(server: Server, namespace: str, tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(40)]
    expected = {key for key in keys if crc32(key.encode()) % 4 == 1}
    lines = (
        "from aiodigest import DigestEngine",
        f"engine = DigestEngine({server.url!r}, namespace={namespace!r})",
        "@engine.deliver",
        "async def deliver(digest): print(digest.key, flush=True)",
    )
    (tmp_path / "mail.py").write_text("\n".join(lines))
    async with DigestEngine(server.url, namespace=namespace, shards=4) as engine:
        await engine.add_many(Entry(key, 1) for key in keys)
        with running(tmp_path, "run", "mail:engine", "--shards", "1", cwd=tmp_path) as service:
            delivered = {service.read_line().decode().strip() for _ in expected}
            assert service.interrupt(signal.SIGTERM) == 0
        assert delivered | {*service.output.decode().split()} == expected
        assert (await engine.stats()).ready == len(keys) - len(expected)
