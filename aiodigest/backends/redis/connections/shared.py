"""Shared connections: engines given the same client share theirs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TypeAlias

from aiodigest.backends.redis.connections.cluster import ClusterConnections
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.connections.url import URL

Connections: TypeAlias = ServerConnections | ClusterConnections

_shared: dict[tuple[object, asyncio.AbstractEventLoop, float], Connections] = {}
_users = Counter[Connections]()


def join_connections(url: URL, timeout: float) -> Connections:
    """Return connections for the running loop: those of other users of the same client, or new ones."""
    for left in [place for place in list(_shared) if place[1].is_closed()]:  # its user never left
        _users.pop(_shared.pop(left), None)
    place = (object() if url.pool is None else url.pool, asyncio.get_running_loop(), timeout)
    if place not in _shared:
        _shared[place] = ClusterConnections(url, timeout) if url.nodes else ServerConnections(url, timeout)
    _users[_shared[place]] += 1
    return _shared[place]


async def leave_connections(connections: Connections) -> None:
    """End one user's share; the last one closes every connection, and calls under way fail."""
    _users[connections] -= 1
    if _users[connections] > 0:
        return
    del _users[connections]
    for place in [place for place, joined in list(_shared.items()) if joined is connections]:  # other threads add to it
        del _shared[place]
    await connections.close()
