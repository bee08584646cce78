"""The contents of the pages: fenced blocks, the prose around them, and the output that commands are said to have.

A ``console`` block is a transcript: ``$ `` begins a command, and what it shows is below. There ``...`` stands for
anything in a line, and alone in a line for any number of lines.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

from userland import ROOT

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"\s*(```+|~~~+)(.*)")


@dataclass(frozen=True)
class Block:
    """A fenced code block; ``line`` is that of its first fence, from 1."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{title(self.document)}:{self.line}"


def title(document: Path) -> str:
    """Return a document's name, below ``docs`` with its folder."""
    return document.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks_of(document: Path) -> Iterator[Block]:
    """Yield the fenced code blocks of a document."""
    begin, opened, lines = 0, ("", ""), list[str]()
    for number, line in enumerate(document.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if not begin and fence is not None:
            begin, opened, lines = number, (fence[1], fence[2].strip()), []
        elif fence is not None and (fence[1], fence[2].strip()) == (opened[0], ""):
            text = "".join(f"{line}\n" for line in lines)
            yield Block(document, begin, opened[1], dedent(text))  # it may stand in a list
            begin = 0
        else:
            lines.append(line)
    assert not begin, f"{title(document)}:{begin}: the block does not end"


def prose_of(document: Path) -> str:
    """Return a document without its blocks."""
    lines = document.read_text().splitlines(keepends=True)
    for block in reversed(list(blocks_of(document))):
        del lines[block.line - 1 : block.line + block.text.count("\n") + 1]
    return "".join(lines)


def commands_of(transcript: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a ``console`` block, each with the output that the page gives it."""
    before, *commands = re.split(r"^\$ ", transcript, flags=re.MULTILINE)
    assert not before, f"no command shows {before!r}"
    for told in commands:
        command, _, written = told.partition("\n")
        yield command, written


def check_installed(requirements: Iterable[str]) -> None:
    """Check that what a reader is told to install is here, and that the extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in requirements:
        name, _, chosen = requirement.strip("'\"]").partition("[")
        assert version(name)
        assert not chosen or extras.keys() >= set(chosen.split(",")), f"{requirement} names an extra that there is not"


def matches(shown: str, written: str) -> bool:
    """True if a program printed what a page says, however wide its columns are; empty lines do not count."""
    had, said = ([" ".join(line.split()) for line in text.splitlines() if line.strip()] for text in (shown, written))
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in said]
    parts = [r"(?:.*\n)*" if line == "..." else rf"{pattern}\n" for line, pattern in zip(said, patterns, strict=True)]
    return re.fullmatch("".join(parts), "".join(f"{line}\n" for line in had)) is not None
