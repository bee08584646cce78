"""``Throttle``: how many attempts to deliver may begin, over all workers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from aiodigest.arguments import duration, whole

HOLD = 1.0  # seconds from the grant of a token in which its attempt may begin
SHORTEST = 0.001  # seconds, of ``per``


class Rate(NamedTuple):
    """A throttle as the store takes it: a token every ``interval_us`` microseconds, up to ``burst`` at once, and none
    for ``rest_us`` where nothing is known of those that were handed out before."""

    interval_us: int
    burst: int
    rest_us: int


@dataclass(frozen=True, slots=True, init=False)
class Throttle:
    """A limit on the rate: no window of ``per`` seconds sees more than ``limit`` attempts to deliver begin.

    It holds for all workers and shards of a namespace together, by the clock of the server of its first shard; give all
    of them the same. Each part of a digest that comes in parts is an attempt, and so is each retry. What is over waits,
    the oldest due first on each shard, uncharged.

    ``limit`` is a whole number from 1 to 1,000,000, ``per`` seconds or a timedelta of a millisecond at least, and
    ``burst``, from 1 to ``limit``, the most that may begin at once after a quiet time. In the long run an attempt
    begins every ``(per + 1) / (limit - burst + 1)`` seconds, since each may begin up to a second after it was allowed.
    Raises InvalidArgument if one of them is not allowed.
    """

    limit: int
    per: float
    burst: int

    def __init__(self, limit: int, per: float | timedelta, burst: int = 1) -> None:
        object.__setattr__(self, "limit", whole(limit, "limit", 1, 1_000_000))
        object.__setattr__(self, "per", duration(per, "per", SHORTEST))
        object.__setattr__(self, "burst", whole(burst, "burst", 1, limit))

    @property
    def rate(self) -> Rate:
        """The throttle as the store takes it."""
        rest_us = round((self.per + HOLD) * 1_000_000)
        # a microsecond more than its share, so that even a window with both of its ends sees no more
        return Rate(rest_us // (self.limit - self.burst + 1) + 1, self.burst, rest_us)
