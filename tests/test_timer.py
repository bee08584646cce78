"""One timer for many deadlines, on either event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import Context

import pytest
import uvloop

from aiodigest.worker.tasks import Timer


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


def test_a_timer_goes_off_once_at_the_earliest_time_that_it_was_set_to(runner: asyncio.Runner) -> None:
    async def play() -> None:
        loop, fired = asyncio.get_running_loop(), asyncio.Queue[float]()
        timer = Timer(lambda: fired.put_nowait(loop.time()), Context())
        began = loop.time()
        timer.set(began + 0.01)
        timer.cancel()  # after which it can be set again
        for delay in (600.0, 0.05, 300.0):
            timer.set(began + delay)
        assert await asyncio.wait_for(fired.get(), 60) >= began + 0.04
        timer.set(began + 600)  # it is set to none any more, so that this counts
        timer.set(began + 0.1)
        await asyncio.wait_for(fired.get(), 60)
        assert fired.empty()

    runner.run(play())


@pytest.mark.parametrize("delay", [-5.0, 0.0, 0.0001, 0.0004, 0.001])
def test_a_time_that_is_past_or_very_near_is_as_good_as_any(runner: asyncio.Runner, delay: float) -> None:
    async def play() -> None:
        loop, fired = asyncio.get_running_loop(), asyncio.Event()
        timer = Timer(fired.set, Context())
        timer.set(loop.time() + delay)
        timer.set(loop.time() + delay)
        timer.set(loop.time() + delay - 0.00001)
        await asyncio.wait_for(fired.wait(), 60)

    runner.run(play())
