"""A world from a seed: some ten minutes of engines under faults, then peace, in which all promises must be kept."""

from __future__ import annotations

import asyncio
import logging
import random as global_random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any, TypeAlias, cast
from unittest.mock import patch

from aiodigest import Policy, Throttle
from aiodigest.backend import Add
from aiodigest.policy import PolicySource
from aiodigest.records.entries import pack
from aiodigest.timing.throttle import HOLD
from aiodigest.worker import batcher, concurrency
from aiodigest.worker import delivery as dispatch
from aiodigest.worker.doubts import Doubts
from simulation.actors import Actor
from simulation.loop import PROCESS, Endless, Process, SeededLoop, no_turn_is_endless
from simulation.network import Link, Server
from simulation.rules import Rules
from simulation.witness import Setup, Witness

TROUBLED = 200.0  # seconds
STRICT = 30.0
IDLE = 60.0
LONG = 6  # seconds: who waits for longer, in peace, is spared that

Fault: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

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

    troubled = TROUBLED
    reads_slowly = True  # some digests
    reshards = True  # the number of shards changes now and then
    has_rules = True  # some seeds

    @classmethod
    def played(cls, seed: int) -> Witness:
        return play(seed, cls)

    def __init__(self, seed: int, loop: SeededLoop) -> None:
        self._loop = loop
        self._seed = seed
        self._own = Random(f"{seed} {type(self).__name__}")  # what only this kind of world draws
        self._random = Random(f"{seed} plan")
        global_random.seed(f"{seed} jitter")  # what the engines draw
        self._whims = Random(f"{seed} whims")  # of their own, so that they change nothing else
        self._setup = self._choose()
        self._server = Server(self._setup.shards, loop)
        if self._setup.rules:
            self._server.offset_ms = self._setup.rules.start_ms - self._server.now_ms()
        self.witness = Witness(loop, self._server.store, self._setup)
        self._tempo = self._random.choice(("quiet", "calm", "calm", "wild", "wild", "wild"))
        self._deaf = self._random.random() < 0.1
        self._is_peace = False
        self._has_jumped = False  # the server's clock has stepped forth
        self._troubles = 0
        self._names = count(1)
        self._actors: list[Actor] = []
        self._dead: list[Actor] = []
        self._faults: set[asyncio.Task[None]] = set()

    def _choose(self) -> Setup:
        random = self._random
        policy = random.choice(POLICIES)
        delivery_timeout, pause = random.choice((15.0, 40.0, 100.0)), random.choice((5.0, 30.0))
        setup = Setup(
            policy=policy,
            shards=random.choice((1, 1, 3)),
            concurrency=random.choice((1, 2, 4, 8)),
            lease_timeout=random.choice((10.0, 20.0, 60.0)),
            delivery_timeout=delivery_timeout,
            drain_timeout=random.choice((5.0, 30.0)),
            timeout=random.choice((1.0, 5.0)),
            max_attempts=random.choice((3, 5, 12)),
            threshold=random.choice((2, 3, 5)),
            pause=pause,
            keys=tuple(f"k{number}" for number in range(random.randint(2, 9))),
            digest_bytes=Random(f"{self._seed} bytes").choice((1_000, 1_000, 9)),
            stubborn=Random(f"{self._seed} stubborn").random() < 0.1,
            throttle=Throttle(20, per=2, burst=5) if Random(f"{self._seed} throttle").random() < 0.1 else None,
            poison="k0" if Random(f"{self._seed} poison").random() < 0.2 else "",
        )
        if self.has_rules and Random(f"{self._seed} has rules").random() < 0.5:
            setup.rules = Rules(self._seed, setup.keys, setup.digest_bytes)
        return setup

    def _enter(self, adds: bool, delivers: bool, policy: PolicySource | None = None) -> Actor:
        number = next(self._names)
        source = Random(f"{self._seed} actor {number}")
        name = f"{'worker' if delivers else 'producer'}-{number}"
        roles = {"adds": adds, "delivers": delivers}
        actor = Actor(name, self._server, self.witness, source, **roles, fall=self._fall, policy=policy)
        actor.link.deaf = self._deaf
        if self._is_peace:  # it takes the place of one that has fallen
            actor.adding.clear()
        self._actors.append(actor)
        return actor

    def _enter_all(self) -> None:
        roles = [(True, True)]  # adds, delivers
        if not self._deaf:
            workers, producers = self._random.randint(1, 3), self._random.randint(1, 2)
            roles = [(self._random.random() < 0.3, True)] * workers + [(True, False)] * producers
        for adds, delivers in roles:
            self._enter(adds, delivers)

    def slowly(self, read: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Take a while to read some digests, as where they are large."""
        whims = Random(f"{self._seed} reading")

        async def read_slowly(*arguments: Any) -> Any:
            if self.reads_slowly and not self.witness.strict and whims.random() < 0.4:
                await asyncio.sleep(whims.uniform(0, 6))
            return await read(*arguments)

        return read_slowly

    # The plot

    async def play(self) -> None:
        """Let it all happen; returns early when a promise is broken."""
        self._enter_all()
        plot = asyncio.create_task(self._plot())
        tasks = [plot, *map(asyncio.create_task, (self._watch(), self.witness.over.wait()))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if plot.done() and not self.witness.fault:
                plot.result()
        finally:
            tasks += self._faults
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for actor in (*self._dead, *self._actors):
                if not actor.life.done() or not actor.process.alive:
                    actor.process.kill()
                    await actor.process.bury()
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            self.witness.broken(f"tasks are left: {left}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(5)
            self._server.store.end_drained()
            self.witness.look(self._server.now_ms())
            self._look()

    def _look(self) -> None:
        """See that the promises are kept that only this kind of world can break."""

    async def _plot(self) -> None:
        await self._be_troubled()
        await self._settle()
        await self._be_strict()
        await self._be_idle()
        await self._end()

    async def _end(self) -> None:
        for actor in self._actors:
            actor.leave()
        for actor in self._actors:
            await self._see_leave(actor)
        self._settle_accounts()

    async def _be_troubled(self) -> None:
        ends = self._loop.time() + self.troubled
        if self._tempo == "quiet":
            self._setup.mood = "good"
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
        self._is_peace = True
        self._setup.mood, self._setup.poison = "good", ""
        setup = self._setup
        for actor in self._actors:
            actor.adding.clear()
        await self._empty(self._patience)
        await asyncio.sleep(2 * setup.lease_timeout + setup.longest_rest)

    @property
    def _patience(self) -> float:
        """How long it may take at the most to deliver what is held, when there is peace."""
        setup = self._setup
        return 4 * setup.lease_timeout + setup.longest_rest + 120

    def _held(self) -> list[str]:
        return [key for machine in self._server.store.machines for key in machine.held if machine.placed(key)]

    async def _empty(self, patience: float) -> None:
        ends = self._loop.time() + patience
        while self._server.store.shard_map.draining or self._held():
            ends += self._pass_time()
            if self._loop.time() > ends:
                self.witness.broken(f"still held after {patience:.0f} s of peace: {self._held()}")
                await asyncio.Event().wait()
            await asyncio.sleep(1)

    def _pass_time(self) -> float:
        """Let the server's clock be set to shortly before the next timeline is due, if that is long; return how much
        more patience that takes."""
        machines, now_ms = self._server.store.machines, self._server.now_ms()
        nexts = [due - machine.now(now_ms) for machine in machines for due in machine.waiting.values()]
        is_quiet = not any(machine.ready or machine.leased for machine in machines)
        if not (self._setup.rules and is_quiet and nexts and min(nexts) > 1000 * LONG):
            return 0.0
        self.witness.tell(f"{min(nexts) / 1000:.0f} s go by, until something is due")
        self._server.step(min(nexts) - 500 * LONG)
        self.witness.trouble(0.0)
        return LONG

    async def _be_strict(self) -> None:
        first = len(self.witness.records.all) + 1
        self.witness.tell("by the book")
        self.witness.strict = True
        for actor in self._actors:
            actor.adding.set()
        await asyncio.sleep(STRICT)
        for actor in self._actors:
            actor.adding.clear()
        await self._empty(100 + 3 * self._setup.lease_timeout)
        await asyncio.sleep(1)
        for serial in range(first, len(self.witness.records.all) + 1):
            record = self.witness.records.all[serial]
            policy = self._setup.policy_of(record.key)
            if policy.capacity < 100 or policy.max_age is not None:  # then some may vanish
                continue
            if len(record.receipts) != (0 if record.refused else 1) and not record.excused:
                self.witness.broken(f"record {serial} came {len(record.receipts)} times, and nothing was wrong")

    async def _be_idle(self) -> None:
        before = [actor.conduct.sent.total() for actor in self._actors]
        await asyncio.sleep(IDLE)
        allowed = len(self._server.store.shard_map.current) * (IDLE / (self._setup.lease_timeout / 3) * 1.5 + 3)
        for actor, then in zip(self._actors, before, strict=True):
            sent = actor.conduct.sent.total() - then
            if sent > allowed:
                self.witness.broken(f"{actor.process} is idle, and sends {sent} calls a minute")

    def _settle_accounts(self) -> None:
        machines = self._server.store.machines
        letters = [letter for machine in machines for letter in machine.dead.values()]
        lost = self.witness.records.unaccounted(letters)
        counted = sum(machine.counts[name] for machine in machines for name in ("dropped", "aged", "expired", "muted"))
        if len(lost) > counted:
            self.witness.broken(f"{len(lost)} records are lost, {counted} of them counted: {lost[:20]}")
        expired = sum(machine.counts["expired"] for machine in machines)
        if self._setup.rules and expired and not self._has_jumped:
            self.witness.broken(f"{expired} records have expired, and were to be delivered")
        reasons = [(letter.digest_id, letter.reason) for letter in letters]
        if len(set(reasons)) < len(reasons):
            self.witness.broken("two dead letters of one digest have the same reason")

    # Faults

    def _choices(self) -> Sequence[Fault]:
        return [
            self._crash_server, self._pause_server, self._cut,
            partial(self._impair, "messages are lost", "loss", (0.1, 0.5), 1, 60),
            partial(self._impair, "the network is slow", "lag", (0.1, 1.0, self._setup.timeout), 1, 60),
            partial(self._impair, "connections are refused", "refused", (True,), 0.1, 60),
            partial(self._impair, "the network is a black hole", "silent", (True,), 0.1, 90),
            self._kill, self._kill, self._stop, self._leave, self._step_clock, self._break_receiver, self._plant,
        ]  # fmt: skip

    def _inflict(self) -> None:
        if not self._actors:  # all are dead or leaving, and will be replaced
            return
        fault = self._random.choice(self._choices())
        # a receiver that fails has workers rest, which hear of a change by what they tell alone
        if self._whims.random() < (0.4 if fault == self._break_receiver else 0.08):
            self._change_shards()

        async def happen() -> None:
            self._troubles += 1
            self.witness.calm_since = inf
            try:
                await fault()
            finally:
                self._troubles -= 1
                ended = max(self._loop.time(), self.witness.troubled_until)
                self.witness.calm_since = inf if self._troubles else ended

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
        now = self._loop.time()
        for actor in self._actors:
            conduct = actor.conduct
            if conduct.away and conduct.failures and now - conduct.failures[-1] < 3:
                patience = self._setup.timeout + 2.5  # it may wait for an answer that is lost
                self._loop.run_apart(patience, self._see_try, actor, conduct.tries, now)

    def _see_try(self, actor: Actor, tries: int, since: float) -> None:
        conduct, is_there = actor.conduct, actor.process.runs_since(since) and not actor.life.done()
        may_try = conduct.leaving_since is None and conduct.silent_until < since and actor.link.is_sound
        may_try = may_try and not conduct.engine.activity.backoff_level  # in a rest it renews a few times a lease
        if is_there and may_try and conduct.tries == tries:
            self.witness.broken(f"{actor.process} does not try again although the server is back")

    async def _pause_server(self) -> None:
        seconds = self._random.uniform(0.1, 20)
        self.witness.tell(f"the server pauses for {seconds:.3f} s")
        self._server.paused_until = until = self._loop.time() + seconds
        try:
            await asyncio.sleep(seconds)
        finally:  # there may be peace before it is over
            self.witness.trouble(until - self._loop.time())

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

    async def _kill(self) -> None:
        actor = self._link_of("killed")
        self._bury(actor)
        try:
            if self._actors:
                await asyncio.sleep(self._random.choice((0.0, 5.0, 100.0)))
        finally:
            self._enter(actor.adds, actor.delivers, actor.policy)

    def _bury(self, actor: Actor) -> None:
        actor.process.kill()
        self._dead.append(actor)
        if actor in self._actors:  # else it is leaving
            self._actors.remove(actor)

    def _fall(self, actor: Actor) -> None:
        """A process is killed by what it delivers, and started again in a moment."""
        self.witness.tell("killed by what it delivers")
        self.witness.trouble(1.0)
        is_leaving = actor not in self._actors
        self._bury(actor)
        if not is_leaving:
            self._loop.run_apart(1.0, self._enter, actor.adds, actor.delivers, actor.policy)

    async def _stop(self) -> None:
        actor = self._link_of("stopped")
        actor.process.stop()
        try:
            await asyncio.sleep(self._random.uniform(0.1, 3 * self._setup.lease_timeout))
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
            self._enter(actor.adds, actor.delivers, actor.policy)

    async def _see_leave(self, actor: Actor) -> None:
        setup, since = self._setup, self._loop.time()
        bound = setup.drain_timeout + 4 * setup.timeout + 10
        await asyncio.wait([actor.life], timeout=bound)
        if not actor.process.runs_since(since):
            return
        if not actor.life.done():
            self.witness.broken(f"{actor.process} has not left after {bound:.0f} s")
        else:
            actor.life.result()
            if self.witness.calm_for(self._loop.time() - since + setup.timeout):
                self.witness.left(actor.process)

    async def _step_clock(self) -> None:
        step = self._random.choice((-3_600_000, -30_000, 5_000, 30_000, 3_600_000))
        self.witness.tell(f"the server's clock steps by {step / 1000:g} s")
        self._has_jumped = self._has_jumped or step > 0
        self._server.step(step)
        if step > 0:  # what was allowed before has begun by then
            self.witness.counts_from = self._loop.time() + HOLD

    async def _break_receiver(self) -> None:
        self.witness.tell("the receiver fails")
        self._setup.mood = "failing"
        try:
            await asyncio.sleep(self._random.uniform(10, 200))
        finally:
            self._setup.mood = "mixed"

    def _change_shards(self) -> None:
        store = self._server.store
        if self.reshards and not store.shard_map.draining:
            shards = self._whims.choice([number for number in (1, 2, 3, 5) if number != store.shard_map.adding])
            self.witness.tell(f"the namespace gets {shards} shards")
            store.change(shards)

    async def _plant(self) -> None:
        """Another program adds what nobody can decode."""
        key, shard = self._random.choice(self._setup.keys), self._server.store.shard_map.shard_of
        number = self._random.randint(1, 3)
        self.witness.tell(f"{number} records that nobody can decode are added to {key}")
        terms, own = self._setup.policy_of(key).terms, self._setup.rules is not None and self._setup.rules.own
        adds = [Add(key, pack(b"bad-%d" % each, None, b"\xff"), terms, own) for each in range(number)]
        await self._server.store.add(shard(key), adds)


def play(seed: int, kind: type[World] = World) -> Witness:
    """Play a seed's world of a kind from its beginning to its end; the witness tells how it went."""
    # in some worlds few adds may wait to be sent; in the others there are never too many
    items, size = batcher.QUEUE_ITEMS, batcher.QUEUE_BYTES
    items, size = Random(f"{seed} room").choice(((items, size), (2, size), (items, 40)))
    logger, ears = logging.getLogger("aiodigest"), logging.Handler()
    level = logger.level
    with asyncio.Runner(loop_factory=lambda: SeededLoop(f"{seed} order")) as runner, ExitStack() as stack:
        loop = cast("SeededLoop", runner.get_loop())
        world = kind(seed, loop)
        loop.set_exception_handler(lambda _, context: world.witness.broken(f"an error that nobody looks at: {context}"))
        ears.emit = world.witness.hear
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.INFO)
        stack.enter_context(patch.multiple(logger, propagate=False, handlers=[ears]))
        stack.enter_context(patch.multiple(batcher, QUEUE_ITEMS=items, QUEUE_BYTES=size))
        shared = defaultdict[Process | None, Doubts](Doubts)  # by a process, not by the loop of all
        stack.enter_context(patch.object(concurrency, "doubts_of_loop", lambda: shared[PROCESS.get()]))
        stack.enter_context(patch.object(dispatch, "read", world.slowly(dispatch.read)))
        try:
            with no_turn_is_endless():
                runner.run(world.play())
        except (Endless, SystemExit) as error:
            world.witness.broken(repr(error))
    return world.witness
