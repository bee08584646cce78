"""Another number of shards for a namespace that is in use: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeAlias
from zlib import crc32

import pytest
from cancelling import Driven, at_awaits
from clusters import running_cluster
from engines import session_of
from processes import at_work
from replicas import PATIENCE, until
from servers import PASSWORD, Proxy, Server, commands, running_server
from stores import DAY, LEASE, MINUTE, NOW, records

from aiodigest import JSON, ConfigurationError, Digest, DigestEngine, Draining, Entry, InvalidState, Policy
from aiodigest import engine as engine_module
from aiodigest.backend import (
    SLICE,
    Add,
    Backend,
    Close,
    Closed,
    Lease,
    NewDeadLetter,
    Retired,
    Retry,
    StoredDeadLetter,
)
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.layout import Layout
from aiodigest.codecs import JSONCodec
from aiodigest.records.entries import pack

Call: TypeAlias = Coroutine[Any, Any, object]
Work: TypeAlias = Callable[[], Call]

VALUE = JSONCodec[JSON]().encode("v")
LATER = Policy(initial_delay=1_500)  # what is added under it is not due while a test lasts
AT_ONCE = Policy(minimum_delay=0, increment_delay=0, capacity=10_000)
LIMITS = AT_ONCE.terms.limits
COUNTERS = ("digests", "delivered", "dropped", "aged", "expired", "buried", "letters_dropped")

_places = count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server for these tests alone: they look for what is left of a layout among all keys."""
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who watches a change looks again at once."""
    monkeypatch.setattr(engine_module, "PACE", 0.01)


# What the tests are made of


def add_of(key: str, record: str, policy: Policy = AT_ONCE) -> Add:
    return Add(key, pack(record.encode(), None, VALUE), policy.terms)


@dataclass
class Place:
    """A namespace whose clock the test moves, and as many processes on it as a test wants."""

    server: Server
    namespace: str
    stack: AsyncExitStack
    now: int = NOW

    async def process(self, shards: int | None = None, url: str = "") -> RedisBackend:
        """What another process would know of the namespace."""
        backend = RedisBackend(
            url or self.server.url, namespace=self.namespace, shards=shards, now=lambda: self.now, timeout=PATIENCE
        )
        self.stack.push_async_callback(backend.aclose)
        await backend.connect()
        return backend

    def tell_time(self) -> None:
        """Set the clock to what an engine takes for now."""
        with self.server.client() as client:
            seconds, micros = client.time()
            self.now = seconds * 1_000 + micros // 1_000

    def tags(self, layout: Layout) -> list[str]:
        return [f"{{{layout.tag(self.namespace, number)}}}:" for number in range(layout.shards)]

    def left_of(self, layout: Layout) -> list[bytes]:
        """The keys of an old layout that would stay."""
        root = f"{{{self.namespace}}}:layout".encode()
        with self.server.client() as client:
            keys = [key for tag in self.tags(layout) for key in client.keys(f"{tag}*")]
            return [key for key in keys if key != root and client.pttl(key) < 0]

    def versions(self, layout: Layout) -> list[bytes | None]:
        with self.server.client() as client:
            return [client.hget(f"{tag}layout", "version") for tag in self.tags(layout)]


async def is_at_rest(engine: DigestEngine[Any]) -> bool:
    """Whether no timeline holds anything."""
    stats = await engine.stats()
    return not (stats.waiting or stats.ready or stats.leased)


@asynccontextmanager
async def new_place(server: Server) -> AsyncGenerator[Place]:
    async with AsyncExitStack() as stack:
        yield Place(server, f"reshard-{next(_places)}", stack)


@pytest.fixture
async def place(server: Server) -> AsyncIterator[Place]:
    async with new_place(server) as place:
        yield place


class Between(Driven):
    """Drives a coroutine, and does something else, to its end, before the ``number``-th of its awaits is waited for."""

    def __init__(self, coroutine: Call, number: int, meanwhile: Work) -> None:
        super().__init__(coroutine)
        self._number = number
        self._meanwhile = meanwhile

    def suspended(self) -> Generator[Any, Any, object]:
        if self.count == self._number:
            yield from self._meanwhile().__await__()


async def between_any_two_steps(
    server: Server, scene: Callable[[Place], AbstractAsyncContextManager[tuple[Call, Work]]]
) -> None:
    """Play a scene with its work done at each of the steps of its call, and at last after all of them."""
    for moment in count(1):
        async with new_place(server) as place, scene(place) as (call, meanwhile):
            steps = Between(call, moment, meanwhile)
            await steps
            if steps.count < moment:
                await meanwhile()
        if steps.count < moment:
            assert moment > 3
            return


class Middle(Proxy):
    """Can hold what goes to the server, and lose one of its replies."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.gate = asyncio.Event()
        self.gate.set()
        self.lose: int | None = None  # how many replies come before the one that is lost
        self.held = asyncio.Event()

    @property
    def has_lost(self) -> bool:
        return self.lose is None

    async def let_through(self) -> None:
        if not self.gate.is_set():
            self.held.set()
        await self.gate.wait()

    def swallows(self) -> bool:
        is_lost = self.lose == 0
        if self.lose is not None:
            self.lose = None if is_lost else self.lose - 1
        return is_lost


async def add(backend: Backend, key: str, *ids: str, policy: Policy = AT_ONCE) -> int:
    """Add records in one call; the shard that took them."""
    shard = backend.shard_map.shard_of(key)
    assert all(isinstance(answer, bool) for answer in await backend.add(shard, [add_of(key, id, policy) for id in ids]))
    return shard


async def claim(backend: Backend, shard: int, slots: int = 100) -> list[Lease]:
    return [*(await backend.claim(shard, slots, LEASE, LIMITS)).leases]


async def close(backend: Backend, shard: int, lease: Lease, *, cool_ms: int = 0, letter: str = "") -> None:
    letters = [NewDeadLetter(letter)] if letter else []
    delivered = 0 if letter else lease.size
    [closed] = await backend.close(
        shard, [Close(lease, lease.size, delivered, cool_ms, LIMITS, LEASE, dead_letters=letters)]
    )
    assert closed == Closed("closed")


async def bury(backend: Backend, key: str, *ids: str) -> str:
    """The id of a new dead letter."""
    shard = await add(backend, key, *ids)
    [lease] = await claim(backend, shard)
    before = set((await backend.operations.dead_letters(shard, SLICE)).items)
    await close(backend, shard, lease, letter=f"about {key}")
    [letter] = set((await backend.operations.dead_letters(shard, SLICE)).items) - before
    return letter


async def deliver(backend: Backend, key: str, *ids: str) -> None:
    shard = await add(backend, key, *ids)
    [lease] = await claim(backend, shard)
    await close(backend, shard, lease)


async def finish(backend: Backend) -> None:
    """Drain what holds no timelines any more."""
    async with asyncio.timeout(PATIENCE):
        assert await backend.operations.drain() == {}


async def change(backend: Backend, shards: int) -> None:
    """The whole of a change, of a namespace in which nothing waits."""
    assert await backend.operations.reshard(shards)
    await finish(backend)


async def letters_of(backend: Backend) -> list[StoredDeadLetter]:
    """All dead letters, each as often as it is listed, as each shard lists them."""
    found: list[StoredDeadLetter] = []
    for shard in range(backend.shard_map.count):
        for id in (await backend.operations.dead_letters(shard, SLICE)).items:
            letter = await backend.operations.dead_letter(id)
            assert letter is not None
            found.append(letter)
    return found


def by_id(letters: list[StoredDeadLetter]) -> list[StoredDeadLetter]:
    return sorted(letters, key=lambda letter: letter.id)


async def counters(backend: Backend) -> dict[str, int]:
    counts = await backend.operations.counts()
    return {name: counts.get(name, 0) for name in COUNTERS}


async def held(backend: Backend, key: str) -> list[str]:
    return [record for record, _ in records(await backend.operations.entries(key))]


# Under load, in processes


@pytest.fixture(params=["server", pytest.param("cluster", marks=pytest.mark.cluster)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_server() if request.param == "server" else running_cluster(replicas=0) as one:
        yield one.url


@asynccontextmanager
async def resharding(url: str, namespace: str, shards: int) -> AsyncGenerator[Process]:
    """The command, while it runs."""
    options = "--url", url, "--namespace", namespace, "--to", str(shards), "--timeout", "60s"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiodigest", "reshard", *options, stdout=PIPE, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def first_line(process: Process) -> str:
    """What the command says first, which is once another layout takes the adds."""
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        return (await process.stderr.readline()).decode()


@pytest.mark.processes
async def test_every_record_is_delivered_once_while_the_number_of_shards_changes_under_load(
    url: str, namespace: str
) -> None:
    async with (
        DigestEngine(url, namespace=namespace, value_type=int, policy=LATER) as slow,
        at_work(url, namespace, timelines=20) as tally,
    ):
        for shards in (16, 4):
            await tally.goes_on()
            await slow.add("slow", 1, record_id=f"before-{shards}")  # keeps the old layout from being empty
            async with resharding(url, namespace, shards) as killed:
                assert f"is moving to {shards} shards" in await first_line(killed)
                await tally.goes_on()
                killed.kill()
            async with resharding(url, namespace, shards) as process:
                assert f"is moving to {shards} shards" in await first_line(process)
                await tally.goes_on()
                assert await slow.flush("slow")
                async with asyncio.timeout(PATIENCE):
                    output, errors = await process.communicate()
                assert process.returncode == 0
                assert output.decode().endswith(f" has {shards} shards\n")
                assert b"Traceback" not in errors
        await tally.goes_on()
        added = await tally.end("before-16", "before-4")
        stats = await slow.stats()
    assert (stats.waiting, stats.ready, stats.leased, stats.dead, stats.delivered) == (0, 0, 0, 0, added)


@pytest.mark.processes
async def test_processes_that_stood_still_during_all_of_a_change_go_on_in_the_new_layout(
    server: Server, namespace: str
) -> None:
    async with (
        DigestEngine(server.url, namespace=namespace, value_type=int) as engine,
        at_work(server.url, namespace, timelines=5, workers=1, producers=1) as tally,
    ):
        await tally.goes_on()
        [producer], [worker] = tally.producers, tally.workers
        producer.process.send_signal(signal.SIGSTOP)
        await until(lambda: is_at_rest(engine))
        worker.process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE):
            assert [left async for left in engine.reshard(4)] == []
        for program in (worker, producer):
            program.process.send_signal(signal.SIGCONT)
        await tally.goes_on(100)
        added = await tally.end()
        stats = await engine.stats()
    assert (stats.waiting, stats.ready, stats.leased, stats.delivered) == (0, 0, 0, added)
    with server.client() as client:
        assert not client.exists(*(f"{{{namespace}}}:{name}" for name in ("waiting", "ready", "leased")))


# Engines that run go over by themselves


class Box:
    """A callback that keeps the digests that came, and may hold them."""

    def __init__(self) -> None:
        self.digests: list[Digest[JSON]] = []
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, digest: Digest[JSON]) -> None:
        self.digests.append(digest)
        await self.go.wait()

    async def digest(self, number: int) -> None:
        await until(lambda: len(self.digests) >= number)

    @property
    def ids(self) -> list[str]:
        return [record.id for digest in self.digests for record in digest.records]


def engine_of(server: Server, namespace: str, **options: Any) -> DigestEngine[JSON]:
    settings: dict[str, Any] = {"policy": AT_ONCE, "timeout": PATIENCE, **options}
    return DigestEngine[JSON](settings.pop("url", server.url), namespace=namespace, **settings)


async def all_looks(engine: DigestEngine[JSON], shards: int) -> list[Draining]:
    async with asyncio.timeout(PATIENCE):
        return [left async for left in engine.reshard(shards)]


@pytest.mark.parametrize("is_over", [False, True], ids=["under_way", "over"])
async def test_an_engine_that_only_adds_goes_over_by_itself(server: Server, namespace: str, is_over: bool) -> None:
    async with engine_of(server, namespace) as adder, engine_of(server, namespace, policy=LATER) as other:
        await other.add("slow", 1)
        await adder.stats()
        looks = other.reshard(4)
        assert await anext(looks) == Draining(waiting=1)
        if is_over:
            await other.delete("slow")
            assert await all_looks(other, 4) == []
        async with asyncio.timeout(PATIENCE):
            await adder.add("k", 1, record_id="a")
            await adder.add_many([Entry(f"k{number}", number) for number in range(20)])
        with server.client() as client:
            for key in ("k", *(f"k{number}" for number in range(20))):
                assert not client.exists(f"{{{namespace}}}:log:{key}")
        timeline = await other.peek("k")
        assert timeline is not None
        assert [record.id for record in timeline.records] == ["a"]


@pytest.mark.parametrize("is_over", [False, True], ids=["under_way", "over"])
async def test_a_worker_that_is_idle_delivers_from_the_new_layout_as_soon_as_something_is_due(
    server: Server, namespace: str, is_over: bool
) -> None:
    box = Box()
    async with engine_of(server, namespace).delivering(box), engine_of(server, namespace) as other:
        await other.add("first", 1, record_id="first")
        await box.digest(1)
        await until(lambda: is_at_rest(other))
        if is_over:
            assert await all_looks(other, 4) == []
        else:
            async with engine_of(server, namespace, policy=LATER) as slow:
                await slow.add("slow", 1)
            assert await anext(other.reshard(4)) == Draining(waiting=1)
        await other.add("k", 1, record_id="a")
        await box.digest(2)
    assert box.ids == ["first", "a"]


@pytest.mark.parametrize("shards", [1, 2], ids=["from_one", "from_two"])  # of one, a worker has none at first
async def test_a_worker_of_some_shards_serves_these_of_the_new_layout_and_drains_all_of_the_old(
    server: Server, namespace: str, shards: int
) -> None:
    halves = {0, 2}, {1, 3}
    boxes = Box(), Box()
    async with engine_of(server, namespace, shards=shards) as first:
        await first.add("k0", 1)
    async with AsyncExitStack() as stack:
        for box, half in zip(boxes, halves, strict=True):
            await stack.enter_async_context(engine_of(server, namespace, lease_timeout=3).delivering(box, shards=half))
        other = await stack.enter_async_context(engine_of(server, namespace))
        await until(lambda: is_at_rest(other))
        await all_looks(other, 4)
        for box in boxes:
            box.digests.clear()
        keys = [f"k{number}" for number in range(40)]
        await other.add_many([Entry(key, 1) for key in keys])
        await until(lambda: is_at_rest(other))
    for box, half in zip(boxes, halves, strict=True):
        assert {crc32(digest.key.encode()) % 4 for digest in box.digests} == half


async def test_a_worker_of_some_shards_drains_those_of_the_old_ones_too_that_nobody_had_chosen(
    server: Server, namespace: str
) -> None:
    box = Box()
    async with engine_of(server, namespace, shards=3) as adding:
        await adding.add_many([Entry(f"k{number}", 1) for number in range(20)])
    async with engine_of(server, namespace, lease_timeout=3).delivering(box, shards={0}) as worker:
        await box.digest(1)
        async for _ in worker.reshard(2):
            pass
        await box.digest(20)


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({0, 1}, []),
        ({1, 5, 9}, ["the namespace has 2 shards, which count from 0: those that were chosen from 5 on are not there"]),
        ({5, 9}, ["none of the chosen shards is there: the namespace has 2, which count from 0. Nothing is delivered"]),
    ],
)
async def test_chosen_shards_that_are_not_there_are_told(
    server: Server, namespace: str, chosen: set[int], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    box = Box()
    async with engine_of(server, namespace, shards=2) as adding:
        await adding.add_many([Entry(f"k{number}", 1) for number in range(20)])
    async with engine_of(server, namespace).delivering(box, shards=chosen):
        await until(lambda: box.digests or caplog.records)
    assert [record.getMessage() for record in caplog.records] == told


async def test_a_lease_that_is_held_while_the_layout_changes_is_closed_under_it(server: Server, namespace: str) -> None:
    box = Box()
    async with (
        engine_of(server, namespace).delivering(box) as worker,
        engine_of(server, namespace) as other,
    ):
        box.go.clear()
        await other.add("k", 1, record_id="a")
        await box.digest(1)
        looks = other.reshard(4)
        assert await anext(looks) == Draining(leased=1)
        await worker.add("k", 2, record_id="b")  # in the new layout it is another timeline
        await box.digest(2)
        assert (await worker.stats()).leased == 2
        scheduler = session_of(worker)._scheduler
        assert scheduler is not None
        for each in [*scheduler._workers.values()]:
            await each.leases.renew()
        assert await anext(looks) == Draining(leased=1)
        box.go.set()
        async with asyncio.timeout(PATIENCE):
            assert all([left == Draining(leased=1) async for left in looks])
        assert (await other.stats()).delivered == 2
    assert box.ids == ["a", "b"]
    assert [digest.attempt for digest in box.digests] == [1, 1]


async def test_timelines_that_wait_are_delivered_by_their_schedule_from_the_old_shards(place: Place) -> None:
    old, new = await place.process(shards=2), await place.process()
    retried = await add(old, "retried", "a")
    [lease] = await claim(old, retried)
    assert await old.retry(retried, [Retry(lease, 10 * MINUTE, "boo", LIMITS, lease.size, unknown=True)]) == [True]
    cooled = await add(old, "cooled", "b")
    [first] = await claim(old, cooled)
    await close(old, cooled, first, cool_ms=20 * MINUTE)
    await add(old, "cooled", "c")
    assert await add(old, "delayed", "d", policy=Policy(initial_delay=1_800)) in (retried, cooled)

    assert await new.operations.reshard(8)
    assert await new.operations.drain() == {"waiting": 3}
    await add(new, "retried", "e")
    for backend in (old, new):  # the one was here before, the other as well
        for key, due, ids in (("retried", 0, ["a", "e"]), ("cooled", 20, ["c"]), ("delayed", 30, ["d"])):
            window = await backend.operations.look(key)
            assert window is not None
            assert (window.due_ms - NOW, await held(backend, key)) == (due * MINUTE, ids)

    came: list[tuple[int, str, str, int]] = []
    for place.now in range(NOW + MINUTE, NOW + 31 * MINUTE, MINUTE):
        for shard in {retried, cooled}:
            for lease in await claim(old, shard):
                [(record, _)] = records(lease.entries)
                came.append(((place.now - NOW) // MINUTE, lease.key, record, lease.attempt))
                await close(old, shard, lease)
    assert came == [(10, "retried", "a", 2), (20, "cooled", "c", 1), (30, "delayed", "d", 1)]
    await finish(new)
    assert await held(new, "retried") == ["e"]


async def test_a_call_of_adds_over_a_change_stores_each_record_once(server: Server) -> None:
    adds = [add_of(f"k{number}", f"r{number}") for number in range(600)]  # three calls to the server

    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        adder, other = await place.process(), await place.process()
        await deliver(adder, "first", "first")
        answers: list[object] = []

        async def call() -> None:
            answers.extend(await adder.add(0, adds))

        yield call(), lambda: other.operations.reshard(4)
        for number in (0, 255, 256, 511, 512, 599):  # the first and the last of each call
            assert await held(adder, f"k{number}") == [f"r{number}"]
        assert {type(answer) for answer in answers} == {bool}

    await between_any_two_steps(server, scene)


async def test_adds_that_are_queued_while_the_layout_changes_go_to_the_new_shards(
    server: Server, namespace: str
) -> None:
    async with Middle(server) as middle, engine_of(server, namespace) as other:
        async with engine_of(server, namespace, url=middle.url, policy=LATER) as adder:
            await adder.add("first", 1)
            middle.gate.clear()
            adds = [asyncio.create_task(adder.add(f"k{number}", 1, record_id="r")) for number in range(300)]
            async with asyncio.timeout(PATIENCE):
                await middle.held.wait()  # the first are on their way, the others wait for that
            looks = other.reshard(4)
            assert await anext(looks) == Draining(waiting=1)
            middle.gate.set()
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*adds) == [False] * 300
        assert await anext(looks) == Draining(waiting=1)
        sizes = Counter([timeline.size async for timeline in other.timelines()])
    assert sizes == {1: 301}


# Dead letters and counters


async def test_dead_letters_move_whole_with_all_that_is_known_of_them(place: Place) -> None:
    old, new = await place.process(shards=2), await place.process()
    ids = [f"record-{number}-{'x' * 400}" for number in range(1_500)]  # pages are bound by their number and bytes
    await bury(old, "large", *ids)
    place.now += MINUTE
    for number in range(5):
        await bury(old, f"small{number}", "a", "b")
    letters = by_id(await letters_of(old))
    assert sorted(len(letter.entries) for letter in letters) == [2, 2, 2, 2, 2, 1_500]

    await change(new, 4)
    fresh = await place.process()
    for backend in (new, fresh):
        assert by_id(await letters_of(backend)) == letters
    at = {backend_shard for backend_shard in range(4) if (await fresh.operations.dead_letters(backend_shard, 10)).items}
    assert at == {fresh.shard_map.shard_of(letter.key) for letter in letters}
    assert place.left_of(Layout(2)) == []
    assert place.versions(Layout(2)) == [b"retired"] * 2


async def test_letters_of_more_than_a_slice_move_and_the_oldest_comes_first_as_before(place: Place) -> None:
    old, new = await place.process(), await place.process()
    keys = [f"k{number}" for number in range(SLICE + 50)]
    for place.now in range(NOW, NOW + len(keys), 150):  # as many as one claim opens, and some
        some = keys[place.now - NOW : place.now - NOW + 150]
        assert all(isinstance(a, bool) for a in await old.add(0, [add_of(key, "a") for key in some]))
        while leases := await claim(old, 0):
            closes = [Close(lease, 1, 0, 0, LIMITS, LEASE, dead_letters=[NewDeadLetter("no")]) for lease in leases]
            assert set(await old.close(0, closes)) == {Closed("closed")}
    await change(new, 4)
    found = await letters_of(new)
    assert sorted(letter.key for letter in found) == sorted(keys)
    for shard in range(new.shard_map.count):
        moments = [letter.buried_ms for letter in found if new.shard_map.shard_of(letter.key) == shard]
        assert moments == sorted(moments)


async def test_a_dead_letter_that_has_reached_its_30_days_does_not_hold_the_change_up(place: Place) -> None:
    old, new = await place.process(), await place.process()
    await bury(old, "expired", "a")
    place.now += 20 * DAY
    young = await bury(old, "young", "b")
    place.now += 10 * DAY
    await change(new, 4)
    [letter] = await letters_of(new)
    assert (letter.id, letter.buried_ms) == (young, NOW + 20 * DAY)
    place.now += 20 * DAY
    assert await letters_of(new) == []


async def full_of_the_past(place: Place) -> tuple[dict[str, int], list[StoredDeadLetter]]:
    """A namespace of two shards in which things have happened: its counters, and its dead letters."""
    old = await place.process(shards=2)
    for number in range(2):
        await deliver(old, f"k{number}", "a", "b")
    await bury(old, "k1", *(f"record-{number}-{'x' * 1_000}" for number in range(300)))  # it moves in two pages
    await bury(old, "k2", "c")
    return await counters(old), by_id(await letters_of(old))


async def is_carried_over(
    place: Place, backend: Backend, shards: int, facts: tuple[dict[str, int], list[StoredDeadLetter]]
) -> None:
    """The change is over, and nothing came of it but another number of shards."""
    for process in (backend, await place.process()):
        assert await counters(process) == facts[0]
        assert by_id(await letters_of(process)) == facts[1]
        assert await process.operations.reshard(shards) is False
    assert place.left_of(Layout(2)) == []
    assert place.versions(Layout(2)) == [b"retired"] * 2


async def test_a_change_that_is_killed_between_any_two_steps_is_brought_to_its_end_by_another_process(
    server: Server,
) -> None:
    moment, was_cancelled = 0, True
    while was_cancelled:
        moment += 1
        async with new_place(server) as place:
            facts = await full_of_the_past(place)
            killed = await place.process()
            was_cancelled = (await at_awaits(change(killed, 3), moment, 1)).was_cancelled
            await killed.aclose()
            second = await place.process()
            if await second.operations.reshard(3):
                await finish(second)
            await is_carried_over(place, second, 3, facts)
    assert moment > 10


async def test_two_processes_that_make_the_same_change_at_once_both_end_well(server: Server) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        facts = await full_of_the_past(place)
        first, second = await place.process(), await place.process()
        yield see_to(first, 3), lambda: see_to(second, 3)
        await is_carried_over(place, first, 3, facts)

    await between_any_two_steps(server, scene)


async def see_to(backend: Backend, shards: int) -> None:
    """Make a change, or see that it is made."""
    if await backend.operations.reshard(shards):
        await finish(backend)


async def test_a_reply_that_is_lost_during_a_change_makes_nothing_happen_twice(server: Server) -> None:
    number, was_lost = 0, True
    while was_lost:
        number += 1
        async with Middle(server) as middle, new_place(server) as place:
            facts = await full_of_the_past(place)
            backend = await place.process(url=middle.url)
            await backend.operations.look("k")
            middle.lose = number - 1
            await change(backend, 3)
            await is_carried_over(place, backend, 3, facts)
            was_lost = middle.has_lost  # else there were fewer
    assert number > 10


async def test_a_page_of_a_letter_that_is_sent_twice_is_kept_once_and_one_that_lacks_those_before_it_is_refused(
    place: Place,
) -> None:
    backend = await place.process(2)
    first, second = [add_of("k", each).entry for each in "ab"], [add_of("k", "c").entry]
    facts = "letter", "k", "why", NOW, 1, "digest"
    for start, is_last, page in ((0, 0, first), (0, 0, first), (2, 1, second), (2, 1, second)):
        assert await backend.namespace.call("keep", 0, *facts, start, is_last, *page) == 1
    letter = await backend.operations.dead_letter("letter")
    assert letter is not None
    assert letter.entries == [*first, *second]
    assert await backend.namespace.call("keep", 1, "other", *facts[1:], 2, 1, *second) == 0
    assert await backend.operations.dead_letter("other") is None


@pytest.mark.parametrize("name", ["replay", "discard"])
async def test_a_dead_letter_that_is_taken_while_it_moves_stays_away(server: Server, name: str) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        old, mover = await place.process(), await place.process()
        letter = await bury(old, "k", "a", "b")
        assert await mover.operations.reshard(4)
        user = await place.process()
        take: dict[str, Work] = {
            "replay": lambda: user.replay(letter, LATER.terms, False),
            "discard": lambda: user.discard(letter),
        }
        yield mover.operations.drain(), take[name]
        assert await letters_of(user) == []
        assert await held(user, "k") == (["a", "b"] if name == "replay" else [])

    await between_any_two_steps(server, scene)


async def test_counters_are_the_same_before_while_and_after_a_change_there_and_back(place: Place) -> None:
    facts = await full_of_the_past(place)
    backend = await place.process()
    for shards in (5, 1, 2):
        assert await backend.operations.reshard(shards)
        assert await counters(backend) == facts[0]
        await finish(backend)
        assert (await counters(backend), by_id(await letters_of(backend))) == facts
    await deliver(backend, "k", "a")
    assert (await counters(backend))["delivered"] == facts[0]["delivered"] + 1
    assert place.left_of(Layout(2)) == place.left_of(Layout(5, 2)) == place.left_of(Layout(1, 3)) == []


# By hand, while a timeline is in both layouts


@dataclass
class Both:
    """An engine on a namespace in which the timeline "k" is in both layouts: "a" and "b" are old, "b" and "c" new."""

    engine: DigestEngine[JSON]
    other: DigestEngine[JSON]
    server: Server
    namespace: str

    async def records(self) -> list[tuple[str, JSON | bytes]]:
        timeline = await self.other.peek("k")
        return [] if timeline is None else [(record.id, record.value) for record in timeline.records]

    async def listed(self) -> list[tuple[str, str, int]]:
        return [(timeline.key, timeline.state, timeline.size) async for timeline in self.engine.timelines()]


@pytest.fixture
async def both(server: Server, namespace: str) -> AsyncIterator[Both]:
    async with (
        engine_of(server, namespace, policy=LATER) as engine,
        engine_of(server, namespace, policy=LATER) as other,
    ):
        await engine.add("k", "old", record_id="a", timestamp=1)
        await engine.add("k", "old", record_id="b", timestamp=2)
        assert await anext(other.reshard(4)) == Draining(waiting=1)
        await engine.add("k", "new", record_id="b", timestamp=2)
        await engine.add("k", "new", record_id="c", timestamp=3)
        yield Both(engine, other, server, namespace)


async def test_a_timeline_in_both_layouts_is_shown_as_one_and_listed_once_a_layout(both: Both) -> None:
    assert await both.records() == [("a", "old"), ("b", "new"), ("c", "new")]
    assert await both.listed() == [("k", "waiting", 2)] * 2
    assert (await both.engine.stats()).waiting == 2


async def test_a_flush_makes_a_timeline_due_in_both_layouts(both: Both) -> None:
    assert await both.engine.flush("k")
    assert await both.listed() == [("k", "ready", 2)] * 2
    box = Box()
    async with engine_of(both.server, both.namespace).delivering(box):
        await box.digest(2)
    assert sorted(box.ids) == ["a", "b", "b", "c"]
    assert await all_looks(both.other, 4) == []


async def test_a_delete_drops_a_timeline_in_both_layouts(both: Both) -> None:
    assert await both.engine.delete("k")
    assert await both.records() == await both.listed() == []
    assert not await both.engine.delete("k")
    assert await all_looks(both.other, 4) == []


@pytest.mark.parametrize(
    ("record", "left"),
    [
        ("a", [("b", "new"), ("c", "new")]),
        ("b", [("a", "old"), ("c", "new")]),
        ("c", [("a", "old"), ("b", "new")]),
    ],
)
async def test_a_record_is_removed_wherever_it_is(both: Both, record: str, left: list[tuple[str, str]]) -> None:
    assert await both.engine.remove("k", record)
    assert await both.records() == left
    assert not await both.engine.remove("k", record)


async def test_a_reschedule_moves_a_timeline_in_both_layouts(both: Both) -> None:
    due = await both.engine.reschedule("k", delay=60)
    dues = [timeline.due async for timeline in both.engine.timelines()]
    assert min(dues) == due
    assert (max(dues) - due).total_seconds() < PATIENCE
    by_policy = await both.engine.reschedule("k")
    dues = [timeline.due async for timeline in both.engine.timelines()]
    assert min(dues) == by_policy
    assert 1_400 < (by_policy - due).total_seconds() + 60 < 1_600


async def test_a_reschedule_by_policy_gives_each_layout_the_gap_after_its_own_iteration(place: Place) -> None:
    place.tell_time()
    old, new = await place.process(), await place.process()
    shard = await add(old, "k", "a")
    [lease] = await claim(old, shard)
    await close(old, shard, lease, cool_ms=10 * MINUTE)
    await add(old, "k", "b")  # in the cool-down after its first digest
    assert await new.operations.reshard(4)
    await add(new, "k", "c", policy=LATER)  # of which the new layout knows nothing
    policy = Policy(initial_delay=50, minimum_delay=70, increment_delay=0)
    async with engine_of(place.server, place.namespace, policy=policy) as engine:
        due = await engine.reschedule("k")
        places = {timeline.iteration: timeline.due async for timeline in engine.timelines("waiting")}
    assert places == {0: due, 1: due + timedelta(seconds=20)}


async def test_a_reschedule_by_policy_moves_what_waits_beside_a_delivery_in_the_other_layout(place: Place) -> None:
    place.tell_time()
    old, new = await place.process(), await place.process()
    await add(old, "k", "a")
    [lease] = await claim(old, 0)
    assert await new.operations.reshard(4)
    await add(new, "k", "b", policy=LATER)
    async with engine_of(place.server, place.namespace, policy=Policy(initial_delay=50)) as engine:
        due = await engine.reschedule("k")
        assert [timeline.due async for timeline in engine.timelines("waiting")] == [due]
    await close(old, 0, lease)


async def test_dead_letters_of_both_layouts_are_listed_once_each(place: Place) -> None:
    place.tell_time()
    old, new = await place.process(), await place.process()
    letters = [await bury(old, "old", "a")]
    assert await new.operations.reshard(4)
    letters.append(await bury(new, "new", "b"))
    async with DigestEngine[JSON](place.server.url, namespace=place.namespace) as engine:
        found = [letter async for letter in engine.dead_letters()]
        assert sorted(letter.id for letter in found) == sorted(letters)
        assert [await engine.dead_letter(letter.id) for letter in found] == found


# A process that has not heard of a change yet

Look: TypeAlias = Callable[[DigestEngine[JSON], str], Awaitable[object]]


async def listed(items: AsyncIterator[Any]) -> list[str]:
    return sorted([item.key async for item in items])


async def replayed(engine: DigestEngine[JSON], letter: str) -> bool:
    await engine.replay(letter)
    return await engine.dead_letter(letter) is None


LOOKS: dict[str, Look] = {
    "peek": lambda engine, _: engine.peek("k"),
    "timelines": lambda engine, _: listed(engine.timelines()),
    "stats": lambda engine, _: engine.stats(),
    "dead_letters": lambda engine, _: listed(engine.dead_letters()),
    "dead_letter": lambda engine, letter: engine.dead_letter(letter),
}
ACTIONS: dict[str, Look] = {  # and how each says that it found what it is about
    "flush": lambda engine, _: engine.flush("k"),
    "delete": lambda engine, _: engine.delete("k"),
    "remove": lambda engine, _: engine.remove("k", "a"),
    "reschedule": lambda engine, _: engine.reschedule("k", delay=60),
    "replay": replayed,
    "discard": lambda engine, letter: engine.discard(letter),
}


@pytest.mark.parametrize("is_over", [False, True], ids=["under_way", "over"])
@pytest.mark.parametrize("name", [*LOOKS, *ACTIONS])
async def test_the_first_call_of_a_process_that_has_not_heard_of_a_change_finds_all_there_is(
    place: Place, name: str, is_over: bool
) -> None:
    place.tell_time()
    old, new = await place.process(shards=2), await place.process()
    letter = await bury(old, "dead", "x")
    for key in ("slow0", "slow2"):
        await add(old, key, "a", policy=LATER)  # in each of the old shards
    idle, fresh = (DigestEngine[JSON](place.server.url, namespace=place.namespace, policy=LATER) for _ in range(2))
    async with idle:
        assert await new.operations.reshard(4)
        assert await new.operations.drain() == {"waiting": 2}
        await add(new, "k", "a", policy=LATER)
        if is_over:
            for key in ("slow0", "slow2"):
                assert await new.delete(key)
            await finish(new)
        async with fresh, asyncio.timeout(PATIENCE):
            if name in ACTIONS:
                assert await ACTIONS[name](idle, letter)
            else:
                expected = await LOOKS[name](fresh, letter)
                assert expected
                assert await LOOKS[name](idle, letter) == expected


async def test_a_process_that_heard_nothing_for_longer_than_what_is_left_of_the_old_shards_adds_to_the_new(
    place: Place,
) -> None:
    old, new = await place.process(shards=2), await place.process()
    await deliver(old, "k", "a")
    await change(new, 4)
    with place.server.client() as client:  # as a day after a shard is retired
        client.delete(*{f"{tag}layout" for tag in place.tags(Layout(2))} - {f"{{{place.namespace}}}:layout"})
    await add(old, "k", "b")
    assert await held(new, "k") == ["b"]
    assert place.left_of(Layout(2)) == []


# What a change is refused for, and who may go on


async def test_another_number_is_refused_by_name_until_a_change_is_over_and_the_same_goes_on(place: Place) -> None:
    first, second = await place.process(), await place.process()
    await add(first, "k", "a", policy=LATER)
    assert await first.operations.reshard(4)
    for backend in (first, second):
        for shards in (1, 8):
            with pytest.raises(InvalidState, match=rf"from 1 to 4 shards: .* before it can have {shards}"):
                await backend.operations.reshard(shards)
        assert await backend.operations.reshard(4)
        assert await backend.operations.drain() == {"waiting": 1}
    await second.delete("k")
    await finish(second)
    assert await first.operations.reshard(8)  # the other one has ended the change before
    await finish(first)
    assert await second.operations.reshard(8) is False


async def test_two_changes_to_other_numbers_at_once_are_one_and_a_refusal(server: Server) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        first, second = await place.process(), await place.process()
        await add(first, "k", "a", policy=LATER)
        begun: list[int] = []

        async def ask(backend: Backend, shards: int) -> None:
            with suppress(InvalidState):
                await backend.operations.reshard(shards)
                begun.append(shards)

        yield ask(first, 4), lambda: ask(second, 8)
        [winner] = begun
        fresh = await place.process()
        assert await fresh.operations.reshard(winner)
        assert await held(fresh, "k") == ["a"]

    await between_any_two_steps(server, scene)


@pytest.mark.parametrize("shards", [1, 4])
async def test_a_namespace_that_does_not_exist_yet_gets_its_number(server: Server, namespace: str, shards: int) -> None:
    async with engine_of(server, namespace, policy=LATER) as engine:
        assert await all_looks(engine, shards) == []
        await engine.add("k", 1)
    async with engine_of(server, namespace, policy=LATER, shards=shards) as engine:
        assert [timeline.key async for timeline in engine.timelines()] == ["k"]


async def test_a_number_that_is_given_is_refused_by_name_at_the_next_start_when_it_is_another(
    server: Server, namespace: str
) -> None:
    async with engine_of(server, namespace, shards=2, policy=LATER) as engine:
        await engine.add("k", 1)
        assert await anext(engine.reshard(4)) == Draining(waiting=1)
        await engine.add("k", 2)  # one that runs goes on, whatever it was given
        for _ in range(2):  # under way, and over
            with pytest.raises(
                ConfigurationError, match=r"has 4 shards, not 2: take shards= out of the engine, or give 4"
            ):
                async with engine_of(server, namespace, shards=2):
                    pass
            async with engine_of(server, namespace, shards=4) as right:
                await right.delete("k")
            assert await all_looks(engine, 4) == []


async def test_a_process_that_presumed_one_shard_goes_over_when_another_makes_the_namespace_with_four(
    place: Place,
) -> None:
    async with engine_of(place.server, place.namespace) as presuming:
        await presuming.stats()
        other = await place.process(shards=4)
        await add(other, "k", "a")
        async with asyncio.timeout(PATIENCE):
            await presuming.add("k", 1, record_id="b")
        assert await held(other, "k") == ["a", "b"]


async def test_a_worker_that_presumed_one_shard_delivers_when_another_makes_the_namespace_with_four(
    server: Server, namespace: str
) -> None:
    box = Box()
    async with engine_of(server, namespace, lease_timeout=3).delivering(box):
        async with engine_of(server, namespace, shards=None) as looking:
            await looking.stats()
        with server.client() as client:
            client.delete(f"{{{namespace}}}:layout")  # the worker itself may have made it by now
        async with engine_of(server, namespace, shards=4) as other:
            await other.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await box.digest(20)


# What a failover forgets


async def test_a_change_that_a_failover_forgets_is_begun_again_by_who_watches_it(
    server: Server, namespace: str
) -> None:
    async with engine_of(server, namespace, policy=LATER) as engine:
        await engine.add("k", 1)
        looks = engine.reshard(4)
        assert await anext(looks) == Draining(waiting=1)
        with server.client() as client:
            client.hset(f"{{{namespace}}}:layout", "current", "1:1:1")
            client.hdel(f"{{{namespace}}}:layout", "drains")
        assert await anext(looks) == Draining(waiting=1)
        await engine.flush("k")
        async with engine_of(server, namespace).delivering(Box()), asyncio.timeout(PATIENCE):
            assert all([left in (Draining(ready=1), Draining(leased=1)) async for left in looks])
        with server.client() as client:
            assert client.hmget(f"{{{namespace}}}:layout", "current", "drains") == [b"1:4:2", None]


# Users


async def test_users_of_roles_go_on_over_a_change_with_both_key_patterns(server: Server, namespace: str) -> None:
    keys = f"~{{{namespace}}}:*", f"~{{{namespace}:*}}:*"
    roles = {"producer": ["producer"], "worker": ["worker"], "resharder": ["producer", "worker", "operator"]}
    urls = {user: f"unix://{namespace}-{user}:{PASSWORD}@{server.socket}" for user in roles}
    with server.client() as client:
        for user, parts in roles.items():
            server.allow(client, f"{namespace}-{user}", *keys, *commands(*parts))
    box = Box()
    async with (
        engine_of(server, namespace, url=urls["producer"]) as producer,
        engine_of(server, namespace, url=urls["worker"], lease_timeout=3).delivering(box),
        engine_of(server, namespace, url=urls["resharder"]) as resharder,
    ):
        for number, shards in enumerate((4, 16, 1)):
            await producer.add(f"before-{shards}", 1)
            await box.digest(2 * number + 1)
            await all_looks(resharder, shards)
            await producer.add(f"after-{shards}", 1)
            await box.digest(2 * number + 2)
    keys_seen = [digest.key for digest in box.digests]
    assert keys_seen == [f"{when}-{shards}" for shards in (4, 16, 1) for when in ("before", "after")]


# A server that is emptied


def empty(server: Server, namespace: str, layout: dict[str, str] | None = None) -> None:
    """Drop all of a namespace, which may begin anew at the same moment."""
    with server.client() as client, client.pipeline() as pipe:
        pipe.delete(*client.scan_iter(match=f"*{namespace}*"))
        if layout is not None:
            pipe.hset(f"{{{namespace}}}:layout", mapping=layout)
        pipe.execute()


@pytest.mark.parametrize("old", [1, 3])
async def test_a_namespace_whose_server_is_emptied_during_a_change_begins_anew(place: Place, old: int) -> None:
    early = await place.process(old)
    await early.add(early.shard_map.shard_of("k"), [add_of("k", "a")])
    assert await early.operations.reshard(4)
    await early.operations.drain()
    empty(place.server, place.namespace)
    await early.operations.drain()
    for process in (early, await place.process()):
        shard = process.shard_map.shard_of("k")
        assert await process.add(shard, [add_of("k", "a")]) in ([True], [False])
        assert [window.key for window in (await process.operations.page(shard, "ready", 10)).items] == ["k"]
        for each in range(process.shard_map.count):
            with suppress(Retired):
                await process.claim(each, 0, 60_000, AT_ONCE.terms.limits)


async def test_a_worker_that_saw_a_change_delivers_when_its_server_was_emptied_and_the_namespace_began_anew(
    server: Server, namespace: str
) -> None:
    box = Box()
    async with engine_of(server, namespace, lease_timeout=3).delivering(box) as worker:
        await worker.add("first", 1)
        await box.digest(1)
        async for _ in worker.reshard(4):
            pass
        empty(server, namespace, {"current": "1:1:1", "version": "1:1:1"})  # at once, or the worker might be the first
        async with engine_of(server, namespace, shards=1) as other:
            await other.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await box.digest(21)


# What is let go


async def test_an_engine_lets_go_of_what_it_had_for_shards_that_are_no_more(server: Server, namespace: str) -> None:
    box = Box()
    async with engine_of(server, namespace, shards=2, lease_timeout=1).delivering(box) as engine:
        await engine.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await asyncio.gather(*(engine.add(f"k{number}", 2) for number in range(20)))
        counts: list[int] = []
        for shards in (3, 2, 3, 2):
            await all_looks(engine, shards)
            await asyncio.gather(*(engine.add(f"k{number}", shards) for number in range(20)))
            await until(partial(serves, engine, shards))
            counts.append(len(session_of(engine)._adder._batchers))
        assert counts == [3, 2, 3, 2]


async def test_a_worker_without_a_free_slot_begins_with_the_new_shards_too(server: Server, namespace: str) -> None:
    box = Box()
    async with (
        engine_of(server, namespace, concurrency=1, lease_timeout=1).delivering(box) as worker,
        engine_of(server, namespace) as other,
    ):
        box.go.clear()
        await other.add("k", 1)
        await box.digest(1)
        assert await anext(other.reshard(4)) == Draining(leased=1)
        await until(partial(serves, worker, 1 + 4))
        box.go.set()


async def serves(engine: DigestEngine[Any], shards: int) -> bool:
    scheduler = session_of(engine)._scheduler
    return scheduler is not None and len(scheduler._workers) == shards


async def test_an_answer_that_comes_too_late_ends_no_shard(place: Place) -> None:
    backend = await place.process(2)
    await backend.add(0, [add_of("k", "a")])
    old = backend.namespace.layout.current
    assert await backend.operations.reshard(3)
    new = backend.namespace.layout.current
    backend.namespace._layout = replace(
        backend.namespace.layout, current=old, drained=None
    )  # as an earlier look has it
    assert (await backend.claim(backend.shard_map.current.start, 1, LEASE, LIMITS)).leases == []
    assert backend.namespace.layout.current == new
