"""The reference's data: the schedule of a shard, and the contents of each timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from aiodigest.backend import DEAD_LETTER_LIMIT, DEAD_LETTER_TTL_MS, Bookmark, Closed, StoredDeadLetter, StoredTimeline
from aiodigest.models import State
from aiodigest.policy import Limits
from aiodigest.records.entries import identity, latest


class Schedule:
    """The timelines that wait, are ready or are leased, each with its time."""

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self.ready: dict[str, int] = {}
        self.leased: dict[str, int] = {}

    def placed(self, key: str) -> tuple[State, int] | None:
        if key in self.ready:
            return "ready", self.ready[key]
        if key in self.leased:
            return "leased", self.leased[key]
        return ("waiting", self.waiting[key]) if key in self.waiting else None

    def leave(self, key: str) -> None:
        for schedule in (self.ready, self.leased, self.waiting):
            schedule.pop(key, None)

    @property
    def head_ms(self) -> float:
        """The due time of the next timeline; a ready one is due at once."""
        return -1.0 if self.ready else min(self.waiting.values(), default=inf)

    def place(self, key: str, due: int, now: int) -> bool:
        """Schedule a timeline; True if it is ready."""
        self.leave(key)
        (self.ready if due <= now else self.waiting)[key] = due
        return due <= now


@dataclass
class Delivery:
    """A digest that was opened and is not closed: under delivery, in a retry wait, or with an unknown outcome."""

    digest_id: str
    attempts: int = 0
    dropped: int = 0
    part: int = 0
    cut_ms: int = 0
    token: str = ""
    frozen: bool = False  # an outcome is unknown: these contents, under this id, until closed or buried
    parted: bool = False  # a part of it was delivered, so its end starts a cool-down
    deferred_ms: int = 0  # when RetryAfter first gave an attempt back
    last_error: str = ""
    entries: list[bytes] = field(default_factory=list[bytes])


@dataclass
class Held:
    """The data of one timeline."""

    log: list[bytes] = field(default_factory=list[bytes])
    delivery: Delivery | None = None
    iteration: int = 0
    last_ms: int = 0  # the last digest, or the add that opened the window
    cool_ms: int = 0
    dropped: int = 0
    end_ms: int = 0
    flush: bool = False
    own: Limits | None = None
    done: tuple[str, str, Closed] | None = None  # token, digest id, and what they were answered

    @property
    def empty(self) -> bool:
        return not self.log and self.delivery is None

    def holds(self, max_size: int) -> bool:
        """True if the log holds ``max_size`` records; if it does not, despite more entries, it is compacted."""
        kept = latest(self.log)
        if len(kept) < max_size < len(self.log):
            self.log = kept
        return len(kept) >= max_size

    def window(self, key: str, state: State, due: int) -> StoredTimeline:
        delivery = self.delivery or Delivery("")
        dropped = self.dropped + delivery.dropped
        return StoredTimeline(
            key, state, due, len(self.log), len(delivery.entries), delivery.attempts, self.iteration, dropped,
            self.cool_ms, delivery.digest_id, delivery.last_error,
        )  # fmt: skip


class DeadLetters(dict[str, StoredDeadLetter]):
    """The dead letters of a shard, by id."""

    def oldest_first(self) -> list[str]:
        return sorted(self, key=lambda name: (self[name].buried_ms, name.encode()))

    def alive(self, letter_id: str, now: int) -> StoredDeadLetter | None:
        """Return a letter unless it has expired."""
        letter = self.get(letter_id)
        return letter if letter and letter.buried_ms > now - DEAD_LETTER_TTL_MS else None

    def prune(self, now: int) -> int:
        """Make room, a few letters at a time; return how many were dropped."""
        excess = len(self) - DEAD_LETTER_LIMIT
        oldest = enumerate(self.oldest_first()[:10])
        gone = [name for index, name in oldest if index < excess or not self.alive(name, now)]
        for name in gone:
            del self[name]
        return len(gone)


def earliest(schedule: dict[str, int], until: int | None, count: int) -> list[tuple[str, int]]:
    """Return a slice of a sorted set, in its order."""
    items = sorted(schedule.items(), key=lambda item: (item[1], item[0].encode()))
    return [item for item in items if until is None or item[1] <= until][:count]


def page_of(times: Mapping[str, int], count: int, after: Bookmark | None) -> tuple[list[str], Bookmark | None]:
    """Return a page of names by their times, and its end if there are more."""
    last = int(after.last) if after else max(times.values(), default=0)
    begin = (int(after.time), after.name) if after else (-1, b"")
    places = sorted((time, name.encode()) for name, time in times.items() if time <= last)
    left = [place for place in places if place > begin]
    found = left[:count]
    end = Bookmark(b"%d" % found[-1][0], found[-1][1], b"%d" % last) if found and len(found) < len(left) else None
    return [name.decode() for _, name in found], end


def trim(entries: Sequence[bytes], capacity: int) -> tuple[list[bytes], int]:
    """Return the newest ``capacity`` records, and the number of older ones dropped."""
    kept = latest(entries)
    dropped = max(0, len(kept) - capacity)
    return kept[dropped:], dropped


def only(entries: Iterable[bytes], ids: Iterable[bytes]) -> list[bytes]:
    """Return the entries with these ids."""
    wanted = set(ids)
    return [entry for entry in entries if identity(entry) in wanted]
