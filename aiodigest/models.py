"""What users hold: records and digests, and views of what the store keeps. All are frozen.

The generic ones have no slots: with them Python 3.11 refuses ``Digest[int](...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias
from uuid import uuid4

from typing_extensions import TypeVar

if TYPE_CHECKING:
    from pydantic import JsonValue

    JSON: TypeAlias = JsonValue
    """Any JSON value: None, bool, int, float, str, and lists and string-keyed dicts of them."""
else:

    class JSON:
        """Any JSON value: None, bool, int, float, str, and lists and string-keyed dicts of them."""

        @classmethod
        def __get_pydantic_core_schema__(cls, source: object, handler: object) -> object:
            from pydantic import JsonValue  # which is slow to import, and not needed by all

            return handler.generate_schema(JsonValue)


T = TypeVar("T", covariant=True, default=JSON)

State = Literal["waiting", "ready", "leased"]
"""The state of a timeline that holds records: not due yet, due, or under delivery."""

Result = Literal[
    "delivered", "failed", "partial", "deferred", "rejected", "timeout", "buried", "empty", "lost", "deleted"
]

Check = Literal[
    "server", "version", "role", "eviction", "memory", "persistence", "disk", "replicas", "cluster", "clock",
    "round trip", "slow scripts", "settings", "permissions", "shards", "namespace", "workers", "overdue", "leases",
    "dead letters",
]  # fmt: skip

OVERDUE = 60.0  # seconds that a timeline may be due before somebody should look


@dataclass(frozen=True)
class Record(Generic[T]):
    """One notification, alert or event.

    Attributes
    ----------
    id : str
        Names the record in its timeline: a later add under the same id replaces it while it waits.
    value : T
        What was added.
    timestamp : datetime
        Aware, in UTC: that of the add, or else the server's time of its arrival. Orders records and never schedules.
    """

    id: str
    value: T
    timestamp: datetime

    def __init__(self, id: str, value: T, timestamp: datetime) -> None:
        fields = self.__dict__  # what the dataclass would make of it takes twice as long, for each record of a digest
        fields["id"] = id
        fields["value"] = value
        fields["timestamp"] = timestamp


@dataclass(frozen=True)
class Digest(Generic[T]):
    """The records of one delivery. A test can make one of a key and records alone.

    Attributes
    ----------
    key : str
        The timeline's.
    records : Sequence[Record[T]]
        Ordered by timestamp, then by arrival.
    id : str, default made up
        Names these very contents: a digest that is delivered again because its outcome is unknown comes with the same
        id, so that a receiver can use it as an idempotency key.
    attempt : int, default 1
        Which try this is to deliver it.
    dropped : int, default 0
        How many records the timeline's capacity trimmed since the last digest.
    iteration : int, default 1
        How many digests in a row of this timeline there are with this one.
    """

    key: str
    records: Sequence[Record[T]]
    id: str = field(default_factory=lambda: uuid4().hex)
    attempt: int = 1
    dropped: int = 0
    iteration: int = 1


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One add of ``add_many``; the fields are the arguments of ``DigestEngine.add``.

    Attributes
    ----------
    key : str
        The timeline's.
    value : T
        What is added.
    record_id : str or None, default None (made up)
        Replaces the value that is held under it.
    timestamp : datetime, float or None, default None (the server's time of arrival)
        An aware datetime, or epoch seconds.
    """

    key: str
    value: T
    record_id: str | None = None
    timestamp: datetime | float | None = None


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """A view of a timeline that holds records.

    Attributes
    ----------
    key : str
        What it was added under.
    state : State
        "waiting", "ready" or "leased".
    due : datetime
        When it is due (waiting), was due (ready), or when its lease ends (leased).
    size : int, default 0
        Entries held: a record that was added again counts once for each add until a digest is opened.
    attempt : int, default 0
        The tries of the digest under delivery or in a retry wait; 0 means that there is none.
    iteration : int, default 0
        Digests in a row so far.
    dropped : int, default 0
        Records that capacity trimmed since the last digest.
    cool_until : datetime or None, default None
        When the latest cool-down ends or ended.
    digest_id : str or None, default None
        The digest under delivery or in a retry wait.
    last_error : str or None, default None
        What its latest attempt failed with.
    records : Sequence[Record[T | bytes]], default ()
        Filled by ``peek`` alone: what is under delivery, then what came since. A value that cannot be decoded stands
        as its raw bytes.
    """

    key: str
    state: State
    due: datetime
    size: int = 0
    attempt: int = 0
    iteration: int = 0
    dropped: int = 0
    cool_until: datetime | None = None
    digest_id: str | None = None
    last_error: str | None = None
    records: Sequence[Record[T | bytes]] = ()


@dataclass(frozen=True)
class DeadLetter(Generic[T]):
    """Records that will not be delivered unless they are replayed; kept for 30 days.

    Attributes
    ----------
    id : str
        What ``replay`` and ``discard`` take.
    key : str
        The timeline's.
    reason : str
        That of a ``Reject``, the error of the last attempt, or why a value could not be decoded.
    buried_at : datetime
        By the server's clock.
    attempt : int
        How many tries there were.
    digest_id : str
        The digest's that could not be delivered.
    records : Sequence[Record[T | bytes]]
        A value that cannot be decoded stands as its raw bytes.
    """

    id: str
    key: str
    reason: str
    buried_at: datetime
    attempt: int
    digest_id: str
    records: Sequence[Record[T | bytes]]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of one attempt to deliver a digest, for those who watch, told once the store knows.

    An attempt that was cut short, or whose end the store could not be told, is not told.

    Attributes
    ----------
    key : str
        The timeline's.
    digest_id : str
        The digest's.
    attempt : int
        Which try it was, from 1.
    result : str
        "delivered"; "failed" (the callback raised), "partial" (``PartialFailure``), "deferred" (``RetryAfter``) or
        "timeout", which are tried again; "rejected" or "buried" (no try is left): a dead letter; "empty" (``max_age``
        left nothing of it); "lost" if the store answered that the digest had ended or was another worker's by then
        (it comes, or came, again); "deleted" if its timeline was deleted under delivery.
    records : int
        How many the callback delivered, whatever the result.
    lateness : float
        Seconds from its due time to the beginning of the attempt.
    duration : float
        Seconds that the attempt took.
    """

    key: str
    digest_id: str
    attempt: int
    result: Result
    records: int
    lateness: float
    duration: float


@dataclass(frozen=True, slots=True)
class Draining:
    """What the old shards of a namespace still hold while it gets another number of them.

    Attributes
    ----------
    waiting, ready, leased : int, default 0
        Timelines by their state.
    dead : int, default 0
        Dead letters.
    """

    waiting: int = 0
    ready: int = 0
    leased: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Timelines by state, dead letters, and what happened since the namespace was made.

    Attributes
    ----------
    waiting, ready, leased : int, default 0
        Timelines by their state.
    dead : int, default 0
        Dead letters.
    digests : int, default 0
        Deliveries so far.
    delivered, dropped, aged, expired, buried : int, default 0
        Records so far that were delivered, dropped by capacity, left out by ``max_age``, ended by ``ttl``, and put in
        dead letters.
    letters_dropped : int, default 0
        Dead letters that made room for newer ones or reached their 30 days.
    oldest_due : datetime or None, default None
        The earliest due time of a timeline that waits or is ready.
    overdue : float, default 0.0
        For how many seconds that one has been due by the server's clock; 0 if it is not.
    """

    waiting: int = 0
    ready: int = 0
    leased: int = 0
    dead: int = 0
    digests: int = 0
    delivered: int = 0
    dropped: int = 0
    aged: int = 0
    expired: int = 0
    buried: int = 0
    letters_dropped: int = 0
    oldest_due: datetime | None = None
    overdue: float = 0.0

    def health(self, overdue: float = OVERDUE) -> Health:
        """Whether no timeline has been due for more than ``overdue`` seconds, by default 60."""
        if self.overdue > overdue:
            reason = f"a timeline has been due for {self.overdue:,.0f} s, and nobody has claimed it"
            return Health(False, reason, self.overdue)
        return Health(True, "", self.overdue)


@dataclass(frozen=True, slots=True)
class Activity:
    """What one engine does in this process.

    Attributes
    ----------
    adds : int, default 0
        Records whose add returned since the engine was made.
    delivering : int, default 0
        Deliveries under way.
    backoff_level : int, default 0
        How deep its worker is in backoff mode; 0 is not at all.
    unavailable : bool, default False
        Whether its latest calls to the server failed.
    fault : str, default ""
        Which fault of aiodigest has ended its background task, if one has: it delivers no more until the process is
        restarted.
    """

    adds: int = 0
    delivering: int = 0
    backoff_level: int = 0
    unavailable: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check of ``DigestEngine.examine`` found.

    Attributes
    ----------
    check : str
        Which one; the reference has a table of them. It may have several findings, one for each server or matter.
    level : str
        "ok", "note" (worth knowing; nothing need be done) or "problem" (records may be lost or stay where they are).
    message : str
        What was found, for people: the words may be others in the next version.
    remedy : str, default ""
        What to do about it, a command or a setting where there is one.
    value : float or None, default None
        What was measured, in the unit that the table has for the check, if it measures anything.
    """

    check: Check
    level: Literal["ok", "note", "problem"]
    message: str
    remedy: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether digests go out as they should.

    Attributes
    ----------
    ok : bool
        Whether the server answers, and no timeline has been due for too long.
    reason : str, default ""
        Why not.
    overdue : float, default 0.0
        For how many seconds the earliest due timeline has been due, by the server's clock.
    """

    ok: bool
    reason: str = ""
    overdue: float = 0.0
