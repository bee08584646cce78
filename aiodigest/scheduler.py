"""The scheduler of a process: it starts a worker for each shard, supervises them, and stops them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiodigest.backend import MAX_SHARDS, Lease, ShardMap
from aiodigest.backoff import BackoffMode
from aiodigest.logs import logger_of
from aiodigest.worker.concurrency import ConcurrencyLimit, Shared
from aiodigest.worker.destinations import Destinations
from aiodigest.worker.leases import ActiveDelivery
from aiodigest.worker.room import FULL
from aiodigest.worker.shard import ShardWorker
from aiodigest.worker.standstill import Standstill
from aiodigest.worker.tasks import elapse
from aiodigest.worker.throttling import Throttling

if TYPE_CHECKING:
    from aiodigest.timing.throttle import Throttle

logger = logger_of(__name__)


@dataclass(eq=False, kw_only=True)
class Scheduler(Shared):
    """Delivers the digests of all shards, at most ``concurrency`` at a time, until it is stopped.

    Durations are in seconds. ``run`` ends after ``stop``: claims end at once, and deliveries have ``drain_timeout`` to
    end, while their leases are still renewed. Deliveries still under way then are cancelled and released.
    """

    backoff_mode: BackoffMode
    concurrency: int
    destination: Callable[[str], str] | None = None
    destination_concurrency: int | None = None
    drain_timeout: float
    numbers: Container[int] | None  # of the shards to serve, if not all
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        self._workers: dict[int, ShardWorker] = {}  # by shard
        self._served: ShardMap | None = None  # whose shards it serves
        self._idle = False  # there is no shard to serve, and it has been said
        self._changed = asyncio.Event()  # the layout, or a worker has ended, or all are to stop
        self._at_once = asyncio.Event()  # no delivery under way is waited for
        self.standstill = Standstill(self.lease_timeout / 2)
        each = self.destination and Destinations(self.destination, self.backoff_mode, self.destination_concurrency)
        self.limit = ConcurrencyLimit(
            self.concurrency, self.backoff_mode, self.stopping, self._busy, each,
            room=FULL * self.dispatcher.bounds.digest, patience=self.lease_timeout,
        )  # fmt: skip
        if self.throttle is not None:
            self.throttling = Throttling(
                self.throttle, self.backend, self.availability, self.limit.pause, self.limit.changed
            )

    def stop(self, at_once: bool = False) -> None:
        """Stop claiming, and let ``run`` end; ``at_once``: without waiting for deliveries under way."""
        self.stopping.set()
        self._changed.set()
        self.limit.changed.set()
        self.limit.doubts.look_again()
        self.limit.room.look_again()
        if at_once:
            self._at_once.set()
        for worker in self._workers.values():
            worker.wakeups.woken.set()

    def poke(self, shard: int) -> None:
        """Look at a shard's schedule now: this process has made a timeline ready."""
        self.notice_layout()
        if shard in self._workers:
            self._workers[shard].wakeups.woken.set()

    @property
    def delivering(self) -> int:
        """The number of deliveries under way."""
        workers = list(self._workers.values())  # metrics are collected in a thread
        return sum(len(worker.leases.active) for worker in workers)

    async def run(self) -> None:
        with self.standstill.watching():
            await self._run()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            tokens = None if self.throttling is None else group.create_task(self.throttling.run())
            while not self.stopping.is_set():
                self._changed.clear()
                self._serve(group)
                if self._workers:
                    await self._changed.wait()
                else:
                    await self._look_for_shards()
            for worker in self._workers.values():
                await worker.finished_claiming.wait()
            await self._finish_deliveries()
            for worker in self._workers.values():
                worker.over.set()
            if tokens is not None and self.throttling is not None:
                tokens.cancel()
                await self.throttling.flush()

    def _busy(self) -> int:
        """Count the deliveries that count towards the limit: the next are claimed while those before are reported, of
        which there may be as many again."""
        leases = [worker.leases for worker in self._workers.values()]
        reporting = sum(each.reporting for each in leases)
        return sum(each.busy for each in leases) + max(0, reporting - self.concurrency)

    def notice_layout(self) -> None:
        if self._served is not self.backend.shard_map:
            self._changed.set()

    def _serve(self, group: asyncio.TaskGroup) -> None:
        """Let go of shards that are no more, and start to serve those that have come."""
        for shard in [shard for shard, worker in self._workers.items() if worker.has_ended]:
            del self._workers[shard]
        if self._served is self.backend.shard_map:
            return
        shards = self._served = self.backend.shard_map
        for shard in shards.live:
            number = shards.number_of(shard)  # None of one that is drained, which is everybody's
            is_chosen = self.numbers is None or number is None or number in self.numbers
            if is_chosen and shard not in self._workers:
                worker = self._workers[shard] = ShardWorker(shard, self)
                group.create_task(worker.run()).add_done_callback(lambda _: self._changed.set())
                self._idle = False
        chosen = [number for number in range(MAX_SHARDS) if number in (self.numbers or ())]
        missing = [number for number in chosen if number >= shards.adding]
        if missing and missing != chosen:
            line = "the namespace has %d shards, which count from 0: those that were chosen from %d on are not there"
            logger.warning(line, shards.adding, missing[0], extra={"shards": shards.adding})

    async def _look_for_shards(self) -> None:
        """Learn of a change of the layout while there is no shard to serve, whose worker would notice."""
        if not self._idle:
            shards = self.backend.shard_map.adding
            line = "none of the chosen shards is there: the namespace has %d, which count from 0. Nothing is delivered"
            logger.error(line, shards, extra={"shards": shards})
        self._idle = True
        if not await elapse(self._changed, self.lease_timeout / 3):
            try:
                await self.backend.connect()
            except Exception as error:
                self.availability.failed(error)
            else:
                self.availability.answered()

    # The end

    async def _finish_deliveries(self) -> None:
        """Wait for the deliveries under way, for ``drain_timeout`` or until ``_at_once``, and give the rest back."""
        if under_way := self._under_way():
            tasks = [each.task for _, each in under_way]
            ends = [asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(self._at_once.wait())]
            await asyncio.wait(ends, timeout=self.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
        if under_way := self._under_way():
            await self._abandon(under_way)

    def _under_way(self) -> list[tuple[int, ActiveDelivery]]:
        workers = self._workers.items()
        return [(shard, each) for shard, worker in workers for each in worker.leases.active if not each.task.done()]

    async def _abandon(self, under_way: Sequence[tuple[int, ActiveDelivery]]) -> None:
        """Cancel the callbacks that took too long, and give their leases back without charging the attempts.

        A report under way gets one more timeout. After that its arrival is unknown, so the lease decides.
        """
        left = [(shard, active, active.stage) for shard, active in under_way]
        tasks = [active.task for _, active in under_way]
        for _, active, stage in left:
            if stage != "reporting":
                active.cancel()
        _, late = await asyncio.wait(tasks, timeout=self.timeout)
        ignoring = [active for _, active, _ in left if active.task in late and active.stage == "calling"]
        what = "1 delivery" if len(tasks) == 1 else f"{len(tasks)} deliveries"
        ignore = f", {len(ignoring)} of which ignored it" if ignoring else ""
        logger.warning("stopped with %s under way%s", what, ignore, extra={"deliveries": len(tasks)})
        leases: dict[tuple[int, bool], list[Lease]] = {}
        for shard, active, was in left:
            if active.stage == was != "reporting":
                leases.setdefault((shard, was == "calling"), []).append(active.lease)

        async def release(shard: int, leases: Sequence[Lease], started: bool) -> None:
            try:
                await self.backend.release(shard, leases, started)
            except Exception as error:
                facts = {"deliveries": len(leases), "reason": str(error)}
                logger.error("%d leases could not be given back, and will end: %s", len(leases), error, extra=facts)

        await asyncio.gather(*(release(shard, some, started) for (shard, started), some in leases.items()))
        for _, active, _ in left:
            if active.task in late:
                active.cancel()
        await asyncio.wait(tasks, timeout=0 if ignoring else None)
