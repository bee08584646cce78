"""``Webhook``: digests as signed JSON."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from aiodigest import Digest, InvalidArgument
from aiodigest.channels._posting import Posting
from aiodigest.channels.common import library
from aiodigest.channels.local import as_json
from aiodigest.errors import shown

if TYPE_CHECKING:
    from ssl import SSLContext

    from standardwebhooks import Webhook as Signer

    from aiodigest.channels._http import URL

NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")
SECRET = re.compile(r"(?:whsec_)?([A-Za-z0-9+/]{32,86})={0,2}")  # of 24 to 64 bytes
MOST = 5  # secrets at once


class Webhook(Posting):
    """Posts each digest as JSON to a URL, signed as Standard Webhooks says. Needs the extra ``webhook``.

    The JSON has the ``id``, ``key``, ``attempt``, ``iteration``, ``dropped`` and ``records`` of a digest; of a record
    the ``id``, ``value`` and ``timestamp``. The header ``webhook-id`` is ``digest.id``, so that the receiver can tell a
    repeat.

    Any answer of 2xx says that it was delivered. A digest is tried again if there is no connection or no TLS, and after
    401, 403, 404, 407, 408, 421, 423, 425, 429, any 3xx and any 5xx. 429 and 503 with ``Retry-After`` are a
    ``RetryAfter`` of at most an hour; if the channel has one URL, with ``pause``. 410 is a ``Reject`` that mutes the
    timeline, any other 4xx a ``Reject``. If the connection is lost, or the time is over, after the request was sent, it
    is an ``OutcomeUnknown``. An answer that comes before the end of the request counts if the receiver reads on, or
    closes the connection in order; else it is not seen. If the channel has one URL, and 401, 403, 404, 407, a redirect,
    the DNS or TLS says that it is wrong, the log has one ERROR for each of these, until a digest is delivered.

    Connections go to public addresses alone, whatever the DNS says or a redirect: who may choose a URL must not reach
    what is inside your network. The environment's proxies are not used. Errors and logs name the host of a URL, and no
    more of it.

    Raises InvalidArgument if an argument is not allowed, and ConfigurationError if httpx2 or standardwebhooks is not
    installed.

    Parameters
    ----------
    url : str, or a plain or async function from a key to a str or None
        Where a timeline's digests go. One without a URL (None, ``""``, or what is no URL) becomes a dead letter.
    secrets : str, or several of them, or a plain or async function from a key to these, or None
        What signs, such as ``"whsec_..."``: 24 to 64 random bytes in base64. While one replaces another, both sign.
        None, in place of a function too, signs nothing; a function must return what signs, or the digest is not sent.
    headers : mapping of str to str, default {}
        More headers, such as ``Authorization``, each once.
    allow_private : bool, or one or several networks such as "10.0.0.0/8", default False
        Which addresses are allowed that are not public; True allows any. With it the URL may be of http, too.
    redirects : bool, default False
        Whether a redirect of 307 or 308 is followed, up to three times, never from https to http. ``headers`` go to no
        other host.
    tls_context : ssl.SSLContext or None, default None
        By default the certificates of the system are trusted.
    timeout : seconds, default 30
        For one try; it must be shorter than the engine's ``delivery_timeout``.
    """

    _mutes_if_gone = True

    def __init__(
        self,
        url: str | Callable[[str], str | Awaitable[str | None] | None],
        *,
        secrets: str | Sequence[str] | Callable[[str], str | Sequence[str] | Awaitable[str | Sequence[str]]] | None,
        headers: Mapping[str, str] = {},
        allow_private: bool | str | Iterable[str] = False,
        redirects: bool = False,
        tls_context: SSLContext | None = None,
        timeout: float | timedelta = 30,
    ) -> None:
        super().__init__(url, headers, allow_private, tls_context, timeout, redirects=redirects)
        with library("standardwebhooks", "webhook"):
            from standardwebhooks import Webhook as Signer

        self._signer = Signer
        self._secrets = secrets if callable(secrets) else self._signers(secrets)

    async def _request(self, url: URL, digest: Digest[Any]) -> tuple[URL, dict[str, str], bytes]:
        signers = self._secrets
        if callable(signers):
            found = signers(digest.key)
            found: Any = await found if isawaitable(found) else found
            if found is None:  # such as a key that a table lacks: nobody would see that nothing is signed
                raise InvalidArgument(f"secrets must return what signs, and has none for {shown(digest.key)}")
            signers = self._signers(found)
        body, now = as_json(digest).strip(), datetime.now(UTC)
        # Engines make ids that are names; a test may have made another.
        name = digest.id if NAME.fullmatch(digest.id) else sha256(digest.id.encode(errors="surrogatepass")).hexdigest()
        headers = {"Content-Type": "application/json", "webhook-id": name}
        headers["webhook-timestamp"] = str(int(now.timestamp()))
        if signers:
            headers["webhook-signature"] = " ".join(signer.sign(name, now, body.decode()) for signer in signers)
        return url, headers, body

    def _signers(self, secrets: str | Sequence[str] | None) -> list[Signer]:
        """Return what signs. Raises InvalidArgument, which quotes no secret."""
        if secrets is None:
            return []
        several = [secrets] if isinstance(secrets, str) else list(secrets)
        found: list[Signer] = []
        for each in several:
            with suppress(TypeError, ValueError):
                if fits := SECRET.fullmatch(each):
                    found.append(self._signer(fits[1]))
        if not len(several) == len(found) <= MOST or not found:
            raise InvalidArgument(f"secrets must be one to {MOST}, each of 24 to 64 bytes in base64 after 'whsec_'")
        return found
