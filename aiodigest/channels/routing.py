"""Routes from timelines to the channels of their digests, and one record for the timelines of several receivers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import datetime
from inspect import signature
from typing import Any, TypeAlias, TypeVar, cast
from uuid import uuid4

from aiodigest import Digest, DigestEngine, Entry, InvalidArgument, Reject
from aiodigest.arguments import can_ask, require
from aiodigest.channels.common import Channel, Turn
from aiodigest.errors import shown

T = TypeVar("T")

Callback: TypeAlias = Callable[[Digest[Any]], Awaitable[object]]
Route: TypeAlias = Callback | tuple[Callable[..., Awaitable[object]], str]


def by_key(routes: Mapping[str, Route] | Callable[[str], Route | None]) -> Channel:
    """Return a channel that sends each digest to another one, chosen by its key.

    ``routes`` is a table from prefixes of keys to channels, of which the longest prefix counts (``""`` fits every key),
    or a function from a key to a channel, or None. In place of a channel may stand a pair of a channel and an address,
    which the channel gets as ``to``. Any async function of a digest serves as a channel. A digest for which there is
    none becomes a dead letter.

    The channels of a table are entered and left with this one, and so is any other async context manager in it. Each
    ``Channel`` that a function returns is entered at its first use: it must not make new ones each time. What else it
    returns, you enter yourself.

    Raises InvalidArgument if a prefix or a channel of a table is none, or the table is empty; a digest for which a
    function returns neither a channel nor a pair ends in the same error.
    """
    allowed = "a table from prefixes of keys (one at least) to channels, or a function"
    if callable(routes):
        require(can_ask(routes), "routes", allowed, routes)
        return _ByKey(routes, ())
    require(isinstance(routes, Mapping) and len(routes) > 0, "routes", allowed, routes)  # pyright: ignore[reportUnnecessaryIsInstance]
    table = dict(routes)
    for prefix, route in table.items():
        require(isinstance(prefix, str), "a prefix of routes", "text", prefix)  # pyright: ignore[reportUnnecessaryIsInstance]
        _parts(route)
    prefixes = sorted(table, key=len, reverse=True)

    def choose(key: str) -> Route | None:
        return next((table[prefix] for prefix in prefixes if key.startswith(prefix)), None)

    return _ByKey(choose, table.values())


class _ByKey(Channel):
    """Sends each digest to the channel that ``choose`` returns for its key; ``known`` are entered with it."""

    def __init__(self, choose: Callable[[str], Route | None], known: Iterable[Route]) -> None:
        self._choose = choose
        self._known = [_parts(route)[0] for route in known]
        self._entered_ids = set[int]()
        self._turns = defaultdict[int, Turn](Turn)  # in which they are entered
        self._stack = AsyncExitStack()

    async def __call__(self, digest: Digest[Any], /) -> None:
        route = self._choose(digest.key)
        if route is None:
            raise Reject(f"there is no route for {shown(digest.key)}")
        send, address = _parts(route)
        channel: object = send
        if isinstance(channel, Channel):  # others may have to be left in the task that entered them
            await self._enter(channel)
        await (send(digest) if address is None else send(digest, to=address))

    async def _enter(self, channel: AbstractAsyncContextManager[object]) -> None:
        if id(channel) in self._entered_ids:
            return
        async with self._turns[id(channel)].here():
            if id(channel) not in self._entered_ids:
                await self._stack.enter_async_context(channel)
                self._entered_ids.add(id(channel))

    async def _open(self) -> None:
        try:
            for channel in self._known:
                if isinstance(channel, AbstractAsyncContextManager):
                    await self._enter(cast("AbstractAsyncContextManager[object]", channel))
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        stack, self._stack = self._stack, AsyncExitStack()
        self._entered_ids.clear()
        self._turns.clear()
        await stack.aclose()


def _parts(route: Route) -> tuple[Callable[..., Awaitable[object]], str | None]:
    """Return a channel, and the address if there is one. Raises InvalidArgument."""
    pair = cast("tuple[Any, Any]", route if _is_pair(route) else (route, None))
    is_addressed = pair[1] is None or (isinstance(pair[1], str) and _takes_address(pair[0]))
    allowed = "a channel, or a pair of one that takes an address and the address"
    require(callable(pair[0]) and is_addressed, "what routes lead to", allowed, route)
    return pair


def _is_pair(route: object) -> bool:
    return isinstance(route, tuple) and len(cast("tuple[Any, ...]", route)) == 2


def _takes_address(send: Any) -> bool:
    """True if a channel can be called with ``to``, as far as that can be known."""
    try:
        signature(send).bind(None, to="")
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


async def fan_out(
    engine: DigestEngine[T],
    keys: Iterable[str],
    value: T,
    *,
    record_id: str | None = None,
    timestamp: datetime | float | None = None,
    urgent: bool = False,
) -> list[bool]:
    """Add one record to the timelines ``keys`` of ``engine``, one for each of several receivers, which are acknowledged
    for themselves.

    ``value`` is encoded once. ``record_id`` (one is made up for all of them if absent), ``timestamp`` and ``urgent``
    are those of ``DigestEngine.add``. Returns the answer of ``add`` for each key, in order, and raises what
    ``engine.add_many`` raises; if some fail, call it again for those alone, with the ``record_id`` that you gave.

    Raises InvalidArgument if ``keys`` is a single key, or nothing that yields keys.
    """
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"keys must be several, not {shown(keys)}: engine.add adds to a single one")
    name = uuid4().hex if record_id is None else record_id
    return await engine.add_many(Entry(key, value, name, timestamp, urgent) for key in keys)
