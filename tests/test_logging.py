"""What is logged can be read by programs, too."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
from engines import Inbox, WatchedBackend, delivering, engine_on, policy, settle, virtual_time
from userland import ROOT

from aiodigest import JSON, BackendUnavailable, Digest, DigestEngine, Entry, Policy, RetryPolicy
from aiodigest.backend import Lease
from aiodigest.logs import NAMESPACE
from aiodigest.testing import TestEngine
from aiodigest.worker.reasons import facts_of

PACKAGE = ROOT / "aiodigest"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
PAGE = ROOT / "docs" / "howto" / "read-the-log.md"
GIVEN = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # names that no field may have


def logs(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls in it that log something."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)) if level in LEVELS:
                yield node
            case _:
                pass


def texts(nodes: Iterable[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


LOGGED = [(path, line) for path in sorted(PACKAGE.rglob("*.py")) for line in logs(ast.parse(path.read_text()))]


def test_every_line_of_the_log_carries_fields_and_one_logger_a_module_writes_it() -> None:
    assert len(LOGGED) > 15
    for path, line in LOGGED:
        assert any(keyword.arg == "extra" for keyword in line.keywords), f"{path.name}:{line.lineno}"
        of_requests = path.name == "fastapi.py"  # which several engines may serve
        named = "logging.getLogger(__name__)" if of_requests else "logger_of(__name__)"
        assert f"logger = {named}" in path.read_text(), path


@virtual_time
async def test_a_failed_delivery_is_logged_with_the_fields_of_the_page(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(digest: Digest[JSON]) -> None:
        raise ValueError("no such mailbox")

    backend = WatchedBackend()
    await backend.put("ann", 1)
    inbox = Inbox(fail, fail)
    async with delivering(inbox, backend, retry=RetryPolicy(max_attempts=2, backoff=lambda _: 5)):
        await inbox.digest(2)
    lines = [{name: value for name, value in vars(line).items() if name not in GIVEN} for line in caplog.records]
    same = {
        "namespace": "test",
        "timeline": "ann",
        "digest_id": inbox.digests[0].id,
        "reason": "ValueError: no such mailbox",
    }
    assert lines == [{**same, "attempt": 1, "next_in": 5.0}, {**same, "attempt": 2}]


@virtual_time
async def test_every_line_of_the_log_names_the_namespace_of_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(digest: Digest[JSON]) -> None:
        raise ValueError("50% of it")

    cut_off = WatchedBackend(down="add")
    async with AsyncExitStack() as stack:
        for namespace, backend in (("mail", WatchedBackend()), ("push", WatchedBackend()), ("sms", cut_off)):
            engine = DigestEngine[JSON](namespace=namespace, backend=backend)
            await stack.enter_async_context(engine.delivering(fail))
            with suppress(BackendUnavailable):  # which is told by the call that failed, in the context of its caller
                await engine.add("key", 1)
            await settle()
        cut_off.bring_up()
        await engine.add("key", 1)
        await asyncio.sleep(2)
    tested = DigestEngine[JSON](namespace="tested")
    async with TestEngine(tested) as test:
        test.fail_next(ValueError("50% of it"))
        await tested.add("key", 1)
        await test.advance()
    told = {(vars(line).get("namespace"), line.getMessage().partition(": ")[0]) for line in caplog.records}
    assert told == {(name, name) for name in ("mail", "push", "sms", "tested")}
    assert {"sms: the server is unavailable: connection refused"} < set(caplog.messages)
    assert not NAMESPACE.get()


def told_of(caplog: pytest.LogCaptureFixture, words: str) -> list[tuple[str, dict[str, Any]]]:
    """The level and the fields of the lines with these words."""
    lines = [line for line in caplog.records if words in line.getMessage()]
    return [(line.levelname, {name: fact for name, fact in vars(line).items() if name not in GIVEN}) for line in lines]


@virtual_time
async def test_records_that_capacity_dropped_are_one_line_for_each_digest(caplog: pytest.LogCaptureFixture) -> None:
    backend, inbox, small = WatchedBackend(), Inbox(ValueError("no")), policy(capacity=2)
    await backend.put("ann", 1, 2, 3, 4, policy=small)
    await backend.put("bob", 1, 2, policy=small)
    async with delivering(inbox, backend, policy=small, retry=RetryPolicy(backoff=lambda _: 5)) as (engine, _):
        await inbox.outcome(2)
        assert not told_of(caplog, "over its capacity")  # more may follow before this digest has ended
        await engine.add("ann", 5)
        await inbox.outcome(3)
        await engine.add("ann", 6)
        await inbox.outcome(4)
        await settle()
    [(level, facts)] = told_of(caplog, "over its capacity: 3 records are lost")
    assert (level, facts["timeline"], facts["records"]) == ("WARNING", "ann", 3)
    assert len(told_of(caplog, "over its capacity")) == 1


@virtual_time
@pytest.mark.parametrize("fixed", [True, False])
async def test_a_worker_whose_policy_has_other_limits_than_the_adder_s_says_so_once(
    fixed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def theirs(key: str) -> Policy:
        return policy(capacity=50, ttl=60 * 86_400)

    def ours(key: str) -> Policy:
        return policy(capacity=70)

    backend, inbox = WatchedBackend(), Inbox()
    async with engine_on(backend, policy=theirs) as engine:
        await engine.add_many([Entry("ann", 1), Entry("bob", 2)])
    async with delivering(inbox, backend, policy=ours("") if fixed else ours) as (engine, _):
        await engine.add("eve", 3)  # which has none of its own, or this worker's
        await inbox.outcome(3)
    [(level, facts)] = told_of(caplog, "the limits there count")
    assert (level, facts["timeline"]) == ("WARNING", "ann")
    assert "(capacity 50, max_size 0, max_age_ms 0, ttl_ms 5184000000)" in caplog.text
    assert "(capacity 70, " in caplog.text


@virtual_time
async def test_what_needs_an_unknown_feature_is_said_once_and_left_to_workers_that_know_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend, newer, old, new = WatchedBackend(), WatchedBackend(), Inbox(), Inbox()
    newer.machines, newer._features = backend.machines, {"the-future"}
    for key in ("ann", "bob", "eve"):
        await backend.put(key, 1)
    for key in ("ann", "bob"):
        backend.machines[0].held[key].needs = "the-future"
    async with delivering(old, backend):
        await asyncio.sleep(60)
        assert [digest.key for digest in old.digests] == ["eve"]
        [(level, facts)] = told_of(caplog, "which this version of aiodigest does not know")
        assert (level, facts["timeline"], facts["feature"]) == ("WARNING", "ann", "the-future")
        async with delivering(new, newer):
            await new.digest(2)
            await asyncio.sleep(60)
    assert sorted((digest.key, digest.attempt) for digest in new.digests) == [("ann", 1), ("bob", 1)]
    assert len(old.digests) == 1


@virtual_time
async def test_a_worker_whose_policy_has_the_limits_of_the_adder_s_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def same(key: str) -> Policy:
        return policy()

    backend, inbox = WatchedBackend(), Inbox()
    async with engine_on(backend, policy=same) as engine:
        await engine.add("ann", 1)
    async with delivering(inbox, backend, policy=policy()):
        await inbox.outcome()
    assert not caplog.records


def fields_of(function: ast.AST) -> Iterator[str]:
    """The fields that lines of a function carry, as far as they stand there."""
    given = [keyword.value for line in logs(function) for keyword in line.keywords if keyword.arg == "extra"]
    names = {one.id for one in given if isinstance(one, ast.Name)}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict() as facts) if name in names:
                given.append(facts)
            case _:
                pass
    for one in given:
        if isinstance(one, ast.Dict):
            yield from texts(one.keys)


def test_every_field_is_explained_on_the_page() -> None:
    functions = [
        node
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    named = {field for function in functions for field in fields_of(function)}
    named |= {*facts_of(Lease("k", "t", "d", 1, 1, 0, 0, 1), "why")}
    assert {"timeline", "digest_id", "shards", "seconds"} <= named
    assert named <= set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert not named & GIVEN
