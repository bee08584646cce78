"""Timelines, dead letters and records as JSON and as rows of a table."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from aiodigest import JSON, DeadLetter, Record, Stats, Timeline
from aiodigest.cli.render import summary
from aiodigest.cli.words import rfc3339, shortened

RAW_WIDTH = 100


def moment(time: datetime | None) -> str | None:
    """Show a time for JSON."""
    return None if time is None else rfc3339(time)


def shown(time: datetime | None) -> str:
    """Show a time for people."""
    return "-" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def stats_json(stats: Stats) -> dict[str, Any]:
    """Return a namespace's contents, and the events in it."""
    return {**asdict(stats), "oldest_due": moment(stats.oldest_due)}


def timeline_json(timeline: Timeline[JSON], records: Sequence[Record[JSON | bytes]] | None = None) -> dict[str, Any]:
    """Return a timeline, with its records if they are given."""
    facts: dict[str, Any] = {
        "key": timeline.key,
        "state": timeline.state,
        "due": moment(timeline.due),
        "size": timeline.size,
        "attempt": timeline.attempt,
        "iteration": timeline.iteration,
        "dropped": timeline.dropped,
        "cool_until": moment(timeline.cool_until),
        "digest_id": timeline.digest_id,
        "last_error": timeline.last_error,
    }
    return facts if records is None else {**facts, "records": [record_json(record) for record in records]}


def letter_json(letter: DeadLetter[JSON], records: Sequence[Record[JSON | bytes]] | None = None) -> dict[str, Any]:
    """Return a dead letter, with its records if they are given."""
    facts: dict[str, Any] = {
        "id": letter.id,
        "key": letter.key,
        "reason": letter.reason,
        "buried_at": moment(letter.buried_at),
        "attempt": letter.attempt,
        "digest_id": letter.digest_id,
        "size": len(letter.records),
    }
    return facts if records is None else {**facts, "records": [record_json(record) for record in records]}


def record_json(record: Record[JSON | bytes]) -> dict[str, Any]:
    """Return a record; bytes that are not an engine's JSON stand in base64 under ``raw`` instead of ``value``."""
    facts: dict[str, Any] = {"id": record.id, "timestamp": moment(record.timestamp)}
    if isinstance(record.value, bytes):
        return {**facts, "raw": base64.b64encode(record.value).decode()}
    return {**facts, "value": record.value}


def record_rows(records: Sequence[Record[JSON | bytes]]) -> list[tuple[str, str, str]]:
    """Return id, time and value of records, for people."""
    return [(record.id, shown(record.timestamp), _value(record.value)) for record in records]


def _value(value: JSON | bytes) -> str:
    return f"raw: {shortened(repr(value), RAW_WIDTH)}" if isinstance(value, bytes) else summary(value)
