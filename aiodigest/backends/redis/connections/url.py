"""URLs: where a server is and how to connect to it, read from a URL or a client; passwords hidden when shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from urllib.parse import unquote, unquote_plus, urlsplit

from redis.asyncio import Connection as TCPConnection
from redis.asyncio import ConnectionPool, Redis, RedisCluster, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS, AbstractConnection, parse_url
from redis.asyncio.sentinel import SentinelConnectionPool

from aiodigest.backends import ValkeyClient
from aiodigest.backends.redis.connections.connection import Address, Connection, Maker, new_connection, show_address
from aiodigest.errors import ConfigurationError

if TYPE_CHECKING:
    from aiodigest.backends.redis.connections.sentinel import Sentinels

Source: TypeAlias = "str | Redis | RedisCluster | ValkeyClient"

PORT = 6379
LONGEST = 4_096  # characters of a URL
MOST_OPTIONS = 32
ALLOWED = (
    "redis://host:port/db, rediss://host:port/db, unix:///path?db=0, redis+sentinel://host1,host2:port/service/db, "
    "redis+cluster://host1:port,host2:port, rediss+sentinel://..., rediss+cluster://..., the same with valkey for "
    "redis, embedded://, embedded:///folder, or (in Python) a client of redis.asyncio or valkey.asyncio"
)
ESCAPE = "a / ? # or @ in a password must be escaped (%2F %3F %23 %40)"

# what is taken over from a client: where and who, never how replies are read, repeated or timed
COPIED = {
    "host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
    "health_check_interval",  # seconds after which an unused connection is asked first: by us, not by redis-py
}  # fmt: skip
OPTIONS = frozenset({"db", "username", "password", "client_name", "health_check_interval"}).union(
    name for name in signature(SSLConnection).parameters if name.startswith("ssl_")
)
OF_SENTINELS = frozenset({"sentinel_username", "sentinel_password"})
SECRETS = {"password", "ssl_password", "sentinel_password"}
BY_TIMEOUT = "the engine's timeout= bounds each call"
REFUSED: Mapping[str, str] = {  # what redis-py's URLs may have besides, and why it is not taken
    "socket_timeout": BY_TIMEOUT,
    "socket_connect_timeout": BY_TIMEOUT,
    "timeout": BY_TIMEOUT,
    "retry_on_timeout": "a call is repeated only if that is harmless",
    "socket_keepalive": "it is always on",
    "max_connections": "a process has at most eight to a server, and those that listen",
    "protocol": "it is always 2",
    "decode_responses": "replies are always read as bytes",
}

# A URL as far as it may be shown
SCHEME = r"(?:(?:redis|valkey)s?(?:\+sentinel|\+cluster)?|unix|embedded|https?)"
MISSPELT = r"[a-z]{1,9}(?:\+[a-z]{1,9})?"  # a slip, and hardly a password
HOST = r"(?:\[[\w:.%-]*\]|[\w.-]*)(?::\d{1,5})?"
HOSTS = re.compile(rf"{HOST}(?:,{HOST})*", re.IGNORECASE)
NUMBER = re.compile(r"\d{0,9}")
SERVICE = re.compile(r"[\w.%~+-]*(?:/\d{0,9})?")
FILE = re.compile(r"[^@#?]*")
PLAIN = re.compile(r"[\w.,:/%+~-]*")


def hide_password(url: str) -> str:
    """Return the URL safe to show: with ``***`` for its password, and for whatever might be a piece of one.

    Somebody may have forgotten to escape a ``/``, ``?``, ``#``, ``@`` or ``&`` in it, or to name a host behind it. So
    only that is shown which has the form of its place, and nothing behind a password in the query.
    """
    scheme, mark, rest = url[:LONGEST].partition("://")
    if not mark:
        scheme, rest = "", scheme
    elif not re.fullmatch(SCHEME, scheme, re.IGNORECASE):
        return f"{scheme}://***" if re.fullmatch(MISSPELT, scheme, re.IGNORECASE) else "***"
    where, question, query = rest.partition("?")
    authority, slash, path = where.partition("/")
    login, at, hosts = authority.rpartition("@")
    kind = scheme.lower()
    form = FILE if kind in ("unix", "embedded") else SERVICE if kind.endswith("+sentinel") else NUMBER
    fits = HOSTS.fullmatch(hosts) and form.fullmatch(path) and path.isprintable()
    fits = fits and not ((hosts or (at and kind == "embedded")) and form is FILE) and (mark or ":" in authority)
    if len(url) > LONGEST or not fits or re.search("[@#]", query):
        return f"{scheme}{mark}***"
    user, _, password = login.partition(":")
    user = f"{user}:" if password and PLAIN.fullmatch(user) else ""
    hidden = f"{user}***@" if at else ""
    return f"{scheme}{mark}{hidden}{hosts}{slash}{path}{question}{_shown_options(query)}"


def _shown_options(query: str) -> str:
    shown: list[str] = []
    for piece in query.split("&") if query else []:
        name, _, value = piece.partition("=")
        if name not in OPTIONS | OF_SENTINELS or name in SECRETS or not PLAIN.fullmatch(value):
            return "&".join([*shown, f"{name}=***" if name in SECRETS else "***"])
        shown.append(piece)
    return "&".join(shown)


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
        settings = {**self.settings, "socket_connect_timeout": timeout}
        return new_connection(self.make, settings | {"health_check_interval": 0})

    def at(self, address: Address) -> URL:
        """Return a node of a cluster, or a server of a service."""
        host, port = address
        settings = {**self.settings, "host": host, "port": port}
        named = "" if address in self.nodes else host
        return replace(self, shown=f"{show_address(host, port)} of {self}", settings=settings, named=named)

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
    if _is_a(type(source), "Redis", "Valkey"):
        return _of_client(cast("Redis", source).connection_pool)
    if _is_a(type(source), "RedisCluster", "ValkeyCluster"):
        return _of_cluster_client(cast("RedisCluster", source))
    if not isinstance(source, str):
        kind, hint = type(source), " (is a variable unset?)" if source is None else ""
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise ConfigurationError(f"the URL is {name}{hint}; allowed is {ALLOWED}")
    check_length(source)
    shown = hide_password(source)
    scheme = source.partition("://")[0].lower()
    read = {"sentinel": _of_sentinels, "cluster": _of_cluster}.get(scheme.partition("+")[2], _of_server)
    try:
        source.encode()  # else it is not text, and no server's password
        return read(re.sub(r"^valkey(?=s?(?:\+\w+)?://)", "redis", source, flags=re.IGNORECASE), shown)
    except Unreadable as fault:
        reason = str(fault)
    except (ValueError, TypeError):  # their texts may quote the URL with its password, so they go no further
        reason = "it does not parse"
    raise ConfigurationError(f"{shown!r} is no URL of a server: {reason}; allowed is {ALLOWED}")


def check_length(url: str) -> None:
    """Refuse a URL that is too long to be one, before anything looks at it."""
    if len(url) > LONGEST:
        raise ConfigurationError(f"the URL has {len(url):,} characters, and may have {LONGEST:,}")


def _is_a(kind: type, *names: str) -> bool:
    """True if a class, or one that it descends from, has one of the names in redis-py or in its fork, valkey-py, which
    need not be installed."""
    places = ("redis.asyncio.", "valkey.asyncio.")
    return any(each.__name__ in names and each.__module__.startswith(places) for each in kind.__mro__)


def _of_server(url: str, shown: str) -> URL:
    parts = urlsplit(url)
    if parts.port == 0:  # a bad one raises here
        raise Unreadable("its port is 0")
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
    from aiodigest.backends.redis.connections.sentinel import PORT, Sentinels  # as few programs need it

    head, addresses, path, query = _split(url, PORT)
    found = re.fullmatch(r"([^/]*)(?:/(\d*))?", path)
    if not found:
        raise Unreadable("the database is not a number")
    if not found[1]:
        raise Unreadable("it names no service")
    make, given = _parse(f"{head}{found[2] or ''}{query}", "+sentinel", OPTIONS | OF_SENTINELS)
    lent = {name: value for name, value in given.items() if name.startswith("ssl_")}
    lent |= {name: given[f"sentinel_{name}"] for name in ("username", "password") if f"sentinel_{name}" in given}
    sentinels = Sentinels(unquote(found[1]), *_connecting(make, lent), addresses)
    return URL(shown, *_connecting(make, {"db": 0, **given}), sentinels=sentinels)


def _of_cluster(url: str, shown: str) -> URL:
    head, nodes, path, query = _split(url, PORT)
    make, given = _parse(head + path + query, "+cluster")
    if path not in ("", "0") or given.get("db"):
        raise Unreadable("a cluster has one database, 0")
    return URL(shown, *_connecting(make, given), nodes=nodes)


def _parse(
    url: str, kind: str = "", allowed: frozenset[str] = OPTIONS
) -> tuple[type[AbstractConnection], dict[str, object]]:
    head, _, query = url.partition("?")
    given = dict(cast("dict[str, object]", parse_url(head)))
    make = cast("type[AbstractConnection]", given.pop("connection_class", TCPConnection))
    pieces = query.split("&") if query else []
    if len(pieces) > MOST_OPTIONS:
        raise Unreadable(f"it has {len(pieces):,} options, and may have {MOST_OPTIONS}")
    for piece in pieces:
        name, _, value = piece.partition("=")
        if name not in allowed:
            is_secret = not SECRETS.isdisjoint(given) or re.search(":0*$", head)  # no port, but the start of a password
            raise Unreadable(_refusal(name, allowed, bool(is_secret)))
        if name in given or not value:
            raise Unreadable(
                f"its option {name} is given twice" if name in given else f"its option {name} has no value"
            )
        try:
            given[name] = URL_QUERY_ARGUMENT_PARSERS.get(name, str)(unquote_plus(value))
        except (ValueError, TypeError):
            raise Unreadable(f"the value of its option {name} is none that redis-py takes") from None
    if not issubclass(make, SSLConnection) and (names := [name for name in given if name.startswith("ssl_")]):
        raise Unreadable(f"the TLS options {', '.join(names)} need rediss{kind}://")
    _check_trust(given)
    if cast("int", given.get("health_check_interval", 1)) < 1:  # "never" would be a trap: routers forget connections
        raise Unreadable("its option health_check_interval may be 1 or more seconds")
    if not all(str(given.get(name, "")).isprintable() for name in ("host", "path")):
        raise Unreadable("its host has characters that cannot be printed")
    return make, given


def _refusal(name: str, allowed: frozenset[str], after_secret: bool) -> str:
    """Say why an option is not taken; behind a password it may be a piece of that, in which somebody forgot to escape
    an ``&``, and is not named."""
    if name in REFUSED:
        return f"its option {name} is not taken: {REFUSED[name]}"
    named = repr(name) if name.isidentifier() and len(name) < 64 and not after_secret else "one of them"
    plain = ", ".join(sorted(name for name in allowed if not name.startswith("ssl_")))
    return f"its options may be {plain}, and redis-py's for TLS (ssl_...), of which {named} is none"


def _check_trust(given: Mapping[str, object]) -> None:
    checks = given.get("ssl_cert_reqs", "required")
    if checks not in ("none", "optional", "required"):
        raise Unreadable("ssl_cert_reqs may be none, optional or required")
    if checks == "none" and given.get("ssl_check_hostname", True):
        raise Unreadable(
            "with ssl_cert_reqs=none the host's name is not checked either: if you mean that, say so with "
            "ssl_check_hostname=false beside it; for a certificate of your own give ssl_ca_certs=FILE instead"
        )


def _scheme(make: type[AbstractConnection]) -> str:
    return "rediss" if _is_a(make, "SSLConnection") else "redis"


def _of_client(pool: ConnectionPool) -> URL:
    make = pool.connection_class
    if _is_a(type(pool), "SentinelConnectionPool"):
        encrypted = _is_a(make, "SSLConnection")
        return _of_sentinel_client(cast("SentinelConnectionPool", pool), SSLConnection if encrypted else TCPConnection)
    connect, settings = _connecting(make, pool.connection_kwargs)
    database = settings.get("db")
    if "path" in settings:
        url = f"unix://{settings['path']}" + (f"?db={database}" if database else "")
    else:
        host = show_address(settings.get("host", "localhost"), settings.get("port", PORT))
        url = f"{_scheme(make)}://{host}" + (f"/{database}" if database else "")
    return URL(url, connect, settings, pool)


def _of_sentinel_client(pool: SentinelConnectionPool, make: type[AbstractConnection]) -> URL:
    """Return the URL of a client from ``Sentinel(...).master_for(...)``."""
    if not cast("Any", pool).is_master:
        raise ConfigurationError("the client is of replicas, which refuse writes; give that of master_for()")
    (connect, settings), service = _connecting(make, pool.connection_kwargs), cast("str", pool.service_name)
    from aiodigest.backends.redis.connections.sentinel import Sentinels

    pools = [client.connection_pool for client in cast("Sequence[Redis]", pool.sentinel_manager.sentinels)]
    if not pools:
        raise ConfigurationError("the client has no sentinels")
    addresses = [(str(each.connection_kwargs["host"]), cast("int", each.connection_kwargs["port"])) for each in pools]
    sentinels = Sentinels(service, *_connecting(pools[0].connection_class, pools[0].connection_kwargs), addresses)
    hosts = ",".join(show_address(*address) for address in addresses)
    url = f"{_scheme(make)}+sentinel://{hosts}/{service}/{settings.get('db', 0)}"
    return URL(url, connect, settings, pool, sentinels)


def _of_cluster_client(client: RedisCluster) -> URL:
    """Return the URL of a cluster client's settings; the client sends nothing, since it repeats unsafe calls."""
    known = cast("Any", client)
    nodes = [(str(node.host), int(node.port)) for node in known.nodes_manager.startup_nodes.values()]
    given = dict(cast("Mapping[str, object]", known.connection_kwargs))
    make = cast("type[AbstractConnection]", given.pop("connection_class", TCPConnection))
    url = f"{_scheme(make)}+cluster://{','.join(show_address(*node) for node in nodes)}"
    target = URL(url, *_connecting(make, given), client, nodes=nodes)
    return replace(target, as_seen=known.nodes_manager.address_remap or target.as_seen)


def _connecting(make: type[AbstractConnection], given: Mapping[str, object]) -> tuple[Maker, dict[str, object]]:
    """Return redis-py's class of a connection, and the settings that are taken over."""
    make = _of_redis_py(make)
    settings = {name: value for name, value in given.items() if name in COPIED or name.startswith("ssl_")}
    # each call has one timer of its own, so redis-py's (which makes a task of every send) stays off
    settings |= {"socket_timeout": None, "decode_responses": False, "protocol": 2, "driver_info": None}
    if issubclass(make, TCPConnection):
        settings["socket_keepalive"] = True  # a dead peer is noticed within 45 s, by redis-py's defaults
    return cast("Maker", make), settings


def _of_redis_py(make: type[AbstractConnection]) -> type[AbstractConnection]:
    """Return redis-py's class of a connection for that of valkey-py."""
    if AbstractConnection in make.__mro__:  # the types of the other are said to be the same
        return make
    for known in (SSLConnection, TCPConnection, UnixDomainSocketConnection):
        if make.__name__ == known.__name__ and _is_a(make, known.__name__):
            return known
    raise ConfigurationError(f"the client's {make.__name__} is no connection of redis-py or valkey-py; give a URL")
