"""streaq: jobs in a stream, acknowledged when they are done."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from uuid import uuid4

from measure import (
    CONCURRENCY,
    FILLERS,
    VALUE,
    Jobs,
    arguments,
    measure_batches,
    measure_enqueue,
    share,
    tell_versions,
)
from streaq import Worker


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("streaq", "coredis")
    jobs = Jobs(asked.count)
    # serializers: orjson, msgspec and the newest protocol of pickle brought nothing that counts beside its pickle
    worker = Worker(asked.url, concurrency=CONCURRENCY, queue_name=uuid4().hex, handle_signals=False)

    @worker.task(ttl=0, silent=True)  # no result is kept, nothing is logged
    async def work(value: str) -> None:
        jobs.one()

    async def enqueue() -> None:
        await work.enqueue(VALUE)

    async def enqueue_many(count: int) -> None:
        await worker.enqueue_many([work.enqueue(VALUE) for _ in range(count)])

    if asked.what in {"enqueue", "batches"}:
        async with worker:
            if asked.what == "enqueue":
                await measure_enqueue(enqueue, asked)
            else:
                await measure_batches(enqueue_many, asked)
        return
    async with worker:
        await share(enqueue, asked.count, FILLERS)
    running = asyncio.create_task(worker.run_async())
    await jobs.measure(running)
    running.cancel()
    await asyncio.wait([running])


asyncio.run(main())
