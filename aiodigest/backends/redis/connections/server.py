"""Connections to one Redis or Valkey server, on which a call is tried once."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import TypeVar, cast

from redis import exceptions

from aiodigest.backend import ENOUGH
from aiodigest.backends.redis.connections.connection import Connection, connect, drop, send
from aiodigest.backends.redis.connections.errors import UNAVAILABLE, code_of, explain
from aiodigest.backends.redis.connections.url import URL
from aiodigest.backends.redis.scripts import Argument, fits, shape_of
from aiodigest.errors import AiodigestError, BackendUnavailable

T = TypeVar("T")

CONNECTIONS = 8  # calls in batches need no more
WAITERS = CONNECTIONS // 2  # of them for calls that wait for replicas: claims, renewals and reports have the others
SPARE = 10.0  # seconds: after that a connection that nobody has used is closed
IDLE = 25.0  # seconds: a connection unused for longer is asked something first, as a router may have forgotten it
TRUSTED = 60.0  # seconds for which a server's clock, once told, is taken to go on at the rate of ours
KEPT = 2  # are left open all the same: one for calls, and one to listen on
LATE = re.compile(r"LATE (\d+)")  # is what scripts answer that come too late, with the server's time
# How long to listen to a wake-up stream at a time; its end tells an idle worker that a server is frozen or cut off.
BLOCK_MS = 30_000


@dataclass(eq=False)
class Failed(Exception):
    """A try brought no answer, or an error reply."""

    error: Exception  # of redis-py, or an OSError
    sent: bool  # else nothing was done
    is_old: bool  # the connection was used before: it may have been dead, and a new one may bring an answer


class ServerConnections:
    """A few connections of redis-py's to one server, made on demand; why not its pool: docs/design.md, section 8."""

    def __init__(self, url: URL, timeout: float) -> None:
        self.url = url
        self.timeout = timeout
        self._primary = url  # whoever the sentinels named last, if they did
        self._idle_for = float(cast("float", url.settings.get("health_check_interval") or IDLE))
        self._has_answered = False
        self._ahead: float | None = None  # seconds that its clock is ahead of the event loop's, at least, if it told
        self._asked = 0.0  # when it was asked for that
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
    def is_busy(self) -> bool:
        return bool(self._busy)

    async def retire(self) -> None:
        """Close connections without calls under way; the others get their answers first, within their time."""
        self._retired = True
        await self.hang_up()
        for connection in list(self._listening):
            await drop(connection)

    async def hang_up(self) -> None:
        """Close connections that nobody is using: their server is dead, or no longer a primary."""
        if self.url.sentinels is not None:
            self.url.sentinels.doubt()
        idle = list(self._idle)
        self._idle.clear()
        for connection, _ in idle:
            await drop(connection)

    # Calls

    async def attempt(
        self,
        name: str,
        command: Sequence[Argument],
        until: float,
        fresh: bool,
        source: str = "",
        replicas: int = 0,
        late: float | None = None,
    ) -> object:
        """Try a call once: ``Failed`` says how far it came. ``fresh``: on a new connection. ``late``: when it comes too
        late, for a script that knows of it: it then does nothing."""
        sent = is_old = False
        try:
            async with asyncio.timeout_at(until), self._waiters if replicas else nullcontext(), self._open():
                connection, is_old = await self._take(fresh)
                try:
                    command = command if late is None else self._timed(command, late)
                    sent = True
                    reply = await converse(connection, name, command, source)
                    if replicas and wrote(name, reply):
                        await self._replicated(connection, replicas, until)
                except (exceptions.ResponseError, BackendUnavailable) as error:  # an answer, or too few replicas
                    if told := LATE.match(str(error)):
                        self._hear_time(int(told[1]) / 1000)
                    sent = False  # for nothing: it is answered
                    await self._put(connection)
                    raise
                except BaseException:  # one half of the call is missing
                    await self._discard(connection)
                    raise
                await self._put(connection)
                return reply
        except (exceptions.RedisError, OSError) as error:
            sent = sent and code_of(error) not in UNAVAILABLE  # redis-py takes one of these for a broken connection
            raise Failed(error, sent, is_old and self._room is not None) from error

    async def hear(self, stream: str, last: str) -> str:
        """Try to listen once: see ``listen``."""
        self._open()  # before sentinels are asked
        command = ("XREAD", "COUNT", 1, "BLOCK", BLOCK_MS, "STREAMS", stream, last)
        try:
            async with asyncio.timeout(self.timeout):
                connection, _ = await self._take()
            self._listening.add(connection)
            try:
                async with asyncio.timeout(BLOCK_MS / 1000 + self.timeout):
                    reply = await converse(connection, "XREAD", command)
            except BaseException:  # a server that becomes a replica says so, and closes it
                await self._discard(connection)
                raise
            finally:
                self._listening.discard(connection)
            await self._put(connection)
        except (exceptions.RedisError, OSError) as error:
            raise Failed(error, sent=False, is_old=False) from error  # who listens changes nothing
        told = cast("list[tuple[bytes, list[tuple[bytes, object]]]] | None", reply)
        return told[0][1][0][0].decode() if told else last

    async def _replicated(self, connection: Connection, replicas: int, until: float) -> None:
        left = until - asyncio.get_running_loop().time()
        # 0 would be for ever; the rest is for the answer: a server looks at the time ten times a second
        wait_ms = max(1, int(1000 * (left - max(left / 10, 0.25))))
        try:
            have = await converse(connection, "WAIT", ("WAIT", replicas, wait_ms))
        except (exceptions.ResponseError, exceptions.BusyLoadingError, exceptions.AuthenticationError) as error:
            # it became a replica meanwhile, and loses anything its new primary does not have
            await self.hang_up()
            await drop(connection)
            raise BackendUnavailable(f"{self._primary} has it, but {error}", stored="unknown") from error
        if not isinstance(have, int) or have < replicas:
            raise BackendUnavailable(
                f"{have} replicas of {self._primary} have it, not {replicas}; it stays unless the primary is lost",
                stored="unknown",
            )

    def explained(self, error: Exception, sent: bool) -> AiodigestError:
        """Return one of our errors for what a call has ended with."""
        hint = "" if self._has_answered else self._primary.hint(error)
        return explain(error, str(self._primary), "unknown" if sent else "no", hint)

    # The server's clock

    def _timed(self, command: Sequence[Argument], late: float) -> Sequence[Argument]:
        """Return a script's command that does nothing where it comes too late; BackendUnavailable if it soon would."""
        if late - asyncio.get_running_loop().time() < ENOUGH * self.timeout:
            raise BackendUnavailable(f"{self._primary} is unavailable: no call could be sent in time", stored="no")
        if self._ahead is None:
            return command
        return *command[:5], f"{command[5]}<{int(1000 * (late + self._ahead))}", *command[6:]

    @property
    def time(self) -> float | None:
        """The time by its server's clock, in seconds, if that was asked for within a minute, and told."""
        now = asyncio.get_running_loop().time()
        return None if self._ahead is None or now - self._asked > TRUSTED else now + self._ahead

    async def learn_time(self, until: float, fresh: bool) -> float | None:
        """Return the time, which is asked for as a connection is lent; None where it was never told."""
        try:
            async with asyncio.timeout_at(until), self._open():
                connection, _ = await self._take(fresh)
                await self._put(connection)
        except (exceptions.RedisError, OSError) as error:
            raise Failed(error, sent=False, is_old=False) from error
        return None if self._ahead is None else asyncio.get_running_loop().time() + self._ahead

    async def _ask_time(self, connection: Connection) -> None:
        """Ask for the time. Any answer shows that a connection is alive, and that the server takes it."""
        self._asked = asyncio.get_running_loop().time()
        try:
            told = cast("list[bytes]", await converse(connection, "TIME", ("TIME",)))
        except exceptions.ResponseError as error:
            if code_of(error) in UNAVAILABLE:  # a script keeps it busy: ask again before the next call
                self._asked = -inf
            else:  # its user may not ask
                self._ahead = None
        else:
            self._hear_time(int(told[0]) + int(told[1]) / 1_000_000)

    def _hear_time(self, told: float) -> None:
        # it was read before its answer came: nothing is done too late if the answer took long
        self._ahead = told - asyncio.get_running_loop().time()

    # Connections

    async def _take(self, fresh: bool = False) -> tuple[Connection, bool]:
        """Return a live idle connection and True, or a new one and False. No call has been sent yet."""
        while self._idle and not fresh:
            connection, since = self._idle.pop()
            self._busy.add(connection)
            try:
                stale = not connection.is_connected or await connection.can_read()  # it has ended, or left something
                now = asyncio.get_running_loop().time()
                if not stale and (now - since > self._idle_for or now - self._asked > TRUSTED):
                    async with asyncio.timeout(self.timeout / 10):
                        await self._ask_time(connection)
                self._open()
            except (exceptions.RedisError, OSError):
                stale = True
                await self.hang_up()  # the others have been idle for longer
            except BaseException:
                await self._discard(connection)
                raise
            if not stale:
                return connection, True
            await self._discard(connection)
        self._primary = self.url  # it is not the last one's fault if no sentinel names another
        self._primary = primary = await self.url.primary(self.timeout)
        self._open()  # it may have been closed while sentinels were asked
        connection = primary.connection(self.timeout)
        self._busy.add(connection)
        try:
            await connect(connection)
            self._open()
            await self._ask_time(connection)
        except BaseException:
            await self._discard(connection)
            raise
        return connection, False

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


def wrote(name: str, reply: object) -> bool:
    """True if a script's answer is a number, or holds one; of adds, if fewer have failed than were looked at."""
    answers = cast("list[object]", reply) if isinstance(reply, list) else [reply]
    if name == "add" and answers and isinstance(answers[0], int):
        return sum(isinstance(answer, bytes) for answer in answers) < answers[0]
    return int in map(type, answers)


async def converse(connection: Connection, name: str, command: Sequence[Argument], source: str = "") -> object:
    """Send a command, or a script of this name, and return its reply; InvalidResponse if it never gives that one."""
    await send(connection, *command)
    try:
        reply = await connection.read_response()
    except exceptions.NoScriptError:  # it is sent whole
        await send(connection, "EVAL", source, *command[2:])
        reply = await connection.read_response()
    shape = shape_of(name)
    if shape is not None and not fits(reply, shape):  # the connection carries answers to other questions
        raise exceptions.InvalidResponse(f"not a valid answer to {name}")
    return reply
