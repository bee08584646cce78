"""What the site has and the Markdown files have not: pages for the files of the repository that other pages link to."""

from __future__ import annotations

import logging
import re
from os.path import normpath, relpath
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

logger = logging.getLogger("properdocs.hooks")

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()#\s]+)(#[^()\s]*)?\)")
PICTURE = re.compile(r'<img [^>]*src="(?:\.\./)*(policies/[\w-]+\.svg)"[^>]*>')
COLOURS = (("friendly", ""), ("github-dark", "@media (prefers-color-scheme: dark)"))  # of code, by style of Pygments


class File(Protocol):
    """The part of a file of the site that is used here."""

    src_uri: str


class Page(Protocol):
    """The part of a page of the site that is used here."""

    file: File


def place_of(file: str) -> str | None:
    """Return the page of the site that shows a file of the repository; None for a folder, and for what is not there."""
    if file in PAGES or file.startswith("docs/"):
        return PAGES.get(file, file.removeprefix("docs/"))
    return f"files/{file}.md" if (ROOT / file).is_file() else None


def relinked(markdown: str, source: str, page: str) -> str:
    """Return the text of the file ``source`` of the repository with its links made for ``page`` of the site.

    A link to a folder becomes plain text.
    """

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        file = normpath(PurePosixPath(source).parent / target)
        if target.startswith("/") or ":" in target or not (ROOT / file).exists():
            return found[0]  # of another site, or wrong: then it is the build that tells
        place = place_of(file)
        return text if place is None else f"[{text}]({relpath(place, PurePosixPath(page).parent)}{anchor})"

    return LINK.sub(link, markdown)


def linked_files() -> set[str]:
    """Return the files outside ``docs`` that pages link to, and that are no pages of their own."""
    sources = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    found = set[str]()
    for source in sources:
        for _, target, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
            file = normpath(PurePosixPath(source).parent / target)
            if not file.startswith("docs/") and file not in PAGES and (ROOT / file).is_file():
                found.add(file)
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made of files outside this folder, and the colours of code."""
    from properdocs.structure.files import File as SiteFile
    from properdocs.structure.files import InclusionLevel
    from pygments.formatters import HtmlFormatter

    def colours(style: str) -> str:
        formatter: Any = HtmlFormatter[str](style=style)
        return str(formatter.get_style_defs(".highlight"))

    css = "\n".join(f"{when} {{ {colours(style)} }}" if when else colours(style) for style, when in COLOURS)
    files.append(SiteFile.generated(config, "code.css", content=css))
    for source, page in PAGES.items():
        markdown = relinked((ROOT / source).read_text(encoding="utf-8"), source, page)
        files.append(SiteFile.generated(config, page, content=markdown))
    for file in sorted(linked_files()):
        language, text = PurePosixPath(file).suffix.removeprefix("."), (ROOT / file).read_text(encoding="utf-8")
        content = f"# {PurePosixPath(file).name}\n\n`{file}` in the repository:\n\n````{language}\n{text}````\n"
        hidden = InclusionLevel.NOT_IN_NAV
        files.append(SiteFile.generated(config, f"files/{file}.md", content=content, inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Page, config: object, files: object) -> str:
    """Mend the links that lead out of this folder."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() or uri.startswith("files/") else relinked(markdown, f"docs/{uri}", uri)


def on_page_content(html: str, page: Page, config: object, files: object) -> str:
    """Put the pictures of policies into their page: then they have its letters, and a reader can search them."""

    def picture(found: re.Match[str]) -> str:
        return (ROOT / "docs" / found[1]).read_text(encoding="utf-8")

    return PICTURE.sub(picture, html)


def on_post_page(output: str, page: Page, config: object) -> str:
    """Warn, which fails the build, of a page whose reader's browser would ask somebody else for a part of it."""
    for part in re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="(?:https?:)?//[^>]*>', output):
        logger.warning("%s needs what is elsewhere: %s", page.file.src_uri, part)
    return output
