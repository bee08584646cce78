"""The events that the demo plays: a bad quarter of an hour at a small company, in fourteen seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

CI, SHOP, ON_CALL = "#builds", "#shop", "#on-call"


class Event(NamedTuple):
    """An event; it happens ``at`` seconds from the start, in a person's or team's ``channel``."""

    at: float
    channel: str
    text: str


class Remark(NamedTuple):
    """A hint for the reader, on what to look at now."""

    at: float
    text: str


SUITES = ("unit", "integration", "browser", "migrations")
BRANCHES = ("main", "release/2.4", "fix/rounding")
NODES = ("web-1", "web-2", "web-3", "db-1", "cache-1")
SYMPTOMS = ("p99 latency above 2 s", "5xx rate above 1 %", "connections above 90 %", "queue older than 60 s")
ORDERS = (("A-1042", "59.90"), ("A-1043", "12.00"), ("A-1044", "249.00"), ("A-1045", "8.50"), ("A-1047", "33.20"))


def story() -> list[Event | Remark]:
    """Return all of it, in order."""
    return sorted(_all(), key=lambda scene: scene.at)


def _all() -> Iterator[Event | Remark]:
    yield Remark(0.2, "One event is sent at once.")
    yield Event(0.3, CI, "build 4711 failed on main: test_checkout_total")
    yield Event(1.8, ON_CALL, "db-1: disk 91 % full")

    yield Remark(2.9, "A burst: one message is out already, so the rest waits and comes as one more.")
    for index in range(44):
        node, symptom = NODES[index % len(NODES)], SYMPTOMS[index // 3 % len(SYMPTOMS)]
        yield Event(3.0 + index * 0.06, ON_CALL, f"{node}: {symptom}")
    for index in range(9):
        branch, suite = BRANCHES[index % len(BRANCHES)], SUITES[index % len(SUITES)]
        yield Event(3.5 + index * 0.2, CI, f"build {4712 + index} failed on {branch}: {suite} tests")

    yield Remark(7.4, "The shop's receiver fails: it gets its digest again, with what has come since.")
    for index, (order, amount) in enumerate(ORDERS):
        yield Event(7.5 + index * 0.45, SHOP, f"payment of {order} ({amount} EUR) declined: timeout")

    for index, node in enumerate(NODES):
        yield Event(10.5 + index * 0.3, ON_CALL, f"{node}: recovered")
    yield Event(11.2, SHOP, "gateway is back: retrying 5 payments")
    yield Event(12.4, CI, "build 4721 passed on main")
    yield Remark(13.0, "No more events: what waits is sent when it is due.")
