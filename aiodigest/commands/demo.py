"""``aiodigest demo``: twenty seconds that show what aiodigest does."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from statistics import median
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.text import Text

from aiodigest import DecorrelatedJitter, Delivery, Digest, DigestEngine, Policy, RetryPolicy
from aiodigest.commands.demo_events import SHOP, Event, Remark, story
from aiodigest.commands.options import FAILED
from aiodigest.commands.words import count

POLICY = Policy(minimum_delay=4, increment_delay=0.25, maximum_delay=6)
RETRY = RetryPolicy(max_attempts=6, backoff=DecorrelatedJitter(base=0.5, cap=1.5))
FAILURES = 2  # of the shop's receiver, before it recovers
SHOWN = 3  # records of a digest
PATIENCE = 10.0  # seconds for what waits after the last event


def demo() -> int:
    """Watch a stream of events become digests: twenty seconds, with a server of its own, leaving nothing behind."""
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        try:
            asyncio.run(_play(f"embedded://{folder}"))
        except asyncio.CancelledError:
            return FAILED  # nobody looks any more
    return 0


async def _play(url: str) -> None:
    await Demo(url).play()


class Screen(Console):
    """The terminal; when it goes away, the task that made this is cancelled."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        self._viewer = asyncio.current_task()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains at its end
        if self._viewer is not None:
            self._viewer.cancel()


class Demo:
    """Plays the story, and shows what goes in and what comes out; made by the task that plays it."""

    def __init__(self, url: str) -> None:
        self._screen = Screen()
        self._engine = DigestEngine(url, namespace="demo", value_type=str, policy=POLICY, retry=RETRY)
        self._engine.deliver(self._receive)
        self._engine.observe(self._attempted)
        self._attempts: list[Delivery] = []
        self._added: Counter[str] = Counter()
        self._failures = 0
        self._started = 0.0

    async def play(self) -> None:
        """The whole demo."""
        self._screen.print(Text("Starting a server in a temporary folder ...", "dim"))
        async with self._engine.delivering():
            self._started = asyncio.get_running_loop().time()
            for scene in story():
                await asyncio.sleep(self._started + scene.at - asyncio.get_running_loop().time())
                if isinstance(scene, Remark):
                    self._screen.print(Text(f"\n{scene.text}", "bold yellow"))
                else:
                    await self._add(scene)
            await self._wait_for_the_rest()
        self._sum_up()

    async def _add(self, event: Event) -> None:
        self._added[event.channel] += 1
        self._line("event ", "dim", event.channel, event.text, "dim")
        await self._engine.add(event.channel, event.text)

    async def _wait_for_the_rest(self) -> None:
        """Until nothing is held; on a very slow machine less, which the sums then show."""
        last = asyncio.get_running_loop().time() + PATIENCE
        while asyncio.get_running_loop().time() < last:
            stats = await self._engine.stats()
            if stats.waiting + stats.ready + stats.leased == 0:
                break
            await asyncio.sleep(0.1)

    async def _receive(self, digest: Digest[str]) -> None:
        if digest.key == SHOP and self._failures < FAILURES:
            self._failures += 1
            raise ConnectionError("503 Service Unavailable")
        texts = [record.value for record in digest.records]
        self._line("DIGEST", "bold green", digest.key, count(len(texts), "event"), "bold")
        for text in texts[:SHOWN]:
            self._screen.print(Text(f"                 | {text}", "green"))
        if len(texts) > SHOWN:
            self._screen.print(Text(f"                 | ... and {len(texts) - SHOWN} more", "green"))

    def _attempted(self, delivery: Delivery) -> None:
        self._attempts.append(delivery)
        if delivery.result == "failed":
            self._line("FAILED", "bold red", delivery.key, f"attempt {delivery.attempt}: 503, tried again soon", "red")

    def _line(self, word: str, style: str, channel: str, text: str, text_style: str) -> None:
        time = asyncio.get_running_loop().time() - self._started
        line = Text().append(f"{time:5.1f} s ", "dim").append(f"{word} ", style).append(f"{channel:<9} ", "cyan")
        self._screen.print(line.append(text, text_style))

    def _sum_up(self) -> None:
        delivered = [attempt for attempt in self._attempts if attempt.result == "delivered"]
        failed = [attempt for attempt in self._attempts if attempt.result == "failed"]
        records = sum(attempt.records for attempt in delivered)
        retried = sum(attempt.attempt > 1 for attempt in delivered)
        lateness = [attempt.lateness * 1000 for attempt in self._attempts] or [0.0]
        self._screen.print(
            Text("\nWhat happened", "bold"),
            Text(f"  records in            {self._added.total()}"),
            Text(f"  digests out           {len(delivered)}, with {count(records, 'record')}"),
            Text(f"  deliveries failed     {len(failed)}, and {count(retried, 'digest')} delivered by a retry"),
            Text(f"  lateness              median {median(lateness):.0f} ms, worst {max(lateness):.0f} ms"),
            Text("\nYour own stream: aiodigest pipe --help", "dim"),
            sep="\n",
        )
