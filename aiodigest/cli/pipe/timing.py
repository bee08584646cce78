"""The policy of a pipe: its options one by one, and together; what is refused is told in words of its own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import typer

from aiodigest import InvalidArgument, LimitExceeded, Policy

ALL_DAY, ALL_DAYS = "00:00-24:00", "mon-sun"
UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
FIELDS = {field.name for field in fields(Policy)}
COUNTS = "max_size", "capacity", "max_bytes"  # which are no durations


def cron_of(text: str) -> str:
    """Return the text of a calendar, if it is one. Raises InvalidArgument, and ConfigurationError if it never comes."""
    from aiodigest import At  # imports time zones

    return At(text).cron


def spans_of(text: str) -> str:
    """Return spans of hours, if the text is of such. Raises InvalidArgument."""
    return _hours(text, ALL_DAYS, "UTC").spans


def days_of(text: str) -> str:
    """Return weekdays, if the text is of such. Raises InvalidArgument."""
    return _hours(ALL_DAY, text, "UTC").days


def policy_of(at: str | None, hours: str | None, days: str | None, tz: str | None, **values: Any) -> Policy:
    """Return the policy for these options; None is one that was not given. Raises BadParameter."""
    if days is not None and hours is None:
        raise typer.BadParameter("--days needs --hours")
    zone = tz or "UTC"
    if at is not None:
        from aiodigest import At

        values["at"] = At(at, zone)
    if hours is not None:
        values["hours"] = _hours(hours, days or ALL_DAYS, zone)
    try:
        return Policy(**values)
    except InvalidArgument as error:
        raise typer.BadParameter(in_options(error)) from None


def _hours(spans: str, days: str, tz: str) -> Any:
    from aiodigest import Hours  # imports time zones

    return Hours(spans, days, tz)


def in_options(error: InvalidArgument | LimitExceeded) -> str:
    """Return what an error says of a policy, said of options: ``--ttl 2h`` for ``ttl=7200``."""
    if error.field not in FIELDS:
        return str(error)
    name, other = _option(error.field), _option(error.other)
    given, least, most = (_amount(error.field, each) for each in (error.given, error.least, error.most))
    if isinstance(error, LimitExceeded):
        return f"a line may take at most {most} bytes ({name}), not {given}"
    if not other:
        return f"{name} must be {least} to {most}, not {given}"
    if error.most is not None:
        return f"{name} ({given}) must not be above {other} ({most}): give {other} {given} or more"
    if error.least is not None:
        return f"{name} must be longer than {other} ({least}); it is {given}"
    return f"{name} and {other} exclude each other: give one of them"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in FIELDS else name


def _amount(field: str, number: object) -> str:
    if not isinstance(number, int | float):
        return ""
    if field in COUNTS:
        return f"{number:,}"
    name, size = next(((name, size) for name, size in UNITS if number >= size and not number % size), ("s", 1))
    return f"{number / size:.15g}{name}"
