"""The lock that keeps the same command from running twice at once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from aiodigest import AiodigestError, data_folder
from aiodigest.cli.options import EMBEDDED


def lock_path(url: str, namespace: str) -> Path:
    """Return the path of the lock file for a namespace; ``url`` has no password."""
    server = "" if url.startswith(EMBEDDED) else f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-"
    return data_folder(url) / "pipes" / f"{server}{namespace}.lock"


@contextmanager
def locked(path: Path) -> Generator[None, None, None]:
    """Hold the lock file; raises AiodigestError if another process does, OSError if it cannot be made.

    The system releases the lock when this process ends, however it ends; so the file stays, and means nothing.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AiodigestError("the same command is already running: give this one another --namespace") from None
        yield
    finally:
        os.close(file)
