"""``aiodigest bench``: the speed of adds and deliveries on the user's own server."""

from __future__ import annotations

import signal
from dataclasses import asdict
from secrets import token_hex
from typing import Annotated, TypeAlias

import typer

from aiodigest import BackendUnavailable, DigestEngine, Policy, RetryPolicy
from aiodigest.cli.answers import print_table
from aiodigest.cli.loops import play, stopped_by, until
from aiodigest.cli.measure import MOST, VALUE, Figures, measure
from aiodigest.cli.options import EMBEDDED, INTERRUPTED, AsJson, Timeout, Url
from aiodigest.cli.progress import progress_bar
from aiodigest.cli.words import as_json, say

POLICY = Policy(minimum_delay=0, increment_delay=0, ttl=3600)  # a run that is killed leaves its records for two hours
SHARDS = 16  # on a cluster
MEGABYTES = MOST * (len(VALUE) + 100) / 1e6  # a record takes about so much more

Seconds: TypeAlias = Annotated[float, typer.Option(min=1, max=600, metavar="SECONDS", help="How long it takes, about.")]


def bench(url: Url = EMBEDDED, seconds: Seconds = 10, timeout: Timeout = 5.0, in_json: AsJson = False) -> int:
    """Measure adds and deliveries on a server, beside a bare round trip to it.

    It works in a namespace of its own, which it removes at the end, or when interrupted. The removal looks
    through all keys of the server, and takes as long as that does.
    """
    figures = play(_benched(url, seconds, timeout))
    if figures is None:
        return INTERRUPTED
    if in_json:
        print(as_json(asdict(figures)))
    else:
        _print(figures)
    return 0


async def _benched(url: str, seconds: float, timeout: float) -> Figures | None:
    """Return the figures; None if it was interrupted."""
    namespace = f"bench-{token_hex(8)}"

    def engine() -> DigestEngine[str]:
        shards = SHARDS if "+cluster://" in url else None
        return DigestEngine(
            url, namespace=namespace, value_type=str, policy=POLICY, retry=RetryPolicy(max_attempts=1), shards=shards,
            timeout=timeout, drain_timeout=1,
        )  # fmt: skip

    with stopped_by(signal.SIGINT, signal.SIGTERM) as stop:
        async with engine() as first:
            await first._try_erase()  # else what is written might stay
            amount = f"up to {MOST:,} records ({MEGABYTES:.0f} MB) at a time in the namespace {namespace}"
            removal = "and then looks through all keys of the server to remove them"
            say(f"for about {seconds:g} s this writes {amount} on {first.url}, {removal}")
        try:
            with progress_bar("measuring", round(seconds)) as tell:
                async with engine() as adder:  # leaving it sends everything queued
                    return await until(stop, measure(adder, engine(), seconds, tell))
        finally:
            async with engine() as last:
                await _remove(last)


async def _remove(engine: DigestEngine[str]) -> None:
    try:
        await engine.erase()
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}; what the namespace {engine.namespace} holds is left there") from error


def _print(figures: Figures) -> None:
    def taking(what: str, seconds: float) -> tuple[str, str, str]:
        return what, f"{seconds * 1000:,.3g} ms", f"{seconds / figures.round_trip:.3g}"

    def coming(what: str, rate: float) -> tuple[str, str, str]:
        return what, f"{rate:,.0f} a second", f"{1 / rate / figures.round_trip:.3g}"

    rows = [
        taking("bare round trip", figures.round_trip),
        taking("add, one after the other", figures.add),
        coming("adds by 200 tasks", figures.adds_by_tasks),
        coming("adds by add_many", figures.adds_by_add_many),
        coming("digests of ten records", figures.digests),
        taking("add to callback, median", figures.latency),
        taking("add to callback, 99 of 100", figures.latency_p99),
    ]
    print_table((figures.server, "", "round trips each"), rows)
