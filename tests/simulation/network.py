"""The store as a process sees it: over a network that delays, loses and cuts, on a server that stops and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from operator import attrgetter
from random import Random
from typing import Any, Generic, Self, TypeVar, cast

from aiodigest.backend import (
    Add,
    Backend,
    Claims,
    Close,
    Closed,
    Grant,
    Lease,
    Mute,
    Operations,
    Postpone,
    Retired,
    Retry,
    ShardMap,
)
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import id_of
from simulation.loop import Process, SeededLoop
from simulation.store import Store
from simulation.witness import Witness

T = TypeVar("T")

REFUSED = "connection refused"
RESET = "connection reset"
TRUSTED = 60.0  # seconds for which a process takes the server's clock to go on as its own
SILENCE = 65.0  # seconds until a listener notices that nobody is there
READS = {
    "connect", "read", "look", "cooling", "entries", "page", "counts", "dead_letters", "dead_letter"
}  # fmt: skip


class Late(Exception):
    """A server refuses a request that comes after the time that it names, and tells what its clock shows."""


class Server:
    """The only server: its store, its clock, and whether it is there."""

    def __init__(self, shards: int, loop: SeededLoop) -> None:
        numbers = count(1)
        self._loop = loop
        self.offset_ms = 0
        self.stepped_at = self.stepped_back_at = 0.0
        self.store = Store(shards, self.now_ms, lambda: f"n{next(numbers)}")
        self.is_up = True
        self.paused_until = 0.0
        self.cut = asyncio.Event()  # all connections end when it is set

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000 + 0.01) + self.offset_ms

    def step(self, ms: int) -> None:
        """Let the clock step."""
        self.offset_ms += ms
        self.stepped_at = self._loop.time()
        if ms < 0:
            self.stepped_back_at = self._loop.time()

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
    not_after_ms: float = inf  # by the server's clock
    learnt: float = 0.0  # when its process learnt what that clock shows

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
    answer = attrgetter(path)

    async def ask(self: Link, *arguments: Any) -> Any:
        return await self._ask(path.rpartition(".")[2], partial(answer(self._server.store), *arguments))

    return ask


class Link(Backend, Operations):
    """A process's way to the server. What was sent may arrive after the process has given up, or has died."""

    not_after = True  # what is sent names a time after which it shall not be done
    held = 0.0  # seconds: for how long at the most something keeps what is sent, and carries it then
    lag = 0.001  # seconds: how long a message takes at the most
    loss = 0.0  # the share of messages that are lost
    refused = False
    silent = False  # a black hole: nothing arrives, and nobody is told
    deaf = False  # no wake-up is ever heard

    def __init__(self, server: Server, process: Process, witness: Witness, random: Random) -> None:
        self._server = server
        self._process = process
        self._witness = witness
        self._random = random
        self._timeout = witness.setup.timeout
        self._shard_map = server.store.shard_map  # as far as its process knows
        self._whims = Random()  # a twin, so that what was drawn before stays
        self._whims.setstate(random.getstate())
        self._learnt = -inf  # when it heard last what the server's clock shows; that it has no connection
        self._ahead_ms = 0.0  # the server's clock of the loop's, as far as it knows

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

    async def reshard(self, shards: int) -> bool: ...

    @property
    def is_sound(self) -> bool:
        """Whether what is sent arrives."""
        server = self._server
        is_bad = self.refused or self.silent or self.loss or self.held
        return server.is_up and not (is_bad or server.paused_until > _now())

    async def _ask(
        self, call: str, request: Callable[[], Coroutine[Any, Any, T]], *, repeat: bool = True, since: float = inf
    ) -> T:
        """Send a request and wait for its answer, for one timeout at the most; ``repeat``: it may arrive twice.

        ``since``: when the first of its callers began to wait.
        """
        if not self._process.alive:
            raise BackendUnavailable("this process is dead")
        self._witness.sent(self._process, call)
        ends = min(_now(), since) + self._timeout
        try:
            try:
                return await self._exchange(request, repeat, inf if call in READS else ends)
            except Late:
                self._learn()
                return await self._exchange(request, repeat, ends)
        except (BackendUnavailable, Late) as error:
            self._learnt = -inf
            self._witness.failed(self._process, call)
            if isinstance(error, Late):
                raise BackendUnavailable("it came too late, and did nothing") from None
            raise

    def _learn(self) -> None:
        """Hear the time of the server, which was read before its answer came."""
        self._learnt = _now()
        self._ahead_ms = self._server.offset_ms - self._whims.uniform(0, self.lag) * 1000

    def _not_after_ms(self, ends: float) -> float:
        """The time of the server's clock, as its process knows it, until which a request may be done."""
        if _now() > self._learnt + TRUSTED:
            self._learn()
        return ends * 1000 + self._ahead_ms if self.not_after else inf

    async def _exchange(self, request: Callable[[], Coroutine[Any, Any, T]], repeat: bool, ends: float) -> T:
        loop, random = cast("SeededLoop", asyncio.get_running_loop()), self._random
        out, back = random.random() * self.lag, random.random() * self.lag
        if not self._server.is_up or self.refused:
            await asyncio.sleep(out)
            raise BackendUnavailable(REFUSED)
        reply: asyncio.Future[T] = loop.create_future()
        fate = random.random() / self.loss if self.loss else 1.0
        heard, not_after_ms = fate >= 0.6 and not self.silent, self._not_after_ms(ends)
        exchange = Exchange(request, reply, back, heard, not_after_ms, self._learnt)
        if self.silent or fate < 0.2:  # never arrives
            if not self.silent and fate < 0.1:
                loop.run_apart(out, exchange.fail)
        elif self.held:
            loop.run_apart(out + self._whims.uniform(0, self.held), self._arrive, loop, exchange, 1)
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
            outcome: Any = Late()
            self._witness.records.is_trusted = exchange.learnt >= server.stepped_back_at
            if server.now_ms() <= exchange.not_after_ms:
                outcome = [_at_once(exchange.request) for _ in range(times)][-1]
            if exchange.heard:
                loop.run_apart(exchange.back, exchange.answer, outcome)
            elif not self.silent:
                loop.run_apart(exchange.back, exchange.fail)

    async def _ask_shard(
        self,
        call: str,
        shard: int,
        *arguments: Any,
        seen: Callable[[Any], object] | None = None,
        repeat: bool = True,
        since: float = inf,
        **named: Any,
    ) -> Any:
        """Ask a shard, if it is still there and, for an add, still takes some; else learn where others are.

        ``seen``: is told what the server answers, also if that gets lost.
        """
        store, met = self._server.store, shard

        async def request() -> Any:
            nonlocal met
            current = store.shard_map.current
            if shard in store.retired or (call == "add" and shard not in current):
                raise Retired(f"shard {shard} has moved")
            met = current.start
            answer = await getattr(store, call)(shard, *arguments, **named)
            if seen:
                seen(answer)
            return answer

        try:
            return await self._ask(call, request, repeat=repeat, since=since)
        except Retired:
            met = store.shard_map.current.start
            raise
        finally:
            if met != self._shard_map.current.start and shard not in store.shard_map.current:
                self._shard_map = store.shard_map

    async def _ask_once(self, call: str, seen: Callable[[Any], object], *arguments: Any) -> Any:
        """Ask for what must not arrive twice."""
        given_up = inf

        async def request() -> Any:
            if call in ("delete", "remove"):
                record_ids = [each.decode() for each in arguments[1:2]]
                self._witness.records.removing_late(given_up, arguments[0], *record_ids)
            answer = await getattr(self._server.store, call)(*arguments)
            seen(answer)
            return answer

        try:
            return await self._ask(call, request, repeat=False)
        except BackendUnavailable:
            given_up = _now()
            raise

    connect = _passed_on("connect")

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        self._witness.records.adding(adds)
        return await self._add(shard, adds)

    async def _add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Add records; what a retired shard does not take goes to the shards that take it now."""
        seen = partial(self._witness.records.added, adds)
        try:
            since = self._witness.records.begun_at(adds)
            return await self._ask_shard("add", shard, adds, seen=seen, repeat=False, since=since)
        except Retired:
            shards = [self._shard_map.shard_of(add.key) for add in adds]
        answers: dict[int, bool | AiodigestError] = {}
        for other in dict.fromkeys(shards):
            indices = [index for index, its_shard in enumerate(shards) if its_shard == other]
            try:
                added = await self._add(other, [adds[index] for index in indices])
            except BackendUnavailable as error:
                added = [error] * len(indices)
            answers.update(zip(indices, added, strict=True))
        return [answers[index] for index in range(len(adds))]

    async def claim(self, shard: int, count: int, *arguments: Any, **named: Any) -> Claims:
        self._witness.claiming(self._process, count)
        sent, seen = _now(), partial(self._witness.leased, self._process)
        claims: Claims = await self._ask_shard("claim", shard, count, *arguments, seen=seen, repeat=False, **named)
        self._witness.holds(self._process, claims.leases, sent)
        first = [
            replace(lease, entries=lease.entries[:3] if lease.size > 8 else lease.entries) for lease in claims.leases
        ]
        return replace(claims, leases=first)  # the rest is paged

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        return await self._ask_shard("read", shard, lease, start, min(count, 3))

    async def renew(
        self, shard: int, leases: Sequence[Lease], *arguments: Any, **named: Any
    ) -> Sequence[bool | AiodigestError]:
        sent = _now()
        kept: Sequence[bool | AiodigestError] = await self._ask_shard("renew", shard, leases, *arguments, **named)
        self._witness.conducts[self._process].away = False
        self._witness.holds(self._process, [lease for lease, held in zip(leases, kept, strict=True) if held], sent)
        self._witness.holds_no_more([lease for lease, held in zip(leases, kept, strict=True) if not held])
        return kept

    async def close(self, shard: int, closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
        for close in closes:
            self._witness.burying(close)
        closed: list[Closed] = await self._ask_shard("close", shard, closes, seen=partial(self._muted, closes))
        for close, answer in zip(closes, closed, strict=True):
            if answer.status == "part":
                self._witness.goes_on(self._process, close.lease.digest_id, answer.digest_id)
            else:
                self._witness.holds_no_more([close.lease])
        return closed

    def _muted(self, closes: Sequence[Close], answers: Sequence[Closed]) -> None:
        for close, answer in zip(closes, answers, strict=True):
            if close.mute and answer.status != "lost":
                self._witness.muted(close.lease.key, Mute())

    async def retry(self, shard: int, retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
        kept = await self._ask_shard("retry", shard, retries)
        self._witness.holds_no_more([retry.lease for retry in retries])
        return kept

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> Sequence[bool | AiodigestError]:
        self._witness.holds_no_more(leases)
        return await self._ask_shard("release", shard, leases, started)

    async def postpone(
        self, shard: int, postpones: Sequence[Postpone], limits: Limits
    ) -> Sequence[bool | AiodigestError]:
        self._witness.holds_no_more([postpone.lease for postpone in postpones])
        return await self._ask_shard("postpone", shard, postpones, limits)

    async def clock_ms(self, shard: int) -> int:
        return self._server.now_ms()

    async def throttle(self, wanted: int, *arguments: Any, **named: Any) -> Grant:
        return await self._ask(
            "throttle", partial(self._server.store.throttle, wanted, *arguments, **named), repeat=False
        )

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

    schedule, maintenance = _passed_on("schedule"), _passed_on("maintenance")
    flush, reschedule = _passed_on("flush"), _passed_on("reschedule")
    look, cooling, entries, page, counts, erase, dead_letters, dead_letter = (
        _passed_on(f"operations.{call}")
        for call in ("look", "cooling", "entries", "page", "counts", "erase", "dead_letters", "dead_letter")
    )

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        return await self._ask_shard("open", shard, key, lease_ms, limits, repeat=False)

    async def mute(self, key: str, mute: Mute, limits: Limits) -> bool:
        return await self._ask_once("mute", lambda _: self._witness.muted(key, mute), key, mute, limits)

    async def unmute(self, key: str, limits: Limits) -> bool:
        return await self._ask_once("unmute", lambda _: self._witness.muted(key), key, limits)

    async def delete(self, key: str) -> bool:
        return await self._ask_once("delete", lambda _: self._witness.removed(key), key)

    async def remove(self, key: str, name: bytes, limits: Limits) -> bool:
        def seen(went: bool) -> None:
            if went:
                self._witness.removed(key, id_of(name))
            else:  # a newer value may have gone, and an older one, under delivery, stays
                self._witness.records.removed(key, id_of(name))

        return await self._ask_once("remove", seen, key, name, limits)

    async def replay(self, letter_id: str, terms: Terms, own: bool | None) -> bool:
        letter, records = await self._server.store.operations.dead_letter(letter_id), self._witness.records
        return await self._ask_once("replay", lambda _: letter and records.replayed(letter), letter_id, terms, own)

    async def discard(self, letter_id: str) -> bool:
        letter, records = await self._server.store.operations.dead_letter(letter_id), self._witness.records
        return await self._ask_once("discard", lambda done: letter and done and records.discarded(letter), letter_id)


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
