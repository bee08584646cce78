"""Log output while a command runs: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from aiodigest.cli.rendering import as_json, printable


class OneLine(logging.Formatter):
    """Log records in the style of the command's messages: a line each, without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        reason = f" ({type(error).__name__}: {error})" if error is not None else ""
        return printable(f"aiodigest: {record.getMessage()}{reason}")


class PlainText(logging.Formatter):
    """Log records with time, traceback and all; but nothing in them can control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))


class JSONLines(logging.Formatter):
    """Log records as JSON, one object per line.

    ``time``, ``level``, ``logger`` and ``message``, then the record's own fields (``timeline``, ``digest_id``,
    ``attempt``, ``reason`` ...), and ``error`` and ``traceback`` if there was an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and (error := record.exc_info[1]) is not None:
            facts["error"] = f"{type(error).__name__}: {error}"
            facts["traceback"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in STANDARD}
        return as_json({**facts, **{name: _json_value(value) for name, value in extra.items() if name not in facts}})


STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # fields of every record


def _json_value(value: object) -> object:
    """Return a value as JSON takes it, or else its repr."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def log_warnings() -> None:
    """Show the engine's warnings on standard error, a line each."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("aiodigest")
    handler.setFormatter(OneLine())
    logger.addHandler(handler)
    logger.propagate = False


def log_everything(*, in_json: bool = False) -> None:
    """Show everything the process logs from INFO on, on standard error, with times and tracebacks, or as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if in_json else PlainText("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
