"""Write what the docstrings and ``--help`` say into the pages of the reference: ``make reference``.

So the reference can be read in the repository as well as on the site. On a page, the text between
``<!-- docstring: aiodigest.Policy -->`` and ``<!-- end -->`` is made here; the rest is written by hand. Words after
the name: the methods to show, in this order (all of them if none is named); ``-members`` for none; ``-constructor`` for
a class that users do not make. ``<!-- commands -->`` stands for the help of every command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import griffe
import typer.main

from aiodigest.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "reference"
MADE = re.compile(r"^<!-- (docstring: (\S+)( [^>]*)?|commands) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^<!-- docstring: \S*\.(\w+)", re.MULTILINE)
WIDTH = 100  # columns of a signature, and of a help text
TEXT = 120


def main() -> None:
    """Write all pages anew."""
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """Return each page of the reference as it should be."""
    package = griffe.load("aiodigest", search_paths=[ROOT], docstring_parser="numpy")
    texts = {page: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
    links = {name: f"{page.name}#{name.lower()}" for page, text in texts.items() for name in NAME.findall(text)}

    def made(found: re.Match[str]) -> str:
        below = found.string[: found.start()]
        text = help_of_all_commands() if found[2] is None else _linked(_said(package, found, below), links)
        return f"<!-- {found[1]} -->\n\n{text}\n\n<!-- end -->"

    return {page: MADE.sub(made, text) for page, text in texts.items()}


# Docstrings


def _said(package: Any, marker: re.Match[str], before: str) -> str:
    """Return what the docstring says of a name, below the last heading of the page that is written by hand."""
    sections = re.findall(r"^(#+) ", MADE.sub("", before), re.MULTILINE)
    heading, words = f"{sections[-1]}#", (marker[3] or "").split()
    path = marker[2].removeprefix("aiodigest.")
    found = package[path]
    thing = found.final_target if found.is_alias else found
    parts = [f"{heading} {thing.name}"]
    if thing.is_class and len(thing.parameters) and "-constructor" not in words:
        parts.append(_listing(marker[2], thing.parameters))
    elif thing.is_function:
        parts.append(_listing(marker[2], thing.parameters, thing.returns))
    parts += _docstring(thing)
    if thing.is_class and "-members" not in words:
        chosen = [word for word in words if not word.startswith("-")]
        members = [thing.all_members[name] for name in chosen or _methods(thing)]
        for member in members:
            parts.append(f"{heading}# {thing.name}.{member.name}")
            if member.is_function:
                parts.append(_listing(f"{_use(member)}{member.name}", member.parameters, _returns(member)))
            parts += _docstring(member)
    return "\n\n".join(parts)


def _methods(thing: Any) -> list[str]:
    return [name for name, member in thing.all_members.items() if not name.startswith("_") and member.docstring]


def _use(function: Any) -> str:
    """Return the words before a call: whether it is awaited, entered or iterated."""
    if "async" not in function.labels:
        return ""
    if any("contextmanager" in str(decorator.value) for decorator in function.decorators):
        return "async with "
    return "async for ... in " if str(function.returns).startswith("Async") else "await "


def _returns(function: Any) -> Any:
    return None if _use(function).startswith(("async with", "async for")) else function.returns


def _listing(name: str, parameters: Any, returns: Any = None) -> str:
    """Return a signature as code, on one line if it fits."""
    shown, keyword_only = list[str](), False
    for one in parameters:
        kind = one.kind.value
        if one.name in ("self", "cls") or one.name.startswith("_"):
            continue
        if kind == "keyword-only" and not keyword_only:
            shown.append("*")
        keyword_only = kind in ("keyword-only", "variadic positional")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation, value = str(one.annotation or ""), one.default
        if annotation.startswith("_"):  # for type checkers alone
            annotation, _, value = _header(one.function.parent, one.name).partition(", default ")
            annotation = annotation.replace(" or ", " | ")
        annotation = f": {annotation}" if annotation else ""
        default = f" = {_default(str(value))}" if value is not None and not stars else ""
        shown.append(f"{stars}{one.name}{annotation}{default}")
    arrow = f" -> {returns}" if returns else ""
    shown = [each.replace("'", '"') for each in shown]
    line = f"{name}({', '.join(shown)}){arrow}"
    if len(line) > WIDTH:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){arrow}"
    return f"```py\n{line}\n```"


def _default(value: str) -> str:
    """Return a default as it stands in the code, unless it is a lambda, a factory, a cast or a constant of a module."""
    return "..." if re.search(r"lambda|field\(|cast\(|\b(?!JSON\b)[A-Z]{2,}\b", value) else value


def _header(thing: Any, name: str) -> str:
    """Return the type of a parameter or attribute and its default, as the docstring of ``thing`` has them."""
    found = re.search(rf"^{name} : (.*)$", thing.docstring.value, re.MULTILINE)
    assert found is not None, f"{thing.path}: {name}"
    return found[1]


def _docstring(thing: Any) -> Iterator[str]:
    for section in thing.docstring.parsed if thing.docstring else ():
        match section.kind.value:
            case "text":
                yield str(section.value)
            case "parameters" | "attributes" | "raises" as kind:
                yield f"**{kind.capitalize()}**"
                yield "\n".join(_items(kind, section.value, thing))
            case kind:
                raise ValueError(f"{thing.path}: nothing is known of a section {kind!r}")


def _items(kind: str, entries: list[Any], thing: Any) -> Iterator[str]:
    for one in entries:
        raised = kind == "raises"
        name = (
            re.sub(r"\w+", r"`\g<0>`", str(one.annotation)) if raised else f"`{one.name}` ({_header(thing, one.name)})"
        )
        yield fill(f"* {name}: {one.description}", TEXT, subsequent_indent="  ", break_on_hyphens=False)


def _linked(text: str, links: dict[str, str]) -> str:
    """Make Markdown of the marks in docstrings, with links to public names."""

    def link(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return f"[`{name}`]({links[name]})" if name in links else found[0]

    parts = re.split(r"(^```.*?^```$|^#.*?$)", text, flags=re.DOTALL | re.MULTILINE)
    for index in range(0, len(parts), 2):
        plain = re.sub(r"``([^`]+)``", r"`\1`", parts[index])
        parts[index] = re.sub(r"`(\w+)`|`[^`]+`|\b(?=\w*[a-z])([A-Z]\w+[A-Z]\w+)\b", link, plain)
    return "".join(parts)


# The help of commands


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command by its whole name, with its help as the terminal shows it."""
    root = typer.main.get_command(app)
    yield from _commands(root, "aiodigest", None)


def _commands(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    settings = command.context_settings | {"terminal_width": WIDTH}
    context = command.context_class(command, info_name=name, parent=parent, **settings)
    yield context.command_path, context.get_help()
    for below, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            yield from _commands(one, below, context)


def help_of_all_commands() -> str:
    """Return a section for each command."""
    return "\n\n".join(f"### `{name}`\n\n```\n{told}\n```" for name, told in commands())


if __name__ == "__main__":
    main()
