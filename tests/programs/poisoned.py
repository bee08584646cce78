"""A worker that one timeline kills each time, as a library that crashes would.

Arguments: URL, namespace, the key of that timeline. It may be tried twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from aiodigest import JSON, Digest, DigestEngine, RetryPolicy

engine = DigestEngine[JSON](sys.argv[1], namespace=sys.argv[2], retry=RetryPolicy(2), lease_timeout=1)


@engine.deliver
async def deliver(digest: Digest[JSON]) -> None:
    if digest.key == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.01)  # so that all of a claim have begun


if __name__ == "__main__":
    asyncio.run(engine.run())
