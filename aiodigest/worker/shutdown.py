"""The end of a worker's deliveries when it stops: they get a while to finish, and the rest is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from aiodigest.backend import Backend, Lease
from aiodigest.worker.leases import ActiveDelivery
from aiodigest.worker.shard import ShardWorker

logger = logging.getLogger(__name__)


class Shutdown:
    """Waits for the deliveries under way, for ``drain_timeout`` or until ``hurry``, and gives the rest back."""

    def __init__(
        self, workers: Mapping[int, ShardWorker], backend: Backend, drain_timeout: float, timeout: float
    ) -> None:
        self.hurry = asyncio.Event()
        self._workers = workers
        self._backend = backend
        self._drain_timeout = drain_timeout
        self._timeout = timeout

    def _under_way(self) -> list[tuple[int, ActiveDelivery]]:
        workers = self._workers.items()
        return [(shard, each) for shard, worker in workers for each in worker.leases.active if not each.task.done()]

    async def run(self) -> None:
        if not (under_way := self._under_way()):
            return
        tasks = [active.task for _, active in under_way]
        ends = [asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(self.hurry.wait())]
        await asyncio.wait(ends, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if under_way := self._under_way():
            await self._abandon(under_way)

    async def _abandon(self, under_way: Sequence[tuple[int, ActiveDelivery]]) -> None:
        """Cancel the callbacks that took too long, and give their leases back without charging the attempts.

        A report under way gets one more timeout. After that its arrival is unknown, so the lease decides.
        """
        left = [(shard, active, active.stage) for shard, active in under_way]
        tasks = [active.task for _, active in under_way]
        for _, active, stage in left:
            if stage != "reporting":
                active.cancel()
        _, late = await asyncio.wait(tasks, timeout=self._timeout)
        ignoring = [active for _, active, _ in left if active.task in late and active.stage == "calling"]
        ignore = f", {len(ignoring)} of which ignore it" if ignoring else ""
        logger.warning("stopped with %d deliveries under way%s", len(tasks), ignore, extra={"deliveries": len(tasks)})
        leases: dict[tuple[int, bool], list[Lease]] = {}
        for shard, active, was in left:
            if active.stage == was != "reporting":
                leases.setdefault((shard, was == "calling"), []).append(active.lease)
        await asyncio.gather(*(self._release(shard, some, started) for (shard, started), some in leases.items()))
        for _, active, _ in left:
            if active.task in late:
                active.cancel()
        await asyncio.wait(tasks, timeout=0 if ignoring else None)

    async def _release(self, shard: int, leases: Sequence[Lease], started: bool) -> None:
        try:
            await self._backend.release(shard, leases, started)
        except Exception as error:
            facts = {"deliveries": len(leases), "reason": str(error)}
            logger.error("%d leases could not be given back, and will end: %s", len(leases), error, extra=facts)
