"""Add numbered records to a few timelines, and write the id of each that was acknowledged.

Arguments: URL, namespace, name of this producer, number of records, number of timelines.
"""

from __future__ import annotations

import asyncio
import sys

from aiodigest import DigestEngine, Policy

url, namespace, name = sys.argv[1:4]
policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05)  # that of worker.py
records, timelines = int(sys.argv[4]), int(sys.argv[5])


async def main() -> None:
    async with DigestEngine(url, namespace=namespace, value_type=int, policy=policy) as engine:

        async def add(number: int) -> None:
            record_id = f"{name}-{number}"
            await engine.add(f"timeline-{number % timelines}", number, record_id=record_id)
            print(record_id, flush=True)

        for first in range(0, records, 20):
            await asyncio.gather(*(add(number) for number in range(first, first + 20)))


asyncio.run(main())
