"""A single attempt to deliver a digest: its records, its callback, and its report to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from inspect import isawaitable
from math import inf
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from aiodigest.backend import Close, Closed, Lease, NewDeadLetter, Retry
from aiodigest.codecs import Codec
from aiodigest.errors import CodecError, DeliverySignal, InvalidArgument, PartialFailure, Reject, RetryAfter, shown
from aiodigest.models import Digest, Record, Result
from aiodigest.policy import Policy, RetryPolicy, milliseconds
from aiodigest.records.entries import RawRecord, unpack, unpack_latest
from aiodigest.records.tracing import Tracing
from aiodigest.records.validation import EPOCH, duration, moment, never_ran
from aiodigest.worker.logs import facts_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

TURN = 0.002  # seconds of decoding in one go
MANY = 500  # entries that are taken apart in one go
SMALL = 32, 32_768  # entries and bytes of a digest that is read beside others: larger ones are read one at a time
ERROR_LENGTH = 500
SHORTEST_DELAY = 1.0  # of a RetryAfter, which charges no attempt and so nothing else would slow down
FALLBACK_DELAY_MS = 60_000  # when a retry strategy itself fails

Callback: TypeAlias = Callable[[Digest[T]], Awaitable[object]]


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

    @property
    def reason(self) -> str:
        """The reason that records were not delivered; '' if all were."""
        if isinstance(self.report, Retry):
            return self.report.error
        return self.report.dead_letters[0].reason if self.report.dead_letters else ""

    def rest(self, closed: Closed) -> Lease:
        """Return the lease on the rest of a digest that is delivered in parts."""
        lease, entries = self.report.lease, self.report.lease.entries[self.report.taken :]
        return replace(
            lease, digest_id=closed.digest_id, attempt=1, dropped=0, size=closed.left, last_error="", entries=entries
        )


class _TimedOut(Exception):
    """The callback took longer than ``delivery_timeout``; its outcome is unknown."""


@dataclass(slots=True)
class Contents(Generic[T]):
    """The contents of entries.

    ``records`` are in order. ``raw`` are the undecodable records, ``undecodable`` their ids with the reasons;
    ``aged`` counts those too old. ``contexts`` are those of the spans that added the records, if they were traced.
    """

    records: list[Record[T]] = field(default_factory=list[Record[T]])
    raw: list[Record[bytes]] = field(default_factory=list[Record[bytes]])
    undecodable: dict[bytes, str] = field(default_factory=dict[bytes, str])
    aged: int = 0
    contexts: list[bytes] = field(default_factory=list[bytes])

    def letters(self) -> list[NewDeadLetter]:
        """Return undecodable records, a letter for each reason: after a change of the type they may be every record."""
        ids: dict[str, list[bytes]] = {}
        for record_id, reason in self.undecodable.items():
            ids.setdefault(reason, []).append(record_id)
        return [NewDeadLetter(reason, some) for reason, some in ids.items()]


async def read(entries: Sequence[bytes], codec: Codec[T], cut_ms: int = 0) -> Contents[T]:
    """Return the records of some entries by timestamp, then arrival; the last entry of an id wins.

    Large input is decoded a slice at a time, so that the event loop can do other things in between.
    """
    contents: Contents[T] = Contents()
    cut, clock = cut_ms * 1000, asyncio.get_running_loop().time
    records, until = contents.records, clock() + TURN
    last: dict[bytes, tuple[bytes, RawRecord | None]] = {}
    for start in range(0, len(entries), MANY):
        unpack_latest(entries[start : start + MANY], last)
        if len(entries) > MANY:
            await asyncio.sleep(0)
    for name, (entry, raw) in last.items():
        if clock() > until:
            await asyncio.sleep(0)
            until = clock() + TURN
        timestamp = EPOCH
        try:
            if raw is None:
                raw = unpack(entry)  # which says what is wrong with it
            if cut and raw.timestamp_us < cut:
                contents.aged += 1
                continue
            timestamp = moment(raw.timestamp_us)
            records.append(Record(raw.id.decode(), codec.decode(raw.value), timestamp))
            if raw.context:
                contents.contexts.append(raw.context)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a codec may raise anything; a panic of Rust code is no Exception
            contents.undecodable[name] = describe(error)
            found = raw or RawRecord(0, b"?", entry)
            contents.raw.append(Record(found.id.decode(errors="replace"), found.value, timestamp))
    records.sort(key=attrgetter("timestamp"))
    return contents


def _runs(task: asyncio.Task[Any] | None) -> bool:
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # there is no loop
        return False


async def _go_on(task: asyncio.Task[Any]) -> None:
    """Take back the cancellations that a callback caused itself and left behind, including one still to arrive."""
    while task.cancelling():
        task.uncancel()
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


def is_small(entries: Sequence[bytes]) -> bool:
    return len(entries) <= SMALL[0] and sum(map(len, entries)) <= SMALL[1]


def describe(error: BaseException) -> str:
    """Describe an error in one line of bounded length, for dead letters and retries."""
    text = _text(error)
    says_all = isinstance(error, (CodecError, DeliverySignal, _TimedOut))
    return _line(text if says_all else f"{type(error).__name__}: {text}")


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # what the user raises may not even have a text
        return f"a {type(value).__name__}"


def _line(text: str) -> str:
    return " ".join(text.encode(errors="replace").decode().split())[:ERROR_LENGTH]


@dataclass(slots=True)
class Call:
    """State of a callback, shared by its worker and its dispatcher."""

    until: float = inf  # by the loop's clock: when it is cancelled, and should end
    cut: bool = False  # its worker has cancelled it, so that it reports nothing


@dataclass(slots=True)
class Attempt(Generic[T]):
    """A lease, the contents of its digest (or of its next part), and the policy that governs its delivery."""

    lease: Lease
    taken: int
    contents: Contents[T]
    policy: Policy = Policy()
    cool_ms: int = 0

    @property
    def digest(self) -> Digest[T]:
        lease = self.lease
        records = tuple(self.contents.records)
        return Digest(lease.key, records, lease.digest_id, lease.attempt, lease.dropped, lease.iteration)


class Dispatcher(Generic[T]):
    """Hands digests to a callback and reports the outcome."""

    def __init__(
        self,
        callback: Callback[T],
        codec: Codec[T],
        policy: Callable[[str], Awaitable[Policy]],
        retry: RetryPolicy,
        lease_timeout: float,
        delivery_timeout: float,
        tracing: Tracing | None = None,
    ) -> None:
        self._callback = callback
        self._codec = codec
        self._policy = policy
        self._retry = retry
        self._lease_ms = milliseconds(lease_timeout)
        self._timeout = delivery_timeout
        self._tracing = tracing
        self._reading = asyncio.Lock()

    async def prepare(self, lease: Lease, entries: Sequence[bytes]) -> Attempt[T]:
        """Read the digest that ``entries`` hold; large ones are read one at a time."""
        async with nullcontext() if is_small(entries) else self._reading:
            return Attempt(lease, len(entries), await read(entries, self._codec, lease.cut_ms))

    async def deliver(self, attempt: Attempt[T], call: Call | None = None) -> Outcome:
        """Deliver a digest. Raises CancelledError only when cancelled from outside."""
        lease, call, task = attempt.lease, call or Call(), asyncio.current_task()
        try:
            with self._timed(call):
                attempt.policy = await self._policy(lease.key)
            if call.cut:  # which the policy function did not heed
                raise asyncio.CancelledError
            attempt.cool_ms = attempt.policy.cool_ms(lease.iteration)
        except BaseException as error:
            return self._raised(attempt, error, call, task)
        if not attempt.contents.records:
            return self._closed(attempt, "empty")
        if lease.attempt > self._retry.max_attempts:
            return self._buried(attempt, lease.last_error or "no attempt had a known outcome")
        digest = attempt.digest
        span = None if self._tracing is None else self._tracing.delivering(digest, attempt.contents.contexts)
        try:
            with self._timed(call):
                await self._call(digest)
        except BaseException as error:
            outcome = self._raised(attempt, error, call, task)
            if span is not None:
                span.ended(outcome.result, outcome.reason, error.__cause__ if isinstance(error, _TimedOut) else error)
        else:
            outcome = self._closed(attempt, "delivered")
            if span is not None:
                span.ended(outcome.result)
        finally:
            if span is not None:
                span.left()
        if task is not None and task.cancelling() and not call.cut:
            await _go_on(task)
        return outcome

    @contextmanager
    def _timed(self, call: Call) -> Generator[None]:
        """Publish the deadline of code that users wrote."""
        call.until = asyncio.get_running_loop().time() + self._timeout
        try:
            yield
        finally:
            call.until = inf

    def _raised(self, attempt: Attempt[T], error: BaseException, call: Call, task: asyncio.Task[Any] | None) -> Outcome:
        """Turn an error of a policy or callback into an outcome; raise it, or CancelledError, for a cut attempt."""
        match error:
            case KeyboardInterrupt():
                raise error
            case GeneratorExit() if not _runs(task):  # its task is dropped, perhaps after its loop
                raise error
            case RetryAfter():
                return self._deferred(attempt, error)
            case Reject():
                return self._buried(attempt, describe(error), "rejected")
            case PartialFailure():
                return self._partial(attempt, error)
            case _TimedOut():
                return self._failed(attempt, error, unknown=True)
            case _:  # SystemExit too: a callback ends its own delivery, and nothing else
                cancelled = task is not None and task.cancelling() > 0
                if call.cut or (cancelled and isinstance(error, asyncio.CancelledError)):  # and nobody knows where
                    raise asyncio.CancelledError from error
                return self._failed(attempt, error)

    async def _call(self, digest: Digest[T]) -> None:
        timer = asyncio.timeout(self._timeout)
        try:
            async with timer:
                ending = self._callback(digest)
                is_async = isawaitable(ending)
                if is_async:
                    ending = await ending
                if never_ran(ending):
                    raise TypeError(f"the callback returned {type(ending).__name__!r}, which did not run: await it")
                if not is_async:  # it has done its work, so to fail now would have it done again
                    logger.error(
                        "the callback returned %r: it must be an async function", type(ending).__name__,
                        extra={"timeline": digest.key, "digest_id": digest.id, "attempt": digest.attempt},
                    )  # fmt: skip
        except DeliverySignal:
            raise
        except Exception as error:
            if timer.expired():
                raise _TimedOut(f"no outcome within {self._timeout:g} s") from error
            raise

    def _closed(self, attempt: Attempt[T], result: Result) -> Outcome:
        contents = attempt.contents
        delivered = len(contents.records)
        letters = contents.letters()
        report = self._close(attempt, delivered, letters, counts=bool(delivered or letters))
        return Outcome(report, result, delivered, success=True if result == "delivered" else None)

    def _close(self, attempt: Attempt[T], delivered: int, letters: list[NewDeadLetter], counts: bool = True) -> Close:
        limits, too_old = attempt.policy.terms.limits, attempt.contents.aged
        return Close(
            attempt.lease, attempt.taken, delivered, attempt.cool_ms, limits, self._lease_ms, too_old, counts, letters
        )

    def _buried(
        self, attempt: Attempt[T], reason: str, result: Result = "buried", success: bool | None = None
    ) -> Outcome:
        lease, facts = attempt.lease, facts_of(attempt.lease, reason)
        logger.warning("digest %s of %r is a dead letter: %s", lease.digest_id, lease.key, reason, extra=facts)
        return Outcome(self._close(attempt, 0, [NewDeadLetter(reason)]), result, success=success)

    def _deferred(self, attempt: Attempt[T], signal: RetryAfter) -> Outcome:
        try:
            delay = max(SHORTEST_DELAY, duration(signal.delay, "the delay of RetryAfter"))
        except InvalidArgument as error:
            return self._failed(attempt, error)
        retry = Retry(attempt.lease, milliseconds(delay), describe(signal), attempt.policy.terms.limits, give_back=True)
        return Outcome(retry, "deferred", pause=delay if signal.pause else 0.0)

    def _failed(self, attempt: Attempt[T], error: BaseException, unknown: bool = False, reason: str = "") -> Outcome:
        reason = reason or describe(error)
        told = isinstance(error, (DeliverySignal, InvalidArgument, _TimedOut))  # the reason tells all of it
        logger.warning(
            "attempt %d to deliver %r failed: %s", attempt.lease.attempt, attempt.lease.key, reason,
            exc_info=None if told else error, extra=facts_of(attempt.lease, reason),
        )  # fmt: skip
        success = None if isinstance(error, DeliverySignal) else False
        if attempt.lease.attempt >= self._retry.max_attempts:
            return self._buried(attempt, reason, success=success)
        delay_ms = self._delay_ms(attempt.lease)
        retry = Retry(attempt.lease, delay_ms, reason, attempt.policy.terms.limits, unknown=unknown)
        return Outcome(retry, "timeout" if unknown else "failed", success=success)

    def _partial(self, attempt: Attempt[T], signal: PartialFailure) -> Outcome:
        lease, known = attempt.lease, {record.id for record in attempt.contents.records}
        if not signal.failed:
            return self._closed(attempt, "delivered")
        strangers = [record_id for record_id in signal.failed if record_id not in known]
        if strangers:
            return self._failed(
                attempt, signal, reason=_line(f"PartialFailure names {shown(strangers[0])}, no record of it")
            )
        failed = [record_id.encode() for record_id in signal.failed]
        delivered = len(known) - len(failed)
        reason = _line("; ".join(f"{name}: {_text(why)}" for name, why in signal.failed.items()))
        bad = attempt.contents.undecodable
        if attempt.lease.attempt >= self._retry.max_attempts:
            letters = [NewDeadLetter(reason, failed), *attempt.contents.letters()]
            facts = facts_of(lease, reason)
            logger.warning("%d records of %r are a dead letter: %s", len(failed), lease.key, reason, extra=facts)
            return Outcome(self._close(attempt, delivered, letters), "buried", delivered)
        if not delivered and not attempt.contents.aged:  # all of it stays, with nothing to close
            return self._failed(attempt, signal, reason=reason)
        facts = facts_of(lease, reason)
        logger.warning("attempt %d to deliver %r failed in part: %s", lease.attempt, lease.key, reason, extra=facts)
        retry = Retry(
            attempt.lease, self._delay_ms(attempt.lease), reason, attempt.policy.terms.limits,
            attempt.taken, [*failed, *bad], delivered, aged=attempt.contents.aged,
        )  # fmt: skip
        return Outcome(retry, "partial", delivered)

    def _delay_ms(self, lease: Lease) -> int:
        try:
            return self._retry.delay_ms(lease.attempt)
        except Exception:
            facts = facts_of(lease)
            logger.exception("the retry strategy failed; attempt %d waits a minute", lease.attempt, extra=facts)
            return FALLBACK_DELAY_MS
