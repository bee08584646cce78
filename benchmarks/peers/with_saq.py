"""saq: jobs in a list, moved to another while they are done, where a sweep finds those of a worker that was lost."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from uuid import uuid4

import orjson
from measure import CONCURRENCY, CONNECTIONS, FILLERS, VALUE, Jobs, arguments, measure_enqueue, share, tell_versions
from redis.asyncio import BlockingConnectionPool, Redis
from saq import Worker
from saq.queue.redis import RedisQueue


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("saq", "redis", "hiredis", "orjson")
    jobs = Jobs(asked.count)
    connections = CONNECTIONS + CONCURRENCY  # each task of the worker waits on one of its own
    pool = BlockingConnectionPool.from_url(asked.url, max_connections=connections, timeout=None)
    queue = RedisQueue(
        Redis(connection_pool=pool), name=uuid4().hex, max_concurrent_ops=CONNECTIONS,
        dump=orjson.dumps, load=orjson.loads,  # of json, orjson and msgspec one of the two fastest
    )  # fmt: skip
    await queue.connect()

    async def enqueue() -> None:
        # results are not kept; with one try a job whose worker was lost would not be done again
        await queue.enqueue("work", value=VALUE, ttl=-1, retries=2)

    async def work(context: object, *, value: str) -> None:
        jobs.one()

    if asked.what == "enqueue":
        await measure_enqueue(enqueue, asked)
    else:
        await share(enqueue, asked.count, FILLERS)
        worker = Worker(queue, [("work", work)], concurrency=CONCURRENCY)
        running = asyncio.create_task(worker.start())
        await jobs.measure(running)
        await worker.stop()
        running.cancel()
        await asyncio.wait([running])
    await queue.disconnect()


asyncio.run(main())
