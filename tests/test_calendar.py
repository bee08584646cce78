"""The instants of a calendar, also where the clocks change: compared with a clock that is read minute by minute."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import date, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wallclocks import DAY, Minute, Shift, fires, minutes, ms, one_of_each_shape, shifts, shown

from aiodigest import ConfigurationError, InvalidArgument
from aiodigest.timing.calendar import At

PARIS, LORD_HOWE, HAVANA, BEIRUT, APIA = (
    "Europe/Paris", "Australia/Lord_Howe", "America/Havana", "Asia/Beirut", "Pacific/Apia",
)  # fmt: skip
STEADY = [Shift("UTC", 1_800_000_000, 0, 0), Shift("Asia/Kathmandu", 1_800_000_000, 20700, 20700)]


def coming(at: At, after: str, count: int) -> list[str]:
    return [shown(each, at.tz) for each in at.instants(ms(after, at.tz), count)]


def test_nine_in_paris_is_nine_on_the_days_on_which_the_clocks_change() -> None:
    nine = At.daily("09:00", tz=PARIS)
    assert coming(nine, "2026-10-24T09:00", 2) == ["2026-10-25T09:00+01:00", "2026-10-26T09:00+01:00"]
    assert coming(nine, "2027-03-27T08:59", 3) == [
        "2027-03-27T09:00+01:00", "2027-03-28T09:00+02:00", "2027-03-29T09:00+02:00",
    ]  # fmt: skip
    assert ms("2026-10-25T08:00") == nine.next_ms(ms("2026-10-25T07:59"))
    assert ms("2027-03-28T07:00") == nine.next_ms(ms("2027-03-28T06:59"))


@pytest.mark.parametrize(
    ("zone", "time", "after", "instants"),
    [
        (PARIS, "02:30", "2027-03-27T12:00", ["2027-03-28T03:00+02:00", "2027-03-29T02:30+02:00"]),
        (LORD_HOWE, "02:15", "2026-10-03T12:00", ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]),
        (HAVANA, "00:00", "2026-03-07T12:00", ["2026-03-08T01:00-04:00", "2026-03-09T00:00-04:00"]),
        (BEIRUT, "00:20", "2026-03-28T12:00", ["2026-03-29T01:00+03:00", "2026-03-30T00:20+03:00"]),
        (APIA, "09:00", "2011-12-29T12:00", ["2011-12-31T00:00+14:00", "2011-12-31T09:00+14:00"]),
        ("America/Nuuk", "23:30", "2026-03-28T12:00", ["2026-03-29T00:00-01:00", "2026-03-29T23:30-01:00"]),
    ],
)
def test_a_time_that_is_skipped_comes_at_the_shift(zone: str, time: str, after: str, instants: list[str]) -> None:
    assert coming(At.daily(time, tz=zone), after, 2) == instants


@pytest.mark.parametrize(
    ("zone", "time", "after", "instants"),
    [
        (PARIS, "02:30", "2026-10-24T12:00", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        (LORD_HOWE, "01:45", "2026-04-04T12:00", ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]),
        (HAVANA, "00:30", "2026-10-31T12:00", ["2026-11-01T00:30-04:00", "2026-11-02T00:30-05:00"]),
        (BEIRUT, "23:30", "2026-10-24T12:00", ["2026-10-24T23:30+03:00", "2026-10-25T23:30+02:00"]),
    ],
)
def test_a_time_that_comes_twice_comes_at_the_first(zone: str, time: str, after: str, instants: list[str]) -> None:
    at = At.daily(time, tz=zone)
    assert coming(at, after, 2) == instants
    second = ms(instants[0][:16], zone, fold=1)  # and not for who comes between the two
    assert shown(at.next_ms(second - 60_000), zone) == instants[1]


@pytest.mark.parametrize(
    ("zone", "cron", "after", "instants"),
    [
        (PARIS, "30 */2 * * *", "2026-10-25T00:30", ["02:30+02:00", "02:30+01:00", "04:30+01:00"]),
        (PARIS, "30 * * * *", "2027-03-28T00:30", ["01:30+01:00", "03:30+02:00", "04:30+02:00"]),
        (PARIS, "*/30 2 * * *", "2026-10-25T02:10", ["02:30+02:00", "02:00+01:00", "02:30+01:00"]),
        (LORD_HOWE, "*/20 5 * * *", "2026-10-04T00:00", ["05:00+11:00", "05:20+11:00", "05:40+11:00"]),
        (LORD_HOWE, "0 */2 * * *", "2026-10-04T00:00", ["04:00+11:00", "06:00+11:00", "08:00+11:00"]),
        (HAVANA, "45 * * * *", "2026-11-01T00:00", ["00:45-04:00", "00:45-05:00", "01:45-05:00"]),
    ],
)
def test_with_a_star_each_time_that_the_clocks_show_counts(
    zone: str, cron: str, after: str, instants: list[str]
) -> None:
    assert [each[11:] for each in coming(At(cron, tz=zone), after, 3)] == instants


@pytest.mark.thorough
def test_each_local_day_of_each_zone_has_one_delivery() -> None:
    for shift in shifts():
        at = At.daily("09:00", tz=shift.zone)
        arrivals = [(shift.at + hours * 3600) * 1000 for hours in range(-48, 72, 6)]
        due = sorted({at.next_ms(arrival) for arrival in arrivals})
        days = [datetime.fromtimestamp(each / 1000, ZoneInfo(shift.zone)) for each in due]
        assert len({day.date() for day in days}) == len(days) == (days[-1].date() - days[0].date()).days + 1, shift
        assert {(day.hour, day.minute) for day in days} == {(9, 0)}, shift


def agrees(zone: str, clock: list[Minute], cron: str, matches: Callable[[date, int], bool]) -> None:
    """Check a calendar against one that is read minute by minute."""
    wanted = list(fires(clock, matches, real="*" in cron.rsplit(maxsplit=3)[0]))
    at, start, end = At(cron, tz=zone), clock[0].at * 1000, clock[-1].at * 1000
    found = [each // 1000 for each in at.instants(start, 1, end + 1) if each <= end]
    assert found == wanted, (zone, cron)


def around_each_shift(around: list[Shift]) -> None:
    for shift in around:
        wall, clock = (shift.at + shift.before) % DAY // 60, minutes(shift.zone, shift.at - 2 * DAY, shift.at + 2 * DAY)
        for minute in ((wall - 20) % 1440, wall, (wall + 15) % 1440, (wall + 45) % 1440):
            agrees(
                shift.zone,
                clock,
                f"{minute % 60} {minute // 60} * * *",
                lambda _, shows, minute=minute: shows == minute,
            )


def test_a_daily_time_comes_when_a_clock_that_is_read_each_minute_first_shows_it() -> None:
    around_each_shift(one_of_each_shape())


@pytest.mark.zones
def test_a_daily_time_comes_so_at_each_shift_of_each_zone() -> None:
    around_each_shift(shifts())


def fields(least: int, most: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """Draw a field of a cron expression, with the numbers that it stands for."""
    number = st.integers(least, most)
    steps = st.integers(2, most).map(lambda n: (f"*/{n}", frozenset(range(least, most + 1, n))))
    lists = st.frozensets(number, min_size=1, max_size=3).map(lambda some: (",".join(map(str, some)), some))
    spans = (
        st.tuples(number, number)
        .map(sorted)
        .map(lambda ends: (f"{ends[0]}-{ends[1]}", frozenset(range(ends[0], ends[1] + 1))))
    )
    return st.one_of(st.just(("*", frozenset(range(least, most + 1)))), steps, lists, spans)


@given(
    shift=st.deferred(lambda: st.sampled_from([*one_of_each_shape(), *STEADY])),
    minute=fields(0, 59),
    hour=fields(0, 23),
    day=fields(1, 31),
    weekday=fields(0, 6),
)
def test_any_calendar_agrees_with_one_that_is_read_each_minute(
    shift: Shift,
    minute: tuple[str, frozenset[int]],
    hour: tuple[str, frozenset[int]],
    day: tuple[str, frozenset[int]],
    weekday: tuple[str, frozenset[int]],
) -> None:
    both = day[0].startswith("*") or weekday[0].startswith("*")

    def matches(when: date, shows: int) -> bool:
        of_month, of_week = when.day in day[1], when.isoweekday() % 7 in weekday[1]
        on = (of_month and of_week) if both else (of_month or of_week)
        return on and shows % 60 in minute[1] and shows // 60 in hour[1]

    clock = minutes(shift.zone, shift.at - 2 * DAY, shift.at + 2 * DAY)
    agrees(shift.zone, clock, f"{minute[0]} {hour[0]} {day[0]} * {weekday[0]}", matches)


def test_an_instant_is_after_the_time_that_is_asked_for() -> None:
    at, nine = At.daily("9:00"), ms("2026-06-01T09:00")
    assert [at.next_ms(nine - 1), at.next_ms(nine), at.next_ms(nine + 1)] == [
        nine,
        nine + DAY * 1000,
        nine + DAY * 1000,
    ]
    assert at.next_ms(-1) == 9 * 3_600_000


def test_instants_reach_as_far_as_they_are_asked_to() -> None:
    at, noon = At("*/15 * * * *"), ms("2026-06-01T12:00")
    quarter = 900_000
    assert at.instants(noon, 2) == (noon + quarter, noon + 2 * quarter)
    assert at.instants(noon, 2, noon + 4 * quarter) == tuple(noon + n * quarter for n in range(1, 5))
    assert at.instants(noon, 2) == (noon + quarter, noon + 2 * quarter)
    assert at.instants(noon, 2, noon + 1) == (noon + quarter, noon + 2 * quarter)


def test_the_days_of_a_week_are_given_by_name() -> None:
    monday = "2026-06-01T12:00"
    assert At.weekly("mon", "18:00").instants(ms(monday), 2) == (ms("2026-06-01T18:00"), ms("2026-06-08T18:00"))
    assert [each[:10] for each in coming(At.weekly("Mon,thu", "09:00"), monday, 2)] == ["2026-06-04", "2026-06-08"]
    assert [each[:10] for each in coming(At.weekly("sat-mon", "09:00"), monday, 3)] == [
        "2026-06-06", "2026-06-07", "2026-06-08",
    ]  # fmt: skip
    assert At.weekly("mon-fri", "09:00", tz=PARIS) == At("0 9 * * mon,tue,wed,thu,fri", tz=ZoneInfo(PARIS))


@pytest.mark.parametrize(
    ("cron", "instants"),
    [
        ("0 9 1 * mon", ["2026-06-01", "2026-06-08", "2026-06-15"]),  # either day
        ("0 9 */2 * mon", ["2026-06-01", "2026-06-15", "2026-06-29"]),  # both
        ("0 9 * * mon#2", ["2026-06-08", "2026-07-13", "2026-08-10"]),
        ("0 9 * * 5L", ["2026-06-26", "2026-07-31", "2026-08-28"]),
        ("0 9 LW * *", ["2026-06-30", "2026-07-31", "2026-08-31"]),
        ("0 9 29 feb *", ["2028-02-29", "2032-02-29", "2036-02-29"]),
    ],
)
def test_days_are_those_of_cron(cron: str, instants: list[str]) -> None:
    assert [each[:10] for each in coming(At(cron, tz=PARIS), "2026-06-01T00:00", 3)] == instants


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: At("0 0 9 * * mon-fri"), "five fields .*, not 6: '0 0 9"),
        (lambda: At("@daily"), "five fields .*, not 1: '@daily'"),
        (lambda: At("61 9 * * *"), r"the minute in cron '61 9 \* \* \*' must be from 0 to 59, not '61' \(or as"),
        (lambda: At("0 25 * * *"), "the hour in cron .* must be from 0 to 23, not '25'"),
        (lambda: At("0 9 32 * *"), "the day of the month in cron .* must be from 1 to 31, not '32'"),
        (lambda: At("0 9 * 13 *"), "the month in cron .* must be from 1 to 12, or jan to dec, not '13'"),
        (lambda: At("0 9 * * mon-sat#2"), "the weekday in cron .* must be from 0 to 7, or sun to sat, not 'mon-sat#2'"),
        (lambda: At("0 9 * * mon#2/2"), "the weekday in cron .* not 'mon#2/2'"),
        (lambda: At(f"*/{'9' * 9000} 9 * * *"), "the minute in cron"),
        (lambda: At(9), "cron must be a text of five fields"),  # pyright: ignore[reportArgumentType]
        (lambda: At.daily("25:00"), "time must be a clock time from 00:00 to 23:59, not '25:00'"),
        (lambda: At.daily("24:00"), "time must be a clock time from 00:00 to 23:59, not '24:00'"),
        (lambda: At.daily("9"), "time must be a clock time from 00:00 to 23:59, not '9'"),
        (lambda: At.weekly("mon-fry", "09:00"), "mon, tue, wed, thu, fri, sat, sun, .* not 'mon-fry'"),
        (lambda: At.weekly("", "09:00"), "days must be of mon"),
        (lambda: At.daily("09:00", tz="Europe/Pariss"), r"not 'Europe/Pariss' \(is it 'Europe/Paris'\?\)"),
        (lambda: At.daily("09:00", tz="Europe"), "tz must be a time zone"),
        (lambda: At.daily("09:00", tz="../etc/passwd"), "tz must be a time zone"),
        (lambda: At.daily("09:00", tz=""), "tz must be a time zone"),
        (lambda: At.daily("09:00", tz=None), "tz must be the name"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_no_calendar_is_refused_with_what_is(make: Callable[[], At], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make()


@pytest.mark.parametrize("cron", ["0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 31 feb */2"])
def test_a_day_that_never_comes_is_refused(cron: str) -> None:
    with pytest.raises(ConfigurationError, match="a day that comes"):
        At(cron)


def test_a_day_that_comes_once_in_28_years_is_found() -> None:
    assert coming(At("0 0 * 2 mon#5"), "2026-01-01T00:00", 1) == ["2044-02-29T00:00+00:00"]


def test_calendars_are_compared_by_value_and_can_be_pickled() -> None:
    at = At("0 9  * * MON-FRI", tz=ZoneInfo(PARIS))
    at.next_ms(0)
    assert at == At("0 9 * * mon-fri", tz=PARIS)
    assert at != At("0 9 * * mon-fri")
    assert len({at, At("0 9 * * mon-fri", tz=PARIS)}) == 1
    assert pickle.loads(pickle.dumps(at)) == at
    assert repr(at) == f"At(cron='0 9 * * mon-fri', tz='{PARIS}')"


def test_an_answer_is_kept_until_its_first_instant() -> None:
    at, noon = At.daily("09:00", tz=PARIS), ms("2026-06-01T12:00")
    answer = at.instants(noon, 5)
    assert all(at.instants(each, 5) is answer for each in (noon, noon + 1, answer[0] - 1))
    assert at.instants(answer[0], 5)[:4] == answer[1:]
    assert at.instants(noon - DAY * 1000, 5)[1:] == answer[:4]
    assert all(len(at.instants(noon, count)) == count for count in range(1, 30))
