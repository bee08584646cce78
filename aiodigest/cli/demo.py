"""``aiodigest demo``: aiodigest at work, in a quarter of a minute."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from statistics import median
from tempfile import TemporaryDirectory
from typing import Protocol, TypeAlias

from aiodigest import DecorrelatedJitter, Delivery, Digest, DigestEngine, Policy, RetryPolicy
from aiodigest.cli.demo_events import SHOP, Event, Remark, story
from aiodigest.cli.options import FAILED, AsJson

POLICY = Policy(minimum_delay=4, increment_delay=0.25, maximum_delay=6)
RETRY = RetryPolicy(max_attempts=6, backoff=DecorrelatedJitter(base=0.5, cap=1.5))
FAILURES = 2  # of the shop's receiver, before it recovers
PATIENCE = 10.0  # seconds for what waits after the last event


class Stage(Protocol):
    """The display of the demo; ``at`` is in seconds from its start."""

    def begin(self) -> None: ...
    def remark(self, at: float, text: str) -> None: ...
    def event(self, at: float, channel: str, text: str) -> None: ...
    def digest(self, at: float, channel: str, texts: list[str]) -> None: ...
    def failure(self, at: float, channel: str, attempt: int) -> None: ...
    def end(self, at: float, sums: dict[str, float]) -> None: ...


Leave: TypeAlias = Callable[[], object]


def demo(in_json: AsJson = False) -> int:
    """Watch a stream of events become digests: a quarter of a minute, on a server of its own, leaving nothing."""
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        try:
            asyncio.run(_play(f"embedded://{folder}", in_json))
        except asyncio.CancelledError:
            return FAILED  # nobody looks any more
    return 0


async def _play(url: str, in_json: bool) -> None:
    from aiodigest.cli.demo_stages import Lines, Screen

    viewer = asyncio.current_task()
    assert viewer is not None
    await Demo(url, (Lines if in_json else Screen)(viewer.cancel)).play()


class Demo:
    """Plays the story, and shows each event and each digest."""

    def __init__(self, url: str, stage: Stage) -> None:
        self._stage = stage
        self._engine = DigestEngine(url, namespace="demo", value_type=str, policy=POLICY, retry=RETRY)
        self._engine.deliver(self._receive)
        self._engine.observe(self._attempted)
        self._attempts: list[Delivery] = []
        self._added: Counter[str] = Counter()
        self._failures = 0
        self._started = 0.0

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    async def play(self) -> None:
        """Play the whole demo."""
        self._stage.begin()
        async with self._engine.delivering():
            self._started = asyncio.get_running_loop().time()
            for scene in story():
                await asyncio.sleep(scene.at - self._now)
                if isinstance(scene, Remark):
                    self._stage.remark(self._now, scene.text)
                else:
                    await self._add(scene)
            await self._wait_for_the_rest()
        self._stage.end(self._now, self._sums())

    async def _add(self, event: Event) -> None:
        self._added[event.channel] += 1
        self._stage.event(self._now, event.channel, event.text)
        await self._engine.add(event.channel, event.text)

    async def _wait_for_the_rest(self) -> None:
        """Wait until nothing is held. A very slow machine may run out of time, and the sums then show it."""
        last = self._now + PATIENCE
        while self._now < last:
            stats = await self._engine.stats()
            if stats.waiting + stats.ready + stats.leased == 0:
                break
            await asyncio.sleep(0.1)

    async def _receive(self, digest: Digest[str]) -> None:
        if digest.key == SHOP and self._failures < FAILURES:
            self._failures += 1
            raise ConnectionError("503 Service Unavailable")
        self._stage.digest(self._now, digest.key, [record.value for record in digest.records])

    def _attempted(self, delivery: Delivery) -> None:
        self._attempts.append(delivery)
        if delivery.result == "failed":
            self._stage.failure(self._now, delivery.key, delivery.attempt)

    def _sums(self) -> dict[str, float]:
        delivered = [attempt for attempt in self._attempts if attempt.result == "delivered"]
        lateness = [attempt.lateness for attempt in self._attempts] or [0.0]
        return {
            "added": self._added.total(),
            "digests": len(delivered),
            "delivered": sum(attempt.records for attempt in delivered),
            "failed": sum(attempt.result == "failed" for attempt in self._attempts),
            "retried": sum(attempt.attempt > 1 for attempt in delivered),
            "median_lateness": round(median(lateness), 6),
            "worst_lateness": round(max(lateness), 6),
        }
