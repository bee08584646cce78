"""Shared connections: engines given the same client share theirs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TypeAlias

from aiodigest.backends.redis.connections.cluster import ClusterLink
from aiodigest.backends.redis.connections.server import Link
from aiodigest.backends.redis.connections.url import Target

AnyLink: TypeAlias = Link | ClusterLink

_links: dict[tuple[object, asyncio.AbstractEventLoop, float], AnyLink] = {}
_users = Counter[AnyLink]()


def join_link(target: Target, timeout: float) -> AnyLink:
    """Return connections for the running loop: those of other users of the same client, or new ones."""
    for left in [place for place in list(_links) if place[1].is_closed()]:  # its user never left
        _users.pop(_links.pop(left), None)
    place = (object() if target.pool is None else target.pool, asyncio.get_running_loop(), timeout)
    if place not in _links:
        _links[place] = ClusterLink(target, timeout) if target.nodes else Link(target, timeout)
    link = _links[place]
    _users[link] += 1
    return link


async def leave_link(link: AnyLink) -> None:
    """End one user's share; the last one closes every connection, and calls under way fail."""
    _users[link] -= 1
    if _users[link] > 0:
        return
    del _users[link]
    for place in [place for place, joined in list(_links.items()) if joined is link]:  # other threads have loops, too
        del _links[place]
    await link.close()
