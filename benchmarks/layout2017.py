"""The layout that digests had in 2017: a call an add, and one a close.

layout2017.lua is written as its scripts were, layout2017_lean.lua as fast as that layout allows.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import uuid4

HERE = Path(__file__).parent
SOURCE, LEAN = ((HERE / name).read_text(encoding="utf-8") for name in ("layout2017.lua", "layout2017_lean.lua"))
PREFIX, TTL = "d", 7 * 24 * 3600
INCREMENT, MAXIMUM, MINIMUM, CAPACITY, CHANCE = 30, 1800, 300, 1_000, 0.05


class Layout:
    """Timelines in that layout, through redis-py."""

    def __init__(self, client: Any, lean: bool = False) -> None:
        self._client, self._source = client, LEAN if lean else SOURCE
        self._sha = ""

    async def begin(self) -> None:
        self._sha = await self._client.script_load(self._source)

    async def _run(self, now: float, command: str, *arguments: object) -> None:
        await self._client.evalsha(self._sha, 1, PREFIX, command, PREFIX, TTL, now, *arguments)

    async def add(self, key: str, value: str) -> None:
        now = time.time()  # callers told the time there
        await self._run(now, "ADD", key, uuid4().hex, value, now, INCREMENT, MAXIMUM, CAPACITY, CHANCE)

    async def close(self, key: str) -> None:
        """Have a timeline wait, as after a digest."""
        await self._run(time.time(), "CLOSE", key, MINIMUM)
