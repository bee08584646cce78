"""What a digest decodes to is bounded: what is over comes in parts, each with the latest value of its records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engines import Inbox, WatchedBackend, delivering, engine_on, forever, policy, settle
from hypothesis import given
from hypothesis import strategies as st

from aiodigest import (
    JSON,
    Bounds,
    Digest,
    DigestEngine,
    Entry,
    InvalidArgument,
    JSONCodec,
    LimitExceeded,
    PartialAdd,
    Policy,
    Reject,
)
from aiodigest.backend import Claims, Lease, entries_of
from aiodigest.codecs import Codec, most_of, sizes_of, zstd
from aiodigest.records.entries import identity_of, pack
from aiodigest.testing import TestEngine

pytestmark = pytest.mark.virtual_time

BOUNDS = Bounds(value=1_000, digest=5_000)


def list_of(number: int, size: int = 2_001) -> JSON:
    """A value of so many bytes of JSON, which takes far fewer in the store."""
    return [number, *[0] * ((size - 3) // 2)]


def ids_of(digest: Digest[Any]) -> list[str]:
    return [record.id for record in digest.records]


class Sparing(WatchedBackend):
    """Tells as few entries at once as it may."""

    async def claim(self, *arguments: Any, **named: Any) -> Claims:
        claims = await super().claim(*arguments, **named)
        return replace(claims, leases=[replace(lease, entries=lease.entries[:1]) for lease in claims.leases])

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        return (await super().read(shard, lease, start, count))[:1]


@pytest.fixture(params=[WatchedBackend, Sparing], ids=["with the claim", "paged"])
def backend(request: pytest.FixtureRequest) -> WatchedBackend:
    return request.param()


async def test_a_digest_that_decodes_to_more_than_its_bound_comes_in_parts(backend: WatchedBackend) -> None:
    inbox = Inbox()
    async with engine_on(backend, policy=policy(), bounds=BOUNDS) as engine:
        await engine.add_many([Entry("key", list_of(number), record_id=f"{number}") for number in range(5)])
        await engine.add("other", list_of(9, 4_999), record_id="z")
    async with delivering(inbox, backend, policy=policy(), bounds=BOUNDS):
        await inbox.outcome(4)
        await settle()
        assert not backend.machines[0].held["key"].entries
    assert sorted(map(ids_of, inbox.digests)) == [["0", "1"], ["2", "3"], ["4"], ["z"]]
    assert {digest.attempt for digest in inbox.digests} == {1}
    assert len({digest.id for digest in inbox.digests}) == 4


async def test_a_value_over_the_bound_of_a_digest_is_refused_when_it_is_added() -> None:
    engine = engine_on(WatchedBackend(), bounds=BOUNDS)
    async with engine:
        with pytest.raises(LimitExceeded, match="at most 5,000 bytes when decoded, not 5,001"):
            await engine.add("key", list_of(1, 5_001))
        with pytest.raises(PartialAdd) as caught:
            await engine.add_many([Entry("key", list_of(1)), Entry("key", list_of(1, 5_001)), Entry("key", 3)])
        assert [type(result) for result in caught.value.results] == [bool, LimitExceeded, bool]
        assert (await engine.stats()).ready == 1


async def test_a_value_that_was_replaced_is_in_no_part_even_if_the_new_one_is_in_a_later_one(
    backend: WatchedBackend,
) -> None:
    inbox, added = Inbox(), "abcadbe"
    async with engine_on(backend, policy=policy(), bounds=BOUNDS) as engine:
        for number, record_id in enumerate(added):
            await engine.add("key", list_of(number), record_id=record_id)
    async with delivering(inbox, backend, policy=policy(), bounds=BOUNDS):
        await inbox.outcome(4)
    came = [(record.id, record.value[0]) for digest in inbox.digests for record in digest.records]  # type: ignore[index]
    assert came == [("c", 2), ("a", 3), ("d", 4), ("b", 5), ("e", 6)]
    assert inbox.results == ["empty", "delivered", "delivered", "delivered"]


async def test_a_dead_letter_of_a_part_has_no_value_that_was_replaced(backend: WatchedBackend) -> None:
    inbox = Inbox(Reject("no"))
    async with engine_on(backend, policy=policy(), bounds=BOUNDS) as engine:
        for number, record_id in enumerate("abac"):
            await engine.add("key", list_of(number), record_id=record_id)
    async with delivering(inbox, backend, policy=policy(), bounds=BOUNDS) as (engine, _):
        await inbox.outcome(2)
        letters = [letter async for letter in engine.dead_letters()]
    assert [[record.id for record in letter.records] for letter in letters] == [["b"]]
    assert [ids_of(digest) for digest in inbox.digests] == [["b"], ["a", "c"]]


async def test_a_digest_whose_outcome_is_unknown_is_cut_where_it_was_whatever_the_bound_is_by_then() -> None:
    backend = WatchedBackend()
    inbox = Inbox(forever)
    async with engine_on(backend, bounds=BOUNDS) as engine:
        await engine.add_many([Entry("key", list_of(number), record_id=f"{number}") for number in range(5)])
    async with delivering(inbox, backend, policy=policy(), bounds=BOUNDS, delivery_timeout=5):
        assert (await inbox.outcome()).result == "timeout"
    async with delivering(inbox, backend, policy=policy(), bounds=Bounds(value=1_000, digest=2_500)):
        await inbox.outcome(2)
    first, again = inbox.digests[:2]
    assert (first.id, first.records) == (again.id, again.records)
    assert len(first.records) == 2


class Plain:
    """A codec of a user's."""

    def encode(self, value: JSON, /) -> bytes:
        return str(value).encode()

    def decode(self, data: bytes, /) -> JSON:
        return data.decode()


class Telling(Plain):
    def decoded_size(self, data: bytes) -> int:
        return int(data)


@pytest.mark.parametrize(
    ("codec", "values", "parts"),
    [
        (Plain(), ["x" * 900] * 6, [5, 1]),  # what is stored counts
        (Telling(), ["2500"] * 3, [2, 1]),
        (Telling(), ["x" * 900] * 6, [5, 1]),  # it raises
    ],
)
async def test_a_codec_of_one_s_own_may_tell_what_it_decodes_to(
    codec: Codec[JSON], values: list[JSON], parts: list[int]
) -> None:
    inbox = Inbox()
    options: dict[str, Any] = {"codec": codec, "policy": policy(), "bounds": BOUNDS}
    backend = WatchedBackend()
    async with engine_on(backend, **options) as engine:
        await engine.add_many([Entry("key", value) for value in values])
    async with delivering(inbox, backend, **options):
        await inbox.outcome(len(parts))
    assert [len(digest.records) for digest in inbox.digests] == parts


@given(st.text(max_size=3_000) | st.integers(0, 3_000).map("a".__mul__))
def test_the_codec_knows_without_decoding_how_much_json_there_is(value: str) -> None:
    codec = JSONCodec(str)
    data = codec.encode(value)
    assert codec.decoded_size(data) == len(data[1:] if data[:1] == b"\x01" else zstd.decompress(data[1:]))


def test_what_does_not_decode_counts_as_what_is_stored_and_a_frame_that_lies_as_no_more_than_the_largest_value() -> (
    None
):
    codec = JSONCodec(max_size=1_000)
    assert codec.decoded_size(b"\x02junk") == 5
    assert codec.decoded_size(b"") == 0
    assert codec.decoded_size(b"\x02" + zstd.compress(b" " * 5_000)) == 1_000
    stream = zstd.ZstdCompressor()
    untold = b"\x02" + stream.compress(b" " * 50) + stream.flush(zstd.ZstdCompressor.FLUSH_BLOCK) + stream.flush()
    assert codec.decoded_size(untold) == 1_000
    assert sizes_of(codec)(untold) == 1_000


class Sealed(JSONCodec[JSON]):
    """One made from ours, that knows better what its values decode to."""

    def decoded_size(self, data: bytes, /) -> int:
        return 10 * super().decoded_size(data)


class Untold:
    """One that does not tell."""

    encode = decode = bytes


@pytest.mark.parametrize(
    ("codec", "most"), [(JSONCodec[JSON](), 130), (Untold(), 130), (Sealed(), None)], ids=["ours", "untold", "sealed"]
)
def test_what_entries_decode_to_is_told_at_a_look_only_if_none_is_packed_and_the_codec_is_ours(
    codec: Codec[Any], most: int | None
) -> None:
    entries = [pack(b"one", 5, b"\x01" + b"1" * 50), pack(b"other", 5, b"\x01" + b"2" * 50)]
    assert most_of(codec)(entries) == most
    packed = pack(b"packed", 5, b"\x02" + zstd.compress(b" " * 5_000))
    assert most_of(codec)([*entries, packed]) == (None if isinstance(codec, JSONCodec) else 130 + len(packed))
    assert most_of(JSONCodec())([pack(b"\xfd", 5, b"\x010")]) is not None  # the byte alone tells nothing


def entry_of(number: int) -> bytes:
    return pack(b"%d" % number, 5, b"x" * 99)


async def test_of_what_comes_after_a_part_only_the_ids_are_kept_and_they_are_read_once() -> None:
    stored = [entry_of(number % 10) for number in range(12)]
    reads: list[int] = []

    async def read(start: int, count: int) -> list[bytes]:
        reads.append(start)
        return stored[start : min(start + 4, start + count)]

    lease = Lease("key", "token", "digest", 1, 1, 0, 0, 12, bound=300)
    lease, entries, size = await entries_of(lease, read, lambda entry: 100)
    assert (entries, lease.later) == (stored[:3], [identity_of(b"%d" % (number % 10)) for number in range(3, 12)])
    assert size == 300
    assert reads == [0, 4, 8]
    del stored[:3], reads[:]
    lease, entries, _ = await entries_of(replace(lease, size=9), read, lambda entry: 100)
    assert (entries, lease.later) == (stored[:3], [identity_of(b"%d" % (number % 10)) for number in range(6, 12)])
    assert reads == [0]


async def test_to_look_at_a_timeline_decodes_no_more_than_a_digest_may_hold() -> None:
    async with engine_on(WatchedBackend(), bounds=BOUNDS) as engine:
        await engine.add_many([Entry("key", list_of(number), record_id=f"{number}") for number in range(4)])
        timeline = await engine.peek("key")
    assert timeline is not None
    assert [type(record.value) for record in timeline.records] == [list, list, bytes, bytes]


async def test_a_test_engine_delivers_the_same_parts() -> None:
    engine = DigestEngine[JSON](namespace="test", policy=Policy(minimum_delay=0), bounds=BOUNDS)
    async with TestEngine(engine) as test:
        await engine.add_many([Entry("key", list_of(number), record_id=f"{number}") for number in range(3)])
        await test.advance()
    assert [ids_of(digest) for digest in test.delivered] == [["0", "1"], ["2"]]


async def test_a_record_that_was_stored_under_a_larger_bound_still_comes_alone() -> None:
    backend, inbox = WatchedBackend(), Inbox()
    async with engine_on(backend, policy=policy()) as engine:
        await engine.add_many([Entry("key", list_of(number, 9_001), record_id=f"{number}") for number in range(2)])
    async with delivering(inbox, backend, policy=policy(), bounds=BOUNDS):
        await inbox.outcome(2)
    assert [ids_of(digest) for digest in inbox.digests] == [["0"], ["1"]]


async def test_max_bytes_bounds_what_a_digest_decodes_to_and_the_rest_comes_in_parts() -> None:
    inbox = Inbox()
    async with delivering(inbox, policy=Policy(initial_delay=3_600, max_bytes=5_000)) as (engine, _):
        assert await engine.add_many([Entry("k", list_of(n), f"r{n}") for n in range(5)]) == [
            False, False, True, False, False,
        ]  # fmt: skip
        await inbox.outcome(3)
    assert [len(digest.records) for digest in inbox.digests] == [2, 2, 1]


async def test_a_record_above_max_bytes_is_refused_when_it_is_added() -> None:
    async with delivering(Inbox(), policy=Policy(max_bytes=2_000)) as (engine, _):
        with pytest.raises(LimitExceeded, match=r"at most 2,000 bytes \(max_bytes\), not 2,001"):
            await engine.add("k", list_of(1))
        assert await engine.peek("k") is None


def test_max_bytes_is_at_most_the_bound_of_a_digest() -> None:
    message = r"max_bytes must be at most Bounds\(digest=...\), 5,000; it is 5,001"
    with pytest.raises(InvalidArgument, match=message):
        DigestEngine(namespace="n", policy=Policy(max_bytes=5_001), bounds=BOUNDS)


async def test_max_bytes_of_a_function_s_policy_is_at_most_the_bound_of_a_digest() -> None:
    def chosen(key: str) -> Policy:
        return Policy(max_bytes=5_001)

    async with delivering(Inbox(), policy=chosen, bounds=BOUNDS) as (engine, _):
        with pytest.raises(InvalidArgument, match="max_bytes must be at most"):
            await engine.add("k", 1)


async def test_a_value_that_a_later_part_replaces_counts_as_delivered_with_that_part_alone() -> None:
    """The first value of "a" is in the first part, where it is left out; the part with the newer one is rejected."""
    backend, inbox = WatchedBackend(), Inbox(None, Reject("no"))
    once = policy(dedupe_window=600)
    async with engine_on(backend, policy=once, bounds=BOUNDS) as engine:
        for number, record_id in enumerate("abca"):
            await engine.add("key", list_of(number), record_id=record_id)
    async with delivering(inbox, backend, policy=once, bounds=BOUNDS) as (engine, _):
        await inbox.outcome(2)
        await settle()
        assert [ids_of(digest) for digest in inbox.digests] == [["b"], ["c", "a"]]
        await engine.add_many([Entry("key", 1, name) for name in "bca"])
        await inbox.outcome(3)
    assert ids_of(inbox.digests[2]) == ["c", "a"]
