"""A namespace on a server or a cluster: its shards, and the way to run a script on one of them."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast
from uuid import uuid4
from zlib import crc32

from aiodigest.backend import MAX_SHARDS, Retired
from aiodigest.backends.redis.connections.errors import lacks_keys, refused
from aiodigest.backends.redis.connections.server import LayoutMismatch
from aiodigest.backends.redis.connections.shared import AnyLink, join_link, leave_link
from aiodigest.backends.redis.connections.url import Source, find_target
from aiodigest.backends.redis.layout import Home, Layout, read_layout
from aiodigest.backends.redis.scripts import COMMANDS, REPLICATED, Argument, load_scripts, text
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, shown

logger = logging.getLogger(__name__)

RETIRED = "retired"  # the version of a shard that was drained and is no more


class Namespace:
    """A namespace on a server or a cluster.

    Parameters
    ----------
    source : str, redis.asyncio.Redis or redis.asyncio.RedisCluster
        ``redis[s]://``, ``unix://``, ``redis[s]+sentinel://`` or ``redis[s]+cluster://``, or a client whose settings
        are copied.
    namespace : str
        1 to 64 letters, digits, dots, dashes or underscores.
    shards : int or None
        From 1 to 1024; None: as many as the namespace has, 1 if it is new.
    timeout : float
        Seconds for a call, from its wait for a connection to its answer.
    wait_replicas : int
        An add returns once so many replicas have it (``WAIT``).
    now, nonce
        The clock (ms; None: the server's) and the source of names that no other has; tests give their own.
    """

    def __init__(
        self,
        source: Source,
        *,
        namespace: str,
        shards: int | None = None,
        timeout: float = 5.0,
        wait_replicas: int = 0,
        now: Callable[[], int] | None = None,
        nonce: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", namespace):
            raise ConfigurationError(
                f"a namespace is 1 to 64 letters, digits, dots, dashes or underscores; it is {shown(namespace)}"
            )
        if shards is not None and (type(shards) is not int or not 1 <= shards <= MAX_SHARDS):
            raise ConfigurationError(f"shards must be from 1 to {MAX_SHARDS}, or None; it is {shown(shards)}")
        self.namespace = namespace
        self._wanted = shards
        self._target = find_target(source)
        self._timeout = timeout
        self._replicas = wait_replicas
        self._link: AnyLink | None = None
        self._known = False  # what there is to know before a call
        self._denied: frozenset[str] = frozenset()  # commands that the user may not run
        self._current = Layout(shards or 1)
        self._drained: list[Layout] = []
        self._changes = 0  # of the layout, that this process has heard of
        self._rumoured = False  # the layout was changed, perhaps on a single server so far
        self._homes = [Home(self._current, number) for number in range(shards or 0)]
        self._first = {self._current: 0} if shards else dict[Layout, int]()  # shard of each layout
        self._now = now
        self._nonce = nonce
        self._tags: dict[Home, str] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, namespace={self.namespace!r})"

    @property
    def _root(self) -> str:
        """The key that holds the namespace's layout: all processes find it, whatever layout they know."""
        return f"{{{self.namespace}}}:layout"

    @property
    def url(self) -> str:
        """The server's URL without its password."""
        return self._target.url

    # The layout

    @property
    def shards(self) -> int:
        """The number of shards known to this process.

        Their numbers stay: after a change of the layout, the new shards' numbers come after the old ones'.
        """
        if not self._homes:
            raise ConfigurationError("how many shards there are is known once the backend is connected")
        return len(self._homes)

    def lives(self, shard: int) -> bool:
        return self._homes[shard].layout in (self._current, *self._drained)

    @property
    def changes(self) -> int:
        return self._changes

    @property
    def takers(self) -> int:
        return self._current.shards

    def shard_of(self, key: str) -> int:
        return self._home(self._current) + crc32(key.encode()) % self._current.shards

    def number_of(self, shard: int) -> int | None:
        home = self._homes[shard]
        return home.number if home.layout == self._current else None

    def _home(self, layout: Layout) -> int:
        """Return the first shard of a layout."""
        return self._first[layout]

    def _homes_of(self, key: str) -> list[int]:
        """Return the shards that may hold a timeline, the one that takes its adds first."""
        layouts = (self._current, *self._drained)
        return [self._home(layout) + crc32(key.encode()) % layout.shards for layout in layouts]

    async def _all_shards(self) -> AsyncIterator[int]:
        """Yield the shards that may hold something, including any that a call to one of them reveals."""
        await self._connected()
        seen = set[int]()
        while left := [shard for shard in self._live(self._current, *self._drained) if shard not in seen]:
            seen.add(left[0])
            yield left[0]

    def _live(self, *layouts: Layout) -> list[int]:
        return [shard for shard, home in enumerate(self._homes) if home.layout in layouts]

    async def connect(self) -> None:
        """Look up the layout; a namespace without one gets it from the first call that creates one."""
        fresh = self._link is None
        link = self._link = self._link or join_link(self._target, self._timeout)
        try:
            load_scripts()
            await link.check_version(self._root)
            await self._look_up(link)
            if self._replicas:
                await self._check_wait(link)
            self._denied = await self._ask_permits(link)
            self._known = True  # not before all is known: a call looks again until then
        except BackendUnavailable:
            raise  # stays open: the next call looks again
        except BaseException as error:
            if fresh:
                await self.aclose()
            if isinstance(error, AiodigestError) and refused(error) == "keys":
                raise lacks_keys(self.url, self.namespace, bool(self._wanted)) from error
            raise

    async def _look_up(self, link: AnyLink) -> None:
        """Read which layout takes the adds now, and which one is being drained."""
        fields = "current", "version", "drains"
        reply = await untouched(link.command(self._root, "HMGET", self._root, *fields))
        current, version, drains = [text(name) if name else "" for name in cast("list[bytes | None]", reply)]
        stored = current or ("" if version == RETIRED else version.removesuffix(":draining"))
        if stored:
            layout = read_layout(stored, self.namespace)
        else:  # a new namespace, or a server that was emptied
            layout = self._current if self._known else Layout(self._wanted or 1)
        fixed = not self._known or layout.epoch == self._current.epoch  # else it was changed while this ran
        if fixed and self._wanted not in (None, layout.shards):
            raise ConfigurationError(
                f"namespace {self.namespace!r} has {layout.shards} shards, not {self._wanted}: take "
                f"shards= out of the engine, or give {layout.shards}"
            )
        if not fixed:
            self._wanted = None  # it went over while it ran, and goes on with what is there
        drained = [read_layout(drains, self.namespace)] if drains else []
        if not self._known:
            self._homes.clear()
            self._first.clear()
        for each in (*drained, layout):  # in this order, whoever looks through all misses no letter that moves
            if each not in self._first:
                self._first[each] = len(self._homes)
                self._homes += [Home(each, number) for number in range(each.shards)]
        if (layout, drained) != (self._current, self._drained):
            self._changes += 1
            self._rumoured = layout.epoch > 1 and (self._known or bool(drained))
            if self._known and layout != self._current:
                had, has = self._current.shards, layout.shards
                facts = {"namespace": self.namespace, "shards": has}
                logger.info("namespace %r goes over from %d to %d shards", self.namespace, had, has, extra=facts)
        self._rumoured |= not stored
        self._current, self._drained = layout, drained

    async def _confirm(self, link: AnyLink) -> None:
        """Make sure the replicas know the layout before anything is added to it: a promoted one must not forget it."""
        layout = self._current
        if await self._noted(link, self._root, "current", layout, self._replicas) != layout.version:
            await self._look_up(link)
        elif layout == self._current:
            self._rumoured = False

    async def _check_wait(self, link: AnyLink) -> None:
        """Check that the user may wait for replicas: a refusal after the add would leave the caller in the dark."""
        try:
            await link.command(self._root, "WAIT", 0, 1)
        except (ConfigurationError, BackendUnavailable):
            raise
        except AiodigestError:
            pass  # a replica has no WAIT, and is told from a primary by the first write

    async def _ask_permits(self, link: AnyLink) -> frozenset[str]:
        """Return the scripts' commands that the user may not run."""
        problem: AiodigestError | None = None
        # rules should be the same everywhere; a few shards are asked, so that one whose server is away, or has lost its
        # users, keeps nobody out
        for shard in range(0, self._current.shards, -(-self._current.shards // 3)):
            try:
                return await self._denied_on(link, self._home(self._current) + shard)
            except (BackendUnavailable, ConfigurationError) as error:
                if isinstance(error, ConfigurationError) and refused(error) != "login":
                    raise
                problem = error
        raise problem or BackendUnavailable(f"{self.url} has no shards")

    async def _denied_on(self, link: AnyLink, shard: int) -> frozenset[str]:
        """Return the scripts' commands that the user may not run on the server of a shard."""
        asked = sorted(frozenset[str]().union(*COMMANDS.values()))
        answer = await link.run("permits", self._key(shard, "permits"), asked, repeat=True)
        return frozenset(map(text, cast("list[bytes]", answer)))

    async def _permit(self, link: AnyLink, *names: str) -> None:
        """Refuse scripts with a command that would be refused, before they do anything."""
        needed = frozenset[str]().union(*(COMMANDS.get(name, frozenset()) for name in names))
        if needed & self._denied:
            self._denied = await self._ask_permits(link)  # its rule may have been mended
            if missing := needed & self._denied:
                commands = " ".join(f"+{command.lower()}" for command in sorted(missing))
                user, scripts = self._target.user, ", ".join(name for name in names if COMMANDS[name] & missing)
                raise ConfigurationError(
                    f"{self.url} refuses access: to do this ({scripts}), user {user!r} needs {commands}: "
                    f"ACL SETUSER {user} {commands}"
                )

    async def aclose(self) -> None:
        self._known = False
        link, self._link = self._link, None
        if link is not None:
            await leave_link(link)

    def _key(self, shard: int, name: str) -> str:
        home = self._homes[shard]
        if home not in self._tags:
            self._tags[home] = home.layout.tag(self.namespace, home.number)
        return f"{{{self._tags[home]}}}:{name}"

    async def _call(
        self,
        name: str,
        shard: int,
        *arguments: Argument,
        repeat: bool = True,
        now: Argument | None = None,
        settled: bool = False,
    ) -> object:
        """Run a script on a shard, and make the shard's layout first if it has none.

        Raises Retired, and does nothing, if the shard no longer takes adds (and this is one, or ``settled``), or
        no longer takes anything.
        """
        link = await self._connected()
        await self._permit(link, name)
        key, now = self._key(shard, "layout"), self._time() if now is None else now
        replicas = self._replicas if name in REPLICATED else 0
        for _ in range(3):
            layout = self._homes[shard].layout
            if layout.epoch > self._current.epoch:  # an old answer came after a newer one
                await self._look_up(link)
                if layout.epoch > self._current.epoch:  # the server was emptied, and the namespace began anew
                    raise self._gone(shard)
                continue
            draining = layout in self._drained
            if layout != self._current and (name == "add" or settled or not draining):
                raise self._gone(shard)
            version = layout.draining if draining else layout.version
            if replicas and self._rumoured:
                await self._confirm(link)
                continue
            try:
                return await link.run(name, key, (version, now, *arguments), repeat=repeat, replicas=replicas)
            except LayoutMismatch as mismatch:
                await self._mend(link, shard, mismatch.stored)
        raise BackendUnavailable(f"the layout of namespace {self.namespace!r} is being changed")

    async def _mend(self, link: AnyLink, shard: int, stored: str) -> None:
        """Learn the current layout, and make or mark the shard's, after a script found another layout and did nothing.

        A mark unknown to the namespace is taken back: its server was emptied, or forgot the change in a
        failover. The mark is older than this look, because shards are marked after the change has begun.
        """
        key, layout = self._key(shard, "layout"), self._homes[shard].layout
        await self._look_up(link)
        if layout == self._current:
            fits = layout.version
            if stored == "none":  # a new namespace or shard, or a server that was emptied
                await self._make(link, key, layout)
                return
            if stored in (layout.draining, RETIRED):
                await link.run("drain", key, [stored, layout.version], repeat=True)
                return
        elif layout in self._drained:
            fits = layout.draining
            if stored in (layout.version, "none"):
                await link.run("drain", key, [layout.version, layout.draining], repeat=True)
                return
            if stored == RETIRED:
                raise self._gone(shard)
        else:
            return
        if stored != fits:  # else another call has mended it meanwhile
            raise ConfigurationError(
                f"shard {shard} of namespace {self.namespace!r} has the layout {stored}, which does not fit the "
                f"namespace's {self._current.version}: another program has written it"
            )

    async def _make(self, link: AnyLink, key: str, layout: Layout) -> None:
        """Write a layout down if there is none; learn the other one if somebody was faster."""
        if await self._noted(link, self._root, "current", layout) != layout.version:
            await self._look_up(link)
            return
        for where in (self._root, key):  # the first so that one who knows of a single shard is refused
            await self._noted(link, where, "version", layout)

    async def _noted(self, link: AnyLink, where: str, field: str, layout: Layout, replicas: int = 0) -> str:
        """Write a layout down unless there is one; wait until replicas have the current one, and return its version."""
        noting = link.run("layout", where, [field, layout.version], repeat=True, replicas=replicas)
        return text(cast("list[bytes]", await untouched(noting))[1])

    def _gone(self, shard: int) -> Retired:
        home = self._homes[shard]
        had = f"{home.layout.shards} that {self.namespace!r} had before"
        return Retired(f"shard {home.number} of the {had} is used no more")

    async def _connected(self) -> AnyLink:
        """Return the connections, with the layout known; look it up again if the server was away at first."""
        if self._link is not None and not self._known:
            await self.connect()
        if self._link is None:
            raise BackendUnavailable(f"the backend is not connected to {self.url}")
        return self._link

    def _time(self) -> Argument:
        return "" if self._now is None else self._now()


async def untouched(call: Awaitable[object]) -> object:
    """Return the answer of a call made before the one that changes something: if it fails, nothing was stored."""
    try:
        return await call
    except BackendUnavailable as error:
        raise BackendUnavailable(str(error)) from error
