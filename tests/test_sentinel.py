"""Real sentinels: a URL of theirs leads to whatever server is the primary, before, while and after it changes."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator

import pytest
from engines import patiently
from replicas import SERVICE, Watched, follow, follows, freeze, port_of, replicated, role_of, until, watched
from servers import rules
from traffic import Traffic

from aiodigest import BackendUnavailable, ConfigurationError, DigestEngine
from aiodigest.backends.redis.scripts import load_script

pytestmark = pytest.mark.cluster

SECOND = 1_000  # ms of silence of a primary that is to be replaced


@pytest.fixture
async def trio() -> AsyncIterator[Watched]:
    async with watched() as trio:
        yield trio


def traffic_to(trio: Watched, namespace: str, *, wait_replicas: int = 1) -> Traffic:
    keys = [f"timeline-{number}" for number in range(5)]
    return Traffic(trio.url, namespace, keys, wait_replicas=wait_replicas, timeout=2)


async def test_nothing_acknowledged_is_lost_when_the_primary_is_killed(namespace: str) -> None:
    async with watched(SECOND) as trio:
        old, *others = trio.servers
        sha = load_script("add").sha
        assert [replica.ask("SCRIPT", "EXISTS", sha) for replica in others] == [[False]] * 2
        traffic = traffic_to(trio, namespace)
        async with traffic.flowing():
            await traffic.replicated()
            old.stop()
            await until(traffic.errors)
            traffic.forgets()
            await traffic.goes_on()
            await until(lambda: trio.primary() in others)
            new = trio.primary()
            assert new is not None
            assert new.ask("SCRIPT", "EXISTS", sha) == [True]
            old.start()
            follow(old, new)
            await until(lambda: follows(old))
            await traffic.goes_on()


async def test_when_the_primary_hangs_calls_time_out_and_all_goes_on_with_a_replica(namespace: str) -> None:
    async with watched(SECOND) as trio:
        traffic = traffic_to(trio, namespace)
        async with traffic.flowing():
            await traffic.replicated()
            freeze(trio.servers[0])
            await until(lambda: any(error.stored == "unknown" for error in traffic.errors()))
            traffic.forgets()
            await traffic.goes_on()


async def test_a_primary_that_the_sentinels_see_down_is_not_tried(namespace: str) -> None:
    async with watched(SECOND) as trio:
        for replica in trio.servers[1:]:
            replica.stop()  # so that there is nobody to promote
        freeze(trio.servers[0])
        await until(lambda: all(facts["is_sdown"] for facts in trio.facts()))
        async with DigestEngine(trio.url, namespace=namespace) as engine:
            with pytest.raises(BackendUnavailable, match="it sees the primary down"):
                await engine.add("key", 1)


async def test_a_primary_that_is_relieved_is_left_for_the_next(trio: Watched, namespace: str) -> None:
    old, *others = trio.servers
    # both, since for a moment the old primary still has the replica that was not promoted
    traffic = traffic_to(trio, namespace, wait_replicas=2)
    async with traffic.flowing():
        await traffic.replicated()
        trio.order(0, "SENTINEL", "FAILOVER", SERVICE)
        await until(lambda: trio.primary() in others)
        follow(old, trio.primary())  # which the sentinels would tell it in eight seconds
        await until(lambda: role_of(old) == "slave")
        traffic.forgets()
        await traffic.goes_on()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sentinel_that_is_gone_changes_nothing(trio: Watched, namespace: str, end: signal.Signals) -> None:
    trio.sentinels[0].send_signal(end)
    for _ in range(2):
        async with DigestEngine(trio.url, namespace=namespace, timeout=6) as engine:
            await patiently(lambda: engine.add("key", 1, record_id="a"))
            await patiently(lambda: engine.peek("key"))


async def test_a_sentinel_that_names_a_replica_is_asked_after_the_others(trio: Watched, namespace: str) -> None:
    replica = trio.servers[1]
    # by which the sentinel would hear of the others, and be put right
    forbidden = "resetchannels", "+@all", "-subscribe", "-publish"
    replica.ask("ACL", "SETUSER", "deaf", "on", ">secret", "~*", *forbidden)
    trio.order(0, "SENTINEL", "REMOVE", SERVICE)
    trio.order(0, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(port_of(replica)), "2")
    trio.order(0, "SENTINEL", "SET", SERVICE, "auth-user", "deaf", "auth-pass", "secret")
    async with DigestEngine(trio.url, namespace=namespace) as engine:
        with pytest.raises(BackendUnavailable, match="is a replica"):
            await engine.add("key", 1)
        assert await engine.add("key", 1)
        assert trio.facts()[0]["port"] == port_of(replica), "it was put right meanwhile"


async def test_without_sentinels_only_connections_of_before_go_on(trio: Watched, namespace: str) -> None:
    async with DigestEngine(trio.url, namespace=namespace) as engine:
        await engine.add("key", 1)
        for sentinel in trio.sentinels:
            sentinel.kill()
            sentinel.wait()
        await engine.add("key", 2)
        async with DigestEngine(trio.url, namespace=namespace) as other:
            with pytest.raises(BackendUnavailable, match="no sentinel names a primary of 'mail'") as caught:
                await other.add("key", 3, record_id="mine")
            assert (caught.value.stored, caught.value.record_id) == ("no", "mine")


async def test_a_service_that_no_sentinel_knows_is_unavailable(trio: Watched, namespace: str) -> None:
    async with DigestEngine(trio.url.replace(SERVICE, "other"), namespace=namespace) as engine:
        with pytest.raises(BackendUnavailable, match=r"\(127.0.0.1:\d+: it knows no service of this name") as caught:
            await engine.add("key", 1)
        assert caught.value.stored == "no"


async def test_sentinels_are_asked_with_their_login(trio: Watched, namespace: str) -> None:
    for number in range(3):
        trio.order(number, "ACL", "SETUSER", "mail-watcher", *rules()["watcher"])
    trio.servers[0].ask("ACL", "SETUSER", "writer", "on", ">theirs", "~*", "+@all")
    url = trio.url.replace("://", "://writer:theirs@") + "?sentinel_username=mail-watcher&sentinel_password="
    async with DigestEngine(f"{url}PASSWORD", namespace=namespace) as engine:
        assert await engine.add("key", 1)
    with pytest.raises(ConfigurationError, match="username-password") as caught:
        await DigestEngine(f"{url}wrong-one", namespace=namespace).__aenter__()
    assert "wrong-one" not in str(caught.value)


async def test_a_server_that_refuses_access_is_named(trio: Watched, namespace: str) -> None:
    url = trio.url.replace("://", "://nobody:no@")
    with pytest.raises(ConfigurationError, match=rf"^127.0.0.1:{port_of(trio.servers[0])} of redis\+sentinel://nobody"):
        await DigestEngine(url, namespace=namespace).__aenter__()


async def test_a_server_given_as_a_sentinel_is_a_configuration_error(namespace: str) -> None:
    async with replicated() as (primary, _):
        port = port_of(primary)
        told = f"127.0.0.1:{port}: it is no sentinel, whose port is 26379 if none is given; one server is redis://"
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            await DigestEngine(f"redis+sentinel://127.0.0.1:{port}/mail", namespace=namespace).__aenter__()
