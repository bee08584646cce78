"""The displays of ``aiodigest demo``: a terminal in colours, or JSON."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from aiodigest.cli.demo import Leave
from aiodigest.cli.words import as_json, count

SHOWN = 3  # records of a digest


class Output(Console):
    """Standard output; ``leave`` is called when it goes away."""

    def __init__(self, leave: Leave) -> None:
        super().__init__(highlight=False)
        self._leave = leave

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains at its end
        self._leave()


class Screen:
    """A display for people."""

    def __init__(self, leave: Leave) -> None:
        self._screen = Output(leave)

    def begin(self) -> None:
        self._screen.print(Text("Starting a server in a temporary folder ...", "dim"))

    def remark(self, at: float, text: str) -> None:
        self._screen.print(Text(f"\n{text}", "bold yellow"))

    def event(self, at: float, channel: str, text: str) -> None:
        self._line(at, "event ", "dim", channel, text, "dim")

    def digest(self, at: float, channel: str, texts: list[str]) -> None:
        self._line(at, "DIGEST", "bold green", channel, count(len(texts), "event"), "bold")
        for text in texts[:SHOWN]:
            self._screen.print(Text(f"                 | {text}", "green"))
        if len(texts) > SHOWN:
            self._screen.print(Text(f"                 | ... and {len(texts) - SHOWN} more", "green"))

    def failure(self, at: float, channel: str, attempt: int) -> None:
        self._line(at, "FAILED", "bold red", channel, f"attempt {attempt}: 503, tried again soon", "red")

    def end(self, at: float, sums: dict[str, float]) -> None:
        delivered, retried = count(int(sums["delivered"]), "record"), count(int(sums["retried"]), "digest")
        median, worst = sums["median_lateness"] * 1000, sums["worst_lateness"] * 1000
        self._screen.print(
            Text("\nWhat happened", "bold"),
            Text(f"  records in            {sums['added']}"),
            Text(f"  digests out           {sums['digests']}, with {delivered}"),
            Text(f"  deliveries failed     {sums['failed']}, and {retried} delivered by a retry"),
            Text(f"  lateness              median {median:.0f} ms, worst {worst:.0f} ms"),
            Text("\nYour own stream: aiodigest pipe --help", "dim"),
            sep="\n",
        )

    def _line(self, at: float, word: str, style: str, channel: str, text: str, text_style: str) -> None:
        line = Text().append(f"{at:5.1f} s ", "dim").append(f"{word} ", style).append(f"{channel:<9} ", "cyan")
        self._screen.print(line.append(text, text_style))


class Lines:
    """A display for programs: each event is an object on a line."""

    def __init__(self, leave: Leave) -> None:
        self._output = Output(leave)

    def begin(self) -> None:
        """Do nothing: nothing has happened yet."""

    def remark(self, at: float, text: str) -> None:
        self._print(at, "remark", text=text)

    def event(self, at: float, channel: str, text: str) -> None:
        self._print(at, "event", channel=channel, text=text)

    def digest(self, at: float, channel: str, texts: list[str]) -> None:
        self._print(at, "digest", channel=channel, texts=texts)

    def failure(self, at: float, channel: str, attempt: int) -> None:
        self._print(at, "failure", channel=channel, attempt=attempt)

    def end(self, at: float, sums: dict[str, float]) -> None:
        self._print(at, "end", **sums)

    def _print(self, at: float, what: str, **facts: object) -> None:
        self._output.out(as_json({"at": round(at, 3), "what": what, **facts}), highlight=False)
