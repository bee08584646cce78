"""Common parts of the channels that send each digest in one POST; nothing here needs their library."""

from __future__ import annotations

import asyncio
import json
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from aiodigest import ChannelError, Digest, InvalidArgument, Reject, RetryAfter
from aiodigest.arguments import duration
from aiodigest.channels.common import Channel, SetUp, library, named_authorities
from aiodigest.errors import shown

if TYPE_CHECKING:
    from ssl import SSLContext

    from aiodigest.channels._http import URL, Answer, Client

LONGEST = 3600.0  # seconds that a receiver may ask for at once
LIMITED = 429, 503  # a receiver that has too much to do, and may say for how long
PASSING = 401, 403, 404, 407, 408, 421, 423, 425, 429  # of 4xx: somebody may mend it, or time
GONE = 410
WRONG = {  # and what to check, if there is one URL
    **dict.fromkeys((401, 403, 407), "lets nobody in with these settings: check url and what authenticates"),
    **dict.fromkeys((404, GONE), "has nothing at this url: check it"),
    **dict.fromkeys((301, 302, 303, 307, 308), "leads elsewhere: check url"),
}  # fmt: skip
SECONDS = re.compile(r"[0-9]+(?:\.[0-9]{1,9})?")


class Posting(Channel):
    """A channel that sends each digest in one POST."""

    _mutes_if_gone = False

    def __init__(
        self,
        url: str | Callable[[str], str | Awaitable[str | None] | None],
        headers: Mapping[str, str],
        allow_private: bool | str | Iterable[str],
        tls_context: SSLContext | None,
        timeout: float | timedelta,
        *,
        redirects: bool = False,
    ) -> None:
        with library("httpx2", "webhook", "httpcore2"):
            from aiodigest.channels import _http as http

        self._http = http
        self._rules = http.Rules.of(allow_private)
        context = tls_context or named_authorities()
        self._settings = http.headers_of(headers), duration(timeout, "timeout", 0.001), context, redirects
        self._url = url if callable(url) else self._url_of(url, "url")
        self._client: Client | None = None
        self._set_up = None if callable(self._url) else SetUp(self._http.name_of(self._url))

    def __repr__(self) -> str:
        name = "..." if callable(self._url) else repr(self._http.name_of(self._url))
        return f"{type(self).__name__}({name})"

    async def __call__(self, digest: Digest[Any], /, to: str | None = None) -> None:
        """Send a digest, to the URL ``to`` if one is given."""
        given = await self._address(digest.key, to)
        url, own, body = await self._request(given, digest)
        client = self._client
        if client is None or client.loop is not asyncio.get_running_loop():
            headers, limit, context, redirects = self._settings
            client = self._client = self._http.Client(self._rules, headers, limit, context, redirects)
        set_up = self._set_up if to is None else None  # a receiver among many says nothing of the others
        try:
            answer = await client.post(url, own, body, given)
        except self._http.WrongSetUp as error:
            if set_up is not None:
                set_up.failed(error.advice, error.advice, str(error))
            raise ChannelError(str(error)) from None
        if 200 <= answer.status < 300:
            if set_up is not None:
                set_up.worked()
            return
        meaning = self._meaning(answer, is_only=set_up is not None)
        if set_up is not None and answer.status in WRONG and isinstance(meaning, ChannelError):
            set_up.failed(answer.status, WRONG[answer.status], answer.reason)
        raise meaning

    async def aclose(self) -> None:
        """Close the connections, and raise nothing. They open again when they are used."""
        client, self._client = self._client, None
        if client is not None and client.loop is asyncio.get_running_loop():
            await client.aclose()

    @abstractmethod
    async def _request(self, url: URL, digest: Digest[Any]) -> tuple[URL, dict[str, str], bytes]:
        """Return where a digest is posted to, with which headers and contents."""

    def _url_of(self, text: object, what: str) -> URL:
        return self._http.url_of(text, what, self._rules)

    async def _address(self, key: str, to: str | None) -> URL:
        """Return the URL of a timeline; raise Reject if it has none."""
        if to is None and not callable(self._url):
            return self._url
        found: object = to
        if to is None and callable(self._url):
            found = self._url(key)
            if isawaitable(found):
                found = await found
        if not found:
            raise Reject(f"there is no URL for {shown(key)}")
        try:
            return self._url_of(found, "to" if to is not None else "url")
        except InvalidArgument as error:
            raise Reject(str(error)) from None

    def _meaning(self, answer: Answer, is_only: bool) -> Exception:
        """Return what an answer that is not 2xx says of a digest."""
        status = answer.status
        if status in LIMITED and (delay := self._delay(answer)) is not None:
            return RetryAfter(min(delay, LONGEST), pause=is_only)
        if status == GONE and self._mutes_if_gone:
            return Reject(answer.reason, mute=True)
        if 400 <= status < 500 and status not in PASSING and status != GONE:
            return Reject(answer.reason)
        return ChannelError(answer.reason)

    def _delay(self, answer: Answer) -> float | None:
        """Return the seconds that a receiver asks for, if it does."""
        return retry_after(answer.headers, datetime.now(UTC))


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, as such or as a date by the receiver's own clock."""
    asked = headers.get("retry-after", "").strip()
    if SECONDS.fullmatch(asked):
        return float(asked)
    when, since = _date(asked), _date(headers.get("date", "")) or now
    return None if when is None else max((when - since).total_seconds(), 0.0)


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text[:100])
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def as_body(contents: object) -> bytes:
    """Return the JSON of what a service gets."""
    return json.dumps(contents, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
