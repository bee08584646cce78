"""SIGTERM and SIGINT, for all engines of a process that deliver until one comes."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress

from aiodigest.errors import ConfigurationError

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_calls: dict[Callable[[], None], asyncio.AbstractEventLoop] = {}
_before = {number: signal.getsignal(number) for number in SIGNALS}


@contextmanager
def on_signals(call: Callable[[], None]) -> Generator[None, None, None]:
    """Call a function in the running loop when a signal comes.

    The first to enter installs the handlers, and the last to leave puts the previous ones back. Raises
    ConfigurationError outside the main thread, where Python receives no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "signals are heard in the main thread alone: elsewhere use `delivering()` without them"
        )
    if not _calls:
        _before.update({number: signal.signal(number, _signalled) for number in SIGNALS})
    _calls[call] = asyncio.get_running_loop()
    try:
        yield
    finally:
        del _calls[call]
        if not _calls:
            for number in SIGNALS:
                signal.signal(number, _before[number] or signal.SIG_DFL)


class SignalledEnd:
    """The end of a block at the first signal, which cancels it; a later one calls ``hurry``."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self._timer = asyncio.timeout(None)  # which cancels what it holds once, and knows its own cancellation
        self._is_told = False

    def on_signal(self) -> None:
        """Cancel the block, or hurry if that was done."""
        if self._is_told:
            self._hurry()
        self._is_told = True
        with suppress(RuntimeError):  # the block has not begun, or is left already
            self._timer.reschedule(0)

    @asynccontextmanager
    async def block(self) -> AsyncGenerator[None, None]:
        """Hold the block, which ends at its first await if a signal has come before."""
        of_block: TimeoutError | None = None
        try:
            async with self._timer:
                if self._is_told:
                    self._timer.reschedule(0)
                try:
                    yield
                except TimeoutError as error:  # such as that of its cleanup, which tells of no signal
                    of_block = error
                    raise
        except TimeoutError as error:
            if error is of_block:
                raise


def _signalled(number: int, frame: object) -> None:
    for call, loop in list(_calls.items()):
        loop.call_soon_threadsafe(call)
