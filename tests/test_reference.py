"""The reference is whole: every public name stands in it once, and its docstring says what a caller must know."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from userland import ROOT

import aiodigest
import aiodigest.integrations
from aiodigest.commands import options

REFERENCE = ROOT / "docs" / "reference"
FOLDERS = (aiodigest, aiodigest.integrations)
FOUND = {f"{folder.__name__}.{found.name}" for folder in FOLDERS for found in pkgutil.iter_modules(folder.__path__)}
MODULES = sorted(name for name in FOUND if re.fullmatch(r"aiodigest\.(testing|integrations\.[a-z]+)", name))
ELSEWHERE = ["aiodigest.portal.Sync"]  # what a public property has


@dataclass(frozen=True)
class Public:
    """Something that users may use, and the docstrings that speak of it: its own, and that of its class."""

    path: str
    value: Any
    doc: str
    around: str = ""

    def __str__(self) -> str:
        return self.path

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """Those that a caller may give by name or place."""
        try:
            found = inspect.signature(self.value).parameters.values()
        except (TypeError, ValueError):
            return []  # a type alias, or a property
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [one for one in found if one.kind not in variable and one.name not in ("self", "cls")]

    @property
    def words(self) -> set[str]:
        """Those of the docstrings."""
        return set(re.findall(r"\w+", f"{self.doc} {self.around}"))

    @property
    def refers(self) -> bool:
        """Whether another docstring explains its arguments."""
        return re.search(r"the same arguments|arguments are those of", self.doc) is not None

    @property
    def is_awaited(self) -> bool:
        """Whether it is a coroutine or an asynchronous iterator or context manager."""
        inner = inspect.unwrap(self.value) if isinstance(self.value, FunctionType) else None
        return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)

    @property
    def raised(self) -> set[str]:
        """The names of the errors that its own body makes and raises."""
        if not isinstance(self.value, FunctionType):
            return set()
        function = ast.parse(inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(self.value))))
        calls = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise)]
        return {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def public_names() -> list[str]:
    """All of them, with the module from which users import them."""
    offered = [f"{name}.{each}" for name in MODULES for each in offer(importlib.import_module(name))]
    return [*(f"aiodigest.{name}" for name in aiodigest.__all__), *offered, *ELSEWHERE]


def offer(module: ModuleType) -> list[str]:
    """What a module is imported for: what it says, or else its own functions and classes without an underscore."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    said: list[str] | None = getattr(module, "__all__", None)
    return said if said is not None else [name for name in own if re.match(r"[A-Za-z]\w", name)]


def everything() -> Iterator[Public]:
    """The public names, and what public classes offer."""
    for path in public_names():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        doc = inspect.cleandoc(doc_of(value) or "") if callable_by_users(value) else alias_doc(name)
        yield Public(path, value, doc)
        if inspect.isclass(value):
            for member in dir(value):
                if not member.startswith("_") and (function := method(value, member)) is not None:
                    yield Public(f"{path}.{member}", function, inspect.cleandoc(function.__doc__ or ""), doc)


def callable_by_users(value: object) -> bool:
    return inspect.isclass(value) or isinstance(value, FunctionType)


def doc_of(value: Any) -> str | None:
    """Its own docstring, not an inherited one, nor the one that ``dataclass`` makes up."""
    doc: str | None = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return None if doc is not None and doc.startswith(f"{value.__name__}(") else doc


def method(owner: type, name: str) -> Any:
    """The function behind a method or property that aiodigest defines; None for fields and what is Python's."""
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "func", getattr(found, "__func__", found))  # of a cached_property, or a classmethod
    mine = isinstance(found, FunctionType) and found.__module__.startswith("aiodigest")
    return found if mine else None


def alias_doc(name: str) -> str:
    """The string below the assignment of an alias, which Python does not keep."""
    for path in (ROOT / "aiodigest").glob("*.py"):
        for assignment, below in pairwise(ast.parse(path.read_text()).body):
            match assignment, below:
                case (
                    ast.Assign(targets=[ast.Name(assigned)]) | ast.AnnAssign(target=ast.Name(assigned)),
                    ast.Expr(ast.Constant(str(explanation))),
                ) if assigned == name:
                    return explanation
                case _:
                    pass
    return ""


EVERYTHING = list(everything())


def entries_of(doc: str) -> dict[str, str]:
    """What a docstring says of each parameter or attribute that it lists: type, default and meaning."""
    entries: dict[str, str] = {}
    for lines in re.findall(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?:\n\n|\Z)", doc, re.DOTALL | re.MULTILINE):
        for names, told in re.findall(r"^(\S.*?) : (.*(?:\n +.*)*)", lines, re.MULTILINE):
            entries |= dict.fromkeys(names.split(", "), told)
    return entries


# What docstrings say


def test_every_public_name_is_explained() -> None:
    assert not [one.path for one in EVERYTHING if not one.doc]


def test_every_parameter_is_explained() -> None:
    unsaid = {one.path: {each.name for each in one.parameters} - one.words for one in EVERYTHING if not one.refers}
    assert not {path: names for path, names in unsaid.items() if names}


def test_a_duration_says_its_unit() -> None:
    durations = [one for one in EVERYTHING if any("timedelta" in str(each.annotation) for each in one.parameters)]
    assert durations
    assert not [one.path for one in durations if "seconds" not in one.words]
    views = [one for one in EVERYTHING if is_dataclass(one.value) and one.path.startswith("aiodigest.")]
    floats = [(one, each.name) for one in views for each in fields(one.value) if each.type == "float"]
    unsaid = [f"{one}.{name}" for one, name in floats if "econds" not in entries_of(one.doc).get(name, one.doc)]
    assert floats
    assert not unsaid


def test_a_default_that_is_written_is_the_default() -> None:
    wrong: list[str] = []
    for one in EVERYTHING:
        entries = entries_of(one.doc)
        for each in one.parameters:
            if each.name in entries and each.default is not inspect.Parameter.empty:
                told = entries[each.name].splitlines()[0]
                written = re.search(r"\bdefault (.*)", told)
                plain = written and re.match(r'-?\d[\d_,.]*$|None\b|True\b|False\b|"[^"]*"', written[1])
                if not written or (plain and ast.literal_eval(plain[0].replace(",", "")) != each.default):
                    wrong.append(f"{one}: {each.name} : {told}")
    assert not wrong


def test_what_is_awaited_says_what_it_raises() -> None:
    awaited = [one for one in EVERYTHING if one.is_awaited]
    said = [one for one in awaited if re.search(r"\b[Rr]aises?\b", one.doc) or "may raise" in one.around]
    assert not [one.path for one in awaited if one not in said]
    assert awaited


def test_every_error_that_a_function_raises_is_named() -> None:
    unsaid = {one.path: {name for name in one.raised if name in aiodigest.__all__} - one.words for one in EVERYTHING}
    assert not {path: names for path, names in unsaid.items() if names}


# What the pages hold


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
    told = [name for text in pages.values() for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]
    assert sorted(told) == sorted(public_names())


def test_the_environment_page_tells_of_every_variable() -> None:
    sources = [path.read_text() for path in (ROOT / "aiodigest").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\bAIODIGEST_[A-Z_]+", source)}
    told = re.findall(r"^\| `(AIODIGEST_[A-Z_]+)` \|", (REFERENCE / "environment.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(read)


def test_the_command_line_page_tells_of_every_exit_code() -> None:
    codes = {value for name, value in vars(options).items() if name.isupper() and isinstance(value, int)}
    told = re.findall(r"^\| (\d+) \|", (REFERENCE / "command-line.md").read_text(), re.MULTILINE)
    assert [int(code) for code in told] == sorted(codes | {0})


def test_the_command_line_page_shows_the_help_of_every_command(hooks: ModuleType) -> None:
    told: dict[str, str] = dict(hooks.commands())
    assert {"aiodigest", "aiodigest run", "aiodigest pipe", "aiodigest dead replay"} <= told.keys()
    for name, text in told.items():
        assert f"Usage: {name}" in text
        assert max(map(len, text.splitlines())) <= hooks.WIDTH
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/command-line.md"))
    shown = hooks.on_page_markdown((REFERENCE / "command-line.md").read_text(), page, None, None)
    assert all(text in shown for text in told.values())


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](design.md#words)", "[a](../design.md#words)"),
        ("[a](../README.md#the-engine)", "[a](../overview.md#the-engine)"),
        ("[a](../examples/service.py)", "a"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("[a](../no_such_file.py)", "[a](../no_such_file.py)"),
    ],
)
def test_a_link_out_of_the_documents_leads_to_a_page_or_is_text(hooks: ModuleType, written: str, shown: str) -> None:
    assert hooks.relinked(written, "docs/x.md", "howto/x.md") == shown


@pytest.mark.parametrize(
    ("html", "warned"),
    [
        ('<a href="https://example.org">', False),
        ('<script src="search/main.js">', False),
        ('<script async src="https://example.org/x.js">', True),
        ('<link rel="stylesheet" href="//example.org/x.css">', True),
    ],
)
def test_a_page_that_needs_a_part_from_elsewhere_is_warned_of(
    hooks: ModuleType, html: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert hooks.on_post_page(html, page, None) == html
    assert bool(caplog.records) == warned


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """What the site's frame adds to the pages."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
