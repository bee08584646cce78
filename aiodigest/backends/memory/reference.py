"""The state machine of a shard in pure Python: the standard that scripts are checked against, and an in-memory store.

Each transition takes the time as an argument and happens whole. ``backend.py`` beside this makes a ``Backend`` of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aiodigest.backend import (
    GIVE_BACK_MS,
    MOVES,
    SLICE,
    Add,
    Claims,
    Close,
    Closed,
    Lease,
    Move,
    NewDeadLetter,
    Retry,
    StoredDeadLetter,
    StoredTimeline,
)
from aiodigest.backends.memory.timelines import DeadLetters, Delivery, Held, Schedule, earliest, only, trim
from aiodigest.errors import InvalidState, LimitExceeded
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import aged, distinct, identity, latest, stamp


class Shard(Schedule):
    """A single schedule and its timelines."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Held] = {}
        self.dead = DeadLetters()
        self.counts: Counter[str] = Counter()
        self.seen_ms = 0
        self.lease_ms = 0
        self.hold_ms = 0

    # The schedule

    def settle(self, key: str, held: Held, limits: Limits, now: int) -> None:
        """Schedule records that came after a digest that is gone."""
        self.leave(key)
        flush, held.flush = held.flush, False
        if not held.log:
            held.end_ms = held.dropped = 0
            held.own = None
        else:
            self.touch(held, limits.ttl_ms, now)
            full = limits.max_size > 0 and distinct(held.log) >= limits.max_size
            self.place(key, now if flush or full else max(held.cool_ms, now), now)

    def touch(self, held: Held, ttl: int, now: int) -> None:
        if held.end_ms < now + ttl:
            held.end_ms = now + ttl + ttl // 64

    # Adding

    def add(self, adds: Sequence[Add], now: int) -> list[bool]:
        return [self._add(add, now) for add in adds]

    def _add(self, add: Add, now: int) -> bool:
        held = self.held.setdefault(add.key, Held())
        limits = add.terms.limits
        held.log.append(stamp(add.entry, now))
        held.own = limits if add.own else None
        self.touch(held, limits.ttl_ms, now)
        if len(held.log) > limits.capacity + limits.capacity // 4:
            self._compact(held, limits.capacity)
        ready = self._schedule(add.key, held, add.terms, now)
        size, over = limits.max_size, len(held.log) - limits.max_size
        if size and over >= 0 and over % max(1, size // 4) == 0:
            ready = self._fill(add.key, held, size, now) or ready
        return ready

    def _schedule(self, key: str, held: Held, terms: Terms, now: int) -> bool:
        """Open a window, or push back the waiting one; True if the timeline became ready."""
        due = self.waiting.get(key)
        if due is None:
            if key in self.ready or key in self.leased:
                return False
            if held.cool_ms > now:
                return self.place(key, self._pushed(held, held.cool_ms, terms), now)
            held.iteration = held.cool_ms = 0
            held.last_ms = now
            return self.place(key, now + terms.initial_ms, now)
        if held.delivery or due <= now:
            return False
        return self.place(key, self._pushed(held, due, terms), now)

    def _pushed(self, held: Held, due: int, terms: Terms) -> int:
        return max(held.cool_ms, min(due + terms.increment_ms, held.last_ms + terms.maximum_ms))

    def _fill(self, key: str, held: Held, max_size: int, now: int) -> bool:
        """Make a waiting timeline ready if it holds ``max_size`` records."""
        if key not in self.waiting or held.delivery or not held.holds(max_size):
            return False
        return self.place(key, min(self.waiting[key], now), now)

    def _compact(self, held: Held, capacity: int) -> None:
        held.log, dropped = trim(held.log, capacity)
        held.dropped += dropped
        self.counts["dropped"] += dropped

    # Claiming

    def claim(self, count: int, lease_ms: int, limits: Limits, now: int, nonce: str) -> Claims:
        self._watch(lease_ms, now)
        for key, end in earliest(self.leased, now if now >= self.hold_ms else -1, MOVES):
            self.leave(key)
            self.ready[key] = end
        for key, due in earliest(self.waiting, now, MOVES):
            self.place(key, due, now)
        leases: list[Lease] = []
        expired: list[tuple[str, int]] = []
        for key, due in earliest(self.ready, None, SLICE):
            if len(leases) == count:
                break
            held = self.held.get(key, Held())
            if held.empty or held.end_ms <= now:
                expired.append((key, self._expire(key, held)))
            else:
                leases.append(self._lease(key, due, held, lease_ms, limits, now, f"{nonce}-{len(leases) + 1}"))
        return Claims(leases, "", self.wait_ms(now), now, (), expired)

    def open(self, key: str, lease_ms: int, limits: Limits, now: int, nonce: str) -> Lease | None:
        held = self.held.get(key)
        if key not in self.ready or held is None or held.empty:
            return None
        return self._lease(key, self.ready[key], held, lease_ms, limits, now, f"{nonce}-1")

    def wait_ms(self, now: int) -> int | None:
        if self.ready:
            return 0
        times = [min(self.waiting.values())] if self.waiting else []
        if self.leased:
            times.append(max(min(self.leased.values()), self.hold_ms))
        return max(0, min(times) - now) if times else None

    def _watch(self, lease_ms: int, now: int) -> None:
        """Recover nothing for a lease after a gap of more than half a lease, in which holders could not renew."""
        if self.seen_ms and abs(now - self.seen_ms) > lease_ms // 2 and self.hold_ms <= now:
            self.hold_ms = now + lease_ms
        self.hold_ms = min(self.hold_ms, now + lease_ms)
        self.seen_ms, self.lease_ms = now, lease_ms

    def _expire(self, key: str, held: Held) -> int:
        entries = held.log if held.delivery is None else held.delivery.entries + held.log
        self.leave(key)
        self.held.pop(key, None)
        self.counts["expired"] += distinct(entries)
        return distinct(entries)

    def _lease(self, key: str, due: int, held: Held, lease_ms: int, limits: Limits, now: int, nonce: str) -> Lease:
        limits = held.own or limits
        delivery = held.delivery
        if delivery and delivery.token:
            delivery.frozen = True
        if delivery is None or (held.log and not delivery.frozen):
            delivery = self._fold(held, limits, now, nonce)
        delivery.attempts += 1
        delivery.token = nonce
        self.touch(held, limits.ttl_ms, now)
        self.leave(key)
        self.leased[key] = now + lease_ms
        return Lease(
            key, nonce, delivery.digest_id, delivery.attempts, held.iteration + 1, delivery.dropped, due,
            len(delivery.entries), delivery.part, delivery.cut_ms, delivery.last_error, tuple(delivery.entries),
        )  # fmt: skip

    def _fold(self, held: Held, limits: Limits, now: int, digest_id: str) -> Delivery:
        """Open the log as a new digest, or merge it into one that failed; either way the contents are new."""
        delivery = held.delivery or Delivery(digest_id)
        merging = held.delivery is not None
        delivery.entries += held.log
        delivery.digest_id = digest_id
        delivery.part = limits.max_size
        delivery.cut_ms = now - limits.max_age_ms if limits.max_age_ms else 0
        size = len(delivery.entries)
        if merging or size > limits.capacity or (limits.max_size and size > limits.max_size):
            delivery.entries, dropped = trim(delivery.entries, limits.capacity)
            held.dropped += dropped
            self.counts["dropped"] += dropped
        delivery.dropped += held.dropped
        held.dropped, held.log, held.delivery = 0, [], delivery
        return delivery

    # Outcomes

    def fenced(self, lease: Lease) -> Delivery | Closed:
        """Return the delivery that a lease still names, or the earlier answer to its outcome."""
        held = self.held.get(lease.key, Held())
        if held.delivery and (held.delivery.token, held.delivery.digest_id) == (lease.token, lease.digest_id):
            return held.delivery
        if held.done and held.done[:2] == (lease.token, lease.digest_id):
            return held.done[2]
        return Closed("lost")

    def renew(self, leases: Sequence[Lease], lease_ms: int, now: int) -> list[bool]:
        self._watch(lease_ms, now)
        return [self._renew(lease, now + lease_ms) for lease in leases]

    def _renew(self, lease: Lease, end: int) -> bool:
        if not isinstance(self.fenced(lease), Delivery):
            return False
        self.leave(lease.key)
        self.leased[lease.key] = end
        return True

    def close(self, closes: Sequence[Close], now: int, nonce: str) -> list[Closed]:
        return [self._close(close, now, f"{nonce}-{index}") for index, close in enumerate(closes, 1)]

    def _close(self, close: Close, now: int, nonce: str) -> Closed:
        lease, key = close.lease, close.lease.key
        delivery = self.fenced(lease)
        if isinstance(delivery, Closed):
            return delivery
        held = self.held[key]
        for index, letter in enumerate(close.dead_letters, 1):
            self._set_aside(f"{nonce}-{index}", letter, key, delivery, close.taken, now)
        self.counts["digests"] += close.delivered > 0
        self.counts["delivered"] += close.delivered
        self.counts["aged"] += close.aged
        rest = delivery.entries[close.taken :]
        if rest:
            held.delivery = Delivery(
                nonce, 1, 0, delivery.part, delivery.cut_ms, lease.token, parted=delivery.parted or close.counts,
                entries=rest,
            )  # fmt: skip
            self.touch(held, close.limits.ttl_ms, now)
            self._renew(Lease(key, lease.token, nonce, 1, 0, 0, 0, 0), now + close.lease_ms)
            answer = Closed("part", nonce, len(rest))
        else:
            held.delivery = None
            if close.counts or delivery.parted:
                held.iteration += 1
                held.last_ms, held.cool_ms = now, now + close.cool_ms
            self.settle(key, held, close.limits, now)
            answer = Closed("closed")
        held.done = (lease.token, lease.digest_id, answer)
        return answer

    def _set_aside(
        self, letter_id: str, letter: NewDeadLetter, key: str, delivery: Delivery, taken: int, now: int
    ) -> None:
        entries = [entry for entry in latest(delivery.entries[:taken]) if not aged(entry, delivery.cut_ms)]
        if letter.ids is not None:
            entries = only(entries, letter.ids)
        if not entries:
            return
        facts = (key, letter.reason, now, delivery.attempts, delivery.digest_id)
        self.dead[letter_id] = StoredDeadLetter(letter_id, *facts, entries)
        self.counts["buried"] += len(entries)
        self.counts["letters_dropped"] += self.dead.prune(now)

    def retry(self, retries: Sequence[Retry], now: int, nonce: str) -> list[bool]:
        return [self._retry(retry, now, f"{nonce}-{index}") for index, retry in enumerate(retries, 1)]

    def _retry(self, retry: Retry, now: int, nonce: str) -> bool:
        lease = retry.lease
        delivery = self.fenced(lease)
        if isinstance(delivery, Closed):
            return delivery.status != "lost"
        held = self.held[lease.key]
        kept = only(latest(delivery.entries[: retry.taken]), retry.failed or ())
        if kept and not delivery.frozen:  # a choice of nothing would leave nothing to try: all stay
            delivery.entries = kept + delivery.entries[retry.taken :]
            delivery.digest_id, delivery.dropped = nonce, 0
            delivery.parted = delivery.parted or retry.delivered > 0
            self.counts["digests"] += retry.delivered > 0
            self.counts["delivered"] += retry.delivered
            self.counts["aged"] += retry.aged
        if retry.unknown:
            delivery.frozen = True
        if retry.give_back:
            delivery.deferred_ms = delivery.deferred_ms or now
            if now - delivery.deferred_ms <= GIVE_BACK_MS:
                delivery.attempts = max(0, delivery.attempts - 1)
        delivery.last_error = retry.error
        delivery.token = ""
        self.touch(held, retry.delay_ms + retry.limits.ttl_ms, now)
        self.place(lease.key, now + retry.delay_ms, now)
        held.done = (lease.token, lease.digest_id, Closed("closed"))
        return True

    def release(self, leases: Sequence[Lease], started: bool, now: int) -> list[bool]:
        return [self._release(lease, started, now) for lease in leases]

    def _release(self, lease: Lease, started: bool, now: int) -> bool:
        delivery = self.fenced(lease)
        if isinstance(delivery, Closed):
            return delivery.status != "lost"
        delivery.attempts = max(0, delivery.attempts - 1)
        delivery.frozen = delivery.frozen or started
        delivery.token = ""
        self.place(lease.key, now, now)
        self.held[lease.key].done = (lease.token, lease.digest_id, Closed("closed"))
        return True

    # By hand

    def schedule(self, deadline: int) -> list[tuple[str, int]]:
        promoted = earliest(self.waiting, deadline, MOVES)
        for key, due in promoted:
            self.place(key, due, due)
        return promoted

    def maintenance(self, deadline: int, now: int) -> list[str]:
        if self.lease_ms:
            self._watch(self.lease_ms, now)
        ended = earliest(self.leased, deadline if now >= self.hold_ms else -1, MOVES)
        for key, end in ended:
            self.place(key, end, end)
        return [key for key, _ in ended]

    def flush(self, key: str, now: int) -> bool:
        if key in self.waiting:
            self.place(key, min(self.waiting[key], now), now)
        elif key in self.leased:
            self.held[key].flush = True
        return self.placed(key) is not None

    def delete(self, key: str) -> bool:
        held = self.held.pop(key, Held())
        existed = self.placed(key) is not None
        self.leave(key)
        if held.delivery and held.delivery.token:
            held.done = (held.delivery.token, held.delivery.digest_id, Closed("deleted"))
        if held.done:  # also of an earlier outcome, so that a repeated call hears what the first one did
            self.held[key] = Held(done=held.done)
        return existed

    def remove(self, key: str, record_id: bytes, limits: Limits, now: int, nonce: str) -> bool:
        held = self.held.get(key)
        if held is None or held.empty:
            return False
        self._compact(held, limits.capacity)
        kept = [entry for entry in held.log if identity(entry) != record_id]
        removed, held.log = len(kept) < len(held.log), kept
        delivery = held.delivery
        if delivery and key in self.waiting and not delivery.frozen and not delivery.token:
            kept = [entry for entry in delivery.entries if identity(entry) != record_id]
            if len(kept) < len(delivery.entries):
                removed, delivery.entries, delivery.digest_id = True, kept, nonce
                if not kept:
                    held.delivery = None
                    self.settle(key, held, limits, now)
        if held.empty:
            self.settle(key, held, limits, now)
        return removed

    def reschedule(self, key: str, move: Move, now: int) -> int | None:
        if key not in self.waiting:
            raise InvalidState(f"timeline {key!r} is not waiting: only a waiting timeline can be rescheduled")
        held, terms = self.held[key], move.terms
        if move.at_ms is not None or move.delay_ms is not None:
            due = max(now, move.at_ms if move.at_ms is not None else now + (move.delay_ms or 0))
            if held.delivery is None:
                due = max(held.cool_ms, min(due, held.last_ms + terms.maximum_ms))
        elif held.delivery:
            raise InvalidState(f"timeline {key!r} waits for a retry, which no policy places: give at or delay")
        elif held.iteration != move.iteration:
            return None
        elif held.cool_ms:
            held.cool_ms = held.last_ms + move.gap_ms
            due = self._pushed(held, held.cool_ms, terms)
        else:
            due = held.last_ms + terms.initial_ms
        self.touch(held, max(due - now, 0) + terms.limits.ttl_ms, now)
        self.place(key, due, now)
        return due

    def look(self, key: str) -> StoredTimeline | None:
        placed = self.placed(key)
        return None if placed is None else self.held[key].window(key, *placed)

    # Dead letters

    def replay(self, letter_id: str, terms: Terms, own: bool, now: int) -> bool:
        letter = self.dead.alive(letter_id, now)
        if letter is None:
            raise InvalidState(f"there is no dead letter {letter_id!r}")
        held = self.held.setdefault(letter.key, Held())
        if held.delivery:
            raise InvalidState(f"timeline {letter.key!r} has a digest under delivery or in a retry wait")
        limits = terms.limits
        size = distinct([*letter.entries, *held.log])
        if size > limits.capacity:
            raise LimitExceeded(f"timeline {letter.key!r} would hold {size} records; its capacity is {limits.capacity}")
        held.log[:0] = letter.entries
        held.own = limits if own else None
        self.touch(held, limits.ttl_ms, now)
        ready = self._schedule(letter.key, held, terms, now)
        if limits.max_size and len(held.log) >= limits.max_size:
            ready = self._fill(letter.key, held, limits.max_size, now) or ready
        del self.dead[letter_id]
        return ready
