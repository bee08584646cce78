"""Questions to servers. If a user may not ask one, nothing is guessed: a note names the missing command."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiodigest.backends.redis.connections.errors import refused
from aiodigest.backends.redis.connections.shared import AnyLink
from aiodigest.backends.redis.scripts import Argument
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError
from aiodigest.models import Check, Finding

SAME_USERS = "give every node the same users (docs/security.md#users), and keep them: ACL SAVE or CONFIG REWRITE"
TWO_WORDS = {"CONFIG", "CLUSTER", "SLOWLOG"}  # commands whose second word is part of their names


@dataclass
class Interview:
    """Asks as a user, and notes every refusal."""

    link: AnyLink
    user: str
    notes: list[Finding] = field(default_factory=list[Finding])

    async def ask(self, check: Check, subject: str, *command: Argument, key: str = "") -> object | None:
        """Return the reply to a command; None if it is refused, which leaves ``subject`` unknown.

        Raises ConfigurationError if the user may do nothing there.
        """
        words = [str(word) for word in command[: 1 + (command[0] in TWO_WORDS)]]
        try:
            return await self.link.command(key, *command)
        except BackendUnavailable:
            raise
        except ConfigurationError as error:
            if refused(error) != "command":
                raise
            message = f"{subject}: not looked at, since user {self.user!r} may not run {' '.join(words)}"
            self.note(check, message, self.allow("|".join(words)))
        except AiodigestError as error:
            self.note(check, f"{subject}: not looked at, since {error}")
        return None

    def note(self, check: Check, message: str, remedy: str = "") -> None:
        self.notes.append(Finding(check, "note", message, remedy))

    def allow(self, *commands: str) -> str:
        """Return the command that grants the user ``commands``."""
        return f"ACL SETUSER {self.user} {' '.join(f'+{command.lower()}' for command in sorted(commands))}"
