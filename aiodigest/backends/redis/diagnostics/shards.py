"""Checks of a namespace: workers on its shards, and timelines or dead letters stuck in them for too long."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from aiodigest.backend import DEAD_LETTER_TTL_MS
from aiodigest.backends.redis.connections.cluster import ClusterLink, slot_of
from aiodigest.backends.redis.connections.server import LayoutMismatch
from aiodigest.backends.redis.connections.transport import place
from aiodigest.backends.redis.diagnostics.diagnosis import in_time
from aiodigest.backends.redis.diagnostics.interview import SAME_USERS, Interview
from aiodigest.backends.redis.layout import RETIRED
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import COMMANDS, number, text
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import OVERDUE, Finding, Stats

MANY_LETTERS = 1_000
REPAIR = "another program has written it: keep it from the namespace's keys, and see docs/design.md for what is there"
PARTS: Mapping[str, Sequence[str]] = {  # of the work, and the scripts that it takes
    "add": ("layout", "add"),
    "deliver": ("layout", "claim", "renew", "close", "retry", "release"),
    "look": ("look", "read", "counts", "letters", "letter"),
    "move by hand": ("flush", "delete", "remove", "reschedule", "replay", "discard"),
}
ROLES: Sequence[set[str]] = ({"add"}, {"deliver"}, {"look", "move by hand"})  # those of docs/security.md


def commands_of(*scripts: str) -> frozenset[str]:
    return frozenset[str]().union(*(COMMANDS[script] for script in scripts))


def listed(commands: frozenset[str]) -> str:
    return " ".join(sorted(commands)).lower()


def several(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


@dataclass(slots=True)
class Shard:
    """The answers of one shard."""

    draining: bool
    version: str = ""  # of its layout; none: it was never used
    fits: bool = True
    silence: float | None = None  # seconds since a worker was heard of; None: none ever was
    lease: float = 60.0
    held: Counter[str] = field(default_factory=Counter[str])  # what the script `counts` tells
    ended: int = 0  # leases that ended long ago
    oldest_letter: float | None = None  # seconds since it was buried

    @property
    def is_used(self) -> bool:
        return self.version not in ("", RETIRED)

    @property
    def is_served(self) -> bool:
        """True if a worker was heard of in time: after half a lease the store, too, takes all of them for gone."""
        return self.silence is not None and self.silence <= self.lease / 2

    @property
    def size(self) -> int:
        """The number of timelines it holds."""
        return self.held["waiting"] + self.held["ready"] + self.held["leased"]


class ShardCheck:
    """A single look at a namespace."""

    def __init__(self, namespace: Namespace, interview: Interview) -> None:
        self._namespace = namespace
        self._interview = interview
        self._denied: dict[frozenset[str], list[str]] = {}  # commands that the user may not run, and on which primaries
        self._missing = frozenset[str]()  # what the user lacks for a look
        self._lost: dict[int, AiodigestError] = {}  # shards out of reach, and why
        self._scope = ""  # limits the findings to the shards in reach

    async def run(self) -> list[Finding]:
        numbers = self._namespace.shard_map.live
        await self._ask_rules(numbers)
        asked = await asyncio.gather(*map(self._ask, numbers))
        shards = [shard for shard in asked if shard is not None]
        if self._lost:
            self._scope = f" (in the {len(shards)} of {several(len(numbers), 'shard')} in reach)"
        found = [*self._permissions(), *self._reach(), *self._layout(shards)]
        if shards and not any(shard.version for shard in shards):
            message = f"namespace {self._namespace.name!r} was never used here{self._scope}"
            found.append(Finding("namespace", "note", message, "is it the right name, on the right server?"))
        elif shards:
            found += [*self._holds(shards), *self._workers(shards), *self._schedule(shards), *self._letters(shards)]
        await self._listen()
        return [*found, *dict.fromkeys(self._interview.notes)]

    # Asking

    async def _ask_rules(self, numbers: Sequence[int]) -> None:
        """Ask each primary with shards which commands the user may not run: servers do not share their rules."""

        async def ask(where: str, shard: int) -> None:
            with suppress(BackendUnavailable, ConfigurationError):  # which is told of its shards
                denied = await self._namespace.denied_on(shard)
                self._denied.setdefault(denied, []).append(where)

        await asyncio.gather(*(ask(*each) for each in {self._place(shard): shard for shard in numbers}.items()))
        self._missing = commands_of("counts") & frozenset[str]().union(*self._denied)

    def _place(self, number: int) -> str:
        """Return the primary of a shard; '' if there is only one."""
        link = self._interview.link
        address = link.place_of(self._namespace.key(number, "layout")) if isinstance(link, ClusterLink) else None
        return place(*address) if address else ""

    async def _ask(self, number: int) -> Shard | None:
        """Ask a shard; None if it is out of reach."""
        try:
            return await self._shard(number)
        except LayoutMismatch:  # it is being changed at this moment
            return Shard(draining=False)
        except (BackendUnavailable, ConfigurationError) as error:
            if not self._namespace.target.nodes:
                raise
            self._lost[number] = error
            return None
        except AiodigestError as error:
            self._interview.notes.append(Finding("shards", "problem", f"a shard is broken: {error}", REPAIR))
            return Shard(draining=False)

    async def _shard(self, number: int) -> Shard:
        home, key = self._namespace.layout.homes[number], self._namespace.key(number, "layout")
        shard = Shard(draining=home.layout != self._namespace.layout.current)
        reply = await self._interview.ask(
            "workers", "who delivers", "HMGET", key, "version", "seen", "lease", "hold", key=key
        )
        clock = await self._interview.ask("workers", "who delivers", "TIME", key=key)
        if reply is None or clock is None:
            return shard
        version, *marks = cast("list[bytes | None]", reply)
        shard.version = text(version or b"")
        fitting = [home.layout.version, *([home.layout.draining, RETIRED] if shard.draining else [])]
        shard.fits = shard.version in ("", *fitting)
        if not shard.is_used:
            return shard
        seconds, micros = map(int, cast("list[bytes]", clock))
        now_ms = seconds * 1000 + micros // 1000
        seen_ms, lease_ms, hold_ms = [int(mark or 0) for mark in marks]
        if seen_ms:
            shard.lease, shard.silence = lease_ms / 1000, max(0, now_ms - seen_ms) / 1000
        if not self._missing:
            await self._look(number, shard, now_ms, hold_ms)
        return shard

    async def _look(self, at: int, shard: Shard, now_ms: int, hold_ms: int) -> None:
        """Look up a shard's contents."""
        key, leased, dead = [self._namespace.key(at, name) for name in ("layout", "leased", "dead")]
        counts = await self._interview.link.run("counts", key, (shard.version, ""), repeat=True)
        words = cast("list[bytes | int]", counts)
        shard.held.update({text(word): number(value) for word, value in zip(words[::2], words[1::2], strict=True)})
        if shard.held["leased"] and hold_ms <= now_ms:  # else nothing is recovered at this time
            end = now_ms - int(2000 * shard.lease)
            ended = await self._interview.ask("leases", "leases that ended", "ZCOUNT", leased, "-inf", end, key=key)
            shard.ended = ended if isinstance(ended, int) else 0
        if shard.held["dead"]:
            first = (dead, f"({now_ms - DEAD_LETTER_TTL_MS}", "+inf", "WITHSCORES", "LIMIT", 0, 1)
            reply = await self._interview.ask("dead letters", "the oldest", "ZRANGEBYSCORE", *first, key=key)
            if reply:
                shard.oldest_letter = (now_ms - float(cast("list[bytes]", reply)[1])) / 1000

    async def _listen(self) -> None:
        """Check that the user may hear the doorbell, which no script reads."""
        if not commands_of(*PARTS["deliver"]) & frozenset[str]().union(*self._denied):
            key = self._namespace.key(self._namespace.shard_map.current.start, "wake")
            doorbell = ("XREAD", "COUNT", 1, "STREAMS", key, "$")
            with suppress(BackendUnavailable, ConfigurationError):  # which is told of its shard
                await self._interview.ask("permissions", "the doorbell, which workers sleep on", *doorbell, key=key)

    # Judging

    def _permissions(self) -> Iterator[Finding]:
        user = self._interview.user
        if not self._denied:
            return
        denied = frozenset[str].intersection(*self._denied)
        lacks = {part: commands_of(*scripts) & denied for part, scripts in PARTS.items()}
        whole = [part for part, missing in lacks.items() if not missing]
        may = ", ".join(whole)
        for here, places in self._denied.items():
            if more := here - denied:
                message = f"{', '.join(places)}: user {user!r} lacks there what it has elsewhere: {listed(more)}"
                yield Finding("permissions", "problem", message, SAME_USERS)
        if not any(lacks.values()):
            yield Finding("permissions", "ok", f"user {user!r} may {may}")
            return
        parts = [f"to {part}: {listed(missing)}" for part, missing in lacks.items() if missing]
        message = f"user {user!r} may {may or 'do nothing whole'}, and lacks, {'; '.join(parts)}"
        message += " (docs/security.md has a rule for each role)"
        if any(role <= {*whole} for role in ROLES):  # it need not be able to do another role's work
            remedy = ""
        else:
            remedy = self._interview.allow(*frozenset[str]().union(*lacks.values()))
        yield Finding("permissions", "note" if may else "problem", message, remedy)

    def _reach(self) -> Iterator[Finding]:
        refusing = [shard for shard, error in self._lost.items() if isinstance(error, ConfigurationError)]
        moving = [shard for shard, error in self._lost.items() if "being moved" in str(error)]
        if refusing:
            message = (
                f"{several(len(refusing), 'shard')} out of reach: the servers refuse user {self._interview.user!r}"
            )
            yield Finding("shards", "problem", message, SAME_USERS)
        if moving:
            slots = " and ".join(str(slot_of(self._namespace.key(shard, "layout"))) for shard in moving)
            message = f"{several(len(moving), 'shard')} out of reach during the move of slot {slots} to another primary"
            remedy = f"let the move end; if it was broken off: redis-cli --cluster fix {self._place(moving[0])}"
            yield Finding("shards", "problem", message, remedy)
        if away := len(self._lost) - len(refusing) - len(moving):
            message = f"{several(away, 'shard')} out of reach: nothing is added to them or delivered from them"
            yield Finding("shards", "problem", message, "bring their primaries back, or fail over to replicas")

    def _layout(self, shards: Sequence[Shard]) -> Iterator[Finding]:
        name, current = self._namespace.name, self._namespace.layout.current
        if strange := sorted({shard.version for shard in shards if not shard.fits}):
            message = f"a shard has the layout {', '.join(strange)}, and the namespace has {current.version}"
            yield Finding("shards", "problem", message, REPAIR)
        if (old := self._namespace.layout.drained) is not None:
            held = sum((shard.held for shard in shards if shard.draining), Counter[str]())
            left = ", ".join(f"{held[state]:,} {state}" for state in ("waiting", "ready", "leased", "dead"))
            message = f"it goes over from {old.shards} to {several(current.shards, 'shard')}; the old ones have {left}"
            remedy = f"unless it runs: aiodigest reshard --namespace {name} --to {current.shards}"
            yield Finding("shards", "note", message, remedy)
        count, link = several(current.shards, "shard"), self._interview.link
        if self._lost:
            return
        if not isinstance(link, ClusterLink):
            yield Finding("shards", "ok", f"{count} on one server")
            return
        keys = [self._namespace.key(shard, "layout") for shard in self._namespace.shard_map.current]
        each = Counter(link.place_of(key) for key in keys)
        message = f"{count} on {len(each)} of {several(len(link.primaries), 'primary', 'primaries')}"
        if len(each) < len(link.primaries):
            if not any(shard.version for shard in shards):
                return  # nobody has said yet how many it is to have
            remedy = f"aiodigest reshard --namespace {name} --to 16; or shards=16 for a new namespace"
            yield Finding("shards", "note", f"{message}: the others have nothing to do", remedy)
        else:
            yield Finding("shards", "ok", f"{message}: {', '.join(str(size) for size in each.values())}")

    def _holds(self, shards: Sequence[Shard]) -> Iterator[Finding]:
        if self._missing:
            message = f"what it holds: not looked at, since user {self._interview.user!r} may not look"
            yield Finding("namespace", "note", message, self._interview.allow(*self._missing))
            return
        held = sum((shard.held for shard in shards), Counter[str]())
        sizes = ", ".join(f"{held[state]:,} {state}" for state in ("waiting", "ready", "leased"))
        yield Finding(
            "namespace", "ok", f"timelines: {sizes}; {several(held['digests'], 'digest')} delivered so far{self._scope}"
        )

    def _workers(self, shards: Sequence[Shard]) -> Iterator[Finding]:
        used = [shard for shard in shards if shard.is_used]
        silent = [shard for shard in used if not shard.is_served]
        heard = [shard.silence for shard in silent or used if shard.silence is not None]
        if not used:
            return
        if not silent:
            yield Finding("workers", "ok", f"there are: the last sign of one is {in_time(max(heard))} old{self._scope}")
            return
        where = "" if len(silent) == len(used) else f"of {len(silent)} of {several(len(used), 'shard')} "
        last = f"the last sign of a worker is {in_time(min(heard))} old" if heard else "there never was a worker"
        size = sum(shard.size for shard in silent)
        held = f", and {several(size, 'timeline')} held" if size else ""
        remedy = "start a worker: aiodigest run MODULE:ENGINE, or engine.delivering() in an app"
        yield Finding("workers", "problem" if size else "note", f"nobody delivers {where}({last}){held}", remedy)

    def _schedule(self, shards: Sequence[Shard]) -> Iterator[Finding]:
        if self._missing:
            return
        overdue = max(shard.held["overdue_ms"] for shard in shards) / 1000
        health = Stats(overdue=overdue).health()
        if health.ok:
            message = f"nothing has been due for over {OVERDUE:.0f} s{self._scope}"
            yield Finding("overdue", "note" if self._lost else "ok", message, value=overdue)
        else:
            remedy = "start a worker, or more of them; one in backoff mode says in its log why it rests"
            yield Finding("overdue", "problem", health.reason, remedy, overdue)
        if ended := sum(shard.ended for shard in shards):
            message = f"{several(ended, 'lease')} ended long ago, and nobody took over"
            yield Finding("leases", "problem", message, "start a worker: it delivers these digests again", float(ended))

    def _letters(self, shards: Sequence[Shard]) -> Iterator[Finding]:
        if self._missing:
            return
        dead = sum(shard.held["dead"] for shard in shards)
        if not dead:
            yield Finding("dead letters", "ok", f"none{self._scope}", value=0.0)
            return
        ages = [shard.oldest_letter for shard in shards if shard.oldest_letter is not None]
        oldest = f", the oldest {in_time(max(ages))} old" if ages else ""
        remedy = f"aiodigest dead list --namespace {self._namespace.name} says why; dead replay delivers one again"
        level = "problem" if dead >= MANY_LETTERS else "note"
        yield Finding(
            "dead letters", level, f"{several(dead, 'dead letter')}{oldest}{self._scope}", remedy, float(dead)
        )
