"""Objects for users: records and digests, and views of the store's contents. All are frozen.

The generic ones have no slots: Python 3.11 refuses ``Digest[int](...)`` with them.
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
            from pydantic import JsonValue  # slow to import, and not needed by everyone

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
        The record's name in its timeline: a later add under the same id replaces it while it waits.
    value : T
        The value that was added.
    timestamp : datetime
        Aware, in UTC: the time given to the add, else the server's time of arrival. It orders records and schedules
        nothing.
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
    """The records of one delivery. A test can make one from just a key and records.

    Attributes
    ----------
    key : str
        The timeline's key.
    records : Sequence[Record[T]]
        Ordered by timestamp, then by arrival.
    id : str, default made up
        Names exactly these contents: a digest that is delivered again because its outcome is unknown comes with the
        same id, so that a receiver can use it as an idempotency key.
    attempt : int, default 1
        The number of this try to deliver it.
    dropped : int, default 0
        The number of records that the timeline's capacity trimmed since the last digest.
    iteration : int, default 1
        The number of digests in a row of this timeline, including this one.
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
        The timeline's key.
    value : T
        The value to add.
    record_id : str or None, default None (made up)
        Replaces the value held under it.
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
        The key it was added under.
    state : State
        "waiting", "ready" or "leased".
    due : datetime
        The time it is due (waiting), was due (ready), or its lease ends (leased).
    size : int, default 0
        Entries held: a record that was added again counts once for each add until a digest is opened.
    attempt : int, default 0
        The tries of the digest under delivery or in a retry wait; 0 if there is none.
    iteration : int, default 0
        Digests in a row so far.
    dropped : int, default 0
        Records that capacity trimmed since the last digest.
    cool_until : datetime or None, default None
        The end of the latest cool-down, which may be past.
    digest_id : str or None, default None
        The digest under delivery or in a retry wait.
    last_error : str or None, default None
        The error of its latest attempt.
    records : Sequence[Record[T | bytes]], default ()
        Filled by ``peek`` alone: records under delivery, then those that came since. A value that cannot be decoded
        is given as its raw bytes.
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
        The id for ``replay`` and ``discard``.
    key : str
        The timeline's key.
    reason : str
        The text of a ``Reject``, the error of the last attempt, or the reason a value could not be decoded.
    buried_at : datetime
        By the server's clock.
    attempt : int
        The number of tries.
    digest_id : str
        The id of the digest that could not be delivered.
    records : Sequence[Record[T | bytes]]
        A value that cannot be decoded is given as its raw bytes.
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
    """The outcome of one attempt to deliver a digest, reported to observers once the store knows.

    An attempt that was cut short, or whose end the store could not be told, is not reported.

    Attributes
    ----------
    key : str
        The timeline's key.
    digest_id : str
        The digest's id.
    attempt : int
        The number of the try, from 1.
    result : str
        "delivered"; "failed" (the callback raised), "partial" (``PartialFailure``), "deferred" (``RetryAfter``) or
        "timeout", which are tried again; "rejected" or "buried" (no try is left): a dead letter; "empty" (``max_age``
        left nothing of it); "lost" if the store answered that the digest had ended or was another worker's by then
        (it comes, or came, again); "deleted" if its timeline was deleted under delivery.
    records : int
        The number of records the callback delivered, whatever the result.
    lateness : float
        Seconds from its due time to the start of the attempt.
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
    """The contents of a namespace's old shards while it moves to another number of them.

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
    """Timelines by state, dead letters, and counts of events since the namespace was made.

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
        Seconds for which that timeline has been due, by the server's clock; 0 if it is not due.
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
        """Return the health: good if no timeline has been due for more than ``overdue`` seconds, by default 60."""
        late = f"a timeline has been due for {self.overdue:,.0f} s, and nobody has claimed it"
        reason = late if self.overdue > overdue else ""
        return Health(not reason, reason, self.overdue)


@dataclass(frozen=True, slots=True)
class Activity:
    """The current work of one engine in this process.

    Attributes
    ----------
    adds : int, default 0
        Records whose add returned since the engine was made.
    delivering : int, default 0
        Deliveries under way.
    backoff_level : int, default 0
        The depth of backoff mode in its worker; 0 means full concurrency.
    unavailable : bool, default False
        True if its latest calls to the server failed.
    fault : str, default ""
        The fault of aiodigest that ended its background task, if one did: it delivers nothing more until the process
        is restarted.
    """

    adds: int = 0
    delivering: int = 0
    backoff_level: int = 0
    unavailable: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check of ``DigestEngine.examine``.

    Attributes
    ----------
    check : str
        Its name; the reference has a table of them. A check may have several findings, one for each server or matter.
    level : str
        "ok", "note" (worth knowing; nothing need be done) or "problem" (records may be lost or stay where they are).
    message : str
        The finding, for people: the wording may change in the next version.
    remedy : str, default ""
        The fix: a command or a setting where there is one.
    value : float or None, default None
        The measured value, in the unit that the table has for the check, if it measures anything.
    """

    check: Check
    level: Literal["ok", "note", "problem"]
    message: str
    remedy: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The health of deliveries.

    Attributes
    ----------
    ok : bool
        True if the server answers, and no timeline has been due for too long.
    reason : str, default ""
        The reason if it is not ok.
    overdue : float, default 0.0
        Seconds for which the earliest due timeline has been due, by the server's clock.
    """

    ok: bool
    reason: str = ""
    overdue: float = 0.0
