"""The scheduler of a process: it starts a worker for each shard, supervises them, and stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Iterable
from typing import Any

from aiodigest.backend import MAX_SHARDS, Backend, ShardMap
from aiodigest.backoff import BackoffMode
from aiodigest.policy import Limits
from aiodigest.worker.availability import Availability
from aiodigest.worker.concurrency import ConcurrencyLimit
from aiodigest.worker.delivery import Dispatcher, Observer
from aiodigest.worker.shard import ShardWorker, Shared
from aiodigest.worker.shutdown import finish_deliveries
from aiodigest.worker.tasks import elapse

logger = logging.getLogger(__name__)


class Scheduler:
    """Delivers the digests of all shards, at most ``concurrency`` at a time, until it is stopped.

    Durations are in seconds. ``run`` ends after ``stop``: claims end at once, and deliveries have ``drain_timeout`` to
    end, while their leases are still renewed. Deliveries still under way then are cancelled and released.
    """

    def __init__(
        self,
        backend: Backend,
        availability: Availability,
        *,
        dispatcher: Dispatcher[Any],
        limits: Limits,
        backoff_mode: BackoffMode,
        concurrency: int,
        lease_timeout: float,
        drain_timeout: float,
        timeout: float,
        observers: Iterable[Observer],
        numbers: Container[int] | None,
    ) -> None:
        self._backend = backend
        self._numbers = numbers
        self._workers: dict[int, ShardWorker] = {}  # by shard
        self._served: ShardMap | None = None  # whose shards it serves
        self._idle = False  # there is no shard to serve, and it has been said
        stopping = self._stopping = asyncio.Event()
        self._changed = asyncio.Event()  # the layout, or a worker has ended, or all are to stop
        limit = self._limit = ConcurrencyLimit(concurrency, backoff_mode, stopping, self._busy)
        on_answer = self._notice_layout
        self._shared = Shared(
            backend, dispatcher, limits, lease_timeout, timeout, availability, limit, stopping, observers, on_answer
        )
        self._drain_timeout = drain_timeout
        self._at_once = asyncio.Event()  # no delivery under way is waited for

    def stop(self, at_once: bool = False) -> None:
        """Stop claiming, and let ``run`` end; ``at_once``: without waiting for deliveries under way."""
        self._stopping.set()
        self._changed.set()
        self._limit.changed.set()
        if at_once:
            self._at_once.set()
        for worker in self._workers.values():
            worker.wake()

    def poke(self, shard: int) -> None:
        """Look at a shard's schedule now: this process has made a timeline ready."""
        self._notice_layout()
        if shard in self._workers:
            self._workers[shard].wake()

    @property
    def delivering(self) -> int:
        """The number of deliveries under way."""
        workers = list(self._workers.values())  # metrics are collected in a thread
        return sum(len(worker.leases.active) for worker in workers)

    @property
    def backoff_level(self) -> int:
        return self._limit.backoff.level

    async def run(self) -> None:
        """Deliver until stopped."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                self._changed.clear()
                self._serve(group)
                if self._workers:
                    await self._changed.wait()
                else:
                    await self._look_for_shards()
            for worker in self._workers.values():
                await worker.finished_claiming.wait()
            await finish_deliveries(self._workers, self._shared, self._drain_timeout, self._at_once)
            for worker in self._workers.values():
                worker.end()

    def _busy(self) -> int:
        return sum(worker.leases.busy for worker in self._workers.values())

    def _notice_layout(self) -> None:
        if self._served is not self._backend.shard_map:
            self._changed.set()

    def _serve(self, group: asyncio.TaskGroup) -> None:
        """Let go of shards that are no more, and start to serve those that have come."""
        for shard in [shard for shard, worker in self._workers.items() if worker.has_ended]:
            del self._workers[shard]
        if self._served is self._backend.shard_map:
            return
        shards = self._served = self._backend.shard_map
        for shard in shards.live:
            number = shards.number_of(shard)  # None of one that is drained, which is everybody's
            is_chosen = self._numbers is None or number is None or number in self._numbers
            if is_chosen and shard not in self._workers:
                worker = self._workers[shard] = ShardWorker(shard, self._shared)
                group.create_task(worker.run()).add_done_callback(lambda _: self._changed.set())
                self._idle = False
        self._warn_of_missing()

    def _warn_of_missing(self) -> None:
        """Warn of chosen shards that do not exist, if others do."""
        chosen = [number for number in range(MAX_SHARDS) if number in (self._numbers or ())]
        shards = self._backend.shard_map.adding
        missing = [number for number in chosen if number >= shards]
        if missing and missing != chosen:
            line = "the namespace has %d shards, which count from 0: those that were chosen from %d on are not there"
            logger.warning(line, shards, missing[0], extra={"shards": shards})

    async def _look_for_shards(self) -> None:
        """Learn of a change of the layout while there is no shard to serve, whose worker would notice."""
        if not self._idle:
            shards = self._backend.shard_map.adding
            line = "none of the chosen shards is there: the namespace has %d, which count from 0. Nothing is delivered"
            logger.error(line, shards, extra={"shards": shards})
        self._idle = True
        if not await elapse(self._changed, self._shared.lease_timeout / 3):
            try:
                await self._backend.connect()
            except Exception as error:
                self._shared.availability.failed(error)
            else:
                self._shared.availability.answered()
