"""Questions to servers, their answers, and what these mean for a namespace; the checks judge facts, and ask nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal, NamedTuple, TypeAlias, cast

from aiodigest.backends.redis.connections.calls import OLDEST, Connections
from aiodigest.backends.redis.connections.connection import Address, show_address, unchecked
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.connections.url import URL
from aiodigest.backends.redis.layout import SLOTS
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import Argument, load_scripts, text
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Check, Finding

SETTINGS = ("save", "appendfsync", "min-replicas-to-write")
TRIPS = 20
SLOW_CALLS = 128  # looked at, of those in the server's log: as many as it keeps unless it is told otherwise
RECOMMENDED = (7, 2)
FILLING, FULL = 0.8, 0.95  # of maxmemory
SLOW_TRIP = 0.010  # seconds
OFFSET, FAR_OFFSET = 1.0, 60.0  # seconds between two clocks
IN_FILE = ", and the same in its configuration file"
ADD_REPLICA: Mapping[str, str] = {
    "": "add a replica, and redis+sentinel:// to fail over to it (README.md, With replicas and Sentinel)",
    "sentinel": "start the old primary again (it becomes a replica), or add a replica",
    "cluster": "start its replica again, or add one: redis-cli --cluster add-node NEW:PORT HOST:PORT --cluster-slave",
}
LOG = "look into the server's log: most often its disk is full, or it may not write to its folder"
CHECKED = "leave ssl_cert_reqs and ssl_check_hostname out; give a CA of your own as ssl_ca_certs=FILE"
STRANGE = "unknown there, disabled, or has another password"
SAME_USERS = "give every node the same users (docs/security.md#users), and keep them: ACL SAVE or CONFIG REWRITE"
TWO_WORDS = {"CONFIG", "CLUSTER", "SLOWLOG"}  # commands whose second word is part of their names

Level: TypeAlias = Literal["ok", "note", "problem"]


class Queries:
    """Questions over some connections, or ``at`` one server, and a note of each that was refused."""

    def __init__(self, connections: Connections, at: ServerConnections | None = None) -> None:
        self.connections = connections
        self._at = at
        self.user = connections.url.user
        self.notes: list[Finding] = []

    async def ask(self, check: Check, subject: str, *command: Argument, key: str = "") -> object | None:
        """Return the reply to a command; None if it is refused, which leaves ``subject`` unknown. Raises
        ConfigurationError if the user may do nothing there."""
        try:
            return await self.connections.command(key, *command, at=self._at)
        except AiodigestError as error:
            right, reason, remedy = refused(error), str(error), ""
            if right != "command" and isinstance(error, (BackendUnavailable, ConfigurationError)):
                raise
            if right:
                words = [str(word) for word in command[: 1 + (command[0] in TWO_WORDS)]]
                reason = f"user {self.user!r} may not run {' '.join(words)}"
                remedy = grant(self.user, ["|".join(words)])
            self.notes.append(Finding(check, "note", f"{subject}: not looked at, since {reason}", remedy))
            return None


def grant(user: str, commands: Iterable[str]) -> str:
    """Return the command that grants a user ``commands``."""
    return f"ACL SETUSER {user} {' '.join(f'+{command.lower()}' for command in sorted(commands))}"


def graded(check: Check, level: Level, message: str, trouble: str, remedy: str, value: float | None = None) -> Finding:
    """Make a finding; ``trouble`` (the rest of the message) and the remedy are told unless all is well."""
    return Finding(check, level, *((message, "") if level == "ok" else (message + trouble, remedy)), value)


def in_bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def in_time(seconds: float) -> str:
    """Show a duration to people."""
    for most, unit, size in ((1, "ms", 0.001), (120, "s", 1), (7_200, "minutes", 60), (172_800, "hours", 3_600)):
        if seconds < most:
            return f"{seconds / size:.2f} ms" if seconds < 0.1 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def several(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


class SlowCall(NamedTuple):
    """A call of an aiodigest script in the server's log of slow calls."""

    script: str
    seconds: float
    age: float


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server's answers; a missing one is empty or None."""

    info: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    cluster: Mapping[str, str] = field(default_factory=dict[str, str])
    trips: Sequence[float] = ()  # round trips, seconds
    offset: float | None = None  # of the server's clock, seconds ahead of this machine's
    logged: int | None = None  # calls in its log of slow ones
    slow: Sequence[SlowCall] = ()
    wait_replicas: int = 0  # what the engine wants
    failover: Literal["", "sentinel", "cluster"] = ""  # what follows one

    def number(self, name: str) -> int | None:
        """Return a number from INFO."""
        text = self.info.get(name, "")
        return int(text) if text.isdecimal() else None

    @property
    def replicas(self) -> list[Address]:
        """The replicas that are online, as the server sees them."""
        lines = [at for name, at in self.info.items() if re.fullmatch(r"slave\d+", name) and "state=online" in at]
        known = [dict(word.split("=", 1) for word in line.split(",") if "=" in word) for line in lines]
        return [(each["ip"], int(each["port"])) for each in known]


async def read_server(queries: Queries, namespace: str, wait_replicas: int) -> ServerFacts:
    """Ask a server for its facts."""
    failover = queries.connections.url.failover
    info = _lines(await queries.ask("server", "version, memory, persistence and replicas", "INFO"))
    settings, cluster = dict[str, str](), dict[str, str]()
    for setting in SETTINGS:
        reply = await queries.ask("settings", ", ".join(SETTINGS), "CONFIG", "GET", setting)
        if reply is None:
            break
        words = [text(word) for word in cast("list[bytes]", reply)]
        settings.update(zip(words[::2], words[1::2], strict=True))
    if failover == "cluster":
        cluster = _lines(await queries.ask("cluster", "its state", "CLUSTER", "INFO"))
        await queries.ask("cluster", "slots that are on their way to it", "CLUSTER", "NODES")  # workers ask so too
    samples: list[tuple[float, float]] = []  # round trips, and how far the server's clock was ahead; seconds
    for _ in range(TRIPS):
        here, began = time.time(), time.perf_counter()
        reply = await queries.ask("clock", "clock and round trip", "TIME")
        trip = time.perf_counter() - began
        if reply is None:
            break
        seconds, micros = cast("list[bytes]", reply)
        samples.append((trip, int(seconds) + int(micros) / 1e6 - (here + trip / 2)))
    offset = min(samples)[1] if samples else None  # the quickest knows best
    log = await queries.ask("slow scripts", "the log of slow calls", "SLOWLOG", "GET", SLOW_CALLS)
    calls = cast("list[list[object]] | None", log)
    slow = _slow_calls(namespace, calls or [], time.time() + (offset or 0))
    logged = None if calls is None else len(calls)
    return ServerFacts(
        info, settings, cluster, [trip for trip, _ in samples], offset, logged, slow, wait_replicas, failover
    )


def _lines(reply: object) -> dict[str, str]:
    """Parse INFO into fields by name."""
    lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
    return {name: value for name, colon, value in (line.partition(":") for line in lines) if colon}


def _slow_calls(namespace: str, calls: Sequence[Sequence[object]], now: float) -> list[SlowCall]:
    """Return the slow calls of scripts on the namespace's keys."""
    names, found = {script.sha: name for name, script in load_scripts().items()}, list[SlowCall]()
    keys = f"{{{namespace}}}:".encode(), f"{{{namespace}:".encode()
    for call in calls:
        _, began, micros, words, *_ = cast("tuple[int, int, int, list[bytes], *tuple[object, ...]]", call)
        if len(words) > 3 and words[0].upper() in (b"EVALSHA", b"EVAL") and words[3].startswith(keys):
            found.append(SlowCall(names.get(text(words[1]), "a script"), micros / 1e6, max(0.0, now - began)))
    return found


async def examine_servers(
    namespace: Namespace, connections: Connections, primaries: Sequence[ServerConnections]
) -> list[Finding]:
    """Check each primary; a finding that several share is reported once."""
    told = await asyncio.gather(*(_examine_server(namespace, Queries(connections, server)) for server in primaries))
    if len(primaries) == 1:
        return told[0]
    places: dict[Finding, list[str]] = {}
    for primary, findings in zip(primaries, told, strict=True):
        for finding in findings:
            places.setdefault(finding, []).append(show_address(*primary.url.address))
    checks = [finding.check for finding in places]
    where = {
        one: f"all {len(primaries)} primaries" if len(at) == len(primaries) else ", ".join(at)
        for one, at in sorted(places.items(), key=lambda each: checks.index(each[0].check))
    }
    return [replace(one, message=f"{at}: {one.message}") for one, at in where.items()]


async def _examine_server(namespace: Namespace, queries: Queries) -> list[Finding]:
    try:
        facts = await read_server(queries, namespace.name, namespace.wait_replicas)
    except (BackendUnavailable, ConfigurationError) as error:
        if not queries.connections.url.nodes:
            raise
        if isinstance(error, BackendUnavailable):
            remedy = "bring it back, or fail over to its replica"
            return [Finding("server", "problem", f"what it holds is out of reach: {error}", remedy)]
        told = f"user {queries.user!r} is {STRANGE}" if refused(error) == "login" else str(error)
        return [Finding("permissions", "problem", told, SAME_USERS)]
    strangers = await _examine_replicas(queries.connections, facts) if facts.failover else []
    return [*check_server(facts), *strangers, *queries.notes]


async def _examine_replicas(connections: Connections, facts: ServerFacts) -> list[Finding]:
    """Find replicas that do not know the user: one of them may be the next primary."""
    url, found = connections.url, list[Finding]()
    for address in map(url.as_seen, facts.replicas):
        replica = Connections(replace(url.at(address), sentinels=None, nodes=()), connections.timeout)
        try:
            await replica.command("", "TIME")
        except AiodigestError as error:
            if refused(error) == "login":
                where = f"on its replica {show_address(*address)} user {url.user!r} is {STRANGE}"
                found.append(Finding("permissions", "note", f"{where}: a failover to it shuts it out", SAME_USERS))
        finally:
            await replica.close()
    return found


# Checks


def check_version(facts: ServerFacts) -> Iterator[Finding]:
    compatible = re.match(r"(\d+)\.(\d+)", facts.info.get("redis_version", ""))
    if compatible is None:
        return
    name = facts.info.get("server_name", "redis")
    message = f"{name.capitalize()} {facts.info.get(f'{name}_version', facts.info['redis_version'])}"
    version = int(compatible[1]), int(compatible[2])
    level = "problem" if version < OLDEST else "note" if version < RECOMMENDED else "ok"
    trouble = "; 6.2 is the oldest that works" if level == "problem" else " works; 7.2 or newer is recommended"
    yield graded("version", level, message, trouble, "upgrade to Redis 7.2 or Valkey")


def check_role(facts: ServerFacts) -> Iterator[Finding]:
    if facts.info.get("role") == "slave":
        remedy = "give the URL of its primary, or redis+sentinel://, or redis+cluster://"
        yield Finding("role", "problem", "it is a replica, and refuses every write", remedy)


def check_eviction(facts: ServerFacts) -> Iterator[Finding]:
    policy, most = facts.info.get("maxmemory_policy"), facts.number("maxmemory")
    if policy is None or most is None:
        return
    level: Level = "ok"
    message = ": a full server refuses adds, and drops nothing"
    if policy != "noeviction" and most:
        level, message = "problem", f": once {in_bytes(most)} are full, it drops keys, and stored records with them"
    elif policy != "noeviction":
        level, message = "note", ", which drops stored records as soon as a maxmemory is set"
    evicted = facts.number("evicted_keys") or 0
    so_far = f"; it has dropped {evicted:,} keys since it started" if evicted else ""
    remedy = f"CONFIG SET maxmemory-policy noeviction{IN_FILE}"
    yield graded("eviction", level, f"maxmemory-policy is {policy}{message}", so_far, remedy)


def check_tls(url: URL, timeout: float) -> Iterator[Finding]:
    if problem := unchecked(url.connection(timeout)):
        yield Finding("tls", "note", problem, CHECKED)
    elif url.is_encrypted:
        yield Finding("tls", "ok", "the certificates of servers are checked, and their names")


def check_memory(facts: ServerFacts) -> Iterator[Finding]:
    used, most = facts.number("used_memory"), facts.number("maxmemory")
    if used is None or most is None:
        return
    used -= facts.number("mem_not_counted_for_evict") or 0
    if not most:
        yield Finding("memory", "ok", f"{in_bytes(used)} are used; maxmemory is not set")
        return
    share = used / most
    level = "problem" if share >= FULL else "note" if share >= FILLING else "ok"
    message = f"{in_bytes(used)} of the {in_bytes(most)} of maxmemory are used ({share:.0%})"
    remedy = f"CONFIG SET maxmemory with more{IN_FILE}; redis-cli --memkeys tells what takes it"
    yield graded("memory", level, message, "; when it is full, adds are refused", remedy)


def check_persistence(facts: ServerFacts) -> Iterator[Finding]:
    log, save, sync = (facts.info.get("aof_enabled"), facts.settings.get("save"), facts.settings.get("appendfsync"))
    level: Level = "note"
    match log, save, sync:
        case "0", "", _:
            level = "problem"
            message = "there is no append-only file and no snapshot: all records are lost when the server restarts"
        case "0", str(), _:
            changes = f"{facts.number('rdb_changes_since_last_save') or 0:,} changes now"
            message = f"there are only snapshots (save {save}): what came since the last one ({changes})"
            message += " is lost if the server is killed"
        case "0", None, _:
            message = "there is no append-only file; whether it saves was not told"
        case "1", _, "always":
            level, message = "ok", "append-only file, appendfsync always: on the disk before the answer"
        case "1", _, "everysec":
            message = "append-only file, appendfsync everysec: a power cut may lose a second of what was stored"
        case "1", _, str():
            message = f"append-only file, appendfsync {sync}: a power cut may lose all that the system has not written"
            message += " yet, half a minute or more"
        case "1", _, None:
            level, message = "ok", "append-only file; how often it is synced was not told"
        case _:
            return
    always = f"CONFIG SET appendfsync always{IN_FILE}, if that may not be: each call then waits for the disk"
    yield graded("persistence", level, message, "", f"CONFIG SET appendonly yes{IN_FILE}" if log == "0" else always)


def check_saves(facts: ServerFacts) -> Iterator[Finding]:
    failures = {
        "aof_last_write_status": "the last write to its append-only file failed, so it refuses writes",
        "aof_last_bgrewrite_status": "the last rewrite of its append-only file failed, so the file goes on growing",
        "rdb_last_bgsave_status": "its last snapshot failed; by default it refuses writes from then on",
    }
    for name, message in failures.items():
        if facts.info.get(name) == "err":
            yield Finding("disk", "problem", message, LOG)


def check_replicas(facts: ServerFacts) -> Iterator[Finding]:
    if facts.info.get("role") != "master":
        return
    online = len(facts.replicas)
    least, good = int(facts.settings.get("min-replicas-to-write") or 0), facts.number("min_slaves_good_slaves")
    level: Level = "problem"
    message, remedy = f"{online} {'replica is' if online == 1 else 'replicas are'} connected", ""
    if least and good is not None and good < least:
        message = f"{good} of the {least} that min-replicas-to-write wants: it refuses writes"
        remedy = f"bring replicas back, or CONFIG SET min-replicas-to-write {good}"
    elif online < facts.wait_replicas:
        message += f", and wait_replicas={facts.wait_replicas}: every add fails"
        remedy = "bring replicas back, or give the engine a smaller wait_replicas"
    elif not online:
        lost = "are its shards" if facts.failover == "cluster" else "is the namespace"
        level, message = "note", f"there is no replica: while this server is away, so {lost}"
        remedy = ADD_REPLICA[facts.failover]
    elif not least and "min-replicas-to-write" in facts.settings:
        level, remedy = "note", f"CONFIG SET min-replicas-to-write 1{IN_FILE}"
        message += "; min-replicas-to-write is 0: a primary that is cut off stores adds that a failover loses"
    else:
        level = "ok"
    yield Finding("replicas", level, message, remedy)
    if 0 < facts.wait_replicas < online:
        message = f"an add waits for {facts.wait_replicas} of {online}: a failover to another one, also one that is "
        message += "planned, loses what that one does not have"
        remedy = (
            f"give the engines wait_replicas={online}, or pause writes before a planned one: CLIENT PAUSE 10000 WRITE"
        )
        yield Finding("replicas", "note", message, remedy)


def check_clock(facts: ServerFacts) -> Iterator[Finding]:
    if facts.offset is None:
        return
    apart = abs(facts.offset)
    level = "problem" if apart > FAR_OFFSET else "note" if apart > OFFSET else "ok"
    message = f"the server's is {in_time(apart)} {'ahead of' if facts.offset > 0 else 'behind'} this machine's"
    trouble = ": delays go by the server's, and timestamps that producers give by theirs"
    yield graded("clock", level, message, trouble, "let all machines keep time by NTP (chronyc tracking)", facts.offset)


def check_round_trip(facts: ServerFacts) -> Iterator[Finding]:
    if not facts.trips:
        return
    trip = median(facts.trips)
    message = f"{in_time(trip)} (median of {len(facts.trips)})"
    trouble = ": each add that is awaited alone takes that long"
    remedy = "run workers and producers close to the server; concurrent adds share their calls all the same"
    yield graded("round trip", "note" if trip > SLOW_TRIP else "ok", message, trouble, remedy, trip)


def check_slow_scripts(facts: ServerFacts) -> Iterator[Finding]:
    if facts.logged is None:
        return
    if not facts.slow:
        yield Finding("slow scripts", "ok", f"none among the {facts.logged} calls in its log of slow ones")
        return
    longest, latest = max(facts.slow, key=lambda call: call.seconds), min(call.age for call in facts.slow)
    message = (
        f"{len(facts.slow)} of the {facts.logged} calls in its log of slow ones are scripts of this namespace: "
        f"the longest, {longest.script}, took {in_time(longest.seconds)}; the latest came {in_time(latest)} ago"
    )
    remedy = "long timelines make long scripts (Policy.capacity); so does a server that shares its processor or swaps"
    yield Finding("slow scripts", "note", message, remedy, longest.seconds)


def check_cluster(facts: ServerFacts) -> Iterator[Finding]:
    if not facts.cluster:
        return
    state, served = facts.cluster.get("cluster_state"), int(facts.cluster.get("cluster_slots_ok") or 0)
    message = f"cluster_state is {state}, {served:,} of {SLOTS:,} slots are served"
    level = "ok" if state == "ok" and served == SLOTS else "problem"
    remedy = "redis-cli --cluster check HOST:PORT names the slots; bring their primaries back, or --cluster fix"
    yield graded("cluster", level, message, ": what is in the others is out of reach", remedy)


CHECKS: Sequence[Callable[[ServerFacts], Iterator[Finding]]] = (
    check_version, check_role, check_eviction, check_memory, check_persistence, check_saves, check_replicas,
    check_cluster, check_clock, check_round_trip, check_slow_scripts,
)  # fmt: skip


def check_server(facts: ServerFacts) -> list[Finding]:
    """Return all findings on a server."""
    return [finding for check in CHECKS for finding in check(facts)]
