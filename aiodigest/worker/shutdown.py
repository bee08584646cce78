"""The end of a worker's deliveries when it stops: they get a while to finish, and the rest is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from aiodigest.backend import Backend, Lease
from aiodigest.worker.shard import Hold, Lane

logger = logging.getLogger(__name__)


class Drain:
    """Waits for the deliveries under way, for ``drain_timeout`` or until ``hurry``, and gives the rest back."""

    def __init__(self, lanes: Mapping[int, Lane], backend: Backend, drain_timeout: float, timeout: float) -> None:
        self.hurry = asyncio.Event()
        self._lanes = lanes
        self._backend = backend
        self._drain_timeout = drain_timeout
        self._timeout = timeout

    def _under_way(self) -> list[tuple[Lane, Hold]]:
        return [(lane, hold) for lane in self._lanes.values() for hold in lane.holds if not hold.task.done()]

    def tasks(self) -> list[asyncio.Task[None]]:
        return [hold.task for _, hold in self._under_way()]

    async def run(self) -> None:
        if not (tasks := self.tasks()):
            return
        ends = [asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(self.hurry.wait())]
        await asyncio.wait(ends, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if tasks := self.tasks():
            await self._abandon(tasks)

    async def _abandon(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the callbacks that outlasted the drain, and give their leases back without charging the attempts.

        A report under way gets one more timeout. After that its arrival is unknown, so the lease decides.
        """
        left = [(lane, hold, hold.stage) for lane, hold in self._under_way()]
        for _, hold, stage in left:
            if stage != "reporting":
                hold.cut()
        _, late = await asyncio.wait(tasks, timeout=self._timeout)
        deaf = [hold for _, hold, _ in left if hold.task in late and hold.stage == "calling"]
        ignore = f", {len(deaf)} of which ignore it" if deaf else ""
        logger.warning("stopped with %d deliveries under way%s", len(tasks), ignore, extra={"deliveries": len(tasks)})
        leases: dict[tuple[Lane, bool], list[Lease]] = {}
        for lane, hold, was in left:
            if hold.stage == was != "reporting":
                leases.setdefault((lane, was == "calling"), []).append(hold.lease)
        await asyncio.gather(*(self._release(lane, some, started) for (lane, started), some in leases.items()))
        for _, hold, _ in left:
            if hold.task in late:
                hold.cut()
        await asyncio.wait(tasks, timeout=0 if deaf else None)

    async def _release(self, lane: Lane, leases: Sequence[Lease], started: bool) -> None:
        try:
            await self._backend.release(lane.shard, leases, started)
        except Exception as error:
            facts = {"deliveries": len(leases), "reason": str(error)}
            logger.error("%d leases could not be given back, and will end: %s", len(leases), error, extra=facts)
