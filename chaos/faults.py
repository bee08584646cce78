"""How faults are inflicted, those of processes first. One is over when nothing hinders the others any more."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from chaos.board import Mood
from chaos.plan import AWAY, BLOCK, Planned
from chaos.server import MailServer
from chaos.world import Kind, Slot, World

MAIL = "mail server"  # what its faults need
PATIENCE = 30.0  # for a fault to be over once its time has passed
NO_EFFECT = 3.0  # without the error that it is for within so long, a fault has had no effect

# who is concerned: store, path, kind of process, slot
Scope: TypeAlias = tuple[str | None, str | None, str | None, int | None]
Inflict: TypeAlias = Callable[[], Awaitable[str]]
"""Returns when the fault is over, with why nothing came of it, '' if something did."""


class Faults(ABC):
    """Inflicts what a plan says. What needs the same part of the world does so one after the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._running: set[asyncio.Task[None]] = set()
        self.inflicted = 0

    async def begin(self, planned: Planned) -> None:
        """Inflict a fault in the background, as soon as what it needs is free."""
        need, scope, inflict = self._prepared(planned)
        lock = self._locks[need]
        await lock.acquire()
        task = asyncio.create_task(self._run(planned, need, scope, inflict))
        task.add_done_callback(lambda _: lock.release())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def end(self) -> None:
        """Wait until all faults are over."""
        while self._running:
            await asyncio.wait(self._running)

    async def _run(self, planned: Planned, need: str, scope: Scope, inflict: Inflict) -> None:
        world = self._world
        world.journal.write("fault", planned.number, planned.kind, *scope)
        try:
            async with asyncio.timeout(planned.lasts + PATIENCE):
                idle = await inflict()
                world.journal.write("over", planned.number, idle)
                self.inflicted += not idle
                await self._settle(need)
        except TimeoutError:
            world.wrong(f"fault {planned.number} ({planned.kind}) was not over within {PATIENCE:g} s")
        except Exception as error:
            world.wrong(f"fault {planned.number} ({planned.kind}) could not be inflicted: {error!r}")

    def _prepared(self, planned: Planned) -> tuple[str, Scope, Inflict]:
        """What a fault needs for itself, whom it concerns, and how to inflict it."""
        where, _, how = planned.kind.partition(": ")
        match where:
            case "worker" | "producer":
                return self._of_process(planned, where, how)
            case "callbacks raise" | "callbacks hang":
                mood: Mood = "raise" if where == "callbacks raise" else "hang"
                return "callbacks", (None, None, "worker", None), lambda: self._callbacks(mood, planned.lasts)
            case "callback blocks the loop":
                slot = self._chosen("worker", planned)
                scope = (slot.store, slot.path, "worker", slot.number)
                return f"worker {slot.number}", scope, lambda: self._block(slot)
            case "mail server":
                return self._of_mails(planned, how)
            case _:
                return self._of_servers(planned, where, how)

    @abstractmethod
    def _of_servers(self, planned: Planned, where: str, how: str) -> tuple[str, Scope, Inflict]:
        """The same of what is no process of ours."""

    @abstractmethod
    async def _settle(self, need: str) -> None:
        """Wait until the next fault may come to what a fault needed."""

    # Processes

    def _chosen(self, kind: Kind, planned: Planned) -> Slot:
        slots = self._world.of(kind)
        return slots[int(planned.choice * len(slots))]

    def _of_process(self, planned: Planned, kind: Kind, how: str) -> tuple[str, Scope, Inflict]:
        slot = self._chosen(kind, planned)
        inflict: dict[str, Inflict] = {
            "kill -9": lambda: self._replace(slot, planned.lasts, self._world.kill),
            "SIGTERM": lambda: self._replace(slot, planned.lasts, self._world.terminate),
            "SIGSTOP past its lease": lambda: self._between(slot, signal.SIGSTOP, planned.lasts, signal.SIGCONT),
            "wall clock an hour off": lambda: self._between(slot, signal.SIGUSR1, planned.lasts, signal.SIGUSR1),
        }
        return f"{kind} {slot.number}", (slot.store, slot.path, kind, slot.number), inflict[how]

    async def _replace(self, slot: Slot, after: float, end: Callable[[Slot], Awaitable[None]]) -> str:
        await end(slot)
        await asyncio.sleep(after)
        await self._world.start(slot)
        return ""

    async def _between(self, slot: Slot, first: signal.Signals, lasts: float, second: signal.Signals) -> str:
        self._world.signal(slot, first)
        try:
            await asyncio.sleep(lasts)
        finally:
            self._world.signal(slot, second)
        return ""

    async def _callbacks(self, mood: Mood, lasts: float) -> str:
        world = self._world
        for slot in world.of("worker"):
            world.boards[slot.store].order(slot.incarnation, mood)
        await asyncio.sleep(lasts)
        for slot in world.of("worker"):
            world.boards[slot.store].order(slot.incarnation, "well")
        return ""

    async def _block(self, slot: Slot) -> str:
        """The next callback blocks the loop once, if one comes in time."""
        board, incarnation = self._world.boards[slot.store], slot.incarnation
        board.order(incarnation, "block")
        for _ in range(round(NO_EFFECT / 0.02)):
            if board.mood(incarnation) != "block":
                await asyncio.sleep(BLOCK)
                return ""
            await asyncio.sleep(0.02)
        board.order(incarnation, "well")
        return "no callback came"

    # The mail server

    def _of_mails(self, planned: Planned, how: str) -> tuple[str, Scope, Inflict]:
        mail = self._world.mail
        assert mail is not None
        scope = (None, None, "worker", None)  # it keeps nobody from telling the store
        if planned.kind == AWAY:  # which the plan does not wait for
            return AWAY, scope, lambda: self._leave(mail, planned.lasts)
        inflict: dict[str, Inflict] = {
            "kill -9": lambda: self._kill_mail(mail, planned.lasts),
            "slow": lambda: self._slow_mail(mail, planned.lasts),
            "dies in the middle": lambda: self._let_die(mail, how, planned.lasts),
            "dies after the end": lambda: self._let_die(mail, how, planned.lasts),
        }

        async def unless_away() -> str:
            return "it was away" if mail.is_away else await inflict[how]()

        return MAIL, scope, unless_away

    async def _leave(self, mail: MailServer, lasts: float) -> str:
        async with self._locks[MAIL]:
            mail.is_away = True
        await self._kill_mail(mail, lasts)
        mail.is_away = False
        return ""

    async def _kill_mail(self, mail: MailServer, down: float) -> str:
        if not mail.is_up:
            raise RuntimeError("it has crashed")
        await mail.kill()
        await asyncio.sleep(down)
        await mail.start()
        return ""

    async def _let_die(self, mail: MailServer, how: str, down: float) -> str:
        """The next mail ends it, if one comes in time."""
        mail.behave(how)
        has_died = await mail.dies(NO_EFFECT)
        await mail.kill()
        await asyncio.sleep(down)
        await mail.start()
        return "" if has_died else "no mail came"

    async def _slow_mail(self, mail: MailServer, lasts: float) -> str:
        mail.behave("slow")
        await asyncio.sleep(lasts)
        mail.behave("well")
        return ""
