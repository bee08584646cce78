"""Lines of standard input and of files, as soon as they arrive, and no sooner than they are wanted.

Calls that block, of ``writer`` too, run in threads that a process need not wait for to exit.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

from anyio import create_memory_object_stream

from aiodigest.cli.pipe.parser import LONGEST_LINE

P = ParamSpec("P")
T = TypeVar("T")

CHUNK = 256 * 1024
AHEAD = 4  # chunks read before they are wanted
POLL = 0.2  # seconds between looks at the end of a file that may grow


class DaemonThread:
    """A thread that runs calls, one at a time.

    Unlike an executor's threads it never keeps the process alive: nobody can end a read of a silent terminal, or a
    write to a reader that is asleep.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise as ``function`` does. A cancelled call that has begun goes on, and its result is lost."""
        future: Future[T] = Future()
        self._calls.put((future, partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except Exception as error:
                    future.set_exception(error)


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
        first, *others = chunk.split(b"\n")
        self._keep(first)
        lines: list[Line] = []
        for other in others:
            lines.append(self._line())
            self._keep(other)
        return lines

    def end(self) -> list[Line]:
        """Return the last line, if it has no end of its own."""
        return [self._line()] if self._rest else []

    def _keep(self, piece: bytes) -> None:
        self._rest += piece[: LONGEST_LINE + 1 - len(self._rest)]

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
        self._splitter = Splitter(self._name)
        self._thread = DaemonThread(f"aiodigest reads {self._name}")

    async def lines(self, follow: bool) -> AsyncIterator[list[Line]]:
        """Yield lines in batches; with ``follow`` a file's end is not the end."""
        while True:
            chunk = await self._thread.call(os.read, self._file, CHUNK)
            self.read += len(chunk)
            if chunk:
                yield self._splitter.feed(chunk)
            elif not follow or self._path is None:
                break
            elif await self._thread.call(self._changed, self._path):
                yield self._splitter.end()
                self._splitter = Splitter(self._name)
            else:
                await asyncio.sleep(POLL)
        yield self._splitter.end()

    def _changed(self, path: Path) -> bool:
        """True if a file read to its end was cut, or replaced by another; its beginning is then next."""
        held = os.fstat(self._file)
        try:
            found = os.stat(path)
        except OSError:
            return False  # between two files, perhaps
        if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
            if held.st_size >= os.lseek(self._file, 0, os.SEEK_CUR):
                return False
            os.lseek(self._file, 0, os.SEEK_SET)
            return True
        if held.st_size > os.lseek(self._file, 0, os.SEEK_CUR):
            return False  # written to after the last read
        fresh = os.open(path, os.O_RDONLY)
        os.dup2(fresh, self._file)
        os.close(fresh)
        return True


class Reader:
    """Reads sources one after the other (or all at once, if they are followed), a little ahead of the consumer.

    It starts when it is made, inside a running loop.
    """

    def __init__(self, sources: Sequence[Source], follow: bool) -> None:
        self._send, self._receive = create_memory_object_stream[list[Line]](AHEAD)
        self._error: Exception | None = None
        self._reading = asyncio.create_task(self._read_all(sources, follow))

    async def batches(self) -> AsyncIterator[list[Line]]:
        """Yield lines as they come, until the end or ``stop``; then raises OSError if reading failed."""
        with self._receive:
            try:
                async for lines in self._receive:
                    yield lines
            finally:
                self._reading.cancel()  # first: it may be sending into what is about to be closed
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop reading: lines already read still come."""
        self._reading.cancel()

    async def _read_all(self, sources: Sequence[Source], follow: bool) -> None:
        with self._send:
            for group in [sources] if follow else [[source] for source in sources]:
                tasks = [asyncio.create_task(self._read(source, follow)) for source in group]
                try:
                    await asyncio.gather(*tasks)  # a TaskGroup would wrap the error of the first that fails
                except Exception as error:  # not raised here: nobody may wait for it any more
                    self._error = error
                    break
                finally:
                    for task in tasks:
                        task.cancel()

    async def _read(self, source: Source, follow: bool) -> None:
        async for lines in source.lines(follow):
            if lines:
                await self._send.send(lines)


def open_sources(paths: Sequence[Path]) -> list[Source]:
    """Open the sources that ``paths`` name; ``-``, or none, is standard input. Raises OSError."""
    if sys.stdin is None and (not paths or Path("-") in paths):
        raise OSError("standard input is closed: give a file")
    return [Source(None if path == Path("-") else path) for path in paths or [Path("-")]]
