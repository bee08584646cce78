"""Timelines with rules of all kinds, short enough for a run of a minute, and what may be seen of a broken one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Any

from aiodigest import At, Hours, Policy

RULED = 24  # timelines
# Any minute of the server's is the same minute of this machine's hour: that steps by whole hours alone.
EVEN = ",".join(f"{hour:02}:{minute:02}-{hour:02}:{minute + 1:02}" for hour in range(24) for minute in range(0, 60, 2))
ODD = Hours.except_(EVEN, spread=5)
MINUTE = 60.0
WINDOW = 30.0

# Digests in quick succession, in parts when a timeline has run full, and no record dropped: no timeline ever gets more
# than it may hold, however slow this machine and its receivers are.
PLAIN = Policy(minimum_delay=0.2, increment_delay=0.02, maximum_delay=0.5, max_size=300, capacity=10_000)


def names() -> list[str]:
    """Return the timelines that have rules of their own."""
    return [f"ruled {number}" for number in range(RULED)]


@cache
def policy_of(key: str) -> Policy:
    """Return the policy of a timeline: by its name, so that all processes agree."""
    if not key.startswith("ruled "):
        return PLAIN
    random, number = Random(key), int(key.removeprefix("ruled "))
    others: dict[str, Any]
    rules: list[dict[str, Any]] = [
        {"minimum_delay": 0.2, "increment_delay": 0.02, "maximum_delay": 0.5},
        {"quiet_delay": random.choice((0.2, 1.0)), "maximum_delay": 3, "minimum_delay": random.choice((0, 0.5))},
        {"price": random.choice((0.5, 2)), "maximum_delay": 3, "randomised": random.random() < 0.5,
         "minimum_delay": 0.5, "first_at_once": random.random() < 0.5},
        {"at": At("* * * * *")},
    ]  # fmt: skip
    others = {"hours": ODD if number // 4 % 3 == 1 else None, "dedupe_window": WINDOW if number // 4 % 2 else None}
    if number % 2 == 0:  # of the others it is seen that they wait, which what is full does not
        others |= {"max_bytes": random.choice((None, 30, 60)), "max_size": random.choice((None, 20))}
    return Policy(**rules[number % 4], **others, capacity=10_000)


def is_open(key: str, wall: float) -> bool:
    """Return whether the hours of a timeline are open at a time of this machine's clock."""
    return policy_of(key).hours is None or int(wall // MINUTE) % 2 == 1


def broken(key: str, records: Sequence[int], oldest: float, begun: float) -> Iterator[str]:
    """Yield what a digest breaks that is begun at a time of this machine's clock, whose oldest record was added at
    another, or a little later."""
    policy = policy_of(key)
    if not is_open(key, begun):
        yield "was begun in closed hours"
    if policy.at is not None and oldest // MINUTE == begun // MINUTE:
        yield "was begun before an instant of its calendar"
    if begun - oldest < policy.terms.quiet_ms / 1000:
        yield f"was begun {begun - oldest:.3f} s after its first record"
    if policy.max_bytes and len(records) > 1 and sum(len(str(record)) for record in records) > policy.max_bytes:
        yield f"holds more than {policy.max_bytes} bytes"
