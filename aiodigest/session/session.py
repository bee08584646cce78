"""The calls of an engine to its backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

from aiodigest.backend import Add, Backend
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Activity


class Session:
    """The calls of an engine to a connected backend, made one by one, with no task of its own.

    It serves any event loop, one thread at a time, or only ``loop`` if given. ``BackgroundSession`` is the one of an
    engine that was entered.
    """

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.delivering = 0  # digests that who made this delivers by hand
        self.store = backend
        self._turn = nullcontext() if loop is None else asyncio.Lock()  # adds stay in order

    @property
    def is_here(self) -> bool:
        """True if it can be used here, in this process and event loop."""
        return self.loop in (None, asyncio.get_running_loop())

    @property
    def is_over(self) -> bool:
        """True if it was left behind: by a fork, or by a loop that was closed before the engine was left."""
        return False

    @property
    def activity(self) -> Activity:
        """The current work; the engine itself counts adds."""
        return Activity(delivering=self.delivering)

    @property
    def fault(self) -> str:
        """A message if the background task has ended although nobody stopped it, else ''."""
        return ""

    @property
    def breadth(self) -> int:
        """The factor for a slice of ``add_many`` that fills the calls of all shards; at most 4."""
        return 1

    async def backend(self, began: float | None = None) -> Backend:
        """Return the connected backend. Raises BackendUnavailable if it cannot be reached within the engine's timeout,
        counted from ``began``, or from now."""
        if not self.is_here:
            raise ConfigurationError(
                "a TestEngine with server=True can be used in its own event loop alone, and Starlette's TestClient "
                "starts another one: use httpx2.AsyncClient(transport=httpx2.ASGITransport(app)), or no server"
            )
        return self.store

    async def add(self, add: Add, began: float) -> bool:
        """Send an add, timed from ``began``; True if it made its timeline ready."""
        [ready] = await self.add_many([add])
        if isinstance(ready, AiodigestError):
            raise ready
        return ready

    async def add_many(self, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        """Send adds, those of a timeline in order; return the answer to each."""
        backend = await self.backend()
        async with self._turn:
            shards = [backend.shard_map.shard_of(add.key) for add in adds]
            answers: dict[int, bool | AiodigestError] = {}
            for shard in sorted(set(shards)):
                indices = [index for index, one in enumerate(shards) if one == shard]
                try:
                    results = await backend.add(shard, [adds[index] for index in indices])
                except AiodigestError as error:
                    results = [error] * len(indices)
                answers.update(zip(indices, results, strict=True))
        return [answers[index] for index in range(len(adds))]

    def explained(self, error: BackendUnavailable, record_id: str | None = None) -> BackendUnavailable:
        """Return the same error, for a record if one is named, with the cause behind it: a fault, or the log of an
        embedded server."""
        message, reason = self.fault or str(error), self.store.why_down()
        if reason and reason not in message:
            message += f" ({reason})"
        return BackendUnavailable(message, record_id=record_id, stored=error.stored)

    def poke(self, shard: int) -> None:
        """Wake this process's own worker, if it has one: something in a shard may be due earlier."""
