"""Small changes to operators, constants, conditions and statements: of Python by its tree, of Lua by its words."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, cast

SCRIPTS = ("aiodigest/backends/redis/lua/**/*.lua",)
MODULES = (
    "aiodigest/[!_]*.py", "aiodigest/worker/*.py", "aiodigest/session/*.py", "aiodigest/records/*.py",
    "aiodigest/backends/memory/*.py", "aiodigest/backends/redis/**/*.py",
)  # fmt: skip
# What an operator becomes: its neighbour, and its opposite.
OPERATORS: Mapping[type[ast.AST], Sequence[type[ast.AST]]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,),
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Mult,),
}  # fmt: skip
OF_LUA: Mapping[str, Sequence[str]] = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("~=",), "~=": ("==",),
    "and": ("or",), "or": ("and",), "not ": ("",), "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",),
    "true": ("false",), "false": ("true",),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Change:
    """Other lines for some of a file."""

    file: str
    row: int
    old: str
    new: str

    def __str__(self) -> str:
        """Tell where it is, and what."""
        where = f"{self.file.removeprefix('aiodigest/')}:{self.row}"
        return f"{where}  {self.old.strip()!r} → {self.new.strip()!r}"

    def apply(self, text: str) -> str:
        """The text of its file with the change."""
        lines = text.split("\n")
        some = slice(self.row - 1, self.row + self.old.count("\n"))
        assert lines[some] == self.old.split("\n")
        lines[some] = [self.new]
        return "\n".join(lines)


@cache
def find_changes(file: str, text: str) -> Sequence[Change]:
    """All changes to a file, in its order."""
    found: list[Change] = []
    for start, end, new in (lua_changes if file.endswith(".lua") else python_changes)(text):
        begin, stop = text.rfind("\n", 0, start) + 1, text.find("\n", end) % (len(text) + 1)
        changed = text[begin:start] + new + text[end:stop]
        found.append(Change(file, text.count("\n", 0, start) + 1, text[begin:stop], changed))
    return sorted(set(found))


def python_changes(text: str) -> Iterator[tuple[int, int, str]]:
    """Where something begins and ends, and another text for it."""
    encoded, begins = text.encode(), [0]
    for line in text.split("\n"):
        begins.append(begins[-1] + len(line.encode()) + 1)
    for parent in changeable(ast.parse(text)):
        for node, new in others(parent):
            ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # trees count bytes
            start, end = (len(encoded[: begins[row - 1] + column].decode()) for row, column in ends)
            yield start, end, new if isinstance(new, str) else ast.unparse(new)


def others(node: Any) -> Iterator[tuple[Any, ast.AST | str]]:
    """What a node may become, or one below it: another node, or a text."""
    match node:
        case ast.Compare(ops=operators):
            for number, operator in enumerate(operators):
                for new in OPERATORS[type(operator)]:
                    yield node, replaced(node, ops=[*operators[:number], new(), *operators[number + 1 :]])
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) | ast.AugAssign(op=operator):
            yield from ((node, replaced(node, op=new())) for new in OPERATORS.get(type(operator), ()))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand
        case ast.Constant(value=bool() | int() | float() as value):
            yield from ((node, new) for new in other_constants(value))
        case ast.If(test=test) if not is_for_types(node):
            yield test, "False"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case _:
            pass


def other_constants(value: float) -> list[str]:
    if isinstance(value, bool):
        return [str(not value)]
    return [str(value + 1), *([str(value - 1)] if value == 1 else [])]


def replaced(node: ast.AST, **fields: object) -> ast.AST:
    node = copy(node)
    vars(node).update(fields)
    return node


def changeable(node: Any) -> Iterator[ast.AST]:
    """The nodes that say what is done: not those of types, nor what is in the text of an f-string."""
    if isinstance(node, list):
        for child in cast("list[object]", node):
            yield from changeable(child)
    elif isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns") and not (name == "body" and is_for_types(node)):
                yield from changeable(value)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


WORDS = re.compile(
    r"""
    (?P<apart> --\[(?P<many>=*)\[ .*? \](?P=many)\] | --[^\n]*)
    | (?P<text> \[(?P<equals>=*)\[ .*? \](?P=equals)\] | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*')
    | (?P<number> 0[xX][0-9a-fA-F]+ | \d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    | (?P<name> not[ ] | [A-Za-z_]\w*)
    | (?P<sign> [=~<>]= | \.{2,3} | [^\s\w])
    """,
    re.VERBOSE | re.DOTALL,
)
# after these comes an operand, so that a minus is a sign
OPENING = {
    "and", "or", "not ", "return", "if", "elseif", "while", "until", "in", "do", "then", "else", "repeat",
    "=", "==", "~=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "^", "#", "..", "(", "[", "{", ",", ";", "",
}  # fmt: skip


def lua_changes(text: str) -> Iterator[tuple[int, int, str]]:
    """Where a word begins and ends, and another for it."""
    before = ""
    for found in WORDS.finditer(text):
        kind, word, new = found.lastgroup, found[0], ()
        if kind == "apart":
            continue
        if kind == "number":
            new = other_constants(ast.literal_eval(word))
        elif kind in ("name", "sign") and not (word == "-" and before in OPENING):
            new = OF_LUA.get(word, ())
        yield from ((*found.span(), each) for each in new)
        before = "text" if kind == "text" else word


def possible_changes(root: Path, patterns: Sequence[str]) -> list[Change]:
    """All changes to some files of the project, in order."""
    files = {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}
    return sorted(change for file in files for change in find_changes(file, (root / file).read_text(encoding="utf-8")))


def draw(root: Path, seed: int, count: int) -> list[Change]:
    """Some changes, half of them to the scripts and half to the modules; of more, the first are the same."""
    random = Random(seed)
    drawn: list[Change] = []
    for patterns, share in ((SCRIPTS, count - count // 2), (MODULES, count // 2)):
        possible = possible_changes(root, patterns)
        random.shuffle(possible)
        drawn += possible[:share]
    return drawn


def read_equivalents(root: Path, listing: str) -> dict[Change, str]:
    """The changes that change nothing, with the reasons. Raises ValueError if an entry matches no change, or not as
    many as it says."""
    reasons: dict[Change, str] = {}
    for entry in tomllib.loads(listing).get("equivalent", []):
        file, lines, times = entry["file"], (entry["old"], entry["new"]), entry.get("times", 1)
        found = [each for each in possible_changes(root, [file]) if (each.old.strip(), each.new.strip()) == lines]
        if len(found) != times:
            raise ValueError(f"{file}: {lines[0]!r} → {lines[1]!r} is possible {len(found)} times, not {times}")
        reasons.update((change, entry["reason"]) for change in found)
    return reasons
