"""What a store may do when, worked out from what was added: who asks it for more too early is told on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aiodigest import AiodigestError
from aiodigest.backend import Add, Claims, Close, Closed, Lease, Postpone, Retry, StoredDeadLetter
from aiodigest.backends.memory.timelines import Shard
from aiodigest.policy import Terms
from aiodigest.records.entries import identity_of
from simulation.records import Records, serials_of
from simulation.rules import Rules


@dataclass
class Line:
    """A timeline in a shard; times are milliseconds by the shard's clock."""

    due: int = 0  # it is not leased before that; 0: it may be at any time
    placed: bool = False  # it waits, is due, or is under delivery
    log: list[int | None] = field(default_factory=list[int | None])  # serials of what came since it was last opened
    next: int = 0
    cool: int = 0
    last: int = 0
    digest: str = ""  # that is open
    token: str = ""
    in_doubt: bool = False  # its digest: a lease on it ended without a word
    parted: bool = False
    flushed: bool = False  # while it was under delivery
    passes: bool = False  # its digest may go out whatever its hours are


class Ledger:
    """Sees that nothing is leased before it is due by its rule, its cool-down, its hours or its retry, that no id comes
    a second time within its window, and that nothing begins while its hours are closed."""

    def __init__(self, rules: Rules, records: Records, broken: Callable[[str], None]) -> None:
        self._rules = rules
        self._records = records
        self._broken = broken
        self._lines = defaultdict[tuple[int, str], Line](Line)
        self._seen = defaultdict[tuple[int, str], dict[str, int]](dict)  # ids that count as delivered, until when
        self._passing: dict[str, bool] = {}  # digests that were leased: whether they may pass their hours
        self.latest = defaultdict[int, int](int)  # what the clock of a shard has shown: it may step back by a second

    # Time

    def _within(self, key: str, due: int, now: int, ahead: int) -> int:
        opening = self._rules.opening(key)
        return due if opening is None else opening.within(key, max(due, now) - ahead) + ahead

    def _placed(self, line: Line, key: str, due: int, now: int, ahead: int) -> None:
        line.placed, line.due = True, self._within(key, due, now, ahead)

    def _is_full(self, line: Line, key: str) -> bool:
        policy = self._rules.of(key)
        ids = {self._records.all[serial].record_id if serial else n for n, serial in enumerate(line.log)}
        size = sum(len(str(serial)) for serial in line.log if serial)
        return len(ids) >= (policy.max_size or 10_000) or size >= (policy.max_bytes or 10_000)

    def _clamped(self, terms: Terms, due: int, line: Line) -> int:
        return due if terms.at is not None else max(line.cool, min(due, line.last + terms.maximum_ms))

    # Transitions

    def added(self, shard: int, adds: Sequence[Add], answers: Sequence[bool | AiodigestError], machine: Shard,
              now: int) -> None:  # fmt: skip
        for add, serial, answer in zip(adds, serials_of(add.entry for add in adds), answers, strict=True):
            if not isinstance(answer, AiodigestError) and not self._is_duplicate(shard, add.key, serial, now):
                self._add(shard, add, serial, now, machine.shift_ms)

    def _add(self, shard: int, add: Add, serial: int | None, now: int, ahead: int) -> None:
        line, terms, key, rules = self._lines[shard, add.key], add.terms, add.key, self._rules
        line.log.append(serial)
        count = len(line.log)
        if line.digest:
            if terms.rule != "increment" and not (terms.at is not None and line.next):
                due = rules.opened(terms, key, now, ahead, count)
                if terms.at is not None:
                    due = self._within(key, due, now, ahead)
                line.next = min(line.next or due, due) if terms.price_ms else due
        elif not line.placed:
            due = rules.opened(terms, key, now, ahead, count)
            if line.cool > now and terms.at is None:
                due = line.cool + terms.increment_ms if terms.rule == "increment" else due
                due = self._clamped(terms, due, line)
            else:
                line.last, line.cool = now, 0
                due = now if terms.first_at_once else due
            self._placed(line, key, due, now, ahead)
        elif line.due > self.latest[shard] and terms.at is None:
            due = rules.pushed(terms, key, line.due, now, count)
            self._placed(line, key, self._clamped(terms, due, line), now, ahead)
        if not line.digest and line.due > self.latest[shard] and self._is_full(line, key):
            self._placed(line, key, now, now, ahead)
        if add.urgent:
            self._flush(line, now)

    def _flush(self, line: Line, now: int) -> None:
        if line.token or line.in_doubt:  # only the store knows whether a claim has left such a one to others
            line.flushed = True
        if line.placed and not line.token:
            line.passes, line.due = True, min(line.due, now)

    def claimed(self, shard: int, claims: Claims, machine: Shard, now: int) -> None:
        for key, _ in claims.expired:
            self._lines.pop((shard, key), None)
        for lease in claims.leases:
            self._leased(self._lines[shard, lease.key], shard, lease, now)
        for (where, key), line in self._lines.items():
            if where == shard and line.placed and machine.placed(key) is None:  # nothing was left of it
                self._open(line, shard, key, (), now)
                line.placed, line.flushed, line.passes, line.digest, line.token = False, False, False, "", ""

    def _leased(self, line: Line, shard: int, lease: Lease, now: int) -> None:
        if self.latest[shard] < line.due:
            self._broken(f"{lease.key} is leased {line.due - now} ms before it is due")
        if lease.digest_id != line.digest:
            self._open(line, shard, lease.key, serials_of(lease.entries), now)
        line.placed, line.digest, line.token, line.in_doubt = True, lease.digest_id, lease.token, lease.lost > 0
        self._passing[lease.digest_id] = line.passes

    def _open(self, line: Line, shard: int, key: str, opened: Iterable[int | None], now: int) -> None:
        """What has come is opened as a digest, or merged into one that failed."""
        serials = set(opened)
        for serial in serials:
            if serial is not None and self._until(shard, key, serial) > now:
                self._broken(f"{self._records.all[serial].record_id} of {key} comes again within its window: {serial}")
        for serial in set(line.log) - serials:
            self._is_duplicate(shard, key, serial, now)
        line.log, line.next = [], 0

    def closed(self, shard: int, close: Close, answer: Closed, machine: Shard, now: int) -> None:
        lease, key, line = close.lease, close.lease.key, self._lines[shard, close.lease.key]
        if (line.token, line.digest) != (lease.token, lease.digest_id) or answer.status not in ("part", "closed"):
            return
        if close.counts:
            self._remember(shard, key, lease.digest_id, [letter.ids for letter in close.dead_letters], now)
        line.parted = line.parted or close.counts
        if answer.status == "part":
            line.digest = answer.digest_id
            self._passing[line.digest] = self._passing[lease.digest_id]
            return
        if line.parted:
            line.last, line.cool = now, now + close.cool_ms
        flush, due = line.flushed, max(line.cool, line.next or now)
        # what goes by a calendar was placed within its hours as it came, and stays there when the clock steps back
        is_within = line.next > 0 and self._rules.of(key).at is not None
        line.placed, line.digest, line.token, line.parted, line.flushed = bool(line.log), "", "", False, False
        line.passes, line.next, line.in_doubt = flush and line.placed, 0, False
        if flush:
            line.due = 0
        elif line.placed:
            if is_within and not self._is_full(line, key):
                line.due = due
            else:
                full = self._is_full(line, key)
                self._placed(line, key, min(due, now) if full else due, now, machine.shift_ms)

    def retried(self, shard: int, retry: Retry, machine: Shard, now: int) -> None:
        lease, key, line = retry.lease, retry.lease.key, self._lines[shard, retry.lease.key]
        if (line.token, line.digest) != (lease.token, lease.digest_id):
            return
        delivery = machine.held[key].delivery
        assert delivery is not None
        if delivery.digest_id != lease.digest_id:  # it is smaller
            self._remember(shard, key, lease.digest_id, [retry.failed], now)
            line.digest, line.parted = delivery.digest_id, line.parted or retry.delivered > 0
        line.token, line.passes = "", line.passes or line.flushed
        line.due = now + retry.delay_ms
        if not line.passes:
            self._placed(line, key, line.due, now, machine.shift_ms)

    def put_aside(self, shard: int, postpone: Postpone, now: int) -> None:
        line = self._lines[shard, postpone.lease.key]
        if line.token != postpone.lease.token or line.digest != postpone.lease.digest_id:
            return
        line.token, line.passes = "", line.passes or line.flushed
        line.due = 0 if line.flushed else now + postpone.delay_ms
        line.flushed = False

    def released(self, shard: int, lease: Lease) -> None:
        line = self._lines[shard, lease.key]
        line.token = "" if line.token == lease.token else line.token

    def flushed(self, key: str, now: Callable[[int], int]) -> None:
        for (shard, other), line in self._lines.items():
            if other == key:
                self._flush(line, now(shard))

    def deleted(self, key: str) -> None:
        for shard, other in list(self._lines):
            if other == key:
                del self._lines[shard, key]
                self._seen.pop((shard, key), None)

    def moved(self, key: str, machines: Sequence[Shard]) -> None:
        """A timeline was moved, or lost a record: it may come when it likes."""
        for (shard, other), line in self._lines.items():
            if other == key:
                held = machines[shard].held.get(key)
                line.due, line.cool, line.last = 0, held.cool_ms if held else 0, held.last_ms if held else 0
                line.placed = machines[shard].placed(key) is not None
                line.digest = held.delivery.digest_id if held and held.delivery else ""

    def replayed(self, shard: int, letter: StoredDeadLetter) -> None:
        line = self._lines[shard, letter.key]
        line.placed, line.due = True, 0
        for serial in filter(None, serials_of(letter.entries)):
            self._seen[shard, letter.key].pop(self._records.all[serial].record_id, None)
            line.log.insert(0, serial)

    # What was delivered

    def _until(self, shard: int, key: str, serial: int) -> int:
        return self._seen[shard, key].get(self._records.all[serial].record_id, 0)

    def _is_duplicate(self, shard: int, key: str, serial: int | None, now: int) -> bool:
        """Whether a record was delivered within its window; then it need not be delivered again."""
        if serial is None or self._until(shard, key, serial) <= now:
            return False
        self._records.all[serial].excused = "a duplicate"
        return True

    def _remember(self, shard: int, key: str, digest_id: str, lost: Sequence[Sequence[bytes] | None], now: int) -> None:
        """Count as delivered what its latest callback delivered, unless it is ``lost`` (None: all of it).

        An earlier callback may have returned without the store hearing of it; its records are then not delivered yet.
        """
        window = self._rules.of(key).terms.dedupe_ms
        records = [self._records.all[serial] for serial in self._records.contents.get(digest_id, ())]
        receipts = [receipt for record in records for receipt in record.receipts if receipt.digest_id == digest_id]
        if not window or not receipts or None in lost:
            return
        latest = max(receipts, key=lambda receipt: receipt.began)
        left = {name for names in lost if names for name in names}
        for record_id in (self._records.all[serial].record_id for serial in latest.serials if latest.delivered(serial)):
            if identity_of(record_id.encode()) not in left:
                self._seen[shard, key][record_id] = now + window

    # Callbacks

    def begins(self, key: str, digest_id: str, serials: Sequence[int], server_ms: int | None) -> None:
        """See that a callback may begin, by what the server's clock shows (None: it has stepped meanwhile)."""
        opening, most = self._rules.opening(key), self._rules.of(key).max_bytes
        is_closed = opening is not None and server_ms is not None and not opening.is_open(server_ms)
        if is_closed and not self._passing.get(digest_id, True):
            self._broken(f"{digest_id} of {key} begins while its hours are closed")
        if most and len(serials) > 1 and sum(len(str(serial)) for serial in serials) > most:
            self._broken(f"{digest_id} of {key} holds more than {most} bytes: {serials}")
