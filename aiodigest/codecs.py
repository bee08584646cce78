"""Values as bytes. The first byte is the version of the format, so that stored values stay readable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from pydantic_core import ValidationError, from_json, to_json
from typing_extensions import TypeVar

from aiodigest.arguments import whole
from aiodigest.errors import CodecError, InvalidArgument, LimitExceeded, shown
from aiodigest.models import JSON

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from typing_extensions import TypeForm

    from aiodigest.records.roundtrip import RoundTrip

T = TypeVar("T", default=JSON)

LARGEST = 536_870_912  # bytes of JSON
FRAME_HEADER = 32  # bytes: more than it has

PLAIN = 1  # the first byte of JSON that is not compressed

_PLAIN = bytes([PLAIN])
_ZSTD = b"\x02"
_MAGIC = b"\xb5/\xfd"  # near the beginning of what zstd has compressed, in all its versions; JSON has no such bytes


class Codec(Protocol[T]):
    """Values of one type as bytes. Both methods raise `CodecError` for anything they cannot convert.

    A codec that compresses should have a method ``decoded_size(data: bytes) -> int`` too, which tells without decoding
    how many bytes ``data`` has when it is not compressed: ``Bounds.digest`` counts them. Of one that has none, the
    bytes of ``data`` are counted.
    """

    def encode(self, value: T, /) -> bytes:
        """Encode ``value`` as bytes."""
        ...

    def decode(self, data: bytes, /) -> T:
        """Decode ``data``, which ``encode`` may have made long ago, in another version of a program."""
        ...


class JSONCodec(Generic[T]):
    """Values as JSON, made by pydantic and compressed with zstd when they are large.

    An encoded value comes back equal and of the same type, or is refused. Only what stands for another type comes back
    as that: a subclass as what ``value_type`` has in its place (a ``StrEnum`` as str, an ``OrderedDict`` as dict), and
    an int as a float (the nearest one, above 2**53). Where JSON cannot tell types apart (unions of models with the same
    fields, ``UUID | str``, ``Any``), ``encode`` decodes what it wrote to see that. A value must already be of its type:
    nothing is coerced, so "5" is not an int and a dict is not a model. Fields are stored, and the keys of a TypedDict
    given, under their names, whatever their aliases. Anything pydantic leaves out of JSON on purpose stays out:
    computed fields, excluded ones that have a default, secrets, what a subclass adds, keys that a TypedDict does not
    know.

    ``value_type`` is any type pydantic knows: model, dataclass, TypedDict, plain type, or a TypeAdapter; mypy takes a
    union only as that. JSON of more bytes than ``compress_above`` is compressed, if that makes it smaller. ``max_size``
    (at most 512 MiB) is the most bytes of JSON, before compression, to encode or to decompress: a lower value makes
    larger stored values unreadable. Raises InvalidArgument if one of these is out of its range, or pydantic has no
    schema for ``value_type``.
    """

    def __init__(
        self, value_type: TypeForm[T] | TypeAdapter[T] = JSON, *, compress_above: int = 1024, max_size: int = 1_048_576
    ) -> None:
        self._compress_above = whole(compress_above, "compress_above", 0, LARGEST)
        self.max_size = whole(max_size, "max_size", 1, LARGEST)
        self._any_json = value_type is JSON  # pyright: ignore[reportUnnecessaryComparison]  (a TypeForm is its value)
        self._value_type: TypeForm[T] | TypeAdapter[T] = value_type
        if not self._any_json:
            try:
                self._validate = self._validate  # now, and not with the first value: the type may be none
            except Exception as error:  # of pydantic, or of a type that says itself what its schema is
                raise InvalidArgument(f"value_type must be a type that pydantic knows: {_reason(error)}") from error

    @cached_property
    def _adapter(self) -> TypeAdapter[T]:
        # Any JSON needs it only to say what is wrong with a value: to import and build it takes a third of the time
        # from a program's start to its first add.
        from pydantic import TypeAdapter

        if isinstance(self._value_type, TypeAdapter):
            return cast("TypeAdapter[T]", self._value_type)
        return TypeAdapter(self._value_type)

    @cached_property
    def _round_trip(self) -> RoundTrip:
        from aiodigest.records.roundtrip import RoundTrip

        config = getattr(self._adapter, "_config", None)
        return RoundTrip({"type": "default", "schema": self._adapter.core_schema, "config": config})

    @cached_property
    def _validate(self) -> Callable[[T], T]:
        validate = partial(self._adapter.validate_python, strict=True)
        return partial(validate, by_alias=False, by_name=True) if self._round_trip.renames_keys else validate

    def encode(self, value: T, /) -> bytes:
        """Encode ``value`` as bytes.

        Raises `InvalidArgument` if it is not of the type, `LimitExceeded` if it is too large, and `CodecError` if JSON
        cannot hold it: what would come back as another type, or not at all; nan and infinity (unless the model's
        ``ser_json_inf_nan`` says how), bytes that are not UTF-8 (unless ``ser_json_bytes`` does), lone surrogates, more
        than 200 levels, integers of over 4,300 digits.
        """
        data = _json_or_none(value) if self._any_json else None
        if data is None:
            data = self._checked_json(value)
        size = len(data)
        if size > self.max_size:
            raise LimitExceeded(f"a value may take at most {self.max_size:,} bytes as JSON, not {size:,}")
        if size > self._compress_above:
            packed = zstd.compress(data)
            if len(packed) < size:
                return _ZSTD + packed
        return _PLAIN + data

    def decode(self, data: bytes, /) -> T:
        """Decode ``data``. Raises `CodecError`, whose message does not quote the value, if it does not decode."""
        version, body = data[:1], data[1:]
        if version == _ZSTD:
            body = _decompress(body, self.max_size)
        elif version != _PLAIN:
            raise CodecError(f"unknown format: the first byte is {version!r}, not {_PLAIN!r} or {_ZSTD!r}")
        if self._any_json:  # three times as fast; pydantic is left to say what is wrong
            try:
                return from_json(body)
            except ValueError:
                pass
        try:
            return self._adapter.validate_json(body, by_alias=False, by_name=True)
        except ValidationError as error:
            raise CodecError(f"stored value does not fit its type: {_reason(error)}") from None
        except Exception as error:  # a validator of the user's may raise anything
            raise CodecError(f"stored value cannot be decoded: {_reason(error)}") from error

    def decoded_size(self, data: bytes, /) -> int:
        """Return how many bytes of JSON ``data`` decodes to, at most."""
        if not data.startswith(_ZSTD):
            return max(0, len(data) - 1)
        try:
            size = zstd.get_frame_info(data[1:FRAME_HEADER]).decompressed_size
        except zstd.ZstdError:  # it will not decode
            return len(data)
        # None if the frame does not tell, which ours do
        return self.max_size if size is None else min(size, self.max_size)  # pyright: ignore[reportUnnecessaryComparison]

    def _checked_json(self, value: T) -> bytes:
        try:
            valid = self._validate(value)
            data = self._adapter.dump_json(valid, by_alias=False, round_trip=True, warnings="error")
            # Two ways in which pydantic writes what it would not read back: JSON too deep or an integer too long for
            # its parser, and nan as null. Each is looked for only where it can be.
            if len(data) > 4300 or data.count(b"[") + data.count(b"{") > 200:
                from_json(data)
            if b"null" in data:
                plain = self._adapter.dump_python(valid, mode="json", by_alias=False, round_trip=True, warnings=False)
                if to_json(plain, inf_nan_mode="constants").count(b"null") != data.count(b"null"):
                    raise ValueError("nan and infinity are no JSON")
            if self._round_trip.leaves_room:
                self._see_it_come_back(value if self._round_trip.renames_keys else valid, data)
        except ValidationError as error:
            kind = type(value)
            named = "..." if kind.__module__ == "builtins" else kind.__name__
            hint = f"; what is not JSON needs an engine with value_type={named}" if self._any_json else ""
            raise InvalidArgument(f"value is not of its type: {_reason(error)}{hint}") from None
        except Exception as error:  # a serializer of the user's may raise anything
            raise CodecError(f"value cannot be stored as JSON: {_reason(error)}") from error
        return data

    def _see_it_come_back(self, value: T, data: bytes) -> None:
        try:
            back = self._adapter.validate_json(data, by_alias=False, by_name=True)
        except Exception as error:
            raise ValueError(f"it could not be read back: {_reason(error)}") from None
        if change := self._round_trip.change(value, back):
            raise ValueError(change)


class Encoder(Generic[T]):
    """Encodes one value after another; one that is the very same as the one before, for another receiver, not again."""

    def __init__(self, codec: Codec[T]) -> None:
        self._codec = codec
        self._last: tuple[T, bytes] | None = None

    def __call__(self, value: T) -> bytes:
        if self._last is None or self._last[0] is not value:
            self._last = value, self._codec.encode(value)
        return self._last[1]


def sizes_of(codec: Codec[Any]) -> Callable[[bytes], int]:
    """Return a function that tells how many bytes an encoded value decodes to, as far as the codec knows."""
    measure: Callable[[bytes], int] | None = getattr(codec, "decoded_size", None)
    if measure is None:
        return len

    def size_of(value: bytes) -> int:
        try:
            return measure(value)
        except Exception:  # it is the user's; decoding will tell what is wrong with the value
            return len(value)

    return size_of


def most_of(codec: Codec[Any]) -> Callable[[Sequence[bytes]], int | None]:
    """Return a function that tells at a look how many bytes the values in some entries decode to at the most; it says
    None where each has to be measured."""
    measure: Callable[[bytes], int] | None = getattr(codec, "decoded_size", None)
    if measure is None:
        return _length_of
    is_ours = getattr(measure, "__func__", None) is JSONCodec[Any].decoded_size  # and not that of a class made from it
    return _length_unless_packed if is_ours else lambda entries: None


def _length_of(entries: Sequence[bytes]) -> int:
    return sum(map(len, entries))


def _length_unless_packed(entries: Sequence[bytes]) -> int | None:
    joined = b"".join(entries)  # to look through each would take five times as long; a single byte is found at once
    return None if _MAGIC[-1:] in joined and _MAGIC in joined else len(joined)


def reader_of(codec: Codec[Any]) -> Callable[[bytes], Any] | None:
    """Return the function that reads what follows `PLAIN` in values of any JSON, if the codec is ours for these: it
    takes next to no time, and does not say what is wrong with some. None of other codecs, which may take any time."""
    is_ours = type(codec) is JSONCodec and vars(codec)["_any_json"]  # and not of a class made from it
    return from_json if is_ours else None


def bounded(codec: Codec[T], left: int) -> Callable[[bytes], T]:
    """Return a function for looking: it decodes values of up to ``left`` bytes in all, and refuses what comes after."""
    size_of = sizes_of(codec)

    def decode(data: bytes) -> T:
        nonlocal left
        left -= size_of(data)
        if left < 0:
            raise CodecError("the timeline is too large to be shown whole")
        return codec.decode(data)

    return decode


def _json_or_none(value: object) -> bytes | None:
    # What reads back equal is a JSON value: to try is three times as fast as pydantic's validation, which is left to
    # say what is wrong with the rest.
    try:
        if type(value) is str:  # which always reads back equal
            return to_json(value)
        data = to_json(value, inf_nan_mode="null")
        return data if from_json(data) == value else None
    except Exception:  # comparing may raise too: the value may be of a user's type
        return None


def _decompress(data: bytes, max_size: int) -> bytes:
    # The window is memory too, and a frame chooses its own: 10 is the least that zstd accepts.
    window_log = max(10, max_size.bit_length())
    frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window_log})
    try:
        body = frame.decompress(data, max_length=max_size + 1)
    except zstd.ZstdError as error:
        raise CodecError(f"corrupt zstd data: {_reason(error)}") from error
    if len(body) > max_size:
        raise CodecError(f"zstd data decompresses to more than {max_size:,} bytes")
    if not frame.eof or frame.unused_data:
        raise CodecError("corrupt zstd data: not exactly one frame")
    return body


def _reason(error: Exception) -> str:
    # Never the value: it is somebody's mail, and errors end in logs. pydantic appends it in brackets.
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        text = f"{first['msg']} (at {place})" if place else first["msg"]
    else:
        text = shown(error, str).partition(" [")[0]
    return " ".join(text.split())[:200]
