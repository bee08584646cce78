"""``engine.examine`` and ``aiodigest doctor``: what is found of servers in good and in bad order, and what to do."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pytest
from clusters import Cluster, Move, Node, running_cluster
from commandline import DEADLINE, ROOT, Command, attempt
from engines import patiently
from redis import Redis
from redis.crc import key_slot
from replicas import freeze, replicated, thaw, until
from servers import PASSWORD, USER, Server, commands, rules, running_server
from stores import Place
from terminals import on_terminal

from aiodigest import BackendUnavailable, Bounds, Digest, DigestEngine, Entry, Finding, Policy, Reject
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.backends.redis.diagnostics.server import ServerFacts, SlowCall, check_server, in_bytes, in_time
from aiodigest.models import Check
from aiodigest.policy import Limits

Engine: TypeAlias = DigestEngine[Any]
LATER = Policy(initial_delay=1_500)
OPTIONS = "--namespace", "mail"


def all_may(server: Server) -> str:
    return f"unix://{server.socket}"


async def examined(url: str, namespace: str = "mail", **options: Any) -> list[Finding]:
    async with DigestEngine(url, namespace=namespace, **options) as engine:
        return await engine.examine()


def of(findings: list[Finding], check: str, level: str = "") -> Finding:
    [found] = [finding for finding in findings if finding.check == check and level in ("", finding.level)]
    return found


@pytest.fixture
async def engine(server: Server, namespace: str) -> AsyncIterator[Engine]:
    """An engine whose namespace has a timeline ``k`` that waits."""
    async with DigestEngine(server.url, namespace=namespace, policy=LATER) as engine:
        await engine.add("k", 1)
        yield engine


async def claim(server: Server, namespace: str) -> None:
    """What a worker does, once."""
    backend = RedisBackend(server.url, namespace=namespace)
    await backend.connect()
    await backend.claim(0, 1, 60_000, Limits(10, 0, 0, 1_000_000))
    await backend.aclose()


def info(**told: str) -> dict[str, Any]:
    return {"info": told}


def eviction(policy: str, most: str, dropped: str = "0") -> dict[str, Any]:
    return info(maxmemory_policy=policy, maxmemory=most, evicted_keys=dropped)


def persistence(log: str, **settings: str) -> dict[str, Any]:
    return {**info(aof_enabled=log, rdb_changes_since_last_save="7"), "settings": settings}


def cluster_state(state: str, served: str) -> dict[str, Any]:
    return {"cluster": {"cluster_state": state, "cluster_slots_ok": served}}


def replicas(least: str, wanted: int, *told: dict[str, str]) -> dict[str, Any]:
    facts = {name: value for each in told for name, value in each.items()}
    return {**info(role="master", **facts), "settings": {"min-replicas-to-write": least}, "wait_replicas": wanted}


def alone(failover: str) -> dict[str, Any]:
    return {**info(role="master"), "failover": failover}


ONLINE = {"slave0": "ip=::1,port=1,state=online,offset=1,lag=0"}
SYNCING = {"slave1": "ip=::1,port=2,state=wait_bgsave,offset=0,lag=0"}
SLOW = [SlowCall("add", 0.012, 7_000), SlowCall("claim", 0.045, 300)]
NO_EVICTION = "CONFIG SET maxmemory-policy noeviction"


@pytest.mark.parametrize(
    ("check", "facts", "level", "told", "remedy"),
    [
        ("version", info(redis_version="7.2", server_name="valkey", valkey_version="9.0.1"), "ok", "Valkey 9.0.1", ""),
        ("version", info(redis_version="8.2.0"), "ok", "Redis 8.2.0", ""),
        ("version", info(redis_version="6.2.6"), "note", "Redis 6.2.6 works; 7.2 or newer is recommended", "7.2"),
        ("version", info(redis_version="6.0.16"), "problem", "Redis 6.0.16; 6.2 is the oldest that works", "Redis 7.2"),
        ("eviction", eviction("noeviction", "0"), "ok", "drops nothing", ""),
        ("eviction", eviction("noeviction", "1048576"), "ok", "drops nothing", ""),
        ("eviction", eviction("volatile-ttl", "1048576"), "problem", "once 1 MiB are full, it drops keys", NO_EVICTION),
        ("eviction", eviction("allkeys-lru", "0"), "note", "as soon as a maxmemory is set", NO_EVICTION),
        ("eviction", eviction("allkeys-lru", "1", "1200"), "problem", "dropped 1,200 keys since it", NO_EVICTION),
        ("memory", info(used_memory="900", maxmemory="0"), "ok", "", ""),
        ("memory", info(used_memory="799", maxmemory="1000"), "ok", "", ""),
        ("memory", info(used_memory="800", maxmemory="1000"), "note", "adds are refused", "maxmemory"),
        ("memory", info(used_memory="949", maxmemory="1000"), "note", "adds are refused", "maxmemory"),
        ("memory", info(used_memory="950", maxmemory="1000"), "problem", "adds are refused", "maxmemory"),
        # what replicas have yet to read does not count as full
        ("memory", info(used_memory="990", maxmemory="1000", mem_not_counted_for_evict="500"), "ok", "490 bytes", ""),
        ("persistence", persistence("0", save=""), "problem", "no append-only file and no snapshot", "CONFIG SET"),
        ("persistence", persistence("0", save="3600 1"), "note", "only snapshots (save 3600 1): what ", "CONFIG"),
        ("persistence", persistence("0", save="3600 1"), "note", "the last one (7 changes now)", "CONFIG SET"),
        ("persistence", persistence("0"), "note", "whether it saves was not told", "CONFIG SET"),
        ("persistence", persistence("1", save="", appendfsync="always"), "ok", "on the disk before the answer", ""),
        ("persistence", persistence("1", save="", appendfsync="everysec"), "note", "cut may lose a second", "CONFIG"),
        ("persistence", persistence("1", save="", appendfsync="no"), "note", "half a minute or more", "CONFIG SET"),
        ("persistence", persistence("1"), "ok", "how often it is synced was not told", ""),
        ("disk", info(aof_last_write_status="err"), "problem", "", ""),
        ("disk", info(aof_last_bgrewrite_status="err"), "problem", "", ""),
        ("disk", info(rdb_last_bgsave_status="err"), "problem", "", ""),
        ("replicas", replicas("0", 0), "note", "there is no replica", ""),
        ("replicas", replicas("0", 1), "problem", "wait_replicas=1: every add fails", ""),
        ("replicas", replicas("0", 2, ONLINE, SYNCING), "problem", "1 replica is connected, and wait_replicas=2", ""),
        ("replicas", replicas("0", 1, ONLINE), "note", "min-replicas-to-write is 0", ""),
        ("replicas", replicas("1", 1, ONLINE), "ok", "1 replica is connected", ""),
        ("replicas", replicas("2", 0, ONLINE, {"min_slaves_good_slaves": "1"}), "problem", "1 of the 2 that ", ""),
        # what follows a failover
        ("replicas", alone(""), "note", "so is the namespace", "add a replica, and redis+sentinel://"),
        ("replicas", alone("sentinel"), "note", "so is the namespace", "start the old primary again"),
        ("replicas", alone("cluster"), "note", "so are its shards", "add one: redis-cli --cluster add-node"),
        ("role", info(role="slave"), "problem", "", ""),
        ("clock", {"offset": 0.9}, "ok", "900 ms ahead of this machine's", ""),
        ("clock", {"offset": -1.1}, "note", "1 s behind this machine's: ", "NTP"),
        ("clock", {"offset": 61.0}, "problem", "61 s ahead of", "NTP"),
        ("round trip", {"trips": [0.001, 0.002, 0.5]}, "ok", "(median of 3)", ""),
        ("round trip", {"trips": [0.001, 0.011, 0.5]}, "note", "(median of 3)", ""),
        ("slow scripts", {"logged": 128, "slow": SLOW}, "note", "2 of the 128 calls", ""),
        ("slow scripts", {"logged": 128, "slow": SLOW}, "note", "claim, took 45.00 ms; the latest came 5 minutes", ""),
        ("slow scripts", {"logged": 128}, "ok", "", ""),
        ("cluster", cluster_state("ok", "16384"), "ok", "16,384 of 16,384", ""),
        ("cluster", cluster_state("fail", "16384"), "problem", "16,384 of 16,384", ""),
        ("cluster", cluster_state("ok", "10923"), "problem", "10,923 of 16,384", ""),
    ],
)  # fmt: skip
def test_facts_of_a_server_are_judged(check: str, facts: dict[str, Any], level: str, told: str, remedy: str) -> None:
    found = of(check_server(ServerFacts(**facts)), check)
    assert (found.level, bool(found.remedy)) == (level, level != "ok")
    assert told in found.message
    assert remedy in found.remedy
    values = {"clock": facts.get("offset"), "round trip": sorted(facts.get("trips", [0, 0]))[1]}
    assert check not in values or found.value == values[check]
    assert check_server(ServerFacts()) == []  # of what it does not tell nothing is said


def test_sizes_and_durations_are_told_in_units_of_people() -> None:
    assert [in_bytes(size) for size in (7, 2048, 5 << 20, 3 << 30)] == ["7 bytes", "2 KiB", "5 MiB", "3 GiB"]
    told = [in_time(seconds) for seconds in (0.00123, 0.5, 90, 600, 7_200, 400_000)]
    assert told == ["1.23 ms", "500 ms", "90 s", "10 minutes", "2 hours", "5 days"]


def test_the_reference_names_every_check_and_the_unit_of_every_value() -> None:
    page = (ROOT / "docs" / "reference" / "views.md").read_text()
    told = dict(re.findall(r"^\| `([a-z ]+)` \| [^|]+ \| ?([^|]*?) ?\|$", page, re.MULTILINE))
    assert sorted(told) == sorted(get_args(Check))
    sources = [path.read_text() for path in (ROOT / "aiodigest" / "backends" / "redis" / "diagnostics").glob("*.py")]
    calls = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    made = [(call, call.func.id) for call in calls if isinstance(call.func, ast.Name)]
    of_value = {"Finding": 5, "graded": 6}  # the arguments up to the value
    measured = [
        call
        for call, name in made
        if name in of_value and (len(call.args) == of_value[name] or "value" in {word.arg for word in call.keywords})
    ]
    assert {ast.literal_eval(call.args[0]) for call in measured} == {check for check, unit in told.items() if unit}


def test_a_server_that_evicts_and_saves_nothing_is_told_of_both_with_what_to_do(command: Command) -> None:
    with running_server("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as server:
        code, output, errors = command("doctor", *OPTIONS, "--url", all_may(server))
        assert (code, errors) == (1, "")
        lines = output.splitlines()
        for found, remedy in [
            ("problem  eviction: maxmemory-policy is allkeys-lru", "CONFIG SET maxmemory-policy noeviction"),
            ("problem  persistence: there is no append-only file and no snapshot", "CONFIG SET appendonly yes"),
        ]:
            [at] = [number for number, line in enumerate(lines) if line.startswith(found)]
            assert lines[at + 1].startswith(f"           {remedy}")
        assert lines[-1].startswith("2 problems, ")
        with server.client() as client:  # what was said to do is enough
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("appendonly", "yes")
        code, output, _ = command("doctor", *OPTIONS, "--url", all_may(server))
        assert (code, output.splitlines()[-1].split(",")[0]) == (0, "0 problems")


def test_an_embedded_server_is_in_order(folder: Path, command: Command) -> None:
    code, output, errors = command("doctor", *OPTIONS, "--url", f"embedded://{folder}")
    assert (code, errors) == (0, "")
    assert "ok       persistence: append-only file, appendfsync always" in output
    assert "note     namespace: namespace 'mail' was never used here" in output


def test_in_json_each_finding_is_an_object_a_line(own: Server, command: Command) -> None:
    code, output, errors = command("doctor", *OPTIONS, "--url", all_may(own), "--json")
    assert (code, errors) == (1, "")
    findings = [Finding(**json.loads(line)) for line in output.splitlines()]
    assert {finding.check for finding in findings if finding.level == "problem"} == {"persistence"}
    assert of(findings, "round trip").value


@pytest.mark.processes
def test_on_a_terminal_the_marks_have_colours_and_long_lines_go_on_below_them(own: Server, tmp_path: Path) -> None:
    with on_terminal(tmp_path, "doctor", *OPTIONS, "--url", all_may(own), columns=60) as doctor:
        assert doctor.end()[0] == 1
    lines = doctor.shown.decode().split("\r\n")
    [at] = [number for number, line in enumerate(lines) if "persistence" in line]
    assert lines[at].startswith("\x1b[1;31mproblem\x1b[0m")
    assert lines[at + 1].startswith(" " * 9)
    assert lines[at + 1].strip()


async def test_looking_changes_nothing_and_makes_no_namespace(own: Server) -> None:
    with own.client() as client:
        await examined(all_may(own), "nobody")
        assert client.keys() == []
        async with DigestEngine(own.url, namespace="mail", policy=LATER) as engine:
            await engine.add("k", 1)
        before = {key: client.dump(key) for key in client.scan_iter()}
        settings = client.config_get()
        await examined(all_may(own))
        assert {key: client.dump(key) for key in client.scan_iter()} == before
        assert client.config_get() == settings


async def test_each_place_is_examined(place: Place, namespace: str) -> None:
    told = {
        "redis": "there is no replica: while this server is away, so is the namespace",
        "sentinel": "2 replicas are connected",
        "cluster": "1 replica is connected",
    }[place.name]
    async with DigestEngine(place.url, namespace=namespace, policy=LATER) as engine:
        await engine.add("k", 1)
        findings = await engine.examine()
        assert of(findings, "version").level != "problem"
        assert of(findings, "replicas").message.endswith(told)
        held = "timelines: 1 waiting, 0 ready, 0 leased; 0 digests delivered so far"
        assert of(findings, "namespace").message == held


def test_a_server_that_is_frozen_is_one_line_and_exit_code_69(own: Server, command: Command) -> None:
    freeze(own)
    code, output, errors = command("doctor", *OPTIONS, "--url", own.url, "--timeout", "300ms")
    thaw(own)
    assert (code, output, errors.count("\n")) == (69, "", 1)
    assert "is unavailable" in errors or "no connection within" in errors


async def test_a_server_that_freezes_meanwhile_is_unavailable(own: Server) -> None:
    async with DigestEngine(own.url, namespace="mail", timeout=0.3) as engine:
        await patiently(engine.stats)
        freeze(own)
        try:
            with pytest.raises(BackendUnavailable):
                await engine.examine()
        finally:
            thaw(own)


def allowed(role: str, *but: str) -> list[str]:
    return [word for word in rules()[role] if word.startswith("+") and word not in but]


@pytest.mark.parametrize(
    ("role", "may"), [("producer", "add"), ("worker", "deliver"), ("operator", "look, move by hand")]
)
async def test_a_user_of_one_role_hears_what_it_may_and_what_others_take(own: Server, role: str, may: str) -> None:
    with own.client() as client:
        own.allow(client, "limited", "~{mail}:*", *allowed(role))
    async with DigestEngine(own.url, namespace="mail") as engine:
        await engine.add("k", 1)
    findings = await examined(f"unix://limited:{PASSWORD}@{own.socket}")
    found = of(findings, "permissions", "note")
    assert found.message.startswith(f"user 'limited' may {may}, and lacks, to ")
    assert found.remedy == ""  # or the smallest rule would be no more
    notes = {finding.check: finding.remedy for finding in findings if finding.level == "note"}
    assert notes["server"] == "ACL SETUSER limited +info"
    assert notes["settings"] == "ACL SETUSER limited +config|get"
    assert notes["slow scripts"] == "ACL SETUSER limited +slowlog|get"
    if role == "producer":
        assert notes["namespace"].startswith("ACL SETUSER limited +")
        assert "zcount" in notes["namespace"]


async def test_a_user_who_gets_what_the_notes_name_is_told_all_at_the_next_look(own: Server) -> None:
    with own.client() as client:
        own.allow(client, "limited", "~{mail}:*", *allowed("worker", "+hgetall"))
        async with DigestEngine(f"unix://limited:{PASSWORD}@{own.socket}", namespace="mail") as engine:
            findings = await engine.examine()
            for remedy in [finding.remedy for finding in findings if finding.remedy.startswith("ACL ")]:
                client.execute_command(*remedy.split())
            findings = await engine.examine()
    assert not [finding for finding in findings if finding.remedy.startswith("ACL ")]
    assert of(findings, "permissions").message == "user 'limited' may add, deliver, look, move by hand"


async def test_a_user_who_may_not_hear_the_doorbell_is_told_and_one_who_may_nothing_is_a_problem(own: Server) -> None:
    url = f"unix://limited:{PASSWORD}@{own.socket}"
    with own.client() as client:
        own.allow(client, "limited", "~{mail}:*", *allowed("worker", "+xread"))
        assert "ACL SETUSER limited +xread" in {finding.remedy for finding in await examined(url)}
        own.allow(client, "limited", "~{mail}:*", "+eval", "+evalsha", "+hmget", "+time")
        assert of(await examined(url), "permissions").level == "problem"


async def test_what_a_server_does_not_have_is_told_and_not_guessed() -> None:
    with running_server("--rename-command", "CONFIG", "") as server:
        findings = await examined(all_may(server))
    found = of(findings, "settings", "note")
    assert found.remedy == ""
    assert "not looked at, since " in found.message
    assert "unknown command" in found.message
    assert of(findings, "persistence").message.endswith("whether it saves was not told")


async def test_records_are_a_problem_until_a_worker_is_there(engine: Engine, server: Server, namespace: str) -> None:
    delivered = asyncio.Queue[Digest[Any]]()
    found = of(await engine.examine(), "workers", "problem")
    assert found.message == "nobody delivers (there never was a worker), and 1 timeline held"
    assert "aiodigest run" in found.remedy
    async with DigestEngine(server.url, namespace=namespace, policy=LATER).delivering(delivered.put):
        await engine.flush("k")
        await delivered.get()
        assert of(await engine.examine(), "workers").level == "ok"


async def test_a_worker_that_was_heard_of_too_long_ago_is_none(server: Server, namespace: str, client: Any) -> None:
    await claim(server, namespace)
    heard = of(await examined(server.url, namespace), "workers", "ok")
    assert re.fullmatch(r"at least one; last seen \S+ \S+ ago", heard.message), heard.message
    client.hincrby(f"{{{namespace}}}:layout", "seen", -31_000)
    found = of(await examined(server.url, namespace), "workers", "note")  # since there is nothing to deliver
    told = re.match(r"nobody delivers \(the last sign of a worker is (\d+) s old\)", found.message)
    assert told is not None
    assert 31 <= int(told[1]) < 31 + DEADLINE


async def test_a_shard_that_nobody_serves_is_told_among_those_that_are(server: Server, namespace: str) -> None:
    worker = DigestEngine(server.url, namespace=namespace, shards=4)
    async with DigestEngine(server.url, namespace=namespace, shards=4, policy=LATER) as engine:

        async def told() -> Finding | None:
            found = of(await engine.examine(), "workers")
            return found if " 1 of 4 shards" in found.message else None

        await engine.add_many(Entry(f"k{number}", 1) for number in range(16))
        async with worker.delivering(lambda digest: asyncio.sleep(0), shards=range(3)):
            await until(told)
            found = await told()
        assert found is not None
        assert found.level == "problem"
        assert found.message.startswith("nobody delivers of 1 of 4 shards (there never was a worker), and ")
        assert of(await engine.examine(), "shards").message == "4 shards on one server"


async def test_a_timeline_that_is_overdue_is_told_with_its_age(engine: Engine, namespace: str, client: Any) -> None:
    await engine.flush("k")
    assert of(await engine.examine(), "overdue").level == "ok"
    client.zincrby(f"{{{namespace}}}:ready", -600_000, "k")
    found = of(await engine.examine(), "overdue", "problem")
    assert found.value is not None
    assert found.message == f"a timeline has been due for {found.value:.0f} s, and nobody has claimed it"
    assert 600 <= found.value < 600 + DEADLINE


async def test_a_lease_that_ended_long_ago_is_told(engine: Engine, server: Server, namespace: str, client: Any) -> None:
    await engine.flush("k")
    await claim(server, namespace)
    assert "leases" not in {finding.check for finding in await engine.examine()}
    client.zincrby(f"{{{namespace}}}:leased", -181_000, "k")
    found = of(await engine.examine(), "leases")
    assert (found.level, found.message) == ("problem", "1 lease ended long ago, and nobody took over")
    # after an outage nothing is taken over for a while
    client.hset(f"{{{namespace}}}:layout", "hold", int(time.time() * 1000) + 60_000)
    assert "leases" not in {finding.check for finding in await engine.examine()}


async def test_a_step_back_of_the_servers_clock_is_told_for_a_day_and_by_health_for_an_hour(
    engine: Engine, namespace: str, client: Any
) -> None:
    layout = f"{{{namespace}}}:layout"
    before = await engine.peek("k")
    # as if it had been an hour ahead until now
    client.hset(layout, "clock", int(time.time() * 1000) + 3_600_000)
    client.zincrby(f"{{{namespace}}}:waiting", 3_600_000, "k")
    for noted in (False, True):
        found = of(await engine.examine(), "clock", "note")
        told = re.match(r"the server's stepped back by (\d+) minutes, \d.* ago: ", found.message)
        assert told is not None
        assert 60 - DEADLINE / 60 <= int(told[1]) <= 60
        health = await engine.health()
        assert health.ok
        assert 3_600 - DEADLINE <= health.stepped_back <= 3_600
        assert of(await engine.examine(), "workers", "problem").message.startswith("nobody delivers (there never was")
        if not noted:
            await engine.add("j", 1)
    after = await engine.peek("k")
    assert before is not None
    assert after is not None
    assert abs((before.due - after.due).total_seconds()) <= DEADLINE, "it waits no longer for that"
    client.hincrby(layout, "stepped", -3_600_000)
    assert (await engine.health()).stepped_back == 0
    of(await engine.examine(), "clock", "note")
    client.hincrby(layout, "stepped", -23 * 3_600_000)
    assert of(await engine.examine(), "clock").level == "ok"


async def test_dead_letters_are_told_with_their_number_and_age(server: Server, namespace: str, client: Any) -> None:
    await attempt(server.url, Entry("k", 1), error=Reject("no such address"), namespace=namespace)
    found = of(await examined(server.url, namespace), "dead letters")
    assert (found.level, found.value) == ("note", 1)
    assert found.message.startswith("1 dead letter, the oldest ")
    assert found.remedy.startswith(f"aiodigest dead list --namespace {namespace} ")
    now = int(time.time() * 1000)
    client.zadd(f"{{{namespace}}}:dead", {f"letter{number}": now - 3 * 86_400_000 for number in range(999)})
    found = of(await examined(server.url, namespace), "dead letters")
    assert (found.level, found.message) == ("problem", "1,000 dead letters, the oldest 3 days old")


async def test_dead_letters_of_half_the_bytes_that_a_shard_keeps_are_a_problem(
    server: Server, namespace: str, client: Any
) -> None:
    await attempt(server.url, Entry("k", 1), error=Reject("no such address"), namespace=namespace)
    for size, problems in ((127, []), (128, ["a shard's take 128 MiB: over 256 MiB the oldest are let go"])):
        client.hset(f"{{{namespace}}}:sizes", "", size * 1024 * 1024)
        found = await examined(server.url, namespace)
        told = [each.message for each in found if (each.check, each.level) == ("dead letters", "problem")]
        assert told == problems
    entry, bounds = Entry("other", 1), Bounds(dead_letters=2**30)
    await attempt(server.url, entry, error=Reject("no such address"), namespace=namespace, bounds=bounds)
    client.hset(f"{{{namespace}}}:sizes", "", 2**29 - 1)
    assert not [each for each in await examined(server.url, namespace) if each.message.startswith("a shard's")]
    client.hset(f"{{{namespace}}}:sizes", "", 2**29)
    [full] = [each for each in await examined(server.url, namespace) if each.message.startswith("a shard's")]
    assert full.message == "a shard's take 512 MiB: over 1 GiB the oldest are let go"


async def test_a_change_of_shards_is_told_with_what_is_left(engine: Engine, server: Server, namespace: str) -> None:
    async with DigestEngine(server.url, namespace=namespace) as other:
        async for _ in engine.reshard(4):
            break
        findings = [finding for finding in await other.examine() if finding.check == "shards"]
    assert [finding.level for finding in findings] == ["note", "ok"]
    told = "it goes over from 1 to 4 shards; the old ones have 1 waiting, 0 ready, 0 leased, 0 dead"
    assert findings[0].message == told
    assert findings[0].remedy == f"unless it runs: aiodigest reshard --namespace {namespace} --to 4"


async def test_what_is_muted_in_the_old_shards_is_told_since_it_keeps_them(
    engine: Engine, server: Server, namespace: str
) -> None:
    await engine.mute("k")
    async with DigestEngine(server.url, namespace=namespace) as other:
        async for _ in engine.reshard(4):
            break
        [told, _] = [finding.message for finding in await other.examine() if finding.check == "shards"]
    assert told.endswith("0 dead, 1 muted")


async def test_a_layout_that_does_not_fit_is_told_and_stays(engine: Engine, namespace: str, client: Any) -> None:
    client.hset(f"{{{namespace}}}:layout", "version", "2:7:3")
    found = of(await engine.examine(), "shards", "problem")
    assert client.hget(f"{{{namespace}}}:layout", "version") == b"2:7:3"
    assert found.message == "a shard has the layout 2:7:3, and the namespace has 2:1:1"


async def test_a_shard_that_another_program_broke_is_a_problem(engine: Engine, namespace: str, client: Any) -> None:
    client.set(f"{{{namespace}}}:ready", "not a sorted set")
    broken = [one for one in await engine.examine() if "a shard is broken" in one.message]
    assert {("shards", "problem")} == {(one.check, one.level) for one in broken}


async def test_slow_scripts_of_the_namespace_are_told_and_those_of_others_are_not(own: Server) -> None:
    async with DigestEngine(all_may(own), namespace="mail", policy=LATER) as engine:
        with own.client() as client:
            await engine.add("k", 1)
            client.slowlog_reset()  # of what was slow on a slow machine
            client.config_set("slowlog-log-slower-than", 0)
            await engine.add("k", 2)
            client.eval("return 1", 1, "{mailing}:k")
            client.config_set("slowlog-log-slower-than", -1)
            logged = client.slowlog_len()
        found = of(await engine.examine(), "slow scripts", "note")
    assert found.message.startswith(f"1 of the {logged} calls in its log of slow ones")
    assert "the longest, add, took" in found.message


@pytest.mark.cluster
async def test_too_few_replicas_are_a_problem(namespace: str) -> None:
    async with replicated(1) as (primary, replica):
        url = f"redis://127.0.0.1:{primary.options[1]}/0"
        assert of(await examined(url, wait_replicas=1), "replicas").level == "note"
        assert of(await examined(url, wait_replicas=2), "replicas").level == "problem"
        at = f"redis://127.0.0.1:{replica.options[1]}/0"
        assert of(await examined(at), "role").level == "problem"


@pytest.mark.cluster
async def test_adds_that_wait_for_some_replicas_alone_are_noted_before_a_failover_loses_them(command: Command) -> None:
    async with replicated(2) as (primary, *_):
        url = f"redis://127.0.0.1:{primary.options[1]}/0"
        partly = [
            [
                found.remedy
                for found in await examined(url, wait_replicas=number)
                if "one that is planned" in found.message
            ]
            for number in (0, 1, 2)
        ]
        assert [len(remedies) for remedies in partly] == [0, 1, 0]
        assert "wait_replicas=2" in partly[1][0]
        assert "CLIENT PAUSE" in partly[1][0]
        options = ["doctor", *OPTIONS, "--url", url, "--wait-replicas"]
        told = [(await asyncio.to_thread(command, *options, str(number)))[1] for number in (0, 1, 3)]
    assert ["an add waits for 1 of 2" in output for output in told] == [False, True, False]
    assert "problem  replicas: 2 replicas are connected, and wait_replicas=3" in told[2]


@pytest.fixture
async def lame() -> AsyncIterator[tuple[str, str]]:
    """A cluster without replicas, and the place of its first primary, which was killed: it had a shard of ``post``."""
    with running_cluster("--cluster-require-full-coverage", "no", replicas=0) as cluster:
        url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in cluster.nodes)}"
        async with DigestEngine(url, namespace="post", shards=16, policy=LATER) as engine:
            await engine.add_many(Entry(f"k{number}", 1) for number in range(64))
        victim = cluster.holders()[0]
        assert victim is not cluster.primary_of("{post}:layout")
        victim.kill()
        yield url, f"127.0.0.1:{victim.port}"


@pytest.mark.cluster
async def test_a_primary_that_is_gone_is_a_problem_and_the_others_are_looked_at(lame: tuple[str, str]) -> None:
    url, place = lame
    findings = await examined(url, "post", timeout=10)
    assert of(findings, "server", "problem").message.startswith(f"{place}: what it holds is out of reach")
    assert " shards out of reach" in of(findings, "shards", "problem").message
    version = of(findings, "version")
    assert version.level != "problem"
    assert len(version.message.split(": ")[0].split(", ")) == 2


@pytest.mark.cluster
async def test_on_a_cluster_every_primary_is_asked_and_what_is_common_told(on_cluster: Place, namespace: str) -> None:
    url = f"redis+cluster://{on_cluster.url.rpartition('@')[2]}"
    async with DigestEngine(url, namespace=namespace) as engine:
        findings = await engine.examine()
        assert of(findings, "version").message.startswith("all 3 primaries: ")
        assert of(findings, "persistence").message.startswith("all 3 primaries: there is no append-only file")
        assert len([finding for finding in findings if finding.check == "round trip"]) == 3
        state = "all 3 primaries: cluster_state is ok, 16,384 of 16,384 slots are served"
        assert of(findings, "cluster").message == state
        assert "shards" not in {finding.check for finding in findings}  # it is not used yet
        await engine.add("k", 1)
        found = of(await engine.examine(), "shards")
        assert (found.level, found.message) == ("note", "1 shard on 1 of 3 primaries: the others have nothing to do")
        assert "--to 16" in found.remedy
    found = of(await examined(url, f"{namespace}-new", shards=16), "shards", "ok")
    assert found.message.startswith("16 shards on 3 of 3 primaries: ")


CLERK = ("~{*}:*", "+info", "+cluster|slots", "+cluster|nodes", *commands("producer", "worker", "operator"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def sixteen(cluster: Cluster) -> AsyncIterator[Engine]:
    """An engine of the namespace ``post``, whose shards all three primaries have, and of the user ``clerk``."""
    cluster.allow("clerk", *CLERK)
    url = cluster.url.replace(USER, "clerk", 1)
    async with DigestEngine(url, namespace="post", shards=16, policy=LATER) as engine:
        await engine.add_many(Entry(f"k{number}", 1) for number in range(64))
        yield engine


def strange(cluster: Cluster) -> Node:
    """The primary of the first shard, which is not that of the namespace's layout."""
    node = cluster.holders()[512]
    assert node is not cluster.primary_of("{post}:layout")
    return node


@pytest.mark.cluster
@pytest.mark.parametrize("fresh", [False, True], ids=["later", "at its start"])
async def test_a_primary_without_users_is_told_with_its_shards(cluster: Cluster, sixteen: Engine, fresh: bool) -> None:
    victim = strange(cluster)
    victim.ask("ACL", "DELUSER", "clerk")
    url = cluster.url.replace(USER, "clerk", 1)
    findings = await (examined(url, "post") if fresh else sixteen.examine())
    found = of(findings, "permissions", "problem")
    place = f"127.0.0.1:{victim.port}"
    assert found.message == f"{place}: user 'clerk' is unknown there, disabled, or has another password"
    assert found.remedy.startswith("give every node the same users")
    reach = of(findings, "shards")
    lost = int(reach.message.partition(" ")[0])
    assert (reach.level, reach.remedy) == ("problem", found.remedy)
    assert reach.message == f"{lost} shards out of reach: the servers refuse user 'clerk'"
    scope = f" (in the {16 - lost} of 16 shards in reach)"
    assert of(findings, "namespace").message.endswith(scope)
    overdue = of(findings, "overdue")
    assert (overdue.level, overdue.message) == ("note", f"nothing has been due for over 60 s{scope}")
    assert not [one for one in findings if place in one.message and one.level == "note"]


async def test_a_rule_that_differs_on_one_primary_is_a_problem(cluster: Cluster, sixteen: Engine) -> None:
    victim = strange(cluster)
    victim.ask("ACL", "SETUSER", "clerk", "-zadd", "-hset")
    findings = await sixteen.examine()
    found = [(one.level, one.message) for one in findings if one.check == "permissions"]
    assert found == [
        ("problem", f"127.0.0.1:{victim.port}: user 'clerk' lacks there what it has elsewhere: hset zadd"),
        ("ok", "user 'clerk' may add, deliver, look, move by hand"),
    ]


async def test_who_may_not_ask_which_slots_are_on_their_way_is_told_so(cluster: Cluster, sixteen: Engine) -> None:
    told = "slots that are on their way to it: not looked at, since user 'clerk' may not run CLUSTER NODES"
    cluster.allow("clerk", *(word for word in CLERK if word != "+cluster|nodes"))
    found = [one for one in await sixteen.examine() if one.message.endswith(told)]
    assert [(one.check, one.level, one.remedy) for one in found] == [
        ("cluster", "note", "ACL SETUSER clerk +cluster|nodes")
    ]
    cluster.allow("clerk", *CLERK)
    assert not [one for one in await sixteen.examine() if one.message.endswith(told)]


async def test_a_replica_without_the_user_is_noted_before_it_is_the_primary(cluster: Cluster, sixteen: Engine) -> None:
    primary = cluster.primaries[0]
    replica = cluster.replica_of(primary)
    replica.ask("ACL", "SETUSER", "clerk", "off")
    found = of(await sixteen.examine(), "permissions", "note")
    places = f"127.0.0.1:{primary.port}: on its replica 127.0.0.1:{replica.port}"
    told = "is unknown there, disabled, or has another password: a failover to it shuts it out"
    assert found.message == f"{places} user 'clerk' {told}"


@pytest.mark.cluster
async def test_behind_sentinels_too_replicas_are_asked_for_the_user(behind_sentinels: Place, namespace: str) -> None:
    with behind_sentinels.client_of("") as client:
        info = client.info()
        ports = [info[f"slave{number}"]["port"] for number in range(2)]
        rule = "reset", "on", f">{PASSWORD}", "~*", "+@all"
        for port in [info["tcp_port"], ports[0]]:
            server: Any = Redis(port=port)
            with server:
                server.execute_command("ACL", "SETUSER", "clerk", *rule)
    findings = await examined(behind_sentinels.url.replace(USER, "clerk", 1), namespace)
    told = of(findings, "permissions", "note").message
    assert f"on its replica 127.0.0.1:{ports[1]} user 'clerk'" in told


@pytest.mark.parametrize("fresh", [False, True], ids=["later", "at its start"])
async def test_a_shard_whose_slot_moves_is_told_as_a_problem(cluster: Cluster, sixteen: Engine, fresh: bool) -> None:
    source = strange(cluster)
    tag = next(key for key in source.ask("KEYS", "{post:*}:layout") if cluster.primary_of(key.decode()) is source)
    move = Move(cluster, key_slot(tag), source, cluster.another(source))
    move.begin()
    try:
        move.carry(*move.left()[:1])
        findings = await (examined(cluster.url, "post") if fresh else sixteen.examine())
    finally:
        move.end()
    found = of(findings, "shards", "problem")
    assert found.message == f"1 shard out of reach during the move of slot {move.slot} to another primary"
    assert found.remedy.endswith(f"if it was broken off: redis-cli --cluster fix 127.0.0.1:{source.port}")
    assert of(findings, "namespace").message.endswith(" (in the 15 of 16 shards in reach)")


async def test_after_a_failover_the_primaries_of_now_are_looked_at(cluster: Cluster, sixteen: Engine) -> None:
    heir = cluster.replica_of(cluster.primaries[0])
    heir.ask("CLUSTER", "FAILOVER")
    await until(lambda: heir.is_primary)
    cluster.settle()
    findings = await sixteen.examine()
    assert of(findings, "version").message.startswith("all 3 primaries: ")
    assert "role" not in {one.check for one in findings}
