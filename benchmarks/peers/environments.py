"""The peers: what each needs, and how its program is run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """A queue of jobs; ``acknowledges`` says that a job which a worker was lost with is done again."""

    name: str
    program: str
    requirements: tuple[str, ...]
    acknowledges: bool


PEERS: Sequence[Peer] = (
    Peer("arq", "with_arq.py", ("arq>=0.26", "hiredis>=3"), acknowledges=True),
    Peer("saq", "with_saq.py", ("saq[redis]>=0.24", "typing-extensions>=4", "hiredis>=3"), acknowledges=True),
    Peer("streaq", "with_streaq.py", ("streaq>=6",), acknowledges=True),
    Peer("taskiq", "with_taskiq.py", ("taskiq>=0.11", "taskiq-redis>=1", "hiredis>=3"), acknowledges=False),
)


def prepare(peer: Peer, folder: Path) -> Path:
    """The Python of a peer's environment, which is made if it is not there or has other requirements."""
    place = folder / peer.name
    python, stamp = place / "bin" / "python", place / "requirements.txt"
    wanted = "\n".join(peer.requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {peer.name} into {place} ...", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *peer.requirements]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)
    return python.absolute()


async def run(peer: Peer, python: Path, *arguments: object, timeout: float = 120) -> dict[str, Any]:
    """What the peer's program prints."""
    command = [python, HERE / peer.program, *map(str, arguments)]
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(timeout):
            out, problems = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise SystemExit(f"{peer.name} took longer than {timeout:g} s for {arguments[0]}") from None
    if process.returncode:
        raise SystemExit(f"{peer.name} has failed:\n{problems.decode(errors='replace')[-2000:]}")
    return json.loads(out.splitlines()[-1])
