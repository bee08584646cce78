"""What a store promises: each test runs on the in-memory reference, a server, behind sentinels and on a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

import pytest
from stores import DAY, LEASE, MINUTE, NOW, Store, bound_of_dead_letters, ids, records

from aiodigest.backend import (
    DIGEST_BYTES,
    LOOKS,
    MOVES,
    Add,
    Bookmark,
    Close,
    Closed,
    Lease,
    Move,
    NewDeadLetter,
    Page,
    Retry,
    StoredDeadLetter,
    StoredTimeline,
)
from aiodigest.errors import InvalidState, LeaseLost, LimitExceeded
from aiodigest.policy import Policy
from aiodigest.records.entries import CONTEXT_SIZE, identity_of, pack, unpack
from aiodigest.timing.hours import Hours

T = TypeVar("T")

# Records and digests


async def test_the_first_record_is_due_at_once_and_its_digest_holds_what_came_until_then(store: Store) -> None:
    assert await store.add("k", "a", "b") == [True, False]
    assert await store.add("k", "c") == [False]
    lease = await store.claim()
    assert (ids(lease), lease.attempt, lease.iteration, lease.dropped, lease.due_ms) == (["a", "b", "c"], 1, 1, 0, NOW)
    assert await store.close(lease) == Closed("closed")
    assert await store.state("k") is None


async def test_what_is_added_under_terms_that_change_stays_in_order(store: Store) -> None:
    """Although adds of one call travel in groups, by timeline and terms."""
    small, large = Policy(capacity=50).terms, Policy().terms
    given = [("j", small), ("k", large), ("k", small), ("j", large), ("k", large), ("j", small), ("k", small)]
    adds = [Add(key, pack(b"%d" % number, 0, b"v"), terms) for number, (key, terms) in enumerate(given)]
    assert await store.backend.add(0, adds) == [True, True, False, False, False, False, False]
    assert {lease.key: ids(lease) for lease in (await store.claims()).leases} == {
        "j": ["0", "3", "5"], "k": ["1", "2", "4", "6"],
    }  # fmt: skip


async def test_a_record_added_again_under_delivery_is_in_the_next_digest_with_its_new_value(store: Store) -> None:
    await store.add("k", "a", value="old")
    lease = await store.claim()
    await store.add("k", "a", value="new")
    await store.close(lease)
    store.now += 300_000 + 30_000
    assert records((await store.claim()).entries) == [("a", "new")]


async def test_nothing_is_removed_from_a_digest_under_delivery(store: Store) -> None:
    await store.add("k", "u", "v")
    first = await store.claim()
    assert not await store.backend.remove("k", identity_of(b"u"), store.policy.terms.limits)
    await store.lapse()
    second = await store.claim()
    assert (second.digest_id, ids(second)) == (first.digest_id, ["u", "v"])


@pytest.mark.parametrize("state", ["leased", "unknown", "ready"])
async def test_a_removal_of_a_newer_value_is_not_done_while_an_older_one_may_come_again(
    store: Store, state: str
) -> None:
    await store.add("k", "u", "v", value="old")
    lease = await store.claim()
    await store.add("k", "u", value="new")
    if state == "unknown":
        await store.release(lease, started=True)
    elif state == "ready":
        await store.retry(lease)
        await store.backend.flush("k")
    limits = store.policy.terms.limits
    assert not await store.backend.remove("k", identity_of(b"u"), limits), "its old value is still there"
    assert await store.held("k") == [("u", "old"), ("v", "old")]
    if state == "leased":
        await store.retry(lease)
        assert await store.backend.remove("k", identity_of(b"u"), limits)
        assert await store.held("k") == [("v", "old")]


async def removed(store: Store, ended: Awaitable[bool]) -> None:
    assert await ended
    await store.backend.remove("k", identity_of(b"a"), store.policy.terms.limits)


async def lapsed(store: Store, lease: Lease) -> None:
    """Let a lease go by; the next attempt, says its callback, fails for one record."""
    await store.lapse()
    assert await store.retry(await store.claim(), failed=["b"])


# How a digest of two records may end that comes again, which records are left of it then, whether its outcome is
# unknown, so that it may not change, and which attempt follows.
COMES_AGAIN: dict[str, tuple[Callable[[Store, Lease], Awaitable[object]], str, bool, int]] = {
    "failed": (lambda store, lease: store.retry(lease), "ab", False, 2),
    "failed, it says, for a record that it has not": (
        lambda store, lease: store.retry(lease, failed=["stranger"]), "ab", False, 2,
    ),
    "failed for a record": (lambda store, lease: store.retry(lease, failed=["b"]), "b", False, 2),
    "lost a record in its retry wait": (lambda store, lease: removed(store, store.retry(lease)), "b", False, 2),
    "given back unstarted": (lambda store, lease: store.release(lease, started=False), "ab", False, 1),
    "postponed": (lambda store, lease: store.postpone(lease), "ab", False, 1),
    "given back": (lambda store, lease: store.release(lease, started=True), "ab", True, 1),
    "timed out": (lambda store, lease: removed(store, store.retry(lease, unknown=True)), "ab", True, 2),
    "lapsed": (lapsed, "ab", True, 2),
}  # fmt: skip


@pytest.mark.parametrize("ending", COMES_AGAIN)
@pytest.mark.parametrize("since", ["", "bc"], ids=["alone", "newer"])
async def test_a_digest_comes_again_under_its_id_with_the_same_records_or_under_another(
    store: Store, ending: str, since: str
) -> None:
    end, left, unknown, attempt = COMES_AGAIN[ending]
    await store.add("k", "a", "b", value="old")
    first = await store.claim()
    if since:
        await store.add("k", *since, value="new")
    await end(store, first)
    store.now += 1_000
    second = await store.claim()
    assert (second.attempt, second.last_error) == (attempt, "boo" if attempt > 1 else "")
    assert (second.digest_id == first.digest_id) == (unknown or (left == "ab" and not since))
    old, new = ([(record_id, value) for record_id in ids] for ids, value in ((left, "old"), (since, "new")))
    if unknown:
        assert records(second.entries) == old
        await store.close(second, cool=0)
        assert [records(lease.entries) for lease in (await store.claims()).leases] == ([new] if since else [])
    else:
        assert records(second.entries) == [each for each in old if each[0] not in since] + new


@pytest.mark.parametrize("capacity", [2, 4])  # a log may be longer by a half
async def test_a_record_that_capacity_dropped_stays_away_when_a_newer_one_is_removed(
    store: Store, capacity: int
) -> None:
    policy = Policy(capacity=capacity)
    await store.add("k", *"abcde"[: capacity + 1], policy=policy)
    newest = "abcde"[capacity]
    assert await store.backend.remove("k", identity_of(newest.encode()), policy.terms.limits)
    assert not await store.backend.remove("k", identity_of(newest.encode()), policy.terms.limits)
    assert ids(await store.claim()) == [*"abcde"[1:capacity]]


async def look(store: Store) -> StoredTimeline:
    window = await store.backend.operations.look("k")
    assert window is not None
    return window


async def test_a_log_is_never_longer_than_its_capacity_and_a_half(store: Store) -> None:
    policy = Policy(capacity=8, initial_delay=600)
    for number in range(50):
        await store.add("k", f"{number}", policy=policy)
        window = await look(store)
        assert window.logged <= 12
        assert window.logged + window.dropped == number + 1


@pytest.mark.parametrize("size", [5, 40])
async def test_a_log_that_waits_is_never_longer_than_its_max_size_and_a_quarter(store: Store, size: int) -> None:
    policy = Policy(max_size=size, initial_delay=600)
    for number in range(4 * size):
        assert await store.add("k", f"{number % (size - 1)}", policy=policy, value=f"{number}") == [False]
        assert (await look(store)).logged <= size + size // 4
    assert await store.add("k", "new", policy=policy) == [True], "the record that fills it makes it due"
    newest = {f"{number % (size - 1)}": f"{number}" for number in range(4 * size)}
    assert dict(records((await store.claim()).entries)).items() >= newest.items()


async def test_capacity_keeps_the_newest_by_arrival_whatever_their_timestamps(store: Store) -> None:
    policy = Policy(capacity=3)
    for number in range(20):
        await store.add("k", f"r{number}", policy=policy, timestamp=1_000_000 - number)
    lease = await store.claim()
    assert (ids(lease), lease.dropped) == (["r17", "r18", "r19"], 17)
    assert (await store.backend.operations.counts())["dropped"] == 17


async def test_capacity_holds_after_each_merge_of_a_digest_that_fails_again_and_again(store: Store) -> None:
    policy = Policy(capacity=4)
    for attempt in range(6):
        await store.add("k", *(f"{attempt}-{number}" for number in range(4)), policy=policy)
        lease = await store.claim()
        assert ids(lease) == [f"{attempt}-{number}" for number in range(4)]
        assert lease.dropped == 4 * attempt
        await store.retry(lease)
        store.now += 1_000


async def test_a_digest_of_8000_records_is_delivered_whole(store: Store) -> None:
    policy = Policy(capacity=10_000)
    for start in range(0, 8_000, 1_000):
        await store.add("k", *(f"{number}" for number in range(start, start + 1_000)), policy=policy)
    lease = await store.claim()
    entries = list(lease.entries)
    while len(entries) < lease.size:
        entries += await store.backend.read(0, lease, len(entries), 1_000)
    assert [record for record, _ in records(entries)] == [f"{number}" for number in range(8_000)]
    assert await store.close(lease) == Closed("closed")


async def test_4000_due_timelines_are_promoted_in_slices_oldest_first(store: Store) -> None:
    store.policy = Policy(initial_delay=1)
    keys = [f"k{number}" for number in range(4_000)]
    for some in (keys[:1], keys[1:2], keys[2:3], *(keys[first : first + 250] for first in range(3, 4_000, 250))):
        store.now += 1
        adds = [Add(key, pack(b"a", None, b"v"), store.policy.terms) for key in some]
        assert await store.backend.add(0, adds) == [False] * len(some)
    store.now += 1_000
    promoted = await store.backend.schedule()
    assert len(promoted) == MOVES
    assert (await store.backend.operations.counts())["ready"] == MOVES
    claims = await store.claims(3)
    assert [lease.key for lease in claims.leases] == ["k0", "k1", "k2"]
    assert claims.wait_ms == 0


async def test_record_timestamps_never_schedule(store: Store) -> None:
    assert await store.add("old", "a", timestamp=NOW / 1000 - 400) == [True]
    assert await store.add("new", "a", timestamp=NOW / 1000 + 7_200) == [True]
    assert {lease.key for lease in (await store.claims()).leases} == {"old", "new"}


@pytest.mark.parametrize("other", [0, 1])
async def test_any_string_is_a_key_of_its_own(store: Store, other: int) -> None:
    keys = ["T", "T:log", "T:d", "{T}", "}", "T\0", "😀" * 256]
    for key in keys:
        assert await store.add(key, key[:10], "T") == [True, False]
    claims = await store.claims()
    assert sorted(lease.key for lease in claims.leases) == sorted(keys)
    for lease in claims.leases:
        assert ids(lease) == [lease.key[:10], "T"]
    await store.backend.delete(keys[other])
    for lease in claims.leases:
        expected = Closed("deleted") if lease.key == keys[other] else Closed("closed")
        assert await store.close(lease) == expected


# When timelines are due


async def test_a_push_when_the_due_time_has_passed_leaves_it(store: Store) -> None:
    store.policy = Policy(initial_delay=10)
    await store.add("k", "a")
    store.now += 10_000
    assert await store.add("k", "b") == [False]
    assert await store.due("k") == 10_000
    assert ids(await store.claim()) == ["a", "b"]


async def test_each_add_in_a_cool_down_pushes_the_due_time_up_to_the_maximum(store: Store) -> None:
    await store.add("k", "a")
    await store.close(await store.claim())
    for seconds, due in ((10, 330), (20, 360), (30, 390)):
        store.now = NOW + seconds * 1_000
        assert await store.add("k", "b") == [False]
        assert await store.due("k") == due * 1_000
    for seconds in range(31, 391):
        store.now = NOW + seconds * 1_000
        await store.add("k", "b")
    assert await store.due("k") == 1_800_000


@pytest.mark.parametrize(("after", "iteration"), [(-1, 2), (0, 1), (1, 1)])
async def test_an_add_before_the_end_of_the_cool_down_waits_and_one_at_or_after_it_is_ready(
    store: Store, after: int, iteration: int
) -> None:
    await store.add("k", "a")
    await store.close(await store.claim())
    store.now += 300_000 + after
    assert await store.add("k", "b") == [after >= 0]
    assert await store.due("k") == (330_000 if after < 0 else 300_000 + after)
    store.now = NOW + 330_000
    assert (await store.claim()).iteration == iteration


async def test_the_cool_down_outlives_any_ttl_shorter_than_itself(store: Store) -> None:
    await store.add("k", "a")
    await store.close(await store.claim(), cool=30 * DAY)
    store.now += 30 * DAY - 1
    assert await store.add("k", "b") == [False]


async def test_max_size_distinct_records_are_due_at_once(store: Store) -> None:
    store.policy = Policy(initial_delay=100, max_size=3)
    assert await store.add("k", "a", "b", "b", "a") == [False, False, False, False]
    assert await store.add("k", "c") == [True]
    assert await store.due("k") == 0


@pytest.mark.parametrize("size", [2, 3, 10, 1_000])
async def test_the_record_that_fills_a_timeline_makes_it_due_whatever_was_added_again(store: Store, size: int) -> None:
    store.policy = Policy(initial_delay=600, max_size=size)
    before = [f"{number}" for number in range(size - 1)]
    again = [before[-number % len(before)] for number in range(300)]
    await store.add("k", *before, *again, *before)
    assert await store.state("k") == "waiting"
    assert await store.add("k", "last", "0") == [True, False]


async def test_what_came_during_a_delivery_is_due_at_the_max_size_that_its_timeline_has(store: Store) -> None:
    await store.add("k", "a", policy=Policy(max_size=2))
    lease = await store.claim()
    await store.add("k", "b", "c", policy=Policy(max_size=2))
    await store.close(lease)  # by an engine whose policy has none
    assert await store.state("k") == "ready"


async def test_an_add_in_a_retry_wait_pushes_nothing_and_makes_nothing_ready(store: Store) -> None:
    store.policy = Policy(max_size=2)
    await store.add("k", "a")
    await store.retry(await store.claim(), 5_000)
    assert await store.add("k", "b", "c", "d") == [False, False, False]
    assert (await store.state("k"), await store.due("k")) == ("waiting", 5_000)


@pytest.mark.parametrize(
    ("late", "due"), [(0, 3_600_000), (10_000, 3_600_000), (-10_000, 3_600_000), (10_001, 3_010_001)]
)
async def test_a_delay_worked_out_from_the_time_of_day_moves_nothing_if_it_ends_when_it_did(
    store: Store, late: int, due: int
) -> None:
    hour = Policy(initial_delay=3_600, increment_delay=0, maximum_delay=7_200)
    await store.add("new", "a", policy=hour)
    await store.add("cooling", "a")
    await store.close(await store.claim(), cool=3_600_000)
    await store.add("cooling", "b", policy=hour)
    store.now += 600_000
    now, wait = hour.terms._replace(initial_ms=3_000_000 + late), 3_000_000 + late
    for key, iteration in (("new", 0), ("cooling", 1)):
        move = Move(now, gap_ms=wait, iteration=iteration, by_clock=True)
        assert await store.backend.reschedule(key, move) == NOW + due
        assert await store.due(key) == due


async def test_a_reschedule_by_policy_moves_the_end_of_a_cool_down_without_records(store: Store) -> None:
    await store.add("k", "a")
    await store.close(await store.claim(), cool=DAY)
    store.now += 60_000
    assert [each.iteration for each in await store.backend.operations.cooling("k")] == [1]
    assert await store.backend.reschedule("k", Move(store.policy.terms, gap_ms=0, iteration=0)) is None
    for wrong in (Move(store.policy.terms, delay_ms=1), Move(store.policy.terms, at_ms=0)):
        with pytest.raises(InvalidState, match="only a waiting timeline"):
            await store.backend.reschedule("k", wrong)
    assert await store.backend.reschedule("k", Move(store.policy.terms, gap_ms=90_000, iteration=1)) == NOW + 90_000
    assert await store.add("k", "b") == [False]
    await store.backend.delete("k")
    await store.add("k", "c")
    await store.close(await store.claim(), cool=DAY)
    assert await store.backend.reschedule("k", Move(store.policy.terms, gap_ms=0, iteration=1)) == store.now
    assert await store.backend.operations.cooling("k") == []
    assert await store.add("k", "d") == [True]


async def test_reschedule_moves_a_waiting_timeline_and_no_other(store: Store) -> None:
    store.policy = Policy(initial_delay=100)
    await store.add("k", "a")
    assert await store.backend.reschedule("k", Move(store.policy.terms, delay_ms=5_000)) == NOW + 5_000
    assert await store.backend.reschedule("k", Move(Policy(initial_delay=7).terms)) == NOW + 7_000
    assert await store.backend.reschedule("k", Move(store.policy.terms, at_ms=NOW - 1)) == NOW
    with pytest.raises(InvalidState, match="not waiting"):
        await store.backend.reschedule("k", Move(store.policy.terms, delay_ms=1))


@pytest.mark.parametrize("by", ["at", "delay"])
async def test_what_is_rescheduled_for_a_day_far_away_waits_for_the_hours_of_that_day(store: Store, by: str) -> None:
    hours = Hours("01:00-02:00,03:00-04:00,05:00-06:00,07:00-08:00")  # in 90 days there are many
    far = NOW // DAY * DAY + 90 * DAY + 4 * 3_600_000 + 60_000
    await store.add("k", "a")
    await store.retry(await store.claim(), 5_000)
    terms = Policy(hours=hours).terms
    move = Move(terms, at_ms=far) if by == "at" else Move(terms, delay_ms=far - store.now)
    assert await store.backend.reschedule("k", move) == far + 59 * 60_000


async def test_what_is_postponed_waits_uncharged_and_is_due_as_before(store: Store) -> None:
    await store.add("old", "a")
    store.now += 5_000
    await store.add("new", "b")
    first, _ = (await store.claims()).leases
    assert await store.postpone(first, 1_000)
    assert await store.postpone(first, 1_000), "a repeated call is told the same"
    window = await store.backend.operations.look("old")
    assert window is not None
    assert (window.state, window.due_ms, window.attempt) == ("waiting", NOW, 0)
    counts = await store.backend.operations.counts()
    assert (counts["oldest_due_ms"], counts["overdue_ms"]) == (NOW, 5_000)
    claims = await store.claims()
    assert (claims.leases, claims.wait_ms) == ([], 1_000)
    await store.add("newest", "c")
    store.now += 1_000
    again, other = (await store.claims()).leases
    assert (again.key, again.due_ms, again.attempt, other.key) == ("old", NOW, 1, "newest")
    assert await store.postpone(again, 0), "without a delay it is ready again, and is due as before"
    assert (await store.claim()).due_ms == NOW


@pytest.mark.parametrize("how", ["flush", "reschedule", "delete", "schedule"])
async def test_what_was_postponed_is_forgotten_when_it_waits_no_more(store: Store, how: str) -> None:
    await store.add("k", "a")
    store.now += 5_000
    await store.postpone(await store.claim(), 60_000)
    if how == "flush":
        assert await store.backend.flush("k")
        assert (await store.state("k"), await store.due("k")) == ("ready", 0)
    elif how == "reschedule":
        move = Move(store.policy.terms, delay_ms=20_000)
        assert await store.backend.reschedule("k", move) == store.now + 20_000
        assert await store.due("k") == 25_000
        return
    elif how == "delete":
        assert await store.backend.delete("k")
    else:
        assert await store.backend.schedule(store.now + 60_000) == [("k", NOW)]
    if how != "delete":
        lease = await store.claim()
        assert lease.due_ms == NOW
        await store.close(lease)
    await store.add("other", "b")
    assert (await store.backend.operations.counts())["oldest_due_ms"] == store.now


async def test_a_record_outlives_its_postponement(store: Store) -> None:
    await store.add("k", "a", policy=Policy(ttl=100, minimum_delay=0, maximum_delay=0))
    await store.postpone(await store.claim(), 10 * DAY)
    store.now += 10 * DAY
    assert ids(await store.claim()) == ["a"]


async def test_a_flush_makes_a_timeline_ready_now_or_after_the_delivery_under_way(store: Store) -> None:
    store.policy = Policy(initial_delay=100)
    await store.add("k", "a")
    assert await store.backend.flush("k")
    lease = await store.claim()
    await store.add("k", "b")
    assert await store.backend.flush("k")
    await store.close(lease)
    assert await store.state("k") == "ready"
    assert not await store.backend.flush("nobody")


# Leases


async def test_a_stale_close_changes_nothing(store: Store) -> None:
    async def seen() -> object:
        return await look(store), await store.backend.operations.counts(), await store.held("k")

    await store.add("k", "a")
    first = await store.claim()
    await store.lapse()
    second = await store.claim()
    before = await seen()
    assert [await store.close(first) for _ in range(2)] == [Closed("lost")] * 2
    assert not await store.retry(first)
    assert not await store.release(first, started=True)
    assert await store.backend.renew(0, [first], LEASE) == [False]
    with pytest.raises(LeaseLost):
        await store.backend.read(0, first, 0, 10)
    assert await seen() == before
    assert await store.close(second) == Closed("closed")


async def test_a_part_is_closed_once_however_often_it_is_said(store: Store) -> None:
    store.policy = Policy(max_size=2)
    await store.add("k", "c", "a", "b", "c", "d", "e")  # a record that was added again is in one part alone
    lease = await store.claim()
    assert (lease.part, ids(lease)) == (2, ["a", "b", "c", "d", "e"])
    closed, *again = [await store.close(lease, 2) for _ in range(3)]
    assert (closed.status, closed.left, again) == ("part", 3, [closed] * 2)
    await store.lapse()
    rest = await store.claim()
    assert (rest.digest_id, ids(rest), rest.part, rest.attempt) == (closed.digest_id, ["c", "d", "e"], 2, 1)


async def test_a_digest_keeps_the_bound_that_it_was_opened_with_until_its_contents_change(store: Store) -> None:
    async def claimed(bound: int) -> Lease:
        claims = await store.backend.claim(0, 1, LEASE, store.policy.terms.limits, bound=bound)
        return claims.leases[0]

    await store.add("k", "a", "b", "c")
    first = await claimed(5)
    assert first.bound == 5
    part = await store.close(first, 1)
    await store.lapse()
    await store.add("k", "d")
    rest = await claimed(DIGEST_BYTES)  # its outcome is unknown: it is what it was
    assert (rest.digest_id, rest.bound, ids(rest)) == (part.digest_id, 5, ["b", "c"])
    await store.close(rest, cool=0)
    other = await claimed(DIGEST_BYTES)
    assert (other.bound, ids(other)) == (DIGEST_BYTES, ["d"])
    await store.retry(other)
    store.now += 1_000
    await store.add("k", "e")
    merged = await claimed(7)
    assert (merged.bound, ids(merged)) == (7, ["d", "e"])


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_late_close_wins_until_another_claims_and_repeated_it_answers_the_same(
    store: Store, renewed: bool
) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    for _ in range(2):  # others go on claiming, so that the lease's end is no gap of all
        store.now += LEASE * 2 // 5
        await store.claims(0)
    store.now += LEASE * 2 // 5
    assert await store.backend.maintenance() == ["k"]
    if renewed:
        assert await store.backend.renew(0, [lease], LEASE) == [True]
        assert (await store.state("k"), await store.due("k")) == ("leased", LEASE * 6 // 5 + LEASE)
    assert [await store.close(lease) for _ in range(2)] == [Closed("closed")] * 2
    assert await store.state("k") is None


@pytest.mark.parametrize("renews", [False, True])
@pytest.mark.parametrize("looks", ["claim", "maintenance"])
async def test_holders_may_renew_after_an_outage_before_anything_is_recovered(
    store: Store, looks: str, renews: bool
) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    store.now += 10 * MINUTE
    if looks == "claim":
        claims = await store.claims()
        assert (claims.leases, claims.wait_ms) == ([], LEASE)
    assert await store.backend.maintenance() == []
    if renews:
        assert await store.backend.renew(0, [lease], LEASE) == [True]
        assert await store.close(lease) == Closed("closed")
    else:
        await store.lapse()
        assert (await store.claim()).attempt == 1


async def test_workers_that_run_for_a_moment_now_and_then_recover_what_a_killed_one_held(store: Store) -> None:
    await store.add("k", "a")
    await store.claim()
    found: list[list[int]] = []
    for _ in range(2):
        store.now += LEASE + 1
        found.append([lease.attempt for lease in (await store.claims()).leases])
    assert found == [[], [1]]


async def test_a_gap_soon_after_another_holds_back_what_was_leased_since(store: Store) -> None:
    await store.add("k", "a")
    await store.claim()
    store.now += LEASE + 1
    await store.add("j", "a")
    held = await store.claim()  # within the hold, by a worker that lives
    for _ in range(2):
        store.now += LEASE // 3
        assert await store.backend.renew(0, [held], LEASE) == [True]
    store.now += LEASE + 10  # the server was away, or its clock steps
    assert [lease.key for lease in (await store.claims()).leases] == ["k"]
    assert await store.backend.renew(0, [held], LEASE) == [True]


# The server's clock steps back

HOUR = 3_600_000
STEPS = {
    "back": (-HOUR,),
    "back twice": (-HOUR, -2 * HOUR),
    "on and back": (5_000, -HOUR),
    "back and on": (-HOUR, 5_000),
}


async def looks_in(store: Store) -> None:
    """A worker that has reached its concurrency limit does."""
    await store.backend.renew(0, [], LEASE)


async def passes(store: Store, ms: int) -> None:
    """Time goes by, in which workers look in as often as they do."""
    while ms > 0:
        store.now += min(ms, LEASE // 3)
        ms -= LEASE // 3
        await looks_in(store)


WAIT = 50_000
# How a timeline comes to be claimed again WAIT later.
WAITS: dict[str, Callable[[Store, Lease], Awaitable[object]]] = {
    "a window": lambda store, _: store.add("other", "a", policy=Policy(initial_delay=WAIT / 1000)),
    "a cool-down": lambda store, lease: cooled(store, lease, WAIT),
    "a retry wait": lambda store, lease: store.retry(lease, WAIT),
    "a dead worker's lease": lambda store, lease: store.backend.renew(0, [lease], WAIT),
}


async def cooled(store: Store, lease: Lease, cool: int) -> None:
    await store.close(lease, cool=cool)
    await store.add("k", "a", policy=Policy(increment_delay=0))


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("steps", STEPS)
async def test_what_waits_while_the_servers_clock_steps_back_is_due_as_long_after_as_before(
    store: Store, wait: str, steps: str
) -> None:
    await store.add("k", "a")
    await WAITS[wait](store, await store.claim())
    key = "other" if wait == "a window" else "k"
    await passes(store, 10_000)
    for step in STEPS[steps]:
        store.now += step
        await looks_in(store)
    left = WAIT - 10_000 - sum(step for step in STEPS[steps] if step > 0)
    assert await store.due(key) == store.now - NOW + left, "by the server's clock as it is now"
    await passes(store, left - 1)
    assert key not in {lease.key for lease in (await store.claims()).leases}
    store.now += 1
    assert key in {lease.key for lease in (await store.claims()).leases}


async def test_whoever_looks_at_a_shard_before_its_clock_is_put_right_sees_the_wait_that_is_left(store: Store) -> None:
    await store.add("k", "a", policy=Policy(initial_delay=60))
    store.now -= HOUR
    assert await store.due("k") == 60_000 - HOUR
    counts = await store.backend.operations.counts()
    assert (counts["oldest_due_ms"], counts["stepped_back_ms"]) == (store.now + 60_000, HOUR)


async def test_a_cool_down_without_records_ends_as_long_after_a_step_back_as_before(store: Store) -> None:
    await store.add("k", "a")
    await store.close(await store.claim(), cool=60_000)
    store.now -= HOUR
    await store.add("k", "b")
    window = await store.backend.operations.look("k")
    assert window is not None
    assert window.cool_ms == store.now + 60_000
    assert await store.backend.operations.cooling("k") == []


async def test_after_a_step_back_times_that_are_given_and_times_of_records_are_the_servers(store: Store) -> None:
    await store.add("k", "a", policy=Policy(initial_delay=60))
    store.now -= HOUR
    move = Move(store.policy.terms, at_ms=store.now + 30_000)
    assert await store.backend.reschedule("k", move) == store.now + 30_000
    assert await store.backend.schedule(store.now + 29_999) == []
    assert await store.backend.schedule(store.now + 30_000) == [("k", store.now + 30_000)]
    await store.add("k", "b")
    policy = Policy(max_age=10)
    claims = await store.backend.claim(0, 10, LEASE, policy.terms.limits)
    [lease] = claims.leases
    assert unpack(lease.entries[1]).timestamp_us == store.now * 1_000
    assert claims.now_ms - lease.due_ms == -30_000, "promoted by hand before it was due"


async def test_a_dead_letter_shows_when_it_was_set_aside_and_lives_for_30_days_whatever_the_clock_does(
    store: Store,
) -> None:
    await store.add("k", "a")
    await store.close(await store.claim(), letter="no")
    [letter] = (await store.backend.operations.dead_letters(0, 10)).items
    store.now -= 40 * DAY
    await looks_in(store)
    for passed in (0, 30 * DAY - 1):
        store.now += passed
        found = await store.backend.operations.dead_letter(letter)
        assert found is not None
        assert found.buried_ms == store.now - passed
    store.now += 1
    assert await store.backend.operations.dead_letter(letter) is None
    assert not (await store.backend.operations.dead_letters(0, 10)).items


async def test_a_step_back_is_told_for_an_hour(store: Store) -> None:
    await store.add("k", "a")
    store.now += 1_000_000
    await looks_in(store)
    for back in (1_000, 300_000):
        store.now -= back
        await looks_in(store)
        counts = await store.backend.operations.counts()
        assert counts.get("stepped_back_ms", 0) == (back + 1_000 if back > 1_000 else 0)
    for passed in (HOUR - 1, 1):
        store.now += passed
        counts = await store.backend.operations.counts()
        assert counts.get("stepped_back_ms", 0) == (301_000 if passed > 1 else 0)


async def test_the_close_of_a_deleted_timeline_hears_so_and_spares_what_came_since(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    assert await store.backend.delete("k")
    assert not await store.backend.delete("k")
    await store.add("k", "b")
    assert await store.close(lease) == Closed("deleted")
    assert await store.held("k") == [("b", "v")]


async def test_an_attempt_is_given_back_for_a_day_a_digest(store: Store) -> None:
    await store.add("k", "a")
    await store.retry(await store.claim())
    store.now += 1_000
    limits = store.policy.terms.limits
    attempts: list[int] = []
    for _ in range(5):
        lease = await store.claim()
        attempts.append(lease.attempt)
        retry = Retry(lease, DAY // 2, "busy", limits, give_back=True)
        assert await store.backend.retry(0, [retry]) == [True]
        store.now += DAY // 2
    assert attempts == [2, 2, 2, 2, 3]


async def test_a_lease_that_ended_without_a_word_is_charged_only_if_its_digest_was_claimed_to_run_alone(
    store: Store,
) -> None:
    await store.add("k", "a")
    seen: list[tuple[int, int, bool]] = []
    for _ in range(5):
        lease = await store.claim()
        window = await store.backend.operations.look("k")
        assert window is not None
        assert window.attempt == lease.attempt
        seen.append((lease.attempt, lease.lost, lease.is_alone))
        await store.lapse()
    assert seen == [(1, 0, False), (1, 1, False), (1, 2, True), (2, 3, True), (3, 4, True)]
    await store.retry(await store.claim())
    store.now += 1_000
    lease = await store.claim()
    assert (lease.attempt, lease.lost) == (5, 0), "a reported outcome ends the doubt"
    assert (await store.close(lease, letter="no")).status == "closed"
    [letter_id] = (await store.backend.operations.dead_letters(0, 1)).items
    letter = await store.backend.operations.dead_letter(letter_id)
    assert letter is not None
    assert letter.attempt == 5


@pytest.mark.parametrize("started", [False, True])
async def test_a_digest_that_was_given_back_is_as_doubtful_as_before(store: Store, started: bool) -> None:
    await store.add("k", "a")
    for _ in range(2):
        await store.claim()
        await store.lapse()
    for _ in range(3):
        lease = await store.claim()
        assert (lease.attempt, lease.lost) == (1, 2)
        await store.release(lease, started=started)


async def test_any_of_a_few_that_are_ready_may_be_the_first_of_a_sample(store: Store) -> None:
    keys = {f"k{number}" for number in range(12)}
    for key in sorted(keys):
        await store.add(key, "a")
        store.now += 1
    first = set[str]()
    for _ in range(300):
        [lease] = (await store.claims(1, sample=True)).leases
        first.add(lease.key)
        await store.release(lease, started=False)
    assert first == keys


@pytest.mark.parametrize("outcome", ["close", "retry"])
@pytest.mark.parametrize("how", ["release", "postpone"])
async def test_an_outcome_that_comes_after_a_release_is_lost_and_the_digest_comes_again(
    store: Store, how: str, outcome: str
) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    for _ in range(2):  # one that is repeated is answered as before
        assert await (store.release(lease, started=True) if how == "release" else store.postpone(lease, 0))
    assert (await store.close(lease)).status == "lost" if outcome == "close" else not await store.retry(lease)
    assert (await store.claim()).digest_id == lease.digest_id
    assert (await store.backend.operations.counts())["digests"] == 0


@pytest.mark.parametrize("sample", [False, True])
async def test_a_doubtful_digest_that_was_given_back_waits_for_no_lease_after_a_gap(store: Store, sample: bool) -> None:
    await store.add("k", "a")
    await store.claim()
    await store.lapse()
    await store.release(await store.claim(), started=False)
    store.now += LEASE  # in which no worker was there
    assert [lease.key for lease in (await store.claims(sample=sample)).leases] == ["k"]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("given_back", [False, True])
async def test_a_digest_that_is_to_run_alone_is_opened_by_a_claim_of_its_own(
    store: Store, given_back: bool, sample: bool
) -> None:
    await store.add("alone", "a")
    for _ in range(2):
        await store.claim()
        await store.lapse()
    others = ["j", "k", "l"]
    await store.add("j", "a")
    if given_back:
        store.now += 1
        await store.release((await store.claims()).leases[0], started=False)
    store.now += 1
    for key in others[1:]:
        await store.add(key, "a")
    brought: list[list[str]] = []
    while (claims := await store.claims(sample=sample)).leases:
        brought.append([lease.key for lease in claims.leases])
        assert claims.wait_ms == 0 or len(sorted(chain(*brought))) == 4, "there is more, and nobody would ask"
    assert ["alone"] in brought
    assert sorted(chain(*brought)) == ["alone", *others]
    if not given_back:
        assert brought[0] == ["alone"], "others come first, of which there may be many"


@pytest.mark.parametrize("sample", [False, True])
async def test_a_claim_takes_one_doubtful_digest_if_it_may_and_all_others_beside_it(store: Store, sample: bool) -> None:
    await store.add("j", "a")
    await store.claim()
    store.now += 1
    for key in "kl":
        await store.add(key, "a")
    await store.claims()
    await store.lapse()
    store.now += 1
    await store.add("m", "a")
    claims = await store.claims(sample=sample, doubtful=False)
    assert [lease.key for lease in claims.leases] == ["m"]
    assert (claims.barred, claims.wait_ms) == (True, LEASE), "else it would ask again and again"
    for key, others in (("j", True), ("k", True), ("l", False)):
        claims = await store.claims(sample=sample)
        assert [lease.key for lease in claims.leases] == [key]
        assert (claims.barred, claims.wait_ms) == (others, LEASE)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("how", ["maintenance", "release"])
async def test_doubtful_digests_at_the_head_of_what_is_ready_hold_up_nobody(
    store: Store, how: str, sample: bool
) -> None:
    doubtful = [f"k{number}" for number in range(5)]
    for key in doubtful:
        await store.add(key, "a")
    await store.claims()
    await store.lapse()
    if how == "maintenance":
        assert sorted(await store.backend.maintenance()) == doubtful
    else:
        for _ in doubtful:
            await store.release(await store.claim(), started=False)
            store.now += 1
    store.now += 1
    await store.add("healthy", "a")
    assert [lease.key for lease in (await store.claims(1, sample=sample, doubtful=False)).leases] == ["healthy"]
    taken: list[str] = []
    while leases := (await store.claims(1, sample=sample)).leases:
        taken += [lease.key for lease in leases]
    assert sorted(taken) == doubtful


async def test_digest_closes_on_leaving_and_keeps_every_record_on_an_exception(store: Store) -> None:
    await store.add("k", "a", "b")
    given: list[Lease] = []

    async def deliver() -> None:
        async with store.backend.digest("k", store.policy) as lease:
            given.append(lease)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await deliver()
    async with store.backend.digest("k", store.policy) as lease:
        assert (lease.digest_id, ids(lease)) == (given[0].digest_id, ["a", "b"])
    with pytest.raises(InvalidState, match="not ready"):
        async with store.backend.digest("k", store.policy):
            pass


async def test_max_age_leaves_old_records_to_the_worker_with_the_cut_frozen_in_the_digest(store: Store) -> None:
    store.policy = Policy(max_age=100)
    await store.add("k", "old", timestamp=NOW / 1000 - 101)
    await store.add("k", "new")
    first = await store.claim()
    assert (first.cut_ms, ids(first)) == (NOW - 100_000, ["old", "new"])
    await store.release(first, started=True)
    store.now += 500_000
    assert (await store.claim()).cut_ms == first.cut_ms


async def test_what_is_too_old_is_in_no_dead_letter_whether_a_caller_or_the_server_told_its_time(store: Store) -> None:
    store.policy = Policy(max_age=100)
    await store.add("k", "came before")
    store.now += 101_000
    await store.add("k", "was before", timestamp=store.now / 1000 - 100.001)
    await store.add("k", "was since", timestamp=store.now / 1000 - 100)
    await store.add("k", "came since")
    await store.close(await store.claim(), letter="no")
    assert await buried(store) == ["was since", "came since"]


@pytest.mark.parametrize("young", [["new"], []], ids=["some", "none"])
async def test_opening_by_hand_leaves_out_and_counts_what_is_too_old_and_cools_down_if_something_is_left(
    store: Store, young: list[str]
) -> None:
    await store.add("k", "old", timestamp=NOW / 1000 - 61)
    await store.add("k", *young, timestamp=NOW / 1000)
    async with store.backend.digest("k", Policy(max_age=60)) as lease:
        assert ids(lease) == young
    counts = await store.backend.operations.counts()
    assert (counts.get("digests", 0), counts.get("delivered", 0), counts["aged"]) == (len(young), len(young), 1)
    assert await store.add("k", "x") == [not young]


# Endings


async def test_records_that_outlive_their_ttl_are_counted_and_make_no_digest(store: Store) -> None:
    store.policy = Policy(ttl=3_600)
    await store.add("k", "a", "b", "a")
    store.now += 3_600_000 + 3_600_000 // 64
    claims = await store.claims()
    assert (claims.leases, claims.expired) == ([], [("k", 2)])
    assert ((await store.backend.operations.counts())["expired"], await store.state("k")) == (2, None)


WITH_CONTEXT = pack(b"a", 0, b"v", bytes(CONTEXT_SIZE))
UNREADABLE = {"cut context": WITH_CONTEXT[:-2]} | {
    what: first + pack(b"a", 0, b"v")[1:]
    for what, first in (("unknown flag", b"\x42"), ("another flag", b"\x82"), ("another version", b"\x03"))
}


@pytest.mark.parametrize("what", ["context", *UNREADABLE])
async def test_what_cannot_be_read_stands_for_itself(store: Store, what: str) -> None:
    terms = Policy(initial_delay=60, max_size=3).terms
    entries = [UNREADABLE.get(what, WITH_CONTEXT), pack(b"a", 0, b"v"), pack(b"b", 0, b"v")]
    shard = store.backend.shard_map.shard_of("k")
    answers = [await store.backend.add(shard, [Add("k", each, terms, own=True)]) for each in entries]
    assert answers[-1] == [what in UNREADABLE], "three records are due at once, two are not"


async def test_the_earliest_due_timeline_is_overdue_from_its_due_time_until_it_is_claimed(store: Store) -> None:
    waits = Policy(initial_delay=60)
    await store.add("k", "a", policy=waits)
    counts = await store.backend.operations.counts()
    assert (counts["oldest_due_ms"], counts["overdue_ms"]) == (NOW + 60_000, 0)
    store.now += 61_500
    await store.add("later", "b")
    counts = await store.backend.operations.counts()
    assert (counts["oldest_due_ms"], counts["overdue_ms"]) == (NOW + 60_000, 1_500)
    await store.claims()
    assert (await store.backend.operations.counts())["overdue_ms"] == 0


async def test_a_timeline_whose_lease_has_ended_is_overdue_since_then(store: Store) -> None:
    await store.add("k", "a")
    await store.claim()
    store.now += LEASE - 1
    assert (await store.backend.operations.counts()).get("overdue_ms", 0) == 0
    store.now += 1_001
    counts = await store.backend.operations.counts()
    assert (counts["oldest_due_ms"], counts["overdue_ms"]) == (NOW + LEASE, 1_000)


@pytest.mark.parametrize("initial", [0, 1_800])
async def test_a_touch_extends_the_life_of_records(store: Store, initial: int) -> None:
    store.policy = Policy(ttl=3_600, initial_delay=initial)
    await store.add("k", "a")
    store.now += 3_000_000
    await store.add("k", "b")
    store.now += 3_000_000
    assert ids(await store.claim()) == ["a", "b"]


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_retry_that_waits_longer_than_the_ttl_does_not_outlive_it(store: Store, by_hand: bool) -> None:
    store.policy = Policy(ttl=3_600)
    await store.add("k", "a")
    await store.retry(await store.claim(), delay=1_000 if by_hand else DAY)
    if by_hand:
        await store.backend.reschedule("k", Move(store.policy.terms, delay_ms=DAY))
    store.now += DAY
    assert ids(await store.claim()) == ["a"]


async def test_a_window_that_is_moved_to_a_time_long_past_keeps_its_records(store: Store) -> None:
    store.policy = Policy(initial_delay=20, ttl=2_000)
    await store.add("k", "a")
    store.now += 31 * DAY  # nobody worked meanwhile, and the policy has another ttl now
    await store.backend.reschedule("k", Move(Policy().terms))
    assert ids(await store.claim()) == ["a"]


async def test_the_rest_of_a_digest_in_parts_lives_on_from_the_close_of_each(store: Store) -> None:
    store.policy = Policy(ttl=3_600, max_size=1)
    await store.add("k", "a", "b", "c")
    lease = await store.claim()
    for left in (2, 1):
        store.now += 3_000_000
        closed = await store.close(lease, 1)
        assert (closed.status, closed.left) == ("part", left)
        lease = replace(lease, digest_id=closed.digest_id, size=left)
    store.now += 3_600_000
    await store.backend.release(0, [lease], started=False)
    assert ids(await store.claim()) == ["c"]


async def all_pages(read: Callable[[int, Bookmark | None], Awaitable[Page[T]]]) -> AsyncIterator[T]:
    end: Bookmark | None = None
    while True:
        page = await read(2, end)
        assert len(page.items) <= 2
        for item in page.items:
            yield item
        if page.end is None:
            return
        end = page.end


NAMES = ("Z", "a", "ab", "b", "\N{LATIN SMALL LETTER E WITH ACUTE}", "\uffff", "\N{POSTBOX}")  # as their bytes are


async def test_what_stays_where_it_is_comes_once_in_the_pages_of_a_schedule_whatever_leaves(store: Store) -> None:
    for delay in (200, 100):
        for name in reversed(NAMES):
            await store.add(f"{name}-{delay}", "a", policy=Policy(initial_delay=delay))
    in_order = [f"{name}-{delay}" for delay in (100, 200) for name in NAMES]
    read = partial(store.backend.operations.page, 0, "waiting")
    assert [window.key async for window in all_pages(read)] == in_order
    listed: list[str] = []
    async for window in all_pages(read):
        listed.append(window.key)
        assert await store.backend.delete(window.key)
    assert listed == in_order
    assert await read(2) == ([], None)


async def test_the_pages_of_a_schedule_end_with_what_was_last_at_the_first_one(store: Store) -> None:
    for number in range(4):
        await store.add(f"k{number}", "a", policy=Policy(initial_delay=100 + number))
    listed: list[str] = []
    async for window in all_pages(partial(store.backend.operations.page, 0, "waiting")):
        listed.append(window.key)
        await store.backend.reschedule(window.key, Move(Policy().terms, delay_ms=200_000))
    assert listed == ["k0", "k1", "k2", "k3"]


async def test_a_page_after_one_that_is_all_that_is_left_is_empty(store: Store) -> None:
    for number in range(3):
        await store.add(f"k{number}", "a", policy=Policy(initial_delay=100))
    page = await store.backend.operations.page(0, "waiting", 2)
    for number in range(3):
        await store.backend.delete(f"k{number}")
    await store.add("later", "a", policy=Policy(initial_delay=200))
    assert await store.backend.operations.page(0, "waiting", 2, page.end) == ([], None)


async def test_a_flush_does_not_cost_a_timeline_its_place(store: Store) -> None:
    store.policy = Policy(initial_delay=10)
    await store.add("first", "a")
    store.now += 10_000
    await store.add("second", "a")
    store.now += 10_000
    await store.backend.flush("first")
    assert [lease.key for lease in (await store.claims()).leases] == ["first", "second"]


# Dead letters


async def bury(store: Store, *record_ids: str, key: str = "k", value: str = "v") -> None:
    """Make a dead letter of each record, one after another."""
    await store.add(key, *record_ids, policy=Policy(capacity=10_000), value=value)
    lease = await store.claim()
    letters = [NewDeadLetter("no", [identity_of(record_id.encode())]) for record_id in record_ids]
    end = Close(lease, lease.size, 0, 0, store.policy.terms.limits, LEASE, dead_letters=letters)
    [closed] = await store.backend.close(store.backend.shard_map.shard_of(key), [end])
    assert isinstance(closed, Closed)
    assert closed.status == "closed"


async def read_letters(store: Store, names: Iterable[str] | None = None) -> list[StoredDeadLetter]:
    """Dead letters by their ids, or all, the oldest first."""
    found = (await store.backend.operations.dead_letters(0, 10)).items if names is None else names
    letters = [await store.backend.operations.dead_letter(name) for name in found]
    return [letter for letter in letters if letter]


async def buried(store: Store) -> list[str]:
    """The ids of the records of all dead letters, the oldest first."""
    return [record_id for letter in await read_letters(store) for record_id, _ in records(letter.entries)]


async def test_each_record_that_is_set_aside_has_a_letter_with_its_own_reason(store: Store) -> None:
    await store.add("k", "good", "bad", "worse")
    lease = await store.claim()
    letters = [NewDeadLetter(each, [identity_of(each.encode())]) for each in ("bad", "worse")]
    close = Close(lease, 3, 1, 0, store.policy.terms.limits, LEASE, dead_letters=letters)
    assert await store.backend.close(store.backend.shard_map.shard_of("k"), [close]) == [Closed("closed")]
    assert await store.state("k") is None
    kept = await read_letters(store)
    told = [(letter.reason, records(letter.entries)) for letter in kept]
    assert told == [("bad", [("bad", "v")]), ("worse", [("worse", "v")])]
    assert [await store.backend.discard(letter.id) for letter in (*kept, kept[0])] == [True, True, False]
    assert await store.backend.operations.dead_letter(kept[0].id) is None


async def test_a_rejected_digest_is_a_dead_letter_that_can_be_replayed_before_newer_values(store: Store) -> None:
    await store.add("k", "x", "y", value="old")
    assert await store.close(await store.claim(), letter="no good") == Closed("closed")
    [letter] = await read_letters(store)
    assert (letter.key, letter.reason, records(letter.entries)) == ("k", "no good", [("x", "old"), ("y", "old")])
    terms = Policy(capacity=2).terms  # a newer value of x counts once
    await store.add("k", "x", value="new")
    assert await store.backend.replay(letter.id, terms, True) is False
    assert await store.held("k") == [("x", "old"), ("y", "old"), ("x", "new")]
    assert await buried(store) == []
    with pytest.raises(InvalidState, match="no dead letter"):
        await store.backend.replay(letter.id, terms, False)
    store.now += MINUTE * 10
    assert records((await store.claim()).entries) == [("y", "old"), ("x", "new")]


async def test_a_replay_waits_until_no_digest_is_open(store: Store) -> None:
    await bury(store, "x", value="old")
    [letter] = await read_letters(store)
    await store.add("k", "x", value="new")
    await store.retry(await store.claim())
    with pytest.raises(InvalidState, match="under delivery or in a retry wait"):
        await store.backend.replay(letter.id, store.policy.terms, False)
    assert await read_letters(store) == [letter]
    store.now += 1_000
    lease = await store.claim()
    assert records(lease.entries) == [("x", "new")]
    await store.close(lease, cool=0)
    assert await store.backend.replay(letter.id, store.policy.terms, False)
    assert records((await store.claim()).entries) == [("x", "old")]


@pytest.mark.parametrize("stored", [True, False])
async def test_a_replay_without_a_policy_keeps_the_limits_that_the_timeline_had(store: Store, stored: bool) -> None:
    store.policy = Policy(initial_delay=600, max_size=2)
    shard, limits = store.backend.shard_map.shard_of("k"), store.policy.terms.limits
    for pair in ("ab", "cd"):
        adds = [Add("k", pack(each.encode(), None, b"v"), store.policy.terms, stored) for each in pair]
        assert await store.backend.add(shard, adds) == [False, True]
        [lease] = (await store.backend.claim(shard, 1, LEASE, limits)).leases
        close = Close(lease, 2, 0, 0, limits, LEASE, dead_letters=[NewDeadLetter("no")])
        assert await store.backend.close(shard, [close]) == [Closed("closed")]
    newest_first = [letter.id for letter in await read_letters(store)][::-1]
    other = Policy(capacity=3).terms
    assert [await store.backend.replay(letter, other, None) for letter in newest_first] == [True, False]
    [lease] = (await store.backend.claim(shard, 1, LEASE, other.limits)).leases
    assert (lease.size, lease.part) == (4, 2)


async def test_a_replay_to_a_timeline_at_capacity_changes_nothing(store: Store) -> None:
    policy = Policy(capacity=2)
    await bury(store, "a")
    [letter] = await read_letters(store)
    await store.add("k", "b", "c", policy=policy)
    before = (await look(store), await store.held("k"))
    with pytest.raises(LimitExceeded, match=r"3 records.* capacity is 2"):
        await store.backend.replay(letter.id, policy.terms, True)
    assert (await look(store), await store.held("k")) == before
    assert await read_letters(store) == [letter]


async def test_dead_letters_of_30_days_make_room_at_the_next_burial_counted(store: Store) -> None:
    for name, when in (("first", 0), ("second", 1), ("third", 30 * DAY - 1)):
        store.now = NOW + when
        await bury(store, name)
    assert await buried(store) == ["first", "second", "third"]
    store.now += 1
    await bury(store, "fourth")
    assert await buried(store) == ["second", "third", "fourth"]
    counts = await store.backend.operations.counts()
    assert (counts["dead"], counts["letters_dropped"]) == (3, 1)


async def test_dead_letters_of_30_days_are_let_go_by_a_claim_that_finds_nothing_counted(store: Store) -> None:
    for number in range(LOOKS + 2):
        await bury(store, str(number))
    store.now += 30 * DAY
    first, second, third = [await store.claims() for _ in range(3)]
    assert [claims.let_go for claims in (first, second, third)] == [LOOKS, 2, 0]
    assert (first.wait_ms, second.wait_ms) == (0, None)
    counts = await store.backend.operations.counts()
    assert (counts["dead"], counts["letters_dropped"]) == (0, LOOKS + 2)


@pytest.mark.parametrize("memory_or_place", ["reference", "redis"], indirect=True)
async def test_dead_letters_over_a_number_of_bytes_make_the_oldest_go_counted(store: Store) -> None:
    await bury(store, "a")
    [letter] = await read_letters(store)
    with bound_of_dead_letters(3 * letter.size + letter.size // 2):
        for name in "bcd":
            store.now += 1
            await bury(store, name)
        assert await buried(store) == ["b", "c", "d"]
        assert await store.backend.discard((await read_letters(store))[1].id)
        store.now += 1
        await bury(store, "e")
        assert await buried(store) == ["b", "d", "e"]
        store.now += 1
        await bury(store, "f", value="v" * 4 * letter.size)  # more than all may take
        assert await buried(store) == ["f"]
    assert (await store.backend.operations.counts())["letters_dropped"] == 4


@pytest.mark.parametrize("memory_or_place", ["reference", "redis"], indirect=True)
async def test_a_close_tells_how_many_dead_letters_it_let_go(store: Store) -> None:
    with bound_of_dead_letters(1):
        await store.add("k", "a", "b")
        answer = await store.close(await store.claim(), letter="no", cool=0)
        assert answer.let_go == 0
        await store.add("k", "c")
        answer = await store.close(await store.claim(), letter="no")
        assert answer.let_go == 1


async def test_dead_letters_that_stay_come_once_in_their_pages_whatever_is_discarded(store: Store) -> None:
    for number, day in enumerate((0, 1, 2, 3, 3, 3, 4, 5)):
        store.now = NOW + day * DAY
        await bury(store, "a", key=f"k{number}")
    store.now = NOW + 32 * DAY
    read = partial(store.backend.operations.dead_letters, 0)
    living = [letter_id async for letter_id in all_pages(read)]
    assert sorted(letter.key for letter in await read_letters(store, living)) == ["k3", "k4", "k5", "k6", "k7"]
    discarded = [letter_id async for letter_id in all_pages(read) if await store.backend.discard(letter_id)]
    assert discarded == living
    assert await read(2) == ([], None)


async def test_a_page_of_dead_letters_has_none_that_reached_its_30_days_since_the_page_before(store: Store) -> None:
    for day in (0, 1, 20):
        store.now = NOW + day * DAY
        await bury(store, "a", key=f"k{day}")
    page = await store.backend.operations.dead_letters(0, 1)
    store.now = NOW + 31 * DAY
    names, end = await store.backend.operations.dead_letters(0, 2, page.end)
    assert ([letter.key for letter in await read_letters(store, names)], end) == (["k20"], None)


# Urgent adds, records that are not delivered twice, digests of so many bytes

LATER = Policy(initial_delay=60)
ONCE = Policy(initial_delay=60, minimum_delay=0, dedupe_window=600)
SIZED = Policy(initial_delay=60, max_bytes=100)


def named(*records: str) -> list[bytes]:
    return [identity_of(record.encode()) for record in records]


async def put(store: Store, *records: str, policy: Policy = LATER, urgent: bool = True, size: int = 0) -> list[object]:
    """Add records to "k" in one call."""
    adds = [
        Add("k", pack(record.encode(), None, b"v"), policy.terms, urgent=urgent, size=size) for record in records
    ]  # fmt: skip
    return [*await store.backend.add(store.backend.shard_map.shard_of("k"), adds)]


async def delivered(store: Store, lease: Lease, letter: list[str] | None = None, seen: list[str] | None = None) -> None:
    """Close a digest of which nothing is to come again for ten minutes."""
    letters = [] if letter is None else [NewDeadLetter("no", named(*letter))]
    close = Close(
        lease, lease.size, lease.size - len(letter or ()), 0, store.policy.terms.limits, LEASE, dead_letters=letters,
        dedupe_ms=600_000, seen=None if seen is None else named(*seen),
    )  # fmt: skip
    assert [
        closed.status
        for closed in await store.backend.close(store.backend.shard_map.shard_of("k"), [close])
        if isinstance(closed, Closed)
    ] == ["closed"]


async def duplicates(store: Store) -> int:
    return (await store.backend.operations.counts()).get("duplicates", 0)


async def test_an_urgent_add_makes_its_timeline_due_now_and_says_so_once(store: Store) -> None:
    assert await put(store, "a", "b", urgent=False) == [False, False]
    assert await put(store, "c", "d") == [True, False]
    lease = await store.claim()
    assert (ids(lease), lease.passes) == (["a", "b", "c", "d"], True)


async def test_an_urgent_add_goes_through_a_cool_down_and_ends_with_its_digest(store: Store) -> None:
    await put(store, "a", policy=Policy())
    await store.close(await store.claim())
    assert await put(store, "b", policy=Policy()) == [True]
    lease = await store.claim()
    assert lease.passes
    assert await store.close(lease) == Closed("closed")
    assert await put(store, "c", policy=Policy(), urgent=False) == [False]
    store.now += 331_000
    lease = await store.claim()
    assert (ids(lease), lease.passes) == (["c"], False)


async def test_an_urgent_add_ends_a_retry_wait_and_its_attempts_are_kept(store: Store) -> None:
    await store.add("k", "a")
    await store.retry(await store.claim(), 100_000)
    assert await put(store, "b") == [True]
    lease = await store.claim()
    assert (ids(lease), lease.attempt, lease.passes) == (["a", "b"], 2, True)
    await store.retry(lease, 1_000)
    store.now += 1_000
    assert (await store.claim()).passes, "it is the same digest"


async def test_an_urgent_add_under_delivery_is_due_after_its_close(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    assert (lease.passes, await put(store, "b")) == (False, [False])
    assert await store.close(lease) == Closed("closed")
    lease = await store.claim()
    assert (ids(lease), lease.passes) == (["b"], True)


async def test_what_was_urgent_while_its_digest_was_claimed_is_not_postponed(store: Store) -> None:
    await store.add("k", "a")
    lease = await store.claim()
    await put(store, "b")
    assert await store.postpone(lease, 36_000_000)
    lease = await store.claim()
    assert (ids(lease), lease.passes, lease.attempt) == (["a", "b"], True, 1)
    assert await store.postpone(lease, 36_000_000), "a second time nobody has asked for it since"
    assert await store.state("k") == "waiting"


async def test_urgent_and_other_adds_of_a_call_stay_in_order(store: Store) -> None:
    adds = [
        Add("k", pack(b"%d" % number, 0, b"v"), LATER.terms, urgent=number in (1, 2)) for number in range(4)
    ]  # fmt: skip
    assert await store.backend.add(store.backend.shard_map.shard_of("k"), adds) == [False, True, False, False]
    assert ids(await store.claim()) == ["0", "1", "2", "3"]


async def test_a_record_that_was_delivered_is_counted_and_not_stored_within_its_window(store: Store) -> None:
    await put(store, "a", policy=ONCE)
    await delivered(store, await store.claim())
    assert await put(store, "a", "b", "a", policy=ONCE) == [False, True, False]
    assert (await store.held("k"), await duplicates(store)) == ([("b", "v")], 2)
    store.now += 600_000
    assert await put(store, "a", policy=ONCE) == [False]
    assert await store.held("k") == [("b", "v"), ("a", "v")]


async def test_an_urgent_duplicate_flushes_nothing(store: Store) -> None:
    await put(store, "a", policy=ONCE)
    await delivered(store, await store.claim())
    await put(store, "b", policy=ONCE, urgent=False)
    assert await put(store, "a", policy=ONCE) == [False]
    assert await store.state("k") == "waiting"


async def test_a_record_that_comes_again_under_delivery_is_left_out_when_the_next_digest_is_opened(
    store: Store,
) -> None:
    await put(store, "a", policy=ONCE)
    lease = await store.claim()
    await put(store, "a", "b", "a", policy=ONCE)
    await delivered(store, lease)
    lease = await store.claim()
    assert (ids(lease), lease.iteration, await duplicates(store)) == (["b"], 2, 1)


@pytest.mark.parametrize("sample", [False, True])
async def test_a_digest_of_duplicates_alone_ends_without_a_delivery_or_a_cool_down(store: Store, sample: bool) -> None:
    await put(store, "a", policy=ONCE)
    lease = await store.claim()
    await put(store, "a", policy=ONCE)
    await delivered(store, lease)
    await store.add("other", "a")
    claims = await store.claims(sample=sample)
    if store.backend.shard_map.shard_of("other") == store.backend.shard_map.shard_of("k"):
        assert [lease.key for lease in claims.leases] == ["other"]
    assert (await store.state("k"), await duplicates(store)) == (None, 1)
    assert (await store.backend.operations.counts())["delivered"] == 1
    await put(store, "b", policy=ONCE, urgent=False)
    assert await store.due("k") == 60_000


async def test_opening_a_timeline_of_duplicates_alone_finds_nothing(store: Store) -> None:
    await put(store, "a", policy=ONCE)
    lease = await store.claim()
    await put(store, "a", policy=ONCE)
    await delivered(store, lease)
    shard = store.backend.shard_map.shard_of("k")
    assert await store.backend.open(shard, "k", LEASE, ONCE.terms.limits) is None
    assert await store.state("k") is None


async def test_what_became_a_dead_letter_or_was_not_named_may_come_again(store: Store) -> None:
    await put(store, "a", "b", policy=ONCE)
    await delivered(store, await store.claim(), letter=["a"])
    assert await put(store, "a", "b", policy=ONCE) == [True, False]
    await delivered(store, await store.claim(), seen=[])
    assert await put(store, "a", policy=ONCE) == [True]


async def test_what_a_partial_failure_delivered_does_not_come_again_and_what_failed_does(store: Store) -> None:
    await put(store, "a", "b", policy=ONCE)
    lease = await store.claim()
    await put(store, "a", "b", policy=ONCE)
    partial = Retry(lease, 1_000, "boo", ONCE.terms.limits, 2, named("b"), 1, dedupe_ms=600_000)
    assert await store.backend.retry(0, [partial]) == [True]
    store.now += 1_000
    lease = await store.claim()
    assert (ids(lease), await duplicates(store)) == (["b"], 1)
    await delivered(store, lease)
    assert await put(store, "a", "b", policy=ONCE) == [False, False]


async def test_a_frozen_digest_is_tried_again_whole_and_nothing_of_it_counts_as_delivered(store: Store) -> None:
    await put(store, "a", "b", policy=ONCE)
    await store.retry(await store.claim(), unknown=True)
    store.now += 1_000
    lease = await store.claim()
    partial = Retry(lease, 1_000, "boo", ONCE.terms.limits, 2, named("b"), 1, dedupe_ms=600_000)
    assert await store.backend.retry(0, [partial]) == [True]
    store.now += 1_000
    assert ids(await store.claim()) == ["a", "b"]
    await put(store, "a", policy=ONCE)
    assert (await store.held("k"))[-1] == ("a", "v")


async def test_a_replayed_letter_is_delivered_although_its_records_were_since(store: Store) -> None:
    await put(store, "a", "b", policy=ONCE)
    await delivered(store, await store.claim(), letter=["a"])
    await put(store, "a", policy=ONCE)
    await delivered(store, await store.claim())
    [letter] = (await store.backend.operations.dead_letters(0, 10)).items
    assert not await store.backend.replay(letter, ONCE.terms, False)
    await store.backend.flush("k")
    assert ids(await store.claim()) == ["a"]


async def test_deleting_a_timeline_forgets_what_it_has_delivered(store: Store) -> None:
    await put(store, "a", policy=ONCE)
    await delivered(store, await store.claim())
    await store.backend.delete("k")
    assert await put(store, "a", policy=ONCE) == [True]


async def test_reaching_max_bytes_makes_a_timeline_due_at_once(store: Store) -> None:
    assert await put(store, "a", "b", "c", "d", policy=SIZED, urgent=False, size=40) == [False, False, True, False]
    lease = await store.claim()
    assert (lease.due_ms, lease.bound, lease.passes) == (NOW, 100, False)
    await put(store, "e", "f", policy=SIZED, urgent=False, size=40)
    await store.close(lease)
    assert await store.due("k") == 300_000
    assert await put(store, "g", policy=SIZED, urgent=False, size=20) == [True]


async def test_what_came_under_delivery_is_due_after_its_close_if_it_is_as_large_as_a_digest(store: Store) -> None:
    await put(store, "a", policy=SIZED)
    lease = await store.claim()
    await put(store, "b", "c", policy=SIZED, urgent=False, size=50)
    await store.close(lease)
    assert ids(await store.claim()) == ["b", "c"]


async def test_a_claim_with_a_smaller_bound_keeps_it_and_a_larger_one_gives_way_to_that_of_the_timeline(
    store: Store,
) -> None:
    for bound, expected in ((50, 50), (5_000, 100)):
        await put(store, "a", policy=SIZED)
        shard = store.backend.shard_map.shard_of("k")
        [lease] = (await store.backend.claim(shard, 1, LEASE, SIZED.terms.limits, bound=bound)).leases
        assert lease.bound == expected
        await store.close(lease)


async def test_a_shorter_window_forgets_nothing_of_a_longer_one(store: Store) -> None:
    for name, window in (("a", 3_600_000), ("b", 1_000), ("c", 1_000)):
        await put(store, name, policy=ONCE)
        lease = await store.claim()
        close = Close(lease, 1, 1, 0, store.policy.terms.limits, LEASE, dedupe_ms=window)
        await store.backend.close(store.backend.shard_map.shard_of("k"), [close])
        store.now += 2_000
    await put(store, "a", "b", policy=ONCE)
    assert ids(await store.claim()) == ["b"]
    assert await duplicates(store) == 1


async def test_a_dead_letter_that_is_replayed_into_an_idle_timeline_comes_in_parts_of_max_bytes(store: Store) -> None:
    await bury(store, "a")
    shard = store.backend.shard_map.shard_of("k")
    [letter] = (await store.backend.operations.dead_letters(shard, 1)).items
    await store.backend.replay(letter, SIZED.terms, None)
    store.now += 60_000
    assert (await store.claim()).bound == 100
