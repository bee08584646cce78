"""``DigestEngine``: the class that users work with."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Container,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Generic, NamedTuple, Self, cast, get_args

from typing_extensions import TypeVar

from aiodigest.arguments import TEN_YEARS, can_ask, duration, require, whole
from aiodigest.backend import (
    FEATURES,
    MAX_SHARDS,
    Add,
    Backend,
    Bookmark,
    Move,
    Mute,
    Page,
    StoredDeadLetter,
    StoredTimeline,
    unknown_need,
)
from aiodigest.backends import ValkeyClient, open_backend
from aiodigest.backoff import BackoffMode
from aiodigest.codecs import JSON, Codec, Encoder, JSONCodec, bounded, sizes_of
from aiodigest.errors import (
    AiodigestError,
    BackendUnavailable,
    ConfigurationError,
    InvalidArgument,
    InvalidState,
    LimitExceeded,
    PartialAdd,
)
from aiodigest.models import (
    OVERDUE,
    Activity,
    DeadLetter,
    Delivery,
    Draining,
    Entry,
    Explanation,
    Finding,
    Health,
    Record,
    State,
    Stats,
    Timeline,
)
from aiodigest.policy import (
    NO_POLICY,
    Limits,
    Policies,
    Policy,
    PolicySource,
    RetryPolicy,
    RetrySource,
    Source,
    Terms,
    milliseconds,
)
from aiodigest.records.entries import identity_of, pack, pack_new, unpack
from aiodigest.records.validation import (
    DEFAULT,
    Bounds,
    can_call_back,
    can_observe,
    check_encoded,
    microseconds,
    name,
    nearest,
    plain,
    taken,
)
from aiodigest.session.background import BackgroundSession, Down, Session
from aiodigest.session.deliveries import Holding, begin_delivery, end_delivery
from aiodigest.session.signals import SignalledEnd, on_signals
from aiodigest.session.sync import Sync, bridge
from aiodigest.worker.reasons import describe

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from pydantic import TypeAdapter
    from redis.asyncio import Redis, RedisCluster
    from typing_extensions import TypeForm

    from aiodigest.timing.throttle import Throttle
    from aiodigest.worker.delivery import Callback, Dispatcher, Tracing

T = TypeVar("T", default=JSON)
Item = TypeVar("Item")

CHUNK = 1_000
PAGE = 500
PACE = 1.0  # seconds between two looks at what is left in old shards
FIRST_MUTE = 1e9  # epoch seconds: what is less is a length by mistake, and would unmute
TIMES = ("oldest_due", "overdue", "stepped_back")  # of Stats; the others are counts of the store
EMBEDDED = "embedded://"


@dataclass(eq=False, repr=False)  # methods that nobody calls take time at each start
class Registered(Generic[T]):
    """Everything that users register with an engine, and what it has counted since."""

    callback: Callback[T] | None = None
    chosen: list[Callback[T]] = field(default_factory=list)  # those given to `delivering`, the latest last
    held: list[object] = field(default_factory=list[object])  # callbacks that are async context managers, entered
    observers: list[Callable[[Delivery], None]] = field(default_factory=list[Callable[[Delivery], None]])
    tracing: Tracing | None = None
    added: int = 0  # records


class Replacement(NamedTuple, Generic[T]):
    """An engine that works on another backend, and whose digests somebody delivers by hand."""

    session: Session
    registered: Registered[T]
    limits: Limits
    dispatcher: Callable[[Callback[T]], Dispatcher[T]]


class DigestEngine(Generic[T]):
    """Adds records to timelines, and delivers each timeline's records as digests to an awaitable callback.

    One engine is one namespace, one type of value and one callback. The constructor does no I/O, and raises
    ConfigurationError or InvalidArgument for an argument that is not allowed; ``async with engine`` connects, ``async
    with engine.delivering()`` also delivers in the background, and ``await engine.run()`` is a service until SIGTERM or
    SIGINT. None of them needs the server to be up yet. After leaving an engine you can enter it again, even from
    another event loop.

    In its methods ``key`` names a timeline, and ``letter_id`` a dead letter. What is awaited may raise InvalidArgument
    (the message says what is allowed), ConfigurationError if the engine is not entered here, and BackendUnavailable
    within the engine's ``timeout``; each method's own docstring names any other error it raises. Those that ask a
    policy function (``add``, ``mute``, ``unmute``, ``remove``, ``reschedule``, ``explain``, ``replay``) also raise what
    it raises, and ConfigurationError if it takes longer than ``timeout``; ``explain`` asks that of ``retry`` too.

    Attributes hold the arguments (durations in seconds), for reading; there are none for ``value_type``, ``policy``,
    ``shards`` and ``wait_replicas``.

    Parameters
    ----------
    url : str, or a client of redis.asyncio or valkey.asyncio, default "embedded://"
        ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://``, ``redis+cluster://`` (or ``valkey`` in place of
        ``redis``), ``embedded://`` (a server of its own in the user's data folder, or in ``AIODIGEST_DATA``) or
        ``embedded:///folder``; or a client, whose place, login and TLS are copied. A URL's options are ``db``,
        ``username``, ``password``, ``client_name``, ``health_check_interval`` (seconds, 25 by default: a connection
        unused for longer is tried before a call goes out on it) and ``ssl_...``; any other is refused.
    namespace : str
        Letters, digits, ``_``, ``.`` and ``-``, at most 64: keeps engines on one server apart.
    value_type : type, union or TypeAdapter, default JSON (any JSON value)
        Values are checked against it when added, and callbacks get values of it.
    codec : Codec, default JSONCodec(value_type)
        Encodes values for the store, and decodes them.
    policy : Policy, or a plain or async function from a key to a Policy, default Policy()
        Sets when a timeline is due. A function is called once an add, once a key of an ``add_many`` (32 at once if it
        is async), and once a claimed digest; it may take ``timeout``, and for a digest ``delivery_timeout``. One with a
        second parameter ``now`` is given the server's time (an aware datetime, in UTC).
    retry : RetryPolicy, or a plain or async function from a key to a RetryPolicy, default RetryPolicy()
        Sets how often to retry a digest whose callback raised. A function is called once a claimed digest, as that of
        ``policy`` is, with ``now`` if it has it; the policy's ``ttl`` must be longer than what it allows.
    backoff_mode : BackoffMode, default BackoffMode()
        Sets when this process, or a ``destination``, rests because deliveries of distinct timelines keep failing.
    shards : int or None, default None
        The number of schedules in the namespace; None takes the existing number, or 1 if the namespace is new.
        A cluster needs several, such as 16, to use all of its primaries.
    concurrency : int, default 64
        The most callbacks under way at once, in this process.
    destination : function from a key to a str, or None, default None
        Names where a timeline's digests go, such as the domain of a mail. Each destination then has its own backoff
        mode, and while it rests the others are served. The function is called once a claimed digest, and must not
        block. Timelines for which it fails share a destination, and the first time is logged. None: all have one.
    destination_concurrency : int or None, default None (no limit but ``concurrency``)
        The most deliveries to one destination under way at once, in this process, so that one that hangs leaves room
        for the others.
    throttle : Throttle or None, default None
        The most attempts to deliver that begin within a time, over all workers and shards: give all of them the same.
        It also lets ``RetryAfter(pause=True)`` hold back its destination in all workers, and not in its own alone.
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
    bounds : Bounds, default Bounds()
        The largest values, keys, ids and digests, the most records of one ``add_many``, and room for dead letters.
    backend : Backend or None, default None
        A store of timelines in place of ``url``, ``shards`` and ``wait_replicas``, such as a ``ReferenceBackend`` in a
        test. The engine connects and closes it; it must serve no other engine.
    """

    def __init__(
        self,
        url: str | Redis | RedisCluster | ValkeyClient = EMBEDDED,
        *,
        namespace: str,
        value_type: TypeForm[T] | TypeAdapter[T] = JSON,
        codec: Codec[T] | None = None,
        policy: PolicySource = NO_POLICY,
        retry: RetrySource = RetryPolicy(),
        backoff_mode: BackoffMode = BackoffMode(),
        shards: int | None = None,
        concurrency: int = 64,
        destination: Callable[[str], str] | None = None,
        destination_concurrency: int | None = None,
        throttle: Throttle | None = None,
        lease_timeout: float | timedelta = 60,
        delivery_timeout: float | timedelta = 300,
        drain_timeout: float | timedelta = 20,
        timeout: float | timedelta = 5,
        wait_replicas: int = 0,
        bounds: Bounds = DEFAULT,
        backend: Backend | None = None,
    ) -> None:
        require(isinstance(namespace, str), "namespace", "a str", namespace)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(isinstance(policy, Policy) or can_ask(policy), "policy", "a Policy or a function", policy)
        require(isinstance(retry, RetryPolicy) or can_ask(retry), "retry", "a RetryPolicy or a function", retry)
        require(isinstance(backoff_mode, BackoffMode), "backoff_mode", "a BackoffMode", backoff_mode)  # pyright: ignore[reportUnnecessaryIsInstance]
        codes = all(callable(getattr(codec, method, None)) for method in ("encode", "decode"))
        require(codec is None or codes, "codec", "a Codec", codec)
        require(isinstance(bounds, Bounds), "bounds", "a Bounds", bounds)  # pyright: ignore[reportUnnecessaryIsInstance]
        self.namespace = namespace
        self.bounds = bounds
        # lowering the bound must not make unreadable what is stored
        largest = max(bounds.value, DEFAULT.value)
        self.codec: Codec[T] = codec if codec is not None else JSONCodec(value_type, max_size=largest)
        # None if no value that it encodes can be too large when decoded
        fits = type(self.codec) is JSONCodec and self.codec.max_size <= bounds.digest
        self._size_of = None if fits else sizes_of(self.codec)
        self.retry = retry
        self.backoff_mode = backoff_mode
        self.concurrency = whole(concurrency, "concurrency", 1, 1_000_000)
        plain = destination is None or can_observe(destination)
        require(plain, "destination", "a function from a key to a str that is not async", destination)
        self.destination = destination
        self.destination_concurrency = destination_concurrency
        if destination_concurrency is not None:
            whole(destination_concurrency, "destination_concurrency", 1, 1_000_000)
            if destination is None:
                raise ConfigurationError("destination_concurrency needs a destination, which names what it limits")
        if throttle is not None:
            from aiodigest.timing import throttle as throttles  # most have none

            require(isinstance(throttle, throttles.Throttle), "throttle", "a Throttle or None", throttle)  # pyright: ignore[reportUnnecessaryIsInstance]
        self.throttle = throttle
        self.lease_timeout = duration(lease_timeout, "lease_timeout", 0.1)
        self.delivery_timeout = duration(delivery_timeout, "delivery_timeout", 0.001)
        self.drain_timeout = duration(drain_timeout, "drain_timeout")
        self.timeout = duration(timeout, "timeout", 0.001)
        wait_replicas = whole(wait_replicas, "wait_replicas", 0, 1_000)
        if backend is not None and (url != EMBEDDED or shards is not None or wait_replicas):
            raise ConfigurationError("give a URL, with shards and wait_replicas, or a backend, which has its own")
        if backend is None:
            backend = open_backend(
                url, namespace=namespace, shards=shards, timeout=self.timeout, wait_replicas=wait_replicas
            )
        self.backend = backend
        self._url = self.backend.url  # also while a test replaces the backend
        self._retries = Source("retry", RetryPolicy, retry, self._clock_ms)
        self._policies = Policies(policy, self._retries.fixed, self.delivery_timeout, self._clock_ms, bounds.digest)
        self._registered: Registered[T] = Registered()
        self._session: Session | None = None

    @property
    def url(self) -> str:
        """The URL of the store, without the password."""
        return self._url

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which the engine is entered; None if it is not, or may be used in any (in a test)."""
        return None if self._session is None or self._session.is_over else self._session.loop

    @property
    def activity(self) -> Activity:
        """The current work of this engine in this process: a few numbers, read without a call to the server.

        If the engine is not entered but used by ``sync``, ``unavailable`` describes the calls of ``sync``.
        """
        sessions = (self._session, bridge().session_of(self))
        now = next((each.activity for each in sessions if each is not None and not each.is_over), Activity())
        return replace(now, adds=self._registered.added)

    @property
    def sync(self) -> Sync[T]:
        """The same adds, as a ``Sync``, for threads without an event loop (Django, Celery, scripts)."""
        return Sync(self, in_task=self._policies.fixed is None)

    def __repr__(self) -> str:
        return f"DigestEngine({self.url!r}, namespace={self.namespace!r})"

    # Entering and leaving

    def deliver(self, callback: Callback[T]) -> Callback[T]:
        """Register ``callback``, an async function of a digest (a decorator; it is returned unchanged).

        Returning means delivered, and raising means to try the digest again; ``RetryAfter``, ``Reject`` and
        ``PartialFailure`` say more. An object with an async ``__call__`` and a plain function that returns an awaitable
        are callbacks too. Raises ConfigurationError for a second callback.
        """
        if self._registered.callback is not None:
            told = f"engine {self.namespace!r} has its callback already, and takes one"
            raise ConfigurationError(f"{told}: for another channel, make an engine with another namespace")
        require(can_call_back(callback), "the callback", "an async function without yield", callback)
        self._registered.callback = callback
        return callback

    def observe(self, observer: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        """Register ``observer``, to be told of each attempt to deliver from now on, in addition to earlier observers.

        A decorator; it returns the function unchanged. An observer is not async, and must not block or raise.
        """
        require(can_observe(observer), "an observer", "a function that is not async", observer)
        self._registered.observers.append(observer)
        return observer

    @property
    def tracing(self) -> Tracing | None:
        """The tracing library that was registered, or None."""
        return self._registered.tracing

    def trace(self, tracing: Tracing) -> None:
        """Register ``tracing``, a library of traces, as ``aiodigest.integrations.opentelemetry.instrument`` does.

        Raises ConfigurationError for a second one.
        """
        if self._registered.tracing is not None:
            raise ConfigurationError(f"engine {self.namespace!r} is instrumented already")
        self._registered.tracing = tracing

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._leave()

    @asynccontextmanager
    async def delivering(
        self, callback: Callback[T] | None = None, *, shards: Container[int] | None = None, signals: bool = False
    ) -> AsyncGenerator[Self, None]:
        """Enter the engine, and deliver in the background until it is left: to ``callback``, or to the registered one.

        A callback that is an async context manager, such as a channel, is entered before anything is claimed, and left
        when the last call of it has ended. ``shards`` restricts this process to some of the namespace's, numbered from
        0; others must serve the rest. Leaving sends queued adds, waits up to ``drain_timeout`` for the deliveries under
        way, and gives the rest back.

        Unless somebody handles SIGTERM and SIGINT, as web servers do, they kill the process with what it delivers. With
        ``signals`` the first one cancels the block, which is left as above, and what comes after it goes on; a second
        one ends the wait for deliveries. Of nested blocks, the outer one delivers on until the inner one is left.
        They are heard in the main thread alone.

        Raises ConfigurationError if there is no callback, the engine is entered already, another engine of this
        process delivers the same namespace to another callback, or ``signals`` is given in another thread.
        """
        if (chosen := callback if callback is not None else self._registered.callback) is None:
            raise ConfigurationError(f"engine {self.namespace!r} has no callback: register one with @engine.deliver")
        require(can_call_back(chosen), "the callback", "an async function without yield", chosen)
        numbers = shards is None or (hasattr(shards, "__contains__") and not isinstance(shards, str | bytes))
        require(numbers, "shards", "a range or a set of numbers", shards)
        registered = self._registered

        def hurry() -> None:
            if isinstance(self._session, BackgroundSession):
                self._session.hurry()

        ending = SignalledEnd(hurry)
        with on_signals(ending.on_signal) if signals else nullcontext():
            async with Holding(chosen, registered.held):
                await self._enter(chosen, shards)
                session = self._session
                registered.chosen.append(chosen)
                try:
                    async with ending.block() if signals else nullcontext():
                        yield self
                finally:
                    registered.chosen.remove(chosen)
                    if session is self._session:  # else it was a test's, which has ended before
                        await self._leave()

    async def run(self, callback: Callback[T] | None = None, *, shards: Container[int] | None = None) -> None:
        """Deliver until SIGTERM or SIGINT, then drain and return; a second signal stops at once.

        The arguments are those of ``delivering``.
        """
        async with self.delivering(callback, shards=shards, signals=True):
            if isinstance(self._session, BackgroundSession):
                await asyncio.wait([self._session.main])  # which a fault may end
            else:
                await asyncio.Event().wait()

    @asynccontextmanager
    async def lifespan(self, app: object) -> AsyncGenerator[None, None]:
        """Deliver during the life of an ASGI app: ``FastAPI(lifespan=engine.lifespan)``; ``app`` is ignored.

        Raises the errors of ``delivering``, so that the app does not start.
        """
        async with self.delivering():
            yield

    @property
    def is_entered(self) -> bool:
        """True while the engine is entered in this process, or tested."""
        return self._session is not None and not self._session.is_over

    @contextmanager
    def replace_backend(
        self, backend: Backend, loop: asyncio.AbstractEventLoop | None = None
    ) -> Generator[Replacement[T]]:
        """Work on ``backend`` instead, until left: for tools that test an engine, such as ``TestEngine``.

        Inside, the engine counts as entered, in ``loop`` or (None) in any event loop. To enter it once more only tells
        the replacement of a callback: nothing is delivered, unless by the tool. What is registered inside is forgotten
        with it. Raises ConfigurationError if the engine is entered, or its backend is replaced already.
        """
        if self.is_entered:
            is_background = isinstance(self._session, BackgroundSession)
            how = "entered already: enter its TestEngine before it" if is_background else "in a TestEngine already"
            raise ConfigurationError(f"engine {self.namespace!r} is {how}")
        before = self.backend, self._registered, self._session
        registered = replace(self._registered, chosen=[], held=[], observers=[*self._registered.observers])
        session = Session(backend, loop)
        self.backend, self._registered, self._session = backend, registered, session
        bridge().forget(self)
        try:
            yield Replacement(session, registered, self._policies.limits, self._dispatcher)
        finally:
            self.backend, self._registered, self._session = before
            bridge().forget(self)

    async def _enter(self, callback: Callback[T] | None = None, shards: Container[int] | None = None) -> None:
        """Begin a session, unless a test has begun one."""
        schedule = None
        if self._session is not None:
            if not self._session.is_over:
                if isinstance(self._session, BackgroundSession):
                    raise ConfigurationError(f"engine {self.namespace!r} is entered already")
                self._entered()
                return
            self.backend = self.backend.clone()  # the other one is still connected, elsewhere
        if callback is not None:
            from aiodigest.scheduler import Scheduler  # not needed just to add

            schedule = partial(
                Scheduler,
                dispatcher=self._dispatcher(callback),
                limits=self._policies.limits,
                backoff_mode=self.backoff_mode,
                concurrency=self.concurrency,
                destination=self.destination,
                destination_concurrency=self.destination_concurrency,
                throttle=self.throttle,
                lease_timeout=self.lease_timeout,
                drain_timeout=self.drain_timeout,
                timeout=self.timeout,
                observers=self._registered.observers,
                numbers=shards,
            )
        self._session = session = BackgroundSession(self.backend, self.namespace, self.timeout, schedule)
        try:
            if callback is not None:
                begin_delivery(session, callback)
            await session.backend()
        except BackendUnavailable:
            pass  # it may come: adds try again, and so does the scheduler
        except BaseException:
            session.hurry()
            await self._leave()
            raise

    async def _leave(self) -> None:
        if isinstance(self._session, BackgroundSession):
            try:
                await self._session.stop()
            finally:
                end_delivery(self._session)
                self._session = None

    def _entered(self) -> Session:
        """Return the session in which a call may be made here: that of the engine, or of ``sync`` in its thread."""
        own = self._session
        if own is not None and own.is_here:
            return own
        bridged = bridge().session_of(self)
        if bridged is not None and bridged.is_here:
            return bridged
        if own is None:
            raise ConfigurationError(f"engine {self.namespace!r} is not entered: use it inside `async with engine:`")
        raise ConfigurationError(f"engine {self.namespace!r} {own.elsewhere}")

    def _dispatcher(self, callback: Callback[T]) -> Dispatcher[T]:
        from aiodigest.worker.delivery import Dispatcher  # not needed just to add

        lease_timeout, timeout, tracing = self.lease_timeout, self.delivery_timeout, self._registered.tracing
        policy, fixed = partial(self._policies.of, timeout=timeout), self._policies.fixed
        retry = self._retries.fixed or partial(self._retries.of, timeout=timeout)
        return Dispatcher(callback, self.codec, policy, retry, lease_timeout, timeout, tracing, self.bounds, fixed)

    # Adding

    async def add(
        self,
        key: str,
        value: T,
        *,
        record_id: str | None = None,
        timestamp: datetime | float | None = None,
        urgent: bool = False,
    ) -> bool:
        """Add a record to the timeline ``key``; True if it is due now, and this add made it so.

        ``value`` must be of the engine's ``value_type``. ``record_id`` (any text, within the engine's ``bounds``; made
        up if absent) replaces the value held under it. ``timestamp`` (an aware datetime, or epoch seconds; the server's
        time of arrival if absent) orders the records of a digest. ``urgent`` flushes the timeline at once, as ``flush``
        does: through a cool-down, closed hours and a retry wait, but not through a mute, a rest, the limit of its
        destination or the throttle. When this returns, the record is stored, or it is counted as muted (by a mute that
        drops) or as a duplicate (``dedupe_window``): then nothing is flushed either.

        Raises InvalidArgument, LimitExceeded or CodecError if an argument is not allowed, ConfigurationError if the
        user may not add or the policy function took longer than ``timeout``, and BackendUnavailable within ``timeout``:
        only if its ``stored`` is "unknown" may anything be stored.
        """
        session, loop = self._session, asyncio.get_running_loop()
        if session is None or session.loop is not loop:  # else it is here, and no call is needed to know that
            session = self._entered()
        began = loop.time()
        if type(key) is not str or not (key.isascii() and 0 < len(key) <= self.bounds.name):  # most are such
            name(key, "key", self.bounds.name)
        record = None if record_id is None else name(record_id, "record_id", self.bounds.name)
        policy = self._policies.fixed or await self._policies.of(key, self.timeout)
        encoded = self.codec.encode(value)
        add = self._pack(key, record, encoded, timestamp, policy, urgent, began + self.timeout)
        try:
            ready = await session.add(add, began)
        except BackendUnavailable as error:
            raise session.explained(error, unpack(add.entry).id) from None  # its message says it all
        self._registered.added += 1
        return ready

    async def add_many(self, entries: Iterable[Entry[T]]) -> list[bool]:
        """Add ``entries``, a few hundred a call to the server; return the answer of ``add`` for each, in order.

        Raises PartialAdd, whose ``results`` has an answer or an error for each entry, if any failed: one bad entry
        fails alone. Once the server of a shard is unavailable, the shard's unsent entries fail as not stored. Raises
        LimitExceeded, and stores nothing, if there are more than ``bounds.records``; it takes at most one entry over
        that from an iterable.
        """
        session = self._entered()
        given = taken(entries, self.bounds.records)
        results: list[bool | AiodigestError] = []
        policies: dict[str, Policy | BaseException] = {}
        encode = Encoder(self.codec)
        down: Down = {}
        step = CHUNK * session.breadth
        for start in range(0, len(given), step):
            results += await self._add_some(session, given[start : start + step], policies, encode, down)
        if set(map(type, results)) - {bool}:
            raise PartialAdd(results)
        return cast("list[bool]", results)

    async def _add_some(
        self,
        session: Session,
        entries: Sequence[Entry[T]],
        policies: dict[str, Policy | BaseException],
        encode: Encoder[T],
        down: Down,
    ) -> list[bool | AiodigestError]:
        """Add some of the entries of an ``add_many``; ``policies`` are those of the keys that it has asked for, and
        ``down`` tells of the shards that it has found unavailable."""
        if self._policies.fixed is None:
            keys = (plain(entry.key) for entry in entries if self._has_key(entry))
            wanted = [key for key in keys if key not in policies and not session.why_down(key, down)]
            policies |= await self._policies.of_all(wanted, self.timeout)
        adds, failed = list[Add](), dict[int, AiodigestError]()
        answers = await session.add_many(self._make(session, entries, policies, encode, adds, failed, down), down)
        if not failed and {bool}.issuperset(map(type, answers)):  # as nearly always
            self._registered.added += len(answers)
            return answers
        results: list[bool | AiodigestError] = []
        told = zip(adds, answers, strict=True)
        for index in range(len(entries)):
            if index in failed:
                results.append(failed[index])
                continue
            add, answer = next(told)
            if isinstance(answer, BackendUnavailable):
                answer = session.explained(answer, unpack(add.entry).id)
            results.append(answer)
            self._registered.added += isinstance(answer, bool)
        return results

    def _make(
        self,
        session: Session,
        entries: Sequence[Entry[T]],
        policies: dict[str, Policy | BaseException],
        encode: Encoder[T],
        adds: list[Add],
        failed: dict[int, AiodigestError],
        down: Down,
    ) -> Generator[Add]:
        """Yield the adds of entries, which are put into ``adds`` too; and the errors of the others into ``failed``, by
        their places. Nothing is made of what goes to shards that were ``down`` when this began."""
        fixed, most, down = self._policies.fixed, self.bounds.name, dict(down)
        for index, entry in enumerate(entries):
            try:
                if not isinstance(entry, Entry):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise InvalidArgument(f"add_many takes no {type(entry).__name__}: give Entry(key, value)")
                key, record = entry.key, entry.record_id
                if type(key) is not str or not (key.isascii() and 0 < len(key) <= most):  # most are such
                    name(key, "key", most)
                record = None if record is None else name(record, "record_id", most)
                if down and (lost := session.why_down(key, down)):
                    is_away = isinstance(lost, BackendUnavailable)
                    failed[index] = BackendUnavailable(str(lost), record_id=entry.record_id) if is_away else lost
                    continue
                policy = fixed or policies[plain(key)]
                if isinstance(policy, BaseException):
                    raise policy
                add = self._pack(key, record, encode(entry.value), entry.timestamp, policy, entry.urgent)
            except AiodigestError as error:
                failed[index] = error
            except (Exception, asyncio.CancelledError) as error:  # of a function, or the codec, and not who adds
                failed[index] = AiodigestError(f"the entry could not be made ready: {describe(error)}")
                failed[index].__cause__ = error
            else:
                adds.append(add)
                yield add

    def _has_key(self, entry: Entry[T]) -> bool:
        with suppress(InvalidArgument):
            return isinstance(entry, Entry) and bool(name(entry.key, "key", self.bounds.name))  # pyright: ignore[reportUnnecessaryIsInstance]
        return False

    def _pack(
        self,
        key: str,
        record_id: bytes | None,
        encoded: bytes,
        timestamp: datetime | float | None,
        policy: Policy,
        urgent: bool,
        until: float = inf,
    ) -> Add:
        if type(encoded) is not bytes or len(encoded) > self.bounds.value:  # else the call is spared
            check_encoded(encoded, self.bounds.value)
        tracing = self._registered.tracing
        context = b"" if tracing is None else tracing.context()
        if record_id is None and timestamp is None and not context:
            entry = pack_new(encoded)
        else:
            entry = pack(record_id, None if timestamp is None else microseconds(timestamp), encoded, context)
        terms = policy.terms
        if self._size_of is not None and (size := self._size_of(encoded)) > self.bounds.digest:
            raise LimitExceeded(f"a value may take at most {self.bounds.digest:,} bytes when decoded, not {size:,}")
        if urgent is not False or terms.max_bytes:
            return self._special(key, entry, encoded, terms, urgent, until)
        return Add(key if type(key) is str else plain(key), entry, terms, self._policies.own, until)

    def _special(self, key: str, entry: bytes, encoded: bytes, terms: Terms, urgent: bool, until: float) -> Add:
        """Return an add that is urgent, or whose policy bounds the bytes of a digest, as few are."""
        require(isinstance(urgent, bool), "urgent", "True or False", urgent)  # pyright: ignore[reportUnnecessaryIsInstance]
        size = sizes_of(self.codec)(encoded) if terms.max_bytes else 0
        if size > terms.max_bytes:
            told = f"a value may take at most {terms.max_bytes:,} bytes (max_bytes), not {size:,}"
            raise LimitExceeded(told, field="max_bytes", given=size, most=terms.max_bytes)
        return Add(plain(key), entry, terms, self._policies.own, until, urgent, size)

    # Looking at timelines and dead letters, and moving them by hand

    async def _backend(self) -> Backend:
        return await self._entered().backend()

    async def _clock_ms(self, key: str) -> int:
        """Return the time by the clock of a timeline's server."""
        backend = await self._backend()
        return await backend.clock_ms(backend.shard_map.shard_of(key))

    async def _timeline(self, key: str) -> Backend:
        """Check a key, and return the store."""
        name(key, "key", self.bounds.name)
        return await self._backend()

    async def flush(self, key: str) -> bool:
        """Make a timeline due now, or at the end of the delivery under way; False if it is muted or holds nothing."""
        session, backend = self._entered(), await self._timeline(key)
        flushed = await backend.flush(key)
        session.poke(backend.shard_map.shard_of(key))
        return flushed

    async def delete(self, key: str) -> bool:
        """Drop a timeline with its records and its cool-down; True if it held records.

        A delivery under way is cancelled at the next renewal of its lease. If the timeline is muted, it stays so.
        """
        return await (await self._timeline(key)).delete(key)

    async def mute(self, key: str, until: datetime | float | timedelta | None = None, drop: bool = False) -> None:
        """Deliver nothing of the timeline ``key`` ``until`` a time: an aware datetime or epoch seconds, by the server's
        clock, or a timedelta from now; None (the default) for until ``unmute``. A time that has passed unmutes it.

        Meanwhile what is added waits, within the timeline's capacity, or with ``drop`` is dropped and counted
        (``Stats.muted``); ``add`` answers False. Nothing passes a mute: no ``flush``, urgent add, size, replay or
        retry. A delivery under way ends; what it leaves waits. After the mute a timeline is due when it would have
        been, but no sooner than the mute ends. Its records are kept for ``ttl`` after that, or without an end after the
        last add. A mute does not expire, needs no records, and outlives ``delete``; a second one replaces it.
        """
        session, backend = self._entered(), await self._timeline(key)
        require(isinstance(drop, bool), "drop", "True or False", drop)  # pyright: ignore[reportUnnecessaryIsInstance]
        at_ms = delay_ms = None
        if isinstance(until, timedelta):
            delay_ms = milliseconds(duration(max(until, timedelta()), "until"))
        elif until is not None:
            is_length = isinstance(until, int | float) and until < FIRST_MUTE
            require(not is_length, "until", "epoch seconds after 2001 (for a length, give a timedelta)", until)
            at_ms = microseconds(until, "until") // 1000
        policy = await self._policies.of(key, self.timeout)
        await backend.mute(key, Mute(at_ms, delay_ms, drop), policy.terms.limits)
        session.poke(backend.shard_map.shard_of(key))

    async def unmute(self, key: str) -> bool:
        """End a mute; True if there was one. What waits is due when it would have been, or now."""
        session, backend = self._entered(), await self._timeline(key)
        policy = await self._policies.of(key, self.timeout)
        unmuted = await backend.unmute(key, policy.terms.limits)
        session.poke(backend.shard_map.shard_of(key))
        return unmuted

    async def remove(self, key: str, record_id: str) -> bool:
        """Drop the record ``record_id``; True if it was there and is not delivered any more.

        A value that is under delivery, or whose outcome is unknown, stays and may be delivered again: False, although a
        newer value that waited is dropped.
        """
        backend = await self._timeline(key)
        record = name(record_id, "record_id", self.bounds.name)
        policy = await self._policies.of(key, self.timeout)
        return await backend.remove(key, identity_of(record), policy.terms.limits)

    async def reschedule(
        self, key: str, *, at: datetime | float | None = None, delay: float | timedelta | None = None
    ) -> datetime:
        """Move the due time of a waiting timeline, and return it.

        To ``at`` (an aware datetime or epoch seconds, on the server's clock), or to ``delay`` (seconds or a timedelta)
        from now. It never comes before the cool-down's end, nor later than ``maximum_delay`` after the last digest.
        In a retry wait, ``at`` and ``delay`` move the next try.

        With neither, to the current policy's time: its delay after the last digest, or after the add that opened the
        window. A delay that a policy function works out from the time of day moves nothing if it ends when the earlier
        one does, to ten seconds; if its hour has changed, give ``at``. This moves a cool-down too: of one without
        records the new end is returned, which may have passed, and the next record goes by it.

        Raises InvalidState if the timeline neither waits nor, with neither given, is in a cool-down, or if it waits for
        a retry and neither is given.
        """
        session, backend = self._entered(), await self._timeline(key)
        require(at is None or delay is None, "delay", "absent if at is given", delay)
        policy = await self._policies.of(key, self.timeout)
        at_ms = None if at is None else microseconds(at, "at") // 1000
        delay_ms = None if delay is None else milliseconds(duration(delay, "delay"))
        by_policy = at_ms is None and delay_ms is None
        while True:
            found = await backend.operations.look_all(key)
            cooling = await backend.operations.cooling(key) if by_policy and not found else []
            if not found and not cooling:
                raise InvalidState(f"timeline {key!r} holds no records: only a waiting timeline can be rescheduled")
            # a policy moves it from its iteration: one, except while resharding. None can be moved: the store says why
            waiting = {each.iteration for each in found if each.state == "waiting" and not each.digest_id}
            waiting.update(each.iteration for each in cooling)
            dues: list[int | None] = []
            for iteration in sorted(waiting if by_policy else ()) or [found[0].iteration]:
                gap_ms = policy.cool_ms(iteration) if iteration else 0
                move = Move(policy.terms, at_ms, delay_ms, gap_ms, iteration, by_clock=self._policies.fixed is None)
                dues.append(await backend.reschedule(key, move))
            moved = [due for due in dues if due is not None]
            if len(moved) == len(dues):  # else a digest was closed since the look
                session.poke(backend.shard_map.shard_of(key))
                return nearest(min(moved))

    async def peek(self, key: str) -> Timeline[T] | None:
        """Return a timeline with its records, without delivering them; None if it holds none and is not muted.

        Records of over ``bounds.digest`` in all are not decoded: the last ones come as they are stored.
        """
        backend = await self._timeline(key)
        found = await backend.operations.look(key)
        if found is None:
            return None
        return self._view(found, await self._records(await backend.operations.entries(key)))

    async def explain(self, key: str, *, tz: str | ZoneInfo = "UTC") -> Explanation:
        """Return why a timeline is where it is, and until when: each reason with its instant, and all as a sentence.

        It reads as "waits until 14:07:30: last digest 14:02:00, cool-down 5 min until 14:07:00, pushed 30 s by 1 add;
        at the latest 14:32:00; inside its hours". Times are by the server's clock, and are shown in the zone ``tz``.
        While it is resharded, that of its digests is explained which is due first. An engine that was given no
        ``policy`` tells what is stored, and nothing of rules and hours.
        """
        from aiodigest.timing.explain import Explainer, full_at_the_end, is_held_longer  # imports time zones
        from aiodigest.timing.zones import zone_of

        zone, backend = zone_of(tz), await self._timeline(key)
        found = await backend.operations.look_all(key)
        cooling = [] if found else await backend.operations.cooling(key)
        now_ms, policy, retry = await self._clock_ms(key), None, None
        if self._policies.fixed is not NO_POLICY:
            policy = await self._policies.of(key, self.timeout, now_ms)
            retry = await self._retries.of(key, self.timeout, now_ms)
            if found and is_held_longer(found[0]):
                entries = await backend.operations.entries(key)
                found = [full_at_the_end(found[0], policy.terms, entries, sizes_of(self.codec))]
        unknown = (unknown_need(found[0].needs, FEATURES) or "") if found else ""
        explainer = Explainer(plain(key), now_ms, policy, retry, zone, unknown, self.throttle)
        return explainer.explain(next(iter(found), None), next(iter(cooling), None))

    async def timelines(self, state: State | None = None) -> AsyncIterator[Timeline[T]]:
        """Yield the timelines, the earliest due of each shard and state first; without records.

        ``state`` is "waiting", "ready", "leased" or "muted", or by default None: all of them. Those that are muted come
        the first to end first, also without records; one under delivery is "leased" all the same. A timeline whose
        state or due time changes meanwhile may be missed, or come again. Every other one comes once, whatever is
        deleted meanwhile.
        """
        states: tuple[State, ...] = get_args(State)
        fits = state is None or (isinstance(state, str) and state in states)  # pyright: ignore[reportUnnecessaryIsInstance]
        require(fits, "state", f"one of {', '.join(states)}", state)
        backend = await self._backend()
        for shard in _shards_of(backend):
            for each in states if state is None else (state,):
                async for found in _paged(partial(backend.operations.page, shard, each)):
                    if state is not None or found.state == each:  # else it is muted, and came before
                        yield self._view(found)

    async def stats(self) -> Stats:
        """Return timelines by state, dead letters, and counters of events."""
        counts = await (await self._backend()).operations.counts()
        oldest = counts.get("oldest_due_ms")
        numbers = {field.name: counts.get(field.name, 0) for field in fields(Stats) if field.name not in TIMES}
        due = None if oldest is None else nearest(oldest)
        overdue, stepped_back = counts.get("overdue_ms", 0) / 1000, counts.get("stepped_back_ms", 0) / 1000
        return Stats(**numbers, oldest_due=due, overdue=overdue, stepped_back=stepped_back)

    async def health(self, *, overdue: float | timedelta = OVERDUE) -> Health:
        """Check that the server answers, and no timeline has been due for over ``overdue`` (seconds or a timedelta).

        A server that answers may refuse all that is written, so the latest adds and claims of this process, if they
        were in the last minute, must have gone through as well.

        By default that is a minute. It raises nothing but InvalidArgument: if the server is away, its answer says so,
        within the engine's ``timeout``. A timeline is overdue while no worker claims it: there is none, or too few, or
        they, or its destination, are in backoff mode, or rest because a callback asked for it. An engine whose
        background task a fault has ended is not healthy either.
        """
        bound = duration(overdue, "overdue")
        try:
            session = self._entered()  # the engine may be left before the answer comes
            if fault := session.fault:
                return Health(False, fault)
            try:
                async with asyncio.timeout(self.timeout):  # for the calls to all shards together
                    stats = await self.stats()
            except TimeoutError:
                raise session.explained(BackendUnavailable(f"no answer within {self.timeout:g} s")) from None
        except AiodigestError as error:
            return Health(False, str(error))
        sessions = (session, bridge().session_of(self))
        trouble = next((each.trouble for each in sessions if each is not None and each.trouble), "")
        health = stats.health(bound)
        return replace(health, ok=False, reason=f"adds or claims fail: {trouble}") if trouble else health

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
        An engine that was given no ``policy`` uses the limits that the timeline had, and moves no due time.
        """
        name(letter_id, "the id of a dead letter")
        session, backend = self._entered(), await self._backend()
        letter = await backend.operations.dead_letter(letter_id)
        if letter is None:
            raise InvalidState(f"there is no dead letter {letter_id!r}")
        if letter.broken:
            raise InvalidState(f"dead letter {letter_id!r} is broken: {letter.reason}; it can only be discarded")
        policy = await self._policies.of(letter.key, self.timeout)
        terms, own = policy.terms, self._policies.own
        if policy is NO_POLICY:  # nor does it know when what waits is due, and leaves that
            terms, own = terms._replace(increment_ms=0, maximum_ms=milliseconds(TEN_YEARS)), None
        ready = await backend.replay(letter_id, terms, own)
        session.poke(backend.shard_map.shard_of(letter.key))
        return ready

    async def discard(self, letter_id: str) -> bool:
        """Drop a dead letter; True if there was one."""
        name(letter_id, "the id of a dead letter")
        return await (await self._backend()).discard(letter_id)

    async def examine(self) -> list[Finding]:
        """Check the servers and the namespace: return each check's findings, with remedies.

        Nothing is changed, and a namespace that was never used is not created. If the user may not ask something, a
        note names the missing command. It takes some thirty calls to each server. Replicas that sentinels or a cluster
        may promote are asked if they know the user, provided that the primary lists them (``INFO``).
        """
        return await (await self._backend()).operations.examine()

    async def erase(self) -> int:
        """Drop the namespace with all its contents, counters included; return the number of keys dropped.

        It looks through all keys of the servers (``SCAN``), a thousand a call. Use it to end a namespace that nobody
        uses any more: a process that still uses it starts it anew.

        Raises ConfigurationError, and drops nothing, if the user may not ``SCAN``.
        """
        return await (await self._backend()).operations.erase()

    async def try_erase(self) -> None:
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

    async def _records(self, entries: Sequence[bytes]) -> tuple[Record[T | bytes], ...]:
        from aiodigest.worker.contents import read  # not needed just to add

        contents = await read(entries, bounded(self.codec, self.bounds.digest))
        return (*contents.records, *contents.raw)

    def _view(self, stored: StoredTimeline, records: tuple[Record[T | bytes], ...] = ()) -> Timeline[T]:
        key, state, due, logged, opened, attempt, iteration, dropped, cool, digest_id, error = stored[:11]
        mute, drops = stored.mute_ms, stored.drops
        at, size, until = nearest(due), logged + opened, nearest(cool) if cool else None
        named = digest_id or None, error or None
        muted = mute >= 0, nearest(mute) if mute > 0 else None, drops
        return Timeline(key, state, at, size, attempt, iteration, dropped, until, *named, records, *muted)

    async def _letter(self, letter: StoredDeadLetter) -> DeadLetter[T]:
        records, buried = await self._records(letter.entries), nearest(letter.buried_ms)
        return DeadLetter(letter.id, letter.key, letter.reason, buried, letter.attempt, letter.digest_id, records)


async def _paged(read: Callable[[int, Bookmark | None], Awaitable[Page[Item]]]) -> AsyncIterator[Item]:
    """Yield the items on all pages from ``read``, one after another."""
    page = await read(PAGE, None)
    while True:
        for item in page.items:
            yield item
        if page.end is None:
            return
        page = await read(PAGE, page.end)


def _shards_of(backend: Backend) -> Generator[int]:
    """Yield all shards, including any that a call to one of them reveals."""
    shard = 0
    while shard < backend.shard_map.count:
        yield shard
        shard += 1
