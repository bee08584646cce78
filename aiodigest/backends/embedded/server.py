"""``embedded://``: a real Valkey server on a private unix socket, shared by all processes that use its data folder.

The first user locks the folder, opens a socket (the door) and launches a keeper (``supervisor.py``), which inherits
both and owns the server. Every user, the first included, holds a connection through the door: its share. The keeper
restarts a server that ends, and ends it when the last share is gone, however its holder went.

The data folder holds ``lock``, held by flock as long as the keeper *or* the server lives, so that there is never a
second server; ``server.log`` and ``server.log.1``; the server's append-only files; and ``run``, the sockets. Leftovers
of these after a power cut block nobody: only a held lock and an answering door count.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from socket import AF_UNIX, SHUT_WR, SOCK_STREAM
from socket import socket as Socket
from typing import NoReturn
from urllib.parse import quote

from aiodigest.backends.embedded.binary import find_binary
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError

_LONGEST_SOCKET_PATH = 103  # bytes; macOS allows no more
_PATIENCE = 1.0  # for a server that is down and may come back, before start() fails
_JOINING = 20.0  # to find or launch a keeper; the one before may take 10 s to end its server
_ORPHAN = 0.5  # with the folder locked and nobody at the door for so long, the server may have lost its keeper
_TRANSIENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


class EmbeddedServer:
    """An embedded server for one data folder, shared by all processes that use it; it ends with its last user.

    ``folder`` defaults to the environment's ``AIODIGEST_DATA``, else to the user's data folder. Any number of these
    may exist for one folder, in any number of threads and processes. Each belongs to the event loop that started
    it, and may be started again after its ``stop``, even in another loop. A child made by ``os.fork`` does not inherit
    its parent's share: it starts its own if it needs one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._given = Path(os.path.abspath(folder or _default_folder()))
        self._share: _Share | None = None
        self._watcher: asyncio.Task[None] | None = None

    @cached_property
    def folder(self) -> Path:
        """The data folder, without symbolic links: all its users must arrive at the same sockets."""
        return self._given.resolve()

    @property
    def socket(self) -> Path:
        """The server's unix socket, the same across restarts."""
        return self._sockets / "server.sock"

    @property
    def pid(self) -> int | None:
        """The server's process id, while there is one."""
        return self._share.pid if self._share else None

    def why_down(self) -> str | None:
        """Explain from its log why the server is unusable now; None if it is up, or was not started."""
        if self._share is None or self._share.up:
            return None
        return f"the embedded server in {self.folder} is down: {self._share.reason or 'it is starting'}"

    async def start(self) -> str:
        """Start the server or join it, wait until it stores data, and return its URL for redis-py.

        Loading much data may take long; cancel at will. Raises ``ConfigurationError`` if the folder, the platform or
        the binary cannot be used, and ``BackendUnavailable`` with the reason if the server ends again and again.
        """
        if not self._is_started():
            share = self._share = await self._join()
            try:
                await self._until_up(share)
            except BaseException:
                share.close()
                raise
            self._watcher = asyncio.create_task(self._watch(share), name="aiodigest-embedded")
        return f"unix://{quote(str(self.socket))}"

    async def stop(self) -> None:
        """End this user's share; if it is the last, return once the server is gone and all data is on disk."""
        watcher, self._watcher = self._watcher, None
        try:
            if watcher is not None and watcher.get_loop() is asyncio.get_running_loop():
                watcher.cancel()
                await asyncio.wait([watcher])
        finally:  # a cancellation must not leave the share behind, and with it the server
            share, self._share = self._share, None
            if share is not None and share.is_open:
                await share.leave()

    def _is_started(self) -> bool:
        """True if started in this loop: not in one closed without a ``stop``, nor in a parent process."""
        if self._watcher and self._watcher.get_loop() is asyncio.get_running_loop() and not self._watcher.done():
            return True
        if self._share:
            self._share.close()
        return False

    async def _until_up(self, share: _Share) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as patience:
                while not share.up:
                    if share.reason is not None and patience.when() is None:
                        patience.reschedule(loop.time() + _PATIENCE)
                    if not await share.hear():
                        share.lose()
                        raise BackendUnavailable(f"{self.why_down()}")
        except TimeoutError:
            raise BackendUnavailable(f"{self.why_down()} (its log is {self.folder / 'server.log'})") from None

    async def _watch(self, share: _Share) -> None:
        """Keep ``pid`` and ``why_down`` up to date; if the keeper is killed, and its server with it, launch another."""
        while True:
            if not await share.hear():
                share.lose()
                share = self._share = await self._rejoin(share)

    async def _rejoin(self, lost: _Share) -> _Share:
        delay = 0.1
        while True:
            try:
                return await self._join()
            except AiodigestError as error:
                lost.fail(str(error))
            await asyncio.sleep(delay)
            delay = min(2 * delay, 5.0)

    async def _join(self) -> _Share:
        """Enter as soon as possible: while the previous last user leaves, that takes a moment."""
        _check_platform()
        _make_folder(self.folder)
        loop = asyncio.get_running_loop()
        begin, delay = loop.time(), 0.005
        try:
            async with asyncio.timeout(_JOINING):
                while True:
                    try:
                        if (share := await self._enter()) is not None:
                            return share
                    except BlockingIOError:  # so many are at the door, which a keeper holds open: there is no orphan
                        begin = loop.time()
                    if loop.time() - begin > _ORPHAN:
                        self._dismiss_orphan()
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, 0.1)
        except TimeoutError:
            raise BackendUnavailable(
                f"the embedded server in {self.folder} neither started nor ended within {_JOINING:.0f} s "
                f"(its log is {self.folder / 'server.log'})"
            ) from None

    async def _enter(self) -> _Share | None:
        """Go through the door, or launch a keeper and go through its door; None while neither is possible.

        Raises BlockingIOError if the door is too crowded.
        """
        launcher: subprocess.Popen[bytes] | None = None
        connection = self._knock()
        if connection is None:
            launched = self._launch(await asyncio.to_thread(find_binary))
            if launched is None:
                return None
            connection, launcher = launched
        share = _Share(connection)
        try:
            if await share.hear():
                return share
        except BaseException:
            share.close()
            raise
        finally:
            if launcher is not None:  # the keeper is not this process, but its child
                launcher.kill()
                launcher.wait()
        share.close()
        if launcher is not None:
            raise BackendUnavailable(f"the keeper of the embedded server in {self.folder} ended at once")
        return None

    def _knock(self) -> Socket | None:
        """Return a connection through the door, or None if nobody opens; BlockingIOError if the door is too crowded.

        Unix sockets connect at once or not at all.
        """
        with _no_fork:
            connection: Socket | None = None
            try:
                connection = Socket(AF_UNIX, SOCK_STREAM)
                _check_private(self._sockets)
                connection.setblocking(False)
                connection.connect(str(self._door))
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
                    return None
                if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
                    _refuse(self._door, error)
                raise
            _connections.add(connection)
            return connection

    def _launch(self, binary: str) -> tuple[Socket, subprocess.Popen[bytes]] | None:
        """Launch a keeper on the folder if nobody holds it. The keeper inherits the lock, and a door already open."""
        import fcntl  # not on Windows

        try:
            with (
                _no_fork,
                open(self.folder / "lock", "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as lock,
                Socket(AF_UNIX, SOCK_STREAM) as door,
            ):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
                _make_folder(self._sockets)
                self._door.unlink(missing_ok=True)
                door.bind(str(self._door))
                door.listen(128)
                connection = self._knock()
                if connection is None:
                    return None
                try:
                    return connection, self._run_keeper(binary, lock.fileno(), door.fileno())
                except BaseException:
                    connection.close()
                    raise
        except BlockingIOError:
            raise
        except OSError as error:
            _refuse(self.folder, error)

    def _run_keeper(self, binary: str, lock: int, door: int) -> subprocess.Popen[bytes]:
        """Run the keeper apart from this process: with its own session, descriptors, streams and folder."""
        program = Path(__file__).with_name("supervisor.py")
        return subprocess.Popen(
            [sys.executable, "-I", "-S", program, binary, self.folder, self._sockets, str(lock), str(door)],
            pass_fds=(lock, door),
            start_new_session=True,
            umask=0o077,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _dismiss_orphan(self) -> None:
        """Ask a server that holds the lock to end, because its keeper is dead (on macOS nothing else ends it then).

        If its keeper is only about to leave, this asks for something already under way.
        """
        with suppress(OSError), Socket(AF_UNIX, SOCK_STREAM) as connection:  # an OSError: it is no orphan, or gone
            connection.setblocking(False)
            connection.connect(str(self.socket))
            connection.send(b"SHUTDOWN NOSAVE\r\n")

    @cached_property
    def _sockets(self) -> Path:
        """The folder of the sockets: in /tmp for long paths, since TMPDIR may differ between users of one folder."""
        folder = self.folder / "run"
        if len(os.fsencode(folder / "server.sock")) <= _LONGEST_SOCKET_PATH:
            return folder
        from hashlib import sha256

        return Path("/tmp") / f"aiodigest-{os.getuid()}-{sha256(os.fsencode(self.folder)).hexdigest()[:16]}"

    @property
    def _door(self) -> Path:
        return self._sockets / "keeper.sock"


class _Share:
    """A connection to the keeper: the server lives while one is open. The keeper sends the server's state over it."""

    def __init__(self, connection: Socket) -> None:
        self._connection = connection
        self._received = b""
        self.up = False
        self.pid: int | None = None
        self.reason: str | None = None

    @property
    def is_open(self) -> bool:
        return self._connection.fileno() != -1

    async def hear(self) -> bool:
        """Read the keeper's next line; False if the keeper is gone."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._received:
            received = b""
            with suppress(OSError):
                received = await loop.sock_recv(self._connection, 65536)
            if not received:
                return False
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        state, _, detail = line.decode().partition(" ")
        if state == "down":
            self.fail(detail)
        else:
            self.up = state == "up"
            self.pid = int(detail) or None
            self.reason = None if self.up else self.reason
        return True

    def fail(self, reason: str) -> None:
        self.up, self.pid, self.reason = False, None, reason

    def lose(self) -> None:
        """Note that the keeper is gone. If it had a reason to end, it sent that before."""
        self.close()
        self.fail("its keeper was killed" if self.up or self.reason is None else self.reason)

    async def leave(self) -> None:
        """Leave, and wait for the keeper to answer: at once, or after the server's end if this was the last share."""
        loop = asyncio.get_running_loop()
        try:
            self._connection.shutdown(SHUT_WR)
            async with asyncio.timeout(_JOINING):
                while await loop.sock_recv(self._connection, 65536):
                    pass
        except OSError:
            pass  # the keeper is gone, or hangs: the share ends in any case
        finally:
            self.close()

    def close(self) -> None:
        self._connection.close()
        _connections.discard(self._connection)


# A forked child has copies of all descriptors, and one more copy would keep the share of a dead parent alive. So forks
# wait while descriptors are being made here, and the child closes what there is. (What `exec`s has none anyway.)
_no_fork = threading.RLock()
_connections: set[Socket] = set()


def _after_fork_in_child() -> None:
    for connection in _connections:
        connection.close()
    _connections.clear()
    _no_fork.release()


if sys.platform != "win32":
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)


def _default_folder() -> Path:
    if named := os.environ.get("AIODIGEST_DATA"):
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("aiodigest")


def _check_platform() -> None:
    if sys.platform == "win32":
        raise ConfigurationError("embedded:// needs Linux or macOS: give the URL of a server")
    if getattr(sys, "frozen", False) or not sys.executable:
        raise ConfigurationError("embedded:// needs a Python interpreter beside the program: give the URL of a server")


def _make_folder(path: Path) -> None:
    try:
        str(path).encode()  # to stand in a URL
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except UnicodeEncodeError:
        raise ConfigurationError(f"the name of a data folder must be UTF-8; it is {str(path)!r}") from None
    except OSError as error:
        _refuse(path, error)


def _check_private(path: Path) -> None:
    """Make sure that nobody else can get between a user and the server (the folder may be in /tmp), or use it."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(f"{path} is no folder of this user: remove it, or give another data folder")
    if status.st_mode & 0o077:
        path.chmod(0o700)


def _refuse(path: Path, error: OSError) -> NoReturn:
    message = f"the embedded server cannot use {path}: {error.strerror or error}"
    if error.errno in _TRANSIENT:
        raise BackendUnavailable(message) from error
    raise ConfigurationError(f"{message}; give another folder (embedded:///folder, or AIODIGEST_DATA)") from error
