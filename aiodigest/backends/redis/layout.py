"""The number of shards in a namespace, and the names of their keys."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count

from aiodigest.backend import MAX_SHARDS
from aiodigest.errors import ConfigurationError

SCHEMA = 1
SLOTS = 16_384  # of a cluster


@dataclass(frozen=True, slots=True)
class Layout:
    """A number of shards; each change of it raises the epoch by one."""

    shards: int
    epoch: int = 1

    @property
    def version(self) -> str:
        """The version that every script must find before it does anything."""
        return f"{SCHEMA}:{self.shards}:{self.epoch}"

    @property
    def draining(self) -> str:
        """The same version, once another layout takes the adds."""
        return f"{self.version}:draining"

    def tag(self, namespace: str, number: int) -> str:
        """Return the hash tag of a shard's keys; its slot lies in the middle of the shard's part of a cluster's slots.

        The middle, because a part that spans the slots of two primaries could otherwise fall to either.
        """
        # with the number: should a failover forget a change, another one must not meet the shards of the first
        name = namespace if self.epoch == 1 else f"{namespace}:e{self.epoch}.{self.shards}"
        if self.shards == 1:
            return name
        from redis.crc import key_slot  # not needed by most

        eighth = SLOTS / self.shards / 8
        low, high = int(eighth * (8 * number + 3)), int(eighth * (8 * number + 5))
        return next(
            tag for tag in (f"{name}:{number}:{salt}" for salt in count()) if low <= key_slot(tag.encode()) < high
        )


@dataclass(frozen=True, slots=True)
class Home:
    """A shard known to a process, by its number in its layout."""

    layout: Layout
    number: int


def read_layout(version: str, namespace: str) -> Layout:
    """Parse the layout of a version; ConfigurationError if another version of aiodigest made it."""
    parts = re.fullmatch(rf"{SCHEMA}:([0-9]{{1,4}}):([0-9]{{1,9}})", version)
    if not parts or not 1 <= int(parts[1]) <= MAX_SHARDS:
        raise ConfigurationError(
            f"namespace {namespace!r} has the layout {version!r}, and this version of aiodigest knows only "
            f"schema {SCHEMA}, of 1 to {MAX_SHARDS} shards"
        )
    return Layout(int(parts[1]), int(parts[2]))
