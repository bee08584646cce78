"""Sees all that happens in a simulated world, and says which promise is broken."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from storestate import check_invariants, reference_state

from aiodigest import Delivery, Digest
from aiodigest.backend import Claims, Close, Lease
from aiodigest.backoff import PROBE_TIMEOUT, PROBES
from simulation.loop import PROCESS, Process, SeededLoop
from simulation.records import Receipt, Records
from simulation.store import Store


@dataclass(frozen=True)
class Setup:
    """How the engines of a world are made, as far as the promises depend on it."""

    shards: int
    concurrency: int
    lease_timeout: float
    delivery_timeout: float
    drain_timeout: float
    timeout: float
    max_attempts: int
    threshold: int
    longest_rest: float
    max_size: int | None
    capacity: int


@dataclass
class Conduct:
    """What is known of one process."""

    setup: Setup
    delivers: bool
    backs_off: Callable[[], bool]
    since: float  # when its process began
    held: dict[str, float] = field(default_factory=dict[str, float])  # token of a lease: counted from when
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # of the leases, by their digests
    given_up: set[str] = field(default_factory=set[str])  # digests whose leases it took for over
    sent: Counter[str] = field(default_factory=Counter[str])
    recent: defaultdict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=200)))
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=60))  # of claims
    away: bool = False  # its last claim or renewal failed
    unavailable: bool = False  # as it says itself
    silent_until: float = 0.0  # it was asked to claim nothing
    failed: set[str] = field(default_factory=set[str])  # timelines that have not succeeded since
    in_a_row: int = 0  # that began to fail since anything succeeded
    spared_since: float | None = None
    resumed_at: float = 0.0  # when it was spared no more
    leaving_since: float | None = None
    hurried: bool = False  # who waited for it to leave was cancelled


class Witness:
    """Notes what happens, and what of it must not; ``over`` is set by the first broken promise."""

    def __init__(self, loop: SeededLoop, store: Store) -> None:
        self.store = store
        self.story: list[str] = []
        self.fault = ""
        self.over = asyncio.Event()
        self.records = Records(self.broken)
        self.receipts: list[Receipt] = []
        self.conducts: dict[Process, Conduct] = {}
        self.strict = False  # nothing is wrong with the world: everything must go by the book
        self.calm_since = loop.time()  # no fault since; in the future while there is one
        self._loop = loop
        self._start = loop.time()
        self.begun_at: dict[str, float] = {}
        self.removed_at: dict[str, float] = {}
        self._owners: dict[str, Process] = {}
        self._leased_at: dict[str, float] = {}  # by digest

    @property
    def lasted(self) -> float:
        """How many seconds have passed in its world."""
        return self._loop.time() - self._start

    def tell(self, text: str) -> None:
        process = PROCESS.get()
        self.story.append(f"{self._loop.time() - self._start:9.3f}  {process.name if process else '':12}  {text}")

    def broken(self, text: str) -> None:
        self.tell(f"BROKEN: {text}")
        if not self.fault:
            self.fault = text
            self.over.set()

    def calm_for(self, seconds: float) -> bool:
        return self._loop.time() - self.calm_since > seconds

    def trouble(self, seconds: float = 0.0) -> None:
        """Something goes wrong now, for so long."""
        self.calm_since = max(self.calm_since, self._loop.time() + seconds)

    # What the network carries

    def sent(self, process: Process, call: str) -> None:
        conduct, now = self.conducts[process], self._loop.time()
        conduct.sent[call] += 1
        recent = conduct.recent[call]
        recent.append(now)
        if len(recent) == 200 and now - recent[0] < 1 and call != "read":
            self.broken(f"{process} sent 200 calls of {call} within a second")

    def failed(self, process: Process, call: str) -> None:
        conduct, now = self.conducts[process], self._loop.time()
        self.tell(f"{call} failed")
        if call in ("claim", "renew"):
            conduct.away = True
        if call == "claim":
            conduct.failures.append(now)
            if len(conduct.failures) == 60 and now - conduct.failures[0] < 10 / self.store.shard_map.count:
                self.broken(f"{process} tried 60 claims within {now - conduct.failures[0]:.1f} s of an outage")

    def answered(self, process: Process, call: str) -> None:
        if call == "renew":
            self.conducts[process].away = False

    def claiming(self, process: Process, slots: int) -> None:
        conduct, now = self.conducts[process], self._loop.time()
        if now < conduct.silent_until - 1e-6:
            self.broken(f"{process} claims, and was asked to pause until {conduct.silent_until - self._start:.3f}")
        shards = self.store.shard_map.count
        if slots > conduct.setup.concurrency:
            self.broken(f"{process} claims {slots} digests, and may deliver {conduct.setup.concurrency}")
        if conduct.away and shards == 1 and self._running(process):
            self.broken(f"{process} claims before it has renewed what it holds")
        conduct.away = False

    def leased(self, process: Process, claims: Claims) -> None:
        for lease in claims.leases:
            self._owners[lease.token] = process
            self.conducts[process].given_up.discard(lease.digest_id)
            self._leased_at[lease.digest_id] = self._loop.time()
        if claims.leases:
            self.tell(f"{process} leases {', '.join(f'{lease.key} {lease.digest_id}' for lease in claims.leases)}")

    def holds(self, process: Process, leases: Iterable[Lease], since: float) -> None:
        for lease in leases:
            self.conducts[process].held[lease.token] = since
            self.conducts[process].tokens[lease.digest_id] = lease.token

    def holds_no_more(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            owner = self._owners.get(lease.token)
            if owner is not None:
                self.conducts[owner].held.pop(lease.token, None)

    def burying(self, close: Close) -> None:
        """See that what was planted, and cannot be decoded, is one dead letter: there is one reason."""
        planted = [
            letter for letter in close.dead_letters if letter.ids and all(i.startswith(b"bad-") for i in letter.ids)
        ]
        if len(planted) > 1:
            self.broken(f"{len(planted)} dead letters for one reason: {[letter.reason for letter in planted]}")

    def removed(self, key: str, record_id: str | None = None) -> None:
        self.tell(f"{key} {record_id or ''} removed")
        self.removed_at[key] = self._loop.time()
        self.records.removed(key, record_id)

    # What callbacks are given

    def _running(self, process: Process | None = None) -> list[Receipt]:
        self.receipts = [receipt for receipt in self.receipts if receipt.ending == "running"]
        return [receipt for receipt in self.receipts if process in (None, receipt.process)]

    def begun(self, process: Process, digest: Digest[int]) -> Receipt:
        conduct, now = self.conducts[process], self._loop.time()
        removed = self.removed_at.get(digest.key, 0.0) >= self._leased_at.get(digest.id, now)  # and is read to its end
        for other in self._running():
            if (
                other.key == digest.key
                and not removed
                and not self._removed_since(other)
                and self._answers_for(other, conduct.setup.lease_timeout * 2)
                and not self.store.moved_at  # else it may be in an old and a new shard
            ):
                self.broken(f"{other.process} and {process} deliver {digest.key} at the same time")
        since = conduct.leaving_since
        if since is not None and now > since + 0.5 and process.went_on_at < since:
            self.broken(f"{process} begins {digest.id}, and was asked to leave {now - since:.1f} s before")
        if digest.id in conduct.given_up:
            self.broken(f"{process} begins {digest.id} under a lease that it took for over")
        receipt = self.records.begun(process, digest, now)
        self.tell(f"begins {digest.id} of {digest.key}: {receipt.serials}, attempt {digest.attempt}")
        if digest.attempt > conduct.setup.max_attempts:
            self.broken(f"digest {digest.id} is tried for the {digest.attempt}th time")
        if len(receipt.serials) > (conduct.setup.max_size or conduct.setup.capacity):
            self.broken(f"digest {digest.id} holds {len(receipt.serials)} records")
        spared = (conduct.spared_since or now) + 3 * conduct.setup.timeout  # by then nobody answers an earlier claim
        spared = max(spared, now - PROBE_TIMEOUT)  # what has taken longer lets another through
        if sum(self._taken_at(other) > spared for other in (receipt, *self._running(process))) > PROBES:
            self.broken(f"{process} delivers more than {PROBES} at once to a receiver that fails")
        self.receipts.append(receipt)
        under_way = [other for other in self._running(process) if not other.stubborn]
        if len(under_way) > conduct.setup.concurrency:
            self.broken(f"{process} delivers {len(under_way)} digests at once")
        self.begun_at[digest.key] = now
        return receipt

    def goes_on(self, process: Process, digest_id: str, rest_id: str) -> None:
        """The rest of a digest in parts is delivered under the same lease, with an id of its own."""
        self._leased_at[rest_id] = self._leased_at.get(digest_id, self._loop.time())
        given_up = self.conducts[process].given_up
        if digest_id in given_up:
            given_up.add(rest_id)

    def cancelled(self, receipt: Receipt) -> None:
        """A callback was cancelled: with the lease of its digest, unless its time is over or its process leaves."""
        conduct = self.conducts[receipt.process]
        is_in_time = self._loop.time() < receipt.began + conduct.setup.delivery_timeout - 0.01
        if is_in_time and conduct.leaving_since is None:
            conduct.given_up.add(receipt.digest_id)

    def _taken_at(self, receipt: Receipt) -> float:
        """When its lease was given; its entries may have been read for long after that."""
        return self._leased_at.get(receipt.digest_id, receipt.began)

    def _removed_since(self, receipt: Receipt) -> bool:
        """Whether something of its timeline was removed after its lease was given."""
        return self.removed_at.get(receipt.key, 0.0) >= self._taken_at(receipt)

    def _answers_for(self, receipt: Receipt, window: float) -> bool:
        """Whether a process that runs a callback has been in a state to end it when its lease did."""
        process = receipt.process
        healthy = process.alive and not process.stopped and process.went_on_at < receipt.began
        return healthy and not receipt.stubborn and self.calm_for(window)

    def ended(self, receipt: Receipt) -> None:
        receipt.ended = self._loop.time()
        conduct = self.conducts[receipt.process]
        self.tell(f"{receipt.digest_id} of {receipt.key} {receipt.ending}")
        if receipt.ending == "cut":
            self._see_cut(receipt, conduct)
            self.cancelled(receipt)
        if receipt.ending == "returned":
            conduct.failed.discard(receipt.key)
            conduct.in_a_row = 0
            if conduct.spared_since is not None:
                conduct.spared_since, conduct.resumed_at = None, receipt.ended
        elif receipt.ending == "raised" and receipt.tells:
            if receipt.key not in conduct.failed and receipt.began >= conduct.resumed_at:
                conduct.failed.add(receipt.key)
                conduct.in_a_row += 1
            if conduct.in_a_row >= conduct.setup.threshold and conduct.spared_since is None:
                conduct.spared_since = receipt.ended

    def _see_cut(self, receipt: Receipt, conduct: Conduct) -> None:
        lasted, setup = receipt.ended - receipt.began, conduct.setup
        if lasted >= setup.delivery_timeout - 0.01 or receipt.stubborn or not self.calm_for(2 * setup.lease_timeout):
            return
        if self._removed_since(receipt) or conduct.hurried:
            return
        since = conduct.leaving_since
        if since is None or receipt.ended < since + setup.drain_timeout - 0.01:
            self.broken(f"the callback of {receipt.digest_id} was cut short after {lasted:.3f} s for no reason")

    def told(self, delivery: Delivery) -> None:
        """An observer is told of a delivery, whose outcome the store knows."""
        self.tell(f"told {delivery.result} of {delivery.digest_id}")
        if delivery.result not in ("delivered", "partial"):
            return
        serials = self.records.contents[delivery.digest_id]
        receipts = [
            receipt for receipt in self.records.all[serials[0]].receipts if receipt.digest_id == delivery.digest_id
        ]
        if delivery.result == "partial" and (delivery.attempt > 1 or len(receipts) > 1):
            return  # its contents may be frozen: then all of it comes again
        for receipt in receipts:
            receipt.told = receipt.told or receipt.ending in ("returned", "partial")

    def asked_to_pause(self, process: Process, seconds: float) -> None:
        conduct = self.conducts[process]
        conduct.silent_until = max(conduct.silent_until, self._loop.time() + seconds)

    def expect(self, key: str, since: float) -> None:
        """See that a timeline that was made ready has been delivered, if there was a free slot for it."""
        if self.begun_at.get(key, 0.0) >= since or not self.strict:
            return
        if any(key in machine.leased for machine in self.store.machines):  # its turn has come this moment
            return
        for process, conduct in self.conducts.items():
            there = conduct.delivers and process.alive and conduct.leaving_since is None and not conduct.backs_off()
            if there and len(self._running(process)) < conduct.setup.concurrency:
                self.broken(f"{key} was ready at {since - self._start:.3f}, and {process} does not deliver it")

    # What a look around shows

    def look(self, store: Store, now_ms: int) -> None:
        """See that the store is in order, and that what should have ended has."""
        now = self._loop.time()
        for machine in store.machines:
            try:
                check_invariants(reference_state(machine))
            except AssertionError as error:
                self.broken(f"the store is out of order: {error}")
        for receipt in self._running():
            conduct = self.conducts[receipt.process]
            process, setup = receipt.process, conduct.setup
            if not process.alive or process.stopped or process.went_on_at > receipt.began:
                continue
            if receipt.stubborn:
                self._see_on_done(store, receipt, conduct)
                continue
            since = conduct.held.get(conduct.tokens.get(receipt.digest_id, ""), receipt.began)
            if now > max(since, receipt.began) + setup.lease_timeout + 1:
                self.broken(f"the callback of {receipt.digest_id} outlives the lease of {process}")
            if now > receipt.began + setup.delivery_timeout + 1:
                self.broken(f"the callback of {receipt.digest_id} outlives its delivery_timeout")
        self._see_marks(store, now_ms)
        for conduct in list(self.conducts.values())[:1]:
            bound_ms = (2 * conduct.setup.lease_timeout + conduct.setup.longest_rest + 10) * 1000
            for machine in store.machines if self.calm_for(bound_ms / 1000) else ():
                for key, end in machine.leased.items():
                    if now_ms > end + bound_ms:
                        self.broken(f"the lease on {key} ended long ago, and nobody has taken it over")

    def _see_on_done(self, store: Store, receipt: Receipt, conduct: Conduct) -> None:
        """See that a callback that ignores its end does not keep its lease."""
        if self._taken_at(receipt) > receipt.began:
            return  # another attempt holds its digest
        for machine in store.machines:
            held = machine.held.get(receipt.key)
            if held and held.delivery and held.delivery.digest_id == receipt.digest_id:
                renewed = conduct.held.get(held.delivery.token, 0.0)
                if renewed > receipt.began + conduct.setup.delivery_timeout + 1:
                    self.broken(f"the lease of {receipt.digest_id} is renewed, and its callback ignores its end")

    def _see_marks(self, store: Store, now_ms: int) -> None:
        """See that a worker tells the store that it is there, also one that rests."""
        now = self._loop.time()
        for process, conduct in self.conducts.items():
            lease = conduct.setup.lease_timeout
            before = now - 1.5 * lease
            is_there = process.alive and not process.stopped and conduct.leaving_since is None and conduct.delivers
            if is_there and max(conduct.since, process.went_on_at) < before and self.calm_for(1.5 * lease):
                served = [machine for shard, machine in enumerate(store.machines) if shard not in store.retired]
                if self.store.moved_at > before:
                    continue
                late = max(abs(now_ms - machine.seen_ms) for machine in served) / 1000
                if late > lease / 2 + 1:
                    self.broken(f"{process} has not told the store for {late:.1f} s that it is there")

    def left(self, process: Process, store: Store) -> None:
        """See that a process that has left in good order has given back what it held."""
        conduct = self.conducts[process]
        since = self._loop.time() - conduct.setup.lease_timeout  # what ended by itself is nobody's any more
        if process.went_on_at > since:
            return  # it may have given up what a renewal on its way has extended
        for machine in store.machines:
            for key in machine.leased:
                delivery = machine.held[key].delivery
                if delivery is None or delivery.digest_id in conduct.given_up:
                    continue  # a renewal that hung may have been answered after that
                if conduct.held.get(delivery.token, since) > since:
                    self.broken(f"{process} has left, and still holds {key}")


class Ears(logging.Handler):
    """Hears what the processes of a world log."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self._witness = witness

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        if process is None or not process.alive:
            return
        witness, text = self._witness, record.getMessage()
        witness.tell(f"{record.levelname.lower()}: {text}")
        conduct = witness.conducts[process]
        if "a fault of aiodigest" in text:
            witness.broken(f"{text}: {record.exc_info and record.exc_info[1]!r}")
        elif "chosen shards" in text or "were chosen" in text:
            witness.broken(f"nobody has chosen shards: {text}")
        elif "available again" in text:
            conduct.unavailable = False
        elif "is unavailable" in text:
            if conduct.unavailable:
                witness.broken(f"{process} says twice that the server is unavailable")
            conduct.unavailable = True
        elif witness.strict and record.levelno >= logging.WARNING and not text.startswith("stopped with"):
            witness.broken(f"{process} complains, and nothing is wrong: {text}")
