"""The examples whose code is not async: they are run as a user would, and a worker delivers what they add."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import httpx2
import pytest
from ports import free_port
from servers import running_server
from userland import DEADLINE, ROOT, running

from aiodigest import DigestEngine

pytestmark = pytest.mark.docs

EXAMPLES = ROOT / "examples"


async def test_threads_of_forked_django_workers_add_and_a_worker_of_its_own_delivers(data: Path) -> None:
    options = ("--preload", "--workers", "2", "--threads", "4", "--bind", "127.0.0.1:0", "--chdir", str(EXAMPLES))
    command = (sys.executable, "-m", "gunicorn", *options, "--no-control-socket", "django_app")
    async with (
        running(*command, data=data) as site,
        running("aiodigest", "run", "django_app:mail", data=data, folder=EXAMPLES) as worker,
    ):
        url = re.search(r"http://\S+", await site.until("Listening at"))
        assert url is not None
        async with httpx2.AsyncClient(base_url=url[0], timeout=DEADLINE) as client:
            first = await client.post("/users/bob/comments", json={"author": "ann", "text": "hello"})
            assert (first.status_code, first.json()) == (202, {"due_now": True})
            await worker.until("mail to bob: 1 new from ann")
            comment = {"author": "ann", "text": "hello to you all"}
            answers = await asyncio.gather(*(client.post("/users/eve/comments", json=comment) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {202}
            assert (await client.post("/users/bob/comments", json={"author": "ann"})).status_code == 422
            assert (await client.get("/users/bob/comments")).status_code == 405
        await worker.until("mail to eve")
        assert await worker.terminate() == 0
        assert await site.terminate() == 0
    assert not any("Error" in line or "Warning" in line for line in site.lines)


async def test_forked_celery_workers_add_and_a_worker_of_its_own_delivers(data: Path) -> None:
    port = free_port()
    settings = ("env", "PYTHONWARNINGS=default", f"REDIS_URL=redis://127.0.0.1:{port}/0")
    workers = ("--pool", "prefork", "--concurrency", "2", "--max-tasks-per-child", "2")
    telling = ("--loglevel", "INFO", "--without-mingle")
    celery = (*settings, sys.executable, "-m", "celery", "--app", "celery_app")
    pictures = [f"{number}.jpg" for number in range(8)]
    send = f"from celery_app import resize; [resize.delay('ann@example.org', picture) for picture in {pictures}]"
    with running_server("--port", str(port)):
        async with (
            running(*celery, "worker", *workers, *telling, data=data, folder=EXAMPLES) as tasks,
            running(*settings, "aiodigest", "run", "celery_app:mail", data=data, folder=EXAMPLES) as worker,
        ):
            await tasks.until("ready.")
            async with running(*settings, sys.executable, "-c", send, data=data, folder=EXAMPLES) as sender:
                assert await sender.ended() == 0, sender.lines
            assert "mail to ann@example.org: resized" in await worker.until("mail to")
            for _ in pictures:
                await tasks.until("succeeded")
            async with DigestEngine(f"redis://127.0.0.1:{port}/0", namespace="pictures") as mail:
                timeline = await mail.peek("ann@example.org")
            waiting = timeline.size if timeline else 0
            assert await worker.terminate() == 0
            assert await tasks.terminate() == 0
    delivered = next(line for line in worker.lines if "mail to" in line).count(".jpg")
    assert delivered + waiting == len(pictures)


async def test_a_script_adds_for_a_service_and_tells_if_it_cannot(data: Path) -> None:
    script = (sys.executable, EXAMPLES / "script.py", "ann@example.org", "shop")
    async with running(sys.executable, EXAMPLES / "service.py", data=data) as service:
        await service.until("connected to the mail server")
        async with running(*script, "7", "failed", data=data) as first:
            assert await first.ended() == 0
        assert "shop is broken since build 7" in await service.until("to ann@example.org")
        async with running(*script, "8", "fixed", data=data) as second:
            assert await second.ended() == 0
        assert await service.terminate() == 0
    assert [first.lines, second.lines] == [["it is mailed now"], ["it is mailed with others"]]
    async with running("env", "AIODIGEST_SERVER=/bin/false", *script, "9", "failed", data=data) as third:
        assert await third.ended() == 1
    assert third.lines[0].startswith("not added: ")
    assert not any("Traceback" in line for line in third.lines)
