"""All the processes of a run: started, watched, replaced when they die, and gone at its end."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from servers import server_version

from aiodigest import BackendUnavailable
from chaos.board import DELIVERED, STORED, Board
from chaos.evidence import MASTER
from chaos.journal import Journal
from chaos.plan import KINDS, STEP_BACK
from chaos.process import Role, engine
from chaos.proxy import Proxy
from chaos.server import Embedded, MailServer, Server

PROXIES = 2
STARTING = 60.0  # for the server, and then for all other processes
LEAVING = 15.0  # for a process to end on SIGTERM: its drain, its calls' timeouts, and a slow machine
DRAINING = 180.0  # at the end, until all is delivered: hours may be closed for a minute, and a calendar's is the next

Kind = Literal["producer", "worker"]


@dataclass(eq=False)
class Slot:
    """A place for a process: whoever dies there is replaced."""

    kind: Kind
    number: int
    store: str
    path: str
    url: str
    incarnation: int = 0
    process: asyncio.subprocess.Process | None = None
    ending: bool = False  # it was told to end, or killed


class Place(NamedTuple):
    """Where processes work: at a store, by a path, which is a URL."""

    store: str
    path: str
    url: str


class World(ABC):
    """The processes of a run, and what they work with: ``_begin`` starts the servers of the stores."""

    def __init__(self, *stores: str, mails: bool) -> None:
        # the path of a unix socket must be short
        self.folder = Path(tempfile.mkdtemp(prefix="chaos", dir="/tmp"))
        self.journal = Journal(self.folder / f"{MASTER}.journal")
        self.boards = {store: Board(self.folder / f"{store}.board") for store in stores}
        for store in stores:
            (self.folder / store).mkdir()
        self.kinds = KINDS
        self.mail = MailServer(self.folder) if mails else None
        self.slots: list[Slot] = []
        self._started = 0
        self._watchers: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            if self.mail is not None:
                self._stack.push_async_callback(self.mail.kill)
                await self.mail.start()
            places = await self._begin(self._stack)
            self._stack.callback(self._kill_all)
            kinds: tuple[Kind, ...] = ("worker", "producer")
            self.slots = [Slot(kind, number, *place) for kind in kinds for number, place in enumerate(places)]
            async with asyncio.timeout(STARTING):
                await asyncio.gather(*(self.start(slot) for slot in self.slots))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def _begin(self, stack: AsyncExitStack) -> list[Place]:
        """Start the servers."""

    @property
    def version(self) -> str:
        """What the servers are."""
        return server_version()

    def remove(self) -> None:
        """Remove the journals, the servers' files, and all else."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def of(self, kind: Kind) -> list[Slot]:
        return [slot for slot in self.slots if slot.kind == kind]

    @property
    def stored(self) -> int:
        return sum(board.total(STORED) for board in self.boards.values())

    @property
    def delivered(self) -> int:
        return sum(board.total(DELIVERED) for board in self.boards.values())

    @property
    def held(self) -> int:
        return sum(board.held for board in self.boards.values())

    def wrong(self, what: str) -> None:
        """Write down what must not happen, whatever becomes of the records."""
        self.journal.write("wrong", what)

    # Processes

    async def start(self, slot: Slot) -> None:
        """Put a process into a slot, and wait until it hears signals."""
        self._started += 1
        slot.incarnation, slot.ending = self._started, False
        self.boards[slot.store].enter(slot.incarnation)
        self.journal.write("start", slot.incarnation, slot.kind, slot.number, slot.store, slot.path)
        role = Role(slot.store, slot.url, self.folder, slot.incarnation, self.mail.port if self.mail else 0)
        with (self.folder / f"{slot.incarnation}.log").open("ab") as log:
            slot.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"chaos.{slot.kind}", *role.arguments),
                cwd=Path(__file__).parent.parent,
                stdin=asyncio.subprocess.PIPE,  # whose end tells it that this program is gone
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._watch(slot, slot.process)
        journal = self.folder / f"{slot.incarnation}.journal"
        while slot.process.returncode is None and not (journal.exists() and journal.stat().st_size):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _watch(self, slot: Slot, process: asyncio.subprocess.Process) -> None:
        async def watch() -> None:
            code = await process.wait()
            if slot.process is process and not slot.ending:
                self._note_end(slot, "crashed")
                self.wrong(f"{slot.kind} {slot.incarnation} has crashed with status {code}")
                await self.start(slot)

        watcher = asyncio.create_task(watch())
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _note_end(self, slot: Slot, how: str, at: int | None = None) -> None:
        self.journal.write("exit", slot.incarnation, how, at if at is not None else time.monotonic_ns())

    async def kill(self, slot: Slot) -> None:
        """kill -9. It can do nothing after that, so this is when it ended."""
        assert slot.process is not None
        slot.ending, at = True, time.monotonic_ns()
        slot.process.kill()
        await slot.process.wait()
        self._note_end(slot, "killed", at)

    async def terminate(self, slot: Slot) -> None:
        """SIGTERM, and wait until it has ended, as it should."""
        assert slot.process is not None
        slot.ending = True
        with suppress(ProcessLookupError):
            slot.process.terminate()
        try:
            async with asyncio.timeout(LEAVING):
                code = await slot.process.wait()
        except TimeoutError:
            self.wrong(f"{slot.kind} {slot.incarnation} has not ended within {LEAVING:g} s of SIGTERM")
            await self.kill(slot)
            return
        self._note_end(slot, "ended")
        if code:
            self.wrong(f"{slot.kind} {slot.incarnation} has ended on SIGTERM with status {code}")

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        assert slot.process is not None
        with suppress(ProcessLookupError):
            slot.process.send_signal(number)

    def _kill_all(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        for slot in self.slots:
            slot.ending = True
            if slot.process is not None and slot.process.returncode is None:
                slot.process.kill()

    # The end

    async def finish(self) -> None:
        """End the producers, let the workers deliver all that is held, look at what the stores say, and end them."""
        self.journal.write("stop", time.time_ns())
        await asyncio.gather(*(self.terminate(slot) for slot in self.of("producer")))
        await asyncio.gather(*(self._audit(store) for store in self.boards))
        await asyncio.gather(*(self.terminate(slot) for slot in self.of("worker")))
        if self.mail is not None and not self.mail.is_up:
            self.wrong("the mail server has crashed")

    async def _audit(self, store: str) -> None:
        """Wait until a store holds nothing any more, and write down what it still holds and what it has counted."""
        url = next(slot.url for slot in self.slots if slot.store == store)
        async with engine(store, url) as looker:
            deadline = time.monotonic() + DRAINING
            while True:
                is_over = time.monotonic() > deadline
                try:
                    stats = await looker.stats()
                    if is_over or not (stats.waiting or stats.ready or stats.leased):
                        letters = [record.value async for letter in looker.dead_letters() for record in letter.records]
                        keys = [timeline.key async for timeline in looker.timelines()]
                        held = [each for key in keys if (found := await looker.peek(key)) for each in found.records]
                        break
                except BackendUnavailable:
                    if is_over:
                        self.wrong(f"the {store} store did not come back")
                        return
                await asyncio.sleep(0.1)
            given_up = {"dropped": stats.dropped, "aged": stats.aged, "expired": stats.expired}
            given_up |= {"dropped with a dead letter": stats.letters_dropped}
            self.journal.write("audit", store, letters, [record.value for record in held], given_up)


class Servers(World):
    """One server, partly behind proxies, and an embedded one."""

    def __init__(self, *, mails: bool) -> None:
        super().__init__("main", "embedded", mails=mails)
        self.server = Server(self.folder / "main")
        self.embedded = Embedded(self.folder / "embedded")
        self.proxies = [Proxy(self.server.port) for _ in range(PROXIES)]

    async def _begin(self, stack: AsyncExitStack) -> list[Place]:
        stack.callback(self.embedded.end)
        stack.push_async_callback(self.server.kill)
        async with asyncio.timeout(STARTING):
            await self.server.start()
        if not self.server.library:
            print("no clock steps: that needs libfaketime, and a server that starts with it", flush=True)
            self.kinds = {kind: lasts for kind, lasts in KINDS.items() if kind != STEP_BACK}
        for proxy in self.proxies:
            await stack.enter_async_context(proxy)
        places = [Place("main", "socket", f"unix://{self.server.socket}")]
        places += [Place("main", f"proxy {number}", proxy.url) for number, proxy in enumerate(self.proxies)]
        return places + [Place("embedded", "embedded", f"embedded://{self.embedded.folder}")] * 2
