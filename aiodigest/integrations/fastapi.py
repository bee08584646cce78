"""Support for FastAPI apps: an engine as a dependency, health routes, and an answer while the server is away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar

from aiodigest import BackendUnavailable, ConfigurationError, DigestEngine, PartialAdd

try:
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "fastapi":
        raise
    raise ConfigurationError("FastAPI is not installed: pip install 'aiodigest[fastapi]'") from error

from aiodigest.errors import one_line, printable
from aiodigest.integrations.starlette import health_routes

__all__ = ["answer_unavailable", "dependency", "health_router"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def _itself(engine: DigestEngine[T]) -> DigestEngine[T]:  # async: FastAPI would send a plain one to a thread
    return engine


def dependency(engine: DigestEngine[T]) -> Callable[[], Awaitable[DigestEngine[T]]]:
    """Return the dependency whose value is ``engine``.

    ``Mail = Annotated[DigestEngine[Comment], Depends(dependency(mail))]`` is the type of an endpoint's parameter, which
    then gets ``mail``, and type checkers know its values. Each call for one engine returns an equal dependency: a test
    replaces it with ``app.dependency_overrides[dependency(mail)] = dependency(other)``. A dependency does not enter the
    engine: the app's lifespan does that, or the test.
    """
    return MethodType(_itself, engine)  # equal for the same engine, so that an override is found


def health_router(*engines: DigestEngine[Any], overdue: float | timedelta = 60) -> APIRouter:
    """Make a router with GET ``/livez`` and ``/healthz``, the routes of ``health_routes``.

    ``app.include_router(health_router(mail))``, with a ``prefix`` if wanted. Dependencies of the app or of the router,
    such as a login, do not apply to these routes, and the OpenAPI schema leaves them out.

    Raises InvalidArgument if there is no engine, if two share a namespace, or if ``overdue`` (seconds or a
    timedelta, by the server's clock) is not a duration.
    """
    return APIRouter(routes=[*health_routes(*engines, overdue=overdue)])


async def answer_unavailable(request: Request, error: Exception) -> JSONResponse:
    """Answer a ``request`` that found no server: 503, with ``Retry-After`` (5 seconds).

    ``app.add_exception_handler(BackendUnavailable, answer_unavailable)``; an app that calls ``add_many`` also needs
    ``app.add_exception_handler(PartialAdd, answer_unavailable)``. The JSON body has a ``detail`` for people, and
    for an add ``stored`` ("no" or "unknown") and ``record_id``: adding again under that id is harmless; if it was
    delivered meanwhile, it comes again. For a PartialAdd ``stored`` is "no" if that holds for all entries, and
    ``record_id`` is null. Clients do not learn why the server is away, or where it is: that is logged, as a warning.

    Raises ``error`` unchanged if it is neither a BackendUnavailable, nor a PartialAdd all of whose errors are.
    """
    match error:
        case BackendUnavailable():
            stored, record_id = error.stored, error.record_id
        case PartialAdd() if all(isinstance(result, bool | BackendUnavailable) for result in error.results):
            is_no = all(isinstance(result, BackendUnavailable) and result.stored == "no" for result in error.results)
            stored, record_id = "no" if is_no else "unknown", None
        case _:
            raise error
    if request.scope["type"] != "http":  # a websocket, which has been accepted perhaps: there is no answer to give
        raise error
    path = one_line(request.url.path)  # a client may write anything there
    logger.warning("%s %s: %s", request.method, path, printable(str(error)), extra={"reason": str(error)})
    detail = "the service is unavailable at the moment: come again later"
    body = {"detail": detail, "stored": stored, "record_id": record_id}
    return JSONResponse(body, 503, {"Retry-After": "5"})  # seconds: a failover takes about as long
