"""Why a timeline is where it is: what ``explain`` says is what the engine does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from engines import virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodigest import JSON, DigestEngine, Entry, InvalidArgument, Policy, RetryAfter, RetryPolicy, Throttle
from aiodigest.backend import FEATURES, Cooling, StoredTimeline
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.testing import TestEngine
from aiodigest.timing.calendar import At
from aiodigest.timing.explain import Explainer, span
from aiodigest.timing.formula import share_of
from aiodigest.timing.hours import Hours

DAY = datetime(2030, 1, 1, tzinfo=UTC)  # a Tuesday
START = DAY + timedelta(hours=14, minutes=2)
MOVED = "rescheduled, or added to under another policy"
RETRY = RetryPolicy(3, lambda _: 60.0)
USUAL = Policy(minimum_delay=300, increment_delay=30, maximum_delay=1800)


def at(minutes: float) -> int:
    """An instant in ms, so many minutes after START."""
    return round((START.timestamp() + 60 * minutes) * 1000)


def explained(found: StoredTimeline | None, policy: Policy | None = USUAL, now: float = 3, **options: Any) -> str:
    cooling = options.pop("cooling", None)
    return str(Explainer("key", at(now), policy, RETRY, **options).explain(found, cooling))


@asynccontextmanager
async def trying(*raised: Exception, **options: Any) -> AsyncGenerator[tuple[DigestEngine[JSON], TestEngine[JSON]]]:
    """An engine in a test that begins at START, whose first attempts fail so."""
    mail = DigestEngine[JSON]("redis://127.0.0.1:1", namespace="test", retry=RETRY, **options)
    async with TestEngine(mail, start=START) as t:
        for error in raised:
            t.fail_next(error)
        yield mail, t


async def sentence(mail: DigestEngine[JSON], key: str = "key", **options: Any) -> str:
    return str(await mail.explain(key, **options))


async def test_a_timeline_that_waits_after_a_digest_says_for_what_and_until_when() -> None:
    chosen = replace(USUAL, hours=Hours("08:00-20:00"))
    async with trying(policy=chosen) as (mail, t):
        await mail.add("key", 1)
        assert await sentence(mail) == (
            "is due since 14:02:00, and goes out as soon as a worker has room for it: inside its hours"
        )
        await t.advance()
        assert await sentence(mail) == (
            "holds no records: last digest 14:02:00 (delivered, or a dead letter), cool-down 5 min until 14:07:00; "
            "one that came now would be due 14:07:30"
        )
        await mail.add("key", 2)
        told = await mail.explain("key")
        assert str(told) == (
            "waits until 14:07:30: last digest 14:02:00, cool-down 5 min until 14:07:00, pushed 30 s by 1 add; "
            "at the latest 14:32:00; inside its hours"
        )
        assert (told.key, told.state, told.due) == ("key", "waiting", START + timedelta(seconds=330))
        assert [(reason.kind, reason.at) for reason in told.reasons] == [
            ("state", told.due), ("last", START), ("cool-down", START + timedelta(minutes=5)), ("rule", told.due),
            ("maximum", START + timedelta(minutes=30)), ("hours", None),
        ]  # fmt: skip
        assert "until 15:07:30" in await sentence(mail, tz="Europe/Paris")
        with pytest.raises(InvalidArgument, match="Europe/Pari"):
            await mail.explain("key", tz="Europe/Pari")


async def test_a_timeline_without_records_says_when_one_that_came_now_would_be_due() -> None:
    async with trying(policy=Policy.window(60)) as (mail, _):
        told = await mail.explain("nothing")
        assert (told.state, told.due) == ("empty", None)
        assert str(told) == "holds no records: one that came now would be due 14:03:00"


async def test_a_digest_that_failed_says_how_often_and_when_it_is_tried_again() -> None:
    async with trying(ValueError("boo"), RetryAfter(600), policy=Policy()) as (mail, t):
        await mail.add("key", 1)
        await t.advance()
        assert await sentence(mail) == ("waits for its next try until 14:03:00: attempt 1 of 3 failed: ValueError: boo")
        await t.advance(minutes=1)
        assert (await sentence(mail)).startswith("waits for its next try until 14:13:00: attempt 1 of 3 failed")


async def test_what_is_due_says_that_a_throttle_may_hold_it_back() -> None:
    async with trying(policy=USUAL, throttle=Throttle(60, per=60, burst=5)) as (mail, t):
        await mail.add("key", 1)
        assert (await sentence(mail)).endswith(
            "room for it: at most 60 attempts in 1 min over all workers, by its throttle"
        )
        await t.advance()
        await mail.add("key", 1)
        assert "throttle" not in await sentence(mail)


async def test_an_engine_without_a_policy_says_what_is_stored_and_no_more() -> None:
    store = ReferenceBackend(now=lambda: at(3))
    async with DigestEngine[JSON](namespace="test", backend=store, policy=Policy(initial_delay=120)) as mail:
        await mail.add("key", 1)
        assert "opened 14:05:00, 2 min after the first record; at the latest 14:35:00" in await sentence(mail)
    async with DigestEngine[JSON](namespace="test", backend=store) as other:
        assert await sentence(other) == "waits until 14:07:00: opened 14:05:00, 2 min later by adds or its policy"
        assert await sentence(other, "nothing") == "holds no records"


async def test_what_is_put_aside_says_until_when_and_why_if_that_is_known() -> None:
    nightly = Policy(minimum_delay=0, hours=Hours("20:00-21:00"))
    aside = StoredTimeline("key", "waiting", at(0), 0, 1, 0, digest_id="d", until_ms=at(358))
    told = Explainer("key", at(3), nightly).explain(aside)
    assert (str(told), told.due) == (
        "was due 14:02:00, and is put aside until 20:00:00: its hours are closed until 20:00:00",
        datetime.fromtimestamp(at(358) / 1000, UTC),
    )
    assert "until 14:03:00: its destination rests" in explained(aside._replace(until_ms=at(1)))
    needy = aside._replace(needs="magic")
    assert "it needs 'magic', which this version of aiodigest does not know" in explained(needy, unknown="magic")


@pytest.mark.parametrize(
    ("found", "policy", "told"),
    [
        (
            StoredTimeline("key", "leased", at(4), 2, 3, 2, digest_id="d"), USUAL,
            ("is under delivery, by a lease until 14:06:00 that its worker renews: "
            "attempt 2 of 3 with 3 records; 2 more came since"),
        ),
        (
            StoredTimeline("key", "leased", at(1), 0, 1, 1, digest_id="d"), USUAL,
            "was under delivery by a lease that has ended 14:03:00: attempt 1 of 3 with 1 record",
        ),
        (
            StoredTimeline("key", "leased", at(4), 1, 1, 1, digest_id="d", flushed=True), USUAL,
            "1 more came since, due as soon as it ends",
        ),
        (
            StoredTimeline("key", "leased", at(4), 1, 1, 1, digest_id="d", next_ms=at(9)), USUAL,
            "1 more came since, due 14:11:00",
        ),
        (
            StoredTimeline("key", "ready", at(-1440), 1), Policy(hours=Hours("20:00-21:00")),
            ("is due since 2029-12-31 14:02:00, and goes out as soon as a worker has room for it: "
            "its hours are closed until 20:00:00"),
        ),
        (
            StoredTimeline("key", "ready", at(0), 1, passes=True), Policy(hours=Hours("20:00-21:00")),
            "as soon as a worker has room for it: it goes out whatever its hours are",
        ),
        (
            StoredTimeline("key", "waiting", at(5), 1, last_ms=at(0), cool_ms=at(5)), USUAL,
            "cool-down 5 min until 14:07:00, pushed by no add; at the latest",
        ),
        (
            StoredTimeline("key", "waiting", at(18), 1, last_ms=at(3), opening_ms=at(18)), Policy.window(900),
            "opened 14:05:00, 15 min after the first record; at the latest 14:20:00",
        ),
        (
            StoredTimeline("key", "waiting", at(3.5), 4, last_ms=at(1)), Policy.debounce(30),
            "opened 14:03:00, 30 s after the last add; at the latest 14:08:00",
        ),
        (
            StoredTimeline("key", "waiting", at(3.5), 40, last_ms=at(-1.5)), Policy.debounce(30),
            "adds do not end; at the latest 14:05:30",
        ),
        (
            StoredTimeline("key", "waiting", at(3.5), 2, last_ms=at(3)), Policy.balanced(60),
            "a message is worth 1 min of waiting, and 2 records wait",
        ),
        (
            StoredTimeline("key", "waiting", at(28), 1, last_ms=at(3)), Policy.at(At.daily("14:30")),
            "waits until 14:30:00: opened 14:05:00, the next instant of '30 14 * * *' in UTC",
        ),
        (
            StoredTimeline("key", "waiting", at(358), 1, last_ms=at(3)),
            Policy(initial_delay=60, hours=Hours("20:00-21:00")),
            "waits until 20:00:00: opened 14:05:00; its hours are closed until 20:00:00",
        ),
        (
            StoredTimeline("key", "waiting", at(358) + int(share_of("key") * 1_800_000), 1, last_ms=at(3)),
            Policy(initial_delay=60, hours=Hours("20:00-21:00", spread=1_800)),
            "its hours are closed until 20:00:00, and its share of the spread is 19 min 28 s",
        ),
        (
            StoredTimeline("key", "waiting", at(33), 99, last_ms=at(3)), USUAL,
            "opened 14:05:00, pushed 30 min by adds, as far as may be; at the latest 14:35:00",
        ),
        (
            StoredTimeline("key", "waiting", at(4), 1, last_ms=at(3), opening_ms=at(4)),
            Policy(initial_delay=60, max_size=10),
            "1 min after the first record; at the latest 14:35:00; at once with 10 records",
        ),
        *(
            (StoredTimeline("key", "waiting", at(due), 1, last_ms=at(3)), policy, MOVED)
            for due, policy in (
                (3.25, USUAL), (50, USUAL), (2, USUAL), (4, Policy.debounce(10)), (9, Policy.balanced(60)),
                (29, Policy.at(At.daily("14:30"))), (4, Policy(increment_delay=0)),
            )
        ),
    ],
)  # fmt: skip
def test_each_state_and_each_rule_is_told_in_words(found: StoredTimeline, policy: Policy, told: str) -> None:
    assert told in explained(found, policy)


def test_what_is_later_than_a_cool_down_is_told_without_the_policy_too() -> None:
    found = StoredTimeline("key", "waiting", at(71), 4, last_ms=at(5), cool_ms=at(65))
    assert explained(found, None).endswith("cool-down 1 h until 15:07:00, 6 min later by adds or its policy")


def test_hours_are_named_only_where_a_timeline_has_some() -> None:
    asked = StoredTimeline("key", "ready", at(0), 1, passes=True)
    for policy, needs, is_named in ((None, "", False), (USUAL, "", False), (None, "hours", True)):
        assert ("whatever its hours" in explained(asked._replace(needs=needs), policy)) is is_named


def test_a_cool_down_counts_from_its_digest_for_what_would_come_now() -> None:
    cooling = Cooling(3, at(5), at(0))
    assert explained(None, cooling=cooling).endswith("one that came now would be due 14:07:30")
    assert explained(None, Policy.balanced(60, gap=300), cooling=cooling).endswith("would be due 14:07:00")
    short = replace(USUAL, maximum_delay=310)
    assert explained(None, short, cooling=cooling).endswith("would be due 14:07:10")


@pytest.mark.parametrize(
    ("ms", "told"),
    [(0, "0 s"), (250, "250 ms"), (30_000, "30 s"), (330_000, "5 min 30 s"), (3_600_500, "1 h 500 ms"),
     (90_061_001, "1 d 1 h")],
)  # fmt: skip
def test_spans_are_told_in_their_two_largest_units(ms: int, told: str) -> None:
    assert span(ms) == told


ALL = [
    USUAL, Policy(), Policy.window(60), Policy.debounce(5, 20), Policy(quiet_delay=5, minimum_delay=30),
    Policy.balanced(60), Policy.balanced(60, gap=30, first_at_once=True), Policy.balanced(60, randomised=True),
    Policy.at("*/7 * * * *"), Policy(minimum_delay=lambda number: 20.0 * number, max_size=4),
    replace(USUAL, hours=Hours("14:03-14:04,14:10-14:11", spread=20)),
    Policy(quiet_delay=5, hours=Hours("14:05-15:00")),
    Policy.at("* * * * *", hours=Hours("14:07-14:09")),
]  # fmt: skip
POLICIES = st.sampled_from([each for each in ALL if FEATURES.issuperset(each.needs.split())])  # which the store knows

STEPS = st.lists(st.tuples(st.integers(0, 90_000), st.integers(0, 3), st.booleans(), st.booleans()), max_size=12)


@given(POLICIES, STEPS)
@settings(deadline=None)
@virtual_time
async def test_the_instant_that_it_names_is_that_at_which_the_digest_goes_out_whatever_the_policy(
    policy: Policy, steps: Sequence[tuple[int, int, bool, bool]]
) -> None:
    """However many records come, and whether deliveries fail; and the reasons lead to it."""
    async with trying(policy=policy) as (mail, t):
        for wait, adds, fails, looks in steps:
            await t.advance(timedelta(milliseconds=wait))
            await mail.add_many([Entry("key", number) for number in range(adds)])
            told = await mail.explain("key")
            assert told.due is None or told.state == "ready" or told.due > t.now
            assert "moved" not in [reason.kind for reason in told.reasons], str(told)
            if looks and told.state == "waiting" and told.due is not None:
                if fails:
                    t.fail_next(ValueError("boo"))
                tried = len(t.attempts)
                await t.advance(told.due - t.now - timedelta(milliseconds=1))
                assert len(t.attempts) == tried, f"it went out before it was due: {told}"
                await t.advance(timedelta(milliseconds=1))
                assert len(t.attempts) > tried, f"it was due: {told}"
