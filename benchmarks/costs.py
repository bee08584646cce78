"""What the server spends: time an add, memory a record, at any number of timelines."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from itertools import chain, count
from typing import Any

from aiodigest import JSON, DigestEngine, Entry, Policy
from aiodigest.backend import DIGEST_BYTES, Add, Close, Lease
from aiodigest.backends.redis.scripts import load_script, pack_adds, pack_close, pack_limits, unpack_lease
from benchmarks.bare import bare as bare_script
from benchmarks.baselines import NAMESPACE, ONE_SHARD, TIMELINES, VALUE, Adder, engine, key_of, naive, spread
from benchmarks.delivering import AT_ONCE, LEASE, fill
from benchmarks.layout2017 import Layout
from benchmarks.report import Row
from benchmarks.setting import Setting, in_turn

SIDE = 1_000  # timelines of a small namespace
LATER = Policy(initial_delay=1_000)
SCRIPT = "a script like those of 2017"
BYTES = len(VALUE) + 2  # of a record's value, as JSON
A_CALL = range(200)


async def spent(client: Any, work: Callable[[], Awaitable[object]], adds: int) -> float:
    """Microseconds that scripts took on the server, an add."""
    await client.config_resetstat()
    await work()
    stats = await client.info("commandstats")
    return sum(stats[name]["usec"] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats) / adds


async def time_of_adds(setting: Setting) -> AsyncGenerator[Row, None]:
    adds = setting.some(8_000, 400)

    async def ours(policy: Policy) -> float:
        await setting.flush()
        async with engine(setting.url, policy) as one, setting.client() as client:
            await spread(one.add, TIMELINES, 200)
            return await spent(client, partial(spread, one.add, adds, 200), adds)

    async def theirs(waiting: bool) -> float:
        await setting.flush()
        async with setting.client() as client:
            layout = Layout(client)
            await layout.begin()
            await spread(layout.add, TIMELINES, 20)
            for number in range(TIMELINES if waiting else 0):
                await layout.close(key_of(number))
            return await spent(client, partial(spread, layout.add, adds, 20), adds)

    async def alone(policy: Policy) -> float:
        await setting.flush()
        async with naive(setting.url, policy) as scripts:
            await spread(scripts.add, TIMELINES, 20)
            return await spent(scripts.client, partial(spread, scripts.add, adds, 20), adds)

    took = await in_turn(
        setting.rounds,
        ready=partial(ours, Policy()),
        waiting=partial(ours, LATER),
        alone_ready=partial(alone, Policy()),
        alone_waiting=partial(alone, LATER),
        old_ready=partial(theirs, False),
        old_waiting=partial(theirs, True),
    )
    for state, bound in (("ready", 0.3), ("waiting", 0.4)):
        old = took[f"old_{state}"]
        yield Row(f"server time an add, batched, {state} timelines", SCRIPT, "us", took[state], old, bound)
        yield Row(f"server time an add, a call each, {state} timelines", SCRIPT, "us", took[f"alone_{state}"], old)
    async for row in beside_bare(setting):
        yield row


async def beside_bare(setting: Setting) -> AsyncGenerator[Row, None]:
    """What a call of 200 adds takes of the server, beside the commands that it runs, on the same timelines.

    The least of several calls, as another program that takes the core makes some longer, and nothing makes one shorter.
    A timeline to which all go is left for another before it is full, so that nothing is compacted.
    """
    calls = setting.some(30, 2)

    async def least(each: int, policy: Policy) -> tuple[float, float]:
        """Microseconds of an add, and of its commands; so many go to a timeline, one after the other."""
        await setting.flush()
        numbers, state = count(TIMELINES * each), "waiting" if policy is LATER else "ready"
        async with naive(setting.url, policy) as scripts:
            sha = await scripts.client.script_load(bare_script("add"))
            await spread(scripts.add, TIMELINES, 20)

            def some() -> list[Add]:
                return [scripts.record(key_of(next(numbers) // each), VALUE) for _ in A_CALL]

            async def ours() -> None:
                await scripts.send(pack_adds(some(), A_CALL, 0)[0])

            async def bare() -> None:
                arguments = [argument for add in some() for argument in (add.key, add.entry)]
                await scripts.client.evalsha(sha, 1, scripts.key, state, *arguments)

            took = [[await spent(scripts.client, work, len(A_CALL)) for work in (ours, bare)] for _ in range(calls)]
            return min(mine for mine, _ in took), min(commands for _, commands in took)

    cases = {
        "ready timelines": (1, Policy(), 1.5),
        "waiting timelines": (1, LATER, 1.8),
        "all to one ready timeline": (800, Policy(), 0.8),
    }
    for name, (each, policy, bound) in cases.items():
        took = [await least(each, policy) for _ in range(setting.rounds)]
        mine, commands = [one for one, _ in took], [other for _, other in took]
        # an engine's call appends at once what goes to one timeline: these are no longer the commands that it runs
        beside = "its bare commands" if each == 1 else "the bare commands, add by add"
        yield Row(f"server time an add, 200 a call, {name}", beside, "us", mine, commands, bound)


async def memory(setting: Setting) -> AsyncGenerator[Row, None]:
    timelines, records = setting.some(300, 50), 20

    async def of(add: Adder, client: Any) -> float:
        before = (await client.info("memory"))["used_memory"]
        for _ in range(records):
            for number in range(timelines):
                await add(key_of(number), VALUE)
        return ((await client.info("memory"))["used_memory"] - before) / timelines / records

    async def ours() -> float:
        await setting.flush()
        async with engine(setting.url) as one, setting.client() as client:
            return await of(one.add, client)

    async def theirs() -> float:
        await setting.flush()
        async with setting.client() as client:
            layout = Layout(client)
            await layout.begin()
            return await of(layout.add, client)

    took = await in_turn(min(setting.rounds, 3), ours=ours, theirs=theirs)  # it is the same each time
    what = f"server memory a record of {BYTES} B, {records} a timeline"
    yield Row(what, SCRIPT, "B", took["ours"], took["theirs"], 0.72)
    beyond = [bytes_ - BYTES for bytes_ in took["ours"]]
    yield Row(f"server memory beyond the {BYTES} B of a record, {records} a timeline", "", "B", beyond, bound=40)


async def at_any_size(setting: Setting) -> AsyncGenerator[Row, None]:
    """The same adds beside a thousand timelines, and beside a million."""
    await setting.flush()
    large, some, numbers = setting.some(1_000_000, 20_000), SIDE, count(1)

    async def fill(one: DigestEngine[JSON], first: int, timelines: int) -> None:
        end = first + timelines
        for start in range(first, end, 10_000):
            await one.add_many(Entry(f"user:{n}", "") for n in range(start, min(start + 10_000, end)))

    options: Any = {"policy": LATER, "timeout": 60}
    async with DigestEngine[JSON](setting.url, namespace="large", **options) as many, setting.client() as client:
        await fill(many, 0, large)

        async def new(one: DigestEngine[JSON], held: int) -> float:
            return await spent(client, partial(fill, one, held, some), some)

        async def beside_many() -> float:
            return await new(many, large + next(numbers) * some)

        async def beside_few() -> float:
            async with DigestEngine[JSON](setting.url, namespace=f"few-{next(numbers)}", **options) as few:
                await fill(few, 0, SIDE)
                return await new(few, SIDE)

        async def again(one: DigestEngine[JSON], held: int) -> float:
            step = held // some
            return await spent(
                client, partial(one.add_many, (Entry(f"user:{n * step}", "") for n in range(some))), some
            )  # fmt: skip

        async def again_beside_few() -> float:
            async with DigestEngine[JSON](setting.url, namespace=f"same-{next(numbers)}", **options) as few:
                await fill(few, 0, SIDE)
                return await again(few, SIDE)

        took = await in_turn(
            max(setting.rounds, 5), many=beside_many, few=beside_few, again=partial(again, many, large),
            again_few=again_beside_few,
        )  # fmt: skip
    beside = "beside 1,000"
    yield Row(f"server time an add, new timeline beside {large:,}", beside, "us", took["many"], took["few"], 1.1)
    yield Row(
        f"server time an add, waiting timeline beside {large:,}", beside, "us", took["again"], took["again_few"], 1.5
    )


def to_one(add: Adder) -> Adder:
    """All to one timeline, but to the next before it is full."""
    numbers = count()
    return lambda _, value: add(f"one-{next(numbers) // (SIDE - 200)}", value)


async def time_by_timelines(setting: Setting) -> AsyncGenerator[Row, None]:
    """What an add takes of the server in calls of 200 that go to few timelines, and to many."""
    calls = setting.some(30, 2)

    async def least(timelines: int) -> float:
        await setting.flush()
        async with naive(setting.url) as scripts:

            async def one_call(number: int) -> None:
                first = number * len(A_CALL)
                adds = [scripts.record(f"user:{(first + index) % timelines}", VALUE) for index in A_CALL]
                await scripts.send(pack_adds(adds, A_CALL, 0)[0])

            for number in range(-(-timelines // len(A_CALL))):  # all are ready then
                await one_call(number)
            return min([await spent(scripts.client, partial(one_call, n), len(A_CALL)) for n in range(calls)])

    took = await in_turn(setting.rounds, **{str(number): partial(least, number) for number in (10, 100, 1_000, 2_000)})
    for number in (10, 100, 2_000):
        what = f"server time an add, 200 a call to {number:,} ready timelines"
        yield Row(what, "to 1,000", "us", took[str(number)], took["1000"])


async def time_of_one(setting: Setting) -> AsyncGenerator[Row, None]:
    """What an add takes of the server if all go to one timeline, and how fast such a layout as that of 2017 can be."""
    goes, few = setting.some(6, 2), setting.some(400, 200)

    async def least(client: Any, add: Adder, tasks: int) -> float:
        """Of several goes: what other programs take of the core makes each longer, and nothing makes it shorter."""
        await spread(add, TIMELINES, tasks)
        return min([await spent(client, partial(spread, add, few, tasks), few) for _ in range(goes)])

    async def ours(at_one: bool) -> float:
        await setting.flush()
        async with engine(setting.url) as one, setting.client() as client:
            return await least(client, to_one(one.add) if at_one else one.add, 200)

    async def theirs(at_one: bool, lean: bool) -> float:
        await setting.flush()
        async with setting.client() as client:
            layout = Layout(client, lean)
            await layout.begin()
            return await least(client, to_one(layout.add) if at_one else layout.add, 20)

    took = await in_turn(
        setting.rounds,
        one=partial(ours, True),
        ready=partial(ours, False),
        old_one=partial(theirs, True, False),
        old=partial(theirs, False, False),
        lean=partial(theirs, False, True),
    )
    lean = "that layout in as few steps as it can be written"
    yield Row("server time an add, all to one timeline", SCRIPT, "us", took["one"], took["old_one"], 0.14)
    yield Row(
        "server time an add, ready timelines, the least of its goes", SCRIPT, "us", took["ready"], took["old"], 0.28
    )
    yield Row(
        "server time an add, ready timelines, the least of its goes", lean, "us", took["ready"], took["lean"], 0.5
    )


async def time_of_digests(setting: Setting) -> AsyncGenerator[Row, None]:
    """Claims and closes of ten digests of ten records, beside their bare commands."""
    digests = setting.some(2_000, 20)
    took: dict[str, list[float]] = {"claim": [], "close": [], "bare claim": [], "bare close": []}

    async def measure(client: Any, claim: str, close: str, name: str) -> None:
        await setting.flush()
        await fill(setting.url, NAMESPACE, digests)
        claims, closes = await client.script_load(claim), await client.script_load(close)
        key, head, limits = f"{{{NAMESPACE}}}:layout", (ONE_SHARD, ""), Policy().terms.limits
        found = list[list[Lease]]()

        async def claim_all() -> None:
            for number in range(0, digests, AT_ONCE):
                arguments = *head, AT_ONCE, LEASE, pack_limits(limits), f"n{number}", 0, DIGEST_BYTES, 1, ""
                found.append([*map(unpack_lease, (await client.evalsha(claims, 1, key, *arguments))[3])])

        async def close_all() -> None:
            for number, leases in enumerate(found):
                items = [pack_close(Close(each, each.size, each.size, 300_000, limits, LEASE), 0) for each in leases]
                await client.evalsha(closes, 1, key, *head, f"m{number}", 1, *chain.from_iterable(items))

        took[f"{name}claim"].append(await spent(client, claim_all, digests))
        took[f"{name}close"].append(await spent(client, close_all, digests))

    async with setting.client() as client:
        for number in range(2 * setting.rounds):
            ours = load_script("claim").source, load_script("close").source, ""
            bare = bare_script("claim"), bare_script("close"), "bare "
            for each in (ours, bare) if number % 2 else (bare, ours):
                await measure(client, *each)
    for name in ("claim", "close"):
        what = f"server time a digest of 10 records, {name} of ten"
        yield Row(what, "its bare commands", "us", took[name], took[f"bare {name}"], 1.6)
