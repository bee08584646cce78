"""``aiodigest run`` for operators: real processes, asked over HTTP how they are, and what they log."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from textwrap import dedent

import httpx2
import pytest
from commandline import DEADLINE, Command, Running, aiodigest, no_process_is_left, running
from engines import WatchedBackend, engine_on
from ports import free_port
from prometheus_client import Metric
from replicas import until
from starlette.requests import Request

from aiodigest import DigestEngine
from aiodigest.cli.run import guard
from aiodigest.cli.run.http import Address, _Metrics, listening, parse_address, serving, url_of

LOCAL = "127.0.0.1:0"
SERVICE = """
    import asyncio
    import gc
    from contextlib import asynccontextmanager
    from pathlib import Path

    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import Counter

    from aiodigest import DigestEngine
    from aiodigest.integrations.opentelemetry import instrument

    mail = DigestEngine(namespace="mail", drain_timeout=600)
    sent = Counter("sent", "What the callback counts by itself")

    @mail.deliver
    async def send(digest):
        print("began", digest.key, gc.get_freeze_count() > 10_000, flush=True)
        while digest.key == "slow" and not Path("go").exists():
            await asyncio.sleep(0.01)
        sent.inc()
        print("ended", digest.key, flush=True)

    failing = DigestEngine(namespace="failing")

    @failing.deliver
    async def fail(digest):
        raise ValueError("no such mailbox")

    @asynccontextmanager
    async def measured():
        engine = DigestEngine(namespace="measured")
        engine.deliver(send)
        instrument(engine, meter_provider=MeterProvider([PrometheusMetricReader()]))
        yield engine
        print("closing", flush=True)
        while Path("hold").exists():
            await asyncio.sleep(0.01)
        print("closed", flush=True)
"""

NO_SERVICES = """
    import asyncio
    from contextlib import asynccontextmanager
    from aiodigest import DigestEngine

    bare = DigestEngine(namespace="bare")

    class Send:
        async def __aenter__(self):
            raise ConnectionRefusedError("no database")

        async def __aexit__(self, *raised):
            pass

        async def __call__(self, digest):
            pass

    entering = DigestEngine(namespace="entering")
    entering.deliver(Send())

    @asynccontextmanager
    async def broken():
        raise OSError("no database")
        yield

    class App:
        async def __call__(self, scope, receive, send):
            pass

    app = App()

    @asynccontextmanager
    async def strange():
        yield 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "services.py").write_text(dedent(SERVICE))
    return tmp_path


@contextmanager
def service(folder: Path, *engines: str) -> Generator[tuple[Running, str], None, None]:
    """A service that delivers, and the URL at which it answers."""
    data = folder / "data"
    with running(data, "run", *engines, "--http", LOCAL, cwd=folder) as process:
        line = process.error_line().decode()
        told = re.fullmatch(r"aiodigest: answering /livez, /healthz and /metrics on (http://127\.0\.0\.1:\d+)\n", line)
        assert told is not None, line
        began = "aiodigest: {}: delivering namespace {} on embedded://\n"
        lines = {process.error_line().decode() for _ in engines}
        assert lines == {began.format(name, name.partition(":")[2]) for name in engines}
        yield process, told[1]


@pytest.mark.processes
def test_the_log_of_a_service_is_json_where_that_is_asked_for(folder: Path) -> None:
    with running(folder / "data", "run", "services:failing", "--json", cwd=folder) as process:
        began = json.loads(process.error_line())
        asyncio.run(add(folder, "ann", "failing"))
        failed = json.loads(process.error_line())
    assert began["message"].startswith("services:failing: delivering namespace failing on ")
    assert (began["level"], began["logger"]) == ("info", "aiodigest.cli.run")
    why = "ValueError: no such mailbox"
    facts = {"level": "warning", "logger": "aiodigest.worker.delivery", "timeline": "ann", "attempt": 1}
    assert failed.items() >= {**facts, "reason": why, "error": why}.items()
    assert datetime.fromisoformat(failed["time"]) >= datetime.fromisoformat(began["time"])


async def add(folder: Path, key: str, namespace: str = "mail") -> None:
    async with DigestEngine(f"embedded://{folder / 'data'}", namespace=namespace) as engine:
        await engine.add(key, 1)


def samples(text: str) -> dict[str, float]:
    """What an exposition says, each sample once."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([^#].*) (.*)$", text, re.MULTILINE):
        name = re.sub(r'otel_scope_\w+="[^"]*",?', "", name).replace(",}", "}")
        assert name not in found
        found[name] = float(value)
    return found


@pytest.mark.processes
def test_a_service_answers_whether_it_lives_and_is_healthy_and_what_it_does(folder: Path) -> None:
    with service(folder, "services:mail") as (process, url):
        asyncio.run(add(folder, "quick"))
        assert process.read_line() == b"began quick True\n"  # what is loaded is not looked at by the garbage collector
        assert process.read_line() == b"ended quick\n"
        for path in ("/livez", "/healthz"):
            answer = httpx2.get(url + path)
            assert answer.status_code == 200
            assert answer.json()["engines"]["mail"]["ok"] is True
        delivered, deadline = 'aiodigest_deliveries_total{namespace="mail"}', time.monotonic() + DEADLINE
        while not (figures := samples((answer := httpx2.get(url + "/metrics")).text))[delivered]:
            assert time.monotonic() < deadline  # it is counted once the server knows of it
            time.sleep(0.01)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert figures[delivered] == 1
        assert figures['aiodigest_delivery_lateness_seconds_count{namespace="mail"}'] == 1
        assert figures['aiodigest_timelines{namespace="mail",state="ready"}'] == 0
        assert figures["sent_total"] == 1
        assert "quick" not in answer.text
        newer = httpx2.get(url + "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
        assert newer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert newer.text.endswith("# EOF\n")
        assert httpx2.get(url + "/").status_code == 404
        assert process.interrupt(signal.SIGTERM) == 0
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(url + "/livez")
    assert process.errors.count(b"\n") == 3  # no log of requests, nor of uvicorn's own beginning and end
    assert no_process_is_left(folder / "data")


@pytest.mark.processes
def test_sigterm_lets_deliveries_end_and_closes_what_was_opened_and_meanwhile_probes_are_answered(folder: Path) -> None:
    (folder / "hold").touch()
    with service(folder, "services:mail", "services:measured") as (process, url):
        for namespace in ("mail", "measured"):
            asyncio.run(add(folder, "slow", namespace))
            assert process.read_line() == b"began slow True\n"
        process.process.send_signal(signal.SIGTERM)
        with httpx2.Client(base_url=url) as client:
            for _ in range(50):
                assert client.get("/livez").status_code == 200
                assert client.get("/healthz").status_code == 200
                figures = samples(client.get("/metrics").text)  # each once, though "measured" has an exporter too
                assert {f'aiodigest_adds_total{{namespace="{name}"}}' for name in ("mail", "measured")} <= {*figures}
                assert 'aiodigest_timelines{namespace="mail",state="ready"}' in figures
        assert process.process.poll() is None
        (folder / "go").touch()
        while process.read_line() != b"closing\n":  # or it hangs, and has a deadline
            pass
        assert httpx2.get(url + "/livez").status_code == 200
        answer = httpx2.get(url + "/healthz")
        assert (answer.status_code, answer.json()["ok"]) == (503, False)
        (folder / "hold").unlink()
        assert process.end() == 0
    assert process.output.count(b"ended slow\n") == 2
    assert process.output.endswith(b"closing\nclosed\n")
    stopped = sorted(process.errors.splitlines()[3:])
    assert stopped == [f"aiodigest: services:{name}: stopped".encode() for name in ("mail", "measured")]


@pytest.mark.processes
def test_a_second_signal_stops_a_service_at_once_although_it_answers(folder: Path) -> None:
    with service(folder, "services:mail") as (process, url):
        asyncio.run(add(folder, "slow"))
        assert process.read_line() == b"began slow True\n"
        process.process.send_signal(signal.SIGINT)
        assert httpx2.get(url + "/livez").status_code == 200
        assert process.interrupt(signal.SIGINT) == 0  # long before the drain has had its time
    assert b"ended" not in process.output


@pytest.mark.processes
def test_a_port_that_is_taken_is_one_line_before_anything_is_delivered(folder: Path) -> None:
    asyncio.run(add(folder, "quick"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = aiodigest(folder / "data", "run", "services:mail", "--http", where, cwd=folder)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == f"aiodigest: --http cannot listen on {where}: Address already in use\n"


@pytest.mark.processes
def test_half_sent_requests_take_neither_probes_nor_the_files_of_deliveries(folder: Path) -> None:
    with service(folder, "services:mail") as (process, url), ExitStack() as opened:
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (160, 160))
        for _ in range(300):
            half = opened.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), DEADLINE))
            half.sendall(b"GET /livez HTTP/1.1\r\nHost: a")
        assert httpx2.get(url + "/livez").status_code == 200
        asyncio.run(add(folder, "quick"))
        assert process.read_line() == b"began quick True\n"
        assert process.interrupt(signal.SIGTERM) == 0
    assert process.errors.count(b"\n") == 3


async def test_a_request_whose_headers_never_end_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TIMEOUT", 0.05)
    with listening(parse_address(LOCAL)) as sockets:
        async with serving(sockets, [engine_on(WatchedBackend())]):
            reader, writer = await asyncio.open_connection(*sockets[0].getsockname())
            writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.write(b"GET /livez HTTP/1.1\r\nHost: a")
            async with asyncio.timeout(DEADLINE):
                with suppress(ConnectionResetError):
                    await reader.read()
            writer.close()


@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [
        ("bare", "has no callback", 2),
        ("broken", "'no_services:broken' cannot be opened: OSError: no database (", 1),
        ("entering", "'no_services:entering': Send could not be entered: ConnectionRefusedError: no database (", 1),
        ("strange", "opens a int", 2),
        ("asyncio", "is a module", 2),
        ("app", "'no_services:app' is a App: it must be a DigestEngine, or a function without parameters", 2),
    ],
)
def test_a_service_that_is_none_is_one_line(
    name: str, told: str, expected: int, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_services.py").write_text(dedent(NO_SERVICES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "no_services", raising=False)
    code, output, error = command("run", f"no_services:{name}")
    assert (code, output) == (expected, "")
    [line] = error.splitlines()
    assert told in line


NO_ADDRESS = "{!r} is not HOST:PORT: write 127.0.0.1:9000, [::1]:9000, or :9000 for all addresses"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        *((text, NO_ADDRESS) for text in ("", "9000", "localhost", "localhost:", "::1:9000", "[::1]", "a b:1")),
        *((text, NO_ADDRESS) for text in ("http://a:1", "a:65536", "a:-1", "a:b")),
        *(
            (f"{host}:9000", "--http cannot listen on {}: ")
            for host in ("nobody.invalid", "192.0.2.1", "a..b", "a" * 64)
        ),
    ],
)
def test_an_address_that_is_none_or_of_another_machine_is_one_line(text: str, told: str, command: Command) -> None:
    code, output, error = command("run", "services:mail", "--http", text)
    assert (code, output) == (2, "")
    [line] = error.splitlines()
    assert told.format(text) in line


async def test_all_who_ask_for_metrics_at_once_are_told_the_same() -> None:
    began, ends = threading.Event(), threading.Event()

    class Registry:
        asked = 0

        def collect(self) -> list[Metric]:
            self.asked += 1
            began.set()
            ends.wait(DEADLINE)
            return [Metric("late", "How late", "gauge")]

    metrics = _Metrics(registry := Registry())
    request = Request({"type": "http", "headers": []})
    asking = [asyncio.create_task(metrics.answer(request)) for _ in range(20)]
    await asyncio.to_thread(began.wait, DEADLINE)
    ends.set()
    assert all(b"late gauge" in answer.body for answer in await asyncio.gather(*asking))
    assert registry.asked == 1
    await metrics.answer(request)
    assert registry.asked == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("[::1]:9000", ("::1", 9000)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        (":9000", ("", 9000)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert str(Address(*expected)) == text


def has(host: str) -> bool:
    """Whether this machine has an address of its own."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", "localhost", "", *(["::1"] if has("::1") else [])]


@pytest.mark.parametrize("host", HOSTS)
def test_a_service_listens_at_the_address_that_it_was_given(host: str) -> None:
    port = free_port()
    reached = [host] if host else ["127.0.0.1", *HOSTS[3:]]
    with listening(Address(host, port)) as sockets:
        for one in reached:
            socket.create_connection((one, port), DEADLINE).close()
        assert url_of(sockets).endswith(f":{port}")


def test_of_the_addresses_of_a_name_those_are_listened_at_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        hosts = "192.0.2.1", "127.0.0.1", "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listening(parse_address("name:0")) as sockets:
        first, second = (one.getsockname() for one in sockets)
        assert (first[0], second[0]) == ("127.0.0.1", "127.0.0.2")
        assert first[1] == second[1]


@pytest.mark.parametrize("missing", ["starlette", "uvicorn", "opentelemetry.exporter.prometheus", "prometheus_client"])
def test_without_its_extra_the_option_says_what_to_install(
    missing: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "prometheus_client":
        monkeypatch.delitem(sys.modules, "opentelemetry.exporter.prometheus", raising=False)  # which needs it
    monkeypatch.setitem(sys.modules, missing, None)
    code, output, errors = command("run", "services:mail", "--http", LOCAL)
    assert (code, output) == (2, "")
    [line] = errors.splitlines()
    assert line.startswith("aiodigest: --http needs more: pip install 'aiodigest[http]' (")


def test_what_a_library_of_the_extra_itself_lacks_is_not_mended_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'of_the_library'", name="of_the_library")

    monkeypatch.setattr("aiodigest.cli.run.http.import_module", broken)
    with pytest.raises(ModuleNotFoundError, match="of_the_library"), listening(Address("127.0.0.1", 0)):
        pass


async def test_a_collection_that_waits_for_the_server_keeps_nobody_waiting() -> None:
    store = WatchedBackend(held="counts")
    engine = engine_on(store)
    with listening(parse_address(LOCAL)) as sockets:
        async with serving(sockets, [engine]), engine, httpx2.AsyncClient(base_url=url_of(sockets)) as client:
            collected = asyncio.create_task(client.get("/metrics"))
            await until(lambda: store.count("counts"))
            assert (await client.get("/livez")).status_code == 200
            assert not collected.done()
            store.gates["counts"].set()
            assert "aiodigest_timelines" in (await collected).text
