"""What the producers and the workers of a run have in common: who they are, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from aiodigest import BackoffMode, DigestEngine, RetryPolicy
from aiodigest.backoff import DecorrelatedJitter
from chaos.board import Board
from chaos.journal import Journal
from chaos.plan import LEASE, TIMEOUT
from chaos.rules import policy_of

NAMESPACE = "chaos"
CLUSTER = "cluster"  # the store that is one
SHARDS = 16  # of a cluster
TIMELINES = 200
SPAN = 10**10  # record ids are numbers: those of producer 7 are 70000000000 and so on


@dataclass(frozen=True)
class Role:
    """A process of the run, as its command line says: store, URL, folder of the run, its own number, and a port."""

    store: str
    url: str
    folder: Path
    incarnation: int
    mail: int  # the port of the mail server; 0 if there is none

    @classmethod
    def given(cls) -> Role:
        store, url, folder, incarnation, mail = sys.argv[1:]
        return cls(store, url, Path(folder), int(incarnation), int(mail))

    @property
    def arguments(self) -> list[str]:
        return [self.store, self.url, str(self.folder), str(self.incarnation), str(self.mail)]

    def board(self) -> Board:
        return Board(self.folder / f"{self.store}.board")

    def journal(self) -> Journal:
        return Journal(self.folder / f"{self.incarnation}.journal")


def shard_of(store: str, key: str) -> int | None:
    """The shard of a timeline on a cluster, whose faults are those of some shards; None on a single server."""
    return crc32(key.encode()) % SHARDS if store == CLUSTER else None


def retry_of(key: str) -> RetryPolicy:
    """How often, and when, a timeline is tried again: half of them sooner."""
    return RetryPolicy(max_attempts=200, backoff=DecorrelatedJitter(base=0.1, cap=0.5 + len(key) % 2))


def engine(store: str, url: str, *, mails: bool = False) -> DigestEngine:
    """The engine of all of them, producers and workers. Mails wait for each other, as they share a connection."""
    on_cluster = store == CLUSTER
    return DigestEngine(
        url,
        namespace=NAMESPACE,
        policy=policy_of,
        retry=retry_of,
        backoff_mode=BackoffMode(maximum=0.5),
        concurrency=6 if mails else 16,
        lease_timeout=LEASE,
        delivery_timeout=LEASE if mails else 0.75 * LEASE,
        drain_timeout=1,
        timeout=TIMEOUT,
        shards=SHARDS if on_cluster else None,
        wait_replicas=1 if on_cluster else 0,
    )


# of aiodigest, or of a mail server's set-up, which is in order
FAULTS = "fault of aiodigest", "cannot be read", "outlived its ttl", "rejects these settings"


class Faults(logging.Handler):
    """Puts what aiodigest calls its own fault into the journal: the run has failed then, whatever else it shows.

    And which digests are tried again after an outcome that nobody knows: their contents are kept.
    """

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if any(fault in message for fault in FAULTS):
            self._journal.write("wrong", message)
        elif "before it reported (" in message:
            self._journal.write("doubted", vars(record)["digest_id"])


def run(main: Coroutine[object, object, None], journal: Journal) -> None:
    """Run a process until it has ended by itself, or the program that started it is gone."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiodigest").addHandler(Faults(journal))

    async def with_master() -> None:
        # the master holds the other end, which the kernel closes however it ends
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 1)
        await main

    asyncio.run(with_master())
