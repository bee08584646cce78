"""A value as an application may have it: a pydantic model, and what is stored of one."""

from __future__ import annotations

from pydantic import BaseModel

from aiodigest import JSON


class Event(BaseModel):
    actor: int
    kind: str
    text: str


EVENT: JSON = {"actor": 1_234_567, "kind": "comment", "text": "x" * 156}  # 200 bytes as JSON
