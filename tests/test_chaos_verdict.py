"""The chaos program judges others, so it is judged here: hand-made journals with a fault each, which it must find."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
from replicas import until

from aiodigest import ChannelError, Digest, OutcomeUnknown, Record, Reject
from aiodigest.backend import Lease
from aiodigest.channels import SMTP
from aiodigest.worker.reasons import log_doubt
from chaos.channel import channel, sending
from chaos.evidence import of_mails, of_master, of_process
from chaos.journal import Journal, Line, read
from chaos.mail import address_of, id_of, is_unknown
from chaos.mailserver import MAILS
from chaos.plan import KINDS, LONGEST_GAP, MAIL_KINDS, STEP_BACK, plan, with_mails
from chaos.process import SPAN, Faults, shard_of
from chaos.producer import key_of
from chaos.proxy import Proxy
from chaos.rules import PLAIN, names, policy_of
from chaos.server import MailServer, time_library
from chaos.verdict import Verdict, judge

PRODUCER, WORKER, OTHER = 1, 2, 3
FIRST = PRODUCER * SPAN

Story = dict[int, list[Line]]
"""What each process wrote; times are milliseconds here."""


def line(kind: str, at: float, *facts: object) -> Line:
    return [kind, round(at * 1e6), *facts]


def begin(at: float, call: int, digest: str, records: list[int], attempt: int = 1, key: str = "timeline") -> Line:
    return line("begin", at, call, key, digest, attempt, records)


def end(at: float, call: int, how: str = "returned", failed: list[int] | None = None) -> Line:
    return line("end", at, call, how, failed or [])


def told(at: float, digest: str, result: str = "delivered", attempt: int = 1) -> Line:
    return line("told", at, digest, attempt, result)


def stored(count: int, kind: str = "stored", first: int = FIRST) -> Line:
    return line(kind, 10, first, first + count - 1, 0.001)


def verdict(
    story: Story,
    *master: Line,
    ways: Sequence[str] = ("socket", "socket", "proxy 0"),
    store: str = "main",
    letters: list[int] | None = None,
    held: list[int] | None = None,
    mails: list[Line] | None = None,
) -> Verdict:
    """Judge what these processes, each by its way to the store, the one above them and a mail server wrote."""
    processes = (PRODUCER, "producer", 0), (WORKER, "worker", 0), (OTHER, "worker", 1)
    facts = of_master(
        [
            *(line("start", 0, *process, store, way) for process, way in zip(processes, ways, strict=True)),
            *master,
            line("stop", 60_000, 60_000 * 10**6),
            line("audit", 61_000, store, letters or [], held or [], {"dropped": 0, "aged": 0, "expired": 0}),
        ]
    )
    for incarnation, lines in story.items():
        of_process(facts, incarnation, lines)
    facts.calls.sort(key=lambda call: call.begun)
    if mails is not None:
        of_mails(facts, mails)
    return judge(facts)


def call(*ends: str, digest: str = "d1", at: float = 100, number: int = 1, records: int = 1) -> list[Line]:
    """What a worker writes of its first records: their begin, how that ended, and what became of it."""
    how, *result = ends or ("returned", "delivered")
    failed = [FIRST] if how == "partial" else []
    lines = [begin(at, number, digest, [*range(FIRST, FIRST + records)]), end(at + 10, number, how, failed)]
    return [*lines, *(told(at + 11, digest, each) for each in result)]


LOST = "1 records were lost: record {} of producer 1"
HELD = "1 records were still held at the end: record 0 of producer 1"
CAME = "1 records were told as not stored, and came: record 0 of producer 1"
LATE = "1 records came later than what had replaced them: record 0 of producer 1"
AGAIN = call(digest="d2", at=200, number=2)
PARTIAL = call("partial", "partial", records=2)


@pytest.mark.parametrize(
    ("added", "calls", "kept", "findings"),
    [
        pytest.param(stored(2), call(), {}, [LOST.format(1)], id="no callback got it"),
        pytest.param(stored(1), call("raised"), {}, [LOST.format(0)], id="its callback raised"),
        pytest.param(stored(1), call("cut"), {}, [LOST.format(0)], id="its callback was cut"),
        pytest.param(stored(1), call("rejected"), {}, [LOST.format(0)], id="its callback rejected it"),
        pytest.param(stored(2), PARTIAL, {}, [LOST.format(0)], id="a partial failure names it"),
        pytest.param(stored(2), [*PARTIAL, *AGAIN], {}, [], id="a partial failure names it and it comes again"),
        pytest.param(stored(1), call("rejected", "rejected"), {"letters": [FIRST]}, [], id="it is in a dead letter"),
        pytest.param(stored(1), [], {"held": [FIRST]}, [HELD], id="it is held at the end"),
        pytest.param(stored(1, "no"), call(), {}, [CAME], id="it was told as not stored and came"),
        pytest.param(stored(2, "unknown"), call(), {}, [], id="of unknown outcome"),
    ],
)
def test_what_became_of_a_record(added: Line, calls: list[Line], kept: dict[str, Any], findings: list[str]) -> None:
    assert verdict({PRODUCER: [added], WORKER: calls}, **kept).findings == findings


def test_a_run_in_which_all_went_well_is_good() -> None:
    found = verdict({PRODUCER: [stored(2)], WORKER: call(records=2)})
    assert found.is_good
    assert (found.acknowledged, found.delivered, found.duplicated) == (2, 2, 0)


def fault(
    begins: float, ends: float, number: int = 1, kind: str = "server: kill -9", effect: str = "", where: object = None
) -> list[Line]:
    return [line("fault", begins, number, kind, "main", where, None, None), line("over", ends, number, effect)]


IDLE = [each for number in range(3) for each in fault(5 + number, 6 + number, number, "server: OOM", "nothing")]
DROPPED = line("audit", 61_000, "embedded", [], [], {"dropped": 3})


@pytest.mark.parametrize(
    ("master", "finding"),
    [
        ([DROPPED], "the embedded store has counted 3 records as dropped"),
        ([line("wrong", 5, "worker 2 has crashed")], "worker 2 has crashed"),
        (IDLE, "the fault 'server: OOM' had no effect, ever: nothing"),
    ],
    ids=["what a store has dropped", "a crash", "a kind of fault that never had an effect"],
)
def test_what_went_wrong_beside_the_records_is_a_finding(master: list[Line], finding: str) -> None:
    assert verdict({}, *master).findings == [finding]


def again(first: list[Line], digest: str = "d1", attempt: int = 2, at: float = 5_000) -> Story:
    """A record that a worker got in whatever way, and then another one under a digest id."""
    second = [begin(at, 1, digest, [FIRST], attempt), end(at + 10, 1), told(at + 11, digest, attempt=attempt)]
    return {PRODUCER: [stored(1)], WORKER: first, OTHER: second}


RETURNED, KNOWN = call("returned"), call()
KILLED = line("exit", 120, WORKER, "killed", 115 * 10**6)
STOOD_STILL = [begin(100, 1, "d1", [FIRST]), line("still", 4_000, 3.5), end(4_001, 1), told(4_002, "d1", "lost")]
WHOLE = [begin(300, 2, "d1", [FIRST], attempt=2), end(310, 2, "partial", []), told(311, "d1", "partial", 2)]
CUT_ELSEWHERE, CUT = (fault(105, 500, kind="proxy: cut", where=where) for where in ("proxy 1", "socket"))
TWICE_UNKNOWN, TWICE_KNOWN = (again([*call(*ends), *WHOLE], attempt=3) for ends in (("cut",), ("raised", "failed")))
ONCE = [begin(300, 2, "d1", [FIRST]), end(310, 2, "partial", []), told(311, "d1", "partial")]
DOUBTED = again([line("doubted", 299, "d1"), *ONCE])
KEPT_WHOLE = "kept whole after an unknown outcome before"


@pytest.mark.parametrize(
    ("story", "master", "why"),
    [
        pytest.param(again(RETURNED), [KILLED], "the worker was killed", id="the first worker was killed"),
        pytest.param(again(RETURNED, "d2"), [KILLED], None, id="under another digest id"),
        pytest.param(again(KNOWN), [KILLED], None, id="the store knew it to be delivered"),
        pytest.param(again(RETURNED), [], None, id="nothing accounts for it"),
        pytest.param(again(RETURNED), CUT_ELSEWHERE, None, id="a fault of others"),
        pytest.param(again(RETURNED), CUT, "proxy: cut", id="a fault of its own"),
        pytest.param(again(STOOD_STILL), [], "the worker stood still", id="the worker stood still"),
        pytest.param(TWICE_UNKNOWN, [], KEPT_WHOLE, id="a partial failure after an unknown outcome"),
        pytest.param(TWICE_KNOWN, [], None, id="a partial failure after a known one"),
        pytest.param(DOUBTED, [], KEPT_WHOLE, id="a partial failure after a claim that nobody heard of"),
    ],
)
def test_a_duplicate_is_explained_by_what_can_account_for_it(story: Story, master: list[Line], why: str | None) -> None:
    found = verdict(story, *master)
    assert found.duplicated == 1
    assert (found.unexplained, found.is_good) == ((1, False) if why is None else (0, True))
    assert why is None or found.duplicates == {why: 1}


@pytest.mark.parametrize(("way", "lasted"), [("proxy 0", 3.0), ("proxy 0", 0.2), ("socket", 3.0)])
def test_the_proxies_stand_still_with_the_program_that_they_are_in(way: str, lasted: float) -> None:
    found = verdict(again(RETURNED), line("still", 3_100, lasted), ways=("socket", way, way))
    assert found.duplicates == {"the proxies stood still" if (way, lasted) == ("proxy 0", 3.0) else "unexplained": 1}


def test_a_record_that_is_rejected_after_it_was_delivered_is_a_duplicate_too() -> None:
    story = again(KNOWN)
    story[OTHER][1:] = [end(5_010, 1, "rejected"), told(5_011, "d1", "rejected", 2)]
    assert verdict(story, letters=[FIRST]).unexplained == 1


def test_one_digest_id_with_two_contents_is_a_finding() -> None:
    second = [begin(200, 2, "d1", [FIRST], attempt=2), end(210, 2), told(211, "d1", attempt=2)]
    found = verdict({PRODUCER: [stored(1)], WORKER: [*call("raised", "failed", records=2), *second]})
    assert [finding.partition(":")[0] for finding in found.findings] == [
        "digest d1 had 2 records of 'timeline', and then 1 of 'timeline', or others"
    ]


@pytest.mark.parametrize(
    ("old_at", "second", "is_late"),
    [
        (5_000, "stored", True),
        (5_000, "unknown", False),  # then nobody knows which of the two came last
        (50, "stored", False),
        (None, "stored", False),
    ],
    ids=["late", "replaced by nothing known", "in its time", "never"],
)
def test_what_comes_later_than_what_had_replaced_it_is_a_finding(
    old_at: int | None, second: str, is_late: bool
) -> None:
    added = [stored(1, "unknown"), line("again", 11, FIRST + 1, [FIRST]), stored(1, second, FIRST + 1)]
    old = [] if old_at is None else call("returned", "delivered", digest="d0", at=old_at, number=1)
    new = [begin(100, 2, "d2", [FIRST + 1]), end(110, 2), told(111, "d2")]
    found = verdict({PRODUCER: added, WORKER: [*old, *new]})
    assert found.findings == ([LATE] if is_late else [])


HELD_BACK = fault(2_000, 4_500, 1, "proxy: late", where="proxy 0")
STEP = fault(1_000, 1_100, 2, STEP_BACK)
FAILED = line("unknown", 1_500, FIRST + 9, FIRST + 9, 0.1)


@pytest.mark.parametrize("does_newer_come", [True, False])
@pytest.mark.parametrize(
    ("master", "before", "is_let_through"),
    [
        ([*HELD_BACK, *STEP], [], True),
        ([*HELD_BACK, *fault(3_000, 3_100, 2, STEP_BACK)], [], True),
        (HELD_BACK, [], False),
        (STEP, [], False),
        ([*fault(2_000, 3_000, 1, "proxy: late", where="proxy 0"), *STEP], [], False),
        ([*fault(2_000, 4_500, 1, "proxy: late", where="proxy 1"), *STEP], [], False),
        ([*HELD_BACK, *STEP], [FAILED], False),
    ],
    ids=["held back after a step", "held back during a step", "no step", "not held back", "held back for less",
         "another proxy", "the time was asked for since"],
)  # fmt: skip
def test_a_late_add_may_take_the_place_of_what_replaced_it_after_a_step_of_the_clock_alone(
    master: list[Line], before: list[Line], is_let_through: bool, does_newer_come: bool
) -> None:
    added = [*before, line("unknown", 4_000, FIRST, FIRST, 2.0), line("again", 4_001, FIRST + 1, [FIRST])]
    added.append(line("stored", 4_100, FIRST + 1, FIRST + 1, 0.1))
    newer = [begin(4_200, 1, "d1", [FIRST + 1]), end(4_210, 1), told(4_211, "d1")] if does_newer_come else []
    older = [begin(5_000, 2, "d2", [FIRST]), end(5_010, 2), told(5_011, "d2")]
    story = {PRODUCER: added, WORKER: [*newer, *older]}
    found = verdict(story, *master, ways=("proxy 0", "socket", "socket"))
    assert (found.let_through, found.is_good) == (int(is_let_through), is_let_through)


@pytest.mark.parametrize(
    ("master", "added_at", "may_be"),
    [
        ([*HELD_BACK, *STEP], 4_100, True),
        ([*HELD_BACK, *fault(4_200, 4_300, 2, STEP_BACK)], 4_100, True),
        (HELD_BACK, 4_100, False),
        ([*HELD_BACK, *STEP], 4_900, False),
        ([*HELD_BACK, *fault(4_600, 4_700, 2, STEP_BACK)], 4_100, False),
    ],
    ids=["held back after a step", "held back during a step", "no step", "added after that", "a step after that"],
)
def test_a_late_delete_may_take_what_was_added_after_it_after_a_step_of_the_clock_alone(
    master: list[Line], added_at: float, may_be: bool
) -> None:
    added = [line("after delete", added_at - 10, 2_000_000_000, FIRST), line("stored", added_at, FIRST, FIRST, 0.001)]
    found = verdict({PRODUCER: added}, *master, ways=("proxy 0", "socket", "socket"))
    assert found.findings == ([] if may_be else [LOST.format(0)])
    assert found.let_through == may_be


@pytest.mark.parametrize(
    ("more", "overlaps"),
    [
        ([end(3_100, 1, "cut")], {"unexplained": 1}),
        ([line("still", 3_050, 2.9), end(3_100, 1, "cut")], {"a worker stood still": 1}),
        # a worker that moves again must not go on with what it lost
        ([line("still", 2_600, 2.4), end(3_100, 1, "cut")], {"unexplained": 1}),
        ([], {}),  # it was killed
    ],
)
def test_a_timeline_with_two_workers_is_a_finding(more: list[Line], overlaps: dict[str, int]) -> None:
    first = [begin(100, 1, "d1", [FIRST]), *more]
    second = [begin(2_500, 1, "d1", [FIRST], attempt=2), end(3_000, 1), told(3_001, "d1", attempt=2)]
    master = [] if more else [line("exit", 2_000, WORKER, "killed", 1_900 * 10**6)]
    found = verdict({PRODUCER: [stored(1)], WORKER: first, OTHER: second}, *master)
    assert found.overlaps == overlaps
    if len(more) == 1:
        assert found.findings[0].startswith("'timeline' was with two workers for 0.500 s")


def test_recovery_is_the_time_from_the_end_of_a_fault_to_what_works_again_unless_another_follows_at_once() -> None:
    story = {PRODUCER: [line("stored", 900, FIRST, FIRST, 0.001)], WORKER: call()}
    found = verdict(story, *fault(20, 50)).recoveries["server: kill -9"]
    assert (found.adds, found.callbacks) == (pytest.approx([0.85]), pytest.approx([0.05]))
    found = verdict(story, *fault(20, 50), *fault(60, 90, 2, "server: OOM")).recoveries["server: kill -9"]
    assert found.callbacks == []


def test_the_longest_silence_is_told_with_the_faults_that_it_met() -> None:
    later = [begin(9_100, 2, "d2", [FIRST + 1]), end(9_110, 2), told(9_111, "d2")]
    found = verdict({PRODUCER: [stored(2)], WORKER: [*call(), *later]}, *fault(200, 250))
    assert found.silence == pytest.approx(9.0)
    assert found.silence_during == ["server: kill -9"]


def test_the_same_seed_is_the_same_plan() -> None:
    assert list(islice(plan(7), 500)) == list(islice(plan(7), 500))
    assert list(islice(plan(7), 500)) != list(islice(plan(8), 500))


def test_no_timeline_of_a_long_run_can_be_full_even_if_nothing_is_ever_delivered() -> None:
    random = Random(7)
    drawn = Counter(key_of(random, stored) for stored in range(200_000))
    assert {key for key in drawn if key.startswith("hot")} == {f"hot {number}" for number in range(5)}
    assert max(drawn.values()) < 0.7 * PLAIN.capacity


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_comes_soon_and_lasts_as_long_as_it_may(seed: int) -> None:
    first = list(islice(plan(seed), len(KINDS)))
    assert {planned.kind for planned in first} == KINDS.keys()
    assert sum(planned.gap for planned in first) <= len(KINDS) * LONGEST_GAP < 60
    assert all(KINDS[planned.kind][0] <= planned.lasts <= KINDS[planned.kind][1] for planned in first)


LARGE = next(key for key in names() if policy_of(key).max_bytes)


@pytest.mark.parametrize(
    ("key", "at", "records", "what"),
    [
        ("ruled 4", 30_000, 1, "was begun in closed hours"),
        ("ruled 4", 61_000, 1, ""),
        ("ruled 3", 59_000, 1, "was begun before an instant of its calendar"),
        ("ruled 3", 60_500, 1, ""),
        ("ruled 1", 100, 1, "was begun 0.091 s after its first record"),
        ("ruled 1", 5_000, 1, ""),
        (LARGE, 5_000, 10, f"holds more than {policy_of(LARGE).max_bytes} bytes"),
        (LARGE, 5_000, 1, ""),
        ("timeline", 100, 10, ""),
    ],
)
def test_a_digest_that_breaks_a_rule_of_its_timeline_is_a_finding(key: str, at: int, records: int, what: str) -> None:
    came = [begin(at, 1, "d1", [*range(FIRST, FIRST + records)], key=key), end(at + 10, 1), told(at + 11, "d1")]
    found = verdict({PRODUCER: [stored(records)], WORKER: came}).findings
    assert len(found) == bool(what)
    assert not what or what in found[0]
    still = line("still", at + 100, 0.2)
    assert not what or "bytes" in what or not verdict({PRODUCER: [stored(records)], WORKER: [*came, still]}).findings


@pytest.mark.parametrize(
    ("first", "second", "key", "what"),
    [
        (100, 10_000, "ruled 12", "came within the window of its id"),
        (100, 31_000, "ruled 12", ""),
        (100, 10_000, "ruled 0", ""),  # which has no window
        (100, None, "ruled 12", ""),
        (100, None, "ruled 0", "records were lost"),
        (None, 10_000, "ruled 0", ""),  # the second has replaced the first
        (None, None, "ruled 12", "records were lost"),
    ],
)
def test_an_id_that_is_added_twice_comes_again_only_after_its_window(
    first: int | None, second: int | None, key: str, what: str
) -> None:
    came = [
        each
        for number, at in enumerate((first, second))
        if at is not None
        for each in (
            begin(at, number, f"d{number}", [FIRST + number], key=key),
            end(at + 10, number),
            told(at + 11, f"d{number}"),
        )
    ]
    added = [stored(2), line("twice", 9, FIRST + 1, [FIRST])]
    found = verdict({PRODUCER: added, WORKER: came}).findings
    assert len(found) == bool(what)
    assert not what or what in found[0]


async def test_a_request_that_is_late_arrives_although_its_client_has_gone() -> None:
    got, ended = list[bytes](), list[None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(100):
            got.append(some)
        writer.close()
        ended.append(None)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        parts = urlsplit(proxy.url)
        with socket.create_connection((parts.hostname, parts.port)) as old:
            old.sendall(b"first")
            await until(lambda: got == [b"first"])
            proxy.set("late")
            old.sendall(b"old")
            await until(lambda: proxy.affected > 0)
            old.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        with socket.create_connection((parts.hostname, parts.port)) as new:
            new.sendall(b"new")
            await until(lambda: got == [b"first", b"new"])
            proxy.set("pass")
            await until(lambda: got == [b"first", b"new", b"old"])
        await until(lambda: len(ended) == 2)


def clustered(first: list[Line], digest: str, second_at: float = 5_000, *, at_slot: bool = True) -> Verdict:
    """A record that a worker got, and then another one, while the primary of its shard was lost at 120 ms."""
    loss = [
        line("fault", 50, 1, "primary: SIGSTOP until it is none", "cluster", None, None, None),
        line("hit", 120, 1, [shard_of("cluster", "timeline")] if at_slot else []),
        line("forgot", 125, 1, 90_000_000),
        line("over", 1_500, 1, ""),
        line("stale", 2_100, 1, 2_000_000_000),
    ]
    return verdict(again(first, digest, at=second_at), *loss, store="cluster", ways=("cluster",) * 3)


@pytest.mark.parametrize(
    ("first", "digest", "options", "why"),
    [
        pytest.param(call(), "d1", {}, "a failover forgot the close", id="it was told the close at its end"),
        pytest.param(call(), "d2", {}, "a failover forgot the claim", id="it gave the claim at its end"),
        pytest.param(call(at=60), "d2", {"second_at": 2_050}, "an old primary gave it", id="it came back"),
        pytest.param(call(at=2_150), "d1", {}, "an old primary took the close", id="it was told when it came back"),
        pytest.param(call(at=60), "d1", {}, None, id="its replica was told too"),
        pytest.param(call(at=2_700), "d1", {}, None, id="it was another primary's by then"),
        pytest.param(call(), "d1", {"at_slot": False}, None, id="it was another primary"),
    ],
)
def test_a_lost_primary_may_forget_its_end_and_nothing_else(
    first: list[Line], digest: str, options: dict[str, Any], why: str | None
) -> None:
    found = clustered(first, digest, **options)
    assert found.unexplained == (why is None)
    assert why is None or found.duplicates == {why: 1}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_digest_that_is_tried_again_after_a_crash_is_known_by_its_line_in_the_log(lost: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    handler, logger = Faults(Journal(path)), logging.getLogger("aiodigest")
    logger.addHandler(handler)
    try:
        log_doubt(Lease("k", "t", "digest", 1, 1, 0, 0, 1, lost=lost))
    finally:
        logger.removeHandler(handler)
    assert [[kind, *facts] for kind, _, *facts in read(path)] == [["doubted", "digest"]]


@pytest.mark.parametrize("status", [None, 1], ids=["missing", "broken"])
def test_a_library_for_the_time_that_cannot_be_used_is_none(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status is not None:
        program = tmp_path / "faketime"
        program.write_text(f"#!/bin/sh\nexit {status}\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert time_library() == ""


# Mails


def accepted(
    digest: str = "d1", *, worker: int = WORKER, number: int = 1, records: int = 1, to: str = "timeline"
) -> Line:
    """Return what the mail server writes of a mail that a worker's call sent."""
    return line("accepted", 105, address_of(to), id_of(digest), worker, number, [*range(FIRST, FIRST + records)])


UNKNOWN = next(key for key in (f"timeline {number}" for number in range(100)) if is_unknown(address_of(key)))
NOT_ACCEPTED = "a callback has returned, and its mail was not accepted: worker 2"
WAS_ACCEPTED = "a callback told that its mail was not accepted, which it was: worker 2"
OF_OTHERS = "is not that of its callback for 'timeline': worker 2"
KNOWN_ADDRESS = "1 records are in dead letters, and their addresses are known: record 0 of producer 1"


@pytest.mark.parametrize(
    ("calls", "mails", "letters", "findings"),
    [
        pytest.param(call(), [accepted()], [], [], id="accepted"),
        pytest.param(call(), [], [], [LOST.format(0), NOT_ACCEPTED], id="its callback returned without a mail"),
        pytest.param(call("unknown", "unknown"), [], [], [LOST.format(0)], id="nobody knew, and nothing followed"),
        pytest.param(call("unknown", "unknown"), [accepted()], [], [], id="nobody knew, and it had been accepted"),
        pytest.param(call("raised", "failed"), [accepted()], [], [WAS_ACCEPTED], id="its callback raised"),
        pytest.param(call("cut"), [accepted()], [], [], id="its callback was cut"),
        pytest.param(call("rejected", "rejected"), [accepted()], [FIRST], [WAS_ACCEPTED, KNOWN_ADDRESS], id="rejected"),
        pytest.param(call("rejected", "rejected"), [], [FIRST], [KNOWN_ADDRESS], id="a known address was rejected"),
        pytest.param([], [], [FIRST], [KNOWN_ADDRESS], id="a dead letter that no callback had"),
        pytest.param(call(), [accepted(), accepted()], [], ["a callback has sent its mail 2 times"], id="sent twice"),
        pytest.param(call(), [accepted("d2")], [], [OF_OTHERS], id="another Message-ID than the digest's"),
        pytest.param(call(), [accepted(to="hot")], [], [OF_OTHERS], id="another address"),
        pytest.param(call(records=2), [accepted()], [], [OF_OTHERS], id="it held less"),
        pytest.param(call(), [accepted(), accepted("d9", number=9)], [], ["is of no callback"], id="from nowhere"),
    ],
)
def test_what_became_of_a_record_that_was_to_be_mailed(
    calls: list[Line], mails: list[Line], letters: list[int], findings: list[str]
) -> None:
    found = verdict({PRODUCER: [stored(1)], WORKER: calls}, letters=letters, mails=mails)
    assert len(found.findings) == len(findings), found.findings
    assert all(expected in finding for expected, finding in zip(findings, found.findings, strict=True)), found.findings


@pytest.mark.parametrize(
    ("letters", "finding"),
    [
        ([FIRST], None),
        ([FIRST, FIRST], "1 records are in more than one dead letter: record 0 of producer 1"),
        ([], LOST.format(0)),
    ],
    ids=["one dead letter", "two", "none"],
)
def test_a_record_of_an_unknown_address_ends_in_one_dead_letter(letters: list[int], finding: str | None) -> None:
    calls = [begin(100, 1, "d1", [FIRST], key=UNKNOWN), end(110, 1, "rejected"), told(111, "d1", "rejected")]
    found = verdict({PRODUCER: [stored(1)], WORKER: calls}, letters=letters, mails=[])
    assert found.findings == ([finding] if finding else [])


CUT_BY_DRAIN = line("exit", 1_500, WORKER, "ended", 1_400 * 10**6)


@pytest.mark.parametrize(
    ("story", "second", "master", "why"),
    [
        (again(call("unknown", "unknown")), "d1", [], "its outcome was unknown"),
        (again(call("unknown")), "d1", [KILLED], "the worker was killed"),
        (again(call("cut"), at=300), "d1", [CUT_BY_DRAIN], "the worker's drain cut it"),
        (again(call("cut"), at=300), "d1", [], None),
        (again(call("cut", "timeout")), "d1", [], "its outcome was unknown"),
        (again(call("unknown", "unknown"), "d2"), "d2", [], None),
        (again(KNOWN), "d1", [], None),
    ],
    ids=["nobody knew", "its worker was killed", "its worker left", "nothing had cut it", "its time was over",
         "another Message-ID", "the store knew it to be delivered"],
)  # fmt: skip
def test_a_record_that_comes_in_two_mails_is_explained_as_any_that_comes_twice(
    story: Story, second: str, master: list[Line], why: str | None
) -> None:
    found = verdict(story, *master, mails=[accepted(), accepted(second, worker=OTHER)])
    assert (found.duplicated, found.mails, found.repeated) == (1, 2, int(second == "d1"))
    assert (found.renamed, found.unexplained, found.is_good) == (int(second == "d2"), int(why is None), why is not None)
    assert why is None or found.duplicates == {why: 1}


def test_answers_in_place_of_a_mail_are_counted_by_their_kind() -> None:
    found = verdict({}, mails=[line("answered", 5, code) for code in (451, 451, 550)])
    assert (found.mails, found.deferred, found.refused_mails) == (0, 2, 1)


def test_where_callbacks_send_mails_the_plan_has_the_mail_servers_faults_in_place_of_theirs() -> None:
    kinds = with_mails(KINDS)
    assert kinds.keys() - KINDS.keys() == MAIL_KINDS.keys()
    assert KINDS.keys() - kinds.keys() == {"callbacks raise", "callbacks hang"}


async def sent(smtp: SMTP, key: str, digest: str = "d1") -> type[Exception] | None:
    """Send a record, and return the kind of error that ends it."""
    try:
        await smtp(Digest(key, [Record("1", FIRST, datetime(2030, 1, 1, tzinfo=UTC))], digest))
    except Exception as error:
        return type(error)
    return None


def mailed(digest: str) -> list[Any]:
    return [address_of("timeline"), id_of(digest), WORKER, 1, [FIRST]]


@pytest.mark.processes
async def test_the_mail_server_writes_down_each_mail_that_it_accepts_and_dies_as_it_is_told(tmp_path: Path) -> None:
    server = MailServer(tmp_path)

    def accepted() -> list[list[Any]]:
        lines = [line for path in tmp_path.glob(MAILS.format("*")) for line in read(path)]
        return [facts for kind, _, *facts in lines if kind == "accepted"]

    await server.start()
    sending.set((WORKER, 1))
    try:
        async with channel(server.port) as smtp:
            ends = [await sent(smtp, "timeline") for _ in range(9)]
            assert ends == [None, None, ChannelError] * 3
            assert await sent(smtp, UNKNOWN) is Reject
            assert accepted() == [mailed("d1")] * 6
            for manner, is_accepted in (("dies after the end", True), ("dies in the middle", False)):
                server.behave(manner)
                tries = (f"{manner[-3:]}{number}" for number in count())
                async with asyncio.timeout(60):
                    while await sent(smtp, "timeline", digest := next(tries)) is not OutcomeUnknown:
                        pass  # it has not heard yet
                assert await server.dies(within=60)
                assert (mailed(digest) in accepted()) is is_accepted
                await server.start()
    finally:
        await server.kill()
