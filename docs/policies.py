"""Play policies, and draw what they do for the page "Choose a policy": ``make picture``.

Each picture is what the real engine did by the clock of a test. Its arrivals are ticks, its digests are marks with the
number of their records; shaded is when the engine says that a cool-down lasts, and when hours are closed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

from aiodigest import At, DigestEngine, Hours, Policy
from aiodigest.testing import TestEngine

PAGE = Path(__file__).parent / "howto" / "choose-a-policy.md"
PICTURES = Path(__file__).parent / "policies"
NAMES = {"Policy": Policy, "At": At, "Hours": Hours}
MIDNIGHT = datetime(2026, 6, 1, tzinfo=UTC)  # a Monday
MINUTE, HOUR, DAY = 60, 3_600, 86_400
LOOKS = 400  # at the engine, a picture
MOST = 6  # arrivals that are told one by one

WIDTH, HEIGHT, LEFT, RIGHT = 400, 112, 48, 376
ADDED, SENT, AXIS = 30, 66, 90  # where the rows are
STYLE = """\
.timeline { font: 12px system-ui, sans-serif; fill: #404040; stroke: none; }
.timeline .line { stroke: #8a8f94; } .timeline .tick { stroke: #404040; stroke-width: 2; }
.timeline .out { stroke-dasharray: 3 3; } .timeline .cool { fill: #f2b65a; fill-opacity: 0.32; }
.timeline .closed { fill: #7d93ab; fill-opacity: 0.34; } .timeline .sent { fill: #2374ab; }
.timeline .number { fill: #ffffff; font-weight: bold; text-anchor: middle; } .timeline .mid { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.timeline { fill: #d6d8da; } .timeline .tick { stroke: #d6d8da; }
.timeline .sent { fill: #6cb6ff; } .timeline .number { fill: #10202f; }
}"""

Span = tuple[float, float]


@dataclass(frozen=True)
class Case:
    """A policy as Python, and what is added when: the seconds from the beginning, each with an id ('': a new one)."""

    name: str
    policy: str
    until: float
    added: Sequence[tuple[float, str]]
    marks: Sequence[float]
    begin: datetime = MIDNIGHT
    by_clock: bool = False


@dataclass
class Played:
    """What an engine did, in seconds from the beginning."""

    case: Case
    added: list[float] = field(default_factory=list[float])
    left_out: list[float] = field(default_factory=list[float])
    sent: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    cool: dict[float, float] = field(default_factory=dict[float, float])
    closed: list[Span] = field(default_factory=list[Span])

    def told(self, second: float) -> str:
        """Return a time of the axis in words."""
        if not self.case.by_clock:
            minutes, seconds = divmod(round(second), 60)
            return f"{minutes}:{seconds:02}"
        when = self.case.begin + timedelta(seconds=round(second))
        return f"{when:%a %H:%M}" if self.case.until > DAY else f"{when:%H:%M}"

    @property
    def cools(self) -> list[Span]:
        """The cool-downs; one that a digest ends is over then."""
        begins = [*sorted(self.cool), float("inf")]
        return [(begin, min(self.cool[begin], following)) for begin, following in pairwise(begins)]

    @property
    def text(self) -> str:
        """What the picture shows, in words."""
        if len(self.added) > MOST:
            came = f"{len(self.added)} records from {self.told(self.added[0])} to {self.told(self.added[-1])}"
        else:
            came = ", ".join(map(self.told, self.added))
        parts = [f"Added: {came}"]
        if self.left_out:
            parts.append(f"left out: {', '.join(map(self.told, self.left_out))}")
        parts.append("sent: " + ", ".join(f"{count} at {self.told(second)}" for second, count in self.sent))
        for name, spans in ("cool-down", self.cools), ("closed", self.closed):
            if spans:
                parts.append(f"{name}: {', '.join(f'{self.told(begin)} to {self.told(end)}' for begin, end in spans)}")
        return "; ".join(parts) + "."


def new(*seconds: float) -> list[tuple[float, str]]:
    """Return arrivals of records that are all new."""
    return [(second, "") for second in seconds]


CASES = [
    Case(
        "at-once", "Policy()", 22 * MINUTE, new(0, *range(60, 141, 20), 17 * MINUTE),
        range(0, 22 * MINUTE, 5 * MINUTE),
    ),
    Case("window", "Policy.window(60)", 300, new(10, 30, 55, 120, 200, 215, 230), range(0, 301, 60)),
    Case("debounce", "Policy.debounce(3, at_most=20)", 44, new(1, 3, 4, *range(14, 38, 2)), range(0, 44, 10)),
    Case(
        "balanced", "Policy.balanced(600)", 40 * MINUTE,
        new(60, 14 * MINUTE, 16 * MINUTE, *range(26 * MINUTE, 29 * MINUTE, 15)), range(0, 41 * MINUTE, 10 * MINUTE),
    ),
    Case(
        "calendar", 'Policy.at(At.daily("09:00"))', 78 * HOUR,
        new(*(hour * HOUR for hour in (4, 8, 9, 14, 22, 52, 53))),
        [second - 6 * HOUR for second in range(9 * HOUR, 4 * DAY, DAY)], MIDNIGHT + timedelta(hours=6), by_clock=True,
    ),
    Case(
        "hours", 'Policy(hours=Hours("08:00-20:00"))', 24 * HOUR,
        new(*(round(hour * HOUR) for hour in (1, 3.5, 8.2, 9, 12.5, 13, 16, 17.5, 22))),
        range(0, 25 * HOUR, 4 * HOUR), MIDNIGHT + timedelta(hours=12), by_clock=True,
    ),
    Case("sizes", "Policy(max_size=5)", 10 * MINUTE, new(0, *range(60, 181, 30), 240, 270), range(0, 601, 120)),
    Case(
        "dedupe", "Policy(initial_delay=30, minimum_delay=0, dedupe_window=3600)", 180,
        [(10, "a"), (20, "b"), (25, "c"), (70, "b"), (110, "d"), (125, "a")], range(0, 181, 30),
    ),
]  # fmt: skip


async def play(case: Case) -> Played:
    """Have an engine go through a case, looking at it all the time."""
    played, policy = Played(case), eval(case.policy, NAMES)
    engine = DigestEngine(namespace="picture", policy=policy)
    async with TestEngine(engine, start=case.begin) as t:

        def passed(when: datetime) -> float:
            return (when - case.begin).total_seconds()

        engine.observe(lambda delivery: played.sent.append((passed(t.now), delivery.records)))
        looks = [(case.until * number / LOOKS, None) for number in range(LOOKS + 1)]
        for second, record in sorted([*case.added, *looks], key=lambda one: one[0]):
            await t.advance(case.begin + timedelta(seconds=second) - t.now)
            if record is not None:
                before = await engine.stats()
                await engine.add("somebody", "something", record_id=record or None)
                after = await engine.stats()
                (played.left_out if after.duplicates > before.duplicates else played.added).append(second)
                await t.advance()
            reasons = {reason.kind: reason.at for reason in (await engine.explain("somebody")).reasons}
            if (last := reasons.get("last")) and (cool := reasons.get("cool-down")):
                played.cool[passed(last)] = passed(cool)
    if policy.hours is not None:
        begin = round(case.begin.timestamp() * 1000)
        windows = policy.hours.windows(begin, begin + round(case.until * 1000), 100)
        ends = [0.0, *((ms - begin) / 1000 for window in windows for ms in window), case.until]
        played.closed = [(max(0, a), b) for a, b in list(pairwise(ends))[::2] if a < b and a < case.until]
    return played


def svg(played: Played) -> str:
    """Draw what was played."""

    def at(second: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * min(second, played.case.until) / played.case.until:.5g}"

    def parts() -> Iterator[str]:
        for kind, word, spans in ("closed", "closed", played.closed), ("cool", "cool-down", played.cools):
            for begin, end in spans:
                width = float(at(end)) - float(at(begin))
                yield f'<rect class="{kind}" x="{at(begin)}" y="4" width="{width:.5g}" height="{AXIS - 4}"/>'
                if width > 60:
                    yield f'<text class="mid" x="{float(at(begin)) + width / 2:.5g}" y="15">{word}</text>'
        yield f'<text x="2" y="{ADDED + 6}">added</text><text x="2" y="{SENT + 4}">sent</text>'
        yield f'<path class="line" d="M{LEFT} {AXIS}H{RIGHT}"/>'
        for mark in played.case.marks:
            yield f'<path class="line" d="M{at(mark)} {AXIS}v4"/>'
            yield f'<text class="mid" x="{at(mark)}" y="{AXIS + 17}">{played.told(mark)}</text>'
        for seconds, kind in (played.added, "tick"), (played.left_out, "tick out"):
            for second in seconds:
                yield f'<path class="{kind}" d="M{at(second)} {ADDED - 8}v20"/>'
        for second, count in played.sent:
            yield f'<circle class="sent" cx="{at(second)}" cy="{SENT}" r="9"/>'
            yield f'<text class="number" x="{at(second)}" y="{SENT + 4}">{count}</text>'

    head = '<svg xmlns="http://www.w3.org/2000/svg" class="timeline" role="img"'
    size = f'width="{WIDTH * 1.2:g}" height="{HEIGHT * 1.2:g}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return "\n".join([f'{head} {size} aria-label="{played.text}">', f"<style>{STYLE}</style>", *parts(), "</svg>\n"])


def drawn() -> dict[Path, str]:
    """Return the pictures by file, and the page with what they show in words."""
    files, page = dict[Path, str](), PAGE.read_text(encoding="utf-8")
    for case in CASES:
        played = asyncio.run(play(case))
        files[PICTURES / f"{case.name}.svg"] = svg(played)
        page = re.sub(rf"!\[[^\]]*\](?=\(\.\./policies/{case.name}\.svg\))", lambda _: f"![{played.text}]", page)  # noqa: B023
    return files | {PAGE: page}


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8")
