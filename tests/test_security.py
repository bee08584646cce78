"""What docs/security.md promises: users who may do no more than their part, TLS, passwords that nobody sees, bounds."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis.asyncio
import trustme
from commandline import aiodigest, in_process
from ports import free_port
from redis.asyncio.sentinel import Sentinel
from redis.credentials import UsernamePasswordCredentialProvider
from redis.exceptions import NoPermissionError
from replicas import Relay, server_on
from servers import PASSWORD, SECURITY, Server, commands, rules, running_server, tls_binary
from stores import Place
from storestate import check_invariants, redis_state

from aiodigest import BackendUnavailable, Bounds, Digest, DigestEngine, Entry, Finding, PartialAdd, Policy, Throttle
from aiodigest.backend import Add, Close, Lease, Mute, NewDeadLetter, Postpone, Retry
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.connections.calls import Connections
from aiodigest.backends.redis.connections.connection import _contexts
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.connections.url import read_url
from aiodigest.errors import AiodigestError, ConfigurationError, InvalidArgument, InvalidState, LimitExceeded
from aiodigest.records.entries import identity_of, pack

LEASE = 60_000
LIMITS = Policy().terms.limits
BAD = [NewDeadLetter("bad")]
WAITS = Policy(initial_delay=100)
SMALL = Policy(initial_delay=5, minimum_delay=1, maximum_delay=10, max_size=2, capacity=4)
PATIENCE = 60.0

_numbers = count(1)


@dataclass
class Stage:
    """Where a role is played: its user's backend, one that may do all, and a namespace of its own."""

    server: Server
    client: Any
    namespace: str
    url: str
    role: RedisBackend
    other: RedisBackend

    def rang(self) -> bool:
        """Whether somebody was woken since this was asked last."""
        return self.client.delete(f"{{{self.namespace}}}:wake") == 1


Play = Callable[[Stage], Awaitable[None]]


def keys_of(role: str, namespace: str, several: bool = False) -> list[str]:
    """The key patterns of a rule, for another namespace than that of the document."""
    return [word.replace("{mail", f"{{{namespace}") for word in rules(several=several)[role] if word.startswith("~")]


@asynccontextmanager
async def staged(server: Server, role: str, *rule: str) -> AsyncGenerator[Stage]:
    """A stage for a role whose user has these commands. The server knows no script: it must be sent each."""
    namespace = f"stage-{next(_numbers)}"
    with server.client() as client:
        server.allow(client, f"mail-{role}", *keys_of(role, namespace), *rule)
        url = f"unix://mail-{role}:{PASSWORD}@{server.socket}"
        other = RedisBackend(server.url, namespace=namespace)
        stage = Stage(server, client, namespace, url, RedisBackend(url, namespace=namespace), other)
        await other.connect()
        try:
            client.script_flush()
            yield stage
        finally:
            await stage.role.aclose()
            await other.aclose()


def adds(key: str, *ids: str, policy: Policy = Policy(), own: bool = False) -> list[Add]:
    return [Add(key, pack(record.encode(), None, b'\x01"v"'), policy.terms, own) for record in ids]


def checked(answers: Sequence[Any]) -> Any:
    """The first of some answers; raises the first that is an error."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers[0]


async def produce(stage: Stage) -> None:
    """All that adds do: open windows, push, fill and compact them, and wake a worker."""
    backend = stage.role
    await backend.connect()
    checked(await backend.add(0, adds("new", "a")))
    assert stage.rang(), "nobody was woken"
    checked(await backend.add(0, adds("waits", "a", "b", policy=WAITS)))
    checked(await backend.add(0, adds("full", "a", "b", "c", policy=SMALL, own=True)))
    checked(await backend.add(0, adds("full", "d")))  # no limits of its own any more
    checked(await backend.add(0, adds("over", *"abcdefgh", policy=SMALL, own=True)))
    checked(await backend.add(0, adds("again", *"aaabbbaaabbb", policy=SMALL, own=True)))
    checked(await backend.add(0, [replace(add, urgent=True) for add in adds("waits", "c", policy=WAITS)]))
    stage.client.zadd(f"{{{stage.namespace}}}:seen:once", {identity_of(b"a"): 4_000_000_000_000})
    stage.client.pexpire(f"{{{stage.namespace}}}:seen:once", 60_000)
    checked(await backend.add(0, adds("once", "a", policy=Policy(dedupe_window=60))))
    checked(await stage.other.add(0, adds("muted", "a", policy=WAITS)))
    await stage.other.mute("muted", Mute(delay_ms=1), LIMITS)
    await asyncio.sleep(0.01)
    checked(await backend.add(0, adds("muted", "b", policy=WAITS)))  # which finds that its mute is over


async def produce_and_probe(stage: Stage) -> None:
    """All that a producer does that serves ``/healthz``."""
    await produce(stage)
    async with DigestEngine(stage.url, namespace=stage.namespace) as engine:
        health = await engine.health(overdue=3600)
        if not health.ok:
            raise ConfigurationError(health.reason)


async def claimed(backend: RedisBackend, key: str) -> Lease:
    claims = await backend.claim(0, 10, LEASE, LIMITS)
    if claims.broken:
        raise ConfigurationError(f"refuses access: {claims.broken}")
    [lease] = [lease for lease in claims.leases if lease.key == key]
    return lease


async def work(stage: Stage) -> None:
    """All that a worker does: claim, renew, page, report each outcome, give back, and sleep until it is woken."""
    backend, other = stage.role, stage.other
    await backend.connect()
    checked([*await backend.renew(0, [], LEASE), True])
    await backend.operations.counts()  # as a probe does
    await backend.throttle(1, Throttle(5, per=60).rate, 1, (), [("a destination", 60_000)])
    checked(await other.add(0, adds("k", "a", "b", "c")))
    lease = await claimed(backend, "k")
    checked(await backend.renew(0, [lease], LEASE))
    assert len(await backend.read(0, lease, 0, 10)) == 3
    checked(await backend.retry(0, [Retry(lease, 0, "boo", LIMITS, 3, [identity_of(b"a"), identity_of(b"b")], 1)]))
    checked(await other.add(0, adds("k", "a", "d")))
    [lease] = (await backend.claim(0, 1, LEASE, LIMITS, sample=True)).leases  # merged
    checked(await backend.release(0, [lease], False))
    checked(await other.add(0, adds("k", "e")))
    lease = await claimed(backend, "k")
    closed = checked(await backend.close(0, [Close(lease, 2, 2, 1000, LIMITS, LEASE)]))  # a part of it
    rest = replace(lease, digest_id=closed.digest_id, size=closed.left)
    checked(await backend.close(0, [Close(rest, closed.left, 0, 1000, LIMITS, LEASE, dead_letters=BAD)]))
    checked(await other.add(0, adds("soon", "a", policy=Policy(initial_delay=0.001))))
    while not (leases := (await backend.claim(0, 10, LEASE, LIMITS)).leases):  # it is due within a millisecond
        pass
    checked(await backend.postpone(0, [Postpone(leases[0], 1)], LIMITS))
    while not (leases := (await backend.claim(0, 10, LEASE, LIMITS)).leases):
        pass
    checked(await other.add(0, adds("soon", "b")))
    stage.rang()
    checked(await backend.close(0, [Close(leases[0], 1, 1, 0, LIMITS, LEASE)]))
    assert stage.client.exists(f"{{{stage.namespace}}}:wake"), "nobody was woken"
    await asyncio.wait_for(backend.wait(0, "0-0"), PATIENCE)


async def bury(backend: RedisBackend, key: str, *ids: str) -> None:
    checked(await backend.add(0, adds(key, *ids)))
    lease = await claimed(backend, key)
    checked(await backend.close(0, [Close(lease, lease.size, 0, 0, LIMITS, LEASE, dead_letters=BAD)]))


async def operate(stage: Stage) -> None:
    """All that an engine offers beside adding and delivering."""
    other = stage.other
    await bury(other, "one", "a", "b")
    await bury(other, "two", "a")
    checked(await other.add(0, adds("waits", "a", "b", "c", "a", policy=WAITS)))
    checked(await other.add(0, adds("goes", "a", "b", policy=WAITS)))
    checked(await other.add(0, adds("failed", "a", "b")))
    checked(await other.retry(0, [Retry(await claimed(other, "failed"), 100_000, "boo", LIMITS, 2)]))
    checked(await other.add(0, adds("cools", "a")))
    lease = await claimed(other, "cools")
    checked(await other.close(0, [Close(lease, 1, 1, 100_000, LIMITS, LEASE)]))
    checked(await other.add(0, adds("held", "a", "b")))
    await claimed(other, "held")
    stage.client.script_flush()
    async with DigestEngine(stage.url, namespace=stage.namespace, policy=Policy(capacity=2)) as engine:
        one, two = [letter async for letter in engine.dead_letters()]
        assert await engine.dead_letter(one.id) == one
        stage.rang()
        assert await engine.replay(one.id)
        assert stage.rang(), "nobody was woken"
        assert await engine.discard(two.id)
        timeline = await engine.peek("waits")
        assert timeline is not None
        explained = [await engine.explain(key) for key in ("waits", "failed", "held", "cools")]
        assert [each.state for each in explained] == ["waiting", "waiting", "leased", "empty"]
        assert "cool-down" in [reason.kind for reason in explained[3].reasons]
        assert (await engine.health(overdue=3600)).ok
        assert len([each async for each in engine.timelines()]) == 5
        assert (await engine.stats()).leased == 1
        assert await engine.remove("waits", "a")
        assert [await engine.remove("failed", record) for record in "ab"] == [True, True]
        await engine.reschedule("waits", delay=50)
        await engine.reschedule("waits")
        await engine.mute("waits")
        assert await engine.unmute("waits")
        assert [await engine.flush(key) for key in ("held", "waits")] == [True, True]
        assert [await engine.delete(key) for key in ("goes", "held")] == [True, True]


PLAYS: dict[str, Play] = {"producer": produce, "worker": work, "operator": operate}
every_role = pytest.mark.parametrize("role", PLAYS)


@every_role
async def test_each_role_can_do_its_part_under_its_rule(server: Server, role: str) -> None:
    async with staged(server, role, *commands(role)) as stage:
        await PLAYS[role](stage)
        check_invariants(redis_state(stage.client, stage.namespace))


@pytest.mark.parametrize(
    ("role", "several"), [*((role, False) for role in PLAYS), *((role, True) for role in (*PLAYS, "resharder"))]
)
async def test_a_rule_is_pasted_as_it_stands_and_gives_nothing_else(server: Server, role: str, several: bool) -> None:
    rule, keys = rules(several=several)[role], ["~{mail}:*", *(["~{mail:*}:*"] if several else [])]
    others = ["+cluster|nodes", "+cluster|slots"] if several else []
    assert rule[: 4 + len(keys)] == ["reset", "resetchannels", "on", ">PASSWORD", *keys]
    assert {*rule[4 + len(keys) :]} == {*commands(role), *others}
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", f"mail-{role}", *rule)
        assert not client.acl_getuser(f"mail-{role}")["channels"]
    user: Any = redis.Redis(unix_socket_path=server.socket, username=f"mail-{role}", password="PASSWORD")
    with user:
        for words in ("GET {mail}:x", "KEYS *", "SCRIPT FLUSH", "CONFIG GET *", "FLUSHALL", "PUBLISH a b", "SAVE"):
            with pytest.raises(NoPermissionError):
                user.execute_command(*words.split())


def told(pattern: str) -> list[str]:
    """What docs/security.md says is needed as well, where the text is this."""
    found = re.search(pattern.replace(" ", r"\s+"), SECURITY.read_text(encoding="utf-8"))
    assert found is not None
    return found[1].split()


async def test_a_producer_is_probed_with_what_is_told_for_it_and_not_without(server: Server) -> None:
    needed = told(r"that only adds, urgently too \(and needs `([^`]+)` too if it asks for `health\(\)`")
    async with staged(server, "producer", *commands("producer"), *needed) as stage:
        await produce_and_probe(stage)
    async with staged(server, "producer", *commands("producer")) as stage:
        with pytest.raises(ConfigurationError, match=re.escape(f"(counts), user 'mail-producer' needs {needed[0]}")):
            await produce_and_probe(stage)


SCANS = r"`erase`, and so `aiodigest bench`, and `aiodigest namespaces` need `([^`]+)`"


@pytest.mark.parametrize("several", [False, True])
async def test_an_operator_lists_namespaces_and_erases_one_with_what_is_told_for_it_and_not_without(
    server: Server, several: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rule = commands("operator", several=several)
    async with staged(server, "operator", *rule) as stage:
        command = in_process(monkeypatch, capfd)
        listing = partial(asyncio.to_thread, command, "namespaces", "--url", stage.url)
        checked(await stage.other.add(0, adds("k", "a")))
        async with DigestEngine(stage.url, namespace=stage.namespace) as engine:
            for call in engine.try_erase, engine.erase:
                with pytest.raises(ConfigurationError, match=r"refuses access.*scan"):
                    await call()
            code, _, error = await listing()
            assert (code, "refuses access" in error, "scan" in error) == (2, True, True)
            assert await engine.peek("k")
            stage.client.execute_command("ACL", "SETUSER", "mail-operator", *told(SCANS))
            code, names, error = await listing()
            assert (code, stage.namespace in names.split(), error) == (0, True, "")
            await engine.try_erase()
            assert await engine.erase() > 0
        assert not [*stage.client.scan_iter(f"{{{stage.namespace}}}*")]


async def reshard(server: Server, *rule: str) -> None:
    """Reshard a namespace that holds a bit of all, there and back, as a user who has these commands alone."""
    namespace = f"stage-{next(_numbers)}"
    url = f"unix://mail-resharder:{PASSWORD}@{server.socket}"
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    await bury(backend, "dead", "a", "b")
    checked(await backend.add(0, adds("waits", "a", policy=WAITS)))
    once = adds("once", "a", policy=Policy(dedupe_window=60))
    checked(await backend.add(0, once))
    lease = await claimed(backend, "once")
    checked(await backend.close(0, [Close(lease, 1, 1, 0, LIMITS, LEASE, dedupe_ms=600_000)]))
    await backend.mute("gone", Mute(), LIMITS)
    await backend.aclose()
    with server.client() as client:
        server.allow(client, "mail-resharder", *keys_of("resharder", namespace, several=True), *rule)
        async with (
            DigestEngine(url, namespace=namespace) as engine,
            DigestEngine(server.url, namespace=namespace) as other,
        ):
            client.script_flush()
            for shards in (4, 1):
                async for _ in engine.reshard(shards):
                    await other.delete("waits")
                await other.add("waits", 1)
            checked(await other.backend.add(other.backend.shard_map.shard_of("once"), once))
            assert await other.peek("once") is None, "it was delivered"
            [letter] = [letter async for letter in other.dead_letters()]
            assert (letter.key, len(letter.records)) == ("dead", 2)
            assert (await engine.stats()).buried == 2


def ask_nothing(*_: str) -> frozenset[str]:
    return frozenset()


NO_ASKING = "aiodigest.backends.redis.namespace.commands_of", ask_nothing  # so that the server refuses


@pytest.mark.thorough
async def test_no_command_for_resharding_can_be_left_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodigest.engine.PACE", 0.001)
    await reshard(server, *commands("resharder"))
    monkeypatch.setattr(*NO_ASKING)
    needless: list[str] = []
    for command in commands("resharder"):
        try:
            await reshard(server, *(other for other in commands("resharder") if other != command))
        except ConfigurationError:
            continue
        needless.append(command)
    # on one server nobody asks nodes; without XADD no script fails, and nobody is woken; there are few ids to remember
    assert needless == ["+cluster|nodes", "+cluster|slots", "+xadd", "+zremrangebyrank"]


@pytest.mark.thorough
@every_role
async def test_no_command_of_a_rule_can_be_left_out(server: Server, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*NO_ASKING)
    needless: list[str] = []
    for command in commands(role):
        async with staged(server, role, *(other for other in commands(role) if other != command)) as stage:
            reason = ""
            try:
                await PLAYS[role](stage)
            except (ConfigurationError, InvalidState, AssertionError) as error:
                reason = str(error)
        # what cannot be read is a broken timeline; without XADD no script fails, and nobody is woken
        words = "nobody was woken" if command == "+xadd" else "refuses access|no permissions|can't run this command"
        if not re.search(words, reason):
            needless.append(command)
    # without these nothing is counted, and nobody hears the doorbell
    assert set(needless) <= {"+hincrby", "+xrevrange"}


@pytest.mark.thorough
@every_role
async def test_a_user_who_lacks_a_command_is_refused_before_anything_is_half_done(server: Server, role: str) -> None:
    by_name = 0
    for command in commands(role):
        async with staged(server, role, *(other for other in commands(role) if other != command)) as stage:
            with pytest.raises(ConfigurationError, match="refuses access") as caught:
                await PLAYS[role](stage)
            by_name += command in str(caught.value)
            check_invariants(redis_state(stage.client, stage.namespace))
    assert by_name >= len(commands(role)) - len({"+eval", "+evalsha", "+hget", "+hsetnx", "+xread"})


async def test_a_user_who_may_not_wait_for_replicas_is_refused_before_anything_is_stored(server: Server) -> None:
    async with staged(server, "producer", *commands("producer")) as stage:
        engine = DigestEngine(stage.url, namespace=stage.namespace, wait_replicas=1)
        with pytest.raises(ConfigurationError, match=r"refuses access: .*wait"):
            await engine.__aenter__()
        assert not stage.client.exists(f"{{{stage.namespace}}}:layout")


async def test_a_rule_that_is_mended_is_enough_for_a_process_that_runs(server: Server) -> None:
    without = [command for command in commands("producer") if command not in ("+zadd", "+hset")]
    async with staged(server, "producer", *without) as stage:
        await stage.role.connect()
        needed = "to do this (add), user 'mail-producer' needs +hset +zadd: ACL SETUSER mail-producer +hset +zadd"
        with pytest.raises(ConfigurationError, match=re.escape(needed)):
            await stage.role.add(0, adds("k", "a"))
        stage.client.execute_command("ACL", "SETUSER", "mail-producer", "+zadd", "+hset")
        assert await stage.role.add(0, adds("k", "a")) == [True]


async def test_a_producer_s_user_cannot_deliver_look_or_move(server: Server) -> None:
    async with staged(server, "producer", *commands("producer")) as stage:
        await stage.role.connect()
        await stage.role.add(0, adds("k", "a"))
        role, operations = stage.role, stage.role.operations
        for call in (
            role.claim(0, 1, LEASE, LIMITS), role.delete("k"), role.wait(0, "0-0"),
            operations.look("k"), operations.entries("k"), operations.dead_letters(0, 1), operations.counts(),
        ):  # fmt: skip
            with pytest.raises(ConfigurationError, match="refuses access"):
                await call
        assert [lease.key for lease in (await stage.other.claim(0, 1, LEASE, LIMITS)).leases] == ["k"]


@every_role
async def test_a_rule_is_of_one_namespace_alone(server: Server, role: str) -> None:
    async with staged(server, role, *commands(role)) as stage:
        other = f"{stage.namespace}x"
        needed = f"refuses access: its user may not use the keys of this namespace: it needs ~{{{other}}}:*, or "
        for shards in (None, 3):
            elsewhere = RedisBackend(stage.url, namespace=other, shards=shards)
            with pytest.raises(ConfigurationError, match=re.escape(needed)):
                await elsewhere.connect()
            await elsewhere.aclose()


async def test_rules_for_several_shards_are_told_apart_in_a_new_namespace(server: Server, namespace: str) -> None:
    keys = f"~{{{namespace}}}:layout", f"~{{{namespace}:*}}:*"
    with server.client() as client:
        server.allow(client, "several", *keys, *commands("producer"))
    backend = RedisBackend(f"unix://several:{PASSWORD}@{server.socket}", namespace=namespace)
    with pytest.raises(ConfigurationError, match=re.escape(" ".join(keys)) + ".*give shards= where .* is new"):
        await backend.connect()
    await backend.aclose()


async def test_several_shards_work_with_the_keys_that_are_given_for_them(server: Server, namespace: str) -> None:
    keys = [key.replace("{mail", f"{{{namespace}") for key in told(r"`(~\{mail\}:layout ~\{mail:\*\}:\*)`")]
    with server.client() as client:
        server.allow(client, "several", *keys, *commands("producer", "worker"))
    came = asyncio.Queue[Digest]()
    url = f"unix://several:{PASSWORD}@{server.socket}"
    async with DigestEngine(url, namespace=namespace, shards=3).delivering(came.put) as engine:
        await engine.add_many(Entry(f"k{number}", number) for number in range(12))
        async with asyncio.timeout(PATIENCE):
            assert {(await came.get()).key for _ in range(12)} == {f"k{number}" for number in range(12)}


async def test_bounds_of_an_engine_go_for_each_call_and_nothing_over_is_stored(server: Server, namespace: str) -> None:
    large, long, taken = os.urandom(1_200_000).hex(), "x" * 33, count()
    bounds = Bounds(value=4_000_000, name=32, records=1500)
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    await bury(backend, "buried", "a")
    await backend.aclose()
    async with DigestEngine(server.url, namespace=namespace, bounds=bounds) as engine:
        for call in (
            engine.add(long, 1), engine.add("k", 1, record_id=long), engine.remove(long, "a"), engine.remove("k", long),
            engine.flush(long), engine.delete(long), engine.reschedule(long), engine.peek(long),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match="1 to 32 bytes of UTF-8, not 33"):
                await call
        with pytest.raises(LimitExceeded, match="at most 4,000,000 bytes"):
            await engine.add("k", "x" * 4_000_000)
        with pytest.raises(LimitExceeded, match="at most 1,500 entries"):
            await engine.add_many(Entry("k", number) for number in taken)
        assert next(taken) == 1501, "of too many no more than one over is taken"
        assert (await engine.stats()).ready == 0
        assert await engine.add("x" * 32, large, record_id="y" * 32)
        timeline = await engine.peek("x" * 32)
        assert timeline is not None
        assert [record.value for record in timeline.records] == [large]
        [letter] = [letter async for letter in engine.dead_letters()]
        assert len(letter.id) > 32, "which is no name of the caller's"
        assert await engine.replay(letter.id)
        assert len(await engine.add_many(Entry("k", 1) for _ in range(1500))) == 1500


AUTHORITY = trustme.CA()


def issue(folder: Path, name: str, *hosts: str, by: trustme.CA = AUTHORITY, **options: Any) -> tuple[Path, Path]:
    """The files of a certificate and of its key."""
    issued = by.issue_cert(*hosts, **options)
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return certificate, key


@pytest.fixture
def trusted(tmp_path: Path) -> Path:
    """The file of the authority's certificate."""
    AUTHORITY.cert_pem.write_to_path(tmp_path / "ca.pem")
    return tmp_path / "ca.pem"


@asynccontextmanager
async def ends_tls_itself(port: int, files: tuple[Path, Path], clients: Path | None) -> AsyncGenerator[Server]:
    """A server with a TLS port."""
    options = (
        "--tls-port", str(port), "--bind", "127.0.0.1", "--tls-cert-file", str(files[0]), "--tls-key-file",
        str(files[1]), "--tls-ca-cert-file", str(clients or files[0]), "--tls-auth-clients", "yes" if clients else "no",
    )  # fmt: skip
    with running_server(*options, binary=tls_binary()) as server:
        yield server


@asynccontextmanager
async def has_tls_ended(port: int, files: tuple[Path, Path], clients: Path | None) -> AsyncGenerator[Server]:
    """A server behind a program that speaks TLS for it, as where the server itself cannot."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*files)
    if clients:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    relay = Relay(free_port())
    with server_on(relay.port) as server:
        async with await asyncio.start_server(relay._serve, "127.0.0.1", port, ssl=context), relay:
            yield server


async def examined(url: str, namespace: str) -> list[Finding]:
    async with DigestEngine(url, namespace=namespace) as engine:
        return await engine.examine()


Ends = Callable[..., Any]
PLACES: list[Ends] = [has_tls_ended, *([ends_tls_itself] if tls_binary() else [])]
both_ways = pytest.mark.parametrize("ends", PLACES)


def secure(port: int, scheme: str = "rediss", **settings: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in settings.items())
    return f"{scheme}://suite:{PASSWORD}@localhost:{port}/0?{query}"


async def refused(url: str | redis.asyncio.Redis, namespace: str, timeout: float = 30) -> BackendUnavailable:
    """The error of an add, which comes within the engine's timeout."""
    async with asyncio.timeout(PATIENCE), DigestEngine(url, namespace=namespace, timeout=timeout) as engine:
        with pytest.raises(BackendUnavailable) as caught:
            await engine.add("k", 1)
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert caught.value.stored == "no"
    return caught.value


async def delivered(url: str | redis.asyncio.Redis, namespace: str) -> list[Any]:
    """What comes of one add."""
    came = asyncio.Queue[Digest]()
    async with asyncio.timeout(PATIENCE), DigestEngine(url, namespace=namespace).delivering(came.put) as engine:
        await engine.add("k", "v")
        return [record.value for record in (await came.get()).records]


@both_ways
async def test_tls_that_does_not_check_its_server_is_logged_once_and_noted_by_doctor(
    trusted: Path, ends: Ends, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    port, stranger = free_port(), issue(trusted.parent, "stranger", "elsewhere")
    good_port, good = free_port(), issue(trusted.parent, "good", "localhost")
    nothing = secure(port, ssl_cert_reqs="none", ssl_check_hostname="false")
    async with ends(port, stranger, None), ends(good_port, good, None):
        for url, level, words in (
            (nothing, "note", "neither its certificate nor its name is checked"),
            (secure(port, ssl_ca_certs=trusted, ssl_check_hostname="false"), "note", "its name is not checked"),
            (secure(good_port, ssl_ca_certs=trusted), "ok", "are checked, and their names"),
        ):
            caplog.clear()
            _contexts.clear()
            for _ in range(2):
                async with DigestEngine(url, namespace=namespace) as engine:
                    await engine.add("k", "v")
            [found] = [each for each in await examined(url, namespace) if each.check == "tls"]
            assert found.level == level
            assert words in found.message
            warned = [line for line in caplog.messages if line.startswith("TLS to a server: ")]
            assert [words in line for line in warned] == ([True] if level == "note" else [])


@both_ways
async def test_rediss_delivers_with_a_client_certificate_if_asked(trusted: Path, ends: Ends, namespace: str) -> None:
    port, good = free_port(), issue(trusted.parent, "good", "localhost")
    certificate, key = issue(trusted.parent, "mine", "me")
    url = secure(port, ssl_ca_certs=trusted)
    async with ends(port, good, None):
        assert await delivered(url, namespace) == ["v"]
    async with (
        ends(port, good, trusted),
        redis.asyncio.Redis(
            host="localhost", port=port, username="suite", password=PASSWORD, ssl=True,
            ssl_ca_certs=str(trusted), ssl_certfile=str(certificate), ssl_keyfile=str(key),
        ) as client,
    ):  # fmt: skip
        assert await delivered(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}", namespace) == ["v"]
        assert await delivered(client, f"{namespace}-of-a-client") == ["v"]
        await refused(url, namespace)


async def test_connections_share_what_was_read_of_certificates_until_the_files_are_others(trusted: Path) -> None:
    target: Any = read_url(secure(1, ssl_ca_certs=trusted))
    first, second = (target.connection(1).ssl_context.get() for _ in range(2))
    assert second is first
    os.utime(trusted, ns=(1, 1))
    assert target.connection(1).ssl_context.get() is not first


@both_ways
@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("stranger", "unable to get local issuer|self-signed|signature failure|unknown ca"),
        ("host", "not valid for 'localhost'"),
        ("expired", "has expired"),
        ("system", "unable to get local issuer|self-signed"),
    ],
)
async def test_a_false_certificate_is_refused(trusted: Path, ends: Ends, namespace: str, flaw: str, words: str) -> None:
    port, past = free_port(), datetime.now(UTC) - timedelta(days=1)
    dates = {"not_before": past - timedelta(days=1), "not_after": past} if flaw == "expired" else {}
    by = trustme.CA() if flaw == "stranger" else AUTHORITY
    files = issue(trusted.parent, flaw, "elsewhere" if flaw == "host" else "localhost", by=by, **dates)
    settings: dict[str, Any] = {} if flaw == "system" else {"ssl_ca_certs": trusted}
    async with ends(port, files, None):
        error = await refused(secure(port, **settings), namespace)
    assert re.search(words, str(error), re.IGNORECASE)
    assert "Give the host that its certificate names, and the CA's file as ssl_ca_certs=FILE" in str(error)
    assert f"rediss://suite:***@localhost:{port}" in str(error)


@both_ways
async def test_plain_and_encrypted_do_not_mix(trusted: Path, ends: Ends, namespace: str) -> None:
    port, plain = free_port(), free_port()
    with running_server("--port", str(plain), "--bind", "127.0.0.1") as server:
        error = await refused(secure(plain, ssl_ca_certs=trusted), namespace, timeout=1)
        assert "(does it speak TLS? Else give redis://)" in str(error)
        async with DigestEngine(server.url, namespace=namespace, timeout=60) as engine:
            await engine.add("k", 1)
            server.stop()
            with pytest.raises(BackendUnavailable, match=r"^(?!.*TLS)"):
                await engine.add("k", 1)
    async with ends(port, issue(trusted.parent, "good", "localhost"), None):
        error = await refused(secure(port, scheme="redis"), namespace, timeout=1)
        assert "(is it a port for TLS? Then give rediss://)" in str(error)


@pytest.mark.parametrize("kind", ["+sentinel", "+cluster"])
def test_tls_options_without_tls_are_refused_with_the_scheme_that_has_it(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"the TLS options ssl_ca_certs need rediss{kind}://")):
        DigestEngine(f"redis{kind}://a/{'s' if kind == '+sentinel' else ''}?ssl_ca_certs=/ca", namespace="mail")


def test_who_named_a_host_that_a_certificate_does_not_is_told() -> None:
    error = Exception("CERTIFICATE_VERIFY_FAILED")
    cluster = read_url("rediss+cluster://one,two:7000")
    assert cluster.at(("10.0.0.1", 6379)).hint(error) == "its cluster names it 10.0.0.1"
    assert cluster.at(("two", 7000)).hint(error) == ""
    sentinels = read_url("rediss+sentinel://one/mail")
    assert sentinels.at(("10.0.0.1", 6379)).hint(error) == "its sentinels name it 10.0.0.1"
    assert sentinels.hint(error) == ""


@pytest.mark.parametrize("service", ["", "+sentinel"])
@pytest.mark.parametrize(
    "option",
    ["ssl_ca_certs=/no/such/file", "ssl_certfile=/no/such/file", f"ssl_ca_certs={__file__}", "ssl_ciphers=none"],
)
async def test_tls_options_that_no_server_could_mend_are_named_at_once(option: str, service: str) -> None:
    url = f"rediss{service}://u:{PASSWORD}@127.0.0.1:1/{'mail/' if service else ''}0?ssl_password=x&{option}"
    with pytest.raises(ConfigurationError) as caught:
        await DigestEngine(url, namespace="tls").__aenter__()
    name, _, value = option.partition("=")
    assert f"TLS cannot be set up with {name}={value!r}" in str(caught.value)
    assert PASSWORD not in everything(caught.value)


SECRET = "s3cr3t-of-the-test"
# each piece of it would be noticed, as it is and as a URL has it
ODD = "".join(f"{SECRET}{sign}" for sign in "@:/%#?&= +'\"\\é€") + SECRET
passwords = pytest.mark.parametrize("password", [SECRET, ODD], ids=["plain", "odd"])


def everything(error: BaseException) -> str:
    """All that can be printed of an error, and of what led to it."""
    chain = [error]
    for one in chain:
        led: tuple[object, ...] = (one.__cause__, one.__context__, *one.args)
        chain += [other for other in led if isinstance(other, BaseException) and other not in chain]
    return "\n".join([*traceback.format_exception(error), *(f"{one!r} {one} {vars(one)}" for one in chain)])


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that can be printed of the log."""
    return caplog.text + "".join(repr(vars(record)) for record in caplog.records)


URLS = [
    "redis://user:{}@127.0.0.1:1/0", "redis://:{}@127.0.0.1:1/0", "rediss://user:{0}@127.0.0.1:1/0?ssl_password={0}",
    "redis://127.0.0.1:1/0?username=user&password={}", "unix://user:{}@/nowhere/s?db=0",
    "redis+sentinel://user:{0}@127.0.0.1:1/mail/0?sentinel_password={0}",
    "rediss+sentinel://user:{0}@127.0.0.1:1/mail/0?sentinel_password={0}&ssl_password={0}",
    "redis+cluster://user:{}@127.0.0.1:1,localhost:1", "redis+cluster://:{}@127.0.0.1:1",
    "redis+cluster://127.0.0.1:1?username=user&password={}", "rediss+cluster://user:{0}@127.0.0.1:1?ssl_password={0}",
]  # fmt: skip


def in_url(url: str, password: str) -> str:
    """A URL with a password, of which nothing is left as it is that could be escaped."""
    return url.format(quote(password, safe=""))


def sentinel_client(password: str) -> redis.asyncio.Redis:
    kwargs: dict[str, Any] = {"sentinel_kwargs": {"password": password}, "password": password}
    watched: Any = Sentinel([("127.0.0.1", 1)], **kwargs)
    return watched.master_for("mail")


Source = str | redis.asyncio.Redis | redis.asyncio.RedisCluster
any_client: Any = redis.asyncio.Redis  # whose from_url has no types
ON_PORT_1: dict[str, Any] = {"host": "127.0.0.1", "port": 1}
SOURCES: dict[str, Callable[[str], Source]] = {
    **{url: partial(in_url, url) for url in URLS},
    "Redis": lambda password: redis.asyncio.Redis(**ON_PORT_1, username="user", password=password),
    "Redis, TLS": lambda password: redis.asyncio.Redis(**ON_PORT_1, password=password, ssl=True, ssl_password=password),
    "Redis, of a URL": lambda password: any_client.from_url(in_url(URLS[0], password)),
    "Redis, of a provider": lambda password: redis.asyncio.Redis(
        **ON_PORT_1, credential_provider=UsernamePasswordCredentialProvider("user", password)
    ),
    "Redis, of sentinels": sentinel_client,
    "RedisCluster": lambda password: redis.asyncio.RedisCluster(**ON_PORT_1, username="user", password=password),
    "RedisCluster, TLS": lambda password: redis.asyncio.RedisCluster(**ON_PORT_1, password=password, ssl=True),
    "RedisCluster, of a URL": lambda password: redis.asyncio.RedisCluster.from_url(in_url(URLS[0], password)),
}
BAD_URLS = [
    "redis://user:{}@host:port", "redis://:{}@[host", "redis://:{}@host/db", "http://user:{}@host",
    "redis://u:{}/@host", "redis+cluster://u:{}@a,b/1", "redis+cluster://u:{}@a:b", "redis+cluster://a?db=1&password={}",
    "rediss+cluster://u:{}@a?ssl_none=1", "redis+sentinel://u:{}@a:b/mail", "embedded://u:{}@host", "user:{}@host:6379",
    "redis://host?password={}&db=x", "unix://:{}@",
]  # fmt: skip


@passwords
@pytest.mark.parametrize("kind", SOURCES)
async def test_no_password_is_shown(kind: str, password: str, namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    asyncio.get_running_loop().set_debug(True)
    source = SOURCES[kind](password)
    target, backend = read_url(source), RedisBackend(source, namespace=namespace)
    provider: Any = target.settings.get("credential_provider")
    assert (provider.password if provider else target.settings["password"]) == password
    engine = DigestEngine(source, namespace=namespace, timeout=1)
    links = (ServerConnections(target, 1), Connections(target, 1))
    printed = [repr(each) + str(each) for each in (target, target.sentinels, backend, engine, *links)]
    printed += [target.shown, backend.url, engine.url]
    async with engine.delivering(lambda digest: asyncio.sleep(0)):
        with pytest.raises(BackendUnavailable) as caught:
            await engine.add("k", 1)
        with pytest.raises(PartialAdd) as partly:
            await engine.add_many([Entry("k", 1)])
    if not isinstance(source, str):
        await source.aclose()
    printed += [everything(caught.value), everything(partly.value), logged(caplog)]
    assert caplog.records
    assert SECRET not in "".join(printed)


@passwords
@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_is_none_is_refused_without_its_password(url: str, password: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DigestEngine(in_url(url, password), namespace="mail")
    assert SECRET not in everything(caught.value)


@passwords
async def test_a_wrong_password_is_not_told_wherever_the_server_is(
    place: Place, password: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigurationError, match="refuses access") as caught:
        async with DigestEngine(in_url(place.url.replace(PASSWORD, "{}"), password), namespace=namespace):
            pass
    assert SECRET not in everything(caught.value) + logged(caplog)


@pytest.mark.thorough
@passwords
async def test_a_password_that_is_no_longer_right_is_not_told(
    own: Server, password: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = in_url(f"unix://suite:{{}}@{own.socket}", password)
    with own.client() as client:
        client.execute_command("ACL", "SETUSER", "suite", f">{password}")
        engine = DigestEngine(url, namespace=namespace, drain_timeout=0)  # what is under way is not told
        async with asyncio.timeout(PATIENCE), engine.delivering(lambda digest: asyncio.sleep(0)):
            await engine.add("k", 1)
            client.execute_command("ACL", "SETUSER", "suite", f"<{password}")
            client.client_kill_filter(skipme=True, _type="normal")
            while "refuses access" not in caplog.text:  # noqa: ASYNC110  (no event tells it)
                await asyncio.sleep(0.01)
            with pytest.raises(AiodigestError) as later:
                await engine.peek("k")
    assert SECRET not in everything(later.value) + logged(caplog)


STATS = "stats", "--namespace", "mail"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("url", "command"),
    [
        *((url, STATS) for url in (URLS[0], URLS[3], URLS[7], BAD_URLS[0], BAD_URLS[4])),
        (URLS[0], ("pipe", "--group-by", "k")),
        (URLS[0], ("doctor", "--namespace", "mail")),
    ],
)
def test_commands_tell_no_password_of_the_environment(url: str, command: tuple[str, ...], tmp_path: Path) -> None:
    done = aiodigest(tmp_path, *command, AIODIGEST_URL=in_url(url, ODD), AIODIGEST_TIMEOUT="300ms")
    assert done.returncode in (2, 69)
    assert SECRET.encode() not in done.stdout + done.stderr
    assert b"aiodigest: " in done.stderr
