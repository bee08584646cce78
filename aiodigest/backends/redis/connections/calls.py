"""Calls to a server, or to that primary of a cluster which has a key; whether one that failed is sent again."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from math import inf
from random import sample
from typing import TypeVar, cast

from redis import exceptions
from redis.crc import key_slot

from aiodigest.backends.redis.connections.connection import Address, apart, show_address
from aiodigest.backends.redis.connections.errors import DEMOTED, code_of, refused
from aiodigest.backends.redis.connections.server import Failed, ServerConnections
from aiodigest.backends.redis.connections.url import URL
from aiodigest.backends.redis.layout import SLOTS
from aiodigest.backends.redis.scripts import Argument, load_script
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError

T = TypeVar("T")

OLDEST = (6, 2)
SHORTEST = 0.2  # seconds for a node's answer, however many there are to ask

_shared: dict[tuple[object, asyncio.AbstractEventLoop, float], Connections] = {}


@dataclass(eq=False)
class LayoutMismatch(Exception):
    """A script found a layout other than its caller's, and did nothing."""

    stored: str
    may_be_done: bool = False  # by an earlier try of the same call, which broke


class Moved(Exception):
    """A cluster node that was asked for itself did nothing, because the key's slot belongs to another node."""


class Connections:
    """Connections for one event loop to a server, or to the primaries of a cluster, and calls on them.

    A server tries a call once. Here, and nowhere else, it is decided whether one that failed was sent, and is sent
    again: on a new connection, if an old one broke and running it twice is harmless, or if it came too late by a clock
    that may have been known badly; and to the new primary of a slot that has moved. Its error is made here too. After a
    failure of a primary, the next call to it asks for the slots.
    """

    def __init__(self, url: URL, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self.users = 0  # backends that share these
        self._servers: dict[Address | None, ServerConnections] = {}  # None: the only one
        self._former: set[ServerConnections] = set()  # to former primaries, on which calls may still be under way
        self._slots: list[Address | None] = [None] * SLOTS if url.nodes else []
        self._halves: frozenset[int] = frozenset()  # slots whose keys another primary is taking over, one by one
        # the node asked last comes last; in random order at first, or every new process would ask the same one first
        self._known = sample(url.nodes, len(url.nodes))
        self._suspects: set[Address] = set()
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        self._closed = True
        for server in [*self._servers.values(), *self._former]:
            await server.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])  # the only wait here: a caller cancelled in it has closed all the same

    async def hang_up(self, key: str) -> None:
        """Close connections to a key's server that nobody is using: it is dead, or no longer a primary."""
        if (address := self.primary_of(key)) is not None:
            self._suspects.add(address)
        if address in self._servers:
            await self._servers[address].hang_up()

    # Calls

    async def run(
        self,
        name: str,
        key: str,
        arguments: Sequence[Argument],
        *,
        repeat: bool = False,
        replicas: int = 0,
        late: float = inf,
        at: ServerConnections | None = None,
    ) -> object:
        """Run a script on the server of a key, or ``at`` another, and wait until ``replicas`` replicas have its writes.

        ``repeat``: see ``Namespace.call``. It does nothing where it comes too late: when its caller has given it up, or
        at ``late``, if that is earlier.
        """
        script = load_script(name)
        command = "EVALSHA", script.sha, 1, key, *arguments
        may_be_done = False  # by a try that broke

        async def attempt(server: ServerConnections, until: float, fresh: bool) -> object:
            nonlocal may_be_done
            by = min(late, until) if script.timed else None
            try:
                return await server.attempt(name, command, until, fresh, script.source, replicas, by)
            except Failed as failed:
                may_be_done = may_be_done or failed.sent
                raise

        try:
            return await apart(self._exchange(key, attempt, repeat=repeat or script.repeatable, at=at))
        except BackendUnavailable as error:
            if may_be_done and error.stored == "no":  # which is true of the last try
                raise BackendUnavailable(str(error), stored="unknown") from error.__cause__
            raise
        except LayoutMismatch as mismatch:
            mismatch.may_be_done = may_be_done
            raise

    async def command(
        self, key: str, *command: Argument, until: float | None = None, at: ServerConnections | None = None
    ) -> object:
        """Send a command that may be repeated to the server of a key, or ``at`` another; ``until``: when to give up."""
        name = str(command[0])
        call = self._exchange(
            key, lambda server, until, fresh: server.attempt(name, command, until, fresh), until=until, at=at
        )
        return await apart(call)

    async def listen(self, stream: str, last: str) -> str:
        """Return the id of a stream's entry after ``last``, or ``last`` after a while; may be cancelled at any time."""
        call = self._exchange(stream, lambda server, until, fresh: server.hear(stream, last), repeat=False)
        return await apart(call)

    async def clock_ms(self, key: str) -> int:
        """Return the time by the clock of a key's server; it is asked, unless it was within a minute.

        Where nobody may ask, it is taken to be the time of this machine.
        """
        server = self._servers.get(self.primary_of(key))
        told = None if server is None else server.time
        if told is None:
            told = await apart(self._exchange(key, lambda server, until, fresh: server.learn_time(until, fresh)))
        return int(1000 * (time.time() if told is None else told))

    async def check_version(self, key: str) -> None:
        """Refuse a server that is too old, and a cluster node given as a single server; nothing if none may ask."""
        try:
            info = await self.command(key, "INFO", "server")
        except ConfigurationError:
            return  # the user may not ask; a password that is wrong will be told by the next command
        told = info if isinstance(info, bytes) else b""
        found = re.search(rb"redis_version:(\d+)\.(\d+)", told)
        if found and (int(found[1]), int(found[2])) < OLDEST:
            version = found[0].decode().partition(":")[2]
            raise ConfigurationError(f"{self.url} is version {version}; 6.2 is the oldest that works")
        if b"_mode:cluster" in told and not self.url.nodes:
            raise ConfigurationError(f"{self.url} is part of a cluster: give redis+cluster://host:port")

    async def _exchange(
        self,
        key: str,
        attempt: Callable[[ServerConnections, float, bool], Awaitable[T]],
        *,
        repeat: bool = True,
        until: float | None = None,
        at: ServerConnections | None = None,
    ) -> T:
        """Make a call; all of it, with waits for nodes and connections, takes at most one timeout."""
        loop = asyncio.get_running_loop()
        until = until or loop.time() + self.timeout
        sent = fresh = moved = False
        while True:
            server = at or await self._server_of(key, until)
            try:
                return await attempt(server, until, fresh)
            except BackendUnavailable:  # it was closed, or too few replicas have the writes
                if at is None:
                    self._blame(server)
                raise
            except Failed as failed:
                error, is_old, sent = failed.error, failed.is_old, sent or failed.sent
            is_reply = isinstance(error, exceptions.ResponseError)
            is_late = is_reply and code_of(error) == "LATE"  # it did nothing
            if is_reply and str(error).startswith("LAYOUT "):
                raise LayoutMismatch(str(error).removeprefix("LAYOUT "))
            if self.url.nodes and isinstance(error, exceptions.MovedError):  # it did nothing
                if at is not None:
                    raise Moved from error
                self._blame(server, error)
                if moved:
                    problem = f"its nodes do not agree on which of them has slot {error.slot_id}"
                    raise BackendUnavailable(f"{self.url} is unavailable: {problem}")
                moved = True
            elif loop.time() < until and ((is_late and not fresh) or (repeat and is_old and not is_reply)):
                fresh = True
            else:
                if not is_reply or code_of(error) in DEMOTED:
                    await server.hang_up()
                explained = server.explained(error, sent)
                if at is None and isinstance(explained, BackendUnavailable):
                    self._blame(server)
                raise explained from error

    # Servers

    def _server(self, address: Address | None) -> ServerConnections:
        if self._closed:
            raise BackendUnavailable(f"the connections to {self.url} are closed")
        if address not in self._servers:
            self._servers[address] = ServerConnections(self.url.at(address) if address else self.url, self.timeout)
        return self._servers[address]

    def primary_of(self, key: str) -> Address | None:
        """Return the primary of a key in a cluster, if known; None: all keys are on one server."""
        return self._slots[slot_of(key)] if self._slots else None

    async def find_primaries(self) -> Sequence[ServerConnections]:
        """Find the servers that take adds, for calls to all of them, without a key."""
        if not self._slots:
            return [self._server(None)]
        await self._ask_nodes(asyncio.get_running_loop().time() + self.timeout)
        return [self._server(address) for address in dict.fromkeys(self._slots) if address is not None]

    async def _server_of(self, key: str, until: float) -> ServerConnections:
        """Return a key's server; ask the nodes which one has its slot if that is unknown, or was wrong."""
        if not self._slots:
            return self._server(None)
        slot = slot_of(key)
        address = self._slots[slot]
        if address is None or address in self._suspects or slot in self._halves:
            await self._ask_nodes(until)
            address = self._slots[slot]
        if address is None:
            raise BackendUnavailable(f"{self.url} is unavailable: no node has slot {slot}")
        if slot in self._halves:
            raise BackendUnavailable(f"{self.url} is unavailable: slot {slot} is being moved")
        return self._server(address)

    def _blame(self, server: ServerConnections, moved: exceptions.MovedError | None = None) -> None:
        """Note that a server is unavailable, or said that a slot has moved."""
        if self._slots:
            self._suspects.add(server.url.address)
        if moved is not None:  # a node that gives no host is where this one is
            owner = self.url.as_seen((cast("str", moved.host).strip("?") or server.url.address[0], moved.port))
            self._known = [owner, *(node for node in self._known if node != owner)]  # knows best, and is asked first

    async def _ask_nodes(self, until: float) -> None:
        """Ask the nodes for the slots, together with other callers who want to know now."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), context=Context())  # not that of who asks first
            self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        asking = self._asking
        await asyncio.wait([asking], timeout=until - asyncio.get_running_loop().time())
        if not asking.done() or asking.cancelled():
            problem = "its nodes did not tell in time which node has which slots"
            raise BackendUnavailable(f"{self.url} is unavailable: {problem}")
        asking.result()

    async def _ask(self) -> None:
        """Learn from a node which slots each primary has. Nodes that failed are asked last, the others in turn."""
        share = max(self.timeout / (len(self._known) + 1), SHORTEST)
        problems: list[str] = []
        refusals = Counter[str]()
        for node in sorted(self._known, key=self._suspects.__contains__):
            self._known.remove(node)
            self._known.append(node)
            until = asyncio.get_running_loop().time() + share
            try:
                reply = await self.command("", "CLUSTER", "SLOTS", until=until, at=self._server(node))
                if reply:
                    await self._learn(node, cast("list[list[object]]", reply), share)
                    return
                problems.append(f"{show_address(*node)} knows of no slots")
            except ConfigurationError as error:
                refusals[refused(error)] += 1
                problems.append(str(error))
            except AiodigestError as error:
                problems.append(str(error))
        rights = "; its user needs +cluster|slots (before Redis 7: +cluster) on every node"
        needed = rights if refusals["command"] else ""
        message = f"no node of {self.url} tells which node has which slots ({'; '.join(problems)}){needed}"
        if refusals.total() == len(problems):
            raise ConfigurationError(message)
        raise BackendUnavailable(message)

    async def _learn(self, node: Address, ranges: Sequence[Sequence[object]], share: float) -> None:
        slots: list[Address | None] = [None] * SLOTS
        known: dict[Address, None] = {}
        for first, last, *servers in cast("Sequence[tuple[int, int, *tuple[Sequence[object], ...]]]", ranges):
            addresses = [self.url.as_seen(_address(server, node)) for server in servers]
            slots[first : last + 1] = [addresses[0]] * (last + 1 - first)
            known |= dict.fromkeys(addresses)
        if slots != self._slots or self._halves:
            self._halves = await self._find_halves(slots, share)
        self._slots = slots
        # the given addresses may be names that lead to other nodes one day, so they stay
        known |= dict.fromkeys(self.url.nodes)
        self._known = [*(address for address in self._known if address in known), *(known.keys() - self._known)]
        self._suspects.clear()
        primaries = set(slots)
        for address in [address for address in self._servers if address not in primaries]:
            server = self._servers.pop(address)
            self._former = {former for former in self._former if former.is_busy} | {server}
            await server.retire()

    async def _find_halves(self, slots: Sequence[Address | None], share: float) -> frozenset[int]:
        """Find slots that are moving, as their new primaries report: a replica of the old one may not know, and serve
        half of one as if it were whole. So this matters only after something has changed hands."""
        until = asyncio.get_running_loop().time() + share

        async def arriving(address: Address) -> set[int]:
            with suppress(AiodigestError):
                told = cast("bytes", await self.command("", "CLUSTER", "NODES", until=until, at=self._server(address)))
                [own] = [line.split() for line in told.splitlines() if b"myself" in line]
                return {int(slot[1:].partition(b"-<-")[0]) for slot in own[8:] if b"-<-" in slot}
            return set()

        primaries = {address for address in slots if address is not None}
        return frozenset[int]().union(*await asyncio.gather(*map(arriving, primaries)))


def slot_of(key: str) -> int:
    return key_slot(key.encode())


def _address(server: Sequence[object], told_by: Address) -> Address:
    """Return a node's address. A node that gives no host may give an IP address; else it is on the same host."""
    host, port = cast("bytes | None", server[0]), cast("int", server[1])
    if host and host != b"?":
        return host.decode(), port
    facts = cast("list[bytes]", server[3] if len(server) > 3 else [])
    beside = dict(zip(facts[::2], facts[1::2], strict=False))
    return beside.get(b"ip", told_by[0].encode()).decode(), port


def join_connections(url: URL, timeout: float) -> Connections:
    """Return connections for the running loop: those of other users of the same client, or new ones."""
    for left in [key for key in list(_shared) if key[1].is_closed()]:  # its user never left
        _shared.pop(left, None)  # other threads do so too
    key = (object() if url.pool is None else url.pool, asyncio.get_running_loop(), timeout)
    if key not in _shared:
        _shared[key] = Connections(url, timeout)
    _shared[key].users += 1
    return _shared[key]


async def leave_connections(connections: Connections) -> None:
    """End one user's share; the last one closes every connection, and calls under way fail."""
    connections.users -= 1
    if connections.users == 0:
        for key in [key for key, joined in list(_shared.items()) if joined is connections]:
            del _shared[key]
        await connections.close()
