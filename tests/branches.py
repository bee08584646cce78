"""Marks the conditions of the scripts, so that a server that runs them tells which of their outcomes it has met.

A marked script answers what the script answers. It is sent in its place by the connections of a client's own class, as
the backend takes it over from any client; so neither the scripts nor whoever calls them know of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.connection import UnixDomainSocketConnection

from aiodigest.backends.redis.scripts import LUA, assemble, load_script

MET = "{branches}:met"  # a hash: numbers of outcomes
TOKEN = re.compile(
    r"""--[^\n]* | '(?:\\.|[^'\\\n])*' | "(?:\\.|[^"\\\n])*" | \b(?:if|elseif|while|then|do|function|end)\b""",
    re.VERBOSE,
)
ENDS = {"if": "then", "elseif": "then", "while": "do"}
MARKED = """local outcomes = {{}}
local function met(number, condition)
  outcomes[2 * number + (condition and 1 or 0)] = true
  return condition
end
local function run()
{script}
end
local answer = run()
local fields = {{}}
for outcome in pairs(outcomes) do
  fields[#fields + 1] = outcome
  fields[#fields + 1] = 1
end
if #fields > 0 then
  redis.call('HSET', '{met}', unpack(fields))
end
return answer
"""


def conditions(text: str) -> Iterator[tuple[int, int]]:
    """Give where each condition of a script begins and ends; none holds another, nor a long string or comment."""
    begin, awaited = 0, ""
    for token in TOKEN.finditer(text):
        word = token[0]
        if awaited:
            assert word not in (*ENDS, "function"), "a condition holds another block"
            if word == awaited:
                yield begin, token.start()
                awaited = ""
        elif word in ENDS:
            begin, awaited = token.end(), ENDS[word]


@cache
def part(name: str) -> str:
    """A file of the scripts as it is."""
    return (LUA / f"{name}.lua").read_text(encoding="utf-8")


def instead_of(url: str, choose: Callable[[bytes, bytes], bytes]) -> Redis:
    """A client for a backend, which runs scripts that are chosen, by what they are given, in place of those called."""

    class Connection(UnixDomainSocketConnection):
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            head, mark, rest = command.partition(b"EVALSHA\r\n$40\r\n") if type(command) is bytes else (b"", b"", b"")
            if mark and head.count(b"\r\n") == 2:  # it is the command's name, and no argument
                command = head + mark + choose(rest[:40], rest[40:]) + rest[40:]
            await super().send_packed_command(command, check_health)

    client = cast("Any", Redis).from_url(url)
    client.connection_pool.connection_class = Connection
    return client


class Branches:
    """The outcomes of every condition in some scripts, and in the helpers that they are made of."""

    def __init__(self, scripts: Iterable[str]) -> None:
        self.names: list[str] = []  # by the numbers under which they are met
        self._marked: dict[str, str] = {}  # by the names of files
        self._scripts = {name: self._mark(name) for name in scripts}
        self._instead: dict[bytes, bytes] = {}

    def _mark(self, name: str) -> str:
        constants = load_script(name).source.removesuffix(assemble(name, part))
        return MARKED.format(script=constants + assemble(name, self._marked_part), met=MET)

    def _marked_part(self, name: str) -> str:
        if name not in self._marked:
            self._marked[name] = self._mark_part(name)
        return self._marked[name]

    def _mark_part(self, name: str) -> str:
        text, marked, place = part(name), "", 0
        for begin, end in conditions(text):
            condition = " ".join(text[begin:end].split())
            marked += f"{text[place:begin]} met({len(self.names) // 2},{text[begin:end]}) "
            place = end
            line = text.count("\n", 0, begin) + 1
            self.names += [f"{name}.lua:{line} {condition}: {outcome}" for outcome in ("no", "yes")]
        return marked + text[place:]

    def load(self, client: Any) -> None:
        """Have a server know the marked scripts."""
        for name, script in self._scripts.items():
            self._instead[load_script(name).sha.encode()] = client.script_load(script).encode()

    def client(self, url: str) -> Redis:
        """A client for a backend, whose calls run the marked scripts."""
        return instead_of(url, lambda sha, _: self._instead.get(sha, sha))

    def take(self, client: Any) -> set[str]:
        """The outcomes that were met since the last time."""
        met, _ = client.pipeline().hkeys(MET).delete(MET).execute()
        return {self.names[int(number)] for number in met}
