"""A record as the bytes of a log entry, which Lua reads with ``struct.unpack('>Bi8Hc0', entry)``.

An entry is a byte of version and flags (``UNSTAMPED``, ``TRACED``), the timestamp in microseconds, the length of
the id, the id, a trace context if a flag says so, and the encoded value. The latest entry of an id wins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aiodigest.errors import CodecError

VERSION = 1
UNSTAMPED = 0x10  # the server fills in the time of arrival
TRACED = 0x20  # a trace context follows the id
VERSION_BITS = 0xFF ^ UNSTAMPED ^ TRACED  # a flag that is not known may change what follows
CONTEXT_SIZE = 25  # 16 bytes of the trace's id, 8 of the span's, and 1 of flags: W3C Trace Context, version 00
HEADER = struct.Struct(">BqH")
HEADER_SIZE = HEADER.size
_unpack_header = HEADER.unpack_from  # looked up once, and not for each record


class RawRecord(NamedTuple):
    """An entry taken apart; ``value`` is still encoded."""

    timestamp_us: int
    id: bytes
    value: bytes
    context: bytes = b""


def pack(record_id: bytes, timestamp_us: int | None, value: bytes, context: bytes = b"") -> bytes:
    """Pack a record as an entry; without a timestamp it gets the server's at arrival."""
    flags = VERSION | (UNSTAMPED if timestamp_us is None else 0) | (TRACED if context else 0)
    return HEADER.pack(flags, timestamp_us or 0, len(record_id)) + record_id + context + value


def stamp(entry: bytes, now_ms: int) -> bytes:
    """Return the entry with its time of arrival filled in, if it has no timestamp."""
    flags, _, length = _unpack_header(entry)
    if not flags & UNSTAMPED:
        return entry
    return HEADER.pack(flags ^ UNSTAMPED, now_ms * 1000, length) + entry[HEADER_SIZE:]


def unpack(entry: bytes) -> RawRecord:
    """Take an entry apart. Raises ``CodecError`` if another version of aiodigest, or another program, wrote it."""
    if len(entry) >= HEADER_SIZE:
        flags, timestamp, length = _unpack_header(entry)
        end = HEADER_SIZE + length
        value = end + CONTEXT_SIZE if flags & TRACED else end
        if flags & VERSION_BITS == VERSION and len(entry) >= value:
            return RawRecord(timestamp, entry[HEADER_SIZE:end], entry[value:], entry[end:value])
    raise CodecError(f"a log entry of {len(entry)} bytes is not of version {VERSION}")


def value_in(entry: bytes) -> bytes:
    """Return the encoded value of an entry, if that can be read; takes a third of the time of ``unpack``."""
    if len(entry) < HEADER_SIZE:
        return entry
    flags, _, length = _unpack_header(entry)
    return entry[HEADER_SIZE + length + (CONTEXT_SIZE if flags & TRACED else 0) :]


def identity(entry: bytes) -> bytes:
    """Return the id of an entry; an unreadable entry is its own id, so that none hides another."""
    try:
        return unpack(entry).id
    except CodecError:
        return entry


def unpack_latest(entries: Iterable[bytes], last: dict[bytes, tuple[bytes, RawRecord | None]]) -> None:
    """Keep the last entry of each id in ``last``, by identity, in order of arrival; None if it cannot be unpacked."""
    for entry in entries:
        try:
            raw = unpack(entry)
        except CodecError:
            raw = None
        name = entry if raw is None else raw.id
        last.pop(name, None)  # so that it comes after what came before it
        last[name] = entry, raw


def latest(entries: Sequence[bytes]) -> list[bytes]:
    """Return the last entry of each id, in order of arrival."""
    last: dict[bytes, tuple[bytes, RawRecord | None]] = {}
    unpack_latest(entries, last)
    return [entry for entry, _ in last.values()]


def aged(entry: bytes, cut_ms: int) -> bool:
    """True if the record is older than the cut-off; 0 is none."""
    try:
        return cut_ms > 0 and unpack(entry).timestamp_us < cut_ms * 1000
    except CodecError:
        return False


def distinct(entries: Iterable[bytes]) -> int:
    """Count the records that the entries hold."""
    return len({identity(entry) for entry in entries})
