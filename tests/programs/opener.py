"""Open the windows of some timelines at the same moments as another process, and write what each add answered.

Arguments: path of the server's socket, namespace, name of this process, number of timelines.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import redis

from aiodigest.backend import Add
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.policy import Policy
from aiodigest.records.entries import pack

socket, namespace, name, timelines = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


def meet(client: Any, place: str) -> None:
    """Return when both processes are here."""
    client.incr(place)
    deadline = time.monotonic() + 60
    while int(client.get(place)) % 2:
        assert time.monotonic() < deadline, "the other process does not come"


async def main() -> None:
    backend = RedisBackend(f"unix://{socket}?db=0", namespace=namespace)
    await backend.connect()
    with redis.Redis(unix_socket_path=socket) as client:
        for number in range(timelines):
            meet(client, f"{namespace}-meeting-{number}")
            [ready] = await backend.add(0, [Add(f"k{number}", pack(name.encode(), None, b"1"), Policy().terms)])
            print(ready, flush=True)
    await backend.aclose()


asyncio.run(main())
