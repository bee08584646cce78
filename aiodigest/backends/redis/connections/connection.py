"""One connection of redis-py's, as far as it is used."""

from __future__ import annotations

import asyncio
import codecs
import os
import socket
import struct
import sys
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import suppress
from contextvars import Context, copy_context
from ssl import CERT_NONE, SSLContext
from types import coroutine
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import hiredis
from redis import exceptions

from aiodigest.backends.redis.scripts import Argument
from aiodigest.errors import ConfigurationError
from aiodigest.logs import logger_of

codecs.lookup("idna")  # else looking up a host name would import it, and another thread may fork meanwhile

logger = logger_of(__name__)

T = TypeVar("T")

Address: TypeAlias = tuple[str, int]

AT_ONCE = struct.pack("HH" if sys.platform == "win32" else "ii", 1, 0)  # for SO_LINGER: on, 0 seconds
MANY = 16  # sets of certificates
_contexts: dict[object, SSLContext] = {}

TLS = ("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_ciphers", "ssl_min_version")


class Connection(Protocol):
    """The part of redis-py's connections in use."""

    @property
    def is_connected(self) -> bool: ...
    async def connect(self) -> None: ...
    async def disconnect(self, nowait: bool = ...) -> None: ...
    async def can_read(self) -> bool: ...
    async def send_packed_command(self, command: bytes, check_health: bool = ...) -> None: ...
    async def read_response(self) -> object: ...


Maker: TypeAlias = Callable[..., Connection]


@coroutine
def apart(work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await a coroutine in the same task, but in an empty context.

    Whatever a connection leaves in the event loop, such as the handle that reads from it, keeps the context in which
    it was made: without this, what the first request has set lived as long as the connection.
    """
    if not copy_context():  # it is empty, as that of a worker is in most programs
        return (yield from work.__await__())
    context, step, given = Context(), work.send, None
    while True:
        try:
            waited_for = context.run(step, given)
        except StopIteration as done:
            return done.value
        try:
            given = yield waited_for
            step = work.send
        except BaseException as error:  # a cancellation is one
            step, given = work.throw, error


async def send(connection: Connection, *command: Argument) -> None:
    """Send a command; hiredis packs a large one six times as fast as redis-py does.

    A dropped connection stays closed. redis-py would reopen it, and a ``WAIT`` there waits for nobody's writes.
    """
    if not connection.is_connected:
        raise exceptions.ConnectionError("the connection was closed meanwhile")
    packed = cast("bytes", cast("Any", hiredis).pack_command(command))  # its declared type takes one argument
    await connection.send_packed_command(packed, check_health=False)


async def connect(connection: Connection) -> None:
    """Connect, so that closing the connection will reset it: nothing that still was on its way then arrives later."""
    await connection.connect()
    if (transport := _transport_of(connection)) and (peer := transport.get_extra_info("socket")):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)


async def drop(connection: Connection) -> None:
    """Close a connection without waiting for its other end, nor for what is still to be sent."""
    if transport := _transport_of(connection):
        transport.abort()
    with suppress(exceptions.RedisError, OSError):
        await connection.disconnect(nowait=True)


def _transport_of(connection: Connection) -> asyncio.WriteTransport | None:
    """Return the transport of an open connection, to which redis-py has no public way; None if it has none."""
    writer: asyncio.StreamWriter | None = getattr(connection, "_writer", None)
    return writer and writer.transport


def new_connection(make: Maker, settings: Mapping[str, object]) -> Connection:
    """Make a connection, not connected yet; ConfigurationError if TLS cannot be set up: no server would fix that.

    Reading certificates takes a tenth of a second, which blocks everything else: connections share the result for as
    long as the files are the same.
    """
    connection = make(**settings)
    context = getattr(connection, "ssl_context", None)
    try:
        if context is not None:
            tls = {name: value for name, value in settings.items() if name.startswith("ssl_")}
            facts = (make, *sorted((name, repr(value), _changed_at(value)) for name, value in tls.items()))
            if facts not in _contexts:
                if len(_contexts) >= MANY:
                    _contexts.clear()
                _contexts[facts] = context.get()
                if problem := unchecked(connection):
                    logger.warning("TLS to a server: %s", problem, extra={"reason": problem})
            context.context = _contexts[facts]  # which redis-py keeps for connecting
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        used = ", ".join(f"{name}={settings[name]!r}" for name in TLS if settings.get(name) is not None)
        raise ConfigurationError(f"TLS cannot be set up with {used}: {error}") from None
    return connection


def unchecked(connection: Connection) -> str:
    """Say what a connection with TLS does not check of its server; '' if it checks all, or speaks no TLS."""
    tls = getattr(connection, "ssl_context", None)
    context = None if tls is None else cast("SSLContext", tls.get())
    if context is None or context.check_hostname:
        return ""
    if context.verify_mode == CERT_NONE:
        return "neither its certificate nor its name is checked: whoever is in between can read and change everything"
    return "its name is not checked: who has a certificate for another name can read and change everything"


def _changed_at(path: object) -> int:
    """Return when a file was last changed; 0 if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns if isinstance(path, str) and os.sep in path else 0
    except (OSError, ValueError):
        return 0


def show_address(host: object, port: object) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
