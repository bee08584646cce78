"""The memory of this process, in MB of 1,000,000 bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

STATM = Path("/proc/self/statm")


def resident() -> float:
    """What it has now; 0 where the system does not tell."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize() / 1e6 if STATM.exists() else 0.0


def peak() -> float:
    """The most that it has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
