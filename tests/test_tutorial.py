"""The tutorial, followed as a reader does: its code, its commands, and the output it gives them.

Everything is taken from the page itself, one block after another; nothing on it is left out. Only the ports are free
ones, the delays of the first version of the app are shorter, and nothing is installed.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import tomllib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Self

import pytest
from pages import blocks_of, commands_of, matches
from ports import free_port
from servers import running_server
from userland import DEADLINE, ROOT, environment

pytestmark = pytest.mark.docs

PAGE = ROOT / "docs" / "tutorial.md"
SECONDS = "minimum_delay=10, increment_delay=1, maximum_delay=60"
SHORTER = "minimum_delay=5, increment_delay=0.1, maximum_delay=60"
PREPARING = ("python3 -m venv ", ". .venv/bin/activate", "pip install ")


class Page:
    """The blocks of the tutorial, taken one after another."""

    def __init__(self, settle: Callable[[str], str]) -> None:
        self._blocks = [(block.language, settle(block.text)) for block in blocks_of(PAGE)]

    def code(self) -> str:
        """Take the next block, which is Python."""
        return self._next("python")

    def listing(self) -> str:
        """Take the next block, which is the output of a program."""
        return self._next("")

    def commands(self) -> list[tuple[str, str]]:
        """Take the next block, which is commands, each with its output."""
        return list(commands_of(self._next("console")))

    def command(self) -> tuple[str, str]:
        """Take the next block, which is a single command."""
        [command] = self.commands()
        return command

    @property
    def is_over(self) -> bool:
        return not self._blocks

    def _next(self, language: str) -> str:
        found, text = self._blocks.pop(0)
        assert found == language, text
        return text


class Terminal:
    """A program in a terminal of its own. Every wait has a deadline."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: list[str] = []

    async def shows(self, lines: str) -> Self:
        """Wait until it has shown these lines, in this order, perhaps with others between them."""
        for line in lines.splitlines():
            while line != "..." and not matches(await self._line(line), line):
                pass
        return self

    async def ctrl_c(self, lines: str = "") -> None:
        """Interrupt it, and wait until it has shown these lines and ended."""
        self._process.send_signal(signal.SIGINT)
        await self.shows(lines)
        await ended(self._process)

    async def _line(self, wanted: str) -> str:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE):
                line = (await self._process.stdout.readline()).decode()
        except TimeoutError:
            line = ""
        assert line, f"no line {wanted!r} follows these:\n" + "\n".join(self._lines)
        self._lines.append(line.rstrip("\n"))
        return line


class Reader:
    """A reader with terminals in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def writes(self, file: str, text: str) -> None:
        (self._folder / file).write_text(text)

    @asynccontextmanager
    async def starts(self, command: tuple[str, str]) -> AsyncGenerator[Terminal]:
        """Open a terminal with a command that keeps running; it is interrupted at the end, at the latest."""
        process = await self._run(command[0])
        try:
            yield await Terminal(process).shows(command[1])
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
            await ended(process)

    async def runs(self, command: tuple[str, str]) -> None:
        """Run a command to its end; it must show exactly what it is said to show.

        It is run again if it found an attempt under way where the page has it between two of them.
        """
        told = ""
        for _ in range(5):
            told = await ended(await self._run(command[0]))
            if matches(told, command[1]) or "is under way" not in told:
                break
        assert matches(told, command[1]), f"{command[0]}\n{told}"

    async def _run(self, command: str) -> asyncio.subprocess.Process:
        variables = environment(self._folder) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a reader has none
        if "aiosmtpd" in command:  # whose warnings are not ours
            del variables["PYTHONWARNINGS"]
        return await asyncio.create_subprocess_exec(
            "bash", "-c", command.replace("curl ", "curl -sS "),  # which shows its progress where there is no terminal
            cwd=self._folder,
            env=variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> str:
    """Return what a process still prints until it has ended; kill it if that takes too long."""
    try:
        async with asyncio.timeout(DEADLINE):
            told, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    return told.decode()


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
        # 1 to 3: install, a mail server, the app
        check_installing(page)
        smtp = await first.enter_async_context(reader.starts(page.command()))
        app = "\n\n".join([page.code(), page.code(), page.code()])
        assert SECONDS in app
        reader.writes("app.py", app.replace(SECONDS, SHORTER))

        # 4: one mail, then one for a burst
        web = await second.enter_async_context(reader.starts(page.command()))
        await reader.runs(page.command())
        await smtp.shows(page.listing())
        await reader.runs(page.command())
        await smtp.shows(page.listing())

        # 5: the mail server is down
        await smtp.ctrl_c()
        await reader.runs(page.command())
        await web.shows(page.listing())
        for command in page.commands():
            await reader.runs(command)

        # 6: the app is down too
        await web.ctrl_c(page.listing())
        smtp = await first.enter_async_context(reader.starts(page.command()))
        await reader.runs(page.command())
        web = await second.enter_async_context(reader.starts(page.command()))
        await smtp.shows(page.listing())

        # 7: ready for others
        await web.ctrl_c()
        reader.writes("app.py", page.code())
        web = await second.enter_async_context(reader.starts(page.command()))
        await reader.runs(page.command())

        # 8: a test
        reader.writes("test_app.py", page.code())
        install, test = page.commands()
        check_installed(install[0])
        await reader.runs(test)

        # 9: on another server
        await web.ctrl_c()
        await second.enter_async_context(reader.starts(page.command()))
        await reader.runs(page.command())
        assert page.is_over


def check_installing(page: Page) -> None:
    for command, shown in page.commands():
        assert command.startswith(PREPARING)
        assert not shown
        if command.startswith("pip"):
            check_installed(command)


def check_installed(command: str) -> None:
    """Check that what a reader is told to install is here, and that the extras exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in shlex.split(command.removeprefix("pip install ")):
        name, _, chosen = requirement.rstrip("]").partition("[")
        assert version(name)
        assert not chosen or extras.keys() >= set(chosen.split(","))


def test_the_last_version_of_the_app_is_the_first_with_what_is_said_to_be_new() -> None:
    blocks = [block.text for block in blocks_of(PAGE) if block.language == "python"]
    first, callback, _, last = blocks[:4]
    values = first[first.index("class Comment") : first.index("    namespace=")]
    assert callback in last
    assert values in last.replace('    os.environ.get("AIODIGEST_URL", "embedded://"),\n', "")
    assert SECONDS in last
