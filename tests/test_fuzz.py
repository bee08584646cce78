"""Bad input, made by hypothesis: what callers give, and what another program left in Redis.

``AIODIGEST_TEST_EXAMPLES`` says how many examples each test plays; each prints how much it has tried.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any, Literal, cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Server
from storestate import check_invariants, redis_state

from aiodigest import (
    JSON,
    AiodigestError,
    BackoffMode,
    Bounds,
    CodecError,
    ConfigurationError,
    DeadLetter,
    DecorrelatedJitter,
    Delivery,
    Digest,
    DigestEngine,
    Draining,
    Entry,
    Finding,
    Health,
    IntervalBackoff,
    InvalidArgument,
    IterationBackoff,
    JSONCodec,
    LimitExceeded,
    PartialAdd,
    PartialFailure,
    Policy,
    Reject,
    RetryAfter,
    RetryPolicy,
    Stats,
    Sync,
    Timeline,
)
from aiodigest.records.entries import identity, latest, pack

EXAMPLES = int(os.environ.get("AIODIGEST_TEST_EXAMPLES", "25"))
DEADLINE = 20  # seconds, for what takes milliseconds
MESSAGE = 2_000  # characters that no message of an error reaches
UNPOLICED = "d}:{\0"  # a key whose policy function raises
SECRET = "somebody's mail"  # stands in every value, and must stand in no message

QUOTED = ("key", "record_id", "timestamp")  # what an error may quote of an add

every = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

tried = Counter[str]()
_numbers = count(1)


@pytest.fixture(autouse=True, scope="module")
def told() -> Iterator[None]:
    """Tell how much was tried."""
    yield
    for what, number in tried.items():
        print(f"fuzz: {number} {what}")


# Odd things


class Odd(Exception):
    """What the objects below raise: the caller's own, and not ours to explain."""


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = [SECRET]
    value.append(value)
    return value


def breaking() -> Iterator[Any]:
    yield Entry("a", 1)
    raise Odd("no more of them")


ODD: dict[str, Callable[[], Any]] = {
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "returns none": lambda: _nothing,
    "raises": lambda: _raise,
    "huge int": lambda: 10**5000,
    "huge negative int": lambda: -(10**5000),
    "large int": lambda: 10**400,
    "64 bits": lambda: 2**64,
    "63 bits": lambda: -(2**63),
    "1 MB": lambda: SECRET * 80_000,
    "1 MB of bytes": lambda: b"x" * 1_100_000,
    "many of &": lambda: "?" * 100_000,
    "surrogate": lambda: SECRET + "\ud800",
    "key of a surrogate": lambda: {"\ud800": SECRET},
    "key of an int": lambda: {1: SECRET},
    "nan inside": lambda: {"a": [SECRET, float("nan")]},
    "bytes inside": lambda: [SECRET, b"\xff"],
    "deep": lambda: nested(150),
    "deeper": lambda: nested(250),
    "deepest": lambda: nested(50_000),
    "endless": endless,
    "set": lambda: {SECRET},
    "generator": lambda: (entry for entry in [Entry("a", 1), SECRET, Entry("b", SECRET)]),
    "breaking generator": breaking,
    "naive": lambda: datetime(2020, 1, 1),
    "first": lambda: datetime.min.replace(tzinfo=timezone(timedelta(hours=23))),
    "last": lambda: datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    "now": lambda: datetime.now(UTC),
    "longest": lambda: timedelta.max,
    "shortest": lambda: timedelta.min,
    "model": lambda: Policy,
    "module": lambda: logging,
}


def _nothing(*_: object) -> None:
    pass


def _raise(*_: object) -> Any:
    raise Odd("asked")


@dataclass(frozen=True)
class Named:
    """An odd thing by its name, so that hypothesis can show it."""

    name: str


def real(value: Any) -> Any:
    """What a drawn argument stands for."""
    return ODD[value.name]() if isinstance(value, Named) else value


@dataclass(frozen=True)
class Draft:
    """An entry of ``add_many`` as it was drawn."""

    key: Any
    value: Any
    record_id: Any
    timestamp: Any

    def entry(self) -> Entry[Any]:
        return Entry(real(self.key), real(self.value), real(self.record_id), real(self.timestamp))


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Draw from a strategy as often as its weight says; ``one_of`` takes those that are the same for one, and what is
    in another ``one_of`` for its own."""
    drawn = [strategy for weight, strategy in choices for _ in range(weight)]
    return st.integers(0, len(drawn) - 1).flatmap(drawn.__getitem__)


text = st.text(st.characters(exclude_categories=()), max_size=20)
numbers = st.one_of(st.integers(), st.floats(), st.sampled_from((0, 1, -1, 0.001, 5, 60, 1e9, 1e300)))
json = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), text, st.just(SECRET)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=5,
)
named = st.sampled_from(sorted(ODD)).map(Named)
odd = st.one_of(named, named, st.none(), st.booleans(), numbers, text, st.binary(max_size=20), json)

keys = weighted((9, st.sampled_from(("a", "b", "c"))), (1, st.just(UNPOLICED)), (2, odd))
ids = weighted((9, st.sampled_from(("1", "2", "3"))), (3, st.none()), (1, odd))
values = weighted((3, json), (1, odd))
moments = st.one_of(st.floats(0, 2e9), st.datetimes(timezones=st.just(UTC)))
times = weighted((5, st.none()), (5, moments), (1, odd))
delays = weighted((2, st.none()), (3, st.floats(0, 100)), (1, st.timedeltas()), (2, odd))

Call = tuple[str, dict[str, Any]]


called: set[str] = set()


def call(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    called.add(name)
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


hooks = weighted((1, st.sampled_from(("function", "returns none", "raises")).map(Named)), (1, odd))
entries = st.builds(Draft, keys, values, ids, times)
letters = weighted((3, st.sampled_from(("letter 0", "letter 1"))), (1, odd))
several = weighted((4, st.lists(weighted((9, entries), (1, odd)), max_size=5)), (1, odd))
states = weighted((2, st.sampled_from(("waiting", "ready", "leased"))), (1, odd))
add, add_many = {"key": keys, "value": values, "record_id": ids, "timestamp": times}, {"entries": several}
often = st.one_of(
    call("flush", key=keys),
    call("delete", key=keys),
    call("remove", key=keys, record_id=ids),
    call("reschedule", key=keys, at=times, delay=delays),
    call("peek", key=keys),
    call("timelines", state=states),
    call("dead_letters"),
    call("dead_letter", letter_id=letters),
    call("replay", letter_id=letters),
    call("discard", letter_id=letters),
    call("stats"),
)
seldom = st.one_of(
    call("health", overdue=delays),
    call("examine"),
    call("erase"),
    call("try_erase"),
    call("reshard", shards=weighted((2, st.sampled_from((1, 2, 3))), (1, odd))),
    call("observe", observer=hooks),
    call("deliver", callback=hooks),
    call("delivering", callback=hooks, shards=odd),
    call("run", callback=hooks, shards=odd),
    call("lifespan", app=odd),
)
calls = weighted(
    (8, call("add", **add)),
    (4, call("add_many", **add_many)),
    (1, call("sync.add", **add)),
    (1, call("sync.add_many", **add_many)),
    (12, often),
    (2, seldom),
)
replies = st.one_of(
    st.just(("return", None)),
    st.tuples(st.sampled_from(("return", "returns", "raise", "reject", "later", "partly", "some", "part of all")), odd),
)


# The engine under test


class Watch(logging.Handler):
    """Keeps what aiodigest itself calls a fault of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "a fault of aiodigest" in record.getMessage():
            detail = record.exc_info[1] if record.exc_info else None
            self.faults.append(f"{record.getMessage()}: {type(detail).__name__}")


class Fuzzed:
    """A delivering engine, what it has delivered, and canaries to see that it still does."""

    def __init__(self, engine: DigestEngine[JSON], client: Any, namespace: str) -> None:
        self.engine = engine
        self.client = client
        self.tag = f"{{{namespace}}}:"
        self.replies: Iterator[tuple[str, Any]] = iter(())
        self.on_digest: Callable[[Digest[JSON]], Awaitable[None]] | None = None
        self.digests: list[Digest[JSON]] = []
        self.changed = asyncio.Event()
        self.canaries = count(1)
        self.erased = False  # key by key, while it was used: what is left of a timeline need not fit together
        engine.observe(self.seen)

    def seen(self, delivery: Delivery) -> None:
        self.changed.set()

    def callback(self, digest: Digest[JSON]) -> Any:
        """A plain function, so that it may return what nobody can await."""
        self.digests.append(digest)
        if digest.key.startswith("canary"):
            return asyncio.sleep(0)
        if self.on_digest is not None:
            return self.on_digest(digest)
        kind, name = next(self.replies, ("return", None))
        if kind == "returns":
            return real(name)
        return self.reply(digest, kind, real(name))

    async def reply(self, digest: Digest[JSON], kind: str, value: Any) -> Any:
        match kind:
            case "raise":
                raise value if isinstance(value, BaseException) else Odd("not now")
            case "reject":
                raise Reject(value)
            case "later":
                raise RetryAfter(value)
            case "partly":
                raise PartialFailure(value)
            case "some":
                raise PartialFailure({digest.records[0].id: value})
            case "part of all":
                raise PartialFailure({record.id: value for record in digest.records})
            case _:
                return value

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not reached():
                self.changed.clear()
                await self.changed.wait()

    async def canary(self) -> None:
        """A record on a fresh timeline is delivered."""
        key = f"canary {next(self.canaries)}"
        await self.engine.add(key, "tweet")
        await self.until(lambda: any(digest.key == key for digest in self.digests))
        await self.until(lambda: self.client.exists(f"{self.tag}open:{key}") == 0)

    def is_empty(self, key: str) -> bool:
        """Whether a timeline is in no set and holds no entries."""
        lists = self.client.exists(f"{self.tag}log:{key}", f"{self.tag}open:{key}")
        return lists == 0 and not self.states(key)

    def states(self, key: str) -> list[str]:
        names = ("waiting", "ready", "leased")
        return [name for name in names if self.client.zscore(f"{self.tag}{name}", key) is not None]


def policy_of(key: str) -> Any:
    match key:
        case "a":
            return Policy(minimum_delay=0, increment_delay=0)
        case "b":
            return Policy(minimum_delay=0, increment_delay=0, capacity=3, max_size=2, max_age=1e6)
        case "c":
            return Policy(initial_delay=100, minimum_delay=lambda n: object())  # pyright: ignore[reportArgumentType]
        case _ if key == UNPOLICED:
            raise Odd("no policy")
        case _ if key.startswith("canary"):
            return Policy()
        case _:
            return Policy(initial_delay=1000) if len(key) % 2 else object()


@asynccontextmanager
async def fuzzed(server: Server, sound: bool = True, **options: Any) -> AsyncGenerator[Fuzzed, None]:
    """An engine in a namespace of its own, which may do all, delivering; it and the event loop end without a fault.

    ``sound``: what it leaves behind is as it must always be, since nobody but aiodigest wrote it.
    """
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    namespace = f"fuzz-{next(_numbers)}"
    settled: dict[str, Any] = {"retry": RetryPolicy(max_attempts=2, backoff=lambda n: 0.0), "timeout": DEADLINE}
    engine = DigestEngine[JSON](
        f"unix://{server.socket}", namespace=namespace, backoff_mode=BackoffMode(maximum=0), **(settled | options)
    )
    watch, logger = Watch(), logging.getLogger("aiodigest")
    logger.propagate = False
    logger.addHandler(watch)
    try:
        with server.client() as client:
            fuzz = Fuzzed(engine, client, namespace)
            async with engine.delivering(fuzz.callback):
                yield fuzz
                await fuzz.canary()
            for tag in tags(client, namespace) if sound and not fuzz.erased else ():
                if client.hget(f"{{{tag}}}:layout", "version") == b"retired":  # drained, with cool-downs and marks left
                    left = {key.partition(b"}:")[2] for key in client.scan_iter(match=f"{{{tag}}}:*")}
                    assert {key.partition(b":")[0] for key in left} <= {b"layout", b"meta", b"moved", b"wake"}
                else:
                    check_invariants(redis_state(client, tag))
            drop(client, namespace)
    finally:
        logger.removeHandler(watch)
        logger.propagate = True
    assert not watch.faults
    assert not unseen, unseen


def keys_of(client: Any, namespace: str) -> list[bytes]:
    """All that a namespace has in Redis, with whatever number of shards."""
    found = client.scan_iter(match=f"{{{namespace}*", count=10_000)
    return [key for key in found if key.startswith((b"{%b}:" % namespace.encode(), b"{%b:" % namespace.encode()))]


def tags(client: Any, namespace: str) -> set[str]:
    """The tags of its shards."""
    return {key.partition(b"}")[0][1:].decode() for key in keys_of(client, namespace)}


def drop(client: Any, namespace: str) -> None:
    """Leave the server as it was, or a long run would fill it."""
    if keys := keys_of(client, namespace):
        client.delete(*keys)


def check(error: BaseException, secret: bool = False) -> None:
    """A typed error whose message is short; ``secret``: the value alone was odd, and stands not in it."""
    assert isinstance(error, AiodigestError), repr(type(error))
    message = str(error)
    assert len(message) < MESSAGE, f"{len(message)} characters: {message[:200]}"
    assert not secret or SECRET not in message
    if isinstance(error, PartialAdd):
        for result in error.results:
            assert isinstance(result, bool) or check(result) is None


# What callers give


def arguments_of(fuzz: Fuzzed, drawn: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    arguments = {name: real(value) for name, value in drawn.items()}
    letter = arguments.get("letter_id")
    if isinstance(letter, str) and letter.startswith("letter ") and known:
        arguments["letter_id"] = known[int(letter[-1:]) % len(known)]
    given: Any = arguments.get("entries")
    if type(given) is list:
        some = cast("list[Any]", arguments["entries"])
        arguments["entries"] = [one.entry() if isinstance(one, Draft) else real(one) for one in some]
    return arguments


async def ask(fuzz: Fuzzed, name: str, arguments: dict[str, Any]) -> Any:
    method = attrgetter(name)(fuzz.engine)
    async with asyncio.timeout(DEADLINE):
        if name.startswith("sync."):
            return await asyncio.to_thread(method, **arguments)
        answer = method(**arguments)
        if name == "reshard":  # it is broken off: what waits goes on waiting
            async with aclosing(answer):
                return await anext(answer, None)
        if inspect.isasyncgen(answer):
            return [item async for item in answer]
        if isinstance(answer, AbstractAsyncContextManager):
            async with cast("AbstractAsyncContextManager[Any]", answer):
                return None
        return await answer if inspect.isawaitable(answer) else answer


def of(kind: Any) -> Callable[[Any], bool]:
    return lambda answer: isinstance(answer, kind)


def each_of(kind: Any) -> Callable[[Any], bool]:
    return lambda answer: isinstance(answer, list) and all(map(of(kind), cast("list[Any]", answer)))


# what each call may answer; those that are not here only raise, since the engine was entered already
ANSWERS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("add", "sync.add", "flush", "delete", "remove", "replay", "discard"), of(bool)),
    **dict.fromkeys(("add_many", "sync.add_many"), each_of(bool)),
    "reschedule": lambda answer: isinstance(answer, datetime) and answer.utcoffset() is not None,
    "peek": of(Timeline | None),
    "timelines": each_of(Timeline),
    "dead_letters": each_of(DeadLetter),
    "dead_letter": of(DeadLetter | None),
    "stats": of(Stats),
    "health": of(Health),
    "examine": lambda answer: all(map(of(Finding), answer)),
    "erase": of(int),
    "try_erase": lambda answer: answer is None,
    "reshard": of(Draining | None),
    "observe": callable,
    "deliver": callable,
}


def fits(name: str, answer: Any) -> bool:
    return ANSWERS.get(name, lambda _: False)(answer)


def test_everything_that_an_engine_can_be_asked_is_drawn() -> None:
    asked = {name for name in dir(DigestEngine) if not name.startswith("_") and callable(getattr(DigestEngine, name))}
    asked |= {f"sync.{name}" for name in dir(Sync) if not name.startswith("_")}
    asked -= {"trace", "replace_backend"}  # for integrations and tools, which make no mistakes with types
    assert called == asked


@every
@given(asked=st.lists(calls, min_size=5, max_size=40), replied=st.lists(replies, max_size=10))
async def test_whatever_an_engine_is_asked_it_answers_or_raises_a_typed_error_and_goes_on_delivering(
    server: Server, asked: list[Call], replied: list[tuple[str, Any]]
) -> None:
    async with fuzzed(server, policy=policy_of) as fuzz:
        fuzz.replies = iter(replied)
        for name, drawn in asked:
            tried["calls"] += 1
            known = [letter.id async for letter in fuzz.engine.dead_letters()]
            try:
                answer = await ask(fuzz, name, arguments_of(fuzz, drawn, known))
            except Odd:  # of the iterable, or of the policy function: the caller's own
                assert name.endswith("add_many") or drawn["key"] == UNPOLICED
            except Exception as error:
                check(
                    error,
                    name in ("add", "sync.add")
                    and not any(isinstance(drawn[one], Named) or SECRET in repr(drawn[one]) for one in QUOTED),
                )
            else:
                assert fits(name, answer)
                fuzz.erased |= name == "erase"


# What engines are made of

Made = tuple[str, dict[str, Any]]


def made(what: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Made]:
    """A constructor by its name, and some of its arguments."""
    return st.tuples(st.just(what), st.fixed_dictionaries({}, optional=arguments))


wholes = weighted((3, st.integers(-1, 10_000)), (1, odd))
counts = st.one_of(st.integers(0, 100), st.integers(min_value=0))
waits = weighted((1, st.sampled_from((IterationBackoff(), DecorrelatedJitter()))), (2, delays))
urls = st.one_of(
    odd,
    st.tuples(
        st.sampled_from(("redis://", "rediss://", "unix://", "embedded://", "redis+sentinel://", "http://", "")), text
    ).map("".join),
)
parts = st.one_of(
    made("retry", max_attempts=wholes, backoff=waits),
    made("bounds", value=wholes, name=wholes, records=wholes),
    made("backoff mode", threshold=wholes, multiplier=delays, maximum=delays),
    made("codec", value_type=odd, compress_above=wholes, max_size=wholes, value=values, data=st.binary(max_size=50)),
    made("iteration", base=delays, steps=wholes, n=counts),
    made("interval", intervals=st.one_of(st.dictionaries(numbers, delays, max_size=3), odd), default=delays, n=counts),
    made("jitter", base=delays, cap=delays, random=odd, n=counts),
    made("partial", failed=odd),
    made("later", delay=odd, pause=odd),
    made("reject", reason=odd),
)
constructors = weighted(
    (
        3,
        made(
            "engine", url=urls, namespace=st.one_of(text, odd), value_type=odd, codec=odd, policy=odd, retry=odd,
            backoff_mode=odd, bounds=odd, shards=wholes, concurrency=wholes, lease_timeout=delays,
            delivery_timeout=delays, drain_timeout=delays, timeout=delays, wait_replicas=wholes,
        ),
    ),
    (
        3,
        made(
            "policy", initial_delay=delays, minimum_delay=waits, increment_delay=delays, maximum_delay=delays,
            max_size=wholes, capacity=wholes, max_age=delays, ttl=delays,
        ),
    ),
    (8, parts),
)  # fmt: skip


engine: Callable[..., object] = partial(DigestEngine, namespace="fuzz")
LOCAL = "redis://localhost"


def use_codec(n: Any, given: dict[str, Any]) -> None:
    value, data = given.pop("value", None), given.pop("data", b"")
    codec = JSONCodec[Any](**given)
    with suppress(AiodigestError):
        codec.decode(data)
    codec.decode(codec.encode(value))


# Makes one of some arguments, and uses it, with a number, as far as that needs no server.
MAKING: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "engine": lambda n, given: engine(**({"url": LOCAL} | given)),
    "policy": lambda n, given: engine(LOCAL, policy=Policy(**given)),
    "retry": lambda n, given: engine(LOCAL, retry=RetryPolicy(**given)),
    "bounds": lambda n, given: engine(LOCAL, bounds=Bounds(**given)),
    "backoff mode": lambda n, given: BackoffMode(**given),
    "codec": use_codec,
    "iteration": lambda n, given: IterationBackoff(**given)(n),
    "interval": lambda n, given: IntervalBackoff(given.get("intervals", {}), given.get("default", 1))(n),
    "jitter": lambda n, given: DecorrelatedJitter(**given).window(n),
    "partial": lambda n, given: str(PartialFailure(given.get("failed", ()))),
    "later": lambda n, given: str(RetryAfter(given.get("delay", 1), given.get("pause", False))),
    "reject": lambda n, given: Reject(**given),
}


@every
@given(drawn=st.lists(constructors, min_size=1, max_size=20))
def test_whatever_an_engine_and_its_parts_are_made_of_they_are_made_or_refused_with_a_typed_error(
    drawn: list[Made],
) -> None:
    for what, arguments in drawn:
        tried["calls"] += 1
        try:
            given = {name: real(value) for name, value in arguments.items()}
            MAKING[what](given.pop("n", 1), given)
        except (ConfigurationError, InvalidArgument) as error:
            check(error)
        except (CodecError, LimitExceeded) as error:
            check(error)
            assert what == "codec"
        except Odd:
            assert what in ("partial", "later"), (
                "of the iterable, or of what is asked whether it is true: the caller's own"
            )


# What stands in Redis

ZSTD = b"\x02"
FRAME = JSONCodec[JSON](compress_above=0).encode("mail " * 100)[1:]
BOMB = JSONCodec[JSON](compress_above=0, max_size=2**26).encode("0" * (2**26 - 2))[1:]
GOOD = [JSONCodec[Any]().encode(value) for value in (1, "text", {"a": [None, 1.5]}, "long " * 500)]
BODIES = (
    *GOOD, ZSTD + FRAME[:-3], ZSTD + FRAME + b"more", ZSTD + FRAME * 2, ZSTD + BOMB, ZSTD, b"", b"\x01", b"\x03{}",
    b"\x01" + b"[" * 100_000, b"\x01" + b"9" * 5000, b"\x01nan", b"\x01\xff",
    ZSTD + FRAME[:5] + b"\xff" * 9 + FRAME[14:],
)  # fmt: skip
place = st.integers(0, 40)
octets = st.binary(min_size=1, max_size=8)
Change = tuple[str, int, bytes]
changes = st.tuples(
    st.sampled_from(("flip", "cut", "append", "insert", "swap", "version", "length", "timestamp", "body", "double")),
    place,
    octets,
)


def changed(entry: bytes, change: Change) -> bytes:
    """An entry with one fault more."""
    kind, at, given = change
    match kind:
        case "flip":
            at %= max(1, len(entry))
            return entry[:at] + bytes(a ^ b for a, b in zip(entry[at:], given, strict=False)) + entry[at + len(given) :]
        case "cut":
            return entry[: len(entry) * at // 40]
        case "append":
            return entry + given
        case "insert":
            return entry[:at] + given + entry[at:]
        case "swap":
            return entry[at:] + entry[:at]
        case "version":
            return given[:1] + entry[1:]
        case "length":
            return entry[:9] + (given * 2)[:2] + entry[11:]
        case "timestamp":
            return entry[:1] + (given * 8)[:8] + entry[9:]
        case "body":
            return pack(given, at, BODIES[at % len(BODIES)])
        case _:
            return entry * 2


# an entry that was sound once: its id, what is its value, and what was done to it
mutated = st.tuples(st.integers(0, 9), st.integers(0, len(GOOD) - 1), st.lists(changes, min_size=1, max_size=3))
Mutated = tuple[int, int, list[Change]]


def entry_of(drawn: Mutated) -> bytes:
    number, value, some = drawn
    entry = pack(b"m%d" % number, 1_700_000_000_000_000 + number, GOOD[value])
    for change in some:
        entry = changed(entry, change)
    return entry


Moment = Literal["waiting", "retry wait", "under delivery"]


def patient(key: str) -> Policy:
    """Nothing but a canary is due before it is flushed."""
    return Policy(initial_delay=0 if key.startswith("canary") else 1000, minimum_delay=0, increment_delay=0)


async def plant(fuzz: Fuzzed, key: str, when: Moment, entries: Sequence[bytes]) -> None:
    """Put entries beside sound ones: into the log, or into the log under delivery, before that or during it."""
    log = f"{fuzz.tag}log:{key}"

    async def on_digest(digest: Digest[JSON]) -> None:
        if when == "retry wait" and digest.attempt == 1:
            raise Odd("not now")
        if when == "under delivery" and digest.attempt == 1 and digest.iteration == 1 and not planted:
            planted.append(True)
            fuzz.client.rpush(f"{fuzz.tag}open:{key}", *entries)

    planted: list[bool] = []
    fuzz.on_digest = on_digest
    for number in range(3):
        await fuzz.engine.add(key, SECRET, record_id=f"sound {number}")
    if when == "under delivery":
        await fuzz.engine.flush(key)
        return
    if when == "retry wait":
        await fuzz.engine.flush(key)
        await fuzz.until(lambda: fuzz.states(key) == ["waiting"] and fuzz.client.exists(log) == 0)
        log = f"{fuzz.tag}open:{key}"
    middle = len(entries) // 2
    for entry in reversed(entries[:middle]):
        fuzz.client.lpush(log, entry)
    fuzz.client.rpush(log, *entries[middle:])
    await fuzz.engine.flush(key)


def buried(fuzz: Fuzzed) -> list[bytes]:
    """What the dead letters hold, raw."""
    found: list[bytes] = []
    for letter in fuzz.client.zrange(f"{fuzz.tag}dead", 0, -1):
        assert fuzz.client.hget(f"{fuzz.tag}letter:{letter.decode()}", "reason")
        found += fuzz.client.lrange(f"{fuzz.tag}remains:{letter.decode()}", 0, -1)
    return found


@every
@given(
    drawn=st.lists(mutated, min_size=20, max_size=80), when=st.sampled_from(("waiting", "retry wait", "under delivery"))
)
async def test_whatever_stands_in_a_log_sound_records_are_delivered_and_the_others_set_aside_raw(
    server: Server, drawn: list[Mutated], when: Moment
) -> None:
    entries = [entry_of(each) for each in drawn]
    tried["entries"] += len(entries)
    waiting = RetryPolicy(max_attempts=3, backoff=lambda n: 1000.0)
    async with fuzzed(server, policy=patient, retry=waiting) as fuzz:
        await plant(fuzz, "k", when, entries)
        await fuzz.until(lambda: fuzz.is_empty("k"))
        delivered = [digest for digest in fuzz.digests if digest.key == "k"]
        came = Counter(record.id for digest in delivered for record in digest.records)
        assert {f"sound {number}" for number in range(3)} <= set(came)
        aside = buried(fuzz)
        for entry in latest(entries):
            assert (entry in aside) != (identity(entry).decode(errors="replace") in came)
        async for letter in fuzz.engine.dead_letters():
            assert letter.reason


FIELDS = (
    "end", "own", "id", "token", "done", "attempts", "iteration", "last", "cool", "dropped", "open_dropped", "part",
    "cut", "frozen", "parted", "since", "error", "flush",
)  # fmt: skip
GARBAGE = (
    "", "x", "nan", "inf", "-inf", "-1", "0", "1.5", "1e300", "0x10", "9" * 15, "9" * 400, "1 2 3 4", "0 0 0 0",
    "9 " * 4, f"1 1 1 {'9' * 40}", "\0",
)  # fmt: skip
PARTS = ("meta", "log", "open")
SCORES = ("-inf", "inf", "-1e300", "1e300", "0", "-1", "1.5", "9007199254740993")
garbling = weighted(
    (3, st.tuples(st.just("field"), st.sampled_from(FIELDS), st.sampled_from(GARBAGE))),
    (1, st.tuples(st.just("no field"), st.sampled_from(FIELDS), st.just(""))),
    (1, st.tuples(st.just("type"), st.sampled_from(PARTS), st.sampled_from(("set", "rpush", "hset")))),
    (1, st.tuples(st.just("gone"), st.sampled_from(PARTS), st.just(""))),
    (1, st.tuples(st.just("score"), st.sampled_from(("waiting", "ready", "leased")), st.sampled_from(SCORES))),
)
Garbling = tuple[str, str, str]


def garble(fuzz: Fuzzed, key: str, done: Garbling) -> None:
    """What another program might do to a timeline."""
    kind, name, value = done
    client, meta, part = fuzz.client, f"{fuzz.tag}meta:{key}", f"{fuzz.tag}{name}:{key}"
    with suppress(redis.ResponseError):  # it has done something else to that key before
        match kind:
            case "field":
                client.hset(meta, name, value)
            case "no field":
                client.hdel(meta, name)
            case "gone":
                client.delete(part)
            case "score":
                client.zadd(f"{fuzz.tag}{name}", {key: value})
            case _:
                client.delete(part)
                client.execute_command(value, part, *(("a", "b") if value == "hset" else ("a",)))


@every
@given(
    failed=st.booleans(),
    done=st.lists(garbling, min_size=1, max_size=4),
    asked=st.lists(
        st.one_of(
            call("add", key=st.just("k"), value=st.just(1)),
            call("flush", key=st.just("k")),
            call("remove", key=st.just("k"), record_id=st.just("1")),
            call("reschedule", key=st.just("k"), delay=st.sampled_from((None, 0.0, 10.0))),
            call("peek", key=st.just("k")),
            call("timelines"),
            call("stats"),
        ),
        max_size=6,
    ),
)
async def test_whatever_becomes_of_one_timeline_the_others_go_on_and_it_can_be_deleted(
    server: Server, failed: bool, done: list[Garbling], asked: list[Call]
) -> None:
    waiting = RetryPolicy(max_attempts=3, backoff=lambda n: 1000.0)
    async with fuzzed(server, sound=False, policy=patient, retry=waiting) as fuzz:
        fuzz.replies = iter([("raise", 0)] if failed else [])
        await fuzz.engine.add("k", SECRET, record_id="1")
        if failed:
            await fuzz.engine.flush("k")
            await fuzz.until(lambda: fuzz.states("k") == ["waiting"] and bool(fuzz.digests))
        for each in done:
            garble(fuzz, "k", each)
        for name, arguments in asked:
            tried["calls on a garbled timeline"] += 1
            try:
                assert fits(name, await ask(fuzz, name, arguments))
            except AiodigestError as error:
                check(error)
            if name == "flush":
                await fuzz.canary()
        await fuzz.canary()
        await fuzz.engine.delete("k")
        assert fuzz.is_empty("k")
        assert await fuzz.engine.peek("k") is None


@every
@given(
    done=st.lists(
        st.tuples(
            st.sampled_from(("key", "reason", "buried", "attempt", "digest", "remains", "letter", "score")),
            st.sampled_from((*GARBAGE, *SCORES)),
        ),
        min_size=1,
        max_size=3,
    ),
    asked=st.lists(st.sampled_from(("dead_letter", "replay", "dead_letters", "stats")), max_size=4),
)
async def test_whatever_becomes_of_a_dead_letter_it_is_told_with_a_typed_error_and_can_be_discarded(
    server: Server, done: list[tuple[str, str]], asked: list[str]
) -> None:
    async with fuzzed(server, sound=False, policy=patient) as fuzz:
        fuzz.replies = iter([("reject", "no")])
        await fuzz.engine.add("k", SECRET)
        await fuzz.engine.flush("k")
        await fuzz.until(lambda: fuzz.client.exists(f"{fuzz.tag}dead") == 1)
        [letter] = (raw.decode() for raw in fuzz.client.zrange(f"{fuzz.tag}dead", 0, -1))
        for what, value in done:
            with suppress(redis.ResponseError):
                if what == "score":
                    fuzz.client.zadd(f"{fuzz.tag}dead", {letter: value})
                elif what in ("letter", "remains"):
                    fuzz.client.set(f"{fuzz.tag}{what}:{letter}", value)
                elif value:
                    fuzz.client.hset(f"{fuzz.tag}letter:{letter}", what, value)
                else:
                    fuzz.client.hdel(f"{fuzz.tag}letter:{letter}", what)
        for name in asked:
            tried["calls on a garbled letter"] += 1
            try:
                assert fits(
                    name, await ask(fuzz, name, {} if name in ("dead_letters", "stats") else {"letter_id": letter})
                )
            except AiodigestError as error:
                check(error)
        await fuzz.engine.discard(letter)
        assert fuzz.client.exists(f"{fuzz.tag}letter:{letter}", f"{fuzz.tag}remains:{letter}") == 0
        assert fuzz.client.zscore(f"{fuzz.tag}dead", letter) is None
