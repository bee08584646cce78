"""``--exec``: a command of the user's as a channel."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from subprocess import Popen
from typing import IO, Any, cast

from aiodigest import ChannelError, Digest, OutcomeUnknown, Reject
from aiodigest.channels import Channel
from aiodigest.cli.output import ReaderGone, is_behind, pass_on
from aiodigest.cli.rendering import digest_json, shortened

REJECTED = 65  # an exit code, EX_DATAERR
CUT_OFF = -signal.SIGPIPE, 128 + signal.SIGPIPE  # of what writes for nobody, and of a shell around it
KEPT = 8 * 1024  # bytes of a line of its errors
LINGER = 0.5  # seconds for the last of its errors, since what it leaves behind may hold them open
POLL = 0.02  # seconds between looks at whether more of its errors can be passed on
REASON = 300  # characters


class Exec(Channel):
    """Runs a shell command for each digest, which gets it as JSON on its standard input, in a process group of its own.

    Its standard output is this process's; so are its errors, but for the last line of those of a failure, which is the
    reason. Exit code 0 has delivered the digest, 65 is a ``Reject``; any other one, and a signal, tries again. It
    counts once the command has ended, whatever that leaves running. After ``timeout`` seconds the group is killed: an
    ``OutcomeUnknown``. Raises ReaderGone if it was cut off since nobody reads standard output any more.
    """

    def __init__(self, command: str, timeout: float) -> None:
        self._command = command
        self._timeout = timeout
        self._turn = asyncio.Lock()  # to start: each start stops the loop, which renews leases between two

    async def __call__(self, digest: Digest[Any], /) -> None:
        text, errors = digest_json(digest), Errors()
        async with _started(self._command, text, errors, self._turn) as ended:
            end = asyncio.get_running_loop().time() + self._timeout
            await asyncio.wait([ended], timeout=self._timeout)
            if not ended.done():
                raise OutcomeUnknown(f"the command took longer than {self._timeout:g} s, and was killed")
            code = ended.result()
            await errors.read_until(end)
        if code == 0:
            pass_on(errors.last)
            return
        if code in CUT_OFF and not _is_read(1):
            raise ReaderGone("nobody reads standard output any more")
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        said = shortened(errors.last.decode(errors="replace").strip(), REASON)
        reason = f"the command ended with {ending}" + (f": {said}" if said else "")
        raise Reject(reason) if code == REJECTED else ChannelError(reason)


class Errors(asyncio.Protocol):
    """Passes on what a process writes to standard error, no faster than it is read there, but for the ``last`` line,
    which is kept."""

    def __init__(self) -> None:
        self.last = b""
        self._ended = asyncio.Event()
        self._waits = False
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.ReadTransport", transport)

    def data_received(self, data: bytes) -> None:
        text = self.last + data
        end = text.rstrip().rfind(b"\n") + 1
        end = end or max(0, len(text) - KEPT)
        pass_on(text[:end])
        self.last = text[end:]
        if not self._waits and is_behind():
            self._waits = True
            self._go_on()

    def _go_on(self) -> None:
        assert self._transport is not None
        if self._ended.is_set() or self._transport.is_closing():
            return
        if is_behind():
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(POLL, self._go_on)
        else:
            self._waits = False
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended.set()

    async def read_until(self, end: float) -> None:
        """Read what a process that has ended has left to read; until ``end``, by the loop's clock, if that is slow."""
        pause = LINGER
        while not self._ended.is_set() and asyncio.get_running_loop().time() < end:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._ended.wait()
            if not self._waits:
                break
            pause = POLL


@asynccontextmanager
async def _started(
    command: str, text: bytes, errors: Errors, turn: asyncio.Lock
) -> AsyncGenerator[asyncio.Future[int]]:
    """Start a command that gets a text, in its turn, and yield its exit code to come; kill it in the end, if it has not
    ended. Raises ChannelError.

    It is not asyncio's, which waits for the end of its pipes, too; uvloop's has more of our files than it should.
    """
    loop, ours = asyncio.get_running_loop(), ExitStack()
    process: Popen[bytes] | None = None
    ended = loop.create_future()
    try:
        with ExitStack() as its:
            try:
                given, feed = _pipe()
                its.enter_context(given)
                feeding, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, feed)
                ours.callback(_end, feeding)
                heard, told = _pipe()
                its.enter_context(told)
                hearing, _ = await loop.connect_read_pipe(lambda: errors, heard)
                ours.callback(hearing.close)
                async with turn:
                    process = _start(command, given, told)
                    threading.Thread(target=_wait, args=(process, ended), daemon=True).start()
                    await asyncio.sleep(0)
            except OSError as error:
                raise ChannelError(f"the command could not be started: {error.strerror or error}") from None
        feeding.write(text)  # it need not read it
        feeding.close()
        yield ended
    finally:
        ours.close()
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a thread waits for its end, which may take long


def _start(command: str, given: IO[bytes], told: IO[bytes]) -> Popen[bytes]:
    # A group of its own is killed as a whole, and does not hear the Ctrl-C after which what waits is sent.
    return Popen(command, shell=True, stdin=given, stderr=told, start_new_session=True)


def _wait(process: Popen[bytes], ended: asyncio.Future[int]) -> None:
    code = process.wait()
    with suppress(RuntimeError):  # the loop has ended
        ended.get_loop().call_soon_threadsafe(ended.set_result, code)


def _end(feeding: asyncio.WriteTransport) -> None:
    if feeding.get_write_buffer_size():
        feeding.abort()
    else:
        feeding.close()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    read, write = os.pipe()
    return open(read, "rb", 0), open(write, "wb", 0)


def _is_read(file: int) -> bool:
    """False if the other end of what is written to has been closed."""
    ends = select.poll()
    ends.register(file, 0)
    return not any(event & (select.POLLERR | select.POLLHUP) for _, event in ends.poll(0))
