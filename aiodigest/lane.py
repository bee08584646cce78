"""What the loop of one shard works with: the leases that it holds, and the reports that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

from aiodigest.backend import Backend, Close, Closed, Lease, Retry
from aiodigest.coalesce import Coalescer
from aiodigest.errors import AiodigestError


@dataclass(slots=True, eq=False)
class Hold:
    """A lease that this worker holds, and the task that delivers its digest."""

    lease: Lease
    due: float
    stage: Literal["claimed", "calling", "reporting"] = "claimed"
    task: asyncio.Task[None] | None = None
    ends: float = inf  # when the lease has surely ended
    timer: asyncio.TimerHandle | None = None  # goes off then


class Lane:
    """What one shard's loop works with."""

    def __init__(self, shard: int, backend: Backend, timeout: float) -> None:
        async def close(closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
            return await backend.close(shard, closes)

        async def retry(retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
            return await backend.retry(shard, retries)

        self.shard = shard
        # the kinds of calls, one of which may fail while the others do not
        self.claiming, self.leasing = f"claims of shard {shard}", f"leases of shard {shard}"
        self.woken = asyncio.Event()
        self.holds: dict[Hold, None] = {}  # a set, in the order of the claims
        self.closes = Coalescer[Close, Closed](close, timeout)
        self.retries = Coalescer[Retry, bool](retry, timeout)
        self.listener: asyncio.Task[str | None] | None = None
        self.failures = 0  # calls that failed
        self.forgiven = 0  # how many had, when the renewal was sent that was answered last
        self.deaf = 0  # how often in a row the doorbell could not be heard
        self.renewed = self.marked = asyncio.get_running_loop().time()  # and when the store last heard of this worker

    @property
    def away(self) -> bool:
        """Whether a call has failed, and no renewal that was sent since has been answered."""
        return self.failures > self.forgiven
