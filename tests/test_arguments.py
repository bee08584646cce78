from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded
from aiodigest.records.entries import CONTEXT_SIZE, UNSTAMPED, pack, stamp, unpack
from aiodigest.records.validation import (
    DEFAULT,
    EPOCH,
    TEN_YEARS,
    Bounds,
    duration,
    microseconds,
    moment,
    name,
    nearest,
    pack_entry,
    whole,
)

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=400)


class Nowhere(tzinfo):
    """A time zone that does not know its offset, which makes a datetime naive to Python."""

    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        return None


class Broken(tzinfo):
    def utcoffset(self, dt: datetime | None) -> timedelta | None:
        raise RuntimeError("no time")


@given(text)
def test_any_text_of_1_to_1024_bytes_is_a_name_and_any_longer_one_is_not(value: str) -> None:
    if len(value.encode()) <= 1024:
        assert name(value, "key").decode() == value
    else:
        with pytest.raises(InvalidArgument, match="1024 bytes"):
            name(value, "key")


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
        *((datetime(2026, 1, 1, tzinfo=zone), "aware") for zone in (Nowhere(), Broken())),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=14))), "years 1 to 9999"),
        (datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))), "years 1 to 9999"),
    ],
)
def test_what_is_no_instant_is_refused_and_the_message_says_what_is(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        microseconds(value)


def test_a_name_may_have_a_bound_of_its_own() -> None:
    assert name("x" * 40, "key", 40) == b"x" * 40
    with pytest.raises(InvalidArgument, match="1 to 40 bytes of UTF-8, not 41"):
        name("x" * 41, "key", 40)


@pytest.mark.parametrize(
    ("bound", "message"), [((), "1,048,576 bytes"), ((40,), "at most 40 bytes when encoded, not 41")]
)
def test_a_value_may_take_one_mebibyte_or_its_bound_and_no_more(bound: Any, message: str) -> None:
    largest = b"x" * (bound[0] if bound else DEFAULT.value)
    assert unpack(pack_entry(b"id", 5, largest, *bound)).value == largest
    with pytest.raises(LimitExceeded, match=message):
        pack_entry(b"id", 5, largest + b"x", *bound)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"value": 0}, r"bounds\.value must be a whole number from 1 to 67,108,864, not 0"),
        ({"value": 67_108_865}, r"from 1 to 67,108,864"),
        ({"value": 1e6}, r"not 1000000\.0"),
        ({"name": 31}, r"bounds\.name must be a whole number from 32 to 65,535, not 31"),
        ({"name": 65_536}, r"from 32 to 65,535"),
        ({"records": 0}, r"bounds\.records must be a whole number from 1 to 10,000,000, not 0"),
        ({"records": 10_000_001}, r"from 1 to 10,000,000"),
        ({"records": True}, r"not True"),
        ({"records": None}, r"not None"),
    ],
)
def test_bounds_that_are_none_are_refused_with_what_is_allowed(bounds: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Bounds(**bounds)


@pytest.mark.parametrize("bounds", [Bounds(1, 32, 1), Bounds(67_108_864, 65_535, 10_000_000)])
def test_the_least_and_the_largest_bounds_may_be_given(bounds: Bounds) -> None:
    assert replace(bounds) == bounds


def test_a_record_without_a_timestamp_is_stamped_on_arrival() -> None:
    assert pack_entry(b"id", None, b"value")[0] & UNSTAMPED
    assert not pack_entry(b"id", 0, b"value")[0] & UNSTAMPED


@given(st.binary(min_size=1, max_size=9), st.none() | st.integers(0, 2**50), st.binary(), st.integers(0, 2**50))
def test_a_record_may_take_a_trace_context_along(record: bytes, timestamp: int | None, value: bytes, now: int) -> None:
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
    assert duration(given_value, "delay") == expected
    assert type(duration(given_value, "delay")) is float


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
def test_a_duration_may_have_to_be_positive_or_have_a_least(
    least: dict[str, Any], enough: float, little: Any, message: str
) -> None:
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


def test_a_codec_that_encodes_to_no_bytes_is_told_so() -> None:
    encoded: Any = "text"
    with pytest.raises(CodecError, match="as bytes, not as str"):
        pack_entry(b"a", None, encoded)


def test_a_time_beyond_all_calendars_is_told_as_the_last_that_there_is() -> None:
    assert nearest(2**63).year == 9999
    assert nearest(-(2**63)).year == 1
    assert nearest(0) == EPOCH
