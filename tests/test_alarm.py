"""One timer for many deadlines, on either event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from aiodigest.worker.timer import Alarm

Loops = Callable[[], asyncio.AbstractEventLoop]
on_each_loop = pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop])


@on_each_loop
def test_an_alarm_goes_off_once_at_the_earliest_time_that_it_was_set_to(loops: Loops) -> None:
    async def play() -> None:
        loop, rang = asyncio.get_running_loop(), asyncio.Queue[float]()
        alarm = Alarm(lambda: rang.put_nowait(loop.time()))
        began = loop.time()
        for delay in (600.0, 0.02, 300.0):
            alarm.set(began + delay)
        await asyncio.wait_for(rang.get(), 60)
        alarm.set(began + 600)  # it is set to none any more, so that this counts
        alarm.set(began + 0.05)
        await asyncio.wait_for(rang.get(), 60)
        assert rang.empty()

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(play())


@on_each_loop
@pytest.mark.parametrize("delay", [-5.0, 0.0, 0.0001, 0.0004, 0.001])
def test_a_time_that_is_past_or_very_near_is_as_good_as_any(loops: Loops, delay: float) -> None:
    async def play() -> None:
        loop, rang = asyncio.get_running_loop(), asyncio.Event()
        alarm = Alarm(rang.set)
        alarm.set(loop.time() + delay)
        alarm.set(loop.time() + delay)
        alarm.set(loop.time() + delay - 0.00001)
        await asyncio.wait_for(rang.wait(), 60)

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(play())


@on_each_loop
def test_an_alarm_that_was_cancelled_can_be_set_again(loops: Loops) -> None:
    async def play() -> None:
        loop, rang = asyncio.get_running_loop(), asyncio.Event()
        alarm = Alarm(rang.set)
        alarm.set(loop.time() + 0.01)
        alarm.cancel()
        alarm.set(loop.time() + 0.02)
        await asyncio.wait_for(rang.wait(), 60)

    with asyncio.Runner(loop_factory=loops) as runner:
        runner.run(play())
