"""From a seed to an endless sequence of faults. Pure: the same seed is the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random

LEASE = 2.0  # seconds; of every worker
TIMEOUT = 2.0  # of every call
TRY = 0.45 * LEASE  # of a mail, and as long before it for its turn; both are less than its delivery may take
BLOCK = 1.3 * LEASE  # for how long a callback blocks the loop
SHORTEST_GAP, LONGEST_GAP = 0.2, 1.1

STEP_BACK = "server: clock an hour back"  # for which its programs must be told another time: libfaketime
AT_ONCE = "slot: at once and back"  # which only Valkey 9 and newer can
AWAY, MINUTE = "mail server: away for a minute", 60.0  # once, in a run that is long enough

# how long each kind lasts, in seconds
PROCESSES: dict[str, tuple[float, float]] = {
    "worker: kill -9": (0.0, 0.5),
    "worker: SIGTERM": (0.0, 0.5),
    "worker: SIGSTOP past its lease": (1.2 * LEASE, 2 * LEASE),
    "worker: wall clock an hour off": (0.5, 2.0),
    "producer: kill -9": (0.0, 0.5),
    "producer: SIGTERM": (0.0, 0.5),
    "callbacks raise": (0.5, 1.5),
    "callbacks hang": (0.5, 1.5),
    "callback blocks the loop": (0.0, 0.0),
}
KINDS: dict[str, tuple[float, float]] = {
    **PROCESSES,
    "server: kill -9": (0.1, 1.0),
    "server: CLIENT PAUSE": (0.2, 2.5),
    "server: CLIENT KILL": (0.0, 0.0),
    "server: SCRIPT FLUSH": (0.0, 0.0),
    "server: OOM": (0.5, 2.0),
    "server: MISCONF": (0.5, 2.0),
    STEP_BACK: (0.0, 0.0),
    "proxy: delay": (0.5, 2.0),
    "proxy: cut": (0.2, 1.0),
    "proxy: half-close": (0.2, 1.0),
    "proxy: truncate": (0.2, 1.0),
    "proxy: black hole": (0.5, 3.0),
    "proxy: late": (1.05 * TIMEOUT, 1.5 * TIMEOUT),
    "embedded: file cannot be written": (0.5, 1.5),
    "embedded: server kill -9": (0.0, 0.0),
    "embedded: keeper kill -9": (0.0, 0.0),
}
# of a run whose callbacks send mails; two kinds have no place there, as what goes wrong is what the mail server does
MOODS = "callbacks raise", "callbacks hang"
MAIL_KINDS: dict[str, tuple[float, float]] = {
    "mail server: kill -9": (0.1, 3.0),
    "mail server: dies in the middle": (0.1, 1.0),
    "mail server: dies after the end": (0.1, 1.0),
    "mail server: slow": (0.5, 2.0),
}
# on a cluster; of a kill or a stop it is what comes after the replica's promotion, of a slot how long it is away
CLUSTER_KINDS: dict[str, tuple[float, float]] = {
    **PROCESSES,
    "primary: kill -9": (0.1, 1.5),
    "primary: SIGSTOP until it is none": (0.1, 1.0),
    "primary: CLUSTER FAILOVER": (0.0, 0.0),
    "primary: CLIENT PAUSE": (0.2, 2.5),
    "primary: CLIENT KILL": (0.0, 0.0),
    "primary: SCRIPT FLUSH": (0.0, 0.0),
    "slot: key by key and back": (0.2, 1.5),
    AT_ONCE: (0.2, 1.5),
}


def with_mails(kinds: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the kinds of a run whose callbacks send mails."""
    return {kind: lasts for kind, lasts in kinds.items() if kind not in MOODS} | MAIL_KINDS


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault: begun ``gap`` seconds after the one before, or when what it needs is free.

    ``choice`` (from 0 to 1) says which of several processes or proxies it hits, or how.
    """

    number: int
    kind: str
    gap: float
    lasts: float
    choice: float


def plan(seed: int, kinds: Mapping[str, tuple[float, float]] = KINDS) -> Iterator[Planned]:
    """Rounds of all kinds, each round in an order of its own, so that none is rare and any may follow any."""
    random = Random(seed)
    numbers = count(1)
    while True:
        for kind in random.sample(sorted(kinds), len(kinds)):
            gap = random.uniform(SHORTEST_GAP, LONGEST_GAP)
            yield Planned(next(numbers), kind, gap, random.uniform(*kinds[kind]), random.random())
