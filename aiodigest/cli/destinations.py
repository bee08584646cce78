"""Destinations of digests besides standard output: commands, and channels by their URLs.

No argument shows their secrets. Channels are imported when one is made.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlsplit

import typer

from aiodigest import ConfigurationError, InvalidArgument
from aiodigest.cli.options import duration, parsed_option
from aiodigest.cli.rendering import without

if TYPE_CHECKING:
    from aiodigest.channels import Channel
    from aiodigest.rendering import Render

SECRET = "AIODIGEST_DELIVER_SECRET"  # what holds it
LONGEST = 10_000  # characters of a file with a URL and headers
TRY = 30.0  # seconds
SHOWN = "--subject, --template, --fields and --collapse"
SMTP_OPTIONS = "to", "from", "tls"

DELIVER = (
    "Where digests go: smtp://user@host:port?to=ADDRESS&from=ADDRESS, smtps://, https://, slack:, discord:, teams:, "
    "ntfy: or apprise: and a URL. @FILE or env:NAME for a URL that holds a secret, and headers of a webhook below it. "
    "It may name a host in a private network."
)
EXECUTE = (
    "A shell command that gets each digest as JSON on its standard input. It exits with 0 if it has delivered it, 65 "
    "if nobody ever can, or else to get it again."
)
Deliver: TypeAlias = Annotated[str | None, typer.Option("--deliver", metavar="URL", show_default=False, help=DELIVER)]
Execute: TypeAlias = Annotated[str | None, typer.Option("--exec", metavar="CMD", show_default=False, help=EXECUTE)]
Subject: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", show_default=False, help="The subject; {{ count }} and the like in it.")
]
TEMPLATE = "A template of Jinja2 for the text, or for HTML if .html is in the file's name."
File: TypeAlias = Annotated[Path | None, typer.Option("--template", metavar="FILE", show_default=False, help=TEMPLATE)]
FIELDS = "The fields that are shown of a line, the first as its title: id,actor.login,action."
Fields: TypeAlias = Annotated[str | None, typer.Option(metavar="NAMES", show_default=False, help=FIELDS)]
COLLAPSES = (
    "Which lines of a digest are shown once, with how often they came: those that differ in numbers, ids, addresses "
    "and times alone, equal ones, or none. [default: similar; equal if the first of --fields is an id]"
)
Collapse: TypeAlias = Annotated[
    Literal["similar", "equal", "none"] | None, typer.Option("--collapse", show_default=False, help=COLLAPSES)
]
TRIES = "Time limit of one delivery by --deliver or --exec. [default: 30s]"
TryTimeout: TypeAlias = Annotated[float, parsed_option("--try-timeout", TRIES, duration, "DURATION")]


@dataclass(frozen=True)
class Settings:
    """Settings of channels: how digests are shown, the secret, headers, and for one try the ``timeout`` in seconds."""

    render: Render
    secret: str | None
    headers: Mapping[str, str]
    timeout: float


@dataclass(frozen=True, repr=False)
class Destination:
    """Destination of digests. ``name`` tells it, and ``identity`` tells it from others; neither holds a secret.
    ``is_read`` says that people read what is sent."""

    name: str
    identity: str
    make: Callable[[], Channel]
    is_read: bool = False


def destination(
    deliver: str | None,
    execute: str | None,
    *,
    subject: str | None = None,
    template: Path | None = None,
    fields: str | None = None,
    collapse: str | None = None,
    tz: str | None = None,
    hidden: Sequence[Sequence[str]] = (),
    timeout: float = TRY,
) -> Destination | None:
    """Return where the options say that digests go; None if they name nothing. Fields at the paths ``hidden`` are not
    shown. Raises BadParameter and ConfigurationError."""
    if deliver is not None and execute is not None:
        raise typer.BadParameter("--deliver and --exec are two places: choose one")
    if timeout < 0.1:
        raise typer.BadParameter("--try-timeout must be at least 100ms")
    is_shown = not (subject is template is fields is collapse is None)
    if execute is not None:
        if is_shown:
            raise typer.BadParameter(f"--exec gets JSON, so that {SHOWN} say nothing")
        if not execute.strip():
            raise typer.BadParameter("--exec needs a command")
        return Destination("the command", f"exec:{execute}", lambda: _command(execute, timeout))
    if deliver is None:
        if not subject is template is None:
            raise typer.BadParameter("--subject and --template need --deliver")
        return None
    try:
        return _channel(deliver, is_shown, lambda: render_of(subject, template, fields, collapse, tz, hidden), timeout)
    except InvalidArgument as error:
        raise ConfigurationError(f"--deliver: {error}") from None


def render_of(
    subject: str | None,
    template: Path | None,
    fields: str | None,
    collapse: str | None,
    tz: str | None,
    hidden: Sequence[Sequence[str]],
) -> Render:
    """Return what shows digests as the options say. Raises ConfigurationError."""
    from aiodigest.channels.common import rendered_by

    made = None
    if not (subject is template is fields is collapse is tz is None):
        from aiodigest.rendering import Template

        of_html = template is not None and ".html" in template.name.lower()
        text, html = (None, template) if of_html else (template, None if template is None else "")
        names = None if fields is None else names_of(fields)
        alike = alike_of(collapse, names)
        made = Template(subject=subject, text=text, html=html, fields=names, collapse=alike, tz=tz or "UTC")
    render = rendered_by(made)
    return lambda digest: render(without(digest, hidden)) if hidden else render(digest)


def names_of(fields: str) -> list[str]:
    """Return the names of fields, which commas part."""
    names = [name.strip() for name in fields.split(",")]
    if not all(names):
        raise typer.BadParameter("--fields must be names with commas between them: id,actor.login,action")
    return names


def alike_of(collapse: str | None, names: Sequence[str] | None) -> Literal["similar", "equal"] | None:
    """Return which lines are shown as one, as the option says, or else what the title is: ids are all similar."""
    if collapse is None:
        is_id = bool(names) and names[0].rpartition(".")[2].lower() == "id"
        return "equal" if is_id else "similar"
    return "equal" if collapse == "equal" else "similar" if collapse == "similar" else None


def _command(command: str, timeout: float) -> Channel:
    from aiodigest.cli.execution import Exec

    return Exec(command, timeout)


# URLs


def _channel(given: str, is_shown: bool, render: Callable[[], Render], timeout: float) -> Destination:
    text, is_hidden, below = _read(given)
    scheme, _, rest = text.partition(":")
    scheme = scheme.lower()
    if any(line.partition(":")[0].lower() in KINDS for line in below):
        raise ConfigurationError("--deliver: a file or a variable holds one URL, and below it only headers")
    if scheme not in KINDS or not rest:
        kinds = ", ".join(f"{kind}:" for kind in KINDS)
        raise ConfigurationError(f"--deliver must be a URL of {kinds} or @FILE or env:NAME (it is not shown here)")
    kind = KINDS[scheme]
    parts = _split(text if kind.is_url else rest if "://" in rest else f"https:{rest}")
    if not is_hidden and (kind.is_secret or parts.password is not None):
        what = f"the URL of {scheme}:" if kind.is_secret else "a password"
        hide = "put the URL into a file, and give @FILE, or into a variable, and give env:NAME"
        other = f"; or the password into {SECRET}" * (not kind.is_secret)
        raise ConfigurationError(f"--deliver: {what} is a secret, and everybody sees arguments: {hide}{other}")
    if is_shown and not kind.is_rendered:
        raise typer.BadParameter(f"webhooks get JSON, so that {SHOWN} say nothing")
    secret = unquote(parts.password) if parts.password else os.environ.get(SECRET) or None
    if kind.channel == "Webhook" and (chat := CHATS.get(parts.hostname or "")):
        raise ConfigurationError(f"--deliver: {parts.hostname} takes no webhook: is it {chat}: and this URL?")
    if os.environ.get(SECRET) and not _takes_secret(kind, parts):
        raise ConfigurationError(f"--deliver: {SECRET} is set, and {scheme}: has no use for it here: leave one out")
    if below and kind.channel != "Webhook":
        raise ConfigurationError("--deliver: headers, below the URL, are for webhooks alone")
    import aiodigest.channels
    from aiodigest.rendering import plain

    settings = Settings(render() if kind.is_rendered else plain, secret, _headers(below), timeout)

    channel = kind.make(getattr(aiodigest.channels, kind.channel), parts, settings, rest)
    name = scheme if kind.is_secret else f"{scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
    identity = text if parts.password is None else text.replace(f":{parts.password}@", "@", 1)
    return Destination(name, identity, lambda: channel, kind.is_rendered)


def _takes_secret(kind: Kind, parts: SplitResult) -> bool:
    """Return whether a secret beside the URL would be used: as a password, a token, or a key that signs."""
    if kind.channel == "SMTP":
        return bool(parts.username) and not parts.password
    return kind.channel == "Webhook" or (kind.channel == "Ntfy" and not parts.password)


def _read(given: str) -> tuple[str, bool, Sequence[str]]:
    """Return a URL, whether it comes from a place that may hold secrets, and the lines below it."""
    if not given.startswith(("env:", "@")):
        return given.strip(), False, []
    if given.startswith("env:"):
        found = os.environ.get(given[4:], "")
        if not found.strip():
            raise ConfigurationError(f"--deliver: there is no variable {given[4:]}, or nothing is in it")
    else:
        try:
            with open(given[1:], encoding="utf-8") as file:
                found = file.read(LONGEST + 1)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--deliver: {given[1:]}: {getattr(error, 'strerror', None) or error}") from None
        if len(found) > LONGEST:
            raise ConfigurationError(f"--deliver: {given[1:]}: a URL and headers have at most {LONGEST:,} characters")
    url, *below = [line.strip() for line in found.split("\n") if line.strip()] or [""]
    return url, True, below


def _headers(lines: Sequence[str]) -> dict[str, str]:
    """Return the headers that the lines below a URL give."""
    pairs = [line.partition(":") for line in lines]
    if not all(name and colon for name, colon, _ in pairs):
        raise ConfigurationError("--deliver: below the URL, each line must be a header: 'Authorization: Bearer ...'")
    headers = {name.strip().lower(): (name.strip(), value.strip()) for name, _, value in pairs}
    if len(headers) < len(pairs):
        raise ConfigurationError("--deliver: below the URL, each header may be given once")
    return dict(headers.values())


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.port == 0 or not parts.hostname:
            raise ValueError
    except ValueError:
        raise ConfigurationError("--deliver: the URL needs a host, and its port must be a number") from None
    return parts


def _smtp(channel: Callable[..., Channel], parts: SplitResult, settings: Settings, rest: str) -> Channel:
    # "+" stays, as it has a meaning in addresses
    pairs = [pair.partition("=") for pair in parts.query.split("&") if pair]
    options = {name: unquote(value) for name, _, value in pairs}
    if len(options) < len(pairs):
        raise ConfigurationError(f"--deliver: each of {', '.join(SMTP_OPTIONS)} may be given once: to is one address")
    if unknown := sorted(options.keys() - {*SMTP_OPTIONS}):
        raise ConfigurationError(f"--deliver: there is no ?{unknown[0]}=: there are {', '.join(SMTP_OPTIONS)}")
    if parts.path.strip("/") or parts.fragment:
        raise ConfigurationError("--deliver: nothing but ?to=ADDRESS&from=ADDRESS may follow the host of a mail server")
    user = unquote(parts.username) if parts.username else None
    if user is not None and settings.secret is None:
        raise ConfigurationError(f"--deliver: {user} needs a password: put it into {SECRET}")
    sender = options.get("from") or (user if user and "@" in user else f"aiodigest@{platform.node() or 'localhost'}")
    tls = "implicit" if parts.scheme.lower() == "smtps" else options.get("tls")
    return channel(
        parts.hostname, parts.port, sender=sender, to=options.get("to") or None, tls=tls, render=settings.render,
        username=user, password=settings.secret if user else None, timeout=settings.timeout,
    )  # fmt: skip


def _login(parts: SplitResult, settings: Settings) -> tuple[str, str | None]:
    """Return the URL, with the user and the password if it has a user, and the secret if that is not the password."""
    host = parts.netloc.rpartition("@")[2]
    if not parts.username:
        return parts._replace(netloc=host).geturl(), settings.secret
    if parts.password:
        return parts.geturl(), os.environ.get(SECRET) or None
    if settings.secret is None:
        raise ConfigurationError(f"--deliver: {unquote(parts.username)} needs a password: put it into {SECRET}")
    return parts._replace(netloc=f"{parts.username}:{quote(settings.secret, safe='')}@{host}").geturl(), None


def _webhook(channel: Callable[..., Channel], parts: SplitResult, settings: Settings, rest: str) -> Channel:
    url, secret = _login(parts, settings)
    if parts.username and any(name.lower() == "authorization" for name in settings.headers):
        raise ConfigurationError(
            "--deliver: the user of the URL and the header Authorization are two logins: choose one"
        )
    # whoever gives an argument may reach what this machine reaches
    return channel(url, secrets=secret, headers=settings.headers, allow_private=True, timeout=settings.timeout)


def _chat(channel: Callable[..., Channel], parts: SplitResult, settings: Settings, rest: str) -> Channel:
    return channel(parts.geturl(), render=settings.render, allow_private=True, timeout=settings.timeout)


def _ntfy(channel: Callable[..., Channel], parts: SplitResult, settings: Settings, rest: str) -> Channel:
    url, secret = _login(parts, settings)
    made = {"render": settings.render, "allow_private": True, "timeout": settings.timeout}
    return channel(url, token=None if parts.username else secret, **made)


def _apprise(channel: Callable[..., Channel], parts: SplitResult, settings: Settings, rest: str) -> Channel:
    return channel(rest, render=settings.render, timeout=settings.timeout)


@dataclass(frozen=True)
class Kind:
    """Recipe for a channel from a URL: ``is_url`` if the scheme is the URL's own, ``is_secret`` if all of it is one,
    and ``is_rendered`` if people read what is sent."""

    channel: str
    make: Callable[[Any, SplitResult, Settings, str], Channel]
    is_url: bool = False
    is_secret: bool = False
    is_rendered: bool = True


CHATS = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord"}
KINDS = {
    "smtp": Kind("SMTP", _smtp, is_url=True),
    "smtps": Kind("SMTP", _smtp, is_url=True),
    "https": Kind("Webhook", _webhook, is_url=True, is_rendered=False),
    "http": Kind("Webhook", _webhook, is_url=True, is_rendered=False),
    "slack": Kind("Slack", _chat, is_secret=True),
    "discord": Kind("Discord", _chat, is_secret=True),
    "teams": Kind("Teams", _chat, is_secret=True),
    "ntfy": Kind("Ntfy", _ntfy),
    "apprise": Kind("Apprise", _apprise, is_secret=True),
}
