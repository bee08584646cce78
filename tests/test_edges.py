"""Small scenarios that a first design gets wrong (the table in faults.md has them all): those no other file shows."""

from __future__ import annotations

import asyncio

import pytest
from engines import Inbox, WatchedBackend, delivering, forever, now, virtual_time
from processes import running
from servers import Server
from stores import LEASE, Place, Store, ids, records

from aiodigest import Policy
from aiodigest.backend import Add, Closed
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.errors import LimitExceeded
from aiodigest.records.entries import pack

LIMITS = Policy().terms.limits


async def test_a_record_that_capacity_dropped_stays_away_when_a_newer_one_is_removed(store: Store) -> None:
    policy = Policy(capacity=2)
    await store.add("k", "a", "b", "c", policy=policy)
    assert await store.backend.remove("k", b"c", policy.terms.limits)
    assert ids(await store.claim()) == ["b"]


async def test_a_replay_to_a_timeline_at_capacity_changes_nothing(store: Store) -> None:
    policy = Policy(capacity=2)
    await store.add("k", "a", policy=policy)
    await store.close(await store.claim(), letter="no", cool=0)
    await store.add("k", "b", "c", policy=policy)
    [name] = (await store.backend.operations.dead_letters(0, 10)).items
    before = (
        await store.backend.operations.look("k"),
        await store.held("k"),
        await store.backend.operations.dead_letter(name),
    )
    with pytest.raises(LimitExceeded, match="capacity is 2"):
        await store.backend.replay(name, policy.terms, True)
    assert (
        await store.backend.operations.look("k"),
        await store.held("k"),
        await store.backend.operations.dead_letter(name),
    ) == before


def other_process(backend: WatchedBackend) -> WatchedBackend:
    """The same store as another process sees it, which can lose its own connection."""
    other = WatchedBackend(backend.shard_map.count)
    other.machines[:] = backend.machines
    other._wake_ups, other._woken = backend._wake_ups, backend._woken
    return other


@virtual_time
async def test_an_idle_worker_takes_over_from_one_that_died_within_two_leases() -> None:
    backend, alive, dead = WatchedBackend(), Inbox(), Inbox(forever)
    doomed = other_process(backend)
    async with delivering(dead, doomed, drain_timeout=0):
        await backend.put("key", 1)
        held = await dead.digest()
        async with delivering(alive, backend):
            await asyncio.sleep(90)
            assert not alive.digests, "the lease is renewed while its worker lives"
            doomed.take_down()
            died = now()
            digest = await alive.digest()
            assert now() <= died + 2 * LEASE / 1000
    assert (digest.id, digest.attempt, len(alive.digests)) == (held.id, 2, 1)


@virtual_time
async def test_a_worker_that_starts_ten_minutes_after_another_died_takes_over_within_two_leases() -> None:
    backend, alive, dead = WatchedBackend(), Inbox(), Inbox(forever)
    doomed = other_process(backend)
    async with delivering(dead, doomed, drain_timeout=0):
        await backend.put("key", 1)
        held = await dead.digest()
        doomed.take_down()
        await asyncio.sleep(600)
        async with delivering(alive, backend):
            digest = await alive.digest()
            assert now() <= 600 + 2 * LEASE / 1000
    assert (digest.id, digest.attempt, len(alive.digests)) == (held.id, 2, 1)


async def test_a_part_whose_close_was_not_heard_is_closed_once_and_the_next_comes_again(store: Store) -> None:
    store.policy = Policy(max_size=2)
    await store.add("k", "a", "b", "c", "d", "e")
    lease = await store.claim()
    answers = [await store.close(lease, 2) for _ in range(3)]
    assert {(answer.status, answer.left) for answer in answers} == {("part", 3)}
    assert len({answer.digest_id for answer in answers}) == 1
    assert [record for record, _ in await store.held("k")] == ["c", "d", "e"]
    await store.lapse()
    again = await store.claim()
    assert (again.digest_id, ids(again)[: again.part]) == (answers[0].digest_id, ["c", "d"])


async def test_a_late_close_after_another_claim_is_lost_and_changes_nothing(store: Store) -> None:
    await store.add("k", "a")
    late = await store.claim()
    await store.lapse()
    other = await store.claim()
    before = (await store.backend.operations.look("k"), await store.held("k"), await store.backend.operations.counts())
    assert [await store.close(late) for _ in range(2)] == [Closed("lost")] * 2
    assert (
        await store.backend.operations.look("k"),
        await store.held("k"),
        await store.backend.operations.counts(),
    ) == before
    assert await store.close(other) == Closed("closed")


async def test_two_adds_of_a_new_key_in_one_call_open_one_window(store: Store) -> None:
    assert await store.add("k", "a", "b") == [True, False]
    assert records((await store.claim()).entries) == [("a", "v"), ("b", "v")]
    assert (await store.claims()).leases == []


@pytest.mark.processes
async def test_two_processes_that_add_at_once_open_one_window(server: Server, namespace: str) -> None:
    timelines = 100
    async with (
        running("opener.py", server.socket, namespace, "one", timelines) as one,
        running("opener.py", server.socket, namespace, "two", timelines) as two,
    ):
        answers = await asyncio.gather(one.rest(), two.rest())
    for pair in zip(*answers, strict=True):
        assert sorted(pair) == ["False", "True"]
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    leases = (await backend.claim(0, timelines, LEASE, LIMITS)).leases
    assert sorted(lease.key for lease in leases) == sorted(f"k{number}" for number in range(timelines))
    assert {tuple(sorted(ids(lease))) for lease in leases} == {("one", "two")}
    await backend.aclose()


# Contents and ids: the same id means the same contents


async def test_after_a_timeout_the_digest_comes_again_as_it_was_and_newer_records_wait(store: Store) -> None:
    await store.add("k", "a")
    first = await store.claim()
    await store.add("k", "b")
    assert await store.retry(first, unknown=True)
    store.now += 1_000
    second = await store.claim()
    assert (second.digest_id, ids(second), second.attempt) == (first.digest_id, ["a"], 2)
    await store.close(second, cool=0)
    assert ids(await store.claim()) == ["b"]


@virtual_time
async def test_a_digest_whose_callback_was_cut_short_comes_again_as_it_was() -> None:
    inbox, backend = Inbox(forever), WatchedBackend()
    await backend.put("key", 1)
    async with delivering(inbox, backend, drain_timeout=0):
        first = await inbox.digest()
        await backend.put("key", 2)
    lease = await backend.open(0, "key", LEASE, LIMITS)
    assert lease is not None
    assert (lease.digest_id, lease.attempt, ids(lease)) == (first.id, 1, ["1"])


async def test_a_digest_of_which_a_part_failed_has_another_id(store: Store) -> None:
    await store.add("k", "a", "b")
    first = await store.claim()
    assert await store.retry(first, failed=["b"])
    store.now += 1_000
    second = await store.claim()
    assert (second.digest_id == first.digest_id, ids(second)) == (False, ["b"])


async def test_a_digest_that_failed_whole_has_its_id_again_if_nothing_came_since(store: Store) -> None:
    await store.add("k", "a")
    first = await store.claim()
    await store.retry(first)
    store.now += 1_000
    assert (await store.claim()).digest_id == first.digest_id


async def test_a_digest_from_which_a_record_was_removed_in_its_retry_wait_has_another_id(store: Store) -> None:
    await store.add("k", "a", "b")
    first = await store.claim()
    await store.retry(first)
    assert await store.backend.remove("k", b"a", LIMITS)
    store.now += 1_000
    second = await store.claim()
    assert (second.digest_id == first.digest_id, ids(second)) == (False, ["b"])


async def test_a_record_stays_in_a_digest_that_waits_after_a_timeout(store: Store) -> None:
    await store.add("k", "a", "b")
    first = await store.claim()
    await store.retry(first, unknown=True)
    assert not await store.backend.remove("k", b"a", LIMITS)
    store.now += 1_000
    second = await store.claim()
    assert (second.digest_id, ids(second)) == (first.digest_id, ["a", "b"])


async def test_a_digest_that_was_released_unstarted_has_its_id_again_if_nothing_came_since(store: Store) -> None:
    await store.add("k", "a")
    first = await store.claim()
    await store.release(first, started=False)
    assert (await store.claim()).digest_id == first.digest_id


# Due times


async def test_an_add_in_a_retry_wait_pushes_nothing_and_makes_nothing_ready(store: Store) -> None:
    store.policy = Policy(max_size=2)
    await store.add("k", "a")
    await store.retry(await store.claim(), 5_000)
    assert await store.add("k", "b", "c", "d") == [False, False, False]
    assert (await store.state("k"), await store.due("k")) == ("waiting", 5_000)


async def test_a_replay_of_a_new_timeline_makes_it_ready_and_counts_newer_values_once(store: Store) -> None:
    policy = Policy(capacity=2)
    await store.add("k", "a", "b", policy=policy, value="old")
    await store.close(await store.claim(), letter="no", cool=0)
    [name] = (await store.backend.operations.dead_letters(0, 10)).items
    await store.add("k", "a", policy=policy, value="new")
    assert not await store.backend.replay(name, policy.terms, True)  # the add had made it ready
    lease = await store.claim()
    assert dict(records(lease.entries)) == {"a": "new", "b": "old"}


async def test_the_doorbell_rings_when_a_waiting_timeline_is_flushed(place: Place, namespace: str) -> None:
    backend = RedisBackend(place.url, namespace=namespace)
    await backend.connect()
    try:
        await backend.add(0, [Add("k", pack(b"a", None, b"1"), Policy(initial_delay=600).terms)])
        bell = (await backend.claim(0, 0, LEASE, LIMITS)).wake_up
        sleeper = asyncio.create_task(backend.wait(0, bell))
        await backend.flush("k")
        async with asyncio.timeout(600):
            assert await sleeper != bell, "it has woken by itself"
    finally:
        await backend.aclose()


@pytest.mark.parametrize("size", [5, 40])
async def test_a_log_that_waits_is_never_longer_than_its_max_size_and_a_quarter(store: Store, size: int) -> None:
    policy = Policy(max_size=size, initial_delay=600)
    for number in range(4 * size):
        assert await store.add("k", f"{number % (size - 1)}", policy=policy, value=f"{number}") == [False]
        window = await store.backend.operations.look("k")
        assert window is not None
        assert window.logged <= size + size // 4
    assert await store.add("k", *(f"new {number}" for number in range(1 + size // 4)), policy=policy)
    assert await store.state("k") == "ready", "it is found full a quarter late at most"
    newest = {f"{number % (size - 1)}": f"{number}" for number in range(4 * size)}
    assert dict(records((await store.claim()).entries)).items() >= newest.items()


async def test_a_log_is_never_longer_than_its_capacity_and_a_quarter(store: Store) -> None:
    policy = Policy(capacity=8, initial_delay=600)
    for number in range(50):
        await store.add("k", f"{number}", policy=policy)
        window = await store.backend.operations.look("k")
        assert window is not None
        assert window.logged <= 10
        assert window.logged + window.dropped == number + 1
