"""The command ``aiodigest run``: a process that does nothing but deliver."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import operator
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from typing import Annotated, Any, TypeAlias, cast

import typer
from typing_extensions import TypeIs

from aiodigest import AiodigestError, ConfigurationError, DigestEngine
from aiodigest.cli.event_loop import freeze_garbage, run_service
from aiodigest.cli.options import AsJson, parsed_option
from aiodigest.cli.output import log_everything, say
from aiodigest.cli.run.http import Address, Sockets, listening, parse_address, serving, url_of

Engine: TypeAlias = DigestEngine[Any]
Opener: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]
Announce: TypeAlias = Callable[[str], object]


def shard_numbers(text: str) -> frozenset[int]:
    """Parse ``3``, ``0-7`` or ``0-3,8``. Raises ValueError if the text is none of these."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last <= 1023:
            form = "write 3, 0-7 or 0-3,8, with numbers from 0 to 1023"
            raise ValueError(f"{text!r} does not name shards: {form}")
        numbers.update(range(first, last + 1))
    return frozenset(numbers)


ENGINES = "Such as mail:engine or shop.alerts:service."
SHARDS = "Serve only these shards, such as 0-7 or 0-3,8, counted from 0; other processes must serve the rest."
HTTP = "Serve /livez, /healthz and /metrics at this address: 127.0.0.1:9000, [::1]:9000, or :9000 for all."


def run(
    engines: Annotated[list[str], typer.Argument(metavar="MODULE:ENGINE", show_default=False, help=ENGINES)],
    shards: Annotated[frozenset[int] | None, parsed_option("--shards", SHARDS, shard_numbers, "NUMBERS")] = None,
    http: Annotated[Address | None, parsed_option("--http", HTTP, parse_address, "HOST:PORT")] = None,
    in_json: AsJson = False,
) -> None:
    """Deliver the digests of engines until SIGTERM or Ctrl-C.

    A second signal stops it at once. An argument names an engine in a module that can be imported from the current
    directory, or a function without parameters that returns an async context manager of one, as made by
    contextlib.asynccontextmanager.
    """
    sys.path.insert(0, os.getcwd())
    log_everything(in_json=in_json)
    announce: Announce = logging.getLogger("aiodigest.cli.run").info if in_json else say
    with nullcontext(()) if http is None else listening(http) as sockets:
        run_service(_serve([(name, find(name)) for name in engines], shards, sockets, announce))


def find(name: str) -> Opener:
    """Find the function that opens an engine, or the engine itself. Raises ConfigurationError if it is neither."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigurationError(f"{name!r} is not MODULE:ENGINE, such as mail:engine")
    try:
        imported = importlib.import_module(module)
    except Exception as error:
        raise ConfigurationError(f"module {module!r} cannot be imported: {one_line(error)}") from error
    try:
        found: Any = operator.attrgetter(attribute)(imported)
    except AttributeError as error:
        raise ConfigurationError(f"{name!r}: {error}") from error
    if is_engine(found):
        return lambda: nullcontext(found)
    with suppress(TypeError, ValueError):  # of what cannot be called, or not without arguments, as apps
        if not isinstance(found, type):
            inspect.signature(found).bind()
            return cast("Opener", found)  # what it returns is checked when it is called
    wanted = "it must be a DigestEngine, or a function without parameters that opens one"
    raise ConfigurationError(f"{name!r} is a {type(found).__name__}: {wanted}")


def is_engine(found: object) -> TypeIs[Engine]:
    """True if something is an engine, whatever its values."""
    return isinstance(found, DigestEngine)


def one_line(error: BaseException) -> str:
    """Format an error in one line, with the place in the user's program where it was raised, if it was there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""
    return f"{type(error).__name__}: {error}{place}"


async def _serve(
    openers: Sequence[tuple[str, Opener]], shards: Container[int] | None, sockets: Sockets, announce: Announce
) -> None:
    """Open all engines, announce it, and deliver (from these shards only, if any are given) until a signal.

    If one engine cannot go on, none does. The probes are answered until all engines are closed.
    """
    async with AsyncExitStack() as last, AsyncExitStack() as stack:
        engines = [(name, await _opened(stack, name, one)) for name, one in openers]
        if sockets:
            await last.enter_async_context(serving(sockets, [engine for _, engine in engines]))
            announce(f"answering /livez, /healthz and /metrics on {url_of(sockets)}")
        freeze_garbage()
        services = [asyncio.create_task(_deliver(name, engine, shards, announce)) for name, engine in engines]
        try:
            await asyncio.gather(*services)
        finally:
            for service in services:
                service.cancel()
            await asyncio.wait(services)


async def _opened(stack: AsyncExitStack, name: str, opener: Opener) -> Engine:
    try:
        engine = await stack.enter_async_context(opener())  # TypeError if it returns something else
    except AiodigestError:
        raise
    except Exception as error:
        raise AiodigestError(f"{name!r} cannot be opened: {one_line(error)}") from error
    if not is_engine(engine):
        raise ConfigurationError(f"{name!r} opens a {type(engine).__name__}: it must be a DigestEngine")
    return engine


async def _deliver(name: str, engine: Engine, shards: Container[int] | None, announce: Announce) -> None:
    # Announced as soon as `run` waits for the first time: by then it has its callback and its signal handlers.
    line = f"{name}: delivering namespace {engine.namespace} on {engine.url}"
    announcement = asyncio.get_running_loop().call_soon(announce, line)
    try:
        await engine.run(shards=shards)
    except Exception as error:
        noted = getattr(error, "__notes__", ())  # by the engine, if it comes of entering or leaving the callback
        if isinstance(error, AiodigestError) or not noted:
            raise
        raise AiodigestError(f"{name!r}: {noted[-1]}: {one_line(error)}") from error
    finally:
        announcement.cancel()
    announce(f"{name}: stopped")
