"""Operators' calls on a namespace: look, list, count, check, erase, and change its number of shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import cast

from aiodigest.backend import SLICE, Bookmark, Operations, Page, Retired, StoredDeadLetter, StoredTimeline
from aiodigest.backends.redis.connections.server import Moved, ServerConnections
from aiodigest.backends.redis.items import BATCH, read_entries
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.resharding import Resharding
from aiodigest.backends.redis.scripts import number, text, unpack_timeline
from aiodigest.errors import BackendUnavailable
from aiodigest.models import Finding, State

Fields = Sequence[bytes | int]
NO_BOOKMARK = "", "", ""  # from the beginning


class RedisOperations(Operations):
    """The operators' calls on a namespace."""

    def __init__(self, namespace: Namespace, resharding: Resharding) -> None:
        self._namespace = namespace
        self._resharding = resharding

    # Timelines

    async def look_all(self, key: str) -> list[StoredTimeline]:
        answers = await self._namespace.call_of(key, "look", "", key)
        found = [fields[0] for fields, _ in cast("list[tuple[list[Fields], object]]", answers) if fields]
        return sorted(map(unpack_timeline, found), key=attrgetter("due_ms"))

    async def look(self, key: str) -> StoredTimeline | None:
        found = await self.look_all(key)
        if not found:
            return None
        logged, opened = sum(timeline.logged for timeline in found), sum(timeline.opened for timeline in found)
        return found[0]._replace(logged=logged, opened=opened)

    async def entries(self, key: str) -> list[bytes]:
        await self._namespace.connected()
        while True:
            entries: list[bytes] = []
            shards = self._namespace.shard_map.shards_of(key)
            for shard in reversed(shards):  # what came first comes first
                before = len(entries)
                with suppress(Retired):
                    while page := await read_entries(self._namespace, shard, key, "", "", len(entries) - before, SLICE):
                        entries += page
            if self._namespace.shard_map.shards_of(key) == shards:  # else a call has told of others
                return entries

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[StoredTimeline]:
        with suppress(Retired):
            reply = await self._namespace.call("look", shard, state, min(count, BATCH), *(after or NO_BOOKMARK))
            found, end = cast("tuple[list[Fields], list[bytes]]", reply)
            return Page([unpack_timeline(fields) for fields in found], Bookmark(*end) if end else None)
        return Page()

    async def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        async for answer in self._namespace.call_all("counts"):
            reply = cast("list[bytes | int]", answer)
            counts = {text(name): number(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}
            if oldest := counts.pop("oldest_due_ms", 0):
                total["oldest_due_ms"] = min(total["oldest_due_ms"] or oldest, oldest)
            total["overdue_ms"] = max(total["overdue_ms"], counts.pop("overdue_ms", 0))
            total.update(counts)
        return total

    # Dead letters

    async def dead_letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        with suppress(Retired):
            reply = await self._namespace.call("letters", shard, min(count, SLICE), *(after or NO_BOOKMARK))
            ids, end = cast("tuple[list[bytes], list[bytes]]", reply)
            return Page([text(letter_id) for letter_id in ids], Bookmark(*end) if end else None)
        return Page()

    async def dead_letter(self, letter_id: str, shard: int | None = None) -> StoredDeadLetter | None:
        if shard is None:
            async for each in self._namespace.all_shards():
                if (found := await self.dead_letter(letter_id, each)) is not None:
                    return found
            return None
        entries: list[bytes] = []
        with suppress(Retired):
            while reply := await self._namespace.call("letter", shard, letter_id, len(entries)):
                letter = cast("tuple[bytes, bytes, int, int, bytes, int, list[bytes]]", reply)
                key, reason, dead_ms, attempt, digest_id, size, page = letter
                entries += page
                if len(entries) >= size or not page:
                    names = text(key), text(reason), dead_ms, attempt, text(digest_id)
                    return StoredDeadLetter(letter_id, *names, entries)
        return None

    # The namespace

    async def examine(self) -> list[Finding]:
        from aiodigest.backends.redis.diagnostics.namespace import examine  # not needed by workers

        return await examine(self._namespace, await self._namespace.connected())

    async def erase(self) -> int:
        connections = await self._namespace.connected()
        try:
            return sum([await _erase(server, self._namespace.name) for server in await connections.find_primaries()])
        except Moved:  # and the rest of its keys may be on a server that was looked through before
            problem = f"{self._namespace.url} is unavailable: a slot moved meanwhile; erase again"
            raise BackendUnavailable(problem) from None

    async def try_erase(self) -> None:
        connections = await self._namespace.connected()
        for server in await connections.find_primaries():
            await _scan(server, self._namespace.name, b"")

    async def reshard(self, shards: int) -> bool:
        return await self._resharding.begin(shards)

    async def drain(self) -> dict[str, int]:
        return await self._resharding.drain()


async def _scan(server: ServerConnections, namespace: str, cursor: bytes) -> tuple[bytes, list[bytes]]:
    """Return one page of a server's keys, the namespace's only, and where the next page begins."""
    page = await server.command("", "SCAN", cursor or 0, "MATCH", f"{{{namespace}[:}}]*", "COUNT", SLICE)
    return cast("tuple[bytes, list[bytes]]", page)


async def _erase(server: ServerConnections, namespace: str) -> int:
    """Drop all keys of a namespace on a server; return how many there were."""
    cursor, erased = b"", 0
    while cursor != b"0":
        cursor, keys = await _scan(server, namespace, cursor)
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            tag, _, name = key.partition(b"}")
            if name.startswith(b":"):
                groups.setdefault(tag, []).append(key)
        for group in groups.values():  # of one tag, and so of one slot
            erased += cast("int", await server.command("", "UNLINK", *group))
    return erased
