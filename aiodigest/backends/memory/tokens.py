"""The tokens of a throttle, as the in-memory store hands them out, and the pauses that it passes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiodigest.backend import PAUSES, Grant, Tokens

if TYPE_CHECKING:
    from aiodigest.timing.throttle import Rate


@dataclass
class Bucket:
    """The generic cell rate algorithm: ``tat_us`` is when, at one token every interval, all would be paid off that were
    handed out; it may lie up to ``burst`` intervals ahead. Times are by its shard's clock, and never step back."""

    tat_us: int | None = None
    took_us: int = 0  # the time of the latest call
    refused: int = 0  # who asked in vain last
    paused: int = 0  # the number of the pauses
    pauses: dict[str, int] = field(default_factory=dict[str, int])  # when they end, in ms

    def take(self, wanted: int, rate: Rate, returned: Sequence[Tokens], now: int, changed: bool) -> tuple[int, int]:
        """Hand out tokens at ``now`` (ms); return how many, and the time until there is another. ``changed``: another
        shard may have handed out some before."""
        time = self.took_us = max(1_000 * now, self.took_us)
        reach = (rate.burst - 1) * rate.interval_us
        latest = time + rate.rest_us + reach
        tat = latest if changed and self.tat_us is None else min(latest, self.tat_us or 0)
        for each in returned:
            tat -= max(0, each.number * rate.interval_us - max(0, time - each.at_us))
        tat = max(tat, time)
        count = max(0, min(wanted, rate.burst + (time - tat) // rate.interval_us))
        self.tat_us = tat + count * rate.interval_us
        return count, max(0, self.tat_us - reach - time)

    def ask(
        self,
        wanted: int,
        rate: Rate,
        asker: int,
        returned: Sequence[Tokens],
        pauses: Sequence[tuple[str, int]],
        known: int,
        *,
        now: int,
        source: int,
        changed: bool,
    ) -> Grant:
        """See ``Backend.throttle``."""
        count, wait_us = self.take(wanted, rate, returned, now, changed)
        contended = self.refused not in (0, asker)
        if not self.refused or (wanted and not count):
            self.refused = asker
        for name, delay_ms in pauses:
            if now + delay_ms > self.pauses.get(name, 0):
                self.pauses[name] = now + delay_ms
                self.paused += 1
        self.pauses = {name: end for name, end in self.pauses.items() if end > now}
        if len(self.pauses) > PAUSES:
            last = sorted(self.pauses, key=lambda name: (self.pauses[name], name.encode(errors="surrogatepass")))
            self.pauses = {name: self.pauses[name] for name in last[-PAUSES:]}
        left = sorted(((name, end - now) for name, end in self.pauses.items()), key=lambda each: (each[1], each[0]))
        tokens = Tokens(source, self.took_us, count)
        return Grant(tokens, wait_us, contended, self.paused, () if known == self.paused else tuple(left))
