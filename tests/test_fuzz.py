"""Bad input, made by hypothesis: what callers give, and what another program left in Redis.

``AIODIGEST_TEST_EXAMPLES`` says how many examples each test plays; each prints how much it has tried.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from itertools import chain, count, product
from logging.handlers import BufferingHandler
from operator import attrgetter
from typing import Any, cast

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Server
from storestate import check_invariants, redis_state

from aiodigest import JSON, Bounds, DigestEngine, JSONCodec, PartialAdd, PartialFailure, Reject, RetryAfter, Sync
from aiodigest.backoff import BackoffMode, DecorrelatedJitter, IntervalBackoff, IterationBackoff
from aiodigest.errors import AiodigestError, CodecError, ConfigurationError, InvalidArgument, LimitExceeded
from aiodigest.models import DeadLetter, Digest, Draining, Entry, Explanation, Finding, Health, Stats, Timeline
from aiodigest.policy import Policy, RetryPolicy
from aiodigest.records.entries import id_of, identity, latest, pack, places

EXAMPLES = int(os.environ.get("AIODIGEST_TEST_EXAMPLES", "25"))
DEADLINE = 20  # seconds, for what takes milliseconds
MESSAGE = 2_000  # characters that no message of an error reaches
UNPOLICED = "d}:{\0"  # a key whose policy function raises
SECRET = "somebody's mail"  # stands in every value, and must stand in no message

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
    "object": object, "class": lambda: int, "function": lambda: len, "model": lambda: Policy, "module": lambda: logging,
    "returns none": lambda: _nothing, "raises": lambda: _raise,
    "huge int": lambda: 10**5000, "huge negative int": lambda: -(10**5000), "large int": lambda: 10**400,
    "64 bits": lambda: 2**64, "63 bits": lambda: -(2**63),
    "1 MB": lambda: SECRET * 80_000, "1 MB of bytes": lambda: b"x" * 1_100_000, "many of &": lambda: "?" * 100_000,
    "surrogate": lambda: SECRET + "\ud800", "key of a surrogate": lambda: {"\ud800": SECRET},
    "key of an int": lambda: {1: SECRET}, "set": lambda: {SECRET},
    "nan inside": lambda: {"a": [SECRET, float("nan")]}, "bytes inside": lambda: [SECRET, b"\xff"],
    "deep": lambda: nested(150), "deeper": lambda: nested(250), "deepest": lambda: nested(50_000), "endless": endless,
    "generator": lambda: (entry for entry in [Entry("a", 1), SECRET, Entry("b", SECRET)]),
    "breaking generator": breaking,
    "first": lambda: datetime.min.replace(tzinfo=timezone(timedelta(hours=23))),
    "last": lambda: datetime.max.replace(tzinfo=timezone(timedelta(hours=-23))),
    "naive": lambda: datetime(2020, 1, 1), "now": lambda: datetime.now(UTC),
    "longest": lambda: timedelta.max, "shortest": lambda: timedelta.min,
}  # fmt: skip


def _nothing(*_: object) -> None: ...


def _raise(*_: object) -> Any:
    raise Odd("asked")


@dataclass(frozen=True)
class Named:
    """An odd thing by its name, so that hypothesis can show it."""

    name: str


def real(value: Any) -> Any:
    """What a drawn argument stands for."""
    if isinstance(value, Named):
        return ODD[value.name]()
    if isinstance(value, Entry):
        return Entry(*map(real, attrgetter("key", "value", "record_id", "timestamp")(value)))
    return [real(one) for one in cast("list[Any]", value)] if isinstance(value, list) else value


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
entries = st.builds(Entry[Any], keys, values, ids, times)
letters = weighted((3, st.sampled_from(("letter 0", "letter 1"))), (1, odd))
several = weighted((4, st.lists(weighted((9, entries), (1, odd)), max_size=5)), (1, odd))
states = weighted((2, st.sampled_from(("waiting", "ready", "leased", "muted"))), (1, odd))
add, add_many = {"key": keys, "value": values, "record_id": ids, "timestamp": times}, {"entries": several}
often = st.one_of(
    call("flush", key=keys),
    call("mute", key=keys, until=st.one_of(times, delays), drop=weighted((3, st.booleans()), (1, odd))),
    call("unmute", key=keys),
    call("delete", key=keys),
    call("remove", key=keys, record_id=ids),
    call("reschedule", key=keys, at=times, delay=delays),
    call("peek", key=keys),
    call("explain", key=keys),
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
RAISED: dict[str, Callable[[Digest[JSON], Any], BaseException]] = {
    "raise": lambda digest, value: value if isinstance(value, BaseException) else Odd("not now"),
    "reject": lambda digest, value: Reject(value),
    "later": lambda digest, value: RetryAfter(value),
    "partly": lambda digest, value: PartialFailure(value),
    "some": lambda digest, value: PartialFailure({digest.records[0].id: value}),
    "part of all": lambda digest, value: PartialFailure({record.id: value for record in digest.records}),
}
replies = st.one_of(st.just(("return", None)), st.tuples(st.sampled_from(("return", "returns", *RAISED)), odd))


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
        engine.observe(lambda delivery: self.changed.set())

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
        if kind in RAISED:
            raise RAISED[kind](digest, value)
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
        return not self.client.exists(f"{self.tag}log:{key}", f"{self.tag}open:{key}") and not self.states(key)

    def states(self, key: str) -> list[str]:
        names = ("waiting", "ready", "leased")
        return [name for name in names if self.client.zscore(f"{self.tag}{name}", key) is not None]


def policy_of(key: str) -> Any:
    now: dict[str, Any] = {"minimum_delay": 0, "increment_delay": 0}
    if key == UNPOLICED:
        raise Odd("no policy")
    if key.startswith("canary"):
        return Policy()
    policies = {
        "a": Policy(**now),
        "b": Policy(**now, capacity=3, max_size=2, max_age=1e6),
        "c": Policy(initial_delay=100, minimum_delay=lambda n: object()),  # pyright: ignore[reportArgumentType]
    }
    return policies.get(key) or (Policy(initial_delay=1000) if len(key) % 2 else object())


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
    watch, logger = BufferingHandler(10**6), logging.getLogger("aiodigest")
    logger.propagate = False
    logger.addHandler(watch)
    try:
        with server.client() as client:
            fuzz = Fuzzed(engine, client, namespace)
            async with engine.delivering(fuzz.callback):
                yield fuzz
                await fuzz.canary()
            left = keys_of(client, namespace)
            for tag in {key.partition(b"}")[0][1:] for key in left if sound and not fuzz.erased}:
                if client.hget(b"{%b}:layout" % tag, "version") == b"retired":
                    names = [key.partition(b"}:")[2] for key in left if key.startswith(b"{%b}" % tag)]
                    # drained, with cool-downs and marks left
                    assert {name.partition(b":")[0] for name in names} <= {b"layout", b"meta", b"moved", b"wake"}
                else:
                    check_invariants(redis_state(client, tag.decode()))
            client.delete(*left)  # or a long run would fill the server
    finally:
        logger.removeHandler(watch)
        logger.propagate = True
    assert not [line.getMessage() for line in watch.buffer if "a fault of aiodigest" in line.getMessage()]
    assert not unseen, unseen


def keys_of(client: Any, namespace: str) -> list[bytes]:
    """All that a namespace has in Redis, with whatever number of shards."""
    found = client.scan_iter(match=f"{{{namespace}*", count=10_000)
    return [key for key in found if key.startswith((b"{%b}:" % namespace.encode(), b"{%b:" % namespace.encode()))]


def check(error: BaseException, secret: bool = False) -> None:
    """A typed error whose message is short; ``secret``: the value alone was odd, and stands not in it."""
    assert isinstance(error, AiodigestError), repr(type(error))
    assert len(str(error)) < MESSAGE
    assert not secret or SECRET not in str(error)
    if isinstance(error, PartialAdd):
        for result in error.results:
            assert isinstance(result, bool) or check(result) is None


def arguments_of(fuzz: Fuzzed, drawn: dict[str, Any], known: Sequence[str]) -> dict[str, Any]:
    arguments = {name: real(value) for name, value in drawn.items()}
    letter = arguments.get("letter_id")
    if isinstance(letter, str) and letter.startswith("letter ") and known:
        arguments["letter_id"] = known[int(letter[-1:]) % len(known)]
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
    **dict.fromkeys(("add", "sync.add", "flush", "unmute", "delete", "remove", "replay", "discard"), of(bool)),
    **dict.fromkeys(("add_many", "sync.add_many"), each_of(bool)),
    "reschedule": lambda answer: isinstance(answer, datetime) and answer.utcoffset() is not None,
    "mute": lambda answer: answer is None,
    "peek": of(Timeline | None),
    "explain": of(Explanation),
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


async def ask_well(fuzz: Fuzzed, name: str, arguments: dict[str, Any]) -> None:
    """Ask, and see that the answer is one, or a typed error."""
    tried["calls"] += 1
    try:
        answer = await ask(fuzz, name, arguments)
    except AiodigestError as error:
        check(error)
    else:
        assert ANSWERS[name](answer)


def test_everything_that_an_engine_can_be_asked_is_drawn() -> None:
    asked = {name for name in dir(DigestEngine) if not name.startswith("_") and callable(getattr(DigestEngine, name))}
    asked |= {f"sync.{name}" for name in dir(Sync) if not name.startswith("_")}
    asked -= {"trace", "replace_backend"}  # for integrations and tools, which make no mistakes with types
    assert called == asked


@every
@given(asked=st.lists(calls, min_size=5, max_size=40), replied=st.lists(replies, max_size=10))
async def test_whatever_is_asked_is_answered(server: Server, asked: list[Call], replied: list[tuple[str, Any]]) -> None:
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
                quoted = [drawn.get(one) for one in ("key", "record_id", "timestamp")]  # what it may quote of an add
                odd_ones = any(isinstance(one, Named) or SECRET in repr(one) for one in quoted)
                check(error, secret=name in ("add", "sync.add") and not odd_ones)
            else:
                assert name in ANSWERS
                assert ANSWERS[name](answer)
                fuzz.erased |= name == "erase"


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
    (3, made(
        "engine", url=urls, namespace=st.one_of(text, odd), value_type=odd, codec=odd, policy=odd, retry=odd,
        backoff_mode=odd, bounds=odd, shards=wholes, concurrency=wholes, lease_timeout=delays,
        delivery_timeout=delays, drain_timeout=delays, timeout=delays, wait_replicas=wholes,
    )),
    (3, made(
        "policy", initial_delay=delays, minimum_delay=waits, increment_delay=delays, maximum_delay=delays,
        max_size=wholes, capacity=wholes, max_age=delays, ttl=delays,
    )),
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
def test_an_engine_and_its_parts_are_made_of_anything_or_refused_with_a_typed_error(drawn: list[Made]) -> None:
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
        except Odd:  # of the iterable, or of what is asked whether it is true: the caller's own
            assert what in ("partial", "later")


ZSTD = b"\x02"
FRAME = JSONCodec[JSON](compress_above=0).encode("mail " * 100)[1:]
BOMB = JSONCodec[JSON](compress_above=0, max_size=2**26).encode("0" * (2**26 - 2))[1:]
GOOD = [JSONCodec[Any]().encode(value) for value in (1, "text", {"a": [None, 1.5]}, "long " * 500)]
BODIES = (
    *GOOD, ZSTD + FRAME[:-3], ZSTD + FRAME + b"more", ZSTD + FRAME * 2, ZSTD + BOMB, ZSTD, b"", b"\x01", b"\x03{}",
    b"\x01" + b"[" * 100_000, b"\x01" + b"9" * 5000, b"\x01nan", b"\x01\xff",
    ZSTD + FRAME[:5] + b"\xff" * 9 + FRAME[14:],
)  # fmt: skip
FAULTS: dict[str, Callable[[bytes, int, bytes], bytes]] = {  # one more in an entry
    "flip": lambda entry, at, given: bytes(
        octet ^ (given[index - at] if at <= index < at + len(given) else 0) for index, octet in enumerate(entry)
    ),
    "cut": lambda entry, at, given: entry[: len(entry) * at // 40],
    "append": lambda entry, at, given: entry + given,
    "insert": lambda entry, at, given: entry[:at] + given + entry[at:],
    "swap": lambda entry, at, given: entry[at:] + entry[:at],
    "version": lambda entry, at, given: given[:1] + entry[1:],
    "length": lambda entry, at, given: entry[:9] + (given * 2)[:2] + entry[11:],
    "timestamp": lambda entry, at, given: entry[:1] + (given * 8)[:8] + entry[9:],
    "body": lambda entry, at, given: pack(given, at, BODIES[at % len(BODIES)]),
    "double": lambda entry, at, given: entry * 2,
}
changes = st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, 40), st.binary(min_size=1, max_size=8))


def damaged(number: int, value: bytes, damage: list[tuple[str, int, bytes]]) -> bytes:
    """An entry that was sound once."""
    entry = pack(b"m%d" % number, 1_700_000_000_000_000 + number, value)
    for kind, at, octets in damage:
        entry = FAULTS[kind](entry, at, octets)
    return entry


mutated = st.builds(damaged, st.integers(0, 9), st.sampled_from(GOOD), st.lists(changes, min_size=1, max_size=3))


def patient(key: str) -> Policy:
    """Nothing but a canary is due before it is flushed."""
    return Policy(initial_delay=0 if key.startswith("canary") else 1000, minimum_delay=0, increment_delay=0)


async def plant(fuzz: Fuzzed, key: str, when: str, entries: Sequence[bytes]) -> None:
    """Put entries beside sound ones: into the log, or into the log under delivery, before that or during it."""
    log = f"{fuzz.tag}log:{key}"

    async def on_digest(digest: Digest[JSON]) -> None:
        is_first = [each.key for each in fuzz.digests].count(key) == 1
        if is_first and when == "retry wait":
            raise Odd("not now")
        if is_first and when == "under delivery":
            fuzz.client.rpush(f"{fuzz.tag}open:{key}", *entries)

    fuzz.on_digest = on_digest
    for number in range(3):
        await fuzz.engine.add(key, SECRET, record_id=f"sound {number}")
    if when != "waiting":
        await fuzz.engine.flush(key)
    if when == "under delivery":
        return
    if when == "retry wait":
        await fuzz.until(lambda: fuzz.states(key) == ["waiting"] and fuzz.client.exists(log) == 0)
        log = f"{fuzz.tag}open:{key}"
    middle = len(entries) // 2
    for entry in reversed(entries[:middle]):
        fuzz.client.lpush(log, entry)
    fuzz.client.rpush(log, *entries[middle:])
    await fuzz.engine.flush(key)


@every
@given(
    entries=st.lists(mutated, min_size=20, max_size=80),
    when=st.sampled_from(("waiting", "retry wait", "under delivery")),
)
async def test_whatever_stands_in_a_log_sound_records_come(server: Server, entries: list[bytes], when: str) -> None:
    tried["entries"] += len(entries)
    waiting = RetryPolicy(max_attempts=3, backoff=lambda n: 1000.0)
    async with fuzzed(server, policy=patient, retry=waiting) as fuzz:
        await plant(fuzz, "k", when, entries)
        await fuzz.until(lambda: fuzz.is_empty("k"))
        delivered = [digest for digest in fuzz.digests if digest.key == "k"]
        came = Counter(record.id for digest in delivered for record in digest.records)
        assert {f"sound {number}" for number in range(3)} <= set(came)
        letters = [letter.decode() for letter in fuzz.client.zrange(f"{fuzz.tag}dead", 0, -1)]
        aside = [raw for letter in letters for raw in fuzz.client.lrange(f"{fuzz.tag}remains:{letter}", 0, -1)]
        for entry in latest(entries):
            is_known = places(entry) is not None and id_of(identity(entry), "replace") in came
            assert (entry in aside) != is_known
        async for letter in fuzz.engine.dead_letters():
            assert letter.reason


FIELDS = (
    "end", "own", "id", "token", "done", "attempts", "iteration", "last", "cool", "dropped", "open_dropped", "part",
    "cut", "frozen", "parted", "since", "error", "flush",
    "due",
)  # fmt: skip
GARBAGE = (
    "", "x", "nan", "inf", "-inf", "-1", "0", "1.5", "1e300", "0x10", "9" * 15, "9" * 400, "1 2 3 4", "0 0 0 0",
    "9 " * 4, f"1 1 1 {'9' * 40}", "\0",
)  # fmt: skip
SCORES = ("-inf", "inf", "-1e300", "1e300", "0", "-1", "1.5", "9007199254740993")
PARTS = ("meta:*", "log:*", "open:*")
TYPES = (("SET", "a"), ("RPUSH", "a"), ("HSET", "a", "b"))


def each(*choices: Iterable[str]) -> st.SearchStrategy[Garbling]:
    """Every command of these words, in which * is a name."""
    return st.sampled_from([(command,) for command in product(*choices)])


Garbling = tuple[tuple[str, ...], ...]
garbling = weighted(
    (3, each(["HSET"], ["meta:*"], FIELDS, GARBAGE)),
    (1, each(["HDEL"], ["meta:*"], FIELDS)),
    (1, each(["DEL"], PARTS)),
    (1, each(["ZADD"], ["waiting", "ready", "leased"], SCORES, ["*"])),
    (1, st.sampled_from([(("DEL", part), (kind, part, *words)) for part in PARTS for kind, *words in TYPES])),
)
LETTER = ("key", "reason", "buried", "attempt", "digest")
letter_garbling = st.one_of(
    each(["HSET"], ["letter:*"], LETTER, (*GARBAGE, *SCORES)),
    each(["HDEL"], ["letter:*"], LETTER),
    each(["SET"], ["letter:*", "remains:*"], GARBAGE),
    each(["ZADD"], ["dead"], (*GARBAGE, *SCORES), ["*"]),
)


def garble(fuzz: Fuzzed, name: str, done: Sequence[Garbling]) -> None:
    """Do to a timeline or to a dead letter what another program might."""
    for words in chain.from_iterable(done):
        command, key, *arguments = (word.replace("*", name) for word in words)
        with suppress(redis.ResponseError):  # another may have done something else to that key before
            fuzz.client.execute_command(command, fuzz.tag + key, *arguments)


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
async def test_a_garbled_timeline_may_go(server: Server, failed: bool, done: list[Garbling], asked: list[Call]) -> None:
    waiting = RetryPolicy(max_attempts=3, backoff=lambda n: 1000.0)
    async with fuzzed(server, sound=False, policy=patient, retry=waiting) as fuzz:
        fuzz.replies = iter([("raise", 0)] if failed else [])
        await fuzz.engine.add("k", SECRET, record_id="1")
        if failed:
            await fuzz.engine.flush("k")
            await fuzz.until(lambda: fuzz.states("k") == ["waiting"] and bool(fuzz.digests))
        garble(fuzz, "k", done)
        for name, arguments in asked:
            await ask_well(fuzz, name, arguments)
            if name == "flush":
                await fuzz.canary()
        await fuzz.canary()
        await fuzz.engine.delete("k")
        assert fuzz.is_empty("k")
        assert await fuzz.engine.peek("k") is None


@every
@given(
    done=st.lists(letter_garbling, min_size=1, max_size=3),
    asked=st.lists(st.sampled_from(("dead_letter", "replay", "dead_letters", "stats")), max_size=4),
)
async def test_whatever_becomes_of_a_letter_it_may_go(server: Server, done: list[Garbling], asked: list[str]) -> None:
    async with fuzzed(server, sound=False, policy=patient) as fuzz:
        fuzz.replies = iter([("reject", "no")])
        await fuzz.engine.add("k", SECRET)
        await fuzz.engine.flush("k")
        await fuzz.until(lambda: fuzz.client.exists(f"{fuzz.tag}dead") == 1)
        [letter] = (raw.decode() for raw in fuzz.client.zrange(f"{fuzz.tag}dead", 0, -1))
        garble(fuzz, letter, done)
        for name in asked:
            await ask_well(fuzz, name, {} if name in ("dead_letters", "stats") else {"letter_id": letter})
        await fuzz.engine.discard(letter)
        assert fuzz.client.exists(f"{fuzz.tag}letter:{letter}", f"{fuzz.tag}remains:{letter}") == 0
        assert fuzz.client.zscore(f"{fuzz.tag}dead", letter) is None
