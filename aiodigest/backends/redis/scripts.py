"""The scripts in ``aiodigest/backends/redis/lua``, their arguments, and the way to read their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from pkgutil import get_data
from typing import Literal, TypeAlias, cast

from aiodigest.backend import Add, Bookmark, Close, Closed, Lease, Retry, StoredTimeline
from aiodigest.errors import BackendUnavailable
from aiodigest.models import State
from aiodigest.policy import Limits, Terms

Argument: TypeAlias = bytes | str | int

SHARED: Mapping[str, Sequence[str]] = {
    "layout": (),
    "drain": (),
    "reshard": (),
    "permits": (),
    "add": ("prelude", "window"),
    "replay": ("prelude", "window"),
    "reschedule": ("prelude", "window"),
    "look": ("prelude", "page"),
    "letters": ("prelude", "page"),
    "claim": ("prelude", "lease"),
    "open": ("prelude", "lease"),
    "close": ("prelude", "items"),
    "retry": ("prelude", "items"),
    "letter": ("prelude", "entries"),
    "read": ("prelude", "entries"),
}
# what begins a namespace; the others find an empty one where there is none
CREATES = {"add", "claim", "renew", "keep", "carry"}
# waited for by `wait_replicas`: what must not be forgotten once it was answered
REPLICATED = {"add", "keep", "carry", "retire"}
# What each script may call: if the user may not, it is not begun. A refusal that is met half-way leaves it half done.
SCHEDULES = "ZADD ZCARD ZRANGE ZREM"
SAVES = "HDEL HSET PEXPIRE"
MEETS = "HGETALL LLEN LRANGE"
OPENS = f"{MEETS} {SAVES} HINCRBY HMGET PERSIST RENAME RPUSH UNLINK ZADD ZREM"
COMMANDS: Mapping[str, frozenset[str]] = {
    name: frozenset(commands.split()) | {"HGET", "TIME"}
    for name, commands in {
        "add": f"{SCHEDULES} {SAVES} HINCRBY HMGET LRANGE LTRIM RPUSH UNLINK XADD ZSCORE",
        "claim": f"{OPENS} XREVRANGE ZCARD ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK",
        "open": f"{OPENS} ZSCORE",
        "renew": f"{SCHEDULES} HGETALL HMGET HSET PERSIST",
        "close": f"{SCHEDULES} {SAVES} {MEETS} HINCRBY LTRIM PERSIST RPUSH UNLINK XADD",
        "retry": f"{SCHEDULES} {SAVES} {MEETS} HINCRBY LPUSH LTRIM PERSIST XADD",
        "release": f"{SCHEDULES} {SAVES} HGETALL PERSIST XADD",
        "schedule": "XADD ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK",
        "maintenance": "HMGET HSET XADD ZADD ZCARD ZRANGE ZRANGEBYSCORE ZREMRANGEBYRANK",
        "flush": f"{SCHEDULES} EXISTS HSET XADD ZSCORE",
        "delete": f"{SAVES} HGETALL UNLINK ZCARD ZRANGE ZREM",
        "remove": f"{SCHEDULES} {SAVES} {MEETS} HINCRBY RPUSH UNLINK XADD ZSCORE",
        "reschedule": f"{SCHEDULES} {SAVES} HGETALL XADD ZSCORE",
        "replay": f"{SCHEDULES} {SAVES} {MEETS} HMGET LPUSH RPUSH UNLINK XADD ZSCORE",
        "discard": "EXISTS UNLINK ZREM",
        "look": f"{MEETS} ZCOUNT ZRANGE ZSCORE",
        "read": MEETS,
        "counts": "ZCARD ZCOUNT ZRANGE",
        "letter": "HMGET LLEN LRANGE",
        "letters": "ZCOUNT ZRANGE",
        "layout": "HSET HSETNX",
        "reshard": "HDEL HMGET HSET",
        "drain": "HSET XADD",
        "keep": "EXISTS HSET LLEN PEXPIRE RPUSH ZADD",
        "carry": "HINCRBY HSET",
        "retire": "EXISTS HSET PEXPIRE UNLINK ZCARD ZCOUNT",
    }.items()
}
STATUSES: Mapping[bytes, Literal["closed", "part", "deleted", "lost"]] = {
    b"closed": "closed",
    b"part": "part",
    b"deleted": "deleted",
    b"lost": "lost",
}


@dataclass(frozen=True, slots=True)
class Script:
    """A script, with the helpers it needs in front of it."""

    source: str
    sha: str


@cache
def load_script(name: str) -> Script:
    """Return the script of a transition."""
    parts = (*SHARED.get(name, ("prelude",)), name)
    begins = f"local CREATES = {str(name in CREATES).lower()}"
    # importlib.resources would import more of itself at the first add, and another thread may fork meanwhile
    sources = [cast("bytes", get_data("aiodigest.backends.redis", f"lua/{part}.lua")).decode() for part in parts]
    source = "\n".join([begins, *sources])
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


@cache
def load_scripts() -> None:
    """Read all scripts, once a process: they then match its code, even if the package is replaced while it runs,
    and the first failure of a delivery needs no file that can be opened."""
    try:
        for name in (*COMMANDS, "permits"):
            load_script(name)
    except OSError as error:
        raise BackendUnavailable(f"the scripts of aiodigest cannot be read: {error}") from error


# What scripts are given


def pack_limits(limits: Limits) -> str:
    return f"{limits.capacity} {limits.max_size} {limits.max_age_ms} {limits.ttl_ms}"


def pack_delays(terms: Terms) -> str:
    return f"{terms.initial_ms} {terms.increment_ms} {terms.maximum_ms}"


def pack_adds(adds: Sequence[Add]) -> list[Argument]:
    numbers: dict[tuple[Terms, bool], int] = {}
    entries: list[Argument] = []
    terms, own, number = None, False, 0
    for add in adds:
        if add.terms is not terms or add.own is not own:  # most adds of a call have the same policy
            terms, own = add.terms, add.own
            number = numbers.setdefault((terms, own), len(numbers) + 1)
        entries += (add.key, number, add.entry)
    arguments: list[Argument] = [len(numbers)]
    for terms, own in numbers:
        arguments += (pack_delays(terms), pack_limits(terms.limits), int(own))
    return arguments + entries


def pack_bookmark(place: Bookmark | None) -> tuple[Argument, ...]:
    return place or ("", "", "")


def pack_names(leases: Sequence[Lease]) -> list[list[Argument]]:
    return [[lease.key, lease.token, lease.digest_id] for lease in leases]


def pack_close(close: Close) -> list[Argument]:
    lease = close.lease
    arguments: list[Argument] = [
        lease.key, lease.token, lease.digest_id, close.taken, close.delivered, close.aged, int(close.counts),
        close.cool_ms, close.lease_ms, close.limits.max_size, close.limits.ttl_ms, len(close.dead_letters),
    ]  # fmt: skip
    for letter in close.dead_letters:
        arguments += (_readable(letter.reason), *_pack_ids(letter.ids))
    return arguments


def pack_retry(retry: Retry) -> list[Argument]:
    lease = retry.lease
    return [
        lease.key, lease.token, lease.digest_id, retry.delay_ms, _readable(retry.error), retry.limits.ttl_ms,
        retry.taken, retry.delivered, retry.aged, int(retry.give_back), int(retry.unknown), *_pack_ids(retry.failed),
    ]  # fmt: skip


def _pack_ids(ids: Sequence[bytes] | None) -> tuple[Argument, ...]:
    return (-1,) if ids is None else (len(ids), *ids)


def _readable(message: str) -> bytes:
    return message.encode(errors="replace")  # the text of an exception may hold anything, half a character too


# What they answer

# A set is of types, a list of one holds any number of such, one of several just these, and a tuple is of alternatives.
Shape: TypeAlias = "frozenset[type] | list[Shape] | tuple[Shape, ...]"
WHOLE = frozenset[type]({int})
TEXT = frozenset[type]({bytes})
NUMBER = WHOLE | TEXT  # or the text of an error
NOTHING = frozenset[type]({type(None)})
MANY = frozenset[type]({list})  # checking their contents would take longer than it is worth
LEASE: Shape = [TEXT, TEXT, TEXT, *[NUMBER] * 7, TEXT, [TEXT]]
# of scripts, and of commands that are sent beside them
SHAPES: Mapping[str, Shape] = {
    "add": [NUMBER],
    "claim": [WHOLE, WHOLE, TEXT, [MANY], [TEXT], [NUMBER]],
    "open": (NOTHING, TEXT, LEASE),
    "read": (TEXT, [TEXT]),
    "renew": [NUMBER],
    "close": [MANY | TEXT],
    "retry": [NUMBER],
    "release": [NUMBER],
    "schedule": [TEXT],
    "maintenance": [TEXT],
    "flush": NUMBER,
    "delete": NUMBER,
    "remove": NUMBER,
    "reschedule": (TEXT, [NUMBER]),
    "replay": (TEXT, [NUMBER]),
    "discard": WHOLE,
    "look": [[MANY], MANY],
    "counts": [NUMBER],
    "letter": (NOTHING, [TEXT, TEXT, NUMBER, NUMBER, TEXT, NUMBER, [TEXT]]),
    "letters": [[TEXT], MANY],
    "layout": [WHOLE, TEXT],
    "reshard": WHOLE,
    "drain": [WHOLE, TEXT],
    "keep": WHOLE,
    "carry": WHOLE,
    "retire": (NOTHING, WHOLE, [NUMBER]),
    "permits": [TEXT],
    "INFO": TEXT,
    "HMGET": [TEXT | NOTHING],
    "SCAN": [TEXT, [TEXT]],
    "UNLINK": WHOLE,
    "XREAD": (NOTHING, [[TEXT, [[TEXT, [TEXT]]]]]),
}


def fits(reply: object, shape: Shape) -> bool:
    """True if the answer is a possible one; otherwise the connection carries answers to other questions."""
    if isinstance(shape, frozenset):
        return type(reply) in shape
    if isinstance(shape, tuple):
        return any(fits(reply, each) for each in shape)
    if not isinstance(reply, list):
        return False
    items = cast("list[object]", reply)
    if len(shape) > 1:
        return len(items) == len(shape) and all(map(fits, items, shape))
    if isinstance(shape[0], frozenset):  # at once, since there may be many
        return shape[0].issuperset(map(type, items))
    return all(fits(item, shape[0]) for item in items)


def text(value: object) -> str:
    """Decode a name or a message. Text from another program may not be UTF-8, and is shown as well as possible."""
    return cast("bytes", value).decode(errors="replace")


def number(value: object) -> int:
    return value if type(value) is int else int(cast("bytes", value))


def unpack_lease(fields: Sequence[object]) -> Lease:
    key, token, digest_id, attempt, iteration, dropped, due, size, part, cut, error, entries = fields
    return Lease(
        text(key), text(token), text(digest_id), number(attempt), number(iteration), number(dropped), number(due),
        number(size), number(part), number(cut), text(error), tuple(cast("list[bytes]", entries)),
    )  # fmt: skip


def unpack_closed(fields: object) -> Closed:
    status, digest_id, left = cast("tuple[bytes, bytes, int]", fields)
    return Closed(STATUSES[status], text(digest_id), left)


def unpack_bookmark(fields: Sequence[bytes]) -> Bookmark | None:
    return Bookmark(*fields) if fields else None


def unpack_timeline(fields: Sequence[object]) -> StoredTimeline:
    key, state, due, logged, opened, attempt, iteration, dropped, cool, digest_id, error = fields
    return StoredTimeline(
        text(key), cast("State", text(state)), number(due), number(logged), number(opened), number(attempt),
        number(iteration), number(dropped), number(cool), text(digest_id), text(error),
    )  # fmt: skip
