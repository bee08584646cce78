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
    """A callback, and what it got: of each record the digests it came in."""

    def __init__(self) -> None:
        self.digests: defaultdict[str, list[str]] = defaultdict(list)
        self.order: list[str] = []  # of timelines

    async def __call__(self, digest: Digest[int]) -> None:
        self.order.append(digest.key)
        for record in digest.records:
            self.digests[record.id].append(digest.id)

    async def got(self, *records: str) -> None:
        await until(lambda: self.digests.keys() >= set(records))

    @property
    def twice(self) -> set[str]:
        """The records that came in digests with different ids."""
        return {record for record, digests in self.digests.items() if len(set(digests)) > 1}


class Traffic:
    """A producer that adds to every timeline, one record of each after the other, and a worker."""

    def __init__(
        self, source: Any, namespace: str, keys: Sequence[str], *, wait_replicas: int = 0, **options: Any
    ) -> None:
        settings: dict[str, Any] = {"namespace": namespace, "value_type": int, "policy": NO_GAP, "drain_timeout": 5}
        settings |= {"timeout": 60, **options}
        self.producer = DigestEngine[int](source, wait_replicas=wait_replicas, **settings)
        self.worker = DigestEngine[int](source, lease_timeout=2, **settings)
        self.keys = keys
        self.acknowledged: list[list[str]] = [[] for _ in keys]
        self.refused: list[list[BackendUnavailable]] = [[] for _ in keys]
        self.inbox = Inbox()

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
        """Both at work until the block ends; then all that was acknowledged comes."""
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

    async def goes_on(self, places: Sequence[int] | None = None) -> None:
        """Return when records that are added from now on (there) have been acknowledged and delivered."""
        goals = {place: len(self.acknowledged[place]) + 3 for place in places or range(len(self.keys))}

        def reached() -> bool:
            return all(
                len(records := self.acknowledged[place]) > goal and records[goal] in self.inbox.digests
                for place, goal in goals.items()
            )

        await until(reached)

    async def replicated(self) -> set[str]:
        """What was delivered, as the replicas know: they have acknowledged adds that came later."""
        delivered = set(self.inbox.digests)
        await self.goes_on()
        return delivered

    def unsent(self, place: int) -> int:
        """How many adds no primary has taken."""
        return sum(error.stored == "no" for error in self.refused[place])

    def errors(self, places: Sequence[int] | None = None) -> list[BackendUnavailable]:
        return [error for place in places or range(len(self.keys)) for error in self.refused[place]]
