"""Deliver until told to stop, and write a line for each digest; complain if two workers have one timeline at once.

It holds a few digests until it is sent SIGUSR1, so that a test can have each of several workers take some.

Arguments: URL, namespace, folder for one lock file a timeline.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from aiodigest import Digest, DigestEngine, Policy

url, namespace, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
policy = Policy(minimum_delay=0.02, increment_delay=0.005, maximum_delay=0.05)
engine = DigestEngine(url, namespace=namespace, value_type=int, policy=policy, concurrency=3)
go = asyncio.Event()


@engine.deliver
async def deliver(digest: Digest[int]) -> None:
    mark = folder / digest.key.replace("/", "_")
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        print(json.dumps({"overlap": digest.key}), flush=True)
        raise
    try:
        if not go.is_set():
            print(json.dumps({"holds": digest.key}), flush=True)
            await go.wait()
        await asyncio.sleep(0.002)  # long enough for another to come, if it could
    finally:
        mark.unlink()
    records = [record.id for record in digest.records]
    print(json.dumps({"key": digest.key, "id": digest.id, "records": records}), flush=True)


async def main() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go.set)
    print(json.dumps({"started": True}), flush=True)
    await engine.run()


asyncio.run(main())
