from __future__ import annotations

import enum
import math
import tracemalloc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, assert_type
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    SecretStr,
    Tag,
    TypeAdapter,
    ValidationError,
    computed_field,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypedDict

from aiodigest import DeadLetter, Digest, Entry, Record, Timeline
from aiodigest.codecs import JSON, Codec, JSONCodec, zstd
from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded

MIB = 1_048_576
utf8 = st.text(st.characters(exclude_categories=["Cs"]))
floats = st.floats(allow_nan=False, allow_infinity=False)
instants = st.datetimes(timezones=st.just(UTC))
json_values: st.SearchStrategy[JSON] = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | utf8,
    lambda inner: st.lists(inner) | st.dictionaries(utf8, inner),
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
ANY_JSON: TypeAdapter[JSON] = TypeAdapter(JSON)
numbers_or_text: TypeAdapter[float | str | None] = TypeAdapter(int | float | str | None)
instant = datetime(2015, 10, 1, 12, tzinfo=UTC)
events = st.builds(
    Event,
    id=st.uuids(),
    at=instants,
    cost=st.decimals(allow_nan=False, allow_infinity=False),
    body=utf8.map(str.encode),
    level=st.sampled_from(Level),
    note=st.none() | utf8,
)


def nested(depth: int) -> JSON:
    value: JSON = 1
    for _ in range(depth):
        value = [value]
    return value


# round trips


@given(json_values, st.sampled_from([0, 20, 1024]))
def test_any_json_value_comes_back_the_same(value: JSON, compress_above: int) -> None:
    codec = JSONCodec(compress_above=compress_above)
    back = codec.decode(codec.encode(value))
    assert back == value
    assert repr(back) == repr(value), "and of the same types all the way down: True is not 1, nor 1.0"


@given(json_values)
def test_an_adapter_of_any_json_stores_the_same_bytes_as_the_default(value: JSON) -> None:
    assert JSONCodec(ANY_JSON).encode(value) == JSONCodec(JSON).encode(value) == JSONCodec().encode(value)


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
    ("value_type", "values"),
    [
        (Event, events),
        (Point, st.builds(Point, floats, utf8)),
        (
            Row,
            st.fixed_dictionaries(
                {"name": utf8, "day": st.dates(), "took": st.timedeltas(timedelta(-10_000), timedelta(10_000))}
            ),
        ),
        (numbers_or_text, st.integers() | floats | utf8 | st.none()),
        (  # none is not taken for nan
            dict[str, float | str | None],
            st.dictionaries(st.sampled_from(["null", "b"]), st.none() | floats | st.just("null") | utf8),
        ),
        (datetime, instants),
        (datetime, st.just(datetime(2015, 10, 1, 12, tzinfo=timezone(timedelta(hours=2))))),
        (UUID, st.uuids()),
        (Decimal, st.just(Decimal("1.10"))),
        (bytes, st.just(b"text")),
        (Level, st.just(Level.ALERT)),
        (PurePosixPath, st.just(PurePosixPath("/a/b"))),
        (set[int], st.just({1, 2, 3})),
        (tuple[int, str], st.just((1, "a"))),
        (dict[int, Point], st.just({1: Point(1.0, "a")})),
        (type(None), st.none()),
        (list[Event], st.just([])),
        (pets, st.just(Dog(petKind="dog"))),  # a tagged union whose tag has an alias
        (Aliased, st.just(Aliased.model_validate({"written": 1, "in": 2}))),
        (Swapped, st.just(Swapped(b=1, a=2))),
        (Square, st.just(Square(side=3))),
        (Blob, st.just(Blob(data=b"\xff"))),  # a model that says how to write bytes that are no UTF-8
        (JSON, st.just(nested(200))),
    ],
    ids=str,
)
@given(st.data())
def test_a_value_comes_back_the_same(value_type: Any, values: st.SearchStrategy[object], data: st.DataObject) -> None:
    codec, value = JSONCodec[object](value_type, compress_above=100), data.draw(values)
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


# what encode refuses


def broken(_: int) -> int:
    raise KeyError("no such thing")


BROKEN: TypeAdapter[int] = TypeAdapter(Annotated[int, PlainSerializer(broken)])


@pytest.mark.parametrize(
    ("value_type", "value", "error", "reason"),
    [
        (int, "5", InvalidArgument, "valid integer"),
        (int, True, InvalidArgument, "valid integer"),
        (str, 5, InvalidArgument, "valid string"),
        (datetime, "2015-10-01T12:00:00Z", InvalidArgument, "valid datetime"),
        (Point, {"x": 1.0, "label": "secret"}, InvalidArgument, "instance of Point"),
        (Row, {"name": "secret", "day": date(2015, 10, 1)}, InvalidArgument, r"Field required \(at took\)"),
        (list[int], (1, 2), InvalidArgument, "valid list"),
        (dict[str, int], {"k" * 10_000: "secret"}, InvalidArgument, "valid integer"),
        (JSON, (1, 2), InvalidArgument, "not a valid JSON value"),
        (JSON, {"a": [1, {2}]}, InvalidArgument, r"\(at dict.a.list.1\)"),
        (JSON, {1: "a"}, InvalidArgument, "valid string"),
        (JSON, b"secret", InvalidArgument, "not a valid JSON value"),
        (JSON, datetime(2015, 10, 1), InvalidArgument, "not a valid JSON value"),
        (JSON, Point(1.0, "a"), InvalidArgument, "not a valid JSON value"),
        (JSON, object(), InvalidArgument, "not a valid JSON value"),
        (
            JSON,
            Ratio(),
            InvalidArgument,
            "not a valid JSON value; what is not JSON needs an engine with value_type=Ratio",
        ),
        (JSON, [Ratio()], InvalidArgument, r"not JSON needs an engine with value_type=\.\.\."),
        (JSON, nested(100_000), InvalidArgument, "Recursion"),
        (Event, {"id": 1, "at": 0, "cost": "1", "body": ""}, InvalidArgument, "valid decimal|instance of|UUID"),
        (Ratio, Ratio.model_construct(value="secret"), CodecError, "Expected `float`"),  # built without validation
        (bytes, b"secret \xff", CodecError, "utf-8"),
        (BROKEN, 1, CodecError, "no such thing"),
        # what could not be read back, and what would become null
        *((each, "\ud800", CodecError, "surrogate") for each in (JSON, ANY_JSON)),
        *((each, nested(230), CodecError, "recursion limit") for each in (JSON, ANY_JSON)),
        *(pytest.param(each, 10**5000, CodecError, "number out of range", id="too long") for each in (JSON, ANY_JSON)),
        *((JSON, number, CodecError, "nan and infinity") for number in (math.nan, math.inf, -math.inf)),
        (JSON, {"null": ["null", None, math.nan]}, CodecError, "nan and infinity"),
        (float, math.inf, CodecError, "nan and infinity"),
        (Ratio, Ratio(value=-math.inf), CodecError, "nan and infinity"),
        (list[Point], [Point(math.nan, "null")], CodecError, "nan and infinity"),
    ],
)
def test_a_value_that_cannot_be_stored_is_refused_with_a_short_reason_that_does_not_quote_it(
    value_type: Any, value: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason) as caught:
        JSONCodec(value_type).encode(value)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None or error is CodecError


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


class Liked(BaseModel):
    by: str


class Followed(Liked): ...


class Noted(BaseModel):
    meta: dict[str, Any]


class Hidden(BaseModel):
    shown: int
    hidden: int = Field(exclude=True)


@dataclass
class Started:
    name: str
    seed: InitVar[int]


class Word(enum.StrEnum):
    YES = "yes"


class Bare:
    @staticmethod
    def __get_pydantic_core_schema__(*_: object) -> CoreSchema:
        return core_schema.dict_schema()


class Renamed(TypedDict, total=False):
    name: Annotated[str, Field(alias="Name")]


@pytest.mark.parametrize(
    ("value_type", "value", "reason"),
    [
        (Liked | Followed, Followed(by="a"), "Followed would come back as Liked"),
        (
            Annotated[Liked, Tag("a")] | Annotated[Followed, Tag("b")],
            Followed(by="a"),
            "Followed would come back as Liked",
        ),
        (list[Liked | Followed], [Liked(by="a"), Followed(by="a")], "Followed would come back as Liked"),
        (Noted, Noted(meta={"at": instant}), "datetime would come back as str"),
        (Any, {1: 2}, "dict would come back changed"),
        (UUID | str, str(UUID(int=1)), "str would come back as UUID"),
        (Word | str, Word.YES, "Word would come back as str"),
        (Sequence[int], (1, 2), "tuple would come back as list"),
        (list[int] | set[int], {1}, "set would come back as list"),
        (dict[int | str, int], {1: 1}, "dict would come back changed"),
        (dict[tuple[int, int], str], {(1, 2): "a"}, r"could not be read back"),
        (Hidden, Hidden(shown=1, hidden=2), r"could not be read back: Field required \(at hidden\)"),
        (Started, Started("a", 1), r"could not be read back: Field required \(at seed\)"),
        (Renamed, {"Name": "a"}, "dict would come back changed"),
        (TypeAdapter(bytes, config=ConfigDict(ser_json_bytes="base64")), b"a", "bytes would come back changed"),
        (Bare, {1: 2}, "dict would come back changed"),
        (Annotated[int, AfterValidator(lambda number: number + 1)], 1, "int would come back changed"),
    ],
)
def test_a_value_that_would_come_back_as_another_or_not_at_all_is_refused(
    value_type: Any, value: object, reason: str
) -> None:
    with pytest.raises(CodecError, match=reason):
        JSONCodec(value_type).encode(value)


@pytest.mark.parametrize(
    ("value_type", "value", "expected"),
    [
        (JSON, Word.YES, "yes"),
        (str, Word.YES, "yes"),
        (dict[str, int], OrderedDict[str, int](a=1), {"a": 1}),
        (float, 1, 1.0),
    ],
)
def test_what_stands_for_another_type_comes_back_as_that(value_type: Any, value: object, expected: object) -> None:
    codec = JSONCodec(value_type)
    back = codec.decode(codec.encode(value))
    assert (back, type(back)) == (expected, type(expected))


class Secretive(BaseModel):
    anything: Any
    secret: SecretStr
    hidden: int = Field(0, exclude=True)


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (Liked | Followed, Liked(by="a")),
        (Noted, Noted(meta={"a": [1, 2.5, None, {"b": True}]})),
        (date | datetime, date(2015, 10, 1)),
        (Word | str, "no"),
        (deque[Any], deque([1])),
        (Renamed, {"name": "a"}),
        (dict[UUID | str, int], {UUID(int=1): 1}),
    ],
)
def test_a_value_of_an_ambiguous_type_that_comes_back_the_same_is_taken(value_type: Any, value: object) -> None:
    codec = JSONCodec[object](value_type)
    decoded = codec.decode(codec.encode(value))
    assert (decoded, type(decoded)) == (value, type(value))


def test_what_is_left_out_on_purpose_is_no_reason_to_refuse_a_value() -> None:
    value = Secretive(anything=1, secret=SecretStr("a"), hidden=5)
    codec = JSONCodec(Secretive)
    assert codec.decode(codec.encode(value)).hidden == 0


@pytest.mark.parametrize(
    "value_type",
    [
        JSON,
        int,
        str,
        datetime,
        float | str | None,
        dict[str, JSON],
        Event,
        Point,
        Row,
        Annotated[Cat | Dog, Field(discriminator="kind")],
        list[Square],
    ],
)
def test_nothing_is_read_back_where_json_tells_all_types_apart(value_type: Any) -> None:
    assert not JSONCodec[object](value_type)._round_trip.leaves_room


@pytest.mark.parametrize(("most", "sign"), [(1000, "a"), (None, "é")])
def test_a_value_of_more_bytes_than_max_size_is_over_the_limit_however_well_it_compresses(
    most: int | None, sign: str
) -> None:
    codec = JSONCodec() if most is None else JSONCodec(max_size=most)
    fits = sign * ((most or MIB) // len(sign.encode()) - 2 // len(sign.encode()))
    assert codec.decode(codec.encode(fits)) == fits
    with pytest.raises(LimitExceeded, match=f"at most {most or MIB:,} bytes as JSON, not "):
        codec.encode(fits + sign)


# what decode refuses


FRAME = zstd.compress(b'"aaaaaaaaaaaaaaaaaaaaaaaa"')
WIDE = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})  # larger than any value
DAMAGED = (
    b"", FRAME[:5], FRAME[:-1], FRAME + b"x", FRAME + FRAME,
    WIDE.compress(b"1") + WIDE.flush(zstd.ZstdCompressor.FLUSH_BLOCK) + WIDE.flush(),
)  # fmt: skip
CORRUPT = (b"", b"{", b"nul", b"\xff\xfe", b"[1,]", b"{} {}", b'"\xed\xa0\x80"', b"[" * 100_000, b"1" * 5000)


@pytest.mark.parametrize(
    ("value_type", "data", "reason"),
    [
        *((JSON, data, "unknown format") for data in (b"", b"\x00", b"\x03{}", b"{}", b"\x80\x04]\x94.")),
        *((JSON, b"\x01" + body, "does not fit its type") for body in CORRUPT),
        *((JSON, b"\x02" + frame, "corrupt zstd data") for frame in DAMAGED),
        (Ratio, JSONCodec().encode({"value": "secret"}), r"valid number, unable to parse.* \(at value\)"),
        (TypeAdapter(Annotated[int, AfterValidator(broken)]), b"\x011", "no such thing"),
    ],
)
def test_what_cannot_be_read_is_a_codec_error_that_says_where_and_does_not_quote_it(
    value_type: Any, data: bytes, reason: str
) -> None:
    with pytest.raises(CodecError, match=reason) as caught:
        JSONCodec(value_type).decode(data)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@given(st.binary(), st.integers(0), st.integers(1, 255))
def test_bytes_of_any_origin_and_damaged_ones_give_a_value_or_a_codec_error(data: bytes, at: int, change: int) -> None:
    packed = bytearray(JSONCodec(compress_above=0).encode([{"id": n, "name": "x" * n} for n in range(20)]))
    packed[1 + at % (len(packed) - 1)] ^= change
    for some in (data, b"\x01" + data, b"\x02" + data, bytes(packed)):
        with suppress(CodecError):
            JSONCodec().decode(some)


def test_a_compressed_value_up_to_max_size_is_read_and_one_over_it_is_a_codec_error() -> None:
    codec = JSONCodec(max_size=1000)
    assert zstd.decompress(DAMAGED[-1]) == b"1"  # whose window alone is too large
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


# building, typing, cost


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("compress_above", size) for size in (-1, True, "1k")),
        *(("max_size", size) for size in (0, 1.5, 536_870_913)),
    ],
)
def test_a_size_that_is_no_number_of_bytes_is_refused(name: str, size: Any) -> None:
    with pytest.raises(InvalidArgument, match=name):
        JSONCodec(**{name: size})


def test_a_type_that_pydantic_does_not_know_is_refused_when_built() -> None:
    class Opaque:
        pass

    with pytest.raises(InvalidArgument, match=r"value_type .*Opaque"):
        JSONCodec(Opaque)
    with pytest.raises(InvalidArgument, match=r"value_type .*not fully defined"):
        JSONCodec("Nowhere")  # pyright: ignore[reportArgumentType]


def test_the_value_type_reaches_the_type_checker() -> None:
    assert_type(JSONCodec(), JSONCodec[JSON])
    assert_type(JSONCodec(JSON), JSONCodec[JSON])
    assert_type(JSONCodec(Event), JSONCodec[Event])
    assert_type(JSONCodec(list[Event]), JSONCodec[list[Event]])
    assert_type(JSONCodec(pets), JSONCodec[Cat | Dog])
    assert_type(JSONCodec(int | str), JSONCodec[int | str])
    codec: Codec[Event] = JSONCodec(Event)
    assert codec
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
