"""A web app that tells people about comments: at once, and then at most every five minutes.

Run it, and try it:

    uvicorn --app-dir examples --workers 3 fastapi_app:app
    curl -H 'Content-Type: application/json' -d '{"author": "ann", "text": "hello"}' localhost:8000/users/bob/comments
    curl localhost:8000/users/bob/comments
    curl localhost:8000/healthz
"""

from datetime import datetime
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy
from aiodigest.integrations.fastapi import answer_unavailable, dependency, health_router


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


Mail = Annotated[DigestEngine[Comment], Depends(dependency(mail))]  # a test may put another in its place

app = FastAPI(lifespan=mail.lifespan)  # the engine is connected and delivers as long as the app is up
app.include_router(health_router(mail))  # /livez: is a restart due? /healthz: may requests come?
app.add_exception_handler(BackendUnavailable, answer_unavailable)  # 503, come again later


@app.post("/users/{user}/comments", status_code=202)
async def add_comment(user: str, comment: Comment, mail: Mail) -> Added:
    return Added(due_now=await mail.add(user, comment))  # stored when this returns


@app.get("/users/{user}/comments")
async def waiting_comments(user: str, mail: Mail) -> Waiting:
    timeline = await mail.peek(user)
    if timeline is None:
        return Waiting(due=None, comments=[])
    # A value that was stored by a program with another idea of a comment comes as bytes.
    comments = [record.value for record in timeline.records if isinstance(record.value, Comment)]
    return Waiting(due=timeline.due, comments=comments)
