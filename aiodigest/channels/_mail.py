"""A digest as a mail: addresses, headers, and parts of text and HTML. Nothing here knows a server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from email.header import Header
from email.message import EmailMessage
from email.policy import SMTP, SMTPUTF8, EmailPolicy
from email.utils import format_datetime
from hashlib import sha256
from typing import Any, NamedTuple, Self

from aiodigest import Digest, InvalidArgument
from aiodigest.errors import FLAG, JOINERS, shown
from aiodigest.logs import current_namespace
from aiodigest.rendering import Message

LONGEST_ADDRESS = 1000  # characters, with a name before it
LONGEST_LOCAL, LONGEST_DOMAIN = 64, 255  # bytes, of RFC 5321
LONGEST_SUBJECT = 200  # characters
LONGEST_LINE = 998  # bytes, of RFC 5322
ONE = "one address: each receiver is a timeline of its own, and aiodigest.channels.fan_out adds a record to several"

QUOTED = r'"(?:[^"\\]|\\.)*"'
ADDRESS = re.compile(
    rf"\s*(?:(?P<name>{QUOTED}\s*|[^\"<>@,;:]*)<)?"
    rf"(?P<local>{QUOTED}|[^\s\"(),:;<>@\[\\\]]+)@(?P<domain>[^\s\"(),;<>@\\]+)(?(name)>)\s*"
)
DOMAIN = re.compile(r"(?!\.)[A-Za-z0-9._-]+|\[[A-Za-z0-9.:]+\]")
OTHERS = set("\u00df\u03c2\u200c\u200d")  # what Python's IDNA makes of these is another domain by now
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
PLAIN_TEXT = re.compile(r"[\t\n -~]*")
LINK = re.compile(r"(?:https?://|mailto:)[!-;=?-~]+")


class Address(NamedTuple):
    """The sender of a mail, or who gets it."""

    name: str
    local: str  # quoted, if it has to be
    domain: str  # in ASCII

    @property
    def spec(self) -> str:
        """The address as servers know it."""
        return f"{self.local}@{self.domain}"

    def __str__(self) -> str:
        return f"{_phrase(self.name)} <{self.spec}>" if self.name else self.spec


@dataclass(frozen=True)
class Mail:
    """A mail as it goes out, with its envelope."""

    sender: str
    recipient: str
    data: bytes
    utf8: bool  # only a server that takes SMTPUTF8 can take it


class Verbatim(str):
    """The value of a header that is written as it is. Python would take it apart first, and so decode what a stranger
    has encoded, line ends too; and it would fold or encode ids and links that are long."""

    name: str

    def __new__(cls, name: str, text: str) -> Self:
        made = super().__new__(cls, text)
        made.name = name
        return made

    def fold(self, *, policy: EmailPolicy) -> str:
        return f"{self.name}: {self}{policy.linesep}"


def address_of(text: object, what: str) -> Address:
    """Return an address, with or without a name before it; its domain is in ASCII. Raises InvalidArgument."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{what} must be {ONE}; not {shown(text)}")
    # `isprintable` is False for everything that could begin another header, and for lone surrogates
    is_text = len(text) <= LONGEST_ADDRESS and all(c.isprintable() or c in JOINERS for c in text)
    found = ADDRESS.fullmatch(text) if is_text else None
    if found is None or len(found["local"].encode()) > LONGEST_LOCAL:
        bare = re.sub(QUOTED, "", text)
        allowed = ONE if bare.count("@") > 1 and "," in bare else "an address like ann@example.org"
        raise InvalidArgument(f"{what} must be {allowed}; not {shown(text)}")
    name = (found["name"] or "").strip()
    if name.startswith('"'):
        name = re.sub(r"\\(.)", r"\1", name[1:-1])
    return Address(name, found["local"], _ascii(found["domain"], what))


def _ascii(domain: str, what: str) -> str:
    """Return a domain as servers know it."""
    found = domain
    if not domain.isascii():
        if OTHERS & set(domain):
            raise InvalidArgument(f"{what} needs its domain in ASCII ('xn--...'), not as {shown(domain)}")
        try:
            found = domain.encode("idna").decode()
        except UnicodeError:
            found = ""
    if len(found) > LONGEST_DOMAIN or not DOMAIN.fullmatch(found):
        raise InvalidArgument(f"{what} has no domain that there may be: {shown(domain)}")
    return found


def link_of(text: object, what: str, *, one_click: bool) -> str:
    """Return a link for a header. Raises InvalidArgument."""
    scheme = "https" if one_click else "https, http or mailto"
    link = text if isinstance(text, str) else ""
    is_link = len(link) < LONGEST_LINE - 100 and LINK.fullmatch(link)
    if not is_link or (one_click and not link.startswith("https://")):
        raise InvalidArgument(f"{what} must be a link in ASCII of {scheme}, not {shown(text)}")
    return link


def subject_line(text: str) -> str:
    """Return a text from anybody in one line, which is short and ends no header."""
    words = " ".join(text[: 10 * LONGEST_SUBJECT].encode(errors="replace").decode().split())
    flags = {index for flag in FLAG.finditer(words) for index in range(*flag.span())}
    kept = "".join(c for index, c in enumerate(words) if c.isprintable() or c in JOINERS or index in flags)
    return kept if len(kept) <= LONGEST_SUBJECT else f"{kept[: LONGEST_SUBJECT - 1]}…"


def write(
    digest: Digest[Any], message: Message, sender: Address, recipient: Address, unsubscribe: str, one_click: bool
) -> Mail:
    """Return a digest as a mail. A repeat, under the same id of the digest, has the same ``Message-ID``."""
    utf8 = not (sender.local.isascii() and recipient.local.isascii())
    mail = EmailMessage((SMTPUTF8 if utf8 else SMTP).clone(cte_type="7bit"))
    name = digest.id if PLAIN_NAME.fullmatch(digest.id) and len(digest.id) <= LONGEST_LOCAL else _hashed(digest.id)
    # All mails of a timeline refer to one that was never sent, so that readers see them as a thread.
    root = _hashed("\n".join((current_namespace(), sender.spec, digest.key)))
    headers = {
        "From": str(sender), "To": str(recipient), "Subject": _unstructured(subject_line(message.subject)),
        "Date": format_datetime(datetime.now(UTC)), "Message-ID": f"<{name}@{sender.domain}>",
        "References": f"<timeline.{root}@{sender.domain}>", "Auto-Submitted": "auto-generated",
    }  # fmt: skip
    if unsubscribe:
        headers["List-Unsubscribe"] = f"<{unsubscribe}>"
    if one_click:
        headers["List-Unsubscribe-Post"] = "List-Unsubscribe=One-Click"
    for header, value in headers.items():
        mail[header] = Verbatim(header, value)
    text = _utf8(message.text)
    mail.set_content(text, cte=_encoding(text))
    if message.html is not None:
        html = _utf8(message.html)
        mail.add_alternative(html, subtype="html", cte=_encoding(html))
    return Mail(sender.spec, recipient.spec, mail.as_bytes(), utf8)


def _phrase(name: str) -> str:
    """Return the name before an address as a header has it."""
    return _encoded(name) if _is_to_be_encoded(name) else '"' + re.sub(r'(["\\])', r"\\\1", name) + '"'


def _unstructured(text: str) -> str:
    return _encoded(text) if _is_to_be_encoded(text) else text


def _is_to_be_encoded(text: str) -> bool:
    return not text.isascii() or "=?" in text  # which readers would decode


def _encoded(text: str) -> str:
    return Header(text, "utf-8", maxlinelen=60).encode(linesep="\r\n")


def _hashed(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:40]


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()


def _encoding(text: str) -> str:
    """Return how a part is encoded: as it is, if every server takes that, else by what is shorter."""
    if PLAIN_TEXT.fullmatch(text) and max(map(len, text.split("\n"))) <= LONGEST_LINE:
        return "7bit"
    others = sum(not c.isascii() for c in text)
    return "quoted-printable" if 8 * others < len(text) else "base64"
