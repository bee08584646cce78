"""Ten thousand hostile digests in the format of each channel: well-formed, within what a service takes, and inert."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from email.policy import default
from random import Random
from typing import Any, NamedTuple, TypeVar, cast

import pytest
from standardwebhooks import Webhook as Verifier
from test_chat import HOSTILE as OF_CHATS
from test_chat import SERVICES, Chat, inspected, read
from test_rendering import PIECES, is_harmless
from test_smtp import HOSTILE as OF_MAILS
from test_webhook import SECRET

from aiodigest import Digest, InvalidArgument, Record
from aiodigest.channels import Console, Webhook
from aiodigest.channels._mail import address_of, write
from aiodigest.channels.local import as_json
from aiodigest.rendering import Block, Message, Render, Template, plain

T = TypeVar("T")

ALL = list(dict.fromkeys([*PIECES, *OF_CHATS, *OF_MAILS]))
SHORT, LONG = ([piece for piece in ALL if (len(piece) < 1_000) is is_short] for is_short in (True, False))
NAMES = ["title", "text", "name", "message", "event", "at", "host", "a.b"]
THEN = datetime(2026, 11, 30, 14, 5, tzinfo=UTC)
SENDER = address_of("Shop <news@shop.example>", "sender")


class Hostile:
    """What strangers send; the same for the same ``number``."""

    def __init__(self, number: int) -> None:
        self._random = Random(number)
        self._is_long = self._random.random() < 0.05  # of a megabyte, which takes long

    def text(self) -> str:
        draw = self._random
        parts = [draw.choice(SHORT) for _ in range(draw.randrange(4))]
        if self._is_long and draw.random() < 0.3:
            parts.append(draw.choice(LONG))
        if draw.random() < 0.3:
            parts.append("".join(chr(draw.randrange(draw.choice((0x80, 0x3000, 0x110000)))) for _ in range(8)))
        draw.shuffle(parts)
        return "".join(parts)

    def name(self) -> str:
        """Return a key or an id, which an engine takes up to a length."""
        return self.text()[:1_000]

    def scalar(self) -> Any:
        draw = self._random
        numbers = (draw.randrange(-(10**20), 10**20), draw.uniform(-1e300, 1e300), math.nan, math.inf, 10**5000)
        others = (None, True, b"\xff\x00", THEN, object, *numbers)
        return self.text() if draw.random() < 0.7 else draw.choice(others)

    def value(self, deep: int = 3) -> Any:
        draw = self._random
        match draw.randrange(4) if deep else 0:
            case 0 | 1:
                return self.scalar()
            case 2:
                return [self.value(deep - 1) for _ in range(draw.randrange(4))]
            case _:
                names = [draw.choice(NAMES) if draw.random() < 0.6 else self.text() for _ in range(draw.randrange(4))]
                return {name: self.value(deep - 1) for name in names}

    def digest(self) -> Digest[Any]:
        draw = self._random
        times = (THEN - timedelta(minutes=draw.randrange(10**6)) for _ in range(draw.randrange(6)))
        records = [Record(self.name(), self.value(), time) for time in times]
        return Digest(self.name(), records, self.name(), dropped=draw.choice((0, 1, 2**53)), next_due=THEN)


def raw(digest: Digest[Any]) -> Message:
    """Show a digest as no render should: with nothing made harmless."""
    texts = [each.value if isinstance(each.value, str) else ascii(each.id) for each in digest.records]
    kinds = ("heading", "item", "note")
    blocks = [Block(cast("Any", kinds[n % 3]), text, digest.key) for n, text in enumerate(texts)]
    return Message(digest.key, "\n".join(texts), digest.id, blocks)


RENDERS: list[Render] = [plain, Template(), Template(group_by="host", fields=["title", "a.b", "at"], locale="de"), raw]


def ended(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast("T", end.value)
    raise AssertionError("it waits")


# What each format is, and what it would be refused for


def of_chat(kind: Chat) -> Callable[[Digest[Any], Render], None]:
    chats = {render: kind("https://chat.example/topic", render=render) for render in RENDERS}

    def check(digest: Digest[Any], render: Render) -> None:
        chat: Any = chats[render]
        url, headers, body = ended(chat._request(chat._url, digest))
        assert (url.host, headers) == ("chat.example", {"Content-Type": "application/json"})
        inspected(kind, read(kind, body))

    return check


def size(value: Any) -> int:
    """Return how many characters a value holds, and how many parts."""
    if isinstance(value, dict):
        return sum(size(name) + size(each) + 1 for name, each in cast("dict[str, Any]", value).items())
    if isinstance(value, list):
        return sum(size(each) + 1 for each in cast("list[Any]", value))
    return len(value) if isinstance(value, str) else 6_000


def joined(text: str) -> str:
    """Return a text as JSON has it: of two surrogates that stand side by side it makes a character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


def told(value: Any) -> Any:
    """Return a value as JSON has it; None for what it has no form for, which may be told in any way."""
    if isinstance(value, dict):
        return {joined(name): told(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [told(each) for each in cast("list[Any]", value)]
    if isinstance(value, str):
        return joined(value)
    is_plain = isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < 1e301)
    return value if is_plain else None


def resembles(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        pairs = cast("dict[str, Any]", expected)
        return found.keys() == pairs.keys() and all(resembles(found[name], pairs[name]) for name in pairs)
    if isinstance(expected, list):
        return all(map(resembles, found, cast("list[Any]", expected))) and len(found) == len(cast("Any", expected))
    return expected is None or found == expected


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def check_json(body: bytes, digest: Digest[Any]) -> None:
    """What programs get is whole, since they are no people; and one line of ASCII, in which nothing breaks a line."""
    assert body.isascii()
    assert body.decode().isprintable()
    found = json.loads(body, parse_constant=refuse)
    assert (found["id"], found["key"], found["dropped"]) == (joined(digest.id), joined(digest.key), digest.dropped)
    assert [each["id"] for each in found["records"]] == [joined(each.id) for each in digest.records]
    for record, each in zip(digest.records, found["records"], strict=True):
        assert resembles(each["value"], told(record.value))
    assert len(body) <= 6 * (2 * sum(size(record.value) + 1_100 for record in digest.records) + 4_000)


WEBHOOK = Webhook("https://hooks.example/x", secrets=SECRET)


def check_webhook(digest: Digest[Any], render: Render) -> None:
    webhook: Any = WEBHOOK
    url, headers, body = ended(webhook._request(webhook._url, digest))
    assert str(url) == "https://hooks.example/x"
    assert headers.keys() == {"Content-Type", "webhook-id", "webhook-timestamp", "webhook-signature"}
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,200}", headers["webhook-id"])
    assert all(re.fullmatch(r"[!-~]{1,300}", value.replace(" ", "_")) for value in headers.values())
    Verifier(SECRET).verify(body, headers)
    check_json(body, digest)


def check_file(digest: Digest[Any], render: Render) -> None:
    line = as_json(digest)
    assert line.endswith(b"\n")
    check_json(line[:-1], digest)


class Parts(NamedTuple):
    """The parts of a mail, as the standard library reads them."""

    text: str
    html: str | None


def as_sent(text: str) -> str:
    return text.encode(errors="replace").decode().replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def check_mail(digest: Digest[Any], render: Render) -> None:
    message, name = render(digest), digest.key
    try:
        recipient = address_of(f"{name} <ann@example.org>", "to")
    except InvalidArgument:
        name, recipient = "", address_of("ann@example.org", "to")
    mail = write(digest, message, SENDER, recipient, "https://shop.example/unsubscribe", True)
    assert (mail.sender, mail.recipient, mail.utf8) == ("news@shop.example", "ann@example.org", False)
    assert mail.data.isascii()
    assert b"\0" not in mail.data
    assert max(map(len, mail.data.split(b"\r\n"))) <= 998
    assert not re.search(rb"\r(?!\n)|(?<!\r)\n", mail.data)
    assert len(mail.data) < 3 * 4 * (len(message.text) + len(message.html or "")) + 10_000
    found: Any = message_from_bytes(mail.data, policy=default)
    headers = [header for header in found if not header.startswith(("Content-", "MIME-"))]
    lists = ["List-Unsubscribe", "List-Unsubscribe-Post"]
    ours = ["From", "To", "Subject", "Date", "Message-ID", "References", "Auto-Submitted", *lists]
    assert headers == ours
    [to], [sender] = found["To"].addresses, found["From"].addresses
    assert (to.addr_spec, sender.addr_spec, sender.display_name) == ("ann@example.org", "news@shop.example", "Shop")
    assert '"' in name or "".join(to.display_name.split()) == "".join(name.split())  # Python puts spaces between words
    assert is_harmless(found["Subject"])
    assert "\n" not in found["Subject"]
    assert len(found["Subject"]) <= 200
    assert re.fullmatch(r"<[\w.-]+@shop\.example>", found["Message-ID"], re.ASCII)
    assert not found.defects
    assert not any(found[header].defects for header in ours)
    parts = [*found.iter_parts()] if found.is_multipart() else [found]
    html = [] if message.html is None else [("text/html", message.html)]
    for part, (kind, text) in zip(parts, [("text/plain", message.text), *html], strict=True):
        assert (part.get_content_type(), part.get_content_charset()) == (kind, "utf-8")
        assert not part.defects
        assert as_sent(part.get_content()) == as_sent(text)


def check_console(digest: Digest[Any], render: Render) -> None:
    message = render(digest)
    for encoding in ("ascii", "utf-8"):
        file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")
        Console(file, render=render)._print(digest.key, message)
        file.seek(0)
        printed = file.read()
        assert not any(line[:2].strip() for line in printed.split("\n")[1:])  # nobody begins a digest of their own
        assert printed.endswith("\n\n")
        assert is_harmless(printed)
        assert len(printed) < 12 * (len(digest.key) + len(message.subject) + 3 * len(message.text)) + 10


FORMATS: dict[str, Callable[[Digest[Any], Render], None]] = {
    **{kind.__name__: of_chat(kind) for kind in SERVICES},
    "Webhook": check_webhook, "File": check_file, "SMTP": check_mail, "Console": check_console,
}  # fmt: skip


def check(of: str, numbers: range) -> None:
    for number in numbers:
        digest = Hostile(number).digest()
        render = RENDERS[number % len(RENDERS)]
        try:
            FORMATS[of](digest, render)
        except Exception as error:
            error.add_note(f"digest {number} as {of}")
            raise


@pytest.mark.parametrize("of", FORMATS)
def test_no_hostile_digest_breaks_a_format_or_does_any_harm_in_it(of: str) -> None:
    check(of, range(200))


@pytest.mark.fuzz
@pytest.mark.parametrize("of", FORMATS)
def test_none_of_ten_thousand_hostile_digests_breaks_a_format_or_does_any_harm_in_it(of: str) -> None:
    check(of, range(10_000))
