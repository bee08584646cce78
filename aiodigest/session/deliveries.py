"""The engines that deliver in this process, and the callbacks that they hold.

Two engines of one namespace would take each other's digests.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from types import TracebackType
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


class Holding:
    """Holds a callback that is an async context manager, such as a channel: entered now, and left at the end, also when
    cancelled. It is left alone if it is among those ``held`` already.

    No generator: where a loop that ends closes all of them, an outer one would find this one closed.
    """

    def __init__(self, callback: object, held: list[object]) -> None:
        self._entered: AbstractAsyncContextManager[object] | None = None
        if isinstance(callback, AbstractAsyncContextManager) and not any(each is callback for each in held):
            self._entered = cast("AbstractAsyncContextManager[object]", callback)
        self._held = held

    async def __aenter__(self) -> None:
        if self._entered is not None:
            with self._noting("entered"):
                await self._entered.__aenter__()
            self._held.append(self._entered)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is not None:
            self._held.remove(self._entered)
            with shield(), self._noting("left"):
                await self._entered.__aexit__(kind, error, traceback)  # which is not asked whether to swallow the error

    @contextmanager
    def _noting(self, what: str) -> Generator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"{type(self._entered).__name__} could not be {what}")
            raise
