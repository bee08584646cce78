"""Where a server is: a URL or a client, and the sentinels that know which server is the primary."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast
from urllib.parse import unquote, urlsplit

import hiredis
from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.sentinel import SentinelConnectionPool

from aiodigest.errors import ConfigurationError
from aiodigest.faults import FORBIDDEN, code_of
from aiodigest.scripts import Argument

Source: TypeAlias = "str | Redis"

SENTINEL_PORT = 26379
LONGEST = 4_096  # characters of a URL
ALLOWED = (
    "redis://host:port/db, rediss://host:port/db, unix:///path?db=0, redis+sentinel://host1,host2:port/service/db, "
    "rediss+sentinel://..., embedded://, embedded:///folder, or (in Python) a redis.asyncio.Redis client"
)
ESCAPE = "a / ? # or @ in a password must be escaped (%2F %3F %23 %40)"

# what is taken over from a client: where and who, never how replies are read, repeated or timed
COPIED = {"host", "port", "path", "db", "username", "password", "credential_provider", "client_name"}
TLS = ("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_ciphers", "ssl_min_version")


class Wire(Protocol):
    """What is used of redis-py's connections."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = ...) -> None: ...
    async def can_read(self) -> bool: ...
    async def send_packed_command(self, command: bytes, check_health: bool = ...) -> None: ...
    async def read_response(self) -> object: ...


async def send(wire: Wire, *command: Argument) -> None:
    """Send a command; hiredis packs a large one six times as fast as redis-py does."""
    packed = cast("bytes", cast("Any", hiredis).pack_command(command))  # its own type is of one argument
    await wire.send_packed_command(packed, check_health=False)


async def drop(wire: Wire) -> None:
    """Close a connection without waiting for its other end."""
    with suppress(exceptions.RedisError, OSError):
        await wire.disconnect(nowait=True)


def new_wire(make: Callable[..., Wire], settings: Mapping[str, object]) -> Wire:
    """A connection that is not connected yet; ConfigurationError if TLS cannot be set up: no server would mend that."""
    wire = make(**settings)
    context = getattr(wire, "ssl_context", None)
    try:
        if context is not None:
            context.get()  # redis-py keeps it for connecting
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        used = ", ".join(f"{name}={settings[name]!r}" for name in TLS if settings.get(name) is not None)
        raise ConfigurationError(f"TLS cannot be set up with {used}: {error}") from None
    return wire


def hide_password(url: str) -> str:
    """The URL as it may be shown: with ``***`` for its password, wherever it stands.

    All that comes before the last ``@`` may be a password, in which somebody forgot to escape a ``/`` or a ``#``; so
    may what follows a ``&`` in the query and is no parameter.
    """
    secret = r"([?&][^=&?]*(?:pass|secret|token)[^=&]*)=[^&]*(?:&[^=&]*(?=&|$))*"
    url = re.sub(secret, r"\1=***", url, flags=re.IGNORECASE)
    head, at, host = url.rpartition("@")
    if not at:
        return url
    scheme, mark, login = head.partition("://") if "://" in head else ("", "", head)
    user, colon, _ = login.partition(":")
    return f"{scheme}{mark}{user if colon else ''}{colon}***@{host}"


@dataclass(frozen=True)
class Sentinels:
    """The sentinels of a service: whoever is its primary, they are told first."""

    service: str
    make: Callable[..., Wire]
    settings: Mapping[str, object] = field(repr=False)  # the password is among them
    addresses: list[tuple[str, int]]  # who answered last is asked first

    @property
    def ask(self) -> tuple[Callable[..., Wire], Mapping[str, object]]:
        """What a connection to a sentinel is made of, but for its address."""
        return self.make, self.settings

    async def primary(self, timeout: float) -> Mapping[str, object]:
        """Host and port of the primary.

        Each sentinel has a share of the time, so that those that are dead leave some to the others and to the primary.
        """
        share, problems, refusals = timeout / (len(self.addresses) + 1), list[str](), 0
        for address in list(self.addresses):
            try:
                async with asyncio.timeout(share):
                    flags, host, port = await self._ask(address, share)
            except (exceptions.RedisError, OSError) as error:
                refusals += code_of(error) in FORBIDDEN
                problem = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
            else:
                if "master" in flags and not {"s_down", "o_down"} & flags:
                    self.addresses.remove(address)
                    self.addresses.insert(0, address)
                    return {"host": host, "port": port}
                problem = "it sees the primary down"
            problems.append(f"{place(*address)}: {problem}")
        message = f"no sentinel names a primary of {self.service!r} ({'; '.join(problems)})"
        if refusals == len(problems):  # else it is one that is set up wrong, or the others are away
            raise ConfigurationError(message)
        raise exceptions.ConnectionError(message)

    async def _ask(self, address: tuple[str, int], timeout: float) -> tuple[set[str], str, int]:
        """The flags, host and port that a sentinel knows of the primary."""
        host, port = address
        wire = new_wire(self.make, {**self.settings, "host": host, "port": port, "socket_connect_timeout": timeout})
        try:
            await wire.connect()
            await send(wire, "SENTINEL", "MASTER", self.service)
            reply = await wire.read_response()
        finally:
            await drop(wire)
        try:
            words = [item.decode() for item in cast("list[bytes]", reply)]
            known = dict(zip(words[::2], words[1::2], strict=True))
            return set(known["flags"].split(",")), known["ip"], int(known["port"])
        except (TypeError, ValueError, KeyError, AttributeError):
            raise exceptions.InvalidResponse("it does not answer as a sentinel does") from None


@dataclass(frozen=True)
class Target:
    """A server, and how to make a connection to it."""

    url: str
    make: Callable[..., Wire]
    settings: Mapping[str, object]
    pool: object = None  # of the client that was given: engines with the same one share their connections
    sentinels: Sentinels | None = None

    async def connection(self, timeout: float) -> Wire:
        """A connection that is not connected yet: to whatever server is the primary now, where sentinels tell.

        What they say may be out of date. A server that is no primary refuses every transition with READONLY, upon
        which its connections are dropped; to ask it for its ROLE first would need a right that many users lack.
        """
        where: Mapping[str, object] = await self.sentinels.primary(timeout) if self.sentinels else {}
        return new_wire(self.make, {**self.settings, **where, "socket_connect_timeout": timeout})

    def check(self) -> None:
        """See that connections can be made of the settings, which does no I/O; Unreadable says what is wrong."""
        for make, settings in [(self.make, self.settings), *([self.sentinels.ask] if self.sentinels else [])]:
            try:
                make(**settings)
            except TypeError:
                options = ", ".join(name for name in settings if name.startswith("ssl_"))
                raise Unreadable(f"there is no such option as one of {options}, or no TLS (rediss://)") from None
            except exceptions.RedisError as error:
                raise Unreadable(str(error)) from None

    def __repr__(self) -> str:
        return f"Target({self.url!r})"


class Unreadable(Exception):
    """Why a URL is none of a server; the text quotes nothing of it."""


def find_target(source: object) -> Target:
    """Where a URL or a client points to; ``ConfigurationError`` says what is allowed. No I/O."""
    if isinstance(source, Redis):
        return _of_client(source.connection_pool)
    if isinstance(source, RedisCluster):
        raise ConfigurationError("this version does not speak to clusters yet; use a single server")
    if not isinstance(source, str):
        hint = " (is a variable unset?)" if source is None else ""
        raise ConfigurationError(f"the URL is {type(source).__name__}{hint}; allowed is {ALLOWED}")
    if len(source) > LONGEST:
        raise ConfigurationError(f"the URL has {len(source):,} characters, and may have {LONGEST:,}")
    shown = hide_password(source)
    scheme = source.partition("://")[0].lower()
    if scheme.endswith("+cluster"):
        raise ConfigurationError(f"{shown!r}: this version does not speak to clusters yet; use a single server")
    try:
        target = (_of_sentinels if scheme.endswith("+sentinel") else _of_server)(source, shown)
        target.check()
        return target
    except Unreadable as fault:
        reason = str(fault)
    except (ValueError, TypeError):  # their texts may quote the URL with its password, so they go no further
        reason = "it does not parse"
    raise ConfigurationError(f"{shown!r} is no URL of a server: {reason}; allowed is {ALLOWED}")


def _of_server(url: str, shown: str) -> Target:
    parts = urlsplit(url)
    _ = parts.port  # parsed here; a bad one raises
    scheme = parts.scheme if "://" in url else ""
    if parts.fragment or "@" in parts.path + parts.query:
        raise Unreadable(ESCAPE)
    if scheme not in ("redis", "rediss", "unix"):
        raise Unreadable("the scheme is not known")
    if scheme == "unix" and not parts.path:
        raise Unreadable("it names no socket")
    if scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):
        raise Unreadable("the database is not a number")
    make, given = _parse(url)
    return Target(shown, cast("Callable[..., Wire]", make), _settings(make, given))


def _of_sentinels(url: str, shown: str) -> Target:
    """A URL with several hosts, which urllib refuses to take apart if one of them has brackets."""
    scheme, _, rest = url.partition("://")
    where, mark, query = rest.partition("?")
    authority, _, path = where.partition("/")
    login, at, hosts = authority.rpartition("@")
    scheme = scheme.lower().removesuffix("+sentinel")
    if "#" in rest or "@" in path + query:
        raise Unreadable(ESCAPE)
    if scheme not in ("redis", "rediss"):
        raise Unreadable("the scheme is not known")
    found = re.fullmatch(r"([^/]*)(?:/(\d*))?", path)
    if not found:
        raise Unreadable("the database is not a number")
    if not found[1]:
        raise Unreadable("it names no service")
    make, given = _parse(f"{scheme}://{login}{at}localhost/{found[2] or 0}{mark}{query}")
    lent = {name: value for name, value in given.items() if name.startswith("ssl_")}
    lent |= {name: given[f"sentinel_{name}"] for name in ("username", "password") if f"sentinel_{name}" in given}
    wire = cast("Callable[..., Wire]", make)
    addresses = [_address(host) for host in hosts.split(",")]
    sentinels = Sentinels(unquote(found[1]), wire, _settings(make, lent), addresses)
    return Target(shown, wire, _settings(make, given), sentinels=sentinels)


def _address(host: str) -> tuple[str, int]:
    found = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(\d{1,5}))?", host)
    port = int(found[2] or SENTINEL_PORT) if found else 0
    if not found or not 0 < port < 65536:
        raise Unreadable("each sentinel is a host or host:port")
    return found[1].strip("[]"), port


def place(host: object, port: object) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _parse(url: str) -> tuple[type[AbstractConnection], dict[str, object]]:
    given = dict(cast("dict[str, object]", parse_url(url)))
    return cast("type[AbstractConnection]", given.pop("connection_class", Connection)), given


def _of_client(pool: ConnectionPool) -> Target:
    make, given = pool.connection_class, _kwargs(pool)
    if isinstance(pool, SentinelConnectionPool):
        return _of_sentinel_client(pool, SSLConnection if issubclass(make, SSLConnection) else Connection)
    settings = _settings(make, given)
    if "path" in settings:
        url = f"unix://{settings['path']}"
    else:
        url = f"redis://{place(settings.get('host', 'localhost'), settings.get('port', 6379))}"
    return Target(url, cast("Callable[..., Wire]", make), settings, pool)


def _of_sentinel_client(pool: SentinelConnectionPool, make: type[AbstractConnection]) -> Target:
    """What ``Sentinel(...).master_for(...)`` gives."""
    if not cast("Any", pool).is_master:
        raise ConfigurationError("the client is of replicas, which refuse writes; give that of master_for()")
    settings, service = _settings(make, _kwargs(pool)), cast("str", pool.service_name)
    clients = cast("Sequence[Redis]", pool.sentinel_manager.sentinels)
    if not clients:
        raise ConfigurationError("the client has no sentinels")
    addresses = [(str(kwargs["host"]), cast("int", kwargs["port"])) for kwargs in map(_kwargs_of, clients)]
    first = clients[0].connection_pool
    ask = first.connection_class
    sentinels = Sentinels(service, cast("Callable[..., Wire]", ask), _settings(ask, _kwargs(first)), addresses)
    url = f"redis+sentinel://{','.join(place(*address) for address in addresses)}/{service}/{settings.get('db', 0)}"
    return Target(url, cast("Callable[..., Wire]", make), settings, pool, sentinels)


def _kwargs(pool: ConnectionPool) -> Mapping[str, object]:
    return cast("Mapping[str, object]", pool.connection_kwargs)


def _kwargs_of(client: Redis) -> Mapping[str, object]:
    return _kwargs(client.connection_pool)


def _settings(make: type[AbstractConnection], given: Mapping[str, object]) -> dict[str, object]:
    settings = {name: value for name, value in given.items() if name in COPIED or name.startswith("ssl_")}
    # each call has one timer of its own, so redis-py's (which makes a task of every send) stays off
    settings |= {"socket_timeout": None, "decode_responses": False, "protocol": 2, "driver_info": None}
    if issubclass(make, Connection):
        settings["socket_keepalive"] = True  # a dead peer is noticed within 45 s, by redis-py's defaults
    return settings
