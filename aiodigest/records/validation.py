"""Arguments and functions from callers, checked before anything is stored, in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from dis import get_instructions
from functools import partial
from inspect import isasyncgen, isasyncgenfunction, iscoroutine, iscoroutinefunction, isgenerator, isgeneratorfunction
from itertools import islice
from math import inf
from types import FunctionType
from typing import TypeVar

from aiodigest.arguments import require, whole
from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded, shown
from aiodigest.records.entries import MADE_UP

Item = TypeVar("Item")

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999  # the years 1 to 9999
FAR = 10**12  # seconds: beyond every year that there is
EXACT = 2**32 * 1_000_000  # microseconds below which a float of seconds is right to a quarter of one
NOT_AWAITABLE = ("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_", "IS_OP", "CONTAINS_OP", "UNARY_NOT")  # what these put out


@dataclass(frozen=True)
class Bounds:
    """Limits on the size of arguments; anything larger is refused, and nothing of it is stored.

    ``value`` (at most 64 MiB) bounds the bytes of an encoded value. ``JSONCodec`` has a limit of its own, on the JSON
    before compression and after decompression: the engine's own codec takes as much as this, and never less than 1 MiB.
    ``name`` (from 20 to 65,535) bounds the bytes of UTF-8 of a key or a record id, and ``records`` (at most 10,000,000)
    the entries of one ``add_many``.

    ``digest`` (at most 1 GiB, and never below ``value``, which it is raised to: for less, give both) bounds the bytes
    of JSON, before compression, in the values of a digest: more come in parts, and a single value of more is refused.
    As objects they may take thirty times as much memory, and a worker decodes up to sixteen such digests at once (of
    those of 256 KiB or less, as many as its ``concurrency``). A codec of your own can tell the bytes by a method
    ``decoded_size``. ``dead_letters`` (at most 1 TiB) bounds the bytes of a shard's dead letters: over it the oldest
    are let go.

    Raises InvalidArgument if one is not a whole number in its range.
    """

    value: int = 1_048_576
    name: int = 1024
    records: int = 100_000
    digest: int = 8_388_608
    dead_letters: int = 268_435_456

    def __post_init__(self) -> None:
        whole(self.value, "bounds.value", 1, 67_108_864)  # more would keep a server busy for everybody else
        whole(self.name, "bounds.name", MADE_UP, 65_535)  # a log entry has two bytes for the length of its id
        whole(self.records, "bounds.records", 1, 10_000_000)
        whole(self.digest, "bounds.digest", 1, 2**30)
        object.__setattr__(self, "digest", max(self.digest, self.value))
        whole(self.dead_letters, "bounds.dead_letters", 1, 2**40)


DEFAULT = Bounds()


def plain(text: str) -> str:
    """Return a text as a plain ``str``: of a class of its own it may be equal to others, or not to itself."""
    return text if type(text) is str else str.__str__(text)


def name(value: str, what: str, most: int = DEFAULT.name) -> bytes:
    """Return a key or id as bytes: any string of 1 to ``most`` bytes of UTF-8."""
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        require(False, what, "a str", value)
    if value.isascii() and 1 <= len(value) <= most:  # as nearly all are
        return value.encode()
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} must be text that UTF-8 can hold, not {value[:50]!r}") from None
    if not 1 <= len(encoded) <= most:
        raise InvalidArgument(f"{what} must take 1 to {most} bytes of UTF-8, not {len(encoded)}")
    return encoded


def microseconds(timestamp: datetime | float, what: str = "timestamp") -> int:
    """Convert an aware datetime or epoch seconds to microseconds since the epoch."""
    if isinstance(timestamp, datetime):
        offset = None
        with suppress(Exception):  # a time zone of the user's, which may not know one
            offset = timestamp.utcoffset()
        require(offset is not None, what, "an aware datetime (with a time zone)", timestamp)
        micros = (timestamp - EPOCH) // timedelta(microseconds=1)
    elif isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)) or not -inf < timestamp < inf:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{what} must be an aware datetime or finite epoch seconds, not {shown(timestamp)}")
    else:
        micros = round(max(-FAR, min(timestamp, FAR)) * 1_000_000)
    if not FIRST_MS <= micros // 1000 <= LAST_MS:
        hint = " (in milliseconds? divide by 1000)" if isinstance(timestamp, (int, float)) and timestamp > 1e11 else ""
        raise InvalidArgument(f"{what} must be in the years 1 to 9999 of UTC, not {shown(timestamp)}{hint}")
    return micros


def moment(micros: int, what: str = "timestamp") -> datetime:
    """Convert microseconds since the epoch to an aware datetime."""
    if 0 <= micros < EXACT:  # in half the time
        return datetime.fromtimestamp(micros / 1_000_000, UTC)
    try:
        return EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        after = micros // 1_000_000
        raise InvalidArgument(f"{what} must be in the years 1 to 9999 of UTC, not {after} s after 1970") from None


def nearest(ms: int) -> datetime:
    """Convert a time from the store; one beyond the calendar, which another program wrote, becomes the nearest."""
    return moment(max(FIRST_MS, min(ms, LAST_MS)) * 1000)


def check_encoded(value: bytes, most: int = DEFAULT.value) -> None:
    """Refuse an encoded value that is none, or takes more than ``most`` bytes."""
    if not isinstance(value, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]  (a codec may be the user's)
        raise CodecError(f"a codec must encode values as bytes, not as {type(value).__name__}")
    if len(value) > most:
        raise LimitExceeded(f"a value may take at most {most:,} bytes when encoded, not {len(value):,}")


def taken(entries: Iterable[Item], most: int) -> list[Item]:
    """Return the entries of an ``add_many``, of which no more than one over the limit is taken."""
    try:
        source = iter(entries)
    except TypeError:
        raise InvalidArgument(f"add_many takes entries one after another, not {shown(entries)}") from None
    given = list(islice(source, most + 1))
    if len(given) > most:
        raise LimitExceeded(f"one add_many may have at most {most:,} entries: this one has more")
    return given


# Functions that users register: some never run, even when called.


def can_call_back(function: object) -> bool:
    """True if it may be a callback. Calling a function with a ``yield`` in it does nothing; a plain one is a callback
    only if what it returns may be awaited."""
    return (
        callable(function) and not _is(function, isgeneratorfunction, isasyncgenfunction) and _may_be_awaited(function)
    )


def can_observe(function: object) -> bool:
    """True if it may be an observer, which nobody awaits."""
    return callable(function) and not _is(function, iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)


def never_ran(answer: object) -> bool:
    """True if a callback returned work instead of doing it, such as a coroutine that nobody awaits."""
    kinds = (iscoroutine, isgenerator, isasyncgen, iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)
    return any(is_kind(answer) for is_kind in kinds)


def _may_be_awaited(function: Callable[..., object]) -> bool:
    """True unless it is plain from a function's code or annotation that what it returns is not awaitable."""
    while isinstance(function, partial):
        function = function.func
    if isinstance(function, type):
        return hasattr(function, "__await__")
    called: object = getattr(function, "__func__", function)
    called = called if isinstance(called, FunctionType) else type(function).__call__
    if not isinstance(called, FunctionType) or _is(function, iscoroutinefunction):
        return True
    with suppress(Exception):  # an annotation may name what is nowhere
        if called.__annotations__.get("return", ...) in (None, "None") and not hasattr(called, "__wrapped__"):
            return False
    before = ""
    for step in get_instructions(called):
        # a jump may come with another value
        if step.opname == "RETURN_VALUE" and (step.is_jump_target or not before.startswith(NOT_AWAITABLE)):
            return True
        before = step.opname
    return False


def _is(function: Callable[..., object], *kinds: Callable[[object], bool]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return any(is_kind(function) or is_kind(type(function).__call__) for is_kind in kinds)
