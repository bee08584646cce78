"""The policy of a pipe: its options one by one, and together; what is refused is told in their words."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import typer

from aiodigest import InvalidArgument, Policy

ALL_DAY, ALL_DAYS = "00:00-24:00", "mon-sun"
UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
# in messages; "at" is a word of theirs, too
FIELD = re.compile(rf"\b(?:{'|'.join(field.name for field in fields(Policy))})\b(?! most| least)")
SECONDS = re.compile(r"=([0-9.]+)|\b([0-9.]+) s\b")


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


def zone_of(text: str) -> str:
    """Return the name of a time zone, if there is one of that name. Raises InvalidArgument."""
    return _hours(ALL_DAY, ALL_DAYS, text).tz


def policy_of(at: str | None, hours: str | None, days: str | None, tz: str | None, **values: Any) -> Policy:
    """Return the policy for these options; None is one that was not given. Raises BadParameter."""
    if days is not None and hours is None:
        raise typer.BadParameter("--days needs --hours")
    if tz is not None and at is None and hours is None:
        raise typer.BadParameter("--tz needs --at or --hours")
    zone = tz or "UTC"
    if at is not None:
        from aiodigest import At

        values["at"] = At(at, zone)
    if hours is not None:
        values["hours"] = _hours(hours, days or ALL_DAYS, zone)
    try:
        return Policy(**values)
    except InvalidArgument as error:
        raise typer.BadParameter(in_options(str(error))) from None


def _hours(spans: str, days: str, tz: str) -> Any:
    from aiodigest import Hours  # imports time zones

    return Hours(spans, days, tz)


def in_options(text: str) -> str:
    """Return what a policy says of its fields, said of options: ``--ttl 2h`` for ``ttl=7200``."""
    text = FIELD.sub(lambda field: f"--{field[0].replace('_', '-')}", text.replace(", or such a timedelta", ""))
    text = text.replace("--capacity=", "--capacity ")  # which is no duration
    return SECONDS.sub(lambda found: f" {_short(found[1])}" if found[1] else _short(found[2]), text)


def _short(text: str) -> str:
    seconds = float(text)
    name, size = next(((name, size) for name, size in UNITS if seconds >= size and not seconds % size), ("s", 1))
    return f"{seconds / size:.15g}{name}"
