"""Faults that can be put back into the engines of a world, to see that its promises find them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from aiodigest.backends.memory import backend, timelines
from aiodigest.timing import calendar
from aiodigest.worker import delivery, doubts
from simulation.families import FAMILIES, family_of
from simulation.network import Link
from simulation.world import World


@dataclass(frozen=True)
class Planted:
    """Other text in a function, the worlds that show what it breaks, and the first seed that has shown it."""

    family: str  # "": those in which anything may happen
    seed: int
    owner: Any
    name: str
    old: str  # it stands there once
    new: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.owner, self.name, self._changed())

    def _changed(self) -> Any:
        function = inspect.getattr_static(self.owner, self.name)
        if not self.old:
            return eval(self.new)
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.old) != 1:
            raise AssertionError(f"{self.old!r} stands {source.count(self.old)} times in {self.name}, not once")
        module: dict[str, Any] = {}
        exec(compile(source.replace(self.old, self.new), self.name, "exec"), vars(inspect.getmodule(function)), module)
        made: Callable[..., Any] = module[self.name]
        return made


PLANTED = {
    "after a rest the oldest due are tried": Planted(
        "receivers", 490, backend.ReferenceBackend, "claim",
        "partial(self._sample, doubtful=doubtful) if sample else ", "",
    ),
    "the clock of a shard steps back": Planted(
        "clocks", 4, timelines.Shard, "now", "self.clock_ms if self.clock_ms - now > STEP_MS else now", "now"
    ),
    "a lease that ended without a word charges an attempt": Planted(
        "poison", 8, timelines.Shard, "lease", "delivery.lost >= ALONE", "True"
    ),
    "doubtful digests come beside others without bound": Planted(
        "blocking", 16, doubts.Doubts, "_may_ask", "", "property(lambda self: True)"
    ),
    "no digest runs alone": Planted("poison", 8, doubts.Doubts, "alone", "", "property(lambda self: None)"),
    "a request that comes late is carried out": Planted("partitions", 3, Link, "not_after", "", "False"),
    "each gap begins a new hold": Planted(
        "fleets", 19, timelines.Shard, "watch_gap", "= now + lease_ms, self.hold_ms", "= now + lease_ms, 0"
    ),
    "a full timeline waits until it is compacted": Planted(
        "limits", 6, timelines.Shard, "fill", "if len(held.log) >= max_size and",
        "if len(held.log) > max_size + max(1, max_size // 4) and",
    ),
    "a close schedules by the limits of its engine": Planted(
        "limits", 216, timelines.Shard, "settle", "limits = held.own or limits", "pass"
    ),
    "a claim trims by the limits of its engine": Planted(
        "limits", 6, timelines.Shard, "lease", "held.own or limits", "limits"
    ),
    "a dead letter is replayed without its limits": Planted(
        "limits", 188, backend.ReferenceBackend, "replay", "(held.own or letter.limits) if own is None",
        "None if own is None",
    ),
    "what is due at the hour is moved by what is left of it": Planted(
        "limits", 27, backend.ReferenceBackend, "reschedule", "move.by_clock and ", "False and "
    ),
    "quiet is counted from the first record": Planted(
        "", 5, timelines, "pushed", "now + terms.quiet_ms", "due"
    ),
    "what waits for a price counts as one more": Planted(
        "", 5, timelines, "pushed", "price_of(terms, key, count)", "price_of(terms, key, count + 1)"
    ),
    "a record does not wait for the end of a cool-down": Planted(
        "", 5, timelines, "clamped", "max(cool, min(due, last + terms.maximum_ms))", "min(due, last + terms.maximum_ms)"
    ),
    "an instant of local time that is skipped comes before the shift": Planted(
        "", 10, calendar, "instant", "shift(zone, late, early)", "late"
    ),
    "what came under a delivery is due at its end": Planted(
        "", 7, timelines.Shard, "settle", "held.next_ms or now", "now"
    ),
    "a full timeline does not wait for its hours": Planted(
        "", 23, timelines.Shard, "fill", "within(terms.hours, key, min(self.waiting[key], now), now, self.shift_ms)",
        "min(self.waiting[key], now)",
    ),
    "a retry does not wait for its hours": Planted(
        "", 38, backend.ReferenceBackend, "retry",
        "within(hours, lease.key, now + retry.delay_ms, now, machine.shift_ms)", "now + retry.delay_ms",
    ),
    "all that waited goes out at the opening": Planted(
        "", 10, timelines, "within", "share_of(key) if hours.spread else ", ""
    ),
    "a worker does not look at its hours": Planted(
        "", 6, delivery.Dispatcher, "_look_at_hours", "attempt.policy.hours is not None", "False"
    ),
    "a worker looks at its hours before it reads a digest, and not after": Planted(
        "", 135, delivery.Dispatcher, "deliver", "(is_late or call.permit is not None)", "call.permit is not None"
    ),
    "what was flushed once passes its hours for good": Planted(
        "", 5, timelines.Shard, "settle", "held.passes = flush and", "held.passes = held.passes or flush and"
    ),
    "an id that was delivered while it was added comes again": Planted(
        "", 5, timelines.Shard, "_fold", '"dedupe" in held.needs.split()', "False"
    ),
    "an id that was delivered once never comes again": Planted(
        "", 30, timelines.Shard, "has_seen", ".get(identity(entry), now) > now", ".get(identity(entry), now) != now"
    ),
    "a digest is larger than its policy allows": Planted(
        "", 5, timelines.Shard, "lease", "min(bound, held.max_bytes or bound)", "bound"
    ),
    "records expire while they wait for an instant": Planted(
        "", 7, timelines.Shard, "open_or_push", "not terms.is_plain", "False"
    ),
}  # fmt: skip


def find(fault: str, patch: pytest.MonkeyPatch, first: int = 1, seeds: int = 1000) -> tuple[int, str] | None:
    """Plant a fault; return the first of these seeds that shows it in its family, and the promise that it broke."""
    planted = PLANTED[fault]
    planted.plant(patch)
    for seed in range(first, first + seeds):
        is_shown = planted.family in ("", family_of(seed))
        if is_shown and (broken := FAMILIES.get(planted.family, World).played(seed).fault):
            return seed, broken
    return None
