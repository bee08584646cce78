"""Real mail servers that answer, at each stage of the dialogue, what a test wants, or die there."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from typing import Any, Self, cast

from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword

DIE = "die"  # close the connection without an answer
TAKE_AND_DIE = "take and die"  # the mail is accepted, and nobody is told
HANG = "hang"  # never answer
TAKE_AND_HANG = "take and hang"
STAGES = ("greeting", "EHLO", "MAIL", "RCPT", "DATA", "content", "end")

Script = Callable[[str, str], "str | None"]


@dataclass
class Received:
    """A mail that a server has accepted."""

    sender: str
    recipient: str
    data: bytes
    options: list[str]

    @property
    def message(self) -> EmailMessage:
        return message_from_bytes(self.data, policy=default)

    @property
    def id(self) -> str:
        return str(self.message["Message-ID"])


@dataclass
class Mailbox:
    """A mail server on a free port of the loopback interface, in the test's own event loop.

    ``script`` is asked at each stage, with what the client said (at the end with the recipient), and returns a reply,
    one of the above, or None for what a server says.
    """

    script: Script = lambda stage, argument: None
    tls: ssl.SSLContext | None = None  # offered by STARTTLS, or from the first byte on
    implicit: bool = False
    password: str | None = None  # that lets in
    utf8: bool = False
    size: int | None = None
    port: int = 0
    mails: list[Received] = field(default_factory=list[Received])
    said: list[str] = field(default_factory=list[str])  # verbs, with what follows them
    connections: int = 0
    open: set[Dialogue] = field(default_factory=set["Dialogue"])
    _server: asyncio.Server | None = None
    _reached: Counter[str] = field(default_factory=Counter[str])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.stop()

    async def start(self) -> None:
        loop, wrapped = asyncio.get_running_loop(), self.tls if self.implicit else None
        self._server = await loop.create_server(lambda: Dialogue(self), "127.0.0.1", self.port, ssl=wrapped)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections, and end those that there are."""
        assert self._server is not None
        self._server.close()
        self.hang_up()
        for _ in range(10):  # turns of the loop, in which what was aborted ends
            await asyncio.sleep(0)

    def hang_up(self) -> None:
        for dialogue in [*self.open]:
            dialogue.abort()

    async def reaches(self, stage: str, times: int = 1) -> None:
        """Wait until a stage was reached so often."""
        async with asyncio.timeout(60):
            while self._reached[stage] < times:
                self._changed.clear()
                await self._changed.wait()

    async def is_left(self) -> None:
        """Wait until nobody is connected."""
        async with asyncio.timeout(60):
            while self.open:
                self._changed.clear()
                await self._changed.wait()

    def answer(self, stage: str, argument: str) -> str | None:
        self._reached[stage] += 1
        self._changed.set()
        self.said.append(f"{stage} {argument}".rstrip())
        return self.script(stage, argument)

    def authenticate(self, server: object, session: object, envelope: object, how: str, login: object) -> AuthResult:
        assert isinstance(login, LoginPassword)
        return AuthResult(success=login.password.decode() == self.password, handled=False)

    async def handle_DATA(self, dialogue: Dialogue, session: object, envelope: Any) -> str:
        [recipient] = envelope.rcpt_tos
        received = Received(envelope.mail_from, recipient, envelope.original_content, envelope.mail_options)
        reply = self.answer("end", recipient)
        if reply in (None, TAKE_AND_DIE, TAKE_AND_HANG):
            self.mails.append(received)
        if reply in (DIE, TAKE_AND_DIE, HANG, TAKE_AND_HANG):
            await dialogue.end(HANG if reply in (HANG, TAKE_AND_HANG) else DIE)
        return reply or "250 2.0.0 taken"


class Dialogue(SMTP):
    """One connection of a client."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a password may be sent without TLS, as some tests want it
            self._prepare(mailbox)
        self._is_greeted = False

    def _prepare(self, mailbox: Mailbox) -> None:
        upgrades, locked = None if mailbox.implicit else mailbox.tls, mailbox.password is not None
        super().__init__(
            mailbox, hostname="mx.example", tls_context=upgrades, auth_require_tls=upgrades is not None,
            authenticator=mailbox.authenticate if locked else None, auth_required=locked, timeout=1e7,
            data_size_limit=mailbox.size, enable_SMTPUTF8=mailbox.utf8, loop=asyncio.get_running_loop(),
        )  # fmt: skip

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.mailbox.open.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.mailbox.open.discard(self)
        self.mailbox._changed.set()
        super().connection_lost(error)

    async def _handle_client(self) -> None:
        with suppress(ConnectionError):  # which is what a client is who goes away
            await super()._handle_client()

    def abort(self) -> None:
        if self.transport is not None:
            cast("asyncio.WriteTransport", self.transport).abort()

    async def end(self, how: str) -> None:
        """Go on no more: hang until the other end, or this one now, closes the connection."""
        if how != HANG:
            self.abort()
        await asyncio.Event().wait()

    async def push(self, status: Any) -> None:
        if not self._is_greeted:
            self._is_greeted = True
            self.mailbox.connections += 1
            if await self._scripted("greeting"):
                return
        await super().push(status)

    async def _scripted(self, stage: str, argument: str | None = None) -> bool:
        reply = self.mailbox.answer(stage, argument or "")
        if reply is None:
            return False
        if reply in (DIE, HANG):
            await self.end(reply)
        await super().push(reply)
        if reply.startswith("421"):
            await self._writer.drain()
            self._writer.close()
        return True

    async def smtp_EHLO(self, hostname: str) -> None:
        if not await self._scripted("EHLO", hostname):
            await super().smtp_EHLO(hostname)

    async def smtp_STARTTLS(self, arg: str) -> None:
        if not await self._scripted("STARTTLS", arg):
            await super().smtp_STARTTLS(arg)

    async def smtp_AUTH(self, arg: str) -> None:
        if not await self._scripted("AUTH", arg.partition(" ")[0]):
            await super().smtp_AUTH(arg)

    async def smtp_MAIL(self, arg: str | None) -> None:
        if not await self._scripted("MAIL", arg):
            await super().smtp_MAIL(arg)

    async def smtp_RCPT(self, arg: str | None) -> None:
        if not await self._scripted("RCPT", arg):
            await super().smtp_RCPT(arg)

    async def smtp_RSET(self, arg: str | None) -> None:
        if not await self._scripted("RSET", arg):
            await super().smtp_RSET(arg)

    async def smtp_QUIT(self, arg: str | None) -> None:
        if not await self._scripted("QUIT", arg):
            await super().smtp_QUIT(arg)

    async def smtp_DATA(self, arg: str | None) -> None:
        if await self._scripted("DATA", arg):
            return
        reply = self.mailbox.answer("content", "")
        if reply is None:
            await super().smtp_DATA(arg)
            return
        await super().push("354 go on")
        await self._reader.read(100)  # of what comes
        if reply in (DIE, HANG):
            await self.end(reply)
        await super().push(reply)
        rest = b""
        while rest != b"\r\n.\r\n" and (more := await self._reader.read(65_536)):
            rest = (rest + more)[-5:]


def script(**replies: str) -> Script:
    """Give the same reply whenever a stage is reached."""
    return lambda stage, argument: replies.get(stage)


def one_after_another(stage: str, *replies: str | None) -> Script:
    """Give replies at a stage, one each time; after the last what a server says."""
    left = iter(replies)
    return lambda reached, argument: next(left, None) if reached == stage else None


@asynccontextmanager
async def mail_server(of: Script | None = None, **options: Any) -> AsyncGenerator[Mailbox, None]:
    """Run a mail server."""
    async with Mailbox(of or script(), **options) as mailbox:
        yield mailbox
