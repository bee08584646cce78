"""Several processes on one namespace, as they are in production."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import at_work
from replicas import until

from aiodigest import DigestEngine

pytestmark = pytest.mark.processes


async def test_records_added_by_two_processes_are_delivered_once_each_and_no_timeline_is_with_two_workers(
    tmp_path: Path,
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    url = f"embedded://{tmp_path / 'data'}"
    async with (
        DigestEngine(url, namespace="shared", value_type=int) as watcher,
        at_work(url, "shared", locks, timelines=7) as tally,
    ):
        await until(lambda: min(map(len, tally.delivered)) > 20)  # so both have had timelines
        await tally.goes_on(200)
        added = await tally.end()
        stats = await watcher.stats()
    assert (stats.waiting, stats.ready, stats.leased, stats.delivered) == (0, 0, 0, added)
