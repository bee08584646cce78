"""The reference is whole: every public name stands in it once, and its docstring says what a caller must know."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from userland import ROOT

import aiodigest
import aiodigest.integrations
from aiodigest.backends.redis.backend import RedisBackend
from aiodigest.cli.output import EXIT_CODES

REFERENCE = ROOT / "docs" / "reference"
INTEGRATIONS = [name for _, name, _ in pkgutil.iter_modules(aiodigest.integrations.__path__) if name[0] != "_"]
ROOMS = ["aiodigest", "aiodigest.testing", "aiodigest.rendering", "aiodigest.channels", "aiodigest.logs"]
MODULES = [*ROOMS, *map("aiodigest.integrations.{}".format, INTEGRATIONS)]
REFERS = re.compile(r"^``[\w.]+``, with the same arguments|arguments are those of ``\w+``")  # explained elsewhere
QUOTED = re.compile(r"``(\w+)(?:=[^`]*)?``")  # ``name``, or ``name=value``
INHERITED = {"InvalidArgument", "ConfigurationError", "BackendUnavailable"}  # by all methods of an engine


@dataclass(frozen=True)
class Public:
    """A public name, its own docstring, and the class that it is a method of."""

    path: str
    value: Any
    doc: str
    owner: type | None = None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """Return those that a caller may give by name or position."""
        try:
            found = inspect.signature(self.value).parameters.values()
        except (TypeError, ValueError):
            return []  # a type alias, or a property
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [one for one in found if one.kind not in variable and one.name not in ("self", "cls")]

    @property
    def around(self) -> str:
        """Return the docstring of its class."""
        return inspect.cleandoc(doc_of(self.owner) or "") if self.owner else ""

    @property
    def explained(self) -> set[str]:
        """Return the parameters that its own docstring explains, or its class's for all methods at once."""
        shared = re.search(r"In its methods ([^.]*)\.", self.around)
        return {*entries_of(self.doc), *QUOTED.findall(self.doc), *QUOTED.findall(shared[1] if shared else "")}

    @property
    def inherited(self) -> set[str]:
        """Return the errors that the docstring of its class names for everything awaited."""
        shared = re.search(r"What is awaited may raise ([^;]*);", self.around)
        return set(re.findall(r"\b[A-Z]\w+", shared[1])) if shared else set()

    @property
    def is_awaited(self) -> bool:
        """True for a coroutine, and for an asynchronous iterator or context manager."""
        inner = inspect.unwrap(self.value) if isinstance(self.value, FunctionType) else None
        return inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)


def public_names() -> list[str]:
    """Return all of them, with the module from which users import them."""
    return [f"{name}.{each}" for name in MODULES for each in importlib.import_module(name).__all__]


def everything() -> Iterator[Public]:
    """Yield the public names, and the members of public classes."""
    for path in public_names():
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        is_alias = not isinstance(value, type | FunctionType)
        doc = alias_doc(name) if is_alias else inspect.cleandoc(doc_of(value) or "")
        yield Public(path, value, doc)
        if inspect.isclass(value):
            for member in dir(value):
                if not member.startswith("_") and (function := method(value, member)) is not None:
                    yield Public(f"{path}.{member}", function, inspect.cleandoc(function.__doc__ or ""), value)


def doc_of(value: Any) -> str | None:
    """Return its own docstring, not an inherited one, nor the one that ``dataclass`` makes up."""
    doc: str | None = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return None if doc is not None and doc.startswith(f"{value.__name__}(") else doc


def method(owner: type, name: str) -> Any:
    """Return the function behind a method or property of aiodigest; None for fields and for Python's own."""
    found = inspect.getattr_static(owner, name, None)
    for around in ("fget", "func", "__func__"):  # of a property, a cached_property, or a classmethod
        found = getattr(found, around, found)
    mine = isinstance(found, FunctionType) and found.__module__.startswith("aiodigest")
    return found if mine else None


def raised_by(function: FunctionType, owner: type | None) -> set[str]:
    """Return the errors that a function raises, or a method that it calls of its own class or of the store."""
    raises, seen, left = set[str](), set[tuple[type, str]](), [(function, owner)]
    while left:
        one, mine = left.pop()
        for node in ast.walk(ast.parse(inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(one))))):
            match node:
                case ast.Raise(ast.Call(ast.Name(name))):
                    raises.add(name)
                case ast.Call(ast.Attribute(whose, name)) if mine is not None:
                    of = mine if isinstance(whose, ast.Name) and whose.id == "self" else RedisBackend
                    if (of, name) not in seen and (called := method(of, name)) is not None:
                        seen.add((of, name))
                        left.append((called, of))
                case _:
                    pass
    return raises


def alias_doc(name: str) -> str:
    """Return the string below the assignment of an alias, which Python does not keep."""
    for path in (ROOT / "aiodigest").rglob("*.py"):
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


def is_in_seconds(doc: str, name: str) -> bool:
    """True if the entry of a parameter says so, or the rest of a sentence that names it."""
    entry = entries_of(doc).get(name)
    return "seconds" in entry if entry is not None else re.search(rf"\b{name}\b[^.]*\bseconds\b", doc) is not None


EVERYTHING = list(everything())


def entries_of(doc: str) -> dict[str, str]:
    """Return the entry of each parameter or attribute that a docstring lists: type, default and meaning."""
    entries: dict[str, str] = {}
    for lines in re.findall(r"^(?:Parameters|Attributes)\n-+\n(.*?)(?:\n\n|\Z)", doc, re.DOTALL | re.MULTILINE):
        for names, told in re.findall(r"^(\S.*?) : (.*(?:\n +.*)*)", lines, re.MULTILINE):
            entries |= dict.fromkeys(names.split(", "), told)
    return entries


def test_every_public_name_is_explained() -> None:
    assert not [one.path for one in EVERYTHING if not one.doc]


def test_every_parameter_is_explained() -> None:
    own = [one for one in EVERYTHING if not REFERS.search(one.doc)]
    unsaid = {one.path: {each.name for each in one.parameters} - one.explained for one in own}
    assert not {path: names for path, names in unsaid.items() if names}


def test_a_duration_says_its_unit() -> None:
    parameters = [(one, each) for one in EVERYTHING for each in one.parameters]
    durations = [(one, each.name) for one, each in parameters if "timedelta" in str(each.annotation)]
    assert durations
    assert not [f"{one.path}: {name}" for one, name in durations if not is_in_seconds(one.doc, name)]
    views = [one for one in EVERYTHING if is_dataclass(one.value) and one.path.startswith("aiodigest.")]
    floats = [(one, each.name) for one in views for each in fields(one.value) if each.type == "float"]
    unsaid = [f"{one.path}.{name}" for one, name in floats if "econds" not in entries_of(one.doc).get(name, one.doc)]
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
                    wrong.append(f"{one.path}: {each.name} : {told}")
    assert not wrong


def test_what_is_awaited_says_what_it_raises() -> None:
    awaited = [one for one in EVERYTHING if one.is_awaited]
    assert not [one.path for one in awaited if not re.search(r"\b[Rr]aises?\b", one.doc) and not one.inherited]
    engines = [one for one in awaited if one.owner is aiodigest.DigestEngine]
    assert engines
    assert not [one.path for one in engines if one.inherited != INHERITED]


def test_every_error_that_a_function_raises_is_named() -> None:
    public = {*aiodigest.__all__} - {"LeaseLost"}  # which the store tells workers alone
    functions = [one for one in EVERYTHING if isinstance(one.value, FunctionType)]
    raised = {one: raised_by(one.value, one.owner) & public for one in functions}
    unsaid = {one.path: raised[one] - one.inherited - set(re.findall(r"\w+", one.doc)) for one in functions}
    assert not {path: names for path, names in unsaid.items() if names}


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    pages = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
    told = [name for text in pages.values() for name in re.findall(r"^<!-- docstring: (\S+)", text, re.MULTILINE)]
    of_users = [name for name in told if not name.startswith("aiodigest.backend.")]  # the rest is for writers of stores
    assert sorted(of_users) == sorted(public_names())


def test_the_environment_page_tells_of_every_variable() -> None:
    sources = [path.read_text() for path in (ROOT / "aiodigest").rglob("*.py")]
    read = {name for source in sources for name in re.findall(r"\bAIODIGEST_[A-Z_]+", source)}
    told = re.findall(r"^\| `(AIODIGEST_[A-Z_]+)` \|", (REFERENCE / "environment.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(read)


def test_the_command_line_page_tells_of_every_exit_code() -> None:
    told = re.findall(r"^\| (\d+) \|", (REFERENCE / "command-line.md").read_text(), re.MULTILINE)
    assert [int(code) for code in told] == sorted({*EXIT_CODES, 0})


def test_the_help_of_every_command_is_shown_and_is_no_wider_than_a_page() -> None:
    told: dict[str, str] = dict(loaded("docstrings").commands())
    assert {"aiodigest", "aiodigest run", "aiodigest pipe", "aiodigest dead replay"} <= told.keys()
    for name, text in told.items():
        assert f"Usage: {name}" in text
        assert max(map(len, text.splitlines())) <= loaded("docstrings").WIDTH


@pytest.mark.docs
def test_the_pages_say_what_docstrings_and_help_say() -> None:
    stale = [page.name for page, text in loaded("docstrings").pages().items() if page.read_text() != text]
    assert not stale, f"{', '.join(stale)}: make reference renews them"


@pytest.mark.docs
def test_the_pictures_of_policies_show_what_the_engine_does() -> None:
    policies = loaded("policies")
    stale = [path.name for path, text in policies.drawn().items() if not path.exists() or path.read_text() != text]
    assert not stale, f"{', '.join(stale)}: make picture renews them"
    page = policies.PAGE.read_text()
    for case in policies.CASES:  # in its section, before the picture
        before, _, _ = page.partition(f"](../policies/{case.name}.svg)")
        assert f"`{case.policy}`" in before.rpartition("\n## ")[2]


def test_the_pictures_of_policies_are_part_of_their_page() -> None:
    html = '<p><img alt="Added: 0:10" src="../policies/window.svg" /> and <img alt="" src="../demo.svg" /></p>'
    shown = loaded("hooks").on_page_content(html, None, None, None)
    assert 'role="img"' in shown
    assert re.findall("<img.*?>", shown) == ['<img alt="" src="../demo.svg" />']


def test_what_a_docstring_says_becomes_a_section_with_links() -> None:
    policy = (REFERENCE / "policy.md").read_text()
    assert policy.count("\n## Policy\n") == 1
    assert "aiodigest.Policy(\n    initial_delay: float | timedelta = 0.0,\n" in policy
    assert "\n* [`InvalidArgument`](errors.md#invalidargument): If a duration is negative" in policy
    for page in REFERENCE.glob("*.md"):
        assert not re.search(r"lambda|cool_ms|\bself\b|``\w", page.read_text().replace("```", "")), page.name


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("[a](design.md#words)", "[a](../design.md#words)"),
        ("[a](../README.md#the-engine)", "[a](../overview.md#the-engine)"),
        ("![a](demo.svg)", "![a](../demo.svg)"),
        ("[a](../examples/service.py)", "[a](../files/examples/service.py.md)"),
        ("[a](../examples)", "a"),
        ("[a](https://example.org/b)", "[a](https://example.org/b)"),
        ("[a](../no_such_file.py)", "[a](../no_such_file.py)"),
    ],
)
def test_a_link_out_of_documents_leads_to_a_page_of_the_site_unless_it_is_a_folder(written: str, shown: str) -> None:
    assert loaded("hooks").relinked(written, "docs/x.md", "howto/x.md") == shown


@pytest.mark.parametrize(
    ("html", "warned"),
    [
        ('<a href="https://example.org">', False),
        ('<script src="search/main.js">', False),
        ('<script async src="https://example.org/x.js">', True),
        ('<link rel="stylesheet" href="//example.org/x.css">', True),
    ],
)
def test_a_page_with_a_part_from_elsewhere_is_told(html: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert loaded("hooks").on_post_page(html, page, None) == html
    assert bool(caplog.records) == warned


def test_no_signature_shows_what_is_there_for_type_checkers_alone() -> None:
    policy = (REFERENCE / "policy.md").read_text(encoding="utf-8")
    assert "at: At | None = None," in policy
    assert "record-seconds" in policy
    for page in REFERENCE.glob("*.md"):
        assert not re.search(r"= cast\(|: _[A-Z]\w+", page.read_text(encoding="utf-8")), page


def test_each_file_that_a_page_links_to_has_a_page_of_the_site() -> None:
    files = loaded("hooks").linked_files()
    assert {"examples/service.py", "examples/fastapi_app.py"} <= files
    assert not [file for file in files if file.endswith(".svg") or not (ROOT / file).is_file()]


@cache
def loaded(name: str) -> ModuleType:
    """Load a module of the folder docs, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module
