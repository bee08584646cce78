"""Play ``aiodigest demo``, and draw its first seconds for the README: ``make picture``.

The picture is what the demo shows, in an SVG that asks nobody for fonts; of a burst only the first and last events.
"""

from __future__ import annotations

import asyncio
import logging
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from aiodigest.cli.demo import Demo, show

PICTURE = Path(__file__).parent / "demo.svg"
WIDTH = 88
SHOWN = 4  # events of a burst
# rich's own, without the fonts that it would have a browser fetch
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px; }} {styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


class Picture(Console):
    """What the demo shows people, with long bursts cut short, up to the digest of the great one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        super().__init__(highlight=False, record=True, width=WIDTH, file=StringIO())
        self._burst = 0
        self.print(Text("$ aiodigest demo", "bold"))

    def show(self, at: float, what: str, **facts: Any) -> None:
        """Show the first events of a burst, and digests, but nothing of the shop; the digest of the burst ends it."""
        if what == "failure" or facts.get("channel") == "#shop" or facts.get("text", "").startswith("The shop"):
            return
        if what == "event":
            self._burst += 1
            if self._burst > SHOWN:
                return
        if what == "digest":
            if self._burst > SHOWN:
                self.print(Text(f"                 ... {self._burst - SHOWN} more events", "dim"))
            self._burst = 0
        show(self, False, at, what, **facts)
        if what == "digest" and len(facts["texts"]) > 40:
            self.over.set()


async def draw() -> None:
    """Play the demo as far as the picture goes, and write it."""
    logging.getLogger("aiodigest").addHandler(logging.NullHandler())  # the demo's failures are part of the show
    picture = Picture()
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        demo = asyncio.create_task(Demo(f"embedded://{folder}", picture.show).play())
        await picture.over.wait()
        demo.cancel()
        await asyncio.gather(demo, return_exceptions=True)
    svg = picture.export_svg(title="aiodigest demo", theme=MONOKAI, code_format=FORMAT, unique_id="demo")
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(draw())
