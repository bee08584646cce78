"""A world from a seed: some ten minutes of engines under faults, then peace, in which all promises must be kept."""

from __future__ import annotations

import asyncio
import logging
import random as global_random
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any, Literal

from aiodigest import BackoffMode, DecorrelatedJitter, Policy, RetryPolicy
from aiodigest.backend import Add
from aiodigest.records.entries import pack
from aiodigest.worker import batcher
from aiodigest.worker import delivery as dispatch
from simulation.actors import Actor, Habits
from simulation.loop import Endless, SeededLoop, no_turn_is_endless
from simulation.network import Link, Server
from simulation.witness import Ears, Setup, Witness

TROUBLED = 200.0  # seconds
STRICT = 30.0
IDLE = 60.0

Tempo = Literal["quiet", "calm", "wild"]


POLICIES = [
    Policy(minimum_delay=5, increment_delay=2, maximum_delay=20),
    Policy(minimum_delay=0, increment_delay=0, maximum_delay=30),
    Policy(initial_delay=3, minimum_delay=20, increment_delay=5, maximum_delay=60, max_size=3),
    Policy(minimum_delay=1, increment_delay=1, maximum_delay=10, capacity=5),
    Policy(minimum_delay=5, increment_delay=1, maximum_delay=20, max_age=30),
    Policy(minimum_delay=10, increment_delay=1, maximum_delay=30, ttl=2_000),
]


class World:
    """Everything that one seed decides."""

    def __init__(self, seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SeededLoop)
        self._loop = loop
        self._seed = seed
        self._random = Random(f"{seed} plan")
        global_random.seed(f"{seed} jitter")  # what the engines draw
        self._whims = Random(f"{seed} whims")  # of their own, so that they change nothing else
        self._habits = self._choose()
        self._server = Server(self._habits.setup.shards)
        self.witness = Witness(loop, self._server.store)
        self._tempo: Tempo = self._random.choice(("quiet", "calm", "calm", "wild", "wild", "wild"))
        self._deaf = self._random.random() < 0.1
        self._troubles = 0
        self._behind_ms = 0  # how far the clock was put back
        self._names = count(1)
        roles = [(True, True)]  # adds, delivers
        if not self._deaf:
            workers, producers = self._random.randint(1, 3), self._random.randint(1, 2)
            roles = [(self._random.random() < 0.3, True)] * workers + [(True, False)] * producers
        self._actors = [self._actor(adds, delivers) for adds, delivers in roles]
        self._dead: list[Actor] = []
        self._faults: set[asyncio.Task[None]] = set()

    def _choose(self) -> Habits:
        random = self._random
        policy = random.choice(POLICIES)
        delivery_timeout, rest = random.choice((15.0, 40.0, 100.0)), random.choice((5.0, 30.0))
        setup = Setup(
            shards=random.choice((1, 1, 3)),
            concurrency=random.choice((1, 2, 4, 8)),
            lease_timeout=random.choice((10.0, 20.0, 60.0)),
            delivery_timeout=delivery_timeout,
            drain_timeout=random.choice((5.0, 30.0)),
            timeout=random.choice((1.0, 5.0)),
            max_attempts=random.choice((3, 5, 12)),
            threshold=random.choice((2, 3, 5)),
            longest_rest=rest + 20 + 4 * delivery_timeout,
            max_size=policy.max_size,
            capacity=policy.capacity,
        )
        retry = RetryPolicy(max_attempts=setup.max_attempts, backoff=DecorrelatedJitter(base=1, cap=10))
        mode = BackoffMode(threshold=setup.threshold, multiplier=1, maximum=rest)
        keys = tuple(f"k{number}" for number in range(random.randint(2, 9)))
        stubborn = Random(f"{self._seed} stubborn").random() < 0.1
        return Habits(setup, policy, retry, mode, keys, stubborn)

    def _actor(self, adds: bool, delivers: bool) -> Actor:
        number = next(self._names)
        source = Random(f"{self._seed} actor {number}")
        name = f"{'worker' if delivers else 'producer'}-{number}"
        actor = Actor(name, self._server, self.witness, self._habits, source, adds=adds, delivers=delivers)
        actor.link.deaf = self._deaf
        return actor

    # The plot

    async def play(self) -> None:
        """Let it all happen; returns early when a promise is broken."""
        ears, logger = Ears(self.witness), logging.getLogger("aiodigest")
        level, logger.propagate = logger.level, False
        logger.addHandler(ears)
        logger.setLevel(logging.INFO)
        read, dispatch.read = dispatch.read, self._slowly(dispatch.read)
        plot = asyncio.create_task(self._plot())
        watch = asyncio.create_task(self._watch())
        over = asyncio.create_task(self.witness.over.wait())
        try:
            await asyncio.wait([plot, watch, over], return_when=asyncio.FIRST_COMPLETED)
            if plot.done() and not self.witness.fault:
                plot.result()
        finally:
            for task in (plot, watch, over, *self._faults):
                task.cancel()
            await asyncio.wait([plot, watch, over, *self._faults])
            await self._bury_all()
            dispatch.read = read
            logger.removeHandler(ears)
            logger.setLevel(level)
            logger.propagate = True

    def _slowly(self, read: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Take a while to read some digests, as where they are large."""
        whims = Random(f"{self._seed} reading")

        async def read_slowly(*arguments: Any) -> Any:
            if not self.witness.strict and whims.random() < 0.4:
                await asyncio.sleep(whims.uniform(0, 6))
            return await read(*arguments)

        return read_slowly

    async def _bury_all(self) -> None:
        for actor in (*self._dead, *self._actors):
            if not actor.life.done() or not actor.process.alive:
                actor.process.kill()
                await actor.process.bury()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(5)
            self._server.store.end_drained()
            self.witness.look(self._server.store, self._server.now_ms())

    async def _plot(self) -> None:
        await self._be_troubled()
        await self._settle()
        await self._be_strict()
        await self._be_idle()
        for actor in self._actors:
            actor.leave()
        for actor in self._actors:
            await self._see_leave(actor)
        self._settle_accounts()

    async def _be_troubled(self) -> None:
        ends = self._loop.time() + TROUBLED
        if self._tempo == "quiet":
            self._habits.mood = "good"
        gap = 60.0 if self._tempo == "calm" else 12.0
        while (left := ends - self._loop.time()) > 0:
            await asyncio.sleep(min(left, self._random.expovariate(1 / gap)))
            if self._tempo != "quiet" and self._loop.time() < ends:
                self._inflict()
        for task in self._faults:
            task.cancel()
        if self._faults:
            await asyncio.wait(self._faults)
        self._faults.clear()

    async def _settle(self) -> None:
        """Peace: what is held must be delivered, or be where it belongs, in a time that can be told."""
        self.witness.tell("peace")
        self._habits.mood = "good"
        setup = self._habits.setup
        for actor in self._actors:
            actor.rest(True)
        patience = 4 * setup.lease_timeout + setup.longest_rest + 120 + self._behind_ms / 1000
        await self._empty(patience)
        await asyncio.sleep(2 * setup.lease_timeout + setup.longest_rest)

    def _held(self) -> list[str]:
        return [key for machine in self._server.store.machines for key in machine.held if machine.placed(key)]

    async def _empty(self, patience: float) -> None:
        ends = self._loop.time() + patience
        while self._server.store.shard_map.draining or self._held():
            if self._loop.time() > ends:
                self.witness.broken(f"still held after {patience:.0f} s of peace: {self._held()}")
                await asyncio.Event().wait()
            await asyncio.sleep(1)

    async def _be_strict(self) -> None:
        first = len(self.witness.records.all) + 1
        self.witness.tell("by the book")
        self.witness.strict = True
        for actor in self._actors:
            actor.rest(False)
        await asyncio.sleep(STRICT)
        for actor in self._actors:
            actor.rest(True)
        await self._empty(100 + 3 * self._habits.setup.lease_timeout)
        await asyncio.sleep(1)
        policy = self._habits.policy
        if policy.capacity < 100 or policy.max_age is not None:  # then some may vanish
            return
        for serial in range(first, len(self.witness.records.all) + 1):
            record = self.witness.records.all[serial]
            if len(record.receipts) != (0 if record.refused else 1) and not record.excused:
                self.witness.broken(f"record {serial} came {len(record.receipts)} times, and nothing was wrong")

    async def _be_idle(self) -> None:
        before = {actor: sum(actor_sent.values()) for actor, actor_sent in self._sent()}
        await asyncio.sleep(IDLE)
        setup = self._habits.setup
        allowed = len(self._server.store.shard_map.current) * (IDLE / (setup.lease_timeout / 3) * 1.5 + 3)
        for actor, sent in self._sent():
            if sum(sent.values()) - before[actor] > allowed:
                self.witness.broken(f"{actor} is idle, and sends {sum(sent.values()) - before[actor]} calls a minute")

    def _sent(self) -> list[tuple[str, dict[str, int]]]:
        return [(actor.process.name, self.witness.conducts[actor.process].sent) for actor in self._actors]

    def _settle_accounts(self) -> None:
        machines = self._server.store.machines
        letters = [letter for machine in machines for letter in machine.dead.values()]
        lost = self.witness.records.unaccounted(letters)
        counted = sum(machine.counts[name] for machine in machines for name in ("dropped", "aged", "expired"))
        if len(lost) > counted:
            self.witness.broken(f"{len(lost)} records are lost, {counted} of them counted: {lost[:20]}")
        reasons = [(letter.digest_id, letter.reason) for letter in letters]
        if len(set(reasons)) < len(reasons):
            self.witness.broken("two dead letters of one digest have the same reason")

    # Faults

    def _inflict(self) -> None:
        random = self._random
        if not self._actors:  # all are dead or leaving, and will be replaced
            return
        faults: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._crash_server, self._pause_server, self._cut, self._lose, self._lag, self._refuse, self._silence,
            self._kill, self._kill, self._stop, self._leave, self._step_clock, self._break_receiver, self._plant,
        ]  # fmt: skip
        fault = random.choice(faults)
        # a receiver that fails has workers rest, which hear of a change by what they tell alone
        if self._whims.random() < (0.4 if fault == self._break_receiver else 0.08):
            self._change_shards()

        async def happen() -> None:
            self._troubles += 1
            self.witness.trouble(1e9)
            try:
                await fault()
            finally:
                self._troubles -= 1
                self.witness.calm_since = self._loop.time() + (1e9 if self._troubles else 0.0)

        task = asyncio.create_task(fault() if fault in (self._break_receiver, self._leave) else happen())
        self._faults.add(task)
        task.add_done_callback(self._faults.discard)

    async def _crash_server(self) -> None:
        self.witness.tell("the server crashes")
        self._server.is_up = False
        self._server.cut_all()
        try:
            await asyncio.sleep(self._random.choice((0.2, 3.0, 30.0, 90.0)))
        finally:
            self._server.is_up = True
            self.witness.tell("the server is back")
        for actor in self._actors:
            conduct = self.witness.conducts[actor.process]
            if conduct.away and conduct.failures and self._loop.time() - conduct.failures[-1] < 3:
                tries = conduct.sent["claim"] + conduct.sent["renew"]
                patience = self._habits.setup.timeout + 2.5  # it may wait for an answer that is lost
                self._loop.run_apart(patience, self._see_try, actor, tries, self._loop.time())

    def _see_try(self, actor: Actor, tries: int, since: float) -> None:
        conduct, process = self.witness.conducts[actor.process], actor.process
        if not process.alive or process.stopped or process.went_on_at > since or not actor.is_there:
            return
        if (
            conduct.sent["claim"] + conduct.sent["renew"] == tries
            and conduct.silent_until < since
            and actor.link.is_sound
        ):
            self.witness.broken(f"{process} does not try again although the server is back")

    async def _pause_server(self) -> None:
        seconds = self._random.uniform(0.1, 20)
        self.witness.tell(f"the server pauses for {seconds:.3f} s")
        self._server.paused_until = self._loop.time() + seconds
        await asyncio.sleep(seconds)

    async def _cut(self) -> None:
        self.witness.tell("all connections are cut")
        self._server.cut_all()

    def _link_of(self, what: str) -> Actor:
        actor = self._random.choice(self._actors)
        self.witness.tell(f"{actor.process}: {what}")
        return actor

    async def _impair(self, what: str, field: str, values: Sequence[float], shortest: float, longest: float) -> None:
        """Let one process's link be worse for a while."""
        link = self._link_of(what).link
        setattr(link, field, self._random.choice(values) if len(values) > 1 else values[0])
        try:
            await asyncio.sleep(self._random.uniform(shortest, longest))
        finally:
            setattr(link, field, getattr(Link, field))

    async def _lose(self) -> None:
        await self._impair("messages are lost", "loss", (0.1, 0.5), 1, 60)

    async def _lag(self) -> None:
        await self._impair("the network is slow", "lag", (0.1, 1.0, self._habits.setup.timeout), 1, 60)

    async def _refuse(self) -> None:
        await self._impair("connections are refused", "refused", (True,), 0.1, 60)

    async def _silence(self) -> None:
        await self._impair("the network is a black hole", "silent", (True,), 0.1, 90)

    async def _kill(self) -> None:
        actor = self._link_of("killed")
        actor.process.kill()
        self._dead.append(actor)
        await self._replace(actor)

    async def _replace(self, actor: Actor) -> None:
        """Start another in its place, after a while."""
        self._actors.remove(actor)
        try:
            if self._actors:
                await asyncio.sleep(self._random.choice((0.0, 5.0, 100.0)))
        finally:
            self._actors.append(self._actor(actor.adds, actor.delivers))

    async def _stop(self) -> None:
        actor = self._link_of("stopped")
        actor.process.stop()
        try:
            await asyncio.sleep(self._random.uniform(0.1, 3 * self._habits.setup.lease_timeout))
        finally:
            if actor.process.alive:
                actor.process.go_on()
                self.witness.tell(f"{actor.process} goes on")

    async def _leave(self) -> None:
        actor = self._link_of("asked to leave")
        actor.leave()
        self._actors.remove(actor)
        self._dead.append(actor)
        try:
            await self._see_leave(actor)
        finally:
            self._actors.append(self._actor(actor.adds, actor.delivers))

    async def _see_leave(self, actor: Actor) -> None:
        setup, since = self._habits.setup, self._loop.time()
        bound = setup.drain_timeout + 4 * setup.timeout + 10
        await asyncio.wait([actor.life], timeout=bound)
        if not actor.process.alive or actor.process.stopped or actor.process.went_on_at > since:
            return
        if not actor.life.done():
            self.witness.broken(f"{actor.process} has not left after {bound:.0f} s")
        else:
            actor.life.result()
            if self.witness.calm_for(self._loop.time() - since + setup.timeout):
                self.witness.left(actor.process, self._server.store)

    async def _step_clock(self) -> None:
        step = self._random.choice((-120_000, -30_000, 5_000, 30_000, 3_600_000))
        self.witness.tell(f"the server's clock steps by {step / 1000:g} s")
        self._server.offset_ms += step
        self._behind_ms += max(0, -step)

    async def _break_receiver(self) -> None:
        self.witness.tell("the receiver fails")
        self._habits.mood = "failing"
        try:
            await asyncio.sleep(self._random.uniform(10, 200))
        finally:
            self._habits.mood = "mixed"

    def _change_shards(self) -> None:
        store = self._server.store
        if not store.shard_map.draining:
            shards = self._whims.choice([number for number in (1, 2, 3, 5) if number != store.shard_map.adding])
            self.witness.tell(f"the namespace gets {shards} shards")
            store.change(shards)

    async def _plant(self) -> None:
        """Another program adds what nobody can decode."""
        key, shard = self._random.choice(self._habits.keys), self._server.store.shard_map.shard_of
        number = self._random.randint(1, 3)
        self.witness.tell(f"{number} records that nobody can decode are added to {key}")
        terms = self._habits.policy.terms
        adds = [Add(key, pack(b"bad-%d" % each, None, b"\xff"), terms) for each in range(number)]
        await self._server.store.add(shard(key), adds)


@contextmanager
def room_for_adds(seed: int) -> Generator[None]:
    """Let few adds wait to be sent in some worlds; in the others there are never too many."""
    before = batcher.QUEUE_ITEMS, batcher.QUEUE_BYTES
    few, small = (2, before[1]), (before[0], 40)
    batcher.QUEUE_ITEMS, batcher.QUEUE_BYTES = Random(f"{seed} room").choice((before, few, small))
    try:
        yield
    finally:
        batcher.QUEUE_ITEMS, batcher.QUEUE_BYTES = before


def play(seed: int) -> Witness:
    """Play a seed from its beginning to its end; the witness tells how it went."""
    worlds: list[World] = []

    async def main() -> None:
        world = World(seed)
        worlds.append(world)
        unseen: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(repr(context)))
        await world.play()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            world.witness.broken(f"tasks are left: {left}")
        for context in unseen:
            world.witness.broken(f"an error that nobody has looked at: {context}")

    with asyncio.Runner(loop_factory=lambda: SeededLoop(f"{seed} order")) as runner:
        try:
            with no_turn_is_endless(), room_for_adds(seed):
                runner.run(main())
        except (Endless, SystemExit) as error:
            worlds[0].witness.broken(repr(error))
    return worlds[0].witness
