"""A mail server: takes mails, and writes each down at the moment at which it accepts it.

It answers every third mail with a 4xx, at one stage of the dialogue or another, and 5.1.1 to one address of ten. What
else it is to do wrong comes as a line of its standard input, at whose end it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Literal, cast

from aiosmtpd.smtp import SMTP

from chaos.journal import Journal
from chaos.mail import contents, is_unknown
from chaos.plan import TRY

MAILS = "mail-{}.journal"  # the name of its journal, with its process
DIED = 70  # its exit status when it dies as it was told

Manner = Literal["well", "slow", "dies in the middle", "dies after the end"]


class MailServer:
    """State that all its connections share: how it behaves, and what it has accepted."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._numbers = count(1)
        self._random = Random(os.getpid())
        self.manner: Manner = "well"

    async def answer(self, stage: str, session: Any, recipient: str = "") -> str:
        """Return what is said at a stage of the dialogue that would otherwise go well; '' for that."""
        if self.manner == "slow":
            await asyncio.sleep(self._random.uniform(0, TRY))
        if stage == "MAIL":
            session.number = next(self._numbers)
        third, is_other = divmod(session.number, 3)
        if stage == "RCPT" and is_unknown(recipient):
            reply = "550 5.1.1 nobody is here"
        elif not is_other and stage == ("MAIL", "RCPT", "end")[third % 3]:
            reply = "451 4.3.0 later"
        else:
            return ""
        self._journal.write("answered", int(reply[:3]))
        return reply

    async def handle_MAIL(self, server: SMTP, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        if reply := await self.answer("MAIL", session):
            return reply
        envelope.mail_from = address
        envelope.mail_options.extend(options)
        return "250 2.1.0 go on"

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Any, address: str, options: list[str]) -> str:
        if reply := await self.answer("RCPT", session, address):
            return reply
        envelope.rcpt_tos.append(address)
        return "250 2.1.5 go on"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Any) -> str:
        if reply := await self.answer("end", session):
            return reply
        [recipient] = envelope.rcpt_tos
        self._journal.write("accepted", recipient, *contents(envelope.original_content))
        if self.manner == "dies after the end":
            os._exit(DIED)
        if self.manner == "slow":
            await asyncio.sleep(self._random.uniform(0, TRY))
        return "250 2.0.0 taken"

    def hear(self) -> None:
        """Do as the program says that runs all the others, and be gone when it is."""
        lines = os.read(sys.stdin.fileno(), 1_000).decode().split("\n")
        if lines == [""]:
            os._exit(1)
        self.manner = cast("Manner", lines[-2])


class Dialogue(SMTP):
    """One connection of a client."""

    def __init__(self, server: MailServer) -> None:
        super().__init__(server, hostname="mx.chaos.example", loop=asyncio.get_running_loop())
        self._mails = server

    async def push(self, status: Any) -> None:
        await super().push(status)
        if self._mails.manner == "dies in the middle" and str(status).startswith("354"):
            await self._reader.read(1)  # of what comes
            os._exit(DIED)


async def serve(port: int, folder: Path) -> None:
    server = MailServer(Journal(folder / MAILS.format(os.getpid())))
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), server.hear)
    async with await loop.create_server(lambda: Dialogue(server), "127.0.0.1", port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
