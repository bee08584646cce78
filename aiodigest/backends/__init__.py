"""Stores of timelines: ``redis`` (with ``embedded``, a server of its own) and ``memory``."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiodigest.backend import Backend
from aiodigest.backends.embedded import data_folder
from aiodigest.errors import ConfigurationError

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster

    from aiodigest.backends.embedded.server import EmbeddedServer


def open_backend(
    url: str | Redis | RedisCluster, *, namespace: str, shards: int | None, timeout: float, wait_replicas: int
) -> Backend:
    """Return the backend that a URL or a client names. This does no I/O, but checks the arguments."""
    from aiodigest.backends.redis.backend import RedisBackend  # who only imports aiodigest need not wait for it

    source = _embedded(url) if isinstance(url, str) and url.startswith("embedded:") else url
    return RedisBackend(source, namespace=namespace, shards=shards, timeout=timeout, wait_replicas=wait_replicas)


def _embedded(url: str) -> EmbeddedServer:
    from aiodigest.backends.embedded.server import EmbeddedServer
    from aiodigest.backends.redis.connections.url import hide_password

    parts = urlsplit(url)
    if parts.netloc or parts.query or parts.fragment or not url.startswith("embedded://"):
        raise ConfigurationError(f"an embedded URL is embedded:// or embedded:///folder, not {hide_password(url)!r}")
    return EmbeddedServer(data_folder(url) if parts.path.strip("/") else None)
