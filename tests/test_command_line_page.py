"""docs/howto/use-the-command-line.md, read from top to bottom by somebody who types what it shows."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Command, aiodigest, attempt
from pages import blocks_of, commands_of, matches
from servers import Server
from userland import DEADLINE, ROOT, environment

from aiodigest import DigestEngine, Entry, Policy, Reject

pytestmark = pytest.mark.docs

PAGE = ROOT / "docs" / "howto" / "use-the-command-line.md"
PROGRAM, *TRANSCRIPTS = blocks_of(PAGE)
FIELDS = dict(re.findall(r"^\| `([a-z ]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))


def test_each_command_of_the_page_shows_this(data: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    for name, value in environment(data).items():
        monkeypatch.setenv(name, value)
    assert [block.language for block in (PROGRAM, *TRANSCRIPTS)] == ["python"] + ["console"] * len(TRANSCRIPTS)
    subprocess.run([sys.executable, "-c", PROGRAM.text], check=True, timeout=DEADLINE)
    for line, written in (told for block in TRANSCRIPTS for told in commands_of(block.text)):
        if export := re.fullmatch(r"export (\w+)=(\w+)", line):
            monkeypatch.setenv(export[1], export[2])
            continue
        if re.fullmatch(r"aiodigest [\w :-]+", line):  # what needs no shell need not wait for one
            code, output, errors = command(*line.split()[1:])
        else:
            shell = "bash", "-euo", "pipefail", "-c", line
            done = subprocess.run(shell, cwd=data, capture_output=True, text=True, timeout=DEADLINE)
            code, output, errors = done.returncode, done.stdout, done.stderr
        assert (code, errors) == (0, ""), f"{line}: {errors}"
        assert matches(output, written), f"{line}:\n{output}"


def test_the_program_may_be_run_again_after_the_dead_letters_were_replayed(
    data: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Whose timelines wait in their cool-down then."""
    for name, value in environment(data).items():
        monkeypatch.setenv(name, value)
    subprocess.run([sys.executable, "-c", PROGRAM.text], check=True, timeout=DEADLINE)
    assert command("dead", "replay", "--all", "--yes", "--namespace", "incident")[0] == 0
    subprocess.run([sys.executable, "-c", PROGRAM.text], check=True, timeout=DEADLINE)


def fields_of(command: str) -> list[str]:
    """Return the fields that the page's table gives the objects of a command."""
    return re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", FIELDS[command]))


async def fill(url: str, namespace: str) -> list[str]:
    """Make one timeline that waits, and two dead letters; return their ids."""
    await attempt(url, Entry("a", 1), Entry("b", 1), error=Reject("no"), namespace=namespace)
    async with DigestEngine(url, namespace=namespace, policy=Policy(initial_delay=600)) as engine:
        await engine.add("k", 1)
        return [letter.id async for letter in engine.dead_letters()]


def test_each_field_is_named(server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("AIODIGEST_URL", server.url)
    monkeypatch.setenv("AIODIGEST_NAMESPACE", namespace)

    def fields(*arguments: str) -> list[str]:
        code, output, errors = command(*arguments, "--json")
        assert code == 0, errors
        return list(json.loads(output.splitlines()[0]))

    first, second = asyncio.run(fill(server.url, namespace))
    assert fields("show", "k") == [*fields_of("timelines"), "records"]
    assert fields("dead", "show", first) == [*fields_of("dead list"), "records"]
    for line in (
        "stats", "timelines", "top", "dead list", f"dead replay {first}", f"dead discard {second}",
        "explain k", "add k 1", "flush k", "delete k", "reshard --to 1",
    ):  # fmt: skip
        name = re.match(r"dead \w+|\w+", line)
        assert name is not None
        assert fields(*line.split()) == fields_of(name[0])


@pytest.mark.parametrize("option", ["--json", "--output=json"])
def test_the_page_names_the_fields_of_a_digest(option: str, tmp_path: Path) -> None:
    done = aiodigest(tmp_path, "pipe", "--group-by", "key", option, input=b'{"key": "k"}\n')
    assert list(json.loads(done.stdout)) == fields_of("pipe")
