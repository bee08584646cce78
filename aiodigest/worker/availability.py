"""The store's availability: one log line for each change of it, and the wait between tries."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container
from contextvars import copy_context

from aiodigest.backoff import DecorrelatedJitter
from aiodigest.errors import AiodigestError, ConfigurationError, printable
from aiodigest.logs import logger_of
from aiodigest.worker.tasks import elapse

logger = logger_of(__name__)

# Capped at a second, so that a worker is back within a second of the server's return.
BACKOFF = DecorrelatedJitter(base=0.05, cap=1.0)
RECENT = 60.0  # seconds
CALM_PERIOD = 1.0  # seconds without a failure after which calls that others make at their own pace count as answered


class Availability:
    """Tells whether the store is available.

    It is unavailable from the first call that fails until every kind of call that failed has been answered; each kind
    backs off by itself. ``namespace`` is for the log: a call may have been made in anybody's context.
    """

    def __init__(self, namespace: str = "") -> None:
        self._namespace = namespace
        self._context = copy_context()  # in which it tells, whoever has called
        self._tries: dict[str, int] = {}
        self._latest: dict[str, tuple[float, str]] = {}  # failure: when it was, and why
        self._answered = defaultdict[str, asyncio.Event](asyncio.Event)
        self._began = 0.0
        self._told: set[type[Exception]] = set()
        self._calming: dict[str, asyncio.TimerHandle] = {}

    @property
    def is_lost(self) -> bool:
        return bool(self._tries)

    def why_lost(self, but: Container[str] = ()) -> str:
        """Return why the store is unavailable, '' if it is not, leaving out some kinds of calls and what is long ago:
        others make theirs at their own pace, perhaps none again."""
        since = asyncio.get_running_loop().time() - RECENT
        kinds = [call for call in list(self._tries) if call not in but]  # it may be another thread's
        return next((why for at, why in map(self._latest.__getitem__, kinds) if at >= since), "")

    def failed(self, error: Exception, call: str = "") -> None:
        if call in self._calming:
            self._calming.pop(call).cancel()
        if not self._tries:
            self._began = asyncio.get_running_loop().time()
            self._told.clear()
        if type(error) not in self._told:  # a server that comes back may refuse us for another reason
            self._told.add(type(error))
            fault = None if isinstance(error, AiodigestError) else error  # what nobody foresaw is worth a traceback
            state = "cannot be used" if isinstance(error, ConfigurationError) else "is unavailable"
            told = printable(str(error))
            facts = {"namespace": self._namespace, "reason": str(error)}
            logger.warning("the server %s: %s", state, told, exc_info=fault, extra=facts)
        self._latest[call] = asyncio.get_running_loop().time(), str(error)
        self._tries[call] = self._tries.get(call, 0) + 1
        self._answered[call].clear()

    def answered(self, call: str = "") -> None:
        if self._tries.pop(call, 0):
            self._answered[call].set()
            if not self._tries:
                lasted = asyncio.get_running_loop().time() - self._began
                line = "the server is available again after %.1f s"
                facts = {"namespace": self._namespace, "seconds": round(lasted, 3)}
                logger.warning(line, lasted, extra=facts)

    def eased(self, call: str) -> None:
        """Note that a call of a kind was answered while others of it may fail: one of several shards may be away.

        The kind counts as answered once none has failed for a second, so that the log does not report each call.
        """
        if call in self._tries and call not in self._calming:
            later = asyncio.get_running_loop().call_later
            self._calming[call] = later(CALM_PERIOD, self._after_calm, call, context=self._context)

    def _after_calm(self, call: str) -> None:
        del self._calming[call]
        self.answered(call)

    async def pause(self, call: str) -> None:
        """Wait before the next try: jittered, growing to a second, or until another call of the kind is answered."""
        await elapse(self._answered[call], BACKOFF(self._tries.get(call, 0)))
