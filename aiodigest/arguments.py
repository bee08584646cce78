"""Arguments of every kind, checked with words that say what is allowed and what was given."""

from __future__ import annotations

from datetime import timedelta

from aiodigest.errors import InvalidArgument, shown

TEN_YEARS = 315_360_000  # seconds


def require(fits: bool, what: str, allowed: str, given: object) -> None:
    """Refuse an argument that does not fit; callers who run a type checker cannot pass one of the wrong type."""
    if not fits:
        raise InvalidArgument(f"{what} must be {allowed}, not {shown(given)}")


def whole(value: object, what: str, least: int, most: int | None = None) -> int:
    """Return a whole number of at least ``least``, and at most ``most`` if given."""
    # bool is an int to Python, and no number of anything to a reader
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most:,}"
        told = f"{what} must be a whole number {allowed}, not {shown(value)}"
        raise InvalidArgument(told, field=what, given=value, least=least, most=most)
    return value


def duration(value: float | timedelta, what: str, least: float = 0.0, *, positive: bool = False) -> float:
    """Return a duration in seconds, of at least ``least`` (or above 0, if ``positive``) and at most ten years."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not least <= number <= TEN_YEARS or (positive and not number):
        allowed = "more than 0" if positive else f"at least {least:g}"
        allowed += f" and at most {TEN_YEARS} seconds (ten years), or such a timedelta"
        told = f"{what} must be {allowed}, not {shown(value)}"
        raise InvalidArgument(told, field=what, given=number, least=least, most=TEN_YEARS)
    return float(number)


def can_ask(function: object) -> bool:
    """True if it may be a function that is asked for an answer; a class is none: its parentheses were forgotten."""
    return callable(function) and not isinstance(function, type)
