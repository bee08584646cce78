"""``DigestEngine``: the class that users work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from secrets import token_hex
from types import TracebackType
from typing import TYPE_CHECKING, Self

from typing_extensions import TypeVar

from aiodigest.backend import Add, Backend
from aiodigest.backoff import BackoffMode
from aiodigest.codecs import JSON, Codec, JSONCodec
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, PartialAdd
from aiodigest.management import Management
from aiodigest.models import Activity, Delivery, Entry
from aiodigest.policy import Policies, Policy, PolicySource, RetryPolicy
from aiodigest.records.entries import unpack
from aiodigest.records.tracing import Tracing
from aiodigest.records.validation import (
    DEFAULT,
    MADE_UP,
    Bounds,
    can_call_back,
    can_code,
    can_observe,
    duration,
    name,
    pack_entry,
    require,
    taken,
    whole,
)
from aiodigest.session.session import Entered, Session
from aiodigest.session.signals import on_signals
from aiodigest.session.store import Store
from aiodigest.session.sync import Sync
from aiodigest.worker.delivery import Callback, Dispatcher, describe

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from redis.asyncio import Redis, RedisCluster
    from typing_extensions import TypeForm

    from aiodigest.scheduler import Scheduler
    from aiodigest.worker.availability import Outage

T = TypeVar("T", default=JSON)

CHUNK = 1_000
new_id = partial(token_hex, MADE_UP // 2)


class DigestEngine(Management[T]):
    """Adds records to timelines, and delivers each timeline's records as digests to an awaitable callback.

    One engine is one namespace, one type of value and one callback. The constructor does no I/O; ``async with
    engine`` connects, ``async with engine.delivering()`` also delivers in the background, and ``await engine.run()``
    is a service until SIGTERM or SIGINT. None of them needs the server to be up yet. After leaving an engine you can
    enter it again, even from another event loop.

    In its methods ``key`` names a timeline, and ``letter_id`` a dead letter. What is awaited may raise InvalidArgument
    (the message says what is allowed), ConfigurationError if the engine is not entered here, and BackendUnavailable
    within the engine's ``timeout``; each method's own docstring names any other error it raises.

    Parameters
    ----------
    url : str, redis.asyncio.Redis or redis.asyncio.RedisCluster, default "embedded://"
        ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://``, ``embedded://`` (a server
        of its own in the user's data folder, or in ``AIODIGEST_DATA``) or ``embedded:///folder``; or a client, whose
        settings are copied.
    namespace : str
        Letters, digits, ``_``, ``.`` and ``-``, at most 64: keeps engines on one server apart.
    value_type : type, union or TypeAdapter, default JSON (any JSON value)
        Values are checked against it when added, and callbacks get values of it.
    codec : Codec, default JSONCodec(value_type)
        Encodes values for the store, and decodes them.
    policy : Policy, or a plain or async function from a key to a Policy, default Policy()
        Sets when a timeline is due. A function is called once an add and once a claimed digest; it may take
        ``timeout``, and for a digest ``delivery_timeout``.
    retry : RetryPolicy, default RetryPolicy()
        Sets how often to retry a digest whose callback raised.
    backoff_mode : BackoffMode, default BackoffMode()
        Sets when this process rests because deliveries of distinct timelines keep failing.
    shards : int or None, default None
        The number of schedules in the namespace; None takes the existing number, or 1 if the namespace is new.
        A cluster needs several, such as 16, to use all of its primaries.
    concurrency : int, default 64
        The most deliveries under way at once, in this process.
    lease_timeout : seconds, default 60
        The length of a worker's claim, unless it is renewed, which happens at a third of it.
    delivery_timeout : seconds, default 300
        A callback that takes longer is cancelled; its outcome counts as unknown.
    drain_timeout : seconds, default 20
        The time that leaving waits for deliveries under way.
    timeout : seconds, default 5
        For one call to the server, and for an add from its call to its answer.
    wait_replicas : int, default 0
        An add returns only once this many replicas have it.
    bounds : Bounds, default Bounds(value=1_048_576, name=1024, records=100_000)
        The largest values, keys and ids, and the most records of one ``add_many``.

    Raises
    ------
    ConfigurationError, InvalidArgument
        If an argument is not allowed; the message says what is.
    """

    def __init__(
        self,
        url: str | Redis | RedisCluster = "embedded://",
        *,
        namespace: str,
        value_type: TypeForm[T] | TypeAdapter[T] = JSON,
        codec: Codec[T] | None = None,
        policy: PolicySource = Policy(),
        retry: RetryPolicy = RetryPolicy(),
        backoff_mode: BackoffMode = BackoffMode(),
        shards: int | None = None,
        concurrency: int = 64,
        lease_timeout: float | timedelta = 60,
        delivery_timeout: float | timedelta = 300,
        drain_timeout: float | timedelta = 20,
        timeout: float | timedelta = 5,
        wait_replicas: int = 0,
        bounds: Bounds = DEFAULT,
    ) -> None:
        require(isinstance(namespace, str), "namespace", "a str", namespace)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(isinstance(policy, Policy) or callable(policy), "policy", "a Policy or a function", policy)
        require(isinstance(retry, RetryPolicy), "retry", "a RetryPolicy", retry)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(isinstance(backoff_mode, BackoffMode), "backoff_mode", "a BackoffMode", backoff_mode)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(codec is None or can_code(codec), "codec", "a Codec", codec)
        require(isinstance(bounds, Bounds), "bounds", "a Bounds", bounds)  # pyright: ignore[reportUnnecessaryIsInstance]
        self.namespace = namespace
        self._bounds = bounds
        # lowering the bound must not make unreadable what is stored
        largest = max(bounds.value, DEFAULT.value)
        self._codec: Codec[T] = codec if codec is not None else JSONCodec(value_type, max_size=largest)
        self._retry = retry
        self._backoff_mode = backoff_mode
        self._concurrency = whole(concurrency, "concurrency", 1, 1_000_000)
        self._lease_timeout = duration(lease_timeout, "lease_timeout", 0.1)
        self._delivery_timeout = duration(delivery_timeout, "delivery_timeout", 0.001)
        self._policies = Policies(policy, retry, self._delivery_timeout)
        self._drain_timeout = duration(drain_timeout, "drain_timeout")
        self._timeout = duration(timeout, "timeout", 0.001)
        self._store = Store(
            url,
            namespace=namespace,
            shards=shards,
            timeout=self._timeout,
            wait_replicas=whole(wait_replicas, "wait_replicas", 0, 1_000),
        )
        self._callback: Callback[T] | None = None
        self._observers: list[Callable[[Delivery], None]] = []
        self._tracing: Tracing | None = None
        self._added = 0
        self._session: Entered | None = None
        self._rehearse: Callable[[Callback[T]], AbstractContextManager[object]] | None = None  # in tests: `delivering`
        self._sync: Sync[T] | None = None  # in tests, where the adds of threads go instead of the portal

    @property
    def url(self) -> str:
        """The URL of the store, without the password."""
        return self._store.url

    @property
    def activity(self) -> Activity:
        """The current work of this engine in this process: a few numbers, read without a call to the server.

        If the engine is not entered but used by ``sync``, ``unavailable`` describes the calls of ``sync``.
        """
        sessions = (self._session, self._sync_session)
        now = next((session.activity for session in sessions if session and not session.is_over), Activity())
        return replace(now, adds=self._added)

    @property
    def sync(self) -> Sync[T]:
        """The same adds for threads without an event loop (Django, Celery, scripts); they block until all is stored.

        ``engine.sync.add(...)`` and ``engine.sync.add_many(...)`` do not need an entered engine. Any number of threads
        may call them at once, even after a fork. With a running event loop they raise ConfigurationError.
        """
        return self._sync or Sync(self)

    def __repr__(self) -> str:
        return f"DigestEngine({self.url!r}, namespace={self.namespace!r})"

    # Entering and leaving

    def deliver(self, callback: Callback[T]) -> Callback[T]:
        """Register ``callback``, an async function of a digest (a decorator; it is returned unchanged).

        Returning means delivered, and raising means to try the digest again; ``RetryAfter``, ``Reject`` and
        ``PartialFailure`` say more. Raises ConfigurationError for a second callback.
        """
        if self._callback is not None:
            raise ConfigurationError(f"engine {self.namespace!r} has a callback: other channels are other engines")
        require(can_call_back(callback), "the callback", "an async function without yield", callback)
        self._callback = callback
        return callback

    def observe(self, observer: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        """Register ``observer``, to be told of each attempt to deliver from now on, in addition to earlier observers.

        A decorator; it returns the function unchanged. An observer is not async, and must not block or raise.
        """
        require(can_observe(observer), "an observer", "a function that is not async", observer)
        self._observers.append(observer)
        return observer

    async def __aenter__(self) -> Self:
        await self._enter(None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None and self._rehearse is None:
            try:
                await self._session.stop()
            finally:
                self._session = None

    @asynccontextmanager
    async def delivering(
        self, callback: Callback[T] | None = None, *, shards: Container[int] | None = None
    ) -> AsyncGenerator[Self, None]:
        """Enter the engine, and deliver in the background until it is left: to ``callback``, or to the registered one.

        ``shards`` restricts this process to some of the namespace's, numbered from 0; others must serve the rest.
        Leaving sends queued adds, waits up to ``drain_timeout`` for the deliveries under way, and gives the rest back.
        Raises ConfigurationError if there is no callback, or the engine is entered already.
        """
        if (chosen := callback if callback is not None else self._callback) is None:
            raise ConfigurationError(f"engine {self.namespace!r} has no callback: register one with @engine.deliver")
        require(can_call_back(chosen), "the callback", "an async function without yield", chosen)
        numbers = shards is None or (hasattr(shards, "__contains__") and not isinstance(shards, str | bytes))
        require(numbers, "shards", "a range or a set of numbers", shards)
        await self._enter(chosen, shards)
        try:
            with (self._rehearse or nullcontext)(chosen):
                yield self
        finally:
            await self.__aexit__(None, None, None)

    async def run(self, callback: Callback[T] | None = None, *, shards: Container[int] | None = None) -> None:
        """Deliver until SIGTERM or SIGINT, then drain and return; a second signal stops at once.

        The arguments are those of ``delivering``.
        """
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set() and self._session is not None:
                self._session.hurry()
            stop.set()

        with on_signals(on_signal):
            async with self.delivering(callback, shards=shards):
                ended = asyncio.create_task(stop.wait())
                try:
                    await asyncio.wait([ended, self._entered().main], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ended.cancel()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncGenerator[None, None]:
        """Deliver during the life of an ASGI app: ``FastAPI(lifespan=engine.lifespan)``; ``app`` is ignored.

        Raises the errors of ``delivering``, so that the app does not start.
        """
        async with self.delivering():
            yield

    async def _enter(self, callback: Callback[T] | None, shards: Container[int] | None = None) -> None:
        if self._rehearse is not None:
            await self._backend()
            return
        if self._session is not None and not self._session.is_over:
            raise ConfigurationError(f"engine {self.namespace!r} is entered already")

        def schedule(backend: Backend, outage: Outage) -> Scheduler:
            from aiodigest.scheduler import Scheduler  # not needed just to add

            assert callback is not None
            return Scheduler(
                backend,
                self._dispatcher(callback),
                self._policies.limits,
                outage,
                backoff_mode=self._backoff_mode,
                concurrency=self._concurrency,
                lease_timeout=self._lease_timeout,
                drain_timeout=self._drain_timeout,
                timeout=self._timeout,
                observers=self._observers,
                numbers=shards,
            )

        session = self._session = Session(self._store, self._timeout, schedule if callback is not None else None)
        try:
            await session.backend()
        except BackendUnavailable:
            pass  # it may come: adds try again, and so does the scheduler
        except BaseException:
            session.hurry()
            try:
                await session.stop()
            finally:
                self._session = None
            raise

    def _dispatcher(self, callback: Callback[T]) -> Dispatcher[T]:
        return Dispatcher(
            callback,
            self._codec,
            partial(self._policies.of, timeout=self._delivery_timeout),
            self._retry,
            self._lease_timeout,
            self._delivery_timeout,
            self._tracing,
        )

    # Adding

    async def add(
        self, key: str, value: T, *, record_id: str | None = None, timestamp: datetime | float | None = None
    ) -> bool:
        """Add a record to the timeline ``key``; True if it is due now, and this add made it so.

        ``value`` must be of the engine's ``value_type``. ``record_id`` (any text, within the engine's ``bounds``; made
        up if absent) replaces the value held under it. ``timestamp`` (an aware datetime, or epoch seconds; the server's
        time of arrival if absent) orders the records of a digest. When this returns, the record is stored.

        Raises
        ------
        InvalidArgument, LimitExceeded, CodecError
            If an argument is not allowed, and nothing was stored.
        ConfigurationError
            If the user may not add, or the policy function took longer than ``timeout``, and nothing was stored.
        BackendUnavailable
            Within the engine's ``timeout``; its ``stored`` is "no" or "unknown".
        """
        session, began = self._entered(), asyncio.get_running_loop().time()
        record = record_id if record_id is not None else new_id()
        add = await self._encode(key, value, record, timestamp)
        try:
            ready = await session.add(add, began)
        except BackendUnavailable as error:
            raise session.explained(error, record) from None  # its message says it all
        self._added += 1
        return ready

    async def add_many(self, entries: Iterable[Entry[T]]) -> list[bool]:
        """Add ``entries``, a few hundred a call to the server; return the answer of ``add`` for each, in order.

        Raises PartialAdd, whose ``results`` has an answer or an error for each entry, if any failed: one bad entry
        fails alone. Once the server is unavailable, unsent entries fail as not stored. Raises LimitExceeded, and stores
        nothing, if there are more than ``bounds.records``; it takes at most one entry over that from an iterable.
        """
        session = self._entered()
        given = taken(entries, self._bounds.records)
        results: list[bool | AiodigestError] = []
        step = CHUNK * session.breadth
        for start in range(0, len(given), step):
            some = given[start : start + step]
            down = next((error for error in results[-step:] if isinstance(error, BackendUnavailable)), None)
            if down is None:
                results += await self._add_some(session, some)
            else:
                ids = (getattr(entry, "record_id", None) for entry in some)
                results += [BackendUnavailable(str(down), record_id=each) for each in ids]
        if any(isinstance(result, AiodigestError) for result in results):
            raise PartialAdd(results)
        return [result is True for result in results]

    async def _add_some(self, session: Entered, entries: Sequence[Entry[T]]) -> list[bool | AiodigestError]:
        results: list[bool | AiodigestError] = [False] * len(entries)
        adds: dict[int, Add] = {}
        for index, entry in enumerate(entries):
            if index % CHUNK == CHUNK - 1:
                await asyncio.sleep(0)
            try:
                record = entry.record_id if entry.record_id is not None else new_id()
                adds[index] = await self._encode(entry.key, entry.value, record, entry.timestamp)
            except AiodigestError as error:
                results[index] = error
            except Exception as error:  # of the policy function, or the codec
                failed = results[index] = AiodigestError(f"the entry could not be made ready: {describe(error)}")
                failed.__cause__ = error
        for (index, add), answer in zip(adds.items(), await session.add_many(list(adds.values())), strict=True):
            if isinstance(answer, BackendUnavailable):
                answer = session.explained(answer, unpack(add.entry).id.decode())
            elif isinstance(answer, bool):
                self._added += 1
            results[index] = answer
        return results

    async def _encode(self, key: str, value: T, record_id: str, timestamp: datetime | float | None) -> Add:
        name(key, "key", self._bounds.name)
        record = name(record_id, "record_id", self._bounds.name)
        policy = self._policies.fixed or await self._policy(key)
        context = b"" if self._tracing is None else self._tracing.context()
        entry = pack_entry(record, timestamp, self._codec.encode(value), self._bounds.value, context)
        return Add(key, entry, policy.terms, self._policies.own(policy))
