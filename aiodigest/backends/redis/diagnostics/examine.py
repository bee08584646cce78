"""A look at a namespace and its servers, which changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from aiodigest.backends.redis.connections.connection import show_address
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.connections.shared import Connections
from aiodigest.backends.redis.diagnostics.namespace import NamespaceReader, check_namespace
from aiodigest.backends.redis.diagnostics.queries import SAME_USERS, Queries
from aiodigest.backends.redis.diagnostics.server import ServerFacts, check_server, read_server
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Finding

STRANGE = "unknown there, disabled, or has another password"


async def examine(namespace: Namespace, connections: Connections) -> list[Finding]:
    """Check a namespace and its servers. Raises BackendUnavailable if no server answers."""
    await namespace.look_up()
    servers, queries = await _examine_servers(namespace, connections), Queries(connections)
    facts = await NamespaceReader(namespace, queries).read()
    return [*servers, *check_namespace(facts), *dict.fromkeys(queries.notes)]


async def _examine_servers(namespace: Namespace, connections: Connections) -> list[Finding]:
    """Check each primary; a finding that several share is reported once."""
    primaries = await connections.find_primaries()
    told = await asyncio.gather(*(_examine_server(namespace, server) for server in primaries))
    if len(primaries) == 1:
        return told[0]
    places: dict[Finding, list[str]] = {}
    for primary, findings in zip(primaries, told, strict=True):
        for finding in findings:
            places.setdefault(finding, []).append(_place(primary))
    checks = list(dict.fromkeys(finding.check for finding in places))
    found = sorted(places, key=lambda finding: checks.index(finding.check))
    return [replace(one, message=f"{_where(places[one], len(primaries))}: {one.message}") for one in found]


def _place(server: ServerConnections) -> str:
    return show_address(server.url.settings.get("host"), server.url.settings.get("port"))


def _where(places: Sequence[str], of: int) -> str:
    return f"all {of} primaries" if len(places) == of else ", ".join(places)


async def _examine_server(namespace: Namespace, server: ServerConnections) -> list[Finding]:
    queries = Queries(server)
    try:
        facts = await read_server(queries, namespace.name, namespace.wait_replicas)
    except (BackendUnavailable, ConfigurationError) as error:
        if not server.url.nodes:
            raise
        if isinstance(error, BackendUnavailable):
            remedy = "bring it back, or fail over to its replica"
            return [Finding("server", "problem", f"what it holds is out of reach: {error}", remedy)]
        told = f"user {queries.user!r} is {STRANGE}" if refused(error) == "login" else str(error)
        return [Finding("permissions", "problem", told, SAME_USERS)]
    strangers = await _examine_replicas(server, facts) if facts.failover else []
    return [*check_server(facts), *strangers, *queries.notes]


async def _examine_replicas(server: ServerConnections, facts: ServerFacts) -> list[Finding]:
    """Find replicas that do not know the user: one of them may be the next primary."""
    url, found = server.url, list[Finding]()
    for address in map(url.as_seen, facts.replicas):
        replica = ServerConnections(replace(url.at(address), sentinels=None), server.timeout)
        try:
            await replica.command("", "TIME")
        except AiodigestError as error:
            if refused(error) == "login":
                where = f"on its replica {show_address(*address)} user {url.user!r} is {STRANGE}"
                found.append(Finding("permissions", "note", f"{where}: a failover to it shuts it out", SAME_USERS))
        finally:
            await replica.close()
    return found
