"""What there was before, and what the parts allow: each a way to add records, with nothing around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from redis.asyncio import BlockingConnectionPool, Redis

from aiodigest import JSON, DigestEngine, Policy
from aiodigest.backend import Add
from aiodigest.backends.redis.layout import Layout
from aiodigest.backends.redis.scripts import Argument, load_script, pack_adds
from aiodigest.codecs import JSONCodec
from aiodigest.records.entries import pack

Adder = Callable[[str, str], Awaitable[object]]
VALUE = "x" * 198  # 200 bytes as JSON
TIMELINES = 1_000
PIPELINE = 100
NAMESPACE = "bench"
ONE_SHARD = Layout(1).version  # what each script is told of the layout


def key_of(number: int) -> str:
    return f"user:{number % TIMELINES}"


async def spread(add: Adder, count: int, tasks: int) -> None:
    """Have tasks share a number of adds."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await add(key_of(number), VALUE)

    await asyncio.gather(*(some() for _ in range(tasks)))


@asynccontextmanager
async def engine(url: str, policy: Policy = Policy()) -> AsyncGenerator[DigestEngine[JSON], None]:
    async with DigestEngine[JSON](url, namespace=NAMESPACE, policy=policy) as one:
        yield one


class Scripts:
    """The engine's script, called with redis-py as anybody would call it: a call an add."""

    def __init__(self, client: Any, policy: Policy = Policy()) -> None:
        self.client = client
        self._script, self._terms, self._codec = load_script("add"), policy.terms, JSONCodec[JSON](JSON)
        self.key, self._version = f"{{{NAMESPACE}}}:layout", ONE_SHARD

    async def begin(self) -> None:
        await self.client.script_load(self._script.source)
        await self.client.hset(self.key, "version", self._version)

    async def add(self, key: str, value: str) -> None:
        await self.send(self.packed(key, value))

    def packed(self, key: str, value: str) -> Sequence[Argument]:
        """The arguments of an add."""
        return pack_adds([self.record(key, value)], [0], 0)[0]

    def record(self, key: str, value: str) -> Add:
        """A record with an id of its own."""
        return Add(key, pack(uuid4().hex.encode(), None, self._codec.encode(value)), self._terms)

    async def send(self, arguments: Sequence[Argument]) -> None:
        await self.client.evalsha(self._script.sha, 1, self.key, self._version, "", *arguments)


@asynccontextmanager
async def naive(url: str, policy: Policy = Policy()) -> AsyncGenerator[Scripts, None]:
    """A pool of 50 connections, and a call an add."""
    pools: Any = BlockingConnectionPool
    pool = pools.from_url(url, max_connections=50, timeout=None)
    async with Redis(connection_pool=pool) as client:
        scripts = Scripts(client, policy)
        await scripts.begin()
        yield scripts
    await pool.aclose()


async def push(client: Any, count: int) -> None:
    """The bytes of the same records, pushed to lists in pipelines: what the server's protocol allows."""
    entry = pack(uuid4().hex.encode(), None, JSONCodec[JSON](JSON).encode(VALUE))
    for start in range(0, count, PIPELINE):
        pipe = client.pipeline(transaction=False)
        for number in range(start, min(start + PIPELINE, count)):
            pipe.rpush(key_of(number), entry)
        await pipe.execute()
