"""Stores of timelines: ``redis`` (with ``embedded``, a server of its own) and ``memory``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from aiodigest.backend import Backend
from aiodigest.errors import ConfigurationError

if TYPE_CHECKING:
    from redis.asyncio import Redis, RedisCluster


class ValkeyClient(Protocol):
    """A ``valkey.asyncio.Valkey`` or ``ValkeyCluster``, as far as it is known where the package is not installed."""

    def get_connection_kwargs(self) -> Any: ...


def open_backend(
    url: str | Redis | RedisCluster | ValkeyClient,
    *,
    namespace: str,
    shards: int | None,
    timeout: float,
    wait_replicas: int,
) -> Backend:
    """Return the backend that a URL or a client names. This does no I/O, but checks the arguments."""
    from aiodigest.backends.redis.backend import RedisBackend  # who only imports aiodigest need not wait for it

    source = url
    if isinstance(url, str) and url.startswith("embedded:"):
        from aiodigest.backends.embedded.server import EmbeddedServer
        from aiodigest.backends.redis.connections.url import check_length, hide_password

        check_length(url)
        if not re.fullmatch("embedded://(/[^?#]*)?", url) or "\0" in unquote(url):
            problem = f"an embedded URL is embedded:// or embedded:///folder, not {hide_password(url)!r}"
            raise ConfigurationError(problem)
        source = EmbeddedServer(data_folder(url) if url.strip("/") != "embedded:" else None)
    return RedisBackend(source, namespace=namespace, shards=shards, timeout=timeout, wait_replicas=wait_replicas)


def data_folder(url: str = "embedded://") -> Path:
    """Return the data folder of the embedded server that ``url`` means.

    ``embedded:///folder`` names it. For any other URL it is the folder in the environment's ``AIODIGEST_DATA``, else
    the user's data folder for ``aiodigest``. Raises ConfigurationError if the user has no home.
    """
    named = unquote(url.removeprefix("embedded://")) if url.startswith("embedded:///") else ""
    if not named.strip("/"):
        named = os.environ.get("AIODIGEST_DATA", "")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    try:
        return user_data_path("aiodigest")
    except RuntimeError as error:  # a user id without an entry, and no HOME, as in many containers
        problem = f"there is no folder for the data of an embedded server ({error}): set AIODIGEST_DATA to one"
        raise ConfigurationError(problem) from error
