"""A cluster beside one server: the same load, on three primaries, and what the death of one of them costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, sub
from statistics import mean
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from redis.exceptions import RedisError

from aiodigest import JSON, BackendUnavailable, DigestEngine, Entry
from aiodigest.backends.redis.layout import Layout
from benchmarks.baselines import VALUE, spread
from benchmarks.clusters import NODE_TIMEOUT, Cluster, fresh_cluster, until
from benchmarks.programs import ProgramFailed
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn, timed
from benchmarks.worker import deliver_apart

NAMESPACE = "scaling"
SHARDS = 16
PRIMARIES = 3
RECORDS = 10  # a digest
CHUNK = 10_000  # entries of an add_many
TASKS = 200
KILLS = 5


class Spent(NamedTuple):
    """Microseconds of a server's."""

    scripts: float  # by its own count, which runs on while other programs have the core
    computed: float  # by the system's, with all that is not a script


@dataclass(frozen=True, eq=False)
class Place:
    """Where a load is put: one server, or a cluster."""

    url: str
    clients: Sequence[Any]  # of each primary
    shards: int

    def engine(self) -> DigestEngine[JSON]:
        return DigestEngine[JSON](self.url, namespace=NAMESPACE, shards=self.shards, timeout=60)

    async def flush(self) -> None:
        for client in self.clients:
            await client.flushall()

    async def spent(self, work: Callable[[], Awaitable[object]]) -> list[Spent]:
        """What each server spends on some work."""
        for client in self.clients:
            await client.config_resetstat()
        before = [await computed(client) for client in self.clients]
        await work()
        stats = [await client.info("commandstats") for client in self.clients]
        scripts = [
            sum(one[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in one) for one in stats
        ]
        after = [await computed(client) for client in self.clients]
        return [Spent(*each) for each in zip(scripts, map(sub, after, before), strict=True)]

    async def add(self, timelines: int) -> None:
        """Make timelines ready, in calls of many adds."""
        async with self.engine() as engine:
            for _ in range(RECORDS):
                for start in range(0, timelines, CHUNK):
                    end = min(start + CHUNK, timelines)
                    await engine.add_many(Entry(f"user:{number}", VALUE) for number in range(start, end))

    async def deliver(self, timelines: int) -> float:
        """Have another process deliver; digests a second."""
        return (await deliver_apart(self.url, NAMESPACE, timelines)).rate


async def computed(client: Any) -> float:
    """Microseconds of the core that a server's main thread has had; of all its threads where it does not tell."""
    info = await client.info("cpu")
    return 1e6 * sum(info.get(f"{name}_main_thread", info[name]) for name in ("used_cpu_user", "used_cpu_sys"))


Phase: TypeAlias = "dict[Place, list[list[Spent]]]"  # a list a round, of each server


def unevenness(parts: Sequence[float]) -> float:
    """How far the part that is farthest from the mean is from it."""
    return max(abs(part / mean(parts) - 1) for part in parts)


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    async with fresh_cluster(PRIMARIES, on_disk=setting.on_disk) as cluster:
        one = Place(setting.url, [setting.client()], 1)
        many = [Place(cluster.url, [node.client() for node in cluster.nodes], shards) for shards in (1, 4, SHARDS)]
        async for row in server_time(setting, one, many[-1]):
            yield row
        async for row in throughput(setting, one, many):
            yield row
    async with fresh_cluster(PRIMARIES, replicas=1, on_disk=setting.on_disk) as cluster:
        async for row in failover(setting, cluster):
            yield row


async def server_time(setting: Setting, one: Place, many: Place) -> AsyncGenerator[Row, None]:
    """What each primary spends, and all of them beside one server."""
    timelines = setting.some(100_000)
    records = timelines * RECORDS
    adding: Phase = {one: [], many: []}
    delivering: Phase = {one: [], many: []}

    async def load(place: Place) -> float:
        await place.flush()
        adding[place].append(await place.spent(partial(place.add, timelines)))
        delivering[place].append(await place.spent(partial(place.deliver, timelines)))
        return 0.0

    await in_turn(min(setting.rounds, 3), cluster=partial(load, many), server=partial(load, one))
    what, beside = f"{timelines:,} timelines, {SHARDS} shards", "one server, one shard"
    phases = {f"adds of {RECORDS} records": adding, "deliveries": delivering}
    for phase, parts in phases.items():
        away = [100 * unevenness([primary.scripts for primary in primaries]) for primaries in parts[many]]
        yield Row(f"{what}: the primary of {PRIMARIES} farthest from the mean, {phase}", "", "%", away, bound=15)

    def beside_one(what: str, clock: Callable[[Spent], float], *parts: Phase, bound: float | None = None) -> Row:
        def of(place: Place) -> list[float]:
            played = zip(*(part[place] for part in parts), strict=True)
            return [sum(clock(spent) for servers in each for spent in servers) / records for each in played]

        return Row(what, beside, "us", of(many), of(one), bound)

    # where servers share cores, the time of scripts is mostly that of others, so the bound is of the core
    yield beside_one(f"{what}: the servers' core a record", attrgetter("computed"), adding, delivering, bound=1.15)
    yield beside_one("the same, time of scripts on the wall clock", attrgetter("scripts"), adding, delivering)
    for phase, parts in phases.items():
        yield beside_one(f"server time a record of these, {phase}", attrgetter("scripts"), parts)
        yield beside_one(f"the servers' core a record of these, {phase}", attrgetter("computed"), parts)


async def throughput(setting: Setting, one: Place, many: Sequence[Place]) -> AsyncGenerator[Row, None]:
    """What one process does a second: its core is the bound, so that a cluster is not faster."""
    adds, timelines = setting.some(20_000, 400), setting.some(5_000, 100)
    costs: dict[str, list[float]] = {}

    async def add(name: str, place: Place) -> float:
        await place.flush()
        async with place.engine() as engine:
            await spread(engine.add, TASKS, TASKS)  # connections are made, and scripts loaded
            seconds: list[float] = []

            async def work() -> None:
                seconds.append(await timed(partial(spread, engine.add, adds, TASKS)))

            costs.setdefault(name, []).append(sum(each.scripts for each in await place.spent(work)) / adds)
            return adds / seconds[0]

    async def deliver(place: Place) -> float:
        await place.flush()
        await place.add(timelines)
        return await place.deliver(timelines)

    named = {"server": one, **{f"cluster-{place.shards}": place for place in many}}
    added = await in_turn(setting.rounds, **{name: partial(add, name, place) for name, place in named.items()})
    delivered = await in_turn(setting.rounds, **{name: partial(deliver, place) for name, place in named.items()})
    beside = "one server"
    for name, place in named.items():
        if place is not one:
            where = f"a cluster, {place.shards} shard{'s' * (place.shards > 1)}"
            yield Row(f"add from {TASKS} tasks, {where}", beside, "adds/s", added[name], added["server"])
            yield Row(f"server time of these an add, {where}", beside, "us", costs[name], costs["server"])
            yield Row(f"digests of 10 records, {where}", beside, "digests/s", delivered[name], delivered["server"])


async def failover(setting: Setting, cluster: Cluster) -> AsyncGenerator[Row, None]:
    """How long the adds of a shard fail after its primary was killed."""
    refused: list[float] = []
    after: list[float] = []
    key = f"{{{Layout(SHARDS).tag(NAMESPACE, 0)}}}:layout"
    async with DigestEngine[JSON](cluster.url, namespace=NAMESPACE, shards=SHARDS) as engine:
        timeline = next(name for name in map(str, range(1_000)) if crc32(name.encode()) % SHARDS == 0)
        await engine.add(timeline, VALUE)
        for _ in range(setting.some(KILLS)):
            await until(cluster.is_whole, "every node sees the whole cluster")
            primary = await cluster.primary_of(key)
            began = time.perf_counter()
            await primary.kill()
            waiting = asyncio.create_task(promoted(cluster, key))
            await add_again(engine, timeline)
            ended = time.perf_counter()
            refused.append(ended - began)
            after.append(max(0.0, ended - await waiting))
            await primary.start(cluster.stack)
    what = f"a shard's adds fail after kill -9 of its primary, node timeout {NODE_TIMEOUT:g} s"
    yield Row(what, "", "s", refused)
    yield Row("of this after its replica was promoted", "", "s", after, bound=2)


async def add_again(engine: DigestEngine[JSON], key: str) -> None:
    """Add a record until it is stored."""
    while True:
        try:
            await engine.add(key, VALUE, record_id="again")
            return
        except BackendUnavailable:
            await asyncio.sleep(0.01)


async def promoted(cluster: Cluster, key: str) -> float:
    """When a replica took over, by its own word."""

    async def is_there() -> bool:
        with suppress(ProgramFailed, RedisError):
            return bool(await cluster.primary_of(key))
        return False

    await until(is_there, "a replica has taken over")
    return time.perf_counter()
