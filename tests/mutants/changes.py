"""Small changes to operators, constants, conditions and statements: of Python by its tree, of Lua by its words."""

from __future__ import annotations

import ast
import io
import re
import token as kinds
import tokenize
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import cast

SCRIPTS = ("aiodigest/backends/redis/lua/**/*.lua",)
MODULES = (
    "aiodigest/[!_]*.py",
    "aiodigest/worker/*.py",
    "aiodigest/session/*.py",
    "aiodigest/records/*.py",
    "aiodigest/backends/memory/*.py",
    "aiodigest/backends/redis/**/*.py",
)

# What an operator becomes: its neighbour, and its opposite.
OPERATORS: Mapping[str, Sequence[str]] = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
    "and": ("or",),
    "or": ("and",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "//": ("*",),
    "+=": ("-=",),
    "-=": ("+=",),
    "True": ("False",),
    "False": ("True",),
    "not ": ("",),
}
OF_LUA: Mapping[str, Sequence[str]] = {
    **{operator: OPERATORS[operator] for operator in ("<", "<=", ">", ">=", "and", "or", "+", "-", "*", "/", "not ")},
    "==": ("~=",),
    "~=": ("==",),
    "true": ("false",),
    "false": ("true",),
}


@dataclass(frozen=True, order=True)
class Change:
    """Another text for a word of a line."""

    file: str
    row: int
    column: int
    old: str
    new: str
    line: str

    @property
    def becomes(self) -> str:
        """The line with the change."""
        return self.line[: self.column] + self.new + self.line[self.column + len(self.old) :]

    def __str__(self) -> str:
        """Tell where it is, and what."""
        where = f"{self.file.removeprefix('aiodigest/')}:{self.row}"
        return f"{where}  {self.old.strip()!r} → {self.new!r}"

    @property
    def diff(self) -> str:
        return f"{self.file}:{self.row}\n  - {self.line.strip()}\n  + {self.becomes.strip()}"

    def apply(self, text: str) -> str:
        """The text of its file with the change."""
        lines = text.splitlines(keepends=True)
        assert lines[self.row - 1].rstrip("\n") == self.line
        lines[self.row - 1] = self.becomes + "\n"
        return "".join(lines)


@dataclass(frozen=True, order=True)
class Place:
    """Place of a text that may become others."""

    row: int
    column: int
    text: str
    becomes: tuple[str, ...]


@cache
def find_changes(file: str, text: str) -> Sequence[Change]:
    """All changes to a file, in its order."""
    lines = text.split("\n")
    places = lua_places(text) if file.endswith(".lua") else PythonPlaces(text)
    return [
        Change(file, place.row, place.column, place.text, new, lines[place.row - 1])
        for place in sorted(set(places))
        for new in place.becomes
    ]


def other_numbers(word: str) -> tuple[str, ...]:
    number: int | float = ast.literal_eval(word)
    return (str(number + 1), *([str(number - 1)] if number == 1 else []))


# Python


class PythonPlaces:
    """Operators, constants and conditions of a module, and statements that may be left out."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.split("\n")
        self._tokens = [
            (each.start, each.string)
            for each in tokenize.generate_tokens(io.StringIO(text).readline)
            if each.type in (kinds.OP, kinds.NAME)
        ]

    def __iter__(self) -> Iterator[Place]:
        for node in changeable(ast.parse(self._text)):
            for one, other in pairwise(operands(node)):
                yield from self._between(one, other)
            match node:
                case ast.UnaryOp(op=ast.Not()):
                    yield Place(*self._position(node.lineno, node.col_offset), "not ", ("",))
                case ast.Constant(value=bool() | int() | float()):
                    yield from self._whole(node)
                case ast.If(test=test) if not is_for_types(node):
                    yield from self._whole(test, "False")
                case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                    yield from self._whole(node, "pass")
                case _:
                    pass

    def _position(self, row: int, offset: int) -> tuple[int, int]:
        return row, len(self._lines[row - 1].encode()[:offset].decode())  # trees count bytes

    def _whole(self, node: ast.expr | ast.stmt, becomes: str = "") -> Iterator[Place]:
        """A node that stands in one line; if it is a constant, it says itself what it becomes."""
        if node.end_lineno == node.lineno:
            row, column = self._position(node.lineno, node.col_offset)
            text = self._lines[row - 1][column : self._position(row, node.end_col_offset or 0)[1]]
            yield Place(row, column, text, (becomes,) if becomes else tuple(OPERATORS.get(text) or other_numbers(text)))

    def _between(self, left: ast.expr, right: ast.expr) -> Iterator[Place]:
        """The operator between two operands, which may stand in parentheses."""
        begin = self._position(left.end_lineno or 0, left.end_col_offset or 0)
        end = self._position(right.lineno, right.col_offset)
        some = self._tokens[bisect_left(self._tokens, (begin, "")) : bisect_left(self._tokens, (end, ""))]
        found = [(start, word) for start, word in some if word not in "()"]
        operator = " ".join(word for _, word in found)
        (row, column), _ = found[0]
        if operator in OPERATORS and self._lines[row - 1].startswith(operator, column):
            yield Place(row, column, operator, tuple(OPERATORS[operator]))


def operands(node: ast.AST) -> Sequence[ast.expr]:
    """What stands around the operators of an expression, in order."""
    match node:
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.BoolOp(values=values):
            return values
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.AugAssign(target=target, value=value):
            return [target, value]
        case _:
            return []


def changeable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that say what is done: not those of types, nor what is in the text of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or (name == "body" and is_for_types(node)):
            continue
        for child in cast("list[object]", value) if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from changeable(child)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


# Lua

WORDS = re.compile(
    r"""
    (?P<apart> --\[(?P<many>=*)\[ .*? \](?P=many)\] | --[^\n]*)
    | (?P<text> \[(?P<equals>=*)\[ .*? \](?P=equals)\] | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | (?P<number> 0[xX][0-9a-fA-F]+ | \d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<name> [A-Za-z_]\w*)
    | (?P<sign> [=~<>]= | \.{2,3} | [^\s\w])
    """,
    re.VERBOSE | re.DOTALL,
)
# after these comes an operand, so that a minus is a sign
OPENING = {
    "and", "or", "not", "return", "if", "elseif", "while", "until", "in", "do", "then", "else", "repeat",
    "=", "==", "~=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "^", "#", "..", "(", "[", "{", ",", ";", "",
}  # fmt: skip


def lua_places(text: str) -> Iterator[Place]:
    before = ""
    for found in WORDS.finditer(text):
        kind, word = found.lastgroup, found[0]
        if kind == "apart":
            continue
        row, column = text.count("\n", 0, found.start()) + 1, found.start() - text.rfind("\n", 0, found.start()) - 1
        if word == "not" and text.startswith("not ", found.start()):
            yield Place(row, column, "not ", ("",))
        elif kind == "number":
            yield Place(row, column, word, other_numbers(word))
        elif kind in ("name", "sign") and word in OF_LUA and not is_sign(word, before):
            yield Place(row, column, word, tuple(OF_LUA[word]))
        before = "text" if kind == "text" else word


def is_sign(word: str, before: str) -> bool:
    return word == "-" and before in OPENING


# Drawing


def possible_changes(root: Path, patterns: Sequence[str]) -> list[Change]:
    """All changes to some files of the project, in order."""
    files = [path for pattern in patterns for path in root.glob(pattern)]
    return sorted(
        change
        for path in files
        for change in find_changes(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
    )


def draw(root: Path, seed: int, count: int) -> list[Change]:
    """Some changes, half of them to the scripts and half to the modules; of more, the first are the same."""
    random = Random(seed)
    drawn: list[Change] = []
    for patterns, share in ((SCRIPTS, count - count // 2), (MODULES, count // 2)):
        possible = possible_changes(root, patterns)
        random.shuffle(possible)
        drawn += possible[:share]
    return drawn


# What changes nothing


@dataclass(frozen=True)
class Equivalent:
    """A line, and another that does the same; ``times`` is how often it stands in its file."""

    file: str
    old: str
    new: str
    reason: str
    times: int = 1

    def matches(self, change: Change) -> bool:
        return (self.file, self.old, self.new) == (change.file, change.line.strip(), change.becomes.strip())


def read_equivalents(root: Path, listing: str) -> dict[Change, str]:
    """The changes that change nothing, with the reasons. Raises ValueError if an entry matches no change, or more than
    it says."""
    reasons: dict[Change, str] = {}
    for fields in tomllib.loads(listing).get("equivalent", []):
        entry = Equivalent(**fields)
        found = [change for change in possible_changes(root, [entry.file]) if entry.matches(change)]
        if len({change.row for change in found}) != entry.times:
            change = f"{entry.old!r} → {entry.new!r}"
            raise ValueError(f"{entry.file}: {change} is possible in {len(found)} lines, not in {entry.times}")
        reasons.update(dict.fromkeys(found, entry.reason))
    return reasons
