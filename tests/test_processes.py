"""Several processes on one namespace, as they are in production."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from processes import running

from aiodigest import DigestEngine

pytestmark = pytest.mark.processes

TIMELINES = 7
RECORDS = 600


async def test_records_added_by_two_processes_are_delivered_once_each_and_no_timeline_is_with_two_workers(
    tmp_path: Path,
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    url = f"embedded://{tmp_path / 'data'}"
    async with AsyncExitStack() as stack:
        watcher = await stack.enter_async_context(DigestEngine(url, namespace="shared", value_type=int))
        workers = [await stack.enter_async_context(running("worker.py", url, "shared", locks)) for _ in range(2)]
        for worker in workers:
            assert json.loads(await worker.line()) == {"started": True}
        producers = [
            await stack.enter_async_context(running("producer.py", url, "shared", name, RECORDS, TIMELINES))
            for name in ("a", "b")
        ]
        added = [record for lines in await asyncio.gather(*(p.rest() for p in producers)) for record in lines]
        assert len(added) == 2 * RECORDS

        # neither has room for all timelines, so each has some of them to hold before both go on
        assert all(["holds" in json.loads(await worker.line()) for worker in workers])
        for worker in workers:
            worker.process.send_signal(signal.SIGUSR1)

        delivered: list[str] = []

        async def collect(number: int) -> None:
            while line := await workers[number].line():
                digest = json.loads(line)
                assert "overlap" not in digest
                if "holds" in digest:
                    continue
                delivered.extend(digest["records"])
                if len(delivered) >= len(added):
                    for worker in workers:
                        worker.process.send_signal(signal.SIGTERM)

        await asyncio.gather(*(collect(number) for number in range(2)))
        assert Counter(delivered) == Counter(added)
        stats = await watcher.stats()
        assert (stats.waiting, stats.ready, stats.leased, stats.delivered) == (0, 0, 0, len(added))
        assert [await worker.process.wait() for worker in workers] == [0, 0]
