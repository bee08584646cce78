"""Real servers that are away, or refuse: whatever the cause, the store is *unavailable*, and found when it is back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import redis
from engines import patiently
from ports import free_port
from replicas import Relay, follow, follows, freeze, pid_of, server_on, thaw, until
from servers import UNLIMITED, Server, limit_files, running_server

from aiodigest import JSON, BackendUnavailable, Digest, DigestEngine, Entry, PartialAdd, Policy
from aiodigest.backends.redis.connections import server as server_module
from aiodigest.backends.redis.connections.calls import Connections
from aiodigest.backends.redis.connections.url import read_url

pytestmark = pytest.mark.server_faults

TIMEOUT = 60.0  # which passes at once where nothing answers
PATIENCE = 60.0
NO_GAP = Policy(minimum_delay=0, increment_delay=0)
LATER = Policy(initial_delay=3600, maximum_delay=3600)


def later_before(key: str) -> Policy:
    return LATER if key == "before" else NO_GAP


@dataclass
class Place:
    """A server, and a relay through which it can be reached."""

    server: Server
    relay: Relay

    def command(self, *command: object) -> Any:
        with self.server.client() as client:
            return client.execute_command(*command)

    def set(self, name: str, value: object) -> None:
        self.command("CONFIG", "SET", name, value)


async def seen() -> None:
    """Let the loop hear that its connections are closed, and send what is to be sent."""
    for _ in range(50):
        await asyncio.sleep(0)


@asynccontextmanager
async def loading(place: Place) -> AsyncGenerator[None]:
    interval = "loading-process-events-interval-bytes"  # before Redis 7 it is 2 MiB, and no setting
    with place.server.client() as client:
        is_setting = bool(client.config_get(interval))
        value = "0" * (3_000 if is_setting else 2_097_152)
        client.mset({f"other-{number}": value for number in range(1_500 if is_setting else 60)})
        client.config_set("rdbcompression", "no")
        client.save()
    place.server.stop()
    await seen()
    options = place.server.options
    slow = ("--key-load-delay", "20000", *((f"--{interval}", "1024") if is_setting else ()))  # microseconds a key
    place.server.options = (*options, *slow)
    starting = asyncio.create_task(asyncio.to_thread(place.server.start))

    def is_loading() -> bool:
        try:
            return place.command("INFO", "persistence")["loading"] == 1
        except redis.ConnectionError:
            return False

    await until(is_loading)
    yield
    if is_setting:  # before Redis 7 nothing can be set meanwhile, and it takes six seconds
        place.set("key-load-delay", "0")
    await starting
    place.server.options = options


@asynccontextmanager
async def no_room_to_save(place: Place) -> AsyncGenerator[None]:
    place.set("save", "3600 1")

    def saved(status: str) -> bool:
        if place.command("INFO", "persistence")["rdb_bgsave_in_progress"] == 0:
            place.command("BGSAVE")
        return place.command("INFO", "persistence")["rdb_last_bgsave_status"] == status

    limit_files(pid_of(place.server), 0)
    await until(lambda: saved("err"))
    yield
    limit_files(pid_of(place.server), UNLIMITED)
    await until(lambda: saved("ok"))


@asynccontextmanager
async def too_few_replicas(place: Place) -> AsyncGenerator[None]:
    place.set("min-replicas-to-write", "1")
    yield
    place.set("min-replicas-to-write", "0")


@asynccontextmanager
async def made_a_replica(place: Place) -> AsyncGenerator[None]:
    with ExitStack() as stack:
        other = await asyncio.to_thread(stack.enter_context, server_on(free_port()))
        follow(other, place.server)
        await until(lambda: follows(other))
        follow(other, None)
        follow(place.server, other)
        await until(lambda: follows(place.server))
        yield
        follow(place.server, None)


@asynccontextmanager
async def full_memory(place: Place) -> AsyncGenerator[None]:
    place.set("maxmemory", "1")
    yield
    place.set("maxmemory", "0")


@asynccontextmanager
async def paused(place: Place) -> AsyncGenerator[None]:
    place.command("CLIENT", "PAUSE", "1000000", "WRITE")
    yield
    place.command("CLIENT", "UNPAUSE")


@asynccontextmanager
async def frozen(place: Place) -> AsyncGenerator[None]:
    freeze(place.server)
    yield
    thaw(place.server)


@asynccontextmanager
async def black_hole(place: Place) -> AsyncGenerator[None]:
    place.relay.swallow()
    yield
    place.relay.mode = "pass"  # for new connections


@asynccontextmanager
async def cut_connections(place: Place) -> AsyncGenerator[None]:
    place.relay.mode = "cut"
    yield
    place.relay.mode = "pass"


@asynccontextmanager
async def killed(place: Place) -> AsyncGenerator[None]:
    place.command("SAVE")
    place.server.stop()
    await seen()
    yield
    place.server.start()


CAUSES = [  # what makes a server unavailable, whether an add was stored then, and what its caller is told
    (loading, "no", "loading its data"),
    (no_room_to_save, "no", "cannot save its data"),
    (too_few_replicas, "no", "too few replicas"),
    (made_a_replica, "no", "it is a replica"),
    (full_memory, "no", "memory is full"),
    (paused, "unknown", "no answer"),
    (frozen, "unknown", "no answer"),
    (black_hole, "unknown", "no answer"),
    (cut_connections, "unknown", "onnection"),
    (killed, "no", "Connect"),
]


class Worker(list[str]):
    """The keys of what a worker delivered."""

    async def __call__(self, digest: Digest[JSON]) -> None:
        self.append(digest.key)

    async def got(self, key: str) -> None:
        await until(lambda: key in self)


class Clock:
    """Lets time pass for the running event loop, and not for servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        time, self._ahead = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: time() + self._ahead)

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


def told(caplog: pytest.LogCaptureFixture) -> tuple[int, int]:
    """How often the log says that the server is unavailable, and that it is available again."""
    lines = [record.getMessage() for record in caplog.records if record.name == "aiodigest.worker.availability"]
    return sum("is unavailable" in line for line in lines), sum("is available again" in line for line in lines)


@pytest.mark.parametrize(("block", "may_be_stored", "words"), CAUSES)
async def test_whatever_makes_a_server_unavailable_adds_say_so_in_time_and_workers_go_on_when_it_is_back(
    block: Callable[[Place], AbstractAsyncContextManager[None]], may_be_stored: str, words: str,
    namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    port = free_port()
    worker, clock = Worker(), Clock(monkeypatch)
    hangs = words == "no answer"
    with server_on(port) as server:
        async with Relay(port) as relay:
            url = relay.url if block in (black_hole, cut_connections) else f"redis://127.0.0.1:{port}/0"
            engine = DigestEngine[JSON](url, namespace=namespace, policy=later_before, timeout=TIMEOUT, lease_timeout=3)
            async with engine.delivering(worker):
                await engine.add("before", 1)
                await engine.add("first", 1)
                await worker.got("first")
                async with block(Place(server, relay)):
                    for turn in range(2):
                        adding = asyncio.create_task(engine.add("key", 1, record_id=f"r{turn}"))
                        if hangs:
                            await seen()
                            clock.advance(TIMEOUT)
                        with pytest.raises(BackendUnavailable, match=words) as caught:
                            await adding
                        # on a new connection it has not been sent yet
                        assert caught.value.stored in (may_be_stored, "no")
                        assert caught.value.record_id == f"r{turn}"
                        assert told(caplog) == (1, 0)
                if hangs:
                    clock.advance(TIMEOUT)  # a call may have gone into the hole at the last moment
                await patiently(lambda: engine.add("next", 1))
                await worker.got("next")
                await until(lambda: told(caplog)[1])
                await engine.flush("before")
                await worker.got("before")
    assert told(caplog) == (1, 1)


async def test_an_outage_of_adds_is_logged_once_and_its_end(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    with running_server() as server:
        async with DigestEngine[JSON](server.url, namespace=namespace, timeout=TIMEOUT) as engine:
            await engine.add("k", 1)
            for many in (False, True):
                caplog.clear()
                server.stop()
                for _ in range(3):
                    with pytest.raises((BackendUnavailable, PartialAdd)):
                        await (engine.add_many([Entry("k", 1)]) if many else engine.add("k", 1))
                assert engine.activity.unavailable
                server.start()
                await patiently(lambda: engine.add("k", 1))
                await until(lambda: told(caplog)[1])
                assert not engine.activity.unavailable
                assert told(caplog) == (1, 1)


@pytest.mark.parametrize(("host", "words"), [("127.0.0.1", "Connect"), ("store.invalid", r"store\.invalid")])
async def test_a_server_that_is_not_there_or_whose_name_is_not_known_is_found_when_it_is(
    host: str, words: str, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    worker, resolve = Worker(), socket.getaddrinfo

    def told_by_now(host: str | bytes | None, *rest: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "store.invalid" else host, *rest, **options)

    engine = DigestEngine[JSON](f"redis://{host}:{port}/0", namespace=namespace, policy=NO_GAP, timeout=TIMEOUT)
    with ExitStack() as stack:  # the server is there until the engine has been left
        async with engine.delivering(worker):
            with pytest.raises(BackendUnavailable, match=words) as caught:
                await engine.add("key", 1, record_id="mine")
            assert (caught.value.stored, caught.value.record_id) == ("no", "mine")
            stack.enter_context(server_on(port))
            monkeypatch.setattr(socket, "getaddrinfo", told_by_now)
            await until(lambda: told(caplog)[1])
            await engine.add("key", 1, record_id="mine")
            await worker.got("key")
    assert told(caplog) == (1, 1)


async def test_of_many_black_holes_one_call_fails(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "IDLE", inf)  # whoever is not asked first is called
    port, clock = free_port(), Clock(monkeypatch)
    with server_on(port):
        async with Relay(port) as relay, DigestEngine[JSON](relay.url, namespace=namespace, timeout=TIMEOUT) as engine:
            before = relay.connections
            await asyncio.gather(*(engine.peek(f"k{number}") for number in range(8)))
            assert relay.connections > before + 3
            relay.swallow()
            relay.mode = "pass"
            adding = asyncio.create_task(engine.add("key", 1))
            await seen()
            clock.advance(TIMEOUT)
            with pytest.raises(BackendUnavailable, match="no answer"):
                await adding
            assert await engine.add("key", 1)


async def test_a_dead_peer_is_noticed_within_a_minute_on_a_connection_that_only_listens() -> None:
    port = free_port()
    with server_on(port):
        link = Connections(read_url(f"redis://127.0.0.1:{port}/0"), TIMEOUT)
        listening = asyncio.create_task(link.listen("wake", "0-0"))
        await until(lambda: any(wire.is_connected for server in link._servers.values() for wire in server._busy))
        [wire] = link._servers[None]._busy
        inside: Any = wire
        peer = inside._writer.get_extra_info("socket")
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            peer.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 60
        listening.cancel()
        await asyncio.wait([listening])
        await link.close()
