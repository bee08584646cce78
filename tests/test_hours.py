"""Hours, also where the clocks change: compared with a clock that is read minute by minute."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import date, datetime, timedelta
from itertools import pairwise
from random import Random
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wallclocks import DAY, Minute, Shift, fires, minutes, ms, one_of_each_shape, shifts, shown

from aiodigest import ConfigurationError, InvalidArgument
from aiodigest.timing.calendar import At
from aiodigest.timing.hours import Hours

PARIS, LORD_HOWE, HAVANA, APIA = "Europe/Paris", "Australia/Lord_Howe", "America/Havana", "Pacific/Apia"
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOUR = 3_600_000


def open_from(hours: Hours, first: str, last: str) -> list[str]:
    """Return what is open between two local times, as those show it."""
    start, end = ms(first, hours.tz), ms(last, hours.tz)
    spans = [each for each in hours.windows(start, end, 50) if each[0] < end]
    return [
        f"{shown(max(opening, start), hours.tz)[5:16]} {shown(min(close, end), hours.tz)[5:16]}"
        for opening, close in spans
    ]


def is_christmas(day: date) -> bool:
    return (day.month, day.day) == (12, 25)


def test_hours_are_open_from_the_opening_until_just_before_the_close() -> None:
    hours = Hours("08:00-20:00", days="mon-fri", tz=PARIS)
    opening, close = ms("2026-06-01T08:00", PARIS), ms("2026-06-01T20:00", PARIS)
    assert [hours.within(at, 0.5) for at in (opening - 1, opening, close - 1)] == [opening, opening, close - 1]
    assert hours.within(close, 0.5) == opening + 24 * HOUR
    assert shown(hours.within(ms("2026-06-05T20:00", PARIS), 0.5), PARIS) == "2026-06-08T08:00+02:00"


@pytest.mark.parametrize(
    ("hours", "spans"),
    [
        (Hours("08:00-12:00, 13:00-18:00", days="fri,mon"), [
            "06-05 08:00 06-05 12:00", "06-05 13:00 06-05 18:00", "06-08 08:00 06-08 12:00", "06-08 13:00 06-08 18:00",
        ]),
        (Hours("08:00-20:00,09:00-10:00,19:00-21:00", days="fri"), ["06-05 08:00 06-05 21:00"]),
        (Hours("22:00-02:00", days="fri-sat"), ["06-05 22:00 06-06 02:00", "06-06 22:00 06-07 02:00"]),
        (Hours("22:00-02:00", skip=[date(2026, 6, 5), date(2026, 6, 7)]), [
            "06-05 00:00 06-05 02:00", "06-06 22:00 06-07 02:00",
        ]),
        (Hours("00:00-24:00", days="sat,sun"), ["06-06 00:00 06-08 00:00"]),
        (Hours("18:00-00:00", days="sat"), ["06-06 18:00 06-07 00:00"]),
        (Hours.except_("22:00-07:00", days="fri,sat"), [
            "06-05 00:00 06-05 22:00", "06-06 07:00 06-06 22:00", "06-07 07:00 06-09 00:00",
        ]),
        (Hours.except_("12:00-13:00,00:00-08:00", days="sat-sun", skip={date(2026, 6, 6): "a holiday"}), [
            "06-05 00:00 06-07 00:00", "06-07 08:00 06-07 12:00", "06-07 13:00 06-09 00:00",
        ]),
    ],
)  # fmt: skip
def test_spans_belong_to_the_day_on_which_they_begin(hours: Hours, spans: list[str]) -> None:
    found = [each.replace("T", " ") for each in open_from(hours, "2026-06-05T00:00", "2026-06-09T00:00")]
    assert [each for each in found if each < "06-08 20:00"] == spans


@pytest.mark.parametrize(
    ("hours", "around", "spans"),
    [
        (Hours("02:30-09:00", tz=PARIS), "2026-10-25", ["02:30 03:00", "02:30 09:00"]),  # before the shift, and after
        (Hours("01:00-02:30", tz=PARIS), "2026-10-25", ["01:00 02:30", "02:00 02:30"]),
        (Hours("02:30-09:00", tz=PARIS), "2027-03-28", ["03:00 09:00"]),
        (Hours("02:00-03:00", tz=PARIS), "2027-03-28", []),
        (Hours.except_("22:00-02:30", tz=PARIS), "2026-10-25", ["02:30 03:00", "02:30 22:00"]),
        (Hours("02:10-08:00", tz=LORD_HOWE), "2026-10-04", ["02:30 08:00"]),
        (Hours("00:30-01:30", tz=HAVANA), "2026-11-01", ["00:30 01:00", "00:30 01:30"]),
    ],
)
def test_hours_are_open_whenever_the_clocks_show_such_a_time(hours: Hours, around: str, spans: list[str]) -> None:
    day = date.fromisoformat(around)
    found = open_from(hours, f"{day}T00:00", f"{day + timedelta(days=1)}T00:00")
    clock = [each.replace(f"{around[5:]}T", "") for each in found]
    # the close is told as what the clocks show at that instant: at the shift they go back to 02:00, or 00:00
    back = {"02:30 02:00": "02:30 03:00", "00:30 00:00": "00:30 01:00"}
    assert [back.get(each, each) for each in clock] == spans


def test_a_day_that_a_zone_leaves_out_has_no_hours() -> None:
    hours = Hours("08:00-20:00", days="fri", tz=APIA)  # 30 December 2011 was a Friday
    assert shown(hours.within(ms("2011-12-29T12:00", APIA), 0), APIA) == "2012-01-06T08:00+14:00"


def test_days_are_skipped_by_dates_a_mapping_or_a_function() -> None:
    eve, christmas = ms("2026-12-24T20:00"), date(2026, 12, 25)
    for skip in ([christmas], {christmas}, {christmas: "Christmas"}, is_christmas):
        assert shown(Hours("08:00-20:00", skip=skip).within(eve, 0)) == "2026-12-26T08:00+00:00"


def test_what_waited_is_spread_over_a_time_after_the_opening_and_before_the_close() -> None:
    night, opening = ms("2026-06-01T03:00"), ms("2026-06-01T08:00")
    hours = Hours("08:00-20:00", spread=timedelta(minutes=10))
    assert [hours.within(night, share) - opening for share in (0, 0.25, 0.5)] == [0, 150_000, 300_000]
    assert Hours("08:00-08:01", spread=600).within(night, 0.5) - opening == 30_000
    assert Hours.except_("00:00-08:00", spread=DAY).within(night, 0.5) - opening == 8 * HOUR
    assert hours.within(opening + 1, 0.5) == opening + 1


def opened(hours: Hours, clock: list[Minute]) -> list[tuple[int, int]]:
    """Return the windows (milliseconds) that a clock shows, the last one cut off at its end: what hours promise, said
    in another way."""
    spans = [[int(time[:2]) * 60 + int(time[3:]) for time in span.split("-")] for span in hours.spans.split(",")]
    assert not callable(hours.skip)
    days = {each.day for each in clock} | {clock[0].day - timedelta(days=1)}
    counts = {day for day in days if f"{day:%a}".lower() in hours.days.split(",") and day not in hours.skip}
    found: list[tuple[int, int]] = []
    for second, day, minute in clock:
        today, yesterday = day in counts, day - timedelta(days=1) in counts
        inside = False
        for opens, closes in spans:
            if opens < closes:
                inside = inside or (today and opens <= minute < closes)
            else:
                inside = inside or (today and minute >= opens) or (yesterday and minute < closes)
        if inside != hours.closed:
            at = second * 1000
            start = found.pop()[0] if found and found[-1][1] == at else at
            found.append((start, at + 60_000))
    return found


@st.composite
def some_hours(draw: st.DrawFn) -> tuple[Hours, list[Minute]]:
    """Draw hours, and the clock of their zone for five days around a shift."""
    shift = draw(st.sampled_from(one_of_each_shape()))
    clock = minutes(shift.zone, shift.at - 2 * DAY, shift.at + 3 * DAY)
    near = clock[len(clock) * 2 // 5]
    minute = st.integers(0, 1439) | st.integers(-90, 90).map(lambda n: (near.minute + n) % 1440)
    ends = st.lists(st.tuples(minute, minute).filter(lambda span: span[0] != span[1]), min_size=1, max_size=3)
    spans = ",".join("-".join(f"{each // 60:02}:{each % 60:02}" for each in span) for span in draw(ends))
    days = ",".join(draw(st.lists(st.sampled_from(WEEKDAYS), min_size=1, unique=True)))
    skip = [near.day + timedelta(days=n) for n in draw(st.sets(st.integers(-2, 2)))]
    make = Hours.except_ if draw(st.booleans()) else Hours
    try:
        return make(spans, days=days, tz=shift.zone, skip=skip), clock
    except ConfigurationError:  # the spans cover each day
        return Hours(spans, days=days, tz=shift.zone, skip=skip), clock


@given(some_hours(), st.integers(0, 2**32))
def test_any_hours_agree_with_a_clock_that_is_read_each_minute(drawn: tuple[Hours, list[Minute]], seed: int) -> None:
    hours, clock = drawn
    start, end = clock[0].at * 1000, (clock[-1].at + 60) * 1000
    wanted = opened(hours, clock)
    found = [(max(a, start), min(b, end)) for a, b in hours.windows(start, end, 100) if a < end]
    assert found == wanted
    random = Random(seed)
    for _ in range(5):
        at = random.randrange(start, end)
        later = [max(at, opening) for opening, close in wanted if close > at]
        assert hours.within(at, 0) == later[0] if later else hours.within(at, 0) >= end


@given(
    some_hours(), st.lists(st.tuples(st.integers(0, 4 * DAY), st.integers(0, 2 * DAY), st.integers(0, 3)), max_size=9)
)
def test_an_answer_that_is_kept_is_the_one_that_would_be_found(
    drawn: tuple[Hours, list[Minute]], asked: list[tuple[int, int, int]]
) -> None:
    hours, clock = drawn
    for after, longer, most in asked:
        begin = (clock[0].at + after) * 1000
        until = begin + longer * 1000
        anew = pickle.loads(pickle.dumps(hours))
        found = hours.windows(begin, until, most)
        assert found == anew.windows(begin, until, most)
        assert all(opening < until for opening, _ in found[:-1])
        assert len(found) == most + 1 or (len(found) <= most and found[-1][0] >= until) or found[-1][1] > until
        assert all(one[1] < other[0] for one, other in pairwise(found))
        assert found[0][1] > begin


def test_the_windows_that_are_asked_for_come_and_the_next_one() -> None:
    hours, noon = Hours("08:00-12:00,13:00-18:00"), ms("2026-06-01T11:00")
    assert [shown(each)[8:16] for each, _ in hours.windows(noon, noon + 24 * HOUR, 9)] == [
        "01T08:00", "01T13:00", "02T08:00", "02T13:00",
    ]  # fmt: skip
    assert [shown(each)[8:16] for each, _ in hours.windows(noon, noon + 24 * HOUR, 1)] == ["01T08:00", "01T13:00"]
    assert [shown(each)[8:16] for each, _ in hours.windows(noon + HOUR, noon + HOUR, 1)] == ["01T13:00"]


def test_an_opening_400_days_ahead_is_found() -> None:
    start = datetime(2026, 6, 1, 23, 30)
    hours = Hours(
        "23:00-23:10",
        skip=lambda day: start.date() <= day < start.date() + timedelta(days=400),  # its day and 399 more
    )
    assert shown(hours.within(ms(start.isoformat()), 0)) == "2027-07-06T23:00+00:00"


def test_windows_up_to_a_time_that_is_over_are_those_up_to_now() -> None:
    noon = ms("2026-06-20T12:00")
    for hours in (Hours("00:00-24:00"), Hours("08:00-20:00")):
        assert hours.windows(noon, noon - 20 * 24 * HOUR, 2) == hours.windows(noon, noon, 2)


def test_hours_that_never_close_are_one_window() -> None:
    noon = ms("2026-06-01T12:00")
    for hours in (Hours("00:00-24:00"), Hours("12:00-00:00,00:00-12:00", tz=PARIS), Hours("10:00-11:00,11:00-10:00")):
        ((opening, close),) = hours.windows(noon, noon + 24 * HOUR, 5)
        assert opening <= noon
        assert close >= noon + 8 * 24 * HOUR
        assert hours.within(noon, 0.5) == noon


def test_an_answer_is_kept_within_the_same_window() -> None:
    hours, nine = Hours("08:00-20:00", tz=PARIS), ms("2026-06-02T09:00", PARIS)
    answer = hours.windows(nine, nine + HOUR, 5)
    assert all(hours.windows(nine + later, nine + HOUR + later, 5) is answer for later in (1, HOUR, 10 * HOUR))
    assert hours.windows(nine + 12 * HOUR, nine + 13 * HOUR, 5)[0] == answer[1]
    assert all(hours.windows(nine, nine + HOUR, most)[0] == answer[0] for most in range(30))


def test_an_answer_is_not_kept_for_a_time_before_it() -> None:
    hours, day = Hours("01:00-02:00,08:00-20:00"), ms("2026-06-02T00:00")
    for hour, opening in ((9, 8), (0, 1), (1, 1), (2, 8)):
        assert hours.windows(day + hour * HOUR, day + 9 * HOUR, 1)[0][0] == day + opening * HOUR


def deliveries(at: At, hours: Hours, arrivals: list[int]) -> dict[int, int]:
    """Return when each record of a timeline goes out, by when it comes (milliseconds)."""
    return due_after(arrivals, lambda arrival: hours.within(at.next_ms(arrival), 0))


def deliveries_by_clock(fired: list[int], windows: list[tuple[int, int]], arrivals: list[int]) -> dict[int, int]:
    """Return the same, if a calendar fires and it is open as a clock shows."""

    def due(arrival: int) -> int:
        first = next(each for each in fired if each > arrival)
        return next(max(first, opening) for opening, close in windows if close > first)

    return due_after(arrivals, due)


def due_after(arrivals: list[int], opens: Callable[[int], int]) -> dict[int, int]:
    """Return the due time of each arrival's digest: an arrival opens a window if it waits for none."""
    sent: dict[int, int] = {}
    due = -1
    for arrival in arrivals:
        due = due if due > arrival else opens(arrival)
        sent[arrival] = due
    return sent


def keeps_quiet(around: list[Shift]) -> None:
    """Check daily calendars with hours around changes of the clocks, for records that come four times a day."""
    random = Random(17)
    for shift in around:
        clock = minutes(shift.zone, shift.at - 2 * DAY, shift.at + 6 * DAY)
        wall = (shift.at + shift.before) % DAY // 60
        arrivals = [(shift.at + n * DAY // 4) * 1000 + random.randrange(60_000) for n in range(-4, 5)]
        to = f"{(wall + 40) % 1440 // 60:02}:{(wall + 40) % 60:02}"
        kinds = (
            Hours("08:00-20:00", days=",".join(WEEKDAYS[:5]), tz=shift.zone),
            Hours.except_(f"22:10-{to}", days=",".join(WEEKDAYS), tz=shift.zone),
        )
        ends = [opened(hours, clock) for hours in kinds]
        for minute in (540, (wall + 15) % 1440):
            at = At(f"{minute % 60} {minute // 60} * * *", tz=shift.zone)
            fired = [each * 1000 for each in fires(clock, lambda _, shows, minute=minute: shows == minute, real=False)]
            for hours, windows in zip(kinds, ends, strict=True):
                sent = deliveries(at, hours, arrivals)
                assert sent == deliveries_by_clock(fired, windows, arrivals), (shift, hours, minute)
                assert all(due > arrival for arrival, due in sent.items())


def test_a_calendar_with_hours_delivers_once_later_and_never_when_it_is_quiet() -> None:
    keeps_quiet(one_of_each_shape())


@pytest.mark.zones
@pytest.mark.parametrize("part", range(4))
def test_a_calendar_with_hours_does_so_at_each_shift_of_each_zone(part: int) -> None:
    keeps_quiet(shifts()[part::4])


def test_nine_in_paris_waits_for_its_hours_when_the_clocks_change() -> None:
    at, hours = At.daily("09:00", tz=PARIS), Hours("10:00-18:00", tz=PARIS, days="sun-mon")
    for day in ("2026-10-25", "2027-03-28"):  # Sundays
        due = hours.within(at.next_ms(ms(f"{day}T00:00", PARIS)), 0)
        assert shown(due, PARIS)[:16] == f"{day}T10:00"
    assert datetime.fromtimestamp(due / 1000, ZoneInfo(PARIS)).utcoffset() == timedelta(hours=2)


async def never_asked(day: date) -> bool:
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hours("08:00"), "a span must be two clock times, as '08:00-20:00', not '08:00'"),
        (lambda: Hours(""), "a span must be two clock times"),
        (lambda: Hours("08:00-25:00"), "a close must be a clock time from 00:00 to 24:00, not '25:00'"),
        (lambda: Hours("24:00-06:00"), "an opening must be a clock time from 00:00 to 23:59, not '24:00'"),
        (lambda: Hours("8-20"), "an opening must be a clock time"),
        (
            lambda: Hours("08:00-08:00"),
            r"another time than it begins \(the whole day is 00:00-24:00\), not '08:00-08:00'",
        ),
        (lambda: Hours("08:00-20:00", days="weekdays"), "days must be of mon, .*, not 'weekdays'"),
        (lambda: Hours("08:00-20:00", tz="Paris"), "tz must be a time zone, as 'Europe/Paris', not 'Paris'"),
        (lambda: Hours("08:00-20:00", spread=DAY + 1), r"spread must be at most 86,400 seconds \(a day\), not 86401"),
        (lambda: Hours("08:00-20:00", spread=-1), "spread must be at least 0"),
        (lambda: Hours("08:00-20:00", skip=[datetime(2026, 1, 1)]), "a day to skip must be a date, not datetime"),
        (lambda: Hours("08:00-20:00", skip="2026-01-01"), "a day to skip must be a date, not '2'"),  # pyright: ignore[reportArgumentType]
        (lambda: Hours("08:00-20:00", skip=3), "skip must be dates, or a function"),  # pyright: ignore[reportArgumentType]
        (
            lambda: Hours("08:00-20:00", skip=never_asked),
            "skip must be dates, or a function of a date that nobody awaits",
        ),
        (lambda: Hours(8), "spans must be a text"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_are_no_hours_is_refused_with_what_is_allowed(make: Callable[[], Hours], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make()


def test_hours_that_do_not_open_within_400_days_are_refused() -> None:
    for make in (
        lambda: Hours.except_("00:00-24:00"),
        lambda: Hours.except_("12:00-00:00,00:00-12:00", tz=PARIS),
        lambda: Hours("08:00-20:00", skip=lambda _: True),
    ):
        with pytest.raises(ConfigurationError, match="hours must open within 400 days"):
            make()
    assert Hours.except_("00:00-24:00", days="mon-sat").days == "mon-sat"


def test_hours_that_end_are_refused_when_the_next_opening_is_looked_for() -> None:
    hours = Hours("08:00-20:00", skip=lambda day: day.year >= 2040)
    assert hours.within(ms("2039-12-31T19:00"), 0) == ms("2039-12-31T19:00")
    with pytest.raises(ConfigurationError, match="400 days"):
        hours.within(ms("2039-12-31T20:00"), 0)


def test_hours_are_compared_by_value_and_can_be_pickled() -> None:
    hours = Hours("08:00-20:00", "mon-fri", ZoneInfo(PARIS), [date(2026, 12, 25)], 60)
    assert hours == Hours("08:00-20:00", "mon-fri", PARIS, {date(2026, 12, 25)}, timedelta(minutes=1))
    assert len({hours, Hours("08:00-20:00", "mon-fri", PARIS, [date(2026, 12, 25)], 60.0)}) == 1
    assert hours != Hours("08:00-20:00", "mon-fri", PARIS)
    quiet = Hours.except_("22:00-07:00", skip=is_christmas)
    assert quiet != Hours("22:00-07:00", skip=is_christmas)
    assert [pickle.loads(pickle.dumps(each)) for each in (hours, quiet)] == [hours, quiet]
