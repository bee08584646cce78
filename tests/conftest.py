"""Fixtures that every test may use: one server a run, a namespace a test, and a check of what a test leaves behind."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
from embedded_users import NewUser, data_folder, users_of
from servers import Server, running_server
from stores import Store
from storestate import check_invariants, redis_state

from aiodigest.memory import ReferenceBackend
from aiodigest.redisbackend import RedisBackend

# A shell starts what runs in its background with Ctrl-C ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that all tests share which do no harm to it."""
    with running_server() as running:
        yield running


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
def new_user(folder: Path) -> Iterator[NewUser]:
    """Other processes that use the embedded server of the folder."""
    with users_of(folder) as new_user:
        yield new_user


@pytest.fixture(params=["reference", "redis"])
async def store(request: pytest.FixtureRequest, server: Server, namespace: str) -> AsyncIterator[Store]:
    """A store of each kind, and a check of what the test leaves in it."""
    numbers = count(1)
    store: Store

    def now() -> int:
        return store.now

    def nonce() -> str:
        return f"n{next(numbers)}"

    if request.param == "reference":
        store = Store(ReferenceBackend(now=now, nonce=nonce))
        yield store
        return
    backend = RedisBackend(server.url, namespace=namespace, now=now, nonce=nonce)
    store = Store(backend)
    await backend.connect()
    yield store
    await backend.aclose()
    with server.client() as client:
        check_invariants(redis_state(client, namespace))
