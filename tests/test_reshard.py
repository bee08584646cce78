"""Another number of shards for a namespace that is in use: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, cast
from zlib import crc32

import pytest
from cancelling import Driven, at_awaits
from clusters import running_cluster
from commandline import running
from engines import session_of
from processes import at_work
from replicas import PATIENCE, until
from servers import PASSWORD, Proxy, Server, commands, running_server
from stores import DAY, LEASE, MINUTE, NOW, records
from traffic import Inbox

from aiodigest import JSON, ConfigurationError, DigestEngine, Draining, Entry, InvalidState, Policy
from aiodigest import engine as engine_module
from aiodigest.backend import (
    SLICE,
    Add,
    Backend,
    Close,
    Closed,
    Lease,
    Mute,
    NewDeadLetter,
    Retired,
    Retry,
    StoredDeadLetter,
)
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.namespace import BATCH
from aiodigest.codecs import JSONCodec
from aiodigest.records.entries import pack
from aiodigest.worker.shard import ShardWorker

Call: TypeAlias = Coroutine[Any, Any, object]
Work: TypeAlias = Callable[[], Call]

VALUE = JSONCodec[JSON]().encode("v")
LATER = Policy(initial_delay=1_500)  # what is added under it is not due while a test lasts
AT_ONCE = Policy(minimum_delay=0, increment_delay=0, capacity=10_000)
LIMITS = AT_ONCE.terms.limits
COUNTERS = ("digests", "delivered", "dropped", "aged", "expired", "buried", "letters_dropped", "duplicates")

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
        seconds, micros = map(int, self.server.ask("TIME"))
        self.now = seconds * 1_000 + micros // 1_000

    def tags(self, layout: Layout) -> list[str]:
        return [f"{{{layout.tag(self.namespace, number)}}}:" for number in range(layout.shards)]

    def left_of(self, layout: Layout) -> list[bytes]:
        """The keys of an old layout that would stay."""
        root = f"{{{self.namespace}}}:layout".encode()
        with self.server.client() as client:
            keys = [key for tag in self.tags(layout) for key in client.keys(f"{tag}*")]
            return [key for key in keys if key != root and client.pttl(key) < 0]


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


Scene: TypeAlias = Callable[[Place], AbstractAsyncContextManager[tuple[Call, Work]]]


class Between(Driven):
    """Drives a coroutine, and does something else, to its end, before the ``number``-th of its awaits is waited for."""

    def __init__(self, coroutine: Call, number: int, meanwhile: Work) -> None:
        super().__init__(coroutine)
        self._number = number
        self._meanwhile = meanwhile

    def suspended(self) -> Generator[Any, Any, object]:
        if self.count == self._number:
            yield from self._meanwhile().__await__()


async def between_any_two_steps(server: Server, scene: Scene) -> None:
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
    """Can hold what goes to the server."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.gate, self.held = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def let_through(self) -> None:
        if not self.gate.is_set():
            self.held.set()
        await self.gate.wait()


async def add(backend: Backend, key: str, *ids: str, policy: Policy = AT_ONCE) -> int:
    """Add records in one call; the shard that took them."""
    shard = backend.shard_map.shard_of(key)
    assert all(isinstance(answer, bool) for answer in await backend.add(shard, [add_of(key, id, policy) for id in ids]))
    return shard


async def claim(backend: Backend, shard: int, slots: int = 100) -> list[Lease]:
    return [*(await backend.claim(shard, slots, LEASE, LIMITS)).leases]


async def close(backend: Backend, shard: int, lease: Lease, *, cool_ms: int = 0, letter: str = "") -> None:
    letters = [NewDeadLetter(letter)] if letter else []
    close = Close(lease, lease.size, 0 if letter else lease.size, cool_ms, LIMITS, LEASE, dead_letters=letters)
    assert await backend.close(shard, [close]) == [Closed("closed")]


async def deliver(backend: Backend, key: str, *ids: str, letter: str = "") -> None:
    shard = await add(backend, key, *ids)
    [lease] = await claim(backend, shard)
    await close(backend, shard, lease, letter=letter)


async def bury(backend: Backend, key: str, *ids: str) -> str:
    """The id of a new dead letter."""
    before = {letter.id for letter in await letters_of(backend)}
    await deliver(backend, key, *ids, letter=f"about {key}")
    [new] = [letter.id for letter in await letters_of(backend) if letter.id not in before]
    return new


async def finish(backend: Backend) -> None:
    """Drain what holds no timelines any more."""
    async with asyncio.timeout(PATIENCE):
        assert await backend.operations.drain() == {}


async def change(backend: Backend, shards: int) -> None:
    """The whole of a change, of a namespace in which nothing waits, if it is not made yet."""
    if await backend.operations.reshard(shards):
        await finish(backend)


async def ids_in(backend: Backend, shard: int) -> Sequence[str]:
    return (await backend.operations.dead_letters(shard, SLICE)).items


async def letters_of(backend: Backend) -> list[StoredDeadLetter]:
    """All dead letters, each as often as it is listed, as each shard lists them."""
    found = [
        await backend.operations.dead_letter(id)
        for shard in range(backend.shard_map.count)
        for id in await ids_in(backend, shard)
    ]
    assert None not in found
    return [letter for letter in found if letter]


Facts: TypeAlias = tuple[dict[str, int], list[StoredDeadLetter]]


async def facts_of(backend: Backend) -> Facts:
    """The counters of a namespace, and its dead letters."""
    counts = await backend.operations.counts()
    letters = sorted(await letters_of(backend), key=lambda letter: letter.id)
    return {name: counts.get(name, 0) for name in COUNTERS}, letters


async def held(backend: Backend, key: str) -> list[str]:
    return [record for record, _ in records(await backend.operations.entries(key))]


@pytest.fixture(params=["server", pytest.param("cluster", marks=pytest.mark.cluster)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with running_server() if request.param == "server" else running_cluster(replicas=0) as one:
        yield one.url


@pytest.mark.processes
async def test_every_record_comes_once_while_shards_change_under_load(url: str, namespace: str, tmp_path: Path) -> None:
    async with (
        DigestEngine(url, namespace=namespace, value_type=int, policy=LATER) as slow,
        at_work(url, namespace, timelines=20) as tally,
    ):
        for shards in (16, 4):
            await tally.goes_on()
            await slow.add("slow", 1, record_id=f"before-{shards}")  # keeps the old layout from being empty
            arguments = "reshard", "--url", url, "--namespace", namespace, "--to", str(shards), "--timeout", "60s"
            for ends in (False, True):
                with running(tmp_path, *arguments) as command:
                    assert f"is moving to {shards} shards" in command.error_line().decode()
                    await tally.goes_on()
                    if ends:
                        assert await slow.flush("slow")
                        assert await asyncio.to_thread(command.end) == 0
                        assert command.output.decode().endswith(f" has {shards} shards\n")
                        assert b"Traceback" not in command.errors
        await tally.goes_on()
        added = await tally.end("before-16", "before-4")
        stats = await slow.stats()
    assert (stats.waiting, stats.ready, stats.leased, stats.dead, stats.delivered) == (0, 0, 0, 0, added)


def engine_of(server: Server, namespace: str, **options: Any) -> DigestEngine[JSON]:
    settings: dict[str, Any] = {"policy": AT_ONCE, "timeout": PATIENCE, **options}
    return DigestEngine[JSON](settings.pop("url", server.url), namespace=namespace, **settings)


def workers_of(engine: DigestEngine[Any]) -> list[ShardWorker]:
    scheduler = session_of(engine)._scheduler
    return [*scheduler._workers.values()] if scheduler else []


async def all_looks(engine: DigestEngine[JSON], shards: int) -> list[Draining]:
    async with asyncio.timeout(PATIENCE):
        return [left async for left in engine.reshard(shards)]


@pytest.mark.parametrize("is_over", [False, True], ids=["under_way", "over"])
async def test_an_idle_worker_delivers_from_the_new_layout(server: Server, namespace: str, is_over: bool) -> None:
    box = Inbox()
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
async def test_workers_of_some_shards_serve_those_of_a_new_layout(server: Server, namespace: str, shards: int) -> None:
    class Half(Inbox):
        """Counts as the same callback as the other one, which would be in another process."""

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Half)

        __hash__ = None  # type: ignore[assignment]

    halves = {0, 2}, {1, 3}
    boxes = Half(), Half()
    async with engine_of(server, namespace, shards=shards) as first:
        await first.add("k0", 1)
    async with AsyncExitStack() as stack:
        for box, half in zip(boxes, halves, strict=True):
            await stack.enter_async_context(engine_of(server, namespace, lease_timeout=3).delivering(box, shards=half))
        other = await stack.enter_async_context(engine_of(server, namespace))
        await until(lambda: is_at_rest(other))
        await all_looks(other, 4)
        for box in boxes:
            box.came.clear()
        keys = [f"k{number}" for number in range(40)]
        await other.add_many([Entry(key, 1) for key in keys])
        await until(lambda: is_at_rest(other))
    for box, half in zip(boxes, halves, strict=True):
        assert {crc32(digest.key.encode()) % 4 for digest in box.came} == half


async def test_a_worker_of_some_shards_drains_all_that_nobody_had_chosen(server: Server, namespace: str) -> None:
    box = Inbox()
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
    box = Inbox()
    async with engine_of(server, namespace, shards=2) as adding:
        await adding.add_many([Entry(f"k{number}", 1) for number in range(20)])
    async with engine_of(server, namespace).delivering(box, shards=chosen):
        await until(lambda: box.came or caplog.records)
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == told


async def test_a_lease_that_is_held_while_the_layout_changes_is_closed_under_it(server: Server, namespace: str) -> None:
    box = Inbox()
    async with engine_of(server, namespace).delivering(box) as worker, engine_of(server, namespace) as other:
        box.go.clear()
        await other.add("k", 1, record_id="a")
        await box.digest(1)
        looks = other.reshard(4)
        assert await anext(looks) == Draining(leased=1)
        await worker.add("k", 2, record_id="b")  # in the new layout it is another timeline
        await box.digest(2)
        assert (await worker.stats()).leased == 2
        for each in workers_of(worker):
            await each.leases.renew()
        assert await anext(looks) == Draining(leased=1)
        box.go.set()
        async with asyncio.timeout(PATIENCE):
            assert all([left == Draining(leased=1) async for left in looks])
        assert (await other.stats()).delivered == 2
    assert box.ids == ["a", "b"]
    assert [digest.attempt for digest in box.came] == [1, 1]


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


async def test_adds_that_are_queued_during_a_change_go_to_the_new_shards(server: Server, namespace: str) -> None:
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


async def test_a_broken_dead_letter_is_named_when_all_else_has_moved_and_once_discarded_the_change_ends(
    place: Place,
) -> None:
    old, new = await place.process(), await place.process()
    broken = await bury(old, "broken", "a")
    sound = await bury(old, "sound", "a")
    key = old.namespace.key(0, f"letter:{broken}")
    with place.server.client() as client:
        client.set(key, "not ours", ex=100)
    assert await new.operations.reshard(3)
    with pytest.raises(InvalidState, match=f"{broken}.* is broken.* discard it"):
        await new.operations.drain()
    assert (await new.operations.dead_letters(0, 10)).items == [broken]
    assert await new.operations.dead_letter(sound, new.shard_map.shard_of("sound"))
    assert await new.discard(broken)
    await finish(new)
    assert place.left_of(Layout(1)) == []


@pytest.mark.thorough
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


async def test_a_dead_letter_that_moves_keeps_its_age_whatever_the_clocks_of_both_shards_did(place: Place) -> None:
    old, new = await place.process(), await place.process()
    letter = await bury(old, "k", "a")
    place.now -= 3_600_000
    await deliver(old, "k", "b")
    assert await new.operations.reshard(2)
    await deliver(new, "k", "c")
    place.now -= 7_200_000
    await deliver(new, "k", "d")  # the new shard is two hours ahead, and the old one will be three
    await finish(new)
    [moved] = await letters_of(new)
    assert (moved.id, moved.buried_ms) == (letter, place.now)


async def full_of_the_past(place: Place) -> Facts:
    """A namespace of two shards in which things have happened."""
    old = await place.process(shards=2)
    for number in range(2):
        await deliver(old, f"k{number}", "a", "b")
    # it moves in pages, which are bound by their number and bytes
    await bury(old, "k1", *(f"record-{number}-{'x' * 200}" for number in range(1_500)))
    place.now += MINUTE
    for number in range(2, 5):
        await bury(old, f"k{number}", "c")
    return await facts_of(old)


async def is_carried_over(place: Place, backend: Backend, shards: int, facts: Facts) -> None:
    """The change is over, and nothing came of it but another number of shards, each with its dead letters."""
    for process in (backend, await place.process()):
        assert await facts_of(process) == facts
        for shard in process.shard_map.current:
            letters = [await process.operations.dead_letter(id, shard) for id in await ids_in(process, shard)]
            assert {letter and process.shard_map.shard_of(letter.key) for letter in letters} <= {shard}
        assert await process.operations.reshard(shards) is False
    assert place.left_of(Layout(2)) == []
    assert {place.server.ask("HGET", f"{tag}layout", "version") for tag in place.tags(Layout(2))} == {b"retired"}


@pytest.mark.thorough
async def test_a_change_that_is_killed_at_any_step_is_ended_by_another_process(server: Server) -> None:
    moment, was_cancelled = 0, True
    while was_cancelled:
        moment += 1
        async with new_place(server) as place:
            facts = await full_of_the_past(place)
            killed = await place.process()
            was_cancelled = (await at_awaits(change(killed, 3), moment, 1)).was_cancelled
            await killed.aclose()
            second = await place.process()
            await change(second, 3)
            await is_carried_over(place, second, 3, facts)
    assert moment > 10


@pytest.mark.thorough
async def test_two_processes_that_make_the_same_change_at_once_both_end_well(server: Server) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        facts = await full_of_the_past(place)
        first, second = await place.process(), await place.process()
        yield change(first, 3), lambda: change(second, 3)
        await is_carried_over(place, first, 3, facts)

    await between_any_two_steps(server, scene)


@pytest.mark.thorough
async def test_a_reply_that_is_lost_during_a_change_makes_nothing_happen_twice(server: Server) -> None:
    number, was_lost = 0, True
    while was_lost:
        async with Proxy(server) as proxy, new_place(server) as place:
            facts = await full_of_the_past(place)
            backend = await place.process(url=proxy.url)
            await backend.operations.look("k")
            proxy.spare, proxy.swallow = number, 1
            await change(backend, 3)
            await is_carried_over(place, backend, 3, facts)
            number, was_lost = number + 1, not proxy.swallow  # else there were fewer
    assert number > 10


async def test_a_page_of_a_letter_is_kept_once_and_refused_if_it_lacks_those_before_it(place: Place) -> None:
    backend = await place.process(2)
    first, second = [add_of("k", each).entry for each in "ab"], [add_of("k", "c").entry]
    facts = "letter", "k", "why", NOW, 1, "digest", "9 2 0 500"
    for start, is_last, page in ((0, 0, first), (0, 0, first), (2, 1, second), (2, 1, second)):
        assert await backend.namespace.call("keep", 0, *facts, start, is_last, *page) == 1
    letter = await backend.operations.dead_letter("letter")
    assert letter is not None
    assert letter.entries == [*first, *second]
    assert cast("list[bytes]", await backend.namespace.call("letter", 0, "letter", 0))[5] == b"9 2 0 500"
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


async def test_what_was_delivered_is_known_in_the_new_shards_for_as_long(place: Place) -> None:
    old, new = await place.process(), await place.process()
    once = Policy(minimum_delay=0, dedupe_window=600)
    names = [f"r{number}" for number in range(SLICE + 50)]
    for key, some in (("many", names), ("few", names[:1])):
        await add(old, key, *some, policy=once)
        [lease] = await claim(old, 0)
        close = Close(lease, lease.size, lease.size, 0, LIMITS, LEASE, dedupe_ms=600_000)
        assert await old.close(0, [close]) == [Closed("closed")]
    await change(new, 4)
    assert place.left_of(Layout(1)) == []
    for key, some in (("many", names), ("few", names[:1])):
        await add(new, key, *some, policy=once)
        assert await held(new, key) == []
    place.now += 600_000
    await add(new, "few", "r0", policy=once)
    assert await held(new, "few") == ["r0"]
    assert (await new.operations.counts())["duplicates"] == SLICE + 51


async def test_what_the_old_shards_deliver_during_a_change_is_known_in_the_new_ones(place: Place) -> None:
    old, new = await place.process(), await place.process()
    once = Policy(minimum_delay=0, dedupe_window=600)
    await add(old, "k", "a", policy=once)
    [lease] = await claim(old, 0)
    assert await new.operations.reshard(4)
    assert await new.operations.drain() == {"leased": 1}
    close = Close(lease, 1, 1, 0, LIMITS, LEASE, dedupe_ms=600_000)
    assert await old.close(0, [close]) == [Closed("closed")]
    await finish(new)
    await add(new, "k", "a", policy=once)
    assert await held(new, "k") == []


async def test_counters_are_the_same_before_while_and_after_a_change_there_and_back(place: Place) -> None:
    facts = await full_of_the_past(place)
    backend = await place.process()
    for shards in (5, 1, 2):
        assert await backend.operations.reshard(shards)
        assert (await facts_of(backend))[0] == facts[0]
        await finish(backend)
        assert await facts_of(backend) == facts
    await deliver(backend, "k", "a")
    assert (await facts_of(backend))[0]["delivered"] == facts[0]["delivered"] + 1
    assert place.left_of(Layout(2)) == place.left_of(Layout(5, 2)) == place.left_of(Layout(1, 3)) == []


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
    box = Inbox()
    async with engine_of(both.server, both.namespace).delivering(box):
        await box.digest(2)
    assert sorted(box.ids) == ["a", "b", "b", "c"]
    assert await all_looks(both.other, 4) == []


async def test_a_delete_drops_a_timeline_in_both_layouts(both: Both) -> None:
    assert await both.engine.delete("k")
    assert await both.records() == await both.listed() == []
    assert not await both.engine.delete("k")
    assert await all_looks(both.other, 4) == []


@pytest.mark.parametrize("record", ["a", "b", "c"])
async def test_a_record_is_removed_wherever_it_is(both: Both, record: str) -> None:
    left = [each for each in await both.records() if each[0] != record]
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
    async with engine_of(place.server, place.namespace) as engine:
        found = [letter async for letter in engine.dead_letters()]
        assert sorted(letter.id for letter in found) == sorted(letters)
        assert [await engine.dead_letter(letter.id) for letter in found] == found


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
async def test_a_process_that_has_not_heard_of_a_change_finds_all(place: Place, name: str, is_over: bool) -> None:
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


async def test_a_process_that_slept_until_the_old_shards_were_gone_adds_to_the_new(place: Place) -> None:
    old, new = await place.process(shards=2), await place.process()
    await deliver(old, "k", "a")
    await change(new, 4)
    with place.server.client() as client:  # as a day after a shard is retired
        client.delete(*{f"{tag}layout" for tag in place.tags(Layout(2))} - {f"{{{place.namespace}}}:layout"})
    await add(old, "k", "b")
    assert await held(new, "k") == ["b"]
    assert place.left_of(Layout(2)) == []


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


async def test_another_number_than_there_is_is_refused_at_the_next_start(server: Server, namespace: str) -> None:
    async with engine_of(server, namespace, shards=2, policy=LATER) as engine:
        await engine.add("k", 1)
        assert await anext(engine.reshard(4)) == Draining(waiting=1)
        await engine.add("k", 2)  # one that runs goes on, whatever it was given
        for _ in range(2):  # under way, and over
            with pytest.raises(
                ConfigurationError, match="has 4 shards, not 2: take shards= out of the engine, or give 4"
            ):
                async with engine_of(server, namespace, shards=2):
                    pass
            async with engine_of(server, namespace, shards=4) as right:
                await right.delete("k")
            assert await all_looks(engine, 4) == []


@pytest.mark.thorough
async def test_a_worker_that_presumed_one_shard_goes_over_to_four(server: Server, namespace: str) -> None:
    box = Inbox()
    async with engine_of(server, namespace, lease_timeout=15).delivering(box) as presuming:
        await until(lambda: server.ask("DEL", f"{{{namespace}}}:layout"))  # which its first claim makes
        async with engine_of(server, namespace, shards=4) as other:
            await other.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await box.digest(20)
        await presuming.add("k", 1)
        await box.digest(21)


async def test_a_change_that_a_failover_forgets_is_begun_again(server: Server, namespace: str) -> None:
    async with engine_of(server, namespace, policy=LATER) as engine:
        await engine.add("k", 1)
        looks = engine.reshard(4)
        assert await anext(looks) == Draining(waiting=1)
        server.ask("HSET", f"{{{namespace}}}:layout", "current", "2:1:1")
        server.ask("HDEL", f"{{{namespace}}}:layout", "drains")
        assert await anext(looks) == Draining(waiting=1)
        await engine.flush("k")
        async with engine_of(server, namespace).delivering(Inbox()), asyncio.timeout(PATIENCE):
            assert all([left in (Draining(ready=1), Draining(leased=1)) async for left in looks])
        assert server.ask("HMGET", f"{{{namespace}}}:layout", "current", "drains") == [b"2:4:2", None]


async def test_users_of_roles_go_on_over_a_change_with_both_key_patterns(server: Server, namespace: str) -> None:
    keys = f"~{{{namespace}}}:*", f"~{{{namespace}:*}}:*"
    roles = {"producer": ["producer"], "worker": ["worker"], "resharder": ["producer", "worker", "operator"]}
    urls = {user: f"unix://{namespace}-{user}:{PASSWORD}@{server.socket}" for user in roles}
    for user, parts in roles.items():
        server.allow(server.client(), f"{namespace}-{user}", *keys, *commands(*parts))
    box = Inbox()
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
    keys_seen = [digest.key for digest in box.came]
    assert keys_seen == [f"{when}-{shards}" for shards in (4, 16, 1) for when in ("before", "after")]


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


async def test_a_worker_that_saw_a_change_goes_on_after_its_server_was_emptied(server: Server, namespace: str) -> None:
    box = Inbox()
    async with engine_of(server, namespace, lease_timeout=3).delivering(box) as worker:
        await worker.add("first", 1)
        await box.digest(1)
        async for _ in worker.reshard(4):
            pass
        empty(server, namespace, {"current": "2:1:1", "version": "2:1:1"})  # at once, or the worker might be the first
        async with engine_of(server, namespace, shards=1) as other:
            await other.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await box.digest(21)


async def test_adds_go_to_the_new_shards_at_once_when_one_has_learned_of_them(server: Server, namespace: str) -> None:
    async with engine_of(server, namespace, policy=LATER) as adder, engine_of(server, namespace) as other:
        for _ in range(2):
            await adder.add("k", 1)
        looks = other.reshard(3)
        await anext(looks)
        for number in range(20):
            await adder.add(f"k{number}", 1)
        session = session_of(adder)
        assert {*session.store.shard_map.current} <= session._adder._batchers.keys()


async def test_an_engine_lets_go_of_what_it_had_for_shards_that_are_no_more(server: Server, namespace: str) -> None:
    box = Inbox()
    async with engine_of(server, namespace, shards=2, lease_timeout=1).delivering(box) as engine:
        await engine.add_many([Entry(f"k{number}", 1) for number in range(20)])
        await asyncio.gather(*(engine.add(f"k{number}", 2) for number in range(20)))
        counts: list[int] = []
        for shards in (3, 2, 3, 2):
            await all_looks(engine, shards)
            await asyncio.gather(*(engine.add(f"k{number}", shards) for number in range(20)))
            await until(lambda shards=shards: len(workers_of(engine)) == shards)
            counts.append(len(session_of(engine)._adder._batchers))
        assert counts == [3, 2, 3, 2]


async def test_a_worker_without_a_free_slot_begins_with_the_new_shards_too(server: Server, namespace: str) -> None:
    box = Inbox()
    async with (
        engine_of(server, namespace, concurrency=1, lease_timeout=1).delivering(box) as worker,
        engine_of(server, namespace) as other,
    ):
        box.go.clear()
        await other.add("k", 1)
        await box.digest(1)
        assert await anext(other.reshard(4)) == Draining(leased=1)
        await until(lambda: len(workers_of(worker)) == 1 + 4)
        box.go.set()


async def test_an_answer_that_comes_too_late_ends_no_shard(place: Place) -> None:
    backend = await place.process(2)
    await backend.add(0, [add_of("k", "a")])
    old = backend.namespace.layout
    assert await backend.operations.reshard(3)
    new = backend.namespace.layout
    backend.namespace._layout = new._replace(current=old.current, drained=None)  # as an earlier look has it
    assert await claim(backend, backend.shard_map.current.start, 1) == []
    assert backend.namespace.layout.current == new.current


# Mutes


async def mutes_of(backend: Backend) -> dict[str, tuple[int, bool]]:
    """The mutes of the shards that take adds, each of which is in the shard of its timeline."""
    found: dict[str, tuple[int, bool]] = {}
    for shard in backend.shard_map.current:
        end, is_first = None, True
        while end or is_first:
            page = await backend.operations.page(shard, "muted", SLICE, end)
            assert {backend.shard_map.shard_of(each.key) for each in page.items} <= {shard}
            found |= {each.key: (each.mute_ms, each.drops) for each in page.items}
            end, is_first = page.end, False
    return found


async def some_mutes(place: Place, shards: int = 2) -> tuple[RedisBackend, dict[str, tuple[int, bool]]]:
    backend = await place.process(shards)
    for number in range(5):
        mute = Mute(place.now + MINUTE * 1_000 if number % 2 else None, drop=number > 2)
        assert await backend.mute(f"m{number}", mute, LIMITS)
    return backend, await mutes_of(backend)


@pytest.mark.parametrize("shards", [1, 3])
async def test_mutes_hold_in_another_number_of_shards_and_are_in_the_old_no_more(place: Place, shards: int) -> None:
    backend, mutes = await some_mutes(place)
    assert len(mutes) == 5
    await change(backend, shards)
    assert await mutes_of(await place.process()) == mutes
    assert place.left_of(Layout(2)) == []


async def test_mutes_of_more_than_a_call_go_along(place: Place) -> None:
    backend = await place.process(1)
    for number in range(2 * BATCH + 1):
        await backend.mute(f"m{number}", Mute(), LIMITS)
    await change(backend, 2)
    assert len(await mutes_of(backend)) == 2 * BATCH + 1


async def test_nothing_that_is_muted_is_delivered_at_any_step_of_a_change(server: Server) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        backend, mutes = await some_mutes(place)
        claimed = list[Lease]()

        async def add_and_claim() -> None:
            other = await place.process()  # one that knows what there is to know at that moment
            for key in mutes:
                await add(other, key, "a")
            for shard in other.shard_map.live:
                with suppress(Retired):
                    claimed.extend(await claim(other, shard))

        yield backend.operations.reshard(3), add_and_claim
        assert claimed == []
        await backend.operations.drain()
        assert await mutes_of(backend) == mutes
        for shard in backend.shard_map.live:
            with suppress(Retired):
                assert await claim(backend, shard) == []

    await between_any_two_steps(server, scene)


@pytest.mark.thorough
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unheard of"])
async def test_who_is_unmuted_or_muted_at_any_step_of_a_change_is_so_after_it(server: Server, is_known: bool) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        backend, mutes = await some_mutes(place)
        other = await place.process()

        async def change_mutes() -> None:
            process = await place.process() if is_known else other
            assert await process.unmute("m0", LIMITS)
            assert await process.mute("m1", Mute(drop=True), LIMITS)
            assert await process.mute("new", Mute(), LIMITS)

        async def change_shards() -> None:
            await backend.operations.reshard(3)
            while await backend.operations.drain():
                pass  # somebody has muted what the old ones have

        yield change_shards(), change_mutes
        while await backend.operations.drain():
            pass
        expected = {**mutes, "m1": (0, True), "new": (0, False)}
        del expected["m0"]
        assert await mutes_of(await place.process()) == expected

    await between_any_two_steps(server, scene)


@pytest.mark.thorough
async def test_a_change_that_is_killed_at_any_step_loses_no_mute(server: Server) -> None:
    moment, was_cancelled = 0, True
    while was_cancelled:
        moment += 1
        async with new_place(server) as place:
            killed, mutes = await some_mutes(place)
            was_cancelled = (await at_awaits(change(killed, 3), moment, 1)).was_cancelled
            await killed.aclose()
            second = await place.process()
            await change(second, 3)
            assert await mutes_of(await place.process()) == mutes
            assert place.left_of(Layout(2)) == []
    assert moment > 10


class Once(Driven):
    """Drives a coroutine, and does something else, to its end, as soon as a namespace has gone over to a layout."""

    def __init__(self, coroutine: Call, place: Place, layout: Layout, then: Work) -> None:
        super().__init__(coroutine)
        self._place, self._layout, self._then = place, layout, then
        self.is_done = False

    def suspended(self) -> Generator[Any, Any, object]:
        current = self._place.server.ask("HGET", f"{{{self._place.namespace}}}:layout", "current")
        if not self.is_done and current == self._layout.version.encode():
            self.is_done = True
            yield from self._then().__await__()


async def test_what_a_killed_change_has_announced_holds_no_longer_than_it_is_said(server: Server) -> None:
    """Neither is anything dropped that was unmuted since, nor delivered that is muted for longer."""
    moment, was_cancelled, were_left = 0, True, 0
    while was_cancelled:
        moment += 1
        async with new_place(server) as place:
            killed, mutes = await some_mutes(place)
            was_cancelled = (await at_awaits(killed.operations.reshard(3), moment, 1)).was_cancelled
            await killed.aclose()
            with server.client() as client:
                were_left += any(client.exists(f"{tag}silences") for tag in place.tags(Layout(3, 2)))
            second = await place.process()
            assert await second.unmute("m4", LIMITS)
            assert await second.mute("m3", Mute(), LIMITS)

            async def use(place: Place = place) -> None:
                backend = await place.process()
                for key in ("m3", "m4"):
                    await add(backend, key, "a")
                    assert await held(backend, key) == ["a"]
                place.now += MINUTE * 1_000
                for shard in backend.shard_map.live:
                    assert "m3" not in {lease.key for lease in await claim(backend, shard)}

            await Once(second.operations.reshard(3), place, Layout(3, 2), use)
            await finish(second)
            assert await mutes_of(await place.process()) == {"m0": mutes["m0"], "m2": mutes["m2"], "m3": (0, False)}
            assert not place.left_of(Layout(2))
    assert were_left > 3


async def test_two_processes_that_announce_mutes_at_once_take_none_of_the_other_away(server: Server) -> None:
    @asynccontextmanager
    async def scene(place: Place) -> AsyncGenerator[tuple[Call, Work]]:
        backend, mutes = await some_mutes(place)
        other = await place.process()

        async def change_and_mute() -> None:
            await other.operations.reshard(3)
            assert await other.mute("new", Mute(), LIMITS)
            assert await mutes_of(other) == {**mutes, "new": (0, False)}

        yield backend.operations.reshard(3), change_and_mute
        assert await mutes_of(backend) == {**mutes, "new": (0, False)}

    await between_any_two_steps(server, scene)


async def test_a_shard_in_which_mutes_were_announced_has_no_mark_after_the_change(place: Place) -> None:
    backend, _ = await some_mutes(place)
    assert await backend.operations.reshard(3)
    versions = {place.server.ask("HGET", f"{tag}layout", "version") for tag in place.tags(Layout(3, 2))}
    assert versions - {None} == {b"2:3:2"}


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unheard of"])
@pytest.mark.parametrize("is_old", [True, False], ids=["old", "new"])
async def test_a_close_that_mutes_does_so_in_both_layouts(place: Place, is_old: bool, is_known: bool) -> None:
    """Also if nobody drains the old one again."""
    worker, other = await place.process(1), await place.process()
    shard = await add(worker, "k", "a")
    leases = await claim(worker, shard)
    assert await other.operations.reshard(3)
    assert await other.operations.drain() == {"leased": 1}
    if is_known or not is_old:
        await worker.namespace.look_up()
    await add(other, "k", "b")
    if not is_old:
        shard = worker.shard_map.shard_of("k")
        await close(worker, 0, *leases)
        leases = await claim(worker, shard)
    [lease] = leases
    mute = Close(lease, 1, 0, 0, LIMITS, LEASE, dead_letters=[NewDeadLetter("gone")], mute=True)
    assert await worker.close(shard, [mute]) == [Closed("closed")]
    for each in await other.operations.look_all("k"):
        assert (each.mute_ms, each.drops) == (0, True)
    await add(other, "k", "c")
    place.now += MINUTE
    for each_shard in other.shard_map.live:
        with suppress(Retired):
            assert await claim(other, each_shard) == []
    assert (await other.operations.counts())["muted"] == 1


async def test_records_that_wait_under_a_mute_keep_their_old_shard_until_they_are_delivered(place: Place) -> None:
    old, new = await place.process(1), await place.process()
    await add(old, "k", "a", policy=LATER)
    assert await old.mute("k", Mute(), LIMITS)
    assert await new.operations.reshard(4)
    assert await new.operations.drain() == {"mutes": 1}
    await add(new, "k", "b")
    assert [await claim(new, shard) for shard in new.shard_map.live] == [[]] * 5
    assert await held(new, "k") == ["a", "b"]
    assert await new.unmute("k", LIMITS)
    assert await new.flush("k")
    for shard in new.shard_map.live:
        for lease in await claim(new, shard):
            await close(new, shard, lease)
    await finish(new)
    assert await mutes_of(new) == {}


async def test_a_mute_of_a_timeline_that_is_broken_is_named_when_all_else_has_moved(place: Place) -> None:
    old = await place.process(1)
    for key in ("broken", "sound"):
        await old.mute(key, Mute(), LIMITS)
    meta = old.namespace.key(0, "meta:broken")
    with place.server.client() as client:
        client.set(meta, "not ours", px=3_600_000)
        assert await old.operations.reshard(2)
        with pytest.raises(InvalidState, match="'broken' is broken"):
            await old.operations.drain()
        client.delete(meta)
    await finish(old)
    assert set(await mutes_of(old)) == {"broken", "sound"}
