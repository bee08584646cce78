"""The progress of long work: a bar on standard error, gone at the end. If that is not a terminal there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from aiodigest.cli.words import is_terminal


@contextmanager
def progress_bar(work: str, total: int, *, in_bytes: bool = False) -> Generator[Callable[[int], None], None, None]:
    """Show a bar; yield a function that sets how much of ``total`` is done. Messages meanwhile stand above the bar.

    Nothing may be printed on a terminal's standard output meanwhile.
    """
    if not is_terminal(sys.stderr):
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(work, total=total)
        yield lambda done: progress.update(task, completed=done)
