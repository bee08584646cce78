"""The loop of a shard: sleep, claim, dispatch, renew, close. It knows a ``Backend``, and never Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiodigest.backend import Backend, Claims, Close, Closed, Lease, Retry
from aiodigest.backoff import BackoffMode, ConsumerBackoff
from aiodigest.dispatch import Attempt, Dispatcher, Outcome
from aiodigest.errors import AiodigestError, BackendUnavailable, LeaseLost
from aiodigest.lane import Hold, Lane
from aiodigest.models import Delivery
from aiodigest.outage import BACKOFF, Outage, elapse
from aiodigest.policy import Limits, milliseconds

logger = logging.getLogger(__name__)

CLAIM = 16  # digests of a call: while they are delivered the next are claimed, and no turn of the loop takes long

Observer: TypeAlias = Callable[[Delivery], None]


class Scheduler:
    """Delivers the digests of all shards, at most ``concurrency`` at a time, until it is stopped.

    Durations are in seconds. ``run`` ends after ``stop``: claims end at once, deliveries have ``drain_timeout`` to
    end, under leases that go on being renewed, and what is still under way is then cancelled and released.
    """

    def __init__(
        self,
        backend: Backend,
        dispatcher: Dispatcher[Any],
        limits: Limits,
        *,
        backoff_mode: BackoffMode,
        concurrency: int,
        lease_timeout: float,
        drain_timeout: float,
        timeout: float,
        observers: Iterable[Observer] = (),
    ) -> None:
        self._backend = backend
        self._dispatcher = dispatcher
        self._limits = limits
        self._backoff = ConsumerBackoff(backoff_mode)
        self._concurrency = concurrency
        self._lease_timeout = lease_timeout
        self._lease_ms = milliseconds(lease_timeout)
        self._drain_timeout = drain_timeout
        self._timeout = timeout
        self._observers = observers
        self._outage = Outage("the server")
        self._lanes = [Lane(shard, backend, timeout, lease_timeout) for shard in range(backend.shards)]
        self._reserved = 0
        self._paused_until = 0.0
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ended = False

    def stop(self, at_once: bool = False) -> None:
        """Claim nothing more, and let ``run`` end; ``at_once``: without waiting for what is under way."""
        self._stopping.set()
        self._changed.set()
        if at_once:
            self._hurry.set()
        for lane in self._lanes:
            lane.woken.set()

    def poke(self, shard: int) -> None:
        """Look at a shard's schedule now: this process has made a timeline ready."""
        self._lanes[shard].woken.set()

    async def run(self) -> None:
        """Deliver until stopped."""
        try:
            async with asyncio.TaskGroup() as group:
                chores = [
                    group.create_task(chore)
                    for lane in self._lanes
                    for chore in (lane.closes.run(), lane.retries.run(), self._keep(lane))
                ]
                loops = [group.create_task(self._loop(lane)) for lane in self._lanes]
                await asyncio.wait(loops)
                await self._drain()
                for chore in chores:
                    chore.cancel()
        finally:
            self._ended = True
            for lane in self._lanes:
                lane.alarm.cancel()
            for task in self._tasks():  # none is left, but after a fault, or of a callback that ignores its end
                task.cancel()

    # Claiming

    async def _loop(self, lane: Lane) -> None:
        try:
            while slots := await self._slots():
                lane.woken.clear()
                claims = await self._claim(lane, slots)
                if claims is None:
                    await self._hang_up(lane)  # its connection may be as dead as the claim's, and never tell
                    await self._outage.pause(lane.claiming)
                elif claims.wait_ms != 0:
                    await self._sleep(lane, claims)
        finally:
            await self._hang_up(lane)

    async def _slots(self) -> int:
        """Wait for free slots; 0 when there will be none, since this worker stops."""
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            self._changed.clear()
            now = loop.time()
            rest = max(self._paused_until, self._backoff.resumes_at or 0.0) - now
            allowed = self._backoff.allowed(now, self._concurrency) if now >= self._paused_until else 0
            free = min(allowed, self._concurrency) - self._reserved - sum(len(lane.holds) for lane in self._lanes)
            if free > 0:
                share = -(-free // len(self._lanes))  # rounded up: a shard with a backlog leaves slots to the others
                return min(share, CLAIM)
            await elapse(self._changed, rest if rest > 0 else None)
        return 0

    async def _claim(self, lane: Lane, slots: int) -> Claims | None:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self._reserved += slots
        try:
            if lane.holds and lane.away:  # else this claim might recover what this worker holds
                await self._renew(lane)
                return Claims(wait_ms=0)  # much may have happened meanwhile: count the free slots anew
            claims = await self._backend.claim(lane.shard, slots, self._lease_ms, self._limits)
        except Exception as error:
            self._failed(lane, error, lane.claiming)
            return None
        finally:
            self._reserved -= slots
            self._changed.set()  # another shard may wait for the slots that this one did not need
        self._outage.answered(lane.claiming)
        lane.marked = sent
        for key, reason in claims.broken:
            logger.error("timeline %r cannot be read and is set aside for a lease: %s", key, reason)
        for key, count in claims.expired:
            logger.error("timeline %r outlived its ttl: %d records are lost", key, count)
        now = loop.time()
        for lease in claims.leases:
            hold = Hold(lease, now - (claims.now_ms - lease.due_ms) / 1000)
            lane.holds[hold] = None
            hold.task = asyncio.create_task(self._deliver(lane, hold))
            hold.task.add_done_callback(partial(self._let_go, lane, hold))
            lane.extend(hold, sent)
        return claims

    async def _sleep(self, lane: Lane, claims: Claims) -> None:
        """Sleep until something is due, the doorbell rings, or a third of a lease has passed."""
        third = self._lease_timeout / 3
        timeout = third if claims.wait_ms is None else min(third, claims.wait_ms / 1000)
        deadline = asyncio.get_running_loop().time() + timeout
        waker = asyncio.create_task(lane.woken.wait())
        try:
            while not waker.done() and (rest := deadline - asyncio.get_running_loop().time()) > 0:
                if lane.listener is None or lane.listener.done():
                    lane.listener = asyncio.create_task(self._listen(lane, claims.bell))
                await asyncio.wait([waker, lane.listener], timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                # A listener that was armed before the claim may hear of a ring that the claim has seen.
                if lane.listener.done() and lane.listener.result() != claims.bell:
                    break
        finally:
            waker.cancel()

    async def _listen(self, lane: Lane, bell: str) -> str | None:
        try:
            heard = await self._backend.wait(lane.shard, bell)
        except Exception:
            # The next claim finds out what is wrong; should it succeed all the same, this is no busy loop.
            lane.deaf += 1
            if lane.deaf > 1:
                await asyncio.sleep(BACKOFF(lane.deaf))
            return None
        lane.deaf = 0
        return heard

    def _failed(self, lane: Lane, error: Exception, call: str) -> None:
        lane.failures += 1
        self._outage.failed(error, call)

    async def _hang_up(self, lane: Lane) -> None:
        if lane.listener is not None:
            lane.listener.cancel()
            await asyncio.wait([lane.listener])
            lane.listener = None

    # Delivering

    async def _deliver(self, lane: Lane, hold: Hold) -> None:
        try:
            while not self._stopping.is_set():
                attempt = await self._dispatcher.prepare(hold.lease, await self._entries(lane, hold.lease))
                if self._stopping.is_set():
                    break
                if asyncio.get_running_loop().time() >= hold.ends:  # this process stood still, and others did not
                    raise LeaseLost(f"the lease on timeline {hold.lease.key!r} ended before its delivery began")
                outcome, delivery = await self._call(hold, attempt)
                closed = await self._report(lane, outcome.report)
                if closed.status in ("lost", "deleted"):
                    delivery = replace(delivery, result=closed.status)
                self._tell(delivery)
                if closed.status == "lost":
                    raise LeaseLost(f"digest {delivery.digest_id} of {delivery.key!r} ended, or is another worker's")
                if closed.status != "part":
                    return
                hold.lease, hold.stage = self._rest(outcome.report, closed), "claimed"
            await self._backend.release(lane.shard, [hold.lease], started=False)
        except LeaseLost as error:
            logger.warning("%s", error)
        except AiodigestError as error:
            logger.error("timeline %r: %s; its lease will end", hold.lease.key, error)
        except Exception:
            logger.exception("a fault of aiodigest while delivering %r; its lease will end", hold.lease.key)

    def _let_go(self, lane: Lane, hold: Hold, task: asyncio.Task[None]) -> None:
        """Free the slot of a delivery; also of one whose task was cancelled before it ran."""
        del lane.holds[hold]
        self._changed.set()

    async def _entries(self, lane: Lane, lease: Lease) -> Sequence[bytes]:
        """The entries of the digest, or of its next part; what did not fit into the claim is paged."""
        taken = min(lease.part or lease.size, lease.size)
        entries = list(lease.entries[:taken])
        while len(entries) < taken:
            try:
                page = await self._backend.read(lane.shard, lease, len(entries), taken - len(entries))
            except BackendUnavailable as error:
                self._failed(lane, error, lane.leasing)
                await self._outage.pause(lane.leasing)
                continue
            self._outage.answered(lane.leasing)
            if not page:
                raise LeaseLost(f"the entries of timeline {lease.key!r} went away under delivery")
            entries += page
        return entries

    async def _call(self, hold: Hold, attempt: Attempt[Any]) -> tuple[Outcome, Delivery]:
        loop = asyncio.get_running_loop()
        lease, started = hold.lease, loop.time()
        hold.stage = "calling"
        outcome = await self._dispatcher.deliver(attempt)
        hold.stage = "reporting"
        ended = loop.time()
        if outcome.success is True:
            self._backoff.succeeded(lease.key, ended, started=started)
        elif outcome.success is False:
            self._backoff.failed(lease.key, ended, started=started)
        if outcome.pause:
            self._paused_until = max(self._paused_until, ended + outcome.pause)
        late, took = max(0.0, started - hold.due), ended - started
        facts = (lease.key, lease.digest_id, lease.attempt, outcome.result, outcome.records, late, took)
        return outcome, Delivery(*facts)

    def _tell(self, delivery: Delivery) -> None:
        for observer in self._observers:
            try:
                observer(delivery)
            except Exception:
                logger.exception("an observer of deliveries failed")

    async def _report(self, lane: Lane, report: Close | Retry) -> Closed:
        """Tell the store, until it knows; what it answers."""
        while True:
            try:
                if isinstance(report, Close):
                    closed = await lane.closes.submit(report)
                else:
                    closed = Closed("closed" if await lane.retries.submit(report) else "lost")
            except BackendUnavailable as error:
                if self._ended:  # a callback has outlived its worker
                    raise
                self._failed(lane, error, lane.leasing)
                await self._outage.pause(lane.leasing)
                continue
            self._outage.answered(lane.leasing)
            return closed

    def _rest(self, report: Close | Retry, closed: Closed) -> Lease:
        """The lease on what is left of a digest that is delivered in parts."""
        lease, entries = report.lease, report.lease.entries[report.taken :]
        return replace(
            lease, digest_id=closed.digest_id, attempt=1, dropped=0, size=closed.left, last_error="", entries=entries
        )

    # Leases

    async def _keep(self, lane: Lane) -> None:
        """Renew leases at a third of their length.

        A worker that neither claims nor holds anything (it rests, or its slots are taken) renews nothing, but does so
        as often: after a gap of half a lease the store would take all its workers for gone, and recover nothing.
        """
        loop = asyncio.get_running_loop()
        third = self._lease_timeout / 3
        while True:
            due = lane.renewed + third if lane.holds else lane.marked + 1.1 * third
            if (rest := due - loop.time()) > 0:
                await asyncio.sleep(min(rest, third / 3))  # what is due next may have changed by then
            else:
                await self._renew_at_last(lane)

    async def _renew_at_last(self, lane: Lane) -> None:
        while True:
            try:
                await self._renew(lane)
                return
            except Exception as error:
                self._failed(lane, error, lane.leasing)
            await self._outage.pause(lane.leasing)

    async def _renew(self, lane: Lane) -> None:
        holds = [(hold, hold.lease) for hold in lane.holds]
        sent = asyncio.get_running_loop().time()
        failures = lane.failures
        kept = await self._backend.renew(lane.shard, [lease for _, lease in holds], self._lease_ms)
        lane.renewed = lane.marked = sent
        lane.forgiven = failures
        for (hold, lease), held in zip(holds, kept, strict=True):
            if isinstance(held, AiodigestError):
                logger.error("the lease on timeline %r cannot be renewed: %s", lease.key, held)
            elif held:
                lane.extend(hold, sent)
            elif hold.lease is lease:
                lane.lose(hold)
        self._outage.answered(lane.leasing)

    # Stopping

    def _under_way(self) -> list[tuple[Lane, Hold]]:
        holds = ((lane, hold) for lane in self._lanes for hold in lane.holds)
        return [(lane, hold) for lane, hold in holds if hold.task is not None and not hold.task.done()]

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [hold.task for _, hold in self._under_way() if hold.task is not None]

    async def _drain(self) -> None:
        if not (tasks := self._tasks()):
            return
        ends = [asyncio.create_task(asyncio.wait(tasks)), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(ends, timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if tasks := self._tasks():
            await self._abandon(tasks)

    async def _abandon(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the callbacks that the drain did not see end, and give leases back without charging the attempts.

        A report under way has one timeout more. Whether it arrived is unknown after that, and so the lease decides.
        """
        left = [(lane, hold, hold.stage) for lane, hold in self._under_way()]
        for _, hold, stage in left:
            if stage != "reporting" and hold.task is not None:
                hold.task.cancel()
        _, late = await asyncio.wait(tasks, timeout=self._timeout)
        deaf = [hold for _, hold, _ in left if hold.task in late and hold.stage == "calling"]
        ignore = f", {len(deaf)} of which ignore it" if deaf else ""
        logger.warning("stopped with %d deliveries under way%s", len(tasks), ignore)
        for lane in self._lanes:
            for stage in ("calling", "claimed"):
                leases = [hold.lease for at, hold, was in left if at is lane and hold.stage == was == stage]
                await self._release(lane, leases, started=stage == "calling")
        for task in late:
            task.cancel()
        await asyncio.wait(tasks, timeout=0 if deaf else None)

    async def _release(self, lane: Lane, leases: Sequence[Lease], started: bool) -> None:
        if not leases:
            return
        try:
            await self._backend.release(lane.shard, leases, started)
        except Exception as error:
            logger.error("%d leases could not be given back, and will end: %s", len(leases), error)
