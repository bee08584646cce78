"""The supervisor: a small program that owns one embedded server, restarts it, and ends when its last user has gone.

``server.py`` runs this file in a bare interpreter (standard library only). Every user holds a connection to the
supervisor's socket, which the kernel closes however the user ends, and is sent lines of status over it: ``starting
PID``, ``up PID``, ``down REASON``, or ``refused REASON`` if no start will help while the files are what they are.

It works in the data folder itself and not by its path, where another folder may appear one day. It keeps checking for
that, and for deleted files without which the server cannot be found or started. If either happens, it kills the server,
so that nothing more is acknowledged, and ends. The users launch another supervisor.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import IO

PARTS = "appendonlydir"  # from version 7 on
MANIFEST = os.path.join(PARTS, "appendonly.aof.manifest")
ENDS_EARLY = b"Unexpected end of file reading the append only file"  # what a server says of it
MEANINGLESS = b"Bad file format reading the append only file"
# Of a file that is damaged, or was written by another server program or a newer version.
UNREADABLE = re.compile(
    MEANINGLESS
    + rb"|Can't handle RDB format|Error reading the RDB|in RDB reading offset|Wrong signature"
    + rb"|Invalid AOF manifest|AOF file \S+ length. stat: No such file"
)

SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
STEADY = 10.0  # a server that was up for so long did not keep crashing
SILENCE = 30.0  # a server that answers nothing for so long after its start hangs
GRACE = 10.0  # to end after SIGTERM; later it is killed, which loses nothing that was acknowledged
LOOK = 0.2  # between two checks that all files are still there
CROWDED = 0.2  # to wait if there is no descriptor for one more user
LOG_SIZE = 1 << 20  # of the log, and of the one before it

# A write, because a server on a full disk starts and answers, and dies of the first write. (While it loads its data it
# answers too, that it loads.)
PROBE = b"EVAL \"redis.call('set', KEYS[1], 1) return redis.call('del', KEYS[1])\" 1 aiodigest:probe\r\n"

# The call that ties the server's life to that of the *thread* that forks it; the supervisor has only one. It exists on
# Linux; elsewhere the next user ends an orphaned server.
prctl: Callable[[int, int], int] | None = None
with suppress(ImportError, OSError, AttributeError):
    import ctypes

    prctl = ctypes.CDLL(None).prctl


def identity(file: str | int) -> tuple[int, int] | None:
    """Return the device and number of the file behind a path or descriptor; None if there is none."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def append_only_files() -> list[str]:
    """List the files in the manifest, the one being written to last; servers before version 7 have just one file."""
    try:
        with open(MANIFEST) as manifest:
            lines = manifest.read().splitlines()
    except FileNotFoundError:
        return ["appendonly.aof"]
    except UnicodeDecodeError:
        lines = []
    names = [line.split()[1:2] for line in lines if " type h" not in line]  # h: history, to be deleted
    if not names or not all(names):
        raise OSError(f"{MANIFEST} cannot be read")
    return [os.path.join(PARTS, name) for [name] in names]


def open_own(path: str, flags: int) -> int:
    """Open a file here, but not where a link leads."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


class Files:
    """The files without which the server, or what it stored, would not be found again.

    They are known by number, since another server's file may appear under the same name.
    """

    def __init__(self, folder: str, sockets: str, lock: int) -> None:
        self.folder = folder
        self.sockets = sockets
        self.lock = os.path.join(folder, "lock")
        self.supervisor_socket = os.path.join(sockets, "keeper.sock")
        self.server_socket = os.path.join(sockets, "server.sock")
        self.known = {self.lock: identity(lock), self.supervisor_socket: identity(self.supervisor_socket)}
        self.parts: dict[str, tuple[int, int]] = {}

    def server_is_up(self) -> None:
        """Expect the files of this server from now on, not those of an earlier one."""
        self.known[self.server_socket] = identity(self.server_socket)
        self.parts.clear()
        with suppress(OSError):
            self.parts.update((path, found) for path in append_only_files() if (found := identity(path)))

    def missed(self, up: bool) -> str | None:
        """Name one that is gone. This may be wrong while the server is ending, or rewrites its append-only files."""
        gone = [path for path, known in self.known.items() if identity(path) != known]
        if self.lock in gone:
            return f"its folder {self.folder}, or the lock in it, was deleted, moved or replaced"
        if gone:
            return f"its socket {gone[0]} was deleted or replaced"
        with suppress(OSError):  # the server itself will say that the manifest cannot be read
            if up and not all(map(self.has, append_only_files())):
                return f"an append-only file in {self.folder} was deleted or replaced"
        return None

    def has(self, path: str) -> bool:
        found = identity(path)
        replaceable = not path.startswith(PARTS)  # before version 7 a server replaces its file from time to time
        return found is not None and (replaceable or self.parts.setdefault(path, found) == found)

    def unreadable(self) -> str | None:
        """Give the reason not to start a server: it treats files without a manifest as nothing, and empties them.

        It treats a ``dump.rdb`` as nothing too, which is all that a server without an append-only file has stored.
        """
        if os.path.exists("dump.rdb") and not os.path.exists(PARTS) and not os.path.exists("appendonly.aof"):
            return f"dump.rdb in {self.folder} is of another server, and would not be read: give another folder"
        with suppress(FileNotFoundError):
            for file in os.scandir(PARTS):
                written = file.name.endswith(".incr.aof") and file.stat().st_size
                compacted = ".base." in file.name and ".aof.1.base." not in file.name  # 1 is that of an empty store
                if (written or compacted) and identity(MANIFEST) is None:
                    return f"{MANIFEST} is missing: put it back, or move {PARTS} out of {self.folder}"
        return None

    def keep_copy(self) -> str:
        """Copy the file that ends in the middle of a write, before what cannot be read is cut off.

        After a power cut that is a write that was not acknowledged; after damage to a length, all that followed it.
        """
        import shutil

        path = append_only_files()[-1]
        copy = f"{os.path.basename(path)}.{time.time_ns() // 1_000_000}.before-repair"
        try:
            shutil.copyfile(path, copy)
        except OSError:
            with suppress(OSError):
                os.unlink(copy)  # it is useless, and may be filling the disk
            raise
        return copy

    def zeros(self) -> int:
        """Count the zeros at the end of the append-only file: no write ends so, but a power cut leaves empty blocks."""
        with open(append_only_files()[-1], "rb") as file:
            end = size = file.seek(0, os.SEEK_END)
            while end > 0:
                begin = max(0, end - (1 << 16))
                file.seek(begin)
                if block := file.read(end - begin).rstrip(b"\0"):
                    return size - begin - len(block)
                end = begin
        return size

    def cut_off(self, zeros: int) -> None:
        path = append_only_files()[-1]
        os.truncate(path, os.path.getsize(path) - zeros)

    def remove_sockets(self, own: bool) -> None:
        """Remove what a server that was killed leaves too; others' sockets may have the names that are not ``own``."""
        for path in (self.server_socket, self.supervisor_socket):
            with suppress(OSError):
                if own or identity(path) == self.known.get(path):
                    os.unlink(path)
        if own:
            with suppress(OSError):
                os.rmdir(self.sockets)


class Supervisor:
    def __init__(self, binary: str, folder: str, sockets: str, lock: int, listener: socket.socket) -> None:
        self.binary = binary
        self.lock = lock
        self.listener = listener
        self.files = Files(folder, sockets, lock)
        self.next_look = 0.0
        self.missed: str | None = None  # what the last look missed
        self.lost: str | None = None  # what two looks missed: the first may have met a server that was about to end
        self.selector = selectors.DefaultSelector()
        self.users: set[socket.socket] = set()
        self.departed: list[socket.socket] = []  # these wait for the close: now, or once the server of the last is gone
        self.accept_due = inf  # when to accept users again; inf: when they come
        self.crowded = False
        self.spare = socket.socket(socket.AF_UNIX)  # the descriptor to log with when no other is left
        self.dismissed = False
        self.server: subprocess.Popen[bytes] | None = None
        self.output: IO[bytes]  # what the server prints
        self.tail = b""  # the last of what it printed before it was up, or since
        self.up = False
        self.answered = False
        self.since = 0.0  # when it was started, or came up
        self.backoff = SHORTEST_BACKOFF
        self.due = time.monotonic()  # when to do the next step; inf: when something happens
        self.repair = False  # true if the next server may cut off what it cannot read at the end of its file
        self.status = b"starting 0\n"

    def run(self) -> None:
        wake, waker = self.wakers = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self.on_signal)
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(wake, selectors.EVENT_READ, lambda: wake.recv(4096))
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.accept()  # the launcher of this supervisor has connected already
        while self.users and not self.dismissed and not self.lost:
            due = min(self.next_look, self.accept_due, self.due)
            for key, _ in self.selector.select(max(0.0, due - time.monotonic())):
                key.data()
            self.reap()
            if not self.users:
                self.accept()  # a user who has connected now would find nobody in a moment
            if self.users:
                self.step()

    def step(self) -> None:
        now = time.monotonic()
        while self.departed:
            self.departed.pop().close()
        if self.accept_due <= now:
            self.accept_due = inf
            self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        start = self.due <= now and self.server is None
        if start or self.next_look <= now:
            self.look()
        if start and not self.missed:
            self.start()
        elif self.server is not None and self.due <= now:
            self.probe(self.server)

    def on_signal(self, number: int, _frame: object) -> None:
        """Note a SIGTERM. The selector wakes up in any case, and ``reap`` notices a server that has ended."""
        if number == signal.SIGTERM:
            self.dismissed = True

    # Users

    def accept(self) -> None:
        try:
            while True:
                user, _ = self.listener.accept()
                user.setblocking(False)
                self.users.add(user)
                if self.status.startswith(b"refused"):  # the files may be others by now
                    self.status, self.due = b"starting 0\n", time.monotonic()
                self.selector.register(user, selectors.EVENT_READ, lambda user=user: self.listen(user))
                self.tell(user)
        except BlockingIOError:
            self.crowded = False
        except OSError as error:  # no descriptor is left: waiting users must not wake the selector meanwhile
            if self.accept_due == inf:
                self.selector.unregister(self.listener)
            self.accept_due = time.monotonic() + CROWDED
            if not self.crowded:
                self.crowded = True
                with suppress(OSError):
                    self.spare.close()
                    self.log(f"users have to wait: {error}\n".encode())
                    self.spare = socket.socket(socket.AF_UNIX)

    def listen(self, user: socket.socket) -> None:
        with suppress(BlockingIOError):
            with suppress(ConnectionError):
                if user.recv(4096):
                    return
            self.selector.unregister(user)
            self.users.discard(user)
            self.departed.append(user)

    def tell(self, user: socket.socket) -> None:
        with suppress(OSError):  # it left, or has not listened for long: then it hears the next line
            user.send(self.status)

    def publish(self, status: str) -> None:
        if (line := status.encode() + b"\n") != self.status:
            self.status = line
            for user in self.users:
                self.tell(user)

    def look(self) -> None:
        self.next_look = time.monotonic() + LOOK
        with suppress(OSError):  # such as that there is no descriptor to look with: it shows nothing
            before, self.missed = self.missed, self.files.missed(self.up)
            if before is not None and self.missed is not None:
                self.lost = self.missed
                self.publish(f"down {self.lost}")

    # The server

    def start(self) -> None:
        self.since, self.up, self.answered = time.monotonic(), False, False
        try:
            unreadable, refused = self.files.unreadable(), True
            if unreadable is None:
                self.launch()
        except (OSError, subprocess.SubprocessError) as error:  # such as that no descriptor or process is left
            unreadable, refused = f"it cannot be started: {error}", False
        if unreadable is not None:
            self.fail(unreadable, refused)
        else:
            self.due = self.since + 0.01

    def probe(self, server: subprocess.Popen[bytes]) -> None:
        """Ask the server that starts if it can store. It is up once it has."""
        now = time.monotonic()
        answer = self.ask(PROBE)
        self.answered |= bool(answer)
        self.due = now + (0.1 if self.answered else 0.01)
        if answer == b":1\r\n":
            self.up, self.since, self.due, self.tail, self.repair = True, now, inf, b"", False
            self.files.server_is_up()
            self.publish(f"up {server.pid}")
        elif answer.startswith(b"-") and not answer.startswith(b"-LOADING"):
            self.publish(f"down it refuses writes: {answer[1:].decode().strip()}")
        elif not self.answered and now - self.since > SILENCE:
            self.log(f"the server did not answer for {SILENCE:.0f} s: killed\n".encode())
            server.kill()
            self.due = inf

    def launch(self) -> None:
        with suppress(OSError):  # an earlier server may still listen at it, and would answer for the one that starts
            os.unlink(self.files.server_socket)
        options = [
            *("--port", "0", "--unixsocket", self.files.server_socket, "--unixsocketperm", "700"),
            *("--dir", ".", "--appendonly", "yes", "--appendfsync", "always"),
            *("--aof-load-truncated", "yes" if self.repair else "no", "--save", "", "--maxmemory-policy", "noeviction"),
            *("--daemonize", "no", "--logfile", ""),
        ]
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # or the child would take it for the supervisor's
        try:
            self.server = subprocess.Popen(
                [self.binary, *options],
                bufsize=0,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[self.lock],  # it is held for as long as the supervisor or the server lives
                restore_signals=False,  # Python ignores SIGXFSZ; so the server can log a file-size limit as an error
                preexec_fn=partial(become_server, os.getpid()),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        assert self.server.stdout
        self.output, self.tail = self.server.stdout, b""
        self.publish(f"starting {self.server.pid}")
        os.set_blocking(self.output.fileno(), False)
        self.selector.register(self.output, selectors.EVENT_READ, self.read_output)

    def ask(self, command: bytes) -> bytes:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1)
            connection.connect(self.files.server_socket)
            connection.sendall(command)
            return connection.recv(1024)
        return b""

    def reap(self) -> None:
        if self.server is None or (status := self.server.poll()) is None:
            return
        now = time.monotonic()
        if self.up and now - self.since > STEADY:
            self.backoff = SHORTEST_BACKOFF
        self.close_output()
        self.server, self.up = None, False
        self.files.known.pop(self.files.server_socket, None)
        reason, refused = self.reason(status), UNREADABLE.search(self.tail) is not None
        try:
            zeros = self.files.zeros() if MEANINGLESS in self.tail else 0
            if zeros or ENDS_EARLY in self.tail:
                copy, refused = self.files.keep_copy(), False
                self.log(f"the end of the append-only file will be cut off: what it was is kept as {copy}\n".encode())
                self.files.cut_off(zeros)
                self.repair = True
        except OSError as error:
            reason, refused = f"{reason}; before it is repaired it must be copied: {error}", False
        self.fail(reason, refused)

    def fail(self, reason: str, refused: bool = False) -> None:
        self.due = time.monotonic() + self.backoff
        self.backoff = min(2 * self.backoff, LONGEST_BACKOFF)
        self.log(f"the server is down: {reason}\n".encode())
        self.publish(f"{'refused' if refused else 'down'} {reason}")

    def reason(self, code: int) -> str:
        """Explain how the server ended, with its last warnings (lines of level ``#``), else its last lines."""
        ended = f"exit status {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        warnings = [line.partition(" # ")[2] for line in lines if " # " in line and " # WARNING" not in line]
        text = ": ".join([ended, *([" / ".join((warnings or lines)[-3:])] if lines else [])])
        if UNREADABLE.search(self.tail):
            text += (
                "; it is damaged, or of another server or a newer version: put a copy back, name that server "
                f"(AIODIGEST_SERVER), or move {self.files.folder} away, to begin anew"
            )
        elif "AOF" in text:
            with suppress(OSError):
                disk = os.statvfs(self.files.folder)
                text += f" ({disk.f_bavail * disk.f_frsize >> 20} MB are free on the disk of {self.files.folder})"
        return text

    # The log: the supervisor writes it, so that it is bounded, and the last lines are known also when the disk is full.

    def read_output(self) -> None:
        with suppress(BlockingIOError, KeyError):
            while printed := os.read(self.output.fileno(), 65536):
                self.tail = (self.tail + printed)[-4096:]
                self.log(printed)
            self.selector.unregister(self.output)  # the server closed it

    def close_output(self) -> None:
        self.read_output()
        with suppress(KeyError):  # a child of the server may still hold it open
            self.selector.unregister(self.output)
        self.output.close()

    def log(self, text: bytes) -> None:
        with suppress(OSError), open("server.log", "ab", opener=open_own) as file:
            if file.tell() > LOG_SIZE:
                os.replace("server.log", "server.log.1")
            file.write(text)

    # The end

    def leave(self) -> None:
        """End the server, then remove its sockets. Users who arrive meanwhile find the lock held until this ends."""
        self.listener.close()
        if self.server is not None:
            if self.lost:  # ending by itself, it would remove the socket, whose name may be another server's now
                self.server.kill()
                self.log(f"the server was killed: {self.lost}\n".encode())
            else:
                self.ask(b"SHUTDOWN NOSAVE\r\n")  # it syncs its file, as on SIGTERM, at which it looks each 0.1 s
                self.server.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.server.wait(GRACE)
            self.server.kill()  # nothing, if it has ended
            self.server.wait()
            self.close_output()
        self.files.remove_sockets(own=not self.lost)


def become_server(supervisor: int) -> None:
    """Prepare the new process in which the server is about to run."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.set_blocking(1, False)  # a stopped supervisor must not stop the server
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != supervisor:
        os._exit(1)


def main() -> None:
    if os.fork():
        os._exit(0)  # no child of the user that launched it: nobody must wait for it, and no process tree ends it
    binary, folder, sockets, lock, listener = sys.argv[1:]
    os.chdir(folder)
    supervisor = Supervisor(binary, folder, sockets, int(lock), socket.socket(fileno=int(listener)))
    try:
        supervisor.run()
    except BaseException:
        import traceback

        supervisor.log(traceback.format_exc().encode())
    finally:
        supervisor.leave()


if __name__ == "__main__":
    main()
