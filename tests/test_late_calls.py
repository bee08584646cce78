"""Calls that were given up and arrive all the same, and connections that are dead without having ended."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from ports import free_port
from redis.exceptions import ResponseError
from replicas import Relay, server_on, until
from servers import Proxy, Server
from test_bench_command import all_may
from test_cluster import VERBS, Held
from test_redisbackend import connected, dump

from aiodigest import BackendUnavailable, ConfigurationError, DigestEngine, Policy
from aiodigest.backend import Add
from aiodigest.backends.redis import operations
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections import server as server_module
from aiodigest.backends.redis.connections.calls import Connections
from aiodigest.backends.redis.connections.connection import connect, drop, send
from aiodigest.backends.redis.connections.server import CONNECTIONS
from aiodigest.backends.redis.connections.url import read_url
from aiodigest.backends.redis.scripts import load_script
from aiodigest.records.entries import pack, unpack

WAITS = Policy(initial_delay=600)
PATIENCE = 60.0


def add(record: str = "r", value: bytes = b"v") -> Add:
    return Add("key", pack(record.encode(), None, value), WAITS.terms)


def calls_of(client: Any, command: str = "evalsha") -> int:
    return client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


class Stall(Proxy):
    """A network that holds the calls of scripts back, and delivers them even if their sender has closed."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.holding = False
        self.held = 0
        self.arrive = asyncio.Event()

    async def let_through(self) -> None:
        if self.holding and not self.arrive.is_set():
            self.held += 1
            await self.arrive.wait()

    async def release(self) -> None:
        """Let what was held arrive, and return when the server has run it."""
        with self.server.client() as client:
            before = calls_of(client)
            self.arrive.set()
            await until(lambda: calls_of(client) >= before + self.held)


@asynccontextmanager
async def stalled(server: Server, namespace: str) -> AsyncGenerator[tuple[RedisBackend, RedisBackend, Stall]]:
    """A backend on a network that will stall, and another."""
    async with (
        Stall(server) as stall,
        connected(server.url, namespace) as other,
        connected(stall.url, namespace, timeout=PATIENCE) as backend,
    ):
        yield backend, other, stall


async def hold(backend: RedisBackend, stall: Stall, *calls: Callable[[], Any]) -> None:
    """Make calls, which are sent, and given up while the network holds them back."""
    stall.holding = True
    connections = backend.namespace.connections
    for each in (connections, *connections._servers.values()):
        each.timeout = 2.0  # only now, as all that goes before may take long
    await asyncio.gather(*map(given_up, calls))
    assert stall.held == len(calls), "else nothing is tested"


async def given_up(call: Callable[[], Any]) -> None:
    with pytest.raises(BackendUnavailable):
        await call()


def values(entries: list[bytes]) -> list[bytes]:
    return [unpack(entry).value for entry in entries]


@pytest.mark.thorough
@pytest.mark.parametrize("is_delete", [False, True], ids=["replaced", "deleted"])
async def test_a_late_call_changes_nothing_of_what_came_after_it(own: Server, namespace: str, is_delete: bool) -> None:
    async with stalled(own, namespace) as (backend, other, stall):
        await backend.add(0, [add(value=b"first")])
        await hold(
            backend, stall, lambda: backend.delete("key") if is_delete else backend.add(0, [add(value=b"older")])
        )
        stall.holding = False
        await other.add(0, [add(value=b"newer")])
        await stall.release()
        assert values(await other.operations.entries("key"))[-1] == b"newer"


@pytest.mark.thorough
async def test_late_calls_of_every_kind_change_nothing(own: Server, namespace: str) -> None:
    names = [name for name in VERBS if name not in ("look", "read", "counts", "letter", "letters", "retire")]
    for start in range(0, len(names), CONNECTIONS):  # as many as are sent at once
        some, space = names[start : start + CONNECTIONS], f"{namespace}-{start}"
        async with stalled(own, space) as (backend, other, stall):
            held = Held(other, policy=Policy(minimum_delay=0))
            await held.fill()
            held.backend = backend
            await asyncio.gather(*(backend.operations.look("key") for _ in some))  # now there are connections
            with own.client() as client:
                before = dump(client, space)
                await hold(backend, stall, *(partial(VERBS[name], held) for name in some))
                await stall.release()
                assert dump(client, space) == before, some


@pytest.mark.thorough
async def test_a_late_erase_takes_nothing_of_what_came_after_it(
    own: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        Stall(own) as stall,
        connected(own.url, namespace) as other,
        connected(all_may(stall.url), namespace, timeout=PATIENCE) as backend,
    ):
        scan = operations._scan

        async def scan_and_stall(*where: Any) -> Any:
            page = await scan(*where)
            stall.holding = True
            return page

        await backend.add(0, [add(value=b"first")])
        await backend.operations.erase()  # the server knows the script from now on
        await backend.add(0, [add(value=b"first")])
        monkeypatch.setattr(operations, "_scan", scan_and_stall)
        for each in (backend.namespace.connections, *backend.namespace.connections._servers.values()):
            each.timeout = 2.0  # only now, as all that goes before may take long
        await given_up(backend.operations.erase)
        assert stall.held == 1
        await other.add(0, [add(value=b"newer")])
        await stall.release()
        assert values(await other.operations.entries("key"))[-1] == b"newer"


async def test_a_server_whose_clock_is_not_what_it_was_is_asked_once_more(
    server: Server, namespace: str, client: Any
) -> None:
    async with connected(server.url, namespace) as backend:
        await backend.add(0, [add("a")])
        [there] = backend.namespace.connections._servers.values()
        assert there._ahead is not None
        there._ahead -= 3600  # as if the clock had stepped forward since
        assert await backend.add(0, [add("b")]) == [False]
        assert await backend.delete("key")


async def test_a_clock_is_asked_for_again_after_a_while(server: Server, namespace: str) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        await backend.add(0, [add("a")])
        [there] = backend.namespace.connections._servers.values()
        assert there._ahead is not None
        ahead, before = there._ahead, proxy.times
        there._ahead += 3600  # as if it had stepped back since
        there._asked -= 61
        await backend.add(0, [add("b")])
        assert (there._ahead < ahead + 60, proxy.times) == (True, before + 1)


async def test_the_server_s_time_is_told_without_a_call_and_asked_for_once_a_minute(
    server: Server, namespace: str, client: Any
) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        await backend.clock_ms(0)
        [there] = backend.namespace.connections._servers.values()
        before = proxy.times
        seconds, micros = client.time()
        told = await backend.clock_ms(0)
        assert proxy.times == before
        assert abs(told - 1000 * seconds - micros / 1000) < 60_000
        assert there._ahead is not None
        there._ahead += 3600  # as if it had stepped back since
        assert await backend.clock_ms(0) - told >= 3_600_000
        there._asked -= 61
        assert abs(await backend.clock_ms(0) - told) < 60_000
        assert proxy.times == before + 1


def is_busy(client: Any) -> bool:
    try:
        client.ping()
    except ResponseError:
        return True
    return False


async def test_a_clock_that_is_known_is_not_forgotten_while_a_script_keeps_its_server_busy(
    own: Server, namespace: str
) -> None:
    def spin(client: Any) -> None:
        with suppress(ResponseError):  # it is killed
            client.eval("while true do end", 0)

    async with connected(own.url, namespace) as backend:
        await backend.add(0, [add("a")])
        [there] = backend.namespace.connections._servers.values()
        there._asked -= 61
        with own.client() as client, own.client() as other:
            client.config_set("lua-time-limit", 10)
            spinning = asyncio.create_task(asyncio.to_thread(spin, client))
            await until(lambda: is_busy(other))
            with pytest.raises(BackendUnavailable, match="busy"):
                await backend.add(0, [add("b")])
            other.script_kill()
            await spinning
        assert there._ahead is not None
        await backend.add(0, [add("c")])
        assert there._asked > 0, "it was not asked again"


async def test_an_add_whose_time_is_nearly_over_is_not_sent(own: Server, namespace: str) -> None:
    with own.client() as client:
        async with connected(own.url, namespace, timeout=60) as backend:
            await backend.add(0, [add()])
            before, soon = calls_of(client), asyncio.get_running_loop().time() + 5.9
            with pytest.raises(BackendUnavailable, match="in time") as caught:
                await backend.add(0, [add("a"), replace(add("b"), until=soon)])
            assert caught.value.stored == "no"
            assert calls_of(client) == before


class Twice(Proxy):
    """Carries a call out and breaks off; its second try is answered otherwise."""

    def __init__(self, server: Server, then: Callable[[Proxy], None]) -> None:
        super().__init__(server)
        self.then = then

    def swallows(self) -> bool:
        if is_first := super().swallows():
            self.then(self)
        return is_first


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"-MISCONF no room on the disk\r\n", "cannot save"),
        (b"-LATE 1700000000000\r\n", "too late"),
        (b"-LAYOUT 2:1:1\r\n", "is being changed"),
        (b"", "could be sent in time"),
    ],
    ids=["refused", "late", "layout", "not sent"],
)
async def test_a_call_that_broke_and_whose_second_try_does_nothing_may_have_been_carried_out(
    server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch, answer: bytes, words: str
) -> None:
    def then(proxy: Proxy) -> None:
        if answer:
            proxy.lie, proxy.refused = answer, load_script("flush").sha.encode()
        else:
            monkeypatch.setattr(server_module, "ENOUGH", 2)

    async with (
        Twice(server, then) as proxy,
        connected(server.url, namespace) as other,
        connected(proxy.url, namespace, timeout=PATIENCE) as backend,
    ):
        await backend.add(0, [add()])
        await backend.flush("none")  # now the server has the script
        proxy.swallow = 1
        with pytest.raises(BackendUnavailable, match=words) as caught:
            await backend.flush("key")
        assert caught.value.stored == "unknown"
        monkeypatch.undo()
        found = await other.operations.look("key")
        assert found is not None
        assert found.state == "ready"


async def test_adds_are_too_late_at_the_first_deadline_of_theirs(
    own: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(server_module, "ENOUGH", 0)  # of its long timeout
    async with stalled(own, namespace) as (backend, other, stall):
        await backend.add(0, [add("before")])
        stall.holding = True
        for seconds in (0.5, 2, 8, 32):
            soon = loop.time() + seconds
            adding = asyncio.create_task(backend.add(0, [add("a"), replace(add("b"), until=soon)]))
            await until(lambda task=adding: stall.held or task.done())
            if stall.held:  # else the machine was too slow to send it in time
                break
            await given_up(lambda task=adding: task)
        assert stall.held
        await asyncio.sleep(soon - loop.time() + 0.1)
        await stall.release()
        await given_up(lambda: adding)
        assert len(await other.operations.entries("key")) == 1


@asynccontextmanager
async def refusing(server: Server, why: str) -> AsyncGenerator[None]:
    with server.client() as client:
        if why == "maxclients":
            client.config_set("maxclients", client.info("clients")["connected_clients"])
            yield
            client.config_set("maxclients", 100)
        elif why == "requirepass":
            client.config_set("requirepass", "changed")
            yield
            client.config_set("requirepass", "")
        else:
            server.freeze()
            yield
            server.thaw()


@pytest.mark.parametrize("why", ["maxclients", "requirepass", "frozen"])
async def test_a_server_that_takes_no_connection_has_stored_nothing(own: Server, namespace: str, why: str) -> None:
    key = f"{{{namespace}}}:layout"
    url = read_url(f"unix://{own.socket}")  # without a login, which would be refused as well
    connections = Connections(url, 0.2 if why == "frozen" else PATIENCE)
    async with refusing(own, why):
        with pytest.raises((BackendUnavailable, ConfigurationError)) as caught:
            await connections.run("layout", key, ["version", "", "2:1:1"])
        assert getattr(caught.value, "stored", "no") == "no"
        await connections.close()


async def test_a_connection_that_a_router_forgot_is_found_out_and_another_one_serves(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with server_on(port):
        monkeypatch.setattr(server_module, "IDLE", 0.001)
        async with Relay(port) as relay, DigestEngine(relay.url, namespace=namespace) as engine:
            await asyncio.gather(*(engine.peek(f"k{number}") for number in range(8)))
            relay.swallow()
            relay.mode = "pass"
            await asyncio.sleep(0.01)
            assert await engine.add("key", 1)


async def test_a_url_may_say_how_long_a_connection_may_be_idle(server: Server, namespace: str) -> None:
    async with Proxy(server) as proxy, connected(f"{proxy.url}&health_check_interval=1", namespace) as backend:
        [there] = backend.namespace.connections._servers.values()
        assert there._idle_for == 1
        there._idle = deque((connection, since - 2) for connection, since in there._idle)
        before = proxy.times
        await backend.add(0, [add()])
        assert proxy.times > before


async def test_a_connection_in_use_is_not_asked_first(
    server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE", PATIENCE)
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        for number in range(20):
            await backend.add(0, [add(str(number))])
        assert proxy.times == proxy.connections == 1


async def test_a_connection_is_reset_when_it_is_given_up_and_what_was_on_its_way_does_not_arrive() -> None:
    begun, received, ended = asyncio.Event(), 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        await begun.wait()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                received += len(data)
        writer.transport.abort()
        ended.set()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
    connection: Any = read_url(f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}").connection(PATIENCE)
    await connect(connection)
    peer = connection._writer.get_extra_info("socket")
    assert struct.unpack("ii", peer.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)) == (1, 0)
    sending = asyncio.create_task(send(connection, "SET", "key", b"x" * (1 << 25)))
    await asyncio.sleep(0)
    await drop(connection)
    begun.set()
    with suppress(Exception):
        await sending
    async with asyncio.timeout(PATIENCE):
        await ended.wait()
    assert received < 1 << 24
    listener.close()
