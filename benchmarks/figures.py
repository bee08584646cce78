"""A measured value, beside the bound that it must keep."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value and the bound that it must not exceed."""

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def missed(self) -> bool:
        return self.bound is not None and self.value > self.bound

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"{'MISSED' if self.missed else 'ok'}, at most {self.bound:g} {self.unit}"
        return f"{self.name:<60}{self.value:12.2f} {self.unit:<9} {bound}".rstrip()
