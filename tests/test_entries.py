"""Records as the bytes of log entries, and the identities by which one replaces another."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from servers import Server

from aiodigest.backends.redis.scripts import CONSTANTS, LUA
from aiodigest.records import entries
from aiodigest.records.entries import (
    CONTEXT_SIZE,
    MADE_UP,
    RawRecord,
    id_of,
    identity,
    identity_of,
    made_up,
    pack,
    pack_new,
    places,
    stamp,
    unpack,
    value_in,
)
from aiodigest.records.validation import FIRST_MS, LAST_MS

NOW = 1_800_000_000_123
digits = st.binary(min_size=1, max_size=200).map(bytes.hex)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=300)
near_digits = st.text("0123456789abcdefAF g\n", min_size=1, max_size=6)
ids = st.one_of(digits, texts, near_digits).map(str.encode)
times = st.none() | st.integers(FIRST_MS * 1000, LAST_MS * 1000 + 999)
contexts = st.just(b"") | st.binary(min_size=CONTEXT_SIZE, max_size=CONTEXT_SIZE)
SIZES = (1, 2, 126, 127, 128, 253, 254, 255, 256, 1_023, 1_024, 65_534, 65_535)


def at_each_size(fill: bytes) -> list[bytes]:
    return [fill * size for size in SIZES]


@given(ids, times, st.binary(), contexts)
@example(b"zz", None, b"", b"")
@example(b"7a7a", None, b"", b"")  # the same two bytes, packed
def test_a_record_of_any_id_comes_out_of_its_entry_as_it_went_in(
    record_id: bytes, time: int | None, value: bytes, context: bytes
) -> None:
    entry = stamp(pack(record_id, time, value, context), NOW)
    raw = unpack(entry)
    assert raw == RawRecord(NOW * 1000 if time is None else time, identity_of(record_id), value, context)
    assert raw.id.encode() == record_id, "so no two ids have one identity"
    assert (identity(entry), value_in(entry)) == (raw.identity, value)
    assert stamp(entry, NOW) == entry


@pytest.mark.parametrize("record_id", [*at_each_size(b"e"), *at_each_size(b"E"), *at_each_size(b"x")])
def test_an_id_may_be_of_any_length_that_bounds_allow(record_id: bytes) -> None:
    entry = pack(record_id, None, b"value", bytes(CONTEXT_SIZE))
    assert unpack(entry).id.encode() == record_id
    assert (identity(entry), value_in(entry)) == (identity_of(record_id), b"value")
    assert len(identity_of(record_id)) <= entries.LONGEST_IDENTITY


@pytest.mark.parametrize(
    ("record_id", "size"), [("c0ffee", 4), ("C0FFEE", 7), ("c0ffe", 6), ("c0 ffe", 7), ("12", 2), ("g0", 3)]
)
def test_lowercase_hexadecimal_digits_take_half_of_their_bytes(record_id: str, size: int) -> None:
    assert len(identity_of(record_id.encode())) == size


@given(ids, times, contexts, st.data())
def test_an_entry_that_was_cut_off_is_its_own_identity(
    record_id: bytes, time: int | None, context: bytes, data: st.DataObject
) -> None:
    whole = pack(record_id, time, b"", context)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    assert places(cut) is None
    assert (identity(cut), value_in(cut)) == (cut, cut)


@given(st.lists(st.tuples(ids, times, contexts, st.integers(0, 400), st.binary(max_size=3)), max_size=30))
def test_scripts_find_the_same_identity(
    server: Server, made: list[tuple[bytes, int | None, bytes, int, bytes]]
) -> None:
    """In sound entries, and in those that were cut off or begin with other flags."""
    some = [first + pack(name, time, b"v", context)[len(first) : keep] for name, time, context, keep, first in made]
    some += [pack(name, time, b"v", context) for name, time, context, _, _ in made]
    constants = "".join(f"local {name} = {value}\n" for name, value in CONSTANTS.items())
    find = "\nfor index, entry in ipairs(ARGV) do ARGV[index] = identity(entry) end\nreturn ARGV"
    source = constants + (LUA / "shared" / "entries.lua").read_text() + find
    assert server.ask("EVAL", source, 0, *some) == [identity(entry) for entry in some]


def test_ids_that_are_made_up_differ_and_are_hexadecimal_digits() -> None:
    some = {made_up() for _ in range(10_000)}
    assert len(some) == 10_000
    for name in some:
        made = id_of(name)
        assert len(made) == MADE_UP
        assert identity_of(made.encode()) == name


def test_a_new_record_is_packed_as_one_without_id_timestamp_and_context(monkeypatch: pytest.MonkeyPatch) -> None:
    state = entries._random.getstate()
    monkeypatch.setattr(entries, "time_ns", lambda: NOW)
    packed = pack(None, None, b"value")
    entries._random.setstate(state)
    assert pack_new(b"value") == packed


def test_copies_of_a_frozen_process_make_up_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    state = entries._random.getstate()
    some: list[bytes] = []
    for now in range(3):
        entries._random.setstate(state)
        monkeypatch.setattr(entries, "time_ns", lambda now=now: NOW * 1_000_000 + now)
        some.append(made_up())
    assert len({*some}) == 3


def test_a_process_and_its_fork_make_up_different_ids() -> None:
    program = (
        "import os; from aiodigest.records import entries; entries.time_ns = lambda: 5; entries.made_up(); "
        "child = os.fork(); child and os.waitpid(child, 0); print(entries.made_up().hex(), flush=True)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = run.stdout.split()
    assert first != second
