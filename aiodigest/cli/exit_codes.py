"""The exit codes of the command."""

from __future__ import annotations

from aiodigest import AiodigestError, BackendUnavailable, ConfigurationError, InvalidArgument

FAILED, USAGE, UNAVAILABLE, INTERRUPTED = 1, 2, 69, 130


def exit_code(error: AiodigestError) -> int:
    """Return the exit code for an error."""
    match error:
        case BackendUnavailable():
            return UNAVAILABLE
        case ConfigurationError() | InvalidArgument():
            return USAGE
        case _:
            return FAILED
