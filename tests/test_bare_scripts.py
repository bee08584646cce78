"""The bare scripts of the benchmark run the commands of the engine's own scripts, as a server sees them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import chain, takewhile
from typing import Any

import pytest
from servers import Server

from aiodigest.backend import DIGEST_BYTES, Add, Close, Lease
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.scripts import pack_close, pack_limits, unpack_lease
from aiodigest.policy import Policy
from aiodigest.records.entries import pack
from benchmarks.bare import bare
from benchmarks.baselines import ONE_SHARD
from benchmarks.costs import LATER

LEASE, COOL = 60_000, 300_000
LIMITS = Policy().terms.limits
KEYS, RECORDS = 5, 10
NONCE = "nonce"


def commands(lines: Iterable[dict[str, Any]], namespace: str) -> list[str]:
    """What scripts called since MONITOR began, as far as two namespaces at two times can have it alike.

    The bytes of an entry are left out, as they have the time of its arrival, and so is the clock, which is noted once a
    second.
    """
    tag, found = f"{{{namespace}}}:", list[str]()
    for line in takewhile(lambda line: line["command"] != "ECHO end", lines):
        command = str(line["command"])
        if line["client_type"] == "lua" and not command.startswith(f"HSET {tag}layout clock "):
            command = re.sub(r"^(RPUSH \S+) .*", r"\1", command, flags=re.DOTALL)
            found.append(re.sub(r"\d{13,}", "TIME", command.replace(tag, "")))
    return found


class Watched:
    """A namespace, and the commands that scripts run in it."""

    def __init__(self, client: Any, namespace: str) -> None:
        self.client, self.namespace, self.layout = client, namespace, f"{{{namespace}}}:layout"

    async def see(self, work: Awaitable[Any]) -> tuple[list[str], Any]:
        with self.client.monitor() as monitor:
            answer = await work
            self.client.echo("end")
            return commands(monitor.listen(), self.namespace), answer

    async def bare(self, name: str, *arguments: Any) -> Any:
        return self.client.evalsha(self.client.script_load(bare(name)), 1, self.layout, *arguments)

    def lengths(self) -> Sequence[Sequence[int]]:
        """Those of all entries, timeline by timeline."""
        logs = (f"{{{self.namespace}}}:log:{key}" for key in range(KEYS))
        return [[*map(len, self.client.lrange(log, 0, -1))] for log in logs]


def adds(policy: Policy, number: int) -> list[Add]:
    """One to each timeline."""
    return [Add(str(key), pack(b"%d" % number, None, b"v"), policy.terms) for key in range(KEYS)]


def closes(leases: Sequence[Lease]) -> list[Close]:
    return [Close(lease, lease.size, lease.size, COOL, LIMITS, LEASE) for lease in leases]


@asynccontextmanager
async def opened(backend: RedisBackend) -> AsyncGenerator[None]:
    await backend.connect()
    try:
        yield
    finally:
        await backend.aclose()


@asynccontextmanager
async def both(
    server: Server, client: Any, namespace: str, policy: Policy = Policy(), records: int = 1
) -> AsyncGenerator[tuple[Any, Watched, Watched]]:
    """A store and two namespaces, with the same timelines in each."""
    ours, theirs = (
        RedisBackend(server.url, namespace=name, nonce=lambda: NONCE) for name in (namespace, f"{namespace}-bare")
    )
    async with opened(ours), opened(theirs):
        for number in range(records):
            await ours.add(0, adds(policy, number))
            await theirs.add(0, adds(policy, number))
        yield ours, Watched(client, namespace), Watched(client, f"{namespace}-bare")


@pytest.mark.parametrize(("state", "policy"), [("ready", Policy()), ("waiting", LATER)])
async def test_an_add_runs_these_commands(
    server: Server, client: Any, namespace: str, state: str, policy: Policy
) -> None:
    async with both(server, client, namespace, policy) as (backend, ours, theirs):
        more = adds(policy, 1)
        seen, added = await ours.see(backend.add(0, more))
        assert added == [False] * KEYS
        assert "RPUSH log:0" in seen
        arguments = [argument for add in more for argument in (add.key, add.entry)]
        assert (await theirs.see(theirs.bare("add", state, *arguments)))[0] == seen
        assert theirs.lengths() == ours.lengths()


async def test_a_claim_and_a_close_run_these_commands(server: Server, client: Any, namespace: str) -> None:
    head = ONE_SHARD, ""
    async with both(server, client, namespace, records=RECORDS) as (backend, ours, theirs):
        for count in (2, KEYS - 2):
            seen, claims = await ours.see(backend.claim(0, count, LEASE, LIMITS))
            arguments = *head, count, LEASE, pack_limits(LIMITS), NONCE, 0, DIGEST_BYTES, 1, ""
            of_bare, reply = await theirs.see(theirs.bare("claim", *arguments))
            leases = [unpack_lease(fields) for fields in reply[3]]
            assert "RENAME log:0 open:0" in seen or count != 2
            assert len(reply) == 10
            assert [(one.key, one.token, one.size, len(one.entries)) for one in leases] == [
                (one.key, one.token, one.size, len(one.entries)) for one in claims.leases
            ]
            if (
                count != 2
            ):  # nothing is ready any more, so that it looks what waits; a claim of the benchmark seldom does
                assert seen.pop() == "ZRANGE waiting 0 0 WITHSCORES"
            assert of_bare == seen

            seen, closed = await ours.see(backend.close(0, closes(claims.leases)))
            items = chain.from_iterable(pack_close(each, 0) for each in closes(leases))
            of_bare, answers = await theirs.see(theirs.bare("close", *head, NONCE, 1, *items))
            assert of_bare[:-2] == seen[:-2]
            assert sorted(of_bare[-2:]) == sorted(seen[-2:])  # two counts, in any order
            assert [status.decode() for status, *_ in answers] == [each.status for each in closed]
