"""How each kind of fault is inflicted, and when it is over: when nothing hinders the others any more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias

from chaos.board import Mood
from chaos.plan import BLOCK, Planned
from chaos.proxy import Mode
from chaos.server import UNLIMITED, file_size, limit_files, until_stored
from chaos.world import Kind, Slot, World

PATIENCE = 30.0  # for a fault to be over once its time has passed
NO_EFFECT = 3.0  # without the error that it is for within so long, a fault has had no effect

# who is concerned: store, path, kind of process, slot
Scope: TypeAlias = tuple[str | None, str | None, str | None, int | None]
Inflict: TypeAlias = Callable[[], Awaitable[str]]
"""Returns when the fault is over, with why nothing came of it, '' if something did."""


class Faults:
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
                if need == "embedded":  # its keeper starts it again
                    await until_stored(world.embedded.socket)
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
            case "proxy":
                number = int(planned.choice * len(self._world.proxies))
                return (
                    f"proxy {number}",
                    ("main", f"proxy {number}", None, None),
                    lambda: self._proxy(number, how, planned.lasts),
                )
            case "server":
                inflict: dict[str, Inflict] = {
                    "kill -9": lambda: self._kill_server(planned.lasts),
                    "CLIENT PAUSE": lambda: self._pause(planned),
                    "CLIENT KILL": lambda: self._tell("CLIENT KILL TYPE normal SKIPME yes"),
                    "SCRIPT FLUSH": lambda: self._tell("SCRIPT FLUSH"),
                    "OOM": lambda: self._out_of_memory(planned.lasts),
                    "MISCONF": lambda: self._misconf(planned.lasts),
                }
                return "server", ("main", None, None, None), inflict[how]
            case _:
                embedded: dict[str, Inflict] = {
                    "file cannot be written": lambda: self._fill_embedded(planned.lasts),
                    "server kill -9": lambda: self._kill_embedded(keeper=False),
                    "keeper kill -9": lambda: self._kill_embedded(keeper=True),
                }
                return "embedded", ("embedded", None, None, None), embedded[how]

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

    # The network

    async def _proxy(self, number: int, how: str, lasts: float) -> str:
        proxy = self._world.proxies[number]
        modes: dict[str, Mode] = {
            "delay": "delay", "cut": "cut", "half-close": "half-close", "truncate": "truncate",
            "black hole": "black hole",
        }  # fmt: skip
        proxy.set(modes[how])
        try:
            await asyncio.sleep(lasts)
            return "" if proxy.affected else "nobody was connected"
        finally:
            proxy.set("pass")

    # The server

    async def _kill_server(self, down: float) -> str:
        await self._world.server.kill()
        await asyncio.sleep(down)
        await self._world.server.start()
        return ""

    async def _tell(self, command: str) -> str:
        answer = await self._world.server.ask(command)
        return "" if answer.startswith(("+", ":")) else f"the server answered {answer!r}"

    async def _pause(self, planned: Planned) -> str:
        what = "ALL" if planned.choice < 0.5 else "WRITE"
        idle = await self._tell(f"CLIENT PAUSE {round(planned.lasts * 1000)} {what}")
        await asyncio.sleep(planned.lasts)
        return idle

    async def _out_of_memory(self, lasts: float) -> str:
        server = self._world.server
        await server.insist("CONFIG SET maxmemory 1mb")
        try:
            answer = await server.ask("SET chaos:probe 1")
            await asyncio.sleep(lasts)
            return "" if answer.startswith("-OOM") else f"the server answered {answer!r}"
        finally:
            await server.insist("CONFIG SET maxmemory 0")

    async def _misconf(self, lasts: float) -> str:
        """Its file cannot grow, and with ``everysec`` it refuses writes (with ``always`` it would end).

        What is acknowledged under ``everysec`` is in the server's memory alone when its file cannot take it, and so
        nobody kills the server here; back under ``always``, all of it is written before the next answer.
        """
        world, server = self._world, self._world.server
        await server.insist("CONFIG SET appendfsync everysec")
        idle = "no write failed"
        try:
            limit_files(server.pid, file_size(world.folder / "main"))
            for _ in range(round(NO_EFFECT / 0.05)):
                if (await server.ask("SET chaos:probe 1")).startswith("-MISCONF"):
                    idle = ""
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(lasts)
        finally:
            limit_files(server.pid, UNLIMITED)
            await until_stored(server.socket)
            await server.insist("CONFIG SET appendfsync always")
            await until_stored(server.socket)
        return idle

    # The embedded server

    async def _fill_embedded(self, lasts: float) -> str:
        """No process of it can write beyond where its file ends now: it ends at the next write, and at each start."""
        embedded = self._world.embedded
        keeper, server = embedded.keeper, embedded.server
        if keeper is None or server is None:
            return "there is no embedded server"
        size = file_size(embedded.folder)
        limit_files(keeper, size)
        limit_files(server, size)
        try:
            for _ in range(round(NO_EFFECT / 0.02)):
                if embedded.server != server:
                    await asyncio.sleep(lasts)
                    return ""
                await asyncio.sleep(0.02)
            return "it did not end"
        finally:
            limit_files(keeper, UNLIMITED)
            limit_files(server, UNLIMITED)

    async def _kill_embedded(self, keeper: bool) -> str:
        pid = self._world.embedded.keeper if keeper else self._world.embedded.server
        if pid is None:
            return "there is no embedded server"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return ""
