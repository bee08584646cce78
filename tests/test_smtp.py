"""``SMTP``: what becomes of a digest, whatever a mail server does; and mails, as the standard library reads them."""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trustme
from engines import engine_on, holding
from eventloops import Clock, clock, nothing_is_left
from mailservers import DIE, HANG, TAKE_AND_DIE, TAKE_AND_HANG, Mailbox, mail_server, one_after_another, script

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
    RetryPolicy,
)
from aiodigest.channels import SMTP
from aiodigest.channels._mailserver import IDLE
from aiodigest.rendering import Message
from aiodigest.testing import TestEngine

__all__ = ["clock", "nothing_is_left"]

SENDER = "Shop <news@shop.example>"
PASSWORD = "s3cret-passw0rd"
HOSTILE = [
    "hello\r\nBcc: everybody@example.org",
    "hello\nX-Evil: 1\n\nbody",
    "hello\x00\x0b\x0c\x1c\x85\u2028\u2029there",
    "\ud800 lone \udfff surrogates",
    "\u202eright to left\u2066",
    "=?utf-8?q?Subject=0ABcc:_x?=",
    "long " * 10_000,
    "ü" * 1_000,
    "👩‍👩‍👧" * 300,
    "",
]


def digest(value: JSON = "news", key: str = "ann@example.org", **options: Any) -> Digest[JSON]:
    return Digest(key, [Record("1", value, datetime(2030, 1, 1, tzinfo=UTC))], **options)


def text_in(part: Any) -> str:
    return part.get_content().replace("\r\n", "\n")


def saying(subject: str = "News", text: str = "text\n", html: str | None = None) -> Callable[[Digest[Any]], Message]:
    return lambda digest: Message(subject, text, html)


def larger_than_sockets(digest: Digest[Any]) -> Message:
    """A first try of which the end cannot be on its way when the server has read nothing."""
    return Message("News", ("x" * 900 + "\n") * (20_000 if digest.attempt == 1 else 1))


def channel(server: Mailbox, **options: Any) -> SMTP:
    given: dict[str, Any] = {"sender": SENDER, "hello": "test.example", **options}
    return SMTP("127.0.0.1", server.port, **given)


@asynccontextmanager
async def mailing(*arguments: Any, channel_options: dict[str, Any] | None = None, **options: Any) -> AsyncGenerator[
    tuple[SMTP, Mailbox]
]:  # fmt: skip
    """A mail server, and a channel to it."""
    async with mail_server(*arguments, **options) as server, channel(server, **channel_options or {}) as smtp:
        yield smtp, server


async def outcome(smtp: SMTP, *arguments: Any, **options: Any) -> Exception | None:
    """Return the error that ends a delivery; None if it went well."""
    try:
        await smtp(digest(*arguments, **options))
    except Exception as error:
        return error
    return None


# What a mail is


async def test_a_mail_has_the_headers_that_machines_and_people_expect_and_a_part_of_text_and_one_of_html() -> None:
    render = saying("Neues für Ann", "Grüße\n", "<p>Grüße</p>\n")
    async with mailing(channel_options={"render": render}) as (smtp, server):
        await smtp(digest(id="d1", key="Ann Müller <ann@example.org>"))
        [mail] = server.mails
    message = mail.message
    assert (mail.sender, mail.recipient) == ("news@shop.example", "ann@example.org")
    assert (message["From"], message["To"]) == (SENDER, "Ann Müller <ann@example.org>")
    assert (message["Subject"], message["Auto-Submitted"]) == ("Neues für Ann", "auto-generated")
    assert message["Message-ID"] == "<d1@shop.example>"
    assert message["References"].startswith("<timeline.")
    assert abs(message["Date"].datetime - datetime.now(UTC)) < timedelta(days=1)
    assert message["List-Unsubscribe"] is None
    assert [part.get_content_type() for part in message.iter_parts()] == ["text/plain", "text/html"]
    assert [text_in(part) for part in message.iter_parts()] == ["Grüße\n", "<p>Grüße</p>\n"]
    assert mail.data.isascii()


async def test_a_repeat_has_the_same_message_id_and_all_mails_of_a_timeline_refer_to_the_same_one() -> None:
    async with mailing() as (smtp, server):
        for key, name in [("a@x.example", "1"), ("a@x.example", "1"), ("a@x.example", "2"), ("b@x.example", "3")]:
            await smtp(digest(key=key, id=name))
        ids = [mail.id for mail in server.mails]
        threads = [mail.message["References"] for mail in server.mails]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert threads[0] == threads[1] == threads[2] != threads[3]


@pytest.mark.parametrize("name", ["x" * 500, "a b", "<>\r\nBcc: a@b.example", "ü", "\ud800", ".."])
async def test_any_id_of_a_digest_makes_a_message_id_that_is_one(name: str) -> None:
    async with mailing() as (smtp, server):
        await smtp(digest(id=name))
        [mail] = server.mails
    assert mail.message["Bcc"] is None
    local, _, domain = mail.id.strip("<>").partition("@")
    assert domain == "shop.example"
    assert local.isalnum()


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
async def test_no_subject_and_no_key_makes_a_header(text: str) -> None:
    async with mailing(channel_options={"render": saying(text), "to": "ann@example.org"}) as (smtp, server):
        await smtp(digest(key=text or "key"))
        [mail] = server.mails
    names = ["From", "To", "Subject", "Date", "Message-ID", "References", "Auto-Submitted", "MIME-Version"]
    assert [name for name in mail.message if not name.startswith("Content-")] == names
    assert not mail.message.defects
    subject = mail.message["Subject"]
    if text.startswith("=?"):
        assert subject == text
    assert len(subject) <= 200
    assert "\n" not in subject
    assert "\u202e" not in subject
    assert all(len(line) <= 998 for line in mail.data.splitlines())


@pytest.mark.parametrize(
    "text",
    [
        ".\r\n..\n.dots\n", "From me\n", "x" * 3_000, "日本語のテキスト\n" * 50, "mostly plain, ü\n" * 20,
        "nul \x00 and \x1b[31m\n", "one\rtwo\r\nthree\n", "\ud800\n", "", " trailing \t\n\n\n", "é" * 5_000,
    ],
    ids=range(11),
)  # fmt: skip
async def test_a_text_comes_as_it_was_sent(text: str) -> None:
    async with mailing(channel_options={"render": saying(text=text, html=text)}) as (smtp, server):
        await smtp(digest())
        [mail] = server.mails
    expected = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ud800", "?")
    for part in mail.message.iter_parts():
        assert text_in(part).removesuffix("\n") == expected.removesuffix("\n")
    assert all(len(line) <= 998 for line in mail.data.splitlines())
    assert mail.data.isascii()


async def test_a_link_to_unsubscribe_stands_in_one_piece_and_one_click_is_told() -> None:
    link = "https://shop.example/unsubscribe?of=" + "x" * 300

    def unsubscribe(key: str) -> str:
        return link if key[0] == "a" else ""

    options = {"unsubscribe": unsubscribe, "one_click": True}
    async with mailing(channel_options=options) as (smtp, server):
        await smtp(digest(key="ann@example.org"))
        await smtp(digest(key="bob@example.org"))
        ann, bob = (mail.message for mail in server.mails)
    assert ann["List-Unsubscribe"] == f"<{link}>"
    assert f"List-Unsubscribe: <{link}>\r\n".encode() in server.mails[0].data
    assert ann["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert bob["List-Unsubscribe"] is bob["List-Unsubscribe-Post"] is None


@pytest.mark.parametrize("link", ["https://x.example/\nBcc: a@b.example", "http://x.example/", "ftp://x", "https://ü"])
async def test_a_link_that_is_none_is_refused(link: str) -> None:
    with pytest.raises(InvalidArgument, match="unsubscribe must be a link"):
        SMTP("localhost", sender=SENDER, unsubscribe=link, one_click=True)


# Addresses


def always(address: Any) -> Callable[[str], Any]:
    return lambda key: address


@pytest.mark.parametrize("to", [["a@x.example", "b@x.example"], ("a@x.example",), "a@x.example, b@x.example"])
async def test_several_addresses_are_refused_by_a_sentence_that_names_fan_out(to: Any) -> None:
    with pytest.raises(InvalidArgument, match="fan_out"):
        SMTP("localhost", sender=SENDER, to=to)
    async with mailing(channel_options={"to": always(to)}) as (smtp, server):
        with pytest.raises(InvalidArgument, match="fan_out"):
            await smtp(digest())
        assert not server.connections


@pytest.mark.parametrize(
    "address",
    [
        "ann", "@example.org", "ann@", "ann@exa mple.org", "ann@example.org\r\nRCPT TO:<bob@example.org>",
        "ann@example.org> SIZE=1", "<ann@example.org", "a\ud800@example.org", "x" * 2_000 + "@example.org", "ann@..",
        "x" * 65 + "@example.org", "ann@" + "a" * 300 + ".org", "ann@straße.de", "ann@\u200d.example", "", None,
        "Ann Lee ann@example.org", "Ann <ann@example.org> x", "ann@example.org <bob@example.org>", '"a@b.example',
    ],
    ids=range(20),
)  # fmt: skip
async def test_what_is_no_address_becomes_a_dead_letter_and_no_command(address: str | None) -> None:
    async def to(key: str) -> str | None:
        return address

    async with mailing(channel_options={"to": to}) as (smtp, server):
        assert isinstance(await outcome(smtp), Reject)
        assert not server.connections


@pytest.mark.parametrize(
    ("address", "name", "recipient"),
    [
        ("<ann@example.org>", "", "ann@example.org"), ("J. Doe (Shop) <j@x.example>", "J. Doe (Shop)", "j@x.example"),
        ('"Doe, \\"J\\"" <j@x.example>', 'Doe, "J"', "j@x.example"), ("Ö, <j@x.example>", None, ""),
        ('"Ö, x" <j@x.example>', "Ö, x", "j@x.example"), ('"a b"@x.example', "", '"a b"@x.example'),
        ('"=?utf-8?q?x=0ABcc:_x?=" <j@x.example>', "=?utf-8?q?x=0ABcc:_x?=", "j@x.example"),
        ("ann@[127.0.0.1]", "", "ann@[127.0.0.1]"), ("a+b_c=d@x.example", "", "a+b_c=d@x.example"),
    ],
)  # fmt: skip
async def test_an_address_may_have_a_name_which_says_what_it_said(
    address: str, name: str | None, recipient: str
) -> None:
    async with mailing(channel_options={"to": always(address)}) as (smtp, server):
        error = await outcome(smtp)
        if name is None:
            assert isinstance(error, Reject)
            return
        [mail] = server.mails
    [to] = mail.message["To"].addresses
    assert (to.display_name, mail.recipient, mail.message["Bcc"]) == (name, recipient, None)


async def test_a_domain_in_any_script_is_told_in_ascii_and_a_local_part_where_the_server_takes_it() -> None:
    async with mailing(utf8=True) as (smtp, server):
        await smtp(digest(key="ann@bücher.example"))
        await smtp(digest(key="Jörg <jörg@bücher.example>"))
        ann, joerg = server.mails
    assert (ann.recipient, ann.options) == ("ann@xn--bcher-kva.example", [])
    assert (joerg.recipient, joerg.options) == ("jörg@xn--bcher-kva.example", ["BODY=8BITMIME", "SMTPUTF8"])
    assert joerg.message["To"] == "Jörg <jörg@xn--bcher-kva.example>"


async def test_a_local_part_that_the_server_does_not_take_is_told_in_a_sentence() -> None:
    async with mailing() as (smtp, server):
        error = await outcome(smtp, key="jörg@example.org")
        assert isinstance(error, Reject)
        assert "jörg@example.org (no SMTPUTF8)" in str(error)
        await smtp(digest())
        assert server.connections == 1


async def test_a_sender_that_the_server_does_not_take_is_a_fault_of_the_set_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with mailing(channel_options={"sender": "jörg@shop.example"}) as (smtp, _):
        assert isinstance(await outcome(smtp), ChannelError)
    assert [line.levelname for line in caplog.records if line.name.startswith("aiodigest")] == ["ERROR"]


# What answers mean


@pytest.mark.parametrize(
    ("stage", "reply", "kind"),
    [
        ("greeting", "421 4.3.2 busy", ChannelError), ("greeting", "554 5.7.1 not you", ChannelError),
        ("greeting", "what is this", ChannelError), ("EHLO", "421 bye", ChannelError),
        ("EHLO", "451 4.3.0 later", ChannelError),
        ("MAIL", "451 4.3.0 later", ChannelError), ("MAIL", "421 4.7.0 too many", ChannelError),
        ("MAIL", "530 5.7.0 log in", ChannelError), ("MAIL", "550 5.7.1 sender", ChannelError),
        ("MAIL", "553 no", ChannelError),
        ("RCPT", "450 4.2.1 greylisted", ChannelError), ("RCPT", "452 4.2.2 full", ChannelError),
        ("RCPT", "421 bye", ChannelError), ("RCPT", "530 5.7.0 log in", ChannelError),
        ("RCPT", "550 5.1.8 bad sender", ChannelError),
        ("RCPT", "552 5.2.2 full", ChannelError), ("RCPT", "552 full", ChannelError),
        ("RCPT", "550 5.1.1 unknown", Reject), ("RCPT", "550 no", Reject), ("RCPT", "554 5.7.1 no", Reject),
        ("RCPT", "554 5.7.1 <ann@example.org>: Relay access denied", ChannelError),
        ("RCPT", "550 relay not permitted", ChannelError), ("RCPT", "550 5.7.54 unable to relay", ChannelError),
        ("RCPT", "550 5.1.1 relay@example.org is unknown", Reject),
        ("RCPT", "551 moved", Reject), ("RCPT", "553 5.1.3 syntax", Reject), ("RCPT", "556 5.1.10 no mail", Reject),
        ("DATA", "451 later", ChannelError), ("DATA", "554 no", Reject), ("DATA", "503 5.5.1 what", ChannelError),
        ("DATA", "250 hm", ChannelError),
        ("content", "452 4.3.1 disk", ChannelError),
        ("end", "451 4.7.1 later", ChannelError), ("end", "421 4.4.2 bye", ChannelError),
        ("end", "552 5.2.2 full", ChannelError), ("end", "552 5.3.4 too big", Reject),
        ("end", "554 5.6.0 spam", Reject), ("end", "550 5.7.1 spam", Reject), ("end", "550 5.1.1 unknown", Reject),
        ("end", "what is this", OutcomeUnknown), ("end", "354 hm", OutcomeUnknown),
    ],
)  # fmt: skip
async def test_an_answer_says_what_becomes_of_the_digest_and_the_next_mail_goes_out(
    stage: str, reply: str, kind: type[Exception]
) -> None:
    async with mailing(one_after_another(stage, reply)) as (smtp, server):
        error = await outcome(smtp)
        assert type(error) is kind
        assert "\n" not in str(error)
        assert not server.mails
        assert await outcome(smtp) is None
        [mail] = server.mails
        assert mail.recipient == "ann@example.org"


async def test_a_server_that_knows_no_ehlo_gets_a_helo_at_once() -> None:
    async with mailing(script(EHLO="502 5.5.1 what")) as (smtp, server):
        await smtp(digest())
        assert (len(server.mails), server.connections) == (1, 1)


async def test_a_server_that_relays_nothing_for_us_is_a_fault_of_the_set_up(caplog: pytest.LogCaptureFixture) -> None:
    async with mailing(script(RCPT="554 5.7.1 Relay access denied")) as (smtp, _):
        assert isinstance(await outcome(smtp), ChannelError)
    [line] = [line for line in caplog.records if line.name.startswith("aiodigest")]
    assert (line.levelname, "check host, port" in line.getMessage()) == ("ERROR", True)


@pytest.mark.parametrize("stage", ["greeting", "EHLO", "MAIL", "RCPT"])
async def test_an_answer_too_many_is_not_the_answer_to_the_next_command(stage: str) -> None:
    async with mailing(one_after_another(stage, "250 ok\r\n550 5.1.1 unknown")) as (smtp, server):
        assert type(await outcome(smtp)) in (ChannelError, type(None))
        assert await outcome(smtp) is None
        assert server.mails


async def test_an_answer_too_many_after_a_mail_is_not_the_first_one_to_the_next() -> None:
    async with mailing(one_after_another("end", "250 ok\r\n550 5.1.1 unknown")) as (smtp, server):
        assert await outcome(smtp) is None
        assert await outcome(smtp) is None
        assert server.connections == 2


@pytest.mark.parametrize(
    ("reply", "asked", "mutes"),
    [("550 5.1.1 unknown", True, True), ("550 5.1.1 unknown", False, False), ("550 5.7.1 no", True, False)],
)
async def test_a_recipient_whom_nobody_knows_is_muted_if_asked(reply: str, asked: bool, mutes: bool) -> None:
    async with mailing(one_after_another("RCPT", reply), channel_options={"mute": asked}) as (smtp, _):
        error = await outcome(smtp)
        assert isinstance(error, Reject)
        assert error.mute is mutes


@pytest.mark.parametrize("stage", ["greeting", "EHLO", "MAIL", "RCPT", "DATA", "content"])
async def test_a_connection_that_is_lost_before_the_end_of_the_mail_is_a_failure(stage: str) -> None:
    render = larger_than_sockets if stage == "content" else saying()
    async with mailing(one_after_another(stage, DIE), channel_options={"render": render}) as (smtp, server):
        error = await outcome(smtp)
        assert type(error) is ChannelError
        assert await outcome(smtp, attempt=2) is None
        assert len(server.mails) == 1


async def test_an_answer_in_the_middle_of_the_contents_counts_and_the_rest_is_not_sent() -> None:
    options = {"render": larger_than_sockets}
    async with mailing(one_after_another("content", "552 5.3.4 too much"), channel_options=options) as (smtp, server):
        assert type(await outcome(smtp)) is Reject
        assert await outcome(smtp, attempt=2) is None
        assert server.connections == 2


async def test_a_connection_that_is_lost_after_the_end_of_the_mail_is_an_unknown_outcome() -> None:
    async with mailing(one_after_another("end", TAKE_AND_DIE)) as (smtp, server):
        assert type(await outcome(smtp, id="1")) is OutcomeUnknown
        assert await outcome(smtp, id="1") is None
        assert len({mail.id for mail in server.mails}) == 1


@pytest.mark.parametrize("stage", ["greeting", "EHLO", "MAIL", "RCPT", "DATA", "content", "end"])
async def test_a_server_that_does_not_answer_takes_no_longer_than_the_timeout(stage: str, clock: Clock) -> None:
    render = larger_than_sockets if stage == "content" else saying()
    async with mailing(one_after_another(stage, HANG), channel_options={"render": render}) as (smtp, server):
        sending = asyncio.create_task(outcome(smtp))
        await server.reaches(stage)
        clock.ahead += 31
        error = await sending
        assert type(error) is (OutcomeUnknown if stage == "end" else ChannelError)
        assert "no answer within 30 s" in str(error)
        assert await outcome(smtp, attempt=2) is None
        assert server.connections == 2


async def test_a_server_that_is_down_is_a_failure() -> None:
    async with mailing() as (smtp, server):
        await smtp(digest())
        await server.stop()
        error = await outcome(smtp)
        assert type(error) is ChannelError
        assert "connecting" in str(error)
        await server.start()
        await smtp(digest())


async def test_a_mail_that_is_larger_than_the_server_takes_is_not_sent() -> None:
    async with mailing(size=10_000, channel_options={"render": saying(text="x" * 20_000)}) as (smtp, server):
        error = await outcome(smtp)
        assert isinstance(error, Reject)
        assert "10000 bytes" in str(error)
        assert not [said for said in server.said if said.startswith("MAIL")]


async def test_a_size_of_so_many_digits_that_it_is_no_number_is_no_limit() -> None:
    async with mailing() as (smtp, server):
        await smtp(digest())
        assert smtp._server is not None
        smtp._server._client.esmtp_extensions["size"] = "9" * 5_000
        await smtp(digest())
        assert len(server.mails) == 2


# One connection


async def test_all_mails_go_through_one_connection_one_after_another() -> None:
    async with mailing() as (smtp, server):
        await asyncio.gather(*(smtp(digest(key=f"{number}@x.example")) for number in range(50)))
        assert [mail.recipient for mail in server.mails] == [f"{number}@x.example" for number in range(50)]
        verbs = [said.partition(" ")[0] for said in server.said]
        assert verbs == ["greeting", "EHLO", *["MAIL", "RCPT", "DATA", "content", "end"] * 50]
    assert not server.open


async def test_a_kept_connection_that_the_server_has_closed_is_opened_again() -> None:
    async with mailing() as (smtp, server):
        await smtp(digest())
        server.hang_up()
        await smtp(digest())
        assert (server.connections, len(server.mails)) == (2, 2)


@pytest.mark.parametrize("stage", ["MAIL", "RCPT"])
@pytest.mark.parametrize("reply", [DIE, "421 4.7.0 enough of this connection"])
async def test_a_kept_connection_that_ends_before_the_contents_costs_no_attempt(stage: str, reply: str) -> None:
    async with mailing(one_after_another(stage, None, reply)) as (smtp, server):
        await smtp(digest())
        await smtp(digest())
        assert (server.connections, len(server.mails)) == (2, 2)


async def test_a_connection_that_was_idle_and_is_dead_is_found_out_and_replaced(clock: Clock) -> None:
    async with mailing(one_after_another("RSET", None, HANG)) as (smtp, server):
        await smtp(digest())
        clock.ahead += IDLE + 1
        await smtp(digest())
        clock.ahead += IDLE + 1
        sending = asyncio.create_task(smtp(digest()))
        await server.reaches("RSET", 2)
        clock.ahead += 6
        await sending
        assert (server.connections, len(server.mails)) == (2, 3)


async def test_who_gets_no_turn_is_tried_again_without_a_charge(clock: Clock) -> None:
    async with mailing(one_after_another("MAIL", HANG)) as (smtp, server):
        first, second = (asyncio.create_task(outcome(smtp)) for _ in range(2))
        await server.reaches("MAIL")
        clock.ahead += 31
        assert isinstance(await first, ChannelError)
        deferred = await second
        assert isinstance(deferred, RetryAfter)
        assert not deferred.pause


async def test_who_waits_for_a_connection_that_cannot_be_made_shares_its_end() -> None:
    async with mailing(one_after_another("greeting", HANG)) as (smtp, server):
        sending = [asyncio.create_task(outcome(smtp)) for _ in range(20)]
        await server.reaches("greeting")
        server.hang_up()
        ends = [await each for each in sending]
        assert {type(end) for end in ends} == {ChannelError}
        assert server.connections == 1
        await smtp(digest())


async def test_a_delivery_that_is_cancelled_leaves_the_next_one_a_connection_in_order() -> None:
    for stage in ("greeting", "MAIL", "DATA", "end"):
        async with mailing(one_after_another(stage, HANG)) as (smtp, server):
            sending = asyncio.create_task(outcome(smtp))
            waiting = asyncio.create_task(outcome(smtp))
            await server.reaches(stage)
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            assert await waiting is None
            assert len(server.mails) == 1


def test_a_channel_may_be_used_in_one_event_loop_after_another() -> None:
    smtp: SMTP | None = None

    async def send() -> None:
        nonlocal smtp
        async with mail_server() as server:
            smtp = smtp or channel(server)
            smtp._options.__dict__["port"] = server.port
            await smtp(digest())
            await smtp.aclose()
            await smtp(digest())
            assert len(server.mails) == 2
            await smtp.aclose()

    asyncio.run(send())
    asyncio.run(send())


async def test_a_channel_that_two_event_loops_use_in_turn_keeps_one_connection_at_most() -> None:
    async with mail_server() as server:
        smtp, loop = channel(server), asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            for _ in range(3):
                await smtp(digest())
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(smtp(digest()), loop))
            assert len(server.mails) == 6
            await smtp.aclose()  # in the loop that does not have it
            await server.is_left()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)
            loop.close()


async def test_who_leaves_a_connection_lets_the_mail_that_is_under_way_end() -> None:
    async with mail_server() as server:
        smtp = channel(server)
        sending = asyncio.create_task(smtp(digest()))
        await server.reaches("RCPT")
        assert smtp._server is not None
        smtp._server.leave()
        await sending
        await server.is_left()
        assert len(server.mails) == 1


async def test_mails_that_wait_as_a_channel_is_closed_are_tried_again_and_no_connection_is_left() -> None:
    async with mail_server(script(end=HANG)) as server:
        smtp = channel(server)
        ends = [asyncio.create_task(outcome(smtp)) for _ in range(3)]
        await server.reaches("end")
        server.script = lambda stage, argument: None
        await smtp.aclose()
        assert [type(await end) for end in ends] == [OutcomeUnknown, RetryAfter, RetryAfter]
        assert (server.connections, len(server.mails)) == (1, 0)
        await server.is_left()
        await smtp(digest())
        await smtp.aclose()
        assert len(server.mails) == 1


async def test_closing_says_goodbye() -> None:
    async with mailing() as (smtp, server):
        await smtp(digest())
    assert server.said[-1] == "QUIT"


# TLS, logins and secrets


AUTHORITY = trustme.CA()


def served_as(name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert(name).configure_cert(context)  # pyright: ignore[reportUnknownMemberType]
    return context


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)  # pyright: ignore[reportUnknownMemberType]
    return context


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
async def test_mails_and_passwords_go_through_tls(tls: str) -> None:
    options = {"tls": tls, "tls_context": trusting(), "username": "shop", "password": PASSWORD}
    serving = {"tls": served_as("127.0.0.1"), "implicit": tls == "implicit", "password": PASSWORD}
    async with mailing(channel_options=options, **serving) as (smtp, server):
        await smtp(digest())
        await smtp(digest())
        assert (server.connections, len(server.mails)) == (1, 2)
        assert ("STARTTLS" in server.said) == (tls == "starttls")


@pytest.mark.parametrize("tls", ["starttls", "implicit"])
@pytest.mark.parametrize("served", ["elsewhere.example", None])
async def test_a_server_without_tls_or_with_another_name_gets_nothing_and_the_log_names_the_set_up(
    tls: str, served: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    serving = {"tls": served and served_as(served), "implicit": tls == "implicit"}
    async with mailing(channel_options={"tls": tls, "tls_context": trusting()}, **serving) as (smtp, server):
        assert isinstance(await outcome(smtp), ChannelError)
        assert isinstance(await outcome(smtp), ChannelError)
        assert not [said for said in server.said if said.startswith(("MAIL", "AUTH"))]
    lines = [line for line in caplog.records if line.name.startswith("aiodigest")]
    assert [line.levelname for line in lines] == ["ERROR"]
    assert "rejects these settings: check host, port, tls" in lines[0].getMessage()


async def test_a_wrong_password_is_told_once_until_a_mail_goes_out_and_is_shown_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    options = {"username": "shop", "password": PASSWORD}
    async with mailing(channel_options=options, password="another") as (smtp, server):
        ends = [await outcome(smtp) for _ in range(3)]
        assert {type(end) for end in ends} == {ChannelError}
        assert "535" in str(ends[0])
        server.password = PASSWORD
        await smtp(digest())
        server.password = "another"
        await smtp.aclose()
        assert isinstance(await outcome(smtp), ChannelError)
    lines = [line for line in caplog.records if line.name.startswith("aiodigest")]
    assert [line.levelname for line in lines] == ["ERROR", "ERROR"]
    told = " ".join([repr(smtp), repr(vars(smtp)), *map(repr, ends), *(line.getMessage() for line in lines)])
    assert PASSWORD not in told


@pytest.mark.parametrize("password", [PASSWORD, "x9!"])
async def test_a_password_that_a_server_quotes_is_shown_in_no_form(
    password: str, caplog: pytest.LogCaptureFixture
) -> None:
    forms = [password, *(b64encode(each.encode()).decode() for each in (password, f"\0shop\0{password}"))]
    options = {"username": "shop", "password": password}
    reply = f"535 5.7.8 not {' '.join(forms)} {forms[0].upper()}"
    async with mailing(script(AUTH=reply), channel_options=options, password="another") as (smtp, _):
        told = f"{await outcome(smtp)} {caplog.text}"
    assert "535" in told
    assert not [form for form in (*forms, forms[0].upper()) if form in told], told


async def test_a_server_that_cannot_check_logins_just_now_is_no_fault_of_the_set_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"username": "shop", "password": PASSWORD}
    async with mailing(script(AUTH="454 4.7.0 later"), channel_options=options, password=PASSWORD) as (smtp, _):
        assert isinstance(await outcome(smtp), ChannelError)
    assert not [line for line in caplog.records if line.name.startswith("aiodigest")]


@pytest.mark.parametrize(
    ("host", "port", "tls", "expected"),
    [
        ("mail.example", None, None, ("starttls", 587)), ("mail.example", 465, None, ("implicit", 465)),
        ("mail.example", 25, None, ("starttls", 25)), ("localhost", None, None, ("none", 25)),
        ("127.0.0.1", 1025, None, ("none", 1025)), ("::1", None, None, ("none", 25)),
        ("10.0.0.1", None, None, ("starttls", 587)), ("localhost", None, "starttls", ("starttls", 587)),
        ("mail.example", None, "implicit", ("implicit", 465)), ("localhost", 465, None, ("implicit", 465)),
    ],
)  # fmt: skip
def test_tls_is_the_default_unless_the_server_is_on_this_machine(
    host: str, port: int | None, tls: Any, expected: tuple[str, int]
) -> None:
    options = SMTP(host, port, sender=SENDER, tls=tls)._options
    assert (options.tls, options.port) == expected


def test_a_password_goes_to_another_machine_over_tls_alone() -> None:
    with pytest.raises(ConfigurationError, match="TLS"):
        SMTP("mail.example", sender=SENDER, tls="none", username="shop", password=PASSWORD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sender": "nobody"}, {"sender": "a@x.example\nBcc: b@x.example"}, {"to": "nobody"}, {"to": 7}, {"tls": "ssl"},
        {"username": "shop"}, {"password": PASSWORD}, {"one_click": True}, {"timeout": 0}, {"unsubscribe": "x"},
        {"unsubscribe": 7}, {"render": "x"}, {"render": Message},
        {"hello": "a\r\nRSET"}, {"hello": "\u00fc"}, {"hello": ""}, {"hello": 5}, {"hello": "a b"},
        {"username": "u", "password": f"{PASSWORD}\ud800"}, {"username": "u\0", "password": PASSWORD},
        {"username": 5, "password": PASSWORD}, {"username": "u", "password": ""},
        {"username": "", "password": PASSWORD},
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_that_is_not_allowed_is_refused_at_once(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"sender": SENDER, **wrong}
    with pytest.raises(InvalidArgument) as error:
        SMTP("localhost", **options)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    "host", ["localhost:1025", "[::1]:25", "[::1]", "smtp://mail.example", "me@mail.example", "a b", ""]
)
def test_a_host_comes_without_a_port_and_everything_else(host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"host must be a name or an address, without a port \(give port=\)"):
        SMTP(host, sender=SENDER)


def test_a_missing_library_is_told_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "aiodigest.channels._mailserver")
    monkeypatch.setitem(sys.modules, "aiosmtplib", None)
    with pytest.raises(ConfigurationError, match=r"aiodigest\[smtp\]"):
        SMTP("localhost", sender=SENDER)


# All of it with an engine


def lines(digest: Digest[Any]) -> Message:
    return Message("News", "".join(f"{record.value}\n" for record in digest.records))


async def test_a_worker_that_stops_in_the_middle_of_a_mail_leaves_it_to_be_sent_again_under_the_same_id() -> None:
    backend = await holding("news")
    async with mail_server(one_after_another("end", TAKE_AND_HANG)) as server:
        smtp = channel(server, to="ann@example.org", render=lines)
        for times in (1, 2):
            async with engine_on(backend, drain_timeout=0 if times == 1 else 60).delivering(smtp):
                await server.reaches("end", times)
        assert len(server.mails) == 2
        assert len({mail.id for mail in server.mails}) == 1
        assert not server.open


@pytest.mark.server_faults
@pytest.mark.parametrize("seed", range(3))
async def test_through_every_trouble_each_record_comes_once_or_under_the_same_message_id(seed: int) -> None:
    """The server is down for a minute, and dies before and after it has taken a mail; every third mail is put off, and
    one address in ten is unknown."""
    people = [f"{'bad' if number % 10 == seed else 'good'}{number}@x.example" for number in range(40)]
    count, dies = Counter[str](), iter([DIE, TAKE_AND_DIE] * 4)

    def answers(stage: str, argument: str) -> str | None:
        count[stage] += 1
        if stage == "RCPT" and "bad" in argument:
            return "550 5.1.1 nobody is here"
        if stage == "MAIL" and count[stage] % 3 == seed:
            return "451 4.3.0 later"
        if stage == "end" and count[stage] % 7 == seed:
            return next(dies, None)
        return None

    retry = RetryPolicy(max_attempts=20, backoff=lambda attempt: 20.0)
    engine = DigestEngine[JSON](namespace="mail", policy=Policy(minimum_delay=60), retry=retry, concurrency=8)
    expected: set[str] = set()
    async with mail_server(answers) as server:
        engine.deliver(channel(server, render=lines))
        async with TestEngine(engine) as t:
            for step in range(6):
                for person in people:
                    record = f"{person}/{step}"
                    await engine.add(person, record, record_id=record)
                    expected.add(record)
                if step == 2:
                    await server.stop()
                await t.advance(seconds=60)
                if step == 2:
                    await server.start()
            await t.advance(hours=3)
            letters = [letter async for letter in engine.dead_letters()]
            assert (await engine.stats()).waiting == 0
    ids_of: dict[str, set[str]] = {}
    for mail in server.mails:
        for record in mail.message.get_content().split():
            ids_of.setdefault(record, set()).add(mail.id)
    buried = Counter(record.id for letter in letters for record in letter.records)
    assert set(ids_of) == {record for record in expected if record.startswith("good")}
    assert max(map(len, ids_of.values())) == 1
    assert buried == Counter(record for record in expected if record.startswith("bad"))
    assert {delivery.result for delivery in t.attempts} == {"delivered", "failed", "unknown", "rejected"}
