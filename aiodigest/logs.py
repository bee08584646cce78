"""What lines of the log say in fields, for those who read no texts; docs/howto/read-the-log.md explains them."""

from __future__ import annotations

from typing import Protocol


class Attempted(Protocol):
    """A lease, or what observers are told of its delivery."""

    @property
    def key(self) -> str: ...
    @property
    def digest_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


def facts_of(what: Attempted, reason: object = "") -> dict[str, object]:
    """Of which attempt a line speaks, and why."""
    facts: dict[str, object] = {"timeline": what.key, "digest_id": what.digest_id, "attempt": what.attempt}
    return {**facts, "reason": str(reason)} if reason else facts
