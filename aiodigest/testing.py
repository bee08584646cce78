"""``TestEngine``: your engine in your own tests, without a server and without waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Self, TypeVar

from aiodigest.arguments import duration, require, whole
from aiodigest.backend import Backend, Claims, Close, Grant, Lease, Postpone, Tokens, entries_of
from aiodigest.backends.memory.backend import ReferenceBackend, system_ms
from aiodigest.engine import DigestEngine, Replacement
from aiodigest.errors import AiodigestError, ConfigurationError, InvalidArgument, shown
from aiodigest.logs import NAMESPACE
from aiodigest.models import Delivery, Digest
from aiodigest.policy import milliseconds
from aiodigest.records.entries import identity_of
from aiodigest.records.validation import microseconds, moment
from aiodigest.session.deliveries import Holding
from aiodigest.session.sync import bridge
from aiodigest.worker.delivery import Aside, Attempt, Call, Outcome, tell
from aiodigest.worker.destinations import Destinations

__all__ = ["TestEngine"]

T = TypeVar("T")
Item = TypeVar("Item")
Answer = TypeVar("Answer")

SHARD = 0  # the only one
CHAIN = 1_000, 100  # deliveries at one instant: so many, and so many for each timeline that was there


class TestEngine(Generic[T]):
    """Puts an engine of yours under test: in memory, with a clock that only the test moves, and without a worker.

    Inside ``async with TestEngine(mail) as t:`` (or ``with``, which needs no event loop) your own engine is entered,
    and never connects to its URL. It keeps its callback, policy, value type, codec, retries, throttle, bounds and
    observers. The app under test may enter it once more; the only effect is that ``delivering(callback)`` names a
    callback. A callback that is an async context manager, such as a channel, is entered by ``delivering``, or by
    ``async with`` if it was registered before. Nothing is delivered until ``advance``. After leaving, the engine is as
    it was before, and the test's records are gone; ``delivered`` and ``attempts`` stay until this is entered again,
    which starts a new test.

    In memory an engine serves any event loop, one thread at a time. There is no consumer backoff mode, and no lease
    ends. Callbacks that wait take real time, while the test's clock stands still; the engine's ``delivery_timeout``
    counts real seconds.

    Raises InvalidArgument if an argument is not allowed, and on entering ConfigurationError if the engine is entered
    already, or the server cannot be started.

    Parameters
    ----------
    engine : DigestEngine
        Not entered, and in no other test.
    server : bool, default False
        True to work on a real server: an embedded one of its own, in a temporary folder, for ``async with`` alone.
        It can be used in that event loop only.
    start : datetime or None, default None (the real time of entering)
        The first time on the test's clock; aware, and after 1970.
    clock : TestEngine or None, default None
        An entered test whose clock this one shares: ``advance`` of either moves both.
    """

    __test__ = False  # it is no test of pytest's

    delivered: list[Digest[T]]
    """The digests that were delivered, in order; a ``PartialFailure`` leaves only the records that were delivered."""

    attempts: list[Delivery]
    """The reports to observers, of every attempt in order; by the test's clock none takes any time."""

    def __init__(
        self,
        engine: DigestEngine[T],
        *,
        server: bool = False,
        start: datetime | None = None,
        clock: TestEngine[Any] | None = None,
    ) -> None:
        require(isinstance(engine, DigestEngine), "engine", "a DigestEngine", engine)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(start is None or isinstance(start, datetime), "start", "an aware datetime", start)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(start is None or microseconds(start, "start") >= 1000, "start", "after 1970", start)
        require(clock is None or isinstance(clock, TestEngine), "clock", "a TestEngine", clock)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(clock is None or start is None, "start", "that of the clock, if that is given", start)
        self.delivered = []
        self.attempts = []
        self._engine = engine
        self._needs_server = server
        self._start = start
        self._shared = clock
        self._clock: Clock = Clock() if clock is None else clock._clock  # noqa: SLF001  (of its own class)
        self._run: Run[T] | None = None  # while it is entered
        self._failures: deque[BaseException] = deque()
        self._test = ExitStack()
        self._left = AsyncExitStack()

    @property
    def now(self) -> datetime:
        """The time of the test's clock, in UTC; in a callback, the time its digest was due.

        Raises ConfigurationError before the test engine is entered.
        """
        if not self._clock.ms:
            raise ConfigurationError(
                "a TestEngine has a time once it is entered: `async with TestEngine(engine) as t:`"
            )
        return moment(self._clock.ms * 1000)

    async def advance(
        self,
        span: timedelta = timedelta(),
        /,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
    ) -> None:
        """Move the test's clock, and deliver everything that comes due on the way, each digest at its own due time.

        ``span``, or ``days``, ``hours``, ``minutes`` and ``seconds``, are those of a timedelta (in whole milliseconds);
        without any, digests due now are delivered. Digests due at one time are delivered at once, up to the engine's
        ``concurrency``; retries and later digests that come due within the span are delivered too. When this returns,
        the callbacks have ended and the clock shows the end of the span. A callback that raises fails as it does in
        production, and is not an error of this method.

        Raises InvalidArgument if the span is negative, or over ten years; ConfigurationError if the test engine is not
        entered (with ``server=True``: in this event loop), ``advance`` is under way (do not call it in a callback), or
        deliveries at one instant bring about more and more others; and BackendUnavailable if the server of
        ``server=True`` is gone.
        """
        if self._run is None:
            raise ConfigurationError("advance a TestEngine inside `async with TestEngine(engine) as t:`")
        require(isinstance(span, timedelta), "span", "a timedelta", span)  # pyright: ignore[reportUnnecessaryIsInstance]
        try:
            span += timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        except (OverflowError, ValueError, TypeError):
            raise InvalidArgument("days, hours, minutes and seconds must be numbers, those of a timedelta") from None
        await self._clock.advance(milliseconds(duration(span, "the span")))

    def fail_next(self, error: BaseException, times: int = 1) -> None:
        """Let the next attempts to deliver, ``times`` of them, raise ``error`` instead of calling the callback.

        ``error`` is any exception, even ``RetryAfter``, ``Reject`` or ``PartialFailure``. Raises InvalidArgument if it
        is not an exception, or ``times`` is not at least 1.
        """
        require(isinstance(error, BaseException), "error", "an exception, such as ConnectionError()", error)  # pyright: ignore[reportUnnecessaryIsInstance]
        self._failures += [error] * whole(times, "times", 1, 1_000_000)

    # Entering and leaving

    def __enter__(self) -> Self:
        if self._needs_server:
            raise ConfigurationError("a TestEngine with server=True is entered by `async with`")
        self._begin(ReferenceBackend(now=lambda: self._clock.ms))
        return self

    def __exit__(self, *raised: object) -> None:
        self._test.close()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._begin_on_server(stack) if self._needs_server else self.__enter__()
            stack.callback(self._test.close)
            if self._run is not None:
                registered = self._run.replacement.registered
                await stack.enter_async_context(Holding(registered.callback, registered.held))
            self._left = stack.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            if (leaving := bridge().forget(self._engine)) is not None:
                await asyncio.wrap_future(leaving)  # the adds of other threads use the server, too
        finally:
            await self._left.aclose()

    async def _begin_on_server(self, stack: AsyncExitStack) -> None:
        with self._engine.replace_backend(ReferenceBackend()):
            pass  # else a server would be started for an engine that is in use
        from aiodigest.backends.embedded.server import EmbeddedServer  # tests in memory need neither
        from aiodigest.backends.redis.backend import RedisBackend

        folder = stack.enter_context(TemporaryDirectory(prefix="aiodigest-", ignore_cleanup_errors=True))
        server, named, timeout = EmbeddedServer(Path(folder, "data")), self._engine.namespace, self._engine.timeout
        backend = RedisBackend(server, namespace=named, timeout=timeout, now=lambda: self._clock.ms)
        stack.push_async_callback(backend.aclose)
        await backend.connect()
        self._begin(backend, asyncio.get_running_loop())

    def _begin(self, backend: Backend, loop: asyncio.AbstractEventLoop | None = None) -> None:
        if self._shared is not None and self._shared._run is None:  # noqa: SLF001
            raise ConfigurationError("clock must be a TestEngine that is entered")
        with ExitStack() as stack:
            replacement = stack.enter_context(self._engine.replace_backend(backend, loop))
            if self._shared is None:
                self._clock.ms = system_ms() if self._start is None else microseconds(self._start) // 1000
            run = self._run = Run(self._engine, replacement, self._failures)
            self.delivered, self.attempts = run.delivered, run.attempts
            self._clock.runs.append(run)
            stack.callback(self._end, run)
            self._test = stack.pop_all()

    def _end(self, run: Run[T]) -> None:
        self._run = None
        self._clock.runs.remove(run)
        self._failures.clear()


@dataclass(eq=False)
class Run(Generic[T]):
    """One entering of a ``TestEngine``: claims and delivers when its clock says so."""

    engine: DigestEngine[T]
    replacement: Replacement[T]
    failures: deque[BaseException]
    delivered: list[Digest[T]] = field(default_factory=list[Digest[T]])
    attempts: list[Delivery] = field(default_factory=list[Delivery])
    paused: dict[str, int] = field(default_factory=dict[str, int])  # until when, by destination
    tokens: list[Tokens] = field(default_factory=list[Tokens])  # of the throttle, one each, that are not used yet

    def __post_init__(self) -> None:
        function = self.engine.destination
        self._name_of: Callable[[str], str] = lambda _: ""
        if function is not None:
            self._name_of = Destinations(function, self.engine.backoff_mode).name_of

    async def due(self) -> tuple[int | None, int]:
        """Return when to claim next, and the number of timelines that wait or are due."""
        stats, claims = await self.engine.stats(), await self._claims(0)
        due = None if claims.wait_ms is None else claims.now_ms + ceil(claims.wait_ms)
        if due is not None and (grant := await self._take(0)):
            due = max(due, claims.now_ms + ceil(grant.wait_us / 1000))
        return due, stats.waiting + stats.ready

    async def claim(self, now: int) -> Sequence[Lease]:
        """Claim what is due now, but for what goes where a callback asked to send nothing: that waits."""
        count = self.engine.concurrency
        if grant := await self._take(count):
            count = grant.tokens.number
        leases = (await self._claims(count)).leases
        waits = [(lease, self.paused.get(self._name_of(lease.key), 0) - now) for lease in leases]
        if postponed := [Postpone(lease, wait) for lease, wait in waits if wait > 0]:
            await self.replacement.session.store.postpone(SHARD, postponed, self.replacement.limits)
        return [lease for lease, wait in waits if wait <= 0]

    async def _take(self, wanted: int) -> Grant | None:
        """Give back the tokens that are left, and take others; None if there is no throttle."""
        if self.engine.throttle is None:
            return None
        left, self.tokens = self.tokens, []
        grant = await self.replacement.session.store.throttle(wanted, self.engine.throttle.rate, 1, left)
        self.tokens += [grant.tokens._replace(number=1)] * grant.tokens.number
        return grant

    async def _permit(self) -> None:
        """Use a token; Aside if there is none now."""
        if self.engine.throttle is None:
            return
        if not self.tokens:
            await self._take(1)
        if not self.tokens:
            raise Aside(0)
        self.tokens.pop()

    async def _claims(self, count: int) -> Claims:
        lease_ms = milliseconds(self.engine.lease_timeout)
        limits, bound = self.replacement.limits, self.engine.bounds.digest
        return await self.replacement.session.store.claim(SHARD, count, lease_ms, limits, bound=bound)

    async def deliver(self, lease: Lease, now: int) -> None:
        """Deliver a digest, in all its parts, as a worker does, in a task of its own."""
        NAMESPACE.set(self.engine.namespace)
        session, backend = self.replacement.session, self.replacement.session.store
        dispatcher = self.replacement.dispatcher(self._call)
        session.delivering += 1
        try:
            while True:
                lease, entries, _ = await entries_of(lease, partial(backend.read, SHARD, lease), dispatcher.size_of)
                attempt = await dispatcher.prepare(lease, entries)
                outcome = await dispatcher.deliver(attempt, Call(clock=lambda: (now, now), permit=self._permit))
                if outcome.pause:
                    name = self._name_of(lease.key)
                    self.paused[name] = max(self.paused.get(name, 0), now + milliseconds(outcome.pause))
                if (delivered := _delivered_of(attempt, outcome)) is not None:
                    self.delivered.append(delivered)
                # once, and without another try as a worker makes it: a test is to hear of a server that is gone
                report = outcome.report
                told = _tell(backend.close, report) if isinstance(report, Close) else _tell(backend.retry, report)
                closed = outcome.answered(await told)
                delivery = outcome.delivery(closed, max(0, now - lease.due_ms) / 1000, 0.0)
                self.attempts.append(delivery)
                tell(self.replacement.registered.observers, delivery)
                if closed.status != "part":
                    return
                lease = outcome.rest(closed)
        except Aside as aside:
            await backend.postpone(SHARD, [Postpone(lease, aside.aside_ms)], self.replacement.limits)
        except BaseException:  # the test was cut short: nobody knows what the callback did
            await self.release(lease, started=True)
            raise
        finally:
            session.delivering -= 1

    async def release(self, lease: Lease, started: bool = False) -> None:
        await self.replacement.session.store.release(SHARD, [lease], started)

    def _call(self, digest: Digest[T]) -> Awaitable[object]:
        if self.failures:
            raise self.failures.popleft()
        registered = self.replacement.registered
        callback = registered.chosen[-1] if registered.chosen else registered.callback
        return asyncio.sleep(0) if callback is None else callback(digest)


class Clock:
    """The time of one or more tests, in milliseconds since 1970."""

    def __init__(self) -> None:
        self.ms = 0  # until a test is entered
        self.runs: list[Run[Any]] = []
        self._moves = False

    async def advance(self, span_ms: int) -> None:
        if self._moves:
            raise ConfigurationError("advance is under way: a callback must not call it, nor two tasks at once")
        end = self.ms + span_ms
        moment(end * 1000, "the end of the span")
        self._moves = True
        try:
            while True:
                found = [await run.due() for run in self.runs]
                due = min((due for due, _ in found if due is not None), default=end + 1)
                if due > end:
                    break
                self.ms = max(self.ms, due)
                await self._deliver(CHAIN[0] + CHAIN[1] * sum(held for _, held in found))
            self.ms = end
        finally:
            self._moves = False

    async def _claimed(self, now: int) -> Sequence[tuple[Run[Any], Lease]]:
        """Claim everything that all tests have to deliver; a cancelled claim gives it back, since no lease ends."""

        async def claim() -> list[tuple[Run[Any], Lease]]:
            return [(run, lease) for run in self.runs for lease in await run.claim(now)]

        claiming = asyncio.create_task(claim())
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:
            for run, lease in await claiming:
                await run.release(lease)
            raise

    async def _deliver(self, most: int) -> None:
        """Deliver everything due now, including deliveries that those cause; at most about ``most`` digests."""
        now, count = self.ms, 0
        while batch := await self._claimed(now):
            try:
                async with asyncio.TaskGroup() as group:
                    for run, lease in batch:
                        group.create_task(run.deliver(lease, now))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            count += len(batch)
            if count > most:
                key = shown(batch[-1][1].key)
                raise ConfigurationError(
                    f"{count:,} deliveries at one instant bring about more and more, the latest of {key}: does a "
                    "callback add to its own timeline, whose policy has no minimum_delay?"
                )


async def _tell(call: Callable[[int, list[Item]], Awaitable[Sequence[Answer | AiodigestError]]], item: Item) -> Answer:
    """Report one item to the store; return its answer, or raise it if it is an error."""
    [answer] = await call(SHARD, [item])
    if isinstance(answer, AiodigestError):
        raise answer
    return answer


def _delivered_of(attempt: Attempt[T], outcome: Outcome) -> Digest[T] | None:
    """Return the digest with only its delivered records; None if there are none."""
    if not outcome.records:
        return None
    report, digest = outcome.report, attempt.digest
    held = [letter.ids for letter in report.dead_letters] if isinstance(report, Close) else [report.failed]
    left = {name for ids in held for name in ids or ()}
    return replace(digest, records=tuple(one for one in digest.records if identity_of(one.id.encode()) not in left))
