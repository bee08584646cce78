"""Lines fed to an engine no faster than its digests go out, and its timelines flushed at the end: nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from math import inf
from typing import TypeAlias, TypeVar

from aiodigest import JSON, AiodigestError, BackendUnavailable, Delivery, Digest, DigestEngine, Entry, PartialAdd
from aiodigest.cli.event_loop import freeze_garbage, run_until
from aiodigest.cli.options import collect
from aiodigest.cli.output import FAILED, log_warnings, progress_bar, say
from aiodigest.cli.pipe.parser import Malformed, Shape, Unusable
from aiodigest.cli.pipe.streams import Line, Reader, Render, Source, Writer
from aiodigest.cli.pipe.timing import in_options
from aiodigest.cli.rendering import count

T = TypeVar("T")
Entries: TypeAlias = list[tuple[Line, Entry[JSON]]]

GIVE_UP = 60.0  # seconds without a server
INTERVAL = 0.5  # seconds between calls meanwhile
LOOK = 1.0  # seconds between looks at a full timeline: the end of a delivery may go unreported
SHOWN = 20  # malformed lines; more are only counted
NAMES = 20  # fields of a line
POLL = 0.05  # seconds between looks at what is still held
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

    It passes the engine's deliveries on to the writer. A count may be too high (for ids that come again, or
    records too old to be delivered), never too low. ``repeats`` is True if ids may come again.
    """

    def __init__(self, engine: DigestEngine, writer: Writer, capacity: float, repeats: bool) -> None:
        self._engine, self._writer, self._capacity, self._repeats = engine, writer, capacity, repeats
        self._held: Counter[str] = Counter()
        self._awaited: str | None = None
        self._progress, self._counted = asyncio.Event(), asyncio.Event()
        engine.observe(self._signal)

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Pass a digest on, once those of an earlier run are counted: the delivery callback."""
        await self._counted.wait()
        await self._writer.deliver(digest)
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
        if self._capacity < inf:
            if self._held[key] >= self._capacity:
                return False
            self._held[key] += 1
        return True

    async def make_room(self, key: str) -> None:
        """Have a full timeline delivered until half of it is free. All records counted must have been added."""
        if self._repeats:
            timeline = await retry(lambda: self._engine.peek(key))
            if timeline is None:
                del self._held[key]
            elif timeline.digest_id is None:  # else an id may be held twice: under delivery, and since
                self._held[key] = len(timeline.records)
        self._awaited = key
        while self._held[key] > self._capacity // 2:
            self._progress.clear()
            if not await retry(lambda: self._engine.flush(key)):
                del self._held[key]
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(self._progress.wait(), LOOK)
        self._awaited = None


class Feeder:
    """Feeds lines to an engine, and at their end has it deliver all that waits; loses some if ``capacity`` is inf."""

    def __init__(self, engine: DigestEngine, shape: Shape, render: Render, *, capacity: float, strict: bool) -> None:
        self._engine, self._shape, self._strict = engine, shape, strict
        self._writer = Writer(render)
        self._backpressure = Backpressure(engine, self._writer, capacity, repeats=shape.id is not None)
        self._usable = False  # a line was
        self._malformed = 0  # lines that were not added
        self._timeless = 0  # lines that were added although their time is not understood
        self._unusable: Unusable | None = None  # the first line without a required field
        self._signal: int | None = None  # the one that ended the input

    async def run(self, sources: Sequence[Source], follow: bool) -> int:
        """Run until the input has ended and nothing is held, standard output fails, or a second signal comes.

        Returns the exit code. Raises BackendUnavailable if the server is away for too long, and OSError if the input
        cannot be read.
        """
        sizes = [source.size for source in sources if source.size is not None]
        bar = progress_bar("reading", sum(sizes), lambda: sum(source.read for source in sources), in_bytes=True)
        if follow or len(sizes) < len(sources) or os.isatty(1):  # no end is known, or digests are printed on a terminal
            bar = nullcontext()
        async with self._engine.delivering(self._backpressure.deliver):
            await self._engine.stats()  # a pipe without a server says so at once, in one line
            if left := await self._backpressure.count_held():
                say(f"{count(left, 'line')} left by an earlier run of this command: printed too")
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
            self._signal = number
            reader.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await run_until(self._writer.failed, work)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _feed_and_flush(self, reader: Reader) -> None:
        try:
            async for lines in reader.batches():
                await self._add(self._entries(lines))
                if self._strict and self._malformed:
                    reader.stop()
                    break
        except OSError:
            await self._flush_all()
            raise
        await self._flush_all()

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
        self._usable = self._usable or bool(entries)
        return entries

    def _complain(self, line: Line, reason: object) -> None:
        self._malformed += 1
        if self._malformed <= SHOWN:
            say(f"{line.place}: {reason}")

    async def _add(self, entries: Entries) -> None:
        """Add entries, no faster than there is room for them."""
        start = 0
        for index, (_, entry) in enumerate(entries):
            while not self._backpressure.reserve(entry.key):
                await self._send(entries[start:index])
                start = index
                await self._backpressure.make_room(entry.key)
        await self._send(entries[start:])

    async def _send(self, entries: Entries) -> None:
        """Add entries; those the server did not take are added again under the same id, so that none is added twice."""
        left = entries

        async def attempt() -> None:
            nonlocal left
            try:
                await self._engine.add_many([entry for _, entry in left])
            except PartialAdd as error:
                again: Entries = []
                for one, result in zip(left, error.results, strict=True):
                    if isinstance(result, BackendUnavailable):
                        again.append(one)
                    elif isinstance(result, AiodigestError):
                        self._complain(one[0], in_options(str(result)))
                left = again
                for result in error.results:
                    if isinstance(result, BackendUnavailable):
                        raise result from None

        try:
            await retry(attempt)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{error}; the lines from {left[0][0].place} on were not added") from error

    async def _flush_all(self) -> None:
        """Flush all timelines, again and again, until none holds a record."""
        while (stats := await retry(self._engine.stats)).waiting + stats.ready + stats.leased:
            waiting = [timeline.key for timeline in await retry(lambda: collect(self._engine.timelines("waiting")))]
            for start in range(0, len(waiting), FLUSHES):
                some = waiting[start : start + FLUSHES]
                await retry(lambda some=some: asyncio.gather(*map(self._engine.flush, some)))
            await asyncio.sleep(POLL)

    def _report(self) -> int:
        """Print a line for each thing that the user should know at the end, and return the exit code."""
        dropped, error = sum(self._writer.drops.values()), self._writer.error
        if self._malformed:
            shown = f" (the first {SHOWN} are shown)" if self._malformed > SHOWN else ""
            fate = "stopped at the first" if self._strict else "skipped"
            say(f"{count(self._malformed, 'malformed line')}: {fate}{shown}")
        if self._timeless:
            say(f"{count(self._timeless, 'line')} without a time that is understood: kept, at the time of arrival")
        if self._unusable is not None and not self._usable:
            names = ", ".join(self._unusable.names[:NAMES]) + (", ..." if len(self._unusable.names) > NAMES else "")
            say(f"no line had a usable {self._unusable.field}; the first has the fields: {names or '(none)'}")
        if dropped:
            lost = f"{count(dropped, 'record')} dropped because a timeline was full"
            say(f"{lost}: raise --capacity, or set --max-size")
        if error is not None:
            again = f"run the same command again to print the rest (namespace {self._engine.namespace})"
            say(f"standard output: {getattr(error, 'strerror', None) or error}; {again}")
            return FAILED
        if self._signal is not None:
            return 128 + self._signal
        return FAILED if dropped or (self._malformed and (self._strict or not self._usable)) else 0
