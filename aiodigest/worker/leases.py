"""The leases that a shard's worker holds: renewed in time, and given up at their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from aiodigest.backend import Lease, Retired
from aiodigest.errors import AiodigestError
from aiodigest.logs import logger_of
from aiodigest.policy import milliseconds
from aiodigest.worker.concurrency import Shared
from aiodigest.worker.delivery import Call
from aiodigest.worker.destinations import Destination
from aiodigest.worker.reasons import facts_of
from aiodigest.worker.tasks import GRAIN, Timer
from aiodigest.worker.throttling import Token

logger = logger_of(__name__)

GRACE = 0.9  # seconds a callback has to end, once it was seen that it must: less than those from look to look


@dataclass(slots=True, eq=False)
class ActiveDelivery:
    """A lease of this worker, and the task that delivers its digest."""

    lease: Lease
    due: float
    destination: Destination
    leases: Leases
    call: Call
    stage: Literal["claimed", "decoding", "calling", "reporting"] = "claimed"
    ends: float = inf  # the time by which the lease has surely ended
    token: Token | None = None  # of the throttle, not used yet
    is_first: bool = True  # no part of its digest has begun
    task: asyncio.Task[None] = field(init=False)  # set at once by who makes it
    on_done: Callable[[asyncio.Task[None]], None] = field(
        init=False
    )  # too: for a task that is cancelled before it runs
    has_begun: bool = False
    seen: float = inf  # the time when it was first seen that its callback must end

    @property
    def is_overdue(self) -> bool:
        """True if the callback timed out but ignores cancellation."""
        return self.stage == "calling" and asyncio.get_running_loop().time() > self.call.deadline

    @property
    def is_waited_for(self) -> bool:
        """True if others may wait for it: unless its callback ignores its end, or its server is away when it calls.

        A callback that is cancelled ends in a later turn of the loop, if not after it has cleaned up. Its time counts
        from when somebody looks, not from its end: the loop may have stood still, and has not cancelled it yet.
        """
        needs_store = self.stage in ("claimed", "reporting")
        away = needs_store and (self.leases.is_cut_off or self in self.leases.unreported)
        now = asyncio.get_running_loop().time()
        self.seen = min(self.seen, now) if self.is_overdue or self.call.cancelled else inf
        return not away and now < self.seen + GRACE

    def cancel(self) -> None:
        """Cancel the delivery, which then reports nothing."""
        self.call.cancelled = True
        self.task.cancel()


class Leases:
    """Keeps the leases of the deliveries under way in one shard."""

    def __init__(self, shard: int, shared: Shared) -> None:
        self._shard = shard
        self._shared = shared
        self.calls = f"leases of shard {shard}"  # a kind of calls, which may fail while others do not
        self.reports = f"reports of shard {shard}"  # another: nothing else that is answered ends the pauses of these
        self.active: dict[ActiveDelivery, None] = {}  # a set, in the order of the claims
        self.unreported: set[ActiveDelivery] = set()  # their latest call failed, and is tried again
        self._timer = Timer(self._expire, copy_context())  # for the lease that ends first
        self.failures = 0  # calls that failed
        self._failures_answered = 0  # how many had, when the renewal was sent that was answered last
        self._standstills = shared.standstill.count  # how often the loop had stood still by then
        self._renewed = self._heard = asyncio.get_running_loop().time()  # and when the store last heard of this worker

    @property
    def is_cut_off(self) -> bool:
        """True if a call has failed, and no renewal sent since has been answered."""
        return self.failures > self._failures_answered

    def must_look(self) -> bool:
        """Return True if leases may have ended unnoticed: nothing is claimed until they are renewed or lost."""
        self._shared.standstill.look()
        return bool(self.active) and (self.is_cut_off or self._standstills < self._shared.standstill.count)

    @property
    def _reported(self) -> int:
        return [each.stage for each in self.active].count("reporting")

    @property
    def busy(self) -> int:
        """The number of deliveries that are not to be reported yet: each counts towards the concurrency limit."""
        return len(self.active) - self._reported

    @property
    def reporting(self) -> int:
        """The number of deliveries that wait for the answer to their reports.

        While the store does not answer, they do not count: the outage of one shard does not stop the deliveries of all.
        """
        return 0 if self.is_cut_off else self._reported

    def failed(self, error: Exception, calls: str) -> None:
        self.failures += 1
        self._shared.availability.failed(error, calls)
        self._shared.limit.changed.set()  # what waits to be reported makes room for others

    def report_failed(self, error: Exception, active: ActiveDelivery) -> None:
        """Note that a delivery's call failed. Only the first tells that the server may be away, until all are answered:
        while renewals are, it refuses these alone, and each must not make claims renew first."""
        if self.unreported:
            self._shared.availability.failed(error, self.reports)
        else:
            self.failed(error, self.reports)
        self.unreported.add(active)

    def report_ended(self, active: ActiveDelivery) -> None:
        """Note that a delivery's call has been answered, or is tried no more."""
        if active in self.unreported:
            self.unreported.remove(active)
            if not self.unreported:
                self._shared.availability.answered(self.reports)

    def heard(self, at: float, failures: int) -> None:
        """Note that the store has answered a claim that was sent at this time, when so many calls had failed, and heard
        of this worker by it."""
        self._heard = at
        if self.is_cut_off and not self.active:  # there is no lease that a renewal could find lost
            self._failures_answered = failures
            self._shared.availability.answered(self.calls)

    def extend(self, active: ActiveDelivery, since: float) -> None:
        """Trust a lease until its end, and not a moment longer, even if a call to renew it hangs.

        The end is counted from before the call that granted the lease, so that it is never assumed later than it is.
        """
        if not active.task.done():
            active.ends = since + self._shared.lease_timeout
            self._timer.set(active.ends)

    def _lose(self, active: ActiveDelivery) -> None:
        """End the delivery of a lost lease; a delivery being reported learns of it from the answer."""
        if active.stage != "reporting" and not active.task.done() and not active.call.cancelled:
            key, facts = active.lease.key, facts_of(active.lease)
            why = "its callback ignores that its time is over" if active.is_overdue else "its delivery is cancelled"
            logger.warning("the lease on timeline %r is lost: %s", key, why, extra=facts)
            active.cancel()

    def superseded(self, key: str) -> None:
        """End what is under way of a timeline on which another lease is given: the clock of its server has stepped
        forward, and ended the lease before its time."""
        for active in self.active:
            if active.lease.key == key:
                self._lose(active)

    def _expire(self) -> None:
        soon = asyncio.get_running_loop().time() + GRAIN
        for active in self.active:
            if active.ends <= soon:
                self._lose(active)
        if left := [active.ends for active in self.active if active.ends > soon]:
            self._timer.set(min(left))

    async def keep(self) -> None:
        """Renew leases at a third of their length, until ``Retired`` is raised.

        A worker that neither claims nor holds anything (it rests, or as much is under way as may be) has nothing to
        renew, but calls as often: after a gap of half a lease the store would take all its workers for gone, and
        recover nothing. A worker whose latest call failed does the same; otherwise that call could be its last for a
        long time.
        """
        loop = asyncio.get_running_loop()
        third = self._shared.lease_timeout / 3
        while True:
            due = self._renewed + third if self.active or self.is_cut_off else self._heard + 1.1 * third
            if (rest := due - loop.time()) > 0:
                await asyncio.sleep(min(rest, third / 3))  # the next due time may have changed by then
                continue
            try:
                await self.renew()
            except Retired:
                raise
            except Exception as error:
                self.failed(error, self.calls)
                await self._shared.availability.pause(self.calls)

    async def renew(self) -> None:
        """Renew the leases, or only report that there is a worker. Leases of callbacks that do not end are left out."""
        renewed = [(active, active.lease) for active in self.active if not active.is_overdue]
        sent, failures = asyncio.get_running_loop().time(), self.failures
        standstills = self._shared.standstill.count
        leases, lease_ms = [lease for _, lease in renewed], milliseconds(self._shared.lease_timeout)
        kept = await self._shared.backend.renew(self._shard, leases, lease_ms)
        self._renewed = self._heard = sent
        self._failures_answered, self._standstills = failures, standstills
        for (active, lease), held in zip(renewed, kept, strict=True):
            if isinstance(held, AiodigestError):
                facts = facts_of(lease, held)
                logger.error("the lease on timeline %r cannot be renewed: %s", lease.key, held, extra=facts)
            elif held:
                self.extend(active, sent)
            elif active.lease is lease:
                self._lose(active)
        self._shared.availability.answered(self.calls)
        self._shared.notice_layout()  # a worker that rests learns of a change by this call alone

    def end(self) -> None:
        """End what is still under way: after a fault, or callbacks that ignore their cancellation."""
        self._timer.cancel()
        for active in self.active:
            active.task.cancel()
