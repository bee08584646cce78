"""URLs: where a server is and how to connect to it, read from a URL or a client; passwords hidden when shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from redis import exceptions
from redis.asyncio import Connection as TCPConnection
from redis.asyncio import ConnectionPool, Redis, RedisCluster, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS, AbstractConnection, parse_url
from redis.asyncio.sentinel import SentinelConnectionPool

from aiodigest.backends.redis.connections.connection import Address, Connection, Maker, new_connection, show_address
from aiodigest.backends.redis.connections.sentinel import PORT as SENTINEL_PORT
from aiodigest.backends.redis.connections.sentinel import Sentinels
from aiodigest.errors import ConfigurationError

Source: TypeAlias = "str | Redis | RedisCluster"

PORT = 6379
LONGEST = 4_096  # characters of a URL
ALLOWED = (
    "redis://host:port/db, rediss://host:port/db, unix:///path?db=0, redis+sentinel://host1,host2:port/service/db, "
    "redis+cluster://host1:port,host2:port, rediss+sentinel://..., rediss+cluster://..., embedded://, "
    "embedded:///folder, or (in Python) a redis.asyncio.Redis or RedisCluster client"
)
ESCAPE = "a / ? # or @ in a password must be escaped (%2F %3F %23 %40)"

# what is taken over from a client: where and who, never how replies are read, repeated or timed
COPIED = {"host", "port", "path", "db", "username", "password", "credential_provider", "client_name"}
MAKERS = AbstractConnection, TCPConnection, SSLConnection, UnixDomainSocketConnection
# allowed in a URL's query: those of redis-py's connections, and the sentinels' login
PARAMETERS = frozenset({"sentinel_username", "sentinel_password"}).union(
    URL_QUERY_ARGUMENT_PARSERS, *(signature(cast("Callable[..., object]", make)).parameters for make in MAKERS)
) - {"args", "kwargs"}
SECRETS = "pass|secret|token"


def hide_password(url: str) -> str:
    """Return the URL safe to show: with ``***`` for its password, wherever that stands.

    Everything before the last ``@`` may be a password in which somebody forgot to escape a ``/`` or a ``#``. So may
    the text after a password in the query, up to the next known parameter, and the value of an unknown parameter.
    """

    def known(found: re.Match[str]) -> str:
        return found[0] if found[2] in PARAMETERS else f"{found[1]}{found[2]}=***"

    names = "|".join(map(re.escape, PARAMETERS))
    secret = rf"([?&][^=&?]*(?:{SECRETS})[^=&]*)=[^&]*(?:&(?!(?:{names})=)[^&]*)*"
    url = re.sub(secret, r"\1=***", url, flags=re.IGNORECASE)
    head, at, host = url.rpartition("@")
    host = re.sub(r"([?&])([^=&?]*)=([^&]*)", known, host)
    if not at:
        return host
    scheme, mark, login = head.partition("://") if "://" in head else ("", "", head)
    user, colon, _ = login.partition(":")
    return f"{scheme}{mark}{user if colon else ''}{colon}***@{host}"


@dataclass(frozen=True)
class URL:
    """Place of a server, a service or a cluster, and the way to connect to it; ``str()`` of it hides the password."""

    shown: str
    make: Maker
    settings: Mapping[str, object]
    pool: object = None  # of the client that was given: engines with the same one share their connections
    sentinels: Sentinels | None = None
    nodes: Sequence[Address] = ()  # some of a cluster's, which know the others
    as_seen: Callable[[Address], Address] = lambda address: address  # where it is from here, from where a node says
    named: str = ""  # the host, as named by sentinels or a cluster

    @property
    def user(self) -> str:
        """The user who connects, as rules name it."""
        named = self.settings.get("username")
        return named if isinstance(named, str) else "default"

    @property
    def address(self) -> Address:
        """The host and port of a node of a cluster."""
        return cast("str", self.settings["host"]), cast("int", self.settings["port"])

    @property
    def place(self) -> object:
        """The server, service or cluster, and the database: equal for two URLs that are written in two ways."""
        settings = self.settings
        host = str(settings.get("host", "localhost")).replace("localhost", "127.0.0.1")
        where: object = settings.get("path") or (host, settings.get("port", PORT))
        if self.sentinels is not None:
            where = self.sentinels.service, frozenset(self.sentinels.addresses)
        return frozenset(self.nodes) or where, settings.get("db") or 0

    async def primary(self, timeout: float) -> URL:
        """Return the current primary, by the word of the sentinels, which may be old; without any, this very server."""
        return self.at(await self.sentinels.primary(timeout)) if self.sentinels else self

    def connection(self, timeout: float) -> Connection:
        """Make a connection, not connected yet."""
        return new_connection(self.make, {**self.settings, "socket_connect_timeout": timeout})

    def at(self, address: Address) -> URL:
        """Return a node of a cluster, or a server of a service."""
        host, port = address
        settings = {**self.settings, "host": host, "port": port}
        named = "" if address in self.nodes else host
        return replace(self, shown=f"{show_address(host, port)} of {self}", settings=settings, named=named)

    def check(self) -> None:
        """Check that the settings make a connection, without I/O; Unreadable says what is wrong."""
        for make, settings in [(each.make, each.settings) for each in (self, self.sentinels) if each]:
            try:
                make(**settings)
            except TypeError:
                options = ", ".join(name for name in settings if name.startswith("ssl_"))
                if not self.is_encrypted:
                    raise Unreadable(f"the TLS options {options} need rediss{self._kind}://") from None
                raise Unreadable(f"there is no such TLS option as one of {options}") from None
            except exceptions.RedisError as error:
                raise Unreadable(str(error)) from None

    @property
    def is_encrypted(self) -> bool:
        return isinstance(self.make, type) and issubclass(self.make, SSLConnection)

    @property
    def failover(self) -> Literal["", "sentinel", "cluster"]:
        """The means by which another server takes over, if any does."""
        return "sentinel" if self.sentinels else "cluster" if self.nodes else ""

    @property
    def _kind(self) -> str:
        return f"+{self.failover}" if self.failover else ""

    def hint(self, error: Exception) -> str:
        """Guess the URL's fault from an error of a server that has never answered; '' if there is no guess."""
        text = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else "")
        if self.named and "CERTIFICATE_VERIFY_FAILED" in text:
            return f"{'its sentinels name' if self.sentinels else 'its cluster names'} it {self.named}"
        if self.is_encrypted and re.search("no answer in time|WRONG_VERSION_NUMBER", text):
            return f"does it speak TLS? Else give redis{self._kind}://"
        if not self.is_encrypted and "path" not in self.settings and re.search("reset by peer|closed by server", text):
            return f"is it a port for TLS? Then give rediss{self._kind}://"
        return ""

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"URL({self.shown!r})"


class Unreadable(Exception):
    """A URL that names no server; the message quotes only the names of its parameters."""


def read_url(source: object) -> URL:
    """Return the server that a URL or a client points to; ``ConfigurationError`` says what is allowed. No I/O."""
    if isinstance(source, Redis):
        return _of_client(source.connection_pool)
    if isinstance(source, RedisCluster):
        return _of_cluster_client(source)
    if not isinstance(source, str):
        hint = " (is a variable unset?)" if source is None else ""
        raise ConfigurationError(f"the URL is {type(source).__name__}{hint}; allowed is {ALLOWED}")
    if len(source) > LONGEST:
        raise ConfigurationError(f"the URL has {len(source):,} characters, and may have {LONGEST:,}")
    shown = hide_password(source)
    scheme = source.partition("://")[0].lower()
    read = {"sentinel": _of_sentinels, "cluster": _of_cluster}.get(scheme.partition("+")[2], _of_server)
    try:
        url = read(source, shown)
        url.check()
        return url
    except Unreadable as fault:
        reason = str(fault)
    except (ValueError, TypeError):  # their texts may quote the URL with its password, so they go no further
        reason = "it does not parse"
    raise ConfigurationError(f"{shown!r} is no URL of a server: {reason}; allowed is {ALLOWED}")


def _of_server(url: str, shown: str) -> URL:
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
    return URL(shown, *_connecting(*_parse(url)))


def _split(url: str, default_port: int) -> tuple[str, list[Address], str, str]:
    """Take apart a URL with several hosts, which urllib refuses if one has brackets: head, hosts, path and query."""
    scheme, _, rest = url.partition("://")
    where, mark, query = rest.partition("?")
    authority, _, path = where.partition("/")
    login, at, hosts = authority.rpartition("@")
    scheme = scheme.lower().partition("+")[0]
    if "#" in rest or "@" in path + query:
        raise Unreadable(ESCAPE)
    if scheme not in ("redis", "rediss"):
        raise Unreadable("the scheme is not known")
    addresses: list[Address] = []
    for host in hosts.split(","):
        found = re.fullmatch(r"(\[[^\[\]]+\]|[^\[\]:]+)(?::(\d{1,5}))?", host)
        port = int(found[2] or default_port) if found else 0
        if not found or not 0 < port < 65536:
            raise Unreadable("each of several hosts is a name or name:port")
        addresses.append((found[1].strip("[]"), port))
    return f"{scheme}://{login}{at}localhost/", addresses, path, mark + query


def _of_sentinels(url: str, shown: str) -> URL:
    head, addresses, path, query = _split(url, SENTINEL_PORT)
    found = re.fullmatch(r"([^/]*)(?:/(\d*))?", path)
    if not found:
        raise Unreadable("the database is not a number")
    if not found[1]:
        raise Unreadable("it names no service")
    make, given = _parse(f"{head}{found[2] or 0}{query}")
    lent = {name: value for name, value in given.items() if name.startswith("ssl_")}
    lent |= {name: given[f"sentinel_{name}"] for name in ("username", "password") if f"sentinel_{name}" in given}
    sentinels = Sentinels(unquote(found[1]), *_connecting(make, lent), addresses)
    return URL(shown, *_connecting(make, given), sentinels=sentinels)


def _of_cluster(url: str, shown: str) -> URL:
    head, nodes, path, query = _split(url, PORT)
    make, given = _parse(head + path + query)
    if path not in ("", "0") or given.get("db"):
        raise Unreadable("a cluster has one database, 0")
    return URL(shown, *_connecting(make, given), nodes=nodes)


def _parse(url: str) -> tuple[type[AbstractConnection], dict[str, object]]:
    given = dict(cast("dict[str, object]", parse_url(url)))
    after_secret = False
    for name in given:
        # those of TLS are checked where it is known whether there is any
        if name not in {"connection_class", *PARAMETERS} and not name.startswith("ssl_"):
            # after a password it may be a piece of it, in which somebody forgot to escape a "&"
            named = repr(name) if name.isidentifier() and not after_secret else "one of them"
            raise Unreadable(f"its parameters are those of redis-py's connections, of which {named} is none")
        after_secret = after_secret or re.search(SECRETS, name) is not None
    return cast("type[AbstractConnection]", given.pop("connection_class", TCPConnection)), given


def _of_client(pool: ConnectionPool) -> URL:
    make = pool.connection_class
    if isinstance(pool, SentinelConnectionPool):
        return _of_sentinel_client(pool, SSLConnection if issubclass(make, SSLConnection) else TCPConnection)
    connect, settings = _connecting(make, pool.connection_kwargs)
    if "path" in settings:
        url = f"unix://{settings['path']}"
    else:
        url = f"redis://{show_address(settings.get('host', 'localhost'), settings.get('port', PORT))}"
    return URL(url, connect, settings, pool)


def _of_sentinel_client(pool: SentinelConnectionPool, make: type[AbstractConnection]) -> URL:
    """Return the URL of a client from ``Sentinel(...).master_for(...)``."""
    if not cast("Any", pool).is_master:
        raise ConfigurationError("the client is of replicas, which refuse writes; give that of master_for()")
    (connect, settings), service = _connecting(make, pool.connection_kwargs), cast("str", pool.service_name)
    pools = [client.connection_pool for client in cast("Sequence[Redis]", pool.sentinel_manager.sentinels)]
    if not pools:
        raise ConfigurationError("the client has no sentinels")
    addresses = [(str(each.connection_kwargs["host"]), cast("int", each.connection_kwargs["port"])) for each in pools]
    sentinels = Sentinels(service, *_connecting(pools[0].connection_class, pools[0].connection_kwargs), addresses)
    hosts = ",".join(show_address(*address) for address in addresses)
    url = f"redis+sentinel://{hosts}/{service}/{settings.get('db', 0)}"
    return URL(url, connect, settings, pool, sentinels)


def _of_cluster_client(client: RedisCluster) -> URL:
    """Return the URL of a cluster client's settings; the client sends nothing, since it repeats unsafe calls."""
    known = cast("Any", client)
    nodes = [(str(node.host), int(node.port)) for node in known.nodes_manager.startup_nodes.values()]
    given = dict(cast("Mapping[str, object]", known.connection_kwargs))
    make = cast("type[AbstractConnection]", given.pop("connection_class", TCPConnection))
    scheme = "rediss" if issubclass(make, SSLConnection) else "redis"
    url = f"{scheme}+cluster://{','.join(show_address(*node) for node in nodes)}"
    target = URL(url, *_connecting(make, given), client, nodes=nodes)
    return replace(target, as_seen=known.nodes_manager.address_remap or target.as_seen)


def _connecting(make: type[AbstractConnection], given: Mapping[str, object]) -> tuple[Maker, dict[str, object]]:
    """Return redis-py's class of a connection, and the settings that are taken over."""
    settings = {name: value for name, value in given.items() if name in COPIED or name.startswith("ssl_")}
    # each call has one timer of its own, so redis-py's (which makes a task of every send) stays off
    settings |= {"socket_timeout": None, "decode_responses": False, "protocol": 2, "driver_info": None}
    if issubclass(make, TCPConnection):
        settings["socket_keepalive"] = True  # a dead peer is noticed within 45 s, by redis-py's defaults
    return cast("Maker", make), settings
