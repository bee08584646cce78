"""Deliver until told to stop, and write the ids of each digest's records in a line, once it has them all.

Arguments: URL, namespace, lease in seconds, and a folder for a lock file a timeline, if two workers must not have one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiodigest import Digest, DigestEngine, Policy

url, namespace, lease, *folders = sys.argv[1:]
policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05)
engine = DigestEngine(url, namespace=namespace, value_type=int, policy=policy, lease_timeout=float(lease), timeout=60)


@engine.deliver
async def deliver(digest: Digest[int]) -> None:
    for folder in folders:
        mark = Path(folder, digest.key)
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            print("overlap", flush=True)
            raise
        await asyncio.sleep(0.002)  # long enough for another to come, if it could
        mark.unlink()
    print(*(record.id for record in digest.records), flush=True)


async def main() -> None:
    print("ready", flush=True)
    await engine.run()


asyncio.run(main())
