"""A process of the first version with this schema and one of this version, on one namespace.

The old one is unpacked into a folder of its own, and runs in processes of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from branches import instead_of
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from processes import DEADLINE, Program, running
from servers import Server
from stores import Place
from test_store_model import Stores

from aiodigest.backends.redis.scripts import load_scripts

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
# made by: git archive HEAD aiodigest | xz -9e, when SCHEMA became 2; in a file, so that it is there in a shallow clone
# and an sdist too
OLD = Path(__file__).with_name("versions") / "schema2.tar.xz"
SCRIPTS = (
    "import json; from aiodigest.backends.redis.scripts import *; "
    "print(json.dumps({name: script.source for name, script in load_scripts().items()}))"
)
# Scripts that take other arguments by now, or answer or note other things: they run in the processes above alone.
CHANGED = frozenset(
    {"add", "claim", "close", "flush", "look", "open", "permits", "postpone", "release", "remove", "retry"}
)
KINDS = ("plain", "fails", "splits", "dies")
EACH = 5  # timelines of each kind


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the old version."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(OLD) as archive:
        archive.extractall(folder, filter="data")
    return folder


class Process(Program):
    """A process of one version, and the records that it has delivered."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.delivered = Counter[str]()
        self.failed = Counter[str]()

    async def told(self) -> dict[str, Any]:
        """The next line; deliveries are noted."""
        line = await self.line()
        assert line, "it has ended"
        facts: dict[str, Any] = json.loads(line)
        self.delivered.update(facts.get("delivered", ()))
        self.failed.update([facts["failed"]] if "failed" in facts else ())
        return facts

    async def do(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        while (facts := await self.told()).get("did") != name:
            pass
        return facts["answer"]

    async def delivers(self, *ids: str) -> None:
        """Wait until it has delivered these."""
        while not self.delivered.keys() >= {*ids}:
            await self.told()


@asynccontextmanager
async def version(tree: Path, url: str, namespace: str) -> AsyncGenerator[Process, None]:
    options: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(tree)}}
    async with running("version.py", url, namespace, kind=Process, **options) as program:
        assert Path((await program.told())["package"]).parent == tree / "aiodigest"
        yield program
        assert program.process.stdin is not None
        program.process.stdin.close()
        async with asyncio.timeout(DEADLINE):
            assert await program.process.wait() == 0


def keys(*kinds: str) -> list[str]:
    return [f"{kind}-{number}" for kind in kinds for number in range(EACH)]


@pytest.mark.parametrize("old_begins", [True, False], ids=["the old begins", "the new begins"])
async def test_one_version_ends_what_another_began(server: Server, namespace: str, old: Path, old_begins: bool) -> None:
    trees = (old, ROOT) if old_begins else (ROOT, old)
    async with version(trees[0], server.url, namespace) as first, version(trees[1], server.url, namespace) as second:

        async def add(by: Process, name: str, *kinds: str) -> list[str]:
            return await by.do("add", *((key, f"{name}:{key}") for key in keys(*kinds)))

        added = [*await add(first, "a", *KINDS), *await add(second, "b", *KINDS)]
        await first.do("work", "fail")
        await first.delivers(*(f"b:{key}" for key in keys("plain", "splits")))
        while not first.failed.keys() >= {*keys("fails", "dies")}:
            await first.told()
        await first.do("rest")

        # what failed waits for an hour, unless the other one makes it ready, with what it adds
        added += await add(second, "c", "plain", "fails", "splits")
        assert await second.do("flush", *keys("plain", "fails", "splits")) == [True] * 3 * EACH
        await second.do("work", "accept")
        await second.delivers(*(f"c:{key}" for key in keys("plain", "fails", "splits")))
        assert first.delivered + second.delivered == Counter(
            f"{name}:{key}" for name in "abc" for key in keys("plain", "fails", "splits")
        )

        # the dead letters of the first, replayed by the second, delivered by the first
        await second.do("rest")
        assert (await second.do("stats"))["dead"] == EACH
        assert len(await second.do("replay")) == EACH
        await first.do("work", "accept")
        await first.delivers(*(f"{name}:{key}" for name in "ab" for key in keys("dies")))

        # another number of shards, while both add and deliver; and then the other way round
        await second.do("work", "accept")
        for number, (by, shards) in enumerate([(first, 3), (second, 1)]):
            added += await add(first, f"d{number}", *KINDS)
            added += await add(second, f"e{number}", *KINDS)
            await by.do("reshard", shards)
            added += await add(first, f"f{number}", *KINDS)
            added += await add(second, f"g{number}", *KINDS)
        while len(first.delivered + second.delivered) < len(added):
            for each in (first, second):
                await each.do("stats")
        await first.do("rest")
        await second.do("rest")
        assert first.delivered + second.delivered == Counter(added)
        for each in (first, second):
            held = await each.do("stats")
            assert held == {"waiting": 0, "ready": 0, "leased": 0, "dead": 0, "buried": 2 * EACH}


def test_scripts_of_both_versions_agree_on_the_data_of_each_other(one_server: Place, old: Path) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPTS], capture_output=True, cwd=old, check=True)
    sources: Mapping[str, str] = json.loads(run.stdout)
    assert sources.keys() < load_scripts().keys()
    with one_server.client_of("") as client:
        shas = {name: script.sha.encode() for name, script in load_scripts().items()}
        others = {
            shas[name]: client.script_load(text).encode() for name, text in sources.items() if name not in CHANGED
        }
    random = Random(7)
    ran = Counter[bool]()

    def either(sha: bytes, arguments: bytes) -> bytes:
        chosen = random.random() < 0.5 and b'{"rule":' not in arguments  # of which the earlier one does not know
        ran[chosen] += 1
        return others.get(sha, sha) if chosen else sha

    class Mixed(Stores):
        place = one_server
        source = instead_of(one_server.url, either)
        branches = None
        alone = False

    with asyncio.Runner() as runner:
        Mixed.loop = runner.get_loop()
        run_state_machine_as_test(
            Mixed,
            settings=settings(
                max_examples=40, stateful_step_count=25, deadline=None, database=None, derandomize=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )  # fmt: skip
    assert min(ran[True], ran[False]) > 100
