"""Lines fed to an engine, and its timelines flushed when they end: nothing is left behind."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from aiodigest import JSON, AiodigestError, BackendUnavailable, DigestEngine, Entry, PartialAdd
from aiodigest.cli.event_loop import run_until
from aiodigest.cli.options import collect
from aiodigest.cli.output import FAILED, say
from aiodigest.cli.pipe.backpressure import Backpressure, retry
from aiodigest.cli.pipe.parser import Malformed, Shape, Unusable
from aiodigest.cli.pipe.reader import Line, Reader
from aiodigest.cli.pipe.writer import Writer
from aiodigest.cli.rendering import count

SHOWN = 20  # malformed lines; more are only counted
NAMES = 20  # fields of a line
POLL = 0.05  # seconds between looks at what is still held
FLUSHES = 100  # at a time


class Feeder:
    """Feeds lines to an engine, and at their end has it deliver all that waits."""

    def __init__(
        self, engine: DigestEngine, shape: Shape, reader: Reader, writer: Writer, backpressure: Backpressure,
        strict: bool,
    ) -> None:  # fmt: skip
        self._engine, self._shape, self._reader, self._writer = engine, shape, reader, writer
        self._backpressure, self._strict = backpressure, strict
        self._usable = False  # a line was
        self._malformed = 0  # lines that were not added
        self._unusable: Unusable | None = None  # the first line without a required field
        self._signal: int | None = None  # the one that ended the input

    async def run(self) -> None:
        """Run until the input has ended and nothing is held, standard output fails, or a second signal comes.

        Raises BackendUnavailable if the server is away for too long, and OSError if the input cannot be read.
        """
        loop, work = asyncio.get_running_loop(), asyncio.create_task(self._feed_and_flush())

        def on_signal(number: int) -> None:
            if self._signal is not None:
                work.cancel()
            self._signal = number
            self._reader.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)
        try:
            await run_until(self._writer.failed, work)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _feed_and_flush(self) -> None:
        try:
            async for lines in self._reader.batches():
                await self._add(self._entries(lines))
                if self._strict and self._malformed:
                    self._reader.stop()
                    break
        except OSError:
            await self._flush_all()
            raise
        await self._flush_all()

    # Adding

    def _entries(self, lines: Sequence[Line]) -> list[tuple[Line, Entry[JSON]]]:
        entries: list[tuple[Line, Entry[JSON]]] = []
        for line in lines:
            if not line.text.strip():
                continue
            try:
                entries.append((line, self._shape.entry(line.text)))
            except Malformed as error:
                self._report(line, error)
                if isinstance(error, Unusable):
                    self._unusable = self._unusable or error
                if self._strict:
                    break
        self._usable = self._usable or bool(entries)
        return entries

    def _report(self, line: Line, error: Exception) -> None:
        self._malformed += 1
        if self._malformed <= SHOWN:
            say(f"{line.place}: {error}")

    async def _add(self, entries: list[tuple[Line, Entry[JSON]]]) -> None:
        """Add entries, no faster than there is room for them."""
        start = 0
        for index, (_, entry) in enumerate(entries):
            while not self._backpressure.reserve(entry.key):
                await self._send(entries[start:index])
                start = index
                await self._backpressure.make_room(entry.key)
        await self._send(entries[start:])

    async def _send(self, entries: list[tuple[Line, Entry[JSON]]]) -> None:
        """Add entries; those the server did not take are added again under the same id, so that none is added twice."""
        left = entries

        async def attempt() -> None:
            nonlocal left
            try:
                await self._engine.add_many([entry for _, entry in left])
            except PartialAdd as error:
                again: list[tuple[Line, Entry[JSON]]] = []
                for one, result in zip(left, error.results, strict=True):
                    if isinstance(result, BackendUnavailable):
                        again.append(one)
                    elif isinstance(result, AiodigestError):
                        self._report(one[0], result)
                left = again
                for result in error.results:
                    if isinstance(result, BackendUnavailable):
                        raise result from None

        try:
            await retry(attempt)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{error}; the lines from {left[0][0].place} on were not added") from error

    # The end

    async def _flush_all(self) -> None:
        """Flush all timelines, again and again, until none holds a record."""
        while await retry(self._holds):
            waiting = [timeline.key for timeline in await retry(lambda: collect(self._engine.timelines("waiting")))]
            for start in range(0, len(waiting), FLUSHES):
                some = waiting[start : start + FLUSHES]
                await retry(lambda some=some: asyncio.gather(*map(self._engine.flush, some)))
            await asyncio.sleep(POLL)

    async def _holds(self) -> bool:
        stats = await self._engine.stats()
        return stats.waiting + stats.ready + stats.leased > 0

    def report(self) -> int:
        """Print a line for each thing that the user should know at the end, and return the exit code."""
        dropped, error = self._writer.dropped, self._writer.error
        if self._malformed:
            shown = f" (the first {SHOWN} are shown)" if self._malformed > SHOWN else ""
            fate = "stopped at the first" if self._strict else "skipped"
            say(f"{count(self._malformed, 'malformed line')}: {fate}{shown}")
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
        return FAILED if dropped or (self._strict and self._malformed) else 0
