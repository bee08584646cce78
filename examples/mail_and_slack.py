"""A web app that mails people about comments on their posts, and tells a channel of Slack about all of them.

Run it, with a mail server that prints what it gets, and without Slack:

    python -m aiosmtpd -n -l localhost:1025
    uvicorn --app-dir examples mail_and_slack:app
    curl -H 'Content-Type: application/json' -d '{"author": "ann", "text": "hello"}' localhost:8000/posts/7/comments

The mail has a button to unsubscribe: mail programs post to its link.
"""

import hmac
import os
from urllib.parse import urlencode
from uuid import uuid4

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from aiodigest import BackendUnavailable, DigestEngine, Policy
from aiodigest.channels import SMTP, Console, Slack, by_key, fan_out
from aiodigest.integrations.fastapi import answer_unavailable, health_router
from aiodigest.rendering import Template

AUTHORS = {7: "bob@example.org", 8: "eve@example.org"}  # of posts; in earnest, a table
SITE = os.environ.get("SITE", "https://blog.example")
SECRET = os.environ.get("UNSUBSCRIBE_SECRET", "only for trying out").encode()
POLICIES = {
    "mail:": Policy(minimum_delay=900, increment_delay=60),  # at once, and then at most each quarter of an hour
    "slack:": Policy.window(60),  # a minute's comments are one message
}


class Comment(BaseModel):
    text: str
    author: str
    post: int = 0


def sign(key: str) -> str:
    return hmac.digest(SECRET, key.encode(), "sha256").hex()


def link(key: str) -> str:
    return f"{SITE}/unsubscribe?" + urlencode({"key": key, "token": sign(key)})


def policy(key: str) -> Policy:
    return next(policy for prefix, policy in POLICIES.items() if key.startswith(prefix))


smtp = SMTP(
    os.environ.get("SMTP_HOST", "localhost"),
    int(os.environ.get("SMTP_PORT", "1025")),
    sender="Blog <blog@blog.example>",
    to=lambda key: key.removeprefix("mail:"),
    render=Template(subject="{{ count }} new {{ count | plural('comment', 'comments') }}", fields=["text", "author"]),
    unsubscribe=link,
    one_click=True,
)
chat_text = Template(group_by=lambda comment: f"Post {comment.post}", fields=["text", "author"])
chat = Slack(os.environ["SLACK_URL"], render=chat_text) if "SLACK_URL" in os.environ else Console(render=chat_text)

comments = DigestEngine(
    namespace="mail-and-slack",
    value_type=Comment,
    policy=policy,
    destination=lambda key: key.partition(":")[0],  # while Slack asks for a rest, mails go out
)
comments.deliver(by_key({"mail:": smtp, "slack:": chat}))

app = FastAPI(lifespan=comments.lifespan)
app.include_router(health_router(comments))
app.add_exception_handler(BackendUnavailable, answer_unavailable)


@app.post("/posts/{post}/comments", status_code=202)
async def add_comment(post: int, comment: Comment) -> None:
    if post not in AUTHORS:
        raise HTTPException(404)
    comment.post = post
    await fan_out(comments, [f"mail:{AUTHORS[post]}", "slack:blog"], comment, record_id=uuid4().hex)


@app.post("/unsubscribe")
async def unsubscribe(key: str, token: str) -> None:
    if not hmac.compare_digest(token.encode(), sign(key).encode()):
        raise HTTPException(403)
    await comments.mute(key, drop=True)
    await comments.delete(key)
