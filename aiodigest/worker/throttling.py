"""Tokens of a throttle: one for each attempt, taken from the store before a claim, and given back if it is not used."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import randrange, uniform
from typing import NamedTuple

from aiodigest.backend import Backend, Grant, Tokens
from aiodigest.policy import milliseconds
from aiodigest.timing.throttle import HOLD, Throttle
from aiodigest.worker.availability import BACKOFF, Availability
from aiodigest.worker.tasks import GRAIN

CALLS = "tokens"  # a kind of calls, which may fail while others do not
PILE = 0.05  # seconds for which tokens may pile up, up to half of a burst, so that many come with one call
SPREAD = 1.0  # seconds, or half of what it takes until the next token, over which those who compete for it are spread
NAME = 1024  # bytes of a destination's name, at the most, for its pause to be told


class Token(NamedTuple):
    """The right to begin one attempt, before ``ends`` (by the event loop's clock)."""

    source: int
    at_us: int
    ends: float


class Throttling:
    """The tokens of a process: what it takes for claims and attempts, what it gives back, and the pauses that it tells
    and is told with them.

    A token ends ``HOLD`` after the call that brought it was sent, so never later than it may be used. Who is refused
    asks again when there is another, and spread over time where several processes compete: who has waited for longer
    asks sooner, so that each has its turn, however far away its server is. ``hear`` is told of a destination that
    pauses, and until when (by the event loop's clock); ``changed`` is set when there may be more tokens than was told.
    """

    def __init__(
        self,
        throttle: Throttle,
        backend: Backend,
        availability: Availability,
        hear: Callable[[str, float], None],
        changed: asyncio.Event,
    ) -> None:
        self._rate = throttle.rate
        self._interval = self._rate.interval_us / 1_000_000  # seconds
        self._backend = backend
        self._availability = availability
        self._hear = hear
        self._changed = changed
        self._asker = randrange(1, 2**48)
        self._known = self._source = 0
        self._refusals = self._failures = 0  # in a row
        self._resumes_at = 0.0  # when to ask again
        self._returned: Counter[tuple[int, int]] = Counter()
        self._pauses: dict[str, float] = {}  # until when, to be told to others
        self._told = asyncio.Event()  # there is something to give back, or to tell

    def wait(self, now: float) -> float:
        """Return the seconds until it is worth asking; 0 if it may be now."""
        return max(0.0, self._resumes_at - now)

    async def take(self, wanted: int) -> list[Token]:
        """Take up to so many tokens; none if there are none now, or the store is away: ``wait`` tells for how long."""
        clock = asyncio.get_running_loop().time
        if self.wait(sent := clock()):
            return []
        try:
            grant = await self._call(wanted)
        except Exception as error:
            self._availability.failed(error, CALLS)
            self._failures += 1
            self._resumes_at = clock() + BACKOFF(self._failures)
            return []
        self._failures = 0
        count = grant.tokens.number
        self._refusals = 0 if count else self._refusals + 1
        if count < wanted:
            self._resumes_at = clock() + self._pace(grant)
        return [Token(grant.tokens.source, grant.tokens.at_us, sent + HOLD)] * count

    def _pace(self, grant: Grant) -> float:
        pile = min(PILE, (self._rate.burst - 1) * self._interval / 2)
        share = min(SPREAD, self._interval / 2) / (1 + self._refusals) if grant.contended else 0.0
        return max(grant.wait_us / 1_000_000, pile) + uniform(0, share)

    def use(self, tokens: Sequence[Token]) -> bool:
        """Use a token for an attempt, which may begin now, before anything is awaited; False if its time is over."""
        if any(asyncio.get_running_loop().time() < token.ends for token in tokens):
            return True
        self.give_back(tokens)
        return False

    def give_back(self, tokens: Sequence[Token]) -> None:
        """Give back tokens that were not used, unless as many have come anew meanwhile."""
        now = asyncio.get_running_loop().time()
        for token in tokens:
            if len(tokens) * self._interval > now - (token.ends - HOLD):
                self._returned[token.source, token.at_us] += 1
                self._told.set()

    def pause(self, destination: str, until: float) -> None:
        """Tell all workers to hold back a destination; not of one whose name is too long."""
        if len(destination.encode(errors="surrogatepass")) <= NAME:
            self._pauses[destination] = max(until, self._pauses.get(destination, 0.0))
            self._told.set()

    async def run(self) -> None:
        """Give back and tell what no call that takes tokens takes along, until cancelled."""
        while True:
            await self._told.wait()
            await asyncio.sleep(GRAIN)
            if not await self.flush():
                await self._availability.pause(CALLS)
            elif not (self._returned or self._pauses):
                self._told.clear()

    async def flush(self) -> bool:
        """Give back and tell what there is; False if that fails."""
        try:
            if self._returned or self._pauses:
                await self._call(0)
        except Exception as error:
            self._availability.failed(error, CALLS)
            return False
        return True

    async def _call(self, wanted: int) -> Grant:
        clock = asyncio.get_running_loop().time
        returned, self._returned = self._returned, Counter()  # lost if the call fails: it may have been done
        pauses, self._pauses = self._pauses, {}
        now = clock()
        try:
            grant = await self._backend.throttle(
                wanted,
                self._rate,
                self._asker,
                [Tokens(*grant, count) for grant, count in returned.items()],
                [(name, milliseconds(until - now)) for name, until in pauses.items() if until > now],
                self._known,
            )
        except BaseException:
            self._pauses = pauses | self._pauses
            raise
        self._availability.answered(CALLS)
        same = grant.tokens.source == self._source  # the pauses of another shard have numbers of their own
        self._known, self._source = grant.known if same else 0, grant.tokens.source
        if returned:
            self._resumes_at = min(self._resumes_at, clock() + grant.wait_us / 1_000_000)
            self._changed.set()
        for name, left_ms in grant.pauses:
            self._hear(name, clock() + left_ms / 1000)
        return grant
