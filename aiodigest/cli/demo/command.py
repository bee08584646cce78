"""The command ``aiodigest demo``: it plays the story on an engine, and shows each event and each digest."""

from __future__ import annotations

import asyncio
from collections import Counter
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from aiodigest import DecorrelatedJitter, Delivery, Digest, DigestEngine, Policy, RetryPolicy
from aiodigest.cli.demo.story import SHOP, Event, Remark, story
from aiodigest.cli.exit_codes import FAILED
from aiodigest.cli.options import AsJson

if TYPE_CHECKING:
    from aiodigest.cli.demo.display import Display

POLICY = Policy(minimum_delay=4, increment_delay=0.25, maximum_delay=6)
RETRY = RetryPolicy(max_attempts=6, backoff=DecorrelatedJitter(base=0.5, cap=1.5))
FAILURES = 2  # of the shop's receiver, before it recovers
LAST_WAIT = 10.0  # seconds for what waits after the last event


def demo(in_json: AsJson = False) -> int:
    """Watch a stream of events become digests.

    It takes a quarter of a minute, on a server of its own, and leaves nothing behind.
    """
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        try:
            asyncio.run(_play(f"embedded://{folder}", in_json))
        except asyncio.CancelledError:
            return FAILED  # nobody is watching any more
    return 0


async def _play(url: str, in_json: bool) -> None:
    from aiodigest.cli.demo.display import Display

    viewer = asyncio.current_task()
    assert viewer is not None
    display = Display(in_json, leave=viewer.cancel)
    if not in_json:
        display.print("Starting a server in a temporary folder ...", style="dim")
    await Demo(url, display).play()


class Demo:
    """Plays the story on an engine and shows what happens."""

    def __init__(self, url: str, display: Display) -> None:
        self._display = display
        self._engine = DigestEngine(url, namespace="demo", value_type=str, policy=POLICY, retry=RETRY)
        self._engine.deliver(self._receive)
        self._engine.observe(self._on_attempt)
        self._attempts: list[Delivery] = []
        self._added: Counter[str] = Counter()
        self._failures = 0
        self._started = 0.0

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    async def play(self) -> None:
        """Play the whole demo."""
        async with self._engine.delivering():
            self._started = asyncio.get_running_loop().time()
            for scene in story():
                await asyncio.sleep(scene.at - self._now)
                if isinstance(scene, Remark):
                    self._display.show(self._now, "remark", text=scene.text)
                else:
                    await self._add(scene)
            await self._wait_for_the_rest()
        self._display.show(self._now, "end", **self._totals())

    async def _add(self, event: Event) -> None:
        self._added[event.channel] += 1
        self._display.show(self._now, "event", channel=event.channel, text=event.text)
        await self._engine.add(event.channel, event.text)

    async def _wait_for_the_rest(self) -> None:
        """Wait until nothing is held. A very slow machine may run out of time, and the totals then show it."""
        last = self._now + LAST_WAIT
        while self._now < last:
            stats = await self._engine.stats()
            if stats.waiting + stats.ready + stats.leased == 0:
                break
            await asyncio.sleep(0.1)

    async def _receive(self, digest: Digest[str]) -> None:
        if digest.key == SHOP and self._failures < FAILURES:
            self._failures += 1
            raise ConnectionError("503 Service Unavailable")
        texts = [record.value for record in digest.records]
        self._display.show(self._now, "digest", channel=digest.key, texts=texts)

    def _on_attempt(self, delivery: Delivery) -> None:
        self._attempts.append(delivery)
        if delivery.result == "failed":
            self._display.show(self._now, "failure", channel=delivery.key, attempt=delivery.attempt)

    def _totals(self) -> dict[str, float]:
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
