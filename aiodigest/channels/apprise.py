"""``Apprise``: digests through any service that Apprise knows."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from threading import Thread
from typing import Any

from aiodigest import ChannelError, Digest, InvalidArgument, OutcomeUnknown, Reject, RetryAfter
from aiodigest.arguments import duration
from aiodigest.channels.common import Channel, Secrets, SetUp, Turn, library, rendered_by
from aiodigest.errors import shown
from aiodigest.rendering import Message, Render

MOST = 16  # threads of a channel
SOON = 5.0  # seconds after which a digest that did not get its turn is tried again
ADVICE = "does not come back: digests wait for threads that hang until these end, or the process starts anew"
TALKATIVE = "apprise", "urllib3.connectionpool"  # loggers that quote URLs


class Apprise(Channel):
    """Sends each digest through a service that Apprise knows. Needs the extra ``apprise``.

    It runs in threads, 16 at most in an event loop. Apprise says yes or no, and no is tried again; what it logs of that
    is the reason, without the URL. If it says nothing within ``timeout``, it is an ``OutcomeUnknown``, and its thread
    stays taken until it does. A digest that does not get a thread within ``timeout`` is a ``RetryAfter``, which charges
    no attempt; if at least half of the threads hang then, the log has one ERROR until something is delivered.

    Who may choose the URL may reach anything from your machine: take it from your own settings alone.

    Raises InvalidArgument if Apprise does not know the URL, and ConfigurationError if it is not installed.

    Parameters
    ----------
    url : str, or a plain or async function from a key to a str or None
        Such as ``"mastodon://token@host"``, which is a secret. A timeline without one becomes a dead letter.
    render : function from a digest to a Message, or None, default None
        Makes the subject and the text.
    timeout : seconds, default 30
        For one try, and before it for its turn; both together must be shorter than the engine's ``delivery_timeout``.
    """

    def __init__(
        self,
        url: str | Callable[[str], str | Awaitable[str | None] | None],
        *,
        render: Render | None = None,
        timeout: float | timedelta = 30,
    ) -> None:
        with library("apprise", "apprise"):
            import apprise
        self._library: Any = apprise
        try:  # no time of its own, for which it would wait in a pool of its own, and then say no
            self._asset = self._library.AppriseAsset(service_timeout=0)
        except AttributeError:  # it is older, and has none
            self._asset = self._library.AppriseAsset()
        self._url = url
        self._render = rendered_by(render)
        self._timeout = duration(timeout, "timeout", 0.001)
        self._turn = Turn(MOST)
        self._hanging = set[Future[str | None]]()  # what nobody waits for any more
        self._set_up = SetUp("Apprise")
        if not callable(url):
            self._service(url)

    def __repr__(self) -> str:
        return "Apprise(...)"

    async def __call__(self, digest: Digest[Any], /, to: str | None = None) -> None:
        """Send a digest, to the URL ``to`` if one is given."""
        found: object = to
        if to is None:
            found = self._url(digest.key) if callable(self._url) else self._url
            if isawaitable(found):
                found = await found
        if not found:
            raise Reject(f"there is no URL for {shown(digest.key)}")
        try:
            service = self._service(found)
        except InvalidArgument as error:
            raise Reject(str(error)) from None
        reason = await self._in_thread(partial(self._notify, service, self._render(digest), str(found)))
        if reason is not None:
            raise ChannelError(f"Apprise: {reason}")
        self._set_up.worked()

    async def _in_thread(self, work: Callable[[], str | None]) -> str | None:
        """Return what comes of work in a thread, which has its time from when it begins.

        The thread is none of a pool: the end of the process would wait for it, and Apprise may hang.
        """
        loop, places = asyncio.get_running_loop(), self._turn.here()
        try:
            async with asyncio.timeout(self._timeout):
                await places.acquire()
        except TimeoutError:
            if (hanging := len(self._hanging)) >= MOST // 2:  # else it is only busy
                self._set_up.failed(ADVICE, ADVICE, f"{hanging} threads hang")
            raise RetryAfter(SOON) from None
        ended: Future[str | None] = Future()
        ended.set_running_or_notify_cancel()  # from now on nobody can take it back

        def run() -> None:
            try:
                ended.set_result(work())
            except BaseException as error:
                ended.set_exception(error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(places.release)

        try:
            Thread(target=copy_context().run, args=[run], name="aiodigest-apprise", daemon=True).start()
        except BaseException:
            places.release()
            raise
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(ended)
        except TimeoutError:
            raise OutcomeUnknown(f"Apprise: no answer within {self._timeout:g} s") from None
        finally:
            if not ended.done():
                self._hanging.add(ended)
                ended.add_done_callback(self._hanging.discard)

    def _service(self, url: object) -> Any:
        """Return what sends to a URL. Raises InvalidArgument, which does not quote it."""
        with _listening():
            service = self._library.Apprise.instantiate(url, asset=self._asset) if isinstance(url, str) else None
        if service is None:
            raise InvalidArgument("url is none that Apprise knows (it is not shown: it may hold a secret)")
        return service

    def _notify(self, service: Any, message: Message, url: str) -> str | None:
        """Send a message; return why it says no, or None if it says yes."""
        sender = self._library.Apprise()
        sender.add(service)
        # Without what it would refuse to encode
        title, body = (text.encode(errors="replace").decode() for text in (message.subject, message.text))
        with _listening() as heard:
            try:
                if sender.notify(body=body or title, title=title, body_format=self._library.NotifyFormat.TEXT):
                    return None
            except Exception as error:
                heard.append(f"{type(error).__name__}: {error}")
        return secrets_of(url).one_line(heard[-1] if heard else "it says no")


def secrets_of(url: str) -> Secrets:
    """Return the login, the password, and the parts of a URL that may be secret."""
    scheme, *parts = re.split(r"[/?&=;:@,]", url)
    login = re.match(r"[^:]*://([^/?]*?):([^/?]*)@", url)
    whole = [f"{login[1]}:{login[2]}", login[2]] if login else []
    return Secrets(whole, (part for part in parts if part != scheme))


_heard = ContextVar[list[str] | None]("_heard", default=None)  # Apprise takes it along to threads of its own


class _Ear(logging.Filter):
    """Keeps from the log what is logged while somebody listens, since it quotes URLs."""

    def filter(self, record: logging.LogRecord) -> bool:
        heard = _heard.get()
        if heard is not None and record.levelno >= logging.WARNING:
            heard.append(record.getMessage())
        return heard is None


_ear = _Ear()


@contextmanager
def _listening() -> Generator[list[str]]:
    """Hear what is logged of sending, in place of the log."""
    for name in TALKATIVE:
        logging.getLogger(name).addFilter(_ear)  # once; it stays
    heard = list[str]()
    token = _heard.set(heard)
    try:
        yield heard
    finally:
        _heard.reset(token)
