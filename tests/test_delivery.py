from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from math import nan
from typing import Any, cast

import anyio
import pytest
from engines import VirtualLoop, forever
from hypothesis import given
from hypothesis import strategies as st

from aiodigest import JSON, Digest, JSONCodec, PartialFailure, Policy, Reject, RetryAfter, RetryPolicy
from aiodigest.backend import Close, Closed, Lease, NewDeadLetter, Retry
from aiodigest.errors import CodecError
from aiodigest.records.entries import pack
from aiodigest.worker.contents import MANY, SMALL, TURN, read
from aiodigest.worker.delivery import Call, Callback, Dispatcher, Outcome
from aiodigest.worker.reasons import ERROR_LENGTH, describe

pytestmark = pytest.mark.virtual_time

CODEC = JSONCodec[JSON]()
TIMEOUT = 30.0
LEASE_MS = 60_000
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0 * attempt)

Reply = BaseException | Callable[[Digest[JSON]], Awaitable[object]] | None


def entry(record_id: str, value: JSON = 1, timestamp: int = 5) -> bytes:
    return pack(record_id.encode(), timestamp * 1_000_000, CODEC.encode(value))


def broken(record_id: str) -> bytes:
    """An entry whose value no codec of ours wrote."""
    return pack(record_id.encode(), 5_000_000, b"\xff not ours")


def lease_of(entries: Sequence[bytes], **changes: Any) -> Lease:
    facts: dict[str, Any] = {"attempt": 1, "iteration": 4, "dropped": 2, "due_ms": 0, "size": len(entries), **changes}
    return Lease("key", "token", "digest-1", entries=tuple(entries), **facts)


def dispatcher_to(
    callback: Callback[JSON], policy: Callable[[str], Policy] | None = None, retry: RetryPolicy = RETRY
) -> Dispatcher[JSON]:
    async def find(key: str) -> Policy:
        return policy(key) if policy else Policy()

    return Dispatcher(callback, CODEC, find, retry, LEASE_MS / 1000, TIMEOUT)


async def delivered(dispatcher: Dispatcher[JSON], *entries: bytes, call: Call | None = None, **changes: Any) -> Outcome:
    """What comes of delivering ``entries``."""
    return await dispatcher.deliver(await dispatcher.prepare(lease_of(entries, **changes), entries), call)


async def attempt(
    reply: Reply,
    *entries: bytes,
    policy: Callable[[str], Policy] | None = None,
    call: Call | None = None,
    **changes: Any,
) -> Outcome:
    """What comes of delivering ``entries`` to a callback that raises ``reply``, or awaits it, or returns."""

    async def callback(digest: Digest[JSON]) -> None:
        if isinstance(reply, BaseException):
            raise reply
        if reply is not None:
            await reply(digest)

    return await delivered(dispatcher_to(callback, policy), *entries, call=call, **changes)


def close_of(outcome: Outcome) -> Close:
    assert isinstance(outcome.report, Close)
    return outcome.report


def retry_of(outcome: Outcome) -> Retry:
    assert isinstance(outcome.report, Retry)
    return outcome.report


# contents


async def test_records_are_in_order_of_their_timestamps_and_then_of_arrival() -> None:
    entries = [entry("a", timestamp=9), entry("b", timestamp=5), entry("c", timestamp=9), entry("d", timestamp=1)]
    assert [record.id for record in (await read(entries, CODEC)).records] == ["d", "b", "a", "c"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3))))
async def test_the_last_entry_of_an_id_wins(adds: list[tuple[str, int]]) -> None:
    contents = await read([entry(record_id, value) for record_id, value in adds], CODEC)
    assert {record.id: record.value for record in contents.records} == dict(adds)
    assert len(contents.records) == len(dict(adds))


async def test_a_timestamp_comes_out_as_an_aware_datetime_in_utc() -> None:
    [record] = (await read([entry("a", timestamp=5)], CODEC)).records
    assert record.timestamp == datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC)
    assert record.timestamp.utcoffset() == timedelta(0)


async def test_a_record_that_is_too_old_is_left_out_and_counted() -> None:
    contents = await read([entry("old", timestamp=4), entry("new", timestamp=5)], CODEC, cut_ms=5000)
    assert ([record.id for record in contents.records], contents.aged) == (["new"], 1)


@pytest.mark.parametrize("bad", [broken("bad"), b"", b"\x0f no entry at all", pack(b"\xff", 5, CODEC.encode(1))])
async def test_what_cannot_be_decoded_is_kept_raw_beside_the_others(bad: bytes) -> None:
    contents = await read([entry("a"), bad, entry("b")], CODEC)
    assert [record.id for record in contents.records] == ["a", "b"]
    assert len(contents.raw) == len(contents.undecodable) == 1


async def test_what_cannot_be_decoded_has_its_timestamp_if_that_can_be_read() -> None:
    contents = await read([broken("dated"), pack(b"far", 10**18, CODEC.encode(1)), b"\x0f no entry at all"], CODEC)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert [record.timestamp for record in contents.raw] == [epoch + timedelta(seconds=5), epoch, epoch]


class Odd(BaseException):
    """What no `except Exception` catches, such as a panic of Rust code."""


@pytest.mark.parametrize("error", [ZeroDivisionError("wild"), Odd("wild"), SystemExit("wild"), GeneratorExit("wild")])
async def test_a_codec_may_raise_anything(error: BaseException) -> None:
    class Wild:
        def encode(self, value: int, /) -> bytes:
            return b""

        def decode(self, data: bytes, /) -> int:
            raise error

    assert (await read([entry("a")], Wild())).undecodable == {b"a": f"{type(error).__name__}: wild"}


class Slow:
    """A codec that takes a turn for each value, and notes which it has decoded."""

    def __init__(self) -> None:
        self.decoded: list[int] = []

    def encode(self, value: int, /) -> bytes:
        return b"%d" % value

    def decode(self, data: bytes, /) -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.idle.now += 1.01 * TURN
        self.decoded.append(int(data))
        return self.decoded[-1]


async def test_a_large_digest_is_read_a_slice_at_a_time_while_the_event_loop_does_other_things() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    slow = Slow()
    contents = await read([pack(b"%d" % number, 0, slow.encode(number)) for number in range(20)], slow)
    assert len(contents.records) == 20
    assert turns >= 19, "of decoding"
    turns = 0
    contents = await read([entry("a", number) for number in range(10 * MANY)], CODEC)
    turning.cancel()
    await asyncio.wait([turning])
    assert len(contents.records) == 1
    assert turns >= 10, "of taking entries apart"


async def test_large_digests_are_read_one_after_the_other_and_small_ones_beside_them() -> None:
    slow, many = Slow(), SMALL[0] + 1

    async def usual(key: str) -> Policy:
        return Policy()

    dispatcher = Dispatcher(asyncio.Queue[Digest[int]]().put, slow, usual, RETRY, LEASE_MS / 1000, TIMEOUT)

    async def prepare(value: int, number: int) -> None:
        entries = [pack(b"%d" % each, 0, slow.encode(value)) for each in range(number)]
        await dispatcher.prepare(lease_of(entries), entries)

    await asyncio.gather(prepare(1, many), prepare(2, many), prepare(0, 1))
    assert slow.decoded.index(0) < 5
    slow.decoded.remove(0)
    assert slow.decoded == [1] * many + [2] * many


# errors in words


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_is_described_in_one_bounded_line_that_can_be_stored() -> None:
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(CodecError("ours")) == "ours"
    assert describe(Mute()) == "Mute: a Mute"
    assert len(describe(ValueError("x" * 10_000))) == ERROR_LENGTH
    describe(ValueError("a lone surrogate \ud800")).encode()


# how a delivery may end


async def test_the_callback_gets_the_digest_that_the_lease_names() -> None:
    seen: list[Digest[JSON]] = []

    async def keep(digest: Digest[JSON]) -> None:
        seen.append(digest)

    await attempt(keep, entry("a", {"x": 1}), attempt=2)
    [digest] = seen
    assert (digest.key, digest.id, digest.attempt, digest.dropped, digest.iteration) == ("key", "digest-1", 2, 2, 5 - 1)
    assert [(record.id, record.value) for record in digest.records] == [("a", {"x": 1})]


async def test_returning_closes_the_digest_under_the_policy_of_now() -> None:
    outcome = await attempt(None, entry("a"), entry("b"), entry("a"))
    assert (outcome.result, outcome.records, outcome.success) == ("delivered", 2, True)
    close = close_of(outcome)
    assert (close.taken, close.delivered, close.counts) == (3, 2, True)
    assert (close.cool_ms, close.lease_ms) == (300_000, LEASE_MS)
    assert close.limits == Policy().terms.limits
    assert not close.dead_letters


async def test_raising_lets_the_digest_wait_for_its_next_attempt() -> None:
    outcome = await attempt(ValueError("smtp is down"), entry("a"), attempt=2)
    assert (outcome.result, outcome.records, outcome.success) == ("failed", 0, False)
    retry = retry_of(outcome)
    assert (retry.delay_ms, retry.error) == (20_000, "ValueError: smtp is down")
    assert (retry.give_back, retry.unknown, retry.failed) == (False, False, None)


@pytest.mark.parametrize(
    "error", [SystemExit(1), asyncio.CancelledError(), GeneratorExit(), Odd(), TimeoutError("theirs")]
)
async def test_whatever_a_callback_raises_is_a_failure_of_this_delivery_alone(error: BaseException) -> None:
    outcome = await attempt(error, entry("a"))
    assert (outcome.result, outcome.success, retry_of(outcome).unknown) == ("failed", False, False)


async def cancelled_inside(digest: Digest[JSON]) -> None:
    task = asyncio.create_task(forever(digest))
    asyncio.get_running_loop().call_later(1, task.cancel)
    await task


async def late_by_itself(digest: Digest[JSON]) -> None:
    with anyio.fail_after(1):
        await forever(digest)


def raising_when_cancelled(error: BaseException | None) -> Callable[[Digest[JSON]], Awaitable[object]]:
    async def callback(digest: Digest[JSON]) -> None:
        try:
            await forever(digest)
        except asyncio.CancelledError:
            if error is None:
                raise
            raise error from None

    return callback


async def staying(digest: Digest[JSON]) -> None:
    with suppress(asyncio.CancelledError):
        await forever(digest)


@pytest.mark.parametrize(
    ("callback", "result", "unknown"),
    [
        (cancelled_inside, "failed", False),
        (late_by_itself, "failed", False),
        (forever, "timeout", True),
        (raising_when_cancelled(ConnectionError("the line broke")), "timeout", True),
        (staying, "delivered", False),
    ],
)
async def test_only_of_a_callback_that_was_cancelled_for_its_time_and_did_not_return_the_outcome_is_unknown(
    callback: Reply, result: str, unknown: bool
) -> None:
    outcome = await attempt(callback, entry("a"))
    assert (outcome.result, outcome.success) == (result, result == "delivered")
    if not outcome.success:
        assert (retry_of(outcome).unknown, retry_of(outcome).delay_ms) == (unknown, 10_000)


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (None, None),  # it is cancelled from outside
        *((error, Call(cancelled=True)) for error in (None, ValueError("cut short"), SystemExit(), GeneratorExit())),
    ],
)
async def test_a_delivery_that_its_worker_cuts_short_reports_nothing(
    error: BaseException | None, call: Call | None
) -> None:
    task = asyncio.create_task(attempt(raising_when_cancelled(error), entry("a"), call=call))
    asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_callback_whose_task_a_library_has_cancelled_fails_with_what_it_raises() -> None:
    """So do libraries that time out and do not take their cancellation back, as aiohttp before 3.10."""
    task = asyncio.create_task(attempt(raising_when_cancelled(TimeoutError("theirs")), entry("a")))
    asyncio.get_running_loop().call_later(1, task.cancel)
    outcome = await task
    assert retry_of(outcome).error == "TimeoutError: theirs"
    assert not task.cancelling()


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


@pytest.mark.parametrize(
    ("raised", "result", "reason"),
    [
        (group(Reject("no such user")), "rejected", "no such user"),
        (group(group(Reject("a")), ValueError("x"), Reject("b"), RetryAfter(5)), "rejected", "a; b"),
        (group(ValueError("x"), RetryAfter(5), RetryAfter(timedelta(seconds=7))), "deferred", "retry after 0:00:07"),
        (group(PartialFailure({"a": "x"}), group(PartialFailure({"b": "y"}))), "partial", "a: x; b: y"),
        (group(PartialFailure({"a": "x"}), ValueError("y")), "failed", "ExceptionGroup: unhandled errors"),
        (group(RetryAfter(-1)), "failed", "ExceptionGroup: unhandled errors"),
        (group(ValueError("x"), KeyError("y")), "failed", "ExceptionGroup: unhandled errors"),
    ],
)
async def test_signals_that_leave_a_task_group_are_understood(raised: BaseException, result: str, reason: str) -> None:
    outcome = await attempt(raised, entry("a"), entry("b"), entry("c"))
    assert (outcome.result, outcome.reason[: len(reason)]) == (result, reason)


async def test_a_delivery_whose_task_is_dropped_ends_with_it() -> None:
    coroutine = attempt(forever, entry("a"))
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(1)
    coroutine.close()  # as of a task that is pending when its loop is closed
    task.cancel()
    await asyncio.wait([task])
    assert "already awaited" in str(task.exception())  # which is the task's own, and no outcome


async def test_it_can_be_known_until_when_a_callback_may_take() -> None:
    call, seen = Call(), list[float]()

    async def look(digest: Digest[JSON]) -> None:
        await asyncio.sleep(1)
        seen.append(call.deadline - asyncio.get_running_loop().time())

    await attempt(look, entry("a"), call=call)
    assert seen == [pytest.approx(TIMEOUT - 1)]


async def test_the_last_attempt_that_fails_is_buried_with_its_error() -> None:
    outcome = await attempt(ValueError("no more"), entry("a"), attempt=3)
    assert (outcome.result, outcome.success) == ("buried", False)
    close = close_of(outcome)
    assert (close.dead_letters, close.delivered, close.counts) == ([NewDeadLetter("ValueError: no more")], 0, True)


@pytest.mark.parametrize("last", ["ValueError: earlier", ""])
async def test_a_digest_whose_attempts_are_used_up_is_buried_with_the_last_error_and_no_callback(last: str) -> None:
    outcome = await attempt(AssertionError("called"), entry("a"), attempt=4, last_error=last)
    [letter] = close_of(outcome).dead_letters
    assert last == letter.reason if last else "outcome" in letter.reason
    assert outcome.success is None


# signals


async def test_retry_after_gives_the_attempt_back_and_says_nothing_of_the_receiver() -> None:
    outcome = await attempt(RetryAfter(timedelta(minutes=2)), entry("a"), attempt=3)
    assert (outcome.result, outcome.success, outcome.pause) == ("deferred", None, 0.0)
    assert (retry_of(outcome).delay_ms, retry_of(outcome).give_back) == (120_000, True)


@pytest.mark.parametrize(("delay", "seconds"), [(0, 1), (0.003, 1), (timedelta(milliseconds=5), 1), (1, 1), (90, 90)])
async def test_retry_after_with_pause_stops_this_process_for_as_long_and_a_second_at_least(
    delay: Any, seconds: int
) -> None:
    outcome = await attempt(RetryAfter(delay, pause=True), entry("a"))
    assert (retry_of(outcome).delay_ms, outcome.pause) == (1000 * seconds, seconds)


@pytest.mark.parametrize("delay", [nan, -1, "soon", None])
async def test_retry_after_with_what_is_no_delay_is_a_failure(delay: Any) -> None:
    outcome = await attempt(RetryAfter(delay), entry("a"))
    assert (outcome.result, retry_of(outcome).give_back) == ("failed", False)
    assert "RetryAfter" in retry_of(outcome).error


@pytest.mark.parametrize(
    ("reject", "reason"), [(Reject("address gone"), "address gone"), (Reject(), "rejected by the callback")]
)
async def test_reject_buries_the_digest_at_once(reject: Reject, reason: str) -> None:
    outcome = await attempt(reject, entry("a"))
    assert (outcome.result, outcome.records, outcome.success) == ("rejected", 0, None)
    assert close_of(outcome).dead_letters == [NewDeadLetter(reason)]


@pytest.mark.parametrize(("failed", "error"), [({"b": "bounced"}, "b: bounced"), (["b"], "b: failed")])
async def test_a_partial_failure_keeps_what_failed_and_closes_the_rest(failed: Any, error: str) -> None:
    outcome = await attempt(PartialFailure(failed), entry("a"), entry("b"), entry("c"))
    assert (outcome.result, outcome.records, outcome.success) == ("partial", 2, None)
    retry = retry_of(outcome)
    assert (retry.failed, retry.taken, retry.delivered, retry.error) == ([b"b"], 3, 2, error)


async def test_a_partial_failure_of_every_record_is_a_failure_with_their_reasons() -> None:
    failed = PartialFailure({"a": "bounced", "b": "full"})
    outcome = await attempt(failed, entry("a"), entry("b"))
    assert (outcome.result, outcome.records, outcome.success) == ("failed", 0, None)
    retry = retry_of(outcome)
    assert (retry.failed, retry.delivered, retry.error) == (None, 0, "a: bounced; b: full")
    with_aged = retry_of(await attempt(failed, entry("a"), entry("b"), entry("old", timestamp=1), cut_ms=2000))
    assert (with_aged.failed, with_aged.aged) == ([b"a", b"b"], 1)  # what is too old goes
    last = await attempt(failed, entry("a"), entry("b"), broken("bad"), attempt=3)
    assert [letter.ids for letter in close_of(last).dead_letters] == [[b"a", b"b"], [b"bad"]]


async def test_a_partial_failure_at_the_last_attempt_buries_what_failed_and_closes_the_rest() -> None:
    outcome = await attempt(PartialFailure({"b": "bounced"}), entry("a"), entry("b"), attempt=3)
    assert (outcome.result, outcome.records) == ("buried", 1)
    close = close_of(outcome)
    assert (close.delivered, close.dead_letters) == (1, [NewDeadLetter("b: bounced", [b"b"])])


@pytest.mark.parametrize("failed", [{"nobody": "x"}, {"a": "x", "nobody": "y"}, {"\ud800": "x"}, {1: "x"}, {None: "x"}])
async def test_a_partial_failure_that_names_an_unknown_id_keeps_all_and_says_so(
    failed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = await attempt(PartialFailure(failed), entry("a"), entry("b"))
    assert (outcome.result, outcome.success) == ("failed", None)
    assert (retry_of(outcome).failed, "PartialFailure names" in retry_of(outcome).error) == (None, True)
    assert "no record of it" in caplog.text


async def test_a_partial_failure_without_a_failure_is_a_delivery() -> None:
    assert (await attempt(PartialFailure({}), entry("a"))).result == "delivered"


async def test_a_partial_failure_s_reasons_are_one_bounded_line_that_can_be_stored() -> None:
    failed = {"a": "\ud800\n" + "x" * 10_000}
    error = retry_of(await attempt(PartialFailure(failed), entry("a"))).error
    assert len(error.encode()) <= ERROR_LENGTH
    assert "\n" not in error


# records that are not for the callback


async def test_a_record_that_cannot_be_decoded_is_set_aside_alone() -> None:
    outcome = await attempt(None, entry("a"), broken("bad"), entry("b"))
    assert (outcome.result, outcome.records) == ("delivered", 2)
    close = close_of(outcome)
    [letter] = close.dead_letters
    assert (close.delivered, letter.ids) == (2, [b"bad"])
    assert "first byte" in letter.reason


async def test_what_a_callback_raised_is_freed_with_its_outcome_and_no_cycle_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "aiodigest")  # a line that was caught keeps its error

    class Refused(Exception):  # built-in errors take no weak references
        pass

    raised = list[weakref.ref[Refused]]()

    async def callback(digest: Digest[JSON]) -> None:
        error = Refused()
        raised.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    outcome = await delivered(dispatcher_to(callback), entry("a"))
    assert isinstance(outcome.error, Refused)
    del outcome
    assert [each() for each in raised] == [None]


async def test_only_the_first_of_a_kind_of_failures_in_a_row_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = iter([ValueError("a"), ValueError("b"), KeyError("c"), ValueError("d"), None, ValueError("e")])

    async def callback(digest: Digest[JSON]) -> None:
        if error := next(errors):
            raise error

    dispatcher = dispatcher_to(callback)
    for _ in range(6):
        await delivered(dispatcher, entry("a"))
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True, True, True]
    assert caplog.records[0].getMessage() == "attempt 1 to deliver 'key' failed, the next is in 10 s: ValueError: a"


async def test_a_failure_carries_its_reason_and_its_error(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("no such mailbox")
    told = (await attempt(error, entry("a"), attempt=3)).delivery(Closed("closed"), 0.0, 0.0)
    assert (told.result, told.reason, told.error) == ("buried", "ValueError: no such mailbox", error)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    told = (await attempt(None, entry("a"), broken("x"))).delivery(Closed("closed"), 0.0, 0.0)
    assert (told.result, told.reason[:14], told.error) == ("delivered", "unknown format", None)


async def test_records_that_cannot_be_decoded_are_set_aside_without_a_callback_if_there_are_no_others() -> None:
    outcome = await attempt(AssertionError("called"), broken("x"), broken("y"))
    assert (outcome.result, outcome.records, outcome.success) == ("buried", 0, None)
    close = close_of(outcome)
    assert ([letter.ids for letter in close.dead_letters], close.counts) == ([[b"x", b"y"]], True)  # a letter a reason


@pytest.mark.parametrize("attempts", [1, 4])  # of which there may be three
async def test_a_digest_left_empty_by_max_age_is_closed_without_a_callback_or_a_cool_down(attempts: int) -> None:
    outcome = await attempt(AssertionError("called"), entry("a", timestamp=1), cut_ms=2000, attempt=attempts)
    close = close_of(outcome)
    assert (outcome.result, close.dead_letters) == ("empty", [])
    assert (close.aged, close.delivered, close.counts) == (1, 0, False)


async def test_a_partial_failure_keeps_what_cannot_be_decoded_for_the_dead_letter_to_come() -> None:
    outcome = await attempt(PartialFailure({"a": "x"}), entry("a"), entry("b"), broken("bad"))
    assert retry_of(outcome).failed == [b"a", b"bad"]
    outcome = await attempt(PartialFailure({"a": "x"}), entry("a"), entry("b"), broken("bad"), attempt=3)
    assert [letter.ids for letter in close_of(outcome).dead_letters] == [[b"a"], [b"bad"]]


# policies and strategies of the user's that fail


def unknown_policy(key: str) -> Policy:
    raise KeyError(key)


def policy_without_cool_down(key: str) -> Policy:
    return Policy(minimum_delay=lambda _: nan)


@pytest.mark.parametrize(
    ("policy", "error"),
    [(unknown_policy, "KeyError: 'key'"), (policy_without_cool_down, "minimum_delay")],
)
async def test_a_policy_function_that_raises_and_a_cool_down_that_is_no_duration_fail_the_attempt(
    policy: Callable[[str], Policy], error: str
) -> None:
    outcome = await attempt(AssertionError("called"), entry("a"), policy=policy)
    assert outcome.result == "failed"
    assert error in retry_of(outcome).error


async def test_the_cool_down_is_the_strategy_s_for_this_iteration() -> None:
    growing = Policy(minimum_delay=lambda iteration: 100.0 * iteration)
    assert close_of(await attempt(None, entry("a"), policy=lambda key: growing)).cool_ms == 400_000


async def test_a_retry_strategy_that_fails_lets_the_digest_wait_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    waits = iter([1.0, 1.0, nan])

    async def callback(digest: Digest[JSON]) -> None:
        raise ValueError

    dispatcher = dispatcher_to(callback, retry=RetryPolicy(3, lambda _: next(waits)))
    delays = [retry_of(await delivered(dispatcher, entry("a"))).delay_ms for _ in range(4)]
    assert delays == [1000, 1000, 60_000, 60_000]
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2


async def test_a_callback_that_is_no_async_function_has_delivered_and_is_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def plain(digest: Digest[JSON]) -> None:
        pass

    outcome = await delivered(dispatcher_to(cast("Callback[JSON]", plain)), entry("a"))
    assert outcome.result == "delivered"
    assert "must be an async function" in caplog.text


async def send(digest: Digest[JSON]) -> None: ...


def generate(digest: Digest[JSON]) -> Iterator[None]:
    yield


async def generate_slowly(digest: Digest[JSON]) -> AsyncIterator[None]:
    yield


async def forget_to_await(digest: Digest[JSON]) -> object:
    return send(digest)


def forget_to_call(digest: Digest[JSON]) -> object:
    return partial(send)


@pytest.mark.parametrize("callback", [forget_to_call, forget_to_await, generate, generate_slowly])
@pytest.mark.filterwarnings("ignore:coroutine 'send' was never awaited")
async def test_a_callback_that_returns_what_never_ran_has_failed(callback: Any) -> None:
    outcome = await delivered(dispatcher_to(callback), entry("a"))
    assert outcome.result == "failed"
    assert "which did not run: await it" in retry_of(outcome).error
