"""How many records a second are added, beside the ways that there are without us."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median

from aiodigest import Entry
from benchmarks.baselines import TIMELINES, VALUE, engine, key_of, naive, push, spread
from benchmarks.peers.environments import Peer
from benchmarks.report import Row
from benchmarks.setting import Setting, clocked, in_turn

MANY = 1_000
# What an add may compute in the process that adds, in us. Nothing else runs in it meanwhile: the server and the peers
# have processes of their own.
CPU_BOUNDS = {"ours": 11.0, "many": 4.0}


async def compare(setting: Setting) -> AsyncGenerator[Row, None]:
    await setting.flush()
    count, few, jobs = setting.some(20_000, 400), setting.some(2_000, 50), setting.some(2_000, 100)
    cpu = defaultdict[str, list[float]](list)
    async with engine(setting.url) as ours, naive(setting.url) as scripts, setting.client() as client:
        ready = [scripts.packed(key_of(number), VALUE) for number in range(few)]

        async def many() -> None:
            for start in range(0, count, MANY):
                await ours.add_many(Entry(key_of(start + number), VALUE) for number in range(MANY))

        async def bare() -> None:
            for arguments in ready:
                await scripts.send(arguments)

        async def fresh(name: str, work: Callable[[], Awaitable[object]]) -> float:
            await setting.flush()  # or what is held would come to its capacity
            await scripts.begin()
            seconds, computed = await clocked(work)
            cpu[name].append(computed * 1e6)
            return seconds

        async def enqueue(peer: Peer, what: str = "enqueue") -> float:
            await setting.flush()
            return (await setting.ask(peer, what, jobs))["seconds"]

        for add in (ours.add, scripts.add):  # connections are made, and scripts loaded
            await spread(add, TIMELINES, 200)
        await push(client, TIMELINES)
        await bare()

        took = await in_turn(
            setting.rounds,
            **{peer.name: partial(enqueue, peer) for peer in setting.found},
            **{
                f"{peer.name}, {peer.batches}": partial(enqueue, peer, "batches")
                for peer in setting.found
                if peer.batches
            },
            ours=partial(fresh, "ours", lambda: spread(ours.add, count, 200)),
            naive=partial(fresh, "naive", lambda: spread(scripts.add, jobs, 200)),
            push=partial(fresh, "push", lambda: push(client, count)),
            many=partial(fresh, "many", many),
            alone=partial(fresh, "alone", lambda: spread(ours.add, few, 1)),
            bare=partial(fresh, "bare", bare),
        )
    names = [peer.name for peer in setting.found]
    batches = [name for name in took if ", " in name]
    counts = dict.fromkeys([*names, *batches, "naive"], jobs) | {
        "many": -(-count // MANY) * MANY,
        "alone": few,
        "bare": few,
    }
    rates = {name: [counts.get(name, count) / seconds for seconds in times] for name, times in took.items()}

    def row(what: str, ours: str, beside: str, theirs: str, bound: float | None) -> Row:
        return Row(what, beside, "adds/s", rates[ours], rates[theirs], bound, least=True, loop=setting.loop)

    for name in sorted(names, key=lambda name: -median(rates[name])):
        best = median(rates[name]) == max(median(rates[other]) for other in names)
        yield row("add from 200 tasks", "ours", f"{name}, enqueue", name, 12 if best else None)
    yield row("add from 200 tasks", "ours", "a call an add, 50 connections", "naive", 11)
    yield row("add from 200 tasks", "ours", "RPUSH in pipelines of 100", "push", 0.8)
    yield row("add from 1 task", "alone", "a bare call of the script", "bare", 0.75)
    yield row("add_many of 1,000", "many", "RPUSH in pipelines of 100", "push", 1.0)
    for name in batches:
        yield row("add_many of 1,000", "many", f"{name} of 1,000", name, None)
    for each in cpu_rows(cpu, counts | {"ours": count}, setting.loop):
        yield each


def cpu_rows(computed: Mapping[str, Sequence[float]], counts: Mapping[str, int], loop: str) -> Iterable[Row]:
    """What an add computes in the client; the bounds are for asyncio's own loop."""
    for name, what in (("ours", "an add, from 200 tasks"), ("many", "an entry of add_many of 1,000")):
        each = [microseconds / counts[name] for microseconds in computed[name]]
        bound = CPU_BOUNDS[name] if loop == "asyncio" else None
        yield Row(f"CPU of the client, {what}", "", "us", each, bound=bound, loop=loop)
