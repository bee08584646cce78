"""A namespace of several shards: each has its own timelines, and where there is a cluster, a primary that it is on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from redis.crc import key_slot
from stores import LEASE, NOW, Place, Store, ids
from storestate import State, check_invariants, forget, redis_state

from aiodigest.backend import Closed, Move
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.layout import Layout
from aiodigest.policy import Policy
from aiodigest.records.entries import identity_of

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


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["cluster"], indirect=True)
async def test_all_keys_of_a_shard_are_in_one_slot(shards: Shards, on_cluster: Place) -> None:
    await shards.fill()
    for keys, tag in zip(shards.keys, shards.tags(), strict=True):
        expected = {"layout", "ready", "wake"} | {f"{kind}:{key}" for key in keys for kind in ("log", "meta")}
        with on_cluster.client_of(tag) as client:
            found = client.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(f"{{{tag}}}:".encode()), 100)
        assert {key.decode() for key in found} == {f"{{{tag}}}:{name}" for name in expected}


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
        assert await shards.backend.remove(second, identity_of(f"of-{second}".encode()), limits)
        assert await shards.state(second) is None
        await shards.add(second, "again")
        assert await shards.backend.delete(second)
    assert (await shards.backend.operations.counts())["waiting"] == 0


@pytest.mark.parametrize("way", ["replay", "discard"])
async def test_a_dead_letter_of_any_shard_is_found_and_replayed_or_discarded(shards: Shards, way: str) -> None:
    await shards.fill()
    names, operations = list[str](), shards.backend.operations
    for shard in range(SHARDS):
        [lease] = (await shards.claims(1, shard)).leases
        await shards.close(lease, letter="no good", cool=0)
        names += (await operations.dead_letters(shard, 10)).items
    for shard, name in reversed([*enumerate(names)]):
        assert await operations.dead_letter(name, (shard + 1) % SHARDS) is None
        letter = await operations.dead_letter(name)
        assert letter is not None
        if way == "replay":
            assert await shards.backend.replay(name, shards.policy.terms, False)
        else:
            assert await shards.backend.discard(name)
        assert await shards.held(letter.key) == ([(f"of-{letter.key}", "v")] if way == "replay" else [])
        assert not await shards.backend.discard(name)
        assert (await operations.counts())["dead"] == shard
