"""A single attempt to deliver a digest: its records, its callback, and its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import isawaitable
from math import inf
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from aiodigest.arguments import duration
from aiodigest.backend import Close, Closed, Lease, NewDeadLetter, Retry
from aiodigest.codecs import Codec, most_of, reader_of, sizes_of
from aiodigest.errors import (
    ChannelError,
    DeliverySignal,
    InvalidArgument,
    OutcomeUnknown,
    PartialFailure,
    Reject,
    RetryAfter,
    one_line,
    shown,
    text_of,
)
from aiodigest.logs import logger_of
from aiodigest.models import Delivery, Digest, Result
from aiodigest.policy import Policy, RetryPolicy, milliseconds
from aiodigest.records.entries import aged, identity, identity_of, latest, value_in
from aiodigest.records.validation import DEFAULT, Bounds, nearest, never_ran
from aiodigest.timing.explain import span
from aiodigest.timing.formula import next_due, share_of
from aiodigest.worker.contents import SMALL, Contents, read, read_at_once
from aiodigest.worker.reasons import TimedOut, describe, facts_of, log_dropped, log_other_limits, times
from aiodigest.worker.tasks import TimeLimit

if TYPE_CHECKING:
    from aiodigest.timing.hours import Hours

logger = logger_of(__name__)

T = TypeVar("T")
End = TypeVar("End")

SHORTEST_DELAY = 1.0  # of a RetryAfter, which charges no attempt and so nothing else would slow down
FALLBACK_DELAY_MS = 60_000  # when a retry strategy itself fails
_nearest = lru_cache(16)(nearest)  # many digests of a busy worker are due next at the same time

Callback: TypeAlias = Callable[[Digest[T]], Awaitable[object]]
Observer: TypeAlias = Callable[[Delivery], None]


def tell(observers: Iterable[Observer], delivery: Delivery) -> None:
    """Tell all observers of an attempt, whatever they raise."""
    for observer in observers:
        try:
            observer(delivery)
        except Exception:
            logger.exception("an observer of deliveries failed", extra=facts_of(delivery))


class TracedAttempt(Protocol):
    """Span of one attempt to deliver. None of its methods raises."""

    def ended(self, result: Result, reason: str = "", error: BaseException | None = None) -> None:
        """Record the outcome that observers get, the callback's ``error``, and ``reason``, the text kept of it.

        An attempt that was cut short has no outcome.
        """

    def left(self) -> None:
        """Note that the callback has ended."""


class Tracing(Protocol):
    """Spans of an engine; see ``aiodigest.integrations.opentelemetry``."""

    def context(self) -> bytes:
        """Return the current span in ``entries.CONTEXT_SIZE`` bytes, for a record to carry; b"" if there is none."""
        ...

    def delivering(self, digest: Digest[Any], contexts: Sequence[bytes]) -> TracedAttempt:
        """Begin a span for an attempt to deliver, linked to the spans of the adds. It is current until left."""
        ...


class Outcome(NamedTuple):
    """The end of an attempt.

    ``report`` is for the store; ``records`` counts those delivered. ``success`` is its verdict on the receiver, if any;
    ``pause`` is the time, in seconds, in which to claim nothing.
    """

    report: Close | Retry
    result: Result
    records: int = 0
    success: bool | None = None
    pause: float = 0.0
    error: BaseException | None = None  # what the callback or the policy raised

    @property
    def reason(self) -> str:
        """The reason that records were not delivered; '' if all were."""
        if isinstance(self.report, Retry):
            return self.report.error
        return self.report.dead_letters[0].reason if self.report.dead_letters else ""

    def delivery(self, closed: Closed, late: float, took: float) -> Delivery:
        """Return the attempt as observers are told of it, once the store has answered; times are in seconds."""
        lease, result = self.report.lease, closed.status if closed.status in ("lost", "deleted") else self.result
        return Delivery(
            lease.key, lease.digest_id, lease.attempt, result, self.records, late, took, self.reason, self.error
        )

    def answered(self, answer: Closed | bool) -> Closed:
        """Return the answer to the report, once it has come."""
        closed = answer if isinstance(answer, Closed) else Closed("closed" if answer else "lost")
        is_dropped = self.report.lease.dropped and closed.status in ("closed", "part")
        if is_dropped and (isinstance(self.report, Close) or self.report.failed is not None):
            log_dropped(self.report.lease)
        return closed

    def rest(self, closed: Closed) -> Lease:
        """Return the lease on the rest of a digest that is delivered in parts."""
        lease, entries = self.report.lease, self.report.lease.entries[self.report.taken :]
        fresh = replace(lease, attempt=1, dropped=0, last_error="", lost=0)
        return replace(fresh, digest_id=closed.digest_id, size=closed.left, entries=entries)


class Aside(Exception):
    """A digest may not run now: it is put aside for some time, or ready again at once (0), uncharged."""

    def __init__(self, aside_ms: int) -> None:
        super().__init__(aside_ms)
        self.aside_ms = aside_ms


def closed_ms(hours: Hours, earliest: int, latest: int, key: str) -> int:
    """Return how long it is until a timeline's digests may go out, as the server's time is between these two; 0 if they
    may now, whichever it is."""
    opening = hours.within(earliest, share_of(key))
    if opening == earliest:
        close = hours.windows(earliest, earliest, 0)[0][1]
        opening = hours.within(close, share_of(key)) if latest >= close else earliest
    return opening - earliest


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Call:
    """State of a callback, shared by its worker and its dispatcher."""

    clock: Callable[[], tuple[int, int]]  # of the server, ms: what it tells at least, and at most
    deadline: float = inf  # by the loop's clock: when what the user wrote is cancelled, and should end
    cancelled: bool = False  # by its worker, so that it reports nothing
    permit: Callable[[], Awaitable[None]] | None = None  # awaited last before the callback begins; may raise Aside
    look: Callable[[], None] = nothing  # raises what keeps its callback from being begun by now


@dataclass(slots=True)
class Attempt(Generic[T]):
    """A lease, the contents of its digest (or of its next part), and the policy that governs its delivery."""

    lease: Lease
    entries: Sequence[bytes] = field(repr=False)  # until they are read
    taken: int
    contents: Contents[T] = field(init=False, repr=False)
    policy: Policy = Policy()
    retry: RetryPolicy = RetryPolicy()
    cool_ms: int = 0
    aside_ms: int = 0  # for how long it is to wait, as its hours are closed
    next_ms: int = 0  # when a record is due that comes now
    is_spent: bool = False  # no attempt is left, and there is something to give up

    @property
    def digest(self) -> Digest[T]:
        lease = self.lease
        records = tuple(self.contents.records)
        due = _nearest(self.next_ms)
        return Digest(lease.key, records, lease.digest_id, lease.attempt, lease.dropped, lease.iteration, due)


def _counted(records: Sized) -> str:
    return f"{len(records)} record{'s' * (len(records) != 1)}"


def _signal_in(error: Exception) -> Exception | None:
    """Return the signal that a callback's task group raised, if one is meant: the gravest, or several as one."""
    errors = [*_leaves(error)]
    rejections = [error for error in errors if isinstance(error, Reject)]
    if rejections:
        reason = "; ".join(dict.fromkeys(text_of(error.reason) for error in rejections))
        return Reject(reason, mute=any(error.mute for error in rejections))
    unknown = [text_of(error.reason) for error in errors if isinstance(error, OutcomeUnknown)]
    if unknown:
        return OutcomeUnknown("; ".join(dict.fromkeys(unknown)))
    delays = [error for error in errors if isinstance(error, RetryAfter)]
    with suppress(InvalidArgument):
        if delays:
            longest = max(delays, key=lambda error: duration(error.delay, "the delay of RetryAfter"))
            return RetryAfter(longest.delay, pause=any(error.pause for error in delays))
    partial = [error for error in errors if isinstance(error, PartialFailure)]
    if partial and len(partial) == len(errors):  # else "the others were delivered" is doubtful
        return PartialFailure({name: why for error in partial for name, why in error.failed.items()})
    return None


def _leaves(error: Exception) -> Iterator[Exception]:
    if isinstance(error, ExceptionGroup):
        for each in cast("ExceptionGroup[Exception]", error).exceptions:
            yield from _leaves(each)
    else:
        yield error


def _seen(attempt: Attempt[Any], lost: Iterable[bytes]) -> list[bytes] | None:
    """Return the identities of the records that were delivered, those of ``attempt`` but the ``lost``; None where the
    store finds them by itself, which knows nothing of values that a later part replaces."""
    if not attempt.contents.replaced:
        return None
    undelivered = {*lost}
    delivered = (identity_of(record.id.encode()) for record in attempt.contents.records)
    return [name for name in delivered if name not in undelivered]


def _why_spent(lease: Lease) -> str:
    """Return why no attempt is left for a digest."""
    if not lease.lost:  # fewer are allowed than were
        return lease.last_error or "no attempt is left"
    reason = f"its worker died or lost the server {times(lease.lost)} in a row before it reported"
    return one_line(f"{reason}; before that: {lease.last_error}" if lease.last_error else reason)


async def _uncancel(task: asyncio.Task[Any]) -> None:
    """Take back the cancellations that a callback caused itself and left behind, including one still to arrive."""
    while task.cancelling():
        task.uncancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


@dataclass(eq=False)
class Dispatcher(Generic[T]):
    """Hands digests to a callback and reports the outcome."""

    callback: Callback[T]
    codec: Codec[T]
    policy: Callable[..., Awaitable[Policy]]
    retry: RetryPolicy | Callable[..., Awaitable[RetryPolicy]]
    lease_timeout: float
    delivery_timeout: float
    tracing: Tracing | None = None
    bounds: Bounds = DEFAULT
    fixed: Policy | None = None  # that of all timelines, which then is not awaited

    def __post_init__(self) -> None:
        self._lease_ms = milliseconds(self.lease_timeout)
        self._size_of = sizes_of(self.codec)
        self.most_of = most_of(self.codec)
        self._load = reader_of(self.codec)
        self._told_limits = False
        self._reading = asyncio.Lock()
        self._limit = TimeLimit()
        self._last_kind: object = None  # of failure: of several in a row the first one's traceback is logged

    def size_of(self, entry: bytes) -> int:
        """Return how many bytes the value of an entry decodes to."""
        return self._size_of(value_in(entry))

    def at_hand(self, lease: Lease) -> Attempt[T] | None:
        """Read a digest at once, which is small and has come whole, and in which nothing is unusual; None of another,
        which ``prepare`` reads."""
        entries, retry = lease.entries, self.retry
        if self._load is None or lease.cut_ms or lease.later or lease.lost or not isinstance(retry, RetryPolicy):
            return None
        if not len(entries) == lease.size == lease.taken <= SMALL[0] or lease.attempt > retry.max_attempts:
            return None
        if sum(map(len, entries)) > min(SMALL[1], lease.bound or inf):
            return None
        contents = read_at_once(entries, self._load)
        if contents is None:
            return None
        attempt: Attempt[T] = Attempt(lease, (), lease.size)
        attempt.contents, attempt.retry = contents, retry
        return attempt

    async def prepare(self, lease: Lease, entries: Sequence[bytes]) -> Attempt[T]:
        """Read the digest that ``entries`` hold, if it is known how often it may be tried; else ``deliver`` does."""
        attempt: Attempt[T] = Attempt(lease, entries, len(entries))
        if isinstance(self.retry, RetryPolicy):
            attempt.retry = self.retry
            await self._read(attempt)
        return attempt

    async def _read(self, attempt: Attempt[T], *, gives_up: bool = False) -> None:
        """Read a digest; large ones are read one at a time.

        If no attempt is left, or it fails without one, its entries are only asked for their ids and their age: to
        decode them may be what ends the process.
        """
        lease, entries, attempt.entries = attempt.lease, attempt.entries, ()
        if gives_up or lease.attempt > attempt.retry.max_attempts:
            known = {identity(entry): entry for entry in latest(entries)}
            replaced = sum(known.pop(name, None) is not None for name in lease.later)
            last = {name: "" for name, entry in known.items() if not aged(entry, lease.cut_ms)}
            attempt.contents = Contents(undecodable=last, aged=len(known) - len(last), replaced=replaced)
            attempt.is_spent = bool(last)
            return
        if len(entries) <= SMALL[0] and sum(map(len, entries)) <= SMALL[1]:
            attempt.contents = await read(entries, self.codec.decode, lease.cut_ms, lease.later)
            return
        async with self._reading:
            attempt.contents = await read(entries, self.codec.decode, lease.cut_ms, lease.later)

    async def _ask(self, attempt: Attempt[T], call: Call) -> None:
        """Ask for the policy and the tries of a digest, and read it if that had to wait for them."""
        key, (now_ms, _) = attempt.lease.key, call.clock()
        if not isinstance(self.retry, RetryPolicy):
            attempt.retry = await self.retry(key, now_ms=now_ms)
        policy = self.fixed or await self.policy(key, now_ms=now_ms)
        if call.cancelled:  # which the functions did not heed
            raise asyncio.CancelledError
        if not isinstance(self.retry, RetryPolicy):
            policy.check(attempt.retry)
        self._govern(attempt, policy, now_ms, call)

    def _govern(self, attempt: Attempt[T], policy: Policy, now_ms: int, call: Call) -> None:
        """Have a policy govern the delivery of a digest."""
        lease = attempt.lease
        attempt.cool_ms, attempt.policy = policy.cool_ms(lease.iteration), policy
        if lease.own is not None and not self._told_limits:
            self._told_limits = log_other_limits(lease, lease.own, policy.terms.limits)
        attempt.next_ms = next_due(policy.terms, lease.key, now_ms, now_ms + attempt.cool_ms)
        if policy.hours is not None:
            self._look_at_hours(attempt, call)

    def _look_at_hours(self, attempt: Attempt[T], call: Call) -> None:
        if attempt.policy.hours is not None and not attempt.lease.passes:
            attempt.aside_ms = closed_ms(attempt.policy.hours, *call.clock(), attempt.lease.key)

    async def _await_permit(self, attempt: Attempt[T], call: Call) -> BaseException | None:
        """Wait for the permit to begin, if one is needed, and look at the hours anew, since much time may have passed;
        return the error of a function of theirs."""
        if call.permit is not None:
            await call.permit()
        try:
            self._look_at_hours(attempt, call)
        except Exception as error:
            return error
        return None

    async def deliver(self, attempt: Attempt[T], call: Call, task: asyncio.Task[Any] | None = None) -> Outcome:
        """Deliver a digest in the current task, which is ``task`` if the caller has it at hand.

        Raises CancelledError only when cancelled from outside, and Aside if the digest may not be delivered now.
        """
        lease, task = attempt.lease, task or asyncio.current_task()
        clock = asyncio.get_running_loop().time
        try:
            if self.fixed is not None and isinstance(self.retry, RetryPolicy):
                call.deadline = inf  # of an earlier part: as nearly always, nothing is awaited
                self._govern(attempt, self.fixed, call.clock()[0], call)
            else:
                call.deadline = clock() + self.delivery_timeout
                await self._ask(attempt, call)
        except BaseException as error:
            if attempt.entries:
                await self._read(attempt, gives_up=True)
            return await self._settled(self._raised(attempt, error, call, task)._replace(error=error), call, task)
        is_late = bool(attempt.entries)
        if is_late:
            call.deadline = inf
            await self._read(attempt)  # which may take long
            call.look()
        if attempt.is_spent or not attempt.contents.records:
            return self._buried(attempt, _why_spent(lease)) if attempt.is_spent else self._closed(attempt, "empty")
        if (is_late or call.permit is not None) and not attempt.aside_ms:
            await self._settled(None, call, task)
            if (error := await self._await_permit(attempt, call)) is not None:
                return await self._settled(self._raised(attempt, error, call, task)._replace(error=error), call, task)
        if attempt.aside_ms:
            raise await self._settled(Aside(attempt.aside_ms), call, task)
        digest = attempt.digest
        traced = None if self.tracing is None else self.tracing.delivering(digest, attempt.contents.contexts)
        call.deadline = clock() + self.delivery_timeout
        try:
            error = await self._call(digest, task, call.deadline)
            if error is None:
                outcome = self._closed(attempt, "delivered")
                self._last_kind = None
            else:
                outcome = self._raised(attempt, error, call, task)._replace(error=error)
            if traced is not None:
                traced.ended(outcome.result, outcome.reason, error.__cause__ if isinstance(error, TimedOut) else error)
        finally:
            if traced is not None:
                traced.left()
        return outcome if not (task and task.cancelling()) else await self._settled(outcome, call, task)

    async def _settled(self, outcome: End, call: Call, task: asyncio.Task[Any] | None) -> End:
        """Return the outcome once the task can report it: what the user wrote may have left it cancelled."""
        if task is not None and task.cancelling() and not call.cancelled:
            await _uncancel(task)
        return outcome

    def _raised(self, attempt: Attempt[T], error: BaseException, call: Call, task: asyncio.Task[Any] | None) -> Outcome:
        """Turn an error of a policy or callback into an outcome; raise it, or CancelledError if cancelled."""
        match error:
            case KeyboardInterrupt():
                raise error
            case GeneratorExit() if not (task and asyncio.current_task(task.get_loop()) is task):
                raise error  # its task is dropped, perhaps after its loop
            case RetryAfter():
                return self._deferred(attempt, error)
            case Reject():
                return self._buried(attempt, describe(error), "rejected", mute=error.mute)
            case PartialFailure():
                return self._partial(attempt, error)
            case TimedOut():
                return self._failed(attempt, error)
            case _:  # SystemExit too: a callback ends its own delivery, and nothing else
                cancelled = task is not None and task.cancelling() > 0
                # nobody knows where a cancellation from outside came
                if call.cancelled or (cancelled and isinstance(error, asyncio.CancelledError)):
                    raise asyncio.CancelledError from error
                return self._failed(attempt, error)

    async def _call(self, digest: Digest[T], task: asyncio.Task[Any] | None, ends: float) -> BaseException | None:
        """Call back; return what was raised: were it caught further out, its traceback would hold the outcome."""
        limited = self._limit.begin(task, ends)
        try:
            try:
                ending = self.callback(digest)
                is_async = isawaitable(ending)
                if is_async:
                    ending = await ending
                if ending is not None and never_ran(ending):
                    raise TypeError(f"the callback returned {type(ending).__name__!r}, which did not run: await it")
                if not is_async:  # it has done its work, so to fail now would have it done again
                    logger.error(
                        "the callback returned %r: it must be an async function", type(ending).__name__,
                        extra={"timeline": digest.key, "digest_id": digest.id, "attempt": digest.attempt},
                    )  # fmt: skip
            finally:
                self._limit.end(limited)
        except BaseException as error:
            return self._meant_by(limited.explained(error), limited.expired)
        return None

    def _meant_by(self, error: BaseException, expired: bool) -> BaseException:
        """Return the signal in an exception group, or the timeout behind an error; else the error."""
        if isinstance(error, DeliverySignal) or not isinstance(error, Exception):
            return error
        meant = _signal_in(error)
        if meant is None and expired:
            meant = TimedOut(f"no outcome within {self.delivery_timeout:g} s")
        if meant is not None:
            meant.__cause__ = error
        return meant or error

    def _closed(self, attempt: Attempt[T], result: Result) -> Outcome:
        contents = attempt.contents
        delivered = len(contents.records)
        letters = self._letters(attempt) if contents.undecodable else []
        if letters and result == "empty":
            result = "buried"
        report = self._close(attempt, delivered, letters, counts=bool(delivered or letters))
        return Outcome(report, result, delivered, success=True if result == "delivered" else None)

    def _letters(self, attempt: Attempt[T]) -> list[NewDeadLetter]:
        """Return a dead letter for each reason not to decode records: after a change of the type they may be all."""
        ids: dict[str, list[bytes]] = {}
        for name, reason in attempt.contents.undecodable.items():
            ids.setdefault(reason, []).append(name)
        for reason, some in ids.items():
            facts = {**facts_of(attempt.lease, reason), "records": len(some)}
            line = "%s of %r cannot be decoded, and became a dead letter: %s"
            logger.error(line, _counted(some), attempt.lease.key, reason, extra=facts)
        return [NewDeadLetter(reason, some) for reason, some in ids.items()]

    def _close(self, attempt: Attempt[T], delivered: int, letters: list[NewDeadLetter], counts: bool = True) -> Close:
        terms, too_old = attempt.policy.terms, attempt.contents.aged
        close = Close(
            attempt.lease, attempt.taken, delivered, attempt.cool_ms, terms.limits, self._lease_ms, too_old, counts,
            letters, self.bounds.dead_letters, attempt.policy.hours,
        )  # fmt: skip
        if terms.dedupe_ms:
            lost = (name for letter in letters for name in letter.ids or ())
            close = close._replace(dedupe_ms=terms.dedupe_ms, seen=_seen(attempt, lost))
        return close

    def _buried(
        self,
        attempt: Attempt[T],
        reason: str,
        result: Result = "buried",
        error: BaseException | None = None,
        mute: bool = False,
    ) -> Outcome:
        lease, facts = attempt.lease, facts_of(attempt.lease, reason)
        line = "digest %s of %r is a dead letter after attempt %d: %s"
        logger.error(line, one_line(lease.digest_id), lease.key, lease.attempt, reason, exc_info=error, extra=facts)
        contents = attempt.contents
        ids = [*(identity_of(record.id.encode()) for record in contents.records), *contents.undecodable]
        close = self._close(attempt, 0, [NewDeadLetter(reason, ids if contents.replaced else None)])
        if mute:  # the parts to come go with it
            logger.warning("timeline %r is muted, and drops what is added", lease.key, extra=facts)
            close = close._replace(mute=True, taken=lease.size, dead_letters=[NewDeadLetter(reason)])
        return Outcome(close, result)

    def _deferred(self, attempt: Attempt[T], signal: RetryAfter) -> Outcome:
        try:
            delay = max(SHORTEST_DELAY, duration(signal.delay, "the delay of RetryAfter"))
        except InvalidArgument as error:
            return self._failed(attempt, error)
        retry = Retry(attempt.lease, milliseconds(delay), describe(signal), attempt.policy.terms.limits, give_back=True)
        retry = retry._replace(hours=attempt.policy.hours)
        return Outcome(retry, "deferred", pause=delay if signal.pause else 0.0)

    def _failed(self, attempt: Attempt[T], error: BaseException, reason: str = "") -> Outcome:
        lease, reason = attempt.lease, reason or describe(error)
        result: Result = "failed"
        if isinstance(error, (TimedOut, OutcomeUnknown)):
            result = "timeout" if isinstance(error, TimedOut) else "unknown"
        is_known, shown = result == "failed", self._worth_a_traceback(error)
        success = None if is_known and isinstance(error, DeliverySignal) else False
        if lease.attempt >= attempt.retry.max_attempts:
            return self._buried(attempt, reason, error=shown)._replace(success=success)
        delay_ms = self._delay_ms(attempt, reason, "failed", shown)
        policy = attempt.policy
        retry = Retry(lease, delay_ms, reason, policy.terms.limits, unknown=not is_known, hours=policy.hours)
        return Outcome(retry, result, success=success)

    def _worth_a_traceback(self, error: BaseException) -> BaseException | None:
        """Return the error if its traceback tells something new: it does not for the second of a kind in a row."""
        if isinstance(error, (ChannelError, DeliverySignal, InvalidArgument, TimedOut)):  # the reason tells all of it
            return None
        raised_at = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)][-1:]
        known, self._last_kind = self._last_kind, (type(error), raised_at)
        return None if self._last_kind == known else error

    def _partial(self, attempt: Attempt[T], signal: PartialFailure) -> Outcome:
        lease, known = attempt.lease, {record.id for record in attempt.contents.records}
        if not signal.failed:
            return self._closed(attempt, "delivered")
        strangers = [record_id for record_id in signal.failed if record_id not in known]
        if strangers:
            reason = one_line(f"PartialFailure names {shown(strangers[0])}, no record of it")
            return self._failed(attempt, signal, reason)
        failed = [identity_of(record_id.encode()) for record_id in signal.failed]
        delivered = len(known) - len(failed)
        reason = one_line("; ".join(f"{name}: {text_of(why)}" for name, why in signal.failed.items()))
        if lease.attempt >= attempt.retry.max_attempts:
            letters = [NewDeadLetter(reason, failed), *self._letters(attempt)]
            facts = {**facts_of(lease, reason), "records": len(failed)}
            logger.error("%s of %r became a dead letter: %s", _counted(failed), lease.key, reason, extra=facts)
            return Outcome(self._close(attempt, delivered, letters), "buried", delivered)
        if not delivered and not attempt.contents.aged:  # all of it stays, with nothing to close
            return self._failed(attempt, signal, reason)
        kept, terms = [*failed, *attempt.contents.undecodable], attempt.policy.terms
        delay_ms, aged = self._delay_ms(attempt, reason, "failed in part"), attempt.contents.aged
        hours = attempt.policy.hours
        retry = Retry(lease, delay_ms, reason, terms.limits, attempt.taken, kept, delivered, aged=aged, hours=hours)
        if terms.dedupe_ms:
            retry = retry._replace(dedupe_ms=terms.dedupe_ms, seen=_seen(attempt, kept))
        return Outcome(retry, "partial", delivered)

    def _delay_ms(self, attempt: Attempt[T], reason: str, how: str, error: BaseException | None = None) -> int:
        """Return the wait before the next attempt, and log it."""
        lease = attempt.lease
        try:
            delay_ms = attempt.retry.delay_ms(lease.attempt)
        except Exception:
            line, facts = "the retry strategy failed; attempt %d waits a minute", facts_of(lease)
            logger.exception(line, lease.attempt, extra=facts)
            delay_ms = FALLBACK_DELAY_MS
        line, facts = f"attempt %d to deliver %r {how}, the next is in %s: %s", facts_of(lease, reason, delay_ms)
        logger.warning(
            line, lease.attempt, lease.key, span(round(delay_ms, -3) or delay_ms), reason, exc_info=error, extra=facts
        )
        return delay_ms
