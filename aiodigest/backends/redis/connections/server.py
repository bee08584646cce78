"""Connections to one Redis or Valkey server, and the calls that are made on them."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, cast

from redis import exceptions

from aiodigest.backends.redis.connections.connection import Address, Connection, drop, send
from aiodigest.backends.redis.connections.errors import DEMOTED, code_of, explain
from aiodigest.backends.redis.connections.url import URL
from aiodigest.backends.redis.scripts import Argument, fits, load_script, shape_of
from aiodigest.errors import BackendUnavailable, ConfigurationError

CONNECTIONS = 8  # calls in batches need no more
WAITERS = CONNECTIONS // 2  # of them for calls that wait for replicas: claims, renewals and reports have the others
SPARE = 10.0  # seconds: after that a connection that nobody has used is closed
KEPT = 2  # are left open all the same: one for calls, and one to listen on
# How long to listen to a wake-up stream at a time; its end tells an idle worker that a server is frozen or cut off.
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


class ServerConnections:
    """A few connections to one server, for one event loop; made on demand. Errors of redis-py end here.

    The connections are redis-py's, and its pool is not used. ``BlockingConnectionPool`` takes a lock to get one back: a
    caller who is cancelled there loses it for good. It does not tell a new connection from an old one, and only what
    failed on an old one is worth repeating. It closes none that nobody uses, and waits for the other end, which may be
    dead, when it closes one. The client on it repeats what failed, sends ``WAIT`` on another connection, and does not
    say whether a call was sent (``stored``).

    A key passed to a call only picks a server of a cluster: see ``ClusterConnections``.
    """

    def __init__(self, url: URL, timeout: float) -> None:
        self.url = url
        self._primary = url  # whoever the sentinels named last, if they did
        self._has_answered = False
        self.timeout = timeout
        self._idle: deque[tuple[Connection, float]] = deque()  # and since when; the one used last is used next
        self._busy: set[Connection] = set()
        self._listening: set[Connection] = set()  # of the busy ones
        self._retired = False  # its server is no primary any more
        self._room: asyncio.Semaphore | None = asyncio.Semaphore(CONNECTIONS)
        self._waiters = asyncio.Semaphore(WAITERS)

    def _open(self) -> asyncio.Semaphore:
        """Return the semaphore that bounds calls; BackendUnavailable once the connections are closed."""
        if self._room is None:
            raise BackendUnavailable(f"the connections to {self.url} are closed")
        return self._room

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        self._room = None
        await self.hang_up()
        for connection in list(self._busy):
            await drop(connection)

    @property
    def primaries(self) -> Sequence[ServerConnections]:
        """The servers that take adds: this one."""
        return [self]

    async def find_primaries(self) -> Sequence[ServerConnections]:
        """See ``ClusterConnections.find_primaries``."""
        return self.primaries

    def primary_of(self, key: str) -> Address | None:
        """Return the primary of a key in a cluster; None: all keys are on this server."""

    @property
    def is_busy(self) -> bool:
        """True while calls are under way."""
        return bool(self._busy)

    async def retire(self) -> None:
        """Close connections without calls under way; the others get their answers first, within their time."""
        self._retired = True
        await self.hang_up()
        for connection in list(self._listening):
            await drop(connection)

    async def hang_up(self, key: str = "") -> None:
        """Close connections that nobody is using: their server is dead, or no longer a primary."""
        if self.url.sentinels is not None:
            self.url.sentinels.doubt()
        idle = list(self._idle)
        self._idle.clear()
        for connection, _ in idle:
            await drop(connection)

    # Calls

    async def run(
        self,
        name: str,
        key: str,
        arguments: Sequence[Argument],
        *,
        repeat: bool = False,
        replicas: int = 0,
        until: float | None = None,
    ) -> object:
        """Run a script, and wait until ``replicas`` replicas have its writes.

        If running it twice is harmless, or ``repeat`` says that its caller does not need the answer, a dead connection
        is replaced once. ``until`` is when to give up, by the loop's clock; None: after a timeout.
        """
        script = load_script(name)
        command = "EVALSHA", script.sha, 1, key, *arguments
        return await self._exchange(name, command, repeat or script.repeatable, script.source, replicas, until)

    async def command(self, key: str, *command: Argument, until: float | None = None) -> object:
        """Send a command that may be repeated."""
        return await self._exchange(str(command[0]), command, repeat=True, until=until)

    async def listen(self, stream: str, last: str) -> str:
        """Return the id of a stream's entry after ``last``, or ``last`` after a while; may be cancelled at any time."""
        self._open()  # before sentinels are asked
        command = ("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", stream, last)
        try:
            async with asyncio.timeout(self.timeout):
                connection, _ = await self._take()
            self._listening.add(connection)
            try:
                async with asyncio.timeout(BLOCK_MS / 1000 + self.timeout):
                    reply = await self._call(connection, "XREAD", command)
            except exceptions.ResponseError:
                await drop(connection)  # a server that becomes a replica says so, and closes it
                raise
            finally:
                self._listening.discard(connection)
        except (exceptions.RedisError, OSError) as error:
            raise self._explained(error) from error
        told = cast("list[tuple[bytes, list[tuple[bytes, object]]]] | None", reply)
        return told[0][1][0][0].decode() if told else last

    async def _exchange(
        self,
        name: str,
        command: Sequence[Argument],
        repeat: bool,
        source: str = "",
        replicas: int = 0,
        until: float | None = None,
    ) -> object:
        """Send a command and read its reply; all of it, with the wait for a connection, takes at most one timeout."""
        until, sent = until or asyncio.get_running_loop().time() + self.timeout, False
        try:
            async with asyncio.timeout_at(until), self._waiters if replicas else nullcontext(), self._open():
                connection, fresh = await self._take()
                sent = True
                try:
                    return await self._call(connection, name, command, source, replicas, until)
                except (exceptions.RedisError, OSError) as error:
                    if isinstance(error, exceptions.ResponseError) or not repeat or fresh or self._room is None:
                        raise
                connection = await self._connected()
                return await self._call(connection, name, command, source, replicas, until)
        except (exceptions.RedisError, OSError) as error:
            if isinstance(error, exceptions.ResponseError) and str(error).startswith("LAYOUT "):
                raise LayoutMismatch(str(error).removeprefix("LAYOUT ")) from None
            if not isinstance(error, exceptions.ResponseError) or code_of(error) in DEMOTED:
                await self.hang_up()
            raise self._explained(error, "unknown" if sent else "no") from error

    async def _call(
        self,
        connection: Connection,
        name: str,
        command: Sequence[Argument],
        source: str = "",
        replicas: int = 0,
        until: float = 0.0,
    ) -> object:
        """Make a call on a connection, and keep it for the next call; drop it if either half of this one is missing."""
        try:
            reply = await converse(connection, name, command, source)
            if replicas and wrote(reply):
                await self._replicated(connection, replicas, until)
        except (exceptions.ResponseError, BackendUnavailable):  # an answer, or too few replicas
            await self._put(connection)
            raise
        except BaseException:
            await self._discard(connection)
            raise
        await self._put(connection)
        return reply

    async def _replicated(self, connection: Connection, replicas: int, until: float) -> None:
        left = until - asyncio.get_running_loop().time()
        # 0 would be for ever; the rest is for the answer: a server looks at the time ten times a second
        wait_ms = max(1, int(1000 * (left - max(left / 10, 0.25))))
        try:
            have = await converse(connection, "WAIT", ("WAIT", replicas, wait_ms))
        except exceptions.ResponseError as error:
            # it became a replica meanwhile, and loses anything its new primary does not have
            await self.hang_up()
            await drop(connection)
            raise BackendUnavailable(f"{self._primary} has it, but {error}", stored="unknown") from error
        if not isinstance(have, int) or have < replicas:
            raise BackendUnavailable(
                f"{have} replicas of {self._primary} have it, not {replicas}; it stays unless the primary is lost",
                stored="unknown",
            )

    def _explained(self, error: Exception, stored: Literal["no", "unknown"] = "no") -> Exception:
        if self.url.nodes and isinstance(error, exceptions.MovedError):
            host = cast("str", error.host).strip("?") or str(self.url.settings["host"])  # none: where this one is
            return Moved((host, error.port))
        return explain(error, str(self._primary), stored, "" if self._has_answered else self._primary.hint(error))

    # Connections

    async def _take(self) -> tuple[Connection, bool]:
        """Return a live idle connection, or a new one, and True if it is new. Nothing has been sent yet."""
        while self._idle:
            connection, _ = self._idle.pop()
            self._busy.add(connection)
            try:
                stale = await is_stale(connection)
                self._open()
            except BaseException:
                await self._discard(connection)
                raise
            if not stale:
                return connection, False
            await self._discard(connection)
        return await self._connected(), True

    async def _connected(self) -> Connection:
        """Open a new connection. The caller bounds the time, and explains errors of redis-py."""
        self._primary = self.url  # it is not the last one's fault if no sentinel names another
        self._primary = primary = await self.url.primary(self.timeout)
        self._open()  # it may have been closed while sentinels were asked
        connection = primary.connection(self.timeout)
        self._busy.add(connection)
        try:
            await connection.connect()
            self._open()
        except BaseException:
            await self._discard(connection)
            raise
        return connection

    async def _put(self, connection: Connection) -> None:
        """Keep a connection for the next call, if there may be one."""
        self._has_answered = True
        self._busy.discard(connection)
        if self._room is not None and not self._retired and connection.is_connected:
            now = asyncio.get_running_loop().time()
            self._idle.append((connection, now))
            while len(self._idle) > KEPT and self._idle[0][1] < now - SPARE:
                await drop(self._idle.popleft()[0])
        else:
            await drop(connection)

    async def _discard(self, connection: Connection) -> None:
        self._busy.discard(connection)
        await drop(connection)

    # The server

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
            raise ConfigurationError(f"{self.url} is version {version}; 6.2 is the oldest that works")
        if b"_mode:cluster" in told and not self.url.nodes:
            raise ConfigurationError(f"{self.url} is part of a cluster: give redis+cluster://host:port")


def wrote(reply: object) -> bool:
    """True if a script's answer is a number, or holds one for an item that was stored, not only error texts."""
    statuses = cast("list[object]", reply) if isinstance(reply, list) else [reply]
    return any(isinstance(status, int) for status in statuses)


async def converse(connection: Connection, name: str, command: Sequence[Argument], source: str = "") -> object:
    """Send one command and return its reply; a script unknown to the server is sent whole.

    ``name`` is the script's, or the command's own. Raises InvalidResponse for a reply that it never gives.
    """
    await send(connection, *command)
    try:
        reply = await connection.read_response()
    except exceptions.NoScriptError:
        await send(connection, "EVAL", source, *command[2:])
        reply = await connection.read_response()
    shape = shape_of(name)
    if shape is not None and not fits(reply, shape):  # the connection carries answers to other questions
        raise exceptions.InvalidResponse(f"not a valid answer to {name}")
    return reply


async def is_stale(connection: Connection) -> bool:
    """True if the server has closed an idle connection, or left something to read on it."""
    try:
        return not connection.is_connected or await connection.can_read()
    except (exceptions.RedisError, OSError):
        return True
