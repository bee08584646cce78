"""An embedded Valkey server: ``embedded://``."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit


def data_folder(url: str = "embedded://") -> Path:
    """Return the data folder of the embedded server that ``url`` means.

    ``embedded:///folder`` names it. For any other URL it is the folder in the environment's ``AIODIGEST_DATA``, else
    the user's data folder for ``aiodigest``.
    """
    named = unquote(urlsplit(url).path) if url.startswith("embedded:") else ""
    if not named.strip("/"):
        named = os.environ.get("AIODIGEST_DATA", "")
    if named:
        return Path(named)
    from platformdirs import user_data_path

    return user_data_path("aiodigest")
