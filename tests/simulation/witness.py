"""Sees all that happens in a simulated world, and says which promise is broken."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from storestate import check_invariants, reference_state

from aiodigest import Delivery, Digest, DigestEngine, Policy, Throttle
from aiodigest.backend import ALONE, Claims, Close, Lease, Mute
from aiodigest.backoff import PROBE_PERIOD, PROBE_TIMEOUT, PROBES
from simulation.ledger import Ledger
from simulation.loop import PROCESS, Process, SeededLoop
from simulation.records import Receipt, Records
from simulation.rules import Rules
from simulation.store import Store


@dataclass
class Setup:
    """What a seed has chosen for all engines of its world."""

    policy: Policy
    shards: int
    concurrency: int
    lease_timeout: float
    delivery_timeout: float
    drain_timeout: float
    timeout: float
    max_attempts: int
    threshold: int  # of the backoff mode
    pause: float  # its maximum
    keys: tuple[str, ...]
    digest_bytes: int  # of the values of a digest
    stubborn: bool  # many callbacks go on after they were cancelled
    poison: str  # the timeline whose digests kill their process, until there is peace; '' for none
    mood: Literal["good", "mixed", "failing"] = "mixed"  # of the receiver
    receive: Callable[[Any, Receipt, Digest[int]], Awaitable[None]] | None = None  # for an actor, instead of its mood
    produce: Callable[[Any], Coroutine[Any, Any, None]] | None = None  # by an actor, instead of what it would add
    meddles: bool = True  # producers flush, delete and replay now and then
    longest_wait: float = 10.0  # before a retry
    throttle: Throttle | None = None
    rules: Rules | None = None  # policies of all kinds, instead of the one

    def policy_of(self, key: str) -> Policy:
        """Return the policy of a timeline, or one of them: capacity, sizes and hours are those of all."""
        return self.policy if self.rules is None else self.rules.of(key)

    @property
    def longest_rest(self) -> float:
        return self.pause + 20 + 4 * self.delivery_timeout


@dataclass
class Conduct:
    """What is known of one process."""

    engine: DigestEngine[int]
    delivers: bool
    since: float  # when its process began
    held: dict[str, float] = field(default_factory=dict[str, float])  # token of a lease: counted from when
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # of the leases, by their digests
    lost: dict[str, int] = field(default_factory=dict[str, int])  # how many leases on a digest had been, at its latest
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
    parts: int = 0  # reports that were answered by the next part, which renews its lease

    @property
    def tries(self) -> int:
        return self.sent["claim"] + self.sent["renew"] + self.sent["throttle"] + self.parts


class Witness:
    """Notes what happens, and what of it must not; ``over`` is set by the first broken promise."""

    def __init__(self, loop: SeededLoop, store: Store, setup: Setup) -> None:
        self.store = store
        self.setup = setup
        self.story: list[str] = []
        self.fault = ""
        self.over = asyncio.Event()
        self.records = Records(self.broken, loop.time)
        store.ledger = self.ledger = setup.rules and Ledger(setup.rules, self.records, self.broken)
        self.receipts: list[Receipt] = []
        self.conducts: dict[Process, Conduct] = {}
        self.waited = 0.0  # seconds: how long a healthy receiver had to wait at the most
        self.strict = False  # nothing is wrong with the world: everything must go by the book
        self.calm_since = loop.time()  # no fault since; in the future while there is one
        self.troubled_until = loop.time()  # by what callbacks do
        self.timeouts = Counter[str]()  # of digests, whose callbacks others may have kept from ending
        self._loop = loop
        self._start = loop.time()
        self._begun_at: dict[str, float] = {}
        self.attempts: deque[float] = deque()  # when those began that count for the throttle
        self.counts_from = 0.0  # when they count: a clock that steps forward ends waits early
        self._removed_at: dict[str, float] = {}
        self._muted_until: dict[str, float] = {}
        self._owners: dict[str, Process] = {}
        self._leased_at: dict[str, float] = {}  # by digest
        self._leases = Counter[str]()  # of a digest, also those that nobody has heard of
        self.idle = Counter[str]()  # of each digest, how many leases to run it alone have begun no delivery
        self._lost = Counter[str]()  # how many of these had ended without a word by the last one

    @property
    def lasted(self) -> float:
        """How many seconds have passed in its world."""
        return self._loop.time() - self._start

    def tell(self, text: str) -> None:
        self.story.append(f"{self.lasted:9.3f}  {PROCESS.get() or ''!s:12}  {text}")

    def broken(self, text: str) -> None:
        self.tell(f"BROKEN: {text}")
        if not self.fault:
            self.fault = text
            self.over.set()

    def calm_for(self, seconds: float) -> bool:
        return self._loop.time() - self.calm_since > seconds

    def trouble(self, seconds: float) -> None:
        """Something goes wrong now, for so long."""
        self.troubled_until = max(self.troubled_until, self._loop.time() + seconds)
        self.calm_since = max(self.calm_since, self.troubled_until)

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

    def claiming(self, process: Process, slots: int) -> None:
        conduct = self.conducts[process]
        if slots and self._loop.time() < conduct.silent_until - 1e-6:
            self.broken(f"{process} claims, and was asked to pause until {conduct.silent_until - self._start:.3f}")
        if slots > self.setup.concurrency:  # 0 only looks
            self.broken(f"{process} claims {slots} digests, and may deliver {self.setup.concurrency}")
        if conduct.away and self.store.shard_map.count == 1 and self._running(process):
            self.broken(f"{process} claims before it has renewed what it holds")
        conduct.away = False

    def leased(self, process: Process, claims: Claims) -> None:
        for lease in claims.leases:
            if self._muted_until.get(lease.key, 0.0) > self._loop.time() + 0.001:
                self.broken(f"{process} leases {lease.key}, which is muted")
            self._owners[lease.token] = process
            self.conducts[process].given_up.discard(lease.digest_id)
            self._leased_at[lease.digest_id] = self._loop.time()
            self._leases[lease.digest_id] += 1
            self._lost[lease.digest_id] = self.conducts[process].lost[lease.digest_id] = lease.lost
            self.idle[lease.digest_id] += lease.is_alone
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
        letters = [letter for letter in close.dead_letters if letter.ids]
        planted = [letter.reason for letter in letters if all(i.startswith(b"bad-") for i in letter.ids or ())]
        if len(planted) > 1:
            self.broken(f"{len(planted)} dead letters for one reason: {planted}")

    def removed(self, key: str, record_id: str | None = None) -> None:
        self.tell(f"{key} {record_id or ''} removed")
        self._removed_at[key] = self._loop.time()
        self.records.removed(key, record_id)

    def muted(self, key: str, mute: Mute | None = None) -> None:
        """A timeline is muted from now on, or (None) not any more."""
        seconds = inf if mute and mute.delay_ms is None else mute.delay_ms / 1000 if mute and mute.delay_ms else 0.0
        self.tell(f"{key} is muted for {seconds:g} s")
        self._muted_until[key] = self._loop.time() + seconds

    # What callbacks are given

    def _running(self, process: Process | None = None) -> list[Receipt]:
        self.receipts = [receipt for receipt in self.receipts if receipt.ending == "running"]
        return [receipt for receipt in self.receipts if process in (None, receipt.process)]

    def begun(self, process: Process, digest: Digest[int], server_ms: int, stepped_at: float) -> Receipt:
        conduct, setup, now = self.conducts[process], self.setup, self._loop.time()
        removed = self._removed_at.get(digest.key, 0.0) >= self._leased_at.get(digest.id, now)  # and is read to its end
        # after a change of shards it may be in an old and a new one
        for other in self._running() if not (removed or self.store.moved_at) else ():
            if other.key == digest.key and not self._removed_since(other) and self._answers_for(other):
                self.broken(f"{other.process} and {process} deliver {digest.key} at the same time")
        since = conduct.leaving_since
        if since is not None and now > since + 0.5 and process.went_on_at < since:
            self.broken(f"{process} begins {digest.id}, and was asked to leave {now - since:.1f} s before")
        if digest.id in conduct.given_up:
            self.broken(f"{process} begins {digest.id} under a lease that it took for over")
        receipt = self.records.begun(process, digest, now)
        receipt.lost = conduct.lost.get(digest.id, 0)
        self.idle[digest.id] -= receipt.lost >= ALONE
        self.tell(f"begins {digest.id} of {digest.key}: {receipt.serials}, attempt {digest.attempt}")
        if digest.attempt > setup.max_attempts:
            self.broken(f"digest {digest.id} is tried for the {digest.attempt}th time")
        policy = setup.policy_of(digest.key)
        if len(receipt.serials) > (policy.max_size or policy.capacity):
            self.broken(f"digest {digest.id} holds {len(receipt.serials)} records")
        spared = (conduct.spared_since or now) + 3 * setup.timeout  # by then nobody answers an earlier claim
        spared = max(spared, now - PROBE_TIMEOUT)  # what has taken longer lets another through
        # of each timeline once: after a change of shards it may be in an old and a new one
        running = {other.key: self._taken_at(other) for other in (receipt, *self._running(process))}
        taken = sorted(at for at in running.values() if at > spared)
        more = int((now - taken[0]) / PROBE_PERIOD + 0.01) if taken else 0  # one a period, while they take long
        if setup.pause and len(taken) > PROBES + more:
            self.broken(f"{process} delivers {len(taken)} at once to a receiver that fails")
        self.receipts.append(receipt)
        if self.ledger:
            has_stepped = stepped_at >= self._taken_at(receipt)
            self.ledger.begins(digest.key, digest.id, receipt.serials, None if has_stepped else server_ms)
        under_way = sum(not other.stubborn for other in self._running(process))
        if under_way > setup.concurrency:
            self.broken(f"{process} delivers {under_way} digests at once")
        self._see_doubts(receipt)
        self._see_rate()
        self._begun_at[digest.key] = now
        return receipt

    def _see_doubts(self, receipt: Receipt) -> None:
        """See that no process delivers two doubtful digests at once, nor anything beside one that is to be alone."""
        now = self._loop.time()
        for other in self._running(receipt.process):
            is_over = other.stubborn or now > other.began + self.setup.delivery_timeout
            if other is receipt or is_over:
                continue
            if max(other.lost, receipt.lost) >= ALONE:
                self.broken(
                    f"{receipt.process} delivers {receipt.digest_id} beside {other.digest_id}, one of them alone"
                )
            elif other.lost and receipt.lost:
                self.broken(f"{receipt.process} delivers {receipt.digest_id} and {other.digest_id}, both doubtful")

    def _see_rate(self) -> None:
        """See that no window holds more attempts than the throttle allows, over all processes."""
        throttle, now = self.setup.throttle, self._loop.time()
        if throttle is None or now < self.counts_from:
            return
        self.attempts.append(now)
        while self.attempts[0] < max(self.counts_from, now - throttle.per):
            self.attempts.popleft()
        if len(self.attempts) > throttle.limit:
            self.broken(f"{len(self.attempts)} attempts within {throttle.per:g} s, of which {throttle.limit} may begin")

    def goes_on(self, process: Process, digest_id: str, rest_id: str) -> None:
        """The rest of a digest in parts is delivered under the same lease, with an id of its own."""
        self._leased_at[rest_id] = self._leased_at.get(digest_id, self._loop.time())
        conduct = self.conducts[process]
        conduct.parts += 1
        if digest_id in conduct.given_up:
            conduct.given_up.add(rest_id)

    def cancelled(self, receipt: Receipt) -> None:
        """A callback was cancelled: with the lease of its digest, unless its time is over or its process leaves."""
        conduct = self.conducts[receipt.process]
        is_in_time = self._loop.time() < receipt.began + self.setup.delivery_timeout - 0.01
        is_latest = self._taken_at(receipt) <= receipt.began  # else it has another lease, which was given since
        if is_in_time and is_latest and conduct.leaving_since is None:
            conduct.given_up.add(receipt.digest_id)

    def _taken_at(self, receipt: Receipt) -> float:
        """When its lease was given; its entries may have been read for long after that."""
        return self._leased_at.get(receipt.digest_id, receipt.began)

    def _removed_since(self, receipt: Receipt) -> bool:
        """Whether something of its timeline was removed after its lease was given."""
        return self._removed_at.get(receipt.key, 0.0) >= self._taken_at(receipt)

    def _answers_for(self, receipt: Receipt) -> bool:
        """Whether a process that runs a callback has been in a state to end it when its lease did."""
        is_calm = self.calm_for(2 * self.setup.lease_timeout)
        return receipt.process.runs_since(receipt.began) and not receipt.stubborn and is_calm

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
            if conduct.in_a_row >= self.setup.threshold and conduct.spared_since is None:
                conduct.spared_since = receipt.ended

    def _see_cut(self, receipt: Receipt, conduct: Conduct) -> None:
        lasted, setup, since = receipt.ended - receipt.began, self.setup, conduct.leaving_since
        if lasted >= setup.delivery_timeout - 0.01 or receipt.stubborn or not self.calm_for(2 * setup.lease_timeout):
            return
        is_excused = self._removed_since(receipt) or conduct.hurried
        if not is_excused and (since is None or receipt.ended < since + setup.drain_timeout - 0.01):
            self.broken(f"the callback of {receipt.digest_id} was cut short after {lasted:.3f} s for no reason")

    def told(self, delivery: Delivery) -> None:
        """An observer is told of a delivery, whose outcome the store knows."""
        self.tell(f"told {delivery.result} of {delivery.digest_id}")
        self.timeouts[delivery.digest_id] += delivery.result == "timeout"
        if delivery.result not in ("delivered", "partial"):
            return
        first = self.records.all[self.records.contents[delivery.digest_id][0]]
        receipts = [receipt for receipt in first.receipts if receipt.digest_id == delivery.digest_id]
        leases = self._leases[delivery.digest_id] + self._lost[delivery.digest_id]  # the first may have been a part's
        if delivery.result == "partial" and max(leases, len(receipts)) > 1:
            return  # its contents may be frozen: then all of it comes again
        for receipt in receipts:
            receipt.told = receipt.told or receipt.ending in ("returned", "partial")

    def expect(self, key: str, since: float) -> None:
        """See that a timeline that was made ready has been delivered, if there was a free slot for it."""
        if self._begun_at.get(key, 0.0) >= since or not self.strict:
            return
        if any(key in machine.leased for machine in self.store.machines):  # its turn has come this moment
            return
        for process, conduct in self.conducts.items():
            there = conduct.delivers and process.alive and conduct.leaving_since is None
            is_free = len(self._running(process)) < self.setup.concurrency
            if there and is_free and not conduct.engine.activity.backoff_level:
                self.broken(f"{key} was ready at {since - self._start:.3f}, and {process} does not deliver it")

    # What a look around shows

    def look(self, now_ms: int) -> None:
        """See that the store is in order, and that what should have ended has."""
        setup = self.setup
        for machine in self.store.machines:
            try:
                check_invariants(reference_state(machine))
            except AssertionError as error:
                self.broken(f"the store is out of order: {error}")
        for receipt in self._running():
            if receipt.process.runs_since(receipt.began):
                (self._see_on_done if receipt.stubborn else self._see_end)(receipt)
        self._see_marks(now_ms)
        bound_ms = (2 * setup.lease_timeout + setup.longest_rest + 10) * 1000
        for machine in self.store.machines if self.calm_for(bound_ms / 1000) else ():
            for key, end in machine.leased.items():
                if machine.now(now_ms) > end + bound_ms:
                    self.broken(f"the lease on {key} ended long ago, and nobody has taken it over")

    def _see_end(self, receipt: Receipt) -> None:
        """See that a callback ends with its lease, and in its time."""
        now, conduct = self._loop.time(), self.conducts[receipt.process]
        since = conduct.held.get(conduct.tokens.get(receipt.digest_id, ""), receipt.began)
        if now > max(since, receipt.began) + self.setup.lease_timeout + 1:
            self.broken(f"the callback of {receipt.digest_id} outlives the lease of {receipt.process}")
        if now > receipt.began + self.setup.delivery_timeout + 1:
            self.broken(f"the callback of {receipt.digest_id} outlives its delivery_timeout")

    def _see_on_done(self, receipt: Receipt) -> None:
        """See that a callback that ignores its end does not keep its lease."""
        if self._taken_at(receipt) > receipt.began:
            return  # another attempt holds its digest
        for machine in self.store.machines:
            held = machine.held.get(receipt.key)
            if held and held.delivery and held.delivery.digest_id == receipt.digest_id:
                renewed = self.conducts[receipt.process].held.get(held.delivery.token, 0.0)
                if renewed > receipt.began + self.setup.delivery_timeout + 1:
                    self.broken(f"the lease of {receipt.digest_id} is renewed, and its callback ignores its end")

    def _see_marks(self, now_ms: int) -> None:
        """See that a worker tells the store that it is there, also one that rests."""
        lease, store = self.setup.lease_timeout, self.store
        before = self._loop.time() - 1.5 * lease
        if store.moved_at > before or not self.calm_for(1.5 * lease):
            return
        served = [machine for shard, machine in enumerate(store.machines) if shard not in store.retired]
        late = max(abs(machine.now(now_ms) - machine.seen_ms) for machine in served) / 1000
        for process, conduct in self.conducts.items():
            is_there = process.runs_since(before) and conduct.since < before
            if is_there and conduct.leaving_since is None and conduct.delivers and late > lease / 2 + 1:
                self.broken(f"{process} has not told the store for {late:.1f} s that it is there")

    def left(self, process: Process) -> None:
        """See that a process that has left in good order has given back what it held."""
        conduct = self.conducts[process]
        since = self._loop.time() - self.setup.lease_timeout  # what ended by itself is nobody's any more
        if process.went_on_at > since:
            return  # it may have given up what a renewal on its way has extended
        for machine in self.store.machines:
            for key in machine.leased:
                opened = machine.held[key].delivery
                if opened is None or opened.digest_id in conduct.given_up:
                    continue  # a renewal that hung may have been answered after that
                if conduct.held.get(opened.token, since) > since:
                    self.broken(f"{process} has left, and still holds {key}")

    def hear(self, record: logging.LogRecord) -> None:
        """Hear what the processes of the world log."""
        process = PROCESS.get()
        if process is None or not process.alive:
            return
        text = record.getMessage()
        self.tell(f"{record.levelname.lower()}: {text}")
        conduct = self.conducts[process]
        if "a fault of aiodigest" in text:
            self.broken(f"{text}: {record.exc_info and record.exc_info[1]!r}")
        elif "chosen shards" in text or "were chosen" in text:
            self.broken(f"nobody has chosen shards: {text}")
        elif "available again" in text:
            conduct.unavailable = False
        elif "is unavailable" in text:
            if conduct.unavailable:
                self.broken(f"{process} says twice that the server is unavailable")
            conduct.unavailable = True
        elif (
            self.strict and record.levelno >= logging.WARNING and not re.search("stopped with|over its capacity", text)
        ):
            self.broken(f"{process} complains, and nothing is wrong: {text}")
