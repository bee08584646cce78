"""The reasons that are stored and logged for what was not delivered."""

from __future__ import annotations

from aiodigest.errors import CodecError, DeliverySignal

ERROR_LENGTH = 500


class TimedOut(Exception):
    """The callback took longer than ``delivery_timeout``; its outcome is unknown."""


def describe(error: BaseException) -> str:
    """Describe an error in one line of bounded length, for dead letters and retries."""
    text = text_of(error)
    says_all = isinstance(error, (CodecError, DeliverySignal, TimedOut))
    return one_line(text if says_all else f"{type(error).__name__}: {text}")


def text_of(value: object) -> str:
    """Return the text of what a user raised or returned, which may not even have one."""
    try:
        return str(value)
    except Exception:
        return f"a {type(value).__name__}"


def one_line(text: str) -> str:
    """Return a text as one line of bounded length, in UTF-8."""
    return " ".join(text.encode(errors="replace").decode().split())[:ERROR_LENGTH]
