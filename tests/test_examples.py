"""The examples: run as a process on an embedded server of its own, or in memory where time is what they show."""

from __future__ import annotations

import importlib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mailservers import Mailbox
from ports import free_port
from userland import DEADLINE, ROOT, Program, running

from aiodigest import JSON, DigestEngine, Entry
from aiodigest.testing import TestEngine

pytestmark = pytest.mark.docs

EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The module of the service, or of the example that a test names, in this process."""
    name = getattr(request, "param", "service")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
        patch.setenv("SMTP_PORT", str(free_port()))
        yield importlib.import_module(name)
        patch.delitem(sys.modules, name)


SERVICES = {"program": (sys.executable, EXAMPLES / "service.py"), "command": ("aiodigest", "run", "service:mail")}


@asynccontextmanager
async def service(data: Path, way: str = "program") -> AsyncGenerator[tuple[Program, DigestEngine[JSON]], None]:
    """The service, and an engine of another process to add with."""
    async with running(*SERVICES[way], data=data, folder=EXAMPLES) as program:
        await program.until("connected to the mail server")
        async with DigestEngine(f"embedded://{data / 'data'}", namespace="builds") as builds:
            yield program, builds


@pytest.mark.parametrize("way", SERVICES)
async def test_the_service_delivers_what_other_processes_add_and_drains_on_sigterm(way: str, data: Path) -> None:
    async with service(data, way) as (program, builds):
        assert await builds.add("ann@example.org", {"repo": "shop", "number": 7, "status": "failed"})
        assert "shop is broken since build 7" in await program.until("to ann@example.org")
        assert await builds.add("oncall@example.org", {"repo": "shop", "number": 8, "status": "fixed"})
        assert "shop works again with build 8" in await program.until("to oncall@example.org")
        assert await program.terminate() == 0
    assert "disconnected from the mail server" in program.lines


async def test_the_service_outlasts_the_limit_of_its_mail_server(data: Path) -> None:
    async with service(data) as (program, builds):
        people = {f"user{number}@example.org" for number in range(8)}  # three more than it takes in a second
        await builds.add_many(Entry(person, {"repo": "shop", "number": 1, "status": "failed"}) for person in people)
        told = {(await program.until("to user")).split()[1].rstrip(",") for _ in people}
        assert told == people
        assert await program.terminate() == 0


async def test_the_service_buries_what_is_for_nobody(example: Any) -> None:
    async with example.mail() as builds, TestEngine(builds) as t:
        await builds.add("nobody", example.Build(repo="shop", number=1, status="failed"))
        await t.advance()
        assert [(letter.key, letter.reason) async for letter in builds.dead_letters()] == [
            ("nobody", "550 no mailbox 'nobody'")
        ]


async def test_the_service_keeps_a_build_without_a_text(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with example.mail() as builds, TestEngine(builds) as t:
        for status in ("failed", "flaky"):
            await builds.add("ann@example.org", example.Build(repo="shop", number=1, status=status), record_id=status)
        await t.advance()
        assert "to ann@example.org" in capsys.readouterr().out
        assert [[record.id for record in digest.records] for digest in t.delivered] == [["failed"]]
        timeline = await builds.peek("ann@example.org")
    assert [record.id for record in timeline.records] == ["flaky"]
    assert timeline.last_error == "flaky: no text for 'flaky' yet"


async def test_the_service_tells_who_is_on_call_first(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    async with example.mail() as builds, TestEngine(builds) as t:
        for number in (1, 2, 3):
            for person in ("oncall@example.org", "ann@example.org"):
                await builds.add(person, example.Build(repo="shop", number=number, status="failed"))
            await t.advance()
        told: list[list[tuple[str, int]]] = []
        for minutes in (1, 15, 1):  # the last one for a build more
            before = len(t.delivered)
            await t.advance(minutes=minutes)
            told.append([(digest.key, len(digest.records)) for digest in t.delivered[before:]])
    assert "since build 2; shop is broken since build 3" in capsys.readouterr().out
    assert told == [[("oncall@example.org", 2)], [], [("ann@example.org", 2)]]


@asynccontextmanager
async def web_app(name: str, data: Path) -> AsyncGenerator[tuple[Program, httpx2.AsyncClient], None]:
    """A web app under uvicorn, and a client of it."""
    options = "--app-dir", "examples", "--lifespan", "on", "--port", "0"
    async with running(sys.executable, "-m", "uvicorn", *options, f"{name}:app", data=data) as program:
        url = re.search(r"http://\S+", await program.until("Uvicorn running on"))
        assert url is not None
        async with httpx2.AsyncClient(base_url=url[0], timeout=DEADLINE) as client:
            yield program, client
        # uvicorn shuts the app down, and then ends by the signal that it got
        assert await program.terminate() == -signal.SIGTERM
    assert any("Application shutdown complete" in line for line in program.lines)
    assert not any("ERROR" in line for line in program.lines)


@pytest.mark.parametrize(("name", "refused"), [("fastapi_app", 422), ("litestar_app", 400)])
async def test_a_web_app_delivers_the_first_comment_and_the_second_waits(name: str, refused: int, data: Path) -> None:
    async with web_app(name, data) as (program, client):
        first = await client.post("/users/bob/comments", json={"author": "ann", "text": "hello"})
        assert (first.status_code, first.json()) == (202, {"due_now": True})
        await program.until("mail to bob: 1 new from ann")
        second = await client.post("/users/bob/comments", json={"author": "eve", "text": "hello too"})
        assert (second.status_code, second.json()) == (202, {"due_now": False})
        assert (await client.post("/users/bob/comments", json={"author": "eve"})).status_code == refused
        if name == "fastapi_app":
            waiting = (await client.get("/users/bob/comments")).json()
            assert waiting["due"] is not None
            # the first comment may be there still: it was printed just before its delivery was known
            assert waiting["comments"][-1] == {"author": "eve", "text": "hello too"}
            assert (await client.get("/users/ann/comments")).json() == {"due": None, "comments": []}
            for path in ("/livez", "/healthz"):
                assert (await client.get(path)).json()["ok"] is True


async def test_the_web_app_without_a_framework_delivers_comments(data: Path) -> None:
    async with web_app("asgi_app", data) as (program, client):
        first = await client.post("/bob", content="hello")
        assert (first.status_code, first.text) == (202, "due now\n")
        await program.until("mail to bob: hello")
        second = await client.post("/bob", content="hello too")
        assert (second.status_code, second.text) == (202, "waiting\n")
        assert (await client.get("/bob")).status_code == 404
        assert (await client.post("/", content="hello")).status_code == 404


@pytest.mark.parametrize("example", ["mail_and_slack"], indirect=True)
async def test_a_comment_is_mailed_and_posted_until_its_reader_unsubscribes(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    mailbox = Mailbox(port=int(os.environ["SMTP_PORT"]))
    async with mailbox, TestEngine(example.comments) as t, client_of(example) as client:
        for text in ("hello", "are you there?"):
            await client.post("/posts/7/comments", json={"author": "ann", "text": text})
            await t.advance()
        await t.advance(minutes=20)
        links = [re.sub("[<>]", "", mail.message["List-Unsubscribe"]) for mail in mailbox.mails]
        assert [mail.message["Subject"] for mail in mailbox.mails] == ["1 new comment"] * 2
        assert {mail.recipient for mail in mailbox.mails} == {"bob@example.org"}
        assert (await client.post(links[0].replace("bob", "eve"))).status_code == 403
        assert (await client.post(links[0])).is_success
        await client.post("/posts/7/comments", json={"author": "ann", "text": "goodbye"})
        await t.advance(minutes=20)
        assert len(mailbox.mails) == 2
    assert re.findall(r"^slack.*: Post.*", capsys.readouterr().out, re.MULTILINE) == [
        "slack:blog: Post 7: hello and 1 more",
        "slack:blog: Post 7: goodbye",
    ]


@pytest.mark.parametrize("example", ["alerts"], indirect=True)
async def test_alerts_of_a_team_are_one_message_by_severity_and_what_is_critical_comes_at_once(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fired(name: str, severity: str, status: str = "firing") -> dict[str, Any]:
        labels = {"alertname": name, "team": "db", "severity": severity}
        return {"fingerprint": name, "status": status, "labels": labels, "annotations": {"summary": f"{name} of db-1"}}

    async with TestEngine(example.alerts) as t, client_of(example) as client:
        sent = [fired("disk", "warning"), fired("load", "info"), fired("load", "info", "resolved")]
        await client.post("/alerts", json={"alerts": sent})
        await t.advance()
        assert not t.delivered
        await t.advance(seconds=10)
        assert [digest.key for digest in t.delivered] == ["db"]
        shown = re.findall(r"^  (?:\* )?(Warning|Info|Resolved|.*(?= of))", capsys.readouterr().out, re.MULTILINE)
        assert shown == ["Warning", "disk", "Resolved", "load"]
        await client.post("/alerts", json={"alerts": [fired("outage", "critical")]})
        await t.advance()
        assert len(t.delivered) == 2


@pytest.mark.parametrize("example", ["log_watcher"], indirect=True)
async def test_the_lines_of_a_day_are_one_mail_at_eight_and_a_critical_one_comes_at_once(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def lines(*written: str) -> AsyncIterator[str]:
        for line in written:
            yield line + "\n"

    async with TestEngine(example.logs, start=datetime(2026, 6, 1, 21, tzinfo=UTC)) as t:
        told = [f"ERROR disk of db-{number} is full" for number in range(3)]
        await example.watch(lines("DEBUG nothing", *told, "WARNING it is late"), "ops@example.org")
        await t.advance(hours=10, minutes=59)
        assert not t.delivered
        await t.advance(minutes=1)
        assert [len(digest.records) for digest in t.delivered] == [4]
        shown = capsys.readouterr().out
        assert re.search(r"disk of db-. is full . 3", shown)
        assert "ERROR (3)" in shown
        await example.watch(lines("CRITICAL the shop is down"), "ops@example.org")
        await t.advance()
        assert "the shop is down" in capsys.readouterr().out


def client_of(example: Any) -> httpx2.AsyncClient:
    """A client of an app in this process."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(example.app), base_url="http://test")
