"""A service that mails build results, until SIGTERM. Run it in one of these ways:

    python examples/service.py
    cd examples && aiodigest run service:mail

Whatever builds your software adds to the same namespace, in processes of its own:

    async with DigestEngine(namespace="builds", value_type=Build) as builds:
        await builds.add("ann@example.org", Build(repo="shop", number=7, status="failed"))
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from pydantic import BaseModel

from aiodigest import Digest, DigestEngine, PartialFailure, Policy, Reject, RetryAfter

TEXTS = {
    "failed": "{repo} is broken since build {number}",
    "fixed": "{repo} works again with build {number}",
}

ON_CALL = Policy(minimum_delay=60, increment_delay=0, maximum_delay=60)
DEVELOPER = Policy(minimum_delay=900, increment_delay=60, maximum_delay=3600, max_size=50)


class Build(BaseModel):
    repo: str
    number: int
    status: str


def policy(key: str) -> Policy:
    """Who is on call hears of everything within a minute; the others want fewer mails."""
    return ON_CALL if key.startswith("oncall@") else DEVELOPER


@asynccontextmanager
async def mail() -> AsyncGenerator[DigestEngine[Build], None]:
    """The engine, with the mail server that its callback needs: opened first, and closed when all is delivered."""
    async with MailServer() as server:
        engine = DigestEngine(namespace="builds", value_type=Build, policy=policy)

        @engine.deliver
        async def send(digest: Digest[Build]) -> None:
            lines = {
                record.id: TEXTS[record.value.status].format(repo=record.value.repo, number=record.value.number)
                for record in digest.records
                if record.value.status in TEXTS
            }
            try:
                if lines:
                    # The same id means the same records: the server can tell a message that it got already.
                    await server.send(digest.key, list(lines.values()), message_id=digest.id)
            except NoSuchMailbox as error:
                raise Reject(str(error)) from error  # no further attempt would help
            except TooManyMessages as error:
                raise RetryAfter(error.retry_after, pause=True) from error  # nobody's fault: not counted as an attempt
            # Any other exception means: try again later, with more and more time between the attempts.

            unknown = {
                record.id: f"no text for {record.value.status!r} yet"
                for record in digest.records
                if record.id not in lines
            }
            if unknown:
                raise PartialFailure(unknown)  # the rest is delivered; these wait for a version that knows them

        yield engine


class NoSuchMailbox(Exception):
    pass


class TooManyMessages(Exception):
    def __init__(self, retry_after: float) -> None:
        super().__init__(f"421 too many messages, come again in {retry_after:.1f} s")
        self.retry_after = retry_after


class MailServer:
    """Stands in for an SMTP client: it prints instead of sending, and takes at most five messages a second."""

    async def __aenter__(self) -> Self:
        self._second, self._sent = 0.0, 0
        print("connected to the mail server", flush=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print("disconnected from the mail server", flush=True)

    async def send(self, to: str, lines: list[str], message_id: str) -> None:
        if "@" not in to:
            raise NoSuchMailbox(f"550 no mailbox {to!r}")
        now = time.monotonic()
        if now >= self._second + 1:
            self._second, self._sent = now, 0
        if self._sent == 5:
            raise TooManyMessages(self._second + 1 - now)
        self._sent += 1
        print(f"to {to}, message {message_id}: {'; '.join(lines)}", flush=True)


async def main() -> None:
    logging.basicConfig(level=logging.INFO)
    async with mail() as engine:
        await engine.run()


if __name__ == "__main__":
    asyncio.run(main())
