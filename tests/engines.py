"""Engines on the in-memory store, in virtual time: what the tests of everything above the store stand on."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any, ParamSpec

from aiodigest import JSON, BackendUnavailable, Delivery, Digest, DigestEngine, JSONCodec, Policy
from aiodigest.backend import SLICE, Add, Claims, Grant, Lease
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.records.entries import pack
from aiodigest.session.background import BackgroundSession

P = ParamSpec("P")

CODEC = JSONCodec[JSON]()
START = 1_000_000.0  # seconds: what the clocks of a test, the server's and the loop's, show at its beginning
PATIENCE = 120.0  # real seconds for a test that would go on for ever
DEADLINE = 1e7  # virtual seconds: what has not come by then never comes
EVERY_CALL = ("open", "add", "claim", "read", "renew", "close", "retry", "release", "postpone", "throttle", "wait")


class IdleSelector(selectors.DefaultSelector):
    """Moves the loop's clock to the next timer instead of waiting for it."""

    now = START
    looks = True  # at what is outside of the loop, too

    def __init__(self) -> None:
        super().__init__()
        self.ends = time.monotonic() + PATIENCE

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if time.monotonic() > self.ends:
            self.ends += PATIENCE
            raise RuntimeError("the test does not come to an end")
        ready = super().select(0) if self.looks else []
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("the test waits for what nothing will bring about")
        self.now += max(timeout, 1e-6)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while nothing else happens: no test waits, and each runs the same way."""

    def __init__(self, idle: IdleSelector | None = None) -> None:
        self.idle = idle or IdleSelector()
        super().__init__(self.idle)

    def time(self) -> float:
        return self.idle.now


def virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in virtual time, and see that it leaves no task and no error that nobody looked at."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        unseen: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
            await test(*args, **kwargs)
            assert asyncio.all_tasks() == {asyncio.current_task()}, "tasks are left"

        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(main())
        assert not unseen, unseen

    return run


def now() -> float:
    """Seconds since the test began."""
    return asyncio.get_running_loop().time() - START


def now_ms() -> int:
    """The server's clock."""
    return int(asyncio.get_running_loop().time() * 1000 + 0.01)


async def settle() -> None:
    """Let everything happen that can happen now."""
    await asyncio.sleep(0.001)


async def patiently(call: Callable[[], Awaitable[object]]) -> None:
    """Make a call until it is answered, however short the time is that it has."""
    async with asyncio.timeout(PATIENCE):
        while True:
            with suppress(BackendUnavailable):
                await call()
                return


def _watched(name: str) -> Any:
    """A call of a shard that is counted, may fail, and whose answer may be lost."""
    answered = getattr(ReferenceBackend, name)

    async def call(self: WatchedBackend, shard: int, items: Any, *rest: Any, **options: Any) -> Any:
        await self.ask(name, shard, 1 if isinstance(items, Lease) else len(items))
        answer = await answered(self, shard, items, *rest, **options)
        self.answer(name)
        return answer

    return call


class WatchedBackend(ReferenceBackend):
    """Counts calls, and lets them fail.

    ``down`` maps a call to the error that it raises, and ``gates`` hold calls until they are set, of every shard or of
    those in ``down_shards``. ``lost`` counts the next calls of a kind that are carried out, and whose answers are lost.
    """

    def __init__(self, shards: int = 1, *, held: str = "", down: str = "", latency: float = 0) -> None:
        """Make a store in which the calls of one name may be ``held`` by a gate, or fail; all take ``latency``."""
        numbers = count(1)
        super().__init__(shards=shards, now=now_ms, nonce=lambda: f"n{next(numbers)}")
        self.calls: list[tuple[str, int, float, int]] = []  # call, shard, when, items
        self.latency = latency  # seconds
        self.down: dict[str, BaseException] = {}
        self.down_shards = set(range(shards))
        self.lost = Counter[str]()
        self.gates = {held: asyncio.Event()} if held else {}
        if down:
            self.take_down(down)
        self.closed: list[str] = []
        self.down_because: str | None = None

    def count(self, call: str, shard: int | None = None) -> int:
        return sum(call == name and shard in (None, at) for name, at, _, _ in self.calls)

    def items(self, call: str) -> list[int]:
        """How many items each call of a kind had."""
        return [items for name, _, _, items in self.calls if name == call]

    def times(self, call: str) -> list[float]:
        return [when for name, _, when, _ in self.calls if name == call]

    def take_down(self, *calls: str, error: BaseException | None = None) -> None:
        """Let calls fail (all of them, if none is named) until `bring_up`."""
        for call in calls or EVERY_CALL:
            self.down[call] = error or BackendUnavailable("connection refused")

    def bring_up(self) -> None:
        self.down.clear()

    async def ask(self, call: str, shard: int, items: int = 1) -> None:
        self.calls.append((call, shard, now(), items))
        await asyncio.sleep(self.latency)
        if call in self.gates and shard in self.down_shards:
            await self.gates[call].wait()
        if call in self.down and shard in self.down_shards:
            raise self.down[call]

    def answer(self, call: str) -> None:
        if self.lost[call]:
            self.lost[call] -= 1
            raise BackendUnavailable("connection reset", stored="unknown")

    def why_down(self) -> str | None:
        return self.down_because

    async def connect(self) -> None:
        await self.ask("open", 0)

    async def aclose(self) -> None:
        self.closed.append("backend")

    async def put(self, key: str, *values: JSON, policy: Policy = Policy(), record_id: str | None = None) -> None:
        """Add records as another process would."""
        for value in values:
            name = record_id if record_id is not None else str(value)
            entry = pack(name.encode(), None, CODEC.encode(value))
            await super().add(self.shard_map.shard_of(key), [Add(key, entry, policy.terms)])

    async def wait(self, shard: int, last: str) -> str:
        await self.ask("wait", shard)
        return await super().wait(shard, last)

    add, read, renew = _watched("add"), _watched("read"), _watched("renew")
    close, retry, release = _watched("close"), _watched("retry"), _watched("release")
    postpone = _watched("postpone")

    async def counts(self) -> dict[str, int]:
        await self.ask("counts", 0)
        return await super().counts()

    async def throttle(self, wanted: int, *arguments: Any, **named: Any) -> Grant:
        await self.ask("throttle", self.shard_map.current.start, wanted)
        grant = await super().throttle(wanted, *arguments, **named)
        self.answer("throttle")
        return grant

    async def claim(self, shard: int, count: int, *arguments: Any, **named: Any) -> Claims:
        await self.ask("claim", shard, count)
        claims = await super().claim(shard, count, *arguments, **named)
        if claims.leases:
            self.answer("claim")
        return replace(claims, leases=[replace(lease, entries=lease.entries[:SLICE]) for lease in claims.leases])


def engine_on(backend: WatchedBackend, **options: Any) -> DigestEngine[JSON]:
    """An engine whose store is ``backend``."""
    return DigestEngine[JSON](namespace="test", backend=backend, **options)


async def holding(*values: JSON, shards: int = 1, policy: Policy = Policy()) -> WatchedBackend:
    """A store whose timeline "key" holds these values."""
    backend = WatchedBackend(shards)
    await backend.put("key", *values, policy=policy)
    return backend


async def state_of(backend: WatchedBackend, key: str) -> tuple[str, int] | None:
    """A timeline's state and the attempts charged to it."""
    window = await backend.operations.look(key)
    return None if window is None else (window.state, window.attempt)


class Inbox:
    """A delivery callback: keeps each digest and when it came, and then does what it was told, one reply a digest.

    A reply is an exception to raise, a function to await, or None to return at once; after the last it returns.
    """

    def __init__(self, *replies: BaseException | Callable[[Digest[JSON]], Awaitable[object]] | None) -> None:
        self.digests: list[Digest[JSON]] = []
        self.times: list[float] = []
        self.seen: list[Delivery] = []
        self._replies = iter(replies)
        self._changed = asyncio.Event()

    async def __call__(self, digest: Digest[JSON]) -> None:
        self.digests.append(digest)
        self.times.append(now())
        self._changed.set()
        reply = next(self._replies, None)
        if isinstance(reply, BaseException):
            raise reply
        if reply is not None:
            await reply(digest)

    def observe(self, delivery: Delivery) -> None:
        self.seen.append(delivery)
        self._changed.set()

    async def digest(self, number: int = 1) -> Digest[JSON]:
        """The ``number``-th digest, when it has come."""
        await self._until(lambda: len(self.digests) >= number)
        return self.digests[number - 1]

    async def outcome(self, number: int = 1) -> Delivery:
        """The ``number``-th report to the observer, when it has come."""
        await self._until(lambda: len(self.seen) >= number)
        return self.seen[number - 1]

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not reached():
                self._changed.clear()
                await self._changed.wait()

    @property
    def values(self) -> list[list[JSON]]:
        return [[record.value for record in digest.records] for digest in self.digests]

    @property
    def results(self) -> list[str]:
        return [delivery.result for delivery in self.seen]


def session_of(engine: DigestEngine[Any]) -> BackgroundSession:
    """What an engine that is entered in this loop consists of."""
    session = engine._entered()
    assert isinstance(session, BackgroundSession)
    return session


@asynccontextmanager
async def delivering(
    inbox: Inbox, backend: WatchedBackend | None = None, **options: Any
) -> AsyncGenerator[tuple[DigestEngine[JSON], WatchedBackend], None]:
    """An engine that delivers to ``inbox``, and the store that it delivers from."""
    store = backend or WatchedBackend()
    engine = engine_on(store, **options)
    engine.observe(inbox.observe)
    async with engine.delivering(inbox):
        yield engine, store


@asynccontextmanager
async def adding(
    backend: WatchedBackend | None = None, **options: Any
) -> AsyncGenerator[tuple[DigestEngine[JSON], WatchedBackend], None]:
    """An engine that only adds, and the store that it adds to."""
    store = backend or WatchedBackend()
    async with engine_on(store, **options) as engine:
        yield engine, store


async def forever(digest: Digest[JSON]) -> None:
    """A callback that never returns."""
    await asyncio.Event().wait()


def lasting(seconds: float) -> Callable[[Digest[JSON]], Awaitable[object]]:
    """A callback that takes a while."""
    return lambda digest: asyncio.sleep(seconds)


def policy(**options: Any) -> Policy:
    """A policy with no cool-down, so that each test says which delay it is about."""
    given: dict[str, Any] = {"minimum_delay": 0, "increment_delay": 0, **options}
    return Policy(**given)
