"""A namespace of several shards: each has its own timelines, and where there is a cluster, a primary that it is on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from redis.crc import key_slot
from stores import LEASE, NOW, Place, Store, ids
from storestate import State, check_invariants, forget, redis_state

from aiodigest.backend import Add, Closed, Move
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.layout import Layout
from aiodigest.policy import Policy
from aiodigest.records.entries import pack

SHARDS = 6
LAYOUT = Layout(SHARDS)


@dataclass
class Shards(Store):
    """A store of six shards; ``keys[shard]`` are two timelines of each."""

    place: Place = field(kw_only=True)
    namespace: str = field(kw_only=True)

    def __post_init__(self) -> None:
        keys, shard_of = [f"k{number}" for number in range(200)], self.backend.shard_map.shard_of
        self.keys = [[key for key in keys if shard_of(key) == shard][:2] for shard in range(SHARDS)]

    @property
    def all_keys(self) -> list[str]:
        return [key for keys in self.keys for key in keys]

    async def fill(self) -> None:
        """A record for each timeline, a second after that of the one before."""
        for key in self.all_keys:
            await self.add(key, f"of-{key}")
            self.now += 1_000

    def tags(self) -> list[str]:
        return [LAYOUT.tag(self.namespace, shard) for shard in range(SHARDS)]

    def kept(self) -> list[State]:
        """What each shard keeps."""
        states: list[State] = []
        for tag in self.tags():
            with self.place.client_of(tag) as client:
                states.append(redis_state(client, tag))
        return states

    def clear(self) -> None:
        for tag in (*self.tags(), self.namespace):
            with self.place.client_of(tag) as client:
                forget(client, tag)


@pytest.fixture
async def shards(place: Place, namespace: str) -> AsyncIterator[Shards]:
    """Six shards in each place, and a check of what the test leaves in them."""
    shards: Shards
    nonces = (f"n{number}" for number in count(1))
    backend = RedisBackend(
        place.url, namespace=namespace, shards=SHARDS, now=lambda: shards.now, nonce=lambda: next(nonces)
    )
    await backend.connect()
    shards = Shards(backend, place=place, namespace=namespace)
    yield shards
    await backend.aclose()
    try:
        for shard, state in enumerate(shards.kept()):
            check_invariants(state)
            assert {backend.shard_map.shard_of(key.decode()) for key in state["timelines"]} <= {shard}
    finally:
        shards.clear()


# Where the shards are


@pytest.mark.cluster
def test_each_shard_has_its_own_part_of_the_slots_and_each_primary_as_many_shards(
    on_cluster: Place, namespace: str
) -> None:
    tags = [LAYOUT.tag(namespace, shard) for shard in range(SHARDS)]
    slots = [key_slot(f"{{{tag}}}:ready".encode()) for tag in tags]
    assert [slot * SHARDS // 16_384 for slot in slots] == list(range(SHARDS))
    primaries: list[bytes] = []
    for tag, slot in zip(tags, slots, strict=True):
        with on_cluster.client_of(tag) as client:
            assert client.execute_command("CLUSTER", "KEYSLOT", f"{{{tag}}}:ready") == slot, "the server counts alike"
            primaries.append(client.execute_command("CLUSTER", "MYID"))
    assert sorted(Counter(primaries).values()) == [2, 2, 2]


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["cluster"], indirect=True)
async def test_all_keys_of_a_shard_are_in_one_slot(shards: Shards, on_cluster: Place) -> None:
    await shards.fill()
    for keys, tag in zip(shards.keys, shards.tags(), strict=True):
        expected = {"layout", "ready", "wake"} | {f"{kind}:{key}" for key in keys for kind in ("log", "meta")}
        with on_cluster.client_of(tag) as client:
            found = client.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(f"{{{tag}}}:".encode()), 100)
        assert {key.decode() for key in found} == {f"{{{tag}}}:{name}" for name in expected}


async def test_a_timeline_is_kept_in_the_shard_of_its_key_and_in_no_other(shards: Shards) -> None:
    await shards.fill()
    for keys, state in zip(shards.keys, shards.kept(), strict=True):
        assert sorted(key.decode() for key in state["timelines"]) == sorted(keys)
        assert [key.decode() for key in state["ready"]] == keys


# Delivering


async def test_a_lease_is_known_to_its_own_shard_alone(shards: Shards) -> None:
    await shards.fill()
    lease = (await shards.claims(1)).leases[0]
    for shard in range(1, SHARDS):
        assert await shards.backend.renew(shard, [lease], LEASE) == [False]
        assert await shards.backend.release(shard, [lease], True) == [False]
    assert await shards.backend.renew(0, [lease], LEASE) == [True]
    assert await shards.close(lease) == Closed("closed")


async def test_the_leases_of_a_shard_lapse_while_nobody_claims_from_another(shards: Shards) -> None:
    await shards.fill()
    other = (await shards.claims(1, shard=1)).leases[0]
    lost = (await shards.claims(1, shard=3)).leases[0]
    for _ in range(3):
        shards.now += LEASE // 3
        await shards.claims(0, shard=3)
    assert {lease.key for lease in (await shards.claims(shard=3)).leases} == set(shards.keys[3])
    assert await shards.close(lost) == Closed("lost")
    assert [lease.key for lease in (await shards.claims(shard=1)).leases] == shards.keys[1][1:]
    assert await shards.close(other) == Closed("closed")


async def test_a_doorbell_rings_for_its_own_shard(shards: Shards) -> None:
    shards.policy = Policy(initial_delay=600)
    await shards.fill()
    bells = [(await shards.claims(0, shard)).wake_up for shard in range(SHARDS)]
    sleepers = [asyncio.create_task(shards.backend.wait(shard, bells[shard])) for shard in range(SHARDS)]
    for shard in reversed(range(SHARDS)):
        await shards.backend.flush(shards.keys[shard][1])
        async with asyncio.timeout(60):
            await sleepers[shard]
        assert [sleeper.done() for sleeper in sleepers] == [other >= shard for other in range(SHARDS)]


# By hand


async def test_counts_are_sums_over_all_shards_and_the_oldest_is_that_of_all(shards: Shards) -> None:
    shards.policy = Policy(initial_delay=600)
    await shards.fill()
    for keys in shards.keys:
        assert await shards.backend.flush(keys[0])
    [lease] = (await shards.claims(shard=4)).leases
    counts = await shards.backend.operations.counts()
    assert (counts["waiting"], counts["ready"], counts["leased"]) == (SHARDS, SHARDS - 1, 1)
    assert counts["oldest_due_ms"] == min([await shards.due(key) for key in shards.all_keys if key != lease.key]) + NOW


async def test_a_page_has_the_timelines_of_one_shard_the_earliest_first(shards: Shards) -> None:
    shards.policy = Policy(initial_delay=600)
    await shards.fill()
    for shard, (first, second) in enumerate(shards.keys):
        page = await shards.backend.operations.page(shard, "waiting", 10)
        assert ([window.key for window in page.items], page.end) == ([first, second], None)
        page = await shards.backend.operations.page(shard, "waiting", 1)
        assert [window.key for window in page.items] == [first]
        page = await shards.backend.operations.page(shard, "waiting", 10, page.end)
        assert ([window.key for window in page.items], page.end) == ([second], None)
        assert (await shards.backend.operations.page(shard, "ready", 10)).items == []


async def test_what_is_due_is_promoted_and_what_was_leased_recovered_in_every_shard(shards: Shards) -> None:
    shards.policy = Policy(initial_delay=600)
    await shards.fill()
    shards.now += 600_000
    assert sorted(key for key, _ in await shards.backend.schedule()) == sorted(shards.all_keys)
    for shard in range(SHARDS):
        assert len((await shards.claims(shard=shard)).leases) == 2
    for _ in range(2):
        shards.now += LEASE * 2 // 5
        for shard in range(SHARDS):
            await shards.claims(0, shard)
    shards.now += LEASE * 2 // 5
    assert sorted(await shards.backend.maintenance()) == sorted(shards.all_keys)


async def test_a_timeline_of_any_shard_is_found_by_its_key_alone(shards: Shards) -> None:
    shards.policy = Policy(initial_delay=600)
    await shards.fill()
    limits = shards.policy.terms.limits
    for first, second in shards.keys:
        window = await shards.backend.operations.look(first)
        assert window is not None
        assert (window.key, window.state, window.logged) == (first, "waiting", 1)
        assert await shards.held(first) == [(f"of-{first}", "v")]
        assert await shards.backend.reschedule(first, Move(shards.policy.terms, at_ms=NOW + 700_000)) == NOW + 700_000
        assert await shards.backend.flush(first)
        async with shards.backend.digest(first, shards.policy) as lease:
            assert ids(lease) == [f"of-{first}"]
        assert await shards.backend.remove(second, f"of-{second}".encode(), limits)
        assert await shards.state(second) is None
        await shards.add(second, "again")
        assert await shards.backend.delete(second)
    assert (await shards.backend.operations.counts())["waiting"] == 0


# Dead letters


async def buried(shards: Shards) -> list[str]:
    """Ids of one dead letter in each shard."""
    await shards.fill()
    for shard in range(SHARDS):
        [lease] = (await shards.claims(1, shard)).leases
        await shards.close(lease, letter=f"no good in {shard}", cool=0)
    return [(await shards.backend.operations.dead_letters(shard, 10)).items[0] for shard in range(SHARDS)]


async def test_each_shard_lists_its_own_dead_letters_and_any_is_found_by_its_id_alone(shards: Shards) -> None:
    names = await buried(shards)
    assert len(set(names)) == SHARDS
    for shard, name in enumerate(names):
        assert (await shards.backend.operations.dead_letters(shard, 10)).items == [name]
        assert await shards.backend.operations.dead_letter(name, (shard + 1) % SHARDS) is None
        letter = await shards.backend.operations.dead_letter(name, shard)
        assert letter == await shards.backend.operations.dead_letter(name)
        assert letter is not None
        assert (letter.key, letter.reason) == (shards.keys[shard][0], f"no good in {shard}")
    assert (await shards.backend.operations.counts())["dead"] == SHARDS
    assert await shards.backend.operations.dead_letter("unknown") is None


@pytest.mark.parametrize("way", ["replay", "discard"])
async def test_a_dead_letter_of_any_shard_is_replayed_or_discarded_and_the_others_stay(
    shards: Shards, way: str
) -> None:
    names, operations = await buried(shards), shards.backend.operations
    while names:
        name = names.pop(len(names) // 2)
        letter = await operations.dead_letter(name)
        assert letter is not None
        if way == "replay":
            assert await shards.backend.replay(name, shards.policy.terms, False)
        else:
            assert await shards.backend.discard(name)
        assert await shards.held(letter.key) == ([(f"of-{letter.key}", "v")] if way == "replay" else [])
        assert not await shards.backend.discard(name)
        left = [each for shard in range(SHARDS) for each in (await operations.dead_letters(shard, 10)).items]
        assert left == names


# Many at once


async def test_shards_take_adds_and_give_digests_at_the_same_time(shards: Shards) -> None:
    """Calls on all shards at once, each to its own primary on a cluster, mix up no answers."""

    async def one(shard: int) -> None:
        for number in range(20):
            adds = [
                Add(key, pack(f"{number}".encode(), None, key.encode()), shards.policy.terms)
                for key in shards.keys[shard]
            ]
            assert await shards.backend.add(shard, adds) == [True, True]
            leases = (await shards.claims(shard=shard)).leases
            assert sorted(lease.key for lease in leases) == sorted(shards.keys[shard])
            for lease in leases:
                assert ids(lease) == [f"{number}"]
                assert await shards.close(lease, cool=0) == Closed("closed")
            assert (await shards.claims(shard=shard)).leases == []

    await asyncio.gather(*(one(shard) for shard in range(SHARDS)))
    counts = await shards.backend.operations.counts()
    assert (counts["digests"], counts["delivered"]) == (2 * 20 * SHARDS, 2 * 20 * SHARDS)
    assert (counts["waiting"], counts["ready"], counts["leased"]) == (0, 0, 0)
