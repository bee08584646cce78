"""The contents of a digest: its records, and the entries that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import Generic, TypeVar

from aiodigest.codecs import PLAIN
from aiodigest.models import Record
from aiodigest.records.entries import (
    ARRIVAL_END,
    ARRIVING,
    LONGEST_SHORT,
    PACKED,
    id_of,
    unpack,
    unpack_arrival,
    unpack_latest,
)
from aiodigest.records.validation import EPOCH, EXACT, FIRST_MS, moment
from aiodigest.worker.reasons import describe

T = TypeVar("T")

TURN = 0.002  # seconds of decoding in one go
MANY = 500  # entries that are taken apart in one go
SMALL = 32, 32_768  # entries and bytes of a digest that is read beside others: larger ones are read one at a time


@dataclass(slots=True)
class Contents(Generic[T]):
    """The contents of entries.

    ``records`` are in order. ``raw`` are the undecodable records, ``undecodable`` their ids with the reasons;
    ``aged`` counts those too old, and ``replaced`` those left out for a value that comes in a later part. ``contexts``
    are those of the spans that added the records, if they were traced.
    """

    # `list[...]` as a factory takes five times as long, for each digest
    records: list[Record[T]] = field(default_factory=list)
    raw: list[Record[bytes]] = field(default_factory=list)
    undecodable: dict[bytes, str] = field(default_factory=dict)
    aged: int = 0
    replaced: int = 0
    contexts: list[bytes] = field(default_factory=list)


def read_at_once(entries: Sequence[bytes], load: Callable[[bytes], T]) -> Contents[T] | None:
    """Return what ``read`` does of a small digest in which nothing is unusual: each record once, with the time of its
    arrival, a short id, and a value in JSON as it is, which ``load`` decodes. None of any other."""
    ids: list[str] = []  # which `list[str]()` would make in five times as long
    times: list[int] = []
    values: list[bytes] = []
    fromtimestamp = datetime.fromtimestamp
    try:
        for entry in entries:
            flags, high, low, size = unpack_arrival(entry)
            end = ARRIVAL_END + 1 + (size & LONGEST_SHORT)
            if flags != ARRIVING or not size or entry[end] != PLAIN:
                return None
            name = entry[ARRIVAL_END + 1 : end]
            ids.append(name.hex() if size >= PACKED else name.decode())
            times.append(high << 32 | low)
            values.append(entry[end + 1 :])
        if len({*ids}) < len(ids) or max(times) * 1000 >= EXACT:
            return None
        moments = [fromtimestamp(time / 1000, UTC) for time in times]
        records = list(map(Record, ids, map(load, values), moments))
    except Exception:  # it is read again, one by one, to tell what is wrong with which
        return None
    if times != sorted(times):
        records.sort(key=attrgetter("timestamp"))
    return Contents(records)


async def read(
    entries: Sequence[bytes], decode: Callable[[bytes], T], cut_ms: int = 0, later: Iterable[bytes] = ()
) -> Contents[T]:
    """Return the records of some entries by timestamp, then arrival; the last entry of an id wins, of which there may
    be one ``later``.

    Large input is decoded a slice at a time, so that the event loop can do other things in between.
    """
    contents: Contents[T] = Contents()
    cut, clock = cut_ms * 1000, asyncio.get_running_loop().time
    records, until, newest, in_order = contents.records, clock() + TURN, FIRST_MS * 1000, True
    last: dict[bytes, tuple[int, bytes, bytes, bytes] | None] = {}
    fromtimestamp = datetime.fromtimestamp
    for start in range(0, len(entries), MANY):
        unpack_latest(entries[start : start + MANY], last)
        if len(entries) > MANY:
            await asyncio.sleep(0)
    found = len(last)
    for name in later:
        last.pop(name, None)
    contents.replaced = found - len(last)
    for name, raw in last.items():
        if clock() > until:
            await asyncio.sleep(0)
            until = clock() + TURN
        timestamp = EPOCH
        try:
            if raw is None:
                raw = unpack(name)  # which says what is wrong with it
            micros, _, value, context = raw
            if cut and micros < cut:
                contents.aged += 1
                continue
            # as `moment` and `id_of` do for most: their calls would take a tenth of all this
            timestamp = fromtimestamp(micros / 1_000_000, UTC) if 0 <= micros < EXACT else moment(micros)
            record_id = name[1:].hex() if name[0] >= PACKED else id_of(name)
            records.append(Record(record_id, decode(value), timestamp))
            in_order, newest = in_order and micros >= newest, micros
            if context:
                contents.contexts.append(context)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a codec may raise anything; a panic of Rust code is no Exception
            contents.undecodable[name] = describe(error)
            unread = ("?", name) if raw is None else (id_of(name, "replace"), raw[2])
            contents.raw.append(Record(*unread, timestamp))
    if not in_order:  # which most are
        records.sort(key=attrgetter("timestamp"))
    return contents
