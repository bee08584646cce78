"""Methods to look at timelines and dead letters, and to move them by hand: an engine's work besides adding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from functools import partial
from typing import Generic, get_args

from typing_extensions import TypeVar

from aiodigest.backend import MAX_SHARDS, Backend, Bookmark, Move, Page, StoredDeadLetter, StoredTimeline
from aiodigest.codecs import JSON, Codec
from aiodigest.errors import (
    AiodigestError,
    BackendUnavailable,
    ConfigurationError,
    InvalidArgument,
    InvalidState,
    shown,
)
from aiodigest.models import OVERDUE, DeadLetter, Draining, Finding, Health, Record, State, Stats, Timeline
from aiodigest.policy import Policies, Policy, milliseconds
from aiodigest.records.validation import Bounds, duration, microseconds, name, nearest, whole
from aiodigest.session.session import Entered, Session
from aiodigest.worker.delivery import read

T = TypeVar("T", default=JSON)
Item = TypeVar("Item")

PAGE = 500
PACE = 1.0  # seconds between two looks at what is left in old shards
TIMES = ("oldest_due", "overdue")  # of Stats; the others are counts that the store has under the same names


class Management(Generic[T]):
    """The part of an engine that needs no callback. Every method but ``health`` may raise BackendUnavailable."""

    namespace: str
    _bounds: Bounds
    _codec: Codec[T]
    _policies: Policies
    _timeout: float
    _session: Entered | None
    _sync_session: Session | None = None  # of ``engine.sync``, in the loop of its thread

    def _entered(self) -> Entered:
        for session in (self._session, self._sync_session):
            if session is not None and session.is_here:
                return session
        if self._session is None:
            raise ConfigurationError(f"engine {self.namespace!r} is not entered: use it inside `async with engine:`")
        raise ConfigurationError(
            f"engine {self.namespace!r} was entered in another event loop or process: it can be used there alone"
        )

    async def _backend(self) -> Backend:
        return await self._entered().backend()

    async def _timeline(self, key: str) -> Backend:
        """Check a key, and return the store."""
        name(key, "key", self._bounds.name)
        return await self._backend()

    async def _policy(self, key: str) -> Policy:
        return await self._policies.of(key, self._timeout)

    async def flush(self, key: str) -> bool:
        """Make a timeline due now, or at the end of the delivery under way; True if it holds records."""
        session, backend = self._entered(), await self._timeline(key)
        flushed = await backend.flush(key)
        session.poke(backend.shard_map.shard_of(key))
        return flushed

    async def delete(self, key: str) -> bool:
        """Drop a timeline with its records and its cool-down; True if it held records.

        A delivery under way is cancelled at the next renewal of its lease.
        """
        return await (await self._timeline(key)).delete(key)

    async def remove(self, key: str, record_id: str) -> bool:
        """Drop the record ``record_id``; True if dropped. One under delivery, or of unknown outcome, stays."""
        backend = await self._timeline(key)
        record = name(record_id, "record_id", self._bounds.name)
        policy = await self._policy(key)
        return await backend.remove(key, record, policy.terms.limits)

    async def reschedule(
        self, key: str, *, at: datetime | float | None = None, delay: float | timedelta | None = None
    ) -> datetime:
        """Move the due time of a waiting timeline, and return it.

        To ``at`` (an aware datetime or epoch seconds, on the server's clock), or to ``delay`` (seconds or a timedelta)
        from now; with neither, to the current policy's time. It never comes before the cool-down's end, nor later
        than ``maximum_delay`` after the last digest. In a retry wait, ``at`` and ``delay`` move the next try.

        Raises InvalidState if the timeline is not waiting, or if it waits for a retry and neither is given.
        """
        session, backend = self._entered(), await self._timeline(key)
        if at is not None and delay is not None:
            raise InvalidArgument("give at or delay to reschedule, not both")
        policy = await self._policy(key)
        at_ms = None if at is None else microseconds(at, "at") // 1000
        delay_ms = None if delay is None else milliseconds(duration(delay, "delay"))
        by_policy = at_ms is None and delay_ms is None
        while True:
            windows = await backend.operations.look_all(key)
            if not windows:
                raise InvalidState(f"timeline {key!r} holds no records: only a waiting timeline can be rescheduled")
            iterations = _movable(windows) if by_policy else [windows[0].iteration]
            dues: list[int | None] = []
            for iteration in iterations:
                gap_ms = policy.cool_ms(iteration) if iteration else 0
                dues.append(await backend.reschedule(key, Move(policy.terms, at_ms, delay_ms, gap_ms, iteration)))
            moved = [due for due in dues if due is not None]
            if len(moved) == len(dues):  # else a digest was closed since the look
                session.poke(backend.shard_map.shard_of(key))
                return nearest(min(moved))

    async def peek(self, key: str) -> Timeline[T] | None:
        """Return a timeline with its records, without delivering them; None if it holds none."""
        backend = await self._timeline(key)
        window = await backend.operations.look(key)
        if window is None:
            return None
        return self._view(window, await self._records(await backend.operations.entries(key)))

    async def timelines(self, state: State | None = None) -> AsyncIterator[Timeline[T]]:
        """Yield the timelines, the earliest due of each shard and state first; without records.

        ``state`` is "waiting", "ready" or "leased", or by default None: all of them. A timeline whose state or due
        time changes meanwhile may be missed, or come again. Every other one comes once, whatever is deleted meanwhile.
        """
        states: tuple[State, ...] = get_args(State)
        if state is not None and (not isinstance(state, str) or state not in states):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"state must be one of {', '.join(states)}, not {shown(state)}")
        backend = await self._backend()
        for shard in _shards_of(backend):
            for each in states if state is None else (state,):
                async for window in _paged(partial(backend.operations.page, shard, each)):
                    yield self._view(window)

    async def stats(self) -> Stats:
        """Return timelines by state, dead letters, and counters of events."""
        counts = await (await self._backend()).operations.counts()
        oldest = counts.get("oldest_due_ms")
        numbers = {field.name: counts.get(field.name, 0) for field in fields(Stats) if field.name not in TIMES}
        due = None if oldest is None else nearest(oldest)
        return Stats(**numbers, oldest_due=due, overdue=counts.get("overdue_ms", 0) / 1000)

    async def health(self, *, overdue: float | timedelta = OVERDUE) -> Health:
        """Check that the server answers, and no timeline has been due for over ``overdue`` (seconds or a timedelta).

        By default that is a minute. It raises nothing but InvalidArgument: if the server is away, its answer says so,
        within the engine's ``timeout``. A timeline is overdue while no worker claims it: there is none, or too few, or
        they are in backoff mode, or rest because a callback asked for it. An engine whose background task a fault has
        ended is not healthy either.
        """
        bound = duration(overdue, "overdue")
        try:
            session = self._entered()
            if fault := session.fault:
                return Health(False, fault)
            try:
                async with asyncio.timeout(self._timeout):  # for the calls to all shards together
                    stats = await self.stats()
            except TimeoutError:
                raise session.explained(BackendUnavailable(f"no answer within {self._timeout:g} s")) from None
        except AiodigestError as error:
            return Health(False, str(error))
        return stats.health(bound)

    async def dead_letters(self) -> AsyncIterator[DeadLetter[T]]:
        """Yield all dead letters, the oldest of each shard first. They may be replayed or discarded meanwhile."""
        backend = await self._backend()
        for shard in _shards_of(backend):
            async for letter_id in _paged(partial(backend.operations.dead_letters, shard)):
                letter = await backend.operations.dead_letter(letter_id, shard)
                if letter is not None:  # else it is gone, or in a newer shard, whose letters come later
                    yield await self._letter(letter)

    async def dead_letter(self, letter_id: str) -> DeadLetter[T] | None:
        """Return a dead letter, or None if no letter has that id."""
        name(letter_id, "the id of a dead letter")
        letter = await (await self._backend()).operations.dead_letter(letter_id)
        return None if letter is None else await self._letter(letter)

    async def replay(self, letter_id: str) -> bool:
        """Put the records of a dead letter back, before newer ones (which win), and drop the letter.

        True if its timeline is due now. Of several letters of one timeline, replay the newest first: each goes before
        the records already there. Raises InvalidState if there is no such letter, or its timeline has a digest under
        delivery or in a retry wait, and LimitExceeded if it would outgrow its capacity: the letter stays.
        """
        name(letter_id, "the id of a dead letter")
        session, backend = self._entered(), await self._backend()
        letter = await backend.operations.dead_letter(letter_id)
        if letter is None:
            raise InvalidState(f"there is no dead letter {letter_id!r}")
        policy = await self._policy(letter.key)
        ready = await backend.replay(letter_id, policy.terms, self._policies.own(policy))
        session.poke(backend.shard_map.shard_of(letter.key))
        return ready

    async def discard(self, letter_id: str) -> bool:
        """Drop a dead letter; True if there was one."""
        name(letter_id, "the id of a dead letter")
        return await (await self._backend()).discard(letter_id)

    async def examine(self) -> list[Finding]:
        """Check the servers and the namespace: return each check's findings, with remedies.

        Every primary is asked for its version, memory, eviction, persistence, replicas, clock, round trip and slow
        scripts, and the namespace for its shards, workers, overdue timelines and dead letters. Nothing is changed, and
        a namespace that was never used is not created. If the user may not ask something, a note names the missing
        command. It takes some thirty calls to each server. Replicas that sentinels or a cluster may promote are asked
        if they know the user, provided that the primary lists them (``INFO``).
        """
        return await (await self._backend()).operations.examine()

    async def erase(self) -> int:
        """Drop the namespace with all its contents, counters included; return the number of keys dropped.

        It looks through all keys of the servers (``SCAN``), a thousand a call. Use it to end a namespace that nobody
        uses any more: a process that still uses it starts it anew.

        Raises ConfigurationError, and drops nothing, if the user may not ``SCAN``.
        """
        return await (await self._backend()).operations.erase()

    async def _try_erase(self) -> None:
        """Raise the errors of ``erase``, before anything is in the namespace. It takes a call to each server."""
        await (await self._backend()).operations.try_erase()

    async def reshard(self, shards: int) -> AsyncIterator[Draining]:
        """Give the namespace ``shards`` shards, from 1 to 1024, while it is in use; yield the work left to do.

        The new shards take all adds from the first moment on, and the timelines of the old ones are delivered on their
        schedule. A running process takes over the new number at its next call. Once the old shards are empty, which
        may take as long as the longest delay or retry, they are removed, and this ends; until then it yields about
        once a second. You may interrupt it at any time: called again, with the same number, it goes on.

        Meanwhile a timeline may be in an old and a new shard, with a digest in each, and the new one does not know
        the old one's cool-down.

        Raises InvalidState while a change to another number is under way.
        """
        backend = await self._backend()
        if not await backend.operations.reshard(whole(shards, "shards", 1, MAX_SHARDS)):
            return
        while left := await backend.operations.drain():
            yield Draining(**left)
            await asyncio.sleep(PACE)

    async def _records(self, entries: list[bytes]) -> list[Record[T | bytes]]:
        contents = await read(entries, self._codec)
        return [*contents.records, *contents.raw]

    def _view(self, window: StoredTimeline, records: list[Record[T | bytes]] | None = None) -> Timeline[T]:
        return Timeline(
            window.key,
            window.state,
            nearest(window.due_ms),
            window.logged + window.opened,
            window.attempt,
            window.iteration,
            window.dropped,
            nearest(window.cool_ms) if window.cool_ms else None,
            window.digest_id or None,
            window.last_error or None,
            tuple(records or ()),
        )

    async def _letter(self, letter: StoredDeadLetter) -> DeadLetter[T]:
        return DeadLetter(
            letter.id,
            letter.key,
            letter.reason,
            nearest(letter.buried_ms),
            letter.attempt,
            letter.digest_id,
            tuple(await self._records(list(letter.entries))),
        )


def _movable(windows: Sequence[StoredTimeline]) -> list[int]:
    """Return the iterations at which a policy can move a timeline: one, except while resharding.

    If nothing can be moved, return the first one's: the store then gives the reason.
    """
    waiting = {window.iteration for window in windows if window.state == "waiting" and not window.digest_id}
    return sorted(waiting) or [windows[0].iteration]


async def _paged(read: Callable[[int, Bookmark | None], Awaitable[Page[Item]]]) -> AsyncIterator[Item]:
    """Yield the items on all pages from ``read``, one after another."""
    page = await read(PAGE, None)
    while True:
        for item in page.items:
            yield item
        if page.end is None:
            return
        page = await read(PAGE, page.end)


def _shards_of(backend: Backend) -> Iterator[int]:
    """Yield all shards, including any that a call to one of them reveals."""
    shard = 0
    while shard < backend.shard_map.count:
        yield shard
        shard += 1
