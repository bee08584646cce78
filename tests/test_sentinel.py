"""Real sentinels: a URL of theirs leads to whatever server is the primary, before, while and after it changes."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engines import patiently
from redis.asyncio.sentinel import Sentinel
from replicas import SERVICE, follow, follows, freeze, port_of, replicated, role_of, until, watched
from servers import rules

from aiodigest import BackendUnavailable, ConfigurationError, Digest, DigestEngine, Policy
from aiodigest.backends.redis.scripts import load_script

pytestmark = pytest.mark.cluster

NO_GAP = Policy(minimum_delay=0, increment_delay=0)
SECOND = 1_000  # ms of silence of a primary that is to be replaced


class Traffic:
    """A producer that adds records one after the other, and a worker; what was acknowledged, and what was delivered."""

    def __init__(self, url: str, namespace: str, *, wait_replicas: int = 1) -> None:
        options: dict[str, Any] = {"namespace": namespace, "value_type": int, "policy": NO_GAP, "timeout": 2}
        self.producer = DigestEngine[int](url, wait_replicas=wait_replicas, **options)
        self.worker = DigestEngine[int](url, lease_timeout=2, **options)
        self.acknowledged: list[str] = []
        self.refused: list[BackendUnavailable] = []
        self.delivered: defaultdict[str, set[str]] = defaultdict(set)  # the digests that each record came in

    async def _deliver(self, digest: Digest[int]) -> None:
        for record in digest.records:
            self.delivered[record.id].add(digest.id)

    async def _produce(self) -> None:
        number = 0
        while True:
            number += 1
            try:
                await self.producer.add(f"timeline-{number % 5}", number, record_id=f"r{number}")
                self.acknowledged.append(f"r{number}")
            except BackendUnavailable as error:
                self.refused.append(error)
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def flowing(self) -> AsyncGenerator[None]:
        """Both at work until the block ends; then all that was acknowledged comes."""
        async with self.worker.delivering(self._deliver), self.producer:
            producing = asyncio.create_task(self._produce())
            try:
                await self.goes_on()
                yield
            finally:
                producing.cancel()
                await asyncio.wait([producing])
            await until(lambda: set(self.acknowledged) <= self.delivered.keys())

    @property
    def twice(self) -> set[str]:
        """The records that came in digests with different ids."""
        return {record for record, digests in self.delivered.items() if len(digests) > 1}

    async def goes_on(self) -> None:
        """Return when records that are added from now on have been acknowledged and delivered."""
        first = len(self.acknowledged)
        await until(lambda: len(self.acknowledged) > first + 20)
        last = self.acknowledged[first + 20]
        await until(lambda: last in self.delivered)

    async def replicated(self) -> set[str]:
        """What was delivered, as a replica knows: it has acknowledged adds that came later."""
        delivered = set(self.delivered)
        await self.goes_on()
        return delivered

    async def fails(self) -> None:
        """Return when an add has failed."""
        await until(lambda: bool(self.refused))


async def test_when_the_primary_is_killed_all_goes_on_with_a_replica_and_nothing_that_was_acknowledged_is_lost(
    namespace: str,
) -> None:
    async with watched(SECOND) as trio:
        old, *others = trio.servers
        sha = load_script("add").sha
        for replica in others:
            with replica.client() as client:
                assert client.script_exists(sha) == [False]
        traffic = Traffic(trio.url, namespace)
        async with traffic.flowing():
            before = await traffic.replicated()
            old.stop()
            await traffic.fails()
            meanwhile = set(traffic.delivered) - before
            await traffic.goes_on()
            await until(lambda: trio.primary() in others)
            new = trio.primary()
            assert new is not None
            with new.client() as client:
                assert client.script_exists(sha) == [True]
            old.start()
            follow(old, new)
            await until(lambda: follows(old))
            await traffic.goes_on()
        assert traffic.twice <= meanwhile, "a claim that no replica had went with the old primary"


async def test_when_the_primary_hangs_calls_time_out_and_all_goes_on_with_a_replica(namespace: str) -> None:
    async with watched(SECOND) as trio:
        traffic = Traffic(trio.url, namespace)
        async with traffic.flowing():
            before = await traffic.replicated()
            freeze(trio.servers[0])
            await traffic.fails()
            meanwhile = set(traffic.delivered) - before
            assert traffic.refused[0].stored == "unknown"
            await traffic.goes_on()
        assert traffic.twice <= meanwhile, "a claim that no replica had went with the old primary"


async def test_a_primary_that_the_sentinels_see_down_is_not_tried(namespace: str) -> None:
    async with watched(SECOND) as trio:
        for replica in trio.servers[1:]:
            replica.stop()  # so that there is nobody to promote
        freeze(trio.servers[0])
        await until(lambda: all(facts["is_sdown"] for facts in trio.facts()))
        async with DigestEngine(trio.url, namespace=namespace) as engine:
            with pytest.raises(BackendUnavailable, match="it sees the primary down"):
                await engine.add("key", 1)


async def test_when_the_primary_is_relieved_its_connections_are_left_for_the_next(namespace: str) -> None:
    async with watched() as trio:
        old, *others = trio.servers
        # both, since for a moment the old primary still has the replica that was not promoted
        traffic = Traffic(trio.url, namespace, wait_replicas=2)
        async with traffic.flowing():
            before = await traffic.replicated()
            trio.order(0, "SENTINEL", "FAILOVER", SERVICE)
            await until(lambda: trio.primary() in others)
            follow(old, trio.primary())  # which the sentinels would tell it in eight seconds
            await until(lambda: role_of(old) == "slave")
            meanwhile = set(traffic.delivered) - before
            await traffic.goes_on()
        assert traffic.twice <= meanwhile, "both were primaries for a moment, and a claim on the old one went with it"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sentinel_that_is_dead_or_hangs_changes_nothing(namespace: str, end: signal.Signals) -> None:
    async with watched() as trio:
        trio.sentinels[0].send_signal(end)
        for _ in range(2):
            async with DigestEngine(trio.url, namespace=namespace, timeout=6) as engine:
                await patiently(lambda: engine.add("key", 1, record_id="a"))
                await patiently(lambda: engine.peek("key"))


async def test_a_sentinel_that_names_a_replica_is_asked_after_the_others(namespace: str) -> None:
    async with watched() as trio:
        replica = trio.servers[1]
        with replica.client() as client:  # by which the sentinel would hear of the others, and be put right
            client.execute_command(
                "ACL", "SETUSER", "deaf", "on", ">secret", "~*", "resetchannels", "+@all", "-subscribe", "-publish"
            )
        trio.order(0, "SENTINEL", "REMOVE", SERVICE)
        trio.order(0, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", str(port_of(replica)), "2")
        trio.order(0, "SENTINEL", "SET", SERVICE, "auth-user", "deaf", "auth-pass", "secret")
        async with DigestEngine(trio.url, namespace=namespace) as engine:
            with pytest.raises(BackendUnavailable, match="is a replica"):
                await engine.add("key", 1)
            assert await engine.add("key", 1)
            assert trio.facts()[0]["port"] == port_of(replica), "it was put right meanwhile"


async def test_without_any_sentinel_connections_of_before_go_on_and_new_ones_are_unavailable(namespace: str) -> None:
    async with watched() as trio, DigestEngine(trio.url, namespace=namespace) as engine:
        await engine.add("key", 1)
        for sentinel in trio.sentinels:
            sentinel.kill()
            sentinel.wait()
        await engine.add("key", 2)
        async with DigestEngine(trio.url, namespace=namespace) as other:
            with pytest.raises(BackendUnavailable, match="no sentinel names a primary of 'mail'") as caught:
                await other.add("key", 3, record_id="mine")
            assert (caught.value.stored, caught.value.record_id) == ("no", "mine")


async def test_a_service_that_no_sentinel_knows_is_unavailable(namespace: str) -> None:
    async with watched() as trio, DigestEngine(trio.url.replace(SERVICE, "other"), namespace=namespace) as engine:
        with pytest.raises(BackendUnavailable, match=r"\(127.0.0.1:\d+: it knows no service of this name") as caught:
            await engine.add("key", 1)
        assert caught.value.stored == "no"


async def test_sentinels_with_a_login_are_asked_with_it_and_one_that_is_wrong_is_a_configuration_error(
    namespace: str,
) -> None:
    async with watched() as trio:
        for number in range(3):
            trio.order(number, "ACL", "SETUSER", "mail-watcher", *rules()["watcher"])
        with trio.servers[0].client() as client:
            client.execute_command("ACL", "SETUSER", "writer", "on", ">theirs", "~*", "+@all")
        url = trio.url.replace("://", "://writer:theirs@") + "?sentinel_username=mail-watcher&sentinel_password="
        async with DigestEngine(f"{url}PASSWORD", namespace=namespace) as engine:
            assert await engine.add("key", 1)
        with pytest.raises(ConfigurationError, match="username-password") as caught:
            async with DigestEngine(f"{url}wrong-one", namespace=namespace):
                pass
        assert "wrong-one" not in str(caught.value)


async def test_a_server_that_refuses_access_is_named(namespace: str) -> None:
    async with watched() as trio:
        url = trio.url.replace("://", "://nobody:no@")
        with pytest.raises(
            ConfigurationError, match=rf"^127.0.0.1:{port_of(trio.servers[0])} of redis\+sentinel://nobody"
        ):
            async with DigestEngine(url, namespace=namespace):
                pass


async def test_a_server_given_as_a_sentinel_is_a_configuration_error(namespace: str) -> None:
    async with replicated(1) as servers:
        port = port_of(servers[0])
        told = f"127.0.0.1:{port}: it is no sentinel, whose port is 26379 if none is given; one server is redis://"
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            async with DigestEngine(f"redis+sentinel://127.0.0.1:{port}/mail", namespace=namespace):
                pass


async def test_a_client_of_sentinels_leads_to_the_primary(namespace: str) -> None:
    async with watched() as trio, Sentinel([("127.0.0.1", port) for port in trio.ports]) as manager:
        given = manager.master_for(SERVICE)  # pyright: ignore[reportUnknownMemberType]
        async with DigestEngine(given, namespace=namespace) as engine:
            assert await engine.add("key", 1)
        with trio.servers[0].client() as client:
            assert client.llen(f"{{{namespace}}}:log:key") == 1
        await given.aclose()
