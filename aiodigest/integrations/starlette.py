"""Health of a Starlette app: whether to restart its process, and whether to send it requests."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from aiodigest import ConfigurationError, DigestEngine
from aiodigest.arguments import duration, require

try:
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "starlette":
        raise
    raise ConfigurationError("health routes need Starlette: pip install 'aiodigest[fastapi]', or starlette") from error

__all__ = ["health_routes"]


def health_routes(*engines: DigestEngine[Any], overdue: float | timedelta = 60) -> list[Route]:
    """Make routes for ``Starlette(routes=...)`` that report the health of engines to the platform that runs the app.

    GET ``/livez`` asks whether to restart the process, and answers 200 as long as the event loop turns. It never calls
    a server, so an outage restarts nothing. It is 503 only if a fault has ended an engine's background task.

    GET ``/healthz`` asks all engines at once whether their servers answer, within each engine's ``timeout``, and
    whether no timeline has been due for more than ``overdue`` (seconds or a timedelta, by the server's clock). It is
    503 if one says no, and also if an engine is not entered.

    Both answer JSON that names engines by their namespaces, and never a key or a password:
    ``{"ok": false, "engines": {"mail": {"ok": false, "reason": "...", "overdue": 0.0, "stepped_back": 0.0}}}``,
    ``/livez`` without the last two. Reasons may name hosts: keep the routes from strangers.

    Raises InvalidArgument if there is no engine, if two share a namespace, or if ``overdue`` is not a duration.
    """
    namespaces = [engine.namespace for engine in engines]
    require(len(set(namespaces)) == len(namespaces) > 0, "engines", "one or more, of distinct namespaces", namespaces)
    bound = duration(overdue, "overdue")

    def answer(healths: dict[str, dict[str, Any]]) -> JSONResponse:
        ok = all(health["ok"] for health in healths.values())
        return JSONResponse({"ok": ok, "engines": healths}, 200 if ok else 503, {"Cache-Control": "no-store"})

    async def livez(request: Request) -> JSONResponse:
        faults = {engine.namespace: engine.activity.fault for engine in engines}
        return answer({namespace: {"ok": not fault, "reason": fault} for namespace, fault in faults.items()})

    async def healthz(request: Request) -> JSONResponse:
        healths = await asyncio.gather(*(engine.health(overdue=bound) for engine in engines))
        return answer(dict(zip(namespaces, map(asdict, healths), strict=True)))

    return [Route("/livez", livez), Route("/healthz", healthz)]
