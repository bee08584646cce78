"""Fixtures that every test may use: servers of a run, a namespace a test, and a check of what a test leaves behind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from inspect import iscoroutinefunction
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from clusters import running_cluster
from commandline import Command, in_process
from embedded_users import NewUser, data_folder, users_of
from engines import virtual_time
from hypothesis import Phase, settings
from replicas import watched
from servers import PASSWORD, USER, Server, running_server, server_version, tls_binary
from stores import Place, Store
from storestate import check_invariants, forget, redis_state
from userland import data_folder as user_folder

from aiodigest.backends.embedded import server as embedded
from aiodigest.backends.memory.backend import ReferenceBackend
from aiodigest.backends.redis.backend import RedisBackend

# A shell starts what runs in its background with Ctrl-C ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("patient", settings(deadline=None))  # a machine that is busy is no fault
settings.register_profile(
    "unshrunk", settings(deadline=None, phases=set(Phase) - {Phase.shrink, Phase.explain})
)  # for who asks only whether a test fails: the smallest example takes minutes to find
settings.register_profile("quick", settings(deadline=None, max_examples=25))
settings.load_profile("patient")

_numbers = count(1)

PLACES = {"redis": "one_server", "sentinel": "behind_sentinels", "cluster": "on_cluster"}  # and their fixtures
EACH_PLACE = ("redis", *(pytest.param(name, marks=pytest.mark.cluster) for name in ("sentinel", "cluster")))
SLOW = {"cluster", "processes", "server_faults", "docs", "worlds", "fuzz", "zones", "thorough"}  # see pyproject.toml
STARTS = {  # fixtures that start what makes a test slow
    "cluster": "cluster", "sixteen": "cluster", "on_cluster": "cluster", "behind_sentinels": "cluster",
    "new_user": "processes",
}  # fmt: skip
SLOW_FILE = re.compile(rf"^pytestmark = pytest\.mark\.({'|'.join(SLOW)})$", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests whose marker says why they are slow")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")
    try:
        server_version()
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> str:
    return f"server: {server_version()}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare each worker of the quick tests the imports of files whose tests are all slow."""
    if config.getoption("--quick") and collection_path.suffix == ".py":
        return bool(SLOW_FILE.search(collection_path.read_text(encoding="utf-8"))) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Run each async test of a module that is marked so in virtual time."""
    if name.startswith("test_") and iscoroutinefunction(obj) and collector.get_closest_marker("virtual_time"):
        setattr(collector.obj, name, virtual_time(obj))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in STARTS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(STARTS[fixture])
    if config.getoption("--quick"):
        slow = {item for item in items if SLOW & {mark.name for mark in item.iter_markers()}}
        config.hook.pytest_deselected(items=[*slow])
        items[:] = [item for item in items if item not in slow]
    items.sort(key=lambda item: "test_store_model" not in item.nodeid)  # the longest, or all would wait for it at last


def pytest_xdist_auto_num_workers() -> int:
    """Run twice as many tests at once as there are cores: most of them wait for a server or a process."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not tls_binary():
        terminalreporter.write_line(
            "LEFT OUT: tests of servers that speak TLS, since there is none; Debian's package redis-server has one"
        )


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that all tests share which do no harm to it."""
    with running_server() as running:
        yield running


@pytest.fixture
def own() -> Iterator[Server]:
    """A server of the test's own."""
    with running_server() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    """A client of that server which may do all, for looking behind the backend's back."""
    with server.client() as client:
        yield client


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """The data folder of an embedded server; nothing may be left of it."""
    with data_folder() as folder:
        yield folder


@pytest.fixture
def data() -> Iterator[Path]:
    """A folder in which a user's programs run, short enough for the sockets of an embedded server."""
    with user_folder() as folder:
        yield folder


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: exit code, output and errors."""
    return in_process(monkeypatch, capfd)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only a moment, on starting an embedded server, for one that is down and may come back."""
    monkeypatch.setattr(embedded, "_DOWN_TIMEOUT", 0.01)


@pytest.fixture
def new_user(folder: Path) -> Iterator[NewUser]:
    """Other processes that use the embedded server of the folder."""
    with users_of(folder) as new_user:
        yield new_user


@pytest.fixture(scope="session")
def one_server(server: Server) -> Place:
    return Place("redis", server.url, lambda _: server.client())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def behind_sentinels() -> AsyncIterator[Place]:
    async with watched() as trio:
        primary = trio.primary()
        assert primary is not None
        # the servers know the user, the sentinels do not
        url = trio.url.replace("://", f"://{USER}:{PASSWORD}@")
        yield Place("sentinel", url, lambda _: primary.client())


@pytest.fixture(scope="session")
def on_cluster() -> Iterator[Place]:
    with running_cluster() as cluster, cluster.client() as map_of_slots:
        nodes = {node.port: node for node in cluster.nodes}

        def client_of(tag: str) -> Any:
            return nodes[map_of_slots.get_node_from_key(f"{{{tag}}}:").port].client()

        yield Place("cluster", cluster.url, client_of)


@pytest.fixture(params=EACH_PLACE)
def place(request: pytest.FixtureRequest) -> Place:
    """Each of the places where a store may be."""
    return request.getfixturevalue(PLACES[request.param])


@pytest.fixture(params=["reference", *EACH_PLACE])
def memory_or_place(request: pytest.FixtureRequest) -> Place | None:
    return None if request.param == "reference" else request.getfixturevalue(PLACES[request.param])


@pytest.fixture
async def store(memory_or_place: Place | None, namespace: str) -> AsyncIterator[Store]:
    """A store in memory and in each place, and a check of what the test leaves in it."""
    numbers = count(1)
    store: Store
    options: dict[str, Any] = {"now": lambda: store.now, "nonce": lambda: f"n{next(numbers)}"}
    if memory_or_place is None:
        store = Store(ReferenceBackend(**options))
        yield store
        return
    backend = RedisBackend(memory_or_place.url, namespace=namespace, **options)
    store = Store(backend)
    await backend.connect()
    yield store
    await backend.aclose()
    with memory_or_place.client_of(namespace) as client:
        try:
            check_invariants(redis_state(client, namespace))
        finally:
            forget(client, namespace)
