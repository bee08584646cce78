"""A world in which timelines are muted and unmuted: what is muted never goes out, and what waited there always does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any

from aiodigest import AiodigestError, Digest, InvalidState, LimitExceeded, Policy, Reject
from aiodigest.policy import NO_POLICY
from simulation.actors import Actor
from simulation.families import Family
from simulation.records import Receipt
from simulation.witness import Setup
from simulation.world import Fault


class Mutes(Family):
    """Producers mute, flush and add, urgently too; some callbacks reject their address for good."""

    reshards = False  # tests/test_reshard.py

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.policy = self._own.choice(
            (
                Policy(minimum_delay=5, increment_delay=1, maximum_delay=20),
                Policy(initial_delay=10, minimum_delay=5, increment_delay=1, maximum_delay=30, max_size=3),
                Policy(quiet_delay=4, maximum_delay=20, max_bytes=12),
            )
        )
        setup.keys, setup.produce = ("k0", "k1", "k2", "k3"), self._produce
        return setup

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        await asyncio.sleep(self._own.uniform(0, 3))
        if self._setup.mood != "good" and self._own.random() < 0.2:
            raise Reject(self.FAILS, mute=True) if self._own.random() < 0.3 else RuntimeError("the receiver fails")

    async def _produce(self, actor: Actor) -> None:
        random, engine = Random(f"{self._seed} {actor.process} mutes"), actor.engine
        while True:
            await asyncio.sleep(random.expovariate(1.0))
            await actor.adding.wait()
            key = random.choice(self._setup.keys)
            until = random.choice((None, timedelta(seconds=random.uniform(0, 60))))
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda key=key, until=until: engine.mute(key, until, drop=random.random() < 0.3),
                lambda key=key: engine.unmute(key),
                lambda key=key: engine.flush(key),
            ]
            if random.random() < 0.6:
                await actor.add()
                continue
            try:
                await random.choice(calls)()
            except (InvalidState, LimitExceeded):
                pass
            except AiodigestError as error:
                self.witness.tell(f"failed: {error}")

    def _choices(self) -> Sequence[Fault]:
        return [self._kill, self._cut, self._crash_server, self._leave, self._stop]

    async def _settle(self) -> None:
        """Unmute all, once nobody mutes any more."""
        self._is_peace = True
        for actor in self._actors:
            actor.adding.clear()
        await asyncio.sleep(2 * self._setup.timeout + 1)
        for key in self._setup.keys:
            await self._server.store.unmute(key, NO_POLICY.terms.limits)
            self.witness.muted(key)
        await super()._settle()
