"""``Webhook``: what becomes of a digest, whatever a web server does, and which addresses it may reach."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import sys
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from ipaddress import ip_address
from math import inf
from typing import Any

import pytest
from eventloops import Clock, clock, nothing_is_left
from httpx2 import ASGITransport, AsyncClient
from hypothesis import given
from hypothesis import strategies as st
from pages import blocks_of
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError
from userland import ROOT
from webservers import (
    DIE,
    ENDLESS,
    HALF,
    HANG,
    STALLED,
    WRONG,
    Reply,
    Request,
    Script,
    Site,
    at,
    certificates,
    replying,
    status,
    web_server,
)

from aiodigest import (
    JSON,
    ChannelError,
    ConfigurationError,
    Digest,
    DigestEngine,
    InvalidArgument,
    OutcomeUnknown,
    Policy,
    Record,
    Reject,
    RetryAfter,
)
from aiodigest.channels import Slack, Webhook, _http
from aiodigest.channels._http import MOST, is_public
from aiodigest.channels._posting import LONGEST, retry_after
from aiodigest.testing import TestEngine

__all__ = ["clock", "nothing_is_left"]

SECRET = "whsec_" + b64encode(bytes(range(24))).decode()
NEWER = "whsec_" + b64encode(bytes(range(64))).decode()
LARGE = "x" * 16_000_000  # more than any buffer between a client and a server
HERE = "127.0.0.1/32"

DELIVERED = {200, 201, 202, 203, 204, 205, 206, 207, 208, 226, 299}
AGAIN = {401, 403, 404, 407, 408, 421, 423, 425, 429, *range(300, 400), *range(500, 600)}
REJECTED = {*range(400, 500)} - AGAIN - {410}


def digest(value: JSON = "news", key: str = "ann", **options: Any) -> Digest[JSON]:
    return Digest(key, [Record("1", value, datetime(2030, 1, 1, tzinfo=UTC))], **options)


def channel(server: Site, path: str = "/hook", **options: Any) -> Webhook:
    given: dict[str, Any] = {"secrets": SECRET, "allow_private": True, **options}
    return Webhook(server.url + path, **given)


async def outcome(sending: Awaitable[None]) -> Exception | None:
    """Return the error that ends a delivery; None if it went well."""
    try:
        await sending
    except Exception as error:
        return error
    return None


async def of(script: Script, value: JSON = "news", **options: Any) -> Exception | None:
    """Return the error that ends a delivery to a server."""
    async with web_server(script) as server, channel(server, **options) as webhook:
        return await outcome(webhook(digest(value)))


# What is posted


async def test_a_digest_is_posted_as_json_that_the_library_of_standard_webhooks_verifies() -> None:
    async with web_server() as server, channel(server) as webhook:
        await webhook(digest({"a": [1, None, "ü"]}, id="d-1", attempt=2, dropped=3))
        [request] = server.requests
    assert (request.method, request.target) == ("POST", "/hook")
    assert request.headers["content-type"] == "application/json"
    assert request.headers["webhook-id"] == "d-1"
    assert request.headers["user-agent"].startswith("aiodigest/")
    found = Verifier(SECRET).verify(request.body, request.headers)
    assert (found["id"], found["key"], found["attempt"], found["dropped"]) == ("d-1", "ann", 2, 3)
    assert [(record["id"], record["value"]) for record in found["records"]] == [("1", {"a": [1, None, "ü"]})]
    with pytest.raises(WebhookVerificationError):
        Verifier(SECRET).verify(request.body.replace(b"ann", b"bob"), request.headers)


async def test_while_one_secret_replaces_another_both_sign_in_one_header() -> None:
    async with web_server() as server, channel(server, secrets=[NEWER, SECRET]) as webhook:
        await webhook(digest())
        [request] = server.requests
    for secret in (NEWER, SECRET):
        Verifier(secret).verify(request.body, request.headers)
    assert len(request.headers["webhook-signature"].split(" ")) == 2
    with pytest.raises(WebhookVerificationError):
        Verifier(b64encode(b"x" * 24).decode()).verify(request.body, request.headers)


async def test_without_secrets_nothing_is_signed() -> None:
    async with web_server() as server, channel(server, secrets=None) as webhook:
        await webhook(digest(id="d"))
        [request] = server.requests
    assert "webhook-signature" not in request.headers
    assert request.headers["webhook-id"] == "d"


@pytest.mark.parametrize("name", ["x" * 500, "a b", "a.b", "x\r\nEvil: 1", "ü", "\ud800", ""])
async def test_any_id_of_a_digest_makes_a_header_that_the_signature_holds_for(name: str) -> None:
    async with web_server() as server, channel(server) as webhook:
        for _ in range(2):
            await webhook(digest(id=name))
        first, second = server.requests
    Verifier(SECRET).verify(first.body, first.headers)
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert "evil" not in first.headers


@pytest.mark.parametrize("value", ["\ud800", float("nan"), b"\xff", {1: 2}, datetime(2030, 1, 1), object, "\u2028" * 9])
async def test_any_value_makes_json_that_is_well_formed(value: Any) -> None:
    async with web_server() as server, channel(server) as webhook:
        await webhook(digest(value))
        [request] = server.requests
    assert request.body.isascii()
    assert len(request.json["records"]) == 1
    Verifier(SECRET).verify(request.body, request.headers)


async def test_the_url_and_the_secrets_may_be_functions_of_the_key() -> None:
    async with web_server() as server:

        async def url(key: str) -> str:
            return f"{server.url}/{key}"

        async def secrets(key: str) -> list[str]:
            return [NEWER] if key == "ann" else [SECRET]

        async with Webhook(url, secrets=secrets, allow_private=True) as webhook:
            await webhook(digest(key="ann"))
            await webhook(digest(key="bob"))
            await webhook(digest(key="bob"), to=f"{server.url}/carol")
        ann, bob, carol = server.requests
    assert [each.target for each in server.requests] == ["/ann", "/bob", "/carol"]
    Verifier(NEWER).verify(ann.body, ann.headers)
    for request in (bob, carol):
        Verifier(SECRET).verify(request.body, request.headers)


@pytest.mark.parametrize("url", [None, "", "no url", "ftp://example.org", "https://10.0.0.1/x", 5])
async def test_a_timeline_without_a_url_becomes_a_dead_letter(url: Any) -> None:
    async with Webhook(lambda key: url, secrets=None) as webhook:
        with pytest.raises(Reject, match=r"URL|public"):
            await webhook(digest())


async def test_a_function_that_has_no_secret_for_a_key_sends_nothing_unsigned() -> None:
    async with web_server() as server, channel(server, secrets={"bob": SECRET}.get) as webhook:
        with pytest.raises(InvalidArgument, match="secrets must return what signs, and has none for 'ann'"):
            await webhook(digest())
        assert not server.requests
        await webhook(digest(key="bob"))
        assert "webhook-signature" in server.requests[0].headers


async def test_the_password_of_a_url_and_headers_go_with_each_request() -> None:
    async with web_server() as server:
        url = server.url.replace("//", "//ann:p%40ss@")
        async with Webhook(url, secrets=None, headers={"X-Team": "a b"}, allow_private=True) as webhook:
            await webhook(digest())
        [request] = server.requests
    assert request.headers["authorization"] == "Basic " + b64encode(b"ann:p@ss").decode()
    assert request.headers["x-team"] == "a b"
    assert request.headers["host"] == f"localhost:{server.port}"


async def test_connections_are_kept_and_closed_with_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_http, "IDLE", 1e6)
    async with web_server() as server:
        async with channel(server) as webhook:
            for _ in range(3):
                await webhook(digest())
            assert server.connections == 1
        await webhook(digest())  # opens again
        assert server.connections == 2
        await webhook.aclose()


async def test_a_connection_that_the_server_closes_after_an_answer_is_not_used_again() -> None:
    closing = Reply(204, headers={"Connection": "close"})
    async with web_server(replying(closing, closing)) as server, channel(server) as webhook:
        await webhook(digest())
        await webhook(digest())
        assert (server.connections, len(server.requests)) == (2, 2)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await of(status(200)) is None


def test_a_channel_serves_one_event_loop_after_another() -> None:
    webhook = Webhook("http://localhost:1/", secrets=None, allow_private=True)

    async def use() -> Exception | None:
        async with webhook:
            return await outcome(webhook(digest()))

    for _ in range(2):
        assert isinstance(asyncio.run(use()), ChannelError)


async def test_the_receiver_of_the_documents_verifies_and_tells_a_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    [receiver] = [block for block in blocks_of(ROOT / "docs" / "howto" / "send-webhooks.md") if "FastAPI" in block.text]
    names: dict[str, Any] = {"__name__": "receiver"}
    exec(receiver.text, names)
    async with web_server() as server, channel(server, secrets="whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD") as webhook:
        await webhook(digest(id="d-1"))
        await webhook(digest(id="d-1", attempt=2))
    client = AsyncClient(transport=ASGITransport(names["app"]), base_url="http://receiver.example")
    first, repeat = server.requests
    async with client:
        for body, status_code in [(first.body, 204), (repeat.body, 204), (first.body + b" ", 401)]:
            headers = {**(repeat if body == repeat.body else first).headers, "content-length": str(len(body))}
            answer = await client.post("/hook", content=body, headers=headers)
            assert answer.status_code == status_code
    assert capsys.readouterr().out == "ann ['news']\n"


# What an answer means


@pytest.mark.parametrize(
    ("expected", "statuses"),
    [(type(None), {*range(200, 300)}), (ChannelError, AGAIN), (Reject, REJECTED | {410})],
    ids=["delivered", "again", "rejected"],
)
async def test_every_status_has_its_outcome(expected: type, statuses: set[int]) -> None:
    left = sorted(statuses)
    script = replying(*(Reply(number) for number in left))
    async with web_server(script) as server, channel(server) as webhook:
        for number in left:
            found = await outcome(webhook(digest()))
            assert type(found) is expected, (number, found)
            assert found is None or f": {number}" in str(found)
        assert len(server.requests) == len(left)  # nothing was followed, and nothing repeated


def test_the_table_of_statuses_is_whole() -> None:
    assert {*range(200, 300)} >= DELIVERED
    assert AGAIN | REJECTED | {410} == {*range(300, 600)}


async def test_410_mutes_the_timeline_and_nothing_else_does() -> None:
    for number in (410, 400, 422):
        found = await of(status(number))
        assert isinstance(found, Reject)
        assert found.mute is (number == 410)


@pytest.mark.parametrize("number", [600, 999])
async def test_a_status_that_there_is_not_is_tried_again(number: int) -> None:
    assert isinstance(await of(status(number)), ChannelError)


async def test_an_answer_to_another_question_is_none() -> None:
    assert isinstance(await of(status(101)), OutcomeUnknown)


async def test_what_comes_before_an_answer_is_waited_through() -> None:
    assert await of(at("head", Reply(102))) is None


NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LATER = format_datetime(NOW + timedelta(seconds=90), usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": " 1.5 "}, 1.5),
        ({"retry-after": "0"}, 0),
        ({"retry-after": LATER}, 90),
        ({"retry-after": LATER.replace("GMT", "-0000")}, 90),
        ({"retry-after": "Tuesday, 01-Jan-30 12:01:30 GMT"}, 90),
        ({"retry-after": LATER, "date": format_datetime(NOW + timedelta(seconds=60), usegmt=True)}, 30),
        ({"retry-after": LATER, "date": "yesterday"}, 90),
        ({"retry-after": format_datetime(NOW - timedelta(days=9), usegmt=True)}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "99999999999"}, 99_999_999_999),
        ({"retry-after": "9" * 5000}, inf),
        ({"retry-after": "Tue, 01 Jan 99999 00:00:00 GMT"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_by_the_receivers_clock(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers, NOW) == seconds


@given(st.text(), st.text())
def test_nothing_in_retry_after_does_harm(asked: str, date: str) -> None:
    found = retry_after({"retry-after": asked, "date": date}, NOW)
    assert found is None or found >= 0


@pytest.mark.parametrize("number", [429, 503])
async def test_a_receiver_that_names_a_time_is_asked_again_then_and_not_much_later(number: int) -> None:
    found = await of(status(number, Retry_After="20"))
    assert isinstance(found, RetryAfter)
    assert (found.delay, found.pause) == (20, True)
    found = await of(status(number, Retry_After="9" * 10))
    assert isinstance(found, RetryAfter)
    assert found.delay == LONGEST
    assert type(await of(status(number, Retry_After="soon"))) is ChannelError


async def test_one_receiver_among_many_does_not_pause_the_others() -> None:
    async with web_server(status(429, Retry_After="20")) as server:
        async with Webhook(lambda key: server.url, secrets=None, allow_private=True) as webhook:
            found = await outcome(webhook(digest()))
        async with channel(server) as other:
            addressed = await outcome(other(digest(), to=f"{server.url}/x"))
    for each in (found, addressed):
        assert isinstance(each, RetryAfter)
        assert each.pause is False


async def test_a_time_that_comes_with_another_status_is_no_promise() -> None:
    for number in (301, 403, 500, 502):
        assert type(await of(status(number, Retry_After="20"))) is ChannelError


# What fails


async def test_a_connection_that_is_refused_is_tried_again() -> None:
    async with web_server() as server:
        pass
    async with channel(server) as webhook:
        found = await outcome(webhook(digest()))
    assert type(found) is ChannelError
    assert "Connect call failed" in str(found)


@pytest.mark.parametrize("script", [at("connection", DIE), at("head", DIE), at("head", HALF)])
async def test_a_connection_that_is_lost_before_the_end_of_the_request_is_tried_again(script: Script) -> None:
    assert type(await of(script, LARGE)) is ChannelError


@pytest.mark.parametrize("word", [DIE, HALF, WRONG])
async def test_if_the_connection_is_lost_after_the_request_nobody_knows(word: str) -> None:
    async with web_server(at("request", word)) as server, channel(server) as webhook:
        found = await outcome(webhook(digest()))
        assert len(server.requests) == 1
    assert type(found) is OutcomeUnknown
    assert str(found).startswith(f"localhost:{server.port}: ")


@pytest.mark.parametrize(
    ("stage", "value", "expected"),
    [("connection", LARGE, ChannelError), ("head", LARGE, ChannelError), ("request", "news", OutcomeUnknown)],
)
async def test_if_no_answer_comes_it_depends_on_what_was_sent(
    stage: str, value: str, expected: type[Exception], clock: Clock
) -> None:
    async with web_server(at(stage, HANG)) as server, channel(server, timeout=1000) as webhook:
        sending = asyncio.create_task(outcome(webhook(digest(value))))
        await server.reaches(stage)
        clock.ahead += 1001
        found = await sending
    assert type(found) is expected
    assert "no answer within 1000 s" in str(found)


async def test_a_digest_that_is_cancelled_leaves_no_connection() -> None:
    async with web_server(at("request", HANG)) as server, channel(server) as webhook:
        sending = asyncio.create_task(webhook(digest()))
        await server.reaches("request")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        server.script = status(200)
        await webhook(digest())
        assert server.connections == 2


async def test_an_answer_before_the_end_of_the_request_counts() -> None:
    script = at("head", Reply(413, headers={"Connection": "close"}))
    found = await of(script, LARGE)
    assert type(found) is Reject
    assert "413" in str(found)


async def test_a_repeat_of_what_nobody_knows_of_has_the_same_id_and_records() -> None:
    engine = DigestEngine(namespace="hooks", policy=Policy(initial_delay=1, increment_delay=0))
    async with web_server(replying(DIE)) as server:
        engine.deliver(channel(server))
        async with TestEngine(engine) as t:
            await engine.add("ann", "one")
            await t.advance(seconds=1)
            await engine.add("ann", "two")
            await t.advance(hours=1)
        first, repeat, later = server.requests
    assert first.headers["webhook-id"] == repeat.headers["webhook-id"] != later.headers["webhook-id"]
    values = [[record["value"] for record in request.json["records"]] for request in server.requests]
    assert values == [["one"], ["one"], ["two"]]


# TLS


async def test_tls_is_verified_and_whatever_is_wrong_with_it_is_tried_again() -> None:
    right, wrong, trusting = certificates()
    async with web_server(tls=right) as server, channel(server, tls_context=trusting, allow_private=HERE) as webhook:
        await webhook(digest())
        [request] = server.requests
    Verifier(SECRET).verify(request.body, request.headers)
    async with web_server(tls=right) as server, channel(server) as webhook:
        untrusted = await outcome(webhook(digest()))
        assert not server.requests
    async with web_server(tls=wrong) as server, channel(server, tls_context=trusting) as webhook:
        misnamed = await outcome(webhook(digest()))
        assert not server.requests
    for found in (untrusted, misnamed):
        assert type(found) is ChannelError
        assert "CERTIFICATE_VERIFY_FAILED" in str(found)


async def test_a_server_without_tls_gets_nothing_of_what_is_meant_for_one_with_it() -> None:
    async with web_server(at("connection", WRONG)) as server:
        url = server.url.replace("http", "https")
        async with Webhook(url, secrets=None, allow_private=True) as webhook:
            assert type(await outcome(webhook(digest()))) is ChannelError
        assert not server.requests


async def test_a_connection_over_tls_that_is_lost_after_the_request_has_an_unknown_outcome() -> None:
    right, _, trusting = certificates()
    async with web_server(at("request", DIE), tls=right) as server, channel(server, tls_context=trusting) as webhook:
        assert type(await outcome(webhook(digest()))) is OutcomeUnknown
    async with web_server(at("head", DIE), tls=right) as server, channel(server, tls_context=trusting) as webhook:
        assert type(await outcome(webhook(digest(LARGE)))) is ChannelError


# Answers that are too much


async def test_an_answer_without_end_counts_by_its_status_and_is_not_read() -> None:
    async with web_server(at("request", ENDLESS)) as server, channel(server) as webhook:
        await webhook(digest())
    assert not server.was_read_through


async def test_an_answer_whose_contents_do_not_come_counts_by_its_status(clock: Clock) -> None:
    async with web_server(at("request", STALLED)) as server, channel(server, timeout=1e8) as webhook:
        sending = asyncio.create_task(webhook(digest()))
        await server.reaches("request")
        while not sending.done():  # much sooner than the end of the time for the answer itself
            clock.ahead += 1
            await asyncio.sleep(0)
        await sending


async def test_contents_that_do_not_come_take_no_more_than_what_is_left_of_the_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, is_answered, beginning = asyncio.get_running_loop().time(), asyncio.Event(), _http.Client._beginning

    async def late(client: _http.Client, *of: Any) -> bytes:
        clock.ahead += 0.9e6
        is_answered.set()
        return await beginning(client, *of)

    monkeypatch.setattr(_http, "PATIENCE", 0.5e6)
    monkeypatch.setattr(_http.Client, "_beginning", late)
    async with web_server(at("request", STALLED)) as server, channel(server, timeout=1e6) as webhook:
        sending = asyncio.create_task(webhook(digest()))
        await is_answered.wait()
        while not sending.done():
            clock.ahead += 1000
            await asyncio.sleep(0)
        await sending
    assert clock.time() - began < 1.2e6


async def test_headers_without_end_are_not_read() -> None:
    long = Reply(200, headers={f"X-{number}": "x" * 1000 for number in range(1000)})
    assert type(await of(at("request", long))) is OutcomeUnknown


async def test_contents_that_are_compressed_stay_so() -> None:
    bomb = gzip.compress(b"x" * 10_000_000)
    found = await of(at("request", Reply(400, bomb, {"Content-Encoding": "gzip"})))
    assert str(found).endswith(": 400")
    async with web_server() as server, channel(server) as webhook:
        await webhook(digest())
    assert server.requests[0].headers["accept-encoding"] == "identity"


async def test_the_beginning_of_what_a_receiver_says_is_told_in_one_line() -> None:
    found = await of(at("request", Reply(422, b'{"error":\r\n "no \x1b[31msuch\xff field"}' + b"x" * 4 * MOST)))
    assert type(found) is Reject
    assert '422 {"error": "no \\x1b[31msuch\ufffd field"}xxx' in str(found)
    assert len(str(found)) < 300


# Redirects


async def test_a_redirect_is_not_followed_unless_asked_for() -> None:
    async with web_server() as inside:
        for number in (301, 302, 303, 307, 308):
            found = await of(status(number, Location=f"{inside.url}/x"))
            assert type(found) is ChannelError
        assert not inside.connections


async def test_a_redirect_is_followed_with_the_same_request_and_without_headers_for_another_host() -> None:
    async with web_server() as other, web_server(status(307, Location=f"{other.url}/moved?x=1")) as server:
        async with channel(server, redirects=True, headers={"Authorization": "Bearer t0ken"}) as webhook:
            await webhook(digest(id="d"))
        [first], [second] = server.requests, other.requests
    assert second.target == "/moved?x=1"
    assert (first.body, first.headers["webhook-id"]) == (second.body, second.headers["webhook-id"])
    assert first.headers["authorization"] == "Bearer t0ken"
    assert "authorization" not in second.headers
    assert second.headers["host"] == f"localhost:{other.port}"
    Verifier(SECRET).verify(second.body, second.headers)


async def test_a_redirect_to_a_place_of_the_same_host_gets_the_headers() -> None:
    options: dict[str, Any] = {"redirects": True, "headers": {"X-Key": "k3y"}}
    moved = replying(Reply(308, headers={"Location": "/new"}))
    async with web_server(moved) as server, channel(server, **options) as webhook:
        await webhook(digest())
    assert [(each.target, each.headers["x-key"]) for each in server.requests] == [("/hook", "k3y"), ("/new", "k3y")]


@pytest.mark.parametrize("number", [301, 302, 303, 304])
async def test_a_redirect_that_would_become_another_request_is_not_followed(number: int) -> None:
    async with web_server(status(number, Location="/x")) as server, channel(server, redirects=True) as webhook:
        assert type(await outcome(webhook(digest()))) is ChannelError
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.2:{port}/",
        "http://127.2:{port}/",
        "http://[::1]:{port}/",
        "ftp://localhost/",
        "http://",
        "\xff:/",
    ],
)
async def test_a_redirect_leads_only_where_the_channel_may_go(location: str) -> None:
    async with Site() as server:
        server.script = status(307, Location=location.format(port=server.port))
        async with channel(server, redirects=True, allow_private=HERE) as webhook:
            assert type(await outcome(webhook(digest()))) is ChannelError
        assert server.connections == 1


async def test_a_redirect_away_from_https_is_not_followed() -> None:
    right, _, trusting = certificates()
    async with web_server() as plain, web_server(status(307, Location=plain.url), tls=right) as server:
        async with channel(server, redirects=True, tls_context=trusting) as webhook:
            assert type(await outcome(webhook(digest()))) is ChannelError
        assert not plain.connections


async def test_a_redirect_in_a_circle_ends() -> None:
    async with web_server(status(307, Location="/again")) as server, channel(server, redirects=True) as webhook:
        assert type(await outcome(webhook(digest()))) is ChannelError
        assert len(server.requests) == 4


# Addresses

INSIDE = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
    "168.63.129.16", "169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1",
    "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255",
    "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1", "100::1", "2001::1", "2001:db8::1", "2002:7f00:1::",
    "2002:808:808::", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "4000::1",
    "5f00::1",
]  # fmt: skip
OUTSIDE = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", INSIDE)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not is_public(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    with pytest.raises(InvalidArgument, match=r"not public|must be a URL"):
        Webhook(f"https://{host}/x", secrets=None)


@pytest.mark.parametrize("address", OUTSIDE)
def test_what_is_public_is_not_refused(address: str) -> None:
    assert is_public(ip_address(address))
    host = f"[{address}]" if ":" in address else address
    Webhook(f"https://{host}/x", secrets=None)


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f.1", "2130706433", "0177.0.0.1", "localhost."])
async def test_a_name_of_this_machine_is_refused_when_it_is_looked_up(host: str) -> None:
    right, _, trusting = certificates()
    async with web_server(tls=right) as server:
        try:
            webhook = Webhook(f"https://{host}:{server.port}/", secrets=None, tls_context=trusting)
        except InvalidArgument:
            return  # no such URL
        async with webhook:
            found = await outcome(webhook(digest()))
        assert type(found) is ChannelError
        assert not server.connections


Lookup = Callable[[str], list[str]]


@pytest.fixture
async def lookup(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replace the DNS: give its answers, one each time; what is returned lists the questions."""

    def answering(*answers: list[str]) -> list[str]:
        asked, left = list[str](), iter(answers)

        async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in next(left)]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return asked

    return answering


async def test_the_address_that_was_looked_at_is_the_one_that_is_connected_to(lookup: Any) -> None:
    """So that a second answer of the DNS, another one, has no effect."""
    async with web_server() as server:
        asked = lookup(["127.0.0.1"], ["127.0.0.2"])
        url = f"http://hooks.example:{server.port}/"
        async with Webhook(url, secrets=None, allow_private=HERE) as webhook:
            await webhook(digest())
            assert asked == ["hooks.example"]
            await webhook.aclose()
            found = await outcome(webhook(digest()))
        assert asked == ["hooks.example"] * 2
        assert "127.0.0.2, which is not public" in str(found)
        assert server.connections == 1
        assert server.requests[0].headers["host"] == f"hooks.example:{server.port}"


async def test_a_name_that_leads_nowhere_is_tried_again(lookup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*arguments: Any, **options: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    for answer in (unknown, None):
        lookup([])
        if answer is not None:
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", answer)
        async with Webhook("https://hooks.example/x", secrets=None) as webhook:
            found = await outcome(webhook(digest()))
        assert type(found) is ChannelError
        assert str(found).startswith("hooks.example: its name leads nowhere")


async def test_of_several_addresses_those_are_tried_that_are_allowed(lookup: Any) -> None:
    async with web_server() as server:
        lookup(["10.0.0.1", "127.0.0.3", "127.0.0.1"], ["10.0.0.1", "169.254.169.254"])
        url = f"http://hooks.example:{server.port}/"
        async with Webhook(url, secrets=None, allow_private=[HERE, "127.0.0.3"]) as webhook:
            await webhook(digest())
            await webhook.aclose()
            assert type(await outcome(webhook(digest()))) is ChannelError
        assert server.connections == 1


async def test_networks_may_be_allowed_and_nothing_beside_them() -> None:
    async with web_server() as server:
        for allowed in (HERE, ["10.0.0.0/8", "127.0.0.0/8"], True):
            async with channel(server, allow_private=allowed) as webhook:
                await webhook(digest())
        mapped = f"http://[::ffff:127.0.0.1]:{server.port}/"
        Webhook(mapped, secrets=None, allow_private=HERE)
    for allowed in ("10.0.0.0/8", ["fd00::/8"]):
        with pytest.raises(InvalidArgument, match="not public"):
            Webhook("http://127.0.0.1/", secrets=None, allow_private=allowed)


# Arguments and secrets


@pytest.mark.parametrize(
    "options",
    [
        {"url": "http://hooks.example/s3cret-path"},
        {"url": "https:///s3cret-path"},
        {"url": "https://hooks.example:0/s3cret-path"},
        {"url": "https://hooks.example/s3cret-path\r\n"},
        {"url": "https://[::1/s3cret-path"},
        {"url": "s3cret-path"},
        {"url": b"https://hooks.example/s3cret-path"},
        {"secrets": "s3cret-path"},
        {"secrets": []},
        {"secrets": [SECRET] * 6},
        {"secrets": "whsec_" + b64encode(b"s3cret-path" * 9).decode()},
        {"secrets": [SECRET, "whsec_"]},
        {"secrets": "s3cret-path" + "A" * 22},
        {"secrets": "A" * 33},
        {"secrets": [None]},
        {"headers": {"X-Key": "s3cret-path\r\nEvil: 1"}},
        {"headers": {"X-Key": "s3cret-path\u2028"}},
        {"headers": {"X Key": "1"}},
        {"headers": {"Webhook-Id": "1"}},
        {"headers": {"Content-Length": "1"}},
        {"headers": {"X-Key": "1", "x-key": "2"}},
        {"allow_private": "everything"},
        {"allow_private": 5},
        {"timeout": 0},
    ],
)
def test_an_argument_that_is_not_allowed_is_refused_and_secrets_are_not_quoted(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"url": "https://hooks.example/", "secrets": SECRET, **options}
    with pytest.raises(InvalidArgument) as refused:
        Webhook(**arguments)
    assert "s3cret" not in str(refused.value)
    assert b64encode(b"s3cret-path" * 9).decode() not in str(refused.value)


async def test_secrets_are_in_no_error_log_or_repr(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hidden = ["pathsecret", "query%2Fsecret", "query/secret", "t0ken-123", "passw0rd", SECRET.removeprefix("whsec_")]
    login = b64encode(b"ann:passw0rd").decode()
    hidden += [login, login.rstrip("="), "PATHSECRET", "bob:s3cret-too", "s3cret-too", "c00kie-value"]

    def echo(stage: str, request: Request) -> Reply | None:
        if "x-given" in request.headers:  # as a user gives it
            login = b64decode(request.headers["x-given"].split()[1]).decode()
            told = "\n".join(
                [*login.split(":"), login, request.headers["cookie"].split("=")[1], request.target.upper()]
            )
        else:
            told = "\n".join([request.headers.get("authorization", ""), request.target, *request.headers.values()])
        return Reply(int(request.headers["x-status"]), told.encode()) if stage == "request" else None

    async with web_server(echo) as server:
        url = server.url.replace("//", "//ann:passw0rd@") + "/v1/pathsecret?key=query%2Fsecret"
        for number in (400, 410, 404, 500):
            headers = {"X-Token": "Bearer t0ken-123", "X-Status": str(number)}
            async with Webhook(url, secrets=SECRET, headers=headers, allow_private=True) as webhook:
                told = str(await outcome(webhook(digest()))) + repr(webhook)
            assert f": {number} " in told
            assert not [each for each in hidden if each in told], told
            headers |= {"X-Given": f"Basic {b64encode(b'bob:s3cret-too').decode()}", "Cookie": "sid=c00kie-value"}
            async with Webhook(url, secrets=SECRET, headers=headers, allow_private=True) as webhook:
                told = str(await outcome(webhook(digest()))) + repr(webhook)
            assert not [each for each in hidden if each in told], told
        server.script = at("request", DIE)
        async with Webhook(url, secrets=SECRET, allow_private=True) as webhook:
            told = str(await outcome(webhook(digest())))
    told += caplog.text
    assert "httpcore2" in told
    assert not [each for each in hidden if each in told]


async def test_short_logins_are_told_in_no_form_and_the_scheme_is() -> None:
    login = b64encode(b"q:!").decode()
    told = f"Basic {login} (q:!) was no login that is known".encode()
    async with web_server(at("request", Reply(401, told))) as server:
        headers = {"Authorization": f"Basic {login}"}
        async with Webhook(server.url, secrets=None, headers=headers, allow_private=True) as webhook:
            assert str(await outcome(webhook(digest()))).endswith(": 401 Basic *** (***) was no login that is known")


def test_a_channel_tells_its_host_and_no_more() -> None:
    url = "https://ann:passw0rd@hooks.example/s3cret"
    assert repr(Webhook(url, secrets=SECRET)) == "Webhook('hooks.example')"
    assert repr(Webhook(lambda key: url, secrets=SECRET)) == "Webhook(...)"


@pytest.mark.parametrize(("name", "kind"), [("httpx2", Webhook), ("standardwebhooks", Webhook), ("httpx2", Slack)])
def test_a_library_that_is_missing_is_named_with_the_extra(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "aiodigest.channels._http", raising=False)
    monkeypatch.delattr("aiodigest.channels._http", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    options: dict[str, Any] = {"secrets": None} if kind is Webhook else {}
    with pytest.raises(ConfigurationError, match=rf"{name} is not installed: pip install 'aiodigest\[webhook\]'"):
        kind("https://hooks.example/", **options)


# A set-up that is wrong


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the errors in the log since the last time, none of which holds what is secret."""
    lines = [line for line in caplog.records if line.name.startswith("aiodigest")]
    found = [line.getMessage() for line in lines]
    assert not found or {line.levelname for line in lines} == {"ERROR"}
    assert not any("/hook" in each or SECRET in each for each in found)
    caplog.clear()
    return found


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (401, "lets nobody in with these settings: check url and what authenticates"),
        (403, "lets nobody in with these settings: check url and what authenticates"),
        (404, "has nothing at this url: check it"),
        (301, "leads elsewhere: check url"),
    ],
)
async def test_an_answer_that_only_another_set_up_changes_is_one_error_until_something_is_delivered(
    number: int, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = Reply(number, b"no"), Reply(204)
    script = replying(wrong, wrong, Reply(500), wrong, Reply(407, b"no"), wrong, right, wrong)
    async with web_server(script) as server, channel(server) as webhook:
        await outcome(webhook(digest()))
        name = f"localhost:{server.port}"
        assert told(caplog) == [f"{name} {advice}: {name}: {number} no"]
        for _ in range(3):
            await outcome(webhook(digest()))
        assert told(caplog) == []
        for _ in range(4):
            await outcome(webhook(digest()))
        lines = told(caplog)
        assert [line.split()[-2] for line in lines] == ["407", f"{number}", f"{number}"]
        assert len(server.requests) == 8


async def test_a_name_that_nobody_has_is_one_error_and_one_that_nobody_could_be_asked_for_is_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = iter([socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NONAME])

    async def unknown(*arguments: Any, **options: Any) -> None:
        raise socket.gaierror(next(codes), "who?")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    async with Webhook("https://hooks.example/hook", secrets=None) as webhook:
        assert type(await outcome(webhook(digest()))) is ChannelError
        assert told(caplog) == []
        for _ in range(2):
            assert type(await outcome(webhook(digest()))) is ChannelError
    [line] = told(caplog)
    assert line.startswith("hooks.example is not to be found: check url: hooks.example: its name leads nowhere")


async def test_a_certificate_that_is_not_trusted_and_an_address_that_is_not_allowed_are_errors(
    caplog: pytest.LogCaptureFixture, lookup: Any
) -> None:
    right, _, _ = certificates()
    lookup(["127.0.0.1"], ["127.0.0.1"], ["127.0.0.1"])
    async with web_server(tls=right) as server:
        for allow_private in (HERE, "10.0.0.0/8"):
            url = f"https://localhost:{server.port}/hook"
            async with Webhook(url, secrets=None, allow_private=allow_private) as webhook:
                for _ in range(2 if allow_private == HERE else 1):
                    await outcome(webhook(digest()))
    untrusted, private = told(caplog)
    assert "has no TLS that is trusted: check url and tls_context, or SSL_CERT_FILE: " in untrusted
    assert "may not be reached: check url and allow_private: " in private


async def test_a_connection_that_is_lost_or_refused_says_nothing_of_the_set_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    right, _, trusting = certificates()
    async with web_server(at("connection", DIE), tls=right) as server, channel(server, tls_context=trusting) as webhook:
        await outcome(webhook(digest()))
    await outcome(webhook(digest()))
    await webhook.aclose()
    assert told(caplog) == []


async def test_a_receiver_among_many_says_nothing_of_the_set_up(caplog: pytest.LogCaptureFixture) -> None:
    async with web_server(status(404)) as server, channel(server) as webhook:
        await outcome(webhook(digest(), to=server.url))
        async with Webhook(lambda key: server.url, secrets=None, allow_private=True) as for_each:
            await outcome(for_each(digest()))
        assert len(server.requests) == 2
    assert told(caplog) == []
