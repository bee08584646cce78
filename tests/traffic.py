"""A producer and a worker that go on while servers change under them, and what they have seen."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from replicas import until

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy

NO_GAP = Policy(minimum_delay=0, increment_delay=0)


class Inbox:
    """A callback that keeps the digests that came, and may hold them."""

    def __init__(self) -> None:
        self.came: list[Digest[Any]] = []
        self.digests: defaultdict[str, list[str]] = defaultdict(list)  # of each record those that it came in
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, digest: Digest[Any]) -> None:
        self.came.append(digest)
        for record in digest.records:
            self.digests[record.id].append(digest.id)
        await self.go.wait()

    async def got(self, *records: str) -> None:
        await until(lambda: self.digests.keys() >= set(records))

    async def digest(self, number: int) -> None:
        await until(lambda: len(self.came) >= number)

    @property
    def ids(self) -> list[str]:
        """Those of the records, in their order."""
        return [record.id for digest in self.came for record in digest.records]

    @property
    def twice(self) -> set[str]:
        """The records that came in digests with different ids."""
        return {record for record, digests in self.digests.items() if len(set(digests)) > 1}


class Traffic:
    """A producer that adds to every timeline, one record of each after the other, and a worker."""

    def __init__(self, source: Any, namespace: str, keys: list[str], wait_replicas: int = 0, **options: Any) -> None:
        settings: dict[str, Any] = {"namespace": namespace, "value_type": int, "policy": NO_GAP, "drain_timeout": 5}
        settings |= {"timeout": 60, **options}
        self.producer = DigestEngine[int](source, wait_replicas=wait_replicas, **settings)
        self.worker = DigestEngine[int](source, lease_timeout=2, **settings)
        self.keys = keys
        self.acknowledged: list[list[str]] = [[] for _ in keys]
        self.refused: list[list[BackendUnavailable]] = [[] for _ in keys]
        self.inbox = Inbox()
        self._replicated: set[str] = set()
        self._forgotten: set[str] = set()  # what may come in digests with other ids

    async def _produce(self, place: int) -> None:
        number = 0
        while True:
            record = f"{place}-{number}"
            try:
                await self.producer.add(self.keys[place], number, record_id=record)
                self.acknowledged[place].append(record)
            except BackendUnavailable as error:
                self.refused[place].append(error)
            number += 1
            await asyncio.sleep(0.01)  # some of two cores is for the servers

    @asynccontextmanager
    async def flowing(self) -> AsyncGenerator[None]:
        """Both at work until the block ends; then all that was acknowledged has come, under one id each."""
        async with self.worker.delivering(self.inbox), self.producer:
            producing = [asyncio.create_task(self._produce(place)) for place in range(len(self.keys))]
            try:
                await self.goes_on()
                yield
                for task in producing:
                    assert not task.done(), task
            finally:
                for task in producing:
                    task.cancel()
                await asyncio.wait(producing)
            await self.inbox.got(*(record for records in self.acknowledged for record in records))
        assert self.inbox.twice <= self._forgotten

    async def goes_on(self, places: Sequence[int] | None = None) -> None:
        """Return when records that are added from now on (there) have been acknowledged and delivered."""
        goals = {place: len(self.acknowledged[place]) + 3 for place in places or range(len(self.keys))}

        def reached() -> bool:
            return all(
                len(records := self.acknowledged[place]) > goal and records[goal] in self.inbox.digests
                for place, goal in goals.items()
            )

        await until(reached)

    async def replicated(self) -> None:
        """Return when the replicas know of all that is delivered now: they have acknowledged adds that came later."""
        self._replicated = set(self.inbox.digests)
        await self.goes_on()

    def forgets(self) -> None:
        """The primary is lost, and with it the claims since then that no replica had."""
        self._forgotten = set(self.inbox.digests) - self._replicated

    def unsent(self, place: int) -> int:
        """How many adds no primary has taken."""
        return sum(error.stored == "no" for error in self.refused[place])

    def errors(self, places: Sequence[int] | None = None) -> list[BackendUnavailable]:
        return [error for place in places or range(len(self.keys)) for error in self.refused[place]]
