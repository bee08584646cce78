"""What all channels have in common, those that need no library, routing; and an engine that enters its callback."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import re
import ssl
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest
import trustme
from engines import Inbox, adding, delivering, engine_on, forever, holding, virtual_time
from hypothesis import given
from hypothesis import strategies as st
from test_start import imported

import aiodigest.channels
from aiodigest import (
    JSON,
    ChannelError,
    ConfigurationError,
    Digest,
    DigestEngine,
    InvalidArgument,
    JSONCodec,
    PartialAdd,
    Record,
    Reject,
    RetryAfter,
    RetryPolicy,
)
from aiodigest.channels import SMTP, Channel, Console, File, Webhook, by_key, fan_out, local
from aiodigest.channels.common import BEGINNING, Secrets
from aiodigest.channels.local import as_json
from aiodigest.rendering import Message
from aiodigest.testing import TestEngine


def digest(key: str = "ann", *values: Any, **options: Any) -> Digest[Any]:
    when = datetime(2030, 1, 1, tzinfo=UTC)
    records = [Record(str(number), value, when) for number, value in enumerate(values or ("news",))]
    return Digest(key, records, **options)


class Watched(Channel):
    """A channel that notes what is done with it."""

    def __init__(self, *, broken: bool = False, reply: Callable[[Digest[Any]], Any] | None = None) -> None:
        self.events: list[str] = []
        self.broken = broken
        self.reply = reply

    async def __call__(self, digest: Digest[Any], /, to: str | None = None) -> None:
        self.events.append(digest.key if to is None else f"{digest.key} to {to}")
        if self.reply is not None:
            try:
                await self.reply(digest)
            finally:
                self.events.append("ended")

    async def _open(self) -> None:
        if self.broken:
            raise OSError("no such place")
        self.events.append("opened")

    async def aclose(self) -> None:
        self.events.append("closed")


# The engine


@virtual_time
async def test_an_engine_enters_its_callback_before_it_claims_and_leaves_it_after_the_last_call() -> None:
    class Looking(Watched):
        async def _open(self) -> None:
            assert not backend.calls
            await super()._open()

    backend, channel = await holding(1), Looking(reply=lambda _: asyncio.sleep(5))
    async with engine_on(backend).delivering(channel):
        await asyncio.sleep(1)
        assert channel.events == ["opened", "key"]
    assert channel.events == ["opened", "key", "ended", "closed"]


@virtual_time
async def test_a_callback_that_cannot_be_entered_is_told_before_anything_is_claimed() -> None:
    backend = await holding(1)
    engine = engine_on(backend)
    with pytest.raises(OSError, match="no such place"):
        await engine.run(Watched(broken=True))
    assert not backend.calls
    assert not engine.is_entered


@virtual_time
async def test_a_callback_is_left_as_well_when_the_engine_cannot_be_entered() -> None:
    channel = Watched()
    engine = engine_on(await holding(1))
    async with engine:
        with pytest.raises(ConfigurationError, match="entered already"):
            async with engine.delivering(channel):
                pass
    assert channel.events == ["opened", "closed"]


@virtual_time
async def test_a_callback_is_left_after_its_last_call_when_who_delivers_is_cancelled() -> None:
    backend, channel = await holding(1), Watched(reply=forever)
    engine = engine_on(backend, drain_timeout=1)

    async def deliver() -> None:
        async with engine.delivering(channel):
            await asyncio.Event().wait()

    delivering = asyncio.create_task(deliver())
    await asyncio.sleep(1)
    delivering.cancel()
    await asyncio.wait([delivering])
    assert delivering.cancelled()
    assert channel.events == ["opened", "key", "ended", "closed"]


@virtual_time
async def test_a_callback_is_left_although_a_scope_of_anyio_is_cancelled() -> None:
    from anyio import CancelScope

    class Slow(Watched):
        async def aclose(self) -> None:
            await asyncio.sleep(1)
            await super().aclose()

    channel = Slow()
    with CancelScope() as scope:
        async with engine_on(await holding(1)).delivering(channel):
            scope.cancel()
            await asyncio.sleep(1)
    assert channel.events[-1] == "closed"


@virtual_time
async def test_no_callback_swallows_the_error_with_which_it_is_left() -> None:
    class Swallows(Watched):
        async def __aexit__(self, *raised: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
            self.events.append(repr(raised[1]))
            return True

    channel = Swallows()
    with pytest.raises(ZeroDivisionError):
        async with engine_on(await holding()).delivering(channel):
            raise ZeroDivisionError
    assert channel.events[-1] == "ZeroDivisionError()"


@virtual_time
async def test_two_engines_may_share_a_channel_which_is_open_until_both_are_left() -> None:
    channel = Watched()
    async with engine_on(await holding()).delivering(channel):
        async with engine_on(await holding()).delivering(channel):
            pass
        assert channel.events == ["opened"]
    assert channel.events == ["opened", "closed"]


async def test_a_test_engine_enters_the_callback_and_an_app_under_test_does_not_do_it_again() -> None:
    class Once:
        """No channel, and not to be entered twice."""

        entered, left, delivered = 0, 0, 0

        async def __aenter__(self) -> Self:
            self.entered += 1
            return self

        async def __aexit__(self, *raised: object) -> None:
            self.left += 1

        async def __call__(self, digest: Digest[JSON]) -> None:
            assert (self.entered, self.left) == (1, 0)
            self.delivered += 1

    for within in (True, False):
        once = Once()
        engine = DigestEngine[JSON](namespace="test")
        engine.deliver(once)
        async with TestEngine(engine) as t:
            async with AsyncExitStack() as stack:
                if within:
                    await stack.enter_async_context(engine.delivering())
                await engine.add("key", 1)
                await t.advance()
            assert (once.entered, once.left, once.delivered) == (1, 0, 1)
        assert once.left == 1


async def test_a_callback_that_a_test_engine_cannot_enter_ends_the_test() -> None:
    engine = DigestEngine[JSON](namespace="test")
    engine.deliver(Watched(broken=True))
    with pytest.raises(OSError, match="no such place"):
        await TestEngine(engine).__aenter__()
    assert not engine.is_entered


@virtual_time
async def test_a_channel_error_is_told_as_it_is_and_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    inbox = Inbox(ChannelError("mail.example:25, connecting: refused"))
    async with delivering(inbox, await holding(1), retry=RetryPolicy(backoff=lambda _: 5)):
        assert (await inbox.outcome()).reason == "mail.example:25, connecting: refused"
    assert not [line for line in caplog.records if line.exc_info]


# Secrets


@given(
    secret=st.text("ab ", min_size=1, max_size=30).filter(str.strip),
    before=st.integers(BEGINNING - 40, BEGINNING + 5),
)
def test_no_secret_is_shown_in_part_where_a_text_is_cut(secret: str, before: int) -> None:
    assert Secrets([secret]).one_line(" " * before + secret) in ("***", "")


def test_what_is_no_secret_is_hidden_only_if_it_is_long_enough() -> None:
    secrets = Secrets(["no"], ["v1", "", "hook", "t%C3%B6ken"])
    assert secrets.one_line("NO v1/hook: töken, t%C3%B6ken, aG9vaw==\nbm8=") == "*** v1/***: ***, ***, ***== ***"


# TLS


def channels_over_tls() -> list[Any]:
    return [SMTP("mail.example", sender="a@mail.example"), Webhook("https://hooks.example/", secrets=None)]


def test_what_ssl_cert_file_names_is_trusted_in_place_of_the_systems_authorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    smtp, webhook = channels_over_tls()
    for context in (smtp._options.context, webhook._settings[2]):
        assert len(context.get_ca_certs()) == 1
        assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(("content", "told"), [(None, "No such file"), ("no certificate", "")])
def test_a_file_of_authorities_that_cannot_be_read_is_refused_when_a_channel_is_made(
    content: str | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with pytest.raises(ConfigurationError, match=rf"SSL_CERT_FILE: {re.escape(str(path))}: {told}"):
        channels_over_tls()


# Imports


def test_nothing_of_a_channel_is_imported_before_it_is_asked_for() -> None:
    assert not imported("import sys, aiodigest") & {"aiodigest.channels", "aiodigest.rendering"}
    modules = imported("import sys, aiodigest.channels\nfrom aiodigest.channels import by_key, Console")
    assert "aiodigest.channels.local" in modules
    assert not modules & {"aiodigest.channels.smtp", "aiosmtplib", "jinja2", "httpx2", "apprise"}


@pytest.mark.parametrize("name", aiodigest.channels.__all__)
def test_every_name_is_there(name: str) -> None:
    assert callable(getattr(aiodigest.channels, name))


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Fax'"):
        _ = aiodigest.channels.Fax


# Console and File


async def test_the_console_shows_subject_and_text_and_nothing_controls_the_terminal() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    console = Console(file, render=lambda digest: Message("New\x1b[2J\ns", "one ü\n\u202etwo \ud800\n"))
    await console(digest())
    file.seek(0)
    assert file.read() == "ann: New\\x1b[2J\\ns\n  one \\xfc\n  \\u202etwo \\ud800\n\n"


async def test_the_console_is_the_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    await Console(render=lambda digest: Message("News", "one\n"))(digest())
    assert capsys.readouterr().out == "ann: News\n  one\n\n"


async def test_the_console_tells_whose_digest_it_is_once(capsys: pytest.CaptureFixture[str]) -> None:
    await Console(render=lambda digest: Message("ann: News", "one\n"))(digest())
    assert capsys.readouterr().out == "ann: News\n  one\n\n"


@pytest.mark.parametrize("render", ["x", 7, Message])
def test_what_cannot_render_is_refused_when_the_channel_is_made(render: Any) -> None:
    with pytest.raises(InvalidArgument, match="render must be a function from a digest to a Message"):
        Console(render=render)


async def test_a_file_gets_a_line_of_json_for_each_digest_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "digests.jsonl"
    values = ["ü\u2028\ud800", {"a": [1, None, float("inf")]}, datetime(2030, 1, 1, tzinfo=UTC), b"\xff", object()]
    async with File(path) as file:
        await asyncio.gather(*(file(digest(f"key{number}", *values, id=f"d{number}")) for number in range(20)))
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert {line["key"] for line in lines} == {f"key{number}" for number in range(20)}
    [first] = [line for line in lines if line["key"] == "key0"]
    assert (first["id"], first["attempt"], first["iteration"], first["dropped"]) == ("d0", 1, 1, 0)
    assert [record["value"] for record in first["records"]][:2] == [values[0], {"a": [1, None, "Infinity"]}]
    assert first["records"][0] == {"id": "0", "timestamp": "2030-01-01T00:00:00Z", "value": values[0]}


async def test_a_line_that_was_cut_short_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "digests.jsonl"
    path.write_text('{"id": "cut sho')
    await File(path)(digest(id="d1"))
    assert [line[:10] for line in path.read_text().splitlines()] == ['{"id": "cu', '{"id":"d1"']


async def test_a_file_that_cannot_be_written_is_told_when_it_is_entered(tmp_path: Path) -> None:
    engine = DigestEngine[JSON](namespace="test")
    with pytest.raises(OSError, match="digests"):
        async with engine.delivering(File(tmp_path / "nowhere" / "digests")):
            pass
    assert not engine.is_entered


def test_the_console_and_a_file_serve_one_event_loop_after_another(tmp_path: Path) -> None:
    console, file = Console(io.StringIO(), render=lambda digest: Message("News", "one\n")), File(tmp_path / "digests")

    async def many() -> None:
        await asyncio.gather(*(channel(digest()) for channel in (console, file) for _ in range(5)))

    for _ in range(2):
        asyncio.run(many())
    assert len((tmp_path / "digests").read_text().splitlines()) == 10


def test_processes_that_append_to_one_file_leave_lines_of_json_alone(tmp_path: Path) -> None:
    program = dedent("""
        import asyncio, sys
        from datetime import UTC, datetime
        from aiodigest import Digest, Record
        from aiodigest.channels import File

        async def main():
            file, record = File(sys.argv[1]), Record("1", "v" * 400_000, datetime.now(UTC))
            for number in range(40):
                await file(Digest("ann", [record]))

        asyncio.run(main())
    """)
    path = tmp_path / "digests.jsonl"
    several = [subprocess.Popen([sys.executable, "-c", program, str(path)]) for _ in range(3)]
    assert [each.wait(120) for each in several] == [0, 0, 0]
    assert {json.loads(line)["key"] for line in path.read_bytes().splitlines()} == {"ann"}
    assert len(path.read_bytes().splitlines()) == 120


async def test_a_file_that_another_process_holds_for_long_is_tried_again_without_a_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PATIENCE", 0.05)
    path = tmp_path / "digests.jsonl"
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RetryAfter):
            await File(path)(digest())
    await File(path)(digest())
    assert len(path.read_bytes().splitlines()) == 1


async def test_the_name_of_a_new_file_is_on_the_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def watched(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)
    file = File(tmp_path / "digests.jsonl")
    for _ in range(2):
        await file(digest())
    assert synced == [str(tmp_path / "digests.jsonl"), str(tmp_path), str(tmp_path / "digests.jsonl")]


@pytest.mark.parametrize("name", ["/dev/null", "pipe"])
async def test_what_is_no_regular_file_is_refused_when_it_is_entered(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        await File(tmp_path / name).__aenter__()


class Mute:
    """A value that has no words."""

    def __str__(self) -> str:
        raise ValueError("no")


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        Mute(), {Mute(): 1}, deque([Mute()]), {10**5000: 1}, {b"\xff": 1}, {"\ud800": {"\udfff": 1}}, deque(["\ud800"]),
        Counter({"\ud800": 1}), {1: {"\ud800"}}, 10**5000, {10**5000}, deep(252), deep(2_000), deque([deep(300)]),
        {"a": deque([{"\ud800": 1}])},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_value_makes_a_line_of_json(value: Any) -> None:
    found = json.loads(as_json(digest("ann", value)))
    assert found["records"][0]["value"] is not None


# Routing


async def test_a_table_of_prefixes_leads_each_key_to_its_channel_and_the_longest_counts() -> None:
    mail, chat, rest = Watched(), Watched(), Watched()
    channel = by_key({"user:": mail, "user:ops:": (chat, "#ops"), "": rest})
    async with channel:
        for key in ("user:ann", "user:ops:1", "other"):
            await channel(digest(key))
    assert mail.events == ["opened", "user:ann", "closed"]
    assert chat.events == ["opened", "user:ops:1 to #ops", "closed"]
    assert rest.events == ["opened", "other", "closed"]


async def test_a_function_leads_each_key_to_a_channel_and_an_address() -> None:
    mail, sent = Watched(), list[str]()

    async def plain(digest: Digest[Any]) -> None:
        sent.append(digest.key)

    channel = by_key(lambda key: None if key == "x" else plain if key == "p" else (mail, f"{key}@x.example"))
    async with channel:
        await channel(digest("ann"))
        await channel(digest("bob"))
        await channel(digest("p"))
        with pytest.raises(Reject, match="no route for 'x'"):
            await channel(digest("x"))
    assert mail.events == ["opened", "ann to ann@x.example", "bob to bob@x.example", "closed"]
    assert sent == ["p"]


async def test_a_route_that_cannot_be_opened_closes_those_before_it() -> None:
    mail = Watched()
    with pytest.raises(OSError, match="no such place"):
        await by_key({"a": mail, "b": Watched(broken=True)}).__aenter__()
    assert mail.events == ["opened", "closed"]


async def test_no_digest_comes_before_its_channel_is_entered() -> None:
    class Slow(Watched):
        async def _open(self) -> None:
            await asyncio.sleep(0)
            await super()._open()

    slow = Slow()
    async with by_key(lambda key: slow) as channel:
        await asyncio.gather(*(channel(digest(key)) for key in ("a", "b")))
    assert slow.events == ["opened", "a", "b", "closed"]


NOWHERE = [None, (), ("b", "c"), (Watched(),), (Watched(), 5), (Watched(), "c", "d"), (Console(), "c")]


@pytest.mark.parametrize("routes", [{1: Watched()}, *({"a": route} for route in NOWHERE)])
def test_a_table_that_leads_nowhere_is_refused(routes: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"(what routes lead to|a prefix of routes) must be"):
        by_key(routes)


async def test_a_function_that_leads_nowhere_is_told_so() -> None:
    def wrong(key: str) -> Any:
        return Console(), "c"

    with pytest.raises(InvalidArgument, match="what routes lead to must be a channel, or a pair"):
        await by_key(wrong)(digest())


@pytest.mark.parametrize("routes", [{}, 7, None, Watched])
def test_what_is_no_table_or_an_empty_one_is_refused(routes: Any) -> None:
    with pytest.raises(InvalidArgument, match="routes must be a table"):
        by_key(routes)


class Counting(JSONCodec[JSON]):
    encoded = 0

    def encode(self, value: JSON, /) -> bytes:
        self.encoded += 1
        return super().encode(value)


@virtual_time
async def test_a_record_for_many_is_encoded_once_and_acknowledged_for_each() -> None:
    codec = Counting()
    people = [f"user:{number}" for number in range(2_500)]
    async with adding(codec=codec) as (engine, _):
        assert await fan_out(engine, iter(people), {"text": "hello"}, timestamp=1e9) == [True] * len(people)
        assert codec.encoded == 1
        first, last = await engine.peek(people[0]), await engine.peek(people[-1])
        assert first is not None
        assert last is not None
        assert first.records == last.records
        assert first.records[0].value == {"text": "hello"}
        assert await fan_out(engine, people[:2], "x", record_id="r1", urgent=True) == [False, False]


@virtual_time
async def test_equal_values_that_are_not_the_same_are_encoded_each() -> None:
    async with adding() as (engine, _):
        values: list[JSON] = [[1], [True], [1.0]]
        await engine.add_many(aiodigest.Entry("key", value, str(number)) for number, value in enumerate(values))
        timeline = await engine.peek("key")
        assert timeline is not None
        assert [repr(record.value) for record in timeline.records] == ["[1]", "[True]", "[1.0]"]


@virtual_time
async def test_a_single_key_is_no_list_of_receivers_and_a_bad_key_fails_alone() -> None:
    async with adding() as (engine, _):
        for nothing in (None, 5):
            with pytest.raises(InvalidArgument, match="keys must be several"):
                await fan_out(engine, nothing, 1)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"engine\.add"):
            await fan_out(engine, "ann", 1)
        with pytest.raises(PartialAdd) as error:
            await fan_out(engine, ["ann", "", "bob"], 1)
        assert [type(result) for result in error.value.results] == [bool, InvalidArgument, bool]
