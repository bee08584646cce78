"""``Slack``, ``Discord``, ``Teams`` and ``Ntfy``: digests as messages of chat services."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from aiodigest import Digest, InvalidArgument
from aiodigest.arguments import require, whole
from aiodigest.channels._posting import Posting, as_body
from aiodigest.channels.common import rendered_by
from aiodigest.rendering import Block, Message, Render
from aiodigest.rendering.texts import clean, line

if TYPE_CHECKING:
    from ssl import SSLContext

    from aiodigest.channels._http import URL, Answer

T = TypeVar("T")

SUBJECT = 200  # characters
LOOKED_AT = 5_000  # characters of a part, which is more than any service takes
TEXT = 100_000  # characters of a text without parts
DISCORD = re.compile(  # what must be escaped where, and what is one token
    r"""https?://[\w./?=&%#+-]+ # stays, so that it can be clicked
    | (?P<before>(?<![^\n])[ ]*(?:\d+(?=\.)|-(?=\#))?)(?P<mark>[.+-](?!\w)|[\#>]) # begins entries, headings, quotes
    | (?P<letter>[][\\*_~`|<]|@(?=everyone|here)|:(?=\w+:)) | .""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
DATES = re.compile(r"\{\{(?=\s*(?:DATE|TIME)\b)")  # what a card would replace
TOPIC = re.compile(r"[A-Za-z0-9_-]{1,64}")


class _Chat(Posting):
    """A service that takes messages as JSON."""

    _token: str | None = None

    def __init__(
        self,
        url: str | Callable[[str], str | Awaitable[str | None] | None],
        *,
        render: Render | None = None,
        allow_private: bool | str | Iterable[str] = False,
        tls_context: SSLContext | None = None,
        timeout: float | timedelta = 30,
    ) -> None:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        super().__init__(url, headers, allow_private, tls_context, timeout)
        self._render = rendered_by(render)

    async def _request(self, url: URL, digest: Digest[Any]) -> tuple[URL, dict[str, str], bytes]:
        subject, blocks = _read(self._render(digest))
        target, contents = self._contents(url, subject, blocks, digest.id)
        return target, {"Content-Type": "application/json"}, as_body(contents)

    @abstractmethod
    def _contents(self, url: URL, subject: str, blocks: list[Block], name: str) -> tuple[URL, dict[str, Any]]:
        """Return where a message is posted to, and the message as the service takes it: of texts that are clean and not
        empty, and with the digest's id as ``name``."""


class Slack(_Chat):
    """Posts each digest to an incoming webhook of Slack, in blocks of plain text that mention nobody. Needs the extra
    ``webhook``.

    Answers mean what they mean to ``Webhook``, except that 410 is tried again. What is more than a message may hold is
    shown as "and 12 more".

    Parameters
    ----------
    url : str, or a plain or async function from a key to a str or None
        The webhook's, which is a secret. A timeline without one becomes a dead letter.
    render : function from a digest to a Message, or None, default None
        Makes the subject and the blocks.
    allow_private : bool, or one or several networks such as "10.0.0.0/8", default False
        Which addresses are allowed that are not public, for a service of the same kind in your network.
    tls_context : ssl.SSLContext or None, default None
        By default the certificates of the system are trusted.
    timeout : seconds, default 30
        For one try; it must be shorter than the engine's ``delivery_timeout``.
    """

    def _contents(self, url: URL, subject: str, blocks: list[Block], name: str) -> tuple[URL, dict[str, Any]]:
        made = fitting(blocks, self._form, lambda block: units(_compact(block)), 15_000, 50)
        # the text is shown in notifications, where asterisks and the like would be markup
        return url, {"text": escaped(subject, _slack, 2 * SUBJECT), "mrkdwn": False, "blocks": made}

    def _form(self, block: Block) -> list[dict[str, Any]]:
        def text(said: str, most: int) -> dict[str, Any]:
            return {"type": "plain_text", "text": escaped(said, _slack, most), "emoji": False}

        def aside(said: str) -> dict[str, Any]:
            return {"type": "context", "elements": [text(said, 2_000)]}

        match block.kind:
            case "heading":
                head = {"type": "header", "text": text(block.text, 150)}
                return [head, aside(block.details)] if block.details else [head]
            case "item":
                return [{"type": "section", "text": text(_joined(block), 3_000)}]
            case "note":
                return [aside(_joined(block))]


class Discord(_Chat):
    """Posts each digest to a webhook of Discord, without markup, and mentions nobody. Needs the extra ``webhook``.

    The arguments are those of ``Slack``, ``timeout`` in seconds, and so are answers; how long to wait is also read from
    the JSON of 429.
    """

    def _contents(self, url: URL, subject: str, blocks: list[Block], name: str) -> tuple[URL, dict[str, Any]]:
        lines = fitting(_below(subject, blocks), self._form, lambda each: units(each) + 1, 4_096)
        head = {"content": f"**{escaped(subject, _discord, 1_000)}**", "allowed_mentions": {"parse": list[str]()}}
        embeds = [{"description": "\n".join(lines)}] if lines else []
        return url.copy_set_param("wait", "true"), {**head, "embeds": embeds}  # else it answers before it knows

    def _form(self, block: Block) -> list[str]:
        text, details = (escaped(each, _discord, 1_000) for each in (block.text, block.details))
        return _lines(block, f"**{text}**" if block.kind == "heading" else text, details)

    def _delay(self, answer: Answer) -> float | None:
        try:
            found = json.loads(answer.text).get("retry_after")
        except (ValueError, AttributeError, RecursionError):
            found = None
        if isinstance(found, int | float) and not isinstance(found, bool) and found >= 0:
            return float(min(found, 1e9))  # of an integer of 400 digits there is no float
        return super()._delay(answer)


class Teams(_Chat):
    """Posts each digest to the webhook of a workflow in Microsoft Teams ("When a Teams webhook request is received"),
    as an Adaptive Card of plain text. Needs the extra ``webhook``.

    The arguments are those of ``Slack``, ``timeout`` in seconds, and so are answers.
    """

    def _contents(self, url: URL, subject: str, blocks: list[Block], name: str) -> tuple[URL, dict[str, Any]]:
        # 28 kB in all are allowed, and nobody says in which encoding.
        def size(row: dict[str, Any]) -> int:
            return max(2 * units(_compact(row)), len(_compact(row).encode())) + 2

        card = {
            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4",
            "fallbackText": subject, "body": fitting(blocks, self._form, size, 25_000), "msteams": {"width": "Full"},
        }  # fmt: skip
        kind = "application/vnd.microsoft.card.adaptive"
        return url, {"type": "message", "attachments": [{"contentType": kind, "contentUrl": None, "content": card}]}

    def _form(self, block: Block) -> list[dict[str, Any]]:
        # This kind of text knows no markup but that of dates, and has one line.
        def rows(text: str, **style: Any) -> list[dict[str, Any]]:
            lines = [each for each in escaped(text, _teams, 1_500).split("\n") if each.strip()][:20]
            runs = [{"type": "TextRun", "text": each, **style} for each in lines]
            return [{"type": "RichTextBlock", "inlines": [run]} for run in runs]

        style = {"heading": {"weight": "Bolder"}, "item": {}, "note": {"isSubtle": True}}[block.kind]
        made = rows(block.text, **style) + rows(block.details, isSubtle=True)
        return made[:1] + [{**row, "spacing": "None"} for row in made[1:]]


class Ntfy(_Chat):
    """Publishes each digest to a topic of ntfy. Needs the extra ``webhook``.

    A repeat replaces the notification that it repeats (by ``sequence_id``, from version 2.16 of the server on). Other
    arguments are those of ``Slack``, ``timeout`` in seconds, and so are answers.

    Parameters
    ----------
    url : str, or a plain or async function from a key to a str or None
        The topic's, such as ``"https://ntfy.sh/topic"``: who knows it can read it. A timeline without one becomes a
        dead letter.
    token : str or None, default None
        The access token of an account.
    priority : int or None, default None (3, as ntfy has it)
        From 1 to 5, the most urgent.
    tags : sequence of str, default ()
        Words, or names of emoji.
    """

    def __init__(
        self,
        url: str | Callable[[str], str | Awaitable[str | None] | None],
        *,
        token: str | None = None,
        priority: int | None = None,
        tags: Sequence[str] = (),
        render: Render | None = None,
        allow_private: bool | str | Iterable[str] = False,
        tls_context: SSLContext | None = None,
        timeout: float | timedelta = 30,
    ) -> None:
        self._token = token
        super().__init__(url, render=render, allow_private=allow_private, tls_context=tls_context, timeout=timeout)
        require(not isinstance(tags, str), "tags", "a sequence of words", tags)
        self._given: dict[str, Any] = {"tags": list(tags)} if tags else {}
        if priority is not None:
            self._given["priority"] = whole(priority, "priority", 1, 5)

    def _url_of(self, text: object, what: str) -> URL:
        url = super()._url_of(text, what)
        if not TOPIC.fullmatch(_topic(url)):
            raise InvalidArgument(f"{what} must be the URL of a topic, such as https://ntfy.sh/topic")
        return url

    def _contents(self, url: URL, subject: str, blocks: list[Block], name: str) -> tuple[URL, dict[str, Any]]:
        # In JSON, since a header would bound the letters of the title; 4 kB are allowed for what it says.
        lines = fitting(_below(subject, blocks), self._form, lambda each: _bytes(each) + 2, 4_000)
        said = {"topic": _topic(url), "title": subject, "message": "\n".join(lines) or subject, **self._given}
        if TOPIC.fullmatch(name):
            said["sequence_id"] = name
        return url.copy_with(path=url.path.rpartition("/")[0] + "/"), said

    def _form(self, block: Block) -> list[str]:
        return _lines(block, *(escaped(each, iter, 1_000, _bytes) for each in (block.text, block.details)))


# What a message says


def _read(message: Message) -> tuple[str, list[Block]]:
    """Return the subject and the blocks of a message, clean, without what says nothing."""
    subject = line(message.subject, SUBJECT) or "…"
    blocks: Sequence[Block] = message.blocks
    if not blocks:
        blocks = [Block("heading", subject), *(Block("item", each) for each in message.text[:TEXT].splitlines())]
    found = list[Block]()
    for block in blocks:
        text, details = clean(block.text, LOOKED_AT).strip(), clean(block.details, LOOKED_AT).strip()
        if text and block.kind == "heading":
            found.append(Block("heading", line(text, SUBJECT), details))
        elif text or details:
            kind = "note" if block.kind == "heading" else block.kind
            found.append(Block(kind, text or details, details if text else ""))
    return subject, found


def _below(subject: str, blocks: list[Block]) -> list[Block]:
    """Return the blocks without a heading that says what the subject says."""
    if not blocks or (blocks[0].kind, blocks[0].text) != ("heading", subject):
        return blocks
    return [*([Block("note", blocks[0].details)] if blocks[0].details else []), *blocks[1:]]


def _joined(block: Block) -> str:
    return f"{block.text}\n{block.details}" if block.details else block.text


def _lines(block: Block, text: str, details: str) -> list[str]:
    return [f"• {text}" if block.kind == "item" else text, *([details] if details else [])]


def fitting(
    blocks: Sequence[Block], form: Callable[[Block], list[T]], size: Callable[[T], int], most: int, count: int = 1_000
) -> list[T]:
    """Return the forms of the blocks: of at most ``most`` in size and ``count`` in number; if they are more, of those
    that fit, and of a note that tells how many do not."""
    made, used = list[tuple[list[T], int]](), 0

    def fits(more: list[T]) -> bool:
        number = sum(len(forms) for forms, _ in made) + len(more)
        return used + sum(map(size, more)) <= most and number <= count

    for block in blocks:
        forms = form(block)
        if not fits(forms):
            break
        cost = sum(map(size, forms))
        made.append((forms, cost))
        used += cost
    else:
        return [each for forms, _ in made for each in forms]
    while made and not fits(form(_more(blocks, 0))):  # which is the longest of them
        used -= made.pop()[1]
    return [each for forms, _ in made for each in forms] + form(_more(blocks, len(made)))


def _more(blocks: Sequence[Block], shown: int) -> Block:
    items = sum(block.kind == "item" for block in blocks[shown:])
    return Block("note", f"and {items} more" if items else "…")


# How long a text is, and how it is escaped


def units(text: str) -> int:
    """Return the characters as UTF-16 counts them, which is never less than those that there are."""
    return len(text.encode("utf-16-le")) // 2


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _bytes(text: str) -> int:
    """Return the bytes of a text in JSON, which are never less than its own."""
    return len(_compact(text).encode()) - 2


def escaped(text: str, tokens: Callable[[str], Iterator[str]], most: int, measure: Callable[[str], int] = units) -> str:
    """Return a text, escaped by ``tokens``, of at most ``most`` in all; no token is cut in two."""
    made, used = list[str](), 0
    for token in tokens(text):
        made.append(token)
        used += measure(token)
        if used > most:
            room = most - measure("…")
            while used > room:
                used -= measure(made.pop())
            return "".join(made).rstrip() + "…"
    return "".join(made)


def _slack(text: str) -> Iterator[str]:
    names = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    return (names.get(char, char) for char in text)


def _teams(text: str) -> Iterator[str]:
    return iter(DATES.sub("{\u200b{", text))  # there is no way to escape it


def _discord(text: str) -> Iterator[str]:
    for found in DISCORD.finditer(text):
        if found["mark"]:
            yield f"{found['before']}\\{found['mark']}"
        else:
            yield f"\\{found[0]}" if found["letter"] else found[0]


def _topic(url: URL) -> str:
    return url.path.rpartition("/")[2]
