"""Deliver under a throttle until told to stop, and tell of each digest when it is claimed and when it begins.

"claimed", its key, the shard and its time, when it was due, and 1 if it is tried again; "begun", its key, when the
attempt was let begin, and 1 if by the token with which it was claimed.

Arguments: URL, namespace, limit, per, burst.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

from aiodigest import Digest, DigestEngine, Policy, RetryPolicy, Throttle
from aiodigest.backend import Claims
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.worker.leases import ActiveDelivery
from aiodigest.worker.shard import ShardWorker
from aiodigest.worker.throttling import Throttling, Token

url, namespace, limit, per, burst = sys.argv[1:]
engine = DigestEngine(
    url, namespace=namespace, value_type=int, policy=Policy(minimum_delay=0, increment_delay=0), lease_timeout=2,
    throttle=Throttle(int(limit), per=float(per), burst=int(burst)), retry=RetryPolicy(max_attempts=100),
)  # fmt: skip
claim, permit, use = RedisBackend.claim, ShardWorker._permit, Throttling.use
own: dict[str, Token | None] = {}  # the token with which a digest was claimed, by its key
used: tuple[float, Token]  # the last one, and when: what it lets begin does so before anything is awaited


async def claim_and_tell(self: RedisBackend, shard: int, *arguments: Any, **options: Any) -> Claims:
    claims = await claim(self, shard, *arguments, **options)
    for lease in claims.leases:
        again = int(lease.lost > 0 or lease.attempt > 1)
        print("claimed", lease.key, shard, claims.now_ms, lease.due_ms, again, flush=True)
    return claims


async def permit_and_note(self: ShardWorker, active: ActiveDelivery) -> None:
    own[active.lease.key] = active.token
    await permit(self, active)


def use_and_note(self: Throttling, tokens: Sequence[Token]) -> bool:
    global used
    before = time.monotonic()  # however long the process is stopped after this, the token was good
    if is_good := use(self, tokens):
        used = before, tokens[0]
    return is_good


@engine.deliver
async def deliver(digest: Digest[int]) -> None:
    when, token = used
    print("begun", digest.key, when, int(token is own[digest.key]), flush=True)
    await asyncio.sleep(0.2)


RedisBackend.claim, ShardWorker._permit, Throttling.use = claim_and_tell, permit_and_note, use_and_note
asyncio.run(engine.run())
