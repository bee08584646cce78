"""The sentinels of a service; they know which of its servers is the primary."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from redis import exceptions

from aiodigest.backends.redis.connections.connection import Address, Maker, drop, new_connection, send, show_address
from aiodigest.backends.redis.connections.errors import FORBIDDEN, code_of
from aiodigest.errors import ConfigurationError

PORT = 26379
NO_SENTINEL = "unknown command"  # is what a server says to a command that every sentinel knows


@dataclass
class Sentinels:
    """The sentinels of a service; redis-py's ``Sentinel`` is not used: docs/design.md, section 8, says why."""

    service: str
    make: Maker
    settings: Mapping[str, object] = field(repr=False)  # the password is among them
    addresses: list[Address]  # the one that named the primary last is asked first
    _trusted: Address | None = field(default=None, init=False)  # the one that named it last, unless it is in doubt

    async def primary(self, timeout: float) -> Address:
        """Return the address of the primary. Dead sentinels leave time for the others, and for the primary."""
        share, problems, refusals = timeout / (len(self.addresses) + 1), list[str](), 0
        for address in list(self.addresses):
            try:
                async with asyncio.timeout(share):
                    flags, host, port = await self._ask(address, share)
            except (exceptions.RedisError, OSError) as error:
                refusals += code_of(error) in FORBIDDEN or NO_SENTINEL in str(error)
                problem = explained(error)
            else:
                if "master" in flags and not {"s_down", "o_down"} & flags:
                    self.addresses.remove(address)
                    self.addresses.insert(0, address)
                    self._trusted = address
                    return host, port
                problem = "it sees the primary down"
            problems.append(f"{show_address(*address)}: {problem}")
        message = f"no sentinel names a primary of {self.service!r} ({'; '.join(problems)})"
        if refusals == len(problems):  # else it is one that is set up wrong, or the others are away
            raise ConfigurationError(message)
        raise exceptions.ConnectionError(message)

    def doubt(self) -> None:
        """Ask the sentinel trusted last after all others: the server it named is no primary, and it may be cut off."""
        if self._trusted is not None:
            self.addresses.remove(self._trusted)
            self.addresses.append(self._trusted)
            self._trusted = None

    async def _ask(self, address: Address, timeout: float) -> tuple[set[str], str, int]:
        """Return the flags, host and port that a sentinel has for the primary."""
        host, port = address
        connection = new_connection(
            self.make, {**self.settings, "host": host, "port": port, "socket_connect_timeout": timeout}
        )
        try:
            await connection.connect()
            await send(connection, "SENTINEL", "MASTER", self.service)
            reply = await connection.read_response()
        finally:
            await drop(connection)
        try:
            words = [item.decode() for item in cast("list[bytes]", reply)]
            known = dict(zip(words[::2], words[1::2], strict=True))
            return set(known["flags"].split(",")), known["ip"], int(known["port"])
        except (TypeError, ValueError, KeyError, AttributeError):
            raise exceptions.InvalidResponse("it does not answer as a sentinel does") from None


def explained(error: Exception) -> str:
    """Explain a failure to ask a sentinel."""
    text = str(error)
    if NO_SENTINEL in text:
        return f"it is no sentinel, whose port is {PORT} if none is given; one server is redis://host:port"
    if re.search("No such (master|primary)", text):
        return "it knows no service of this name"
    return text or ("no answer in time" if isinstance(error, TimeoutError) else repr(error))
