"""Add records one by one and many at once until told to stop, and write the id of each that was acknowledged.

Arguments: URL, namespace, name of this producer, number of timelines.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence

from aiodigest import DigestEngine, Entry, Policy

url, namespace, name, timelines = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05)  # that of worker.py
SOME, PACE = 5, 0.1  # records at once, and seconds until the next


def ids(first: int) -> list[str]:
    return [f"{name}-{number}" for number in range(first, first + SOME)]


def key_of(record_id: str) -> str:
    return f"timeline-{int(record_id.rpartition('-')[2]) % timelines}"


def acknowledged(records: Sequence[str]) -> None:
    print("\n".join(records), flush=True)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with DigestEngine(url, namespace=namespace, value_type=int, policy=policy, timeout=60) as engine:

        async def add(record_id: str) -> None:
            await engine.add(key_of(record_id), 1, record_id=record_id)
            acknowledged([record_id])

        number = 0
        while not stop.is_set():
            await asyncio.gather(*map(add, ids(number)))
            many = ids(number + SOME)
            await engine.add_many(Entry(key_of(record_id), 1, record_id=record_id) for record_id in many)
            acknowledged(many)
            number += 2 * SOME
            await asyncio.sleep(PACE)


asyncio.run(main())
