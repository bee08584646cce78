"""The scripts and the reference, driven by the same calls: every answer and everything kept must be equal.

The scripts run on one server, behind sentinels, and on a cluster. A ledger, which knows neither them nor the reference,
checks after each call what became of every record: see ``storeledger.py``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from storeledger import Ledger
from stores import Place
from storestate import State, check_invariants, forget, redis_state, reference_state

from aiodigest import models
from aiodigest.backend import (
    Add,
    Backend,
    Bookmark,
    Claims,
    Close,
    Closed,
    Lease,
    Letter,
    Move,
    Page,
    RawLetter,
    Retry,
    Window,
)
from aiodigest.errors import AiodigestError, InvalidState, LeaseLost, LimitExceeded
from aiodigest.memory import ReferenceBackend
from aiodigest.policy import Limits, Policy, Terms
from aiodigest.redisbackend import RedisBackend
from aiodigest.timelines import only
from aiodigest.wire import HEADER, aged, identity, latest, pack

NOW = 1_700_000_000_000
LEASE = 60_000
GIVEN = int(os.environ.get("AIODIGEST_TEST_EXAMPLES", "0"))
EXAMPLES = {"redis": 200, "sentinel": 30, "cluster": 50}  # the scripts are the same everywhere, the way to them is not

KEYS = ("T", "T:log", "{T}", "}", "\0", "\N{POSTBOX}" * 256)
IDS = (b"a", b"b", b"c", b"\xff\xfe", b"\0:}")
POLICIES = (
    Policy(),
    Policy(capacity=2, minimum_delay=10, increment_delay=30, maximum_delay=60, ttl=100),
    Policy(capacity=5, max_size=2, initial_delay=20, increment_delay=0, ttl=2000),
    Policy(capacity=4, max_size=3, max_age=50, minimum_delay=0, initial_delay=5, increment_delay=7, maximum_delay=100),
    Policy(capacity=3, minimum_delay=1800, max_age=0.001),
)
STEPS = (
    0,
    1,
    10,
    1_000,
    7_000,
    29_999,
    30_000,
    31_000,
    60_000,
    300_000,
    1_900_000,
    90_000_000,
    31 * 86_400_000,
    -1,
    -40_000,
    -400_000,
)
STAMPS = (None, NOW, NOW + 10**9, 0)  # of records: few, so that there are ties

# what is drawn more often stands there twice: most calls should meet something
keys = st.sampled_from((*KEYS[:1] * 6, *KEYS[:3] * 2, *KEYS))
ids = st.sampled_from(IDS)
policies = st.sampled_from(POLICIES)
workers = st.integers(0, 2)
leases = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 7))  # how many leases ago the worker got it
small = st.integers(0, 4)
picks = st.lists(st.integers(0, 9), min_size=1, max_size=3)  # which records of a digest
delays = st.sampled_from((0, 1, 5_000, 300_000, 86_400_000))

SETTLED = ("close", "retry", "release", "flush", "read")  # what answers the same however late it is repeated
REPEATABLE = (*SETTLED, "renew", "schedule", "maintenance", "delete", "remove", "reschedule", "replay", "discard")


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        return self.now


class Pair(Backend):
    """The reference and a real store as one: both must answer the same, keep the same, and keep their promises.

    What a call changed is looked at if it may change anything; if a read did, the next that may fails.
    """

    def __init__(self, place: Place, namespace: str) -> None:
        ours, theirs = count(1), count(1)
        self.clock = Clock()
        self.reference = ReferenceBackend(now=self.clock, nonce=lambda: f"n{next(ours)}")
        self.redis = RedisBackend(place.url, namespace=namespace, now=self.clock, nonce=lambda: f"n{next(theirs)}")
        self.ledger = Ledger()
        self._namespace = namespace
        self._client = place.client_of(namespace)
        self._rung: tuple[int, Any] = (0, None)

    @property
    def shards(self) -> int:
        return 1

    def shard_of(self, key: str) -> int:
        return 0

    async def connect(self) -> None:
        await self.redis.connect()

    async def aclose(self) -> None:
        await self.redis.aclose()
        forget(self._client, self._namespace)
        self._client.close()

    async def _answer(self, call: Callable[[Backend], Awaitable[Any]]) -> Any:
        """What both answer, or the error that both raise."""

        async def outcome(backend: Backend) -> Any:
            try:
                return await call(backend)
            except AiodigestError as error:
                return error

        expected, actual = await outcome(self.reference), await outcome(self.redis)
        if isinstance(expected, Claims):
            actual = replace(actual, bell=expected.bell, broken=tuple(actual.broken))
        if isinstance(expected, AiodigestError):
            assert (type(actual), str(actual)) == (type(expected), str(expected))
        else:
            assert actual == expected
        return expected

    async def _read(self, call: Callable[[Backend], Awaitable[Any]]) -> Any:
        answer = await self._answer(call)
        if isinstance(answer, AiodigestError):
            raise answer
        return answer

    async def _change(self, call: Callable[[Backend], Awaitable[Any]], enter: Callable[[Any, State], None]) -> Any:
        answer = await self._answer(call)
        enter(answer, self.state())
        if isinstance(answer, AiodigestError):
            raise answer
        return answer

    def state(self) -> State:
        """What both keep."""
        expected = reference_state(self.reference.machines[0])
        actual = redis_state(self._client, self._namespace)
        assert actual == expected
        check_invariants(actual)
        last = self._client.xrevrange(f"{{{self._namespace}}}:wake", count=1)
        rung = (self.reference._rung[0], last[0][0] if last else None)
        assert (rung[0] == self._rung[0]) == (rung[1] == self._rung[1]), "the doorbell of one rang, the other's did not"
        self._rung = rung
        return actual

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        return await self._change(
            lambda store: store.add(0, adds),
            lambda answers, state: self.ledger.added(adds, answers, self.clock.now, state),
        )

    def plant(self, key: str, entry: bytes) -> None:
        """Append what no version of this library would, to a log that there is."""
        self.reference.machines[0].held[key].log.append(entry)
        self._client.rpush(f"{{{self._namespace}}}:log:{key}", entry)
        self.ledger.planted(key, entry, self.state())

    async def claim(self, shard: int, slots: int, lease_ms: int, limits: Limits) -> Claims:
        return await self._change(
            lambda store: store.claim(0, slots, lease_ms, limits),
            lambda claims, state: self.ledger.claimed(claims, limits, self.clock.now, state),
        )

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        return await self._change(
            lambda store: store.open(0, key, lease_ms, limits),
            lambda lease, state: self.ledger.opened(lease, limits, self.clock.now, state),
        )

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        entries = await self._read(lambda store: store.read(0, lease, start, count))
        self.ledger.read(lease, start, count, entries)
        return entries

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> Sequence[bool | AiodigestError]:
        return await self._change(
            lambda store: store.renew(0, leases, lease_ms),
            lambda answers, state: self.ledger.renewed(leases, answers, self.clock.now + lease_ms, state),
        )

    async def close(self, shard: int, closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
        return await self._change(
            lambda store: store.close(0, closes),
            lambda answers, state: self.ledger.closed(closes, answers, self.clock.now, state),
        )

    async def retry(self, shard: int, retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
        return await self._change(
            lambda store: store.retry(0, retries),
            lambda answers, state: self.ledger.retried(retries, answers, self.clock.now, state),
        )

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> Sequence[bool | AiodigestError]:
        return await self._change(
            lambda store: store.release(0, leases, started),
            lambda answers, state: self.ledger.released(leases, answers, started, state),
        )

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        deadline = self.clock.now if deadline_ms is None else deadline_ms
        return await self._change(
            lambda store: store.schedule(deadline_ms),
            lambda moved, state: self.ledger.moved([key for key, _ in moved], "waiting", deadline, state),
        )

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        deadline = self.clock.now if deadline_ms is None else deadline_ms
        return await self._change(
            lambda store: store.maintenance(deadline_ms),
            lambda moved, state: self.ledger.moved(moved, "leased", deadline, state),
        )

    async def flush(self, key: str) -> bool:
        return await self._change(
            lambda store: store.flush(key), lambda answer, state: self.ledger.flushed(key, answer, state)
        )

    async def delete(self, key: str) -> bool:
        return await self._change(
            lambda store: store.delete(key), lambda answer, state: self.ledger.deleted(key, answer, state)
        )

    async def remove(self, key: str, record_id: bytes, limits: Limits) -> bool:
        return await self._change(
            lambda store: store.remove(key, record_id, limits),
            lambda answer, state: self.ledger.removed(key, record_id, limits, answer, self.clock.now, state),
        )

    async def reschedule(self, key: str, move: Move) -> int | None:
        return await self._change(
            lambda store: store.reschedule(key, move),
            lambda answer, state: self.ledger.rescheduled(key, move, answer, self.clock.now, state),
        )

    async def replay(self, letter_id: str, terms: Terms, own: bool) -> bool:
        return await self._change(
            lambda store: store.replay(letter_id, terms, own),
            lambda answer, state: self.ledger.replayed(letter_id, terms, own, answer, self.clock.now, state),
        )

    async def discard(self, letter_id: str) -> bool:
        return await self._change(
            lambda store: store.discard(letter_id),
            lambda answer, state: self.ledger.discarded(letter_id, answer, state),
        )

    async def wait(self, shard: int, bell: str) -> str:
        return await self.reference.wait(0, bell)

    async def look(self, key: str) -> Window | None:
        return await self._read(lambda store: store.look(key))

    async def entries(self, key: str) -> list[bytes]:
        return await self._read(lambda store: store.entries(key))

    async def page(self, shard: int, state: models.State, count: int, after: Bookmark | None = None) -> Page[Window]:
        return await self._read(lambda store: store.page(0, state, count, after))

    async def counts(self) -> dict[str, int]:
        async def counted(store: Backend) -> dict[str, int]:
            return {name: number for name, number in (await store.counts()).items() if number}

        return await self._read(counted)

    async def erase(self) -> int:
        return await self.redis.erase() + await self.reference.erase()

    async def letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        return await self._read(lambda store: store.letters(0, count, after))

    async def letter(self, letter_id: str, shard: int | None = None) -> RawLetter | None:
        async def found(store: Backend) -> RawLetter | None:
            letter = await store.letter(letter_id, shard)
            return letter and replace(letter, entries=tuple(letter.entries))

        return await self._read(found)


@dataclass
class Call:
    """A call whose reply may be lost."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    at: int
    state: State


class Stores(RuleBasedStateMachine):
    """Three workers, who may be slow, cut off from the store, or long replaced, and whoever adds and administers."""

    place: Place
    numbers = count(1)
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.stores = Pair(self.place, f"model-{next(self.numbers)}")
        self.loop.run_until_complete(self.stores.connect())
        self.machine = self.stores.reference.machines[0]
        self.clock = self.stores.clock
        self.serial = count(1)  # in each value, so that each entry is another
        self.given: tuple[list[Lease], ...] = ([], [], [])
        self.adds: list[Add] = []
        self.ends: dict[str, Bookmark | None] = {}  # where the page that was read last has ended
        self.last: Call | None = None

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stores.aclose())

    def call(self, name: str, *arguments: Any) -> Any:
        """Make a call on both stores and return the answer, or None if it raised what it may."""
        answer = None
        with suppress(InvalidState, LimitExceeded, LeaseLost):
            answer = self.loop.run_until_complete(getattr(self.stores, name)(*arguments))
        if name in REPEATABLE:
            self.last = Call(name, arguments, answer, self.clock.now, self.stores.ledger.state)
        return answer

    def lease(self, worker: int, ago: int) -> Lease:
        """One of the leases that a worker was given, those first that it holds; of another's, if it never had one."""
        given = sorted(self.given[worker] or next(filter(None, self.given)), key=self.stores.ledger.holds)
        return given[-1 - ago % len(given)]

    def ids_of(self, lease: Lease, picked: Sequence[int]) -> list[bytes]:
        known = [identity(entry) for entry in lease.entries] + [b"unknown"]
        return [known[pick % len(known)] for pick in picked]

    def ended(self, lease: Lease, taken: int, others: Sequence[bytes] | None = ()) -> tuple[int, int]:
        """How many records of a part a worker reports as delivered (all but those it names apart), and as too old."""
        part = latest(lease.entries[:taken])
        old = [entry for entry in part if aged(entry, lease.cut_ms)]
        named = part if others is None else [entry for entry in part if identity(entry) in others]
        return sum(entry not in old and entry not in named for entry in part), len(old)

    def entry(self, record_id: bytes, stamp: int | None, shape: int = 0) -> bytes:
        value = b"v%d" % next(self.serial)
        if shape == 1:  # of a later version, which nobody here can read
            return b"\x02" + pack(record_id, stamp and stamp * 1000, value)[1:]
        if shape == 2:  # its id is longer than all of it
            return HEADER.pack(1, 0, 500) + record_id + value
        return pack(record_id, stamp and stamp * 1000, value)

    @rule(step=st.sampled_from(STEPS))
    def time_passes(self, step: int) -> None:
        self.clock.now += step

    @rule(early=st.sampled_from((0, 0, 0, 1)))
    def something_comes_due(self, early: int) -> None:
        times = [*self.machine.waiting.values(), *self.machine.leased.values(), self.machine.hold_ms]
        now = self.clock.now
        self.clock.now = min((time - early for time in times if time > now), default=now)

    @rule(early=st.sampled_from((0, 0, 1)))
    def a_lease_goes_by(self, early: int) -> None:
        """While a worker whose slots are taken looks in as often as workers do."""
        for step in (LEASE // 3, LEASE // 3, LEASE // 3 - early):
            self.clock.now += step
            self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)

    @rule(
        adds=st.lists(st.tuples(keys, ids, policies, st.booleans(), st.sampled_from(STAMPS)), max_size=8),
        shape=st.sampled_from((0, 0, 1, 2)),
    )
    def add(self, adds: Sequence[tuple[str, bytes, Policy, bool, int | None]], shape: int) -> None:
        self.adds = [
            Add(key, self.entry(record_id, stamp, 0 if index else shape), policy.terms, own)
            for index, (key, record_id, policy, own, stamp) in enumerate(adds)
        ]
        self.call("add", 0, self.adds)

    @rule(key=keys, record_id=ids, policy=policies, own=st.booleans(), times=st.integers(1, 12))
    def add_many(self, key: str, record_id: bytes, policy: Policy, own: bool, times: int) -> None:
        first = IDS.index(record_id)
        self.adds = [
            Add(key, self.entry(IDS[(first + number) % 5], None), policy.terms, own) for number in range(times)
        ]
        self.call("add", 0, self.adds)

    @precondition(lambda self: bool(self.adds))
    @rule()
    def add_again_what_nobody_answered(self) -> None:
        self.call("add", 0, self.adds)

    @precondition(lambda self: any(held.log for held in self.machine.held.values()))
    @rule(pick=small, short=st.booleans())
    def something_else_writes_to_a_log(self, pick: int, short: bool) -> None:
        logs = [key for key, held in self.machine.held.items() if held.log]
        entry = HEADER.pack(1, next(self.serial), 0)[:10] if short else b""
        self.stores.plant(logs[pick % len(logs)], entry)

    @rule(
        worker=workers,
        slots=st.sampled_from((0, 1, 2, 3, 3)),
        policy=policies,
        lease_ms=st.sampled_from((LEASE, LEASE, 1_000)),
    )
    def claim(self, worker: int, slots: int, policy: Policy, lease_ms: int) -> None:
        self.given[worker].extend(self.call("claim", 0, slots, lease_ms, policy.terms.limits).leases)

    @precondition(lambda self: bool(self.tried()))
    @rule(worker=workers, pick=small, record_id=ids, policy=policies)
    def a_digest_is_tried_again(self, worker: int, pick: int, record_id: bytes, policy: Policy) -> None:
        """With a newer record waiting, which only a known outcome may have let in."""
        tried = self.tried()
        key = tried[pick % len(tried)]
        self.adds = [Add(key, self.entry(record_id, None), policy.terms)]
        self.call("add", 0, self.adds)
        self.call("flush", key)
        self.claim(worker, 3, policy, LEASE)

    def tried(self) -> list[str]:
        """The timelines whose digest was opened before, and is nobody's now."""
        return [key for key, held in self.machine.held.items() if held.delivery and key not in self.machine.leased]

    @rule(worker=workers, key=keys, policy=policies)
    def open(self, worker: int, key: str, policy: Policy) -> None:
        lease = self.call("open", 0, key, LEASE, policy.terms.limits)
        if lease:
            self.given[worker].append(lease)

    @rule(key=keys, policy=policies, fails=st.booleans())
    def digest(self, key: str, policy: Policy, fails: bool) -> None:
        """The verb of the five that is a context manager: without a hand-made lease, all records at once."""

        async def deliver() -> None:
            async with self.stores.digest(key, policy):
                if fails:
                    raise ZeroDivisionError

        with suppress(InvalidState, ZeroDivisionError):
            self.loop.run_until_complete(deliver())

    @precondition(lambda self: any(self.given))
    @rule(worker=workers, ago=leases, start=small, size=small)
    def read(self, worker: int, ago: int, start: int, size: int) -> None:
        self.call("read", 0, self.lease(worker, ago), start, size + 1)

    @precondition(lambda self: any(self.given))
    @rule(worker=workers, agos=st.lists(leases, min_size=1, max_size=3))
    def renew(self, worker: int, agos: Sequence[int]) -> None:
        self.call("renew", 0, [self.lease(worker, ago) for ago in agos], LEASE)

    @precondition(lambda self: any(self.given))
    @rule(
        worker=workers,
        picked=st.lists(
            st.tuples(
                leases, st.one_of(st.none(), small), st.booleans(), policies, st.none() | st.just([]) | picks, delays
            ),
            min_size=1,
            max_size=3,
        ),
    )
    def close(
        self, worker: int, picked: Sequence[tuple[int, int | None, bool, Policy, Sequence[int] | None, int]]
    ) -> None:
        closes: list[Close] = []
        for ago, taken, counts, policy, buried, cool in picked:
            lease = self.lease(worker, ago)
            if taken is None:
                taken = min(lease.part or lease.size, lease.size)
            letters: list[Letter] = []
            if buried is not None:
                letters = [Letter("some", self.ids_of(lease, buried)) if buried else Letter("all")]
            delivered, old = self.ended(lease, taken, letters[0].ids if letters else ())
            limits = policy.terms.limits
            closes.append(Close(lease, taken, delivered, cool, limits, LEASE, old, counts or bool(cool), letters))
        answers = self.call("close", 0, closes)
        for close, answer in zip(closes, answers, strict=True):
            if answer.status == "part":
                rest = close.lease.entries[-answer.left :]
                self.given[worker].append(
                    replace(close.lease, digest_id=answer.digest_id, size=answer.left, entries=rest)
                )

    @precondition(lambda self: any(self.given))
    @rule(
        worker=workers,
        picked=st.lists(
            st.tuples(leases, delays, st.one_of(st.none(), small), st.one_of(st.none(), picks)),
            min_size=1,
            max_size=3,
        ),
        give_back=st.booleans(),
        unknown=st.sampled_from((False, False, True)),
        policy=policies,
    )
    def retry(
        self,
        worker: int,
        picked: Sequence[tuple[int, int, int | None, Sequence[int] | None]],
        give_back: bool,
        unknown: bool,
        policy: Policy,
    ) -> None:
        retries: list[Retry] = []
        for ago, delay, taken, failed in picked:
            lease = self.lease(worker, ago)
            size = lease.size if taken is None else taken
            ids = None if failed is None or unknown else self.ids_of(lease, failed)
            delivered, old = self.ended(lease, size, ids)
            old -= sum(aged(entry, lease.cut_ms) for entry in only(latest(lease.entries[:size]), ids or ()))
            limits = policy.terms.limits
            error = f"boo {delay}"
            retries.append(Retry(lease, delay, error, limits, size, ids, delivered, give_back, unknown, old))
        self.call("retry", 0, retries)

    @precondition(lambda self: any(self.given))
    @rule(worker=workers, agos=st.lists(leases, min_size=1, max_size=3), started=st.booleans())
    def release(self, worker: int, agos: Sequence[int], started: bool) -> None:
        self.call("release", 0, [self.lease(worker, ago) for ago in agos], started)

    @rule(key=keys)
    def flush(self, key: str) -> None:
        self.call("flush", key)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.call("delete", key)

    @rule(key=keys, record_id=ids, policy=policies)
    def remove(self, key: str, record_id: bytes, policy: Policy) -> None:
        self.call("remove", key, record_id, policy.terms.limits)

    @rule(
        key=keys,
        at=st.one_of(st.none(), st.none(), st.sampled_from(STEPS)),
        delay=st.one_of(st.none(), st.none(), delays),
        policy=policies,
        outdated=st.sampled_from((0, 0, 0, 1)),
        gap=delays,
    )
    def reschedule(self, key: str, at: int | None, delay: int | None, policy: Policy, outdated: int, gap: int) -> None:
        held = self.machine.held.get(key)
        iteration = held.iteration + outdated if held else 0
        self.call("reschedule", key, Move(policy.terms, at and self.clock.now + at, delay, gap, iteration))

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def schedule(self, deadline: int | None) -> None:
        self.call("schedule", None if deadline is None else self.clock.now + deadline)

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def maintenance(self, deadline: int | None) -> None:
        self.call("maintenance", None if deadline is None else self.clock.now + deadline)

    @rule(key=keys, state=st.sampled_from(("waiting", "ready", "leased")), size=small)
    def look(self, key: str, state: models.State, size: int) -> None:
        self.call("look", key)
        self.call("entries", key)
        self.ends[state] = self.call("page", 0, state, size, self.ends.get(state)).end
        self.call("counts")
        assert self.stores.state() == self.stores.ledger.state, "a read changed what is kept"

    @precondition(lambda self: bool(self.machine.dead))
    @rule(pick=small, policy=policies, own=st.booleans(), discard=st.sampled_from((False, False, True)))
    def replay_or_discard(self, pick: int, policy: Policy, own: bool, discard: bool) -> None:
        self.ends["dead"] = self.call("letters", 0, 1, self.ends.get("dead")).end
        letters = self.call("letters", 0, 100).items
        letter = letters[pick % len(letters)] if letters else "none"
        self.call("letter", letter)
        if discard:
            self.call("discard", letter)
        else:
            self.call("replay", letter, policy.terms, own)

    # Chance alone leads to the ends of these seldom: each needs some calls in a row.

    @rule(
        key=keys,
        before=st.lists(ids, min_size=1, max_size=4),
        policy=policies,
        since=st.lists(ids, max_size=4),
        other=policies,
        step=st.sampled_from((0, 0, 0, 31 * 86_400_000)),
    )
    def a_dead_letter_comes_back(
        self, key: str, before: Sequence[bytes], policy: Policy, since: Sequence[bytes], other: Policy, step: int
    ) -> None:
        """Records are set aside, others may come in their place, and the letter is replayed if it is still there."""
        self.call("add", 0, [Add(key, self.entry(each, None), policy.terms) for each in before])
        self.call("flush", key)
        limits = policy.terms.limits
        if lease := self.call("open", 0, key, LEASE, limits):
            self.given[0].append(lease)
            taken = min(lease.part or lease.size, lease.size)
            _, old = self.ended(lease, taken, None)
            self.call("close", 0, [Close(lease, taken, 0, 0, limits, LEASE, old, False, [Letter("all")])])
        if since:
            self.call("add", 0, [Add(key, self.entry(each, None), other.terms) for each in since])
        self.clock.now += step
        for letter in self.call("letters", 0, 100).items[-1:]:
            self.call("replay", letter, other.terms, False)

    @rule(step=st.sampled_from((100_000, 2_000_000, 90_000_000)), slots=st.sampled_from((0, 1, 3)), policy=policies)
    def records_outlive_their_ttl(self, step: int, slots: int, policy: Policy) -> None:
        """Nobody looks for long, and then a worker does, once its grace is over."""
        self.clock.now += step
        self.call("claim", 0, 0, LEASE, policy.terms.limits)
        self.clock.now += LEASE
        for _ in range(2):
            self.claim(0, slots, policy, LEASE)

    @precondition(lambda self: any(self.given))
    @rule(worker=workers, ago=leases, times=st.integers(1, 3), policy=policies)
    def an_attempt_is_given_back_for_more_than_a_day(self, worker: int, ago: int, times: int, policy: Policy) -> None:
        lease = self.lease(worker, ago)
        for _ in range(times):
            back = Retry(lease, 9 * 3_600_000, "not now", policy.terms.limits, lease.size, None, 0, True, False, 0)
            self.call("retry", 0, [back])
            self.clock.now += 9 * 3_600_000
            for found in self.call("claim", 0, 3, LEASE, policy.terms.limits).leases:
                self.given[worker].append(found)
                if found.key == lease.key:
                    lease = found

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat_a_call_whose_reply_was_lost(self) -> None:
        """However late, and whatever others have done: and if they did nothing, the repetition does nothing."""
        last, before = self.last, self.stores.ledger.state
        assert last is not None
        answer = self.call(last.name, *last.arguments)
        self.last = last
        if last.state is not before:
            return
        reports = last.arguments[1] if last.name in ("close", "retry", "release") else ()
        keys = [getattr(report, "lease", report).key for report in reports]
        if last.name in SETTLED and len(set(keys)) == len(keys):  # of two of one timeline, the last is remembered
            assert answer == last.answer
        if last.name in SETTLED or last.at == self.clock.now:
            assert self.stores.ledger.state == before
        last.state = self.stores.ledger.state


def test_the_scripts_do_what_the_reference_does(place: Place) -> None:
    with asyncio.Runner() as runner:
        Stores.place, Stores.loop = place, runner.get_loop()
        run_state_machine_as_test(
            Stores,
            settings=settings(
                max_examples=GIVEN or EXAMPLES[place.name],
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )
