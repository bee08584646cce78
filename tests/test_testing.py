"""``TestEngine``: the user's own engine in the user's own tests, which must do there what it does in production."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import redis
from engines import Inbox, delivering, forever, now, patiently, policy, virtual_time
from fastapi import FastAPI
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from ports import free_port
from servers import Server, server_binary
from starlette.testclient import TestClient
from userland import DEADLINE

from aiodigest import JSON, BackoffMode, Delivery, Digest, DigestEngine, Entry, OutcomeUnknown, Policy, RetryPolicy
from aiodigest.backends.embedded.server import EmbeddedServer
from aiodigest.errors import BackendUnavailable, ConfigurationError, InvalidArgument, PartialFailure, Reject, RetryAfter
from aiodigest.integrations.opentelemetry import instrument
from aiodigest.testing import TestEngine
from aiodigest.timing.calendar import At
from aiodigest.timing.hours import Hours

START = datetime(2030, 1, 1, tzinfo=UTC)
RETRY = RetryPolicy(max_attempts=3, backoff=lambda attempt: 10.0)
MINUTE = timedelta(minutes=1)


def engine(**options: Any) -> DigestEngine[JSON]:
    """An engine at whose URL nobody listens."""
    return DigestEngine[JSON](f"redis://127.0.0.1:{free_port()}/0", namespace="test", **options)


def values(digests: Sequence[Digest[JSON]]) -> list[list[JSON]]:
    return [[record.value for record in digest.records] for digest in digests]


class Callback(Inbox):
    """Notes when each digest came by the clock of a test, too."""

    def __init__(self, t: TestEngine[JSON], *replies: Exception | Callable[[Digest[JSON]], Any] | None) -> None:
        super().__init__(*replies)
        self.came: list[tuple[float, list[JSON]]] = []
        self._t = t

    async def __call__(self, digest: Digest[JSON]) -> None:
        self.came.append(((self._t.now - START).total_seconds(), [record.value for record in digest.records]))
        await super().__call__(digest)


@asynccontextmanager
async def rehearsing(
    *replies: Exception | Callable[[Digest[JSON]], Any] | None, **options: Any
) -> AsyncGenerator[tuple[DigestEngine[JSON], TestEngine[JSON], Callback]]:
    """An engine under test, and its callback."""
    mail = engine(**options)
    async with TestEngine(mail, start=START) as t:
        callback = Callback(t, *replies)
        mail.deliver(callback)
        yield mail, t, callback


async def test_each_digest_is_delivered_at_its_own_due_time() -> None:
    async with rehearsing(policy=Policy(minimum_delay=300, increment_delay=30)) as (mail, t, callback):
        assert await mail.add("a", 1)
        await t.advance()
        assert [await mail.add("a", number) for number in (2, 3)] == [False, False]
        await t.advance(seconds=100)
        await mail.add("b", 4)
        await t.advance(minutes=30)
        assert callback.came == [(0, [1]), (100, [4]), (360, [2, 3])]
        assert t.delivered[1].records[0].timestamp == START + timedelta(seconds=100), "of the clock"
        assert t.now == START + timedelta(seconds=1900)


async def test_functions_of_a_policy_and_of_retries_see_the_clock_of_the_test() -> None:
    seen: list[datetime] = []

    def by_hour(key: str, now: datetime) -> Policy:
        seen.append(now)
        return policy(initial_delay=60 if now.hour < 12 else 0)

    async def more_by_day(key: str, now: datetime) -> RetryPolicy:
        seen.append(now)
        return RetryPolicy(2, lambda _: 10.0) if now.hour < 12 else RetryPolicy(1)

    async with rehearsing(ValueError(), ValueError(), policy=by_hour, retry=more_by_day) as (mail, t, _):
        assert not await mail.add("key", 1, record_id="1")
        assert await mail.add_many([Entry("key", 2, "2")]) == [False]
        assert await mail.remove("key", "2")
        assert await mail.reschedule("key") == START + MINUTE
        assert seen == [START] * 4
        await t.advance(hours=12)
        assert seen[4:] == [START + timedelta(seconds=each) for each in (60, 60, 70, 70)]
        [letter] = [letter async for letter in mail.dead_letters()]
        assert letter.attempt == 2
        assert await mail.replay(letter.id)
        assert seen[-1] == t.now == START + timedelta(hours=12)
        await t.advance()
        assert t.attempts[-1].result == "delivered"


@pytest.mark.parametrize(
    ("chosen", "due"),
    [
        (Policy(), timedelta(seconds=330)),  # the cool-down, and the push of a record that comes in it
        (Policy(minimum_delay=lambda number: 100.0 * number), timedelta(seconds=130)),
        (Policy.window(600), timedelta(seconds=600)),
        (Policy.debounce(3), timedelta(seconds=3)),
        (Policy.balanced(60, gap=10), timedelta(seconds=60)),
        (Policy.balanced(60, gap=90), timedelta(seconds=90)),
        (Policy.at(At.daily("14:30")), timedelta(hours=14, minutes=30)),
        (Policy(minimum_delay=60, hours=Hours("08:00-00:01")), timedelta(hours=8)),
    ],
)
async def test_a_digest_tells_when_the_next_one_is_due(chosen: Policy, due: timedelta) -> None:
    async with rehearsing(policy=chosen) as (mail, t, callback):
        await mail.add("key", 1)
        await mail.flush("key")
        await t.advance()
        [digest] = callback.digests
        assert digest.next_due == START + due
    assert Digest("key", []).next_due is None


async def test_a_retry_by_key_tries_some_sooner_and_others_more_often() -> None:
    def by_key(key: str) -> RetryPolicy:
        return RetryPolicy(2, lambda _: 1.0) if key == "alert" else RetryPolicy(3, lambda _: 60.0)

    failures = [ValueError()] * 5
    async with rehearsing(*failures, retry=by_key, policy=policy()) as (mail, t, callback):
        await mail.add("alert", 1)
        await mail.add("news", 2)
        await t.advance(hours=1)
        assert sorted(callback.came) == [(0, [1]), (0, [2]), (1, [1]), (60, [2]), (120, [2])]
        assert {letter.key: letter.attempt async for letter in mail.dead_letters()} == {"alert": 2, "news": 3}


@pytest.mark.parametrize("wrong", [None, Policy(), RetryPolicy(max_attempts=1000, backoff=lambda _: 1_000.0)])
async def test_a_retry_function_that_returns_what_may_not_be_fails_the_attempt(wrong: Any) -> None:
    answers = iter([wrong])
    usual = RetryPolicy(3, lambda _: 10.0)

    def by_turns(key: str) -> Any:
        return next(answers, usual)

    async with rehearsing(retry=by_turns, policy=policy()) as (mail, t, callback):
        await mail.add("key", 1)
        await t.advance(hours=2)
        assert [attempt.result for attempt in t.attempts] == ["failed", "delivered"]
        assert values(callback.digests) == [[1]]
        assert ("retry span" if isinstance(wrong, RetryPolicy) else "must return a RetryPolicy") in t.attempts[0].reason


async def test_what_is_due_while_hours_are_closed_comes_at_the_opening_and_stays_due_when_it_was() -> None:
    closed = policy(initial_delay=1, hours=Hours("08:00-20:00"))
    async with rehearsing(policy=closed) as (mail, t, callback):
        await mail.add("key", 1)
        await t.advance(hours=7, minutes=59)
        assert not callback.came
        await mail.add("key", 2)
        await t.advance(hours=1)
        assert callback.came == [(8 * 3600, [1, 2])]
        assert t.attempts[0].attempt == 1
        await t.advance(hours=4)
        await mail.add("key", 3)
        await t.advance(seconds=1)
        assert values(callback.digests) == [[1, 2], [3]]


async def test_what_waited_for_an_opening_is_spread_over_the_time_after_it() -> None:
    spread = policy(initial_delay=1, hours=Hours("08:00-20:00", spread=100))
    async with rehearsing(policy=spread) as (mail, t, callback):
        for number in range(50):
            await mail.add(str(number), number)
        await t.advance(hours=9)
        times = [came - 8 * 3600 for came, _ in callback.came]
        assert len(set(times)) > 40
        assert min(times) >= 0
        assert max(times) < 100


async def test_nothing_is_delivered_until_the_test_says_so() -> None:
    async with rehearsing() as (mail, t, callback):
        await mail.add("a", 1)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody is there who might"
        assert callback.came == []
        assert (await mail.stats()).ready == 1
        await t.advance()
        assert callback.came == [(0, [1])]


async def test_no_timer_of_a_delivery_is_left_in_the_loop() -> None:
    loop: Any = asyncio.get_running_loop()
    async with rehearsing(policy=Policy(minimum_delay=1, increment_delay=0, maximum_delay=5)) as (mail, t, callback):
        for number in range(20):
            await mail.add(f"k{number}", number)
        await t.advance()
        assert len(callback.came) == 20
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]


async def test_the_clock_starts_at_the_real_time_if_no_other_is_given() -> None:
    before = datetime.now(UTC)
    with TestEngine(engine()) as t:
        assert before - MINUTE < t.now < before + MINUTE
        assert t.now.tzinfo is UTC


async def test_a_span_is_a_timedelta_or_what_makes_one() -> None:
    async with rehearsing() as (_, t, _):
        await t.advance(timedelta(hours=1))
        await t.advance(days=1, hours=2, minutes=3, seconds=4.5)
        assert t.now == START + timedelta(days=1, hours=3, minutes=3, seconds=4.5)


@pytest.mark.parametrize(
    ("name", "number"), [("", 5), ("minutes", -1), ("days", "5"), ("days", 10**12), ("seconds", nan), ("days", 3285)]
)
async def test_a_span_that_is_none_is_refused(name: str, number: Any) -> None:
    async with TestEngine(engine(), start=datetime(9998, 1, 1, tzinfo=UTC)) as t:  # near the end of all calendars
        with pytest.raises(InvalidArgument):
            await (t.advance(**{name: number}) if name else t.advance(number))
        assert t.now.year == 9998


@pytest.mark.parametrize(
    "options",
    [
        {"start": datetime(2030, 1, 1)}, {"start": 1.5}, {"start": datetime(1969, 1, 1, tzinfo=UTC)}, {"clock": START},
        {"engine": "redis://localhost"}, {"start": START, "clock": TestEngine(DigestEngine(namespace="test"))},
        {"clock": TestEngine(DigestEngine(namespace="test"))},
    ],
)  # fmt: skip
async def test_an_argument_that_cannot_be_used_is_refused(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"engine": engine(), **options}
    with pytest.raises((InvalidArgument, ConfigurationError), match=f"{next(iter(options))} must be "):
        async with TestEngine(**arguments):
            pass


async def test_an_engine_goes_back_to_its_own_server_with_nothing_of_the_test(server: Server, namespace: str) -> None:
    mail = DigestEngine[JSON](server.url, namespace=namespace)
    told: list[Delivery] = []
    async with TestEngine(mail) as t:
        mail.deliver(Callback(t))
        mail.observe(told.append)
        await mail.add("a", 1)
        await t.advance()
        assert (len(told), mail.activity.adds) == (1, 1)
    inbox = Inbox()
    async with mail.delivering(inbox):
        assert [timeline async for timeline in mail.timelines()] == []
        assert mail.activity.adds == 0
        await mail.add("a", 2)
        await inbox.digest()
    assert (inbox.values, len(told)) == ([[2]], 1)
    with pytest.raises(ConfigurationError, match="no callback"):
        async with mail.delivering():
            pass


async def test_an_embedded_server_is_not_started(folder: Path) -> None:
    mail = DigestEngine[JSON](f"embedded://{folder / 'data'}", namespace="test")
    async with TestEngine(mail) as t:
        await mail.add("a", 1)
        await t.advance()
    assert values(t.delivered) == [[1]]
    assert not (folder / "data").exists()


async def test_entering_the_engine_inside_changes_nothing() -> None:
    async with rehearsing() as (mail, t, callback):
        async with mail, mail.delivering(), mail.lifespan(None):
            await mail.add("a", 1)
            async with mail:
                pass
            await t.advance()
        await mail.add("b", 2)
        await t.advance()
        assert callback.came == [(0, [1]), (0, [2])]


async def test_run_waits_for_its_end_inside_too() -> None:
    async with rehearsing() as (mail, t, callback):
        running = asyncio.create_task(mail.run())
        await mail.add("a", 1)
        await t.advance()
        assert callback.came == [(0, [1])]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await mail.add("b", 2)


async def test_delivering_to_another_callback_does_that() -> None:
    async with rehearsing() as (mail, t, callback):
        other = Callback(t)
        async with mail.delivering(other):
            await mail.add("a", 1)
            await t.advance()
        await mail.add("b", 2)
        await t.advance()
        assert (other.came, callback.came) == ([(0, [1])], [(0, [2])])


async def test_an_engine_that_is_entered_is_refused(server: Server, namespace: str) -> None:
    mail = DigestEngine[JSON](server.url, namespace=namespace)
    async with mail:
        with pytest.raises(ConfigurationError, match="entered already"):
            async with TestEngine(mail):
                pass
        assert await mail.add("a", 1)


@pytest.mark.parametrize("on_server", [False, True])
async def test_a_test_engine_inside_one_of_the_same_engine_is_refused(on_server: bool) -> None:
    async with rehearsing() as (mail, t, callback):
        with pytest.raises(ConfigurationError, match="in a TestEngine already"):
            async with TestEngine(mail, server=on_server):
                pass
        await mail.add("a", 1)
        await t.advance()
        assert callback.came == [(0, [1])]


async def test_a_test_engine_that_is_entered_again_begins_anew_and_outside_of_it_there_is_no_time() -> None:
    mail = engine()
    t = TestEngine(mail, start=START)
    with pytest.raises(ConfigurationError, match="once it is entered"):
        _ = t.now
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="inside"):
            await t.advance()
        async with t:
            assert (t.now, t.delivered, t.attempts) == (START, [], [])
            await mail.add("a", 1)
            await t.advance()
            assert (len(t.delivered), len(t.attempts)) == (1, 1)
            await mail.add("b", 2)
            t.fail_next(RetryAfter(600, pause=True))
            t.fail_next(OSError(), times=5)
            await t.advance()
        assert (len(t.delivered), len(t.attempts)) == (1, 2), "they can be read when it was left"


async def test_a_failure_that_was_asked_for_is_raised_in_place_of_the_callback() -> None:
    async with rehearsing(retry=RETRY) as (mail, t, callback):
        await mail.add("a", 1)
        t.fail_next(ConnectionError("the mail server is away"), times=2)
        await t.advance(minutes=1)
        assert callback.came == [(20, [1])]
        assert values(t.delivered) == [[1]]


@pytest.mark.parametrize(
    ("replies", "options", "came", "attempts", "reasons"),
    [
        ([OSError(), OSError()], {}, [0, 10, 20], [(1, "failed", 0), (2, "failed", 0), (3, "delivered", 2)], []),
        ([OSError()] * 3, {}, [0, 10, 20], [(1, "failed", 0), (2, "failed", 0), (3, "buried", 0)], ["OSError:"]),
        ([Reject("no such mailbox")], {}, [0], [(1, "rejected", 0)], ["no such mailbox"]),
        ([RetryAfter(60)], {}, [0, 60], [(1, "deferred", 0), (1, "delivered", 2)], []),
        ([PartialFailure({"x": "no"})], {}, [0, 10], [(1, "partial", 1), (2, "delivered", 1)], []),
        ([PartialFailure({"x": "no"})], {"retry": RetryPolicy(max_attempts=1)}, [0], [(1, "buried", 1)], ["x: no"]),
        ([forever], {"delivery_timeout": 0.01}, [0, 10], [(1, "timeout", 0), (2, "delivered", 2)], []),
    ],
)  # fmt: skip
async def test_whatever_a_callback_does_comes_to_what_it_does_in_production(
    replies: list[Any], options: dict[str, Any], came: list[float], attempts: list[Any], reasons: list[str]
) -> None:
    async with rehearsing(*replies, **{"retry": RETRY, **options}) as (mail, t, callback):
        await mail.add_many([Entry("a", 1, "x"), Entry("a", 2, "y")])
        await t.advance(hours=1)
        assert [when for when, _ in callback.came] == came
        assert [(told.attempt, told.result, told.records) for told in t.attempts] == attempts
        assert [len(digest.records) for digest in t.delivered] == [number for _, _, number in attempts if number]
        assert [letter.reason async for letter in mail.dead_letters()] == reasons


async def test_while_a_callback_has_asked_for_a_pause_nothing_is_delivered() -> None:
    async with rehearsing(RetryAfter(60, pause=True), concurrency=1) as (mail, t, callback):
        await mail.add("a", 1)
        await mail.add("b", 2)  # due at the same time
        await t.advance(seconds=10)
        await mail.add("c", 3)
        await t.advance(seconds=49)
        assert callback.came == [(0, [1])]
        await t.advance(seconds=1)
        assert callback.came == [(0, [1]), (60, [2]), (60, [3]), (60, [1])]


async def test_a_large_digest_is_whole() -> None:
    for on_server in (False, True):
        mail = engine(policy=Policy(capacity=3000))
        async with TestEngine(mail, server=on_server) as t:
            await mail.add_many(Entry("a", number) for number in range(2500))
            await t.advance()
        assert values(t.delivered) == [list(range(2500))]


async def test_observers_are_told_of_every_attempt_and_may_raise() -> None:
    async with rehearsing(OSError(), retry=RETRY) as (mail, t, _):
        told: list[Delivery] = []

        @mail.observe
        def broken(delivery: Delivery) -> None:
            told.append(delivery)
            raise RuntimeError("an observer of no use")

        await mail.add("a", 1)
        await t.advance(minutes=1)
        assert told == t.attempts == [
            Delivery("a", told[0].digest_id, 1, "failed", 0, 0.0, 0.0, "OSError:"),
            Delivery("a", told[1].digest_id, 2, "delivered", 1, 0.0, 0.0),
        ]  # fmt: skip


@pytest.mark.parametrize(("error", "times"), [("boo", 1), (OSError, 1), (OSError(), 0)])
async def test_only_exceptions_can_be_asked_for(error: Any, times: int) -> None:
    with pytest.raises(InvalidArgument):
        TestEngine(engine()).fail_next(error, times)


async def test_no_more_than_the_engines_concurrency_is_delivered_at_once() -> None:
    running, most = 0, 0

    async def slowly(digest: Digest[JSON]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    async with rehearsing(*[slowly] * 8, concurrency=3) as (mail, t, callback):
        await mail.add_many(Entry(f"{number}", number) for number in range(8))
        await t.advance()
        assert (len(callback.came), most) == (8, 3)


async def test_a_chain_without_an_end_is_an_error() -> None:
    async def more(digest: Digest[JSON]) -> None:
        await mail.add("a", 2)

    async with rehearsing(*[more] * 2000, policy=policy()) as (mail, t, _):
        await mail.add("a", 1)
        with pytest.raises(ConfigurationError, match="at one instant bring about more and more, the latest of 'a'"):
            await t.advance(minutes=5)
        assert t.now == START


async def test_a_callback_cannot_advance_the_clock() -> None:
    async with rehearsing(lambda _: t.advance(minutes=5)) as (mail, t, _):
        await mail.add("a", 1)
        await t.advance()
        assert [told.result for told in t.attempts] == ["failed"]
        timeline = await mail.peek("a")
        assert timeline is not None
        assert str(timeline.last_error).startswith("ConfigurationError: advance is under way")


async def test_engines_on_one_clock_are_delivered_in_the_order_of_their_due_times() -> None:
    mail, slack = engine(policy=policy(initial_delay=20)), engine(policy=policy(initial_delay=10))
    async with TestEngine(mail, start=START) as t, TestEngine(slack, clock=t) as other:
        mailed, posted = Callback(t), Callback(other, lambda _: mail.add("a", "posted"))
        mail.deliver(mailed)
        slack.deliver(posted)
        await slack.add("a", 1)
        await mail.add("b", 2)
        await other.advance(minutes=1)
        assert t.now == other.now == START + MINUTE
        assert (posted.came, mailed.came) == ([(10, [1])], [(20, [2]), (30, ["posted"])])
        assert (values(t.delivered), values(other.delivered)) == ([[2], ["posted"]], [[1]])


def app_on(mail: DigestEngine[JSON]) -> FastAPI:
    app = FastAPI(lifespan=mail.lifespan)

    @app.post("/{key}")
    async def add(key: str) -> bool:
        return await mail.add(key, "hello")

    return app


def test_an_app_is_called_in_a_loop_of_its_own_by_a_test_without_one() -> None:
    mail = engine()
    threads: list[int] = []

    @mail.deliver
    async def send(digest: Digest[JSON]) -> None:
        threads.append(threading.get_ident())

    with TestEngine(mail) as t, TestClient(app_on(mail)) as client:
        assert client.post("/bob").json() is True
        assert client.portal is not None
        client.portal.call(t.advance)  # the callback runs where the app does
        assert client.post("/bob").json() is False
        asyncio.run(t.advance(minutes=10))  # or anywhere else
    assert values(t.delivered) == [["hello"], ["hello"]]
    assert len(set(threads)) == 2


async def test_on_a_server_an_app_in_a_loop_of_its_own_is_told_what_to_use() -> None:
    mail = engine()
    async with TestEngine(mail, server=True) as t:
        mail.deliver(Callback(t))
        with (
            pytest.raises(ConfigurationError, match=r"TestClient starts another one: use httpx2\.AsyncClient"),
            TestClient(app_on(mail)),
        ):
            pass
        with pytest.raises(ConfigurationError, match="TestClient starts another one"):
            TestClient(app_on(mail)).post("/bob")


@pytest.mark.parametrize("on_server", [False, True])
async def test_adds_of_threads_go_to_the_test(on_server: bool) -> None:
    mail = engine(policy=policy())
    async with TestEngine(mail, server=on_server) as t:
        assert await asyncio.to_thread(mail.sync.add, "a", 1)
        assert await asyncio.to_thread(mail.sync.add_many, [Entry("b", 2)]) == [True]
        with pytest.raises(ConfigurationError, match="would block the event loop"):
            mail.sync.add("a", 3)
        await t.advance()
    assert sorted(values(t.delivered)) == [[1], [2]]


async def test_a_test_that_is_cancelled_while_it_leaves_has_left_its_engine() -> None:
    mail = engine()
    t = TestEngine(mail)
    await t.__aenter__()
    await asyncio.to_thread(mail.sync.add, "a", 1)
    leaving = asyncio.ensure_future(t.__aexit__())
    await asyncio.sleep(0)  # it waits for the session of the other thread
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    async with TestEngine(mail):
        assert await mail.add("a", 1)


def test_adds_of_a_program_without_an_event_loop_go_to_the_test() -> None:
    mail = engine()
    with TestEngine(mail) as t:
        assert mail.sync.add("a", 1)
        with pytest.raises(InvalidArgument) as raised:
            mail.sync.add("", 1)
        assert raised.value.__context__ is None, "it tells of nothing else"
        asyncio.run(t.advance())
    assert values(t.delivered) == [[1]]


def test_a_program_adds_on_a_server_although_the_loop_of_the_test_does_not_run() -> None:
    mail = engine()
    t = TestEngine(mail, server=True)
    with ThreadPoolExecutor() as pool, asyncio.Runner() as runner:
        runner.run(t.__aenter__())  # as in a fixture of a test that is not async
        try:
            assert pool.submit(mail.sync.add, "a", 1).result(DEADLINE)
            runner.run(t.advance())
        finally:
            runner.run(t.__aexit__(None, None, None))
    assert values(t.delivered) == [[1]]


def collected(reader: InMemoryMetricReader) -> set[str]:
    data = reader.get_metrics_data()
    assert data is not None
    return {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics}


def measured() -> tuple[DigestEngine[JSON], InMemoryMetricReader]:
    """An engine and what reads its metrics."""
    reader, mail = InMemoryMetricReader(), engine()
    instrument(mail, meter_provider=MeterProvider([reader]))
    return mail, reader


async def test_metrics_of_a_test_on_a_server_know_its_timelines() -> None:
    mail, reader = measured()
    async with TestEngine(mail, server=True):
        assert "aiodigest.timelines" in await asyncio.to_thread(collected, reader)


def test_metrics_are_collected_in_a_test_too(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    mail, reader = measured()
    with TestEngine(mail) as t:
        mail.sync.add("a", 1)
        asyncio.run(t.advance())
        with monkeypatch.context() as patch:
            patch.delattr(asyncio, "new_event_loop")  # there is no need of one
            found = collected(reader)
    assert {"aiodigest.deliveries", "aiodigest.adds"} <= found
    assert "aiodigest.timelines" not in found
    assert caplog.records == []


@pytest.fixture(autouse=True)
def binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded server is of the kind that all tests run on."""
    monkeypatch.setenv("AIODIGEST_SERVER", server_binary())


async def test_a_server_is_entered_in_an_event_loop_alone() -> None:
    mail = engine()
    with pytest.raises(ConfigurationError, match="async with"), TestEngine(mail, server=True):
        pass
    async with TestEngine(mail):
        pass


async def test_nothing_is_left_of_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mail = engine()
    async with TestEngine(mail, server=True):
        await mail.add("a", 1)
        [folder] = tmp_path.iterdir()
        assert (folder / "data" / "server.log").exists()
    assert list(tmp_path.iterdir()) == []


async def test_what_another_program_has_leased_comes_when_its_lease_and_the_hold_have_ended() -> None:
    tested = engine()
    async with TestEngine(tested, start=START) as t:
        callback = Callback(t)
        tested.deliver(callback)
        await tested.add("j", 0)
        await t.advance(seconds=0)
        await tested.add("k", 1)
        assert await tested._entered().store.open(0, "k", 60_000, Policy().terms.limits)
        await t.advance(2 * MINUTE)
        await t.advance(10 * MINUTE)
    assert callback.came == [(0, [0]), (120, [1])]


@pytest.mark.thorough
async def test_a_server_that_does_not_answer_is_an_error_of_the_test() -> None:
    mail = engine(timeout=1)
    async with TestEngine(mail, server=True) as t:
        await patiently(lambda: mail.add("a", 1, record_id="a"))
        server = EmbeddedServer(Path(mail.backend.url.removeprefix("embedded://")))
        to_server: Any = redis.Redis  # whose types are of no help here
        with to_server(unix_socket_path=str(server.socket)) as client:

            @mail.deliver
            async def away(digest: Digest[JSON]) -> None:
                client.client_pause(60_000, all=False)

            for _ in range(2):  # after the callback, and before it
                with pytest.raises(BackendUnavailable):
                    await t.advance()


OUTCOMES: dict[str, Callable[[Digest[JSON]], Exception]] = {
    "fail": lambda digest: OSError(),
    "later": lambda digest: RetryAfter(4),
    "reject": lambda digest: Reject(),
    "partly": lambda digest: PartialFailure([digest.records[0].id]),
}


@dataclass(frozen=True)
class Scenario:
    """Adds, each some time after the one before (ms), and what the n-th delivery of a timeline comes to."""

    policy: Policy
    adds: Sequence[tuple[int, str]]
    replies: dict[tuple[str, int], str]


class Recipient:
    """A callback that fails as planned, and keeps what it was given and when."""

    def __init__(self, replies: dict[tuple[str, int], str], clock: Callable[[], int]) -> None:
        self._got: list[tuple[int, str, list[JSON], int, int, int]] = []
        self._replies = replies
        self._clock = clock
        self._count = Counter[str]()

    async def __call__(self, digest: Digest[JSON]) -> None:
        key = digest.key.rpartition("/")[2]
        [what] = values([digest])
        self._got.append((self._clock(), key, what, digest.attempt, digest.iteration, digest.dropped))
        self._count[key] += 1
        if outcome := self._replies.get((key, self._count[key])):
            raise OUTCOMES[outcome](digest)

    @property
    def timelines(self) -> list[tuple[int, str, list[JSON], int, int, int]]:
        """What it got, of one time by timeline: which of those comes first is nobody's promise."""
        return sorted(self._got, key=itemgetter(0, 1))


KEYS = ["a", "b", "c"]
AT_ONCE = Scenario(
    Policy(0, minimum_delay=0, increment_delay=0, maximum_delay=0, max_size=1, capacity=4),
    [(0, "a"), (0, "a"), (0, "b")],
    {("a", 1): "fail", ("b", 1): "fail"},
)  # two are tried again at one time, one of which has two parts
LONG = timedelta(minutes=30)  # after which nothing is left to deliver


@st.composite
def scenarios(draw: st.DrawFn, grain: int = 1) -> Scenario:
    """``grain`` is in what all times are given, in ms."""
    times = st.integers(0, 60_000 // grain).map(lambda number: number * grain)
    initial, minimum, increment, beyond = (draw(times) for _ in range(4))
    maximum = max(initial, minimum) + beyond
    max_size, capacity = draw(st.sampled_from([(None, 1000), (2, 1000), (None, 2), (1, 4)]))
    policy = Policy(initial / 1000, minimum / 1000, increment / 1000, maximum / 1000, max_size, capacity)
    adds = draw(st.lists(st.tuples(times, st.sampled_from(KEYS)), min_size=1, max_size=9))
    numbered = st.tuples(st.sampled_from(KEYS), st.integers(1, 4))
    replies = draw(st.dictionaries(numbered, st.sampled_from([*OUTCOMES]), max_size=4))
    return Scenario(policy, adds, replies)


async def play(scenario: Scenario, mail: DigestEngine[JSON], t: TestEngine[JSON], prefix: str = "") -> Recipient:
    """What comes of a scenario in a test that may have played others before."""
    begun = t.now
    recipient = Recipient(scenario.replies, lambda: (t.now - begun) // timedelta(milliseconds=1))
    async with mail.delivering(recipient):
        for number, (delay, key) in enumerate(scenario.adds):
            await t.advance(timedelta(milliseconds=delay))
            await mail.add(prefix + key, number, record_id=f"{number}")
        await t.advance(LONG)
    assert (await mail.stats()).waiting == 0
    return recipient


@pytest.mark.thorough
def test_a_server_delivers_the_same_at_the_same_times_as_memory() -> None:
    current: list[Scenario] = []

    def of_now(key: str) -> Policy:
        return current[-1].policy

    with asyncio.Runner() as runner:
        real = engine(policy=of_now, retry=RETRY)
        of_real = TestEngine(real, server=True, start=START)
        runner.run(of_real.__aenter__())

        @settings(max_examples=25, deadline=None)
        @example(AT_ONCE)
        @given(scenario=scenarios())
        def compare(scenario: Scenario) -> None:
            current.append(scenario)
            mail = engine(policy=of_now, retry=RETRY)
            with TestEngine(mail, start=START) as t:
                expected = runner.run(play(scenario, mail, t))
            found = runner.run(play(scenario, real, of_real, f"{len(current)}/"))
            assert found.timelines == expected.timelines

        try:
            compare()
        finally:
            runner.run(of_real.__aexit__(None, None, None))


@settings(max_examples=60, deadline=None)
@example(AT_ONCE)
@given(scenario=scenarios(grain=1000))
def test_a_worker_delivers_the_same_at_the_same_times(scenario: Scenario) -> None:
    # no add at the very time at which something is due: who comes first then is nobody's promise
    adds = [(delay + 1, key) for delay, key in scenario.adds]
    scenario = replace(scenario, adds=adds)
    options: dict[str, Any] = {"policy": scenario.policy, "retry": RETRY}
    mail = engine(**options)
    with TestEngine(mail) as t:
        expected = asyncio.run(play(scenario, mail, t))

    @virtual_time
    async def work() -> None:
        recipient = Recipient(scenario.replies, lambda: round(now() * 1000))
        inbox, rest = Inbox(*[recipient] * 1000), BackoffMode(maximum=0)  # which there is none of in a test
        async with delivering(inbox, backoff_mode=rest, lease_timeout=600, **options) as (worker, _):
            for number, (delay, key) in enumerate(scenario.adds):
                await asyncio.sleep(delay / 1000)
                await worker.add(key, number, record_id=f"{number}")
            await asyncio.sleep(LONG.total_seconds())
        assert recipient.timelines == expected.timelines

    work()


@pytest.mark.parametrize("server", [False, True])
async def test_an_advance_may_be_cancelled_at_any_await_and_the_next_one_delivers_all(server: bool) -> None:
    mail = engine(policy=policy())
    async with TestEngine(mail, server=server) as t:
        for turn in range(30):
            await mail.add(f"{turn}", turn)
            advancing = asyncio.create_task(t.advance(seconds=1))
            for _ in range(turn):
                await asyncio.sleep(0)
            advancing.cancel()
            await asyncio.wait([advancing])
        await t.advance(minutes=30)
        assert (await mail.stats()).leased == 0
    assert {digest.key for digest in t.delivered} == {f"{turn}" for turn in range(30)}
    assert {told.attempt for told in t.attempts} == {1}


async def test_what_may_have_arrived_is_repeated_as_it_was_and_newer_records_wait() -> None:
    waits = RetryPolicy(backoff=lambda attempt: 10.0)
    mail = DigestEngine(namespace="test", policy=Policy(minimum_delay=0), retry=waits)

    @mail.deliver
    async def send(digest: Digest) -> None:
        pass

    async with TestEngine(mail) as t:
        t.fail_next(OutcomeUnknown("no answer"))
        await mail.add("a", 1)
        await t.advance()
        await mail.add("a", 2)
        await t.advance(seconds=10)
    unknown, again, newer = t.attempts
    assert (unknown.result, unknown.digest_id) == ("unknown", again.digest_id) != ("unknown", newer.digest_id)
    assert [[record.value for record in digest.records] for digest in t.delivered] == [[1], [2]]
