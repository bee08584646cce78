"""Scripts called for many items at once, and their answers, one for each item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from aiodigest.backends.redis.connections.errors import DEMOTED, code_of, explain
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import Argument, text
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, InvalidState

BATCH = 256  # items a call, so that no script is long
ARGUMENTS = 20_000  # arguments a call, unless one item alone has more


class Items(Namespace):
    """The part of a backend that calls scripts for many items."""

    async def _each(
        self, name: str, shard: int, head: Sequence[Argument], items: Sequence[Sequence[Argument]], numbered: bool
    ) -> list[object | AiodigestError]:
        """Call a script for all items, in as many calls as needed; return their answers, or their timelines' errors."""
        answers: list[object] = []
        now = self._time()
        while len(answers) < len(items):
            arguments = [*head, len(answers) + 1] if numbered else [*head]
            for item in items[len(answers) : len(answers) + BATCH]:
                if len(arguments) > ARGUMENTS:
                    break
                arguments += item
            answered = cast("list[object]", await self._call(name, shard, *arguments, now=now))
            await self._count(shard, answered, len(items) - len(answers))
            answers += answered
        return [
            self._broken(str(item[0]), text(answer)) if isinstance(answer, bytes) else answer
            for item, answer in zip(items, answers, strict=True)
        ]

    async def _count(self, shard: int, answers: Sequence[object], items: int) -> None:
        """Leave a connection whose answers are none at all, or more than there were items."""
        if not 0 < len(answers) <= items and self._link is not None:
            await self._link.hang_up(self._key(shard, "layout"))
            raise BackendUnavailable(
                f"{self.url} is unavailable: it gave {len(answers)} answers for {items} items", stored="unknown"
            )

    async def _heed(self, shard: int, answers: Sequence[object]) -> None:
        """Leave a server whose answers to single items say that it is no longer a primary."""
        problems = {code_of(text(answer)) for answer in answers if isinstance(answer, bytes)}
        if problems & DEMOTED and self._link is not None:
            await self._link.hang_up(self._key(shard, "layout"))

    def _broken(self, key: str, problem: str) -> AiodigestError:
        """Turn the error text of a timeline into an error."""
        error = explain(problem, self.url)
        if isinstance(error, (BackendUnavailable, ConfigurationError)):
            return error
        return InvalidState(f"timeline {key!r} is broken: {problem}")
