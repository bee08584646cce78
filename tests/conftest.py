"""Fixtures that every test may use: one server a run, a namespace a test, and a check of what a test leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from servers import Server, running_server

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
