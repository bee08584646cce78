"""A web app without a framework, that tells people about comments: at once, and then at most every five minutes.

Run it, and try it:

    uvicorn --app-dir examples --lifespan on asgi_app:app
    curl -d 'hello' localhost:8000/bob

It speaks ASGI by hand, to show all that an engine needs: to be entered when the server starts the app, and left when it
stops it. With `--lifespan on` the server does not start an app that cannot do that.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from aiodigest import BackendUnavailable, Digest, DigestEngine, Policy

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

mail = DigestEngine(namespace="asgi", value_type=str, policy=Policy(minimum_delay=300))


@mail.deliver
async def send_mail(digest: Digest[str]) -> None:
    print(f"mail to {digest.key}: {'; '.join(record.value for record in digest.records)}", flush=True)


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await live(receive, send)
    elif scope["type"] == "http":
        await answer(scope, receive, send)


async def live(receive: Receive, send: Send) -> None:
    await receive()  # "lifespan.startup"
    async with mail.delivering():  # the engine is connected and delivers as long as the app is up
        await send({"type": "lifespan.startup.complete"})
        await receive()  # "lifespan.shutdown": all requests are answered
    await send({"type": "lifespan.shutdown.complete"})  # and the deliveries under way have ended


async def answer(scope: Message, receive: Receive, send: Send) -> None:
    user = scope["path"].removeprefix("/")
    if scope["method"] != "POST" or not user:
        return await respond(send, 404, "post a comment to /USER")
    comment = await body(receive)
    if comment is None:
        return
    try:
        due_now = await mail.add(user, comment)  # stored when this returns
    except BackendUnavailable:
        return await respond(send, 503, "come again later")
    await respond(send, 202, "due now" if due_now else "waiting")


async def body(receive: Receive) -> str | None:
    """What the client sent, None if it went away meanwhile."""
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts).decode(errors="replace")


async def respond(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
