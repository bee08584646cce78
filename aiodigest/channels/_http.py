"""One POST over HTTP: which addresses it may go to, and whether the receiver may have it when it fails."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, cast

import httpcore2
from httpx2 import URL, InvalidURL

from aiodigest import ChannelError, InvalidArgument, OutcomeUnknown
from aiodigest import __version__ as version
from aiodigest.channels.common import Secrets, is_wrong_tls

MOST = 16_384  # bytes of an answer that are looked at
EXCERPT = 200  # characters of it in an error
PATIENCE = 5.0  # seconds for the contents of an answer, whose status is known by then
ANOTHER = 5.0  # seconds after which the next address of a host is tried
IDLE = 5.0  # seconds for which a connection is kept: if the server closes it just then, an outcome is unknown
HOPS = 3  # redirects that are followed

Address = IPv4Address | IPv6Address

# Public by their numbers, and yet inside: metadata and other services of clouds (192.0.0.192, 168.63.129.16).
INSIDE = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")))
GLOBAL, SIX_TO_FOUR, NAT64 = map(IPv6Network, ("2000::/3", "2002::/16", "64:ff9b::/96"))
NOWHERE = "is not to be found: check url"
UNTRUSTED = "has no TLS that is trusted: check url and tls_context, or SSL_CERT_FILE"
UNKNOWN = socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)  # of a name that nobody has
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
SCHEMES = {"basic", "bearer"}  # of logins, which are no secret
OURS = ("host", "content-length", "transfer-encoding", "connection", "accept-encoding", "content-type")


def is_public(address: Address) -> bool:
    """True for the addresses that anybody may be reached at from anywhere."""
    if isinstance(address, IPv6Address):
        if address in NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        return address.is_global and address in GLOBAL and address not in SIX_TO_FOUR
    inside = address.is_multicast or address.is_reserved or any(address in network for network in INSIDE)
    return address.is_global and not inside


class WrongSetUp(Exception):
    """No time mends why there is no connection; ``advice`` says of the receiver what to check."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


class Misled(WrongSetUp, httpcore2.ConnectError):
    """A host's name leads nowhere, or to where it may not."""


@dataclass(frozen=True)
class Rules:
    """The addresses that may be connected to: the public ones, and those of ``networks``; all if it is None."""

    networks: tuple[Any, ...] | None

    @staticmethod
    def of(allow_private: bool | str | Iterable[str]) -> Rules:
        """Return the rules that an argument stands for. Raises InvalidArgument."""
        if isinstance(allow_private, bool):
            return Rules(None if allow_private else ())
        try:
            return Rules(tuple(map(ip_network, [allow_private] if isinstance(allow_private, str) else allow_private)))
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"allow_private must be True, or networks such as '10.0.0.0/8': {error}") from None

    @property
    def are_open(self) -> bool:
        """True if any address is allowed that is not public."""
        return self.networks != ()

    def allow(self, address: Address) -> bool:
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return self.networks is None or is_public(address) or any(address in network for network in self.networks)


class Guarded(httpcore2.AsyncNetworkBackend):
    """Connects to the very addresses that the rules were asked of: another answer of the DNS would change nothing."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._network = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        found = await addresses_of(host, port)
        allowed = [str(address) for address in found if self._rules.allow(address)]
        if not allowed:
            reason = f"{host} is at {found[0]}, which is not public, and not in allow_private"
            raise Misled(reason, "may not be reached: check url and allow_private")
        for address in allowed[:-1]:
            with suppress(httpcore2.ConnectError, httpcore2.ConnectTimeout):
                return await self._network.connect_tcp(address, port, ANOTHER, local_address, socket_options)
        try:
            return await self._network.connect_tcp(allowed[-1], port, timeout, local_address, socket_options)
        except httpcore2.ConnectError as error:
            raise httpcore2.ConnectError(cause_of(error)) from None


async def addresses_of(host: str, port: int) -> list[Address]:
    """Return the addresses of a host, of which there is at least one. Raises ConnectError, or Misled if it has none."""
    try:
        return [ip_address(host)]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [ip_address(sockaddr[0]) for *_, sockaddr in found]
    except (OSError, ValueError) as error:
        reason = f"its name leads nowhere: {error}"
        if isinstance(error, OSError) and error.errno not in UNKNOWN:  # nobody could be asked
            raise httpcore2.ConnectError(reason) from None
        raise Misled(reason, NOWHERE) from None
    if not addresses:
        raise Misled("its name leads nowhere", NOWHERE)
    return list(dict.fromkeys(addresses))


@dataclass(frozen=True)
class Answer:
    """Answer of a receiver: ``name`` is its own, ``text`` the beginning of what it says, our secrets included."""

    name: str
    status: int
    headers: Mapping[str, str] = field(repr=False)
    text: str = field(repr=False)
    secrets: Callable[[], Secrets] = field(repr=False)

    @cached_property
    def reason(self) -> str:
        """The answer as one line, without secrets."""
        said = self.secrets().one_line(self.text)[:EXCERPT]
        return f"{self.name}: {self.status} {said}".rstrip()


@cache
def trusting_the_system() -> ssl.SSLContext:
    """Return the context of those who give none: the certificates are read once, since that takes long."""
    return httpcore2.default_ssl_context()


class Body:
    """The contents of a request, which know when their end is sent: from then on the receiver may have them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.is_sent = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data[:-1]
        self.is_sent = True
        yield self._data[-1:]

    async def trace(self, event: str, told: Mapping[str, Any]) -> None:
        """Note that the end could not even be handed to the system: the connection was lost before."""
        if event == "http11.send_request_body.failed" and isinstance(told["exception"], httpcore2.WriteError):
            self.is_sent = False


@dataclass
class Client:
    """Connections that are kept from request to request; proxies of the environment are not used.

    ``headers`` go with each request to the origin that it is meant for, and to no other. It is for one event loop.
    """

    rules: Rules
    headers: Mapping[str, str]
    timeout: float
    context: ssl.SSLContext | None
    redirects: bool
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=self.context or trusting_the_system(), keepalive_expiry=IDLE, max_connections=None,
            max_keepalive_connections=20, network_backend=Guarded(self.rules),
        )  # fmt: skip

    async def aclose(self) -> None:
        with suppress(Exception):
            await self._pool.aclose()

    async def post(self, url: URL, headers: Mapping[str, str], body: bytes, given: URL) -> Answer:
        """Return the answer to a request to ``url``, which comes of the URL that was ``given``.

        Raises ChannelError or WrongSetUp if there is none and the receiver cannot have the whole request, else
        OutcomeUnknown.
        """
        target, secrets = url, partial(secrets_of, given, self.headers)
        end = self.loop.time() + self.timeout
        for _ in range(HOPS + 1):
            answer = await self._ask(target, self._headers(url, target, headers, body), body, secrets, end)
            if not self.redirects or answer.status not in (307, 308) or "location" not in answer.headers:
                return answer
            target = self._next(target, answer)
        raise ChannelError(f"{name_of(url)}: it redirects more than {HOPS} times")

    def _headers(self, url: URL, target: URL, headers: Mapping[str, str], body: bytes) -> list[tuple[bytes, bytes]]:
        whole = {
            "Host": target.netloc.decode(), "User-Agent": f"aiodigest/{version}", "Accept-Encoding": "identity",
            "Content-Length": str(len(body)), **headers,
        }  # fmt: skip
        if (target.scheme, target.netloc) == (url.scheme, url.netloc):
            if url.userinfo:
                whole["Authorization"] = "Basic " + b64encode(f"{url.username}:{url.password}".encode()).decode()
            whole |= self.headers
        return [(name.encode(), value.encode()) for name, value in whole.items()]

    def _next(self, url: URL, answer: Answer) -> URL:
        """Return the URL that a redirect leads to."""
        try:
            target = url.join(answer.headers["location"])
            if url.scheme == "https" and target.scheme != "https":
                raise InvalidArgument("it is not https")
            return url_of(str(target), "it", self.rules)
        except (InvalidURL, ValueError):
            raise ChannelError(f"{answer.name}: {answer.status} to what may not be followed") from None

    async def _ask(
        self, url: URL, headers: list[tuple[bytes, bytes]], data: bytes, secrets: Callable[[], Secrets], end: float
    ) -> Answer:
        """Return the answer to one request, before the instant ``end`` by the loop's clock."""
        body, name = Body(data), name_of(url)
        target = httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            async with asyncio.timeout_at(end):
                response = await self._pool.handle_async_request(
                    httpcore2.Request("POST", target, headers=headers, content=body, extensions={"trace": body.trace})
                )
        except Exception as error:  # whatever the library lets through, of the TLS beneath it, too
            if isinstance(error, TimeoutError):
                said = f"no answer within {self.timeout:g} s"
            else:
                said = secrets().one_line(str(error) or type(error).__name__)
            reason = f"{name}: {said}"
            if body.is_sent:
                raise OutcomeUnknown(reason) from None
            if isinstance(error, Misled):
                raise WrongSetUp(reason, error.advice) from None
            if isinstance(error, httpcore2.ConnectError) and is_wrong_tls(error.__context__):
                raise WrongSetUp(reason, UNTRUSTED) from None
            raise ChannelError(reason) from None
        text = await self._beginning(response, end)
        found = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in response.headers}
        is_plain = found.get("content-encoding", "identity").strip().lower() == "identity"
        return Answer(name, response.status, found, text.decode(errors="replace") if is_plain else "", secrets)

    async def _beginning(self, response: httpcore2.Response, end: float) -> bytes:
        """Return the beginning of an answer's contents. They end, if they are short and come soon, so that the
        connection can be kept; whatever goes wrong with them, and at ``end``, the status is known."""
        found = b""
        try:
            async with asyncio.timeout_at(min(end, self.loop.time() + PATIENCE)):
                async for chunk in response.aiter_stream():
                    found += chunk
                    if len(found) > MOST:
                        break
        except Exception:
            pass
        finally:
            with suppress(Exception):
                await response.aclose()
        return found[:MOST]


def url_of(text: object, what: str, rules: Rules) -> URL:
    """Return a URL, whose host is allowed if it is an address. Raises InvalidArgument, which does not quote it."""
    secret = "(which is not shown: it may hold a secret)"
    try:
        url = URL(text if isinstance(text, str) else "")
        host = url.raw_host.decode()
    except (InvalidURL, ValueError):
        host, url = "", URL("")
    schemes = ("https", "http") if rules.are_open else ("https",)
    if not host or url.scheme not in schemes or url.port == 0:
        allowed = "a URL of https" + (" or http" if rules.are_open else ", or with allow_private of http")
        raise InvalidArgument(f"{what} must be {allowed} {secret}")
    try:
        address = ip_address(host)
    except ValueError:
        return url
    if not rules.allow(address):
        raise InvalidArgument(f"{what} leads to {address}, which is not public, and not in allow_private")
    return url


def headers_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers that a user gives. Raises InvalidArgument, which does not quote their values."""
    for name, value in headers.items():
        if not TOKEN.fullmatch(name) or name.lower() in OURS or name.lower().startswith("webhook-"):
            raise InvalidArgument(f"headers may not name {name!r}")
        if not VALUE.fullmatch(value):
            raise InvalidArgument(f"headers must have values of printable ASCII; that of {name!r} is none")
    if len({name.lower() for name in headers}) < len(headers):
        raise InvalidArgument("headers may have each header once, whatever its capitals")
    return dict(headers)


def name_of(url: URL) -> str:
    """Return what may be told of a URL."""
    return url.netloc.decode()


def secrets_of(url: URL, headers: Mapping[str, str]) -> Secrets:
    """Return the logins and passwords, and the parts of a URL and of headers that may be secret."""
    parts, logins = re.split(r"[/?&=;:]", url.raw_path.decode()), [f"{url.username}:{url.password}"]
    words = [word for value in headers.values() for word in value.split() if word.lower() not in SCHEMES]
    for word in words:
        parts += [word, *re.split(r'[=;:,"]', word)]
        with suppress(ValueError):  # which is no base64, or that of no text
            logins.append(b64decode(word, validate=True).decode())
    pairs = [(login, *login.split(":", 1)) for login in logins if login.partition(":")[2]]
    return Secrets(
        [each for login, _, password in pairs for each in (login, password)], [*parts, *(p[1] for p in pairs)]
    )


def cause_of(error: BaseException) -> str:
    """Return what was wrong in the first place: the library tells of it in general words."""
    while error.__cause__ is not None and str(error.__cause__):
        error = error.__cause__
    return str(error) or type(error).__name__
