"""Every exception of aiodigest, and the signals that a callback raises to say how its delivery ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Literal, cast

# of a region: a black flag, and its name in tags
FLAG = re.compile("\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f")
JOINERS = "\u200c\u200d\xad"  # of words in many scripts and of emoji, and soft hyphens


def shown(value: object, form: Callable[[object], str] = repr) -> str:
    """Quote a value for a message: never long, whatever the value and whatever its own ``form`` does."""
    text = text_of(value, form)
    return text if len(text) <= 500 else f"{text[:500]}..."


def text_of(value: object, form: Callable[[object], str] = str) -> str:
    """Return the text of an object of a user's, which may not even have one."""
    try:
        return form(value)
    except Exception:  # it may be an integer, too, of more digits than Python prints
        return f"a {type(value).__name__[:100]}"


def printable(text: str) -> str:
    """Return the text in one line, with escapes for what may control a terminal."""
    return "".join(c if c.isprintable() or c in JOINERS else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Return a text as one printable line of bounded length, in UTF-8."""
    return printable(" ".join(text.encode(errors="replace").decode().split()))[:500]


class AiodigestError(Exception):
    """Base class of every error that aiodigest raises."""


class ConfigurationError(AiodigestError):
    """The engine is set up or used in a way that cannot work; the message names the fix."""


class _AboutField(AiodigestError):
    """An error that tells programs, too, what it is about."""

    def __init__(
        self,
        message: str = "",
        *,
        field: str = "",
        given: object = None,
        least: float | None = None,
        most: float | None = None,
        other: str = "",
    ) -> None:
        super().__init__(message)
        self.field = field
        self.given = given
        self.least = least
        self.most = most
        self.other = other


class InvalidArgument(_AboutField, ValueError):
    """An argument is not allowed; ``message`` says which values are, and quotes the argument. Nothing was stored.

    Programs find its arguments in attributes; they are empty or None unless it is about a number or a duration (then in
    seconds):

    * ``field``: the name of the argument.
    * ``given``: what it was.
    * ``least`` or ``most``: its bound; 0 is the ``least`` of what must be more than 0.
    * ``other``: the argument that the bound comes from, if it does; without a bound, the one that excludes this one.
    """


class InvalidState(AiodigestError):
    """The timeline or dead letter is not in a state that allows this. Nothing was changed."""


class LeaseLost(AiodigestError):
    """Another worker holds the timeline now, or it was delivered: this worker's outcome changed nothing."""


class LimitExceeded(_AboutField):
    """A value, a call or a timeline would exceed its limit. Nothing was stored.

    Its arguments are those of ``InvalidArgument``: if the limit is a field of the policy, ``field`` is its name,
    ``most`` what it allows, and ``given`` what there was.
    """


class CodecError(AiodigestError):
    """A value could not be turned into bytes, or bytes into a value."""


class BackendUnavailable(AiodigestError):
    """The server could not be reached, or refuses writes at the moment; the ``message`` says why.

    ``record_id`` is the record of a failed add, else None. ``stored`` says if it was stored: ``"no"``, or
    ``"unknown"`` if the call was sent and its answer was lost. Adding again under that id is harmless: once its
    ``timeout`` is over, a call that arrives late does nothing. If it was delivered meanwhile, it comes again.
    """

    def __init__(self, message: str, *, record_id: str | None = None, stored: Literal["no", "unknown"] = "no") -> None:
        super().__init__(message)
        self.record_id = record_id
        self.stored: Literal["no", "unknown"] = stored


class ChannelError(AiodigestError):
    """A channel could not send a digest, which is tried again; the message says why in one line, without secrets."""


class PartialAdd(AiodigestError):
    """Entries of an ``add_many`` failed; ``results`` has an answer or an error for each, in order."""

    def __init__(self, results: Sequence[bool | AiodigestError]) -> None:
        self.results: list[bool | AiodigestError] = list(results)
        failed = [result for result in self.results if isinstance(result, AiodigestError)]
        super().__init__(f"{len(failed)} of {len(self.results)} entries were not added; the first: {failed[0]}")


class DeliverySignal(Exception):
    """Base class of the signals that a callback raises to end its delivery in its own way; none is an error.

    A signal may come in an exception group, as `asyncio.TaskGroup` raises it. Several are one: a `Reject`, which mutes
    if one of them does, else an `OutcomeUnknown`, else the longest `RetryAfter`, else a `PartialFailure` that names
    all; this one counts only if no other error is beside it.
    """


class RetryAfter(DeliverySignal):
    """Deliver this digest again after ``delay`` (seconds or a timedelta, from now; at least a second). The attempt is
    given back, for at most 24 hours a digest. With ``pause`` this process sends nothing to its destination meanwhile,
    nor does any other worker if the engine has a ``throttle``: without the engine's ``destination``, it claims nothing.
    """

    def __init__(self, delay: float | timedelta, pause: bool = False) -> None:
        super().__init__(f"retry after {shown(delay, str)}")
        self.delay = delay
        self.pause = bool(pause)


class Reject(DeliverySignal):
    """Never deliver this digest: it becomes a dead letter at once, with ``reason``.

    With ``mute`` its timeline is muted from then on, and drops what is added, as by ``mute(key, drop=True)``: for an
    address that does not exist. Parts of the digest that were to come are in the same dead letter, and are not tried.
    """

    def __init__(self, reason: str = "rejected by the callback", mute: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.mute = bool(mute)


class OutcomeUnknown(DeliverySignal):
    """Deliver this digest again as it is, since nobody knows whether it has arrived: after backoff, under the same id,
    with the same records; newer ones wait. For a connection that is lost after the message was sent, and before the
    answer: a receiver that knows the id can tell the repeat. An attempt is charged, and ``reason`` kept with it."""

    def __init__(self, reason: str = "nobody knows whether it has arrived") -> None:
        super().__init__(reason)
        self.reason = reason


class PartialFailure(DeliverySignal):
    """The records in ``failed`` (record id to reason, or just ids) stay for the retry; the others were delivered.

    If it names an id that is not in the digest, all records stay.
    """

    def __init__(self, failed: Mapping[str, str] | Iterable[str]) -> None:
        try:
            if isinstance(failed, Mapping):
                self.failed = dict(cast("Mapping[str, str]", failed))
            else:
                self.failed = dict.fromkeys([failed] if isinstance(failed, str) else failed, "failed")
        except TypeError:
            allowed, given = "a mapping from record ids to reasons, or record ids", shown(cast("object", failed))
            raise InvalidArgument(f"PartialFailure takes {allowed}, not {given}") from None
        super().__init__(f"{len(self.failed)} records failed")
