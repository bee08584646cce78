"""``--exec``: a command of the user's as a channel."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from aiodigest import ChannelError, Digest, OutcomeUnknown, Reject
from aiodigest.channels import Channel
from aiodigest.cli.rendering import digest_json, shortened

REJECTED = 65  # an exit code, EX_DATAERR
CHUNK = 8 * 1024  # bytes of its errors that are read at once, and the most that are kept of a line
LINGER = 0.5  # seconds for the last of its errors, since what it leaves behind may hold them open
REASON = 300  # characters


class Exec(Channel):
    """Runs a shell command for each digest, which gets it as JSON on its standard input, in a process group of its own.

    Its standard output is this process's; so are its errors, but for the last line of those of a failure, which is the
    reason. Exit code 0 has delivered the digest, 65 is a ``Reject``; any other one, and a signal, tries again. After
    ``timeout`` seconds the group is killed: an ``OutcomeUnknown``.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command = command
        self._timeout = timeout

    async def __call__(self, digest: Digest[Any], /) -> None:
        # A group of its own is killed as a whole, and does not hear the Ctrl-C after which what waits is delivered.
        process = await asyncio.create_subprocess_shell(self._command, stdin=PIPE, stderr=PIPE, start_new_session=True)
        errors = Errors(process)
        reading = asyncio.create_task(errors.read())
        try:
            async with asyncio.timeout(self._timeout):
                await _feed(process, digest_json(digest))
                code = await process.wait()
            await asyncio.wait([reading], timeout=LINGER)
        except TimeoutError:
            raise OutcomeUnknown(f"the command took longer than {self._timeout:g} s, and was killed") from None
        finally:
            reading.cancel()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if code == 0:
            _write(errors.last)
            return
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = shortened(errors.last.decode(errors="replace").strip(), REASON)
        reason = f"the command ended with {ending}" + (f": {said}" if said else "")
        raise Reject(reason) if code == REJECTED else ChannelError(reason)


class Errors:
    """Passes on what a process writes to standard error, but for the ``last`` line, which is kept."""

    def __init__(self, process: Process) -> None:
        assert process.stderr is not None
        self._stream = process.stderr
        self.last = b""

    async def read(self) -> None:
        """Read until nobody holds the other end."""
        while chunk := await self._stream.read(CHUNK):
            text = self.last + chunk
            end = text.rstrip().rfind(b"\n") + 1
            end = end or max(0, len(text) - CHUNK)
            _write(text[:end])
            self.last = text[end:]


async def _feed(process: Process, text: bytes) -> None:
    """Write to its standard input, which it need not read."""
    assert process.stdin is not None
    with suppress(
        BrokenPipeError, ConnectionResetError, RuntimeError
    ):  # uvloop has the third for a pipe that is closed
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


def _write(text: bytes) -> None:
    with suppress(OSError):
        while text:
            text = text[os.write(2, text) :]
