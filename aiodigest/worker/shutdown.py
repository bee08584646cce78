"""The end of a worker's deliveries when it stops: they get a while to finish, and the rest is given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from aiodigest.backend import Backend, Lease
from aiodigest.worker.leases import ActiveDelivery
from aiodigest.worker.shard import ShardWorker, Shared

logger = logging.getLogger(__name__)


async def finish_deliveries(
    workers: Mapping[int, ShardWorker], shared: Shared, drain_timeout: float, at_once: asyncio.Event
) -> None:
    """Wait for the deliveries under way, for ``drain_timeout`` or until ``at_once``, and give the rest back."""
    if not (under_way := _under_way(workers)):
        return
    tasks = [each.task for _, each in under_way]
    ends = [asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(at_once.wait())]
    await asyncio.wait(ends, timeout=drain_timeout, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    if under_way := _under_way(workers):
        await _abandon(under_way, shared.backend, shared.timeout)


def _under_way(workers: Mapping[int, ShardWorker]) -> list[tuple[int, ActiveDelivery]]:
    return [(shard, each) for shard, worker in workers.items() for each in worker.leases.active if not each.task.done()]


async def _abandon(under_way: Sequence[tuple[int, ActiveDelivery]], backend: Backend, timeout: float) -> None:
    """Cancel the callbacks that took too long, and give their leases back without charging the attempts.

    A report under way gets one more timeout. After that its arrival is unknown, so the lease decides.
    """
    left = [(shard, active, active.stage) for shard, active in under_way]
    tasks = [active.task for _, active in under_way]
    for _, active, stage in left:
        if stage != "reporting":
            active.cancel()
    _, late = await asyncio.wait(tasks, timeout=timeout)
    ignoring = [active for _, active, _ in left if active.task in late and active.stage == "calling"]
    ignore = f", {len(ignoring)} of which ignore it" if ignoring else ""
    logger.warning("stopped with %d deliveries under way%s", len(tasks), ignore, extra={"deliveries": len(tasks)})
    leases: dict[tuple[int, bool], list[Lease]] = {}
    for shard, active, was in left:
        if active.stage == was != "reporting":
            leases.setdefault((shard, was == "calling"), []).append(active.lease)

    async def release(shard: int, leases: Sequence[Lease], started: bool) -> None:
        try:
            await backend.release(shard, leases, started)
        except Exception as error:
            facts = {"deliveries": len(leases), "reason": str(error)}
            logger.error("%d leases could not be given back, and will end: %s", len(leases), error, extra=facts)

    await asyncio.gather(*(release(shard, some, started) for (shard, started), some in leases.items()))
    for _, active, _ in left:
        if active.task in late:
            active.cancel()
    await asyncio.wait(tasks, timeout=0 if ignoring else None)
