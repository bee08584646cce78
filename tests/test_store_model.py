"""The scripts and the reference, driven by the same calls: every answer and everything kept must be equal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from servers import Server
from storestate import check_invariants, redis_state, reference_state

from aiodigest.backend import Add, Backend, Claims, Close, Lease, Letter, Move, Retry
from aiodigest.errors import AiodigestError
from aiodigest.memory import ReferenceBackend
from aiodigest.policy import Policy
from aiodigest.redisbackend import RedisBackend
from aiodigest.wire import identity, pack

NOW = 1_700_000_000_000
LEASE = 60_000
EXAMPLES = int(os.environ.get("AIODIGEST_TEST_EXAMPLES", "200"))

KEYS = ("T", "T:log", "{T}", "}", "\0")
IDS = (b"a", b"b", b"c", b"", b"\0:}")
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

# what is drawn more often stands there twice: most calls should meet something
keys = st.sampled_from((*KEYS[:1] * 6, *KEYS[:3] * 2, *KEYS))
ids = st.sampled_from(IDS)
policies = st.sampled_from(POLICIES)
leases = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 7))  # how many leases ago it was given
small = st.integers(0, 4)
picks = st.lists(st.integers(0, 9), min_size=1, max_size=3)  # which records of a digest
delays = st.sampled_from((0, 1, 5_000, 300_000, 86_400_000))


class Stores(RuleBasedStateMachine):
    server: Server
    numbers = count(1)
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.namespace = f"model-{next(self.numbers)}"
        self.client: Any = self.server.client()
        ours, theirs = count(1), count(1)
        self.reference = ReferenceBackend(now=lambda: self.now, nonce=lambda: f"n{next(ours)}")
        self.redis = RedisBackend(
            self.server.url, namespace=self.namespace, now=lambda: self.now, nonce=lambda: f"n{next(theirs)}"
        )
        self.loop.run_until_complete(self.redis.connect())
        self.given: list[Lease] = []
        self.rung: tuple[int, Any] = (0, None)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.redis.aclose())
        self.client.close()

    def both(self, call: Callable[[Backend], Awaitable[Any]]) -> Any:
        """Make a call on both stores, compare answers and contents, and return the answer (None if it raised)."""

        async def outcome(backend: Backend) -> Any:
            try:
                return await call(backend)
            except AiodigestError as error:
                return type(error), str(error)

        expected = self.loop.run_until_complete(outcome(self.reference))
        actual = self.loop.run_until_complete(outcome(self.redis))
        if isinstance(expected, Claims):
            actual = replace(actual, bell=expected.bell, broken=tuple(actual.broken))
        assert actual == expected
        self.compare()
        return expected

    def compare(self) -> None:
        expected = reference_state(self.reference.machines[0])
        actual = redis_state(self.client, self.namespace)
        assert actual == expected
        check_invariants(actual)
        last = self.client.xrevrange(f"{{{self.namespace}}}:wake", count=1)
        rung = (self.reference._rung[0], last[0][0] if last else None)
        assert (rung[0] == self.rung[0]) == (rung[1] == self.rung[1]), "the doorbell of one rang, the other's did not"
        self.rung = rung

    def lease(self, ago: int) -> Lease:
        return self.given[-1 - ago % len(self.given)]

    def ids_of(self, lease: Lease, picked: Sequence[int]) -> list[bytes]:
        known = [identity(entry) for entry in lease.entries] + [b"unknown"]
        return [known[pick % len(known)] for pick in picked]

    @rule(step=st.sampled_from(STEPS))
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(early=st.sampled_from((0, 0, 0, 1)))
    def something_comes_due(self, early: int) -> None:
        machine = self.reference.machines[0]
        times = [*machine.waiting.values(), *machine.leased.values(), machine.hold_ms]
        self.now = min((time - early for time in times if time > self.now), default=self.now)

    @rule(
        adds=st.lists(
            st.tuples(keys, ids, policies, st.booleans(), st.sampled_from((None, NOW, NOW + 10**9, 0))), max_size=8
        ),
        foreign=st.booleans(),
    )
    def add(self, adds: Sequence[tuple[str, bytes, Policy, bool, int | None]], foreign: bool) -> None:
        batch = [
            Add(key, pack(record_id, stamp and stamp * 1000, b"v%d" % self.now), policy.terms, own)
            for key, record_id, policy, own, stamp in adds
        ]
        if foreign and batch:  # an entry of a later version, which nobody here can read
            batch[0] = batch[0]._replace(entry=b"\x02" + batch[0].entry[1:])
        self.both(lambda backend: backend.add(0, batch))

    @rule(key=keys, record_id=ids, policy=policies, own=st.booleans(), times=st.integers(1, 12))
    def add_many_times(self, key: str, record_id: bytes, policy: Policy, own: bool, times: int) -> None:
        first = IDS.index(record_id)
        batch = [
            Add(key, pack(IDS[(first + number) % 5], None, b"v%d" % number), policy.terms, own)
            for number in range(times)
        ]
        self.both(lambda backend: backend.add(0, batch))

    @rule(slots=st.sampled_from((0, 1, 2, 3, 3)), policy=policies, lease_ms=st.sampled_from((LEASE, LEASE, 1_000)))
    def claim(self, slots: int, policy: Policy, lease_ms: int) -> None:
        claims = self.both(lambda backend: backend.claim(0, slots, lease_ms, policy.terms.limits))
        self.given += claims.leases

    @rule(key=keys, policy=policies)
    def open(self, key: str, policy: Policy) -> None:
        lease = self.both(lambda backend: backend.open(0, key, LEASE, policy.terms.limits))
        if isinstance(lease, Lease):
            self.given.append(lease)

    @precondition(lambda self: bool(self.given))
    @rule(ago=leases, start=small, size=small)
    def read(self, ago: int, start: int, size: int) -> None:
        lease = self.lease(ago)
        self.both(lambda backend: backend.read(0, lease, start, size + 1))

    @precondition(lambda self: bool(self.given))
    @rule(picked=st.lists(leases, min_size=1, max_size=3))
    def renew(self, picked: Sequence[int]) -> None:
        some = [self.lease(ago) for ago in picked]
        self.both(lambda backend: backend.renew(0, some, LEASE))

    @precondition(lambda self: bool(self.given))
    @rule(
        picked=st.lists(
            st.tuples(
                leases, st.one_of(st.none(), small), st.booleans(), policies, st.one_of(st.none(), picks), delays
            ),
            min_size=1,
            max_size=3,
        )
    )
    def close(self, picked: Sequence[tuple[int, int | None, bool, Policy, Sequence[int] | None, int]]) -> None:
        closes: list[Close] = []
        for ago, taken, counts, policy, buried, cool in picked:
            lease = self.lease(ago)
            if taken is None:
                taken = min(lease.part or lease.size, lease.size)
            letters = [Letter("all")] if buried is None and ago % 2 else []
            letters += [Letter("some", self.ids_of(lease, buried))] if buried else []
            limits = policy.terms.limits
            closes.append(Close(lease, taken, taken, cool, limits, LEASE, ago, counts or bool(cool), letters))
        answers = self.both(lambda backend: backend.close(0, closes))
        for close, answer in zip(closes, answers, strict=True):
            if answer.status == "part":
                self.given.append(replace(close.lease, digest_id=answer.digest_id, size=answer.left))

    @precondition(lambda self: bool(self.given))
    @rule(
        picked=st.lists(
            st.tuples(leases, delays, st.one_of(st.none(), small), st.one_of(st.none(), picks)),
            min_size=1,
            max_size=3,
        ),
        give_back=st.booleans(),
        unknown=st.booleans(),
        policy=policies,
    )
    def retry(
        self,
        picked: Sequence[tuple[int, int, int | None, Sequence[int] | None]],
        give_back: bool,
        unknown: bool,
        policy: Policy,
    ) -> None:
        retries: list[Retry] = []
        for ago, delay, taken, failed in picked:
            lease = self.lease(ago)
            size = lease.size if taken is None else taken
            ids = None if failed is None else self.ids_of(lease, failed)
            limits = policy.terms.limits
            retries.append(Retry(lease, delay, f"boo {delay}", limits, size, ids, ago, give_back, unknown))
        self.both(lambda backend: backend.retry(0, retries))

    @precondition(lambda self: bool(self.given))
    @rule(picked=st.lists(leases, min_size=1, max_size=3), started=st.booleans())
    def release(self, picked: Sequence[int], started: bool) -> None:
        some = [self.lease(ago) for ago in picked]
        self.both(lambda backend: backend.release(0, some, started))

    @rule(key=keys)
    def flush(self, key: str) -> None:
        self.both(lambda backend: backend.flush(key))

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.both(lambda backend: backend.delete(key))

    @rule(key=keys, record_id=ids, policy=policies)
    def remove(self, key: str, record_id: bytes, policy: Policy) -> None:
        self.both(lambda backend: backend.remove(key, record_id, policy.terms.limits))

    @rule(
        key=keys,
        at=st.one_of(st.none(), st.none(), st.sampled_from(STEPS)),
        delay=st.one_of(st.none(), st.none(), delays),
        policy=policies,
        outdated=st.sampled_from((0, 0, 0, 1)),
        gap=delays,
    )
    def reschedule(self, key: str, at: int | None, delay: int | None, policy: Policy, outdated: int, gap: int) -> None:
        held = self.reference.machines[0].held.get(key)
        iteration = held.iteration + outdated if held else 0
        move = Move(policy.terms, None if at is None else self.now + at, delay, gap, iteration)
        self.both(lambda backend: backend.reschedule(key, move))

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def schedule(self, deadline: int | None) -> None:
        self.both(lambda backend: backend.schedule(None if deadline is None else self.now + deadline))

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def maintenance(self, deadline: int | None) -> None:
        self.both(lambda backend: backend.maintenance(None if deadline is None else self.now + deadline))

    @rule(key=keys, state=st.sampled_from(("waiting", "ready", "leased")), start=small, size=small)
    def look(self, key: str, state: Any, start: int, size: int) -> None:
        async def views(backend: Backend) -> Any:
            counts = {name: number for name, number in (await backend.counts()).items() if number}
            page = await backend.page(0, state, start, size)
            return await backend.look(key), await backend.entries(key), page, counts

        self.both(views)

    @precondition(lambda self: bool(self.reference.machines[0].dead))
    @rule(pick=small, policy=policies, own=st.booleans(), discard=st.sampled_from((False, False, True)))
    def replay_or_discard(self, pick: int, policy: Policy, own: bool, discard: bool) -> None:
        letters = self.both(lambda backend: backend.letters(0, 0, 100))
        letter = letters[pick % len(letters)] if letters else "none"

        async def facts(backend: Backend) -> Any:
            found = await backend.letter(letter)
            return found and (found, list(found.entries))

        self.both(facts)
        if discard:
            self.both(lambda backend: backend.discard(letter))
        else:
            self.both(lambda backend: backend.replay(letter, policy.terms, own))


def test_the_scripts_do_what_the_reference_does(server: Server) -> None:
    with asyncio.Runner() as runner:
        Stores.server, Stores.loop = server, runner.get_loop()
        run_state_machine_as_test(
            Stores,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )
