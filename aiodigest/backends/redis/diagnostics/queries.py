"""Questions to servers. If a user may not ask one, nothing is guessed: a note names the missing command."""

from __future__ import annotations

from collections.abc import Iterable

from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.shared import Connections
from aiodigest.backends.redis.scripts import Argument
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Check, Finding

SAME_USERS = "give every node the same users (docs/security.md#users), and keep them: ACL SAVE or CONFIG REWRITE"
TWO_WORDS = {"CONFIG", "CLUSTER", "SLOWLOG"}  # commands whose second word is part of their names


class Queries:
    """Questions over some connections, and a note of each that was refused."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.user = connections.url.user
        self.notes: list[Finding] = []

    async def ask(self, check: Check, subject: str, *command: Argument, key: str = "") -> object | None:
        """Return the reply to a command; None if it is refused, which leaves ``subject`` unknown.

        Raises ConfigurationError if the user may do nothing there.
        """
        words = [str(word) for word in command[: 1 + (command[0] in TWO_WORDS)]]
        try:
            return await self.connections.command(key, *command)
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
