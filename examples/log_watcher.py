"""A watcher of logs that mails a summary at eight each morning, and what is critical at once.

    tail -n 0 -F app.log | python examples/log_watcher.py ops@example.org

Lines begin with a level: ``ERROR disk of db-1 is 95% full``. Without ``SMTP_HOST`` the mails are printed.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator

from aiodigest import At, DigestEngine, Policy
from aiodigest.channels import SMTP, Console
from aiodigest.rendering import Template

TZ = os.environ.get("TZ") or "UTC"
LEVELS = {"WARNING", "ERROR", "CRITICAL"}

text = Template(tz=TZ, group_by="level", fields=["message"], top=50)  # lines that differ in numbers are shown once
logs = DigestEngine(namespace="log-watcher", policy=Policy.at(At.daily("08:00", tz=TZ)))
logs.deliver(
    SMTP(os.environ["SMTP_HOST"], sender="Logs <logs@example.org>", render=text)
    if "SMTP_HOST" in os.environ
    else Console(render=text)
)


async def watch(lines: AsyncIterator[str], address: str) -> None:
    """Add the lines of some weight: when ``add`` returns, a line is stored."""
    async for line in lines:
        level, _, message = line.strip().partition(" ")
        if level in LEVELS:
            await logs.add(address, {"level": level, "message": message}, urgent=level == "CRITICAL")


async def typed() -> AsyncIterator[str]:
    """Yield the lines of the standard input."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line


async def main() -> None:
    async with logs.delivering():
        await watch(typed(), sys.argv[1])


if __name__ == "__main__":
    asyncio.run(main())
