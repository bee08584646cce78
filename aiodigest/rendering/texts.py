"""Text from strangers, made harmless: what any value says, in plain characters and of bounded length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import groupby, islice
from typing import Any, cast
from unicodedata import category

from aiodigest.errors import FLAG

MOST = 10_000  # characters of a text, unless somebody says otherwise
WIDE = 100  # entries of a mapping or a list that are looked at
DEEP = 8  # levels of them
NODES = 2_000  # entries in all

# What terminals obey: colours and titles, as lines of logs bring them along.
ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))|\x9b[0-?]*[ -/]*[@-~]")
BREAKS = re.compile(r"\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
# Controls; what reorders or hides text (bidi marks, zero widths, deprecated formats, tags but those of a flag) ...
HIDDEN = re.compile(
    rf"({FLAG.pattern})|"
    r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x9f\u034f\u061c\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    r"\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# ... letters that look like nothing ...
BLANK = re.compile(r"[\t\xa0\u1680\u115f\u1160\u17b4\u17b5\u2000-\u200a\u202f\u205f\u2800\u3164\uffa0]")
# ... and what is no character: lone surrogates, private ones, and those that XML does not know.
WRONG = re.compile(r"[\ud800-\udfff\ue000-\uf8ff\ufdd0-\ufdef\ufffe\uffff\U000f0000-\U0010ffff]")
JOINERS = re.compile(  # that join nothing, or what is joined; and soft hyphens outside of words
    r"(?<![\w\xad])\xad+|\xad+(?!\w)|"
    r"(?<![^\x00-\x7f\s])[\u200c\u200d]+|[\u200c\u200d]+(?![^\x00-\x7f\s])|(?<=[\u200c\u200d])[\u200c\u200d]+"
)
SPACES = re.compile(r"[ \n]+")
MARKS = 3  # on one letter, of those that are drawn above and below it
SYMBOLS = re.compile(r"[^\x00-\x7f\w]{4,}")  # of which piles of marks are, and which is found ten times as fast

MASKS = re.compile(
    r"""(?P<address>(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+ | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
        | (?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{1,4}(?![\w:]))
    | (?P<time>\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?
        | \b\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?\b)
    | (?P<id>\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b | \b0x[0-9a-f]+\b
        | \b(?=[a-f]*\d)[0-9a-f]{7,}\b)
    | (?P<number>\d+(?:[.,]\d+)*)""",
    re.VERBOSE | re.IGNORECASE,
)


def clean(text: str, most: int = MOST) -> str:
    """Return a text of at most ``most`` characters that controls and hides nothing; it may have several lines."""
    window = 2 * most + 100  # of a line of a megabyte only the beginning is looked at
    is_whole, text = len(text) <= window, text[:window]
    if not (text.isascii() and text.isprintable()):
        text = BREAKS.sub("\n", ESCAPES.sub("", text))
        text = WRONG.sub("\N{REPLACEMENT CHARACTER}", BLANK.sub(" ", HIDDEN.sub(r"\1", text)))
        if not text.isascii():
            is_whole, text = is_whole and len(text) <= most + 20, text[: most + 20]  # since it takes long
            text = JOINERS.sub("", text) if any(each in text for each in "\u200c\u200d\xad") else text
            text = SYMBOLS.sub(lambda found: _piles().sub(r"\1", found[0]), text)
    return cut(text, most) if is_whole or len(text) > most else cut(text, most - 1) + "…"


def line(text: str, most: int = MOST) -> str:
    """Return a text, made harmless, in one line."""
    return cut(SPACES.sub(" ", clean(text, 2 * most)).strip(), most)


def cut(text: str, most: int) -> str:
    """Return the beginning of a text of more than ``most`` characters, with an ellipsis; nothing is cut in two."""
    if len(text) <= most:
        return text
    end = most - 1
    while end > most - 20 and end > 0 and (_joins(text[end]) or text[end - 1] == "\u200d"):
        end -= 1
    return text[:end].rstrip() + "…"


def _joins(char: str) -> bool:
    """True for what belongs to the character before it: marks, joiners, the colours of emoji, and tags of flags."""
    is_added = "\U0001f3fb" <= char <= "\U0001f3ff" or "\U000e0020" <= char <= "\U000e007f"
    return is_added or category(char) in ("Mn", "Me", "Mc") or char == "\u200d"


@cache
def _piles() -> re.Pattern[str]:
    """Return what finds the marks that are piled up on one letter; all that there are stand below U+20000, or are
    hidden anyhow."""
    marks = [code for code in range(0x300, 0x20000) if category(chr(code)) in ("Mn", "Me")]
    runs = [[code for _, code in run] for _, run in groupby(enumerate(marks), lambda each: each[1] - each[0])]
    several = "".join(f"{chr(run[0])}-{chr(run[-1])}" for run in runs)
    return re.compile(f"([{several}]{{{MARKS}}})[{several}]+")


def url(text: object) -> str:
    """Return an address that a link may lead to: of the web or of mail; else none."""
    address = line(text, 2_000) if isinstance(text, str) else ""
    return address if re.match(r"(?:https?://|mailto:)[^\s\"'<>\\]+$", address, re.IGNORECASE) else ""


def masked(text: str) -> str:
    """Return a text in which all numbers, ids, addresses and times are the same, if it says something besides."""
    found = MASKS.sub("\0", text)
    return found if any(map(str.isalpha, found)) else text


def says_something(text: str) -> bool:
    """True if there are words in a text, and not only numbers, ids, addresses and times."""
    return any(map(str.isalpha, MASKS.sub("", text)))


def label(name: str) -> str:
    """Return the name of a field for people."""
    return line(re.sub("[_.]", " ", name), 40)


def scalar(value: object, most: int = 300) -> str:
    """Return what a value says that is neither a mapping nor a list, in one line; never raises."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case bytes() | bytearray():
            value = bytes(value[: 4 * most + 200]).decode(errors="replace")
        case _:
            pass
    try:
        return line(str.__str__(value) if isinstance(value, str) else str(value), most)
    except Exception:  # of an object of the user's, or an integer of more digits than Python prints
        return f"a {line(type(value).__name__, 100)}"


def entries(value: object) -> Mapping[Any, Any] | None:
    """Return a mapping, a dataclass, a model of pydantic or a named tuple as a mapping; None if it is none of them."""
    if isinstance(value, Mapping):
        return cast("Mapping[Any, Any]", value)
    names, kind = cast("Sequence[str]", ()), cast("Any", type(value))
    if is_dataclass(kind):
        names = [field.name for field in fields(kind) if field.repr]  # who hides one from ``repr`` has a reason
    elif found := getattr(kind, "__pydantic_fields__", None):
        names = [name for name, field in found.items() if field.repr]
    elif issubclass(kind, tuple):
        names = getattr(cast("Any", kind), "_fields", ())
    return {name: getattr(value, name, None) for name in names} or None


def simple(value: object) -> Any:
    """Return a value as a template sees it: dicts, lists, numbers and texts, made harmless and of bounded size."""
    left = iter(range(NODES))  # an object may be at many places of a value, or in itself

    def made(value: object, deep: int) -> Any:
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            return int(value)
        if isinstance(value, str):
            return clean(str.__str__(value))
        found = entries(value)
        if found is None and not isinstance(value, list | tuple | AbstractSet):
            return scalar(value, MOST)
        if not deep:
            return "…"
        if found is not None:
            pairs = zip(found.items(), islice(left, WIDE), strict=False)
            return {scalar(name, 100): made(each, deep - 1) for (name, each), _ in pairs}
        several = zip(cast("Iterable[object]", value), islice(left, WIDE), strict=False)
        return [made(each, deep - 1) for each, _ in several]

    return made(value, DEEP)


def told(value: object, most: int = 300, deep: int = 3) -> str:
    """Return what any value says in one line: "k: v, k: v", or "a, b and 3 more"."""
    found = entries(value)
    several: Any = found.items() if found is not None else value
    if found is None and not isinstance(value, list | tuple | AbstractSet):
        return scalar(value, most)
    if not deep or not several:
        return "…" if several else "none"
    parts = list[str]()
    for each, _ in zip(several, range(6), strict=False):
        name = "" if found is None else f"{label(scalar(each[0], 100))}: "
        parts.append(name + told(each if found is None else each[1], 100, deep - 1))
    left = len(several) - len(parts)
    return cut(", ".join(parts) + (f" and {left} more" if left else ""), most)
