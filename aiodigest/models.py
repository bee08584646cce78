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

State = Literal["waiting", "ready", "leased", "muted"]
"""The state of a timeline that holds records: not due yet, due, under delivery, or kept from all that by a mute."""

Result = Literal[
    "delivered", "failed", "partial", "deferred", "unknown", "rejected", "timeout", "buried", "empty", "lost", "deleted"
]  # fmt: skip

Check = Literal[
    "server", "version", "role", "eviction", "memory", "persistence", "disk", "replicas", "cluster", "tls",
    "clock", "round trip", "slow scripts", "settings", "permissions", "shards", "namespace", "workers", "overdue",
    "leases", "dead letters",
]  # fmt: skip

OVERDUE = 60.0  # seconds that a timeline may be due before somebody should look


@dataclass(frozen=True)
class Record(Generic[T]):
    """One notification, alert or event, with the ``value`` that was added.

    A later add under the same ``id`` replaces it while it waits. ``timestamp`` (aware, in UTC) is the time given to the
    add, else the server's time of arrival. It orders records and schedules nothing.
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
    """The ``records`` of one delivery, ordered by timestamp, then by arrival. A test can make one from just a ``key``
    and records.

    ``id`` names exactly these contents: a digest that is delivered again because its outcome is unknown comes with the
    same id, so that a receiver can use it as an idempotency key. ``attempt`` is the number of this try to deliver it.
    ``dropped`` counts the records that the timeline's capacity trimmed since the last digest, and ``iteration`` the
    digests in a row of this timeline, including this one. ``next_due`` is when the next digest is due by the policy if
    a record came now, by the server's clock (aware, in UTC), for texts like "the next summary comes at 14:30"; None in
    a digest that a test has made.
    """

    key: str
    records: Sequence[Record[T]]
    id: str
    attempt: int = 1
    dropped: int = 0
    iteration: int = 1
    next_due: datetime | None = None

    def __init__(
        self,
        key: str,
        records: Sequence[Record[T]],
        id: str | None = None,
        attempt: int = 1,
        dropped: int = 0,
        iteration: int = 1,
        next_due: datetime | None = None,
    ) -> None:
        fields = self.__dict__  # what the dataclass would make of it takes twice as long
        fields["key"] = key
        fields["records"] = records
        fields["id"] = uuid4().hex if id is None else id
        fields["attempt"] = attempt
        fields["dropped"] = dropped
        fields["iteration"] = iteration
        fields["next_due"] = next_due


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One add of ``add_many``; ``key``, ``value``, ``record_id`` (made up if None), ``timestamp`` (the server's time of
    arrival if None) and ``urgent`` are the arguments of ``DigestEngine.add``."""

    key: str
    value: T
    record_id: str | None = None
    timestamp: datetime | float | None = None
    urgent: bool = False

    def __init__(
        self,
        key: str,
        value: T,
        record_id: str | None = None,
        timestamp: datetime | float | None = None,
        urgent: bool = False,
    ) -> None:
        fields = self.__dict__  # what the dataclass would make of it takes twice as long
        fields["key"] = key
        fields["value"] = value
        fields["record_id"] = record_id
        fields["timestamp"] = timestamp
        fields["urgent"] = urgent


@dataclass(frozen=True)
class Timeline(Generic[T]):
    """A view of the timeline ``key``, which holds records or is muted.

    ``due`` is the time it is due (its ``state`` is "waiting"), was due ("ready"), or its lease ends ("leased"); of one
    that is "muted", when it will be due, which is no sooner than the mute ends: in the year 9999 if it has no end.
    ``size`` counts entries: a record that was added again counts once for each add until a digest is opened.
    ``digest_id`` is the digest under delivery or in a retry wait, ``attempt`` the number of its latest try (0 if there
    is none), and ``last_error`` the error of the latest. ``iteration`` counts the digests in a row so far, and
    ``dropped`` the records that capacity trimmed since the last one. ``cool_until`` is the end of the latest cool-down,
    which may be past. ``muted`` is True if it is muted (its state is "leased" while a delivery is under way all the
    same), until ``muted_until`` (None: until it is unmuted), and ``drops`` if what is added meanwhile is dropped.
    ``peek`` alone fills ``records``: those under delivery and those that came since, by timestamp; of a record that was
    added again, the last value. Those whose values cannot be decoded come last, with their raw bytes.
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
    muted: bool = False
    muted_until: datetime | None = None
    drops: bool = False


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason of an ``Explanation``: what it says as ``text``, and the instant ``at`` of which it tells, if any.

    ``kind`` is "state" (where the timeline is); "last" (its last digest, or the record that opened its window),
    "cool-down", "rule" (how records wait for others), "moved" (its due time is not what the policy says: it was
    rescheduled, or added to under another one), "maximum", "size"; "hours", "passes" (it goes out whatever these are);
    "throttle", "retry", "aside" (why it was put aside); "lease", "flush", "since" (what came under delivery, or waits);
    "mute"; or "next" (when a record would be due that came now).
    """

    kind: Literal[
        "state", "last", "cool-down", "rule", "moved", "maximum", "size", "hours", "passes", "throttle", "retry",
        "aside", "lease", "flush", "since", "mute", "next",
    ]  # fmt: skip
    at: datetime | None
    text: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons why the timeline ``key`` is where it is, and until when; ``str()`` of it is a sentence.

    ``state`` is "empty" if it holds no records. ``due`` is when it is due or will be tried again ("waiting"), was due
    ("ready"), will be due ("muted"), or its lease ends ("leased"); None if it is empty, or muted without end. The first
    of ``reasons`` tells that in words. All times are by the server's clock, in the zone that was asked for.
    """

    key: str
    state: State | Literal["empty"]
    due: datetime | None
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        head, *others = self.reasons
        told = ""
        for reason in others:
            told += (", " if reason.kind in ("cool-down", "rule", "moved") else "; ") * bool(told) + reason.text
        return f"{head.text}: {told}" if told else head.text


@dataclass(frozen=True)
class DeadLetter(Generic[T]):
    """Records that will not be delivered unless they are replayed; kept for 30 days.

    ``id`` is the one for ``replay`` and ``discard``. ``reason`` is the text of a ``Reject``, the error of the last
    attempt, or the reason a value could not be decoded. ``digest_id`` is the digest of the timeline ``key`` that could
    not be delivered, ``attempt`` the number of its last try, and ``buried_at`` the end of that, by the server's clock.
    If its workers died, ``attempt`` is ``max_attempts`` + 1, the try that did not begin any more; there were
    ``max_attempts`` + 2 runs then, since the first two that are lost in a row are not counted. In ``records``, a value
    that cannot be decoded is given as its raw bytes.
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

    ``key`` is the timeline's, and ``attempt`` the number of the try to deliver ``digest_id``, from 1. ``result`` is
    "delivered"; "failed" (the callback raised), "partial" (``PartialFailure``), "deferred" (``RetryAfter``), "unknown"
    (``OutcomeUnknown``) or "timeout", which are tried again; "rejected" or "buried" (no try is left): a dead letter;
    "empty" (``max_age`` left nothing of it); "lost" if the store answered that the digest had ended or was another
    worker's by then (it comes, or came, again); "deleted" if its timeline was deleted under delivery. ``records`` is
    the number of records the callback delivered, whatever the result. ``lateness`` is the time in seconds from its due
    time to the start of the attempt, and ``duration`` the seconds that the attempt took. ``reason`` says in one line
    why records were not delivered ('' if all were), and ``error`` is what the callback or the policy function raised.
    """

    key: str
    digest_id: str
    attempt: int
    result: Result
    records: int
    lateness: float
    duration: float
    reason: str = ""
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Draining:
    """The contents of a namespace's old shards while it moves to another number of them: timelines by their state
    (``waiting``, ``ready``, ``leased``), dead letters (``dead``), and muted timelines (``mutes``)."""

    waiting: int = 0
    ready: int = 0
    leased: int = 0
    dead: int = 0
    mutes: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Timelines by state, dead letters, and counts of events since the namespace was made.

    ``waiting``, ``ready`` and ``leased`` are timelines, ``mutes`` those that are muted (which may be leased, or hold no
    records), ``dead`` dead letters, and ``digests`` deliveries so far. ``delivered``, ``dropped``, ``aged``,
    ``expired``, ``buried``, ``duplicates`` and ``muted`` are records so far: delivered, dropped by capacity, left out
    by ``max_age``, ended by ``ttl``, put in dead letters, kept from being delivered again by ``dedupe_window``, and
    dropped by a mute. ``letters_dropped`` are dead letters that made room for newer ones or reached their 30 days.
    ``oldest_due`` is the earliest due time of a timeline that waits or is ready, or the end of a lease that nobody has
    taken over, and ``overdue`` the seconds for which that one has been due, by the server's clock; 0 if it is not due.
    ``stepped_back`` is by how many seconds the server's clock last stepped back, if that was in the last hour, else 0.
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
    duplicates: int = 0
    mutes: int = 0
    muted: int = 0
    oldest_due: datetime | None = None
    overdue: float = 0.0
    stepped_back: float = 0.0

    def health(self, overdue: float = OVERDUE) -> Health:
        """Return the health: good if no timeline has been due for more than ``overdue`` seconds, by default 60."""
        late = f"a timeline has been due for {self.overdue:,.0f} s, and nobody has claimed it"
        reason = late if self.overdue > overdue else ""
        return Health(not reason, reason, self.overdue, self.stepped_back)


@dataclass(frozen=True, slots=True)
class Activity:
    """The current work of one engine in this process.

    ``adds`` counts records whose add returned since the engine was made, and ``delivering`` the deliveries under way,
    those included whose outcome is on its way to the store: of these there may be as many again as ``concurrency``.
    ``backoff_level`` is the depth of backoff mode in its worker, the deepest of its destinations; 0 means full
    concurrency. ``resting`` counts the destinations that are in backoff mode, or that a callback has paused: without
    ``destination`` there is one for all. ``unavailable`` is True if its latest calls to the server failed. ``fault`` is
    the fault of aiodigest that ended its background task, if one did: it delivers nothing more until the process is
    restarted. ``room_taken`` is how many bytes of JSON the records of digests under delivery decode to, of which it
    has at most 16 times ``bounds.digest`` at once, and ``awaiting_room`` counts the digests that wait until
    others have been delivered. Digests of up to 256 KiB and 1,000 records are not counted, and do not wait.
    ``throttled`` is how long, in seconds, due digests wait at least for the engine's ``throttle`` to let the next
    attempt of this process begin; 0 if none waits.
    """

    adds: int = 0
    delivering: int = 0
    backoff_level: int = 0
    unavailable: bool = False
    fault: str = ""
    resting: int = 0
    room_taken: int = 0
    awaiting_room: int = 0
    throttled: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one ``check`` of ``DigestEngine.examine``, which may have several: one a server, or a matter.

    ``level`` is "ok", "note" (worth knowing; nothing need be done) or "problem" (records may be lost or stay where they
    are). ``message`` is for people: the wording may change in the next version. ``remedy`` is the fix, a command or a
    setting where there is one. ``value`` is what was measured, if anything, in the unit that the reference's table of
    checks has for it.
    """

    check: Check
    level: Literal["ok", "note", "problem"]
    message: str
    remedy: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The health of deliveries: ``ok`` is True if the server answers, the latest adds and claims of this process went
    through, and no timeline has been due for too long.

    ``reason`` says why it is not. ``overdue`` is the time in seconds for which the earliest due timeline has been due,
    by the server's clock. ``stepped_back`` is by how many seconds that clock stepped back in the last hour, or 0: what
    waits is due as long after it as before, but whoever set the clock should know.
    """

    ok: bool
    reason: str = ""
    overdue: float = 0.0
    stepped_back: float = 0.0
