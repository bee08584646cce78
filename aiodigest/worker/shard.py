"""The worker of one shard: claim, deliver, report, and sleep until more is due. It knows a ``Backend``, never Redis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from aiodigest.backend import Claims, Close, Closed, Postpone, Retired, Retry
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, LeaseLost, printable
from aiodigest.logs import logger_of
from aiodigest.policy import milliseconds
from aiodigest.worker.availability import BACKOFF
from aiodigest.worker.batcher import Batcher
from aiodigest.worker.concurrency import Shared
from aiodigest.worker.delivery import Aside, Attempt, Call, nothing, tell
from aiodigest.worker.leases import ActiveDelivery, Leases
from aiodigest.worker.reasons import facts_of, log_doubt, log_let_go, log_losses, log_needs
from aiodigest.worker.tasks import retrieve
from aiodigest.worker.throttling import Token

logger = logger_of(__name__)

T = TypeVar("T")

CLAIM = 16  # digests of a call: while they are delivered the next are claimed, and no turn of the loop takes long
QUICK, QUICK_CLAIM = (
    0.0005,
    32,
)  # the same, where callbacks take fewer seconds than that; each call costs as much as three
BROAD_CLAIM = 100  # the same, while most of what claims bring has to wait: what is due after it is to come soon
EARLY = 0.0005  # seconds: timers of asyncio are late by up to twice that, so for the last of a wait it turns instead
GOLDEN_RATIO = 0.618  # its multiples lie far apart between whole numbers


def time_to_sleep(wait_ms: float | None, passed: float, longest: float) -> float:
    """Seconds until something is due, as a claim has told that was sent ``passed`` seconds ago; at most ``longest``.

    The store told it before its answer set out, which may have waited for a disk: so the sleep counts from the call.
    """
    return longest if wait_ms is None else min(longest, max(0.0, wait_ms / 1000 - passed))


def server_time(clock: Callable[[], float], told_ms: int, sent: float, heard: float) -> tuple[int, int]:
    """Return what the server's clock tells by now, at least and at most, in milliseconds: ``told_ms`` was the answer to
    a call that was sent and heard at these times of ``clock``."""
    now = clock()
    return told_ms + int(1000 * (now - heard)), told_ms + math.ceil(1000 * (now - sent))


class WakeUps:
    """Waits for wake-ups. ``listen`` waits for an entry of the stream after a given one, and returns the last.

    Listening goes on from one ``wait`` to the next, until ``close``.
    """

    def __init__(self, listen: Callable[[str], Awaitable[str]]) -> None:
        self._listen = listen
        self._listening: asyncio.Task[str | None] | None = None
        self._seen: str | None = None  # by the claim before the wait that is under way
        self._failures = 0  # of listening, in a row
        self.woken = asyncio.Event()  # ends the wait, or the next one

    async def wait(self, seen: str, timeout: float) -> None:
        """Wait for an entry of the stream after ``seen``, or for ``woken``, for at most ``timeout`` seconds.

        Whatever ends it sets ``woken``: to wait for one of several tasks takes longer, as something comes due.
        """
        loop = asyncio.get_running_loop()
        deadline, self._seen, before = loop.time() + timeout, seen, -math.inf

        def end() -> None:
            nonlocal timer, before
            if (now := loop.time()) >= deadline:
                self.woken.set()
            elif now > before:
                before, timer = now, loop.call_soon(end)
            else:  # the loop's time stands still while it does not wait
                timer = loop.call_at(deadline, end)

        timer = loop.call_at(deadline - EARLY, end)
        try:
            if not self.woken.is_set():
                self._listen_on()
            await self.woken.wait()
        finally:
            timer.cancel()
            self._seen = None

    def _listen_on(self) -> None:
        if self._listening is None or self._listening.done():
            self._listening = asyncio.create_task(self._next(self._seen or ""))
            self._listening.add_done_callback(self._heard)

    def _heard(self, listening: asyncio.Task[str | None]) -> None:
        """Wake who waits, unless the claim has seen the entry: what began to listen before it may hear of one."""
        if self._seen is None or listening.cancelled():
            return
        if listening.result() == self._seen:
            self._listen_on()
        else:
            self.woken.set()

    async def _next(self, seen: str) -> str | None:
        try:
            last = await self._listen(seen)
        except Exception:
            # The next claim finds out what is wrong; should it succeed all the same, this is no busy loop.
            self._failures += 1
            if self._failures > 1:
                await asyncio.sleep(BACKOFF(self._failures))
            return None
        self._failures = 0
        return last

    async def close(self) -> None:
        """Stop listening: the connection may be dead, and never tell."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
            self._listening = None


class ShardWorker:
    """Delivers the digests of one shard.

    ``run`` claims until the worker stops. From then on (``finished_claiming``) it goes on to renew and to report,
    until ``over``. If the shard is no more, it ends by itself once nothing of it is under way.
    """

    def __init__(self, shard: int, shared: Shared) -> None:
        self.shard = shard
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self.leases = Leases(shard, shared)
        self._closes = Batcher[Close, Closed](partial(shared.backend.close, shard), shared.timeout)
        self._retries = Batcher[Retry, bool](partial(shared.backend.retry, shard), shared.timeout)
        self.wakeups = WakeUps(partial(shared.backend.wait, shard))
        self._claims = f"claims of shard {shard}"  # a kind of calls, which may fail while others do not
        self._claim_failed = False  # the last one did: the next one is for a single digest
        self._brings_little = False  # most of what the last one brought had to wait
        self._lasts = 1.0  # seconds: about how long callbacks take at present, which may be time that they block
        self._has_more = False  # by its answer there is more to claim: tokens are taken for nothing less
        # of the longest sleep, how much the first one is: shards that begin together then look in one after the other
        self._first_share = 1.0 - shard * GOLDEN_RATIO % 1.0
        self._retired = False  # the shard is no more
        self.finished_claiming = asyncio.Event()
        self.over = asyncio.Event()  # from then on it reports and renews nothing
        self.has_ended = False

    async def run(self) -> None:
        """Serve the shard until ``over``, or until it is no more."""
        try:
            async with asyncio.TaskGroup() as group:
                works = self._closes.run(), self._retries.run(), self._until_retired(self.leases.keep)
                parallel = [group.create_task(work) for work in works]
                await self._until_retired(self._claim_and_sleep)
                self.finished_claiming.set()
                await self.over.wait()
                for task in parallel:
                    task.cancel()
        finally:
            self.has_ended = True
            self.leases.end()

    async def _until_retired(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Retired as end:
            if not self._retired:
                logger.info("%s", end, extra={"shard": self.shard})
            self._retired = True
            self._shared.availability.answered(self._claims)
            self._shared.availability.answered(self.leases.calls)
            self._end_if_retired()
            self.wakeups.woken.set()
            self._shared.limit.changed.set()  # it may wait for a token
            self._shared.notice_layout()  # others have its timelines, and need a worker while this one still delivers

    def _end_if_retired(self) -> None:
        if self._retired and not self.leases.active:
            self.over.set()

    # Claiming

    async def _claim_and_sleep(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while (turn := await self._next_turn()) is not None:
                self.wakeups.woken.clear()
                sent = loop.time()
                claims = await self._claim(*turn)
                self._has_more = claims is not None and claims.wait_ms == 0
                if claims is not None and claims.barred:
                    self._shared.limit.doubts.bar(self.wakeups.woken)
                if claims is None:
                    self._shared.limit.doubts.forget(self.wakeups.woken)  # others may ask instead
                    await self.wakeups.close()  # its connection may be as dead as the claim's, and never tell
                    await self._shared.availability.pause(self._claims)
                elif claims.wait_ms != 0:
                    await asyncio.sleep(0)  # what was claimed begins before this prepares to sleep
                    # until something is due, the stream tells of it, or a third of a lease has passed
                    longest, self._first_share = self._shared.lease_timeout / 3 * self._first_share, 1.0
                    timeout = time_to_sleep(claims.wait_ms, loop.time() - sent, longest)
                    await self.wakeups.wait(claims.wake_up, timeout)
        finally:
            self._shared.limit.doubts.forget(self.wakeups.woken)
            await self.wakeups.close()

    @property
    def _most(self) -> int:
        """The most digests to claim: their callbacks may all block, one after the other, and nothing is renewed
        meanwhile."""
        return QUICK_CLAIM if self._lasts < QUICK else CLAIM

    async def _next_turn(self) -> tuple[int, list[Token]] | None:
        """Wait until digests may be claimed; return how many, and the tokens for them; None if the worker stops.

        With a throttle, a claim first only looks, for 0, whether there is something to take tokens for.
        """
        limit, throttling, most = self._shared.limit, self._shared.throttling, 1 if self._claim_failed else self._most
        if throttling is None:
            count = await limit.available(most)
            return (count, []) if count else None
        if not self._has_more:
            return None if self._shared.stopping.is_set() or self._retired else (0, [])
        tokens = await limit.permitted(most, throttling, lambda: self._retired)
        return (len(tokens), tokens) if tokens else None

    async def _claim(self, count: int, tokens: list[Token]) -> Claims | None:
        """Claim up to ``count`` digests, and begin to deliver them; None if the call failed."""
        try:
            return await self._claim_for(count, tokens)
        finally:
            if self._shared.throttling is not None:
                self._shared.throttling.give_back(tokens)  # those that are left

    async def _claim_for(self, count: int, tokens: list[Token]) -> Claims | None:
        """Do so, and take what is used from the ``tokens``."""
        shared, loop = self._shared, asyncio.get_running_loop()
        sent, failures, sample = loop.time(), self.leases.failures, shared.limit.draws
        wanted = BROAD_CLAIM if self._brings_little and count else count
        with shared.limit.doubts.asking(not self._claim_failed) as doubtful:
            try:
                with shared.limit.reserve(self.shard, count):
                    if self.leases.must_look():  # else it might recover what this worker holds
                        await self.leases.renew()
                        return Claims(wait_ms=0)  # much may have happened meanwhile: count anew
                    lease_ms = milliseconds(shared.lease_timeout)
                    flags = {"sample": sample, "doubtful": doubtful}
                    bound = shared.dispatcher.bounds.digest
                    claims = await shared.backend.claim(
                        self.shard, wanted, lease_ms, shared.limits, bound=bound, **flags
                    )
            except Retired:
                raise
            except Exception as error:
                self.leases.failed(error, self._claims)
                self._claim_failed = True
                return None
            shared.availability.answered(self._claims)
            self.leases.heard(sent, failures)
            self._claim_failed = False
            shared.notice_layout()
            log_losses(claims)
            log_needs(claims)
            if claims.let_go:
                log_let_go(self.shard, claims.let_go)
            now = loop.time()
            clock = partial(server_time, loop.time, claims.server_ms, sent, now)
            chosen, postponed = shared.limit.sort(claims.leases, count, now)
            self._brings_little = 2 * sum(each.delay_ms > 0 for each in postponed) > len(claims.leases)
            for lease, destination in chosen:
                if lease.lost:
                    log_doubt(lease)
                    self.leases.superseded(lease.key)
                due = now - (claims.now_ms - lease.due_ms) / 1000
                active = ActiveDelivery(lease, due, destination, self.leases, Call(clock))
                if shared.throttling is not None:
                    active.token = tokens.pop() if tokens else None
                    active.call.permit = partial(self._permit, active)
                shared.limit.doubts.claimed(active)
                active.on_done = partial(self._on_done, active)
                self.leases.active[active] = None
                active.task = loop.create_task(self._deliver(active), name=lease.digest_id)
                if not active.has_begun:  # which it has, if the loop begins tasks at once
                    active.task.add_done_callback(active.on_done)
                self.leases.extend(active, sent)
        if postponed:
            await self._postpone(postponed, sent + shared.lease_timeout)
            shared.limit.postponed(loop.time() - sent, len(claims.leases))
        return claims

    async def _postpone(self, postponed: Sequence[Postpone], ends: float) -> None:
        """Let digests wait that were claimed and may not run now; if that alone fails, they do until their leases end.

        While the server is away, their tokens outlast the leases, and each that is not told of would count as lost.
        """
        shared, clock = self._shared, asyncio.get_running_loop().time
        while True:
            try:
                answers = await shared.backend.postpone(self.shard, postponed, shared.limits)
            except Retired:
                raise
            except Exception as error:
                is_away = self.leases.is_cut_off  # no renewal has been answered since the last try
                self.leases.failed(error, self._claims)
                if shared.stopping.is_set() or (clock() >= ends and not is_away):
                    return
                await shared.availability.pause(self._claims)
            else:
                break
        shared.availability.answered(self._claims)
        for (lease, _), answer in zip(postponed, answers, strict=True):
            if isinstance(answer, AiodigestError):
                told, facts = printable(str(answer)), facts_of(lease, answer)
                logger.error("timeline %r: %s; its lease will end", lease.key, told, extra=facts)

    # Delivering

    async def _deliver(self, active: ActiveDelivery) -> None:
        """Deliver a digest in all its parts, and end only this delivery if something fails."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        active.has_begun = True
        task.remove_done_callback(active.on_done)  # a call at its end would take a turn of the loop, and 2 us
        del active.on_done  # which holds it in turn: else all of it would wait for the garbage collector
        try:
            stopping, doubts = self._shared.stopping, self._shared.limit.doubts
            try:
                # the next part, too, needs the lease
                while not (stopping.is_set() or active.call.cancelled or doubts.must_go(active)):
                    if active.token is not None and not doubts.may_run(active):
                        self._give_back(active)  # its turn may come when the token has long lapsed
                    if not doubts.admits(active):
                        await doubts.begin(active, stopping)
                    try:
                        if not (stopping.is_set() or await self._deliver_part(active, task)):
                            return
                    finally:
                        doubts.left(active)
            except Aside as aside:
                return await self._postpone([Postpone(active.lease, aside.aside_ms)], active.ends)
            await self._shared.backend.release(self.shard, [active.lease], started=False)
        except LeaseLost as error:
            logger.warning("%s", printable(str(error)), extra=facts_of(active.lease))
        except AiodigestError as error:
            facts = facts_of(active.lease, error)
            told = printable(str(error))
            logger.error("timeline %r: %s; its lease will end", active.lease.key, told, extra=facts)
        except asyncio.CancelledError:
            if not (active.call.cancelled or self.has_ended):
                line = "the delivery of %r was cancelled, and not by its worker; its lease will end"
                logger.warning(line, active.lease.key, extra=facts_of(active.lease))
            raise
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            task.add_done_callback(retrieve)  # it ends the loop, and is seen there
            raise
        except BaseException:
            line = "a fault of aiodigest while delivering %r; its lease will end"
            logger.exception(line, active.lease.key, extra=facts_of(active.lease))
        finally:
            self._ended(active)

    async def _deliver_part(self, active: ActiveDelivery, task: asyncio.Task[Any]) -> bool:
        """Deliver a digest, or its next part; True if there is more to do under this lease."""
        shared, clock = self._shared, self._loop.time
        dispatcher, standstill = shared.dispatcher, shared.standstill
        has_waited = False
        if not shared.limit.gate.admits():
            has_waited = True
            await shared.limit.gate.wait()
        try:
            attempt = (None if has_waited else dispatcher.at_hand(active.lease)) or await self._prepare(active)
            if attempt is None:
                return True
            lease, started = attempt.lease, clock()
            self._look(active, started)
            active.stage = "calling"
            standstill.entered(active, lease.key, started)
            try:
                outcome = await dispatcher.deliver(attempt, active.call, task)
            finally:
                standstill.left(active, ended := clock())
            active.stage = "reporting"
            del attempt
            shared.limit.room.give_back(active)  # a server that is away keeps nobody waiting
            shared.limit.changed.set()
            self._lasts += (ended - started - self._lasts) / 16
            active.destination.learn(lease.key, outcome.success, started, ended, outcome.pause)
            if outcome.pause and shared.throttling is not None:
                shared.throttling.pause(active.destination.name, ended + outcome.pause)
        finally:
            shared.limit.gate.leave()
        closed = outcome.answered(await self._report(outcome.report, active))
        if closed.let_go:
            log_let_go(self.shard, closed.let_go)
        if shared.observers:
            tell(shared.observers, outcome.delivery(closed, max(0.0, started - active.due), ended - started))
        if closed.status == "lost":
            raise LeaseLost(f"digest {lease.digest_id} of {lease.key!r} ended, or is another worker's")
        if closed.status != "part":
            return False
        active.lease, active.stage = outcome.rest(closed), "claimed"
        self.leases.extend(active, max(ended, active.ends - self._shared.lease_timeout))  # the store has renewed it too
        return True

    async def _prepare(self, active: ActiveDelivery) -> Attempt[Any] | None:
        """Read a digest, or its next part, of which all may not be here; None if it may not run any more."""
        shared, dispatcher = self._shared, self._shared.dispatcher
        lease, entries = active.lease, shared.limit.room.at_hand(active, dispatcher.most_of)
        if entries is None:
            page = partial(self._read, active)
            lease, entries = await shared.limit.room.read(active, page, dispatcher.size_of, dispatcher.most_of)
        if not shared.limit.doubts.may_run(active):  # while its server was away, nobody waited for it
            return None
        active.stage = "decoding"
        attempt = await dispatcher.prepare(lease, entries)
        if attempt.entries:  # they are read later
            active.call.look = lambda: self._look(active, self._loop.time())
        return attempt

    async def _report(self, report: Close | Retry, active: ActiveDelivery) -> Closed | bool:
        """Report an outcome to the store, until it answers."""
        try:
            return await self._asked(report)
        except AiodigestError as error:
            return await self._until_answered(partial(self._asked, report), active, error)

    def _asked(self, report: Close | Retry) -> Awaitable[Closed | bool]:
        return self._closes.asked(report) if isinstance(report, Close) else self._retries.asked(report)

    async def _permit(self, active: ActiveDelivery) -> None:
        """Use a token for the callback that is to begin; Aside if there is none: it is claimed again, as it is due.

        The next part of a digest does not wait for one, since others may have been due before.
        """
        limit, throttling, stopping = self._shared.limit, self._shared.throttling, self._shared.stopping
        token, active.token = active.token, None
        active.stage = "claimed"  # the callback has done nothing yet

        def leaves() -> bool:
            return stopping.is_set() or limit.doubts.must_go(active)

        if throttling is not None and not await limit.use_token(throttling, token, active.is_first, leaves):
            raise Aside(0)
        active.is_first, active.stage = False, "calling"

    def _give_back(self, active: ActiveDelivery) -> None:
        """Give back the token of a delivery, if it has one."""
        if active.token is not None and self._shared.throttling is not None:
            self._shared.throttling.give_back([active.token])
            active.token = None

    def _look(self, active: ActiveDelivery, now: float) -> None:
        """Raise Aside or LeaseLost if a callback is not to be begun any more."""
        if self._shared.stopping.is_set():
            raise Aside(0)
        if now >= active.ends:  # this process was stopped while others ran
            raise LeaseLost(f"the lease on timeline {active.lease.key!r} ended before its delivery began")

    async def _read(self, active: ActiveDelivery, start: int, count: int) -> list[bytes]:
        """Read a page of the entries that did not fit into a claim."""
        page = partial(self._shared.backend.read, self.shard, active.lease, start, count)
        return await self._until_answered(page, active)

    def _on_done(self, active: ActiveDelivery, task: asyncio.Task[None]) -> None:
        """End a delivery whose task was cancelled before it ran."""
        self._ended(active)

    def _ended(self, active: ActiveDelivery) -> None:
        """Make room for another delivery."""
        if self._loop.is_closed():  # its task is dropped
            return
        del self.leases.active[active]
        active.call.permit, active.call.look = None, nothing  # which hold it, as `on_done` did
        if active.token is not None:
            self._give_back(active)
        is_known, now = active.stage == "reporting", self._loop.time()  # else nothing was learnt of the receiver
        self._shared.limit.room.give_back(active)
        self._shared.limit.ended(active.destination, active.lease.key, now, learnt=is_known)
        self._shared.limit.doubts.ended(active)
        self._end_if_retired()

    async def _until_answered(
        self, call: Callable[[], Awaitable[T]], active: ActiveDelivery, error: AiodigestError | None = None
    ) -> T:
        """Call the store for a delivery until it answers, if only with an error of the timeline's; ``error`` is what
        the first try has ended with.

        A server that refuses access may allow it again, as after a change of passwords; one that answers what nobody
        foresaw has until the lease ends to think better of it.
        """
        try:
            while True:
                try:
                    if error is not None:
                        raise error
                    return await call()
                except AiodigestError as failed:
                    error = failed
                    unforeseen = type(error) is AiodigestError and asyncio.get_running_loop().time() < active.ends
                    if not (unforeseen or isinstance(error, (BackendUnavailable, ConfigurationError))):
                        raise
                    if self.has_ended:  # a callback has outlived its worker
                        raise
                    self.leases.report_failed(error, active)
                    await self._shared.availability.pause(self.leases.reports)
                error = None
        finally:
            error = None  # it holds this frame
            self.leases.report_ended(active)
