"""The data of the in-memory store: a shard's schedule and its timelines, and the steps that its transitions share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from aiodigest.backend import (
    ALONE,
    DEAD_LETTER_TTL_MS,
    LOOKS,
    MOST_SEEN,
    MOVES,
    NEVER_MS,
    SLICE,
    STEP_MS,
    STEP_TOLD_MS,
    Bookmark,
    Close,
    Closed,
    Lease,
    NewDeadLetter,
    StoredDeadLetter,
    StoredTimeline,
)
from aiodigest.backends.memory.tokens import Bucket
from aiodigest.models import State
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import aged, distinct, identity, latest
from aiodigest.timing.formula import clamped, opened, pushed, within

if TYPE_CHECKING:
    from aiodigest.timing.hours import Hours


@dataclass
class Delivery:
    """A digest that was opened and is not closed: under delivery, in a retry wait, or with an unknown outcome."""

    digest_id: str
    attempts: int = 0  # that were charged
    lost: int = 0  # leases that ended without a word, since the last known outcome
    dropped: int = 0
    part: int = 0
    cut_ms: int = 0
    bound: int = 0
    token: str = ""
    frozen: bool = False  # an outcome is unknown: these contents, under this id, until closed or buried
    parted: bool = False  # a part of it was delivered, so its end starts a cool-down
    deferred_ms: int = 0  # when RetryAfter first gave an attempt back
    last_error: str = ""
    entries: list[bytes] = field(default_factory=list[bytes])

    @property
    def is_doubtful(self) -> bool:
        return bool(self.token) or self.lost > 0


@dataclass
class Held:
    """The data of one timeline."""

    log: list[bytes] = field(default_factory=list[bytes])
    delivery: Delivery | None = None
    iteration: int = 0
    last_ms: int = 0  # the last digest, or the add that opened the window
    cool_ms: int = 0
    opening_ms: int = 0  # when the window was due as it opened; 0 if it was due at once
    next_ms: int = 0  # when the log is due by its rule, while a delivery is open; 0 if that is as soon as it ends
    dropped: int = 0
    end_ms: int = 0
    flush: bool = False  # what comes after the delivery under way is due at its end, and passes hours
    passes: bool = False  # its digest goes out whatever its hours are
    log_bytes: int = 0  # what the entries in the log decode to, of those for which it was told
    max_bytes: int = 0  # of a digest
    own: Limits | None = None
    due_ms: int = 0  # when it was due, of one that a mute keeps out of the schedule
    needs: str = ""  # features, separated by spaces: who does not know them all leaves it to others
    done: tuple[str, str, Closed] | None = None  # token, digest id, and what they were answered

    @property
    def empty(self) -> bool:
        return not self.log and self.delivery is None

    @property
    def entries(self) -> list[bytes]:
        return [*(self.delivery.entries if self.delivery else ()), *self.log]

    def touch(self, ttl: int, now: int) -> None:
        if self.end_ms < now + ttl:
            self.end_ms = now + ttl + ttl // 64

    def need_mutes(self, is_muted: bool) -> None:
        words = [word for word in self.needs.split() if word != "mute"]
        self.needs = " ".join([*words, "mute"] if is_muted else words)


@dataclass
class StoredMute:
    """A mute: until when, whether what is added is dropped, and when a claim looks at it again."""

    end_ms: int  # NEVER_MS: without end
    drops: bool
    look_ms: int


class DeadLetters(dict[str, StoredDeadLetter]):
    """The dead letters of a shard, by id."""

    def oldest_first(self) -> list[str]:
        return sorted(self, key=lambda name: (self[name].buried_ms, name.encode()))

    def alive(self, letter_id: str, now: int) -> StoredDeadLetter | None:
        """Return a letter unless it has expired."""
        letter = self.get(letter_id)
        return letter if letter and letter.buried_ms > now - DEAD_LETTER_TTL_MS else None

    def times(self, now: int) -> dict[str, int]:
        """Return when each letter that has not expired was set aside."""
        return {name: letter.buried_ms for name, letter in self.items() if self.alive(name, now)}

    def prune(self, now: int, most: int) -> int:
        """Let the oldest go that are over the bound, and a few whose time is over; return how many."""
        let_go = self.drop_old(now, 10)
        size = sum(letter.size for letter in self.values())
        for name in self.oldest_first()[: SLICE - let_go]:
            if size <= most or len(self) == 1:
                break
            size -= self.pop(name).size
            let_go += 1
        return let_go

    def drop_old(self, now: int, most: int) -> int:
        """Let letters go whose time is over, ``most`` of them at the most; return how many."""
        old = [name for name in self.oldest_first() if not self.alive(name, now)][:most]
        for name in old:
            del self[name]
        return len(old)


class Shard:
    """A single schedule and its timelines. Whoever changes it says what time it is, by its own clock: the server's,
    which does not step back with it.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        self.leased: dict[str, int] = {}
        self.schedule: dict[State, dict[str, int]] = {
            "waiting": self.waiting, "ready": self.ready, "leased": self.leased
        }  # fmt: skip
        self.postponed: dict[str, int] = {}  # of those that wait, when they were due, which is theirs again when ready
        self.mutes: dict[str, StoredMute] = {}
        self.held: dict[str, Held] = {}
        self.seen: dict[str, dict[bytes, int]] = {}  # of each timeline, until when identities count as delivered
        self.seens: dict[str, int] = {}  # and until when the latest of them do
        self.dead = DeadLetters()
        self.counts: Counter[str] = Counter()
        self.bucket = Bucket()  # of the first shard that takes adds, if there is a throttle
        self.shift_ms = 0  # how far its clock is ahead of the server's
        self.clock_ms = 0  # the newest time that was noted
        self.stepped_ms = 0  # when the server's clock last stepped back, and by how much
        self.step_ms = 0
        self.seen_ms = 0
        self.lease_ms = 0
        self.hold_ms = 0
        self.past_ms = 0  # the end of the hold before

    # The clock

    def now(self, server_ms: int) -> int:
        """Return the time by its clock; that is the server's, unless this one has stepped back."""
        now = server_ms + self.shift_ms
        return self.clock_ms if self.clock_ms - now > STEP_MS else now

    def tick(self, server_ms: int) -> int:
        """Do the same, and note it every second, and each step back of the server's clock."""
        now = self.now(server_ms)
        if step := now - self.shift_ms - server_ms:
            self.shift_ms += step
            self.stepped_ms, self.step_ms = now, step
        elif now - self.clock_ms >= STEP_MS:
            self.clock_ms = now
        return now

    def stepped_back_ms(self, server_ms: int) -> int:
        """Return by how much the server's clock last stepped back; 0 if that was not in the last hour."""
        now = self.now(server_ms)
        step = now - self.shift_ms - server_ms
        return step or (self.step_ms if now - self.stepped_ms < STEP_TOLD_MS else 0)

    # The schedule

    def placed(self, key: str) -> tuple[State, int] | None:
        """Return where a timeline is, and when it is due; or that a mute keeps it out of the schedule."""
        for state, times in self.schedule.items():
            if key in times:
                return state, times[key]
        held = self.held.get(key)
        return ("muted", held.due_ms) if held and held.due_ms and key in self.mutes else None

    def leave(self, key: str) -> None:
        for times in (*self.schedule.values(), self.postponed):
            times.pop(key, None)

    def is_muted(self, key: str, now: int) -> bool:
        return key in self.mutes and self.mutes[key].end_ms > now

    def place(self, key: str, due: int, now: int) -> bool:
        """Schedule a timeline, unless it is muted: a claim looks when its records end. True if it is ready."""
        self.leave(key)
        if self.is_muted(key, now):
            self.held[key].due_ms, self.mutes[key].look_ms = due, now
            return False
        (self.ready if due <= now else self.waiting)[key] = due
        return due <= now

    def due_of(self, key: str, time: int) -> int:
        """Return when a timeline is due that has this time in the schedule: earlier, if it was postponed."""
        return self.postponed.get(key, time)

    @property
    def head_ms(self) -> float:
        """The due time of the next timeline, or the time to look at a mute; a ready one is due at once."""
        looks = (mute.look_ms for mute in self.mutes.values() if mute.look_ms < NEVER_MS)
        return -1.0 if self.ready else min((*self.waiting.values(), *looks), default=inf)

    def promote(self, times: dict[str, int], deadline: int) -> list[tuple[str, int]]:
        """Make ready what is due by the deadline, and keep the times, or those when what was postponed was due."""
        moved = [(key, self.due_of(key, time)) for key, time in earliest(times) if time <= deadline][:MOVES]
        for key, due in moved:
            self.leave(key)
            self.ready[key] = due
        return moved

    def recoverable(self, deadline: int, now: int) -> int:
        """The latest end, up to the deadline, of leases that may be recovered now."""
        return deadline if now >= self.hold_ms else min(deadline, self.past_ms - 1)

    def ended(self, now: int) -> list[str]:
        """The timelines whose leases have ended, and which may be taken now; the first to end comes first."""
        return [key for key, end in earliest(self.leased) if end <= self.recoverable(now, now)]

    def defer(self, key: str, now: int) -> None:
        """Let a ready timeline whose digest is doubtful wait among those whose leases have ended."""
        self.leased[key] = min(self.ready.pop(key), now)

    def recoverable_ms(self, end: int) -> int:
        """The time from which on a lease that ends at ``end`` may be recovered."""
        return end if end < self.past_ms else max(end, self.hold_ms)

    def watch_gap(self, lease_ms: int, now: int) -> None:
        """Hold recovery back for a lease after a gap of more than half a lease, in which holders could not renew.

        Leases that ended before the end of the hold before it have had that time already: else nothing would be
        recovered where workers run for a moment now and then, and each begins with a gap.
        """
        if self.seen_ms and now - self.seen_ms > lease_ms // 2 and self.hold_ms <= now:
            self.hold_ms, self.past_ms = now + lease_ms, self.hold_ms
        self.hold_ms, self.past_ms = min(self.hold_ms, now + lease_ms), min(self.past_ms, now)
        self.seen_ms, self.lease_ms = now, lease_ms

    def look(self, key: str, server_ms: int) -> StoredTimeline | None:
        """Return what is stored of a timeline that holds records, its times by the server's clock."""
        mute = self.mutes.get(key)
        if (placed := self.placed(key) or (("muted", 0) if mute else None)) is None:
            return None
        held, (state, score), ahead = self.held.get(key, Held()), placed, self.now(server_ms) - server_ms
        delivery, until = held.delivery or Delivery(""), score - ahead if key in self.postponed else 0
        cool, last, opening = (time and time - ahead for time in (held.cool_ms, held.last_ms, held.opening_ms))
        due, mute_ms, drops = self.due_of(key, score), -1, False
        if mute:
            due = max(due, mute.end_ms) if state == "muted" else due
            mute_ms, drops = mute.end_ms - ahead if mute.end_ms < NEVER_MS else 0, mute.drops
        return StoredTimeline(
            key, state, due - ahead if due < NEVER_MS else due, len(held.log), len(delivery.entries),
            delivery.attempts + bool(delivery.token), held.iteration, held.dropped + delivery.dropped, cool,
            delivery.digest_id, delivery.last_error, last, opening, held.next_ms and held.next_ms - ahead, until,
            held.flush, held.passes, held.needs, mute_ms, drops,
        )  # fmt: skip

    # Mutes

    def mute(self, key: str, mute: StoredMute, limits: Limits, now: int) -> None:
        """Keep a timeline out of the schedule from now on, unless it is under delivery."""
        held, placed = self.held.get(key), self.placed(key)
        self.mutes[key] = mute
        if placed and held:
            state, due = placed
            if state in ("waiting", "ready"):
                self.place(key, self.due_of(key, due), now)
            held.need_mutes(True)
            self.touch_muted(key, held, limits, now)
        waits = placed and held and placed[0] != "leased"
        mute.look_ms = min(mute.end_ms, held.end_ms) if waits and held else mute.end_ms

    def touch_muted(self, key: str, held: Held, limits: Limits, now: int) -> None:
        """Renew the end of what waits under a mute: its ttl counts from the end of the mute, if that has one."""
        end = self.mutes[key].end_ms
        if end < NEVER_MS or not held.end_ms:
            held.touch((end - now if end < NEVER_MS else 0) + (held.own or limits).ttl_ms, now)

    def unmute(self, key: str, end: int, limits: Limits | None, now: int) -> None:
        """Schedule what waited under a mute that ended then: due as it was, but no sooner; or at once if it is full."""
        placed, held = self.placed(key), self.held.get(key)
        del self.mutes[key]
        if held is None:
            return
        due, held.due_ms = max(held.due_ms, min(end, now)), 0
        held.need_mutes(False)
        if placed and placed[0] == "muted":
            limits = held.own or limits
            full = 0 < limits.max_size <= distinct(held.log) if limits else False
            if held.delivery is None and (full or 0 < held.max_bytes <= held.log_bytes):
                due = min(due, now)
            if limits:
                held.touch(max(due - now, 0) + limits.ttl_ms, now)
            self.place(key, due, now)

    def look_at_mutes(self, limits: Limits, now: int) -> list[tuple[str, int]]:
        """Look at the mutes whose time has come; return the timelines whose records have ended, and their numbers."""
        expired: list[tuple[str, int]] = []
        looks = {key: mute.look_ms for key, mute in self.mutes.items() if mute.look_ms <= now}
        for key, _ in earliest(looks)[:LOOKS]:
            mute, placed, held = self.mutes[key], self.placed(key), self.held.get(key, Held())
            if mute.end_ms <= now:
                self.unmute(key, mute.end_ms, limits, now)
            elif held.empty or not placed or placed[0] != "muted":
                mute.look_ms = mute.end_ms
            else:
                self.touch_muted(key, held, limits, now)
                if held.end_ms <= now:
                    expired.append((key, self.expire(key)))
                    mute.look_ms = mute.end_ms
                else:
                    mute.look_ms = min(mute.end_ms, held.end_ms)
                    held.need_mutes(True)
        return expired

    def expire(self, key: str) -> int:
        """Drop a timeline whose records have ended; return how many these are."""
        self.leave(key)
        size = distinct(self.held.pop(key, Held()).entries)
        self.counts["expired"] += size
        return size

    # The window in which records gather

    def open_or_push(self, key: str, held: Held, terms: Terms, now: int) -> bool:
        """Open a window, or push back the waiting one; True if the timeline became ready."""
        due, count = self.waiting.get(key), len(held.log)
        is_plain = due is not None and held.delivery is None and due > now and key not in self.postponed
        if due is None and self.placed(key) is None:
            due = self._opened(key, held, terms, now)
        elif due is not None and is_plain:
            due = clamped(terms, pushed(terms, key, due, now, count), held.cool_ms, held.last_ms)
        else:  # nothing moves what is due, or is to be tried again; but the log may be due later
            self._gather(key, held, terms, now)
            return False
        due = within(terms.hours, key, due, now, self.shift_ms)
        if not terms.is_plain:
            held.touch(max(due - now, 0) + terms.limits.ttl_ms, now)
        return self.place(key, due, now)

    def _opened(self, key: str, held: Held, terms: Terms, now: int) -> int:
        count = len(held.log)
        due = opened(terms, key, now, self.shift_ms, count)
        if held.cool_ms > now and terms.rule != "calendar":
            if terms.rule == "increment":
                due = pushed(terms, key, held.cool_ms, now, count)
            return clamped(terms, due, held.cool_ms, held.last_ms)
        held.iteration = held.cool_ms = 0
        held.last_ms = now
        due = now if terms.first_at_once else due
        held.opening_ms = due if terms.rule == "increment" and due > now else 0
        return due

    def _gather(self, key: str, held: Held, terms: Terms, now: int) -> None:
        """Note when the log of a timeline with an open delivery is due by its rule."""
        if terms.rule == "increment" or (terms.rule == "calendar" and held.next_ms):
            return
        due = opened(terms, key, now, self.shift_ms, len(held.log))
        if terms.rule == "calendar":  # whoever settles knows the hours, but perhaps not so far ahead
            due = within(terms.hours, key, due, now, self.shift_ms)
        held.next_ms = min(held.next_ms or due, due) if terms.rule == "balanced" else due

    def fill(self, key: str, held: Held, terms: Terms, now: int) -> bool:
        """Make a waiting timeline ready if it holds ``max_size`` records, and compact one with many more entries."""
        max_size = terms.limits.max_size
        if key not in self.waiting or held.delivery or not max_size or key in self.postponed:
            return False
        if len(held.log) >= max_size and distinct(held.log) >= max_size:
            return self.place(key, within(terms.hours, key, min(self.waiting[key], now), now, self.shift_ms), now)
        if len(held.log) > max_size + max(1, max_size // 4):
            held.log = latest(held.log)
        return False

    def fill_bytes(self, key: str, held: Held, terms: Terms, now: int) -> bool:
        """Make a waiting timeline ready whose log is as large as a digest may be."""
        if (
            key not in self.waiting
            or held.delivery
            or key in self.postponed
            or not 0 < terms.max_bytes <= held.log_bytes
        ):
            return False
        return self.place(key, within(terms.hours, key, min(self.waiting[key], now), now, self.shift_ms), now)

    def flush(self, key: str, held: Held, now: int) -> bool:
        """Let a timeline that is not muted be due now, or after the delivery under way; True if it is ready by that."""
        if self.is_muted(key, now):
            return False
        if key in self.leased:
            held.flush = True
        elif self.placed(key):
            held.passes = True
        return key in self.waiting and self.place(key, min(self.due_of(key, self.waiting[key]), now), now)

    # Records that were delivered

    def has_seen(self, key: str, entry: bytes, now: int) -> bool:
        """True if a record was delivered, and is not to be delivered again."""
        return self.seen.get(key, {}).get(identity(entry), now) > now

    def remember(self, key: str, entries: Iterable[bytes], dedupe_ms: int, now: int) -> None:
        """Remember which records of a timeline were delivered, the latest ``MOST_SEEN``; forget what has gone by."""
        names = [*map(identity, entries)]
        if not dedupe_ms or not names:
            return
        for gone, until in earliest(self.seens)[:10]:
            if until <= now:
                self.forget(gone)
        seen = {name: until for name, until in self.seen.get(key, {}).items() if until > now}
        seen.update(dict.fromkeys(names, now + dedupe_ms))
        latest_last = sorted(seen.items(), key=lambda item: (item[1], item[0]))
        self.seen[key] = dict(latest_last[-MOST_SEEN:])
        self.seens[key] = max(now + dedupe_ms, self.seens.get(key, 0))  # an earlier window may have been longer

    def forget(self, key: str) -> None:
        self.seen.pop(key, None)
        self.seens.pop(key, None)

    def compact(self, held: Held, entries: Sequence[bytes], capacity: int) -> list[bytes]:
        """Return the newest ``capacity`` records; the older ones count as dropped."""
        kept = latest(entries)
        dropped = max(0, len(kept) - capacity)
        held.dropped += dropped
        self.counts["dropped"] += dropped
        return kept[dropped:]

    # Digests

    def lease(self, key: str, lease_ms: int, limits: Limits, now: int, nonce: str, bound: int) -> Lease | None:
        """Lease a timeline that is ready, or whose lease has ended; None if nothing but duplicates was in it.

        An unknown outcome freezes its digest; otherwise new records are merged into it.
        """
        held, due = self.held[key], self.ready[key] if key in self.ready else self.leased[key]
        limits, delivery = held.own or limits, held.delivery
        if delivery and delivery.token:
            delivery.frozen = True
            delivery.attempts += delivery.lost >= ALONE
            delivery.lost += 1
        if delivery is None or (held.log and not delivery.frozen):
            delivery = self._fold(key, held, limits, now, nonce)
            delivery.bound = min(bound, held.max_bytes or bound)
            if not delivery.entries:
                held.delivery = None
                self.settle(key, held, limits, now)
                return None
        delivery.token = nonce
        held.touch(limits.ttl_ms, now)
        self.leave(key)
        self.leased[key] = now + lease_ms
        return Lease(
            key, nonce, delivery.digest_id, delivery.attempts + 1, held.iteration + 1, delivery.dropped, due,
            len(delivery.entries), delivery.part, delivery.cut_ms, delivery.last_error, delivery.lost,
            tuple(delivery.entries), delivery.bound, held.own, passes=held.passes,
        )  # fmt: skip

    def _fold(self, key: str, held: Held, limits: Limits, now: int, digest_id: str) -> Delivery:
        """Open the log as a new digest, or merge it into one that failed; either way the contents are new."""
        merging = held.delivery is not None
        delivery = held.delivery or Delivery(digest_id)
        if "dedupe" in held.needs.split():
            records = latest(held.log)
            kept = [entry for entry in records if not self.has_seen(key, entry, now)]
            self.counts["duplicates"] += len(records) - len(kept)
            held.log = kept if len(kept) < len(records) else held.log
        delivery.entries += held.log
        delivery.digest_id = digest_id
        delivery.part = limits.max_size
        delivery.cut_ms = now - self.shift_ms - limits.max_age_ms if limits.max_age_ms else 0
        size = len(delivery.entries)
        if merging or size > limits.capacity or (limits.max_size and size > limits.max_size):
            delivery.entries = self.compact(held, delivery.entries, limits.capacity)
        delivery.dropped += held.dropped
        held.dropped, held.log, held.delivery = 0, [], delivery
        held.next_ms = held.log_bytes = 0
        return delivery

    def fenced(self, lease: Lease) -> Delivery | Closed:
        """Return the delivery that a lease still names, or the earlier answer to its outcome."""
        held = self.held.get(lease.key, Held())
        if held.delivery and (held.delivery.token, held.delivery.digest_id) == (lease.token, lease.digest_id):
            return held.delivery
        if held.done and held.done[:2] == (lease.token, lease.digest_id):
            return held.done[2]
        return Closed("lost")

    def settle(self, key: str, held: Held, limits: Limits, now: int, hours: Hours | None = None) -> None:
        """Schedule records that came after a digest that is gone; limits that the timeline has come first."""
        self.leave(key)
        limits = held.own or limits
        flush, held.flush = held.flush, False
        held.passes = flush and bool(held.log)
        if not held.log:
            held.end_ms = held.dropped = held.due_ms = held.next_ms = held.log_bytes = held.max_bytes = 0
            held.own = None
            return
        full = 0 < limits.max_size <= distinct(held.log) or 0 < held.max_bytes <= held.log_bytes
        due = max(held.cool_ms, held.next_ms or now)
        due = now if flush else within(hours, key, min(due, now) if full else due, now, self.shift_ms)
        held.next_ms = 0
        held.touch(limits.ttl_ms + (max(due - now, 0) if hours or held.needs else 0), now)
        self.place(key, due, now)

    def bury(self, letter_id: str, letter: NewDeadLetter, close: Close, delivery: Delivery, now: int) -> int:
        """Set records of a digest aside as a dead letter; return how many older ones are let go."""
        entries = [entry for entry in latest(delivery.entries[: close.taken]) if not aged(entry, delivery.cut_ms)]
        if letter.ids is not None:
            entries = only(entries, letter.ids)
        if entries:
            key = close.lease.key
            facts = (key, letter.reason, now, delivery.attempts + 1, delivery.digest_id)
            limits = self.held[key].own or close.limits
            self.dead[letter_id] = StoredDeadLetter(letter_id, *facts, entries, limits=limits)
            self.counts["buried"] += len(entries)
            let_go = self.dead.prune(now, close.letter_bytes)
            self.counts["letters_dropped"] += let_go
            return let_go
        return 0


def merged_needs(needs: str, more: str) -> str:
    """Return the features that are needed by either."""
    return " ".join(dict.fromkeys([*needs.split(), *more.split()]))


def earliest(times: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the members of a sorted set in its order."""
    return sorted(times.items(), key=lambda item: (item[1], item[0].encode()))


def page_of(times: Mapping[str, int], count: int, after: Bookmark | None) -> tuple[list[str], Bookmark | None]:
    """Return a page of names by their times, and its end if there are more."""
    last = int(after.last) if after else max(times.values(), default=0)
    begin = (int(after.time), after.name) if after else (-1, b"")
    places = sorted((time, name.encode()) for name, time in times.items() if time <= last)
    left = [place for place in places if place > begin]
    found = left[:count]
    end = Bookmark(b"%d" % found[-1][0], found[-1][1], b"%d" % last) if found and len(found) < len(left) else None
    return [name.decode() for _, name in found], end


def only(entries: Iterable[bytes], ids: Iterable[bytes]) -> list[bytes]:
    """Return the entries with these identities."""
    wanted = set(ids)
    return [entry for entry in entries if identity(entry) in wanted]
