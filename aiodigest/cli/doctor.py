"""``aiodigest doctor``: problems of a server and a namespace, found before they do harm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from aiodigest import Finding
from aiodigest.cli.answers import ask, console, print_lines
from aiodigest.cli.options import EMBEDDED, FAILED, Address, AsJson, Namespace, Timeout, Url
from aiodigest.cli.words import count, printable

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
INDENT = 9  # columns before the message: the longest mark, and two spaces
NARROW = 20  # columns: less is not kept to


def doctor(namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, in_json: AsJson = False) -> int:
    """Look for causes of lost or delayed records: settings of the server, its user and replicas, workers, dead letters.

    Nothing is changed. The exit code is 1 if there is a problem, and 69 if the server cannot be reached.
    """
    findings = ask(Address(url, namespace, timeout), lambda engine: engine.examine())
    if in_json:
        print_lines(asdict(finding) for finding in findings)
    else:
        _print(findings)
    return FAILED if any(finding.level == "problem" for finding in findings) else 0


def _print(findings: Sequence[Finding]) -> None:
    screen = console()
    for finding in findings:
        _print_indented(screen, f"{finding.check}: {finding.message}", INDENT, finding.level, STYLES[finding.level])
        if finding.remedy:
            _print_indented(screen, finding.remedy, INDENT + 2, style="cyan")
    problems, notes = (sum(finding.level == level for finding in findings) for level in ("problem", "note"))
    print(f"{count(problems, 'problem')}, {count(notes, 'note')}")


def _print_indented(screen: Console, text: str, indent: int, mark: str = "", style: str = "") -> None:
    """Print a text indented, with a mark before its first line; ``style`` applies to the mark, else to the text."""
    from rich.text import Text

    lines = Text(printable(text), "" if mark else style).wrap(screen, max(NARROW, screen.width - indent))
    for number, line in enumerate(lines):
        line.rstrip()
        before = mark if number == 0 else ""
        screen.print(Text.assemble((before, style), " " * (indent - len(before)), line), soft_wrap=True)
