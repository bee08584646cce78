"""Standard output as the receiver of digests: a digest that is not written is not delivered."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from typing import TypeAlias

from aiodigest import JSON, Digest, RetryAfter
from aiodigest.cli.pipe.reader import DaemonThread

Render: TypeAlias = Callable[[Digest[JSON]], bytes]


class Writer:
    """Writes each digest at once, whole, one after the other. The first write that fails is the last.

    ``failed`` is then set, and ``error`` says why. ``dropped`` counts the records that the written digests lost
    to their timelines' capacity.
    """

    def __init__(self, render: Render, file: int = 1) -> None:
        self._render = render
        self._file = file
        self._thread = DaemonThread("aiodigest writes")  # a slow reader must not delay the renewal of leases
        self._drops: dict[str, int] = {}
        self.error: Exception | None = None
        self.failed = asyncio.Event()

    @property
    def dropped(self) -> int:
        return sum(self._drops.values())

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Write a digest: the delivery callback. What could not be written is given back, and so is the attempt."""
        try:
            await self._thread.call(self._write, digest)
        except Exception:
            self.failed.set()
            raise RetryAfter(1, pause=True) from None
        if digest.dropped:
            self._drops[digest.id] = digest.dropped  # by id, since a digest may be delivered again

    def _write(self, digest: Digest[JSON]) -> None:
        if self.error is not None:
            raise self.error  # nothing may follow half a line
        try:
            write(self._file, self._render(digest))
        except Exception as error:
            self.error = error
            raise


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
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_size and _last_byte(file, status.st_size) not in (b"\n", b""):
        write(file, b"\n")


def _last_byte(file: int, size: int) -> bytes:
    try:
        readable = os.open(f"/dev/fd/{file}", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(readable, 1, size - 1)
    except OSError:
        return b""
    finally:
        os.close(readable)
