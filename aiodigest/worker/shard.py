"""The worker of one shard: claim, deliver, report, and sleep until more is due. It knows a ``Backend``, never Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiodigest.backend import Backend, Claims, Close, Closed, Lease, Retired, Retry, entries_of
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, LeaseLost
from aiodigest.policy import Limits, milliseconds
from aiodigest.worker.availability import Availability
from aiodigest.worker.batcher import Batcher
from aiodigest.worker.concurrency import ConcurrencyLimit
from aiodigest.worker.delivery import Attempt, Dispatcher, Observer, Outcome, tell
from aiodigest.worker.leases import ActiveDelivery, Leases
from aiodigest.worker.logs import facts_of, log_losses
from aiodigest.worker.tasks import retrieve
from aiodigest.worker.wakeups import WakeUps

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLAIM = 16  # digests of a call: while they are delivered the next are claimed, and no turn of the loop takes long
GOLDEN_RATIO = 0.618  # its multiples lie far apart between whole numbers


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts that the shard workers of a process share.

    Durations are in seconds. ``on_answer`` is called when the store has answered, so that a change of the layout is
    noticed.
    """

    backend: Backend
    dispatcher: Dispatcher[Any]
    limits: Limits
    lease_timeout: float
    timeout: float
    availability: Availability
    concurrency: ConcurrencyLimit
    stopping: asyncio.Event
    observers: Iterable[Observer]
    on_answer: Callable[[], None]


class ShardWorker:
    """Delivers the digests of one shard.

    ``run`` claims until the worker stops. From then on (``finished_claiming``) it goes on to renew and to report,
    until ``end``. If the shard is no more, it ends by itself once nothing of it is under way.
    """

    def __init__(self, shard: int, shared: Shared) -> None:
        self.shard = shard
        self._shared = shared
        self._backend = shared.backend
        self._lease_ms = milliseconds(shared.lease_timeout)
        self._availability = shared.availability
        self._concurrency = shared.concurrency
        self._stopping = shared.stopping
        self.leases = Leases(
            shard,
            shared.backend,
            shared.lease_timeout,
            shared.availability,
            on_renewed=shared.on_answer,  # a worker that rests learns of a change of the layout by this call alone
            on_lost_contact=shared.concurrency.changed.set,  # what waits to be reported makes room for others
        )
        self._closes = Batcher[Close, Closed](partial(shared.backend.close, shard), shared.timeout)
        self._retries = Batcher[Retry, bool](partial(shared.backend.retry, shard), shared.timeout)
        self._wakeups = WakeUps(partial(shared.backend.wait, shard))
        self._claims = f"claims of shard {shard}"  # a kind of calls, which may fail while others do not
        self._claim_failed = False  # the last one did: the next one is for a single digest
        # of the longest sleep, how much the first one is: shards that begin together then look in one after the other
        self._first_share = 1.0 - shard * GOLDEN_RATIO % 1.0
        self._retired = False  # the shard is no more
        self._over = asyncio.Event()
        self.finished_claiming = asyncio.Event()
        self.has_ended = False

    def wake(self) -> None:
        """Look at the shard's schedule now."""
        self._wakeups.wake()

    def end(self) -> None:
        """Report and renew nothing more."""
        self._over.set()

    async def run(self) -> None:
        """Serve the shard until ``end``, or until it is no more."""
        try:
            async with asyncio.TaskGroup() as group:
                parallel = [
                    group.create_task(each) for each in (self._closes.run(), self._retries.run(), self._keep_leases())
                ]
                await self._claim_and_sleep()
                self.finished_claiming.set()
                await self._over.wait()
                for task in parallel:
                    task.cancel()
        finally:
            self.has_ended = True
            self.leases.end()

    async def _keep_leases(self) -> None:
        try:
            await self.leases.keep()
        except Retired as end:
            self._retire(end)

    def _retire(self, end: Retired) -> None:
        """Note that the shard is gone."""
        if not self._retired:
            logger.info("%s", end, extra={"shard": self.shard})
        self._retired = True
        self._availability.answered(self._claims)
        self._availability.answered(self.leases.calls)
        self._end_if_retired()
        self.wake()
        self._shared.on_answer()  # others have its timelines, and need a worker although this one's deliveries go on

    def _end_if_retired(self) -> None:
        if self._retired and not self.leases.active:
            self.end()

    # Claiming

    async def _claim_and_sleep(self) -> None:
        try:
            while count := await self._concurrency.available(1 if self._claim_failed else CLAIM):
                self._wakeups.clear()
                claims = await self._claim(count)
                if claims is None:
                    await self._wakeups.close()  # its connection may be as dead as the claim's, and never tell
                    await self._availability.pause(self._claims)
                elif claims.wait_ms != 0:
                    await self._sleep(claims)
        except Retired as end:
            self._retire(end)
        finally:
            await self._wakeups.close()

    async def _claim(self, count: int) -> Claims | None:
        """Claim up to ``count`` digests, and begin to deliver them; None if the call failed."""
        loop = asyncio.get_running_loop()
        sent = loop.time()
        try:
            with self._concurrency.reserve(self.shard, count):
                if self.leases.active and self.leases.is_cut_off:  # else it might recover what this worker holds
                    await self.leases.renew()
                    return Claims(wait_ms=0)  # much may have happened meanwhile: count anew
                claims = await self._backend.claim(
                    self.shard,
                    count,
                    self._lease_ms,
                    self._shared.limits,
                    sample=self._concurrency.backoff.level > 0,
                    since_ms=self.leases.since_ms,
                )
        except Retired:
            raise
        except Exception as error:
            self.leases.failed(error, self._claims)
            self._claim_failed = True
            return None
        self._availability.answered(self._claims)
        self.leases.heard(sent, claims.now_ms)
        self._claim_failed = False
        self._shared.on_answer()
        log_losses(claims)
        now = loop.time()
        for lease in claims.leases:
            active = ActiveDelivery(lease, now - (claims.now_ms - lease.due_ms) / 1000)
            self._concurrency.backoff.began(lease.key, now)
            active.task = asyncio.create_task(self._deliver(active))
            active.task.add_done_callback(partial(self._on_done, active))
            self.leases.add(active, sent)
        return claims

    async def _sleep(self, claims: Claims) -> None:
        """Sleep until something is due, the wake-up stream tells of it, or a third of a lease has passed."""
        longest, self._first_share = self._shared.lease_timeout / 3 * self._first_share, 1.0
        timeout = longest if claims.wait_ms is None else min(longest, claims.wait_ms / 1000)
        await self._wakeups.wait(claims.wake_up, timeout)

    # Delivering

    async def _deliver(self, active: ActiveDelivery) -> None:
        """Deliver a digest in all its parts, and end only this delivery if something fails."""
        try:
            while not (self._stopping.is_set() or active.call.cancelled):  # the next part, too, needs the lease
                if not await self._deliver_part(active):
                    return
            await self._backend.release(self.shard, [active.lease], started=False)
        except LeaseLost as error:
            logger.warning("%s", error, extra=facts_of(active.lease))
        except AiodigestError as error:
            facts = facts_of(active.lease, error)
            logger.error("timeline %r: %s; its lease will end", active.lease.key, error, extra=facts)
        except asyncio.CancelledError:
            if not (active.call.cancelled or self.has_ended):
                line = "the delivery of %r was cancelled, and not by its worker; its lease will end"
                logger.warning(line, active.lease.key, extra=facts_of(active.lease))
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:
            line = "a fault of aiodigest while delivering %r; its lease will end"
            logger.exception(line, active.lease.key, extra=facts_of(active.lease))

    async def _deliver_part(self, active: ActiveDelivery) -> bool:
        """Deliver a digest, or its next part; True if there is more to do under this lease."""
        loop = asyncio.get_running_loop()
        async with self._concurrency.gate:
            entries = await entries_of(active.lease, partial(self._read, active.lease))
            attempt = await self._shared.dispatcher.prepare(active.lease, entries)
            if self._stopping.is_set():
                return True
            if loop.time() >= active.ends:  # this process was stopped while others ran
                raise LeaseLost(f"the lease on timeline {active.lease.key!r} ended before its delivery began")
            outcome, late, took = await self._call(active, attempt)
        sent = loop.time()
        closed = await self._until_answered(partial(outcome.report_to, self._closes.submit, self._retries.submit))
        tell(self._shared.observers, outcome.delivery(closed, late, took))
        if closed.status == "lost":
            lease = active.lease
            raise LeaseLost(f"digest {lease.digest_id} of {lease.key!r} ended, or is another worker's")
        if closed.status != "part":
            return False
        active.lease, active.stage = outcome.rest(closed), "claimed"
        self.leases.extend(active, max(sent, active.ends - self._shared.lease_timeout))  # the store has renewed it too
        return True

    def _on_done(self, active: ActiveDelivery, task: asyncio.Task[None]) -> None:
        """Make room for another delivery, even if this one's task was cancelled before it ran."""
        retrieve(task)  # a KeyboardInterrupt ends the loop, and is seen there
        self.leases.remove(active)
        if active.stage != "reporting":  # nothing was learnt of the receiver
            self._concurrency.backoff.withdrawn(active.lease.key)
        self._end_if_retired()
        self._concurrency.changed.set()

    async def _read(self, lease: Lease, start: int, count: int) -> list[bytes]:
        return await self._until_answered(partial(self._backend.read, self.shard, lease, start, count))

    async def _call(self, active: ActiveDelivery, attempt: Attempt[Any]) -> tuple[Outcome, float, float]:
        """Call back; return the outcome, and by how many seconds it began late and how many it took."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        active.stage = "calling"
        outcome = await self._shared.dispatcher.deliver(attempt, active.call)
        active.stage = "reporting"
        if self.leases.is_cut_off:
            self._concurrency.changed.set()
        ended = loop.time()
        self._concurrency.learn(active.lease.key, outcome.success, started, ended, outcome.pause)
        return outcome, max(0.0, started - active.due), ended - started

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store for a delivery until it answers, if only with an error of the timeline's.

        A server that refuses access may allow it again, as after a change of passwords.
        """
        calls = self.leases.calls
        while True:
            try:
                answer = await call()
            except (BackendUnavailable, ConfigurationError) as error:
                if self.has_ended:  # a callback has outlived its worker
                    raise
                self.leases.failed(error, calls)
                await self._availability.pause(calls)
            except AiodigestError:
                self._availability.answered(calls)
                raise
            else:
                self._availability.answered(calls)
                return answer
