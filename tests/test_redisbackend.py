"""What only a store on a server can get wrong: full servers, broken keys, lost replies, layouts, the doorbell."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import redis.asyncio
from redis.crc import key_slot
from replicas import until
from servers import Proxy, Server, running_server
from stores import DAY, LEASE, NOW
from storestate import check_invariants, redis_state, reference_state
from test_cluster import VERBS, Held

from aiodigest import DigestEngine, Entry, Stats
from aiodigest.backend import (
    ASIDE_MS,
    LONGEST,
    MOST_SEEN,
    MOVES,
    Add,
    Claims,
    Close,
    Closed,
    Lease,
    Move,
    Mute,
    NewDeadLetter,
    Retry,
    StoredTimeline,
)
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.redis import scripts
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.layout import Layout
from aiodigest.errors import BackendUnavailable, ConfigurationError, InvalidState, LeaseLost
from aiodigest.policy import Policy
from aiodigest.records.entries import identity_of, pack, unpack
from aiodigest.timing.hours import Hours

POLICY = Policy()
TERMS, LIMITS = POLICY.terms, POLICY.terms.limits
MANY = 20_000


def record(key: str, record_id: str = "a", value: bytes = b"v", policy: Policy = POLICY) -> Add:
    return Add(key, pack(record_id.encode(), None, value), policy.terms)


def closing(lease: Lease, letters: Sequence[NewDeadLetter] = (), cool_ms: int = 300_000) -> Close:
    delivered = 0 if letters else lease.size
    return Close(lease, lease.size, delivered, cool_ms, LIMITS, LEASE, dead_letters=letters)


async def claim(backend: RedisBackend, slots: int = 10) -> Claims:
    return await backend.claim(0, slots, LEASE, LIMITS)


async def leased(backend: RedisBackend, *record_ids: str) -> Lease:
    """The digest of a new timeline "k"."""
    await backend.add(0, [record("k", record_id) for record_id in record_ids or "a"])
    [lease] = (await claim(backend)).leases
    return lease


async def seen(backend: RedisBackend, key: str) -> StoredTimeline:
    window = await backend.operations.look(key)
    assert window is not None
    return window


async def only_letter(backend: RedisBackend) -> str:
    [name] = (await backend.operations.dead_letters(0, 10)).items
    return name


Clock: TypeAlias = SimpleNamespace  # whose ``now`` a test moves


@pytest.fixture
def clock() -> Clock:
    return Clock(now=NOW)


@asynccontextmanager
async def connected(
    url: str, namespace: str, shards: int | None = None, timeout: float = 60.0, now: Callable[[], int] | None = None
) -> AsyncGenerator[RedisBackend]:
    backend = RedisBackend(url, namespace=namespace, shards=shards, timeout=timeout, now=now)
    try:
        await backend.connect()
        yield backend
    finally:
        await backend.aclose()


@dataclass
class Raw:
    """The keys of a test's namespace, for a test that does to them what no version of aiodigest would."""

    client: Any
    namespace: str

    def key(self, name: str) -> str:
        return f"{{{self.namespace}}}:{name}"


@pytest.fixture
def raw(client: Any, namespace: str) -> Raw:
    return Raw(client, namespace)


@pytest.fixture
def emptied(client: Any) -> Iterator[None]:
    """For tests that fill the server, which is slow to search then."""
    yield
    client.flushall()


@pytest.fixture
async def backend(
    request: pytest.FixtureRequest, server: Server, client: Any, namespace: str, clock: Clock
) -> AsyncIterator[RedisBackend]:
    """A backend whose clock the test moves; what is left is checked, unless the test has been at the keys."""
    async with connected(server.url, namespace, now=lambda: clock.now) as backend:
        yield backend
    if "raw" not in request.fixturenames:
        check_invariants(redis_state(client, namespace))


async def test_a_full_server_refuses_adds_and_can_be_drained(namespace: str) -> None:
    with running_server("--maxmemory-policy", "noeviction") as server, server.client() as client:
        async with connected(server.url, namespace) as backend:
            for number in range(60):
                await backend.add(0, [record(f"k{number}", f"{entry}", b"v" * 10_000) for entry in range(10)])
            first = await claim(backend, 2)
            client.config_set("maxmemory", "2mb")
            before = client.info("memory")["used_memory"]
            [refused] = await backend.add(0, [record("full")])
            assert isinstance(refused, BackendUnavailable)
            assert (refused.stored, refused.record_id) == ("no", "a")
            assert "maxmemory" in str(refused)
            assert await backend.operations.look("full") is None
            assert await backend.renew(0, first.leases, LEASE) == [True, True]
            assert await backend.retry(0, [Retry(first.leases[0], 1_000, "boo", LIMITS)]) == [True]
            assert await backend.release(0, [first.leases[1]], started=False) == [True]
            while leases := (await claim(backend)).leases:
                assert await backend.close(0, [closing(lease) for lease in leases]) == [Closed("closed")] * len(leases)
            assert client.info("memory")["used_memory"] < before - 5_000_000


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("log", ""), ("open", ""), ("meta", ""), ("log", "long"), ("open", "long"),
        ("end", "x"), ("attempts", "nan"), ("cool", "1e300"), ("dropped", "9" * 20), ("own", "x"),
        ("own", f"1 0 0 {10**20}"),
    ],
    ids=str,
)  # fmt: skip
async def test_broken_timelines_at_the_head_are_reported_and_the_next_sound_one_is_delivered(
    backend: RedisBackend, raw: Raw, clock: Clock, part: str, value: str
) -> None:
    told = "50001 entries" if value == "long" else f"'{part}'" if value else "WRONGTYPE"
    broken = [f"broken{number}" for number in range(3)]
    for key in (*broken, "sound"):
        clock.now += 1
        await backend.add(0, [record(key)])
    for key in broken:
        if value == "long":
            raw.client.rpush(raw.key(f"{part}:{key}"), *["not ours"] * (LONGEST + 1 - (part == "log")))
        elif value:
            raw.client.hset(raw.key(f"meta:{key}"), part, value)
        else:
            raw.client.set(raw.key(f"{part}:{key}"), "not ours", ex=100)
    claims = await claim(backend, 3)
    assert [lease.key for lease in claims.leases] == ["sound"]
    assert [(key, told in problem) for key, problem in claims.broken] == [(key, True) for key in broken]
    window = await seen(backend, "broken0")
    assert (window.state, window.due_ms) == ("waiting", clock.now + LEASE)
    assert claims.broken[0][1] in window.last_error
    bad = Lease("broken0", "token", "digest", 1, 1, 0, 0, 1)
    failed, closed = await backend.close(0, [closing(bad), closing(claims.leases[0])])
    assert isinstance(failed, InvalidState)  # it fails alone
    assert "'broken0' is broken" in str(failed)
    assert closed == Closed("closed")
    assert await backend.delete("broken0")
    failed, stored = await backend.add(0, [record("broken1", "b"), record("broken0")])
    assert (isinstance(failed, InvalidState), stored) == (part in ("log", "meta", "end", "cool", "own"), True)


@pytest.mark.parametrize(
    ("theirs", "own", "says_so"),
    [(5_000, False, True), (1_000, False, False), (10_000, False, False), (5_000, True, False)],
)
async def test_who_adds_under_other_limits_than_workers_drop_by_says_so_once(
    backend: RedisBackend, caplog: pytest.LogCaptureFixture, theirs: int, own: bool, says_so: bool
) -> None:
    ours = Policy(capacity=1_000)
    add = Add("k", pack(b"a", None, b"v"), ours.terms, own)
    assert await backend.add(0, [add]) == [True]
    await backend.claim(0, 0, LEASE, Policy(capacity=theirs).terms.limits)
    assert await backend.add(0, [add, add]) == [False, False]
    assert await backend.add(0, [add]) == [False]
    if says_so:  # once a process
        await backend.claim(0, 0, LEASE, Policy(capacity=2_000).terms.limits)
        assert await backend.add(0, [add]) == [False]
    said = [line for line in caplog.messages if "which drop what is over theirs" in line]
    assert len(said) == says_so
    assert all("the policy here (capacity 1000, " in line and "the workers (capacity 5000, " in line for line in said)


@pytest.mark.parametrize("found", ["5000 0 0", "x", "5000 0 0 0 0", ""])
async def test_what_another_program_has_put_in_place_of_limits_is_no_answer(
    backend: RedisBackend, raw: Raw, caplog: pytest.LogCaptureFixture, found: str
) -> None:
    await claim(backend, 0)
    raw.client.hset(raw.key("layout"), "limits", found)
    assert await backend.add(0, [record("k"), record("l")]) == [True, True]
    assert caplog.messages == []


async def test_who_adds_under_other_limits_than_workers_had_that_are_gone_says_nothing(
    backend: RedisBackend, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    await backend.claim(0, 0, LEASE, Policy(capacity=5).terms.limits)
    clock.now += LEASE + 1
    assert await backend.add(0, [record("k")]) == [True]
    assert caplog.messages == []


async def test_who_looks_at_a_timeline_reads_no_more_than_a_timeline_may_have(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.rpush(raw.key("log:k"), *["not ours"] * (2 * LONGEST))
    with pytest.raises(InvalidState, match="'k' is broken: it has over 100000 entries"):
        await backend.operations.entries("k")


async def test_of_a_thousand_fields_only_those_that_are_known_are_read(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.hset(raw.key("meta:k"), mapping={f"field {number}": "not ours" for number in range(1_000)})
    raw.client.config_resetstat()
    [lease] = (await claim(backend)).leases
    assert await backend.close(0, [closing(lease)]) == [Closed("closed")]
    assert "cmdstat_hmget" in raw.client.info("commandstats")
    assert "cmdstat_hgetall" not in raw.client.info("commandstats")


async def test_much_to_compact_is_done_in_several_calls(backend: RedisBackend, client: Any) -> None:
    terms = Policy(initial_delay=900, capacity=900, max_size=800).terms
    adds = [Add(f"k{number % 5}", pack(b"%d" % (number // 5 % 1_000), None, b"v"), terms) for number in range(10_000)]
    client.config_resetstat()
    assert [result for result in await backend.add(0, adds) if result not in (True, False)] == []
    # 40 batches; each compaction reads some 1,350 entries, and the next one is left to the next call
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] > 45
    assert all([(await seen(backend, f"k{number}")).logged <= 900 * 3 // 2 for number in range(5)])


async def test_a_claim_ends_no_more_mutes_than_it_may_read_records_for(backend: RedisBackend, clock: Clock) -> None:
    policy = Policy(initial_delay=900, max_size=600)
    for key in ("a", "b", "c"):
        await backend.mute(key, Mute(delay_ms=1_000), policy.terms.limits)
        await backend.add(0, [Add(key, pack(b"%d" % number, None, b"v"), policy.terms) for number in range(600)])
    clock.now += 1_000
    claims = await backend.claim(0, 3, LEASE, policy.terms.limits)
    assert (claims.leases, claims.wait_ms) == ([], 0)
    assert [(await seen(backend, key)).state for key in ("a", "b", "c")] == ["ready", "ready", "muted"]
    claims = await backend.claim(0, 3, LEASE, policy.terms.limits)
    assert [lease.key for lease in claims.leases] == ["a", "b", "c"]


@pytest.mark.parametrize("names", [3, 700, 20_000])
@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(initial_delay=600, capacity=7), Policy(initial_delay=600, capacity=900, max_size=800)],
    ids=("ready", "waiting", "sized"),
)
async def test_a_long_burst_is_what_its_adds_are_one_by_one(
    backend: RedisBackend, client: Any, namespace: str, clock: Clock, policy: Policy, names: int
) -> None:
    """Whatever is compacted on the way, and in however many calls: the reference adds one by one."""
    reference, numbers = ReferenceBackend(now=lambda: clock.now), iter(range(100_000))
    for length in (7, 1_000, 3, 2_000):
        entries = [(number, pack(b"%d" % (number % names), None, b"%d" % number)) for number in islice(numbers, length)]
        adds = [Add(f"k{number % 2}", entry, policy.terms) for number, entry in entries]
        assert await backend.add(0, adds) == await reference.add(0, adds)
        assert redis_state(client, namespace) == reference_state(reference.machines[0])
        clock.now += 1_000


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "distinct"), [(5, 1), (5, 4), (100, 99), (1_000, 999)])
async def test_an_add_reads_a_few_entries_on_average_however_often_ids_are_added_again(
    client: Any, backend: RedisBackend, namespace: str, size: int, distinct: int
) -> None:
    terms, adds = Policy(initial_delay=900, max_size=size).terms, 4_000
    numbers = (number % distinct for number in range(adds))
    with client.monitor() as monitor:
        added = await backend.add(0, [Add("k", pack(b"%d" % number, None, b"v"), terms) for number in numbers])
        client.echo("end")
        commands = [line["command"] for line in takewhile(lambda line: line["command"] != "ECHO end", monitor.listen())]
    assert added == [False] * adds
    reads = [command.split()[2:] for command in commands if command.startswith(f"LRANGE {{{namespace}}}:log:k ")]
    assert sum(int(stop) - int(start) + 1 for start, stop in reads) < 10 * adds


async def test_a_claim_that_has_read_much_leaves_the_rest_to_the_next(backend: RedisBackend) -> None:
    terms = Policy(capacity=1_000).terms
    for key in ("first", "second"):
        await backend.add(0, [Add(key, pack(b"%d" % number, None, b"v"), terms) for number in range(1_200)])
    for key in ("first", "second"):  # of each it reads 1,200 entries, since they are more than the capacity
        claims = await backend.claim(0, 2, 60_000, terms.limits)
        assert [(lease.key, lease.size) for lease in claims.leases] == [(key, 1_000)]


async def test_large_values_do_not_swell_an_answer(backend: RedisBackend) -> None:
    for number in range(40):
        await backend.add(0, [record("k", f"{number}", b"x" * 50_000)])
    [lease] = (await claim(backend)).leases
    assert (lease.size, len(lease.entries)) == (40, 5)
    entries = [*lease.entries]
    while len(entries) < lease.size:
        page = await backend.read(0, lease, len(entries), 1_000)
        assert len(page) <= 6
        entries += page
    assert [unpack(entry).id for entry in entries] == [str(number) for number in range(40)]
    assert entries == await backend.operations.entries("k")


@pytest.mark.parametrize(("state", "call"), [("waiting", "schedule"), ("leased", "maintenance")])
@pytest.mark.usefixtures("emptied")
async def test_20_000_move_in_slices(backend: RedisBackend, raw: Raw, clock: Clock, state: str, call: str) -> None:
    await claim(backend, 0)
    raw.client.zadd(raw.key(state), {f"k{number}": NOW + number % 1_000 for number in range(MANY)})
    clock.now += 2_000
    move = getattr(backend, call)
    raw.client.config_resetstat()
    slices: list[int] = []
    while moved := await move():
        slices.append(len(moved))
    assert slices == [MOVES] * (MANY // MOVES)
    calls = raw.client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert calls == len(slices) + 1, "a call for each slice, and one that finds nothing"


async def test_a_claim_tells_how_long_to_wait_by_more_than_the_milliseconds_of_the_clock(
    server: Server, namespace: str, client: Any
) -> None:
    def micros() -> int:
        seconds, rest = client.time()
        return 1_000_000 * seconds + rest

    async with connected(server.url, namespace) as backend:
        await backend.add(0, [record("k", policy=Policy(initial_delay=600))])
        stored = await backend.operations.look("k")
        assert stored is not None
        due = stored.due_ms
        for _ in range(20):
            before = micros()
            wait_ms = (await claim(backend)).wait_ms
            assert wait_ms is not None
            assert 1000 * due - micros() <= round(1000 * wait_ms) <= 1000 * due - before


@pytest.mark.usefixtures("emptied")
async def test_a_claim_moves_a_slice_and_opens_a_hundred_digests_at_most(backend: RedisBackend, clock: Clock) -> None:
    await backend.add(0, [record(f"k{number}", policy=Policy(initial_delay=1)) for number in range(3_000)])
    clock.now += 2_000
    claims = await claim(backend, 3_000)
    assert (len(claims.leases), claims.wait_ms) == (100, 0)
    assert await backend.operations.counts() == {
        "waiting": 3_000 - MOVES, "ready": MOVES - 100, "leased": 100, "mutes": 0, "dead": 0,
        "oldest_due_ms": NOW + 1_000,
        "overdue_ms": 1_000,
    }  # fmt: skip


async def test_what_an_earlier_version_took_although_it_was_postponed_is_forgotten(
    backend: RedisBackend, raw: Raw
) -> None:
    await claim(backend, 0)
    raw.client.zadd(raw.key("postponed"), {"gone": NOW - 2, "gone too": NOW - 1})
    for left in (1, 0):
        await claim(backend, 0)
        assert raw.client.zcard(raw.key("postponed")) == left


@pytest.mark.usefixtures("emptied")
async def test_1000_records_are_set_aside_one_by_one_in_one_close(backend: RedisBackend) -> None:
    await backend.add(0, [record("k", f"{number}") for number in range(1_000)])
    [lease] = (await claim(backend)).leases
    letters = [NewDeadLetter("unreadable", [identity_of(b"%d" % number)]) for number in range(1_000)]
    assert await backend.close(0, [closing(lease, letters)]) == [Closed("closed")]
    assert (await backend.operations.counts())["dead"] == 1_000


@pytest.mark.parametrize("answer", ["LOADING the dataset", "NOAUTH Authentication required.", "ERR WAIT on a replica"])
async def test_an_add_whose_wait_for_replicas_is_refused_may_be_stored(
    server: Server, namespace: str, answer: str
) -> None:
    async with Proxy(server) as proxy, connected(server.url, namespace) as other:
        await other.add(0, [record("k")])
        backend = RedisBackend(proxy.url, namespace=namespace, wait_replicas=1)
        await backend.connect()
        proxy.refused, proxy.lie = b"WAIT", f"-{answer}\r\n".encode()
        with pytest.raises(BackendUnavailable) as caught:
            await backend.add(0, [record("k")])
        assert caught.value.stored == "unknown"
        assert len(await other.operations.entries("k")) == 2
        await backend.aclose()


@pytest.mark.parametrize("error", ["", "upstream failure"])  # which proxies answer that have lost the server
async def test_an_add_whose_reply_is_lost_may_be_repeated(server: Server, namespace: str, error: str) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        await backend.add(0, [record("warm")])
        requests = proxy.requests
        proxy.swallow, proxy.lie = (0, f"-ERR {error}\r\n".encode()) if error else (1, b"")
        with pytest.raises(BackendUnavailable, match=error or "unavailable") as caught:
            await backend.add(0, [record("k")])
        assert (caught.value.stored, proxy.requests) == ("unknown", requests + 1)
        assert await backend.add(0, [record("k")]) == [False]
        limits = Policy(capacity=1).terms.limits  # a digest over its capacity is compacted
        leases = (await backend.claim(0, 10, LEASE, limits)).leases
        assert [len(lease.entries) for lease in leases if lease.key == "k"] == [1]


async def test_a_close_whose_reply_is_lost_is_said_again_and_a_claim_is_not(server: Server, namespace: str) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        lease = await leased(backend)
        proxy.swallow = 1
        assert await backend.close(0, [closing(lease)]) == [Closed("closed")]
        assert (await backend.operations.counts())["digests"] == 1
        await backend.add(0, [record("other")])
        proxy.swallow, requests = 1, proxy.requests
        with pytest.raises(BackendUnavailable) as caught:
            await claim(backend)
        assert (caught.value.stored, proxy.requests) == ("unknown", requests + 1)


CALLS: dict[str, Callable[[RedisBackend, Lease], Awaitable[object]]] = {
    "add": lambda backend, _: backend.add(0, [record("k")]),
    "claim": lambda backend, _: claim(backend),
    "open": lambda backend, _: backend.open(0, "other", LEASE, LIMITS),
    "read": lambda backend, lease: backend.read(0, lease, 0, 1),
    "renew": lambda backend, lease: backend.renew(0, [lease], LEASE),
    "look": lambda backend, _: backend.operations.look("k"),
    "connect": lambda backend, _: backend.connect(),
    "retry": lambda backend, lease: backend.retry(0, [Retry(lease, 0, "x", LIMITS)]),
    "close": lambda backend, lease: backend.close(0, [closing(lease)]),
}
THREE, NO_ITEM = b"*3\r\n:1\r\n:1\r\n:1\r\n", b"*0\r\n"
COUNTED = {"renew": (THREE, NO_ITEM), "retry": (THREE, NO_ITEM), "close": (NO_ITEM,)}  # such answers, but not so many


@pytest.mark.parametrize("lie", [b":7\r\n", b"$-1\r\n", b"*2\r\n:1\r\n*0\r\n", THREE, NO_ITEM])
@pytest.mark.parametrize("call", CALLS)
async def test_after_an_answer_to_another_question(server: Server, namespace: str, call: str, lie: bytes) -> None:
    if lie in {"open": b"$-1\r\n", "read": NO_ITEM, "look": NO_ITEM}.get(call, b""):
        return  # which it may well be
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        lease = await leased(backend)
        proxy.lie, before = lie, proxy.connections
        if call in ("add", "claim", "open") or lie in COUNTED.get(call, ()):
            with pytest.raises(BackendUnavailable) as caught:
                await CALLS[call](backend, lease)
            assert caught.value.stored == "unknown"
        else:
            await CALLS[call](backend, lease)
        await backend.operations.look("k")
        assert proxy.connections == before + 1


async def test_a_listener_that_hears_no_ring_listens_on_another_connection(server: Server, namespace: str) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        await backend.add(0, [record("k")])
        assert await backend.wait(0, "0-0") != "0-0"
        proxy.lie = b"*1\r\n:1\r\n"
        with pytest.raises(BackendUnavailable, match="not a valid answer to XREAD"):
            await backend.wait(0, "0-0")
        assert await backend.wait(0, "0-0") != "0-0"


async def test_leases_are_renewed_and_given_back_some_hundred_a_call(backend: RedisBackend, client: Any) -> None:
    await backend.add(0, [record("k")])
    leases = [Lease(f"k{number}", "token", "digest", 1, 1, 0, 0, 1) for number in range(600)]
    client.config_resetstat()
    assert await backend.renew(0, leases, LEASE) == [False] * 600
    assert await backend.release(0, leases, started=True) == [False] * 600
    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == 2 * 3


class Astray(RedisBackend):
    """A backend on a machine whose clock is a year behind the servers'."""

    def _about(self, now: Any = "") -> int:
        return super()._about(now) - 365 * DAY


async def test_calendars_are_worked_out_anew_for_the_servers_time_where_this_machines_clock_is_wrong(
    server: Server, namespace: str
) -> None:
    calendar, hours = Policy.at("*/10 * * * *"), Policy(minimum_delay=0, hours=Hours("00:00-24:00"))
    backend = Astray(server.url, namespace=namespace)
    try:
        await backend.connect()
        assert await backend.add(0, [record("k", "a", policy=calendar), record("h", "a", policy=hours)]) == [
            False,
            True,
        ]
        now = await backend.clock_ms(0)
        assert now < (await seen(backend, "k")).due_ms <= now + 600_000
        due = await backend.reschedule("k", Move(calendar.terms))
        assert due is not None
        assert now < due <= now + 600_000
        [lease] = (await claim(backend)).leases
        await backend.close(0, [closing(lease, [NewDeadLetter("boo")])])
        await backend.replay(await only_letter(backend), calendar.terms, own=False)
        assert now < (await seen(backend, "h")).due_ms <= now + 600_000
    finally:
        await backend.delete("k")
        await backend.delete("h")
        await backend.aclose()


async def test_adds_that_must_be_sent_again_for_the_servers_time_have_failed_if_that_fails(
    server: Server, namespace: str
) -> None:
    async with Proxy(server) as proxy:
        backend = Astray(proxy.url, namespace=namespace)
        await backend.connect()
        await backend.add(0, [record("warm")])
        proxy.spare, proxy.swallow = 1, 1
        with pytest.raises(BackendUnavailable) as caught:
            await backend.add(0, [record("k", policy=Policy.at("*/10 * * * *"))])
        assert caught.value.stored == "unknown"
        await backend.delete("k")
        await backend.delete("warm")
        await backend.aclose()


async def test_adds_to_a_timeline_stay_in_order_although_some_must_be_sent_again_for_the_servers_time(
    server: Server, namespace: str
) -> None:
    backend = Astray(server.url, namespace=namespace)
    await backend.connect()
    calendar = Policy.at("*/10 * * * *")
    adds = [record("k", "a", policy=calendar), record("k", "b"), record("k", "c", policy=calendar)]
    assert await backend.add(0, adds) == [False] * 3
    assert [unpack(entry).id for entry in await backend.operations.entries("k")] == ["a", "b", "c"]
    await backend.delete("k")
    await backend.aclose()


async def test_a_clock_that_leaps_between_the_calls_makes_a_server_unavailable(
    backend: RedisBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "COVERED", 0)  # by which its time may differ from call to call
    with pytest.raises(BackendUnavailable, match="leaps"):
        await backend.add(0, [record("k", policy=Policy.at("*/7 * * * *"))])


async def test_200_concurrent_adds_share_a_few_connections(server: Server, namespace: str) -> None:
    async with Proxy(server) as proxy, connected(proxy.url, namespace) as backend:
        results = await asyncio.gather(*(backend.add(0, [record("k", f"{number}")]) for number in range(200)))
        assert sorted(results) == [[False]] * 199 + [[True]]
        assert proxy.connections <= 8
        await backend.delete("k")


async def test_two_processes_that_open_a_timeline_at_once_open_one(server: Server, namespace: str) -> None:
    async with connected(server.url, namespace) as one, connected(server.url, namespace) as other:
        for number in range(20):
            key = f"k{number}"
            first, second = await asyncio.gather(one.add(0, [record(key)]), other.add(0, [record(key, "b")]))
            assert {*first, *second} == {False, True}
        claims = await asyncio.gather(claim(one, 20), claim(other, 20))
        assert sorted(lease.key for each in claims for lease in each.leases) == sorted(f"k{n}" for n in range(20))


async def test_a_server_without_scripts_is_sent_them(backend: RedisBackend, client: Any) -> None:
    for is_first in (True, False):
        client.script_flush()
        assert await backend.add(0, [record("k")]) == [is_first]


async def test_connecting_alone_reads_scripts(server: Server, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    scripts.load_scripts.cache_clear()
    backend = RedisBackend(server.url, namespace=namespace)
    for is_connected in (False, True):
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", full)
            if is_connected:
                lease = await leased(backend)
                assert await backend.retry(0, [Retry(lease, 0, "x", LIMITS)]) == [True]
            else:
                told = r"scripts of aiodigest cannot be read: .*Too many open files"
                with pytest.raises(BackendUnavailable, match=told):
                    await backend.connect()
        await backend.connect()
    await backend.aclose()


async def test_an_emptied_server_gets_its_layout_again(namespace: str) -> None:
    with running_server() as server, server.client() as client:
        async with connected(server.url, namespace, shards=2) as backend:
            shard = backend.shard_map.shard_of("k")
            await backend.add(shard, [record("k")])
            client.flushall()
            assert await backend.add(shard, [record("k")]) == [True]
            async with connected(server.url, namespace) as other:
                assert other.shard_map.count == 2


async def test_connecting_takes_three_commands_and_a_call_one(server: Server, namespace: str, client: Any) -> None:
    async with connected(server.url, namespace) as backend:
        await backend.add(0, [record("k")])
    client.config_resetstat()
    async with connected(server.url, namespace) as backend:
        await backend.add(0, [record("k")])
        await backend.operations.look("k")
        calls = {name: facts["calls"] for name, facts in client.info("commandstats").items()}
        assert calls["cmdstat_info"] == 1
        # what the user may do, the add and the look; each may be unknown to the server, and then sent whole
        assert calls.get("cmdstat_eval", 0) <= calls["cmdstat_evalsha"] == 3
        assert not [name for name in calls if name.startswith(("cmdstat_client", "cmdstat_hello", "cmdstat_ping"))]


def dump(client: Any, namespace: str) -> dict[bytes, tuple[bytes, bool]]:
    """All that a namespace holds."""
    keys = client.scan_iter(match=f"{{{namespace}}}*", count=1000)
    return {key: (client.dump(key), client.pttl(key) > 0) for key in keys}


async def test_a_script_that_comes_too_late_does_nothing(
    server: Server, namespace: str, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stamped(_: object, command: Sequence[scripts.Argument], late: float) -> Sequence[scripts.Argument]:
        return *command[:5], f"{command[5]}<1", *command[6:]

    async with connected(server.url, namespace) as backend:
        held = Held(backend, policy=Policy(minimum_delay=0))
        await held.fill()
        run = backend.namespace.connections.run
        verbs: dict[str, Callable[[], Awaitable[object]]] = {
            **{name: partial(verb, held) for name, verb in VERBS.items()},
            "layout": lambda: run("layout", f"{{{namespace}}}:other", ["version", "", "2:1:1"]),
            "reshard": lambda: run("reshard", backend.namespace.root, ["2:1:1", "", "2:2:2"]),
            "drain": lambda: run("drain", backend.namespace.root, ["2:1:1", "", "2:1:1:draining"]),
            "erase": lambda: run("erase", backend.namespace.root, ["", "", *dump(client, namespace)]),
        }
        assert verbs.keys() == scripts.load_scripts().keys() - {"permits"}  # which leaves nothing behind
        before = dump(client, namespace)
        with monkeypatch.context() as patch:
            patch.setattr(ServerConnections, "_timed", stamped)
            for name, verb in verbs.items():
                with pytest.raises(BackendUnavailable, match="too late") as caught:
                    await verb()
                assert (caught.value.stored, dump(client, namespace) == before) == ("no", True), name


async def test_a_connection_that_was_closed_while_idle_is_replaced(backend: RedisBackend, client: Any) -> None:
    await backend.add(0, [record("k")])
    client.client_kill_filter(_type="normal", skipme=True)
    for _ in range(50):  # the loop hears that it is closed
        await asyncio.sleep(0)
    assert await backend.add(0, [record("k", "b")]) == [False]


async def test_the_mark_of_the_last_digest_is_kept_as_long_as_its_cool_down(backend: RedisBackend, raw: Raw) -> None:
    lease = await leased(backend)
    month = 30 * DAY
    await backend.close(0, [closing(lease, cool_ms=month)])
    assert month < raw.client.pttl(raw.key("meta:k")) <= month + 3_600_000


async def test_a_timeline_whose_facts_are_missing_is_delivered_and_not_expired(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.delete(raw.key("meta:k"))  # they may be on their way to another node of a cluster, or were evicted
    claims = await claim(backend)
    assert claims.expired == []
    assert [len(lease.entries) for lease in claims.leases] == [1]


@pytest.mark.parametrize("part", ["log", "open"])
async def test_a_timeline_whose_records_are_gone_is_told_as_expired(backend: RedisBackend, raw: Raw, part: str) -> None:
    await backend.add(0, [record("k"), record("k", "b")])
    if part == "open":
        [lease] = (await claim(backend)).leases
        await backend.retry(0, [Retry(lease, 0, "boo", LIMITS)])
    raw.client.delete(raw.key(f"{part}:k"))
    claims = await claim(backend)
    assert (claims.leases, claims.expired) == ([], [("k", 0)])
    assert redis_state(raw.client, raw.namespace)["timelines"] == {}
    assert await backend.operations.look("k") is None
    assert await backend.add(0, [record("k")]) == [True]


async def test_every_key_of_a_timeline_lives_as_long_as_its_records_may(backend: RedisBackend, raw: Raw) -> None:
    policy = Policy(ttl=7_200, minimum_delay=0)
    limits = policy.terms.limits

    def shortest() -> int:
        return min(raw.client.pttl(key) for key in raw.client.scan_iter(match=raw.key("*:k")))

    await backend.add(0, [record("k", policy=policy)])
    assert shortest() > limits.ttl_ms
    [lease] = (await backend.claim(0, 1, LEASE, limits)).leases
    await backend.add(0, [record("k", "b", policy=policy)])
    assert shortest() > limits.ttl_ms
    await backend.retry(0, [Retry(lease, 0, "boo", limits)])
    [lease] = (await backend.claim(0, 1, LEASE, limits)).leases  # merged, and so written anew
    assert (lease.size, shortest() > limits.ttl_ms) == (2, True)


async def test_the_keys_of_a_dead_letter_end_after_30_days(backend: RedisBackend, raw: Raw) -> None:
    lease = await leased(backend)
    await backend.close(0, [closing(lease, [NewDeadLetter("no")])])
    name = await only_letter(backend)
    for kind in ("letter", "remains"):
        assert 30 * DAY - 60_000 < raw.client.pttl(raw.key(f"{kind}:{name}")) <= 30 * DAY


@pytest.mark.parametrize("begins", ["an add", "a claim"])
async def test_who_begins_a_namespace_sets_its_shards(server: Server, namespace: str, client: Any, begins: str) -> None:
    async with connected(server.url, namespace, shards=4) as backend:
        await (backend.claim(3, 10, LEASE, LIMITS) if begins == "a claim" else backend.add(0, [record("k")]))
    before = set(client.scan_iter(match=f"*{namespace}*"))
    with pytest.raises(ConfigurationError, match="has 4 shards, not 3: take shards= out of the engine, or give 4"):
        async with DigestEngine(server.url, namespace=namespace, shards=3) as engine:
            await engine.add("k", 1)
    assert set(client.scan_iter(match=f"*{namespace}*")) == before
    async with connected(server.url, namespace) as backend:
        assert backend.shard_map.count == 4


async def test_a_process_cannot_write_to_a_layout_that_was_changed_under_it(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.hset(raw.key("layout"), "version", "2:1:2")
    with pytest.raises(ConfigurationError, match="layout 2:1:2"):
        await backend.add(0, [record("k", "b")])
    with pytest.raises(ConfigurationError, match="layout 2:1:2"):
        await claim(backend)
    raw.client.hset(raw.key("layout"), "version", "2:1:1")
    assert await backend.add(0, [record("k", "b")]) == [False]


async def test_looking_at_a_namespace_that_is_not_there_makes_none(server: Server, namespace: str, client: Any) -> None:
    for shards in (None, 2):
        async with DigestEngine(server.url, namespace=namespace, shards=shards) as engine:
            assert await engine.stats() == Stats()
            assert await engine.peek("k") is None
            assert [timeline async for timeline in engine.timelines()] == []
            assert [letter async for letter in engine.dead_letters()] == []
            assert await engine.dead_letter("x") is None
            assert (await engine.flush("k"), await engine.delete("k"), await engine.discard("x")) == (False,) * 3
        assert not list(client.scan_iter(match=f"*{namespace}*"))
    async with DigestEngine(server.url, namespace=namespace, shards=4) as engine:
        assert await engine.add_many(Entry(f"k{number}", number) for number in range(20)) == [True] * 20
    async with DigestEngine(server.url, namespace=namespace) as engine:
        assert (await engine.stats()).ready == 20


async def test_who_begins_a_namespace_second_with_another_count_is_refused(server: Server, namespace: str) -> None:
    async with connected(server.url, namespace, shards=4) as one, connected(server.url, namespace, shards=1) as other:
        await one.add(2, [record("k")])
        for call in (other.add(0, [record("k")]), claim(other), other.operations.counts()):
            with pytest.raises(ConfigurationError, match="has 4 shards, not 1"):
                await call


@pytest.mark.parametrize("layout", ["1:1:1", "3:1:1", "2:0:1", "2:1025:1", f"2:{'9' * 5_000}:1", "2:1", "2:1:1:1", "x"])
async def test_a_layout_that_is_not_known_is_refused(server: Server, raw: Raw, layout: str) -> None:
    raw.client.hset(raw.key("layout"), "version", layout)
    with pytest.raises(ConfigurationError, match="schema 2"):
        async with connected(server.url, raw.namespace):
            pass


def test_the_names_of_shards_are_the_same_in_every_version() -> None:
    # in another version's place the data of a namespace would not be found
    tags = [Layout(16).tag("mail", number) for number in (0, 1, 7, 15)]
    assert tags == ["mail:0:25", "mail:1:39", "mail:7:1", "mail:15:21"]
    assert Layout(4, 2).tag("mail", 3) == "mail:e2.4:3:1"
    assert (Layout(1).tag("mail", 0), Layout(1, 3).tag("mail", 0)) == ("mail", "mail:e3.1")


def test_a_change_that_was_forgotten_has_no_shard_in_common_with_the_one_that_is_made_instead() -> None:
    tags = [Layout(shards, 2).tag("mail", number) for shards in range(1, 17) for number in range(shards)]
    assert len(set(tags)) == len(tags)


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [2, 3, 16, 1024])
def test_each_shard_has_a_tag_in_its_own_part_of_the_slots(shards: int) -> None:
    for shard in range(shards):
        slot = key_slot(f"{{{Layout(shards).tag('mail', shard)}}}:ready".encode())
        assert shard == slot * shards // 16_384


@pytest.mark.parametrize("name", ["mail", "x", "alerts.eu", "pipe-builds", "a" * 64])
def test_sixteen_shards_lie_on_three_primaries_as_five_six_and_five(name: str) -> None:
    slots = [key_slot(Layout(16).tag(name, number).encode()) for number in range(16)]
    assert [sum(slot * 3 // 16_384 == primary for slot in slots) for primary in range(3)] == [5, 6, 5]


async def test_a_backend_that_is_connected_again_has_learnt_nothing(server: Server, namespace: str) -> None:
    backend = RedisBackend(server.url, namespace=namespace, shards=4)
    await backend.connect()
    await backend.add(backend.shard_map.shard_of("k"), [record("k")])
    async with connected(server.url, namespace) as other:
        await other.operations.reshard(8)
        await other.operations.drain()
        assert await backend.operations.look("k") is not None
        assert backend.shard_map.adding == 8  # it has gone over while it ran
        await backend.aclose()
        with pytest.raises(ConfigurationError, match="has 8 shards, not 4"):
            await backend.connect()
        await backend.aclose()


async def test_an_error_says_why_a_server_of_ones_own_is_down(namespace: str) -> None:
    async def start() -> str:
        return "unix:///nobody/is/here"

    down: Any = SimpleNamespace(url="embedded:///gone", start=start, stop=start, clone=start)
    down.why_down = lambda: "its disk is full"
    backend = RedisBackend(down, namespace=namespace)
    for call in (backend.connect, lambda: backend.add(0, [record("k")]), lambda: backend.flush("k")):
        with pytest.raises(BackendUnavailable, match=r"^unix:///nobody/is/here is unavailable.* \(its disk is full\)$"):
            await call()
    await backend.aclose()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"namespace": name}, "a namespace is 1 to 64") for name in ("", "a:b", "{a}", "a" * 65, "a b", "ä")),
        *(({"shards": count}, "shards must be from 1 to 1024") for count in (0, -1, 1025)),
        ({}, "known once the backend is connected"),
    ],
)
def test_making_a_backend_does_no_io_and_checks_its_arguments(options: dict[str, Any], told: str) -> None:
    settings: dict[str, Any] = {"namespace": "mail", **options}
    with pytest.raises(ConfigurationError, match=told):
        _ = RedisBackend("redis://nobody.invalid", **settings).shard_map


async def test_the_doorbell_wakes_a_sleeper_for_an_earlier_schedule_and_nothing_else(backend: RedisBackend) -> None:
    bell = (await claim(backend)).wake_up
    sleeper = asyncio.create_task(backend.wait(0, bell))
    later = Add("k", pack(b"a", None, b"v"), Policy(initial_delay=60).terms)
    await backend.add(0, [later])
    await sleeper
    await backend.wait(0, bell)  # it has rung since that claim
    bell = (await claim(backend)).wake_up
    sleeper = asyncio.create_task(backend.wait(0, bell))
    await backend.add(0, [later, Add("last", pack(b"a", None, b"v"), Policy(initial_delay=90).terms)])
    assert (await claim(backend)).wake_up == bell
    await backend.add(0, [record("now"), record("too")])
    await sleeper
    assert (await claim(backend)).wake_up != bell


async def test_a_backend_may_be_connected_again_from_another_loop(server: Server, namespace: str) -> None:
    backend = RedisBackend(server.url, namespace=namespace)

    async def once() -> list[object]:
        await backend.connect()
        try:
            return list(await backend.add(0, [record("k")]))
        finally:
            await backend.aclose()

    assert await asyncio.to_thread(asyncio.run, once()) == [True]
    assert await asyncio.to_thread(asyncio.run, once()) == [False]
    with pytest.raises(BackendUnavailable, match="not connected"):
        await backend.operations.look("k")


async def test_backends_with_the_same_client_share_connections(server: Server, namespace: str, client: Any) -> None:
    async with redis.asyncio.Redis(unix_socket_path=server.socket) as given:
        first, second = (RedisBackend(given, namespace=namespace) for _ in range(2))
        await first.connect()
        before = client.info("clients")["connected_clients"]
        await second.connect()
        assert await second.add(0, [record("key")]) == [True]
        assert client.info("clients")["connected_clients"] == before
        await first.aclose()
        assert await second.operations.look("key") is not None
        await second.aclose()
        with pytest.raises(BackendUnavailable, match="not connected"):
            await second.operations.look("key")


async def test_a_compaction_goes_on_where_the_count_of_drops_is_no_number(backend: RedisBackend, raw: Raw) -> None:
    terms = Policy(capacity=4).terms
    await backend.add(0, [Add("k", pack(b"%d" % number, 0, b"v"), terms) for number in range(6)])
    raw.client.hset(raw.key("meta:k"), "dropped", "x")
    added = await backend.add(0, [Add("k", pack(b"6", 0, b"v"), terms), record("sound")])
    assert added == [False, True]
    assert raw.client.llen(raw.key("log:k")) == 4


async def test_a_hold_that_is_no_number_holds_nothing_back(backend: RedisBackend, raw: Raw, clock: Clock) -> None:
    await backend.add(0, [record("k")])
    assert (await claim(backend)).leases
    raw.client.hset(raw.key("layout"), "hold", "nan")
    recovered: list[int] = []
    for _ in range(4):
        clock.now += LEASE // 2
        recovered += [lease.attempt for lease in (await claim(backend)).leases]
    assert recovered == [1, 1]


@pytest.mark.parametrize("value", ["nan", "inf", "-5", "1e300", "9" * 20, "x", ""])
@pytest.mark.parametrize("name", ["shift", "clock", "stepped", "step"])
async def test_a_time_of_the_layout_that_is_none_counts_as_0(
    backend: RedisBackend, raw: Raw, clock: Clock, name: str, value: str
) -> None:
    await backend.add(0, [record("k", policy=Policy(initial_delay=60))])
    raw.client.hset(raw.key("layout"), name, value)
    assert (await seen(backend, "k")).due_ms == NOW + 60_000
    assert not (await backend.operations.counts()).get("stepped_back_ms")
    clock.now += 1_000
    await backend.add(0, [record("j")])
    assert raw.client.hmget(raw.key("layout"), "clock", "shift") == [b"%d" % clock.now, b"0"]
    assert (await seen(backend, "j")).due_ms == clock.now


async def test_a_call_on_a_shard_that_was_never_used_leaves_no_key(backend: RedisBackend, raw: Raw) -> None:
    await backend.flush("k")
    await backend.delete("k")
    assert not raw.client.exists(raw.key("layout"))


async def test_a_full_server_learns_of_a_step_back_from_those_who_drain_it(namespace: str) -> None:
    times = Clock(now=NOW)
    with running_server("--maxmemory-policy", "noeviction") as server, server.client() as client:
        async with connected(server.url, namespace, now=lambda: times.now) as backend:
            await backend.add(0, [record("k", value=b"v" * 1_000_000)])
            await backend.claim(0, 0, LEASE, LIMITS)
            client.config_set("maxmemory", "1mb")
            times.now -= 3_600_000
            [lease] = (await claim(backend)).leases
            assert lease.due_ms == NOW
            times.now += LEASE
            assert (await claim(backend)).wait_ms == LEASE, "its hold"
            assert client.hget(f"{{{namespace}}}:layout", "shift") == b"3600000"


async def test_with_a_broken_doorbell_all_is_claimed_and_no_attempt_is_lost(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.delete(raw.key("wake"))
    raw.client.set(raw.key("wake"), "x")
    claims = await claim(backend)
    assert [(lease.key, lease.attempt) for lease in claims.leases] == [("k", 1)]
    assert await backend.close(0, [closing(claims.leases[0])]) == [Closed("closed")]


@pytest.mark.parametrize("last", [None, "18446744073709551615-18446744073709551615"], ids=["no stream", "the last id"])
async def test_a_claim_takes_away_a_doorbell_that_cannot_ring(
    backend: RedisBackend, raw: Raw, last: str | None
) -> None:
    await backend.add(0, [record("k")])
    raw.client.delete(raw.key("wake"))
    if last:
        raw.client.xadd(raw.key("wake"), {"at": 0}, id=last)
    else:
        raw.client.set(raw.key("wake"), "x")
    claims = await claim(backend)
    await backend.add(0, [record("another")])
    async with asyncio.timeout(60):
        assert await backend.wait(0, claims.wake_up) != claims.wake_up


async def test_fields_of_another_program_in_the_meta_of_a_timeline_change_nothing(
    backend: RedisBackend, raw: Raw
) -> None:
    await backend.add(0, [record("theirs"), record("ours")])
    foreign = ("stored", "key", "touched", "idle", "problem", "logged", "opened")
    raw.client.hset(raw.key("meta:theirs"), mapping=dict.fromkeys(foreign, "1"))
    claims = await claim(backend)
    assert {lease.key for lease in claims.leases} == {"theirs", "ours"}
    assert await backend.close(0, [*map(closing, claims.leases)]) == [Closed("closed")] * 2


@pytest.fixture
async def living(server: Server, namespace: str) -> AsyncGenerator[tuple[RedisBackend, DigestEngine]]:
    """A backend and an engine by the server's clock."""
    engine = DigestEngine(server.url, namespace=namespace)
    async with connected(server.url, namespace) as backend, engine, asyncio.timeout(60):
        yield backend, engine


async def test_reschedule_ends_although_the_log_cannot_be_read(
    living: tuple[RedisBackend, DigestEngine], raw: Raw
) -> None:
    backend, engine = living
    await backend.add(0, [record("k")])
    await backend.close(0, [closing((await claim(backend)).leases[0])])
    await backend.add(0, [record("k")])
    raw.client.set(raw.key("log:k"), "not ours", ex=100)
    with suppress(InvalidState):
        await engine.reschedule("k")


@pytest.mark.parametrize("part", ["letter", "remains", "long"])
async def test_a_broken_dead_letter_is_listed_with_its_error_beside_the_others_and_can_be_discarded(
    living: tuple[RedisBackend, DigestEngine], raw: Raw, part: str
) -> None:
    backend, engine = living
    await backend.add(0, [record("first"), record("second")])
    for lease in (await claim(backend)).leases:
        await backend.close(0, [closing(lease, [NewDeadLetter("no")])])
    broken, sound = [letter.id async for letter in engine.dead_letters()]
    if part == "long":
        raw.client.rpush(raw.key(f"remains:{broken}"), *["not ours"] * LONGEST)
    else:
        raw.client.set(raw.key(f"{part}:{broken}"), "not ours", ex=100)
    letters = {letter.id: letter async for letter in engine.dead_letters()}
    assert "WRONGTYPE" in letters[broken].reason
    assert letters[sound].reason == "no"
    with pytest.raises(InvalidState, match=r"is broken.*(discard|50001 entries)"):
        await engine.replay(broken)
    assert await engine.discard(broken)
    assert [letter.id async for letter in engine.dead_letters()] == [sound]


async def test_a_close_whose_dead_letter_has_no_place_answers_with_its_error_and_the_others_are_closed(
    backend: RedisBackend, raw: Raw
) -> None:
    await backend.add(0, [record("a"), record("b")])
    raw.client.set(raw.key("dead"), "not ours")
    first, second = (await claim(backend)).leases
    refused, closed = await backend.close(0, [closing(first, [NewDeadLetter("no")]), closing(second)])
    assert isinstance(refused, InvalidState)
    assert closed == Closed("closed")
    raw.client.delete(raw.key("dead"))


async def test_marks_that_are_no_numbers_keep_nobody_from_the_counts_or_from_a_look_at_the_namespace(
    living: tuple[RedisBackend, DigestEngine], raw: Raw
) -> None:
    backend, engine = living
    await backend.add(0, [record("k")])
    await claim(backend)
    raw.client.hset(raw.key("layout"), mapping={"seen": "x", "lease": "nan", "hold": "inf", "digests": "inf"})
    assert not (await engine.stats()).digests
    assert await backend.maintenance() == []
    found = await engine.examine()
    assert [finding for finding in found if finding.check == "shards" and "seen, lease, hold" in finding.message]


async def test_a_close_counts_and_rings_although_a_counter_is_no_number(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    claims = await claim(backend)
    await backend.add(0, [record("k", "b")])
    raw.client.hset(raw.key("layout"), "delivered", "x")
    assert await backend.close(0, [closing(claims.leases[0])]) == [Closed("closed")]
    async with asyncio.timeout(60):
        await backend.wait(0, claims.wake_up)
    assert raw.client.hmget(raw.key("layout"), "digests", "delivered") == [b"1", b"x"]


@pytest.fixture
async def nameless(backend: RedisBackend, raw: Raw) -> RedisBackend:
    """A ready timeline "k" with an open log of a record "a", whose digest's name is gone; and a dead letter of it."""
    lease = await leased(backend)
    await backend.close(0, [closing(lease, [NewDeadLetter("no")], 0)])
    lease = await leased(backend)
    await backend.release(0, [lease], started=False)
    raw.client.hdel(raw.key("meta:k"), "id")
    return backend


@pytest.mark.parametrize("since", [[], ["b"]])
async def test_a_nameless_digest_is_delivered_with_what_came_since(nameless: RedisBackend, since: list[str]) -> None:
    await nameless.add(0, [record("k", name) for name in since])
    [lease] = (await claim(nameless)).leases
    assert [unpack(entry).id for entry in lease.entries] == ["a", *since]


async def test_a_digest_whose_name_is_gone_is_seen_and_can_be_opened_by_hand(nameless: RedisBackend) -> None:
    window = await seen(nameless, "k")
    assert (window.state, window.logged, window.opened) == ("ready", 0, 1)
    lease = await nameless.open(0, "k", LEASE, LIMITS)
    assert lease is not None
    assert [unpack(entry).id for entry in lease.entries] == ["a"]


async def test_removing_all_that_came_since_leaves_a_digest_whose_name_is_gone(nameless: RedisBackend) -> None:
    await nameless.add(0, [record("k", "b")])
    assert await nameless.remove("k", identity_of(b"b"), LIMITS)
    assert not await nameless.remove("k", identity_of(b"b"), LIMITS)
    [lease] = (await claim(nameless)).leases
    assert [unpack(entry).id for entry in lease.entries] == ["a"]


async def test_a_replay_waits_until_a_digest_whose_name_is_gone_is_delivered(nameless: RedisBackend) -> None:
    letter = await only_letter(nameless)
    with pytest.raises(InvalidState, match="under delivery or in a retry wait"):
        await nameless.replay(letter, TERMS, own=False)
    [lease] = (await claim(nameless)).leases
    await nameless.close(0, [closing(lease)])
    await nameless.replay(letter, TERMS, own=False)


async def test_a_digest_whose_entries_go_away_while_they_are_read_is_lost(
    backend: RedisBackend, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(capacity=500)
    entries = [pack(b"%d" % number, None, b"v" * 2000) for number in range(400)]  # more than an answer holds
    await backend.add(0, [Add("k", entry, policy.terms, True) for entry in entries])
    read = backend.read

    async def read_nothing(shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        raw.client.delete(raw.key("open:k"))
        return await read(shard, lease, start, count)

    monkeypatch.setattr(backend, "read", read_nothing)
    with pytest.raises(LeaseLost, match="went away"):
        async with asyncio.timeout(60), backend.digest("k", policy):
            pass


async def test_deleting_a_timeline_takes_it_out_of_every_set_it_is_in(backend: RedisBackend, raw: Raw) -> None:
    await backend.add(0, [record("k")])
    raw.client.zadd(raw.key("waiting"), {"k": 5})
    raw.client.zadd(raw.key("leased"), {"k": "inf"})
    assert await backend.delete("k")
    assert await backend.operations.look("k") is None


async def test_a_dead_letter_is_told_and_replayed_although_facts_are_gone(backend: RedisBackend, raw: Raw) -> None:
    lease = await leased(backend)
    await backend.close(0, [closing(lease, [NewDeadLetter("no")], 0)])
    letter = await only_letter(backend)
    raw.client.hdel(raw.key(f"letter:{letter}"), "reason", "attempt", "digest")
    raw.client.hset(raw.key(f"letter:{letter}"), "buried", "x")
    told = await backend.operations.dead_letter(letter)
    assert told is not None
    assert (told.key, told.reason, told.attempt, len(told.entries)) == ("k", "", 0, 1)
    await backend.replay(letter, TERMS, own=False)
    assert len(await backend.operations.entries("k")) == 1


async def test_two_that_listen_on_the_connections_of_one_client_leave_none_behind(server: Server, raw: Raw) -> None:
    given, client = redis.asyncio.Redis(unix_socket_path=server.socket), raw.client
    backends = [RedisBackend(given, namespace=raw.namespace) for _ in range(2)]
    for backend in backends:
        await backend.connect()
    before = {each["id"] for each in client.client_list()}
    for number in range(5):
        ears = [asyncio.create_task(backend.wait(0, "0-0" if not number else "$")) for backend in backends]
        await until(lambda: client.info("clients")["blocked_clients"] >= 2)
        client.xadd(raw.key("wake"), {"at": number})
        await asyncio.gather(*ears)
    assert len({each["id"] for each in client.client_list()} - before) <= 2
    for backend in backends:
        await backend.aclose()
    await given.aclose()


async def test_what_needs_a_feature_that_a_worker_does_not_know_is_left_to_others_uncharged(
    server: Server, raw: Raw, namespace: str, clock: Clock
) -> None:
    """It is not in the way of others, stays due when it was, and keeps what it needs whatever is done with it."""
    backend = RedisBackend(server.url, namespace=namespace, now=lambda: clock.now)
    newer = RedisBackend(server.url, namespace=namespace, now=lambda: clock.now, features=("far", "new"))
    async with aclosing(backend), aclosing(newer):
        await backend.connect()
        await newer.connect()

        def needs() -> bytes | None:
            return raw.client.hget(raw.key("meta:k"), "needs")

        await backend.add(0, [record("k")])
        due, clock.now = clock.now, clock.now + 1
        await backend.add(0, [record("sound")])
        raw.client.hset(raw.key("meta:k"), "needs", "new far")
        claims = await claim(backend)
        assert ([lease.key for lease in claims.leases], claims.left, claims.wait_ms) == (
            ["sound"],
            [("k", "new")],
            5_000,
        )
        assert await backend.close(0, [closing(claims.leases[0])]) == [Closed("closed")]
        window = await seen(backend, "k")
        assert (window.state, window.due_ms, window.attempt) == ("waiting", due, 0)
        assert await backend.add(0, [record("k", "c")]) == [False]
        assert (await seen(backend, "k")).due_ms == due
        with pytest.raises(InvalidState, match="'k' is not ready"):
            async with backend.digest("k", POLICY):
                pass
        assert await backend.flush("k")
        assert await backend.add(0, [record("k", "b")]) == [False]
        with pytest.raises(InvalidState, match="'k' needs 'new', which this version of aiodigest does not know"):
            async with backend.digest("k", POLICY):
                pass
        assert not (await claim(backend)).leases
        clock.now += ASIDE_MS
        [lease] = (await claim(newer)).leases
        assert (lease.key, lease.attempt, lease.due_ms) == ("k", 1, due)
        assert await newer.retry(0, [Retry(lease, 0, "boo", LIMITS)]) == [True]
        assert not (await claim(backend)).leases
        clock.now += ASIDE_MS
        [lease] = (await claim(newer)).leases
        clock.now += LEASE  # in which nobody renews
        await claim(backend)
        clock.now += LEASE
        claims = await claim(backend)
        assert (claims.leases, claims.left) == ([], [("k", "new")])
        clock.now += ASIDE_MS
        [again] = (await claim(newer)).leases
        assert (again.digest_id, again.lost) == (lease.digest_id, 1)
        assert await newer.close(0, [closing(again)]) == [Closed("closed")]
        await backend.add(0, [record("k")])
        assert needs() == b"new far"
        assert await backend.delete("k")
        assert needs() is None


async def test_the_latest_ten_thousand_ids_of_a_timeline_are_known_as_delivered(
    backend: RedisBackend, raw: Raw, clock: Clock
) -> None:
    once = Policy(minimum_delay=0, dedupe_window=600)
    raw.client.zadd(raw.key("seen:k"), {f"old{number:05}": clock.now + 1 + number for number in range(MOST_SEEN)})
    await backend.add(0, [Add("k", pack(name, None, b"v"), once.terms) for name in (b"a", b"b")])
    [lease] = (await claim(backend)).leases
    clock.now += 1  # and so one of the old ones is over
    assert await backend.close(0, [closing(lease)._replace(dedupe_ms=600_000)]) == [Closed("closed")]
    assert raw.client.zcard(raw.key("seen:k")) == MOST_SEEN
    assert raw.client.zscore(raw.key("seen:k"), "old00001") is None
    assert raw.client.zscore(raw.key("seen:k"), "old00002")
    assert raw.client.zscore(raw.key("seen:k"), identity_of(b"a")) == clock.now + 600_000
    assert 0 < raw.client.pttl(raw.key("seen:k")) <= 600_000
    assert 0 < raw.client.pttl(raw.key("seens")) <= 600_000


async def test_what_no_version_has_written_in_place_of_ids_lets_records_come_again(
    backend: RedisBackend, raw: Raw
) -> None:
    once = Policy(minimum_delay=0, dedupe_window=600)
    adds = [Add("k", pack(b"a", None, b"v"), once.terms)]
    for name in ("seen:k", "seens"):
        raw.client.set(raw.key(name), "not ours")
        assert await backend.add(0, adds) == [True]
        [lease] = (await claim(backend)).leases
        assert await backend.close(0, [closing(lease, cool_ms=0)._replace(dedupe_ms=600_000)]) == [Closed("closed")]
        assert await backend.add(0, adds) == [True]
        assert await backend.delete("k")


async def test_an_add_that_cannot_end_a_mute_says_so(backend: RedisBackend, raw: Raw, clock: Clock) -> None:
    """And a claim tells of it, and looks again a lease later."""
    await backend.mute("k", Mute(delay_ms=1_000), LIMITS)
    raw.client.set(raw.key("meta:k"), "not ours", px=3_600_000)
    clock.now += 1_000
    [refused] = await backend.add(0, [record("k")])
    assert isinstance(refused, InvalidState)
    claims = await claim(backend)
    assert [key for key, _ in claims.broken] == ["k"]
    assert claims.wait_ms == LEASE
    raw.client.delete(raw.key("meta:k"))
    assert await backend.add(0, [record("k")]) == [True]


async def test_the_keys_of_what_waits_under_a_mute_outlive_its_end(backend: RedisBackend, raw: Raw) -> None:
    hour = Policy(ttl=3_600)
    limits = hour.terms.limits
    await backend.add(0, [record("k", policy=hour)])
    for key in ("k", "later"):
        await backend.mute(key, Mute(delay_ms=30 * DAY), limits)
    await backend.add(0, [record("later", policy=hour)])
    await backend.claim(0, 1, LEASE, limits)
    for key in ("log:k", "meta:k", "log:later", "meta:later"):
        assert raw.client.pttl(raw.key(key)) > 30 * DAY


async def test_a_mute_of_another_shard_is_taken_over_once(backend: RedisBackend) -> None:
    """What is muted already stands; and a mute is only let go of if it is this one, and nothing waits under it."""
    limits = scripts.pack_limits(LIMITS)

    async def take_over(key: str, until: int) -> object:
        return await backend.namespace.call("mute", 0, limits, 1, key, "at", until, 1)

    async def let_go(key: str, said: str) -> object:
        return await backend.namespace.call("unmute", 0, key, limits, said, 1)

    assert await take_over("k", NOW + 1_000) == [1]
    assert await take_over("k", NOW + 2_000) == [0]
    assert (await seen(backend, "k")).mute_ms == NOW + 1_000
    assert await let_go("k", f"{NOW + 2_000} 1") == -1
    assert await let_go("k", f"{NOW + 1_000} 1") == 1
    assert await let_go("k", f"{NOW + 1_000} 1") == 0
    await backend.mute("k", Mute(), LIMITS)
    await backend.add(0, [record("k")])
    assert await let_go("k", "0 0") == -1
