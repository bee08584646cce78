"""What callers give, checked before anything is stored, in the form that the store takes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from math import inf

from aiodigest.backoff import seconds
from aiodigest.errors import InvalidArgument, LimitExceeded
from aiodigest.wire import pack

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAME_BYTES = 1024
VALUE_BYTES = 1_048_576
FAR = 10**12  # seconds: beyond every year that there is


def name(value: str, what: str) -> bytes:
    """A key or id as bytes: any string of 1 to 1024 bytes of UTF-8."""
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers may not be typed)
        raise InvalidArgument(f"{what} must be a str, not {value!r}")
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} must be text that UTF-8 can hold, not {value[:50]!r}") from None
    if not 1 <= len(encoded) <= NAME_BYTES:
        raise InvalidArgument(f"{what} must take 1 to {NAME_BYTES} bytes of UTF-8, not {len(encoded)}")
    return encoded


def microseconds(timestamp: datetime | float, what: str = "timestamp") -> int:
    """An aware datetime or epoch seconds as microseconds of the epoch."""
    if isinstance(timestamp, datetime):
        if timestamp.utcoffset() is None:
            raise InvalidArgument(f"{what} must be an aware datetime (with a time zone), not {timestamp!r}")
        micros = (timestamp - EPOCH) // timedelta(microseconds=1)
    elif isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)) or not -inf < timestamp < inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{what} must be an aware datetime or finite epoch seconds, not {timestamp!r}")
    else:
        micros = round(max(-FAR, min(timestamp, FAR)) * 1_000_000)
    try:
        moment(micros, what)
    except InvalidArgument:
        hint = " (in milliseconds? divide by 1000)" if isinstance(timestamp, (int, float)) and timestamp > 1e11 else ""
        raise InvalidArgument(f"{what} must be in the years 1 to 9999 of UTC, not {timestamp!r}{hint}") from None
    return micros


def moment(micros: int, what: str = "timestamp") -> datetime:
    """Microseconds of the epoch as an aware datetime."""
    try:
        return EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        after = micros // 1_000_000
        raise InvalidArgument(f"{what} must be in the years 1 to 9999 of UTC, not {after} s after 1970") from None


def pack_entry(record_id: bytes, timestamp: datetime | float | None, value: bytes) -> bytes:
    """A record as a log entry."""
    if len(value) > VALUE_BYTES:
        raise LimitExceeded(f"a value may take at most {VALUE_BYTES:,} bytes when encoded, not {len(value):,}")
    return pack(record_id, None if timestamp is None else microseconds(timestamp), value)


def require(fits: bool, what: str, allowed: str, given: object) -> None:
    """Refuse an argument of a type that callers who check theirs cannot give."""
    if not fits:
        raise InvalidArgument(f"{what} must be {allowed}, not {given!r}")


def whole(value: int, what: str, least: int) -> int:
    """A whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{what} must be a whole number of at least {least}, not {value!r}")
    return value


def duration(value: float | timedelta, what: str, least: float = 0.0) -> float:
    """A duration in seconds, of at least ``least``."""
    number = seconds(value, what)
    if number < least:
        raise InvalidArgument(f"{what} must be at least {least:g} s, not {value!r}")
    return number
