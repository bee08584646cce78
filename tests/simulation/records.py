"""What became of each record: added, stored, delivered, replaced, removed or set aside; and who may be told what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from aiodigest import AiodigestError, BackendUnavailable, Digest
from aiodigest.backend import Add, StoredDeadLetter
from aiodigest.records.entries import unpack
from simulation.loop import Process


@dataclass(eq=False)
class Receipt:
    """A digest that a callback was given, and how the callback ended."""

    process: Process
    key: str
    digest_id: str
    serials: tuple[int, ...]
    began: float
    ending: Literal["running", "returned", "raised", "partial", "cut"] = "running"
    ended: float = 0.0
    failed: frozenset[int] = frozenset()  # those that a PartialFailure named
    told: bool = False  # the store was known to know that it was delivered
    tells: bool = True  # something of its receiver
    stubborn: bool = False  # its callback ignores its cancellation
    lost: int = 0  # leases on it that had ended without a word, when its own was given

    def delivered(self, serial: int) -> bool:
        return self.ending == "returned" or (self.ending == "partial" and serial not in self.failed)


@dataclass
class Record:
    """A record that somebody wanted to add. Its serial is its value, so each add is of a record of its own."""

    key: str
    record_id: str
    began: float  # when its add was called
    answer: bool | None = None  # of the store; None: not stored
    order: int = 0  # of arrival
    stored_at: float = 0.0
    given_up_at: float = inf  # its caller was told that nobody knows
    acknowledged_at: float = inf
    refused: bool = False  # its caller was told that it was not stored
    cancelled: bool = False
    excused: str = ""  # why it may be gone
    replayed: bool = False
    receipts: list[Receipt] = field(default_factory=list[Receipt])


def serials_of(entries: Iterable[bytes]) -> Iterator[int | None]:
    """The serials of the records that entries hold; None where somebody else wrote it."""
    for value in (unpack(entry).value for entry in entries):
        yield int(value[1:]) if value[:1] == b"\x01" else None


class Records:
    """The book of all records."""

    def __init__(self, broken: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.all: dict[int, Record] = {}
        self.contents: dict[str, tuple[int, ...]] = {}
        self._broken = broken
        self._clock = clock
        self._arrivals = 0
        self._latest: dict[tuple[str, str], int] = {}
        self._by_key = defaultdict[str, list[int]](list)
        self.is_trusted = True  # who sent what is being done knew the server's clock

    def new(self, key: str, record_id: str) -> int:
        serial = len(self.all) + 1
        self.all[serial] = Record(key, record_id, self._clock())
        return serial

    def adding(self, adds: Sequence[Add]) -> None:
        for serial in serials_of(add.entry for add in adds):
            if serial is not None and self.all[serial].cancelled:
                self._broken(f"record {serial} was cancelled before it was sent, and is sent all the same")

    def begun_at(self, adds: Sequence[Add]) -> float:
        """When the first of these adds was called."""
        return min(self.all[serial].began for serial in serials_of(add.entry for add in adds) if serial)

    def added(self, adds: Sequence[Add], answers: Sequence[bool | AiodigestError]) -> None:
        for serial, answer in zip(serials_of(add.entry for add in adds), answers, strict=True):
            if serial is None or isinstance(answer, AiodigestError):
                continue
            record = self.all[serial]
            self._arrivals += 1
            record.answer, record.order, record.stored_at = answer, self._arrivals, self._clock()
            if record.refused:
                self._broken(f"record {serial} is stored, and its caller was told that it was not")
            older = self._latest.get((record.key, record.record_id))
            if older is not None:
                self.all[older].excused = f"replaced by {serial}"
                self._see_late(serial, older)
            self._latest[record.key, record.record_id] = serial
            self._by_key[record.key].append(serial)

    def _see_late(self, serial: int, older: int) -> None:
        """See that a record whose caller was told "unknown" does not replace what was acknowledged after that."""
        late, newer = self.all[serial], self.all[older]
        is_told = late.given_up_at < newer.began and newer.acknowledged_at < self._clock()
        if is_told and self.is_trusted:
            lag = self._clock() - late.given_up_at
            self._broken(f"record {serial}, given up {lag:.1f} s before, replaces {older}, acknowledged meanwhile")

    def oldest_waiting(self, key: str) -> float | None:
        """Return when the oldest record of a timeline was stored that no callback has been given, if there is one."""
        waiting = (self.all[serial] for serial in self._by_key[key])
        return min((each.stored_at for each in waiting if not each.receipts and not each.excused), default=None)

    def newest(self, key: str) -> Record | None:
        """Return the record of a timeline that was stored last."""
        return self.all[self._by_key[key][-1]] if self._by_key[key] else None

    def add_returned(self, serial: int, answer: bool) -> None:
        record = self.all[serial]
        record.acknowledged_at = self._clock()
        if record.answer is None:
            self._broken(f"the add of record {serial} returned, and it is not stored")
        elif record.answer != answer:
            self._broken(f"the add of record {serial} returned {answer}; the store had answered {record.answer}")

    def add_failed(self, serial: int, error: Exception) -> None:
        record = self.all[serial]
        if isinstance(error, BackendUnavailable) and error.stored == "unknown":
            record.given_up_at = self._clock()
            return
        record.refused = True
        if record.answer is not None:
            self._broken(f"the add of record {serial} failed as not stored, and it is stored: {error}")

    def removed(self, key: str, record_id: str | None = None) -> None:
        for serial in self._by_key[key]:
            if record_id is None or self.all[serial].record_id == record_id:
                self.all[serial].excused = "removed"

    def removing_late(self, given_up: float, key: str, record_id: str | None = None) -> None:
        """See that a call that nobody waits for any more does not remove what was acknowledged after that."""
        for serial in self._by_key[key] if self.is_trusted else ():
            record = self.all[serial]
            is_meant = record_id in (None, record.record_id) and not (record.excused or record.receipts)
            if is_meant and given_up < record.began and record.acknowledged_at < self._clock():
                lag = self._clock() - given_up
                self._broken(f"a call given up {lag:.1f} s before removes record {serial}, acknowledged meanwhile")

    def replayed(self, letter: StoredDeadLetter) -> None:
        for serial in filter(None, serials_of(letter.entries)):
            record = self.all[serial]
            record.replayed = True
            if sum(self.all[each].record_id == record.record_id for each in self._by_key[record.key]) > 1:
                record.excused = "replayed before an older value of its id, which another letter had"

    def discarded(self, letter: StoredDeadLetter) -> None:
        for serial in filter(None, serials_of(letter.entries)):
            self.all[serial].excused = "discarded"

    def begun(self, process: Process, digest: Digest[int], now: float) -> Receipt:
        """Take a digest down, and see that it may come now, with these records, in this order."""
        serials = tuple(record.value for record in digest.records)
        receipt = Receipt(process, digest.key, digest.id, serials, now)
        if not serials:
            self._broken(f"digest {digest.id} of {digest.key!r} is empty")
        known = self.contents.setdefault(digest.id, serials)
        if known != serials:
            self._broken(f"digest {digest.id} held {known}, and now holds {serials}")
        known_ones = [(record, self.all[record.value]) for record in digest.records if record.value in self.all]
        order = [(record.timestamp, told.order) for record, told in known_ones if not told.replayed]
        if order != sorted(order):
            self._broken(f"the records of digest {digest.id} are not in order: {serials}")
        for serial in serials:
            self._received(serial, receipt)
        return receipt

    def _received(self, serial: int, receipt: Receipt) -> None:
        record, digest_id = self.all.get(serial), receipt.digest_id
        if record is None or record.answer is None or record.key != receipt.key:
            self._broken(f"digest {digest_id} of {receipt.key!r} holds {serial}, which was never added to it")
            return
        for earlier in record.receipts if not record.replayed else ():
            was_delivered = earlier.delivered(serial)
            if was_delivered and earlier.told:
                self._broken(f"record {serial} came again in {digest_id}, although its delivery was known")
            elif earlier.digest_id != digest_id and (was_delivered or earlier.ending in ("running", "cut")):
                where = f"digest {earlier.digest_id}, of unknown outcome, and again in {digest_id}"
                self._broken(f"record {serial} came in {where}")
        record.receipts.append(receipt)

    def unaccounted(self, letters: Iterable[StoredDeadLetter]) -> list[int]:
        """Records that were stored, and were neither delivered nor taken away by anybody."""
        in_letters = {serial for letter in letters for serial in serials_of(letter.entries)}
        return [
            serial
            for serial, record in self.all.items()
            if record.answer is not None
            and not record.excused
            and serial not in in_letters
            and not any(receipt.delivered(serial) for receipt in record.receipts)
        ]
