"""Questions to servers, and findings in words; if a question is refused, a note names the command that is missing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from aiodigest.backends.redis.connections.calls import Connections
from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.server import ServerConnections
from aiodigest.backends.redis.scripts import Argument
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Check, Finding

SAME_USERS = "give every node the same users (docs/security.md#users), and keep them: ACL SAVE or CONFIG REWRITE"
TWO_WORDS = {"CONFIG", "CLUSTER", "SLOWLOG"}  # commands whose second word is part of their names

Level: TypeAlias = Literal["ok", "note", "problem"]


class Queries:
    """Questions over some connections, or ``at`` one server, and a note of each that was refused."""

    def __init__(self, connections: Connections, at: ServerConnections | None = None) -> None:
        self.connections = connections
        self._at = at
        self.user = connections.url.user
        self.notes: list[Finding] = []

    async def ask(self, check: Check, subject: str, *command: Argument, key: str = "") -> object | None:
        """Return the reply to a command; None if it is refused, which leaves ``subject`` unknown.

        Raises ConfigurationError if the user may do nothing there.
        """
        words = [str(word) for word in command[: 1 + (command[0] in TWO_WORDS)]]
        try:
            return await self.connections.command(key, *command, at=self._at)
        except BackendUnavailable:
            raise
        except ConfigurationError as error:
            if refused(error) != "command":
                raise
            message = f"{subject}: not looked at, since user {self.user!r} may not run {' '.join(words)}"
            self.notes.append(Finding(check, "note", message, grant(self.user, ["|".join(words)])))
        except AiodigestError as error:
            self.notes.append(Finding(check, "note", f"{subject}: not looked at, since {error}"))
        return None


def grant(user: str, commands: Iterable[str]) -> str:
    """Return the command that grants a user ``commands``."""
    return f"ACL SETUSER {user} {' '.join(f'+{command.lower()}' for command in sorted(commands))}"


def graded(check: Check, level: Level, message: str, trouble: str, remedy: str, value: float | None = None) -> Finding:
    """Make a finding; ``trouble`` (the rest of the message) and the remedy are told unless all is well."""
    return Finding(check, level, *((message, "") if level == "ok" else (message + trouble, remedy)), value)


def in_bytes(number: int) -> str:
    """Show a number of bytes to people."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def in_time(seconds: float) -> str:
    """Show a duration to people."""
    for most, unit, size in ((1, "ms", 0.001), (120, "s", 1), (7_200, "minutes", 60), (172_800, "hours", 3_600)):
        if seconds < most:
            return f"{seconds / size:.2f} ms" if seconds < 0.1 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def several(number: int, noun: str, plural: str = "") -> str:
    """Show a count with its noun."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
