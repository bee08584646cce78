"""What became of each record: added, stored, delivered, replaced, removed or set aside; and who may be told what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from aiodigest import AiodigestError, BackendUnavailable, Digest
from aiodigest.backend import Add, StoredDeadLetter
from aiodigest.records.entries import unpack
from simulation.loop import Process

Ending = Literal["running", "returned", "raised", "partial", "cut"]


@dataclass(eq=False)
class Receipt:
    """A digest that a callback was given, and how the callback ended."""

    process: Process
    key: str
    digest_id: str
    attempt: int
    serials: tuple[int, ...]
    began: float
    ending: Ending = "running"
    ended: float = 0.0
    failed: frozenset[int] = frozenset()  # those that a PartialFailure named
    told: bool = False  # the store was known to know that it was delivered
    tells: bool = True  # something of its receiver
    stubborn: bool = False  # its callback ignores its cancellation


@dataclass
class Record:
    """A record that somebody wanted to add. Its serial is its value, so each add is of a record of its own."""

    key: str
    record_id: str
    answer: bool | None = None  # of the store; None: not stored
    order: int = 0  # of arrival
    returned: bool = False
    refused: bool = False  # its caller was told that it was not stored
    cancelled: bool = False
    excused: str = ""  # why it may be gone
    replayed: bool = False
    receipts: list[Receipt] = field(default_factory=list[Receipt])


def serial_of(entry: bytes) -> int | None:
    """The serial of the record that an entry holds; None if somebody else wrote it."""
    value = unpack(entry).value
    return int(value[1:]) if value[:1] == b"\x01" else None


class Records:
    """The book of all records."""

    def __init__(self, broken: Callable[[str], None]) -> None:
        self.all: dict[int, Record] = {}
        self.contents: dict[str, tuple[int, ...]] = {}
        self._broken = broken
        self._arrivals = 0
        self._latest: dict[tuple[str, str], int] = {}
        self._by_key = defaultdict[str, list[int]](list)

    # Adding

    def new(self, key: str, record_id: str) -> int:
        serial = len(self.all) + 1
        self.all[serial] = Record(key, record_id)
        return serial

    def adding(self, adds: Sequence[Add]) -> None:
        for add in adds:
            serial = serial_of(add.entry)
            if serial is not None and self.all[serial].cancelled:
                self._broken(f"record {serial} was cancelled before it was sent, and is sent all the same")

    def added(self, adds: Sequence[Add], answers: Sequence[bool | AiodigestError]) -> None:
        for add, answer in zip(adds, answers, strict=True):
            serial = serial_of(add.entry)
            if serial is None or isinstance(answer, AiodigestError):
                continue
            record = self.all[serial]
            self._arrivals += 1
            record.answer, record.order = answer, self._arrivals
            if record.refused:
                self._broken(f"record {serial} is stored, and its caller was told that it was not")
            older = self._latest.get((record.key, record.record_id))
            if older is not None:
                self.all[older].excused = f"replaced by {serial}"
            self._latest[record.key, record.record_id] = serial
            self._by_key[record.key].append(serial)

    def add_returned(self, serial: int, answer: bool) -> None:
        record = self.all[serial]
        record.returned = True
        if record.answer is None:
            self._broken(f"the add of record {serial} returned, and it is not stored")
        elif record.answer != answer:
            self._broken(f"the add of record {serial} returned {answer}; the store had answered {record.answer}")

    def add_failed(self, serial: int, error: Exception) -> None:
        record = self.all[serial]
        if isinstance(error, BackendUnavailable) and error.stored == "unknown":
            return
        record.refused = True
        if record.answer is not None:
            self._broken(f"the add of record {serial} failed as not stored, and it is stored: {error}")

    def add_cancelled(self, serial: int) -> None:
        self.all[serial].cancelled = True

    # What users take away, and put back

    def removed(self, key: str, record_id: str | None = None) -> None:
        for serial in self._by_key[key]:
            if record_id is None or self.all[serial].record_id == record_id:
                self.all[serial].excused = "removed"

    def buried(self, letter: StoredDeadLetter) -> list[int]:
        serials = (serial_of(entry) for entry in letter.entries)
        return [serial for serial in serials if serial is not None]

    def replayed(self, letter: StoredDeadLetter | None) -> None:
        for serial in self.buried(letter) if letter else ():
            record = self.all[serial]
            record.replayed = True
            if sum(self.all[each].record_id == record.record_id for each in self._by_key[record.key]) > 1:
                record.excused = "replayed before an older value of its id, which another letter had"

    def discarded(self, letter: StoredDeadLetter | None) -> None:
        for serial in self.buried(letter) if letter else ():
            self.all[serial].excused = "discarded"

    # Delivering

    def begun(self, process: Process, digest: Digest[int], now: float) -> Receipt:
        """Take a digest down, and see that it may come now, with these records, in this order."""
        serials = tuple(record.value for record in digest.records)
        receipt = Receipt(process, digest.key, digest.id, digest.attempt, serials, now)
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
        record = self.all.get(serial)
        if record is None or record.answer is None or record.key != receipt.key:
            self._broken(f"digest {receipt.digest_id} of {receipt.key!r} holds {serial}, which was never added to it")
            return
        for earlier in record.receipts if not record.replayed else ():
            spared = earlier.ending == "partial" and serial not in earlier.failed
            if earlier.told and (earlier.ending == "returned" or spared):
                self._broken(f"record {serial} came again in {receipt.digest_id}, although its delivery was known")
            elif earlier.digest_id != receipt.digest_id and earlier.ending != "raised":
                if earlier.ending == "partial" and serial in earlier.failed:
                    continue
                self._broken(
                    f"record {serial} came in digest {earlier.digest_id}, of unknown outcome, and again in "
                    f"{receipt.digest_id}"
                )
        record.receipts.append(receipt)

    # At the end

    def unaccounted(self, letters: Iterable[StoredDeadLetter]) -> list[int]:
        """Records that were stored, and were neither delivered nor taken away by anybody."""
        in_letters = {serial for letter in letters for serial in self.buried(letter)}
        return [
            serial
            for serial, record in self.all.items()
            if record.answer is not None
            and not record.excused
            and serial not in in_letters
            and not any(
                receipt.ending == "returned" or (receipt.ending == "partial" and serial not in receipt.failed)
                for receipt in record.receipts
            )
        ]
