"""What pyproject.toml says of the package is what users are told. ``make dist`` looks at the package itself."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from userland import ROOT

from aiodigest import __version__

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def test_the_readme_tells_of_every_extra() -> None:
    install = (ROOT / "README.md").read_text().partition("## Quickstart\n")[2].partition("\n#")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", install, re.MULTILINE)) == sorted(EXTRAS)


def test_every_extra_that_the_package_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "aiodigest").rglob("*.py"))
    named = {name for names in re.findall(r"aiodigest\[([\w,]+)\]", sources) for name in names.split(",")}
    assert named
    assert named <= EXTRAS.keys()


def test_every_dependency_has_an_oldest_version() -> None:
    needs = [*PROJECT["dependencies"], *(need for extra in EXTRAS.values() for need in extra)]
    assert not [need for need in needs if ">=" not in need and not need.startswith("aiodigest[")]


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__
