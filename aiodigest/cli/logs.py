"""Log output while a command runs: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from aiodigest.cli.words import as_json, printable, rfc3339


class OneLine(logging.Formatter):
    """The engine's log, in the command's style: a line each, without tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        reason = f" ({type(error).__name__}: {error})" if error is not None else ""
        return printable(f"aiodigest: {record.getMessage()}{reason}")


class Plain(logging.Formatter):
    """Log records with time, traceback and all; but nothing in them can control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))


class AsObjects(logging.Formatter):
    """Log records as JSON, an object a line.

    ``time``, ``level``, ``logger`` and ``message``, then the line's own fields (``timeline``, ``digest_id``,
    ``attempt``, ``reason`` ...), and ``error`` and ``traceback`` if there was an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] = {
            "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            facts["error"] = f"{type(error).__name__}: {error}"
            facts["traceback"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in ORDINARY}
        return as_json({**facts, **{name: _plain(value) for name, value in extra.items() if name not in facts}})


ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime"}  # what every record of a log has


def _plain(value: object) -> object:
    """Return a value of the log as JSON takes it."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def log_lines() -> None:
    """Show the engine's warnings on standard error, a line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine())
    logger = logging.getLogger("aiodigest")
    logger.addHandler(handler)
    logger.propagate = False


def log_all() -> None:
    """Show everything the process logs from INFO on, on standard error, with times and tracebacks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Plain("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def log_objects() -> None:
    """Show everything the process logs from INFO on, on standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(AsObjects())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
