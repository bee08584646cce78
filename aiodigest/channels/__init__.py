"""Ways to send digests: each channel is a callback, and imports its library when it is made.

Nothing of it is imported before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodigest.channels.common import Channel
    from aiodigest.channels.local import Console, File
    from aiodigest.channels.routing import by_key, fan_out
    from aiodigest.channels.smtp import SMTP

__all__ = ["SMTP", "Channel", "Console", "File", "by_key", "fan_out"]

_LATER = {
    "SMTP": "smtp",
    "Channel": "common",
    "Console": "local",
    "File": "local",
    "by_key": "routing",
    "fan_out": "routing",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
