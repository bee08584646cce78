from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context, ContextVar
from itertools import pairwise
from typing import Literal

import pytest
from engines import now, settle
from hypothesis import given
from hypothesis import strategies as st

from aiodigest.errors import AiodigestError, BackendUnavailable, LimitExceeded
from aiodigest.worker import batcher as batcher_module
from aiodigest.worker.batcher import BATCH_BYTES, BATCH_ITEMS, QUEUE_ITEMS, Batcher, batches

pytestmark = pytest.mark.virtual_time

TIMEOUT = 5.0


class Wire:
    """A call to the store: answers each item with its double, after ``pace`` seconds, or when ``gate`` is set."""

    def __init__(self, pace: float, held: bool) -> None:
        self.sent: list[list[int]] = []
        self.pace = pace
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.lost = 0  # of its answers
        if not held:
            self.gate.set()

    async def __call__(self, items: Sequence[int]) -> Sequence[int | AiodigestError]:
        self.sent.append(list(items))
        await self.gate.wait()
        await asyncio.sleep(self.pace)
        if self.error is not None:
            raise self.error
        answers = [LimitExceeded(f"{item} is too large") if item < 0 else 2 * item for item in items]
        return answers[self.lost :]


@asynccontextmanager
async def batching(
    pace: float = 0.0, *, held: bool = False, queues: Literal[1, 2] = 1
) -> AsyncGenerator[tuple[Batcher[int, int], Wire]]:
    wire = Wire(pace, held)
    batcher = Batcher[int, int](wire, TIMEOUT, queues)
    running = asyncio.create_task(batcher.run())
    try:
        yield batcher, wire
    finally:
        running.cancel()
        await asyncio.wait([running])


async def submit(batcher: Batcher[int, int], item: int, size: int = 0) -> int:
    return await batcher.put(item, size, 0, asyncio.get_running_loop().time())


def held(batcher: Batcher[int, int], *items: int) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(submit(batcher, item)) for item in items]


async def answers(batcher: Batcher[int, int], *items: int) -> list[int | BaseException]:
    return await asyncio.gather(*held(batcher, *items), return_exceptions=True)


async def unavailable(task: asyncio.Task[int]) -> BackendUnavailable:
    with pytest.raises(BackendUnavailable) as caught:
        await task
    return caught.value


async def test_what_is_submitted_in_one_turn_goes_out_as_one_call_in_order() -> None:
    async with batching() as (batcher, wire):
        assert await answers(batcher, *range(100)) == [2 * item for item in range(100)]
    assert wire.sent == [list(range(100))]


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [
        ([0] * 600, [256, 256, 88]),
        ([100 * 1024] * 7, [2, 2, 2, 1]),
        ([128 * 1024] * 4, [2, 2]),
        ([128 * 1024 + 1] * 2, [1, 1]),
        ([0, BATCH_BYTES + 1, 0], [1, 1, 1]),
    ],
)
async def test_a_call_has_at_most_256_items_and_256_kib_or_one_item(sizes: list[int], calls: list[int]) -> None:
    async with batching() as (batcher, wire):
        await asyncio.gather(*(submit(batcher, item, size) for item, size in enumerate(sizes)))
    assert [len(call) for call in wire.sent] == calls


@given(st.lists(st.integers(0, BATCH_BYTES + 10), max_size=600))
def test_batches_keep_the_order_and_their_bounds_and_are_no_more_than_needed(sizes: list[int]) -> None:
    cut = [list(batch) for batch in batches(sizes, lambda size: size)]
    assert [size for batch in cut for size in batch] == sizes
    for batch in cut:
        assert 1 <= len(batch) <= BATCH_ITEMS
        assert len(batch) == 1 or sum(batch) <= BATCH_BYTES
    for batch, following in pairwise(cut):
        assert len(batch) == BATCH_ITEMS or sum(batch) + following[0] > BATCH_BYTES


@pytest.mark.parametrize("sizes", [[0] * 10_000, [16 * 1024 * 1024 - 1, 1]], ids=["items", "bytes"])
async def test_room_is_for_10_000_items_or_16_mib_and_what_has_none_in_time_is_not_stored(sizes: list[int]) -> None:
    batcher = Batcher[int, int](Wire(0, False), TIMEOUT)  # which nobody runs, so that all wait until their time is over
    tasks = [asyncio.create_task(submit(batcher, 0, size)) for size in [*sizes, 0]]
    errors = [await unavailable(task) for task in tasks]
    assert ["no room" in str(error) for error in errors] == [False] * len(sizes) + [True]
    assert (errors[-1].stored, now()) == ("no", pytest.approx(TIMEOUT, abs=0.1))


async def test_a_batcher_that_finishes_refuses_what_comes_later_and_what_waits_for_room() -> None:
    async with batching(1) as (batcher, _):
        sent = held(batcher, *range(QUEUE_ITEMS))
        await asyncio.sleep(0)
        waiting = held(batcher, 1)
        await asyncio.sleep(0)
        finishing = asyncio.create_task(batcher.finish())
        await asyncio.sleep(0)
        late = held(batcher, 2)
        assert {(await unavailable(task)).stored for task in (*waiting, *late)} == {"no"}
        assert now() < 1
        for task in sent[BATCH_ITEMS:]:
            task.cancel()
        await finishing
        assert [task.result() for task in sent[:BATCH_ITEMS]] == [2 * item for item in range(BATCH_ITEMS)]


async def test_an_item_that_fails_fails_alone() -> None:
    async with batching() as (batcher, _):
        before, bad, after = await answers(batcher, 1, -1, 2)
    assert (before, type(bad), after) == (2, LimitExceeded, 4)


@pytest.mark.parametrize("error", [BackendUnavailable("gone", stored="unknown"), ZeroDivisionError("a fault")])
async def test_a_call_that_fails_fails_its_items_and_the_next_call_is_made(error: Exception) -> None:
    async with batching() as (batcher, wire):
        wire.error = error
        assert await answers(batcher, 1, 2) == [error, error]
        wire.error = None
        assert await answers(batcher, 3) == [6]


async def test_who_was_answered_can_add_to_the_next_call_beside_what_waits_for_it() -> None:
    async def add_twice(batcher: Batcher[int, int], item: int) -> int:
        return await submit(batcher, await submit(batcher, item))

    async with batching(held=True) as (batcher, wire):
        twice = [asyncio.create_task(add_twice(batcher, item)) for item in range(50)]
        await settle()
        waiting = held(batcher, 1, 3)
        await settle()
        wire.gate.set()
        assert await asyncio.gather(*twice, *waiting) == [*range(0, 200, 4), 2, 6]
    assert wire.sent == [[*range(50)], [1, 3, *range(0, 100, 2)]]


def put(batcher: Batcher[int, int], item: int, line: object) -> asyncio.Future[int]:
    return asyncio.ensure_future(batcher.put(item, 0, line, asyncio.get_running_loop().time()))


async def test_what_must_stay_in_order_waits_for_the_call_before_it_and_nothing_else_does() -> None:
    async with batching(1, queues=2) as (batcher, wire):
        first, given_up = put(batcher, 1, "a"), put(batcher, 2, "b")
        await settle()
        assert wire.sent == [[1, 2]]
        given_up.cancel()  # which may arrive all the same
        following = [put(batcher, 3, "a"), put(batcher, 4, "c"), put(batcher, 5, "b"), put(batcher, 6, "d")]
        await settle()
        assert wire.sent == [[1, 2], [4, 6]]
        assert await asyncio.gather(first, *following) == [2, 6, 8, 10, 12]
        assert wire.sent == [[1, 2], [4, 6], [3, 5]]
        assert now() == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(("items", "calls"), [(17, [17]), (18, [17, 1]), (200, [103, 97])])
async def test_many_items_go_out_in_two_calls_of_one_size_and_few_in_one(items: int, calls: list[int]) -> None:
    async def add_again(item: int) -> None:
        for line in range(3):
            await put(batcher, item, (item, line))

    async with batching(1, queues=2) as (batcher, wire):
        await asyncio.gather(*map(add_again, range(items)))
    assert sorted(map(len, wire.sent)) == sorted(calls * 3)


async def test_who_ends_the_program_keeps_nobody_from_an_answer_that_came_with_his() -> None:
    loop, caught, told = asyncio.get_running_loop(), list[str](), list[int]()

    def fail(_: object) -> None:
        raise ZeroDivisionError

    def tell(job: asyncio.Future[int]) -> None:
        told.append(job.result())

    loop.set_exception_handler(lambda _, context: caught.append(repr(context["exception"])))
    async with batching() as (batcher, _):
        for item in range(3):
            put(batcher, item, item).add_done_callback(fail if item == 1 else tell)
        await settle()
    assert (caught, told) == (["ZeroDivisionError()"], [0, 4])


async def test_what_awaits_an_item_is_called_as_of_any_future() -> None:
    seen, name = list[str](), ContextVar("name", default="empty")
    name.set("set")

    def caller(number: int) -> Callable[[asyncio.Future[int]], None]:
        return lambda job: seen.append(f"{number} {name.get()}")

    first, second, third, fourth = map(caller, range(1, 5))
    async with batching() as (batcher, _):
        job = put(batcher, 1, 1)
        job.add_done_callback(first, context=Context())
        job.add_done_callback(second)
        assert [job.remove_done_callback(first) for _ in range(2)] == [1, 0]
        job.add_done_callback(third, context=Context())
        job.add_done_callback(fourth)
        assert job.remove_done_callback(fourth) == 1
        assert await asyncio.wait_for(job, 1) == 2
        job.add_done_callback(first)
        given_up = put(batcher, 2, 2)
        given_up.add_done_callback(second, context=Context())
        assert [given_up.cancel() for _ in range(2)] == [True, False]
        await settle()
    assert sorted(seen) == ["1 set", "2 empty", "2 set", "3 empty"]


async def test_an_error_that_the_batcher_makes_is_told_once_an_item_and_not_for_what_was_cancelled() -> None:
    told: list[str] = []
    wire = Wire(0, held=True)
    batcher = Batcher[int, int](wire, TIMEOUT, failed=lambda error: told.append(str(error)))
    running = asyncio.create_task(batcher.run())
    sent = held(batcher, 1, 2)
    await settle()
    unsent, cancelled = held(batcher, 3, 4)
    await settle()
    cancelled.cancel()
    assert {(await unavailable(task)).stored for task in (*sent, unsent)} == {"no", "unknown"}
    running.cancel()
    await asyncio.wait([running])
    assert told == ["no answer within 5 s"] * 3


async def test_too_few_answers_are_a_fault_and_not_a_caller_that_waits_for_ever() -> None:
    async with batching() as (batcher, wire):
        wire.lost = 1
        assert [type(answer) for answer in await answers(batcher, 1, 2)] == [ValueError, ValueError]


async def test_an_item_that_is_cancelled_is_withdrawn_if_it_can_be_and_leaves_the_others_their_own_answers() -> None:
    async with batching(1) as (batcher, wire):
        first, sent, third = held(batcher, 1, 2, 3)
        await settle()
        unsent, *last = held(batcher, 4, 5, 6)
        await settle()
        for cancelled in (sent, unsent):
            cancelled.cancel()
        assert await asyncio.gather(first, third, *last) == [2, 6, 10, 12]
    assert wire.sent == [[1, 2, 3], [5, 6]]


async def test_what_was_sent_and_has_no_answer_in_time_may_be_stored_and_what_was_not_is_never_sent() -> None:
    async with batching(held=True) as (batcher, wire):
        [sent] = held(batcher, 1)
        await settle()
        [unsent] = held(batcher, 2)
        assert ((await unavailable(sent)).stored, now()) == ("unknown", pytest.approx(TIMEOUT))
        assert (await unavailable(unsent)).stored == "no"
        wire.gate.set()
        assert await submit(batcher, 3) == 6
    assert wire.sent == [[1], [3]]


async def test_what_could_not_be_sent_before_the_last_tenth_of_its_time_is_not_sent_and_spoils_no_call() -> None:
    async with batching(held=True) as (batcher, wire):
        [first] = held(batcher, 1)
        await settle()
        [late] = held(batcher, 2)
        await asyncio.sleep(0.2)
        [in_time] = held(batcher, 3)
        await asyncio.sleep(4.4)
        wire.gate.set()
        assert ((await unavailable(late)).stored, await first, await in_time) == ("no", 2, 6)
        assert now() == pytest.approx(4.6, abs=0.02)
    assert wire.sent == [[1], [3]]


async def test_each_item_has_the_whole_timeout_and_no_more_and_time_that_was_spent_before_counts() -> None:
    began = asyncio.get_running_loop().time()

    async def end(item: int, spent: float = 0) -> float:
        await asyncio.sleep(item)
        with pytest.raises(BackendUnavailable):
            await batcher.put(item, 0, 0, began + item - spent)
        return now()

    async with batching(held=True) as (batcher, _):
        ends = await asyncio.gather(*(end(item) for item in range(4)), end(2, spent=4))
    assert ends == pytest.approx([5, 6, 7, 8, 3], abs=0.02)


@pytest.mark.parametrize(
    ("size", "seconds", "is_in"), [(300, 1.5, False), (300, 2.5, True), (0, 0.5, False), (0, 1.5, True)]
)
async def test_a_full_queue_lets_callers_in_again_when_half_of_it_is_free(
    monkeypatch: pytest.MonkeyPatch, size: int, seconds: float, is_in: bool
) -> None:
    for name, value in {"QUEUE_ITEMS": 4, "QUEUE_BYTES": 1000, "BATCH_ITEMS": 1, "BATCH_BYTES": 300}.items():
        monkeypatch.setattr(batcher_module, name, value)
    async with batching(1) as (batcher, _):
        full = [asyncio.create_task(submit(batcher, item, size)) for item in range(4)]
        await settle()
        late = asyncio.create_task(submit(batcher, 9, 1))
        await asyncio.sleep(seconds)
        finishing = asyncio.create_task(batcher.finish())  # which refuses those that wait for room
        [answer] = await asyncio.gather(late, return_exceptions=True)
        assert (answer == 18) is is_in
        assert await asyncio.gather(*full) == [0, 2, 4, 6]
        await finishing


async def test_who_waited_for_room_is_answered_within_his_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "QUEUE_ITEMS", 2)
    async with batching(3) as (batcher, _):
        others = held(batcher, 1)
        await settle()
        others += held(batcher, 2, 3)
        await settle()
        [waiter] = held(batcher, 4)  # gets its room at 3 s
        await asyncio.sleep(3)
        others += held(batcher, 5)
        assert ((await unavailable(waiter)).stored, now()) == ("no", pytest.approx(5, abs=0.05))
        await asyncio.gather(*others, return_exceptions=True)


async def test_at_the_end_only_what_was_sent_may_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "QUEUE_ITEMS", 1)
    async with batching(1) as (batcher, _):
        tasks = held(batcher, 1)
        await settle()
        tasks += held(batcher, 2, 3)  # one waits to be sent, and one for room
        await settle()
    tasks += held(batcher, 4)
    assert [(await unavailable(task)).stored for task in tasks] == ["unknown", "no", "no", "no"]
    assert now() < 0.1
