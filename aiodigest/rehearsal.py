"""The engine's store in a test: asked directly, without a session's tasks and queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from aiodigest.backend import Add, Backend, Close, Closed, Lease, Retry
from aiodigest.engine import DigestEngine
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, LeaseLost
from aiodigest.models import Activity, Digest
from aiodigest.session.sync import Sync
from aiodigest.worker.delivery import Attempt, Outcome

T = TypeVar("T")
Answer = TypeVar("Answer")

SHARD = 0  # the only one


class Rehearsal:
    """A stand-in for a session: straight to the store, in any event loop, or only in ``loop`` if given."""

    is_here, is_over, breadth, fault = True, False, 1, ""

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        self.delivering = 0
        self._backend = backend
        self._turn = nullcontext() if loop is None else asyncio.Lock()  # adds stay in order

    @property
    def main(self) -> asyncio.Future[None]:
        """A future that never ends: there is no background task."""
        return asyncio.get_running_loop().create_future()

    @property
    def activity(self) -> Activity:
        return Activity(delivering=self.delivering)

    async def backend(self) -> Backend:
        if self.loop not in (None, asyncio.get_running_loop()):
            raise ConfigurationError(
                "a TestEngine with server=True can be used in its own event loop alone, and Starlette's TestClient "
                "starts another one: use httpx2.AsyncClient(transport=httpx2.ASGITransport(app)), or no server"
            )
        return self._backend

    async def add(self, add: Add, began: float) -> bool:
        [ready] = await self.add_many([add])
        if isinstance(ready, AiodigestError):
            raise ready
        return ready

    async def add_many(self, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        backend = await self.backend()
        async with self._turn:
            return await backend.add(SHARD, adds)

    def explained(self, error: BackendUnavailable, record_id: str | None = None) -> BackendUnavailable:
        return BackendUnavailable(str(error), record_id=record_id, stored=error.stored)

    def poke(self, shard: int) -> None:
        """Do nothing: nobody sleeps."""

    def hurry(self) -> None:
        """Do nothing: nothing runs."""

    async def stop(self) -> None:
        """Do nothing: the test stops when it is left."""


class Adds(Sync[T]):
    """The adds of threads without an event loop: into the test's store, like all others."""

    def __init__(self, engine: DigestEngine[T], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(engine)
        self._loop = loop

    def _carry_out(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        if self._loop is None:
            return asyncio.run(work())
        if not self._loop.is_running():
            raise ConfigurationError(
                "engine.sync can add to a TestEngine with server=True only while its event loop runs, which it does "
                "not: use the TestEngine in memory, without server=True"
            )
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()


@asynccontextmanager
async def on_server(engine: DigestEngine[Any], now: Callable[[], int]) -> AsyncGenerator[Backend]:
    """Open a store for an engine, on a server of its own whose clock is ``now``; nothing of it remains."""
    from aiodigest.backends.embedded.server import EmbeddedServer  # tests in memory need neither
    from aiodigest.backends.redis.backend import RedisBackend

    with TemporaryDirectory(prefix="aiodigest-", ignore_cleanup_errors=True) as folder:
        server = EmbeddedServer(Path(folder, "data"))
        url = await server.start()
        try:
            backend = RedisBackend(url, namespace=engine.namespace, timeout=engine._timeout, now=now)
            try:
                await backend.connect()
                yield backend
            finally:
                await backend.aclose()
        finally:
            await server.stop()


# What a worker does with a lease, once and without a try more: a test is to hear of a server that is gone.


async def entries_of(backend: Backend, lease: Lease) -> list[bytes]:
    """Return the entries of a digest, or of its next part."""
    taken = min(lease.part or lease.size, lease.size)
    entries = list(lease.entries[:taken])
    while len(entries) < taken:
        page = await backend.read(SHARD, lease, len(entries), taken - len(entries))
        if not page:
            raise LeaseLost(f"the entries of timeline {lease.key!r} went away under delivery")
        entries += page
    return entries


async def reported(backend: Backend, report: Close | Retry) -> Closed:
    """Report an attempt's end to the store, and return its answer."""
    if isinstance(report, Close):
        [closed] = await backend.close(SHARD, [report])
    else:
        [kept] = await backend.retry(SHARD, [report])
        closed = kept if isinstance(kept, AiodigestError) else Closed("closed" if kept else "lost")
    if isinstance(closed, AiodigestError):
        raise closed
    return closed


def delivered_of(attempt: Attempt[T], outcome: Outcome) -> Digest[T] | None:
    """Return the digest with only its delivered records; None if there are none."""
    if not outcome.records:
        return None
    if isinstance(outcome.report, Close):
        left = {record_id for letter in outcome.report.dead_letters for record_id in letter.ids or ()}
    else:
        left = set(outcome.report.failed or ())
    digest = attempt.digest
    return replace(digest, records=tuple(one for one in digest.records if one.id.encode() not in left))
