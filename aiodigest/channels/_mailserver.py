"""A connection to a mail server: the dialogue, and what its answers mean for a digest."""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import cast

from aiosmtplib import SMTP, SMTPDataError, SMTPException, SMTPHeloError, SMTPResponse, SMTPResponseException

from aiodigest import ChannelError, OutcomeUnknown, Reject, RetryAfter
from aiodigest.channels._mail import Mail
from aiodigest.channels.common import Secrets, SetUp, is_wrong_tls

SOON = 5.0  # seconds after which a mail that did not get its turn is tried again
IDLE = 20.0  # seconds after which a connection is asked whether it still lives: routers forget
PROBE = 5.0  # seconds that it has for that, and for the goodbye
TICK = 0.02  # seconds between two looks at what is left to send of a large mail

CONNECT, MAIL, RCPT, DATA, END = "connecting", "MAIL FROM", "RCPT TO", "DATA", "the end of the mail"
SET_UP = {500, 501, 502, 503, 504, 530, 534, 535, 538}  # the server does not take what it is told, or not from us
OURS = ("5.1.7", "5.1.8")  # said of the sender's address
FULL = "5.2.2"
NOBODY = "5.1.1"
ADVICE = "rejects these settings: check host, port, tls, username, password and sender"
ENHANCED = re.compile(r"[245]\.\d{1,3}\.\d{1,3}\b")


@dataclass(frozen=True, repr=False)
class Options:
    """Settings to reach a mail server; ``name`` is what is told of it."""

    host: str
    port: int
    tls: str
    context: ssl.SSLContext | None
    username: str | None
    password: str | None
    hello: str | None
    timeout: float
    mute: bool

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass
class MailServer:
    """A connection that is kept from mail to mail; they go one after another. It is for one event loop."""

    options: Options
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        of = self.options
        self._client = SMTP(
            hostname=of.host, port=of.port, username=of.username, password=of.password, local_hostname=of.hello,
            timeout=None, use_tls=of.tls == "implicit", start_tls=of.tls == "starttls", tls_context=of.context,
        )  # fmt: skip
        self._turn = asyncio.Lock()
        self._stage = CONNECT  # of the dialogue: what was sent last
        self._is_clean = True  # no mail is half said
        self._used = 0.0  # when the server answered last, by the loop's clock
        self._lost = -inf, ""  # when it could not be reached the last time, and why
        self._set_up = SetUp(of.name)
        self._secrets = Secrets([of.password, f"\0{of.username}\0{of.password}"] if of.password else [])
        self._is_closed = False  # no mail begins any more

    async def send(self, mail: Mail) -> None:
        """Send a mail when it has its turn, in which no try of it is made; raise how that ended, as callbacks do."""
        began = self.loop.time()
        try:
            async with asyncio.timeout(self.options.timeout):
                await self._turn.acquire()
        except TimeoutError:
            raise RetryAfter(SOON) from None
        try:
            if self._is_closed:  # by then its channel has another
                raise RetryAfter(SOON)
            when, why = self._lost
            if when >= began:  # whoever waited for the connection shares its end
                raise ChannelError(why)
            await self._try(mail)
        finally:
            self._turn.release()
            if self._is_closed:  # a mail that was under way may have connected since
                self._drop()

    async def aclose(self) -> None:
        """Say goodbye to the server. Mails that wait for their turn are tried again without a charge."""
        self._is_closed = True
        if self._client.is_connected and not self._turn.locked():
            with suppress(SMTPException, OSError):
                async with asyncio.timeout(PROBE):
                    await self._client.quit()
        self._drop()
        await asyncio.sleep(0)  # until the socket is closed

    def leave(self) -> None:
        """Close the connection from another event loop, once the mail that is under way has ended."""

        def close() -> None:
            self._is_closed = True
            if not self._turn.locked():
                self._drop()

        with suppress(RuntimeError):  # its loop is closed, and so is all that was in it
            self.loop.call_soon_threadsafe(close)

    async def _try(self, mail: Mail) -> None:
        self._stage = CONNECT
        try:
            async with asyncio.timeout(self.options.timeout):
                await self._dialogue(mail)
        except SMTPResponseException as answer:
            outcome = self._meaning(answer, mail)
        except (SMTPException, OSError) as error:
            outcome = self._lost_by(error)
        except Reject:  # by us, before the server heard of it
            raise
        except BaseException:  # such as a cancellation: nobody knows how far the dialogue is
            self._drop()
            raise
        else:
            self._set_up.worked()
            self._used = self.loop.time()
            return
        if self._stage == CONNECT:
            self._lost = self.loop.time(), str(outcome)
        raise outcome from None

    # The dialogue

    async def _dialogue(self, mail: Mail) -> None:
        kept = await self._connected()
        try:
            await self._envelope(mail)
        except SMTPException:
            if not kept or self._client.is_connected:
                raise
            # The server has closed it, or does so now, and nothing of this mail was said to it that counts.
            self._stage = CONNECT
            await self._connected()
            await self._envelope(mail)
        await self._content(mail.data)

    async def _connected(self) -> bool:
        """See that there is a connection; True if it was there before."""
        client = self._client
        if self._is_ahead():
            self._drop()
        if client.is_connected and not (self._is_clean and self.loop.time() - self._used < IDLE):
            try:
                async with asyncio.timeout(min(PROBE, self.options.timeout / 3)):
                    await client.rset()
            except (SMTPException, OSError):
                self._drop()
        is_kept = client.is_connected
        if not is_kept:
            await client.connect(timeout=None)
            if client.is_ehlo_or_helo_needed:
                await self._greet()
        self._is_clean = True
        return is_kept

    async def _greet(self) -> None:
        try:
            await self._client.ehlo()
        except SMTPHeloError as answer:
            if answer.code < 500 or not self._client.is_connected:
                raise
            await self._client.helo()  # as those of before 1995 want it

    def _is_ahead(self) -> bool:
        """True if the server has said more than it was asked: from then on each answer would be that to another
        question. The library keeps it, and has no public way to see it."""
        return bool(getattr(self._client.protocol, "_buffer", b""))

    async def _ask(self, command: bytes) -> SMTPResponse:
        if self._is_ahead():
            raise SMTPException("it says more than it was asked")
        return await self._client.execute_command(command)

    async def _envelope(self, mail: Mail) -> None:
        client = self._client
        if mail.utf8 and not client.supports_extension("smtputf8"):
            if not mail.sender.isascii():
                raise SMTPException(f"it takes no sender with such letters: {mail.sender} (no SMTPUTF8)")
            raise Reject(f"{self.options.name} takes no address with such letters: {mail.recipient} (no SMTPUTF8)")
        limit = client.esmtp_extensions.get("size", "")
        if limit.isdecimal() and len(limit) <= 20 and 0 < int(limit) < len(mail.data):
            raise Reject(f"{self.options.name} takes mails of {limit} bytes, and this one has {len(mail.data)}")
        self._is_clean = False
        await self._say(MAIL, f"<{mail.sender}>{' BODY=8BITMIME SMTPUTF8' * mail.utf8}")
        await self._say(RCPT, f"<{mail.recipient}>")

    async def _say(self, stage: str, what: str) -> None:
        self._stage = stage
        answer = await self._ask(f"{stage}:{what}".encode())
        if not 200 <= answer.code < 300:
            raise SMTPResponseException(answer.code, answer.message)

    async def _content(self, data: bytes) -> None:
        """Send the contents, and note when their end is sent: from then on the mail may have arrived.

        The library would send all at once, and nobody would know whether the end was among it.
        """
        self._stage = DATA
        started = await self._ask(b"DATA")
        protocol, transport = self._client.protocol, cast("asyncio.WriteTransport | None", self._client.transport)
        if started.code != 354 or protocol is None or transport is None:
            raise SMTPDataError(started.code, started.message)
        answer = asyncio.create_task(protocol.read_response())  # which may come in the middle
        answer.add_done_callback(lambda task: task.cancelled() or task.exception())  # which nobody may ask for
        try:
            await asyncio.sleep(0)  # it listens from now on: before that, the library drops what comes
            transport.write(re.sub(rb"(?m)^\.", b"..", data))
            while transport.get_write_buffer_size() and not answer.done():
                await asyncio.wait([answer], timeout=TICK)
            if not answer.done():
                self._stage = END
                transport.write(b".\r\n")
            ending = await answer
        finally:
            answer.cancel()
        if self._stage != END:  # nobody knows what the server makes of the rest
            self._drop()
        elif 200 <= ending.code < 300:
            self._is_clean = True
            return
        raise SMTPDataError(ending.code, ending.message)

    def _drop(self) -> None:
        """Close the connection at once: what is left to send of a mail must not arrive later."""
        if (transport := self._client.transport) is not None:
            cast("asyncio.WriteTransport", transport).abort()
        self._client.close()

    # What it means

    def _lost_by(self, error: Exception) -> Exception:
        """Return how a mail has ended without an answer."""
        stage = self._stage
        self._drop()
        if isinstance(error, TimeoutError) and not str(error):
            said = f"no answer within {self.options.timeout:g} s"
        else:
            said = self._told(str(error.__cause__ or "") or str(error)) or type(error).__name__
        reason = f"{self.options.name}, {stage}: {said}"
        if stage == END:
            return OutcomeUnknown(reason)
        if stage == CONNECT and _is_set_up(error):
            self._tell(0, reason)
        return ChannelError(reason)

    def _meaning(self, answer: SMTPResponseException, mail: Mail) -> Exception:
        """Return how a mail has ended by the server's answer."""
        stage, code, text = self._stage, answer.code, self._told(answer.message)
        reason = f"{self.options.name}, {stage}: {code} {text}"
        if not 400 <= code < 600:  # no answer at all
            return self._lost_by(SMTPException(f"{code} {text}" if code > 0 else text))
        found = ENHANCED.match(text)
        status = found[0] if found else ""
        if code < 500:
            return ChannelError(reason)
        # It takes mail for its own domains alone, or from who has logged in
        is_no_relay = stage == RCPT and status[:4] in ("", "5.7.") and "relay" in text.lower()
        if stage in (CONNECT, MAIL) or code in SET_UP or status in OURS or is_no_relay:
            self._tell(code, reason)
            return ChannelError(reason)
        if status == FULL or (code == 552 and stage == RCPT and not status):
            return ChannelError(reason)
        return Reject(f"{reason} ({mail.recipient})", mute=self.options.mute and status == NOBODY)

    def _told(self, text: str) -> str:
        """Return what somebody says in one line, without the password that a server may quote."""
        return self._secrets.one_line(text)

    def _tell(self, code: int, reason: str) -> None:
        """Log that no mail goes out as things are, once until one does."""
        self._set_up.failed((self._stage, code), ADVICE, reason)


def _is_set_up(error: BaseException | None) -> bool:
    """True if only another set-up could help: TLS or a login that the server does not have, or a wrong certificate."""
    return type(error) is SMTPException or is_wrong_tls(error) or (error is not None and _is_set_up(error.__cause__))
