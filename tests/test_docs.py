"""What is written is true: every code block of the documents runs, every public name is explained.

How a block is run depends on its language:

* ``python``: as a script, in a process of its own. A block that only defines an app or an engine is thereby imported.
* ``sh``: commands of ``make`` and ``pip install`` are looked up (the target, the extras exist); all others are run.
* none: drawings and listings, which nobody can run.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from userland import DEADLINE, ROOT, data_folder, environment

import aiodigest
from aiodigest import DigestEngine, Policy

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = {"aiodigest", "printf", "echo", "cat"}  # what a reader may be told to run, beside make and pip install
DAY = 86_400


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks_of(document: Path) -> Iterator[Block]:
    """The fenced code blocks of a document."""
    language, begin, lines = "", 0, list[str]()
    for number, line in enumerate(document.read_text().splitlines(), 1):
        fence = re.match(r"\s*(```+|~~~+)(.*)", line)
        if fence is None:
            lines.append(line)
        elif begin:
            yield Block(document, begin, language, "\n".join(lines) + "\n")
            begin = 0
        else:
            language, begin, lines = fence[2].strip(), number, []
    assert not begin, f"{document.name}:{begin}: the block does not end"


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]


def written_in(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in languages], ids=str)


def commands_of(block: Block) -> Iterator[str]:
    """The commands of a shell block, one whole pipeline each, without comments."""
    command = ""
    for line in block.text.splitlines():
        command += line.rstrip("\\") if line.endswith("\\") else line + "\n"
        if not line.rstrip().endswith(("\\", "|", "&&")):
            if words_of(command):
                yield command
            command = ""
    assert not command, f"{block}: the last command goes on"


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def run(*command: str | Path, data: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=data,
        env=environment(data),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.fixture
def data() -> Iterator[Path]:
    with data_folder() as folder:
        yield folder


# Code


def test_every_code_block_is_in_a_language_that_is_run_here() -> None:
    unknown = [f"{block}: {block.language}" for block in BLOCKS if block.language not in ("python", "sh", "")]
    assert not unknown
    assert {block.document.name for block in BLOCKS} >= {"README.md", "CONTRIBUTING.md", "design.md"}


@written_in("python")
def test_a_python_block_runs_as_it_stands(block: Block, data: Path) -> None:
    script = data / "block.py"
    script.write_text(block.text)
    done = run(sys.executable, script, data=data)
    assert (done.returncode, done.stderr) == (0, ""), f"{block}: {done.stderr}"


@written_in("sh")
def test_a_shell_block_runs_or_names_what_is_there(block: Block, data: Path) -> None:
    for command in commands_of(block):
        match words_of(command):
            case ["make", target, *settings] if all(re.fullmatch(r"[A-Z]+=\w+", setting) for setting in settings):
                assert_target_exists(target)
            case [".venv/bin/pytest", *files]:  # run by the suite itself
                assert all((ROOT / file).is_file() for file in files), f"{block}: {files}"
            case ["pip", "install", *requirements]:
                for requirement in requirements:
                    assert_can_be_installed(requirement)
            case [name, *_] if name in COMMANDS:
                done = run("bash", "-euo", "pipefail", "-c", command, data=data)
                assert done.returncode == 0, f"{block}: {command}{done.stdout}{done.stderr}"
                assert done.stdout, f"{block}: {command}told nothing"
            case words:
                pytest.fail(f"{block}: no rule for {words[0]!r}: {command}")


def assert_target_exists(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def assert_can_be_installed(requirement: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement)
    assert parts is not None, requirement
    assert parts[1] == project["name"], f"{requirement} is another project's"
    extras = set(parts[2].split(",")) if parts[2] else set[str]()
    assert extras <= project["optional-dependencies"].keys(), f"{requirement} names an extra that there is not"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    for target in set(re.findall(r"\bmake ([a-z]+)`", document.read_text())):
        assert_target_exists(target)


def test_the_quickstart_of_the_readme_is_the_example() -> None:
    quickstart = next(block for block in BLOCKS if block.document.name == "README.md" and block.language == "python")
    assert quickstart.text in (ROOT / "examples" / "quickstart.py").read_text()


# Names


@pytest.mark.parametrize("name", aiodigest.__all__)
def test_every_public_name_is_explained(name: str) -> None:
    value = getattr(aiodigest, name)
    explained = inspect.cleandoc(vars(value).get("__doc__") or "") if inspect.isclass(value) else alias_doc(name)
    assert explained, f"{name} has no docstring"
    assert not explained.startswith(f"{name}("), f"{name} has no docstring but the one that dataclass made up"


def alias_doc(name: str) -> str:
    """The string below the assignment of an alias, which Python does not keep."""
    for path in (ROOT / "aiodigest").glob("*.py"):
        for assignment, below in pairwise(ast.parse(path.read_text()).body):
            match assignment, below:
                case (
                    ast.Assign(targets=[ast.Name(assigned)]) | ast.AnnAssign(target=ast.Name(assigned)),
                    ast.Expr(ast.Constant(str(explanation))),
                ) if assigned == name:
                    return explanation
                case _:
                    pass
    return ""


@pytest.mark.parametrize("name", [name for name in dir(DigestEngine) if not name.startswith("_")])
def test_everything_that_an_engine_offers_is_explained(name: str) -> None:
    assert getattr(DigestEngine, name).__doc__


# The policy table


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


def table_rows(document: Path) -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\w+)` \| ([^|]+) \|", document.read_text(), re.MULTILINE)


def in_words(field: Field[Any]) -> str:
    """The default of a field, as the table says it."""
    match field.default:
        case None:
            return "none"
        case int() as number:
            return str(number)
        case 0.0:
            return "0"
        case float() as delay if delay % DAY == 0:
            return f"{delay / DAY:g} days"
        case delay:
            return f"{delay:g} s"
