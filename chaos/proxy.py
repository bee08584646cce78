"""A TCP proxy before the server that misbehaves as networks do."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Literal, Self

Mode = Literal["pass", "delay", "cut", "half-close", "truncate", "black hole", "late"]

CHUNK = 1 << 16


class Connection:
    """A client's connection and the one to the server behind it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.halved: asyncio.StreamWriter | None = None  # the side that was told so, and gets no more

    def cut(self) -> None:
        """End both at once: what was not sent yet is gone."""
        self.client.transport.abort()
        self.server.transport.abort()

    def reset(self) -> None:
        """The same, and the client cannot even read what has arrived."""
        opened: socket.socket = self.client.get_extra_info("socket")
        with suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.cut()

    def half_close(self, client: bool) -> None:
        """Tell one side that the other sends no more; the other goes on as if nothing had happened."""
        self.halved = self.client if client else self.server
        with suppress(OSError):
            self.halved.write_eof()


class Proxy:
    """Passes everything on until a mode other than ``pass`` is set.

    ``delay`` holds each piece back for a while. ``cut`` resets all connections, and each new one. ``half-close`` ends
    one direction of all that there are, by turns that to the client and that to the server. ``truncate`` sends half
    of the next reply of each connection, and ends it. In ``black hole`` nothing moves, and what was sent meanwhile
    arrives at its end: so does what TCP sends again. ``late`` is a black hole for the connections that there are, while
    new ones work, and what was sent arrives at its end although the client may be gone: the kernel of a client whose
    packets were dropped sends them again later than those of its new connection.
    """

    def __init__(self, port: int, delay: float = 0.3) -> None:
        self._target = port
        self._delay = delay
        self._mode: Mode = "pass"
        self._passing = asyncio.Event()
        self._passing.set()
        self._connections: set[Connection] = set()
        self._old: set[Connection] = set()  # that the present mode concerns
        self._listener: asyncio.Server | None = None
        self.affected = 0  # how many connections the present mode has met

    @property
    def url(self) -> str:
        assert self._listener is not None
        return f"redis://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.set("pass")
        for connection in self._connections:
            connection.cut()

    def set(self, mode: Mode) -> None:
        self._mode, self.affected = mode, 0
        self._old = set(self._connections)
        if mode in ("black hole", "late"):
            self._passing.clear()
        else:
            self._passing.set()
        if mode in ("cut", "half-close"):
            self.affected = len(self._connections)
        for number, connection in enumerate(self._connections):
            if mode == "cut":
                connection.reset()
            elif mode == "half-close":
                connection.half_close(client=number % 2 == 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "cut":
            self.affected += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=CHUNK)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(writer, server_writer)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(connection, reader, server_writer))
                group.create_task(self._answer(connection, server_reader, writer))
        except* OSError:
            pass
        finally:
            self._connections.discard(connection)
            connection.cut()

    async def _pass_on(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while some := await reader.read(CHUNK):
            await self._hold_back(connection)
            if connection.halved is not writer:
                writer.write(some)
                await writer.drain()
        await self._pass(connection)
        connection.cut()

    async def _answer(self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(CHUNK):
            await self._hold_back(connection)
            if self._mode == "truncate":
                self.affected += 1
                writer.write(some[: len(some) // 2])
                await writer.drain()
                break
            if connection.halved is not writer:
                writer.write(some)
                await writer.drain()
        await self._pass(connection)
        writer.close()
        connection.cut()

    async def _pass(self, connection: Connection) -> None:
        if self._mode != "late" or connection in self._old:
            await self._passing.wait()

    async def _hold_back(self, connection: Connection) -> None:
        if self._mode == "delay":
            self.affected += 1
            await asyncio.sleep(self._delay)
        if self._mode == "black hole" or (self._mode == "late" and connection in self._old):
            self.affected += 1
            await self._passing.wait()
