from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from math import nan
from typing import Any, cast
from unittest.mock import ANY

import anyio
import pytest
from engines import VirtualLoop, forever
from hypothesis import given
from hypothesis import strategies as st

from aiodigest import JSON, Digest, JSONCodec, OutcomeUnknown, PartialFailure, Policy, Reject, RetryAfter, RetryPolicy
from aiodigest.backend import Close, Closed, Lease, NewDeadLetter, Retry
from aiodigest.codecs import reader_of
from aiodigest.errors import CodecError
from aiodigest.records.entries import CONTEXT_SIZE, identity_of, pack, stamp
from aiodigest.timing.hours import Hours
from aiodigest.worker.contents import MANY, SMALL, TURN, read, read_at_once
from aiodigest.worker.delivery import Aside, Call, Callback, Dispatcher, Outcome
from aiodigest.worker.reasons import describe

pytestmark = pytest.mark.virtual_time

CODEC = JSONCodec[JSON]()
TIMEOUT = 30.0
LEASE_MS = 60_000
MINUTE = 60_000
NOON = 12 * 60 * MINUTE
LIMITS = Policy().terms.limits
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0 * attempt)

Reply = BaseException | Callable[[Digest[JSON]], Awaitable[object]] | None


def entry(record_id: str, value: JSON = 1, timestamp: int = 5) -> bytes:
    return pack(record_id.encode(), timestamp * 1_000_000, CODEC.encode(value))


def named(*record_ids: str) -> list[bytes]:
    return [identity_of(record_id.encode()) for record_id in record_ids]


def broken(record_id: str) -> bytes:
    """An entry whose value no codec of ours wrote."""
    return pack(record_id.encode(), 5_000_000, b"\xff not ours")


A, B, C, OLD = entry("a"), entry("b"), entry("c"), entry("old", timestamp=1)
BAD = broken("bad")


def lease_of(entries: Sequence[bytes], **changes: Any) -> Lease:
    facts: dict[str, Any] = {"attempt": 1, "iteration": 4, "dropped": 2, "due_ms": 0, "size": len(entries), **changes}
    return Lease("key", "token", "digest-1", entries=tuple(entries), **facts)


async def usual(key: str, now_ms: int) -> Policy:
    return Policy()


def noon() -> tuple[int, int]:
    """A clock that stands still."""
    return NOON, NOON


async def delivered(dispatcher: Dispatcher[JSON], *entries: bytes, call: Call | None = None, **changes: Any) -> Outcome:
    """What comes of delivering ``entries``."""
    prepared = await dispatcher.prepare(lease_of(entries, **changes), entries)
    return await dispatcher.deliver(prepared, call or Call(noon))


def dispatcher_to(callback: Callback[JSON]) -> Dispatcher[JSON]:
    return Dispatcher(callback, CODEC, usual, RETRY, LEASE_MS / 1000, TIMEOUT)


async def attempt(
    reply: Reply, *entries: bytes, policy: Callable[..., Awaitable[Policy]] = usual,
    retry: RetryPolicy | Callable[..., Awaitable[RetryPolicy]] = RETRY, call: Call | None = None, **changes: Any,
) -> Outcome:  # fmt: skip
    """What comes of delivering ``entries`` to a callback, or to one that raises this error or only returns."""

    async def callback(digest: Digest[JSON]) -> None:
        if reply is not None:
            raise cast("BaseException", reply)

    calling = reply if callable(reply) else callback
    dispatcher = Dispatcher(calling, CODEC, policy, retry, LEASE_MS / 1000, TIMEOUT)
    return await delivered(dispatcher, *entries, call=call, **changes)


async def plain(reply: Reply, *entries: bytes, **options: Any) -> Outcome:
    """The same, whatever the error was."""
    return (await attempt(reply, *entries, **options))._replace(error=None)


def closing(taken: int, delivered: int, *letters: NewDeadLetter, aged: int = 0, counts: bool = True) -> Close:
    return Close(ANY, taken, delivered, 300_000, LIMITS, LEASE_MS, aged, counts, [*letters])


def retrying(error: str, delay_ms: int = 10_000, **options: Any) -> Retry:
    return Retry(ANY, delay_ms, error, LIMITS, **options)


def retry_of(outcome: Outcome) -> Retry:
    assert isinstance(outcome.report, Retry)
    return outcome.report


async def test_records_are_in_order_of_their_timestamps_in_utc_and_then_of_arrival() -> None:
    entries = [entry("a", timestamp=9), entry("b", timestamp=5), entry("c", timestamp=9), entry("d", timestamp=1)]
    records = (await read(entries, CODEC.decode)).records
    assert [record.id for record in records] == ["d", "b", "a", "c"]
    assert records[0].timestamp.isoformat() == "1970-01-01T00:00:01+00:00"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3))))
async def test_the_last_entry_of_an_id_wins(adds: list[tuple[str, int]]) -> None:
    contents = await read([entry(record_id, value) for record_id, value in adds], CODEC.decode)
    assert {record.id: record.value for record in contents.records} == dict(adds)
    assert len(contents.records) == len(dict(adds))


@pytest.mark.parametrize(
    ("bad", "timestamp"),
    [
        (broken("dated"), 5),
        *(
            (bad, 0)
            for bad in (b"", b"\x0f no entry at all", pack(b"far", 10**18, b"\x011"), pack(b"\xff", 0, b"\x011"))
        ),
    ],
)
async def test_what_cannot_be_decoded_is_kept_raw_with_its_timestamp_beside_others(bad: bytes, timestamp: int) -> None:
    contents = await read([entry("a"), bad, entry("b")], CODEC.decode)
    assert [record.id for record in contents.records] == ["a", "b"]
    assert [record.timestamp.timestamp() for record in contents.raw] == [timestamp]
    assert len(contents.undecodable) == 1


class Odd(BaseException):
    """What no `except Exception` catches, such as a panic of Rust code."""


@pytest.mark.parametrize("error", [ZeroDivisionError("wild"), Odd("wild"), SystemExit("wild"), GeneratorExit("wild")])
async def test_a_codec_may_raise_anything(error: BaseException) -> None:
    class Wild:
        def encode(self, value: int, /) -> bytes:
            return b""

        def decode(self, data: bytes, /) -> int:
            raise error

    assert (await read([entry("a")], Wild().decode)).undecodable == {identity_of(b"a"): f"{type(error).__name__}: wild"}


def arrived(record_id: bytes | None, value: JSON, at_ms: int, context: bytes = b"") -> bytes:
    return stamp(pack(record_id, None, CODEC.encode(value), context), at_ms)


@given(st.lists(st.tuples(st.none() | st.text(min_size=1, max_size=130), st.booleans(), st.integers(0, 5))))
async def test_a_digest_that_is_read_at_once_has_what_is_read_record_by_record(facts: Any) -> None:
    entries = [arrived(None if name is None else name.encode(), value, at_ms) for name, value, at_ms in facts]
    load = reader_of(CODEC)
    assert load is not None
    assert read_at_once(entries, load) in (await read(entries, CODEC.decode), None)


PLAIN = [arrived(b"a", {"b": None}, 7), arrived(None, "c", 5)]


@pytest.mark.parametrize(
    "other",
    [
        entry("b"),
        arrived(b"a", 2, 8),
        arrived(b"b", "long " * 500, 8),
        arrived(b"b", 1, 8, bytes(CONTEXT_SIZE)),
        arrived(b"x" * 128, 1, 8),
        arrived(b"\xff", 1, 8),
        arrived(b"b", 1, 2**45),
        stamp(pack(b"b", None, b"\x01not JSON"), 8),
        pack(b"b", None, b""),
        b"",
    ],
    ids=[
        "timestamp", "twice", "compressed", "traced", "a long id", "no text", "far away", "no JSON", "cut off", "none",
    ],
)  # fmt: skip
def test_what_is_unusual_is_not_read_at_once(other: bytes) -> None:
    load = reader_of(CODEC)
    assert load is not None
    assert read_at_once([*PLAIN, other], load) is None
    contents = read_at_once(PLAIN, load)
    assert contents is not None
    assert [record.value for record in contents.records] == ["c", {"b": None}]


async def test_values_that_may_take_any_time_are_not_read_at_once() -> None:
    class Mine(JSONCodec[JSON]):
        def decode(self, data: bytes, /) -> JSON:
            return "mine"

    assert reader_of(Mine()) is None
    assert reader_of(JSONCodec(dict[str, int])) is None
    assert reader_of(cast("Any", Slow())) is None
    dispatcher = dispatcher_to(asyncio.Queue[Digest[JSON]]().put)
    assert dispatcher.at_hand(lease_of(PLAIN)) is not None
    for changes in (
        {"cut_ms": 1},
        {"later": [b"1"]},
        {"lost": 1},
        {"size": 3},
        {"part": 1},
        {"bound": 30},
        {"attempt": 9},
    ):
        assert dispatcher.at_hand(lease_of(PLAIN, **changes)) is None


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
    contents = await read([pack(b"%d" % number, 0, slow.encode(number)) for number in range(20)], slow.decode)
    assert len(contents.records) == 20
    assert turns >= 19, "of decoding"
    turns = 0
    contents = await read([entry("a", number) for number in range(10 * MANY)], CODEC.decode)
    turning.cancel()
    await asyncio.wait([turning])
    assert len(contents.records) == 1
    assert turns >= 10, "of taking entries apart"


async def test_large_digests_are_read_one_after_the_other_and_small_ones_beside_them() -> None:
    slow, many = Slow(), SMALL[0] + 1
    dispatcher = Dispatcher(asyncio.Queue[Digest[int]]().put, slow, usual, RETRY, LEASE_MS / 1000, TIMEOUT)

    async def prepare(value: int, number: int) -> None:
        entries = [pack(b"%d" % each, 0, slow.encode(value)) for each in range(number)]
        await dispatcher.prepare(lease_of(entries), entries)

    await asyncio.gather(prepare(1, many), prepare(2, many), prepare(0, 1))
    assert slow.decoded.index(0) < 5
    slow.decoded.remove(0)
    assert slow.decoded == [1] * many + [2] * many


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_is_described_in_one_bounded_line_that_can_be_stored() -> None:
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert describe(CodecError("ours")) == "ours"
    assert describe(Mute()) == "Mute: a Mute"
    assert len(describe(ValueError("x" * 10_000))) == 500
    describe(ValueError("a lone surrogate \ud800")).encode()


async def test_the_callback_gets_the_digest_that_the_lease_names() -> None:
    seen: list[Digest[JSON]] = []

    async def keep(digest: Digest[JSON]) -> None:
        seen.append(digest)

    await attempt(keep, entry("a", {"x": 1}), attempt=2)
    [digest] = seen
    assert (digest.key, digest.id, digest.attempt, digest.dropped, digest.iteration) == ("key", "digest-1", 2, 2, 5 - 1)
    assert [(record.id, record.value) for record in digest.records] == [("a", {"x": 1})]


async def test_returning_closes_the_digest_under_the_policy_of_now() -> None:
    assert await plain(None, A, B, A) == Outcome(closing(3, 2), "delivered", 2, True)
    growing = Policy(minimum_delay=lambda iteration: 100.0 * iteration, capacity=5)

    async def of_now(key: str, now_ms: int) -> Policy:
        return growing

    outcome = await attempt(None, A, policy=of_now)
    assert outcome.report == closing(1, 1)._replace(cool_ms=400_000, limits=growing.terms.limits)


@pytest.mark.parametrize(
    ("reply", "number", "outcome"),
    [
        (ValueError("smtp is down"), 2, Outcome(retrying("ValueError: smtp is down", 20_000), "failed", success=False)),
        (ValueError("no more"), 3,
         Outcome(closing(1, 0, NewDeadLetter("ValueError: no more")), "buried", success=False)),
        (Reject("address gone"), 1, Outcome(closing(1, 0, NewDeadLetter("address gone")), "rejected")),
        (Reject(), 1, Outcome(closing(1, 0, NewDeadLetter("rejected by the callback")), "rejected")),
        # a repeat of it has the same id and records, and its receiver may be broken
        (OutcomeUnknown("no answer"), 2,
         Outcome(retrying("no answer", 20_000, unknown=True), "unknown", success=False)),
        (OutcomeUnknown("no answer"), 3, Outcome(closing(1, 0, NewDeadLetter("no answer")), "buried", success=False)),
        (RetryAfter(timedelta(minutes=2)), 3, Outcome(retrying(ANY, 120_000, give_back=True), "deferred")),
        # a pause stops this process for as long, and a second at least
        *(
            (RetryAfter(delay, pause=True), 1, Outcome(retrying(ANY, ms, give_back=True), "deferred", pause=ms / 1000))
            for delay, ms in ((0, 1000), (timedelta(milliseconds=5), 1000), (1, 1000), (90, 90_000))
        ),
    ],
)  # fmt: skip
async def test_raising_lets_a_digest_wait_or_be_buried(reply: BaseException, number: int, outcome: Outcome) -> None:
    assert await plain(reply, A, attempt=number) == outcome


@pytest.mark.parametrize(
    "error", [SystemExit(1), asyncio.CancelledError(), GeneratorExit(), Odd(), TimeoutError("theirs")]
)
async def test_whatever_a_callback_raises_is_a_failure_of_this_delivery_alone(error: BaseException) -> None:
    assert await plain(error, A) == Outcome(retrying(ANY), "failed", success=False)


async def late_by_itself(digest: Digest[JSON]) -> None:
    with anyio.fail_after(1):
        await forever(digest)


def when_cancelled(error: BaseException | None) -> Callable[[Digest[JSON]], Awaitable[object]]:
    """A callback that raises this when it is cancelled, or returns."""

    async def callback(digest: Digest[JSON]) -> None:
        with suppress(asyncio.CancelledError):
            await forever(digest)
        if error is not None:
            raise error

    return callback


@pytest.mark.parametrize(
    ("callback", "outcome"),
    [
        (late_by_itself, Outcome(retrying(ANY), "failed", success=False)),
        (forever, Outcome(retrying(ANY, unknown=True), "timeout", success=False)),
        (when_cancelled(ConnectionError()), Outcome(retrying(ANY, unknown=True), "timeout", success=False)),
        (when_cancelled(None), Outcome(closing(1, 1), "delivered", 1, True)),
    ],
)
async def test_only_a_callback_that_overstays_has_an_unknown_outcome(callback: Reply, outcome: Outcome) -> None:
    assert await plain(callback, A) == outcome


async def test_each_callback_has_its_whole_time_whenever_others_began_and_ended() -> None:
    loop, took = asyncio.get_running_loop(), dict[str, float]()

    async def callback(digest: Digest[JSON]) -> None:
        [record] = digest.records
        began = loop.time()
        try:
            await asyncio.sleep(float(record.id))
        finally:
            took[record.id] = loop.time() - began

    dispatcher, results = dispatcher_to(callback), list[str]()
    for seconds in ("5", "100", "29", "1000", "2"):
        task = asyncio.create_task(delivered(dispatcher, entry(seconds)))
        task.add_done_callback(lambda task: results.append(task.result().result))
        await asyncio.sleep(7)
    await asyncio.sleep(2 * TIMEOUT)
    assert took == {"5": 5, "2": 2, "100": TIMEOUT, "29": 29, "1000": TIMEOUT}
    assert results == ["delivered", "delivered", "timeout", "delivered", "timeout"]


@pytest.mark.parametrize(
    ("callback", "call"),
    [
        (forever, None),  # it is cancelled from outside
        (forever, Call(noon, cancelled=True)),
        *((when_cancelled(why), Call(noon, cancelled=True)) for why in (ValueError(), SystemExit(), GeneratorExit())),
    ],
)
async def test_a_delivery_that_its_worker_cuts_short_reports_nothing(callback: Reply, call: Call | None) -> None:
    task = asyncio.create_task(attempt(callback, A, call=call))
    asyncio.get_running_loop().call_later(1, task.cancel)
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_callback_whose_task_a_library_has_cancelled_fails_with_what_it_raises() -> None:
    """So do libraries that time out and do not take their cancellation back, as aiohttp before 3.10."""
    task = asyncio.create_task(attempt(when_cancelled(TimeoutError("theirs")), A))
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
        (group(RetryAfter(5), OutcomeUnknown("x"), ValueError("y"), OutcomeUnknown("z")), "unknown", "x; z"),
        (group(OutcomeUnknown("x"), Reject("y")), "rejected", "y"),
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
    coroutine = attempt(forever, A)
    task = asyncio.create_task(coroutine)
    await asyncio.sleep(1)
    coroutine.close()  # as of a task that is pending when its loop is closed
    task.cancel()
    await asyncio.wait([task])
    assert "already awaited" in str(task.exception())  # which is the task's own, and no outcome


@pytest.mark.parametrize(
    ("lost", "last", "reason"),
    [
        (0, "ValueError: earlier", "ValueError: earlier"),
        (0, "", "no attempt is left"),
        (14, "", "its worker died or lost the server 14 times in a row before it reported"),
        (5, "boo", "its worker died or lost the server 5 times in a row before it reported; before that: boo"),
    ],
)
async def test_a_digest_without_an_attempt_left_is_buried_undecoded_with_the_reason(
    lost: int, last: str, reason: str
) -> None:
    outcome = await plain(AssertionError("called"), broken("read"), attempt=4, last_error=last, lost=lost)
    assert outcome == Outcome(closing(1, 0, NewDeadLetter(reason)), "buried")


@pytest.mark.parametrize("delay", [nan, -1, "soon", None])
async def test_retry_after_with_what_is_no_delay_is_a_failure(delay: Any) -> None:
    outcome = await plain(RetryAfter(delay), A)
    assert outcome == Outcome(retrying(ANY), "failed", success=False)
    assert "RetryAfter" in retry_of(outcome).error


BOTH = PartialFailure({"a": "bounced", "b": "full"})
BAD_ALONE = NewDeadLetter(ANY, named("bad"))


@pytest.mark.parametrize(
    ("failed", "entries", "number", "outcome"),
    [
        (PartialFailure({}), [A], 1, Outcome(closing(1, 1), "delivered", 1, True)),
        (PartialFailure(["b"]), [A, B, C], 1,
         Outcome(retrying("b: failed", taken=3, failed=named("b"), delivered=2), "partial", 2)),
        (BOTH, [A, B], 1, Outcome(retrying("a: bounced; b: full"), "failed")),
        # what is too old goes
        (BOTH, [A, B, OLD], 1, Outcome(retrying(ANY, taken=3, failed=named("a", "b"), aged=1), "partial")),
        # what cannot be decoded is kept for the dead letter to come
        (PartialFailure({"a": "x"}), [A, B, BAD], 1,
         Outcome(retrying("a: x", taken=3, failed=named("a", "bad"), delivered=1), "partial", 1)),
        (PartialFailure({"a": "x"}), [A, B, BAD], 3,
         Outcome(closing(3, 1, NewDeadLetter("a: x", named("a")), BAD_ALONE), "buried", 1)),
        (BOTH, [A, B, BAD], 3,
         Outcome(closing(3, 0, NewDeadLetter("a: bounced; b: full", named("a", "b")), BAD_ALONE), "buried")),
        (PartialFailure({"a": "\ud800\n" + "x" * 600}), [A], 1, Outcome(retrying(f"a: ? {'x' * 495}"), "failed")),
    ],
)  # fmt: skip
async def test_a_partial_failure_keeps_what_failed_and_closes_the_rest(
    failed: PartialFailure, entries: list[bytes], number: int, outcome: Outcome
) -> None:
    assert await plain(failed, *entries, attempt=number, cut_ms=5000) == outcome


@pytest.mark.parametrize("failed", [{"nobody": "x"}, {"a": "x", "nobody": "y"}, {"\ud800": "x"}, {1: "x"}, {None: "x"}])
async def test_a_partial_failure_of_unknown_ids_keeps_all(failed: Any, caplog: pytest.LogCaptureFixture) -> None:
    outcome = await plain(PartialFailure(failed), A, B)
    assert outcome == Outcome(retrying(ANY), "failed")
    assert "PartialFailure names" in retry_of(outcome).error
    assert "no record of it" in caplog.text


async def test_a_record_that_cannot_be_decoded_is_set_aside_alone(caplog: pytest.LogCaptureFixture) -> None:
    outcome = await plain(None, A, BAD, B)
    assert caplog.records[0].getMessage().startswith("1 record of 'key' cannot be decoded, and became a dead letter: ")
    assert outcome == Outcome(closing(3, 2, BAD_ALONE), "delivered", 2, True)
    assert "first byte" in outcome.reason


async def test_a_policy_function_that_leaves_its_task_cancelled_fails_its_delivery_alone() -> None:
    async def choose(key: str, now_ms: int) -> Policy:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        raise ValueError("no policy")

    task = asyncio.create_task(attempt(None, entry("a"), policy=choose))
    assert retry_of(await task).error == "ValueError: no policy"
    assert not task.cancelling()


async def test_what_a_callback_raised_is_freed_in_no_cycle(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_of_failures_of_a_kind_only_the_first_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
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
    outcome = await plain(AssertionError("called"), broken("x"), broken("y"))
    assert outcome == Outcome(closing(2, 0, NewDeadLetter(ANY, named("x", "y"))), "buried")  # a letter a reason


@pytest.mark.parametrize("attempts", [1, 4])  # of which there may be three
async def test_a_digest_left_empty_by_max_age_is_closed_without_a_callback_or_a_cool_down(attempts: int) -> None:
    outcome = await plain(AssertionError("called"), OLD, cut_ms=2000, attempt=attempts)
    assert outcome == Outcome(closing(1, 0, aged=1, counts=False), "empty")


async def test_a_policy_function_that_raises_and_a_cool_down_that_is_no_duration_fail_the_attempt() -> None:
    async def unknown(key: str, now_ms: int) -> Policy:
        raise KeyError(key)

    async def endless(key: str, now_ms: int) -> Policy:
        return Policy(minimum_delay=lambda _: nan)

    for policy, error in ((unknown, "KeyError: 'key'"), (endless, "minimum_delay")):
        outcome = await attempt(AssertionError("called"), A, policy=policy)
        assert (outcome.result, error in retry_of(outcome).error) == ("failed", True)


@pytest.mark.parametrize(
    ("earliest", "latest", "wait"),
    [(7, 7, 3), (9, 9, 1), (10, 12, 0), (9, 10, 1), (10, 19, 0), (19, 20, 24 * 60 - 9), (20, 20, 24 * 60 - 10),
     (19, 24 * 60 + 10, 24 * 60 - 9)],
)  # fmt: skip
async def test_a_callback_begins_only_if_the_hours_are_open_whatever_the_server_s_clock_may_tell(
    earliest: int, latest: int, wait: int
) -> None:
    async def daily(key: str, now_ms: int) -> Policy:
        return Policy(hours=Hours("00:10-00:20"))

    call = Call(lambda: (MINUTE * earliest, MINUTE * latest))
    if wait:
        with pytest.raises(Aside) as aside:
            await attempt(AssertionError("called"), A, policy=daily, call=call)
        assert aside.value.aside_ms == wait * MINUTE
    assert (await attempt(None, A, policy=daily, call=call, passes=True)).result == "delivered"


@pytest.mark.parametrize(("late", "wait"), [(18, 0), (20, 24 * 60 - 10)])
async def test_hours_are_looked_at_anew_when_the_permit_to_begin_has_come(late: int, wait: int) -> None:
    times = [15]

    async def daily(key: str, now_ms: int) -> Policy:
        return Policy(hours=Hours("00:10-00:20"))

    async def permit() -> None:
        times[:] = [late]

    call = Call(lambda: (MINUTE * times[0], MINUTE * times[0]), permit=permit)
    if wait:
        with pytest.raises(Aside) as aside:
            await attempt(AssertionError("called"), A, policy=daily, call=call)
        assert aside.value.aside_ms == wait * MINUTE
    else:
        assert (await attempt(None, A, policy=daily, call=call)).result == "delivered"
    times[:] = [15]
    assert (await attempt(None, A, policy=daily, call=call, passes=True)).result == "delivered"


async def test_what_is_put_aside_by_its_hours_asks_for_no_permit_and_days_that_cannot_be_told_fail_the_attempt() -> (
    None
):
    minutes = [0]
    days = Hours("00:10-00:20", skip=lambda day: 1 // (minutes[0] < 24 * 60) < 1)

    async def daily(key: str, now_ms: int) -> Policy:
        return Policy(hours=days)

    async def permit() -> None:
        minutes[0] += 40 * 24 * 60

    call = Call(lambda: (MINUTE * minutes[0], MINUTE * minutes[0]), permit=permit)
    with pytest.raises(Aside):
        await attempt(AssertionError("called"), A, policy=daily, call=call)
    assert minutes == [0]
    minutes[0] = 15
    outcome = await attempt(AssertionError("called"), A, policy=daily, call=call)
    assert (outcome.result, "ZeroDivisionError" in outcome.reason) == ("failed", True)


async def own_tries(key: str, now_ms: int) -> RetryPolicy:
    return RETRY


async def test_what_is_read_late_is_looked_at_again_before_its_callback_begins() -> None:
    """As where the tries of a timeline are a function's, and its digest is read once they are known."""

    async def daily(key: str, now_ms: int) -> Policy:
        return Policy(hours=Hours("00:10-00:20"))

    times = iter([19, 19, 20])

    def clock() -> tuple[int, int]:
        return (now := next(times) * MINUTE), now

    with pytest.raises(Aside) as aside:
        await attempt(AssertionError("called"), A, policy=daily, retry=own_tries, call=Call(clock))
    assert aside.value.aside_ms == (24 * 60 - 10) * MINUTE

    def stops() -> None:
        raise Aside(0)

    with pytest.raises(Aside) as aside:
        await attempt(AssertionError("called"), A, retry=own_tries, call=Call(noon, look=stops))
    assert not aside.value.aside_ms


async def test_a_retry_strategy_that_fails_lets_the_digest_wait_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    waits = iter([1.0, 1.0, nan])
    retry = RetryPolicy(3, lambda _: next(waits))
    delays = [retry_of(await attempt(ValueError(), A, retry=retry)).delay_ms for _ in range(4)]
    assert delays == [1000, 1000, 60_000, 60_000]
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 2


async def test_a_callback_that_is_not_async_delivered_and_is_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    def plain(digest: Digest[JSON]) -> None:
        pass

    outcome = await attempt(cast("Callback[JSON]", plain), A)
    assert outcome.result == "delivered"
    assert "must be an async function" in caplog.text


async def generate_slowly(digest: Digest[JSON]) -> AsyncIterator[None]:
    yield


async def forget_to_await(digest: Digest[JSON]) -> object:
    return forever(digest)


NEVER_RUN: list[Callable[[Any], object]] = [lambda _: partial(forever), lambda _: (one for one in "")]


@pytest.mark.parametrize("callback", [*NEVER_RUN, forget_to_await, generate_slowly])
@pytest.mark.filterwarnings("ignore:coroutine 'forever' was never awaited")
async def test_a_callback_that_returns_what_never_ran_has_failed(callback: Any) -> None:
    outcome = await attempt(callback, A)
    assert (outcome.result, "which did not run: await it" in retry_of(outcome).error) == ("failed", True)
