"""arq: jobs in a sorted set, polled. A job is taken out once it is done, so that one whose worker was lost is done."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from uuid import uuid4

from arq import ArqRedis, func
from arq.worker import Worker
from measure import CONNECTIONS, FILLERS, MORE, VALUE, Jobs, arguments, measure_enqueue, share, tell_versions
from redis.asyncio import BlockingConnectionPool

# Serializers: msgpack, orjson and msgspec were no faster than its pickle.
# The fastest of those that were tried: it looks for jobs at once when it has none, and for so many that it has enough.
POLL, LIMIT = 0.01, 1_000


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("arq", "redis", "hiredis")
    name, jobs = uuid4().hex, Jobs(asked.count)
    connections = BlockingConnectionPool.from_url(asked.url, max_connections=CONNECTIONS, timeout=None)
    pool = ArqRedis(connections, default_queue_name=name)

    async def enqueue() -> None:
        await pool.enqueue_job("work", VALUE)

    async def work(context: object, value: str) -> None:
        jobs.one()

    if asked.what == "enqueue":
        await measure_enqueue(enqueue, asked)
    else:
        await share(enqueue, asked.count, FILLERS)
        worker = Worker(
            [func(work, name="work", keep_result=0)], queue_name=name, redis_pool=pool, max_jobs=MORE,
            poll_delay=POLL, queue_read_limit=LIMIT, keep_result=0, handle_signals=False, log_results=False,
        )  # fmt: skip
        running = asyncio.create_task(worker.async_run())
        await jobs.measure(running)
        running.cancel()
        await asyncio.wait([running])
    await pool.aclose()
    await connections.disconnect()


asyncio.run(main())
