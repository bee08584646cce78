"""Names that workers and the mail server of a run agree on: addresses, those unknown, and what a mail says."""

from __future__ import annotations

from collections.abc import Iterable
from email import message_from_bytes
from typing import NamedTuple
from zlib import crc32

DOMAIN = "chaos.example"
UNKNOWN_SHARE = 10  # one address of so many is none


class Contents(NamedTuple):
    """Contents of a mail: its ``Message-ID``, the process and the call that sent it, and which records it brings."""

    id: str
    incarnation: int
    call: int
    records: list[int]


def address_of(key: str) -> str:
    """Return the address of a timeline."""
    return f"{key.replace(' ', '.')}@{DOMAIN}"


def is_unknown(address: str) -> bool:
    """Return whether the mail server has no such address."""
    return crc32(address.encode()) % UNKNOWN_SHARE == 0


def id_of(digest: str) -> str:
    """Return the ``Message-ID`` that is promised for a digest."""
    return f"<{digest}@{DOMAIN}>"


def text_of(incarnation: int, call: int, records: Iterable[int], more: str = "") -> str:
    """Return what a mail says, and more if it is to be large."""
    return "\n".join(map(str, (incarnation, call, *records))) + f"\n\n{more}"


def contents(data: bytes) -> Contents:
    """Read a mail."""
    head, _, body = data.partition(b"\r\n\r\n")
    incarnation, call, *records = map(int, body.partition(b"\r\n\r\n")[0].split())
    return Contents(message_from_bytes(head)["Message-ID"], incarnation, call, records)
