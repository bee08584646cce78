"""``SMTP``: digests as mails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from inspect import isawaitable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal, get_args

from aiodigest import ConfigurationError, Digest, InvalidArgument, Reject
from aiodigest.arguments import can_ask, duration, require, whole
from aiodigest.channels._mail import ONE, address_of, link_of, write
from aiodigest.channels.common import Channel, library, named_authorities, rendered_by
from aiodigest.errors import shown
from aiodigest.rendering import Render

if TYPE_CHECKING:
    from ssl import SSLContext

    from aiodigest.channels._mailserver import MailServer

TLS = Literal["implicit", "starttls", "none"]
PORTS: dict[TLS, int] = {"implicit": 465, "starttls": 587, "none": 25}


class SMTP(Channel):
    """Sends each digest as a mail to one address, through a mail server. Needs the extra ``smtp``.

    One connection is kept, and mails go through it one after another. The ``Message-ID`` is made from ``digest.id``, so
    that a mail of which nobody knows whether it has arrived is sent again under the same one. The mails of a timeline
    are a thread.

    A digest is tried again if there is no connection, or it is lost before the end of the mail was sent; after an
    answer of 4xx; after one of 5xx before there is a recipient (greeting, login, sender), or because the server relays
    no mail for us (the log has one ERROR until a mail goes out); and if the mailbox is full (5.2.2). Any other 5xx for
    the recipient or the contents is a ``Reject``.
    It is an ``OutcomeUnknown`` if no answer came after the end of the mail, and a ``RetryAfter``, which charges no
    attempt, if it did not get its turn within ``timeout``.

    Raises InvalidArgument if an argument is not allowed, and ConfigurationError if aiosmtplib is not installed, or a
    password would be sent to another machine without TLS.

    Parameters
    ----------
    host : str
        The mail server.
    port : int or None, default None
        By default that of ``tls``: 587 for "starttls", 465 for "implicit", 25 for "none".
    sender : str
        The address from which mails come, such as ``"Shop <news@shop.example>"``; its domain is that of
        ``Message-ID``.
    to : str, or a plain or async function from a key to a str, or None, default None
        The address to which a timeline's digests go; None is the key itself. One without an address (None, ``""``, or
        what is no address) becomes a dead letter.
    username : str or None, default None
        To log in; None does not.
    password : str or None, default None
        To log in.
    tls : "starttls", "implicit" or "none", or None, default None
        None is "implicit" on port 465, "none" for ``localhost`` and loopback addresses, and otherwise "starttls", which
        sends nothing to a server that does not offer it.
    tls_context : ssl.SSLContext or None, default None
        By default the certificates of the system are trusted.
    hello : str or None, default None (the full name of this machine)
        The name that the server is told: ASCII without spaces.
    render : function from a digest to a Message, or None, default None (``Template()``)
        Makes the subject, the text and the HTML.
    unsubscribe : str, or a function from a key to a str, or None, default None
        The link in ``List-Unsubscribe``, of https, http or mailto; ``""`` for none.
    one_click : bool, default False
        Says that a ``POST`` to the link unsubscribes at once (RFC 8058), so that readers get a button for it.
    mute : bool, default False
        Mutes the timeline of a recipient whom the server does not know (5.1.1).
    timeout : seconds, default 30
        For one try, and before it for its turn; both together must be shorter than the engine's ``delivery_timeout``.
    """

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        sender: str,
        to: str | Callable[[str], str | Awaitable[str | None] | None] | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: TLS | None = None,
        tls_context: SSLContext | None = None,
        hello: str | None = None,
        render: Render | None = None,
        unsubscribe: str | Callable[[str], str] | None = None,
        one_click: bool = False,
        mute: bool = False,
        timeout: float | timedelta = 30,
    ) -> None:
        with library("aiosmtplib", "smtp"):
            from aiodigest.channels._mailserver import MailServer, Options

        require(_is_host(host), "host", "a name or an address, without a port (give port=)", host)
        require(tls is None or tls in get_args(TLS), "tls", "'starttls', 'implicit' or 'none'", tls)
        require((username is None) == (password is None), "username", "given with a password", username)
        require(hello is None or _is_hello(hello), "hello", "1 to 255 characters of ASCII without spaces", hello)
        _check_login(username, "username")
        _check_login(password, "password")
        here = _is_loopback(host)
        if tls is None:
            tls = "implicit" if port == PORTS["implicit"] else "none" if here else "starttls"
        if username is not None and tls == "none" and not here:
            raise ConfigurationError(f"a password goes to {host} over TLS alone: leave out tls='none'")
        port = PORTS[tls] if port is None else whole(port, "port", 1, 65_535)
        if to is not None and not callable(to):
            address_of(to, "to")
        self._sender = address_of(sender, "sender")
        self._to = to
        self._unsubscribe = unsubscribe
        self._one_click = one_click
        if isinstance(unsubscribe, str):
            link_of(unsubscribe, "unsubscribe", one_click=one_click)
        elif unsubscribe is not None:
            require(can_ask(unsubscribe), "unsubscribe", "a link, or a function from a key to one", unsubscribe)
        elif one_click:
            raise InvalidArgument("one_click must come with unsubscribe, the link that is posted to")
        self._render = rendered_by(render)
        limit = duration(timeout, "timeout", 0.001)
        context = None if tls == "none" else tls_context or named_authorities()
        self._options = Options(host, port, tls, context, username, password, hello, limit, mute)
        self._connect = MailServer
        self._server: MailServer | None = None

    def __repr__(self) -> str:
        return f"SMTP({self._options.host!r}, {self._options.port})"

    async def __call__(self, digest: Digest[Any], /, to: str | None = None) -> None:
        """Send a digest, to the address ``to`` if one is given."""
        recipient = await self._recipient(digest.key, to)
        message = self._render(digest)
        link = self._unsubscribe(digest.key) if callable(self._unsubscribe) else self._unsubscribe or ""
        one_click = self._one_click and bool(link)
        if link:
            link_of(link, "unsubscribe", one_click=one_click)
        server = self._server
        if server is None or server.loop is not asyncio.get_running_loop():
            await self.aclose()
            server = self._server = self._connect(self._options)
        await server.send(write(digest, message, self._sender, recipient, link, one_click))

    async def aclose(self) -> None:
        """Close the connection, and raise nothing. It opens again when it is used."""
        server, self._server = self._server, None
        if server is not None and server.loop is asyncio.get_running_loop():
            await server.aclose()
        elif server is not None:
            server.leave()

    async def _recipient(self, key: str, to: str | None) -> Any:
        """Return the address of a timeline; raise Reject if it has none, and InvalidArgument if it has several."""
        found: object = to
        if to is None:
            found = self._to(key) if callable(self._to) else key if self._to is None else self._to
            if isawaitable(found):
                found = await found
        if not found:
            raise Reject(f"there is no address for {shown(key)}")
        try:
            return address_of(found, "to")
        except InvalidArgument as error:
            if ONE in str(error):  # a mistake in the program, and not of the one who gave an address
                raise
            raise Reject(str(error)) from None


def _is_host(host: object) -> bool:
    if not isinstance(host, str) or not host or not host.isprintable():
        return False
    with suppress(ValueError):
        return bool(ip_address(host))
    return not any(char in host for char in ":/@[] ")


def _is_hello(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch("[!-~]{1,255}", name) is not None


def _check_login(text: object, what: str) -> None:
    """Refuse what no login can tell a server; the error must not show a password."""
    if text is None:
        return
    try:
        fits = isinstance(text, str) and text != "" and b"\0" not in text.encode()
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidArgument(f"{what} must be text that UTF-8 can hold, not empty and without NUL")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
