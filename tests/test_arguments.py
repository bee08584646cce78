from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone, tzinfo
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodigest.arguments import TEN_YEARS, duration, whole
from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded
from aiodigest.records.entries import ARRIVAL, CONTEXT_SIZE, pack, stamp, unpack
from aiodigest.records.validation import (
    DEFAULT,
    EPOCH,
    EXACT,
    Bounds,
    check_encoded,
    microseconds,
    moment,
    name,
    nearest,
)

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=400)


class Zone(tzinfo):
    """A time zone that fails, or does not know its offset, which makes a datetime naive to Python."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        if self._fails:
            raise RuntimeError("no time")


@given(text, st.integers(32, 400) | st.just(1024))
def test_any_text_up_to_the_bound_is_a_name_and_any_longer_one_is_not(value: str, bound: int) -> None:
    if len(value.encode()) <= bound:
        assert name(value, "key", bound).decode() == value
    else:
        with pytest.raises(InvalidArgument, match=f"1 to {bound} bytes of UTF-8, not {len(value.encode())}"):
            name(value, "key", bound)


@pytest.mark.parametrize("value", ["", "x" * 1025, "\N{SNOWMAN}" * 342, "\ud800", "a\udfff", None, 5, b"key"])
def test_what_is_no_name_is_refused_and_the_message_names_it(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="record_id must"):
        name(value, "record_id")


@given(st.datetimes(timezones=st.timezones()))
def test_an_aware_datetime_keeps_its_instant(value: datetime) -> None:
    try:
        instant = value.astimezone(UTC)
    except OverflowError:
        with pytest.raises(InvalidArgument, match="years 1 to 9999"):
            microseconds(value)
    else:
        assert moment(microseconds(value)) == instant


@given(st.integers(0, 2 * EXACT))
def test_an_instant_of_the_last_and_the_next_century_is_right_to_the_microsecond(micros: int) -> None:
    assert moment(micros) == EPOCH + timedelta(microseconds=micros)


@given(st.one_of(st.floats(), st.integers()))
def test_a_number_is_an_instant_in_the_years_1_to_9999_or_refused(value: float) -> None:
    try:
        micros = microseconds(value)
    except InvalidArgument:
        assert not -62_135_596_800 < value < 253_402_300_800
    else:
        assert moment(micros) - EPOCH == pytest.approx(timedelta(seconds=value), abs=timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *((value, "timestamp must be") for value in (nan, inf, -inf, True, False, "2026-01-01", None)),
        *((value, "timestamp must be") for value in (1e18, -1e18, 1e308, 10**400, -(10**400))),
        (1_700_000_000_000, r"1700000000000 \(in milliseconds\? divide by 1000\)"),
        (datetime(2026, 1, 1), "aware datetime"),
        *((datetime(2026, 1, 1, tzinfo=zone), "aware") for zone in (Zone(fails=False), Zone(fails=True))),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), "years 1 to 9999"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "years 1 to 9999"),
    ],
)
def test_what_is_no_instant_is_refused_and_the_message_says_what_is(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        microseconds(value)


@pytest.mark.parametrize(
    ("bound", "message"), [((), "1,048,576 bytes"), ((40,), "at most 40 bytes when encoded, not 41")]
)
def test_a_value_may_take_one_mebibyte_or_its_bound_in_bytes_and_no_more(bound: Any, message: str) -> None:
    largest = b"x" * (bound[0] if bound else DEFAULT.value)
    check_encoded(largest, *bound)
    with pytest.raises(LimitExceeded, match=message):
        check_encoded(largest + b"x", *bound)
    no_bytes: Any = "text"
    with pytest.raises(CodecError, match="as bytes, not as str"):
        check_encoded(no_bytes)


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("value", 1, 67_108_864),
        ("name", 20, 65_535),
        ("records", 1, 10_000_000),
        ("digest", 1, 2**30),
        ("dead_letters", 1, 2**40),
    ],
)
def test_bounds_that_are_none_are_refused_with_what_is_allowed(field: str, least: int, most: int) -> None:
    for value in (least, most):
        given = {"value": 1} if field == "digest" else {}
        assert getattr(Bounds(**given, **{field: value}), field) == value
    wrong: list[Any] = [least - 1, most + 1, 1e6, True, None]
    for value in wrong:
        allowed = rf"bounds\.{field} must be a whole number from {least:,} to {most:,}, not {value!r}"
        with pytest.raises(InvalidArgument, match=allowed):
            Bounds(**{field: value})


def test_a_digest_may_always_hold_a_value_as_large_as_they_may_be() -> None:
    assert Bounds(value=67_108_864).digest == 67_108_864
    assert Bounds(value=2, digest=1).digest == 2
    assert Bounds().digest == 8 * 2**20


@given(st.binary(min_size=1, max_size=9), st.none() | st.integers(0, 2**50), st.binary(), st.integers(0, 2**50))
def test_a_record_may_take_a_trace_context_along(record: bytes, timestamp: int | None, value: bytes, now: int) -> None:
    assert bool(pack(record, timestamp, value)[0] & ARRIVAL) == (timestamp is None)
    context = bytes(range(CONTEXT_SIZE))
    with_context, without = (stamp(pack(record, timestamp, value, each), now // 1000) for each in (context, b""))
    assert unpack(with_context) == unpack(without)._replace(context=context)
    assert unpack(without).context == b""
    for unreadable in (pack(record, timestamp, b"", context)[:-1], b"\x41" + with_context[1:], b"\x81" + without[1:]):
        with pytest.raises(CodecError):
            unpack(unreadable)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None, nan])
def test_what_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="concurrency must be a whole number of at least 1"):
        whole(value, "concurrency", 1)


@pytest.mark.parametrize(
    ("given_value", "expected"),
    [(0, 0.0), (30, 30.0), (0.25, 0.25), (timedelta(minutes=5), 300.0), (TEN_YEARS, float(TEN_YEARS))],
)
def test_a_duration_is_seconds_or_a_timedelta(given_value: float | timedelta, expected: float) -> None:
    assert repr(duration(given_value, "delay")) == repr(expected)


@pytest.mark.parametrize(
    "value",
    [
        *("5m", "5", b"5", None, True, False, [1], 1j),
        *(nan, inf, -inf, -1, -0.001, TEN_YEARS + 1, 10**400),
        *(timedelta(seconds=-1), timedelta.max),
    ],
)
def test_what_is_no_duration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^delay must be at least 0 and at most 315360000 seconds") as caught:
        duration(value, "delay")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("least", "enough", "little", "message"),
    [
        ({"positive": True}, 0.001, timedelta(0), "delay must be more than 0"),
        ({"least": 0.1}, 0.1, 0.05, r"delay must be at least 0\.1 and at most"),
    ],
)
def test_a_duration_may_have_a_least(least: dict[str, Any], enough: float, little: Any, message: str) -> None:
    assert duration(enough, "delay", **least) == enough
    with pytest.raises(InvalidArgument, match=message):
        duration(little, "delay", **least)


class Silent:
    """What has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("value", [Silent(), [Silent()], 10**5000, "x" * 1_000_000, b"x" * 1_000_000], ids=type)
def test_a_message_is_short_whatever_it_quotes(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="delay must") as of_a_duration:
        duration(value, "delay")
    with pytest.raises(InvalidArgument, match="shards must") as of_a_number:
        whole(value, "shards", 1, 10)
    assert max(len(str(of_a_duration.value)), len(str(of_a_number.value))) < 1_000


def test_a_time_beyond_all_calendars_is_told_as_the_last_that_there_is() -> None:
    assert nearest(2**63).year == 9999
    assert nearest(-(2**63)).year == 1
    assert nearest(0) == EPOCH
