"""How many digests a second are delivered, beside the jobs of peers and what the scripts allow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from statistics import median
from typing import Any

from aiodigest import JSON, DigestEngine, Entry, Policy
from aiodigest.backend import DIGEST_BYTES, Close
from aiodigest.backends.redis.scripts import load_script, pack_close, pack_limits, unpack_lease
from benchmarks.baselines import ONE_SHARD, VALUE
from benchmarks.event import EVENT
from benchmarks.peers.environments import Peer
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn
from benchmarks.worker import deliver_apart

RECORDS = 10  # a digest
CPU_BOUND = 60.0  # us of the worker a digest: nothing else runs in its process
AT_ONCE = 10  # digests a call of the limit
LEASE = 60_000


async def fill(url: str, namespace: str, timelines: int, records: int = RECORDS, value: JSON = VALUE) -> None:
    """Make timelines ready, with so many records each."""
    async with DigestEngine[JSON](url, namespace=namespace, timeout=60) as engine:
        for _ in range(records):
            for start in range(0, timelines, 10_000):
                await engine.add_many(
                    Entry(f"user:{number}", value) for number in range(start, min(start + 10_000, timelines))
                )


async def directly(client: Any, namespace: str, timelines: int) -> float:
    """Claim and close with the scripts alone; seconds."""
    claim, close = load_script("claim"), load_script("close")
    for script in (claim, close):
        await client.script_load(script.source)
    key, head, limits = f"{{{namespace}}}:layout", (ONE_SHARD, ""), Policy().terms.limits
    began, done = time.perf_counter(), 0
    while done < timelines:
        arguments = (*head, AT_ONCE, LEASE, pack_limits(limits), f"n{done}", 0, DIGEST_BYTES, 1, "")
        leases = [unpack_lease(fields) for fields in (await client.evalsha(claim.sha, 1, key, *arguments))[3]]
        closes: list[Any] = []
        for lease in leases:
            closes += pack_close(Close(lease, lease.size, lease.size, 300_000, limits, LEASE), 0)
        await client.evalsha(close.sha, 1, key, *head, f"m{done}", 1, *closes)
        done += len(leases)
    return time.perf_counter() - began


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    timelines, count, cpu = setting.some(3_000, 200), setting.some(1_000, 100), list[float]()

    async def ours(failing: float = 0.0) -> float:
        await setting.flush()
        await fill(setting.url, "deliver", timelines)
        seen = await deliver_apart(setting.url, "deliver", timelines, failing=failing, loop=setting.loop)
        if not failing:
            cpu.append(seen.cpu_us)
        return seen.rate

    async def limit() -> float:
        await setting.flush()
        await fill(setting.url, "deliver", timelines)
        async with setting.client() as client:
            return timelines / await directly(client, "deliver", timelines)

    async def jobs(peer: Peer) -> float:
        await setting.flush()
        told = await setting.ask(peer, "jobs", count, timeout=300)
        return told["count"] / told["seconds"]

    rates = await in_turn(
        setting.rounds,
        ours=ours,
        failing=partial(ours, 0.01),
        limit=limit,
        **{peer.name: partial(jobs, peer) for peer in setting.found},
    )
    records = [rate * RECORDS for rate in rates["ours"]]
    middle = {peer.name: median(rates[peer.name]) for peer in setting.found}
    sure = {peer.name for peer in setting.found if peer.acknowledges}

    def row(what: str, beside: str, theirs: str, bound: float | None) -> Row:
        return Row(what, beside, "digests/s", rates["ours"], rates[theirs], bound, least=True, loop=setting.loop)

    for name in middle:
        best_sure = name in sure and middle[name] == max(middle[other] for other in sure)
        best = middle[name] == max(middle.values())
        bound = 7.0 if best_sure else 1.5 if best else None
        yield row("digests of 10 records", f"{name}, jobs/s", name, bound)
        if best:
            yield Row("records of these", f"{name}, jobs/s", "records/s", records, rates[name], 55, least=True)
    yield row("digests of 10 records", "claim and close scripts, ten a call", "limit", 0.6)
    bounded = CPU_BOUND if setting.loop == "asyncio" else None
    yield Row("CPU of the worker, a digest of 10 records", "", "us", cpu, bound=bounded, loop=setting.loop)
    what = "digests, 1 % of callbacks failing"
    yield Row(what, "none failing", "digests/s", rates["failing"], rates["ours"], 0.8, least=True, loop=setting.loop)


async def of_a_model(setting: Setting) -> AsyncGenerator[Row, None]:
    """Digests whose values are made a pydantic model, beside the same ones as any JSON."""
    timelines = setting.some(3_000, 200)
    cpu: dict[str, list[float]] = {"model": [], "json": []}

    async def rate(values: str) -> float:
        await setting.flush()
        await fill(setting.url, "deliver", timelines, value=EVENT)
        seen = await deliver_apart(setting.url, "deliver", timelines, values=values)
        cpu[values].append(seen.cpu_us)
        return seen.rate

    rates = await in_turn(setting.rounds, model=partial(rate, "model"), json=partial(rate, "json"))
    beside = "the same values as JSON"
    what = "digests of 10 records, each a pydantic model"
    yield Row(what, beside, "digests/s", rates["model"], rates["json"])
    yield Row(f"CPU of the worker, {what}", beside, "us", cpu["model"], cpu["json"])
