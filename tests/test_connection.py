"""URLs, clients, and what errors of redis-py mean."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, Self, cast

import pytest
import redis
import trustme
import valkey.asyncio
from engines import now, settle, virtual_time
from hypothesis import assume, example, given
from hypothesis import strategies as st
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS, AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff
from servers import Server, running_server
from userland import DEADLINE

from aiodigest import DigestEngine
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.calls import Connections, _shared, join_connections, leave_connections
from aiodigest.backends.redis.connections.connection import drop, send
from aiodigest.backends.redis.connections.errors import explain
from aiodigest.backends.redis.connections.sentinel import Sentinels
from aiodigest.backends.redis.connections.server import CONNECTIONS, KEPT, SPARE
from aiodigest.backends.redis.connections.url import OPTIONS, URL, hide_password, read_url
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, InvalidState


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://user:secret@host/1", "redis://user:***@host/1"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("redis://user:s:e@c@host", "redis://user:***@host"),
        ("unix:///run/redis?db=1&password=secret", "unix:///run/redis?db=1&password=***"),
        ("redis://secret@host", "redis://***@host"),
        ("rediss://host?db=1&ssl_password=secret", "rediss://host?db=1&ssl_password=***"),
        ("redis://u:secret&password=secret@h", "redis://u:***@h"),
        ("valkeys+cluster://user:secret@a:1,[fe80::1%25eth0]", "valkeys+cluster://user:***@a:1,[fe80::1%25eth0]"),
        ("unix:///run/my redis.sock", "unix:///run/my redis.sock"),
        ("redis+sentinel://user:secret@a:1,b/mail/2", "redis+sentinel://user:***@a:1,b/mail/2"),
        (
            "rediss+sentinel://a/mail?sentinel_username=me&sentinel_password=secret",
            "rediss+sentinel://a/mail?sentinel_username=me&sentinel_password=***",
        ),
        # and what is no URL
        ("redis://user:se/cret@host/1", "redis://***"),
        ("redis://user:se#cret@host", "redis://user:***@host"),
        ("redis://host/0?password=se#cret", "redis://***"),
        ("redis://host/0?password=se&cret&db=1", "redis://host/0?password=***"),
        ("redis://host/0?password=s&db=cret", "redis://host/0?password=***"),
        ("redis://user:se?c@ret@host", "redis://***"),
        ("redis://user:secret", "redis://***"),
        ("redis://host/secret", "redis://***"),
        ("user:secret@host:6379", "user:***@host:6379"),
        ("localhost:6379", "localhost:6379"),
        ("secret", "***"),
        ("redis://host?db=1&pwd=secret&db=1", "redis://host?db=1&***"),
        ("valky://user:secret@host", "valky://***"),
        ("redis+clster://host", "redis+clster://***"),
        ("s3cret://host", "***"),
        ("redis://h?db=" + 5_000 * "1", "redis://***"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    with suppress(ConfigurationError):
        assert read_url(url).shown == shown


async def test_a_client_lends_its_settings_but_not_its_retries_and_timeouts(tmp_path: Path) -> None:
    trusted = tmp_path / "ca"
    trustme.CA().cert_pem.write_to_path(trusted)
    client = Redis(
        host="example", port=7, db=3, username="me", password="secret", ssl=True, ssl_ca_certs=str(trusted),
        decode_responses=True, socket_timeout=99, retry=Retry(ExponentialBackoff(), 7), client_name="mine",
    )  # fmt: skip
    url = read_url(client)
    wire = url.connection(2.0)
    assert isinstance(wire, SSLConnection)
    assert (wire.host, wire.port, wire.db, wire.username, wire.password) == ("example", 7, 3, "me", "secret")
    assert (wire.client_name, wire.ca_certs) == ("mine", str(trusted))
    assert (wire.socket_timeout, wire.socket_connect_timeout) == (None, 2.0)
    assert wire.retry.get_retries() == 0
    assert not wire.encoder.decode_responses
    assert "secret" not in repr(url) + url.shown
    await client.aclose()


def test_a_client_is_shown_as_the_url_that_leads_where_it_does() -> None:
    shown = {
        "redis://h:1": Redis(host="h", port=1),
        "redis://h:1/2": Redis(host="h", port=1, db=2),
        "rediss://[::1]:6379/3": Redis(host="::1", db=3, ssl=True),
        "unix:///run/s": Redis(unix_socket_path="/run/s"),
        "unix:///run/s?db=3": Redis(unix_socket_path="/run/s", db=3),
    }
    assert [read_url(client).shown for client in shown.values()] == [*shown]


def logins(url: URL) -> list[tuple[object, ...]]:
    """The names, passwords and databases of the servers, and of their sentinels."""
    assert url.sentinels is not None
    names = ("username", "password", "db", "ssl_ca_certs")
    return [tuple(map(settings.get, names)) for settings in (url.settings, url.sentinels.settings)]


def test_a_url_of_sentinels_names_them_their_service_and_the_login_of_each_kind_of_server() -> None:
    url = read_url(
        "redis+sentinel://user:p%40ss@h1:26380,h2,[::1]:26381/mail%2Fbox/3?sentinel_username=me&sentinel_password=mine"
    )
    assert url.sentinels is not None
    assert url.sentinels.addresses == [("h1", 26380), ("h2", 26379), ("::1", 26381)]
    assert url.sentinels.service == "mail/box"
    assert (url.make, url.sentinels.make) == (Connection, Connection)
    assert logins(url) == [("user", "p@ss", 3, None), ("me", "mine", None, None)]
    url = read_url("rediss+sentinel://user:secret@h1,h2/mail?ssl_ca_certs=/ca")
    assert url.sentinels is not None
    assert (url.make, url.sentinels.make) == (SSLConnection, SSLConnection)
    assert logins(url) == [("user", "secret", 0, "/ca"), (None, None, None, "/ca")]


async def test_a_client_of_sentinels_lends_their_addresses_and_both_logins() -> None:
    manager = Sentinel([("h1", 1), ("::1", 2)], sentinel_kwargs={"password": "theirs"}, username="me", password="mine")
    client: Redis = manager.master_for("mail", db=4, ssl=True, ssl_ca_certs="/ca")  # pyright: ignore[reportUnknownMemberType]
    url = read_url(client)
    assert url.sentinels is not None
    assert (url.sentinels.service, url.sentinels.addresses) == ("mail", [("h1", 1), ("::1", 2)])
    assert logins(url) == [("me", "mine", 4, "/ca"), (None, "theirs", 0, None)]
    assert (url.make, url.sentinels.make) == (SSLConnection, Connection)
    assert (url.shown, url.pool) == ("rediss+sentinel://h1:1,[::1]:2/mail/4", client.connection_pool)
    await closed(manager, client)


async def closed(manager: Sentinel, client: Redis) -> None:
    await client.aclose()
    for sentinel in manager.sentinels:  # newer ones have aclose()
        await sentinel.aclose()


async def test_a_client_of_replicas_or_without_sentinels_is_refused() -> None:
    for sentinels, get, told in (([], "master_for", "no sentinels"), ([("h1", 1)], "slave_for", "master_for")):
        manager = Sentinel(sentinels)
        client: Redis = getattr(manager, get)("mail")
        with pytest.raises(ConfigurationError, match=told):
            read_url(client)
        await closed(manager, client)


reply: Callable[[str], Exception] = cast("Any", BaseParser).parse_error  # an error reply, as redis-py raises it


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (reply("OOM command not allowed when used memory > 'maxmemory'."), BackendUnavailable, "full"),
        (reply("LOADING Redis is loading the dataset in memory"), BackendUnavailable, "loading"),
        (reply("READONLY You can't write against a read only replica."), BackendUnavailable, "replica"),
        (reply("MISCONF Redis is configured to save"), BackendUnavailable, "cannot save"),
        (reply("NOREPLICAS Not enough good replicas"), BackendUnavailable, "replicas"),
        (reply("BUSY Redis is busy running a script"), BackendUnavailable, "busy"),
        (reply("CLUSTERDOWN The cluster is down"), BackendUnavailable, "cluster is down"),
        (reply("MASTERDOWN Link with MASTER is down"), BackendUnavailable, "primary is down"),
        (reply("TRYAGAIN Multiple keys request during rehashing"), BackendUnavailable, "moved"),
        (exceptions.ConnectionError("Connection refused"), BackendUnavailable, "refused"),
        (exceptions.TimeoutError("Timeout reading"), BackendUnavailable, "Timeout"),
        (TimeoutError(), BackendUnavailable, "no answer in time"),
        (exceptions.InvalidResponse("Protocol error"), BackendUnavailable, "Protocol error"),
        (OSError("broken pipe"), BackendUnavailable, "broken pipe"),
        (reply("WRONGPASS invalid username-password pair"), ConfigurationError, "refuses access"),
        (reply("NOAUTH Authentication required."), ConfigurationError, "refuses access"),
        (reply("ERR Protocol error: unauthenticated multibulk length"), ConfigurationError, "refuses access"),
        (reply("ERR Protocol error: unauthenticated bulk length"), ConfigurationError, "refuses access"),
        (reply("LATE 1700000000000"), BackendUnavailable, "too late"),
        (reply("ERR invalid password"), ConfigurationError, "refuses access"),
        (reply("ERR wrong number of arguments for 'auth' command"), ConfigurationError, "refuses access"),
        (reply("NOPERM this user has no permissions"), ConfigurationError, "refuses access"),
        (reply("ERR DB index is out of range"), ConfigurationError, "how many databases a server has is a setting"),
        (reply("MOVED 7000 host:1"), ConfigurationError, "cluster"),
        (reply("CROSSSLOT Keys in request don't hash to the same slot"), ConfigurationError, "cluster"),
        # how Redis 6.2 tells of an error inside a script
        (reply("ERR Error running script (call to f_0): @user_script:12: -OOM is used"), BackendUnavailable, "full"),
        ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", BackendUnavailable, "full"),
        ("WRONGTYPE Operation against a key", InvalidState, "another program"),
        # Dragonfly, and Tair on a cluster
        ("ERR script tried accessing undeclared key, key: {n}:log:a", ConfigurationError, "docs/scaling.md"),
        (
            "ERR bad lua script for redis cluster, all the keys that it uses should be passed using the KEYS array",
            ConfigurationError,
            "its scripts may not make up keys",
        ),
        ("ERR something else", AiodigestError, "something else"),
    ],
)
def test_errors_say_what_they_mean(error: Exception | str, kind: type[AiodigestError], words: str) -> None:
    explained = explain(error, "redis://host", "unknown")
    assert type(explained) is kind
    assert words in str(explained)


async def call(url: str, *command: str) -> object:
    connections = Connections(read_url(url), DEADLINE)
    try:
        return await connections.command("", *command)
    finally:
        await connections.close()


async def test_a_server_where_scripts_may_not_make_up_keys_is_told_as_a_matter_of_configuration(server: Server) -> None:
    forbidden = "return redis.error_reply('ERR script tried accessing undeclared key, key: k')"
    with pytest.raises(ConfigurationError, match="cannot serve aiodigest: its scripts may not make up keys"):
        await call(server.url, "EVAL", forbidden, "0")


@pytest.mark.parametrize(("command", "replicas"), [("EVALSHA", 0), ("TIME", 0), ("WAIT", 1)])
async def test_a_server_that_lacks_a_command_is_told_as_a_matter_of_configuration(command: str, replicas: int) -> None:
    with running_server("--rename-command", command, "") as server:
        engine = DigestEngine(server.url, namespace="test", wait_replicas=replicas)
        with pytest.raises(ConfigurationError, match=r"it lacks a command .*docs/scaling\.md"):
            async with engine:
                await engine.add("key", 1)


async def test_doctor_tells_of_a_server_on_which_workers_cannot_listen() -> None:
    with running_server("--rename-command", "XREAD", "") as server:
        async with DigestEngine(server.url, namespace="test") as engine:
            await engine.add("key", 1)
            told = [each for each in await engine.examine() if each.check == "server"]
    assert [(each.level, "it lacks a command (unknown command" in each.message) for each in told] == [("problem", True)]


def test_of_a_slot_that_is_being_moved_the_server_s_text_of_scripts_is_left_out() -> None:
    problem = "ERR Script attempted to access a non local key in a cluster node script: 09abd0f2, on @user_script:5."
    assert str(explain(problem, "host")) == "host is unavailable: its slots are being moved"


# Connections, in virtual time, to a server that takes its time


class SlowServer:
    """Takes ``connecting`` seconds for a connection, tells the time, and answers calls once ``gate`` is set."""

    def __init__(self, connecting: float = 0.0) -> None:
        self.connecting = connecting
        self.gate = asyncio.Event()
        self.time: object = [b"1700000000", b"0"]  # or an error
        self.wires: list[SlowWire] = []

    @property
    def url(self) -> URL:
        return URL("redis://slow", self._connection, {})

    @property
    def open(self) -> int:
        return sum(wire.is_connected for wire in self.wires)

    @property
    def sent(self) -> int:
        return sum(wire.sent for wire in self.wires)

    def _connection(self, **settings: object) -> SlowWire:
        self.wires.append(SlowWire(self))
        return self.wires[-1]


class SlowWire:
    """A connection as redis-py has them."""

    def __init__(self, server: SlowServer) -> None:
        self.server = server
        self.is_connected = False
        self.sent = 0  # calls
        self._is_asked_the_time = False
        self._closed = asyncio.Event()

    async def connect(self) -> None:
        await asyncio.sleep(self.server.connecting)
        self.is_connected = True

    async def disconnect(self, nowait: bool = False) -> None:
        self.is_connected = False
        self._closed.set()

    async def can_read(self) -> bool:
        return False

    async def send_packed_command(self, command: bytes, check_health: bool = True) -> None:
        self.is_connected = True  # redis-py's connect again if they must
        self._is_asked_the_time = b"TIME" in command
        self.sent += not self._is_asked_the_time

    async def read_response(self) -> object:
        if self._is_asked_the_time:
            if isinstance(self.server.time, Exception):
                raise self.server.time
            return self.server.time
        ends = [asyncio.create_task(event.wait()) for event in (self.server.gate, self._closed)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)
        if self._closed.is_set():
            raise exceptions.ConnectionError("Connection closed by server.")
        return b"answer"


def add(connections: Connections) -> asyncio.Task[object]:
    """A call that must not be repeated."""
    return asyncio.create_task(connections.run("add", "{n}:layout", ["", ""]))


async def failures(calls: Sequence[asyncio.Task[object]]) -> list[str]:
    errors = await asyncio.gather(*calls, return_exceptions=True)
    return [error.stored for error in errors if isinstance(error, BackendUnavailable)]


@pytest.mark.parametrize(
    ("connecting", "calls", "stored"),
    [(4, 1, ["unknown"]), (6, 1, ["no"]), (0, 3 * CONNECTIONS, ["unknown"] * CONNECTIONS + ["no"] * 2 * CONNECTIONS)],
    ids=["connecting and the answer", "connecting", "waiting for a connection"],
)
@virtual_time
async def test_all_that_a_call_waits_for_has_one_timeout(connecting: float, calls: int, stored: list[str]) -> None:
    server = SlowServer(connecting)
    connections = Connections(server.url, 5)
    assert await failures([add(connections) for _ in range(calls)]) == stored
    assert now() == pytest.approx(5, abs=0.01)
    assert server.sent == stored.count("unknown")
    await connections.close()
    assert server.open == 0


@virtual_time
async def test_closing_connections_fails_calls_under_way_and_those_that_wait_and_leaves_no_connection() -> None:
    server = SlowServer()
    connections = Connections(server.url, 5)
    calls = [add(connections) for _ in range(2 * CONNECTIONS)]
    await settle()
    await connections.close()
    assert await failures(calls) == ["unknown"] * CONNECTIONS + ["no"] * CONNECTIONS
    assert now() < 1
    assert (server.open, server.sent, len(server.wires)) == (0, CONNECTIONS, CONNECTIONS)


@virtual_time
async def test_a_server_that_may_not_be_asked_for_the_time_is_called_all_the_same() -> None:
    server = SlowServer()
    server.gate.set()
    server.time = reply("NOPERM this user has no permissions to run the 'time' command")
    connections = Connections(server.url, 5)
    with pytest.raises(BackendUnavailable, match="not a valid answer to add"):
        await add(connections)
    assert server.sent == 1
    await connections.close()


@virtual_time
async def test_where_nobody_may_ask_for_the_time_it_is_that_of_this_machine() -> None:
    server = SlowServer()
    server.gate.set()
    server.time = reply("NOPERM this user has no permissions to run the 'time' command")
    connections = Connections(server.url, 5)
    assert abs(await connections.clock_ms("") - 1000 * time.time()) < 60_000
    assert server.sent == 0
    await connections.close()


@virtual_time
async def test_the_time_of_a_server_that_is_away_is_not_guessed() -> None:
    server = SlowServer(connecting=10)
    connections = Connections(server.url, 5)
    with pytest.raises(BackendUnavailable):
        await connections.clock_ms("")
    assert now() == pytest.approx(5, abs=0.01)
    await connections.close()


@virtual_time
async def test_each_new_connection_tells_its_server_s_clock_since_another_one_may_be_the_primary() -> None:
    server = SlowServer()
    server.gate.set()
    connections = Connections(server.url, 5)
    for seconds in (1_000, 5_000):
        server.time = [b"%d" % seconds, b"500000"]
        await connections.command("", "PING")
        [there] = connections._servers.values()
        assert there._ahead == seconds + 0.5 - asyncio.get_running_loop().time()
        await connections.hang_up("")
    await connections.close()


@virtual_time
async def test_what_waited_for_a_connection_into_the_last_tenth_of_its_time_is_not_sent() -> None:
    server = SlowServer(connecting=4.6)
    connections = Connections(server.url, 5)
    assert await failures([add(connections)]) == ["no"]
    assert (now(), server.sent) == (pytest.approx(4.6, abs=0.01), 0)
    await connections.close()


async def test_a_connection_that_was_dropped_is_not_opened_anew_by_what_is_sent_on_it() -> None:
    wire = SlowWire(SlowServer())
    await wire.connect()
    await send(wire, "PING")
    await drop(wire)
    with pytest.raises(exceptions.ConnectionError):
        await send(wire, "WAIT", 1, 1)
    assert (wire.is_connected, wire.sent) == (False, 1)


@pytest.mark.parametrize("listening", [False, True])
@virtual_time
async def test_closing_connections_while_one_connects_sends_nothing_and_leaves_no_connection(listening: bool) -> None:
    server = SlowServer(connecting=1)
    connections = Connections(server.url, 5)
    call = asyncio.create_task(connections.listen("wake", "0-0")) if listening else add(connections)
    await settle()
    await connections.close()
    with pytest.raises(BackendUnavailable, match="are closed"):
        await call
    assert server.open == server.sent == 0


@virtual_time
async def test_closed_connections_ask_no_sentinel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    async def primary(_: Sentinels, timeout: float) -> tuple[str, int]:
        asked.append(timeout)
        return "h2", 6379

    monkeypatch.setattr(Sentinels, "primary", primary)
    connections = Connections(read_url("redis+sentinel://h1/mail"), 5)
    await connections.close()
    for call in (connections.listen("wake", "0-0"), connections.command("", "PING")):
        with pytest.raises(BackendUnavailable, match="are closed"):
            await call
    assert asked == []


@virtual_time
async def test_connections_that_nobody_has_used_for_long_are_closed_but_one_for_calls_and_one_to_listen_on() -> None:
    server = SlowServer()
    server.gate.set()
    connections = Connections(server.url, 5)
    calls = [asyncio.create_task(connections.command("", "PING")) for _ in range(CONNECTIONS)]
    await asyncio.gather(*calls)
    assert server.open == CONNECTIONS
    await asyncio.sleep(SPARE + 1)
    await connections.command("", "PING")
    assert server.open == KEPT == 2
    await connections.close()


def test_connections_of_a_loop_that_was_closed_before_they_were_left_are_forgotten() -> None:
    url = read_url("redis://host")

    async def join() -> None:
        join_connections(url, 5)

    async def join_and_leave() -> None:
        connections = join_connections(url, 5)
        assert [each for each in _shared.values() if each.url is url] == [connections]
        await leave_connections(connections)

    asyncio.run(join())
    asyncio.run(join_and_leave())
    assert not [connections for connections in _shared.values() if connections.url is url]


async def test_a_backend_that_is_connected_twice_at_once_starts_its_server_and_opens_its_connections_once(
    server: Server, namespace: str
) -> None:
    class Own:
        url, starts = "own", 0

        async def start(self) -> str:
            self.starts += 1
            await asyncio.sleep(0)
            return server.url

        async def stop(self) -> None:
            pass

        def why_down(self) -> None:
            pass

        def clone(self) -> Self:
            return self

    own, before = Own(), set(_shared)
    backend = RedisBackend(own, namespace=namespace)
    await asyncio.gather(backend.connect(), backend.connect())
    assert (own.starts, len(set(_shared) - before)) == (1, 1)
    await backend.aclose()
    assert set(_shared) == before


@pytest.mark.parametrize("steps", range(12))
async def test_a_connect_goes_on_when_another_one_that_began_before_is_cancelled(
    server: Server, namespace: str, steps: int
) -> None:
    backend, before = RedisBackend(server.url, namespace=namespace), set(_shared)
    first, second = (asyncio.ensure_future(backend.connect()) for _ in range(2))
    for _ in range(steps):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await second
    assert await backend.operations.counts()
    await backend.aclose()
    assert set(_shared) == before


def test_connections_of_a_client_are_forgotten_when_the_last_user_has_left() -> None:
    url = read_url(Redis(connection_pool=ConnectionPool()))

    async def use() -> None:
        first, second = join_connections(url, 5), join_connections(url, 5)
        assert first is second
        assert join_connections(url, 6) is not first
        await leave_connections(first)
        assert join_connections(url, 5) is first
        for place, connections in list(_shared.items()):
            if connections.url is url:
                while place in _shared:
                    await leave_connections(connections)

    for _ in range(2):
        asyncio.run(use())
        assert not [connections for connections in _shared.values() if connections.url is url]


NO_SERVERS = [
    None, 5, b"redis://localhost", "", "localhost:6379", "http://localhost", "redis://:secret@host:port",
    "redis://:secret@host:99999", "redis://:secret@[host", "redis://:secret@host/db", "unix://",
    "redis://:secret@host?db=x", "redis+cluster://:secret@a,b/1",
    "redis+sentinel://:secret@a", "redis+sentinel://:secret@a/", "redis+sentinel://:secret@a/mail/db",
    "redis+sentinel://:secret@a/mail/0/1", "redis+sentinel://:secret@/mail/0", "redis+sentinel://:secret@a,,b/mail",
    "redis+sentinel://:secret@a:port/mail", "redis+sentinel://:secret@a:99999/mail", "redis+sentinel://:secret@a:0/mail",
    "redis+sentinel://:secret@::1/mail", "redis+sentinel://:secret@[::1/mail", "redis+sentinel://:secret@a/mail?db=x",
    "redis+sentinel://:sec/ret@a/mail", "redis+sentinel://:sec#ret@a/mail", "unix+sentinel://:secret@a/mail",
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "told"),
    [
        *((source, "") for source in NO_SERVERS),
        *((f"redis://user:se{sign}cret@host/0", "does not parse") for sign in "/#?"),
        ("redis://user:se@cret/@host/0", "%2F"),
        ("redis://host?password=se&cret=x&db=1", "one of them is none"),
        *((f"{url}pwd=cret", "'pwd' is none") for url in ("redis://h?db=1&", "unix:///s?", "redis+sentinel://h/m?")),
        *((f"redis+cluster://:cret@a{path}", "a cluster has one database, 0") for path in ("/1", "?db=1")),
        ("?" * 20_000, "has 20,000 characters"),
        ("redis://h?" + "&a=" * 1_000, "it has 1,001 options, and may have 32"),
        *((f"redis://h{path}", "option db is given twice") for path in ("/1?db=1", "?db=1&db=1")),
        ("redis://:cret@h?password=cret", "option password is given twice"),
        ("redis://h?db=", "option db has no value"),
        *((f"redis://h?health_check_interval={value}", "may be 1 or more seconds") for value in (0, -1)),
        ("redis://h:0", "its port is 0"),
        ("redis://h%00st", "cannot be printed"),
        ("redis://u:cret\udcff@h", "does not parse"),
        ("redis://h?sentinel_password=cret", "'sentinel_password' is none"),
        ("rediss://h?ssl_cert_reqs=none", "say so with ssl_check_hostname=false"),
        *((f"{url}?ssl_ca_certs=/ca", "TLS") for url in ("redis://h", "unix:///run/s")),
        ("rediss://h?ssl_foo=1", "TLS"),
        ("rediss://h?ssl_cert_reqs=bogus", "ssl_cert_reqs may be none, optional or required"),
        ("redis+sentinel://h/mail?ssl_cert_reqs=none", "TLS"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_shortly_and_no_piece_of_its_password(source: object, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_url(source)
    message = str(caught.value)
    assert told in message
    assert "allowed is redis://" in message or "use a single server" in message or told
    assert not re.search("cret|sec.ret", message)
    assert len(message) < 1_000


@pytest.mark.parametrize("path", ["", "/", "/0", "?db=0"])
def test_a_url_of_a_cluster_may_name_the_one_database_that_it_has(path: str) -> None:
    assert read_url(f"redis+cluster://a,b{path}").failover == "cluster"


MAKERS = Connection, SSLConnection, UnixDomainSocketConnection, AbstractConnection
OF_OTHER_TYPES = "ssl_include_verify_flags", "ssl_exclude_verify_flags"  # for which 9 is no value
KNOWN = sorted({*URL_QUERY_ARGUMENT_PARSERS, *(name for make in MAKERS for name in signature(make).parameters)})


@pytest.mark.parametrize("option", [name for name in KNOWN if name not in ("args", "kwargs", "self")])
def test_each_option_of_redis_py_is_honoured_or_refused_by_name(option: str) -> None:
    value = "required" if option == "ssl_cert_reqs" else "9"
    text = f"rediss://h?{option}={value}"
    if option in OPTIONS and option not in OF_OTHER_TYPES:
        assert read_url(text).settings[option] == URL_QUERY_ARGUMENT_PARSERS.get(option, str)(value)
        return
    with pytest.raises(ConfigurationError) as caught:
        read_url(text)
    assert re.search(rf"option {option} (is not taken: |is none that)|'{option}' is none", str(caught.value))


SIGNS = st.text("/?#@&=:%+[]., \n\t\\\"'é\udcff\0*", max_size=6)
PLACES = [
    "redis://u:{}@h", "redis://{}@h/1", "redis://u:{}", "u:{}@h", "redis://h?password={}", "redis://h?db=1&password={}&db=2",
    "unix://u:{}@/run/s", "unix:///run/s?password={}", "redis+sentinel://u:{}@a,b/s", "valkeys+cluster://u:{}@a:1,[::1]",
    "redis+sentinel://a/s?sentinel_password={}", "rediss://h?ssl_password={}", "embedded://{}", "embedded://u:{}@/folder",
    "redis://h?pwd={}", "redis://u:a&password={}@h", "redis://h?credential_provider={}", "redis:/u:{}@h",
]  # fmt: skip


@given(st.sampled_from(PLACES), SIGNS, SIGNS, SIGNS)
@example("redis://h?password={}", "", "&db=", "")
@example("redis://u:{}@h", "", "://", "/")
@example("embedded://{}", "", "@/", "")
def test_no_piece_of_a_password_is_shown_however_odd_the_url(place: str, before: str, between: str, after: str) -> None:
    url = place.format(f"{before}Pa55{between}w0rd{after}")
    assume(not url.startswith("embedded:///"))  # that is the name of a folder
    assume(place != "redis://{}@h/1" or ":" not in url[8:])  # before a colon stands the name of a user
    assume(place != "redis://u:{}" or "@" not in url)  # behind it stands the name of a host
    try:
        engine = DigestEngine(url, namespace="test")
        told = f"{engine.url} {engine.backend!r} {read_url(url)!r}"
    except ConfigurationError as error:
        told = f"{error!r} {error.__context__!r}"
    assert not re.search("(?i)Pa55|w0rd", told)


@pytest.mark.parametrize(
    "url", ["redis://h?" + "&password=" * 12_000, "embedded://?" + "&token=" * 17_000, "?" * 120_000]
)
def test_a_url_of_120_kilobytes_is_refused_before_anything_looks_at_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="characters, and may have 4,096"):
        DigestEngine(url, namespace="test")


@pytest.mark.parametrize("url", ["embedded://[", "embedded://?x=1", "embedded:///a%00b", "embedded:", "embedded:/x"])
def test_an_embedded_url_that_is_none_is_refused_with_what_is_allowed(url: str) -> None:
    with pytest.raises(ConfigurationError, match="an embedded URL is embedded:// or embedded:///folder"):
        DigestEngine(url, namespace="test")


def test_the_schemes_of_valkey_are_those_of_redis() -> None:
    for scheme, made in (("", Connection), ("s", SSLConnection)):
        assert read_url(f"VALKEY{scheme}://me:secret@h:1/2").make is made
        for rest in ("://me:secret@h:1/2", "+sentinel://h/mail/2", "+cluster://a,b"):
            one, other = (read_url(f"{name}{scheme}{rest}") for name in ("redis", "valkey"))
            assert (one.settings, one.place, one.make, one.failover) == (
                other.settings, other.place, other.make, other.failover
            )  # fmt: skip


async def test_clients_of_valkey_py_lend_what_those_of_redis_py_do(tmp_path: Path) -> None:
    trusted = tmp_path / "ca"
    trustme.CA().cert_pem.write_to_path(trusted)
    client = valkey.asyncio.Valkey(
        host="h", port=7, db=3, username="me", password="secret", ssl=True, ssl_ca_certs=str(trusted),
        ssl_check_hostname=True, decode_responses=True, socket_timeout=99,
    )  # fmt: skip
    url = read_url(client)
    wire = url.connection(2.0)
    assert isinstance(wire, SSLConnection)
    assert (wire.host, wire.port, wire.db, wire.username, wire.password) == ("h", 7, 3, "me", "secret")
    assert (wire.ca_certs, wire.socket_timeout, wire.check_hostname, url.shown) == (
        str(trusted),
        None,
        True,
        "rediss://h:7/3",
    )
    assert read_url(valkey.asyncio.Valkey(unix_socket_path="/run/s")).make is UnixDomainSocketConnection
    manager = valkey.asyncio.Sentinel([("h1", 1)], sentinel_kwargs={"password": "theirs"}, password="mine")
    service = read_url(cast("Any", manager).master_for("mail", db=4))
    assert logins(service) == [(None, "mine", 4, None), (None, "theirs", 0, None)]
    assert (service.make, service.shown) == (Connection, "redis+sentinel://h1:1/mail/4")
    with pytest.raises(ConfigurationError, match="master_for"):
        read_url(cast("Any", manager).slave_for("mail"))
    cluster = read_url(valkey.asyncio.ValkeyCluster("h1", 1, password="mine", ssl=True))
    assert (cluster.failover, cluster.make, cluster.settings["password"]) == ("cluster", SSLConnection, "mine")


async def test_a_client_of_valkey_py_serves_an_engine(server: Server, namespace: str) -> None:
    client = valkey.asyncio.Valkey.from_url(server.url)
    async with DigestEngine(client, namespace=namespace) as engine:
        assert await engine.add("key", 1)
    await client.aclose()


@pytest.mark.parametrize("client", [Redis, valkey.Valkey, object])
def test_a_client_that_is_of_no_use_is_named(client: type) -> None:
    with pytest.raises(ConfigurationError, match=r"(the URL is (redis\.client\.Redis|valkey\.client\.Valkey|object))"):
        read_url((redis.Redis if client is Redis else client)())


def test_a_client_with_connections_of_its_own_kind_is_refused() -> None:
    class Own(valkey.asyncio.Connection):
        pass

    with pytest.raises(ConfigurationError, match="the client's Own is no connection of redis-py or valkey-py"):
        read_url(valkey.asyncio.Valkey(connection_pool=valkey.asyncio.ConnectionPool(connection_class=Own)))
