"""The pages are true: every code block runs, every link leads somewhere, every table matches the code.

How a block is run depends on its language:

* ``python``: as a script, in a process of its own; those that import pytest, by one run of it. A block that only
  defines an app or an engine is thereby imported.
* ``sh``: commands of ``make`` and ``pip install`` are looked up (the target, the extras exist); all others are run.
* ``yaml``, ``toml``, ``json`` and ``ini`` (units of systemd too): parsed.
* none: drawings and listings, which nobody can run. ``py``: signatures in the reference, made from the code.
* ``console``: what commands show, in pages alone that a test of their own follows from top to bottom.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest
import typer.main
import yaml
from pages import DOCUMENTS, Block, blocks_of, check_installed, prose_of, title
from userland import DEADLINE, ROOT, environment

from aiodigest import JSON, DigestEngine, JSONCodec, Policy
from aiodigest.backends.redis.layout import SCHEMA
from aiodigest.cli.app import app
from aiodigest.records.entries import ARRIVAL, TRACED, VERSION
from aiodigest.testing import TestEngine

COMMANDS = {"aiodigest", "printf", "echo", "cat"}  # what a reader may be told to run, beside make and pip install
DAY = 86_400
Done: TypeAlias = subprocess.CompletedProcess[str]
PYTEST = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function"]


PARSERS: dict[str, Callable[[str], object]] = {
    "ini": ConfigParser(strict=False, interpolation=None).read_string,  # units of systemd may have an option twice
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}


FOLLOWED = {  # as a whole, by tests of their own
    ROOT / "docs" / "tutorial.md": "test_tutorial.py",
    ROOT / "docs" / "howto" / "use-the-command-line.md": "test_command_line_page.py",
}
BLOCKS = [block for document in DOCUMENTS if document not in FOLLOWED for block in blocks_of(document)]
SCRIPTS = [block for block in BLOCKS if block.language == "python"]
TESTS = [block for block in SCRIPTS if "import pytest" in block.text]


def commands_of(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block, one whole pipeline each, without comments."""
    command = ""
    for line in block.text.splitlines():
        command += line.rstrip("\\") if line.endswith("\\") else line + "\n"
        if not line.rstrip().endswith(("\\", "|", "&&")):
            if shlex.split(command, comments=True):
                yield command
            command = ""
    assert not command, f"{block}: the last command goes on"


def run(*command: str | Path, data: Path) -> Done:
    variables = environment(data) | {"SMTP_PASSWORD": "a reader's own"}
    settings: dict[str, Any] = {"cwd": data, "env": variables, "stdin": subprocess.DEVNULL}
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False, **settings)


def run_until(fits: Callable[[Done], bool], script: str, data: Path) -> Done:
    """Run a program of a page, up to five times until it fits: a busy machine may stand still for longer than it waits
    (five seconds for the start of its server, the default, or for a cool-down of one)."""
    path = data / "block.py"
    path.write_text(script)
    done = run(sys.executable, path, data=data)
    for _ in range(4):
        if fits(done):
            break
        done = run(sys.executable, path, data=data)
    return done


def test_every_code_block_is_in_a_language_that_is_run_here() -> None:
    assert {block.language for block in BLOCKS} <= {"python", "sh", "py", "", *PARSERS}
    assert {block.document.name for block in BLOCKS} >= {"README.md", "CONTRIBUTING.md", "design.md"}


@pytest.mark.parametrize(("document", "test"), FOLLOWED.items(), ids=FOLLOWED.values())
def test_a_document_that_is_followed_as_a_whole_has_a_test_that_does(document: Path, test: str) -> None:
    assert f'"{document.name}"' in (ROOT / "tests" / test).read_text()


@pytest.mark.docs
@pytest.mark.parametrize("block", [block for block in SCRIPTS if block not in TESTS], ids=str)
def test_a_python_block_runs_as_it_stands(block: Block, data: Path) -> None:
    done = run_until(lambda done: "no connection within 5 s" not in done.stdout + done.stderr, block.text, data)
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stdout}{done.stderr}"


@pytest.mark.docs
@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/howto/write-the-text.md"])
def test_the_first_program_of_a_page_prints_what_the_page_says(name: str, data: Path) -> None:
    blocks = list(blocks_of(ROOT / name))
    script = next(index for index, block in enumerate(blocks) if block.language == "python")
    told = blocks[script + 1].text
    done = run_until(lambda done: done.stdout == told, blocks[script].text, data)
    assert (blocks[script + 1].language, done.stdout) == ("", told)


@pytest.mark.docs
async def test_the_link_of_a_mail_unsubscribes_its_key_alone_and_a_forged_one_nobody() -> None:
    page: dict[str, Any] = {}
    exec(next(block.text for block in SCRIPTS if '"/unsubscribe"' in block.text), page)
    key, mail, transport = "jürgen & co/50%", page["mail"], httpx2.ASGITransport(page["app"])
    forged = page["link"](key).replace("co", "ann")
    async with TestEngine(mail), httpx2.AsyncClient(transport=transport) as client:
        await mail.add(key, "news")
        assert (await client.post(forged)).status_code == 403
        assert (await client.post(page["link"](key))).is_success
        await mail.add(key, "more news")
        assert [(one.key, one.size) async for one in mail.timelines()] == [(key, 0)]
        assert [one.key async for one in mail.timelines("muted")] == [key]


@pytest.mark.docs
def test_the_tests_in_python_blocks_pass_as_they_stand(data: Path) -> None:
    scripts = {f"block{number}.py": block for number, block in enumerate(TESTS)}
    for name, block in scripts.items():
        (data / name).write_text(block.text)
    done = run(sys.executable, *PYTEST, *scripts, data=data)
    told = f"{[f'{name}: {block}' for name, block in scripts.items()]}:\n{done.stdout}{done.stderr}"
    assert (done.returncode, done.stderr) == (0, ""), told
    assert all(f"{name}::" in done.stdout for name in scripts), f"one has no test: {told}"


@pytest.mark.docs
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_a_shell_block_runs_or_names_what_is_there(block: Block, data: Path) -> None:
    for command in commands_of(block):
        match shlex.split(command, comments=True):
            case ["make", target, *settings] if all(re.fullmatch(r"[A-Z]+=\w+", setting) for setting in settings):
                assert_target_exists(target)
            case [".venv/bin/pytest", *files]:  # run by the suite itself
                assert all((ROOT / file).is_file() for file in files), f"{block}: {files}"
            case ["pip", "install", *requirements]:
                check_installed(requirements)
            case [name, *rest] if name in COMMANDS:
                if rest[0] == "reshard":  # of a namespace that is there
                    run("aiodigest", "add", *rest[1:3], "user:1", "news", data=data)
                    run("aiodigest", "delete", *rest[1:3], "--yes", "user:1", data=data)  # else it waits for a worker
                done = run("bash", "-euo", "pipefail", "-c", command, data=data)
                assert done.returncode == 0, f"{block}: {command}{done.stdout}{done.stderr}"
                assert done.stdout, f"{block}: {command}told nothing"
            case words:
                pytest.fail(f"{block}: no rule for {words[0]!r}: {command}")


def test_configuration_can_be_read() -> None:
    for block in BLOCKS:
        if block.language in PARSERS:
            PARSERS[block.language](block.text)


def assert_target_exists(*targets: str) -> None:
    done = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_make_target_that_is_named_exists() -> None:
    named = re.findall(r"`make ([a-z-]+)", "".join(document.read_text() for document in DOCUMENTS))
    assert_target_exists(*sorted(set(named)))


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    for document in DOCUMENTS:
        for target, anchor in links_of(document):
            file = document.parent / target if target else document
            assert file.exists(), f"{title(document)}: {target}"
            assert not anchor or anchor in anchors_of(file), f"{title(document)}: {target}#{anchor}"


def links_of(document: Path) -> list[tuple[str, str]]:
    """Return the links to files of the repository: path and anchor."""
    plain = re.sub(r"`[^`\n]+`", "", prose_of(document))
    return re.findall(r"\]\((?!\w+:)([^()\s#]*)(?:#([^()\s]*))?\)", plain)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ +(.+?) *$", prose_of(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_quickstart_of_the_readme_is_the_example() -> None:
    quickstart = next(block for block in SCRIPTS if block.document.name == "README.md")
    assert quickstart.text in (ROOT / "examples" / "quickstart.py").read_text()


@pytest.mark.parametrize("document", [ROOT / "README.md", ROOT / "docs" / "design.md"], ids=lambda path: path.name)
def test_the_policy_table_names_every_field_with_its_default(document: Path) -> None:
    names = {field.name for field in fields(Policy)}
    rows = [(name, told) for name, told in table_rows(document) if name in names]
    assert [name for name, _ in rows] == [field.name for field in fields(Policy)]
    for (name, told), field in zip(rows, fields(Policy), strict=True):
        assert re.match(rf"{re.escape(in_words(field))}\b", told), f"{name} is said to be {told}"


def test_the_readme_names_every_argument_of_an_engine() -> None:
    told = {name for name, _ in table_rows(ROOT / "README.md")}
    assert set(inspect.signature(DigestEngine).parameters) - {"namespace"} <= told


def test_the_readme_names_every_method_and_property_of_an_engine() -> None:
    table = between("| method | what it does |\n", "\n\n")
    cells = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert told == {name for name in dir(DigestEngine) if not name.startswith("_")}


def test_the_readme_names_every_command() -> None:
    told = re.findall(r"`(?:aiodigest )?([a-z]+)", between("### As a service, or from a shell\n", "\n## "))
    assert set(vars(typer.main.get_command(app))["commands"]) <= set(told)


def test_the_page_about_upgrades_has_the_numbers_of_what_is_stored() -> None:
    page = (ROOT / "docs" / "howto" / "upgrade.md").read_text()
    assert f"| schema {SCHEMA}: " in page
    flags = f"`{ARRIVAL:#x}` (without a timestamp) and `{TRACED:#x}` (a trace context)"
    assert f"| the bytes around a record | {VERSION}: its first byte, apart from the flags {flags}" in page
    codec = JSONCodec(JSON)
    plain, packed = (codec.encode(text)[0] for text in ("a", "a" * 100_000))
    assert f"| the bytes of a value (`JSONCodec`) | {plain} (JSON) or {packed} (the same by zstd): " in page


def between(begin: str, end: str) -> str:
    """Return a part of the README."""
    _, found, rest = (ROOT / "README.md").read_text().partition(begin)
    assert found
    return rest.partition(end)[0]


def table_rows(document: Path) -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \|", document.read_text(), re.MULTILINE)


def in_words(field: Field[Any]) -> str:
    """Return the default of a field, as the table words it."""
    match getattr(Policy(), field.name):
        case None:
            return "none"
        case bool():
            return "off"
        case int() as number:
            return str(number)
        case 0.0:
            return "0"
        case float() as delay if delay % DAY == 0:
            return f"{delay / DAY:g} days"
        case delay:
            return f"{delay:g} s"
