"""The way from a URL to a connected backend, with its embedded server if there is one."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from aiodigest.backend import Backend
from aiodigest.backends.embedded import data_folder
from aiodigest.errors import ConfigurationError

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    from aiodigest.backends.embedded.server import EmbeddedServer
    from aiodigest.backends.redis.backend import RedisBackend


class Store:
    """The place where an engine keeps its timelines. Making one does no I/O, but checks its arguments."""

    def __init__(
        self, url: str | Redis | RedisCluster, *, namespace: str, shards: int | None, timeout: float, wait_replicas: int
    ) -> None:
        from aiodigest.backends.redis.backend import RedisBackend  # who only imports aiodigest need not wait for it

        def backend(source: str | Redis | RedisCluster) -> RedisBackend:
            return RedisBackend(
                source, namespace=namespace, shards=shards, timeout=timeout, wait_replicas=wait_replicas
            )

        self._server: EmbeddedServer | None = None
        if isinstance(url, str) and url.startswith("embedded:"):
            self.url = url
            self._server = _embedded(url)
            backend("unix:///checked/before/the/server/is/there")
        else:
            self.url = backend(url).url
        self._source = url
        self._make = backend

    def anew(self) -> Self:
        """Return the same place for another event loop: each has its own share of an embedded server."""
        other = copy(self)
        if self._server is not None:
            from aiodigest.backends.embedded.server import EmbeddedServer

            other._server = EmbeddedServer(self._server.folder)
        return other

    async def open(self) -> Backend:
        """Start or join the embedded server if there is one, and connect."""
        source = self._source if self._server is None else await self._server.start()
        backend = self._make(source)
        try:
            await backend.connect()
        except BaseException:
            await backend.aclose()
            raise
        return backend

    async def close(self) -> None:
        """End this engine's share of the embedded server."""
        if self._server is not None:
            await self._server.stop()

    def why_down(self) -> str | None:
        """Explain from its log why an embedded server is down; None if there is none, or it is up."""
        return self._server.why_down() if self._server is not None else None


def _embedded(url: str) -> EmbeddedServer:
    from aiodigest.backends.embedded.server import EmbeddedServer
    from aiodigest.backends.redis.connections.url import hide_password

    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or not url.startswith("embedded://"):
        raise ConfigurationError(f"an embedded URL is embedded:// or embedded:///folder, not {hide_password(url)!r}")
    return EmbeddedServer(data_folder(url))
