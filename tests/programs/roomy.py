"""Deliver the large digests of a namespace, and print the most that was seen at once, as JSON.

``roomy.py URL NAMESPACE TIMELINES RECORDS``: no callback ends before a digest waits for room, or all timelines have
come. ``counted`` is what the engine says, ``held`` what the values in its callbacks take.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiodigest import JSON, Bounds, Delivery, Digest, DigestEngine, Policy

TICK = 0.005  # seconds


async def main(url: str, namespace: str, timelines: int, records: int) -> dict[str, Any]:
    bounds, policy = Bounds(value=65_536, digest=524_288), Policy(minimum_delay=0)
    engine = DigestEngine[JSON](url, namespace=namespace, timeout=30, bounds=bounds, policy=policy)
    seen = {"counted": 0, "held": 0, "waiting": 0, "records": 0}
    came, held, done = set[str](), 0, asyncio.Event()

    async def deliver(digest: Digest[JSON]) -> None:
        nonlocal held
        came.add(digest.key)
        size = sum(len(record.value) + 2 for record in digest.records if isinstance(record.value, str))
        held += size
        while True:
            now = engine.activity
            seen["held"] = max(seen["held"], held)
            seen["counted"] = max(seen["counted"], now.room_taken)
            seen["waiting"] = max(seen["waiting"], now.awaiting_room)
            if seen["waiting"] or len(came) == timelines:
                break
            await asyncio.sleep(TICK)
        await asyncio.sleep(TICK)
        held -= size

    def told(delivery: Delivery) -> None:
        seen["records"] += delivery.records
        if seen["records"] == records:
            done.set()

    engine.observe(told)
    async with engine.delivering(deliver):
        await done.wait()
        return seen | {"left": engine.activity.room_taken}


if __name__ == "__main__":
    url, namespace, *counts = sys.argv[1:]
    print(json.dumps(asyncio.run(main(url, namespace, *map(int, counts)))))
