"""Standard output as the receiver of digests: a digest that is not written is not delivered."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeAlias

from aiodigest import JSON, Digest, RetryAfter

Render: TypeAlias = Callable[[Digest[JSON]], bytes]


class Writer:
    """Writes each digest at once, whole, one after the other. The first write that fails is the last.

    ``failed`` is then set, and ``error`` says why. ``dropped`` counts the records that the written digests lost
    to their timelines' capacity. It writes in a thread, since a slow reader must not delay the renewal of leases; one
    that never keeps the process alive, since nobody can end a write to a reader that is asleep.
    """

    def __init__(self, render: Render, file: int = 1) -> None:
        self._render = render
        self._file = file
        self._digests: SimpleQueue[tuple[Digest[JSON], Future[Exception | None]]] = SimpleQueue()
        self._drops: dict[str, int] = {}
        self.error: Exception | None = None
        self.failed = asyncio.Event()
        threading.Thread(target=self._write_all, daemon=True).start()

    @property
    def dropped(self) -> int:
        return sum(self._drops.values())

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Write a digest: the delivery callback. What could not be written is given back, and so is the attempt."""
        written: Future[Exception | None] = Future()
        self._digests.put((digest, written))
        if await asyncio.wrap_future(written) is not None:
            self.failed.set()
            raise RetryAfter(1, pause=True)
        if digest.dropped:
            self._drops[digest.id] = digest.dropped  # by id, since a digest may be delivered again

    def _write_all(self) -> None:
        while True:
            digest, written = self._digests.get()
            if written.set_running_or_notify_cancel():
                try:
                    if self.error is None:  # nothing may follow half a line
                        write(self._file, self._render(digest))
                except Exception as error:
                    self.error = error
                written.set_result(self.error)


def write(file: int, text: bytes) -> None:
    """Write all of it, in one call unless the system takes less: only then can a kill cut it in two."""
    while text:
        text = text[os.write(file, text) :]


def prepare(file: int = 1) -> None:
    """Make sure that standard output is open, and starts on a line of its own. Raises OSError.

    A killed run may have left half a line at the end of the file that this one appends to.
    """
    if sys.stdout is None:  # it is when closed by the caller
        raise OSError("standard output is closed")
    status, last = os.fstat(file), b""
    if stat.S_ISREG(status.st_mode) and status.st_size:
        with suppress(OSError), open(f"/dev/fd/{file}", "rb") as readable:
            last = os.pread(readable.fileno(), 1, status.st_size - 1)
    if last not in (b"\n", b""):
        write(file, b"\n")
