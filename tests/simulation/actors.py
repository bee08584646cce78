"""Who lives in a simulated world: processes that add, and processes that deliver."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from random import Random
from typing import Any, cast

from aiodigest import (
    AiodigestError,
    BackendUnavailable,
    BackoffMode,
    Bounds,
    DecorrelatedJitter,
    Digest,
    DigestEngine,
    Entry,
    InvalidState,
    LimitExceeded,
    PartialAdd,
    PartialFailure,
    Reject,
    RetryAfter,
    RetryPolicy,
)
from aiodigest.errors import DeliverySignal
from aiodigest.policy import PolicySource
from aiodigest.session.background import BackgroundSession
from aiodigest.worker import batcher
from simulation.loop import Process, SeededLoop
from simulation.network import Link, Server
from simulation.records import Receipt
from simulation.witness import Conduct, Witness

LARGEST = 60  # bytes of an add
MANY = 10  # adds of a call, at the most


class Actor:
    """A process with an engine: it adds, or delivers, or both, until it is asked to leave or is killed."""

    def __init__(
        self,
        name: str,
        server: Server,
        witness: Witness,
        random: Random,
        *,
        adds: bool,
        delivers: bool,
        fall: Callable[[Actor], None],
        policy: PolicySource | None = None,
    ) -> None:
        self.process = Process(name)
        self.adds, self.delivers, self.policy = adds, delivers, policy
        self._server = server
        self.link = Link(server, self.process, witness, random)
        self.adding = asyncio.Event()  # it goes on adding while this is set
        self.adding.set()
        self._pace = random.choice((2.0, 6.0, 20.0))  # seconds between its adds, on average
        self._witness = witness
        self._setup = setup = witness.setup
        self._random = random
        self._loop = cast("SeededLoop", asyncio.get_running_loop())
        self._whims = Random()  # a twin, so that whims change nothing else
        self._whims.setstate(random.getstate())
        self._leave = asyncio.Event()
        self.has_entered = False
        backoff = DecorrelatedJitter(base=1, cap=setup.longest_wait)
        self._fall = fall  # what kills it
        retry = RetryPolicy(max_attempts=setup.max_attempts, backoff=backoff)
        rules = None if policy else setup.rules
        self.engine = DigestEngine[int](
            namespace="simulated",
            backend=self.link,
            value_type=int,
            policy=policy or (rules.source if rules else setup.policy),
            retry=rules.retry(retry) if rules else retry,
            backoff_mode=BackoffMode(threshold=setup.threshold, multiplier=1, maximum=setup.pause),
            concurrency=setup.concurrency,
            lease_timeout=setup.lease_timeout,
            delivery_timeout=setup.delivery_timeout,
            drain_timeout=setup.drain_timeout,
            throttle=setup.throttle,
            timeout=setup.timeout,
            bounds=Bounds(records=MANY, value=8, digest=setup.digest_bytes),
        )
        self.engine.observe(witness.told)
        self.conduct = witness.conducts[self.process] = Conduct(self.engine, delivers, self._loop.time())
        self.life = self.process.start(self._live())

    async def _live(self) -> None:
        self._witness.tell("enters")
        entered = self.engine.delivering(self._callback) if self.delivers else self.engine
        await self._give_up()
        await entered.__aenter__()
        self.has_entered = True
        chores = [asyncio.create_task((self._setup.produce or Actor.produce)(self))] if self.adds else []
        await self._leave.wait()
        for chore in chores:
            chore.cancel()
            await asyncio.wait([chore])
        await self._go(entered)
        self._witness.tell("has left")

    async def _give_up(self) -> None:
        """Begin to enter, and be cancelled, now and then."""
        if self._whims.random() < 0.2:
            entering = asyncio.create_task(self.engine.__aenter__())
            await asyncio.wait([entering], timeout=self._whims.choice((0, 0.0005, 0.002)))
            if not entering.cancel():
                await self.engine.__aexit__(None, None, None)
            await asyncio.wait([entering])
            self._witness.tell("has begun to enter, and given up")

    async def _go(self, entered: AbstractAsyncContextManager[object]) -> None:
        """Leave; now and then who waits for that is cancelled."""
        leaving = asyncio.create_task(entered.__aexit__(None, None, None))
        if self._whims.random() < 0.2:
            await asyncio.wait([leaving], timeout=self._whims.uniform(0, self._setup.drain_timeout))
            self.conduct.hurried = leaving.cancel()
            await asyncio.wait([leaving])
            if self.conduct.hurried:
                if not leaving.cancelled():
                    self._witness.broken(f"{self.process} was cancelled while it left, and knows nothing of it")
                return
        await leaving

    def leave(self) -> None:
        """Ask it to leave, as SIGTERM does."""
        self.conduct.leaving_since = self._loop.time()
        self._leave.set()

    # Adding

    async def produce(self) -> None:
        random = self._random
        while True:
            await asyncio.sleep(random.expovariate(1 / self._pace))
            await self.adding.wait()
            if self._witness.strict or not self._setup.meddles or random.random() < 0.9:
                await self._add_something()
            else:
                await self._meddle()

    async def _add_something(self) -> None:
        random, kind = self._random, self._random.random()
        if kind < 0.7:
            await self.add()
        elif kind < 0.8:
            await self._add_many(random.randint(2, 12))
        elif kind < 0.9 and not self._witness.strict:
            task = asyncio.create_task(self.add())
            await asyncio.sleep(random.choice((0.0, 0.0, 0.0005, 0.5)))
            task.cancel()
            await asyncio.wait([task])
        else:
            await asyncio.gather(*(self.add() for _ in range(random.randint(2, 6))))

    def _entry(self) -> Entry[int]:
        random = self._random
        key = random.choice(self._setup.keys)
        record_id = f"r{random.randint(1, 5)}" if random.random() < 0.2 else f"u{random.getrandbits(40)}"
        serial = self._witness.records.new(key, record_id)
        stamp = random.uniform(0, 2e9) if random.random() < 0.1 else None
        is_urgent = self._setup.rules is not None and self._whims.random() < 0.06
        return Entry(key, serial, record_id, stamp, is_urgent)

    async def add(self, entry: Entry[int] | None = None) -> None:
        """Add one record, and note what its caller is told."""
        entry, witness, began = entry or self._entry(), self._witness, self._loop.time()
        witness.tell(f"adds {entry.value} to {entry.key} as {entry.record_id}")
        session = self.engine._session
        for adds in session._adder._batchers.values() if isinstance(session, BackgroundSession) else ():
            if adds._items > batcher.QUEUE_ITEMS or adds._bytes > batcher.QUEUE_BYTES + LARGEST:
                witness.broken(f"{adds._items} adds of {adds._bytes} bytes wait, for whom there is no room")
        try:
            named = {"record_id": entry.record_id, "timestamp": entry.timestamp}
            ready = await self.engine.add(entry.key, entry.value, urgent=entry.urgent, **cast("Any", named))
        except asyncio.CancelledError:
            witness.tell(f"cancelled the add of {entry.value}")
            witness.records.all[entry.value].cancelled = True
            raise
        except AiodigestError as error:
            self._answered(entry, error)
        else:
            self._answered(entry, ready)
            # it must be delivered at once, if there is somebody who can, unless it may be too old for a callback
            if (
                ready
                and self._setup.policy_of(entry.key).max_age is None
                and witness.strict
                and self._setup.throttle is None
                and (self.delivers or not self.link.deaf)
            ):
                self._loop.run_apart(2.0, witness.expect, entry.key, began)
        took = self._loop.time() - began
        if took > self._setup.timeout + 0.1 and self.process.went_on_at < began:
            witness.broken(f"an add took {took:.3f} s; its timeout is {self._setup.timeout:g} s")

    def _answered(self, entry: Entry[int], answer: bool | AiodigestError) -> None:
        witness = self._witness
        if isinstance(answer, bool):
            witness.records.add_returned(entry.value, answer)
            return
        witness.tell(f"add of {entry.value} failed: {answer}")
        witness.records.add_failed(entry.value, answer)
        if witness.strict and not isinstance(answer, LimitExceeded):
            witness.broken(f"an add fails, and nothing is wrong: {answer}")

    async def _add_many(self, number: int) -> None:
        entries = [self._entry() for _ in range(number)]
        self._witness.tell(f"adds {[entry.value for entry in entries]}")
        try:
            results: list[bool | AiodigestError] = [*await self.engine.add_many(entries)]
        except PartialAdd as partial:
            results = partial.results
        except LimitExceeded as error:
            results = [error] * number
        if number > MANY and not all(isinstance(result, LimitExceeded) for result in results):
            self._witness.broken(f"{number} adds in a call, of which there may be {MANY}")
        for entry, result in zip(entries, results, strict=True):
            self._answered(entry, result)

    async def _meddle(self) -> None:
        random, engine = self._random, self.engine
        key = random.choice(self._setup.keys)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: engine.flush(key),
            lambda: engine.reschedule(key, delay=random.uniform(0, 60)),
            lambda: engine.reschedule(key),
            lambda: engine.peek(key),
            engine.stats,
            self._replay,
            self._replay,
        ]
        if self._setup.rules:
            calls.append(lambda: engine.explain(key))
        if random.random() < 0.3:
            calls = [lambda: engine.delete(key), lambda: engine.remove(key, f"r{random.randint(1, 5)}")]
        try:
            await random.choice(calls)()
        except (InvalidState, LimitExceeded):
            pass
        except AiodigestError as error:
            self._witness.tell(f"failed: {error}")

    async def take_away(self, key: str, record_id: str | None) -> None:
        """Delete a timeline, or remove one of its records."""
        try:
            await (self.engine.remove(key, record_id) if record_id else self.engine.delete(key))
        except AiodigestError as error:
            self._witness.tell(f"taking {key} {record_id or ''} away failed: {error}")

    async def move(self, key: str) -> None:
        """Move a timeline to the time that its policy says."""
        with suppress(InvalidState, BackendUnavailable):
            due = await self.engine.reschedule(key)
            self._witness.tell(f"moves {key} to {due.timestamp()}")

    async def bring_back(self, letter_id: str) -> None:
        """Replay a dead letter."""
        with suppress(InvalidState, BackendUnavailable):
            await self.engine.replay(letter_id)

    async def _replay(self) -> None:
        async for letter in self.engine.dead_letters():
            if self._random.random() < 0.1:
                await self.engine.discard(letter.id)
            else:
                await self.engine.replay(letter.id)

    # Delivering

    async def _callback(self, digest: Digest[int]) -> None:
        if not self.process.alive:
            return
        receipt = self._witness.begun(self.process, digest, self._server.now_ms(), self._server.stepped_at)
        task = asyncio.current_task()
        assert task is not None
        try:
            await (self._setup.receive or Actor.behave)(self, receipt, digest)
            receipt.ending = "returned"
        except PartialFailure as signal:
            known = {record.id: record.value for record in digest.records}
            strangers = any(record_id not in known for record_id in signal.failed)
            receipt.ending = "raised" if strangers else "partial" if signal.failed else "returned"
            receipt.tells = False
            receipt.failed = frozenset(known.get(record_id, 0) for record_id in signal.failed)
            raise
        except BaseException as error:
            receipt.ending = "cut" if task.cancelling() else "raised"
            receipt.tells = not isinstance(error, DeliverySignal)
            raise
        finally:
            if self.process.alive:
                self._witness.ended(receipt)

    async def behave(self, receipt: Receipt, digest: Digest[int]) -> None:
        random, setup = self._random, self._setup
        if digest.key == setup.poison:
            self._fall(self)
        dice = random.random() if setup.mood != "failing" else 0.35
        if setup.mood == "good":
            longest = min(1.5 * setup.lease_timeout, 0.9 * setup.delivery_timeout)
            await asyncio.sleep(longest if dice < 0.01 else 0.2 * random.random())
        elif dice < 0.3:
            await asyncio.sleep(random.choice((0, 0.01, 0.3)))
        elif dice < 0.4:
            await asyncio.sleep(random.choice((0, 0.1)))
            raise random.choice((RuntimeError("the receiver fails"), asyncio.CancelledError(), SystemExit(1)))
        elif dice < 0.45:
            delay, pause = random.uniform(0, 20), random.random() < 0.5
            if pause:
                ends = self._loop.time() + max(1.0, delay)
                self.conduct.silent_until = max(self.conduct.silent_until, ends)
            raise RetryAfter(delay, pause=pause)
        elif dice < 0.5:
            raise Reject("nobody is there")
        elif dice < 0.6:
            ids = [record.id for record in digest.records if random.random() < 0.5]
            raise PartialFailure([*ids, "a stranger"] if random.random() < 0.2 else ids)
        elif dice < 0.65:
            await asyncio.Event().wait()
        elif dice < 0.68:
            await self.block(random.uniform(0, 1.5 * setup.lease_timeout))
        elif dice < 0.7 or setup.stubborn:
            await self._ignore_end(receipt)
        else:
            await asyncio.sleep(random.uniform(0, 1.2 * setup.lease_timeout))

    async def block(self, seconds: float) -> None:
        """Block the loop: nothing of this process runs meanwhile."""
        self._witness.tell(f"blocks for {seconds:.3f} s")
        self._witness.trouble(seconds)
        self.process.stop()
        self._loop.run_apart(seconds, lambda: self.process.alive and self.process.go_on())
        await asyncio.sleep(0)

    async def _ignore_end(self, receipt: Receipt) -> None:
        receipt.stubborn = True
        try:
            await asyncio.sleep(self._random.uniform(0, 2 * self._setup.delivery_timeout))
        except asyncio.CancelledError:
            self._witness.cancelled(receipt)
            ends = self._loop.time() + self._random.uniform(0, 5)
            if self._whims.random() < 0.5:
                ends += self._whims.uniform(0, 3 * self._setup.lease_timeout)
            while self.process.alive and (rest := ends - self._loop.time()) > 0:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(rest)
