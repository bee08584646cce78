"""Destinations: what a worker knows of each, and which of the claimed digests may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, sqrt
from random import random

from aiodigest.backend import Lease, Postpone
from aiodigest.backoff import REMEMBERED, BackoffMode, ConsumerBackoff
from aiodigest.errors import shown
from aiodigest.logs import logger_of
from aiodigest.policy import milliseconds
from aiodigest.worker.reasons import describe, log_rest

logger = logger_of(__name__)

LONGEST = 300.0  # seconds for which a digest is postponed: then it is asked anew, perhaps by a worker that knows better
FULL = 1.0  # the same, while its destination has all deliveries that it may have; less if these are short
SHORTEST = 0.02
# What comes back is due before others, which would wait for ever behind it if it came faster than it can be postponed.
SHARE = 4  # one part in so many of a worker's time is left for that
COST, DEAREST = 0.000_1, 0.05  # seconds to claim and postpone a digest: until that is measured, and at the most
MANY = 50  # digests postponed at once that tell what one costs
PATIENCE = 1.0  # seconds after a rest in which those that are let through may come one by one, as others come back
STEP = 0.05  # what comes back within so many seconds does so together, in one claim


class Destination:
    """One destination, as a worker knows it: its backoff mode, a pause that a callback asked for, what is under way.

    ``most`` is how many deliveries it may have at once, if there is a limit. Times are by the loop's clock.
    """

    def __init__(self, name: str, mode: BackoffMode, most: int | None = None) -> None:
        self.name = name
        self.backoff = ConsumerBackoff(mode, patience=PATIENCE)
        self.busy = 0  # deliveries under way
        self.paused_until = 0.0
        self.until = 0.0  # when the last of its postponed digests comes back
        self._most = most
        self._lasts = 0.0  # seconds: about how long its deliveries take at present
        self._since = 0.0  # when the latest of them ended, or the first began
        self._rested = 0.0  # when the first of its rests began

    def holds_back(self, now: float) -> bool:
        """True while it is in backoff mode, or paused."""
        return self.backoff.level > 0 or now < self.paused_until

    def is_idle(self, now: float) -> bool:
        """True if there is nothing to remember of it."""
        return not (self.busy or now < self.until or self.backoff.has_evidence or self.holds_back(now))

    def wait(self, now: float) -> float:
        """Return for how long no delivery may begin, in seconds; 0 if one may begin now."""
        if now < self.paused_until:
            return self.paused_until - now
        if not self.backoff.allowed(now, 1):
            return self.backoff.rest(now) or FULL
        if self._most is not None and self.busy >= self._most:
            return min(FULL, max(SHORTEST, self._lasts / 2, (now - self._since) / 2))
        return 0.0

    def began(self, key: str, now: float) -> None:
        """Note that a delivery has begun."""
        if not self.busy:
            self._since = now
        self.busy += 1
        self.backoff.began(key, now)

    def learn(self, key: str, success: bool | None, started: float, ended: float, pause: float) -> None:
        """Learn from the outcome of an attempt: let fewer begin, or none for ``pause`` seconds."""
        self._since = ended
        self._lasts += (ended - started - self._lasts) / 4
        level = self.backoff.level
        if success is None:
            self.backoff.withdrawn(key)
        elif success:
            self.backoff.succeeded(key, ended, started=started)
        else:
            self.backoff.failed(key, ended, started=started)
        if self.backoff.level and not level:
            self._rested = ended
            log_rest(self.name, self.backoff.rest(ended))
        elif level and not self.backoff.level:
            log_rest(self.name, ended - self._rested, is_over=True)
        if pause:
            self.pause(ended + pause)

    def pause(self, until: float) -> None:
        """Let no delivery begin until then."""
        self.paused_until = max(self.paused_until, until)

    def postpone(self, wait: float, failed: bool, spacing: float, now: float) -> float:
        """Return for how long to postpone a digest: ``wait`` seconds, and a share of the time that all need to come
        back ``spacing`` apart on average, those of one step together. Who comes first is drawn, but in backoff mode
        what has ``failed`` comes last."""
        first, step = now + min(wait, LONGEST), min(STEP, wait)
        self.until = max(self.until, first + min(wait, 1.0) / 4) + spacing
        # the square root, or most would come at the beginning, since the time for all grows with each
        share = 1.0 if failed and self.backoff.level else sqrt(random())
        return ceil((first + share * (self.until - first)) / step) * step - now


class Destinations:
    """Knows the destinations of timelines by the user's function from a key to a name; what is idle is forgotten."""

    def __init__(self, function: Callable[[str], str], mode: BackoffMode, most: int | None = None) -> None:
        self._function = function
        self._mode = mode
        self._most = most
        self._known: dict[str, Destination] = {}  # the least recently used first
        self._cost = COST
        self._has_failed = False  # the function, and it has been said

    def name_of(self, key: str) -> str:
        """Return the name of a timeline's destination; '' if the function fails, which is logged once."""
        problem: str
        try:
            name = self._function(key)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too, as from callbacks
            problem = describe(error)
        else:
            if isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                return name
            problem = f"it returned {shown(name)}, which is no str"
        if not self._has_failed:
            self._has_failed = True
            line = "the destination of %r is unknown, and all such timelines share one: %s"
            logger.error(line, key, problem, extra={"timeline": key, "reason": problem})
        return ""

    def of(self, key: str) -> Destination:
        """Return the destination of a timeline."""
        return self.named(self.name_of(key))

    def named(self, name: str) -> Destination:
        """Return the destination of a name."""
        found = self._known.pop(name, None) or Destination(name, self._mode, self._most)
        self._known[name] = found
        if len(self._known) > REMEMBERED:
            unused = next((name for name, each in self._known.items() if not each.busy), name)
            del self._known[unused]
        return found

    def forget(self, destination: Destination, now: float) -> None:
        """Forget a destination if there is nothing to remember of it."""
        if destination.is_idle(now) and self._known.get(destination.name) is destination:
            del self._known[destination.name]

    def all(self) -> list[Destination]:
        """Return those that are known; a thread may ask."""
        return list(self._known.values())

    def sort(
        self, leases: Sequence[Lease], room: int, now: float
    ) -> tuple[list[tuple[Lease, Destination]], list[Postpone]]:
        """Return which claimed digests may begin, ``room`` at the most, and the waits of the others.

        For want of room a digest does not wait, but is ready again. In backoff mode those begin that have not failed,
        else those that have, both drawn at random: the oldest due would be broken ones again.
        """
        found = [(lease, self.of(lease.key)) for lease in leases]
        found.sort(key=lambda each: (each[0].attempt > 1, random()) if each[1].backoff.level else (False, 0.0))
        spacing = SHARE * self._cost * max(1, sum(each.until > now for each in self._known.values()))
        chosen: list[tuple[Lease, Destination]] = []
        postponed: list[Postpone] = []
        for lease, destination in found:
            if wait := destination.wait(now):
                wait = destination.postpone(wait, lease.attempt > 1, spacing, now)
                postponed.append(Postpone(lease, max(1, milliseconds(wait))))
            elif len(chosen) < room:
                destination.began(lease.key, now)
                chosen.append((lease, destination))
            else:
                postponed.append(Postpone(lease, 0))
                self.forget(destination, now)  # it was only looked at
        return chosen, postponed

    def took(self, seconds: float, count: int) -> None:
        """Note how long it took to claim and postpone so many digests."""
        each = min(seconds / count, DEAREST)  # an outage tells nothing
        if count >= MANY or each < self._cost:  # of a few, most of the time is the way to the server
            self._cost += (each - self._cost) / 4
