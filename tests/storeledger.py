"""Accounts for every record of a store: what each call may do to what is held, by the promises and not by any code.

After a call a ledger is told what was asked, what was answered, and the state that the store has now (in the form of
``storestate``), and compares it with the state before. Each entry that is gone must be superseded, dropped, delivered,
too old, buried, expired, removed or deleted, by that very call, and counted; nothing may appear that was not added.
An entry that has ended can therefore never be delivered again, since a lease hands out what its open log holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from storestate import COUNTERS, SETS, State

from aiodigest.backend import Add, Claims, Close, Closed, Lease, Move, NewDeadLetter, Retry
from aiodigest.errors import AiodigestError, InvalidState, LimitExceeded
from aiodigest.policy import Limits, Terms

HEADER = 11  # bytes before the id: version and flags, timestamp, length of the id
DAY = 86_400_000
LETTER_LIFE = 30 * DAY
LETTER_LIMIT = 10_000

Name: TypeAlias = tuple[str, str]  # of a delivery: token and digest id
Answer: TypeAlias = bool | AiodigestError


class Delivery(NamedTuple):
    """A digest that is open: by its id, nothing but the attempts may ever change."""

    id: str
    entries: list[bytes]
    part: int
    cut: int


class Held(NamedTuple):
    """What a state holds of one timeline."""

    delivery: Delivery
    attempts: int
    log: list[bytes]
    dropped: int  # by capacity from the log, and from what is open
    open_dropped: int
    since: int


def held_in(state: State, key: bytes) -> Held:
    timeline = state["timelines"].get(key, {"log": [], "open": [], "meta": {}})
    meta: Mapping[str, str] = timeline["meta"]
    number = {name: int(meta.get(name, 0)) for name in ("part", "cut", "attempts", "dropped", "open_dropped", "since")}
    delivery = Delivery(meta.get("id", ""), timeline["open"], number["part"], number["cut"])
    return Held(
        delivery, number["attempts"], timeline["log"], number["dropped"], number["open_dropped"], number["since"]
    )


def placed(state: State, key: bytes) -> tuple[str, int] | None:
    return next(((name, state[name][key]) for name in SETS if key in state[name]), None)


def readable(entry: bytes) -> bool:
    return len(entry) >= HEADER and entry[0] % 16 == 1 and len(entry) >= HEADER + int.from_bytes(entry[9:11])


def record_of(entry: bytes) -> tuple[bool, bytes]:
    """What an entry is of: the record with its id; one that cannot be read is a record of its own."""
    return (True, entry[HEADER : HEADER + int.from_bytes(entry[9:11])]) if readable(entry) else (False, entry)


def stamped(entry: bytes, now: int) -> bytes:
    """An entry as it is stored: with the time of its arrival, if it has no timestamp."""
    if not entry[0] & 0x10:
        return entry
    return bytes([entry[0] - 0x10]) + (now * 1000).to_bytes(8) + entry[9:]


def too_old(entry: bytes, cut: int) -> bool:
    return cut > 0 and readable(entry) and int.from_bytes(entry[1:9], signed=True) < cut * 1000


def newest(entries: Sequence[bytes], number: int | None = None) -> list[bytes]:
    """The last entry of each record, in order of arrival: of the newest ``number`` records, or of all."""
    last = sorted({record_of(entry): index for index, entry in enumerate(entries)}.values())
    return [entries[index] for index in (last if number is None else last[max(0, len(last) - number) :])]


def chosen(part: Sequence[bytes], ids: Iterable[bytes] | None) -> list[bytes]:
    """The records of a part with these ids (None: all); an unreadable entry goes by its own bytes."""
    wanted = None if ids is None else set(ids)
    return [entry for entry in newest(part) if wanted is None or record_of(entry)[1] in wanted]


def letter_entries(letter: NewDeadLetter, part: Sequence[bytes], cut: int) -> list[bytes]:
    return [entry for entry in chosen(part, letter.ids) if not too_old(entry, cut)]


def kept(before: Sequence[bytes], after: Sequence[bytes]) -> list[int]:
    """The places in ``before`` of what ``after`` holds; it must hold nothing else, in the same order."""
    places: list[int] = []
    place = len(before)
    for entry in reversed(after):
        place -= 1
        while place >= 0 and before[place] != entry:
            place -= 1
        assert place >= 0, f"{entry!r} appeared from nowhere, or out of its order"
        places.append(place)
    return places[::-1]


def compacted(before: Sequence[bytes], after: Sequence[bytes], capacity: int | None = None) -> int:
    """Check that nothing but superseded entries and the oldest records over ``capacity`` went; how many of these."""
    kept(before, after)
    records = newest(before)
    assert newest(after) == newest(before, capacity), "a record is gone, or the wrong one was dropped"
    return len(records) - len(newest(after))


class Ledger:
    """The promises that one shard keeps, call after call."""

    def __init__(self) -> None:
        self.state: State = {name: {} for name in (*SETS, "layout", "timelines", "dead")}
        self._holders: dict[bytes, Name] = {}  # who may still report on what is open
        self._unknown: set[bytes] = set()  # timelines whose open log may have been delivered
        self._ended: dict[bytes, tuple[Name, Closed]] = {}  # the last outcome of each timeline
        self._digests: dict[str, tuple[bytes, Delivery]] = {}  # all that there ever were
        self._own: dict[bytes, Limits] = {}
        self._ends: dict[bytes, tuple[int, int]] = {}  # when a timeline's records may end at the earliest, and must

    def holds(self, lease: Lease) -> bool:
        """Whether a lease still names the delivery of its timeline."""
        return self._holders.get(lease.key.encode()) == (lease.token, lease.digest_id)

    # Adding

    def added(self, adds: Sequence[Add], answers: Sequence[Answer], now: int, state: State) -> None:
        batches: dict[bytes, list[tuple[Add, Answer]]] = {}
        for add, answer in zip(adds, answers, strict=True):
            batches.setdefault(add.key.encode(), []).append((add, answer))
        dropped = 0
        for key, batch in batches.items():
            before, after = held_in(self.state, key), held_in(state, key)
            assert (after.delivery, after.attempts) == (before.delivery, before.attempts)
            for add, _ in batch:
                self._enter(key, add.terms, add.own, now)
            log = before.log + [stamped(add.entry, now) for add, _ in batch]
            dropped += self._trimmed(log, [add.terms.limits.capacity for add, _ in batch], before, after)
            told = [answer for _, answer in batch if answer is not False]
            woken = key in state["ready"] and key not in self.state["ready"]
            assert told == [True] * woken, "not only the add that made the timeline ready said so"
        self._accept(state, batches, counted={"dropped": dropped})

    def _enter(self, key: bytes, terms: Terms, own: bool, now: int) -> None:
        self._own.pop(key, None)
        if own:
            self._own[key] = terms.limits
        self._touch(key, terms.limits.ttl_ms, now)

    def _trimmed(self, log: Sequence[bytes], capacities: Sequence[int], before: Held, after: Held) -> int:
        """How many records a log lost to capacity. It may have been trimmed several times, so bounds must do."""
        places = kept(log, after.log)
        gone = set(range(len(log))) - set(places)
        last = {record_of(log[place]): place for place in places}
        lost = {place for place in gone if place > last.get(record_of(log[place]), -1)}
        dropped = after.dropped - before.dropped
        assert len({record_of(log[place]) for place in lost}) <= dropped <= len(gone)
        if lost:
            assert max(lost) < min(places), "a newer record was dropped before an older one"
            assert len(newest(after.log)) >= min(capacities), "more was dropped than capacity asks for"
        assert len(after.log) <= capacities[-1] + capacities[-1] // 4
        return dropped

    def planted(self, key: str, entry: bytes, state: State) -> None:
        """Something else than this library appended an entry to a log."""
        before, after = held_in(self.state, key.encode()), held_in(state, key.encode())
        assert after == before._replace(log=[*before.log, entry])
        self._accept(state, [key.encode()])

    def lost(self, key: str) -> None:
        """Something else than this library dropped a log."""
        timelines = self.state["timelines"]
        self.state = self.state | {"timelines": timelines | {key.encode(): timelines[key.encode()] | {"log": []}}}

    # Delivering

    def claimed(self, claims: Claims, limits: Limits, now: int, state: State) -> None:
        assert not claims.broken
        expired = 0
        for name, number in claims.expired:
            key = name.encode()
            before = held_in(self.state, key)
            assert self._due(key, now) is not None
            assert now >= self._ends[key][0], "records ended before their ttl"
            assert number == len(newest(before.delivery.entries + before.log))
            assert key not in state["timelines"], "something of a timeline outlived its end"
            self._ended.pop(key, None)
            expired += number
        keys = {lease.key.encode() for lease in claims.leases}
        for key in keys:
            assert now < self._ends[key][1], "records are delivered long after their ttl"
        dropped = sum(self._leased(lease, limits, now, state) for lease in claims.leases)
        self._moved(state, {key for name in ("waiting", "leased") for key in self.state[name]} - keys, now)
        counted = {"dropped": dropped, "expired": expired}
        self._accept(state, keys | {key.encode() for key, _ in claims.expired}, counted=counted, moving=True)

    def opened(self, lease: Lease | None, limits: Limits, now: int, state: State) -> None:
        dropped = 0
        if lease:
            assert lease.key.encode() in self.state["ready"], "opened before it was ready"
            dropped = self._leased(lease, limits, now, state)
        self._accept(state, [lease.key.encode()] if lease else (), counted={"dropped": dropped})

    def _leased(self, lease: Lease, limits: Limits, now: int, state: State) -> int:
        key = lease.key.encode()
        before, after = held_in(self.state, key), held_in(state, key)
        assert lease.due_ms == self._due(key, now), "leased while another holds it, or before it was due"
        limits = self._own.get(key, limits)
        if key in self._holders:  # whose lease ended without a word
            self._unknown.add(key)
        dropped = 0
        if before.delivery.id and (key in self._unknown or not before.log):
            assert after.delivery == before.delivery, "the contents of a digest changed under its id, or its id did"
            assert (after.log, after.open_dropped) == (before.log, before.open_dropped)
        else:
            opened = after.delivery
            assert opened.id != before.delivery.id
            assert not after.log
            dropped = compacted(before.delivery.entries + before.log, opened.entries, limits.capacity)
            assert after.open_dropped == before.dropped + before.open_dropped + dropped
            assert opened.part == limits.max_size
            assert opened.cut == (now - limits.max_age_ms if limits.max_age_ms else 0)
            if 0 < opened.part < len(opened.entries):
                assert opened.entries == newest(opened.entries), "a record may come in two parts"
        assert lease.attempt == after.attempts == before.attempts + 1, "an attempt was not charged"
        told = (lease.digest_id, lease.size, lease.part, lease.cut_ms, lease.dropped)
        assert told == (
            after.delivery.id, len(after.delivery.entries), after.delivery.part, after.delivery.cut, after.open_dropped,
        )  # fmt: skip
        assert list(lease.entries) == after.delivery.entries, "what is handed out is not what is open"
        self._holders[key] = (lease.token, lease.digest_id)
        self._touch(key, limits.ttl_ms, now)
        return dropped

    def read(self, lease: Lease, start: int, count: int, page: Sequence[bytes]) -> None:
        assert self.holds(lease), "a lease that is lost could still read"
        assert page == held_in(self.state, lease.key.encode()).delivery.entries[start : start + count]

    def renewed(self, leases: Sequence[Lease], answers: Sequence[Answer], end: int, state: State) -> None:
        keys = {lease.key.encode() for lease in leases if self.holds(lease)}
        for lease, answer in zip(leases, answers, strict=True):
            assert answer is self.holds(lease)
        for key in keys:
            assert state["leased"].get(key) == end
            assert state["timelines"][key] == self.state["timelines"][key]
        self._accept(state, keys)

    def closed(
        self, closes: Sequence[Close], answers: Sequence[Closed | AiodigestError], now: int, state: State
    ) -> None:
        keys: set[bytes] = set()
        counted = Counter[str]()
        letters: list[tuple[object, ...]] = []
        for close, answer in zip(closes, answers, strict=True):
            key, name = close.lease.key.encode(), (close.lease.token, close.lease.digest_id)
            if not self.holds(close.lease):
                assert answer == self._outcome(key, name)
                continue
            assert isinstance(answer, Closed)
            assert key not in keys
            keys.add(key)
            before, after = held_in(self.state, key), held_in(state, key)
            part, rest = before.delivery.entries[: close.taken], before.delivery.entries[close.taken :]
            assert after.delivery.entries == rest, "a close took more or less than its part"
            assert after.log == before.log, "a close changed what came since"
            assert answer == (Closed("part", after.delivery.id, len(rest)) if rest else Closed("closed"))
            assert not rest or (after.delivery.id != before.delivery.id and after.attempts == 1)
            buried = [
                (letter.reason, letter_entries(letter, part, before.delivery.cut)) for letter in close.dead_letters
            ]
            letters += [
                (now, close.lease.key, reason, before.attempts, before.delivery.id, entries)
                for reason, entries in buried
                if entries
            ]
            self._counts(counted, part, [entry for _, entries in buried for entry in entries], before.delivery.cut)
            counted["buried"] += sum(len(entries) for _, entries in buried)
            self._end(key, name, answer)
            if rest:
                self._holders[key] = (close.lease.token, after.delivery.id)
            if rest or after.log:
                self._touch(key, close.limits.ttl_ms, now)
        new = [letter for letter_id, letter in state["dead"].items() if letter_id not in self.state["dead"]]
        assert sorted(new) == sorted(letters), "what was to be set aside was not, or something else was"
        pruned = self.state["dead"].keys() - state["dead"].keys()
        full = len(self.state["dead"]) + len(letters) > LETTER_LIMIT
        assert not pruned or letters
        assert full or all(self.state["dead"][letter_id][0] <= now - LETTER_LIFE for letter_id in pruned)
        counted["letters_dropped"] = len(pruned)
        self._accept(state, keys, counted=counted, letters=pruned | (state["dead"].keys() - self.state["dead"].keys()))

    def retried(self, retries: Sequence[Retry], answers: Sequence[Answer], now: int, state: State) -> None:
        keys: set[bytes] = set()
        counted = Counter[str]()
        for retry, answer in zip(retries, answers, strict=True):
            key, name = retry.lease.key.encode(), (retry.lease.token, retry.lease.digest_id)
            if not self.holds(retry.lease):
                assert answer is (self._outcome(key, name).status != "lost")
                continue
            assert answer is True
            keys.add(key)
            before, after = held_in(self.state, key), held_in(state, key)
            assert after.log == before.log
            part, rest = before.delivery.entries[: retry.taken], before.delivery.entries[retry.taken :]
            stay = chosen(part, retry.failed or ())
            if stay and key not in self._unknown:
                assert after.delivery.entries == stay + rest, "a partial failure kept more or less than what failed"
                assert after.delivery.id != before.delivery.id
                self._counts(counted, part, stay, before.delivery.cut)
            else:
                assert after.delivery == before.delivery, "only a known outcome may change contents"
            if retry.unknown:
                self._unknown.add(key)
            back = retry.give_back and now - (before.since or now) <= DAY
            assert after.attempts == before.attempts - back
            self._end(key, name, Closed("closed"), known=False)
            self._touch(key, retry.delay_ms + retry.limits.ttl_ms, now)
        self._accept(state, keys, counted=counted)

    def released(self, leases: Sequence[Lease], answers: Sequence[Answer], started: bool, state: State) -> None:
        keys: set[bytes] = set()
        for lease, answer in zip(leases, answers, strict=True):
            key, name = lease.key.encode(), (lease.token, lease.digest_id)
            if not self.holds(lease):
                assert answer is (self._outcome(key, name).status != "lost")
                continue
            assert answer is True
            keys.add(key)
            before, after = held_in(self.state, key), held_in(state, key)
            assert after == before._replace(attempts=before.attempts - 1)
            if started:
                self._unknown.add(key)
            self._end(key, name, Closed("closed"), known=False)
        self._accept(state, keys)

    # By hand

    def moved(self, keys: Collection[str], left: str, deadline: int, state: State) -> None:
        """Schedule or maintenance: from one set to ``ready``."""
        assert sorted(key.encode() for key in keys) == sorted(self.state[left].keys() - state[left].keys())
        self._moved(state, self.state[left].keys(), deadline)
        self._accept(state, [key.encode() for key in keys])

    def flushed(self, key: str, answer: bool, state: State) -> None:
        name = key.encode()
        assert answer is (placed(self.state, name) is not None)
        assert held_in(state, name) == held_in(self.state, name)
        assert name not in state["waiting"]
        self._accept(state, [name])

    def deleted(self, key: str, answer: bool, state: State) -> None:
        name = key.encode()
        assert answer is (placed(self.state, name) is not None)
        after = held_in(state, name)
        assert not after.log
        assert not after.delivery.entries
        if name in self._holders:
            self._ended[name] = (self._holders[name], Closed("deleted"))
        self._accept(state, [name])

    def removed(self, key: str, record_id: bytes, limits: Limits, answer: bool, now: int, state: State) -> None:
        name = key.encode()
        before, after = held_in(self.state, name), held_in(state, name)
        log = newest(before.log, limits.capacity)
        dropped = len(newest(before.log)) - len(log)
        kept(before.log, after.log)
        assert newest(after.log) == self._without(log, record_id), "a removal left or took something else"
        opened = before.delivery.entries
        if name in self.state["waiting"] and name not in self._unknown:
            opened = self._without(opened, record_id)
        if opened == before.delivery.entries:
            assert (after.delivery, after.attempts) == (before.delivery, before.attempts)
        else:
            assert after.delivery.entries == opened
            assert after.delivery.id != before.delivery.id
            assert not opened or after.attempts == before.attempts
            if not opened and after.log:
                self._touch(name, limits.ttl_ms, now)
        assert answer is (opened != before.delivery.entries or any(record_of(e)[1] == record_id for e in log))
        self._accept(state, [name], counted={"dropped": dropped})

    def _without(self, entries: Sequence[bytes], record_id: bytes) -> list[bytes]:
        return [entry for entry in entries if record_of(entry)[1] != record_id]

    def rescheduled(self, key: str, move: Move, answer: int | AiodigestError | None, now: int, state: State) -> None:
        name = key.encode()
        if not isinstance(answer, int):
            self._accept(state)
            return
        assert held_in(state, name) == held_in(self.state, name)
        assert name in self.state["waiting"]
        assert placed(state, name) == ("ready" if answer <= now else "waiting", answer)
        self._touch(name, max(0, answer - now) + move.terms.limits.ttl_ms, now)
        self._accept(state, [name])

    def replayed(self, letter_id: str, terms: Terms, own: bool, answer: Answer, now: int, state: State) -> None:
        letter = self.state["dead"].get(letter_id)
        if letter is None or letter[0] <= now - LETTER_LIFE:
            assert isinstance(answer, InvalidState)
            self._accept(state)
            return
        key, entries = letter[1].encode(), letter[-1]
        before, after = held_in(self.state, key), held_in(state, key)
        if before.delivery.id:
            assert isinstance(answer, InvalidState)
            self._accept(state)
        elif len(newest(entries + before.log)) > terms.limits.capacity:
            assert isinstance(answer, LimitExceeded)
            self._accept(state)
        else:
            compacted(entries + before.log, after.log)
            assert answer is (key in state["ready"] and key not in self.state["ready"])
            self._enter(key, terms, own, now)
            assert letter_id not in state["dead"]
            self._accept(state, [key], letters=[letter_id])

    def discarded(self, letter_id: str, answer: bool, state: State) -> None:
        assert answer is (letter_id in self.state["dead"])
        assert letter_id not in state["dead"]
        self._accept(state, letters=[letter_id])

    # What all calls have in common

    def _outcome(self, key: bytes, name: Name) -> Closed:
        """What a lease hears that names no delivery any more: what it heard first, or that it is lost."""
        ended, answer = self._ended.get(key, (None, None))
        return answer if answer and ended == name else Closed("lost")

    def _end(self, key: bytes, name: Name, answer: Closed, *, known: bool = True) -> None:
        del self._holders[key]
        self._ended[key] = (name, answer)
        if known:
            self._unknown.discard(key)

    def _counts(self, counted: Counter[str], part: Sequence[bytes], stay: Collection[bytes], cut: int) -> None:
        """Of a part, what neither stays nor is set aside was delivered, or was too old."""
        gone = [entry for entry in newest(part) if entry not in stay]
        delivered = sum(not too_old(entry, cut) for entry in gone)
        counted["delivered"] += delivered
        counted["aged"] += len(gone) - delivered
        counted["digests"] += delivered > 0

    def _due(self, key: bytes, now: int) -> int | None:
        """When a timeline that may be claimed was due, if it may."""
        place = placed(self.state, key)
        return place[1] if place and (place[0] == "ready" or place[1] <= now) else None

    def _moved(self, state: State, keys: Iterable[bytes], deadline: int) -> None:
        """Timelines may have become ready, with the time they had, if that has come."""
        for key in keys:
            place, before = placed(state, key), placed(self.state, key)
            if place and before and place != before:
                assert place == ("ready", before[1])
                assert before[1] <= deadline

    def _touch(self, key: bytes, ttl: int, now: int) -> None:
        earliest, latest = self._ends.get(key, (0, 0))
        self._ends[key] = (max(earliest, now + ttl), max(latest, now + ttl + ttl // 64))

    def _accept(
        self,
        state: State,
        keys: Collection[bytes] = (),
        *,
        counted: Mapping[str, int] | None = None,
        letters: Collection[str] = (),
        moving: bool = False,
    ) -> None:
        """Check that the call changed nothing but these timelines, letters and counters; the state is now this one."""
        before = self.state
        for key in (before["timelines"].keys() | state["timelines"].keys()).difference(keys):
            assert state["timelines"].get(key) == before["timelines"].get(key), f"{key!r} changed too"
            assert moving or placed(state, key) == placed(before, key), f"{key!r} moved too"
        for letter_id in (before["dead"].keys() | state["dead"].keys()).difference(letters):
            assert state["dead"].get(letter_id) == before["dead"].get(letter_id), "a dead letter is not what it was"
        grown = {name: state["layout"].get(name, 0) - before["layout"].get(name, 0) for name in COUNTERS}
        expected = {name: (counted or {}).get(name, 0) for name in COUNTERS}
        assert grown == expected, f"the counters do not add up: {grown}, not {expected}"
        for key in keys:
            delivery = held_in(state, key).delivery
            if delivery.id:
                assert self._digests.setdefault(delivery.id, (key, delivery)) == (key, delivery), "one id, two contents"
            else:
                self._holders.pop(key, None)
                self._unknown.discard(key)
            if placed(state, key) is None:
                self._own.pop(key, None)
                self._ends.pop(key, None)
        for key, name in self._holders.items():
            assert key not in state["waiting"], f"{key!r} waits while {name} may deliver it"
        assert state["leased"].keys() <= self._holders.keys(), "leased to nobody"
        self.state = state
