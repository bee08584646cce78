"""The tutorial, followed as a reader does: its code, its commands, and the output it gives them.

Everything is taken from the page itself, one block after another; nothing on it is left out. Only the ports are free
ones, the delays of the app are shorter until it is tested, and nothing is installed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from pages import blocks_of, check_installed, commands_of, matches
from ports import free_port
from servers import running_server
from userland import ROOT, Program, running

pytestmark = pytest.mark.docs

PAGE = ROOT / "docs" / "tutorial.md"
SECONDS = "minimum_delay=10, increment_delay=1, maximum_delay=60"
SHORTER = "minimum_delay=5, increment_delay=0.1, maximum_delay=60"
PREPARING = ("python3 -m venv ", ". .venv/bin/activate", "pip install ")


class Page:
    """The blocks of the tutorial, taken one after another."""

    def __init__(self, settle: Callable[[str], str]) -> None:
        self.blocks = [(block.language, settle(block.text)) for block in blocks_of(PAGE)]

    def next(self, language: str = "") -> str:
        """Take the next block: without a language it is the output of a program."""
        found, text = self.blocks.pop(0)
        assert found == language, text
        return text

    def commands(self) -> list[tuple[str, str]]:
        """Take the next block, which is commands, each with its output."""
        return list(commands_of(self.next("console")))

    def command(self) -> tuple[str, str]:
        """Take the next block, which is a single command."""
        [command] = self.commands()
        return command


class Reader:
    """A reader with terminals in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def starts(self, command: tuple[str, str]) -> AsyncGenerator[Program]:
        """Open a terminal with a command that keeps running; it is interrupted at the end, at the latest."""
        async with self._running(command[0]) as program:
            await shows(program, command[1])
            try:
                yield program
            finally:
                await ctrl_c(program)

    async def runs(self, command: tuple[str, str]) -> None:
        """Run a command to its end; it must show exactly what it is said to show.

        It is run again if it found an attempt under way where the page has it between two of them.
        """
        told = ""
        for _ in range(5):
            async with self._running(command[0]) as program:
                await program.ended()
            told = "".join(f"{line}\n" for line in program.lines)
            if matches(told, command[1]) or "is under way" not in told:
                break
        assert matches(told, command[1]), f"{command[0]}\n{told}"

    def _running(self, command: str) -> AbstractAsyncContextManager[Program]:
        settings = ["PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"]  # a reader has none
        if "aiosmtpd" in command:  # whose warnings are not ours
            settings = ["-u", "PYTHONWARNINGS", *settings]
        shown = command.replace("curl ", "curl -sS ")  # which shows its progress where there is no terminal
        return running("env", *settings, "bash", "-c", shown, data=self.folder, folder=self.folder)


async def shows(program: Program, lines: str) -> None:
    """Wait until a program has shown these lines, in this order, perhaps with others between them."""
    for line in lines.splitlines():
        while line != "..." and not matches(await program.until(""), line):
            pass


async def ctrl_c(program: Program) -> None:
    """Interrupt a program, and wait until it has ended."""
    program.interrupt()
    await program.ended()


@pytest.fixture
def page() -> Iterator[Page]:
    """Return the tutorial, with free ports and the URL of a real server."""
    web, smtp = str(free_port()), str(free_port())

    def settled(text: str) -> str:
        text = text.replace("8025", smtp).replace("8000", web).replace(" app:app", f" --port {web} app:app")
        return text.replace("redis://localhost:6379/0", server.url)

    with running_server() as server:
        yield Page(settled)


async def test_who_follows_the_tutorial_sees_what_it_says(page: Page, data: Path) -> None:
    reader = Reader(data)
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        # 1 and 2: install, a mail server, the app
        for command, shown in page.commands():
            assert command.startswith(PREPARING)
            assert not shown
            check_installed(command.split()[2:] if command.startswith("pip") else [])
        mail_server = page.command()
        smtp = await first.enter_async_context(reader.starts(mail_server))
        app = page.next("python")
        assert SECONDS in app
        (reader.folder / "app.py").write_text(app.replace(SECONDS, SHORTER))

        # 3: one mail, then one for a burst
        app_server = page.command()
        web = await second.enter_async_context(reader.starts(app_server))
        await reader.runs(page.command())
        await shows(smtp, page.next())

        # 4: everything is down
        await ctrl_c(smtp)
        await reader.runs(page.command())
        await shows(web, page.next())
        await ctrl_c(web)
        for command in page.commands():
            await reader.runs(command)
        smtp = await first.enter_async_context(reader.starts(mail_server))
        web = await second.enter_async_context(reader.starts(app_server))
        await shows(smtp, page.next())

        # 5: a test
        (reader.folder / "app.py").write_text(app)
        (reader.folder / "test_app.py").write_text(page.next("python"))
        await reader.runs(page.command())

        # 6: on another server
        await ctrl_c(web)
        doctor, restart = page.commands()
        await reader.runs(doctor)
        await second.enter_async_context(reader.starts(restart))
        assert not page.blocks
