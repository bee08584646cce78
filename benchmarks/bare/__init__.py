"""The commands that the engine's scripts run, with nothing around them: what no layout of this kind can do without."""

from __future__ import annotations

from pathlib import Path


def bare(name: str) -> str:
    """The script of the commands of an add, a claim or a close, as text."""
    return Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")
