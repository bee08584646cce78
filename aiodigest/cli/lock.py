"""The command's own files outside the store, and its lock against a second run."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from platformdirs import user_data_path

from aiodigest import AiodigestError


class Taken(AiodigestError):
    """Another process holds the lock."""


def is_embedded(url: str) -> bool:
    """True if a URL means a server in a folder of this machine."""
    return url.startswith("embedded:")


def data_folder(url: str) -> Path:
    """Return the folder that a URL names, or else the user's; ``AIODIGEST_DATA`` names another one."""
    folder = unquote(urlsplit(url).path) if is_embedded(url) else ""
    named = (folder.strip("/") and folder) or os.environ.get("AIODIGEST_DATA")
    return Path(named) if named else user_data_path("aiodigest")


@contextmanager
def alone(path: Path, complaint: str) -> Generator[None, None, None]:
    """Hold the lock file ``path``; raises Taken(``complaint``) if another process does, OSError if it cannot be made.

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
                raise Taken(complaint) from None
        yield
    finally:
        os.close(file)
