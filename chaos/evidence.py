"""The journals of a run as facts that can be compared. Pure: lines in, facts out; times are seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from chaos.journal import Line, read
from chaos.mailserver import MAILS
from chaos.plan import BLOCK
from chaos.process import shard_of

# what JSON holds is known to whoever wrote it
Facts: TypeAlias = Any
Interval: TypeAlias = tuple[float, float]

MASTER = "master"
STARVED = 0.5  # seconds; what is shorter disturbs nobody


@dataclass(slots=True, eq=False)
class Process:
    """A producer or a worker, from its start to its end."""

    incarnation: int
    role: str
    slot: int
    store: str
    path: str
    started: float
    ended: float = inf
    how: str = ""  # "killed", "ended" on SIGTERM, "crashed"
    still: list[Interval] = field(default_factory=list[Interval])  # when its loop stood still


@dataclass(slots=True, eq=False)
class Call:
    """A call of the delivery callback. ``told`` is what the store knew of its outcome, as far as it was told."""

    process: Process
    number: int
    key: str
    digest: str
    attempt: int
    records: tuple[int, ...]
    begun: float
    ended: float = inf
    how: str = ""  # "returned", "partial", "raised", "unknown", "rejected", "cut"
    failed: frozenset[int] = frozenset()
    told: str = ""
    told_at: float = inf
    accepted: int | None = None  # so many mails of it, whatever it knew of that; None if it sends none

    @property
    def shard(self) -> int | None:
        return shard_of(self.process.store, self.key)

    @property
    def order(self) -> tuple[int, float]:
        """The order in which the attempts of one digest were claimed, which a stopped worker may begin out of turn."""
        return self.attempt, self.begun

    @property
    def over(self) -> float:
        """When it can have done no more."""
        return min(self.ended, self.process.ended)

    @property
    def completed(self) -> Iterable[int]:
        """The records that were delivered by it, as far as the receiver is concerned."""
        if self.accepted is not None:
            return self.records if self.accepted else ()
        if self.how == "returned":
            return self.records
        return [record for record in self.records if record not in self.failed] if self.how == "partial" else ()

    @property
    def settled(self) -> Iterable[int]:
        """The records that it wanted never to come again: those, or all of what it rejected."""
        return self.records if self.how == "rejected" else self.completed


@dataclass(frozen=True, slots=True)
class Added:
    """What a producer was told of the adds of ``first`` to ``last``: "stored", "no" or "unknown"."""

    process: Process
    told: str
    first: int
    last: int
    at: float
    took: float
    shards: Sequence[int] = ()  # of a cluster, to which they went


@dataclass(slots=True, eq=False)
class Fault:
    """A fault of the plan, and what it concerned: None is all of them."""

    number: int
    kind: str
    store: str | None
    path: str | None
    role: str | None
    slot: int | None
    begun: float
    over: float = inf
    idle: str = ""  # why nothing came of it
    shards: frozenset[int] | None = None  # of a cluster; None: all
    # since when what a primary was told may be lost with it, as its replica may not have heard of it
    forgot: float = inf
    stale: Interval = inf, inf  # when a former primary took itself for one

    def concerns(self, process: Process) -> bool:
        scope = (self.store, process.store), (self.path, process.path), (self.role, process.role)
        return all(own in (None, its) for own, its in (*scope, (self.slot, process.slot)))

    def is_in(self, shard: int | None) -> bool:
        return self.shards is None or shard in self.shards

    def disturbs(self, call: Call) -> bool:
        """Whether it concerns where a call came from."""
        return self.concerns(call.process) and self.is_in(call.shard)

    def covers(self, other: Fault) -> bool:
        """Whether it concerns all whom the other one does."""
        scope = (self.store, other.store), (self.path, other.path), (self.role, other.role), (self.slot, other.slot)
        shards = self.shards is None or (other.shards is not None and self.shards >= other.shards)
        return shards and all(own in (None, its) for own, its in scope)


@dataclass(frozen=True, slots=True)
class Audit:
    """What a store held at the end, and what it had counted as given up: dropped, aged, expired."""

    store: str
    letters: list[int]
    held: list[int]
    given_up: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Mail:
    """A mail that the mail server has accepted, and the call that sent it, as it says; None if there was none."""

    call: Call | None
    recipient: str
    id: str
    records: tuple[int, ...]


@dataclass(slots=True)
class Evidence:
    processes: dict[int, Process] = field(default_factory=dict[int, Process])
    calls: list[Call] = field(default_factory=list[Call])
    added: list[Added] = field(default_factory=list[Added])
    again: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # a record, and what replaced it
    faults: list[Fault] = field(default_factory=list[Fault])
    starved: list[Interval] = field(default_factory=list[Interval])  # when the program itself stood still
    audits: list[Audit] = field(default_factory=list[Audit])
    mails: list[Mail] | None = None  # None if there was no mail server
    answered: Counter[int] = field(default_factory=Counter[int])  # instead of accepting a mail, by the code
    doubted: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])  # when, and which digest
    # of each record that was added after a delete of unknown outcome, by whom and when that was sent
    after_delete: dict[int, tuple[Process, float]] = field(default_factory=dict[int, tuple[Process, float]])
    twice: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # the same, where nothing was wrong
    wall: float = 0.0  # how far this machine's clock is ahead of the journals'
    wrong: list[str] = field(default_factory=list[str])  # what must not happen at all, whatever became of the records
    begun: float = inf
    stopped: float = inf  # when the producers were told to stop


def load(folder: Path) -> Evidence:
    """What the journals in a folder say."""
    evidence = of_master(read(folder / f"{MASTER}.journal"))
    for incarnation in evidence.processes:
        path = folder / f"{incarnation}.journal"
        if path.exists():  # else it was killed before it wrote
            of_process(evidence, incarnation, read(path))
    evidence.calls.sort(key=lambda call: call.begun)
    if paths := [*folder.glob(MAILS.format("*"))]:
        of_mails(evidence, chain.from_iterable(map(read, paths)))
    return evidence


def of_master(lines: Iterable[Line]) -> Evidence:
    """What the program that ran all the others wrote: processes, faults, and the state at the end."""
    evidence = Evidence()
    faults: dict[int, Fault] = {}
    line: Facts
    for line in lines:
        kind, at, facts = line[0], line[1] / 1e9, line[2:]
        match kind:
            case "start":
                evidence.processes[facts[0]] = Process(*facts, started=at)
                evidence.begun = min(evidence.begun, at)
            case "exit":
                incarnation, how, ended = facts
                process = evidence.processes[incarnation]
                process.how, process.ended = how, ended / 1e9
            case "fault":
                faults[facts[0]] = Fault(*facts, begun=at)
            case "hit" | "forgot" | "stale" | "over":
                note(faults[facts[0]], kind, at, facts[1:])
            case "audit":
                evidence.audits.append(Audit(*facts))
            case "still":
                evidence.starved += [(at - facts[0], at)]
            case "stop":
                evidence.stopped, evidence.wall = at, facts[0] / 1e9 - at
            case _:
                evidence.wrong.append(str(facts[0]))
    evidence.faults = [*faults.values(), *of_starved(evidence)]
    note_stops(evidence)
    return evidence


def note_stops(evidence: Evidence) -> None:
    """Note for each process when it was stopped, of which it cannot write."""
    for fault in evidence.faults:
        if fault.kind == "worker: SIGSTOP past its lease":
            for process in evidence.processes.values():
                if fault.concerns(process) and process.started < fault.begun < process.ended:
                    process.still.append((fault.begun, fault.over))


def of_starved(evidence: Evidence) -> Iterable[Fault]:
    """Account for the program that runs all the others standing still: the proxies are in it."""
    paths = sorted({process.path for process in evidence.processes.values() if process.path.startswith("proxy")})
    for begun, over in evidence.starved:
        if over - begun > STARVED:
            yield from (Fault(0, "the proxies stood still", None, path, None, None, begun, over) for path in paths)


def note(fault: Fault, kind: str, at: float, facts: Sequence[Any]) -> None:
    """Add what is told of a fault while it lasts."""
    if kind == "hit":  # it had to wait until it could be inflicted
        fault.begun, fault.shards = at, frozenset(facts[0])
    elif kind == "forgot":
        fault.forgot = facts[0] / 1e9
    elif kind == "stale":
        fault.stale = facts[0] / 1e9, at
    else:  # the first end counts: things may be put in order after it
        fault.over, fault.idle = min(fault.over, at), facts[0]


def of_process(evidence: Evidence, incarnation: int, lines: Iterable[Line]) -> None:
    """What a producer or a worker wrote."""
    process = evidence.processes[incarnation]
    calls: dict[int, Call] = {}
    untold: dict[tuple[str, int], Call] = {}
    line: Facts
    for line in lines:
        kind, at, facts = line[0], line[1] / 1e9, line[2:]
        match kind:
            case "stored" | "no" | "unknown":
                evidence.added.append(Added(process, kind, facts[0], facts[1], at, *facts[2:]))
            case "again" | "twice":
                pairs = evidence.again if kind == "again" else evidence.twice
                pairs += zip(facts[1], count(facts[0]))
            case "begin":
                number, key, digest, attempt, records = facts
                call = calls[number] = Call(process, number, key, digest, attempt, tuple(records), at)
                untold[digest, attempt] = call
                evidence.calls.append(call)
            case "end":
                call = calls.pop(facts[0])
                call.ended, call.how, call.failed = at, facts[1], frozenset(facts[2])
            case "told":
                call = untold.pop((facts[0], facts[1]), None)  # none if it was too old, or empty, to be called
                if call is not None:
                    call.told, call.told_at = facts[2], at
            case "doubted" | "after delete":
                note_doubt(evidence, process, kind, at, facts)
            case "still":
                process.still.append((at - facts[0], at))
            case "block":  # of which it could not write the end if it was killed meanwhile
                process.still.append((at, min(at + BLOCK, process.ended)))
            case "wrong":
                evidence.wrong.append(f"{process.role} {process.incarnation}: {facts[0]}")
            case _:
                pass


def note_doubt(evidence: Evidence, process: Process, kind: str, at: float, facts: Sequence[Any]) -> None:
    """Add what is told of a digest, or of a delete, whose outcome nobody knows."""
    if kind == "doubted":
        evidence.doubted.append((at, facts[0]))
    else:
        evidence.after_delete[facts[1]] = process, facts[0] / 1e9


def of_mails(evidence: Evidence, lines: Iterable[Line]) -> None:
    """Read what the mail server wrote, one process after another. All calls are there by now."""
    calls = {(call.process.incarnation, call.number): call for call in evidence.calls}
    evidence.mails = []
    for call in evidence.calls:
        call.accepted = 0
    line: Facts
    for line in lines:
        if line[0] == "answered":
            evidence.answered[line[2]] += 1
            continue
        recipient, name, incarnation, number, records = line[2:]
        call = calls.get((incarnation, number))
        evidence.mails.append(Mail(call, recipient, name, tuple(records)))
        if call is not None:
            call.accepted = (call.accepted or 0) + 1
