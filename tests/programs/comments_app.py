"""The web app of examples/fastapi_app.py, with deliveries that a test can see, and hold.

Each delivery appends a line to ``told`` in the folder COMMENTS, and then does not end as long as a file ``hold`` is
there. COMMENTS_URL is where the comments are kept.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy
from aiodigest.integrations.fastapi import answer_unavailable, dependency, health_router

FOLDER = Path(os.environ["COMMENTS"])


class Comment(BaseModel):
    author: str
    text: str


class Added(BaseModel):
    due_now: bool


mail = DigestEngine(
    os.environ.get("COMMENTS_URL", "embedded://"),
    namespace="comments",
    value_type=Comment,
    policy=Policy(minimum_delay=1, increment_delay=0, maximum_delay=1),
    lease_timeout=5,
)


@mail.deliver
async def send_mail(digest: Digest[Comment]) -> None:
    texts = [record.value.text for record in digest.records]
    line = json.dumps({"process": os.getpid(), "id": digest.id, "texts": texts}) + "\n"
    told = os.open(FOLDER / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(told, line.encode())
    finally:
        os.close(told)
    while (FOLDER / "hold").exists():  # noqa: ASYNC110  (a file tells nobody)
        await asyncio.sleep(0.01)


Mail = Annotated[DigestEngine[Comment], Depends(dependency(mail))]

app = FastAPI(lifespan=mail.lifespan)
app.include_router(health_router(mail))
app.add_exception_handler(BackendUnavailable, answer_unavailable)


@app.post("/users/{user}/comments", status_code=202)
async def add_comment(user: str, comment: Comment, mail: Mail) -> Added:
    return Added(due_now=await mail.add(user, comment))
