"""A web app on Litestar, that tells people about comments: at once, and then at most every five minutes.

Run it, and try it:

    uvicorn --app-dir examples litestar_app:app
    curl -H 'Content-Type: application/json' -d '{"author": "ann", "text": "hello"}' localhost:8000/users/bob/comments
"""

from typing import Any

from litestar import Litestar, Request, Response, post
from litestar.params import FromPath, JSONBody
from pydantic import BaseModel

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy


class Comment(BaseModel):
    author: str
    text: str


class Added(BaseModel):
    due_now: bool


mail = DigestEngine(namespace="litestar", value_type=Comment, policy=Policy(minimum_delay=300))


@mail.deliver
async def send_mail(digest: Digest[Comment]) -> None:
    authors = ", ".join(comment.value.author for comment in digest.records)
    print(f"mail to {digest.key}: {len(digest.records)} new from {authors}", flush=True)


@post("/users/{user:str}/comments", status_code=202)
async def add_comment(user: FromPath[str], data: JSONBody[Comment]) -> Added:
    return Added(due_now=await mail.add(user, data))  # stored when this returns


def come_again(request: Request[Any, Any, Any], error: BackendUnavailable) -> Response[dict[str, str]]:
    return Response({"detail": "come again later"}, status_code=503, headers={"Retry-After": "5"})


app = Litestar(
    [add_comment],
    lifespan=[mail.lifespan],  # the engine is connected and delivers as long as the app is up
    exception_handlers={BackendUnavailable: come_again},
)
