"""Each destination rests by itself and has its own limit: in virtual time on the store in memory, and on servers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from engines import (
    Inbox,
    WatchedBackend,
    delivering,
    engine_on,
    forever,
    lasting,
    now,
    settle,
    state_of,
    virtual_time,
)
from replicas import until
from servers import Server

from aiodigest import (
    JSON,
    BackoffMode,
    ConfigurationError,
    Digest,
    DigestEngine,
    Entry,
    InvalidArgument,
    Policy,
    RetryAfter,
    RetryPolicy,
)
from aiodigest.backend import Claims
from aiodigest.backoff import PROBES, REMEMBERED
from aiodigest.testing import TestEngine
from aiodigest.worker.destinations import Destination, Destinations
from aiodigest.worker.shard import BROAD_CLAIM, CLAIM

MODE = BackoffMode(threshold=5, multiplier=100, maximum=1000)  # a rest of 100 s to 200 s, and longer ones
SELDOM = RetryPolicy(backoff=lambda attempt: 500.0)


def domain(key: str) -> str:
    return key.partition(":")[2]


class Post(Inbox):
    """Receivers by destination: what a callback does there, and how many calls are under way, and have been."""

    def __init__(self, **replies: Callable[[Digest[JSON]], Awaitable[object]]) -> None:
        super().__init__()
        self._by_destination = replies
        self.busy, self.most, self.calls = Counter[str](), Counter[str](), Counter[str]()

    async def __call__(self, digest: Digest[JSON]) -> None:
        name = domain(digest.key)
        self.calls[name] += 1
        self.busy[name] += 1
        self.most[name] = max(self.most[name], self.busy[name])
        try:
            await super().__call__(digest)
            if reply := self._by_destination.get(name):
                await reply(digest)
        finally:
            self.busy[name] -= 1

    def served(self, name: str) -> list[float]:
        """When digests came for a destination."""
        return [when for digest, when in zip(self.digests, self.times, strict=True) if domain(digest.key) == name]


async def fails(digest: Digest[JSON]) -> None:
    raise ConnectionError("the host is down")


async def filled(count: int, name: str, backend: WatchedBackend | None = None) -> WatchedBackend:
    """A store with timelines for a destination, all due."""
    store = backend or WatchedBackend()
    for number in range(count):
        await store.put(f"{number}:{name}", 1)
    return store


@virtual_time
async def test_while_a_destination_rests_the_others_are_served_at_once() -> None:
    post, backend = Post(down=fails), await filled(200, "down")
    async with delivering(post, backend, destination=domain, backoff_mode=MODE, retry=SELDOM) as (engine, _):
        await asyncio.sleep(1)
        calls = post.calls["down"]
        assert calls < 64 + CLAIM, "it rests"
        activity = engine.activity
        assert (activity.resting, activity.backoff_level) == (1, 1)
        for number in range(100):
            await engine.add(f"{number}:up", 1)
            await settle()
            assert post.calls["up"] == number + 1, "none has to wait"
        assert post.calls["down"] == calls, "nothing is sent there in its rest"
        await asyncio.sleep(210)
        assert post.calls["down"] == calls + PROBES, "a few are let through after it"


@virtual_time
@pytest.mark.parametrize(("function", "who"), [(domain, "destination 'one'"), (None, "the process")])
async def test_the_log_says_once_that_a_destination_or_the_process_rests_and_once_that_it_delivers_again(
    function: Callable[[str], str] | None, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aiodigest")
    is_down = True

    async def reply(digest: Digest[JSON]) -> None:
        if is_down:
            raise ValueError("down")

    post, backend = Post(one=reply), await filled(50, "one")
    async with delivering(post, backend, destination=function, backoff_mode=MODE, retry=SELDOM):
        await asyncio.sleep(1000)  # several rests, each longer
        is_down = False
        await asyncio.sleep(2000)
    lines = [record for record in caplog.records if "destination" in vars(record)]
    assert [line.levelname for line in lines] == ["WARNING", "INFO"]
    begins, ends = (re.sub(r"[\d.]+ s", "... s", line.getMessage()) for line in lines)
    assert begins == f"test: {who} rests for ... s: its latest deliveries have all failed"
    assert ends == f"test: {who} delivers again, ... s after it began to rest"
    assert 100 <= vars(lines[0])["seconds"] <= 200
    assert vars(lines[1])["seconds"] > 900


@virtual_time
async def test_what_its_destination_keeps_waiting_is_not_charged_and_counts_as_due_since_it_was() -> None:
    post, backend = Post(down=fails), await filled(1, "down")
    mode = BackoffMode(threshold=1, multiplier=100)
    async with delivering(post, backend, destination=domain, backoff_mode=mode, retry=SELDOM) as (engine, _):
        await asyncio.sleep(1)
        began = now()
        await engine.add("next:down", 1)
        await asyncio.sleep(30)
        assert await state_of(backend, "next:down") == ("waiting", 0)
        waits = await engine.peek("next:down")
        assert waits is not None
        assert (await engine.stats()).oldest_due == waits.due
        assert (await engine.stats()).overdue == pytest.approx(now() - began, abs=0.1)


@virtual_time
async def test_after_its_rest_a_destination_is_tried_with_what_has_not_failed_first() -> None:
    """And not with the oldest due, which may be broken ones again."""
    up: set[str] = set()

    async def broken(digest: Digest[JSON]) -> None:
        if int(digest.key.partition(":")[0]) < 30:
            await fails(digest)
        up.add(digest.key)

    post, backend = Post(some=broken), await filled(200, "some")
    retry = RetryPolicy(max_attempts=100, backoff=lambda attempt: 1.0)
    mode = BackoffMode(threshold=20, multiplier=10, maximum=100)
    async with delivering(post, backend, destination=domain, backoff_mode=mode, retry=retry, concurrency=20) as (
        engine,
        _,
    ):
        await asyncio.sleep(25)
        assert len(up) == 170, "one rest, of 10 s at most"
        assert engine.activity.backoff_level == 0


@virtual_time
async def test_a_pause_holds_back_its_destination_and_no_other() -> None:
    async def pausing(digest: Digest[JSON]) -> None:
        if post.calls["slow"] == 1:
            raise RetryAfter(30, pause=True)

    post, backend = Post(slow=pausing), WatchedBackend(shards=2)
    async with delivering(post, backend, destination=domain) as (engine, _):
        await engine.add("1:slow", 1)
        await settle()
        assert engine.activity.resting == 1
        await filled(10, "slow", backend)
        await filled(10, "other", backend)
        await settle()
        assert (post.calls["slow"], post.calls["other"]) == (1, 10)
        await asyncio.sleep(29)
        assert post.calls["slow"] == 1
        await asyncio.sleep(3)
        assert post.calls["slow"] == 11
        assert engine.activity.resting == 0


@virtual_time
async def test_a_destination_has_at_most_its_share_of_deliveries_and_its_next_begin_soon_after() -> None:
    post, backend = Post(slow=lasting(10)), await filled(9, "slow")
    async with delivering(post, backend, destination=domain, destination_concurrency=3):
        await asyncio.sleep(5)
        await filled(20, "fast", backend)
        await asyncio.sleep(1)
        assert post.calls["fast"] == 20
        await asyncio.sleep(28)
        assert (post.calls["slow"], post.most["slow"]) == (9, 3)
    begins = post.served("slow")
    assert begins[3] < 11.5 < 20 < begins[6] < 23, "full: it waits for a second, and a moment"


@virtual_time
async def test_a_destination_that_is_full_of_short_deliveries_waits_no_longer_than_these_take() -> None:
    post, backend = Post(fast=lasting(0.02)), await filled(300, "fast")
    async with delivering(post, backend, destination=domain, destination_concurrency=4):
        await asyncio.sleep(10)
        assert (post.calls["fast"], post.most["fast"]) == (300, 4)
        assert post.served("fast")[-1] < 2 * 300 * 0.02 / 4, "at least half as many as could be"


@virtual_time
async def test_a_destination_that_hangs_leaves_room_for_the_others() -> None:
    post = Post(hangs=forever, works=lasting(0.005))
    async with delivering(post, destination=domain, destination_concurrency=4, concurrency=16) as (engine, backend):
        for number in range(100):
            await backend.put(f"{number}:{'hangs' if number % 5 == 0 else 'works'}", 1)
        await engine.add("last:works", 1)
        await asyncio.sleep(2)
        assert (post.calls["works"], post.most["hangs"]) == (81, 4)
        assert post.served("works")[72] < 1


@virtual_time
async def test_a_healthy_destination_is_served_at_once_behind_ten_thousand_timelines_of_one_that_rests() -> None:
    post, backend = Post(down=fails), await filled(10_000, "down")
    async with delivering(post, backend, destination=domain, backoff_mode=MODE, retry=SELDOM) as (engine, _):
        await engine.add("last:up", 1)
        await settle()
        assert post.calls["up"] == 1
        assert backend.count("claim") < 10_000 / BROAD_CLAIM + 20, "while most must wait, many are claimed at once"
        assert backend.count("postpone") <= backend.count("claim"), "and they wait by one call a claim"


class Slow(WatchedBackend):
    """Takes a while for each digest that is claimed or postponed."""

    async def claim(self, *arguments: Any, **named: Any) -> Claims:
        claims = await super().claim(*arguments, **named)
        await asyncio.sleep(0.03 * len(claims.leases))
        return claims


@virtual_time
async def test_what_was_postponed_does_not_come_back_so_fast_that_others_never_have_their_turn() -> None:
    post, backend = Post(down=fails, slow=lasting(1)), await filled(300, "down", Slow())
    await filled(300, "slow", backend)
    mode = BackoffMode(threshold=5, multiplier=1, maximum=1)  # the rests are shorter than it takes to postpone all
    async with delivering(
        post, backend, destination=domain, destination_concurrency=4, backoff_mode=mode, retry=SELDOM
    ) as (engine, _):
        await asyncio.sleep(1)
        await engine.add("late:up", 1)
        await asyncio.sleep(100)
        assert post.served("up")[0] < 60, "to claim all once takes 18 s"
        for number in range(10):
            await engine.add(f"{number}:up", 1)
            await asyncio.sleep(5)
        assert post.calls["up"] == 11


@virtual_time
async def test_what_could_not_be_postponed_is_when_the_server_is_back() -> None:
    post, backend = Post(down=fails), await filled(50, "down")
    backend.take_down("postpone")
    async with delivering(post, backend, destination=domain, backoff_mode=MODE, retry=SELDOM, concurrency=10):
        await asyncio.sleep(10)
        assert backend.machines[0].leased
        assert not backend.machines[0].postponed
        backend.bring_up()
        await asyncio.sleep(2)
        assert not backend.machines[0].leased
        assert backend.machines[0].postponed
    assert all(attempt < 2 for _, attempt in [await state_of(backend, f"{n}:down") or ("", 0) for n in range(50)])


@virtual_time
@pytest.mark.parametrize("is_refused", [False, True], ids=["away", "refused"])
async def test_what_could_not_be_postponed_is_also_after_its_lease_unless_only_that_is_refused(
    is_refused: bool,
) -> None:
    post, backend = Post(down=fails), await filled(50, "down")
    backend.take_down("postpone")
    async with delivering(post, backend, destination=domain, backoff_mode=MODE, retry=SELDOM, concurrency=10):
        await asyncio.sleep(10)
        if not is_refused:
            backend.take_down()
        await asyncio.sleep(100)
        claims = backend.count("claim")
        assert claims > 2 if is_refused else claims <= 2
        backend.bring_up()
        await asyncio.sleep(2)
        assert not backend.machines[0].leased or is_refused
        deliveries = [held.delivery for held in backend.machines[0].held.values() if held.delivery is not None]
        assert is_refused or not any(delivery.lost for delivery in deliveries)


@virtual_time
async def test_a_worker_stops_although_it_cannot_postpone() -> None:
    post, backend = Post(down=fails), await filled(50, "down")
    async with delivering(post, backend, destination=domain, backoff_mode=MODE, retry=SELDOM, concurrency=10):
        backend.take_down("postpone")
        await asyncio.sleep(5)
    assert now() < 15


@virtual_time
async def test_a_destination_function_that_raises_what_is_no_exception_ends_nothing() -> None:
    def odd(key: str) -> str:
        raise {"exit": SystemExit, "cancelled": asyncio.CancelledError}[key]

    post = Post()
    async with delivering(post, destination=odd) as (engine, _):
        for key in ("exit", "cancelled"):
            await engine.add(key, 1)
        await post.outcome(2)
        assert not engine.activity.fault
    assert post.results == ["delivered"] * 2


@virtual_time
async def test_timelines_whose_destination_is_unknown_share_one_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def odd(key: str) -> str:
        return {"none": None, "number": 7}[key]  # type: ignore[return-value]

    post = Post()
    async with delivering(post, destination=odd) as (engine, _):
        for key in ("none", "number", "raises"):
            await engine.add(key, 1)
        await post.outcome(3)
    assert post.results == ["delivered"] * 3
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    told = "it returned None, which is no str"
    assert line == f"test: the destination of 'none' is unknown, and all such timelines share one: {told}"


def test_destinations_are_forgotten_when_idle_and_the_longest_unused_of_too_many() -> None:
    known = Destinations(domain, BackoffMode())
    for number in range(3):
        destination = known.of(f"k:{number}")
        destination.began("k", 0.0)
        destination.learn("k", number > 0, 0.0, 1.0, 0.0)
        destination.busy -= 1
        known.forget(destination, 1.0)
    assert [each.name for each in known.all()] == ["0"], "it has failed"
    for number in range(REMEMBERED + 5):
        known.of(f"k:{number}")
    assert len(known.all()) == REMEMBERED
    busy = known.of("k:busy")
    busy.busy = 1
    for number in range(REMEMBERED):
        known.of(f"k:other{number}")
    assert known.of("k:busy") is busy


@virtual_time
async def test_a_destination_that_was_only_looked_at_is_not_kept() -> None:
    known = Destinations(lambda key: key, BackoffMode())
    claims = await (await filled(5, "some")).claim(0, 5, 60_000, Policy().terms.limits)
    chosen, postponed = known.sort(claims.leases, 2, now())
    assert len(postponed) == 3
    assert known.all() == [destination for _, destination in chosen]


def test_what_is_postponed_comes_back_spread_over_time_and_what_has_failed_last() -> None:
    destination = Destination("d", BackoffMode(threshold=1, multiplier=10))
    destination.learn("k", False, 0.0, 0.0, 0.0)
    rest = destination.wait(0.0)
    assert 10 <= rest <= 20
    waits = sorted(destination.postpone(rest, False, 0.001, 0.0) for _ in range(10_000))
    assert rest <= waits[0] < waits[-1] <= rest + 10.6
    densest = max(Counter(int(wait) for wait in waits).values())
    assert densest < 2_300, "at no time more than twice as many as on average"
    assert destination.postpone(rest, True, 0.001, 0.0) >= waits[-1]


def test_after_a_rest_one_that_fails_before_the_others_have_come_leaves_them_their_try() -> None:
    destination = Destination("d", BackoffMode(threshold=1, multiplier=10))

    def fails_at(when: float) -> float:
        assert not destination.wait(when)
        destination.began(str(when), when)
        destination.learn(str(when), False, when, when, 0.0)
        return destination.wait(when)

    end = fails_at(0.0)
    for number in range(PROBES - 1):
        assert not fails_at(end + number / 10)
    rest = fails_at(end + 0.5)
    assert rest >= 20, "four have failed"
    assert fails_at(end + 0.5 + rest + 2) >= 40, "no other has come"


ODD: Sequence[tuple[dict[str, Any], type[Exception], str]] = (
    ({"destination": "mail.example"}, InvalidArgument, "destination must be a function"),
    ({"destination": forever}, InvalidArgument, "not async"),
    ({"destination": domain, "destination_concurrency": 0}, InvalidArgument, "destination_concurrency"),
    ({"destination": domain, "destination_concurrency": 1.5}, InvalidArgument, "destination_concurrency"),
    ({"destination_concurrency": 3}, ConfigurationError, "needs a destination"),
)


@pytest.mark.parametrize(("options", "error", "words"), ODD)
def test_an_engine_refuses_a_destination_that_is_none(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DigestEngine(namespace="n", **options)


async def test_in_a_test_a_pause_holds_back_its_destination() -> None:
    mail = engine_on(WatchedBackend(), destination=domain)
    async with TestEngine(mail) as t:
        t.fail_next(RetryAfter(60, pause=True))
        await mail.add("1:slow", 1)
        await t.advance()
        await mail.add("2:slow", 1)
        await mail.add("1:other", 1)
        await t.advance(seconds=59)
        assert [digest.key for digest in t.delivered] == ["1:other"]
        await t.advance(seconds=1)
        assert sorted(digest.key for digest in t.delivered) == ["1:other", "1:slow", "2:slow"]


@pytest.mark.parametrize("shards", [1, 4])
async def test_on_a_server_a_destination_at_rest_holds_nobody_up(server: Server, namespace: str, shards: int) -> None:
    """Nor does one that hangs: of the timelines behind 600 of theirs each is served while these wait."""
    post = Post(down=fails, hangs=forever)
    mail = DigestEngine(
        server.url,
        namespace=namespace,
        shards=shards,
        backoff_mode=BackoffMode(multiplier=1_000, maximum=2_000),
        retry=SELDOM,
        destination=domain,
        destination_concurrency=30,
        drain_timeout=0,
    )
    names = ["down"] * 400 + ["hangs"] * 200
    async with mail:
        await mail.add_many(Entry(f"{number}:{name}", 1) for number, name in enumerate(names))
    before = datetime.now(UTC) + timedelta(seconds=1)  # the rests are longer
    async with mail.delivering(post):
        await mail.add_many(Entry(f"{number}:up", 1) for number in range(100))
        await until(lambda: post.calls["up"] == 100)

        async def untouched() -> list[datetime]:
            waits = [timeline async for timeline in mail.timelines("waiting") if not timeline.attempt]
            return [timeline.due for timeline in waits if domain(timeline.key) == "down"]

        async def all_wait() -> bool:
            return len(await untouched()) == 400 - post.calls["down"]

        await until(all_wait)
        assert post.calls["down"] < 100
        assert post.calls["hangs"] == post.most["hangs"] == 30
        assert mail.activity.resting == 1
        stats = await mail.stats()
        assert stats.oldest_due is not None
        assert stats.oldest_due <= min(await untouched()) <= max(await untouched()) < before


@pytest.mark.parametrize("shards", [1, 4])
async def test_on_a_server_who_recovers_is_served_although_others_stay_broken(
    server: Server, namespace: str, shards: int
) -> None:
    """All fail at first, as when a network is down, and a tenth hang: without a destination they share what rests."""
    tried = set[str]()

    async def reply(digest: Digest[JSON]) -> None:
        if domain(digest.key) == "hangs":
            await asyncio.Event().wait()
        if domain(digest.key) == "down" or digest.key not in tried:
            tried.add(digest.key)
            raise ConnectionError

    post = Post(down=reply, hangs=reply, up=reply)
    once = RetryPolicy(backoff=lambda attempt: 1.0)
    mail = DigestEngine(server.url, namespace=namespace, shards=shards, retry=once, drain_timeout=0)
    names = ["down"] * 10 + ["up"] * 30 + ["hangs"] * 4
    async with mail.delivering(post):
        await mail.add_many(Entry(f"{number}:{name}", 1) for number, name in enumerate(names))
        await until(lambda: post.calls["up"] == 60)
