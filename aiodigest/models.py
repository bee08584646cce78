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


@dataclass(frozen=True)
class Record(Generic[T]):
    """One notification, alert or event. ``timestamp`` (aware, UTC) orders records and never schedules."""

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
    """The records of one delivery, ordered by timestamp, then by arrival.

    ``id`` names these very contents: a digest that is delivered again because its outcome is unknown comes
    with the same id, so that a receiver can use it as an idempotency key. ``attempt`` and ``iteration``
    (digests in a row of this timeline) count from 1. ``dropped`` is how many records the timeline's capacity
    trimmed since the last digest.
    """

    key: str
    records: Sequence[Record[T]]
    id: str = field(default_factory=lambda: uuid4().hex)
    attempt: int = 1
    dropped: int = 0
    iteration: int = 1


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One add of ``add_many``; see ``DigestEngine.add`` for the fields."""

    key: str
    value: T
    record_id: str | None = None
    timestamp: datetime | float | None = None


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """A view of a timeline that holds records.

    ``due`` is when it is due (waiting), was due (ready) or when its lease ends (leased). ``size`` counts the
    entries held, a re-added id once for each add. ``attempt`` counts the tries of the digest under delivery or
    in a retry wait, and 0 means that there is none. ``records`` is filled by ``peek`` alone: what is under
    delivery, then what came since.
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

    A value that cannot be decoded stands in ``records`` as its raw bytes.
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

    ``result`` is "lost" if the store answered that the digest had ended or was another worker's by then (it comes, or
    came, again), and "deleted" if its timeline was deleted under delivery. ``records`` is how many the callback
    delivered in any case. An attempt that was cut short, or whose end the store could not be told, is not told.
    ``lateness`` is how long after its due time the attempt began, and ``duration`` how long it took, in seconds.
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
    """What the old shards of a namespace still hold while it gets another number of them."""

    waiting: int = 0
    ready: int = 0
    leased: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Timelines by state, dead letters, and what happened since the namespace was made.

    ``delivered``, ``dropped`` (by capacity), ``aged`` (by ``max_age``), ``expired`` (by ``ttl``) and ``buried``
    (in dead letters) count records; ``digests`` counts deliveries, ``letters_dropped`` dead letters that made
    room for newer ones or reached their 30 days. ``oldest_due`` is the earliest due time of a timeline that
    waits or is ready, and ``overdue`` for how many seconds it has been due by the server's clock; 0 if it is not.
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


@dataclass(frozen=True, slots=True)
class Activity:
    """What one engine does in this process.

    ``adds`` counts the records whose add returned since the engine was made, ``delivering`` the deliveries under way.
    ``backoff_level`` is how deep its worker is in backoff mode (0: not at all), and ``unavailable`` tells that its
    latest calls to the server failed.
    """

    adds: int = 0
    delivering: int = 0
    backoff_level: int = 0
    unavailable: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """Whether digests go out as they should, and if not, the ``reason``; ``overdue`` is that of ``Stats``."""

    ok: bool
    reason: str = ""
    overdue: float = 0.0
