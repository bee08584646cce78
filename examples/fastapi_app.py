"""A web app that tells people about comments: at once, and then at most every five minutes.

Run it, and try it:

    uvicorn --app-dir examples fastapi_app:app
    curl -H 'Content-Type: application/json' -d '{"author": "ann", "text": "hello"}' localhost:8000/users/bob/comments
    curl localhost:8000/users/bob/comments
"""

from datetime import datetime

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy


class Comment(BaseModel):
    author: str
    text: str


class Added(BaseModel):
    due_now: bool


class Waiting(BaseModel):
    due: datetime | None
    comments: list[Comment]


mail = DigestEngine(namespace="comments", value_type=Comment, policy=Policy(minimum_delay=300))


@mail.deliver
async def send_mail(digest: Digest[Comment]) -> None:
    authors = ", ".join(comment.value.author for comment in digest.records)
    print(f"mail to {digest.key}: {len(digest.records)} new from {authors}", flush=True)


app = FastAPI(lifespan=mail.lifespan)  # the engine is connected and delivers as long as the app is up


@app.post("/users/{user}/comments", status_code=202)
async def add_comment(user: str, comment: Comment) -> Added:
    try:
        return Added(due_now=await mail.add(user, comment))  # stored when this returns
    except BackendUnavailable as error:
        raise HTTPException(503, "come again later") from error


@app.get("/users/{user}/comments")
async def waiting_comments(user: str) -> Waiting:
    timeline = await mail.peek(user)
    if timeline is None:
        return Waiting(due=None, comments=[])
    # A value that was stored by a program with another idea of a comment comes as bytes.
    comments = [record.value for record in timeline.records if isinstance(record.value, Comment)]
    return Waiting(due=timeline.due, comments=comments)
