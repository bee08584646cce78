"""A worker: delivers, and writes down what its callbacks got and how they ended, and what the store then knew."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import nullcontext
from random import Random
from typing import cast

from aiodigest import Delivery, Digest, DigestEngine, OutcomeUnknown, PartialFailure, Reject, RetryAfter
from chaos.board import DELIVERED, Board
from chaos.channel import channel, sending
from chaos.journal import Journal, beat
from chaos.plan import BLOCK, LEASE
from chaos.process import Role, engine, run

HOUR = 3600


class Worker:
    def __init__(self, role: Role, journal: Journal) -> None:
        self._incarnation = role.incarnation
        self._board: Board = role.board()
        self._journal = journal
        self._engine: DigestEngine = engine(role.store, role.url, mails=bool(role.mail))
        self._smtp = channel(role.mail) if role.mail else None
        self._calls = 0

    async def run(self) -> None:
        self._engine.observe(self._observe)
        beating = asyncio.create_task(self._beat())
        async with self._smtp or nullcontext():
            await self._engine.run(self._deliver)
        beating.cancel()

    async def _beat(self) -> None:
        """Write down when the loop stood still: stopped, blocked or starved, it cannot notice that its lease ended."""
        self._journal.write("ready")  # run() hears signals by now
        await beat(self._journal)

    def _observe(self, delivery: Delivery) -> None:
        self._journal.write("told", delivery.digest_id, delivery.attempt, delivery.result)

    async def _deliver(self, digest: Digest) -> None:
        self._calls += 1
        call, records = self._calls, [int(cast("int", record.value)) for record in digest.records]
        self._journal.write("begin", call, digest.key, digest.id, digest.attempt, records)
        random = Random(f"{digest.id} {call}")  # of the call: an attempt that RetryAfter gives back is the same again
        try:
            failed = await (self._send(digest, call) if self._smtp else self._work(random, records))
        except asyncio.CancelledError:
            self._journal.write("end", call, "cut", [])
            raise
        except Reject:
            self._journal.write("end", call, "rejected", [])
            self._board.count(self._incarnation, DELIVERED, len(records))  # at its end, as far as anybody waits for it
            raise
        except OutcomeUnknown:
            self._journal.write("end", call, "unknown", [])
            raise
        except Exception:
            self._journal.write("end", call, "raised", [])
            raise
        self._journal.write("end", call, "partial" if failed else "returned", failed)
        self._board.count(self._incarnation, DELIVERED, len(records) - len(failed))
        if failed:
            raise PartialFailure([record.id for record in digest.records if record.value in failed])

    async def _send(self, digest: Digest, call: int) -> list[int]:
        """Send a mail, which nobody gets in part."""
        assert self._smtp is not None
        self._block_if_told()
        sending.set((self._incarnation, call))
        await self._smtp(digest)
        return []

    def _block_if_told(self) -> bool:
        """Block the loop if this is the one callback that is to; return whether it did."""
        if self._board.mood(self._incarnation) != "block":
            return False
        self._board.order(self._incarnation, "well")
        self._journal.write("block")
        time.sleep(BLOCK)
        return True

    async def _work(self, random: Random, records: list[int]) -> list[int]:
        """Take a moment, or do what a callback should not; which records it did not deliver."""
        await asyncio.sleep(random.uniform(0, 0.05))
        chance = random.random()
        if self._block_if_told():
            return []
        mood = self._board.mood(self._incarnation)
        if mood == "hang" and chance < 0.1:
            await asyncio.sleep(2 * LEASE)
        elif chance < (0.3 if mood == "raise" else 0.005):
            match random.randrange(8):
                case 0:
                    raise RetryAfter(1)
                case 1:
                    raise Reject
                case 2 | 3 | 4:
                    return [number for number in records if random.random() < 0.5]
                case _:
                    raise ConnectionError("the receiver is away")
        return []


def step_wall_clock() -> None:
    """Let SIGUSR1 set the wall clock of this process an hour ahead, and the next one back.

    A real step would be one of the whole machine; what a process sees of it is what ``time.time`` answers. The
    monotonic clock does not step in a real one either.
    """
    real, real_ns = time.time, time.time_ns
    ahead = 0

    def step(_number: int, _frame: object) -> None:
        nonlocal ahead
        ahead = HOUR - ahead

    time.time = lambda: real() + ahead
    time.time_ns = lambda: real_ns() + ahead * 1_000_000_000
    signal.signal(signal.SIGUSR1, step)


def main() -> None:
    step_wall_clock()
    role = Role.given()
    journal = role.journal()

    async def deliver() -> None:
        await Worker(role, journal).run()

    run(deliver(), journal)


if __name__ == "__main__":
    main()
