"""The engines that deliver in this process, and the callbacks that they hold.

Two engines of one namespace would take each other's digests.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

from aiodigest.errors import ConfigurationError
from aiodigest.session.background import BackgroundSession, shield

_callbacks: dict[BackgroundSession, tuple[object, object]] = {}  # and the place where each delivers


def begin_delivery(session: BackgroundSession, callback: object) -> None:
    """Note that a session delivers. Raises ConfigurationError if another one does so there to another callback."""
    if (place := getattr(session.store, "place", None)) is None:  # a store in memory, of which each is another
        return
    for other, (its_place, its_callback) in list(_callbacks.items()):
        if other.is_over:  # left behind by a fork, or with its loop
            _callbacks.pop(other, None)
        elif its_place == place and its_callback != callback:
            raise ConfigurationError(
                f"another engine on this namespace of {session.store.url} delivers in this process, to another "
                "callback, and each digest would go to either: take one engine, or a namespace for each callback"
            )
    _callbacks[session] = place, callback


def end_delivery(session: BackgroundSession) -> None:
    """Forget a session that ends, if it was noted."""
    _callbacks.pop(session, None)


@asynccontextmanager
async def holding(callback: object, held: list[object]) -> AsyncGenerator[None, None]:
    """Hold a callback that is an async context manager, such as a channel: entered now, and left at the end, also when
    cancelled. It is left alone if it is among those ``held`` already."""
    if not isinstance(callback, AbstractAsyncContextManager) or any(each is callback for each in held):
        yield
        return
    manager = cast("AbstractAsyncContextManager[object]", callback)
    await manager.__aenter__()
    held.append(manager)
    try:
        yield
    finally:
        held.remove(manager)
        with shield():
            await manager.__aexit__(*sys.exc_info())  # which is not asked whether to swallow the error
