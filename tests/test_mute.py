"""Mutes: nothing of a timeline is delivered until a time, or until it is unmuted; on every store, and in an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from stores import DAY, LEASE, MINUTE, NOW, Store, ids

from aiodigest import (
    Digest,
    DigestEngine,
    Hours,
    InvalidArgument,
    InvalidState,
    Policy,
    Reject,
    RetryPolicy,
)
from aiodigest.backend import NEVER_MS, Add, Close, Move, Mute, NewDeadLetter
from aiodigest.errors import AiodigestError
from aiodigest.records.entries import pack
from aiodigest.testing import TestEngine

ENDLESS = Mute()
WEEK = 7 * DAY


async def mute(store: Store, key: str, minutes: float | None = None, *, drop: bool = False) -> bool:
    until = None if minutes is None else store.now + int(minutes * MINUTE)
    return await store.backend.mute(key, Mute(until, drop=drop), store.policy.terms.limits)


async def unmute(store: Store, key: str) -> bool:
    return await store.backend.unmute(key, store.policy.terms.limits)


# What is muted waits


async def test_what_is_added_under_a_mute_waits_and_is_due_at_once_when_it_is_unmuted(store: Store) -> None:
    assert await mute(store, "k")
    assert await store.add("k", "a", "b") == [False, False]
    store.now += DAY
    assert not (await store.claims()).leases
    assert await store.state("k") == "muted"
    assert await unmute(store, "k")
    lease = await store.claim()
    assert (ids(lease), lease.due_ms) == (["a", "b"], store.now), "due when it was unmuted: nobody was late"
    assert not await unmute(store, "k")


async def test_a_mute_that_ends_is_over_for_the_next_claim_which_is_told_when(store: Store) -> None:
    await store.add("k", "a")
    await mute(store, "k", 10)
    await store.claims()  # which looks what waits there
    claims = await store.claims()
    assert (claims.leases, claims.wait_ms) == ([], 10 * MINUTE)
    store.now += 10 * MINUTE - 1
    assert not (await store.claims()).leases
    store.now += 1
    assert (await store.claim()).due_ms == store.now
    assert (await store.backend.operations.counts()).get("mutes", 0) == 0


async def test_a_timeline_that_would_be_due_after_its_mute_is_due_when_it_would_have_been(store: Store) -> None:
    later = Policy(initial_delay=1_200)
    await store.add("k", "a", policy=later)
    await mute(store, "k", 10)
    assert await store.due("k") == 20 * MINUTE
    await store.add("k", "b", policy=later)
    store.now += 10 * MINUTE
    await store.claims(0)
    assert (await store.state("k"), await store.due("k")) == ("waiting", 20 * MINUTE), "nothing pushed it meanwhile"


async def test_an_add_after_the_end_of_a_mute_finds_it_over_though_nobody_looked(store: Store) -> None:
    await mute(store, "k", 1, drop=True)
    store.now += MINUTE
    assert await store.add("k", "a") == [True]


async def test_a_full_timeline_is_due_when_its_mute_ends(store: Store) -> None:
    small = Policy(initial_delay=1_200, max_size=2)
    await mute(store, "k", 1)
    await store.add("k", "a", "b", "c", policy=small)
    store.now += MINUTE
    assert ids(await store.claim()) == ["a", "b", "c"]


async def test_a_timeline_with_as_many_bytes_as_a_digest_may_have_is_due_when_its_mute_ends(store: Store) -> None:
    sized = Policy(initial_delay=1_200, max_bytes=100)
    await mute(store, "k", 1)
    assert await put(store, "a", "b", policy=sized, size=50) == [False, False]
    assert not (await store.claims()).leases
    store.now += MINUTE
    assert ids(await store.claim()) == ["a", "b"]


async def put(store: Store, *records: str, policy: Policy = Policy(), urgent: bool = False, size: int = 0) -> object:
    entries = [pack(record.encode(), None, b"v") for record in records]
    return await store.backend.add(0, [Add("k", each, policy.terms, urgent=urgent, size=size) for each in entries])


PASSERS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "a flush": lambda store: store.backend.flush("k"),
    "an urgent add": lambda store: put(store, "b", urgent=True),
    "max_bytes": lambda store: put(store, "b", policy=Policy(max_bytes=10), size=10),
    "max_size records": lambda store: store.add("k", *"bcdefgh", policy=Policy(max_size=2)),
    "another mute": lambda store: mute(store, "k", 60),
    "time": lambda store: store.lapse(),
    "maintenance": lambda store: store.backend.maintenance(),
    "a schedule": lambda store: store.backend.schedule(store.now + DAY),
}


@pytest.mark.parametrize("passer", PASSERS)
async def test_nothing_passes_a_mute(store: Store, passer: str) -> None:
    await store.add("k", "a")
    await mute(store, "k")
    await PASSERS[passer](store)
    assert not (await store.claims()).leases
    assert await store.backend.open(0, "k", LEASE, store.policy.terms.limits) is None
    assert await store.state("k") == "muted"


async def test_a_muted_timeline_cannot_be_rescheduled_and_a_flush_says_that_it_does_nothing(store: Store) -> None:
    await store.add("k", "a", policy=Policy(initial_delay=60))
    await mute(store, "k")
    assert not await store.backend.flush("k")
    with pytest.raises(InvalidState, match="not waiting"):
        await store.backend.reschedule("k", Move(store.policy.terms, delay_ms=0))


async def test_a_flush_of_what_is_muted_does_nothing_for_what_comes_under_delivery_either(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k")
    assert await put(store, "b", urgent=True) == [False]
    assert not await store.backend.flush("k")
    await store.close(lease, cool=10 * MINUTE)
    await unmute(store, "k")
    assert (await store.state("k"), await store.due("k")) == ("waiting", 10 * MINUTE), "its cool-down counts"


async def test_a_flush_after_a_mute_is_over_finds_it_over_though_nobody_looked(store: Store) -> None:
    await store.add("k", "a", policy=Policy(initial_delay=1_200))
    await mute(store, "k", 1)
    store.now += MINUTE
    assert await store.backend.flush("k")
    assert (await store.claim()).passes


async def test_a_dead_letter_that_is_replayed_under_a_mute_waits_too(store: Store) -> None:
    await store.add("k", "a")
    await store.close(await store.claim(), letter="boo")
    await mute(store, "k")
    await store.add("k", "b")
    [letter] = (await store.backend.operations.dead_letters(0, 10)).items
    assert not await store.backend.replay(letter, store.policy.terms, False)
    assert await store.held("k") == [("a", "v"), ("b", "v")]
    store.now += DAY
    assert not (await store.claims()).leases


# A delivery under way

ENDINGS: dict[str, tuple[Callable[[Store, object], Awaitable[object]], list[str]]] = {
    "closed": (lambda store, lease: store.close(lease), ["b"]),  # type: ignore[arg-type]
    "failed": (lambda store, lease: store.retry(lease), ["a", "b"]),  # type: ignore[arg-type]
    "released": (lambda store, lease: store.release(lease, started=True), ["a"]),  # type: ignore[arg-type]
    "postponed": (lambda store, lease: store.postpone(lease), ["a", "b"]),  # type: ignore[arg-type]
    "lost": (lambda store, lease: store.lapse(), ["a"]),
    "recovered": (lambda store, lease: recovered(store), ["a"]),
}


async def recovered(store: Store) -> None:
    await store.lapse()
    await store.backend.maintenance()


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_delivery_under_way_ends_and_what_it_leaves_waits_under_the_mute(store: Store, ending: str) -> None:
    end, left = ENDINGS[ending]
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k")
    assert await store.state("k") == "leased"
    await store.add("k", "b")
    await end(store, lease)
    for _ in range(6):  # longer than its retry wait and its cool-down
        await store.lapse()
        assert not (await store.claims()).leases
    assert await store.state("k") == "muted"
    await unmute(store, "k")
    assert ids(await store.claim()) == left


async def test_a_late_close_of_a_muted_digest_still_wins(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k")
    await store.lapse()
    await store.claims()
    assert await store.state("k") == "muted"
    assert (await store.close(lease)).status == "closed"
    assert await store.held("k") == []
    assert await unmute(store, "k")
    assert await store.state("k") is None


async def test_a_late_renewal_of_a_muted_digest_leases_it_again(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k")
    await store.lapse()
    await store.claims()
    assert await store.backend.renew(0, [lease], LEASE) == [True]
    assert await store.state("k") == "leased"
    await unmute(store, "k")
    assert await store.state("k") == "leased"
    assert (await store.close(lease)).status == "closed"


async def test_a_retry_wait_goes_on_after_a_mute(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k", 1)
    await store.retry(lease, 5 * MINUTE)
    store.now += MINUTE
    assert not (await store.claims()).leases
    assert await store.due("k") == 5 * MINUTE
    store.now += 4 * MINUTE
    assert (await store.claim()).attempt == 2


# Dropping


async def test_a_mute_that_drops_counts_what_is_added_and_keeps_what_was_there(store: Store) -> None:
    await store.add("k", "a")
    await mute(store, "k", drop=True)
    assert await store.add("k", "b", "c") == [False, False]
    assert await store.held("k") == [("a", "v")]
    assert (await store.backend.operations.counts())["muted"] == 2
    await mute(store, "k")
    await store.add("k", "d")
    assert await store.held("k") == [("a", "v"), ("d", "v")], "a second mute replaces the first"


async def test_what_a_mute_drops_is_no_duplicate_and_what_it_keeps_may_be_one(store: Store) -> None:
    once = Policy(minimum_delay=0, dedupe_window=600)
    await put(store, "a", policy=once)
    lease = await store.claim()
    close = Close(lease, 1, 1, 0, once.terms.limits, LEASE, dedupe_ms=600_000)
    await store.backend.close(0, [close])
    await mute(store, "k", drop=True)
    await put(store, "a", "b", policy=once)
    counts = await store.backend.operations.counts()
    assert (counts["muted"], counts.get("duplicates", 0)) == (2, 0)
    await mute(store, "k")
    await put(store, "a", "b", policy=once)
    counts = await store.backend.operations.counts()
    assert (counts["muted"], counts["duplicates"]) == (2, 1)
    assert await store.held("k") == [("b", "v")]


async def test_what_is_added_under_delivery_is_dropped_too(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await mute(store, "k", drop=True)
    await store.add("k", "b")
    await store.close(lease)
    assert await store.held("k") == []
    assert (await store.backend.operations.counts())["muted"] == 1


async def test_a_close_that_mutes_sets_aside_and_from_then_on_drops_what_is_added(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await store.add("k", "b")
    limits = store.policy.terms.limits
    close = Close(lease, 1, 0, 0, limits, LEASE, dead_letters=[NewDeadLetter("no such mailbox")], mute=True)
    [closed] = await store.backend.close(0, [close])
    assert not isinstance(closed, AiodigestError)
    assert closed.status == "closed"
    assert len((await store.backend.operations.dead_letters(0, 10)).items) == 1
    await store.add("k", "c")
    store.now += MINUTE
    assert not (await store.claims()).leases
    assert await store.held("k") == [("b", "v")]
    window = await store.backend.operations.look("k")
    assert window is not None
    assert (window.state, window.mute_ms, window.drops) == ("muted", 0, True)


# How long it is kept


async def test_records_under_a_mute_without_end_expire_ttl_after_their_last_add_and_the_mute_stays(
    store: Store,
) -> None:
    store.policy = Policy(ttl=2_000)
    await mute(store, "k")
    await store.add("k", "a")
    await store.claims()
    store.now += 1_500_000
    await store.add("k", "b")
    store.now += 1_999_000
    assert not (await store.claims()).expired
    store.now += 2_000_000 // 64 + 1_000
    claims = await store.claims()
    assert [*claims.expired] == [("k", 2)]
    counts = await store.backend.operations.counts()
    assert (counts["expired"], counts["mutes"]) == (2, 1)
    await store.add("k", "c")
    assert await store.state("k") == "muted"


async def test_the_ttl_of_what_waits_counts_from_the_end_of_a_mute(store: Store) -> None:
    store.policy = Policy(ttl=2_000)
    await store.add("k", "a")
    await mute(store, "k", 24 * 60)
    await store.add("j", "b")
    await mute(store, "j", 24 * 60)
    store.now += DAY
    leases = (await store.claims()).leases
    assert {lease.key: ids(lease) for lease in leases} == {"k": ["a"], "j": ["b"]}


async def test_what_opens_under_a_mute_outlives_it_as_well(store: Store) -> None:
    store.policy = Policy(ttl=2_000)
    await mute(store, "k", 24 * 60)
    await store.add("k", "a")
    await store.claims()
    store.now += DAY
    assert ids(await store.claim()) == ["a"]


async def test_a_mute_without_records_outlives_everything(store: Store) -> None:
    await mute(store, "k", drop=True)
    store.now += 3_650 * DAY
    await store.claims()
    assert await store.add("k", "a") == [False]
    assert (await store.backend.operations.counts())["muted"] == 1


async def test_a_delete_drops_the_records_and_keeps_the_mute(store: Store) -> None:
    await store.add("k", "a")
    await mute(store, "k")
    assert await store.backend.delete("k")
    assert not await store.backend.delete("k")
    assert await store.state("k") == "muted"
    await store.claims()
    await store.add("k", "b")
    assert await store.state("k") == "muted"


# Looking


async def test_all_mutes_are_listed_the_first_to_end_first(store: Store) -> None:
    await store.add("leased", "a")
    await store.claim()
    await store.add("held", "a")
    await mute(store, "leased", 1)
    await mute(store, "held", 2, drop=True)
    await mute(store, "empty", 3)
    await mute(store, "for ever")
    await mute(store, "over", 4)
    assert not await mute(store, "over", -1), "a time that has passed unmutes"
    page = await store.backend.operations.page(0, "muted", 10)
    assert [(each.key, each.state, each.mute_ms, each.drops) for each in page.items] == [
        ("leased", "leased", NOW + MINUTE, False),
        ("held", "muted", NOW + 2 * MINUTE, True),
        ("empty", "muted", NOW + 3 * MINUTE, False),
        ("for ever", "muted", 0, False),
    ]
    assert page.items[-1].due_ms == NEVER_MS


async def test_a_muted_timeline_is_never_overdue(store: Store) -> None:
    await store.add("k", "a")
    await mute(store, "k")
    store.now += DAY
    counts = await store.backend.operations.counts()
    assert (counts.get("overdue_ms", 0), counts.get("oldest_due_ms"), counts["ready"]) == (0, None, 0)
    await unmute(store, "k")
    assert (await store.backend.operations.counts()).get("overdue_ms", 0) == 0


async def test_a_timeline_that_was_postponed_is_due_after_a_mute_when_it_was(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await store.postpone(lease, 10 * MINUTE)
    await mute(store, "k", 1)
    store.now += MINUTE
    await store.add("j", "b")
    leases = (await store.claims()).leases
    assert [lease.key for lease in leases] == ["j", "k"], "no later than it was unmuted, by the name then"


# The engine


class Time:
    """A callback that rejects what it is given, and says so for good."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[list[str]] = []

    async def __call__(self, digest: Digest[str]) -> None:
        self.seen.append([record.id for record in digest.records])
        if self.error:
            raise self.error


def engine_of(callback: Time, policy: Policy = Policy()) -> DigestEngine[str]:
    engine = DigestEngine("redis://nowhere", namespace="mail", value_type=str, policy=policy, retry=RetryPolicy(3))
    engine.deliver(callback)
    return engine


@pytest.mark.parametrize("server", [False, True], ids=["memory", "server"])
async def test_an_engine_snoozes_a_timeline_in_a_test(server: bool) -> None:
    box = Time()
    engine = engine_of(box)
    async with TestEngine(engine, server=server) as t:
        await engine.mute("ann", timedelta(hours=8))
        assert await engine.add("ann", "hello", record_id="a") is False
        await t.advance(hours=7, minutes=59)
        assert box.seen == []
        found = await engine.peek("ann")
        assert found is not None
        assert (found.state, found.muted, found.muted_until, found.drops) == (
            "muted", True, t.now + timedelta(minutes=1), False,
        )  # fmt: skip
        await t.advance(minutes=1)
        assert box.seen == [["a"]]
        assert (await engine.stats()).mutes == 0


@pytest.mark.parametrize("server", [False, True], ids=["memory", "server"])
@pytest.mark.parametrize("ends", ["by itself", "by hand"])
async def test_what_a_mute_releases_at_night_goes_out_in_the_morning(ends: str, server: bool) -> None:
    box, night = Time(), datetime(2030, 1, 1, 20, tzinfo=UTC)
    engine = engine_of(box, Policy(hours=Hours("08:00-20:00")))
    async with TestEngine(engine, start=night - timedelta(minutes=1), server=server) as t:
        await engine.mute("ann", night + timedelta(hours=5) if ends == "by itself" else None)
        await engine.add("ann", "hello", record_id="a")
        await t.advance(hours=6)
        await engine.unmute("ann")
        await t.advance(hours=6)
        assert box.seen == []
        await t.advance(minutes=1)
        assert box.seen == [["a"]]


async def test_it_is_told_until_when_a_timeline_is_muted_and_when_it_will_be_due() -> None:
    start = datetime(2030, 1, 1, 12, tzinfo=UTC)
    engine = engine_of(Time(), Policy(initial_delay=7200, maximum_delay=7200))
    async with TestEngine(engine, start=start):
        await engine.add("ann", "hello")
        await engine.mute("ann", timedelta(hours=1), drop=True)
        told = await engine.explain("ann")
        assert (told.state, told.due) == ("muted", start + timedelta(hours=2))
        assert str(told) == "is muted until 13:00:00: 1 record waits, due 14:00:00; what is added is dropped"
        await engine.mute("ann")
        told = await engine.explain("ann")
        assert (told.due, str(told)) == (None, "is muted until it is unmuted: 1 record waits")


@pytest.mark.parametrize(
    ("full", "names", "is_full"),
    [
        ({"max_size": 3}, "abc", True), ({"max_size": 3}, "aaaa", False),
        ({"max_bytes": 20}, "abc", True), ({"max_bytes": 99}, "abc", False),
    ],
    ids=["max_size", "less than max_size", "max_bytes", "less than max_bytes"],
)  # fmt: skip
async def test_the_instant_that_is_told_is_that_at_which_a_full_timeline_goes_out(
    full: dict[str, Any], names: str, is_full: bool
) -> None:
    box = Time()
    engine = engine_of(box, Policy(initial_delay=1_200, **full))
    async with TestEngine(engine) as t:
        end = t.now + timedelta(minutes=5)
        await engine.mute("ann", end)
        for name in names:
            await engine.add("ann", "hello", record_id=name)
        told = await engine.explain("ann")
        assert told.due is not None
        assert told.due == (end if is_full else t.now + timedelta(minutes=20))
        assert f"due {told.due:%H:%M:%S}" in str(told)
        await t.advance(told.due - t.now - timedelta(milliseconds=1))
        assert not box.seen
        await t.advance(timedelta(milliseconds=1))
        assert box.seen


@pytest.mark.parametrize("in_group", [False, True], ids=["raised", "in a group"])
async def test_a_callback_that_rejects_for_good_gets_nothing_more(in_group: bool) -> None:
    reject: Exception = Reject("550 no such mailbox", mute=True)
    box = Time(ExceptionGroup("of a task group", [reject, ValueError("another")]) if in_group else reject)
    engine = engine_of(box)
    async with TestEngine(engine) as t:
        await engine.add("ann", "hello")
        await t.advance()
        await engine.add("ann", "again")
        await t.advance(days=1)
        stats = await engine.stats()
        assert (len(box.seen), stats.dead, stats.muted, stats.mutes) == (1, 1, 1, 1)
        [muted] = [timeline async for timeline in engine.timelines("muted")]
        assert (muted.key, muted.muted, muted.muted_until, muted.drops, muted.size) == ("ann", True, None, True, 0)
        assert muted.due.year == 9999
        assert t.attempts[0].result == "rejected"
        assert await engine.unmute("ann")
        await engine.add("ann", "hello")
        await t.advance()
        assert len(box.seen) == 2


@pytest.mark.parametrize("server", [False, True], ids=["memory", "server"])
async def test_a_part_that_is_rejected_for_good_takes_the_parts_to_come_into_its_dead_letter(server: bool) -> None:
    box = Time(Reject("550 no such mailbox", mute=True))
    engine = engine_of(box, Policy(initial_delay=60, increment_delay=0, max_size=2, max_age=600))
    async with TestEngine(engine, server=server) as t:
        await engine.mute("ann", timedelta(seconds=60))
        old = t.now - timedelta(hours=1)
        stamps = {"e": old, "f": old}  # of parts that nobody reads, and two that are too old
        for name in "abcdefg":
            await engine.add("ann", name, record_id=name, timestamp=stamps.get(name))
        await engine.add("ann", "newest", record_id="a")  # a value that is replaced in a later part
        await t.advance(days=1)
        stats = await engine.stats()
        assert (box.seen, len(t.attempts)) == ([["b", "c"]], 1), "nothing more is tried"
        assert (stats.dead, stats.buried, stats.aged, stats.mutes) == (1, 5, 2, 1)
        assert (stats.waiting, stats.ready, stats.leased) == (0, 0, 0)
        [letter] = [await engine.dead_letter(each.id) async for each in engine.dead_letters()]
        assert letter is not None
        assert [(each.id, each.value) for each in letter.records] == [
            ("b", "b"), ("c", "c"), ("d", "d"), ("g", "g"), ("a", "newest"),
        ]  # fmt: skip


async def test_a_plain_reject_mutes_nothing() -> None:
    engine = engine_of(Time(Reject("boo")))
    async with TestEngine(engine) as t:
        await engine.add("ann", "hello")
        await t.advance()
        assert (await engine.stats()).mutes == 0


async def test_a_list_of_all_timelines_has_each_once(store: Store) -> None:
    engine = DigestEngine(namespace="mail", value_type=str, backend=store.backend)
    await store.add("leased", "a")
    await store.claim()
    await store.add("muted", "a")
    await store.add("ready", "a")
    for key in ("leased", "muted", "empty"):
        await mute(store, key)
    async with engine:
        found = sorted([(each.key, each.state) async for each in engine.timelines()])
        assert found == [("empty", "muted"), ("leased", "leased"), ("muted", "muted"), ("ready", "ready")]


@pytest.mark.parametrize(
    "until",
    [datetime(2030, 1, 1), "tomorrow", 3600, 0, float("nan"), timedelta(days=4000), True],
    ids=str,
)
async def test_an_end_of_a_mute_that_means_nothing_is_refused_and_mutes_nothing(until: object) -> None:
    engine = engine_of(Time())
    async with TestEngine(engine):
        with pytest.raises(InvalidArgument):
            await engine.mute("ann", until)  # type: ignore[arg-type]
        assert (await engine.stats()).mutes == 0


@pytest.mark.parametrize("form", ["datetime", "seconds", "timedelta"])
async def test_the_end_of_a_mute_is_a_time_or_a_length(form: str) -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    engine = engine_of(Time())
    async with TestEngine(engine, start=start):
        end = start + timedelta(hours=1)
        until = {"datetime": end, "seconds": end.timestamp(), "timedelta": timedelta(hours=1)}[form]
        await engine.mute("ann", until)
        found = await engine.peek("ann")
        assert found is not None
        assert found.muted_until == end
        await engine.mute("ann", {"timedelta": timedelta(hours=-1)}.get(form, start - timedelta(hours=1)))
        assert await engine.peek("ann") is None


async def test_a_worker_that_sleeps_wakes_when_a_mute_ends(store: Store) -> None:
    """Though what it slept for was due much later: who mutes wakes it, and its claim is told when that is."""
    await store.add("other", "a", policy=Policy(initial_delay=1_200))
    claims = await store.claims()
    assert claims.wait_ms == 20 * MINUTE
    waiting = asyncio.create_task(store.backend.wait(0, claims.wake_up))
    await mute(store, "k", 1)
    async with asyncio.timeout(10):
        await waiting
    assert (await store.claims()).wait_ms == MINUTE


async def test_a_worker_that_knows_no_mutes_leaves_what_is_muted_to_others(store: Store) -> None:
    await store.add("k", "a")
    await store.claim()
    await mute(store, "k")
    await store.lapse()
    store.backend._features = "" if isinstance(store.backend._features, str) else frozenset()  # type: ignore[attr-defined]
    claims = await store.claims()
    assert [*claims.left] == [("k", "mute")]


@pytest.mark.parametrize("by", ["an add", "an add under a rule", "a replay"])
async def test_what_comes_under_a_mute_is_left_to_who_knows_mutes_before_any_claim_has_looked(
    store: Store, by: str
) -> None:
    """An earlier version beside this one schedules what it adds there, and knows by this alone that it is muted."""
    if by == "a replay":
        await store.add("k", "a")
        await store.close(await store.claim(), cool=0, letter="boo")
    await mute(store, "k")
    if by == "a replay":
        [letter] = (await store.backend.operations.dead_letters(0, 10)).items
        await store.backend.replay(letter, store.policy.terms, False)
    else:
        ruled = Policy(quiet_delay=10, maximum_delay=100)
        await store.add("k", "a", policy=ruled if by == "an add under a rule" else store.policy)
    found = await store.backend.operations.look("k")
    assert found is not None
    assert found.needs.split()[-1:] == ["mute"]
    await unmute(store, "k")
    found = await store.backend.operations.look("k")
    assert found is not None
    assert "mute" not in found.needs, "and not when that is over"
