"""Reasons why a timeline is where it is and until when: terms of the formula (``formula.py``) in words, and as data.

All times are by the server's clock. A due time is always the one that is stored: what the policy says is told only as
far as it leads there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

from aiodigest.models import Explanation, Reason
from aiodigest.records.entries import distinct, value_in
from aiodigest.records.validation import nearest
from aiodigest.timing.formula import clamped, next_due, opened, within

if TYPE_CHECKING:
    from aiodigest.backend import Cooling, StoredTimeline
    from aiodigest.policy import Policy, RetryPolicy, Terms
    from aiodigest.timing.throttle import Throttle

ENDLESS = "until it is unmuted"
UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000), ("ms", 1))


def span(ms: int) -> str:
    """Return a duration in words, in its two largest units: "5 min 30 s"."""
    parts = list[str]()
    for unit, size in UNITS:
        if (count := ms // size) and len(parts) < 2:
            parts.append(f"{count} {unit}")
        ms %= size
    return " ".join(parts) or "0 s"


def counted(number: int, one: str, several: str = "") -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def due_now(terms: Terms, key: str, now: int, cooling: Cooling | None) -> int:
    """Return when a record would be due that came now to a timeline without records."""
    if cooling is None:
        return next_due(terms, key, now, 0, is_idle=True)
    cool = cooling.until_ms
    due = cool + terms.increment_ms if terms.rule == "increment" else opened(terms, key, now, 0)
    return within(terms.hours, key, clamped(terms, due, cool, cooling.last_ms), 0, 0)


def is_held_longer(found: StoredTimeline) -> bool:
    """Return whether what gathers under a mute would be due after it, unless it is full by then."""
    return found.state == "muted" and 0 < found.mute_ms < found.due_ms and not found.digest_id


def full_at_the_end(
    found: StoredTimeline, terms: Terms, entries: Sequence[bytes], size_of: Callable[[bytes], int]
) -> StoredTimeline:
    """Return a muted timeline as it is due if these are the ``entries`` of its log: when its mute ends, if it holds
    ``max_size`` records or ``max_bytes`` by then, of which no store tells. ``size_of`` gives the bytes of a value."""
    is_full = 0 < terms.limits.max_size <= distinct(entries)
    if not is_full and terms.max_bytes:
        is_full = sum(size_of(value_in(entry)) for entry in entries) >= terms.max_bytes
    return found._replace(due_ms=found.mute_ms) if is_full else found


@dataclass
class Explainer:
    """Explains a timeline at an instant, in a time zone; what is not known of its policy (None) it leaves out.

    ``unknown`` is a feature that the timeline needs, and this version does not know ('': none).
    """

    key: str
    now_ms: int
    policy: Policy | None = None
    retry: RetryPolicy | None = None
    zone: tzinfo = UTC
    unknown: str = ""
    throttle: Throttle | None = None
    _reasons: list[Reason] = field(default_factory=list[Reason])

    def explain(self, found: StoredTimeline | None, cooling: Cooling | None = None) -> Explanation:
        """Explain a timeline that holds records, or (None) one that holds none, which may be in a cool-down."""
        if found is None:
            return self._empty(cooling)
        score = found.until_ms or found.due_ms
        tell = {"waiting": self._waiting, "ready": self._ready, "leased": self._leased, "muted": self._muted}
        tell[found.state](found)
        if found.mute_ms >= 0 and found.state != "muted":
            self._mute("mute", "it ", found)
        due = None if found.state == "muted" and not found.mute_ms else self._when(score)
        return Explanation(self.key, found.state, due, tuple(self._reasons))

    # Words

    def _when(self, ms: int) -> datetime:
        return nearest(ms).astimezone(self.zone)

    def _told(self, ms: int) -> str:
        """Return an instant in words, with its date if that is not today's."""
        when, today = self._when(ms), self._when(self.now_ms)
        return f"{when:%H:%M:%S}" if when.date() == today.date() else f"{when:%Y-%m-%d %H:%M:%S}"

    def _say(self, kind: Any, ms: int | None, text: str) -> None:
        """Add a reason; ``{}`` in its text stands for its instant."""
        at = None if ms is None else self._when(ms)
        self._reasons.append(Reason(kind, at, text if ms is None else text.replace("{}", self._told(ms))))

    # States

    def _waiting(self, found: StoredTimeline) -> None:
        if found.until_ms:
            self._say("state", found.until_ms, f"was due {self._told(found.due_ms)}, and is put aside until {{}}")
            self._aside(found.until_ms)
        elif found.digest_id:
            self._say("state", found.due_ms, "waits for its next try until {}")
            self._tried(found)
            self._hours(found)
        else:
            self._say("state", found.due_ms, "waits until {}")
            self._gathered(found)
            self._hours(found)

    def _ready(self, found: StoredTimeline) -> None:
        self._say("state", found.due_ms, "is due since {}, and goes out as soon as a worker has room for it")
        if found.digest_id:
            self._tried(found)
        self._hours(found)
        if self.unknown:
            self._aside(self.now_ms)
        if self.throttle is not None:
            limit, per = counted(self.throttle.limit, "attempt"), span(round(1000 * self.throttle.per))
            self._say("throttle", None, f"at most {limit} in {per} over all workers, by its throttle")

    def _leased(self, found: StoredTimeline) -> None:
        is_held = found.due_ms > self.now_ms
        text = "is under delivery, by a lease until {} that its worker renews"
        self._say("state", found.due_ms, text if is_held else "was under delivery by a lease that has ended {}")
        most = "" if self.retry is None else f" of {self.retry.max_attempts}"
        self._say("lease", None, f"attempt {found.attempt}{most} with {counted(found.opened, 'record')}")
        if found.logged:
            self._since(found)

    def _since(self, found: StoredTimeline) -> None:
        """Tell of what came since the digest was opened."""
        came = f"{found.logged:,} more came since"
        if found.flushed:
            self._say("flush", None, f"{came}, due as soon as it ends")
        elif found.next_ms:
            self._say("since", found.next_ms, f"{came}, due {{}}")
        else:
            self._say("since", None, came)

    def _muted(self, found: StoredTimeline) -> None:
        self._mute("state", "", found)
        if found.digest_id:
            self._tried(found)
        if held := found.logged + found.opened:
            due = f", due {self._told(found.due_ms)}" if found.mute_ms else ""
            self._say("since", None, f"{counted(held, 'record waits', 'records wait')}{due}")
        if found.drops:
            self._say("mute", None, "what is added is dropped")

    def _mute(self, kind: str, who: str, found: StoredTimeline) -> None:
        was = "was" if 0 < found.mute_ms <= self.now_ms else "is"  # a claim will see that it is over
        self._say(kind, found.mute_ms or None, f"{who}{was} muted {'until {}' if found.mute_ms else ENDLESS}")

    def _empty(self, cooling: Cooling | None) -> Explanation:
        self._say("state", None, "holds no records")
        if cooling is not None:
            self._say("last", cooling.last_ms, "last digest {} (delivered, or a dead letter)")
            self._say("cool-down", cooling.until_ms, f"cool-down {span(cooling.until_ms - cooling.last_ms)} until {{}}")
        if self.policy is not None:
            due = due_now(self.policy.terms, self.key, self.now_ms, cooling)
            self._say("next", due, "one that came now would be due {}")
        return Explanation(self.key, "empty", None, tuple(self._reasons))

    # Reasons

    def _aside(self, until: int) -> None:
        """Tell why a timeline is put aside, as far as anybody knows: who does so keeps no reason."""
        if self.unknown:
            self._say("aside", None, f"it needs {self.unknown!r}, which this version of aiodigest does not know")
        elif self.policy is not None and within(self.policy.hours, self.key, self.now_ms, 0, 0) > self.now_ms:
            self._closed(until)
        else:
            self._say("aside", None, "its destination rests or has all that it may have, or its worker has no room")

    def _tried(self, found: StoredTimeline) -> None:
        most = "" if self.retry is None else f" of {self.retry.max_attempts}"
        tried = f"attempt {found.attempt}{most} failed" if found.attempt else "no attempt is charged"
        self._say("retry", None, f"{tried}: {found.last_error}" if found.last_error else tried)

    def _hours(self, found: StoredTimeline) -> None:
        """Tell whether the hours have moved a due time, or will."""
        if found.passes:
            if "hours" in found.needs.split() if self.policy is None else self.policy.hours:
                self._say("passes", None, "it goes out whatever its hours are")
        elif self.policy is not None and self.policy.hours is not None:
            due = max(found.due_ms, self.now_ms) if found.state == "ready" else found.due_ms
            opening = within(self.policy.hours, self.key, due, 0, 0)
            if opening > due or self._is_moved(found.due_ms):
                self._closed(opening)
            else:
                self._say("hours", None, "inside its hours")

    def _closed(self, at: int) -> None:
        """Tell when the hours open that let it out ``at`` a time, and how much later that is."""
        assert self.policy is not None
        assert self.policy.hours is not None
        opening, _ = self.policy.hours.windows(at, at, 0)[0]
        is_spread = self.policy.hours.spread and at > opening
        later = f", and its share of the spread is {span(at - opening)}" if is_spread else ""
        self._say("hours", opening, "its hours are closed until {}" + later)

    def _is_moved(self, due: int) -> bool:
        """Return whether a due time is the one to which closed hours move what falls into them."""
        assert self.policy is not None
        hours = self.policy.hours
        if hours is None:
            return False
        opening, _ = hours.windows(due, due, 0)[0]
        return within(hours, self.key, opening - 1, 0, 0) == due

    def _gathered(self, found: StoredTimeline) -> None:
        """Tell how long records wait for others: the rule, and what bounds it."""
        last, cool = found.last_ms, found.cool_ms
        if last:
            self._say("last", last, "last digest {}" if found.iteration or cool else "opened {}")
        if cool > last:
            self._say("cool-down", cool, f"cool-down {span(cool - last)} until {{}}")
        if self.policy is None:
            if (since := max(cool, last)) and found.due_ms > since:
                self._say("rule", found.due_ms, f"{span(found.due_ms - since)} later by adds or its policy")
            return
        terms = self.policy.terms
        limit = max(cool, last + terms.maximum_ms)
        is_moved = self._is_moved(found.due_ms)
        if not is_moved:
            kind, text = self._rule(found, limit)
            self._say(kind, found.due_ms, text)
        if terms.rule != "calendar" and not (is_moved and found.due_ms > limit):
            self._say("maximum", limit, "at the latest {}")
        if size := terms.limits.max_size:
            self._say("size", None, f"at once with {counted(size, 'record')}")

    def _rule(self, found: StoredTimeline, limit: int) -> tuple[str, str]:
        """Return what has led to the due time: the rule of the policy, if it can have, with its name."""
        assert self.policy is not None
        terms, due, calendar = self.policy.terms, found.due_ms, self.policy.at
        moved = "moved", "rescheduled, or added to under another policy"
        if terms.rule == "calendar":
            assert calendar is not None
            fits = calendar.next_ms(due - 1) == due
            return ("rule", f"the next instant of {calendar.cron!r} in {calendar.tz}") if fits else moved
        if not found.cool_ms <= due <= limit:
            return moved
        if terms.rule == "increment":
            since = "rule", "pushed by adds since its hours opened"
            return self._pushes(found, limit) or (moved if self.policy.hours is None else since)
        if terms.rule == "debounce":
            wait, told = terms.quiet_ms, f"{span(terms.quiet_ms)} after the last add"
            told = told if due < limit else "adds do not end"
        else:
            wait, records = terms.price_ms, counted(found.logged, "record waits", "records wait")
            told = f"a message is worth {span(wait)} of waiting, and {records}"
        return ("rule", told) if due <= max(found.cool_ms, self.now_ms + wait) else moved

    def _pushes(self, found: StoredTimeline, limit: int) -> tuple[str, str] | None:
        """Return how far adds have pushed the due time; None if they cannot have."""
        assert self.policy is not None
        terms, due = self.policy.terms, found.due_ms
        base = found.cool_ms or found.opening_ms or found.last_ms
        pushed, step = due - base, terms.increment_ms
        if pushed < 0 or (due < limit and (pushed % step if step else pushed)):
            return None
        if not pushed:
            waits = terms.initial_ms and base == found.last_ms + terms.initial_ms and not found.cool_ms
            return "rule", f"{span(terms.initial_ms)} after the first record" if waits else "pushed by no add"
        by = f" by {counted(pushed // step, 'add')}" if due < limit else " by adds, as far as may be"
        return "rule", f"pushed {span(pushed)}{by}"
