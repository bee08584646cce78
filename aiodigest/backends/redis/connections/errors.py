"""Errors of redis-py, and error replies for one timeline of a script, as errors of aiodigest."""

from __future__ import annotations

import re
from typing import Literal

from redis import exceptions

from aiodigest.errors import AiodigestError, BackendUnavailable, ConfigurationError, InvalidState

UNAVAILABLE = {
    "LOADING": "it is loading its data",
    "MISCONF": "it cannot save its data and refuses writes",
    "NOREPLICAS": "it has too few replicas and refuses writes",
    "READONLY": "it is a replica and refuses writes",
    "OOM": "its memory is full (maxmemory)",
    "BUSY": "it is busy running a script",
    "MASTERDOWN": "its primary is down",
    "CLUSTERDOWN": "its cluster is down",
    "TRYAGAIN": "its slots are being moved",
    "ASK": "its slots are being moved",  # the node that is asked for knows nothing of what has not moved yet
    "UNKILLABLE": "it is busy running a script",
    "LATE": "the call came to it too late, and did nothing",
}
DEMOTED = {"READONLY", "MASTERDOWN"}  # it is no primary any more: another server is, and must be looked for
STRANGER = {"NOAUTH", "WRONGPASS"}
FORBIDDEN = {*STRANGER, "NOPERM"}
# how Redis before 7.2, and Valkey, refuse a user's command in a script: without a code
REFUSED = ("The user executing the script can't", "ACL failure in script")
UNSERVED = {  # what a server says that no setting of ours can serve
    "undeclared key|passed using the KEYS array": "its scripts may not make up keys",
    "nknown (Redis |Valkey )?command (called from script|.(EVALSHA|EVAL|XREAD|WAIT)\\b)": "it lacks a command",
}
MOVING = "access a non local key"  # so is the first read of guard.lua refused; Redis and Valkey begin differently


def code_of(error: Exception | str) -> str:
    """Return the code of an error reply, as in ``OOM``; '' if it has none."""
    text = str(error)
    if re.search(r"unauthenticated (multi)?bulk length", text):  # a call too long for who has not logged in
        return "NOAUTH"
    # before Redis 7 the error of a command in a script stands inside another one
    inner = re.search(r"@user_script: ?\d+: -?([A-Z]{3,}) ", text)
    if inner:
        return inner.group(1)
    # redis-py takes the code out of the text, and wraps an error that it meets while it connects by a unix socket
    for each in (error, error.__cause__) if isinstance(error, Exception) else ():
        if isinstance(each, (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)):
            return "WRONGPASS"
        if isinstance(each, exceptions.RedisError) and each.status_code not in (None, "ERR"):
            return each.status_code
    outer = re.match(r"-?([A-Z]{3,})\b", text)
    return outer.group(1) if outer else ""


def refused(error: AiodigestError) -> Literal["login", "keys", "command", ""]:
    """Return the right that a server refuses a user, from an error that `explain` made; '' if none."""
    cause = error.__cause__
    if not isinstance(error, ConfigurationError) or not isinstance(cause, Exception):
        return ""
    code, text = code_of(cause), str(cause)
    if code in STRANGER:
        return "login"
    if code not in FORBIDDEN and not any(words in text for words in REFUSED):
        return ""
    return "keys" if re.search(r"access (a|one of the|at least one of the) keys?\b", text) else "command"


def explain(
    error: Exception | str, where: str, stored: Literal["no", "unknown"] = "no", hint: str = ""
) -> AiodigestError:
    """Turn an error of redis-py, or an error reply's text, into one of ours; with a hint, if there was no reply."""
    code, text = code_of(error), str(error).strip().removeprefix("-")
    if MOVING in text:
        code = "TRYAGAIN"
    if code in UNAVAILABLE:
        told = "" if MOVING in text else f" ({text})"  # that text is of scripts, and tells nothing of the slots
        return BackendUnavailable(f"{where} is unavailable: {UNAVAILABLE[code]}{told}", stored="no")
    if code in FORBIDDEN or any(words in text for words in REFUSED):
        return ConfigurationError(f"{where} refuses access: {text}")
    if code in ("MOVED", "CROSSSLOT"):
        return ConfigurationError(f"{where} is part of a cluster: give redis+cluster://host:port ({text})")
    if "cluster support disabled" in text:
        return ConfigurationError(f"{where} is no cluster: give redis://host:port ({text})")
    if "DB index" in text:
        return ConfigurationError(f"{where}: {text}; how many databases a server has is a setting of its own")
    for words, reason in UNSERVED.items():
        if re.search(words, text):
            told = "docs/scaling.md tells which servers it runs on"
            return ConfigurationError(f"{where} cannot serve aiodigest: {reason} ({text}); {told}")
    if code == "WRONGTYPE":
        return InvalidState(f"a key has been written by another program: {text}")
    garbled = isinstance(error, exceptions.RedisError) and not isinstance(error, exceptions.ResponseError)
    if garbled or isinstance(error, OSError):  # OSError: what asyncio raises, its TimeoutError included
        reason = text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
        if "CERTIFICATE_VERIFY_FAILED" in reason:  # unavailable, since it may be renewed at this moment
            reason += " Give the host that its certificate names, and the CA's file as ssl_ca_certs=FILE"
        reason += f" ({hint})" if hint else ""
        return BackendUnavailable(f"{where} is unavailable: {reason}", stored=stored)
    return AiodigestError(f"{where} answered: {text}")
