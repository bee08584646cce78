"""Completion in shells: what a real bash gets, and what the others are answered."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import typer.main
from commandline import Command
from terminals import OnTerminal, plain
from userland import DEADLINE, environment

from aiodigest.cli import app

Completed: TypeAlias = Callable[[str, str], list[str]]

BASH = shutil.which("bash") or "bash"
COMMANDS: dict[str, object] = vars(typer.main.get_command(app.app))["commands"]


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Completed:
    """What the command answers to a shell that asks how a line may go on."""

    def complete(shell: str, line: str) -> list[str]:
        monkeypatch.setenv("_AIODIGEST_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        with pytest.raises(SystemExit) as ended:
            app.run()
        printed = capfd.readouterr()
        assert (ended.value.code, printed.err) == (0, "")
        return printed.out.splitlines()

    return complete


def test_commands_options_and_choices_are_completed(completed: Completed) -> None:
    assert completed("bash", "aiodigest ") == list(COMMANDS)
    assert {"doctor", "bench", "dead"} <= COMMANDS.keys()
    assert completed("bash", "aiodigest dead ") == ["list", "show", "replay", "discard"]
    assert "--interval" in completed("bash", "aiodigest top --")
    assert completed("bash", "aiodigest timelines --state w") == ["waiting"]
    assert completed("bash", "aiodigest pipe --output ") == ["text", "json"]


def test_zsh_and_fish_are_answered_in_their_ways(completed: Completed) -> None:
    assert completed("zsh", "aiodigest timelines --state r") == ["_arguments '*: :((\"ready\"))'"]
    assert completed("fish", "aiodigest fl") == ["flush\tMake a timeline due now."]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_can_be_had_without_being_in_it(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_AIODIGEST_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        app.run()
    assert f"_AIODIGEST_COMPLETE=complete_{shell}" in capfd.readouterr().out


def test_no_server_is_asked_for_the_names_of_timelines(completed: Completed, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        monkeypatch.setenv("AIODIGEST_URL", f"redis://127.0.0.1:{listener.getsockname()[1]}")
        for line in ("aiodigest show ", "aiodigest dead show ", "aiodigest flush --namespace mail "):
            assert completed("bash", line) == [""]
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.processes
def test_a_shell_that_shows_its_script_completes_by_the_tab_key(data: Path) -> None:
    (data / "events.ndjson").touch()
    variables = {**environment(data), "HOME": str(data), "TERM": "xterm", "PS1": "> ", "INPUTRC": "/dev/null"}
    bash = OnTerminal([BASH, "--norc", "--noprofile", "-i"], variables, data)
    try:
        bash.until("> ")
        bash.type(b'eval "$(aiodigest --show-completion)"; echo it is $?\n')
        bash.until("it is 0")
        for typed, shown in ((b"timelines --state w", "waiting "), (b"pipe ev", "events.ndjson ")):
            bash.type(b"aiodigest " + typed + b"\t")
            bash.until(shown)
            bash.type(b"\x15")  # the line again, empty
        bash.type(b"exit\n")
        bash.end()
    finally:
        bash.close()
    assert b"Traceback" not in plain(bash.shown)


@pytest.mark.processes
def test_it_is_installed_for_the_shell_that_asks(data: Path) -> None:
    def run(script: str) -> str:
        settings = {**environment(data), "HOME": str(data)}
        return subprocess.check_output([BASH, "-ec", script], env=settings, cwd=data, text=True, timeout=DEADLINE)

    run("aiodigest --install-completion; exit $?")  # so that it is a child of this shell
    [line] = [line for line in (data / ".bashrc").read_text().splitlines() if line]
    assert run(f"{line}; complete -p aiodigest") == "complete -o default -F _aiodigest_completion aiodigest\n"


def test_the_help_of_a_command_is_not_longer_for_it(command: Command) -> None:
    assert "completion" in command("--help")[1]
    assert "completion" not in command("stats", "--help")[1]
