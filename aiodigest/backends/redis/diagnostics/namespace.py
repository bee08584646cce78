"""The answers of a namespace's shards, and what they mean; the checks judge facts, and ask nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from aiodigest.backend import DEAD_LETTER_TTL_MS, STEP_MS
from aiodigest.backends.redis.connections.calls import Connections, LayoutMismatch, slot_of
from aiodigest.backends.redis.connections.connection import show_address
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.diagnostics.server import (
    SAME_USERS,
    Queries,
    check_tls,
    examine_servers,
    grant,
    in_bytes,
    in_time,
    several,
)
from aiodigest.backends.redis.layout import RETIRED
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import commands_of, load_scripts, text, unpack_counts
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import OVERDUE, Finding, Stats
from aiodigest.records.validation import DEFAULT

DAY_MS = 86_400_000
MANY_DEAD_LETTERS = 1_000
REPAIR = "another program has written it: keep it from the namespace's keys, and see docs/design.md for what is there"
PARTS = ("add", "deliver", "look", "move by hand")  # of the work
ROLES: Sequence[set[str]] = ({"add"}, {"deliver"}, {"look", "move by hand"})  # those of docs/security.md


def scripts_for(part: str) -> list[str]:
    """Return the scripts that a part of the work takes, as their headers say."""
    return [name for name, script in load_scripts().items() if part in script.parts]


@dataclass(slots=True)
class ShardFacts:
    """The answers of one shard."""

    draining: bool = False
    version: str = ""  # of its layout; none: it was never used
    fits: bool = True
    silence: float | None = None  # seconds since a worker was heard of; None: none ever was
    lease: float = 60.0
    held: Counter[str] = field(default_factory=Counter[str])  # what the script `counts` tells
    ended: int = 0  # leases that ended long ago
    stepped: tuple[float, float] | None = None  # by how much the server's clock stepped back today, and how long ago; s
    oldest_dead_letter: float | None = None  # seconds since it became one
    dead_letter_bytes: int = 0
    dead_letter_bound: int = DEFAULT.dead_letters

    @property
    def is_used(self) -> bool:
        return self.version not in ("", RETIRED)


LostShard: TypeAlias = tuple[AiodigestError, int, str]  # out of reach: why, its slot, and its primary


class NamespaceFacts:
    """The answers of a namespace, all asked for by ``read``."""

    def __init__(self, namespace: Namespace, queries: Queries, primaries: int) -> None:
        self._namespace = namespace
        self._queries = queries
        self.primaries = primaries
        self.name = namespace.name
        self.user = queries.user
        self.layout = layout = namespace.layout
        live = layout.current, layout.drained
        self._numbers = [shard for shard, home in enumerate(layout.homes) if home.layout in live]
        self._current = [shard for shard in self._numbers if layout.homes[shard].layout == layout.current]
        self.denied: dict[frozenset[str], list[str]] = {}  # commands that the user may not run, and on which primaries
        self.shards: list[ShardFacts] = []  # in reach
        self.lost: list[LostShard] = []

    async def read(self) -> NamespaceFacts:
        """Ask for the user's rules, and then the shards."""
        # each primary with shards, since servers do not share their rules
        await asyncio.gather(*map(self._ask_rules, {self._place(shard): shard for shard in self._numbers}.values()))
        answers = await asyncio.gather(*map(self._ask, self._numbers))
        self.shards = [answer for answer in answers if isinstance(answer, ShardFacts)]
        self.lost = [answer for answer in answers if not isinstance(answer, ShardFacts)]
        if self._may(*scripts_for("deliver")):  # and listen to the wake-up stream, which no script reads?
            key = self._key(self._current[0], "wake")
            command = ("XREAD", "COUNT", 1, "STREAMS", key, "$")
            try:
                await self._queries.ask("permissions", "the wake-up stream, on which workers sleep", *command, key=key)
            except BackendUnavailable:
                pass  # which is told of its shard
            except ConfigurationError as error:
                if not refused(error):  # the same
                    self._queries.notes.append(Finding("server", "problem", str(error), "take another server"))
        return self

    @property
    def spread(self) -> Sequence[int] | None:
        """The number of shards on each primary of a cluster that has any; None: it is one server."""
        places = Counter(map(self._place, self._current))
        return list(places.values()) if self._queries.connections.url.nodes else None

    @property
    def missing(self) -> frozenset[str]:
        """The commands that the user lacks for a look, on any primary."""
        return commands_of("counts") & frozenset[str]().union(*self.denied)

    @property
    def scope(self) -> str:
        """The limit of what is found: the shards in reach."""
        of = several(len(self.shards) + len(self.lost), "shard")
        return f" (in the {len(self.shards)} of {of} in reach)" if self.lost else ""

    @property
    def was_used(self) -> bool:
        """True if any shard in reach ever was."""
        return any(shard.version for shard in self.shards)

    def total(self, shards: Iterable[ShardFacts] | None = None) -> Counter[str]:
        """Return what shards hold together; None: all of them."""
        return sum((shard.held for shard in (self.shards if shards is None else shards)), Counter[str]())

    def _key(self, shard: int, name: str = "layout") -> str:
        return self._namespace.key(shard, name)

    def _place(self, shard: int) -> str:
        """Return the primary of a shard; '' if there is only one."""
        address = self._queries.connections.primary_of(self._key(shard))
        return show_address(*address) if address else ""

    def _may(self, *scripts: str) -> bool:
        return not commands_of(*scripts) & frozenset[str]().union(*self.denied)

    async def _ask_rules(self, shard: int) -> None:
        """Ask which commands the user may not run on the primary of a shard."""
        with suppress(BackendUnavailable, ConfigurationError):  # which is told of its shards
            self.denied.setdefault(await self._namespace.denied_on(shard), []).append(self._place(shard))

    async def _ask(self, shard: int) -> ShardFacts | LostShard:
        try:
            return await self._read_shard(shard)
        except LayoutMismatch:  # it is being changed at this moment
            return ShardFacts()
        except (BackendUnavailable, ConfigurationError) as error:
            if not self._queries.connections.url.nodes:
                raise
            return error, slot_of(self._key(shard)), self._place(shard)
        except AiodigestError as error:
            self._queries.notes.append(Finding("shards", "problem", f"a shard is broken: {error}", REPAIR))
            return ShardFacts()

    async def _read_shard(self, shard: int) -> ShardFacts:
        layout, key = self.layout.homes[shard].layout, self._key(shard)
        facts, subject = ShardFacts(draining=layout != self.layout.current), "who delivers"
        fields = "version", "seen", "lease", "hold", "clock", "shift", "stepped", "step"
        reply = await self._queries.ask("workers", subject, "HMGET", key, *fields, key=key)
        clock = await self._queries.ask("workers", subject, "TIME", key=key)
        if reply is None or clock is None:
            return facts
        version, *marks = cast("list[bytes | None]", reply)
        facts.version = text(version or b"")
        facts.fits = facts.version in ("", layout.version) or (
            facts.draining and facts.version in (layout.draining, RETIRED)
        )
        if not facts.is_used:
            return facts
        seconds, micros = map(int, cast("list[bytes]", clock))
        server_ms = seconds * 1000 + micros // 1000
        numbers = [mark if mark and mark.isdigit() and len(mark) < 15 else b"0" for mark in marks]
        told = zip(fields[1:6], marks, numbers, strict=False)
        if strange := [name for name, mark, number in told if (mark or b"0") != number]:
            message = f"a shard's layout has no number in {', '.join(strange)}: the next claim mends that"
            self._queries.notes.append(Finding("shards", "problem", message, REPAIR))
        seen_ms, lease_ms, hold_ms, clock_ms, shift_ms, stepped_ms, step_ms = map(int, numbers)
        now_ms = server_ms + shift_ms  # by the shard's clock
        if (behind_ms := clock_ms - now_ms) > STEP_MS:  # no script has met that step yet
            now_ms = stepped_ms = clock_ms
            step_ms = behind_ms
        if step_ms and now_ms - stepped_ms < DAY_MS:
            facts.stepped = step_ms / 1000, max(0, now_ms - stepped_ms) / 1000
        if seen_ms:
            facts.lease, facts.silence = lease_ms / 1000, max(0, now_ms - seen_ms) / 1000
        if self._may("counts"):
            facts.held = Counter(unpack_counts(await self._queries.connections.run("counts", key, (facts.version, ""))))
        if facts.held["leased"] and hold_ms <= now_ms:  # else nothing is recovered at this time
            ended = self._key(shard, "leased"), "-inf", now_ms - int(2000 * facts.lease)
            reply = await self._queries.ask("leases", "leases that ended", "ZCOUNT", *ended, key=key)
            facts.ended = reply if isinstance(reply, int) else 0
        if facts.held["dead"]:
            first = self._key(shard, "dead"), f"({now_ms - DEAD_LETTER_TTL_MS}", "+inf", "WITHSCORES", "LIMIT", 0, 1
            if reply := await self._queries.ask("dead letters", "the oldest", "ZRANGEBYSCORE", *first, key=key):
                facts.oldest_dead_letter = (now_ms - float(cast("list[bytes]", reply)[1])) / 1000
            sizes = self._key(shard, "sizes")
            reply = await self._queries.ask("dead letters", "their size", "HMGET", sizes, "", "most", key=sizes)
            size, bound = cast("list[bytes | None]", reply or [None, None])
            facts.dead_letter_bytes = int(size) if size and size.isdigit() else 0
            facts.dead_letter_bound = int(bound) if bound and bound.isdigit() else DEFAULT.dead_letters
        return facts


async def examine(namespace: Namespace, connections: Connections) -> list[Finding]:
    """Check a namespace and its servers, and change nothing. Raises BackendUnavailable if no server answers."""
    await namespace.look_up()
    primaries = await connections.find_primaries()
    servers, queries = await examine_servers(namespace, connections, primaries), Queries(connections)
    facts = await NamespaceFacts(namespace, queries, len(primaries)).read()
    found = [finding for check in CHECKS for finding in check(facts)]
    trust = check_tls(connections.url, connections.timeout)
    return [*servers, *trust, *found, *dict.fromkeys(queries.notes)]


# Checks


def check_permissions(facts: NamespaceFacts) -> Iterator[Finding]:
    if not facts.denied:
        return
    user, denied = facts.user, frozenset[str].intersection(*facts.denied)
    lacks = {part: commands_of(*scripts_for(part)) & denied for part in PARTS}
    whole = [part for part, missing in lacks.items() if not missing]
    may = ", ".join(whole)
    for here, places in facts.denied.items():
        if more := here - denied:
            message = f"{', '.join(places)}: user {user!r} lacks there what it has elsewhere: {listed(more)}"
            yield Finding("permissions", "problem", message, SAME_USERS)
    if not any(lacks.values()):
        yield Finding("permissions", "ok", f"user {user!r} may {may}")
        return
    parts = [f"to {part}: {listed(missing)}" for part, missing in lacks.items() if missing]
    message = f"user {user!r} may {may or 'do nothing whole'}, and lacks, {'; '.join(parts)}"
    message += " (docs/security.md has a rule for each role)"
    # it need not be able to do another role's work
    has_role = any(role <= {*whole} for role in ROLES)
    remedy = "" if has_role else grant(user, frozenset[str]().union(*lacks.values()))
    yield Finding("permissions", "note" if may else "problem", message, remedy)


def check_reach(facts: NamespaceFacts) -> Iterator[Finding]:
    refusing = [error for error, *_ in facts.lost if isinstance(error, ConfigurationError)]
    moving = [(str(slot), primary) for error, slot, primary in facts.lost if "being moved" in str(error)]
    if refusing:
        message = f"{several(len(refusing), 'shard')} out of reach: the servers refuse user {facts.user!r}"
        yield Finding("shards", "problem", message, SAME_USERS)
    if moving:
        slots = " and ".join(slot for slot, _ in moving)
        message = f"{several(len(moving), 'shard')} out of reach during the move of slot {slots} to another primary"
        remedy = f"let the move end; if it was broken off: redis-cli --cluster fix {moving[0][1]}"
        yield Finding("shards", "problem", message, remedy)
    if away := len(facts.lost) - len(refusing) - len(moving):
        message = f"{several(away, 'shard')} out of reach: nothing is added to them or delivered from them"
        yield Finding("shards", "problem", message, "bring their primaries back, or fail over to replicas")


def check_layout(facts: NamespaceFacts) -> Iterator[Finding]:
    count = several(facts.layout.current.shards, "shard")
    if strange := sorted({shard.version for shard in facts.shards if not shard.fits}):
        message = f"a shard has the layout {', '.join(strange)}, and the namespace has {facts.layout.current.version}"
        yield Finding("shards", "problem", message, REPAIR)
    if facts.layout.drained is not None:
        held = facts.total(shard for shard in facts.shards if shard.draining)
        left = ", ".join(f"{held[state]:,} {state}" for state in ("waiting", "ready", "leased", "dead"))
        left += f", {held['mutes']:,} muted" if held["mutes"] else ""
        message = f"it goes over from {facts.layout.drained.shards} to {count}; the old ones have {left}"
        remedy = f"unless it runs: aiodigest reshard --namespace {facts.name} --to {facts.layout.current.shards}"
        yield Finding("shards", "note", message, remedy)
    if facts.lost:
        return
    if (spread := facts.spread) is None:
        yield Finding("shards", "ok", f"{count} on one server")
        return
    message = f"{count} on {len(spread)} of {several(facts.primaries, 'primary', 'primaries')}"
    if len(spread) == facts.primaries:
        yield Finding("shards", "ok", f"{message}: {', '.join(map(str, spread))}")
    elif facts.was_used:  # else nobody has said yet how many it is to have
        remedy = f"aiodigest reshard --namespace {facts.name} --to 16; or shards=16 for a new namespace"
        yield Finding("shards", "note", f"{message}: the others have nothing to do", remedy)


def check_clock(facts: NamespaceFacts) -> Iterator[Finding]:
    if steps := [shard.stepped for shard in facts.shards if shard.stepped]:
        step, ago = max(steps)
        message = f"the server's stepped back by {in_time(step)}, {in_time(ago)} ago: what waited is due as before"
        remedy = "find out what set it; NTP that slews the clock lets it never step"
        yield Finding("clock", "note", message, remedy)


def check_contents(facts: NamespaceFacts) -> Iterator[Finding]:
    if facts.shards and not facts.was_used:
        message = f"namespace {facts.name!r} was never used here{facts.scope}"
        yield Finding("namespace", "note", message, "is it the right name, on the right server?")
    elif facts.was_used and facts.missing:
        message = f"what it holds: not looked at, since user {facts.user!r} may not look"
        yield Finding("namespace", "note", message, grant(facts.user, facts.missing))
    elif facts.was_used:
        held = facts.total()
        sizes = ", ".join(f"{held[state]:,} {state}" for state in ("waiting", "ready", "leased"))
        message = f"timelines: {sizes}; {several(held['digests'], 'digest')} delivered so far{facts.scope}"
        yield Finding("namespace", "ok", message)


def check_workers(facts: NamespaceFacts) -> Iterator[Finding]:
    used = [shard for shard in facts.shards if shard.is_used]
    # after half a lease the store, too, takes all workers for gone
    silent = [shard for shard in used if shard.silence is None or shard.silence > shard.lease / 2]
    heard = [shard.silence for shard in silent or used if shard.silence is not None]
    if not used:
        return
    if not silent:
        yield Finding("workers", "ok", f"at least one; last seen {in_time(max(heard))} ago{facts.scope}")
        return
    where = "" if len(silent) == len(used) else f"of {len(silent)} of {several(len(used), 'shard')} "
    last = f"the last sign of a worker is {in_time(min(heard))} old" if heard else "there never was a worker"
    size = sum(shard.held[state] for shard in silent for state in ("waiting", "ready", "leased"))
    held = f", and {several(size, 'timeline')} held" if size else ""
    remedy = "start a worker: aiodigest run MODULE:ENGINE, or engine.delivering() in an app"
    yield Finding("workers", "problem" if size else "note", f"nobody delivers {where}({last}){held}", remedy)


def check_schedule(facts: NamespaceFacts) -> Iterator[Finding]:
    if facts.missing or not facts.was_used:
        return
    overdue = max(shard.held["overdue_ms"] for shard in facts.shards) / 1000
    health = Stats(overdue=overdue).health()
    if health.ok:
        message = f"nothing has been due for over {OVERDUE:.0f} s{facts.scope}"
        yield Finding("overdue", "note" if facts.lost else "ok", message, value=overdue)
    else:
        remedy = "start a worker, or more of them; one in backoff mode says in its log why it rests"
        yield Finding("overdue", "problem", health.reason, remedy, overdue)
    if ended := sum(shard.ended for shard in facts.shards):
        message = f"{several(ended, 'lease')} ended long ago, and nobody took over"
        remedy = "start a worker, or more of them: each delivers these digests again, one at a time"
        yield Finding("leases", "problem", message, remedy, float(ended))


def check_dead_letters(facts: NamespaceFacts) -> Iterator[Finding]:
    if facts.missing or not facts.was_used:
        return
    dead = facts.total()["dead"]
    if not dead:
        yield Finding("dead letters", "ok", f"none{facts.scope}", value=0.0)
        return
    ages = [shard.oldest_dead_letter for shard in facts.shards if shard.oldest_dead_letter is not None]
    message = several(dead, "dead letter") + (f", the oldest {in_time(max(ages))} old" if ages else "") + facts.scope
    remedy = f"aiodigest dead list --namespace {facts.name} says why; dead replay delivers one again"
    yield Finding("dead letters", "problem" if dead >= MANY_DEAD_LETTERS else "note", message, remedy, float(dead))
    fullest = max(facts.shards, key=lambda shard: shard.dead_letter_bytes / shard.dead_letter_bound)
    if (size := fullest.dead_letter_bytes) >= fullest.dead_letter_bound / 2:
        message = f"a shard's take {in_bytes(size)}: over {in_bytes(fullest.dead_letter_bound)} the oldest are let go"
        yield Finding("dead letters", "problem", message, remedy, float(size))


CHECKS: Sequence[Callable[[NamespaceFacts], Iterator[Finding]]] = (
    check_permissions, check_reach, check_layout, check_clock, check_contents, check_workers, check_schedule,
    check_dead_letters,
)  # fmt: skip


def listed(commands: frozenset[str]) -> str:
    return " ".join(sorted(commands)).lower()
