"""The ends of a pipe: lines of standard input and of files, and standard output as the receiver of digests.

Calls that block are made in threads that never keep the process alive, unlike an executor's: nobody can end a read of a
silent terminal, or a write to a reader that is asleep.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from aiodigest import JSON, Digest, InvalidArgument, Reject, RetryAfter
from aiodigest.cli.output import ReaderGone, of_output, write
from aiodigest.cli.pipe.parser import LONGEST_LINE

if TYPE_CHECKING:
    from aiodigest.channels import Channel

Render: TypeAlias = Callable[[Digest[JSON]], bytes]

CHUNK = 256 * 1024
AHEAD = 4  # chunks read before they are wanted
KEPT = 1024  # bytes before the place read, by which a file is known
POLL = 0.2  # seconds between looks at the end of a file that may grow


class Line(NamedTuple):
    """A line without its end; ``place`` is its file and number, for messages."""

    place: str
    text: bytes


class Splitter:
    """Cuts the chunks of one source into lines. It keeps just enough of an overlong line to tell that it is one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._number = 0
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[Line]:
        """Return the lines that this chunk completes."""
        lines: list[Line] = []
        for index, piece in enumerate(chunk.split(b"\n")):
            if index:
                lines.append(self._line())
            self._rest += piece[: LONGEST_LINE + 1 - len(self._rest)]
        return lines

    def end(self) -> list[Line]:
        """Return the last line, if it has no end of its own."""
        return [self._line()] if self._rest else []

    def _line(self) -> Line:
        self._number += 1
        text, self._rest = bytes(self._rest), bytearray()
        return Line(f"{self._name}:{self._number}", text)


class Source:
    """Standard input (no path), or a file; opened when made, so that a wrong name is reported before anything starts.

    ``size`` is the number of bytes to read, or None if it is not known; ``read`` is the number read.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._name = "<stdin>" if path is None else str(path)
        self._file = 0 if path is None else os.open(path, os.O_RDONLY)
        status = os.fstat(self._file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self._name)
        self.size = status.st_size if stat.S_ISREG(status.st_mode) else None
        self.read = 0

    def lines(self, follow: bool) -> Iterator[list[Line]]:
        """Yield lines in batches; with ``follow`` a file's end is not the end."""
        splitter, last = Splitter(self._name), b""
        while True:
            if follow and self._path is not None and self.size is not None and self._changed(self._path, last):
                yield splitter.end()
                splitter, last = Splitter(self._name), b""
            chunk = os.read(self._file, CHUNK)
            self.read += len(chunk)
            last = (last + chunk)[-KEPT:]
            if chunk:
                yield splitter.feed(chunk)
            elif not follow or self._path is None:
                break
            else:
                time.sleep(POLL)
        yield splitter.end()

    def _changed(self, path: Path, last: bytes) -> bool:
        """True if a file was cut, or read to its end and replaced by another; its beginning is then next.

        ``last`` is what was read last: a file that was cut may have grown again to any length.
        """
        place = os.lseek(self._file, 0, os.SEEK_CUR)
        if os.pread(self._file, len(last), place - len(last)) != last:
            os.lseek(self._file, 0, os.SEEK_SET)
            return True
        try:
            found = os.stat(path)
        except OSError:
            return False  # between two files, perhaps
        held = os.fstat(self._file)
        if held.st_size > place or os.path.samestat(found, held):
            return False  # written to after the last read, perhaps
        fresh = os.open(path, os.O_RDONLY)
        os.dup2(fresh, self._file)
        os.close(fresh)
        return True


class Reader:
    """Reads sources one after the other (all at once, if they are followed), from when it is made in a running loop."""

    def __init__(self, sources: Sequence[Source], follow: bool) -> None:
        self._read: asyncio.Queue[list[Line] | Exception | None] = asyncio.Queue()  # None is the end of a group
        self._room = threading.Semaphore(AHEAD)
        self._groups = [[source] for source in sources] if follow else [sources]
        for group in self._groups:
            arguments = asyncio.get_running_loop(), group, follow
            threading.Thread(target=self._read_all, args=arguments, daemon=True).start()

    async def batches(self) -> AsyncIterator[list[Line]]:
        """Yield lines as they come, until the end or ``stop``. Raises OSError if reading failed."""
        for _ in self._groups:
            while lines := await self._read.get():
                if isinstance(lines, Exception):
                    raise lines
                self._room.release()
                yield lines

    @property
    def has_more(self) -> bool:
        """True if more has been read than was yielded."""
        return not self._read.empty()

    def stop(self) -> None:
        """Stop reading: lines already read still come."""
        for _ in self._groups:
            self._read.put_nowait(None)

    def _read_all(self, loop: asyncio.AbstractEventLoop, sources: Sequence[Source], follow: bool) -> None:
        with suppress(RuntimeError):  # the loop has ended
            try:
                for source in sources:
                    for lines in filter(None, source.lines(follow)):
                        self._room.acquire()
                        loop.call_soon_threadsafe(self._read.put_nowait, lines)
            except Exception as error:
                loop.call_soon_threadsafe(self._read.put_nowait, error)
            loop.call_soon_threadsafe(self._read.put_nowait, None)


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Open the sources that ``paths`` name; ``-``, or none, is standard input. Raises OSError."""
    if sys.stdin is None and (not paths or Path("-") in paths):
        raise OSError("standard input is closed: give a file")
    return [Source(None if path == Path("-") else path) for path in paths or [Path("-")]]


class Receiver:
    """Receives the digests.

    ``drops`` are the records that those lost to their timelines' capacity, by digest, since one may be delivered again;
    ``rejected`` counts those that became dead letters. ``failed`` is set if it takes no more, and ``error`` says why.
    """

    def __init__(self) -> None:
        self.drops: dict[str, int] = {}
        self.rejected = 0
        self.error: Exception | None = None
        self.failed = asyncio.Event()

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Deliver a digest: the delivery callback."""
        raise NotImplementedError


class Sender(Receiver):
    """Sends each digest through a channel, and what fails is tried again by the engine.

    If the input has an end, no digest tells when the next one comes. ``sent`` counts the digests that were delivered,
    ``lines`` the records in them.
    """

    def __init__(self, channel: Channel, has_end: bool) -> None:
        super().__init__()
        self.channel = channel
        self.sent, self.lines = 0, 0
        self._has_end = has_end

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Send a digest. What was cut off, since nobody reads, is given back, and so is the attempt."""
        try:
            await self.channel(replace(digest, next_due=None) if self._has_end else digest)
        except Reject:
            self.rejected += 1
            raise
        except InvalidArgument as error:  # all but the key was checked beforehand, and keys come with the lines
            self.rejected += 1
            raise Reject(str(error)) from None
        except ReaderGone:
            self.error = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            self.failed.set()
            raise RetryAfter(1, pause=True) from None
        self.sent += 1
        self.lines += len(digest.records)
        if digest.dropped:
            self.drops[digest.id] = digest.dropped


class Writer(Receiver):
    """Writes each digest at once, whole, one after the other. The first write that fails is the last."""

    def __init__(self, render: Render, file: int = 1) -> None:
        super().__init__()
        self._render = render
        self._file = file
        self._digests: SimpleQueue[tuple[Digest[JSON], Future[Exception | None]]] = SimpleQueue()
        # in a thread, since a slow reader must not delay the renewal of leases
        threading.Thread(target=self._write_all, daemon=True).start()

    async def deliver(self, digest: Digest[JSON]) -> None:
        """Write a digest. What could not be written is given back, and so is the attempt."""
        written: Future[Exception | None] = Future()
        self._digests.put((digest, written))
        if await asyncio.wrap_future(written) is not None:
            self.failed.set()
            raise RetryAfter(1, pause=True)
        if digest.dropped:
            self.drops[digest.id] = digest.dropped

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


def prepare(file: int = 1) -> None:
    """Make sure that standard output is open, and end the line that a killed run may have left. Raises OSError."""
    if sys.stdout is None:  # it is when closed by the caller
        raise OSError("standard output is closed")
    status, last = os.fstat(file), b""
    if stat.S_ISREG(status.st_mode) and status.st_size:
        with suppress(OSError), open(f"/dev/fd/{file}", "rb") as readable:
            last = os.pread(readable.fileno(), 1, status.st_size - 1)
    if last not in (b"\n", b""):
        with of_output():
            write(file, b"\n")
