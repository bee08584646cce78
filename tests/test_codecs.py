from __future__ import annotations

import enum
import math
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Annotated, Any, Generic, Literal, TypeVar, assert_type
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    computed_field,
)
from typing_extensions import TypedDict

from aiodigest import DeadLetter, Digest, Entry, Record, Timeline
from aiodigest.codecs import JSON, Codec, JSONCodec, zstd
from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded

T = TypeVar("T")

MIB = 1_048_576
json_values: st.SearchStrategy[JSON] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=20,
)


class Level(enum.Enum):
    INFO = "info"
    ALERT = "alert"


class Event(BaseModel):
    id: UUID
    at: datetime
    cost: Decimal
    body: bytes
    level: Level = Level.INFO
    note: str | None = None


@dataclass
class Point:
    x: float
    label: str


class Row(TypedDict):
    name: str
    day: date
    took: timedelta


class Cat(BaseModel):
    kind: Literal["cat"] = Field("cat", alias="petKind")


class Dog(BaseModel):
    kind: Literal["dog"] = Field("dog", alias="petKind")


class Ratio(BaseModel):
    value: float | None = None
    other: float | None = None


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
pets: TypeAdapter[Cat | Dog] = TypeAdapter(Pet)
numbers_or_text: TypeAdapter[float | str | None] = TypeAdapter(int | float | str | None)

utf8 = st.text(st.characters(exclude_categories=["Cs"]))
instants = st.datetimes(timezones=st.just(UTC))
events = st.builds(
    Event,
    id=st.uuids(),
    at=instants,
    cost=st.decimals(allow_nan=False, allow_infinity=False),
    body=utf8.map(str.encode),
    level=st.sampled_from(Level),
    note=st.none() | utf8,
)


def untyped(call: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Calls as code without a type checker would."""
    return call(*args, **kwargs)


def nested(depth: int) -> JSON:
    value: JSON = 1
    for _ in range(depth):
        value = [value]
    return value


def same(one: object, other: object) -> bool:
    """Equal, and of the same types all the way down: True is not 1, nor 1.0."""
    return repr(one) == repr(other) and one == other


# round trips


@given(json_values, st.sampled_from([0, 20, 1024]))
def test_any_json_value_comes_back_the_same(value: JSON, compress_above: int) -> None:
    codec = JSONCodec(compress_above=compress_above)
    assert same(codec.decode(codec.encode(value)), value)


@given(json_values)
def test_an_adapter_of_any_json_stores_the_same_bytes_as_the_default(value: JSON) -> None:
    adapter: TypeAdapter[JSON] = TypeAdapter(JSON)
    assert JSONCodec(adapter).encode(value) == JSONCodec(JSON).encode(value) == JSONCodec().encode(value)


@pytest.mark.parametrize(
    ("value_type", "values"),
    [
        (Event, events),
        (Point, st.builds(Point, st.floats(allow_nan=False, allow_infinity=False), utf8)),
        (
            Row,
            st.fixed_dictionaries(
                {"name": utf8, "day": st.dates(), "took": st.timedeltas(timedelta(-10_000), timedelta(10_000))}
            ),
        ),
        (numbers_or_text, st.integers() | st.floats(allow_nan=False, allow_infinity=False) | utf8 | st.none()),
        (datetime, instants),
    ],
    ids=["model", "dataclass", "typed dict", "union", "datetime"],
)
@given(st.data())
def test_a_value_comes_back_the_same(value_type: Any, values: st.SearchStrategy[object], data: st.DataObject) -> None:
    codec, value = JSONCodec[object](value_type, compress_above=100), data.draw(values)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


class Aliased(BaseModel):
    written: int = Field(serialization_alias="out")
    read: int = Field(validation_alias="in")


class Swapped(BaseModel):
    a: int = Field(alias="b")
    b: int = Field(alias="a")


class Square(BaseModel, extra="forbid"):
    side: int

    @computed_field
    @property
    def area(self) -> int:
        return self.side**2


class Blob(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    data: bytes


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (UUID, uuid4()),
        (Decimal, Decimal("1.10")),
        (bytes, b"text"),
        (datetime, datetime(2015, 10, 1, 12, tzinfo=timezone(timedelta(hours=2)))),
        (Level, Level.ALERT),
        (PurePosixPath, PurePosixPath("/a/b")),
        (set[int], {1, 2, 3}),
        (tuple[int, str], (1, "a")),
        (dict[int, Point], {1: Point(1.0, "a")}),
        (type(None), None),
        (list[Event], []),
        (pets, Dog(petKind="dog")),  # a tagged union whose tag has an alias
        (Aliased, Aliased.model_validate({"written": 1, "in": 2})),
        (Swapped, Swapped(b=1, a=2)),
        (Square, Square(side=3)),
        (Blob, Blob(data=b"\xff")),  # a model that says how to write bytes that are no UTF-8
        (JSON, nested(200)),
    ],
)
def test_a_value_of_a_common_type_comes_back_the_same(value_type: type[object], value: object) -> None:
    codec = JSONCodec(value_type)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert type(back) is type(value)


def test_equal_members_of_a_subclass_of_a_json_type_are_stored_as_json() -> None:
    counts: defaultdict[str, JSON] = defaultdict(int, {"a": 1})
    assert JSONCodec().decode(JSONCodec().encode(counts)) == {"a": 1}


@pytest.mark.parametrize(
    ("value_type", "value", "stored"),
    [
        (JSON, {"a": [1, 2.5, None]}, b'\x01{"a":[1,2.5,null]}'),  # the first byte is the version of the format
        (Aliased, Aliased.model_validate({"written": 1, "in": 2}), b'\x01{"written":1,"read":2}'),
        (Square, Square(side=3), b'\x01{"side":3}'),
    ],
)
def test_fields_are_stored_by_name_so_that_no_alias_can_lose_them_and_no_computed_ones(
    value_type: type[object], value: object, stored: bytes
) -> None:
    assert JSONCodec(value_type).encode(value) == stored


def test_a_schema_that_grew_a_default_reads_what_was_stored_before() -> None:
    class Before(BaseModel):
        name: str

    class After(BaseModel):
        name: str
        level: int = 3

    assert JSONCodec(After).decode(JSONCodec(Before).encode(Before(name="a"))) == After(name="a", level=3)


# the format


def test_json_above_the_threshold_is_compressed_if_it_becomes_smaller_and_read_whatever_the_threshold() -> None:
    codec = JSONCodec(compress_above=10)
    assert codec.encode("a" * 8) == b'\x01"aaaaaaaa"'
    assert JSONCodec(compress_above=0).encode(1) == b"\x011"
    packed = codec.encode("a" * 1000)
    assert packed[:1] == b"\x02"
    assert len(packed) < 100
    assert zstd.decompress(packed[1:]) == b'"' + b"a" * 1000 + b'"'
    assert codec.decode(packed) == JSONCodec(compress_above=MIB).decode(packed) == "a" * 1000


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x03{}", b"{}", b"\x80\x04]\x94."])
def test_an_unknown_format_is_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError, match="unknown format"):
        JSONCodec().decode(data)


# what encode refuses


@pytest.mark.parametrize(
    ("value_type", "value", "reason"),
    [
        (int, "5", "valid integer"),
        (int, True, "valid integer"),
        (str, 5, "valid string"),
        (datetime, "2015-10-01T12:00:00Z", "valid datetime"),
        (Point, {"x": 1.0, "label": "a"}, "instance of Point"),
        (Row, {"name": "a", "day": date(2015, 10, 1)}, r"Field required \(at took\)"),
        (list[int], (1, 2), "valid list"),
        (JSON, (1, 2), "not a valid JSON value"),
        (JSON, {"a": [1, {2}]}, r"\(at dict.a.list.1\)"),
        (JSON, {1: "a"}, "valid string"),
        (JSON, b"bytes", "not a valid JSON value"),
        (JSON, datetime(2015, 10, 1), "not a valid JSON value"),
        (JSON, Point(1.0, "a"), "not a valid JSON value"),
        (JSON, object(), "not a valid JSON value"),
        (JSON, nested(100_000), "Recursion"),
        (Event, {"id": 1, "at": 0, "cost": "1", "body": ""}, "valid decimal|instance of|UUID"),  # nothing is coerced
    ],
)
def test_a_value_that_is_not_of_the_type_is_an_invalid_argument(
    value_type: type[object], value: object, reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        JSONCodec(value_type).encode(value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused_and_never_become_null(number: float) -> None:
    refused: list[tuple[Any, object]] = [
        (JSON, number),
        (JSON, {"null": ["null", None, number]}),
        (float, number),
        (Ratio, Ratio(value=number)),
        (list[Point], [Point(number, "null")]),
    ]
    for value_type, value in refused:
        with pytest.raises(CodecError, match="nan and infinity"):
            JSONCodec(value_type).encode(value)


@pytest.mark.parametrize("mode", ["constants", "strings"])
def test_a_model_that_says_how_to_write_nan_may_hold_it(mode: Literal["constants", "strings"]) -> None:
    class Measured(BaseModel):
        model_config = ConfigDict(ser_json_inf_nan=mode)
        value: float | None = None
        other: float | None = None

    codec = JSONCodec(Measured)
    back = codec.decode(codec.encode(Measured(value=math.nan)))
    assert back.value is not None
    assert math.isnan(back.value)
    assert back.other is None


@given(st.none() | st.floats(allow_nan=False, allow_infinity=False), st.none() | st.just("null") | utf8)
def test_none_is_not_taken_for_nan(value: float | None, text: str | None) -> None:
    codec = JSONCodec(dict[str, float | str | None])
    assert codec.decode(codec.encode({"null": value, "b": text})) == {"null": value, "b": text}


@pytest.mark.parametrize("value_type", [JSON, TypeAdapter[JSON](JSON)])
@pytest.mark.parametrize(
    ("value", "reason"),
    [("\ud800", "surrogate"), (nested(230), "recursion limit"), (10**5000, "number out of range")],
    ids=["a lone surrogate", "too deep", "too long a number"],
)
def test_what_could_not_be_read_back_is_refused(value_type: TypeAdapter[JSON], value: JSON, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        JSONCodec(value_type).encode(value)


def broken(_: int) -> int:
    raise KeyError("no such thing")


def test_an_error_in_a_serializer_or_a_validator_is_a_codec_error() -> None:
    serialized: TypeAdapter[int] = TypeAdapter(Annotated[int, PlainSerializer(broken)])
    validated: TypeAdapter[int] = TypeAdapter(Annotated[int, AfterValidator(broken)])
    with pytest.raises(CodecError, match="no such thing"):
        JSONCodec(serialized).encode(1)
    with pytest.raises(CodecError, match="no such thing"):
        JSONCodec(validated).decode(b"\x011")


@pytest.mark.parametrize(("most", "sign"), [(1000, "a"), (None, "é")])
def test_a_value_of_more_bytes_than_max_size_is_over_the_limit_however_well_it_compresses(
    most: int | None, sign: str
) -> None:
    codec = JSONCodec() if most is None else JSONCodec(max_size=most)
    fits = sign * ((most or MIB) // len(sign.encode()) - 2 // len(sign.encode()))
    assert codec.decode(codec.encode(fits)) == fits
    with pytest.raises(LimitExceeded, match=f"at most {most or MIB:,} bytes as JSON, not "):
        codec.encode(fits + sign)


@pytest.mark.parametrize(
    ("value_type", "value", "error", "told"),
    [
        (dict[str, int], {"k" * 10_000: "secret"}, InvalidArgument, "valid integer"),
        (Ratio, Ratio.model_construct(value="secret"), CodecError, "Expected `float`"),  # built without validation
        (bytes, b"secret \xff", CodecError, "utf-8"),
    ],
)
def test_an_error_of_encode_does_not_quote_the_value_and_is_short(
    value_type: Any, value: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told) as caught:
        JSONCodec(value_type).encode(value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 250
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None or error is CodecError


# what decode refuses


@pytest.mark.parametrize(
    "body", [b"", b"{", b"nul", b"\xff\xfe", b"[1,]", b"{} {}", b'"\xed\xa0\x80"', b"[" * 100_000, b"1" * 5000]
)
def test_corrupt_json_is_a_codec_error(body: bytes) -> None:
    with pytest.raises(CodecError, match="does not fit its type") as caught:
        JSONCodec().decode(b"\x01" + body)
    assert len(str(caught.value)) < 250


@given(st.binary(), st.integers(0), st.integers(1, 255))
def test_bytes_of_any_origin_and_damaged_ones_give_a_value_or_a_codec_error(data: bytes, at: int, change: int) -> None:
    packed = bytearray(JSONCodec(compress_above=0).encode([{"id": n, "name": "x" * n} for n in range(20)]))
    packed[1 + at % (len(packed) - 1)] ^= change
    for some in (data, b"\x01" + data, b"\x02" + data, bytes(packed)):
        with suppress(CodecError):
            JSONCodec().decode(some)


def test_a_value_of_another_schema_is_a_codec_error_that_says_where_and_does_not_quote_it() -> None:
    with pytest.raises(CodecError, match=r"valid number, unable to parse.* \(at value\)") as caught:
        JSONCodec(Ratio).decode(JSONCodec().encode({"value": "secret"}))
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_compressed_value_up_to_max_size_is_read_and_one_over_it_is_a_codec_error() -> None:
    codec = JSONCodec(max_size=1000)
    for size in (1, 999, 1000):
        assert codec.decode(b"\x02" + zstd.compress(b" " * (size - 1) + b"1")) == 1
    for size in (1001, 100_000):
        compressor = zstd.ZstdCompressor()
        stream = compressor.compress(b" " * size) + compressor.flush()  # a frame that does not tell its size
        for packed in (zstd.compress(b" " * size), stream):
            with pytest.raises(CodecError, match=r"more than 1,000 bytes|corrupt zstd data"):
                codec.decode(b"\x02" + packed)


def test_a_zstd_bomb_is_refused_without_the_memory_it_asks_for() -> None:
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 15})
    bomb = b"\x02" + b"".join(compressor.compress(b" " * MIB) for _ in range(256)) + compressor.flush()
    assert len(bomb) < 50_000
    codec = JSONCodec()
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="more than 1,048,576 bytes"):
            codec.decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_truncated_trailing_or_too_wide_zstd_data_is_a_codec_error() -> None:
    frame = zstd.compress(b'"aaaaaaaaaaaaaaaaaaaaaaaa"')
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = compressor.compress(b"1") + compressor.flush(zstd.ZstdCompressor.FLUSH_BLOCK) + compressor.flush()
    assert zstd.decompress(wide) == b"1"  # but its window is larger than any value
    for damaged in (b"", frame[:5], frame[:-1], frame + b"x", frame + frame, wide):
        with pytest.raises(CodecError, match="corrupt zstd data"):
            JSONCodec().decode(b"\x02" + damaged)


# building, typing, cost


@pytest.mark.parametrize(
    "arguments",
    [
        {"compress_above": -1},
        {"compress_above": True},
        {"compress_above": "1k"},
        {"max_size": 0},
        {"max_size": 1.5},
        {"max_size": 536_870_913},
    ],
)
def test_a_size_that_is_no_number_of_bytes_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(arguments))):
        untyped(JSONCodec, **arguments)


def test_a_type_that_pydantic_does_not_know_is_refused_when_built() -> None:
    class Opaque:
        pass

    with pytest.raises(InvalidArgument, match=r"value_type .*Opaque"):
        JSONCodec(Opaque)


class Box(Generic[T]):
    def __init__(self, codec: Codec[T]) -> None:
        self.codec = codec


def test_the_value_type_reaches_the_type_checker() -> None:
    assert_type(JSONCodec(), JSONCodec[JSON])
    assert_type(JSONCodec(JSON), JSONCodec[JSON])
    assert_type(JSONCodec(Event), JSONCodec[Event])
    assert_type(JSONCodec(list[Event]), JSONCodec[list[Event]])
    assert_type(JSONCodec(pets), JSONCodec[Cat | Dog])
    assert_type(JSONCodec(int | str), JSONCodec[int | str])
    assert_type(Box(JSONCodec(Event)), Box[Event])
    assert_type(JSONCodec().decode(b"\x011"), JSON)


@pytest.mark.parametrize("model", [Record, Digest, Entry, Timeline, DeadLetter])
def test_a_model_that_names_no_type_is_one_of_any_json_to_pydantic(model: Any) -> None:
    several: Any = list
    assert TypeAdapter(several[model]).json_schema()["items"]


def test_json_is_any_json_within_other_types() -> None:
    adapter = TypeAdapter(dict[str, JSON] | None)
    assert adapter.validate_python({"a": [1, {"b": None}]}) == {"a": [1, {"b": None}]}
    with pytest.raises(ValidationError):
        adapter.validate_python({"a": object()})
