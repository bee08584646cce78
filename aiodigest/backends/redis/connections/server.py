"""Connections to a Redis or Valkey server: a few of them, and script calls."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, cast

from redis import exceptions

from aiodigest.backends.redis.connections.errors import DEMOTED, code_of, explain
from aiodigest.backends.redis.connections.transport import Address, Wire, drop, send
from aiodigest.backends.redis.connections.url import Target
from aiodigest.backends.redis.scripts import SHAPES, Argument, fits, load_script
from aiodigest.errors import BackendUnavailable, ConfigurationError

CONNECTIONS = 8  # coalesced calls need no more
WAITERS = CONNECTIONS // 2  # of them for calls that wait for replicas: claims, renewals and reports have the others
SPARE = 10.0  # seconds: after that a connection that nobody has used is closed, but the last one for calls
# How long the doorbell is listened to in one go: an idle worker learns by its end that a server is frozen or cut off.
BLOCK_MS = 20_000
OLDEST = (6, 2)


class LayoutMismatch(Exception):
    """A script found a layout other than its caller's, and did nothing."""

    def __init__(self, stored: str) -> None:
        super().__init__(stored)
        self.stored = stored


class Moved(Exception):
    """A cluster node did nothing, because the key's slot belongs to another node."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.address = address


class Link:
    """A few connections to one server, for one event loop; made on demand. Errors of redis-py end here.

    A key passed to a call only picks a server of a cluster: see ``ClusterLink``.
    """

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        self._server = target  # whoever the sentinels named last, if they did
        self._has_answered = False
        self._timeout = timeout
        self._idle: deque[tuple[Wire, float]] = deque()  # and since when; who was used last is used next
        self._busy: set[Wire] = set()
        self._ears: dict[str, tuple[Wire, float]] = {}  # by what they listened to
        self._listening: set[Wire] = set()
        self._retired = False  # its server is no primary any more
        self._room: asyncio.Semaphore | None = asyncio.Semaphore(CONNECTIONS)
        self._waiters = asyncio.Semaphore(WAITERS)

    def _open(self) -> asyncio.Semaphore:
        """Return the semaphore that bounds calls; BackendUnavailable once the link is closed."""
        if self._room is None:
            raise BackendUnavailable(f"the connections to {self.target.url} are closed")
        return self._room

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        self._room = None
        await self.hang_up()
        for wire in list(self._busy):
            await drop(wire)

    @property
    def primaries(self) -> Sequence[Link]:
        """The servers that take adds: this one."""
        return [self]

    async def find_primaries(self) -> Sequence[Link]:
        """See ``ClusterLink.find_primaries``."""
        return self.primaries

    @property
    def is_busy(self) -> bool:
        """True while calls are under way."""
        return bool(self._busy)

    async def retire(self) -> None:
        """Close connections without calls under way; the others get their answers first, within their time."""
        self._retired = True
        await self.hang_up()
        for wire in list(self._listening):
            await drop(wire)

    async def run(
        self,
        name: str,
        key: str,
        arguments: Sequence[Argument],
        *,
        repeat: bool,
        replicas: int = 0,
        until: float | None = None,
    ) -> object:
        """Run a script, and wait until ``replicas`` replicas have its writes.

        ``repeat`` says that running it twice is harmless: then a dead connection is replaced once. ``until`` is when to
        give up, by the loop's clock; None: after a timeout.
        """
        script = load_script(name)
        command = "EVALSHA", script.sha, 1, key, *arguments
        return await self._exchange(name, command, repeat, script.source, replicas, until)

    async def command(self, key: str, *command: Argument, until: float | None = None) -> object:
        """Send a command that may be repeated."""
        return await self._exchange(str(command[0]), command, repeat=True, until=until)

    async def _exchange(
        self,
        name: str,
        command: Sequence[Argument],
        repeat: bool,
        source: str = "",
        replicas: int = 0,
        until: float | None = None,
    ) -> object:
        """Send a command and read its reply on one connection, which is dropped if either is incomplete.

        All of it, including the wait for a connection, takes at most one timeout.
        """
        until, sent = until or asyncio.get_running_loop().time() + self._timeout, False
        try:
            async with asyncio.timeout_at(until), self._waiters if replicas else nullcontext(), self._open():
                self._open()  # it may have been closed while this call waited
                wire, fresh = await self._take()
                while True:
                    try:
                        self._open()
                        sent = True
                        reply = await converse(wire, name, command, source)
                        if replicas and wrote(reply):
                            await self._replicated(wire, replicas, until)
                    except (exceptions.ResponseError, BackendUnavailable):  # an answer, or too few replicas
                        await self._put(wire)
                        raise
                    except (exceptions.RedisError, OSError):
                        await self._discard(wire)
                        if not repeat or fresh or self._room is None:
                            raise
                        wire, fresh = await self._connected(), True
                    except BaseException:
                        await self._discard(wire)
                        raise
                    else:
                        await self._put(wire)
                        return reply
        except (exceptions.RedisError, OSError) as error:
            if isinstance(error, exceptions.ResponseError) and str(error).startswith("LAYOUT "):
                raise LayoutMismatch(str(error).removeprefix("LAYOUT ")) from None
            if not isinstance(error, exceptions.ResponseError) or code_of(error) in DEMOTED:
                await self.hang_up()
            raise self._explained(error, "unknown" if sent else "no") from error

    def _explained(self, error: Exception, stored: Literal["no", "unknown"] = "no") -> Exception:
        if self.target.nodes and isinstance(error, exceptions.MovedError):
            host = cast("str", error.host).strip("?") or str(self.target.settings["host"])  # none: where this one is
            return Moved((host, error.port))
        return explain(error, self._server.url, stored, "" if self._has_answered else self._server.hint(error))

    async def _replicated(self, wire: Wire, replicas: int, until: float) -> None:
        left = until - asyncio.get_running_loop().time()
        # ms, and 0 would be for ever; the rest is for the answer: a server looks at the time ten times a second
        patience = max(1, int(1000 * (left - max(left / 10, 0.25))))
        try:
            have = await converse(wire, "WAIT", ("WAIT", replicas, patience))
        except exceptions.ResponseError as error:
            # it became a replica meanwhile, and loses anything its new primary does not have
            await self.hang_up()
            await drop(wire)
            raise BackendUnavailable(f"{self._server.url} has it, but {error}", stored="unknown") from error
        if not isinstance(have, int) or have < replicas:
            raise BackendUnavailable(
                f"{have} replicas of {self._server.url} have it, not {replicas}; it stays unless the primary is lost",
                stored="unknown",
            )

    async def hang_up(self, key: str = "") -> None:
        """Close connections that nobody is using: their server is dead, or no longer a primary."""
        if self.target.sentinels is not None:
            self.target.sentinels.doubt()
        wires = [wire for wire, _ in (*self._idle, *self._ears.values())]
        self._idle.clear()
        self._ears.clear()
        for wire in wires:
            await drop(wire)

    async def _take(self) -> tuple[Wire, bool]:
        """Return a live idle connection, or a new one, and True if it is new. Nothing has been sent yet."""
        while self._idle:
            wire, _ = self._idle.pop()
            if await self._is_sound(wire):
                return wire, False
        return await self._connected(), True

    async def _is_sound(self, wire: Wire) -> bool:
        """True if an idle connection is still alive, and then in use; a dead one is dropped."""
        self._busy.add(wire)
        stale = True
        try:
            stale = await is_stale(wire)
        finally:
            if stale:
                await self._discard(wire)
        return not stale

    async def _connected(self) -> Wire:
        """Open a new connection. The caller bounds the time, and explains errors of redis-py."""
        self._server = self.target  # it is not the last one's fault if no sentinel names another
        self._server = server = await self.target.primary(self._timeout)
        wire = server.connection(self._timeout)
        self._open()  # it may have been closed while sentinels were asked
        self._busy.add(wire)
        try:
            await wire.connect()
        except BaseException:
            await self._discard(wire)
            raise
        return wire

    async def _put(self, wire: Wire) -> None:
        """Keep a connection for the next call, if there may be one."""
        self._has_answered = True
        self._busy.discard(wire)
        if self._room is not None and not self._retired and wire.is_connected:
            now = asyncio.get_running_loop().time()
            self._idle.append((wire, now))
            while len(self._idle) > 1 and self._idle[0][1] < now - SPARE:
                await drop(self._idle.popleft()[0])
        else:
            await drop(wire)

    async def _discard(self, wire: Wire) -> None:
        self._busy.discard(wire)
        await drop(wire)

    async def listen(self, stream: str, last: str) -> str:
        """Return the id of a stream's entry after ``last``, or ``last`` after a while; may be cancelled at any time."""
        self._open()
        try:
            wire = await self._ear(stream)
            command = ("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", stream, last)
            self._listening.add(wire)
            try:
                self._open()
                async with asyncio.timeout(BLOCK_MS / 1000 + self._timeout):
                    reply = await converse(wire, "XREAD", command)
            except BaseException:
                await self._discard(wire)
                raise
            finally:
                self._listening.discard(wire)
        except (exceptions.RedisError, OSError) as error:
            raise self._explained(error) from error
        self._busy.discard(wire)
        now = asyncio.get_running_loop().time()
        over = self._room is None or self._retired
        if over or self._ears.setdefault(stream, (wire, now))[0] is not wire:  # another listened, too
            await drop(wire)
        for unused in [name for name, (_, since) in self._ears.items() if since < now - SPARE]:  # its shard may be gone
            await drop(self._ears.pop(unused)[0])
        told = cast("list[tuple[bytes, list[tuple[bytes, object]]]] | None", reply)
        return told[0][1][0][0].decode() if told else last

    async def _ear(self, stream: str) -> Wire:
        """Return the connection that listened to a stream before, or a new one."""
        kept = self._ears.pop(stream, None)
        if kept is not None and await self._is_sound(kept[0]):
            return kept[0]
        async with asyncio.timeout(self._timeout):
            return await self._connected()

    async def check_version(self, key: str) -> None:
        """Refuse a server that is too old, and a cluster node given as a single server.

        If the user may not ask, nothing is checked.
        """
        try:
            info = await self.command(key, "INFO", "server")
        except ConfigurationError:
            return  # the user may not ask; a password that is wrong will be told by the next command
        told = info if isinstance(info, bytes) else b""
        found = re.search(rb"redis_version:(\d+)\.(\d+)", told)
        if found and (int(found[1]), int(found[2])) < OLDEST:
            version = found[0].decode().partition(":")[2]
            raise ConfigurationError(f"{self.target.url} is version {version}; 6.2 is the oldest that works")
        if b"_mode:cluster" in told and not self.target.nodes:
            raise ConfigurationError(f"{self.target.url} is part of a cluster: give redis+cluster://host:port")


def wrote(reply: object) -> bool:
    """True if a script's answer is a number, or holds one for an item that was stored, not only error texts."""
    statuses = cast("list[object]", reply) if isinstance(reply, list) else [reply]
    return any(isinstance(status, int) for status in statuses)


async def converse(wire: Wire, name: str, command: Sequence[Argument], source: str = "") -> object:
    """Send one command and return its reply; a script unknown to the server is sent whole.

    ``name`` is the script's, or the command's own. Raises InvalidResponse for a reply that it never gives.
    """
    await send(wire, *command)
    try:
        reply = await wire.read_response()
    except exceptions.NoScriptError:
        await send(wire, "EVAL", source, *command[2:])
        reply = await wire.read_response()
    if name in SHAPES and not fits(reply, SHAPES[name]):
        raise exceptions.InvalidResponse(f"its answer is none to {name}")
    return reply


async def is_stale(wire: Wire) -> bool:
    """True if the server has closed an idle connection, or left something to read on it."""
    try:
        return not wire.is_connected or await wire.can_read()
    except (exceptions.RedisError, OSError):
        return True
