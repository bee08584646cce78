"""The store's interface for the scheduler and the engine, and the types of its answers.

Times are integer milliseconds of the server's clock. Calls on a shard's timelines take several items at once, so that a
store can answer them in one round trip. Each item has its own answer, in order; a failing item fails alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, Self, TypeVar
from zlib import crc32

from aiodigest.errors import AiodigestError, InvalidState, LeaseLost, printable
from aiodigest.models import Finding, State
from aiodigest.policy import Limits, Policy, Terms
from aiodigest.records.entries import LONGEST_IDENTITY, aged, identity, latest
from aiodigest.records.validation import DEFAULT

if TYPE_CHECKING:
    from aiodigest.timing.hours import Hours
    from aiodigest.timing.throttle import Rate

T = TypeVar("T")

DEAD_LETTER_TTL_MS = 30 * 86_400_000
DIGEST_BYTES = DEFAULT.digest
DEAD_LETTER_BASE = 512  # bytes that each is taken to need beside its key, reason and entries
SAME_MS = 10_000  # two times that a policy function worked out, nearer than this, are the same
GIVE_BACK_MS = 86_400_000  # RetryAfter gives attempts back for this long a digest
MAX_SHARDS = 1024
STEP_MS = 1_000  # the server's clock has stepped back if it is behind by more; what it is behind is noted as often
STEP_TOLD_MS = 3_600_000  # for how long `Operations.counts` tells of that
ENOUGH = 0.1  # of a call's time: with less left it is not sent any more, but answered at once
SLICE = 1_000  # how much one script does at the most: entries read or inlined, timelines looked at
SAMPLE = 64  # ready timelines from which a claim draws, if it is asked to
MOVES = 200  # timelines that one script makes ready
LONGEST = 50_000  # entries of a list: more than a timeline of 10,000 records, what comes meanwhile, and a move leave
LOOKS = 50  # mutes, and dead letters whose time is over, that one script looks at
ASIDE_MS = 5_000  # for how long what needs a feature that a worker does not know is left to others
# what this version knows of that timelines may need
FEATURES = frozenset({"balanced", "bytes", "calendar", "debounce", "dedupe", "hours", "mute"})
MOST_SEEN = 10_000  # ids of a timeline that are known as delivered
PAUSES = 1_000  # destinations that a throttle tells all workers to hold back, those that end last
NEVER_MS = 9_000_000_000_000_000  # when a mute ends that has no end
ALONE = 2  # a digest that was lost this often runs with nothing beside it, and is charged for what is lost from then on


class Retired(AiodigestError):
    """A shard belongs to a layout the namespace no longer has; nothing was done. Another one has its timelines."""


@dataclass(slots=True, eq=False)  # a named tuple takes twice as long to make, and its fields ten times as long to read
class Add:
    """A record to append; ``own`` says that its timeline is to keep the limits, since a claim may not know them.

    ``until`` is the event loop's time at which its caller gives it up: what reaches a server later must do nothing.
    ``urgent``: it is flushed at once. ``size`` is what the value decodes to, in bytes, if ``terms`` bound it.
    """

    key: str
    entry: bytes
    terms: Terms
    own: bool = False
    until: float = inf
    urgent: bool = False
    size: int = 0


@dataclass(slots=True)  # frozen, the making of one would take three times as long
class Lease:
    """The right to deliver one digest, until the lease ends on the server's clock. Immutable.

    ``entries`` are the first of the ``size`` entries under delivery; page the others with ``Backend.read``.
    ``part`` (0: no bound) is how many of them one digest may hold. Entries older than ``cut_ms`` (0: none) are
    left out. ``due_ms`` is when the timeline was due, by the shard's clock, as ``Claims.now_ms`` is. ``bound`` (0:
    none) is how many bytes one digest may decode to, and ``later`` are the identities of what comes after it, if that
    cut it off. ``own`` are limits that the timeline has. ``lost`` counts the leases on this digest that ended without a
    word since its last known outcome: if any did, it is doubtful, and may end the process that delivers it. One that
    ``passes`` goes out whatever the hours are.
    """

    key: str
    token: str
    digest_id: str
    attempt: int
    iteration: int
    dropped: int
    due_ms: int
    size: int
    part: int = 0
    cut_ms: int = 0
    last_error: str = ""
    lost: int = 0
    entries: Sequence[bytes] = field(default=(), repr=False)
    bound: int = 0
    own: Limits | None = None
    later: Sequence[bytes] = field(default=(), repr=False)
    passes: bool = False

    @property
    def is_alone(self) -> bool:
        """True if its digest must run with nothing beside it, which it may take along."""
        return self.lost >= ALONE

    @property
    def taken(self) -> int:
        """The number of entries that one digest takes at most: all, or those of its next part."""
        return min(self.part or self.size, self.size)


def unknown_need(needs: str, known: Collection[str]) -> str | None:
    """Return the first of the features that a timeline needs, separated by spaces, that is not known."""
    return next((name for name in needs.split() if name not in known), None)


def needs_unknown(key: str, name: str) -> InvalidState:
    """Return the error of a timeline that needs a feature which nobody here knows."""
    return InvalidState(f"timeline {key!r} needs {printable(name)!r}, which this version of aiodigest does not know")


def whole(lease: Lease, most_of: Callable[[Sequence[bytes]], int | None] | None) -> tuple[Sequence[bytes], int] | None:
    """Return the entries of a digest that are all here and surely fit, as nearly all do, and what they decode to at the
    most, in bytes; None of others. See ``entries_of``."""
    taken = lease.taken
    page = lease.entries[:taken]
    if most_of is None or len(page) != taken or lease.later:
        return None
    most = most_of(page)
    return None if most is None or (lease.bound and most > lease.bound) else (page, most)


async def entries_of(
    lease: Lease,
    read: Callable[[int, int], Awaitable[Sequence[bytes]]],
    size_of: Callable[[bytes], int] | None = None,
    most_of: Callable[[Sequence[bytes]], int | None] | None = None,
) -> tuple[Lease, list[bytes], int]:
    """Return the entries of a digest, or of its next part, the lease with what is known by then, and what the entries
    decode to, in bytes, or at the most.

    ``read`` gets a page of those that did not fit into the claim, by their first index and their number. ``size_of``
    tells what an entry decodes to: the first one over the lease's bound begins the next part. Of the rest, nothing but
    the identities is kept, since a later value replaces an earlier one. ``most_of`` tells at once what some decode to
    at the most: a digest that is all here and surely fits, as nearly all do, is not measured entry by entry.
    """
    entries: list[bytes] = []
    later: list[bytes] = []
    size, place, page, bound = 0, 0, lease.entries[: lease.taken], lease.bound or inf
    if found := whole(lease, most_of):
        return lease, list(found[0]), found[1]
    while True:
        for entry in page:
            more = 0 if later or size_of is None else size_of(entry)
            if later or (entries and size + more > bound):
                later.append(identity(entry)[:LONGEST_IDENTITY])  # of an unreadable one enough
            else:
                entries.append(entry)
                size += more
        place += len(page)
        if place == lease.taken or (later and lease.later):
            break
        page = await read(place, lease.taken - place)
        if not page:
            raise LeaseLost(f"the entries of timeline {lease.key!r} went away under delivery")
    if later or lease.later:  # which takes as long as reading two records
        lease = replace(lease, later=lease.later[len(entries) :] or later)
    return lease, entries, size


@dataclass(slots=True)  # not frozen, or to define it would take twice as long, at each start
class Claims:
    """The answer to a claim: leases, how long to sleep, and problems met on the way.

    ``wake_up`` is the last entry of the shard's wake-up stream, for ``Backend.wait``. ``wait_ms`` is the time until
    something is due (0: there is more now; None: nothing is held). ``broken`` names timelines whose keys could not be
    read, set aside for one lease. ``expired`` pairs a key with the number of its records that outlived their ttl.
    ``left`` pairs a key with a feature that the timeline needs and nobody here knows: it was left to other workers.
    ``barred``: there are doubtful digests that this claim could not take; ``wait_ms`` does not tell of them.
    ``server_ms`` is the server's time, which ``now_ms`` is ahead of once that has stepped back. ``let_go`` counts dead
    letters whose time is over, for which a claim looks that finds nothing else.
    """

    leases: Sequence[Lease] = ()
    wake_up: str = "0-0"
    wait_ms: float | None = None
    now_ms: int = 0
    broken: Sequence[tuple[str, str]] = ()
    expired: Sequence[tuple[str, int]] = ()
    barred: bool = False
    left: Sequence[tuple[str, str]] = ()
    server_ms: int = 0
    let_go: int = 0


class NewDeadLetter(NamedTuple):
    """Records to set aside as a dead letter: those of these identities, or the whole part (None)."""

    reason: str
    ids: Sequence[bytes] | None = None


class Close(NamedTuple):
    """A delivery that ended for good: of the first ``taken`` entries, those in no dead letter were delivered.

    ``counts`` is False for a digest left empty by ``max_age``: no iteration, no cool-down. ``letter_bytes`` is how much
    the dead letters of a shard may take. ``hours`` are those in which what came since may be due. What was delivered
    does not come again for ``dedupe_ms``: the records of the identities ``seen`` (None: all but those in dead letters,
    and too old). ``mute``: from then on what is added to the timeline is dropped, and nothing of it is delivered; the
    store itself counts those too old, among all that the dead letters are made from.
    """

    lease: Lease
    taken: int
    delivered: int
    cool_ms: int
    limits: Limits
    lease_ms: int
    aged: int = 0
    counts: bool = True
    dead_letters: Sequence[NewDeadLetter] = ()
    letter_bytes: int = DEFAULT.dead_letters
    hours: Hours | None = None
    dedupe_ms: int = 0
    seen: Sequence[bytes] | None = None
    mute: bool = False


class Closed(NamedTuple):
    """A close's answer. ``part``: ``left`` entries keep the lease, as ``digest_id``; ``deleted``: the timeline was.
    ``released`` is never answered: a store notes it for a release that is repeated, and answers a close with ``lost``.

    ``let_go`` older dead letters made room for its own; 0 if the call is repeated.
    """

    status: Literal["closed", "part", "deleted", "lost", "released"]
    digest_id: str = ""
    left: int = 0
    let_go: int = 0


class Retry(NamedTuple):
    """A delivery that failed, or (``unknown``) may have; the next try waits ``delay_ms``, and for ``hours``.

    ``failed`` are the identities that stay, out of the first ``taken`` entries (None: all). An attempt is charged,
    unless ``give_back``. ``dedupe_ms`` and ``seen`` are as in ``Close``.
    """

    lease: Lease
    delay_ms: int
    error: str
    limits: Limits
    taken: int = 0
    failed: Sequence[bytes] | None = None
    delivered: int = 0
    give_back: bool = False
    unknown: bool = False
    aged: int = 0
    hours: Hours | None = None
    dedupe_ms: int = 0
    seen: Sequence[bytes] | None = None


class Postpone(NamedTuple):
    """A digest that was claimed, and may not run now: it waits ``delay_ms``, while it stays due when its lease says."""

    lease: Lease
    delay_ms: int


class Tokens(NamedTuple):
    """Tokens that were handed out together, each for one attempt: by which shard, when by its clock, and how many."""

    source: int
    at_us: int
    number: int


class Grant(NamedTuple):
    """The answer of a throttle: the tokens that it hands out, and the microseconds until there is another.

    ``contended``: another process asked in vain since this one did. ``pauses`` are the destinations to be held back,
    with the milliseconds that are left, if their number is no more the one that was ``known``.
    """

    tokens: Tokens
    wait_us: int
    contended: bool
    known: int = 0
    pauses: Sequence[tuple[str, int]] = ()


class Move(NamedTuple):
    """A target for ``reschedule`` of a waiting timeline, or of the cool-down of one without records.

    Give ``at_ms``, or ``delay_ms`` from now. With neither, the terms decide, with the ``gap_ms`` that the policy gives
    after ``iteration``, if the timeline is still at that iteration. ``by_clock`` if these may have been worked out from
    the time of day: such delays have not changed if they end at the same time as before.
    """

    terms: Terms
    at_ms: int | None = None
    delay_ms: int | None = None
    gap_ms: int = 0
    iteration: int = 0
    by_clock: bool = False


class Mute(NamedTuple):
    """For how long to mute a timeline: until ``at_ms``, for ``delay_ms`` from now, or (neither) until it is unmuted.

    ``drop``: what is added meanwhile is dropped, and counted.
    """

    at_ms: int | None = None
    delay_ms: int | None = None
    drop: bool = False


class StoredTimeline(NamedTuple):
    """A timeline as stored; see ``models.Timeline``.

    ``last_ms`` is its last digest, or the add that opened the window, which was due at ``opening_ms`` then (0: at
    once). ``next_ms`` (0: none) is when what came under delivery is due by its rule, and ``until_ms`` (0: it is not)
    when one that was postponed is ready again. ``flushed``: what came under delivery is due as soon as that ends.
    ``passes``: its digest goes out whatever the hours are. ``needs`` are features, separated by spaces. ``mute_ms`` is
    the end of its mute (0: none, -1: it is not muted), and ``drops``: what is added meanwhile is dropped.
    """

    key: str
    state: State
    due_ms: int
    logged: int = 0
    opened: int = 0
    attempt: int = 0
    iteration: int = 0
    dropped: int = 0
    cool_ms: int = 0
    digest_id: str = ""
    last_error: str = ""
    last_ms: int = 0
    opening_ms: int = 0
    next_ms: int = 0
    until_ms: int = 0
    flushed: bool = False
    passes: bool = False
    needs: str = ""
    mute_ms: int = -1
    drops: bool = False


class Cooling(NamedTuple):
    """A timeline without records, in the cool-down ``until_ms`` of its last digest, which was closed at ``last_ms``."""

    iteration: int
    until_ms: int
    last_ms: int


class Bookmark(NamedTuple):
    """The place where a page of a schedule or of dead letters ended, and the time after which nothing is listed."""

    time: bytes
    name: bytes
    last: bytes


class Page(NamedTuple, Generic[T]):
    """A page of a shard's contents, and its end, where the next page begins; None if there was no more."""

    items: Sequence[T] = ()
    end: Bookmark | None = None


@dataclass(slots=True)  # not frozen: as Claims
class StoredDeadLetter:
    """A dead letter as stored. A ``broken`` one cannot be read, as its ``reason`` says, and can only be discarded."""

    id: str
    key: str
    reason: str
    buried_ms: int
    attempt: int
    digest_id: str
    entries: Sequence[bytes] = field(default=(), repr=False)
    broken: bool = False
    limits: Limits | None = field(default=None, compare=False)  # of its timeline, where the store tells them

    @property
    def size(self) -> int:
        """The bytes that it is taken to need."""
        texts = len(self.key.encode()) + len(self.reason.encode(errors="replace"))
        return DEAD_LETTER_BASE + texts + sum(map(len, self.entries))


@dataclass(frozen=True, slots=True, eq=False)
class ShardMap:
    """The shards of a store, as far as this process knows; replaced whole when their layout changes.

    Numbers stay: when a layout with another number of shards takes over, its shards are numbered after the old ones.
    """

    count: int  # of the numbers given so far
    current: range  # the shards that take adds
    draining: range = range(0)  # those that take no adds, and may still hold something

    @property
    def adding(self) -> int:
        """The number of shards that take adds."""
        return len(self.current)

    @property
    def live(self) -> list[int]:
        """The shards that take adds, or may still hold something; the older ones first."""
        return sorted((*self.draining, *self.current))

    def number_of(self, shard: int) -> int | None:
        """Return a shard's number in the layout that takes adds; None if it takes none."""
        return shard - self.current.start if shard in self.current else None

    def shard_of(self, key: str) -> int:
        """Return the shard that takes a timeline's records."""
        return self.current[crc32(key.encode()) % len(self.current)]

    def shards_of(self, key: str) -> list[int]:
        """Return the shards that may hold a timeline, the one that takes its records first."""
        return [shards[crc32(key.encode()) % len(shards)] for shards in (self.current, self.draining) if shards]


class Operations(Protocol):
    """The part of a store that only operators need. Every method may raise ``BackendUnavailable``."""

    async def look(self, key: str) -> StoredTimeline | None:
        """Return a timeline, or None if it holds no records (its iteration is 0 then) and is not muted."""
        ...

    async def look_all(self, key: str) -> list[StoredTimeline]:
        """Return a timeline, earliest due first: one for each shard that holds records of it, while resharding."""
        timeline = await self.look(key)
        return [] if timeline is None else [timeline]

    async def cooling(self, key: str) -> list[Cooling]:
        """Return the cool-down of a timeline that holds no records, of each shard with one."""
        ...

    async def entries(self, key: str) -> list[bytes]:
        """Return all entries of a timeline: first those under delivery, then those that came since."""
        ...

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[StoredTimeline]:
        """Return up to ``count`` timelines of a state, the earliest due first.

        Those that are "muted" are all of these, also under delivery or without records, the first to end first.
        ``after`` is the end of the previous page. A timeline that keeps its place comes once, even if others leave
        meanwhile. A timeline placed later than everything there at the first page does not come.
        """
        ...

    async def counts(self) -> dict[str, int]:
        """Return set sizes and counters, summed over the shards, under the names of ``models.Stats``.

        ``oldest_due_ms`` and ``overdue_ms`` (how long that timeline has been due) describe the earliest due
        timeline that waits or is ready, or whose lease has ended: it is due since then. ``stepped_back_ms`` is by how
        much the server's clock last stepped back, if that was in the last hour.
        """
        ...

    async def dead_letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        """Return ids of up to ``count`` dead letters, the oldest first, paged as timelines are."""
        ...

    async def dead_letter(self, letter_id: str, shard: int | None = None) -> StoredDeadLetter | None:
        """Return a dead letter, or None if there is none, or none in that shard."""
        ...

    async def examine(self) -> list[Finding]:
        """Check the servers, and the namespace's contents there; changes nothing."""
        return []

    async def exists(self) -> bool:
        """Return True unless nothing was ever added to the namespace."""
        return True

    async def namespaces(self) -> list[str]:
        """Return the namespaces on the same server, in order."""
        return []

    async def erase(self) -> int:
        """Drop the namespace with all its contents; return the number of keys dropped."""
        ...

    async def try_erase(self) -> None:
        """Raise ``ConfigurationError`` if ``erase`` may not look for keys; drops nothing."""

    async def reshard(self, shards: int) -> bool:
        """Let ``shards`` shards take the adds; False if they already do, and nothing is left to drain."""
        ...

    async def drain(self) -> dict[str, int]:
        """Bring the end of the old shards nearer; return what they hold, by state. An empty answer: they are gone."""
        return {}


class Backend(Protocol):
    """A store of timelines. Each transition happens whole or not at all.

    Every method may raise ``BackendUnavailable``. Repeating one whose answer was lost is harmless, except ``add`` and
    ``claim``; but ``throttle`` loses the tokens of the first call, and ``replay`` raises ``InvalidState``. A method
    that takes a shard may raise ``Retired``, except ``add``.
    """

    @property
    def url(self) -> str:
        """The URL of the store, without its password."""
        ...

    @property
    def shard_map(self) -> ShardMap:
        """The shards that are known now; ConfigurationError before they are, which is once connected."""
        ...

    @property
    def operations(self) -> Operations:
        """The calls that operators need."""
        ...

    def clone(self) -> Self:
        """Return a backend of the same store that is not connected, for another event loop or process."""
        ...

    def why_down(self) -> str | None:
        """Explain why the store's own server is down, if it has one; None if it is up, or nothing is known of it."""
        return None

    async def connect(self) -> None:
        """Look up the layout; ``ConfigurationError`` if it does not fit the engine."""

    async def aclose(self) -> None:
        """Close all connections."""

    async def clock_ms(self, shard: int) -> int:
        """Return the time by the server's clock, of the server that has a shard, as far as this process knows it.

        It is asked for where it is not known, or was asked for more than a minute ago; else this makes no call.
        """
        ...

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Append records; True for the add that made its timeline ready.

        One that was delivered within the ``dedupe_ms`` of its terms is counted, and not appended; nor is it urgent.
        If the shard no longer takes adds, they go to those that do.
        """
        ...

    async def claim(
        self,
        shard: int,
        count: int,
        lease_ms: int,
        limits: Limits,
        *,
        sample: bool = False,
        doubtful: bool = True,
        bound: int = DIGEST_BYTES,
    ) -> Claims:
        """Promote due timelines, and open up to ``count`` digests, oldest due first.

        ``bound`` is kept with each that is new. ``sample`` draws them from up to ``SAMPLE`` ready ones at random,
        those that have not failed first. One of them at the most is doubtful, the one whose lease ended first; none
        is, unless ``doubtful``.
        """
        ...

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        """Return a page of the entries under delivery; ``LeaseLost`` if another worker has the lease."""
        ...

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> Sequence[bool | AiodigestError]:
        """Extend leases to ``lease_ms`` from now; False for a lost one. An empty call says that there is a worker."""
        ...

    async def close(self, shard: int, closes: Sequence[Close]) -> Sequence[Closed | AiodigestError]:
        """End deliveries that are known to have ended for good."""
        ...

    async def retry(self, shard: int, retries: Sequence[Retry]) -> Sequence[bool | AiodigestError]:
        """Let deliveries that failed wait for their next attempt; False for one whose lease is lost."""
        ...

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> Sequence[bool | AiodigestError]:
        """Give leases back, uncharged; ``started`` if the callbacks may have done something."""
        ...

    async def postpone(
        self, shard: int, postpones: Sequence[Postpone], limits: Limits
    ) -> Sequence[bool | AiodigestError]:
        """Give leases back without charging the attempt, and let their digests wait; False for one that is lost.

        They stay due when they were, which orders them when they are ready again. ``limits`` are as in a claim.
        """
        ...

    async def throttle(
        self,
        wanted: int,
        rate: Rate,
        asker: int,
        returned: Sequence[Tokens] = (),
        pauses: Sequence[tuple[str, int]] = (),
        known: int = 0,
    ) -> Grant:
        """Hand out up to ``wanted`` tokens, from one place for all shards, and take back those that were not used.

        ``asker`` is this process's own number. ``pauses`` are destinations that all workers are to hold back, each for
        so many milliseconds from now. A call that fails may have handed out tokens, which are then lost, but has taken
        back and noted at most what it was told.
        """
        ...

    async def wait(self, shard: int, last: str) -> str:
        """Wait for an entry of the shard's wake-up stream after ``last``, or for a while; return the last one."""
        ...

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        """Promote what is due by the deadline (None: now), up to 200 a shard; return the keys with their due times."""
        ...

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        """Make ready what has a lease that ended by the deadline (None: now), up to 200 a shard."""
        ...

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        """Claim one timeline if it is ready. ``InvalidState`` if it needs a feature that nobody here knows."""
        ...

    @asynccontextmanager
    async def digest(self, key: str, policy: Policy, lease_ms: int = 60_000) -> AsyncGenerator[Lease, None]:
        """Open a ready timeline, and close it on leaving; ``InvalidState`` if it is not ready.

        The lease is not renewed. An exception inside keeps every record: the timeline is ready again, and its
        digest comes back with the same id. Records over ``max_size`` stay ready, and records left out by ``max_age``
        are counted.
        """
        shard, limits = self.shard_map.shard_of(key), policy.terms.limits
        lease = await self.open(shard, key, lease_ms, limits)
        if lease is None:
            raise InvalidState(f"timeline {key!r} is not ready")
        try:
            entries = latest((await entries_of(lease, partial(self.read, shard, lease)))[1])
            young = [entry for entry in entries if not aged(entry, lease.cut_ms)]
            yield replace(lease, entries=tuple(young))
        except BaseException:
            await self.release(shard, [lease], started=True)
            raise
        old, cool_ms = len(entries) - len(young), policy.cool_ms(lease.iteration)
        report = Close(lease, lease.taken, len(young), cool_ms, limits, lease_ms, old, counts=bool(young))
        close = report._replace(dedupe_ms=policy.terms.dedupe_ms)
        [closed] = await self.close(shard, [close])
        if isinstance(closed, AiodigestError):
            raise closed
        if closed.status == "lost":
            raise LeaseLost(f"the lease on timeline {key!r} ended before its digest was closed")
        if closed.status == "part":
            rest = replace(lease, digest_id=closed.digest_id, size=closed.left)
            await self.release(shard, [rest], started=False)

    async def delete(self, key: str) -> bool:
        """Drop a timeline, its cool-down included; True if it held records."""
        ...

    async def flush(self, key: str) -> bool:
        """Make a timeline ready now, or after the delivery under way; False if it holds no records, or is muted."""
        ...

    async def mute(self, key: str, mute: Mute, limits: Limits) -> bool:
        """Deliver nothing of a timeline but what is under delivery; False if that is over already, and it is unmuted.

        What waits is kept as long as its ttl says, which counts from the end of a mute that has one.
        """
        ...

    async def unmute(self, key: str, limits: Limits) -> bool:
        """Schedule a timeline again that was muted; False if it was not."""
        ...

    async def remove(self, key: str, name: bytes, limits: Limits) -> bool:
        """Drop the record of an identity, unless it is under delivery; True if it was there, and no value of it is left
        in a digest.
        """
        ...

    async def reschedule(self, key: str, move: Move) -> int | None:
        """Move the due time of a waiting timeline; return the new one, or None if none waits at this ``iteration``.

        By its terms, a cool-down without records is moved too; its new end is returned.
        """
        ...

    async def replay(self, letter_id: str, terms: Terms, own: bool | None) -> bool:
        """Put a dead letter's records before newer ones, and schedule as an add would.

        ``own`` is as in ``Add``; None takes the limits that the timeline has stored, or had as its digest failed.
        """
        ...

    async def discard(self, letter_id: str) -> bool:
        """Drop a dead letter; True if there was one."""
        ...
