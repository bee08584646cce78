"""Health and metrics of the process over HTTP: ``aiodigest run --http``."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aiodigest import ConfigurationError, DigestEngine

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.requests import Request
    from starlette.responses import Response

Sockets: TypeAlias = Sequence[socket.socket]

SHUTDOWN_TIMEOUT = 2  # seconds for the requests in progress when all else has ended


class Address(NamedTuple):
    """An address to listen at; without a host, all addresses of the machine. Port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse an address. Raises ValueError if the text is not one."""
    match = re.fullmatch(r"(?:\[([0-9a-zA-Z:.%]+)\]|([^\s:\[\]/]*)):([0-9]{1,5})", text)
    if match is None or int(match[3]) > 65_535:
        raise ValueError(f"{text!r} is not HOST:PORT: write 127.0.0.1:9000, [::1]:9000, or :9000 for all addresses")
    return Address(match[1] or match[2], int(match[3]))


@contextmanager
def listening(where: Address) -> Generator[Sockets, None, None]:
    """Open sockets that listen at an address. Raises ConfigurationError if one cannot, or a package is missing."""
    try:
        for module in ("opentelemetry.exporter.prometheus", "starlette", "uvicorn"):
            import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("opentelemetry", "prometheus_client", "starlette", "uvicorn"):
            raise
        raise ConfigurationError(f"--http needs more: pip install 'aiodigest[http]' ({error})") from error
    with ExitStack() as opened:
        try:
            sockets = [opened.enter_context(one) for one in _listen(where)]
        except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
            reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
            raise ConfigurationError(f"--http cannot listen on {where}: {reason}") from error
        yield sockets


def _listen(where: Address) -> Iterator[socket.socket]:
    if not where.host and socket.has_dualstack_ipv6():
        yield socket.create_server(("", where.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return
    flags, port, missing = socket.AI_PASSIVE, where.port, OSError("it has no address")
    found = False
    for family, _, _, _, place in socket.getaddrinfo(where.host or None, port, type=socket.SOCK_STREAM, flags=flags):
        try:
            one = socket.create_server((place[0], port, *place[2:]), family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            missing = error  # of localhost, where there is no IPv6
        else:
            found, port = True, one.getsockname()[1]
            yield one
    if not found:
        raise missing


def url_of(sockets: Sockets) -> str:
    """Return the URL of the first socket's address."""
    host, port, *_ = sockets[0].getsockname()
    return f"http://{Address(host, port)}"


@asynccontextmanager
async def serving(sockets: Sockets, engines: Sequence[DigestEngine[Any]]) -> AsyncGenerator[None, None]:
    """Serve ``/livez``, ``/healthz`` and ``/metrics`` of engines that have not been entered yet."""
    import uvicorn
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry
    from starlette.applications import Starlette
    from starlette.routing import Route

    from aiodigest.cli.run.guard import BACKLOG, GuardedProtocol
    from aiodigest.integrations.opentelemetry import measure
    from aiodigest.integrations.starlette import health_routes

    class Server(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return nullcontext()  # they are for the engines, and it ends after them

    ours = CollectorRegistry()
    provider = MeterProvider([PrometheusMetricReader(registry=ours)], shutdown_on_exit=False)
    routes = [*health_routes(*engines), Route("/metrics", _Metrics(ours).answer)]
    for engine in engines:
        measure(engine, meter_provider=provider)
    server = Server(
        uvicorn.Config(
            Starlette(routes=routes), http=GuardedProtocol, lifespan="off", ws="none", access_log=False,
            log_config=None, log_level="warning", server_header=False, backlog=BACKLOG,
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
        )
    )  # fmt: skip
    task = asyncio.create_task(server.serve(list(sockets)))
    try:
        yield
    finally:
        server.should_exit = True
        await task
        provider.shutdown()


class _Metrics:
    """The metrics for Prometheus: those of the engines, and those that the app has registered with its client."""

    def __init__(self, ours: Any) -> None:
        self._ours = ours
        self._collecting: asyncio.Task[list[Metric]] | None = None

    def _collect(self) -> list[Metric]:
        """Collect each metric once, even if the app exports those of its engines too."""
        from prometheus_client import REGISTRY

        found = {metric.name: metric for registry in (REGISTRY, self._ours) for metric in registry.collect()}
        return list(found.values())

    async def answer(self, request: Request) -> Response:
        from prometheus_client.exposition import choose_encoder
        from starlette.responses import Response

        encode, kind = choose_encoder(request.headers.get("accept", ""))
        if self._collecting is None or self._collecting.done():  # concurrent requests share the answer
            # in a thread, since it waits for the event loop, which this one is
            self._collecting = asyncio.create_task(asyncio.to_thread(self._collect))
        collected = await asyncio.shield(self._collecting)
        registry: Any = SimpleNamespace(collect=lambda: iter(collected))  # as an encoder wants them
        return Response(encode(registry), headers={"content-type": kind})
