"""The default page in a real browser, Debian's ``chromium``: on a phone and a desktop, in light and dark, and inert."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from html import escape, unescape
from json import loads
from pathlib import Path
from typing import Any

import pytest

from aiodigest import Digest, Record
from aiodigest.rendering import Template

CHROMIUM = shutil.which("chromium")
NOW = datetime(2026, 11, 30, 14, 5, tzinfo=UTC)
LOOK = """
<meta charset="utf-8"><iframe style="width:%dpx;height:900px;border:0" srcdoc="%s"></iframe><pre></pre>
<script>
onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const style = name => getComputedStyle(page.querySelector(name));
  document.querySelector("pre").textContent = JSON.stringify({
    wide: page.documentElement.scrollWidth, told: page.body.innerText, harmed: typeof parent.harmed,
    elements: [...new Set([...page.body.querySelectorAll("*")].map(one => one.tagName))].sort().join(" "),
    card: style(".card").backgroundColor, text: style("h1").color, soft: style("p").color, size: style("p").fontSize,
  })
}
</script>
"""

pytestmark = pytest.mark.processes


def looked_at(digest: Digest[Any], folder: Path, wide: int, *, dark: bool = False) -> dict[str, Any]:
    """Return what a browser makes of the page of a digest."""
    assert CHROMIUM, "mails are looked at in chromium, which is not on the PATH: install the package of that name"
    html = str(Template(group_by="host")(digest, now=NOW).html)
    page = folder / "page.html"
    page.write_text(LOOK % (wide, escape(html)), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'chromium'}",
        "--dump-dom",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={max(wide, 500)},1000",
        page.as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r"<pre>(.*?)</pre>", run.stdout, re.DOTALL)
    assert found
    return dict(loads(unescape(found[1])))


def brightness(colour: str) -> float:
    """Return the relative luminance of ``rgb(...)``, as WCAG has it."""
    linear = [
        c / 12.92 if (c := int(each) / 255) <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
        for each in re.findall(r"\d+", colour)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((brightness(one), brightness(other)))
    return (lighter + 0.05) / (darker + 0.05)


def digest_of(*values: Any) -> Digest[Any]:
    return Digest(
        "ops", [Record(f"r{n}", value, NOW - timedelta(minutes=n)) for n, value in enumerate(values)], "d1", dropped=2
    )


ALERTS = digest_of(
    *({"host": "db-1", "text": f"disk at {n} %"} for n in range(12)),
    {"host": "w" * 300, "text": "x" * 300, "u": "https://" + "y" * 400},
)
HOSTILE = digest_of(
    "<script>parent.harmed = 1</script>", "<img src=x onerror='parent.harmed = 1'>", "</div></td></table><h3>more</h3>",
    {"host": "\"><svg onload='parent.harmed = 1'>", "text": "<a href='javascript:parent.harmed = 1'>x</a>"},
    {"host": "<style>*{display:none}</style>", "text": "\u202e<b>b</b>", "<i>k</i>": "<u>v</u>"},
)  # fmt: skip


@pytest.mark.parametrize("wide", [320, 390, 1200])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_fits_and_can_be_read(wide: int, dark: bool, tmp_path: Path) -> None:
    page = looked_at(ALERTS, tmp_path, wide, dark=dark)
    assert page["wide"] <= wide, "nothing is beside the screen"
    assert (brightness(page["card"]) < 0.1) == dark
    assert contrast(page["text"], page["card"]) > 7
    assert contrast(page["soft"], page["card"]) > 4.5
    assert float(page["size"].removesuffix("px")) >= 13
    assert "disk at 0 % × 12" in re.sub(r"\s+", " ", page["told"])  # noqa: RUF001


def test_markup_of_strangers_is_shown_and_does_nothing(tmp_path: Path) -> None:
    page = looked_at(HOSTILE, tmp_path, 390)
    assert page["harmed"] == "undefined"
    assert page["elements"] == "DIV H1 H2 P SPAN TABLE TBODY TD TR"
    assert "<script>parent.harmed = 1</script>" in page["told"]
    assert "<style>*{display:none}</style>" in page["told"]
