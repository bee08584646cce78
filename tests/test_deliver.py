"""``pipe --deliver``, ``pipe --exec`` and ``send``: on real mail servers, with real commands."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trustme
import uvloop
from clusters import until
from commandline import DEADLINE, Command, aiodigest, digests, environment, ndjson, running
from mailservers import Mailbox, mail_server, one_after_another, script
from servers import Server
from terminals import on_terminal, plain
from webservers import web_server

from aiodigest import ConfigurationError, Digest, DigestEngine
from aiodigest.cli.destinations import KINDS, destination
from aiodigest.cli.execution import Exec
from aiodigest.cli.send import made_up

PASSWORD = "s3cret-passw0rd"
Pipe: TypeAlias = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def pipe(server: Server, namespace: str, tmp_path: Path) -> Pipe:
    """Runs the command as a process, beside the mail server of the test."""

    async def run(*arguments: str, input: bytes = b"", command: str = "pipe", **variables: str) -> tuple[int, str, str]:
        place = ("--url", server.url, "--namespace", namespace) if command == "pipe" else ()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "aiodigest", command, *place, *arguments, cwd=tmp_path,
            env={**environment(tmp_path), **variables},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                output, errors = await process.communicate(input)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()

    return run


def to(mailbox: Mailbox, receiver: str = "?to=dev@example.org", user: str = "") -> str:
    return f"smtp://{user}localhost:{mailbox.port}{receiver}"


def lines(*keys: str) -> bytes:
    return ndjson({"repo": key, "id": f"{key}-{number}", "title": f"{key} news"} for number, key in enumerate(keys))


@asynccontextmanager
async def left_in(server: Server, namespace: str) -> AsyncGenerator[DigestEngine]:
    async with DigestEngine(server.url, namespace=f"pipe-{namespace}") as engine:
        yield engine


# --deliver


@pytest.mark.processes
async def test_each_group_is_a_mail_that_people_read(pipe: Pipe) -> None:
    async with mail_server() as mailbox:
        ended = await pipe("--group-by", "repo", "--deliver", to(mailbox), input=lines("web", "api", "web", "web"))
    assert ended == (0, "", "")
    mails = {mail.message["Subject"]: mail for mail in mailbox.mails}
    assert sorted(mails) == ["api news", "web news \N{MULTIPLICATION SIGN} 3"]
    for mail in mails.values():
        assert (mail.recipient, mail.message["Auto-Submitted"]) == ("dev@example.org", "auto-generated")
        parts = [part.get_content_type() for part in mail.message.walk()]
        assert parts == ["multipart/alternative", "text/plain", "text/html"]
        assert "repo:" not in mail.message.get_body(("plain",)).get_content()  # type: ignore[union-attr]


@pytest.mark.processes
async def test_subject_template_and_fields_say_what_a_mail_says(pipe: Pipe, tmp_path: Path) -> None:
    (tmp_path / "mail.txt").write_text("{% for item in items %}- {{ item.title }}\n{% endfor %}")
    options = ("--subject", "{{ count }} in {{ digest.key }}", "--template", "mail.txt", "--fields", "id,title")
    async with mail_server() as mailbox:
        source = f"{to(mailbox)}&from=Robot <robot@example.org>"
        ended = await pipe("--group-by", "repo", "--deliver", source, *options, input=lines("web", "web"))
    assert ended == (0, "", "")
    [mail] = mailbox.mails
    assert (mail.message["Subject"], mail.sender) == ("2 in web", "robot@example.org")
    assert mail.message.get_content_type() == "text/plain"
    assert mail.message.get_content().split() == ["-", "web-0", "-", "web-1"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["pipe", "send"])
async def test_times_that_are_shown_are_those_of_the_zone_that_is_asked_for(name: str, pipe: Pipe) -> None:
    options = ("--group-by", "repo") if name == "pipe" else ()
    async with mail_server() as mailbox:
        code, *_ = await pipe(
            *options, "--deliver", to(mailbox), "--tz", "Asia/Tokyo", command=name, input=lines("web")
        )
    assert code == 0
    [mail] = mailbox.mails
    body = mail.message.get_body(("plain",))
    assert body is not None
    assert body.get_content().rstrip().endswith("Times are in Asia/Tokyo.")


@pytest.mark.processes
async def test_no_answer_is_missed_on_any_event_loop(pipe: Pipe) -> None:
    given = lines(*(f"group-{number}" for number in range(40)))
    async with mail_server() as mailbox:
        ended = await pipe("--group-by", "repo", "--deliver", to(mailbox), "--try-timeout", "10s", input=given)
    assert ended == (0, "", "")
    assert len(mailbox.mails) == 40


@pytest.mark.processes
async def test_what_fails_is_tried_again_after_a_wait_and_nobody_gets_it_twice(pipe: Pipe) -> None:
    async with mail_server(one_after_another("RCPT", "451 later", "451 later")) as mailbox:
        code, _, errors = await pipe("--group-by", "repo", "--deliver", to(mailbox), input=lines("web", "web"))
    assert code == 0
    assert len(mailbox.mails) == 1
    assert errors.count("451 later") == 2


@pytest.mark.processes
async def test_a_wait_is_a_second_at_least_although_the_input_has_ended(pipe: Pipe) -> None:
    began = time.monotonic()
    async with mail_server(script(RCPT="451 later")) as mailbox:
        options = ("--group-by", "repo", "--deliver", to(mailbox), "--retry-for", "3s")
        code, _, _ = await pipe(*options, input=lines("web"))
    assert code == 1
    tries = sum(said.startswith("RCPT") for said in mailbox.said)
    assert 1 <= tries <= time.monotonic() - began + 1


@pytest.mark.processes
async def test_what_could_not_be_delivered_is_kept_for_the_next_run(pipe: Pipe, server: Server, namespace: str) -> None:
    async with mail_server(script(RCPT="451 later")) as mailbox:
        options = ("--group-by", "repo", "--deliver", to(mailbox))
        code, output, errors = await pipe(*options, "--retry-for", "1s", input=lines("web", "web"))
        assert (code, output, mailbox.mails) == (1, "", [])
        again = "the same command. If it reads its input again, lines come twice; with"
        alone = f"--namespace pipe-{namespace}, without files and with </dev/null, only what was kept comes"
        told = f"1 group could not be delivered; to try again: {again} {alone}"
        assert errors.splitlines()[-1] == f"aiodigest: {told}"
        mailbox.script = script()
        code, output, errors = await pipe(*options)
        assert (code, errors) == (0, "aiodigest: 2 lines left by an earlier run: sent again with these\n")
    assert len(mailbox.mails) == 1
    async with left_in(server, namespace) as engine:
        assert (await engine.stats()).dead == 0


@pytest.mark.processes
async def test_what_was_kept_comes_twice_if_its_input_is_read_again_and_alone_if_it_is_not(
    pipe: Pipe, tmp_path: Path
) -> None:
    """As the message says."""
    (tmp_path / "in").write_bytes(lines("web", "web"))
    options = ("--group-by", "repo", "--exec", "test -e up && cat", "--retry-for", "1s")
    for again, times in ([], 1), (["in"], 2):
        (tmp_path / "up").unlink(missing_ok=True)
        code, _, errors = await pipe(*options, "in")
        assert (code, "If it reads its input again, lines come twice" in errors) == (1, True)
        (tmp_path / "up").touch()
        code, output, _ = await pipe(*options, *again)
        found = Counter(record["value"]["id"] for digest in digests(output.encode()) for record in digest["records"])
        assert (code, found) == (0, {"web-0": times, "web-1": times})


@pytest.mark.processes
@pytest.mark.parametrize("where", ["stderr", "stdin"])
async def test_a_person_is_told_how_much_was_delivered_and_a_script_is_not(where: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(lines("web", "web", "api"))
    arguments = ("pipe", "--group-by", "repo", "--exec", "true", str(tmp_path / "in"))
    with on_terminal(tmp_path, *arguments, streams=[where]) as pipe:
        errors = pipe.process.stderr.read() if pipe.process.stderr is not None else b""
        assert pipe.end()[0] == 0
    told = b"aiodigest: 2 digests delivered, with 3 lines"
    assert (told in plain(pipe.shown).splitlines(), errors) == (where == "stderr", b"")


@pytest.mark.processes
async def test_ids_and_what_collapse_names_are_all_in_a_mail(pipe: Pipe) -> None:
    for shown, told in (
        (("--fields", "id"), {"web-0": 1, "web-1": 1}),
        (("--collapse", "none"), {"web news": 2}),
        ((), {"web news": 1}),
    ):
        async with mail_server() as mailbox:
            ended = await pipe("--group-by", "repo", "--deliver", to(mailbox), *shown, input=lines("web", "web"))
        assert ended == (0, "", "")
        text = mailbox.mails[0].message.get_body(("plain",)).get_content()  # type: ignore[union-attr]
        assert {each: text.count(each) for each in told} == told


@pytest.mark.processes
async def test_a_bad_address_is_a_dead_letter_and_the_others_get_theirs(
    pipe: Pipe, server: Server, namespace: str
) -> None:
    def answer(stage: str, argument: str) -> str | None:
        return "550 5.1.1 nobody" if stage == "RCPT" and "bad" in argument else None

    async with mail_server(answer) as mailbox:
        given = lines("good@example.org", "bad@example.org", "fine@example.org")
        code, _, errors = await pipe("--group-by", "repo", "--deliver", to(mailbox, ""), input=given)
    assert code == 1
    assert Counter(mail.recipient for mail in mailbox.mails) == Counter(["good@example.org", "fine@example.org"])
    assert errors.splitlines()[-1].startswith(
        "aiodigest: 1 digest rejected, and kept as dead letters: see aiodigest dead"
    )
    async with left_in(server, namespace) as engine:
        assert [letter.key async for letter in engine.dead_letters()] == ["bad@example.org"]


@pytest.mark.processes
async def test_a_key_that_is_no_one_address_is_a_dead_letter_and_the_others_get_theirs(
    pipe: Pipe, server: Server, namespace: str
) -> None:
    keys = "a@example.org, b@example.org", "nobody", "fine@example.org"
    async with mail_server() as mailbox:
        code, _, errors = await pipe("--group-by", "repo", "--deliver", to(mailbox, ""), input=lines(*keys))
    assert (code, [mail.recipient for mail in mailbox.mails]) == (1, ["fine@example.org"])
    assert errors.splitlines()[-1].startswith("aiodigest: 2 digests rejected, and kept as dead letters")
    async with left_in(server, namespace) as engine:
        assert sorted([letter.key async for letter in engine.dead_letters()]) == sorted(keys[:2])


@pytest.mark.processes
async def test_a_group_that_always_fails_lets_the_others_go_on(pipe: Pipe, tmp_path: Path) -> None:
    given = ndjson([{"repo": "bad", "number": number} for number in range(1_500)] + [{"repo": "good"}])
    command = 'cat > one; if grep -q \'"key":"bad"\' one; then exit 1; else cat one; fi'
    options = ("--group-by", "repo", "--exec", command, "--retry-for", "1s")
    code, output, errors = await pipe(*options, "--max-size", "100", input=given)
    assert (code, [json.loads(line)["key"] for line in output.splitlines()]) == (1, ["good"])
    assert "1 group could not be delivered" in errors.splitlines()[-1]
    options = ("--group-by", "repo", "--exec", "cat", "--max-size", "100")
    code, output, errors = await pipe(*options)
    numbers = [record["value"]["number"] for line in output.splitlines() for record in json.loads(line)["records"]]
    assert (code, sorted(numbers)) == (0, list(range(1_500)))


@pytest.mark.processes
async def test_a_group_that_always_fails_and_can_hold_no_more_ends_the_input(pipe: Pipe) -> None:
    given = ndjson([{"repo": "good"}, *({"repo": "bad"} for _ in range(10_000)), {"repo": "bad"}, {"repo": "late"}])
    command = 'read -r one; case $one in *\'"key":"bad"\'*) exit 1;; *) echo "$one"; esac'
    code, output, errors = await pipe("--group-by", "repo", "--exec", command, "--retry-for", "1s", input=given)
    assert (code, [json.loads(line)["key"] for line in output.splitlines()]) == (1, ["good"])
    full, kept = errors.splitlines()[-2:]
    assert full == "aiodigest: bad fails, and holds all that it can: nothing was added from <stdin>:10002 on"
    assert "1 group could not be delivered" in kept


@pytest.mark.processes
def test_a_signal_ends_what_always_fails(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", "--group-by", "repo", "--exec", "exit 1", "--retry-for", "1h") as pipe:
        pipe.feed(ndjson({"repo": "bad"} for _ in range(10_500)))
        assert b"failed" in pipe.error_line()
        assert pipe.interrupt(signal.SIGTERM) == 128 + signal.SIGTERM
    assert b"1 group could not be delivered" in pipe.errors.splitlines()[-1]


# Secrets


@pytest.mark.processes
@pytest.mark.parametrize("place", ["variable", "file", "secret"])
async def test_a_password_comes_from_the_environment_or_a_file_and_is_never_shown(
    place: str, pipe: Pipe, tmp_path: Path
) -> None:
    async with mail_server(password=PASSWORD) as mailbox:
        url = to(mailbox, user=f"ann:{PASSWORD}@")
        (tmp_path / "url").write_text(f"{url}\n")
        given, variables = {
            "variable": ("env:MAIL_URL", {"MAIL_URL": url}),
            "file": ("@url", {}),
            "secret": (to(mailbox, user="ann@"), {"AIODIGEST_DELIVER_SECRET": PASSWORD}),
        }[place]
        ended = await pipe("--deliver", given, command="send", **variables)
        assert ended == (0, f"delivered to smtp://localhost:{mailbox.port}\n", "")
        assert len(mailbox.mails) == 1
        mailbox.password = "another"
        code, output, errors = await pipe("--deliver", given, command="send", **variables)
    assert (code, output) == (69, "")
    assert "535" in errors
    assert PASSWORD not in errors


SIGNING = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
BASIC = "Basic " + b64encode(f"ann:{PASSWORD}@".encode()).decode()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "secret", "login", "is_signed"),
    [
        ("http://HOST/hook", None, None, False),
        ("http://HOST/hook", SIGNING, None, True),
        ("http://ann@HOST/hook", f"{PASSWORD}@", BASIC, False),
        (f"http://ann:{PASSWORD}%40@HOST/hook", None, BASIC, False),
        (f"http://ann:{PASSWORD}%40@HOST/hook", SIGNING, BASIC, True),
        (f"http://HOST/hook\nAuthorization: Bearer {PASSWORD}\n\n", SIGNING, f"Bearer {PASSWORD}", True),
    ],
)
async def test_a_webhook_gets_a_login_or_headers_that_no_argument_shows(
    text: str, secret: str | None, login: str | None, is_signed: bool, pipe: Pipe, tmp_path: Path
) -> None:
    variables = {} if secret is None else {"AIODIGEST_DELIVER_SECRET": secret}
    async with web_server() as site:
        (tmp_path / "url").write_text(text.replace("HOST", f"localhost:{site.port}"))
        ended = await pipe("--deliver", "@url", command="send", **variables)
        assert ended == (0, f"delivered to http://localhost:{site.port}\n", "")
    [request] = site.requests
    assert request.headers.get("authorization") == login
    assert ("webhook-signature" in request.headers) == is_signed


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://localhost/hook\nno header", "each line must be a header"),
        ("http://localhost/hook\nHost: x", "headers may not name 'Host'"),
        ("http://localhost/hook\nX-Team: a\nx-team: b", "each header may be given once"),
        (f"http://ann:{PASSWORD}@localhost/hook\nauthorization: Bearer x", "are two logins"),
        (f"smtp://localhost?to=a@example.org\nX-Token: {PASSWORD}", "are for webhooks alone"),
        (f"http://localhost/hook\nhttps://{PASSWORD}@localhost/hook", "holds one URL"),
        (f"smtp://localhost?to=a@example.org\nslack:https://localhost/{PASSWORD}", "holds one URL"),
    ],
)
def test_headers_that_cannot_be_used_are_told_in_a_line(
    text: str, told: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_URL", text)
    code, output, errors = command("send", "--deliver", "env:THE_URL")
    assert (code, output) == (2, "")
    [line] = errors.splitlines()
    assert told in line
    assert PASSWORD not in line


def test_a_file_that_is_too_long_to_hold_a_url_and_headers_is_refused(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text(f"http://localhost/hook\nX-Token: {PASSWORD}{'x' * 10_000}")
    told = f"aiodigest: --deliver: {path}: a URL and headers have at most 10,000 characters\n"
    assert command("send", "--deliver", f"@{path}") == (2, "", told)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"smtp://ann:{PASSWORD}@localhost?to=a@example.org", "a password is a secret"),
        (f"slack://hooks.slack.com/services/{PASSWORD}", "the URL of slack: is a secret"),
        (f"apprise:mastodon://{PASSWORD}@host", "the URL of apprise: is a secret"),
        (f"ntfy://:{PASSWORD}@ntfy.sh/topic", "a password is a secret"),
        ("smtp://ann@localhost?to=a@example.org", "ann needs a password: put it into AIODIGEST_DELIVER_SECRET"),
        ("https://ann@localhost/hook", "ann needs a password: put it into AIODIGEST_DELIVER_SECRET"),
        ("ntfy://ann@localhost/topic", "ann needs a password: put it into AIODIGEST_DELIVER_SECRET"),
        ("smtp://localhost?cc=a@example.org", "there is no ?cc=: there are to, from, tls"),
        ("smtp://localhost?to=a@example.org&to=b@example.org", "may be given once"),
        ("smtp://localhost?to=a@example.org&tls=none&tls=starttls", "may be given once"),
        ("smtp://localhost/to?to=a@example.org", "may follow the host"),
        ("smtp://localhost:port?to=a@example.org", "its port must be a number"),
        ("smtp://?to=a@example.org", "needs a host"),
        ("smtp://localhost?to=nobody", "to must be"),
        (f"ftp://{PASSWORD}@localhost", "must be a URL of smtp:"),
        ("", "must be a URL of smtp:"),
        (f"https://hooks.slack.com/services/{PASSWORD}", "is it slack: and this URL?"),
        (f"https://discord.com/api/webhooks/1/{PASSWORD}", "is it discord: and this URL?"),
        ("env:NO_SUCH_VARIABLE", "there is no variable NO_SUCH_VARIABLE"),
        ("@/no/such/file", "/no/such/file: No such file"),
    ],
)
def test_a_url_that_cannot_be_used_is_told_in_a_line_that_quotes_no_secret(
    url: str, told: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIODIGEST_DELIVER_SECRET", raising=False)
    for names in (["send"], ["pipe", "--group-by", "repo"]):
        code, output, errors = command(*names, "--deliver", url)
        assert (code, output) == (2, "")
        [line] = errors.splitlines()
        assert told in line
        assert PASSWORD not in line


@pytest.mark.parametrize(
    "url",
    [
        "smtp://localhost?to=a@example.org",
        "smtp://ann:one@localhost?to=a@example.org",
        "ntfy://:one@localhost/topic",
        "slack:https://localhost/one",
        "apprise:json://localhost",
    ],
)
def test_a_secret_that_nothing_would_use_is_refused(
    url: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIODIGEST_DELIVER_SECRET", PASSWORD)
    monkeypatch.setenv("THE_URL", url)
    code, output, errors = command("send", "--deliver", "env:THE_URL")
    assert (code, output) == (2, "")
    [line] = errors.splitlines()
    assert "AIODIGEST_DELIVER_SECRET is set, and " in line
    assert PASSWORD not in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--deliver", "smtp://localhost?to=a@example.org", "--exec", "true"], "choose one"),
        (["--exec", "true", "--fields", "id"], "--exec gets JSON"),
        (["--exec", "true", "--collapse", "none"], "--exec gets JSON"),
        (["--exec", " "], "--exec needs a command"),
        (["--exec", "true", "--try-timeout", "1ms"], "--try-timeout must be at least 100ms"),
        (["--deliver", "smtp://localhost?to=a@example.org", "--fields", "id,,"], "--fields must be names"),
        (["--deliver", "smtp://localhost?to=a@example.org", "--template", "/no/file"], "No such file"),
        (["--deliver", "smtp://localhost?to=a@example.org", "--subject", "{{ nothing }}"], "names 'nothing'"),
        (["--deliver", "https://example.org/", "--subject", "news"], "webhooks get JSON"),
        (["--deliver", "https://example.org/", "--collapse", "none"], "webhooks get JSON"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: list[str], told: str, command: Command) -> None:
    for names in (["send"], ["pipe", "--group-by", "repo"]):
        code, output, errors = command(*names, *arguments)
        assert (code, output) == (2, "")
        [line] = errors.splitlines()
        assert told in line
    assert command("send")[0] == 2
    assert command("pipe", "--group-by", "repo", "--exec", "true", "--json")[0] == 2
    assert command("pipe", "--group-by", "repo", "--subject", "news")[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_installed_is_told_in_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("aiosmtplib", "httpcore2", "httpx2", "standardwebhooks", "apprise"):
        monkeypatch.setitem(sys.modules, library, None)
    for name in [name for name in sys.modules if name.startswith("aiodigest.channels._")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(sys.modules["aiodigest.channels"], name.rpartition(".")[2], raising=False)
    monkeypatch.setenv("THE_URL", f"{kind}://localhost/topic" if "smtp" not in kind else f"{kind}://localhost")
    with pytest.raises(ConfigurationError, match=r"is not installed: pip install 'aiodigest\[\w+\]'"):
        destination("env:THE_URL", None)


@pytest.mark.processes
@pytest.mark.parametrize("scheme", [scheme for scheme in KINDS if not scheme.startswith(("smtp", "https"))])
async def test_services_of_the_web_are_posted_to(scheme: str, pipe: Pipe) -> None:
    posted: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [size] = re.findall(rb"(?i)content-length: (\d+)", head)
        posted.append(head + await reader.readexactly(int(size)))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        host = f"127.0.0.1:{web.sockets[0].getsockname()[1]}/topic"
        url = {"http": f"http://{host}", "apprise": f"apprise:json://{host}"}.get(scheme, f"{scheme}:http://{host}")
        ended = await pipe("--deliver", "env:THE_URL", command="send", THE_URL=url)
    assert (ended[0], ended[2], ended[1][:13]) == (0, "", "delivered to ")
    assert b"This is a test of aiodigest" in posted[0]


# TLS


@asynccontextmanager
async def served(scheme: str, folder: Path) -> AsyncGenerator[tuple[str, Callable[[], int]]]:
    """Serve a scheme by TLS, for the authority in ``ca.pem``; yield a URL, and what counts the digests that came."""
    authority: Any = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    if scheme == "https":
        async with web_server(tls=context) as site:
            yield f"{site.url}/hook", lambda: len(site.requests)
    else:
        async with mail_server(tls=context, implicit=scheme == "smtps") as mailbox:
            query = "?to=dev@example.org" + "&tls=starttls" * (scheme == "smtp")
            yield f"{scheme}://localhost:{mailbox.port}{query}", lambda: len(mailbox.mails)


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["smtp", "smtps", "https"])
async def test_digests_go_over_tls_that_an_authority_of_ones_own_vouches_for(
    scheme: str, pipe: Pipe, tmp_path: Path
) -> None:
    async with served(scheme, tmp_path) as (url, count):
        options = ("--group-by", "repo", "--deliver", url)
        ended = await pipe(*options, input=lines("web", "api", "web"), SSL_CERT_FILE="ca.pem")
        assert ended == (0, "", "")
        assert count() == 2


@pytest.mark.processes
@pytest.mark.parametrize("scheme", ["smtp", "smtps", "https"])
async def test_a_certificate_that_is_not_trusted_is_told_once_and_nothing_is_sent(
    scheme: str, pipe: Pipe, tmp_path: Path
) -> None:
    async with served(scheme, tmp_path) as (url, count):
        code, output, errors = await pipe("--deliver", url, command="send")
        [line] = errors.splitlines()
        assert (code, output) == (69, "")
        assert line.startswith("aiodigest: not delivered: localhost:")
        assert "CERTIFICATE_VERIFY_FAILED" in line
        options = ("--group-by", "repo", "--deliver", url, "--retry-for", "3s")
        code, output, errors = await pipe(*options, input=lines("web", "api"))
        assert (code, output, count()) == (1, "", 0)
    assert errors.count(": check ") == 1
    assert "2 groups could not be delivered" in errors.splitlines()[-1]


# --exec


@pytest.mark.processes
async def test_a_command_gets_each_digest_as_the_json_of_pipe_and_its_output_passes(pipe: Pipe) -> None:
    given = lines("web", "web", "api")
    code, output, errors = await pipe("--group-by", "repo", "--id", "id", "--exec", "cat; echo seen >&2", input=given)
    assert (code, errors) == (0, "seen\nseen\n")
    found = {digest["key"]: digest for digest in map(json.loads, output.splitlines())}
    assert {key: len(digest["records"]) for key, digest in found.items()} == {"web": 2, "api": 1}
    assert list(found["api"]) == ["id", "key", "attempt", "iteration", "dropped", "records"]


@pytest.mark.processes
async def test_exit_code_65_rejects_and_the_last_line_of_the_errors_is_the_reason(
    pipe: Pipe, server: Server, namespace: str
) -> None:
    command = "echo before >&2; echo no such room >&2; exit 65"
    code, _, errors = await pipe("--group-by", "repo", "--exec", command, input=lines("web"))
    assert code == 1
    assert errors.startswith(f"before\naiodigest: pipe-{namespace}: digest ")
    async with left_in(server, namespace) as engine:
        [letter] = [letter async for letter in engine.dead_letters()]
    assert letter.reason == "the command ended with exit code 65: no such room"
    assert errors.count("no such room") == 1


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["exit 1", "kill -9 $$", "exit 64"])
async def test_any_other_ending_of_a_command_is_tried_again(ending: str, pipe: Pipe, tmp_path: Path) -> None:
    command = f"cat >> got; test -e tried || {{ touch tried; {ending}; }}"
    code, _, errors = await pipe("--group-by", "repo", "--exec", command, input=lines("web"))
    assert code == 0
    assert "attempt 1 to deliver 'web' failed" in errors
    tried = [json.loads(line)["attempt"] for line in (tmp_path / "got").read_text().splitlines()]
    assert tried == [1, 2]


@pytest.mark.processes
async def test_a_command_that_takes_too_long_is_killed_with_all_that_it_has_started(pipe: Pipe, tmp_path: Path) -> None:
    command = "sleep 1000 & echo $! > child; wait"
    code, output, errors = await pipe("--exec", command, "--try-timeout", "1s", command="send")
    assert (code, output) == (69, "")
    assert errors == "aiodigest: not delivered: the command took longer than 1 s, and was killed\n"
    child = int((tmp_path / "child").read_text())

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    until(is_gone, "the child of the command is gone")


LEAVES = "exec 3<&0; sleep 1000 <&3 >/dev/null & echo $! >> left; exit 0"  # which holds its pipes


def end_what_is_left(folder: Path) -> None:
    for process in map(int, (folder / "left").read_text().split()):
        os.kill(process, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["send", "pipe"])
async def test_an_exit_code_counts_whatever_the_command_leaves_running(name: str, pipe: Pipe, tmp_path: Path) -> None:
    options = ("--exec", LEAVES, "--try-timeout", "1h")
    grouped = ("--group-by", "repo") if name == "pipe" else ()
    code, _, errors = await pipe(*grouped, *options, command=name, input=lines("web"))
    end_what_is_left(tmp_path)
    assert (code, errors) == (0, "")


@pytest.mark.processes
async def test_the_time_of_a_try_is_over_although_a_child_outlives_the_command(pipe: Pipe, tmp_path: Path) -> None:
    command = "(setsid sh -c 'echo $$ > left; exec sleep 1000 >/dev/null'); exit 0"
    code, _, errors = await pipe("--exec", command, "--try-timeout", "1s", command="send")
    end_what_is_left(tmp_path)
    assert (code, errors) == (69, "aiodigest: not delivered: the command took longer than 1 s, and was killed\n")


@pytest.mark.processes
@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_commands_leave_running_takes_no_files_of_ours(
    new_event_loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    async def run() -> None:
        channel = Exec(f"cd {tmp_path}; {LEAVES}", 60)
        await channel(made_up("key"))
        before = len(os.listdir("/dev/fd"))
        await asyncio.gather(*(channel(made_up("key")) for _ in range(5)))
        assert len(os.listdir("/dev/fd")) < before + 5

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())
    end_what_is_left(tmp_path)


@pytest.mark.processes
def test_errors_of_a_command_that_nobody_reads_hold_up_nothing_else(tmp_path: Path) -> None:
    command = "echo x >> tried; head -c 3000000 /dev/zero | tr '\\0' '\\n' >&2; sleep 1000"
    arguments = ("pipe", "--group-by", "repo", "--exec", command, "--try-timeout", "1s", "--retry-for", "1h")
    process = subprocess.Popen(
        [sys.executable, "-m", "aiodigest", *arguments], env=environment(tmp_path), cwd=tmp_path,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(lines("web"))
        process.stdin.flush()
        tried = tmp_path / "tried"
        until(lambda: tried.exists() and len(tried.read_text().split()) == 2, "it is tried again")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert b"took longer than 1 s" in errors
    assert b"1 group could not be delivered" in errors.splitlines()[-1]


@pytest.mark.processes
def test_if_nobody_reads_what_commands_print_that_is_the_end(tmp_path: Path) -> None:
    with running(tmp_path, "pipe", "--group-by", "key", "--exec", "cat", read=False) as pipe:
        assert pipe.process.stdout is not None
        pipe.feed(ndjson([{"key": "first"}]))
        assert json.loads(pipe.process.stdout.readline())["key"] == "first"
        pipe.process.stdout.close()
        pipe.feed(ndjson([{"key": "second"}]))
        assert pipe.process.wait(DEADLINE) == 1  # although its input goes on
        pipe.end()
    [told] = pipe.errors.splitlines()
    assert b"standard output: Broken pipe; to go on: the same command. If it reads its input again" in told
    again = aiodigest(tmp_path, "pipe", "--group-by", "key", "--exec", "cat")
    assert [digest["key"] for digest in digests(again.stdout)] == ["second"]


@pytest.mark.processes
async def test_a_command_need_not_read_what_it_is_given_and_may_leave_something_running(pipe: Pipe) -> None:
    given = ndjson({"repo": "web", "text": "x" * 1000} for _ in range(400))
    command = "sleep 20 >/dev/null & echo $! >&2; exec true"
    code, output, errors = await pipe("--group-by", "repo", "--exec", command, input=given)
    os.kill(int(errors), signal.SIGKILL)
    assert (code, output) == (0, "")


# send


@pytest.mark.processes
@pytest.mark.parametrize(
    ("replies", "code", "told"),
    [
        ({}, 0, "delivered to smtp://localhost:"),
        ({"RCPT": "550 5.1.1 nobody"}, 1, "rejected, and not to be tried again: "),
        ({"RCPT": "451 later"}, 69, "not delivered: "),
        ({"end": "take and die"}, 69, "not delivered: "),
    ],
)
async def test_send_says_in_one_line_what_became_of_a_digest(
    replies: dict[str, str], code: int, told: str, pipe: Pipe
) -> None:
    async with mail_server(script(**replies)) as mailbox:
        found, output, errors = await pipe("--deliver", to(mailbox), command="send")
        [line] = (output + errors).splitlines()
        assert (found, line.removeprefix("aiodigest: ").startswith(told)) == (code, True), line
        assert bool(output) == (code == 0)
        found, output, errors = await pipe("--deliver", to(mailbox), "--json", command="send")
    assert (found, json.loads(output)["delivered"]) == (code, code == 0)


@pytest.mark.processes
def test_what_cannot_be_started_for_want_of_files_is_told_as_that(tmp_path: Path) -> None:
    script = 'ulimit -n 10; exec "$0" -m aiodigest send --exec true'
    ended = subprocess.run(
        ["/bin/sh", "-c", script, sys.executable], env=environment(tmp_path), capture_output=True, timeout=DEADLINE
    )
    told = b"aiodigest: not delivered: the command could not be started: Too many open files\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (69, b"", told)


def test_an_error_of_the_system_is_told_as_what_it_is(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Coroutine[Any, Any, object]) -> None:
        work.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "run", fail)
    assert command("send", "--exec", "true") == (69, "", "aiodigest: not delivered: Too many open files\n")
    stats = "stats", "--namespace", "mail", "--url", "redis://localhost:1"
    assert command(*stats) == (1, "", "aiodigest: Too many open files\n")


def test_what_is_sent_for_trying_out_reads_like_a_digest() -> None:
    made: Digest[Any] = made_up("key")
    assert made.key == "key"
    times = [record.timestamp for record in made.records]
    assert times == sorted(times)
    assert len(times) == 4
