"""Numbers as people read them."""

from __future__ import annotations


def in_bytes(number: int) -> str:
    """Show a number of bytes to people."""
    size = float(number)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def in_time(seconds: float) -> str:
    """Show a duration to people."""
    for most, unit, size in ((1, "ms", 0.001), (120, "s", 1), (7_200, "minutes", 60), (172_800, "hours", 3_600)):
        if seconds < most:
            return f"{seconds / size:.2f} ms" if seconds < 0.1 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"


def several(number: int, noun: str, plural: str = "") -> str:
    """Show a count with its noun."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
