"""``Console`` and ``File``: channels for trying out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from errno import EINVAL
from io import FileIO
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from time import monotonic, sleep
from typing import Any, TextIO, cast

from pydantic_core import to_jsonable_python

from aiodigest import Digest, OutcomeUnknown, RetryAfter
from aiodigest.channels.common import Channel, Turn, rendered_by
from aiodigest.errors import printable, text_of
from aiodigest.rendering import Message, Render

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

PATIENCE = 10.0  # seconds for others who write to a file
SOON = 5.0  # seconds after which a digest is tried again that did not get its turn
TICK = 0.01  # seconds between two looks at whether it has
LONGEST = 10_000  # bits of a number: of longer ones Python prints and reads no digits
DEEP = 200  # levels of a value, as many as the codecs take


class Console(Channel):
    """Prints the key, the subject and the text of each digest, for trying out.

    Parameters
    ----------
    file : a text file, or None, default None
        Where it is printed; None is the standard output.
    render : function from a digest to a Message, or None, default None
        Makes the subject and the text.
    """

    def __init__(self, file: TextIO | None = None, *, render: Render | None = None) -> None:
        self._file = file
        self._render = rendered_by(render)
        self._turn = Turn()

    async def __call__(self, digest: Digest[Any], /) -> None:
        """Print a digest."""
        async with self._turn.here():
            await asyncio.to_thread(self._print, digest.key, self._render(digest))

    def _print(self, key: str, message: Message) -> None:
        title = message.subject if message.subject.startswith(key) else f"{key}: {message.subject}"
        lines = [title, *(f"  {line}".rstrip() for line in message.text.splitlines()), "", ""]
        text, file = "\n".join(map(printable, lines)), self._file or sys.stdout
        file.write(text.encode(file.encoding or "utf-8", "backslashreplace").decode(file.encoding or "utf-8"))
        file.flush()


class File(Channel):
    """Appends each digest to a file, as a line of JSON that is on the disk before the digest counts as delivered.

    A line has the ``id``, ``key``, ``attempt``, ``iteration``, ``dropped`` and ``records`` of a digest; of a record the
    ``id``, ``value`` and ``timestamp``. Several processes may append to a file (not on Windows): each holds its lock
    (``flock``) as it writes, and a digest that waits for that longer than 10 seconds is tried again, without a charge.
    Entering it raises OSError if nothing can be written there.

    Parameters
    ----------
    path : str or Path
        The file, which is made if there is none. It is opened anew for each digest, so that it may be moved. Devices
        and pipes are refused: they keep nothing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._turn = Turn()

    async def __call__(self, digest: Digest[Any], /) -> None:
        """Append a digest."""
        line = as_json(digest)
        async with self._turn.here():
            await asyncio.to_thread(self._append, line)

    async def _open(self) -> None:
        await asyncio.to_thread(self._append, b"")

    def _append(self, line: bytes) -> None:
        with self._path.open("ab+", buffering=0) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(EINVAL, "it is no regular file, and keeps nothing", str(self._path))
            if line:
                _lock(file)  # until it is closed
            end = file.seek(0, os.SEEK_END)
            if line and end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # what was cut short, by a full disk or an end of a process
                    line = b"\n" + line
            while line:
                line = line[file.write(line) :]
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise OutcomeUnknown(f"the file may have it: {error}") from error
        if not end:  # it may be new, and its name not on the disk
            _sync_folder(self._path.resolve().parent)


def _lock(file: FileIO) -> None:
    """Wait until no other process writes to a file."""
    if fcntl is None:
        return
    end = monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                raise RetryAfter(SOON) from None
            sleep(TICK)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # which may not be read, or of a file system that has no such thing
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def as_json(digest: Digest[Any], plain: Callable[[Any], Any] | None = None) -> bytes:
    """Return a digest as a line of JSON, in ASCII. What JSON has no form for, or below 200 levels, is told by ``str``,
    and if that raises an Exception by the name of its type; values that are JSON already need none of that, and another
    ``plain``."""
    of_value = plain or _plain
    # record by record, so that another thread (the event loop, which renews the lease) gets its turn
    records = ",".join(
        _dumped({"id": _plain(each.id), "timestamp": _plain(each.timestamp), "value": of_value(each.value)})
        for each in digest.records
    )
    head = _plain(
        {
            "id": digest.id, "key": digest.key, "attempt": digest.attempt, "iteration": digest.iteration,
            "dropped": digest.dropped,
        }
    )  # fmt: skip
    return f'{_dumped(head)[:-1]},"records":[{records}]}}\n'.encode()


def _dumped(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain(value: Any, deep: int = DEEP) -> Any:
    """Return a value as JSON has it, with texts for numbers that not everybody reads: nan, infinity, very long ones."""
    match value:
        case str():
            return str.__str__(value)  # with lone surrogates too, at which pydantic ends
        case dict() | list() | tuple() if not deep:
            return text_of(cast("object", value))
        case dict():
            return {_name(name): _plain(each, deep - 1) for name, each in cast("dict[Any, Any]", value).items()}
        case list() | tuple():
            return [_plain(each, deep - 1) for each in cast("list[Any]", value)]
        case float() if not isfinite(value):
            return json.dumps(value)
        case int() if value.bit_length() > LONGEST:
            return hex(value)
        case None | bool() | int() | float():
            return value
        case _:
            return _plain(_jsonable(value), deep)


def _name(name: object) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    found = _jsonable({name: None})
    return next(iter(cast("dict[str, Any]", found))) if isinstance(found, dict) else text_of(name)


def _jsonable(value: object) -> Any:
    try:
        return to_jsonable_python(value, bytes_mode="base64", fallback=text_of)
    except Exception:  # too deep, in itself, or with what pydantic cannot name
        return text_of(value)
