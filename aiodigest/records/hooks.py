"""Checks of functions that users register: some never run, even when called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isasyncgen, isasyncgenfunction, iscoroutine, iscoroutinefunction, isgenerator, isgeneratorfunction


def can_call_back(function: object) -> bool:
    """True if it may be a callback. Calling a function with a ``yield`` in it does nothing."""
    return callable(function) and not _is(function, isgeneratorfunction, isasyncgenfunction)


def can_observe(function: object) -> bool:
    """True if it may be an observer, which nobody awaits."""
    return callable(function) and not _is(function, iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)


def can_code(codec: object) -> bool:
    return all(callable(getattr(codec, method, None)) for method in ("encode", "decode"))


def never_ran(answer: object) -> bool:
    """True if a callback returned work instead of doing it, such as a coroutine that nobody awaits."""
    kinds = (iscoroutine, isgenerator, isasyncgen, iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)
    return any(is_kind(answer) for is_kind in kinds)


def _is(function: Callable[..., object], *kinds: Callable[[object], bool]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return any(is_kind(function) or is_kind(type(function).__call__) for is_kind in kinds)
