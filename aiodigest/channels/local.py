"""``Console`` and ``File``: channels for trying out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from math import isfinite
from pathlib import Path
from typing import Any, TextIO, cast

from pydantic_core import to_jsonable_python

from aiodigest import Digest, OutcomeUnknown
from aiodigest.channels.common import Channel, rendered_by
from aiodigest.errors import printable
from aiodigest.rendering import Message, Render

LONGEST = 10_000  # bits of a number: of longer ones Python prints and reads no digits


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
        self._turn = asyncio.Lock()

    async def __call__(self, digest: Digest[Any], /) -> None:
        """Print a digest."""
        async with self._turn:
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
    ``id``, ``value`` and ``timestamp``. Entering it raises OSError if nothing can be written there.

    Parameters
    ----------
    path : str or Path
        The file, which is made if there is none. It is opened anew for each digest, so that it may be moved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._turn = asyncio.Lock()

    async def __call__(self, digest: Digest[Any], /) -> None:
        """Append a digest."""
        line = as_json(digest)
        async with self._turn:
            await asyncio.to_thread(self._append, line)

    async def _open(self) -> None:
        await asyncio.to_thread(self._append, b"")

    def _append(self, line: bytes) -> None:
        with self._path.open("ab+", buffering=0) as file:
            if line and (end := file.seek(0, os.SEEK_END)):
                file.seek(end - 1)
                if file.read(1) != b"\n":  # what was cut short, by a full disk or an end of a process
                    line = b"\n" + line
            while line:
                line = line[file.write(line) :]
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise OutcomeUnknown(f"the file may have it: {error}") from error


def as_json(digest: Digest[Any]) -> bytes:
    """Return a digest as a line of JSON, in ASCII. What JSON has no form for is told by ``str``."""
    records = [{"id": each.id, "timestamp": each.timestamp, "value": each.value} for each in digest.records]
    whole = {
        "id": digest.id, "key": digest.key, "attempt": digest.attempt, "iteration": digest.iteration,
        "dropped": digest.dropped, "records": records,
    }  # fmt: skip
    return json.dumps(_plain(whole), separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, with texts for numbers that not everybody reads: nan, infinity, very long ones."""
    match value:
        case str():
            return str.__str__(value)  # with lone surrogates too, at which pydantic ends
        case dict():
            return {_name(name): _plain(each) for name, each in cast("dict[Any, Any]", value).items()}
        case list() | tuple():
            return [_plain(each) for each in cast("list[Any]", value)]
        case float() if not isfinite(value):
            return json.dumps(value)
        case int() if value.bit_length() > LONGEST:
            return hex(value)
        case None | bool() | int() | float():
            return value
        case _:
            return _plain(to_jsonable_python(value, bytes_mode="base64", fallback=str))


def _name(name: object) -> str:
    return str.__str__(name) if isinstance(name, str) else next(iter(to_jsonable_python({name: None}, fallback=str)))
