"""The reference: each verb of the store in pure Python, which scripts are checked against, and an in-memory store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from random import sample as sample_of
from threading import RLock
from typing import TYPE_CHECKING, Self
from uuid import uuid4

from aiodigest.backend import (
    ALONE,
    ASIDE_MS,
    DIGEST_BYTES,
    FEATURES,
    GIVE_BACK_MS,
    LOOKS,
    NEVER_MS,
    SAME_MS,
    SAMPLE,
    SLICE,
    Add,
    Backend,
    Bookmark,
    Claims,
    Close,
    Closed,
    Cooling,
    Grant,
    Lease,
    Move,
    Mute,
    Operations,
    Page,
    Postpone,
    Retry,
    ShardMap,
    StoredDeadLetter,
    StoredTimeline,
    Tokens,
    needs_unknown,
    unknown_need,
)
from aiodigest.backends.memory.timelines import (
    Delivery,
    Held,
    Shard,
    StoredMute,
    earliest,
    merged_needs,
    only,
    page_of,
)
from aiodigest.errors import AiodigestError, ConfigurationError, InvalidState, LeaseLost, LimitExceeded
from aiodigest.models import State
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import aged, distinct, identity, latest, stamp
from aiodigest.timing.formula import clamped, opened, within

if TYPE_CHECKING:
    from aiodigest.timing.throttle import Rate


def system_ms() -> int:
    """Return the time of this machine's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


class ReferenceBackend(Backend, Operations):
    """Shards in memory, with a wake-up stream each: no server, and nothing is kept. ``now`` is the clock (ms).

    Any event loop and any thread may use it.
    """

    def __init__(
        self,
        *,
        shards: int = 1,
        now: Callable[[], int] = system_ms,
        nonce: Callable[[], str] = lambda: uuid4().hex,
        draw: Callable[[Sequence[str], int], Sequence[str]] = sample_of,
        features: Collection[str] = FEATURES,
    ) -> None:
        self.machines = [Shard() for _ in range(shards)]
        self._shard_map = ShardMap(shards, range(shards))
        self._lock = RLock()  # an engine has two threads if `engine.sync` is used beside it
        self._wake_ups = [0] * shards
        self._waiting: list[dict[asyncio.Event, asyncio.AbstractEventLoop]] = [{} for _ in range(shards)]
        self._now = now
        self._nonce = nonce
        self._draw = draw
        self._features = features

    @property
    def url(self) -> str:
        return "memory://"

    @property
    def shard_map(self) -> ShardMap:
        return self._shard_map

    @property
    def operations(self) -> Operations:
        return self

    def clone(self) -> Self:
        return self

    async def clock_ms(self, shard: int) -> int:
        return self._now()

    def _tick(self, shard: int, *, begins: bool = False) -> tuple[Shard, int]:
        """Return a shard and the time by its clock. One that was never used has none, unless this ``begins`` it."""
        machine, server_ms = self.machines[shard], self._now()
        return machine, machine.tick(server_ms) if begins or machine.clock_ms else server_ms

    @contextmanager
    def _transition(self, shard: int, *, begins: bool = False) -> Generator[tuple[Shard, int]]:
        """Yield a shard and the time by its clock. Who waits for it is woken if its schedule then begins earlier."""
        with self._lock:
            machine, now = self._tick(shard, begins=begins)
            before = machine.head_ms
            yield machine, now
            if machine.head_ms < before:
                self._wake_ups[shard] += 1
                for woken, loop in self._waiting[shard].items():
                    if loop is asyncio.get_running_loop():
                        woken.set()
                    else:
                        with suppress(RuntimeError):  # its loop is closed
                            loop.call_soon_threadsafe(woken.set)

    def _transitions(self, shards: Iterable[int]) -> Generator[tuple[Shard, int]]:
        for shard in shards:
            with self._transition(shard) as transition:
                yield transition

    async def wait(self, shard: int, last: str) -> str:
        woken = asyncio.Event()
        with self._lock:
            if self._wake_ups[shard] != int(last):
                return str(self._wake_ups[shard])
            self._waiting[shard][woken] = asyncio.get_running_loop()
        try:
            await woken.wait()
        finally:
            with self._lock:
                del self._waiting[shard][woken]
        return str(self._wake_ups[shard])

    # Adding

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        answers: list[bool | AiodigestError] = []
        if not adds:
            return answers
        with self._transition(shard, begins=True) as (machine, now):
            for add in adds:
                key, terms, limits, mute = add.key, add.terms, add.terms.limits, machine.mutes.get(add.key)
                if mute and mute.end_ms <= now:
                    machine.unmute(key, mute.end_ms, limits, now)
                    mute = None
                if mute and mute.drops:
                    machine.counts["muted"] += 1
                    answers.append(False)
                    continue
                if terms.dedupe_ms and machine.has_seen(key, add.entry, now):
                    machine.counts["duplicates"] += 1
                    answers.append(False)
                    continue
                held = machine.held.setdefault(key, Held())
                held.log.append(stamp(add.entry, now - machine.shift_ms))
                held.own = limits if add.own else None
                held.touch(limits.ttl_ms, now)
                if needs := f"{terms.needs} mute" if mute and not machine.placed(key) else terms.needs:
                    held.needs = merged_needs(held.needs, needs)
                if terms.max_bytes:
                    held.log_bytes, held.max_bytes = held.log_bytes + add.size, terms.max_bytes
                ready = machine.open_or_push(key, held, terms, now) or machine.fill(key, held, terms, now)
                ready = ready or machine.fill_bytes(key, held, terms, now)
                ready = (add.urgent and machine.flush(key, held, now)) or ready
                if len(held.log) > limits.capacity + limits.capacity // 2:
                    held.log = machine.compact(held, held.log, limits.capacity)
                answers.append(ready)
        return answers

    # Delivering

    async def claim(
        self,
        shard: int,
        count: int,
        lease_ms: int,
        limits: Limits,
        *,
        sample: bool = False,
        doubtful: bool = True,
        bound: int = DIGEST_BYTES,
    ) -> Claims:
        leases: list[Lease] = []
        expired: list[tuple[str, int]] = []
        left: list[tuple[str, str]] = []
        with self._lock:  # it wakes nobody: it has seen what it makes ready
            (machine, now), nonce = self._tick(shard, begins=True), self._nonce()
            machine.watch_gap(lease_ms, now)
            machine.promote(machine.waiting, now)
            expired += machine.look_at_mutes(limits, now)

            def consider(key: str) -> None:
                nonlocal doubtful, count
                held = machine.held.get(key, Held())
                is_doubtful = key in machine.leased or (held.delivery is not None and held.delivery.is_doubtful)
                is_alone = held.delivery is not None and held.delivery.lost + bool(held.delivery.token) >= ALONE
                if need := unknown_need(held.needs, self._features):
                    due = machine.ready[key] if key in machine.ready else machine.leased[key]
                    machine.leave(key)
                    machine.waiting[key], machine.postponed[key] = now + ASIDE_MS, due
                    left.append((key, need))
                elif held.empty or held.end_ms <= now:
                    expired.append((key, machine.expire(key)))
                elif machine.is_muted(key, now):  # it was under delivery, and is kept from going out again
                    machine.place(key, machine.ready[key] if key in machine.ready else machine.leased[key], now)
                elif key in machine.ready and is_doubtful and not doubtful:
                    machine.defer(key, now)
                elif is_alone and leases:
                    count = len(leases)  # the next claim may open it
                else:
                    doubtful = doubtful and not is_doubtful
                    count = 1 if is_alone else count
                    lease = machine.lease(key, lease_ms, limits, now, f"{nonce}-{len(leases) + 1}", bound)
                    leases.extend([lease] if lease else [])

            def take_ended() -> None:
                """Lease what has ended first, if the caller may have it."""
                for key in machine.ended(now):
                    if doubtful and len(leases) < count:
                        consider(key)

            take_ended()
            draw = partial(self._sample, doubtful=doubtful) if sample else self._oldest
            for key in draw(machine, now) if len(leases) < count else ():
                consider(key)
                if len(leases) == count:
                    break
            ended = machine.ended(now)
            ends = [machine.recoverable_ms(end) for key, end in machine.leased.items() if doubtful or key not in ended]
            looks = [mute.look_ms for mute in machine.mutes.values() if mute.look_ms < NEVER_MS]
            nexts = [*machine.waiting.values(), *looks, *ends]
            let_go = 0 if leases else machine.dead.drop_old(now, LOOKS)
            machine.counts["letters_dropped"] += let_go
            wait_ms = 0 if machine.ready or let_go == LOOKS else max(0, min(nexts) - now) if nexts else None
            barred = bool(ended) and not doubtful
            server_ms = now - machine.shift_ms
            seen = str(self._wake_ups[shard])
            return Claims(leases, seen, wait_ms, now, (), expired, barred, left, server_ms, let_go)

    def _oldest(self, machine: Shard, now: int) -> list[str]:
        return [key for key, _ in earliest(machine.ready)[:SLICE]]

    def _sample(self, machine: Shard, now: int, doubtful: bool) -> list[str]:
        """Draw ready timelines, the failed ones last; first a doubtful one, if it may be had. Others wait elsewhere."""

        def delivery_of(key: str) -> Delivery:
            return machine.held.get(key, Held()).delivery or Delivery("")

        drawn = self._draw([*machine.ready], min(SAMPLE, len(machine.ready)))
        doubts = [key for key in drawn if delivery_of(key).is_doubtful]
        first = doubts[:doubtful]
        for key in doubts[doubtful:]:
            machine.defer(key, now)
        rest = [key for key in drawn if key not in doubts]
        return first + sorted(rest, key=lambda key: delivery_of(key).attempts > 0)

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        with self._lock:
            (machine, now), nonce = self._tick(shard), self._nonce()
            is_held = key in machine.ready and not machine.held.get(key, Held()).empty
            if not is_held or machine.is_muted(key, now):
                return None
            if need := unknown_need(machine.held[key].needs, self._features):
                raise needs_unknown(key, need)
            return machine.lease(key, lease_ms, limits, now, f"{nonce}-1", DIGEST_BYTES)

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        with self._lock:
            delivery = self.machines[shard].fenced(lease)
            if isinstance(delivery, Closed):
                raise LeaseLost(f"the lease on timeline {lease.key!r} is lost")
            return delivery.entries[start : start + count]

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> list[bool]:
        with self._lock:
            machine, now = self._tick(shard, begins=True)
            machine.watch_gap(lease_ms, now)
            held = [isinstance(machine.fenced(lease), Delivery) for lease in leases]
            for lease, is_held in zip(leases, held, strict=True):
                if is_held:
                    machine.leave(lease.key)
                    machine.leased[lease.key] = now + lease_ms
            return held

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed]:
        answers: list[Closed] = []
        with self._transition(shard) as (machine, now):
            nonce = self._nonce()
            for number, close in enumerate(closes, 1):
                lease, key, name = close.lease, close.lease.key, f"{nonce}-{number}"
                delivery = machine.fenced(lease)
                if isinstance(delivery, Closed):
                    answers.append(Closed("lost") if delivery.status == "released" else delivery)
                    continue
                held = machine.held[key]
                let_go = sum(
                    machine.bury(f"{name}-{index}", letter, close, delivery, now)
                    for index, letter in enumerate(close.dead_letters, 1)
                )
                old = close.aged
                if close.mute and close.dead_letters:  # who mutes has read but one part of what is set aside
                    old = sum(aged(entry, delivery.cut_ms) for entry in latest(delivery.entries[: close.taken]))
                machine.counts.update(digests=close.delivered > 0, delivered=close.delivered, aged=old)
                lost = [each.ids for each in close.dead_letters]
                machine.remember(key, _delivered(close, delivery, lost), close.dedupe_ms, now)
                parted = delivery.parted or close.counts
                if close.mute:
                    machine.mutes[key] = StoredMute(NEVER_MS, True, NEVER_MS)
                    held.need_mutes(bool(held.log or delivery.entries[close.taken :]))
                if rest := delivery.entries[close.taken :]:
                    held.delivery = Delivery(
                        name, part=delivery.part, cut_ms=delivery.cut_ms, bound=delivery.bound, token=lease.token,
                        parted=parted, entries=rest,
                    )  # fmt: skip
                    held.touch(close.limits.ttl_ms, now)
                    machine.leave(key)
                    machine.leased[key] = now + close.lease_ms
                    answers.append(Closed("part", name, len(rest)))
                else:
                    held.delivery = None
                    if parted:
                        held.iteration += 1
                        held.last_ms, held.cool_ms = now, now + close.cool_ms
                    machine.settle(key, held, close.limits, now, close.hours)
                    answers.append(Closed("closed"))
                held.done = (lease.token, lease.digest_id, answers[-1])
                answers[-1] = answers[-1]._replace(let_go=let_go)
        return answers

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool]:
        answers: list[bool] = []
        with self._transition(shard) as (machine, now):
            nonce = self._nonce()
            for number, retry in enumerate(retries, 1):
                lease, delivery = retry.lease, machine.fenced(retry.lease)
                if isinstance(delivery, Closed):
                    answers.append(delivery.status not in ("lost", "released"))
                    continue
                kept = only(latest(delivery.entries[: retry.taken]), retry.failed or ())
                if kept and not delivery.frozen:  # a choice of nothing would leave nothing to try: all stay
                    delivered = _delivered(retry, delivery, [retry.failed])
                    machine.remember(lease.key, delivered, retry.dedupe_ms, now)
                    delivery.entries = kept + delivery.entries[retry.taken :]
                    delivery.digest_id, delivery.dropped = f"{nonce}-{number}", 0
                    delivery.parted = delivery.parted or retry.delivered > 0
                    machine.counts.update(digests=retry.delivered > 0, delivered=retry.delivered, aged=retry.aged)
                delivery.frozen = delivery.frozen or retry.unknown
                if retry.give_back:
                    delivery.deferred_ms = delivery.deferred_ms or now
                if not retry.give_back or now - delivery.deferred_ms > GIVE_BACK_MS:
                    delivery.attempts += 1
                delivery.lost = 0
                delivery.last_error = retry.error
                delivery.token = ""
                held = machine.held[lease.key]
                held.passes = held.passes or held.flush
                hours = None if held.passes else retry.hours
                due = within(hours, lease.key, now + retry.delay_ms, now, machine.shift_ms)
                held.touch(due - now + retry.limits.ttl_ms, now)
                machine.place(lease.key, due, now)
                held.done = (lease.token, lease.digest_id, Closed("closed"))
                answers.append(True)
        return answers

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool]:
        answers: list[bool] = []
        with self._transition(shard) as (machine, now):
            for lease in leases:
                delivery = machine.fenced(lease)
                if isinstance(delivery, Closed):
                    answers.append(delivery.status != "lost")
                    continue
                delivery.frozen = delivery.frozen or started
                delivery.token = ""
                machine.place(lease.key, now, now)
                machine.held[lease.key].done = (lease.token, lease.digest_id, Closed("released"))
                answers.append(True)
        return answers

    async def postpone(self, shard: int, postpones: Sequence[Postpone], limits: Limits) -> list[bool]:
        answers: list[bool] = []
        with self._transition(shard) as (machine, now):
            for lease, delay_ms in postpones:
                delivery = machine.fenced(lease)
                if isinstance(delivery, Closed):
                    answers.append(delivery.status != "lost")
                    continue
                held = machine.held[lease.key]
                if held.flush:  # it was asked for since, so it is tried again, now whatever its hours
                    held.flush, held.passes, delay_ms = False, True, 0
                delivery.token = ""
                held.touch(delay_ms + (held.own or limits).ttl_ms, now)
                is_muted = machine.is_muted(lease.key, now)
                time = now + delay_ms if delay_ms and not is_muted else min(lease.due_ms, now)
                if not machine.place(lease.key, time, now) and not is_muted:
                    machine.postponed[lease.key] = lease.due_ms
                held.done = (lease.token, lease.digest_id, Closed("released"))
                answers.append(True)
        return answers

    async def throttle(
        self,
        wanted: int,
        rate: Rate,
        asker: int,
        returned: Sequence[Tokens] = (),
        pauses: Sequence[tuple[str, int]] = (),
        known: int = 0,
    ) -> Grant:
        source = self.shard_map.current.start
        with self._lock:
            machine, now = self._tick(source, begins=True)
            mine = [each for each in returned if each.source == source]
            changed = source > 0  # there was another layout before
            return machine.bucket.ask(wanted, rate, asker, mine, pauses, known, now=now, source=source, changed=changed)

    # By hand

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        return [
            (key, due - machine.shift_ms)
            for machine, now in self._transitions(self.shard_map.live)
            for key, due in machine.promote(
                machine.waiting, now if deadline_ms is None else deadline_ms + machine.shift_ms
            )
        ]

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        recovered: list[str] = []
        for machine, now in self._transitions(self.shard_map.live):
            if machine.lease_ms:
                machine.watch_gap(machine.lease_ms, now)
            deadline = machine.recoverable(now if deadline_ms is None else deadline_ms + machine.shift_ms, now)
            recovered += [key for key, _ in machine.promote(machine.leased, deadline)]
        return recovered

    async def delete(self, key: str) -> bool:
        existed = False
        for machine, _ in self._transitions(self.shard_map.shards_of(key)):
            existed = existed or machine.placed(key) is not None
            held = machine.held.pop(key, Held())
            machine.leave(key)
            machine.forget(key)
            if held.delivery and held.delivery.token:
                held.done = (held.delivery.token, held.delivery.digest_id, Closed("deleted"))
            if held.done:  # also of an earlier outcome, so that a repeated call hears what the first one did
                machine.held[key] = Held(done=held.done)
        return existed

    async def flush(self, key: str) -> bool:
        exists = False
        for machine, now in self._transitions(self.shard_map.shards_of(key)):
            mute = machine.mutes.get(key)
            if mute and mute.end_ms <= now:
                machine.unmute(key, mute.end_ms, None, now)
            if machine.placed(key) and not machine.is_muted(key, now):
                exists = True
                machine.flush(key, machine.held[key], now)
        return exists

    async def mute(self, key: str, mute: Mute, limits: Limits) -> bool:
        is_muted = False
        for shard in self.shard_map.shards_of(key):
            with self._transition(shard, begins=True) as (machine, now):
                end = NEVER_MS if mute.delay_ms is None else now + mute.delay_ms
                end = end if mute.at_ms is None else mute.at_ms + machine.shift_ms
                if end > now:
                    machine.mute(key, StoredMute(end, mute.drop, end), limits, now)
                elif key in machine.mutes:
                    machine.unmute(key, now, limits, now)
                is_muted = is_muted or end > now
        return is_muted

    async def unmute(self, key: str, limits: Limits) -> bool:
        was_muted = False
        for machine, now in self._transitions(self.shard_map.shards_of(key)):
            if key in machine.mutes:
                machine.unmute(key, now, limits, now)
                was_muted = True
        return was_muted

    async def remove(self, key: str, name: bytes, limits: Limits) -> bool:
        removed = False
        for machine, now in self._transitions(self.shard_map.shards_of(key)):
            held, nonce = machine.held.get(key, Held()), self._nonce()
            if held.empty:
                continue
            log = machine.compact(held, held.log, limits.capacity)
            held.log = [entry for entry in log if identity(entry) != name]
            held.log_bytes = held.log_bytes if held.log else 0
            removed = removed or len(held.log) < len(log)
            delivery = held.delivery or Delivery("")
            kept = [entry for entry in delivery.entries if identity(entry) != name]
            if len(kept) < len(delivery.entries):
                if delivery.frozen or delivery.token or not (key in machine.waiting or held.due_ms):
                    removed = False  # it may be delivered again as it is
                else:
                    removed, delivery.entries, delivery.digest_id = True, kept, nonce
                    if not kept:
                        held.delivery = None
                        machine.settle(key, held, limits, now)
            if held.empty:
                machine.settle(key, held, limits, now)
        return removed

    async def reschedule(self, key: str, move: Move) -> int | None:
        with self._transition(self.shard_map.shard_of(key)) as (machine, now):
            held, terms, waits = machine.held.get(key, Held()), move.terms, key in machine.waiting
            by_hand = move.at_ms is not None or move.delay_ms is not None
            if not waits and (by_hand or machine.placed(key) or held.cool_ms <= now):
                raise InvalidState(f"timeline {key!r} is not waiting: only a waiting timeline can be rescheduled")

            def placed(before: int, delay_ms: int) -> int:
                is_same = move.by_clock and abs(now + delay_ms - before) <= SAME_MS
                return before if is_same else held.last_ms + delay_ms

            if by_hand:
                due = max(now, now + (move.delay_ms or 0) if move.at_ms is None else move.at_ms + machine.shift_ms)
                if held.delivery is None:
                    due = clamped(terms, due, held.cool_ms, held.last_ms)
            elif held.delivery:
                raise InvalidState(f"timeline {key!r} waits for a retry, which no policy places: give at or delay")
            elif held.iteration != move.iteration:
                return None
            else:
                if held.cool_ms:
                    held.cool_ms = placed(held.cool_ms, move.gap_ms)
                if terms.rule == "increment":
                    if held.cool_ms:
                        due = clamped(terms, held.cool_ms + terms.increment_ms, held.cool_ms, held.last_ms)
                    else:
                        due = held.opening_ms = placed(held.opening_ms, terms.initial_ms)
                else:
                    count = max(1, len(held.log))
                    due = opened(terms, key, now, machine.shift_ms, count)
                    due = clamped(terms, due, held.cool_ms, held.last_ms)
            due = within(terms.hours, key, due, now, machine.shift_ms)
            if not waits:
                return held.cool_ms - machine.shift_ms
            held.touch(max(due - now, 0) + terms.limits.ttl_ms, now)
            machine.place(key, due, now)
            return due - machine.shift_ms

    # Dead letters

    async def replay(self, letter_id: str, terms: Terms, own: bool | None) -> bool:
        holder = next((shard for shard, machine in enumerate(self.machines) if letter_id in machine.dead), 0)
        with self._transition(holder) as (machine, now):
            letter = machine.dead.alive(letter_id, now)
            if letter is None:
                raise InvalidState(f"there is no dead letter {letter_id!r}")
            key, held = letter.key, machine.held.setdefault(letter.key, Held())
            kept = (held.own or letter.limits) if own is None else terms.limits if own else None
            limits = kept or terms.limits
            if held.delivery:
                raise InvalidState(f"timeline {key!r} has a digest under delivery or in a retry wait")
            size = distinct([*letter.entries, *held.log])
            if size > limits.capacity:
                raise LimitExceeded(f"timeline {key!r} would hold {size} records; its capacity is {limits.capacity}")
            held.log[:0] = letter.entries
            for entry in letter.entries:
                machine.seen.get(key, {}).pop(identity(entry), None)
            held.own = kept
            held.touch(limits.ttl_ms, now)
            if needs := f"{terms.needs} mute" if machine.is_muted(key, now) else terms.needs:
                held.needs = merged_needs(held.needs, needs)
            held.max_bytes = terms.max_bytes or held.max_bytes
            terms = terms._replace(limits=limits)
            ready = machine.open_or_push(key, held, terms, now) or machine.fill(key, held, terms, now)
            del machine.dead[letter_id]
            return ready

    async def discard(self, letter_id: str) -> bool:
        with self._lock:
            return any(machine.dead.pop(letter_id, None) for machine in self.machines)

    async def dead_letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        with self._lock:
            machine = self.machines[shard]
            return Page(*page_of(machine.dead.times(machine.now(self._now())), count, after))

    async def dead_letter(self, letter_id: str, shard: int | None = None) -> StoredDeadLetter | None:
        with self._lock:
            server_ms = self._now()
            for machine in self.machines if shard is None else [self.machines[shard]]:
                now = machine.now(server_ms)
                if letter := machine.dead.alive(letter_id, now):
                    return replace(letter, buried_ms=letter.buried_ms - (now - server_ms))
            return None

    # Looking

    async def look(self, key: str) -> StoredTimeline | None:
        with self._lock:
            return self.machines[self.shard_map.shard_of(key)].look(key, self._now())

    async def cooling(self, key: str) -> list[Cooling]:
        with self._lock:
            machine, server_ms = self.machines[self.shard_map.shard_of(key)], self._now()
            held, ahead = machine.held.get(key, Held()), machine.now(server_ms) - server_ms
            cools = held.empty and held.cool_ms > server_ms + ahead
            return [Cooling(held.iteration, held.cool_ms - ahead, held.last_ms - ahead)] if cools else []

    async def entries(self, key: str) -> list[bytes]:
        with self._lock:
            return self.machines[self.shard_map.shard_of(key)].held.get(key, Held()).entries

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[StoredTimeline]:
        with self._lock:
            machine, server_ms = self.machines[shard], self._now()
            looks = {key: mute.look_ms for key, mute in machine.mutes.items()}
            keys, end = page_of(looks if state == "muted" else machine.schedule[state], count, after)
            return Page([timeline for key in keys if (timeline := machine.look(key, server_ms))], end)

    async def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        dues: list[int] = []
        with self._lock:
            server_ms = self._now()
            for machine in self.machines:
                total.update(machine.counts)
                now = machine.now(server_ms)
                total["dead"] += len(machine.dead.times(now))
                total["mutes"] += len(machine.mutes)
                for state, times in machine.schedule.items():
                    total[state] += len(times)
                ended = [end for end in machine.leased.values() if end <= now]  # nobody holds these
                scheduled = (*machine.waiting.values(), *machine.ready.values(), *machine.postponed.values(), *ended)
                dues += [due - (now - server_ms) for due in scheduled]
                total["stepped_back_ms"] = max(total["stepped_back_ms"], machine.stepped_back_ms(server_ms))
        if dues:
            total["oldest_due_ms"], total["overdue_ms"] = min(dues), max(0, server_ms - min(dues))
        return total

    # The store

    async def erase(self) -> int:
        with self._lock:
            held = sum(len(machine.held) + len(machine.dead) for machine in self.machines)
            self.machines = [Shard() for _ in self.machines]
            return held

    async def reshard(self, shards: int) -> bool:
        if shards != len(self.machines):
            raise ConfigurationError(f"this store keeps its number of shards, {len(self.machines)}")
        return False


def _delivered(report: Close | Retry, delivery: Delivery, lost: Sequence[Sequence[bytes] | None]) -> list[bytes]:
    """Return the entries of a part that were delivered: none that is ``lost`` (None: all of it) or too old."""
    entries = latest(delivery.entries[: report.taken])
    if report.seen is not None:
        return only(entries, report.seen)
    if None in lost:
        return []
    left = {*map(identity, entries)}.difference(*(names for names in lost if names))
    return [entry for entry in only(entries, left) if not aged(entry, delivery.cut_ms)]
