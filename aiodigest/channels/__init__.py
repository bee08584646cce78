"""Ways to send digests: each channel is a callback, and imports its library when it is made.

Nothing of it is imported before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodigest.channels.apprise import Apprise
    from aiodigest.channels.chat import Discord, Ntfy, Slack, Teams
    from aiodigest.channels.common import Channel
    from aiodigest.channels.local import Console, File
    from aiodigest.channels.routing import by_key, fan_out
    from aiodigest.channels.smtp import SMTP
    from aiodigest.channels.webhook import Webhook

__all__ = [
    "SMTP", "Apprise", "Channel", "Console", "Discord", "File", "Ntfy", "Slack", "Teams", "Webhook", "by_key",
    "fan_out",
]  # fmt: skip

_LATER = {
    "SMTP": "smtp",
    "Apprise": "apprise",
    "Channel": "common",
    "Console": "local",
    "Discord": "chat",
    "File": "local",
    "Ntfy": "chat",
    "Slack": "chat",
    "Teams": "chat",
    "Webhook": "webhook",
    "by_key": "routing",
    "fan_out": "routing",
}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
