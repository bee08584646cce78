"""taskiq with its list broker, its fastest: nothing is acknowledged, and a job whose worker was lost is lost too."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from uuid import uuid4

from measure import CONCURRENCY, Jobs, arguments, measure_enqueue, share, tell_versions
from taskiq.api import run_receiver_task
from taskiq_redis import ListQueueBroker


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("taskiq", "taskiq-redis", "redis", "hiredis")
    jobs, value = Jobs(asked.count), "x" * asked.bytes
    broker = ListQueueBroker(asked.url, queue_name=uuid4().hex, max_connection_pool_size=50)
    broker.is_worker_process = asked.what == "jobs"

    @broker.task(task_name="work")
    async def work(value: str) -> None:
        jobs.one()

    async def enqueue() -> None:
        await work.kiq(value)

    await broker.startup()
    if asked.what == "enqueue":
        await measure_enqueue(enqueue, asked)
    else:
        await share(enqueue, asked.count, 50)
        receiving = run_receiver_task(broker, max_async_tasks=CONCURRENCY, max_prefetch=CONCURRENCY)
        running = asyncio.create_task(receiving)
        await jobs.wait(running)
        jobs.tell()
        running.cancel()
        await asyncio.wait([running])
    await broker.shutdown()


asyncio.run(main())
