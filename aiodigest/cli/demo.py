"""``aiodigest demo``: a bad quarter of an hour at a small company, played on an engine in fourteen seconds."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodigest import DecorrelatedJitter, Delivery, Digest, DigestEngine, Policy, RetryPolicy
from aiodigest.cli.options import AsJson
from aiodigest.cli.output import FAILED
from aiodigest.cli.rendering import as_json, count

if TYPE_CHECKING:
    from rich.console import Console

POLICY = Policy(minimum_delay=4, increment_delay=0.25, maximum_delay=6)
RETRY = RetryPolicy(max_attempts=6, backoff=DecorrelatedJitter(base=0.5, cap=1.5))
FAILURES = 2  # of the shop's receiver, before it recovers
LAST_WAIT = 10.0  # seconds for what waits after the last event
SHOWN = 3  # records of a digest

CI, SHOP, ON_CALL = "#builds", "#shop", "#on-call"


class Event(NamedTuple):
    """An event ``at`` seconds from the start, in a person's or team's ``channel``; without one, a hint."""

    at: float
    channel: str
    text: str


SUITES = ("unit", "integration", "browser", "migrations")
BRANCHES = ("main", "release/2.4", "fix/rounding")
NODES = ("web-1", "web-2", "web-3", "db-1", "cache-1")
SYMPTOMS = ("p99 latency above 2 s", "5xx rate above 1 %", "connections above 90 %", "queue older than 60 s")
ORDERS = {"A-1042": "59.90", "A-1043": "12.00", "A-1044": "249.00", "A-1045": "8.50", "A-1047": "33.20"}


def story() -> list[Event]:
    """Return all of it, in order."""
    builds = [f"failed on {BRANCHES[index % 3]}: {SUITES[index % 4]} tests" for index in range(9)]
    alerts = [f"{NODES[index % 5]}: {SYMPTOMS[index // 3 % 4]}" for index in range(44)]
    payments = [f"payment of {order} ({amount} EUR) declined: timeout" for order, amount in ORDERS.items()]
    scenes = [
        Event(0.2, "", "One event is sent at once."),
        Event(0.3, CI, "build 4711 failed on main: test_checkout_total"),
        Event(1.8, ON_CALL, "db-1: disk 91 % full"),
        Event(2.9, "", "A burst: one message is out already, so the rest waits and comes as one more."),
        *(Event(3.0 + index * 0.06, ON_CALL, text) for index, text in enumerate(alerts)),
        *(Event(3.5 + index * 0.2, CI, f"build {4712 + index} {text}") for index, text in enumerate(builds)),
        Event(7.4, "", "The shop's receiver fails: it gets its digest again, with what has come since."),
        *(Event(7.5 + index * 0.45, SHOP, text) for index, text in enumerate(payments)),
        *(Event(10.5 + index * 0.3, ON_CALL, f"{node}: recovered") for index, node in enumerate(NODES)),
        Event(11.2, SHOP, "gateway is back: retrying 5 payments"),
        Event(12.4, CI, "build 4721 passed on main"),
        Event(13.0, "", "No more events: what waits is sent when it is due."),
    ]
    return sorted(scenes, key=lambda scene: scene.at)


def demo(in_json: AsJson = False) -> int:
    """Watch a stream of events become digests.

    It takes a quarter of a minute, on a server of its own, and leaves nothing behind.
    """
    from rich.console import Console

    console = Console(highlight=False)
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        if not in_json:
            console.print("Starting a server in a temporary folder ...", style="dim")
        try:
            asyncio.run(Demo(f"embedded://{folder}", partial(show, console, in_json)).play())
        except asyncio.CancelledError:
            return FAILED  # nobody is watching any more
    return 0


def show(console: Console, in_json: bool, at: float, what: str, **facts: Any) -> None:
    """Show what happened ``at`` seconds from the start: a coloured line for people, or JSON for programs."""
    if in_json:
        console.out(as_json({"at": round(at, 3), "what": what, **facts}), highlight=False)
        return
    from rich.text import Text

    def line(word: str, style: str, text: str, text_style: str) -> Text:
        time, channel = (f"{at:5.1f} s ", "dim"), (f"{facts['channel']:<9} ", "cyan")
        return Text.assemble(time, (f"{word} ", style), channel, (text, text_style))

    match what:
        case "remark":
            shown = Text(f"\n{facts['text']}", "bold yellow")
        case "event":
            shown = line("event ", "dim", facts["text"], "dim")
        case "digest":
            texts = facts["texts"]
            more = [f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
            shown = line("DIGEST", "bold green", count(len(texts), "event"), "bold")
            shown.append("".join(f"\n                 | {text}" for text in texts[:SHOWN] + more), "green")
        case "failure":
            shown = line("FAILED", "bold red", f"attempt {facts['attempt']}: 503, to be retried soon", "red")
        case _:
            median, worst = facts["median_lateness"] * 1000, facts["worst_lateness"] * 1000
            shown = Text.assemble(
                ("\nWhat happened", "bold"),
                f"\n  records in            {facts['added']}",
                f"\n  digests out           {facts['digests']}, with {count(facts['delivered'], 'record')}",
                f"\n  deliveries failed     {facts['failed']}, and {count(facts['retried'], 'digest')}",
                " delivered by a retry",
                f"\n  lateness              median {median:.0f} ms, worst {worst:.0f} ms",
                (f"\n\nYour own stream: {_command()} pipe --help", "dim"),
            )
    console.print(shown)


def _command() -> str:
    """Return this command as it can be typed: by its name if that is found, else by the path that started it."""
    return "aiodigest" if shutil.which("aiodigest") or not sys.argv[0].endswith("aiodigest") else sys.argv[0]


class Demo:
    """Plays the story on an engine and shows what happens."""

    def __init__(self, url: str, show: Callable[..., None]) -> None:
        self._show = show
        self._engine = DigestEngine(url, namespace="demo", value_type=str, policy=POLICY, retry=RETRY)
        self._engine.deliver(self._receive)
        self._engine.observe(self._on_attempt)
        self._attempts: list[Delivery] = []
        self._failures = 0
        self._started = 0.0
        self._viewer: asyncio.Task[Any] | None = None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    def _tell(self, what: str, **facts: Any) -> None:
        try:
            self._show(self._now, what, **facts)
        except SystemExit:  # rich raises it, once, when the reader of standard output has gone
            if self._viewer is not None:
                self._viewer.cancel()

    async def play(self) -> None:
        """Play the whole demo. Raises CancelledError if nobody is watching any more."""
        self._viewer = asyncio.current_task()
        async with self._engine.delivering():
            self._started = asyncio.get_running_loop().time()
            scenes = story()
            for scene in scenes:
                await asyncio.sleep(scene.at - self._now)
                if scene.channel:
                    self._tell("event", channel=scene.channel, text=scene.text)
                    await self._engine.add(scene.channel, scene.text)
                else:
                    self._tell("remark", text=scene.text)
            last = self._now + LAST_WAIT  # a very slow machine may run out of time, and the totals then show it
            while self._now < last:
                stats = await self._engine.stats()
                if stats.waiting + stats.ready + stats.leased == 0:
                    break
                await asyncio.sleep(0.1)
        delivered = [attempt for attempt in self._attempts if attempt.result == "delivered"]
        lateness = [attempt.lateness for attempt in self._attempts] or [0.0]
        self._tell(
            "end",
            added=sum(bool(scene.channel) for scene in scenes),
            digests=len(delivered),
            delivered=sum(attempt.records for attempt in delivered),
            failed=sum(attempt.result == "failed" for attempt in self._attempts),
            retried=sum(attempt.attempt > 1 for attempt in delivered),
            median_lateness=round(median(lateness), 6),
            worst_lateness=round(max(lateness), 6),
        )

    async def _receive(self, digest: Digest[str]) -> None:
        if digest.key == SHOP and self._failures < FAILURES:
            self._failures += 1
            raise ConnectionError("503 Service Unavailable")
        self._tell("digest", channel=digest.key, texts=[record.value for record in digest.records])

    def _on_attempt(self, delivery: Delivery) -> None:
        self._attempts.append(delivery)
        if delivery.result == "failed":
            self._tell("failure", channel=delivery.key, attempt=delivery.attempt)
