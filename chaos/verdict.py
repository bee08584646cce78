"""What became of every record. Pure: facts in, findings out.

A record is lost if its add was acknowledged, and no callback that got it has returned (or raised a PartialFailure that
spared it), and it is in no dead letter. A record is duplicated if two calls have completed or rejected it; that is
explained if both were of the same digest id, and the store cannot have learned how the earlier one ended, for a reason
that is found in the journals. Only of what a lost primary of a cluster was told at its very end may the id be another.

Where callbacks send mails, the mail server's word counts and not theirs: a call has completed its records if a mail of
it was accepted, whatever it was told. No record of an address that the server has may be in a dead letter.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import TypeAlias

from chaos.evidence import Call, Evidence, Fault, Interval, Process
from chaos.mail import address_of, id_of, is_unknown
from chaos.plan import LEASE, MINUTE, STEP_BACK, TIMEOUT
from chaos.process import SPAN
from chaos.rules import broken, policy_of

KNOWN = {"delivered", "rejected", "buried", "empty"}  # the store has closed the digest
SHOWN = 10
EARLIER = 1.5 * LEASE  # so long before a callback its lease may have been claimed, and a fault have begun to matter
LEAVING = 2.0  # so long after it has cut its callbacks a worker may end
LATE = 0.1  # so long before the end of its time a request may have arrived, as far as journals tell
LAG = 0.5  # so long after a former primary has become a replica, something it had answered may be read
REACTION = 0.25  # how long a loop that moves again needs until its callbacks are cancelled


Times: TypeAlias = "dict[tuple[Process, int | None], array[float]]"
"""When something happened in each process: in all, and in each shard of a cluster."""


@dataclass(slots=True)
class Recovery:
    """How long after each fault of a kind the first add was acknowledged, and the first callback begun.

    Only of those faults that were not overlapped or followed by another one with the same victims before that.
    """

    count: int = 0
    idle: list[str] = field(default_factory=list[str])  # why nothing came of so many of them
    adds: list[float] = field(default_factory=list[float])
    callbacks: list[float] = field(default_factory=list[float])


@dataclass(slots=True)
class Verdict:
    acknowledged: int = 0
    refused: int = 0
    unknown: int = 0
    unknown_delivered: int = 0
    delivered: int = 0
    in_letters: int = 0
    mails: int | None = None  # that were accepted; None if there was no mail server
    repeated: int = 0  # of these, under a Message-ID that had been accepted before
    renamed: int = 0  # records that were accepted under two
    deferred: int = 0  # answers of 4xx
    refused_mails: int = 0  # answers of 5xx
    held: int = 0
    digests: int = 0
    calls: int = 0
    duplicated: int = 0
    duplicates: Counter[str] = field(default_factory=Counter[str])  # records, by explanation
    overlaps: Counter[str] = field(default_factory=Counter[str])  # calls, by explanation
    lost: list[int] = field(default_factory=list[int])
    let_through: int = 0  # records that a call took away which came late, as the server's clock had gone back
    findings: list[str] = field(default_factory=list[str])
    recoveries: dict[str, Recovery] = field(default_factory=lambda: defaultdict[str, Recovery](Recovery))
    longest_add: float = 0.0
    silence: float = 0.0
    silence_during: list[str] = field(default_factory=list[str])
    shard_silence: float = 0.0  # of one shard of a cluster
    shard_silence_during: list[str] = field(default_factory=list[str])

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.findings

    @property
    def unexplained(self) -> int:
        return self.duplicates["unexplained"]


def judge(evidence: Evidence) -> Verdict:
    verdict = Verdict(findings=list(evidence.wrong))
    account(evidence, verdict)
    find_late(evidence, verdict)
    find_broken_rules(evidence, verdict)
    compare_contents(evidence, verdict)
    account_mails(evidence, verdict)
    find_overlaps(evidence, verdict)
    measure(evidence, verdict)
    return verdict


def named(record: int) -> str:
    return f"record {record % SPAN} of producer {record // SPAN}"


def told(call: Call) -> str:
    return (
        f"worker {call.process.incarnation} at {call.begun:.3f} (attempt {call.attempt}, {call.how or 'no end'}"
        f"{f', told as {call.told}' if call.told else ''}, digest {call.digest})"
    )


def numbers(evidence: Evidence, answer: str) -> Iterator[int]:
    for added in evidence.added:
        if added.told == answer:
            yield from range(added.first, added.last + 1)


def some(what: str, records: Iterable[int]) -> list[str]:
    """One finding for some records, naming the first few of them."""
    listed = sorted(records)
    if not listed:
        return []
    return [f"{len(listed)} {what}: {'; '.join(named(record) for record in listed[:SHOWN])}"]


# Records


def account(evidence: Evidence, verdict: Verdict) -> None:
    settled: dict[int, Call] = {}
    again: dict[tuple[Call, Call], list[int]] = defaultdict(list)
    duplicated: set[int] = set()
    for call in evidence.calls:
        for record in call.settled:
            before = settled.get(record)
            if before is not None:
                duplicated.add(record)
                again[before, call].append(record)
            settled[record] = call
    completed = {record for call in evidence.calls for record in call.completed}
    letters = {record for audit in evidence.audits for record in audit.letters}
    held = {record for audit in evidence.audits for record in audit.held}
    begun = {record for call in evidence.calls for record in call.records}
    counted = {record for call in evidence.calls if policy_of(call.key).dedupe_window for record in call.completed}
    known = accounted(of_one_id(evidence), completed | letters | held, counted)
    for record in numbers(evidence, "stored"):
        verdict.acknowledged += 1
        if record not in known and record not in completed and record not in letters and record not in held:
            verdict.lost.append(record)
    late = replaced_late(evidence, verdict.lost, begun | letters) | deleted_late(evidence, verdict.lost)
    verdict.lost, verdict.let_through = [record for record in verdict.lost if record not in late], len(late)
    refused = set(numbers(evidence, "no"))
    unknown = set(numbers(evidence, "unknown"))
    verdict.refused, verdict.unknown = len(refused), len(unknown)
    verdict.unknown_delivered = len(unknown & completed)
    verdict.delivered, verdict.in_letters, verdict.held = len(completed), len(letters), len(held)
    verdict.duplicated = len(duplicated)
    verdict.findings += some("records were lost", verdict.lost)
    verdict.findings += some("records were told as not stored, and came", refused & begun)
    verdict.findings += some("records were still held at the end", held)
    for audit in evidence.audits:
        for name, count in audit.given_up.items():
            if count:
                verdict.findings.append(f"the {audit.store} store has counted {count} records as {name}")
    explain_duplicates(evidence, verdict, again)


def of_one_id(evidence: Evidence) -> dict[int, list[int]]:
    """The records whose ids were added more than once, each with all that have its id, in the order of their adds."""
    groups: dict[int, list[int]] = {}
    for before, after in sorted([*evidence.again, *evidence.twice]):
        group = groups.setdefault(before, [before])
        group.append(after)
        groups[after] = group
    return {record: sorted(group) for record, group in groups.items()}


def accounted(groups: dict[int, list[int]], came: set[int], counted: set[int]) -> set[int]:
    """Records that need not come: a later one of their id did, or an earlier one was delivered (``counted``) where that
    counts for a while."""
    return {
        record
        for record, group in groups.items()
        if any(other in came if other > record else other in counted for other in group if other != record)
    }


def replaced_late(evidence: Evidence, lost: Sequence[int], came: set[int]) -> set[int]:
    """The records of which nothing came but an earlier one of their id, whose add may have come after theirs."""
    groups, known = of_one_id(evidence), let_through(evidence) & came if lost else set[int]()
    return {record for record in lost if any(each in known for each in groups.get(record, ()) if each < record)}


def deleted_late(evidence: Evidence, lost: Iterable[int]) -> set[int]:
    """The records that a delete may have taken which was sent before them, and came after its time was over."""
    if not (gone := evidence.after_delete.keys() & set(lost)):
        return set()
    failed = defaultdict[Process, list[float]](list)
    added = {record: each for each in evidence.added for record in range(each.first, each.last + 1) if record in gone}
    for each in sorted(evidence.added, key=lambda added: added.at):
        if each.told == "unknown":
            failed[each.process].append(each.at)
    found = set[int]()
    for record in gone:
        process, sent = evidence.after_delete[record]
        if added[record].at - added[record].took < arrival(evidence, process, sent, sent + TIMEOUT, failed[process]):
            found.add(record)
    return found


def let_through(evidence: Evidence) -> set[int]:
    """The records of unknown outcome that a server may have stored although their time was over."""
    found = set[int]()
    failed = defaultdict[Process, list[float]](list)
    for added in sorted(evidence.added, key=lambda added: added.at):
        if added.told == "unknown":
            before = failed[added.process]
            if arrival(evidence, added.process, added.at - added.took, added.at, before):
                found.update(range(added.first, added.last + 1))
            before.append(added.at)
    return found


def arrival(evidence: Evidence, process: Process, sent: float, over: float, failed: Sequence[float]) -> float:
    """Return the latest time at which a call may have arrived that was ``sent``, and was to be ``over`` before; or 0.

    A proxy held it back until then, and meanwhile, or since the process had asked for the time, the server's clock had
    gone back. A process asks once a minute and in each new connection, and has no others after a call has ``failed``.
    """
    asked = max(process.started, sent - MINUTE, *failed[: bisect_right(failed, sent)][-1:])
    faults = [fault for fault in evidence.faults if fault.concerns(process)]
    held = [fault.over for fault in faults if fault.path and fault.begun < over and fault.over > sent + TIMEOUT - LATE]
    latest = max(held, default=0.0)
    has_stepped = any(fault.kind == STEP_BACK and fault.over > asked and fault.begun < latest for fault in faults)
    return latest if has_stepped else 0.0


def find_broken_rules(evidence: Evidence, verdict: Verdict) -> None:
    """Find digests that were begun while their hours were closed, before they were due, or too large; and ids that came
    a second time within their window."""
    added = {record: each.at - each.took for each in evidence.added for record in range(each.first, each.last + 1)}
    groups, found, first = of_one_id(evidence), list[str](), dict[int, Call]()
    for call in evidence.calls:
        for record in call.completed:
            first.setdefault(record, call)
        moved = any(begun - REACTION < call.begun < ended + REACTION for begun, ended in call.process.still)
        if moved or not policy_of(call.key).needs:
            continue
        oldest = min(added.get(each, -inf) for record in call.records for each in groups.get(record, [record])[:1])
        wrong = broken(call.key, call.records, oldest + evidence.wall, call.begun + evidence.wall)
        found += [f"a digest of {call.key!r} {what}: {told(call)}" for what in wrong]
    for before, after in evidence.twice:
        one, other = first.get(before), first.get(after)
        if one is None or other is None or one.digest == other.digest or one.told != "delivered":
            continue
        is_within = one.begun < other.begun < one.ended + policy_of(one.key).terms.dedupe_ms / 1000
        if is_within and not forgotten(evidence, one, other):
            found.append(f"{named(after)} came within the window of its id: {told(one)}, then {told(other)}")
    verdict.findings += found[:SHOWN]


def find_late(evidence: Evidence, verdict: Verdict) -> None:
    """Find records that came for the first time after what had replaced them: nobody knew whether they were stored."""
    first: dict[int, Call] = {}
    for call in evidence.calls:
        for record in call.records:
            first.setdefault(record, call)
    stored = set(numbers(evidence, "stored"))
    late = [
        before
        for before, after in evidence.again
        if after in stored and before in first and after in first and first[before].begun > first[after].begun
        and not forgotten(evidence, first[after], first[before])
    ]  # fmt: skip
    known = let_through(evidence) if late else set[int]()
    verdict.let_through += len(known.intersection(late))
    late = [record for record in late if record not in known]
    verdict.findings += some("records came later than what had replaced them", late)


def explain_duplicates(evidence: Evidence, verdict: Verdict, again: dict[tuple[Call, Call], list[int]]) -> None:
    attempts: dict[str, list[Call]] = defaultdict(list)
    repeated = {call.digest for pair in again for call in pair}
    for call in evidence.calls:
        if call.digest in repeated:
            attempts[call.digest].append(call)
    unexplained: list[str] = []
    for pair, records in again.items():
        first, second = sorted(pair, key=lambda call: call.order)
        reason = "" if first.digest != second.digest else explanation(evidence, first, second, attempts[first.digest])
        reason = reason or forgotten(evidence, *pair)
        verdict.duplicates[reason or "unexplained"] += len(records)
        verdict.renamed += len(records) * (first.digest != second.digest)
        if not reason:
            unexplained.append(f"{named(records[0])} and {len(records) - 1} more came again: {told(first)}, then "
                               f"{told(second)}")  # fmt: skip
    verdict.findings += unexplained[:SHOWN]


def explanation(evidence: Evidence, first: Call, second: Call, attempts: list[Call]) -> str:
    """Why the store cannot have known that ``first`` had completed its records; '' if there is no reason."""
    if first.told in KNOWN:
        return ""
    if first.told in ("timeout", "unknown"):
        return "its outcome was unknown"
    if first.told == "partial":
        return "kept whole after an unknown outcome before" if is_frozen(evidence, first, attempts) else ""
    process = first.process
    since = min(first.begun, second.begun) - EARLIER
    until = max(first.told_at if first.told else first.over, second.begun)
    was_drained = first.how == "cut" and process.how == "ended" and process.ended - first.over < LEAVING
    if not first.told and (was_drained or first.begun <= process.ended <= until):
        return {"killed": "the worker was killed", "ended": "the worker's drain cut it"}.get(process.how, "")
    if any(begun < until and ended > since and ended - begun > LEASE / 2 for begun, ended in process.still):
        return "the worker stood still"
    broken = [
        fault
        for fault in evidence.faults
        if fault.begun < until and fault.over > since and fault.disturbs(first) and not fault.role
    ]
    # several may have: the one that left the least time to tell the store
    worst = max(broken, key=lambda fault: min(fault.over, until) - max(fault.begun, first.over), default=None)
    return worst.kind if worst is not None else ""


def forgotten(evidence: Evidence, first: Call, second: Call) -> str:
    """How a failover of a cluster accounts for a second call: of what a replica had not heard it knows nothing."""
    first, second = sorted((first, second), key=lambda call: call.begun)
    if first.digest == second.digest and (reason := forgotten_end(evidence, first)):
        return reason
    for fault in evidence.faults:
        if fault.disturbs(first):
            if fault.forgot < first.begun < fault.over:
                return "a failover forgot the claim"
            if is_in(fault.stale, first.begun) or is_in(fault.stale, second.begun):
                return "an old primary gave it"
    return ""


def forgotten_end(evidence: Evidence, call: Call) -> str:
    """How a failover accounts for that the store knows of a call, and not how it ended, though it was told."""
    for fault in evidence.faults:
        if fault.disturbs(call):
            if fault.forgot < call.told_at < fault.over:
                return "a failover forgot the close"
            if is_in(fault.stale, call.told_at):
                return "an old primary took the close"
    return ""


def is_in(interval: Interval, time: float) -> bool:
    begun, ended = interval
    return begun < time < ended + LAG


def is_frozen(evidence: Evidence, call: Call, attempts: list[Call]) -> bool:
    """Whether an attempt before this one had an unknown outcome, or was claimed by a worker that never heard of it."""
    before = [each for each in attempts if each.order < call.order]
    if len(before) < call.attempt - 1 or any(at < call.begun and each == call.digest for at, each in evidence.doubted):
        return True
    return any(each.told in ("", "timeout", "unknown", "lost") or forgotten_end(evidence, each) for each in before)


def compare_contents(evidence: Evidence, verdict: Verdict) -> None:
    contents: dict[str, Call] = {}
    for call in evidence.calls:
        known = contents.setdefault(call.digest, call)
        if known is not call and (known.key != call.key or sorted(known.records) != sorted(call.records)):
            verdict.findings.append(
                f"digest {call.digest} had {len(known.records)} records of {known.key!r}, "
                f"and then {len(call.records)} of {call.key!r}, or others: {told(known)}, then {told(call)}"
            )
    verdict.digests, verdict.calls = len(contents), len(evidence.calls)


# Mails


def account_mails(evidence: Evidence, verdict: Verdict) -> None:
    """Find mails that are not what was to be sent, callbacks that told otherwise of theirs, and dead letters that there
    may not be."""
    if evidence.mails is None:
        return
    verdict.mails = len(evidence.mails)
    verdict.repeated = len(evidence.mails) - len({mail.id for mail in evidence.mails})
    verdict.deferred = sum(count for code, count in evidence.answered.items() if code < 500)
    verdict.refused_mails = evidence.answered.total() - verdict.deferred
    found = list[str]()
    for mail in evidence.mails:
        call, what = mail.call, f"mail {mail.id} to {mail.recipient} with {len(mail.records)} records"
        if call is None:
            found.append(f"{what} is of no callback")
        elif (mail.recipient, mail.id, mail.records) != (address_of(call.key), id_of(call.digest), call.records):
            found.append(f"{what} is not that of its callback for {call.key!r}: {told(call)}")
    for call in evidence.calls:
        if call.how == "returned" and not call.accepted:
            found.append(f"a callback has returned, and its mail was not accepted: {told(call)}")
        elif call.how in ("raised", "rejected") and call.accepted:
            found.append(f"a callback told that its mail was not accepted, which it was: {told(call)}")
        elif call.accepted and call.accepted > 1:
            found.append(f"a callback has sent its mail {call.accepted} times: {told(call)}")
    verdict.findings += found[:SHOWN]
    letters = Counter(record for audit in evidence.audits for record in audit.letters)
    unknown = {each for call in evidence.calls if is_unknown(address_of(call.key)) for each in call.records}
    verdict.findings += some("records are in dead letters, and their addresses are known", letters.keys() - unknown)
    twice = [record for record, count in letters.items() if count > 1]
    verdict.findings += some("records are in more than one dead letter", twice)


# Overlaps


def find_overlaps(evidence: Evidence, verdict: Verdict) -> None:
    """One timeline is never with two workers, unless one of them could not notice that its lease had ended."""
    running: dict[tuple[str, str], list[Call]] = defaultdict(list)
    unexplained: list[str] = []
    for call in evidence.calls:
        under_way = running[call.process.store, call.key]
        under_way[:] = [other for other in under_way if other.over > call.begun]
        for other in under_way:
            end = min(other.over, call.over)
            stood = stood_still(other.process, call.begun, end) or stood_still(call.process, call.begun, end)
            reason = "a worker stood still" if stood else forgotten(evidence, other, call)
            verdict.overlaps[reason or "unexplained"] += 1
            if not reason:
                unexplained.append(f"{call.key!r} was with two workers for {end - call.begun:.3f} s: {told(other)}, "
                                   f"and {told(call)}")  # fmt: skip
        under_way.append(call)
    verdict.findings += unexplained[:SHOWN]


def stood_still(process: Process, since: float, until: float) -> bool:
    """Whether a process stood still when an overlap began, and the overlap ended as soon as it moved again."""
    return any(
        begun - REACTION <= since <= ended + REACTION and until <= ended + REACTION for begun, ended in process.still
    )


# Times


def measure(evidence: Evidence, verdict: Verdict) -> None:
    adds: Times = defaultdict(lambda: array("d"))
    callbacks: Times = defaultdict(lambda: array("d"))
    for added in evidence.added:
        verdict.longest_add = max(verdict.longest_add, added.took)
        if added.told == "stored":
            for shard in (None, *added.shards):
                adds[added.process, shard].append(added.at)
    for call in evidence.calls:
        for shard in {None, call.shard} if call.accepted != 0 else ():  # what sends mails works when one is accepted
            callbacks[call.process, shard].append(call.begun)
    for fault in evidence.faults:
        recovery = verdict.recoveries[fault.kind]
        recovery.count += 1
        if fault.idle:
            recovery.idle.append(fault.idle)
        else:
            others = [other for other in evidence.faults if other is not fault and other.covers(fault)]
            until = min((other.begun for other in others if other.over > fault.over), default=evidence.stopped)
            recovery.adds += first_after(fault, adds, until)
            recovery.callbacks += first_after(fault, callbacks, until)
    for kind, recovery in verdict.recoveries.items():
        if len(recovery.idle) == recovery.count > 2:
            verdict.findings.append(f"the fault {kind!r} had no effect, ever: {recovery.idle[0]}")
    verdict.silence, verdict.silence_during = silence(evidence)
    shards = {call.shard for call in evidence.calls} - {None}
    for lasted, during in (silence(evidence, shard) for shard in shards):
        if lasted > verdict.shard_silence:
            verdict.shard_silence, verdict.shard_silence_during = lasted, during


def silence(evidence: Evidence, shard: int | None = None) -> tuple[float, list[str]]:
    """The longest time between two callbacks, of one shard if one is named, and the faults that it met."""
    longest, since, until = 0.0, 0.0, 0.0
    begun = [call.begun for call in evidence.calls if shard is None or call.shard == shard]
    for before, after in pairwise(time for time in begun if time < evidence.stopped):
        if after - before > longest:
            longest, since, until = after - before, before, after
    met = [fault for fault in evidence.faults if fault.begun < until and fault.over > since]
    return longest, [fault.kind for fault in met if shard is None or fault.is_in(shard)]


def first_after(fault: Fault, times: Times, until: float) -> list[float]:
    """How long after a fault the first of some events came in a process that it had concerned; none if none did."""
    first: list[float] = []
    for (process, shard), moments in times.items():
        if fault.concerns(process) and (shard is None if fault.shards is None else fault.is_in(shard)):
            index = bisect_right(moments, fault.over)
            if index < len(moments) and moments[index] < until:
                first.append(moments[index] - fault.over)
    return [min(first)] if first else []
