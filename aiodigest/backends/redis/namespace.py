"""A namespace on a server or a cluster: its shards, and the way to run a script on one of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Literal, Protocol, Self, TypeVar, cast, runtime_checkable

from aiodigest.backend import MAX_SHARDS, SLICE, Retired, ShardMap
from aiodigest.backends.redis.connections.calls import Connections, LayoutMismatch, join_connections, leave_connections
from aiodigest.backends.redis.connections.errors import DEMOTED, code_of, explain, refused
from aiodigest.backends.redis.connections.url import Source, read_url
from aiodigest.backends.redis.layout import RETIRED, Home, KnownLayout, Layout, learn, place
from aiodigest.backends.redis.scripts import Argument, commands_of, load_script, load_scripts, text
from aiodigest.errors import (
    AiodigestError,
    BackendUnavailable,
    ConfigurationError,
    InvalidState,
    LeaseLost,
    printable,
    shown,
)
from aiodigest.logs import logger_of

logger = logger_of(__name__)

T = TypeVar("T")

BATCH = 256  # items a call, so that no script is long
ARGUMENTS = 20_000  # arguments a call, unless one item alone has more
ROUNDS = 3  # of a call: how often it may meet a layout that is new to this process


@runtime_checkable
class Server(Protocol):
    """A server that is started, or joined, when a backend connects."""

    url: str  # as users give it

    async def start(self) -> str: ...  # or join it; returns its URL for redis-py
    async def stop(self) -> None: ...  # ends this user's share of it
    def why_down(self) -> str | None: ...  # None: it is up
    def clone(self) -> Self: ...  # with a share of its own, not started


@dataclass(eq=False, repr=False)
class Namespace:
    """A namespace on a server or a cluster: knows its layout, and runs scripts on its shards."""

    source: Source | Server
    name: str
    shards: int | None  # what the engine wants; None: as many as there are
    timeout: float
    wait_replicas: int
    now: Callable[[], int] | None  # None: the server's

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.name):
            raise ConfigurationError(
                f"a namespace is 1 to 64 letters, digits, dots, dashes or underscores; it is {shown(self.name)}"
            )
        if self.shards is not None and (type(self.shards) is not int or not 1 <= self.shards <= MAX_SHARDS):
            raise ConfigurationError(f"shards must be from 1 to {MAX_SHARDS}, or None; it is {shown(self.shards)}")
        self.root = f"{{{self.name}}}:layout"  # holds the layout: all processes find it, whatever layout they know
        self.server = self.source if isinstance(self.source, Server) else None
        self.target = read_url("unix:///not/started/yet" if self.server else self.source)
        self._connections: Connections | None = None
        self._opening: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._connectors = 0  # that are connecting
        self._is_fresh = False  # opened by these, none of whom has come to the end
        self._is_ready = False  # connected, and all that there is to know before a call is known
        self._layout = place(Layout(self.shards), wanted=self.shards) if self.shards else None
        self._denied: frozenset[str] = frozenset()  # commands that the user may not run
        self._tags: dict[Home, str] = {}
        self._marked: Layout | None = None  # whose first shard hands out no tokens any more

    @property
    def url(self) -> str:
        """The server's URL without its password."""
        return self.target.shown if self.server is None else self.server.url

    @property
    def place(self) -> object:
        """The server, equal for two backends on one, and the name."""
        return self.target.place if self.server is None else getattr(self.server, "folder", self.server.url), self.name

    @property
    def layout(self) -> KnownLayout:
        """The layout as this process knows it now."""
        if self._layout is None:
            raise ConfigurationError("how many shards there are is known once the backend is connected")
        return self._layout

    @property
    def shard_map(self) -> ShardMap:
        """The shards as this process knows them now."""
        return self.layout.shard_map

    def key(self, shard: int, name: str) -> str:
        """Return the key of a shard's data of this name."""
        home = self.layout.homes[shard]
        if home not in self._tags:
            self._tags[home] = home.layout.tag(self.name, home.number)
        return f"{{{self._tags[home]}}}:{name}"

    def time(self) -> Argument:
        """Return the time that scripts are given: '' for the server's."""
        return "" if self.now is None else self.now()

    async def clock_ms(self, shard: int) -> int:
        """Return the time by the clock of a shard's server, as it is known, or the one that tests give."""
        if self.now is not None:
            return self.now()
        connections = await self.connected()
        try:
            return await connections.clock_ms(self.key(shard, "layout"))
        except BackendUnavailable as error:
            raise self._explained(error, "no") from error.__cause__

    # Connecting

    async def connect(self) -> None:
        """Look up the layout; a namespace without one gets it from the first call that creates one.

        Of several at once, which share the connections, the last one leaves them if none has come to the end.
        """
        self._connectors += 1
        try:
            await self._open()
            connections = self.connections
            load_scripts()
            await connections.check_version(self.root)
            await self.look_up()
            if self.wait_replicas:  # a refusal after the add would leave the caller in the dark
                try:
                    await connections.command(self.root, "WAIT", 0, 1)
                except AiodigestError as error:  # a replica has no WAIT, and is told from a primary by the first write
                    if isinstance(error, (ConfigurationError, BackendUnavailable)):
                        raise
            self._denied = await self._ask_permits()
            if self._connections is not connections:
                raise BackendUnavailable(f"the connections to {self.url} were closed meanwhile")
            self._is_ready = True  # not before all is known: a call looks again until then
            self._is_fresh = False
        except BackendUnavailable as error:
            self._is_fresh = False
            raise self._explained(error, "no") from error.__cause__  # stays open: the next call looks again
        except BaseException as error:
            if self._is_fresh and self._connectors == 1:
                await self._leave()
            if isinstance(error, AiodigestError) and refused(error) == "keys":
                keys = f"~{{{self.name}}}:*, or for several shards ~{self.root} ~{{{self.name}:*}}:*"
                hint = "" if self.shards else "; with rules for several, give shards= where the namespace is new"
                problem = f"its user may not use the keys of this namespace: it needs {keys} (docs/security.md#users)"
                raise ConfigurationError(f"{self.url} refuses access: {problem}{hint}") from error
            raise
        finally:
            self._connectors -= 1

    async def _open(self) -> None:
        """Open the connections, and first a server of one's own, unless another call has done so."""
        loop = asyncio.get_running_loop()
        if self._opening is None or self._opening[0] is not loop:
            self._opening = loop, asyncio.Lock()
        async with self._opening[1]:
            if self._connections is None:
                if self.server is not None:
                    self.target = read_url(await self.server.start())
                self._connections = join_connections(self.target, self.timeout)
                self._is_fresh = True

    @property
    def connections(self) -> Connections:
        """The connections; BackendUnavailable if there are none."""
        if self._connections is None:
            raise BackendUnavailable(f"the backend is not connected to {self.url}")
        return self._connections

    async def _leave(self) -> None:
        self._is_ready = False
        connections, self._connections = self._connections, None
        if connections is not None:
            await leave_connections(connections)

    async def aclose(self) -> None:
        """Close the connections, and end the share of a server of one's own."""
        try:
            await self._leave()
        finally:
            if self.server is not None:
                await self.server.stop()

    async def connected(self) -> Connections:
        """Return the connections, with the layout known; look it up again if the server was away at first."""
        if self._connections is not None and not self._is_ready:
            await self.connect()
        return self.connections

    async def opened(self) -> Connections:
        """Return the connections, and look nothing up: for who may not use the keys of this namespace."""
        if self._connections is None:
            await self._open()
            await self.connections.check_version(self.root)
        return self.connections

    async def leave(self, shard: int) -> None:
        """Close idle connections to a shard's server: it answers what was not asked, or is no primary any more."""
        if self._connections is not None:
            await self._connections.hang_up(self.key(shard, "layout"))

    def why_down(self) -> str | None:
        """Explain why a server of one's own is down; None if it is up, or there is none."""
        return None if self.server is None else self.server.why_down()

    def _explained(self, error: BackendUnavailable, stored: Literal["no", "unknown"]) -> BackendUnavailable:
        """Return the error of a call, with the reason for which a server of one's own is down."""
        reason, message = self.why_down(), str(error)
        return BackendUnavailable(
            f"{message} ({reason})" if reason and reason not in message else message, stored=stored
        )

    # What there is to know before a call

    async def look_up(self) -> None:
        """Read which layout takes the adds now, and which one is being drained."""
        reply = await self.connections.command(self.root, "HMGET", self.root, "current", "version", "drains")
        told = [text(field) if field else "" for field in cast("list[bytes | None]", reply)]
        known = self._layout if self._is_ready else None
        layout = self._layout = learn(known, told, self.name, self.shards)
        if known is not None and layout.current != known.current:
            had, has = known.current.shards, layout.current.shards
            facts = {"namespace": self.name, "shards": has}
            logger.info("the namespace goes over from %d to %d shards", had, has, extra=facts)

    async def _ask_permits(self) -> frozenset[str]:
        """Return the scripts' commands that the user may not run."""
        problem: AiodigestError | None = None
        # rules should be the same everywhere; a few shards are asked, so that one whose server is away, or has lost its
        # users, keeps nobody out
        for shard in self.shard_map.current[:: -(-self.shard_map.adding // 3)]:
            try:
                return await self.denied_on(shard)
            except (BackendUnavailable, ConfigurationError) as error:
                if isinstance(error, ConfigurationError) and refused(error) != "login":
                    raise
                problem = error
        raise problem or BackendUnavailable(f"{self.url} has no shards")

    async def denied_on(self, shard: int) -> frozenset[str]:
        """Return the scripts' commands that the user may not run on the server of a shard."""
        asked = sorted(commands_of(*load_scripts()))
        answer = await self.connections.run("permits", self.key(shard, "permits"), asked)
        return frozenset(map(text, cast("list[bytes]", answer)))

    async def permit(self, *names: str) -> None:
        """Refuse scripts with a command that would be refused, before they do anything."""
        needed = commands_of(*names)
        if needed & self._denied:
            self._denied = await self._ask_permits()  # its rule may have been mended
            if missing := needed & self._denied:
                commands = " ".join(f"+{command.lower()}" for command in sorted(missing))
                user, scripts = self.target.user, ", ".join(name for name in names if commands_of(name) & missing)
                raise ConfigurationError(
                    f"{self.url} refuses access: to do this ({scripts}), user {user!r} needs {commands}: "
                    f"ACL SETUSER {user} {commands}"
                )

    # Calling

    async def call(
        self,
        name: str,
        shard: int,
        *arguments: Argument,
        repeat: bool = False,
        now: Argument | None = None,
        settled: bool = False,
        late: float = inf,
    ) -> object:
        """Run a script on a shard, and make the shard's layout first if it has none; nothing is done from ``late`` on.

        ``repeat`` if it may run twice although its second answer may be another one. Raises Retired, and does nothing,
        if the shard no longer takes adds (and this is one, or ``settled``), or no longer takes anything.
        """
        sent = may_be_done = False
        try:
            connections = await self.connected()
            if self._denied:
                await self.permit(name)
            key, now = self.key(shard, "layout"), self.time() if now is None else now
            replicas = self.wait_replicas if load_script(name).replicated else 0
            for _ in range(ROUNDS):
                version = await self._version(shard, newest=settled or name == "add")
                if replicas and (layout := self.layout).is_rumoured:
                    # nothing is added to it before the replicas know it: a promoted one must not forget it
                    if await self.note(self.root, "current", layout.current, replicas) != layout.current.version:
                        await self.look_up()
                    elif self.layout.current == layout.current:
                        self._layout = self.layout._replace(is_rumoured=False)
                    continue
                try:
                    sent = True
                    return await connections.run(
                        name, key, (version, now, *arguments), repeat=repeat, replicas=replicas, late=late
                    )
                except LayoutMismatch as mismatch:
                    # it has not failed (calls.py sends again what has), but did nothing, as its version was out of
                    # date: to look that up takes other calls, so it is made anew here and not there
                    sent, may_be_done = False, may_be_done or mismatch.may_be_done
                    await self._mend(connections, shard, mismatch.stored)
            raise BackendUnavailable(f"the layout of namespace {self.name!r} is being changed")
        except BackendUnavailable as error:
            raise self._explained(
                error, "unknown" if may_be_done else error.stored if sent else "no"
            ) from error.__cause__

    async def call_each(
        self,
        name: str,
        shard: int,
        head: Sequence[Argument],
        items: Sequence[Sequence[Argument]],
        read: Callable[[object], T],
        *,
        numbered: bool = False,
    ) -> list[T | AiodigestError]:
        """Call a script for all items, in as many calls as needed; return their answers, or their timelines' errors.

        ``read`` unpacks an answer. ``numbered`` if the script is to be told the number of its first item.
        """
        told: list[T | AiodigestError] = []
        now = self.time()
        while left := items[len(told) :]:
            arguments, sent = [*head, len(told) + 1] if numbered else [*head], 0
            for item in left[:BATCH]:
                if len(arguments) > ARGUMENTS:
                    break
                arguments += item
                sent += 1
            reply = cast("list[object]", await self.call(name, shard, *arguments, now=now))
            told += await self.answers_of(shard, reply, [str(item[0]) for item in left[:sent]], read)
        return told

    async def answers_of(
        self, shard: int, answers: Sequence[object], keys: Sequence[str], read: Callable[[object], T]
    ) -> list[T | AiodigestError]:
        """Unpack the answers of the first of some items, by their timelines' keys; no answer, or more than there are
        items, was another question's."""
        problems = [text(answer) for answer in answers if isinstance(answer, bytes)]
        fits = 0 < len(answers) <= len(keys)
        if not fits or DEMOTED.intersection(map(code_of, problems)):
            await self.leave(shard)
        if not fits:
            problem = f"it returned {len(answers)} answers for {len(keys)} items"
            raise BackendUnavailable(f"{self.url} is unavailable: {problem}", stored="unknown")
        if not problems:
            return [*map(read, answers)]
        return [
            self.broken(key, text(answer)) if isinstance(answer, bytes) else read(answer)
            for key, answer in zip(keys, answers, strict=False)
        ]

    async def read(self, shard: int, key: str, token: str, digest_id: str, start: int, count: int) -> list[bytes]:
        """Return up to ``count`` entries of a timeline from ``start`` on; fewer if they are large, none after the last.
        With a token, those of the digest in delivery."""
        page = await self.call("read", shard, key, token, digest_id, start, min(SLICE, count))
        if page == b"lost":
            raise LeaseLost(f"the lease on timeline {key!r} is lost")
        return cast("list[bytes]", page)

    async def _version(self, shard: int, *, newest: bool) -> str:
        """Return the version that a script must find at a shard; Retired if it must not run there: it may run in the
        drained layout too, unless ``newest``."""
        layout = self.layout.homes[shard].layout
        if layout.epoch > self.layout.current.epoch:  # an old answer came after a newer one
            await self.look_up()
            if layout.epoch > self.layout.current.epoch:  # the server was emptied, and the namespace began anew
                raise self._gone(shard)
        if layout == self.layout.current:
            return layout.version
        if newest or layout != self.layout.drained:
            raise self._gone(shard)
        return layout.draining

    async def _mend(self, connections: Connections, shard: int, stored: str) -> None:
        """Learn the current layout, and make or mark the shard's, after a script found another layout and did nothing.

        A mark unknown to the namespace is taken back: its server was emptied, or forgot the change in a
        failover. The mark is older than this look, because shards are marked after the change has begun.
        """
        key, layout = self.key(shard, "layout"), self.layout.homes[shard].layout
        await self.look_up()
        if layout == self.layout.current:
            before, fits, is_old = stored, layout.version, stored in (layout.draining, RETIRED)
            if stored == "none":  # a new namespace or shard, or a server that was emptied
                if await self.note(self.root, "current", layout) != layout.version:  # somebody was faster
                    await self.look_up()
                    return
                for where in (self.root, key):  # the first so that one who knows of a single shard is refused
                    await self.note(where, "version", layout)
                return
        elif layout == self.layout.drained:
            before, fits, is_old = layout.version, layout.draining, stored in (layout.version, "none")
            if stored == RETIRED:
                raise self._gone(shard)
        else:
            return
        if is_old:
            await connections.run("drain", key, [before, "", fits])
        elif stored != fits:  # else another call has mended it meanwhile
            raise ConfigurationError(
                f"shard {shard} of namespace {self.name!r} has the layout {stored}, which does not fit the "
                f"namespace's {self.layout.current.version}: another program has written it"
            )

    async def source_of_tokens(self) -> int:
        """Return the shard that hands out the tokens of a throttle: the first that takes adds.

        While there are shards that take none any more, the first of these is marked beforehand: from then on nobody
        gets a token there, so that the new source knows until when the last may be used.
        """
        shards = self.shard_map
        if (drained := self.layout.drained) is not None and self._marked != drained:
            mark = [drained.version, "", drained.draining]
            await self.connections.run("drain", self.key(shards.draining.start, "layout"), mark)
            self._marked = drained
        return shards.current.start

    async def note(self, where: str, field: str, layout: Layout, replicas: int = 0) -> str:
        """Write a layout down unless there is one; wait until replicas have the current one, and return its version."""
        reply = await self.connections.run("layout", where, [field, "", layout.version], replicas=replicas)
        return text(cast("list[bytes]", reply)[1])

    def _gone(self, shard: int) -> Retired:
        home = self.layout.homes[shard]
        had = f"{home.layout.shards} that {self.name!r} had before"
        return Retired(f"shard {home.number} of the {had} is used no more")

    # Calling on several shards

    async def each_shard(self, of: Callable[[ShardMap], Sequence[int]] = attrgetter("live")) -> AsyncIterator[int]:
        """Yield shards, by default those that may hold something, and any that a call to one of them reveals."""
        await self.connected()
        seen = set[int]()
        while left := [shard for shard in of(self.shard_map) if shard not in seen]:
            seen.add(left[0])
            yield left[0]

    async def call_all(self, name: str, *arguments: Argument, now: Argument | None = None) -> AsyncIterator[object]:
        """Yield the answer of each shard that may hold something."""
        async for shard in self.each_shard():
            with suppress(Retired):
                yield await self.call(name, shard, *arguments, now=now)

    async def call_of(self, key: str, name: str, *arguments: Argument) -> list[object]:
        """Return the answers of the shards that may hold a timeline: one, except while resharding."""
        answers: list[object] = []
        async for shard in self.each_shard(lambda shards: shards.shards_of(key)):
            with suppress(Retired):
                answers.append(await self.call(name, shard, *arguments))
        for answer in answers:
            if isinstance(answer, bytes):
                raise self.broken(key, text(answer))
        return answers

    async def move(self, shard: int, letter_id: str, *, forget_missing: bool = True) -> None:
        """Give a dead letter to the shard that has its timeline now; drop the id of one whose facts have expired, which
        moving all of them would meet forever. Raises InvalidState if it is broken."""
        start, found = 0, False
        while reply := await self.call("letter", shard, letter_id, start):
            found = True
            *facts, size, page = cast("tuple[bytes, bytes, int, int, bytes, bytes, int, list[bytes]]", reply)
            if size < 0:
                raise InvalidState(f"dead letter {letter_id!r} is broken: {text(facts[1])}; discard it")
            end = start + len(page)
            target = self.shard_map.shard_of(text(facts[0]))
            if not await self.call("keep", target, letter_id, *facts, start, int(end >= size), *page):
                start = 0
                continue
            if end >= size or not page:
                break
            start = end
        if found or forget_missing:
            await self.call("discard", shard, letter_id, repeat=True)

    async def bring(self, letter_id: str) -> int | None:
        """Move a dead letter if it is still in an old shard; return that if it is broken, and cannot be moved."""
        for shard in self.shard_map.draining:
            try:
                await self.move(shard, letter_id, forget_missing=False)
            except Retired:
                pass
            except InvalidState:
                return shard
        return None

    def broken(self, key: str, problem: str) -> AiodigestError:
        """Turn the error text of a timeline into an error."""
        error = explain(problem, self.url)
        if isinstance(error, (BackendUnavailable, ConfigurationError)):
            return error
        return InvalidState(f"timeline {key!r} is broken: {printable(problem)}")
