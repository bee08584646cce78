"""``Slack``, ``Discord``, ``Teams``, ``Ntfy`` and ``Apprise``: what they send, and what answers mean to them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from eventloops import Clock, clock
from hypothesis import given, settings
from hypothesis import strategies as st
from test_webhook import outcome
from webservers import DIE, HANG, Reply, Request, Script, Site, at, status, web_server

from aiodigest import (
    JSON,
    ChannelError,
    ConfigurationError,
    Digest,
    InvalidArgument,
    OutcomeUnknown,
    Record,
    Reject,
    RetryAfter,
)
from aiodigest.channels import Apprise, Discord, Ntfy, Slack, Teams
from aiodigest.channels._posting import as_body
from aiodigest.channels.apprise import MOST, secrets_of
from aiodigest.channels.chat import _read, fitting, units
from aiodigest.rendering import Block, Message, plain

__all__ = ["clock"]

pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # which Apprise imports

Chat = type[Slack] | type[Discord] | type[Teams] | type[Ntfy]
SERVICES: list[Chat] = [Slack, Discord, Teams, Ntfy]
TOKEN = "s3cret-t0ken"
HOSTILE = [
    "<!channel> <@U123> <#C1> & &lt; @everyone @here <@&1> <t:0>",
    "**b** *i* __u__ ~~s~~ `c` ```x``` ||s|| [a](https://evil.example) <https://x|y>",
    "a :smile: 1:2:3 ## no\n## head\n>>> all\n  > quote\n# head\n> quote\n- one\n+ two\n1. three\n-# small",
    "-",
    "1.\n+\u2003one\n-\xa0two",
    "\\*a\\\\*b\\",
    "{{DATE(2017-02-14T06:08:39Z, SHORT)}} <at>ann</at> ${x} {{7*7}} {% raw %}",
    "\x00\x07\x1b[31m\u202eright\u2066 to left\u2028\u2029\x85",
    "lone \ud800 surrogates \udfff",
    "x" * 1_000_000,
    "👩‍👩‍👧" * 5_000,
    "&" * 5_000,
    '"\\' * 5_000,
    "_*" * 5_000,
    "\n" * 5_000,
    "a\n" * 5_000,
    "漢" * 20_000,
    "",
    " ",
]


def digest(value: JSON = "news", key: str = "ann", **options: Any) -> Digest[JSON]:
    return Digest(key, [Record("1", value, datetime(2030, 1, 1, tzinfo=UTC))], **options)


def saying(subject: str, *blocks: Block, text: str = "") -> Callable[[Digest[Any]], Message]:
    return lambda digest: Message(subject, text, None, blocks)


def channel(kind: Chat, server: Site, **options: Any) -> Any:
    given: dict[str, Any] = {"allow_private": True, **options}
    return kind(f"{server.url}/{TOKEN}", **given)


def made(kind: Chat, message: Message, name: str = "d-1") -> Any:
    """What a service gets."""
    service: Any = kind("https://chat.example/topic", render=plain)
    _, contents = service._contents(service._url, *_read(message), name)
    return read(kind, as_body(contents))


def read(kind: Chat, body: bytes) -> Any:
    """Read what a service gets as the service does."""
    assert len(body) < 28_000 or kind is not Teams
    return json.loads(body.decode())


def several(count: int, text: str = "item", details: str = "") -> Message:
    return Message("Many", "", None, [Block("item", f"{text} {number}", details) for number in range(count)])


# How each service takes it, and what it would refuse


def check_slack(message: dict[str, Any]) -> list[str]:
    """Return the texts of a message for Slack, whose limits it keeps."""
    assert set(message) == {"text", "mrkdwn", "blocks"}
    assert message["mrkdwn"] is False  # what is shown where blocks are not has no markup either
    assert 1 <= len(message["text"]) <= 4_000
    assert len(message["blocks"]) <= 50
    texts: list[tuple[str, int]] = []
    for block in message["blocks"]:
        if block["type"] == "context":
            assert 1 <= len(block["elements"]) <= 10
            texts += [(each, 3_000) for each in block["elements"]]
        else:
            texts.append((block["text"], {"header": 150, "section": 3_000}[block["type"]]))
    for text, most in texts:
        each = cast("Any", text)
        assert (each["type"], each["emoji"]) == ("plain_text", False)
        assert 1 <= units(each["text"]) <= most
    found = [message["text"], *(cast("Any", text)["text"] for text, _ in texts)]
    for each in found:
        assert not re.search(r"[<>]|&(?!(?:amp|lt|gt);)", each)
    return found


def check_discord(message: dict[str, Any]) -> list[str]:
    assert message["allowed_mentions"] == {"parse": []}
    assert 1 <= units(message["content"]) <= 2_000
    assert len(message["embeds"]) <= 1
    found = [message["content"], *(each["description"] for each in message["embeds"])]
    assert all(1 <= units(each) <= 4_096 for each in found)
    for each in found:
        text = re.sub(r"(?m)^\*\*(.*)\*\*$", r"\1", each)  # which is ours
        left = re.sub(r"https?://[\w./?=&%#+-]+|\\[^0-9A-Za-z\s]", "!", text, flags=re.ASCII)
        assert not re.search(r"[][\\*_~`|<]|@(?:everyone|here)|:\w+:", left, re.ASCII), left
        assert not re.search(r"(?m)^ *(?:[+-]\s|\d+\.\s|-?#|>)", left), left
    return found


def check_teams(message: dict[str, Any]) -> list[str]:
    [attachment] = message["attachments"]
    card = attachment["content"]
    assert (message["type"], card["type"]) == ("message", "AdaptiveCard")
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    found: list[str] = []
    for row in card["body"]:
        assert row["type"] == "RichTextBlock"  # which knows no markup
        [run] = row["inlines"]
        assert run["type"] == "TextRun"
        assert "\n" not in run["text"]
        assert "{{DATE" not in run["text"]  # which would become a date
        found.append(run["text"])
    assert all(each.strip() for each in found)
    assert len(json.dumps(message, ensure_ascii=False).encode("utf-16-le")) < 28_000 * 1.3  # with our own spaces
    return [card["fallbackText"], *found]


def check_ntfy(message: dict[str, Any]) -> list[str]:
    assert message["topic"] == "topic"
    assert 1 <= len(message["title"]) <= 200
    assert 1 <= len(message["message"].encode()) <= 4_096
    assert len(json.dumps(message, ensure_ascii=False).encode()) < 8_192
    assert "markdown" not in message
    return [message["title"], message["message"]]


CHECKS: dict[Chat, Callable[[dict[str, Any]], list[str]]] = {
    Slack: check_slack, Discord: check_discord, Teams: check_teams, Ntfy: check_ntfy,
}  # fmt: skip


def check(kind: Chat, message: Message) -> str:
    """Return all that a service shows of a message: well-formed, bounded and inert."""
    return inspected(kind, made(kind, message))


def inspected(kind: Chat, contents: dict[str, Any]) -> str:
    texts = CHECKS[kind](contents)
    shown = "\n".join(texts)
    assert not re.search("[\0-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    return shown


LETTERS = st.one_of(st.characters(), st.sampled_from("<>&@*_~`|[]()#\\\n-+.: \u202e\ud800"))
TEXTS = st.one_of(
    st.sampled_from(HOSTILE), st.text(LETTERS, max_size=100), st.lists(st.sampled_from(HOSTILE[:7])).map("".join)
)
BLOCKS = st.lists(st.builds(Block, st.sampled_from(["heading", "item", "note"]), TEXTS, TEXTS), max_size=80)


@pytest.mark.parametrize("kind", SERVICES)
@given(subject=TEXTS, text=TEXTS, blocks=BLOCKS)
@settings(deadline=None)
def test_any_message_is_well_formed_bounded_and_inert(kind: Chat, subject: str, text: str, blocks: list[Block]) -> None:
    check(kind, Message(subject, text, None, blocks))


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_in_each_place_are_well_formed_bounded_and_inert(kind: Chat, text: str) -> None:
    check(kind, Message(text, text))
    for block in ("heading", "item", "note"):
        check(kind, Message("s", "", None, [Block(block, text, text)] * 60))


@pytest.mark.parametrize("kind", SERVICES)
def test_hostile_values_as_they_are_shown_by_default_are_well_formed_bounded_and_inert(kind: Chat) -> None:
    for values in [*([text] for text in HOSTILE), HOSTILE, [{text[:50]: text} for text in HOSTILE]]:
        records = [Record(f"{n}\ud800", cast("JSON", value), datetime.now(UTC)) for n, value in enumerate(values)]
        check(kind, plain(Digest("<!here>\u202e", records)))


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize("count", [1, 20, 49, 50, 51, 1_000])
@pytest.mark.parametrize("details", ["", "more of it"])
def test_what_does_not_fit_is_counted(kind: Chat, count: int, details: str) -> None:
    shown = check(kind, several(count, details=details))
    items = len(re.findall(r"item \d+", shown))
    more = re.search(r"and (\d+) more$", shown)
    assert items + (int(more[1]) if more else 0) == count
    assert more is not None or items == count
    assert items >= min(count, 20)


def test_items_are_kept_while_they_fit_and_the_note_fits_too() -> None:
    blocks = [Block("item", "x" * 10)] * 10
    for most in range(12, 120):
        found = fitting(blocks, lambda block: [block.text], len, most)
        assert sum(map(len, found)) <= most
        assert len(found) == 10 or found[-1] == f"and {11 - len(found)} more"
    assert len(fitting(blocks, lambda block: [block.text] * 2, len, 1_000, 9)) <= 9


def test_slack_gets_blocks_of_plain_text_and_a_text_for_notifications() -> None:
    blocks = [Block("heading", "3 <news>", "since noon"), Block("item", "one & two", "by ann"), Block("note", "end")]
    message = made(Slack, Message("3 <news>", "", None, blocks))
    plain = [
        ("header", "3 &lt;news&gt;"),
        ("context", "since noon"),
        ("section", "one &amp; two\nby ann"),
        ("context", "end"),
    ]
    found = [(each["type"], (each.get("text") or each["elements"][0])["text"]) for each in message["blocks"]]
    assert found == plain
    assert message["text"] == "3 &lt;news&gt;"


def test_discord_gets_escaped_lines_below_the_subject_and_links_can_be_clicked() -> None:
    link = "https://a.example/b_c?d=e_f#g"
    item = Block("item", f"*one* {link}", "- by ann@a.b, 10:00 (#7)")
    blocks = [Block("heading", "News"), item, Block("note", "1. end")]
    message = made(Discord, Message("News", "", None, blocks))
    assert message["content"] == "**News**"
    assert message["embeds"] == [{"description": f"• \\*one\\* {link}\n\\- by ann@a.b, 10:00 (#7)\n1\\. end"}]


def test_teams_get_a_card_in_which_nothing_is_markup() -> None:
    blocks = [Block("heading", "*News*"), Block("item", "[a](b)\nc", "d"), Block("note", "end")]
    card = made(Teams, Message("*News*", "", None, blocks))["attachments"][0]["content"]
    assert [row["inlines"][0]["text"] for row in card["body"]] == ["*News*", "[a](b)", "c", "d", "end"]
    assert card["body"][0]["inlines"][0]["weight"] == "Bolder"
    assert card["fallbackText"] == "*News*"


def test_ntfy_gets_a_title_and_lines_for_a_topic_and_a_repeat_replaces_them() -> None:
    blocks = [Block("heading", "Grüße", "two"), Block("item", "one"), Block("item", "two", "by ann")]
    found = made(Ntfy, Message("Grüße", "", None, blocks))
    expected = {"topic": "topic", "title": "Grüße", "message": "two\n• one\n• two\nby ann", "sequence_id": "d-1"}
    assert found == expected
    assert "sequence_id" not in made(Ntfy, Message("s", "t"), "no name")


def test_a_message_without_blocks_is_sent_line_by_line() -> None:
    assert check(Ntfy, Message("News", "one\n\ntwo\n")) == "News\n• one\n• two"
    assert check(Slack, Message("News", "one\n")) == "News\nNews\none"


# Over HTTP


@pytest.mark.parametrize("kind", SERVICES)
async def test_each_digest_is_one_post_of_json(kind: Chat) -> None:
    async with web_server() as server, channel(kind, server, render=saying("News")) as chat:
        await chat(digest(id="d-1"))
        [request] = server.requests
    target = {Discord: f"/{TOKEN}?wait=true", Ntfy: "/"}.get(cast("Any", kind), f"/{TOKEN}")
    assert (request.method, request.target) == ("POST", target)
    assert request.headers["content-type"] == "application/json"
    assert "News" in str(request.json)


async def test_what_a_url_asks_of_discord_stays() -> None:
    async with web_server() as server, Discord(f"{server.url}/x?thread_id=7", allow_private=True) as chat:
        await chat(digest())
    assert server.requests[0].target == "/x?thread_id=7&wait=true"


async def test_ntfy_takes_a_token_a_priority_and_tags_and_may_be_in_a_folder() -> None:
    options: dict[str, Any] = {"token": "tk_123456", "priority": 5, "tags": ["warning"], "allow_private": True}
    async with web_server() as server, Ntfy(f"{server.url}/below/topic", **options) as chat:
        await chat(digest())
        await chat(digest(), to=f"{server.url}/other")
    first, second = server.requests
    assert (first.target, first.headers["authorization"]) == ("/below/", "Bearer tk_123456")
    assert (first.json["topic"], first.json["priority"], first.json["tags"]) == ("topic", 5, ["warning"])
    assert (second.target, second.json["topic"]) == ("/", "other")


async def test_the_topic_of_ntfy_which_whoever_knows_it_can_read_is_in_no_error() -> None:
    def quote(stage: str, request: Request) -> Reply | None:
        return Reply(507, f"no room in {request.json['topic']}".encode()) if stage == "request" else None

    async with web_server(quote) as server, Ntfy(f"{server.url}/t0p1c", allow_private=True) as chat:
        assert "507 no room in ***" in str(await outcome(chat(digest())))


@pytest.mark.parametrize(
    ("kind", "reply", "seconds"),
    [
        (Slack, Reply(429, b"rate_limited", {"Retry-After": "30"}), 30),
        (Discord, Reply(429, b'{"message": "...", "retry_after": 0.65, "global": false}', {"Retry-After": "1"}), 0.65),
        (Discord, Reply(429, b"<html>", {"Retry-After": "60"}), 60),
        (Discord, Reply(429, b'{"retry_after": true}', {"Retry-After": "60"}), 60),
        (Discord, Reply(429, b"[" * 10_000, {"Retry-After": "60"}), 60),
        (Teams, Reply(429, b"", {"Retry-After": "5"}), 5),
        (Ntfy, Reply(503, b"", {"Retry-After": "5"}), 5),
    ],
)
async def test_a_service_that_names_a_time_is_asked_again_then(kind: Chat, reply: Reply, seconds: float) -> None:
    async with web_server(at("request", reply)) as server, channel(kind, server) as chat:
        found = await outcome(chat(digest()))
    assert isinstance(found, RetryAfter)
    assert (found.delay, found.pause) == (seconds, True)


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (at("request", Reply(400, b"invalid_blocks")), Reject),
        (status(404), ChannelError),
        (status(410), ChannelError),  # a channel that was archived
        (status(429), ChannelError),
        (status(500), ChannelError),
        (at("request", DIE), OutcomeUnknown),
    ],
)
async def test_answers_mean_what_they_mean_to_a_webhook(kind: Chat, script: Script, expected: type[Exception]) -> None:
    async with web_server(script) as server, channel(kind, server) as chat:
        found = await outcome(chat(digest()))
    assert type(found) is expected
    assert TOKEN not in f"{found}{chat!r}"


@pytest.mark.parametrize("kind", SERVICES)
async def test_a_chat_that_is_gone_is_one_error(kind: Chat, caplog: pytest.LogCaptureFixture) -> None:
    async with web_server(status(410)) as server, channel(kind, server) as chat:
        for _ in range(2):
            await outcome(chat(digest()))
    [line] = [line for line in caplog.records if line.name.startswith("aiodigest")]
    assert (line.levelname, TOKEN in line.getMessage()) == ("ERROR", False)
    assert "has nothing at this url: check it" in line.getMessage()


@pytest.mark.parametrize("kind", SERVICES)
async def test_addresses_are_private_unless_allowed(kind: Chat) -> None:
    with pytest.raises(InvalidArgument, match="not public"):
        kind(f"https://127.0.0.1/{TOKEN}")
    async with kind(f"https://localhost/{TOKEN}") as chat:
        assert type(await outcome(chat(digest()))) is ChannelError


@pytest.mark.parametrize("options", [{"priority": 6}, {"priority": True}, {"tags": "warning"}, {"token": "a\nb"}])
def test_what_ntfy_does_not_know_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Ntfy("https://ntfy.example/topic", **options)


@pytest.mark.parametrize("url", ["https://ntfy.example/", "https://ntfy.example/a%20b", "https://ntfy.example/topic/"])
def test_ntfy_needs_a_topic(url: str) -> None:
    with pytest.raises(InvalidArgument, match="topic"):
        Ntfy(url)


# Apprise


def apprise(server: Site, **options: Any) -> Apprise:
    return Apprise(f"json://ann:passw0rd@127.0.0.1:{server.port}/{TOKEN}?cto=600&rto=600", **options)


async def test_apprise_sends_the_subject_and_the_text() -> None:
    async with web_server() as server, apprise(server, render=saying("News", text="a <b>\n*c*\ud800")) as channel:
        await channel(digest())
        [request] = server.requests
    assert request.target.rstrip("/") == f"/{TOKEN}"
    assert (request.json["title"], request.json["message"]) == ("News", "a <b>\n*c*?")


async def test_apprise_says_no_and_it_is_tried_again_without_a_secret_in_error_or_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with web_server(status(400)) as server, apprise(server) as channel:
        found = await outcome(channel(digest()))
    assert type(found) is ChannelError
    assert "400" in str(found)
    told = f"{found}{channel!r}{caplog.text}"
    assert not [each for each in (TOKEN, "passw0rd") if each in told], told
    logging.getLogger("apprise").warning("of somebody else")
    assert "of somebody else" in caplog.text


def test_the_password_of_an_apprise_url_is_hidden_and_a_short_name_alone_is_not() -> None:
    assert secrets_of("mailto://jo@host").one_line("job failed") == "job failed"
    assert secrets_of("mailto://jo:p@s@host").one_line("no p@s of jo, or jo:p@s") == "no *** of jo, or ***"


async def test_apprise_that_says_nothing_leaves_an_unknown_outcome(clock: Clock) -> None:
    async with web_server(at("request", HANG)) as server, apprise(server, timeout=1000) as channel:
        sending = asyncio.create_task(outcome(channel(digest())))
        await server.reaches("request")
        clock.ahead += 1001
        assert type(await sending) is OutcomeUnknown


async def test_a_digest_for_which_apprise_has_no_thread_was_never_handed_over_and_a_word_says_why(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with web_server(at("request", HANG)) as server, apprise(server, timeout=1000) as channel:
        sending = [asyncio.create_task(outcome(channel(digest()))) for _ in range(MOST + 2)]
        await server.reaches("request", MOST)
        clock.ahead += 1001
        found = Counter(map(type, await asyncio.gather(*sending)))
        assert found == {OutcomeUnknown: MOST, RetryAfter: 2}
        later = asyncio.create_task(outcome(channel(digest())))
        while not later.done():
            clock.ahead += 1001
            await asyncio.sleep(0)
        assert type(await later) is RetryAfter
        assert len(server.requests) == MOST
    [told] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "Apprise does not come back" in told.getMessage()


class Gates:
    """A channel of a few threads, whose messages each wait for their gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int = 1, **options: Any) -> None:
        monkeypatch.setattr("aiodigest.channels.apprise.MOST", threads)
        self.began = asyncio.Queue[threading.Event]()
        self.channel = Apprise("json://localhost", **options)
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(self.channel, "_notify", self._notify)

    def send(self) -> asyncio.Task[Exception | None]:
        return asyncio.create_task(outcome(self.channel(digest())))

    def _notify(self, *of: Any) -> None:
        gate = threading.Event()
        self._loop.call_soon_threadsafe(self.began.put_nowait, gate)
        assert gate.wait(60)


async def test_nothing_is_said_of_hanging_threads_where_most_are_only_busy(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gates = Gates(monkeypatch, threads=4, timeout=1000)
    first = gates.send()
    hung = await gates.began.get()
    clock.ahead += 1001
    assert type(await first) is OutcomeUnknown
    served, late = [gates.send() for _ in range(9)], gates.send()
    busy = list[threading.Event]()
    for _ in range(3):
        busy = [await gates.began.get() for _ in range(3)]
        clock.ahead += 400
        await asyncio.sleep(0)
        if late.done():
            break
        for gate in busy:
            gate.set()
    assert type(await late) is RetryAfter
    for gate in (hung, *busy):
        gate.set()
    assert await asyncio.gather(*served) == [None] * 9
    assert caplog.messages == []


async def test_the_time_of_a_try_by_apprise_begins_with_its_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(monkeypatch, timeout=1e6)
    first, second = gates.send(), gates.send()
    gate = await gates.began.get()
    clock.ahead += 0.6e6
    gate.set()
    gate = await gates.began.get()
    clock.ahead += 0.6e6
    assert not second.done()
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, second) == [None, None]


async def test_a_digest_that_is_cancelled_as_it_waits_for_apprise_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gates = Gates(monkeypatch)
    first, second, third = gates.send(), gates.send(), gates.send()
    gate = await gates.began.get()
    second.cancel()
    await asyncio.wait([second])
    gate.set()
    (await gates.began.get()).set()
    assert await asyncio.gather(first, third) == [None, None]
    assert gates.began.empty()


HANGING = """
import asyncio, threading
from datetime import UTC, datetime
from aiodigest import Digest, OutcomeUnknown, Record
from aiodigest.channels import Apprise

channel, gates = Apprise("json://localhost", timeout=0.001), [threading.Event(), threading.Event()]
for gate in gates:
    channel._notify = lambda *of, gate=gate: gate.wait() and None
    try:
        asyncio.run(channel(Digest("ann", [Record("1", "news", datetime(2030, 1, 1, tzinfo=UTC))])))
    except OutcomeUnknown:
        print("unknown")
gates[0].set()
while sum(each.name == "aiodigest-apprise" for each in threading.enumerate()) > 1:
    pass
"""


def test_apprise_that_hangs_keeps_no_process_and_no_other_event_loop() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", HANGING], capture_output=True, timeout=60, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("unknown\nunknown\n", "", 0)


async def test_apprise_takes_its_url_by_key(caplog: pytest.LogCaptureFixture) -> None:
    async with web_server() as server:

        async def url(key: str) -> str | None:
            return f"json://127.0.0.1:{server.port}/{key}?cto=600&rto=600" if key else None

        async with Apprise(url) as channel:
            await channel(digest(key="ann"))
            await channel(digest(), to=f"json://127.0.0.1:{server.port}/bob")
            assert isinstance(await outcome(channel(digest(key=""))), Reject)
            assert isinstance(await outcome(channel(digest(), to=f"nothing://{TOKEN}")), Reject)
    assert [each.target.strip("/") for each in server.requests] == ["ann", "bob"]
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("url", ["nothing://s3cret-t0ken", "s3cret-t0ken", "", 5])
def test_a_url_that_apprise_does_not_know_is_refused_and_not_quoted(url: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument, match="Apprise knows") as refused:
        Apprise(url)
    assert TOKEN not in f"{refused.value}{caplog.text}"


def test_apprise_is_named_with_its_extra_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'aiodigest\[apprise\]'"):
        Apprise("json://localhost")
