"""docket: jobs in a stream, acknowledged when they are done; a hash for each tells its state until it has ended."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from uuid import uuid4

from docket import Docket, Worker
from measure import (
    FILLERS,
    MORE,
    TASKS,
    VALUE,
    Jobs,
    arguments,
    measure_batches,
    measure_enqueue,
    share,
    tell_versions,
)


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("pydocket", "redis", "hiredis")
    logging.disable()
    jobs, at_once = Jobs(asked.count), timedelta(0)

    async def work(value: str) -> None:
        jobs.one()

    async def enqueue() -> None:
        await docket.add(work)(VALUE)

    async def enqueue_many(count: int) -> None:
        await docket.add_many(docket.call(work)(VALUE) for _ in range(count))

    # arguments go by cloudpickle: it has no other serializer to choose
    # each task has a connection of its own, for callers cannot wait for one; nothing of a job is kept once it has ended
    url = f"{asked.url}?max_connections={TASKS + MORE}"
    async with Docket(name=uuid4().hex, url=url, execution_ttl=at_once) as docket:
        docket.register(work)
        if asked.what == "enqueue":
            await measure_enqueue(enqueue, asked)
        elif asked.what == "batches":
            await measure_batches(enqueue_many, asked)
        else:
            await share(enqueue, asked.count, FILLERS)
            async with Worker(docket, concurrency=MORE, schedule_automatic_tasks=False) as worker:
                running = asyncio.create_task(worker.run_forever())
                await jobs.measure(running)
                running.cancel()
                await asyncio.wait([running])


asyncio.run(main())
