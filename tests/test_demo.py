"""``aiodigest demo``, from its first line to its last."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from commandline import Running, no_process_is_left, running

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def demo(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running, None, None]:
    """A demo that is left alone; it takes its time, and so plays while the others are disturbed."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        with running(folder, "demo") as demo:
            yield demo


@pytest.mark.parametrize("way", ["ctrl-c", "closed"])
def test_a_demo_that_is_left_leaves_nothing(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(tmp_path / "unused", "demo", read=way == "ctrl-c") as demo:
        if way == "ctrl-c":
            while b"DIGEST" not in demo.read_line():
                pass
            assert demo.interrupt() == 130
        else:
            assert demo.process.stdout is not None
            demo.process.stdout.readline()
            demo.process.stdout.close()
            assert demo.end() == 1
    assert demo.errors == b""
    assert list(tmp_path.iterdir()) == []
    assert no_process_is_left(tmp_path)


def test_the_demo_shows_a_burst_as_one_digest_and_a_receiver_that_recovers_and_leaves_nothing(demo: Running) -> None:
    assert demo.end() == 0
    assert demo.errors == b""
    text = demo.output.decode()
    assert re.search(r"event  #builds   build 4711 .*\n.*DIGEST #builds   1 event\n", text)
    assert re.search(r"DIGEST #on-call  \d\d events", text)
    assert text.count("FAILED #shop") == 2
    assert "DIGEST #shop" in text.partition("FAILED #shop")[2]
    numbers = re.search(
        r"records in +(\d+)\n +digests out +(\d+), with (\d+) records\n"
        r" +deliveries failed +2, and 1 digest delivered by a retry\n +lateness +median \d+ ms, worst \d+ ms\n",
        text,
    )
    assert numbers is not None
    added, digests, delivered = map(int, numbers.groups())
    assert added == delivered > 60
    assert digests < 12
    assert "\x1b" not in text
    folder = demo.data
    assert list(folder.iterdir()) == []
    assert no_process_is_left(folder)


def test_in_json_what_happens_is_an_object_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(tmp_path / "unused", "demo", "--json") as demo:
        told = [json.loads(demo.read_line()) for _ in range(3)]
        assert demo.interrupt() == 130
    assert [one["what"] for one in told] == ["remark", "event", "digest"]
    assert told[2]["channel"] == "#builds"
    assert told[2]["texts"] == [told[1]["text"]]
    assert 0 < told[1]["at"] <= told[2]["at"]
