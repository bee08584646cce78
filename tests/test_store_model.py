"""The scripts and the reference, driven by the same calls: every answer and everything kept must be equal.

The scripts run on one server, behind sentinels, and on a cluster. That the reference keeps its promises is shown by
``test_store.py``, by example, and by the simulation.

Four calls of five are about something that is there; which branches of the scripts they meet is counted on one server.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from branches import Branches
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from stores import Place, bound_of_dead_letters
from storestate import SETS, State, check_invariants, forget, redis_state, reference_state

from aiodigest import models
from aiodigest.backend import (
    DIGEST_BYTES,
    FEATURES,
    NEVER_MS,
    STEP_MS,
    Add,
    Backend,
    Bookmark,
    Claims,
    Close,
    Closed,
    Lease,
    Move,
    Mute,
    NewDeadLetter,
    Postpone,
    Retry,
    ShardMap,
    StoredDeadLetter,
    Tokens,
)
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.memory.timelines import Held, only
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.url import Source
from aiodigest.errors import AiodigestError, InvalidState, LeaseLost, LimitExceeded
from aiodigest.policy import Limits, Policy
from aiodigest.records.entries import aged, distinct, identity, identity_of, latest, pack, stamp
from aiodigest.records.validation import nearest
from aiodigest.timing.calendar import At
from aiodigest.timing.explain import Explainer
from aiodigest.timing.hours import Hours
from aiodigest.timing.throttle import Rate

T = TypeVar("T")

NOW = 1_700_000_000_000
LEASE = 60_000
DAY = 86_400_000
GIVEN = int(os.environ.get("AIODIGEST_TEST_EXAMPLES", "0"))
COUNTS = not GIVEN and "AIODIGEST_TEST_CHANGED" not in os.environ  # of a changed script, branches say nothing
SEEDS = range(5)  # the same examples each time, if none are GIVEN; those of one seed are much alike
MORE_SEEDS = range(5, 20)  # until each branch is met: which examples a seed gives, all modules that are loaded decide
EXAMPLES = {"redis": 200, "sentinel": 30, "cluster": 50}  # the scripts are the same everywhere, the way to them is not
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]  # which these examples are
SCRIPTS = (
    "add", "claim", "open", "read", "renew", "close", "retry", "release", "postpone", "throttle", "schedule",
    "maintenance", "flush", "mute", "unmute", "delete", "remove", "reschedule", "replay", "discard", "look", "counts",
    "letter", "letters",
)  # fmt: skip

KEYS = ("T", "T:log", "{T}", "}", "\0", "\N{POSTBOX}" * 256)
IDS = (b"a", b"zz", b"7a7a", b"\xff\xfe", b"\0:}")  # two are the same bytes, packed or not
NIGHT = Hours.except_("22:00-07:00", tz="Europe/Paris", spread=1800)  # it is a quarter past eleven there
BREAKS = Hours("22:10-22:15,22:20-23:00,23:20-24:00,01:00-22:00", spread=600)
POLICIES = (
    Policy(),
    Policy(capacity=2, minimum_delay=10, increment_delay=30, maximum_delay=60, ttl=100),
    Policy(capacity=5, max_size=2, initial_delay=20, increment_delay=0, ttl=2000),
    Policy(capacity=4, max_size=3, max_age=50, minimum_delay=0, initial_delay=5, increment_delay=7, maximum_delay=100),
    Policy(capacity=3, minimum_delay=1800, max_age=0.001),
    Policy(capacity=1, max_size=1, initial_delay=1200),
    Policy(quiet_delay=40, maximum_delay=100, hours=NIGHT),
    Policy(price=100, minimum_delay=30, first_at_once=True, maximum_delay=400, hours=BREAKS),
    Policy(price=90, randomised=True, max_size=3, capacity=4, hours=BREAKS),
    Policy.at("*/10 * * * *"),
    Policy.at(At.daily("09:00", "Europe/Paris"), hours=NIGHT),
    Policy(minimum_delay=600, increment_delay=400, maximum_delay=4000, hours=BREAKS, max_size=2, capacity=3),
)
DEDUPED = (  # no window is so short that it ends while a test goes on
    Policy(dedupe_window=3600, initial_delay=20),
    Policy(dedupe_window=120, capacity=3, max_age=50, minimum_delay=10),
    Policy(dedupe_window=3600, capacity=4, max_size=2, initial_delay=20, max_bytes=100),
)
MEASURED = (
    Policy(max_bytes=100, initial_delay=20), Policy(max_bytes=1, capacity=2, minimum_delay=0, initial_delay=5),
    DEDUPED[2],
)  # fmt: skip
ASKING = (*DEDUPED, *MEASURED)  # of which an earlier version knows nothing
UNKNOWN = Policy(capacity=10_000)  # the limits of a claim whose engine has a function as its policy
STEPS = (
    0, 1, 10, 1_000, 7_000, 29_999, 30_000, 31_000, 60_000, 300_000, 1_900_000, 90_000_000, 31 * DAY,
    -1, -40_000, -400_000,
)  # fmt: skip
BACK = (1, 1_000, 1_001, 2_500, 40_000, 3_600_000, 40 * DAY)  # how far the clock steps
CLOCK = ("clock", "shift", "stepped", "step")
KNOWN = ("one", "other", *sorted(FEATURES))  # features
PARTS = ("log", "open", "meta")  # the keys of a timeline
FOREIGN = ("stored", "key", "touched", "idle", "problem", "logged", "opened", "theirs")  # fields of its meta, not ours
RATES = (Rate(1_000_001, 1, 61_000_000), Rate(500_001, 3, 2_000_000), Rate(3, 2, 1_001_000))
STAMPS = (None, NOW, NOW + 10**9, 0)  # of records: few, so that there are ties

# What timelines and leases are drawn by. What is drawn more often stands there twice.
STATES = (
    "waiting", "ready", "leased", "in retry wait", "frozen", "in cool-down", "waiting after a cool-down", "postponed",
    "muted",
)  # fmt: skip
KINDS = ("any", *STATES, "of one record", "of several", "at capacity", "at max_size", "above max_size")
MUTES = (None, None, 20, 1_000, 40_000, 2_000_000, 31 * DAY, -1)  # how long
MOVABLE = ("waiting", "waiting after a cool-down", "in retry wait", "postponed")
HOLDS = ("held", "held", "held", "held", "ended", "answered", "lost")

keys = st.sampled_from((*KEYS[:1] * 6, *KEYS[:3] * 2, *KEYS))
kinds = st.sampled_from(KINDS)
ids = st.sampled_from(IDS)
policies = st.sampled_from(POLICIES)
sized = st.sampled_from((*POLICIES, *(policy for policy in POLICIES if policy.max_size)))
asking = st.sampled_from((POLICIES[0], POLICIES[2], *ASKING))
sizes = st.sampled_from((1, 30, 60, 99, 100))  # of records, in bytes
windows = st.sampled_from((0, 0, 0, 120_000, 3_600_000))
holds = st.sampled_from(HOLDS)
small = st.integers(0, 4)
numbers = st.integers(0, 49)  # which of what is there, see pick()
owns = st.sampled_from((True, False, None))
picks = st.lists(st.integers(0, 9), min_size=1, max_size=3)  # which records of a digest
delays = st.sampled_from((0, 1, 5_000, 300_000, DAY))
seldom = st.sampled_from((False, False, False, True))
set_aside = st.sampled_from((None, None, "all", "none"))

LOOKS = ("look", "cooling", "entries", "page", "counts", "dead_letters", "dead_letter")
READS = ("read", *LOOKS)
SETTLED = ("close", "retry", "release", "postpone", "flush", "read")  # they answer the same however late
REPEATABLE = (
    *SETTLED, "mute", "unmute", "renew", "schedule", "maintenance", "delete", "remove", "reschedule", "replay",
    "discard",
)  # fmt: skip


def some(*each: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """One to three tuples of what these draw."""
    return st.lists(st.tuples(*each), min_size=1, max_size=3)


def pick(number: int, there: Sequence[T], anything: Sequence[T]) -> T:
    """Four numbers of five name something of what is there, if anything is; the fifth names anything."""
    index, luck = divmod(number, 5)
    chosen = there if there and luck < 4 else anything
    return chosen[index % len(chosen)]


class Pair:
    """The reference and a real store as one: each call goes to both, which must answer the same and keep the same."""

    def __init__(self, source: Source, place: Place, namespace: str, alone: bool) -> None:
        self._calls = 0
        self.alone = alone
        self.clock = SimpleNamespace(now=NOW)
        times: dict[str, Any] = {"now": lambda: self.clock.now, "nonce": lambda: f"n{self._calls}"}
        self.reference = ReferenceBackend(**times, draw=self._draw_again, features=KNOWN)
        self._drawn: list[str] = []
        self.redis = RedisBackend(source, namespace=namespace, **times, features=KNOWN)
        self.kept: State = {}
        self._namespace = namespace
        self._client = place.client_of(namespace)
        self._rung: tuple[int, Any] = (0, None)
        self._entries: set[bytes] = set()
        self._digests: dict[str, tuple[bytes, list[bytes]]] = {}  # all that there ever were

    def _draw_again(self, ready: Sequence[str], count: int) -> list[str]:
        """Draw what the real store has just drawn, then the rest."""
        assert count == len(ready)
        return sorted(ready, key=lambda key: self._drawn.index(key) if key in self._drawn else len(self._drawn))

    def _emptied(self) -> set[str]:
        """The timelines that the real store has in no set any more: muted, or all in them had been delivered."""
        left = {key for name in SETS for key in self._client.zrange(self._key(name), 0, -1)}
        return {key for key in self.reference.machines[0].held if key.encode() not in left}

    def _key(self, name: str) -> str:
        return f"{{{self._namespace}}}:{name}"

    async def aclose(self) -> None:
        await self.redis.aclose()
        forget(self._client, self._namespace)
        self._client.close()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return partial(self.ask, name)

    async def ask(self, name: str, *arguments: Any, **named: Any) -> Any:
        """What both answer; raises the error that both raise. Only a READ may leave unseen what it has changed."""
        self._calls += 1
        call = attrgetter(f"operations.{name}" if name in LOOKS else name)
        actual = await outcome(call(self.redis)(*arguments, **named))
        if isinstance(actual, Claims):
            gone = (*actual.expired, *actual.left)
            self._drawn = [*(key for key, _ in gone), *self._emptied(), *(lease.key for lease in actual.leases)]
        expected = await outcome(call(self.reference)(*arguments, **named))
        told = comparable if self.alone else without_count
        assert told(actual) == told(expected)
        if name not in READS:
            adds: Sequence[Add] = arguments[1] if name == "add" else ()
            self.state({stamp(add.entry, self.clock.now) for add in adds})
        if isinstance(expected, AiodigestError):
            raise expected
        return expected

    @asynccontextmanager
    async def digest(self, key: str, policy: Policy) -> AsyncGenerator[Lease]:
        """The verb that is made of others, which go to both."""
        async with Backend.digest(cast("Backend", self), key, policy) as lease:
            yield lease

    @property
    def shard_map(self) -> ShardMap:
        return self.reference.shard_map

    def state(self, added: Collection[bytes] = ()) -> State:
        """What both keep, which is what was kept before or was added, and the same records under the same id."""
        expected = reference_state(self.reference.machines[0])
        self.kept = redis_state(self._client, self._namespace)
        if not self.alone:  # earlier versions note no time
            for state in (expected, self.kept):
                state["layout"].pop("clock", None)
        assert self.kept == expected
        check_invariants(self.kept)
        self._explain()
        wake = self._key("wake")
        last = self._client.xrevrange(wake, count=1) if self._client.type(wake) == b"stream" else ()
        rung = (self.reference._wake_ups[0], last[0][0] if last else None)
        assert (rung[0] == self._rung[0]) == (rung[1] == self._rung[1]), "the doorbell of one rang, the other's did not"
        self._rung = rung
        if self.alone:
            size = sum(letter.size for letter in self.reference.machines[0].dead.values())
            assert int(self._client.hget(self._key("sizes"), "") or 0) == size
        entries = {entry for letter in self.kept["dead"].values() for entry in letter[-2]}
        for key, timeline in self.kept["timelines"].items():
            entries |= {*timeline["log"], *timeline["open"]}
            if name := timeline["meta"].get("id"):
                opened = (key, timeline["open"])
                assert self._digests.setdefault(name, opened) == opened, "one id, two contents"
        assert entries - self._entries <= {*added}, "a record appeared from nowhere"
        self._entries = entries
        return self.kept

    def _explain(self) -> None:
        """See that of each timeline is told when it is due, as it is in the schedule, whatever its policy may be."""
        machine, policy = self.reference.machines[0], POLICIES[self._calls % len(POLICIES)]
        for key in machine.held:
            told = Explainer(key, self.clock.now, policy).explain(machine.look(key, self.clock.now))
            silence = machine.mutes.get(key)
            state, score = machine.placed(key) or (("muted", 0) if silence else ("empty", None))
            shift = machine.now(self.clock.now) - self.clock.now
            if silence and state == "muted":
                score = max(score or 0, silence.end_ms) if silence.end_ms < NEVER_MS else None
            assert (told.state, told.due) == (state, None if score is None else nearest(score - shift))

    def plant(self, key: str, entry: bytes) -> None:
        """Append what no version of this library would, to a log that there is."""
        self.reference.machines[0].held[key].log.append(entry)
        self._client.rpush(self._key(f"log:{key}"), entry)
        self.state({entry})

    def drop(self, key: str) -> None:
        """Take a log away, as only another program would; the next call must add to it, or drop the timeline."""
        self.reference.machines[0].held[key].log.clear()
        self._client.delete(self._key(f"log:{key}"))

    async def find_nothing(self, key: str, record_id: bytes, limits: Limits) -> None:
        """Ask for what a timeline holds whose log is gone: nothing is answered, and nothing is changed."""
        for store in (self.reference, self.redis):
            assert not await store.remove(key, record_id, limits)
            assert await store.open(0, key, LEASE, limits) is None

    async def break_off(self, key: str, part: str) -> None:
        """Write what is not ours into a part of a timeline: each call that needs it says so, and changes nothing.

        ``part`` is one of its three keys, or a field of its meta. Then it is mended.
        """
        kept, client = self.state(), self._client
        name = self._key(f"{part if part in PARTS else 'meta'}:{key}")
        sound = client.dump(name)
        if part in PARTS:
            client.set(name, "not ours", px=DAY)
        else:
            client.hset(name, part, "not ours")
        letter = self._key("letter:theirs")
        client.hset(letter, "key", key)
        self._calls += 1
        for refused in await self._refusals(key, part):
            assert isinstance(refused, AiodigestError), f"{refused!r} although it cannot be read"
        window = await self.redis.operations.look(key)
        assert window is None or "ERR" in window.last_error or "WRONGTYPE" in window.last_error
        client.delete(letter, name)
        if sound:
            client.restore(name, DAY, sound)
        assert self.state() == kept, "something was changed"

    def need(self, key: str, names: str) -> None:
        """Write down what a timeline needs, as a later version may."""
        self.reference.machines[0].held[key].needs = names
        self._client.hset(self._key(f"meta:{key}"), "needs", names)
        self.state()

    def add_fields(self, key: str) -> None:
        """Write fields that are not ours into the meta of a timeline that has one."""
        meta = self._key(f"meta:{key}")
        if self._client.exists(meta):
            self._client.hset(meta, mapping=dict.fromkeys(FOREIGN, "1"))

    async def break_letter(self, letter: str, part: str, discard: bool) -> None:
        """Write what is not ours into a part of a dead letter: it says so, and can be discarded. Or it is mended."""
        await self.ask("schedule", 0)  # both note the time
        kept, client = self.state(), self._client
        name = self._key(f"{'letter' if part == 'key' else part}:{letter}")
        sound = client.dump(name)
        if part == "key":
            client.hdel(name, "key")
        else:
            client.set(name, "not ours", px=DAY)
        self._calls += 1
        listed = (await self.redis.operations.dead_letters(0, 1_000)).items
        assert listed == (await self.reference.dead_letters(0, 1_000)).items
        for each in listed:
            found = await self.redis.operations.dead_letter(each)
            assert found is not None
            assert found.broken == (each == letter)
            if not found.broken:
                assert found == await self.reference.dead_letter(each)
        assert isinstance(await outcome(self.redis.replay(letter, POLICIES[0].terms, False)), InvalidState)
        if discard:
            assert await self.ask("discard", letter)
        else:
            client.delete(name)
            client.restore(name, DAY, sound)
            assert self.state() == kept, "something was changed"

    async def break_shard(self, name: str, lease: Lease) -> None:
        """Write what is not ours in place of what a shard has for all of its timelines; then it is mended."""
        await self.ask("schedule", 0)  # both note the time
        key = self._key(name)
        sound, rung = self._client.dump(key), self._rung
        self._client.set(key, "not ours")
        if name == "dead":
            close = Close(lease, lease.size, 0, 0, POLICIES[0].terms.limits, LEASE, 0, False, [NewDeadLetter("all")])
            [refused] = await self.redis.close(0, [close])
            assert isinstance(refused, InvalidState | Closed)
        else:
            self._rung = rung[0], None
            await self.ask("claim", 0, 0, LEASE, POLICIES[0].terms.limits)
            assert not self._client.exists(key), "nobody could be woken"
            self._rung = rung
        self._client.delete(key)
        if sound:
            self._client.restore(key, 0, sound)
        self.state()

    async def _refusals(self, key: str, part: str) -> list[object]:
        """What the calls answer that need a part of a timeline which cannot be read."""
        store, lease, terms = self.redis, Lease(key, "token", "digest", 1, 0, 0, 0, 0), POLICIES[0].terms
        limits = terms.limits
        calls: list[Awaitable[object]] = [
            store.remove(key, identity_of(b"a"), limits),
            store.replay("theirs", terms, False),
            store.close(0, [Close(lease, 1, 1, 0, limits, LEASE)]),
            store.retry(0, [Retry(lease, 0, "boo", limits)]),
            store.mute(key, Mute(), limits),
        ]
        said = self.kept["silences"].get(key)
        if said:
            calls.append(store.unmute(key, limits))
        if part != "open" and not (said and said.endswith("1")):
            calls.append(store.add(0, [Add(key, pack(b"a", 0, b""), terms)]))
            calls.append(store.add(0, [Add(key, pack(b"a", 0, b""), MEASURED[0].terms, urgent=True)]))
        if part not in ("log", "open"):
            calls += [store.read(0, lease, 0, 1), store.renew(0, [lease], LEASE), store.release(0, [lease], True)]
            calls.append(store.postpone(0, [Postpone(lease, 1)], limits))
            if key.encode() in self.kept["waiting"]:
                calls.append(store.reschedule(key, Move(terms)))
        if key.encode() in self.kept["ready"]:
            calls += [store.open(0, key, LEASE, limits), self._set_aside(key)]
        answers: list[object] = []
        for call in calls:
            answer = await outcome(call)
            answers += cast("list[object]", answer) if isinstance(answer, list) else [answer]
        return answers

    async def _set_aside(self, key: str) -> list[InvalidState]:
        """What a claim says of a timeline that cannot be read, the only one that it finds; it is ready again then."""
        ready, waiting = self._key("ready"), self._key("waiting")
        others = self._client.zrange(ready, 0, -1, withscores=True)
        self._client.zremrangebyrank(ready, 0, -1)
        self._client.zadd(ready, {key: dict(others)[key.encode()]})
        claims = await self.redis.claim(0, 1, LEASE, POLICIES[0].terms.limits, doubtful=False)
        assert not claims.leases
        assert self._client.zrem(waiting, key) == 1
        self._client.zadd(ready, dict(others))
        return [InvalidState(f"timeline {name!r} is broken: {problem}") for name, problem in claims.broken]


async def outcome(call: Awaitable[Any]) -> Any:
    """An answer, or the error that is raised in its place."""
    try:
        return await call
    except AiodigestError as error:
        return error


def without_count(answer: Any) -> Any:
    """An answer but for the letters that a close let go, which it tells once, and earlier versions do not."""
    if not isinstance(answer, list):
        return comparable(answer)
    answers = cast("list[object]", answer)
    return [each._replace(let_go=0) if isinstance(each, Closed) else each for each in answers]


def timeless(state: State) -> State:
    """What is kept, but for what each call may note of the clock."""
    layout = {name: value for name, value in state["layout"].items() if name not in CLOCK}
    return {**state, "layout": layout}


def comparable(answer: Any) -> Any:
    """An answer in the form in which every store's is the same."""
    match answer:
        case AiodigestError():
            return type(answer), str(answer)
        case Claims():
            return replace(answer, wake_up="", broken=tuple(answer.broken))
        case StoredDeadLetter():
            return replace(answer, entries=tuple(answer.entries))
        case dict():
            counts = cast("dict[str, int]", answer)
            return {name: number for name, number in counts.items() if number}
        case _:
            return answer


@dataclass
class Call:
    """A call whose reply may be lost."""

    name: str
    arguments: tuple[Any, ...]
    answer: Any
    at: int
    state: State


class Stores(RuleBasedStateMachine):
    """Workers, who may be slow, cut off from the store, or long replaced, and whoever adds and administers."""

    place: Place
    source: Source
    examples = count(1)
    loop: asyncio.AbstractEventLoop
    branches: Branches | None = None
    alone = True  # no scripts of earlier versions, which cannot stand some things and know no sizes, are beside ours
    met: Counter[str]  # in how many examples each outcome of a condition was met

    def __init__(self) -> None:
        super().__init__()
        self.stores = Pair(self.source, self.place, f"model-{next(self.examples)}", self.alone)
        self.loop.run_until_complete(self.stores.redis.connect())
        self.machine = self.stores.reference.machines[0]
        self.clock = self.stores.clock
        self.serial = count(1)  # in each value, so that each entry is another
        self.given: list[Lease] = []
        self.tokens: list[Tokens] = []
        self.adds: list[Add] = []
        self.ends: dict[str, Bookmark | None] = {}  # where the page that was read last has ended
        self.last: Call | None = None

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stores.aclose())
        if self.branches:
            with self.place.client_of("") as client:
                self.met.update(self.branches.take(client))

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Make a call on both stores and return the answer, or None if it raised what it may."""
        answer = None
        with suppress(InvalidState, LimitExceeded, LeaseLost):
            answer = self.loop.run_until_complete(getattr(self.stores, name)(*arguments, **named))
        if name in REPEATABLE:
            self.last = Call(name, arguments, answer, self.clock.now, self.stores.kept)
        return answer

    def is_of(self, kind: str, key: str, held: Held, limits: Limits) -> bool:
        """Whether a timeline is of a kind: by its state, or by its size under some limits."""
        machine, delivery, size = self.machine, held.delivery, distinct(held.log)
        waits, cools = key in machine.waiting, held.cool_ms > self.clock.now
        return {
            "any": machine.placed(key) is not None,
            "waiting": waits,
            "ready": key in machine.ready,
            "leased": key in machine.leased,
            "postponed": key in machine.postponed,
            "in retry wait": waits and delivery is not None and not delivery.frozen,
            "muted": key in machine.mutes and machine.placed(key) is not None,
            "frozen": delivery is not None and delivery.frozen,
            "in cool-down": held.empty and cools,
            "waiting after a cool-down": waits and delivery is None and cools,
            "of one record": size + (distinct(delivery.entries) if delivery else 0) == 1,
            "of several": size > 1,
            "at capacity": size == limits.capacity,
            "at max_size": size == limits.max_size > 0,
            "above max_size": size > limits.max_size > 0,
        }[kind]

    def key(self, number: int, kind: str = "any", policy: Policy = POLICIES[0]) -> str:
        """A timeline of a kind, which is brought about if there is none; or any key there may be."""
        there = self.found(kind, policy)
        if not there and number % 5 < 4:
            self.bring(kind, policy, number)
            there = self.found(kind, policy)
        return pick(number, there, KEYS[:1] * 4 + KEYS)

    def found(self, kind: str, policy: Policy) -> list[str]:
        limits = policy.terms.limits
        return sorted(key for key, held in self.machine.held.items() if self.is_of(kind, key, held, limits))

    def bring(self, kind: str, policy: Policy, number: int) -> None:
        """Lead a timeline that holds nothing to what it should be, if there is one."""
        key = next((key for key in KEYS if self.machine.placed(key) is None), KEYS[0])
        limits = policy.terms.limits
        if key in self.machine.mutes and self.machine.placed(key) is None:
            self.call("unmute", key, limits)
        sizes = {"at capacity": limits.capacity, "at max_size": limits.max_size, "above max_size": limits.max_size + 1}
        size = min(sizes.get(kind, {"of one record": 1, "in retry wait": 2}.get(kind, 1 + number % 3)), len(IDS))
        terms = policy.terms if kind in ("any", "ready") else policy.terms._replace(initial_ms=3_600_000)
        adds = [Add(key, self.entry(record_id, None), terms) for record_id in IDS[:size]]
        self.call("add", 0, adds)
        if kind == "muted" and self.alone:
            self.call("mute", key, Mute(), limits)
        if kind not in STATES[1:] or kind == "muted":
            return
        self.call("flush", key)
        lease = self.call("open", 0, key, LEASE, limits) if kind != "ready" else None
        if lease is None:
            return
        self.given.append(lease)
        if kind in ("in retry wait", "frozen"):
            retry = Retry(lease, 300_000, "boo", limits, lease.size, unknown=kind == "frozen")
            self.call("retry", 0, [retry])
        elif kind == "postponed" and self.alone:
            self.call("postpone", 0, [Postpone(lease, 300_000)], limits)
        elif kind != "leased":
            delivered, old = self.ended(lease, lease.size)
            self.call("close", 0, [Close(lease, lease.size, delivered, 300_000, limits, LEASE, old)])
        if kind == "waiting after a cool-down":
            self.call("add", 0, adds)

    def record(self, key: str, number: int) -> bytes:
        """The id of a record that a timeline holds; or any."""
        held = self.machine.held.get(key, Held())
        entries = held.log + (held.delivery.entries if held.delivery else [])
        return pick(number, sorted({identity(entry) for entry in entries}), [*map(identity_of, IDS), b"unknown"])

    def lease(self, hold: str, number: int) -> Lease:
        """A lease that is held, one that has ended though nobody else has the timeline, or one that is lost."""
        found = self.leases(hold)
        if not found:
            self.bring("leased", POLICIES[number % len(POLICIES)], number)
            if hold == "ended":
                self.a_lease_goes_by(0)
            found = self.leases(hold)
        return pick(number, found, self.given[::-1])

    def leases(self, hold: str) -> list[Lease]:
        return [lease for lease in self.given[::-1] if self.hold_of(lease) == hold]

    def hold_of(self, lease: Lease) -> str:
        answer = self.machine.fenced(lease)
        if isinstance(answer, Closed):
            return "lost" if answer == Closed("lost") else "answered"
        return "held" if self.machine.leased.get(lease.key, 0) > self.clock.now else "ended"

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
            return b"\x03" + pack(record_id, stamp and stamp * 1000, value)[1:]
        if shape == 2:  # its id is longer than all of it
            return pack(b"x" * 500, 0, b"")[:12] + record_id + value
        return pack(record_id, stamp and stamp * 1000, value)

    @rule(step=st.sampled_from(STEPS))
    def time_passes(self, step: int) -> None:
        if step > 0 or self.alone:  # earlier versions go back with the server's clock
            self.clock.now += step

    @precondition(lambda self: self.alone)
    @rule(number=numbers, kind=kinds, back=st.sampled_from(BACK), on=st.sampled_from((0, 1_000, 50_000, 4_000_000)))
    def the_clock_steps_back(self, number: int, kind: str, back: int, on: int) -> None:
        """What waits is due as long after it as it was before, whoever finds out; and the clock steps on again."""
        machine, key = self.machine, self.key(number, kind)
        self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)
        before = max(machine.now(self.clock.now), machine.clock_ms)
        self.clock.now -= back
        self.call("look", key)
        assert before - 2 * STEP_MS <= machine.now(self.clock.now) <= before
        self.call("flush", "another")
        self.call("look", key)
        self.call("counts")
        self.call("dead_letters", 0, 100)
        self.clock.now += on

    @rule(early=st.sampled_from((0, 0, 0, 1)), kind=st.sampled_from(("due", "due", "due", "end", "letter", "day")))
    def something_comes_due(self, early: int, kind: str) -> None:
        """Move the clock to the millisecond at which something is due or ends: records, letters, a day of retries."""
        machine, now = self.machine, self.clock.now
        times = {
            "due": [*machine.waiting.values(), *machine.leased.values(), machine.hold_ms],
            "end": [held.end_ms for held in machine.held.values()],
            "letter": [letter.buried_ms + 30 * DAY for letter in machine.dead.values()],
            "day": [held.delivery.deferred_ms + DAY for held in machine.held.values() if held.delivery],
        }[kind]
        self.clock.now = min((time - early for time in times if time > now), default=now)
        if kind == "end":
            self.claim(3, POLICIES[0], LEASE)
        elif kind == "letter":
            for letter in self.machine.dead.oldest_first()[:1]:
                self.call("dead_letter", letter)

    @rule(number=numbers, kind=st.sampled_from(MOVABLE))
    def what_is_told_is_when_it_becomes_due(self, number: int, kind: str) -> None:
        """Not a millisecond before, by the server's clock."""
        key = self.key(number, kind)
        self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)  # so that a step back of the clock is noted
        found = self.call("look", key)
        told = Explainer(key, self.clock.now).explain(found)
        if told.state != "waiting" or told.due is None or told.due <= nearest(self.clock.now):
            return
        due = round(told.due.timestamp() * 1000)
        for now, state in ((due - 1, "waiting"), (due, "ready")):
            self.clock.now = now
            self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)
            placed = self.machine.placed(key)
            assert placed is not None
            assert placed[0] == state

    @precondition(lambda self: bool(self.machine.leased))
    @rule(early=st.sampled_from((0, 0, 1)))
    def a_lease_goes_by(self, early: int) -> None:
        """While a worker whose slots are taken looks in as often as workers do."""
        for step in (LEASE // 3, LEASE // 3, LEASE // 3 - early):
            self.clock.now += step
            self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)

    @rule(
        adds=st.lists(st.tuples(numbers, kinds, ids, policies, st.booleans(), st.sampled_from(STAMPS)), max_size=8),
        shape=st.sampled_from((0, 0, 1, 2)),
    )
    def add(self, adds: Sequence[Any], shape: int) -> None:
        self.adds = []
        for number, kind, record_id, policy, own, when in adds:
            entry = self.entry(record_id, when, 0 if self.adds else shape)
            self.adds.append(Add(self.key(number, kind, policy), entry, policy.terms, own))
        self.call("add", 0, self.adds)

    @rule(
        number=numbers,
        kind=st.sampled_from((*MOVABLE, *KINDS)),
        first=small,
        policy=sized,
        own=st.booleans(),
        times=st.integers(1, 12),
        several=small,
    )
    def add_many(self, number: int, kind: str, first: int, policy: Policy, own: bool, times: int, several: int) -> None:
        key = self.key(number, kind, policy)
        names = [IDS[(first + each % (several + 1)) % 5] for each in range(times)]
        self.adds = [Add(key, self.entry(name, None), policy.terms, own) for name in names]
        self.call("add", 0, self.adds)

    @rule(
        picked=some(numbers, st.sampled_from((*MOVABLE, *KINDS)), sized, st.booleans()),
        turns=st.lists(st.tuples(small, small), min_size=2, max_size=30),
    )
    def adds_come_in_bursts(self, picked: Sequence[Any], turns: Sequence[tuple[int, int]]) -> None:
        """In turn to a few timelines, or to one under terms that change within the call."""
        targets = [(self.key(number, kind, policy), policy.terms, own) for number, kind, policy, own in picked]
        self.adds = []
        for target, name in turns:
            key, terms, own = targets[target % len(targets)]
            self.adds.append(Add(key, self.entry(IDS[name], None), terms, own))
        self.call("add", 0, self.adds)

    @rule(number=numbers, policy=sized, times=st.integers(3, 8), others=small, lost=st.booleans())
    def add_one_again_and_again(self, number: int, policy: Policy, times: int, others: int, lost: bool) -> None:
        """Make the entries as many as ``max_size``, and the records fewer; add others, or something else drops all."""
        self.bring("of one record", policy, number)
        key = self.key(5 * number, "of one record", policy)
        known = self.record(key, 0)  # of an entry that cannot be read it is no id to give
        again = known if known in IDS else IDS[0]
        added = [*[again] * times, *IDS[: 0 if lost else others], again]
        self.adds = [Add(key, self.entry(record_id, None), policy.terms) for record_id in added]
        self.call("add", 0, self.adds)
        if lost and key in self.logs():
            self.stores.drop(key)
            self.call("add", 0, [Add(key, self.entry(again, None), policy.terms)])

    @precondition(lambda self: self.alone)
    @rule(
        adds=st.lists(
            st.tuples(numbers, st.sampled_from((*MOVABLE, *KINDS)), ids, asking, st.booleans(), st.booleans(), sizes),
            min_size=1,
            max_size=8,
        ),
        few=st.booleans(),
    )
    def add_what_asks_for_more(self, adds: Sequence[Any], few: bool) -> None:
        """Urgent adds, records that may have been delivered, and digests of so many bytes; to one timeline or more."""
        self.adds = []
        for number, kind, record_id, policy, own, urgent, size in adds:
            key = self.adds[0].key if few and self.adds else self.key(number, kind, policy)
            add = Add(key, self.entry(record_id, None), policy.terms, own, urgent=urgent)
            self.adds.append(replace(add, size=size if policy.max_bytes else 0))
        self.call("add", 0, self.adds)

    @precondition(lambda self: self.alone)
    @rule(
        key=keys,
        names=st.lists(ids, min_size=1, max_size=4),
        since=st.lists(ids, max_size=4),
        policy=st.sampled_from(DEDUPED),
        ends=st.sampled_from(("close", "close", "retry", "lost", "letter", "named")),
        which=picks,
        step=st.sampled_from((0, 0, 119_999, 120_000, 3_600_000)),
        slots=st.sampled_from((1, 3)),
        sample=st.booleans(),
    )
    def what_was_delivered_comes_again(
        self,
        key: str,
        names: Sequence[bytes],
        since: Sequence[bytes],
        policy: Policy,
        ends: str,
        which: Sequence[int],
        step: int,
        slots: int,
        sample: bool,
    ) -> None:
        """While it is under delivery, after that, or as a dead letter that is replayed; its window may be over."""
        terms, limits, window = policy.terms, policy.terms.limits, policy.terms.dedupe_ms
        self.call("add", 0, [Add(key, self.entry(each, None), terms, urgent=True) for each in names])
        lease = self.call("open", 0, key, LEASE, limits)
        if lease is None:
            return
        self.given.append(lease)
        self.call("add", 0, [Add(key, self.entry(each, None), terms) for each in since])
        picked, size = self.ids_of(lease, which), min(lease.part or lease.size, lease.size)
        if ends == "retry":
            delivered, old = self.ended(lease, size, picked)
            partial = Retry(lease, 5_000, "boo", limits, size, picked, delivered, aged=old, dedupe_ms=window)
            self.call("retry", 0, [partial])
        elif ends != "lost":
            letters = [NewDeadLetter("all", picked)] if ends == "letter" else []
            delivered, old = self.ended(lease, size, picked if letters else ())
            close = Close(lease, size, delivered, 0, limits, LEASE, old, True, letters, dedupe_ms=window)
            self.call("close", 0, [close._replace(seen=picked) if ends == "named" else close])
        self.call("flush", key)
        self.clock.now += step
        self.claim(slots, policy, LEASE, sample)
        self.adds = [Add(key, self.entry(each, None), terms) for each in names]
        self.call("add", 0, self.adds)
        if step >= window:
            self.call("flush", key)
            if again := self.call("open", 0, key, LEASE, limits):
                delivered, old = self.ended(again, again.size, ())
                close = Close(again, again.size, delivered, 0, limits, LEASE, old, dedupe_ms=window)
                self.call("close", 0, [close])
        for letter in self.call("dead_letters", 0, 100).items[-1:] if ends == "letter" else ():
            self.call("replay", letter, terms, False)
            self.call("flush", key)
            self.claim(slots, policy, LEASE, sample)

    @precondition(lambda self: bool(self.adds))
    @rule()
    def add_again_what_nobody_answered(self) -> None:
        self.call("add", 0, self.adds)

    @precondition(lambda self: any(held.log for held in self.machine.held.values()))
    @rule(number=small, short=st.booleans())
    def something_else_writes_to_a_log(self, number: int, short: bool) -> None:
        logs = sorted(key for key, held in self.machine.held.items() if held.log)
        entry = pack(b"x", next(self.serial), b"")[:9] if short else b""
        self.stores.plant(logs[number % len(logs)], entry)

    @rule(number=numbers, kind=st.sampled_from((*STATES[:3], *KINDS)), part=st.sampled_from((*PARTS, "end", "own")))
    def something_else_breaks_a_timeline(self, number: int, kind: str, part: str) -> None:
        key = self.key(number, kind)
        self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)  # so that nothing is due that is not ready
        self.loop.run_until_complete(self.stores.break_off(key, part))

    @precondition(lambda self: self.alone)
    @rule(
        number=numbers,
        kind=st.sampled_from(("ready", "ready", "leased", *KINDS)),
        names=st.sampled_from(("one", "other one", "new", "one new newer")),
        slots=small,
        sample=st.booleans(),
        late=st.booleans(),
    )
    def something_newer_needs_a_feature(
        self, number: int, kind: str, names: str, slots: int, sample: bool, late: bool
    ) -> None:
        """A timeline that needs what nobody here knows is left alone, and keeps its place."""
        key = self.key(number, kind)
        if self.machine.placed(key):
            self.stores.need(key, names)
            if late:
                self.a_lease_goes_by(0)
            self.claim(slots, POLICIES[0], LEASE, sample)
            self.open(5 * number, "ready", POLICIES[0])
            self.clock.now += 5_000

    @precondition(lambda self: self.alone)
    @rule(number=numbers, kind=kinds)
    def something_else_adds_fields(self, number: int, kind: str) -> None:
        self.stores.add_fields(self.key(number, kind))

    @precondition(lambda self: self.alone)
    @rule(number=numbers, part=st.sampled_from(("letter", "remains", "key")), discard=st.booleans())
    def something_else_breaks_a_dead_letter(self, number: int, part: str, discard: bool) -> None:
        if not self.call("dead_letters", 0, 100).items:
            lease = self.lease("held", 5 * number)
            close = Close(lease, lease.size, 0, 0, POLICIES[0].terms.limits, LEASE, 0, False, [NewDeadLetter("all")])
            self.call("close", 0, [close])
        if letters := self.call("dead_letters", 0, 100).items:
            self.loop.run_until_complete(self.stores.break_letter(letters[number % len(letters)], part, discard))

    @precondition(lambda self: self.alone)
    @rule(number=numbers, name=st.sampled_from(("dead", "wake")))
    def something_else_breaks_a_shard(self, number: int, name: str) -> None:
        self.loop.run_until_complete(self.stores.break_shard(name, self.lease("held", 5 * number)))

    @precondition(lambda self: any(self.logs()))
    @rule(number=small, record_id=ids, policy=policies)
    def something_else_drops_a_log(self, number: int, record_id: bytes, policy: Policy) -> None:
        """Drop the log of a timeline without a digest, which holds nothing then; and add a record to it."""
        logs = self.logs()
        key = logs[number % len(logs)]
        self.stores.drop(key)
        self.call("look", key)
        self.loop.run_until_complete(self.stores.find_nothing(key, record_id, policy.terms.limits))
        self.adds = [Add(key, self.entry(record_id, None), policy.terms)]
        self.call("add", 0, self.adds)

    def logs(self) -> list[str]:
        """The timelines that have records, and none of them in a digest nor under a mute."""
        held = self.machine.held.items()
        return sorted(key for key, each in held if each.log and not (each.delivery or key in self.machine.mutes))

    @rule(
        slots=st.sampled_from((0, 1, 2, 3, 3)),
        policy=st.sampled_from((*POLICIES, UNKNOWN)),
        lease_ms=st.sampled_from((LEASE, LEASE, 1_000)),
        sample=st.booleans(),
        doubtful=st.booleans(),
        bound=st.sampled_from((DIGEST_BYTES, DIGEST_BYTES, 100)),
    )
    def claim(
        self,
        slots: int,
        policy: Policy,
        lease_ms: int,
        sample: bool = False,
        doubtful: bool = True,
        bound: int = DIGEST_BYTES,
    ) -> None:
        bound = bound if self.alone else DIGEST_BYTES  # earlier versions know no other
        options = {"sample": sample, "doubtful": doubtful, "bound": bound}
        self.given.extend(self.call("claim", 0, slots, lease_ms, policy.terms.limits, **options).leases)

    @precondition(lambda self: self.alone)
    @rule(
        wanted=st.sampled_from((0, 1, 1, 2, 16)),
        rate=st.sampled_from(RATES),
        asker=st.sampled_from((1, 2)),
        back=st.lists(st.tuples(numbers, st.integers(1, 3)), max_size=2),
        pauses=st.lists(st.tuples(st.sampled_from(("", "a", "\N{POSTBOX}")), delays), max_size=2),
        known=st.booleans(),
        step=st.sampled_from((0, 0, 1, 400, 1_000, 2_000)),
    )
    def throttle(
        self,
        wanted: int,
        rate: Rate,
        asker: int,
        back: Sequence[tuple[int, int]],
        pauses: Sequence[tuple[str, int]],
        known: bool,
        step: int,
    ) -> None:
        """Take tokens, give some back that were taken at any time before, and tell of pauses."""
        self.clock.now += step
        returned = [
            tokens._replace(number=each) for number, each in back for tokens in self.tokens[-1 - number % 3 :][:1]
        ]
        paused = self.machine.bucket.paused if known else 0
        grant = self.call("throttle", wanted, rate, asker, returned, pauses, paused)
        self.tokens.append(grant.tokens)

    @rule(
        times=st.integers(1, 4),
        ends=st.sampled_from(("maintenance", "release", "claim", "retry")),
        policy=policies,
        slots=small,
        sample=st.booleans(),
        doubtful=st.booleans(),
    )
    def leases_end_without_a_word(
        self, times: int, ends: str, policy: Policy, slots: int, sample: bool, doubtful: bool
    ) -> None:
        """Workers die, again and again; what became doubtful is made ready or claimed, when that is allowed or not."""
        for _ in range(times):
            self.claim(3, policy, LEASE)
            self.a_lease_goes_by(0)
        self.claim(1, policy, LEASE)
        if ends == "maintenance":
            self.call("maintenance")
        elif ends == "release":
            self.bring("ready", policy, 1)  # so that it is not the first to be claimed
            self.clock.now += 1
            self.call("release", 0, self.leases("held")[:2], False)
        elif ends == "retry":
            reported = self.leases("held")[:1]
            self.call("retry", 0, [Retry(lease, 0, "boo", policy.terms.limits) for lease in reported])
        self.claim(slots, policy, LEASE, sample, doubtful)

    @rule(number=numbers, policy=policies, key=keys)
    def what_is_to_run_alone_is_due_after_another(self, number: int, policy: Policy, key: str) -> None:
        """A claim that has taken another already leaves it to the next one."""
        self.lease("held", 5 * number)
        for _ in range(3):
            self.a_lease_goes_by(0)
            self.claim(3, policy, LEASE)
        self.call("add", 0, [Add(key, self.entry(IDS[0], None), POLICIES[0].terms)])
        if self.machine.leased:
            self.a_lease_goes_by(0)
        self.call("maintenance")
        self.claim(3, policy, LEASE)

    @precondition(lambda self: bool(self.tried()))
    @rule(number=small, record_id=ids, policy=policies)
    def a_digest_is_tried_again(self, number: int, record_id: bytes, policy: Policy) -> None:
        """With a newer record waiting, which only a known outcome may have let in."""
        tried = self.tried()
        key = tried[number % len(tried)]
        self.adds = [Add(key, self.entry(record_id, None), policy.terms)]
        self.call("add", 0, self.adds)
        self.call("flush", key)
        self.claim(3, policy, LEASE)

    def tried(self) -> list[str]:
        """The timelines whose digest was opened before, and is nobody's now."""
        return sorted(
            key for key, held in self.machine.held.items() if held.delivery and key not in self.machine.leased
        )

    @rule(number=numbers, kind=st.sampled_from(("ready", *KINDS)), policy=policies)
    def open(self, number: int, kind: str, policy: Policy) -> None:
        lease = self.call("open", 0, self.key(number, kind, policy), LEASE, policy.terms.limits)
        if lease:
            self.given.append(lease)

    @rule(number=numbers, kind=st.sampled_from(("ready", *KINDS)), policy=policies, fails=st.booleans())
    def digest(self, number: int, kind: str, policy: Policy, fails: bool) -> None:
        """The verb of the five that is a context manager: without a hand-made lease, all records at once."""
        key = self.key(number, kind, policy)

        async def deliver() -> None:
            async with self.stores.digest(key, policy):
                if fails:
                    raise ZeroDivisionError

        with suppress(InvalidState, ZeroDivisionError):
            self.loop.run_until_complete(deliver())

    @rule(hold=holds, number=numbers, start=small, size=small)
    def read(self, hold: str, number: int, start: int, size: int) -> None:
        lease = self.lease(hold, number)
        for first, length in ((0, 1), (start, size + 1)):
            self.call("read", 0, lease, first, length)

    @rule(picked=some(holds, numbers))
    def renew(self, picked: Sequence[tuple[str, int]]) -> None:
        self.call("renew", 0, [self.lease(*each) for each in picked], LEASE)

    @rule(
        picked=some(holds, numbers, st.none() | small, st.booleans(), policies, set_aside | picks, delays),
        window=windows,
        mutes=seldom,
    )
    def close(self, picked: Sequence[Any], window: int, mutes: bool) -> None:
        closes: list[Close] = []
        for hold, number, taken, counts, policy, buried, cool in picked:
            lease = self.lease(hold, number)
            if taken is None:
                taken = min(lease.part or lease.size, lease.size)
            letters: list[NewDeadLetter] = []
            if isinstance(buried, str):
                letters = [NewDeadLetter(buried, None if buried == "all" else [])]
            elif buried is not None:
                letters = [NewDeadLetter("some", self.ids_of(lease, buried))]
            delivered, old = self.ended(lease, taken, letters[0].ids if letters else ())
            limits = policy.terms.limits
            close = Close(lease, taken, delivered, cool, limits, LEASE, old, counts or bool(cool), letters)
            extra = {"dedupe_ms": window, "mute": mutes} if self.alone else {}
            closes.append(close._replace(hours=policy.hours, **extra))
        answers = self.call("close", 0, closes)
        for close, answer in zip(closes, answers, strict=True):
            if answer.status == "part":
                rest = close.lease.entries[-answer.left :]
                self.given.append(replace(close.lease, digest_id=answer.digest_id, size=answer.left, entries=rest))

    @rule(
        picked=some(holds, numbers, delays, st.none() | st.none() | small, st.none() | picks | picks),
        give_back=st.booleans(),
        unknown=seldom,
        policy=policies,
        window=windows,
    )
    def retry(self, picked: Sequence[Any], give_back: bool, unknown: bool, policy: Policy, window: int) -> None:
        retries: list[Retry] = []
        for hold, number, delay, taken, failed in picked:
            lease = self.lease(hold, number)
            size = lease.size if taken is None else taken
            ids = None if failed is None or unknown else self.ids_of(lease, failed)
            delivered, old = self.ended(lease, size, ids)
            old -= sum(aged(entry, lease.cut_ms) for entry in only(latest(lease.entries[:size]), ids or ()))
            limits = policy.terms.limits
            error = f"boo {delay}"
            retry = Retry(lease, delay, error, limits, size, ids, delivered, give_back, unknown, old)
            retries.append(retry._replace(hours=policy.hours, dedupe_ms=window if self.alone else 0))
        self.call("retry", 0, retries)

    @rule(picked=some(holds, numbers), started=st.booleans())
    def release(self, picked: Sequence[tuple[str, int]], started: bool) -> None:
        self.call("release", 0, [self.lease(*each) for each in picked], started)

    @precondition(lambda self: self.alone)
    @rule(picked=some(holds, numbers, delays), policy=policies)
    def postpone(self, picked: Sequence[tuple[str, int, int]], policy: Policy) -> None:
        postpones = [Postpone(self.lease(hold, number), delay) for hold, number, delay in picked]
        self.call("postpone", 0, postpones, policy.terms.limits)

    @rule(number=numbers, kind=kinds)
    def flush(self, number: int, kind: str) -> None:
        self.call("flush", self.key(number, kind))

    @precondition(lambda self: self.alone)
    @rule(
        number=numbers, kind=kinds, length=st.sampled_from(MUTES), at=st.booleans(), drop=st.booleans(), policy=policies
    )
    def mute(self, number: int, kind: str, length: int | None, at: bool, drop: bool, policy: Policy) -> None:
        key = self.key(number, kind, policy)
        mute = Mute(drop=drop)
        if length is not None:
            mute = Mute(self.clock.now + length, None, drop) if at else Mute(None, max(0, length), drop)
        self.call("mute", key, mute, policy.terms.limits)
        self.call("look", key)
        if kind in ("leased", "ready") and not drop:
            self.call("add", 0, [Add(key, self.entry(IDS[0], None), policy.terms)])
            self.call("flush", key)

    @precondition(lambda self: self.alone)
    @rule(number=numbers, kind=st.sampled_from(("muted", *KINDS)), policy=policies)
    def unmute(self, number: int, kind: str, policy: Policy) -> None:
        self.call("unmute", self.key(number, kind, policy), policy.terms.limits)

    @precondition(lambda self: self.alone)
    @rule(
        number=numbers,
        early=st.sampled_from((0, 0, 0, 1)),
        policy=policies,
        record_id=ids,
        then=st.sampled_from(("claim", "add", "flush", "maintenance")),
    )
    def a_mute_ends(self, number: int, early: int, policy: Policy, record_id: bytes, then: str) -> None:
        """And a claim finds out, or who comes before it."""
        key = self.key(5 * number, "muted")
        self.call("mute", key, Mute(delay_ms=20), policy.terms.limits)
        self.clock.now += 20 - early
        if then == "add":
            self.adds = [Add(key, self.entry(record_id, None), policy.terms)]
            self.call("add", 0, self.adds)
        elif then == "flush":
            self.call("flush", key)
        elif then == "maintenance":
            self.call("maintenance")
            self.call("open", 0, key, LEASE, policy.terms.limits)
        self.call("page", 0, "muted", 2)
        self.claim(3, policy, LEASE)

    @precondition(lambda self: self.alone)
    @rule(key=keys, policy=st.sampled_from(MEASURED), size=sizes)
    def what_fills_up_under_a_mute_is_due_at_its_end(self, key: str, policy: Policy, size: int) -> None:
        self.call("delete", key)
        self.call("mute", key, Mute(delay_ms=20), policy.terms.limits)
        self.call("add", 0, [Add(key, self.entry(each, None), policy.terms, size=size) for each in IDS[:2]])
        self.clock.now += 20
        self.claim(0, policy, LEASE)

    @precondition(lambda self: self.alone)
    @rule(number=numbers, policy=policies)
    def a_muted_delivery_ends_without_a_word(self, number: int, policy: Policy) -> None:
        key = self.key(5 * number, "leased")
        self.call("mute", key, Mute(), policy.terms.limits)
        for _ in range(3):
            self.clock.now += LEASE // 3
            self.call("claim", 0, 0, LEASE, policy.terms.limits)
        self.call("maintenance")
        self.call("open", 0, key, LEASE, policy.terms.limits)
        self.claim(3, policy, LEASE)

    @precondition(lambda self: self.alone)
    @rule(number=numbers, policy=policies)
    def a_mute_outlives_what_waits_under_it(self, number: int, policy: Policy) -> None:
        key = self.key(5 * number, "muted")
        self.call("mute", key, Mute(), policy.terms.limits)
        looks = self.machine.mutes[key].look_ms
        self.call("delete", key)
        self.clock.now = max(self.clock.now, min(looks, NOW * 2))
        self.claim(3, policy, LEASE)

    @precondition(lambda self: any(silence.look_ms < NEVER_MS for silence in self.machine.mutes.values()))
    @rule(early=st.sampled_from((0, 0, 1)), policy=policies)
    def a_claim_looks_at_a_mute(self, early: int, policy: Policy) -> None:
        """It is over, or what waits under it has reached its end."""
        looks = min(silence.look_ms for silence in self.machine.mutes.values())
        self.clock.now = max(self.clock.now, looks - early)
        for _ in range(2):
            self.claim(3, policy, LEASE)

    @rule(key=keys, records=st.lists(ids, min_size=1, max_size=3), other=st.sampled_from(POLICIES[:2]))
    def a_digest_is_what_most_are(self, key: str, records: Sequence[bytes], other: Policy) -> None:
        """A log as it is, claimed and delivered whole, with nothing since; or more than its claim would take."""
        limits = POLICIES[0].terms.limits
        self.call("delete", key)
        self.call("add", 0, [Add(key, self.entry(each, None), POLICIES[0].terms) for each in records])
        for lease in self.call("claim", 0, 3, LEASE, other.terms.limits).leases:
            self.given.append(lease)
            if lease.key == key:
                self.call("close", 0, [Close(lease, lease.size, lease.size, 0, limits, LEASE)])

    @rule(number=numbers, kind=kinds, others=seldom)
    def delete(self, number: int, kind: str, others: bool) -> None:
        self.call("delete", self.key(number, kind))
        for key in self.found("any", POLICIES[0]) if others else ():
            self.call("delete", key)
        self.call("counts")
        self.call("claim", 0, 0, LEASE, POLICIES[0].terms.limits)

    @rule(
        number=numbers,
        kind=st.sampled_from(("in retry wait",) * 8 + ("of one record",) * 6 + KINDS),
        records=st.lists(numbers, min_size=1, max_size=3),
        policy=policies,
    )
    def remove(self, number: int, kind: str, records: Sequence[int], policy: Policy) -> None:
        key = self.key(number, kind, policy)
        self.call("remove", key, b"unknown", policy.terms.limits)
        for record in records:
            name = self.record(key, record)
            if self.call("remove", key, name, policy.terms.limits):
                left = self.machine.held.get(key, Held()).entries
                assert name not in map(identity, left), "it is said to be gone, and may be delivered"

    @rule(
        number=numbers,
        kind=st.sampled_from((*MOVABLE * 2, "in cool-down", "in cool-down", "any")),
        moves=some(
            st.sampled_from(("policy", "policy", "clock", "at", "delay")),
            st.sampled_from(STEPS),
            delays,
            st.integers(0, 1),
        ),
        policy=policies,
    )
    def reschedule(self, number: int, kind: str, moves: Sequence[tuple[str, int, int, int]], policy: Policy) -> None:
        key = self.key(number, kind, policy)
        held = self.machine.held.get(key, Held())
        if number % 2 == 0:  # as an engine asks whose policy is another one now
            for iteration in (held.iteration + 1, held.iteration):
                self.call("reschedule", key, Move(policy.terms, gap_ms=300_000, iteration=iteration))
            self.call("reschedule", key, Move(policy.terms, delay_ms=300_000))
        for mode, at, delay, outdated in moves:
            # as if it was worked out from the time of day, again or for another hour
            wait = max(0, (held.cool_ms or held.opening_ms) - self.clock.now + (0, 10_000, -10_000, 10_001)[at % 4])
            clock = policy.terms._replace(initial_ms=wait)
            move = {
                "clock": Move(clock, gap_ms=wait, iteration=held.iteration, by_clock=True),
                "at": Move(policy.terms, at_ms=self.clock.now + at),
                "delay": Move(policy.terms, delay_ms=delay),
                "policy": Move(policy.terms, gap_ms=delay, iteration=held.iteration + outdated),
            }[mode]
            self.call("reschedule", key, move)

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def schedule(self, deadline: int | None) -> None:
        self.call("schedule", None if deadline is None else self.clock.now + deadline)

    @rule(deadline=st.one_of(st.none(), st.sampled_from(STEPS)))
    def maintenance(self, deadline: int | None) -> None:
        self.call("maintenance", None if deadline is None else self.clock.now + deadline)

    @rule(number=numbers, kind=kinds, state=st.sampled_from(("waiting", "ready", "leased", "muted")), size=small)
    def look(self, number: int, kind: str, state: models.State, size: int) -> None:
        key = self.key(number, kind)
        for _ in range(3 - min(3, len(self.found(state, POLICIES[0])))):
            self.bring(state, POLICIES[0], number)
        self.call("look", key)
        self.call("cooling", key)
        self.call("entries", key)
        for _ in range(2):
            self.ends[state] = self.call("page", 0, state, size, self.ends.get(state)).end
        self.call("counts")
        kept = self.stores.kept
        assert self.stores.state() == kept, "a read changed what is kept"

    @rule(number=numbers, policy=policies, own=owns, discard=st.sampled_from((False, False, True)))
    def replay_or_discard(self, number: int, policy: Policy, own: bool | None, discard: bool) -> None:
        for _ in range(2 - min(2, len(self.machine.dead))):
            lease = self.lease("held", 5 * number)
            _, old = self.ended(lease, lease.size, None)
            close = Close(lease, lease.size, 0, 0, policy.terms.limits, LEASE, old, False, [NewDeadLetter("all")])
            self.call("close", 0, [close])
        for _ in range(2):
            self.ends["dead"] = self.call("dead_letters", 0, 1, self.ends.get("dead")).end
        letter = pick(number, self.call("dead_letters", 0, 100).items, [*self.machine.dead.oldest_first(), "none"])
        for each in ("none", letter):
            self.call("dead_letter", each)
        self.call("replay", "none", policy.terms, own)
        if discard:
            self.call("discard", letter)
        else:
            self.call("replay", letter, policy.terms, own)

    # Chance alone leads to the ends of these seldom: each needs some calls in a row.

    @rule(
        key=keys,
        before=st.lists(st.tuples(ids, st.sampled_from(STAMPS)), min_size=1, max_size=4),
        policy=st.sampled_from((*POLICIES, *POLICIES[3:5] * 2)),
        since=st.just([]) | st.lists(ids, max_size=4),
        other=sized,
        own=owns,
        lost=st.booleans(),
        step=st.sampled_from((0, 0, 31 * DAY)),
    )
    def a_dead_letter_comes_back(
        self,
        key: str,
        before: Sequence[tuple[bytes, int | None]],
        policy: Policy,
        since: Sequence[bytes],
        other: Policy,
        own: bool | None,
        lost: bool,
        step: int,
    ) -> None:
        """Records are set aside, others may come in their place, and the letter is replayed if it is still there."""
        self.call("add", 0, [Add(key, self.entry(*each), policy.terms) for each in before])
        self.call("flush", key)
        limits = policy.terms.limits
        if lease := self.call("open", 0, key, LEASE, limits):
            self.given.append(lease)
            taken = min(lease.part or lease.size, lease.size)
            _, old = self.ended(lease, taken, None)
            self.call("close", 0, [Close(lease, taken, 0, 0, limits, LEASE, old, False, [NewDeadLetter("all")])])
        if lost and not since:
            since = IDS[:1]
        if since:
            self.call("add", 0, [Add(key, self.entry(each, None), other.terms) for each in since])
        self.clock.now += step
        for letter in self.call("dead_letters", 0, 100).items[-1:]:
            if lost and own is not None and self.fits(letter, other):
                self.stores.drop(self.machine.dead[letter].key)
            self.call("replay", letter, other.terms, own)

    def fits(self, letter_id: str, policy: Policy) -> bool:
        """Whether a letter's timeline has records in its log alone, and may have the letter's instead."""
        letter = self.machine.dead[letter_id]
        return letter.key in self.logs() and len(letter.entries) <= policy.capacity

    @rule(step=st.sampled_from((100_000, 2_000_000, 90_000_000)), slots=st.sampled_from((0, 1, 3)), policy=policies)
    def records_outlive_their_ttl(self, step: int, slots: int, policy: Policy) -> None:
        """Nobody looks for long, and then a worker does, once its grace is over."""
        self.clock.now += step
        self.call("claim", 0, 0, LEASE, policy.terms.limits)
        self.clock.now += LEASE
        for _ in range(2):
            self.claim(slots, policy, LEASE)

    @rule(hold=holds, number=numbers, times=st.integers(1, 3), policy=policies)
    def an_attempt_is_given_back_for_more_than_a_day(self, hold: str, number: int, times: int, policy: Policy) -> None:
        lease = self.lease(hold, number)
        for _ in range(times):
            back = Retry(lease, 13 * 3_600_000, "not now", policy.terms.limits, lease.size, None, 0, True, False, 0)
            self.call("retry", 0, [back])
            self.clock.now += 13 * 3_600_000
            for found in self.call("claim", 0, 3, LEASE, policy.terms.limits).leases:
                self.given.append(found)
                if found.key == lease.key:
                    lease = found

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat_a_call_whose_reply_was_lost(self) -> None:
        """However late, and whatever others have done: and if they did nothing, the repetition does nothing."""
        last, before = self.last, self.stores.kept
        assert last is not None
        answer = self.call(last.name, *last.arguments)
        self.last = last
        if last.state is not before:
            return
        reports = last.arguments[1] if last.name in ("close", "retry", "release", "postpone") else ()
        keys = [getattr(report, "lease", report).key for report in reports]
        if last.name in SETTLED and len(set(keys)) == len(keys):  # of two of one timeline, the last is remembered
            assert without_count(answer) == without_count(last.answer)
        if last.name in SETTLED or last.at == self.clock.now:
            assert timeless(self.stores.kept) == timeless(before)
        last.state = self.stores.kept


@pytest.fixture
def few_dead_letters() -> Iterator[None]:
    with bound_of_dead_letters(2_500):
        yield


@pytest.mark.usefixtures("few_dead_letters")
def test_the_scripts_do_what_the_reference_does(place: Place, pytestconfig: pytest.Config) -> None:
    is_quick = pytestconfig.getoption("--quick")
    branches = Branches(SCRIPTS) if COUNTS and place.name == "redis" and not is_quick else None
    if branches:
        with place.client_of("") as client:
            branches.load(client)
            branches.take(client)
    with asyncio.Runner() as runner:
        Stores.place, Stores.loop = place, runner.get_loop()
        Stores.branches, Stores.met = branches, Counter()
        Stores.source = branches.client(place.url) if branches else place.url
        for number in (None,) if GIVEN else (SEEDS[0],) if is_quick else (*SEEDS, *(MORE_SEEDS if branches else ())):
            if branches and number in MORE_SEEDS and not unmet(branches):
                break
            run_state_machine_as_test(
                Stores if number is None else seed(number)(Stores),
                settings=settings(
                    max_examples=GIVEN or EXAMPLES[place.name] // len(SEEDS),
                    stateful_step_count=40 if GIVEN else 25,
                    deadline=None,
                    database=settings.default.database if GIVEN and settings.default else None,
                    suppress_health_check=SLOW,
                ),
            )
    if branches:
        check_met(branches)


# Outcomes of conditions that no rule leads to, with the test of test_redisbackend.py that does; '' where a script makes
# sure of it itself.
ASTRAY = "test_calendars_are_worked_out_anew_for_the_servers_time_where_this_machines_clock_is_wrong"
BROKEN_LETTER = "test_a_broken_dead_letter_is_listed_with_its_error_beside_the_others_and_can_be_discarded"
BROKEN = "test_broken_timelines_at_the_head_are_reported_and_the_next_sound_one_is_delivered"
ELSEWHERE = {
    "add.lua stale and (is_stale or stale[key]): yes": ASTRAY,
    "replay.lua are_stale(terms): yes": ASTRAY,
    "reschedule.lua are_stale(terms): yes": ASTRAY,
    "add.lua length > LONGEST: yes": BROKEN,
    "letter.lua not problem and size > LONGEST: yes": BROKEN_LETTER,
    "replay.lua length > LONGEST: yes": BROKEN_LETTER,
    "shared/timelines.lua math.max(logged, opened) > LONGEST: yes": BROKEN,
    "shared/timelines.lua fields.err: yes": "test_an_add_that_cannot_end_a_mute_says_so",
    "add.lua room < 1: yes": "test_much_to_compact_is_done_in_several_calls",
    "shared/seen.lua over > 0: yes": "test_the_latest_ten_thousand_ids_of_a_timeline_are_known_as_delivered",
    "shared/clock.lua not now: yes": "test_200_concurrent_adds_share_a_few_connections",
    "shared/late.lua server_time >= tonumber(too_late): yes": "test_a_script_that_comes_too_late_does_nothing",
    "shared/late.lua too_late: no": "test_a_script_that_comes_too_late_does_nothing",
    "shared/lease.lua room_bytes < 0: yes": "test_large_values_do_not_swell_an_answer",
    "shared/reading.lua bytes >= PAGE_BYTES: yes": "test_large_values_do_not_swell_an_answer",
    "shared/lease.lua #page == 0: yes": "",  # it reads no more entries than it has counted
    "shared/promotion.lua keys and not call('ZMSCORE', waiting, call('ZRANGE', postponed, 0, 0)[1])[1]: yes": (
        "test_what_an_earlier_version_took_although_it_was_postponed_is_forgotten"
    ),
    "claim.lua scanned >= SLICE: yes": "test_a_claim_ends_no_more_mutes_than_it_may_read_records_for",
    "claim.lua #records > 0: no": "test_a_timeline_whose_records_are_gone_is_told_as_expired",
    "add.lua held: no": "test_an_add_that_cannot_end_a_mute_says_so",
    "add.lua unreadable: yes": "test_an_add_that_cannot_end_a_mute_says_so",
    "claim.lua problem: yes": "test_an_add_that_cannot_end_a_mute_says_so",
    "mute.lua were and only_new: yes": "test_a_mute_of_another_shard_is_taken_over_once",
    "unmute.lua said ~= '' and said ~= is or only_idle and state: yes": (
        "test_a_mute_of_another_shard_is_taken_over_once"
    ),
    "delete.lua leave(key): yes": "test_deleting_a_timeline_takes_it_out_of_every_set_it_is_in",
}


def unmet(branches: Branches) -> set[str]:
    """Outcomes that an example should have met, and none has."""
    names = (re.sub(r":\d+ ", " ", name, count=1) for name in branches.names if not Stores.met[name])
    return {name for name in names if name not in ELSEWHERE}


def check_met(branches: Branches) -> None:
    """See that the examples met every outcome, but for those that only another test can, which is there."""
    names = {re.sub(r":\d+ ", " ", name, count=1): name for name in branches.names}
    assert ELSEWHERE.keys() <= names.keys(), f"no such outcomes: {sorted(ELSEWHERE.keys() - names.keys())}"
    tests = Path(__file__).with_name("test_redisbackend.py").read_text(encoding="utf-8")
    assert all(f"def {test}(" in tests for test in filter(None, ELSEWHERE.values()))
    assert not unmet(branches), f"no example met {sorted(unmet(branches))}"
    here = {name for name in ELSEWHERE if Stores.met[names[name]]}
    assert not here, f"met here, and not only elsewhere: {sorted(here)}"
