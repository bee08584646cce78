"""The chaos program judges others, so it is judged here: hand-made journals with a fault each, which it must find."""

from __future__ import annotations

from itertools import islice

import pytest

from chaos.evidence import Evidence, of_master, of_process
from chaos.journal import Line
from chaos.plan import KINDS, LONGEST_GAP, plan
from chaos.process import SPAN, shard_of
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


def evidence(story: Story, *master: Line, letters: list[int] | None = None, held: list[int] | None = None) -> Evidence:
    given_up = {"dropped": 0, "aged": 0, "expired": 0}
    facts = of_master(
        [
            line("start", 0, PRODUCER, "producer", 0, "main", "socket"),
            line("start", 0, WORKER, "worker", 0, "main", "socket"),
            line("start", 0, OTHER, "worker", 1, "main", "proxy 0"),
            *master,
            line("stop", 60_000),
            line("audit", 61_000, "main", letters or [], held or [], given_up),
        ]
    )
    for incarnation, lines in story.items():
        of_process(facts, incarnation, lines)
    facts.calls.sort(key=lambda call: call.begun)
    return facts


def verdict(story: Story, *master: Line, letters: list[int] | None = None, held: list[int] | None = None) -> Verdict:
    return judge(evidence(story, *master, letters=letters, held=held))


def delivered(records: list[int]) -> list[Line]:
    return [begin(100, 1, "d1", records), end(110, 1), told(111, "d1")]


# Records


def test_a_run_in_which_all_went_well_is_good() -> None:
    found = verdict({PRODUCER: [stored(2)], WORKER: delivered([FIRST, FIRST + 1])})
    assert found.is_good
    assert (found.acknowledged, found.delivered, found.duplicated) == (2, 2, 0)


def test_a_record_that_no_callback_got_is_lost() -> None:
    found = verdict({PRODUCER: [stored(2)], WORKER: delivered([FIRST])})
    assert found.lost == [FIRST + 1]
    assert found.findings == ["1 records were lost: record 1 of producer 1"]


@pytest.mark.parametrize("how", ["raised", "cut", "rejected"])
def test_a_record_whose_callbacks_did_not_return_is_lost(how: str) -> None:
    found = verdict({PRODUCER: [stored(1)], WORKER: [begin(100, 1, "d1", [FIRST]), end(110, 1, how)]})
    assert found.lost == [FIRST]


def test_a_record_that_a_partial_failure_names_is_lost_unless_it_comes_again() -> None:
    partial = [begin(100, 1, "d1", [FIRST, FIRST + 1]), end(110, 1, "partial", [FIRST]), told(111, "d1", "partial")]
    assert verdict({PRODUCER: [stored(2)], WORKER: partial}).lost == [FIRST]
    again = [begin(200, 2, "d2", [FIRST]), end(210, 2), told(211, "d2")]
    assert verdict({PRODUCER: [stored(2)], WORKER: [*partial, *again]}).is_good


def test_a_record_in_a_dead_letter_is_not_lost() -> None:
    rejected = [begin(100, 1, "d1", [FIRST]), end(110, 1, "rejected"), told(111, "d1", "rejected")]
    assert verdict({PRODUCER: [stored(1)], WORKER: rejected}, letters=[FIRST]).is_good


def test_a_record_that_is_held_at_the_end_is_not_lost_but_a_finding() -> None:
    found = verdict({PRODUCER: [stored(1)]}, held=[FIRST])
    assert found.lost == []
    assert found.findings == ["1 records were still held at the end: record 0 of producer 1"]


def test_a_record_told_as_not_stored_that_comes_is_a_finding() -> None:
    found = verdict({PRODUCER: [stored(1, "no")], WORKER: delivered([FIRST])})
    assert found.findings == ["1 records were told as not stored, and came: record 0 of producer 1"]


def test_a_record_of_unknown_outcome_may_come_or_not() -> None:
    assert verdict({PRODUCER: [stored(2, "unknown")], WORKER: delivered([FIRST])}).is_good


def test_what_a_store_has_dropped_is_a_finding() -> None:
    facts = evidence({}, line("audit", 61_000, "embedded", [], [], {"dropped": 3}))
    assert judge(facts).findings == ["the embedded store has counted 3 records as dropped"]


def test_a_crash_is_a_finding() -> None:
    assert verdict({}, line("wrong", 5, "worker 2 has crashed")).findings == ["worker 2 has crashed"]


def test_a_kind_of_fault_that_never_had_an_effect_is_a_finding() -> None:
    idle = [
        written
        for number in range(3)
        for written in (
            line("fault", 5 + number, number, "server: OOM", "main", None, None, None),
            line("over", 6 + number, number, "nothing"),
        )
    ]
    assert verdict({}, *idle).findings == ["the fault 'server: OOM' had no effect, ever: nothing"]


# Duplicates


def again(first: list[Line], digest: str = "d1") -> Story:
    """A record that a worker got in whatever way, and then another one under a digest id."""
    second = [begin(5_000, 1, digest, [FIRST], attempt=2), end(5_010, 1), told(5_011, digest, attempt=2)]
    return {PRODUCER: [stored(1)], WORKER: first, OTHER: second}


RETURNED = [begin(100, 1, "d1", [FIRST]), end(110, 1)]
KILLED = line("exit", 120, WORKER, "killed", 115 * 10**6)


def test_a_duplicate_whose_first_worker_was_killed_is_explained() -> None:
    found = verdict(again(RETURNED), KILLED)
    assert found.is_good
    assert found.duplicated == 1
    assert found.duplicates == {"the worker was killed": 1}


def test_a_duplicate_under_another_digest_id_is_unexplained() -> None:
    found = verdict(again(RETURNED, digest="d2"), KILLED)
    assert (found.unexplained, found.is_good) == (1, False)


def test_a_duplicate_of_what_the_store_knew_to_be_delivered_is_unexplained() -> None:
    found = verdict(again([*RETURNED, told(112, "d1")]), KILLED)
    assert (found.unexplained, found.is_good) == (1, False)


def test_a_duplicate_for_which_nothing_accounts_is_unexplained() -> None:
    found = verdict(again(RETURNED))
    assert (found.unexplained, found.is_good) == (1, False)


def test_a_fault_of_others_explains_no_duplicate() -> None:
    elsewhere = line("fault", 105, 1, "proxy: cut", "main", "proxy 1", None, None), line("over", 500, 1, "")
    assert verdict(again(RETURNED), *elsewhere).unexplained == 1
    its_own = line("fault", 105, 1, "proxy: cut", "main", "socket", None, None), line("over", 500, 1, "")
    assert verdict(again(RETURNED), *its_own).duplicates == {"proxy: cut": 1}


def test_a_worker_that_stood_still_explains_a_duplicate() -> None:
    stopped = [begin(100, 1, "d1", [FIRST]), line("still", 4_000, 3.5), end(4_001, 1), told(4_002, "d1", "lost")]
    assert verdict(again(stopped)).duplicates == {"the worker stood still": 1}


def test_a_partial_failure_after_an_unknown_outcome_explains_a_duplicate() -> None:
    partial = [begin(300, 2, "d1", [FIRST], attempt=2), end(310, 2, "partial", []), told(311, "d1", "partial", 2)]
    lost = [begin(100, 1, "d1", [FIRST]), end(110, 1, "cut")]
    story = again([*lost, *partial])
    story[OTHER][0] = begin(5_000, 1, "d1", [FIRST], attempt=3)
    assert verdict(story).duplicates == {"kept whole after an unknown outcome before": 1}
    known = [begin(100, 1, "d1", [FIRST]), end(110, 1, "raised"), told(111, "d1", "failed")]
    story[WORKER] = [*known, *partial]
    assert verdict(story).unexplained == 1


def test_a_record_that_is_rejected_after_it_was_delivered_is_a_duplicate_too() -> None:
    story = again([*RETURNED, told(112, "d1")])
    story[OTHER][1:] = [end(5_010, 1, "rejected"), told(5_011, "d1", "rejected", 2)]
    assert verdict(story, letters=[FIRST]).unexplained == 1


# Digests


def test_one_digest_id_with_two_contents_is_a_finding() -> None:
    first = [begin(100, 1, "d1", [FIRST, FIRST + 1]), end(110, 1, "raised"), told(111, "d1", "failed")]
    second = [begin(200, 2, "d1", [FIRST], attempt=2), end(210, 2), told(211, "d1", attempt=2)]
    found = verdict({PRODUCER: [stored(1)], WORKER: [*first, *second]})
    assert [finding.partition(":")[0] for finding in found.findings] == [
        "digest d1 had 2 records of 'timeline', and then 1 of 'timeline', or others"
    ]


def overlapping(*more: Line) -> Story:
    """A worker begins a digest of a timeline while another one has its own."""
    first = [begin(100, 1, "d1", [FIRST]), *more, end(3_100, 1, "cut")]
    second = [begin(2_500, 1, "d1", [FIRST], attempt=2), end(3_000, 1), told(3_001, "d1", attempt=2)]
    return {PRODUCER: [stored(1)], WORKER: first, OTHER: second}


def test_a_timeline_that_two_workers_have_at_once_is_a_finding() -> None:
    found = verdict(overlapping())
    assert found.overlaps == {"unexplained": 1}
    assert found.findings[0].startswith("'timeline' was with two workers for 0.500 s")


def test_an_overlap_is_explained_while_the_first_worker_stands_still() -> None:
    assert verdict(overlapping(line("still", 3_050, 2.9))).overlaps == {"a worker stood still": 1}


def test_a_worker_that_moves_again_must_not_go_on_with_what_it_lost() -> None:
    assert verdict(overlapping(line("still", 2_600, 2.4))).overlaps == {"unexplained": 1}


def test_a_killed_worker_has_its_timelines_no_longer() -> None:
    story = overlapping()
    del story[WORKER][1:]
    assert verdict(story, line("exit", 2_000, WORKER, "killed", 1_900 * 10**6)).overlaps == {}


# Times


def test_recovery_is_the_time_from_the_end_of_a_fault_to_what_works_again() -> None:
    story = {PRODUCER: [line("stored", 900, FIRST, FIRST, 0.001)], WORKER: delivered([FIRST])}
    fault = line("fault", 20, 1, "server: kill -9", "main", None, None, None), line("over", 50, 1, "")
    found = verdict(story, *fault).recoveries["server: kill -9"]
    assert found.adds == pytest.approx([0.85])
    assert found.callbacks == pytest.approx([0.05])


def test_a_fault_that_another_one_follows_at_once_tells_nothing_of_recovery() -> None:
    fault = line("fault", 20, 1, "server: kill -9", "main", None, None, None), line("over", 50, 1, "")
    other = line("fault", 60, 2, "server: OOM", "main", None, None, None), line("over", 90, 2, "")
    found = verdict({PRODUCER: [stored(1)], WORKER: delivered([FIRST])}, *fault, *other)
    assert found.recoveries["server: kill -9"].callbacks == []


def test_the_longest_silence_is_told_with_the_faults_that_it_met() -> None:
    later = [begin(9_100, 2, "d2", [FIRST + 1]), end(9_110, 2), told(9_111, "d2")]
    fault = line("fault", 200, 1, "server: kill -9", "main", None, None, None), line("over", 250, 1, "")
    found = verdict({PRODUCER: [stored(2)], WORKER: [*delivered([FIRST]), *later]}, *fault)
    assert found.silence == pytest.approx(9.0)
    assert found.silence_during == ["server: kill -9"]


# The plan


def test_the_same_seed_is_the_same_plan() -> None:
    assert list(islice(plan(7), 500)) == list(islice(plan(7), 500))
    assert list(islice(plan(7), 500)) != list(islice(plan(8), 500))


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_fault_comes_soon(seed: int) -> None:
    """In the first round, which takes a small part of two minutes."""
    first = list(islice(plan(seed), len(KINDS)))
    assert {planned.kind for planned in first} == KINDS.keys()
    assert sum(planned.gap for planned in first) <= len(KINDS) * LONGEST_GAP < 60


def test_faults_last_as_long_as_their_kind_allows() -> None:
    for planned in islice(plan(1), 500):
        shortest, longest = KINDS[planned.kind]
        assert shortest <= planned.lasts <= longest


# A cluster


def clustered(first: list[Line], digest: str, second_at: float = 5_000, *, at_slot: bool = True) -> Verdict:
    """A record that a worker got, and then another one, while the primary of its shard was lost at 120 ms."""
    shards = [shard_of("cluster", "timeline")] if at_slot else []
    loss = [
        line("fault", 50, 1, "primary: SIGSTOP until it is none", "cluster", None, None, None),
        line("hit", 120, 1, shards),
        line("forgot", 120, 1),
        line("over", 1_500, 1, ""),
        line("stale", 2_000, 1),
    ]
    starts = [
        line("start", 0, number, role, 0, "cluster", "cluster")
        for number, role in ((PRODUCER, "producer"), (WORKER, "worker"), (OTHER, "worker"))
    ]
    facts = of_master([*starts, *loss, line("stop", 60_000)])
    second = [
        begin(second_at, 1, digest, [FIRST], attempt=2),
        end(second_at + 10, 1),
        told(second_at + 11, digest, attempt=2),
    ]
    for incarnation, lines in {PRODUCER: [stored(1)], WORKER: first, OTHER: second}.items():
        of_process(facts, incarnation, lines)
    facts.calls.sort(key=lambda call: call.begun)
    return judge(facts)


KNOWN = [*RETURNED, told(112, "d1")]


def test_a_close_that_a_lost_primary_was_told_at_its_end_may_be_forgotten() -> None:
    assert clustered(KNOWN, "d1").duplicates == {"a failover forgot the close": 1}


def test_a_claim_that_a_lost_primary_gave_at_its_end_may_be_forgotten() -> None:
    assert clustered(KNOWN, "d2").duplicates == {"a failover forgot the claim": 1}


def test_a_primary_that_comes_back_may_give_what_was_delivered() -> None:
    early = [begin(900, 1, "d1", [FIRST]), end(910, 1), told(911, "d1")]
    assert clustered(early, "d2", second_at=2_050).duplicates == {"an old primary gave it": 1}


def test_what_was_told_long_before_a_failover_is_not_forgotten() -> None:
    early = [begin(900, 1, "d1", [FIRST]), end(910, 1), told(911, "d1")]
    assert clustered(early, "d1", second_at=4_000).unexplained == 1


def test_the_loss_of_another_primary_explains_nothing() -> None:
    assert clustered(KNOWN, "d1", at_slot=False).unexplained == 1
