"""What the site has and the Markdown files have not: the help of every command, and pages from outside this folder.

A link in a page that leads out of ``docs`` works where the repository is read, and leads nowhere on the site: there it
becomes plain text, or a link to the page that stands for the file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import typer.main

from aiodigest.cli.app import app

logger = logging.getLogger("properdocs.hooks")

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COMMANDS = "<!-- commands -->"
UNBUILT = re.compile(r"^.*<!-- unbuilt -->\n\n?", re.MULTILINE)  # what is said of a page that is read as it stands
WIDTH = 100  # columns of a help text


class File(Protocol):
    """The part of a file of the site that is used here."""

    src_uri: str


class Page(Protocol):
    """The part of a page of the site that is used here."""

    file: File


def commands() -> Iterator[tuple[str, str]]:
    """Each command by its whole name, and its help as the terminal shows it."""
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
    """A section for each command."""
    return "\n\n".join(f"### `{name}`\n\n```\n{told}\n```" for name, told in commands())


def relinked(markdown: str, source: str, page: str) -> str:
    """The text of the file ``source`` of the repository with its links made for ``page`` of the site."""

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        file = normpath(PurePosixPath(source).parent / target)
        if target.startswith("/") or ":" in target or not (ROOT / file).exists():
            return found[0]  # of another site, or wrong: then it is the build that tells
        place = PAGES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else None)
        return text if place is None else f"[{text}]({relpath(place, PurePosixPath(page).parent)}{anchor})"

    return re.sub(r"\[([^\[\]]+)\]\(([^()#\s]+)(#[^()\s]*)?\)", link, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of files outside this folder, and the colours of code."""
    from properdocs.structure.files import File as SiteFile
    from pygments.formatters import HtmlFormatter

    formatter: Any = HtmlFormatter[str](style="friendly")
    files.append(SiteFile.generated(config, "code.css", content=formatter.get_style_defs(".highlight")))
    for source, page in PAGES.items():
        markdown = relinked((ROOT / source).read_text(encoding="utf-8"), source, page)
        files.append(SiteFile.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, config: object, files: object) -> str:
    """Put in the commands, and mend what leads out of this folder."""
    if page.file.src_uri not in PAGES.values():
        markdown = relinked(UNBUILT.sub("", markdown), f"docs/{page.file.src_uri}", page.file.src_uri)
    return markdown.replace(COMMANDS, help_of_all_commands()) if COMMANDS in markdown else markdown


def on_post_page(output: str, page: Page, config: object) -> str:
    """Warn, which fails the build, of a page whose reader's browser would ask somebody else for a part of it."""
    for part in re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^>]*>', output):
        logger.warning("%s needs what is elsewhere: %s", page.file.src_uri, part)
    return output
