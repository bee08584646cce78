"""What the demo shows: coloured lines for people, or JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

from aiodigest.cli.rendering import as_json, count

SHOWN = 3  # records of a digest


class Display(Console):
    """Standard output; ``leave`` is called when its reader has gone."""

    def __init__(self, in_json: bool, leave: Callable[[], object], **settings: Any) -> None:
        super().__init__(highlight=False, **settings)
        self._in_json = in_json
        self._leave = leave

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it exits
        self._leave()

    def show(self, at: float, what: str, **facts: Any) -> None:
        """Show what happened ``at`` seconds from the start."""
        if self._in_json:
            self.out(as_json({"at": round(at, 3), "what": what, **facts}), highlight=False)
        else:
            self.print(_text(at, what, facts))


def _text(at: float, what: str, facts: dict[str, Any]) -> Text:
    match what:
        case "remark":
            return Text(f"\n{facts['text']}", "bold yellow")
        case "event":
            return _line(at, "event ", "dim", facts["channel"], facts["text"], "dim")
        case "digest":
            return _digest(at, facts["channel"], facts["texts"])
        case "failure":
            told = f"attempt {facts['attempt']}: 503, to be retried soon"
            return _line(at, "FAILED", "bold red", facts["channel"], told, "red")
        case _:
            return _totals(facts)


def _line(at: float, word: str, style: str, channel: str, text: str, text_style: str) -> Text:
    line = Text().append(f"{at:5.1f} s ", "dim").append(f"{word} ", style).append(f"{channel:<9} ", "cyan")
    return line.append(text, text_style)


def _digest(at: float, channel: str, texts: list[str]) -> Text:
    head = _line(at, "DIGEST", "bold green", channel, count(len(texts), "event"), "bold")
    more = [f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return head.append("".join(f"\n                 | {text}" for text in texts[:SHOWN] + more), "green")


def _totals(facts: dict[str, Any]) -> Text:
    median, worst = facts["median_lateness"] * 1000, facts["worst_lateness"] * 1000
    numbers = (
        f"\n  records in            {facts['added']}"
        f"\n  digests out           {facts['digests']}, with {count(facts['delivered'], 'record')}"
        f"\n  deliveries failed     {facts['failed']}, and {count(facts['retried'], 'digest')} delivered by a retry"
        f"\n  lateness              median {median:.0f} ms, worst {worst:.0f} ms"
    )
    return (
        Text("\nWhat happened", "bold")
        .append(numbers, "not bold")
        .append("\n\nYour own stream: aiodigest pipe --help", "not bold dim")
    )
