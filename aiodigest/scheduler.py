"""The loop of a shard: sleep, claim, dispatch, renew, close. It knows a ``Backend``, and never Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

from aiodigest.backend import Backend, Claims, Close, Closed, Lease, Retired, Retry, ShardMap
from aiodigest.backoff import BackoffMode
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, LeaseLost
from aiodigest.models import Delivery
from aiodigest.policy import Limits, milliseconds
from aiodigest.worker.availability import BACKOFF, Outage, elapse, retrieve
from aiodigest.worker.concurrency import Slots
from aiodigest.worker.delivery import Attempt, Dispatcher, Outcome
from aiodigest.worker.logs import facts_of
from aiodigest.worker.shard import Hold, Lane, is_served, warn_of_missing
from aiodigest.worker.shutdown import Drain

logger = logging.getLogger(__name__)

T = TypeVar("T")

FEW = 5  # timelines of a claim named in the log, if something is wrong with many

Observer: TypeAlias = Callable[[Delivery], None]


def tell(observers: Iterable[Observer], delivery: Delivery) -> None:
    """Tell all observers of an attempt, whatever they raise."""
    for observer in observers:
        try:
            observer(delivery)
        except Exception:
            logger.exception("an observer of deliveries failed", extra=facts_of(delivery))


def tell_of_losses(claims: Claims) -> None:
    """Log the problems a claim found: a few timelines by name, and the number of others."""
    for key, reason in claims.broken[:FEW]:
        facts = {"timeline": key, "reason": reason}
        logger.error("timeline %r cannot be read and is set aside for a lease: %s", key, reason, extra=facts)
    if more := claims.broken[FEW:]:
        facts = {"reason": more[0][1]}
        logger.error("%d more timelines cannot be read and are set aside for a lease", len(more), extra=facts)
    if empty := [key for key, count in claims.expired if not count]:  # evicted, or written by another program
        line = "%d timelines were due and hold no records, such as %r: the server or a program may have taken them"
        logger.warning(line, len(empty), empty[0], extra={"timeline": empty[0]})
    lost = [(key, count) for key, count in claims.expired if count]
    for key, count in lost[:FEW]:
        facts = {"timeline": key, "records": count}
        logger.error("timeline %r outlived its ttl: %d records are lost", key, count, extra=facts)
    if more := lost[FEW:]:
        records = sum(count for _, count in more)
        line = "%d more timelines outlived their ttl: %d records are lost"
        logger.error(line, len(more), records, extra={"records": records})


class Scheduler:
    """Delivers the digests of all shards, at most ``concurrency`` at a time, until it is stopped.

    Durations are in seconds. ``run`` ends after ``stop``: claims end at once, and deliveries have ``drain_timeout`` to
    end, while their leases are still renewed. Deliveries still under way then are cancelled and released.
    """

    def __init__(
        self,
        backend: Backend,
        dispatcher: Dispatcher[Any],
        limits: Limits,
        outage: Outage,
        *,
        backoff_mode: BackoffMode,
        concurrency: int,
        lease_timeout: float,
        drain_timeout: float,
        timeout: float,
        observers: Iterable[Observer] = (),
        numbers: Container[int] | None = None,
    ) -> None:
        self._backend = backend
        self._dispatcher = dispatcher
        self._limits = limits
        self._lease_timeout = lease_timeout
        self._lease_ms = milliseconds(lease_timeout)
        self._timeout = timeout
        self._observers = observers
        self._outage = outage
        self._numbers = numbers
        self._lanes: dict[int, Lane] = {}  # by shard
        self._served: ShardMap | None = None  # whose shards it serves
        self._group = asyncio.TaskGroup()
        self._loops: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._slots = Slots(self._lanes, concurrency, backoff_mode, self._stopping)
        self._drain = Drain(self._lanes, backend, drain_timeout, timeout)
        self._idle = False  # there is no shard to serve, and it has been said
        self._ended = False

    def stop(self, at_once: bool = False) -> None:
        """Stop claiming, and let ``run`` end; ``at_once``: without waiting for deliveries under way."""
        self._stopping.set()
        self._slots.changed.set()
        if at_once:
            self._drain.hurry.set()
        for lane in self._lanes.values():
            lane.woken.set()

    def poke(self, shard: int) -> None:
        """Look at a shard's schedule now: this process has made a timeline ready."""
        self._serve()
        if shard in self._lanes:
            self._lanes[shard].woken.set()

    @property
    def delivering(self) -> int:
        """The number of deliveries under way."""
        return sum(len(lane.holds) for lane in list(self._lanes.values()))  # metrics are collected in a thread

    @property
    def backoff_level(self) -> int:
        return self._slots.backoff.level

    @property
    def is_cut_off(self) -> bool:
        """True if the latest calls of some kind failed."""
        return self._outage.lasts

    async def run(self) -> None:
        """Deliver until stopped."""
        try:
            async with self._group:
                self._serve()
                while (loops := self._running()) or not self._stopping.is_set():
                    if loops:
                        await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
                    else:
                        await self._look_for_shards()
                await self._drain.run()
                for lane in self._lanes.values():
                    lane.end()
        finally:
            self._ended = True
            for lane in self._lanes.values():
                lane.alarm.cancel()
            for task in self._drain.tasks():  # left only after a fault, or by a callback that ignores cancellation
                task.cancel()

    def _running(self) -> list[asyncio.Task[None]]:
        return [loop for loop in self._loops if not loop.done()]

    async def _look_for_shards(self) -> None:
        """Learn of a change of the layout while there is no shard to serve, whose loop would notice."""
        if not self._idle:
            shards = {"shards": self._backend.shard_map.adding}
            there = f"the namespace has {self._backend.shard_map.adding}, which count from 0"
            logger.error("none of the chosen shards is there: %s. Nothing is delivered", there, extra=shards)
        self._idle = True
        await elapse(self._stopping, self._lease_timeout / 3)
        if not self._stopping.is_set():
            try:
                await self._backend.connect()
            except Exception as error:
                self._outage.failed(error)
            else:
                self._outage.answered()
            self._serve()

    def _serve(self) -> None:
        """Start serving the shards that exist by now: at first, and after a change of the layout."""
        if self._stopping.is_set() or self._ended or self._served is self._backend.shard_map:
            return
        self._served = self._backend.shard_map
        for shard in range(self._backend.shard_map.count):
            if shard not in self._lanes and is_served(shard, self._numbers, self._backend):
                self._begin(shard)
        warn_of_missing(self._numbers, self._backend)

    def _begin(self, shard: int) -> None:
        lane = self._lanes[shard] = Lane(
            shard, self._backend, self._outage, self._serve, self._slots.changed, self._timeout, self._lease_timeout
        )
        lane.chores = [self._group.create_task(chore) for chore in (lane.closes.run(), lane.retries.run(), lane.keep())]
        self._idle = False
        self._loops = [*self._running(), self._group.create_task(self._loop(lane))]

    def _end(self, lane: Lane) -> None:
        """Let go of a shard that is gone, once nothing of it is under way."""
        if lane.retired and not lane.holds and self._lanes.get(lane.shard) is lane:
            lane.end()
            del self._lanes[lane.shard]

    # Claiming

    async def _loop(self, lane: Lane) -> None:
        try:
            while slots := await self._slots.free(lane):
                lane.woken.clear()
                claims = await self._claim(lane, slots)
                if claims is None:
                    await self._hang_up(lane)  # its connection may be as dead as the claim's, and never tell
                    await self._outage.pause(lane.claiming)
                elif claims.wait_ms != 0:
                    await self._sleep(lane, claims)
        except Retired as end:
            lane.retire(end)
            self._end(lane)
            self._serve()  # others have its timelines
        finally:
            await self._hang_up(lane)

    async def _claim(self, lane: Lane, slots: int) -> Claims | None:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        try:
            with self._slots.promise(lane, slots):
                if lane.holds and lane.away:  # else this claim might recover what this worker holds
                    await lane.renew()
                    return Claims(wait_ms=0)  # much may have happened meanwhile: count the free slots anew
                claims = await self._backend.claim(lane.shard, slots, self._lease_ms, self._limits)
        except Retired:
            raise
        except Exception as error:
            lane.failed(error, lane.claiming)
            lane.failing = True
            return None
        self._outage.answered(lane.claiming)
        lane.marked, lane.failing = sent, False
        self._serve()
        tell_of_losses(claims)
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
        longest, lane.share = self._lease_timeout / 3 * lane.share, 1.0
        timeout = longest if claims.wait_ms is None else min(longest, claims.wait_ms / 1000)
        deadline = asyncio.get_running_loop().time() + timeout
        waker = asyncio.create_task(lane.woken.wait())
        try:
            while not waker.done() and (rest := deadline - asyncio.get_running_loop().time()) > 0:
                if lane.listener is None or lane.listener.done():
                    lane.listener = asyncio.create_task(self._listen(lane, claims.wake_up))
                await asyncio.wait([waker, lane.listener], timeout=rest, return_when=asyncio.FIRST_COMPLETED)
                # A listener that was armed before the claim may hear of a ring that the claim has seen.
                if lane.listener.done() and lane.listener.result() != claims.wake_up:
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

    async def _hang_up(self, lane: Lane) -> None:
        if lane.listener is not None:
            lane.listener.cancel()
            await asyncio.wait([lane.listener])
            lane.listener = None

    # Delivering

    async def _deliver(self, lane: Lane, hold: Hold) -> None:
        try:
            while not (self._stopping.is_set() or hold.call.cut):  # the next part, too, needs the lease
                async with self._slots.gate:
                    attempt = await self._dispatcher.prepare(hold.lease, await self._entries(lane, hold.lease))
                    if self._stopping.is_set():
                        break
                    if asyncio.get_running_loop().time() >= hold.ends:  # this process was stopped while others ran
                        raise LeaseLost(f"the lease on timeline {hold.lease.key!r} ended before its delivery began")
                    outcome, delivery = await self._call(lane, hold, attempt)
                sent = asyncio.get_running_loop().time()
                closed = await self._report(lane, outcome.report)
                if closed.status in ("lost", "deleted"):
                    delivery = replace(delivery, result=closed.status)
                tell(self._observers, delivery)
                if closed.status == "lost":
                    raise LeaseLost(f"digest {delivery.digest_id} of {delivery.key!r} ended, or is another worker's")
                if closed.status != "part":
                    return
                hold.lease, hold.stage = outcome.rest(closed), "claimed"
                lane.extend(hold, max(sent, hold.ends - self._lease_timeout))  # the store has renewed it too
            await self._backend.release(lane.shard, [hold.lease], started=False)
        except LeaseLost as error:
            logger.warning("%s", error, extra=facts_of(hold.lease))
        except AiodigestError as error:
            facts = facts_of(hold.lease, error)
            logger.error("timeline %r: %s; its lease will end", hold.lease.key, error, extra=facts)
        except asyncio.CancelledError:
            if not (hold.call.cut or self._ended):
                line = "the delivery of %r was cancelled, and not by its worker; its lease will end"
                logger.warning(line, hold.lease.key, extra=facts_of(hold.lease))
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException:
            line = "a fault of aiodigest while delivering %r; its lease will end"
            logger.exception(line, hold.lease.key, extra=facts_of(hold.lease))

    def _let_go(self, lane: Lane, hold: Hold, task: asyncio.Task[None]) -> None:
        """Free the slot of a delivery, even if its task was cancelled before it ran."""
        retrieve(task)  # a KeyboardInterrupt ends the loop, and is seen there
        del lane.holds[hold]
        self._end(lane)
        self._slots.changed.set()

    async def _entries(self, lane: Lane, lease: Lease) -> Sequence[bytes]:
        """Return the entries of the digest, or of its next part; entries that did not fit into the claim are paged."""
        taken = min(lease.part or lease.size, lease.size)
        entries = list(lease.entries[:taken])
        while len(entries) < taken:
            page = await self._insist(
                lane, partial(self._backend.read, lane.shard, lease, len(entries), taken - len(entries))
            )
            if not page:
                raise LeaseLost(f"the entries of timeline {lease.key!r} went away under delivery")
            entries += page
        return entries

    async def _call(self, lane: Lane, hold: Hold, attempt: Attempt[Any]) -> tuple[Outcome, Delivery]:
        loop = asyncio.get_running_loop()
        lease, started = hold.lease, loop.time()
        hold.stage = "calling"
        outcome = await self._dispatcher.deliver(attempt, hold.call)
        hold.stage = "reporting"
        if lane.away:
            self._slots.changed.set()
        ended = loop.time()
        if outcome.success is True:
            self._slots.backoff.succeeded(lease.key, ended, started=started)
        elif outcome.success is False:
            self._slots.backoff.failed(lease.key, ended, started=started)
        if outcome.pause:
            self._slots.paused_until = max(self._slots.paused_until, ended + outcome.pause)
        late, took = max(0.0, started - hold.due), ended - started
        facts = (lease.key, lease.digest_id, lease.attempt, outcome.result, outcome.records, late, took)
        return outcome, Delivery(*facts)

    async def _report(self, lane: Lane, report: Close | Retry) -> Closed:
        """Report to the store until it knows; return its answer."""
        if isinstance(report, Close):
            return await self._insist(lane, partial(lane.closes.submit, report))
        return Closed("closed" if await self._insist(lane, partial(lane.retries.submit, report)) else "lost")

    async def _insist(self, lane: Lane, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store for a delivery until it answers, if only with an error of the timeline's.

        A server that refuses access may allow it again, as after a change of passwords.
        """
        while True:
            try:
                answer = await call()
            except (BackendUnavailable, ConfigurationError) as error:
                if self._ended:  # a callback has outlived its worker
                    raise
                lane.failed(error, lane.leasing)
                await self._outage.pause(lane.leasing)
            except AiodigestError:
                self._outage.answered(lane.leasing)
                raise
            else:
                self._outage.answered(lane.leasing)
                return answer
