"""Scripts called for many items at once, and their answers, one for each item."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar, cast

from aiodigest.backend import SLICE, Add, Retired
from aiodigest.backends.redis.connections.errors import DEMOTED, code_of
from aiodigest.backends.redis.namespace import Namespace
from aiodigest.backends.redis.scripts import Argument, pack_adds, text
from aiodigest.errors import AiodigestError, BackendUnavailable, LeaseLost
from aiodigest.records.entries import identity

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
) -> AsyncIterator[T | AiodigestError]:
    """Call a script for all items, in as many calls as needed; yield their answers, or their timelines' errors.

    ``read`` unpacks an answer. ``numbered`` if the script is to be told the number of its first item.
    """
    answered, now = 0, namespace.time()
    while answered < len(items):
        arguments = [*head, answered + 1] if numbered else [*head]
        for item in items[answered : answered + BATCH]:
            if len(arguments) > ARGUMENTS:
                break
            arguments += item
        answers = cast("list[object]", await namespace.call(name, shard, *arguments, now=now))
        left = items[answered:]
        if not 0 < len(answers) <= len(left):  # they are none at all, or another question's
            await namespace.leave(shard)
            problem = f"it returned {len(answers)} answers for {len(left)} items"
            raise BackendUnavailable(f"{namespace.url} is unavailable: {problem}", stored="unknown")
        if DEMOTED & {code_of(text(answer)) for answer in answers if isinstance(answer, bytes)}:
            await namespace.leave(shard)  # it is no primary any more
        for item, answer in zip(left, answers, strict=False):
            yield namespace.broken(str(item[0]), text(answer)) if isinstance(answer, bytes) else read(answer)
        answered += len(answers)


async def add_all(namespace: Namespace, shard: int, adds: Sequence[Add]) -> list[bool | AiodigestError]:
    """Send adds, to a shard at first; return the answer to each, or raise if all failed at once.

    An add is sent again only if nothing was done with it: its shard was retired, or its call was too long for one
    script. Those of a timeline stay in order.
    """
    answers: dict[int, bool | AiodigestError] = {}
    unsent: list[tuple[int, Sequence[int]]] = [(shard, range(len(adds)))]
    for where, indices in unsent:
        left = iter(indices)
        head, items = pack_adds([adds[index] for index in indices])
        try:
            async for answer in call_each(namespace, "add", where, head, items, done):
                index = next(left)
                answers[index] = _of_record(adds[index], answer)
        except Retired:
            groups: dict[int, list[int]] = {}
            for index in left:
                groups.setdefault(namespace.shard_map.shard_of(adds[index].key), []).append(index)
            unsent += groups.items()
        except AiodigestError as error:
            if type(error) is AiodigestError:  # nobody foresaw it; a proxy may say so of what did arrive
                error = BackendUnavailable(str(error), stored="unknown")
            failed = {index: _of_record(adds[index], error) for index in left}
            if len(failed) == len(adds):  # so it is the error of each
                raise error from error.__cause__
            answers |= failed
    return [answers[index] for index in range(len(adds))]


def _of_record(add: Add, answer: bool | AiodigestError) -> bool | AiodigestError:
    """Return the answer to an add; if the store was unavailable, it says of which record."""
    if not isinstance(answer, BackendUnavailable):
        return answer
    return BackendUnavailable(str(answer), record_id=identity(add.entry).decode(errors="replace"), stored=answer.stored)


def done(answer: object) -> bool:
    """Read a script's 1 or 0."""
    return answer == 1


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
