"""The work of ``aiodigest pipe``: lines in, digests out, and nothing left behind at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from aiodigest import (
    JSON,
    AiodigestError,
    BackendUnavailable,
    BackoffMode,
    DigestEngine,
    Entry,
    PartialAdd,
    Policy,
    RetryPolicy,
)
from aiodigest.cli.fields import Malformed, Shape, Unusable
from aiodigest.cli.lines import Intake, Line
from aiodigest.cli.loops import until
from aiodigest.cli.options import FAILED
from aiodigest.cli.output import Output
from aiodigest.cli.patience import patiently
from aiodigest.cli.room import Room
from aiodigest.cli.words import count, say

LEASE = 5.0  # seconds: how long a restart waits for the digest a killed run was writing
SHOWN = 20  # malformed lines; more are only counted
NAMES = 20  # fields of a line
LOOK_AGAIN = 0.05  # seconds between looks at what is still held
AT_ONCE = 100  # flushes under way


def pipe_engine(url: str, namespace: str, policy: Policy, shards: int | None, timeout: float) -> DigestEngine:
    """Make the engine of a pipe. Standard output never fails and then recovers, so nothing needs a later try."""
    return DigestEngine(
        url,
        namespace=namespace,
        policy=policy,
        retry=RetryPolicy(max_attempts=1000, backoff=lambda attempt: 0.0),
        backoff_mode=BackoffMode(maximum=0),
        shards=shards,
        lease_timeout=LEASE,
        delivery_timeout=policy.ttl * 0.99,  # a reader may be as slow as it likes while records live
        drain_timeout=1,
        timeout=timeout,
    )


class Pipe:
    """Feeds lines to an engine, and at their end has it deliver the waiting ones.

    ``malformed`` counts the lines that were not added; ``unusable`` is the first line without a required field,
    as long as no line is usable. ``signal`` is the one that ended the input, if one did.
    """

    def __init__(
        self, engine: DigestEngine, shape: Shape, intake: Intake, output: Output, room: Room, strict: bool
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._intake = intake
        self._output = output
        self._room = room
        self._strict = strict
        self._work: asyncio.Task[None] | None = None
        self._usable = False
        self.malformed = 0
        self.unusable: Unusable | None = None
        self.signal: int | None = None

    async def run(self) -> None:
        """Run until the input has ended and nothing is held, standard output fails, or a second signal comes.

        Raises BackendUnavailable if the server is away for too long, and OSError if the input cannot be read.
        """
        loop = asyncio.get_running_loop()
        self._work = asyncio.create_task(self._feed_and_drain())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            await until(self._output.failed, self._work)
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _interrupt(self, number: int) -> None:
        if self.signal is not None and self._work is not None:
            self._work.cancel()
        self.signal = number
        self._intake.stop()

    async def _feed_and_drain(self) -> None:
        unreadable: OSError | None = None
        try:
            await self._feed()
        except OSError as error:
            unreadable = error
        await self._drain()
        if unreadable is not None:
            raise unreadable

    async def _feed(self) -> None:
        async for lines in self._intake.batches():
            await self._add(self._entries(lines))
            if self._strict and self.malformed:
                self._intake.stop()
                break

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
                if isinstance(error, Unusable) and not self._usable:
                    self.unusable = self.unusable or error
                if self._strict:
                    break
        if entries:
            self._usable, self.unusable = True, None
        return entries

    def _report(self, line: Line, error: Exception) -> None:
        self.malformed += 1
        if self.malformed <= SHOWN:
            say(f"{line.place}: {error}")

    async def _add(self, entries: list[tuple[Line, Entry[JSON]]]) -> None:
        """Add entries, no faster than there is room for them."""
        start = 0
        for index, (_, entry) in enumerate(entries):
            while not self._room.take(entry.key):
                await self._send(entries[start:index])
                start = index
                await self._room.make(entry.key)
        await self._send(entries[start:])

    async def _send(self, entries: list[tuple[Line, Entry[JSON]]]) -> None:
        """Add entries; any the server did not take are added again under the same id, so that nothing comes twice."""
        left = entries

        async def attempt() -> None:
            nonlocal left
            try:
                await self._engine.add_many([entry for _, entry in left])
            except PartialAdd as error:
                left, away = self._sort_out(left, error.results)
                if away is not None:
                    raise away from None

        try:
            await patiently(attempt)
        except BackendUnavailable as error:
            raise BackendUnavailable(f"{error}; the lines from {left[0][0].place} on were not taken") from error

    def _sort_out(
        self, entries: list[tuple[Line, Entry[JSON]]], results: Sequence[bool | AiodigestError]
    ) -> tuple[list[tuple[Line, Entry[JSON]]], BackendUnavailable | None]:
        again: list[tuple[Line, Entry[JSON]]] = []
        away = None
        for (line, entry), result in zip(entries, results, strict=True):
            if isinstance(result, BackendUnavailable):
                again.append((line, entry))
                away = away or result
            elif isinstance(result, AiodigestError):
                self._report(line, result)
        return again, away

    # The end

    async def _drain(self) -> None:
        """Flush all timelines, again and again, until none holds a record."""
        while await patiently(self._holds):
            waiting = await patiently(self._waiting)
            for start in range(0, len(waiting), AT_ONCE):
                some = waiting[start : start + AT_ONCE]
                await patiently(lambda some=some: asyncio.gather(*map(self._engine.flush, some)))
            await asyncio.sleep(LOOK_AGAIN)

    async def _holds(self) -> bool:
        stats = await self._engine.stats()
        return stats.waiting + stats.ready + stats.leased > 0

    async def _waiting(self) -> list[str]:
        return [timeline.key async for timeline in self._engine.timelines("waiting")]


def verdict(pipe: Pipe, output: Output, namespace: str, strict: bool) -> int:
    """Return the exit code of a pipe, and print a line for each thing that its user should know."""
    lost = False
    if pipe.malformed:
        shown = f" (the first {SHOWN} are shown)" if pipe.malformed > SHOWN else ""
        say(f"{count(pipe.malformed, 'malformed line')}: {'stopped at the first' if strict else 'skipped'}{shown}")
        lost = strict
    if pipe.unusable is not None:
        names = ", ".join(pipe.unusable.names[:NAMES]) + (", ..." if len(pipe.unusable.names) > NAMES else "")
        say(f"no line had a usable {pipe.unusable.field}; the first has the fields: {names or '(none)'}")
    if output.dropped:
        say(
            f"{count(output.dropped, 'record')} dropped, since a timeline was full: raise --capacity, or set --max-size"
        )
        lost = True
    if output.error is not None:
        reason = getattr(output.error, "strerror", None) or output.error
        say(f"standard output: {reason}; what was not written waits for the same command (namespace {namespace})")
        return FAILED
    if pipe.signal is not None:
        return 128 + pipe.signal
    return FAILED if lost else 0
