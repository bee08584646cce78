"""Web apps: what an engine adds to one, and what happens to its records when servers of it start, stop and die."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from engines import Inbox, WatchedBackend, engine_on, now, session_of, settle, virtual_time
from fastapi import Depends, FastAPI, WebSocket
from replicas import until
from servers import Server, running_server
from userland import DEADLINE, Program, running

from aiodigest import JSON, BackendUnavailable, DigestEngine, PartialAdd
from aiodigest.errors import AiodigestError, ConfigurationError, InvalidArgument, LimitExceeded
from aiodigest.integrations.fastapi import answer_unavailable, dependency, health_router
from aiodigest.integrations.starlette import health_routes

PROGRAMS = Path(__file__).parent / "programs"
COMMENT = {"author": "ann", "text": "hello"}


def app_of(*engines: DigestEngine[Any], overdue: float = 60) -> FastAPI:
    """An app that tells of its engines' health, and whose requests add to the first."""
    app = FastAPI()
    app.include_router(health_router(*engines, overdue=overdue))
    app.add_exception_handler(BackendUnavailable, answer_unavailable)
    first = Depends(dependency(engines[0]))

    @app.post("/{key}")
    async def add(key: str, engine: DigestEngine[JSON] = first) -> bool:
        return await engine.add(key, 1, record_id="first")

    return app


def client_of(app: FastAPI) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://app")


async def asked(client: httpx2.AsyncClient, path: str = "/healthz") -> tuple[int, dict[str, dict[str, Any]]]:
    """The status of an answer, and what it tells of each engine."""
    answer = await client.get(path)
    assert answer.json()["ok"] is (answer.status_code == 200)
    return answer.status_code, answer.json()["engines"]


async def test_a_healthy_engine_is_alive_and_ready(server: Server, namespace: str) -> None:
    async with DigestEngine(server.url, namespace=namespace) as engine, client_of(app_of(engine)) as client:
        assert await asked(client, "/livez") == (200, {namespace: {"ok": True, "reason": ""}})
        assert await asked(client) == (
            200,
            {namespace: {"ok": True, "reason": "", "overdue": 0.0, "stepped_back": 0.0}},
        )
        answer = await client.head("/healthz")
        assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")


@virtual_time
async def test_livez_never_calls_the_server() -> None:
    backend = WatchedBackend()
    backend.take_down()
    engine = engine_on(backend)
    async with engine.delivering(Inbox()), client_of(app_of(engine)) as client:
        tries = len(backend.calls)
        assert (await client.get("/livez")).status_code == 200
        assert len(backend.calls) == tries


@virtual_time
async def test_a_fault_that_ends_the_background_task_fails_both() -> None:
    engine = engine_on(WatchedBackend())
    answers = list[httpx2.Response]()

    async def fault() -> None:
        raise KeyError("user:42")

    async def play() -> None:
        async with engine.delivering(Inbox()), client_of(app_of(engine)) as client:
            await settle()
            session_of(engine)._group.create_task(fault())
            await settle()
            answers.extend([await client.get("/livez"), await client.get("/healthz")])

    with pytest.raises(ExceptionGroup):  # when the engine is left, whatever else was raised in it
        await play()
    assert [answer.status_code for answer in answers] == [503, 503]
    for answer in answers:
        assert "background task has ended" in answer.json()["engines"]["test"]["reason"]
        assert "user:42" not in answer.text
    assert engine.activity.fault == ""


@virtual_time
async def test_an_engine_that_is_being_left_has_no_fault() -> None:
    alive = list[int]()

    class Closing(WatchedBackend):
        async def aclose(self) -> None:
            alive.append((await client.get("/livez")).status_code)

    engine = engine_on(Closing())
    async with client_of(app_of(engine)) as client, engine.delivering(Inbox()):
        pass
    assert alive == [200]


async def test_an_engine_that_is_not_entered_is_not_ready_and_says_so() -> None:
    async with client_of(app_of(DigestEngine(namespace="mail"))) as client:
        assert (await client.get("/livez")).status_code == 200
        status, engines = await asked(client)
    assert status == 503
    assert "engine 'mail' is not entered" in engines["mail"]["reason"]


class SlowBackend(WatchedBackend):
    """Takes a second to count."""

    async def counts(self) -> dict[str, int]:
        await asyncio.sleep(1)
        return await super().counts()


@virtual_time
async def test_all_engines_are_asked_at_once_and_the_first_that_is_not_ready_decides() -> None:
    engines = [engine_on(SlowBackend()) for _ in range(3)]
    for number, engine in enumerate(engines):
        engine.namespace = f"engine-{number}"
    async with engines[0], engines[1], engines[2], client_of(app_of(*engines)) as client:
        began = now()
        assert (await asked(client))[0] == 200
        assert now() - began == pytest.approx(1)
        await engines[1].__aexit__(None, None, None)
        status, told = await asked(client)
    assert status == 503
    assert [name for name, engine in told.items() if not engine["ok"]] == ["engine-1"]


@virtual_time
async def test_a_slow_server_is_told_within_the_timeout_of_its_engine() -> None:
    engine = engine_on(SlowBackend(), timeout=0.5)
    async with engine, client_of(app_of(engine)) as client:
        began = now()
        status, told = await asked(client)
        assert now() - began == pytest.approx(0.5)
    assert (status, told["test"]["reason"]) == (503, "no answer within 0.5 s")


@virtual_time
async def test_a_timeline_that_nobody_delivers_is_told_once_it_is_overdue_for_too_long() -> None:
    engine = engine_on(WatchedBackend())
    async with engine, client_of(app_of(engine, overdue=90)) as client:
        await engine.add("user:42", 1)
        await asyncio.sleep(90)
        assert (await asked(client))[0] == 200
        await asyncio.sleep(1)
        reason = "a timeline has been due for 91 s, and nobody has claimed it"
        assert await asked(client) == (
            503,
            {"test": {"ok": False, "reason": reason, "overdue": 91.0, "stepped_back": 0.0}},
        )
        assert (await asked(client, "/livez"))[0] == 200


async def test_no_password_is_told(namespace: str) -> None:
    url = "redis://user:hunter2@127.0.0.1:1/0"
    async with DigestEngine(url, namespace=namespace) as engine, client_of(app_of(engine)) as client:
        for answer in (await client.get("/healthz"), await client.post("/user:42")):
            assert answer.status_code == 503
            assert "hunter2" not in answer.text
            assert "user:42" not in answer.text


@pytest.mark.parametrize(
    ("engines", "overdue", "told"),
    [
        (list, 60, "engines must be one or more, of distinct namespaces"),
        (lambda: [DigestEngine(namespace="mail"), DigestEngine(namespace="mail")], 60, "distinct namespaces"),
        (lambda: [DigestEngine(namespace="mail")], -1, "overdue must be at least 0"),
    ],
)
def test_mute_routes_are_refused(engines: Callable[[], list[DigestEngine[Any]]], overdue: float, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        health_routes(*engines(), overdue=overdue)


async def test_the_routes_may_have_a_prefix_and_are_not_in_the_schema() -> None:
    app = FastAPI()
    app.include_router(health_router(DigestEngine(namespace="mail")), prefix="/internal")
    async with client_of(app) as client:
        assert (await client.get("/internal/livez")).status_code == 200
        assert (await client.get("/livez")).status_code == 404
    assert app.openapi()["paths"] == {}


@virtual_time
async def test_an_endpoint_gets_the_engine_and_a_test_may_put_another_in_its_place() -> None:
    engine, other = engine_on(WatchedBackend()), engine_on(WatchedBackend())
    app = app_of(engine)
    async with engine, other, client_of(app) as client:
        assert (await client.post("/ann")).json() is True
        app.dependency_overrides[dependency(engine)] = dependency(other)
        assert (await client.post("/bob")).json() is True
        assert [[timeline.key async for timeline in each.timelines()] for each in (engine, other)] == [["ann"], ["bob"]]


def told_to_come_again(answer: httpx2.Response) -> tuple[str, str | None]:
    """What an answer that tells to come again says of the record."""
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    body = answer.json()
    assert body.pop("detail") == "the service is unavailable at the moment: come again later"
    assert body.keys() == {"stored", "record_id"}
    return body["stored"], body["record_id"]


@pytest.mark.parametrize("stored", ["no", "unknown"])
@virtual_time
async def test_a_request_without_a_server_is_told_to_come_again(stored: str, caplog: pytest.LogCaptureFixture) -> None:
    backend = WatchedBackend()
    engine = engine_on(backend)
    async with engine, client_of(app_of(engine)) as client:
        if stored == "no":
            backend.take_down("add", error=BackendUnavailable("connection to redis.internal refused"))
        else:
            backend.lost["add"] = 1
        answer = await client.post("/ann")
    assert told_to_come_again(answer) == (stored, "first")
    reason = {"no": "connection to redis.internal refused", "unknown": "connection reset"}[stored]
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [
        ("WARNING", f"test: the server is unavailable: {reason}"),
        ("WARNING", f"POST /ann: {reason}"),
    ]


@pytest.mark.parametrize(
    ("results", "stored"),
    [
        ([BackendUnavailable("away"), BackendUnavailable("away")], "no"),
        ([BackendUnavailable("away"), BackendUnavailable("reset", record_id="1", stored="unknown")], "unknown"),
        ([True, BackendUnavailable("away")], "unknown"),  # of all that was asked for, some is
    ],
)
async def test_entries_that_found_no_server_are_answered_as_one_would_be(
    results: list[bool | AiodigestError], stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    app.add_exception_handler(PartialAdd, answer_unavailable)

    @app.post("/")
    async def add() -> None:
        raise PartialAdd(results)

    async with client_of(app) as client:
        answer = await client.post("/")
    assert told_to_come_again(answer) == (stored, None)
    [line] = caplog.records
    assert line.getMessage().startswith("POST /: ")


async def test_a_path_that_a_client_makes_up_is_one_short_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = FastAPI()
    app.add_exception_handler(BackendUnavailable, answer_unavailable)

    @app.get("/{name:path}")
    async def get(name: str) -> None:
        raise BackendUnavailable("away")

    async with client_of(app) as client:
        answer = await client.get("/a%1C2026-01-01%20ERROR%20all%20is%20lost%1B[2J" + "x" * 5_000)
    assert answer.status_code == 503
    [line] = caplog.records
    assert line.getMessage().startswith("GET /a 2026-01-01 ERROR all is lost\\x1b[2Jxxx")
    assert len(line.getMessage()) < 600


REQUEST: Any = None
WEBSOCKET: Any = WebSocket({"type": "websocket"}, REQUEST, REQUEST)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (REQUEST, KeyError("ann")),
        (REQUEST, PartialAdd([BackendUnavailable("away"), LimitExceeded("too large")])),
        (WEBSOCKET, BackendUnavailable("away")),
    ],
)
async def test_the_answer_is_for_nothing_else_and_for_no_websocket(request_: Any, error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        await answer_unavailable(request_, error)
    assert raised.value is error


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("fastapi", "fastapi", "fastapi"),
        ("starlette", "starlette.requests", "fastapi"),
        ("opentelemetry", "opentelemetry.metrics", "otel"),
    ],
)
def test_without_the_extra_it_is_named(module: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == library:
                raise ModuleNotFoundError("No module named 'of_the_library'", name="of_the_library")

    monkeypatch.delitem(sys.modules, f"aiodigest.integrations.{module}", raising=False)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigurationError, match=rf"pip install 'aiodigest\[{extra}\]'"):
            importlib.import_module(f"aiodigest.integrations.{module}")
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="of_the_library"):
        importlib.import_module(f"aiodigest.integrations.{module}")


@pytest.mark.parametrize("module", ["fastapi", "opentelemetry", "starlette"])
def test_all_that_is_public_in_an_integration_is_named_and_nothing_else(module: str) -> None:
    names = importlib.import_module(f"aiodigest.integrations.{module}")
    made = {
        name for name, value in vars(names).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == names.__name__
    }  # fmt: skip
    assert made == set(names.__all__)


def told(data: Path) -> list[dict[str, Any]]:
    """What comments_app.py has told of its deliveries so far; none ends while there is a file ``hold``."""
    path = data / "told"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@asynccontextmanager
async def serving(data: Path, workers: int = 1, url: str = "embedded://") -> AsyncGenerator[tuple[Program, str], None]:
    """comments_app.py under uvicorn: the program, and its URL. Drained at the end, if not before."""
    settings = "env", f"COMMENTS={data}", f"COMMENTS_URL={url}"
    options = "--app-dir", str(PROGRAMS), "--port", "0", "--no-access-log", "--workers", str(workers)
    async with running(*settings, sys.executable, "-m", "uvicorn", *options, "comments_app:app", data=data) as program:
        found = re.search(r"http://\S+", await program.until("Uvicorn running on")) if workers > 1 else None
        try:
            for _ in range(workers):
                await program.until("Application startup complete")
            found = found or re.search(r"http://\S+", await program.until("Uvicorn running on"))
            assert found is not None
            yield program, found[0]
        finally:
            (data / "hold").unlink(missing_ok=True)
            with suppress(ProcessLookupError):
                await program.terminate()


@pytest.mark.processes
async def test_a_delivery_under_way_ends_before_the_servers_do(data: Path) -> None:
    async with serving(data, workers=3) as (program, url), httpx2.AsyncClient(base_url=url) as client:
        (data / "hold").touch()
        answer = await client.post("/users/bob/comments", json=COMMENT)
        assert (answer.status_code, answer.json()) == (202, {"due_now": True})
        await until(lambda: bool(told(data)))
        program._process.terminate()
        for _ in range(3):
            await program.until("Waiting for application shutdown")
        (data / "hold").unlink()
        assert await program.ended() == 0
        assert sum("Application shutdown complete" in line for line in program.lines) == 3
    async with DigestEngine(f"embedded://{data / 'data'}", namespace="comments") as engine:
        stats = await engine.stats()
        assert (stats.delivered, stats.ready, stats.leased) == (1, 0, 0)
    assert [line["texts"] for line in told(data)] == [["hello"]]


@pytest.mark.processes
async def test_an_outage_takes_the_app_out_of_service_and_restarts_nothing(data: Path) -> None:
    with running_server() as server:
        async with serving(data, url=server.url) as (program, url), httpx2.AsyncClient(base_url=url) as client:

            async def reason(status: int) -> str:
                """Why the app is ready or not, once it is."""
                async with asyncio.timeout(DEADLINE):
                    while (found := await asked(client))[0] != status:
                        assert (await asked(client, "/livez"))[0] == 200
                return found[1]["comments"]["reason"]

            assert await reason(200) == ""
            server.stop()
            assert "refused" in await reason(503)
            assert (await client.post("/users/bob/comments", json=COMMENT)).json()["stored"] == "no"
            server.start()
            assert await reason(200) == ""
            assert (await client.post("/users/bob/comments", json=COMMENT)).status_code == 202
            await until(lambda: bool(told(data)))
            assert await program.terminate() == -signal.SIGTERM


@pytest.mark.processes
async def test_a_worker_that_is_killed_loses_nothing_and_repeats_only_what_it_held(data: Path) -> None:
    def is_done(killed: int) -> bool:
        """All is delivered once, and only what was held again."""
        processes = defaultdict[str, list[int]](list)
        for line in told(data):
            processes[line["id"]].append(line["process"])
        return len(processes) == 100 and all(len(each) == 1 + (each[0] == killed) for each in processes.values())

    async with serving(data, workers=3) as (program, url), httpx2.AsyncClient(base_url=url) as client:
        (data / "hold").touch()
        for number in range(100):
            assert (await client.post(f"/users/{number}/comments", json=COMMENT)).status_code == 202
        await until(lambda: bool(told(data)))
        held = told(data)[0]
        os.kill(held["process"], signal.SIGKILL)
        (data / "hold").unlink()
        await until(lambda: is_done(held["process"]))
        assert await program.terminate() == 0
    assert is_done(held["process"])
