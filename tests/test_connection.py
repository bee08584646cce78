"""URLs, clients, and what errors of redis-py mean."""

from __future__ import annotations

import pytest
from redis import exceptions
from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from aiodigest.connection import explain, find_target, hide_password
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, InvalidState


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://user:secret@host/1", "redis://user:***@host/1"),
        ("rediss://:secret@host", "rediss://:***@host"),
        ("redis://user:s:e@c@host", "redis://user:***@host"),
        ("unix:///run/redis?db=1&password=secret", "unix:///run/redis?db=1&password=***"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert hide_password(url) == shown
    assert find_target(url).url == shown


@pytest.mark.parametrize(
    "source",
    [
        None, 5, b"redis://localhost", "", "localhost:6379", "http://localhost", "redis://:secret@host:port",
        "redis://:secret@host:99999", "redis://:secret@[host", "redis://:secret@host/db", "unix://",
        "redis://:secret@host?db=x", "redis+cluster://:secret@a,b", "redis+sentinel://:secret@a/mail/0",
    ],
)  # fmt: skip
def test_what_is_no_server_is_refused_without_telling_a_password(source: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_target(source)
    assert "secret" not in str(caught.value)
    assert "allowed is redis://" in str(caught.value) or "use a single server" in str(caught.value)


async def test_a_client_lends_its_settings_but_not_its_retries_and_timeouts() -> None:
    client = Redis(
        host="example", port=7, db=3, username="me", password="secret", ssl=True, ssl_ca_certs="/ca",
        decode_responses=True, socket_timeout=99, retry=Retry(ExponentialBackoff(), 7), client_name="mine",
    )  # fmt: skip
    target = find_target(client)
    wire = target.connection(2.0)
    assert isinstance(wire, SSLConnection)
    assert (wire.host, wire.port, wire.db, wire.username, wire.password) == ("example", 7, 3, "me", "secret")
    assert (wire.client_name, wire.ca_certs) == ("mine", "/ca")
    assert (wire.socket_timeout, wire.socket_connect_timeout) == (None, 2.0)
    assert wire.retry.get_retries() == 0
    assert not wire.encoder.decode_responses
    assert "secret" not in repr(target) + target.url
    await client.aclose()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
            BackendUnavailable,
            "full",
        ),
        (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), BackendUnavailable, "loading"),
        (exceptions.ReadOnlyError("You can't write against a read only replica."), BackendUnavailable, "replica"),
        (exceptions.ResponseError("MISCONF Redis is configured to save"), BackendUnavailable, "cannot save"),
        (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), BackendUnavailable, "replicas"),
        (exceptions.ResponseError("BUSY Redis is busy running a script"), BackendUnavailable, "busy"),
        (exceptions.ClusterDownError("CLUSTERDOWN The cluster is down"), BackendUnavailable, "cluster is down"),
        (exceptions.MasterDownError("Link with MASTER is down"), BackendUnavailable, "primary is down"),
        (exceptions.TryAgainError("Multiple keys request during rehashing"), BackendUnavailable, "moved"),
        (exceptions.ConnectionError("Connection refused"), BackendUnavailable, "refused"),
        (exceptions.TimeoutError("Timeout reading"), BackendUnavailable, "Timeout"),
        (TimeoutError(), BackendUnavailable, "no answer in time"),
        (OSError("broken pipe"), BackendUnavailable, "broken pipe"),
        (exceptions.AuthenticationError("invalid username-password pair"), ConfigurationError, "refuses access"),
        (exceptions.NoPermissionError("this user has no permissions"), ConfigurationError, "refuses access"),
        (exceptions.MovedError("7000 host:1"), ConfigurationError, "cluster"),
        # how Redis 6.2 tells of an error inside a script
        (
            exceptions.ResponseError(
                "ERR Error running script (call to f_0): @user_script:12: -OOM command not allowed when used memory"
            ),
            BackendUnavailable,
            "full",
        ),
        ("-OOM command not allowed when used memory > 'maxmemory'.\r\n", BackendUnavailable, "full"),
        ("WRONGTYPE Operation against a key", InvalidState, "another program"),
        ("ERR something else", AiodigestError, "something else"),
    ],
)
def test_errors_say_what_they_mean(error: Exception | str, kind: type[AiodigestError], words: str) -> None:
    explained = explain(error, "redis://host")
    assert type(explained) is kind
    assert words in str(explained)
