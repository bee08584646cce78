"""The files of an embedded server, as its keeper checks them: they must still be there, and be readable.

Like ``supervisor.py``, this runs in a bare interpreter, in the data folder itself.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import NamedTuple

PARTS = "appendonlydir"  # from version 7 on
MANIFEST = os.path.join(PARTS, "appendonly.aof.manifest")
ENDS_EARLY = b"Unexpected end of file reading the append only file"  # what a server says of it


class Identity(NamedTuple):
    device: int
    number: int


def identity(file: str | int) -> Identity | None:
    """Return the identity of the file behind a path or descriptor; None if there is none."""
    try:
        status = os.stat(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Identity(status.st_dev, status.st_ino)


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


class Files:
    """Identifies files by number: another file, of another server, may appear under the same name."""

    def __init__(self, folder: str, sockets: str, lock: int) -> None:
        self.folder = folder
        self.sockets = sockets
        self.lock = os.path.join(folder, "lock")
        self.door = os.path.join(sockets, "keeper.sock")
        self.server_socket = os.path.join(sockets, "server.sock")
        self.known = {self.lock: identity(lock), self.door: identity(self.door)}
        self.parts: dict[str, Identity] = {}

    def clear_socket(self) -> None:
        """Remove a socket at which an earlier server may still listen: it would answer for the one that starts."""
        with suppress(OSError):
            os.unlink(self.server_socket)

    def server_is_up(self) -> None:
        """Expect the files of this server from now on, not those of an earlier one."""
        self.known[self.server_socket] = identity(self.server_socket)
        self.parts.clear()
        with suppress(OSError):
            self.parts.update((path, found) for path in append_only_files() if (found := identity(path)))

    def server_is_gone(self) -> None:
        self.known.pop(self.server_socket, None)

    def missed(self, up: bool) -> str | None:
        """Name a deleted file without which the server, or a record it acknowledges now, could not be found again.

        This may be wrong while the server is ending, or is rewriting its append-only files.
        """
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
        if not path.startswith(PARTS):  # before version 7 a server replaces its file from time to time
            return found is not None
        return found is not None and self.parts.setdefault(path, found) == found

    def unreadable(self) -> str | None:
        """Give the reason not to start a server: it treats files without a manifest as nothing, and empties them."""
        with suppress(FileNotFoundError):
            for file in os.scandir(PARTS):
                written = file.name.endswith(".incr.aof") and file.stat().st_size
                compacted = ".base." in file.name and ".aof.1.base." not in file.name  # 1 is that of an empty store
                if (written or compacted) and identity(MANIFEST) is None:
                    return f"{MANIFEST} is missing: put it back, or move {PARTS} out of {self.folder}"
        return None

    def keep_copy(self) -> str:
        """Copy the file that ends in the middle of a write, before the server cuts off what it cannot read.

        After a power cut that is the last write, which was not acknowledged. But a damaged length in the middle of the
        file looks the same, and then it is all that was written since.
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

    def remove_sockets(self, own: bool) -> None:
        """A server that was killed leaves its socket. If this keeper does not own the names, there may be others'."""
        for path in (self.server_socket, self.door):
            with suppress(OSError):
                if own or identity(path) == self.known.get(path):
                    os.unlink(path)
        if own:
            with suppress(OSError):
                os.rmdir(self.sockets)
