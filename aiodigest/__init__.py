"""An asyncio-native digest engine: one event sends at once, a burst sends one more message."""

from importlib import import_module
from typing import TYPE_CHECKING

from aiodigest.backends import data_folder
from aiodigest.backoff import BackoffMode, DecorrelatedJitter, IntervalBackoff, IterationBackoff, Strategy
from aiodigest.codecs import JSON, Codec, JSONCodec
from aiodigest.engine import DigestEngine
from aiodigest.errors import (
    AiodigestError,
    BackendUnavailable,
    ChannelError,
    CodecError,
    ConfigurationError,
    DeliverySignal,
    InvalidArgument,
    InvalidState,
    LeaseLost,
    LimitExceeded,
    OutcomeUnknown,
    PartialAdd,
    PartialFailure,
    Reject,
    RetryAfter,
)
from aiodigest.models import (
    Activity,
    DeadLetter,
    Delivery,
    Digest,
    Draining,
    Entry,
    Explanation,
    Finding,
    Health,
    Reason,
    Record,
    State,
    Stats,
    Timeline,
)
from aiodigest.policy import Policy, RetryPolicy
from aiodigest.records.validation import Bounds
from aiodigest.session.sync import Sync

if TYPE_CHECKING:
    from aiodigest.timing.calendar import At
    from aiodigest.timing.hours import Hours
    from aiodigest.timing.throttle import Throttle

__version__ = "0.1.0"

__all__ = [
    "JSON", "Activity", "AiodigestError", "At", "BackendUnavailable", "BackoffMode", "Bounds", "ChannelError", "Codec",
    "CodecError", "ConfigurationError", "DeadLetter", "DecorrelatedJitter", "Delivery", "DeliverySignal", "Digest",
    "DigestEngine", "Draining", "Entry", "Explanation", "Finding", "Health", "Hours", "IntervalBackoff",
    "InvalidArgument", "InvalidState", "IterationBackoff", "JSONCodec", "LeaseLost", "LimitExceeded", "OutcomeUnknown",
    "PartialAdd", "PartialFailure", "Policy", "Reason", "Record", "Reject", "RetryAfter", "RetryPolicy", "State",
    "Stats", "Strategy", "Sync", "Throttle", "Timeline", "data_folder",
]  # fmt: skip

_LATER = {  # imported when they are asked for
    "At": "aiodigest.timing.calendar", "Hours": "aiodigest.timing.hours", "Throttle": "aiodigest.timing.throttle",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
