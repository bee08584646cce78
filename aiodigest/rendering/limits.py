"""Bounds on what a template uses up while it runs: steps, and characters that it makes. Needs Jinja2."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.visitor import NodeTransformer

STEPS = 200_000  # that loops and macros of one part may take together
LONGEST = 10_000_000  # characters of a text, or entries of a list, and characters of all that expressions write
GROWING = {"center", "expandtabs", "ljust", "replace", "rjust", "to_bytes", "zfill"}  # methods, by their arguments
FILTERS = ("batch", "center", "indent", "replace", "slice", "wordwrap")  # that make more of what they get

# Widths that are long, or come from an argument: of "%" and of "format"
PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\*|[0-9]{5})")
BRACES = re.compile(r"\{[^{}]*:[^{}]*(?:\{|[0-9]{5})")


class TooMuch(Exception):
    """A template went past its bound."""


@dataclass
class Left:
    """The steps and characters that one part of a message has left."""

    steps: int = STEPS
    characters: int = LONGEST

    def take(self, steps: int, characters: int) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise TooMuch(f"its loops take more than {STEPS:,} steps")
        if self.characters < 0:
            raise TooMuch(f"it writes more than {LONGEST:,} characters, in all that it repeats")

    def range(self, *limits: int) -> Any:
        """Yield the numbers of a range, each of them a step."""
        for each in range(*limits):
            self.take(1, 0)
            yield each


_left = ContextVar[Left | None]("_left", default=None)  # None while a template is compiled


@contextmanager
def limited() -> Generator[Left]:
    """Count what a template takes inside."""
    left = Left()
    token = _left.set(left)
    try:
        yield left
    finally:
        _left.reset(token)


def writes(text: str) -> None:
    """Count what an expression writes."""
    if (left := _left.get()) is not None:
        left.take(0, len(text))


@pass_context  # which keeps it from being worked out when the template is compiled
def _step(context: object, characters: int) -> bool:
    if (left := _left.get()) is not None:
        left.take(1, characters)
    return True


def short(value: Any) -> Any:
    """Return what an expression makes, unless it is too long."""
    if isinstance(value, Sized) and len(value) > LONGEST:
        raise TooMuch(f"no text or list is longer than {LONGEST:,}")
    return value


def check_call(called: Any, args: Iterable[object]) -> None:
    """Refuse a call of a method of a text or a number that would make something too long."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    if name == "translate":
        raise TooMuch("translate is no method for templates")
    if name == "join":
        if not all(isinstance(each, list | tuple | str) for each in args):
            raise TooMuch("the method join is for lists: for others it is a filter")
        for several in cast("Iterable[Any]", args):
            _check_joined(owner, several)
    elif name in GROWING:
        _check_product((owner, *args))


def check_added(left: object, right: object) -> None:
    if isinstance(left, Sized) and isinstance(right, Sized) and len(left) + len(right) > LONGEST:
        raise TooMuch(f"no text or list is longer than {LONGEST:,}")


def check_widths(text: object, widths: re.Pattern[str] = PERCENT) -> None:
    """Refuse a text that is formatted with a width of five digits, or one that comes from an argument."""
    if isinstance(text, bytes) or (isinstance(text, str) and widths.search(text)):
        raise TooMuch("a width in a format has at most four digits")


def limit_filters(filters: dict[str, Any]) -> None:
    """See that no filter makes a text or a list that is too long."""
    filters |= {name: _growing(filters[name]) for name in FILTERS}
    formatted, joined = filters["format"], filters["join"]

    def format_(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_widths(str(value))
        return formatted(value, *args, **kwargs)

    @wraps(joined)
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        several = list(value)
        _check_joined(d, several)
        return joined(context, several, d, attribute)

    filters |= {"format": format_, "join": join, "_short": short, "_step": _step}


def _growing(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_product((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _check_joined(between: object, several: Sequence[object]) -> None:
    if sum(map(_length, several)) + len(several) * _length(between) > LONGEST:
        raise TooMuch(f"no text or list is longer than {LONGEST:,}")


def _check_product(values: Iterable[object]) -> None:
    *_, second, largest = sorted(map(_size, (0, 0, *values)))
    if second * largest > LONGEST:
        raise TooMuch(f"no text or list is longer than {LONGEST:,}")


def _size(value: object) -> int:
    return max(1, abs(value)) if isinstance(value, int) else _length(value)


def _length(value: object) -> int:
    return max(1, len(value)) if isinstance(value, Sized) else 1


class _Counting(NodeTransformer):
    """Counts each step of loops, macros and blocks, and looks at what filters, calls and ``~`` make."""

    def _repeats(self, node: Any) -> Any:
        node.body = [each for child in node.body for each in self.visit_list(child)]
        said = sum(len(str(each.data)) for each in node.find_all(nodes.TemplateData))
        said += sum(len(each.value) for each in node.find_all(nodes.Const) if isinstance(each.value, str))
        node.body.insert(0, nodes.ExprStmt(_counted(node, said), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _repeats

    def visit_For(self, node: nodes.For) -> Any:
        node.iter = self.visit(node.iter)
        if node.test is not None:
            node.test = nodes.And(_counted(node, 0), self.visit(node.test), lineno=node.lineno)
        node.else_ = [each for child in node.else_ for each in self.visit_list(child)]
        return self._repeats(node)

    def _inside(self, node: Any) -> Any:  # whose own filter is no expression
        node.body = [each for child in node.body for each in self.visit_list(child)]
        return node

    visit_FilterBlock = visit_AssignBlock = _inside

    def _made(self, node: Any) -> Any:
        return _filtered(self.generic_visit(node), "_short", node.lineno)

    visit_Filter = visit_Call = visit_Concat = _made


def _counted(node: nodes.Node, characters: int) -> nodes.Filter:
    return _filtered(nodes.Const(characters, lineno=node.lineno), "_step", node.lineno)


def _filtered(node: nodes.Node, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def counting(parsed: nodes.Template, environment: Any) -> nodes.Template:
    """Return a template that counts what it takes."""
    return _Counting().visit(parsed).set_environment(environment)
