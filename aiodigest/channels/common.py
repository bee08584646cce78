"""Common parts of all channels."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from base64 import b64encode
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Self
from urllib.parse import quote, unquote

from aiodigest import ConfigurationError, Digest
from aiodigest.arguments import can_ask, require
from aiodigest.errors import one_line
from aiodigest.logs import logger_of
from aiodigest.rendering import Render, plain

logger = logger_of(__name__)

PASSING = ssl.SSLEOFError, ssl.SSLZeroReturnError  # of TLS: the connection was lost
SHORT = 4  # characters: what is shorter, and not called a secret, is none
BEGINNING = 1_000  # characters of what somebody says that are looked at


class Channel:
    """A callback that sends digests, for ``engine.deliver(channel)`` or ``engine.run(channel)``.

    What it sends with is opened at the first use, and closed when the last who entered it has left: an engine enters
    its callback while it delivers. A channel that nobody enters is closed by ``aclose``. It belongs to one event loop
    at a time, and may serve several engines.

    A class of your own sends in ``__call__``: it returns when the digest was delivered, and raises otherwise, as every
    callback does. ``aclose`` is yours to override.
    """

    _entered = 0  # so many times

    async def __call__(self, digest: Digest[Any], /) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        if not self._entered:
            await self._open()
        self._entered += 1
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._entered -= 1
        if not self._entered:
            await self.aclose()

    async def _open(self) -> None:
        """Raise what stands in the way of every delivery, if that can be known beforehand."""

    async def aclose(self) -> None:
        """Close what is open, and raise nothing. It opens again when it is used."""


class Turn:
    """A semaphore of the event loop that runs: one of asyncio belongs for ever to the first in which it is waited
    for."""

    def __init__(self, places: int = 1) -> None:
        self._places = places
        self._loop: asyncio.AbstractEventLoop | None = None
        self._semaphore = asyncio.Semaphore(places)

    def here(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._semaphore = loop, asyncio.Semaphore(self._places)
        return self._semaphore


@contextmanager
def library(name: str, extra: str, *its: str) -> Generator[None]:
    """Tell in one sentence of a library that is imported inside and not installed, or one of its own."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in (name, *its):
            raise
        raise ConfigurationError(f"{name} is not installed: pip install 'aiodigest[{extra}]'") from error


def rendered_by(render: Render | None) -> Render:
    """Return what turns digests into messages: if none is given, ``Template()``, or ``plain`` without Jinja2."""
    if render is not None:
        require(can_ask(render), "render", "a function from a digest to a Message", render)
        return render
    try:
        from aiodigest.rendering import Template
    except ConfigurationError:
        return plain
    return Template()


def named_authorities() -> ssl.SSLContext | None:
    """Return a context that trusts what ``SSL_CERT_FILE`` names, and nothing else; None if it is not set. Raises
    ConfigurationError."""
    file = os.environ.get("SSL_CERT_FILE")
    try:
        return ssl.create_default_context(cafile=file) if file else None
    except OSError as error:  # those of TLS too
        raise ConfigurationError(f"SSL_CERT_FILE: {file}: {error.strerror or error}") from None


class SetUp:
    """Settings by which a channel reaches the receiver ``name``: if they are wrong, one line of the log says so, once
    for each kind of fault in a row, until something goes out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told: object = None

    def failed(self, kind: object, advice: str, reason: str) -> None:
        """Tell what is wrong, and what to check."""
        if self._told != kind:
            self._told = kind
            logger.error("%s %s: %s", self._name, advice, reason, extra={"reason": reason})

    def worked(self) -> None:
        self._told = None


def is_wrong_tls(error: BaseException | None) -> bool:
    """True if an error comes of TLS that the other end does not speak, or of a certificate that is not trusted."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, PASSING):
        return True
    return error is not None and is_wrong_tls(error.__cause__)


class Secrets:
    """Secrets that no error and no line of the log may quote: ``whole`` ones, and ``parts`` of something, of which
    those of four characters or more count."""

    def __init__(self, whole: Iterable[str], parts: Iterable[str] = ()) -> None:
        found = {each for secret in whole for each in (secret, unquote(secret)) if each}
        found |= {each for part in parts for each in (part, unquote(part)) if len(each) >= SHORT}
        forms = sorted({form for each in found for form in _forms(each)}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, forms)), re.IGNORECASE) if forms else None
        self._within = BEGINNING + max(map(len, forms), default=0)

    def one_line(self, text: str) -> str:
        """Return the beginning of a text as one line, with ``***`` for each secret."""
        found, end = "", 0
        for match in self._pattern.finditer(text[: self._within]) if self._pattern else ():
            if match.start() >= BEGINNING:
                break
            found += text[end : match.start()] + "***"
            end = match.end()
        return one_line(found + text[end:BEGINNING])


def _forms(secret: str) -> Iterator[str]:
    """Yield the forms in which somebody may quote a secret."""
    coded = b64encode(secret.encode(errors="replace")).decode()
    yield secret
    yield quote(secret, safe="", errors="replace")
    yield json.dumps(secret)[1:-1]
    yield escape(secret)
    yield coded.rstrip("=") if len(secret) >= SHORT else coded
