"""``aiodigest bench``, and ``engine.erase``, by which it leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from clusters import running_cluster, until
from commandline import DEADLINE, Command, environment, running
from engines import WatchedBackend, engine_on, virtual_time
from servers import Server
from stores import Place
from terminals import on_terminal

from aiodigest import ConfigurationError, DigestEngine, Entry, Policy
from aiodigest.cli.bench import measure

LATER = Policy(initial_delay=1_500)


def all_may(url: str) -> str:
    """The same URL of a user who may do all."""
    return f"{url.partition('://')[0]}://{url.rpartition('@')[2]}"


@pytest.mark.processes
def test_figures_are_one_object_in_json_a_bar_tells_of_the_time_and_no_key_is_left(own: Server, tmp_path: Path) -> None:
    arguments = "bench", "--url", all_may(own.url), "--seconds", "1", "--json"
    with on_terminal(tmp_path, *arguments, streams=["stderr"]) as bench:
        bench.until("measuring")
        code, output = bench.end()
    assert code == 0
    [figures] = [json.loads(line) for line in output.splitlines()]
    assert figures.pop("server").startswith(("Valkey ", "Redis "))
    assert all(figure > 0 for figure in figures.values())
    assert figures["latency"] <= figures["latency_p99"]
    with own.client() as client:
        assert client.keys() == []


async def test_each_figure_is_of_one_call_at_least_however_little_time_is_left(server: Server, namespace: str) -> None:
    policy = Policy(minimum_delay=0, increment_delay=0)
    adder, worker = (DigestEngine(server.url, namespace=namespace, value_type=str, policy=policy) for _ in range(2))
    async with adder:
        figures = await measure(adder, worker, 0.0)
    assert all(value > 0 for name, value in asdict(figures).items() if name != "server")


@pytest.mark.cluster
def test_on_a_cluster_figures_are_a_table_beside_the_round_trip_and_no_node_has_a_key_left(command: Command) -> None:
    with running_cluster(replicas=0) as cluster:
        code, output, errors = command("bench", "--url", all_may(cluster.url), "--seconds", "1")
        assert code == 0
        assert errors.startswith("aiodigest: for about 1 s this writes up to 50,000 records (15 MB) at a time in the ")
        assert errors.count("\n") == 1
        header, *rows = output.splitlines()
        assert header.split()[-3:] == ["round", "trips", "each"]
        assert [row.split("  ")[0] for row in rows] == [
            "bare round trip", "add, one after the other", "adds by 200 tasks", "adds by add_many",
            "digests of ten records", "add to callback, median", "add to callback, 99 of 100",
        ]  # fmt: skip
        assert rows[0].split()[-1] == "1"
        assert [node.ask("DBSIZE") for node in cluster.nodes] == [0, 0, 0]


@pytest.mark.processes
@pytest.mark.parametrize(("event", "code", "lines"), [("SIGINT", 130, 1), ("SIGTERM", 130, 1), ("full", 69, 2)])
def test_no_key_is_left_by_a_bench_that_fails(own: Server, tmp_path: Path, event: str, code: int, lines: int) -> None:
    with running(tmp_path, "bench", "--url", all_may(own.url), "--seconds", "30") as process, own.client() as client:
        until(lambda: client.dbsize() > 10, "something is written")
        if event == "full":
            client.config_set("maxmemory", "1mb")
        else:
            process.process.send_signal(getattr(signal, event))
        assert process.end() == code
        assert (process.output, process.errors.count(b"\n")) == (b"", lines)
        assert client.keys() == []


def test_a_user_who_could_not_remove_what_was_written_is_refused_first(own: Server, command: Command) -> None:
    code, output, errors = command("bench", "--url", own.url, "--seconds", "1")
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert "scan" in errors
    with own.client() as client:
        assert client.keys() == []


@pytest.mark.thorough
def test_all_keys_of_the_server_are_looked_through_once_and_that_at_the_end(own: Server, command: Command) -> None:
    def scans() -> int:
        """How often the server was asked for a page of its keys."""
        return client.info("commandstats")["cmdstat_scan"]["calls"]

    with own.client() as client:
        client.mset({f"another:{number}": "" for number in range(50_000)})
        assert command("bench", "--url", all_may(own.url), "--seconds", "1")[0] == 0
        bench = scans()
        assert len(list(client.scan_iter(count=1000))) == 50_000
        once = scans() - bench
        assert once > 20
        assert bench < 1.5 * once


@pytest.mark.processes
def test_a_server_that_goes_away_meanwhile_is_told_with_what_may_be_left(own: Server, tmp_path: Path) -> None:
    arguments = "bench", "--url", all_may(own.url), "--timeout", "5s", "--seconds", "1"
    with running(tmp_path, *arguments) as process, own.client() as client:
        until(lambda: client.keys("*:leased"), "a worker delivers, who by itself would wait for the server")
        own.stop()
        assert process.end() == 69
        assert b"; the contents of the namespace bench-" in process.errors.splitlines()[-1]
        assert b"Traceback" not in process.errors


def keys_of(place: Place, tag: str) -> set[bytes]:
    with place.client_of(tag) as client:
        return set(client.scan_iter(match=f"{{{tag}}}:*", count=1000))


async def test_a_namespace_is_erased_with_all_its_shards_and_its_neighbours_stay(place: Place, namespace: str) -> None:
    url, neighbours = all_may(place.url), [f"{namespace}.", f"{namespace}-", namespace[:-1] + "_"]
    for neighbour in neighbours:
        async with DigestEngine(url, namespace=neighbour, policy=LATER) as engine:
            await engine.add("k", 1)
    before = [keys_of(place, neighbour) for neighbour in neighbours]
    async with DigestEngine(url, namespace=namespace, shards=4, policy=LATER) as engine:
        await engine.add_many(Entry(f"k{number}", number) for number in range(2_500))
        with place.client_of(namespace) as client:
            client.set(f"{{{namespace}}}another-program", "s")
        assert await engine.erase() >= 5_000
        with place.client_of(namespace) as client:
            assert client.delete(f"{{{namespace}}}another-program") == 1
        assert await engine.erase() == 0
        assert [keys_of(place, neighbour) for neighbour in neighbours] == before
        assert (await engine.stats()).waiting == 0
        await engine.add("k", 1)  # it begins anew
        assert (await engine.stats()).waiting == 1
        await engine.erase()


async def test_a_user_who_may_not_scan_erases_nothing(server: Server, namespace: str) -> None:
    async with DigestEngine(server.url, namespace=namespace, policy=LATER) as engine:
        await engine.add("k", 1)
        with pytest.raises(ConfigurationError, match="scan"):
            await engine.erase()
        assert (await engine.stats()).waiting == 1


@virtual_time
async def test_a_store_in_memory_is_erased_too() -> None:
    engine: DigestEngine[Any] = engine_on(WatchedBackend(), policy=LATER)
    async with engine:
        await engine.add("k", 1)
        assert await engine.erase() == 1
        assert await engine.peek("k") is None


@pytest.mark.processes
def test_without_standard_streams_it_ends_as_one_that_could_not_tell_its_figures(own: Server, tmp_path: Path) -> None:
    command = f'exec "{sys.executable}" -m aiodigest bench --seconds 1 --url "{all_may(own.url)}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env=environment(tmp_path), timeout=DEADLINE).returncode == 1
