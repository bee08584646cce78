"""The faults of a run with one server and an embedded one: of the network, and of both servers."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import cast

from servers import UNLIMITED, limit_files

from chaos.faults import NO_EFFECT, Faults, Inflict, Scope
from chaos.plan import Planned
from chaos.proxy import Mode
from chaos.server import HOUR, file_size, until_stored
from chaos.world import Servers


class ServerFaults(Faults):
    def __init__(self, world: Servers) -> None:
        super().__init__(world)
        self._servers = world

    def _of_servers(self, planned: Planned, where: str, how: str) -> tuple[str, Scope, Inflict]:
        match where:
            case "proxy":
                number = int(planned.choice * len(self._servers.proxies))
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
                    "clock an hour back": self._step_back,
                }
                return "server", ("main", None, None, None), inflict[how]
            case _:
                embedded: dict[str, Inflict] = {
                    "file cannot be written": lambda: self._fill_embedded(planned.lasts),
                    "server kill -9": lambda: self._kill_embedded(keeper=False),
                    "keeper kill -9": lambda: self._kill_embedded(keeper=True),
                }
                return "embedded", ("embedded", None, None, None), embedded[how]

    async def _settle(self, need: str) -> None:
        if need == "embedded":  # its keeper starts it again
            await until_stored(self._servers.embedded.socket)

    # The network

    async def _proxy(self, number: int, how: str, lasts: float) -> str:
        proxy = self._servers.proxies[number]
        proxy.set(cast("Mode", how))
        try:
            await asyncio.sleep(lasts)
            return "" if proxy.affected else "nobody was connected"
        finally:
            proxy.set("pass")

    # The server

    async def _kill_server(self, down: float) -> str:
        await self._servers.server.kill()
        await asyncio.sleep(down)
        await self._servers.server.start()
        return ""

    async def _tell(self, command: str) -> str:
        answer = await self._servers.server.ask(command)
        return "" if answer.startswith(("+", ":")) else f"the server answered {answer!r}"

    async def _pause(self, planned: Planned) -> str:
        what = "ALL" if planned.choice < 0.5 else "WRITE"
        idle = await self._tell(f"CLIENT PAUSE {round(planned.lasts * 1000)} {what}")
        await asyncio.sleep(planned.lasts)
        return idle

    async def _out_of_memory(self, lasts: float) -> str:
        server = self._servers.server
        await server.insist("CONFIG SET maxmemory 1mb")
        try:
            answer = await server.ask("SET chaos:probe 1")
            await asyncio.sleep(lasts)
            return "" if answer.startswith("-OOM") else f"the server answered {answer!r}"
        finally:
            await server.insist("CONFIG SET maxmemory 0")

    async def _step_back(self) -> str:
        """Each time it stays where it was set: a step forward would end leases and waits early."""
        server = self._servers.server
        before = await server.time()
        server.step_back()
        for _ in range(round(NO_EFFECT / 0.05)):
            if before and 0 < await server.time() < before - HOUR / 2:
                return ""
            await asyncio.sleep(0.05)
        return "its clock did not step"

    async def _misconf(self, lasts: float) -> str:
        """Its file cannot grow, and with ``everysec`` it refuses writes (with ``always`` it would end).

        What is acknowledged under ``everysec`` is in the server's memory alone when its file cannot take it, and so
        nobody kills the server here; back under ``always``, all of it is written before the next answer.
        """
        world, server = self._servers, self._servers.server
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
        embedded = self._servers.embedded
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
        pid = self._servers.embedded.keeper if keeper else self._servers.embedded.server
        if pid is None:
            return "there is no embedded server"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return ""
