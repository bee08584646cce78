"""A namespace on a server: its shards, their layout, and how a script is run on one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import cast
from uuid import uuid4
from zlib import crc32

from aiodigest.connection import LayoutMismatch, Link, join_link
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, InvalidState, shown
from aiodigest.faults import DEMOTED, code_of, explain
from aiodigest.scripts import COMMANDS, Argument, tag_of, text
from aiodigest.target import Source, find_target

SCHEMA = 1
MAX_SHARDS = 1024
BATCH = 256  # items a call, so that no script is long
ARGUMENTS = 20_000  # arguments a call, unless one item alone has more


class Namespace:
    """A namespace on one server.

    Parameters
    ----------
    source : str or redis.asyncio.Redis
        ``redis[s]://``, ``unix://`` or ``redis[s]+sentinel://``, or a client whose settings are copied.
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
        self._link: Link | None = None
        self._version: str | None = None
        self._denied: frozenset[str] = frozenset()  # commands that the user may not run
        self._count = shards
        self._now = now
        self._nonce = nonce
        self._tags: dict[int, str] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, namespace={self.namespace!r})"

    @property
    def url(self) -> str:
        """The server's URL without its password."""
        return self._target.url

    # The layout

    @property
    def shards(self) -> int:
        if self._count is None:
            raise ConfigurationError("how many shards there are is known once the backend is connected")
        return self._count

    def shard_of(self, key: str) -> int:
        return crc32(key.encode()) % self.shards

    async def connect(self) -> None:
        """Look up the layout; a namespace that has none gets it from the first call that begins one."""
        fresh = self._link is None
        link = self._link = self._link or join_link(self._target, self._timeout)
        try:
            await self._check_layout(link)
        except BackendUnavailable:
            raise  # stays open: the next call looks again
        except BaseException:
            if fresh:
                await self.aclose()
            raise

    async def _check_layout(self, link: Link) -> None:
        await link.check_version()
        root = f"{{{self.namespace}}}:layout"
        stored = await link.command("HGET", root, "version")
        version = f"{SCHEMA}:{self._wanted or 1}:1" if stored is None else text(stored)
        parts = re.fullmatch(r"(\d+):(\d+):(\d+)", version)
        if not parts or int(parts[1]) != SCHEMA:
            raise ConfigurationError(
                f"namespace {self.namespace!r} has the layout {version!r}, and this version of aiodigest knows only "
                f"schema {SCHEMA}"
            )
        count = int(parts[2])
        if self._wanted not in (None, count):
            raise ConfigurationError(
                f"namespace {self.namespace!r} has {count} shards, not {self._wanted}: give shards={count} or None"
            )
        self._count, self._tags = count, {}
        if self._replicas:
            await self._check_wait(link)
        denied = await self._missing(link)
        self._denied, self._version = denied, version  # not before all is known: a call looks again until then

    async def _check_wait(self, link: Link) -> None:
        """See that the user may wait for replicas: to be refused after the add would leave its caller in the dark."""
        try:
            await link.command("WAIT", 0, 1)
        except (ConfigurationError, BackendUnavailable):
            raise
        except AiodigestError:
            pass  # a replica has no WAIT, and is told from a primary by the first write

    async def _missing(self, link: Link) -> frozenset[str]:
        """The commands of scripts that the user may not run."""
        asked = sorted(frozenset[str]().union(*COMMANDS.values()))
        refused = cast("list[object]", await link.run("permits", self._key(0, "permits"), asked, repeat=True))
        return frozenset(map(text, refused))

    async def _permit(self, link: Link, name: str) -> None:
        """Refuse a script in which a command would be refused, before it does anything."""
        needed = COMMANDS.get(name, frozenset())
        if needed & self._denied:
            self._denied = await self._missing(link)  # its rule may have been mended
            if missing := needed & self._denied:
                commands = " ".join(f"+{command.lower()}" for command in sorted(missing))
                raise ConfigurationError(f"{self.url} refuses access: to {name}, its user needs {commands} too")

    async def aclose(self) -> None:
        self._version = None
        link, self._link = self._link, None
        if link is not None:
            await link.leave()

    def _key(self, shard: int, name: str) -> str:
        if shard not in self._tags:
            self._tags[shard] = tag_of(self.namespace, shard, self.shards)
        return f"{{{self._tags[shard]}}}:{name}"

    async def _call(
        self, name: str, shard: int, *arguments: Argument, repeat: bool = True, now: Argument | None = None
    ) -> object:
        """Run a script on a shard; one that begins a namespace makes the layout first if the server knows none."""
        link = await self._connected()
        await self._permit(link, name)
        key, version = self._key(shard, "layout"), self._version or ""
        command = (version, self._time() if now is None else now, *arguments)
        replicas = self._replicas if name == "add" else 0
        try:
            return await link.run(name, key, command, repeat=repeat, replicas=replicas)
        except LayoutMismatch as mismatch:
            if mismatch.stored != "none":
                raise self._moved(mismatch.stored) from None
        # a new namespace or shard, or a server that was emptied; nothing had been done
        for layout in dict.fromkeys((f"{{{self.namespace}}}:layout", key)):  # the same if there is one shard
            stored = text(await link.run("layout", layout, [version], repeat=True))
            if stored != version:
                raise self._moved(stored)
        try:
            return await link.run(name, key, command, repeat=repeat, replicas=replicas)
        except LayoutMismatch as mismatch:
            raise self._moved(mismatch.stored) from None

    async def _connected(self) -> Link:
        """The connections, of which the layout is known; looked up again if the server was not there at first."""
        if self._link is not None and self._version is None:
            await self.connect()
        if self._link is None:
            raise BackendUnavailable(f"the backend is not connected to {self.url}")
        return self._link

    def _moved(self, stored: str) -> ConfigurationError:
        # the version is kept: callers count in its shards, so that only they can begin anew
        return ConfigurationError(
            f"namespace {self.namespace!r} now has the layout {stored}; it was changed while this process ran, which "
            "must connect again"
        )

    def _time(self) -> Argument:
        return "" if self._now is None else self._now()

    async def _each(
        self, name: str, shard: int, head: Sequence[Argument], items: Sequence[Sequence[Argument]], numbered: bool
    ) -> list[object | AiodigestError]:
        """Call a script for all items, in as many calls as it takes; each one's answer, or its timeline's error."""
        answers: list[object] = []
        now = self._time()
        while len(answers) < len(items):
            arguments = [*head, len(answers) + 1] if numbered else [*head]
            for item in items[len(answers) : len(answers) + BATCH]:
                if len(arguments) > ARGUMENTS:
                    break
                arguments += item
            answers += cast("list[object]", await self._call(name, shard, *arguments, now=now))
        return [
            self._broken(str(item[0]), text(answer)) if isinstance(answer, bytes) else answer
            for item, answer in zip(items, answers, strict=True)
        ]

    async def _heed(self, answers: Sequence[object]) -> None:
        """Leave a server that says for single items that it is no primary any more."""
        problems = {code_of(text(answer)) for answer in answers if isinstance(answer, bytes)}
        if problems & DEMOTED and self._link is not None:
            await self._link.hang_up()

    def _broken(self, key: str, problem: str) -> AiodigestError:
        """What the text of an error says of a timeline."""
        error = explain(problem, self.url)
        if isinstance(error, (BackendUnavailable, ConfigurationError)):
            return error
        return InvalidState(f"timeline {key!r} is broken: {problem}")

    async def _all_shards(self) -> range:
        await self._connected()
        return range(self.shards)
