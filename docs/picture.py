"""Play ``aiodigest demo``, and draw its first seconds for the README: ``make picture``.

The picture is what the demo shows, in an SVG that asks nobody for fonts; of a burst only the first and last events.
"""

from __future__ import annotations

import asyncio
import logging
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from aiodigest.cli.demo import Demo
from aiodigest.cli.demo_stages import Screen

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


class Picture(Screen):
    """The demo's display for people, with long bursts cut short, up to the digest of the great one."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        super().__init__(self.over.set)
        self._screen = self.console = Console(record=True, width=WIDTH, file=StringIO(), highlight=False)
        self._burst = 0

    def begin(self) -> None:
        """Show the command."""
        self.console.print(Text("$ aiodigest demo", "bold"))

    def remark(self, at: float, text: str) -> None:
        """Show a remark, until the story turns to something else."""
        if not text.startswith("The shop"):
            super().remark(at, text)

    def event(self, at: float, channel: str, text: str) -> None:
        """Show the first events of a burst."""
        self._burst += 1
        if channel != "#shop" and self._burst <= SHOWN:
            super().event(at, channel, text)

    def failure(self, at: float, channel: str, attempt: int) -> None:
        """Show no failure."""

    def digest(self, at: float, channel: str, texts: list[str]) -> None:
        """Show a digest; the one of the great burst is the last."""
        if self._burst > SHOWN and channel != "#shop":
            self.console.print(Text(f"                 ... {self._burst - SHOWN} more events", "dim"))
        self._burst = 0
        super().digest(at, channel, texts)
        if len(texts) > 40:
            self.over.set()


async def draw() -> None:
    """Play the demo as far as the picture goes, and write it."""
    logging.getLogger("aiodigest").addHandler(logging.NullHandler())  # the demo's failures are part of the show
    picture = Picture()
    with TemporaryDirectory(prefix="aiodigest-demo-") as folder:
        demo = asyncio.create_task(Demo(f"embedded://{folder}", picture).play())
        await picture.over.wait()
        demo.cancel()
        await asyncio.gather(demo, return_exceptions=True)
    svg = picture.console.export_svg(title="aiodigest demo", theme=MONOKAI, code_format=FORMAT, unique_id="demo")
    PICTURE.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(draw())
