"""The layouts of a namespace: its number of shards, the names of their keys, and what a process knows of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from aiodigest.backend import MAX_SHARDS, ShardMap
from aiodigest.errors import ConfigurationError

SCHEMA = 2
SLOTS = 16_384  # of a cluster
RETIRED = "retired"  # the version of a shard that was drained and is no more


class Layout(NamedTuple):  # to define a frozen dataclass takes four times as long, which adds up when a process starts
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
        """Return the hash tag of a shard's keys; its slot lies in the middle of the shard's part of a cluster's slots,
        because a part that spans the slots of two primaries could otherwise fall to either."""
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


class Home(NamedTuple):
    """A shard known to a process, by its number in its layout."""

    layout: Layout
    number: int


class KnownLayout(NamedTuple):
    """The layout of a namespace as a process knows it; replaced whole when the process learns of another one."""

    current: Layout  # takes the adds
    drained: Layout | None
    homes: tuple[Home, ...]  # by the numbers under which this process knows the shards
    shard_map: ShardMap
    wanted: int | None  # shards, by the engine's settings; None: as many as there are
    is_rumoured: bool = False  # it was changed, perhaps on a single server so far


def read_layout(version: str, namespace: str) -> Layout:
    """Parse the layout of a version; ConfigurationError if another version of aiodigest made it."""
    parts = re.fullmatch(rf"{SCHEMA}:([0-9]{{1,4}}):([0-9]{{1,9}})", version)
    if not parts or not 1 <= int(parts[1]) <= MAX_SHARDS:
        raise ConfigurationError(
            f"namespace {namespace!r} has the layout {version!r}, and this version of aiodigest knows only "
            f"schema {SCHEMA}, of 1 to {MAX_SHARDS} shards"
        )
    return Layout(int(parts[1]), int(parts[2]))


def learn(known: KnownLayout | None, told: Sequence[str], namespace: str, wanted: int | None) -> KnownLayout:
    """Return what is known once a server told the fields ``current``, ``version`` and ``drains`` of the layout.

    ``known`` is None at first: the namespace must then have ``wanted`` shards, if given; later their number may change.
    """
    current, version, drains = told
    stored = current or ("" if version == RETIRED else version.removesuffix(":draining"))
    before = known.current if known else Layout(wanted or 1)
    layout = read_layout(stored, namespace) if stored else before  # else it is new, or its server was emptied
    if known:
        wanted = known.wanted if layout.epoch == before.epoch else None
    if wanted not in (None, layout.shards):
        raise ConfigurationError(
            f"namespace {namespace!r} has {layout.shards} shards, not {wanted}: take "
            f"shards= out of the engine, or give {layout.shards}"
        )
    drained = read_layout(drains, namespace) if drains else None
    if known and (layout, drained) == (known.current, known.drained):
        return known if stored else known._replace(is_rumoured=True)
    changed = layout.epoch > 1 and (known is not None or drained is not None)
    return place(layout, drained, known.homes if known else (), wanted, is_rumoured=changed or not stored)


def place(
    current: Layout,
    drained: Layout | None = None,
    homes: tuple[Home, ...] = (),
    wanted: int | None = None,
    *,
    is_rumoured: bool = False,
) -> KnownLayout:
    """Number the shards of these layouts, after those in ``homes`` that have numbers already."""
    shards: dict[Layout | None, range] = {None: range(0)}
    for layout in filter(None, (drained, current)):  # so whoever looks through all misses no dead letter that moves
        if Home(layout, 0) not in homes:
            homes += tuple(Home(layout, number) for number in range(layout.shards))
        first = homes.index(Home(layout, 0))
        shards[layout] = range(first, first + layout.shards)
    shard_map = ShardMap(len(homes), shards[current], shards[drained])
    return KnownLayout(current, drained, homes, shard_map, wanted, is_rumoured)
