"""``aiodigest doctor``: problems of a server and a namespace, found before they do harm."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, TypeAlias

import typer

from aiodigest import DigestEngine
from aiodigest.cli.options import EMBEDDED, AsJson, Location, Namespace, Timeout, Url
from aiodigest.cli.output import FAILED, console, print_json
from aiodigest.cli.rendering import count, printable

REPLICAS = "The wait_replicas of the engines, to check whether there are enough replicas, and whether it is enough."
Replicas: TypeAlias = Annotated[int, typer.Option("--wait-replicas", metavar="N", min=0, help=REPLICAS)]

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
INDENT = 9  # columns before the message: the longest level, and two spaces
NARROWEST = 20  # columns of a message, even if the terminal has fewer


def doctor(
    namespace: Namespace, url: Url = EMBEDDED, timeout: Timeout = 5.0, replicas: Replicas = 0, in_json: AsJson = False
) -> int:
    """Look for causes of lost or delayed records.

    It checks the settings of the server, its user and replicas, workers and dead letters, and changes nothing. The
    exit code is 1 if there is a problem, and 69 if the server cannot be reached.
    """
    findings = Location(url, namespace, timeout, replicas).ask(DigestEngine.examine)
    problems, notes = (sum(finding.level == level for finding in findings) for level in ("problem", "note"))
    status = FAILED if problems else 0
    if in_json:
        print_json(*map(asdict, findings))
        return status
    from rich.text import Text

    screen = console()

    def show(text: str, indent: int, mark: str = "", style: str = "") -> None:
        for line in Text(printable(text), "" if mark else style).wrap(screen, max(NARROWEST, screen.width - indent)):
            line.rstrip()
            screen.print(Text.assemble((mark, style), " " * (indent - len(mark)), line), soft_wrap=True)
            mark = ""

    for finding in findings:
        show(f"{finding.check}: {finding.message}", INDENT, finding.level, STYLES[finding.level])
        if finding.remedy:
            show(finding.remedy, INDENT + 2, style="cyan")
    print(f"{count(problems, 'problem')}, {count(notes, 'note')}")
    return status
