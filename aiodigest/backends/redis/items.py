"""Scripts called for many items at once, and their answers, one for each item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from aiodigest.backend import SLICE
from aiodigest.backends.redis.connections.errors import DEMOTED, code_of
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import Argument, text
from aiodigest.errors import AiodigestError, BackendUnavailable, LeaseLost

T = TypeVar("T")

BATCH = 256  # items a call, so that no script is long
ARGUMENTS = 20_000  # arguments a call, unless one item alone has more


async def call_each(
    namespace: Namespace,
    name: str,
    shard: int,
    head: Sequence[Argument],
    items: Sequence[Sequence[Argument]],
    read: Callable[[object], T],
    *,
    numbered: bool = False,
) -> list[T | AiodigestError]:
    """Call a script for all items, in as many calls as needed; return their answers, or their timelines' errors.

    ``read`` unpacks an answer. ``numbered`` if the script is to be told the number of its first item.
    """
    answers: list[object] = []
    now = namespace.time()
    while len(answers) < len(items):
        arguments = [*head, len(answers) + 1] if numbered else [*head]
        for item in items[len(answers) : len(answers) + BATCH]:
            if len(arguments) > ARGUMENTS:
                break
            arguments += item
        answered = cast("list[object]", await namespace.call(name, shard, *arguments, now=now))
        await check_answers(namespace, shard, answered, len(items) - len(answers))
        answers += answered
    return [
        namespace.broken(str(item[0]), text(answer)) if isinstance(answer, bytes) else read(answer)
        for item, answer in zip(items, answers, strict=True)
    ]


async def check_answers(namespace: Namespace, shard: int, answers: Sequence[object], items: int) -> None:
    """Leave a connection whose answers are none at all, or more than there were items.

    Leave a server too whose answers to single items say that it is no longer a primary.
    """
    if not 0 < len(answers) <= items:
        await namespace.leave(shard)
        raise BackendUnavailable(
            f"{namespace.url} is unavailable: it returned {len(answers)} answers for {items} items", stored="unknown"
        )
    problems = {code_of(text(answer)) for answer in answers if isinstance(answer, bytes)}
    if problems & DEMOTED:
        await namespace.leave(shard)


async def read_entries(
    namespace: Namespace, shard: int, key: str, token: str, digest_id: str, start: int, count: int
) -> list[bytes]:
    """Return ``count`` entries of a timeline from ``start`` on; with a token, those of the digest under delivery."""
    entries: list[bytes] = []
    while len(entries) < count:
        size = min(SLICE, count - len(entries))
        page = await namespace.call("read", shard, key, token, digest_id, start + len(entries), size)
        if page == b"lost":
            raise LeaseLost(f"the lease on timeline {key!r} is lost")
        if not page:
            break
        entries += cast("list[bytes]", page)
    return entries
