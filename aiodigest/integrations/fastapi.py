"""For apps on FastAPI: an engine as a dependency, health routes, and an answer for when the server is away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic

from typing_extensions import TypeVar

from aiodigest import JSON, BackendUnavailable, ConfigurationError, DigestEngine, PartialAdd

try:
    from fastapi import APIRouter, Request
    from fastapi.responses import JSONResponse
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "fastapi":
        raise
    raise ConfigurationError("FastAPI is not installed: pip install 'aiodigest[fastapi]'") from error

from aiodigest.integrations.starlette import health_routes

__all__ = ["answer_unavailable", "dependency", "health_router"]

T = TypeVar("T", default=JSON)

logger = logging.getLogger(__name__)

COME_AGAIN = "5"  # seconds: a failover takes about as long


@dataclass(frozen=True)
class _Dependency(Generic[T]):
    """What ``dependency`` returns: equal for the same engine, so that an override is found."""

    engine: DigestEngine[T]

    async def __call__(self) -> DigestEngine[T]:  # async: FastAPI would send a plain one to a thread
        return self.engine


def dependency(engine: DigestEngine[T]) -> Callable[[], Awaitable[DigestEngine[T]]]:
    """The dependency whose value is ``engine``.

    ``Mail = Annotated[DigestEngine[Comment], Depends(dependency(mail))]`` is the type of an endpoint's parameter, which
    then gets ``mail``, and checkers know its values. What is returned for one engine is equal each time: a test puts
    another in its place by ``app.dependency_overrides[dependency(mail)] = dependency(other)``. It does not enter the
    engine: that is for the app's lifespan to do, or for the test.
    """
    return _Dependency(engine)


def health_router(*engines: DigestEngine[Any], overdue: float | timedelta = 60) -> APIRouter:
    """A router with GET ``/livez`` and ``/healthz``, which are those of ``health_routes``.

    ``app.include_router(health_router(mail))``, with a ``prefix`` if wanted. Dependencies of the app or of the router,
    such as a login, do not apply to them, and the OpenAPI schema leaves them out.

    Raises InvalidArgument if there is no engine, if two are of one namespace, or if ``overdue`` (seconds or a
    timedelta, by the server's clock) is no duration.
    """
    return APIRouter(routes=[*health_routes(*engines, overdue=overdue)])


async def answer_unavailable(request: Request, error: Exception) -> JSONResponse:
    """The answer to a ``request`` that found no server: 503, with ``Retry-After`` (5 seconds).

    ``app.add_exception_handler(BackendUnavailable, answer_unavailable)``, and of an app that calls ``add_many``
    ``app.add_exception_handler(PartialAdd, answer_unavailable)`` too. The JSON body has a ``detail`` for people, and
    of an add ``stored`` ("no" or "unknown") and ``record_id``: to add again under that id is harmless while the record
    waits. Of a PartialAdd ``stored`` is "no" if that is so of all entries, and ``record_id`` is null. Why the server is
    away, and where it is, is not for clients to know: that is logged, as a warning.

    Raises ``error`` as it is if it is no BackendUnavailable, and no PartialAdd all of whose errors are.
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
    logger.warning("%s %s: %s", request.method, request.url.path, error, extra={"reason": str(error)})
    body = {
        "detail": "the service is unavailable at the moment: come again later",
        "stored": stored,
        "record_id": record_id,
    }
    return JSONResponse(body, 503, {"Retry-After": COME_AGAIN})
