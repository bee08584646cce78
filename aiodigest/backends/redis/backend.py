"""``RedisBackend``: timelines in Redis or Valkey, each transition one script in ``aiodigest/backends/redis/lua``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import suppress
from math import inf
from operator import attrgetter
from time import time_ns
from typing import TYPE_CHECKING, Any, Self, cast
from uuid import uuid4

from aiodigest.backend import (
    DIGEST_BYTES,
    FEATURES,
    Add,
    Backend,
    Claims,
    Close,
    Closed,
    Grant,
    Lease,
    Move,
    Mute,
    Operations,
    Postpone,
    Retired,
    Retry,
    ShardMap,
    Tokens,
    needs_unknown,
)
from aiodigest.backends.redis import scripts
from aiodigest.backends.redis.connections.url import Source
from aiodigest.backends.redis.namespace import BATCH, Namespace, Server
from aiodigest.backends.redis.scripts import Argument, number, stale_at, text
from aiodigest.errors import AiodigestError, BackendUnavailable, InvalidState, LimitExceeded
from aiodigest.logs import logger_of
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import id_of, identity

if TYPE_CHECKING:
    from aiodigest.timing.throttle import Rate

logger = logger_of(__name__)

Fields = Sequence[bytes | int]
_told_limits = set[str]()  # namespaces of which this process has told that its limits are not those of the workers
TRIES = 3  # of a call whose terms did not tell of the server's time


class RedisBackend(Backend):
    """Timelines of a namespace on a server or a cluster. Making one does no I/O, but checks its arguments.

    ``source`` is a URL, a client whose settings are copied, or a server that is started with the backend. ``shards``:
    None for as many as the namespace has, 1 if it is new. ``timeout``: seconds for a call, from its wait for a
    connection to its answer. An add returns once ``wait_replicas`` replicas have it (``WAIT``). Tests give their own
    clock ``now`` (ms; None: the server's), source of names that no other has, and ``features`` that are known.
    """

    def __init__(
        self,
        source: Source | Server,
        *,
        namespace: str,
        shards: int | None = None,
        timeout: float = 5.0,
        wait_replicas: int = 0,
        now: Callable[[], int] | None = None,
        nonce: Callable[[], str] = lambda: uuid4().hex,
        features: Collection[str] = FEATURES,
    ) -> None:
        self._settings: dict[str, Any] = {
            "namespace": namespace, "shards": shards, "timeout": timeout, "wait_replicas": wait_replicas, "now": now,
            "features": features,
        }  # fmt: skip
        self._features = " ".join(features)
        self.namespace = Namespace(source, namespace, shards, timeout, wait_replicas, now)
        self._operations: Operations | None = None
        self._nonce = nonce

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, namespace={self.namespace.name!r})"

    @property
    def url(self) -> str:
        return self.namespace.url

    @property
    def place(self) -> object:
        """The server and the namespace, equal for two backends that work on the same timelines."""
        return self.namespace.place

    @property
    def shard_map(self) -> ShardMap:
        return self.namespace.layout.shard_map

    @property
    def operations(self) -> Operations:
        if self._operations is None:
            from aiodigest.backends.redis.operations import RedisOperations  # not needed just to add

            self._operations = RedisOperations(self.namespace)
        return self._operations

    def clone(self) -> Self:
        source = self.namespace.server.clone() if self.namespace.server else self.namespace.source
        return type(self)(source, nonce=self._nonce, **self._settings)

    def why_down(self) -> str | None:
        return self.namespace.why_down()

    async def connect(self) -> None:
        """Connect, and look up the layout; start or join the server if it is one's own."""
        await self.namespace.connect()

    async def aclose(self) -> None:
        """Close the connections, and end the share of a server of one's own. It may be connected again."""
        await self.namespace.aclose()

    async def clock_ms(self, shard: int) -> int:
        return await self.namespace.clock_ms(shard)

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """See ``Backend.add``; raises if all failed at once.

        An add is sent again only if nothing was done with it: its shard was retired, or its call was too long for one
        script. Those of a timeline stay in order.
        """
        answers: dict[int, bool | AiodigestError] = {}
        unsent: list[tuple[int, Sequence[int]]] = [(shard, range(len(adds)))]
        late = min(map(attrgetter("until"), adds), default=inf)
        for where, indices in unsent:
            try:
                await self._add(where, adds, indices, answers, late)
            except Retired:
                groups: dict[int, list[int]] = {}
                for index in indices:
                    if index not in answers:
                        groups.setdefault(self.shard_map.shard_of(adds[index].key), []).append(index)
                unsent += groups.items()
            except AiodigestError as error:
                if type(error) is AiodigestError:  # nobody foresaw it; a proxy may say so of what did arrive
                    error = BackendUnavailable(str(error), stored="unknown")
                if not answers and len(indices) == len(adds):  # so it is the error of each
                    raise error from error.__cause__
                answers |= {index: error for index in indices if index not in answers}
        told = [*map(answers.__getitem__, range(len(adds)))]
        if {bool}.issuperset(map(type, told)):
            return told
        return [each if isinstance(each, bool) else _of_record(add, each) for add, each in zip(adds, told, strict=True)]

    async def _add(
        self,
        shard: int,
        adds: Sequence[Add],
        indices: Sequence[int],
        answers: dict[int, bool | AiodigestError],
        late: float,
    ) -> None:
        """Add some of the adds, in as many calls as needed; note the answers, also those before a call that fails."""
        namespace, now, left = self.namespace, self.namespace.time(), indices
        about, tries = self._about(now), 0
        while left:
            arguments, order = scripts.pack_adds(adds, left[:BATCH], about)
            reply = cast("list[object]", await namespace.call("add", shard, *arguments, now=now, late=late))
            given = scripts.unpack_added(reply)
            if (theirs := scripts.other_limits(reply)) is not None:
                self._tell_limits(adds, theirs)
            kinds, told = set(map(type, given)), cast("list[bool | AiodigestError]", given)
            if kinds != {bool} or len(given) > len(order):
                told = await namespace.answers_of(shard, given, [adds[index].key for index in order], bool)
            answers.update(zip(order, told, strict=False))
            left = [*order[len(told) :], *left[BATCH:]]
            if bytes in kinds:  # some may have come under terms of another time
                stale = {index: at for index, answer in zip(order, given, strict=False) if (at := stale_at(answer))}
                about, tries = max(stale.values(), default=about), tries + 1
                for index in stale:
                    del answers[index]  # it has none yet, should the next call fail
                left = [*stale, *left]
                if tries > TRIES:
                    raise leaping(self.url)

    def _tell_limits(self, adds: Sequence[Add], theirs: Limits) -> None:
        """Log, once a process, that what is added here keeps to other limits than those by which workers drop."""
        ours = next((add.terms.limits for add in adds if not add.own and add.terms.limits != theirs), None)
        if ours is not None and self.namespace.name not in _told_limits:
            _told_limits.add(self.namespace.name)
            line = "the policy here (%s) is not that of the workers (%s), which drop what is over theirs"
            logger.warning(line, ours.told, theirs.told, extra={"namespace": self.namespace.name})

    def _about(self, now: Argument = "") -> int:
        """Return about what time it is by the servers' clocks."""
        now = now or self.namespace.time()
        return now if isinstance(now, int) else time_ns() // 1_000_000

    # Delivering

    async def claim(
        self,
        shard: int,
        count: int,
        lease_ms: int,
        limits: Limits,
        *,
        sample: bool = False,
        doubtful: bool = True,
        bound: int = DIGEST_BYTES,
    ) -> Claims:
        packed, flags = scripts.pack_limits(limits), (int(sample), bound, int(doubtful), self._features)
        reply = await self.namespace.call("claim", shard, count, lease_ms, packed, self._nonce(), *flags)
        now, wait, wake_up, leases, broken, expired, barred, left, shift, let_go = cast(
            "tuple[int, int, bytes, list[Any], list[bytes], list[bytes | int], int, list[bytes], int, int]", reply
        )
        return Claims(
            [scripts.unpack_lease(lease) for lease in leases],
            text(wake_up),
            None if wait < 0 else wait / 1000,
            now,
            [(text(key), text(problem)) for key, problem in zip(broken[::2], broken[1::2], strict=True)],
            [(text(key), number(size)) for key, size in zip(expired[::2], expired[1::2], strict=True)],
            barred == 1,
            [(text(key), text(need)) for key, need in zip(left[::2], left[1::2], strict=True)],
            now - shift,
            let_go,
        )

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        packed = scripts.pack_limits(limits)
        reply = await self.namespace.call("open", shard, key, lease_ms, packed, self._nonce(), self._features)
        if isinstance(reply, bytes) and reply.startswith(b"NEEDS "):
            raise needs_unknown(key, text(reply).removeprefix("NEEDS "))
        if isinstance(reply, bytes):
            raise self.namespace.broken(key, text(reply))
        return None if reply is None else scripts.unpack_lease(cast("Sequence[object]", reply))

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        return await self.namespace.read(shard, lease.key, lease.token, lease.digest_id, start, count)

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> list[bool | AiodigestError]:
        if not leases:  # only to tell that there is a worker
            await self.namespace.call("renew", shard, lease_ms)
        return await self.namespace.call_each(
            "renew", shard, [lease_ms], [*map(scripts.pack_lease, leases)], scripts.done
        )

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed | AiodigestError]:
        about = self._about()
        items = [scripts.pack_close(close, about) for close in closes]
        shards = self.shard_map
        await self._mute_everywhere(closes)
        closed = await self.namespace.call_each(
            "close", shard, [self._nonce()], items, scripts.unpack_closed, numbered=True
        )
        if self.shard_map != shards:  # the call has told of others
            await self._mute_everywhere(closes)
        return closed

    async def _mute_everywhere(self, closes: Sequence[Close]) -> None:
        """Mute what closes are to mute also in its other shard, if it may have two; before the close, which is made
        again if that fails."""
        if self.shard_map.draining:
            for close in closes:
                if close.mute:
                    with suppress(InvalidState):  # it is broken, as its close says
                        await self.mute(close.lease.key, Mute(drop=True), close.limits)

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool | AiodigestError]:
        about = self._about()
        items = [scripts.pack_retry(retry, about) for retry in retries]
        return await self.namespace.call_each("retry", shard, [self._nonce()], items, scripts.done, numbered=True)

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool | AiodigestError]:
        items = [*map(scripts.pack_lease, leases)]
        return await self.namespace.call_each("release", shard, [int(started)], items, scripts.done)

    async def postpone(self, shard: int, postpones: Sequence[Postpone], limits: Limits) -> list[bool | AiodigestError]:
        items = [*map(scripts.pack_postpone, postpones)]
        return await self.namespace.call_each("postpone", shard, [scripts.pack_limits(limits)], items, scripts.done)

    async def throttle(
        self,
        wanted: int,
        rate: Rate,
        asker: int,
        returned: Sequence[Tokens] = (),
        pauses: Sequence[tuple[str, int]] = (),
        known: int = 0,
    ) -> Grant:
        await self.namespace.connected()
        while True:
            source = await self.namespace.source_of_tokens()
            mine = [each for each in returned if each.source == source]  # those of another are no debt here
            items = scripts.pack_throttle(rate, asker, known, mine, pauses)
            try:
                reply = await self.namespace.call("throttle", source, wanted, *items, settled=True)
            except Retired:
                continue  # the layout has changed
            return scripts.unpack_grant(source, cast("list[Any]", reply))

    async def wait(self, shard: int, last: str) -> str:
        connections = await self.namespace.connected()
        return await connections.listen(self.namespace.key(shard, "wake"), last)

    # By hand

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        return await self._promote("schedule", deadline_ms)

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        return [key for key, _ in await self._promote("maintenance", deadline_ms)]

    async def _promote(self, name: str, deadline_ms: int | None) -> list[tuple[str, int]]:
        moved: list[tuple[str, int]] = []
        deadline, now = "" if deadline_ms is None else deadline_ms, self.namespace.time()
        async for answer in self.namespace.call_all(name, deadline, now=now):
            reply = cast("list[bytes]", answer)
            moved += [(text(key), int(due)) for key, due in zip(reply[::2], reply[1::2], strict=True)]
        return moved

    async def delete(self, key: str) -> bool:
        return 1 in await self.namespace.call_of(key, "delete", key)

    async def flush(self, key: str) -> bool:
        return 1 in await self.namespace.call_of(key, "flush", key)

    async def mute(self, key: str, mute: Mute, limits: Limits) -> bool:
        item = scripts.pack_mute(key, mute)
        replies = await self.namespace.call_of(key, "mute", scripts.pack_limits(limits), 0, *item)
        answers = [answer for reply in cast("list[list[object]]", replies) for answer in reply]
        for problem in answers:
            if isinstance(problem, bytes):
                raise self.namespace.broken(key, text(problem))
        return 1 in answers

    async def unmute(self, key: str, limits: Limits) -> bool:
        return 1 in await self.namespace.call_of(key, "unmute", key, scripts.pack_limits(limits), "", 0)

    async def remove(self, key: str, name: bytes, limits: Limits) -> bool:
        packed = scripts.pack_limits(limits)
        answers = await self.namespace.call_of(key, "remove", key, name, packed, self._nonce())
        return 1 in answers and -1 not in answers

    async def reschedule(self, key: str, move: Move) -> int | None:
        if move.at_ms is not None:
            mode, value = "at", move.at_ms
        elif move.delay_ms is not None:
            mode, value = "delay", move.delay_ms
        else:
            mode, value = "policy", move.gap_ms
        replies = await self._rescheduled(key, move.terms, (mode, value, move.iteration), int(move.by_clock))
        # the earliest of what it may move: one timeline, but for the time of a change of their shards
        moved = cast("list[Fields]", replies)
        if dues := [number(reply[1]) for reply in moved if reply[0] == b"due"]:
            return min(dues)
        if [b"outdated"] in moved:
            return None
        if [b"retry"] in moved:
            raise InvalidState(f"timeline {key!r} waits for a retry, which no policy places: give at or delay")
        raise InvalidState(f"timeline {key!r} is not waiting: only a waiting timeline can be rescheduled")

    async def _rescheduled(self, key: str, terms: Terms, moves: tuple[Argument, ...], by_clock: int) -> list[object]:
        """Call ``reschedule`` with what terms say of the server's time; again if that is another than thought."""
        about, limits = self._about(), scripts.pack_limits(terms.limits)
        for _ in range(TRIES):
            mode, value = moves[0], int(moves[1])
            if mode == "policy":
                delays = scripts.pack_delays(terms, about, value)
            else:
                delays = scripts.pack_delays(terms, about, to_ms=max(about, value + (about if mode == "delay" else 0)))
            replies = await self.namespace.call_of(key, "reschedule", key, *moves, delays, limits, by_clock)
            if not (stale := [at for reply in replies if (at := stale_at(reply))]):
                return replies
            about = max(stale)
        raise leaping(self.url)

    async def _settled(self, letter_id: str, name: str, *arguments: Argument) -> AsyncIterator[object]:
        """Yield the answers of the shards that take the adds, once the dead letter is in no old shard any more: else a
        process that moves it might bring it back after it was taken. A broken one stays in its old shard."""
        await self.namespace.connected()
        asked = set[int]()
        while left := [shard for shard in self.namespace.shard_map.current if shard not in asked]:
            if not asked and (old := await self.namespace.bring(letter_id)) is not None:
                yield await self.namespace.call(name, old, *arguments)
            asked.add(left[0])
            try:
                yield await self.namespace.call(name, left[0], *arguments, settled=True)
            except Retired:
                asked.clear()  # the layout has changed

    async def replay(self, letter_id: str, terms: Terms, own: bool | None) -> bool:
        about = self._about()
        for _ in range(TRIES):
            ready = await self._replay(letter_id, terms, own, about)
            if isinstance(ready, bool):
                return ready
            about = ready
        raise leaping(self.url)

    async def _replay(self, letter_id: str, terms: Terms, own: bool | None, about: int) -> bool | int:
        """Replay with what terms say of about a time; return the server's time if that is another."""
        limits, owned = scripts.pack_limits(terms.limits), "" if own is None else int(own)
        arguments = (letter_id, scripts.pack_delays(terms, about), limits, owned)
        async for reply in self._settled(letter_id, "replay", *arguments):
            if (at := stale_at(reply)) is not None:
                return at
            if isinstance(reply, bytes):
                raise InvalidState(f"the timeline of dead letter {letter_id!r} is broken: {text(reply)}")
            match cast("Fields", reply):
                case [b"missing"]:
                    continue
                case [b"open", key]:
                    raise InvalidState(f"timeline {text(key)!r} has a digest under delivery or in a retry wait")
                case [b"full", key, size, capacity]:
                    raise LimitExceeded(f"timeline {text(key)!r} would hold {size} records; its capacity is {capacity}")
                case [status, *_]:
                    return status == b"ready"
                case _:
                    break
        raise InvalidState(f"there is no dead letter {letter_id!r}")

    async def discard(self, letter_id: str) -> bool:
        async for dropped in self._settled(letter_id, "discard", letter_id):
            if dropped == 1:
                return True
        return False


def leaping(url: str) -> BackendUnavailable:
    """Return the error of a server whose clock is another one each time."""
    return BackendUnavailable(f"{url} is unavailable: its clock leaps by more than an hour from call to call")


def _of_record(add: Add, error: AiodigestError) -> AiodigestError:
    """Return the error of an add; if the store was unavailable, it says of which record."""
    if not isinstance(error, BackendUnavailable):
        return error
    record_id = id_of(identity(add.entry), "replace")
    return BackendUnavailable(str(error), record_id=record_id, stored=error.stored)
