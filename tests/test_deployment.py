"""The how-to pages of deploying: their commands run, their probes are answered, their times fit an engine's."""

from __future__ import annotations

import inspect
import json
import shlex
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from pages import blocks_of
from ports import free_port
from userland import DEADLINE, ROOT, running

from aiodigest import DigestEngine

HOWTO = ROOT / "docs" / "howto"
LEAST = 5  # seconds that are left for reports after a drain
DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(DigestEngine).parameters.items()}


def blocks(page: str, language: str) -> list[str]:
    return [block.text for block in blocks_of(HOWTO / page) if block.language == language]


def unit() -> ConfigParser:
    [text] = blocks("run-as-a-service.md", "ini")
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]  (systemd's names have capitals)
    parser.read_string(text)
    return parser


def compose() -> Any:
    [text] = blocks("run-as-a-service.md", "yaml")
    return yaml.safe_load(text)["services"]["digests"]


def pod() -> Any:
    [text, _] = blocks("kubernetes-probes.md", "yaml")
    return yaml.safe_load(text)["spec"]["template"]["spec"]


def docker_command() -> list[str]:
    [dockerfile] = [text for text in blocks("run-as-a-service.md", "") if text.startswith("FROM ")]
    instructions = dict(line.split(" ", 1) for line in dockerfile.splitlines())
    assert list(instructions) == ["FROM", "RUN", "WORKDIR", "COPY", "USER", "CMD"]
    return json.loads(instructions["CMD"])


def test_systemd_docker_and_kubernetes_run_the_same_command() -> None:
    service = shlex.split(unit()["Service"]["ExecStart"])
    service[0] = Path(service[0]).name
    [container] = pod()["containers"]
    assert docker_command() == container["command"] == [word.replace("127.0.0.1:", ":") for word in service]
    port = {port["name"]: port["containerPort"] for port in container["ports"]}["http"]
    assert container["command"][-1] == f":{port}"
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {"http"}


def test_each_waits_for_longer_than_a_drain_before_it_kills() -> None:
    least = DEFAULTS["drain_timeout"] + LEAST
    assert int(unit()["Service"]["TimeoutStopSec"]) >= least
    assert int(compose()["stop_grace_period"].removesuffix("s")) >= least
    assert pod()["terminationGracePeriodSeconds"] >= least
    web = yaml.safe_load(blocks("kubernetes-probes.md", "yaml")[1])["command"]
    requests = int(web[web.index("--timeout-graceful-shutdown") + 1])
    assert pod()["terminationGracePeriodSeconds"] >= requests + least


def test_a_probe_waits_for_longer_than_its_answer_may_take() -> None:
    [container] = pod()["containers"]
    assert container["readinessProbe"]["timeoutSeconds"] > DEFAULTS["timeout"]


@pytest.mark.docs
async def test_the_service_answers_its_probes_and_ends_well_on_sigterm(data: Path) -> None:
    [app] = blocks("run-as-a-service.md", "python")
    (data / "app.py").write_text(app)
    [container] = pod()["containers"]
    port = free_port()
    command = [word if word != ":9000" else f"127.0.0.1:{port}" for word in docker_command()]
    assert command != docker_command()
    async with running(sys.executable, "-m", *command, data=data, folder=data) as program:
        await program.until("app:mail: delivering namespace service")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
            for probe in ("livenessProbe", "readinessProbe"):
                answer = await client.get(container[probe]["httpGet"]["path"])
                assert (answer.status_code, answer.json()["ok"]) == (200, True)
        assert await program.terminate() == 0
