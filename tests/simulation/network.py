"""The store as a process sees it: over a network that delays, loses and cuts, on a server that stops and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import attrgetter
from random import Random
from typing import Any, Generic, Self, TypeVar, cast

from aiodigest.backend import (
    Add,
    Backend,
    Claims,
    Close,
    Closed,
    Lease,
    Operations,
    Retired,
    Retry,
    ShardMap,
)
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.policy import Limits, Terms
from simulation.loop import Process, SeededLoop
from simulation.store import Store
from simulation.witness import Witness

T = TypeVar("T")

REFUSED = "connection refused"
RESET = "connection reset"
SILENCE = 65.0  # seconds until a listener notices that nobody is there


class Server:
    """The only server: its store, its clock, and whether it is there."""

    def __init__(self, shards: int) -> None:
        numbers = count(1)
        self.offset_ms = 0
        self.store = Store(shards, self.now_ms, lambda: f"n{next(numbers)}")
        self.is_up = True
        self.paused_until = 0.0
        self.cut = asyncio.Event()  # all connections end when it is set

    def now_ms(self) -> int:
        return int(asyncio.get_running_loop().time() * 1000 + 0.01) + self.offset_ms

    def cut_all(self) -> None:
        self.cut.set()
        self.cut = asyncio.Event()


@dataclass
class Exchange(Generic[T]):
    """A request, the answer that its process waits for, and how long that takes on its way back, if it is heard."""

    request: Callable[[], Coroutine[Any, Any, T]]
    reply: asyncio.Future[T]
    back: float
    heard: bool

    def fail(self) -> None:
        self.answer(BackendUnavailable(RESET, stored="unknown"))

    def answer(self, outcome: T | Exception) -> None:
        if self.reply.done():
            return
        if isinstance(outcome, Exception):
            self.reply.set_exception(outcome)
        else:
            self.reply.set_result(outcome)


def _passed_on(path: str) -> Any:
    """A call of a backend that the store answers, and of which nobody needs to know more."""
    call, answer = path.rpartition(".")[2], attrgetter(path)

    async def ask(self: Link, *arguments: Any) -> Any:
        return await self._ask(call, partial(answer(self._server.store), *arguments))

    return ask


class Link(Backend, Operations):
    """A process's way to the server. What was sent may arrive after the process has given up, or has died."""

    lag = 0.001  # seconds: how long a message takes at the most
    loss = 0.0  # the share of messages that are lost
    refused = False
    silent = False  # a black hole: nothing arrives, and nobody is told
    deaf = False  # no wake-up is ever heard

    def __init__(self, server: Server, process: Process, witness: Witness, random: Random, timeout: float) -> None:
        self._server = server
        self._process = process
        self._witness = witness
        self._random = random
        self._timeout = timeout
        self._learn()

    def _learn(self) -> None:
        """What its process knows of the shards, which may have changed since."""
        self._shard_map = self._server.store.shard_map

    @property
    def url(self) -> str:
        return "simulated://"

    @property
    def shard_map(self) -> ShardMap:
        return self._shard_map

    @property
    def operations(self) -> Operations:
        return self

    def clone(self) -> Self:
        return self

    async def _ask_shard(
        self, call: str, shard: int, request: Callable[[], Coroutine[Any, Any, T]], *, repeat: bool = True
    ) -> T:
        """Ask a shard, if it is still there and, for an add, still takes some; else learn where others are."""
        store, met = self._server.store, shard

        async def checked() -> T:
            nonlocal met
            if shard in store.retired or (call == "add" and shard not in store.shard_map.current):
                raise Retired(f"shard {shard} has moved")
            met = store.shard_map.current.start
            return await request()

        try:
            return await self._ask(call, checked, repeat=repeat)
        except Retired:
            met = store.shard_map.current.start
            raise
        finally:
            if met != self._shard_map.current.start and shard not in store.shard_map.current:
                self._learn()

    @property
    def is_sound(self) -> bool:
        """Whether what is sent arrives."""
        server = self._server
        return server.is_up and not (self.refused or self.silent or self.loss or server.paused_until > _now())

    async def _ask(self, call: str, request: Callable[[], Coroutine[Any, Any, T]], *, repeat: bool = True) -> T:
        """Send a request and wait for its answer, for one timeout at the most; ``repeat``: it may arrive twice."""
        if not self._process.alive:
            raise BackendUnavailable("this process is dead")
        self._witness.sent(self._process, call)
        try:
            answer = await self._exchange(request, repeat)
        except BackendUnavailable:
            self._witness.failed(self._process, call)
            raise
        self._witness.answered(self._process, call)
        return answer

    async def _exchange(self, request: Callable[[], Coroutine[Any, Any, T]], repeat: bool) -> T:
        loop, random = cast("SeededLoop", asyncio.get_running_loop()), self._random
        out, back = random.random() * self.lag, random.random() * self.lag
        if not self._server.is_up or self.refused:
            await asyncio.sleep(out)
            raise BackendUnavailable(REFUSED)
        reply: asyncio.Future[T] = loop.create_future()
        fate = random.random() / self.loss if self.loss else 1.0
        exchange = Exchange(request, reply, back, heard=fate >= 0.6 and not self.silent)
        if self.silent or fate < 0.2:  # never arrives
            if not self.silent and fate < 0.1:
                loop.run_apart(out, exchange.fail)
        elif fate < 0.3:  # arrives when nobody waits for it any more
            loop.run_apart(self._timeout + out + random.random() * 10, self._arrive, loop, exchange, 1)
        else:
            loop.run_apart(out, self._arrive, loop, exchange, 2 if repeat and 0.3 <= fate < 0.4 else 1)
        try:
            async with asyncio.timeout(self._timeout):
                return await reply
        except TimeoutError:
            raise BackendUnavailable("no answer in time", stored="unknown") from None

    def _arrive(self, loop: SeededLoop, exchange: Exchange[Any], times: int) -> None:
        """Carry a request out, once or twice, if the server is there, and send its answer back."""
        server = self._server
        if not server.is_up:
            loop.run_apart(exchange.back, exchange.fail)
        elif server.paused_until > loop.time():
            loop.run_apart(server.paused_until - loop.time(), self._arrive, loop, exchange, times)
        else:
            outcome = [_at_once(exchange.request) for _ in range(times)][-1]
            if exchange.heard:
                loop.run_apart(exchange.back, exchange.answer, outcome)
            elif not self.silent:
                loop.run_apart(exchange.back, exchange.fail)

    # The calls of a worker

    async def connect(self) -> None:
        async def hello() -> None: ...

        await self._ask("connect", hello)

    async def aclose(self) -> None:
        pass

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        self._witness.records.adding(adds)
        return await self._add_wherever(shard, adds)

    async def _add_wherever(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        try:
            return await self._add(shard, adds)
        except Retired:
            return await self._add_elsewhere(adds)

    async def _add_elsewhere(self, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Add what a retired shard did not take to the shards that take it now."""
        groups: dict[int, list[int]] = {}
        for index, add in enumerate(adds):
            groups.setdefault(self._shard_map.shard_of(add.key), []).append(index)
        answers: dict[int, bool | AiodigestError] = {}
        for shard, indices in groups.items():
            try:
                added = await self._add_wherever(shard, [adds[index] for index in indices])
                answers.update(zip(indices, added, strict=True))
            except BackendUnavailable as error:
                answers.update(dict.fromkeys(indices, error))
        return [answers[index] for index in range(len(adds))]

    async def _add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        async def request() -> list[bool | AiodigestError]:
            added = await self._server.store.add(shard, adds)
            self._witness.records.added(adds, added)
            return added

        return await self._ask_shard("add", shard, request, repeat=False)

    async def claim(self, shard: int, count: int, *arguments: Any, **named: Any) -> Claims:
        self._witness.claiming(self._process, count)
        sent = _now()

        async def request() -> Claims:
            claims = await self._server.store.claim(shard, count, *arguments, **named)
            self._witness.leased(self._process, claims)
            return claims

        claims = await self._ask_shard("claim", shard, request, repeat=False)
        self._witness.holds(self._process, claims.leases, sent)
        first = [
            replace(lease, entries=lease.entries[:3] if lease.size > 8 else lease.entries) for lease in claims.leases
        ]
        return replace(claims, leases=first)  # the rest is paged

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        return await self._ask_shard(
            "read", shard, partial(self._server.store.read, shard, lease, start, min(count, 3))
        )

    async def renew(
        self, shard: int, leases: Sequence[Lease], *arguments: Any, **named: Any
    ) -> Sequence[bool | AiodigestError]:
        sent = _now()
        call = partial(self._server.store.renew, shard, leases, *arguments, **named)
        kept = await self._ask_shard("renew", shard, call)
        self._witness.holds(self._process, [lease for lease, held in zip(leases, kept, strict=True) if held], sent)
        self._witness.holds_no_more([lease for lease, held in zip(leases, kept, strict=True) if not held])
        return kept

    async def close(self, shard: int, closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
        for close in closes:
            self._witness.burying(close)
        closed = await self._ask_shard("close", shard, partial(self._server.store.close, shard, closes))
        for close, answer in zip(closes, closed, strict=True):
            if answer.status == "part":
                self._witness.goes_on(self._process, close.lease.digest_id, answer.digest_id)
        over = [close.lease for close, answer in zip(closes, closed, strict=True) if answer.status != "part"]
        self._witness.holds_no_more(over)
        return closed

    async def retry(self, shard: int, retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
        kept = await self._ask_shard("retry", shard, partial(self._server.store.retry, shard, retries))
        self._witness.holds_no_more([retry.lease for retry in retries])
        return kept

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> Sequence[bool | AiodigestError]:
        self._witness.holds_no_more(leases)
        return await self._ask_shard("release", shard, partial(self._server.store.release, shard, leases, started))

    async def wait(self, shard: int, last: str) -> str:
        if not self._process.alive or not self._server.is_up or self.refused:
            await asyncio.sleep(self.lag)
            raise BackendUnavailable(REFUSED)
        heard = asyncio.ensure_future(self._server.store.wait(shard, last))
        cut = asyncio.ensure_future(self._server.cut.wait())
        try:
            await asyncio.wait([heard, cut], timeout=SILENCE, return_when=asyncio.FIRST_COMPLETED)
            if self.silent or self.deaf:
                await asyncio.sleep(SILENCE)
            if cut.done() or self.silent or self.deaf:
                raise BackendUnavailable(RESET)
            return heard.result() if heard.done() else last
        finally:
            heard.cancel()
            cut.cancel()

    # The calls by hand

    schedule, maintenance = _passed_on("schedule"), _passed_on("maintenance")
    flush, reschedule = _passed_on("flush"), _passed_on("reschedule")
    look, entries, page, counts, erase, dead_letters, dead_letter = (
        _passed_on(f"operations.{call}")
        for call in ("look", "entries", "page", "counts", "erase", "dead_letters", "dead_letter")
    )

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        request = partial(self._server.store.open, shard, key, lease_ms, limits)
        return await self._ask_shard("open", shard, request, repeat=False)

    async def delete(self, key: str) -> bool:
        async def request() -> bool:
            self._witness.removed(key)
            return await self._server.store.delete(key)

        return await self._ask("delete", request, repeat=False)

    async def remove(self, key: str, record_id: bytes, limits: Limits) -> bool:
        async def request() -> bool:
            went = await self._server.store.remove(key, record_id, limits)
            if went:
                self._witness.removed(key, record_id.decode())
            return went

        return await self._ask("remove", request, repeat=False)

    async def reshard(self, shards: int) -> bool:
        return False

    async def replay(self, letter_id: str, terms: Terms, own: bool) -> bool:
        async def request() -> bool:
            letter = await self._server.store.operations.dead_letter(letter_id)
            ready = await self._server.store.replay(letter_id, terms, own)
            self._witness.records.replayed(letter)
            return ready

        return await self._ask("replay", request, repeat=False)

    async def discard(self, letter_id: str) -> bool:
        async def request() -> bool:
            self._witness.records.discarded(await self._server.store.operations.dead_letter(letter_id))
            return await self._server.store.discard(letter_id)

        return await self._ask("discard", request, repeat=False)


def _at_once(request: Callable[[], Awaitable[T]]) -> T | Exception:
    """What a call of the in-memory store answers, which it does without waiting."""
    call = request().__await__()
    try:
        next(call)
    except StopIteration as end:
        return cast("T", end.value)
    except Exception as error:  # an answer too, for whoever asked
        return error
    raise AssertionError("a transition waits for something")


def _now() -> float:
    return asyncio.get_running_loop().time()
