"""One connection of redis-py's, as far as it is used."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from ssl import SSLContext
from typing import Any, Protocol, TypeAlias, cast

import hiredis
from redis import exceptions

from aiodigest.backends.redis.scripts import Argument
from aiodigest.errors import ConfigurationError

codecs.lookup("idna")  # else looking up a host name would import it, and another thread may fork meanwhile

Address: TypeAlias = tuple[str, int]

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


async def send(connection: Connection, *command: Argument) -> None:
    """Send a command; hiredis packs a large one six times as fast as redis-py does.

    A dropped connection stays closed. redis-py would reopen it, and a ``WAIT`` there waits for nobody's writes.
    """
    if not connection.is_connected:
        raise exceptions.ConnectionError("the connection was closed meanwhile")
    packed = cast("bytes", cast("Any", hiredis).pack_command(command))  # its declared type takes one argument
    await connection.send_packed_command(packed, check_health=False)


async def drop(connection: Connection) -> None:
    """Close a connection without waiting for its other end."""
    with suppress(exceptions.RedisError, OSError):
        await connection.disconnect(nowait=True)


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
            context.context = _contexts[facts]  # which redis-py keeps for connecting
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        used = ", ".join(f"{name}={settings[name]!r}" for name in TLS if settings.get(name) is not None)
        raise ConfigurationError(f"TLS cannot be set up with {used}: {error}") from None
    return connection


def _changed_at(path: object) -> int:
    """Return when a file was last changed; 0 if there is no such file."""
    try:
        return os.stat(path).st_mtime_ns if isinstance(path, str) and os.sep in path else 0
    except (OSError, ValueError):
        return 0


def show_address(host: object, port: object) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
