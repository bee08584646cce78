"""What the digests under delivery decode to is bounded in bytes, however many are under delivery at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engines import (
    CODEC,
    Inbox,
    WatchedBackend,
    delivering,
    forever,
    now,
    policy,
    settle,
    state_of,
)

from aiodigest import JSON, Bounds, Digest, DigestEngine, Policy
from aiodigest.backend import Claims, Lease
from aiodigest.records.entries import pack
from aiodigest.worker.room import FULL, QUEUE, SMALL, NoRoom, Room

pytestmark = pytest.mark.virtual_time

DIGEST = 400_000  # bytes of a large digest here
BOUNDS = Bounds(value=DIGEST, digest=DIGEST)
VALUE = "x" * (DIGEST - 2)  # which takes a few bytes in the store
LEASE = 60.0


class Paged(WatchedBackend):
    """Sends nothing with a claim, and one entry a page; it notes which pages were read of each timeline."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pages: dict[str, list[int]] = {}

    async def claim(self, *arguments: Any, **named: Any) -> Claims:
        claims = await super().claim(*arguments, **named)
        return replace(claims, leases=[replace(lease, entries=()) for lease in claims.leases])

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        self.pages.setdefault(lease.key, []).append(start)
        return (await super().read(shard, lease, start, count))[:1]


class Tally(Inbox):
    """A callback that takes some seconds; it notes the most that was there at once."""

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.engine: DigestEngine[JSON] | None = None
        self.most = self.most_bytes = self.busy = 0

    @property
    def keys(self) -> list[str]:
        return [digest.key for digest in self.digests]

    async def __call__(self, digest: Digest[JSON]) -> None:
        assert self.engine is not None
        is_small = digest.key.startswith("small")
        self.busy += not is_small
        self.most = max(self.most, self.busy)
        self.most_bytes = max(self.most_bytes, self.engine.activity.room_taken)
        try:
            await super().__call__(digest)
            await asyncio.sleep(0 if is_small else self.seconds)
        finally:
            self.busy -= not is_small


async def large(backend: WatchedBackend, *keys: str, value: JSON = VALUE, count: int = 1) -> None:
    for key in keys:
        for number in range(count):
            await backend.put(key, value, record_id=str(number), policy=policy())


@asynccontextmanager
async def working(
    inbox: Tally, backend: WatchedBackend, **options: Any
) -> AsyncGenerator[tuple[DigestEngine[JSON], WatchedBackend], None]:
    async with delivering(inbox, backend, **{"policy": policy(), "bounds": BOUNDS, **options}) as (engine, store):
        inbox.engine = engine
        yield engine, store


def numbered(count: int) -> list[str]:
    return [f"large-{number:03}" for number in range(count)]


# A worker


@pytest.mark.parametrize("kind", [WatchedBackend, Paged])
async def test_as_many_large_digests_are_under_delivery_as_there_is_room_for_and_the_others_wait_in_order(
    kind: type[WatchedBackend],
) -> None:
    inbox, backend, keys = Tally(), kind(), numbered(FULL + QUEUE)
    for key in keys:
        await large(backend, key)
        await settle()  # so that it is due later
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL)
        await settle()
        assert engine.activity.room_taken == FULL * DIGEST
        assert engine.activity.awaiting_room > 0
        await inbox.outcome(FULL + QUEUE)
        assert (engine.activity.room_taken, engine.activity.awaiting_room) == (0, 0)
    assert inbox.keys == keys
    assert (inbox.most, inbox.most_bytes) == (FULL, FULL * DIGEST)
    assert {digest.attempt for digest in inbox.digests} == {1}


async def test_those_that_find_many_waiting_are_put_aside_uncharged_and_hold_up_no_small_ones() -> None:
    inbox, backend, keys = Tally(4 * LEASE), WatchedBackend(), numbered(48)
    await large(backend, *keys)
    async with working(inbox, backend, delivery_timeout=8 * LEASE) as (engine, _):
        await inbox.digest(FULL)
        for number in range(20):
            await settle()
            assert engine.activity.awaiting_room <= QUEUE
            assert engine.activity.delivering <= FULL + QUEUE
            before = now()
            await large(backend, f"small-{number}", value="y")
            await inbox.digest(FULL + number + 1)
            assert now() < before + 0.1
            await asyncio.sleep(7)
        away = set(keys) - set(inbox.keys)
        assert {(await state_of(backend, key)) for key in away} <= {("waiting", 0), ("ready", 0), ("leased", 1)}
        await inbox.outcome(48)
    assert {digest.attempt for digest in inbox.digests} == {1}


async def test_small_digests_wait_for_no_large_ones() -> None:
    inbox, backend = Tally(LEASE / 2), WatchedBackend()
    await large(backend, *numbered(FULL + 5))
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL)
        for number in range(5):
            before = now()
            await large(backend, f"small-{number}", value="y" * (SMALL - 2))
            await inbox.outcome(number + 1)
            assert now() < before + 0.1
            assert inbox.keys[-1] == f"small-{number}"
            assert engine.activity.room_taken == FULL * DIGEST
        assert engine.activity.awaiting_room


async def test_a_digest_that_waits_for_room_has_no_more_than_a_page_in_memory() -> None:
    inbox, backend, keys = Tally(), Paged(), numbered(FULL + 1)
    await large(backend, *keys, value="x" * (DIGEST // 4 - 2), count=4)
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL)
        await settle()
        assert engine.activity.awaiting_room == 1
        assert sorted(map(len, backend.pages.values())) == [1, *[4] * FULL]
        await inbox.outcome(FULL + 1)
    assert sorted(map(len, backend.pages.values())) == [4] * (FULL + 1)


async def test_what_a_digest_takes_less_than_its_bound_makes_room_for_others_once_it_is_read() -> None:
    inbox, backend = Tally(), Paged()
    await large(backend, *numbered(FULL + 4), value="x" * (DIGEST // 4 - 2), count=3)
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL + 4)
        assert engine.activity.room_taken == (FULL + 4) * DIGEST * 3 // 4


async def test_a_part_gives_its_room_back_before_the_next_asks_for_some() -> None:
    inbox, backend, keys = Tally(), Paged(), numbered(FULL + 3)
    await large(backend, *keys, count=3)
    async with working(inbox, backend) as (engine, _):
        await inbox.outcome(3 * len(keys))
        assert engine.activity.room_taken == 0
    assert (inbox.most, inbox.most_bytes) == (FULL, FULL * DIGEST)
    assert sorted(inbox.keys) == sorted(3 * keys)


async def test_one_digest_that_is_larger_than_the_room_goes_alone() -> None:
    whole, backend = Bounds(value=DIGEST, digest=(FULL + 2) * DIGEST), WatchedBackend()
    await large(backend, "huge", count=FULL + 2)
    first = Inbox(forever)
    async with delivering(first, backend, policy=policy(), bounds=whole, delivery_timeout=1):
        await first.outcome()
    await large(backend, "before")
    inbox = Tally(3.0)
    async with working(inbox, backend) as (engine, _):
        await inbox.digest()
        await engine.flush("huge")
        await settle()
        await large(backend, "after")
        assert engine.activity.awaiting_room == 1
        await inbox.outcome(3)
    assert inbox.keys == ["before", "huge", "after"]
    assert inbox.most == 1
    assert len(inbox.digests[1].records) == FULL + 2


async def test_a_worker_that_stops_gives_back_at_once_what_waits_for_room() -> None:
    inbox, backend, keys = Tally(5.0), WatchedBackend(), numbered(FULL + 9)
    await large(backend, *keys)
    async with working(inbox, backend, drain_timeout=20) as (engine, _):
        await inbox.digest(FULL)
        await settle()
        assert engine.activity.awaiting_room == 9
        before = now()
    assert now() == pytest.approx(before + 5.0, abs=0.1)
    assert len(inbox.digests) == FULL
    assert max(backend.times("postpone")) < before + 0.1
    waiting = set(keys) - set(inbox.keys)
    assert {await state_of(backend, key) for key in waiting} == {("ready", 0)}


async def test_what_waits_for_room_longer_than_a_lease_is_another_worker_s() -> None:
    stuck, inbox, backend = Tally(6 * LEASE), Tally(1.0), WatchedBackend()
    await large(backend, *numbered(FULL + 4))
    async with working(stuck, backend, delivery_timeout=20 * LEASE) as (engine, _):
        await stuck.digest(FULL)
        await settle()
        assert engine.activity.awaiting_room == 4
        async with working(inbox, backend):
            await inbox.outcome(4)
            assert now() < 5 * LEASE  # each time that they come back, either may have them
    assert {digest.attempt for digest in inbox.digests} == {1}
    assert not {*inbox.keys} & {*stuck.keys}


async def test_what_waits_for_room_goes_when_a_digest_is_to_run_alone() -> None:
    inbox, backend = Tally(LEASE / 2), WatchedBackend(shards=2)
    await large(backend, *numbered(FULL + 9))
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL)
        await settle()
        assert engine.activity.awaiting_room
        await large(backend, "alone")
        shard = backend.shard_map.shard_of("alone")
        assert await backend.open(shard, "alone", 60_000, Policy().terms.limits)
        delivery = backend.machines[shard].held["alone"].delivery
        assert delivery is not None
        delivery.lost, backend.machines[shard].leased["alone"] = 1, 0
        await asyncio.sleep(LEASE / 2 - 1)
        assert engine.activity.awaiting_room == 0
        await inbox.digest(FULL + 1)
        assert inbox.busy == 1
    assert inbox.keys[FULL] == "alone"


async def test_a_delivery_that_is_cut_short_gives_its_room_back() -> None:
    inbox, backend = Tally(10 * LEASE), WatchedBackend()
    await large(backend, *numbered(FULL + 1))
    async with working(inbox, backend, delivery_timeout=20 * LEASE) as (engine, _):
        await inbox.digest(FULL)
        await settle()
        await engine.delete(inbox.keys[0])
        await inbox.digest(FULL + 1)
        assert now() <= LEASE, "its lease was renewed"
        assert engine.activity.room_taken == FULL * DIGEST


async def test_reports_to_a_server_that_is_away_take_no_room_from_other_shards() -> None:
    inbox, backend = Tally(1.0), WatchedBackend(shards=2)
    keys = [key for key in numbered(200) if backend.shard_map.shard_of(key) == 0][:FULL]
    others = [key for key in numbered(200) if backend.shard_map.shard_of(key) == 1][:FULL]
    await large(backend, *keys)
    async with working(inbox, backend) as (engine, _):
        await inbox.digest(FULL)
        backend.down_shards = {0}
        backend.take_down()
        await large(backend, *others)
        await inbox.outcome(FULL)
        assert {delivery.key for delivery in inbox.seen} == {*others}
        assert engine.activity.room_taken == 0
        backend.bring_up()
        await inbox.outcome(2 * FULL)


async def test_each_engine_has_room_of_its_own() -> None:
    one, two = Tally(), Tally()
    backends = WatchedBackend(), WatchedBackend()
    for backend in backends:
        await large(backend, *numbered(FULL))
    async with working(one, backends[0]) as (first, _), working(two, backends[1]) as (second, _):
        await one.digest(FULL)
        await two.digest(FULL)
        assert (first.activity.room_taken, second.activity.room_taken) == (FULL * DIGEST, FULL * DIGEST)


# The room itself


@dataclass(eq=False)
class Waiting:
    """A delivery with one entry of so many bytes."""

    lease: Lease
    is_waited_for: bool = True


def one(key: str, size: int, **fields: Any) -> Waiting:
    entry = pack(b"1", 0, CODEC.encode("x" * (size - 2)))
    return Waiting(Lease(key, "", "", 1, 1, 0, 0, 1, entries=[entry], bound=size, **fields))


async def one_page(start: int, count: int) -> Sequence[bytes]:
    assert start == 1
    return [pack(b"%d" % number, 0, CODEC.encode("")) for number in range(count)]


class Hall:
    """A room for a million bytes, and who is in it."""

    def __init__(self) -> None:
        self.gone = set[str]()  # keys of those that are to leave
        self.room = Room(1_000_000, LEASE, lambda each: each.lease.key in self.gone)
        self.inside: list[str] = []

    def enter(self, delivery: Waiting, size: int) -> asyncio.Task[None]:
        async def read() -> None:
            await self.room.read(delivery, one_page, lambda entry: size)
            self.inside.append(delivery.lease.key)

        return asyncio.create_task(read())


async def test_those_that_wait_come_in_in_order_though_a_later_one_would_fit() -> None:
    hall, [a, b, c, d] = Hall(), [one(key, 300_000) for key in "abcd"]
    tasks = [hall.enter(a, 500_000), hall.enter(b, 600_000), hall.enter(c, 300_000), hall.enter(d, 400_000)]
    await settle()
    assert (hall.inside, hall.room.taken, hall.room.waiting) == (["a"], 500_000, 3)
    hall.room.give_back(a)
    await settle()
    assert (hall.inside, hall.room.taken, hall.room.waiting) == (["a", "b", "c"], 900_000, 1)
    hall.room.give_back(c)
    await settle()
    assert (hall.inside, hall.room.taken) == (["a", "b", "c", "d"], 1_000_000)
    await asyncio.gather(*tasks)


async def test_one_that_is_cancelled_while_it_waits_lets_those_behind_it_in() -> None:
    hall, [a, b, c] = Hall(), [one(key, 300_000) for key in "abc"]
    tasks = [hall.enter(a, 500_000), hall.enter(b, 600_000), hall.enter(c, 300_000)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert (hall.inside, hall.room.taken, hall.room.waiting) == (["a", "c"], 800_000, 0)
    hall.room.give_back(b)  # as its worker does in any case
    assert hall.room.taken == 800_000
    hall.room.give_back(a)
    hall.room.give_back(a)
    assert hall.room.taken == 300_000


async def test_one_that_has_waited_long_or_is_to_go_waits_no_longer() -> None:
    hall, [a, b, c] = Hall(), [one(key, 300_000) for key in "abc"]
    hall.enter(a, 900_000)
    await settle()
    tasks = [hall.enter(b, 600_000), hall.enter(c, 300_000)]
    await settle()
    hall.gone.add("c")
    hall.room.look_again()
    await settle()
    assert isinstance(tasks[1].exception(), NoRoom)
    await asyncio.sleep(LEASE - 2)
    assert not tasks[0].done()
    await asyncio.sleep(4)
    assert isinstance(tasks[0].exception(), NoRoom)
    assert (hall.room.taken, hall.room.waiting) == (900_000, 0)


async def test_one_that_runs_alone_waits_for_no_callback_that_ignores_its_end() -> None:
    hall, a, b = Hall(), one("a", 300_000), one("b", 300_000, lost=2)
    hall.enter(a, 900_000)
    await settle()
    hall.enter(b, 900_000)
    await settle()
    assert (hall.inside, hall.room.taken) == (["a", "b"], 1_800_000)


async def test_a_small_digest_is_not_counted() -> None:
    hall, [a, b, c] = Hall(), [one(key, 300) for key in "abc"]
    hall.enter(a, SMALL)
    hall.enter(b, 1_000_000)
    hall.enter(c, SMALL + 1)
    await settle()
    assert (hall.inside, hall.room.taken, hall.room.waiting) == (["a", "b"], 1_000_000, 1)
    hall.room.give_back(b)
    await settle()
    assert hall.room.taken == SMALL + 1


async def test_a_small_digest_of_which_the_claim_brought_the_beginning_does_not_wait() -> None:
    hall, a, b = Hall(), one("a", 300), one("b", 300)
    hall.enter(a, 1_000_000)
    b.lease.size = 3
    hall.enter(b, 100)
    await settle()
    assert (hall.inside, hall.room.taken, hall.room.waiting) == (["a", "b"], 1_000_000, 0)
