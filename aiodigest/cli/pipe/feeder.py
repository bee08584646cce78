"""Lines fed to an engine no faster than its digests go out, and its timelines flushed at the end: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from math import inf
from typing import TypeAlias, TypeVar

from aiodigest import (
    JSON,
    AiodigestError,
    BackendUnavailable,
    Delivery,
    Digest,
    DigestEngine,
    Entry,
    LimitExceeded,
    PartialAdd,
    Reject,
    Stats,
)
from aiodigest.cli.event_loop import freeze_garbage, run_until
from aiodigest.cli.options import collect
from aiodigest.cli.output import FAILED, log_warnings, progress_bar, say
from aiodigest.cli.pipe.parser import Malformed, Shape, Unusable
from aiodigest.cli.pipe.streams import Line, Reader, Receiver, Sender, Source
from aiodigest.cli.pipe.timing import in_options
from aiodigest.cli.rendering import count, shortened

T = TypeVar("T")
Entries: TypeAlias = list[tuple[Line, Entry[JSON]]]

GIVE_UP = 60.0  # seconds without a server
INTERVAL = 0.5  # seconds between calls meanwhile
LOOK = 1.0  # seconds between looks at a full timeline: the end of a delivery may go unreported
NAME = 100  # characters of a key that are shown
SHOWN = 20  # lines that cannot be used; more are only counted
AT_FIRST = 10_000  # lines of a file that are read before any is delivered
POLL = 0.05  # seconds between looks at what is still held
BRIEFLY = 5.0  # seconds of patience, at most, after a signal or with a timeline that has no room
FLUSHES = 100  # at a time


async def retry(call: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of ``call``; call again while the server is away, for up to a minute."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + GIVE_UP
    while True:
        try:
            return await call()
        except BackendUnavailable:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(INTERVAL)


class Backpressure:
    """Counts the records each timeline holds, and has a full one delivered before more is added.

    It passes the engine's deliveries on to the receiver. A count may be too high (for ids that come again, or
    records too old to be delivered), never too low. ``repeats`` is True if ids may come again. ``retrying`` are the
    timelines whose last delivery has failed, which must be left to their backoff; ``succeeded`` is when, by the loop's
    clock, one did not fail last. A timeline has ``room`` for so many records, and while it is retried for ``most``, so
    that others go on meanwhile.
    """

    def __init__(
        self,
        engine: DigestEngine,
        deliverer: DigestEngine,
        receiver: Receiver,
        *,
        room: float,
        most: int,
        repeats: bool,
    ) -> None:
        self._engine, self._receiver, self._repeats = engine, receiver, repeats
        self._room, self._most = room, most
        self.retrying = set[str]()
        self.succeeded = 0.0
        self._held: Counter[str] = Counter()
        self._awaited: str | None = None
        self._progress, self._counted = asyncio.Event(), asyncio.Event()
        deliverer.observe(self._signal)

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Pass a digest on, once those of an earlier run are counted: the delivery callback."""
        await self._counted.wait()
        try:
            await self._receiver.deliver(digest)
        except Reject:
            self.retrying.discard(digest.key)
            raise
        except BaseException:
            self.retrying.add(digest.key)
            raise
        self.retrying.discard(digest.key)
        self.succeeded = asyncio.get_running_loop().time()
        if digest.attempt == 1:  # what comes again may have been subtracted
            self._held[digest.key] -= len(digest.records)
            if self._held[digest.key] <= 0:
                del self._held[digest.key]

    def _signal(self, delivery: Delivery) -> None:
        if delivery.key == self._awaited:
            self._progress.set()

    async def count_held(self) -> int:
        """Count the records left by an earlier run."""
        async for timeline in self._engine.timelines():
            self._held[timeline.key] = timeline.size
        self._counted.set()
        return self._held.total()

    def reserve(self, key: str) -> bool:
        """Count a record about to be added; False, without counting it, if there is no room for it."""
        if self._room < inf:
            if self._held[key] >= self._room_of(key):
                return False
            self._held[key] += 1
        return True

    def _room_of(self, key: str) -> float:
        return self._most if key in self.retrying else self._room

    async def make_room(self, key: str, gives_up: Callable[[float], bool]) -> bool:
        """Have a full timeline delivered until half of it is free. All records counted must have been added.

        False if it is retried, and ``gives_up`` says that it is time to: it is asked with when this began.
        """
        if self._repeats:
            timeline = await retry(lambda: self._engine.peek(key))
            if timeline is None:
                del self._held[key]
            elif timeline.digest_id is None:  # else an id may be held twice: under delivery, and since
                self._held[key] = len(timeline.records)
        self._awaited, began = key, asyncio.get_running_loop().time()
        while self._held[key] > self._room_of(key) // 2:
            self._progress.clear()
            if key in self.retrying:
                if gives_up(began):
                    return False
            elif not await retry(lambda: self._engine.flush(key)):
                del self._held[key]
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), LOOK)
        self._awaited = None
        return True


class Feeder:
    """Feeds lines to ``engine``, and at their end has ``deliverer``, which is one of the same namespace, deliver all
    that waits; loses some if ``room`` is inf. It begins to deliver once what was there at first is fed.

    What could not be delivered is tried again until nothing could be for ``patience`` seconds, counted from the end of
    the input, or from when a timeline had no room for more.
    """

    def __init__(
        self,
        engine: DigestEngine,
        deliverer: DigestEngine,
        shape: Shape,
        receiver: Receiver,
        *,
        room: float,
        most: int,
        strict: bool,
        patience: float = inf,
    ) -> None:
        self._engine, self._shape, self._strict, self._patience = engine, shape, strict, patience
        self._receiver, self._deliverer = receiver, deliverer
        self._backpressure = Backpressure(
            engine, deliverer, receiver, room=room, most=most, repeats=shape.id is not None
        )
        self._loses = room == inf
        self._delivering = AsyncExitStack()
        self._delivers, self._is_whole = False, False  # since when there is more to deliver, and whether all is there
        self._gave_up = False
        self._kept: Stats | None = None  # what was given up, for another run
        self._full: tuple[Line, str] | None = None  # the first line that there was no room for, and its timeline
        self._added = 0  # lines
        self._malformed, self._lacking, self._refused = 0, 0, 0  # lines that were not, for three reasons
        self._left = 0  # lines of an earlier run
        self._aged = 0  # lines that this run has left out as too old; before its end, less those of earlier ones
        self._timeless = 0  # lines that were added although their time is not understood
        self._unusable: Unusable | None = None  # the first line without a required field
        self._signal: int | None = None  # the one that ended the input
        self._signalled = 0.0  # when, by the loop's clock

    async def run(self, sources: Sequence[Source], follow: bool) -> int:
        """Run until the input has ended and nothing is held, standard output fails, or a second signal comes.

        Returns the exit code. Raises BackendUnavailable if the server is away for too long, and OSError if the input
        cannot be read.
        """
        sizes = [source.size for source in sources if source.size is not None]
        bar = progress_bar("reading", sum(sizes), lambda: sum(source.read for source in sources), in_bytes=True)
        self._is_whole = not follow and len(sizes) == len(sources)
        sends = isinstance(self._receiver, Sender)
        # no end is known; or what is printed may come to the same terminal, perhaps through another program
        if not self._is_whole or not stat.S_ISREG(os.fstat(1).st_mode):
            bar = nullcontext()
        channel = self._receiver.channel if isinstance(self._receiver, Sender) else nullcontext()
        async with channel, self._engine:
            self._aged = -(await self._engine.stats()).aged  # a pipe without a server says so at once, in one line
            self._left = await self._backpressure.count_held()
            if self._left:
                done = "sent again" if sends else "printed"
                say(f"{count(self._left, 'line')} left by an earlier run: {done} with these")
            freeze_garbage()
            reader = Reader(sources, follow)
            try:
                async with bar:
                    log_warnings()  # above the bar
                    await self._until_signals(reader)
            except (BackendUnavailable, OSError):
                self._report()
                raise
        return self._report()

    async def _until_signals(self, reader: Reader) -> None:
        loop, work = asyncio.get_running_loop(), asyncio.create_task(self._feed_and_flush(reader))

        def on_signal(number: int) -> None:
            if self._signal is not None:
                work.cancel()
            self._signal, self._signalled = number, loop.time()
            reader.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await run_until(self._receiver.failed, work)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _feed_and_flush(self, reader: Reader) -> None:
        async with self._delivering:
            if self._left:
                await self._deliver()
            try:
                async for lines in reader.batches():
                    if not await self._add(self._entries(lines)):
                        reader.stop()
                        break
                    # the first digest of a group holds what was there, and not the first line alone
                    if (not self._is_whole and (self._loses or not reader.has_more)) or self._added > AT_FIRST:
                        await self._deliver()
                    if self._strict and self._unused:
                        reader.stop()
                        break
            except OSError:
                await self._flush_all()
                raise
            await self._flush_all()
        if self._gave_up:
            stats = await retry(self._engine.stats)
            self._kept = stats if stats.waiting + stats.ready + stats.leased else None

    async def _deliver(self) -> None:
        """Begin to deliver, if that has not begun."""
        if not self._delivers:
            self._delivers = True
            await self._delivering.enter_async_context(self._deliverer.delivering(self._backpressure.deliver))

    def _entries(self, lines: Sequence[Line]) -> Entries:
        entries: Entries = []
        for line in lines:
            if not line.text.strip():
                continue
            try:
                entry, no_time = self._shape.entry(line.text)
                if no_time is not None:
                    if self._strict:
                        raise no_time
                    self._timeless += 1
                    if self._timeless <= SHOWN:
                        say(f"{line.place}: {no_time}")
                entries.append((line, entry))
            except Malformed as error:
                self._complain(line, error)
                if isinstance(error, Unusable):
                    self._unusable = self._unusable or error
                if self._strict:
                    break
        return entries

    @property
    def _unused(self) -> int:
        return self._malformed + self._lacking + self._refused

    def _complain(self, line: Line, reason: object) -> None:
        if isinstance(reason, Unusable):
            self._lacking += 1
        elif isinstance(reason, Malformed):
            self._malformed += 1
        else:
            self._refused += 1
        if self._unused <= SHOWN:
            say(f"{line.place}: {reason}")

    async def _add(self, entries: Entries) -> bool:
        """Add entries, no faster than there is room for them; False if there is none for some of them in the end."""
        start = 0
        for index, (line, entry) in enumerate(entries):
            while not self._backpressure.reserve(entry.key):
                await self._send(entries[start:index])
                start = index
                await self._deliver()
                if not await self._backpressure.make_room(entry.key, self._has_no_patience):
                    self._full = line, entry.key
                    return False
        await self._send(entries[start:])
        return True

    def _has_no_patience(self, began: float) -> bool:
        """True if nothing was delivered for too long since the instant ``began``, or since a signal."""
        is_brief = self._signal is not None or self._full is not None
        patience = min(self._patience, BRIEFLY) if is_brief else self._patience
        latest = max(began, self._signalled, self._backpressure.succeeded)
        return asyncio.get_running_loop().time() - latest > patience

    async def _send(self, entries: Entries) -> None:
        """Add entries; those the server did not take are added again under the same id, so that none is added twice."""
        left = entries

        async def attempt() -> None:
            nonlocal left
            try:
                await self._engine.add_many([entry for _, entry in left])
                self._added += len(left)
            except PartialAdd as error:
                self._added += sum(isinstance(result, bool) for result in error.results)
                again: Entries = []
                for one, result in zip(left, error.results, strict=True):
                    if isinstance(result, BackendUnavailable):
                        again.append(one)
                    elif isinstance(result, AiodigestError):
                        told = in_options(result) if isinstance(result, LimitExceeded) else str(result)
                        self._complain(one[0], ValueError(told))
                left = again
                for result in error.results:
                    if isinstance(result, BackendUnavailable):
                        raise result from None

        try:
            await retry(attempt)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{error}; the lines from {left[0][0].place} on were not added") from error

    async def _flush_all(self) -> None:
        """Flush all timelines but those that are tried again, until none holds a record, or patience is at its end."""
        await self._deliver()
        backpressure, began = self._backpressure, asyncio.get_running_loop().time()
        while (stats := await retry(self._engine.stats)).waiting + stats.ready + stats.leased:
            is_free = not stats.leased or self._signal is not None  # else what is under way may yet be delivered
            if backpressure.retrying and is_free and self._has_no_patience(began):
                self._gave_up = True
                break
            found = await retry(lambda: collect(self._engine.timelines("waiting")))
            waiting = [timeline.key for timeline in found if timeline.key not in backpressure.retrying]
            for start in range(0, len(waiting), FLUSHES):
                some = waiting[start : start + FLUSHES]
                await retry(lambda some=some: asyncio.gather(*map(self._engine.flush, some)))
            await asyncio.sleep(POLL)
        self._aged += stats.aged

    @property
    def _again(self) -> str:
        """Advice on how to try again; an id does not join what is under way and what is new."""
        name = self._engine.namespace
        alone = f"with --namespace {name}, without files and with </dev/null, only what was kept comes"
        return f"the same command. If it reads its input again, lines come twice; {alone}"

    def _report(self) -> int:
        """Print a line for each thing that the user should know at the end, and return the exit code."""
        dropped, error = sum(self._receiver.drops.values()), self._receiver.error
        if isinstance(self._receiver, Sender) and os.isatty(2):  # a script sees the exit code
            say(f"{count(self._receiver.sent, 'digest')} delivered, with {count(self._receiver.lines, 'line')}")
        unusable = self._unusable
        unused = {
            count(self._malformed, "malformed line"): self._malformed,
            f"{count(self._lacking, 'line')} without a usable {unusable.field if unusable else ''}": self._lacking,
            f"{count(self._refused, 'line')} over a limit": self._refused,
        }
        shown = f" (the first {SHOWN} are shown)" if self._unused > SHOWN else ""
        fate = "stopped at the first" if self._strict else "skipped"
        for told in [told for told, number in unused.items() if number]:
            say(f"{told}: {fate}{shown}")
        if self._timeless:
            say(f"{count(self._timeless, 'line')} without a time that is understood: kept, at the time of arrival")
        if self._aged > 0:
            say(f"{count(self._aged, 'line')} left out as too old, by --max-age")
        if unusable is not None and not self._added:
            say(f"no line had a usable {unusable.field}; the first has {unusable.has}")
        if dropped:
            lost = f"{count(dropped, 'record')} dropped because a timeline was full"
            say(f"{lost}: raise --capacity, or set --max-size")
        if self._receiver.rejected:
            rejected = f"{count(self._receiver.rejected, 'digest')} rejected, and kept as dead letters"
            say(f"{rejected}: see aiodigest dead list --namespace {self._engine.namespace}")
        if self._full is not None:
            line, key = self._full
            say(f"{shortened(key, NAME)} fails, and holds all that it can: nothing was added from {line.place} on")
        if self._kept is not None:
            groups = count(self._kept.waiting + self._kept.ready + self._kept.leased, "group")
            say(f"{groups} could not be delivered; to try again: {self._again}")
        if error is not None:
            say(f"standard output: {getattr(error, 'strerror', None) or error}; to go on: {self._again}")
            return FAILED
        if self._signal is not None:
            return 128 + self._signal
        lost = dropped or self._receiver.rejected or self._kept is not None or self._full is not None
        return FAILED if lost or (self._unused and (self._strict or not self._added)) else 0
