"""What all channels have in common."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Self

from aiodigest import ConfigurationError, Digest
from aiodigest.records.validation import can_ask, require
from aiodigest.rendering import Render, plain


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
