"""Worlds of one kind of trouble each, in which a promise can be told exactly; all other promises are kept there too."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import ClassVar

from aiodigest import Digest, Entry, Policy, Reject, RetryAfter
from aiodigest.backend import Add
from aiodigest.policy import NO_POLICY
from aiodigest.records.entries import distinct, pack
from simulation.actors import Actor
from simulation.records import Receipt, serials_of
from simulation.witness import Setup, Witness
from simulation.world import Fault, World, play

PLAIN = Policy(minimum_delay=5, increment_delay=1, maximum_delay=20)


class Family(World):
    """A world whose receiver, faults and promises are its own; there is no time by the book in it."""

    has_rules = False

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.policy, setup.receive, setup.stubborn, setup.meddles = PLAIN, self._receive, False, False
        setup.poison, setup.throttle = "", None
        setup.delivery_timeout, setup.digest_bytes = 15.0, 1_000  # none comes in parts
        return setup

    FAILS = "RuntimeError: the receiver fails"

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        await asyncio.sleep(self._own.uniform(0, 0.5))

    async def _plot(self) -> None:
        await self._be_troubled()
        await self._settle()
        await self._end()

    async def _die(self, actor: Actor, away: float) -> None:
        """Let a process die where it stands; it is started again after a while."""
        self.witness.tell("is killed by what it was given")
        self.witness.trouble(away)
        actor.process.kill()
        if actor in self._actors:  # else it leaves, and another one will come
            self._actors.remove(actor)
            self._dead.append(actor)
            self._loop.run_apart(away, self._restart, actor)
        await asyncio.Event().wait()

    def _restart(self, actor: Actor) -> None:
        if not self.witness.over.is_set():
            self._enter(actor.adds, actor.delivers, actor.policy)
            if self._is_peace:
                self._actors[-1].adding.clear()

    def _see_letters(self, allowed: frozenset[str] = frozenset()) -> None:
        for machine in self._server.store.machines:
            for letter in machine.dead.values():
                if letter.key not in allowed and letter.reason != self.FAILS:
                    self.witness.broken(f"an innocent is a dead letter: {letter.key}, {letter.reason}")


class Innocents(Family):
    """Some records do harm to the process that delivers them. The others must not be charged for it."""

    reshards = False
    duplicates = 4  # how often the same digest may be begun
    most_guilty = 2

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.concurrency = self._own.choice((2, 4, 8))
        setup.keys = tuple(f"k{number}" for number in range(self._own.randint(4, 12)))
        setup.delivery_timeout, setup.lease_timeout = 60.0, self._own.choice((10.0, 20.0))
        self._guilty = [f"guilty{number}" for number in range(self._own.randint(1, self.most_guilty))]
        self._failures = defaultdict[str, int](int)  # that were reported, of each timeline
        self._begun = defaultdict[str, int](int)  # by digest
        return setup

    def _choices(self) -> Sequence[Fault]:
        return [self._sin, self._cut, self._leave]

    async def _sin(self) -> None:
        """Add a record that will do harm."""
        key = self._own.choice(self._guilty)
        there = [actor for actor in self._actors if actor.has_entered and actor.conduct.leaving_since is None]
        if there:
            actor = self._own.choice(there)
            await actor.process.start(actor.add(Entry(key, self.witness.records.new(key, "sin"), "sin")))

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        self._begun[digest.id] += 1
        if digest.key in self._guilty:
            await asyncio.sleep(self._own.uniform(0, 0.5))
            await self._harm(actor)
            return
        self._see_spared(digest)
        await asyncio.sleep(self._own.choice((0.0, 0.3, 2.0)))
        if self._own.random() < 0.1 and self._setup.mood != "good":
            self._failures[digest.key] += 1
            raise RuntimeError("the receiver fails")

    async def _harm(self, actor: Actor) -> None: ...

    def _see_spared(self, digest: Digest[int]) -> None:
        """See that an innocent is charged for what was reported of it alone, and does not come again and again. It may
        be charged too if its process ends, or blocks, while it waits there for what it is to run alone after; or if its
        callback was under way for longer than a delivery may take, since others blocked."""
        if digest.attempt == 1:
            self._failures[digest.key] = 0
        spared = max(0, self.witness.idle[digest.id]) + self.witness.timeouts[digest.id]
        allowed = 1 + self._failures[digest.key] + spared
        if digest.attempt > allowed:
            self.witness.broken(
                f"{digest.key} is charged for its neighbour: attempt {digest.attempt}, of which {allowed} were its own"
            )
        if (times := self._begun[digest.id]) > self.duplicates + self._failures[digest.key]:
            self.witness.broken(f"digest {digest.id} of {digest.key}, an innocent, comes {times} times")

    async def _end(self) -> None:
        self._see_letters(allowed=frozenset(self._guilty))
        await super()._end()


class Poison(Innocents):
    """Some records kill the process that delivers them, and a supervisor starts it again."""

    async def _harm(self, actor: Actor) -> None:
        await self._die(actor, self._own.choice((1.0, 5.0, 15.0)))

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.max_attempts = self._own.choice((3, 5))
        return setup

    @property
    def _patience(self) -> float:
        deaths = (self._setup.max_attempts + 4) * len(self._guilty)
        return super()._patience + deaths * (3 * self._setup.lease_timeout + 15)

    async def _end(self) -> None:
        self._see_poison()
        await super()._end()

    def _see_poison(self) -> None:
        """See that what kills whoever delivers it has ended as a dead letter."""
        letters = [letter for machine in self._server.store.machines for letter in machine.dead.values()]
        buried = {serial for letter in letters for serial in serials_of(letter.entries)}
        for serial, record in self.witness.records.all.items():
            if record.key in self._guilty and record.receipts and not record.excused and serial not in buried:
                self.witness.broken(f"record {serial} kills its process, and is no dead letter")


class Blocking(Innocents):
    """Some callbacks block the loop of their process for longer than a lease."""

    most_guilty = 3

    async def _harm(self, actor: Actor) -> None:
        await actor.block(self._own.uniform(1.1, 2.5) * self._setup.lease_timeout)

    @property
    def _patience(self) -> float:
        return super()._patience + 8 * len(self._guilty) * self._setup.max_attempts * self._setup.lease_timeout


class Partitions(Family):
    """Something between a process and the server keeps what is sent, and carries it when nobody waits any more."""

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.policy = Policy(initial_delay=20, minimum_delay=30, increment_delay=1, maximum_delay=60)
        setup.keys, setup.timeout = ("k0", "k1", "k2"), self._own.choice((1.0, 5.0))
        setup.produce = self._produce
        return setup

    def _enter_all(self) -> None:
        self._deaf = False
        for adds, delivers in [(False, True), (True, False), (True, self._own.random() < 0.3)]:
            self._enter(adds, delivers)

    async def _produce(self, actor: Actor) -> None:
        """Add values of a few records, a newer one as soon as it is known what became of the older one."""
        random = Random(f"{self._seed} {actor.process} repeats")
        while True:
            await asyncio.sleep(random.expovariate(1.0))
            await actor.adding.wait()
            if random.random() < 0.1:
                await actor.take_away(random.choice(self._setup.keys), random.choice((None, "r1", "r2")))
                continue
            key, record_id = random.choice(self._setup.keys), random.choice(("r1", "r2"))
            await actor.add(Entry(key, self.witness.records.new(key, record_id), record_id))

    def _choices(self) -> Sequence[Fault]:
        hold = partial(self._impair, "what it sends is held", "held", (5.0, 20.0, 40.0), 1, 15)
        return [hold] * 5 + [self._cut, self._pause_server, self._kill, self._step_clock]


class Clocks(Family):
    """The server's clock steps, by seconds or hours, forth and back."""

    reshards = False

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.policy = self._own.choice((PLAIN, Policy(10, 30, 2, 60), Policy(0, 20, 0, 40), Policy(5, 60, 5, 90)))
        setup.lease_timeout, setup.concurrency = self._own.choice((10.0, 20.0)), 8
        self._ahead: list[tuple[float, float]] = []  # when the clock stepped forth, and by how many seconds
        self._unserved_at = -inf  # when there was no worker last
        self._closed: dict[str, float] = {}  # when a timeline was delivered last
        self._retry_at: dict[str, tuple[float, float]] = {}  # since when a timeline waits for its retry, and until when
        return setup

    def _choices(self) -> Sequence[Fault]:
        return [self._step] * 4 + [self._kill, self._leave, self._cut]

    async def _step(self) -> None:
        seconds = self._own.choice((2, 5, 30, 300, 3_600, 18_000)) * self._own.choice((-1, -1, 1))
        self.witness.tell(f"the server's clock steps by {seconds} s")
        self._server.step(seconds * 1000)
        self._ahead.append((self._loop.time(), max(0, seconds)))

    def _early(self, since: float) -> float:
        """How much a timeline may be early because the clock has stepped forth."""
        return sum(seconds for at, seconds in self._ahead if at >= since - 0.1) + 1.2

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        now, key, policy = self._loop.time(), digest.key, self._setup.policy
        self._see_not_early(receipt, now, policy)
        self._retry_at.pop(key, None)
        await asyncio.sleep(self._own.uniform(0, 0.5))
        if self._own.random() < 0.15 and self._setup.mood != "good":
            delay = self._own.uniform(2, 40)
            self._retry_at[key] = (self._loop.time(), self._loop.time() + delay)
            raise RetryAfter(delay)
        self._closed[key] = self._loop.time()

    def _see_not_early(self, receipt: Receipt, now: float, policy: Policy) -> None:
        """See that no digest comes before its wait has passed, but for steps forth."""
        key = receipt.key
        records = [self.witness.records.all[serial] for serial in receipt.serials]
        if any(len(record.receipts) > 1 for record in records):  # it comes again
            since, until = self._retry_at.get(key, (0.0, 0.0))
            if now < until - self._early(since):
                self.witness.broken(f"{key} is tried again {until - now:.1f} s before its wait has passed")
            return
        since = self._closed.get(key, -inf)
        wait = policy.cool_ms(1) / 1000
        if now < since + wait - self._early(since):
            self.witness.broken(f"{key} is delivered {now - since:.1f} s after its last digest, not {wait:g} s")
        # one that was added again under its id may have opened the window
        first = min(each.stored_at for each in self.witness.records.all.values() if each.key == key and each.stored_at)
        if since == -inf and now < first + policy.terms.initial_ms / 1000 - self._early(first):
            self.witness.broken(f"{key} is delivered {now - first:.1f} s after its first record")

    def _look(self) -> None:
        """See that nothing comes later than its wait, however far back the clock has stepped."""
        now, setup = self._loop.time(), self._setup
        if not any(actor.delivers and actor.has_entered for actor in self._actors):
            self._unserved_at = now
        terms = setup.policy.terms
        wait = max(terms.maximum_ms, terms.initial_ms, setup.policy.cool_ms(1)) / 1000
        slack = 5 * setup.lease_timeout + setup.drain_timeout + setup.pause
        for key in setup.keys:
            since = self.witness.records.oldest_waiting(key)
            retry = self._retry_at.get(key, (0.0, -inf))[1]
            if since is not None and now > max(since + wait, retry, self._unserved_at) + wait + slack:
                self.witness.broken(f"{key} has waited for {now - since:.0f} s; its policy says {wait:g} s")
            if retry > -inf and now > max(retry, self._unserved_at) + slack:
                self.witness.broken(f"the retry of {key} is {now - retry:.0f} s late")


class Fleets(Family):
    """Workers are there for a moment now and then, as where cron starts them, or a platform that scales to zero."""

    reshards = False

    def _choose(self) -> Setup:
        setup = super()._choose()
        setup.lease_timeout, setup.max_attempts = self._own.choice((6.0, 10.0, 20.0)), 12
        setup.drain_timeout, setup.timeout, setup.concurrency = 2.0, 1.0, self._own.choice((1, 4))
        setup.keys = setup.keys[:4]
        lease = setup.lease_timeout
        self._run = max(2.0, self._own.uniform(0.2, 1.5) * lease)  # seconds
        self._gap = self._own.uniform(0.4, 3) * lease
        self._ends = self._own.choice(("killed", "drained", "either"))
        return setup

    def _enter_all(self) -> None:
        self._deaf = False
        for _ in range(2):
            self._enter(True, False)

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        await asyncio.sleep(self._own.choice((0.01, 0.3, 3.0)))

    async def _be_troubled(self) -> None:
        ends = self._loop.time() + 16 * (self._run + self._gap)
        while self._loop.time() < ends:
            await self._run_once()
            await asyncio.sleep(self._gap)
        self._enter(False, True)

    async def _run_once(self) -> None:
        began = self._loop.time()
        workers = [self._enter(False, True) for _ in range(self._own.choice((1, 1, 2)))]
        await asyncio.sleep(self._run)
        self._see_recovered(began)
        killed = self._ends == "killed" or (self._ends == "either" and self._own.random() < 0.5)
        self.witness.trouble(self._gap)
        for actor in workers:
            self._actors.remove(actor)
            self._dead.append(actor)
            if killed:
                self.witness.tell(f"{actor.process}: killed")
                actor.process.kill()
            else:
                actor.leave()
        if not killed:
            for actor in workers:
                await self._see_leave(actor)

    def _see_recovered(self, began: float) -> None:
        """See that a run recovers what was held by one that was killed two leases and some runs before it began. Each
        of these may have had time for a single digest, and all the other timelines may have come first."""
        runs = 2 + len(self._setup.keys)
        late = 2 * self._setup.lease_timeout + runs * (self._run + self._gap) + self._setup.drain_timeout
        age = self._loop.time() - began
        for machine in self._server.store.machines:
            for key, end in machine.leased.items():
                ago = (self._server.now_ms() - end) / 1000 - age
                if ago > late:
                    self.witness.broken(f"the lease on {key} had ended {ago:.0f} s before this run, which leaves it")


class Limits(Family):
    """Adders and workers have policies of their own, dead letters come back, and a function sends at the full hour."""

    HOUR = 200.0
    CAPACITY = 30
    SMALL: ClassVar = Policy(20, 15, 0, 40, capacity=6)
    troubled = 600.0
    reshards = False

    def _choose(self) -> Setup:
        setup = super()._choose()
        self._delivers_by = self._own.choice((self.SMALL, self._of))
        daily = () if self._delivers_by is self.SMALL else ("daily",)
        setup.keys, setup.concurrency, setup.produce = ("k0", "k1", *daily), 4, self._produce
        max_size = self._own.choice((None, 8))
        setup.policy = Policy(20, 15, self._own.choice((0, 1)), 40, max_size=max_size, capacity=self.CAPACITY)
        self._pace = self._own.choice((0.5, 2.0))
        return setup

    def _of(self, key: str) -> Policy:
        if key != "daily":
            return self._setup.policy
        wait = self.HOUR - self._server.now_ms() / 1000 % self.HOUR
        return Policy(wait, wait, 0, 2 * self.HOUR, capacity=self.CAPACITY)

    def _enter_all(self) -> None:
        """Enter one that adds by a function, one that delivers by another policy or by that, and one without any."""
        self._deaf = False
        self._enter(True, False, self._of)
        self._enter(False, True, self._delivers_by)
        self._enter(True, False, NO_POLICY)

    async def _produce(self, actor: Actor) -> None:
        while True:
            await asyncio.sleep(self._own.expovariate(1 / self._pace))
            await actor.adding.wait()
            key = self._own.choice(self._setup.keys)
            if actor.policy is NO_POLICY:
                await self._operate(actor)
            elif key == "daily" and self._own.random() < 0.5:
                await actor.move(key)
            elif len(await self._server.store.operations.entries(key)) < (6 if key == "daily" else self.CAPACITY - 2):
                record_id = f"r{self._own.randint(1, 15)}"
                await actor.add(Entry(key, self.witness.records.new(key, record_id), record_id))
                self._see_full()

    async def _operate(self, actor: Actor) -> None:
        for machine in self._server.store.machines:
            for letter in list(machine.dead.values()):
                held = machine.held.get(letter.key)
                if distinct([*letter.entries, *(held.entries if held else ())]) <= self.CAPACITY:
                    await actor.bring_back(letter.id)

    def _choices(self) -> Sequence[Fault]:
        return [self._cut]

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        self._see_kept(digest)
        if digest.key == "daily":
            self._see_hour()
        elif self._own.random() < 0.3 and self._setup.mood != "good":
            raise Reject("not now")

    def _see_kept(self, digest: Digest[int]) -> None:
        """See that nothing is dropped by the capacity of an engine that has not added it."""
        if digest.dropped:
            self.witness.broken(f"{digest.dropped} of {digest.key} are dropped, and never did it hold {self.CAPACITY}")

    def _see_hour(self) -> None:
        past = self._server.now_ms() / 1000 % self.HOUR
        if past > 20:
            self.witness.broken(f"what is sent at the full hour is sent {past:.0f} s after it")

    def _see_full(self) -> None:
        """See that an add after which a timeline holds max_size records makes it due at once."""
        for machine in self._server.store.machines:
            for key in machine.waiting:
                held = machine.held[key]
                if not held.delivery and held.own and 0 < held.own.max_size <= distinct(held.log):
                    self.witness.broken(f"{key} holds {distinct(held.log)} records, and waits")


class Receivers(Family):
    """Up to half of the receivers are broken or hang. Healthy ones wait little longer than with backoff mode off."""

    backs_off = True
    reads_slowly = False
    LATE, MOST = 5.0, 20.0  # seconds: in nearly all worlds, and in all
    ONE_IN = 100  # worlds, at the most, in which one waits for longer than LATE
    MEASURED = 0.005  # of them: it was 13 of 2,840
    LASTS, ARRIVALS = 240.0, 60.0

    def _choose(self) -> Setup:
        setup = super()._choose()
        own = self._own = Random(f"{self._seed} receivers")  # the same for both
        setup.threshold, setup.pause = 20, 120.0 if self.backs_off else 0.0
        setup.concurrency, setup.lease_timeout = own.choice((8, 16, 64)), 60.0
        setup.delivery_timeout, setup.longest_wait = own.choice((10.0, 30.0)), own.choice((10.0, 3600.0))
        setup.drain_timeout = 5.0
        number, kind = own.randint(30, 150), own.choice(("raises", "raises", "hangs", "mixed"))
        share = own.uniform(0, 0.5)
        names = [f"k{each:03}" for each in range(number)]
        broken = round(share * number)
        first = own.choice((0, 0, own.randrange(number - broken + 1), number - broken))
        chosen = own.choice((names[first : first + broken], own.sample(names, broken)))
        kinds = ("raises", "is slow", "hangs") if kind == "mixed" else (kind,)
        self._kinds = {name: own.choice(kinds) for name in chosen}
        self._at_once, self._share, self._rate = names, share, own.choice((0.5, 2.0))
        self._added: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        return setup

    def _enter_all(self) -> None:
        self._deaf = False
        for _ in range(self._own.choice((1, 1, 2))):
            self._enter(False, True)

    async def _receive(self, actor: Actor, receipt: Receipt, digest: Digest[int]) -> None:
        kind = self._kinds.get(digest.key)
        if kind is None:
            self._begun.setdefault(digest.key, self._loop.time())
            await asyncio.sleep(0.005)
            return
        await asyncio.sleep({"raises": 0.005, "is slow": 2.0, "hangs": inf}[kind])
        raise RuntimeError("the receiver is broken")

    async def _plot(self) -> None:
        own, began = self._own, self._loop.time()
        await self._add(self._at_once)
        for number in count(len(self._at_once)):
            await asyncio.sleep(own.expovariate(self._rate))
            if self._loop.time() > began + self.ARRIVALS:
                break
            name = f"k{number:03}"
            if own.random() < self._share:
                self._kinds[name] = own.choice([*self._kinds.values(), "raises"])
            await self._add([name])
        await asyncio.sleep(began + self.LASTS - self._loop.time())
        now = self._loop.time()
        if not self.witness.fault:
            self.witness.tell(f"{self._kinds=} {self._share=}")
        waits = [self._begun.get(key, now) - at for key, at in self._added.items() if key not in self._kinds]
        self.witness.waited = max(waits, default=0.0)
        for actor in self._actors:
            actor.leave()
        for actor in self._actors:
            await self._see_leave(actor)

    async def _add(self, names: list[str]) -> None:
        store, records = self._server.store, self.witness.records
        for name in names:
            entry = pack(b"r", None, b"\x01%d" % records.new(name, "r"))
            adds = [Add(name, entry, self._setup.policy.terms)]
            records.added(adds, await store.add(store.shard_map.shard_of(name), adds))
            self._added[name] = self._loop.time()

    @classmethod
    def played(cls, seed: int) -> Witness:
        """Play it with backoff mode and without."""
        on, off = play(seed, cls), play(seed, _Untiring)
        on.waited -= off.waited
        if on.waited > cls.MOST:
            on.broken(f"a healthy receiver waits {on.waited:.1f} s longer than with backoff mode off")
        return on

    @classmethod
    def allowed(cls, worlds: int) -> int:
        """Return in how many of these a healthy receiver may wait for longer than LATE."""
        # Of few worlds more than one in ONE_IN may be late by chance, of 71 as many as 3: if each is with the
        # probability MEASURED, a run must not fail more than once in a thousand, by the binomial distribution.
        late, odds = 0, cls.MEASURED / (1 - cls.MEASURED)
        likely = (1 - cls.MEASURED) ** worlds  # that it is so many
        more = 1 - likely
        while more > 0.001:
            late += 1
            likely *= odds * (worlds - late + 1) / late
            more -= likely
        return max(late, worlds // cls.ONE_IN)


class _Untiring(Receivers):
    backs_off = False


FAMILIES: dict[str, type[World]] = {
    "receivers": Receivers, "poison": Poison, "blocking": Blocking, "partitions": Partitions, "clocks": Clocks,
    "fleets": Fleets, "limits": Limits,
}  # fmt: skip


def family_of(seed: int) -> str:
    """The kind of trouble of a seed's second world."""
    return list(FAMILIES)[seed % len(FAMILIES)]


def played(seed: int) -> Iterator[Witness]:
    """Play the worlds of a seed: the one in which anything may happen, and one of a single kind of trouble."""
    yield World.played(seed)
    yield FAMILIES[family_of(seed)].played(seed)
