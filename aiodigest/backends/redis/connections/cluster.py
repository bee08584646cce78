"""Connections to a cluster: which primary has a key's slot, and connections to each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from contextvars import Context
from random import sample
from typing import cast

from redis.crc import key_slot
from redis.exceptions import MovedError

from aiodigest.backends.redis.connections.connection import Address, show_address
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.server import Connections, ServerConnections
from aiodigest.backends.redis.connections.url import URL
from aiodigest.backends.redis.layout import SLOTS
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError

SHORTEST = 0.2  # seconds for a node's answer, however many there are to ask

_shared: dict[tuple[object, asyncio.AbstractEventLoop, float], Connections] = {}


class ClusterConnections(Connections):
    """Connections to the primaries of a cluster. After a failure of one, the next call to it first asks for the slots.

    Of redis-py's cluster client only the settings are used: docs/design.md, "On a cluster", says why.
    """

    def __init__(self, url: URL, timeout: float) -> None:
        super().__init__(url, timeout)
        self._servers: dict[Address, ServerConnections] = {}
        self._former: set[ServerConnections] = set()  # to former primaries, on which calls may still be under way
        self._slots: list[Address | None] = [None] * SLOTS
        self._halves: frozenset[int] = frozenset()  # slots whose keys another primary is taking over, one by one
        # the node asked last comes last; in random order at first, or every new process would ask the same one first
        self._known = sample(url.nodes, len(url.nodes))
        self._suspects: set[Address] = set()
        self._asking: asyncio.Task[None] | None = None
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        for server in [*self._servers.values(), *self._former]:
            await server.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])  # the only wait here: a caller cancelled in it has closed all the same

    @property
    def primaries(self) -> Sequence[ServerConnections]:
        """The primaries that are known to have slots."""
        return [self._server(address) for address in dict.fromkeys(self._slots) if address is not None]

    async def find_primaries(self) -> Sequence[ServerConnections]:
        await self._ask_nodes(asyncio.get_running_loop().time() + self.timeout)
        return self.primaries

    def primary_of(self, key: str) -> Address | None:
        """Return the primary of a key, if known."""
        return self._slots[slot_of(key)]

    async def hang_up(self, key: str = "") -> None:
        address = self._slots[slot_of(key)]
        if address in self._servers:
            self._suspects.add(address)
            await self._servers[address].hang_up()

    def blame(self, server: ServerConnections, moved: MovedError | None = None) -> None:
        self._suspects.add(server.url.address)
        if moved is not None:  # a node that gives no host is where this one is
            owner = self.url.as_seen((cast("str", moved.host).strip("?") or server.url.address[0], moved.port))
            self._known = [owner, *(node for node in self._known if node != owner)]  # knows best, and is asked first

    def _server(self, address: Address) -> ServerConnections:
        if self._closed:
            raise BackendUnavailable(f"the connections to {self.url} are closed")
        if address not in self._servers:
            self._servers[address] = ServerConnections(self.url.at(address), self.timeout)
        return self._servers[address]

    # Which node has which slots

    async def server_of(self, key: str, until: float) -> ServerConnections:
        """Return the primary of a key's slot; ask the nodes if it is unknown, or was wrong."""
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
                reply = await self._server(node).command("", "CLUSTER", "SLOTS", until=until)
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

    async def _learn(self, node: Address, ranges: Sequence[Sequence[object]], share: float = SHORTEST) -> None:
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
                told = cast("bytes", await self._server(address).command("", "CLUSTER", "NODES", until=until))
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
        _shared[key] = ClusterConnections(url, timeout) if url.nodes else ServerConnections(url, timeout)
    _shared[key].users += 1
    return _shared[key]


async def leave_connections(connections: Connections) -> None:
    """End one user's share; the last one closes every connection, and calls under way fail."""
    connections.users -= 1
    if connections.users == 0:
        for key in [key for key, joined in list(_shared.items()) if joined is connections]:
            del _shared[key]
        await connections.close()
