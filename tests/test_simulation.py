"""Worlds of engines under faults, each from a seed; and that what shows their faults can be trusted."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.families import FAMILIES
from simulation.loop import Process, SeededLoop
from simulation.muted import Mutes
from simulation.planted import PLANTED, Planted, find
from simulation.world import play

from aiodigest.backends.memory import backend as memory
from aiodigest.backends.memory import timelines
from aiodigest.worker import shard

SEEDS, QUICK_SEEDS = 100, 20
TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "first",
    [
        *range(1, QUICK_SEEDS, 5),
        *(pytest.param(first, marks=pytest.mark.worlds) for first in range(QUICK_SEEDS + 1, SEEDS, 5)),
    ],
)
def test_every_promise_is_kept_in_worlds_full_of_faults(first: int) -> None:
    for seed in range(first, first + 5):
        witness = play(seed)
        assert not witness.fault, "\n".join([*witness.story[-100:], f"seed {seed}: {witness.fault}"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.worlds) for first in range(2, 11))])
def test_every_promise_is_kept_in_worlds_of_one_kind_of_trouble(family: str, first: int) -> None:
    for seed in range(first, 20, 10):
        witness = FAMILIES[family].played(seed)
        assert not witness.fault, "\n".join([*witness.story[-100:], f"{family} {seed}: {witness.fault}"])


@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.worlds) for first in range(6, 26, 5))])
def test_nothing_that_is_muted_goes_out_in_worlds_full_of_faults(first: int) -> None:
    for seed in range(first, first + 5):
        witness = Mutes.played(seed)
        assert not witness.fault, "\n".join([*witness.story[-100:], f"seed {seed}: {witness.fault}"])


MUTED = "machine.is_muted(key, now):  # it was under delivery"


@pytest.mark.parametrize(
    ("owner", "name", "old"),
    [(timelines.Shard, "place", "self.is_muted(key, now):"), (memory.ReferenceBackend, "claim", MUTED)],
    ids=["what comes under a mute", "what was under delivery"],
)
def test_a_world_of_mutes_finds_out_what_passes_them(
    owner: type, name: str, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Planted("", 0, owner, name, old, old.replace("(key, now)", "('', now)")).plant(monkeypatch)
    assert any(Mutes.played(seed).fault for seed in range(1, 30))


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[pytest.mark.worlds] if planted.family == "receivers" else [])
        for fault, planted in PLANTED.items()
    ],
)
def test_a_fault_that_is_put_back_is_found_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(fault, monkeypatch, first=PLANTED[fault].seed, seeds=100)


@pytest.mark.processes
@pytest.mark.parametrize("seed", [3, 8])
def test_a_seed_plays_the_same_story_in_every_process(seed: int) -> None:
    program = f"from simulation.world import play; print(*play({seed}).story, sep=chr(10))"
    stories = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PYTHONHASHSEED": hashes},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    ]
    assert stories[0] == stories[1]
    assert len(stories[0].splitlines()) > 100


def test_a_store_that_loses_what_came_during_a_delivery_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A close drops the records that came meanwhile."""
    close = memory.ReferenceBackend.close

    async def greedy(self: memory.ReferenceBackend, shard: int, closes: list[memory.Close]) -> list[memory.Closed]:
        for each in closes:
            held = self.machines[shard].held.get(each.lease.key)
            if held is not None:
                held.log.clear()
        return await close(self, shard, closes)

    monkeypatch.setattr(memory.ReferenceBackend, "close", greedy)
    assert any(play(seed).fault for seed in range(1, 20))


def test_a_slot_that_is_never_freed_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: object, active: object) -> None: ...

    monkeypatch.setattr(shard.ShardWorker, "_ended", keep)
    assert any(play(seed).fault for seed in range(1, 20))


def test_a_stopped_process_goes_on_where_it_was_and_a_killed_one_never_does() -> None:
    seen: list[str] = []

    async def count(name: str) -> None:
        for number in range(4):
            seen.append(f"{name}{number}")
            await asyncio.sleep(1)

    async def main() -> None:
        one, two = Process("one"), Process("two")
        one.start(count("a"))
        two.start(count("b"))
        await asyncio.sleep(1.5)
        one.stop()
        two.kill()
        await asyncio.sleep(10)
        assert sorted(seen) == ["a0", "a1", "b0", "b1"]
        one.go_on()
        await asyncio.sleep(10)
        assert sorted(seen) == ["a0", "a1", "a2", "a3", "b0", "b1"]
        await two.bury()

    with asyncio.Runner(loop_factory=lambda: SeededLoop("any")) as runner:
        runner.run(main())
