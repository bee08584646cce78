"""What a process imports before it needs it makes it slow to start: here is what it must not.

The list and not the clock is tested, so that the speed of the machine plays no part; `benchmarks/importing.py` has the
times.
"""

import re
import subprocess
import sys

from servers import Server

HEAVY = {
    "pydantic.type_adapter", "pydantic.main",  # for other values than plain JSON, and to say what is wrong with one
    "anyio",  # only if the program itself uses it
    "aiodigest.records.roundtrip", "aiodigest.scheduler", "aiodigest.testing", "aiodigest.worker.contents",
    "aiodigest.worker.delivery", "aiodigest.worker.shard", "aiodigest.backends.embedded.server",
    "aiodigest.backends.memory.backend", "aiodigest.backends.redis.diagnostics.server", "aiodigest.integrations",
    "platformdirs", "rich.console", "rich.markup", "rich.text", "starlette", "uvicorn", "uvloop", "zoneinfo",
    "aiodigest.timing.calendar", "aiodigest.timing.hours", "cronsim", "aiodigest.channels", "aiodigest.rendering",
    "aiosmtplib", "jinja2", "babel", "httpx2", "standardwebhooks", "apprise",
}  # fmt: skip
STORE = {"redis", "hiredis", "opentelemetry", "pydantic", "aiodigest.backends.redis.scripts"}  # comes with an engine
ADD = """
import asyncio, sys
from aiodigest import DigestEngine

async def main():
    async with DigestEngine(sys.argv[1], namespace="start") as engine:
        await engine.add("key", {"a": [1, 2.5, None, "text"]})

asyncio.run(main())
"""
HELP = """
import sys
from aiodigest.__main__ import main

sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit as end:
    assert not end.code
"""


def imported(program: str, *arguments: str) -> set[str]:
    """Return the modules that a program has imported at its end."""
    program += "\nprint('\\n', *sys.modules, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines())


def test_importing_aiodigest_imports_no_client_no_schemas_and_no_worker() -> None:
    modules = imported("import sys, aiodigest")
    assert "aiodigest.engine" in modules
    assert not modules & (HEAVY | STORE | {"typer", "rich"})


def test_help_imports_no_channel() -> None:
    program = "import sys\nfrom aiodigest.cli.app import run\nsys.argv = ['aiodigest', 'pipe', '--help']\nrun()"
    modules = imported(program)
    assert "aiodigest.cli.destinations" in modules
    assert not {name for name in modules if re.match(r"aiodigest\.(channels|rendering)|jinja2|aiosmtplib|httpx2", name)}


def test_a_plain_message_needs_no_library_for_templates() -> None:
    modules = imported(
        "import sys\nfrom aiodigest import Digest\nfrom aiodigest.rendering import plain\nplain(Digest('key', []))"
    )
    assert "aiodigest.rendering.view" in modules
    assert not modules & {"jinja2", "babel", "redis", "pydantic", "aiodigest.rendering.template"}


def test_the_first_add_of_a_process_imports_neither_what_delivers_nor_what_builds_schemas(server: Server) -> None:
    modules = imported(ADD, server.url)
    assert "aiodigest.backends.redis.backend" in modules
    assert not modules & (HEAVY | {"typer", "rich", "pydantic"})


def test_the_help_of_the_command_line_imports_no_client_and_nothing_that_renders() -> None:
    modules = imported(HELP)
    assert "aiodigest.cli.app" in modules
    assert not modules & (HEAVY | STORE)


def test_a_channel_imports_its_own_library_alone_and_when_it_is_made() -> None:
    libraries = {"aiosmtplib", "httpx2", "httpcore2", "standardwebhooks", "apprise"}
    named = imported("import sys; from aiodigest.channels import SMTP, Apprise, Slack, Webhook")
    assert "aiodigest.channels.webhook" in named
    assert not named & libraries
    made = imported("import sys; from aiodigest.channels import Slack; Slack('https://hooks.example/')")
    assert made & libraries == {"httpx2", "httpcore2"}
