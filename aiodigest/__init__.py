"""An asyncio-native digest engine: one event sends at once, a burst sends one more message."""

from aiodigest.backends import data_folder
from aiodigest.backoff import BackoffMode, DecorrelatedJitter, IntervalBackoff, IterationBackoff, Strategy
from aiodigest.codecs import JSON, Codec, JSONCodec
from aiodigest.engine import DigestEngine
from aiodigest.errors import (
    AiodigestError,
    BackendUnavailable,
    CodecError,
    ConfigurationError,
    DeliverySignal,
    InvalidArgument,
    InvalidState,
    LeaseLost,
    LimitExceeded,
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
    Finding,
    Health,
    Record,
    State,
    Stats,
    Timeline,
)
from aiodigest.policy import Policy, RetryPolicy
from aiodigest.records.validation import Bounds
from aiodigest.session.sync import Sync

__version__ = "0.1.0"

__all__ = [
    "JSON", "Activity", "AiodigestError", "BackendUnavailable", "BackoffMode", "Bounds", "Codec", "CodecError",
    "ConfigurationError", "DeadLetter", "DecorrelatedJitter", "Delivery", "DeliverySignal", "Digest", "DigestEngine",
    "Draining", "Entry", "Finding", "Health", "IntervalBackoff", "InvalidArgument", "InvalidState", "IterationBackoff",
    "JSONCodec", "LeaseLost", "LimitExceeded", "PartialAdd", "PartialFailure", "Policy", "Record", "Reject",
    "RetryAfter", "RetryPolicy", "State", "Stats", "Strategy", "Sync", "Timeline", "data_folder",
]  # fmt: skip
