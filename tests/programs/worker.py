"""Deliver until told to stop, and write the ids of each digest's records in a line, once it has them all.

Arguments: URL, namespace, lease in seconds.
"""

from __future__ import annotations

import asyncio
import sys

from aiodigest import Digest, DigestEngine, Policy

url, namespace, lease = sys.argv[1:]
policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05)
engine = DigestEngine(url, namespace=namespace, value_type=int, policy=policy, lease_timeout=float(lease), timeout=60)


@engine.deliver
async def deliver(digest: Digest[int]) -> None:
    print(*(record.id for record in digest.records), flush=True)


async def main() -> None:
    print("ready", flush=True)
    await engine.run()


asyncio.run(main())
