"""Times, numbers and plural forms for one reader: in their zone, and in their language if Babel is installed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from aiodigest import ConfigurationError, InvalidArgument
from aiodigest.errors import shown
from aiodigest.timing.zones import zone_of

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
UNITS = (("day", 86_400), ("hour", 3600), ("minute", 60))


def zone(name: str | tzinfo) -> tzinfo:
    """Return a time zone by its name, such as "Europe/Berlin"."""
    return name if isinstance(name, tzinfo) else zone_of(name)


def language(locale: str | None) -> Any:
    """Return Babel's data of a locale such as "de" or "pt_BR"; None for None."""
    if locale is None:
        return None
    try:
        from babel import Locale
    except ModuleNotFoundError as error:
        raise ConfigurationError("Babel, which knows locales, is not installed: pip install babel") from error
    try:
        return Locale.parse(locale.replace("-", "_"))
    except Exception as error:  # of many kinds, from whatever was given
        raise InvalidArgument(f'locale must be one such as "de" or "pt_BR", not {shown(locale)}') from error


@dataclass(frozen=True)
class Formats:
    """Texts of times and numbers for a reader in ``zone``, at ``now``, by ``locale`` (of Babel, or None)."""

    now: datetime
    zone: tzinfo = UTC
    locale: Any = None

    def when(self, time: Any) -> str:
        """Return a time by the reader's clock, as short as it can be understood: "14:05", "yesterday 14:05"."""
        if (here := self._here(time)) is None:
            return ""
        days = (self.now.astimezone(self.zone).date() - here.date()).days
        if self.locale is not None:
            from babel.dates import format_date, format_skeleton, format_time

            clock = format_time(here, "short", tzinfo=self.zone, locale=self.locale)
            if not days:
                return str(clock)
            near = abs(days) < 180
            date = (
                format_skeleton("MMMd", here, locale=self.locale) if near else format_date(here, "medium", self.locale)
            )
            return f"{date} {clock}"
        clock = f"{here:%H:%M}"
        match days:
            case 0:
                return clock
            case 1:
                return f"yesterday {clock}"
            case -1:
                return f"tomorrow {clock}"
            case _:
                year = f" {here.year}" if abs(days) >= 180 else ""
                return f"{here.day} {MONTHS[here.month - 1]}{year} {clock}"

    def ago(self, time: Any) -> str:
        """Return how long ago a time was, or in how long it comes: "12 minutes ago", "in 3 days"."""
        if (here := self._here(time)) is None:
            return ""
        passed = (self.now - here).total_seconds()
        if self.locale is not None:
            from babel.dates import format_timedelta

            return str(format_timedelta(timedelta(seconds=-passed), add_direction=True, locale=self.locale))
        for unit, seconds in UNITS:
            if (number := round(abs(passed) / seconds)) >= 1:
                told = f"{number:,} {unit}{'s' * (number > 1)}"
                return f"{told} ago" if passed > 0 else f"in {told}"
        return "just now"

    def number(self, number: Any) -> str:
        """Return a number with its thousands apart: "12,345"."""
        if not isinstance(number, int | float):
            return str(number)
        if self.locale is None:
            return f"{number:,}"
        from babel.numbers import format_decimal

        return format_decimal(number, locale=self.locale)

    def plural(self, number: Any, one: str, other: str, **forms: str) -> str:
        """Return the form of a word for a number: ``one``, ``other``, or of ``forms`` what the language has besides
        (``zero``, ``two``, ``few``, ``many``)."""
        form = ("one" if number == 1 else "other") if self.locale is None else str(self.locale.plural_form(number))
        return {"one": one, "other": other, **forms}.get(form, other)

    def _here(self, time: Any) -> datetime | None:
        """Return a time in the reader's zone; texts as JSON has them are read."""
        if isinstance(time, str):
            with suppress(ValueError):
                time = datetime.fromisoformat(time)
        if not isinstance(time, datetime):
            return None
        with suppress(Exception):  # in the first and the last year, or by a zone of the user's
            return (time.replace(tzinfo=UTC) if time.tzinfo is None else time).astimezone(self.zone)
        return None
