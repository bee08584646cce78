"""The state of one shard's loop: the leases it holds, and the reports it sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from aiodigest.backend import MAX_SHARDS, Backend, Close, Closed, Lease, Retired, Retry
from aiodigest.errors import AiodigestError
from aiodigest.policy import milliseconds
from aiodigest.worker.availability import Outage
from aiodigest.worker.batcher import Coalescer
from aiodigest.worker.delivery import Call
from aiodigest.worker.logs import facts_of
from aiodigest.worker.timer import GRAIN, Alarm

logger = logging.getLogger(__name__)

GOLDEN = 0.618  # its multiples lie far apart between whole numbers


@dataclass(slots=True, eq=False)
class Hold:
    """A lease of this worker, and the task that delivers its digest."""

    lease: Lease
    due: float
    stage: Literal["claimed", "calling", "reporting"] = "claimed"
    ends: float = inf  # the time by which the lease has surely ended
    call: Call = field(default_factory=Call)
    task: asyncio.Task[None] = field(init=False)  # set at once by who makes it

    @property
    def is_deaf(self) -> bool:
        """True if the callback timed out but ignores cancellation."""
        return self.stage == "calling" and asyncio.get_running_loop().time() > self.call.until

    def cut(self) -> None:
        """Cancel the delivery, which then reports nothing."""
        self.call.cut = True
        self.task.cancel()


class Lane:
    """The state of one shard's loop."""

    def __init__(
        self,
        shard: int,
        backend: Backend,
        outage: Outage,
        serve: Callable[[], None],
        changed: asyncio.Event,
        timeout: float,
        lease_timeout: float,
    ) -> None:
        async def close(closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
            return await backend.close(shard, closes)

        async def retry(retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
            return await backend.retry(shard, retries)

        self.shard = shard
        self._backend = backend
        self._outage = outage
        self._serve = serve  # to be called when the layout may have changed
        self._changed = changed  # to be set when slots may have become free
        self._lease_timeout = lease_timeout
        self._lease_ms = milliseconds(lease_timeout)
        self.alarm = Alarm(self._expire)  # for the lease that ends first
        # the kinds of calls, one of which may fail while the others do not
        self.claiming, self.leasing = f"claims of shard {shard}", f"leases of shard {shard}"
        self.woken = asyncio.Event()
        self.holds: dict[Hold, None] = {}  # a set, in the order of the claims
        self.closes = Coalescer[Close, Closed](close, timeout)
        self.retries = Coalescer[Retry, bool](retry, timeout)
        self.chores: list[asyncio.Task[None]] = []
        self.listener: asyncio.Task[str | None] | None = None
        self.retired = False  # the shard is no more
        self.failing = False  # the last claim failed: the next one is for a single digest
        self.failures = 0  # calls that failed
        self.forgiven = 0  # how many had, when the renewal was sent that was answered last
        self.deaf = 0  # how often in a row the doorbell could not be heard
        # of the longest sleep, how much the first one is: shards that begin together then look in one after the other
        self.share = 1.0 - shard * GOLDEN % 1.0
        self.renewed = self.marked = asyncio.get_running_loop().time()  # and when the store last heard of this worker

    @property
    def away(self) -> bool:
        """True if a call has failed, and no renewal sent since has been answered."""
        return self.failures > self.forgiven

    @property
    def busy(self) -> int:
        """The number of slots it takes.

        While its store does not answer, deliveries that only wait to be reported take no slot, so that an outage of
        one shard does not stop the deliveries of all.
        """
        if not self.away:
            return len(self.holds)
        return sum(hold.stage != "reporting" for hold in self.holds)

    def failed(self, error: Exception, call: str) -> None:
        """Note that a call of a kind failed."""
        self.failures += 1
        self._outage.failed(error, call)
        self._changed.set()  # what waits to be reported leaves its slots to others

    def end(self) -> None:
        """Send and renew nothing more."""
        for chore in self.chores:
            chore.cancel()

    def retire(self, end: Retired) -> None:
        """End the lane: its shard is gone."""
        if not self.retired:
            logger.info("%s", end, extra={"shard": self.shard})
        self.retired = True
        self._outage.answered(self.claiming)
        self._outage.answered(self.leasing)

    # Leases

    def extend(self, hold: Hold, since: float) -> None:
        """Trust a lease until its end, and not a moment longer, even if a call to renew it hangs.

        The end is counted from before the call that granted the lease, so that it is never assumed later than it is.
        """
        if not hold.task.done():
            hold.ends = since + self._lease_timeout
            self.alarm.set(hold.ends)

    def lose(self, hold: Hold) -> None:
        """End the delivery of a lost lease; a delivery being reported learns of it from the answer."""
        if hold.stage != "reporting" and not hold.task.done() and not hold.call.cut:
            why = "its callback ignores that its time is over" if hold.is_deaf else "its delivery is cancelled"
            logger.warning("the lease on timeline %r is lost: %s", hold.lease.key, why, extra=facts_of(hold.lease))
            hold.cut()

    def _expire(self) -> None:
        soon = asyncio.get_running_loop().time() + GRAIN
        for hold in self.holds:
            if hold.ends <= soon:
                self.lose(hold)
        if left := [hold.ends for hold in self.holds if hold.ends > soon]:
            self.alarm.set(min(left))

    async def keep(self) -> None:
        """Renew leases at a third of their length.

        A worker that neither claims nor holds anything (it rests, or its slots are taken) has nothing to renew, but
        calls as often: after a gap of half a lease the store would take all its workers for gone, and recover nothing.
        A worker whose latest call failed does the same; otherwise that call could be its last for a long time.
        """
        loop = asyncio.get_running_loop()
        third = self._lease_timeout / 3
        while not self.retired:
            due = self.renewed + third if self.holds or self.away else self.marked + 1.1 * third
            if (rest := due - loop.time()) > 0:
                await asyncio.sleep(min(rest, third / 3))  # the next due time may have changed by then
            else:
                await self._renew_at_last()

    async def _renew_at_last(self) -> None:
        while True:
            try:
                await self.renew()
                return
            except Retired as end:
                self.retire(end)
                return
            except Exception as error:
                self.failed(error, self.leasing)
            await self._outage.pause(self.leasing)

    async def renew(self) -> None:
        """Renew the leases, or only report that there is a worker. Leases of callbacks that do not end are left out."""
        holds = [(hold, hold.lease) for hold in self.holds if not hold.is_deaf]
        sent = asyncio.get_running_loop().time()
        failures = self.failures
        kept = await self._backend.renew(self.shard, [lease for _, lease in holds], self._lease_ms)
        self.renewed = self.marked = sent
        self.forgiven = failures
        for (hold, lease), held in zip(holds, kept, strict=True):
            if isinstance(held, AiodigestError):
                facts = facts_of(lease, held)
                logger.error("the lease on timeline %r cannot be renewed: %s", lease.key, held, extra=facts)
            elif held:
                self.extend(hold, sent)
            elif hold.lease is lease:
                self.lose(hold)
        self._outage.answered(self.leasing)
        self._serve()  # one that rests learns of a change of the layout by this call alone


def is_served(shard: int, numbers: Container[int] | None, backend: Backend) -> bool:
    """True if a worker that was given these numbers serves a shard."""
    number = backend.shard_map.number_of(shard)
    is_chosen = numbers is None or number is None or number in numbers  # what is drained is everybody's
    return is_chosen and backend.shard_map.is_live(shard)


def warn_of_missing(numbers: Container[int] | None, backend: Backend) -> None:
    """Warn of chosen shards that do not exist, if others do."""
    chosen = [number for number in range(MAX_SHARDS) if numbers is not None and number in numbers]
    missing = [number for number in chosen if number >= backend.shard_map.adding]
    if missing and missing != chosen:
        line = "the namespace has %d shards, which count from 0: those that were chosen from %d on are not there"
        shards = backend.shard_map.adding
        logger.warning(line, shards, missing[0], extra={"shards": shards})
