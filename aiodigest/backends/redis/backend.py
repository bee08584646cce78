"""``RedisBackend``: timelines in Redis or Valkey, each transition one script in ``aiodigest/backends/redis/lua``."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import cast

from aiodigest.backend import (
    SLICE,
    Add,
    Backend,
    Bookmark,
    Claims,
    Close,
    Closed,
    Lease,
    Move,
    Page,
    RawLetter,
    Retired,
    Retry,
    Window,
)
from aiodigest.backends.redis.connections.server import Link, Moved
from aiodigest.backends.redis.items import BATCH, Items
from aiodigest.backends.redis.resharding import Relocation
from aiodigest.backends.redis.scripts import (
    Argument,
    number,
    pack_adds,
    pack_bookmark,
    pack_close,
    pack_delays,
    pack_limits,
    pack_names,
    pack_retry,
    text,
    unpack_bookmark,
    unpack_closed,
    unpack_lease,
    unpack_window,
)
from aiodigest.errors import AiodigestError, BackendUnavailable, InvalidState, LeaseLost, LimitExceeded
from aiodigest.models import Finding, State
from aiodigest.policy import Limits, Terms
from aiodigest.records.entries import identity

Fields = Sequence[bytes | int]


async def _scan(server: Link, namespace: str, cursor: bytes) -> tuple[bytes, list[bytes]]:
    """Return one page of a server's keys, the namespace's only, and where the next page begins."""
    page = await server.command("", "SCAN", cursor or 0, "MATCH", f"{{{namespace}[:}}]*", "COUNT", SLICE)
    return cast("tuple[bytes, list[bytes]]", page)


async def _erase(server: Link, namespace: str) -> int:
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


def done(answer: object) -> bool | AiodigestError:
    """Read a script's 1 or 0 as True or False; pass a timeline's error on."""
    return answer if isinstance(answer, AiodigestError) else answer == 1


class RedisBackend(Items, Relocation, Backend):
    """Timelines of a namespace on a server or a cluster; see ``Namespace`` for the parameters."""

    # Adding

    async def add(self, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
        results: list[bool | AiodigestError] = []
        now = self._time()
        while len(results) < len(adds):
            batch = adds[len(results) : len(results) + BATCH]
            try:
                statuses = cast(
                    "list[int | bytes]", await self._call("add", shard, *pack_adds(batch), repeat=False, now=now)
                )
                await self._count(shard, statuses, len(batch))
            except AiodigestError as error:
                if type(error) is AiodigestError:  # nobody foresaw it; a proxy may say so of what did arrive
                    error = BackendUnavailable(str(error), stored="unknown")
                if not results:
                    raise error from None
                # what was stored before stays told; of the rest only this call may have arrived
                if not isinstance(error, BackendUnavailable):
                    return results + [error] * (len(adds) - len(results))
                results += [self._unstored(add, str(error), error.stored) for add in batch]
                results += [self._unstored(add, str(error)) for add in adds[len(results) :]]
                break
            await self._heed(shard, statuses)
            for add, status in zip(batch, statuses, strict=False):
                results.append(status == 1 if isinstance(status, int) else self._refused(add, text(status)))
        return results

    def _unstored(self, add: Add, message: str, stored: str = "no") -> BackendUnavailable:
        known = "unknown" if stored == "unknown" else "no"
        return BackendUnavailable(message, record_id=identity(add.entry).decode(errors="replace"), stored=known)

    def _refused(self, add: Add, problem: str) -> AiodigestError:
        error = self._broken(add.key, problem)
        return self._unstored(add, str(error)) if isinstance(error, BackendUnavailable) else error

    # Delivering

    async def claim(self, shard: int, slots: int, lease_ms: int, limits: Limits) -> Claims:
        reply = await self._call("claim", shard, slots, lease_ms, pack_limits(limits), self._nonce(), repeat=False)
        now, wait, bell, leases, broken, expired = cast(
            "tuple[int, int, bytes, list[Sequence[object]], list[bytes], list[bytes | int]]", reply
        )
        return Claims(
            [unpack_lease(lease) for lease in leases],
            text(bell),
            None if wait < 0 else wait,
            now,
            [(text(key), text(problem)) for key, problem in zip(broken[::2], broken[1::2], strict=True)],
            [(text(key), number(size)) for key, size in zip(expired[::2], expired[1::2], strict=True)],
        )

    async def open(self, shard: int, key: str, lease_ms: int, limits: Limits) -> Lease | None:
        reply = await self._call("open", shard, key, lease_ms, pack_limits(limits), self._nonce(), repeat=False)
        if isinstance(reply, bytes):
            raise self._broken(key, text(reply))
        return None if reply is None else unpack_lease(cast("Sequence[object]", reply))

    async def read(self, shard: int, lease: Lease, start: int, count: int) -> list[bytes]:
        return await self._read(shard, lease.key, lease.token, lease.digest_id, start, count)

    async def _read(self, shard: int, key: str, token: str, digest_id: str, start: int, count: int) -> list[bytes]:
        entries: list[bytes] = []
        while len(entries) < count:
            size = min(SLICE, count - len(entries))
            page = await self._call("read", shard, key, token, digest_id, start + len(entries), size)
            if page == b"lost":
                raise LeaseLost(f"the lease on timeline {key!r} is lost")
            if not page:
                break
            entries += cast("list[bytes]", page)
        return entries

    async def renew(self, shard: int, leases: Sequence[Lease], lease_ms: int) -> list[bool | AiodigestError]:
        if not leases:  # only to tell that there is a worker
            await self._call("renew", shard, lease_ms)
        return [done(answer) for answer in await self._each("renew", shard, [lease_ms], pack_names(leases), False)]

    async def close(self, shard: int, closes: Sequence[Close]) -> list[Closed | AiodigestError]:
        answers = await self._each("close", shard, [self._nonce()], [pack_close(close) for close in closes], True)
        return [answer if isinstance(answer, AiodigestError) else unpack_closed(answer) for answer in answers]

    async def retry(self, shard: int, retries: Sequence[Retry]) -> list[bool | AiodigestError]:
        items = [pack_retry(retry) for retry in retries]
        return [done(answer) for answer in await self._each("retry", shard, [self._nonce()], items, True)]

    async def release(self, shard: int, leases: Sequence[Lease], started: bool) -> list[bool | AiodigestError]:
        items = pack_names(leases)
        return [done(answer) for answer in await self._each("release", shard, [int(started)], items, False)]

    async def wait(self, shard: int, bell: str) -> str:
        link = await self._connected()
        return await link.listen(self._key(shard, "wake"), bell)

    # By hand

    async def schedule(self, deadline_ms: int | None = None) -> list[tuple[str, int]]:
        return await self._promote("schedule", deadline_ms)

    async def maintenance(self, deadline_ms: int | None = None) -> list[str]:
        return [key for key, _ in await self._promote("maintenance", deadline_ms)]

    async def _promote(self, name: str, deadline_ms: int | None) -> list[tuple[str, int]]:
        moved: list[tuple[str, int]] = []
        deadline, now = "" if deadline_ms is None else deadline_ms, self._time()
        async for answer in self._everywhere(name, deadline, now=now):
            reply = cast("list[bytes]", answer)
            moved += [(text(key), int(due)) for key, due in zip(reply[::2], reply[1::2], strict=True)]
        return moved

    async def _everywhere(
        self, name: str, *arguments: Argument, repeat: bool = True, now: Argument | None = None
    ) -> AsyncIterator[object]:
        """Yield the answer of each shard that may hold something."""
        async for shard in self._all_shards():
            with suppress(Retired):
                yield await self._call(name, shard, *arguments, repeat=repeat, now=now)

    async def _of(self, key: str, name: str, *arguments: Argument, repeat: bool = True) -> list[object]:
        """Return the answers of the shards that may hold a timeline: one, except while resharding."""
        await self._connected()
        answers: list[object] = []
        asked = set[int]()
        while left := [shard for shard in self._homes_of(key) if shard not in asked]:  # a call may tell of others
            asked.add(left[0])
            with suppress(Retired):
                answers.append(await self._call(name, left[0], *arguments, repeat=repeat))
        for answer in answers:
            if isinstance(answer, bytes):
                raise self._broken(key, text(answer))
        return answers

    async def delete(self, key: str) -> bool:
        return 1 in await self._of(key, "delete", key, repeat=False)

    async def flush(self, key: str) -> bool:
        return 1 in await self._of(key, "flush", key)

    async def remove(self, key: str, record_id: bytes, limits: Limits) -> bool:
        return 1 in await self._of(key, "remove", key, record_id, pack_limits(limits), self._nonce(), repeat=False)

    async def reschedule(self, key: str, move: Move) -> int | None:
        if move.at_ms is not None:
            mode, value = "at", move.at_ms
        elif move.delay_ms is not None:
            mode, value = "delay", move.delay_ms
        else:
            mode, value = "policy", move.gap_ms
        delays = pack_delays(move.terms)
        limits = pack_limits(move.terms.limits)
        replies = await self._of(key, "reschedule", key, mode, value, move.iteration, delays, limits)
        # the earliest of what it may move: one timeline, but for the time of a change of their shards
        moved = [cast("Fields", reply) for reply in replies]
        if dues := [number(reply[1]) for reply in moved if reply[0] == b"due"]:
            return min(dues)
        if [b"outdated"] in moved:
            return None
        if [b"retry"] in moved:
            raise InvalidState(f"timeline {key!r} waits for a retry, which no policy places: give at or delay")
        raise InvalidState(f"timeline {key!r} is not waiting: only a waiting timeline can be rescheduled")

    async def windows(self, key: str) -> list[Window]:
        replies = cast("list[tuple[list[Fields], object]]", await self._of(key, "look", "", key))
        return sorted((unpack_window(fields[0]) for fields, _ in replies if fields), key=attrgetter("due_ms"))

    async def look(self, key: str) -> Window | None:
        found = await self.windows(key)
        if not found:
            return None
        logged, opened = sum(window.logged for window in found), sum(window.opened for window in found)
        return found[0]._replace(logged=logged, opened=opened)

    async def entries(self, key: str) -> list[bytes]:
        await self._connected()
        while True:
            entries: list[bytes] = []
            homes = self._homes_of(key)
            for shard in reversed(homes):  # what came first comes first
                before = len(entries)
                with suppress(Retired):
                    while page := await self._read(shard, key, "", "", len(entries) - before, SLICE):
                        entries += page
            if self._homes_of(key) == homes:  # else a call has told of others
                return entries

    async def page(self, shard: int, state: State, count: int, after: Bookmark | None = None) -> Page[Window]:
        with suppress(Retired):
            reply = await self._call("look", shard, state, min(count, BATCH), *pack_bookmark(after))
            found, end = cast("tuple[list[Fields], list[bytes]]", reply)
            return Page([unpack_window(fields) for fields in found], unpack_bookmark(end))
        return Page()

    async def counts(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        async for answer in self._everywhere("counts"):
            reply = cast("list[bytes | int]", answer)
            counts = {text(name): number(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}
            if oldest := counts.pop("oldest_due_ms", 0):
                total["oldest_due_ms"] = min(total["oldest_due_ms"] or oldest, oldest)
            total["overdue_ms"] = max(total["overdue_ms"], counts.pop("overdue_ms", 0))
            total.update(counts)
        return total

    async def examine(self) -> list[Finding]:
        from aiodigest.backends.redis.diagnostics.servers import check_up  # not needed by workers

        return await check_up(self, await self._connected())

    async def erase(self) -> int:
        link = await self._connected()
        try:
            return sum([await _erase(server, self.namespace) for server in await link.find_primaries()])
        except Moved:  # and the rest of its keys may be on a server that was looked through before
            raise BackendUnavailable(f"{self.url} is unavailable: a slot moved meanwhile; erase again") from None

    async def try_erase(self) -> None:
        link = await self._connected()
        for server in await link.find_primaries():
            await _scan(server, self.namespace, b"")

    # Dead letters

    async def letters(self, shard: int, count: int, after: Bookmark | None = None) -> Page[str]:
        with suppress(Retired):
            reply = await self._call("letters", shard, min(count, SLICE), *pack_bookmark(after))
            ids, end = cast("tuple[list[bytes], list[bytes]]", reply)
            return Page([text(letter_id) for letter_id in ids], unpack_bookmark(end))
        return Page()

    async def letter(self, letter_id: str, shard: int | None = None) -> RawLetter | None:
        if shard is not None:
            with suppress(Retired):
                return await self._letter(shard, letter_id)
            return None
        async for each in self._all_shards():
            if (found := await self.letter(letter_id, each)) is not None:
                return found
        return None

    async def _letter(self, shard: int, letter_id: str) -> RawLetter | None:
        entries: list[bytes] = []
        while reply := await self._call("letter", shard, letter_id, len(entries)):
            key, reason, buried, attempt, digest_id, size, page = cast(
                "tuple[bytes, bytes, int, int, bytes, int, list[bytes]]", reply
            )
            entries += page
            if len(entries) >= size or not page:
                return RawLetter(letter_id, text(key), text(reason), buried, attempt, text(digest_id), entries)
        return None

    async def _settled(self, letter_id: str, name: str, *arguments: Argument) -> AsyncIterator[object]:
        """Yield the answers of the shards that take the adds, once the letter is in no old shard any more.

        Otherwise, a process that moves it might bring it back after it was taken.
        """
        await self._connected()
        asked = set[int]()
        while left := [shard for shard in self._live(self._current) if shard not in asked]:
            if not asked:
                await self._bring(letter_id)
            asked.add(left[0])
            try:
                yield await self._call(name, left[0], *arguments, repeat=False, settled=True)
            except Retired:
                asked.clear()  # the layout has changed

    async def replay(self, letter_id: str, terms: Terms, own: bool) -> bool:
        limits = terms.limits
        arguments = (letter_id, pack_delays(terms), pack_limits(limits), int(own))
        async for reply in self._settled(letter_id, "replay", *arguments):
            if isinstance(reply, bytes):
                raise InvalidState(f"the timeline of dead letter {letter_id!r} is broken: {text(reply)}")
            match cast("Fields", reply):
                case [b"missing"]:
                    continue
                case [b"open", key]:
                    raise InvalidState(f"timeline {text(key)!r} has a digest under delivery or in a retry wait")
                case [b"full", key, size]:
                    raise LimitExceeded(
                        f"timeline {text(key)!r} would hold {size} records; its capacity is {limits.capacity}"
                    )
                case [status, *_]:
                    return status == b"ready"
                case _:
                    break
        raise InvalidState(f"there is no dead letter {letter_id!r}")

    async def discard(self, letter_id: str) -> bool:
        async for dropped in self._settled(letter_id, "discard", letter_id):
            if dropped == 1:
                return True
        return False
