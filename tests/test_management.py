from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from math import inf, nan
from typing import Any

import pytest
from engines import START, Inbox, WatchedBackend, delivering, engine_on, forever, holding, lasting, now, policy, settle

from aiodigest import ConfigurationError, DigestEngine, Policy, RetryPolicy
from aiodigest import engine as engine_module
from aiodigest.backend import Move, StoredDeadLetter
from aiodigest.errors import AiodigestError, BackendUnavailable, InvalidArgument, InvalidState, PartialAdd, Reject
from aiodigest.models import JSON, Activity, DeadLetter, Digest, Entry, Health, Stats, Timeline

pytestmark = pytest.mark.virtual_time

RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 100.0)


def clock(seconds: float) -> datetime:
    """The time of a test as the server shows it."""
    return datetime.fromtimestamp(START + seconds, UTC)


def about(seconds: float) -> Any:
    """The same, but for what settling takes."""
    return pytest.approx(clock(seconds), abs=timedelta(milliseconds=2))


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PAGE", 2)


async def look(engine: DigestEngine[JSON], key: str = "key") -> Timeline[JSON]:
    timeline = await engine.peek(key)
    assert timeline is not None
    return timeline


def values(found: Timeline[JSON] | DeadLetter[JSON] | Digest[JSON]) -> list[JSON | bytes]:
    return [record.value for record in found.records]


async def letters_of(engine: DigestEngine[JSON]) -> list[DeadLetter[JSON]]:
    return [letter async for letter in engine.dead_letters()]


@asynccontextmanager
async def after_delivery(*replies: BaseException, **options: Any) -> AsyncGenerator[tuple[DigestEngine[JSON], Inbox]]:
    """An engine that has delivered a record of a timeline "key", and its inbox."""
    inbox = Inbox(*replies)
    async with delivering(inbox, **options) as (engine, _):
        await engine.add("key", 1)
        await inbox.outcome()
        await settle()
        yield engine, inbox


async def test_peek_shows_a_timeline_and_leaves_it_as_it_is() -> None:
    async with engine_on(WatchedBackend(), policy=Policy(initial_delay=60)) as engine:
        await engine.add("key", "b", record_id="x")
        await engine.add("key", "a", record_id="y", timestamp=5)
        seen = await look(engine)
        assert await look(engine) == seen
    assert seen == Timeline("key", "waiting", clock(90), records=seen.records, size=2)
    assert values(seen) == ["a", "b"]


async def test_peek_shows_what_is_under_delivery_and_what_came_since() -> None:
    inbox = Inbox(lasting(5))
    async with delivering(inbox) as (engine, _):
        await engine.add("key", 1)
        await inbox.digest()
        await engine.add("key", 2)
        seen = await look(engine)
        assert (seen.state, seen.attempt, seen.digest_id) == ("leased", 1, inbox.digests[0].id)
        assert values(seen) == [1, 2]


@pytest.mark.parametrize(
    ("replies", "told"),
    [
        ([ValueError("smtp is down")], (1, "ValueError: smtp is down", about(100), None, 0)),
        ([], (0, None, about(300), about(300), 1)),
    ],
)
async def test_peek_shows_why_a_timeline_waits(replies: list[BaseException], told: Sequence[object]) -> None:
    async with after_delivery(*replies, retry=RETRY, policy=Policy(increment_delay=0)) as (engine, _):
        await engine.add("key", 2)
        seen = await look(engine)
    assert (seen.attempt, seen.last_error, seen.due, seen.cool_until, seen.iteration) == told


async def test_a_value_that_cannot_be_decoded_is_shown_raw() -> None:
    backend = WatchedBackend()
    await backend.put("key", "text", 5)
    async with engine_on(backend, value_type=str) as engine:
        assert values(await look(engine)) == ["text", b"\x015"]


async def test_timelines_are_listed_by_state_earliest_due_first() -> None:
    inbox = Inbox(forever)
    async with delivering(inbox, concurrency=1, drain_timeout=0) as (engine, backend):
        await engine.add("leased", 1)
        await inbox.digest()
        for number in range(3):
            await backend.put(f"waiting-{number}", 1, policy=policy(initial_delay=100 - number))
        await engine.add("ready", 1)
        states: dict[Any, list[str]] = {
            "waiting": ["waiting-2", "waiting-1", "waiting-0"], "ready": ["ready"], "leased": ["leased"]
        }  # fmt: skip
        for state, keys in states.items():
            assert [timeline.key async for timeline in engine.timelines(state)] == keys
        listed = [(timeline.state, timeline.key) async for timeline in engine.timelines()]
    assert sorted(listed) == sorted((state, key) for state, keys in states.items() for key in keys)


async def test_all_timelines_are_listed_though_each_is_deleted_once_it_was_seen() -> None:
    backend = WatchedBackend(shards=2)
    for number in range(17):
        await backend.put(f"key-{number}", 1, policy=policy(initial_delay=number % 3 * 100))
    async with engine_on(backend) as engine:
        deleted = [await engine.delete(timeline.key) async for timeline in engine.timelines()]
    assert deleted == [True] * 17


async def test_a_list_of_timelines_ends_though_each_is_put_off_once_it_was_seen() -> None:
    backend = WatchedBackend()
    for number in range(5):
        await backend.put(f"key-{number}", 1, policy=policy(initial_delay=100 + number))
    listed: list[str] = []
    async with engine_on(backend) as engine:
        async for timeline in engine.timelines("waiting"):
            listed.append(timeline.key)
            await engine.reschedule(timeline.key, delay=1_000 + len(listed))
    assert listed == [f"key-{number}" for number in range(5)]


async def test_an_unknown_state_is_refused_and_the_known_ones_are_named() -> None:
    state: Any = "sleeping"
    async with engine_on(WatchedBackend()) as engine:
        with pytest.raises(InvalidArgument, match="waiting, ready, leased"):
            await anext(aiter(engine.timelines(state)))


async def test_stats_count_timelines_by_state_and_what_happened() -> None:
    inbox = Inbox(None, Reject("no"))
    async with delivering(inbox, policy=policy(capacity=4, initial_delay=1)) as (engine, backend):
        await engine.add_many(Entry("key", value) for value in range(10))
        await inbox.outcome()
        await engine.add("bad", 1)
        await inbox.outcome(2)
        await settle()
        await backend.put("later", 1, policy=policy(initial_delay=60))
        stats = await engine.stats()
    assert stats == Stats(waiting=1, dead=1, digests=1, delivered=4, dropped=6, buried=1, oldest_due=stats.oldest_due)
    assert stats.oldest_due == about(62)


async def test_what_is_made_due_by_hand_wakes_the_worker_of_its_own_process_although_the_doorbell_is_silent() -> None:
    inbox, backend = Inbox(Reject("no")), WatchedBackend(held="wait")
    async with delivering(inbox, backend, policy=policy(initial_delay=600)) as (engine, _):
        await engine.add("key", 1)
        await settle()
        await engine.flush("key")
        await inbox.outcome()
        await settle()
        [letter] = await letters_of(engine)
        await settle()
        await engine.replay(letter.id)
        await settle()
        await engine.reschedule("key", delay=1)
        await inbox.outcome(2)
        assert now() == pytest.approx(1, abs=0.1)


async def test_delete_during_a_delivery_cancels_it_and_a_later_add_starts_anew() -> None:
    ended: list[float] = []

    async def callback(digest: Digest[JSON]) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(now())

    inbox = Inbox(callback)
    async with delivering(inbox) as (engine, _):
        await engine.add("key", 1)
        await inbox.digest()
        assert [await engine.delete("key") for _ in range(2)] == [True, False]
        assert await engine.add("key", 2)
        await inbox.digest(2)
        await asyncio.sleep(60)
    assert ended == pytest.approx([20], abs=0.1)
    assert inbox.values == [[1], [2]]


async def test_a_delivery_whose_timeline_was_deleted_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(lasting(5))
    async with delivering(inbox) as (engine, _):
        await engine.add("key", 1)
        await inbox.digest()
        await engine.delete("key")
        await inbox.outcome()
    assert not caplog.messages


async def test_remove_drops_one_record_and_respects_the_timeline_s_own_capacity() -> None:
    small = Policy(capacity=2)
    async with engine_on(WatchedBackend(), policy=lambda key: small) as engine:  # pyright: ignore[reportUnknownLambdaType]
        for name in "abc":
            await engine.add("key", name, record_id=name)
        assert [await engine.remove("key", "c") for _ in range(2)] == [True, False]
        assert values(await look(engine)) == ["b"]


async def test_reschedule_moves_a_waiting_timeline_to_a_time_or_by_a_delay() -> None:
    inbox = Inbox()
    async with delivering(inbox, policy=policy(initial_delay=600, maximum_delay=1800)) as (engine, _):
        await engine.add("key", 1)
        assert await engine.reschedule("key", at=clock(900)) == clock(900)
        assert await engine.reschedule("key", at=START + 800) == clock(800)
        assert await engine.reschedule("key", delay=timedelta(minutes=1)) == clock(60)
        await inbox.digest()
        assert now() == pytest.approx(60, abs=0.01)


async def test_reschedule_without_a_time_takes_what_the_policy_says_today() -> None:
    delay = 600

    def choose(key: str) -> Policy:
        return policy(initial_delay=delay)

    inbox = Inbox()
    async with delivering(inbox, policy=choose) as (engine, _):
        await engine.add("key", 1)
        delay = 30
        assert await engine.reschedule("key") == clock(30)
        await inbox.digest()
        assert now() == pytest.approx(30, abs=0.01)


async def test_reschedule_in_a_cool_down_takes_what_the_strategy_says_today() -> None:
    gap = 600.0

    def choose(key: str) -> Policy:
        return Policy(minimum_delay=lambda iteration: gap * iteration, increment_delay=0)

    async with after_delivery(policy=choose) as (engine, inbox):
        await engine.add("key", 2)
        gap = 50
        assert await engine.reschedule("key") == about(50)
        await inbox.digest(2)
        assert now() == pytest.approx(50, abs=0.01)


async def test_reschedule_leaves_what_is_due_at_an_hour_that_has_not_changed() -> None:
    def choose(key: str) -> Policy:
        return policy(initial_delay=600 - now())

    async with delivering(Inbox(), policy=choose) as (engine, _):
        await engine.add("key", 1)
        await asyncio.sleep(300)
        assert await engine.reschedule("key") == clock(600)


async def test_reschedule_of_a_cool_down_without_records_takes_what_the_policy_says_today() -> None:
    gap = 600.0

    def choose(key: str) -> Policy:
        return Policy(minimum_delay=gap)

    async with after_delivery(policy=choose) as (engine, _):
        with pytest.raises(InvalidState, match="no records"):
            await engine.reschedule("key", delay=5)
        gap = 0
        assert await engine.reschedule("key") == pytest.approx(clock(0), abs=timedelta(milliseconds=1))
        assert await engine.add("key", 2)


async def test_reschedule_moves_the_next_try_of_a_digest_that_failed() -> None:
    async with after_delivery(ValueError(), retry=RETRY) as (engine, inbox):
        with pytest.raises(InvalidState, match="retry"):
            await engine.reschedule("key")
        await engine.reschedule("key", delay=7)
        await inbox.digest(2)
        assert now() == pytest.approx(7, abs=0.01)


async def test_a_reschedule_that_meets_a_close_looks_again() -> None:
    class Busy(WatchedBackend):
        outdated = 2

        async def reschedule(self, key: str, move: Move) -> int | None:
            if self.outdated:
                self.outdated -= 1
                return None
            return await super().reschedule(key, move)

    async with engine_on(Busy(), policy=policy(initial_delay=600)) as engine:
        await engine.add("key", 1)
        assert await engine.reschedule("key", delay=5) == clock(5)


@pytest.mark.parametrize(
    "options",
    [
        *({"at": at} for at in (nan, inf, True, "noon", datetime(2026, 1, 1), 1e300)),
        *({"delay": delay} for delay in (nan, -1, "5m", True)),
        {"at": 5, "delay": 5},
    ],
)
async def test_a_reschedule_to_no_time_is_refused_and_changes_nothing(options: dict[str, Any]) -> None:
    async with engine_on(WatchedBackend(), policy=policy(initial_delay=600)) as engine:
        await engine.add("key", 1)
        before = await look(engine)
        with pytest.raises(InvalidArgument):
            await engine.reschedule("key", **options)
        assert await look(engine) == before


@pytest.mark.parametrize("key", ["", "k" * 1025, "\ud800", 5, None])
async def test_a_key_that_is_none_is_refused_everywhere(key: Any) -> None:
    async with engine_on(WatchedBackend()) as engine:
        for call in (engine.flush, engine.delete, engine.peek, engine.reschedule):
            with pytest.raises(InvalidArgument, match="key must"):
                await call(key)
        for call in (engine.dead_letter, engine.replay, engine.discard):
            with pytest.raises(InvalidArgument, match="dead letter must"):
                await call(key)
        with pytest.raises(InvalidArgument, match="key must"):
            await engine.remove(key, "x")
        with pytest.raises(InvalidArgument, match="record_id must"):
            await engine.remove("key", key)


async def buried(engine: DigestEngine[JSON], inbox: Inbox, key: str, *values: JSON) -> str:
    """Add records whose delivery ``inbox`` rejects; the id of their dead letter."""
    await engine.add_many(Entry(key, value, str(value)) for value in values)
    await inbox.outcome()
    await settle()
    [letter] = await letters_of(engine)
    return letter.id


async def test_a_dead_letter_tells_what_it_holds_and_why() -> None:
    inbox = Inbox(Reject("address gone"))
    async with delivering(inbox, policy=policy(initial_delay=1)) as (engine, _):
        letter_id = await buried(engine, inbox, "key", 1, 2)
        [letter] = await letters_of(engine)
    [digest] = inbox.digests
    assert letter == DeadLetter(letter_id, "key", "address gone", letter.buried_at, 1, digest.id, letter.records)
    assert letter.buried_at == about(1)
    assert values(letter) == [1, 2]


async def test_one_dead_letter_is_shown_by_its_id_though_there_are_others() -> None:
    inbox = Inbox(Reject("no"), Reject("gone"))
    async with delivering(inbox, WatchedBackend(shards=3)) as (engine, _):
        await engine.add_many(Entry(f"key-{number}", number) for number in range(2))
        await inbox.outcome(2)
        letters = await letters_of(engine)
        assert [await engine.dead_letter(letter.id) for letter in letters] == letters
        assert await engine.dead_letter("nothing") is None
    assert {letter.reason for letter in letters} == {"no", "gone"}


async def test_all_dead_letters_are_listed_though_each_is_discarded_once_it_was_seen() -> None:
    inbox, backend = Inbox(*[Reject("no")] * 17), WatchedBackend(shards=2)
    for number in range(17):
        await backend.put(f"key-{number}", number)
    async with delivering(inbox, backend) as (engine, _):
        await inbox.outcome(17)
        await settle()
        discarded = [await engine.discard(letter.id) async for letter in engine.dead_letters()]
        assert discarded == [True] * 17
        assert (await engine.stats()).dead == 0


async def test_a_dead_letter_that_is_listed_is_read_from_its_shard_alone_and_left_out_if_it_has_gone() -> None:
    class Asked(WatchedBackend):
        async def dead_letter(self, letter_id: str, shard: int | None = None) -> StoredDeadLetter | None:
            asked.append(shard)
            return await super().dead_letter(letter_id, shard) if len(asked) > 1 else None

    asked: list[int | None] = []
    inbox, backend = Inbox(*[Reject("no")] * 9), Asked(shards=3)
    for number in range(9):
        await backend.put(f"key-{number}", number)
    async with delivering(inbox, backend) as (engine, _):
        await inbox.outcome(9)
        await settle()
        listed = [backend.shard_map.shard_of(letter.key) for letter in await letters_of(engine)]
    assert (len(listed), asked[1:]) == (8, listed)


async def test_replay_delivers_a_dead_letter_again_and_drops_it_although_the_doorbell_is_silent() -> None:
    inbox, backend = Inbox(Reject("no")), WatchedBackend(held="wait")
    async with delivering(inbox, backend, policy=policy()) as (engine, _):
        letter_id = await buried(engine, inbox, "key", 1)
        assert await engine.replay(letter_id)
        await inbox.outcome(2)
        assert now() < 0.1
        assert not await letters_of(engine)
        with pytest.raises(InvalidState, match="no dead letter"):
            await engine.replay(letter_id)
    assert [(digest.attempt, values(digest)) for digest in inbox.digests] == [(1, [1]), (1, [1])]


async def test_a_replay_by_an_engine_without_a_policy_keeps_limits_and_due_time() -> None:
    inbox, daily = Inbox(Reject("no"), Reject("no")), policy(initial_delay=3600, maximum_delay=7200, max_size=3)
    async with delivering(inbox, policy=daily) as (engine, backend):
        first = await buried(engine, inbox, "key", 1, 2, 3)
        await engine.add("key", 4)
        await inbox.outcome(2)
        await settle()
        [second] = {letter.id for letter in await letters_of(engine)} - {first}
        await engine.add("key", 5)
        due = (await look(engine)).due
        other = DigestEngine(namespace="other", backend=backend)
        with other.replace_backend(backend):
            assert not await other.replay(second)
            assert (await look(engine)).due == due
            assert await other.replay(first)
        await settle()
    assert [len(digest.records) for digest in inbox.digests] == [3, 1, 3, 2]


async def test_an_engine_is_healthy_while_its_server_answers_and_nothing_is_overdue() -> None:
    backend = WatchedBackend()
    async with engine_on(backend) as engine:
        await engine.add("key", 1)
        await asyncio.sleep(60)
        assert await engine.health() == Health(True, "", 60)
        await asyncio.sleep(1)
        late = await engine.health()
        assert (late.ok, late.overdue) == (False, 61)
        assert "due for 61 s" in late.reason
        assert (await engine.health(overdue=timedelta(minutes=2))).ok
        backend.take_down("counts")
        away = await engine.health()
        assert (away.ok, away.overdue) == (False, 0)
        assert "connection refused" in away.reason
        with pytest.raises(InvalidArgument, match="overdue"):
            await engine.health(overdue=-1)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_who_asks_for_the_health_of_an_engine_that_is_then_left_is_answered(is_answered: bool) -> None:
    backend = WatchedBackend(held="counts")
    async with engine_on(backend, timeout=1) as engine:
        asking = asyncio.create_task(engine.health())
        await settle()
    if is_answered:
        backend.gates["counts"].set()
    assert (await asking).reason == ("" if is_answered else "no answer within 1 s")


@pytest.mark.parametrize("error", [BackendUnavailable("MISCONF"), ConfigurationError("NOPERM")])
@pytest.mark.parametrize("many", [True, False])
async def test_an_engine_whose_adds_a_server_refuses_is_not_healthy_although_it_answers(
    error: AiodigestError, many: bool
) -> None:
    backend = WatchedBackend()
    async with engine_on(backend) as engine:
        backend.down["add"] = error
        with suppress(PartialAdd, BackendUnavailable, ConfigurationError):
            await (engine.add_many([Entry("key", 1)]) if many else engine.add("key", 1))
        assert await engine.health() == Health(False, f"adds or claims fail: {error}")
        backend.bring_up()
        await engine.add("key", 1)
        assert (await engine.health()).ok
        backend.down["add"] = error
        with suppress(BackendUnavailable, ConfigurationError):
            await engine.add("key", 1)
        await asyncio.sleep(61)
        assert (await engine.health(overdue=100)).ok, "nobody adds any more"


async def test_an_engine_whose_claims_a_server_refuses_is_not_healthy_although_it_answers() -> None:
    backend = WatchedBackend()
    async with delivering(Inbox(), backend) as (engine, _):
        await settle()
        backend.down["claim"] = BackendUnavailable("MISCONF")
        await engine.add("key", 1)
        await asyncio.sleep(1)
        assert (await engine.health()).reason == "adds or claims fail: MISCONF"
        backend.bring_up()
        await asyncio.sleep(2)
        assert (await engine.health()).ok


async def test_activity_tells_what_an_engine_does_in_this_process() -> None:
    backend, ends = WatchedBackend(), asyncio.Event()
    engine = engine_on(backend)
    assert engine.activity == Activity()

    async def deliver(digest: Digest[JSON]) -> None:
        await ends.wait()

    async with engine.delivering(deliver):
        await engine.add("one", 1)
        with pytest.raises(PartialAdd):
            await engine.add_many([Entry("two", 2), Entry("", 3)])
        await settle()
        assert engine.activity == Activity(adds=2, delivering=2)
        ends.set()
        backend.take_down()
        with pytest.raises(BackendUnavailable):
            await engine.add("one", 4)
        assert engine.activity.unavailable
        backend.bring_up()
        await engine.add("one", 4)
        await asyncio.sleep(2)
        assert engine.activity == Activity(adds=3)
    assert engine.activity == Activity(adds=3)


async def test_a_worker_that_began_before_its_server_is_available_once_it_is_there() -> None:
    inbox, backend = Inbox(), await holding(1)
    backend.take_down()
    async with delivering(inbox, backend) as (engine, _):
        await asyncio.sleep(600)
        assert engine.activity.unavailable
        assert not (await engine.health()).ok
        backend.bring_up()
        await inbox.outcome()
        assert now() < 600 + 6.1
        assert not engine.activity.unavailable
        backend.gates["counts"] = asyncio.Event()
        assert "no answer within" in (await engine.health()).reason
        assert not engine.activity.unavailable, "a look is no add, and no claim"
