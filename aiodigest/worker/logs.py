"""Fields of log lines, for programs that do not parse texts; docs/howto/read-the-log.md explains them."""

from __future__ import annotations

from typing import Protocol


class Attempted(Protocol):
    """A lease, or the report of its delivery to observers."""

    @property
    def key(self) -> str: ...
    @property
    def digest_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


def facts_of(what: Attempted, reason: object = "") -> dict[str, object]:
    """Return the fields that name a line's attempt, and the reason."""
    facts: dict[str, object] = {"timeline": what.key, "digest_id": what.digest_id, "attempt": what.attempt}
    return {**facts, "reason": str(reason)} if reason else facts
