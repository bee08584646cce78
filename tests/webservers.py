"""Real web servers that answer what a test wants, or die before, in the middle of, or after that."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from json import loads
from typing import Any, Self

import trustme

DIE = "die"  # close the connection without an answer
HALF = "half"  # begin an answer, and close the connection
HANG = "hang"  # never answer
ENDLESS = "endless"  # answer 200, with contents that never end
STALLED = "stalled"  # answer 200, with contents that do not come
WRONG = "wrong"  # answer what is no HTTP
STAGES = ("connection", "head", "request")


@dataclass
class Request:
    """Request of a client."""

    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])  # names in small letters
    body: bytes = b""

    @property
    def json(self) -> Any:
        return loads(self.body)


@dataclass
class Reply:
    """An answer. Its ``Content-Length`` is added."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def __bytes__(self) -> bytes:
        phrase = HTTPStatus(self.status).phrase if self.status in set(HTTPStatus) else "Something"
        head = [f"HTTP/1.1 {self.status} {phrase}", f"Content-Length: {len(self.body)}"]
        head += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*head, "", ""]).encode("latin-1") + self.body


Script = Callable[[str, Request], "Reply | str | None"]


@dataclass
class Site:
    """A web server on a free port of the loopback interface, in the test's own event loop.

    ``script`` is asked at each stage (a connection is there, the head of a request, all of it), and returns a reply,
    one of the words above, or None to go on (after a whole request: 200).
    """

    script: Script = lambda stage, request: None
    tls: ssl.SSLContext | None = None
    port: int = 0
    requests: list[Request] = field(default_factory=list[Request])  # that came in whole
    open: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])
    connections: int = 0
    was_read_through: bool = False  # an endless answer
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _reached: Counter[str] = field(default_factory=Counter[str])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://localhost:{self.port}"

    async def __aenter__(self) -> Self:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # so that a request can be too large for it
        listening.bind(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._serve, sock=listening, ssl=self.tls)
        self.port = listening.getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Refuse connections, and end those that there are."""
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    async def reaches(self, stage: str, times: int = 1) -> None:
        """Wait until a stage was reached so often."""
        async with asyncio.timeout(60):
            while self._reached[stage] < times:
                self._changed.clear()
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        try:
            await self._act("connection", Request(), writer)
            while True:
                await self._request(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            pass  # which is what ends a connection
        finally:
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        request = Request(method, target, headers)
        await self._act("head", request, writer)
        request.body = await reader.readexactly(int(headers["content-length"]))
        self.requests.append(request)
        if not await self._act("request", request, writer):
            writer.write(bytes(Reply()))

    async def _act(self, stage: str, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Do what the script says at a stage; False if it says nothing."""
        self._reached[stage] += 1
        self._changed.set()
        reply = self.script(stage, request)
        match reply:
            case None:
                return False
            case Reply():
                writer.write(bytes(reply))
                await writer.drain()
                return True
            case "hang":
                await asyncio.Event().wait()
            case "half":
                writer.write(b"HTTP/1.1 200 O")
                await writer.drain()
                with suppress(OSError):
                    writer.write_eof()
            case "wrong":
                writer.write(b"220 mail.example ESMTP\r\n")
                await writer.drain()
            case "stalled":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
                await asyncio.Event().wait()
            case "endless":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for _ in range(300):  # 20 MB, which is more than buffers hold
                    writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
                    await writer.drain()
                self.was_read_through = True
            case _:
                pass
        raise ConnectionResetError(reply)


def at(stage: str, reply: Reply | str | None) -> Script:
    """Give the same reply whenever a stage is reached."""
    return lambda reached, request: reply if reached == stage else None


def replying(*replies: Reply | str | None) -> Script:
    """Give replies to whole requests, one each time; after the last 200."""
    left = iter(replies)
    return lambda stage, request: next(left, None) if stage == "request" else None


def status(number: int, **headers: str) -> Script:
    """Answer with a status; of a header's name, underscores are hyphens."""
    return at("request", Reply(number, headers={name.replace("_", "-"): value for name, value in headers.items()}))


def certificates() -> tuple[ssl.SSLContext, ssl.SSLContext, ssl.SSLContext]:
    """Return what serves ``localhost``, what serves another name, and what trusts both."""
    authority: Any = trustme.CA()
    contexts = list[ssl.SSLContext]()
    for name in ("localhost", "other.example"):
        contexts.append(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        authority.issue_cert(name).configure_cert(contexts[-1])
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return contexts[0], contexts[1], trusting


@asynccontextmanager
async def web_server(script: Script | None = None, **options: Any) -> AsyncGenerator[Site]:
    """Run a web server."""
    async with Site(script or (lambda stage, request: None), **options) as site:
        yield site
