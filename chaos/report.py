"""A verdict as text for a terminal, or as Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from chaos.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Run:
    """What a report says of the run beside its verdict."""

    seed: int
    command: Sequence[str]
    server: str
    began: datetime
    lasted: float


LET_THROUGH = "taken by a late call after a step of the clock"


def counts(run: Run, verdict: Verdict) -> list[tuple[str, str]]:
    sharded = verdict.shard_silence > 0
    faults = sum(recovery.count - len(recovery.idle) for recovery in verdict.recoveries.values())
    return [
        ("faults", f"{faults:,}"),
        ("records acknowledged", f"{verdict.acknowledged:,}"),
        ("records delivered", f"{verdict.delivered:,} in {verdict.digests:,} digests, {verdict.calls:,} callbacks"),
        ("records in dead letters, which callbacks rejected", f"{verdict.in_letters:,}"),
        *mails(verdict),
        ("**lost**", f"**{len(verdict.lost):,}**"),
        *([(LET_THROUGH, f"{verdict.let_through:,}")] if verdict.let_through else []),
        ("records delivered or rejected more than once", f"{verdict.duplicated:,}"),
        ("**of these unexplained**", f"**{verdict.unexplained:,}**"),
        ("adds told as not stored", f"{verdict.refused:,}"),
        ("adds of unknown outcome", f"{verdict.unknown:,}, of which {verdict.unknown_delivered:,} came"),
        ("longest add", f"{verdict.longest_add:.1f} s"),
        ("longest time without a callback", during(verdict.silence, verdict.silence_during)),
        *([("the same of a shard", during(verdict.shard_silence, verdict.shard_silence_during))] if sharded else []),
    ]


def mails(verdict: Verdict) -> list[tuple[str, str]]:
    if verdict.mails is None:
        return []
    answers = f"{verdict.deferred:,} and {verdict.refused_mails:,}"
    return [
        ("mails accepted", f"{verdict.mails:,}, of which {verdict.repeated:,} again under the same Message-ID"),
        ("answers of 4xx and of 5xx instead", answers),
        ("records accepted again under another Message-ID", f"{verdict.renamed:,}"),
    ]


def during(lasted: float, faults: Iterable[str]) -> str:
    kinds = list(dict.fromkeys(faults))
    return f"{lasted:.1f} s" + (f" ({', '.join(kinds)})" if kinds else "")


def explained(verdict: Verdict) -> list[tuple[str, str]]:
    rows = [(f"came again: {reason}", count) for reason, count in verdict.duplicates.most_common()]
    rows += [(f"two workers at one timeline: {reason}", count) for reason, count in verdict.overlaps.most_common()]
    return [(reason, f"{count:,}") for reason, count in rows]


def span(delays: Sequence[float]) -> tuple[str, str]:
    return (f"{median(delays):.2f}", f"{max(delays):.2f}") if delays else ("", "")


def recoveries(verdict: Verdict) -> list[tuple[str, ...]]:
    return [
        (kind, f"{recovery.count - len(recovery.idle)}", *span(recovery.adds), *span(recovery.callbacks))
        for kind, recovery in sorted(verdict.recoveries.items())
    ]


def said(verdict: Verdict) -> list[str]:
    if verdict.is_good:
        return ["Nothing was lost, and every duplicate is explained."]
    return ["This run has FAILED:", *verdict.findings]


# The two forms

FAULTS = ("fault", "times", "add: median", "worst", "callback: median", "worst")
RECOVERY = (
    "Seconds from the end of a fault to the next acknowledged add, and to the next callback (where callbacks send "
    "mails, whose mail was accepted), of those whom it concerned (where no other one that concerned them all came in "
    "between):"
)


def text(run: Run, verdict: Verdict) -> str:
    """The report for a terminal."""
    lines = [f"seed {run.seed}, {run.lasted:.0f} s, {run.server}", ""]
    lines += [f"{name.replace('*', ''):<50}{value.replace('*', '')}" for name, value in counts(run, verdict)]
    lines += ["", *(f"{reason:<70}{count:>8}" for reason, count in explained(verdict))]
    lines += ["", RECOVERY, "", *columns([FAULTS, *recoveries(verdict)])]
    return "\n".join([*lines, "", *said(verdict)])


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"{row[0]:<36}" + "".join(f"{cell:>17}" for cell in row[1:]) for row in rows]


def markdown(run: Run, verdict: Verdict) -> str:
    """The report for the documentation."""
    lines = [
        f"Run on {run.began:%Y-%m-%d %H:%M} UTC for {run.lasted:.0f} s, seed {run.seed}, on {run.server}:",
        f"`{shlex.join(run.command)}`",
        "",
        *table(("", ""), counts(run, verdict)),
        "",
        *table(("why", "how often"), explained(verdict)),
        "",
        RECOVERY,
        "",
        *table(FAULTS, recoveries(verdict)),
        "",
        *said(verdict),
    ]
    return "\n".join(lines) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
