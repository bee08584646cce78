"""Times at which timelines are due: the one formula, for the reference, the tests and whoever explains.

With ``last``, the time of the last digest or of the add that opened the window, ``cool``, the end of the cool-down, and
``count`` records that wait::

    open(now) = hours(max(cool, rule.open(now)))
    add(now)  = hours(clamp(rule.push(due, now, count), cool, last + maximum))

All times are milliseconds by a shard's clock, which is ``ahead`` of the server's; calendars and hours go by the
server's. The scripts have the same in ``lua/shared/window.lua``.
"""

from __future__ import annotations

from hashlib import sha1
from math import ceil, e, log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodigest.policy import Terms
    from aiodigest.timing.hours import Hours


def share_of(text: str) -> float:
    """Return a number from 0 to 1 (exclusive) that is the same for a text everywhere, and spread evenly over texts."""
    return int(sha1(text.encode(), usedforsecurity=False).hexdigest()[:8], 16) / 2**32


def within(hours: Hours | None, key: str, time: int, now: int, ahead: int) -> int:
    """Return the time, or if the hours are closed then, the next opening and the timeline's share of the spread. What
    has passed is now."""
    if hours is None:
        return time
    return hours.within(max(time, now) - ahead, share_of(key) if hours.spread else 0.0) + ahead


def price_of(terms: Terms, key: str, count: int) -> int:
    """Return how long ``count`` records may wait for others: the price of a message, divided by them.

    If it is random, it is multiplied by z = ln(1 + u (e - 1)), whose density is e^z / (e - 1) on [0, 1]. The key makes
    u: with another z for each window the bound would not hold.
    """
    z = log(1 + share_of(key) * (e - 1)) if terms.randomised else 1.0
    return max(1, ceil(z * terms.price_ms / count))


def opened(terms: Terms, key: str, now: int, ahead: int, count: int = 1) -> int:
    """Return when the record that opens a window is due by the rule alone."""
    match terms.rule:
        case "debounce":
            return now + terms.quiet_ms
        case "balanced":
            return now + price_of(terms, key, count)
        case "calendar":
            assert terms.at is not None
            return terms.at.next_ms(now - ahead) + ahead
        case _:
            return now + terms.initial_ms


def pushed(terms: Terms, key: str, due: int, now: int, count: int) -> int:
    """Return when a waiting timeline is due by the rule alone, once another record has come."""
    match terms.rule:
        case "debounce":
            return now + terms.quiet_ms
        case "balanced":
            return min(due, now + price_of(terms, key, count))
        case "calendar":
            return due
        case _:
            return due + terms.increment_ms


def clamped(terms: Terms, due: int, cool: int, last: int) -> int:
    """Return a due time that is neither in the cool-down, nor after the maximum delay; calendars have neither."""
    return due if terms.rule == "calendar" else max(cool, min(due, last + terms.maximum_ms))


def next_due(terms: Terms, key: str, now: int, cool: int, *, is_idle: bool = False) -> int:
    """Return when a record would be due that came now, by the server's clock. A cool-down that ends at ``cool`` began
    just now; of an idle timeline there is none."""
    if is_idle and terms.first_at_once:
        due = now
    elif terms.rule == "increment" and cool > now:
        due = clamped(terms, cool + terms.increment_ms, cool, now)
    else:
        due = clamped(terms, opened(terms, key, now, 0), cool, now)
    return within(terms.hours, key, due, now, 0)
