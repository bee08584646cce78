"""Engines on a backend that was handed in: which loops, threads and contexts use it, and tests that replace one."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from contextvars import Context, ContextVar
from pathlib import Path
from typing import Any

import pytest
import redis
from engines import Inbox, VirtualLoop, WatchedBackend, engine_on, now, policy, settle
from servers import Server
from userland import DEADLINE

from aiodigest import JSON, Digest, DigestEngine, Entry, Reject, Throttle
from aiodigest.backend import Add
from aiodigest.backends.embedded.server import EmbeddedServer
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, PartialAdd
from aiodigest.records.entries import CONTEXT_SIZE
from aiodigest.testing import TestEngine

WHERE: ContextVar[str] = ContextVar("where", default="nowhere")


@pytest.mark.parametrize("given", [{"url": "redis://localhost"}, {"shards": 2}, {"wait_replicas": 1}])
def test_a_backend_and_what_only_a_url_needs_are_not_given_together(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="a backend, which has its own"):
        DigestEngine[JSON](namespace="test", backend=ReferenceBackend(), **given)


def test_an_engine_in_a_second_loop_is_woken_as_in_the_first() -> None:
    engine = engine_on(WatchedBackend(), policy=policy())

    async def use(value: int) -> float:
        inbox = Inbox()
        async with engine.delivering(inbox):
            await asyncio.sleep(5)
            began = now()
            await engine.add("key", value)
            await inbox.digest()
            return now() - began

    for value in range(2):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            assert runner.run(use(value)) < 0.1


async def test_an_add_of_a_thread_wakes_the_worker_in_its_own_loop() -> None:
    asyncio.get_running_loop().set_debug(True)  # else a call from another thread may go unnoticed, and wake nobody
    engine = DigestEngine[JSON](namespace="test", backend=ReferenceBackend(), policy=policy(), lease_timeout=3600)
    digests: asyncio.Queue[Digest[JSON]] = asyncio.Queue()
    async with engine.delivering(digests.put):
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.sync.add, "key", 1)
        async with asyncio.timeout(DEADLINE):
            assert (await digests.get()).key == "key"


class Looking(ReferenceBackend):
    """Notes in which context it is connected, and adds."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    async def connect(self) -> None:
        self.seen.append(WHERE.get())

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        self.seen.append(WHERE.get())
        return await super().add(shard, adds)


async def test_what_an_engine_does_by_itself_runs_in_no_request_s_context() -> None:
    backend = Looking()

    async def request(number: int) -> None:
        WHERE.set(f"request {number}")
        await engine.add("key", number)

    engine = DigestEngine[JSON](namespace="test", backend=backend)
    WHERE.set("the app")
    async with engine:
        for number in range(2):
            await asyncio.create_task(request(number))
    assert backend.seen == ["the app"] * 3


class Tracer:
    """Gives each record a span, and does no more."""

    def context(self) -> bytes:
        return bytes(CONTEXT_SIZE)

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> Tracer:
        return self

    def ended(self, result: str, reason: str = "", error: BaseException | None = None) -> None: ...

    def left(self) -> None: ...


async def bury(url: str, namespace: str) -> None:
    """Let a timeline end as a dead letter."""
    buried = asyncio.Event()
    engine = DigestEngine[JSON](url, namespace=namespace, timeout=DEADLINE)
    engine.observe(lambda _: buried.set())
    async with engine.delivering(Inbox(Reject("bad"))):
        await engine.add("dead", 1)
        async with asyncio.timeout(DEADLINE):
            await buried.wait()


def keepers(call: str) -> list[Context]:
    """Contexts in which it was set, but for cancelled timers, which asyncio forgets in their time."""
    gc.collect()
    timers = {id(each._context) for each in asyncio.get_running_loop()._scheduled if each.cancelled()}  # type: ignore[attr-defined]
    held = [each for each in gc.get_objects() if type(each) is Context and each.get(WHERE) == call]
    return [each for each in held if id(each) not in timers]


def first_letter(key: str) -> str:
    return key[:1]


ALL: dict[str, Any] = {"throttle": Throttle(10_000, per=1), "destination": first_letter, "destination_concurrency": 4}


async def replay_all(engine: DigestEngine[JSON]) -> None:
    async for letter in engine.dead_letters():
        await engine.replay(letter.id)


@pytest.mark.thorough
@pytest.mark.parametrize("has_all", [False, True], ids=["a plain engine", "an engine with all there is"])
async def test_nothing_that_an_engine_leaves_behind_keeps_what_a_caller_has_set(
    server: Server, namespace: str, has_all: bool
) -> None:
    await bury(server.url, namespace)
    options = ALL if has_all else {}
    big = [Entry("big", os.urandom(100_000).hex()) for _ in range(8)]  # a reply of which reading is paused
    engine = DigestEngine[JSON](server.url, namespace=namespace, policy=policy(), timeout=DEADLINE, **options)
    if has_all:
        engine.trace(Tracer())
    seen: list[str] = []
    arrived = asyncio.Event()

    @engine.deliver
    async def send(digest: Digest[JSON]) -> None:
        seen.append(WHERE.get())
        if digest.key == "last":
            arrived.set()

    engine.observe(lambda _: seen.append(WHERE.get()))
    calls: dict[str, Callable[[], Any]] = {
        "replay": lambda: replay_all(engine),
        "add": lambda: engine.add("key", 1),
        "add many": lambda: engine.add_many(big),
        "urgent": lambda: engine.add("key", 1, urgent=True),
        "peek": lambda: engine.peek("big"),
        "explain": lambda: engine.explain("big"),
        "stats": engine.stats,
        "timelines": engine.timelines,
        "dead letters": engine.dead_letters,
        "health": engine.health,
        "examine": engine.examine,
        "mute": lambda: engine.mute("muted"),
        "add to what is muted": lambda: engine.add("muted", 1),
        "unmute": lambda: engine.unmute("muted"),
        "discard": lambda: engine.discard("none"),
        "flush": lambda: engine.flush("key"),
        "reschedule": lambda: engine.reschedule("big", delay=60),
        "remove": lambda: engine.remove("key", "none"),
        "delete": lambda: engine.delete("big"),
        "reshard": lambda: engine.reshard(2),
        "add to new shards": lambda: engine.add_many(Entry(f"key {number}", 1) for number in range(16)),
        "sync": lambda: asyncio.to_thread(engine.sync.add, "key", 1),
    }

    async def request(call: str) -> None:
        WHERE.set(call)
        answer = calls[call]()
        with suppress(AiodigestError, TimeoutError):
            async with asyncio.timeout(1):  # nobody drains the old shards
                if hasattr(answer, "__aiter__"):
                    async for _ in answer:
                        pass
                else:
                    await answer

    for entered in (engine, engine.delivering(signals=has_all)):
        async with entered:
            for call in calls:
                await asyncio.create_task(request(call))
                await asyncio.sleep(0)  # the turn that ends the request has a handle to it
                assert keepers(call) == [], call
            if entered is not engine:
                await engine.add("last", 1)
                async with asyncio.timeout(DEADLINE):
                    await arrived.wait()
    assert set(seen) == {"nowhere"}


def test_what_the_bridge_does_by_itself_runs_in_no_thread_s_context() -> None:
    backend = Looking()
    engine = DigestEngine[JSON](namespace="test", backend=backend)
    WHERE.set("a thread")
    engine.sync.add("key", 1)
    assert backend.seen == ["nowhere"] * 2


async def test_adds_that_a_replaced_backend_refuses_fail_alone() -> None:
    engine, backend = DigestEngine[JSON](namespace="test"), WatchedBackend(shards=2)
    backend.down_shards = {1}
    backend.take_down("add")
    with engine.replace_backend(backend):
        with pytest.raises(PartialAdd) as raised:
            await engine.add_many([Entry(f"key {number}", number) for number in range(6)])
        refused = [isinstance(each, BackendUnavailable) for each in raised.value.results]
        assert [backend.shard_map.shard_of(f"key {number}") == 1 for number in range(6)] == refused
        assert (await engine.stats()).ready == refused.count(False) > 0


async def test_an_app_that_outlives_one_test_may_end_in_the_next() -> None:
    mail, app = DigestEngine[JSON](namespace="test"), AsyncExitStack()
    with TestEngine(mail):
        await app.enter_async_context(mail.delivering(Inbox()))
    inbox = Inbox()
    with TestEngine(mail) as t:
        async with mail.delivering(inbox):
            await app.aclose()
            await mail.add("key", 1)
            await t.advance()
    assert inbox.values == [[1]]


async def test_no_server_is_started_for_an_engine_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(server: EmbeddedServer) -> str:
        raise AssertionError("a server is started")

    monkeypatch.setattr(EmbeddedServer, "start", start)
    engine = engine_on(WatchedBackend())
    async with engine:
        with pytest.raises(ConfigurationError, match="entered already"):
            async with TestEngine(engine, server=True):
                pass


async def test_the_server_of_a_test_to_which_a_thread_added_is_gone_after_it() -> None:
    mail = DigestEngine[JSON](namespace="test")
    to_server: Any = redis.Redis  # whose types are of no help here
    for _ in range(5):
        async with TestEngine(mail, server=True):
            await asyncio.to_thread(mail.sync.add, "key", 1)
            server = EmbeddedServer(Path(mail.backend.url.removeprefix("embedded://")))
            with to_server(unix_socket_path=str(server.socket)) as client:
                pid = client.info("server")["process_id"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_an_engine_keeps_its_url_while_a_test_replaces_its_backend() -> None:
    mail = DigestEngine[JSON]("redis://example:6379/0", namespace="test")
    with TestEngine(mail):
        assert (mail.url, mail.is_entered, mail.loop) == ("redis://example:6379/0", True, None)
    assert not mail.is_entered
    async with engine_on(WatchedBackend()) as engine:
        await settle()
        assert engine.loop is asyncio.get_running_loop()
