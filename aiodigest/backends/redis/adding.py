"""The way of one call's adds to the store: which are sent again, where to, and how the others fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, cast

from aiodigest.backend import Add, Retired
from aiodigest.backends.redis.items import BATCH, check_answers
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import pack_adds, text
from aiodigest.errors import AiodigestError, BackendUnavailable
from aiodigest.records.entries import identity


class Adding:
    """Adds on their way, in as many calls as it takes; those of a timeline stay in order.

    An add is sent again only if nothing was done with it: its shard was retired, or its call was too long for one
    script.
    """

    def __init__(self, namespace: Namespace, adds: Sequence[Add]) -> None:
        self._namespace = namespace
        self._adds = adds
        self._now = namespace.time()
        self._answers: dict[int, bool | AiodigestError] = {}

    async def run(self, shard: int) -> list[bool | AiodigestError]:
        """Send all adds, to a shard at first; return the answer to each, or raise if all failed at once."""
        unsent: deque[tuple[int, Sequence[int]]] = deque([(shard, range(len(self._adds)))] if self._adds else ())
        while unsent:
            shard, indices = unsent.popleft()
            batch = indices[:BATCH]
            try:
                statuses = await self._send(shard, [self._adds[index] for index in batch])
            except Retired:
                unsent.extend(self._routed(indices))
            except AiodigestError as error:
                if len(batch) == len(self._adds):  # so it is the error of each
                    raise
                self._fail(batch, error)  # of the group, only this call may have arrived
                self._fail(indices[BATCH:], error, "no")
            else:
                for index, status in zip(batch, statuses, strict=False):
                    answer = status == 1 if isinstance(status, int) else self._refused(self._adds[index], text(status))
                    self._answers[index] = answer
                if rest := indices[len(statuses) :]:
                    unsent.appendleft((shard, rest))
        return [self._answers[index] for index in range(len(self._adds))]

    async def _send(self, shard: int, batch: Sequence[Add]) -> Sequence[int | bytes]:
        """Send adds in one call; return the statuses of as many as the script had time for."""
        arguments = pack_adds(batch)
        try:
            reply = await self._namespace.call("add", shard, *arguments, now=self._now)
            statuses = cast("list[int | bytes]", reply)
            await check_answers(self._namespace, shard, statuses, len(batch))
        except AiodigestError as error:
            if type(error) is AiodigestError:  # nobody foresaw it; a proxy may say so of what did arrive
                raise BackendUnavailable(str(error), stored="unknown") from None
            raise
        return statuses

    def _routed(self, indices: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Group adds by the shards that take them now."""
        groups: dict[int, list[int]] = {}
        for index in indices:
            groups.setdefault(self._namespace.shard_map.shard_of(self._adds[index].key), []).append(index)
        return list(groups.items())

    def _refused(self, add: Add, problem: str) -> AiodigestError:
        return _failed(add, self._namespace.broken(add.key, problem))

    def _fail(self, indices: Sequence[int], error: AiodigestError, stored: Literal["no"] | None = None) -> None:
        for index in indices:
            self._answers[index] = _failed(self._adds[index], error, stored)


def _failed(add: Add, error: AiodigestError, stored: Literal["no"] | None = None) -> AiodigestError:
    """Return the error for an add; if the store was unavailable, it says of which record, and what is known of it."""
    if not isinstance(error, BackendUnavailable):
        return error
    record_id = identity(add.entry).decode(errors="replace")
    return BackendUnavailable(str(error), record_id=record_id, stored=stored or error.stored)
