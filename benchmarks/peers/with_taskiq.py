"""taskiq with its list broker, its fastest: nothing is acknowledged, and a job whose worker was lost is lost too."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
from uuid import uuid4

from measure import CONCURRENCY, CONNECTIONS, FILLERS, VALUE, Jobs, arguments, measure_enqueue, share, tell_versions
from taskiq.receiver import Receiver
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import ListQueueBroker


async def main() -> None:
    asked = arguments()
    if asked.what == "versions":
        return tell_versions("taskiq", "taskiq-redis", "redis", "hiredis", "orjson")
    jobs = Jobs(asked.count)
    # of json, orjson, msgpack and pickle the serializer that takes the least CPU
    broker = ListQueueBroker(
        asked.url, queue_name=uuid4().hex, max_connection_pool_size=CONNECTIONS, timeout=None
    ).with_serializer(ORJSONSerializer())
    broker.is_worker_process = asked.what == "jobs"

    @broker.task(task_name="work")
    async def work(value: str) -> None:
        jobs.one()

    async def enqueue() -> None:
        await work.kiq(VALUE)

    await broker.startup()
    if asked.what == "enqueue":
        await measure_enqueue(enqueue, asked)
    else:
        await share(enqueue, asked.count, FILLERS)
        receiver = Receiver(
            broker, max_async_tasks=CONCURRENCY, max_prefetch=CONCURRENCY, validate_params=False
        )  # fmt: skip
        finish = asyncio.Event()
        running = asyncio.create_task(receiver.listen(finish))
        await jobs.measure(running)
        finish.set()
        await running
    await broker.shutdown()


asyncio.run(main())
