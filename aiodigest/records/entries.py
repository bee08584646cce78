"""A record as the bytes of a log entry, which ``lua/shared/entries.lua`` reads too.

An entry is a byte of version and flags (``ARRIVAL``, ``TRACED``), the time, the identity of the record, a trace context
if a flag says so, and the encoded value. The time takes 6 bytes of milliseconds, which the server fills in, or 8 of
microseconds, which the caller gave. The latest entry of an identity wins.

An identity is the id with its length, as it is stored: a byte from 1 to 127 and as many of UTF-8; 0, two bytes of
length and a longer text; or ``PACKED`` + n and n bytes, for an id of 2 n lowercase hexadecimal digits. Each id has just
one.
"""

from __future__ import annotations

import os
import struct
from binascii import unhexlify
from collections.abc import Callable, Iterable, Sequence
from random import Random
from time import time_ns
from typing import NamedTuple

from aiodigest.errors import CodecError

VERSION = 2
ARRIVAL = 0x10  # the time is that of arrival
TRACED = 0x20  # a trace context follows the identity
VERSION_BITS = 0xFF ^ ARRIVAL ^ TRACED  # a flag that is not known may change what follows
CONTEXT_SIZE = 25  # 16 bytes of the trace's id, 8 of the span's, and 1 of flags: W3C Trace Context, version 00
ARRIVING = VERSION | ARRIVAL  # the first byte of most entries
ARRIVAL_END, EXACT_END = 7, 9  # where the identity begins
PACKED = 0x80
LONGEST_SHORT = 0x7F  # bytes of an id whose length takes one
LONGEST_IDENTITY = 3 + 0xFFFF
DIGITS = b"0123456789abcdef"
MADE_UP = 20  # digits of an id that is made up

_HEAD, _TRACED_HEAD = (bytes([ARRIVING | traced]) + bytes(6) for traced in (0, TRACED))
_SIZES = [bytes([size]) for size in range(256)]
_MADE_UP_BITS, _MADE_UP_SIZE = 4 * MADE_UP, MADE_UP // 2
_NEW_HEAD = _HEAD + _SIZES[PACKED + _MADE_UP_SIZE]
_pack_exact = struct.Struct(">Bq").pack  # looked up once, and not for each record
_pack_arrival = struct.Struct(">HI").pack
unpack_arrival = struct.Struct(">BHIB").unpack_from
_unpack_exact = struct.Struct(">xq").unpack_from
# of a named tuple, without the call of a lambda that takes a fifth of the time
_new: Callable[..., RawRecord] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_random = Random()
_random_bits = _random.getrandbits
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_random.seed)  # or both processes would make up the same


class RawRecord(NamedTuple):
    """An entry taken apart; ``value`` is still encoded."""

    timestamp_us: int
    identity: bytes
    value: bytes
    context: bytes = b""

    @property
    def id(self) -> str:
        """The id; raises UnicodeDecodeError if another program wrote it."""
        return id_of(self.identity)


def pack_new(value: bytes) -> bytes:
    """Pack a record as ``pack(None, None, value)`` does, in one call: most are such.

    Its id is random, and by the time different in the copies of a frozen process. To ask the system for random bytes
    each time takes four times as long.
    """
    return _NEW_HEAD + (_random_bits(_MADE_UP_BITS) ^ time_ns()).to_bytes(_MADE_UP_SIZE, "big") + value


def made_up() -> bytes:
    """Return the identity of a new id."""
    return pack_new(b"")[ARRIVAL_END:]


def identity_of(record_id: bytes) -> bytes:
    """Return the identity of an id."""
    size = len(record_id)
    if not size & 1 and 0 < size <= 2 * LONGEST_SHORT and not record_id.strip(DIGITS):
        return _SIZES[PACKED + size // 2] + unhexlify(record_id)
    return (_SIZES[size] if 0 < size <= LONGEST_SHORT else b"\0" + size.to_bytes(2, "big")) + record_id


def id_of(identity: bytes, errors: str = "strict") -> str:
    """Return the id that an identity stands for."""
    size = identity[0]
    return identity[1:].hex() if size >= PACKED else identity[1 if size else 3 :].decode("utf-8", errors)


def pack(record_id: bytes | None, timestamp_us: int | None, value: bytes, context: bytes = b"") -> bytes:
    """Pack a record as an entry. Without an id it gets one that is made up, and without a timestamp the server's at
    arrival."""
    identity = made_up() if record_id is None else identity_of(record_id)
    if timestamp_us is None:
        return (_TRACED_HEAD if context else _HEAD) + identity + context + value
    return _pack_exact(VERSION | TRACED if context else VERSION, timestamp_us) + identity + context + value


def stamp(entry: bytes, now_ms: int) -> bytes:
    """Return the entry with its time of arrival filled in, if it has no timestamp."""
    if not entry[0] & ARRIVAL:
        return entry
    return entry[:1] + _pack_arrival(now_ms >> 32, now_ms & 0xFFFFFFFF) + entry[ARRIVAL_END:]


def places(entry: bytes) -> tuple[int, int, int] | None:
    """Return where the identity, the trace context and the value begin; None if the entry cannot be read."""
    try:
        flags = entry[0]
        start = ARRIVAL_END if flags & ARRIVAL else EXACT_END
        size = entry[start]
        end = start + 1 + (size & LONGEST_SHORT) if size else start + 3 + (entry[start + 1] << 8 | entry[start + 2])
    except IndexError:
        return None
    value = end + CONTEXT_SIZE if flags & TRACED else end
    return (start, end, value) if flags & VERSION_BITS == VERSION and len(entry) >= value else None


def unpack(entry: bytes) -> RawRecord:
    """Take an entry apart. Raises ``CodecError`` if another version of aiodigest, or another program, wrote it."""
    if len(entry) > ARRIVAL_END:  # most are like this, and it takes half the time
        flags, high, low, size = unpack_arrival(entry)
        end = ARRIVAL_END + 1 + (size & LONGEST_SHORT)
        if flags == ARRIVING and size and len(entry) >= end:
            return _new(RawRecord, ((high << 32 | low) * 1000, entry[ARRIVAL_END:end], entry[end:], b""))
    found = places(entry)
    if found is None:
        raise CodecError(f"a log entry of {len(entry)} bytes is not of version {VERSION}")
    start, end, value = found
    high, low = unpack_arrival(entry)[1:3]
    time = (high << 32 | low) * 1000 if start == ARRIVAL_END else _unpack_exact(entry)[0]
    return RawRecord(time, entry[start:end], entry[value:], entry[end:value])


def value_in(entry: bytes) -> bytes:
    """Return the encoded value of an entry, if that can be read."""
    found = places(entry)
    return entry if found is None else entry[found[2] :]


def identity(entry: bytes) -> bytes:
    """Return the identity of an entry's record; an unreadable entry is its own, so that none hides another."""
    found = places(entry)
    return entry if found is None else entry[found[0] : found[1]]


def unpack_latest(entries: Iterable[bytes], last: dict[bytes, tuple[int, bytes, bytes, bytes] | None]) -> None:
    """Keep the last entry of each record in ``last``, by identity, in order of arrival: with what a ``RawRecord`` has,
    or None if it is unreadable, and so its own identity."""
    for entry in entries:
        raw = None
        try:
            flags, high, low, size = unpack_arrival(entry)
            end = ARRIVAL_END + 1 + (size & LONGEST_SHORT)
            if flags == ARRIVING and size and len(entry) >= end:  # as in `unpack`, without a call and a named tuple
                raw = (high << 32 | low) * 1000, entry[ARRIVAL_END:end], entry[end:], b""
            else:
                raw = unpack(entry)
        except (struct.error, CodecError):
            pass
        name = entry if raw is None else raw[1]
        last.pop(name, None)  # so that it comes after what came before it
        last[name] = raw


def latest(entries: Sequence[bytes]) -> list[bytes]:
    """Return the last entry of each record, in order of arrival."""
    last: dict[bytes, bytes] = {}
    for entry in entries:
        name = identity(entry)
        last.pop(name, None)  # so that it comes after what came before it
        last[name] = entry
    return list(last.values())


def aged(entry: bytes, cut_ms: int) -> bool:
    """True if the record is older than the cut-off; 0 is none."""
    try:
        return cut_ms > 0 and unpack(entry).timestamp_us < cut_ms * 1000
    except CodecError:
        return False


def distinct(entries: Iterable[bytes]) -> int:
    """Count the records that the entries hold."""
    return len({identity(entry) for entry in entries})
