"""A look at a namespace's servers and its contents there, which changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from typing import cast

from aiodigest.backends.redis.connections.cluster import ClusterLink
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.server import Link
from aiodigest.backends.redis.connections.shared import AnyLink
from aiodigest.backends.redis.connections.transport import place
from aiodigest.backends.redis.diagnostics.diagnosis import Facts, SlowCall, judge
from aiodigest.backends.redis.diagnostics.interview import SAME_USERS, Interview
from aiodigest.backends.redis.diagnostics.shards import ShardCheck
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import COMMANDS, load_script, text
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Finding

SETTINGS = ("save", "appendfsync", "min-replicas-to-write")
STRANGE = "unknown there, disabled, or has another password"
TRIPS = 20
SLOW_CALLS = 128  # looked at, of those in the server's log: as many as it keeps unless it is told otherwise


async def check_up(namespace: Namespace, link: AnyLink) -> list[Finding]:
    """Check a namespace and its servers. Raises BackendUnavailable if no server answers."""
    user = link.target.user
    await namespace.look_up()
    servers = await _check_servers(namespace, link, user)
    return [*servers, *await ShardCheck(namespace, Interview(link, user)).run()]


async def _check_servers(namespace: Namespace, link: AnyLink, user: str) -> list[Finding]:
    """Check each primary; a finding that several share is reported once."""
    primaries = await link.find_primaries()
    told = await asyncio.gather(*(_check_server(namespace, one, user, link) for one in primaries))
    if len(primaries) == 1:
        return told[0]
    places: dict[Finding, list[str]] = {}
    for primary, findings in zip(primaries, told, strict=True):
        for finding in findings:
            places.setdefault(finding, []).append(_place(primary))
    checks = list(dict.fromkeys(finding.check for finding in places))
    found = sorted(places, key=lambda finding: checks.index(finding.check))
    return [replace(one, message=f"{_where(places[one], len(primaries))}: {one.message}") for one in found]


def _place(link: Link) -> str:
    return place(link.target.settings.get("host"), link.target.settings.get("port"))


def _where(places: Sequence[str], of: int) -> str:
    return f"all {of} primaries" if len(places) == of else ", ".join(places)


async def _check_server(namespace: Namespace, server: Link, user: str, link: AnyLink) -> list[Finding]:
    interview = Interview(server, user)
    try:
        facts = await _ask(namespace, interview)
    except BackendUnavailable as error:
        if not isinstance(link, ClusterLink):
            raise
        remedy = "bring it back, or fail over to its replica"
        return [Finding("server", "problem", f"what it holds is out of reach: {error}", remedy)]
    except ConfigurationError as error:
        if not isinstance(link, ClusterLink):
            raise
        told = f"user {user!r} is {STRANGE}" if refused(error) == "login" else str(error)
        return [Finding("permissions", "problem", told, SAME_USERS)]
    strangers = await _check_replicas(namespace, server, user, facts) if facts.failover else []
    return [*judge(facts), *strangers, *interview.notes]


async def _check_replicas(namespace: Namespace, server: Link, user: str, facts: Facts) -> list[Finding]:
    """Find replicas that do not know the user: one of them may be the next primary."""
    target, found = server.target, list[Finding]()
    for replica in facts.replicas:
        address = target.remap(replica) if target.remap else replica
        link = Link(replace(target.at(address), sentinels=None), namespace.timeout)
        try:
            await link.command("", "TIME")
        except AiodigestError as error:
            if refused(error) == "login":
                message = f"on its replica {place(*address)} user {user!r} is {STRANGE}: a failover to it shuts it out"
                found.append(Finding("permissions", "note", message, SAME_USERS))
        finally:
            await link.close()
    return found


async def _ask(namespace: Namespace, interview: Interview) -> Facts:
    """Ask a server for its facts."""
    facts = Facts(wait_replicas=namespace.wait_replicas)
    target = namespace.target
    facts.failover = "cluster" if target.nodes else "sentinel" if target.sentinels else ""
    facts.info = _lines(await interview.ask("server", "version, memory, persistence and replicas", "INFO"))
    facts.settings = await _settings(interview)
    if target.nodes:
        facts.cluster = _lines(await interview.ask("cluster", "its state", "CLUSTER", "INFO"))
        await interview.ask("cluster", "slots that are on their way to it", "CLUSTER", "NODES")  # workers ask so too
    async with aclosing(_trips(interview)) as trips:
        samples = [sample async for sample in trips]
    facts.trips = [trip for trip, _ in samples]
    facts.offset = min(samples)[1] if samples else None  # the quickest answer knows best
    log = await interview.ask("slow scripts", "the log of slow calls", "SLOWLOG", "GET", SLOW_CALLS)
    if log is not None:
        calls = cast("list[list[object]]", log)
        now = time.time() + (facts.offset or 0)
        facts.logged, facts.slow = len(calls), [slow for call in calls if (slow := _ours(namespace, call, now))]
    return facts


async def _settings(interview: Interview) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for setting in SETTINGS:
        reply = await interview.ask("settings", ", ".join(SETTINGS), "CONFIG", "GET", setting)
        if reply is None:
            break
        words = [text(word) for word in cast("list[bytes]", reply)]
        found.update(zip(words[::2], words[1::2], strict=True))
    return found


async def _trips(interview: Interview) -> AsyncGenerator[tuple[float, float]]:
    """Time round trips, each with how far the server's clock is ahead of this machine's; seconds."""
    for _ in range(TRIPS):
        here, began = time.time(), time.perf_counter()
        reply = await interview.ask("clock", "clock and round trip", "TIME")
        trip = time.perf_counter() - began
        if reply is None:
            return
        seconds, micros = cast("list[bytes]", reply)
        yield trip, int(seconds) + int(micros) / 1e6 - (here + trip / 2)


def _lines(reply: object) -> Mapping[str, str]:
    """Parse INFO into fields by name."""
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _ours(namespace: Namespace, call: Sequence[object], now: float) -> SlowCall | None:
    """Return a slow call if it is of a script on the namespace's keys."""
    _, began, micros, words, *_ = cast("tuple[int, int, int, list[bytes], *tuple[object, ...]]", call)
    name = namespace.name
    if len(words) < 4 or words[0].upper() not in (b"EVALSHA", b"EVAL"):
        return None
    if not words[3].startswith((f"{{{name}}}:".encode(), f"{{{name}:".encode())):
        return None
    return SlowCall(_names().get(text(words[1]), "a script"), micros / 1e6, max(0.0, now - began))


@cache
def _names() -> Mapping[str, str]:
    """Map the scripts' digests to their names."""
    return {load_script(name).sha: name for name in COMMANDS}
