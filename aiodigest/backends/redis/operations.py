"""Operators' calls on a namespace: look, list, count, check, erase, and change its number of shards.

That moves no timelines: a new layout takes the adds from one moment on, and workers deliver from both until the old one
is empty. Every step of it can be repeated, so that an interrupted change resumes where it stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from typing import cast
from zlib import crc32

from aiodigest.backend import (
    LONGEST,
    SLICE,
    Bookmark,
    Cooling,
    Mute,
    Operations,
    Page,
    Retired,
    StoredDeadLetter,
    StoredTimeline,
)
from aiodigest.backends.redis import scripts
from aiodigest.backends.redis.connections.calls import Connections, LayoutMismatch, Moved
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.layout import RETIRED, Layout
from aiodigest.backends.redis.namespace import BATCH, Namespace
from aiodigest.backends.redis.scripts import Argument, number, text, unpack_counts, unpack_timeline
from aiodigest.errors import AiodigestError, BackendUnavailable, InvalidState
from aiodigest.models import Finding, State
from aiodigest.policy import NO_POLICY

Fields = Sequence[bytes | int]
NO_BOOKMARK = "", "", ""  # from the beginning
ROOT = re.compile(r"\{([A-Za-z0-9_.-]{1,64})\}:layout")  # of a namespace, and not of one of its shards
RESHARDING = (
    "layout", "reshard", "drain", "keep", "carry", "retire", "letter", "discard", "counts", "forget", "remember",
    "look", "mute", "unmute",
)  # fmt: skip
LIMITS = scripts.pack_limits(NO_POLICY.terms.limits)  # of timelines that have stored none


class RedisOperations(Operations):
    """The operators' calls on a namespace."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._keys = f"{{{namespace.name}[:}}]*"  # matches all of them
        self._goal: Layout | None = None  # what `reshard` was asked for, until `drain` has brought it to its end

    # Timelines

    async def look_all(self, key: str) -> list[StoredTimeline]:
        answers = await self._namespace.call_of(key, "look", "", key)
        found = [fields[0] for fields, _ in cast("list[tuple[list[Fields], object]]", answers) if fields]
        return sorted(map(unpack_timeline, found), key=attrgetter("due_ms"))

    async def cooling(self, key: str) -> list[Cooling]:
        answers = await self._namespace.call_of(key, "look", "", key)
        return [Cooling(*map(number, each)) for _, each in cast("list[tuple[object, list[int]]]", answers) if each]

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
                    while page := await self._namespace.read(shard, key, "", "", len(entries) - before, SLICE):
                        entries += page
                        if len(entries) - before > 2 * LONGEST:  # of both lists
                            raise self._namespace.broken(key, f"it has over {2 * LONGEST} entries")
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
            counts = unpack_counts(answer)
            if oldest := counts.pop("oldest_due_ms", 0):
                total["oldest_due_ms"] = min(total["oldest_due_ms"] or oldest, oldest)
            total["overdue_ms"] = max(total["overdue_ms"], counts.pop("overdue_ms", 0))
            if step := counts.pop("stepped_back_ms", 0):
                total["stepped_back_ms"] = max(total["stepped_back_ms"], step)
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
            async for each in self._namespace.each_shard():
                if (found := await self.dead_letter(letter_id, each)) is not None:
                    return found
            return None
        entries: list[bytes] = []
        with suppress(Retired):
            while reply := await self._namespace.call("letter", shard, letter_id, len(entries)):
                letter = cast("tuple[bytes, bytes, int, int, bytes, bytes, int, list[bytes]]", reply)
                key, reason, dead_ms, attempt, digest_id, _, size, page = letter
                names = text(key), text(reason), dead_ms, attempt, text(digest_id)
                if size < 0:
                    return StoredDeadLetter(letter_id, *names, broken=True)
                entries += page
                if len(entries) >= size or not page:
                    return StoredDeadLetter(letter_id, *names, entries)
        return None

    # The namespace

    async def examine(self) -> list[Finding]:
        from aiodigest.backends.redis.diagnostics.namespace import examine  # not needed by workers

        return await examine(self._namespace, await self._namespace.connected())

    async def exists(self) -> bool:
        connections, root = await self._namespace.connected(), self._namespace.root
        told = await connections.command(root, "HMGET", root, "current", "version")
        return any(cast("list[bytes | None]", told))

    async def namespaces(self) -> list[str]:
        connections, found = await self._namespace.opened(), set[str]()
        for server in await connections.find_primaries():
            cursor = b""
            while cursor != b"0":
                cursor, keys = await _scan(server, connections, "{*}:layout", cursor)
                found |= {match[1] for key in keys if (match := ROOT.fullmatch(text(key)))}
        return sorted(found)

    async def erase(self) -> int:
        connections, erased = await self._namespace.connected(), 0
        try:
            for server in await connections.find_primaries():
                cursor = b""
                while cursor != b"0":
                    cursor, keys = await _scan(server, connections, self._keys, cursor)
                    groups: dict[bytes, list[bytes]] = {}
                    for key in keys:
                        tag, _, name = key.partition(b"}")
                        if name.startswith(b":"):
                            groups.setdefault(tag, []).append(key)
                    for tag, group in groups.items():
                        layout = f"{text(tag)}}}:layout"
                        erased += cast("int", await connections.run("erase", layout, ["", "", *group], at=server))
        except Moved:  # and the rest of its keys may be on a server that was looked through before
            problem = f"{self._namespace.url} is unavailable: a slot moved meanwhile; erase again"
            raise BackendUnavailable(problem) from None
        return erased

    async def try_erase(self) -> None:
        connections = await self._namespace.connected()
        for server in await connections.find_primaries():
            await _scan(server, connections, self._keys, b"")

    # Another number of shards

    async def reshard(self, shards: int) -> bool:
        """See ``Operations.reshard``. Raises InvalidState while a change to another number is under way."""
        namespace = self._namespace
        connections = await namespace.connected()
        self._goal = None
        await namespace.permit(*RESHARDING)
        await namespace.look_up()
        old, drained = namespace.layout.current, namespace.layout.drained
        if drained is not None:
            if old.shards != shards:
                raise InvalidState(
                    f"namespace {namespace.name!r} is on its way from {drained.shards} to "
                    f"{old.shards} shards: that must end before it can have {shards}: "
                    f"aiodigest reshard --namespace {namespace.name} --to {old.shards}"
                )
            self._goal = old
            return True
        if old.shards == shards:
            return False
        new = Layout(shards, old.epoch + 1)
        await namespace.note(namespace.root, "current", old)  # if it is new
        mutes = await self._announce_mutes(new)
        change = [old.version, "", new.version]
        begun = await connections.run("reshard", namespace.root, change, replicas=namespace.wait_replicas)
        await namespace.look_up()
        if begun != 1 and namespace.layout.current != new:
            raise InvalidState(f"the layout of namespace {namespace.name!r} was changed by another at this moment")
        self._goal = new
        await self._take_back(mutes)
        return namespace.layout.drained is not None

    async def drain(self) -> dict[str, int]:
        namespace = self._namespace
        connections = await namespace.connected()
        held = Counter[str]()
        if (old := namespace.layout.drained) is not None:
            broken: InvalidState | None = None
            for shard in namespace.shard_map.draining:
                try:
                    held += await self._drain_shard(shard)
                except InvalidState as error:
                    broken = error
            if broken and not held:
                raise broken
            if not held:
                await connections.run("reshard", namespace.root, [old.version, "", ""])
        await namespace.look_up()
        if self._goal is not None and namespace.layout.current.epoch < self._goal.epoch:  # forgotten by a failover
            await self.reshard(self._goal.shards)
            return await self.drain()
        return dict(held)

    async def _mark(self, shard: int) -> str:
        """Refuse those who do not know that a shard is being drained; return its version."""
        namespace, layout = self._namespace, self._namespace.layout.homes[shard].layout
        # once it is empty nobody may find it as it was, so the replicas must know the mark and the end
        mark, replicas = [layout.version, "", layout.draining], namespace.wait_replicas
        marked = await namespace.connections.run("drain", namespace.key(shard, "layout"), mark, replicas=replicas)
        return text(cast("list[bytes]", marked)[1])

    async def _drain_shard(self, shard: int) -> Counter[str]:
        """Bring its end nearer; raise InvalidState if it holds nothing but what is broken, dead letters or mutes."""
        namespace = self._namespace
        home = namespace.layout.homes[shard]
        if await self._mark(shard) == RETIRED:
            return Counter()
        try:
            broken = await self._carry_mutes(shard)
            end: Bookmark | None = None
            while True:
                page = await self.dead_letters(shard, SLICE, end)
                for letter_id in page.items:  # the oldest
                    try:
                        await namespace.move(shard, letter_id)
                    except InvalidState as error:
                        broken.append(error)
                if (end := page.end) is None:
                    break
            await self._move_seen(shard)
            held = unpack_counts(await namespace.call("counts", shard))
            counters = await namespace.call("retire", shard, "")
            if counters is None:  # it is not empty
                left = +Counter(
                    {state: held.get(state, 0) for state in ("waiting", "ready", "leased", "dead", "mutes")}
                )
                if broken and left.keys() <= {"dead", "mutes"} and left.total() == len(broken):
                    raise broken[0]
                return left or await self._drain_shard(shard)  # or something has been delivered meanwhile
            name = f"{home.layout.version}:{home.number}"
            await namespace.call("carry", namespace.shard_map.current.start, name, *cast("list[bytes]", counters))
            if await namespace.call("retire", shard, RETIRED) is None:  # a failover has brought something back
                return await self._drain_shard(shard)
        except Retired:  # another process does the same
            pass
        return Counter()

    async def _move_seen(self, shard: int) -> None:
        """Tell the shards that have its timelines now which of their records were delivered already."""
        namespace, key, moved = self._namespace, "", list[bytes]()
        while reply := await namespace.call("forget", shard, key, *moved):
            name, found = cast("tuple[bytes, list[bytes]]", reply)
            key, moved = text(name), found[::2]
            if found:
                await namespace.call("remember", namespace.shard_map.shard_of(key), key, *found)

    # Mutes hold in every layout. Records that wait under one stay where they are, until they are delivered or end.

    async def _mutes_of(self, shard: int) -> list[StoredTimeline]:
        found: list[StoredTimeline] = []
        end: Bookmark | None = None
        while True:
            page = await self.page(shard, "muted", BATCH, end)
            found += page.items
            if (end := page.end) is None:
                return found

    async def _announce_mutes(self, new: Layout) -> list[StoredTimeline]:
        """Mute in a layout, before it takes any adds, what is muted in the one that does; return these."""
        namespace, groups = self._namespace, dict[int, list[StoredTimeline]]()
        keys = [f"{{{new.tag(namespace.name, place)}}}:layout" for place in range(new.shards)]
        # before the mutes: so all that another process announces is among these
        left = [await self._mutes_left(key, new) for key in keys]
        for shard in namespace.shard_map.current:
            for timeline in await self._mutes_of(shard):
                groups.setdefault(crc32(timeline.key.encode()) % new.shards, []).append(timeline)
        for place, key in enumerate(keys):
            with suppress(LayoutMismatch):  # another process has begun the change
                await self._announce(key, new, groups.get(place, []), left[place])
        return [timeline for group in groups.values() for timeline in group]

    async def _mutes_left(self, key: str, new: Layout) -> list[StoredTimeline]:
        """Return what is muted in a shard that was never used: a process that died has announced it."""
        namespace, end, found = self._namespace, [*NO_BOOKMARK], list[StoredTimeline]()
        with suppress(LayoutMismatch):  # it is used, or was until a failover forgot that
            while True:
                arguments = [new.draining, namespace.time(), "muted", BATCH, *end]
                reply = await namespace.connections.run("look", key, arguments)
                page, end = cast("tuple[list[Fields], list[str]]", reply)
                found += map(unpack_timeline, page)
                if not end:
                    break
        return found

    async def _announce(
        self, key: str, new: Layout, mutes: Sequence[StoredTimeline], left: Sequence[StoredTimeline]
    ) -> None:
        """Announce mutes in a shard instead of those that are left there.

        Until it is used it has the mark of one that takes no adds any more, so that nothing is undone that somebody has
        said after the change; the first who uses it takes the mark back.
        """
        run, replicas, time = self._namespace.connections.run, self._namespace.wait_replicas, self._namespace.time()
        said = {*map(_said, mutes)}
        for each in left:
            if _said(each) not in said:
                arguments = (new.draining, time, each.key, LIMITS, _said(each)[1], 0)
                await run("unmute", key, arguments, replicas=replicas)
        if mutes:
            marked = await run("layout", key, ["version", "", new.draining])
            version = text(cast("list[bytes]", marked)[1])
            for start in range(0, len(mutes), BATCH):
                items = [each for timeline in mutes[start : start + BATCH] for each in _mute_of(timeline)]
                await run("mute", key, (version, time, LIMITS, 1, *items), replicas=replicas)

    async def _take_back(self, announced: Sequence[StoredTimeline]) -> None:
        """Unmute in the new layout what was unmuted in the old one, or muted otherwise, after it was announced."""
        if announced:
            namespace = self._namespace
            for shard in namespace.shard_map.draining:  # from then on who unmutes does so in both
                await self._mark(shard)
            said = {_said(each) for shard in namespace.shard_map.draining for each in await self._mutes_of(shard)}
            for timeline in announced:
                if _said(timeline) not in said:
                    await self._forget_mute(namespace.shard_map.shard_of(timeline.key), timeline)
            for shard in {*map(namespace.shard_map.shard_of, map(attrgetter("key"), announced))}:
                await namespace.call("counts", shard)  # as any call, it takes the mark back

    async def _carry_mutes(self, shard: int) -> list[InvalidState]:
        """Mute in the new layout what is muted in an old shard, and let go there of those under which nothing waits.

        Who mutes or unmutes meanwhile does so in both, the new one first: so what is there stands, and what is gone
        here after it was copied was unmuted. Returns the errors of those that are broken, and stay.
        """
        broken: list[InvalidState] = []
        namespace, groups = self._namespace, dict[int, list[StoredTimeline]]()
        for timeline in await self._mutes_of(shard):
            groups.setdefault(namespace.shard_map.shard_of(timeline.key), []).append(timeline)
        for target, group in groups.items():
            copied = await namespace.call_each("mute", target, [LIMITS, 1], [*map(_mute_of, group)], scripts.done)
            for timeline, is_new in zip(group, copied, strict=True):
                settled = is_new is True or not (timeline.logged or timeline.opened)
                answer = await self._forget_mute(shard, timeline, 1) if settled else is_new
                if settled and answer == 0:
                    await self._forget_mute(target, timeline)
                problem = namespace.broken(timeline.key, text(answer)) if isinstance(answer, bytes) else answer
                if isinstance(problem, InvalidState):
                    broken.append(problem)
                elif isinstance(problem, AiodigestError):
                    raise problem
        return broken

    async def _forget_mute(self, shard: int, timeline: StoredTimeline, only_idle: int = 0) -> object:
        """Unmute a timeline of a shard if its mute is this one; return 0 if it was not muted."""
        return await self._namespace.call("unmute", shard, timeline.key, LIMITS, _said(timeline)[1], only_idle)


def _said(timeline: StoredTimeline) -> tuple[str, str]:
    """Return a mute as shards compare it."""
    return timeline.key, f"{timeline.mute_ms} {timeline.drops:d}"


def _mute_of(timeline: StoredTimeline) -> tuple[Argument, ...]:
    return scripts.pack_mute(timeline.key, Mute(timeline.mute_ms or None, drop=timeline.drops))


async def _scan(
    server: ServerConnections, connections: Connections, keys: str, cursor: bytes
) -> tuple[bytes, list[bytes]]:
    """Return one page of a server's keys that match, and where the next page begins."""
    page = await connections.command("", "SCAN", cursor or 0, "MATCH", keys, "COUNT", SLICE, at=server)
    return cast("tuple[bytes, list[bytes]]", page)
